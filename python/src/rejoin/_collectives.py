"""Tensors as the memory that a process group's operations take, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from rejoin import _streams
from rejoin._memory import TYPES, Memory, memory_of

_NAMES = "all_reduce reduce broadcast all_gather reduce_scatter gather scatter all_to_all barrier send receive"
COLLECTIVES = {name: number for number, name in enumerate(_NAMES.split())}  # rejoin_collective of rejoin/c.h
_SMALL = (torch.bool, torch.uint8, torch.int8, torch.int16)  # are reduced as int32, and cut off
_SUM, _MEAN = 0, 1
_BITWISE = (5, 6, 7)
_COMBINES = {  # rejoin_combine
    dist.ReduceOp.SUM: _SUM,
    dist.ReduceOp.AVG: _MEAN,
    dist.ReduceOp.MAX: 2,
    dist.ReduceOp.MIN: 3,
    dist.ReduceOp.PRODUCT: 4,
    dist.ReduceOp.BAND: 5,
    dist.ReduceOp.BOR: 6,
    dist.ReduceOp.BXOR: 7,
}


class _Waits(Protocol):
    def wait_for_it_alone(self) -> None: ...
    def wait_on_stream(self) -> None: ...
    def is_completed(self) -> bool: ...


@dataclass
class Staged:
    """An operation's memory, what keeps it alive, and what is copied when it has ended."""

    inputs: list[Memory] = field(default_factory=list)
    outputs: list[Memory] = field(default_factory=list)
    type: int = 0
    alive: list[torch.Tensor] = field(default_factory=list)
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # to, from
    on_device: bool = False  # all of it is in the memory of the group's GPU
    others: Sequence[_Waits] = ()  # that end before it does

    def write_back(self) -> None:
        """Copy results to tensors that the operation could not write."""
        # What was made within inference_mode() is written within it only.
        with torch.inference_mode(any(to.is_inference() for to, _ in self.copies)), torch.no_grad():
            for to, of in self.copies:
                to.copy_(of)  # a small integer is cut off, as by an addition of its type
                if self.on_device:
                    _streams.uses(of)


def reduction_of(opts: Any) -> int:
    """Give the number of the reduction that torch's options name. Errors: `ValueError`."""
    wanted = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    for torchs, ours in _COMBINES.items():
        if wanted == torchs:
            return ours
    name = getattr(getattr(wanted, "op", wanted), "name", wanted)
    raise ValueError(f"the backend 'rejoin' reduces by SUM, AVG, MIN, MAX, PRODUCT, BAND, BOR and BXOR, not by {name}")


def _check(tensor: torch.Tensor, written: bool = False) -> torch.Tensor:
    """Give the tensor that has the memory. Errors: `ValueError`."""
    if tensor.is_meta:
        raise ValueError("the backend 'rejoin' takes tensors that have memory, not one on the device 'meta'")
    if tensor.layout != torch.strided:
        raise ValueError(f"the backend 'rejoin' takes dense tensors, not one of layout {tensor.layout}")
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        from torch.distributed._functional_collectives import AsyncCollectiveTensor

        if isinstance(tensor, AsyncCollectiveTensor):  # a result that may be on its way
            waited: Any = tensor
            tensor = waited.trigger_wait()
    if tensor.numel() and tensor.data_ptr() == 0:
        raise ValueError(f"the backend 'rejoin' takes tensors that have memory of their own, not a {_name(tensor)}")
    if written and torch._debug_has_internal_overlap(tensor) == 1:
        raise ValueError(
            f"a collective writes into this tensor of {list(tensor.shape)}, whose elements share memory (strides "
            f"{tensor.stride()}), as expand() makes it: give it a clone()"
        )
    return tensor.detach()


def _name(tensor: torch.Tensor) -> str:
    return f"{type(tensor).__module__}.{type(tensor).__qualname__}"


def on_device(tensors: Sequence[torch.Tensor], device: torch.device | None) -> bool:
    """Whether all are in the memory of the group's GPU; none: it has none. Errors: `ValueError`."""
    if device is None or not tensors or not all(tensor.is_cuda for tensor in tensors):
        return False
    if others := {str(tensor.device) for tensor in tensors if tensor.device != device}:
        raise ValueError(
            f"this process group's device is {device}, and tensors are on {', '.join(sorted(others))}: call "
            "torch.cuda.set_device() before the group is made, or give it Options(device=…)"
        )
    return True


def _plain(tensor: torch.Tensor, there: bool) -> bool:
    here = there or tensor.device.type == "cpu"
    return here and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _beside(tensor: torch.Tensor, there: bool, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Give a new tensor of its shape: on the GPU, too, or in the host's memory."""
    return torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device=tensor.device if there else "cpu")


def _parts(tensor: torch.Tensor, cut: int | Sequence[int]) -> list[torch.Tensor]:
    """Cut a contiguous tensor: in so many equal parts, or in parts of so many rows. Errors: `ValueError`."""
    if isinstance(cut, int):
        if tensor.numel() % cut != 0:
            raise ValueError(f"a tensor of {tensor.numel()} elements has no {cut} equal parts, one for each member")
        return list(tensor.reshape(-1).chunk(cut)) if tensor.numel() else [tensor] * cut
    if sum(cut) != (tensor.shape[0] if tensor.dim() else 1):
        raise ValueError(f"splits of {sum(cut)} rows do not fit a tensor of {list(tensor.shape)}")
    return list(torch.split(tensor, list(cut)))


def _memories(tensor: torch.Tensor, cut: int | Sequence[int]) -> list[Memory]:
    """Give where its parts are; 0: it is not cut."""
    return [memory_of(part) for part in (_parts(tensor, cut) if cut else [tensor])]


def stage_all(
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    *,
    device: torch.device | None = None,
    in_place: bool = False,
    cut_inputs: int | Sequence[int] = 0,
    cut_outputs: int | Sequence[int] = 0,
) -> Staged:
    """Give tensors as memory, the host's or the device's; those that are elsewhere, or strided, by way of copies."""
    if len(dtypes := {tensor.dtype for tensor in (*inputs, *outputs)}) > 1:
        raise ValueError(f"a collective takes tensors of one type, not of {', '.join(sorted(map(str, dtypes)))}")
    there = on_device((*inputs, *outputs), device)
    staged = Staged(on_device=there)
    for tensor in (_check(one, written=in_place) for one in inputs):
        here = tensor
        if not _plain(tensor, there):
            here = tensor.resolve_conj().resolve_neg()
            here = (here if there else here.cpu()).contiguous()
        if in_place and here is not tensor:
            staged.copies.append((tensor, here))
        staged.alive.append(here)
        staged.inputs += _memories(here, cut_inputs)
    for tensor in (_check(one, written=True) for one in outputs):
        here = tensor
        if not _plain(tensor, there):
            here = _beside(tensor, there)
            staged.copies.append((tensor, here))
        staged.alive.append(here)
        staged.outputs += _memories(here, cut_outputs)
    return staged


def stage_reduction(
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    how: int,
    *,
    device: torch.device | None = None,
    in_place: bool = False,
    cut_inputs: int = 0,
) -> Staged:
    """Give tensors as memory of elements that can be reduced."""
    # A GPU sums and averages; for other reductions its tensors are copied to the host's memory.
    there = on_device((*inputs, *outputs), device) and how in (_SUM, _MEAN)
    staged = Staged(on_device=there)
    dtypes = {tensor.dtype for tensor in (*inputs, *outputs)}
    if len(dtypes) != 1:
        raise ValueError(f"a reduction takes tensors of one type, not of {', '.join(sorted(map(str, dtypes)))}")
    dtype = dtypes.pop()
    if dtype.is_complex and how not in (_SUM, _MEAN):
        raise ValueError(f"complex numbers ({dtype}) can be summed and averaged, not reduced otherwise")
    if dtype == torch.bool and how == _MEAN:
        raise ValueError("AVG of bool is no bool: reduce by MAX (any) or MIN (all), or convert it, say to float32")
    if how in _BITWISE and (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(f"BAND, BOR and BXOR reduce the bits of integers, not {dtype}")
    if not dtype.is_complex and dtype not in TYPES and dtype not in _SMALL:
        raise ValueError(f"the backend 'rejoin' can't reduce {dtype}: convert it")

    def reducible(tensor: torch.Tensor, fresh: bool, written: bool) -> torch.Tensor:
        tensor = _check(tensor, written)
        here = tensor if _plain(tensor, there) else _beside(tensor, there)
        if dtype in _SMALL:
            here = _beside(tensor, there, torch.int32)
        if here is not tensor:
            if not fresh:
                here.copy_(tensor)
            if written:
                staged.copies.append((tensor, here))
        staged.alive.append(here)
        return torch.view_as_real(here) if dtype.is_complex else here

    numbers = torch.int32 if dtype in _SMALL else dtype.to_real() if dtype.is_complex else dtype
    staged.type = TYPES[numbers]
    for tensor in inputs:
        here = reducible(tensor, fresh=False, written=in_place)
        staged.inputs += _memories(here, cut_inputs)
    staged.outputs = [memory_of(reducible(tensor, fresh=True, written=True)) for tensor in outputs]
    return staged
