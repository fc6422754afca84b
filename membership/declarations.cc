#include "membership/declarations.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>
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

std::vector<ReplicaId> who_declared(const Declaration& declaration, const Replicas& replicas) {
  std::vector<ReplicaId> who;
  for (const auto& [id, replica] : replicas)
    if (replica.declaration == &declaration && !replica.mixed) who.push_back(id);
  return who;
}

}  // namespace

Declaration& Declarations::of(const proto::RankUp& up) {
  const auto [found, fresh] = declarations_.try_emplace({up.plan_hash(), shortened(up.settings(), kLongestSettings)});
  if (fresh) std::tie(found->second.plan_hash, found->second.settings) = found->first;
  return found->second;
}

void Declarations::forget_unused(const Replicas& replicas) {
  if (declarations_.size() <= kMostDeclarations) return;
  std::set<const Declaration*> used;
  for (const auto& [id, replica] : replicas) {
    used.insert(replica.declaration);
    for (const auto& rank : replica.ranks) used.insert(rank.declaration);
  }
  for (const auto& one : mismatches_) used.insert(one.declaration);
  std::erase_if(declarations_, [&](const auto& one) { return !used.contains(&one.second); });
}

// ---- what binds

// Logs from before there were settings have none.
bool Declarations::fits(const Declaration& declaration, const FirstDeclared& binding) {
  const std::string& settings = declaration.settings;
  return declaration.plan_hash == binding.plan_hash &&
         (settings == binding.settings || settings.empty() || binding.settings.empty());
}

std::optional<FirstDeclared> Declarations::binding(const Replicas& replicas, bool has_members) const {
  if (has_members) return first_;
  std::map<const Declaration*, std::uint32_t> votes;
  for (const auto& [id, replica] : replicas)
    if (replica.registered == ranks_ && !replica.mixed && 2 * ++votes[replica.declaration] > replicas_)
      return FirstDeclared{id, replica.declaration->plan_hash, replica.declaration->settings};
  return std::nullopt;
}

Declaration* Declarations::behind(const FirstDeclared& binding) {
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
  for (const auto& [id, replica] : replicas) {
    if (replica.declaration != &declaration && !replica.mixed) continue;
    for (std::uint32_t number = 0; number < replica.ranks.size(); ++number)
      if (const RankState& rank = replica.ranks[number];
          rank.declaration == &declaration && rank.registered && rank.connected_node)
        return ask(rank.node, id.value, number, rank.instance);
  }
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

bool Declarations::dissent(const Replicas& replicas) const {
  if (declarations_.size() < 2) return false;
  const Declaration* common = nullptr;
  for (const auto& [id, replica] : replicas) {
    if (replica.declaration == nullptr) continue;
    if (replica.mixed || (common != nullptr && replica.declaration != common)) return true;
    common = replica.declaration;
  }
  return false;
}

Declarations::Dissent Declarations::without_majority(const Replicas& replicas, TimePoint now) {
  Dissent result;
  if (!dissent(replicas)) {
    dissent_since_.reset();
    return result;
  }
  if (!dissent_since_) dissent_since_ = now;
  const auto ask_for = [&](Declaration& declaration) {
    if (const auto asked = question(declaration, replicas, now)) result.questions.push_back(*asked);
  };
  bool known = true;
  for (const auto& [id, replica] : replicas) {
    if (!replica.mixed) {
      ask_for(*replica.declaration);
      known = known && replica.declaration->content;
    }
    for (std::uint32_t number = 0; replica.mixed && number < replica.ranks.size(); ++number)
      if (replica.ranks[number].registered) ask_for(*replica.ranks[number].declaration);
  }
  if (known || now - *dissent_since_ >= silence_ / 2) result.lines = dissent_lines(replicas);
  return result;
}

std::vector<std::string> Declarations::dissent_lines(const Replicas& replicas) const {
  std::vector<std::string> lines;
  const ReplicaState* first = nullptr;
  for (const auto& [id, replica] : replicas) {
    if (replica.mixed) {
      lines.push_back(fmt::format("replica {}: its own ranks differ in tensors, buckets or how they all-reduce", id));
    } else if (first == nullptr) {
      first = &replica;
    } else if (replica.declaration != first->declaration &&
               who_declared(*replica.declaration, replicas).front() == id) {
      const std::string its = names(who_declared(*replica.declaration, replicas));
      const FirstDeclared as_first{ReplicaId{}, first->declaration->plan_hash, first->declaration->settings};
      lines.push_back(
          fmt::format("{} and {}: they declare different things, and more than half of the job's {} replicas must "
                      "declare the same: of {}, {}",
                      names(who_declared(*first->declaration, replicas)), its, replicas_, its,
                      difference(*replica.declaration, first->declaration, as_first, replicas)));
    }
  }
  return lines;
}

// ---- who differs from what binds

std::vector<std::uint64_t> Declarations::turn_out_mismatches(Replicas& replicas, const FirstDeclared& binding,
                                                             TimePoint now) {
  std::vector<std::uint64_t> gone;
  for (auto& [id, replica] : replicas) {
    if (!replica.mixed && (replica.declaration == nullptr || fits(*replica.declaration, binding))) continue;
    gone.push_back(replica.incarnation.value);
    replica.declaration = nullptr;
    replica.mixed = false;
    for (std::uint32_t number = 0; number < replica.ranks.size(); ++number) {
      RankState& rank = replica.ranks[number];
      if (!rank.registered) continue;
      if (fits(*rank.declaration, binding)) {
        replica.declaration = rank.declaration;
        continue;
      }
      rank.registered = false;
      --replica.registered;
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

Declarations::Fate Declarations::fate_of(const Mismatch& mismatch, const FirstDeclared& binding,
                                         const Declaration* right, TimePoint now) const {
  const Declaration& its = *mismatch.declaration;
  if (fits(its, binding) && !mismatch.was_registered) return Fate::registers;  // others have come, and gone
  const bool known = its.content && (right == nullptr || right->content);
  const bool only_settings = its.plan_hash == binding.plan_hash;
  return known || only_settings || now - mismatch.since >= silence_ / 2 ? Fate::refused : Fate::waits;
}

std::string Declarations::difference(const Declaration& declaration, const Declaration* right,
                                     const FirstDeclared& binding, const Replicas& replicas) {
  auto who = right != nullptr ? who_declared(*right, replicas) : std::vector<ReplicaId>{};
  if (who.empty()) who.push_back(binding.replica);
  if (declaration.plan_hash == binding.plan_hash)
    return fmt::format("it all-reduces over {}, and {} over {}; give all replicas the same", declaration.settings,
                       names(who), binding.settings);
  std::string tensor, fingerprint;
  if (declaration.content && right != nullptr && right->content) {
    tensor = first_difference(*declaration.content, *right->content);
    fingerprint = fingerprint_difference(*declaration.content, *right->content);
  }
  if (tensor.empty() && !fingerprint.empty())
    return fmt::format("its fingerprint is not that of {}: {}; all replicas must have the same", names(who),
                       fingerprint);
  return fmt::format(
      "its tensors or buckets differ from those of {}: {}; all replicas must declare the same state and plan",
      names(who), tensor.empty() ? "where, is not known here" : tensor);
}

void Declarations::note_refused(const proto::RankUp& up, const std::string& why) {
  refused_.try_emplace(ReplicaId(up.replica()), up.rank(), why);
}

void Declarations::forget_refused(const proto::RankUp& up) {
  const auto found = refused_.find(ReplicaId(up.replica()));
  if (found != refused_.end() && found->second.first == up.rank()) refused_.erase(found);
}

}  // namespace rejoin::membership
