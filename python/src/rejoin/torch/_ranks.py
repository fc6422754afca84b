"""What the ranks of one replica tell each other, by the key-value store of their torch.distributed."""

from __future__ import annotations

import struct
import threading
import time
from datetime import timedelta
from typing import Any

import torch

from rejoin.errors import InvalidArgument, Unavailable

_WAITS_SECONDS = 600.0
_WAITS_WHEN_LEAVING_SECONDS = 10.0


class Ranks:
    """The ranks of a replica. What they tell is named by its step, since a replica that catches up may meet them apart.

    Not collectives: a rank may be in a step's update while another one is still in its backward.
    """

    def __init__(self, rank: int, size: int, leaving: threading.Event) -> None:
        """`leaving`: set when this replica is to leave, so that nobody is waited for any more for long."""
        self._rank, self._size, self._leaving = rank, size, leaving
        self._store: Any = None
        if size > 1:
            if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
                raise InvalidArgument(
                    f"this replica has {size} ranks (WORLD_SIZE): call torch.distributed.init_process_group() before "
                    "attach()"
                )
            store = torch.distributed.distributed_c10d._get_default_store()
            self._store = torch.distributed.distributed_c10d.PrefixStore("rejoin", store)

    @property
    def several(self) -> bool:
        """Whether this replica has more than one rank."""
        return self._size > 1

    def total(self, step: int, value: float) -> float:
        """Add up the ranks' values in this step, in their order: all get the same bits."""
        if self._store is None:
            return value
        self._store.set(f"sum/{step}/{self._rank}", struct.pack("<d", value))
        if step > 2:  # all others have taken it, or won't
            self._store.delete_key(f"sum/{step - 2}/{self._rank}")
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
            except RuntimeError:  # not there yet
                waited = time.monotonic() - started
                if waited > (_WAITS_WHEN_LEAVING_SECONDS if self._leaving.is_set() else _WAITS_SECONDS):
                    missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                    raise Unavailable(
                        f"step {step}: rank {', '.join(map(str, missing))} of this replica has not told its part of "
                        f"the gradient's norm for {waited:.0f} s"
                    ) from None

    def leaves_after(self, step: int, wants: bool) -> bool:
        """Say whether this replica leaves with the end of this step; `wants`: this rank has been asked to.

        All ranks leave after the same step, the one after that in which the first of them was asked: none can have
        gone further, since they all take part in each other's backward().
        """
        if self._store is None:
            return wants
        if wants:
            last = int(self._store.compare_set("leave", "", str(step + 1)))
        elif self._store.check(["leave"]):
            last = int(self._store.get("leave"))
        else:
            return False
        return step >= last
