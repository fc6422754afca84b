"""Parameters that FSDP2 (`torch.distributed.fsdp.fully_shard`) has divided among the ranks of a replica.

Each rank's session has its own shard of each parameter, padded as FSDP2 pads it, in the memory that FSDP2 gathers from.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from rejoin.errors import InvalidArgument


class Shard:
    """This rank's shard of a parameter."""

    def __init__(self, of_fsdp: Any) -> None:
        """`of_fsdp`: FSDP2's own record of the parameter (`FSDPParam`)."""
        self._of = of_fsdp
        self._local_shape = torch.Size(of_fsdp.sharded_param.to_local().shape)
        self._dimension = int(of_fsdp.fsdp_placement.dim)

    @property
    def count(self) -> int:
        """Elements, with the padding."""
        return int(self._of._sharded_param_data.numel())

    @property
    def address(self) -> int:
        """Where FSDP2 gathers it from."""
        return int(self._of._sharded_param_data.data_ptr())

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Give the part of memory of this size that is no padding, in the shard's shape."""
        whole = flat.view(self._of.padded_sharded_param_size)
        length = self._local_shape[self._dimension] if self._local_shape.numel() > 0 else 0
        return whole.narrow(self._dimension, 0, length)

    def move(self, flat: torch.Tensor) -> None:
        """Let the parameter lie here from now on."""
        self._of._sharded_param_data = flat
        self._of.sharded_param._local_tensor = self.view(flat)

    def wrap(self, flat: torch.Tensor) -> torch.Tensor:
        """Make a DTensor of the parameter's layout over this memory."""
        wrapped: torch.Tensor = self._of.to_sharded_dtensor(self.view(flat))
        return wrapped

    @property
    def place(self) -> list[int]:
        """Which shard it is: this rank's coordinates in the mesh, of what the mesh divides and does not replicate."""
        from torch.distributed.tensor import Replicate

        parameter = self._of.sharded_param
        at = parameter.device_mesh.get_coordinate()
        return [at[i] for i, placed in enumerate(parameter.placements) if not isinstance(placed, Replicate)]

    @property
    def ranks(self) -> set[int]:
        """The ranks that have something of the parameter."""
        return set(self._of.sharded_param.device_mesh.mesh.flatten().tolist())


def first_copies(shards: dict[str, Shard], rank: int, gather: Callable[[str, bytes], list[bytes]]) -> set[str]:
    """Give the names of the parameters of whose shard no rank before this one has another copy.

    Such as those that the mesh replicates, and those that tensor parallelism leaves whole, which have a mesh without
    it: ranks are compared that some parameter divides among them. Others, of stages of a pipeline say, may have
    parameters of the same name. Only what is the same at any time decides, not the shards' bits: a replica that comes
    back has to find what the others have found.
    """
    mine = {name: shard.place for name, shard in shards.items()}
    theirs = [json.loads(told) for told in gather("shards", json.dumps(mine).encode())]
    together = set[int]().union(*(shard.ranks for shard in shards.values()))
    before = [theirs[other] for other in sorted(together) if other < rank]
    return {name for name, place in mine.items() if all(place != of.get(name) for of in before)}


def shards_of(model: torch.nn.Module) -> dict[int, Shard]:
    """Find what FSDP2 has divided: by the parameter's id."""
    shards: dict[int, Shard] = {}
    for one in parameters_of_fsdp(states_of(model)):
        if one.offload_to_cpu:
            raise InvalidArgument("FSDP2 with CPU offload can't be attached: leave its OffloadPolicy out")
        shards[id(one.sharded_param)] = Shard(one)
    return shards


def gather_again(states: list[Any]) -> None:
    """Let the next forward() gather from the shards, where FSDP2 still has what it has gathered before.

    Also where a forward() or backward() has raised: then FSDP2 goes on being in the midst of it, keeps what is gathered
    for the next one, and does not finish that as it should.
    """
    for state in states:
        idle = type(state._training_state).IDLE
        state._training_state = idle
        state._modules_to_run_forward.clear()
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False
        for group in _groups(state):
            group._training_state = idle
            group.wait_for_unshard()  # where one was begun ahead
            group.reshard()


def _in_backward(states: list[Any]) -> bool:
    """Say whether FSDP2 is in a backward(): between two, that one has raised."""
    return any(state._state_ctx.post_backward_final_callback_queued for state in states)


def check_reduced(states: list[Any]) -> None:
    """Refuse to count a step of whose gradients FSDP2 has not reduced some: they would be zeros."""
    if _in_backward(states):
        raise InvalidArgument(
            "a backward() of this step has raised, and has not brought all gradients: call optimizer.zero_grad() "
            "before the next forward()"
        )
    kept = [
        group._partial_reduce_output is not None
        or any(
            one.unsharded_accumulated_grad is not None or getattr(gathered_of(one), "grad", None) is not None
            for one in group.fsdp_params
        )
        for state in states
        for group in _groups(state)
    ]
    if any(kept):
        raise InvalidArgument(
            "the last backward() of the step was not reduced: set_requires_gradient_sync(True), and "
            "set_requires_all_reduce(True), come before the last micro-batch's"
        )


def drop_gradients(states: list[Any]) -> None:
    """Drop what a backward() has brought and FSDP2 has not reduced, as after `set_requires_gradient_sync(False)`.

    The next forward() and backward() begin anew, also where that one has raised.
    """
    if _in_backward(states):
        gather_again(states)
    for state in states:
        for group in _groups(state):
            group._partial_reduce_output = None
            for one in group.fsdp_params:
                one.unsharded_accumulated_grad = None
                if (gathered := gathered_of(one)) is not None:
                    gathered.grad = None


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Give what this rank has of a DTensor; a plain tensor is given back."""
    to_local = getattr(tensor, "to_local", None)
    if to_local is None:
        return tensor
    own: torch.Tensor = to_local()
    return own


def states_of(model: torch.nn.Module) -> list[Any]:
    """Find FSDP2's state of each `fully_shard()` of the model (`FSDPState`)."""
    if not torch.distributed.is_available():
        return []
    try:
        from torch.distributed.fsdp import FSDPModule
    except ImportError:  # torch before 2.6
        return []
    states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    return list({id(state): state for state in states}.values())  # that of several modules once


def parameters_of_fsdp(states: list[Any]) -> list[Any]:
    """Give FSDP2's own records of all parameters (`FSDPParam`)."""
    return [one for state in states for group in _groups(state) for one in group.fsdp_params]


def gathered_of(of_fsdp: Any) -> torch.nn.Parameter | None:
    """Give the parameter that FSDP2 puts into the module while this one is gathered; None before it ever was."""
    gathered: torch.nn.Parameter | None = getattr(of_fsdp, "_unsharded_param", None)
    return gathered


# They are gathered together (`FSDPParamGroup`).
def _groups(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    group = state._fsdp_param_group  # torch before 2.12
    return [group] if group is not None else []
