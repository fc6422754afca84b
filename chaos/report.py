"""What a chaos run was: faults by kind, how soon steps went on, what did not hold."""
import itertools
from collections import Counter
from dataclasses import dataclass, field

numbers = itertools.count()


@dataclass
class Record:
    """One fault that struck."""
    kind: str
    at: float
    counts_from: float = 0.0
    until: float = 0.0  # the next fault, or its round's end
    recovery: float = None
    struck: bool = True  # otherwise it was one of a link, and nothing passed there
    number: int = field(default_factory=lambda: next(numbers))


def recovery_of(record, commits):
    """The longest time without a commit after the fault, as far as it lies between `counts_from` and `until`."""
    longest, after = None, None
    for before in reversed(commits):
        if after is not None and before < record.until:
            longest = max(longest or 0, after - max(before, record.counts_from))
        if before < record.counts_from:
            break
        after = before
    return longest


def median(values):
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def table(run):
    checker = run.checker
    lines = ["", f"{'fault':<22} {'times':>6}   longest time to the next commit: median, max"]
    by_kind = {}
    for record in run.records:
        by_kind.setdefault(record.kind, []).append(record)
    for kind, records in sorted(by_kind.items()):
        times = [r.recovery for r in records if r.recovery is not None]
        shown = f"{median(times):8.2f} s {max(times):8.2f} s" if times else "       –"
        idle = sum(not r.struck for r in records)
        lines.append(f"{kind:<22} {len(records):>6}   {shown}" + (f"   ({idle} met nothing)" if idle else ""))
    lines.append(f"{checker.committed} steps in {checker.epochs_seen} epochs; {len(run.records)} faults; "
                 f"{checker.steps_rolled_back} steps rolled back; processes started: "
                 f"{sum(p.starts for p in run.job.processes.values())}; "
                 f"digests compared: {checker.checked_digests}, gradients checked: {checker.checked_sums}")
    if run.settings.several:
        lines.append(f"terms: {len(checker.led)}; committed steps lost without a true loss: {checker.steps_lost}")
    counted = Counter(invariant for invariant, _ in checker.violations)
    lines.append("violations: " + (", ".join(f"{name} {count}" for name, count in counted.items()) or "none"))
    return "\n".join(lines)
