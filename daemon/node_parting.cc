// How the node's trainers go: they leave, end, hang, or are dropped.
#include <algorithm>

#include "base/events.h"
#include "base/log.h"
#include "daemon/exiting.h"
#include "daemon/node_server.h"

namespace rejoin::daemon {

using Gone = membership::Node::Gone;

// It does so itself, so nobody has to wait for its silence. When it has the answer, no end of its process comes first,
// and nothing is written into its memory any more: it may put something else there.
void NodeServer::on_leave(membership::RankConnection id, const proto::LocalLeave& leave) {
  constexpr std::size_t longest = 300;  // of what a local process may put into everybody's logs
  const std::string why = printable(leave.why(), longest);
  leavers_[id] = {std::move(trainers_.at(id).socket), now()};
  if (!why.empty()) return drop(id, "it has left: " + why, Gone::ended);
  drop(id, machine_.plan().finished() ? "the job is finished" : "of its own accord", Gone::left);
}

void NodeServer::say_left(membership::RankConnection id) {
  const auto leaver = leavers_.extract(id);
  if (leaver.empty()) return;
  const Fd& socket = leaver.mapped().socket;
  // What an earlier library says after its farewell: unread, it would take the answer along.
  for (int i = 0; i < kMessagesAtOnce; ++i)
    if (const auto more = receive_with_fds(socket, local::kMaxMessage); !more || !*more) break;
  proto::ToTrainer answer;
  answer.mutable_left();
  (void)send_with_fds(socket, as_bytes(answer.SerializeAsString()), {});  // else it sees the hang-up alone
  end_if_nobody_is_left();
}

// A stream's thread may be at something long. Who leaves waits for a silence, and hears it before.
void NodeServer::answer_leavers() {
  std::vector<membership::RankConnection> late;
  for (const auto& [id, leaver] : leavers_)
    if (now() - leaver.since > options_.silence / 2) late.push_back(id);
  for (const auto id : late) say_left(id);
}

// What is no part of the job had no place in it.
void NodeServer::remember(const Trainer& trainer, const std::string& reason) {
  if (trainer.outside) return;
  const auto& plan = machine_.plan();
  GoneTrainer gone{
      .pid = trainer.credentials.pid, .began = began(trainer.credentials.pid), .reason = reason, .at = now()};
  if (const auto rank = machine_.ranks().find(trainer.id); rank != machine_.ranks().end())
    gone.job = rank->second.up.job(), gone.incarnation = rank->second.up.incarnation();
  if (has_ended(trainer)) gone.began.reset();
  if (gone.incarnation == 0) {  // the plan may still name the one before it
    gone.job = plan.job();
    for (const auto& member : plan.members())
      if (member.replica() == trainer.key->replica.value) gone.incarnation = member.incarnation();
  }
  gone_[*trainer.key] = std::move(gone);
  forget_gone();
}

// What has a place elsewhere is not gone.
void NodeServer::forget_gone() {
  const auto& plan = machine_.plan();
  std::erase_if(gone_, [&](const auto& one) {
    const auto& key = one.first;
    const auto& gone = one.second;
    return std::ranges::any_of(plan.members(), [&](const auto& member) {
      return member.replica() == key.replica.value &&
             (plan.job() != gone.job || member.incarnation() > gone.incarnation);
    });
  });
  while (gone_.size() > kMostGone)
    gone_.erase(std::ranges::min_element(gone_, {}, [](const auto& one) { return one.second.at; }));
}

// It hung, and its process has ended now, so that nobody need wait for it any more.
void NodeServer::drop_silent(membership::RankConnection id, const std::string& reason, Gone how) {
  const auto silent = silent_.extract(id);
  if (silent.empty()) return;
  const auto& [key, pid, exited] = silent.mapped();
  const bool left = machine_.plan().finished();
  events::record(left ? events::Kind::rank_left : events::Kind::rank_down,
                 {.replica = key.replica.value, .number = key.rank.value, .a = static_cast<std::uint64_t>(pid)},
                 reason);
  if (const auto gone = gone_.find(key); gone != gone_.end() && gone->second.pid == pid)
    gone->second.began.reset(), gone->second.reason = reason, gone->second.at = now();
  carry_out(machine_.on_rank_gone(id, reason, how));
}

void NodeServer::drop(membership::RankConnection id, const std::string& reason, Gone how) {
  auto gone = trainers_.extract(id);
  if (gone.empty()) return drop_silent(id, reason, how);
  Trainer& trainer = gone.mapped();
  const auto fenced = [this, id] { asio::post(io_, [this, id] { say_left(id); }); };  // thread: any
  if (trainer.key) {
    const bool left = machine_.plan().finished() || how == Gone::left;
    events::record(left ? events::Kind::rank_left : events::Kind::rank_down,
                   {.replica = trainer.key->replica.value,
                    .number = trainer.key->rank.value,
                    .a = static_cast<std::uint64_t>(trainer.credentials.pid)},
                   reason);
    progress_.erase(*trainer.key);
    remember(trainer, reason);
    if (trainer.own) {  // its stream goes with it
      served_by_gone_ += trainer.own->bytes_served;
      passed_on_by_gone_ += trainer.own->bytes_passed_on;
    }
    if (!trainer.own)
      trainer.stream->post([key = *trainer.key, fenced](catchup::Service& service, TimePoint) {
        service.remove_rank(key);
        fenced();
      });
  } else {
    fenced();
    spdlog::warn("local process {}: {}", trainer.credentials.pid, reason);
  }
  if (how == Gone::silent) {  // it may go on, and wonder
    proto::ToTrainer farewell;
    farewell.set_dropped(reason);
    (void)send_with_fds(trainer.socket, as_bytes(farewell.SerializeAsString()), {});  // else it sees the hang-up alone
    if (trainer.key && trainer.exited) silent_[id] = {*trainer.key, trainer.credentials.pid, std::move(trainer.exited)};
  }
  carry_out(machine_.on_rank_gone(id, reason, how));
  if (trainer.own) {
    trainer.own->remote->disconnect();  // so that its thread waits for no trainer; it may still be at work for long
    opener_->post([stream = std::move(trainer.own), fenced]() mutable {
      stream.reset();
      fenced();
    });
  }
  end_if_nobody_is_left();
}

// What still waits to be sent is of those who have left: without it the coordinator would learn by a silence, and not
// of each rank, that they have.
void NodeServer::end_if_nobody_is_left() {
  if (trainers_.empty() && leavers_.empty() && nobody_is_left_)
    coordinators_.finish(std::exchange(nobody_is_left_, nullptr));
}

void NodeServer::retire(std::function<void()> call) {
  listener_.close();
  listener_fd_.reset();
  nobody_is_left_ = std::move(call);
  end_if_nobody_is_left();
}

}  // namespace rejoin::daemon
