// How a job starts, and starts again when nobody is left who holds its state.
#include <algorithm>
#include <array>

#include "base/deadlines.h"
#include "base/digest.h"
#include "base/fail.h"
#include "base/text.h"
#include "membership/coordinator.h"

namespace rejoin::membership {

namespace {

// Which of its ranks came with which, the oldest states first, of as many as can be read.
std::string text_of_mixed(ReplicaId id, const ReplicaState& replica) {
  constexpr std::size_t most = 4;
  std::map<std::uint64_t, RankSet> by_version;
  for (std::uint32_t rank = 0; rank < replica.ranks.size(); ++rank)
    by_version[replica.ranks[rank].version].add(RankSet(rank));
  std::string who;
  for (std::size_t told = 0; const auto& [version, ranks] : by_version) {
    if (told++ == most) {
      who += ", …";
      break;
    }
    who += fmt::format("{}rank{} {} with {}", who.empty() ? "" : ", ", ranks.size() == 1 ? "" : "s",
                       shortened(ranks.text(), 80), version == 0 ? "none" : fmt::format("that of step {}", version));
  }
  return fmt::format(
      "replica {}: its ranks came with the states of steps {} to {} ({}); all ranks of a replica must start from one "
      "checkpoint",
      id, by_version.begin()->first, by_version.rbegin()->first, who);
}

// Short, however many gaps there are.
std::string text_of(const Samples& samples) {
  constexpr std::size_t most = 4;
  const auto& ranges = samples.ranges();
  if (ranges.empty()) return "none";
  if (ranges.size() <= most) return samples.text();
  return fmt::format("{} of those below {}", samples.size(), ranges.back().second);
}

// One that may take over would take what one rank declares for what all do.
bool has_stages_too_early(const ReplicaState& replica, std::optional<Spoken> of_coordinators) {
  return !of_coordinators.value_or(Spoken()).may(Feature::stages) &&
         Declarations::declared_by({}, replica).ranks.size() > 1;
}

}  // namespace

// Nobody contributes: a fresh job, or everybody was lost. It goes on from the most advanced state there is, but below
// the last committed step only if an operator says so.
void Coordinator::try_start() {
  if (pause_detector_.just_paused(now_)) return;  // those who are waited for may have come: the next ticks read on
  wants_roll_back_.reset();
  std::erase_if(strangers_,
                [&](const auto& one) { return one.second.lost_at && now_ - *one.second.lost_at > start_patience(); });
  if (has_contributors() || finished() || (recovering_until_ && !members_.empty())) return;
  if (!strangers().empty()) return incomplete_since_.reset();
  const auto ready = ready_to_start();
  if (ready.empty()) return;
  const auto from = newest(ready);
  if (send_back_mixed(ready, from)) return;
  for (auto& why : unfit(ready)) warn_once(std::move(why));
  if (!from || has_stages_too_early(replicas_.at(ready.front()), of_coordinators_)) return;
  if (*from < committed_) {
    if (!may_roll_back() || *from < roll_back_to_->to) {
      wants_roll_back_ = from;
      return warn_once(rollback_needed(*from));
    }
  }
  start_with(ready, *from);
}

// Processes of another job that have places which nobody of this one has taken: most likely it is the log that is the
// wrong one, and they have their job's state.
std::vector<std::string> Coordinator::strangers() const {
  std::vector<std::string> all;
  for (const auto& [place, stranger] : strangers_)
    if (registered_at(place) == nullptr) all.push_back(stranger.what);
  return all;
}

// Null also where this job has no such place, and another one has.
const RankState* Coordinator::registered_at(const RankPlace& place) const {
  const auto found = replicas_.find(place.replica);
  if (found == replicas_.end() || place.rank.value >= found->second.ranks.size()) return nullptr;
  const RankState& there = found->second.ranks[place.rank.value];
  return there.registered ? &there : nullptr;
}

// Each job counts its epochs and incarnations from 1: what they report must not be taken for what this job's ranks do.
bool Coordinator::is_of_strangers(NodeId node, std::uint32_t replica, const RankSet& ranks) const {
  return std::ranges::any_of(strangers_, [&](const auto& one) {
    const auto& [place, stranger] = one;
    if (stranger.node != node || place.replica.value != replica || !ranks.contains(place.rank.value)) return false;
    const RankState* here = registered_at(place);
    return here == nullptr || here->node != node;
  });
}

// All that are configured; of a job that had started before also fewer, when the others have not come for long.
std::vector<ReplicaId> Coordinator::ready_to_start() {
  // Asked with each report that a replica is connected with some: of a large job most come while others have yet to.
  if (!started() && replicas_.size() + declarations_.refused().size() < config_.replicas) {
    incomplete_since_.reset();
    return {};
  }
  std::vector<ReplicaId> there;
  for (const auto& [id, replica] : replicas_)
    if (present(id, replica.incarnation)) there.push_back(id);
  if (declarations_.dissent()) return {};
  // Who was refused for what it declares may come back right, and catch up; a majority does not wait for that.
  if (there.size() + declarations_.refused().size() < config_.replicas || 2 * there.size() <= config_.replicas) {
    if (!started() || there.empty()) {
      incomplete_since_.reset();
      return {};
    }
    if (!incomplete_since_) incomplete_since_ = now_;
    if (now_ - *incomplete_since_ < start_patience()) return {};
  }
  if (const auto lacks = not_linked(there)) return not_linked_ = *lacks, std::vector<ReplicaId>{};
  return there;
}

Duration Coordinator::start_patience() const {
  return config_.start_patience > Duration{} ? config_.start_patience : deadlines::kStartPatience.of(config_.silence);
}

// The lowest and the highest version that its ranks have come with.
std::pair<Step, Step> Coordinator::versions(const ReplicaState& replica) {
  const auto [low, high] =
      std::minmax_element(replica.ranks.begin(), replica.ranks.end(),
                          [](const RankState& a, const RankState& b) { return a.version < b.version; });
  return {Step(low->version), Step(high->version)};
}

// A step that this job has not committed: it was rolled back, the log is an older copy, or the state is another job's.
// A job that has committed nothing may go on from any.
bool Coordinator::foreign(Step version) const {
  return version > committed_ && (committed_ != Step{} || steps_rolled_back_ > 0);
}

// Its checkpoint is of a step that the log knows, and says that other samples were trained up to there.
bool Coordinator::of_other_samples(const ReplicaState& replica) const {
  const auto& first = replica.ranks.front();
  const auto trained = ledger_.trained_at(Step(first.version));
  return trained && *trained != brought_.at(first.trained);
}

// What a checkpoint says of the samples must be true of the job that goes on from it. While somebody contributes it
// does not matter: whoever comes then gets the state from him.
std::optional<std::string> Coordinator::contradicted(const proto::RankUp& up) const {
  const Samples trained(up.trained(), kMostSamples);
  if (up.version() > 0 && trained.empty())
    return fmt::format(
        "it comes with the state of step {} and does not say which samples are trained: save Session::position() with "
        "each checkpoint, and give it to join()",
        up.version());
  if (up.version() == 0 && !trained.empty())
    return fmt::format("it comes with the state of step 0 and says that samples {} are trained", text_of(trained));
  if (has_contributors()) return std::nullopt;
  if (const auto known = ledger_.trained_at(Step(up.version()))) {
    if (*known == trained) return std::nullopt;
    return fmt::format(
        "its checkpoint of step {} says that samples {} are trained, and by this coordinator's log {} are: it is "
        "another job's checkpoint. Bring one of this job, or start the coordinator with a new --log-directory to go on "
        "from this one",
        up.version(), text_of(trained), text_of(*known));
  }
  for (const auto& [id, replica] : replicas_)
    for (std::uint32_t number = 0; number < replica.ranks.size(); ++number) {
      const RankState& rank = replica.ranks[number];
      const bool replaced = id.value == up.replica() && number == up.rank();
      if (replaced || !rank.registered || rank.version != up.version()) continue;
      const Samples& others = brought_.at(rank.trained);
      if (others == trained) return std::nullopt;  // and what the others bring has been compared with that
      return fmt::format(
          "its checkpoint of step {} says that samples {} are trained, and that of replica {} rank {}, which came "
          "first, says {}: start all ranks of all replicas from one checkpoint",
          up.version(), text_of(trained), id, number, text_of(others));
    }
  return std::nullopt;
}

// What no rank refers to any more is forgotten with it.
std::uint64_t Coordinator::keep_brought(const Samples& trained) {
  std::uint64_t name = 0;
  for (const auto& [begin, end] : trained.ranges()) name = combine_digests(combine_digests(name, begin), end);
  if (brought_.contains(name)) return name;
  std::set<std::uint64_t> needed;
  for (const auto& [id, replica] : replicas_)
    for (const auto& rank : replica.ranks) needed.insert(rank.trained);
  std::erase_if(brought_, [&](const auto& one) { return !needed.contains(one.first); });
  brought_.emplace(name, trained);
  return name;
}

// Whether what all of its ranks have come with says that the same samples are trained.
bool Coordinator::of_one_position(const ReplicaState& replica) {
  return std::ranges::all_of(replica.ranks,
                             [&](const auto& rank) { return rank.trained == replica.ranks.front().trained; });
}

// The version of the most advanced of those that have the state of one step of this job on all of their ranks.
std::optional<Step> Coordinator::newest(const std::vector<ReplicaId>& replicas) const {
  std::optional<Step> newest;
  for (auto id : replicas)
    if (const auto [low, high] = versions(replicas_.at(id));
        low == high && !foreign(low) && of_one_position(replicas_.at(id)) && !of_other_samples(replicas_.at(id)))
      newest = std::max(newest.value_or(low), low);
  return newest;
}

// Ranks that started one by one may have found different checkpoints, when the later one was just being completed: such
// a state is of no step. If it would be more advanced than that of everybody else, then its ranks start once more. Who
// comes with the same again has no other: the status names it.
bool Coordinator::send_back_mixed(const std::vector<ReplicaId>& replicas, std::optional<Step> newest) {
  bool any = false;
  for (auto id : replicas) {
    const auto came = versions(replicas_.at(id));
    const auto [low, high] = came;
    if (low == high || foreign(low) || (newest && low <= *newest)) continue;
    auto [before, first] = sent_back_.try_emplace(id, came);
    if (!first && std::exchange(before->second, came) == came) continue;
    const std::string what = text_of_mixed(id, replicas_.at(id));
    warn("{}; it starts once more", what);
    drop_registration(id, what);
    any = true;
  }
  return any;
}

// Whose states the job can't go on from, whatever an operator allows, and why.
std::vector<std::string> Coordinator::unfit(const std::vector<ReplicaId>& replicas) const {
  std::vector<std::string> all;
  if (!replicas.empty() && has_stages_too_early(replicas_.at(replicas.front()), of_coordinators_))
    all.push_back(
        fmt::format("coordinators that all speak protocol {}: ranks of a replica declare different things, of which an "
                    "earlier release, which may take over, knows nothing. Upgrade all coordinators",
                    static_cast<std::uint32_t>(Feature::stages)));
  for (auto id : replicas)
    if (const auto [low, high] = versions(replicas_.at(id)); low != high)
      all.push_back(text_of_mixed(id, replicas_.at(id)));
    else if (foreign(low) && steps_rolled_back_ == 0)
      all.push_back(fmt::format(
          "replica {}: it has come with the state of step {}, and step {} is the last that is committed, and nothing "
          "was ever rolled back: the log is an older copy, or the state is another job's. Put the whole log back; or, "
          "to go on from step {}, start the coordinator with a new --log-directory, or all of several with a new "
          "--job; or, to give up what was trained since, bring a checkpoint of step {} or before",
          id, low, committed_, low, committed_));
    else if (foreign(low))
      all.push_back(
          fmt::format("replica {}: it has come with the state of step {}, and step {} is the last that is committed: "
                      "later ones were rolled back, or are another job's. Bring a checkpoint of step {} or before",
                      id, low, committed_, committed_));
    else if (of_other_samples(replicas_.at(id)))
      all.push_back(
          fmt::format("replica {}: its checkpoint of step {} says that other samples are trained than this job's log "
                      "does: it is another job's. Bring one of this job",
                      id, low));
  return all;
}

std::string Coordinator::rollback_needed(Step from) const {
  const bool of_another = config_.roll_back_to && config_.roll_back_to->to <= from && !may_roll_back();
  return fmt::format(
      "step {} is committed, and the most advanced state that has come is that of step {}: bring a later checkpoint, "
      "or start the coordinator, or all of several, with --roll-back-to {} to give up {} steps{}; if the job was to "
      "end there, end it",
      committed_, from, word_for(from).text(), committed_.value - from.value,
      of_another ? fmt::format(" (its --roll-back-to {} was for an earlier loss)", config_.roll_back_to->text()) : "");
}

// Which of them have the state of this step, and of those that do the one that most have.
std::vector<bool> Coordinator::fit_to_start(const std::vector<ReplicaId>& replicas, Step from) const {
  using Fingerprint = std::vector<std::array<std::uint64_t, 3>>;  // version, digest and samples of each rank
  const auto fingerprint = [&](ReplicaId id) {
    Fingerprint print;
    for (const auto& rank : replicas_.at(id).ranks) print.push_back({rank.version, rank.digest, rank.trained});
    return print;
  };
  std::map<Fingerprint, int> votes;
  for (auto id : replicas) {
    const auto print = fingerprint(id);
    const bool fit = of_one_position(replicas_.at(id)) && !of_other_samples(replicas_.at(id));
    if (fit && std::ranges::all_of(print, [&](const auto& p) { return p[0] == from.value; })) ++votes[print];
  }
  const auto chosen = std::max_element(votes.begin(), votes.end(), [](const auto& a, const auto& b) {
                        return a.second < b.second;
                      })->first;
  std::vector<bool> fit;
  for (auto id : replicas) fit.push_back(fingerprint(id) == chosen);
  return fit;
}

void Coordinator::start_with(const std::vector<ReplicaId>& replicas, Step from) {
  const auto fit = fit_to_start(replicas, from);
  std::vector<ReplicaId> contributors;
  for (std::size_t i = 0; i < replicas.size(); ++i)
    if (fit[i]) contributors.push_back(replicas[i]);
  if (committed_ != from) {
    proto::LogRecord record;
    record.mutable_rolled_back()->set_version(from.value);
    record.mutable_rolled_back()->set_from(committed_.value);
    const Samples& trained = brought_.at(replicas_.at(contributors.front()).ranks.front().trained);
    record.mutable_rolled_back()->set_in_order(true);
    if (!ledger_.trained_at(from)) trained.to(record.mutable_rolled_back()->mutable_trained());
    if (from < committed_) warn("the job goes on after step {}; step {} was committed", from, committed_);
    else
      note("the job goes on after step {}, from checkpoints that say that samples {} are trained", from,
           text_of(trained));
    actions_.append.push_back(record);
    REJOIN_CHECK(replay(record));
  }
  auto first = Declarations::declared_by(replicas.front(), replicas_.at(replicas.front()));
  if (first.ranks.size() > 1)
    actions_.append.emplace_back().mutable_needs()->set_protocol(static_cast<std::uint32_t>(Feature::stages));
  first.to(*actions_.append.emplace_back().mutable_declared());
  declarations_.set_first(std::move(first));
  incomplete_since_.reset();
  sent_back_.clear();
  (void)members_.take();
  for (std::size_t i = 0; i < replicas.size(); ++i)
    members_.add(
        {.replica = replicas[i], .incarnation = replicas_.at(replicas[i]).incarnation, .catching_up = !fit[i]});
  tell_who_differs(replicas, contributors);
  next_epoch("start", Begun::fresh);
}

}  // namespace rejoin::membership
