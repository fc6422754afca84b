"""SIGTERM: this replica is to leave at the end of a step, and waits for nothing any more for long."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from rejoin.torch._signals import Signals

log = logging.getLogger("rejoin")

LONGEST_WAIT_SECONDS = 10.0  # launchers kill what has not ended after 30 s


class Terminated(SystemExit):
    """SIGTERM, while this replica waited for something that it does not need any more, or that did not come."""


_asked_at: float | None = None  # of this process: SIGTERM is for all its sessions, those to come, too


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    global _asked_at
    if _asked_at is None:  # launchers may send a second one
        _asked_at = time.monotonic()


# A forked process has no part in the job, and nobody in it would look: whoever asks it to end would wait for ever.
def _let_children_end() -> None:
    global _asked_at
    _asked_at = None
    handler = signal.getsignal(signal.SIGTERM)
    if handler == _on_sigterm or isinstance(handler, _KeepsBack):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_let_children_end)


class _KeepsBack:
    def __init__(self, block: str) -> None:
        self._block, self.came = block, False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self.came:
            log.warning(
                "SIGTERM: this process ends behind %s, so that no file is left half. A launcher kills what takes "
                "longer than it waits, often 30 s: let it wait longer",
                self._block,
            )
        self.came = True


@contextmanager
def kept_back(block: str) -> Iterator[None]:
    """Let a SIGTERM that would end this process within this block do so behind it, so that nothing is left half."""
    begun = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    keeps = _KeepsBack(block)
    if begun:
        signal.signal(signal.SIGTERM, keeps)
    try:
        yield
    finally:
        is_ours = begun and signal.getsignal(signal.SIGTERM) == keeps
        if is_ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if keeps.came:
                os.kill(os.getpid(), signal.SIGTERM)


class Leaving:
    """Whether this process has been asked to leave, and what a session may still wait for.

    The handler only notes it: whoever waits asks look() now and then, so that nothing is broken off halfway.
    """

    def __init__(self) -> None:
        self._waits_since: float | None = None
        self._at_once = self._ending = False
        self.signals = Signals(_on_sigterm)  # the others, which the script may have handlers for

    @staticmethod
    def listen() -> None:
        """Take SIGTERM from now on, unless the program has a handler of its own."""
        if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
            return
        if threading.current_thread() is not threading.main_thread():
            log.warning(
                "SIGTERM is not heard, and ends this process at once: join() was called in a thread that is not the "
                "main one, and Python lets no other take signals. Call it there, or let a handler of the script's own "
                "set a flag, at which the loop breaks behind optimizer.step()"
            )
            return
        signal.signal(signal.SIGTERM, _on_sigterm)

    def is_set(self) -> bool:
        """Whether this replica is to leave."""
        return _asked_at is not None

    @contextmanager
    def waiting(self, at_once: bool) -> Iterator[None]:
        """Within this block look() is asked. `at_once`: nothing is lost where the wait ends with SIGTERM."""
        self._at_once, self._waits_since = at_once, time.monotonic()
        try:
            yield
        finally:
            self._at_once, self._waits_since = False, None

    def look(self) -> None:
        """Raise `Terminated`, once, where this is no time to go on waiting, or what another signal's handler raises."""
        if self._waits_since is not None:
            self.signals.look(self._waits_since)
        if _asked_at is None or self._waits_since is None or self._ending:
            return
        waited = time.monotonic() - max(_asked_at, self._waits_since)
        if self._at_once or waited > LONGEST_WAIT_SECONDS:
            self._ending = True
            if not self._at_once:
                log.warning("SIGTERM: what this step waits for has not come for %.0f s; the replica leaves", waited)
            raise Terminated
