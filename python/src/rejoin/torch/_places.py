"""Where the model has the session's tensors: what takes the place of one of them would be trained by nobody."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from rejoin.errors import InvalidArgument
from rejoin.torch._extra import ExtraState
from rejoin.torch._sharding import gather_again, gathered_of, parameters_of_fsdp

if TYPE_CHECKING:
    from rejoin.torch._tensors import Tensor


class Places:
    """The model's modules, parameters and persistent buffers, as they were when they were last looked at."""

    def __init__(self, model: torch.nn.Module, tensors: Sequence[Tensor], sharded: list[Any]) -> None:
        """`sharded`: FSDP2's states, which puts other parameters into the modules while it has gathered these."""
        self._model, self._sharded = model, sharded
        self._held = {id(tensor.value) for tensor in tensors if tensor.is_parameter}
        every = model.named_parameters(remove_duplicate=False)
        self._names = {name for name, parameter in every if id(parameter) in self._held}
        self._seen: list[tuple[torch.nn.Module, list[int]]] = []
        self._of_fsdp: set[int] = set()  # by identity: those in the modules, and those while they are gathered
        self._wanted: list[bool] = []
        self.extra = ExtraState(model)
        self.trained = False  # whether a step's forward() has been looked at
        self.frozen_again = 0  # how often

    def check(self) -> bool:
        """Raise `InvalidArgument` where something else has taken a parameter's place, or would have to be trained.

        Whether anything is other than before, buffers too.
        """
        wanted = self._wants()
        if self._seen and wanted == self._wanted and all(self._of(module) == seen for module, seen in self._seen):
            return False
        gather_again(self._sharded)
        gathered = {id(one.sharded_param): gathered_of(one) for one in parameters_of_fsdp(self._sharded)}
        self._of_fsdp = {*gathered, *(id(other) for other in gathered.values() if other is not None)}
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            if id(parameter) in self._held:
                continue
            if name in self._names:
                raise InvalidArgument(
                    f"parameter '{name}' is another tensor than with attach(), which nobody would train: "
                    "load_state_dict(assign=True), or an assignment to it or to its module, has put it there. Load "
                    "without assign=True, and replace parts of the model before attach()"
                )
            other = gathered.get(id(parameter))
            if parameter.requires_grad or (other is not None and other.requires_grad):
                raise InvalidArgument(
                    f"parameter '{name}' wants a gradient and is none of the session's: it was made, or thawed, after "
                    "attach(), and nobody would train it. Make it before, and give it to the optimizer, or freeze it "
                    "with requires_grad_(False)"
                )
        self._seen = [(module, self._of(module)) for module in self._model.modules()]
        self._wanted = wanted
        return True

    def freeze_again(self) -> bool:
        """Freeze what wants a gradient and is none of the session's, and drop that; whether there was any."""
        gathered = {id(one.sharded_param): gathered_of(one) for one in parameters_of_fsdp(self._sharded)}
        found = False
        for parameter in self._model.parameters():
            if id(parameter) in self._held:
                continue
            for one in (parameter, gathered.get(id(parameter))):
                if one is not None and one.requires_grad:
                    one.requires_grad_(False)
                    one.grad, found = None, True
        self.frozen_again += found
        return found

    # By identity, which a module that is looked at keeps alive. Every step asks: it is to be quick.
    def _of(self, module: torch.nn.Module) -> list[int]:
        inner = list(map(id, module._modules.values()))
        own = [parameter for parameter in module._parameters.values() if id(parameter) not in self._of_fsdp]
        seen = [*inner, *map(id, own), *(parameter is not None and parameter.requires_grad for parameter in own)]
        if module._buffers:  # one without elements may get some
            own_buffers = [b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set]
            seen += [id(buffer) if buffer is not None and buffer.numel() > 0 else 0 for buffer in own_buffers]
        return seen

    # Those of FSDP2, which are in the modules by turns as they are and gathered.
    def _wants(self) -> list[bool]:
        every = [(one.sharded_param, gathered_of(one)) for one in parameters_of_fsdp(self._sharded)]
        return [one is not None and one.requires_grad for pair in every for one in pair]
