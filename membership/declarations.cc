#include "membership/declarations.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>
#include <span>
#include <tuple>

#include "base/fail.h"
#include "base/text.h"
#include "membership/declaration.h"
#include "membership/process.h"

namespace rejoin::membership {

namespace {

constexpr std::size_t kMostDeclarations = 16;  // remembered that nobody here has declared

std::string names(const std::vector<ReplicaId>& replicas) {
  return fmt::format("replica{} {}", replicas.size() == 1 ? "" : "s", fmt::join(replicas, ", "));
}

// Of a rank that is registered; null: it is not.
Declaration* declared(const ReplicaState& replica, std::size_t rank) {
  return rank < replica.ranks.size() && replica.ranks[rank].registered ? replica.ranks[rank].declaration : nullptr;
}

std::vector<ReplicaId> who_declared(const Declaration& declaration, std::uint32_t rank, const Replicas& replicas) {
  std::vector<ReplicaId> who;
  for (const auto& [id, replica] : replicas)
    if (declared(replica, rank) == &declaration) who.push_back(id);
  return who;
}

// The first rank for which both have declared something, and not the same.
std::optional<std::uint32_t> first_that_differs(const ReplicaState& one, const ReplicaState& other) {
  for (std::uint32_t rank = 0; rank < one.ranks.size(); ++rank) {
    const auto *const its = declared(one, rank), *const others = declared(other, rank);
    if (its != nullptr && others != nullptr && its != others) return rank;
  }
  return std::nullopt;
}

}  // namespace

FirstDeclared FirstDeclared::from(const proto::LogRecord::Declared& declared) {
  FirstDeclared first{ReplicaId(declared.replica()), {{declared.plan_hash(), declared.settings()}}};
  if (!declared.of_ranks().empty()) first.ranks.clear();
  for (const auto& one : declared.of_ranks()) first.ranks.push_back({one.plan_hash(), one.settings()});
  return first;
}

void FirstDeclared::to(proto::LogRecord::Declared& declared) const {
  declared.set_replica(replica.value);
  declared.set_plan_hash(ranks.front().plan_hash);
  declared.set_settings(ranks.front().settings);
  if (ranks.size() == 1) return;
  for (const auto& one : ranks) {
    auto& of_rank = *declared.add_of_ranks();
    of_rank.set_plan_hash(one.plan_hash);
    of_rank.set_settings(one.settings);
  }
}

// Where it matters which ones of a replica they are.
std::string Declarations::names(const std::vector<ReplicaId>& replicas, std::uint32_t rank) const {
  const std::string all = membership::names(replicas);
  return ranks_ == 1 ? all : fmt::format("rank {} of {}", rank, all);
}

Declaration& Declarations::of(const proto::RankUp& up) {
  const auto [found, fresh] = declarations_.try_emplace({up.plan_hash(), shortened(up.settings(), kLongestSettings)});
  if (fresh) std::tie(found->second.plan_hash, found->second.settings) = found->first;
  return found->second;
}

void Declarations::forget_unused(const Replicas& replicas) {
  if (declarations_.size() <= kMostDeclarations + ranks_) return;
  std::set<const Declaration*> used;
  for (const auto& [id, replica] : replicas)
    for (const auto& rank : replica.ranks) used.insert(rank.declaration);
  for (const auto& one : mismatches_) used.insert(one.declaration);
  std::erase_if(declarations_, [&](const auto& one) { return !used.contains(&one.second); });
}

// ---- who has registered with what

void Declarations::count(std::uint32_t rank, const Declaration* declaration, int change) {
  Having& having = having_[rank];
  if (having.ranks == 0) having.declaration = declaration;
  const std::pair key(rank, declaration);
  if (having.declaration == declaration) having.ranks += change;
  else if ((others_[key] += change) == 0) others_.erase(key);
  if (having.ranks > 0) return;
  const auto other = others_.lower_bound({rank, nullptr});
  if (other == others_.end() || other->first.first != rank) return;
  having = {other->first.second, other->second};
  others_.erase(other);
}

void Declarations::forget_vote_of(const ReplicaState& replica) {
  if (replica.registered == ranks_) vote_.reset();
}

void Declarations::registers(ReplicaState& replica, const proto::RankUp& up) {
  RankState& rank = replica.ranks[up.rank()];
  Declaration* const declaration = &of(up);
  if (rank.registered && rank.declaration == declaration) return;
  forget_vote_of(replica);
  if (rank.registered) count(up.rank(), rank.declaration, -1);
  else ++replica.registered;
  rank.registered = true;
  rank.declaration = declaration;
  count(up.rank(), declaration, +1);
  forget_vote_of(replica);
}

void Declarations::unregister(ReplicaState& replica, std::uint32_t rank) {
  if (!replica.ranks[rank].registered) return;
  forget_vote_of(replica);
  count(rank, replica.ranks[rank].declaration, -1);
  replica.ranks[rank].registered = false;
  --replica.registered;
}

void Declarations::unregister(ReplicaState& replica) {
  for (std::uint32_t rank = 0; rank < replica.ranks.size(); ++rank) unregister(replica, rank);
}

// ---- what binds

// Logs from before there were settings have none.
bool Declarations::fits(const Declaration& declaration, const FirstDeclared::OfRank& binding) {
  const std::string& settings = declaration.settings;
  return declaration.plan_hash == binding.plan_hash &&
         (settings == binding.settings || settings.empty() || binding.settings.empty());
}

bool Declarations::fits(const ReplicaState& replica, const FirstDeclared& binding) {
  for (std::uint32_t rank = 0; rank < replica.ranks.size(); ++rank)
    if (const auto* its = declared(replica, rank); its != nullptr && !fits(*its, binding.of(rank))) return false;
  return true;
}

FirstDeclared Declarations::declared_by(ReplicaId id, const ReplicaState& replica) {
  FirstDeclared first{id, {}};
  const bool alike = std::ranges::all_of(
      replica.ranks, [&](const RankState& rank) { return rank.declaration == replica.ranks.front().declaration; });
  for (const auto& rank : std::span(replica.ranks).first(alike ? 1 : replica.ranks.size()))
    first.ranks.push_back({rank.declaration->plan_hash, rank.declaration->settings});
  return first;
}

std::shared_ptr<const FirstDeclared> Declarations::binding(const Replicas& replicas, bool has_members) const {
  if (has_members) return first_;
  if (!vote_) vote_ = vote(replicas);
  return *vote_;
}

// By the majority vote of Boyer and Moore (1981): of all who have it only one can be left. It is counted then.
std::shared_ptr<const FirstDeclared> Declarations::vote(const Replicas& replicas) const {
  const auto votes = [&](const ReplicaState& replica) { return replica.registered == ranks_; };
  const Replicas::value_type* left = nullptr;
  std::uint32_t ahead = 0;
  for (const auto& one : replicas) {
    if (!votes(one.second)) continue;
    if (ahead == 0) left = &one;
    if (left == &one || !first_that_differs(left->second, one.second)) ++ahead;
    else --ahead;
  }
  if (left == nullptr) return nullptr;
  const auto count = std::ranges::count_if(
      replicas, [&](const auto& one) { return votes(one.second) && !first_that_differs(left->second, one.second); });
  if (2 * static_cast<std::uint64_t>(count) <= replicas_) return nullptr;
  return std::make_shared<const FirstDeclared>(declared_by(left->first, left->second));
}

Declaration* Declarations::behind(const FirstDeclared::OfRank& binding) {
  Declaration* right = nullptr;
  for (auto& [key, declaration] : declarations_)
    if (fits(declaration, binding) && (right == nullptr || declaration.content)) right = &declaration;
  return right;
}

// ---- what is behind a hash

std::optional<Declarations::Question> Declarations::question(Declaration& declaration, const Replicas& replicas,
                                                             TimePoint now) {
  if (declaration.content || (declaration.asked_at != TimePoint{} && now - declaration.asked_at < silence_ / 8))
    return std::nullopt;
  const auto ask = [&](NodeId node, std::uint32_t replica, std::uint32_t rank, std::uint64_t instance) {
    declaration.asked_at = now;
    return Question{node, replica, rank, instance};
  };
  for (const auto& one : mismatches_)
    if (one.declaration == &declaration) return ask(one.node, one.up.replica(), one.up.rank(), one.up.instance());
  for (const auto& [id, replica] : replicas)
    for (std::uint32_t number = 0; number < replica.ranks.size(); ++number)
      if (const RankState& rank = replica.ranks[number];
          declared(replica, number) == &declaration && rank.connected_node)
        return ask(rank.node, id.value, number, rank.instance);
  declaration.asked_at = now;  // nobody who has declared it is there
  return std::nullopt;
}

bool Declarations::on_content(const proto::Declaration& content, Declaration* registered) {
  Declaration* declaration = registered;
  for (const auto& one : mismatches_)
    if (same_process(one.up, content)) declaration = one.declaration;
  if (declaration == nullptr) return false;
  declaration->content = content;
  return true;
}

// ---- replicas that differ, and no majority

Declarations::Dissent Declarations::without_majority(const Replicas& replicas, TimePoint now) {
  Dissent result;
  if (!dissent()) {
    dissent_since_.reset();
    return result;
  }
  if (!dissent_since_) dissent_since_ = now;
  const auto ask_for = [&](Declaration& declaration) {
    if (const auto asked = question(declaration, replicas, now)) result.questions.push_back(*asked);
  };
  bool known = true;
  for (const auto& [id, replica] : replicas)
    for (std::size_t rank = 0; rank < replica.ranks.size(); ++rank)
      if (auto* its = declared(replica, rank); its != nullptr) {
        ask_for(*its);
        known = known && its->content;
      }
  if (known || now - *dissent_since_ >= silence_ / 2) result.lines = dissent_lines(replicas);
  return result;
}

std::vector<std::string> Declarations::dissent_lines(const Replicas& replicas) const {
  std::vector<std::string> lines;
  std::vector<std::pair<ReplicaId, Declaration*>> first(ranks_);  // of each number
  std::set<std::pair<std::size_t, const Declaration*>> told;
  for (const auto& [id, replica] : replicas)
    for (std::uint32_t rank = 0; rank < replica.ranks.size(); ++rank) {
      Declaration* its = declared(replica, rank);
      if (its == nullptr) continue;
      auto& [first_id, common] = first[rank];
      if (common == nullptr) first[rank] = {id, its};
      if (its == common) continue;
      if (!told.insert({rank, its}).second) break;
      const auto others = who_declared(*its, rank, replicas);
      const FirstDeclared as_first{first_id, {{common->plan_hash, common->settings}}};
      lines.push_back(
          fmt::format("{} and {}: they declare different things, and more than half of the job's {} replicas must "
                      "declare the same: of {}, {}",
                      membership::names(who_declared(*common, rank, replicas)), membership::names(others), replicas_,
                      names(others, rank), difference(*its, rank, common, as_first, replicas)));
      break;  // one rank's is enough to look for
    }
  return lines;
}

// ---- who differs from what binds

std::vector<std::uint64_t> Declarations::turn_out_mismatches(Replicas& replicas, const FirstDeclared& binding,
                                                             TimePoint now) {
  std::vector<std::uint64_t> gone;
  for (auto& [id, replica] : replicas) {
    if (fits(replica, binding)) continue;
    gone.push_back(replica.incarnation.value);
    for (std::uint32_t number = 0; number < replica.ranks.size(); ++number) {
      const RankState& rank = replica.ranks[number];
      if (!rank.registered || fits(*rank.declaration, binding.of(number))) continue;
      unregister(replica, number);
      if (!rank.connected_node) continue;
      auto& one = mismatches_.emplace_back(
          Mismatch{.node = rank.node, .up = {}, .declaration = rank.declaration, .since = now, .was_registered = true});
      one.up.set_replica(id.value);
      one.up.set_rank(number);
      one.up.set_instance(rank.instance);
    }
  }
  std::erase_if(replicas, [](const auto& one) { return one.second.registered == 0; });
  return gone;
}

bool Declarations::too_many_for(const proto::RankUp& up) const { return too_many(mismatches_, up); }

Declarations::Fate Declarations::fate_of(const Mismatch& mismatch, const FirstDeclared::OfRank& binding,
                                         const Declaration* right, TimePoint now) const {
  const Declaration& its = *mismatch.declaration;
  if (fits(its, binding) && !mismatch.was_registered) return Fate::registers;  // others have come, and gone
  const bool known = its.content && (right == nullptr || right->content);
  const bool only_settings = its.plan_hash == binding.plan_hash;
  return known || only_settings || now - mismatch.since >= silence_ / 2 ? Fate::refused : Fate::waits;
}

std::string Declarations::difference(const Declaration& declaration, std::uint32_t rank, const Declaration* right,
                                     const FirstDeclared& binding, const Replicas& replicas) const {
  auto replicas_with_it = right != nullptr ? who_declared(*right, rank, replicas) : std::vector<ReplicaId>{};
  if (replicas_with_it.empty()) replicas_with_it.push_back(binding.replica);
  const std::string who = names(replicas_with_it, rank);
  const auto& right_one = binding.of(rank);
  if (declaration.plan_hash == right_one.plan_hash)
    return fmt::format("it all-reduces over {}, and {} over {}; give all replicas the same", declaration.settings, who,
                       right_one.settings);
  std::string tensor, fingerprint;
  if (declaration.content && right != nullptr && right->content) {
    tensor = first_difference(*declaration.content, *right->content);
    fingerprint = fingerprint_difference(*declaration.content, *right->content);
  }
  if (tensor.empty() && !fingerprint.empty())
    return fmt::format("its fingerprint is not that of {}: {}; all replicas must have the same", who, fingerprint);
  return fmt::format(
      "its tensors or buckets differ from those of {}: {}; all replicas must declare the same state and plan", who,
      tensor.empty() ? "where, is not known here" : tensor);
}

void Declarations::note_refused(const proto::RankUp& up, const std::string& why) {
  refused_.try_emplace(ReplicaId(up.replica()), up.rank(), why);
}

void Declarations::forget_refused(const proto::RankUp& up) {
  const auto found = refused_.find(ReplicaId(up.replica()));
  if (found != refused_.end() && found->second.first == up.rank()) refused_.erase(found);
}

}  // namespace rejoin::membership
