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

# name, file, what stands there, what stands there instead
MUTANTS = [
    ("no one suspects itself", "membership/attendance.h", "if (gap <= silence_ / 4) return {};", "return {};"),
    ("the last holder goes, too", "membership/coordinator_absence.cc",
     "if (others_contribute(id)) {", "if (true) {"),
    ("the accused last holder goes", "membership/coordinator_absence.cc",
     "if (!others_contribute(guilty))\n", "if (false)\n"),
    ("who is suspended is never taken back", "membership/coordinator_absence.cc",
     "if (out->ended || replaced(*out) ||", "if (true || out->ended || replaced(*out) ||"),
    ("a suspended one's end is not noted", "membership/coordinator_absence.cc",
     "if (out.replica == id) out.ended = true;", "if (out.replica == id) out.ended = false;"),
    ("nobody asks the operator", "membership/coordinator_start.cc",
     "if (!roll_back_to_ || from < *roll_back_to_) {", "if (false) {"),
    ("broken connections are not mended", "membership/coordinator_absence.cc",
     "if (broken.empty()) return false;", "return false;"),
    ("a commit without the last rank", "membership/coordinator.cc",
     "if (m.exchanged.size() < config_.ranks) return;", "if (m.exchanged.size() + 1 < config_.ranks) return;"),
    ("exchanges of an older step count", "membership/coordinator.cc",
     "exchanged.step() != committed_.value + 1)", "false)"),
    ("exchanges of another incarnation count", "membership/coordinator.cc",
     "m->incarnation.value != exchanged.incarnation() ||", ""),
    ("samples of a lost replica are not handed back", "membership/ledger.cc",
     "returned_.insert(returned_.end(), held.mapped().begin(), held.mapped().end());", ""),
    ("a node does not say an exchange again", "membership/node.cc",
     "if (rank.up.exchanged_epoch() != 0) gather(rank, actions);", ""),
    ("any life has caught up", "membership/node.cc",
     "if (message.caught_up().life() == rank.up.life()) rank.caught_up = true;", "rank.caught_up = true;"),
    ("plans of the past are believed", "membership/rank.cc",
     "<= std::pair(plan_.epoch(), plan_.committed()) && plan_.epoch() != 0)",
     "< std::pair(std::uint64_t{0}, std::uint64_t{0}))"),
    ("forgotten without being fenced", "rejoin/driver.cc",
     "if (!stays) ring_->forget(before.member);", ""),
    ("a source is lost without being fenced", "catchup/service.cc",
     "engine_.close(endpoint);  // the fence, before anyone else is asked for the same slices", ""),
    ("joiners are served by who does not contribute", "catchup/service.cc",
     "if (found->second.serves != Incarnation(hello.incarnation)) return engine_.close(event.endpoint);", ""),
    ("memory that failed is not tried again", "catchup/service.cc",
     "if (auto registered = register_rank(rank); !registered) return registered;",
     "return fail(ErrorCode::unavailable, \"not registered\");"),
    ("what arrived is not checked", "catchup/joiner.cc", "arrival.whole = *ours == theirs;", "arrival.whole = true;"),
    ("any proof will do", "catchup/joiner.cc", "if (ours == question.theirs[i]) {", "if (true) {"),
    ("a mean over all members", "ftar/ring.cc", "? owner_.contributors_ : 0;", "? owner_.contributors_ + 1 : 0;"),
]


def run(command, **options):
    return subprocess.run(command, capture_output=True, text=True, **options)


def scratch_copy(folder):
    files = run(["git", "-C", str(ROOT), "ls-files", "-z"], check=True).stdout.split("\0")
    for name in filter(None, files):
        source, target = ROOT / name, folder / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def build(folder, jobs):
    return run(["ninja", "-C", str(folder / "build"), f"-j{jobs}", "rejoin-sim"])


def seeds_that_find(folder, seeds, jobs):
    result = run([str(folder / "build/bin/rejoin-sim"), "--seeds", str(seeds), "--jobs", str(jobs), "--no-minimise"])
    if result.returncode == 0:
        return "not found", f"{seeds} seeds"
    broken = re.search(r"seed (\d+) breaks (\S+):", result.stdout)
    if broken:
        return broken.group(2), f"seed {broken.group(1)}"
    died = re.search(r"seed (\d+) ended the process itself", result.stdout)
    return "a check", f"seed {died.group(1)}" if died else "?"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=300, help="for each mutant, at most")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", help="those whose name contains this")
    parser.add_argument("--scratch", help="a folder for the copy, kept; otherwise one that is removed")
    options = parser.parse_args()
    mutants = [m for m in MUTANTS if not options.only or options.only in m[0]]
    for name, file, old, _ in mutants:
        count = (ROOT / file).read_text().count(old)
        if count != 1:
            sys.exit(f"mutant '{name}': its text stands {count} times in {file}, and should once")
    folder = pathlib.Path(options.scratch or tempfile.mkdtemp(prefix="rejoin-mutants-"))
    missed = 0
    try:
        scratch_copy(folder)
        run(["cmake", "-S", str(folder), "-B", str(folder / "build"), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
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
