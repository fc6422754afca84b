"""Numbers of a replica's step whose means over all replicas come out of the all-reduce with the gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from rejoin.errors import InvalidArgument


class Metrics:
    """The metrics that `attach` was given: this replica's values before the step's all-reduce, the means after it."""

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self.names = tuple(names)
        if len(set(self.names)) < len(self.names):
            raise InvalidArgument(f"metrics={self.names}: one of them is there twice")
        self.values = torch.zeros(len(self.names), dtype=torch.float64, device=device)

    @property
    def state(self) -> torch.Tensor | None:
        """The last step's means, which belong to a checkpoint; None where there are no metrics."""
        return self.values if self.names else None

    def _index(self, name: str) -> int:
        if name not in self.names:
            raise InvalidArgument(f"'{name}' is none of the metrics that attach() was given: {self.names}")
        return self.names.index(name)

    def record(self, values: Mapping[str, float | torch.Tensor]) -> None:
        """Take this replica's values of a step."""
        if not self.names:
            raise InvalidArgument("no metrics were declared: attach(…, metrics=('loss',))")
        for name, value in values.items():
            self.values[self._index(name)] = value.detach() if isinstance(value, torch.Tensor) else float(value)

    def mean(self, name: str, known: bool) -> float:
        """Give the mean over the replicas, which is there once the step is `known` to have been reduced."""
        index = self._index(name)
        if not known:
            raise InvalidArgument(f"the mean of '{name}' is known after optimizer.step()")
        return float(self.values[index])
