// What becomes of those who declare something else than the others (declarations.h).
#include "membership/coordinator.h"

namespace rejoin::membership {

// Who differs does not register, but is refused as soon as it is known in what.
Screened Coordinator::screen_declaration(NodeId node, const proto::RankUp& up) {
  declarations_.forget_if([&](const Mismatch& one) { return same_process(one.up, up); });
  Declaration& declaration = declarations_.of(up);
  // In a log from before this was written down: that a member, who comes back, is right, and not somebody new.
  if (!declarations_.first() && !members_.empty()) {
    if (up.incarnation() == 0) return Screened::goes_on;
    declarations_.set_first({ReplicaId(up.replica()), {{declaration.plan_hash, declaration.settings}}});
  }
  const auto binding = declarations_.binding(replicas_, !members_.empty());
  if (!binding || Declarations::fits(declaration, binding->of(up.rank()))) return Screened::goes_on;
  if (declarations_.too_many_for(up)) {
    refuse(node, up, refusals::Why::declaration,
           "it declares something else than the job's replicas, as others in its place do");
    return Screened::handled;
  }
  declarations_.add({.node = node, .up = up, .declaration = &declaration, .since = now_});
  settle_declarations();
  return Screened::handled;
}

void Coordinator::on_declaration(const proto::Declaration& declared) {
  const RankState* rank = rank_of(ProcessId::of(declared));
  if (declarations_.on_content(declared, rank != nullptr ? rank->declaration : nullptr)) settle_declarations();
}

// With each event that may have changed it, and each tick.
void Coordinator::settle_declarations() {
  announce_after_dissent();
  const auto binding = declarations_.binding(replicas_, !members_.empty());
  if (!binding) return settle_without_majority();
  if (members_.empty() && declarations_.dissent()) turn_out_those_who_differ(*binding);
  bool any = false;
  for (auto& one : declarations_.take_mismatches()) {
    Declaration& its = *one.declaration;
    Declaration* right = declarations_.behind(binding->of(one.up.rank()));
    switch (declarations_.fate_of(one, binding->of(one.up.rank()), right, now_)) {
      case Declarations::Fate::registers: on_rank_up(one.node, one.up); break;
      case Declarations::Fate::waits:
        declarations_.add(std::move(one));
        ask_for(its);
        if (right != nullptr) ask_for(*right);
        break;
      case Declarations::Fate::refused: {
        auto why = declarations_.difference(its, one.up.rank(), right, *binding, replicas_);
        declarations_.note_refused(one.up, why);
        refuse(one.node, one.up, refusals::Why::declaration, std::move(why));
        any = true;
        break;
      }
    }
  }
  if (any) try_start();
}

// Nothing binds anybody, so all may register. Of those who were turned out for a majority that is gone meanwhile it is
// not known any more what they have come with: they start again.
void Coordinator::settle_without_majority() {
  for (auto& one : declarations_.take_mismatches())
    if (one.was_registered)
      refuse(one.node, one.up, refusals::Why::declaration,
             "those who declared something else have gone: start it again");
    else on_rank_up(one.node, one.up);
  auto [questions, lines] = declarations_.without_majority(replicas_, now_);
  for (const auto& question : questions) ask(question);
  for (auto& line : lines) warn_once(std::move(line));
}

// Who registered meanwhile could not connect with the others.
void Coordinator::announce_after_dissent() {
  if (!unannounced_ || declarations_.dissent()) return;
  end_recovery_if_all_are_back();
  if (recovering_until_) return;
  unannounced_ = false;
  announce_all();
}

// A majority is there: the others register no longer. Their ranks hear why when that is known.
void Coordinator::turn_out_those_who_differ(const FirstDeclared& binding) {
  const auto gone = declarations_.turn_out_mismatches(replicas_, binding, now_);
  proto::ToNode message;
  message.mutable_peers()->mutable_gone()->Assign(gone.begin(), gone.end());
  send_all(std::move(message));
  unannounced_ = true;
  announce_after_dissent();
}

void Coordinator::ask_for(Declaration& declaration) {
  if (const auto question = declarations_.question(declaration, replicas_, now_)) ask(*question);
}

// For what is behind a hash.
void Coordinator::ask(const Declarations::Question& question) {
  proto::ToNode message;
  message.mutable_declare()->set_replica(question.replica);
  message.mutable_declare()->set_rank(question.rank);
  message.mutable_declare()->set_instance(question.instance);
  send(question.node, std::move(message));
}

}  // namespace rejoin::membership
