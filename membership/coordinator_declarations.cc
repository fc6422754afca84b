// What all replicas must declare alike: tensors, buckets, how they all-reduce. The job that runs has declared it;
// before, it is what the majority of the job's replicas declares. Who differs is refused, with the difference: the
// coordinator has hashes, and asks one rank of each declaration for what is behind its own.
#include <fmt/format.h>

#include <algorithm>

#include "base/text.h"
#include "membership/coordinator.h"
#include "membership/declaration.h"

namespace rejoin::membership {

namespace {

constexpr std::size_t kMostDeclarations = 16;  // remembered that nobody here has declared

std::string settings_of(const proto::RankUp& up) { return shortened(up.settings(), kLongestSettings); }

std::string names(const std::vector<ReplicaId>& replicas) {
  return fmt::format("replica{} {}", replicas.size() == 1 ? "" : "s", fmt::join(replicas, ", "));
}

}  // namespace

Coordinator::Declaration& Coordinator::declaration_of(const proto::RankUp& up) {
  const auto found = declarations_.try_emplace({up.plan_hash(), settings_of(up)}).first;
  found->second.key = &found->first;
  return found->second;
}

void Coordinator::forget_declarations() {
  if (declarations_.size() <= kMostDeclarations) return;
  std::set<const Declaration*> used;
  for (const auto& [id, replica] : replicas_) {
    used.insert(replica.declaration);
    for (const auto& rank : replica.ranks) used.insert(rank.declaration);
  }
  for (const auto& one : misfits_) used.insert(one.declaration);
  std::erase_if(declarations_, [&](const auto& one) { return !used.contains(&one.second); });
}

// Logs from before there were settings have none.
bool Coordinator::fits(const Declaration& declaration, const First& first) {
  const auto& [hash, settings] = *declaration.key;
  return hash == first.plan_hash && (settings == first.settings || settings.empty() || first.settings.empty());
}

// What binds everybody, if there is anything yet.
std::optional<Coordinator::First> Coordinator::decided() const {
  if (!members_.empty()) return first_;
  std::map<const Declaration*, std::uint32_t> votes;
  for (const auto& [id, replica] : replicas_)
    if (fully_registered(replica) && !replica.mixed && 2 * ++votes[replica.declaration] > config_.replicas)
      return First{id, replica.declaration->key->first, replica.declaration->key->second};
  return std::nullopt;
}

// Replicas that have registered differ.
bool Coordinator::dissent() const {
  if (declarations_.size() < 2) return false;
  const Declaration* common = nullptr;
  for (const auto& [id, replica] : replicas_) {
    if (replica.declaration == nullptr) continue;
    if (replica.mixed || (common != nullptr && replica.declaration != common)) return true;
    common = replica.declaration;
  }
  return false;
}

// Who differs does not register, but is refused as soon as it is known in what.
Screened Coordinator::screen_declaration(NodeId node, const proto::RankUp& up) {
  std::erase_if(misfits_, [&](const Differing& one) { return same_process(one.up, up); });
  Declaration& declaration = declaration_of(up);
  // In a log from before this was written down: that a member, who comes back, is right, and not somebody new.
  if (!first_ && !members_.empty()) {
    if (up.incarnation() == 0) return Screened::goes_on;
    first_ = {ReplicaId(up.replica()), up.plan_hash(), settings_of(up)};
  }
  const auto binding = decided();
  if (!binding || fits(declaration, *binding)) return Screened::goes_on;
  if (too_many(misfits_, up)) {
    refuse(node, up, refusals::Why::declaration,
           "it declares something else than the job's replicas, as others in its place do");
    return Screened::handled;
  }
  misfits_.push_back({.node = node, .up = up, .declaration = &declaration, .since = now_});
  settle_declarations();
  return Screened::handled;
}

void Coordinator::on_declaration(const proto::Declaration& declared) {
  Declaration* declaration = nullptr;
  if (const RankState* rank = rank_of(declared.replica(), declared.rank(), declared.instance()))
    declaration = rank->declaration;
  for (const auto& one : misfits_)
    if (same_process(one.up, declared)) declaration = one.declaration;
  if (declaration == nullptr) return;
  declaration->content = declared;
  settle_declarations();
}

// With each event that may have changed it, and each tick.
void Coordinator::settle_declarations() {
  announce_after_dissent();
  const auto binding = decided();
  if (!binding) return settle_without_majority();
  if (members_.empty() && dissent()) turn_out_those_who_differ(*binding);
  Declaration* right = nullptr;
  for (auto& [key, declaration] : declarations_)
    if (fits(declaration, *binding) && (right == nullptr || declaration.content)) right = &declaration;
  bool any = false;
  for (auto& one : std::exchange(misfits_, {})) {
    if (fits(*one.declaration, *binding) && !one.was_registered) {  // others have come, and gone
      on_rank_up(one.node, one.up);
      continue;
    }
    const bool known = one.declaration->content && (right == nullptr || right->content);
    const bool only_settings = one.declaration->key->first == binding->plan_hash;
    if (!known && !only_settings && now_ - one.since < config_.silence / 2) {
      Declaration& sent = *one.declaration;
      misfits_.push_back(std::move(one));
      ask_for(sent);
      if (right != nullptr) ask_for(*right);
      continue;
    }
    auto why = difference(*one.declaration, right, *binding);
    refused_.try_emplace(ReplicaId(one.up.replica()), one.up.rank(), why);
    refuse(one.node, one.up, refusals::Why::declaration, std::move(why));
    any = true;
  }
  if (any) try_start();
}

// Nothing binds anybody, so all may register. Of those who were turned out for a majority that is gone meanwhile it is
// not known any more what they have come with: they start again.
void Coordinator::settle_without_majority() {
  for (auto& one : std::exchange(misfits_, {}))
    if (one.was_registered)
      refuse(one.node, one.up, refusals::Why::declaration,
             "those who declared something else have gone: start it again");
    else on_rank_up(one.node, one.up);
  if (!dissent()) return dissent_since_.reset();
  if (!dissent_since_) dissent_since_ = now_;
  bool known = true;
  for (const auto& [id, replica] : replicas_) {
    if (!replica.mixed) {
      ask_for(*replica.declaration);
      known = known && replica.declaration->content;
    }
    for (std::uint32_t number = 0; replica.mixed && number < replica.ranks.size(); ++number)
      if (replica.ranks[number].registered) ask_for(*replica.ranks[number].declaration);
  }
  if (!known && now_ - *dissent_since_ < config_.silence / 2) return;  // in what they differ is being asked
  for (auto& line : dissent_lines()) warn_once(std::move(line));
}

// Who registered meanwhile could not connect with the others.
void Coordinator::announce_after_dissent() {
  if (!unannounced_ || dissent()) return;
  end_recovery_if_all_are_back();
  if (recovering_until_) return;
  unannounced_ = false;
  announce_all();
}

// A majority is there: the others register no longer. Their ranks hear why when that is known.
void Coordinator::turn_out_those_who_differ(const First& binding) {
  std::vector<std::uint64_t> gone;
  for (auto& [id, replica] : replicas_) {
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
      auto& one =
          misfits_.emplace_back(Differing{.node = rank.node, .up = {}, .declaration = rank.declaration, .since = now_});
      one.up.set_replica(id.value);
      one.up.set_rank(number);
      one.up.set_instance(rank.instance);
      one.was_registered = true;
    }
  }
  std::erase_if(replicas_, [](const auto& one) { return one.second.registered == 0; });
  proto::ToNode message;
  message.mutable_peers()->mutable_gone()->Assign(gone.begin(), gone.end());
  send_all(std::move(message));
  unannounced_ = true;
  announce_after_dissent();
}

// One who has declared that declaration, and is there, says it in full.
void Coordinator::ask_for(Declaration& declaration) {
  if (declaration.content || (declaration.asked_at != TimePoint{} && now_ - declaration.asked_at < config_.silence / 8))
    return;
  const auto ask = [&](NodeId node, std::uint32_t replica, std::uint32_t rank, std::uint64_t instance) {
    declaration.asked_at = now_;
    proto::ToNode message;
    message.mutable_declare()->set_replica(replica);
    message.mutable_declare()->set_rank(rank);
    message.mutable_declare()->set_instance(instance);
    send(node, std::move(message));
  };
  for (const auto& one : misfits_)
    if (one.declaration == &declaration) return ask(one.node, one.up.replica(), one.up.rank(), one.up.instance());
  for (const auto& [id, replica] : replicas_) {
    if (replica.declaration != &declaration && !replica.mixed) continue;
    for (std::uint32_t number = 0; number < replica.ranks.size(); ++number)
      if (const RankState& rank = replica.ranks[number];
          rank.declaration == &declaration && rank.registered && rank.connected_node)
        return ask(rank.node, id.value, number, rank.instance);
  }
}

std::vector<ReplicaId> Coordinator::who_declared(const Declaration& declaration) const {
  std::vector<ReplicaId> who;
  for (const auto& [id, replica] : replicas_)
    if (replica.declaration == &declaration && !replica.mixed) who.push_back(id);
  return who;
}

// `right`: what is behind `binding`, where somebody who has declared it was heard since this coordinator started.
std::string Coordinator::difference(const Declaration& declaration, const Declaration* right,
                                    const First& binding) const {
  auto who = right != nullptr ? who_declared(*right) : std::vector<ReplicaId>{};
  if (who.empty()) who.push_back(binding.replica);
  if (declaration.key->first == binding.plan_hash)
    return fmt::format("it all-reduces over {}, and {} over {}; give all replicas the same", declaration.key->second,
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
      "its tensors or buckets differ from those of {}: {}; all replicas must declare the same state and "
      "plan",
      names(who), tensor.empty() ? "where, is not known here" : tensor);
}

// Replicas differ, and there is no majority.
std::vector<std::string> Coordinator::dissent_lines() const {
  std::vector<std::string> lines;
  const ReplicaState* first = nullptr;
  for (const auto& [id, replica] : replicas_) {
    if (replica.mixed) {
      lines.push_back(fmt::format("replica {}: its own ranks differ in tensors, buckets or how they all-reduce", id));
    } else if (first == nullptr) {
      first = &replica;
    } else if (replica.declaration != first->declaration && who_declared(*replica.declaration).front() == id) {
      const auto& [hash, settings] = *first->declaration->key;
      lines.push_back(
          fmt::format("{} and {}: they declare different things, and more than half of the job's {} replicas must "
                      "declare the same: of {}, {}",
                      names(who_declared(*first->declaration)), names(who_declared(*replica.declaration)),
                      config_.replicas, names(who_declared(*replica.declaration)),
                      difference(*replica.declaration, first->declaration, {ReplicaId{}, hash, settings})));
    }
  }
  return lines;
}

}  // namespace rejoin::membership
