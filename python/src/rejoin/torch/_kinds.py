"""What an optimizer keeps for parameters, and whether parts of them are updated as the whole is: tried once for each
kind of them."""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rejoin.errors import InvalidArgument
from rejoin.torch import _optimizer
from rejoin.torch._attributes import key_of, refuse_undivided
from rejoin.torch._self_check import Trial, check_large, self_check
from rejoin.torch._sharding import Shard

log = logging.getLogger("rejoin")


@dataclass
class Kind:
    """Parameters of one group, type, number of dimensions, and with the same attributes that count."""

    group: Mapping[str, Any]
    like: torch.Tensor  # without elements
    first: torch.Tensor  # of these parameters
    kept: _optimizer.Kept
    scratch: Mapping[str, Any]
    goes_by: frozenset[str]
    elementwise: bool
    divided: bool  # among ranks
    largest: Sequence[int]  # the shape
    alike: Hashable  # of kinds with the same, whether they go by a tensor's size is tried with one


def _options_of(group: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Give a group's settings; of numbers with a fraction whether they are zero: their size makes no other rule."""

    def option(value: Any) -> str:
        if isinstance(value, float):
            return "0.0" if value == 0.0 else "a number"
        return f"({', '.join(map(option, value))})" if isinstance(value, (tuple, list)) else str(value)

    settings = {key: value for key, value in group.items() if key != "params" and not isinstance(value, torch.Tensor)}
    return tuple(sorted((key, option(value)) for key, value in settings.items()))


class Kinds:
    """Those of a model's parameters."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, device: torch.device, averaged: bool, main_grad: bool, finite: bool
    ) -> None:
        self._optimizer, self._device = optimizer, device
        self._averaged, self._main_grad, self._finite = averaged, main_grad, finite
        self._name = type(optimizer).__name__
        self._read: dict[tuple[Any, ...], frozenset[str]] = {}
        self._kinds: dict[tuple[Any, ...], Kind] = {}
        self._of_parameters: list[Kind] = []

    def of(self, name: str, parameter: torch.nn.Parameter, group: int, dtype: torch.dtype, shard: Shard | None) -> Kind:
        """Give the kind of the next parameter, whose weight has this type in the session."""
        settings: dict[str, Any] = self._optimizer.param_groups[group]
        shape = (shard.count,) if shard is not None else parameter.shape
        like = torch.empty((0,) * parameter.dim(), dtype=dtype, device=self._device)
        carries = (group, dtype, parameter.dim(), *key_of(parameter))
        if carries not in self._read:
            self._read[carries] = _optimizer.goes_by(self._optimizer, settings, like, parameter)
        goes_by = self._read[carries]
        refuse_undivided(self._name, name, parameter, goes_by, self._main_grad)
        key = (group, dtype, parameter.dim(), *key_of(parameter, goes_by))
        if key not in self._kinds:
            kept, scratch = _optimizer.kept_by(self._optimizer, settings, like, int(self._averaged), parameter)
            same = self_check(self._optimizer, settings, like, parameter, self._finite)
            alike = (*key[1:], repr(kept), _options_of(settings))
            divided = shard is not None
            self._kinds[key] = Kind(settings, like, parameter, kept, scratch, goes_by, same, divided, shape, alike)
        kind = self._kinds[key]
        kind.largest = max(kind.largest, shape, key=math.prod)
        self._of_parameters.append(kind)
        return kind

    def elementwise(self) -> list[bool]:
        """Say of each of the parameters whether its parts are updated as the whole is, when all of them have come.

        Raises `InvalidArgument` where they are not, and are divided among ranks.
        """
        largest: dict[Hashable, Kind] = {}
        for kind in self._kinds.values():
            one = largest.setdefault(kind.alike, kind)
            largest[kind.alike] = max(one, kind, key=lambda kind: math.prod(kind.largest))
        same: dict[Hashable, bool] = {}
        for alike, one in largest.items():
            if one.elementwise:
                trial = Trial(self._optimizer, one.group, one.like, one.first, one.kept, one.scratch)
                same[alike] = check_large(trial, one.largest)
        for kind in self._kinds.values():
            kind.elementwise = kind.elementwise and same.get(kind.alike, False)
            if kind.divided and not kind.elementwise:
                remedy = ". Where it does so but for what is not finite, attach(…, skip_nonfinite=True)"
                raise InvalidArgument(
                    f"{self._name} does not update element by element, and can't be given shards"
                    f"{'' if self._finite else remedy}"
                )
        if not all(kind.elementwise for kind in self._kinds.values()):
            log.warning(
                "%s updates parts of a tensor otherwise than the whole: a replica that catches up gets whole tensors",
                self._name,
            )
        return [kind.elementwise for kind in self._of_parameters]
