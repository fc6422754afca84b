// What all replicas must declare alike: tensors, buckets, how they all-reduce. The job that runs has declared it;
// before, it is what the majority of the job's replicas declares. Who differs is refused, with the difference: the
// coordinator has hashes, and asks one rank of each kind for what is behind its own.
#include <fmt/format.h>

#include <algorithm>

#include "membership/coordinator.h"
#include "membership/declaration.h"

namespace rejoin::membership {

namespace {

constexpr std::size_t kMostKinds = 16;  // remembered that nobody here has declared

std::string names(const std::vector<ReplicaId>& replicas) {
  return fmt::format("replica{} {}", replicas.size() == 1 ? "" : "s", fmt::join(replicas, ", "));
}

}  // namespace

Coordinator::Manner& Coordinator::manner_of(const proto::RankUp& up) {
  const auto found = kinds_.try_emplace({up.plan_hash(), up.settings()}).first;
  found->second.key = &found->first;
  return found->second;
}

void Coordinator::forget_manners() {
  if (kinds_.size() <= kMostKinds) return;
  std::set<const Manner*> used;
  for (const auto& [id, replica] : replicas_) {
    used.insert(replica.kind);
    for (const auto& rank : replica.ranks) used.insert(rank.kind);
  }
  for (const auto& one : misfits_) used.insert(one.kind);
  std::erase_if(kinds_, [&](const auto& one) { return !used.contains(&one.second); });
}

// Logs from before there were settings have none.
bool Coordinator::fits(const Manner& kind, const First& first) {
  const auto& [hash, settings] = *kind.key;
  return hash == first.plan_hash && (settings == first.settings || settings.empty() || first.settings.empty());
}

// What binds everybody, if there is anything yet.
std::optional<Coordinator::First> Coordinator::decided() const {
  if (!members_.empty()) return first_;
  std::map<const Manner*, std::uint32_t> votes;
  for (const auto& [id, replica] : replicas_)
    if (fully_registered(replica) && !replica.mixed && 2 * ++votes[replica.kind] > config_.replicas)
      return First{id, replica.kind->key->first, replica.kind->key->second};
  return std::nullopt;
}

// Replicas that have registered differ.
bool Coordinator::dissent() const {
  if (kinds_.size() < 2) return false;
  const Manner* common = nullptr;
  for (const auto& [id, replica] : replicas_) {
    if (replica.kind == nullptr) continue;
    if (replica.mixed || (common != nullptr && replica.kind != common)) return true;
    common = replica.kind;
  }
  return false;
}

// True: it does not register, but is refused as soon as it is known in what it differs.
bool Coordinator::differs(NodeId node, const proto::RankUp& up, TimePoint now) {
  std::erase_if(misfits_, [&](const Differing& one) { return same_process(one.up, up); });
  Manner& kind = manner_of(up);
  // In a log from before this was written down: that a member, who comes back, is right, and not somebody new.
  if (!first_ && !members_.empty()) {
    if (up.incarnation() == 0) return false;
    first_ = {ReplicaId(up.replica()), up.plan_hash(), up.settings()};
  }
  const auto binding = decided();
  if (!binding || fits(kind, *binding)) return false;
  if (too_many(misfits_, up)) {
    refuse(node, up, "it declares something else than the job's replicas, as others in its place do");
    return true;
  }
  misfits_.push_back({.node = node, .up = up, .kind = &kind, .since = now});
  settle_declarations(now);
  return true;
}

void Coordinator::on_declaration(const proto::Declaration& told, TimePoint now) {
  Manner* kind = nullptr;
  if (const RankState* rank = rank_of(told.replica(), told.rank(), told.instance())) kind = rank->kind;
  for (const auto& one : misfits_)
    if (same_process(one.up, told)) kind = one.kind;
  if (kind == nullptr) return;
  kind->told = told;
  settle_declarations(now);
}

// With each event that may have changed it, and each tick.
void Coordinator::settle_declarations(TimePoint now) {
  announce_after_dissent();
  const auto binding = decided();
  if (!binding) return settle_without_majority(now);
  if (members_.empty() && dissent()) turn_out_those_who_differ(*binding, now);
  Manner* right = nullptr;
  for (auto& [key, kind] : kinds_)
    if (fits(kind, *binding) && (right == nullptr || kind.told)) right = &kind;
  bool any = false;
  for (auto& one : std::exchange(misfits_, {})) {
    if (fits(*one.kind, *binding) && !one.was_registered) {  // others have come, and gone
      on_rank_up(one.node, one.up, now);
      continue;
    }
    const bool known = one.kind->told && (right == nullptr || right->told);
    const bool only_settings = one.kind->key->first == binding->plan_hash;
    if (!known && !only_settings && now - one.since < config_.silence / 2) {
      Manner& manner = *one.kind;
      misfits_.push_back(std::move(one));
      ask_for(manner, now);
      if (right != nullptr) ask_for(*right, now);
      continue;
    }
    auto why = difference(*one.kind, right, *binding);
    refused_.try_emplace(ReplicaId(one.up.replica()), one.up.rank(), why);
    refuse(one.node, one.up, std::move(why));
    any = true;
  }
  if (any) try_start(now);
}

// Nothing binds anybody, so all may register. Of those who were turned out for a majority that is gone meanwhile it is
// not known any more what they have come with: they start again.
void Coordinator::settle_without_majority(TimePoint now) {
  for (auto& one : std::exchange(misfits_, {}))
    if (one.was_registered) refuse(one.node, one.up, "those who declared something else have gone: start it again");
    else on_rank_up(one.node, one.up, now);
  if (!dissent()) return;
  for (const auto& [id, replica] : replicas_) {
    if (!replica.mixed) ask_for(*replica.kind, now);
    for (std::uint32_t number = 0; replica.mixed && number < replica.ranks.size(); ++number)
      if (replica.ranks[number].registered) ask_for(*replica.ranks[number].kind, now);
  }
  for (auto& line : dissent_lines()) note_once(std::move(line));
}

// Who registered meanwhile could not connect with the others.
void Coordinator::announce_after_dissent() {
  if (!unannounced_ || dissent() || !may_announce()) return;
  unannounced_ = false;
  for (const auto& [node, state] : nodes_) announce_to(node, state.hosts);
}

// A majority is there: the others register no longer. Their ranks hear why when that is known.
void Coordinator::turn_out_those_who_differ(const First& binding, TimePoint now) {
  std::vector<std::uint64_t> gone;
  for (auto& [id, replica] : replicas_) {
    if (!replica.mixed && (replica.kind == nullptr || fits(*replica.kind, binding))) continue;
    gone.push_back(replica.incarnation.value);
    replica.kind = nullptr;
    replica.mixed = false;
    for (std::uint32_t number = 0; number < replica.ranks.size(); ++number) {
      RankState& rank = replica.ranks[number];
      if (!rank.registered) continue;
      if (fits(*rank.kind, binding)) {
        replica.kind = rank.kind;
        continue;
      }
      rank.registered = false;
      --replica.registered;
      if (!rank.connected_node) continue;
      auto& one = misfits_.emplace_back(Differing{.node = rank.node, .up = {}, .kind = rank.kind, .since = now});
      one.up.set_replica(id.value);
      one.up.set_rank(number);
      one.up.set_instance(rank.instance);
      one.was_registered = true;
    }
  }
  std::erase_if(replicas_, [](const auto& one) { return one.second.registered == 0; });
  proto::ToNode message;
  for (auto incarnation : gone) message.mutable_peers()->add_gone(incarnation);
  for (const auto& [node, state] : nodes_) send(node, message);
  unannounced_ = true;
  announce_after_dissent();
}

// One who has declared that kind, and is there, says it in full.
void Coordinator::ask_for(Manner& kind, TimePoint now) {
  if (kind.told || (kind.asked_at != TimePoint{} && now - kind.asked_at < config_.silence / 8)) return;
  const auto ask = [&](NodeId node, std::uint32_t replica, std::uint32_t rank, std::uint64_t instance) {
    kind.asked_at = now;
    proto::ToNode message;
    message.mutable_declare()->set_replica(replica);
    message.mutable_declare()->set_rank(rank);
    message.mutable_declare()->set_instance(instance);
    send(node, std::move(message));
  };
  for (const auto& one : misfits_)
    if (one.kind == &kind) return ask(one.node, one.up.replica(), one.up.rank(), one.up.instance());
  for (const auto& [id, replica] : replicas_) {
    if (replica.kind != &kind && !replica.mixed) continue;
    for (std::uint32_t number = 0; number < replica.ranks.size(); ++number)
      if (const RankState& rank = replica.ranks[number]; rank.kind == &kind && rank.registered && rank.connected_node)
        return ask(rank.node, id.value, number, rank.instance);
  }
}

std::vector<ReplicaId> Coordinator::who_declared(const Manner& kind) const {
  std::vector<ReplicaId> who;
  for (const auto& [id, replica] : replicas_)
    if (replica.kind == &kind && !replica.mixed) who.push_back(id);
  return who;
}

// `right`: what is behind `binding`, where somebody who has declared it was heard since this coordinator started.
std::string Coordinator::difference(const Manner& kind, const Manner* right, const First& binding) const {
  auto who = right != nullptr ? who_declared(*right) : std::vector<ReplicaId>{};
  if (who.empty()) who.push_back(binding.replica);
  if (kind.key->first == binding.plan_hash)
    return fmt::format("it all-reduces over {}, and {} over {}; give all replicas the same", kind.key->second,
                       names(who), binding.settings);
  std::string tensor, fingerprint;
  if (kind.told && right != nullptr && right->told) {
    tensor = first_difference(*kind.told, *right->told);
    fingerprint = fingerprint_difference(*kind.told, *right->told);
  }
  if (tensor.empty() && !fingerprint.empty())
    return fmt::format("its fingerprint is not that of {}: {}; all replicas must have the same", names(who),
                       fingerprint);
  return fmt::format(
      "its tensors or buckets differ from those of {}: {}; all replicas must declare the same state and "
      "plan",
      names(who), tensor.empty() ? "in one that was not told" : tensor);
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
    } else if (replica.kind != first->kind && who_declared(*replica.kind).front() == id) {
      const auto& [hash, settings] = *first->kind->key;
      lines.push_back(fmt::format(
          "{} and {} declare different things, and more than half of the job's {} replicas must "
          "declare the same: of {}, {}",
          names(who_declared(*first->kind)), names(who_declared(*replica.kind)), config_.replicas,
          names(who_declared(*replica.kind)), difference(*replica.kind, first->kind, {ReplicaId{}, hash, settings})));
    }
  }
  return lines;
}

}  // namespace rejoin::membership
