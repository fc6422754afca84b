// How a trainer's part in the job ends where nothing ends it: the job is finished, or it leaves.
#include "sim/world.h"

namespace rejoin::sim {

using namespace std::chrono_literals;

// Where it asks for the next step, or waits for one that is not to be.
bool Trainer::finds_the_job_finished(bool free) const {
  if (!driver_->finished() || stage_ == Stage::updating) return false;
  return stage_ == Stage::waiting ? free : driver_->committed() < step_.step;
}

void Trainer::leave() {
  if (ended || leaving_) return;
  if (stage_ == Stage::updating) return in(1ms, &Trainer::leave);  // its optimizer has it
  leaving_ = true;
  leaves_early_ = !driver_->finished();
  world_.begins_to_leave(*this);
  world_.note("replica {} rank {} leaves{}", replica, rank, driver_->finished() ? " the finished job" : "");
  say_farewell();
  const bool nobody_cares = connection.value == 0 && driver_->finished();
  world_.deliver(*this, nobody_cares ? 1us : world_.job.silence, [this] { world_.leaves(*this); });
}

void Trainer::say_farewell() {
  Daemon* daemon = world_.daemon_of(machine);
  if (!welcome_ || daemon == nullptr || std::exchange(farewell_said_, true)) return;
  send_all();
  world_.deliver(*daemon, world_.in_order(last_arrival_, random.between(1us, 20us)),
                 [daemon, at = connection] { daemon->on_leave(at); });
}

void Trainer::on_left(membership::RankConnection from) {
  if (from == connection) world_.leaves(*this);
}

}  // namespace rejoin::sim
