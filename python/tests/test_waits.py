"""Who waits, and for how long: SIGTERM to those who wait, replicas that are stopped, hang or are busy for long."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import forked  # noqa: E402
from test_job import Job, check_equal  # noqa: E402

LONG = 120


def is_there(process: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


def ends_with_the_coordinator_stopped(job: Job, replicas: list[int]) -> str:
    """All that wait for it end in order, asked once; nobody kills them."""
    coordinator = job.child("coordinator")
    os.kill(coordinator, signal.SIGSTOP)
    try:
        job.process.terminate()
        job.until(lambda: not any(is_there(process) for process in replicas), LONG)
    finally:
        os.kill(coordinator, signal.SIGCONT)
    return job.wait(LONG)


def test_who_waits_ends_with_sigterm_and_who_is_silent_for_long_is_put_out_unless_busy(tmp_path):
    job = Job(tmp_path, "--leave-within", "2", steps=0, silence_ms=3000)
    job.until(lambda: all(job.trains(replica) > 20 for replica in range(2)))

    # One that hangs in a step is put out, and hears so when it goes on.
    def goes_on_alone(started: float) -> float:
        before = job.trains(0)
        job.until(lambda: job.trains(0) > before + 20, LONG)
        return time.monotonic() - started

    def comes_back(cancelled: int) -> None:
        job.until(lambda: job.log(1).count("rejoin.errors.Cancelled: ") == cancelled, LONG)

    def trains_again() -> None:
        before = job.trains(1)
        job.until(lambda: job.trains(1) > before + 5, LONG)

    held = job.hold(1, "forward")
    job.until(held.exists)
    took = goes_on_alone(time.monotonic())
    held.unlink()
    comes_back(1)
    trains_again()

    # One that says that it is busy is waited for, for longer than that.
    held, process = job.hold(1, "busy"), job.pid_of(1)
    job.until(held.exists)
    deadline = time.monotonic() + took + 1.0
    job.until(lambda: time.monotonic() > deadline, LONG + took)
    held.unlink()
    trains_again()
    assert job.pid_of(1) == process, "it was put out while it was busy"

    # One that is stopped for longer than the silence is put out, too.
    os.kill(process, signal.SIGSTOP)
    goes_on_alone(time.monotonic())
    held = job.hold(1, "joining")
    os.kill(process, signal.SIGCONT)
    comes_back(2)

    # SIGTERM to one that catches up, and waits for a step of the others.
    job.until(held.exists, LONG)
    other = job.hold(0, "busy")
    joiner = job.pid_of(1)
    held.unlink()
    job.until(other.exists)
    os.kill(joiner, signal.SIGTERM)
    job.until(lambda: not is_there(joiner), LONG)
    other.unlink()

    # … to one in join(), and to one in optimizer.step(), while the coordinator is away.
    goes_on_alone(time.monotonic())
    trainers = [job.pid_of(0)]
    os.kill(job.child("coordinator"), signal.SIGSTOP)
    late = forked.Popen(
        [job.script, "--out", str(tmp_path)],
        env={**os.environ, "REJOIN_SOCKET": str(tmp_path / "node1.sock"), "REJOIN_REPLICA": "1"},
        stdout=subprocess.DEVNULL,
        stderr=(tmp_path / "late.log").open("w"),
    )
    try:
        job.until(lambda: "which has not answered its registration" in (tmp_path / "late.log").read_text(), LONG)
        late.terminate()
        assert late.wait(LONG) == 0, (tmp_path / "late.log").read_text()
    finally:
        late.kill()
    errors = ends_with_the_coordinator_stopped(job, trainers)
    assert errors.count("replica 1 ended with status 1") == 2 and "replica 0 ended" not in errors, errors
    assert "SIGTERM: what this step waits for has not come" in job.log(0), job.log(0)[-3000:]
    check_equal(job, 2)


@pytest.mark.thorough
def test_ranks_of_a_replica_do_not_wait_for_one_that_is_stopped_and_may_begin_apart(tmp_path):
    flags = ["--optimizer", "sharded", "--max-norm", "0.5", "--leave-within", "2"]
    job = Job(tmp_path, *flags, ranks=2, steps=0, silence_ms=3000)
    job.until(lambda: all(job.trains(replica) > 10 for replica in range(2)), LONG)

    # Rank 1 is stopped before it tells its part of a norm: rank 0 hears that they are out when the job has found that.
    held = job.hold(1, "norm", rank=1)
    job.until(held.exists)
    stopped, before = job.pid_of(1, rank=1), job.trains(0)
    os.kill(stopped, signal.SIGSTOP)
    try:
        job.until(lambda: "rejoin.errors.Cancelled: " in job.log(1), LONG)
        job.until(lambda: job.trains(0) > before + 10, LONG)
    finally:
        os.kill(stopped, signal.SIGCONT)

    # It comes back. Rank 1 takes up its first step long after rank 0, and needs the same norms.
    joined = job.hold(1, "joined", rank=1)
    held.unlink()
    job.until(joined.exists, LONG)
    job.until(lambda: "replica 1 is admitted" in (tmp_path / "coordinator.log").read_text(), LONG)
    before = job.trains(1)
    joined.unlink()
    job.until(lambda: job.trains(1) > before + 10, LONG)

    # All ranks wait for a step that does not come.
    children = Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children").read_text().split()
    replicas = [int(pid) for pid in children if b"REJOIN_REPLICA=" in Path(f"/proc/{pid}/environ").read_bytes()]
    assert len(replicas) == 2
    ends_with_the_coordinator_stopped(job, replicas)
    for replica in range(2):
        assert job.log(replica).count("SIGTERM: what this step waits for has not come") == 2, job.log(replica)[-3000:]
    check_equal(job, 2)


def test_sigterm_ends_the_wait_for_a_daemon_that_is_not_there(tmp_path):
    script = (
        "import torch, rejoin.torch\n"
        "session, model = rejoin.torch.Session.from_environment(), torch.nn.Linear(2, 2)\n"
        "session.attach(model, torch.optim.SGD(model.parameters()))\n"
        "assert not list(session.steps())\n"
    )
    trainer = subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, "REJOIN_SOCKET": str(tmp_path / "nobody.sock"), "REJOIN_REPLICA": "0"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert trainer.stderr is not None
        assert any("no Rejoin daemon at" in line for line in iter(trainer.stderr.readline, ""))
        trainer.terminate()
        assert trainer.wait(LONG) == 0, trainer.stderr.read()
    finally:
        trainer.kill()
        trainer.wait()


def test_a_rank_that_hangs_is_named_and_sigterm_ends_the_wait(monkeypatch):
    from rejoin.errors import Cancelled, Unavailable
    from rejoin.torch import _leaving, _ranks

    def ranks(check=lambda: None) -> _ranks.Ranks:
        one = _ranks.Ranks(0, _leaving.Leaving(), check)
        one._store, one._size = torch.distributed.HashStore(), 2
        one.publish(7, 1.5)
        return one

    one = ranks()
    one._store.set("sum/7/1", one._store.get("sum/7/0"))
    assert one.total(7, 1.5) == 3.0
    one.publish(8, 1.0)
    monkeypatch.setattr(_ranks, "LONGEST_WAIT_SECONDS", 0.3)
    with pytest.raises(Unavailable, match="rank 1 of this replica has not told its part of the norm of step 8"):
        one.total(8, 1.0)
    monkeypatch.setattr(_ranks, "LONGEST_WAIT_SECONDS", 60.0)
    monkeypatch.setattr(_leaving, "LONGEST_WAIT_SECONDS", 0.2)
    two = ranks()
    monkeypatch.setattr(_leaving, "_asked_at", time.monotonic())
    with pytest.raises(_leaving.Terminated):
        two.total(7, 1.5)
    monkeypatch.setattr(_leaving, "_asked_at", None)

    def out() -> None:
        raise Cancelled("this replica is out")

    three = ranks(out)
    with pytest.raises(Cancelled):
        three.total(7, 1.5)


def test_a_time_in_which_this_process_was_stopped_is_not_taken_for_a_rank_that_hangs(monkeypatch):
    from rejoin.torch import _leaving, _ranks

    one = _ranks.Ranks(0, _leaving.Leaving(), lambda: None)
    one._store, one._size = torch.distributed.HashStore(), 2
    one.publish(7, 1.5)
    looks = []

    def looked(keys):
        if len(looks) == 3:  # what the others tell is there a moment after all of them go on
            one._store.set("sum/7/1", one._store.get("sum/7/0"))
        looks.append(time.monotonic())
        return has(keys)

    has, clock = one._has, time.monotonic
    monkeypatch.setattr(one, "_has", looked)
    monkeypatch.setattr(time, "monotonic", lambda: clock() + (1000.0 if len(looks) > 2 else 0.0))
    assert one.total(7, 1.5) == 3.0
    assert looks[3] - looks[2] > 900.0


TERMINATED = """
import multiprocessing, os, signal, threading, time
from rejoin.torch._leaving import Leaving

def stays(ready, number):
    ready.send(number)
    time.sleep(60)

def forked():
    here, there = multiprocessing.Pipe()
    child = multiprocessing.Process(target=stays, args=(there, 7))
    child.start()
    assert here.recv() == 7
    child.terminate()
    child.join(30)
    print(child.exitcode, flush=True)

multiprocessing.set_start_method("fork")
first, second = Leaving(), Leaving()
first.listen()
second.listen()
first.listen()  # a second job of the same process
forked()
thread = threading.Thread(target=forked)
thread.start()
thread.join()
print(first.is_set(), second.is_set(), flush=True)
os.kill(os.getpid(), signal.SIGTERM)
third = Leaving()  # of a session that is made afterwards
third.listen()
print(first.is_set(), second.is_set(), third.is_set(), flush=True)
forked()
"""


def test_sigterm_is_heard_by_all_sessions_of_a_process_and_ends_the_processes_that_it_has_forked():
    done = subprocess.run([sys.executable, "-c", TERMINATED], capture_output=True, text=True, timeout=LONG)
    assert done.stdout.splitlines() == ["-15", "-15", "False False", "True True True", "-15"], done.stdout + done.stderr
