#!/usr/bin/env python3
"""The loss of python/examples/nanogpt.py, three replicas, with and without kill -9: docs/nanogpt.svg. Or with gradients
that travel coded, beside those that do not: docs/coded.svg.

usage: nanogpt_curve.py [--steps 1000] [--kill 150,400,650] [--output docs/nanogpt.svg]
       nanogpt_curve.py --coding off,8,4 [--steps 1000] [--output docs/coded.svg]

Needs the package (build/python-venv after ./run test or ./run demo --torch). Replica 1 is killed when replica 0 has come
to each of those steps, and rejoin-run starts it again.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "sim"))
import plot  # noqa: E402

STEP = re.compile(r"^replica (\d) step (\d+) loss (\S+) at \S+ digest (\S+)$", re.M)


def victim(job: int) -> int:
    """The trainer of replica 1: of the job's processes the one with its environment that is Python."""
    for pid in Path(f"/proc/{job}/task/{job}/children").read_text().split():
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        if b"REJOIN_REPLICA=1\0" in environment and b"nanogpt" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return int(pid)
    raise SystemExit("replica 1's trainer is not among the processes of rejoin-run")


def run(steps, kills, coding="off"):
    """Every step's loss."""
    with tempfile.TemporaryDirectory() as directory:
        job = subprocess.Popen(
            [sys.executable, "-m", "rejoin.run", "--replicas=3", "--batch=8", f"--steps={steps}", f"--directory={directory}/job",
             "--", sys.executable, str(ROOT / "python/examples/nanogpt.py"), str(ROOT / "data/shakespeare.txt"),
             f"--steps={steps}", "--each-step", "--evaluate-every=1000000"],
            env={**os.environ, "OMP_NUM_THREADS": "1", "REJOIN_CODING": coding})  # fmt: skip
        log = Path(directory) / "job" / "replica0.log"
        left = list(kills)
        while job.poll() is None:
            seen = STEP.findall(log.read_text()) if log.exists() else []
            if left and seen and int(seen[-1][1]) >= left[0]:
                os.kill(victim(job.pid), signal.SIGKILL)
                print(f"killed replica 1 at step {seen[-1][1]}", flush=True)
                left.pop(0)
            time.sleep(0.05)
        if job.returncode != 0 or left:
            raise SystemExit(f"the job ended with {job.returncode}, and {len(left)} kills were not due: see {directory}")
        steps_seen = [(int(step), float(loss)) for _, step, loss, _ in STEP.findall(log.read_text())]
        compare([STEP.findall(one.read_text()) for one in sorted(log.parent.glob("replica*.log"))], kills)
        return steps_seen


def compare(replicas, kills):
    """All have the same state after each step that several of them have trained; replica 1 after its last kill, too."""
    digests = {}
    for steps in replicas:
        for _, step, _, digest in steps:
            digests.setdefault(int(step), set()).add(digest)
    if differ := [step for step, seen in digests.items() if len(seen) > 1]:
        raise SystemExit(f"the replicas differ after step {differ[0]}")
    if kills and int(replicas[1][-1][1]) <= kills[-1]:
        raise SystemExit("replica 1 was not back before the job's end: give it more steps")


def smooth(points, over=20):
    """The mean of the last steps."""
    return [(points[i][0], sum(loss for _, loss in points[max(0, i - over + 1) : i + 1]) / min(over, i + 1))
            for i in range(len(points))]


def compare_codings(steps, codings, output):
    chart = plot.Chart("nanogpt.py on Shakespeare, mean of 20 steps", "step", "loss")
    last = {}
    for coding in codings:
        points = run(steps, [], coding)
        chart.line(f"coding {coding}", smooth(points))
        last[coding] = sum(loss for _, loss in points[-100:]) / len(points[-100:])
        against = [f"{one}: {last[one]:.4f} ({(last[one] / last[codings[0]] - 1) * 100:+.2f} %)" for one in last]
        note = "Three replicas of 8 samples a step. The mean loss of the last 100 steps: " + ", ".join(against) + "."
        page = plot.page("The loss of a small GPT with coded gradients", [chart], columns=1, width=640, height=320, notes=[note])
        output.write_text(page)
        print(f"{output}: {', '.join(against)}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--kill", default="150,400,650", help="steps (default: %(default)s)")
    parser.add_argument("--coding", help="settings, the first of which the others are compared with; no kills then")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    given.output = given.output or ROOT / "docs" / ("coded.svg" if given.coding else "nanogpt.svg")
    if given.coding:
        return compare_codings(given.steps, given.coding.split(","), given.output)
    kills = [int(step) for step in given.kill.split(",")]
    undisturbed, disturbed = run(given.steps, []), run(given.steps, kills)
    chart = plot.Chart("nanogpt.py on Shakespeare, mean of 20 steps", "step", "loss", marks=kills)
    chart.line("nobody is killed", smooth(undisturbed)).line("replica 1 is killed at the dotted lines", smooth(disturbed))
    last = [smooth(points)[-1][1] for points in (undisturbed, disturbed)]
    notes = [f"Three replicas of 8 samples a step; 16 instead of 24 while one is away. At the end: {last[0]:.3f} and {last[1]:.3f}."]
    given.output.write_text(plot.page("Three kills in the loss of a small GPT", [chart], columns=1, width=640, height=320, notes=notes))
    print(f"{given.output}: {last[0]:.4f} and {last[1]:.4f} at step {given.steps}")


if __name__ == "__main__":
    main()
