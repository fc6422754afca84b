"""rejoin-run: a whole job on this machine. It starts the coordinator, and for each replica a daemon and the script.

    rejoin-run --replicas 3 --batch 32 --steps 1000 -- python train.py

What dies is started again, until the job is finished: kill -9 any of it. A script that ends with 0 is not, also before
the job's end, which is said. The exit status is 0 when each replica has ended with 0, or has left after a signal, and
the last line says how far the job has come, since scripts may stop early; 1 when the job was given up, could not start,
or lost all that had its last state before their scripts had ended; 2 for wrong arguments. A fresh directory is made in
the temporary one, and nobody removes it.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import http.client
import json
import math
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rejoin._ends import how
from rejoin._job_variables import of_daemons, of_scripts
from rejoin._kept import WAITED_FOR, Kept, adopt, bury
from rejoin._programs import path
from rejoin._run_commands import by_torchrun, run_parser, show_names_as_they_are
from rejoin._run_ends import EarlyEnds, at_the_end
from rejoin._run_logs import Logs
from rejoin._run_waits import Waits

_WRONG_SETTINGS, _CAN_NOT_WRITE = 2, 4  # of a daemon's exit statuses
_FULL_BYTES = 64 << 10  # a disk with less room is full
_FULL_SAID_EVERY_SECONDS = 60.0
_FULL_TRIED_EVERY_SECONDS = 5.0
_ENDS_WITHIN_SECONDS = 10.0
_TORCHRUN_ENDS_WITHIN_SECONDS = 40.0  # it gives its workers 30
_DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the coordinator is on this machine
_LISTENS_WITHIN_SECONDS = 30.0  # a coordinator that is started again
_LOOKS_FOR_PAGE_EVERY_SECONDS = 1.0  # until then
_LONGEST_SOCKET = 107  # bytes of its name
_ONE_SIGNAL_SECONDS = 1.0  # Ctrl-C may come from the terminal, and again from who started this


class Job:
    """The processes of a job on this machine, kept running."""

    def __init__(self, arguments: argparse.Namespace, directory: Path) -> None:
        """Prepare a job of these settings, with its sockets and logs in this directory."""
        self._arguments, self._directory = arguments, directory
        self._all: list[Kept] = []
        self._replicas: list[Kept] = []
        self._coordinator: Kept | None = None
        self._logs: Logs | None = None  # of replicas
        self._ending = False
        self._asked_at = 0.0
        self._kill_at = math.inf  # the replicas that have not left
        self._waits = Waits(self._status, self._say, self._on_begun, self._lives, arguments.ranks > 1)
        self._early = EarlyEnds(self._status, self._say)
        self._was_finished = False  # before anything was trained
        self._died_at_the_end: set[str] = set()  # replicas, after the last commit
        self._full_said_at = self._left_out_said_at = -math.inf
        self._page, self._page_at, self._page_until = "", math.inf, 0.0  # where it is; when that is to be looked up
        self._addresses = directory / "coordinator.json"
        self._key = directory / "job.key"
        try:
            self._lock = os.open(self._key, os.O_RDWR | os.O_CREAT, 0o600)  # until this program ends
        except PermissionError:  # one that may only be read is as good
            self._lock = os.open(self._key, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(f"rejoin-run: another rejoin-run has its job in {directory}") from None
        except OSError:  # a file system without locks: the coordinator's log has one of another kind
            pass
        if os.fstat(self._lock).st_size == 0:
            try:
                self._key.write_text(secrets.token_hex(32))
            except OSError as error:  # of a full disk: it names no file
                raise OSError(error.errno, error.strerror, str(self._key)) from None

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # who read it has gone, or its disk is full: the job goes on
            print(f"rejoin-run: {text}", file=sys.stderr, flush=True)

    def _start(self, process: Kept) -> Kept:
        process.start()
        self._all.append(process)
        return process

    def _daemon(self, name: str, *flags: str) -> Kept:
        command = [path("rejoind"), "--job-key-file", str(self._key), "--name", name, *flags]
        command += ["--silence-ms", str(self._arguments.silence_ms)]
        return self._start(Kept(name, command, of_daemons(os.environ), self._directory / f"{name}.log"))

    def _socket_of(self, replica: int) -> Path:
        return self._directory / f"node{replica}.sock"

    def start(self) -> None:
        """Start everything."""
        given = self._arguments
        name = os.fsencode(self._socket_of(given.replicas - 1))
        try:
            name.decode()
        except UnicodeDecodeError:
            raise SystemExit(
                f"rejoin-run: the name of {self._directory} is no text in UTF-8, and daemons take no other: give "
                "another --directory, or TMPDIR"
            ) from None
        longest = len(name)
        if longest > _LONGEST_SOCKET:
            raise SystemExit(
                f"rejoin-run: sockets in {self._directory} would have names of {longest} characters, and the system "
                f"takes {_LONGEST_SOCKET}: give a shorter --directory, or TMPDIR"
            )
        self._addresses.unlink(missing_ok=True)
        coordinator = self._coordinator = self._daemon(
            "coordinator", "--coordinator", "--replicas", str(given.replicas), "--ranks", str(given.ranks),
            "--batch", str(given.batch), "--steps", str(given.steps), "--address-file", str(self._addresses),
            "--log-directory", str(self._directory / "log"), "--listen", "127.0.0.1:0",
            *["--constant-batch"] * given.constant_batch, *["--balance-batches"] * given.balance_batches,
        )  # fmt: skip
        address, self._page = self._address(coordinator, "coordinator"), self._address(coordinator, "status")
        # Started again, it is to be found where it was.
        coordinator.command[coordinator.command.index("--listen") + 1] = address
        self._say(f"the page is at http://{self._page}/; logs are in {self._directory}")
        self._look_at_the_start()
        outputs = [] if given.show else [self._directory / f"replica{replica}.log" for replica in range(given.replicas)]
        self._logs = Logs(outputs) if outputs else None
        for replica in range(given.replicas):
            socket = self._socket_of(replica)
            self._daemon(f"node{replica}", "--socket", str(socket), "--connect", address)
            threads = max(1, (os.cpu_count() or 1) // (given.replicas * given.ranks))
            environment = {
                "OMP_NUM_THREADS": str(threads),  # more than there are cores would wait for each other
                **of_scripts(os.environ, given.ranks),
                "REJOIN_SOCKET": str(socket),
                "REJOIN_REPLICA": str(replica),
            }
            command = by_torchrun(given.ranks, given.command) if given.ranks > 1 else list(given.command)
            output = outputs[replica] if outputs else None
            self._replicas.append(self._start(Kept(f"replica {replica}", command, environment, output, self._logs)))

    def _address(self, coordinator: Kept, kind: str) -> str:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with contextlib.suppress(FileNotFoundError, json.JSONDecodeError, KeyError):
                return str(json.loads(self._addresses.read_text())[kind])
            assert coordinator.process is not None
            with contextlib.suppress(subprocess.TimeoutExpired):
                coordinator.process.wait(0.02)
                break
        raise SystemExit(f"rejoin-run: the coordinator did not start. {coordinator.last_words()}")

    # The coordinator's status; nothing where it can't be had.
    def _status(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError, KeyError, http.client.HTTPException):
            page = json.loads(self._addresses.read_text())["status"]
            with _DIRECTLY.open(f"http://{page}/status", timeout=2) as answer:
                return dict(json.load(answer)["coordinator_role"])
        return {}

    def _look_at_the_start(self) -> None:
        status = self._status()
        self._was_finished = bool(status.get("finished"))
        self._waits.begin(status)
        if self._was_finished:
            self._say(f"this job is finished: step {status['committed']} is committed. Nothing is trained: give it "
                      f"more than --steps {self._arguments.steps}, or another --directory")  # fmt: skip

    def _on_begun(self) -> None:
        for name in ("REJOIN_ROLL_BACK_TO", "REJOIN_DROP_REPLICA"):  # an operator's word is for one loss
            if self._coordinator is not None:
                self._coordinator.environment.pop(name, None)

    def _lives(self, replica: int) -> tuple[int, float] | None:
        if replica >= len(self._replicas):
            return None
        its = self._replicas[replica]
        if its.process is None or its.again_at or its.status() is not None:
            return None
        return its.process.pid, its.since

    def _look_at_the_end(self) -> int:
        status = self._status()
        if self._was_finished or (self._ending and not status.get("finished")):
            return 0
        result, said = at_the_end(status, self._waits.first, self._arguments.steps, self._died_at_the_end)
        for text in said:
            self._say(text)
        return result

    def _look_at_an_end(self, replica: Kept) -> None:
        if not self._ending and not self._was_finished:
            self._early.add(replica.name)

    def _look_at_the_logs(self) -> None:
        why = self._logs.wait() if self._logs else ""
        now = time.monotonic()
        if why and now - self._left_out_said_at >= _FULL_SAID_EVERY_SECONDS:
            self._left_out_said_at = now
            self._say(f"the scripts' logs in {self._directory} do not take what they say ({why}), which is left out: "
                      "see to it; the scripts go on")  # fmt: skip

    # A coordinator that was started again may have found its port taken.
    def _look_for_page(self) -> None:
        now = time.monotonic()
        self._page_at = now + _LOOKS_FOR_PAGE_EVERY_SECONDS if now < self._page_until else math.inf
        with contextlib.suppress(OSError, ValueError, KeyError):
            page = str(json.loads(self._addresses.read_text())["status"])
            if page != self._page:
                self._page = page
                self._say(f"the page is at http://{page}/ now")

    def run(self) -> int:
        """Keep all running until each replica has ended in peace; gives the exit status."""
        signal.pthread_sigmask(signal.SIG_BLOCK, WAITED_FOR)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # who started this may have ignored it
        adopt()
        try:
            self.start()
            while not all(replica.ended for replica in self._replicas):
                now = time.monotonic()
                waits = [process.again_at for process in self._all if process.again_at]
                waits += [self._logs.again_at] if self._logs else []
                heard = signal.sigtimedwait(
                    WAITED_FOR,
                    max(0.0, min([*waits, self._kill_at, self._waits.look_at, self._page_at, now + 3600]) - now),
                )
                if heard is not None and heard.si_signo != signal.SIGCHLD:
                    self._end()
                if time.monotonic() >= self._kill_at:
                    self._kill()
                if time.monotonic() >= self._waits.look_at:
                    self._waits.look()
                    self._early.look(sum(not one.ended for one in self._replicas), len(self._replicas))
                    self._look_at_the_logs()
                if time.monotonic() >= self._page_at:
                    self._look_for_page()
                if self._logs and (said := self._logs.keep()):
                    self._say(said)
                bury(self._all)
                for process in self._all:
                    if not self._look_after(process):
                        return 1
            return self._look_at_the_end()
        finally:
            self._stop()

    def _end(self) -> None:
        now = time.monotonic()
        if self._ending:
            if now - self._asked_at >= _ONE_SIGNAL_SECONDS:
                self._kill_at = min(self._kill_at, now)
            return
        within = self._arguments.leave_within
        self._say(f"ends: the replicas leave at the end of their step; after {within:g} s, or at a second signal, "
                  "they are killed")  # fmt: skip
        self._ending, self._asked_at, self._kill_at = True, now, now + within
        self._waits.stop()
        for replica in self._replicas:
            if replica.again_at:  # it has ended before
                replica.ended, replica.again_at = True, 0.0

    # What was stopped, or hangs in a call of the system or of a GPU, does not leave.
    def _kill(self) -> None:
        self._kill_at = math.inf
        for replica in self._replicas:
            if not replica.ended:
                self._say(f"{replica.name} has not left, and is killed")
                replica.kill()

    # False: it can't be kept running.
    def _look_after(self, process: Kept) -> bool:
        if process.again_at and time.monotonic() >= process.again_at:
            process.again_at = 0.0
            if process is self._coordinator:
                self._page_at = time.monotonic() + _LOOKS_FOR_PAGE_EVERY_SECONDS
                self._page_until = time.monotonic() + _LISTENS_WITHIN_SECONDS
            try:
                process.start()
            except (OSError, subprocess.SubprocessError) as error:  # no process, no memory: as if it had died at once
                return self._again(process, f"can't be started ({error})")
        if process.ended or process.again_at or process.process is None:
            return True
        is_replica = process in self._replicas
        if is_replica and self._ending and process.leaves():
            return True
        if process.status() is None:
            return True
        status = process.end()
        if is_replica and (status == 0 or self._ending):
            process.ended = True
            self._look_at_an_end(process)
            return True
        if is_replica and not self._was_finished and self._status().get("finished"):
            self._died_at_the_end.add(process.name)
        if not is_replica and status == _WRONG_SETTINGS:
            self._say(f"{process.name} ended with {how(status)}: its settings are wrong, and would be again: the job "
                      f"ends. {process.last_words()}")  # fmt: skip
            return False
        if (not is_replica and status == _CAN_NOT_WRITE) or self._disk_is_full():
            return self._wait_for_disk(process, how(status))
        return self._again(process, f"ended with {how(status)}")

    def _disk_is_full(self) -> bool:
        with contextlib.suppress(OSError):
            usage = shutil.disk_usage(self._directory)
            return usage.total > 0 and usage.free < _FULL_BYTES  # some file systems say nothing
        return False

    # Those that live hold the state, and the job waits for a coordinator that can write: nobody gains by its end.
    def _wait_for_disk(self, process: Kept, status: str) -> bool:
        now = time.monotonic()
        process.again_at = now + _FULL_TRIED_EVERY_SECONDS
        if now - self._full_said_at >= _FULL_SAID_EVERY_SECONDS:
            self._full_said_at = now
            why = "is full: free space" if self._disk_is_full() else f"has trouble: {process.last_words()}\nsee to it"
            then = f". {process.last_words()}" if process in self._replicas else "; the job waits"
            self._say(f"{process.name} ended with {status}, and is tried again every {_FULL_TRIED_EVERY_SECONDS:g} s: "
                      f"the disk of {self._directory} {why}{then}")  # fmt: skip
        return True

    def _again(self, process: Kept, what: str) -> bool:
        now, most = time.monotonic(), self._arguments.deaths_a_minute
        if len(process.died) >= most and not self._waits.has_begun:
            self._waits.look()
        process.died = [at for at in process.died if now - at < 60 or not self._waits.has_begun] + [now]
        words = process.last_words()
        if len(process.died) > most:
            self._say(f"{process.name} {what}, as often before: the job ends. {words}")
            return False
        known = re.sub("[0-9]", "", words)  # times and numbers of processes go on
        killed = process.process is not None and process.process.returncode == -signal.SIGKILL
        said = "" if killed or process.told == known else f". {words}"
        if said:
            process.told = known
        self._say(f"{process.name} {what}, and is started again{said}")
        process.again_at = now + min(0.1 * (2 ** min(len(process.died) - 1, 6) - 1), 5.0)  # at once the first time
        return True

    def _stop(self) -> None:
        by_torchrun = self._arguments.ranks > 1
        deadline = time.monotonic() + (_TORCHRUN_ENDS_WITHIN_SECONDS if by_torchrun else _ENDS_WITHIN_SECONDS)
        while any([one.leaves() for one in self._all]) and time.monotonic() < deadline:
            signal.sigtimedwait({signal.SIGCHLD}, max(0.0, deadline - time.monotonic()))
            bury(self._all)
        for one in self._all:
            one.kill()
        for one in self._all:
            if one.process is not None:
                one.end()
        if self._logs:
            self._logs.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `rejoin-run`."""
    show_names_as_they_are()
    parser = run_parser()
    given = parser.parse_args(arguments)
    if given.command[:1] == ["--"]:
        given.command = given.command[1:]
    if not given.command:
        parser.error("the command to run is missing: rejoin-run … -- python train.py")
    for name in ("replicas", "ranks", "batch"):
        if getattr(given, name) < 1:
            parser.error(f"--{name} {getattr(given, name)}: at least one is needed")
    if not given.leave_within >= 0:
        parser.error(f"--leave-within {given.leave_within}: seconds, not less than 0")
    if shutil.which(given.command[0]) is None:
        parser.error(f"there is no program {given.command[0]} that can be run")
    try:
        if given.directory is None:
            given.directory = Path(tempfile.mkdtemp(prefix="rejoin-"))
        given.directory.mkdir(parents=True, exist_ok=True)
        return Job(given, given.directory.resolve()).run()
    except OSError as error:
        print(
            f"rejoin-run: {error.filename}: {error.strerror}" if error.filename else f"rejoin-run: {error}",
            file=sys.stderr,
        )
        return 1


if __name__ == "__main__":
    sys.exit(main())
