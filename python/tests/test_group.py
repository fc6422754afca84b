"""The process group of those who train a step: it follows the session's members, and nobody waits for a lost one."""

import re
import threading
import time
from datetime import timedelta

import pytest

pytest.importorskip("torch")

from test_job import Job, check_equal  # noqa: E402

from rejoin.distributed import Options  # noqa: E402
from rejoin.torch._group import SessionGroup  # noqa: E402


def test_a_replica_that_dies_or_stands_still_in_a_collective_ends_it_for_the_others(tmp_path):
    job = Job(tmp_path, "--group", replicas=3, steps=60, silence_ms=2000, kill={1: ("group", 15)})
    job.until(lambda: job.killed(1) and job.trains(1) > 5)
    job.kill(2, "group stands", 30)
    errors = job.wait()
    assert "replica 1 ended with signal SIGKILL" in errors, errors
    check_equal(job, 3)
    log = job.log(0)
    sums = {int(step): (int(size), float(sum_)) for step, size, sum_ in re.findall(r"group (\d+) (\d+) (\S+)", log)}
    assert {size for size, _ in sums.values()} >= {2, 3}, log
    for step, (size, sum_) in sums.items():
        assert sum_ in ({1.0}, {3.0, 4.0}, {6.0})[size - 1], (step, size, sum_)
    broken = re.findall(r"group (\d+) failed after (\S+) s: (.*)", log)
    assert len(broken) >= 2, log
    assert not {int(step) for step, _, _ in broken} & set(sums)
    assert "a replica was lost" in broken[-1][2], "who stands still is put out, and not waited for until it has ended"
    assert all(float(seconds) < 20 for _, seconds, _ in broken), broken


# One that is in C++ when the interpreter ends would end the process by a signal.
def test_the_thread_that_looks_at_the_members_has_ended_when_the_group_is_shut_down():
    class Members:
        def __init__(self) -> None:
            self.looked_at = threading.Event()

        def set_card(self, card: str) -> None:
            self.card = card

        def intact(self, milliseconds: int) -> bool:
            self.looked_at.set()
            time.sleep(milliseconds / 1000)
            return True

    members = Members()
    options = Options(listen="127.0.0.1:0", device="host")
    group = SessionGroup(members, 0, timedelta(seconds=10), options)
    group.begin(1, 1, True, [(0, members.card)])
    assert members.looked_at.wait(30)
    group.shutdown()
    assert "rejoin-members" not in [thread.name for thread in threading.enumerate()]
