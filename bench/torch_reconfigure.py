#!/usr/bin/env python3
"""How soon survivors all-reduce again: of three members one is killed amid all-reduces, and the others reconfigure.

Rejoin's backend of torch.distributed beside Gloo's, in turns in one run, on this machine; both by torch's own calls
(enable_reconfigure). Times are those of the later survivor. A kernel frees a killed process's memory before it closes
its connections, and until then nobody hears of it: so much is in all times from the kill, and not in the last row.

usage: torch_reconfigure.py [--rounds 9]     needs torch 2.14 or later and the package: torch_reconfigure.sh has both
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

MEMBERS, VICTIM = 3, 1
SIZES = [1 << 20, 64 << 20]  # bytes
LIMIT = timedelta(seconds=20)


def tell(**what):
    print(json.dumps(what), flush=True)


def member(backend, rank, port):
    """Report when it is warm, and when it has failed, has reconfigured and has reduced again, for each size in turn."""
    if backend == "rejoin":
        import rejoin.distributed  # noqa: F401
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    dist.init_process_group(backend, store=store, rank=rank, world_size=MEMBERS, timeout=LIMIT, enable_reconfigure=True)
    elements = int(sys.stdin.readline()) // 4

    def configure(number, ranks):
        store.set(f"{number} {rank}", dist._get_reconfigure_handle())
        handles = [store.get(f"{number} {other}").decode() for other in ranks]
        dist._reconfigure(uuid=number, handles=handles, timeout=LIMIT).wait()

    configure(1, list(range(MEMBERS)))
    tensor, kept = torch.ones(elements), torch.ones(elements)  # what has failed is lost, and done again from the latter
    for _ in range(5):
        dist.all_reduce(tensor)
        tensor.fill_(1)
    tell(warm=True)
    at = {}
    try:
        while True:
            dist.all_reduce(tensor)
            tensor.fill_(1)
    except Exception as error:
        at["failed"] = time.monotonic()
        why = str(error).splitlines()[0]
    configure(2, [other for other in range(MEMBERS) if other != VICTIM])
    at["configured"] = time.monotonic()
    dist.all_reduce(kept)
    at["reduced"] = time.monotonic()
    assert kept.eq(MEMBERS - 1).all()
    tell(**at, why=why)
    sys.stdin.readline()  # until both are through
    os._exit(0)


def kill_one(backend, size, verbose):
    """Give the milliseconds from the kill to each stage."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    members = [
        subprocess.Popen(
            [sys.executable, __file__, "--member", backend, str(rank), str(store.port)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=None if verbose else subprocess.DEVNULL, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(MEMBERS)
    ]  # fmt: skip
    try:
        for process in members:
            process.stdin.write(f"{size}\n")
            process.stdin.flush()
        for process in members:
            assert json.loads(process.stdout.readline())["warm"]
        time.sleep(0.1)  # they are somewhere in the middle of an all-reduce
        killed = time.monotonic()
        members[VICTIM].send_signal(signal.SIGKILL)
        members[VICTIM].stdout.read()
        closed = time.monotonic()
        told = [json.loads(process.stdout.readline()) for rank, process in enumerate(members) if rank != VICTIM]
    finally:
        for process in members:
            process.kill()
            process.wait()
    if verbose:
        print(backend, size, *(one["why"] for one in told), sep="\n  ")
    at = {"closed": closed, **{stage: max(one[stage] for one in told) for stage in ("failed", "configured", "reduced")}}
    return {**{stage: 1000 * (when - killed) for stage, when in at.items()}, "ours": 1000 * (at["reduced"] - closed)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--member", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not hasattr(dist, "_reconfigure"):
        sys.exit(f"torch {torch.__version__} can't reconfigure its process groups: 2.14 can")
    if given.member:
        return member(given.member[0], int(given.member[1]), int(given.member[2]))
    backends = ("rejoin", "gloo")
    print(f"{MEMBERS} members, one killed; torch {torch.__version__}; medians (least to most) of {given.rounds} rounds")
    print("ms | bytes | rejoin | gloo | ratio")
    for size in SIZES:
        taken = {backend: [] for backend in backends}
        for _ in range(given.rounds):
            for backend in backends:
                taken[backend].append(kill_one(backend, size, given.verbose))
        for stage, words in (
            ("closed", "from the kill until the kernel has closed the victim's descriptors"),
            ("failed", "until the survivors' calls fail"),
            ("configured", "until they have reconfigured"),
            ("reduced", "until their next all-reduce has ended"),
            ("ours", "from the closed descriptors until then"),
        ):
            of = {backend: [one[stage] for one in taken[backend]] for backend in backends}
            middle = {backend: statistics.median(of[backend]) for backend in backends}
            cells = [f"{middle[b]:.1f} ({min(of[b]):.1f} to {max(of[b]):.1f})" for b in backends]
            print(" | ".join([words, str(size), *cells, f"{middle['rejoin'] / middle['gloo']:.2f}"]), flush=True)
    return None


if __name__ == "__main__":
    main()
