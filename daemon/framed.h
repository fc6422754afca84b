// A control connection: length-prefixed messages over TCP, after both sides have proved the job key. From then on each
// length and each message is followed by a tag (auth.h), so that what arrives is what the other side has sent, in that
// order; anything else ends the connection. One io_context thread.
#pragma once

#include <asio.hpp>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "base/bytes.h"
#include "base/result.h"
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

  Framed(asio::ip::tcp::socket socket, const JobKey& key, bool server)
      : socket_(std::move(socket)), timer_(socket_.get_executor()), key_(key), server_(server) {}
  // Begins the proof; it must be over within `deadline`.
  void start(Handlers handlers, std::chrono::milliseconds deadline);
  void send(const std::string& message);  // before it is open nothing is sent
  void close();
  std::string remote() const { return remote_; }
  // Whether it was ended here, for what the other side did not prove; not where that side went, or came to be silent.
  bool refused() const { return refused_; }

 private:
  enum class Stage { nonce, proof, open };
  void read_length();
  void on_length();
  void read_body(std::uint32_t length);
  void on_frame();
  void end(const std::string& why);
  void refuse(const std::string& why);
  void write_next();
  void write_frame(const std::string& message);
  void open();
  Mac mac(const char* purpose) const;

  asio::ip::tcp::socket socket_;
  asio::steady_timer timer_;
  const JobKey& key_;
  const bool server_;
  std::shared_ptr<const Handlers> handlers_;  // whoever calls one keeps it: it may end this connection
  Stage stage_ = Stage::nonce;
  Nonce mine_{}, theirs_{};
  std::optional<Tagger> out_tags_, in_tags_;  // once open
  std::array<std::byte, 4 + 16> length_{};    // and its tag, once open
  std::string body_;                          // likewise
  std::deque<std::string> out_;
  std::size_t out_bytes_ = 0;
  bool closed_ = false, refused_ = false;
  std::string remote_;
};

}  // namespace rejoin::daemon
