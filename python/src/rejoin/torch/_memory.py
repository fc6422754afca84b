"""Tensors over memory that the session has allocated. They keep the session's memory as long as they live."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from rejoin import _native
from rejoin._memory import TYPES
from rejoin.errors import InvalidArgument


def type_of(what: str, dtype: torch.dtype) -> int:
    """Give the library's number of this element type; `InvalidArgument` where it has none."""
    if dtype not in TYPES:
        known = ", ".join(str(one).removeprefix("torch.") for one in TYPES)
        raise InvalidArgument(
            f"{what} has type {dtype}, and what a session keeps is of {known}: keep it as one of these, or take "
            "another optimizer"
        )
    return TYPES[dtype]


@functools.lru_cache(maxsize=4096)
def _buffer_type(size: int) -> Any:
    return type("_Buffer", (ctypes.c_ubyte * size,), {})


class _DeviceMemory:
    def __init__(self, owner: _native.Session, address: int, size: int) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


def tensor_at(
    owner: _native.Session, address: int, count: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Wrap `count` elements at this address of the device's memory, flat."""
    if count == 0:
        return torch.empty(0, dtype=dtype, device=device)
    size = count * dtype.itemsize
    if device.type == "cuda":
        return torch.as_tensor(_DeviceMemory(owner, address, size), device=device).view(dtype)
    buffer = _buffer_type(size).from_address(address)
    buffer.owner = owner
    return torch.frombuffer(buffer, dtype=dtype)
