"""What rejoin-run says that a job waits for."""

import math
import os
import re
import signal
import subprocess
from types import SimpleNamespace

from rejoin import _run_waits
from rejoin._run_waits import Waits


class Waiting:
    """A job whose steps take so long, looked at as rejoin-run does, by a clock of its own."""

    def __init__(self, monkeypatch, by_torchrun=False):
        self.status, self.said, self.begun, self.now = {"committed": 0, "stopped": "", "waiting_for": []}, [], [], 1e6
        monkeypatch.setattr(_run_waits, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.script = None
        self.waits = Waits(
            lambda: self.status, self.said.append, lambda: self.begun.append(1), lambda _: self.script, by_torchrun
        )
        self.waits.begin(self.status)

    def goes_on(self, seconds, step=math.inf, waiting_for=("replica 1",)):
        """Give what is said in this time."""
        began, first = self.now, self.status["committed"]
        self.said.clear()
        for at in range(10, seconds + 1, 10):
            self.now = began + at
            since = at if step == math.inf else at % step
            self.status["committed"] = first + int(at // step)
            self.status["waiting_for"] = [one.replace("TIME", f"{since}000") for one in waiting_for]
            self.waits.look()
        return self.said[:]


def test_a_job_that_has_begun_says_what_it_has_stood_still_for_for_long(monkeypatch):
    job = Waiting(monkeypatch)
    told = ["the job waits for replica 1"]
    assert job.goes_on(60) == told and job.begun == []
    for _ in range(3):  # outages, each of which is told, also where a look sees two steps or fewer
        assert job.goes_on(60, step=5) == []
        assert job.goes_on(120) == told
    assert job.begun == [1] and job.waits.has_begun
    told = job.goes_on(600, waiting_for=["a later checkpoint: step 20 is committed (--roll-back-to 0@20)"])
    assert told == [
        "the job waits for a later checkpoint: step 20 is committed (--roll-back-to 0@20) "
        "(with rejoin-run REJOIN_ROLL_BACK_TO=STEP@STEPS in its environment)"
    ]


def test_a_step_that_takes_long_is_no_halt(monkeypatch):
    job = Waiting(monkeypatch)
    line = "replica 1 rank 0: its reduction of step 7, for TIME ms; replica 2 waits for it: chunk 3 of 8 of the sums"
    job.goes_on(120, step=60, waiting_for=[line])  # how long they take is not known yet
    assert job.goes_on(1200, step=60, waiting_for=[line]) == []
    said = job.goes_on(400, waiting_for=[line, line.replace("2 waits", "0 waits").replace("3 of 8", "4 of 8")])
    assert len(said) == 1 and "its reduction of step 7, for 180000 ms" in said[0]


def test_a_job_that_has_stopped_says_so_and_one_that_is_started_again_not_of_the_one_before(monkeypatch):
    job = Waiting(monkeypatch)
    job.status["stopped"] = (
        "the replicas' states differ at version 7; nobody can tell which of them is right. Start the coordinator, "
        "or all of several, again with --drop-replica 0@7 or --drop-replica 1@7 to go on without the one that is wrong"
    )
    assert job.goes_on(10) == []  # until all have registered
    (said,) = job.goes_on(600)
    assert "is right. Its processes wait" in said and "Ctrl-C" in said and "--drop-replica" not in said
    job.waits.stop()
    assert job.waits.look_at == math.inf and job.waits.has_begun


def test_a_script_that_hangs_when_its_replica_is_out_is_told_of_once(monkeypatch):
    job = Waiting(monkeypatch)
    job.goes_on(100, step=5)
    next_of_it = "its trainers have to be started again"
    out = {"replica": 1, "reason": "it hangs: replica 0 waits", "next": next_of_it, "for_ms": 90_000}
    job.status["out"], began = [out], job.now - 200

    def said(script, **changes):
        job.script = script
        out.update({"next": next_of_it, "for_ms": 90_000, **changes})
        return job.goes_on(20, step=5)

    assert said(None) == [], "it has ended, and is started again"
    assert said((7, job.now - 50)) == said((7, job.now - 85)) == [], "it has begun since, or just before, and compiles"
    assert said((7, began), next="it may be taken back until step 9 is committed") == []
    assert said((7, began), for_ms=30_000) == []
    (line,) = said((7, began), next=f"its daemon has to reach this coordinator (…), and then {next_of_it}")
    assert "replica 1 is out of the job for 90 s, and its script, process 7, does not end" in line
    assert "kill -9 7" in line and line.endswith("it hangs: replica 0 waits")
    assert said((7, began)) == []
    assert len(said((8, began))) == 1


def test_a_coordinator_that_was_started_again_and_knows_no_times_hides_no_script_that_hangs(monkeypatch):
    job = Waiting(monkeypatch)
    out = {"replica": 1, "reason": "it hangs", "next": "its trainers have to be started again", "for_ms": 40_000}
    job.status["out"], job.script = [out], (7, job.now - 200)
    assert job.goes_on(10, step=5) == []
    del out["for_ms"]
    assert job.goes_on(10, step=5) == []
    (line,) = job.goes_on(10, step=5)
    assert "out of the job for 60 s, and its script, process 7," in line
    job.script = (8, job.now)
    assert job.goes_on(300, step=5) == [], "it has begun since"
    job.status["out"] = []
    assert job.goes_on(30, step=5) == []
    job.status["out"] = [out]
    assert job.goes_on(60, step=5) == []
    assert len(job.goes_on(10, step=5)) == 1


def test_of_several_ranks_that_do_not_end_it_is_not_torchrun_that_hangs(monkeypatch):
    job = Waiting(monkeypatch, by_torchrun=True)
    out = {"replica": 1, "reason": "it hangs", "next": "its trainers have to be started again", "for_ms": 90_000}
    job.status["out"], job.script = [out], (7, job.now - 200)
    (line,) = job.goes_on(10, step=5)
    assert "its torchrun, process 7, does not end: one of the ranks" in line
    assert "pgrep -P 7" in line and "py-spy dump --pid 7" not in line and "kill -9 7" in line


def test_ranks_that_do_not_end_are_named_and_of_them_those_that_are_stopped(monkeypatch):
    job = Waiting(monkeypatch, by_torchrun=True)
    out = {"replica": 1, "reason": "it hangs", "next": "its trainers have to be started again", "for_ms": 90_000}
    job.status["out"], job.script = [out], (os.getpid(), job.now - 200)  # this process is the torchrun
    ranks = [subprocess.Popen(["sleep", "1000"], env={**os.environ, "RANK": str(rank)}) for rank in range(2)]
    try:
        (line,) = job.goes_on(10, step=5)
        assert re.search(r"is stopped: rank 0, process \d+; rank 1, process \d+\. See where", line), line
        os.kill(ranks[1].pid, signal.SIGSTOP)
        assert os.waitpid(ranks[1].pid, os.WUNTRACED)[0] == ranks[1].pid
        job.waits._hang.clear()
        (line,) = job.goes_on(10, step=5)
        assert f"or is stopped: rank 1, process {ranks[1].pid}, is stopped (SIGSTOP). See where" in line, line
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
