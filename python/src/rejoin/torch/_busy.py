"""What this replica is busy with, which the others hear while they wait for it: one thing at a time."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rejoin.errors import InvalidArgument, RejoinError
from rejoin.torch._data import LONGEST_WAIT
from rejoin.torch._refusals import refuse_no_number

if TYPE_CHECKING:
    from rejoin._native import Session


MOST_SECONDS = 7 * 24 * 3600  # as the library has it


# Before anything ends for it.
def _check(reason: object, seconds: object) -> None:
    if not isinstance(reason, str):
        raise InvalidArgument(f"busy({reason!r}): the reason is a text, such as 'evaluating', which the status shows")
    refuse_no_number("seconds", seconds)
    if not 0.001 <= seconds <= MOST_SECONDS:  # type: ignore[operator]
        told = f"they are to be above 0, and {MOST_SECONDS} at most"
        raise InvalidArgument(f"busy('{reason}', seconds={seconds}): {told}")


@dataclass
class _With:
    begin: Callable[[int, str], None]
    reason: str
    seconds: float
    is_ours: bool
    over: bool = False  # also where the script's has taken its place
    begun: float = 0.0


class Busy:
    """The session's own reasons give way to the script's, as where a data set says that it is busy."""

    def __init__(self, native: Session) -> None:
        self._native = native
        self._now: _With | None = None
        self._first: _With | None = None  # of a step whose batch has a size that none has had here
        self._size = 0  # its samples
        self._sizes: set[int] = set()  # of the batches of steps that have come to their end here

    def _begin(self, what: _With) -> None:
        what.begin(int(what.seconds * 1000), what.reason)
        what.begun = time.monotonic()
        self._now = what

    def _end(self) -> None:
        if self._now is not None:
            self._now = None
            self._native.done()

    def with_what_the_script_says(self) -> bool:
        """Whether it is what the script has said, for no longer than it has said, and not the session's own."""
        now = self._now
        return now is not None and not now.is_ours and time.monotonic() < now.begun + now.seconds

    @contextmanager
    def with_scripts(self, reason: str, seconds: float) -> Iterator[None]:
        """Be busy with what the script says. What it says within that is a part of it."""
        _check(reason, seconds)
        ours = self._now
        if ours is not None and not ours.is_ours:
            yield
            return
        if ours is not None:
            self._end()
        with self._within(_With(self._native.busy, reason, seconds, is_ours=False), ours):
            yield

    @contextmanager
    def _within(self, what: _With, before: _With | None = None) -> Iterator[None]:
        self._begin(what)
        try:
            yield
        except BaseException:
            with suppress(RejoinError):  # of a session at its end, in the place of what has ended it
                self._go_back_to(before)
            raise
        self._go_back_to(before)

    def _go_back_to(self, before: _With | None) -> None:
        self._end()
        if before is not None and not before.over:
            self._begin(before)

    @contextmanager
    def with_ours(self, reason: str, seconds: float, in_step: bool = False) -> Iterator[None]:
        """Be busy with what the session does; `in_step`: in each step, so that its time counts as computing."""
        if self._now is not None:
            yield
            return
        how = self._native.busy_in_step if in_step else self._native.busy
        with self._within(_With(how, reason, seconds, is_ours=True)):
            yield

    def begin_step(self, size: int) -> None:
        """Be busy where a step's batch is the first of its size: it may be compiled for, and not equally fast on all.

        It counts as computing, and the others hear of it where it takes long: a step that compiles nothing costs none.
        A script that ends within the step, and has slow work at its exit, is waited for no longer: what holds the
        loop's iterator, as a framework does, keeps end_step() from being called before.
        """
        self._size = size
        if self._now is None and size not in self._sizes:
            what = f"its first batch of {size} samples, which it may compile for"
            self._first = _With(self._native.busy_in_step, what, LONGEST_WAIT, is_ours=True)
            self._begin(self._first)
            atexit.register(self.end_step, trained=False)

    def end_step(self, trained: bool = True) -> None:
        """End what begin_step() has begun. `trained`: whether it came to the step's end."""
        if trained:
            self._sizes.add(self._size)
        if self._first is not None:
            self._first.over = True
            if self._now is self._first:
                with suppress(RejoinError):  # of a session at its end, which what comes next says
                    self._end()
            self._first = None
            atexit.unregister(self.end_step)
