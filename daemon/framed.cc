#include "daemon/framed.h"

#include <fmt/format.h>
namespace rejoin::daemon {

namespace {
constexpr std::string_view kMagic = "rejoin control 2";  // the control protocol's version
constexpr std::size_t kLength = 4, kTag = std::tuple_size_v<Tagger::Tag>;
}  // namespace

Mac Framed::mac(const char* purpose) const {
  const Nonce& server = server_ ? mine_ : theirs_;
  const Nonce& client = server_ ? theirs_ : mine_;
  return key_.sign(purpose, server, client);
}

void Framed::start(Handlers handlers, std::chrono::milliseconds deadline) {
  handlers_ = std::make_shared<const Handlers>(std::move(handlers));
  asio::error_code ignored;
  socket_.set_option(asio::ip::tcp::no_delay(true), ignored);
  const auto endpoint = socket_.remote_endpoint(ignored);
  remote_ = ignored ? "?" : fmt::format("{}:{}", endpoint.address().to_string(), endpoint.port());
  timer_.expires_after(deadline);
  timer_.async_wait([self = shared_from_this()](asio::error_code error) {
    if (error || self->stage_ == Stage::open) return;
    // A coordinator may be stopped for a while, or have too much to do: that is no refusal.
    const std::string why = "it did not prove the job key in time";
    if (self->server_) self->refuse(why);
    else self->end(why);
  });
  mine_ = make_nonce();
  write_frame(std::string(kMagic) + std::string(as_text(mine_)));
  read_length();
}

void Framed::read_length() {
  asio::async_read(socket_, asio::buffer(length_.data(), kLength + (in_tags_ ? kTag : 0)),
                   [self = shared_from_this()](asio::error_code error, std::size_t) {
                     if (error)
                       return self->end(error == asio::error::eof ? "it closed the connection" : error.message());
                     self->on_length();
                   });
}

void Framed::on_length() {
  const BytesView bytes(length_.data(), kLength);
  if (in_tags_ && !equal_in_constant_time(BytesView(length_).subspan(kLength), in_tags_->next(bytes)))
    return end("a length came damaged, or from somebody else");
  std::uint32_t length = 0;
  for (std::size_t i = 0; i < kLength; ++i) length |= std::to_integer<std::uint32_t>(length_[i]) << (8 * i);
  const std::uint32_t limit = stage_ == Stage::open ? kMaxFrame : 256;
  if (length > limit)
    return refuse(
        fmt::format("it sent a frame of {} bytes, over the limit of {}: not a Rejoin daemon?", length, limit));
  read_body(length);
}

void Framed::read_body(std::uint32_t length) {
  body_.resize(length + (in_tags_ ? kTag : 0));
  asio::async_read(socket_, asio::buffer(body_), [self = shared_from_this()](asio::error_code error, std::size_t) {
    if (error) return self->end(error.message());
    self->on_frame();
    if (!self->closed_) self->read_length();
  });
}

void Framed::on_frame() {
  const auto handlers = handlers_;
  if (!handlers) return;  // closed meanwhile
  switch (stage_) {
    case Stage::nonce: {
      if (body_.size() != kMagic.size() + theirs_.size() || !body_.starts_with(kMagic))
        return refuse("it does not speak this version of the Rejoin control protocol");
      std::memcpy(theirs_.data(), body_.data() + kMagic.size(), theirs_.size());
      stage_ = Stage::proof;
      const auto proof = mac(server_ ? "rejoin server" : "rejoin client");
      return write_frame(std::string(as_text(proof)));
    }
    case Stage::proof:
      if (!equal_in_constant_time(as_bytes(body_), mac(server_ ? "rejoin client" : "rejoin server")))
        return refuse("its job key differs from ours; give both the same --job-key-file");
      open();
      return handlers->ready();
    case Stage::open: {
      const std::string_view message = std::string_view(body_).substr(0, body_.size() - kTag);
      if (!equal_in_constant_time(as_bytes(body_).subspan(message.size()), in_tags_->next(as_bytes(message))))
        return end("a message came damaged, or from somebody else");
      return handlers->message(message);
    }
  }
}

void Framed::open() {
  stage_ = Stage::open;
  timer_.cancel();
  out_tags_.emplace(mac(server_ ? "rejoin server says" : "rejoin client says"));
  in_tags_.emplace(mac(server_ ? "rejoin client says" : "rejoin server says"));
}

void Framed::send(const std::string& message) {
  if (stage_ == Stage::open) write_frame(message);
}

void Framed::write_frame(const std::string& message) {
  if (closed_) return;
  if (message.size() > kMaxFrame)  // the peer would close the connection, and the same would follow again
    return end(
        fmt::format("a message for it has {} bytes, over the limit of {}: fewer ranks or replicas at one "
                    "connection need less",
                    message.size(), kMaxFrame));
  const auto length = static_cast<std::uint32_t>(message.size());
  std::string frame(4, '\0');
  for (int i = 0; i < 4; ++i) frame[static_cast<std::size_t>(i)] = static_cast<char>(length >> (8 * i));
  if (out_tags_) frame += as_text(out_tags_->next(as_bytes(frame)));
  frame += message;
  if (out_tags_) frame += as_text(out_tags_->next(as_bytes(message)));
  out_bytes_ += frame.size();
  out_.push_back(std::move(frame));
  if (out_.size() == 1) write_next();
  if (out_bytes_ > kMaxUnsent) end("it does not read what is sent to it");
}

void Framed::write_next() {
  asio::async_write(socket_, asio::buffer(out_.front()),
                    [self = shared_from_this()](asio::error_code error, std::size_t) {
                      if (self->closed_) return;
                      if (error) return self->end(error.message());
                      self->out_bytes_ -= self->out_.front().size();
                      self->out_.pop_front();
                      if (!self->out_.empty()) self->write_next();
                    });
}

void Framed::end(const std::string& why) {
  if (std::exchange(closed_, true)) return;
  asio::error_code ignored;
  socket_.close(ignored);
  timer_.cancel();
  if (const auto handlers = std::exchange(handlers_, nullptr)) handlers->closed(why);
}

void Framed::refuse(const std::string& why) {
  refused_ = true;
  end(why);
}

void Framed::close() {
  handlers_ = nullptr;
  end("closed");
}

}  // namespace rejoin::daemon
