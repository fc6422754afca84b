"""A model's buffers: which of them become their mean over the replicas, and what of them a sum holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from rejoin._memory import TYPES
from rejoin.errors import InvalidArgument
from rejoin.torch._tensors import Tensor, check_placed, is_dense

# Types of buffers that a sum over all samples may not fit in, or be exact in, and those in which they are added up:
# what is equal on all replicas comes out of these as it was. There is none for int64 and float64: see contribution().
_SUMMED = {
    torch.int32: torch.int64,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
}
# Types that the session has not: what it keeps them in, and what they are added up in. A flag's mean is above 0 where
# one is set, however that is rounded; and what all have equal is the integer that is nearest to their rounded mean, of
# thousands of replicas, too.
_SMALL = {
    torch.bool: (torch.bfloat16, torch.bfloat16),
    torch.uint8: (torch.int32, torch.float32),
    torch.int8: (torch.int32, torch.float32),
    torch.int16: (torch.int32, torch.float64),
}
_MOST_CHANGE = 2**31  # of an int64 in a step: times all samples, of which there are fewer than 2^32, it fits
_MOST_FLOAT64 = 2.0**990  # times all samples it is no infinity


def buffers_of(model: torch.nn.Module, device: torch.device) -> Iterator[Tensor]:
    """Give the persistent buffers that become their mean over the replicas, as tensors of a session."""
    for name, buffer in reduced_buffers(model):
        check_placed(name, buffer, device)
        if not is_dense(buffer):
            kind = "nested" if buffer.is_nested else str(buffer.layout).removeprefix("torch.")
            raise InvalidArgument(
                f"buffer '{name}' is a {kind} tensor, and a mean is made of dense ones: register it with "
                "persistent=False where each replica makes it for itself, or keep its values as dense tensors"
            )
        if buffer.dtype not in TYPES and buffer.dtype not in _SMALL:
            instead = "float32 (torch.view_as_real())" if buffer.is_complex() else "float32, int32 or int64"
            raise InvalidArgument(
                f"buffer '{name}' has type {buffer.dtype}, of which Rejoin makes no mean: register it with "
                f"persistent=False where each replica makes it for itself, or keep it as {instead}"
            )
        if any(size > 1 and stride == 0 for size, stride in zip(buffer.shape, buffer.stride(), strict=True)):
            raise InvalidArgument(f"buffer '{name}' is expanded, and can't be written: register its clone()")
        prefix, _, own = name.rpartition(".")
        kept, summed = _SMALL.get(buffer.dtype) or (buffer.dtype, _SUMMED.get(buffer.dtype, buffer.dtype))
        yield Tensor(name, buffer, owner=(model.get_submodule(prefix), own), dtype=kept, gradient_dtype=summed)


def reduced_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Give each buffer that a checkpoint has and that becomes its mean over the replicas, once, with its name."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or name in module._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            if buffer.numel() > 0:
                yield (f"{prefix}.{name}" if prefix else name), buffer


def check_sums(contributions: list[tuple[Tensor, torch.Tensor]]) -> None:
    """Raise `InvalidArgument` where the sum over all samples of what buffers contribute might not fit.

    On a GPU the host waits for it, once.
    """
    beyond: dict[torch.dtype, Callable[[torch.Tensor], torch.Tensor]] = {
        torch.int64: lambda change: (change <= -_MOST_CHANGE) | (change >= _MOST_CHANGE),
        torch.float64: lambda value: (value.abs() > _MOST_FLOAT64) & value.isfinite(),
    }
    of = {dtype: [(t, own) for t, own in contributions if t.is_buffer and t.dtype == dtype] for dtype in beyond}
    found = [beyond[dtype](torch.cat([own for _, own in those])).any() for dtype, those in of.items() if those]
    if not found or not bool(torch.stack(found).any()):
        return
    for dtype, those in of.items():
        for tensor, own in those:
            if not bool(beyond[dtype](own).any()):
                continue
            if dtype == torch.int64:
                raise InvalidArgument(
                    f"buffer '{tensor.name}' of int64 has changed by 2^31 or more in a step, and the sum over all "
                    "samples might not fit: write such values before attach(), let it be several of int32, or "
                    "register it with persistent=False"
                )
            raise InvalidArgument(
                f"buffer '{tensor.name}' of float64 has values beyond 2^990, and the sum over all samples might be an "
                "infinity: let them be smaller, or infinities, or register it with persistent=False"
            )
