#include "sim/daemon.h"

#include <algorithm>

#include "base/fail.h"
#include "sim/world.h"

namespace rejoin::sim {

namespace {

using namespace std::chrono_literals;

const transport::Secret kStreamSecret = transport::Secret::of({0xca7c4, 0});
const std::string kFamily = "sim";  // of the streams

proto::FromNode as_an_older_one(proto::FromNode message) {
  if (message.has_hello()) message.mutable_hello()->clear_newest(), message.mutable_hello()->clear_release();
  if (message.has_rank_up())
    message.mutable_rank_up()->clear_daemon_release(), message.mutable_rank_up()->clear_location();
  if (message.has_leader_view())
    message.mutable_leader_view()->clear_coordinators(), message.mutable_leader_view()->clear_job();
  if (message.has_replica_status())
    message.mutable_replica_status()->clear_round_trips(), message.mutable_replica_status()->clear_rates();
  if (message.has_accusation()) {
    auto& accusation = *message.mutable_accusation();
    accusation.clear_unconnected(), accusation.clear_found(), accusation.clear_tells_connections();
  }
  return message;
}

}  // namespace

Daemon::Daemon(World& world, std::uint32_t node_number)
    : Process(world.next_number(), node_number, world.chance("daemon", node_number)),
      node(node_number),
      world_(world),
      machine_(fmt::format("node {}", node_number), world.job.silence, instance, world.location_of(node_number)),
      streams_(kFamily, Location::parse(world.location_of(node_number)).value_or(Location())),
      uplink_(
          world, *this, node_number, world.stations_of(node_number), fmt::format("node {}", node_number),
          {.up = [this] { on_coordinator_up(); },
           .down = [this] { carry_out(machine_.on_coordinator_down()); },
           .message = [this](const proto::ToNode& message) { on_coordinator_message(message); },
           .hosts = [this](proto::LeaderView& view) { machine_.write_hosts(view); },
           .said = [older = is_older(world.shape.upgrade)](
                       proto::FromNode message) { return older ? as_an_older_one(std::move(message)) : message; }}) {
  engine = world.make_engine(node, rails);
  address_ = engine->listen({}).value().text;
  catchup::Service::Options options;
  options.compression = random.one_in(2) ? catchup::Compression::never : catchup::Compression::always;
  options.silence = world.job.silence;
  service_ = std::make_unique<catchup::Service>(*engine, kStreamSecret, options, world.clock());
}

Daemon::~Daemon() {
  world_.kill(rails);
  service_.reset();
  engine.reset();
}

TimePoint Daemon::local_now() const { return world_.now_at(node); }

// ---- trainers

void Daemon::on_hello(std::uint64_t instance_of, membership::RankConnection connection, const proto::RankUp& up) {
  Trainer* trainer = world_.trainer(instance_of);
  if (trainer == nullptr || trainer->connection != connection) return;  // it has gone away meanwhile
  const catchup::RankKey key{ReplicaId(up.replica()), RankId(up.rank())};
  if (!clear_place(*trainer, key, up)) return;
  auto view = local::View::of(trainer->state().owner());
  REJOIN_CHECK(view.has_value(), "{}", view.error());
  LocalRank& rank = ranks_[connection];
  rank.trainer = trainer->instance;
  rank.key = key;
  const bool complete = view->complete();
  auto shared = std::make_shared<local::View>(std::move(*view));
  post([this, key, instance = up.instance(), shared](catchup::Service& service, TimePoint) {
    if (auto added = service.add_rank(key, instance, std::move(*shared)); !added)
      world_.note("state of replica {}: {}", key.replica, added.error().message);
  });
  world_.introduces(*this, node);
  to_trainer(rank, 20us, [connection](Trainer& to) { to.on_welcome(connection); });
  proto::FromNode message;
  *message.mutable_rank_up() = up;
  message.mutable_rank_up()->set_stream_address(daemon::stream_address(kFamily, address_));
  const bool mixed = world_.shape.upgrade;
  const bool says_it = !is_older(mixed) && !trainer->is_older(mixed);
  if (says_it) message.mutable_rank_up()->set_speaks(membership::kProtocolVersion);
  message.mutable_rank_up()->set_passes_on(!is_older(mixed));
  world_.on_moment(Moment::rank_up, up.replica());
  carry_out(machine_.on_rank_message(connection, message, local_now()));
  if (complete) carry_out(machine_.on_rank_message(connection, daemon::report_of({key, up.instance()}), local_now()));
}

// As NodeServer's: who has the place and lives keeps it. False: the newcomer is refused.
bool Daemon::clear_place(Trainer& newcomer, const catchup::RankKey& key, const proto::RankUp& up) {
  using Gone = membership::Node::Gone;
  std::vector<std::pair<membership::RankConnection, Gone>> older;
  for (const auto& [id, rank] : ranks_) {
    if (rank.key != key) continue;
    const bool lives = world_.trainer(rank.trainer) != nullptr;
    const Gone how = lives ? machine_.gone_for(id, up) : Gone::ended;
    if (how == Gone::ended && lives) {
      world_.deliver(newcomer, random.between(1us, 20us), [at = &newcomer, connection = newcomer.connection] {
        at->on_refused(connection, "another process of its node has its place");
      });
      return false;
    }
    older.emplace_back(id, how);
  }
  for (const auto& [id, how] : older) drop(id, "the rank was started again", how);
  return true;
}

// As NodeServer's: the coordinator asks whether a process lives.
void Daemon::look_after(const proto::Inquiry& inquiry) {
  const catchup::RankKey key{ReplicaId(inquiry.replica()), RankId(inquiry.rank())};
  for (const auto& [id, rank] : ranks_)
    if (rank.key == key && world_.trainer(rank.trainer) == nullptr)
      return drop(id, "its process ended", membership::Node::Gone::ended);
}

void Daemon::on_report(membership::RankConnection rank, const proto::FromNode& report) {
  if (ranks_.contains(rank)) carry_out(machine_.on_rank_message(rank, report, local_now()));
}

// It is answered when the stream's thread has let go of its memory.
void Daemon::on_leave(membership::RankConnection rank) {
  const auto found = ranks_.find(rank);
  if (found == ranks_.end()) return;
  const std::uint64_t leaver = found->second.trainer;
  if (const Trainer* trainer = world_.trainer(leaver)) world_.on_farewell(*trainer, *this);
  drop(rank, machine_.plan().finished() ? "the job is finished" : "of its own accord", membership::Node::Gone::left);
  post([this, rank, leaver](catchup::Service&, TimePoint) {
    world_.send(*this, [this, rank, leaver] {
      if (Trainer* trainer = world_.trainer(leaver))
        world_.deliver(*trainer, random.between(1us, 20us), [trainer, rank] { trainer->on_left(rank); });
    });
  });
}

void Daemon::drop(membership::RankConnection rank, const std::string& reason, membership::Node::Gone how) {
  auto gone = ranks_.extract(rank);
  if (gone.empty()) {
    if (silent_.erase(rank) > 0) carry_out(machine_.on_rank_gone(rank, reason, how));
    return;
  }
  if (how == membership::Node::Gone::silent) silent_.insert(rank);
  LocalRank& local = gone.mapped();
  post([key = local.key](catchup::Service& service, TimePoint) { service.remove_rank(key); });
  carry_out(machine_.on_rank_gone(rank, reason, how));
  if (how != membership::Node::Gone::left) to_trainer(local, 50us, [rank](Trainer& to) { to.on_daemon_gone(rank); });
}

void Daemon::to_trainer(const LocalRank& rank, Duration most, std::function<void(Trainer&)> message) {
  world_.send(*this, [this, number = rank.trainer, last = rank.delivered, most, message = std::move(message)] {
    if (Trainer* trainer = world_.trainer(number))
      world_.deliver(*trainer, world_.in_order(*last, random.between(1us, most)), [=] { message(*trainer); });
  });
}

// ---- the coordinator

void Daemon::on_coordinator_up() {
  world_.introduces(*this, node);
  carry_out(machine_.on_coordinator_up(local_now()));
}

void Daemon::on_coordinator_message(const proto::ToNode& message) {
  if (message.has_inquiry()) look_after(message.inquiry());
  if (message.has_introduce()) world_.introduces(*this, node);
  carry_out(machine_.on_coordinator_message(message, local_now()));
  if (message.has_plan() || message.has_peers()) follow_plan(message.has_peers());
}

void Daemon::tick() {
  carry_out(machine_.on_tick(local_now()));
  uplink_.tick();
  if (machine_.coordinator_up()) uplink_.check(machine_.coordinator_heard());
  uplink_.call_all();
  world_.wake(*this);
}

void Daemon::carry_out(const membership::Node::Actions& actions) {
  for (const auto& message : actions.to_coordinator) uplink_.send(message);
  for (const auto& [connection, message] : actions.to_ranks) {
    auto found = ranks_.find(connection);
    if (found == ranks_.end()) continue;
    to_trainer(found->second, 20us, [connection = connection, message = message](Trainer& to) {
      to.on_control_message(connection, message);
    });
  }
  for (auto rank : actions.silent) {
    world_.count("rank found silent");
    drop(rank, "its process gave no sign of life", membership::Node::Gone::silent);
  }
}

void Daemon::follow_plan(bool other_peers) {
  const Step committed(machine_.plan().committed());
  for (const auto& one : streams_.of(machine_, other_peers)) {
    const daemon::LocalStream& stream = *one;
    auto found = ranks_.find(stream.rank);
    if (found == ranks_.end()) continue;
    LocalRank& rank = found->second;
    const bool before = std::exchange(rank.catching_up, stream.catching_up);
    if (before && !stream.catching_up) {
      world_.count("promoted");
      world_.on_moment(Moment::promoted, stream.key.replica.value);
      post([key = stream.key](catchup::Service& service, TimePoint) { service.finish(key); });
    }
    // One of before does not serve while it catches up.
    const auto serves = stream.catching_up && is_older(world_.shape.upgrade) ? std::nullopt : stream.serves;
    rank.job = stream.job;
    if (std::exchange(rank.serves, serves) != serves || before != stream.catching_up) serve(rank);
    if (!stream.catching_up) continue;
    if (!before) {
      world_.count("catch-up begun");
      world_.on_moment(Moment::catch_up_begun, stream.key.replica.value);
    }
    const bool fooled = world_.planted(Plant::joiners_prove) && !stream.chain.fellows.empty();
    const auto& sources = fooled ? stream.chain.fellows : stream.sources;
    const auto chain = fooled ? catchup::Chain{} : stream.chain;
    post([key = stream.key, sources, chain, committed](catchup::Service& service, TimePoint now) {
      service.catch_up(key, sources, committed, now, chain);
    });
    if (lies()) serve(rank);
  }
}

bool Daemon::lies() const { return local_now() < lies_until_ || world_.planted(Plant::joiners_prove); }

void Daemon::serve(const LocalRank& rank) {
  post([key = rank.key, serves = rank.serves, job = rank.job, joining = rank.catching_up && !lies()](
           catchup::Service& service, TimePoint) { service.serve(key, serves, job, joining); });
}

void Daemon::lie(TimePoint until) {
  lies_until_ = until;
  for (const auto& [connection, rank] : ranks_)
    if (rank.catching_up) serve(rank);
}

std::string Daemon::describe(catchup::RankKey key) const {
  const auto progress = service_->progress(key, local_now());
  if (!progress) return "no stream";
  return fmt::format("{} of {} slices verified, {} bytes, {} fetched again, {} sources", progress->verified,
                     progress->total_slices, progress->bytes, progress->refetched, progress->sources);
}

// ---- the stream's thread: it has a queue from the other one, and tells it later what has become of it

void Daemon::post(Command command) {
  commands_.push_back(std::move(command));
  world_.wake(*this);
}

Duration Daemon::until_run() {
  return world_.shape.slow_streams && random.one_in(4) ? random.of_any_size(20us, 100ms) : random.between(1us, 20us);
}

void Daemon::stop_stream(TimePoint until) { stream_stands_until_ = std::max(stream_stands_until_, until); }

bool Daemon::stream_stands() const { return world_.now() < stream_stands_until_; }

void Daemon::run() {
  if (stream_stands()) return;  // the next tick finds what has come
  const TimePoint now = local_now();
  for (const auto& command : std::exchange(commands_, {})) command(*service_, now);
  auto caught_up = service_->poll(now);
  if (const auto passed_on = service_->bytes_passed_on(); passed_on > passed_on_) {
    passed_on_ = passed_on;
    world_.count("passed on by a joiner");
  }
  for (const auto& [key, drift] : service_->take_drifts())
    world_.deliver(*this, world_.in_order(reported_, until_run()), [this, key = key, drift = drift] {
      for (const auto& [connection, rank] : ranks_)
        if (rank.key == key) {
          world_.count("sources found to differ");
          return carry_out(machine_.on_rank_message(connection, daemon::report_of(key, drift), local_now()));
        }
    });
  if (world_.planted(Plant::early_verification))
    for (auto key : service_->joining())
      for (const auto& [connection, rank] : machine_.ranks())
        if (ranks_.contains(connection) && ranks_.at(connection).key == key && world_.plant_due())
          caught_up.push_back({key, rank.up.instance()});
  for (const auto& completed : caught_up) {
    for (std::uint32_t other = 0; other < world_.nodes(); ++other)
      if (const Daemon* one = world_.daemon_of(other); one != nullptr && one->stream_stands())
        world_.count("caught up while a stream stood still");
    world_.on_moment(Moment::caught_up, completed.key.replica.value);
    world_.deliver(*this, world_.in_order(reported_, until_run()), [this, completed] { on_caught_up(completed); });
  }
  if (!service_->busy()) service_->poll_again(now);  // as before it would sleep
  if (service_->busy() || !commands_.empty()) world_.wake(*this);
}

void Daemon::on_caught_up(const catchup::Service::CompletedRank& completed) {
  for (const auto& [connection, rank] : ranks_) {
    if (rank.key != completed.key) continue;
    if (world_.planted(Plant::damage_after_verification))
      if (Trainer* trainer = world_.trainer(rank.trainer)) trainer->state().column({4}, 0)[11] ^= std::byte{4};
    proto::FromNode message = daemon::report_of(completed);
    if (world_.planted(Plant::wrong_instance))
      message.mutable_caught_up()->set_instance(machine_.ranks().at(connection).up.instance());
    world_.count("caught up");
    carry_out(machine_.on_rank_message(connection, message, local_now()));
    break;
  }
}

}  // namespace rejoin::sim
