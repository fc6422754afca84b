#!/usr/bin/env python3
"""./run demo --torch: a PyTorch GPT as several replicas. One is killed, comes back, and all have the same bits."""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from rejoin._programs import path

HERE = Path(__file__).parent
# Several processes write to one pipe, and where PYTHONUNBUFFERED is set the ends of their lines come by themselves.
STEP = re.compile(r"replica (\d+) step (\d+) loss (\S+) at (\d+\.\d{4}) digest ([0-9a-f]{16})")
AFTERWARDS = 20  # steps that the replica which came back trains at least
PROCESS = re.compile(r"replica (\d+) is process (\d+)")


class Show:
    """Runs the job, kills, and tells what is seen."""

    def __init__(self, given: argparse.Namespace, directory: Path) -> None:
        """Nothing is started yet."""
        self.given, self.directory = given, directory
        self.victim, self.at_step = (int(number) for number in given.kill.split("@"))
        self.processes: dict[int, int] = {}
        self.committed: dict[int, dict[int, float]] = defaultdict(dict)  # by replica, then step: when
        self.digests: dict[int, set[str]] = defaultdict(set)
        self.losses: dict[int, float] = {}
        self.killed_at, self.killed_after = 0.0, 0
        self.back_at = 0
        self.job: subprocess.Popen[str] | None = None
        self.ends = False
        self.started = time.monotonic()

    def say(self, text: str) -> None:
        """Print a line with the time."""
        print(f"{time.monotonic() - self.started:7.2f} s  {text}", flush=True)

    def run(self) -> int:
        """Give the exit status: 0 where all bits are the same and no sample is lost."""
        command = [sys.executable, "-m", "rejoin.run", "--replicas", str(self.given.replicas), "--batch", "8",
                   "--directory", str(self.directory), "--show", "--",
                   sys.executable, str(HERE / "examples" / "nanogpt.py"), str(self.given.data),
                   "--steps", str(self.given.steps), "--each-step"]  # fmt: skip
        self.job = job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert job.stdout is not None
        try:
            for line in job.stdout:
                self.hear(line.rstrip("\n"))
            status = job.wait()
        except KeyboardInterrupt:
            job.send_signal(signal.SIGINT)
            job.wait()
            return 130
        return status or self.prove()

    def hear(self, line: str) -> None:
        """Take a line of the job's."""
        for replica, process in PROCESS.findall(line):
            self.processes[int(replica)] = int(process)
        steps = STEP.findall(line)
        for replica, step, loss, at, digest in steps:
            self.step(int(replica), int(step), float(loss), float(at), digest)
        if line and not steps and not PROCESS.search(line):
            self.say(line)

    def step(self, replica: int, step: int, loss: float, at: float, digest: str) -> None:
        """Take a step that a replica has committed."""
        if replica == self.victim and self.killed_at and not self.back_at and at > self.killed_at:
            self.back(step, at)
        self.committed[replica][step] = at
        self.digests[step].add(digest)
        if step not in self.losses and step % 20 == 0:
            self.say(f"step {step}: loss {loss:.4f}")
        self.losses[step] = loss
        if replica == self.victim and step >= self.at_step and not self.killed_at:
            process = self.processes[replica]
            self.killed_at, self.killed_after = time.monotonic(), step
            os.kill(process, signal.SIGKILL)
            self.say(f"kill -9 {process}: replica {replica}, after its step {step}")
        if self.back_at and step >= max(self.given.steps, self.back_at + AFTERWARDS) and not self.ends and self.job:
            self.ends = True
            self.job.terminate()

    def others(self) -> list[dict[int, float]]:
        """Give the survivors' steps."""
        return [steps for replica, steps in self.committed.items() if replica != self.victim]

    def back(self, step: int, at: float) -> None:
        """Take the first step that the victim trains again."""
        self.back_at = step
        times = sorted(t for t in self.others()[0].values() if t > self.killed_at)
        first = min(t for steps in self.others() for n, t in steps.items() if n > self.killed_after)
        gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
        self.say(f"the others committed their next step {1000 * (first - self.killed_at):.0f} ms after the kill")
        self.say(
            f"replica {self.victim} trains again from step {step}, {at - self.killed_at:.1f} s after it was killed; "
            f"meanwhile the others trained {len(times)} steps, the longest of {1000 * max(gaps, default=0.0):.0f} ms"
        )

    def prove(self) -> int:
        """Compare what the replicas had after every step, and look at the ledger."""
        audit = subprocess.run(
            [path("rejoin"), "audit", str(self.directory / "log" / "decisions.log")], capture_output=True, text=True
        )
        several = [step for step in self.digests if sum(step in steps for steps in self.committed.values()) > 1]
        differ = [step for step in several if len(self.digests[step]) != 1]
        last = max(self.losses)
        print("\nProof")
        same = f"NO, not after {differ}" if differ else "yes"
        print(f"  same bits on all replicas, after each of {len(several)} steps: {same}")
        print(f"  digest after step {last}: {', '.join(sorted(self.digests[last]))}")
        for line in audit.stdout.splitlines():
            if "lost" in line or "committed" in line:
                print(f"  {line.strip()}")
        print(f"  loss: {self.losses[min(self.losses)]:.4f} at first, {self.losses[last]:.4f} at last")
        if not self.back_at:
            print(f"  replica {self.victim} did not come back")
        return 0 if not differ and audit.returncode == 0 and self.back_at else 1


def main() -> int:
    """Run the demo."""
    parser = argparse.ArgumentParser(prog="./run demo --torch", description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=400,
        help=f"at least; {AFTERWARDS} after the replica has come back, where it takes longer (default 400)",
    )  # fmt: skip
    parser.add_argument("--kill", default="1@60", metavar="REPLICA@STEP")
    given = parser.parse_args()
    if not re.fullmatch(r"\d+@\d+", given.kill) or int(given.kill.split("@")[0]) >= given.replicas:
        parser.error(f"--kill {given.kill}: it is REPLICA@STEP, such as 1@60, of replicas 0 to {given.replicas - 1}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    directory = Path(tempfile.mkdtemp(prefix="rejoin-demo-"))
    try:
        return Show(given, directory).run()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
