#include "daemon/store_factory.h"

#include "base/bytes.h"
#include "base/deadlines.h"
#include "base/fail.h"
#include "base/log.h"
#include "daemon/auth.h"
#include "daemon/etcd_store.h"

namespace rejoin::daemon {

namespace {

// Of a file for TLS with etcd, which gRPC takes as it is.
Result<> check_pem(const char* flag, const std::string& path, bool secret) {
  if (path.empty()) return {};
  const auto pem = secret ? read_secret(flag, path, MiB) : read_file(flag, path, MiB);
  if (!pem) return tl::unexpected(pem.error());
  if (pem->find("-----BEGIN ") == pem->npos)
    return fail(ErrorCode::invalid_argument, "{} {} is not in PEM form; convert it with openssl", flag, path);
  return {};
}

}  // namespace

Result<> check_files(const StoreSettings& s) {
  if (!s.shared()) return {};
  if (auto options = etcd_options(s, {}); !options) return tl::unexpected(options.error());
  return {};
}

Result<EtcdOptions> etcd_options(const StoreSettings& s, Duration silence) {
  EtcdOptions options;
  options.endpoints = s.endpoints();
  options.prefix = s.prefix();
  options.deadline = std::chrono::duration_cast<std::chrono::milliseconds>(deadlines::kStoreTry.of(silence));
  options.longest = std::chrono::duration_cast<std::chrono::milliseconds>(deadlines::kLongestStoreTry.of(silence));
  options.ca_file = s.ca;
  options.cert_file = s.cert;
  options.key_file = s.key;
  options.user = s.user;
  if (auto right = check_pem("--etcd-ca", s.ca, false); !right) return tl::unexpected(right.error());
  if (auto right = check_pem("--etcd-cert", s.cert, false); !right) return tl::unexpected(right.error());
  if (auto right = check_pem("--etcd-key", s.key, true); !right) return tl::unexpected(right.error());
  if (!s.password_file.empty()) {
    auto password = read_secret("--etcd-password-file", s.password_file);
    if (!password) return tl::unexpected(password.error());
    options.password = std::move(*password);
    options.read_password = [file = s.password_file] { return read_secret("--etcd-password-file", file); };
  }
  return options;
}

Result<std::unique_ptr<membership::Store>> open_store(asio::io_context& io, const StoreSettings& s, Duration silence,
                                                      std::function<void(const std::string&)> stuck) {
  auto options = etcd_options(s, silence);
  if (!options) return tl::unexpected(options.error());
  options->stuck = std::move(stuck);
  if (!s.user.empty() && s.ca.empty())
    spdlog::warn("--etcd-user {} without --etcd-ca: its password goes to etcd in clear", s.user);
  auto store = EtcdStore::create(io, std::move(*options));
  if (!store) return fail(store.error().code, "--store {}: {}", s.store, store.error().message);
  return std::unique_ptr<membership::Store>(std::move(*store));
}

}  // namespace rejoin::daemon
