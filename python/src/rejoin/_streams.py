"""CUDA streams as operations of a process group know them: by torch's current one."""

from __future__ import annotations

from typing import Any

import torch


def current(device: torch.device | None) -> int:
    """Give the handle of torch's current stream there, a cudaStream_t."""
    return int(torch.cuda.current_stream(device).cuda_stream)


def uses(tensor: torch.Tensor) -> None:
    """Have the tensor's memory stay until what is queued on the current stream is done with it."""
    tensor.record_stream(torch.cuda.current_stream(tensor.device))


def mark(device: torch.device | None) -> Any:
    """Give a mark behind what is queued on the current stream."""
    return torch.cuda.current_stream(device).record_event()


def follow(device: torch.device | None, mark: Any) -> None:
    """Let the current stream wait until all before the mark is done."""
    torch.cuda.current_stream(device).wait_event(mark)
