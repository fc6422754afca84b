"""Ends a step's wait for its DataLoader's workers where it would be in vain."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

Data = TypeVar("Data")

_LOOKS_EVERY_SECONDS = 2.0
_TOLD_AFTER_SECONDS = 30.0  # of a worker that is stopped

log = logging.getLogger("rejoin")
_waited_for: weakref.WeakSet[Any] = weakref.WeakSet()  # workers: multiprocessing keeps them until they have ended
os.register_at_fork(after_in_child=_waited_for.clear)


def state_of(pid: int) -> str:
    """Give a process's state, one letter as proc(5) has it; none without /proc, or where it has gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return ""


def _is_stopped(worker: Any) -> bool:
    return state_of(worker.pid) == "T"


def kill_workers(iterator: Any) -> None:
    """Kill those of torch's iterator, and let go who reads what they say.

    Where one has died in the midst of a batch its reader waits for the rest: this process has an end of their pipe,
    too, which is none of it any more.
    """
    for worker in getattr(iterator, "_workers", ()):
        worker.kill()
    writer = getattr(getattr(iterator, "_worker_result_queue", None), "_writer", None)
    if writer is not None and not writer.closed:
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(nowhere, writer.fileno(), inheritable=False)  # torch may write there, to end its reader
        os.close(nowhere)


def end_stopped(iterator: Any) -> None:
    """Kill its workers where one of them is stopped, and would not end when it is asked to."""
    if any(_is_stopped(worker) for worker in getattr(iterator, "_workers", ())):
        kill_workers(iterator)


def end_with_trainer(iterator: Any) -> None:
    """Let its workers end when this process does, also those that are stopped then."""
    _waited_for.update(getattr(iterator, "_workers", ()))


# multiprocessing waits for them at this process's end, without a limit. Its callback comes behind this one.
@atexit.register
def kill_stopped() -> None:
    """Kill all workers of this process that are stopped."""
    for worker in [*_waited_for]:
        if _is_stopped(worker):
            worker.kill()


def kill_workers_at_end() -> None:
    """Kill all workers of this process, which ends without those calls of multiprocessing."""
    for worker in [*_waited_for]:
        worker.kill()


class Watch:
    """Looks, while a step waits for workers, whether this replica still has something to wait for.

    torch waits for ever for a worker that stands still (one that is stopped, or reads from a file system that hangs),
    and hears meanwhile of nothing: neither of SIGTERM, nor that the job has gone on without this replica. So a thread
    looks, and kills the workers, at which torch's wait ends.
    """

    def __init__(self, look: Callable[[], None]) -> None:
        """`look` raises what is to end the wait. It is called by that thread, while the session's waits."""
        self._look = look
        self._lock = threading.Lock()  # no look goes on beside what comes after the wait
        self._over: threading.Event | None = None  # of the thread
        self._iterator: Any = None  # that is waited for
        self._since: float | None = None  # when the wait began
        self._told = False
        self.why: BaseException | None = None  # what has ended a wait

    def wait(self, iterator: Iterator[Data]) -> Data:
        """Give the next of torch's iterator, which waits for its workers, or raise what has ended that."""
        if self._over is None:
            self._over = threading.Event()
            threading.Thread(
                target=watch,
                args=(weakref.ref(self), self._over, _LOOKS_EVERY_SECONDS),
                name="rejoin-workers",
                daemon=True,
            ).start()
        with self._lock:
            self._iterator, self._since, self._told = iterator, time.monotonic(), False
        try:
            return next(iterator)
        finally:
            self._since = None  # also where Ctrl-C ends the next line
            with self._lock:
                self._iterator = None
            if self.why is not None:
                raise self.why

    def stop(self) -> None:
        """End the thread."""
        if self._over is not None:
            self._over.set()
            self._over = None

    def look(self) -> None:
        """Look once."""
        with self._lock:
            if self._since is None or self.why is not None:
                return
            waited = time.monotonic() - self._since
            if waited >= _TOLD_AFTER_SECONDS and not self._told:
                self._tell(waited)
            try:
                self._look()
            except BaseException as why:
                self.why = why
                log.warning("a step has waited for its data for %.0f s: the DataLoader's workers are killed", waited)
                kill_workers(self._iterator)

    def _tell(self, waited: float) -> None:
        for worker in getattr(self._iterator, "_workers", ()):
            if _is_stopped(worker):
                self._told = True
                log.warning(
                    "a step has waited for its data for %.0f s, and the DataLoader's worker of process %d is stopped "
                    "(SIGSTOP): let it go on (kill -CONT %d), or kill it, and the workers are started again",
                    waited, worker.pid, worker.pid,
                )  # fmt: skip


# Without a reference to who looks, and by that to the session, but while it does.
def watch(of: weakref.ref[Any], over: threading.Event, every: float) -> None:
    """Let it look once in so many seconds, as long as it is there, and until that is over."""
    while not over.wait(every):
        looks = of()
        if looks is None:
            return
        looks.look()
        del looks
