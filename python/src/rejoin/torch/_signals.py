"""Signals while a step is updated: what a handler raises in the midst of it would leave a state that is of no step."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found] # those of `signal` make enums, which cost more, and each step asks
import inspect
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

from rejoin.errors import Unavailable

log = logging.getLogger("rejoin")

LONGEST_WAIT_SECONDS = 10.0  # of a step's wait for others, as with SIGTERM
_NUMBERS = sorted(int(number) for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})

Handler = Callable[[int, "FrameType | None"], object]


class WithinUpdate(Unavailable):
    """The state was asked for while it is of no one step."""


class _Holder:
    """In the place of a signal's handler: it notes the signal while that is to wait, and passes it on else."""

    def __init__(self, signals: Signals, handler: Handler) -> None:
        self.signals, self.handler = signals, handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.signals.holds:
            self.signals.noted.setdefault(number, (self.handler, time.monotonic()))
        else:
            self.handler(number, frame)


class Signals:
    """Lets signals' handlers wait while a step is updated, and run behind it; once, as the system has it with signals.

    Python runs handlers between any two of its instructions, and has no call that keeps it from that. So for as long as
    an update takes others are in their places.
    """

    def __init__(self, but: Handler) -> None:
        """`but`: the handler that only notes its signal, and need not wait."""
        self._but = but
        self.holds = False
        self.noted: dict[int, tuple[Handler, float]] = {}  # by number; since when

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let no handler run within this block, but those that look() runs; at its end those that are due."""
        if self.holds or threading.current_thread() is not threading.main_thread():  # others run no handlers
            yield
            return
        holders: dict[int, _Holder] = {}
        try:
            for number in _NUMBERS:
                handler = _signal.getsignal(number)
                if not callable(handler) or handler is self._but:
                    continue
                if isinstance(handler, _Holder):  # which a handler that raised has left: it passes signals on
                    handler = handler.handler
                holders[number] = _Holder(self, handler)
                _signal.signal(number, holders[number])
            self.holds = True  # at once for all: before, each passes its signal on
            yield
        finally:
            self.holds = False  # from here on each may raise
            with ExitStack() as ends:  # which goes on to the others then
                for number in list(self.noted):
                    ends.callback(self._run, number)
                for number, holder in holders.items():
                    ends.callback(_give_back, number, holder)

    def look(self, waiting_since: float) -> None:
        """Run those that are for ending a wait for others: Ctrl-C at once, one of the script's own after 10 s."""
        for number, (handler, since) in list(self.noted.items()):
            waited = time.monotonic() - max(since, waiting_since)
            if handler is not signal.default_int_handler and waited <= LONGEST_WAIT_SECONDS:
                continue
            try:
                self._run(number)
            except WithinUpdate as refused:  # all replicas may be waiting here: raised, it would end the job
                log.error("%s", refused)

    def _run(self, number: int) -> None:
        handler, _ = self.noted.pop(number)
        handler(number, inspect.currentframe())


def _give_back(number: int, holder: _Holder) -> None:
    if _signal.getsignal(number) is holder:  # or what was done in the update has put another one there
        _signal.signal(number, holder.handler)
