// What a trainer does with a step that is committed, and after it.
#include "base/digest.h"
#include "sim/world.h"

namespace rejoin::sim {

using namespace std::chrono_literals;

void Trainer::begin_update() {
  stage_ = Stage::updating;
  world_.on_moment(Moment::update, replica);
  contributed_ = driver_->committed() >= step_.step ? driver_->committed_contributes() : step_.contributes;
  auto& judge = checker();
  judge.on_reduced(replica, rank, step_.step, state_->buckets());
  if (contributed_ && gradients_)
    judge.on_trained(replica, rank, step_.step, step_.batch, *gradients_, digest(state_->gradients()));
  if (!contributed_) damage_at_rest();
  updates_ = *state_->begin_update(Step(step_.step), contributed_, driver_->committed_contributors());
  const bool spoilt = world_.planted(Plant::skip_an_update) || world_.planted(Plant::apply_twice);
  const std::size_t at_once = spoilt ? 0 : torn_chance_.pick(updates_.size() + 1);
  for (applied_ = 0; applied_ < at_once; ++applied_) apply(updates_[applied_]);
  in(update_lasts(), &Trainer::end_update);
}

void Trainer::apply(const catchup::Update& update) {
  const std::span gradient(reinterpret_cast<const float*>(update.gradient.data()), update.count);
  const auto column = [&](std::uint32_t number) {
    return floats(state_->column({update.tensor}, number)).subspan(update.first, update.count);
  };
  Model::Views moments;
  for (std::uint32_t m = 0; m < model_.tensors()[update.tensor].moments; ++m) moments.push_back(column(m + 1));
  model_.update(update.step.value, update.tensor, column(0), moments, gradient);
}

// What the daemons do meanwhile, they do beside an optimizer at work.
Duration Trainer::update_lasts() {
  if (!world_.shape.long_updates || !random.one_in(30)) return random.between(20us, 900us);
  const Duration lasting = random.of_any_size(1ms, 5 * world_.job.silence);
  world_.count("long update");
  world_.on_long_work(lasting);
  return lasting;
}

// One bit of a slice that arrived older than the rest and has not been brought up to date: its verification, which is
// still to come, must find that.
void Trainer::damage_at_rest() {
  auto& owner = state_->owner();
  const auto& slices = owner.manifest().slices();
  std::vector<std::uint32_t> arrived;
  for (std::uint32_t i = 0; i < slices.size(); ++i) {
    const auto status = local::SliceStatus::unpack(owner.page().slice_statuses()[i].load());
    if (status.state == local::SliceState::arrived && status.version() + 1 < step_.step) arrived.push_back(i);
  }
  if (arrived.empty() || !world_.take_damage_at_rest(replica)) return;
  const auto& part = slices[arrived[random.pick(arrived.size())]].range;
  const auto element = part.first + random.pick(part.count);
  state_->column({part.tensor}, 0)[element * sizeof(float) + random.pick(sizeof(float))] ^= std::byte{16};
  world_.count("damaged at rest");
}

// A contributor's, between updates.
bool Trainer::flip_state() {
  if (!current_ || stage_ == Stage::updating || stopped) return false;
  const auto tensor = static_cast<std::uint32_t>(random.pick(model_.tensors().size()));
  const auto column = state_->column(
      {tensor}, static_cast<std::uint32_t>(random.pick(model_.tensors()[tensor].moments + std::uint64_t{1})));
  column[random.pick(column.size())] ^= std::byte{2};
  world_.went_wrong(*this, last_);
  return true;
}

void Trainer::end_update() {
  std::size_t skipped = updates_.size();
  if (world_.planted(Plant::skip_an_update) && world_.plant_due()) skipped = random.pick(updates_.size());
  for (std::size_t p = applied_; p < updates_.size(); ++p) {
    if (p == skipped) continue;
    const int times = world_.planted(Plant::apply_twice) && world_.plant_due() ? 2 : 1;
    for (int time = 0; time < times; ++time) apply(updates_[p]);
  }
  updates_.clear();
  state_->end_update(Step(step_.step), contributed_);
  last_ = step_.step;
  if (world_.shape.clips) tell_factor();
  stage_ = Stage::waiting;
  if (drifts_ && contributed_) {
    floats(state_->column({0}, 0))[instance % 300] += 1e-3f;
    world_.went_wrong(*this, last_);
  }
  if (contributed_) checker().on_state(replica, rank, rank_instance, last_, state_digest());
  // Replicas write at different steps, so that their checkpoints differ in age.
  const auto every = world_.shape.checkpoint_steps;
  if (contributed_ && every > 0 && world_.is_of_the_job(*this) && (last_ + replica) % every == 0 &&
      !checker().wrong(rank_instance))
    write_checkpoint();
  if (Daemon* daemon = world_.daemon_of(machine)) world_.wake(*daemon);  // the doorbell
  if (world_.shape.evaluates && random.one_in(60)) evaluate();
}

// How much the step that has ended has counted. Of the one before, and of the next, it tells too late and too early.
void Trainer::tell_factor() {
  driver_->scale_feedback(last_ - 1, 7);
  driver_->scale_feedback(last_, world_.shape.factor(last_));
  driver_->scale_feedback(last_ + 1, 7);
}

// Between two steps, for up to five silences: nobody is to be put out for it.
void Trainer::evaluate() {
  const Duration lasting = random.of_any_size(1ms, 5 * world_.job.silence);
  world_.note("replica {} rank {} evaluates for {:.1f} ms", replica, rank, milliseconds(lasting));
  world_.count("evaluation");
  if (lasting > world_.job.silence) world_.count("evaluation of more than a silence");
  world_.on_long_work(lasting);
  evaluates_until_ = world_.now_at(machine) + lasting;
  world_.after_of(*this, lasting, [this] { world_.wake(*this); });
}

}  // namespace rejoin::sim
