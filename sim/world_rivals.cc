// Two processes for one place of a rank: its supervisor has lost track of the first, which lives, or was stopped and
// goes on later as whoever it was. One of the two ends because of that, and the other one has the place.
#include <algorithm>

#include "sim/world.h"

namespace rejoin::sim {

using namespace std::chrono_literals;

void World::second_process(const Fault& fault, TimePoint until) {
  Trainer* first = trainers_[fault.replica][fault.rank].get();
  if (first == nullptr || has_rival(fault.replica, fault.rank)) return;
  Random random(fault.detail);
  if (!random.one_in(3)) stop(*first, fault.lasting);
  const std::uint32_t node = random.one_in(2) ? first->machine : static_cast<std::uint32_t>(random.pick(nodes()));
  const Duration later = random.one_in(2) ? Duration{} : random.of_any_size(10us, 2 * fault.lasting + 20us);
  after(later, [this, fault, node, until] { start_rival(fault.replica, fault.rank, node, until); });
}

// Who has the place may lose it, and its state, by what the supervisor does.
void World::start_rival(std::uint32_t replica, std::uint32_t rank, std::uint32_t node, TimePoint until) {
  const Trainer* first = trainers_[replica][rank].get();
  if (first == nullptr || has_rival(replica, rank) || off_until_[node] > now()) return;
  felt_for({});
  count("second process");
  health_.harm(replica, now() + 4 * job.silence);
  Rival& rival = rivals_.emplace_back(Rival{.trainer = nullptr, .until = until});
  Trainer& trainer = start(rival.trainer, std::make_unique<Trainer>(*this, replica, rank, node));
  note("replica {} rank {} starts a second time, on node {}", replica, rank, node);
  const bool unheard = first->stopped || first->connection.value == 0 || !daemons_[first->machine];
  if (unheard || now() < old_news_until_) let_rival_stay(*first);
  deliver(trainer, trainer.random.between(1us, 2ms), [&trainer] { trainer.look_for_daemon(); });
}

void World::end_rival(const Trainer& trainer) {
  const auto at = std::ranges::find(rivals_, &trainer, [](const Rival& one) { return one.trainer.get(); });
  const std::uint32_t replica = trainer.replica, rank = trainer.rank, node = trainer.machine;
  if (const TimePoint until = at->until; until > now())
    after(supervisor_random_[node].of_any_size(1ms, 300ms),
          [this, replica, rank, node, until] { start_rival(replica, rank, node, until); });
  rivals_.erase(at);
}

std::unique_ptr<Trainer> World::take_rival(std::uint32_t replica, std::uint32_t rank) {
  for (auto at = rivals_.begin(); at != rivals_.end(); ++at)
    if (at->trainer->replica == replica && at->trainer->rank == rank) {
      count("the second process stays");
      auto taken = std::move(at->trainer);
      rivals_.erase(at);
      return taken;
    }
  return nullptr;
}

void World::kill_rivals(const std::string& why) {
  for (auto& rival : rivals_) rival.until = {};
  while (!rivals_.empty()) end_trainer(*rivals_.back().trainer, why);
}

const Trainer* World::rival_of(std::uint32_t replica, std::uint32_t rank) const {
  for (const auto& one : rivals_)
    if (one.trainer && one.trainer->replica == replica && one.trainer->rank == rank) return one.trainer.get();
  return nullptr;
}

bool World::has_rival(std::uint32_t replica, std::uint32_t rank) const { return rival_of(replica, rank) != nullptr; }

// The way to the coordinators is away.
void World::let_rivals_stay() {
  for (const auto& rival : rivals_)
    if (rival.trainer)
      if (const Trainer* first = trainers_[rival.trainer->replica][rival.trainer->rank].get()) let_rival_stay(*first);
}

// Who is not heard, since it or its daemon does not run, has not come back yet or is cut off, may be taken for lost,
// and another one have the place.
void World::let_rival_stay(const Process& first) {
  for (auto& rival : rivals_)
    if (rival.trainer && trainers_[rival.trainer->replica][rival.trainer->rank].get() == &first && !rival.may_stay) {
      rival.may_stay = true;
      survivors_.on_end(first.instance, false, "another process was started in its place");
    }
}

bool World::may_lose_its_place(const Trainer& first) const {
  return std::ranges::any_of(rivals_, [&](const Rival& one) {
    return one.may_stay && one.trainer->replica == first.replica && one.trainer->rank == first.rank;
  });
}

std::vector<Trainer*> World::trainers_on(std::uint32_t node) const {
  std::vector<Trainer*> all;
  for (const auto& ranks : trainers_)
    for (const auto& trainer : ranks)
      if (trainer && trainer->machine == node) all.push_back(trainer.get());
  for (const auto& rival : rivals_)
    if (rival.trainer->machine == node) all.push_back(rival.trainer.get());
  return all;
}

}  // namespace rejoin::sim
