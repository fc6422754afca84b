#!/usr/bin/env python3
"""Collectives of torch.distributed over Rejoin's backend and over Gloo, in turns in one run, on this machine.

usage: torch_backend.py [--members 2]     needs torch and the package (python/install.sh)
"""

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist
import torch.multiprocessing

import rejoin.distributed  # noqa: F401

SIZES = [4, 64 * 1024, 1 << 20, 16 << 20, 64 << 20]  # bytes


def time_of(call, rounds, group):
    dist.barrier(group=group)
    begin = time.perf_counter()
    for _ in range(rounds):
        call()
    return (time.perf_counter() - begin) / rounds


def member(rank, size, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("rejoin", rank=rank, world_size=size)
    groups = {"rejoin": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    if rank == 0:
        print(f"{size} members on this machine, medians of 7 turns, in microseconds; ratio: rejoin to gloo")
        print(f"{'operation':16}{'bytes':>12}{'rejoin':>12}{'gloo':>12}{'ratio':>8}")
    for name in ("all_reduce", "broadcast", "all_gather"):
        for bytes in SIZES:
            tensor = torch.ones(bytes // 4)
            gathered = [torch.empty_like(tensor) for _ in range(size)]
            calls = {
                "all_reduce": lambda group, t=tensor: dist.all_reduce(t, group=group),
                "broadcast": lambda group, t=tensor: dist.broadcast(t, 0, group=group),
                "all_gather": lambda group, t=tensor, g=gathered: dist.all_gather(g, t, group=group),
            }
            rounds = max(2, min(300, (32 << 20) // max(bytes, 1)))
            taken = {backend: [] for backend in groups}
            for turn in range(8):
                for backend, group in groups.items():
                    seconds = time_of(lambda group=group: calls[name](group), rounds, group)
                    if turn:
                        taken[backend].append(seconds)
                    tensor.fill_(1)
            if rank == 0:
                ours, theirs = (1e6 * statistics.median(taken[backend]) for backend in groups)
                print(f"{name:16}{bytes:12}{ours:12.0f}{theirs:12.0f}{ours / theirs:8.2f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--members", type=int, default=2)
    members = parser.parse_args().members
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the members connect to this one
    torch.multiprocessing.spawn(member, (members, store.port), nprocs=members)
