"""What this replica is busy with, which the others hear while they wait for it: one thing at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rejoin._native import Session


@dataclass(frozen=True)
class _With:
    begin: Callable[[int, str], None]
    reason: str
    seconds: float
    is_ours: bool


class Busy:
    """The session's own reasons give way to the script's, as where a data set says that it is busy."""

    def __init__(self, native: Session) -> None:
        self._native = native
        self._now: _With | None = None

    def _begin(self, what: _With) -> None:
        what.begin(int(what.seconds * 1000), what.reason)
        self._now = what

    def _end(self) -> None:
        if self._now is not None:
            self._now = None
            self._native.done()

    @contextmanager
    def with_scripts(self, reason: str, seconds: float) -> Iterator[None]:
        """Be busy with what the script says. What it says within that is a part of it."""
        ours = self._now
        if ours is not None and not ours.is_ours:
            yield
            return
        if ours is not None:
            self._end()
        self._begin(_With(self._native.busy, reason, seconds, is_ours=False))
        try:
            yield
        finally:
            self._end()
            if ours is not None:
                self._begin(ours)

    @contextmanager
    def with_ours(self, reason: str, seconds: float, in_step: bool = False) -> Iterator[None]:
        """Be busy with what the session does; `in_step`: in each step, so that its time counts as computing."""
        if self._now is not None:
            yield
            return
        how = self._native.busy_in_step if in_step else self._native.busy
        self._begin(_With(how, reason, seconds, is_ours=True))
        try:
            yield
        finally:
            self._end()
