"""Operations of a process group under way, as torch sees them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from rejoin import _native, _streams, errors
from rejoin._collectives import Staged
from rejoin._memory import milliseconds

LONGEST = 1 << 40  # milliseconds
_Work: Any = dist.distributed_c10d.Work  # its type differs between versions of torch


class Settles(Protocol):
    """A group, which knows when operations have ended."""

    def settle_when_done(self, work: Work, native: _native.Work) -> None:
        """Settle the work when it has ended."""

    def let_go_of_ended(self) -> None:
        """Keep no tensors of operations that have ended."""

    def let_go_of(self, work: Work) -> None:
        """Keep nothing of this one."""


class _Callbacks(threading.local):
    """Behind which collective of a group, by its id, the callbacks that this thread runs may begin the next one."""

    def __init__(self) -> None:
        self.behind: dict[int, int] = {}

    def run(self, work: Work, complete: Callable[[], None]) -> None:
        """Complete the work's future, which runs what was added to it."""
        group = id(work.group())
        before = self.behind.get(group)
        self.behind[group] = work.number
        try:
            complete()
        finally:
            now = self.behind.pop(group)
            if before is not None:  # this thread runs a callback in a callback
                self.behind[group] = now if before == work.number else before


_callbacks = _Callbacks()


def next_collective(group: Settles, begun: int, kind: str) -> int:
    """Give the number of a collective that begins when so many have begun. Errors: `rejoin.InvalidArgument`.

    A callback runs when its operation has ended here, and that is sooner on one rank than on another. So where the
    group has begun others meanwhile, no rank knows which comes first on the next one.
    """
    behind = _callbacks.behind.get(id(group))
    if behind is None:
        return begun + 1
    if behind != begun:
        raise errors.InvalidArgument(
            f"{kind}() in the callback of a future, and this group has begun other collectives since that future's: "
            "ranks would differ in which comes first. Call it behind wait(), or begin nothing until the callback has "
            "run (a hook of DistributedDataParallel: have one bucket, by bucket_cap_mb)"
        )
    _callbacks.behind[id(group)] = begun + 1
    return begun + 1


class Work(_Work):  # type: ignore[misc]
    """An operation under way; whoever waits for it first puts its result where it belongs.

    Any of its lines may be the last before a signal's handler, which may wait for the same work, or raise.
    """

    def __init__(self, group: Settles, staged: Staged, result: list[torch.Tensor], device: torch.device | None = None):
        super().__init__()
        self._device = device if staged.on_device else None  # whose streams wait for it
        self._written: Any = None  # on the device: a mark behind the copies of results
        self.begun: list[_native.Work] = []  # none: it has not begun, or there is nothing to do
        self.number = 0  # of collectives that the group had begun, with this one
        self.group = weakref.ref(group)
        self._others = staged.others
        self._staged: Staged | None = staged
        self._result = result
        self._lock = threading.RLock()  # guards all above and below
        self._error: Exception | None = None
        self._ends: Any = None  # a future without an error, that leads to …
        self._future: Any = None  # … the one that is given away

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until it has ended; its own time-out ends it in any case. Errors: `rejoin.RejoinError`.

        Where its tensors are on the group's GPU, and no time-out is given, the current stream waits, not the caller.
        What fails after that is told by `exception()`, by `wait(timeout)`, and by what is begun later.
        """
        try:
            if self._device is not None and timeout <= timedelta(0):
                self.wait_on_stream()
            else:
                self.wait_for_it_alone(timeout)
        finally:
            if (group := self.group()) is not None:
                group.let_go_of_ended()
        return True

    def wait_for_it_alone(self, timeout: timedelta = timedelta(0)) -> None:
        """Wait as `wait()`, and touch no other work but those that it needs."""
        for native in self.begun:
            try:
                native.wait(milliseconds(timeout) if timeout > timedelta(0) else LONGEST)
            except errors.RejoinError:
                if not native.done():
                    raise  # of this wait alone
        self.settle()
        if self._error is not None:
            raise self._error
        self._follow_copies()

    def wait_on_stream(self) -> None:
        """Let the current stream wait until it has ended, and copy results behind that."""
        if self._error is not None:
            raise self._error
        stream = _streams.current(self._device)
        for native in self.begun:
            native.wait_on(stream)
        for other in self._others:
            other.wait_on_stream()
        with self._lock:
            if (staged := self._staged) is not None:
                self._write_back(staged)
        self._follow_copies()

    def _write_back(self, staged: Staged) -> None:
        if self._written is not None:
            return
        staged.write_back()
        if self._device is not None and staged.copies:
            self._written = _streams.mark(self._device)

    def _follow_copies(self) -> None:
        if self._written is not None:
            _streams.follow(self._device, self._written)

    def settle(self) -> None:
        """It has ended: copy the results to where they belong, once."""
        staged, failed = self._staged, None
        if staged is None:
            return
        try:
            for native in self.begun:
                native.wait(LONGEST)
            for other in self._others:
                other.wait_for_it_alone()
        except Exception as error:
            failed = error
        with self._lock:
            if self._staged is None:
                return  # another thread was faster, or a signal's handler
            try:
                if failed is None:
                    self._write_back(staged)
            except Exception as error:
                failed = error
            self._error = failed
            self._staged = None  # at last: what was interrupted before is done again
            ends = self._ends
        if (group := self.group()) is not None:
            group.let_go_of(self)
        if ends is not None:
            self._complete(ends)

    def _complete(self, ends: Any) -> None:
        if self._error is None:
            self._follow_copies()
        _callbacks.run(self, partial(ends.set_result, self._result if self._error is None else None))

    def _give(self, _: Any) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self._result

    def get_future(self) -> Any:
        """Give a future of the list of result tensors; what fails is a `RuntimeError` of its, with the error's text.

        Its callbacks run when the operation has ended, in a thread of the group's, say. They may begin a collective
        where the group has begun none meanwhile, and wait for it.
        """
        group = self.group()
        with self._lock:
            if self._future is not None:
                return self._future
            devices: Any = list({tensor.device for tensor in self._result if tensor.device.type != "cpu"})
            self._ends = torch.futures.Future(devices=devices)
            # An error that set_exception() sets is none for users in C++, as DistributedDataParallel: what raises is.
            self._future = self._ends.then(self._give)
            settled = self._staged is None
        if settled:
            self._complete(self._ends)
        elif group is None or not self.begun or isinstance(threading.current_thread(), Settler):
            self.settle()  # who would do so later is the caller, which waits for the future perhaps
        else:
            group.settle_when_done(self, self.begun[0])
        return self._future

    def is_completed(self) -> bool:
        """Whether it has ended, well or not; then its results are where they belong."""
        done = all(native.done() for native in self.begun) and all(other.is_completed() for other in self._others)
        if done:
            self.settle()
        return done

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """Give what it has failed with, if it has ended."""
        self.is_completed()
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Give the tensors that have the result."""
        return self._result


class Settler(threading.Thread):
    """Completes a group's futures as their operations end, and so runs their callbacks."""

    def __init__(self, native: _native.ProcessGroup, lock: threading.RLock) -> None:
        super().__init__(name="rejoin-group", daemon=True)
        self._native = native
        self._lock = lock  # guards
        self._awaited: dict[int, Work] = {}

    def await_one(self, work: Work) -> int:
        """Keep the work until its number, which this gives, comes; with the lock held."""
        self._awaited[id(work)] = work
        return id(work)

    def run(self) -> None:
        """Go on until the group is shut down, and nothing is left."""
        while True:
            try:
                number = self._native.next_done(1000)
            except errors.DeadlinePassed:
                continue
            except errors.RejoinError:
                break  # shut down
            with self._lock:
                work = self._awaited.pop(number)
            work.settle()
        while True:
            with self._lock:
                if not self._awaited:
                    return
                _, work = self._awaited.popitem()
            work.settle()
