#include "examples/demo_etcd.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <random>
#include <thread>

#include "base/bytes.h"
#include "base/fail.h"
#include "base/fd.h"
#include "examples/demo_process.h"
#include "examples/interrupt.h"

namespace rejoin::demo {

namespace {

constexpr const char* kProgram = "etcd";              // as PATH has it
constexpr auto kPatience = std::chrono::seconds(20);  // until all members answer

// A loopback address that nobody else uses: neither another demo nor a connection that the system gives a port to gets
// one of a member that is down.
std::string own_host() {
  std::random_device random;
  std::uniform_int_distribution<int> of(1, 254);
  return fmt::format("127.{}.{}.{}", of(random), of(random), of(random));
}

// One that nobody uses now.
Result<std::string> free_address(const std::string& host) {
  sockaddr_in at{};
  at.sin_family = AF_INET;
  ::inet_pton(AF_INET, host.c_str(), &at.sin_addr);
  socklen_t size = sizeof at;
  const Fd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&at), size) != 0 ||
      ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&at), &size) != 0)
    return fail_errno(fmt::format("a port of {} for etcd", host));
  return fmt::format("{}:{}", host, ntohs(at.sin_port));
}

}  // namespace

Result<> Etcd::check() {
  auto pid = spawn({kProgram, "--version"}, "/dev/null");
  if (!pid) return tl::unexpected(pid.error());
  int status = 0;
  ::waitpid(*pid, &status, 0);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return {};
  return fail(ErrorCode::not_found,
              "--store etcd: this machine has no program '{}'; install it ('apt install etcd-server' on Debian)",
              kProgram);
}

Etcd::~Etcd() {
  for (const auto& member : members_) end(member.pid);
}

std::string Etcd::name(std::size_t member) { return fmt::format("etcd{}", member); }

Result<> Etcd::start() {
  members_.resize(kMembers);
  const std::string host = own_host();
  for (std::size_t i = 0; i < kMembers; ++i) {
    for (std::string* one : {&members_[i].client, &members_[i].peer}) {
      auto address = free_address(host);
      if (!address) return tl::unexpected(address.error());
      *one = *address;
    }
    cluster_ += fmt::format("{}{}=http://{}", i == 0 ? "" : ",", name(i), members_[i].peer);
  }
  for (std::size_t i = 0; i < kMembers; ++i)
    if (auto started = restart(i); !started) return started;
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  for (std::size_t i = 0; i < kMembers;) {
    if (auto on = unless_interrupted(); !on) return on;
    if (healthy(i)) {
      ++i;
      continue;
    }
    const bool ended = ::waitpid(members_[i].pid, nullptr, WNOHANG) == members_[i].pid;
    if (ended) members_[i].pid = 0;
    if (ended || std::chrono::steady_clock::now() > deadline) {
      std::ifstream in(fmt::format("{}/{}.out", directory_, name(i)));
      std::string last;
      for (std::string line; std::getline(in, line);) last = line;
      return fail(ErrorCode::unavailable, "{} {}; its output ends with: {}", name(i),
                  ended ? "ended before it was up" : fmt::format("was not up within {} s", kPatience.count()), last);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return {};
}

Result<> Etcd::restart(std::size_t i) {
  const std::string client = "http://" + members_[i].client, peer = "http://" + members_[i].peer;
  // A change of etcd's leader takes about a second with these times.
  auto pid = spawn({kProgram,
                    "--name",
                    name(i),
                    "--data-dir",
                    fmt::format("{}/{}", directory_, name(i)),
                    "--listen-client-urls",
                    client,
                    "--advertise-client-urls",
                    client,
                    "--listen-peer-urls",
                    peer,
                    "--initial-advertise-peer-urls",
                    peer,
                    "--initial-cluster",
                    cluster_,
                    "--initial-cluster-token",
                    directory_,
                    "--heartbeat-interval=50",
                    "--election-timeout=500",
                    "--logger=zap",
                    "--log-level=warn"},
                   fmt::format("{}/{}.out", directory_, name(i)));
  if (!pid) return tl::unexpected(pid.error());
  members_[i].pid = *pid;
  return {};
}

std::string Etcd::endpoints() const {
  std::string all;
  for (const auto& member : members_) all += (all.empty() ? "" : ",") + member.client;
  return all;
}

bool Etcd::healthy(std::size_t member) const {
  return get(members_[member].client, "/health").find("\"health\":\"true\"") != std::string::npos;
}

std::optional<std::size_t> Etcd::leader() const {
  for (std::size_t i = 0; i < members_.size(); ++i)
    if (get(members_[i].client, "/metrics").find("\netcd_server_is_leader 1") != std::string::npos) return i;
  return std::nullopt;
}

void Etcd::signal(std::size_t member, int signal) {
  if (members_[member].pid > 0) ::kill(members_[member].pid, signal);
}

void Etcd::kill(std::size_t member) { end(std::exchange(members_[member].pid, 0)); }

std::optional<std::size_t> Etcd::find(int pid) const {
  for (std::size_t i = 0; i < members_.size(); ++i)
    if (members_[i].pid == pid) return i;
  return std::nullopt;
}

}  // namespace rejoin::demo
