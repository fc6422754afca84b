// A whole cluster in one process under virtual time: the coordinator, a daemon for each node, the ranks' drivers and
// their trainers, all of it the code that ships, over the simulated fabric. Everything follows from the seed.
//
// What is of the simulator alone: the messages' way between processes (in order, late, or not at all for a while), who
// starts what again when it has died, the trainers' model, the faults, and the checkers (checker.h).
#pragma once

#include <algorithm>
#include <deque>
#include <map>
#include <random>

#include "catchup/service.h"
#include "daemon/streams.h"
#include "membership/coordinator.h"
#include "membership/log.h"
#include "rejoin/driver.h"
#include "rejoin/training_state.h"
#include "sim/checker.h"
#include "sim/fault.h"
#include "sim/model.h"
#include "transport/sim/fabric.h"
#include "transport/striped/factory.h"

namespace rejoin::sim {

struct Options {
  std::uint64_t seed = 1;
  std::uint32_t replicas = 3, ranks = 2;
  std::uint64_t batch = 4;
  Plant plant = Plant::none;
  std::optional<std::vector<Fault>> faults;  // otherwise drawn from the seed
  bool trace = false;                        // keep all of it, not only the end
  const Model* model = nullptr;              // otherwise noise_model()
  // Instead of a few seconds with many faults at once: so many failures, each when all replicas contribute again, and
  // until so many samples are trained.
  struct Long {
    std::uint64_t failures = 0, samples = 0;
  };
  std::optional<Long> run_for;
};

struct Outcome {
  std::optional<Violation> violation;
  std::vector<Fault> faults;  // that were to happen
  std::vector<std::string> trace;
  std::map<std::string, std::uint64_t> counts;  // faults by kind, and what the protocols went through
  std::uint64_t events = 0;
  std::uint64_t trace_hash = 0;  // of every line, kept or not: two runs of one seed must agree
  double virtual_seconds = 0;
  struct Committed {
    double at = 0;  // virtual seconds
    std::uint64_t step = 0, samples = 0;
    double loss = 0;  // mean over its contributors
  };
  std::vector<Committed> committed;
};

Outcome play(const Options& options);

class World;
using Rails = std::vector<const transport::Engine*>;  // of the fabric

// Who can be woken: at most one call is under way to each.
struct Process {
  std::uint64_t instance = 0;
  bool woken = false, stopped = false;
  virtual ~Process() = default;
  virtual void run() = 0;
};

class Trainer final : public Process {
 public:
  Trainer(World& world, std::uint32_t replica, std::uint32_t rank);
  ~Trainer() override;
  void run() override;
  void look_for_daemon();
  void hear(const proto::ToNode& word) { words_.push_back(word); }
  void on_daemon_gone();
  void heartbeat();
  std::string describe();

  const std::uint32_t replica, rank;
  const std::uint64_t life;
  Rails rails;
  std::unique_ptr<transport::Engine> engine;  // over them
  membership::RankConnection connection;      // at the daemon; 0: none
  TrainingState& state() { return *state_; }

 private:
  enum class Stage { waiting, computing, exchanging, updating };
  void begin_step();
  void compute();
  void touch();  // a planted bug
  void damage_at_rest();
  void begin_update();
  void end_update();
  void in(Duration delay, void (Trainer::*what)());

  World& world_;
  const Model& model_;
  std::string address_;
  std::unique_ptr<TrainingState> state_;
  Model::Views weights_, gradient_views_;
  std::unique_ptr<Driver> driver_;
  std::uint64_t digest_at_join_ = 0;
  std::vector<proto::ToNode> words_;
  Stage stage_ = Stage::waiting;
  StepView step_;
  std::uint64_t last_ = 0;
  bool contributed_ = false, current_ = false;
  std::optional<std::uint64_t> gradients_;  // digest of what was handed over
  std::vector<catchup::Piece> pieces_;
  void (Trainer::*due_)() = nullptr;  // came while it was stopped
};

class Daemon final : public Process {
 public:
  Daemon(World& world, std::uint32_t node);
  ~Daemon() override;
  void run() override;  // the stream
  void tick();
  void on_hello(Trainer& trainer, const proto::RankUp& up);
  void on_report(membership::RankConnection rank, const proto::FromNode& report);
  void drop(membership::RankConnection rank, const std::string& reason, membership::Node::Gone how);
  void on_link_up(std::uint64_t link);
  void on_link_down();
  void on_word(const proto::ToNode& word);
  std::string describe(catchup::RankKey key) const;

  const std::uint32_t node;
  Rails rails;
  std::unique_ptr<transport::Engine> engine;  // over them
  std::uint64_t link = 0;                     // to the coordinator; 0: none

 private:
  void carry_out(const membership::Node::Actions& actions);
  void follow_plan();

  World& world_;
  std::string address_;
  membership::Node machine_;
  std::unique_ptr<catchup::Service> service_;
  std::map<membership::RankConnection, std::uint64_t> trainers_;  // their instances
  std::map<membership::RankConnection, catchup::RankKey> keys_;
  std::map<membership::RankConnection, TimePoint> said_, told_;  // the last message each way
  std::set<catchup::RankKey> catching_up_;
  TimePoint connect_at_{};
};

class World {
 public:
  explicit World(const Options& options);
  ~World();
  Outcome run();

  // ---- for the processes
  TimePoint now() const { return clock_.now(); }
  void after(Duration delay, std::function<void()> action);
  void after_of(const Process& process, Duration delay, std::function<void()> action);  // unless it has died by then
  void wake(Process& process);
  // Until a message arrives that takes this long, but no sooner than the one before it, which arrived at `last`.
  Duration in_order(TimePoint& last, Duration delay) {
    last = std::max(last + Duration(1), now() + delay);
    return last - now();
  }
  std::uint64_t pick(std::uint64_t n) { return n == 0 ? 0 : random_() % n; }
  Duration between(Duration least, Duration most) {
    return least + Duration(static_cast<std::int64_t>(pick(static_cast<std::uint64_t>((most - least).count()) + 1)));
  }
  template <typename... Args>
  void note(fmt::format_string<Args...> format, Args&&... args) {
    say(fmt::format(format, std::forward<Args>(args)...));
  }
  void count(const std::string& what, std::uint64_t by = 1) { outcome_.counts[what] += by; }
  bool planted(Plant plant) const { return options_.plant == plant; }
  bool take_damage_at_rest(std::uint32_t replica);  // true once for each such fault
  bool plant_due();                                 // the planted fault happens here, once in a while

  const Options options_;
  const membership::JobConfig job;
  VirtualClock& clock() { return clock_; }
  // Of one rail, or in a third of all seeds of two, which share its writes (transport/striped/).
  std::unique_ptr<transport::Engine> make_engine(std::uint32_t node, Rails& rails);
  void kill(const Rails& rails) {
    for (const auto* rail : rails) fabric_.kill(*rail);
  }
  Checker& checker() { return checker_; }
  const Model& model() const { return options_.model != nullptr ? *options_.model : noise_model(); }
  void on_loss(std::uint32_t replica, std::uint32_t rank, std::uint64_t step, double loss) {
    losses_[step][{replica, rank}] = loss;
  }
  Daemon* daemon_of(std::uint32_t replica) { return daemons_[replica].get(); }
  Trainer* trainer(std::uint64_t instance);
  std::uint64_t next_number() { return ++numbers_; }
  void trainer_exits(Trainer& trainer, const std::string& why);
  void connect(Daemon& daemon);         // to the coordinator, if it can be reached
  void close_link(std::uint64_t link);  // by the daemon
  void to_coordinator(std::uint64_t link, proto::FromNode message);
  Duration slowness(std::uint32_t replica, std::uint32_t rank) const;

 private:
  struct Link {
    std::uint32_t node = 0;
    TimePoint last_up{}, last_down{};  // deliveries, in order
  };
  struct SlowLink {
    Duration out{}, in{};  // what its messages take longer
    TimePoint until{};
  };
  void say(std::string line);
  void start_trainer(std::uint32_t replica, std::uint32_t rank);
  void start_daemon(std::uint32_t node);
  void start_coordinator();
  void kill_trainer(std::uint32_t replica, std::uint32_t rank, const std::string& why);
  void kill_daemon(std::uint32_t node);
  void kill_coordinator(const std::string& why);
  void carry_out(membership::Actions actions);
  void drop_link(std::uint64_t link);  // by the coordinator
  void tick();
  void happen(const Fault& fault);
  Duration control_delay(std::uint32_t node, bool up);
  bool settled() const;
  void on_committed(const proto::LogRecord::Committed& record);
  bool go_on_long();
  void describe();

  VirtualClock clock_;
  std::mt19937_64 random_;
  transport::sim::Fabric fabric_;
  Checker checker_;
  Outcome outcome_;
  std::uint64_t numbers_ = 0, sequence_ = 0;
  std::map<std::pair<TimePoint, std::uint64_t>, std::function<void()>> agenda_;
  std::map<std::uint64_t, Process*> processes_;  // by instance
  std::vector<std::unique_ptr<Daemon>> daemons_;
  std::vector<std::vector<std::unique_ptr<Trainer>>> trainers_;
  std::unique_ptr<membership::Coordinator> coordinator_;
  std::vector<proto::LogRecord> log_;  // what is on disk
  Bytes disk_;                         // … byte for byte
  std::uint64_t coordinator_life_ = 0;
  bool crash_in_append_ = false, disk_full_ = false;
  std::map<std::uint64_t, Link> links_;
  std::vector<bool> damage_at_rest_;                  // by replica: due
  std::vector<SlowLink> slow_links_;                  // by node
  std::vector<TimePoint> up_blocked_, down_blocked_;  // by node: until then
  std::map<std::pair<std::uint32_t, std::uint32_t>, TimePoint> slow_until_;
  TimePoint faults_end_{};
  std::deque<std::string> recent_;
  std::map<std::uint64_t, std::map<std::pair<std::uint32_t, std::uint32_t>, double>> losses_;  // by step
  std::uint64_t failures_ = 0;                                                                 // of a long run, so far
  TimePoint next_failure_{};
};

}  // namespace rejoin::sim
