#!/usr/bin/env python3
"""The loss of python/examples/nanogpt.py, three replicas, with and without kill -9: docs/nanogpt.svg.

usage: nanogpt_curve.py [--steps 600] [--kill 150,300,450] [--output docs/nanogpt.svg]

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

STEP = re.compile(r"^replica 0 step (\d+) loss (\S+) at (\S+) digest (\S+)$", re.M)


def victim(job: int) -> int:
    """The trainer of replica 1: of the job's processes the one with its environment that is Python."""
    for pid in Path(f"/proc/{job}/task/{job}/children").read_text().split():
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        if b"REJOIN_REPLICA=1\0" in environment and b"nanogpt" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return int(pid)
    raise SystemExit("replica 1's trainer is not among the processes of rejoin-run")


def run(steps, kills):
    """Every step's loss, and how many joined again."""
    with tempfile.TemporaryDirectory() as directory:
        job = subprocess.Popen(
            [sys.executable, "-m", "rejoin.run", "--replicas=3", "--batch=8", f"--steps={steps}", f"--directory={directory}/job",
             "--", sys.executable, str(ROOT / "python/examples/nanogpt.py"), str(ROOT / "data/shakespeare.txt"),
             f"--steps={steps}", "--each-step", "--evaluate-every=1000000"],
            env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
        log = Path(directory) / "job" / "replica0.log"
        left = list(kills)
        while job.poll() is None:
            seen = STEP.findall(log.read_text()) if log.exists() else []
            if left and seen and int(seen[-1][0]) >= left[0]:
                os.kill(victim(job.pid), signal.SIGKILL)
                print(f"killed replica 1 at step {seen[-1][0]}", flush=True)
                left.pop(0)
            time.sleep(0.05)
        if job.returncode != 0 or left:
            raise SystemExit(f"the job ended with {job.returncode}, and {len(left)} kills were not due: see {directory}")
        steps_seen = [(int(step), float(loss)) for step, loss, _, _ in STEP.findall(log.read_text())]
        ends = {STEP.sub(r"\4", line) for line in
                [[m.group(0) for m in STEP.finditer(log.read_text())][-1]]}
        others = re.findall(rf"^replica 1 step {steps_seen[-1][0]} .* digest (\S+)$",
                            (Path(directory) / "job" / "replica1.log").read_text(), re.M)
        if set(others) != ends:
            raise SystemExit(f"replica 1 ends with the state {others}, and replica 0 with {ends}")
        return steps_seen


def smooth(points, over=20):
    """The mean of the last steps."""
    return [(points[i][0], sum(loss for _, loss in points[max(0, i - over + 1) : i + 1]) / min(over, i + 1))
            for i in range(len(points))]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--kill", default="150,300,450", help="steps (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "nanogpt.svg")
    given = parser.parse_args()
    kills = [int(step) for step in given.kill.split(",")]
    undisturbed, disturbed = run(given.steps, []), run(given.steps, kills)
    chart = plot.Chart("nanogpt.py on Shakespeare, mean of 20 steps", "step", "loss", marks=kills)
    chart.line("nobody is killed", smooth(undisturbed)).line("replica 1 is killed at the dotted lines", smooth(disturbed))
    last = [smooth(points)[-1][1] for points in (undisturbed, disturbed)]
    notes = [f"Three replicas of 8 samples a step. At the end: {last[0]:.3f} and {last[1]:.3f}."]
    given.output.write_text(plot.page("A kill does not show in the loss", [chart], columns=1, width=640, height=320, notes=notes))
    print(f"{given.output}: {last[0]:.4f} and {last[1]:.4f} at step {given.steps}")


if __name__ == "__main__":
    main()
