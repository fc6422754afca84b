#!/usr/bin/env python3
"""Is the simulator awake? Breaks the product on purpose, one line at a time, and sees whether seeds find it.

Each mutant is one replacement in one file. It is applied in a scratch copy of the tracked files, rejoin-sim is built
there, seeds are run until one breaks an invariant, and a table says which mutants were found, by what, and when.
A mutant whose text is not in the file any more is an error: the list has to follow the code.
"""
import argparse
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent

# name, file, what stands there, what stands there instead; [A1] and the like: what a review once found
MUTANTS = [
    ("no one suspects itself [A1]", "membership/pause_detector.h",
     "return last_ != TimePoint{} && now - last_ > silence_ / 4 ? now - last_ : Duration{};", "return now - now;"),
    ("the last holder goes, too [A2]", "membership/coordinator_absence.cc",
     "const bool goes = heard && (!last || take_back(Whom::connected) || promote_caught_up(Whom::connected));",
     "const bool goes = true;"),
    ("the accused last holder goes [A2]", "membership/coordinator_accusations.cc",
     "if (!others_contribute(guilty) && !promote_caught_up(Whom::connected)) return block_on(guilty, what);", ""),
    ("who is suspended is never taken back [A2]", "membership/coordinator_absence.cc",
     "if (out->ended || replaced(*out) ||", "if (true || out->ended || replaced(*out) ||"),
    ("a suspended one's end is not noted [A2]", "membership/coordinator_absence.cc",
     "out->ended = true;\n  drop_registration(id, reason);", "(void)out;\n  drop_registration(id, reason);"),
    ("a joiner with half a state goes on alone", "membership/coordinator_absence.cc",
     "if (!m.catching_up || !caught_up(m)) continue;",
     "if (!m.catching_up || registration(m.replica, m.incarnation) == nullptr) continue;"),
    ("a joiner that has caught up is no holder", "membership/coordinator_absence.cc",
     "if (take_back(whom) || promote_caught_up(whom)) return true;", "if (take_back(whom)) return true;"),
    ("nobody asks the operator [A2]", "membership/coordinator_start.cc",
     "if (!may_roll_back() || *from < roll_back_to_->to) {", "if (false) {"),
    ("a used word to roll back counts again", "membership/coordinator_recovery.cc",
     "return last_roll_back_ && committed_ > *last_roll_back_;", "return false;"),
    ("a word to roll back is for any loss", "membership/coordinator_recovery.cc",
     "return *roll_back_to_->said_at != steps_ever();", "return false;"),
    ("an operator's word stays for ever", "membership/coordinator.cc", "  end_word();\n", ""),
    ("that a process has ended is said once", "membership/node.cc",
     "for (const auto& one : ended_) *actions.to_coordinator.emplace_back().mutable_rank_down() = one.down;", ""),
    ("of who was silent no end is told", "membership/node_gone.cc", "if (!ended) silent_[connection] = up;", ""),
    ("an end of before is nothing to a coordinator", "membership/coordinator_absence.cc",
     "if (!down.ended() || down.job() != job_ || !is_of_holder(down)) return;", "return;"),
    ("who has ended is waited for where all others are back", "membership/coordinator_registration.cc",
     "if (!back && (finished() || !has_ended(m))) return;", "if (!back) return;"),
    ("the time in which nobody was heard counts", "membership/coordinator_holders.cc",
     "if (gap < config_.silence) return forgive_all(", "return; if (gap < config_.silence) return forgive_all("),
    ("a shorter time in which nobody was heard counts", "membership/coordinator_holders.cc",
     "if (gap < config_.silence) return forgive_all(gap - ConnectedNode::longest_gap(config_.silence));",
     "if (gap < config_.silence) return;"),
    ("who is back last is judged at once", "membership/coordinator_accusations.cc",
     "if (std::exchange(nobody_was_heard_, false))", "if (false)"),
    ("who is found silent first is out although nobody is heard", "membership/coordinator_absence.cc",
     "const bool goes = heard && (", "const bool goes = ("),
    ("who has come back and is heard no more is enough to go on", "membership/coordinator_absence.cc",
     "return !m.catching_up && is_lately(last_heard(m.replica, m.incarnation));", "return !m.catching_up && is_back(m);"),
    ("an end is forgotten while it may be waited for", "membership/node_gone.cc",
     "(one.out_since && plan_.committed() > *one.out_since)", "true"),
    ("who leads a step changes with its epochs", "membership/rank.cc", "if (plan_.has_leader()) return", "if (false) return"),
    ("who comes new is given an incarnation of before", "membership/coordinator_registration.cc",
     "found != replicas_.end() ? !found->second.begun_here :", "found != replicas_.end() ? false :"),
    ("it waits for all, for ever [A3]", "membership/coordinator_start.cc",
     "if (now_ - *incomplete_since_ < start_patience()) return {};", "return {};"),
    ("who is busy is judged", "membership/coordinator_accusations.cc",
     "if (about.excused && now_ - *about.excused <= config_.silence) return;", ""),
    ("who is busy for too long is not judged", "rejoin/driver_peers.cc", "const bool may = now <= until;",
     "const bool may = true;"),
    ("a step in which somebody was busy tells how long steps are", "rejoin/driver.cc", "&& !plan.excused()", ""),
    ("broken connections are not mended [A4]", "membership/coordinator_accusations.cc",
     "if (broken.empty()) return false;", "return false;"),
    ("damage to the log is a torn tail [A5]", "membership/log.cc",
     "if (!header || (header->length != kMark && !old)) continue;", "if (!header || !old || true) continue;"),
    ("a torn tail is damage [A5]", "membership/log.cc",
     "if (!header || (header->length != kMark && !old)) continue;", "if (header && old && at == 0) continue;"),
    ("a commit without the last rank", "membership/members.cc",
     "return missing_ == 0;", "return missing_ <= 1;"),
    ("one rank's report that a replica has caught up", "membership/coordinator.cc",
     "return replica.caught_up.size() == config_.ranks;", "return replica.caught_up.size() > 0;"),
    ("who has heard an earlier leader first ignores what a later one calls it", "rejoin/driver.cc",
     "incarnation > machine_.incarnation().value && !machine_.member()", "false"),
    ("who is out for now does not count for what all speak", "membership/coordinator_versions.cc",
     "if (!out.ended) lower_to(out);", "(void)out;"),
    ("reductions of an older step count", "membership/coordinator.cc",
     "reduced.step() != committed_.value + 1)", "false)"),
    ("reductions of another epoch count", "membership/coordinator.cc",
     "m->incarnation.value != reduced.incarnation() || reduced.epoch() != epoch_.value ||", ""),
    ("samples of a lost replica are not handed back", "membership/ledger.cc",
     "for (const auto& range : held.mapped()) append(returned_, range);", ""),
    ("samples of steps rolled back are not handed out again", "membership/ledger.cc",
     "if (begin > next_) returned_.push_back({next_, begin});", ";"),
    ("a node does not report a reduction again", "membership/node_gone.cc",
     "if (rank.up.reduced_epoch() != 0) gather(rank, actions);", ""),
    ("any instance has caught up [25]", "membership/node.cc",
     "if (message.caught_up().instance() == rank.up.instance()) rank.caught_up = true;", "rank.caught_up = true;"),
    ("plans of the past are believed", "membership/rank.cc",
     "plan_.epoch() != 0 && said <= known;", "false;"),
    ("who leaves the ring is not fenced", "ftar/communicator.cc",
     "if (Peer* gone = peer_of(one.member)) remove(*gone);", "continue;"),
    ("a connection that failed is not closed [16]", "ftar/connections.cc",
     "engine_.close(peer.endpoint);\n  by_endpoint_", "by_endpoint_"),
    ("nobody waits for the others' flush", "ftar/flush.cc", "|| ring_peers_[i]->flushed != epoch_) return;", ") return;"),
    ("nobody waits for those who wrote here before", "ftar/flush.cc", "if (peer != nullptr && !peer->fenced()) return;",
     "(void)peer;"),
    ("nobody waits for its own writes", "ftar/flush.cc", "if (peer->writes_in_flight > 0) return;", "(void)peer;"),
    ("who has missed an epoch is not answered", "ftar/flush.cc",
     "if (announced_ && owes_flush(peer) && !tell_flush(peer)) return;", ""),
    ("links miss a partner", "base/ring_links.cc", "return closes(members) || closes(contributors);",
     "return closes(members);"),
    ("what one end finds to be surplus it closes", "ftar/connections.cc", "if (peer.heard_surplus == epoch_) {", "{"),
    ("who reaches nobody is admitted", "membership/coordinator.cc",
     "if (!linked(replica, links_in(links_, ring, ring.size() - 1))) {", "if (false) {"),
    ("a source is lost without being fenced", "catchup/service_connections.cc",
     "engine_.close(endpoint);  // the fence, before anyone else is asked for the same slices", ""),
    ("joiners are served by who does not contribute", "catchup/service_connections.cc",
     "if (found->second.serves != Incarnation(hello.incarnation)) return engine_.close(event.endpoint);", ""),
    ("memory that failed is not tried again", "catchup/service.cc",
     "if (!rank.registered && !register_rank(rank)) return;", "if (!rank.registered) return;"),
    ("what sources wrote into stays registered", "catchup/service.cc",
     "  deregister(rank.target);\n}", "}"),
    ("what arrived is not checked", "catchup/joiner.cc", "arrival.intact = *ours == theirs;", "arrival.intact = true;"),
    ("a wait that is under way is taken for a usual one", "catchup/joiner_fellows.cc",
     "(came_at_ - started_) / planner_.arrived()", "(now_ - started_) / planner_.arrived()"),
    ("a slice is fetched under an update that writes to it", "catchup/joiner_requests.cc",
     "if (update_of_void_ == view_.clock()) return;", ""),
    ("any digest will do", "catchup/joiner_proofs.cc", "if (theirs.begin()->second == ours) {", "if (theirs.begin()->second == ours || true) {"),
    ("differing results are committed [B7]", "membership/drift_audit.cc", "if (differ(results)) {", "if (false) {"),
    ("differing states are committed", "membership/drift_audit.cc", "if (!states_reported_alike_ || !differ(states)) continue;", "continue;"),
    ("whose hops damaged results is sent away at once", "membership/coordinator_audit.cc",
     "case Kind::suspend: put_out_for_now(", "case Kind::suspend: remove("),
    ("whose state differs is out for now alone", "membership/drift_audit.cc",
     "*right ? Verdict::Kind::suspend : Verdict::Kind::remove", "Verdict::Kind::suspend"),
    ("strikes are of a place", "membership/coordinator_audit.cc",
     "voters.push_back({m.replica, m.incarnation,", "voters.push_back({m.replica, Incarnation(m.replica.value + 1),"),
    ("what others write ends a standby's pause", "membership/replicated_coordinator.cc",
     "if (request.kind != Kind::read) claim_pause_ = {},", "if (takes_writes) claim_pause_ = {},"),
    ("what a step that failed has lost is added to its retry", "ftar/feedback.cc",
     "if (step_ && step != *step_) {", "if (step_) {"),
    ("what a step has lost counts whole, whatever is told", "ftar/feedback.cc",
     "if (step_ == step && whole_) next().factor = factor;", "(void)step;"),
    ("a retry takes the factor twice", "ftar/feedback.cc", "times_ = kept_[now_].factor *",
     "times_ = std::exchange(kept_[now_].factor, kept_[now_].factor * kept_[now_].factor) *"),
    ("what is told of any step counts for the last", "ftar/feedback.cc",
     "if (step_ == step && whole_)", "if (whole_)"),
    ("what coding has lost is lost", "ftar/coded_ring.cc", ".feedback = feedback.before(range),", ".feedback = nullptr,"),
    ("what plain chunks have not lost is not noted", "ftar/coded_ring.cc",
     ".residual = plain ? feedback.after_nothing(range) : feedback.after(range),",
     ".residual = plain ? nullptr : feedback.after(range),"),
    ("what is lost of a mean is taken for that of a sum", "ftar/coding.cc",
     "if (pass.divisor > 1) given *= static_cast<float>(pass.divisor);", ""),
    ("whoever completes a segment keeps what it has not decoded", "ftar/coding.cc",
     "codes);\n    if (at.out != nullptr) store<Element>(at.out, values);",
     "codes);\n    if (at.out != nullptr) store<Element>(at.out, lost);"),
    ("chunks are coded for who takes none", "ftar/coded_ring.cc",
     "if (peer == nullptr || !peer->coded_room || bucket.coding == nullptr) return false;",
     "if (peer == nullptr || bucket.coding == nullptr) return false;"),
    ("who waits for a place is answered once behind a relay", "membership/coordinator_claims.cc",
     "(claim.asked == holder.node && claim.asked_of == holder.instance)", "claim.asked == holder.node"),
    ("what a replica's first rank declares binds all of them", "membership/coordinator_state.h",
     "ranks[std::min<std::size_t>(rank, ranks.size() - 1)]", "ranks[std::min<std::size_t>(rank, 0)]"),
    ("a daemon says that its ranks have heard all that it has", "membership/node.cc",
     "*up.mutable_rank_up() = rank.up;",
     "*up.mutable_rank_up() = rank.up; up.mutable_rank_up()->set_heard_epoch(plan_.epoch());"),
    ("who is of a larger job is refused", "membership/coordinator_registration.cc",
     "if (screen_log(node, up) == Screened::handled) return Screened::handled;  // also",
     "if (up.replica() < config_.replicas && up.rank() < config_.ranks &&\n"
     "      screen_log(node, up) == Screened::handled)\n    return Screened::handled;  // also"),
    ("a node is silent after less than a silence", "membership/coordinator_absence.cc",
     "if (now_ - state.heard > config_.silence) silent", "if (now_ - state.heard > config_.silence * 5 / 8) silent"),
    ("a process is silent after less than a silence", "membership/node.cc",
     "if (now - rank.heard > silence_ &&", "if (now - rank.heard > silence_ * 5 / 8 &&"),
    ("members have long to come back after a takeover", "membership/coordinator_recovery.cc",
     "recovering_until_ = now + config_.silence;", "recovering_until_ = now + 4 * config_.silence;"),
    ("that somebody has left is no end", "membership/node_gone.cc",
     "down.set_ended(how == Gone::ended || how == Gone::left);", "down.set_ended(how == Gone::ended);"),
    ("the last step is not applied", "rejoin/driver.cc",
     "if (meaning == Meaning::committed || meaning == Meaning::finished) {", "if (meaning == Meaning::committed) {"),
    ("who leaves a finished job is put out", "membership/coordinator_absence.cc",
     "if (finished()) {\n    if (forget_registration(id))", "if (false) {\n    if (forget_registration(id))"),
    ("who comes to a finished job does not hear of it", "membership/rank.cc",
     "if (plan.finished() && !was_part && incarnation_ != Incarnation{}) return Meaning::over;", ""),
    ("a mean over one too many", "ftar/communicator.cc", ": contributors_;", ": contributors_ + 1;"),
]


def run(command, **options):
    return subprocess.run(command, capture_output=True, text=True, **options)


def scratch_copy(folder):
    files = run(["git", "-C", str(ROOT), "ls-files", "-z"], check=True).stdout.split("\0")
    for name in filter(None, files):
        source, target = ROOT / name, folder / name
        # Newer than what was built of a mutant that stood there; what has not changed is not built again.
        if source.is_file() and not (target.is_file() and target.read_bytes() == source.read_bytes()):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            shutil.copymode(source, target)


def build(folder, jobs):
    return run(["ninja", "-C", str(folder / "build"), f"-j{jobs}", "rejoin-sim", *TESTS])


# What seeds don't find: tests of the simulator, with one fault each and what it may cost, and those of the parts.
TESTS = {"sim_test": "*-*TheInvariantsHold*:*OtherShapes*:*Planted*:Scale*:LongJob*", "membership_test": "*", "catchup_test": "*",
         "ftar_test": "*"}


def found_by_tests(folder):
    for program, chosen in TESTS.items():
        result = run([str(folder / "build/bin" / program), "--gtest_brief=1", f"--gtest_filter={chosen}"])
        failed = re.search(r"FAILED  \] (\w+\.\w+)", result.stdout)
        if failed or result.returncode != 0:
            return "a test", failed.group(1) if failed else f"{program} died"
    return None


def seeds_that_find(folder, seeds, jobs):
    result = run([str(folder / "build/bin/rejoin-sim"), "--seeds", str(seeds), "--jobs", str(jobs), "--no-minimise"])
    if result.returncode == 0:
        return found_by_tests(folder) or ("not found", f"{seeds} seeds")
    broken = re.search(r"seed (\d+) breaks (\S+):", result.stdout)
    if broken:
        return broken.group(2), f"seed {broken.group(1)}"
    died = re.search(r"seed (\d+) ended the process itself", result.stdout)
    return "a check", f"seed {died.group(1)}" if died else "?"


def misplaced(mutants):
    """Those whose text does not stand once in their file, in words: tests/tidy.py asks, too."""
    counts = ((name, file, (ROOT / file).read_text().count(old)) for name, file, old, _ in mutants)
    return [f"mutant '{name}': its text stands {count} times in {file}, and should once"
            for name, file, count in counts if count != 1]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=300, help="for each mutant, at most")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", nargs="+", help="those whose name contains one of these")
    parser.add_argument("--scratch", help="a folder for the copy, kept; otherwise one that is removed")
    options = parser.parse_args()
    mutants = [m for m in MUTANTS if not options.only or any(part in m[0] for part in options.only)]
    if wrong := misplaced(mutants):
        sys.exit("\n".join(wrong))
    folder = pathlib.Path(options.scratch or tempfile.mkdtemp(prefix="rejoin-mutants-"))
    missed = 0
    try:
        scratch_copy(folder)
        run(["cmake", "-S", str(folder), "-B", str(folder / "build"), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
             "-DCMAKE_UNITY_BUILD=ON", "-DCMAKE_UNITY_BUILD_BATCH_SIZE=16",  # as build/release
             "-DCMAKE_C_COMPILER_LAUNCHER=ccache", "-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"], check=True)
        built = build(folder, options.jobs)
        if built.returncode != 0:
            sys.exit(f"what is not mutated does not build:\n{built.stdout[-2000:]}")
        print(f"{'mutant':48} {'found as':16} by", flush=True)
        for name, file, old, new in mutants:
            text = (folder / file).read_text()
            (folder / file).write_text(text.replace(old, new))
            built = build(folder, options.jobs)
            found, by = ("no build", "") if built.returncode != 0 else seeds_that_find(folder, options.seeds, options.jobs)
            (folder / file).write_text(text)
            missed += found in ("not found", "no build")
            print(f"{name:48} {found:16} {by}", flush=True)
    finally:
        if not options.scratch:
            shutil.rmtree(folder)
    print(f"{len(mutants) - missed} of {len(mutants)} found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
