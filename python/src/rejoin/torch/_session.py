"""A PyTorch model and its optimizer as one replica of a job."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any

import torch
from torch.utils.data import DataLoader

from rejoin import _native
from rejoin.errors import InvalidArgument, RejoinError, Unavailable
from rejoin.launch import place_from_environment
from rejoin.torch import _optimizer
from rejoin.torch._data import Batches, Fetcher, Ranges
from rejoin.torch._memory import tensor_at, type_of

log = logging.getLogger("rejoin")

Schedule = Callable[[int], "float | Sequence[float]"]

_BUCKET_BYTES = 25 << 20
_CLIP_REMEMBERED = 4096  # steps; a replica that catches up gets those of steps before


@dataclass
class Step:
    """A step to train: its gradients are exchanged, and `optimizer.step()` ends it."""

    number: int  # from 1; the weights are those after the step before
    leads: bool  # true on all ranks of one replica: what one does for all, such as writing a checkpoint
    samples: Ranges  # [begin, end) of the endless sample stream
    _session: Session = field(repr=False)

    def record(self, **values: float | torch.Tensor) -> None:
        """Hand over this replica's values of the metrics that `attach` was given, before `optimizer.step()`."""
        self._session._record(values)

    def mean(self, name: str) -> float:
        """Give a metric's mean over the replicas that trained this step, after `optimizer.step()`: equal on all."""
        return self._session._mean(name)


@dataclass
class _Tensor:
    """A tensor of the session: a parameter, a buffer of the model, or the metrics."""

    name: str
    value: torch.Tensor  # the parameter, or the model's buffer
    index: int = -1
    bucket: int = -1
    moments: int = 0
    group: int = -1  # the optimizer's; -1: no parameter, what is reduced becomes its value
    kept: _optimizer.Kept | None = None
    scratch: Mapping[str, Any] = field(default_factory=dict)
    columns: list[torch.Tensor] = field(default_factory=list)  # flat: the weight, and the moments
    gradient: torch.Tensor = field(default_factory=lambda: torch.empty(0))  # flat, as all_reduce() takes it
    reduced: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    arrived: bool = False  # the gradient, in this step

    @property
    def is_parameter(self) -> bool:
        return self.group >= 0


class Session:
    """This process's part in the job.

    One thread calls everything here. What fails raises a `rejoin.RejoinError`; after `rejoin.Cancelled` the process is
    to end, and to be started again.
    """

    def __init__(self, device: torch.device | str = "cpu", **settings: Any) -> None:
        """Open a session with these settings, named as a trainer's flags (`socket`, `replica`, `rank`, `transport` …).

        What is not given comes from REJOIN_* variables; replica and rank also from a launcher's variables
        (`rejoin.place_from_environment`). Does not talk to the daemon yet.
        """
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        if self.device.type not in ("cpu", "cuda"):
            raise InvalidArgument(f"device {self.device}: Rejoin knows cpu and cuda")
        if "replica" not in settings or "rank" not in settings:
            place = place_from_environment()
            settings = {"replica": place.replica, "rank": place.rank, **settings}
        self.replica, self.rank = int(settings["replica"]), int(settings["rank"])
        settings.setdefault("device", "host" if self.device.type == "cpu" else str(self.device))
        self._native = _native.Session([f"{name.replace('_', '-')}={value}" for name, value in settings.items()])
        self._tensors: list[_Tensor] = []
        self._buckets: list[list[_Tensor]] = []
        self._metrics: tuple[str, ...] = ()
        self._metric_values: torch.Tensor | None = None
        self._model: torch.nn.Module | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._optimizer_step: Callable[..., Any] | None = None
        self._lr: Schedule | None = None
        self._constant_lr: list[float] = []
        self._max_norm: float | None = None
        self._skip_nonfinite = False
        self._clip: dict[int, float | None] = {}  # by step; None: the step is skipped
        self._joined = self._finished = self._in_step = self._updated = False
        self._accumulating = self._waiting = False
        self._offset = 0  # steps that the optimizer had counted before the job's first
        self._step: Step | None = None
        self._leaving = threading.Event()
        self._position: str | None = None
        self._compare_position = True
        self._fetchers: dict[int, Fetcher] = {}
        self.last_norm: float | None = None

    @classmethod
    def from_environment(cls, device: torch.device | str = "cpu", **settings: Any) -> Session:
        """Open a session as the launcher's and REJOIN_* variables say."""
        return cls(device, **settings)

    # ---- attaching

    def attach(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        max_norm: float | None = None,
        lr: Schedule | None = None,
        metrics: Sequence[str] = (),
        skip_nonfinite: bool = False,
        bucket_bytes: int = _BUCKET_BYTES,
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        """Move the model's parameters and the optimizer's state into the session, and give both back.

        They stay the same objects: `p.data` is memory that the session shares with its daemon, `backward()` hands over
        gradients as they come, and `optimizer.step()` waits until all replicas have agreed, clips the mean gradient by
        its global norm to `max_norm`, sets the learning rate to `lr(step)` (one, or one for each group; steps count
        from 1) and updates. `lr` is a function of the step alone, since a replica that catches up applies steps of
        before; without it the groups' learning rates stay what they are. `optimizer.step()` also clears the gradients.

        Persistent buffers of floating point or integers (BatchNorm's) become their mean over the replicas in each
        step; others, and frozen parameters, are each replica's own, and have to be equal from the start. A parameter
        that gets no gradient in a step counts with zeros. `skip_nonfinite`: a step whose mean gradient has an infinity
        or a NaN changes nothing, on all replicas.

        Raises `InvalidArgument` for an optimizer whose state or update can't be given to parts of parameters, and for
        types and devices that can't be.
        """
        if self._model is not None:
            raise InvalidArgument("attach() comes once")
        if max_norm is not None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise InvalidArgument(
                "max_norm with several ranks in a replica: the norm over all of them is not to be had yet; clip "
                "otherwise, or use one rank"
            )
        self._model, self._optimizer = model, optimizer
        self._lr, self._max_norm, self._skip_nonfinite = lr, max_norm, skip_nonfinite
        self._constant_lr = [float(group["lr"]) for group in optimizer.param_groups]
        self._metrics = tuple(metrics)
        self._collect(model, optimizer)
        self._fill_buckets(bucket_bytes)
        self._native.allocate()
        for tensor in self._tensors:
            self._place(tensor)
        self._optimizer_step = optimizer.step
        optimizer.step = self._commit  # type: ignore[method-assign]
        optimizer.zero_grad = self._zero_grad  # type: ignore[method-assign]
        return model, optimizer

    def _collect(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        group_of = {id(p): g for g, group in enumerate(optimizer.param_groups) for p in group["params"]}
        elementwise: dict[tuple[int, torch.dtype], tuple[_optimizer.Kept, Mapping[str, Any], bool]] = {}
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            self._check_placed(name, parameter)
            if type(parameter.data) is not torch.Tensor:
                raise InvalidArgument(
                    f"parameter '{name}' is a {type(parameter.data).__name__}: plain tensors can be attached"
                )
            if not parameter.is_contiguous():
                raise InvalidArgument(f"parameter '{name}' is not contiguous: make it so before attach()")
            group = group_of.pop(id(parameter), None)
            if group is None:
                raise InvalidArgument(
                    f"parameter '{name}' wants a gradient and is in no group of the optimizer: give it to the "
                    "optimizer, or freeze it with requires_grad_(False)"
                )
            key = (group, parameter.dtype)
            if key not in elementwise:
                settings = optimizer.param_groups[group]
                kept, scratch = _optimizer.kept_by(optimizer, settings, parameter)
                same = _optimizer.self_check(optimizer, settings, parameter)
                if not same:
                    log.warning(
                        "%s rounds parts of a tensor otherwise than the whole: a replica that catches up gets whole "
                        "tensors",
                        type(optimizer).__name__,
                    )
                elementwise[key] = (kept, scratch, same)
            kept, scratch, same = elementwise[key]
            tensor = _Tensor(name, parameter, moments=len(kept.moments), group=group, kept=kept, scratch=scratch)
            self._add(tensor, same)
        if group_of:
            raise InvalidArgument(
                f"{len(group_of)} parameters of the optimizer are not the model's, or are frozen: they would not be "
                "kept equal on all replicas"
            )
        if not self._tensors:
            raise InvalidArgument("the model has no parameter that wants a gradient")
        for name, buffer in self._persistent_buffers(model):
            if buffer.dtype in (torch.bool, torch.uint8, torch.int8, torch.int16) or buffer.numel() == 0:
                continue
            self._check_placed(name, buffer)
            self._add(_Tensor(name, buffer), True)
        if self._metrics:
            self._metric_values = torch.zeros(len(self._metrics), dtype=torch.float64, device=self.device)
            self._add(_Tensor("rejoin.metrics", self._metric_values), True)

    @staticmethod
    def _persistent_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        seen: set[int] = set()
        for prefix, module in model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is None or name in module._non_persistent_buffers_set or id(buffer) in seen:
                    continue
                seen.add(id(buffer))
                yield (f"{prefix}.{name}" if prefix else name), buffer

    def _check_placed(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.device != self.device:
            raise InvalidArgument(
                f"'{name}' is on {tensor.device}, and the session on {self.device}: move the model there before "
                "attach(), or open the session with that device"
            )

    def _add(self, tensor: _Tensor, elementwise: bool) -> None:
        kind = type_of(tensor.name, tensor.value.dtype)
        tensor.index = self._native.add(tensor.name, kind, tensor.value.numel(), tensor.moments, elementwise)
        self._tensors.append(tensor)

    # Parameters from the last to the first, about as backward() comes to them; one type in each bucket.
    def _fill_buckets(self, limit: int) -> None:
        filling: dict[torch.dtype, list[_Tensor]] = {}

        def close(bucket: list[_Tensor]) -> None:
            number = self._native.bucket([tensor.index for tensor in bucket])
            for tensor in bucket:
                tensor.bucket = number
            self._buckets.append(bucket)

        def size(bucket: list[_Tensor]) -> int:
            return sum(tensor.value.numel() * tensor.value.element_size() for tensor in bucket)

        for parameters in (True, False):
            filling.clear()
            for tensor in reversed(self._tensors):
                if tensor.is_parameter != parameters:
                    continue
                bucket = filling.setdefault(tensor.value.dtype, [])
                bucket.append(tensor)
                if size(bucket) >= limit:
                    close(filling.pop(tensor.value.dtype))
            for bucket in filling.values():
                close(bucket)

    def _at(self, memory: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        return tensor_at(self._native, memory[0], memory[1] // dtype.itemsize, dtype, self.device)

    def _place(self, tensor: _Tensor) -> None:
        value, dtype = tensor.value, tensor.value.dtype
        tensor.columns = [self._at(self._native.weight(tensor.index), dtype)]
        tensor.columns += [self._at(self._native.moment(tensor.index, i), dtype) for i in range(tensor.moments)]
        tensor.gradient = self._at(self._native.gradient(tensor.index), dtype)
        tensor.reduced = self._at(self._native.reduced(tensor.index), dtype)
        with torch.no_grad():
            tensor.columns[0].copy_(value.detach().reshape(-1))
        if not tensor.is_parameter:
            return
        assert self._optimizer is not None and tensor.kept is not None
        self._take_over_state(tensor)
        parameter = tensor.value
        parameter.data = tensor.columns[0].view(value.shape)
        parameter.grad = None
        hook = parameter.register_post_accumulate_grad_hook  # type: ignore[attr-defined]
        session = weakref.ref(self)  # autograd keeps its hooks where Python's collector does not look

        def on_gradient(parameter: torch.Tensor) -> None:
            if (alive := session()) is not None:
                alive._on_gradient(tensor, parameter)

        hook(on_gradient)

    # What the optimizer has kept already, say from a checkpoint of plain PyTorch, goes on here.
    def _take_over_state(self, tensor: _Tensor) -> None:
        assert self._optimizer is not None and tensor.kept is not None
        before = self._optimizer.state.get(tensor.value, {})
        with torch.no_grad():
            for name, column in zip(tensor.kept.moments, tensor.columns[1:], strict=True):
                if isinstance(before.get(name), torch.Tensor):
                    column.copy_(before[name].reshape(-1))
        shaped = [column.view(tensor.value.shape) for column in tensor.columns[1:]]
        self._offset = self._step_of(before, tensor)
        self._optimizer.state[tensor.value] = tensor.kept.state(self._offset, shaped, tensor.scratch)

    @staticmethod
    def _step_of(state: Mapping[str, Any], tensor: _Tensor) -> int:
        assert tensor.kept is not None
        return int(state[tensor.kept.step]) if tensor.kept.step is not None and tensor.kept.step in state else 0

    # ---- data

    def batches(self, size: int, *, seed: int = 0, shuffle: bool = True) -> Batches:
        """Make the batch sampler for a DataLoader over a map-style data set of `size` samples.

        Each sample is trained once in each data epoch, whatever replica is lost. The same on every replica; how many
        samples a step takes is the coordinator's setting (`--batch`).
        """
        return Batches(size, seed, shuffle)

    # ---- joining and leaving

    def join(self) -> None:
        """Register with the daemon: the state is initialised, or restored with `load_state_dict`.

        Whatever is slow the first time (compiling, autotuning, set-up of communication) belongs before this: from here
        on others may wait for this replica. SIGTERM is taken as an orderly leave at the end of a step from now on,
        unless the program has a handler of its own.
        """
        if self._model is None:
            raise InvalidArgument("join() before attach()")
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_sigterm)
        self._native.join(self._position, self._compare_position)
        self._joined = True

    def _on_sigterm(self, _signal: int, _frame: FrameType | None) -> None:
        self._leaving.set()
        if self._waiting:  # for a step, perhaps for long
            raise _Terminated

    def leave(self) -> None:
        """End this replica's part in the job; the others go on at once."""
        for fetcher in self._fetchers.values():
            fetcher.stop()
        if self._joined:
            self._native.leave()

    def __enter__(self) -> Session:
        """Give the session, which leaves the job at the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the job."""
        try:
            self.leave()
        except RejoinError:
            if kind is None:
                raise

    # ---- steps

    def steps(self, loader: DataLoader[Any] | None = None) -> Iterator[tuple[Step, Any]]:
        """Give the job's steps that this replica trains, with the data of their samples; join() first, if it was not.

        Ends when the job is finished, or after SIGTERM. While this replica catches up nothing is given, and its state
        is brought forward here. Without a loader the data is the list of the samples' numbers in the stream, as
        ranges. In each step `optimizer.step()` is called once.
        """
        if not self._joined:
            self.join()
        if loader is not None and id(loader) not in self._fetchers:
            self._fetchers[id(loader)] = Fetcher(loader)
        try:
            while (step := self._begin_step()) is not None:
                data = step.samples if loader is None else self._fetchers[id(loader)].fetch(step.samples)
                yield step, data
                if not self._updated:
                    raise InvalidArgument(f"step {step.number} has ended without optimizer.step()")
                self._in_step = False
                if self._leaving.is_set():
                    break
        except _Terminated:
            pass
        log.info("replica %d rank %d leaves after step %d", self.replica, self.rank, self._native.committed())
        self.leave()

    # The next step that this replica contributes to; it goes through those before, in which it catches up.
    def _begin_step(self) -> Step | None:
        while not self._leaving.is_set():
            self._waiting = True
            begun = self._native.begin_step()
            self._waiting = False
            if begun is None:
                self._finished = True
                return None
            number, contributes, leads, batch = begun
            if contributes:
                for tensor in self._tensors:
                    tensor.arrived = False
                self._in_step, self._updated = True, False
                self._step = Step(number, leads, tuple(batch), self)
                return self._step
            self._update(number)
        return None

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Hold gradients back within this block: those of a later backward() in the same step are added to them."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def _stream(self) -> int | None:
        return int(torch.cuda.current_stream(self.device).cuda_stream) if self.device.type == "cuda" else None

    def _on_gradient(self, tensor: _Tensor, parameter: torch.Tensor) -> None:
        if not self._in_step or self._accumulating:
            return
        if tensor.arrived:
            raise InvalidArgument(
                f"a second gradient of '{tensor.name}' in step {self._step.number if self._step else 0}: all but the "
                "last backward() of a step belong into 'with session.accumulate():'"
            )
        gradient = parameter.grad
        assert gradient is not None
        with torch.no_grad():
            tensor.gradient.view(gradient.shape).copy_(gradient)
        self._arrive(tensor)

    def _arrive(self, tensor: _Tensor) -> None:
        tensor.arrived = True
        if all(other.arrived for other in self._buckets[tensor.bucket]):
            self._native.all_reduce(tensor.bucket, self._stream())

    # What no backward() has brought: buffers, metrics, and parameters that were not used.
    def _hand_over_rest(self) -> None:
        with torch.no_grad():
            for bucket in self._buckets:
                for tensor in bucket:
                    if tensor.arrived:
                        continue
                    if not tensor.is_parameter:
                        tensor.gradient.copy_(tensor.value.reshape(-1))
                    elif tensor.value.grad is not None:  # of accumulate() alone
                        tensor.gradient.copy_(tensor.value.grad.reshape(-1))
                    else:
                        tensor.gradient.zero_()
                    self._arrive(tensor)

    def _zero_grad(self, set_to_none: bool = True) -> None:
        for tensor in self._tensors:
            if tensor.is_parameter:
                tensor.value.grad = None

    def _commit(self, closure: Callable[[], float] | None = None) -> float | None:
        if closure is not None:
            raise InvalidArgument("optimizer.step() with a closure: a step is computed once")
        if not self._in_step or self._updated or self._step is None:
            raise InvalidArgument("optimizer.step() is due once in each step that session.steps() gives")
        self._hand_over_rest()
        self._update(self._step.number)
        self._updated = True
        return None

    def _update(self, step: int) -> None:
        pieces = self._native.begin_update()
        if pieces is None:
            return
        try:
            with torch.no_grad():
                self._look(step)
                self._apply(step, pieces)
        except BaseException as error:
            try:
                self._native.abandon_update(f"{type(error).__name__}: {error}")
            except RejoinError as ended:
                log.error("%s", ended)
            raise
        self._native.end_update(self._stream())

    # Of a gradient as a whole, on contributors and joiners alike: the coefficient that clips it, by its step.
    def _look(self, step: int) -> None:
        if self._max_norm is None and not self._skip_nonfinite:
            return
        total = sum(_square_sum(tensor.reduced) for tensor in self._tensors if tensor.is_parameter)
        norm = math.sqrt(total) if total == total and total != math.inf else math.inf
        self.last_norm = norm
        coefficient: float | None = 1.0
        if self._skip_nonfinite and norm == math.inf:
            coefficient = None
        elif self._max_norm is not None and norm > self._max_norm:
            coefficient = self._max_norm / (norm + 1e-6)
        self._clip[step] = coefficient
        while len(self._clip) > _CLIP_REMEMBERED:
            self._clip.pop(next(iter(self._clip)))

    def _set_lr(self, step: int) -> None:
        assert self._optimizer is not None
        groups = self._optimizer.param_groups
        if self._lr is None:
            now = [float(group["lr"]) for group in groups]
            if now != self._constant_lr:
                raise InvalidArgument(
                    f"the learning rate has changed from {self._constant_lr} to {now} under the session: give "
                    "attach() lr=, a function of the step, so that a replica that catches up knows those of before"
                )
            return
        rates = self._lr(step)
        all_rates = [float(rates)] * len(groups) if isinstance(rates, (int, float)) else [float(r) for r in rates]
        for group, rate in zip(groups, all_rates, strict=True):
            group["lr"] = rate

    def _apply(self, step: int, pieces: list[tuple[int, int, int, int, int]]) -> None:
        assert self._optimizer is not None and self._optimizer_step is not None
        whole = all(
            of == step and first == 0 and count == self._tensors[index].value.numel()
            for index, first, count, of, _ in pieces
        ) and len(pieces) == sum(tensor.value.numel() > 0 for tensor in self._tensors)
        if whole:
            self._apply_whole(step)
        else:
            run: list[tuple[int, int, int, int, int]] = []
            for piece in pieces:
                if run and piece[3] != run[0][3]:
                    self._apply_parts(run)
                    run = []
                run.append(piece)
            if run:
                self._apply_parts(run)
        for tensor in self._tensors:
            if not tensor.is_parameter:
                tensor.value.copy_(tensor.columns[0].view(tensor.value.shape))
            else:
                tensor.value.grad = None

    # The optimizer as it is, over the parameters as they are.
    def _apply_whole(self, step: int) -> None:
        assert self._optimizer is not None and self._optimizer_step is not None
        coefficient = self._clip.get(step, 1.0)
        self._set_lr(step)
        for tensor in self._tensors:
            if not tensor.is_parameter:
                tensor.columns[0].copy_(tensor.reduced)
                continue
            gradient = tensor.reduced.view(tensor.value.shape)
            if coefficient is not None and coefficient != 1.0:
                gradient = gradient * coefficient
            tensor.value.grad = gradient
            assert tensor.kept is not None
            if tensor.kept.step is not None:
                self._count(tensor, step - 1)
        if coefficient is not None:
            self._optimizer_step()
        else:
            for tensor in self._tensors:
                if tensor.is_parameter:
                    self._count(tensor, step)

    def _count(self, tensor: _Tensor, step: int) -> None:
        assert self._optimizer is not None and tensor.kept is not None
        key = tensor.kept.step
        if key is None:
            return
        state = self._optimizer.state[tensor.value]
        if isinstance(state[key], torch.Tensor):
            state[key].fill_(step + self._offset)
        else:
            state[key] = step + self._offset

    # Parts of tensors, with the gradients of one step.
    def _apply_parts(self, pieces: list[tuple[int, int, int, int, int]]) -> None:
        assert self._optimizer is not None
        step = pieces[0][3]
        self._set_lr(step)
        needs_clip = self._max_norm is not None or self._skip_nonfinite
        if needs_clip and step not in self._clip:
            raise Unavailable(f"this replica has not seen the whole gradient of step {step}, and can't clip it")
        coefficient = self._clip.get(step, 1.0)
        parts: list[_optimizer.Part] = []
        for index, first, count, _, address in pieces:
            tensor = self._tensors[index]
            gradient = tensor_at(self._native, address, count, tensor.value.dtype, self.device)
            columns = [column[first : first + count] for column in tensor.columns]
            if not tensor.is_parameter:
                columns[0].copy_(gradient)
                continue
            assert tensor.kept is not None
            if coefficient is not None and coefficient != 1.0:
                gradient = gradient * coefficient
            whole = count == tensor.value.numel()
            shape = tensor.value.shape if whole else torch.Size([count])
            parts.append(
                (
                    self._optimizer.param_groups[tensor.group],
                    tensor.kept,
                    tensor.scratch,
                    [column.view(shape) for column in columns],
                    gradient.view(shape),
                )
            )
        if parts and coefficient is not None:
            _optimizer.apply(self._optimizer, parts, step + self._offset)
        for tensor in self._tensors:
            if tensor.is_parameter:
                self._count(tensor, step)

    # ---- metrics

    def _record(self, values: Mapping[str, float | torch.Tensor]) -> None:
        if self._metric_values is None:
            raise InvalidArgument("no metrics were declared: attach(…, metrics=('loss',))")
        for name, value in values.items():
            if name not in self._metrics:
                raise InvalidArgument(f"'{name}' is none of the metrics that attach() was given: {self._metrics}")
            self._metric_values[self._metrics.index(name)] = (
                value.detach() if isinstance(value, torch.Tensor) else float(value)
            )

    def _mean(self, name: str) -> float:
        if self._metric_values is None or name not in self._metrics:
            raise InvalidArgument(f"'{name}' is none of the metrics that attach() was given: {self._metrics}")
        if not self._updated:
            raise InvalidArgument(f"the mean of '{name}' is known after optimizer.step()")
        return float(self._metric_values[self._metrics.index(name)])

    # ---- looking and saving

    @property
    def version(self) -> int | None:
        """The step that all of the state is of; None while this replica catches up."""
        return self._native.version()

    @property
    def committed(self) -> int:
        """The last step that has ended here."""
        return self._native.committed()

    def state_digest(self) -> int:
        """Digest of weights and optimizer state: equal on all replicas after the same step."""
        return self._native.state_digest()

    def state_dict(self) -> dict[str, Any]:
        """Give the model's and the optimizer's state, and where the job stands with it: a checkpoint.

        Between steps: after `optimizer.step()`, in the loop's body. The tensors are the live ones, so save them before
        the loop goes on. A plain PyTorch job loads "model" and "optimizer" as they are.
        """
        assert self._model is not None and self._optimizer is not None
        return {
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "rejoin": {"position": self._native.position(), "version": self._native.committed()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave, or a plain PyTorch job's {"model": …, "optimizer": …}, before join().

        Every replica does, also one that is started again later: how many steps the optimizer had counted before the
        job began comes from here.
        """
        if self._model is None or self._optimizer is None or self._joined:
            raise InvalidArgument("load_state_dict() comes after attach() and before join()")
        self._model.load_state_dict(state["model"])
        place = state.get("rejoin")
        self._position = place["position"] if place is not None else None
        version = _native.position_step(self._position) if self._position is not None else 0
        shapes = {id(tensor.value): tensor for tensor in self._tensors}
        order = [p for group in self._optimizer.param_groups for p in group["params"]]
        for number, kept in state["optimizer"]["state"].items():
            if number >= len(order):
                raise InvalidArgument(
                    f"the checkpoint's optimizer has parameter number {number}, and this one {len(order)} of them"
                )
            tensor = shapes[id(order[number])]
            assert tensor.kept is not None
            with torch.no_grad():
                for name, column in zip(tensor.kept.moments, tensor.columns[1:], strict=True):
                    if isinstance(kept.get(name), torch.Tensor):
                        column.copy_(kept[name].reshape(-1))
            self._offset = self._step_of(kept, tensor) - version
            self._count(tensor, version)
        with torch.no_grad():
            for tensor in self._tensors:
                if not tensor.is_parameter:
                    tensor.columns[0].copy_(tensor.value.reshape(-1))

    @property
    def finished(self) -> bool:
        """Whether the job has come to its end."""
        return self._finished


class _Terminated(SystemExit):
    """SIGTERM, while this replica waited for a step."""


# In rows of a fixed length, so that it does not depend on how torch divides the work among threads.
def _square_sum(flat: torch.Tensor) -> float:
    row = 4096
    total = 0.0
    for part in flat.split(row * 2048):
        squares = part.double().square()
        whole = squares.numel() // row * row
        rows = squares[:whole].view(-1, row).sum(1)
        total += float(rows.sum()) + float(squares[whole:].sum())
    return total

