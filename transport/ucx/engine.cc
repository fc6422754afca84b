#include "transport/ucx/engine.h"

#include <mutex>

#include "base/fail.h"
#include "base/log.h"
#include "transport/ucx/address.h"

namespace rejoin::transport::ucx {

bool may_use_tcp(const std::string& transports) {
  return transports.starts_with('^') || transports.find("tcp") != std::string::npos ||
         transports.find("all") != std::string::npos;
}

Result<std::unique_ptr<Engine>> make_engine(const Options& options) { return UcxEngine::make(options); }

Result<std::unique_ptr<Engine>> UcxEngine::make(const Options& options) {
  std::unique_ptr<UcxEngine> engine(new UcxEngine());
  if (auto started = engine->start(options); !started) return tl::unexpected(started.error());
  return engine;
}

Result<> UcxEngine::start(const Options& options) {
  if (auto there = load_ucx(); !there) return tl::unexpected(there.error());
  options_ = options;
  bounces_ = may_use_tcp(options.transports);
  if (static std::once_flag said; bounces_)
    std::call_once(said, [&] {
      logger().warn(
          "ucx:{} may go over UCX's TCP, in which UCX 1.13.1 has crashed where connections broke and were made again "
          "(docs/transports.md): use tcp, or a list of RDMA transports",
          options.transports);
    });
  // UCX's own lines about a peer that died are no news to us: they come back as events.
  ucx().set_global_option("LOG_LEVEL", "fatal");
  ucx().set_global_option("HANDLE_ERRORS", "none");

  ucp_config_t* config = nullptr;
  if (auto status = ucx().config_read("REJOIN", nullptr, &config); status != UCS_OK)
    return fail(ErrorCode::unavailable, "UCX configuration: {}", ucx().status_string(status));
  const std::string threshold = std::to_string(options.rendezvous_threshold);
  ucx().config_modify(config, "TLS", options.transports.c_str());
  ucx().config_modify(config, "RNDV_THRESH", threshold.c_str());
  ucx().config_modify(config, "KEEPALIVE_INTERVAL", "200ms");

  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  params.name = "rejoin";
  auto status = ucx().init(&params, config, &context_);
  ucx().config_release(config);
  if (status != UCS_OK)
    return fail(ErrorCode::unavailable, "UCX can't start with transports '{}': {}; 'ucx_info -d' lists what is here",
                options.transports, ucx().status_string(status));

  ucp_worker_params_t worker_params{};
  worker_params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  worker_params.thread_mode = UCS_THREAD_MODE_SINGLE;
  if (status = ucx().worker_create(context_, &worker_params, &worker_); status != UCS_OK)
    return fail(ErrorCode::unavailable, "UCX worker with transports '{}': {}", options.transports,
                ucx().status_string(status));
  if (status = ucx().worker_get_efd(worker_, &event_fd_); status != UCS_OK)
    return fail(ErrorCode::unavailable, "UCX can't sleep with transports '{}': {}", options.transports,
                ucx().status_string(status));

  const auto handle = [&](unsigned id, ucp_am_recv_callback_t callback) {
    ucp_am_handler_param_t handler{};
    handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
    handler.id = id;
    handler.cb = callback;
    handler.arg = this;
    return ucx().worker_set_am_recv_handler(worker_, &handler);
  };
  for (auto set : {handle(wire::call, receive<wire::call, wire::Call>),
                   handle(wire::challenge, receive<wire::challenge, wire::Challenge>),
                   handle(wire::hello, receive<wire::hello, wire::Hello>),
                   handle(wire::welcome, receive<wire::welcome, wire::Welcome>),
                   handle(wire::goodbye, receive<wire::goodbye, wire::Goodbye>),
                   handle(wire::message, receive<wire::message, wire::Message>),
                   handle(wire::write, receive<wire::write, wire::Write>),
                   handle(wire::acknowledge, receive<wire::acknowledge, wire::Acknowledge>),
                   handle(wire::read_request, receive<wire::read_request, wire::ReadRequest>),
                   handle(wire::read_data, receive<wire::read_data, wire::ReadData>)})
    if (set != UCS_OK) return fail(ErrorCode::unavailable, "UCX active messages: {}", ucx().status_string(set));

  ucp_address_t* address = nullptr;
  std::size_t length = 0;
  if (status = ucx().worker_get_address(worker_, &address, &length); status != UCS_OK)
    return fail(ErrorCode::unavailable, "UCX address: {}", ucx().status_string(status));
  const auto* bytes = reinterpret_cast<const std::byte*>(address);
  address_.assign(bytes, bytes + length);
  ucx().worker_release_address(worker_, address);
  return {};
}

UcxEngine::~UcxEngine() {
  while (!endpoints_.empty()) close(EndpointId(endpoints_.begin()->first));
  if (worker_ != nullptr) ucx().worker_destroy(worker_);
  if (context_ != nullptr) ucx().cleanup(context_);
}

Result<Address> UcxEngine::listen(const Address&) {
  listening_ = true;
  return Address{format_address(address_)};
}

Result<RegionId> UcxEngine::register_region(std::span<std::byte> memory, MemoryKind kind, Access access) {
  if (kind != MemoryKind::host)
    return fail(ErrorCode::unreachable, "this build of the UCX backend has host memory only");
  return regions_.add(memory, access);
}

void UcxEngine::deregister(RegionId id) {
  Region* region = regions_.find(id);
  if (region == nullptr) return;
  regions_.revoke_key(id);
  cut_off(id);
  // What is landing ends by our own progress, since the receiver pulls.
  drain([&] { return region->busy == 0; });
  regions_.remove(id);
}

RemoteRegion UcxEngine::remote(RegionId region) const { return regions_.remote(region); }

bool UcxEngine::arm() {
  if (!events_.empty() || !errors_.empty() || !calls_.empty() || !endings_.empty()) return false;
  return ucx().worker_arm(worker_) == UCS_OK;
}

}  // namespace rejoin::transport::ucx
