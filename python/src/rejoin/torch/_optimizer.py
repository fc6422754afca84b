"""What an optimizer keeps for each parameter, and how it is applied to parts of parameters.

A replica that catches up gets the gradients of a step for parts of its tensors, and of several steps for one part. The
same class of optimizer, with the same settings, is then run over views of those parts. That gives the bits that the
whole tensors would have got where the update is elementwise, and where torch's kernels do not round an element
differently by its place in a vector; `self_check` looks at both.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from rejoin.errors import InvalidArgument
from rejoin.torch._memory import type_of

MOST_MOMENTS = 7
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


def refuse_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Raise `InvalidArgument` where the optimizer has hooks, which a `bare_copy` has not."""
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise InvalidArgument(
            "the optimizer has hooks on step(): a replica that catches up updates parts of tensors, without them. "
            "Take them off, or do the same in the loop's body"
        )


def settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Give a group's settings without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def constants(group: Mapping[str, Any], lr_follows_steps: bool) -> dict[str, str]:
    """Give a group's settings that have to be the same in all steps and on all replicas, as exact text, by name: all,
    but perhaps the learning rate."""
    left_out = ("initial_lr", "lr") if lr_follows_steps else ("initial_lr",)
    return {key: _text(value) for key, value in sorted(settings(group).items()) if key not in left_out}


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return str(value.tolist())
    return getattr(value, "__qualname__", repr(value))  # of a function; its address is each process's own


def _stepped(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], value: torch.Tensor) -> dict[str, Any]:
    parameter = torch.nn.Parameter(value)
    parameter.grad = torch.zeros_like(value)
    tried = {**settings(group), "params": [parameter]}
    before = repr(settings(tried))
    copy = bare_copy(optimizer, [tried])
    name = type(optimizer).__name__
    try:
        copy.step()
    except Exception as error:  # whatever an optimizer says that needs a closure, sparse gradients, or the like
        raise InvalidArgument(
            f"{name} can't update a tensor of shape {tuple(value.shape)} with a dense gradient: "
            f"{type(error).__name__}: {error}. {USE}"
        ) from error
    if repr(settings(tried)) != before or any(key is not parameter for key in copy.state):
        raise InvalidArgument(
            f"{name} keeps state of its own in the group, and not for each parameter: a replica that catches up could "
            f"not be given it. {USE}"
        )
    return dict(copy.state[parameter])


def kept_by(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], like: torch.Tensor, reserved: int = 0
) -> tuple[Kept, dict[str, Any]]:
    """Find out what the optimizer keeps for a parameter of this group and type, by one step of a scratch parameter.

    Returns that, and the scratch parameter's state. `reserved`: columns that are kept for something else. Raises
    `InvalidArgument` for state that has another shape, or is no count of steps.
    """
    name = type(optimizer).__name__
    shape = (3, 5)
    state = _stepped(optimizer, group, torch.zeros(shape, dtype=like.dtype, device=like.device))
    moments: list[str] = []
    types: list[torch.dtype] = []
    step = None
    for key, value in state.items():
        if value is None:
            continue
        if isinstance(value, torch.Tensor) and value.shape == shape:
            type_of(f"{name}'s {key}", value.dtype)
            moments.append(key)
            types.append(value.dtype)
        elif key == "step":
            step = key
        else:
            raise InvalidArgument(
                f"{name} keeps '{key}' for each parameter, which has neither the parameter's shape nor counts steps: "
                f"a replica that catches up could not be given it. {USE}"
            )
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
    kept = Kept(tuple(moments), step, tuple(types))
    return replace(kept, from_zeros=_begins_with_zeros(optimizer, group, like, kept, state)), state


def _begins_with_zeros(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], like: torch.Tensor, kept: Kept, scratch: dict[str, Any]
) -> bool:
    random = torch.Generator().manual_seed(1)
    value, gradient = (torch.randn((3, 5), generator=random).to(like.dtype).to(like.device) for _ in range(2))
    parameter = torch.nn.Parameter(value.clone())
    parameter.grad = gradient.clone()
    copy = bare_copy(optimizer, [{**settings(group), "params": [parameter]}])
    copy.step()
    columns = [value] + [torch.zeros_like(value, dtype=dtype) for dtype in kept.types]
    apply(optimizer, [(group, kept, scratch, columns, gradient)], 1)
    return _same([parameter.detach(), *(copy.state[parameter][name] for name in kept.moments)], columns)


def _fused_sgd_updates(like: torch.Tensor) -> bool:
    """Say whether torch's fused SGD updates tensors of this type and device: torch 2.13 passes over whole vectors of
    float16 and bfloat16 on a CPU, and takes momentum from beside the tensor."""
    parameter = torch.nn.Parameter(torch.zeros(64, dtype=like.dtype, device=like.device))
    parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD([parameter], lr=1.0, fused=True).step()
    return bool((parameter == -1).all())


def self_check(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], like: torch.Tensor) -> bool:
    """Say whether parts of a parameter get the bits that the whole would: three steps of scratch tensors, compared.

    Raises `InvalidArgument` where another tensor's gradient makes a difference, since a replica that catches up updates
    tensors apart from each other. Within `one_thread`, as all updates are.
    """
    kept, scratch = kept_by(optimizer, group, like)
    count, borders = 1003, (0, 64, 192, 512, 576, 1003)  # as the session divides: multiples of 64
    random = torch.Generator().manual_seed(1)
    name = type(optimizer).__name__

    def drawn(scale: float) -> torch.Tensor:
        exponents = torch.rand(count, generator=random) * 9 - 6
        return (torch.randn(count, generator=random) * scale * 10**exponents).to(like.dtype).to(like.device)

    def update(step: int, *parts: tuple[Sequence[torch.Tensor], torch.Tensor]) -> None:
        try:
            apply(optimizer, [(group, kept, scratch, columns, gradient) for columns, gradient in parts], step)
        except Exception as error:
            raise InvalidArgument(
                f"{name} can't update a part of a tensor, which has one dimension: {type(error).__name__}: {error}. "
                f"{USE}"
            ) from error

    def made() -> list[torch.Tensor]:
        value = drawn(1.0)
        return [value] + [torch.zeros_like(value, dtype=dtype) for dtype in kept.types]

    whole, other = made(), made()
    parts, together, beside = ([column.clone() for column in of] for of in (whole, whole, other))
    for step in range(1, 4):
        gradient, others = drawn(0.1), drawn(10.0)
        given = gradient.clone()
        update(step, (whole, given))
        if not _same([given], [gradient]):
            raise InvalidArgument(
                f"{name} changes the gradients that it is given, which belong to the session: set foreach=False"
            )
        update(step, (other, others))
        update(step, (together, gradient), (beside, others))
        for begin, end in zip(borders, borders[1:], strict=False):
            update(step, ([column[begin:end] for column in parts], gradient[begin:end]))
    if not (_same(whole, together) and _same(other, beside)):
        raise InvalidArgument(
            f"{name} updates a tensor otherwise where another one is updated with it: a replica that catches up "
            f"updates them apart. {USE}"
        )
    return _same(whole, parts)


def _same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(one, other, strict=True))


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """Let torch compute with one thread within this block, where the device is the CPU.

    With several it divides a tensor of more than 32,768 elements at borders that depend on their number and are no
    multiple of a vector; elements beside a border are rounded otherwise.
    """
    if device.type != "cpu":
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


Part = tuple[Mapping[str, Any], Kept, Mapping[str, Any], Sequence[torch.Tensor], torch.Tensor]


def apply(optimizer: torch.optim.Optimizer, parts: Sequence[Part], step: int) -> None:
    """Update parts of parameters by step `step`: each with its group, what is kept, its columns and its gradient."""
    groups: dict[int, dict[str, Any]] = {}
    states: list[tuple[torch.nn.Parameter, dict[str, Any]]] = []
    for group, kept, scratch, columns, gradient in parts:
        parameter = torch.nn.Parameter(columns[0])
        parameter.grad = gradient
        groups.setdefault(id(group), {**settings(group), "params": []})["params"].append(parameter)
        states.append((parameter, kept.state(step - 1, columns[1:], scratch)))
    copy = bare_copy(optimizer, list(groups.values()))
    for parameter, state in states:
        copy.state[parameter] = state
    copy.step()
