"""Members of a process group for test_device.py: their tensors are in a GPU's memory, by the driver's own calls.

torch can't know that the memory is a GPU's, so it is told, in the two places where it would be asked.
"""

import ctypes
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from pairs import make_pair
from trainer_device import Stream, allocated, call

from rejoin import _collectives, _streams

COUNT = 200_000
LONG = timedelta(seconds=30)


def tensor(address: int, count: int = COUNT) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_float * count).from_address(address), dtype=torch.float32)


def main() -> None:
    call("cuInit", 0)
    context = ctypes.c_void_p()
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    call("cuCtxPushCurrent_v2", context)
    flag = ctypes.c_void_p()
    call("cuMemHostAlloc", ctypes.byref(flag), ctypes.c_size_t(64), 0)
    held = ctypes.c_uint64.from_address(flag.value)

    streams = [Stream(), Stream()]
    addresses = [[allocated(4 * COUNT) for _ in range(3)] for _ in streams]
    now = streams[0]
    _collectives.on_device = lambda tensors, device: device is not None
    _streams.current = lambda device: now.handle.value

    groups = make_pair(LONG, device="cuda:0")

    values = [np.arange(COUNT, dtype=np.float32) % (97 + rank) for rank in range(2)]
    held.value = 0
    call("cuStreamWaitValue64_v2", streams[1].handle, flag, ctypes.c_uint64(1), 0)
    pinned = ctypes.c_void_p()
    call("cuMemHostAlloc", ctypes.byref(pinned), ctypes.c_size_t(4 * COUNT), 0)
    ctypes.memmove(pinned, values[1].ctypes.data, 4 * COUNT)
    call("cuMemcpyAsync", ctypes.c_ulonglong(addresses[1][0]), pinned, ctypes.c_size_t(4 * COUNT), streams[1].handle)
    streams[0].write(addresses[0][0], values[0])
    works = []
    mean = SimpleNamespace(reduceOp=dist.ReduceOp.AVG)
    for rank, group in enumerate(groups):
        now = streams[rank]
        works.append(group.allreduce([tensor(addresses[rank][0])]))
        assert works[-1].wait()
    assert not works[0].is_completed(), "the second one's stream has not come there"
    held.value = 1
    call("cuStreamSynchronize", streams[1].handle)
    for rank, group in enumerate(groups):
        now = streams[rank]
        works.append(group.allreduce([tensor(addresses[rank][0])], mean))
        works.append(group._allgather_base(tensor(addresses[rank][1]), tensor(addresses[rank][0], COUNT // 2)))
    for rank, group in enumerate(groups):
        now = streams[rank]
        works.append(
            group.send([tensor(addresses[0][0])], 1, 3) if rank == 0 else group.recv([tensor(addresses[1][2])], 0, 3)
        )
    for rank in range(2):
        now = streams[rank]
        for work in works[2 + 2 * rank : 4 + 2 * rank] + [works[6 + rank]]:
            assert work.wait()
    total = values[0] + values[1]
    for rank in range(2):
        assert np.array_equal(streams[rank].read(addresses[rank][0], COUNT), total)
        assert np.array_equal(streams[rank].read(addresses[rank][1], COUNT), np.tile(total[: COUNT // 2], 2))
    assert np.array_equal(streams[1].read(addresses[1][2], COUNT), total)
    assert all(work.wait(LONG) and work.is_success() for work in works)

    # One leaves: the other's stream goes on, and who asks is told.
    now = streams[0]
    alone = groups[0].allreduce([tensor(addresses[0][0])])
    alone.wait()
    groups[1].shutdown()
    call("cuStreamSynchronize", streams[0].handle)
    try:
        alone.wait(LONG)
    except Exception as error:
        assert "has left the process group" in str(error)
    else:
        raise AssertionError("it has ended well")
    assert not alone.is_success()
    groups[0].shutdown()
    print("the collectives of GPU memory are right")


if __name__ == "__main__":
    main()
