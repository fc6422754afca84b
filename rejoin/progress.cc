#include "rejoin/progress.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <random>

#include "base/events.h"
#include "base/log.h"
#include "membership/node.h"
#include "transport/factory.h"

namespace rejoin {

namespace {

std::uint64_t new_life() {
  std::random_device entropy;
  return (std::uint64_t{entropy()} << 32 | entropy()) | 1;
}

ftar::Member member_of(const auto& m) { return {ReplicaId(m.replica()), Incarnation(m.incarnation())}; }

constexpr Duration kReconnect = std::chrono::milliseconds(20);
constexpr Duration kWorthTelling = std::chrono::seconds(1);  // of a wait: named in the log and the status from then on

}  // namespace

Progress::Progress(const SessionConfig& config, shm::Owner& owner, std::vector<ftar::BucketSpec> buckets,
                   std::uint64_t plan_hash)
    : config_(config),
      owner_(owner),
      buckets_(std::move(buckets)),
      plan_hash_(plan_hash),
      life_(new_life()),
      machine_(ReplicaId(config.replica), config.rank),
      submitted_(buckets_.size()),
      done_(buckets_.size()),
      wanted_(buckets_.size()) {}

Progress::~Progress() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  if (wake_) signal_eventfd(wake_);
  if (thread_.joinable()) thread_.join();
  ring_.reset();
}

// ---- the trainer's thread

Result<> Progress::join(std::uint64_t version, std::uint64_t digest) {
  version_at_join_ = version;
  digest_at_join_ = digest;
  auto wake = make_eventfd();
  if (!wake) return tl::unexpected(wake.error());
  wake_ = std::move(*wake);
  auto engine = transport::make_engine(config_.transport);
  if (!engine) return tl::unexpected(engine.error());
  engine_ = std::move(*engine);
  auto address = engine_->listen({config_.data_listen});
  if (!address) return tl::unexpected(address.error());
  address_ = address->text;

  // The first contact is made here, so that its errors reach the caller.
  auto socket = connect_unix(config_.socket);
  if (!socket)
    return rejoin::fail(ErrorCode::unavailable,
                        "no Rejoin daemon at {}: {}; start rejoind on this node with --socket {}", config_.socket,
                        socket.error().message, config_.socket);
  if (auto greeted = greet(*socket); !greeted) return greeted;
  const TimePoint deadline = clock_.now() + config_.patience;
  for (;;) {
    auto received = receive_with_fds(*socket, 512 * KiB);
    if (!received)
      return rejoin::fail(ErrorCode::unavailable, "the daemon at {}: {}", config_.socket, received.error().message);
    if (!*received) {
      if (clock_.now() > deadline)
        return rejoin::fail(ErrorCode::timeout, "the daemon at {} does not answer", config_.socket);
      pollfd waiting{socket->get(), POLLIN, 0};
      ::poll(&waiting, 1, 100);
      continue;
    }
    proto::ToTrainer message;
    if (!message.ParseFromArray((*received)->bytes.data(), static_cast<int>((*received)->bytes.size())))
      return rejoin::fail(ErrorCode::corrupt, "what answers at {} is not a Rejoin daemon", config_.socket);
    if (message.kind_case() == proto::ToTrainer::kRefusal)
      return rejoin::fail(ErrorCode::refused, "the daemon at {} refused: {}", config_.socket, message.refusal());
    if (!message.has_welcome()) continue;
    if (message.welcome().protocol() != membership::kProtocolVersion)
      return rejoin::fail(ErrorCode::mismatch,
                          "this library speaks protocol {}, the daemon {}; use one version of both",
                          membership::kProtocolVersion, message.welcome().protocol());
    silence_ = std::chrono::milliseconds(message.welcome().silence_ms());
    secret_ = message.welcome().data_secret();
    break;
  }
  daemon_ = std::move(*socket);
  daemon_seen_ = clock_.now();
  idle_.emplace(*engine_, transport::Idle::Options{.spins = 200, .yields = 20});
  thread_ = std::thread([this] { run(); });
  return {};
}

Result<std::optional<Progress::StepView>> Progress::wait_for_step(std::uint64_t after) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return failure_ || finished_ || (have_step_ && current_.step > after); });
  if (failure_) return tl::unexpected(*failure_);
  if (finished_) return std::optional<StepView>{};
  taken_ = current_.step;
  signal_eventfd(wake_);
  return std::optional(current_);
}

Result<> Progress::all_reduce(std::uint32_t bucket) {
  {
    const std::lock_guard lock(mutex_);
    if (failure_) return tl::unexpected(*failure_);
    if (bucket >= wanted_.size())
      return rejoin::fail(ErrorCode::invalid_argument, "bucket {} of {}", bucket, wanted_.size());
    if (wanted_[bucket])
      return rejoin::fail(ErrorCode::invalid_argument, "bucket {} is being reduced already in this step", bucket);
    wanted_[bucket] = true;
  }
  signal_eventfd(wake_);
  return {};
}

Result<bool> Progress::wait_for_commit(std::uint64_t step) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return failure_ || committed_ >= step; });
  if (committed_ >= step) return committed_contributes_;
  return tl::unexpected(*failure_);
}

// ---- the progress thread

void Progress::fail(Error error) {
  spdlog::error("{}", error.message);
  {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = std::move(error);
  }
  changed_.notify_all();
}

void Progress::run() {
  for (;;) {
    {
      const std::lock_guard lock(mutex_);
      if (stop_ || failure_) break;
    }
    const TimePoint now = clock_.now();
    if (now - heartbeat_at_ >= silence_ / 8) {
      heartbeat_at_ = now;
      owner_.page().heartbeat.store(static_cast<std::uint64_t>(now.time_since_epoch().count()),
                                    std::memory_order_relaxed);
      proto::FromNode heartbeat;
      auto& counted = *heartbeat.mutable_heartbeat();
      const ftar::Stats stats = ring_ ? ring_->stats() : ftar::Stats{};
      counted.set_operations(stats.operations_done);
      counted.set_bytes_reduced(stats.bytes_reduced);
      counted.set_stale_dropped(stats.stale_dropped);
      for (const auto& peer : stats.peers) {
        auto& hop = *counted.add_hops();
        hop.set_replica(peer.member.replica.value);
        hop.set_chunks(peer.chunks_received);
        hop.set_bytes(peer.bytes_received);
        hop.set_longest_gap_us(static_cast<std::uint64_t>(peer.longest_gap / std::chrono::microseconds(1)));
      }
      say(heartbeat);
    }
    if (daemon_) poll_daemon(now);
    else reconnect(now);
    if (ring_) {
      submit_wanted();
      poll_ring(now);
      look_for_stalls(now);
    }
    const bool urgent = ring_ && ring_->busy();
    Duration limit = std::min<Duration>(silence_ / 8, std::chrono::milliseconds(100));
    if (!daemon_) limit = kReconnect;
    const int others[] = {daemon_.get(), wake_.get()};
    idle_->wait(urgent, limit, std::span(others).subspan(daemon_ ? 0 : 1));
    drain_eventfd(wake_);
  }
}

void Progress::poll_ring(TimePoint now) {
  bool links_changed = false;
  for (const auto& outcome : ring_->poll(now)) {
    idle_->reset();
    switch (outcome.kind) {
      case ftar::Outcome::Kind::done:
        if (outcome.epoch == ring_->epoch() && outcome.step == machine_.step()) done_[outcome.bucket] = true;
        break;
      case ftar::Outcome::Kind::entered: events::emit("entered", {{"epoch", outcome.epoch.value}}); break;
      case ftar::Outcome::Kind::peer_up: links_changed = true; break;
      case ftar::Outcome::Kind::peer_lost: {
        links_changed = true;
        spdlog::debug("lost replica {}: {}", outcome.member.replica, outcome.error->message);
        proto::FromNode report;
        auto& accusation = *report.mutable_accusation();
        accusation.set_replica(config_.replica);
        accusation.set_rank(config_.rank);
        accusation.set_epoch(machine_.epoch().value);
        accusation.set_suspect(outcome.member.replica.value);
        accusation.set_what(outcome.error->message);
        accusation.set_lost(true);
        say(report);
        break;
      }
    }
  }
  if (links_changed) report_links();
  report_exchanged();
}

// Hands over what the trainer has asked for, or, while catching up, everything.
void Progress::submit_wanted() {
  if (!machine_.member() || !machine_.has_contributors() || ring_->epoch() != machine_.epoch() || machine_.exchanged())
    return;
  std::vector<bool> wanted;
  {
    const std::lock_guard lock(mutex_);
    // Until the trainer has taken up the step, its buckets are still those of the one before.
    if (!have_step_ || current_.step != machine_.step().value) return;
    wanted = machine_.contributes() ? wanted_ : std::vector<bool>(buckets_.size(), true);
    // A joiner's outputs hold the gradients of the step before until the trainer is done with them.
    if (!machine_.contributes() && taken_ != machine_.step().value) return;
  }
  for (std::uint32_t b = 0; b < buckets_.size(); ++b) {
    if (!wanted[b] || submitted_[b]) continue;
    submitted_[b] = true;
    owner_.set_phase(shm::Phase::exchange);
    if (auto started = ring_->all_reduce(b, machine_.step(), ReduceOp::mean); !started) return fail(started.error());
  }
}

void Progress::report_exchanged() {
  if (!machine_.member() || machine_.exchanged() || ring_->epoch() != machine_.epoch()) return;
  if (!std::all_of(done_.begin(), done_.end(), [](bool d) { return d; })) return;
  machine_.on_exchanged();
  proto::FromNode report;
  auto& exchanged = *report.mutable_exchanged();
  exchanged.set_replica(config_.replica);
  exchanged.set_epoch(machine_.epoch().value);
  exchanged.set_step(machine_.step().value);
  exchanged.add_ranks(config_.rank);
  events::emit("exchanged", {{"step", machine_.step().value}, {"epoch", machine_.epoch().value}});
  say(report);
}

void Progress::report_links() {
  proto::FromNode report;
  auto& links = *report.mutable_links();
  links.set_replica(config_.replica);
  links.set_rank(config_.rank);
  links.set_life(life_);
  for (const auto& peer : peers_.peers())
    if (ring_->connected(member_of(peer))) links.add_incarnations(peer.incarnation());
  say(report);
}

// A trainer that computes is silent, too. What is normal is learned from the steps so far; a process that is stopped
// is found by its missing heartbeats long before.
Duration Progress::patience_with_compute() const {
  constexpr std::size_t enough = 4;
  if (step_times_.size() < enough) return std::max<Duration>(silence_, config_.patience);
  return silence_ + 8 * *std::max_element(step_times_.begin(), step_times_.end());
}

// Nothing waits in silence: after a second the log and the status say for whom; what lasts too long is for the
// coordinator to judge.
void Progress::look_for_stalls(TimePoint now) {
  if (now - stall_checked_ < silence_ / 16) return;
  stall_checked_ = now;
  if (!machine_.member() || machine_.exchanged() || !machine_.has_contributors()) return;
  for (const auto& wait : ring_->waits(now)) {
    if (wait.since > kWorthTelling && stall_said_for_ != machine_.step().value) {
      stall_said_for_ = machine_.step().value;
      spdlog::warn("step {} waits for replica {} rank {}: {} ({:.0f} ms)", machine_.step(),
                   wait.on ? wait.on->replica.value : config_.replica, config_.rank, wait.what,
                   milliseconds(wait.since));
    }
    const Duration patience = wait.on_trainers ? patience_with_compute() : silence_;
    if (!wait.on || wait.since <= std::min(kWorthTelling, patience)) continue;
    proto::FromNode report;
    auto& accusation = *report.mutable_accusation();
    accusation.set_replica(config_.replica);
    accusation.set_rank(config_.rank);
    accusation.set_epoch(machine_.epoch().value);
    accusation.set_suspect(wait.on->replica.value);
    accusation.set_what(wait.what);
    accusation.set_only_waiting(wait.since <= patience);
    say(report);
    break;
  }
}

// ---- the daemon

proto::LocalHello Progress::hello() const {
  proto::LocalHello hello;
  hello.set_protocol(membership::kProtocolVersion);
  hello.set_layout(shm::kLayoutVersion);
  const Bytes manifest = owner_.manifest().serialise();
  hello.set_manifest(std::string(as_text(manifest)));
  auto& up = *hello.mutable_up();
  up.set_replica(config_.replica);
  up.set_rank(config_.rank);
  up.set_life(life_);
  up.set_incarnation(machine_.incarnation().value);
  up.set_address(address_);
  up.set_plan_hash(plan_hash_);
  up.set_version(version_at_join_);
  up.set_digest(digest_at_join_);
  up.set_pid(::getpid());
  if (machine_.exchanged()) {
    up.set_exchanged_epoch(machine_.epoch().value);
    up.set_exchanged_step(machine_.step().value);
  }
  return hello;
}

Result<> Progress::greet(Fd& socket) {
  proto::FromTrainer message;
  *message.mutable_hello() = hello();
  const std::string bytes = message.SerializeAsString();
  const int size = 1 << 20;
  (void)::setsockopt(socket.get(), SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
  return send_with_fds(
      socket, as_bytes(bytes),
      {owner_.state_fd().get(), owner_.page_fd().get(), owner_.aside_fd().get(), owner_.doorbell().get()});
}

void Progress::reconnect(TimePoint now) {
  if (now < retry_at_) return;
  retry_at_ = now + kReconnect;
  if (now - daemon_seen_ > config_.patience)
    return fail(
        {ErrorCode::timeout, fmt::format("no daemon at {} for {} s", config_.socket, config_.patience.count() / 1000)});
  auto socket = connect_unix(config_.socket);
  if (!socket || !greet(*socket)) return;
  daemon_ = std::move(*socket);
  daemon_seen_ = now;
  spdlog::info("registered again with the daemon at {}", config_.socket);
  events::emit("daemon_back");
  if (ring_) report_links();
}

void Progress::say(const proto::FromNode& report) {
  if (!daemon_) return;  // said again by the registration with the next daemon
  proto::FromTrainer message;
  *message.mutable_report() = report;
  const std::string bytes = message.SerializeAsString();
  if (auto sent = send_with_fds(daemon_, as_bytes(bytes), {}); !sent && sent.error().code != ErrorCode::exhausted)
    daemon_.reset();
}

void Progress::poll_daemon(TimePoint now) {
  for (;;) {
    auto received = receive_with_fds(daemon_, 512 * KiB);
    if (!received) {
      spdlog::warn("the daemon is gone ({}); looking for it again", received.error().message);
      events::emit("daemon_lost");
      daemon_.reset();
      daemon_seen_ = now;
      return;
    }
    if (!*received) return;
    daemon_seen_ = now;
    proto::ToTrainer message;
    if (!message.ParseFromArray((*received)->bytes.data(), static_cast<int>((*received)->bytes.size()))) {
      spdlog::warn("the daemon sent bytes that are no message; ignored");
      continue;
    }
    if (message.kind_case() == proto::ToTrainer::kRefusal) return fail({ErrorCode::refused, message.refusal()});
    if (message.has_word()) on_word(message.word());
    if (!daemon_) return;
  }
}

void Progress::on_word(const proto::ToNode& word) {
  switch (word.kind_case()) {
    case proto::ToNode::kRegistered: {
      if (machine_.incarnation() != Incarnation{}) return;
      machine_.on_registered(Incarnation(word.registered().incarnation()));
      auto ring = ftar::Communicator::make(
          *engine_, {.chunk_bytes = config_.chunk_bytes, .chunks_in_flight = config_.chunks_in_flight},
          {ReplicaId(config_.replica), machine_.incarnation()}, buckets_, secret_);
      if (!ring) return fail(ring.error());
      ring_ = std::move(*ring);
      on_peers(proto::Peers(peers_));
      return;
    }
    case proto::ToNode::kRefused: return fail({ErrorCode::refused, word.refused().reason()});
    case proto::ToNode::kFenced:
      if (word.fenced().incarnation() == machine_.incarnation().value)
        fail({ErrorCode::cancelled,
              fmt::format("this replica is out of the job: {}; start it again to catch up", word.fenced().reason())});
      return;
    case proto::ToNode::kPeers: return on_peers(word.peers());
    case proto::ToNode::kPlan: return on_plan(word.plan());
    case proto::ToNode::kHeartbeat:
    case proto::ToNode::KIND_NOT_SET: return;
  }
}

void Progress::on_peers(const proto::Peers& peers) {
  const proto::Peers before = std::exchange(peers_, peers);
  if (!ring_) return;
  for (const auto& peer : before.peers()) {
    const bool stays = std::any_of(peers_.peers().begin(), peers_.peers().end(),
                                   [&](const auto& p) { return p.incarnation() == peer.incarnation(); });
    if (!stays) ring_->forget(member_of(peer));  // fenced
  }
  for (const auto& peer : peers_.peers()) {
    // Of two, the newer one connects.
    if (peer.incarnation() >= machine_.incarnation().value || peer.replica() == config_.replica) continue;
    if (auto connecting = ring_->connect(member_of(peer), {peer.address()}); !connecting)
      spdlog::warn("replica {} at {}: {}", peer.replica(), peer.address(), connecting.error().message);
  }
  report_links();
}

void Progress::on_plan(const proto::Plan& plan) {
  const bool contributed = machine_.contributes();
  const TimePoint now = clock_.now();
  const std::uint64_t under_way = machine_.step().value;
  const auto meaning = machine_.on_plan(plan);
  using Meaning = membership::Rank::Meaning;
  if (meaning == Meaning::fenced)
    return fail({ErrorCode::cancelled, "this replica is out of the job; start it again to catch up"});
  if (meaning == Meaning::nothing) return;
  if (meaning == Meaning::committed) {
    constexpr std::size_t remembered = 16;
    if (committed_at_ != TimePoint{}) step_times_.push_back(now - committed_at_);
    if (step_times_.size() > remembered) step_times_.erase(step_times_.begin());
    committed_at_ = now;
  }
  if (machine_.epoch_changed() && machine_.has_contributors()) enter_epoch();
  {
    const std::lock_guard lock(mutex_);
    if (meaning == Meaning::committed || meaning == Meaning::finished) {
      committed_ = under_way;
      committed_contributes_ = contributed;
      wanted_.assign(buckets_.size(), false);
    }
    finished_ = meaning == Meaning::finished;
    have_step_ = machine_.has_contributors() && !finished_;
    current_.step = machine_.step().value;
    current_.contributes = machine_.contributes();
    current_.batch.clear();
    for (const auto& range : machine_.batch()) current_.batch.push_back({range.begin, range.end});
  }
  if (meaning == Meaning::committed || meaning == Meaning::finished)
    events::emit("committed", {{"step", under_way}, {"epoch", plan.epoch()}});
  submitted_.assign(buckets_.size(), false);
  done_.assign(buckets_.size(), false);
  changed_.notify_all();
}

void Progress::enter_epoch() {
  if (machine_.epoch() <= ring_->epoch()) return;
  std::vector<ftar::Place> places;
  for (const auto& m : machine_.plan().members())
    places.push_back({member_of(m), m.catching_up() ? ftar::Role::catching_up : ftar::Role::contributor});
  events::emit("enter_epoch", {{"epoch", machine_.epoch().value}, {"step", machine_.step().value}});
  ring_->enter(machine_.epoch(), std::move(places));
}

}  // namespace rejoin
