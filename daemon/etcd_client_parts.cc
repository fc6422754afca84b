#include "daemon/etcd_client_parts.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "base/fail.h"
#include "base/fd.h"
#include "base/log.h"
#include "base/number.h"
#include "base/start_thread.h"
#include "base/text.h"

namespace rejoin::daemon::etcd_client {

namespace {

// What etcd won't do at any of its members, and what to do about it.
struct Remedy {
  const char* text;
  const char* remedy;
};
constexpr const char* kWrongPassword = "invalid user ID or password";
constexpr auto kFirstPause = std::chrono::milliseconds(100), kMostPause = std::chrono::milliseconds(5000);
constexpr Remedy kRemedies[] = {
    {"database space exceeded",
     "free it with 'etcdctl compact REVISION' and 'etcdctl defrag --cluster', then 'etcdctl alarm disarm'; run etcd "
     "with --auto-compaction-mode and --auto-compaction-retention, and raise its --quota-backend-bytes"},
    {"request is too large", "raise etcd's --max-request-bytes"},
    {"received message larger than max", "raise etcd's --max-request-bytes"},
    {"too many operations", "raise etcd's --max-txn-ops to 128, its default"},
    {"permission denied",
     "let the user read and write the job's keys: 'etcdctl role grant-permission ROLE --prefix=true readwrite "
     "/rejoin/JOB/'"},
    {kWrongPassword,
     "check the user's name and its password. It is tried again ever less often, in the end every 5 s, and its file is "
     "read again then: put the password there"},
    {"user name is empty", "etcd asks for a user: give one, with its password"},
};

}  // namespace

Result<std::string> read_pem(const std::string& path) {
  if (path.empty()) return {};
  const std::string what = fmt::format("file {} for TLS with etcd", path);
  const Fd file(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));  // a pipe would wait for a writer
  if (!file) return fail_errno(what);
  std::string text(1 << 20, '\0');  // and no more
  const ssize_t got = ::read(file.get(), text.data(), text.size());
  if (got < 0) return fail_errno(what);
  text.resize(static_cast<std::size_t>(got));
  if (text.find("-----BEGIN ") == text.npos)
    return fail(ErrorCode::invalid_argument, "{} is not in PEM form; convert it with openssl", what);
  return text;
}

Result<> check(const EtcdOptions& options) {
  if (options.endpoints.empty()) return fail(ErrorCode::invalid_argument, "no etcd endpoint is given, as HOST:PORT");
  for (const std::string& endpoint : options.endpoints) {
    const auto colon = endpoint.rfind(':');
    std::uint16_t port = 0;
    const std::string_view host = std::string_view(endpoint).substr(0, colon);
    if (const auto right = lacks_brackets(endpoint))
      return fail(ErrorCode::invalid_argument,
                  "etcd endpoint {} is not HOST:PORT: an IPv6 address is to be in brackets; write e.g. {}", endpoint,
                  *right);
    if (endpoint.find("://") != endpoint.npos || colon == endpoint.npos || colon == 0 ||
        host.starts_with('[') != host.ends_with(']') ||
        !parse_number(std::string_view(endpoint).substr(colon + 1), port) || port == 0)
      return fail(
          ErrorCode::invalid_argument,
          "etcd endpoint {} is not HOST:PORT; write e.g. 10.0.0.1:2379, without http:// (a CA file asks for TLS)",
          endpoint);
  }
  if (options.cert_file.empty() != options.key_file.empty())
    return fail(ErrorCode::invalid_argument, "of a certificate for etcd and its key only one is given; give {}, too",
                options.key_file.empty() ? "the key's file" : "the certificate's file");
  return {};
}

const char* remedy_for(const std::string& text) {
  for (const Remedy& known : kRemedies)
    if (text.find(known.text) != text.npos) return known.remedy;
  return nullptr;
}

bool asks_for_token(const std::string& text) {
  return text.find("invalid auth token") != text.npos || text.find("user name is empty") != text.npos ||
         text.find("revision of auth store is old") != text.npos;
}

std::string Clusters::on_answer(std::size_t endpoint, std::uint64_t cluster) {
  if (cluster == 0) return {};
  const bool news = std::exchange(of_[endpoint], cluster) != cluster;
  if (cluster_ == 0) cluster_ = cluster, first_ = endpoints_[endpoint];
  if (cluster == cluster_) return {};
  if (std::ranges::all_of(of_, [&](std::uint64_t one) { return one == cluster; })) {
    spdlog::warn("etcd at {} is another cluster now, {:x}, and was {:x}: that one counts from here on",
                 fmt::join(endpoints_, ", "), cluster, cluster_);
    cluster_ = cluster;
    first_ = endpoints_[endpoint];
    return {};
  }
  std::string why = fmt::format(
      "it is of another cluster ({:x}) than {} ({:x}), and has other data: give one cluster's addresses. Where all of "
      "etcd was put back as another cluster, start this again",
      cluster, first_, cluster_);
  if (news) spdlog::warn("etcd at {}: {}", endpoints_[endpoint], why);
  return why;
}

bool refuses_password(const std::string& text) { return text.find(kWrongPassword) != text.npos; }

const std::string& Password::show() {
  if (!refusal_ || !read_) return password_;
  auto again = read_();
  unread_ = again ? "" : again.error().message;
  if (again) password_ = std::move(*again);
  return password_;
}

Error Password::on_refused(Error refusal, TimePoint now) {
  pause_ = std::clamp<Duration>(2 * pause_, kFirstPause, kMostPause);
  again_ = now + pause_;
  if (!unread_.empty()) refusal.message += fmt::format("; it can't be read again: {}", unread_);
  refusal_ = refusal;
  return refusal;
}

// All at once, as gRPC has them.
Result<> has_threads() {
  std::mutex mutex;
  std::condition_variable changed;
  bool over = false;
  std::array<std::thread, kThreads> threads;
  Result<> started;
  for (auto& thread : threads) {
    started = start_thread(thread, [&] {
      std::unique_lock lock(mutex);
      changed.wait(lock, [&] { return over; });
    });
    if (!started) break;
  }
  {
    const std::lock_guard lock(mutex);
    over = true;
    changed.notify_all();
  }
  for (auto& thread : threads)
    if (thread.joinable()) thread.join();
  if (!started)
    return fail(started.error().code, "gRPC, which speaks with etcd, needs {} threads: {}", kThreads,
                started.error().message);
  return {};
}

}  // namespace rejoin::daemon::etcd_client
