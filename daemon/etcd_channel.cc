#include "daemon/etcd_channel.h"

#include <grpc/support/log.h>
#include <grpcpp/create_channel.h>

#include "base/log.h"
#include "daemon/etcd_client_parts.h"

namespace rejoin::daemon::etcd_client {

namespace {

// etcd closes connections that ping more often than every 5 s, or without a call. gRPC also gives up a connection whose
// bytes nobody has acknowledged for kUnheardMs, which is what finds a cut link here.
constexpr int kPingMs = 10000, kUnheardMs = 2000;
// An answer has 64 entries at most, and each of them came in one request: etcd takes 1.5 MiB.
constexpr int kMostAnswer = 128 << 20;

}  // namespace

Result<std::shared_ptr<grpc::ChannelCredentials>> credentials_of(const EtcdOptions& options) {
  if (options.ca_file.empty() && options.cert_file.empty()) return grpc::InsecureChannelCredentials();
  auto ca = read_pem(options.ca_file), certificate = read_pem(options.cert_file), key = read_pem(options.key_file);
  for (const auto* text : {&ca, &certificate, &key})
    if (!*text) return tl::unexpected(text->error());
  return grpc::SslCredentials({.pem_root_certs = *ca, .pem_private_key = *key, .pem_cert_chain = *certificate});
}

std::shared_ptr<grpc::Channel> connect(const std::string& target, const std::string& endpoint,
                                       const std::shared_ptr<grpc::ChannelCredentials>& credentials) {
  grpc::ChannelArguments arguments;
  arguments.SetString(GRPC_ARG_DEFAULT_AUTHORITY, endpoint);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, kFirstPauseMs);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kMostPauseMs);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kConnectMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kPingMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kUnheardMs);
  arguments.SetInt(GRPC_ARG_SERVICE_CONFIG_DISABLE_RESOLUTION, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // what one client does delays no other
  arguments.SetMaxReceiveMessageSize(kMostAnswer);
  return grpc::CreateCustomChannel(target, credentials, arguments);
}

void log_quietly() {
  ::gpr_set_log_function([](gpr_log_func_args* line) {
    if (std::string_view(line->message).starts_with("assertion failed"))
      return spdlog::error("gRPC: {}:{}: {}", line->file, line->line, line->message);
    spdlog::debug("gRPC: {}", line->message);
  });
}

}  // namespace rejoin::daemon::etcd_client
