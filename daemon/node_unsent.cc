// What the node's trainers are sent. What a trainer's socket does not take waits: a rank of a large job is told of all
// others in one burst, which may be more than the system lets a socket hold, and a trainer may stand still for a
// moment.
#include "base/bytes.h"
#include "base/deadlines.h"
#include "base/log.h"
#include "daemon/node_server.h"

namespace rejoin::daemon {

using Gone = membership::Node::Gone;

namespace {
// All peers of a rank come in one frame of the coordinator's at most; and as much as that may be said after it.
constexpr std::size_t kMostUnsent = 2 * Framed::kMaxFrame;
}  // namespace

void NodeServer::send(Trainer& trainer, const proto::ToTrainer& message) {
  const bool waits = !trainer.unsent.empty();
  trainer.unsent.push_back(message.SerializeAsString());
  trainer.unsent_bytes += trainer.unsent.back().size();
  if (!waits) write(trainer);
  if (trainer.unsent_bytes > kMostUnsent) drop_soon(trainer, "it does not read what is sent to it");
}

// What else was to be said is of no use to who leaves or is refused.
void NodeServer::send_at_last(Trainer& trainer, const proto::ToTrainer& message) {
  trainer.unsent.clear();
  trainer.unsent_bytes = 0;
  send(trainer, message);
}

// As much as its socket takes.
void NodeServer::write(Trainer& trainer) {
  while (!trainer.unsent.empty()) {
    const std::string& bytes = trainer.unsent.front();
    const auto sent = send_with_fds(trainer.socket, as_bytes(bytes), {});
    if (!sent && sent.error().code == ErrorCode::exhausted) return write_later(trainer);
    if (!sent) return give_up(trainer, sent.error());
    trainer.unsent_bytes -= bytes.size();
    trainer.unsent.pop_front();
    trainer.ticks_unread = 0;
  }
}

// A trainer that lacks one message would wait for ever for what was in it. It connects anew, and is told all again. Of
// one that is gone its socket says so.
void NodeServer::give_up(Trainer& trainer, const Error& why) {
  trainer.unsent.clear();
  trainer.unsent_bytes = 0;
  if (why.code == ErrorCode::unavailable) return;
  drop_soon(trainer, why.message);
}

// Whoever sends may be going through all trainers.
void NodeServer::drop_soon(const Trainer& trainer, const std::string& reason) {
  asio::post(io_, [this, id = trainer.id, reason] {
    if (trainers_.contains(id)) drop(id, reason, Gone::silent);
  });
}

void NodeServer::write_later(Trainer& trainer) {
  if (std::exchange(trainer.awaits_room, true)) return;
  trainer.readable->async_wait(asio::posix::stream_descriptor::wait_write,
                               [this, id = trainer.id](asio::error_code error) {
                                 if (error) return;
                                 const auto found = trainers_.find(id);
                                 if (found == trainers_.end()) return;
                                 found->second.awaits_room = false;
                                 write(found->second);
                               });
}

// Who sends and does not read. It is counted in ticks: while this daemon is paused nobody can show that it reads.
void NodeServer::drop_who_reads_nothing() {
  std::vector<membership::RankConnection> silent;
  for (auto& [id, trainer] : trainers_) {
    write(trainer);
    if (!trainer.unsent.empty() && ++trainer.ticks_unread > deadlines::ticks_of(options_.silence)) silent.push_back(id);
  }
  for (const auto id : silent)
    drop(id, fmt::format("it has read nothing for {} ms", options_.silence.count()), Gone::silent);
}

// To the trainers, which wait for a daemon that is stopped only as long as they are told to.
void NodeServer::give_sign_of_life() {
  if (now() - sign_given_ < deadlines::kHeartbeatOfDaemon.of(options_.silence)) return;
  sign_given_ = now();
  proto::ToTrainer sign;
  sign.mutable_control()->mutable_heartbeat();
  for (auto& [id, trainer] : trainers_)
    if (trainer.key) send(trainer, sign);
}

}  // namespace rejoin::daemon
