"""Ends this process where it waits for a rank of its own replica, and that replica is out of the job.

torch's collectives wait for ever for a rank that stands still (Gloo: for 30 minutes), and hear of nothing: neither
would this process come to the session's next call, nor a launcher start the replica again.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import platform
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from rejoin.errors import Cancelled, InvalidArgument, RejoinError
from rejoin.torch._refusals import refuse_no_number
from rejoin.torch._watch import kill_workers_at_end, watch

LONGEST_SECONDS = 10.0  # five silences, where nobody has said another one
_LOOKS_EVERY_SECONDS = 1.0
_LOOKS_WITHIN = 8  # the longest time, where that is short
_COMPUTES = 0.25  # of the processors' time: more of it, and another thread does what is waited for
_WORDS_WITHIN_SECONDS = 5.0
_OUT = "out of the job"
_FUTEX = ("98" if platform.machine() == "aarch64" else "202", "449")  # calls of the system, to wait for a thread
_LIBRARY = f"{Path(threading.__file__).parent}/"
_TORCH = f"{Path(torch.__file__).parent}/"

log = logging.getLogger("rejoin")


# What waits there waits for other threads or processes of the script's.
def _is_pythons_own(file: str) -> bool:
    return file.startswith(_LIBRARY) and "-packages" not in file


class _Thread:
    """The thread that calls the session."""

    def __init__(self) -> None:
        """Be that of the caller."""
        self._ident, self._native_id = threading.get_ident(), threading.get_native_id()
        self._clock = time.pthread_getcpuclockid(self._ident)

    def stands_at(self) -> float | None:
        """Give what changes as soon as it runs, where it waits for a thread that is none of Python's.

        Nothing, where it waits for anything else: for a time, for a file, for another process or another thread of the
        script's, as in an evaluation.
        """
        try:
            ran = time.clock_gettime(self._clock)
        except OSError:  # it has ended
            return None
        innermost = sys._current_frames().get(self._ident)
        if innermost is None or _is_pythons_own(innermost.f_code.co_filename):
            return None
        try:
            waits = Path(f"/proc/self/task/{self._native_id}/syscall").read_text().split()[0] in _FUTEX
        except OSError:  # of a system that does not tell
            waits = innermost.f_code.co_filename.startswith(_TORCH)
        return ran if waits else None


class Standing:
    """Looks whether the thread that calls the session stands still while the replica is out.

    What is told from what: in a collective the thread does not run for a moment, and waits for torch's threads. So it
    goes on where it computes, looks again and again, or waits for something of its own: then it comes to the session's
    next call, and hears there that the replica is out.
    """

    def __init__(
        self,
        replica: int,
        rank: int,
        check: Callable[[], None],
        longest: float,
        busy: Callable[[], bool] = lambda: False,
    ) -> None:
        """`check` raises when the replica is out of the job; `longest` seconds this rank may stand still then.

        While it is `busy` with what the script says, such as a save in which another rank writes, and for no longer
        than that says, it may for longer.
        """
        refuse_no_number("longest_standing", longest)
        if not longest > 0:
            raise InvalidArgument(f"longest_standing={longest:g}: seconds, more than 0; math.inf: for ever")
        self._who = f"rank {rank} of replica {replica}"
        self._check, self._longest, self._busy = check, longest, busy
        self._every = min(_LOOKS_EVERY_SECONDS, longest / _LOOKS_WITHIN)
        self._lock = threading.Lock()
        self._over: threading.Event | None = None  # of the thread that looks
        self._thread: _Thread | None = None
        self._at: float | None = None  # the thread, at the last look
        self._stood = self._looked_at = self._computed = 0.0

    def begin(self) -> None:
        """Look from now on at the thread that calls this."""
        self._thread, self._over = _Thread(), threading.Event()
        threading.Thread(
            target=watch, args=(weakref.ref(self), self._over, self._every), name="rejoin-standing", daemon=True
        ).start()

    def stop(self) -> None:
        """Look no more: the session is at its end."""
        with self._lock:
            if self._over is not None:
                self._over.set()
                self._over = None

    def look(self) -> None:
        """Look once."""
        with self._lock:
            if self._over is None or self._thread is None:
                return
            if not self._has_stood(self._thread.stands_at()) or self._busy():
                self._stood, self._computed = 0.0, time.process_time()
                return
            # Not before: while it stands it changes nothing in the session.
            why = self._why_out()
            if why is None:
                self._stood, self._computed = 0.0, time.process_time()
            elif self._stood >= self._longest:
                end_process(
                    f"{self._who}, process {os.getpid()}, has stood still for {self._stood:.0f} s: it waits for "
                    "another rank of its replica, as in a collective of forward() or backward(), and ends, so that its "
                    f"launcher starts the replica again: {why}"
                )

    # Since the last look. Time in which this process was stopped itself is no time in which it was seen to stand.
    def _has_stood(self, at: float | None) -> bool:
        now, before, looked_at = time.monotonic(), self._at, self._looked_at
        self._at, self._looked_at = at, now
        self._stood += min(now - looked_at, 2 * self._every)
        others_compute = time.process_time() - self._computed > _COMPUTES * self._stood
        return at is not None and at == before and not others_compute

    def _why_out(self) -> str | None:
        try:
            self._check()
        except Cancelled as error:
            return str(error) if _OUT in str(error) else None
        except RejoinError:  # a session that is at its end otherwise
            pass
        return None


def end_process(text: str) -> None:
    """End this process with this error, while its main thread is where nothing can be raised."""
    words = threading.Thread(target=_say, args=(text,), name="rejoin-last-words", daemon=True)
    words.start()  # in a thread: who reads them may stand still, too
    words.join(_WORDS_WITHIN_SECONDS)
    with suppress(Exception):
        _end_children()
    os._exit(1)


def _say(text: str) -> None:
    log.error("%s", text)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    logging.shutdown()  # flushes what handlers of the script's hold


# As multiprocessing does at the end of a process, which does not come to that here.
def _end_children() -> None:
    kill_workers_at_end()
    for child in multiprocessing.active_children():
        if child.daemon:
            child.terminate()
