"""Which samples a step trains, and how a DataLoader's workers fetch them before they are asked for."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import multiprocessing
import operator
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from rejoin.errors import InvalidArgument, Unavailable
from rejoin.torch._watch import Watch, end_stopped, end_with_trainer, state_of

Ranges = tuple[tuple[int, int], ...]

# For how long the others wait for the data of a step. torch looks at its workers every 5 s, and gives each 5 s to end.
LONGEST_WAIT = 120.0

_UNFIT = {
    "fork": "that are forked keep this process's connections open when it has died",
    "spawn": "that are spawned are this process's own, in which torch raises an error wherever it is when one has died",
}
_MOST_AHEAD = 1024  # steps that rejoin_upcoming() tells of

_EPOCHS = 1_000_003  # from the number of a seed's first data epoch to that of the next one's
_MOST_FAILURES = 3  # of workers that have given nothing

_REMEDIES = {
    "exited unexpectedly": "What they have written says why; a script with workers does what it does under if __name__ "
    "== '__main__':",
    "shared memory": "Data goes from workers to this process by way of /dev/shm: give it more room (docker run "
    "--shm-size=8g), or the DataLoader fewer workers",
}

log = logging.getLogger("rejoin")


def refuse_in_worker() -> None:
    """Raise `InvalidArgument` where Python runs the script once more, for a process that the script has started."""
    if getattr(
        multiprocessing.current_process(), "_inheriting", False
    ):  # by which Python refuses to start more of them
        raise InvalidArgument(
            "this process is a DataLoader's worker, or another that multiprocessing has started, which runs the script "
            "from its top: put what the script does under if __name__ == '__main__':, so that only the trainer does it"
        )


def _whole(name: str, value: int) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidArgument(f"{name} {value!r:.100} of batches(): it is to be a whole number") from None


def _checked(seed: int) -> int:
    number = _whole("seed", seed)
    if not -(1 << 63) <= number < 1 << 64:
        raise InvalidArgument(f"seed {number} of batches(): it is to be of 64 bits, such as {number % (1 << 64)}")
    return number


# Of a data epoch's number torch takes 64 bits. Below them an order stays what it is: jobs are under way with it, though
# torch's generators of the CPU go by 32 bits of it, so that some of these seeds have each other's.
def _mixed(seed: int) -> int:
    if seed * _EPOCHS >= -(1 << 63) and (seed + 1) * _EPOCHS <= 1 << 64:
        return seed
    return int.from_bytes(hashlib.sha256(str(seed % (1 << 64)).encode()).digest()[:4], "little")


class Batches(Sampler[list[int]]):
    """The batch sampler of a DataLoader that `Session.steps` draws from.

    The coordinator hands out ranges of an endless stream of samples; sample k is number k mod `size` of its data epoch
    k / `size`, in that epoch's permutation. Each step says what comes after it if no replica comes or goes, and this
    yields it; what comes otherwise is fetched when it does.
    """

    def __init__(self, size: int, seed: int = 0, shuffle: bool = True, shard: int = 0, shards: int = 1) -> None:
        """`size`: samples in the data set. The same on every replica, and so are `seed`, `shuffle` and `shards`."""
        size, shard, shards = (_whole(*of) for of in (("size", size), ("shard", shard), ("shards", shards)))
        if size <= 0:
            raise InvalidArgument(f"a data set of {size} samples: at least one is needed")
        if not 0 <= shard < shards:
            raise InvalidArgument(f"shard {shard} of {shards}: they are numbered from 0")
        self.size = size
        self._shard, self.shards = shard, shards
        self._seed, self._shuffle = _checked(seed) if shuffle else seed, shuffle
        self._permutations: dict[int, torch.Tensor] = {}
        self.coming: list[Ranges] = []  # of the steps after this one, in order
        self.opened_for: deque[Ranges] | None = None  # where the job's own iterator over the loader begins

    def tell(self, told: list[str], joined: bool) -> None:
        """Add to `told` what has to be the same on every replica, for sample k to be the same one everywhere."""
        hashed = " (its hash)" if self._shuffle and _mixed(self._seed) != self._seed else ""
        data = f"data of {self.size} samples, seed {self._seed}{hashed}, shuffle {self._shuffle}, shards {self.shards}"
        if data in told:
            return
        if joined:
            raise InvalidArgument(f"batches() of {data} after join(): call it before, so that replicas are compared")
        told.append(data)

    def indices(self, ranges: Ranges) -> list[int]:
        """Give the data set's indices of these samples, as far as they are this shard's."""
        stretches = [range(begin, end) for begin, end in ranges]
        count = sum(map(len, stretches))
        if count % self.shards != 0:
            raise InvalidArgument(
                f"a step of {count} samples can't be divided among {self.shards} shards: let --batch be a "
                "multiple of that, and with --constant-batch or --balance-batches --ranks, too"
            )
        each = count // self.shards
        indices: list[int] = []
        before = self._shard * each  # samples of other shards, of those that are left
        for stretch in stretches:
            mine = stretch[before : before + each - len(indices)]
            before = max(before - len(stretch), 0)
            while mine:
                epoch, number = divmod(mine[0], self.size)
                of_epoch = range(number, min(number + len(mine), self.size))
                indices += self._order(epoch)[number : of_epoch.stop].tolist() if self._shuffle else of_epoch
                mine = mine[len(of_epoch) :]
        return indices

    def _order(self, epoch: int) -> torch.Tensor:
        if epoch not in self._permutations:
            if len(self._permutations) > 2:
                self._permutations.pop(next(iter(self._permutations)))
            generator = torch.Generator().manual_seed(_mixed(self._seed) * _EPOCHS + epoch)
            self._permutations[epoch] = torch.randperm(self.size, generator=generator, device="cpu")
        return self._permutations[epoch]

    def expect(self, coming: list[Ranges]) -> None:
        """Take what the steps after this one will probably train."""
        self.coming = coming

    def expects(self, ranges: Ranges) -> bool:
        """Say whether a step after this one will probably train these."""
        return ranges in self.coming

    def __iter__(self) -> Iterator[list[int]]:
        """Yield what comes and has not been sent, as long as something is known to come; to the job's steps alone."""
        if self.opened_for is None:
            raise InvalidArgument(
                "this DataLoader gives its data to session.steps() alone, which trains each sample once: make another "
                "one, with a sampler of its own, to look at data, to evaluate or for update_bn()"
            )
        return self._send(self.opened_for)

    def _send(self, sent: deque[Ranges]) -> Iterator[list[int]]:
        while (ranges := next((one for one in self.coming if one not in sent), None)) is not None:
            sent.append(ranges)
            yield self.indices(ranges)


# As os.pidfd_open(), which Python has only where it was compiled with headers of Linux 5.3: conda's was not.
def _pidfd_of(pid: int) -> int:
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    fd = libc.syscall(ctypes.c_long(434), ctypes.c_long(pid), ctypes.c_long(0))
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(fd)


# Where nothing tells when it does: a kernel of before 5.3, or a container that forbids the call.
def _has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:  # none, or by now somebody else's
        return True
    return state_of(pid) in ("Z", "X")  # nobody has waited for it


class EndsWithTrainer:
    """Begins a worker, which ends when this process has, however that ends.

    A worker looks whether its parent lives. That is the fork server, which lives as long as a worker does: killed
    trainers would leave both behind, each time, with all that the data set holds.
    """

    def __init__(self, inner: Callable[[int], None] | None) -> None:
        self._inner, self._trainer = inner, os.getpid()

    def __call__(self, worker: int) -> None:
        """Be called by torch in the worker."""
        trainer: int | None = None
        try:
            trainer = _pidfd_of(self._trainer)
        except ProcessLookupError:
            os._exit(1)
        except OSError as error:
            log.debug("this worker looks every second whether its trainer lives: pidfd_open: %s", error)

        def wait() -> None:
            if trainer is not None:
                select.select([trainer], [], [])
            while trainer is None and not _has_ended(self._trainer):
                time.sleep(1)
            os._exit(1)

        threading.Thread(target=wait, name="rejoin-trainer", daemon=True).start()
        if self._inner is not None:
            self._inner(worker)


class Fetcher:
    """Gives the data of a step's samples, out of the DataLoader's workers where they have them already."""

    def __init__(
        self,
        loader: DataLoader[Any],
        busy: Callable[..., AbstractContextManager[None]] = lambda *_, **__: nullcontext(),
        look: Callable[[], None] = lambda: None,
    ) -> None:
        """`busy` is entered where a step waits for its data: `Busy.with_ours()`. `look`: that of a `Watch`."""
        if not hasattr(loader, "batch_sampler"):
            raise InvalidArgument(
                f"session.steps() takes a DataLoader with batch_sampler=session.batches(len(data)), or nothing, and "
                f"not a {type(loader).__name__}"
            )
        batches = loader.batch_sampler
        if not isinstance(batches, Batches):
            raise InvalidArgument(
                "this DataLoader draws samples of its own: make it with batch_sampler=session.batches(len(data)), so "
                "that each sample is trained once, whatever replica is lost"
            )
        context: Any = loader.multiprocessing_context or torch.multiprocessing
        method = context.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
        if loader.num_workers > 0 and method in _UNFIT:
            raise InvalidArgument(
                f"DataLoader workers {_UNFIT[method]}: give the DataLoader multiprocessing_context='forkserver'"
            )
        if loader.num_workers > 0 and not getattr(loader, "in_order", True):
            raise InvalidArgument(
                "a DataLoader with in_order=False gives batches as its workers end, and a step would be trained with "
                "the samples of another: leave in_order=True"
            )
        if loader.num_workers > 0 and not isinstance(loader.worker_init_fn, EndsWithTrainer):
            loader.worker_init_fn = EndsWithTrainer(loader.worker_init_fn)
        self._loader, self._batches, self._busy = loader, batches, busy
        self._watch = Watch(look)
        self._iterator: Iterator[Any] | None = None
        self._sent: deque[Ranges] = deque()  # to this iterator's workers, and not back yet
        self._depth = min(loader.num_workers * (loader.prefetch_factor or 0) + 1, _MOST_AHEAD)  # batches ahead
        self.hits = self.misses = 0
        self._failures = 0  # of workers, since they have given something
        self._in_the_midst = False  # of taking something from them

    def fetch(self, ranges: Ranges, upcoming: Callable[[int], Sequence[Sequence[tuple[int, int]]]]) -> Any:
        """Give the collated data of these samples. `upcoming` says what so many of the next steps probably train."""
        if self._loader.num_workers == 0:
            with self._busy("its data", LONGEST_WAIT, in_step=True):
                return self._load(ranges)
        self._batches.expect([tuple(one) for one in upcoming(self._depth)])
        with self._busy("its DataLoader's workers", LONGEST_WAIT):
            # What a signal's handler has raised, such as Ctrl-C's, may have come anywhere, and a batch be lost: the
            # workers begin anew, or each step from here on would get another one's data, or wait for what never comes.
            if self._in_the_midst:
                self.stop()
            self._in_the_midst = True
            data = self._from_workers(ranges)
            self._in_the_midst = False
        return data

    def _from_workers(self, ranges: Ranges) -> Any:
        sent = self._sent
        try:
            # What was sent and does not come any more is dropped; for each the workers are sent one that does.
            while sent and sent[0] != ranges and (ranges in sent or not self._batches.expects(sent[0])):
                self._next()
            if sent and sent[0] == ranges:
                data = self._next()
                self.hits += 1
                return data
        except Exception as error:  # a dead worker shows as what was read last; what the data raises comes again
            if error is self._watch.why:
                raise
            self._give_up(error)
        self.misses += 1
        self._in_the_midst = False  # what the data set raises loses nothing of the workers'
        data = self._load(ranges)
        self._in_the_midst = True
        if not sent and self._batches.coming:
            self._begin()
        return data

    def _begin(self) -> None:
        self._batches.opened_for = self._sent
        try:
            self._iterator = iter(self._loader)
        except RuntimeError as error:  # of persistent workers, of which one has died since
            self._give_up(error)
            self._iterator = iter(self._loader)
        finally:
            self._batches.opened_for = None
        end_with_trainer(self._iterator)

    def _give_up(self, error: Exception) -> None:
        self.stop()
        self._failures += 1
        if self._failures >= _MOST_FAILURES:
            remedy = next((". " + what for text, what in _REMEDIES.items() if text in str(error)), "")
            raise Unavailable(
                f"the DataLoader's workers have failed {self._failures} times without giving anything: {error}{remedy}"
            ) from error
        log.warning("the DataLoader's workers are started again: %s", error)

    def _next(self) -> Any:
        assert self._iterator is not None
        data = self._watch.wait(self._iterator)
        self._sent.popleft()
        self._failures = 0
        return data

    def stop(self) -> None:
        """Let the workers go."""
        self._watch.stop()
        end_stopped(self._iterator)
        self._iterator = None
        self._loader._iterator = None  # the loader keeps persistent workers, also where one of them has died
        self._sent.clear()

    def _load(self, ranges: Ranges) -> Any:
        data, indices = self._loader.dataset, self._batches.indices(ranges)
        many = getattr(data, "__getitems__", None)
        samples: list[Any] = many(indices) if many else [data[i] for i in indices]
        return self._loader.collate_fn(samples)
