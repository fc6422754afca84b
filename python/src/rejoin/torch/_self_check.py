"""Whether parts of a tensor are updated as the whole is: an optimizer is tried with scratch tensors."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rejoin.errors import InvalidArgument
from rejoin.torch._optimizer import USE, Kept, apply, kept_by, same_bits, small, with_rate

log = logging.getLogger("rejoin")

Columns = Sequence[torch.Tensor]

# Multiples of all numbers up to 16, as a count behind the step and before it: what a rule does in each k-th step, and
# what begins late.
_LATE = (720_720, 720_721)

_HUGE = (1e4, 1e10)  # elements, by which a tensor's norm is beyond bounds that rules have

# Up to so many elements a shape of the model's is tried as it is. A part of a slice or two, and shorter ones.
_MOST = 1 << 20
_BORDERS_OF_LARGE = (0, 64, 4096, 69_696)  # multiples of 64, as the session divides
_DRAWN = 1 << 16


# In each row nearly: where rules project, as AdamP's, they do so there alone, and it shows where a little is left.
def _nearly_orthogonal(gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    rows = (len(weight), -1) if weight.dim() > 1 else (1, -1)
    g, w = gradient.double().view(rows), weight.double().view(rows)
    w = w / w.norm(dim=1, keepdim=True)
    g = g - w * (g * w).sum(1, keepdim=True)
    left = 0.01 / math.sqrt(w.size(1)) * g.norm(dim=1, keepdim=True)
    nearly: torch.Tensor = (g + w * left).to(gradient.dtype)
    return nearly.view_as(gradient)


class Trial:
    """Updates of scratch tensors: what an optimizer does there, and what it must not do."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        group: Mapping[str, Any],
        like: torch.Tensor,
        of: torch.Tensor | None,
        kept: Kept,
        scratch: Mapping[str, Any],
    ) -> None:
        self.name = type(optimizer).__name__
        self._optimizer, self._group, self._like, self._of = optimizer, with_rate(group), like, of
        self._kept, self._scratch = kept, scratch
        self._random = torch.Generator().manual_seed(1)
        # What it does with its state that it did not in its first step, and when.
        self._late: list[tuple[str, str]] = []

    def drawn(self, scale: float, shape: Sequence[int]) -> torch.Tensor:
        """Draw numbers of many sizes; those of a large tensor come again and again."""
        count = math.prod(shape)
        several = min(count, _DRAWN)
        exponents = torch.rand(several, generator=self._random, device="cpu") * 9 - 6
        flat = torch.randn(several, generator=self._random, device="cpu") * scale * 10**exponents
        if several < count:
            flat = flat.repeat(-(-count // several))[:count]
        return flat.view(torch.Size(shape)).to(self._like.dtype).to(self._like.device)

    def made(self, shape: Sequence[int]) -> list[torch.Tensor]:
        """Make a parameter and its moments."""
        value = self.drawn(1.0, shape)
        return [value] + [torch.zeros_like(value, dtype=dtype) for dtype in self._kept.types]

    def update(self, step: int, *parts: tuple[Columns, torch.Tensor], apart: bool = False) -> None:
        """Update these, each with its gradient; `apart`: each in a group of its own."""
        try:
            given = [
                (dict(self._group) if apart else self._group, self._kept, self._scratch, columns, gradient, self._of)
                for columns, gradient in parts
            ]
            told = apply(self._optimizer, given, step, with_attributes=True)
            self._late.extend([(told, f"in step {step}")] if told else [])
        except Exception as error:
            self.refuse_late()
            told = (
                f"{self.name} can't update a part of a tensor, which has one dimension: {type(error).__name__}: {error}"
            )
            if isinstance(error, KeyError):
                told += ", perhaps of state that is not there from the first step on"
            raise InvalidArgument(f"{told}. {USE}") from error

    def update_parts(self, step: int, borders: Sequence[int], columns: Columns, gradient: torch.Tensor) -> None:
        """Update what lies between these borders, each for itself."""
        for begin, end in zip(borders, borders[1:], strict=False):
            self.update(step, ([column.view(-1)[begin:end] for column in columns], gradient.view(-1)[begin:end]))

    def refuse_late(self, where: str | None = None, remedy: str = USE) -> None:
        """Raise `InvalidArgument` where some of its state is not there from the first step on."""
        if self._late:
            told, step = self._late[0]
            raise InvalidArgument(
                f"{self.name} {told} {where or step}: a replica that catches up could not be given it. Let all of a "
                f"parameter's state be there from the first step on, and be written in place. {remedy}"
            )

    def refuse_changed(self, given: torch.Tensor, gradient: torch.Tensor) -> None:
        """Raise `InvalidArgument` where a gradient is not what it was."""
        if not same_bits([given], [gradient]):
            raise InvalidArgument(
                f"{self.name} changes the gradients that it is given, which belong to the session: let its step() "
                "change a copy, or, of torch's own, set foreach=False"
            )


def _within(shape: Sequence[int], most: int) -> tuple[int, ...]:
    sizes = list(shape)
    for i, size in enumerate(sizes):
        if (count := math.prod(sizes)) > most:
            sizes[i] = max(1, size * most // count)
    return tuple(sizes)


def check_large(trial: Trial, shape: Sequence[int]) -> bool:
    """Say whether parts of a tensor of this shape, the model's largest, get the bits that the whole would, where those
    of a small one do: some rules go by a tensor's size, as those that keep moments in 8 bits from 4,096 elements on.

    Of a larger one than `_MOST` elements so many are tried. Within `one_thread`, as all updates are.
    """
    shape = _within(shape, _MOST)
    count = math.prod(shape)
    if count <= _BORDERS_OF_LARGE[1]:
        return True
    borders = [*(border for border in _BORDERS_OF_LARGE if border < count), count]
    whole = trial.made(shape)
    parts = [column.clone() for column in whole]
    for step in (1, 2, 10_000):
        gradient = trial.drawn(0.1, shape)
        given = gradient.clone()
        trial.update(step, (whole, given))
        trial.refuse_changed(given, gradient)
        trial.update_parts(step, borders, parts, gradient)
    trial.refuse_late()
    return same_bits(whole, parts)


def self_check(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    like: torch.Tensor,
    of: torch.Tensor | None = None,
    finite: bool = False,
) -> bool:
    """Say whether parts of a parameter with as many dimensions as `like`, and `of`'s attributes, get the bits that the
    whole would: some steps of scratch tensors, compared. `finite`: no other gradients come to the optimizer.

    Raises `InvalidArgument` where another tensor's gradient makes a difference, since a replica that catches up updates
    tensors apart from each other. Within `one_thread`, as all updates are.
    """
    one = Trial(optimizer, group, like, of, *kept_by(optimizer, group, like, of=of))
    shape = small(like.dim())
    borders = (0, 64, 192, 512, 576, math.prod(shape))  # as the session divides: multiples of 64
    apart = (2, 7) if len(optimizer.param_groups) > 1 else ()  # steps: groups without parts are left out

    # In one of the parts: rules that pass over what is zero, or not finite, go by what they find in all of a tensor.
    def filled(gradient: torch.Tensor, part: int, value: float) -> torch.Tensor:
        gradient.view(-1)[borders[part] : borders[part + 1]] = value
        return gradient

    # A tensor, and another one, that are updated apart; the same in parts; and both together.
    def copies(one: Columns, other: Columns) -> list[Columns]:
        return [[column.clone() for column in columns] for columns in (one, other, one, one, other)]

    # Gives the gradient as it is behind it.
    def trial(step: int, gradient: torch.Tensor, columns: list[Columns]) -> torch.Tensor:
        whole, other, parts, together, beside = columns
        others, given = one.drawn(10.0, shape), gradient.clone()
        one.update(step, (whole, given))
        one.update(step, (other, others.clone()))
        one.update(step, (together, gradient.clone()), (beside, others), apart=step in apart)
        one.update_parts(step, borders, parts, gradient.clone())
        return given

    def parts_are_as_the_whole(columns: list[Columns], remedy: str) -> bool:
        whole, other, parts, together, beside = columns
        if not (same_bits(whole, together) and same_bits(other, beside)):
            raise InvalidArgument(
                f"{one.name} updates a tensor otherwise where another one is updated with it, or comes before it in "
                "the optimizer's groups, or draws random numbers: a replica that catches up updates them apart, and "
                f"draws others. {remedy}"
            )
        return same_bits(whole, parts)

    first = one.made(shape)
    columns = copies(first, one.made(shape))
    for step in (1, 2, 3, 7, 100, 10_000, 10_001):  # some rules begin late, as RAdam's
        gradient = one.drawn(0.1, shape)
        if step > 10_000:
            gradient = filled(gradient, 2, 0.0)
        elif step > 3:
            gradient = _nearly_orthogonal(gradient, columns[0][0])
        one.refuse_changed(trial(step, gradient, columns), gradient)
    one.refuse_late()
    if same_bits(columns[0], first):
        raise InvalidArgument(
            f"{one.name} does not update the parameters that it is given: where it wraps another optimizer, attach "
            "that one"
        )
    same = parts_are_as_the_whole(columns, USE)

    # On from there, with copies, in which it would stay. What step() raises it raises in the script, too.
    def also(step: int, gradient: torch.Tensor, where: str | None, remedy: str, begin: Columns = columns[0]) -> bool:
        tried = copies(begin, columns[1])
        try:
            given = trial(step, gradient, tried)
        except InvalidArgument as error:
            log.debug("not tried %s: %s", where or f"in step {step}", error)
            return True
        one.refuse_late(where, remedy)
        if bool(gradient.isfinite().all()):
            one.refuse_changed(given, gradient)
        return parts_are_as_the_whole(tried, remedy)

    for step in _LATE:  # a schedule of the optimizer's own may have ended long before
        same &= also(step, one.drawn(0.1, shape), None, USE)
    one.refuse_late()
    for value in _HUGE:  # some rules pass over or clip what is beyond a bound
        value = min(value, torch.finfo(like.dtype).max / 4)
        same &= also(10_002, filled(one.drawn(0.1, shape), 1, value), f"where a gradient has {value:g}", USE)
        weights = [filled(columns[0][0].clone(), 1, value), *columns[0][1:]]
        same &= also(10_002, one.drawn(0.1, shape), f"where a weight is {value:g}", USE, weights)
    for value in () if finite else (math.nan, math.inf, -math.inf):
        remedy = "To pass over what is not finite, attach(…, skip_nonfinite=True)"
        same &= also(10_002, filled(one.drawn(0.1, shape), 1, value), f"where a gradient has {value}", remedy)
    return same
