#!/usr/bin/env python3
"""Bulk writes between two processes of this machine, by the library named: nixl or mooncake. Prints MiB/s.

usage: peers_transfer.py nixl|mooncake tcp|shm BYTES ROUNDS     a round is 16 writes; peers_transfer.sh calls it
"""

import importlib
import os
import socket
import sys
import time
from multiprocessing.connection import Connection, Pipe

import numpy as np

DEPTH = 16


class Nixl:
    """The NIXL wheel, by its UCX."""

    def __init__(self, name, transport):
        os.environ["UCX_TLS"] = "tcp,self" if transport == "tcp" else "posix,sysv,cma,self,tcp"
        os.environ["UCX_WARN_UNUSED_ENV_VARS"] = "n"
        api = next(filter(None, map(found, ("nixl_cu12._api", "nixl_cu13._api"))), None)
        if api is None:
            sys.exit("there is no nixl here")
        self.agent = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))

    def offer(self, buffer):
        """Let others write here; what they need for it."""
        self.agent.register_memory([(buffer.ctypes.data, buffer.nbytes, 0, "")], "DRAM")
        return self.agent.get_agent_metadata()

    def writer(self, offered, near, far, size):
        """Give what does one round."""
        peer = self.agent.add_remote_agent(offered)
        blocks = [[(at + i * size, size, 0) for i in range(DEPTH)] for at in (near, far)]
        local, remote = (self.agent.get_xfer_descs(some, "DRAM") for some in blocks)
        handle = self.agent.initialize_xfer("WRITE", local, remote, peer)

        def write():
            state = self.agent.transfer(handle)
            while state == "PROC":
                state = self.agent.check_xfer_state(handle)
            if state != "DONE":
                sys.exit(f"NIXL says {state}")

        return write


class Mooncake:
    """The wheel of Mooncake's transfer engine, over TCP, which is all it has for processes of one machine."""

    def __init__(self, name, transport):
        if transport != "tcp":
            sys.exit("Mooncake's wheel has no shared memory")
        engine = found("mooncake.engine")
        if engine is None:
            sys.exit("there is no mooncake here")
        self.engine = engine.TransferEngine()
        with socket.socket() as free:  # it wants a port, and does not say which it took
            free.bind(("127.0.0.1", 0))
            self.name = f"127.0.0.1:{free.getsockname()[1]}"
        if self.engine.initialize(self.name, "P2PHANDSHAKE", "tcp", "") != 0:
            sys.exit("Mooncake does not start")

    def offer(self, buffer):
        if self.engine.register_memory(buffer.ctypes.data, buffer.nbytes) != 0:
            sys.exit("Mooncake does not register memory")
        return f"127.0.0.1:{self.engine.get_rpc_port()}"

    def writer(self, offered, near, far, size):
        blocks = [[at + i * size for i in range(DEPTH)] for at in (near, far)]

        def write():
            if self.engine.batch_transfer_sync_write(offered, *blocks, [size] * DEPTH) != 0:
                sys.exit("Mooncake has failed to write")

        return write


def found(name):
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def target(kind, transport, size, pipe: Connection):
    library, buffer = kind("target", transport), np.zeros(DEPTH * size, dtype=np.uint8)
    pipe.send((library.offer(buffer), buffer.ctypes.data))
    expected = pipe.recv()  # the writer is through
    if not np.array_equal(buffer, np.resize(np.arange(251, dtype=np.uint8), buffer.size)):
        sys.exit(f"what was written did not arrive: {expected} expected, {buffer[:4]} there")
    pipe.send(True)


def main():
    if len(sys.argv) != 5 or sys.argv[1] not in ("nixl", "mooncake"):
        sys.exit(__doc__)
    kind, transport = {"nixl": Nixl, "mooncake": Mooncake}[sys.argv[1]], sys.argv[2]
    size, rounds = int(sys.argv[3]), int(sys.argv[4])
    pipe, others = Pipe()
    child = os.fork()
    if child == 0:
        pipe.close()
        target(kind, transport, size, others)
        sys.stdout.flush()
        os._exit(0)
    others.close()
    library, buffer = kind("writer", transport), np.resize(np.arange(251, dtype=np.uint8), DEPTH * size)
    library.offer(buffer)
    try:
        offered, far = pipe.recv()
    except EOFError:
        sys.exit("the target has ended")
    write = library.writer(offered, buffer.ctypes.data, far, size)
    for _ in range(3):
        write()
    begun = time.perf_counter()
    for _ in range(rounds):
        write()
    taken = time.perf_counter() - begun
    try:
        pipe.send("a count from 0 to 250, again and again")
        pipe.recv()
    except (EOFError, ConnectionError):
        sys.exit("the target has ended")
    os.waitpid(child, 0)
    print(f"{rounds * DEPTH * size / taken / (1 << 20):.0f}")
    sys.stdout.flush()
    os._exit(0)  # the libraries' threads end with the process


if __name__ == "__main__":
    main()
