"""The examples, as a reader would run them."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

EXAMPLES = Path(__file__).parent.parent / "examples"
DATA = EXAMPLES.parent.parent / "data" / "shakespeare.txt"


def losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)$", text, re.M)]


def test_the_example_survives_a_kill_and_learns_as_the_plain_script_does(tmp_path):
    command = [sys.executable, "-m", "rejoin.run", "--replicas", "2", "--batch", "16", "--steps", "120",
               "--directory", str(tmp_path / "job"), "--",
               sys.executable, str(EXAMPLES / "ddp.py"), str(DATA)]  # fmt: skip
    job = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    log = tmp_path / "job" / "replica1.log"
    deadline = time.monotonic() + 60
    while not (log.exists() and "step 20 " in log.read_text()):
        assert time.monotonic() < deadline and job.poll() is None
        time.sleep(0.05)
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    victim = next(int(pid) for pid in children if b"REJOIN_REPLICA=1" in Path(f"/proc/{pid}/environ").read_bytes())
    os.kill(victim, signal.SIGKILL)
    _, errors = job.communicate(timeout=110)
    assert job.returncode == 0, errors
    assert "replica 1 ended with signal SIGKILL, and is started again" in errors
    seen = losses((tmp_path / "job" / "replica0.log").read_text())
    assert len(seen) == 12 and seen[-1] < seen[0] - 0.3, seen
    assert (tmp_path / "gpt.pt").exists()


def test_the_plain_script_runs(tmp_path):
    script = [sys.executable, str(EXAMPLES / "plain.py"), str(DATA), "--steps", "20"]
    done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    seen = losses(done.stdout)
    assert len(seen) == 2 and seen[1] < seen[0]


def test_the_diff_in_the_documentation_is_the_examples():
    diff = subprocess.run(["diff", "plain.py", "ddp.py"], cwd=EXAMPLES, capture_output=True, text=True).stdout
    changed = [line[2:].strip() for line in diff.splitlines() if line.startswith(("<", ">"))]
    page = (EXAMPLES.parent.parent / "docs" / "pytorch.md").read_text()
    shown = [line for line in changed if line and not line.startswith(('"""', "rejoin-run"))]
    assert len(shown) < 26
    for line in shown:
        assert line in page, f"docs/pytorch.md does not show: {line}"


def test_the_sharded_example_goes_on_from_its_checkpoint(tmp_path):
    def run(directory: str, steps: int) -> list[float]:
        command = [sys.executable, "-m", "rejoin.run", "--replicas", "2", "--ranks", "2", "--batch", "16",
                   "--steps", str(steps), "--directory", str(tmp_path / directory), "--",
                   sys.executable, str(EXAMPLES / "hsdp.py"), str(DATA),
                   "--checkpoint", str(tmp_path / "checkpoint")]  # fmt: skip
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=170)
        log = (tmp_path / directory / "replica0.log").read_text()
        assert done.returncode == 0, done.stderr + log[-3000:]
        return losses(log)

    first = run("first", 110)
    assert len(first) == 11 and first[-1] < first[0] - 0.3, first
    assert (tmp_path / "checkpoint" / "latest").read_text() == "100"
    second = run("second", 120)
    assert len(second) == 2 and abs(second[0] - first[-1]) < 0.2, (first, second)  # steps 110 and 120


def test_the_demo_kills_a_replica_and_proves_that_it_came_back():
    script = [sys.executable, str(EXAMPLES.parent / "demo.py"), "--data", str(DATA), "--steps", "300", "--kill", "2@30"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "replica 2 trains again from step" in done.stdout
    assert re.search(r"same bits on all replicas, after each of \d+ steps: yes", done.stdout)
    assert "300 steps committed" in done.stdout and "0 lost, 0 repeated" in done.stdout
    wrong = subprocess.run([*script[:4], "--kill", "7@1"], capture_output=True, text=True)
    assert wrong.returncode == 2 and "--kill 7@1: it is REPLICA@STEP" in wrong.stderr
