#include "daemon/framed.h"

#include <fmt/format.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <asio.hpp>
#include <asio/ssl/stream.hpp>

#include "daemon/control_tls.h"
#include "daemon/listen.h"

namespace rejoin::daemon {

namespace {
constexpr const char* kOtherKey = "its job key differs from ours; give both the same --job-key-file";
// What a caller does not know who has met none that knows a key.
constexpr const char* kOtherPort = "; --connect takes its --listen address, not its --status";

void set(int socket, int level, int name, int value) { (void)::setsockopt(socket, level, name, &value, sizeof value); }

tcp_info info_of(int socket) {
  tcp_info info{};
  socklen_t length = sizeof info;
  (void)::getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &length);
  return info;
}

// What was lost is sent again at the same pace, not at half of it each time: after a short outage the next try comes
// soon. Linux does so for the first six tries, where as little is under way as here.
void send_again_soon(int socket) { set(socket, IPPROTO_TCP, TCP_THIN_LINEAR_TIMEOUTS, 1); }

// A machine that loses its power, or the way between, ends no connection, and who says little would never find out.
void end_without_acknowledgement(int socket, std::chrono::milliseconds limit) {
  set(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(limit.count()));
  const int probe_after = std::max(1, static_cast<int>(limit / std::chrono::seconds(4)));  // seconds
  set(socket, IPPROTO_TCP, TCP_KEEPIDLE, probe_after);
  set(socket, IPPROTO_TCP, TCP_KEEPINTVL, probe_after);
  set(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
}
}  // namespace

struct Framed::Tls {
  Tls(asio::ip::tcp::socket socket, const JobKeys& keys) : stream(std::move(socket), keys.control().context()) {}
  asio::ssl::stream<asio::ip::tcp::socket> stream;
  PeerCertificate peer;
  JobKeys::ControlTls::ClientProof proof{};
  Mac answer{};
  SSL* ssl() { return stream.native_handle(); }
};

Framed::Framed(asio::ip::tcp::socket socket, const JobKeys& keys, bool server, std::string host)
    : tls_(std::make_unique<Tls>(std::move(socket), keys)),
      timer_(tls_->stream.get_executor()),
      keys_(keys),
      server_(server) {
  const CertificateFiles& files = keys.control().files();
  // A server may pass over the key that it is offered and show a certificate: without any we know none, so that fails.
  if (!files.given() && !server) tls_->stream.set_verify_mode(asio::ssl::verify_peer);
  if (!files.given()) return;
  tls_->peer.files = &files;
  tls_->peer.host = std::move(host);
  examine(tls_->ssl(), tls_->peer, server);
}

Framed::~Framed() = default;

void Framed::start(Handlers handlers, std::chrono::milliseconds deadline) {
  handlers_ = std::make_shared<const Handlers>(std::move(handlers));
  asio::error_code ignored;
  auto& socket = tls_->stream.next_layer();
  socket.set_option(asio::ip::tcp::no_delay(true), ignored);
  send_again_soon(socket.native_handle());
  if (server_) end_without_acknowledgement(socket.native_handle(), deadline);
  const auto endpoint = socket.remote_endpoint(ignored);
  remote_ = ignored ? "?" : text_of(endpoint);
  timer_.expires_after(deadline);
  timer_.async_wait([self = shared_from_this()](asio::error_code error) {
    if (error || self->open_) return;
    // A coordinator may be stopped for a while, or have too much to do: that is no refusal, and says nothing of its
    // key.
    if (self->server_) self->refuse(refusals::Why::no_proof, "it did not prove the job key in time");
    else self->end("it takes the call and does not answer (it is stopped or too busy, or this process was)");
  });
  using asio::ssl::stream_base;
  tls_->stream.async_handshake(server_ ? stream_base::server : stream_base::client,
                               [self = shared_from_this()](asio::error_code error) { self->on_handshake(error); });
}

void Framed::on_handshake(const asio::error_code& error) {
  if (closed_) return;
  if (error) return on_end(error);
  if (!keys_.control().files().given()) {
    if (!keys_.control().proved_the_key(tls_->ssl())) return refuse(refusals::Why::key, "it did not prove the job key");
    return open();
  }
  if (server_) hear_proof();
  else prove();
}

// Of a client. Where the server does not take our certificate, that is heard only here.
void Framed::prove() {
  tls_->proof = keys_.control().prove(tls_->ssl());
  asio::async_write(tls_->stream, asio::buffer(&tls_->proof, sizeof tls_->proof),
                    [self = shared_from_this()](asio::error_code failed, std::size_t) {
                      // What the server said before it went is still to be read.
                      if (self->closed_) return;
                      asio::async_read(self->tls_->stream, asio::buffer(self->tls_->answer),
                                       [self, failed](asio::error_code error, std::size_t) {
                                         if (self->closed_) return;
                                         if (error) return self->on_end(error);
                                         if (failed) return self->on_end(failed);
                                         if (!self->keys_.control().is_answer(self->tls_->ssl(), self->tls_->answer))
                                           return self->refuse(refusals::Why::key, kOtherKey);
                                         self->open();
                                       });
                    });
}

void Framed::hear_proof() {
  asio::async_read(tls_->stream, asio::buffer(&tls_->proof, sizeof tls_->proof),
                   [self = shared_from_this()](asio::error_code error, std::size_t) {
                     if (self->closed_) return;
                     if (error) return self->on_end(error);
                     self->on_proof();
                   });
}

// A client without the right key hears so: the answer proves nothing.
void Framed::on_proof() {
  const auto answer = keys_.control().answer(tls_->ssl(), tls_->proof);
  tls_->answer = answer.value_or(Mac{});
  asio::async_write(tls_->stream, asio::buffer(tls_->answer),
                    [self = shared_from_this(), proven = answer.has_value()](asio::error_code error, std::size_t) {
                      if (self->closed_) return;
                      if (!proven) return self->refuse(refusals::Why::key, kOtherKey);
                      if (error) return self->on_end(error);
                      self->open();
                    });
}

void Framed::open() {
  open_ = true;
  timer_.cancel();
  const auto handlers = handlers_;
  handlers->ready();
  if (!closed_) read_length();
}

void Framed::on_end(const asio::error_code& error) {
  const bool calls = !open_ && !server_;
  if (!open_)
    if (const auto why = keys_.control().why_refused(error, tls_->peer))
      return refuse(why->kind, why->text + (calls && why->kind == refusals::Why::protocol ? kOtherPort : ""));
  const bool closed = error == asio::error::eof || error == asio::ssl::error::stream_truncated;
  if (!closed && error.category() == asio::error::get_ssl_category())
    return end(fmt::format("what came was damaged, or from somebody else ({})", error.message()));
  end((closed ? "it closed the connection" : error.message()) + (calls ? kOtherPort : ""));
}

void Framed::read_length() {
  asio::async_read(tls_->stream, asio::buffer(length_),
                   [self = shared_from_this()](asio::error_code error, std::size_t) {
                     if (error) return self->on_end(error);
                     self->on_length();
                   });
}

void Framed::on_length() {
  std::uint32_t length = 0;
  for (std::size_t i = 0; i < length_.size(); ++i) length |= std::to_integer<std::uint32_t>(length_[i]) << (8 * i);
  if (length > kMaxFrame)
    return end(fmt::format("it sent a frame of {} bytes, over the limit of {}", length, kMaxFrame));
  read_body(length);
}

void Framed::read_body(std::uint32_t length) {
  body_.resize(length);
  asio::async_read(tls_->stream, asio::buffer(body_), [self = shared_from_this()](asio::error_code error, std::size_t) {
    if (error) return self->on_end(error);
    if (const auto handlers = self->handlers_) handlers->message(self->body_);
    if (!self->closed_) self->read_length();
  });
}

void Framed::send(const std::string& message) {
  if (!open_ || closed_ || finishing_) return;
  if (message.size() > kMaxFrame)  // the peer would close the connection, and the same would follow again
    return end(
        fmt::format("a message for it has {} bytes, over the limit of {}: fewer ranks or replicas at one "
                    "connection need less",
                    message.size(), kMaxFrame));
  const auto length = static_cast<std::uint32_t>(message.size());
  std::string frame(length_.size(), '\0');
  for (std::size_t i = 0; i < frame.size(); ++i) frame[i] = static_cast<char>(length >> (8 * i));
  frame += message;
  out_bytes_ += frame.size();
  out_.push_back(std::move(frame));
  if (out_.size() == 1) write_next();
  if (out_bytes_ > kMaxUnsent) end("it does not read what is sent to it");
}

void Framed::send_last(const std::string& message, std::chrono::milliseconds deadline) {
  handlers_ = nullptr;
  send(message);
  timer_.expires_after(deadline);
  timer_.async_wait([self = shared_from_this()](asio::error_code error) {
    if (!error) self->end("closed");
  });
}

void Framed::write_next() {
  asio::async_write(tls_->stream, asio::buffer(out_.front()),
                    [self = shared_from_this()](asio::error_code error, std::size_t) {
                      if (self->closed_) return;
                      if (error) return self->on_end(error);
                      self->out_bytes_ -= self->out_.front().size();
                      self->out_.pop_front();
                      if (!self->out_.empty()) self->write_next();
                      else if (self->finishing_) self->send_end();
                    });
}

void Framed::finish(std::function<void()> over) {
  handlers_ = std::make_shared<const Handlers>(
      Handlers{.ready = [] {}, .message = [](auto) {}, .closed = [over = std::move(over)](const auto&) { over(); }});
  finishing_ = true;
  if (out_.empty()) send_end();
}

void Framed::send_end() {
  asio::error_code error;
  tls_->stream.next_layer().shutdown(asio::ip::tcp::socket::shutdown_send, error);
  if (error) end(error.message());
}

std::chrono::milliseconds Framed::unacknowledged_for() const {
  const tcp_info info = info_of(tls_->stream.next_layer().native_handle());
  return std::chrono::milliseconds(info.tcpi_unacked == 0 ? 0 : info.tcpi_last_ack_recv);
}

bool Framed::repeats() const {
  const tcp_info info = info_of(tls_->stream.next_layer().native_handle());
  return info.tcpi_unacked > 0 && info.tcpi_retransmits > 0;
}

void Framed::end(const std::string& why) {
  if (std::exchange(closed_, true)) return;
  asio::error_code ignored;
  tls_->stream.next_layer().close(ignored);
  timer_.cancel();
  if (const auto handlers = std::exchange(handlers_, nullptr)) handlers->closed(why);
}

void Framed::refuse(refusals::Why kind, const std::string& why) {
  if (server_ && !closed_) refusals::count(kind);
  refused_ = true;
  end(why);
}

void Framed::close() {
  handlers_ = nullptr;
  end("closed");
}

}  // namespace rejoin::daemon
