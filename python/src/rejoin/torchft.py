"""Rejoin's transport under torchft: a `CheckpointTransport` whose receivers read the sender's memory.

    manager = torchft.Manager(..., checkpoint_transport=RejoinTransport(timeout=timedelta(seconds=30)))

The sender's trainer has no part in a transfer: who receives reads its tensors out of its memory, by RDMA with
`transport="ibverbs"`, and compares a digest of every 4 MiB. Tensors of a GPU go through the host's memory.

What the state dict has besides tensors is pickled, as torchft's own transports do. Only who has `metadata()` gets in,
and what is unpickled has the sender's proof that it is its own. Over anything but `transport="tcp+aes"` who is on the
way can change the tensors.
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torchft.checkpointing.transport import CheckpointTransport

from rejoin import _native
from rejoin._memory import memory_of, milliseconds

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass
class _Buffer:
    """In the place of a tensor: its bytes are the buffer of that number."""

    number: int
    shape: torch.Size
    dtype: torch.dtype
    spec: Any = None  # of a DTensor


def _local(leaf: Any) -> torch.Tensor | None:
    """Give the tensor of which the bytes are sent; None: the leaf is pickled."""
    if isinstance(leaf, DTensor):
        leaf = leaf._local_tensor
    if type(leaf) not in (torch.Tensor, torch.nn.Parameter):  # others may have their bytes elsewhere
        return None
    if leaf.layout != torch.strided or leaf.is_quantized or leaf.is_meta:
        return None
    return cast(torch.Tensor, leaf.detach())


# Whether this tensor can be received into. One whose elements lie on each other, as after expand(), can't be written.
def _fits(target: torch.Tensor, described: _Buffer) -> bool:
    if target.shape != described.shape or target.dtype != described.dtype:
        return False
    reach = 0
    for stride, size in sorted(zip(target.stride(), target.shape, strict=True)):
        if size > 1 and stride <= reach:
            return target.numel() == 0
        reach += (size - 1) * stride
    return True


class RejoinTransport(CheckpointTransport[T]):  # type: ignore[misc]  # torchft has no types to see
    """Send and receive torchft's checkpoints over Rejoin's transport.

    Any thread, one call at a time each of sending and receiving. Errors: `rejoin.DeadlinePassed` (a `TimeoutError`),
    `rejoin.Refused` (a later step is sent meanwhile), `rejoin.Unavailable` (the sender has gone, or its deadline for
    this checkpoint has passed), `rejoin.Corrupt` (the sender's tensors changed before `disallow_checkpoint()`).

    Args:
        timeout: how long `disallow_checkpoint()` waits for who is receiving; below the manager's own
        transport: "tcp", "ibverbs", "shm" (one machine) or another that `rejoind --help` names
        listen: the address to listen on, where port 0 is any; by default any, over IPv4 and IPv6
        advertise: the host under which others reach this one; by default the machine's own address
        state_dict: gives the tensors that are received into, in place; they may have another device, and those of
            another shape or type, or whose elements lie on each other (after `expand()`), are left out and made anew.
            A receive that fails leaves them written in part, so that they are no state any more: end the process
            then, or receive again before anything reads them. Not for a manager with `use_async_quorum`, which
            receives while the model computes
    """

    def __init__(
        self,
        timeout: timedelta = timedelta(seconds=10),
        transport: str = "tcp",
        listen: str = "",
        advertise: str = "",
        state_dict: Callable[[], T] | None = None,
    ) -> None:
        self._timeout = timeout
        self._state_dict = state_dict
        self._transport = transport
        self._server = _native.CheckpointServer(transport, listen, advertise)
        self._lock = threading.Lock()  # guards the two below
        self._offered = False
        self._sent: list[torch.Tensor] = []  # alive until it is withdrawn

    def metadata(self) -> str:
        """Give the address that `recv_checkpoint()` takes."""
        return self._server.address()

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta) -> None:
        """Offer the state; its tensors must stay as they are until `disallow_checkpoint()`.

        It returns when all tensors have been digested, and does not wait for who receives.
        """
        if not dst_ranks:
            return
        leaves, spec = pytree.tree_flatten(state_dict)
        tensors: list[torch.Tensor] = []
        described: list[Any] = []
        for leaf in leaves:
            local = _local(leaf)
            if local is None:
                described.append(leaf)
                continue
            described.append(
                _Buffer(len(tensors), local.shape, local.dtype, leaf._spec if isinstance(leaf, DTensor) else None)
            )
            tensors.append(local.resolve_conj().resolve_neg().cpu().contiguous())
        with self._lock:
            self._offered, self._sent = True, self._sent + tensors
            self._server.publish(step, pickle.dumps((described, spec)), [memory_of(one) for one in tensors])
            self._sent = tensors

    def disallow_checkpoint(self) -> None:
        """Wait for who is receiving, at most `timeout`; from then on nobody reads these tensors any more."""
        with self._lock:
            if not self._offered:
                return
            cut_off = self._server.withdraw(milliseconds(self._timeout))
            self._offered, self._sent = False, []
        if cut_off:
            _log.warning("%d receivers had not finished after %s, and were cut off", cut_off, self._timeout)

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        """Wait until that step is offered there, and receive it: into `state_dict()`'s tensors, where it was given."""
        deadline = time.monotonic() + timeout.total_seconds()
        fetch = _native.CheckpointFetch(self._transport, metadata, step, milliseconds(timeout))
        try:
            return self._receive(fetch, deadline)
        finally:
            fetch.close()  # the sender waits for who is receiving

    def _receive(self, fetch: _native.CheckpointFetch, deadline: float) -> T:
        described, spec = pickle.loads(fetch.description())
        own = self._own(spec, len(described))
        buffers = []
        copied: list[tuple[torch.Tensor, torch.Tensor]] = []  # from, to
        leaves: list[Any] = []
        for described_leaf, mine in zip(described, own, strict=True):
            if not isinstance(described_leaf, _Buffer):
                leaves.append(described_leaf)
                continue
            target = _local(mine)
            if target is None or not _fits(target, described_leaf):
                target = torch.empty(described_leaf.shape, dtype=described_leaf.dtype)
                mine = None
            received = target
            if target.device.type != "cpu" or not target.is_contiguous() or target.is_conj() or target.is_neg():
                received = torch.empty(described_leaf.shape, dtype=described_leaf.dtype)
                copied.append((received, target))
            buffers.append(received)
            if mine is None:
                mine = target
                if described_leaf.spec is not None:
                    mine = DTensor(target, described_leaf.spec, requires_grad=False)  # type: ignore[no-untyped-call]
            leaves.append(mine)
        left = timedelta(seconds=deadline - time.monotonic())
        fetch.into([memory_of(one) for one in buffers], milliseconds(left))
        with torch.no_grad():
            for received, target in copied:
                target.copy_(received)
        return cast(T, pytree.tree_unflatten(leaves, spec))

    def _own(self, spec: pytree.TreeSpec, count: int) -> list[Any]:
        """Give the leaves that are received into, as the sender's; None for each where there are none."""
        if self._state_dict is not None:
            leaves, mine = pytree.tree_flatten(self._state_dict())
            if mine == spec:
                return leaves
            _log.warning("the state dict here has other keys than the sender's: its tensors are made anew")
        return [None] * count

    def shutdown(self, wait: bool = True) -> None:
        """End; with `wait` not before who is receiving has finished, at most `timeout`."""
        if wait:
            self.disallow_checkpoint()
        self._server.close()
