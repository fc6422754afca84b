"""A step's gradients on their way out: which have come, and the all-reduce of each bucket that is full."""

from __future__ import annotations

import torch

from rejoin import _native
from rejoin.torch._sharding import local
from rejoin.torch._tensors import Tensor


class Buckets:
    """The session's buckets, in the order in which they go out: the same on all replicas."""

    def __init__(self, native: _native.Session, device: torch.device) -> None:
        self._native = native
        self._device = device
        self._buckets: list[list[Tensor]] = []
        self._missing: list[int] = []  # gradients, by bucket, in this step
        self._next = 0  # to be handed over in this step
        # What backward() queues after a hand-over is not to wait for it. By turns, so that one bucket's gradients are
        # known to be there while the one before is under way.
        self._side_streams: list[torch.cuda.Stream] = []

    def add(self, bucket: list[Tensor]) -> None:
        """Add a bucket behind the others."""
        self._buckets.append(bucket)

    def begin(self) -> None:
        """Begin a step: no gradient has come."""
        for bucket in self._buckets:
            for tensor in bucket:
                tensor.arrived = False
        self._missing, self._next = [len(bucket) for bucket in self._buckets], 0

    def bring(self, tensor: Tensor) -> None:
        """Take a parameter's gradient, and hand over the buckets that are full with it."""
        gradient = tensor.value.grad
        assert gradient is not None
        with torch.no_grad():
            tensor.view(tensor.gradient).copy_(local(gradient))
        self._arrive(tensor)

    def bring_rest(self) -> None:
        """Take what no backward() has brought: buffers, metrics, and parameters that were not used."""
        with torch.no_grad():
            for bucket in self._buckets:
                for tensor in bucket:
                    if tensor.arrived:
                        continue
                    if tensor.is_parameter and tensor.value.grad is not None:  # of accumulate() alone
                        self.bring(tensor)
                        continue
                    if tensor.is_parameter:
                        tensor.gradient.zero_()
                    else:
                        tensor.gradient.copy_(tensor.value.reshape(-1))
                    self._arrive(tensor)

    def follow(self) -> None:
        """Let the current stream go on behind what was handed over, whose waits have ended."""
        for side in self._side_streams:
            torch.cuda.current_stream(self._device).wait_stream(side)

    def _arrive(self, tensor: Tensor) -> None:
        tensor.arrived = True
        self._missing[tensor.bucket] -= 1
        # In the order of their numbers, on all replicas: a stream that waits for one bucket keeps those behind it back.
        while self._next < len(self._missing) and self._missing[self._next] == 0:
            self._hand_over(self._next)
            self._next += 1

    def _hand_over(self, bucket: int) -> None:
        if self._device.type != "cuda":
            self._native.all_reduce(bucket, None)
            return
        if not self._side_streams:
            self._side_streams = [torch.cuda.Stream(self._device) for _ in range(2)]  # type: ignore[no-untyped-call]
        side = self._side_streams[bucket % 2]
        side.wait_stream(torch.cuda.current_stream(self._device))
        self._native.all_reduce(bucket, int(side.cuda_stream))
