#include "collectives/group.h"

#include <algorithm>
#include <utility>

#include "base/fail.h"
#include "collectives/combine.h"
#include "collectives/internal.h"

namespace rejoin::collectives {

using transport::Event, transport::EventKind, transport::RegionId;

namespace {

constexpr Duration kReasonBy = std::chrono::milliseconds(100);  // a refused write's, from the one that refused it
constexpr Duration kLookAtStreams =
    std::chrono::microseconds(100);                            // that have to come to an operation: they wake nobody
constexpr Duration kHeardBy = std::chrono::milliseconds(100);  // that this one has failed, by the others

std::uint64_t channel_of(const Operation& operation) {
  if (operation.signature.kind == Collective::send) return kSends | operation.tag;
  if (operation.signature.kind == Collective::receive) return kReceives | operation.tag;
  return kCollective;
}

}  // namespace

std::string describe(const Signature& signature) {
  std::string text(to_string(signature.kind));
  if (signature.kind == Collective::barrier) return text;
  const bool adds = combines(signature.kind);
  if (adds) text += fmt::format(" ({})", to_string(signature.combine));
  if (signature.kind != Collective::all_to_all)  // where each pair has a size of its own
    text += fmt::format(" of {} bytes", signature.bytes);
  if (adds) text += fmt::format(" of {}", to_string(signature.type));
  if (signature.memory == transport::MemoryKind::cuda) text += " in a GPU's memory";
  if (signature.kind == Collective::reduce || signature.kind == Collective::gather)
    text += fmt::format(" to rank {}", signature.root);
  if (signature.kind == Collective::broadcast || signature.kind == Collective::scatter)
    text += fmt::format(" from rank {}", signature.root);
  return text;
}

Group::Group(transport::Engine& engine, Handle own, std::shared_ptr<device::Reducer> reducer)
    : engine_(engine), own_(std::move(own)), reducer_(std::move(reducer)) {}

Group::~Group() {
  if (!leaving_) leave();
  end_failing();
  run_callbacks();
  drop_connections();
  for (const auto endpoint : parted_) engine_.close(endpoint);
  for (const auto& [endpoint, hello] : early_) engine_.close(endpoint);
  for (auto& scratch : scratch_) engine_.deregister(scratch.region);
}

std::uint32_t Group::size() const { return static_cast<std::uint32_t>(peers_.size()); }

void Group::poll(TimePoint now) {
  now_ = now;
  for (const auto& event : engine_.poll()) {
    handle(event);
    ++steps_;
  }
  if (reducer_) begin_what_is_ready(), finish_works();
  if (configuring_) connect_missing();
  check_deadlines();
  answer_goodbyes();
  if (failing_ && works_.empty() && (now_ >= failing_->until || others_have_heard())) end_failing();
  run_callbacks();
}

TimePoint Group::next_deadline(TimePoint now) const {
  TimePoint next = now + std::chrono::seconds(1);
  if (configuring_) next = std::min({next, configured_by_, connect_again_});
  if (refused_) next = std::min(next, refused_->until);
  if (failing_) next = std::min(next, failing_->until);
  if (not_ready_ > 0) next = std::min(next, now + kLookAtStreams);
  if (!deadlines_.empty()) next = std::min(next, *deadlines_.begin());
  return next;
}

void Group::submit(Operation operation) {
  if (failed_ || configuring_ || peers_.empty() || leaving_) {
    const auto why = leaving_  ? Error{ErrorCode::unavailable, "this process group was shut down"}
                     : failed_ ? *failed_
                               : Error{ErrorCode::unavailable, "this process group has no members yet: reconfigure it"};
    call(std::move(operation.done), tl::unexpected(why));
    return run_callbacks();
  }
  auto active = std::make_unique<Active>();
  active->operation = std::move(operation);
  deadlines_.insert(active->operation.deadline);
  if (channel_of(active->operation) == kCollective) {
    waiting_.push_back(std::move(active));
    start_waiting();
  } else start(std::move(active));
  run_callbacks();
}

void Group::abort(const Error& error) {
  fail_all(error);
  if (works_.empty() && others_have_heard()) end_failing();
  run_callbacks();
}

// Collectives wait for those before them; between two members nothing waits for anything else. One that has nothing to
// do ends at once, and so calls this: the loop goes on with what it has made room for.
void Group::start_waiting() {
  if (std::exchange(starting_, true)) return;
  while (!waiting_.empty() && active_collectives_ < kAtOnce && !failed_) {
    auto active = std::move(waiting_.front());
    waiting_.pop_front();
    ++active_collectives_;
    start(std::move(active));
  }
  starting_ = false;
}

void Group::start(std::unique_ptr<Active> active) {
  auto& operation = active->operation;
  const auto channel = channel_of(operation);
  const bool collective = channel == kCollective;
  const std::uint64_t with = collective ? 0 : operation.signature.root;
  const Key counted{channel, with, 0};
  active->key = {channel, with, collective ? collectives_++ : between_two_[counted]++};
  leave_out_what_peers_do_not_speak(operation);
  const auto count = operation.plan.tasks.size();
  active->blockers.resize(count);
  active->index.resize(count);
  active->ready.resize(count);
  active->left = count;
  std::map<std::uint32_t, std::uint32_t> receives;
  for (std::uint32_t task = 0; task < count; ++task) {
    const auto& planned = operation.plan.tasks[task];
    active->blockers[task] = planned.blockers;
    if (planned.kind == Task::Kind::receive) active->index[task] = receives[planned.peer]++;
    if (planned.kind == Task::Kind::send) active->sends[planned.peer].push_back(task);
    const bool remote = planned.kind == Task::Kind::receive || planned.kind == Task::Kind::send;
    if (remote && peers_[planned.peer].stage == Stage::left)
      return fail_starting(std::move(active), has_left(planned.peer));
  }
  if (auto scratch = take_scratch(*active); !scratch) return fail_starting(std::move(active), scratch.error());
  auto& here = *(active_[active->key] = std::move(active));
  here.regions.resize(here.operation.memory.size());
  const auto key = here.key;
  if (const auto early = ready_early_.find(key); early != ready_early_.end()) {
    const auto all = std::move(early->second);
    ready_early_.erase(early);
    ready_early_count_ -= all.size();
    for (const auto& [rank, ready] : all)
      if (!failed_ && active_.contains(key)) match(here, rank, ready);
  }
  if (failed_ || !active_.contains(key)) return;
  ++not_ready_;
  if (!here.operation.ready || here.operation.ready()) begin(here);
}

// Until its caller's stream comes to it, an operation sends and receives nothing.
void Group::begin(Active& active) {
  const auto key = active.key;
  active.begun = true;
  --not_ready_;
  const auto count = static_cast<std::uint32_t>(active.operation.plan.tasks.size());
  // Anything may end it: what it begins with is a copy.
  std::vector<std::uint32_t> first;
  for (std::uint32_t task = 0; task < count; ++task)
    if (active.blockers[task] == 0) first.push_back(task);
  for (const auto task : first)
    if (!failed_ && active_.contains(key)) unblocked(active, task);
  if (count == 0 && !failed_) end_if_over(active);
}

void Group::fail_starting(std::unique_ptr<Active> active, Error error) {
  active_[active->key] = std::move(active);
  fail_all(std::move(error));
}

std::span<std::byte> Group::bytes_at(Active& active, const Operand& operand, std::uint64_t length) {
  auto& memory = active.operation.memory;
  if (length == 0) return {};  // a barrier has no memory
  const auto all = operand.memory < memory.size() ? memory[operand.memory] : active.scratch->bytes();
  REJOIN_CHECK(in_range(operand.offset, length, all.size()), "{} bytes at {} of {}", length, operand.offset,
               all.size());
  return all.subspan(operand.offset, length);
}

void Group::unblocked(Active& active, std::uint32_t number) {
  const auto& task = active.operation.plan.tasks[number];
  const bool remote = task.kind == Task::Kind::receive || task.kind == Task::Kind::send;
  if (remote && peers_[task.peer].stage == Stage::left) return fail_all(has_left(task.peer));
  switch (task.kind) {
    case Task::Kind::receive: return receive(active, number);
    case Task::Kind::send:
      if (const auto ready = active.ready[number]) post(active, number, *ready);
      else active.waits_for_ready.insert(number);
      return;
    case Task::Kind::combine: {
      if (active.on_device()) return give_work(active, number);
      const auto& signature = active.operation.signature;
      combine(signature.combine, signature.type, bytes_at(active, task.at, task.length).data(),
              bytes_at(active, task.first, task.length).data(), bytes_at(active, task.second, task.length).data(),
              task.length / size_of(signature.type), task.last, size());
      return finished(active, number);
    }
    case Task::Kind::copy: {
      if (active.on_device()) return give_work(active, number);
      const auto from = bytes_at(active, task.first, task.length), to = bytes_at(active, task.at, task.length);
      if (!from.empty() && from.data() != to.data()) std::memmove(to.data(), from.data(), from.size());
      return finished(active, number);
    }
  }
}

void Group::finished(Active& active, std::uint32_t number) {
  const auto key = active.key;
  --active.left;
  // A copy: its last task may end the operation.
  const auto next = active.operation.plan.tasks[number].unblocks;
  for (const auto task : next)
    if (--active.blockers[task] == 0) {
      unblocked(active, task);
      if (failed_ || !active_.contains(key)) return;
    }
  end_if_over(active);
}

void Group::end_if_over(Active& active) {
  if (active.left > 0) return;
  const auto found = active_.find(active.key);
  if (found == active_.end()) return;
  auto ended = std::move(found->second);
  active_.erase(found);
  deadlines_.erase(deadlines_.find(ended->operation.deadline));
  give_back(*ended);
  if (ended->key[0] == kCollective) --active_collectives_;
  call(std::move(ended->operation.done), {});
  start_waiting();
}

void Group::handle(const Event& event) {
  switch (event.kind) {
    case EventKind::accepted: return on_accepted(event);
    case EventKind::closed: return on_closed(event);
    case EventKind::completed: {
      const auto found = writes_.find(event.value);
      if (found == writes_.end()) return;  // of an operation that has failed
      const auto [active, task] = found->second;
      writes_.erase(found);
      if (!event.error) return finished(*active, task);
      if (!refused_) refused_ = {gone(active->operation.plan.tasks[task].peer, event.error->message), now_ + kReasonBy};
      return;
    }
    case EventKind::connected:
    case EventKind::message:
    case EventKind::written: {
      const auto found = rank_of_.find(event.endpoint);
      if (found == rank_of_.end()) return on_parted(event);
      if (event.kind == EventKind::connected) return;  // its welcome follows
      if (event.kind == EventKind::message) return on_message(found->second, event.message);
      if (!failed_) arrived(found->second, event.value, std::nullopt);
    }
  }
}

void Group::on_message(std::uint32_t rank, BytesView message) {
  Message kind{};
  Ready ready;
  std::uint64_t id = 0;
  std::uint8_t code = 0;
  const bool known = take(message, kind);
  if (known && kind == Message::welcome) return on_welcome(rank, message);
  if (known && kind == Message::goodbye) return on_goodbye(rank, !message.empty());
  if (known && kind == Message::farewell) {
    peers_[rank].heard_goodbye = true;
    return;
  }
  if (known && kind == Message::abort) peers_[rank].has_failed = true;
  if (failed_) return;  // it has not heard yet
  if (known && kind == Message::ready && take(message, ready)) return on_ready(rank, ready);
  if (known && kind == Message::payload && take(message, id)) return arrived(rank, id, message);
  if (known && kind == Message::abort && take(message, code))
    return fail_all({code <= static_cast<std::uint8_t>(ErrorCode::corrupt) ? ErrorCode(code) : ErrorCode::unavailable,
                     fmt::format("{} has given up: {}", name(rank), printable(as_text(message), 1000))});
  fail_all({ErrorCode::corrupt, fmt::format("{} has sent a message that is none", name(rank))});
}

bool Group::send(std::uint32_t rank, BytesView message) {
  const auto sent = engine_.send(peers_[rank].endpoint, message);
  if (!sent) fail_all(gone(rank, sent.error().message));
  return sent.has_value();
}

void Group::check_deadlines() {
  if (refused_ && now_ >= refused_->until) return fail_all(refused_->error);
  if (configuring_ && now_ >= configured_by_) return fail_all({ErrorCode::timeout, missing()});
  if (deadlines_.empty() || now_ < *deadlines_.begin()) return;
  for (const auto& [key, active] : active_)
    if (now_ >= active->operation.deadline)
      return fail_all(
          {ErrorCode::timeout, fmt::format("timed out: {} waits for {}", describe(active->operation.signature),
                                           what_it_waits_for(*active))});
  for (const auto& active : waiting_)
    if (now_ >= active->operation.deadline)
      return fail_all({ErrorCode::timeout, fmt::format("timed out: {} waits for the collectives before it",
                                                       describe(active->operation.signature))});
}

std::string Group::what_it_waits_for(const Active& active) const {
  if (!active.begun) return "the CUDA stream that it was started behind";
  for (const auto& [id, transfer] : receives_)
    if (transfer.active == &active)
      return fmt::format("bytes from {}", name(active.operation.plan.tasks[transfer.task].peer));
  for (const auto number : active.waits_for_ready)
    return fmt::format("{} to take its bytes", name(active.operation.plan.tasks[number].peer));
  for (const auto& [id, transfer] : writes_)
    if (transfer.active == &active)
      return fmt::format("bytes to land at {}", name(active.operation.plan.tasks[transfer.task].peer));
  for (const auto& work : works_)
    if (work.active == &active) return "the GPU";
  return "itself";
}

// Nothing more of what was under way counts from now on, but its owners get it back only when the others have heard.
void Group::fail_all(Error error, bool tell_others) {
  if (failed_) return;  // there is nothing under way
  failed_ = error;
  refused_.reset();
  receives_.clear(), writes_.clear(), deadlines_.clear();
  ready_early_.clear(), ready_early_count_ = 0;
  failing_ = {.error = error, .until = now_ + kHeardBy, .active = {}};
  for (auto& [key, one] : std::exchange(active_, {})) failing_->active.push_back(std::move(one));
  for (auto& one : std::exchange(waiting_, {})) failing_->active.push_back(std::move(one));
  for (auto& work : works_) work.active = nullptr;  // their memory is the GPU's until they are done
  active_collectives_ = 0, not_ready_ = 0;
  if (std::exchange(configuring_, false)) call(std::move(configured_), tl::unexpected(error));
  if (!tell_others) return;
  for (auto& peer : peers_)
    if (peer.stage == Stage::here) tell_of_failure(peer);
}

void Group::tell_of_failure(Peer& peer) {
  auto message = joined(Message::abort, bytes_of(static_cast<std::uint8_t>(failed_->code)));
  const auto view = as_bytes(std::string_view(failed_->message).substr(0, 1000));
  message.insert(message.end(), view.begin(), view.end());
  if (!engine_.send(peer.endpoint, message)) peer.has_failed = true;  // it may be gone
}

void Group::fail_at_once(Error error) {
  fail_all(std::move(error));
  end_failing();
}

bool Group::others_have_heard() const {
  return std::all_of(peers_.begin(), peers_.end(),
                     [](const Peer& peer) { return peer.stage != Stage::here || peer.has_failed; });
}

// The memory of what fails is withdrawn before anybody hears of it, so that nothing lands there any more.
void Group::end_failing() {
  if (!failing_) return;
  wait_for_works();
  const auto failing = *std::exchange(failing_, std::nullopt);
  for (const auto& one : failing.active) {
    give_back(*one);
    call(std::move(one->operation.done), tl::unexpected(failing.error));
  }
}

std::string Group::name(std::uint32_t rank) const {
  return rank < peers_.size() ? fmt::format("rank {} ({})", rank, peers_[rank].handle.address.text)
                              : fmt::format("rank {}", rank);
}

Error Group::gone(std::uint32_t rank, std::string_view why) const {
  return {ErrorCode::unavailable, fmt::format("{} is gone: {}", name(rank), why)};
}

Error Group::has_left(std::uint32_t rank) const {
  return {ErrorCode::unavailable, fmt::format("{} has left the process group: reconfigure it without", name(rank))};
}

void Group::call(Done done, Result<> result) { callbacks_.emplace_back(std::move(done), std::move(result)); }

void Group::run_callbacks() {
  for (const auto& [done, result] : std::exchange(callbacks_, {}))
    if (done) done(result);
}

}  // namespace rejoin::collectives
