"""The data of a job's steps for a loop that is not the script's own: `Session.data()`."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, default_collate

from rejoin.errors import InvalidArgument
from rejoin.torch import _attach, _loop
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
                "loop that takes data ahead how much comes, session.data(loader, steps=…). What tries settings before "
                "the job, as Lightning's Tuner does (lr_find()), goes over a plain DataLoader, in one process"
            )
        for step, data in session.steps(self.loader):
            session._passes = self.micro_batches  # counted as gradients come: all parts may be taken ahead of them
            parts = [data] if self.micro_batches == 1 else self._divided(step, data)
            for number, part in enumerate(parts):
                session._parts_left = len(parts) - number - 1
                yield part

    def _divided(self, step: Step, data: Any) -> list[Any]:
        batches = self.loader.batch_sampler
        samples = sum(end - begin for begin, end in step.samples)
        samples //= batches.shards if isinstance(batches, Batches) else 1
        return parts_of(data, samples, self.micro_batches, self.loader.collate_fn is default_collate)

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
                step = _attach.uncompiled(_loop.begin_step)(session)
            except Terminated:
                step = None
            if step is not None:
                log.warning(
                    "replica %d leaves, as its loop has ended, and the job goes on with step %d: let the loop's number "
                    "of steps be the job's (--steps)", session.replica, step.number,
                )  # fmt: skip
        session.leave()


def parts_of(data: Any, samples: int, count: int, by_default: bool = True) -> list[Any]:
    """Divide the collated data of so many samples into parts, which are equally long but for one sample.

    Tensors, arrays and lists with an element for each sample are divided; what has none is in each part. A list or
    tuple that torch's own collate_fn has made (`by_default`) has fields, or strings of the samples. Of others as long
    as there are samples the outermost has fields if each of these has as many elements, and the rest has samples.
    """
    if samples < count:
        raise InvalidArgument(
            f"a step of {samples} samples can't be divided into {count} micro-batches: let --batch be {count} or more"
        )
    borders = [samples * part // count for part in range(count + 1)]
    slicer = _Slicer(samples, by_default)
    parts = [slicer.sliced(data, slice(*ends)) for ends in zip(borders, borders[1:], strict=False)]
    if not slicer.divided:
        raise InvalidArgument(
            f"nothing of a {type(data).__name__} that the loader's collate_fn gives has an element for each of the "
            f"{samples} samples: it can't be divided into micro-batches"
        )
    return parts


class _Slicer:
    def __init__(self, samples: int, by_default: bool) -> None:
        self._samples, self._by_default = samples, by_default
        self.divided = False  # anything was

    def sliced(self, data: Any, part: slice, outermost: bool = True) -> Any:
        if _is_array(data):
            return self._elements(data, part) if self._has_all(data) else data
        if isinstance(data, Mapping):
            values = {key: self.sliced(value, part, outermost=False) for key, value in data.items()}
            return values if type(data) is dict else type(data)(values)  # type: ignore[call-arg]
        if not isinstance(data, list | tuple):
            return data
        if hasattr(data, "_fields"):
            return type(data)(*(self.sliced(value, part, outermost=False) for value in data))
        if self._has_samples(data, outermost):
            return self._elements(data, part)
        return type(data)(self.sliced(value, part, outermost=False) for value in data)

    def _elements(self, data: Any, part: slice) -> Any:
        self.divided = True
        return data[part]

    def _has_samples(self, data: Any, outermost: bool) -> bool:
        if len(data) != self._samples:
            return False
        if all(isinstance(value, str | bytes) for value in data):
            return True
        fields = outermost and all(self._has_all(value) for value in data)
        if isinstance(data, list):
            fields = fields and not any(isinstance(value, Mapping) for value in data)
        return not self._by_default and not fields

    def _has_all(self, data: Any) -> bool:
        if _is_array(data):
            return len(data.shape) > 0 and bool(data.shape[0] == self._samples)
        if isinstance(data, Mapping):
            return len(data) > 0 and all(self._has_all(value) for value in data.values())
        return isinstance(data, list | tuple) and len(data) == self._samples


def _is_array(data: Any) -> bool:
    return isinstance(data, torch.Tensor) or hasattr(data, "__array_interface__")
