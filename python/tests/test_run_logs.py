"""The logs of rejoin-run's scripts, whatever happens to their disk, to who writes them, and to rejoin-run."""

import os
import resource
import signal
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from test_run import job_of, until  # noqa: E402
from test_waits import is_there  # noqa: E402

from rejoin._run_logs import Logs  # noqa: E402


@pytest.fixture
def log(tmp_path):
    return tmp_path / "replica0.log"


@pytest.fixture
def logs(log):
    its = Logs([log])
    yield its
    its.close()
    its._writer.wait(60)  # nobody has the other ends any more


def say(logs: Logs, log: Path, said: str) -> str:
    """Give why something is left out."""
    os.write(logs.end_for(log), said.encode())
    return logs.wait()


def test_a_log_that_takes_no_more_says_how_much_is_not_there(logs, log):
    def may_have(most: int) -> None:
        resource.prlimit(logs._writer.pid, resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))

    may_have(10)
    assert say(logs, log, "a line\nhalf") == "File too large"
    assert log.read_text() == "a line\nhal"
    assert say(logs, log, "one, and more\n") == "File too large"
    may_have(12)
    assert say(logs, log, "others\n") == "File too large"
    may_have(resource.RLIM_INFINITY)
    assert say(logs, log, "goes on") == ""
    told = "... 22 bytes were left out, since this file did not take them: File too large\n"
    assert log.read_text() == f"a line\nhal\n.\n{told}goes on"
    log.unlink()  # which makes room
    assert say(logs, log, ", without an end") == ""
    assert log.read_text() == ", without an end"
    may_have(20)
    assert say(logs, log, " last words") == "File too large"
    may_have(resource.RLIM_INFINITY)
    assert logs.wait() == "", "who says no more is heard to the end, too"
    told = "... 7 bytes were left out, since this file did not take them: File too large\n"
    assert log.read_text() == f", without an end las\n{told}"


def test_who_writes_logs_hears_no_signals_and_is_followed_by_another(log):
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})  # as rejoin-run
    logs = Logs([log])
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    first = logs._writer.pid
    assert os.getsid(first) == first
    for ends in (signal.SIGTERM, signal.SIGINT):
        os.kill(first, ends)
    assert say(logs, log, "one\n") == "" and not logs.keep()
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    assert say(logs, log, "two\n") == ""
    logs._started = float("inf")  # just now
    assert not logs.keep() and logs.again_at == float("inf")
    logs._started = 0.0
    assert logs.keep() == "who writes the logs of the scripts has ended with signal SIGKILL, and is started again"
    second = logs._writer
    assert second.pid != first
    second.kill()
    os.waitid(os.P_PID, second.pid, os.WEXITED | os.WNOWAIT)
    logs._started = 0.0
    assert logs.keep() == "" and logs._writer is not second, "it is told once a minute"
    assert say(logs, log, "three\n") == ""
    assert log.read_text() == "one\ntwo\nthree\n"
    logs.close()
    logs._writer.wait(60)


def test_where_nobody_can_write_logs_no_script_begins(log, tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho No module named encodings >&2\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(OSError, match=r"python -IS .*ended with status 3.*--show.*\nNo module named encodings"):
        Logs([log])


def test_a_script_that_waits_for_no_reader_leaves_that_to_none_of_its_successors(logs, log):
    os.set_blocking(logs.end_for(log), False)  # asyncio's connect_write_pipe(sys.stdout), node
    assert os.get_blocking(logs.end_for(log))


# More than a pipe holds.
SAYS = "for i in {1..3}; do head -c 1000000 /dev/zero; done"


def test_scripts_need_no_rejoin_run_for_what_they_say(tmp_path, log):
    goes_on, said = tmp_path / "goes_on", tmp_path / "said"
    leaves = "trap 'for i in {1..3}; do head -c 1000000 /dev/zero; done; echo last words; exit 0' TERM"
    program = f"{leaves}; touch {tmp_path}/waits; until [[ -e {goes_on} ]]; do sleep 0.02; done; {SAYS}; touch {said}; "
    program += "while :; do sleep 0.02; done"
    more = f"\n    log = Path({str(log)!r})\n"
    more += f"""
    def started(self, number):
        Path({str(tmp_path)!r}, "writer").write_text(str(self._logs._writer.pid))
"""
    job = job_of(tmp_path, program, more=more)
    until(lambda: (tmp_path / "waits").exists() and (tmp_path / "writer").exists())
    job.send_signal(signal.SIGSTOP)
    goes_on.touch()
    until(said.exists)
    job.kill()
    job.wait(60)
    until(lambda: not is_there(int((tmp_path / "writer").read_text())))
    words = log.read_bytes()
    assert words.endswith(b"last words\n") and len(words) == 6_000_000 + len("last words\n")


def test_what_a_script_has_said_is_there_when_its_end_is_told(tmp_path, log):
    more = f"\n    log = Path({str(log)!r})\n"
    twice = f"[[ -e {tmp_path}/once ]] && echo ends && exit 0; touch {tmp_path}/once"
    # Somebody still has its end of the pipe, and is not waited for.
    leaves = f"(until [[ -e {tmp_path}/late ]]; do sleep 0.02; done; echo late) & {twice}"
    job = job_of(tmp_path, f"{leaves}; {SAYS}; echo; echo \"NameError: name 'lodaer'\"; exit 1", more=more)
    _, told = job.communicate(timeout=60)
    assert job.returncode == 0, told
    assert told.endswith("NameError: name 'lodaer'\n")
    assert log.read_bytes().endswith(b"\nNameError: name 'lodaer'\nends\n")
    (tmp_path / "late").touch()
    until(lambda: log.read_bytes().endswith(b"ends\nlate\n"))


def test_a_job_whose_logs_take_no_more_goes_on_and_says_so(tmp_path, log):
    more = f"""
        import resource
        resource.prlimit(self._logs._writer.pid, resource.RLIMIT_FSIZE, (0, -1))
        self._waits.begin({{"committed": 0}})
        self._waits.look_at = 0.0

    log = Path({str(log)!r})

    def _look_at_the_logs(self):
        super()._look_at_the_logs()
        self._waits.look_at = 0.0 if self._left_out_said_at < 0 else float("inf")
        if self._left_out_said_at > 0:
            Path({str(tmp_path)!r}, "told").touch()

    def _status(self):
        return {{"committed": 1, "finished": True}}
"""
    job = job_of(tmp_path, f"set -e; until [[ -e {tmp_path}/told ]]; do echo word; done", more=more)
    _, told = job.communicate(timeout=60)
    assert job.returncode == 0, told
    assert told == (
        f"rejoin-run: the scripts' logs in {tmp_path} do not take what they say (File too large), which is left out: "
        "see to it; the scripts go on\n"
        "rejoin-run: finished: step 1 is committed\n"
    )


def test_a_script_that_ends_while_the_disk_is_full_is_told_with_its_last_words(tmp_path, log):
    more = f"""
        run._FULL_TRIED_EVERY_SECONDS = 0.1

    log = Path({str(log)!r})

    def _disk_is_full(self):
        return True
"""
    once = f"[[ -e {tmp_path}/once ]] && exit 0; touch {tmp_path}/once; echo OSError; exit 1"
    _, told = job_of(tmp_path, once, more=more).communicate(timeout=60)
    assert told == (
        "rejoin-run: replica 0 ended with status 1, and is tried again every 0.1 s: the disk of "
        f"{tmp_path} is full: free space. {log} ends so:\nOSError\n"
    )
