#include "sim/daemon.h"

#include <algorithm>

#include "base/deadlines.h"
#include "base/fail.h"
#include "sim/world.h"

namespace rejoin::sim {

namespace {

using namespace std::chrono_literals;

const transport::Secret kStreamSecret = transport::Secret::of({0xca7c4, 0});
constexpr Duration kRetry = 50ms;
const std::string kFamily = "sim";  // of the streams

proto::FromNode as_an_older_one(proto::FromNode message) {
  if (message.has_hello()) message.mutable_hello()->clear_newest(), message.mutable_hello()->clear_release();
  if (message.has_rank_up())
    message.mutable_rank_up()->clear_daemon_release(), message.mutable_rank_up()->clear_location();
  if (message.has_leader_view())
    message.mutable_leader_view()->clear_coordinators(), message.mutable_leader_view()->clear_job();
  if (message.has_replica_status())
    message.mutable_replica_status()->clear_round_trips(), message.mutable_replica_status()->clear_rates();
  return message;
}

}  // namespace

Daemon::Daemon(World& world, std::uint32_t node_number)
    : Process(world.next_number(), node_number, world.chance("daemon", node_number)),
      node(node_number),
      world_(world),
      machine_(fmt::format("node {}", node_number), world.job.silence, instance, world.location_of(node_number)),
      streams_(kFamily, Location::parse(world.location_of(node_number)).value_or(Location())),
      tracker_(fmt::format("node {}", node_number), world.job.silence, world.shape.coordinators,
               [this](proto::LeaderView& view) { machine_.write_hosts(view); }),
      connections_(world.shape.coordinators) {
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
  if (!clear_place(*trainer, key, up.instance())) return;
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
  world_.introduces(*this);
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
bool Daemon::clear_place(Trainer& newcomer, const catchup::RankKey& key, std::uint64_t rank_instance) {
  using Gone = membership::Node::Gone;
  std::vector<std::pair<membership::RankConnection, Gone>> older;
  for (const auto& [id, rank] : ranks_) {
    if (rank.key != key) continue;
    const Gone how = machine_.gone_for(id, rank_instance);
    if (how != Gone::replaced && world_.trainer(rank.trainer) != nullptr) {
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

void Daemon::drop(membership::RankConnection rank, const std::string& reason, membership::Node::Gone how) {
  auto gone = ranks_.extract(rank);
  if (gone.empty()) return;
  LocalRank& local = gone.mapped();
  post([key = local.key](catchup::Service& service, TimePoint) { service.remove_rank(key); });
  carry_out(machine_.on_rank_gone(rank, reason, how));
  to_trainer(local, 50us, [rank](Trainer& to) { to.on_daemon_gone(rank); });
}

void Daemon::to_trainer(const LocalRank& rank, Duration most, std::function<void(Trainer&)> message) {
  world_.send(*this, [this, number = rank.trainer, last = rank.delivered, most, message = std::move(message)] {
    if (Trainer* trainer = world_.trainer(number))
      world_.deliver(*trainer, world_.in_order(*last, random.between(1us, most)), [=] { message(*trainer); });
  });
}

// ---- the coordinator

std::size_t Daemon::connection_of(std::uint64_t link) const {
  const auto found = std::ranges::find_if(
      connections_, [&](const Connection& one) { return link != 0 && (one.link == link || one.connecting == link); });
  return static_cast<std::size_t>(found - connections_.begin());
}

void Daemon::on_link_up(std::uint64_t answered) {
  const std::size_t i = connection_of(answered);
  if (i == connections_.size() || connections_[i].connecting != answered) return;
  connections_[i].connecting = 0;
  if (const auto silent = std::exchange(connections_[i].link, 0); silent != 0) {
    hang_up(silent);
    act(tracker_.on_disconnected(i, local_now()));
  }
  connections_[i].link = answered;
  connections_[i].heard = local_now();
  act(tracker_.on_connected(i, local_now()));
}

void Daemon::on_link_down(std::uint64_t gone) {
  const std::size_t i = connection_of(gone);
  if (i == connections_.size()) return;
  if (connections_[i].connecting == gone) connections_[i].connecting = 0;
  if (connections_[i].link == gone) lose(i);
}

void Daemon::lose(std::size_t i) {
  connections_[i].link = 0;
  if (connections_[i].connecting == 0) connections_[i].connect_at = local_now() + kRetry;
  act(tracker_.on_disconnected(i, local_now()));
}

void Daemon::on_control_message(std::uint64_t from, const proto::ToNode& message) {
  const std::size_t i = connection_of(from);
  if (i == connections_.size() || connections_[i].link != from) return;
  connections_[i].heard = local_now();
  if (const auto beside = std::exchange(connections_[i].connecting, 0); beside != 0) hang_up(beside);
  const auto actions = tracker_.on_message(i, message, local_now());
  act(actions);
  if (!actions.pass) return;
  if (message.has_inquiry()) look_after(message.inquiry());
  if (message.has_introduce()) world_.introduces(*this);
  carry_out(machine_.on_coordinator_message(message, local_now()));
  if (message.has_plan() || message.has_peers()) follow_plan(message.has_peers());
}

void Daemon::act(const membership::LeaderTracker::Actions& actions) {
  for (const auto& note : actions.notes) world_.note("node {}: {}", node, note.text);
  for (const auto& [to, message] : actions.send)
    if (connections_[to].link != 0) tell(connections_[to].link, message);
  if (actions.down) carry_out(machine_.on_coordinator_down());
  if (actions.up) {
    hears_since_ = local_now();
    world_.introduces(*this);
    carry_out(machine_.on_coordinator_up(local_now()));
  }
  for (auto i : actions.close) {
    hang_up(connections_[i].link);
    lose(i);
  }
}

void Daemon::tell(std::uint64_t link, const proto::FromNode& message) {
  world_.send(*this, [this, link, said = is_older(world_.shape.upgrade) ? as_an_older_one(message) : message] {
    world_.to_coordinator(link, said);
  });
}

bool Daemon::hears(std::uint32_t coordinator, Duration since) const {
  return !stopped && tracker_.hears_leader() && tracker_.leader() == coordinator &&
         local_now() - std::max(hears_since_, tracker_.hears_since()) >= since;
}

std::uint64_t Daemon::any_link(Random& chance) const {
  const std::size_t any = chance.pick(connections_.size());
  return connections_[chance.one_in(2) ? tracker_.leader().value_or(any) : any].link;
}

void Daemon::hang_up(std::uint64_t link) {
  world_.send(*this, [this, link] { world_.close_link(link); });
}

void Daemon::hang_up() {
  for (const auto& one : connections_)
    for (auto number : {one.link, one.connecting})
      if (number != 0) world_.close_link(number);
}

void Daemon::tick() {
  const TimePoint now = local_now();
  carry_out(machine_.on_tick(now));
  act(tracker_.on_tick(now));
  if (const auto leader = tracker_.leader();
      leader && machine_.coordinator_up() && now - machine_.coordinator_heard() > world_.job.silence) {
    hang_up(connections_[*leader].link);
    lose(*leader);
  }
  for (std::uint32_t i = 0; i < connections_.size(); ++i) call(i);
  world_.wake(*this);
}

// As Upstream does; also beside a connection over which nothing is heard.
void Daemon::call(std::uint32_t coordinator) {
  Connection& to = connections_[coordinator];
  const TimePoint now = local_now();
  if (to.connecting != 0 && now >= to.connect_at) hang_up(std::exchange(to.connecting, 0));
  const bool heard = to.link != 0 && now - to.heard <= deadlines::kForgotten.of(world_.job.silence);
  if (heard || to.connecting != 0 || now < to.connect_at) return;
  to.connecting = world_.connect(*this, coordinator);
  to.connect_at = now + (to.connecting != 0 ? world_.job.silence : kRetry);
}

void Daemon::carry_out(const membership::Node::Actions& actions) {
  if (const auto leader = tracker_.leader(); leader && connections_[*leader].link != 0)
    for (const auto& message : actions.to_coordinator) tell(connections_[*leader].link, message);
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

void Daemon::run() {
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
