// What replicas declare, and who differs. The ranks of one number must declare alike in all of them: tensors, buckets,
// how they all-reduce; those of a replica may differ from each other, as the stages of a pipeline do. The job that runs
// has declared it; before, it is what the majority of its replicas declares. The coordinator has hashes, and asks one
// rank of each declaration for what is behind its own, so that who differs is refused with the difference. This class
// remembers and compares, and says what is to be done: it is the coordinator that asks, refuses and registers.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "membership/replica_state.h"

namespace rejoin::membership {

// A process that has declared something else than what binds the job. It is refused when the difference is known.
struct Mismatch {
  NodeId node;
  proto::RankUp up;
  Declaration* declaration = nullptr;
  TimePoint since{};
  bool was_registered = false;  // before there was a majority: of `up` only its place and instance are known
};

class Declarations {
 public:
  Declarations(std::uint32_t replicas, std::uint32_t ranks, Duration silence)
      : replicas_(replicas), ranks_(ranks), silence_(silence), having_(ranks) {}

  // The one that ranks which say the same share. It stays where it is until forget_unused() finds nobody who has it.
  Declaration& of(const proto::RankUp& up);
  void forget_unused(const Replicas& replicas);  // when there are many

  // A rank registers, at first or again, with what it declares; it is registered no longer; none of the replica's is.
  // Nothing else changes who has registered with what.
  void registers(ReplicaState& replica, const proto::RankUp& up);
  void unregister(ReplicaState& replica, std::uint32_t rank);
  void unregister(ReplicaState& replica);

  // What the members have declared, by the log, or null.
  const std::shared_ptr<const FirstDeclared>& first() const { return first_; }
  void set_first(FirstDeclared first) { first_ = std::make_shared<const FirstDeclared>(std::move(first)); }
  // What binds everybody: that, where there are members, or what a majority declares. Null: nothing does.
  std::shared_ptr<const FirstDeclared> binding(const Replicas& replicas, bool has_members) const;
  static bool fits(const Declaration& declaration, const FirstDeclared::OfRank& binding);
  static bool fits(const ReplicaState& replica, const FirstDeclared& binding);  // all ranks that have registered
  static FirstDeclared declared_by(ReplicaId id, const ReplicaState& replica);  // of which all have
  // One that fits, if possible one of which it is known what is behind it. Nothing: nobody here has declared it.
  Declaration* behind(const FirstDeclared::OfRank& binding);

  // Ranks of one number that have registered differ.
  bool dissent() const { return !others_.empty(); }
  // A line for each way in which they do.
  std::vector<std::string> dissent_lines(const Replicas& replicas) const;

  // A rank that is to say in full what it has declared.
  struct Question {
    NodeId node;
    std::uint32_t replica = 0, rank = 0;
    std::uint64_t instance = 0;
  };
  // Nothing: it is known, was asked for a moment ago, or nobody who has declared it is there, which is asked as rarely.
  std::optional<Question> question(Declaration& declaration, const Replicas& replicas, TimePoint now);
  // The answer. False: of a process that has declared nothing here. `registered`: what it has, where it is registered.
  bool on_content(const proto::Declaration& content, Declaration* registered);

  // There is no majority: whom to ask, and, when it is known in what they differ or has been asked for long, what to
  // say.
  struct Dissent {
    std::vector<Question> questions;
    std::vector<std::string> lines;
  };
  Dissent without_majority(const Replicas& replicas, TimePoint now);

  // A majority is there. The replicas that differ are registered no longer, and their ranks are mismatches. Returns the
  // incarnations of those replicas.
  std::vector<std::uint64_t> turn_out_mismatches(Replicas& replicas, const FirstDeclared& binding, TimePoint now);

  void add(Mismatch mismatch) { mismatches_.push_back(std::move(mismatch)); }
  bool too_many_for(const proto::RankUp& up) const;  // in its place
  std::vector<Mismatch> take_mismatches() { return std::exchange(mismatches_, {}); }
  void forget_if(const auto& is_it) { std::erase_if(mismatches_, is_it); }
  enum class Fate { registers, waits, refused };
  Fate fate_of(const Mismatch& mismatch, const FirstDeclared::OfRank& binding, const Declaration* right,
               TimePoint now) const;
  // In what a rank's differs, in words. `right`: what is behind its `binding`, where somebody here has declared it.
  std::string difference(const Declaration& declaration, std::uint32_t rank, const Declaration* right,
                         const FirstDeclared& binding, const Replicas& replicas) const;

  // Ranks that were refused, one of a replica, with the reason, until they come back otherwise.
  using Refused = std::map<ReplicaId, std::pair<std::uint32_t, std::string>>;
  const Refused& refused() const { return refused_; }
  void note_refused(const proto::RankUp& up, const std::string& why);
  void forget_refused(const proto::RankUp& up);

 private:
  std::string names(const std::vector<ReplicaId>& replicas, std::uint32_t rank) const;
  void count(std::uint32_t rank, const Declaration* declaration, int change);
  void forget_vote_of(const ReplicaState& replica);
  std::shared_ptr<const FirstDeclared> vote(const Replicas& replicas) const;

  std::uint32_t replicas_, ranks_;
  Duration silence_;
  std::map<std::pair<std::uint64_t, std::string>, Declaration> declarations_;  // by hash and settings
  struct Having {
    const Declaration* declaration = nullptr;
    std::uint32_t ranks = 0;  // that are registered with it
  };
  std::vector<Having> having_;                                                    // one of what those of a number have
  std::map<std::pair<std::uint32_t, const Declaration*>, std::uint32_t> others_;  // the others, where they differ
  std::shared_ptr<const FirstDeclared> first_;
  mutable std::optional<std::shared_ptr<const FirstDeclared>> vote_;  // nothing: it is to be counted
  std::vector<Mismatch> mismatches_;
  Refused refused_;
  std::optional<TimePoint> dissent_since_;
};

}  // namespace rejoin::membership
