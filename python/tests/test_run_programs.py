"""What rejoin-run does with programs that have a shell before them, a terminal, a full disk, or nothing to do."""

import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from test_run import job_of, until  # noqa: E402
from test_waits import is_there  # noqa: E402

from rejoin._job_variables import of_scripts  # noqa: E402
from rejoin._kept import Kept  # noqa: E402
from rejoin._run_commands import by_torchrun  # noqa: E402
from rejoin._run_ends import at_the_end  # noqa: E402


# As most people's train.sh: a shell, which SIGTERM ends at once, and behind it the program that trains.
# `timeout` makes a process group; and who reads what the program says would be missed, if it ended before that.
def behind_a_shell(directory: Path, before: str = "", behind: str = "") -> str:
    program = f"trap 'sleep 0.3; echo saves; touch {directory}/left; exit 0' TERM; while :; do sleep 0.05; done"
    return f"{before} bash -c {shlex.quote(f'echo $$ >> {directory}/trainers; {program}')} {behind}; exit $?"


WAYS = [("", ""), ("timeout 1h", ""), ("", "2>&1 | tee /dev/null")]


def trainers(directory: Path) -> list[int]:
    told = directory / "trainers"
    return [int(pid) for pid in told.read_text().split()] if told.exists() else []


@pytest.mark.parametrize("before, behind", WAYS)
def test_who_trains_behind_a_shell_is_asked_to_leave_and_waited_for(tmp_path, before, behind):
    job = job_of(tmp_path, behind_a_shell(tmp_path, before, behind))
    until(lambda: trainers(tmp_path))
    job.terminate()
    _, told = job.communicate(timeout=60)
    assert job.returncode == 0, told
    assert "killed" not in told.replace("they are killed", "")
    assert (tmp_path / "left").exists()
    assert not is_there(trainers(tmp_path)[0])


@pytest.mark.parametrize("before, behind", WAYS)
def test_who_trains_behind_a_shell_does_not_outlive_it(tmp_path, before, behind):
    job = job_of(tmp_path, f"echo $$ > {tmp_path}/shell; {behind_a_shell(tmp_path, before, behind)}")
    until(lambda: trainers(tmp_path))
    os.kill(int((tmp_path / "shell").read_text()), signal.SIGKILL)
    until(lambda: len(trainers(tmp_path)) == 2)
    until(lambda: not is_there(trainers(tmp_path)[0]), 10)
    assert not (tmp_path / "left").exists()
    job.terminate()
    _, told = job.communicate(timeout=60)
    assert job.returncode == 0, told


def test_what_a_program_leaves_running_that_ends_well_goes_on(tmp_path):
    uploads = tmp_path / "uploads"
    job = job_of(tmp_path, f"(sleep 1000 & echo $! > {uploads}) >&/dev/null; exit 0")
    _, told = job.communicate(timeout=60)
    assert (job.returncode, told) == (0, "")
    (pid,) = uploads.read_text().split()
    assert is_there(int(pid))
    os.kill(int(pid), signal.SIGKILL)


def test_a_program_that_asks_the_terminal_hears_that_there_is_nobody(tmp_path):
    ours, its = pty.openpty()
    job = job_of(tmp_path, f"read -r line; echo $? > {tmp_path}/heard", stdin=its)
    _, told = job.communicate(timeout=60)
    os.close(ours)
    os.close(its)
    assert (job.returncode, told, (tmp_path / "heard").read_text()) == (0, "", "1\n")


# The system cuts the names of programs at 15 bytes, in the midst of a character; and logs are rotated.
def test_neither_names_that_are_no_text_nor_logs_that_are_gone_end_the_job(tmp_path):
    log = tmp_path / "replica0.log"
    program = tmp_path / "обучение_модели.sh"
    program.write_text(f"#!/bin/sh\nuntil [ -e {tmp_path}/twice ]; do sleep 0.05; done\n")
    program.chmod(0o755)
    dies = f"rm {log}; [[ -e {tmp_path}/once ]] && touch {tmp_path}/twice && exit 0; touch {tmp_path}/once; exit 1"
    more = f"\n    log = Path({str(log)!r})\n"
    job = job_of(tmp_path, f"exec {shlex.quote(str(program))}", dies, more=more)
    _, told = job.communicate(timeout=60)
    assert (job.returncode, told) == (0, "rejoin-run: replica 1 ended with status 1, and is started again\n")


# Its last words are told once; and before the job's first step its deaths need not come within a minute.
def test_a_program_that_dies_again_and_again_is_told_with_its_last_words(tmp_path):
    log = tmp_path / "replica0.log"
    log.write_text("of an earlier job\n")
    more = f"""
        self._waits.begin({{}})
        self._arguments.deaths_a_minute = 3

    log = Path({str(log)!r})

    def _status(self):
        return {{"committed": 0}}

    def _again(self, process, what):
        process.died = [at - 60 for at in process.died]
        return super()._again(process, what)
"""
    job = job_of(tmp_path, "echo Traceback; echo \"NameError: name 'lodaer', $$\"; exit 1", more=more)
    _, told = job.communicate(timeout=60)
    words = f"{log} ends so:\nTraceback\nNameError: name 'lodaer', N\n"
    again = "rejoin-run: replica 0 ended with status 1, and is started again"
    assert re.sub(", [0-9]+\n", ", N\n", told) == f"{again}. {words}" + 2 * f"{again}\n" + (
        f"rejoin-run: replica 0 ended with status 1, as often before: the job ends. {words}"
    )


# It holds the decisions, and those that live hold the state: the job waits for who can make room.
def test_a_job_on_a_full_disk_waits_and_says_so_once(tmp_path):
    goes_on = tmp_path / "goes_on"
    more = f"""
        again = Path(sys.argv[1]) / "again"
        program = f"[[ -e {{again}} ]] && touch {goes_on} && exec sleep 60; touch {{again}}; exit 4"
        self._start(run.Kept("coordinator", ["bash", "-c", program], {{**os.environ}}, None))
        self._arguments.deaths_a_minute, run._FULL_TRIED_EVERY_SECONDS = 0, 0.1

    def _disk_is_full(self):
        return True
"""
    leaves = f"until [[ -e {goes_on} ]]; do sleep 0.05; done"
    job = job_of(tmp_path, leaves, more=more)
    _, told = job.communicate(timeout=60)
    assert job.returncode == 0, told
    assert told == (
        "rejoin-run: coordinator ended with status 4, and is tried again every 0.1 s: the disk of "
        f"{tmp_path} is full: free space; the job waits\n"
    )


def test_a_terminal_that_is_closed_lets_replicas_leave_as_ctrl_c_does(tmp_path):
    leaves = f"trap 'touch {tmp_path}/left; exit 0' TERM; touch {tmp_path}/waits; while :; do sleep 0.05; done"
    job = job_of(tmp_path, leaves)
    until((tmp_path / "waits").exists)
    job.send_signal(signal.SIGHUP)
    _, told = job.communicate(timeout=60)
    assert job.returncode == 0 and (tmp_path / "left").exists(), told


def test_what_nohup_starts_does_not_hear_of_its_terminal():
    asks = "import signal; from rejoin._kept import WAITED_FOR; print(signal.SIGHUP in WAITED_FOR)"
    for ignores, heard in (("trap '' HUP; ", "False"), ("", "True")):
        command = ["bash", "-c", f'{ignores}exec "$@"', "bash", sys.executable, "-c", asks]
        assert subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip() == heard


def test_a_job_whose_scripts_train_nothing_says_so(tmp_path):
    more = """
        self._waits.first = 0

    def _status(self):
        return {"finished": False, "committed": 0}
"""
    _, told = job_of(tmp_path, "exit 0", more=more).communicate(timeout=60)
    assert told == "rejoin-run: no step was committed: the scripts have ended without one\n"


# Scripts that stop early end so, too.
@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("finished", [False, True])
def test_scripts_that_end_well_before_the_job_does_are_told_of(tmp_path, finished, goes_on):
    more = f"""
    committed = 15

    def _status(self):
        return {{"finished": {finished}, "committed": self.committed}}

    def _look_at_an_end(self, replica):
        super()._look_at_an_end(replica)
        self.committed += {goes_on} and replica is self._replicas[0]
        self._waits.first, self._waits.look_at = 0, 0

    def _look_at_the_logs(self):
        Path(sys.argv[1], "ended").touch()
"""
    waits = f"until [[ -e {tmp_path}/ended ]]; do sleep 0.05; done"
    job = job_of(tmp_path, "exit 0", waits, more=more)
    _, told = job.communicate(timeout=60)
    assert (job.returncode, told) == (
        0,
        f"rejoin-run: finished: step {15 + goes_on} is committed\n"
        if finished
        else (
            "rejoin-run: replica 0 ended with status 0 before the job's end, and is not started again, as it would be "
            "after any other: the job goes on with 1 of 2 replicas\n"
        )
        * goes_on
        + f"rejoin-run: all scripts have ended with status 0, and the job is not finished: step {15 + goes_on} of 60 "
        "is committed, and what they have saved is what is left of it\n",
    )


def test_a_job_without_an_end_of_its_own_is_not_called_unfinished():
    status = {"finished": False, "committed": 15}
    assert at_the_end(status, 0, 0, set()) == (0, ["all scripts have ended with status 0: step 15 is committed"])
    assert "is not finished: step 15 of 60 is" in at_the_end(status, 0, 60, set())[1][0]


# A shell may have the variables of another launcher's rank.
def test_scripts_hear_of_no_other_rank_than_theirs():
    shell = {
        "REJOIN_RANK": "1",
        "RANK": "3",
        "LOCAL_RANK": "3",
        "WORLD_SIZE": "8",
        "REJOIN_ADVERTISE": "host",
        "HOME": "/",
    }
    assert of_scripts(shell, 1) == {"REJOIN_RANK": "0", "REJOIN_RANKS": "1", "HOME": "/"}
    assert of_scripts(shell, 2) == {"REJOIN_RANKS": "2", "HOME": "/"}


def test_torchrun_starts_the_python_that_was_named():
    assert by_torchrun(2, ["/venv/bin/python3.11", "x.py"])[-3:] == ["/venv/bin/python3.11", "-u", "x.py"]
    assert by_torchrun(2, ["./my_python.sh", "x.py"])[-2:] == ["./my_python.sh", "x.py"]


# It would roll the job back again after the next loss.
def test_a_word_of_the_operators_is_not_given_again_once_the_job_has_gone_on(tmp_path):
    log = tmp_path / "words"
    more = f"""
        program = "echo ${{REJOIN_ROLL_BACK_TO-none}} >> {log}; exit 1"
        variables = {{**os.environ, "REJOIN_ROLL_BACK_TO": "0"}}
        self._waits.begin({{"committed": 0}})
        self._coordinator = self._start(run.Kept("coordinator", ["bash", "-c", program], variables, None))

    def _again(self, process, what):
        self._waits.look()
        return super()._again(process, what)

    def _status(self):
        return {{"finished": False, "committed": int(Path({str(log)!r}).read_text().count("\\n") > 1)}}
"""
    job = job_of(tmp_path, f"until [[ $(wc -l < {log}) == 3 ]]; do sleep 0.05; done", more=more)
    _, told = job.communicate(timeout=60)
    assert log.read_text() == "0\n0\nnone\n", told


# Which tells of its worker's end in a table of its own.
def test_of_a_log_of_torchruns_the_workers_last_words_are_shown(tmp_path):
    log = tmp_path / "replica0.log"
    kept = Kept("replica 0", [], {}, log)
    log.write_bytes(
        b"\xff begins\nNameError: name 'lodaer'\nE1129 api.py:9] failed (exitcode: 1) local_rank: 0\n====\n"
    )
    assert kept.last_words() == f"{log} ends so:\n\udcff begins\nNameError: name 'lodaer'"
    log.write_text("one line")
    assert kept.last_words() == f"{log} ends so:\none line"


# Python starts a process that does so when all that could need it have died, and that nobody is to kill before that.
# Until Python's tracker has begun nothing tells it from the program that has started it.
SHARES = """
import os, signal, sys, time
from multiprocessing.resource_tracker import _resource_tracker
from multiprocessing.shared_memory import SharedMemory

shared = SharedMemory(create=True, size=8)
while b"resource_tracker" not in open(f"/proc/{_resource_tracker._pid}/cmdline", "rb").read():
    time.sleep(0.01)
if os.fork() == 0:
    signal.pause()
with open(sys.argv[1], "w") as names:
    names.write(shared.name)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_program_that_was_killed_has_left_in_dev_shm_is_removed(tmp_path):
    name = tmp_path / "name"
    waits = f"[[ -e {name} ]] && {{ until [[ ! -e /dev/shm/$(< {name}) ]]; do sleep 0.05; done; exit 0; }}"
    job = job_of(tmp_path, f"{waits}; exec {sys.executable} -c {shlex.quote(SHARES)} {name}")
    _, told = job.communicate(timeout=60)
    assert job.returncode == 0, told
    # The tracker warns of what it has found, before or afterwards.
    assert "rejoin-run: replica 0 ended with signal SIGKILL, and is started again\n" in told, told


def test_a_directory_whose_name_is_no_text_is_refused_and_shown_as_it_is(tmp_path):
    directory = os.fsencode(tmp_path) + b"/\xe9t\xc3\xa9"
    command = [sys.executable, "-m", "rejoin.run", "--directory", directory, "--", "true"]
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    job = subprocess.run(command, env={**os.environ, **locale}, capture_output=True, timeout=60)
    told = b"rejoin-run: the name of " + directory + b" is no text in UTF-8, and daemons take no other"
    assert job.returncode == 1 and job.stderr.startswith(told), job.stderr
