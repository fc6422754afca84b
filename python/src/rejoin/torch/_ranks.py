"""What the ranks of one replica tell each other, by the key-value store of their torch.distributed."""

from __future__ import annotations

import itertools
import os
import struct
import threading
import time
from datetime import timedelta
from typing import Any

import torch

from rejoin.errors import InvalidArgument, Unavailable

REMEMBERED = 4096  # steps; a replica that catches up gets gradients of steps before
_WAITS_SECONDS = 600.0
_WAITS_WHEN_LEAVING_SECONDS = 10.0
_WAITS_FOR_BODIES_SECONDS = 30.0  # as long as torchrun lets a process live that it has asked to end
_sessions = itertools.count()


class Terminated(SystemExit):
    """SIGTERM, while this replica waited for a step, or for a rank of its own that has left."""


class Ranks:
    """The ranks of a replica. What they tell is named by its step, since a replica that catches up may meet them apart.

    Not collectives: a rank may be in a step's update while another one is still in its backward.
    """

    def __init__(self, rank: int, leaving: threading.Event) -> None:
        """`leaving`: set when this replica is to leave, so that nobody is waited for any more for long."""
        self._rank, self._leaving = rank, leaving
        self._store: Any = None
        initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
        self._size = torch.distributed.get_world_size() if initialized else int(os.environ.get("WORLD_SIZE", "1"))
        if self._size > 1:
            if not initialized:
                raise InvalidArgument(
                    f"this replica has {self._size} ranks (WORLD_SIZE): call torch.distributed.init_process_group() "
                    "before attach()"
                )
            store = torch.distributed.distributed_c10d._get_default_store()
            prefix = f"rejoin/{next(_sessions)}"  # of this process; the other ranks have opened as many
            self._store = torch.distributed.distributed_c10d.PrefixStore(prefix, store)

    @property
    def several(self) -> bool:
        """Whether this replica has more than one rank."""
        return self._size > 1

    def publish(self, step: int, value: float) -> None:
        """Tell the others this rank's part of a step's sum."""
        if self._store is None:
            return
        self._store.set(f"sum/{step}/{self._rank}", struct.pack("<d", value))
        self._store.set(f"seen/{self._rank}", str(step))
        if step > REMEMBERED:
            self._store.delete_key(f"sum/{step - REMEMBERED}/{self._rank}")

    def total(self, step: int, value: float) -> float:
        """Add up the ranks' parts of a step's sum, in their order: all get the same bits. Waits for the others."""
        if self._store is None:
            return value
        keys = [f"sum/{step}/{rank}" for rank in range(self._size)]
        self._wait(step, keys)
        total = 0.0
        for packed in self._store.multi_get(keys):
            total += struct.unpack("<d", packed)[0]
        return total

    def _wait(self, step: int, keys: list[str]) -> None:
        started = time.monotonic()
        while True:
            try:
                self._store.wait(keys, timedelta(seconds=1))
                return
            except torch.distributed.DistStoreError:  # not there yet
                waited = time.monotonic() - started
            except torch.distributed.DistError as error:
                raise Unavailable(f"the store of this replica's torch.distributed: {error}") from error
            if self._leaving.is_set() and waited > _WAITS_WHEN_LEAVING_SECONDS:
                raise Terminated
            for rank, key in enumerate(keys):
                if self._store.check([key]):
                    continue
                seen = f"seen/{rank}"
                passed = self._store.check([seen]) and int(self._store.get(seen)) > step
                if passed and not self._store.check([key]):
                    raise Unavailable(
                        f"rank {rank} of this replica began to catch up after step {step}, and rank {self._rank} "
                        "before: what the norm of that step's gradient was is not to be had. Start the replica again"
                    )
                if waited > _WAITS_SECONDS:
                    raise Unavailable(
                        f"step {step}: rank {rank} of this replica has not told its part of the gradient's norm for "
                        f"{waited:.0f} s"
                    )

    def leaves_after(self, step: int, wants: bool) -> bool:
        """Say whether this replica leaves with the end of this step; `wants`: this rank has been asked to.

        All ranks leave after the same step, the one after that in which the first of them was asked: none can have
        gone further, since they all take part in each other's backward().
        """
        if self._store is None:
            return wants
        try:
            if wants:
                last = int(self._store.compare_set("leave", "", str(step + 1)))
            elif self._store.check(["leave"]):
                last = int(self._store.get("leave"))
            else:
                return False
        except torch.distributed.DistError:  # whoever had the store has left with this step
            return True
        return step >= last

    def leave_together(self) -> None:
        """Wait until all ranks are through with their last step's body.

        The first one that leaves ends the replica's part in the job, in which another may still write a checkpoint.
        """
        if self._store is None:
            return
        try:
            self._store.set(f"leaves/{self._rank}", "1")
            ranks = [f"leaves/{rank}" for rank in range(self._size)]
            self._store.wait(ranks, timedelta(seconds=_WAITS_FOR_BODIES_SECONDS))
        except torch.distributed.DistError:  # one is gone, or takes too long; or whoever had the store is gone
            pass
