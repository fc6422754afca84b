"""What the ranks of one replica tell each other, by the key-value store of their torch.distributed."""

from __future__ import annotations

import itertools
import logging
import operator
import os
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import Any

import torch

from rejoin.errors import InvalidArgument, Unavailable
from rejoin.launch import ranks_of_replica
from rejoin.torch._leaving import Leaving

log = logging.getLogger("rejoin")

REMEMBERED = 4096  # steps; a replica that catches up gets gradients of steps before
LONGEST_WAIT_SECONDS = (
    60.0  # and eight times as long as steps take, for a rank that goes on being there and does nothing
)
_LONGEST_TURN_SECONDS = 1.0  # between two looks at the store; in more this process did not run
_WAITS_FOR_BODIES_SECONDS = 30.0  # as long as torchrun lets a process live that it has asked to end
_GOES_ON, _LEAVES, _ASKED = "on", "leaves", "asked"  # after a step: a rank does, a rank's script does, SIGTERM has come
_BODIES = 4  # steps; no two ranks are in bodies of steps that lie so far apart
_ALIKE = (
    "All ranks of a replica leave after the same step: decide it by what is equal on all of them, such as step.mean()"
)
_sessions = itertools.count()


def added_up(values: Iterable[float]) -> float:
    """Add them up one after the other: `sum()` rounds otherwise since Python 3.12, and replicas may have several."""
    return reduce(operator.add, values, 0.0)


class Ranks:
    """The ranks of a replica. What they tell is named by its step, since a replica that catches up may meet them apart.

    Not collectives: a rank may be in a step's update while another one is still in its backward.
    """

    def __init__(self, rank: int, leaving: Leaving, check: Callable[[], None]) -> None:
        """`check` raises when this replica is out of the job: what others see of a rank that hangs, too."""
        self.rank, self._leaving, self._check = rank, leaving, check
        self._told_at: float | None = None
        self._told_of = 0  # the last step
        self._steps: deque[float] = deque(maxlen=16)  # seconds that each took
        self._store: Any = None
        initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
        named, self._size = ranks_of_replica()
        if initialized:
            self._size = torch.distributed.get_world_size()
        if self._size > 1:
            self._compare(torch.distributed.get_rank() if initialized else None)
            if not initialized:
                raise InvalidArgument(
                    f"this replica has {self._size} ranks ({named}): call torch.distributed.init_process_group() "
                    "before attach()"
                )
            store = torch.distributed.distributed_c10d._get_default_store()
            prefix = f"rejoin/{next(_sessions)}"  # of this process; the other ranks have opened as many
            self._store = torch.distributed.distributed_c10d.PrefixStore(prefix, store)

    def _compare(self, its_rank: int | None) -> None:
        ranks = os.environ.get("REJOIN_RANKS", str(self._size))
        if ranks == str(self._size) and its_rank in (None, self.rank):
            return
        number = "one" if its_rank is None else f"rank {its_rank}"
        raise InvalidArgument(
            f"this process is {number} of {self._size} by torch.distributed, and rank {self.rank} of its replica, "
            f"which has {ranks} (REJOIN_RANK, REJOIN_RANKS): all processes of one torchrun are the ranks of one "
            f"replica, by the same numbers. rejoin-run starts torchrun by itself: rejoin-run --ranks {self._size} … -- "
            "python train.py"
        )

    @property
    def several(self) -> bool:
        """Whether this replica has more than one rank."""
        return self._size > 1

    def publish(self, step: int, value: float) -> None:
        """Tell the others this rank's part of a step's sum."""
        self.tell_of_step("sum", step, struct.pack("<d", value))

    def total(self, step: int, value: float) -> float:
        """Add up the ranks' parts of a step's sum, in their order: all get the same bits. Waits for the others."""
        if self._store is None:
            return value
        return added_up(struct.unpack("<d", packed)[0] for packed in self.told_of_step("sum", step, range(self._size)))

    def tell_of_step(self, what: str, step: int, mine: bytes) -> None:
        """Tell the others this rank's part of a step, and wait for nobody."""
        if self._store is None:
            return
        if step != self._told_of:
            now = time.monotonic()
            if self._told_at is not None:
                self._steps.append(now - self._told_at)
            self._told_at, self._told_of = now, step
        self._store.set(f"{what}/{step}/{self.rank}", mine)
        kept = REMEMBERED if what == "sum" else _BODIES  # a step that is caught up with needs its norm
        if step > kept:
            self._store.delete_key(f"{what}/{step - kept}/{self.rank}")

    def told_of_step(self, what: str, step: int, ranks: Sequence[int]) -> list[bytes]:
        """Give what these ranks tell of a step. Waits for them."""
        keys = [f"{what}/{step}/{rank}" for rank in ranks]
        of_what = {"sum": f"the norm of step {step}'s gradient", "means": f"the means of step {step}'s metrics"}[what]
        self._wait(f"its part of {of_what}", keys, of_ranks=ranks)
        return self._values(keys)

    def gather(self, name: str, mine: bytes, patient: bool = False) -> list[bytes]:
        """Give what each rank says under this name, in their order; once for each name. Waits for the others.

        `patient`: however long it takes, and when this replica has left the job; the log says for whom it waits.
        """
        if self._store is None:
            return [mine]
        self.say(name, mine)
        return self.told(name, patient)

    def told(self, name: str, patient: bool = False) -> list[bytes]:
        """Give what each rank has said under this name, as `gather` does, where this one has said it before."""
        keys = [f"{name}/{rank}" for rank in range(self._size)]
        self._wait(f"its '{name}'", keys, patient)
        return self._values(keys)

    def first_says(self, name: str, first: Callable[[], bool] | None, what: str) -> bool:
        """Give what `first` gives on rank 0, on all ranks, which wait for it however long it takes; once for each name.

        The other ranks have none, and their logs say for what they wait, if that is long.
        """
        if self._store is None:
            assert first is not None
            return first()
        if first is not None:
            says = False
            try:
                says = first()
            finally:  # also where it fails: nobody is to wait for it
                self._store.set(name, b"1" if says else b"0")
        self._wait(what, [name], patient=True)
        return bool(self._store.get(name) == b"1")

    # A rank that is stopped, or has died, is found by its daemon, and the whole replica is out. One that hangs in its
    # update is found here alone: the job takes it for one that evaluates, or writes a checkpoint, between steps.
    def _wait(self, what: str, keys: list[str], patient: bool = False, of_ranks: Sequence[int] | None = None) -> None:
        looked_at = turn_at = time.monotonic()
        waited = 0.0  # as far as this process saw it: where it was stopped, others may have told meanwhile
        limit = LONGEST_WAIT_SECONDS + (0.0 if patient else 8 * max(self._steps, default=0.0))
        between = max(0.002, 1e-4 * self._size)  # looks of each rank, where waits are short: one store answers all
        with self._leaving.waiting(at_once=False):
            missing = self._missing(keys, 0)
            while missing < len(keys):
                now = time.monotonic()
                if now - looked_at > 0.1:
                    looked_at = now
                    self._leaving.look()
                    if not patient:
                        self._check()
                if waited > limit:
                    rank = missing if of_ranks is None else of_ranks[missing]
                    silent = f"rank {rank} of this replica has not told {what} for {limit:.0f} s"
                    if not patient:
                        raise Unavailable(f"{silent}: it hangs, or died")
                    log.warning("%s: this one waits for it; where it died, end this process, too", silent)
                    limit *= 2
                waited += min(now - turn_at, _LONGEST_TURN_SECONDS)
                turn_at = now
                # Not the store's wait(): each that ends in vain is logged by torch, which looks up the host's name for
                # that and takes seconds where no name server answers.
                time.sleep(min(waited / 8, max(waited / 64, between), 0.02))
                if self._has(keys[missing : missing + 1]):
                    missing = self._missing(keys, missing + 1)

    # The first key that is missing from `first` on, or how many there are: a few requests, however many ranks.
    def _missing(self, keys: list[str], first: int) -> int:
        if first == len(keys) or self._has(keys[first:]):
            return len(keys)
        end = len(keys)
        while end - first > 1:
            middle = (first + end) // 2
            first, end = (middle, end) if self._has(keys[first:middle]) else (first, middle)
        return first

    def _has(self, keys: list[str]) -> bool:
        try:
            return bool(self._store.check(keys))
        except torch.distributed.DistError as error:
            raise Unavailable(f"the store of this replica's torch.distributed: {error}") from error

    def _values(self, keys: list[str]) -> list[bytes]:
        try:
            return list(self._store.multi_get(keys))
        except torch.distributed.DistError as error:
            raise Unavailable(f"the store of this replica's torch.distributed: {error}") from error

    def leaves_after(self, step: int, wants: bool) -> bool:
        """Say whether this replica leaves with the end of this step; `wants`: this rank has been asked to.

        All ranks leave after the same step, the one after that in which the first of them was asked: none can have
        gone further, since they all take part in each other's backward(). Raises `InvalidArgument` where another one
        has left by itself.
        """
        if self._store is None:
            return wants
        try:
            if wants:
                self._decide(step + 1, _ASKED)
            decided, rank = self._decide(step, _GOES_ON)
        except torch.distributed.DistError:  # whoever had the store has left with this step
            return True
        if decided == _LEAVES:
            self.say("leaves", b"1")  # it waits no longer
            raise InvalidArgument(
                f"rank {rank} of this replica has left the job after step {step}, and rank {self.rank} goes on. "
                f"{_ALIKE}"
            )
        return decided == _ASKED

    def leave_by_itself(self, step: int) -> None:
        """Leave after this step because the script says so, which is to say the same on all ranks; wait for them.

        Raises `InvalidArgument` where another one has gone on.
        """
        if self._store is None:
            return
        try:
            decided, rank = self._decide(step, _LEAVES)
        except torch.distributed.DistError:  # whoever had the store has left
            return
        if decided == _GOES_ON:
            raise InvalidArgument(
                f"session.leave() on rank {self.rank} of this replica after step {step}, and rank {rank} has gone on. "
                f"{_ALIKE}"
            )
        self.leave_together()

    # What the first rank says that comes to the end of this step's body holds for all of them.
    def _decide(self, step: int, what: str) -> tuple[str, int]:
        decided, rank = self._store.compare_set(f"after/{step}", "", f"{what} {self.rank}").decode().split()
        if self.rank == 0 and step > _BODIES:
            self._store.delete_key(f"after/{step - _BODIES}")
        return decided, int(rank)

    def say(self, name: str, mine: bytes) -> None:
        """Say under this name what `gather()` gives others, and wait for nobody."""
        if self._store is not None:
            self._store.set(f"{name}/{self.rank}", mine)

    def leave_together(self, name: str = "leaves") -> None:
        """Wait for a while until all ranks are through with their last step's body, or have come here; once for each
        name.

        The first one that leaves ends the replica's part in the job, in which another may still write a checkpoint;
        and whoever has the store takes it along.
        """
        if self._store is None:
            return
        try:
            self.say(name, b"1")
            ranks = [f"{name}/{rank}" for rank in range(self._size)]
            limit, was_set = time.monotonic() + _WAITS_FOR_BODIES_SECONDS, self._leaving.is_set()
            # A launcher that ends the others since one has died does so by SIGTERM.
            while not self._store.check(ranks) and time.monotonic() < limit and self._leaving.is_set() == was_set:
                time.sleep(0.02)
        except torch.distributed.DistError:  # one is gone, or takes too long; or whoever had the store is gone
            pass
