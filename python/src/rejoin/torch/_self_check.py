"""Whether parts of a tensor are updated as the whole is: an optimizer is tried with scratch tensors."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from rejoin.errors import InvalidArgument
from rejoin.torch._optimizer import USE, apply, kept_by, same_bits, small, with_rate

log = logging.getLogger("rejoin")

Columns = Sequence[torch.Tensor]

# Multiples of all numbers up to 16, as a count behind the step and before it: what a rule does in each k-th step, and
# what begins late.
_LATE = (720_720, 720_721)


# In each row nearly: where rules project, as AdamP's, they do so there alone, and it shows where a little is left.
def _nearly_orthogonal(gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    rows = (len(weight), -1) if weight.dim() > 1 else (1, -1)
    g, w = gradient.double().view(rows), weight.double().view(rows)
    w = w / w.norm(dim=1, keepdim=True)
    g = g - w * (g * w).sum(1, keepdim=True)
    left = 0.01 / math.sqrt(w.size(1)) * g.norm(dim=1, keepdim=True)
    nearly: torch.Tensor = (g + w * left).to(gradient.dtype)
    return nearly.view_as(gradient)


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
    kept, scratch = kept_by(optimizer, group, like, of=of)
    name, group, shape = type(optimizer).__name__, with_rate(group), small(like.dim())
    count = math.prod(shape)
    borders = (0, 64, 192, 512, 576, count)  # as the session divides: multiples of 64
    random = torch.Generator().manual_seed(1)

    def drawn(scale: float) -> torch.Tensor:
        exponents = torch.rand(count, generator=random, device="cpu") * 9 - 6
        flat = torch.randn(count, generator=random, device="cpu") * scale * 10**exponents
        return flat.view(shape).to(like.dtype).to(like.device)

    late: list[tuple[str, str]] = []  # what it does with its state that it did not in its first step, and when

    def refuse_late(where: str | None = None, remedy: str = USE) -> None:
        if late:
            told, step = late[0]
            raise InvalidArgument(
                f"{name} {told} {where or step}: a replica that catches up could not be given it. Let all of a "
                f"parameter's state be there from the first step on, and be written in place. {remedy}"
            )

    def update(step: int, *parts: tuple[Columns, torch.Tensor]) -> None:
        try:
            given = [(group, kept, scratch, columns, gradient, of) for columns, gradient in parts]
            told = apply(optimizer, given, step, with_attributes=True)
            late.extend([(told, f"in step {step}")] if told else [])
        except Exception as error:
            refuse_late()
            told = f"{name} can't update a part of a tensor, which has one dimension: {type(error).__name__}: {error}"
            if isinstance(error, KeyError):
                told += ", perhaps of state that is not there from the first step on"
            raise InvalidArgument(f"{told}. {USE}") from error

    def made() -> list[torch.Tensor]:
        value = drawn(1.0)
        return [value] + [torch.zeros_like(value, dtype=dtype) for dtype in kept.types]

    # In one of the parts: rules that pass over what is zero, or not finite, go by what they find in all of a tensor.
    def filled(gradient: torch.Tensor, part: int, value: float) -> torch.Tensor:
        gradient.view(-1)[borders[part] : borders[part + 1]] = value
        return gradient

    # A tensor, and another one, that are updated apart; the same in parts; and both together.
    def copies(one: Columns, other: Columns) -> list[Columns]:
        return [[column.clone() for column in columns] for columns in (one, other, one, one, other)]

    # Whether the gradient is as it was.
    def trial(step: int, gradient: torch.Tensor, columns: list[Columns]) -> bool:
        whole, other, parts, together, beside = columns
        others, given, divided = drawn(10.0), gradient.clone(), gradient.clone().view(-1)
        update(step, (whole, given))
        update(step, (other, others.clone()))
        update(step, (together, gradient.clone()), (beside, others))
        for begin, end in zip(borders, borders[1:], strict=False):
            update(step, ([column.view(-1)[begin:end] for column in parts], divided[begin:end]))
        return same_bits([given], [gradient])

    def parts_are_as_the_whole(columns: list[Columns], remedy: str) -> bool:
        whole, other, parts, together, beside = columns
        if not (same_bits(whole, together) and same_bits(other, beside)):
            raise InvalidArgument(
                f"{name} updates a tensor otherwise where another one is updated with it, or draws random numbers: a "
                f"replica that catches up updates them apart, and draws others. {remedy}"
            )
        return same_bits(whole, parts)

    first = made()
    columns = copies(first, made())
    for step in (1, 2, 3, 7, 100, 10_000, 10_001):  # some rules begin late, as RAdam's
        gradient = drawn(0.1)
        if step > 10_000:
            gradient = filled(gradient, 2, 0.0)
        elif step > 3:
            gradient = _nearly_orthogonal(gradient, columns[0][0])
        if not trial(step, gradient, columns):
            raise InvalidArgument(
                f"{name} changes the gradients that it is given, which belong to the session: let its step() change a "
                "copy, or, of torch's own, set foreach=False"
            )
    for step in _LATE:
        with suppress(InvalidArgument):  # a schedule of the optimizer's own may have ended long before
            update(step, ([column.clone() for column in columns[0]], drawn(0.1)))
    refuse_late()
    if same_bits(columns[0], first):
        raise InvalidArgument(
            f"{name} does not update the parameters that it is given: where it wraps another optimizer, attach that one"
        )
    same = parts_are_as_the_whole(columns, USE)
    for value in () if finite else (math.nan, math.inf, -math.inf):
        tried = copies(columns[0], columns[1])  # it would stay in them
        try:
            trial(10_002, filled(drawn(0.1), 1, value), tried)
        except InvalidArgument as error:  # step() raises, as it would in the script
            log.debug("not tried with %s: %s", value, error)
            continue
        remedy = "To pass over what is not finite, attach(…, skip_nonfinite=True)"
        refuse_late(f"where a gradient has {value}", remedy)
        same &= parts_are_as_the_whole(tried, remedy)
    return same
