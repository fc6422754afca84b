"""What ends a rank that waits in a collective for another rank of its replica, when that is out of the job."""

import os
import re
import signal
import subprocess
import time

import pytest

torch = pytest.importorskip("torch")

import forked  # noqa: E402
from test_job import Job, check_equal  # noqa: E402

import rejoin  # noqa: E402
from rejoin.torch import _standing  # noqa: E402
from rejoin.torch._watch import state_of  # noqa: E402

# Rank 0 goes through all that is to be left alone, each for as long as it takes to look at it so often.
RANK = """
import multiprocessing, os, signal, subprocess, sys, threading
from types import SimpleNamespace
import torch, torch.distributed as dist
from rejoin.errors import Cancelled
from rejoin.torch import _standing, _watch

rank, store, go = int(sys.argv[1]), *sys.argv[2:]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
if rank == 1:
    open(go).close()
    dist.all_reduce(torch.ones(1))
    os.kill(os.getpid(), signal.SIGSTOP)

out, looks, more = [], 0, threading.Condition()

def check():
    for why in out:
        raise Cancelled(why)

class Standing(_standing.Standing):
    def look(self):
        global looks
        super().look()
        with more:
            looks += 1
            more.notify_all()

def looked(times=16):
    with more:
        until = looks + times
        assert more.wait_for(lambda: looks >= until, 60)

def when_looked(act):
    threading.Thread(target=lambda: (looked(), act())).start()

standing = Standing(1, 0, check, 0.1)
standing.begin()
when_looked(lambda: open(go, "w").close())
dist.all_reduce(torch.ones(1))
print("a collective of a replica that is not out", flush=True)

out.append("this replica is out of the job: it is silent")
until = looks + 16
while looks < until:
    torch.ones(64, 64) @ torch.ones(64, 64)
print("computed", flush=True)
evaluates = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
when_looked(evaluates.stdin.close)
evaluates.wait()
print("waited for a process", flush=True)
done = threading.Event()
when_looked(done.set)
done.wait()
print("waited for a thread", flush=True)

worker = multiprocessing.get_context("fork").Process(target=signal.pause, daemon=True)
worker.start()
os.kill(worker.pid, signal.SIGSTOP)
_watch.end_with_trainer(SimpleNamespace(_workers=[worker]))
print("worker", worker.pid, end="")
dist.all_reduce(torch.ones(1))
"""


def test_a_rank_ends_that_waits_for_another_one_of_its_replica_which_is_out_and_no_other(tmp_path):
    os.mkfifo(tmp_path / "go")
    arguments = ["-c", RANK, str(tmp_path / "store"), str(tmp_path / "go")]
    one, other = (
        forked.Popen([*arguments[:2], str(rank), *arguments[2:]], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for rank in range(2)
    )
    try:
        told, errors = one.communicate(120)
        assert one.returncode == 1, errors
        assert told.splitlines()[:-1] == [
            "a collective of a replica that is not out", "computed", "waited for a process", "waited for a thread",
        ], told + errors  # fmt: skip
        assert re.search(
            rf"^rank 0 of replica 1, process {one.pid}, has stood still for 0 s: it waits for another rank of its "
            "replica, .* starts the replica again: this replica is out of the job: it is silent$",
            errors, re.M,
        ), errors  # fmt: skip
        worker = int(re.fullmatch(r"worker (\d+)", told.splitlines()[-1])[1])
        deadline = time.monotonic() + 60
        while state_of(worker) not in ("", "Z"):
            assert time.monotonic() < deadline
        assert state_of(other.pid) == "T"
    finally:
        one.kill()
        other.kill()


def test_a_time_that_is_none_is_refused():
    with pytest.raises(rejoin.InvalidArgument, match="longest_standing=0: seconds, more than 0"):
        _standing.Standing(0, 0, lambda: None, 0)


@pytest.mark.thorough
def test_a_rank_that_is_stopped_before_a_collective_ends_the_others_when_its_replica_is_out_and_all_come_back(tmp_path):
    flags = ["--optimizer", "sharded", "--max-norm", "0.5", "--longest-standing", "1"]
    job = Job(tmp_path, *flags, ranks=2, steps=0, silence_ms=1000)
    job.until(lambda: all(job.trains(replica) > 10 for replica in range(2)))
    stopped = job.pid_of(1, rank=1)

    # Rank 1 evaluates for several silences, and rank 0 waits for it in forward().
    held, held_at = job.hold(1, "busy", rank=1), time.monotonic()
    job.until(held.exists)
    job.until(lambda: time.monotonic() > held_at + 4)
    trained = job.trains(1)
    held.unlink()
    job.until(lambda: job.trains(1) > trained + 10)

    held = job.hold(1, "forward", rank=1)
    job.until(held.exists)
    os.kill(stopped, signal.SIGSTOP)
    try:
        told = r"rank 0 of replica 1, process (\d+), has stood still for 1 s: .*: this replica is out of the job: "
        job.until(lambda: re.search(told, job.log(1)))
        first = int(re.search(told, job.log(1))[1])
        job.until(lambda: state_of(first) in ("", "Z"))
    finally:
        os.kill(stopped, signal.SIGKILL)  # as torchrun does after 30 s
    held.unlink()
    trained = job.trains(1)
    job.until(lambda: job.trains(1) > trained + 10)
    job.process.terminate()
    errors = job.wait(60)
    assert errors.count("replica 1 ended with") == 1 and "replica 0 ended" not in errors, errors
    assert "stood still" not in job.log(0), job.log(0)
    check_equal(job, 2)
