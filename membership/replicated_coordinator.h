// One of several coordinators that share a store (store.h): it follows the log of decisions, claims the lead where the
// leader is lost, and decides while it leads. A pure state machine, as all of this folder.
//
// The messages with a node, in order (control.proto), besides those of coordinator.h:
//   1. The node introduces itself with NodeHello. The coordinator answers with Leads: whether it leads, and in which
//      term. It says so again to all when that changes.
//   2. The node sends LeaderView to each coordinator, again and again: which term it knows, whether it hears that
//      leader, and which ranks are behind it. It introduces its ranks to the leader alone.
//   3. A standby answers each LeaderView with Leads. The leader sends Heartbeat to all, unasked.
//
// The rules:
//   claim      A standby claims the lead with one compare-and-swap, by what it has just read of the members, when
//              nobody has led yet; when the nodes of more than half of the members' ranks say that the leader is lost
//              (where the leader says that it can't write, only if the store answers this one); when the nodes of half
//              of them do, no node hears it, and the store shows no sign of it for `kTakeover` and `kLeaderSign`; when
//              a node does, none hears it, and there are no members or no sign for `kAbandoned`; when it has the name
//              and the address of the leader, which so has ended; when the nodes have heard of a higher term than the
//              store has.
//   full       A store that answers reads need not take writes. Who has failed to write takes it for failing until it
//              has written, or reads what others have written since; a claim that has failed is made again after a
//              pause, which doubles.
//   fence      What a leader writes is written only while the claim is the last one. A leader that is refused forgets
//              everything and follows.
//   output     Nothing that its decisions bring about leaves a leader before the store has confirmed, since the event
//              that led to it, that it leads: by the records that go with it, or by renewing the claim. So one that was
//              stopped, and goes on when others have taken over, says nothing but Leads, Heartbeat and Waits.
//   one        One request is under way at a time. What is decided meanwhile goes into the next one together.
//   job        What a node says that keeps to another job counts for nothing here: its terms are of another store.
//   again      A request without an answer is repeated as it is. A leader finds its own entry in the log, or its own
//              claim in the lead, where an earlier try has been done.
//   stalled    A leader that has waited for the store for `kTakeover` says so, which counts as lost, and judges nobody
//              until the store answers: for the decisions, that time is a pause.
//   steps      The job's are those of the one that leads, as its claim says. Who was started with others says so, and
//              who could not lead with them, since more are committed, does not claim.
//   slow       Where the store took longer the last time, a leader has three times that, up to a silence: to read what
//              there is, and for each write. Otherwise they would take the lead from each other, and decide nothing.
//   snapshot   The leader puts a snapshot in place of the log before it, every so many records. Who finds a gap between
//              what it knows and the log begins with the snapshot.
//   set back   A store may be put back to an older copy under a leader, which so has what the store has lost. What it
//              writes is written only behind what it wrote last; refused, it puts a snapshot of all that it knows in
//              place of that, with the last entry. Until then it can write nothing else, and says so. A standby that
//              finds it before it claims leaves the leader `kAbandoned` to do so.
//   another    Where the store's decisions become another job's, as by an import of the wrong log, this one is not of
//              that: it fails, and its copy stays its own job's.
//   copy       Every record of the log comes out once, in order, for a file on this coordinator's disk.
#pragma once

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/seldom.h"
#include "membership/coordinator.h"
#include "membership/store.h"

namespace rejoin::membership {

class ReplicatedCoordinator {
 public:
  struct Options {
    JobConfig job;
    std::string name, address;          // its own: for people, and where nodes connect
    std::uint64_t instance = 0;         // random, another one for each process
    std::uint64_t started_ms = 0;       // since 1970
    std::uint64_t per_snapshot = 1024;  // records
    std::size_t entry_bytes = 1 << 20;  // at most, unless one decision has more: etcd takes 1.5 MiB
    // What the copy on its disk has: records, counted from the beginning of the job, and the job's id.
    std::uint64_t copied = 0, copied_job = 0;
    std::string copied_landmark{};    // what they lead to; empty: not compared
    std::string copy_unread{};        // why it can't be read: there is something, which counts as one record
    std::vector<std::uint64_t> keys;  // of Leader, that are this job's; the first is its own. None: not looked at
  };
  struct Actions {
    std::optional<StoreRequest> request;  // its answer goes to on_answer(); there is no other before
    std::vector<std::pair<std::vector<NodeId>, proto::ToNode>> send;
    std::vector<NodeId> close;
    std::vector<Note> notes;
    std::optional<proto::LogRecord> copy_from;  // the copy begins anew with this snapshot, and goes on:
    std::vector<proto::LogRecord> copy;         // records that are in the log now, in order
    std::optional<Error> failed;                // it can't take part, and the operator has to do something
  };

  ReplicatedCoordinator(Options options, TimePoint now);
  // What a copy leads to. Empty where it is of a job with other settings, which its store tells, too.
  static Result<std::string> landmark_of(const std::vector<proto::LogRecord>& copy, const JobConfig& job);

  Actions on_message(NodeId node, const proto::FromNode& message, TimePoint now);
  Actions on_node_lost(NodeId node, TimePoint now);
  Actions on_answer(const StoreAnswer& answer, TimePoint now);
  Actions on_tick(TimePoint now);  // at least every silence / 16

  // The decisions of the leader; null in a standby. They may be ahead of the store.
  const Coordinator* leading() const { return role_ == Role::leading ? machine_.get() : nullptr; }
  const Coordinator& following() const { return *machine_; }  // as far as it has read
  const proto::Leader& leader() const { return leader_; }     // the last one known; term 0: none
  // How long that one has led. Of another one by both machines' clocks, but at least since it is known here.
  Duration led_for(TimePoint now) const;
  std::uint64_t position() const { return position_; }  // records of the log that it knows
  // Why the store did not do what it was asked the last time, and since when; nothing: it did.
  struct Failing {
    std::string why;
    TimePoint since{};
    bool of_write = false;  // over when it takes one, whatever it answers to who reads
    bool told = false;
  };
  const std::optional<Failing>& failing() const { return failing_; }
  bool stalled() const { return stalled_; }
  // Of a standby: an operator's word that it was started with, and that the leader need not have; empty: none.
  std::string unheeded_word() const;
  // That its --steps are not those of the leader, or that it can't lead with them; empty: neither, or it leads.
  std::string other_steps() const;
  // Of a leader by the store, which answers and has shown no sign of it for too long: for how long; 0: it has, or this
  // one leads.
  Duration no_sign_for(TimePoint now) const;
  // Of a leader whose store was set back, and has not taken yet what is to be in place of that; empty: it was not.
  const std::string& set_back_under_it() const { return set_back_; }
  std::uint64_t times_set_back() const { return times_set_back_; }
  const std::string& snapshot_failed() const { return snapshot_failed_; }  // why the last one is not in the store
  // All that the records lead to that have come out for the copy, with their number; nothing while more is decided than
  // is written, or not all is read.
  std::optional<proto::LogRecord> snapshot() const;
  // Of the leader's last write, and how many there were.
  struct Latency {
    Duration last{}, total{}, longest{};
    std::uint64_t count = 0;
    void add(Duration one) {
      last = one;
      total += one;
      longest = std::max(longest, one);
      ++count;
    }
  };
  const Latency& latency() const { return latency_; }
  std::uint64_t takeovers() const { return takeovers_; }  // by this process
  std::string of_another_job() const;  // a node that keeps to one, and what to look at; empty: there is none

 private:
  enum class Role : std::uint8_t {
    following,
    claiming,
    reading,  // what others have appended before its claim
    leading,
  };
  struct NodeView {
    std::optional<proto::FromNode> hello;
    std::optional<proto::LeaderView> view;
    TimePoint heard{}, settled{};  // last; from when on it is no longer what had been waiting on its way
    TimePoint stalled_since{};     // it says that the leader can't write
  };
  void on_view(NodeView& from, const proto::LeaderView& view);
  void submit(StoreRequest request, TimePoint now);
  void submit_again(TimePoint now);
  void read(bool recent, TimePoint now, bool verify = false);
  void on_unknown(const StoreRequest& request, const std::string& why);
  void on_answered(const StoreRequest& request, const StoreAnswer& answer);
  void on_read(const StoreRequest& request, const StoreAnswer& answer, TimePoint now);
  void on_compacted(const StoreRequest& request, const StoreAnswer& answer, TimePoint now);
  bool set_back(const StoreRequest& request, const StoreAnswer& answer, TimePoint now);
  bool is_of_another_job(const NodeView& of) const;
  std::string of_another_job(const NodeView& of) const;
  bool leads_still(const StoreAnswer& answer) const {
    return answer.leader_revision == token_ && answer.leader == leader_bytes_;
  }
  bool take_in(const StoreAnswer& answer);
  bool take_in(const proto::LogRecord& record);
  bool copy_fits(const StoreAnswer& answer);
  bool is_of_copy();
  bool is_of_own_job(std::uint64_t job);
  bool other_leads() const { return role_ == Role::following && leader_.instance() != 0 && !is_own(leader_); }
  bool is_own(const proto::Leader& leader) const { return leader.instance() == options_.instance; }
  void look_at_steps();
  void learn_of_leader(std::uint64_t revision, const std::string& leader, TimePoint now);
  void forget();
  struct Lost {
    std::uint64_t ranks = 0;  // of members, whose nodes say so
    bool by_somebody = false, somebody_hears = false;
  };
  Lost who_lost_the_leader(TimePoint now) const;
  std::optional<std::string> reason_to_claim(TimePoint now) const;
  void try_claim(TimePoint now, bool has_read_now = false);
  void read_for_lead(TimePoint now);
  void on_claim(const StoreRequest& request, const StoreAnswer& answer, TimePoint now);
  bool outranked() const { return leader_.instance() == options_.instance && heard_term_ > leader_.term(); }
  void lead(TimePoint now);
  void follow(const StoreAnswer& answer, TimePoint now);
  void give_up_the_lead();
  void enqueue(membership::Actions decided);
  void bound_queue();
  void write_next(TimePoint now);
  StoreRequest::Behind behind() const;
  void on_written(TimePoint now);
  void on_set_back(TimePoint now);
  void on_mended(const StoreRequest& request, const StoreAnswer& answer, TimePoint now);
  void release(std::size_t items);
  void look_at_stall(TimePoint now);
  Duration patience() const;
  void tell_who_leads(const std::vector<NodeId>& nodes);
  std::vector<NodeId> all_nodes() const;
  void look_at_versions();
  void fail_with(ErrorCode code, std::string why);
  Actions take() { return std::exchange(actions_, {}); }
  template <typename... Args>
  void note(bool warning, fmt::format_string<Args...> format, Args&&... args) {
    actions_.notes.push_back({fmt::format(format, std::forward<Args>(args)...), warning});
  }

  const Options options_;
  std::uint64_t ms_since_1970(TimePoint now) const;

  const TimePoint started_;
  Role role_ = Role::following;
  std::optional<Spoken> of_coordinators_;  // all of them, as far as nodes have said
  std::unique_ptr<Coordinator> machine_;
  std::uint64_t position_ = 0;  // of the first record that machine_ has not replayed, or the leader not written
  std::uint64_t copied_;        // of the first record that the copy lacks
  std::pair<std::uint64_t, std::string> landmark_;  // of the copy when it ended at such a record
  std::uint64_t last_entry_ = 0;                    // of those records, the first of the last entry
  std::uint64_t snapshot_revision_ = 0;             // of the snapshot that was there when it was read last
  bool has_read_ = false;                           // all that the store had, once
  std::optional<std::uint64_t> steps_at_start_;     // that were committed when this process had read all
  std::optional<std::uint64_t> steps_led_;          // those of the last other one that led, where it says them
  std::string steps_said_;                          // what was said of that last
  bool reads_recent_ = false;                       // the next time, not what was some time ago
  bool verifies_ = false;  // the read under way begins with what is known, to see whether it is there still
  std::optional<TimePoint> lacks_since_;  // since when it is not, before a claim
  proto::Leader leader_;
  std::string leader_bytes_;
  std::uint64_t leader_revision_ = 0, alive_revision_ = 0;
  std::uint64_t newest_revision_ = 0;         // of these, ever
  std::uint64_t job_ = 0;                     // of the log that is in the store, as it was last known
  std::uint64_t own_job_;                     // … of the copy or of this process: what it knows is never another's
  std::uint64_t heard_term_ = 0;              // the highest that a node has named
  std::optional<std::uint64_t> predecessor_;  // the instance that led when this process came, in its name and place
  TimePoint heard_at_{};                      // any node
  TimePoint answered_{};                      // the last request that was answered was made then
  TimePoint leader_since_{}, sign_at_{};      // since when it is known; when the store has shown a sign of it
  std::map<NodeId, NodeView> nodes_;
  PauseDetector pause_detector_;
  TimePoint now_{};

  std::optional<StoreRequest> under_way_, again_;  // the request without an answer; one to be repeated at the next tick
  TimePoint asked_at_{}, begun_at_{};              // the request under way: this try, and the first one
  std::optional<Failing> failing_;
  TimePoint write_failed_at_{};
  Seldom failing_said_, stall_said_, set_back_said_;  // lines in the log
  Duration claim_pause_{};                            // after the last claim, which has failed; 0: it has not
  TimePoint claim_again_{};                           // … until then
  std::uint64_t claim_reported_ = 0;                  // the term of the last claim
  Duration took_{};                                   // the last write, or claim

  // Of a leader:
  std::uint64_t token_ = 0;
  struct Decided {
    membership::Actions actions;
    std::size_t bytes = 0;  // of its records and messages
  };
  std::deque<Decided> queue_;                     // … and not confirmed yet
  std::set<NodeId> closing_;                      // nodes whose connections are to be closed by what is in it
  std::size_t queued_bytes_ = 0;                  // in it
  std::size_t confirming_ = 0;                    // of these, by the request under way
  std::uint64_t appending_ = 0;                   // records, in it
  std::optional<proto::LogRecord> due_;           // a snapshot for the position behind it
  std::uint64_t snapshot_at_ = 0, tried_at_ = 0;  // records that the last one stands for; … that was tried
  std::string snapshot_failed_, set_back_;
  bool set_back_told_ = false;
  std::uint64_t times_set_back_ = 0;
  TimePoint confirmed_at_{};
  bool suspects_itself_ = false;  // a node knows a higher term
  bool stalled_ = false;          // and has told
  bool stall_logged_ = false;
  bool gave_up_ = false;  // it has led, and may lead again at once
  bool waits_reported_ = false;
  bool told_of_another_job_ = false;
  Latency latency_;
  std::uint64_t takeovers_ = 0;
  Actions actions_;
};

}  // namespace rejoin::membership
