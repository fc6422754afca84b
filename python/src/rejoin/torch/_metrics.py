"""Numbers of a step whose means over all replicas, and their ranks, come out of the all-reduce with the gradients."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from rejoin.errors import InvalidArgument, RejoinError
from rejoin.torch._leaving import Terminated
from rejoin.torch._ranks import Ranks, added_up

if TYPE_CHECKING:
    from rejoin.torch._tensors import Tensor

log = logging.getLogger("rejoin")


# A set's order is each process's own.
def _names(given: object) -> tuple[str, ...]:
    told = f"metrics={given!r}: give a list of names"
    if isinstance(given, str):
        raise InvalidArgument(f"{told}, metrics=[{given!r}]")
    if isinstance(given, set | frozenset) or not isinstance(given, Iterable):
        raise InvalidArgument(f"{told}, such as ['loss'], which has the same order on all replicas")
    names = tuple(given)
    if not all(isinstance(name, str) for name in names):
        raise InvalidArgument(f"metrics={list(names)!r}: names are texts, such as 'loss'")
    return names


def _number(name: str, value: object) -> float | torch.Tensor:
    if isinstance(value, torch.Tensor):
        if value.numel() == 1 and not value.is_complex():
            return value.detach()
        what = f"a tensor of shape {tuple(value.shape)} and type {value.dtype}"
    else:
        try:
            return float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            what = repr(value)
    raise InvalidArgument(f"record({name}=…) was given {what}: a metric is a real number, or a tensor of one")


class Metrics:
    """The metrics that `attach` was given: this rank's values before the step's all-reduce, its means after it.

    The all-reduce is among the same rank of all replicas. Where a replica has several ranks, each tells the others its
    means in its update, whether they will ask for them or not, and mean() waits for those. Which ranks count is what
    attach() was given there, so that all replicas take the same ones; they count alike, as in FSDP2's mean of the
    gradients, since they have as many samples.
    """

    def __init__(self, names: Sequence[str], device: torch.device, ranks: Ranks | None = None) -> None:
        self.names = _names(names)
        if len(set(self.names)) < len(self.names):
            raise InvalidArgument(f"metrics={self.names}: one of them is there twice")
        self.values = torch.zeros(len(self.names), dtype=torch.float64, device=device)
        self.tensor: Tensor | None = None  # the session's
        self._ranks = ranks if ranks is not None and ranks.several else None
        self._names_of_ranks: list[list[str]] | None = None  # as far as they were asked for
        self._recorded: set[str] = set()  # on this rank, in any step
        self._told = 0  # the last step of which this rank has told its means
        self._means: dict[str, float] = {}  # over all ranks, of the step `_of`
        self._of = 0
        self._noted: set[str] = set()
        if self._ranks is not None:
            self._ranks.say("metrics", json.dumps(self.names).encode())

    @property
    def state(self) -> torch.Tensor | None:
        """The last step's means, which belong to a checkpoint; None where there are no metrics."""
        return self.values if self.names else None

    def told(self) -> str:
        """Tell which number is of which name: replicas that differ in it would take means of each other's metrics."""
        return f"metrics {json.dumps(self.names)}" if self.names else ""

    def _index(self, name: str) -> int:
        if name not in self.names:
            raise InvalidArgument(f"'{name}' is none of the metrics that attach() was given: {self.names}")
        return self.names.index(name)

    def record(self, values: Mapping[str, float | torch.Tensor]) -> None:
        """Take this rank's values of a step."""
        if not self.names:
            raise InvalidArgument("no metrics were declared: attach(…, metrics=('loss',))")
        numbers = {name: _number(name, value) for name, value in values.items() if self._index(name) >= 0}
        for name, number in numbers.items():  # all of them, or none
            self.values[self._index(name)] = number
            self._recorded.add(name)

    def tell(self, step: int) -> None:
        """Tell this replica's other ranks what the step has made of this one's values, before it is applied."""
        if self._ranks is None:
            return
        if self.tensor is not None:
            means = zip(self.names, self.tensor.reduced.tolist(), strict=True)
            told = {name: (mean, name in self._recorded) for name, mean in means}
            # Whoever had the store may have left with this step: that is no reason to miss its update.
            with suppress(torch.distributed.DistError):
                self._ranks.tell_of_step("means", step, json.dumps(told).encode())
        self._told = step  # mean() finds the store gone, too

    def mean(self, name: str, step: int | None) -> float:
        """Give the mean over the replicas and their ranks, which is there once this step, if any, was reduced."""
        if self._ranks is None or not any(name in names for names in self._of_ranks(self._ranks)):
            self._index(name)
        if step is None:
            raise InvalidArgument(f"the mean of '{name}' is known after optimizer.step()")
        if self._ranks is None or step != self._told:  # one that was cut short by the job's end is told by nobody
            index = self._index(name)
            assert self.tensor is not None
            return float(self.tensor.columns[0][index])  # `values` may be of the next step already
        self._take(self._ranks, step)
        return self._means[name]

    def keep(self) -> None:
        """Take the last step's means while the other ranks are there: what comes after the loop may ask for them."""
        if self._ranks is not None and self._told > self._of:
            with suppress(RejoinError, Terminated):  # who asks hears it
                self._take(self._ranks, self._told)

    # The names that each rank has given to attach(): stages of a pipeline, say, may have no loss.
    def _of_ranks(self, ranks: Ranks) -> list[list[str]]:
        if self._names_of_ranks is None:
            self._names_of_ranks = [json.loads(names) for names in ranks.told("metrics")]
        return self._names_of_ranks

    # In the ranks' order: all get the same bits.
    def _take(self, ranks: Ranks, step: int) -> None:
        if step == self._of:
            return
        having = [rank for rank, names in enumerate(self._of_ranks(ranks)) if names]
        told = dict(zip(having, map(json.loads, ranks.told_of_step("means", step, having)), strict=True))
        means: dict[str, float] = {}
        for name in {name: None for of in told.values() for name in of}:
            counts = {rank: of[name] for rank, of in told.items() if name in of}
            means[name] = added_up(mean for mean, _ in counts.values()) / len(counts)
            silent = [rank for rank, (_, recorded) in counts.items() if not recorded]
            if silent and len(silent) < len(counts) and name not in self._noted:
                self._noted.add(name)
                log.error(
                    "rank %d of this replica has recorded no '%s', which rank %d has, and counts in its mean: record "
                    "it on each rank, or leave it out of attach(metrics=) there",
                    silent[0],
                    name,
                    next(rank for rank in counts if rank not in silent),
                )
        self._means, self._of = means, step
