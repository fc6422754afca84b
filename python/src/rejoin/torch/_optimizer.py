"""What an optimizer keeps for each parameter, and how it is applied to parts of parameters.

A replica that catches up gets the gradients of a step for parts of its tensors, and of several steps for one part. The
same class of optimizer, with the same settings, is then run over views of those parts. That gives the bits that the
whole tensors would have got where the update is elementwise, and where torch's kernels do not round an element
differently by its place in a vector; `self_check` looks at both.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rejoin.errors import InvalidArgument
from rejoin.torch._attributes import attributes, gone_by, standing_for
from rejoin.torch._memory import type_of
from rejoin.torch._settings import settings

log = logging.getLogger("rejoin")

MOST_MOMENTS = 7
_LEAST_RATE = 0.01  # of the scratch tensors: with a rate of 0, as before a warm-up, no rule shows
USE = "Use AdamW, Adam, RAdam, Adamax, RMSprop, Adagrad or SGD"


@dataclass(frozen=True)
class Kept:
    """The state that an optimizer keeps for a parameter: tensors of its shape, and perhaps a count of steps."""

    moments: tuple[str, ...]
    step: str | None
    types: tuple[torch.dtype, ...] = ()  # of the moments
    from_zeros: bool = True  # the first step is what it is with moments of zeros

    def state(self, step: int, moments: Sequence[torch.Tensor], like: Mapping[str, Any]) -> dict[str, Any]:
        """Make the entry of `optimizer.state` before the update of step `step` + 1."""
        state: dict[str, Any] = dict(zip(self.moments, moments, strict=True))
        if self.step is not None:
            before = like[self.step]
            state[self.step] = torch.full_like(before, step) if isinstance(before, torch.Tensor) else type(before)(step)
        return state


def counted(parameters: Iterable[tuple[str, Kept, Mapping[str, Any]]]) -> int | None:
    """Give the steps that an optimizer has counted: of parameters' names, what is kept for them, and their states.
    None where it counts none.

    Raises `InvalidArgument` where they are not the same for all, since all are updated in each step from now on.
    """
    counts = {name: int(state.get(kept.step, 0)) for name, kept, state in parameters if kept.step is not None}
    if not counts:
        return None
    most, least = (choose(counts, key=lambda name: counts[name]) for choose in (max, min))
    if counts[most] != counts[least]:
        raise InvalidArgument(
            f"the optimizer has counted {counts[most]} steps for '{most}' and {counts[least]} for '{least}', and "
            "Rejoin updates all parameters in each step: freeze those that are not trained and leave them out of the "
            "optimizer, or begin with an optimizer without state"
        )
    return counts[most]


def bare_copy(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Make an optimizer of the same class and settings for other parameters, without hooks and state."""
    copy: torch.optim.Optimizer = object.__new__(type(optimizer))
    copy.__dict__.update(optimizer.__dict__)
    for replaced in ("step", "zero_grad"):
        copy.__dict__.pop(replaced, None)
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        copy.__dict__[hooks] = OrderedDict()
    copy.param_groups = groups
    copy.state = defaultdict(dict)
    return copy


def _with_rate(group: Mapping[str, Any]) -> Mapping[str, Any]:
    rate = group.get("lr")
    if not isinstance(rate, (int, float, torch.Tensor)) or rate >= _LEAST_RATE:
        return group
    shown = torch.full_like(rate, _LEAST_RATE) if isinstance(rate, torch.Tensor) else _LEAST_RATE
    return {**group, "lr": shown}


# Shapes of scratch tensors: small for the rules, of no whole number of vectors; large for what is kept of large ones.
def _small(dimensions: int) -> tuple[int, ...]:
    return (1003,) if dimensions < 2 else (17, 59) if dimensions == 2 else (17, 19, *[3] * (dimensions - 2))


def _large(dimensions: int) -> tuple[int, ...]:
    return (1 << 16,) if dimensions < 2 else (256, 256, *[2] * (dimensions - 2))


def _told(value: Any, depth: int = 3) -> Any:
    """Tell what an optimizer's attribute is, so that one that was assigned anew, or written to, tells otherwise."""
    if isinstance(value, torch.Tensor):
        return id(value), value._version
    if depth > 0 and isinstance(value, (list, tuple)):
        return [_told(one, depth - 1) for one in value]
    if depth > 0 and isinstance(value, dict):
        return [(id(key), _told(one, depth - 1)) for key, one in value.items()]
    return repr(value) if value is None or isinstance(value, (int, float, complex, str)) else id(value)


# Without torch's own flags: that it has looked at something, or has warned.
def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    known = ("param_groups", "state", "step", "zero_grad", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    return {
        name: _told(value)
        for name, value in vars(optimizer).items()
        if name not in known and not (name.startswith("_") and isinstance(value, bool))
    }


def _stepped(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], value: torch.Tensor, of: torch.Tensor | None
) -> dict[str, Any]:
    parameter = standing_for(of, value)
    parameter.grad = torch.zeros_like(value)
    tried = {**settings(group), "params": [parameter]}
    before = repr(settings(tried)), _told(attributes(parameter))
    copy = bare_copy(optimizer, [tried])
    name, of_copy = type(optimizer).__name__, _attributes(copy)
    try:
        copy.step()
    except Exception as error:  # whatever an optimizer says that needs a closure, sparse gradients, or the like
        raise InvalidArgument(
            f"{name} can't update a tensor of shape {tuple(value.shape)} with a dense gradient: "
            f"{type(error).__name__}: {error}. {USE}"
        ) from error
    if _told(attributes(parameter)) != before[1]:
        raise InvalidArgument(
            f"{name} keeps state of its own in attributes of the parameter, which its step() sets: a replica that "
            f"catches up could not be given it. Let it be in state[parameter]. {USE}"
        )
    if repr(settings(tried)) != before[0] or any(key is not parameter for key in copy.state):
        raise InvalidArgument(
            f"{name} keeps state of its own in the group, and not for each parameter: a replica that catches up could "
            f"not be given it. {USE}"
        )
    now = _attributes(copy)
    if changed := [name for name in now if now[name] != of_copy.get(name)]:
        raise InvalidArgument(
            f"{name} keeps state of its own in its attribute '{changed[0]}', which its step() changes: a replica that "
            f"catches up could not be given it. Let it count for each parameter, in state[parameter]['step']. {USE}"
        )
    return dict(copy.state[parameter])


def goes_by(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], like: torch.Tensor, of: torch.Tensor
) -> frozenset[str]:
    """Find out by which attributes of a parameter the optimizer goes: some steps of a scratch parameter.

    `like` has the parameter's dimensions, and the type that the optimizer is given.
    """
    value = torch.zeros(_small(like.dim()), dtype=like.dtype, device=like.device)

    def steps(parameter: torch.nn.Parameter) -> None:
        copy = bare_copy(optimizer, [{**settings(_with_rate(group)), "params": [parameter]}])
        for counted in (1, 2, 10_000):  # some rules begin late
            parameter.grad = torch.ones_like(value)
            count = copy.state.get(parameter, {}).get("step")
            if isinstance(count, torch.Tensor):
                count.fill_(counted - 1)
            elif count is not None:
                copy.state[parameter]["step"] = type(count)(counted - 1)
            copy.step()

    return gone_by(of, value, steps)


def _kept_of(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    like: torch.Tensor,
    shape: tuple[int, ...],
    of: torch.Tensor | None,
) -> tuple[Kept, dict[str, Any]]:
    name = type(optimizer).__name__
    state = _stepped(optimizer, group, torch.zeros(shape, dtype=like.dtype, device=like.device), of)
    moments: list[str] = []
    types: list[torch.dtype] = []
    step = None
    for key, value in state.items():
        if value is None:
            continue
        if type(value) is torch.Tensor and value.shape == shape:
            type_of(f"{name}'s {key}", value.dtype)
            moments.append(key)
            types.append(value.dtype)
        elif key == "step":
            step = key
        else:
            raise InvalidArgument(
                f"{name} keeps '{key}' for a parameter of shape {shape}, which is no plain tensor of that shape and "
                f"does not count steps: a replica that catches up could not be given it. {USE}"
            )
    return Kept(tuple(moments), step, tuple(types)), state


def kept_by(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    like: torch.Tensor,
    reserved: int = 0,
    of: torch.Tensor | None = None,
) -> tuple[Kept, dict[str, Any]]:
    """Find out what the optimizer keeps for a parameter of this group, type and as many dimensions as `like` has, by
    one step of scratch parameters, which stand for `of`.

    Returns that, and a scratch parameter's state. `reserved`: columns that are kept for something else. Raises
    `InvalidArgument` for state that has another shape, or is no count of steps.
    """
    name, group = type(optimizer).__name__, _with_rate(group)
    kept, state = _kept_of(optimizer, group, like, _small(like.dim()), of)
    if _kept_of(optimizer, group, like, _large(like.dim()), of)[0] != kept:
        raise InvalidArgument(
            f"{name} keeps other state for large parameters than for small ones: a replica that catches up could not "
            f"be given it. {USE}"
        )
    moments = kept.moments
    if isinstance(optimizer, torch.optim.SGD) and group.get("fused") and not _fused_sgd_updates(like):
        raise InvalidArgument(
            f"the fused SGD of torch {torch.__version__} does not update tensors of {like.dtype} on a "
            f"{like.device.type} (pytorch/pytorch#191763): set fused=False"
        )
    if len(moments) + reserved > MOST_MOMENTS:
        raise InvalidArgument(
            f"{name} keeps {', '.join(moments)} for each parameter{', and there is a moving average' * reserved}; "
            f"{MOST_MOMENTS} can be kept"
        )
    if group.get("momentum") and group.get("dampening"):
        raise InvalidArgument(
            f"{name} with dampening {group['dampening']} treats the first step of a parameter unlike the others: "
            "set it to 0"
        )
    return replace(kept, from_zeros=_begins_with_zeros(optimizer, group, like, kept, state, of)), state


def _begins_with_zeros(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    like: torch.Tensor,
    kept: Kept,
    scratch: dict[str, Any],
    of: torch.Tensor | None,
) -> bool:
    random = torch.Generator().manual_seed(1)

    def drawn() -> torch.Tensor:
        return torch.randn(_small(like.dim()), generator=random, device="cpu").to(like.dtype).to(like.device)

    value, gradient = drawn(), drawn()
    parameter = standing_for(of, value.clone())
    parameter.grad = gradient.clone()
    copy = bare_copy(optimizer, [{**settings(group), "params": [parameter]}])
    copy.step()
    columns = [value] + [torch.zeros_like(value, dtype=dtype) for dtype in kept.types]
    apply(optimizer, [(group, kept, scratch, columns, gradient, of)], 1)
    return _same([parameter.detach(), *(copy.state[parameter][name] for name in kept.moments)], columns)


def _fused_sgd_updates(like: torch.Tensor) -> bool:
    """Say whether torch's fused SGD updates tensors of this type and device: torch 2.13 passes over whole vectors of
    float16 and bfloat16 on a CPU, and takes momentum from beside the tensor."""
    parameter = torch.nn.Parameter(torch.zeros(64, dtype=like.dtype, device=like.device))
    parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD([parameter], lr=1.0, fused=True).step()
    return bool((parameter == -1).all())


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
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], like: torch.Tensor, of: torch.Tensor | None = None
) -> bool:
    """Say whether parts of a parameter with as many dimensions as `like`, and `of`'s attributes, get the bits that the
    whole would: some steps of scratch tensors, compared.

    Raises `InvalidArgument` where another tensor's gradient makes a difference, since a replica that catches up updates
    tensors apart from each other. Within `one_thread`, as all updates are.
    """
    kept, scratch = kept_by(optimizer, group, like, of=of)
    name, group, shape = type(optimizer).__name__, _with_rate(group), _small(like.dim())
    count = math.prod(shape)
    borders = (0, 64, 192, 512, 576, count)  # as the session divides: multiples of 64
    random = torch.Generator().manual_seed(1)

    def drawn(scale: float) -> torch.Tensor:
        exponents = torch.rand(count, generator=random, device="cpu") * 9 - 6
        flat = torch.randn(count, generator=random, device="cpu") * scale * 10**exponents
        return flat.view(shape).to(like.dtype).to(like.device)

    def update(step: int, *parts: tuple[Sequence[torch.Tensor], torch.Tensor]) -> None:
        try:
            apply(optimizer, [(group, kept, scratch, columns, gradient, of) for columns, gradient in parts], step)
        except Exception as error:
            raise InvalidArgument(
                f"{name} can't update a part of a tensor, which has one dimension: {type(error).__name__}: {error}. "
                f"{USE}"
            ) from error

    def made() -> list[torch.Tensor]:
        value = drawn(1.0)
        return [value] + [torch.zeros_like(value, dtype=dtype) for dtype in kept.types]

    # In one of the parts: rules that pass over what is zero, or not finite, go by what they find in all of a tensor.
    def filled(gradient: torch.Tensor, part: int, value: float) -> torch.Tensor:
        gradient.view(-1)[borders[part] : borders[part + 1]] = value
        return gradient

    whole, other = made(), made()
    parts, together, beside, first = ([column.clone() for column in of] for of in (whole, whole, other, whole))

    def trial(step: int, gradient: torch.Tensor) -> None:
        given, others = gradient.clone(), drawn(10.0)
        update(step, (whole, given))
        if not _same([given], [gradient]):
            raise InvalidArgument(
                f"{name} changes the gradients that it is given, which belong to the session: let its step() change a "
                "copy, or, of torch's own, set foreach=False"
            )
        update(step, (other, others))
        update(step, (together, gradient), (beside, others))
        for begin, end in zip(borders, borders[1:], strict=False):
            update(step, ([column.view(-1)[begin:end] for column in parts], gradient.view(-1)[begin:end]))

    for step in (1, 2, 3, 7, 100, 10_000):  # some rules begin late, as RAdam's
        gradient = drawn(0.1)
        trial(step, _nearly_orthogonal(gradient, whole[0]) if step > 3 else gradient)
    trial(10_001, filled(drawn(0.1), 2, 0.0))
    try:
        trial(10_002, filled(drawn(0.1), 1, math.inf))
    except InvalidArgument as error:
        log.debug("not tried with an infinity: %s", error)
    if _same(whole, first):
        raise InvalidArgument(
            f"{name} does not update the parameters that it is given: where it wraps another optimizer, attach that one"
        )
    if not (_same(whole, together) and _same(other, beside)):
        raise InvalidArgument(
            f"{name} updates a tensor otherwise where another one is updated with it: a replica that catches up "
            f"updates them apart. {USE}. To pass over what is not finite, attach(…, skip_nonfinite=True)"
        )
    return _same(whole, parts)


def _same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(_bits(a), _bits(b)) for a, b in zip(one, other, strict=True))


# All NaNs alike: which of them comes out of an infinity may differ by an element's place in a vector.
def _bits(value: torch.Tensor) -> torch.Tensor:
    return value.nan_to_num(nan=math.nan, posinf=math.inf, neginf=-math.inf).view(torch.uint8)


Part = tuple[Mapping[str, Any], Kept, Mapping[str, Any], Sequence[torch.Tensor], torch.Tensor, "torch.Tensor | None"]


def apply(optimizer: torch.optim.Optimizer, parts: Sequence[Part], step: int) -> None:
    """Update parts of parameters by step `step`: each with its group, what is kept, its columns, its gradient, and the
    parameter that it stands for."""
    groups: dict[int, dict[str, Any]] = {}
    states: list[tuple[torch.nn.Parameter, dict[str, Any]]] = []
    for group, kept, scratch, columns, gradient, of in parts:
        parameter = standing_for(of, columns[0])
        parameter.grad = gradient
        groups.setdefault(id(group), {**settings(group), "params": []})["params"].append(parameter)
        states.append((parameter, kept.state(step - 1, columns[1:], scratch)))
    copy = bare_copy(optimizer, list(groups.values()))
    for parameter, state in states:
        copy.state[parameter] = state
    copy.step()
