"""Mean time of an all-reduce of float32 by torch's Gloo over loopback, in µs: peers_allreduce.sh calls it.

usage: gloo_allreduce.py RANKS FLOATS ITERATIONS
"""

import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def rank_of(rank: int, ranks: int, floats: int, iterations: int, store: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    values = torch.zeros(floats)
    for _ in range(3 + iterations // 10):
        dist.all_reduce(values)
    dist.barrier()
    begun = time.perf_counter()
    for _ in range(iterations):
        dist.all_reduce(values)
    if rank == 0:
        print(f"{(time.perf_counter() - begun) / iterations * 1e6:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    numbers = [int(argument) for argument in sys.argv[1:]]
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(rank_of, (*numbers, f"{directory}/store"), nprocs=numbers[0])
