"""What an optimizer keeps for each parameter, and how it is applied to parts of parameters.

A replica that catches up gets the gradients of a step for parts of its tensors, and of several steps for one part. The
same class of optimizer, with the same settings, is then run over views of those parts. That gives the bits that the
whole tensors would have got where the update is elementwise, and where torch's kernels do not round an element
differently by its place in a vector; `_self_check` looks at both.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rejoin._memory import bytes_of
from rejoin.errors import InvalidArgument
from rejoin.torch._attributes import attributes, gone_by, standing_for
from rejoin.torch._memory import type_of
from rejoin.torch._settings import settings

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
    counts = {name: _count(name, state.get(kept.step)) for name, kept, state in parameters if kept.step is not None}
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


def _count(name: str, of: Any) -> int:
    try:
        count = int(of) if of is not None else 0
    except (TypeError, ValueError, OverflowError, RuntimeError):
        count = -1
    if count < 0:
        raise InvalidArgument(f"the optimizer's state for '{name}' says {of!r} for its count of steps")
    return count


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


def with_rate(group: Mapping[str, Any]) -> Mapping[str, Any]:
    """Give the settings of a group with a rate that lets rules show."""
    rate = group.get("lr")
    if not isinstance(rate, (int, float, torch.Tensor)) or rate >= _LEAST_RATE:
        return group
    shown = torch.full_like(rate, _LEAST_RATE) if isinstance(rate, torch.Tensor) else _LEAST_RATE
    return {**group, "lr": shown}


def small(dimensions: int) -> tuple[int, ...]:
    """Give a shape of scratch tensors, for the rules: of no whole number of vectors."""
    return (1003,) if dimensions < 2 else (17, 59) if dimensions == 2 else (17, 19, *[3] * (dimensions - 2))


# For what is kept of large ones.
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


def _changed(before: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> list[str]:
    now = _attributes(optimizer)
    return [name for name in now if now[name] != before.get(name)]


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
    if changed := _changed(of_copy, copy):
        raise InvalidArgument(
            f"{name} keeps state of its own in its attribute '{changed[0]}', which its step() changes: a replica that "
            f"catches up could not be given it. Let it count for each parameter, in state[parameter]['step']. {USE}"
        )
    return dict(copy.state[parameter])


def foreign(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> dict[int, Any]:
    """Give the keys, by id, under which the optimizer keeps what belongs to none of the parameters."""
    own = {id(parameter) for parameter in parameters}
    return {id(key): key for key in optimizer.state if id(key) not in own}


def goes_by(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], like: torch.Tensor, of: torch.Tensor
) -> frozenset[str]:
    """Find out by which attributes of a parameter the optimizer goes: some steps of a scratch parameter.

    `like` has the parameter's dimensions, and the type that the optimizer is given.
    """
    value = torch.zeros(small(like.dim()), dtype=like.dtype, device=like.device)

    def steps(parameter: torch.nn.Parameter) -> None:
        copy = bare_copy(optimizer, [{**settings(with_rate(group)), "params": [parameter]}])
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
    name, group = type(optimizer).__name__, with_rate(group)
    kept, state = _kept_of(optimizer, group, like, small(like.dim()), of)
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
        return torch.randn(small(like.dim()), generator=random, device="cpu").to(like.dtype).to(like.device)

    value, gradient = drawn(), drawn()
    parameter = standing_for(of, value.clone())
    parameter.grad = gradient.clone()
    copy = bare_copy(optimizer, [{**settings(group), "params": [parameter]}])
    copy.step()
    columns = [value] + [torch.zeros_like(value, dtype=dtype) for dtype in kept.types]
    apply(optimizer, [(group, kept, scratch, columns, gradient, of)], 1)
    return same_bits([parameter.detach(), *(copy.state[parameter][name] for name in kept.moments)], columns)


def _fused_sgd_updates(like: torch.Tensor) -> bool:
    """Say whether torch's fused SGD updates tensors of this type and device: torch 2.13 passes over whole vectors of
    float16 and bfloat16 on a CPU, and takes momentum from beside the tensor."""
    parameter = torch.nn.Parameter(torch.zeros(64, dtype=like.dtype, device=like.device))
    parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD([parameter], lr=1.0, fused=True).step()
    return bool((parameter == -1).all())


def same_bits(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Compare tensors by their bits."""
    return all(torch.equal(_bits(a), _bits(b)) for a, b in zip(one, other, strict=True))


# All NaNs alike: which of them comes out of an infinity may differ by an element's place in a vector.
def _bits(value: torch.Tensor) -> torch.Tensor:
    return bytes_of(value.nan_to_num(nan=math.nan, posinf=math.inf, neginf=-math.inf))


Part = tuple[Mapping[str, Any], Kept, Mapping[str, Any], Sequence[torch.Tensor], torch.Tensor, "torch.Tensor | None"]


def unlike(kept: Kept, state: Mapping[str, Any], moments: Sequence[torch.Tensor] | None = None) -> str | None:
    """Tell what an optimizer does with a parameter's state that it did not in its first step, if anything: it keeps
    more by now, or, where `moments` are what it was given, others in their place."""
    known = (*kept.moments, kept.step)
    if more := [key for key, value in state.items() if value is not None and key not in known]:
        return f"begins to keep '{more[0]}'"
    for name, given in zip(kept.moments, moments or (), strict=False):
        now = state.get(name)
        if now is not given and (not isinstance(now, torch.Tensor) or now.data_ptr() != given.data_ptr()):
            return f"puts another tensor in the place of '{name}'"
    return None


def apply(
    optimizer: torch.optim.Optimizer, parts: Sequence[Part], step: int, with_attributes: bool = False
) -> str | None:
    """Update parts of parameters by step `step`: each with its group, what is kept, its columns, its gradient, and the
    parameter that it stands for. Gives what `unlike()` tells of the first of whose state it does, and on demand what
    the optimizer does with its own attributes."""
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
    before = _attributes(copy) if with_attributes else None
    copy.step()
    for (parameter, _), (_, kept, _, columns, _, _) in zip(states, parts, strict=True):
        if told := unlike(kept, copy.state[parameter], columns[1:]):
            return told
    if before is not None and (changed := _changed(before, copy)):
        return f"changes its attribute '{changed[0]}'"
    return None
