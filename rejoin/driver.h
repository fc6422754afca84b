// The driver plays one rank's part in the job: it runs the step protocol and the ring under it, and reports to the
// coordinator about both. It has no thread, socket or clock of its own: ProgressThread (progress_thread.h) runs it in a
// thread beside the daemon's socket, the simulator under virtual time.
#pragma once

#include <functional>
#include <map>
#include <set>
#include <tuple>

#include "base/coarse_rate.h"
#include "base/deadlines.h"
#include "control.pb.h"
#include "ftar/communicator.h"
#include "local/owner.h"
#include "membership/ahead.h"
#include "membership/digest_table.h"
#include "membership/pause_detector.h"
#include "membership/peer_table.h"
#include "membership/prospect.h"
#include "membership/rank.h"
#include "membership/round_trips.h"
#include "rejoin/position.h"
#include "rejoin/state_audit.h"

namespace rejoin {

struct DriverConfig {
  ReplicaId replica;
  std::uint32_t rank = 0;
  std::uint64_t instance = 0;   // the random number of this process; never 0
  std::string transport;        // the kind of transport, such as "tcp", for the settings that all must share
  std::uint64_t plan_hash = 0;  // digest of tensors and buckets, equal on all ranks `rank`
  proto::Declaration declared;  // the tensors and settings that plan_hash stands for
  std::string card;             // the trainer's text for the same rank of other replicas
  std::string card_listening;   // see Session::set_card()
  Position from;                // of the state that the rank comes with
  bool weighs = false;          // the trainer multiplies its gradients with StepView::weight
  ftar::Options ring;
  // How long a step may wait for a trainer that computes, until enough steps have shown how long they take here: the
  // longer one of the two. `patience` is what else of this rank may take its time, and says so.
  Duration patience{}, first_steps = std::chrono::minutes(1);
  Duration between_steps = std::chrono::minutes(10);  // how long a step may wait for a trainer that has not begun it
  // The driver begins at most so many connections with peers at a time, and so many again with those that the epoch
  // needs.
  std::size_t calls_at_once = 32;
  // Runs what it is given on another thread than poll()'s, one task after the other, and has poll() called when a task
  // has ended. The driver takes digests there, since those of a GPU's memory may take long. A task has ended, or never
  // begins, when the driver is destroyed. Empty: digests are taken in poll().
  std::function<void(std::function<void()>)> aside;
};

// The step that the trainer is to run.
struct StepView {
  std::uint64_t step = 0;
  bool contributes = false;
  bool leads = false;  // this is the contributor that does what one does for all, such as logging
  std::uint32_t contributors = 0;
  membership::Batch batch;
  bool shares_batch = false;  // replicas train different numbers of samples, or may later
  std::uint64_t weight = 1;   // what this rank's gradients are to be multiplied with
  membership::Ahead ahead;    // which samples later steps will probably have
  std::uint64_t epoch = 0;
  bool settled = false;                                  // all members begin the step in this epoch
  std::vector<std::pair<ReplicaId, std::string>> cards;  // of its contributors
  membership::Samples trained;                           // in the steps before it
};

class Driver {
 public:
  // `engine`, `owner` and the buckets' memory outlive this.
  Driver(const DriverConfig& config, transport::Engine& engine, local::Owner& owner,
         std::vector<ftar::BucketSpec> buckets);

  // Registers the memory of the all-reduce, which may take longer than any silence. So it comes first, while nobody
  // knows of this rank: who is known has to give signs of life.
  Result<> prepare();

  // The daemon has accepted this rank: the caller calls this before all that follows. This rank and its peers prove by
  // `secret` that they are of the job; `silence` is how long a peer may be silent.
  void on_welcome(const transport::Secret& secret, Duration silence) {
    secret_ = secret, silence_ = silence;
    pause_detector_ = membership::PauseDetector(silence);
  }
  // Another daemon has taken this rank over, and peers prove its secret from now on.
  void set_secret(const transport::Secret& secret) { secret_ = secret; }

  // ---- the daemon's side
  void on_control_message(const proto::ToNode& message, TimePoint now);
  // The caller calls this in every turn, before it passes on what has come: the driver finds out whether this process
  // was paused. Returns for how long since the last turn; zero as a rule.
  Duration notice(TimePoint now);
  Duration recent_pause(TimePoint now) const;  // how long this process was paused just now; zero as a rule
  // Runs the ring and reports on it. The caller calls it after each event, often while working() says so, and when it
  // is due(), whatever comes.
  void poll(TimePoint now);
  // Returns the reports that have come up since the last call, for the daemon. describe() repeats those that get lost
  // with a daemon.
  std::vector<proto::FromNode> take_reports() { return std::exchange(reports_, {}); }
  void on_daemon_back() {
    news_.Clear();
    links_reported_.clear();
    if (ring_) report_links();
  }
  // Fills in who this rank is and how far it has come, for a registration. The caller fills in address, version, digest
  // and pid.
  void describe(proto::RankUp& up) const;
  proto::FromNode heartbeat() const;

  // ---- the trainer's side
  // The trainer's gradients of these buckets are ready in this step. A joiner's buckets are reduced without being asked
  // for.
  void want(const std::vector<bool>& buckets, TimePoint now);
  void take(std::uint64_t step, TimePoint now);  // the trainer works on this step from now on
  // What coding has lost in this step counts so much in the next. The caller says so before want() of the next step.
  void scale_feedback(std::uint64_t step, float factor) {
    if (ring_) ring_->scale_feedback(Step(step), factor);
  }
  // The trainer says what it is busy with and until when it may be, or with nothing that it is not busy any more. The
  // coordinator hears of it while a step waits for this trainer.
  struct Occupation {
    std::string reason;
    TimePoint since, until;
    bool computes = false;  // it is what each step does, and told of when it takes longer than usual
  };
  void occupy(std::optional<Occupation> occupation, TimePoint now);
  const std::optional<StepView>& step() const { return current_; }
  std::uint64_t committed() const { return committed_; }  // the last step decided that this replica took part in
  bool committed_contributes() const { return committed_contributes_; }
  std::uint32_t committed_contributors() const { return committed_contributors_; }     // to that step, of all replicas
  bool registered() const { return machine_.incarnation() != Incarnation{}; }          // the coordinator has taken us
  const membership::Samples& committed_trained() const { return committed_trained_; }  // in all steps up to there
  bool finished() const { return finished_; }
  bool over() const { return over_; }  // it finished before this replica had a part in it: the state is untouched
  bool brought_last() const { return brought_last_; }  // … but it came with the state of the last step
  const std::optional<Error>& failure() const { return failure_; }
  std::uint64_t revision() const { return revision_; }  // changes with any of these

  // Damages one bit of what the ring brings in the next step, for a drill.
  void flip_a_bit() {
    if (ring_) ring_->flip_bit_at(machine_.step().next());
  }
  // For each bucket the last step for which it has been reduced; after a retry it is reduced once more.
  const std::vector<std::uint64_t>& reduced() const { return reduced_; }
  bool busy() const { return ring_ && ring_->busy(); }
  bool working() const { return ring_ && ring_->working(); }  // see ftar::Communicator
  TimePoint due() const { return ring_ && !failure_ ? std::min(reach_at_, measure_at_) : TimePoint::max(); }
  std::uint64_t outcomes() const { return outcomes_; }          // how many the ring has had since the start
  std::uint64_t links_closed() const { return links_closed_; }  // because both ends had no use for them
  const membership::Rank& machine() const { return machine_; }

 private:
  static ftar::Member member_of(const auto& m) { return {ReplicaId(m.replica()), Incarnation(m.incarnation())}; }

  void poll_ring(TimePoint now);
  void on_plan(const proto::Plan& plan, TimePoint now);
  void on_peers(const proto::Peers& fragment);
  const std::vector<proto::Peer>& peers() const { return peers_.of(config_.rank); }
  void reach_peers();
  void on_prospect(const proto::Prospect& prospect);
  void on_waits(const proto::Waits& waits);
  void choose_links();
  bool to_be_linked(const ftar::Member& member) const { return !links_ || links_->contains(member); }
  void enter_epoch();
  void record_epoch() const;
  std::vector<std::pair<ReplicaId, std::string>> cards() const;
  void submit_wanted(TimePoint now);
  void report_reduced();
  template <typename T>
  struct Offloaded;
  template <typename T>
  std::shared_ptr<Offloaded<T>> offload(std::function<Result<T>()> work);
  bool audited();
  void inspect_if_asked(const proto::Plan& plan);
  void take_details();
  std::function<Result<proto::FromNode>()> details() const;
  void excuse_digests(TimePoint now);
  void report_links();
  bool all_linked() const;
  void measure(const ftar::Member& peer);
  void measure_all();
  bool measure_rates();
  membership::RoundTrips round_trips() const;
  bool calls(const proto::Peer& peer) const;
  bool not_reached(const ftar::Member& member, const std::string& why);
  void look_for_stalls(TimePoint now);
  void excuse_trainer(TimePoint now);
  void excuse_between_steps(TimePoint now);
  bool to_be_told(const Occupation& occupation, TimePoint now) const;
  void tell_occupation(TimePoint now);
  void excuse_flush(const std::vector<ftar::Wait>& waits, TimePoint now);
  void forgive_trainer(Duration pause, TimePoint now);
  proto::Accusation& excuse(std::string why, bool excused, TimePoint since, TimePoint now);
  struct Broken {
    std::string why;
    bool found = false;  // by this end
  };
  proto::Accusation& accuse(const ftar::Member& suspect, const std::string& what);
  proto::Accusation& accuse_of_loss(ReplicaId suspect, const Broken& broken);
  void accuse_of_wait(const ftar::Wait& wait);
  void record(const proto::Accusation& accusation);
  Duration patience_with_compute() const;
  void time_trainer(TimePoint now);
  Duration busy_otherwise(TimePoint now) const;
  void fail(Error error);
  void put_out(const std::string& why, TimePoint now);

  const DriverConfig config_;
  transport::Engine& engine_;
  local::Owner& owner_;
  const std::vector<ftar::BucketSpec> buckets_;
  transport::Secret secret_;
  Duration silence_ = deadlines::kSilence;
  membership::PauseDetector pause_detector_{silence_};
  Duration pause_{};
  TimePoint back_at_{};
  membership::Rank machine_;
  std::unique_ptr<ftar::Communicator> prepared_;  // until this rank is registered
  std::unique_ptr<ftar::Communicator> ring_;
  // Why connections broke in this epoch. They are of no use before the next one.
  std::map<ReplicaId, Broken> broken_;
  std::unique_ptr<StateAudit> audit_;
  membership::RankDigests digests_;  // of the last reduction
  std::shared_ptr<Offloaded<membership::RankDigests>> audit_under_way_;
  Epoch audit_epoch_;
  Step audit_step_;
  std::shared_ptr<Offloaded<proto::FromNode>> inspection_;
  TimePoint digests_since_{};    // since when digests are under way, as far as is known
  membership::PeerTable peers_;  // of this rank
  proto::Peers news_;            // fragments of Peers, until the last has come
  LinkRule link_rule_;
  std::optional<std::set<ftar::Member>> links_;  // with whom to connect; nothing: with all
  std::set<ftar::Member> calls_;                 // of these all, also those that are newer
  proto::Prospect prospect_;                     // while it is no member
  std::string waits_for_;                        // as it was said last, without times
  std::string links_reported_;
  std::map<std::uint64_t, RoundTripLength> round_trips_;  // by incarnation, of peers: the least, ever
  membership::RoundTrips round_trips_reported_;
  std::map<ftar::Member, CoarseRate> rates_reported_;  // of neighbours in the ring
  std::map<Incarnation, proto::Unreached> unreached_;  // the first reason that was found
  std::vector<proto::FromNode> reports_;
  std::vector<bool> wanted_, submitted_, done_;  // by bucket, in this epoch and step
  std::vector<std::uint64_t> reduced_;
  std::uint64_t taken_ = 0;
  struct {  // how long the trainer computes in the step that it has taken up
    std::uint64_t step = 0;
    TimePoint since{};
    Duration busy{};  // of it, with something else
    std::optional<Duration> took;
    bool paused = false;
  } computed_;
  std::optional<StepView> current_;
  std::uint64_t committed_ = 0;
  bool committed_contributes_ = false, finished_ = false, over_ = false, brought_last_ = false;
  std::uint32_t committed_contributors_ = 0;
  membership::Samples committed_trained_;
  std::optional<Error> failure_;
  std::uint64_t revision_ = 0, outcomes_ = 0, links_closed_ = 0;
  // The incarnation that was called last: of all, and of those that the epoch needs.
  std::uint64_t reach_below_ = ~std::uint64_t{0}, needed_below_ = ~std::uint64_t{0};
  bool more_to_reach_ = false;  // when one of those that are being called has answered
  TimePoint stall_checked_{}, committed_at_{}, reach_at_{}, broken_reported_{}, measure_at_{};
  TimePoint offered_at_{}, begun_at_{};     // the step under way: to the trainer, and by it
  bool said_unconnected_ = false;           // of a connection that it lacked, and nothing else since
  TimePoint excused_at_{}, released_at_{};  // last reported; when it was last busy with something
  TimePoint landing_since_{};               // its writes from before the epoch
  std::optional<Occupation> occupied_;
  int computed_before_ = 0;  // such occupations, of the first
  bool came_late_ = false;   // to a job whose other members know how long steps take
  std::uint64_t offered_ = 0, begun_ = 0;
  std::uint64_t stall_reported_for_ = 0;
  // Recorded last, by suspect: in which epoch, and whether it was lost.
  std::map<std::uint32_t, std::pair<std::uint64_t, bool>> accused_;
  std::uint64_t job_ = 0;             // as registered
  std::vector<Duration> step_times_;  // of the last steps that went through in one epoch
  bool disturbed_ = false;            // the step under way did not
};

}  // namespace rejoin
