"""What a session can't be given: types and names of tensors, and what was done to an optimizer's object besides its
class and settings, which no copy of it for parts would have."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

import torch

from rejoin._memory import TYPES
from rejoin.errors import InvalidArgument

if TYPE_CHECKING:
    from rejoin.torch._tensors import Tensor

LR = (
    "give attach() lr=, a function of the step, so that a replica that catches up knows those of before; one that "
    "follows the loss, as ReduceLROnPlateau's, can't be had"
)


def refuse_interrupted(check: Callable[[], None], what: str) -> NoReturn:
    """Raise `InvalidArgument`, or what `check` does: what a signal's handler has raised in the midst of `what`."""
    check()
    raise InvalidArgument(
        f"{what} was interrupted by what was raised within it, such as by a signal's handler, and can't be made up "
        "for: end this process, it is started again. Let handlers set a flag for the loop's body"
    )


def refuse_no_number(name: str, value: object) -> None:
    """Raise `InvalidArgument` where what was given by that name is no number, or a text that looks like one."""
    try:
        if not isinstance(value, str | bytes):
            float(value)  # type: ignore[arg-type]
            return
    except (TypeError, ValueError, OverflowError, RuntimeError):
        pass
    raise InvalidArgument(f"{name}={value!r:.100}: it is to be a number")


def refuse_types(model: torch.nn.Module, masters: bool) -> None:
    """Raise `InvalidArgument` where a parameter is to be trained that is of none of the types in which that is done, or
    takes no gradient of the type in which the optimizer gets it."""
    for name, parameter in model.named_parameters():
        dtype = parameter.dtype
        if parameter.requires_grad and dtype not in TYPES and not dtype.is_complex:  # these have a remedy of their own
            raise InvalidArgument(
                f"parameter '{name}' has type {dtype}, in which nothing is trained: let it be bfloat16 or float32, or "
                "freeze it with requires_grad_(False)"
            )
        has_master = masters and dtype in (torch.bfloat16, torch.float16)
        if parameter.requires_grad and not has_master and getattr(parameter, "grad_dtype", None) not in (None, dtype):
            raise InvalidArgument(
                f"parameter '{name}' has type {dtype} and grad_dtype {parameter.grad_dtype}, and the optimizer gets "
                "gradients of the parameter's type: leave grad_dtype as it is, or let masters=True give it both in "
                "float32"
            )


def refuse_names(tensors: Sequence[Tensor]) -> None:
    """Raise `InvalidArgument` where a name can't be told to the others."""
    for name in (tensor.name for tensor in tensors):
        try:
            name.encode()
        except UnicodeEncodeError:
            raise InvalidArgument(
                f"the name {ascii(name)} is no text in UTF-8: give the parameter or buffer another one, or the module "
                "that it lies in"
            ) from None


def refuse_shared_state(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> None:
    """Raise `InvalidArgument` where the optimizer keeps one tensor under two names, which a session would make two."""
    for tensor in parameters:
        names: dict[int, str] = {}
        for name in tensor.kept.moments:
            first = names.setdefault(tensor.scratch[name].data_ptr(), name)
            if first != name:
                raise InvalidArgument(
                    f"{type(optimizer).__name__} keeps one tensor as '{first}' and as '{name}' for '{tensor.name}', "
                    "which a session would keep as two: let it be in state[parameter] under one name"
                )


def refuse_wrappers(optimizer: torch.optim.Optimizer) -> None:
    """Raise `InvalidArgument` where the optimizer hands its step() on to another, which no `bare_copy` would have."""
    for name, value in vars(optimizer).items():
        for inner in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(inner, torch.optim.Optimizer) and inner is not optimizer:
                raise InvalidArgument(
                    f"{type(optimizer).__name__} wraps another optimizer (its '{name}' is of class "
                    f"{type(inner).__name__}), whose state would be no part of the session: attach that one"
                )
    for name in ("param_groups", "state"):
        own = getattr(type(optimizer), name, None)
        if isinstance(own, property) and own.fset is None:
            raise InvalidArgument(
                f"{type(optimizer).__name__} has no '{name}' of its own, as one that wraps another optimizer: attach "
                "that one"
            )


def refuse_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Raise `InvalidArgument` where the optimizer has hooks, which a `bare_copy` has not."""
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise InvalidArgument(
            "the optimizer has hooks on step(): a replica that catches up updates parts of tensors, without them. "
            "Take them off, or do the same in the loop's body"
        )


def take_off_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer have no hooks on step()."""
    optimizer._optimizer_step_pre_hooks.clear()
    optimizer._optimizer_step_post_hooks.clear()


def refuse_step_of_its_own(optimizer: torch.optim.Optimizer) -> None:
    """Raise `InvalidArgument` where a step() was put on the optimizer, which a replica that catches up would not call.

    That of torch's schedulers, which only notes that it was called, does no harm.
    """
    step = vars(optimizer).get("step")
    step = getattr(step, "__func__", step)
    if getattr(step, "__globals__", {}).get("__name__") == "torch.optim.lr_scheduler":
        step = getattr(step, "__wrapped__", None)
    if step is not None and step is not type(optimizer).step:
        raise InvalidArgument(
            "another step() was put on the optimizer (optimizer.step = …, as by torch.compile(optimizer.step)), or it "
            "is attached already: a replica that catches up updates parts of tensors with the step() of its class, "
            f"{type(optimizer).__name__}. Let a class of your own, derived from that, have this step()"
        )


def refuse_closure(optimizer: torch.optim.Optimizer) -> None:
    """Raise `InvalidArgument` where step() can't do without a closure, which it calls as often as it likes."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise InvalidArgument(
            f"{type(optimizer).__name__} computes the loss several times in a step, by a closure that its step() asks "
            "for, and a step's gradients are exchanged once: take an optimizer that updates from one gradient, such as "
            "AdamW or SGD. A closure that is given to those is called once"
        )


def refuse_schedule(optimizer: torch.optim.Optimizer) -> None:
    """Raise `InvalidArgument` where the optimizer has a schedule, which may change its rates in a far step alone."""
    scheduled = [number for number, group in enumerate(optimizer.param_groups) if "initial_lr" in group]
    if scheduled or hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        raise InvalidArgument(
            "the optimizer has a schedule of torch.optim.lr_scheduler"
            + (f" (there is an 'initial_lr' in its group {scheduled[0]})" if scheduled else "")
            + f", which changes the learning rate under the session: {LR}. Where the rate is to stay what it is, let "
            "lr= be so: lr=lambda step: 0.001"
        )
