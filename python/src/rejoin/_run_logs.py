"""The logs of rejoin-run's scripts, which a process of its own writes (_log_writer.py)."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from rejoin._ends import how

_PIPE_BYTES = 1 << 20  # where the system gives so many; so much can be said before somebody waits for the writer
_WAITS_SECONDS = 1.0  # for a disk that stands still
_PAUSE_SECONDS = 1.0  # from one start of the writer to the next
_BEGINS_SECONDS = 10.0  # the first one
_SAID_EVERY_SECONDS = 60.0  # that it has died
_LAST_BYTES = 2000  # of what it has said


class Logs:
    """A pipe for each log, and who writes what comes out of it.

    Both ends of each are open here, too: a writer that has died is followed by another one, which goes on where it was.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        """Start the writer. The signals of `WAITED_FOR` have to be blocked.

        Raises what `subprocess.Popen` does, and where it ends at once: scripts would wait for it for ever.
        """
        self._pipes = {path: self._pipe() for path in paths}
        self._control = -1
        self._asked = 0
        self.again_at = math.inf  # the writer is to be started
        self._said_at = -math.inf
        self._errors = self._pipe()  # what the writer says of itself
        self._start()
        if self._ask(_BEGINS_SECONDS) is not None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):  # it is slow
            status, words = self._writer.wait(_WAITS_SECONDS), self._its_words()
            self._close()
            raise ChildProcessError(
                f"who writes the logs of the scripts ({' '.join(self._command)}) has ended with {how(status)}: see "
                f"that this Python starts so, or give --show{words}"
            )

    @staticmethod
    def _pipe() -> tuple[int, int]:
        reads, writes = os.pipe()
        os.set_blocking(reads, False)
        with contextlib.suppress(OSError):  # one user's pipes hold so much only
            fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        return reads, writes

    def _start(self) -> None:
        self._started = time.monotonic()
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with its:
            program = str(Path(__file__).with_name("_log_writer.py"))
            self._command = [sys.executable, "-IS", program]
            command = [*self._command, str(its.fileno())]
            for path, (reads, _) in self._pipes.items():
                command += [str(reads), str(path)]
            self._writer = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors[1],
                pass_fds=[its.fileno(), *(reads for reads, _ in self._pipes.values())],
                start_new_session=True,
            )
        if self._control >= 0:
            os.close(self._control)
        self._control = ours.detach()

    def end_for(self, path: Path) -> int:
        """Give what a process is to write to, whose log this is. It stays this object's."""
        end = self._pipes[path][1]
        os.set_blocking(end, True)  # the one before may have changed that, for all
        return end

    # Lines behind another one.
    def _its_words(self) -> str:
        try:
            words = os.read(self._errors[0], _PIPE_BYTES)[-_LAST_BYTES:]
        except BlockingIOError:  # none
            return ""
        return ("\n" + os.fsdecode(words)).rstrip()

    def keep(self) -> str:
        """Start the writer again if it has died; gives what there is to say of that, once a minute."""
        status = self._writer.poll()
        if status is None:
            return ""
        now = time.monotonic()
        self.again_at = self._started + _PAUSE_SECONDS
        if now < self.again_at:
            return ""
        words, then = self._its_words(), "is started again"
        try:
            self._start()
            self.again_at = math.inf
        except (OSError, subprocess.SubprocessError) as error:  # no process, no memory
            then = f"can't be started again ({error}), for which the scripts wait"
        if now - self._said_at < _SAID_EVERY_SECONDS:
            return ""
        self._said_at = now
        return f"who writes the logs of the scripts has ended with {how(status)}, and {then}{words}"

    def wait(self) -> str:
        """Wait until all that was said is in the logs; gives why some of it is left out at present, if that is so."""
        return self._ask(_WAITS_SECONDS) or ""

    # Nothing where there is no answer.
    def _ask(self, seconds: float) -> str | None:
        self._asked = self._asked % 255 + 1
        deadline = time.monotonic() + seconds
        answers = select.poll()
        answers.register(self._control, select.POLLIN)
        with contextlib.suppress(OSError):  # it has died, or has had no time for hundreds of questions
            os.write(self._control, bytes([self._asked]))
            while answers.poll(max(0.0, deadline - time.monotonic()) * 1000):
                answer = os.read(self._control, 1000)
                if answer[:1] == bytes([self._asked]):
                    return os.fsdecode(answer[1:])
                if not answer:
                    break
        return None

    def close(self) -> None:
        """Wait for that, and let the writer end when all have that write to it."""
        self.wait()
        self._close()

    def _close(self) -> None:
        for ends in (self._errors, *self._pipes.values()):
            for end in ends:
                os.close(end)
        os.close(self._control)
