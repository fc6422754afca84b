"""What of a model and its optimizer is the session's: parameters, buffers, metrics, and their buckets."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from rejoin.errors import InvalidArgument
from rejoin.torch import _optimizer

log = logging.getLogger("rejoin")


@dataclass
class Tensor:
    """A tensor of the session: a parameter, a buffer of the model, or the metrics."""

    name: str
    value: torch.Tensor  # the parameter, or the model's buffer
    elementwise: bool = True
    moments: int = 0
    group: int = -1  # the optimizer's; -1: no parameter, what is reduced becomes its value
    kept: _optimizer.Kept = field(default_factory=lambda: _optimizer.Kept((), None))
    scratch: Mapping[str, Any] = field(default_factory=dict)
    index: int = -1  # the session's
    bucket: int = -1
    columns: list[torch.Tensor] = field(default_factory=list)  # flat: the weight, and the moments
    gradient: torch.Tensor = field(default_factory=lambda: torch.empty(0))  # flat, as all_reduce() takes it
    reduced: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    arrived: bool = False  # the gradient, in this step

    def take_state(self, state: Mapping[str, Any]) -> int:
        """Take the moments that an optimizer has kept for this parameter, and give the steps that it has counted."""
        with torch.no_grad():
            for name, column in zip(self.kept.moments, self.columns[1:], strict=True):
                if isinstance(state.get(name), torch.Tensor):
                    column.copy_(state[name].reshape(-1))
        return int(state.get(self.kept.step, 0)) if self.kept.step is not None else 0

    @property
    def is_parameter(self) -> bool:
        return self.group >= 0


def parameters_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> list[Tensor]:
    """Give the parameters to be trained, in the model's order; `InvalidArgument` where one can't be."""
    tensors: list[Tensor] = []
    group_of = {id(p): g for g, group in enumerate(optimizer.param_groups) for p in group["params"]}
    elementwise: dict[tuple[int, torch.dtype], tuple[_optimizer.Kept, dict[str, Any], bool]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        check_placed(name, parameter, device)
        if type(parameter.data) is not torch.Tensor:
            raise InvalidArgument(
                f"parameter '{name}' is a {type(parameter.data).__name__}: plain tensors can be attached"
            )
        if not parameter.is_contiguous():
            raise InvalidArgument(f"parameter '{name}' is not contiguous: make it so before attach()")
        group = group_of.pop(id(parameter), None)
        if group is None:
            raise InvalidArgument(
                f"parameter '{name}' wants a gradient and is in no group of the optimizer: give it to the "
                "optimizer, or freeze it with requires_grad_(False)"
            )
        key = (group, parameter.dtype)
        if key not in elementwise:
            settings: dict[str, Any] = optimizer.param_groups[group]
            kept, scratch = _optimizer.kept_by(optimizer, settings, parameter)
            same = _optimizer.self_check(optimizer, settings, parameter)
            if not same:
                log.warning(
                    "%s rounds parts of a tensor otherwise than the whole: a replica that catches up gets whole "
                    "tensors",
                    type(optimizer).__name__,
                )
            elementwise[key] = (kept, scratch, same)
        kept, scratch, same = elementwise[key]
        tensors.append(Tensor(name, parameter, same, len(kept.moments), group, kept, scratch))
    if group_of:
        raise InvalidArgument(
            f"{len(group_of)} parameters of the optimizer are not the model's, or are frozen: they would not be "
            "kept equal on all replicas"
        )
    if not tensors:
        raise InvalidArgument("the model has no parameter that wants a gradient")
    return tensors


def buffers_of(model: torch.nn.Module, device: torch.device) -> Iterator[Tensor]:
    """Give the persistent buffers that become their mean over the replicas."""
    for name, buffer in persistent_buffers(model):
        if buffer.dtype in (torch.bool, torch.uint8, torch.int8, torch.int16) or buffer.numel() == 0:
            continue
        check_placed(name, buffer, device)
        yield Tensor(name, buffer)


def persistent_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Give each buffer that a checkpoint has, once, with its name."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or name in module._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            yield (f"{prefix}.{name}" if prefix else name), buffer


def check_placed(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Raise `InvalidArgument` where this tensor is on another device."""
    if tensor.device != device:
        raise InvalidArgument(
            f"'{name}' is on {tensor.device}, and the session on {device}: move the model there before "
            "attach(), or open the session with that device"
        )


def buckets_of(tensors: list[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """Divide tensors into buckets of one type and about `limit` bytes.

    Parameters from the last to the first, about as backward() comes to them; then what is none.
    """
    for parameters in (True, False):
        filling: dict[torch.dtype, list[Tensor]] = {}
        sizes: dict[torch.dtype, int] = {}
        for tensor in reversed(tensors):
            if tensor.is_parameter != parameters:
                continue
            dtype = tensor.value.dtype
            filling.setdefault(dtype, []).append(tensor)
            sizes[dtype] = sizes.get(dtype, 0) + tensor.value.numel() * dtype.itemsize
            if sizes[dtype] >= limit:
                del sizes[dtype]
                yield filling.pop(dtype)
        yield from filling.values()
