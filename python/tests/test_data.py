"""Which samples a batch has, and what workers fetch ahead."""

import inspect
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from rejoin.errors import InvalidArgument, Unavailable  # noqa: E402
from rejoin.torch import Batches, Session  # noqa: E402
from rejoin.torch._data import Fetcher  # noqa: E402

multiprocessing.set_forkserver_preload(["__main__", "torch"])  # once, and not in each worker
DATA = TensorDataset(torch.arange(101))


def values(batches, ranges):
    return [int(DATA[i][0]) for i in batches.indices(ranges)]


def test_each_data_epoch_has_each_sample_once_in_an_order_of_its_own():
    batches = Batches(101, seed=4)
    first, second = (batches.indices(((epoch * 101, epoch * 101 + 101),)) for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(101))
    assert first != second
    assert Batches(101, seed=4).indices(((50, 60),)) == first[50:60]
    assert Batches(101, shuffle=False).indices(((100, 103),)) == [100, 0, 1]


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_shard_has_its_part_of_ranges_that_go_over_ends_of_data_epochs(shuffle):
    order = [k for epoch in range(8) for k in Batches(7, 3, shuffle).indices(((7 * epoch, 7 * epoch + 7),))]
    for ranges in (((0, 6),), ((5, 29), (40, 46)), ((3, 3), (0, 1), (50, 55)), ((13, 15), (20, 22), (6, 8)), ()):
        wanted = [order[k] for begin, end in ranges for k in range(begin, end)]
        for shards in (1, 2, 3, 6):
            parts = [Batches(7, 3, shuffle, shard, shards).indices(ranges) for shard in range(shards)]
            assert sum(parts, []) == wanted and len({len(part) for part in parts}) == 1
            assert all(type(k) is int for k in parts[0])


def test_every_seed_of_64_bits_has_an_order_and_those_that_could_be_used_before_the_one_that_they_had():
    """Jobs that are under way go on with another release, also from a checkpoint in the midst of a data epoch."""

    def order(seed):
        return Batches(7, seed=seed).indices(((0, 14),))

    assert order(0) == [4, 0, 5, 3, 2, 6, 1, 0, 6, 1, 3, 5, 2, 4]
    assert order(-5) == [4, 1, 3, 5, 6, 0, 2, 6, 3, 0, 2, 4, 5, 1]
    assert order((1 << 32) - 1) == [2, 6, 4, 0, 5, 3, 1, 6, 1, 3, 0, 5, 4, 2]
    most = (1 << 64) // 1_000_003
    for seed in (1 << 32, 1_800_000_000_000, most - 1, -(1 << 63) // 1_000_003 + 1):  # a time in milliseconds, say
        first = torch.randperm(7, generator=torch.Generator().manual_seed(seed * 1_000_003))
        assert order(seed)[:7] == first.tolist(), seed
    large = [most, 1 << 46, torch.default_generator.initial_seed() | 1 << 46, -(1 << 44), 1 << 63, (1 << 64) - 1]
    orders = {tuple(Batches(997, seed=seed).indices(((0, 997),))) for seed in (0, *large)}
    assert len(orders) == len(large) + 1
    assert order(-(1 << 63)) == order(1 << 63), "as torch has it"
    late = 7 * 1_000_002
    assert sorted(Batches(7, seed=most).indices(((late, late + 7),))) == list(range(7)), "in far data epochs, too"
    for seed, told in (
        (1 << 64, "of 64 bits, such as 0"),
        (-(1 << 63) - 1, "64 bits"),
        (0.5, "whole"),
        (None, "whole"),
    ):
        with pytest.raises(InvalidArgument, match=rf"seed {seed} of batches.*{told}"):
            Batches(7, seed=seed)
    told = []
    for seed in (4, 1 << 40, 1 << 60):
        Batches(7, seed=seed).tell(told, joined=False)
    assert told[0] == "data of 7 samples, seed 4, shuffle True, shards 1", "as other releases tell it"
    assert "seed 1099511627776, shuffle" in told[1]
    assert "seed 1152921504606846976 (its hash), shuffle" in told[2], "as none does that has another order"
    assert Batches(3, seed=None, shuffle=False).indices(((1, 3),)) == [1, 2]


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_fetch_exactly_what_the_plan_says_and_a_step_gets_its_samples_whatever_was_expected(workers):
    batches = Batches(101, seed=1)
    loader = DataLoader(
        DATA, batch_sampler=batches, num_workers=workers, multiprocessing_context="forkserver" if workers else None
    )
    fetcher = Fetcher(loader)
    # By plan: three replicas; one of them is lost, and what it had goes out first; two share what was three's.
    plans = [[((12 * n, 12 * n + 4),) for n in range(40)]]
    plans += [[((16, 20), (164, 168)), *[((168 + 8 * n, 172 + 8 * n),) for n in range(40)]]]
    plans += [[((600 + 12 * n, 606 + 12 * n),) for n in range(40)]]
    for plan in plans:
        for number, ranges in enumerate(plan[:12]):
            coming = plan[number + 1 :]
            got = fetcher.fetch(ranges, lambda steps, coming=coming: coming[:steps])
            assert got[0].tolist() == values(batches, ranges)
    fetcher.stop()
    if workers:
        assert (fetcher.hits, fetcher.misses) == (33, 3), "only the first step of a plan may come unexpected"


def test_workers_of_which_nothing_is_expected_any_more_are_started_again_when_it_is():
    batches = Batches(101, seed=1)
    loader = DataLoader(DATA, batch_sampler=batches, num_workers=1, multiprocessing_context="forkserver")
    fetcher = Fetcher(loader)
    steps = [((4 * n, 4 * n + 4),) for n in range(12)]
    for number, ranges in enumerate(steps):
        known = steps[number + 1 :] if number > 3 else []
        assert fetcher.fetch(ranges, lambda n, known=known: known[:n])[0].tolist() == values(batches, ranges)
    fetcher.stop()
    assert fetcher.hits == 7


@pytest.mark.parametrize("expected", [True, False])
def test_persistent_workers_that_have_died_are_started_again(expected):
    batches = Batches(101, seed=1)
    loader = DataLoader(
        DATA, batch_sampler=batches, num_workers=1, multiprocessing_context="forkserver", persistent_workers=True
    )
    fetcher = Fetcher(loader)
    steps = [((4 * n, 4 * n + 4),) for n in range(8)]
    for number, ranges in enumerate(steps):
        known = steps[number + 1 :] if expected or number not in (2, 3) else []
        got = fetcher.fetch(ranges, lambda n, known=known: known[:n])
        assert got[0].tolist() == values(batches, ranges)
        if number == 3:
            (worker,) = multiprocessing.active_children()
            worker.kill()
            worker.join()
    assert fetcher.hits >= 5
    fetcher.stop()
    assert not multiprocessing.active_children()


# Where a signal's handler may raise: while torch has taken a batch, behind that, or while workers begin.
@pytest.mark.parametrize("where", ["before", "behind", "begin"])
def test_what_is_raised_in_the_midst_of_a_fetch_shifts_no_data(where, monkeypatch):
    batches, begun = Batches(101, seed=1), []
    loader = DataLoader(DATA, batch_sampler=batches, num_workers=1, multiprocessing_context="forkserver")
    fetcher = Fetcher(loader)

    class Given:
        """In the place of torch's iterator: it gives what the workers were sent, in order."""

        def __init__(self) -> None:
            self.sent = iter(batches)
            self.ahead = [next(self.sent) for _ in range(2)]
            begun.append(self)
            if where == "begin" and len(begun) == 1:
                raise KeyboardInterrupt

        def __iter__(self):
            return self

        def __next__(self):
            if where == "before" and stops:
                self.ahead.pop(0)
                stops.pop()
                raise KeyboardInterrupt
            self.ahead.append(next(self.sent, None))
            return [torch.tensor(self.ahead.pop(0))]

    class Sent(type(fetcher._sent)):
        def popleft(self):
            if where == "behind" and stops:
                stops.pop()
                raise KeyboardInterrupt
            return super().popleft()

    monkeypatch.setattr(type(loader), "__iter__", lambda _: Given())
    fetcher._sent = Sent()
    stops, steps, interrupted = [], [((4 * n, 4 * n + 4),) for n in range(12)], 0
    for number, ranges in enumerate(steps):
        if number == 5 and where != "begin":
            stops.append(1)
        for _ in range(2):  # the step is given again
            try:
                got = fetcher.fetch(ranges, lambda n, number=number: steps[number + 1 :][:n])
                break
            except KeyboardInterrupt:
                interrupted += 1
        assert got[0].tolist() == values(batches, ranges), number
    assert (interrupted, len(begun), fetcher.misses) == (1, 2, 2)


def test_what_the_data_set_raises_costs_no_workers(monkeypatch):
    batches = Batches(101, seed=1)
    fetcher = Fetcher(DataLoader(DATA, batch_sampler=batches, num_workers=1, multiprocessing_context="forkserver"))
    stopped = []
    monkeypatch.setattr(fetcher, "stop", lambda: stopped.append(1))
    for _ in range(2):
        with monkeypatch.context() as within, pytest.raises(KeyError):
            within.setattr(fetcher._batches, "indices", {}.__getitem__)
            fetcher.fetch(((0, 4),), lambda n: [])
    assert fetcher.fetch(((0, 4),), lambda n: [])[0].tolist() == values(batches, ((0, 4),)) and not stopped


DIES = RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly")
FULL = RuntimeError("Caught RuntimeError in DataLoader worker process 0. unable to allocate shared memory(shm)")


# As those of a script do that runs from its top in each of them, and those that have no room for a batch.
@pytest.mark.parametrize(
    "last, told", [(DIES, "pid.s. 7.*__name__ == '__main__'"), (FULL, "unable to allocate.*/dev/shm: give it more")]
)
def test_workers_that_fail_again_and_again_end_the_trainer(last, told, monkeypatch):
    batches = Batches(101, seed=1)
    loader = DataLoader(DATA, batch_sampler=batches, num_workers=1, multiprocessing_context="forkserver")
    fetcher = Fetcher(loader)
    gives = iter([DIES, FULL, "a batch", DIES, ValueError("no such sample"), last])

    def begin() -> None:
        fetcher._sent.extend(batches.coming)
        fetcher._iterator = given()

    def given():
        for one in gives:
            if isinstance(one, Exception):
                raise one
            yield one

    monkeypatch.setattr(fetcher, "_begin", begin)
    steps = [((4 * n, 4 * n + 4),) for n in range(12)]
    with pytest.raises(Unavailable, match=f"failed 3 times without giving anything: .*{told}"):
        for number, ranges in enumerate(steps):
            fetcher.fetch(ranges, lambda n, number=number: steps[number + 1 :][:n])
    assert next(gives, None) is None and fetcher.hits == 1


def test_a_process_that_runs_the_script_once_more_has_no_session(monkeypatch):
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(InvalidArgument, match="runs the script from its top: put .* __name__ == '__main__'"):
        Session(replica=0, rank=0, socket="/nowhere")


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("persistent", [False, True])
def test_nobody_else_takes_the_steps_data_out_of_the_loader(workers, persistent, recwarn):
    """A look at a batch of it would shift all that the workers have been sent since."""
    if persistent and not workers:
        return
    batches = Batches(101, seed=1)
    loader = DataLoader(
        DATA, batch_sampler=batches, num_workers=workers, persistent_workers=persistent,
        multiprocessing_context="forkserver" if workers else None,
    )  # fmt: skip
    fetcher = Fetcher(loader)
    steps = [((4 * n, 4 * n + 4),) for n in range(8)]
    for number, ranges in enumerate(steps):
        got = fetcher.fetch(ranges, lambda n, number=number: steps[number + 1 :][:n])
        assert got[0].tolist() == values(batches, ranges)
        if number == 3:
            with pytest.raises(InvalidArgument, match="session.steps.. alone.*make another one"):
                next(iter(loader))
            with pytest.raises(InvalidArgument, match="session.steps.. alone"):
                list(loader)
    fetcher.stop()
    assert fetcher.hits == (7 if workers else 0)
    assert not recwarn.list, [str(one.message) for one in recwarn.list]


def test_loaders_over_one_sampler_have_their_own_workers_batches():
    batches = Batches(101, seed=1)
    fetchers = [
        Fetcher(DataLoader(DATA, batch_sampler=batches, num_workers=1, multiprocessing_context="forkserver"))
        for _ in range(2)
    ]
    steps = [((4 * n, 4 * n + 4),) for n in range(8)]
    for number, ranges in enumerate(steps):
        got = fetchers[number // 2 % 2].fetch(ranges, lambda n, number=number: steps[number + 1 :][:n])
        assert got[0].tolist() == values(batches, ranges), number
    for fetcher in fetchers:
        fetcher.stop()


def test_loaders_that_would_train_samples_twice_keep_connections_or_interrupt_are_refused():
    with pytest.raises(InvalidArgument, match="batch_sampler=session.batches"):
        Fetcher(DataLoader(DATA, batch_size=4))
    for method, told in (("fork", "keep this process's connections"), ("spawn", "raises an error wherever it is")):
        with pytest.raises(InvalidArgument, match=f"{told}.*forkserver"):
            Fetcher(DataLoader(DATA, batch_sampler=Batches(101), num_workers=1, multiprocessing_context=method))
    if "in_order" in inspect.signature(DataLoader.__init__).parameters:  # since torch 2.6
        unordered = {"num_workers": 2, "multiprocessing_context": "forkserver", "in_order": False}
        with pytest.raises(InvalidArgument, match="in_order=True"):
            Fetcher(DataLoader(DATA, batch_sampler=Batches(101), **unordered))
    with pytest.raises(InvalidArgument, match="0 samples"):
        Batches(0)


# conda's Python has no os.pidfd_open; a kernel of before 5.3, or a container that forbids the call, gives an error.
SYSTEMS = {
    "Python has the call": "",
    "only the kernel has it": "import os; del os.pidfd_open",
    "nobody has it": "import os; os.pidfd_open = lambda pid: (_ for _ in ()).throw(PermissionError(1, 'no'))",
}
KILLED = """
import multiprocessing, time, torch
from torch.utils.data import DataLoader, TensorDataset
from rejoin.torch import Batches
from rejoin.torch._data import Fetcher

multiprocessing.set_forkserver_preload(["torch"])  # once, and not in each worker
loader = DataLoader(TensorDataset(torch.arange(101)), batch_sampler=Batches(101), num_workers=2,
                    multiprocessing_context="forkserver")
fetcher = Fetcher(loader)
steps = [((4 * n, 4 * n + 4),) for n in range(3)]
for number, step in enumerate(steps[:2]):
    fetcher.fetch(step, lambda count, known=steps[number + 1 :]: known[:count])
assert fetcher.hits == 1
print(*[worker.pid for worker in fetcher._iterator._workers], flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_workers_of_a_trainer_that_is_killed_end_with_it(system, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(SYSTEMS[system])  # of the workers, too
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    trainer = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        workers = [int(pid) for pid in trainer.stdout.readline().split()]
        assert len(workers) == 2
    finally:
        trainer.send_signal(signal.SIGKILL)
        if system == "nobody has it":  # they see that it has ended before anybody has waited for it
            os.waitid(os.P_PID, trainer.pid, os.WEXITED | os.WNOWAIT)
        else:
            trainer.wait()
        trainer.stdout.close()
    deadline = time.monotonic() + 60
    while any(os.path.exists(f"/proc/{pid}") for pid in workers):
        assert time.monotonic() < deadline, "they have outlived it"
        time.sleep(0.05)
    trainer.wait()


@pytest.mark.parametrize(("methods", "told"), [(["fork", "spawn"], "are forked"), (["forkserver", "fork"], None)])
def test_workers_begin_as_python_begins_processes_where_nobody_says(monkeypatch, methods, told):
    """From Python 3.14 on by a server."""
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: methods)
    monkeypatch.setattr(torch.multiprocessing, "get_start_method", lambda allow_none=False: None)
    loader = DataLoader(DATA, batch_sampler=Batches(101), num_workers=1)
    if told is None:
        Fetcher(loader)
    else:
        with pytest.raises(InvalidArgument, match=f"DataLoader workers.*{told[4:]}"):
            Fetcher(loader)
