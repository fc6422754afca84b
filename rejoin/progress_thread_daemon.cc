// What a session and its node's daemon say to each other.
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/deadlines.h"
#include "base/events.h"
#include "base/fail.h"
#include "base/log.h"
#include "base/release.h"
#include "base/unix_socket.h"
#include "local/offer.h"
#include "membership/node.h"
#include "rejoin/progress_thread.h"
#include "transport/advertise.h"
namespace rejoin {

namespace {

proto::FromTrainer more() {
  proto::FromTrainer message;
  message.mutable_more();
  return message;
}

// Its mode lets only its own user connect; so it is here, too, where a directory on its way lets nobody else look.
Error not_allowed(const std::string& socket) {
  struct stat status {};
  const auto ours = ::geteuid();
  if (::stat(socket.c_str(), &status) == 0 && status.st_uid != ours)
    return {ErrorCode::refused,
            fmt::format("the socket {} is user {}'s, and this trainer is user {}'s: run rejoind and its trainers as "
                        "one user, with --socket in a directory that only that user can write",
                        socket, status.st_uid, ours)};
  return {ErrorCode::refused,
          fmt::format("this trainer, which is user {}'s, may not connect to the socket {}, or not look into one of the "
                      "directories that it is in: run rejoind and its trainers as one user",
                      ours, socket)};
}

constexpr const char* kDoesNotAnswer = "it is stopped, hangs, or has too much to do";
constexpr const char* kRemedy = "Let it go on (SIGCONT), or end it, and it is started again";
constexpr Duration kAtWork = 5 * deadlines::kSilence;  // what it opens for trainers of several GPUs may take seconds

// Whether the daemon has closed the connection: what it said before that is still to be read, and then its end.
bool says_why(const Error& error) { return error.code == ErrorCode::unavailable; }

}  // namespace

// ---- the trainer's thread

// For something to read from the daemon, if there is one yet. Errors: why this session can't go on.
Result<> ProgressThread::wait_a_little(const Fd& socket) {
  if (auto may = may_go_on(); !may) return may;
  pollfd waiting[] = {{socket.get(), POLLIN, 0}, {interrupt_.eventfd().get(), POLLIN, 0}};  // poll() passes over -1
  ::poll(waiting, std::size(waiting), socket ? 100 : static_cast<int>(milliseconds(kReconnect)));
  if (config_.while_waiting) config_.while_waiting();
  return {};
}

// Whoever listens there gets descriptors of all of this trainer's state: it must be of this user, or root.
Result<> ProgressThread::check_user(const Fd& socket) const {
  auto credentials = peer_credentials(socket);
  if (!credentials) return tl::unexpected(credentials.error());
  if (of_this_user(*credentials, config_.socket)) return {};  // root's could be trusted, and takes no others
  return rejoin::fail(ErrorCode::refused,
                      "what listens at {} is process {} of {}, and this trainer is user {}'s: run rejoind and its "
                      "trainers as one user, with --socket in a directory that only that user can write",
                      config_.socket, credentials->pid, credentials->user(), ::geteuid());
}

// A supervisor may start a trainer before its daemon.
Result<Fd> ProgressThread::reach_daemon(TimePoint deadline) {
  for (bool logged = false;; logged = true) {
    auto socket = connect_unix(config_.socket);
    if (socket) {
      if (auto right = check_user(*socket); !right) return tl::unexpected(right.error());
      return socket;
    }
    if (errno == EACCES) return tl::unexpected(not_allowed(config_.socket));  // which does not pass by itself
    const bool lacks = without_descriptors(errno);
    const bool may_come = lacks || errno == ENOENT || errno == ECONNREFUSED || errno == EAGAIN;
    if (lacks && clock_.now() >= deadline) return tl::unexpected(socket.error());
    if (errno == EAGAIN && clock_.now() >= deadline)
      return rejoin::fail(ErrorCode::unavailable, "the Rejoin daemon at {}. {}", socket.error().message, kRemedy);
    if (!may_come || clock_.now() >= deadline)
      return rejoin::fail(ErrorCode::unavailable,
                          "no Rejoin daemon at {}: {}; start rejoind on this node with --socket {}", config_.socket,
                          socket.error().message, config_.socket);
    if (!logged)
      logger().warn("no Rejoin daemon at {} yet ({}); it is waited for (--patience-ms {})", config_.socket,
                    socket.error().message, config_.patience.count());
    if (auto may = wait_a_little({}); !may) return tl::unexpected(may.error());
  }
}

// The first contact is made here, so that its errors reach the caller. A daemon that ends meanwhile is followed by
// another, as one is that ends later.
Result<> ProgressThread::introduce() {
  auto offer = owner_.offer();
  if (!offer) return tl::unexpected(offer.error());
  offer_ = std::move(*offer);
  const TimePoint deadline = clock_.now() + config_.patience;
  for (bool logged = false;; logged = true) {
    (void)has_line();  // the first has been made
    auto socket = reach_daemon(deadline);
    if (!socket) return tl::unexpected(socket.error());
    auto registered = register_with(*socket, deadline);
    if (registered) {
      daemon_ = std::move(*socket);
      daemon_seen_ = clock_.now();
      return {};
    }
    const bool may_pass = registered.error().code == ErrorCode::unavailable ||
                          registered.error().code == ErrorCode::exhausted;  // descriptors are under way, or it is busy
    if (!may_pass || clock_.now() >= deadline) return registered;
    if (!logged)
      logger().warn("{}, and has not taken this rank yet; the next one is waited for", registered.error().message);
    if (auto may = wait_a_little({}); !may) return may;
  }
}

// `unavailable`: the daemon has ended, or closed the connection.
Result<> ProgressThread::register_with(Fd& socket, TimePoint deadline) {
  std::string why;    // the daemon closes the connection, as it says
  std::string waits;  // … or has not answered yet
  const TimePoint since = clock_.now();
  bool logged = false;
  const auto gone = [&](const Error& error) {
    return rejoin::fail(error.code, "the daemon at {}: {}", config_.socket, why.empty() ? error.message : why);
  };
  if (auto greeted = greet(socket); !greeted && !says_why(greeted.error())) return gone(greeted.error());
  for (;;) {
    auto received = receive_with_fds(socket, local::kMaxMessage);
    if (!received) return gone(received.error());
    if (!*received) {
      const TimePoint now = clock_.now();
      const Duration waited = now - since;
      if (waited > std::min<Duration>(kAtWork, config_.patience / 2) && !std::exchange(logged, true))
        logger().warn(
            "the daemon at {} has taken the call and does not answer, for {:.1f} s now: {}. It is waited for "
            "(--patience-ms {})",
            config_.socket, seconds(waited), waits.empty() ? kDoesNotAnswer : waits, config_.patience.count());
      if (now > deadline)
        return rejoin::fail(ErrorCode::timeout,
                            "the daemon at {} does not answer, for {:.1f} s now (--patience-ms): {}", config_.socket,
                            seconds(waited), waits.empty() ? fmt::format("{}. {}", kDoesNotAnswer, kRemedy) : waits);
      if (auto may = wait_a_little(socket); !may) return may;
      continue;
    }
    proto::ToTrainer message;
    if (!message.ParseFromArray((*received)->bytes.data(), static_cast<int>((*received)->bytes.size())))
      return rejoin::fail(ErrorCode::corrupt, "what answers at {} is not a Rejoin daemon", config_.socket);
    if (message.kind_case() == proto::ToTrainer::kRefusal)
      return rejoin::fail(ErrorCode::refused, "the daemon at {} refused: {}", config_.socket, message.refusal());
    if (message.kind_case() == proto::ToTrainer::kDropped) why = message.dropped();
    if (message.kind_case() == proto::ToTrainer::kWaits) {
      waits = message.waits();
      logger().warn("the daemon at {} makes this rank wait: {}", config_.socket, waits);
    }
    if (message.has_more())
      if (auto sent = send_offer(socket, more()); !sent && !says_why(sent.error())) return gone(sent.error());
    if (!message.has_welcome()) continue;
    if (auto understood = check_protocol(message.welcome()); !understood) return understood;
    auto secret = take_secrets(message.welcome());
    if (!secret) return tl::unexpected(secret.error());
    silence_ = std::chrono::milliseconds(message.welcome().silence_ms());
    engine_->set_silence(silence_);
    driver_->on_welcome(*secret, silence_);
    welcome_ = true;
    return {};
  }
}

Result<> ProgressThread::check_protocol(const proto::LocalWelcome& welcome) const {
  const membership::Versions theirs{welcome.protocol(), welcome.protocol()};
  if (membership::agreed({}, theirs)) return {};
  return rejoin::fail(ErrorCode::mismatch, "{}",
                      membership::why_refused(fmt::format("the daemon at {}", config_.socket), theirs, "this library"));
}

// Each daemon gives its own: one that starts again may have another job key. Returns what this rank proves to others.
Result<transport::Secret> ProgressThread::take_secrets(const proto::LocalWelcome& welcome) {
  const auto secret_of = [&](const std::string& bytes) -> Result<transport::Secret> {
    transport::Secret secret;
    if (bytes.size() != secret.bytes.size())
      return rejoin::fail(ErrorCode::corrupt, "the daemon at {} gives a secret of {} bytes, not {}", config_.socket,
                          bytes.size(), secret.bytes.size());
    std::memcpy(secret.bytes.data(), bytes.data(), secret.bytes.size());
    return secret;
  };
  auto own = secret_of(welcome.data_secret());
  if (!own) return tl::unexpected(own.error());
  transport::Secrets secrets{*own};
  if (!welcome.other_data_secret().empty()) {
    auto other = secret_of(welcome.other_data_secret());
    if (!other) return tl::unexpected(other.error());
    secrets.other = *other;
  }
  engine_->set_secrets(secrets);
  return secrets.own;
}

// ---- the progress thread

proto::LocalHello ProgressThread::hello(std::size_t descriptors) const {
  proto::LocalHello hello;
  membership::Versions().put_into(hello);
  hello.set_release(release());
  hello.set_layout(local::kLayoutVersion);
  hello.set_descriptors(static_cast<std::uint32_t>(descriptors));
  hello.set_device(owner_.device()->address());
  auto& up = *hello.mutable_up();
  driver_->describe(up);
  up.set_address(address_);
  up.set_version(joined_from_.step());
  for (const auto& samples : joined_from_.trained()) {
    auto& range = *up.add_trained();
    range.set_begin(samples.begin);
    range.set_end(samples.end);
  }
  up.set_digest(digest_at_join_);
  up.set_digest_us(static_cast<std::uint64_t>(digest_time_ / std::chrono::microseconds(1)));
  up.set_pid(::getpid());
  return hello;
}

// What the next daemon is served GPU memory by, where there is any. One that was not sent is kept.
bool ProgressThread::has_line() {
  if (!server_ || served_.socket) return true;
  if (auto line = server_->next()) served_ = std::move(*line);
  return static_cast<bool>(served_.socket);
}

Result<> ProgressThread::greet(Fd& socket) {
  to_offer_.clear();
  for (const auto& fd : offer_) to_offer_.push_back(fd.get());
  if (server_) to_offer_.insert(to_offer_.end(), {served_.socket.get(), served_.memory.get()});
  proto::FromTrainer message;
  *message.mutable_hello() = hello(to_offer_.size());
  local::make_room_for_messages(socket);
  return send_offer(socket, message);
}

Result<> ProgressThread::send_offer(const Fd& socket, const proto::FromTrainer& message) {
  const std::string bytes = message.SerializeAsString();
  const auto end = to_offer_.begin() + static_cast<std::ptrdiff_t>(std::min(to_offer_.size(), kMaxFds));
  const std::vector<int> fds(to_offer_.begin(), end);
  to_offer_.erase(to_offer_.begin(), end);
  auto sent = send_with_fds(socket, as_bytes(bytes), fds);
  if (sent && to_offer_.empty()) served_ = {};  // the daemon's alone from here on
  return sent;
}

void ProgressThread::reconnect(TimePoint now) {
  if (now < retry_at_ || driver_->finished()) return;  // nothing is left to report to it
  retry_at_ = now + kReconnect;
  const auto registered = register_again(now);
  if (registered || now - daemon_seen_ <= config_.patience) return;
  fail({ErrorCode::timeout, fmt::format("no daemon at {} for {} ms (--patience-ms): {}", config_.socket,
                                        config_.patience.count(), registered.error().message)});
}

Result<> ProgressThread::register_again(TimePoint now) {
  if (!has_line()) return rejoin::fail(ErrorCode::exhausted, "its GPU memory can't be offered yet");
  auto socket = connect_unix(config_.socket);
  if (!socket) return tl::unexpected(socket.error());
  if (auto right = check_user(*socket); !right) {  // it has taken the name; the daemon may come yet
    if (strange_daemon_.may_say(now)) logger().warn("{}", right.error().message);
    return right;
  }
  if (auto greeted = greet(*socket); !greeted) return greeted;
  daemon_ = std::move(*socket);
  unsent_.clear();  // the registration says it; what comes after it waits for the welcome
  daemon_seen_ = now;
  logger().info("registered again with the daemon at {}", config_.socket);
  events::record(events::Kind::daemon_back);
  driver_->on_daemon_back();
  return {};
}

// The farewell is the last word: the daemon reads no further, answers and closes the connection.
void ProgressThread::send_all(TimePoint now) {
  if (!welcome_ || farewell_sent_) return;
  const auto sent = unsent_.send(daemon_);
  if (!sent && poll_daemon(now)) lose_daemon(sent.error().message);  // what it said before it closed tells why
}

void ProgressThread::lose_daemon(const std::string& why) {
  const Duration pause = driver_->recent_pause(clock_.now());
  if (driver_->finished()) logger().debug("the daemon has ended, and so has the job");
  else if (pause > Duration{} && !dropped_.empty())
    logger().warn(
        "this process was silent for {:.1f} s, so the daemon put it out ({}); it registers again, and goes on "
        "unless the job has gone on without it",
        seconds(pause), dropped_);
  else if (pause > silence_)
    logger().warn(
        "the daemon is gone, or has put this process out, which was silent for {:.1f} s ({}); looking for it again",
        seconds(pause), why);
  else logger().warn("the daemon is gone ({}); looking for it again", dropped_.empty() ? why : dropped_);
  events::record(events::Kind::daemon_lost, {}, dropped_.empty() ? why : dropped_);
  dropped_.clear();
  farewell_sent_ = false;
  daemon_.reset();
  welcome_ = false;
  daemon_seen_ = clock_.now();
}

// A daemon gives signs of life, as long as it is not stopped.
void ProgressThread::check_daemon(TimePoint now) {
  const Duration patience = std::max<Duration>(config_.patience, silence_);
  if (now - daemon_seen_ <= patience) return;
  fail(
      {ErrorCode::timeout,
       fmt::format("the daemon at {} has not given a sign of life for {:.0f} s (--patience-ms): it is stopped or hangs",
                   config_.socket, seconds(patience))});
}

// False where it has said its last word, or is gone.
bool ProgressThread::poll_daemon(TimePoint now) {
  const auto lose = [this](const Error& error) { return lose_daemon(error.message), false; };
  const auto end = [this](Error error) { return fail(std::move(error)), false; };
  for (;;) {
    auto received = receive_with_fds(daemon_, local::kMaxMessage);
    if (!received) return lose(received.error());
    if (!*received) return true;
    daemon_seen_ = now;
    proto::ToTrainer message;
    if (!message.ParseFromArray((*received)->bytes.data(), static_cast<int>((*received)->bytes.size()))) {
      logger().warn("the daemon sent bytes that are no message; ignored");
      continue;
    }
    if (message.kind_case() == proto::ToTrainer::kRefusal) return end({ErrorCode::refused, message.refusal()});
    if (message.kind_case() == proto::ToTrainer::kDropped) dropped_ = message.dropped();
    if (message.kind_case() == proto::ToTrainer::kWaits)
      logger().warn("the daemon at {} makes this rank wait: {}", config_.socket, message.waits());
    if (message.has_welcome()) {
      if (auto understood = check_protocol(message.welcome()); !understood) return end(understood.error());
      auto secret = take_secrets(message.welcome());
      if (!secret) return lose(secret.error());
      driver_->set_secret(*secret);
      welcome_ = true;
    }
    if (message.has_left()) {  // it closes the connection now
      farewell_heard_ = true;
      return false;
    }
    if (message.has_control()) driver_->on_control_message(message.control(), now);
    if (message.has_more())
      if (auto sent = send_offer(daemon_, more()); !sent && !says_why(sent.error())) return lose(sent.error());
  }
}

}  // namespace rejoin
