"""The learning rates of a step, by the schedule that attach() was given.

See "Settings that change" in docs/design-notes.md.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
from collections.abc import Callable, Sequence
from functools import lru_cache

from rejoin.errors import InvalidArgument

Schedule = Callable[[int], "float | Sequence[float]"]

# What a function of the step raises on all replicas, where it has no rate. Anything else (of memory, of a file that is
# being written, of a stack that is deeper here) may be one process's alone, whose replica ends: others have the rates.
_OF_THE_STEP = (InvalidArgument, LookupError, ArithmeticError, ValueError, TypeError, AssertionError, StopIteration)
_OF_A_FILE = (json.JSONDecodeError, UnicodeError)  # though they are ValueErrors
_REMEMBERED = 256  # answers of the schedule, for steps before one that has no rate

log = logging.getLogger("rejoin")


class Rates:
    """One for each of the optimizer's groups: those that the schedule gives, or of a step before of which it gave any.

    Where it has none, all replicas would end in one step, with all that was trained. So what they train on with is a
    function of the step alone, which a replica that catches up finds, too, by asking for the steps before.
    """

    def __init__(self, schedule: Schedule, groups: int) -> None:
        """`groups`: how many rates a step has."""
        self._schedule, self._groups = schedule, groups
        self._any = lru_cache(_REMEMBERED)(self._given_if_any)
        self._times = 0  # that it had none
        self._told = 0  # the last of these steps

    def given(self, step: int) -> list[float]:
        """Give what the schedule does, and raise what it raises, or `InvalidArgument` where these are no rates."""
        given = self._schedule(step)
        try:
            rates = [float(given)] * self._groups  # type: ignore[arg-type]
        except (TypeError, ValueError, RuntimeError):
            try:
                rates = [float(rate) for rate in given]  # type: ignore[union-attr]
            except (TypeError, ValueError):
                rates = []
        if len(rates) != self._groups or not all(0.0 <= rate < math.inf for rate in rates):
            raise InvalidArgument(
                f"lr({step}) of attach() is {given!r}: it is to be a number of 0 or more, or one for each of the "
                f"optimizer's {self._groups} groups"
            )
        return rates

    def of(self, step: int) -> list[float]:
        """Give the rates of this step, whose update is under way on all replicas; the log has an error if need be."""
        try:
            return self.given(step)
        except _OF_A_FILE:
            raise
        except _OF_THE_STEP as error:
            before, rates = self._before(step)
            if before is None:
                raise
            self._tell(step, before, error)
            return rates

    def _given_if_any(self, step: int) -> list[float] | None:
        try:
            return self.given(step)
        except _OF_A_FILE:
            raise
        except _OF_THE_STEP:
            return None

    # All replicas wait for it, so it asks for few steps, and for such as follow from this one's number alone. Where all
    # steps up to one have rates, and none behind it has, it is that one.
    def _before(self, step: int) -> tuple[int | None, list[float]]:
        strides = [1 << power for power in range((step - 1).bit_length())]
        borders = ((step - 1) // stride * stride for stride in strides)  # the same ones in many steps
        for begin in itertools.chain(borders, [1], (step - stride for stride in strides)):
            if not 1 <= begin < step or (rates := self._any(begin)) is None:
                continue
            last = begin
            for stride in reversed(strides):
                later = self._any(last + stride) if last + stride < step else None
                if later is not None:
                    last, rates = last + stride, later
            return last, rates
        return None, []

    def _tell(self, step: int, before: int, error: Exception) -> None:
        if step <= self._told:  # a replica that catches up applies a step in parts
            return
        self._told = step
        self._times += 1
        if self._times & (self._times - 1) == 0:  # once a schedule has ended it has no rate in each step
            what = f"lr({step}) of attach() raised {type(error).__name__}: {error}"
            log.error(
                "step %d: %s. The rate of step %d was kept (so far: %d): all replicas train on with it",
                step, error if isinstance(error, InvalidArgument) else what, before, self._times,
            )  # fmt: skip
