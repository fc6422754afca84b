"""What modules over torch have alike: a tensor's memory and type, and times, as the library takes them."""

from __future__ import annotations

import math
from datetime import timedelta

import torch

Memory = tuple[int, int]  # address, bytes

# rejoin_type of rejoin/c.h
TYPES: dict[torch.dtype, int] = {
    torch.float32: 0,
    torch.float64: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.int32: 4,
    torch.int64: 5,
}


def memory_of(tensor: torch.Tensor) -> Memory:
    """Give where a contiguous tensor's elements are."""
    return tensor.data_ptr(), tensor.nbytes


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Give the bytes of a tensor's elements, flat: where they are if it is contiguous, otherwise of a copy."""
    # A contiguous tensor of one element may have any stride, and view() wants 1.
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def milliseconds(time: timedelta) -> int:
    """Give it in milliseconds, rounded up; 0 where it is past."""
    return max(0, math.ceil(time.total_seconds() * 1000))
