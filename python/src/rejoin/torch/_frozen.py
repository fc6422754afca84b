"""Digests of the parameters that nobody trains: none gets them from another, so all have to have loaded the same."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import torch

from rejoin._memory import bytes_of
from rejoin.errors import InvalidArgument
from rejoin.torch._ranks import Ranks
from rejoin.torch._sharding import local

_MOST_NAMES = 40  # in a fingerprint; of more tensors those of one module are told together
_WORDS = 1 << 20  # at a time
_MASK = (1 << 64) - 1


def digest(tensor: torch.Tensor) -> int:
    """Digest the bytes, where they are if contiguous. It finds what differs by mistake, such as another file's."""
    raw = bytes_of(tensor.detach().resolve_conj().resolve_neg())
    total = raw.numel()
    for begin in range(0, -(-raw.numel() // 8), _WORDS):
        some = raw[8 * begin : 8 * (begin + _WORDS)]
        part = torch.nn.functional.pad(some, (0, -some.numel() % 8)).view(torch.int64)  # a copy, wherever it began
        place = torch.arange(begin, begin + part.numel(), device=part.device)
        odd = place * 0x1E3779B97F4A7C15 | 1  # so that one word that differs always makes a difference
        total += int((part * odd).sum())  # modulo 2^64, in whatever order
    return total & _MASK


def frozen(model: torch.nn.Module, ranks: Ranks, held: Sequence[torch.Tensor] = ()) -> str:
    """Tell the frozen parameters of this replica, all ranks' shards together, by name; nothing where there are none.

    `held`: the session's own, which are given to those that come back, also where they are frozen for a while.
    """
    trained = {id(p) for p in held}
    every = [(name, local(p)) for name, p in model.named_parameters() if not p.requires_grad and id(p) not in trained]
    named = [
        (name, p) for name, p in every if type(p.data) is torch.Tensor
    ]  # others, such as packed ones, have no bytes
    if not named and not ranks.several:
        return ""
    for name, p in named:
        if p.is_meta or p.layout is not torch.strided:
            what = "is on the meta device" if p.is_meta else f"has the layout {p.layout}"
            raise InvalidArgument(
                f"frozen parameter '{name}' {what}, and can't be compared with those of the other replicas: let it be "
                "a plain tensor with its values by join(), or take it out of the model"
            )
    # Shards of what has the same names. Other ranks may be other stages, with other parameters, or none.
    names = hashlib.blake2b("\0".join(name for name, _ in named).encode(), digest_size=8).digest()
    mine = struct.pack(f"<{len(named)}Q", *(digest(p) for _, p in named))
    digests = [0] * len(named)
    # Patient: before join() no replica is out of the job, and ranks may take far longer than others to read a model.
    for rank, told_by in enumerate(ranks.gather("frozen", names + mine, patient=True)):
        if told_by.startswith(names):
            for i, (of,) in enumerate(struct.iter_unpack("<Q", told_by[len(names) :])):
                digests[i] += of * (2 * rank + 1)
    if not named:
        return ""
    for depth in range(max(name.count(".") for name, _ in named) + 1, -1, -1):
        told: dict[str, int] = {}
        for (name, _), of in zip(named, digests, strict=True):
            of_module = ".".join(name.split(".")[:depth])
            told[of_module] = (told.get(of_module, 0) * 31 + of) & _MASK
        if len(told) <= _MOST_NAMES:
            break
    return f"{len(named)} frozen: " + ", ".join(f"{name or 'all'} {of:016x}" for name, of in told.items())
