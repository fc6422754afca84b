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

_PIPE_BYTES = 1 << 20  # where the system gives so many; so much can be said before somebody waits for the writer
_WAITS_SECONDS = 1.0  # for a disk that stands still
_PAUSE_SECONDS = 1.0  # from one start of the writer to the next


class Logs:
    """A pipe for each log, and who writes what comes out of it.

    Both ends of each are open here, too: a writer that has died is followed by another one, which goes on where it was.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        """Start the writer. Raises what `subprocess.Popen` does. The signals of `WAITED_FOR` have to be blocked."""
        self._pipes = {path: self._pipe() for path in paths}
        self._control = -1
        self._asked = 0
        self.again_at = math.inf  # the writer is to be started
        self._start()

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
            command = [sys.executable, "-IS", program, str(its.fileno())]
            for path, (reads, _) in self._pipes.items():
                command += [str(reads), str(path)]
            self._writer = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
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

    def keep(self) -> bool:
        """Start the writer again if it has died; says whether that was so."""
        if self._writer.poll() is None:
            return False
        now = time.monotonic()
        self.again_at = self._started + _PAUSE_SECONDS
        if now < self.again_at:
            return False
        try:
            self._start()
        except (OSError, subprocess.SubprocessError):  # no process, no memory
            return False
        self.again_at = math.inf
        return True

    def wait(self) -> str:
        """Wait until all that was said is in the logs; gives why some of it is left out at present, if that is so."""
        self._asked = self._asked % 255 + 1
        deadline = time.monotonic() + _WAITS_SECONDS
        answers = select.poll()
        answers.register(self._control, select.POLLIN)
        with contextlib.suppress(OSError):  # it has died, or has had no time for hundreds of questions
            os.write(self._control, bytes([self._asked]))
            while answers.poll(max(0.0, deadline - time.monotonic()) * 1000):
                answer = os.read(self._control, 1000)
                if answer[:1] in (b"", bytes([self._asked])):
                    return os.fsdecode(answer[1:])
        return ""

    def close(self) -> None:
        """Wait for that, and let the writer end when all have that write to it."""
        self.wait()
        for ends in self._pipes.values():
            for end in ends:
                os.close(end)
        os.close(self._control)
