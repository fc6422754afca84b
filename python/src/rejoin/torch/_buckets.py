"""A step's gradients on their way out: which have come, and the all-reduce of each bucket that is full."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from rejoin import _native
from rejoin._memory import bytes_of
from rejoin.errors import InvalidArgument, RejoinError
from rejoin.torch._buffers import check_sums
from rejoin.torch._refusals import refuse_interrupted
from rejoin.torch._sharding import local
from rejoin.torch._tensors import Tensor

log = logging.getLogger("rejoin")


# Gradients are looked at as a whole in the first steps, and then in each of so many: it reads all of them.
FIRST, _EACH = 8, 64


# Hooks then run in a graph of torch's, within which nothing says that the backward() has ended.
def _is_compiled() -> bool:
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(compiled, "in_compiled_autograd_region", False))


class Buckets:
    """The session's buckets, in the order in which they go out: the same on all replicas."""

    def __init__(self, native: _native.Session, device: torch.device) -> None:
        self._native = native
        self._device = device
        self._buckets: list[list[Tensor]] = []
        self._missing: list[int] = []  # gradients, by bucket, in this step
        self._next = 0  # to be handed over in this step
        self._holds_last = True  # the last bucket, until the gradients that went out before it are found unchanged
        self._weight = 1  # of this step's gradients
        self._warned = False  # of float16
        self._early = True
        self._told = False  # that gradients were written to which are what they were
        self._changes = self._changed_in = 0  # steps with gradients that were changed nevertheless, and the last one
        self._steps = 0
        self._in_backward = False  # also behind one that has raised
        self._in_the_midst = False  # of what nothing may interrupt
        self._halves = 0  # steps of which a backward() has raised when it had brought some gradients
        self._newest: dict[int, int] = {}  # by storage: the version of the gradient in it that came last in this step
        # What backward() queues after a hand-over is not to wait for it. By turns, so that one bucket's gradients are
        # known to be there while the one before is under way.
        self._side_streams: list[torch.cuda.Stream] = []
        self._came_on: list[set[torch.cuda.Stream]] = []  # by bucket: backward() runs where forward() did

    def add(self, bucket: list[Tensor]) -> None:
        """Add a bucket behind the others."""
        self._buckets.append(bucket)

    def begin(self, weight: int = 1, early: bool = True) -> None:
        """Begin a step, whose gradients count so much: no gradient has come. `early`: it is one of the job's first."""
        self._early = early
        if weight != 1 and self._weight == 1:
            self._warn_of_float16(weight)
        self._weight = weight
        self._steps += 1
        for bucket in self._buckets:
            for tensor in bucket:
                tensor.arrived, tensor.came = False, 0
                tensor.handed_over = None
                if tensor.main_grad:
                    tensor.gradient.zero_()
        self._missing, self._next, self._holds_last = [len(bucket) for bucket in self._buckets], 0, True
        self._came_on = [set() for _ in self._buckets]
        self._newest.clear()
        self._in_backward = self._in_the_midst = False

    # What a signal's handler raises within leaves the flag, and is named with the next gradient or optimizer.step().
    @contextmanager
    def _uninterrupted(self) -> Iterator[None]:
        if self._in_the_midst:
            refuse_interrupted(self._native.check, "the hand-over of gradients")
        self._in_the_midst = True
        try:
            yield
        except RejoinError:
            self._in_the_midst = False
            raise
        self._in_the_midst = False

    def _warn_of_float16(self, weight: int) -> None:
        narrow = [t.name for bucket in self._buckets for t in bucket if t.gradient.dtype == torch.float16]
        if narrow and not self._warned:
            self._warned = True
            log.warning(
                "replicas have different numbers of samples, and gradients are multiplied by theirs, %d here: those of "
                "float16, such as that of '%s', are infinite from %d on; attach(gradients=torch.float32) has room, and "
                "loss_scale= lowers the scale then",
                weight, narrow[0], 65504 // weight + 1,
            )  # fmt: skip

    def note_backward(self) -> None:
        """Take it that a gradient comes: whether its backward() ends is known by what is called behind it."""
        if self._in_backward or _is_compiled():
            return
        with suppress(RuntimeError):  # where something else than autograd's engine calls hooks
            torch.autograd.Variable._execution_engine.queue_callback(self.forget_backward)  # type: ignore[attr-defined]
            self._in_backward = True

    def forget_backward(self) -> None:
        """Take it that none has raised, or that nothing of it counts."""
        self._in_backward = False

    # It can't be taken back: some of it is with the others. Whoever raised again and again would end again and again.
    def _tell_of_half(self) -> None:
        self._in_backward = False
        every = [tensor for bucket in self._buckets for tensor in bucket if tensor.is_parameter]
        came = sum(tensor.arrived or tensor.value.grad is not None for tensor in every)
        if came == len(every):
            return
        self._halves += 1
        if self._halves & (self._halves - 1) == 0:
            log.error(
                "a backward() has raised when %d of %d parameters had their gradients: these count in the step, and "
                "the others as zeros (so far in %d steps). Let what it raises end this process, which is started "
                "again, and the step is taken without it",
                came, len(every), self._halves,
            )  # fmt: skip

    def bring(self, tensor: Tensor) -> None:
        """Take a parameter's gradient, and hand over the buckets that are full with it."""
        with self._uninterrupted():
            self._bring(tensor)

    def add_up(self, tensor: Tensor) -> None:
        """Take a parameter's gradient, to which others of this step may be added where it is a `main_grad`."""
        with self._uninterrupted():
            self._add_up(tensor)

    def _bring(self, tensor: Tensor) -> None:
        self._add_up(tensor)
        self._arrive(tensor)

    def _add_up(self, tensor: Tensor) -> None:
        gradient = tensor.value.grad
        with torch.no_grad():
            if not tensor.main_grad:
                if gradient is None:
                    raise InvalidArgument(
                        f"the gradient of '{tensor.name}' was taken away within the backward(), by a hook of before "
                        "attach() (register_post_accumulate_grad_hook), as of optimizers that update there: leave it "
                        "out, since the others get the gradient from here, and update by optimizer.step()"
                    )
                own = local(gradient)
                if own.layout is not torch.strided:
                    raise InvalidArgument(
                        f"the gradient of '{tensor.name}' is sparse, and those that are exchanged are dense: set "
                        "sparse=False where it is made, as in Embedding"
                    )
                tensor.view(tensor.gradient).copy_(own)
                tensor.handed_over = own.data_ptr(), own._version
                self._newest[own.untyped_storage().data_ptr()] = own._version
                return
            # Who has added it by himself, as fused kernels do, says so.
            if gradient is not None and not getattr(tensor.value, "grad_added_to_main_grad", False):
                tensor.view(tensor.gradient).add_(gradient)
        tensor.value.grad = None

    def bring_rest(self) -> None:
        """Take what no backward() has brought: buffers, metrics, and parameters that were not used."""
        with self._uninterrupted():
            self._bring_rest()

    def _bring_rest(self) -> None:
        contributions: list[tuple[Tensor, torch.Tensor]] = []
        if self._in_backward:
            self._tell_of_half()
        with torch.no_grad():
            for bucket in self._buckets:  # before the rest goes out, so that nobody commits what is refused
                for tensor in bucket:
                    if tensor.is_parameter and tensor.arrived:
                        self._check_unchanged(tensor)
            self._holds_last = False
            self._hand_over_what_is_full()
            for bucket in self._buckets:
                for tensor in bucket:
                    if tensor.arrived:
                        continue
                    if tensor.is_parameter and tensor.value.grad is not None:  # of accumulate() alone
                        self._bring(tensor)
                        continue
                    if not tensor.is_parameter:
                        contributions.append((tensor, tensor.contribution()))
                        tensor.gradient.copy_(contributions[-1][1])
                    elif not tensor.main_grad:
                        tensor.gradient.zero_()
                    self._arrive(tensor)
            check_sums(contributions)  # all are on their way while this looks

    def _check_unchanged(self, tensor: Tensor) -> None:
        gradient = tensor.value.grad
        if gradient is None and tensor.handed_over is not None:
            raise InvalidArgument(
                f"the gradient of '{tensor.name}' was taken away after the backward() that handed it over, which has "
                "no effect: zero_grad() comes after optimizer.step(). To leave a batch out, do not call backward() on "
                "it: its gradient is then zeros"
            )
        if gradient is None:
            return
        own = local(gradient)
        # Gradients that are views of one tensor, as FSDP2's, have one version: each addition to one moves it for all.
        newest = own.data_ptr(), self._newest.get(own.untyped_storage().data_ptr())
        untouched = (own.data_ptr(), own._version) in (tensor.handed_over, newest)
        if not self._looks(written_to=not untouched):
            return
        if not self._is_in(tensor, own):
            if not self._early:
                self._tell_of_change(tensor)
                return
            raise InvalidArgument(
                f"the gradient of '{tensor.name}' was changed after the backward() that handed it over, which has no "
                "effect: change the loss instead; to clip, give attach() max_norm="
            )
        if not untouched and not self._told:
            self._told = True
            log.warning(
                "the gradient of '%s' was written to after the backward() that handed it over, and is what it was: a "
                "clip by norm does so that has nothing to clip, or no limit. What changes it is refused: to clip, give "
                "attach() max_norm=, and leave the other clip out",
                tensor.name,
            )

    # A clip that had nothing to clip before. All replicas might end by it in the same step, or one that comes back in
    # each, and what was handed over counts for all of them.
    def _tell_of_change(self, tensor: Tensor) -> None:
        if self._changed_in == self._steps:
            return
        self._changed_in = self._steps
        self._changes += 1
        if self._changes & (self._changes - 1) == 0:
            log.error(
                "the gradient of '%s' was changed after the backward() that handed it over, which has no effect: it "
                "counts as it was (so far in %d steps). To clip, give attach() max_norm=",
                tensor.name, self._changes,
            )  # fmt: skip

    # What changes a gradient by way of .data or of other views is not in its version. On a GPU the host would wait.
    def _looks(self, written_to: bool) -> bool:
        by_turns = self._steps <= FIRST or self._steps % _EACH == 0
        return by_turns or not self._told if written_to else by_turns and self._device.type != "cuda"

    def _is_in(self, tensor: Tensor, own: torch.Tensor) -> bool:
        given = tensor.view(tensor.gradient)
        weighed = torch.empty_like(given).copy_(own)
        if self._weight != 1:
            weighed.mul_(self._weight)
        return torch.equal(weighed, given) or torch.equal(bytes_of(weighed), bytes_of(given))  # of NaNs

    def follow(self) -> None:
        """Let the current stream go on behind what was handed over, whose waits have ended."""
        for side in self._side_streams:
            torch.cuda.current_stream(self._device).wait_stream(side)

    def _arrive(self, tensor: Tensor) -> None:
        tensor.arrived = True
        if self._weight != 1:
            with torch.no_grad():
                tensor.gradient.mul_(self._weight)
        if self._device.type == "cuda":
            self._came_on[tensor.bucket].add(torch.cuda.current_stream(self._device))
        self._missing[tensor.bucket] -= 1
        self._hand_over_what_is_full()

    # In the order of their numbers, on all replicas: a stream that waits for one bucket keeps those behind it back.
    # The last one comes with optimizer.step(): a step of which a bucket is missing is committed by nobody.
    def _hand_over_what_is_full(self) -> None:
        last = len(self._missing) - (1 if self._holds_last else 0)
        while self._next < last and self._missing[self._next] == 0:
            self._hand_over(self._next)
            self._next += 1

    def _hand_over(self, bucket: int) -> None:
        if self._device.type != "cuda":
            self._native.all_reduce(bucket, None)
            return
        if not self._side_streams:
            self._side_streams = [torch.cuda.Stream(self._device) for _ in range(2)]  # type: ignore[no-untyped-call]
        side = self._side_streams[bucket % 2]
        for stream in self._came_on[bucket]:
            side.wait_stream(stream)
        self._native.all_reduce(bucket, int(side.cuda_stream))
