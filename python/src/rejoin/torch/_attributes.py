"""What a parameter carries besides its values: a class, and attributes that scripts put on it (`p.lr_scale = 0.1`).

An optimizer may go by them in its step(). So whatever stands for a parameter there, its master or a part of it, carries
them, too; which ones it goes by, a step over a scratch parameter shows.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from rejoin.errors import InvalidArgument
from rejoin.torch._settings import text

if TYPE_CHECKING:
    from rejoin.torch._tensors import Tensor

# Not carried: this replica's own gradient, in the session's memory, and what torch itself notes of this one tensor.
_MAIN_GRAD = "main_grad"
_OWN = (_MAIN_GRAD, "grad_added_to_main_grad", "_is_param")
_OF_TORCH = ("_dynamo", "__")


def attributes(parameter: torch.Tensor) -> dict[str, Any]:
    """Give the attributes that were put on this parameter. Its gradient, hooks and the like are none."""
    return {
        name: value for name, value in vars(parameter).items() if name not in _OWN and not name.startswith(_OF_TORCH)
    }


def standing_for(original: torch.Tensor | None, value: torch.Tensor) -> torch.nn.Parameter:
    """Make a parameter over this memory, of the original's class and with its attributes."""
    return _made(_kind(original), original, value)


def _kind(original: torch.Tensor | None) -> type[torch.nn.Parameter]:
    kind = type(original)
    return kind if issubclass(kind, torch.nn.Parameter) else torch.nn.Parameter  # a DTensor's memory is a plain one


def _made(kind: type[torch.nn.Parameter], original: torch.Tensor | None, value: torch.Tensor) -> torch.nn.Parameter:
    parameter: torch.nn.Parameter = torch.Tensor._make_subclass(kind, value, True)  # as torch.nn.Parameter() does
    if original is not None:
        vars(parameter).update(attributes(original))
    return parameter


def gone_by(original: torch.Tensor, value: torch.Tensor, steps: Callable[[torch.nn.Parameter], None]) -> frozenset[str]:
    """Give the names of attributes that an optimizer goes by, also of those that the parameter has not.

    `steps` lets the optimizer update a parameter, which it is given: one over `value` that stands for the original.
    """
    seen: set[str] = set()
    kind = _kind(original)

    class Watched(kind):  # type: ignore[valid-type, misc]
        def __getattribute__(self, name: str) -> Any:
            seen.add(name)
            return super().__getattribute__(name)

    watched = _made(Watched, original, value)
    seen.clear()
    compiler = sys.modules.get("torch._dynamo")  # of a step() that is compiled, which it would look through
    try:
        (compiler.disable(steps) if compiler is not None else steps)(watched)
    except Exception:  # what it has come to; where a parameter that is not watched goes well, all may count
        with suppress(Exception):
            steps(standing_for(original, torch.zeros_like(value)))
            seen.add("__dict__")
    if "__dict__" in seen:
        seen.update(attributes(original))
    return frozenset(
        name
        for name in seen
        if (name in vars(original) or not hasattr(torch.nn.Parameter, name))
        and name not in _OWN[1:]
        and not name.startswith(_OF_TORCH)
    )


def refuse_undivided(optimizer: str, name: str, parameter: torch.Tensor, by: frozenset[str], main_grad: bool) -> None:
    """Raise `InvalidArgument` where an optimizer goes by what no part of the parameter could be given."""
    if _MAIN_GRAD in by and (main_grad or _MAIN_GRAD in vars(parameter)):
        raise InvalidArgument(
            f"{optimizer} reads the parameters' 'main_grad', which is this replica's own gradient: the mean of all "
            "replicas' is in 'grad' when step() is called"
        )
    for attribute, value in attributes(parameter).items():
        if attribute in by and (found := next(_large(value), None)) is not None:
            raise InvalidArgument(
                f"{optimizer} goes by the attribute '{attribute}' of '{name}', a tensor of shape {tuple(found.shape)}: "
                "a replica that catches up updates parts of the parameter, and can't divide it with them. Let it be "
                "one number, or do the same in forward() (torch.nn.utils.parametrize)"
            )


def _large(value: Any, depth: int = 3) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            yield value
    elif depth > 0 and isinstance(value, (list, tuple, set, dict)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _large(one, depth - 1)


def key_of(parameter: torch.Tensor, by: frozenset[str] | None = None) -> tuple[Any, ...]:
    """Tell what this parameter carries, or of it what the optimizer goes by, alike for those for which it is alike."""
    tell = _quickly if by is None else text
    own = sorted(attributes(parameter).items())
    return _kind(parameter), *((name, tell(value)) for name, value in own if by is None or name in by)


def _quickly(value: Any) -> Any:
    return repr(value) if value is None or isinstance(value, (int, float, complex, str)) else id(value)


def told(tensors: Sequence[Tensor]) -> str:
    """Tell the attributes that the optimizer goes by, which have to be the same on all replicas."""
    named: dict[str, list[str]] = {}
    for tensor in tensors:
        for name, value in sorted(attributes(tensor.value).items()):
            if name in tensor.goes_by:
                named.setdefault(f"{name}={text(value)}", []).append(tensor.name)
    if not named:
        return ""
    of = {what: names[0] if len(names) == 1 else _several(names) for what, names in named.items()}
    return "attributes of parameters: " + ", ".join(f"{what} of {names}" for what, names in of.items())


def _several(names: list[str]) -> str:
    return f"{len(names)} parameters ({hashlib.sha256(' '.join(names).encode()).hexdigest()[:8]})"
