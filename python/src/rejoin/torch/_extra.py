"""What modules keep by `get_extra_state()`: each replica's own, so it has to stay what the script builds."""

from __future__ import annotations

import hashlib
import io
import logging

import torch

from rejoin.errors import InvalidArgument

log = logging.getLogger("rejoin")

_REMEDY = (
    "no part of the session: a replica that comes back begins with what its script builds. Keep what changes in "
    "persistent buffers, which it gets from the others"
)


class ExtraState:
    """The modules of a model that have such a state, and what it was when the replica joined."""

    def __init__(self, model: torch.nn.Module) -> None:
        own = torch.nn.Module.get_extra_state
        self._modules = [(name, one) for name, one in model.named_modules() if type(one).get_extra_state is not own]
        self._before: dict[str, bytes] = {}

    def note(self) -> None:
        """Take what it is, and say in the log that nobody gets it."""
        self._before = {name: _digest(module) for name, module in self._modules}
        having = [name for name, module in self._modules if module.get_extra_state() is not None]
        if having:
            log.warning("what get_extra_state() gives of %s is %s", _told(having), _REMEDY)

    def check(self) -> None:
        """Raise `InvalidArgument` where it has changed since."""
        changed = [name for name, module in self._modules if _digest(module) != self._before.get(name)]
        if changed:
            raise InvalidArgument(
                f"what get_extra_state() gives of {_told(changed)} changes in a step, and is {_REMEDY}"
            )


def _told(names: list[str]) -> str:
    first = f"module '{names[0]}'" if names[0] else "the model"
    return first + (f" and of {len(names) - 1} more" if len(names) > 1 else "")


# As a checkpoint would have it.
def _digest(module: torch.nn.Module) -> bytes:
    file = io.BytesIO()
    torch.save(module.get_extra_state(), file)
    return hashlib.sha256(file.getvalue()).digest()
