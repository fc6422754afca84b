// A control connection: length-prefixed messages over TLS 1.3, where both sides have proven the job key
// (control_tls.h). What arrives is what the other side has sent, in that order, and nobody else can read it; anything
// else ends the connection. One io_context thread.
#pragma once

#include <array>
#include <asio.hpp>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <string>

#include "base/bytes.h"
#include "base/refusals.h"
#include "daemon/auth.h"

namespace rejoin::daemon {

class Framed : public std::enable_shared_from_this<Framed> {
 public:
  static constexpr std::uint32_t kMaxFrame = 16 * MiB;
  static constexpr std::size_t kMaxUnsent = 256 * MiB;  // then the peer is taken for one that reads nothing
  struct Handlers {
    std::function<void()> ready;  // authenticated
    std::function<void(std::string_view)> message;
    std::function<void(const std::string& why)> closed;  // once; nothing follows
  };

  // `host`: of a client, by what name or address it has asked for its server, whose certificate must be for that.
  Framed(asio::ip::tcp::socket socket, const JobKeys& keys, bool server, std::string host = {});
  ~Framed();
  // Begins the handshake; it must be over within `deadline`, and so must the proof of the job key. A server's
  // connection also ends where the other's system acknowledges nothing for as long, whether or not anything is said.
  void start(Handlers handlers, std::chrono::milliseconds deadline);
  void send(const std::string& message);  // before it is open nothing is sent
  void close();
  // The last that is sent. What still comes is not heard; the other side closes the connection, or the deadline does.
  void send_last(const std::string& message, std::chrono::milliseconds deadline);
  // Nothing more is sent. `over` is called once, when the other side has read all and closed it, or it has broken, but
  // not where it is closed here; what still comes is not heard.
  void finish(std::function<void()> over);
  // Ends it, as one that has not proven the job key. A server counts it by its kind.
  void refuse(refusals::Why kind, const std::string& why);
  std::string remote() const { return remote_; }
  // For how long the other end's system has acknowledged nothing, where something is to be acknowledged; else zero.
  std::chrono::milliseconds unacknowledged_for() const;
  bool repeats() const;  // what was lost, and nothing has been acknowledged since
  // Whether it was ended for what either side did not prove; not where the other side went, or came to be silent.
  bool refused() const { return refused_; }

 private:
  struct Tls;
  void on_handshake(const asio::error_code& error);
  // Where certificates were shown.
  void prove();
  void hear_proof();
  void on_proof();
  void open();
  void on_end(const asio::error_code& error);
  void read_length();
  void on_length();
  void read_body(std::uint32_t length);
  void end(const std::string& why);
  void write_next();
  void send_end();

  const std::unique_ptr<Tls> tls_;
  asio::steady_timer timer_;
  const JobKeys& keys_;
  const bool server_;
  std::shared_ptr<const Handlers> handlers_;  // whoever calls one keeps it: it may end this connection
  std::array<std::byte, 4> length_{};
  std::string body_;
  std::deque<std::string> out_;
  std::size_t out_bytes_ = 0;
  bool open_ = false, closed_ = false, refused_ = false, finishing_ = false;
  std::string remote_;
};

}  // namespace rejoin::daemon
