// A node's daemon: what NodeServer and its stream's thread do around membership::Node and catchup::Service.
#include "sim/world.h"

namespace rejoin::sim {

namespace {

using namespace std::chrono_literals;

constexpr std::uint64_t kSecret = 0xca7c4;
constexpr Duration kRetry = 50ms;

}  // namespace

Daemon::Daemon(World& world, std::uint32_t node_number)
    : node(node_number), world_(world), machine_(fmt::format("node {}", node_number), world.job.silence) {
  instance = world.next_number();
  engine = world.make_engine(node, rails);
  address_ = engine->listen({}).value().text;
  catchup::Service::Options options;
  options.compression = instance % 2 == 0 ? catchup::Compression::never : catchup::Compression::always;
  service_ = std::make_unique<catchup::Service>(*engine, kSecret, options, world.clock());
}

Daemon::~Daemon() {
  world_.kill(rails);
  service_.reset();
  engine.reset();
}

// ---- trainers

void Daemon::on_hello(Trainer& trainer, const proto::RankUp& up) {
  const catchup::RankKey key{ReplicaId(up.replica()), RankId(up.rank())};
  std::vector<membership::RankConnection> older;
  for (const auto& [id, other] : keys_)
    if (other == key) older.push_back(id);
  for (auto id : older) {
    auto info = machine_.ranks().find(id);
    const bool same = info != machine_.ranks().end() && info->second.up.life() == up.life();
    drop(id, "the rank was started again", same ? membership::Node::Gone::replaced : membership::Node::Gone::ended);
  }
  auto view = shm::View::of(trainer.state().owner());
  REJOIN_CHECK(view.has_value(), "{}", view.error());
  trainers_[trainer.connection] = trainer.instance;
  keys_[trainer.connection] = key;
  const auto added = service_->add_rank(key, std::move(*view));
  REJOIN_CHECK(added.has_value(), "{}", added.error());
  proto::FromNode message;
  *message.mutable_rank_up() = up;
  message.mutable_rank_up()->set_stream_address(address_);
  carry_out(machine_.on_rank_message(trainer.connection, message, world_.now()));
}

void Daemon::on_report(membership::RankConnection rank, const proto::FromNode& report) {
  world_.after_of(*this, world_.in_order(said_[rank], world_.between(1us, 20us)), [this, rank, report] {
    if (keys_.contains(rank)) carry_out(machine_.on_rank_message(rank, report, world_.now()));
  });
}

void Daemon::drop(membership::RankConnection rank, const std::string& reason, membership::Node::Gone how) {
  auto key = keys_.extract(rank);
  if (key.empty()) return;
  auto instance_of = trainers_.extract(rank);
  said_.erase(rank);
  told_.erase(rank);
  catching_up_.erase(key.mapped());
  service_->remove_rank(key.mapped());
  carry_out(machine_.on_rank_gone(rank, reason, how));
  world_.after(world_.between(1us, 50us), [&world = world_, number = instance_of.mapped(), rank] {
    if (Trainer* trainer = world.trainer(number); trainer != nullptr && trainer->connection == rank)
      trainer->on_daemon_gone();
  });
}

// ---- the coordinator

void Daemon::on_link_up(std::uint64_t new_link) {
  link = new_link;
  carry_out(machine_.on_coordinator_up(world_.now()));
}

void Daemon::on_link_down() {
  link = 0;
  connect_at_ = world_.now() + kRetry;
  carry_out(machine_.on_coordinator_down());
}

void Daemon::on_word(const proto::ToNode& word) {
  carry_out(machine_.on_coordinator_message(word, world_.now()));
  if (word.has_plan() || word.has_peers()) follow_plan();
}

void Daemon::tick() {
  if (stopped) return;
  carry_out(machine_.on_tick(world_.now()));
  if (link != 0 && machine_.coordinator_up() && world_.now() - machine_.coordinator_heard() > world_.job.silence) {
    world_.close_link(link);
    on_link_down();
  }
  if (link == 0 && world_.now() >= connect_at_) {
    connect_at_ = world_.now() + kRetry;
    world_.connect(*this);
  }
  if (!catching_up_.empty() || service_->serving() > 0) world_.wake(*this);
}

void Daemon::carry_out(const membership::Node::Actions& actions) {
  for (const auto& message : actions.to_coordinator)
    if (link != 0) world_.to_coordinator(link, message);
  for (const auto& [connection, word] : actions.to_ranks) {
    auto found = trainers_.find(connection);
    if (found == trainers_.end()) continue;
    world_.after(world_.in_order(told_[connection], world_.between(1us, 20us)),
                 [&world = world_, number = found->second, connection = connection, word = word] {
                   Trainer* trainer = world.trainer(number);
                   if (trainer == nullptr || trainer->connection != connection) return;
                   trainer->hear(word);
                   world.wake(*trainer);
                 });
  }
  for (auto rank : actions.silent) {
    world_.count("rank found silent");
    drop(rank, "no sign of life", membership::Node::Gone::silent);
  }
}

void Daemon::follow_plan() {
  for (const auto& stream : daemon::streams_of(machine_)) {
    if (!keys_.contains(stream.rank)) continue;
    service_->serve(stream.key, stream.serves);
    const bool before = catching_up_.contains(stream.key);
    if (before && !stream.catching_up) {
      world_.count("promoted");
      service_->finish(stream.key);
      catching_up_.erase(stream.key);
    }
    if (!stream.catching_up) continue;
    if (!before) world_.count("catch-up begun");
    catching_up_.insert(stream.key);
    service_->catch_up(stream.key, stream.sources, world_.now());
  }
  world_.wake(*this);
}

std::string Daemon::describe(catchup::RankKey key) const {
  const auto progress = service_->progress(key, world_.now());
  if (!progress) return "no stream";
  return fmt::format("{} of {} slices proven, {} bytes, {} fetched again, {} sources", progress->proven,
                     progress->total_slices, progress->bytes, progress->refetched, progress->sources);
}

// ---- the stream

void Daemon::run() {
  auto caught_up = service_->poll(world_.now());
  if (world_.planted(Plant::early_proof))
    for (auto key : catching_up_)
      if (world_.plant_due()) caught_up.push_back(key);
  for (auto key : caught_up)
    for (const auto& [connection, other] : keys_) {
      if (other != key) continue;
      Trainer* trainer = world_.trainer(trainers_.at(connection));
      if (trainer == nullptr) continue;
      if (world_.planted(Plant::damage_after_proof)) trainer->state().column({4}, 0)[11] ^= std::byte{4};
      proto::FromNode message;
      message.mutable_caught_up()->set_replica(key.replica.value);
      message.mutable_caught_up()->set_rank(key.rank.value);
      message.mutable_caught_up()->set_life(trainer->life);
      world_.count("caught up");
      carry_out(machine_.on_rank_message(connection, message, world_.now()));
      break;
    }
  if (service_->busy()) world_.wake(*this);
}

}  // namespace rejoin::sim
