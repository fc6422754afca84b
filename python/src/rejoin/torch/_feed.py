"""The data of a job's steps for a loop that is not the script's own: `Session.data()`."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from rejoin.errors import InvalidArgument
from rejoin.torch import _loop
from rejoin.torch._data import Batches
from rejoin.torch._leaving import Terminated

if TYPE_CHECKING:
    from rejoin.torch._session import Session
    from rejoin.torch._step import Step

log = logging.getLogger("rejoin")


class Feed:
    """What a framework's loop iterates over in the place of a DataLoader: `Session.data`.

    Each iterator over it goes on where the one before ended. When the job has come to its end, or after SIGTERM, there
    is nothing any more, and `ended` is true, by which a loop over epochs is to end, too.
    """

    def __init__(self, session: Session, loader: DataLoader[Any], steps: int | None, micro_batches: int) -> None:
        if steps is not None and steps < 1:
            raise InvalidArgument(f"data() of {steps} steps: it is to be the job's --steps, or None")
        if micro_batches < 1:
            raise InvalidArgument(f"data() with micro_batches={micro_batches}: there is at least one in a step")
        self.loader, self.steps, self.micro_batches = loader, steps, micro_batches
        self._session = session
        self._running: Generator[Any, None, None] | None = None

    def __len__(self) -> int:
        """Give how many batches there are in the whole job, which a replica that has come back gets fewer of."""
        if self.steps is None:
            raise TypeError("how many steps the job has is not known: session.data(loader, steps=…)")
        return self.steps * self.micro_batches

    def __iter__(self) -> Iterator[Any]:
        """Give the data of the steps to come."""
        self._close()
        self._running = self._parts()
        return self._running

    def _close(self) -> None:
        if self._running is not None:
            self._running.close()

    def _parts(self) -> Generator[Any, None, None]:
        session = self._session
        if session._model is None:
            raise InvalidArgument(
                "data of the first step was asked for before attach(): attach model and optimizer first, and tell a "
                "loop that takes data ahead how much comes, session.data(loader, steps=…)"
            )
        for step, data in session.steps(self.loader):
            session._passes = self.micro_batches  # counted as gradients come: all parts may be taken ahead of them
            yield from [data] if self.micro_batches == 1 else self._divided(step, data)

    def _divided(self, step: Step, data: Any) -> list[Any]:
        batches = self.loader.batch_sampler
        samples = sum(end - begin for begin, end in step.samples)
        return parts_of(data, samples // (batches.shards if isinstance(batches, Batches) else 1), self.micro_batches)

    @property
    def ended(self) -> bool:
        """Whether nothing comes any more."""
        return self._session._ended

    def end(self) -> None:
        """Take the job's end where a loop has counted its steps, and not asked for another; else leave the job.

        Without it such a loop's replica goes without a word, and `session.finished` stays false.
        """
        session = self._session
        self._close()
        if session._ended or not session._joined:
            return
        if not session._in_step or session._updated:
            try:
                step = _loop.begin_step(session)
            except Terminated:
                step = None
            if step is not None:
                log.warning(
                    "replica %d leaves, as its loop has ended, and the job goes on with step %d: let the loop's number "
                    "of steps be the job's (--steps)", session.replica, step.number,
                )  # fmt: skip
        session.leave()


def parts_of(data: Any, samples: int, count: int) -> list[Any]:
    """Divide the collated data of so many samples into parts, which are equally long but for one sample.

    Tensors, arrays and lists with an element for each sample are divided; what has none is in each part.
    """
    if samples < count:
        raise InvalidArgument(
            f"a step of {samples} samples can't be divided into {count} micro-batches: let --batch be {count} or more"
        )
    borders = [samples * part // count for part in range(count + 1)]
    return [_sliced(data, samples, slice(*ends)) for ends in zip(borders, borders[1:], strict=False)]


def _sliced(data: Any, samples: int, part: slice) -> Any:
    if isinstance(data, torch.Tensor) or hasattr(data, "__array_interface__"):
        return data[part] if len(data.shape) > 0 and data.shape[0] == samples else data
    if isinstance(data, Mapping):
        values = {key: _sliced(value, samples, part) for key, value in data.items()}
        return values if type(data) is dict else type(data)(values)  # type: ignore[call-arg]
    if isinstance(data, tuple):
        fields = [_sliced(value, samples, part) for value in data]
        return type(data)(*fields) if hasattr(data, "_fields") else tuple(fields)
    if isinstance(data, list):
        if len(data) == samples and not any(isinstance(value, torch.Tensor) for value in data):
            return data[part]
        return [_sliced(value, samples, part) for value in data]
    return data
