// A trainer and its library, in one process: what the session does in two threads happens here in run().
#include <algorithm>

#include "base/digest.h"
#include "base/fail.h"
#include "sim/world.h"

namespace rejoin::sim {
namespace {

using namespace std::chrono_literals;

const transport::Secret kControlSecret = transport::Secret::of({0x5ec7e7, 0});

}  // namespace

Trainer::Trainer(World& world, std::uint32_t replica_number, std::uint32_t rank_number, std::uint32_t node)
    : Process(world.next_number(), node, world.chance("trainer", replica_number << 16 | rank_number)),
      replica(replica_number),
      rank(rank_number),
      rank_instance(world.next_number()),
      world_(world),
      model_(world.model()),
      audit_chance_(world.chance("audit", replica_number << 16 | rank_number)),
      torn_chance_(world.chance("torn updates", replica_number << 16 | rank_number)) {
  history_ = world.history();
  engine = world.make_engine(machine, rails);
  address_ = engine->listen({}).value().text;
  state_ = std::make_unique<TrainingState>(world.planted(Plant::log_too_much) ? 1 << 20 : model_.gradient_log_budget());
  const std::string stage = world.shape.stages && !world.shape.upgrade ? fmt::format("stage{} t", rank) : "t";
  std::vector<std::vector<TensorId>> buckets;
  const auto& tensors = model_.tensors();
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    buckets.resize(std::max<std::size_t>(buckets.size(), tensors[t].bucket + 1));
    buckets[tensors[t].bucket].push_back(state_
                                             ->add({.name = fmt::format("{}{}", stage, t),
                                                    .count = tensors[t].count,
                                                    .moments = tensors[t].moments,
                                                    .elementwise = tensors[t].elementwise})
                                             .value());
  }
  for (const auto& bucket : buckets) REJOIN_CHECK(state_->bucket(bucket).has_value());
  const auto allocated = state_->allocate();
  REJOIN_CHECK(allocated.has_value(), "{}", allocated.error());
  for (std::uint32_t t = 0; t < tensors.size(); ++t) {
    weights_.push_back(floats(state_->column({t}, 0)));
    gradient_views_.push_back(floats(state_->gradient({t})));
  }
  restore();
  REJOIN_CHECK(state_->start(version_at_join_));
  digest_at_join_ = *state_->digest();
  driver_ = std::make_unique<Driver>(
      DriverConfig{.replica = ReplicaId(replica),
                   .rank = rank,
                   .instance = rank_instance,
                   .transport = "the simulated fabric",
                   .plan_hash = state_->plan_hash(),
                   .declared = state_->declaration(),
                   .weighs = true,
                   .ring = {.chunk_bytes = model_.chunk_bytes(),
                            .chunks_in_flight = 2,
                            .direct_bytes = direct_bytes(world.shape),
                            .direct_members = world.shape.doubling ? 0u : 8u,
                            .coding = world.coding_of(*this),
                            .coding_rate = world.coding_rate()},
                   .patience = 500ms,
                   .first_steps = 500ms,
                   .calls_at_once = 1 + rank_instance % 3,
                   .aside = [this](std::function<void()> work) { digest_aside(std::move(work)); }},
      *engine, state_->owner(), state_->buckets());
}

// On a GPU digests take as long as its other work lets them.
void Trainer::digest_aside(std::function<void()> work) {
  const auto [lasting, until] = std::exchange(slow_digest_, {});
  const bool slow = world_.now() < until;
  if (slow) world_.felt_for(lasting);
  world_.deliver(*this, slow ? lasting : audit_chance_.of_any_size(1us, 50ms), [this, work = std::move(work)] {
    work();
    world_.wake(*this);
  });
}

// All of the state: of each tensor the weight, then its moments.
std::vector<std::span<std::byte>> Trainer::columns() const {
  std::vector<std::span<std::byte>> all;
  for (std::uint32_t t = 0; t < weights_.size(); ++t)
    for (std::uint32_t c = 0; c <= model_.tensors()[t].moments; ++c) all.push_back(state_->column({t}, c));
  return all;
}

// From its last checkpoint, or afresh: version 0 has the same bits everywhere.
void Trainer::restore() {
  model_.initialise(rank, weights_);
  const auto checkpoint = world_.checkpoint_of(replica, rank);
  if (!checkpoint) return;
  version_at_join_ = checkpoint->version;
  trained_at_join_ = checkpoint->trained;
  auto from = checkpoint->columns.begin();
  for (const auto column : columns()) std::copy(from->begin(), from->end(), column.begin()), ++from;
  world_.count("started from a checkpoint");
}

void Trainer::write_checkpoint() {
  World::Checkpoint checkpoint{.version = last_, .trained = driver_->committed_trained()};
  for (const auto column : columns()) checkpoint.columns.emplace_back(column.begin(), column.end());
  world_.write_checkpoint(replica, rank, std::move(checkpoint));
}

Trainer::~Trainer() {
  world_.count("connections closed as surplus", driver_->links_closed());
  const auto counted = driver_->heartbeat();
  const auto& coding = counted.heartbeat().coding();
  world_.count("bytes that coding saved", coding.plain_bytes() - coding.sent_bytes());
  world_.kill(rails);
  driver_.reset();
  engine.reset();
}

void Trainer::in(Duration delay, void (Trainer::*what)()) {
  world_.deliver(*this, delay, [this, what] {
    (this->*what)();
    world_.wake(*this);
  });
}

// ---- the daemon

void Trainer::look_for_daemon() {
  if (stopped || connection.value != 0) return;
  if (!std::exchange(prepared_, true)) {
    if (auto prepared = driver_->prepare(); !prepared) return world_.trainer_exits(*this, prepared.error().message);
    if (world_.stands_for_memory(*this)) return;  // and looks when it goes on
  }
  Daemon* daemon = world_.daemon_of(machine);
  if (daemon == nullptr) return world_.deliver(*this, 20ms, [this] { look_for_daemon(); });
  connection = membership::RankConnection(world_.next_number());
  last_arrival_ = {};
  proto::RankUp up;
  driver_->describe(up);
  up.set_address(address_);
  up.set_version(version_at_join_);
  trained_at_join_.to(up.mutable_trained());
  up.set_digest(digest_at_join_);
  up.set_pid(static_cast<std::int32_t>(instance));
  world_.deliver(*daemon, world_.in_order(last_arrival_, random.between(1us, 20us)),
                 [daemon, number = instance, at = connection, up] { daemon->on_hello(number, at, up); });
  unsent_.clear();  // the registration says it; what comes after it waits for the welcome
  driver_->on_daemon_back();
}

void Trainer::on_welcome(membership::RankConnection from) {
  if (from != connection) return;
  welcome_ = true;
  driver_->on_welcome(kControlSecret, world_.job.silence);
  if (leaving_) say_farewell();
  world_.wake(*this);
}

void Trainer::on_control_message(membership::RankConnection from, const proto::ToNode& message) {
  if (from != connection) return;
  inbox_.push_back(message);
  world_.wake(*this);
}

void Trainer::on_daemon_gone(membership::RankConnection from) {
  if (from != connection) return;
  connection = {};
  welcome_ = false;
  if (leaving_ && driver_->finished()) return world_.leaves(*this);
  world_.deliver(*this, 20ms, [this] { look_for_daemon(); });
}

void Trainer::on_refused(membership::RankConnection from, const std::string& why) {
  if (from == connection) world_.trainer_exits(*this, why);
}

void Trainer::send_all() {
  Daemon* daemon = world_.daemon_of(machine);
  if (!welcome_ || daemon == nullptr) return;
  for (auto& report : std::exchange(unsent_, {}))
    world_.deliver(*daemon, world_.in_order(last_arrival_, random.between(1us, 20us)),
                   [daemon, at = connection, report = std::move(report)] { daemon->on_report(at, report); });
}

void Trainer::tick() {
  if (welcome_) unsent_.push_back(driver_->heartbeat());
  world_.wake(*this);
}

std::string Trainer::describe() {
  constexpr const char* names[] = {"absent", "requested", "arrived", "current", "abandoned"};
  std::string line = fmt::format("replica {} rank {} is at version {}{}", replica, rank, last_,
                                 stopped                 ? ", stopped"
                                 : connection.value == 0 ? ", without a daemon"
                                                         : "");
  const auto& machine_of = driver_->machine();
  constexpr const char* stages[] = {"waits", "computes", "reduces", "updates"};
  line += fmt::format(", {} in epoch {} for step {}{}{}", stages[static_cast<std::size_t>(stage_)], machine_of.epoch(),
                      machine_of.step(), machine_of.reduced() ? ", which it has reduced" : "",
                      machine_of.member() ? "" : ", no member");
  auto& owner = state_->owner();
  line += fmt::format(", {} pins in use", pins_in_use());
  if (current_) return line;
  line +=
      fmt::format(", its page at {}{}, slices", owner.clock().version, owner.clock().updating ? " and updating" : "");
  for (std::uint32_t i = 0; i < owner.manifest().slices().size(); ++i) {
    const auto status = local::SliceStatus::unpack(owner.page().slice_statuses()[i].load());
    line += fmt::format(" {}@{}", names[static_cast<std::size_t>(status.state)], status.version());
  }
  if (Daemon* daemon = world_.daemon_of(machine)) line += "; " + daemon->describe({ReplicaId(replica), RankId(rank)});
  return line;
}

std::size_t Trainer::pins_in_use() const {
  const auto& pins = state_->owner().page().pins;
  return static_cast<std::size_t>(std::count_if(std::begin(pins), std::end(pins),
                                                [](const auto& pin) { return pin.state != local::PinState::free; }));
}

// ---- both threads

void Trainer::run() {
  const TimePoint now = world_.now_at(machine);
  driver_->notice(now);
  const bool deaf = world_.planted(Plant::deaf_rank) && rank == 0 && world_.now().time_since_epoch() > 2s;
  for (const auto& message : std::exchange(inbox_, {})) {
    if (message.has_registered() && incarnation() == Incarnation{})
      job_ = message.registered().job(), registered_in_ = world_.history();
    if (!deaf || !message.has_plan()) driver_->on_control_message(message, now);
    if (const auto& plan = message.plan(); message.has_plan() && plan.epoch() == driver_->machine().epoch().value &&
                                           plan.committed() == driver_->machine().committed().value)
      history_ = world_.history_of(plan).value_or(history_);
  }
  const auto outcomes = driver_->outcomes();
  driver_->poll(now);
  for (auto& report : driver_->take_reports()) unsent_.push_back(std::move(report));
  if (stage_ == Stage::reducing && step_.contributes && !driver_->machine().reduced() &&
      world_.planted(Plant::commit_without_vote) && world_.plant_due()) {
    auto& forged = *unsent_.emplace_back().mutable_reduced();
    forged.set_replica(replica);
    forged.set_epoch(driver_->machine().epoch().value);
    forged.set_step(driver_->machine().step().value);
    membership::RankSet(rank).to(forged.mutable_ranks());
  }
  send_all();
  if (driver_->failure()) return world_.trainer_exits(*this, driver_->failure()->message);
  checker().on_gradient_log(replica, rank, state_->gradient_log_bytes(), model_.gradient_log_budget());

  const bool free = now >= evaluates_until_ && world_.now() >= between_steps_until_;
  if (finds_the_job_finished(free)) leave();
  if (leaving_) return;
  if (stage_ == Stage::waiting && free && driver_->step() && driver_->step()->step > last_) begin_step();
  if (stage_ == Stage::reducing && !step_.contributes && driver_->step() && driver_->step()->step == step_.step &&
      driver_->step()->contributes) {
    world_.count("promoted within a step");
    begin_step();
  }
  const bool rash = world_.planted(Plant::apply_without_commit) && driver_->machine().reduced() && step_.contributes;
  if (stage_ == Stage::reducing && now >= busy_until_ && (driver_->committed() >= step_.step || rash)) begin_update();
  if (driver_->outcomes() != outcomes || driver_->working()) world_.wake(*this);
}

// ---- the trainer's loop

void Trainer::begin_step() {
  check_ahead(std::exchange(step_, *driver_->step()));
  driver_->take(step_.step, world_.now_at(machine));
  gradients_.reset();
  checker().on_begun(rank, incarnation(), {rank_instance, world_.coding_of(*this)});
  if (step_.contributes && !std::exchange(current_, true))
    checker().on_state(replica, rank, rank_instance, step_.step - 1, state_digest());
  stage_ = Stage::reducing;
  if (!step_.contributes) return world_.wake(*this);
  checker().on_told_who_leads(replica, rank, incarnation(), step_.step, step_.leads);
  stage_ = Stage::computing;
  in(world_.computing(*this, membership::samples_of(step_.batch), random.between(2ms, 8ms)), &Trainer::compute);
}

// Where nobody has come or gone, the plan before has said what this one hands out.
void Trainer::check_ahead(const StepView& before) {
  if (before.epoch != step_.epoch || before.step + 1 != step_.step || !before.contributes || !step_.contributes) return;
  const auto said = before.ahead.batches(1);
  if (said.empty()) return;  // more was handed back than a plan tells
  world_.count("step foretold");
  if (said[0] != step_.batch) checker().violate("exactly-once", "a step has other samples than were foretold");
}

Checker& Trainer::checker() { return world_.checker_of(*this); }

std::uint64_t Trainer::state_digest() const {
  std::vector<Model::Views> moments(weights_.size());
  for (std::uint32_t t = 0; t < weights_.size(); ++t)
    for (std::uint32_t m = 0; m < model_.tensors()[t].moments; ++m)
      moments[t].push_back(floats(state_->column({t}, m + 1)));
  return Replay::digest_of(weights_, moments);
}

void Trainer::compute() {
  if (leaving_) return;
  if (const TimePoint now = world_.now(); now < compute_stands_until_)
    return in(compute_stands_until_ - now, &Trainer::compute);
  stage_ = Stage::reducing;
  if (world_.planted(Plant::wrong_batch) && world_.plant_due() && !step_.batch.empty())
    ++step_.batch[0].begin, ++step_.batch[0].end;
  const double loss = model_.backward(rank, weights_, gradient_views_, step_.batch);
  if (world_.is_of_the_job(*this)) world_.on_loss(replica, rank, step_.step, loss);
  for (const auto gradient : gradient_views_)
    for (float& value : gradient) value *= static_cast<float>(step_.weight);
  gradients_ = digest(state_->gradients());
  driver_->want(std::vector<bool>(state_->buckets().size(), true), world_.now_at(machine));
  if (random.one_in(20)) {  // it does something else before it calls commit()
    const Duration busy = random.of_any_size(100us, 150ms);
    busy_until_ = world_.now_at(machine) + busy;
    world_.after_of(*this, busy, [this] { world_.wake(*this); });
  }
  if (world_.planted(Plant::touch_the_input) && world_.plant_due()) in(100us, &Trainer::touch);
  world_.wake(*this);
}

void Trainer::be_busy(Duration lasting, bool too_long, bool between_steps) {
  const TimePoint now = world_.now_at(machine);
  driver_->occupy(
      Driver::Occupation{
          .reason = "a checkpoint", .since = now, .until = now + (too_long ? lasting / 2 : lasting + 10ms)},
      now);
  (between_steps ? between_steps_until_ : compute_stands_until_) = world_.now() + lasting;
  in(lasting, &Trainer::have_done);
}

void Trainer::have_done() { driver_->occupy(std::nullopt, world_.now_at(machine)); }

void Trainer::touch() {
  if (stage_ == Stage::reducing) floats(state_->gradient({0}))[5] += 1.0f;
}

}  // namespace rejoin::sim
