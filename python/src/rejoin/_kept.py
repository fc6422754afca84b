"""A process of rejoin-run's, which is started again when it has ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LAST_LINES, _LAST_BYTES = 20, 4000  # of what a process has said: a traceback

# nohup's programs do not hear that the terminal is gone; what is ignored and waited for would be heard all the same.
_OF_TERMINAL = {signal.SIGHUP} - {number for number in [signal.SIGHUP] if signal.getsignal(number) == signal.SIG_IGN}
WAITED_FOR = frozenset({signal.SIGCHLD, signal.SIGTERM, signal.SIGINT} | _OF_TERMINAL)


# In a group of its own: Ctrl-C at a terminal is for rejoin-run, which ends replicas before their daemons.
def _before_program() -> None:
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WAITED_FOR)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def adopt() -> None:
    """Become the parent of whom a process leaves behind that this one has started, such as a shell's program."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _children() -> list[tuple[int, str, int]]:
    """Of this process: pid, state and process group."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # no process, or none any more
            state, parent, group = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:3]
            if int(parent) == os.getpid():
                found.append((int(entry), state, int(group)))
    return found


def bury(own: Sequence[Kept]) -> None:
    """Wait for the adopted that have ended; `own` are waited for by themselves."""
    numbers = {one.process.pid for one in own if one.process is not None}
    for pid, state, _ in _children():
        if state == "Z" and pid not in numbers:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def how(status: int) -> str:
    """Say how a process has ended."""
    if status >= 0:
        return f"status {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:  # most real-time signals have no name
        return f"signal {-status}"


@dataclass
class Kept:
    """A process, and what to start it with."""

    name: str
    command: list[str]
    environment: dict[str, str]
    output: Path | None  # none: this program's own
    starts: int = 0
    process: subprocess.Popen[bytes] | None = None
    ended: bool = False  # for good
    again_at: float = 0.0
    died: list[float] = field(default_factory=list)
    told: str = ""  # of its last words
    _asked: set[int] = field(default_factory=set)  # to end: processes
    _from: int = 0  # of its log

    def start(self) -> None:
        """Start it. Raises what `subprocess.Popen` does."""
        self.starts += 1
        self._asked.clear()
        target = self.output.open("ab") if self.output else None
        self._from = target.tell() if target else 0
        try:
            self.process = subprocess.Popen(
                self.command,
                env=self.environment,
                stdin=subprocess.DEVNULL,  # who reads a terminal in the background is stopped by it
                stdout=target,
                stderr=subprocess.STDOUT if target else None,
                preexec_fn=_before_program,
            )
        finally:
            if target:
                target.close()

    def status(self) -> int | None:
        """Say how it has ended, as `poll()` does, but leave its number taken: its group has that, too."""
        assert self.process is not None
        if self.process.returncode is not None:
            return self.process.returncode
        ended = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def leaves(self) -> bool:
        """Ask it to end, by one SIGTERM; false when it has.

        Where it was a shell, say, that ended otherwise than with 0, whom it has left behind are asked in its place.
        """
        if self.process is None or self.process.returncode is not None:
            return False
        status = self.status()
        if status == 0:
            return False
        number = self.process.pid
        there = [pid for pid, state, group in _children() if group == number and state != "Z"]
        for pid in [number] if status is None else there:
            if pid not in self._asked:
                self._asked.add(pid)
                os.kill(pid, signal.SIGTERM)  # nobody else waits for it: the number is still its own
        return status is None or bool(there)

    def kill(self) -> None:
        """Kill what is left of it and of what it has started; where it has ended with 0, that is its own affair."""
        if self.process is not None and self.process.returncode is None and self.status() != 0:
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> int:
        """Do so, and wait for it; gives how it has ended."""
        assert self.process is not None
        self.kill()
        return self.process.wait()

    def last_words(self) -> str:
        """Give the end of what it has said since its start, with its log's name; nothing where it has no log."""
        if self.output is None:
            return ""
        with self.output.open("rb") as log:
            log.seek(max(self._from, os.fstat(log.fileno()).st_size - _LAST_BYTES))
            lines = log.read().decode(errors="replace").rstrip().split("\n")[-_LAST_LINES:]
        return f"{self.output} ends so:\n" + "\n".join(lines)
