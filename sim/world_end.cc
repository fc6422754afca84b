// Trainers that leave in order, and jobs that end: all who have trained the last step have its state, all hear of it
// and go, and nothing is left behind.
#include <fmt/format.h>

#include <algorithm>

#include "sim/world.h"

namespace rejoin::sim {

using namespace std::chrono_literals;

namespace {

constexpr int kAllHaveGone = 30;  // silences from the last step, or the last fault, until nobody is left

}  // namespace

// Its operator ends it: three of four trainers leave in order, each in its own time.
void World::end_replica(const Fault& fault) {
  Random random = chance("leaves", fault.detail);
  const bool leave = !random.one_in(4);
  for (std::uint32_t i = 0; i < shape.ranks; ++i) {
    Trainer* one = trainers_[fault.replica][i].get();
    if (!leave || one == nullptr || one->stopped) kill_trainer(fault.replica, i, "its operator ends it");
    else deliver(*one, random.one_in(2) ? Duration{} : random.of_any_size(1us, 20ms), [one] { one->leave(); });
  }
}

// What it holds is lost by its own will.
void World::begins_to_leave(const Trainer& trainer) { survivors_.on_end(trainer.instance, false, "it leaves"); }

// From now on nobody has to wait for it, though its process is there until it has been answered.
void World::on_farewell(const Trainer& trainer, const Daemon& daemon) {
  if (trainers_[trainer.replica][trainer.rank].get() != &trainer || has_rival(trainer.replica, trainer.rank)) return;
  if (trainer.incarnation() != Incarnation{})
    ends_.on_end({trainer.replica, trainer.rank}, daemon.instance, trainer.has_heard_more_than(0, 0), now());
}

// Of a finished job it says that all is well, and its supervisor is content; or one that starts whatever has ended is
// not, and the next one finds the job finished.
void World::leaves(Trainer& trainer) {
  if (trainer.ended) return;
  count(finished() ? "left the finished job" : "left in order");
  check_last_step(trainer);
  if (finished() && !chance("started again", trainer.instance).one_in(4)) over_.insert({trainer.replica, trainer.rank});
  after_of(trainer, 1us, [this, &trainer] { end_trainer(trainer, "it has left"); });
  trainer.ended = trainer.stopped = true;
}

// The invariant last-step: whoever has contributed to the last step and ends by itself has its state.
void World::check_last_step(const Trainer& trainer) {
  if (!finished() || trainer.leaves_early() || checker().wrong(trainer.rank_instance)) return;
  const auto last = std::find_if(log_.rbegin(), log_.rend(), [](const auto& record) { return record.has_committed(); });
  const bool contributed = std::ranges::any_of(last->committed().members(), [&](const auto& member) {
    return member.replica() == trainer.replica && member.incarnation() == trainer.incarnation().value;
  });
  if (contributed && trainer.version() != job.steps)
    checker().violate("last-step", fmt::format("replica {} rank {} has trained step {}, the last, and leaves with the "
                                               "state of step {}",
                                               trainer.replica, trainer.rank, job.steps, trainer.version()));
}

bool World::has_ended() const {
  if (!finished() || deciding() == nullptr || !rivals_.empty()) return false;
  return over_.size() == std::size_t{shape.replicas} * shape.ranks &&
         std::ranges::none_of(trainers_,
                              [](const auto& ranks) {
                                return std::ranges::any_of(ranks,
                                                           [](const auto& trainer) { return trainer != nullptr; });
                              }) &&
         !leaked();
}

void World::check_the_end() {
  const Duration budget = kAllHaveGone * job.silence;
  if (now() <= std::max(faults_end_, decided_at_) + budget) return;
  const std::size_t places = std::size_t{shape.replicas} * shape.ranks;
  if (over_.size() == places && deciding() != nullptr)
    if (const auto leak = leaked()) return checker().violate("bounded-memory", *leak);
  checker().violate("progress", fmt::format("{:.0f} s after the last step {} of {} processes have heard of it",
                                            seconds(budget), over_.size(), places));
}

}  // namespace rejoin::sim
