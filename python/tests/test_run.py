"""What rejoin-run does with processes that end, or that can't be started."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("torch")

from test_job import RUNNING  # noqa: E402
from test_waits import is_there  # noqa: E402

from rejoin import run  # noqa: E402
from rejoin._job_variables import of_scripts  # noqa: E402

# A job of these programs in the place of replicas, without a coordinator and daemons.
JOB = """
import argparse, os, signal, sys
from pathlib import Path
from rejoin import run

class Job(run.Job):
    log = None

    def start(self):
        self._logs = run.Logs([self.log]) if self.log else None
        for number, program in enumerate(sys.argv[2:]):
            kept = run.Kept(f"replica {number}", ["bash", "-c", program], None, self.log, self._logs)
            self._replicas.append(self._start(kept))
            self.started(number)

    def started(self, number):
        pass
"""


def job_of(directory: Path, *programs: str, more: str = "", leave_within: float = 60, stdin=None) -> subprocess.Popen:
    script = JOB + more
    script += f"\nsettings = argparse.Namespace(deaths_a_minute=10, ranks=1, steps=60, leave_within={leave_within})\n"
    script += "sys.exit(Job(settings, Path(sys.argv[1])).run())\n"
    command = [sys.executable, "-c", script, str(directory), *programs]
    job = subprocess.Popen(command, stdin=stdin, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                           start_new_session=stdin is not None)  # fmt: skip
    RUNNING.append(job)
    return job


def until(condition, limit: float = 60) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_nothing_is_started_again_once_the_job_ends(tmp_path):
    starts, ready = tmp_path / "starts", tmp_path / "ready"
    # The first one leaves when the second one's pause would long be over, which is 1.5 s after its fifth death.
    leaves = f"trap 'for i in {{1..40}}; do sleep 0.1; done; exit 0' TERM; touch {ready}; while :; do sleep 0.05; done"
    dies = f"until [[ -e {ready} ]]; do sleep 0.05; done; echo >> {starts}; exit 3"
    more = """
    def _again(self, process, what):
        goes_on = super()._again(process, what)
        assert len(process.died) > 1 or process.again_at <= __import__("time").monotonic(), "at once the first time"
        if len(process.died) == 5:
            os.kill(os.getpid(), signal.SIGTERM)  # is heard before the pause is over, however slow this machine is
        return goes_on
"""
    job = job_of(tmp_path, leaves, dies, more=more)
    _, told = job.communicate(timeout=60)
    assert job.returncode == 0, told
    assert told.count("replica 1 ended with status 3, and is started again") == 5, told
    assert starts.read_text().count("\n") == 5


def test_a_death_by_any_signal_is_told_and_mended(tmp_path):
    died = tmp_path / "died"
    job = job_of(tmp_path, f"[[ -e {died} ]] && exit 0; touch {died}; kill -40 $$")
    _, told = job.communicate(timeout=60)
    assert (job.returncode, told) == (0, "rejoin-run: replica 0 ended with signal 40, and is started again\n")


@pytest.mark.parametrize(
    "error, told_so",
    [
        ('BlockingIOError(11, "Resource temporarily unavailable")', "[Errno 11] Resource temporarily unavailable"),
        ('subprocess.SubprocessError("Exception occurred in preexec_fn.")', "Exception occurred in preexec_fn."),
    ],
)
def test_what_cannot_be_started_again_is_tried_later(tmp_path, error, told_so):
    more = """
        import subprocess
        one = self._replicas[number]
        def start(once=[one.start]):
            if once:
                one.again = once.pop()
                raise ERROR
            one.again()
        one.start = start
""".replace("ERROR", error)
    died = tmp_path / "died"
    job = job_of(tmp_path, f"[[ -e {died} ]] && exit 0; touch {died}; exit 1", more=more)
    _, told = job.communicate(timeout=60)
    assert job.returncode == 0, told
    assert f"replica 0 can't be started ({told_so}), and is started again" in told


# It hangs, with a program that it has started; and another leaves as it should.
@pytest.mark.parametrize("by", ["time", "a second signal"])
def test_a_replica_that_does_not_leave_is_killed_with_what_it_has_started(tmp_path, by):
    pids, left = tmp_path / "pids", tmp_path / "left"
    hangs = f"trap '' TERM; sleep 1000 & echo $$ $! > {pids}.new; mv {pids}.new {pids}; kill -STOP $$"
    leaves = f"trap 'touch {left}; exit 0' TERM; touch {tmp_path}/waits; while :; do sleep 0.05; done"
    job = job_of(tmp_path, hangs, leaves, leave_within=1 if by == "time" else 60)
    until(lambda: pids.exists() and (tmp_path / "waits").exists())
    job.terminate()
    if by == "a second signal":
        until(left.exists)
        time.sleep(run._ONE_SIGNAL_SECONDS)
        job.send_signal(signal.SIGINT)
    _, told = job.communicate(timeout=20)
    assert job.returncode == 0, told
    assert "replica 0 has not left, and is killed" in told
    assert "replica 1 has not left" not in told
    until(lambda: not any(is_there(int(pid)) for pid in pids.read_text().split()), 10)


def test_a_signal_that_comes_twice_at_once_kills_nobody(tmp_path):
    leaves = f"trap 'sleep 1; exit 0' TERM; touch {tmp_path}/waits; while :; do sleep 0.05; done"
    more = f"""
    def _end(self):
        super()._end()
        if not os.path.exists("{tmp_path}/twice"):
            open("{tmp_path}/twice", "w").close()
            os.kill(os.getpid(), signal.SIGTERM)
"""
    job = job_of(tmp_path, leaves, more=more)
    until((tmp_path / "waits").exists)
    job.terminate()
    _, told = job.communicate(timeout=60)
    assert job.returncode == 0, told
    assert (tmp_path / "twice").exists()
    assert "killed" not in told.replace("they are killed", "")


def test_workers_end_with_the_torchrun_that_started_them(tmp_path):
    script = tmp_path / "sleeps.py"
    script.write_text(
        "import os, pathlib, signal, sys\n"
        "pathlib.Path(sys.argv[1], f'{os.getppid()}.{os.getpid()}').touch()\n"
        "signal.pause()\n"
    )
    command = [sys.executable, "-m", "rejoin.run", "--replicas", "1", "--ranks", "2", "--directory", str(tmp_path),
               "--", sys.executable, str(script), str(tmp_path)]  # fmt: skip
    job = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    RUNNING.append(job)

    def workers() -> list[tuple[int, int]]:
        pairs = [each.name.split(".") for each in tmp_path.glob("[0-9]*.[0-9]*")]
        return [(int(parent), int(pid)) for parent, pid in pairs]

    until(lambda: len(workers()) == 2)
    before = workers()
    (torchrun,) = {parent for parent, _ in before}
    os.kill(torchrun, signal.SIGKILL)
    until(lambda: not any(is_there(pid) for _, pid in before), 10)
    until(lambda: len(workers()) == 4)  # of another torchrun
    job.terminate()
    job.communicate(timeout=60)


def test_a_worker_whose_torchrun_was_killed_before_it_had_begun_does_not_begin(tmp_path):
    began, worker = tmp_path / "began", Path(run.__file__).with_name("_torchrun_worker.py")
    # The worker's time begins when the shell is gone, which stands for torchrun, and begins it.
    begins = 'export _TORCHRUN=$$; (while kill -0 $$; do sleep 0.02; done; exec "$@") & '
    command = ["bash", "-c", begins, "bash", sys.executable, str(worker), "touch", str(began)]
    torchrun = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert torchrun.wait(60) == 0
    assert torchrun.stdout is not None and torchrun.stdout.read() == b""  # the worker has ended
    assert not began.exists()
    alive = [sys.executable, str(worker), "touch", str(began)]
    assert subprocess.run(alive, env={**os.environ, "_TORCHRUN": str(os.getpid())}, timeout=60).returncode == 0
    assert began.exists()


# The real thing, with a coordinator and a daemon, and a replica that never comes.
def started(directory: Path, patch: str = "") -> subprocess.Popen:
    script = f"import sys\nfrom rejoin import run\n{patch}\nsys.exit(run.main(sys.argv[1:]))"
    command = [sys.executable, "-c", script, "--replicas", "1", "--steps", "20", "--directory", str(directory)]
    job = subprocess.Popen([*command, "--", "sleep", "60"], stderr=subprocess.PIPE, text=True)
    RUNNING.append(job)
    return job


def lines_until(job: subprocess.Popen, text: str) -> str:
    told = ""
    for line in job.stderr:
        told += line
        if text in line:
            return told
    pytest.fail(told)


def test_what_the_job_waits_for_is_told_once(tmp_path):
    job = started(tmp_path, "from rejoin import _run_waits; _run_waits.LOOKS_EVERY_SECONDS = 0.2")
    lines_until(job, "the job waits for replica 0: 0 of 1 ranks have registered")
    time.sleep(1)
    job.terminate()
    assert "waits for" not in job.communicate(timeout=60)[1]


def test_a_job_that_is_finished_when_it_is_started_says_so(tmp_path):
    job = started(tmp_path, "run.Job._status = lambda self: {'finished': True, 'committed': 20}")
    lines_until(job, "this job is finished: step 20 is committed. Nothing is trained: give it more than --steps 20")
    job.terminate()
    job.communicate(timeout=60)


def test_a_job_that_ends_says_how_far_it_has_come(tmp_path):
    more = """
    def _status(self):
        return {"finished": True, "committed": 20}
"""
    _, told = job_of(tmp_path, "exit 0", more=more).communicate(timeout=60)
    assert told == "rejoin-run: finished: step 20 is committed\n"


@pytest.mark.parametrize("others", [False, True])
def test_a_job_whose_last_state_has_died_with_all_that_had_it_does_not_end_well(tmp_path, others):
    died = tmp_path / "died"
    more = """
    def _status(self):
        members = [{"replica": 0, "role": "contributor"}, {"replica": 1, "role": ROLE}]
        return {"finished": True, "committed": 20, "members": members}
""".replace("ROLE", repr("contributor" if others else "catching_up"))
    job = job_of(tmp_path, f"[[ -e {died} ]] && exit 0; touch {died}; kill -9 $$", "exit 0", more=more)
    _, told = job.communicate(timeout=60)
    assert "replica 0 ended with signal SIGKILL, and is started again" in told
    assert ("a final save, may not be done" in told, job.returncode) == ((False, 0) if others else (True, 1)), told


# What `rejoin status` is told is no address for each daemon of a job; nor are the names of another one's files.
def test_the_page_is_named_and_what_variables_say_of_another_daemon_is_not_taken(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setenv("REJOIN_STATUS", f"127.0.0.1:{other.getsockname()[1]}")
        for name in ("SOCKET", "ADDRESS_FILE"):
            monkeypatch.setenv(f"REJOIN_{name}", str(tmp_path / "other"))
        monkeypatch.setenv("REJOIN_COORDINATOR", "127.0.0.1:1")
        monkeypatch.setenv("REJOIN_STORE", "etcd:127.0.0.1:1")
        monkeypatch.setenv("REJOIN_JOB", "of-a-cluster")
        monkeypatch.setenv("REJOIN_ETCD_CA", "/nowhere")
        monkeypatch.setenv("REJOIN_TRANSPORT", "tcp")
        monkeypatch.setenv("REJOIN_DATA_LISTEN", os.environ["REJOIN_STATUS"])
        monkeypatch.setenv("REJOIN_ADVERTISE", "203.0.113.1")
        job = started(tmp_path)
        said = lines_until(job, "logs are in")
        page = json.loads((tmp_path / "coordinator.json").read_text())["status"]
        assert said == f"rejoin-run: the page is at http://{page}/; logs are in {tmp_path}\n"

        def nodes() -> int:
            with urllib.request.urlopen(f"http://{page}/status", timeout=10) as answer:
                status = json.load(answer)
            assert "node_role" not in status
            return status["coordinator_role"]["nodes"]

        until(lambda: nodes() == 1)
        assert not (tmp_path / "other").exists()
        job.terminate()
        told = job.communicate(timeout=60)[1]
    assert "is started again" not in told
    assert not {"REJOIN_DATA_LISTEN", "REJOIN_ADVERTISE"} & of_scripts(os.environ, 1).keys()


# It would have the same settings again.
def test_a_job_ends_at_once_where_the_settings_of_a_daemon_are_wrong(tmp_path):
    more = """
        output = Path(sys.argv[1]) / "node0.log"
        self._start(run.Kept("node0", ["bash", "-c", "echo what is wrong; exit 2"], None, output))
"""
    job = job_of(tmp_path, "trap 'exit 0' TERM; while :; do sleep 0.05; done", more=more)
    _, told = job.communicate(timeout=60)
    assert job.returncode == 1, told
    assert told == (
        "rejoin-run: node0 ended with status 2: its settings are wrong, and would be again: the job ends. "
        f"{tmp_path}/node0.log ends so:\nwhat is wrong\n"
    )


def test_the_page_is_named_again_when_it_has_moved(tmp_path):
    job = started(tmp_path)
    page = lines_until(job, "logs are in").split("http://")[1].split("/")[0]
    host, port = page.split(":")
    (pid,) = (int(each.name) for each in Path("/proc").glob("[0-9]*") if named(each, "coordinator", job.pid))
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as for connections that have ended
        job.send_signal(signal.SIGSTOP)  # or it might start the next one first
        os.kill(pid, signal.SIGKILL)
        until(lambda: bound(other, host, int(port)))
        job.send_signal(signal.SIGCONT)
        moved = lines_until(job, "now")
    assert "the page is at http://" in moved and page not in moved
    job.terminate()
    job.communicate(timeout=60)


def named(process: Path, name: str, parent: int) -> bool:
    try:
        words = (process / "cmdline").read_bytes().split(b"\0")
        return name.encode() in words and int((process / "stat").read_text().rpartition(")")[2].split()[1]) == parent
    except OSError:
        return False


def bound(other: socket.socket, host: str, port: int) -> bool:
    try:
        other.bind((host, port))
        other.listen()
    except OSError:
        return False
    return True


def test_a_second_one_in_the_same_directory_is_refused_and_leaves_the_first_ones_files(tmp_path):
    first = started(tmp_path)
    lines_until(first, "the page is at http://")
    before = (tmp_path / "coordinator.json").stat()
    second = started(tmp_path)
    _, told = second.communicate(timeout=60)
    assert (second.returncode, told) == (1, f"rejoin-run: another rejoin-run has its job in {tmp_path}\n")
    assert os.path.samestat((tmp_path / "coordinator.json").stat(), before)
    first.terminate()
    first.communicate(timeout=60)


def test_a_directory_too_long_for_sockets_is_refused_before_anything_starts(tmp_path):
    long = tmp_path / ("x" * 100)
    _, told = started(long).communicate(timeout=60)
    assert f"sockets in {long} would have names of {len(str(long)) + 11} characters, and the system takes 107" in told
    assert not (long / "coordinator.log").exists()


def test_a_full_disk_is_named(tmp_path):
    script = "import errno, os, pathlib, sys\nfrom rejoin import run\n"
    script += "def full(*_, **__): raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))\n"
    script += "pathlib.Path.write_text = full\nsys.exit(run.main(sys.argv[1:]))"
    command = [sys.executable, "-c", script, "--directory", str(tmp_path), "--", "true"]
    job = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (job.returncode, job.stderr) == (1, f"rejoin-run: {tmp_path}/job.key: No space left on device\n")
