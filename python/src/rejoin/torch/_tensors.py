"""What is the session's: its tensors, the parameters among them, and their buckets."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from rejoin.errors import InvalidArgument
from rejoin.torch import _optimizer
from rejoin.torch._kinds import Kinds
from rejoin.torch._sharding import Shard, local, shards_of

log = logging.getLogger("rejoin")

_ROUNDED = 2.0**-42  # relative: more than the sum and the division of equal float64 of 1,024 replicas round


@dataclass
class Tensor:
    """A tensor of the session: a parameter, a buffer of the model, or the metrics."""

    name: str
    value: torch.Tensor  # the parameter, or the model's buffer
    elementwise: bool = True
    group: int = -1  # the optimizer's; -1: no parameter, what is reduced becomes its value
    kept: _optimizer.Kept = field(default_factory=lambda: _optimizer.Kept((), None))
    scratch: Mapping[str, Any] = field(default_factory=dict)
    shard: Shard | None = None  # where FSDP2 has divided the parameter
    dtype: torch.dtype = torch.float32  # the session's; wider than the parameter's where that has a master
    gradient_dtype: torch.dtype = torch.float32  # as it is reduced
    averaged: bool = False  # the last column is the weight's moving average
    main_grad: bool = False  # backward() adds to `value.main_grad`, which is the gradient's memory
    index: int = -1  # the session's
    bucket: int = -1
    columns: list[torch.Tensor] = field(default_factory=list)  # flat: the weight, the moments, the average
    gradient: torch.Tensor = field(default_factory=lambda: torch.empty(0))  # flat, as all_reduce() takes it
    reduced: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    arrived: bool = False  # the gradient, in this step
    came: int = 0  # gradients of it, in this step: one from each backward()
    owner: tuple[torch.nn.Module, str] | None = None  # of a buffer: the module, and what it calls it
    handed_over: tuple[int, int] | None = None  # where it was, and its version as autograd counts
    average_loaded: bool = False  # from a checkpoint: else it begins with the weights that the job begins with
    held: list[torch.Tensor] = field(default_factory=list)  # what lies in the session's memory, and others may get
    address: int = 0  # of the weight in the session's memory
    memory: list[int] = field(default_factory=list)  # where that was with attach()
    goes_by: frozenset[str] = frozenset()  # attributes of the parameter that the optimizer's step() reads
    version: int = 0  # of the parameter, as autograd counts, when the session had written to it

    @property
    def is_parameter(self) -> bool:
        """Whether the optimizer updates it."""
        return self.group >= 0

    @property
    def count(self) -> int:
        """Elements in the session: of this rank, with the shard's padding."""
        return self.shard.count if self.shard is not None else self.value.numel()

    @property
    def has_master(self) -> bool:
        """Whether the session's weight is another tensor than the parameter, and wider."""
        return self.dtype != self.value.dtype

    @property
    def moments(self) -> list[torch.dtype]:
        """Types of the columns besides the weight."""
        # In 8 or 11 digits most of what an average moves by in a step would be lost.
        average = torch.float32 if self.dtype in (torch.bfloat16, torch.float16) else self.dtype
        return [*self.kept.types, *[average] * self.averaged]

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Give a column's memory in the shape that the tensor has on this rank, without padding."""
        return self.shard.view(flat) if self.shard is not None else flat.view(self.value.shape)

    def optimizers(self, flat: torch.Tensor) -> torch.Tensor:
        """Give a column's memory as the optimizer's state has it: sharded as the parameter is."""
        return self.shard.wrap(flat) if self.shard is not None else self.view(flat)

    def take(self, flat: torch.Tensor, values: torch.Tensor) -> None:
        """Copy values of the tensor, or of its shard, into a column."""
        own = local(values)
        shape = self.view(flat).shape
        if own.shape != shape:
            raise InvalidArgument(
                f"'{self.name}' has shape {tuple(shape)} on this rank, and what is loaded {tuple(own.shape)}"
                + (": load a sharded checkpoint (torch.distributed.checkpoint)" if self.shard is not None else "")
            )
        self.view(flat).copy_(own)

    def take_state(self, state: Mapping[str, Any]) -> None:
        """Take the moments that an optimizer has kept for this parameter."""
        with torch.no_grad():
            for column, own in self._moments_in(state):
                self.take(column, own)

    def drop_state(self, state: Mapping[str, Any]) -> None:
        """Begin without what has been loaded into this parameter's moments, as `state_dict(of=…)` lets it."""
        with torch.no_grad():
            for column, own in self._moments_in(state):
                if local(own).data_ptr() == column.data_ptr():
                    column.zero_()

    def _moments_in(self, state: Mapping[str, Any]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for name, column in zip(self.kept.moments, self.columns[1:], strict=False):
            if isinstance(own := state.get(name), torch.Tensor):
                yield column, own

    def place(self) -> None:
        """Move the value into the session's memory. A parameter with a master stays where it is."""
        self.address = self.columns[0].data_ptr()
        if not self.columns[0].is_cuda:  # what pickling shares of a GPU's memory stays where it is
            self.held = [*self.columns, self.gradient] if self.main_grad else self.columns
        self.memory = [tensor.data_ptr() for tensor in self.held]
        with torch.no_grad():
            self.view(self.columns[0]).copy_(local(self.value.detach()))
        if self.is_parameter:
            self.lay(self.columns[0])
        self.note_version()

    def lay(self, column: torch.Tensor) -> None:
        """Let the parameter be this column: lie in it, or, where that is wider, be equal to it but for rounding."""
        if self.has_master:
            local(self.value.detach()).copy_(self.view(column))
            return
        column = column.to(self.dtype)  # an average may be wider
        if self.shard is not None:
            self.shard.move(column)
        else:
            self.value.data = self.view(column)

    @property
    def is_buffer(self) -> bool:
        """Whether it is one of the model's buffers."""
        return self.owner is not None

    def contribution(self) -> torch.Tensor:
        """Give what this replica adds to the step's mean: the value, or of an int64 what has changed in this step.

        The sum of an int64 over all samples might not fit, and that of its changes does. They are exact even where the
        subtraction wraps. `settle` makes up for the rest, on replicas that catch up, too.
        """
        value = self.value.reshape(-1)
        if not self.is_buffer:
            return value
        return value - self.columns[0] if self.dtype == torch.int64 else value

    def settle(self, weight: torch.Tensor, reduced: torch.Tensor) -> None:
        """Bring elements of the column of what is no parameter to what the step's mean makes of them."""
        if self.is_buffer and self.dtype == torch.int64:
            weight.add_(reduced)
        elif self.is_buffer and self.dtype == torch.float64:  # what has changed by the sum's rounding alone stays
            weight.copy_(torch.where((reduced - weight).abs() <= weight.abs() * _ROUNDED, weight, reduced))
        elif self.is_buffer and self.value.dtype == torch.bool:  # where they differ, what one of them has set
            weight.copy_(reduced > 0)
        elif self.is_buffer and not self.dtype.is_floating_point and reduced.is_floating_point():
            weight.copy_(reduced.round())
        else:
            weight.copy_(reduced)

    def take_changes(self) -> None:
        """Take what has been written to a tensor that lies elsewhere, or is averaged: by its author, since attach()."""
        if not self.is_parameter:
            self.columns[0].copy_(self.value.reshape(-1))
        elif self.has_master:
            own, master = local(self.value.detach()), self.view(self.columns[0])
            if not torch.equal(own, master.to(own.dtype)):
                master.copy_(own)
        if self.averaged and not self.average_loaded:
            self.columns[-1].copy_(self.columns[0])

    def check_place(self) -> None:
        """Raise `InvalidArgument` where the model has another buffer by now, or the parameter another memory."""
        if self.owner is not None and self.owner[0]._buffers.get(self.owner[1]) is not self.value:
            raise InvalidArgument(
                f"buffer '{self.name}' is another tensor than with attach(), and would be each replica's own: write "
                f"into it (self.{self.owner[1]}.copy_(…)), instead of assigning to its name"
            )
        if self.is_buffer and self.value.numel() != self.columns[0].numel():
            raise InvalidArgument(
                f"buffer '{self.name}' had {self.columns[0].numel()} elements with attach(), and has shape "
                f"{tuple(self.value.shape)} by now: where the first forward() gives it its shape, as under "
                "quantisation-aware training, call the model once before attach()"
            )
        self.check_memory()
        if not self.is_parameter or self.has_master:
            return
        at = self.shard.address if self.shard is not None else self.value.data_ptr()
        if at != self.address:
            raise InvalidArgument(
                f"parameter '{self.name}' does not lie in the session's memory any more: model.to(), an assignment to "
                "its .data or load_state_dict(assign=True) after attach() has moved it, or FSDP2 of a torch before 2.13"
            )

    def check_memory(self) -> None:
        """Raise `InvalidArgument` where memory that the daemon sees is not what torch sees.

        torch exchanges the memory under a tensor, and under all of its views, for one that processes share, in place,
        when it pickles it for one of them. So addresses are compared with those of before, and not among tensors.
        """
        if [tensor.data_ptr() for tensor in self.held] != self.memory:
            raise InvalidArgument(
                f"'{self.name}', or what the optimizer keeps for it, does not lie in the session's memory any more: "
                "what gives it to another process (torch's Queue, a process's arguments, a DataLoader's data set or "
                "collate_fn that holds the model, share_memory()) moves it. Give others a clone()"
            )

    def _version_now(self) -> int:
        return (self.columns[0] if self.shard is not None else self.value)._version

    def note_version(self) -> None:
        """Take what has been written to the parameter so far for the session's own, or for what began with it."""
        self.version = self._version_now()

    def check_version(self) -> None:
        """Raise `InvalidArgument` where others have written to the parameter, in memory that replicas read meanwhile.

        What was written by way of `.data` is not seen.
        """
        if self.is_parameter and not self.has_master and self._version_now() != self.version:
            raise InvalidArgument(
                f"parameter '{self.name}' was written to between two updates: a replica that comes back reads it "
                "meanwhile, even if it was put back, and does not repeat it. To evaluate other weights take a copy of "
                "the model, torch.func.functional_call() or, with ema=, session.averaged(); to keep weights within "
                "bounds, torch.nn.utils.parametrize; load weights before the loop"
            )

    def refresh(self) -> None:
        """Bring a tensor that lies elsewhere to the session's value: a buffer, or what has a master."""
        if not self.is_parameter or self.has_master:
            local(self.value.detach()).copy_(self.view(self.columns[0]))


def parameters_of(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    masters: bool,
    averaged: bool,
    several_ranks: bool,
    gradients: torch.dtype | None = None,
    main_grad: bool = False,
    finite: bool = False,
) -> list[Tensor]:
    """Give the parameters to be trained, in the model's order; `InvalidArgument` where one can't be. `finite`: their
    gradients, in each update."""
    for module in model.modules():
        if type(module).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel"):
            raise InvalidArgument(
                f"the model has a {type(module).__name__} in it, which reduces gradients after the session has taken "
                "them: attach the plain model, or divide it with torch.distributed.fsdp.fully_shard()"
            )
        own = [p for p in module.parameters(recurse=False) if p.requires_grad] + list(module.buffers(recurse=False))
        if own and isinstance(module, torch.jit.ScriptModule):
            raise InvalidArgument(
                "the model has a module of TorchScript in it, whose tensors can't be the session's: attach the module "
                "that torch.jit.script() or trace() was given, and keep what is not trained out of the model"
            )
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if torch.nn.parameter.is_lazy(value):
            raise InvalidArgument(
                f"'{name}' has no shape yet: call the model once, with data as it will get, before the optimizer is "
                "made"
            )
    tensors: list[Tensor] = []
    shards = shards_of(model)
    group_of = {id(p): g for g, group in enumerate(optimizer.param_groups) for p in group["params"]}
    kinds = Kinds(optimizer, device, averaged, main_grad, finite)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        check_placed(name, parameter, device)
        shard = shards.get(id(parameter))
        if not is_dense(parameter):
            raise InvalidArgument(f"parameter '{name}' is a sparse or nested tensor: let it be dense, or freeze it")
        if parameter.is_complex():
            raise InvalidArgument(
                f"parameter '{name}' has type {parameter.dtype}, and real ones can be attached: let "
                "torch.view_as_real() of it be the parameter, and forward() take torch.view_as_complex() of that"
            )
        if shard is None and type(parameter.data) is not torch.Tensor:
            raise InvalidArgument(
                f"parameter '{name}' is a {type(parameter.data).__name__}: plain tensors can be attached, and those "
                "that FSDP2's fully_shard() has divided"
            )
        if shard is None and several_ranks and not shards:
            raise InvalidArgument(
                "this replica has several ranks, and the model is not divided among them: each would train a model of "
                "its own. Divide it with torch.distributed.fsdp.fully_shard(), or let each process be a replica"
            )
        if shard is None and shards:
            raise InvalidArgument(
                f"parameter '{name}' is not divided by fully_shard(), and others are: each rank would have one of its "
                "own. Call fully_shard(model) on the whole model last"
            )
        if parameter.numel() == 0:
            raise InvalidArgument(f"parameter '{name}' has no elements: freeze it, and leave it out of the optimizer")
        if shard is None and not parameter.is_contiguous():
            raise InvalidArgument(
                f"parameter '{name}' is not contiguous, as channels_last weights are not: make it so before attach(), "
                "by model.to(memory_format=torch.contiguous_format) or a clone(); let forward() make what is a view of "
                "another one, as a tied weight that is transposed"
            )
        group = group_of.pop(id(parameter), None)
        if group is None:
            raise InvalidArgument(
                f"parameter '{name}' wants a gradient and is in no group of the optimizer: give it to the "
                "optimizer, or freeze it with requires_grad_(False)"
            )
        dtype = torch.float32 if masters and parameter.dtype in (torch.bfloat16, torch.float16) else parameter.dtype
        if shard is not None and main_grad:
            raise InvalidArgument("main_grad=True of a model that fully_shard() has divided: it has no such gradients")
        kind = kinds.of(name, parameter, group, dtype, shard)
        reduced = gradients or dtype
        tensor = Tensor(
            name, parameter, True, group, kind.kept, kind.scratch, shard, dtype, reduced, averaged, main_grad
        )
        tensor.goes_by = kind.goes_by
        tensors.append(tensor)
    if group_of:
        raise InvalidArgument(
            f"{len(group_of)} parameters of the optimizer are not the model's, or are frozen: they would not be "
            "kept equal on all replicas"
        )
    for tensor, same in zip(tensors, kinds.elementwise(), strict=True):
        tensor.elementwise = same
    if not tensors:
        raise InvalidArgument("the model has no parameter that wants a gradient")
    return tensors


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether all of its elements lie in memory, at strides."""
    return tensor.layout is torch.strided and not tensor.is_nested


def check_placed(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Raise `InvalidArgument` where this tensor is on another device, or can't be updated."""
    if tensor.is_inference():
        raise InvalidArgument(
            f"'{name}' was made within torch.inference_mode(), and can't be updated: make the model outside of it, or "
            "copy.deepcopy() it outside and make the optimizer of the copy; for a buffer, registering its clone() is "
            "enough"
        )
    if tensor.device != device:
        raise InvalidArgument(
            f"'{name}' is on {tensor.device}, and the session on {device}: move the model there before "
            "attach(), or open the session with that device"
        )


def buckets_of(tensors: list[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """Divide tensors into buckets of one type of gradients and about `limit` bytes.

    Parameters from the last to the first, about as backward() comes to them; then what is none.
    """
    for parameters in (True, False):
        filling: dict[torch.dtype, list[Tensor]] = {}
        sizes: dict[torch.dtype, int] = {}
        for tensor in reversed(tensors):
            if tensor.is_parameter != parameters:
                continue
            dtype = tensor.gradient_dtype
            filling.setdefault(dtype, []).append(tensor)
            sizes[dtype] = sizes.get(dtype, 0) + tensor.count * dtype.itemsize
            if sizes[dtype] >= limit:
                del sizes[dtype]
                yield filling.pop(dtype)
        yield from filling.values()
