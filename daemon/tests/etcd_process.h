// A cluster of real etcd processes on this machine, for tests; their data is gone at the end.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <array>
#include <memory>
#include <random>

#include "tests/process.h"

namespace rejoin::test {

class EtcdCluster {
 public:
  struct Options {
    std::size_t members = 1;
    std::vector<std::string> flags;  // for each member
    bool tls = false;                // the flags have the certificates
    bool sync = false;               // the disk keeps what is written, even if this machine dies
  };
  explicit EtcdCluster(Options options) : options_(std::move(options)), members_(options_.members) {
    for (Member& member : members_)
      for (std::uint16_t* port : {&member.client, &member.peer, &member.metrics}) *port = free_port();
    for (std::size_t i = 0; i < members_.size(); ++i) restart(i);
    wait_until_healthy();
  }

  static std::string program(const std::string& name = "etcd") {
    for (const char* directory : {"/usr/bin/", "/usr/local/bin/"})
      if (::access((directory + name).c_str(), X_OK) == 0) return directory + name;
    return "";
  }

  std::string endpoint(std::size_t i) const { return address(members_[i].client); }
  std::vector<std::string> endpoints() const {
    std::vector<std::string> all;
    for (std::size_t i = 0; i < members_.size(); ++i) all.push_back(endpoint(i));
    return all;
  }
  std::string output(std::size_t i) const { return read_file(file(i, "out")); }

  void kill(std::size_t i) { members_[i].process.reset(); }
  void stop(std::size_t i) {
    ::kill(members_[i].process->pid(), SIGSTOP);
    ::waitpid(members_[i].process->pid(), nullptr, WUNTRACED);  // until all of its threads have
  }
  void resume(std::size_t i) { ::kill(members_[i].process->pid(), SIGCONT); }
  // With the data that it has; it need not be ready yet.
  void restart(std::size_t i) {
    members_[i].process.reset();
    std::vector<std::string> arguments{program(),
                                       "--name",
                                       name(i),
                                       "--data-dir",
                                       file(i, "data"),
                                       "--listen-client-urls",
                                       client_url(i),
                                       "--advertise-client-urls",
                                       client_url(i),
                                       "--listen-peer-urls",
                                       peer_url(i),
                                       "--initial-advertise-peer-urls",
                                       peer_url(i),
                                       "--listen-metrics-urls",
                                       "http://" + address(members_[i].metrics),
                                       "--initial-cluster",
                                       initial_cluster(),
                                       "--heartbeat-interval=40",
                                       "--election-timeout=400",
                                       "--bcrypt-cost=4",
                                       "--logger=zap",
                                       "--log-level=warn"};
    if (!options_.sync) arguments.push_back("--unsafe-no-fsync");
    arguments.insert(arguments.end(), options_.flags.begin(), options_.flags.end());
    members_[i].process = std::make_unique<Process>(arguments, file(i, "out"));
  }

  // Whether it says that it can answer as of now, which takes a majority.
  bool healthy(std::size_t i) const {
    return get(members_[i].metrics, "/health").find("\"health\":\"true\"") != std::string::npos;
  }
  bool leads(std::size_t i) const {
    return get(members_[i].metrics, "/metrics").find("\netcd_server_is_leader 1") != std::string::npos;
  }
  bool wait_until_healthy() const {
    return eventually([this] {
      for (std::size_t i = 0; i < members_.size(); ++i)
        if (!healthy(i)) return false;
      return true;
    });
  }
  std::size_t leader() const {
    std::size_t found = 0;
    eventually([&] {
      for (found = 0; found < members_.size(); ++found)
        if (leads(found)) return true;
      return false;
    });
    return found;
  }

 private:
  struct Member {
    std::uint16_t client = 0, peer = 0, metrics = 0;
    std::unique_ptr<Process> process;
  };

  // Below those that the system gives to connections: one of them might get the port of a member that is down.
  static std::uint16_t free_port() {
    static std::mt19937 random{std::random_device{}()};
    for (;;) {
      const auto port = static_cast<std::uint16_t>(std::uniform_int_distribution<int>(20000, 31999)(random));
      const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
      const auto to = loopback(port);
      const bool free = ::bind(socket, reinterpret_cast<const sockaddr*>(&to), sizeof to) == 0;
      ::close(socket);
      if (free) return port;
    }
  }
  static sockaddr_in loopback(std::uint16_t port) {
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(port);
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return to;
  }
  static std::string address(std::uint16_t port) { return "127.0.0.1:" + std::to_string(port); }
  // By HTTP; empty where nobody answers in time.
  static std::string get(std::uint16_t port, const std::string& path) {
    const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const timeval patience{.tv_sec = 0, .tv_usec = 300000};
    ::setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    const auto to = loopback(port);
    const std::string question = "GET " + path + " HTTP/1.0\r\n\r\n";
    std::string answer;
    if (::connect(socket, reinterpret_cast<const sockaddr*>(&to), sizeof to) == 0 &&
        ::send(socket, question.data(), question.size(), MSG_NOSIGNAL) > 0) {
      std::array<char, 4096> bytes{};
      for (ssize_t got = 0; (got = ::recv(socket, bytes.data(), bytes.size(), 0)) > 0;)
        answer.append(bytes.data(), static_cast<std::size_t>(got));
    }
    ::close(socket);
    return answer;
  }

  static std::string name(std::size_t i) { return "m" + std::to_string(i); }
  std::string file(std::size_t i, const std::string& what) const { return scratch_.path + "/" + name(i) + "." + what; }
  std::string client_url(std::size_t i) const { return (options_.tls ? "https://" : "http://") + endpoint(i); }
  std::string peer_url(std::size_t i) const { return "http://" + address(members_[i].peer); }
  std::string initial_cluster() const {
    std::string all;
    for (std::size_t i = 0; i < members_.size(); ++i) all += (i == 0 ? "" : ",") + name(i) + "=" + peer_url(i);
    return all;
  }

  const Options options_;
  Scratch scratch_;
  std::vector<Member> members_;  // they end before their data goes
};

}  // namespace rejoin::test
