"""How a process group of `torch.distributed` is opened."""

from __future__ import annotations

import contextlib
import os
import socket
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from rejoin import _native, errors


@dataclass(frozen=True)
class Options:
    """How a group's members reach each other; given as `pg_options`, and to groups made of that one.

    Args:
        transport: "tcp", "ibverbs", "shm" (one machine) or another that `rejoind --help` names
        listen: the address to listen on; by default the loopback's if MASTER_ADDR is, else any, over IPv4 and IPv6
        advertise: the host under which others reach this one; by default the machine's own address: where it has
            several, the one that it reaches MASTER_ADDR from
        device: the GPU whose tensors stay in its memory, "cuda:0" say; by default torch's current one, where torch has
            one and the kernels are built; "host": none. All members have one, or none
        configure: False: no members before the first `reconfigure()`, as with torch's `enable_reconfigure=True`
    """

    transport: str = "tcp"
    listen: str = ""
    advertise: str = ""
    device: str = ""
    configure: bool = True


def is_everywhere(listen: str) -> bool:
    """Say whether that is on all addresses."""
    return listen.rpartition(":")[0] in ("", "0.0.0.0", "[::]")


def master() -> str:
    """Give the address of MASTER_ADDR and MASTER_PORT: of all that a name has the first that there is a way to.

    Those of IPv4 come first: where a name has both, some members may have no other.
    """
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host:
        return ""
    try:
        found = socket.getaddrinfo(host.strip("[]"), port or 9, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):  # a name that is none
        return ""
    found.sort(key=lambda one: one[0] != socket.AF_INET)
    for family, kind, protocol, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as way:
            way.connect(address)  # it sends nothing
            return _with_port(address)
    return _with_port(found[0][4]) if found else ""


def _with_port(address: tuple[Any, ...]) -> str:
    return f"[{address[0]}]:{address[1]}" if ":" in address[0] else f"{address[0]}:{address[1]}"


def open_native(options: Options, listen: str) -> tuple[_native.ProcessGroup, torch.device | None]:
    """Open a group without members; give it with its GPU. Errors: `rejoin.RejoinError`."""
    towards = master() if is_everywhere(listen) and not options.advertise and options.transport != "shm" else ""

    def opened(device: str) -> _native.ProcessGroup:
        return _native.ProcessGroup(options.transport, listen, options.advertise, device, towards)

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
