#include "daemon/doctor_probes.h"

#include <netdb.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <asio/ip/address.hpp>
#include <cstring>
#include <fstream>
#include <future>
#include <sstream>
#include <thread>

#include "base/clock.h"
#include "base/fail.h"
#include "base/fd.h"
#include "base/start_thread.h"
#include "base/unix_socket.h"
#include "daemon/doctor_pairs.h"
#include "local.pb.h"
#include "local/page.h"
#include "membership/node.h"
#include "transport/advertise.h"
#include "transport/socket_address.h"
#include "transport/tcp/kernel_tls.h"

namespace rejoin::daemon {

namespace {

// In how many PID namespaces a process has a number; 0: it is not seen.
std::size_t namespaces_of(pid_t process) {
  std::ifstream status(fmt::format("/proc/{}/status", process));
  std::string line;
  while (std::getline(status, line)) {
    if (!line.starts_with("NSpid:")) continue;
    std::istringstream numbers(line.substr(6));
    std::size_t count = 0;
    for (pid_t number = 0; numbers >> number;) ++count;
    return count;
  }
  return 0;
}

// The next message, or nothing in time. `unavailable`: it has hung up.
Result<std::optional<proto::ToTrainer>> next_message(const Fd& socket, TimePoint until) {
  constexpr std::size_t most = 64 * KiB;
  for (;;) {
    auto received = receive_with_fds(socket, most);
    if (!received) return tl::unexpected(received.error());
    if (*received) {
      proto::ToTrainer message;
      if (!message.ParseFromArray((*received)->bytes.data(), static_cast<int>((*received)->bytes.size())))
        return fail(ErrorCode::corrupt, "it sends bytes that are no message");
      return message;
    }
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - SteadyClock().now()).count();
    if (left <= 0) return std::nullopt;
    pollfd look{socket.get(), POLLIN | POLLRDHUP, 0};
    if (::poll(&look, 1, static_cast<int>(left)) < 0 && errno != EINTR) return fail_errno("poll");
  }
}

// Comes as a trainer does that has more descriptors to send than fit at once. A daemon of this version asks for the
// next ones; then it is told that this is all.
std::optional<std::string> answer_of(const Fd& socket, std::chrono::milliseconds patience) {
  const TimePoint until = SteadyClock().now() + patience;
  proto::FromTrainer hello;
  membership::Versions().put_into(*hello.mutable_hello());
  hello.mutable_hello()->set_layout(local::kLayoutVersion);
  hello.mutable_hello()->set_descriptors(2);
  const auto something = make_eventfd();
  if (!something) return something.error().message;
  if (auto sent = send_with_fds(socket, as_bytes(hello.SerializeAsString()), {something->get()}); !sent)
    return sent.error().message;
  const auto answer = next_message(socket, until);
  if (!answer) return answer.error().message;
  if (!*answer) return std::nullopt;
  if ((*answer)->has_refusal()) return (*answer)->refusal();
  if (!(*answer)->has_more()) return "it answers what no rejoind of this version does";
  proto::FromTrainer leave;
  leave.mutable_leave()->set_why("rejoin doctor has seen that this daemon answers");
  if (auto sent = send_with_fds(socket, as_bytes(leave.SerializeAsString()), {}); !sent) return sent.error().message;
  const auto left = next_message(socket, until);
  if (!left) return left.error().message;
  if (!*left) return std::nullopt;
  return (*left)->has_left() ? "" : "it answers what no rejoind of this version does";
}

// As the transport shm finds out whether a filter of system calls forbids it.
std::string why_no_reading() {
  std::uint64_t there = 1, seen = 0;
  const iovec local{&seen, sizeof seen}, own{&there, sizeof there};
  return ::process_vm_readv(::getpid(), &local, 1, &own, 1, 0) == sizeof seen ? "" : std::strerror(errno);
}

}  // namespace

SocketFacts probe_socket(const std::string& socket, std::chrono::milliseconds patience) {
  SocketFacts facts;
  facts.own_user = ::geteuid();
  struct stat file {};
  if (::stat(socket.c_str(), &file) == 0 && !S_ISSOCK(file.st_mode)) {  // connecting would find that nobody listens
    facts.error = ENOTSOCK;
    return facts;
  }
  errno = 0;
  const auto connected = connect_unix(socket);
  if (!connected) {
    facts.error = errno != 0 ? errno : EINVAL;
    return facts;
  }
  const auto credentials = peer_credentials(*connected);
  if (!credentials) {
    facts.error = EPROTO;
    return facts;
  }
  facts.user = credentials->uid;
  facts.user_known = facts.user != facts.own_user || of_this_user(*credentials, socket);
  facts.process = credentials->pid;
  facts.same_processes = facts.process != 0 && namespaces_of(facts.process) == namespaces_of(::getpid());
  if (facts.user == facts.own_user && facts.user_known) facts.answer = answer_of(*connected, patience);
  if (facts.process != 0)
    if (const auto process = make_pidfd(facts.process); !process) facts.no_pidfd = process.error().message;
  facts.no_reading = why_no_reading();
  return facts;
}

// Nothing ends a question to a name server that does not answer: whoever waits for it is left behind.
Result<std::vector<std::string>> addresses_of(const std::string& host, std::chrono::milliseconds patience) {
  auto found = std::make_shared<std::promise<Result<std::vector<std::string>>>>();
  auto later = found->get_future();
  std::thread asker;
  auto started = start_thread(asker, [found, host] {
    addrinfo hints{}, *all = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    if (const int error = ::getaddrinfo(host.c_str(), nullptr, &hints, &all); error != 0)
      return found->set_value(fail(ErrorCode::unavailable, "its name is not resolved: {}", ::gai_strerror(error)));
    std::vector<std::string> addresses;
    for (const auto* one = all; one != nullptr; one = one->ai_next) {
      sockaddr_storage address{};
      std::memcpy(&address, one->ai_addr, one->ai_addrlen);
      addresses.push_back(transport::SocketAddress::split(transport::SocketAddress::format(address)).value().host);
    }
    ::freeaddrinfo(all);
    found->set_value(std::move(addresses));
  });
  if (!started) return tl::unexpected(started.error());
  asker.detach();
  if (later.wait_for(patience) == std::future_status::ready) return later.get();
  return fail(ErrorCode::timeout, "its name is not resolved in {} ms", patience.count());
}

Result<std::string> resolved(const std::string& address, std::chrono::milliseconds patience) {
  const auto parts = transport::SocketAddress::split(address);
  if (!parts) return tl::unexpected(parts.error());
  const auto all = addresses_of(parts->host, patience);
  if (!all) return tl::unexpected(all.error());
  return transport::with_port(all->front(), parts->port);
}

HostFacts probe_host(const std::string& host, std::chrono::milliseconds patience) {
  HostFacts facts;
  const auto addresses = addresses_of(host, patience);
  if (!addresses) {
    facts.unresolved = addresses.error().message;
    return facts;
  }
  const std::string& first = addresses->front();
  asio::error_code error;
  facts.loopback = asio::ip::make_address(first, error).is_loopback();
  facts.own = transport::SocketAddress::check_own({first, 0}).has_value();
  facts.link_local = transport::is_link_local({transport::with_port(first, 0)});
  const auto of_v6 = [](const std::string& one) { return one.find(':') != std::string::npos; };
  facts.v6 = std::ranges::any_of(*addresses, of_v6);
  facts.v4 = !std::ranges::all_of(*addresses, of_v6);
  return facts;
}

LimitFacts probe_limits() {
  LimitFacts facts;
  rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) == 0) facts.memlock = limit.rlim_cur;
  if (::getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    facts.descriptors = limit.rlim_cur;
    facts.descriptors_at_most = limit.rlim_max;
  }
  return facts;
}

Result<> probe_locking(std::uint64_t bytes) {
  const auto memory = Mapping::anonymous(bytes);
  if (!memory) return tl::unexpected(memory.error());
  if (::mlock(memory->data(), memory->size()) != 0) return fail_errno("mlock");
  return {};
}

double clock_ahead_ms(std::int64_t theirs_us, std::int64_t ours_us, double error_ms) {
  constexpr double us_per_ms = 1000;
  return static_cast<double>(theirs_us - ours_us) / us_per_ms + error_ms;
}

Probes real_probes(const DoctorSettings& s) {
  Probes probes;
  probes.keys = [&s](const std::string& own, const std::string& other) {
    const auto together = check(s.certificates);
    if (!together) return Result<JobKeys>(tl::unexpected(together.error()));
    return JobKeys::read(own, other, s.certificates);
  };
  probes.socket = [&s](const std::string& socket) { return probe_socket(socket, s.patience); };
  probes.coordinators = [&s](const std::string& addresses, const JobKeys& keys) {
    return probe_coordinators(addresses, keys, s.patience);
  };
  probes.host = [&s](const std::string& host) { return probe_host(host, s.patience); };
  probes.own_hosts_towards = [&s](const std::string& peer) {
    return transport::own_hosts_towards(resolved(peer, s.patience).value_or(""));
  };
  probes.peer = [&s](const std::string& peer, const JobKeys& keys) {
    return probe_peer(peer, s.transport, keys, s.patience);
  };
  probes.pairs = [&s](const JobKeys& keys) {
    return try_pairs({.nodes = s.pairs,
                      .transport = s.transport,
                      .listen = s.data_listen,
                      .secrets = keys.data_secrets(),
                      .patience = s.patience,
                      .wait = s.wait});
  };
  probes.limits = probe_limits;
  probes.lock_memory = probe_locking;
  probes.ports = [&s] { return probe_ports(s.transport); };
  probes.gpus = [&s] { return probe_gpus(s.transport); };
  probes.buses = [] { return probe_buses(); };
  probes.kernel_tls = transport::tcp::kernel_tls::available;
  probes.store = [&s] { return probe_store(s.store, s.patience); };
  return probes;
}

}  // namespace rejoin::daemon
