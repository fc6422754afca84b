#!/usr/bin/env python3
"""The tables of docs/performance.md whose figures the bench tools print as JSON, as Markdown, with their commands.

usage: tables.py [--bin build/release/bin] [--only allreduce,steps,recovery] [--quick] [--anyway]
                 [--python PYTHON] [--torch PYTHON]

On a machine that is not quiet the figures mean little: there it refuses, but with --anyway.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def measure(given, tool, *arguments):
    """Run a tool and give its command, for people, and its results."""
    command = [tool, *map(str, arguments)]
    with tempfile.TemporaryDirectory(prefix="rejoin-tables-") as directory:
        out = Path(directory) / "out.json"
        subprocess.run([given.bin / tool, *command[1:], "--json", out], check=True, stdout=subprocess.DEVNULL)
        return " ".join(command), json.loads(out.read_text())


def row(*cells):
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def head(*cells):
    row(*cells)
    print("|" + "---|" * len(cells))


def time(seconds):
    """In the unit that fits."""
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"


def size_of(count):
    return next(f"{count >> shift} {unit}" for shift, unit in ((20, "MiB"), (10, "KiB"), (0, "B")) if count >> shift)


def allreduce(given):
    print("\nMean over the turns (over the limit's mean), best turn (over the limit's best turn).\n")
    head("all-reduce", "ranks", "size", "mean", "best", "CPU s/GiB", "system calls a rank and operation")
    commands = []
    for transport in ("shm", "tcp"):
        for ranks in (2, 3, 4):
            for sizes in (["-b", "4K", "-e", "64K", "-f", "16"], ["-b", "1M", "-e", "64M", "-f", "64"]):
                command, found = measure(
                    given, "rejoin_allreduce_perf", "--transport", transport, "--ranks", ranks, *sizes,
                    "-n", 10 if given.quick else 50, "-w", 10,
                )  # fmt: skip
                commands.append(command)
                for one in found["rows"]:
                    limited = one["limit_seconds"] > 0
                    cells = [
                        time(one[of]) + (f" ({one[ratio]:.2f})" if limited else "")
                        for of, ratio in (("seconds", "ratio"), ("best_seconds", "ratio_best"))
                    ]
                    calls = one["system_calls_per_operation"]
                    row(transport, ranks, size_of(one["bytes"]), *cells, f"{one['cpu_seconds_per_gib']:.2f}",
                        "not countable here" if calls is None else f"{calls:.1f}")  # fmt: skip
    return commands


def steps(given):
    commands = []
    for python in [None, given.python] if given.python else [None]:
        trainers = ["--python", python] if python else []
        command, found = measure(given, "rejoin_step_perf", "-n", 100 if given.quick else 1000, *trainers)
        commands.append(command)
        print(f"\nA step through the session, trainers in {'Python' if python else 'C++'}: means, µs.\n")
        rows = found["rows"]
        print(f"By itself: one process wakes another in {found['wake_up_us']:.1f} µs (median).\n")
        head("part", *(f"{size_of(one['bytes'])}, {one['replicas']} replicas" for one in rows))
        for i, part in enumerate(rows[0]["parts"]):
            row(f"{part['name']}: {part['what']}", *(f"{one['parts'][i]['us']:.1f}" for one in rows))
        row("the step", *(f"{one['step_us']:.1f}" for one in rows))
        row("a bare all-reduce", *(f"{one['bare_us']:.1f}" for one in rows))
        row("beyond it", *(f"{one['beyond_us']:.1f}" for one in rows))
        for i, cost in enumerate(rows[0]["costs"]):
            row(f"CPU time of {cost['who']}", *(f"{one['costs'][i]['cpu_us']:.1f}" for one in rows))
            if "system_calls" in cost:
                row(f"system calls of {cost['who']}", *(f"{one['costs'][i]['system_calls']:.1f}" for one in rows))
    return commands


def recovery(given):
    torch = ["--torch", given.torch] if given.torch else []
    rounds = ["--kills", 5, "--stops", 2] if given.quick else ["--kills", 100, "--stops", 20]
    commands = []
    for transport in ("shm", "tcp"):
        command, found = measure(
            given, "rejoin_recovery_perf", "--transport", transport, "-s", "4K,1M,64M", *rounds, *torch
        )
        commands.append(command)
        print(f"\nThree replicas over {transport}, silence {found['silence_ms']} ms, from the signal, ms: p50, p99, most.\n")
        head("", "size", "new epoch", "next all-reduce", "next commit")
        for one in found["rows"]:
            cells = []
            for stage in ("epoch", "all_reduce", "commit"):
                at = one.get(stage) or (one.get("gloo_all_reduce") if stage == "all_reduce" else None)
                cells.append(f"{at['p50_ms']:.1f}, {at['p99_ms']:.1f}, {at['max_ms']:.1f}" if at else "–")
            what = "Gloo, reconfigured, over TCP: kill" if "gloo_all_reduce" in one else one["member"]
            row(what, size_of(one["bytes"]), *cells)
        if "gloo_missing" in found:
            print(f"\nGloo was not measured: {found['gloo_missing']}.")
    return commands


TABLES = {"allreduce": allreduce, "steps": steps, "recovery": recovery}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=Path, default=ROOT / "build" / "release" / "bin")
    parser.add_argument("--only", default=",".join(TABLES))
    parser.add_argument("--quick", action="store_true", help="few repetitions: to see that it works")
    parser.add_argument("--anyway", action="store_true", help="even if the machine is not quiet")
    parser.add_argument("--python", help="of rejoin_step_perf")
    parser.add_argument("--torch", help="of rejoin_recovery_perf")
    given = parser.parse_args()
    wanted = given.only.split(",")
    if unknown := [name for name in wanted if name not in TABLES]:
        sys.exit(f"tables.py: there is no table {', '.join(unknown)}; there are {', '.join(TABLES)}")
    load, cores = os.getloadavg()[0], os.cpu_count()
    if load > 0.3 * cores and not given.anyway:
        sys.exit(f"tables.py: the load is {load:.1f} on {cores} cores: wait until the machine is quiet, or give --anyway")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    print(f"{date.today()}, commit {commit.stdout.strip() or 'unknown'}, {cores} cores, load {load:.1f} before.")
    for name in wanted:
        commands = TABLES[name](given)
        print("\nCommands: " + ", ".join(f"`{command}`" for command in commands))


if __name__ == "__main__":
    main()
