#!/usr/bin/env python3
"""What a step costs from Python, beside the bare all-reduce of the same bytes: two replicas over shared memory.

Needs torch and the package in the environment that runs it (build/python-venv after ./run test or ./run demo --torch):
build/python-venv/bin/python bench/python_path.py
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve()
BIN = HERE.parent.parent / "build" / "release" / "bin"
SIZES = {64 << 10: 2000, 64 << 20: 60}  # bytes, steps
WARM = 10


def native(size: int) -> list[float]:
    """Seconds of each step that only hands over a bucket, waits for the decision, and updates nothing."""
    import rejoin._native as rejoin
    from rejoin.launch import place_from_environment

    place = place_from_environment()
    session = rejoin.Session([f"replica={place.replica}", f"rank={place.rank}"])
    session.bucket([session.add("w", 0, size // 4, 0, True)])
    session.allocate()
    session.join()
    times = []
    while session.begin_step() is not None:
        begun = time.perf_counter()
        session.all_reduce(0)
        if session.begin_update() is not None:
            session.end_update()
        times.append(time.perf_counter() - begun)
    return times


def attached(size: int) -> list[float]:
    """Seconds of each optimizer.step() of plain SGD, whose gradient is there."""
    import torch

    import rejoin.torch as rj

    session = rj.Session.from_environment()
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.zeros(size // 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    session.attach(model, optimizer, bucket_bytes=size)
    gradient = torch.ones(size // 4)
    times = []
    for _ in session.steps():
        model.w.grad = gradient
        begun = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - begun)
    return times


def job(kind: str, size: int, steps: int) -> float:
    """The median, in µs, of replica 0."""
    with tempfile.TemporaryDirectory(prefix="rejoin-path-") as directory:
        out = Path(directory) / "times.json"
        command = [sys.executable, "-m", "rejoin.run", "--replicas", "2", "--steps", str(steps), "--batch", "2",
                   "--directory", directory, "--", sys.executable, str(HERE), "--role", kind, "--size", str(size),
                   "--out", str(out)]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if ended.returncode != 0:
            logs = "".join(f"{log}:\n{log.read_text()[-2000:]}" for log in sorted(Path(directory).glob("*.log")))
            sys.exit(f"the job has failed:\n{ended.stderr}\n{logs}")
        return statistics.median(json.loads(out.read_text())[WARM:]) * 1e6


def bare(size: int) -> float:
    """The all-reduce of these bytes alone, in µs, between two processes of the bench tool."""
    with tempfile.TemporaryDirectory(prefix="rejoin-path-") as directory:
        out = Path(directory) / "perf.json"
        command = [BIN / "rejoin_allreduce_perf", "-b", str(size), "-e", str(size), "-c", "0", "-n", "60", "--op",
                   "mean", "--json", str(out)]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return float(json.loads(out.read_text())["rows"][0]["seconds"]) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--role", choices=["native", "attached"], help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.role:
        times = native(given.size) if given.role == "native" else attached(given.size)
        if os.environ.get("REJOIN_REPLICA") == "0":
            given.out.write_text(json.dumps(times))
        return
    print("| bytes | all-reduce alone, µs | all_reduce and commit from Python | ratio | optimizer.step() of SGD | ratio |")
    print("|---|---|---|---|---|---|")
    for size, steps in SIZES.items():
        alone, path, whole = bare(size), job("native", size, steps), job("attached", size, steps)
        print(f"| {size >> 10:,} KiB | {alone:,.0f} | {path:,.0f} | {path / alone:.2f} | {whole:,.0f} | {whole / alone:.2f} |")


if __name__ == "__main__":
    main()
