"""What ends a step's wait for its DataLoader's workers."""

import multiprocessing
import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from rejoin.errors import Cancelled  # noqa: E402
from rejoin.torch import Batches, _watch  # noqa: E402
from rejoin.torch._data import Fetcher  # noqa: E402
from rejoin.torch._leaving import Terminated  # noqa: E402

multiprocessing.set_forkserver_preload(["__main__", "torch"])  # once, and not in each worker
DATA = TensorDataset(torch.arange(101))


def looks_that_end(monkeypatch, ended):
    """Give what a fetcher's watch looks at, often: it raises what comes into `ended`."""
    monkeypatch.setattr(_watch, "_LOOKS_EVERY_SECONDS", 0.01)

    def look():
        for one in ended:
            raise one

    return look


@pytest.mark.parametrize("why", [Cancelled("this replica is out of the job"), Terminated()])
def test_a_wait_for_workers_that_stand_still_ends_where_it_is_in_vain(why, monkeypatch, caplog):
    batches, ended, killed = Batches(101, seed=1), [], threading.Event()
    loader = DataLoader(DATA, batch_sampler=batches, num_workers=1, multiprocessing_context="forkserver")
    fetcher = Fetcher(loader, look=looks_that_end(monkeypatch, ended))
    monkeypatch.setattr(_watch, "state_of", lambda pid: "T")
    monkeypatch.setattr(_watch, "_TOLD_AFTER_SECONDS", 0.0)

    class Given:
        """In the place of torch's iterator, whose worker gives one batch and stands still."""

        _workers = (SimpleNamespace(pid=7, kill=killed.set),)

        def __next__(self):
            ended.append(why)
            killed.wait(60)
            raise RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly")

    def begin():
        fetcher._sent.extend(batches.coming)
        fetcher._iterator = Given()

    monkeypatch.setattr(fetcher, "_begin", begin)
    assert fetcher.fetch(((0, 4),), lambda n: [((4, 8),)])[0].tolist() == batches.indices(((0, 4),))
    threads = set(threading.enumerate())
    with caplog.at_level("WARNING", "rejoin"), pytest.raises(type(why)):
        fetcher.fetch(((4, 8),), lambda n: [])
    (watch,) = set(threading.enumerate()) - threads
    assert killed.is_set() and "kill -CONT 7" in caplog.text and "workers are killed" in caplog.text
    fetcher.stop()
    watch.join(60)
    assert not watch.is_alive()


# Batches of strings come by a pipe, which takes less at once than one of these.
@pytest.mark.parametrize("data", [DATA, ["x" * 200_000] * 101], ids=["behind a batch", "in the midst of one"])
def test_a_stopped_worker_holds_up_a_replica_that_is_out_no_longer(data, monkeypatch):
    """Not even where torch waits for the memory of a batch that it has been told of."""
    batches, ended = Batches(101, seed=1), []
    loader = DataLoader(data, batch_sampler=batches, num_workers=1, multiprocessing_context="forkserver")
    fetcher = Fetcher(loader, look=looks_that_end(monkeypatch, ended))
    steps = [((4 * n, 4 * n + 4),) for n in range(8)]
    fetcher.fetch(steps[0], lambda n: steps[1:][:n])
    (worker,) = fetcher._iterator._workers
    deadline = time.monotonic() + 60
    while fetcher._iterator._worker_result_queue.empty():
        assert time.monotonic() < deadline
    os.kill(worker.pid, signal.SIGSTOP)
    ended.append(Cancelled("this replica is out of the job"))
    with pytest.raises(Cancelled, match="out of the job"):
        for number, ranges in enumerate(steps[1:], 2):
            fetcher.fetch(ranges, lambda n, number=number: steps[number:][:n])
    fetcher.stop()
    worker.join(60)
    assert not worker.is_alive()


@pytest.mark.parametrize("end", [Fetcher.stop, lambda _: _watch.kill_stopped()], ids=["are let go", "end with it"])
def test_stopped_workers_that_nobody_waits_for_are_killed(end):
    batches = Batches(101, seed=1)
    fetcher = Fetcher(DataLoader(DATA, batch_sampler=batches, num_workers=1, multiprocessing_context="forkserver"))
    fetcher.fetch(((0, 4),), lambda n: [((4, 8),)])
    (worker,) = fetcher._iterator._workers
    os.kill(worker.pid, signal.SIGSTOP)
    deadline = time.monotonic() + 60
    while _watch.state_of(worker.pid) != "T":
        assert time.monotonic() < deadline
    end(fetcher)
    worker.join(60)
    assert worker.exitcode == -signal.SIGKILL
    fetcher.stop()
