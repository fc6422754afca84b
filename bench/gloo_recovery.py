"""How soon survivors all-reduce again by torch's Gloo with enable_reconfigure, for rejoin_recovery_perf --torch.

Arguments: members, bytes, rounds. In each round one member is killed amid all-reduces, and the others reconfigure; the
milliseconds from the kill until the last of them has finished its next all-reduce come out, a line a round.
"""

import os
import random
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

LIMIT = timedelta(seconds=60)


def member(rank, members, victim, size, port, told):
    """Say when it is warm, and when it has reduced again."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    dist.init_process_group("gloo", store=store, rank=rank, world_size=members, timeout=LIMIT, enable_reconfigure=True)

    def configure(number, ranks):
        store.set(f"{number} {rank}", dist._get_reconfigure_handle())
        handles = [store.get(f"{number} {other}").decode() for other in ranks]
        dist._reconfigure(uuid=number, handles=handles, timeout=LIMIT).wait()

    configure(1, list(range(members)))
    tensor, kept = torch.ones(size // 4), torch.ones(size // 4)  # what has failed is lost, and done again from the latter
    for _ in range(5):
        dist.all_reduce(tensor)
        tensor.fill_(1)
    os.write(told, b"warm\n")
    try:
        while True:
            dist.all_reduce(tensor)
            tensor.fill_(1)
    except RuntimeError:
        pass  # somebody is gone
    configure(2, [other for other in range(members) if other != victim])
    dist.all_reduce(kept)
    at = time.monotonic()
    if not kept.eq(members - 1).all():
        os.write(told, b"wrong sums\n")
        return
    os.write(told, f"{at}\n".encode())
    signal.pause()  # until all are through


def kill_one(members, size, victim):
    """Give the milliseconds, or end with what went wrong."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    children = []
    try:
        for rank in range(members):
            out, told = os.pipe()
            pid = os.fork()
            if pid == 0:
                try:
                    member(rank, members, victim, size, store.port, told)
                except BaseException as error:  # noqa: BLE001
                    os.write(told, f"{type(error).__name__}: {error}\n".replace("\n", " ").encode() + b"\n")
                os._exit(1)
            os.close(told)
            children.append((pid, os.fdopen(out)))
        for _, out in children:
            if (line := out.readline().strip()) != "warm":
                sys.exit(line)
        time.sleep(random.uniform(0, 0.02))  # somewhere in an all-reduce
        killed = time.monotonic()
        os.kill(children[victim][0], signal.SIGKILL)
        ends = []
        for rank, (_, out) in enumerate(children):
            if rank == victim:
                continue
            line = out.readline().strip()
            try:
                ends.append(float(line))
            except ValueError:
                sys.exit(line)
        return 1000 * (max(ends) - killed)
    finally:
        for pid, out in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            out.close()


if __name__ == "__main__":
    if not hasattr(dist, "_reconfigure"):
        sys.exit(f"torch {torch.__version__} can't reconfigure its process groups: 2.14 can")
    count, bytes_, rounds = (int(argument) for argument in sys.argv[1:])
    for round_ in range(rounds):
        print(kill_one(count, bytes_, round_ % count), flush=True)
