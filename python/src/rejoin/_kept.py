"""A process of rejoin-run's, which is started again when it has ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rejoin._run_logs import Logs

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LAST_LINES, _LAST_BYTES = 20, 16000  # of what a process has said: a traceback
_TORCHRUN_TELLS = " failed (exitcode: "

# nohup's programs do not hear that the terminal is gone; what is ignored and waited for would be heard all the same.
_OF_TERMINAL = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []
WAITED_FOR = frozenset({signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, *_OF_TERMINAL})


# In a session of its own, to which the groups belong that it makes, as a shell's `timeout` does. Ctrl-C at a terminal
# is for rejoin-run, which ends replicas before their daemons.
def _before_program() -> None:
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WAITED_FOR)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def adopt() -> None:
    """Become the parent of whom a process leaves behind that this one has started, such as a shell's program."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


@dataclass(frozen=True)
class _Process:
    pid: int
    state: str
    parent: int
    session: int

    @property
    def reads_pipe(self) -> bool:
        """Say whether it is behind another one in a shell's pipe: it ends when that has."""
        with contextlib.suppress(OSError):
            return os.readlink(f"/proc/{self.pid}/fd/0").startswith("pipe:")
        return False

    @property
    def clears_up(self) -> bool:
        """Say whether it removes what those that have died leave in /dev/shm, when they have, and ends: Python's."""
        with contextlib.suppress(OSError):
            return b"resource_tracker import main" in Path(f"/proc/{self.pid}/cmdline").read_bytes()
        return False

    def has_variable(self, setting: bytes) -> bool:
        """Say whether it was started with it."""
        return setting in self._environment()

    def variable(self, name: bytes) -> str:
        """Give what it was started with; nothing, without it."""
        values = (one[len(name) + 1 :] for one in self._environment() if one.startswith(name + b"="))
        return next(values, b"").decode(errors="replace")

    def _environment(self) -> list[bytes]:
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self.pid}/environ").read_bytes().split(b"\0")
        return []


def _processes() -> Iterator[_Process]:
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # no process any more
            state, parent, _, session = Path(f"/proc/{entry}/stat").read_bytes().rpartition(b")")[2].split()[:4]
            yield _Process(int(entry), state.decode(), int(parent), int(session))


def ranks_of(torchrun: int) -> list[str]:
    """Name those that it has started and that live; where some of them are stopped, these alone."""
    live, stopped = [], []
    for one in _processes():
        rank = one.variable(b"RANK") if one.parent == torchrun and one.state != "Z" else ""
        if rank:
            live.append(f"rank {rank}, process {one.pid}")
            if one.state == "T":
                stopped.append(f"{live[-1]}, is stopped (SIGSTOP)")
    return stopped or live


def bury(own: Sequence[Kept]) -> None:
    """Wait for the adopted that have ended; `own` are waited for by themselves."""
    numbers = {one.process.pid for one in own if one.process is not None}
    for one in _processes():
        if one.parent == os.getpid() and one.state == "Z" and one.pid not in numbers:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(one.pid, os.WNOHANG)


@dataclass
class Kept:
    """A process, and what to start it with."""

    name: str
    command: list[str]
    environment: dict[str, str]
    output: Path | None  # none: this program's own
    logs: Logs | None = None  # who writes that; none: the process itself
    starts: int = 0
    process: subprocess.Popen[bytes] | None = None
    since: float = 0.0  # when that was started
    ended: bool = False  # for good
    again_at: float = 0.0
    died: list[float] = field(default_factory=list)
    told: str = ""  # of its last words
    _asked: set[int] = field(default_factory=set)  # to end: processes
    _from: int = 0  # of its log

    def start(self) -> None:
        """Start it. Raises what `subprocess.Popen` does."""
        self.starts, self.since = self.starts + 1, time.monotonic()
        self._asked.clear()
        if self.logs and self.starts > 1:
            self.logs.wait()  # what the one before has said is not this one's
        target = self.output.open("ab") if self.output else None
        self._from = target.tell() if target else 0
        try:
            self.process = subprocess.Popen(
                self.command,
                env=self.environment,
                stdin=subprocess.DEVNULL,  # who reads a terminal in the background is stopped by it
                stdout=self.logs.end_for(self.output) if self.logs and self.output else target,
                stderr=subprocess.STDOUT if target else None,
                preexec_fn=_before_program,
            )
        finally:
            if target:
                target.close()

    def status(self) -> int | None:
        """Say how it has ended, as `poll()` does, but leave its number taken: its session has that, too."""
        assert self.process is not None
        if self.process.returncode is not None:
            return self.process.returncode
        ended = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    # What lives of it, in its session or with the socket that it was given, as torchrun's workers have in theirs; but
    # for who clears up behind them, and ends by itself.
    def _started(self) -> list[_Process]:
        assert self.process is not None
        living = {one.pid: one for one in _processes() if one.state != "Z"}
        socket = (self.environment or {}).get("REJOIN_SOCKET")
        setting = os.fsencode(f"REJOIN_SOCKET={socket}")

        def is_ours(one: _Process) -> bool:
            for _ in living:  # not for ever, as they are not of one moment
                if one.parent == os.getpid() or one.parent not in living:
                    break
                one = living[one.parent]
            return one.parent == os.getpid()

        return [
            one
            for one in living.values()
            if (one.session == self.process.pid or (socket and is_ours(one) and one.has_variable(setting)))
            and not one.clears_up
        ]

    def leaves(self) -> bool:
        """Ask it to end, by one SIGTERM; false when it has.

        Where it was a shell, say, that ended otherwise than with 0, whom it has left behind are asked in its place.
        """
        if self.process is None or self.process.returncode is not None:
            return False
        status = self.status()
        if status == 0:
            return False
        asked = [self.process.pid]
        if status is not None:
            there = [one for one in self._started() if one.parent == os.getpid()]
            first = [one for one in there if not one.reads_pipe]  # who reads what these say ends behind them
            asked = [one.pid for one in first or there]
        for pid in asked:
            if pid not in self._asked:
                self._asked.add(pid)
                os.kill(pid, signal.SIGTERM)  # nobody else waits for it: the number is still its own
        return bool(asked)

    def kill(self) -> None:
        """Kill what is left of it and of what it has started; where it has ended with 0, that is its own affair."""
        if self.process is None or self.process.returncode is not None or self.status() == 0:
            return
        os.kill(self.process.pid, signal.SIGKILL)
        for one in self._started():
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGKILL)

    def end(self) -> int:
        """Do so, and wait for it; gives how it has ended."""
        assert self.process is not None
        self.kill()
        return self.process.wait()

    def last_words(self) -> str:
        """Give the end of what it has said since its start, with its log's name; nothing where that can't be had."""
        if self.output is None:
            return ""
        if self.logs:
            self.logs.wait()
        try:
            with self.output.open("rb") as log:
                size = os.fstat(log.fileno()).st_size
                log.seek(max(self._from if self._from <= size else 0, size - _LAST_BYTES))  # somebody may have cut it
                lines = os.fsdecode(log.read(_LAST_BYTES)).rstrip().split("\n")
        except OSError:  # somebody has moved it away
            return ""
        # Its worker's words stand before its own.
        of_torchrun = next((i for i, line in enumerate(lines) if _TORCHRUN_TELLS in line), len(lines))
        return f"{self.output} ends so:\n" + "\n".join(lines[: of_torchrun or len(lines)][-_LAST_LINES:])
