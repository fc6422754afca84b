"""How a process group of `torch.distributed` is opened."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch

from rejoin import _native, errors


@dataclass(frozen=True)
class Options:
    """How a group's members reach each other; given as `pg_options`, and to groups made of that one.

    Args:
        transport: "tcp", "ibverbs", "shm" (one machine) or another that `rejoind --help` names
        listen: the address to listen on; by default the loopback's if MASTER_ADDR is, else any
        advertise: the host under which others reach this one; by default the machine's own address
        device: the GPU whose tensors stay in its memory, "cuda:0" say; by default torch's current one, where torch has
            one and the kernels are built; "host": none. All members have one, or none
        configure: False: no members before the first `reconfigure()`, as with torch's `enable_reconfigure=True`
    """

    transport: str = "tcp"
    listen: str = ""
    advertise: str = ""
    device: str = ""
    configure: bool = True


def open_native(options: Options, listen: str) -> tuple[_native.ProcessGroup, torch.device | None]:
    """Open a group without members; give it with its GPU. Errors: `rejoin.RejoinError`."""

    def opened(device: str) -> _native.ProcessGroup:
        return _native.ProcessGroup(options.transport, listen, options.advertise, device)

    if options.device == "host":
        return opened("host"), None
    if options.device:
        named = torch.device(options.device)
        return opened(options.device), torch.device(named.type, named.index or 0)
    if torch.cuda.is_available():
        device = f"cuda:{torch.cuda.current_device()}"
        try:
            return opened(device), torch.device(device)
        except errors.Unavailable as error:
            warnings.warn(f"collectives of CUDA tensors go through the host's memory: {error}", stacklevel=4)
    return opened("host"), None
