// A whole cluster in one process under virtual time: the coordinator, a daemon for each node, the ranks' drivers and
// their trainers, all of it the code that ships, over the simulated fabric. Everything follows from the seed.
//
// What is of the simulator alone: the messages' way between processes (in order, late, or not at all for a while), who
// starts what again when it has died, the trainers' model, the faults, and the checkers (checker.h).
#pragma once

#include <algorithm>
#include <deque>
#include <map>
#include <tuple>

#include "base/fail.h"
#include "ftar/coding.h"
#include "membership/log.h"
#include "sim/checker.h"
#include "sim/coordinator.h"
#include "sim/daemon.h"
#include "sim/ends.h"
#include "sim/fault.h"
#include "sim/health.h"
#include "sim/isolation.h"
#include "sim/links.h"
#include "sim/play.h"
#include "sim/promptness.h"
#include "sim/relay.h"
#include "sim/replicated.h"
#include "sim/shape.h"
#include "sim/store.h"
#include "sim/survivors.h"
#include "sim/trainer.h"
#include "transport/sim/fabric.h"
#include "transport/striped/factory.h"

namespace rejoin::sim {

class World {
 public:
  explicit World(const Options& options);
  ~World();
  Outcome run();

  // ---- for the processes
  TimePoint now() const { return clock_.now(); }
  TimePoint now_at(std::uint32_t machine) const { return clock_.now() + clocks_[machine]; }  // as its clock shows it
  void after(Duration delay, std::function<void()> action);
  void after_of(const Process& process, Duration delay, std::function<void()> action);  // unless it has ended by then
  // The same, for what the process itself does about it: later, where it is stopped then.
  void deliver(Process& process, Duration delay, std::function<void()> action);
  void wake(Process& process);
  void stop(Process& process, Duration lasting);
  bool stands_for_memory(Process& process);
  // Something that it sends: when it goes on, where it is stopped by now.
  void send(Process& process, std::function<void()> message);
  // A daemon or relay begins to introduce itself, or one of its own: a fault may stop it within.
  void introduces(Process& process, std::uint32_t caller);
  // Until a message arrives that takes this long, but no sooner than the one before it, which arrived at `last`.
  Duration in_order(TimePoint& last, Duration delay) {
    last = std::max(last + Duration(1), now() + delay);
    return last - now();
  }
  template <typename... Args>
  void note(fmt::format_string<Args...> format, Args&&... args) {
    add_note(fmt::format(format, std::forward<Args>(args)...));
  }
  void remark(const std::string& what);  // in a trace only: what a reader may want to know, and nothing depends on
  const std::vector<proto::LogRecord>& log() const { return log_; }
  void count(const std::string& what, std::uint64_t by = 1) { outcome_.counts[what] += by; }
  bool planted(Plant plant) const { return options_.plant == plant; }
  bool take_damage_at_rest(std::uint32_t replica);  // true once for each such fault
  // A protocol has come this far, at this replica (if at any): faults may wait for that.
  void on_moment(Moment moment, std::uint32_t replica);
  void went_wrong(const Trainer& trainer, std::uint64_t version);
  void on_long_work(Duration lasting) { disturb(lasting); }  // of a trainer, between a commit and its next step
  void felt_for(Duration lasting);                           // what an earlier fault was for begins now
  bool plant_due();                                          // the planted fault happens here, once in a while

  const Options options_;
  const Shape shape;
  const membership::JobConfig job;
  VirtualClock& clock() { return clock_; }
  // Of one rail or of two, which share its writes (transport/striped/).
  std::unique_ptr<transport::Engine> make_engine(std::uint32_t node, Rails& rails);
  void kill(const Rails& rails) {
    for (const auto* rail : rails) fabric_.kill(*rail);
  }
  Random chance(std::string_view purpose, std::uint64_t number = 0) const {
    return Random(options_.seed, purpose, number);
  }
  // Of a coordinator that starts now: with an operator's word, if there is one.
  membership::JobConfig job_to_start(std::uint32_t coordinator);
  // Of a rank's process, and what its coder is taken to code in a second.
  ftar::Coding coding_of(const Process& process) const;
  double coding_rate() const;
  Checker& checker() { return checkers_[history_]; }
  const Checker& checker() const { return checkers_[history_]; }
  const Model& model() const { return options_.model != nullptr ? *options_.model : noise_model(); }
  void on_loss(std::uint32_t replica, std::uint32_t rank, std::uint64_t step, double loss) {
    losses_[step][{replica, rank}] = loss;
  }
  std::uint32_t node_of(std::uint32_t replica, std::uint32_t rank) const {
    return replica * shape.nodes + rank * shape.nodes / shape.ranks;
  }
  std::uint32_t machine_of(std::uint32_t replica, std::uint32_t rank) const {  // where its process is, if it has one
    const auto& place = trainers_[replica][rank];
    return place ? place->machine : node_of(replica, rank);
  }
  // The room that a node is in, and what it says of that; in some jobs one replica's nodes don't.
  std::uint32_t room_of(std::uint32_t node) const;
  std::string location_of(std::uint32_t node) const;
  std::uint32_t nodes() const { return shape.replicas * shape.nodes; }  // the coordinators' machines come after them
  Daemon* daemon_of(std::uint32_t node) { return daemons_[node].get(); }
  Trainer* trainer(std::uint64_t instance);
  // What a trainer finds on its disk when it starts: of the last step that all ranks of its replica have written.
  struct Checkpoint {
    std::uint64_t version = 0;
    membership::Samples trained;  // up to there
    std::vector<Bytes> columns;   // of each tensor, one after the other
    std::size_t records = 0;      // of the log, when it was written
  };
  std::optional<Checkpoint> checkpoint_of(std::uint32_t replica, std::uint32_t rank) const;
  void write_checkpoint(std::uint32_t replica, std::uint32_t rank, Checkpoint checkpoint);
  std::uint64_t next_number() { return ++numbers_; }
  void trainer_exits(Trainer& trainer, const std::string& why);
  // ---- jobs that end, and trainers that leave in order (world_end.cc)
  void begins_to_leave(const Trainer& trainer);
  void on_farewell(const Trainer& trainer, const Daemon& daemon);
  void leaves(Trainer& trainer);  // its process ends
  bool finished() const { return job.steps != 0 && step_written_ >= job.steps; }
  Duration slowness(std::uint32_t replica, std::uint32_t rank) const;
  // How long one computes now that would take `usual` for an equal share of the samples at the usual speed.
  Duration computing(const Trainer& trainer, std::uint64_t samples, Duration usual) const;

  // ---- the control connections; `link` is the number of one
  // Who calls: the nodes' daemons by their numbers, then the relays. Who listens: the coordinators, then the relays.
  std::uint32_t caller_of_relay(std::uint32_t relay) const { return nodes() + relay; }
  std::vector<std::uint32_t> coordinator_stations() const;
  std::vector<std::uint32_t> stations_of(std::uint32_t node) const;
  std::optional<std::uint32_t> relay_of(std::uint32_t node) const;  // behind which it is
  // Uplink::on_link_up() says when the station has answered.
  std::uint64_t connect(std::uint32_t caller, std::uint32_t station);
  void close_link(std::uint64_t link);  // by the caller
  void to_station(std::uint64_t link, proto::FromNode message);
  void to_caller(std::uint64_t link, proto::ToNode message);
  void drop_link(std::uint64_t link);  // by the station

  void on_replica_status();  // the coordinator has heard how a replica stands
  // A snapshot that is to stand for so many records, the first of the log, and what they lead to.
  void compare_with_log(const proto::LogRecord& snapshot, std::size_t records);

  // ---- several coordinators and their store
  Store& store() { return store_; }
  // ---- logs that are put back to older copies (world_older_log.cc): what follows on one of them is another history
  std::size_t history() const { return history_; }
  std::optional<std::size_t> history_of(const proto::Plan& plan) const;
  bool is_later(const proto::RankUp& up) const;  // it says that it has heard of later decisions than the log's
  void check_that_it_heard_them(const proto::RankUp& up);

  // ---- another job (world_other_job.cc)
  std::uint64_t id_of_the_job() const;  // as its log has it; 0: none has
  bool is_of_the_job(const Trainer& trainer) const { return trainer.job() == 0 || trainer.job() == id_of_the_job(); }
  Checker& checker_of(const Trainer& trainer) {
    return is_of_the_job(trainer) && !trainer.left_behind() ? checkers_[trainer.history()] : of_others_;
  }
  void check_that_it_sends_nobody_away(const proto::ToNode& message);

  void answer_coordinator(std::uint64_t instance, Duration delay, membership::StoreAnswer answer);
  void on_shared_record(std::uint64_t position, const proto::LogRecord& record);  // is in the store's log
  bool may_give_up(std::uint32_t coordinator);  // since its store lacks what its copy has; it ends then
  void put_back_data();
  void on_claim(std::uint32_t coordinator, const proto::Leader& before, bool late);
  void check_output(const CoordinatorProcess& of, const membership::ReplicatedCoordinator::Actions& actions);
  // The copies on the coordinators' disks: how far they are, and what comes next.
  std::uint64_t copied(std::uint32_t coordinator) const { return copied_[coordinator]; }
  void copy_from(std::uint32_t coordinator, std::uint64_t position) { copied_[coordinator] = position; }
  void on_copied(std::uint32_t coordinator, const proto::LogRecord& record);
  std::string landmark_of_copy(std::uint32_t coordinator) const;

  // ---- the coordinator's disk
  enum class Append { done, failed };
  // Durable from now on, as far as it got; a failure has ended the coordinator.
  Append append(const std::vector<proto::LogRecord>& records);

 private:
  void add_note(std::string line);
  template <typename T>
  T& start(std::unique_ptr<T>& place, std::unique_ptr<T> process) {
    place = std::move(process);
    set_going(*place);
    return *place;
  }
  void set_going(Process& process);
  void set_timer(Process& process, Duration delay);
  void ring_timer(Process& process);
  void go_on(std::uint64_t instance);
  void start_trainer(std::uint32_t replica, std::uint32_t rank);
  void start_daemon(std::uint32_t node);
  void start_coordinator(std::uint32_t number);
  void start_relay(std::uint32_t number);
  void kill_relay(std::uint32_t number, Duration lasting);
  std::optional<std::uint32_t> draw_relay(std::uint32_t node, Random& random) const;
  Calling caller(std::uint32_t number);
  Listening station(std::uint32_t number);
  std::uint32_t draw_caller(std::uint32_t node, Random& random) const;
  void drop_links_to(std::uint32_t station);
  void begin_other_job(const Fault& fault, TimePoint until);
  void end_strangers();
  void begin_older_log(const Fault& fault);
  void end_older_log(bool whole);
  void put_back(const std::vector<proto::LogRecord>& records);
  void check_that_nobody_is_sent_away(const proto::Evicted& evicted);
  Checker new_checker();
  const std::optional<Violation>& violation() const;
  bool hears(std::uint32_t node, std::uint32_t coordinator, Duration since);
  // Whose decisions count; null: nobody's.
  const membership::Coordinator* deciding() const;
  CoordinatorProcess* leader() const;
  std::uint32_t draw_coordinator(Random& random) const;
  bool shared() const { return shape.coordinators > 1; }
  void part(const Fault& fault, TimePoint until);
  void cut_off_all(const Fault& fault, TimePoint until);
  void see_whom_to_spare(const Fault& fault);
  void see_who_is_cut(const Fault& fault);
  bool is_calm() const;
  void see_whom_it_harms(const Fault& fault);
  void see_who_is_healthy();
  void check_health(const Trainer& trainer, const std::string& why);
  void check_promptness();
  void cut_replica(const Fault& fault, TimePoint until);
  void check_isolation(const std::optional<std::string>& wrong);
  void set_back_store(Random& random, TimePoint until);
  void kill_trainer(std::uint32_t replica, std::uint32_t rank, const std::string& why);
  void end_trainer(Trainer& trainer, const std::string& why, bool gave_up = false);
  // A second process in a rank's place (world_rivals.cc).
  void second_process(const Fault& fault, TimePoint until);
  void start_rival(std::uint32_t replica, std::uint32_t rank, std::uint32_t node, TimePoint until);
  void end_rival(const Trainer& trainer);
  std::unique_ptr<Trainer> take_rival(std::uint32_t replica, std::uint32_t rank);
  void kill_rivals(const std::string& why);
  const Trainer* rival_of(std::uint32_t replica, std::uint32_t rank) const;  // nothing: it has no second process
  bool has_rival(std::uint32_t replica, std::uint32_t rank) const;
  bool may_lose_its_place(const Trainer& first) const;
  void let_rival_stay(const Process& first);
  void let_rivals_stay();
  std::vector<Trainer*> trainers_on(std::uint32_t node) const;
  void kill_daemon(std::uint32_t node);
  void kill_coordinator(std::uint32_t number, const std::string& why);
  void kill_coordinators(const std::string& why);
  void let_operator_act();
  void grow_old();
  void lose_log();
  void lose_sectors(std::size_t synced);
  void on_record(const proto::LogRecord& record);
  void add_holder(Survivors::Holders& holders, std::uint32_t replica,
                  const std::function<bool(const Trainer&)>& holds) const;
  Survivors::Holders holders_of(const proto::LogRecord& record) const;
  void check_survivors();
  void check_protocol(const proto::LogRecord::EpochBegun& begun);
  void count_crossings(const proto::LogRecord::EpochBegun& begun);
  void happen(const Fault& fault);
  void reset_link(std::uint64_t number);
  void forget_link(std::uint64_t number, TimePoint until);
  std::optional<Duration> delay_on(const Link& link, bool up);
  void black_hole(const Fault& fault, TimePoint until);
  void stop_introduction(const Fault& fault);
  void forget(const Fault& fault);
  void hang_compute(const Fault& fault, TimePoint until);
  void stop_many(const Fault& fault);
  void suspend_node(const Fault& fault);
  void slow_link(const Fault& fault, TimePoint until);
  std::vector<Process*> processes() const;
  static bool is_of_bits(FaultKind kind);
  static bool is_of_logs(FaultKind kind);
  void damage_bits(const Fault& fault);
  bool somebody_is_wrong() const;
  void drop_who_is_wrong();
  Duration control_delay(std::uint32_t caller, std::uint32_t station, bool up);
  bool settled() const;
  void on_committed(const proto::LogRecord::Committed& record);
  bool go_on_long();
  void describe();
  void wake_who_has_events();
  bool recovered_again(std::uint64_t& target);
  void end_replica(const Fault& fault);
  bool has_ended() const;
  void check_the_end();
  void check_last_step(const Trainer& trainer);
  std::optional<std::string> leaked() const;
  void on_decision();
  void check_epochs();
  void check_queues(const Process& process);
  void check_ends();
  std::optional<ReplicaId> who_alone_has_ended(const Ends::Tells& tells) const;
  void disturb(Duration lasting) { disturb(lasting, lasting); }
  void disturb(Duration lasting, Duration felt);

  VirtualClock clock_;
  Random failures_random_, plant_random_;
  std::vector<Random> control_random_;  // by caller
  std::vector<Random> supervisor_random_;
  std::vector<Options::Speed> speeds_;
  transport::sim::Fabric fabric_;
  std::deque<Checker> checkers_;  // by history
  std::size_t history_ = 0;       // the one that goes on
  Checker of_others_;             // who are of another job; nobody asks it
  Survivors survivors_;
  Isolation isolation_;
  Health health_;
  Promptness promptness_;
  std::uint64_t decided_by_ = 0;  // the instance of who did when that was looked at last
  Outcome outcome_;
  std::uint64_t numbers_ = 0, sequence_ = 0;
  std::map<std::pair<TimePoint, std::uint64_t>, std::function<void()>> agenda_;
  std::map<std::uint64_t, Process*> processes_;  // by instance
  std::vector<Duration> clocks_;                 // by machine: a node each, the coordinators' and the relays'
  std::vector<TimePoint> suspended_until_;       // likewise
  std::vector<TimePoint> off_until_;             // … and has no power
  std::vector<TimePoint> away_until_;            // by replica: nobody starts it
  std::set<Ends::Place> over_;                   // places whose processes have ended well: nobody starts others
  std::vector<std::unique_ptr<Daemon>> daemons_;
  std::vector<std::unique_ptr<Relay>> relays_;
  std::vector<std::vector<std::unique_ptr<Trainer>>> trainers_;
  struct Rival {  // in the place of one that lives; it is started again until then
    std::unique_ptr<Trainer> trainer;
    TimePoint until{};
    bool may_stay = false;  // the one that lives has been stopped meanwhile
  };
  std::vector<Rival> rivals_;
  std::vector<std::unique_ptr<CoordinatorProcess>> coordinators_;
  Store store_;
  std::vector<std::uint64_t> copied_;                                    // records, by coordinator
  std::map<std::pair<std::uint32_t, std::uint32_t>, TimePoint> parted_;  // caller and station, until then
  std::uint64_t epoch_written_ = 0, step_written_ = 0;                   // the highest ever
  std::vector<proto::LogRecord> log_;                                    // what is on disk, or has been in the store
  Bytes disk_;                                                           // … byte for byte
  struct OtherJob {
    membership::JobConfig config;
    std::vector<proto::LogRecord> log;  // of its coordinator, if that is one
    Store* store = nullptr;             // of its coordinators
    TimePoint until{};
  };
  struct WholeLog {
    std::vector<proto::LogRecord> records;
    std::size_t history = 0, put_back_to = 0;  // … so many records
    std::uint64_t processes = 0;               // whose numbers are lower have been there before
  };
  std::optional<WholeLog> whole_log_;                 // while the job has an older copy
  OtherJob other_;                                    // the last
  std::uint64_t other_jobs_ = 0, logs_lost_ = 0;      // ever
  std::vector<std::unique_ptr<Store>> other_stores_;  // all: answers may be on their way
  bool crash_in_append_ = false, disk_full_ = false;
  Duration slow_append_{};
  struct Word {  // an operator's
    std::optional<membership::JobConfig::RollBack> roll_back_to;
    std::optional<membership::JobConfig::Drop> drop;
  };
  void give_word(const Word& word, const std::string& why);
  std::vector<Word> words_;                                // to each coordinator, when it is started next
  std::vector<std::optional<Step>> allowed_to_roll_back_;  // … and to the one that runs, until the next commit
  void count_steps(const proto::LogRecord& record);
  bool is_for_now(const membership::JobConfig::RollBack& word) const;
  // The last that was done, and whether a step has been committed since; how many steps were committed ever.
  std::optional<Step> last_roll_back_;
  bool gone_on_since_ = false;
  std::uint64_t steps_ever_ = 0;
  Random words_random_;
  const bool words_stay_;
  using PlaceInIncarnation = std::tuple<std::uint64_t, std::uint32_t, std::uint32_t, std::uint64_t>;  // job first
  std::map<PlaceInIncarnation, std::uint64_t> owners_;  // the instances that were told so
  TimePoint roll_back_wanted_since_{};
  std::vector<Fault> waiting_faults_;  // for their moments
  std::map<std::uint64_t, Link> links_;
  // By rank: in which step a bit of a reduced chunk flips, and at which replicas.
  std::map<std::uint32_t, std::pair<std::uint64_t, std::set<std::uint32_t>>> flipped_;
  bool bits_damaged_ = false;                                                              // ever
  std::vector<bool> damage_at_rest_;                                                       // by replica: due
  std::vector<std::map<std::uint64_t, std::map<std::uint32_t, Checkpoint>>> checkpoints_;  // by replica, version, rank
  std::vector<SlowLink> slow_links_;                                                       // by caller
  std::map<std::uint32_t, Interruption> interruptions_;                                    // by caller: due
  std::vector<TimePoint> up_blocked_, down_blocked_;                                       // by caller: until then
  std::map<std::pair<std::uint32_t, std::uint32_t>, TimePoint> slow_until_;
  struct Memory {  // how it is registered by the process that is that rank next
    std::uint64_t refused = 0;
    Duration takes{};
  };
  std::map<std::pair<std::uint32_t, std::uint32_t>, Memory> memory_;
  TimePoint faults_end_{}, disturbed_until_{};  // until then a fault may still be felt
  TimePoint old_news_until_{};                  // what was said in a cut, or over a slow link, may still arrive
  Ends ends_;
  std::set<std::uint64_t> spared_;  // instances of contributors, while nothing but the way to the coordinators is away
  TimePoint felt_until_{};          // … and lasts, unless it is that somebody stays away
  TimePoint resumed_at_{};          // somebody who was stopped went on last
  TimePoint decided_at_{};          // the last commit or epoch
  std::deque<std::string> recent_;
  std::map<std::uint64_t, std::map<std::pair<std::uint32_t, std::uint32_t>, double>> losses_;  // by step
  std::uint64_t failures_ = 0;                                                                 // of a long run, so far
  TimePoint next_failure_{};
};

}  // namespace rejoin::sim
