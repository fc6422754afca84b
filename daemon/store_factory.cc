#include "daemon/store_factory.h"

#include "base/deadlines.h"
#include "base/fail.h"
#include "base/log.h"
#include "daemon/auth.h"
#include "daemon/certificates.h"
#include "daemon/etcd_store.h"

namespace rejoin::daemon {

namespace {

// Of gRPC, what it can't read has no words, and a part of a file is the whole.
Result<> check_pem(const StoreSettings& s) {
  for (const auto& [flag, path] : {std::pair{"--etcd-ca", &s.ca}, {"--etcd-cert", &s.cert}})
    if (auto right = path->empty() ? Result<>() : check_certificates(flag, *path); !right) return right;
  return s.key.empty() ? Result<>() : check_private_key("--etcd-key", s.key);
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
  if (auto right = check_pem(s); !right) return tl::unexpected(right.error());
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
