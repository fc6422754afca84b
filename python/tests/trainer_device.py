"""A trainer for test_device.py: its memory and streams are a GPU's, by the driver's own calls, without torch."""

import argparse
import ctypes
import os
import signal
import time
from pathlib import Path

import numpy as np

from rejoin import _native, place_from_environment

COUNT = 300_000
driver = ctypes.CDLL("libcuda.so.1")


def call(name: str, *arguments: object) -> None:
    status = getattr(driver, name)(*arguments)
    assert status == 0, f"{name} gives {status}"


def allocated(size: int) -> int:
    address = ctypes.c_ulonglong()
    call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
    return address.value


class Stream:
    def __init__(self) -> None:
        self.handle = ctypes.c_void_p()
        call("cuStreamCreateWithPriority", ctypes.byref(self.handle), 1, 0)

    def write(self, address: int, values: np.ndarray) -> None:
        """Queue it; the values have to stay until the stream has come there."""
        self._copy(address, values.ctypes.data, values.nbytes)

    def read(self, address: int, count: int) -> np.ndarray:
        values = np.empty(count, dtype=np.float32)
        self._copy(values.ctypes.data, address, values.nbytes)
        call("cuStreamSynchronize", self.handle)
        return values

    def stand(self, seconds: float) -> None:
        """Queue a function that takes so long."""
        self._stands = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: time.sleep(seconds))
        call("cuLaunchHostFunc", self.handle, self._stands, None)

    def _copy(self, to: int, of: int, size: int) -> None:
        call("cuMemcpyAsync", ctypes.c_ulonglong(to), ctypes.c_ulonglong(of), ctypes.c_size_t(size), self.handle)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    call("cuInit", 0)
    context = ctypes.c_void_p()
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    call("cuCtxPushCurrent_v2", context)
    main_stream, side = Stream(), Stream()
    size = 4 * COUNT
    weight, moment, gradient = (allocated(size) for _ in range(3))
    for column in (weight, moment):
        main_stream.write(column, zeros := np.zeros(COUNT, dtype=np.float32))
        call("cuStreamSynchronize", main_stream.handle)
    del zeros

    place = place_from_environment()
    session = _native.Session([f"replica={place.replica}", f"rank={place.rank}", "device=cuda:0"])
    tensor = session.add("w", 0, COUNT, 1, True, [(weight, size), (moment, size)])
    bucket = session.bucket([tensor], (gradient, size))
    session.allocate()
    assert session.weight(tensor) == (weight, size) and session.moment(tensor, 0) == (moment, size)
    assert session.gradient(tensor) == (gradient, size)
    session.join()
    order = given.out / f"kill.{place.replica}"
    while (begun := session.begin_step()) is not None:
        number, contributes, _, _, batch, *_ = begun
        if contributes:
            samples = sum(end - begin for begin, end in batch)
            values = np.arange(COUNT, dtype=np.float32) % (number + batch[0][0] % 97 + samples)
            side.write(gradient, values)
            session.all_reduce(bucket, side.handle.value)
            if order.exists() and number >= int(order.read_text().split(":")[1]):
                order.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
        updates = session.begin_update()
        if updates is None:
            continue
        written = []
        for _, first, count, step, address in updates:
            mean = main_stream.read(address, count)
            m = main_stream.read(moment + 4 * first, count) * np.float32(0.9) + mean
            w = main_stream.read(weight + 4 * first, count) - m / np.float32(step)
            written += [m, w]  # alive until the stream has come there
            main_stream.write(moment + 4 * first, m)
            main_stream.write(weight + 4 * first, w)
        leaves = contributes and (given.out / f"leave.{place.replica}").exists()
        if leaves:
            main_stream.stand(0.5)
        session.end_update(main_stream.handle.value)
        if leaves:  # the update ends after that
            session.leave()
        else:
            call("cuStreamSynchronize", main_stream.handle)
        if contributes:
            print(f"step {number} mean 0 digest {session.state_digest():016x}", flush=True)
        if leaves:
            assert session.position(), "the state of its last step is for a checkpoint"
            print("it has left", flush=True)
            return


if __name__ == "__main__":
    main()
