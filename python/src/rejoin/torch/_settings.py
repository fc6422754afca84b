"""Settings of an optimizer, and its hooks, of which it has none, stay what they were with attach(): a replica that
catches up applies steps of before.

See "Settings that change" in docs/design-notes.md.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rejoin.errors import InvalidArgument
from rejoin.torch._refusals import LR, refuse_hooks, refuse_schedule, take_off_hooks

if TYPE_CHECKING:
    from rejoin.torch._tensors import Tensor

log = logging.getLogger("rejoin")

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # each process's own
_NOTHING = object()
_EARLY = 2  # steps, by which a script that changes settings in each step has done so


def settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Give a group's settings without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def constants(group: Mapping[str, Any], lr_follows_steps: bool) -> dict[str, str]:
    """Give a group's settings that have to be the same in all steps and on all replicas, as exact text, by name: all,
    but perhaps the learning rate."""
    left_out = ("initial_lr", "lr") if lr_follows_steps else ("initial_lr",)
    return {key: text(value) for key, value in sorted(settings(group).items()) if key not in left_out}


def text(value: Any) -> str:
    """Tell a setting exactly, and in another process alike."""
    if isinstance(value, torch.Tensor):
        return str(value.tolist())
    if isinstance(value, set | frozenset):  # whose order is each process's own
        return f"{{{', '.join(sorted(map(text, value)))}}}"
    return _ADDRESS.sub("", getattr(value, "__qualname__", repr(value)))  # the name of a function


@dataclass(frozen=True)
class _Before:
    """A setting as it was with attach()."""

    value: Any
    text: str
    copy: torch.Tensor | None  # of a tensor, which may be written to


def _before(holder: Mapping[str, Any], name: str) -> _Before:
    value = holder.get(name, _NOTHING)
    return _Before(value, _now(holder, name), value.clone() if isinstance(value, torch.Tensor) else None)


def _now(holder: Mapping[str, Any], name: str) -> str:
    return text(holder[name]) if name in holder else "nothing"


class Settings:
    """What the optimizer's groups, and attributes of parameters, have to say in all steps: what they say with attach().

    A change is refused in the first steps of a job, or behind the checkpoint that it goes on from, on those that have
    begun with it. Later all replicas would end in the same step, with all that was trained, or one that comes back in
    each of its lives: there it is put back, alike on all, and the log has an error.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, tensors: Sequence[Tensor], lr_follows_steps: bool) -> None:
        self._optimizer, self._lr_follows_steps = optimizer, lr_follows_steps
        self._of_groups = [
            {name: _before(group, name) for name in constants(group, lr_follows_steps)}
            for group in optimizer.param_groups
        ]
        self._of_parameters = [
            (tensor, {name: _before(vars(tensor.value), name) for name in sorted(tensor.goes_by)})
            for tensor in tensors
            if tensor.goes_by
        ]
        self._put_back: dict[str, int] = {}  # how often, by what it was; hooks too
        self.restored = 0  # the step of the state that this process has brought
        self._with_the_job = True  # whether it goes on from that state with the others
        self._begun = False

    def check(self, step: int) -> None:
        """Refuse, or put back, what has changed before this step is applied."""
        early = self.early(step)
        try:
            refuse_hooks(self._optimizer)
        except InvalidArgument as error:
            if early:
                raise
            take_off_hooks(self._optimizer)
            self._tell("hooks", f"{error}. They were taken off", step)
        if early and not self._lr_follows_steps:
            refuse_schedule(self._optimizer)
        for what, holder, name, before in self._all():
            now = _now(holder, name)
            if now == before.text:
                continue
            changed = f"{what} has changed from {before.text} to {now} under the session: {_remedy(what)}"
            if early:
                raise InvalidArgument(changed)
            self._put(what, holder, name, before, changed, step)

    def begin(self, step: int, contributes: bool) -> None:
        """Take a step that begins here: in the first one it shows whether this process comes to a job under way."""
        if not self._begun:
            self._with_the_job = contributes and step == self.restored + 1
        self._begun = True

    def early(self, step: int, first: int = _EARLY) -> bool:
        """Whether little is lost where all replicas end in this step, one of so many at first."""
        return self._with_the_job and step <= self.restored + first

    def _all(self) -> Iterator[tuple[str, dict[str, Any], str, _Before]]:
        for number, (group, of_group) in enumerate(zip(self._optimizer.param_groups, self._of_groups, strict=True)):
            for name, before in of_group.items():
                of = f"{name} of the optimizer's group {number}"
                yield f"the learning rate of group {number}" if name == "lr" else of, group, name, before
        for tensor, of_parameter in self._of_parameters:
            for name, before in of_parameter.items():
                yield f"attribute '{name}' of '{tensor.name}'", vars(tensor.value), name, before

    def _put(self, what: str, holder: dict[str, Any], name: str, before: _Before, changed: str, step: int) -> None:
        if before.value is _NOTHING:
            del holder[name]
        else:
            holder[name] = before.value
            if before.copy is not None:
                with torch.no_grad():
                    before.value.copy_(before.copy)
        if _now(holder, name) != before.text:  # an object that was written to
            raise InvalidArgument(changed)
        self._tell(what, f"{changed}. It was put back", step)

    def _tell(self, what: str, told: str, step: int) -> None:
        times = self._put_back[what] = self._put_back.get(what, 0) + 1
        if times & (times - 1) == 0:  # a schedule changes it in each step
            log.error("step %d: %s (so far: %d): all replicas go on as before", step, told, times)


def _remedy(what: str) -> str:
    if what.startswith("the learning rate"):
        return LR
    return (
        "a replica that catches up applies steps of before with the settings of now. Leave it as it was with attach(): "
        "the learning rate alone may follow the step, by its lr="
    )
