// Another job's coordinator at an address of this one: whoever has heard a plan of this job is disturbed by nobody of
// another, and its operator ends who has gone over to that one (docs/operations.md, "belongs to job").
#include <algorithm>

#include "sim/other_job.h"
#include "sim/world.h"

namespace rejoin::sim {

std::uint64_t World::id_of_the_job() const { return log_.empty() ? 0 : log_.front().job().id(); }

void World::begin_other_job(const Fault& fault, TimePoint until) {
  Random random(fault.detail);
  const std::uint32_t number = draw_coordinator(random);
  if (coordinators_[number] && !coordinators_[number]->of_the_job()) return;
  if (suspended_until_[nodes() + number] > now()) return;
  if (other_jobs_ == 0 || random.one_in(2)) {  // otherwise the one of before goes on
    other_.config = job;
    other_.config.id = (++other_jobs_ << 56) + job.id;
    const auto other = [&](std::uint32_t here) {
      return random.one_in(3) ? std::max(1u, here + static_cast<std::uint32_t>(random.pick(3)) - 1) : here;
    };
    other_.config.replicas = other(job.replicas);
    other_.config.ranks = other(job.ranks);
    other_.log.clear();
    if (shared()) other_.store = other_stores_.emplace_back(std::make_unique<Store>(*this, Store::Judged::no)).get();
  }
  other_.until = std::max(other_.until, until);
  kill_coordinator(number, "another job's takes its address");
  auto& place = coordinators_[number];
  start(place, std::unique_ptr<CoordinatorProcess>(std::make_unique<OtherCoordinator>(
                   *this, number, nodes() + number, other_.config, other_.log, other_.store)));
  count("coordinator of another job");
  after(fault.lasting, [this, number, instance = place->instance] {
    if (coordinators_[number] && coordinators_[number]->instance == instance)
      kill_coordinator(number, "it was another job's");
  });
}

// Once that one is gone.
void World::end_strangers() {
  if (other_jobs_ == 0 || now() < other_.until + job.silence) return;
  std::vector<Trainer*> strangers;
  for (const auto& [instance, process] : processes_)
    if (auto* one = dynamic_cast<Trainer*>(process); one != nullptr && !one->ended && !is_of_the_job(*one))
      strangers.push_back(one);
  for (Trainer* one : strangers) {
    count("operator: end who is of another job");
    end_trainer(*one, "its operator ends what is of another job");
  }
}

// Who has trained in this job may have the only copy of its state. (Of a replica one of whose ranks has heard no plan
// yet none has trained, and all are sent away with that one.)
void World::check_that_it_sends_nobody_away(const proto::ToNode& message) {
  for (const auto& [instance, process] : processes_) {
    const auto* one = dynamic_cast<const Trainer*>(process);
    if (one == nullptr || one->job() == 0 || one->job() != id_of_the_job() || !one->has_trained()) continue;
    const auto& evicted = message.evicted();
    const auto& refused = message.refused();
    if (message.has_evicted() && evicted.job() == one->job() && evicted.replica() == one->replica &&
        evicted.incarnation() == one->incarnation().value)
      checker().violate("state-survives", fmt::format("another job's coordinator sends replica {} rank {} away: {}",
                                                      one->replica, one->rank, evicted.reason()));
    if (message.has_refused() && refused.instance() == one->rank_instance)
      checker().violate("state-survives", fmt::format("another job's coordinator refuses replica {} rank {}: {}",
                                                      one->replica, one->rank, refused.reason()));
  }
}

}  // namespace rejoin::sim
