// The coordinator: decides epochs and commits. A pure state machine: messages and the time go in, actions come out.
// The shell makes `append` durable, in order, before it sends anything of `send`. Replaying the appended records
// through recover() gives the same decisions, so that a restarted coordinator goes on where it stopped.
//
// What it does for each step grows with the reports that come, and those are gathered on their way: a daemon reports
// for its ranks, a relay for all that connect through it. "Node" means any of them here.
//
// The messages with a node, in order (control.proto):
//   1. The node introduces itself with NodeHello, and each of its ranks with RankUp.
//   2. The coordinator answers each with Registered, Refused or Evicted, and tells all of the Peers to connect with.
//   3. A Prospect says with whom, in a large job. The nodes send ReplicaStatus when they are, and when that changes.
//   4. The coordinator sends the Plan with the epoch, its first step and everybody's batch.
//   5. In each step the nodes send Reduced, and the coordinator sends the next Plan, which commits the step.
//   6. Besides: Heartbeat both ways; Accusation and RankDown of who is waited for or has gone, which end in a Plan with
//      another epoch; Inquiry and Alive, Declare and Declaration, Details and Drift, where something is in doubt.
//
// The rules, each in one function:
//   start      all configured replicas have registered and are connected: the most advanced state contributes, the
//              others catch up. Never below the last committed step, unless an operator says so.
//   commit     all ranks of all members have reduced: the step is decided, and with it the plan of the next one.
//   retry      a member is gone: the same step again in the next epoch, without it.
//   suspend    a contributor is silent, not known to be dead, or others fare badly with it: out like one that is gone,
//              but until the next commit its state is as good as anybody's, so that until then it may be taken back.
//   hold       the last that has the state is never put out for silence: the job waits for it.
//   mend       a connection between two members broke: the same members in the next epoch, where they connect again.
//   admission  a registered, connected replica enters at the next step boundary as catching up.
//   promotion  all its ranks have caught up: it contributes from the next step boundary on, or at once where nobody
//              else is left to contribute.
//   place      who has a replica's rank and answers keeps it: a second process is refused.
//   audit      what replicas reduced, or their states, differ: not committed, but repeated, or settled (drift_audit.h).
//   versions   what all members speak is decided with each epoch. When it rises an epoch begins at the next step
//              boundary, and when it falls at once.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/fail.h"
#include "base/ids.h"
#include "base/refusals.h"
#include "control.pb.h"
#include "membership/announcer.h"
#include "membership/coordinator_actions.h"
#include "membership/declarations.h"
#include "membership/drift_audit.h"
#include "membership/job_config.h"
#include "membership/ledger.h"
#include "membership/members.h"
#include "membership/never_members.h"
#include "membership/paces.h"
#include "membership/pause_detector.h"
#include "membership/process.h"
#include "membership/prospect.h"
#include "membership/rank_set.h"
#include "membership/readmissions.h"
#include "membership/replica_state.h"

namespace rejoin::membership {

class Coordinator {
 public:
  static constexpr const char* kNotBack = "it did not come back after a change or restart of the coordinator";
  explicit Coordinator(const JobConfig& config)
      : config_(config),
        ledger_(config.dealing()),
        pause_detector_(config.silence),
        roll_back_to_(config.roll_back_to),
        links_(config.links),
        audit_(config.audit, config.ranks) {}

  // Before anything else: takes up the decisions of an earlier instance. `mismatch` where the log is of another job
  // shape, `corrupt` where its records contradict each other.
  Result<> recover(const std::vector<proto::LogRecord>& records, TimePoint now);
  // The same in steps: each record when it comes, and then the decision to go on from them.
  Result<> replay(const proto::LogRecord& record);
  Result<> take_over(TimePoint now);
  proto::LogRecord snapshot() const;  // recovery from it alone leads to the same as from all records so far
  bool has_recovered_like(const Coordinator& other) const;  // which is what this tells
  std::string landmark() const;  // of what is decided, in words: two logs that differ lead to two of these

  Actions on_message(NodeId node, const proto::FromNode& message, TimePoint now);
  Actions on_node_lost(NodeId node, TimePoint now);
  void on_sign_of_life(NodeId node, TimePoint now);  // that is no message for this
  Actions on_tick(TimePoint now);                    // at least every silence / 8

  std::uint64_t job() const { return job_; }  // its id; 0: of a log from before there was one
  bool started() const { return epoch_ != Epoch{}; }
  bool finished() const { return steps_ != 0 && committed_.value >= steps_; }
  void set_steps(std::uint64_t steps) { steps_ = steps; }  // of another one that leads, until this one takes over
  std::string ends_too_early() const;  // by the settings, the job does: why this one can't decide; empty: it can
  Epoch epoch() const { return epoch_; }
  Step committed() const { return committed_; }
  const std::vector<MemberState>& members() const { return members_.all(); }
  const std::vector<SuspendedReplica>& suspended() const { return suspended_; }
  std::optional<Located> located(ReplicaId replica, Incarnation incarnation) const;  // nothing: not all its ranks are
  RoundTrips round_trips(ReplicaId replica, Incarnation incarnation) const;          // as its ranks have told
  std::vector<std::vector<ReplicaId>> neighbourhoods() const;                        // of members, see round_trips.h
  bool orders_by_round_trips() const { return config_.round_trips; }
  const Replicas& replicas() const { return replicas_; }
  bool caught_up(const ReplicaState& replica) const;  // all its ranks
  bool caught_up(const MemberState& member) const;    // as far as this coordinator has heard
  const Ledger& ledger() const { return ledger_; }
  const DriftAudit& audit() const { return audit_; }
  const std::optional<std::string>& stopped() const { return stopped_; }  // an operator must say which one is wrong
  std::vector<std::string> waiting_for(TimePoint now) const;              // whom the step under way does, for people
  // The last that hold the state of the last committed step, and silent: nothing goes on without them.
  std::vector<ReplicaId> blocked_on() const;
  std::vector<ReplicaOutage> outages(TimePoint now) const;
  TimePoint held_back_until() const { return readmissions_.last(); }  // of replicas that were put out, the last
  // What is not as it should be although nothing waits for it, a sentence each.
  std::vector<std::string> alarms() const;
  // An operator's word in this one's settings that would still change something if this one decided; empty: none.
  std::string unused_word() const;
  void end_word();                                                                    // to roll back
  std::uint64_t steps_ever() const { return committed_.value + steps_rolled_back_; }  // committed, by the log
  // The job waits for an operator's word: the step that roll_back_to would have to allow; and the word that does.
  std::optional<Step> wants_roll_back() const { return wants_roll_back_; }
  JobConfig::RollBack word_for(Step step) const { return {step, steps_ever()}; }
  // Its own is an older copy, or another job's.
  bool wants_log() const { return outdated_ || (!runs() && !strangers().empty()); }
  // Ranks that were refused for what they declare, one of a replica, and have not come back otherwise.
  const Declarations::Refused& refused() const { return declarations_.refused(); }
  std::uint64_t steps_rolled_back() const { return steps_rolled_back_; }  // ever, by the log
  // What all members speak in this epoch, by the log: what they have to do alike may be decided by it.
  Spoken protocol() const { return protocol_; }
  const std::map<NodeId, ConnectedNode>& nodes() const { return nodes_; }
  const RankVersions& versions_of(const RankState& rank) const { return versions_[rank.versions]; }
  // Of all that may take over, as far as nodes have said; as long as none has, what is done is what the oldest can do.
  std::optional<Spoken> protocol_of_coordinators() const { return of_coordinators_; }
  void set_protocol_of_coordinators(std::optional<Spoken> lowest) { of_coordinators_ = lowest; }
  const BalanceRule& balance_rule() const { return config_.balance; }
  std::optional<std::uint64_t> pace(ReplicaId replica) const { return paces_.of(replica); }  // picoseconds a sample
  std::vector<Paces::Straggler> stragglers() const;  // contributors that are slower than the others, the slowest first
  std::optional<SlowLinkFinder::Found> slow_link() const { return slow_link_.found(); }

 private:
  void on_rank_up(NodeId node, const proto::RankUp& up);
  std::optional<std::string> contradicted(const proto::RankUp& up) const;
  Screened screen(NodeId node, const proto::RankUp& up);
  Screened screen_log(NodeId node, const proto::RankUp& up);
  bool find_outdated(const proto::RankUp& up);
  void register_again(NodeId node, const proto::RankUp& up);
  void register_new(NodeId node, const proto::RankUp& up);
  void refuse(NodeId node, const proto::RankUp& up, refusals::Why why, std::string reason);
  void send_finished(NodeId node, const proto::RankUp& up);
  void on_fully_registered(ReplicaId id);
  void welcome(NodeId node, const proto::RankUp& up, Incarnation incarnation);
  void welcome_back(NodeId node, const proto::RankUp& up, const ReplicaState& replica);
  void on_rank_down(NodeId node, const proto::RankDown& down);
  void lose_node(NodeId node, TimePoint since, Connected connected = Connected::no_more);
  void on_reduced(NodeId node, const proto::Reduced& reduced);
  void on_replica_status(NodeId node, const proto::ReplicaStatus& status);
  void on_accusation(NodeId node, const proto::Accusation& accusation);

  // coordinator_balance.cc
  bool all_may_balance();
  bool may_balance(const ReplicaState& replica) const;
  std::uint64_t plausible(std::uint64_t compute_us) const;
  void measure(Step step);
  void look_for_slow_link();
  std::optional<Balance> change_of_balance(Step step);

  // coordinator_claims.cc
  RankState* holder_against(const proto::RankUp& up);
  bool former_may_come_back(const proto::RankUp& up, TimePoint now) const;
  Screened screen_place(NodeId node, const proto::RankUp& up);
  void inquire(PlaceClaim& claim, const RankState& holder);
  void on_alive(const proto::Alive& alive);
  void settle_claims();
  static std::string node_name(const RankState& rank);
  void list_claims(TimePoint now, std::vector<std::string>& lines) const;

  // coordinator_declarations.cc
  Screened screen_declaration(NodeId node, const proto::RankUp& up);
  void on_declaration(const proto::Declaration& declared);
  void settle_declarations();
  void settle_without_majority();
  void announce_after_dissent();
  void turn_out_those_who_differ(const FirstDeclared& binding);
  void ask_for(Declaration& declaration);
  void ask(const Declarations::Question& question);

  // coordinator_versions.cc
  void keep_versions(RankState& rank, NodeId node, const proto::RankUp& up);
  Spoken spoken_by_all() const;
  bool protocol_rises() const;
  void lower_protocol();
  // coordinator_waits.cc
  std::vector<std::string> unreached_lines(ReplicaId id, const ReplicaState& replica) const;
  void list_missing(TimePoint now, std::vector<std::string>& lines) const;
  std::string missing_line(const MemberState& member, TimePoint now) const;
  bool runs() const;  // somebody does
  void tell_why_it_waits();
  void tell_incomplete_replicas();
  // coordinator_accusations.cc
  bool judges_now() const { return !pause_detector_.settling(now_) && !finished() && !outdated_; }
  bool mend();
  void put_out_for_now(ReplicaId id, const std::string& why);
  void hold_back(ReplicaId id, const std::string& why);
  std::string who_hangs(const MemberState& member) const;
  enum class Begun : bool { maybe, fresh };  // whether somebody may have begun the step before an epoch
  bool could_say(const MemberState& m) const;
  void judge();
  // coordinator_absence.cc
  void suspect_itself(Duration pause);
  void forgive_all(Duration pause);
  void lose_silent_nodes();
  void settle_absent();
  void settle_recovery();
  void suspend(ReplicaId replica, const std::string& reason);
  bool take_back(Whom whom);
  bool promote_caught_up(Whom whom);
  bool find_contributors();
  void give_up_suspended();
  void remove(ReplicaId replica, const std::string& reason, Parting parting = Parting::lost);
  void keep_end(const proto::RankDown& down);
  bool is_of_holder(const proto::RankDown& down) const;
  void settle_ends();
  void lose(const proto::RankDown& ended);
  void lose_everybody();
  void next_epoch(const std::string& reason, Begun step = Begun::maybe);
  void drop_registration(ReplicaId replica, const std::string& reason);
  bool forget_registration(ReplicaId replica);  // false: there is none
  void evict(NodeId node, ReplicaId replica, Incarnation incarnation, const std::string& reason, std::uint64_t of_job);
  bool is_back(const MemberState& member) const;
  bool has_ended(const MemberState& member) const;
  bool present(ReplicaId replica, Incarnation incarnation) const;
  bool overdue(const ReplicaState& replica) const;
  bool may_come_back(const RankState& rank) const;
  void on_return();
  bool others_contribute(ReplicaId replica) const;
  bool contributes_here(const MemberState& member) const;
  bool has_contributors() const;
  std::optional<ReplicaId> first_contributor() const;  // of the lowest number
  void warn_once(std::string line);
  // coordinator_recovery.cc
  void note_never_members(const proto::LogRecord& record);
  // coordinator_outages.cc
  void note_outages(const proto::LogRecord::EpochBegun& begun, std::optional<TimePoint> since);
  std::string why_silent(const ReplicaState& replica) const;
  std::string reason_for_being_out(ReplicaId replica) const;
  std::string strange_stream(ReplicaId id, std::uint32_t number) const;
  void tell_who_differs(const std::vector<ReplicaId>& replicas, const std::vector<ReplicaId>& chosen);
  // coordinator_holders.cc
  bool last_complete(const MemberState& member) const;
  bool may_be_complete(const MemberState& member) const;
  bool another_holds(ReplicaId replica) const;
  TimePoint last_heard(ReplicaId replica, Incarnation incarnation) const;
  TimePoint holder_last_heard() const;
  bool is_lately(TimePoint heard) const;
  bool hears_holder() const;
  void forgive_what_nobody_was_heard_in();
  void block_on(ReplicaId replica, const std::string& why);

  // coordinator_start.cc
  void try_start();
  std::vector<ReplicaId> ready_to_start();
  Duration start_patience() const;
  static std::pair<Step, Step> versions(const ReplicaState& replica);
  bool foreign(Step version) const;
  bool of_other_samples(const ReplicaState& replica) const;
  static bool of_one_position(const ReplicaState& replica);
  std::uint64_t keep_brought(const Samples& trained);
  std::vector<std::string> strangers() const;
  const RankState* registered_at(const RankPlace& place) const;
  bool is_of_strangers(NodeId node, std::uint32_t replica, const RankSet& ranks) const;
  std::optional<Step> newest(const std::vector<ReplicaId>& replicas) const;
  bool send_back_mixed(const std::vector<ReplicaId>& replicas, std::optional<Step> newest);
  std::string rollback_needed(Step from) const;
  std::string goes_back_to(Step from, TimePoint now) const;
  std::vector<std::string> unfit(const std::vector<ReplicaId>& replicas) const;
  std::vector<bool> fit_to_start(const std::vector<ReplicaId>& replicas, Step from) const;
  void start_with(const std::vector<ReplicaId>& replicas, Step from);
  // coordinator_audit.cc
  bool differences_settled();
  Result<> drop_as_configured();
  void take_back_while_stopped(ReplicaId replica);
  // coordinator.cc
  void try_commit();
  bool change_members_at_boundary();
  void begin_epoch(const std::string& reason, Begun step = Begun::maybe);
  void plan_step();
  void broadcast_plan();
  proto::Plan plan() const;
  bool fully_registered(const ReplicaState& replica) const;
  // coordinator_registration.cc
  RankState& keep(ReplicaState& replica, NodeId node, const proto::RankUp& up);
  bool ask_the_other_nodes(NodeId lost, const ConnectedNode& was, const std::vector<ProcessId>& dropped);
  void send_plan(NodeId node);
  void end_recovery_if_all_are_back();
  void announce_all();
  void announce_replica(const ReplicaState& replica, ReplicaId id);
  void flush_announcements();
  // coordinator_links.cc
  bool linked(const ReplicaState& replica, const Incarnations& incarnations) const;
  Ring ring_in_plan() const;
  Ring ring_of_members(When when) const;
  Ring in_ring_order(Ring ring, Moving moving = Moving::yes) const;
  void order_by_location(Ring::iterator begin, Ring::iterator end, Moving moving) const;
  Neighbourhoods near_each_other(std::span<const RingMember> members) const;
  void order_members(Begun step);
  std::vector<ReplicaId> candidates() const;
  std::optional<ReplicaId> not_linked(const std::vector<ReplicaId>& to_start);
  void tell_prospect_of_start(const std::vector<ReplicaId>& to_start);
  void tell_prospect();
  // coordinator.cc
  SuspendedReplica* out_for_now(ReplicaId replica);
  const ReplicaState* registration(ReplicaId replica, Incarnation incarnation) const;
  RankState* rank_of(const ProcessId& process);  // nothing: it is not registered
  void send(NodeId node, proto::ToNode message);
  void send_all(proto::ToNode message);
  void send_to(std::vector<NodeId> nodes, proto::ToNode message);
  void send_each(Announcer::Messages messages);
  template <typename... Args>
  void note(fmt::format_string<Args...> format, Args&&... args) {
    actions_.notes.push_back({fmt::format(format, std::forward<Args>(args)...)});
  }
  template <typename... Args>
  void warn(fmt::format_string<Args...> format, Args&&... args) {
    actions_.notes.push_back({fmt::format(format, std::forward<Args>(args)...), true});
  }
  // coordinator_recovery.cc, coordinator_snapshot.cc
  Result<> take_up(const proto::LogRecord& record);
  Result<> take_up(const proto::LogRecord::Job& job);
  Result<> take_up(const proto::LogRecord::Snapshot& snapshot);
  Result<> take_up(const proto::LogRecord::EpochBegun& begun);
  Result<> take_up(const proto::LogRecord::Committed& committed);
  Result<> take_up(const proto::LogRecord::RolledBack& rolled_back);
  void describe(proto::LogRecord::Job& job) const;
  void tell_of_roll_back();
  bool word_is_over() const;
  bool may_roll_back() const;
  Actions take() { return std::exchange(actions_, {}); }
  const JobConfig config_;
  Ledger ledger_;
  Epoch epoch_;
  Step committed_, most_committed_;                // the second: ever, also where it was rolled back
  std::uint64_t steps_ = config_.steps, job_ = 0;  // the second: its id; 0: not known
  std::uint64_t last_incarnation_ = 0;
  std::map<ReplicaId, std::pair<Step, Step>> sent_back_;  // with the states of such steps, and how they came
  std::map<std::uint64_t, Samples> brought_;  // by checkpoints, of ranks that are registered: by a digest of them
  // Incarnations that no epoch has ever named, without those that are older than the last epoch and a commit since: who
  // has one of them still has the state that it came with.
  NeverMembers never_members_;
  std::uint64_t incarnations_before_epoch_ = 0;  // given out before the last epoch was begun
  std::uint64_t steps_rolled_back_ = 0;
  Members members_{config_.ranks};
  std::vector<SuspendedReplica> suspended_;
  Replicas replicas_;
  std::map<ReplicaId, AbsentReplica> out_;
  std::map<ReplicaId, std::string> differed_at_start_;  // until they have taken over the others' state
  WaitOfStart waits_;
  std::map<NodeId, ConnectedNode> nodes_;
  Announcer announcer_{config_.replicas, config_.ranks, config_.silence};
  std::map<RankPlace, Stranger> strangers_;
  Declarations declarations_{config_.replicas, config_.ranks, config_.silence};
  bool unannounced_ = false;                   // replicas that came while there was dissent
  std::map<RankPlace, proto::RankDown> ends_;  // of processes that have not been heard here
  bool ends_count_ = false;                    // who is waited for had the time to say otherwise
  std::vector<PlaceClaim> claims_;             // of places that others have
  std::optional<std::string> outdated_;        // the log lacks what it had decided: nothing is decided any more
  std::set<RankPlace> heard_more_;             // … of which these have heard
  std::pair<std::uint64_t, std::uint64_t> heard_up_to_;  // … up to this step, in this epoch
  Spoken protocol_;
  std::optional<Spoken> of_coordinators_{Spoken(kProtocolVersion)};
  std::vector<RankVersions> versions_ = std::vector<RankVersions>(1);  // that ranks have, each once
  PauseDetector pause_detector_;
  std::optional<JobConfig::RollBack> roll_back_to_;       // no step has been committed since the start with it
  std::optional<Step> last_roll_back_, wants_roll_back_;  // the log's; a try's
  ReplicaId not_linked_;                                  // that a start last waited for
  LinkRule links_;
  Prospect prospect_;
  mutable KnownNeighbourhoods near_;
  std::optional<TimePoint> recovering_until_, incomplete_since_;
  Duration recovery_prolonged_{};           // for ranks that were still coming back
  TimePoint now_{}, under_way_since_{};     // of the event that is handled, or was last; when the step was planned
  TimePoint back_at_{}, holder_heard_{};    // when a rank last came back; when somebody with the state was heard
  std::set<std::string> warned_;            // in this epoch
  bool excused_ = false, settled_ = false;  // somebody took its time in the last committed step; see Plan.settled
  std::optional<ReplicaId> leader_;         // of the step, since it was planned; see Plan.leader
  DriftAudit audit_;
  Paces paces_;
  SlowLinkFinder slow_link_{24 * config_.silence};  // what is measured every 16 shows it twice
  std::optional<Step> balanced_at_;                 // when shares were last changed
  bool all_weigh_ = true;                           // as far as was told
  std::optional<std::string> stopped_;
  std::vector<ReplicaId> differing_;  // whose results or states differ, where the job is stopped for that
  Readmissions readmissions_{config_.silence};
  std::map<Edge, Accusation> accusations_;           // in this epoch
  bool has_log_ = false, nobody_was_heard_ = false;  // it was not the first to decide; all are to wait anew: judge()
  std::map<Edge, int> mended_;                       // epochs begun for a pair, the lower first, since the last commit
  Actions actions_;
};

}  // namespace rejoin::membership
