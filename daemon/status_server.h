// HTTP on a local port, for people and their tools: libmicrohttpd speaks it, in the io_context's thread. Whoever
// reaches the port may ask; each caller has one request, a few seconds and little memory ("Status" in
// docs/design-notes.md).
#pragma once

#include <asio.hpp>
#include <functional>
#include <memory>
#include <set>
#include <vector>

#include "base/clock.h"
#include "base/fd.h"
#include "base/result.h"

struct MHD_Daemon;
struct MHD_Connection;

namespace rejoin::daemon {

class StatusServer {
 public:
  static constexpr std::size_t kMostRequests = 64;            // at a time; for more the oldest go
  static constexpr std::size_t kMostMemory = 16384;           // bytes for a request and the head of its answer
  static constexpr auto kPatience = std::chrono::seconds(5);  // with a caller, for all of it

  struct Answer {
    unsigned code = 200;
    std::string type = "text/plain; charset=utf-8";
    std::shared_ptr<const std::string> body;
    std::string policy = "default-src 'none'";  // Content-Security-Policy
  };
  using Source = std::function<Answer(const std::string& path)>;  // called in the io_context's thread
  static Result<std::unique_ptr<StatusServer>> start(asio::io_context& io, const std::string& listen, Source source,
                                                     Duration patience = kPatience);
  ~StatusServer();
  std::string address() const { return address_; }
  std::size_t callers() const { return callers_.size(); }  // now; for tests

 private:
  struct Caller;
  StatusServer(asio::io_context& io, Source source, Duration patience)
      : io_(io),
        acceptor_(io),
        again_(io),
        due_(io),
        ready_(io),
        hung_up_(io),
        source_(std::move(source)),
        patience_(patience) {}
  Result<> start_http();
  void accept();
  void take(asio::ip::tcp::socket socket);
  void make_room();
  void work();
  void watch();
  void watch_for_ends();
  void drop_halves();
  bool answer(MHD_Connection* connection, const char* path, const char* method) const;

  asio::io_context& io_;
  asio::ip::tcp::acceptor acceptor_;
  asio::steady_timer again_;  // to accept, when there was no descriptor
  asio::steady_timer due_;    // when the library wants to be called, whatever happens
  asio::posix::stream_descriptor ready_;
  asio::posix::stream_descriptor hung_up_;  // an epoll: which callers will say no more
  std::set<Caller*> halves_;                // of these, as far as they have yet to ask
  std::vector<Caller*> callers_;            // oldest first
  MHD_Daemon* http_ = nullptr;
  bool full_ = false;  // nobody is accepted
  const Source source_;
  const Duration patience_;
  std::string address_;
};

}  // namespace rejoin::daemon
