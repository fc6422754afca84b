"""The update of a step: the clip, the learning rate, and the optimizer over whole tensors or parts of them."""

from __future__ import annotations

import itertools
import logging
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rejoin import _native
from rejoin.errors import InvalidArgument, Unavailable
from rejoin.torch import _optimizer
from rejoin.torch._memory import tensor_at
from rejoin.torch._modes import one_thread
from rejoin.torch._ranks import REMEMBERED, Ranks, added_up
from rejoin.torch._rates import Rates, Schedule
from rejoin.torch._settings import Settings
from rejoin.torch._sharding import first_copies
from rejoin.torch._tensors import Tensor

TensorUpdate = tuple[int, int, int, int, int]  # tensor, first element, elements, step, the gradient's address

_GROWS_AFTER = 2000  # steps without an infinity, as torch's GradScaler
_MOST_LOG_SCALE = 120
# With less float16 would round most gradients to 0, and each power of 2 takes _GROWS_AFTER steps to come back.
_LEAST_LOG_SCALE = -14
_FINDS_ITS_SCALE = 8  # steps in a row, of which fewer are skipped in each sound job of float16

log = logging.getLogger("rejoin")


@dataclass(frozen=True)
class Rules:
    """What is done with a gradient, besides what the optimizer does."""

    max_norm: float | None = None
    lr: Schedule | None = None
    skip_nonfinite: bool = False
    ema: float | None = None

    @property
    def look_at_norm(self) -> bool:
        """Whether a step's gradient as a whole has to be looked at."""
        return self.max_norm is not None or self.skip_nonfinite


class Update:
    """Applies steps to the session's tensors."""

    def __init__(
        self,
        native: _native.Session,
        optimizer: torch.optim.Optimizer,
        tensors: Sequence[Tensor],
        rules: Rules,
        device: torch.device,
        ranks: Ranks,
        scale: Tensor | None = None,
    ) -> None:
        """`optimizer.step` is still its own. `scale`: [log2 of the loss's scale, steps since it has changed]."""
        self._native, self._optimizer, self._tensors = native, optimizer, tensors
        self._rules, self._device, self._ranks, self._scale = rules, device, ranks, scale
        # The optimizer's own step() takes the parameters as they are: all of them, and of the session's type.
        self._own_step = not any(t.shard is not None or t.has_master for t in tensors if t.is_parameter)
        self._optimizer_step: Callable[[], Any] = optimizer.step
        self.settings = Settings(optimizer, tensors, rules.lr is not None)
        self._rates = Rates(rules.lr, len(optimizer.param_groups)) if rules.lr is not None else None
        self._seen: dict[int, tuple[float, float]] = {}  # by step: this rank's part of the norm, and the loss's scale
        self._coefficients: dict[int, float | None] = {}  # by step, as far as they were asked for
        self._first_copies: set[str] | None = None  # parameters whose shards count here in the norm
        self._next_scale = 1.0  # of the loss, after the last update here
        self._skipped = 0  # steps in a row, as they were looked at here
        # Steps that the optimizer had counted before the job's first.
        before = _optimizer.counted((t.name, t.kept, optimizer.state.get(t.value, {})) for t in tensors)
        self.offset = before or 0
        self.last_norm: float | None = None
        self._last_rates: list[float] | None = None
        # Of an optimizer that has trained others before, what it kept then: it goes by none of that here.
        self._foreign = _optimizer.foreign(optimizer, [t.value for t in tensors if t.is_parameter])
        self._kept = -1  # how much the optimizer kept in all when it was last looked at
        self._states: list[Any] = []  # what it kept then for each of its keys
        self._moments: list[tuple[dict[str, Any], str, Any]] = []  # and in these, for each parameter
        self._late = ""  # what it does with its state that it did not with attach()

    def look(self, step: int) -> None:
        """Take what is needed of the step's gradient as a whole; on those that catch up, too, before apply()."""
        if not self._rules.look_at_norm:
            return
        if self._first_copies is None:
            shards = {tensor.name: tensor.shard for tensor in self._tensors if tensor.shard is not None}
            self._first_copies = first_copies(shards, self._ranks.rank, self._ranks.gather) if shards else set()
        mine = added_up(
            square_sums(
                tensor.reduced
                for tensor in self._tensors
                if tensor.is_parameter and (tensor.shard is None or tensor.name in self._first_copies)
            )
        )
        self._ranks.publish(step, mine)
        self._seen[step] = (mine, self._scale_of_step())
        while len(self._seen) > REMEMBERED:
            self._seen.pop(next(iter(self._seen)))

    # What gradients of this step are multiplied by; None: the step is skipped. It waits for this replica's other ranks.
    def _coefficient(self, step: int) -> float | None:
        if not self._rules.look_at_norm:
            return 1.0
        if step not in self._coefficients:
            if step not in self._seen:
                raise Unavailable(f"this replica has not seen the whole gradient of step {step}, and can't clip it")
            mine, scale = self._seen[step]
            self._coefficients[step] = coefficient = self._coefficient_of(self._ranks.total(step, mine), scale)
            self._note(step, coefficient is None)
            while len(self._coefficients) > REMEMBERED:
                self._coefficients.pop(next(iter(self._coefficients)))
        return self._coefficients[step]

    def _coefficient_of(self, total: float, scale: float) -> float | None:
        norm = math.sqrt(total) / scale if total == total and total != math.inf else math.inf
        self.last_norm = norm
        if self._rules.skip_nonfinite and norm == math.inf:
            return None
        if self._rules.max_norm is not None and norm > self._rules.max_norm:
            return self._rules.max_norm / (norm + 1e-6) / scale
        return 1.0 / scale

    # Steps that change nothing are all alike from outside: a job in which each is skipped looks as if it trained.
    def _note(self, step: int, skipped: bool) -> None:
        self._skipped = self._skipped + 1 if skipped else 0
        if not skipped or self._skipped & (self._skipped - 1):
            return
        by_design, told = False, ""
        if self._scale is not None:
            by_design = self._skipped < _FINDS_ITS_SCALE
            told = f", at a loss scale of {self._seen[step][1]:g}, which is halved down to {2.0**_LEAST_LOG_SCALE:g}"
        log.log(
            logging.INFO if by_design else logging.WARNING,
            "step %d: the mean gradient has an infinity or a NaN, and the step changes nothing, on all replicas (%d in "
            "a row%s). Where this goes on, the data, the learning rate or a replica's GPU is to be looked at: log the "
            "loss on each",
            step, self._skipped, told,
        )  # fmt: skip

    def scale_feedback(self, step: int) -> None:
        """Say how much the step's gradient has counted, after its update: what coding lost of it counts as much."""
        if not self._rules.look_at_norm:
            return
        self._native.scale_feedback(step, (self._coefficient(step) or 0.0) * self._next_scale)

    # The mean of the replicas' equal numbers is that number but for rounding: they are whole ones.
    def _scale_of_step(self) -> float:
        return 2.0 ** round(float(self._scale.reduced[0])) if self._scale is not None else 1.0

    # What is no parameter becomes its mean; the loss's scale what follows from this step. Buffers of a step that is
    # skipped stay: what one replica's forward() has left in them may be no number either.
    def _settle(self, tensor: Tensor, weight: torch.Tensor, reduced: torch.Tensor, step: int) -> None:
        if tensor is not self._scale:
            if not tensor.is_buffer or self._coefficient(step) is not None:
                tensor.settle(weight, reduced)
            return
        log_scale, good = (round(float(number)) for number in reduced)
        if self._coefficient(step) is None:
            log_scale, good = max(log_scale - 1, _LEAST_LOG_SCALE), 0
        elif good + 1 == _GROWS_AFTER:
            log_scale, good = min(log_scale + 1, _MOST_LOG_SCALE), 0
        else:
            good += 1
        self._next_scale = 2.0**log_scale
        weight.copy_(torch.tensor([log_scale, good], dtype=weight.dtype))

    def check(self, step: int) -> None:
        """Refuse a step, before anything of it is applied, that a replica which catches up would apply otherwise."""
        self.settings.check(step)
        if self._rates is not None and self.settings.early(step):
            self._rates.given(step)

    def _set_lr(self, step: int) -> None:
        if self._rates is not None:
            self._last_rates = self._rates.of(step)
            for group, rate in zip(self._optimizer.param_groups, self._last_rates, strict=True):
                group["lr"] = rate

    @property
    def last_lr(self) -> list[float]:
        """Give the rates of the last update, which schedulers of torch's may have written over since."""
        return self._last_rates or [float(group["lr"]) for group in self._optimizer.param_groups]

    def apply(self, step: int, updates: Sequence[TensorUpdate]) -> None:
        """Apply what the session gives in this step, in order."""
        whole = all(
            of == step and first == 0 and count == self._tensors[index].count for index, first, count, of, _ in updates
        ) and len(updates) == sum(tensor.count > 0 for tensor in self._tensors)
        with one_thread(self._device):
            if whole and self._own_step:
                self._apply_whole(step)
            else:
                for of_step, run in itertools.groupby(updates, key=lambda update: update[3]):
                    self._apply_parts(of_step, list(run))
        self.refresh()
        for tensor in self._tensors:
            tensor.note_version()
            if tensor.is_parameter:
                tensor.value.grad = None

    def refresh(self) -> None:
        """Bring what lies outside of the session's memory to what is in it."""
        for tensor in self._tensors:
            tensor.refresh()

    # The optimizer as it is, over the parameters as they are.
    def _apply_whole(self, step: int) -> None:
        coefficient = self._coefficient(step)
        self._set_lr(step)
        for tensor in self._tensors:
            if not tensor.is_parameter:
                self._settle(tensor, tensor.columns[0], tensor.reduced, step)
                continue
            tensor.value.grad = _clipped(tensor.reduced.view(tensor.value.shape), coefficient, tensor.dtype)
            self.count(tensor, step - 1)
        if coefficient is not None:
            self._optimizer_step()
            self._look_at_state(step)
            for tensor in self._tensors:
                if tensor.averaged:
                    self._average(tensor.columns)
        else:
            self.count_all(step)

    # What begins, or moves, in a step that attach() has not tried. Looked at in each step: 0.5 us for a parameter with
    # two moments.
    def _look_at_state(self, step: int) -> None:
        state = self._optimizer.state
        kept = sum(len([1 for one in of.values() if one is not None]) if isinstance(of, dict) else 1
                   for of in state.values())  # fmt: skip
        alike = kept == self._kept and all(map(operator.is_, state.values(), self._states))
        if alike and all(of.get(name) is moment for of, name, moment in self._moments):
            return
        self._kept, self._states, self._moments = kept, list(state.values()), []
        parameters = {id(tensor.value): tensor for tensor in self._tensors if tensor.is_parameter}
        for key, of in state.items():
            if id(key) in self._foreign:
                continue
            tensor = parameters.get(id(key))
            told: str | None = "begins to keep state of its own"
            if tensor is not None:
                told = _optimizer.unlike(tensor.kept, of, tensor.columns[1:])
                self._moments += [(of, name, of.get(name)) for name in tensor.kept.moments]
            if told is not None:
                self._late = f"{told} for '{tensor.name}' in step {step}" if tensor else f"{told} in step {step}"

    def refuse_late_state(self) -> None:
        """Raise `InvalidArgument`, behind an update, where the optimizer keeps what is no part of the session."""
        if self._late:
            raise InvalidArgument(
                f"{type(self._optimizer).__name__} {self._late}, and did not when attach() tried it: a replica that "
                "catches up can't be given it, and would differ. The session's state is whole: session.state_dict() "
                f"gives it here, to go on from with another optimizer. {_optimizer.USE}"
            )

    # By the same two operations on whole tensors and on parts.
    def _average(self, columns: Sequence[torch.Tensor]) -> None:
        assert self._rules.ema is not None
        columns[-1].mul_(self._rules.ema).add_(columns[0], alpha=1.0 - self._rules.ema)

    def count_all(self, step: int) -> None:
        """Let the optimizer's own counts of all parameters be that of the job's step."""
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
    def _apply_parts(self, step: int, updates: list[TensorUpdate]) -> None:
        self._set_lr(step)
        coefficient = self._coefficient(step)
        parts: list[_optimizer.Part] = []
        averages: list[list[torch.Tensor]] = []
        for index, first, count, _, address in updates:
            tensor = self._tensors[index]
            gradient = tensor_at(self._native, address, count, tensor.gradient_dtype, self._device)
            columns = [column[first : first + count] for column in tensor.columns]
            if not tensor.is_parameter:
                self._settle(tensor, columns[0], gradient, step)
                continue
            whole = count == tensor.count and tensor.shard is None
            shape = tensor.value.shape if whole else torch.Size([count])
            moments = len(tensor.kept.moments)
            if tensor.averaged:
                averages.append(columns)
            parts.append(
                (
                    self._optimizer.param_groups[tensor.group],
                    tensor.kept,
                    tensor.scratch,
                    [column.view(shape) for column in columns[: 1 + moments]],
                    _clipped(gradient.view(shape), coefficient, tensor.dtype),
                    tensor.value,
                )
            )
        if parts and coefficient is not None:
            if told := _optimizer.apply(self._optimizer, parts, step + self.offset):
                self._late = f"{told} in step {step}"
            for columns in averages:
                self._average(columns)
        self.count_all(step)


# As the weight's type, which the optimizer wants; multiplied in the wider one of the two.
def _clipped(gradient: torch.Tensor, coefficient: float | None, dtype: torch.dtype) -> torch.Tensor:
    if coefficient is None or coefficient == 1.0:
        return gradient.to(dtype)
    return (gradient.to(torch.promote_types(gradient.dtype, dtype)) * coefficient).to(dtype)


# In rows of a fixed length, so that it does not depend on how torch divides the work among threads. Sums stay where the
# tensors are until the last of them is queued, and come over together: the host waits for a GPU once. They are added up
# in one order, in float64, so that all replicas get the same bits.
def square_sums(flats: Iterable[torch.Tensor]) -> list[float]:
    """Sum the squares of each, in float64."""
    row = 4096
    sums: list[torch.Tensor] = []
    terms: list[list[int]] = []  # of each tensor, and of each part of it: how many of the sums
    for flat in flats:
        terms.append([])
        for part in torch.split(flat, row * 2048):
            squares = part.double().square()
            count, before = squares.numel(), len(sums)
            if whole := count // row * row:
                sums.append(squares[:whole].view(-1, row).sum(1).sum())
            if count > whole:
                sums.append((squares[whole:] if whole else squares).sum())
            terms[-1].append(len(sums) - before)
    numbers = iter(torch.stack(sums).tolist() if sums else ())
    return [added_up(added_up(itertools.islice(numbers, part)) for part in parts) for parts in terms]
