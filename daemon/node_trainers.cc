// The node's trainers: how they come, register and are heard.
#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>

#include "base/deadlines.h"
#include "base/events.h"
#include "base/fail.h"
#include "base/log.h"
#include "base/refusals.h"
#include "daemon/exiting.h"
#include "daemon/listen.h"
#include "daemon/node_server.h"
#include "local/offer.h"
#include "membership/rank.h"

namespace rejoin::daemon {

using Gone = membership::Node::Gone;

namespace {
// Descriptors that a trainer takes: its socket twice, its process, and its state. They are there before it is taken:
// until then it waits, and afterwards it would be lost. A state of more allocations may find too few, and is refused.
constexpr std::size_t kOfTrainer = 16;
constexpr int kCallersAtOnce = 16;  // whoever comes without end leaves the thread to others in between

bool readable_now(int fd) {
  pollfd look{fd, POLLIN | POLLRDHUP, 0};
  return ::poll(&look, 1, 0) > 0 && look.revents != 0;
}

bool hung_up(const Fd& socket) {
  pollfd look{socket.get(), POLLRDHUP, 0};
  return ::poll(&look, 1, 0) > 0 && (look.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}
}  // namespace

void NodeServer::accept() {
  listener_.async_wait(asio::posix::stream_descriptor::wait_read, [this, of = listens_](asio::error_code error) {
    if (error || of != listens_) return;
    for (int i = 0; i < kCallersAtOnce && readable_now(listener_fd_.get()); ++i) {
      std::array<Fd, kOfTrainer> spare;
      const bool enough = std::ranges::all_of(spare, [this](Fd& one) {
        one = Fd(::fcntl(listener_fd_.get(), F_DUPFD_CLOEXEC, 0));
        return static_cast<bool>(one);
      });
      Fd socket(enough ? ::accept4(listener_fd_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC) : -1);
      if (!socket && without_descriptors(errno)) return accept_later();
      Fd watched = std::move(spare.front());
      if (!socket || ::dup3(socket.get(), watched.get(), O_CLOEXEC) < 0) break;
      spare = {};
      auto credentials = peer_credentials(socket);
      // A file's mode keeps others off, and a caller of it may have ended.
      const bool ours = credentials && (options_.socket.starts_with('@') ? of_this_user(*credentials, options_.socket)
                                                                         : credentials->uid == ::geteuid());
      if (!credentials || (credentials->uid != 0 && !ours)) {
        if (const auto more = strangers_.may_say(now()))
          spdlog::warn("a local connection of {} was refused; this daemon serves user {}{}",
                       credentials ? credentials->user() : "nobody known", ::geteuid(),
                       *more == 0 ? "" : fmt::format(" ({} more since the last such line)", *more));
        ++rejected_;
        refusals::count(refusals::Why::user);
        continue;
      }
      local::make_room_for_messages(socket);
      const membership::RankConnection id(next_trainer_++);
      Trainer& trainer = trainers_[id];
      trainer.id = id;
      trainer.credentials = *credentials;
      trainer.socket = std::move(socket);
      if (auto watching = watch(trainer, std::move(watched)); !watching) {
        if (without_watches_.may_say(now()))
          spdlog::warn("process {} can't be taken: {}", credentials->pid, watching.error().message);
        trainers_.erase(id);
      }
    }
    accept();
  });
}

void NodeServer::accept_later() {
  if (without_descriptors_.may_say(now()))
    spdlog::warn(
        "no local connection can be accepted: there are too few descriptors left; raise the limit with 'ulimit -n'");
  accept_again_.expires_after(kWithoutDescriptors);
  accept_again_.async_wait([this, of = listens_](asio::error_code cancelled) {
    if (!cancelled && of == listens_ && listener_.is_open()) accept();
  });
}

Result<> NodeServer::watch(Trainer& trainer, Fd watched) {
  auto readable = daemon::watch(io_, std::move(watched));
  if (!readable) return tl::unexpected(readable.error());
  trainer.readable = std::move(*readable);
  auto pidfd = make_pidfd(trainer.credentials.pid);
  if (pidfd) {
    auto exited = daemon::watch(io_, std::move(*pidfd));
    if (!exited) return tl::unexpected(exited.error());
    trainer.exited = std::move(*exited);
    trainer.exited->async_wait(asio::posix::stream_descriptor::wait_read,
                               [this, id = trainer.id, pid = trainer.credentials.pid](asio::error_code error) {
                                 if (!error) drop(id, fmt::format("its process {} ended", pid), Gone::ended);
                               });
  } else if (trainer.credentials.pid == 0) {  // its socket alone tells of its end
    spdlog::warn(
        "a trainer is of a PID namespace that this daemon doesn't see: its end shows by its socket alone, no message "
        "can name its process, and the transport shm can't be used. Let daemon and trainers share one PID namespace "
        "(Kubernetes: shareProcessNamespace: true in one pod, hostPID: true across pods)");
  } else {  // it has ended already; or, as the message says, another thread has taken the descriptor
    spdlog::debug("trainer {}: {}", trainer.credentials.pid, pidfd.error().message);
  }
  read(trainer.id);
  return {};
}

void NodeServer::read(membership::RankConnection id) {
  auto found = trainers_.find(id);
  if (found == trainers_.end()) return;
  found->second.readable->async_wait(asio::posix::stream_descriptor::wait_read, [this, id](asio::error_code error) {
    if (error) return;
    for (int i = 0; i < kMessagesAtOnce; ++i) {
      auto at = trainers_.find(id);
      if (at == trainers_.end()) return;
      auto received = receive_with_fds(at->second.socket, local::kMaxMessage);
      if (!received) return on_hang_up(id, received.error());
      if (!*received) break;
      proto::FromTrainer message;
      if (!message.ParseFromArray((*received)->bytes.data(), static_cast<int>((*received)->bytes.size())) ||
          message.kind_case() == proto::FromTrainer::KIND_NOT_SET) {
        ++rejected_;
        refusals::count(refusals::Why::protocol);
        return drop(id, "it sent bytes that are no message", Gone::silent);
      }
      if (message.has_leave()) return on_leave(id, message.leave());
      if (!message.has_report()) {
        Taken heard;
        if (message.has_hello()) heard = on_hello(at->second, message.hello());
        if (heard) heard = on_descriptors(at->second, std::move((*received)->fds));
        if (!heard) return refuse(id, heard.error());
      } else {
        if (message.report().has_rank_up())  // its place and its state are looked at in a LocalHello
          return refuse(id, Error{ErrorCode::corrupt, "it registered in a report, past what says where its state is"});
        if (message.report().has_heartbeat()) at->second.ring = message.report().heartbeat();
        carry_out(machine_.on_rank_message(id, message.report(), now()));
      }
    }
    read(id);
  });
}

NodeServer::Taken NodeServer::on_hello(Trainer& trainer, const proto::LocalHello& hello) {
  if (const auto theirs = membership::Versions::of(hello); !membership::agreed({}, theirs))
    return refused_as(Why::version, membership::why_refused("the trainer's library", theirs, "its daemon"));
  if (hello.layout() < local::kOldestLayout || hello.layout() > local::kLayoutVersion)
    return refused_as(Why::version,
                      fmt::format("the trainer's page has layout {}, and its daemon reads {} to {}: upgrade {} first",
                                  hello.layout(), local::kOldestLayout, local::kLayoutVersion,
                                  hello.layout() > local::kLayoutVersion ? "its daemon" : "the trainer's library"));
  if (trainer.offering || trainer.opening || trainer.key)
    return fail(ErrorCode::invalid_argument, "it registered twice on one connection");
  for (const auto* card : {&hello.up().card(), &hello.up().card_listening()})
    if (card->size() > membership::kMostCardBytes)
      return fail(ErrorCode::invalid_argument, "its card has {} bytes; there may be up to {}", card->size(),
                  membership::kMostCardBytes);
  if (hello.descriptors() > local::kMaxOffered)
    return fail(ErrorCode::corrupt, "it wants to send {} descriptors", hello.descriptors());
  trainer.offering = {hello, {}};
  return {};
}

NodeServer::Taken NodeServer::on_descriptors(Trainer& trainer, std::vector<Fd> fds) {
  if (!trainer.offering) return fail(ErrorCode::corrupt, "it sent descriptors without being asked");
  auto& [hello, all] = *trainer.offering;
  std::move(fds.begin(), fds.end(), std::back_inserter(all));
  if (fds.empty() || all.size() > hello.descriptors())
    return fail(ErrorCode::corrupt, "it sent {} descriptors, {} by now, and announced {}", fds.size(), all.size(),
                hello.descriptors());
  if (all.size() < hello.descriptors()) {
    proto::ToTrainer next;
    next.mutable_more();
    send(trainer, next);
    return {};
  }
  Offering offering = *std::exchange(trainer.offering, std::nullopt);
  if (offering.hello.device() != "host" && offering.fds.size() < 3)
    return fail(ErrorCode::corrupt, "it sent {} descriptors for the state on {}", offering.fds.size(),
                offering.hello.device());
  trainer.opening = true;
  auto& opened = opening_[trainer.id];
  opener_->post([this, from = trainer.id, offering = std::move(offering), &opened]() mutable {
    opened = open(from, offering);
    asio::post(io_, [this, from, hello = std::move(offering.hello)] { on_opened(from, hello); });
  });
  return {};
}

void NodeServer::refuse(membership::RankConnection id, const Refusal& refusal) {
  proto::ToTrainer last;
  last.set_refusal(refusal.error.message);
  send_at_last(trainers_.at(id), last);
  ++rejected_;
  refusals::count(refusal.why);
  drop(id, refusal.error.message, Gone::silent);
}

tl::unexpected<NodeServer::Refusal> NodeServer::refused_as(Why why, std::string message) {
  return tl::unexpected(Refusal{{ErrorCode::refused, std::move(message)}, why});
}

NodeServer::Taken NodeServer::admit(Trainer& trainer, const proto::LocalHello& hello, local::View view,
                                    DeviceStream& stream) {
  REJOIN_CHECK(!trainer.key, "on_hello() takes one registration of a connection");
  const catchup::RankKey key{ReplicaId(hello.up().replica()), RankId(hello.up().rank())};
  trainer.listens = hello.up().address();
  trainer.card = hello.up().card();
  trainer.card_listening = hello.up().card_listening();
  const auto place = place_of(trainer, *stream.thread);
  if (!place) return tl::unexpected(place.error());
  if (auto cleared = clear_place(trainer, key, hello.up()); !cleared) return cleared;
  trainer.key = key;
  gone_.erase(key);
  std::erase_if(silent_, [&, pid = trainer.credentials.pid](const auto& one) {
    return one.second.key == key && one.second.pid == pid;
  });
  events::record(events::Kind::rank_up, {.replica = key.replica.value,
                                         .number = key.rank.value,
                                         .a = static_cast<std::uint64_t>(trainer.credentials.pid),
                                         .b = hello.up().incarnation()});
  trainer.stream = stream.thread.get();
  const bool complete = view.complete();
  auto shared = std::make_shared<local::View>(std::move(view));
  trainer.stream->post([key, instance = hello.up().instance(), shared](catchup::Service& service, TimePoint) {
    if (auto added = service.add_rank(key, instance, std::move(*shared)); !added)
      spdlog::error("state of replica {} rank {}: {}; it is tried again", key.replica, key.rank, added.error().message);
  });
  proto::ToTrainer answer;
  const std::uint32_t protocol = membership::Spoken::with(membership::Versions::of(hello)).version();
  answer.mutable_welcome()->set_protocol(protocol);
  answer.mutable_welcome()->set_silence_ms(static_cast<std::uint64_t>(options_.silence.count()));
  const auto secrets = keys_.data_secrets();
  const auto text_of = [](const transport::Secret& secret) { return std::string(as_text(secret.bytes)); };
  answer.mutable_welcome()->set_data_secret(text_of(secrets.own));
  if (secrets.other) answer.mutable_welcome()->set_other_data_secret(text_of(*secrets.other));
  send(trainer, answer);
  proto::FromNode up;
  *up.mutable_rank_up() = hello.up();
  up.mutable_rank_up()->set_address(place->engine);
  up.mutable_rank_up()->set_stream_address(place->stream);
  up.mutable_rank_up()->set_card(place->card);
  up.mutable_rank_up()->clear_card_listening();
  up.mutable_rank_up()->set_pid(trainer.credentials.pid);
  up.mutable_rank_up()->set_speaks(protocol);
  up.mutable_rank_up()->set_release(hello.release());
  up.mutable_rank_up()->set_passes_on(true);
  carry_out(machine_.on_rank_message(trainer.id, up, now()));
  // A daemon before this one has had all of its state verified: that goes along with its first status.
  if (complete) carry_out(machine_.on_rank_message(trainer.id, report_of({key, hello.up().instance()}), now()));
  return {};
}

// The coordinator's to a registration.
void NodeServer::note_answer(const proto::ToNode& message) {
  const auto note = [&](const auto& answer, auto change) {
    for (auto& [id, trainer] : trainers_)
      if (const auto rank = machine_.ranks().find(id);
          rank != machine_.ranks().end() && rank->second.up.replica() == answer.replica() &&
          rank->second.up.rank() == answer.rank() && rank->second.up.instance() == answer.instance())
        change(trainer);
  };
  if (message.has_registered())
    note(message.registered(), [](Trainer& trainer) { trainer.outside = false; });  // another one may have said so
  if (message.has_refused())
    note(message.refused(),
         [&](Trainer& trainer) { trainer.outside = message.refused().why() == static_cast<std::uint32_t>(Why::job); });
}

// One process has a place. Whoever else asks for it gets it when that one has ended; one that is silent for too long is
// not among the trainers any more.
NodeServer::Taken NodeServer::clear_place(const Trainer& newcomer, const catchup::RankKey& key,
                                          const proto::RankUp& up) {
  std::vector<std::pair<membership::RankConnection, Gone>> older;
  for (const auto& [id, other] : trainers_) {
    if (other.key != key) continue;
    const Gone how = has_ended(other) ? Gone::ended : machine_.gone_for(id, up);
    const pid_t pid = other.credentials.pid;  // 0: of another PID namespace, where it tells nobody from another
    const bool same = pid != 0 && pid == newcomer.credentials.pid;
    if (how == Gone::ended && !has_ended(other) && !(same && hung_up(other.socket)))
      return refused_as(
          Why::place,
          fmt::format("process {} of this node, {}, is replica {} rank {}{}, and gave its last sign of life {:.0f} ms "
                      "ago: {}, or give this one another replica or rank",
                      pid, options_.name, key.replica, key.rank, same ? " already, by another session" : "",
                      milliseconds(now() - machine_.ranks().at(id).heard),
                      same ? "close that session first" : "end that process"));
    older.emplace_back(id, how);
  }
  for (const auto& [id, how] : older)
    drop(id,
         how == Gone::replaced ? "it connected anew"
         : how == Gone::silent ? fmt::format("process {} has come back, which has its place", newcomer.credentials.pid)
                               : "the rank was started again",
         how);
  return {};
}

std::map<membership::RankConnection, NodeServer::Trainer>::iterator NodeServer::find_trainer(
    const catchup::RankKey& key) {
  return std::find_if(trainers_.begin(), trainers_.end(), [&](const auto& one) { return one.second.key == key; });
}

// Its end may be known to the system and not yet to us. See "A process that ends" in docs/design-notes.md.
bool NodeServer::has_ended(const Trainer& trainer) {
  if (trainer.exited)
    return readable_now(trainer.exited->native_handle()) || is_exiting(trainer.exited->native_handle());
  if (trainer.credentials.pid == 0) return hung_up(trainer.socket);  // 0 would mean this process's own group
  return ::kill(trainer.credentials.pid, 0) != 0 && errno == ESRCH;
}

// The coordinator asks whether a process lives.
void NodeServer::look_after(const proto::Inquiry& inquiry) {
  const auto found = find_trainer({ReplicaId(inquiry.replica()), RankId(inquiry.rank())});
  if (found == trainers_.end() || !has_ended(found->second)) return;
  drop(found->first, fmt::format("its process {} ended", found->second.credentials.pid), Gone::ended);
}

// Of those whose next sign of life is late: the system tells of an end by itself when it has cleaned up behind it.
void NodeServer::look_for_ends() {
  constexpr std::chrono::milliseconds longest(500);
  const Duration late = std::min<Duration>(deadlines::kHeartbeatOfTrainer.of(options_.silence), longest);
  std::vector<std::pair<membership::RankConnection, pid_t>> ended;
  for (const auto& [id, rank] : machine_.ranks()) {
    if (now() - rank.heard <= late) continue;
    const auto found = trainers_.find(id);
    if (found == trainers_.end() || !found->second.exited) continue;
    if (has_ended(found->second)) ended.emplace_back(id, found->second.credentials.pid);
  }
  for (const auto& [id, silent] : silent_)
    if (is_exiting(silent.exited->native_handle())) ended.emplace_back(id, silent.pid);
  for (const auto& [id, pid] : ended) drop(id, fmt::format("its process {} ended", pid), Gone::ended);
}

// A socket may end although its process lives; its pidfd tells of the process itself. Until then, or until
// it has been silent for too long, it may connect anew.
void NodeServer::on_hang_up(membership::RankConnection id, const Error& why) {
  Trainer& trainer = trainers_.at(id);
  if (why.code != ErrorCode::unavailable) return drop(id, "what it sent can't be read: " + why.message, Gone::silent);
  if (!trainer.exited || !trainer.key) return drop(id, why.message, Gone::ended);
  if (has_ended(trainer)) return drop(id, fmt::format("its process {} ended", trainer.credentials.pid), Gone::ended);
  spdlog::debug("trainer {}: {}", trainer.credentials.pid, why.message);
}

}  // namespace rejoin::daemon
