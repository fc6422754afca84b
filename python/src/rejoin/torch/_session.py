"""A PyTorch model and its optimizer as one replica of a job."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from rejoin import _native
from rejoin._daemon import local_daemon
from rejoin.errors import InvalidArgument, RejoinError
from rejoin.launch import place_given
from rejoin.torch import _attach, _loop, _standing, _warm_up
from rejoin.torch._attributes import told
from rejoin.torch._buckets import Buckets
from rejoin.torch._busy import Busy
from rejoin.torch._checkpoint import checkpoint_of, remedy_in_python, restore, template_of
from rejoin.torch._data import Batches, Fetcher, refuse_in_worker
from rejoin.torch._feed import Feed
from rejoin.torch._final import final_save
from rejoin.torch._fingerprint import fingerprint
from rejoin.torch._frozen import frozen
from rejoin.torch._leaving import Leaving
from rejoin.torch._metrics import Metrics
from rejoin.torch._modes import Modes
from rejoin.torch._places import Places
from rejoin.torch._ranks import Ranks
from rejoin.torch._rates import Schedule
from rejoin.torch._saving import Saving, save
from rejoin.torch._step import Step
from rejoin.torch._tensors import Tensor
from rejoin.torch._update import Rules, Update

if TYPE_CHECKING:
    from rejoin.torch._group import SessionGroup

_BUCKET_BYTES = 25 << 20


class Session:
    """This process's part in the job.

    One thread calls everything here. What fails raises a `rejoin.RejoinError`; after `rejoin.Cancelled` the process is
    to end, and to be started again. `replica`, `rank` and `device` say which part it is.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        longest_standing: float = _standing.LONGEST_SECONDS,
        **settings: Any,
    ) -> None:
        """Open a session with these settings, named as a trainer's flags (`socket`, `replica`, `rank`, `transport` …).

        What is not given comes from REJOIN_* variables; replica and rank also from a launcher's variables
        (`rejoin.place_from_environment`). Does not talk to the daemon yet. Where neither `socket` nor REJOIN_SOCKET
        says where that is, and REJOIN_COORDINATOR says where the coordinator is, the process of local rank 0 starts a
        daemon, which ends with it: at log level warn, and as replicaR-HOST, where REJOIN_LOG_LEVEL and REJOIN_NODE do
        not say otherwise.

        `longest_standing`: of a replica with several ranks. Where it is out of the job, and this rank's thread does not
        go on for so many seconds, since it waits for another rank in a collective, the process ends: it would not come
        to the session's next call, which says so.
        """
        refuse_in_worker()
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        if self.device.type not in ("cpu", "cuda"):
            raise InvalidArgument(f"device {self.device}: Rejoin knows cpu and cuda")
        place = place_given(settings.get("replica"), settings.get("rank"))
        self.replica, self.rank = place.replica, place.rank
        settings = {**settings, "replica": self.replica, "rank": self.rank}
        if "socket" not in settings and not os.environ.get("REJOIN_SOCKET"):
            settings["socket"] = local_daemon(place)
        settings.setdefault("device", "host" if self.device.type == "cpu" else str(self.device))
        self._settings = settings
        self._native = _native.Session([f"{name.replace('_', '-')}={value}" for name, value in settings.items()])
        self._tensors: list[Tensor] = []
        self._buckets = Buckets(self._native, self.device)
        self._metrics = Metrics((), torch.device("cpu"))
        self._loss_scale: torch.Tensor | None = None  # [log2, good steps]
        self._model: torch.nn.Module | None = None
        self._sharded: list[Any] = []  # FSDP2's states of the model
        self._optimizer: torch.optim.Optimizer | None = None
        self._updates: Update | None = None
        self._places: Places | None = None
        self._joined = self._finished = self._ended = self._in_step = self._updated = False
        self._parts_left = 0  # of a step's data that data() has yet to give
        self._passes = 1  # as many backward() bring a step's gradients
        self._accumulating = self._contributed = self._averaging = self._warming = False
        self._beginning = self._may_have_begun = False  # a step, in the native session and not yet here
        self._step: Step | None = None
        self._modes: Modes | None = None  # of attach()
        self._leaving = Leaving()
        self._native.while_waiting(self._leaving.look)
        self._rules = Rules()
        self._ranks: Ranks | None = None
        self._position: str | None = None
        self._compares = True  # the state with the position's digest
        self._busy = Busy(self._native)
        self._standing = _standing.Standing(
            self.replica, self.rank, self._native.check, longest_standing, self._busy.with_what_the_script_says
        )
        self._fetchers: dict[int, Fetcher] = {}
        self._data: list[str] = []  # what batches() was told
        self._group: SessionGroup | None = None
        self._since, self._saves, self._saving = time.time(), 0, Saving()  # final ones, and checkpoints

    @classmethod
    def from_environment(cls, device: torch.device | str = "cpu", **settings: Any) -> Session:
        """Open a session as the launcher's and REJOIN_* variables say."""
        return cls(device, **settings)

    def attach(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        max_norm: float | None = None,
        lr: Schedule | None = None,
        metrics: Sequence[str] = (),
        skip_nonfinite: bool = False,
        loss_scale: float | None = None,
        masters: bool = False,
        gradients: torch.dtype | None = None,
        main_grad: bool = False,
        ema: float | None = None,
        bucket_bytes: int = _BUCKET_BYTES,
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        """Move the model's parameters and the optimizer's state into the session, and give both back.

        They stay the same objects: `p.data` is memory that the session shares with its daemon, `backward()` hands over
        gradients as they come, and `optimizer.step()` waits until all replicas have agreed, clips the mean gradient by
        its global norm to `max_norm`, sets the learning rate to `lr(step)` (one, or one for each group; steps count
        from 1) and updates. `lr` is a function of the step alone, since a replica that catches up applies steps of
        before; without it the groups' learning rates stay what they are. `optimizer.step()` also clears the gradients.

        Persistent buffers (BatchNorm's, flags, counts) become their mean over the replicas in each step, those of bool
        true where one of them is, and what is equal on all of them stays as it is; frozen parameters are each replica's
        own, and have to be equal from the start. A parameter that gets no gradient in a step counts with zeros: also
        where no replica has one, the optimizer's weight decay and moments move it, while torch alone passes over it.
        `skip_nonfinite`: a step whose mean gradient has an infinity or a NaN changes nothing, on all replicas.

        `loss_scale`: for float16, what `step.scale(loss)` multiplies by, at first: a power of 2. It halves, to 2^-14 at
        least, when a mean gradient has an infinity or a NaN, which changes nothing else, and doubles after 2,000 steps
        without one, as with torch's GradScaler. `masters`: parameters of bfloat16 and float16 get weights, moments and
        gradients of float32 in the session, and are those weights rounded. `gradients`: the type in which gradients are
        exchanged, where it is not that of the session's weights, such as bfloat16 to halve the traffic, or float32 for
        weights of bfloat16. `main_grad`: each parameter has a `main_grad` of that type, as Megatron's do: backward()
        adds to it, also within `accumulate`, and whoever adds by himself sets `grad_added_to_main_grad`.

        `ema`: the session keeps a moving average of the weights, `average = ema * average + (1 - ema) * weight` after
        each update; see `averaged` and `state_dict`. `metrics`: names of what `step.record` takes, in the same order on
        all replicas.

        `bucket_bytes`: gradients are exchanged in buckets of about so many bytes, 25 MiB without it.

        A model that `torch.distributed.fsdp.fully_shard` has divided among the ranks of the replica is attached
        alike, on each of its ranks, with the optimizer made afterwards.

        Raises `InvalidArgument` for an optimizer whose state or update can't be given to parts of parameters, and for
        types and devices that can't be.
        """
        if self._model is not None:
            _attach.refuse_another()
        self._rules = Rules(max_norm, lr, skip_nonfinite or loss_scale is not None, ema)
        _attach.check(model, optimizer, self._rules, loss_scale, gradients, bucket_bytes)
        self._modes = modes = Modes(self.device)
        with modes.held():
            _attach.attach(self, model, optimizer, metrics, loss_scale, masters, gradients, main_grad, bucket_bytes)
        return model, optimizer

    def batches(self, size: int, *, seed: int = 0, shuffle: bool = True, shard: int = 0, shards: int = 1) -> Batches:
        """Make the batch sampler for a DataLoader over a map-style data set of `size` samples.

        Each sample is trained once in each data epoch, whatever replica is lost. The same on every replica, or it can't
        join; how many samples a step takes is the coordinator's setting (`--batch`). `shards`: the ranks of a replica
        that divide its samples, of which this is number `shard`; each takes as many: `--batch` is a multiple of it.
        """
        batches = Batches(size, seed, shuffle, shard, shards)
        batches.tell(self._data, self._joined)
        return batches

    def process_group(self, timeout: timedelta = timedelta(seconds=30), options: Any = None) -> SessionGroup:
        """Make a `torch.distributed` process group of those who contribute to a step, before join(), on all replicas.

        For metrics and small collectives in the loop's body: `dist.all_reduce(tensor, group=group)`. Its members are
        this rank of each contributor, by the replicas' numbers. When one of them is lost, operations fail instead of
        waiting, and so do others of that step; from the next step on they are of those that are left. All members
        call the same ones in a step. `options`: `rejoin.distributed.Options`; by default it listens as the session.
        """
        from rejoin.torch import _group

        self._group = _group.made_for(self, timeout, options)
        return self._group

    def join(self) -> None:
        """Register with the daemon: the state is initialised, or restored with `load_state_dict`.

        Whatever is slow the first time (compiling, autotuning, set-up of communication) belongs before this, into
        `warm_up`: from here on others may wait for this replica. SIGTERM is taken as an orderly leave at the end of a
        step from now on, unless the program has a handler of its own, or this is no main thread: a warning says so.
        """
        _attach.refuse_join(self)
        _attach.take_what_was_done_since(self)
        assert self._model is not None and self._optimizer is not None
        assert self._updates is not None and self._ranks is not None
        if self._position is not None:
            self._updates.settings.restored = _native.position_step(self._position)
        self._leaving.listen()
        with torch.no_grad():
            untrained = frozen(self._model, self._ranks, [tensor.value for tensor in self._tensors])
        counted, others = self._updates.offset, (*self._data, self._metrics.told(), untrained, told(self._tensors))
        self._native.set_fingerprint(fingerprint(self._optimizer, self._rules, self.device, counted, others))
        with self._leaving.waiting(at_once=True), remedy_in_python():
            self._native.join(self._position, self._compares)
        self._joined = True
        if self._ranks.several:
            self._standing.begin()

    def leave(self) -> None:
        """End this replica's part in the job; the other replicas go on at once.

        With several ranks all of them leave after the same step, behind its `optimizer.step()`, where they wait for
        each other, 30 s at most; where one does alone, it is refused there or, if it comes first, on those that go on,
        and the replica is out.
        """
        _loop.leave(self)

    def __enter__(self) -> Session:
        """Give the session, which leaves the job at the end of the block."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Leave the job."""
        if kind is None:
            self.leave()
        else:
            with suppress(RejoinError):
                _loop.end(self)

    def steps(self, loader: DataLoader[Any] | None = None) -> Iterator[tuple[Step, Any]]:
        """Give the job's steps that this replica trains, with the data of their samples; join() first, if it was not.

        Ends when the job is finished, or after SIGTERM; then it gives nothing any more. While this replica catches up
        nothing is given, and its state is brought forward here. Without a loader the data is the list of the samples'
        numbers in the stream, as ranges. In each step `optimizer.step()` is called once. A step that the loop was left
        in before its `backward()` is given again; where what a signal's handler raises comes in a step's beginning,
        before it is given, the process is to end, and is started again.
        """
        return _loop.steps(self, loader)

    def data(self, loader: DataLoader[Any], *, steps: int | None = None, micro_batches: int = 1) -> Feed:
        """Give the data of the job's steps to a loop that is not the script's own, as a framework's.

        It iterates as `steps()` does, and gives the data alone: the step is `session.step`. Within an iteration
        `optimizer.step()` is called once, or once in `micro_batches`: a step's data is then divided into so many parts,
        and its gradients go out with the last one's. `steps`: how many the job has, for frameworks that ask for
        `len()`; without it some take data ahead, which is refused.
        """
        return Feed(self, loader, steps, micro_batches)

    def warm_up(self) -> AbstractContextManager[None]:
        """Do within this block, before join(), what is slow the first time and has to leave no trace.

        Such as forward and backward of a compiled model, with data of the shape to come; `optimizer.step()` drops the
        gradients there, and updates nothing. They are dropped afterwards, too; the model's buffers and torch's random
        numbers are what they were. The others wait for nothing, and SIGTERM for the end (for compilers' caches).
        """
        return _warm_up.warmed_up(self)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Hold gradients back within this block: those of a later backward() in the same step are added to them."""
        before, self._accumulating = self._accumulating, True  # true in a block within another one
        try:
            yield
        finally:
            self._accumulating = before

    def busy(self, reason: str, seconds: float = 3600.0) -> AbstractContextManager[None]:
        """Let the others wait, for so long (a week) at most, while this replica saves, evaluates or compiles."""
        return self._busy.with_scripts(reason, seconds)

    def _stream(self) -> int | None:
        return int(torch.cuda.current_stream(self.device).cuda_stream) if self.device.type == "cuda" else None

    _on_gradient = _loop.on_gradient

    def _zero_grad(self, set_to_none: bool = True) -> None:
        _loop.zero_grad(self)

    def _commit(self, closure: Callable[[], Any] | None = None) -> Any:
        return _loop.commit(self, closure)

    @property
    def version(self) -> int | None:
        """The step that all of the state is of; None while this replica catches up."""
        return self._native.version()

    @property
    def committed(self) -> int:
        """The last step that has ended here, or that of the state which this replica brought to the finished job."""
        return self._native.committed()

    def state_digest(self) -> int:
        """Digest of weights and optimizer state: equal on all replicas after the same step."""
        return self._native.state_digest()

    def state_dict(self, *, of: Any = None) -> dict[str, Any]:
        """Give the model's and the optimizer's state, and where the job stands with it: a checkpoint.

        Between steps: after `optimizer.step()`, in the loop's body, and not before the first step, as others' state may
        be coming in until then. Buffers and metrics are those of the last update: what is written to them since counts
        in the next step. The tensors are live: save them before the loop goes on. A plain job loads "model" and
        "optimizer" as they are.

        A signal's handler may call it, too: behind the update in which it comes. Only where the step has waited for
        others for 10 s does it run meanwhile, and is refused: a flag for the loop's body is better.

        `of`: a checkpoint of torch.distributed.checkpoint, its path or a StorageReader. Then it is what dcp.load() is
        to fill before join(): so much of the state as this one has, also one of other metrics or another number of
        ranks.
        """
        return checkpoint_of(self) if of is None else template_of(self, of)

    def load_state_dict(self, state: Mapping[str, Any], *, changed: bool = False) -> None:
        """Restore what `state_dict` gave, or a plain PyTorch job's {"model": …, "optimizer": …}, before join().

        Every replica does, also one that is started again later: how many steps the optimizer had counted before the
        job began comes from here, and the coordinator refuses a replica that counts otherwise.

        `changed`: metrics, average, loss scale, masters, buffers, the optimizer or the number of ranks are meant to be
        others than those of the checkpoint; what it has of them is taken, the rest begins anew, a rank that it does not
        know takes what is rank 0's own, and nobody compares the state with the position's digest. Else `join` raises
        `Mismatch` where anything differs.
        """
        restore(self, state, changed)

    def save(self, path: str | os.PathLike[str]) -> bool:
        """Write `state_dict()` to this file, on the replica that leads and as `replacing` does, while the others wait.

        Between steps: after `optimizer.step()`, in the loop's body. Gives whether it is written. Where it can't be, as
        on a full disk, the log says so, and training goes on with the file of before: else one leader after another
        would end by it, until nobody has the state. Of several ranks each gives a path of its own.
        """
        return save(self, path)

    def averaged(self) -> AbstractContextManager[None]:
        """Let the model's parameters be their moving averages (`ema`) within this block, to evaluate or save them.

        Between steps, as `save`, where the block also ends. A block within another one changes nothing.
        """
        return _loop.averaged(self)

    def final_save(self, path: str | os.PathLike[str]) -> AbstractContextManager[bool]:
        """Let one replica write the job's result, after the loop: true within its block, false in the others'.

        All replicas wait at the block's beginning until `path` is written; where the one that writes dies, or its block
        raises, the next one's is true. Whose turn it is a lock says, of a small file beside `path` (`gpt.pt.saved`):
        where replicas have disks of their own, one writes on each. It is true where `leads` is, and nobody waits,
        when replicas have left before the job's end, or the file system has no locks. On a replica that came back when
        the job was finished, without the checkpoint of its last step, it is false at once. With several ranks all of
        them enter the block.
        """
        return final_save(self, path)

    @property
    def step(self) -> Step | None:
        """The step that is trained, or was last; None before the first."""
        return self._step

    @property
    def last_lr(self) -> list[float]:
        """The learning rates of the last update, one for each of the optimizer's groups; none before attach()."""
        return self._updates.last_lr if self._updates is not None else []

    @property
    def leads(self) -> bool:
        """Whether this replica led the last step that it trained: true on one; if it dies, on none."""
        return self._step is not None and self._step.leads and self.version is not None

    @property
    def last_norm(self) -> float | None:
        """The norm of the last step's mean gradient, before it was clipped; None where nothing asks for it."""
        return self._updates.last_norm if self._updates is not None else None

    @property
    def finished(self) -> bool:
        """Whether the job has come to its end."""
        return self._finished
