"""Rejoin as a backend of `torch.distributed`: collectives over Rejoin's transports, with members that come and go.

    import rejoin.distributed
    torch.distributed.init_process_group("rejoin")

Collectives are those of other backends. When a member is lost, everything under way fails on all others with a sentence
that names it, soon after the connection breaks or at the operation's time-out. The group goes on with other members, or
fewer, after `reconfigure()` on each of them. A group that has no members before its first one is made with torch's own
`init_process_group(…, enable_reconfigure=True)`, or, where torch has no such argument, with `Options(configure=False)`.

Tensors of a GPU are sent out of its memory, received into it and added there (SUM and AVG), and streams wait, not the
caller. Reductions: SUM, AVG, MIN, MAX, PRODUCT, and of integers BAND, BOR, BXOR, where all but the first two take a
GPU's tensors through the host's memory; the result is the same, bit for bit, on all members.

This is for process groups whose membership something else decides. Replicas that come and go by themselves, with their
state, are what `rejoin.torch` is for.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

from rejoin._needs_torch import torch  # isort: skip
import torch.distributed as dist

from rejoin import _native, _streams, errors
from rejoin._collectives import COLLECTIVES, Staged, reduction_of, stage_all, stage_reduction
from rejoin._memory import milliseconds
from rejoin._names import Named
from rejoin._options import Options as Options
from rejoin._options import open_native
from rejoin._work import Settler, Work, next_collective

_LOOKED_AT = 4  # operations that each call sees whether they have ended
_GOODBYE = 5000  # milliseconds that a process waits for the others to hear that it leaves
_ended_at_exit: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()


class ProcessGroup(Named):
    """What `init_process_group("rejoin")` and `new_group()` make; any thread.

    All members call the same collectives in the same order. Errors come from `wait()`, or from the call itself where
    its arguments can't be.
    """

    def __init__(self, timeout: timedelta, options: Options, rank: int = 0, size: int = 1) -> None:
        super().__init__()
        self._said = rank, size  # before there are members
        listen = options.listen
        if not listen:
            local = os.environ.get("MASTER_ADDR") in ("localhost", "127.0.0.1", "::1")
            listen = "127.0.0.1:0" if local and options.transport != "shm" else ""
        self.options_given, self._listen = options, listen
        self._native, self._device = open_native(options, listen)
        self._stage_all = partial(stage_all, device=self._device)
        self._stage_reduction = partial(stage_reduction, device=self._device)
        self._timeout = timeout
        self._lock = threading.RLock()  # guards what is below; a signal's handler may shut down
        self._pending: OrderedDict[int, Work] = OrderedDict()  # alive until they have ended, with their tensors
        self._process = os.getpid()
        self._ended = False  # nothing begins any more
        self._begun = 0  # collectives
        self._settler: Settler | None = None
        _ended_at_exit.add(self)

    # Members.

    def get_reconfigure_handle(self) -> str:
        """Give what others name this member by; who has it may connect."""
        return self._native.handle()

    def reconfigure(
        self, opts: Any = None, *, uuid: int = 0, handles: Sequence[str] = (), timeout: timedelta | None = None
    ) -> Work:
        """Make those with these handles the members, in this order; on each of them with the same number and handles.

        What is under way fails. It waits until all are there. Takes torch's `ReconfigureOptions`, or its fields.
        Errors: `rejoin.DeadlinePassed`, with those that did not come; `rejoin.InvalidArgument`; `rejoin.Mismatch`.

        Args:
            opts: torch's, of versions that have it
            uuid: a new number each time, the same on all members
            handles: of all members by rank; a set is sorted
            timeout: by default the group's
        """
        if opts is not None:
            uuid, handles, timeout = opts.uuid, opts.handles, opts.timeout
        if not 0 <= uuid < 1 << 64:
            raise ValueError(f"uuid {uuid} of reconfigure(): it is a number from 0 to {(1 << 64) - 1}")
        members = sorted(handles) if isinstance(handles, (set, frozenset)) else list(handles)
        self._native.reconfigure(uuid, members, self._limit(timeout))
        return Work(self, Staged(), [])

    def getRank(self) -> int:  # noqa: N802 - the names that torch calls
        """Give this member's rank; before it has any, what `init_process_group()` was told, as Gloo does."""
        return self._native.rank() if self._native.size() else self._said[0]

    def getSize(self) -> int:  # noqa: N802
        """Give the number of members; before it has any, what `init_process_group()` was told, as Gloo does."""
        return self._native.size() or self._said[1]

    def set_timeout(self, timeout: timedelta) -> None:
        """Set after how long operations fail that are begun from now on."""
        self._timeout = timeout

    def abort(self) -> None:
        """Fail everything that is under way, on all members."""
        self._native.abort("abort() was called on a member")

    def shutdown(self) -> None:
        """Leave: others go on as long as they need nothing of this member. Nothing, in a child of a fork."""
        _ended_at_exit.discard(self)
        if os.getpid() != self._process:
            return  # the parent stays
        with self._lock:
            self._ended = True
        try:
            self._native.shutdown(_GOODBYE)
        except errors.Unavailable:
            return  # it was called before
        settler = self._settler
        if settler is not None and settler is not threading.current_thread():
            # What is left in C++ when the interpreter ends would end the process. It may wait for what this thread
            # holds, where this is a signal's handler.
            settler.join(_GOODBYE / 1000)
        self._native.close()
        with self._lock:
            left = [work for work in self._pending.values() if work.begun]  # a signal's handler may come before
        for work in left:
            work.settle()

    def __del__(self) -> None:
        """Leave, before the tensors of what is under way go."""
        if hasattr(self, "_settler"):  # it was opened
            self.shutdown()

    def _limit(self, timeout: timedelta | None) -> int:
        """Give the milliseconds of a time-out, by default the group's; an operation has at least one."""
        return max(1, milliseconds(timeout if timeout is not None and timeout > timedelta(0) else self._timeout))

    def _forked(self) -> None:
        self._lock = threading.RLock()  # a thread may have held it, and is not in this child
        self._ended, self._settler = True, None

    # Operations.

    def _start(self, kind: str, staged: Staged, result: list[torch.Tensor], opts: Any = None, **more: int) -> Work:
        for name in ("root", "tag"):
            if not 0 <= more.get(name, 0) < 1 << 32:
                what = "rank" if name == "root" else name
                call = "recv" if kind == "receive" else kind
                raise ValueError(f"{what} {more[name]} of {call}(): it is a number from 0 to {(1 << 32) - 1}")
        work = Work(self, staged, result, self._device)
        # It is held before it begins: whatever is raised from here on, its memory lives until it has ended.
        with self._lock:
            if kind not in ("send", "receive"):
                self._begun = next_collective(self, self._begun, kind)
            work.number = self._begun
            self._pending[id(work)] = work
        try:
            self._native.start(
                COLLECTIVES[kind],
                staged.type,
                more.get("combine", 0),
                more.get("root", 0),
                more.get("tag", 0),
                staged.inputs,
                staged.outputs,
                self._limit(getattr(opts, "timeout", None)),
                work.begun,
                _streams.current(self._device) if staged.on_device else None,
            )
        finally:
            if not work.begun:
                self.let_go_of(work)
        self.let_go_of_ended()
        return work

    def _start_all(
        self, kind: str, all: Sequence[Staged], result: list[torch.Tensor], opts: Any = None, **more: int
    ) -> Work:
        """Give the last one's work, which ends when the others have."""
        works: list[Work] = []
        for staged in all:
            if staged is all[-1]:
                staged.others = works[:]
            works.append(self._start(kind, staged, result, opts, **more))
        return works[-1] if works else Work(self, Staged(), result)

    def let_go_of_ended(self) -> None:
        """Keep no tensors of operations that have ended, and settle those that nobody waits for."""
        for _ in range(_LOOKED_AT):
            with self._lock:
                oldest = next(iter(self._pending.values()), None)
                if oldest is None:
                    return
                self._pending.move_to_end(id(oldest))  # one that takes long keeps none of the others
            if oldest.begun:
                oldest.is_completed()  # settles it

    def let_go_of(self, work: Work) -> None:
        """Keep nothing of a work that has been settled, or has not begun."""
        with self._lock:
            self._pending.pop(id(work), None)

    def settle_when_done(self, work: Work, native: _native.Work) -> None:
        """Settle the work in a thread of the group's when it has ended."""
        with self._lock:
            if self._settler is None and not self._ended:
                self._settler = Settler(self._native, self._lock)
                self._settler.start()
            number = None if self._ended or self._settler is None else self._settler.await_one(work)
        if number is None:
            work.settle()
        else:
            native.notify(number)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        """Replace each of the tensors by its reduction over all members."""
        how = reduction_of(opts)
        all = [self._stage_reduction([tensor], [], how, in_place=True) for tensor in tensors]
        return self._start_all("all_reduce", all, tensors, opts, combine=how)

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        """Replace the root's tensor by the reduction over all members."""
        how = reduction_of(opts)
        staged = self._stage_reduction(tensors, [], how, in_place=self.getRank() == opts.rootRank)
        return self._start("reduce", staged, tensors, opts, combine=how, root=opts.rootRank)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        """Replace the tensor by the root's."""
        staged = self._stage_all(tensors, [], in_place=self.getRank() != opts.rootRank)
        return self._start("broadcast", staged, tensors, opts, root=opts.rootRank)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        """Bring each member's tensor to all."""
        all = [self._stage_all([one], into) for one, into in zip(inputs, outputs, strict=True)]
        return self._start_all("all_gather", all, [tensor for into in outputs for tensor in into], opts)

    def allgather_coalesced(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        """Bring each member's tensors to all; `outputs[member][i]` is its i-th."""
        return self.allgather([list(into) for into in zip(*outputs, strict=True)], inputs, opts)

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        return self.allgather_into_tensor_coalesced([output], [input], opts)

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        """Bring each member's tensors to all, one behind the other."""
        size = self.getSize()
        all = [self._stage_all([one], [into], cut_outputs=size) for into, one in zip(outputs, inputs, strict=True)]
        return self._start_all("all_gather", all, outputs, opts)

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> Work:
        """Give each member the reduction of its tensor of the list."""
        how = reduction_of(opts)
        all = [self._stage_reduction(list(parts), [into], how) for into, parts in zip(outputs, inputs, strict=True)]
        return self._start_all("reduce_scatter", all, outputs, opts, combine=how)

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        return self.reduce_scatter_tensor_coalesced([output], [input], opts)

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        """Give each member the reductions of its parts of the tensors."""
        how, size = reduction_of(opts), self.getSize()
        all = [
            self._stage_reduction([one], [into], how, cut_inputs=size)
            for into, one in zip(outputs, inputs, strict=True)
        ]
        return self._start_all("reduce_scatter", all, outputs, opts, combine=how)

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> Work:
        """Bring each member's tensor to the root."""
        into = outputs[0] if outputs and self.getRank() == opts.rootRank else []
        return self._start("gather", self._stage_all(inputs, into), into, opts, root=opts.rootRank)

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> Work:
        """Bring each of the root's tensors to its member."""
        all = inputs[0] if inputs and self.getRank() == opts.rootRank else []
        return self._start("scatter", self._stage_all(all, outputs), outputs, opts, root=opts.rootRank)

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        """Bring each member's tensor for this one here."""
        return self._start("all_to_all", self._stage_all(inputs, outputs), outputs, opts)

    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> Work:
        """Bring each member's part for this one here; splits are of the first dimension, empty ones equal."""
        size = self.getSize()
        staged = self._stage_all([input], [output], cut_inputs=input_splits or size, cut_outputs=output_splits or size)
        return self._start("all_to_all", staged, [output], opts)

    def send(self, tensors: list[torch.Tensor], dst_rank: int, tag: int) -> Work:
        """Send the tensor to a member, which receives it with the same tag."""
        return self._start("send", self._stage_all(tensors, []), tensors, root=dst_rank, tag=tag)

    def recv(self, tensors: list[torch.Tensor], src_rank: int, tag: int) -> Work:
        """Receive the tensor from a member."""
        return self._start("receive", self._stage_all(tensors, [], in_place=True), tensors, root=src_rank, tag=tag)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> Work:
        """Refuse: whoever receives says from whom."""
        raise ValueError("the backend 'rejoin' receives from a rank that is named: give recv() a src")

    def barrier(self, opts: Any = None) -> Work:
        """Wait until all members are here."""
        return self._start("barrier", Staged(), [], opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait until all members are here; a time-out names one that is not, and ends all that is under way."""
        self.barrier(SimpleNamespace(timeout=timeout)).wait()

    # Other names of the same, and newer ones.
    allreduce_coalesced = allreduce
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base


def _create(made_by: Any, options: Options | None) -> ProcessGroup:
    """Make a group, for `torch.distributed`; its members find each other in its store."""
    if options is None:
        parent = getattr(dist.distributed_c10d.GroupMember.WORLD, "options_given", None)
        options = replace(parent, configure=True) if isinstance(parent, Options) else Options()
    if not isinstance(options, Options):
        raise TypeError(
            f"the backend 'rejoin' takes rejoin.distributed.Options as pg_options, not {type(options).__name__}"
        )
    rank, size, store = made_by.group_rank, made_by.group_size, made_by.store
    group = ProcessGroup(made_by.timeout, options, rank, size)
    if options.configure and not getattr(made_by, "enable_reconfigure", False):
        # A process may make one after the other under one name; all do so equally often.
        count = store.add(f"rejoin/{rank}", 1)
        store.set(f"rejoin/{rank}/{count}", group.get_reconfigure_handle())
        handles = [store.get(f"rejoin/{member}/{count}").decode() for member in range(size)]
        group.reconfigure(uuid=0, handles=handles, timeout=made_by.timeout)
    return group


@atexit.register
def _end_all() -> None:
    for group in list(_ended_at_exit):
        group.shutdown()


def _leave_to_parent() -> None:
    for group in _ended_at_exit:
        group._forked()


os.register_at_fork(after_in_child=_leave_to_parent)
register: Callable[..., None] = dist.Backend.register_backend
if not hasattr(dist.Backend, "REJOIN"):
    register("rejoin", _create, extended_api=True, devices=["cpu", "cuda"])
