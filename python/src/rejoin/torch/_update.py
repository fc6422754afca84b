"""The update of a step: the clip, the learning rate, and the optimizer over whole tensors or parts of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rejoin import _native
from rejoin.errors import InvalidArgument, Unavailable
from rejoin.torch import _optimizer
from rejoin.torch._memory import tensor_at
from rejoin.torch._tensors import Tensor

Schedule = Callable[[int], "float | Sequence[float]"]
Piece = tuple[int, int, int, int, int]  # tensor, first element, elements, step, the gradient's address

_CLIP_REMEMBERED = 4096  # steps; a replica that catches up gets those of steps before


@dataclass(frozen=True)
class Rules:
    """What is done with a gradient, besides what the optimizer does."""

    max_norm: float | None = None
    lr: Schedule | None = None
    skip_nonfinite: bool = False


class Update:
    """Applies steps to the session's tensors."""

    def __init__(
        self,
        native: _native.Session,
        optimizer: torch.optim.Optimizer,
        tensors: Sequence[Tensor],
        rules: Rules,
        device: torch.device,
    ) -> None:
        """`optimizer.step` is still its own."""
        self._native, self._optimizer, self._tensors = native, optimizer, tensors
        self._rules, self._device = rules, device
        self._optimizer_step: Callable[[], Any] = optimizer.step
        self._constant_lr = [float(group["lr"]) for group in optimizer.param_groups]
        self._clip: dict[int, float | None] = {}  # by step; None: the step is skipped
        self.offset = 0  # steps that the optimizer had counted before the job's first
        self.last_norm: float | None = None

    def look(self, step: int) -> None:
        """Take what is needed of the step's gradient as a whole; on those that catch up, too, before apply()."""
        if self._rules.max_norm is None and not self._rules.skip_nonfinite:
            return
        total = sum(square_sum(tensor.reduced) for tensor in self._tensors if tensor.is_parameter)
        norm = math.sqrt(total) if total == total and total != math.inf else math.inf
        self.last_norm = norm
        coefficient: float | None = 1.0
        if self._rules.skip_nonfinite and norm == math.inf:
            coefficient = None
        elif self._rules.max_norm is not None and norm > self._rules.max_norm:
            coefficient = self._rules.max_norm / (norm + 1e-6)
        self._clip[step] = coefficient
        while len(self._clip) > _CLIP_REMEMBERED:
            self._clip.pop(next(iter(self._clip)))

    def _set_lr(self, step: int) -> None:
        groups = self._optimizer.param_groups
        if self._rules.lr is None:
            now = [float(group["lr"]) for group in groups]
            if now != self._constant_lr:
                raise InvalidArgument(
                    f"the learning rate has changed from {self._constant_lr} to {now} under the session: give "
                    "attach() lr=, a function of the step, so that a replica that catches up knows those of before"
                )
            return
        rates = self._rules.lr(step)
        all_rates = [float(rates)] * len(groups) if isinstance(rates, (int, float)) else [float(r) for r in rates]
        for group, rate in zip(groups, all_rates, strict=True):
            group["lr"] = rate

    def apply(self, step: int, pieces: Sequence[Piece]) -> None:
        """Apply what the session gives in this step, in order."""
        whole = all(
            of == step and first == 0 and count == self._tensors[index].value.numel()
            for index, first, count, of, _ in pieces
        ) and len(pieces) == sum(tensor.value.numel() > 0 for tensor in self._tensors)
        if whole:
            self._apply_whole(step)
        else:
            for of_step, run in itertools.groupby(pieces, key=lambda piece: piece[3]):
                self._apply_parts(of_step, list(run))
        for tensor in self._tensors:
            if not tensor.is_parameter:
                tensor.value.copy_(tensor.columns[0].view(tensor.value.shape))
            else:
                tensor.value.grad = None

    # The optimizer as it is, over the parameters as they are.
    def _apply_whole(self, step: int) -> None:
        coefficient = self._clip.get(step, 1.0)
        self._set_lr(step)
        for tensor in self._tensors:
            if not tensor.is_parameter:
                tensor.columns[0].copy_(tensor.reduced)
                continue
            tensor.value.grad = _clipped(tensor.reduced.view(tensor.value.shape), coefficient)
            self.count(tensor, step - 1)
        if coefficient is not None:
            self._optimizer_step()
        else:
            self._count_all(step)

    def _count_all(self, step: int) -> None:
        for tensor in self._tensors:
            if tensor.is_parameter:
                self.count(tensor, step)

    def count(self, tensor: Tensor, step: int) -> None:
        """Let the optimizer's own count of this parameter's steps be that of the job's step."""
        key = tensor.kept.step
        if key is None:
            return
        state = self._optimizer.state[tensor.value]
        if isinstance(state[key], torch.Tensor):
            state[key].fill_(step + self.offset)
        else:
            state[key] = step + self.offset

    # Parts of tensors, with the gradients of one step.
    def _apply_parts(self, step: int, pieces: list[Piece]) -> None:
        self._set_lr(step)
        needs_clip = self._rules.max_norm is not None or self._rules.skip_nonfinite
        if needs_clip and step not in self._clip:
            raise Unavailable(f"this replica has not seen the whole gradient of step {step}, and can't clip it")
        coefficient = self._clip.get(step, 1.0)
        parts: list[_optimizer.Part] = []
        for index, first, count, _, address in pieces:
            tensor = self._tensors[index]
            gradient = tensor_at(self._native, address, count, tensor.value.dtype, self._device)
            columns = [column[first : first + count] for column in tensor.columns]
            if not tensor.is_parameter:
                columns[0].copy_(gradient)
                continue
            whole = count == tensor.value.numel()
            shape = tensor.value.shape if whole else torch.Size([count])
            parts.append(
                (
                    self._optimizer.param_groups[tensor.group],
                    tensor.kept,
                    tensor.scratch,
                    [column.view(shape) for column in columns],
                    _clipped(gradient.view(shape), coefficient),
                )
            )
        if parts and coefficient is not None:
            _optimizer.apply(self._optimizer, parts, step + self.offset)
        self._count_all(step)


def _clipped(gradient: torch.Tensor, coefficient: float | None) -> torch.Tensor:
    return gradient if coefficient is None or coefficient == 1.0 else gradient * coefficient


# In rows of a fixed length, so that it does not depend on how torch divides the work among threads.
def square_sum(flat: torch.Tensor) -> float:
    """Sum the squares, in float64."""
    row = 4096
    total = 0.0
    for part in torch.split(flat, row * 2048):
        squares = part.double().square()
        whole = squares.numel() // row * row
        rows = squares[:whole].view(-1, row).sum(1)
        total += float(rows.sum()) + float(squares[whole:].sum())
    return total
