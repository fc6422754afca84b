"""A step, as the loop's body sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from rejoin.errors import InvalidArgument
from rejoin.torch._data import Ranges

if TYPE_CHECKING:
    from rejoin.torch._session import Session


@dataclass
class Step:
    """A step to train: its gradients are exchanged, and `optimizer.step()` ends it."""

    number: int  # from 1; the weights are those after the step before
    leads: bool  # true on all ranks of one replica: what one does for all, such as writing a checkpoint
    contributors: int  # replicas that train it, as planned when this rank began it
    samples: Ranges  # [begin, end) of the endless sample stream
    weight: int  # what this replica's gradients count: 1, or its samples with --constant-batch or --balance-batches
    _session: Session = field(repr=False)

    def record(self, **values: float | torch.Tensor) -> None:
        """Hand over this rank's values of the metrics that `attach` was given, before `optimizer.step()`.

        What is not recorded in a step counts with the mean of before.
        """
        self._session._metrics.record(values)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Give the loss times the loss scale that `attach` was asked for: call backward() on that."""
        if (scale := self._session._loss_scale) is None:
            raise InvalidArgument("step.scale() without a scale: attach(…, loss_scale=65536)")
        return torch.mul(loss.float(), 2.0 ** float(scale[0]))  # as a float16 it might be an infinity

    def mean(self, name: str) -> float:
        """Give a metric's mean over the replicas that trained this step, after `optimizer.step()`: equal on all.

        Where a replica has several ranks, it is the mean over those, too, that have given the metric to `attach`, and
        equal on all ranks of all replicas. It waits for this step's update on the other ranks; these need not ask.
        """
        step = self._session._step
        number = step.number if step is not None and self._session._updated else None
        return self._session._metrics.mean(name, number)
