// A trainer and its library, in one simulated process: what the session does in two threads happens here in run().
#pragma once

#include "membership/node.h"
#include "rejoin/driver.h"
#include "rejoin/training_state.h"
#include "sim/model.h"
#include "sim/process.h"

namespace rejoin::sim {

class Checker;
class World;

class Trainer final : public Process {
 public:
  Trainer(World& world, std::uint32_t replica, std::uint32_t rank, std::uint32_t node);
  ~Trainer() override;
  void run() override;
  void tick() override;
  void on_resumed() override { look_for_daemon(); }
  void look_for_daemon();
  // What comes from the daemon over this connection; of an older one, it is ignored.
  void on_welcome(membership::RankConnection from);
  void on_control_message(membership::RankConnection from, const proto::ToNode& message);
  void on_daemon_gone(membership::RankConnection from);
  void on_refused(membership::RankConnection from, const std::string& why);
  // In order: it tells its daemon, and ends when that has answered, or after a silence (trainer_end.cc).
  void leave();
  void on_left(membership::RankConnection from);
  bool leaves_early() const { return leaves_early_; }  // before it has heard of an end of the job
  void hang_compute(TimePoint until) { compute_stands_until_ = std::max(compute_stands_until_, until); }
  void slow_digest(Duration lasting, TimePoint until) { slow_digest_ = {lasting, until}; }
  // It announces that, and takes longer than it announced or not.
  void be_busy(Duration lasting, bool too_long, bool between_steps);
  std::string describe();
  std::size_t pins_in_use() const;
  // It has reduced this step, and has heard of nothing later.
  bool reduced(std::uint64_t step) const {
    return driver_->machine().reduced() && driver_->machine().step().value == step;
  }
  bool has_trained() const { return current_ && last_ > version_at_join_; }  // and has state that others may lack
  std::size_t registered_in() const { return registered_in_; }               // the history of who took it
  // What it has heard is given up, and another has its place, until it hears of a later epoch.
  void leave_behind(std::uint64_t epoch) { left_behind_at_ = epoch; }
  bool left_behind() const { return left_behind_at_ && driver_->machine().epoch().value <= *left_behind_at_; }
  std::uint64_t version() const { return last_; }   // that it has come to by updates
  std::size_t history() const { return history_; }  // whose decisions it has heard
  bool has_heard_more_than(std::uint64_t epoch, std::uint64_t committed) const {
    return driver_->machine().epoch().value > epoch || driver_->machine().committed().value > committed;
  }
  std::uint64_t job() const { return job_; }  // in which it is registered; 0: not known, or in none
  Incarnation incarnation() const { return driver_->machine().incarnation(); }

  const std::uint32_t replica, rank;
  const std::uint64_t rank_instance;
  std::unique_ptr<transport::Engine> engine;  // over its rails
  membership::RankConnection connection;      // at the daemon; 0: none
  TrainingState& state() { return *state_; }
  void drift() { drifts_ = true; }
  bool drifts() const { return drifts_; }
  void flip_a_bit() { driver_->flip_a_bit(); }
  std::uint64_t next_step() const { return driver_->machine().step().value + 1; }
  bool flip_state();  // false where it can't be now

 private:
  enum class Stage { waiting, computing, reducing, updating };
  void send_all();
  std::uint64_t state_digest() const;
  Checker& checker();  // of its job
  void digest_aside(std::function<void()> work);
  void begin_step();
  void check_ahead(const StepView& before);
  void compute();
  void have_done();
  void touch();  // a planted bug
  void damage_at_rest();
  void begin_update();
  Duration update_lasts();
  void apply(const catchup::Update& update);
  void end_update();
  void tell_factor();
  bool finds_the_job_finished(bool free) const;
  void say_farewell();
  void evaluate();
  std::vector<std::span<std::byte>> columns() const;
  void restore();
  void write_checkpoint();
  void in(Duration delay, void (Trainer::*what)());

  World& world_;
  const Model& model_;
  Random audit_chance_, torn_chance_;
  std::pair<Duration, TimePoint> slow_digest_;  // the next one takes so long, if it begins by then
  std::string address_;
  std::unique_ptr<TrainingState> state_;
  Model::Views weights_, gradient_views_;
  std::unique_ptr<Driver> driver_;
  bool prepared_ = false;  // its memory is registered
  std::uint64_t version_at_join_ = 0, digest_at_join_ = 0;
  membership::Samples trained_at_join_;
  std::uint64_t job_ = 0;
  std::size_t history_ = 0, registered_in_ = 0;
  std::optional<std::uint64_t> left_behind_at_;
  bool welcome_ = false, leaving_ = false, leaves_early_ = false, farewell_said_ = false;
  TimePoint last_arrival_{};  // when the last message to the daemon arrives
  std::vector<proto::FromNode> unsent_;
  std::vector<proto::ToNode> inbox_;
  Stage stage_ = Stage::waiting;
  StepView step_;
  std::uint64_t last_ = 0;
  TimePoint compute_stands_until_{}, busy_until_{}, between_steps_until_{}, evaluates_until_{};
  bool contributed_ = false, current_ = false, drifts_ = false;
  std::optional<std::uint64_t> gradients_;  // digest of what was handed over
  std::vector<catchup::Update> updates_;
  std::size_t applied_ = 0;  // of these: a daemon that looks at the state meanwhile finds some of it changed
};

}  // namespace rejoin::sim
