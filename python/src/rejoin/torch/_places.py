"""Where the model has the session's parameters: what takes the place of one of them would be trained by nobody."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from rejoin.errors import InvalidArgument
from rejoin.torch._sharding import gather_again

if TYPE_CHECKING:
    from rejoin.torch._tensors import Tensor


class Places:
    """The model's modules and parameters, as they were when they were last looked at."""

    def __init__(self, model: torch.nn.Module, tensors: Sequence[Tensor], sharded: list[Any]) -> None:
        """`sharded`: FSDP2's groups of parameters, which puts others into the modules while it has gathered them."""
        self._model, self._sharded = model, sharded
        self._held = {id(tensor.value) for tensor in tensors if tensor.is_parameter}
        every = model.named_parameters(remove_duplicate=False)
        self._names = {name for name, parameter in every if id(parameter) in self._held}
        self._seen: list[tuple[torch.nn.Module, list[int]]] = []

    def check(self) -> None:
        """Raise `InvalidArgument` where something else has taken a parameter's place, or would have to be trained."""
        if self._seen and all(self._of(module) == seen for module, seen in self._seen):
            return
        gather_again(self._sharded)
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            if id(parameter) in self._held:
                continue
            if name in self._names:
                raise InvalidArgument(
                    f"parameter '{name}' is another tensor than with attach(), which nobody would train: "
                    "load_state_dict(assign=True), or an assignment to it or to its module, has put it there. Load "
                    "without assign=True, and replace parts of the model before attach()"
                )
            if parameter.requires_grad:
                raise InvalidArgument(
                    f"parameter '{name}' wants a gradient and is none of the session's: it was made, or thawed, after "
                    "attach(), and nobody would train it. Make it before, and give it to the optimizer, or freeze it "
                    "with requires_grad_(False)"
                )
        self._seen = [(module, self._of(module)) for module in self._model.modules()]

    # By identity, which a module that is looked at keeps alive. Every step asks: it is to be quick.
    def _of(self, module: torch.nn.Module) -> list[int]:
        inner = list(map(id, module._modules.values()))
        if self._sharded:
            return inner
        own = module._parameters.values()
        return [*inner, *map(id, own), *(parameter is not None and parameter.requires_grad for parameter in own)]
