"""What the ranks of one replica decide by has to be one number on all of them."""

import logging
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import rejoin  # noqa: E402
from rejoin.torch import _leaving, _loop, _ranks  # noqa: E402
from rejoin.torch._metrics import Metrics  # noqa: E402


def ranks_of(store: object, count: int, check=lambda: None) -> list[_ranks.Ranks]:
    made = [_ranks.Ranks(0, _leaving.Leaving(), check) for _ in range(count)]
    for number, one in enumerate(made):
        one.rank, one._size, one._store = number, count, store
    return made


def test_processes_of_a_torchrun_that_are_no_ranks_of_the_replica_hear_it(monkeypatch):
    """As where rejoin-run, without --ranks, starts a torchrun of the script's own: each takes itself for rank 0."""
    world = torch.distributed
    monkeypatch.setattr(world, "is_initialized", lambda: True)
    monkeypatch.setattr(world, "get_world_size", lambda: 2)
    monkeypatch.setattr(world.distributed_c10d, "_get_default_store", world.HashStore)

    def ranks(number: int, by_torch: int, count: int | None) -> _ranks.Ranks:
        monkeypatch.setattr(world, "get_rank", lambda: by_torch)
        monkeypatch.delenv("REJOIN_RANKS", raising=False)
        if count is not None:
            monkeypatch.setenv("REJOIN_RANKS", str(count))
        return _ranks.Ranks(number, _leaving.Leaving(), lambda: None)

    for number, by_torch, count, told in (
        (0, 1, 1, "rank 1 of 2 by torch.distributed, and rank 0 of its replica, which has 1 "),
        (0, 0, 1, "rank 0 of 2 by torch.distributed, and rank 0 of its replica, which has 1 "),
        (0, 1, None, "rank 1 of 2 by torch.distributed, and rank 0 of its replica"),
    ):
        with pytest.raises(rejoin.InvalidArgument, match=f"{told}.*rejoin-run --ranks 2 .*python train.py"):
            ranks(number, by_torch, count)
    for number, count in ((1, 2), (0, None)):
        assert ranks(number, number, count).several


def metrics_of(store: object, *names: list[str]) -> list[Metrics]:
    """Of the ranks that were given these."""
    made = [Metrics(of, torch.device("cpu"), one) for of, one in zip(names, ranks_of(store, len(names)), strict=True)]
    for one in made:
        one.tensor = SimpleNamespace(reduced=one.values) if one.names else None
    return made


def test_a_mean_is_one_number_on_all_ranks_whoever_asks_first():
    ranks = metrics_of(torch.distributed.HashStore(), ["loss"], ["accuracy", "loss"], [])
    losses = {1: (0.1, 0.7), 2: (1e-3, 3.3)}
    with ThreadPoolExecutor() as threads:
        for step, (first, second) in losses.items():
            ranks[0].record({"loss": first})
            ranks[0].tell(step)
            ranks[2].tell(step)
            asked = [threads.submit(one.mean, "loss", step) for one in (ranks[0], ranks[0], ranks[2])]
            ranks[1].record({"loss": second, "accuracy": step})
            ranks[1].tell(step)
            ranks[1].record({"loss": -1.0})  # of the step to come
            asked.append(threads.submit(ranks[1].mean, "loss", step))
            assert {one.result(60) for one in asked} == {(first + second) / 2}
            assert [one.mean("accuracy", step) for one in ranks] == [step] * 3, "a mean over those that have it"
    for one in ranks:
        with pytest.raises(rejoin.InvalidArgument, match="the mean of 'loss' is known after optimizer.step"):
            one.mean("loss", None)
        with pytest.raises(rejoin.InvalidArgument, match="'perplexity' is none of the metrics"):
            one.mean("perplexity", 2)


def test_a_rank_that_records_nothing_counts_and_is_named(caplog):
    one, other = metrics_of(torch.distributed.HashStore(), ["loss"], ["loss"])
    caplog.set_level(logging.ERROR, "rejoin")
    for step in (1, 2):
        one.record({"loss": 3.0})
        for rank in (one, other):
            rank.tell(step)
        assert one.mean("loss", step) == other.mean("loss", step) == 1.5
    assert [line.getMessage().partition(", and counts")[0] for line in caplog.records] == [
        "rank 1 of this replica has recorded no 'loss', which rank 0 has"
    ] * 2, "each rank has said so once"


class Asked:
    """A store that notes what it is asked for."""

    def __init__(self, store: object) -> None:
        self._store, self.of, self.with_ = store, [], []

    def __getattr__(self, name):
        def ask(*arguments):
            self.with_.append(arguments)
            self.of.append(name)
            return getattr(self._store, name)(*arguments)

        return ask


def test_however_many_ranks_each_asks_the_store_for_the_one_that_is_missing():
    count, store = 100, torch.distributed.HashStore()
    ranks = ranks_of(store, count)
    one, asked = ranks[0], Asked(store)
    one._store = asked
    for rank in ranks:
        rank.publish(1, 1.0)
    assert one.total(1, 1.0) == count
    assert asked.of == ["set", "check", "multi_get"]
    asked.of.clear()
    asked.with_.clear()
    with ThreadPoolExecutor() as threads:
        for number, rank in enumerate(ranks):
            if number not in (33, 77):
                rank.publish(2, 1.0)
        total = threads.submit(one.total, 2, 1.0)
        for late in (33, 77):
            while asked.with_[-2:] != [([f"sum/2/{late}"],)] * 2:
                assert not total.done()
            ranks[late].publish(2, 1.0)
        assert total.result(60) == count
    turns = [asked.with_.count(([f"sum/2/{late}"],)) for late in (33, 77)]
    assert len(asked.of) - sum(turns) < 20, "it looks for who is missing once for each, and by halves"


def test_a_rank_that_may_take_long_is_waited_for_and_named_while_it_does(caplog, monkeypatch):
    monkeypatch.setattr(_ranks, "LONGEST_WAIT_SECONDS", 0.05)
    caplog.set_level(logging.WARNING, "rejoin")
    one, other = ranks_of(torch.distributed.HashStore(), 2)
    with ThreadPoolExecutor() as threads:
        says = threads.submit(one.gather, "frozen", b"a", patient=True)
        while len(caplog.records) < 2:
            assert not says.done()
        other.say("frozen", b"b")
        assert says.result(60) == [b"a", b"b"]
    assert {line.getMessage().partition(" for ")[0] for line in caplog.records} == {
        "rank 1 of this replica has not told its 'frozen'"
    }
    caplog.clear()
    with ThreadPoolExecutor() as threads:  # rank 0 waits for another replica: its place is named, and what it waits for
        hears = threads.submit(other.first_says, "final 0", None, "whether it writes gpt.pt")
        while not caplog.records:
            assert not hears.done()
        assert one.first_says("final 0", lambda: True, "whether it writes gpt.pt") and hears.result(60)
    assert "rank 0 of this replica has not told whether it writes gpt.pt for 0 s: this one" in caplog.text


def test_a_mean_of_the_last_step_is_known_after_the_loop(monkeypatch):
    class Gone:  # whoever had the store has left
        def check(self, keys):
            raise torch.distributed.DistNetworkError("gone")

        def set(self, key, value):
            raise torch.distributed.DistNetworkError("gone")

    one, other = metrics_of(torch.distributed.HashStore(), ["loss"], ["loss"])
    for step in (1, 2):
        for rank in (one, other):
            rank.record({"loss": float(step)})
            rank.tell(step)
    one.keep()
    for rank in (one, other):
        monkeypatch.setattr(rank._ranks, "_store", Gone())
    assert one.mean("loss", 2) == 2.0
    other.keep()
    other.tell(3)  # its update goes on
    for step in (2, 3):
        with pytest.raises(rejoin.Unavailable, match="the store of this replica's torch.distributed: gone"):
            other._take(other._ranks, step)
    with pytest.raises(rejoin.Unavailable, match="gone"):
        other.mean("loss", 3)


def test_a_rank_that_leaves_alone_is_refused_there_or_on_those_that_go_on():
    one, other = ranks_of(torch.distributed.HashStore(), 2)
    with ThreadPoolExecutor() as threads:
        assert not one.leaves_after(7, wants=False)
        with pytest.raises(rejoin.InvalidArgument, match=r"leave.. on rank 1 .* step 7, and rank 0 has gone on.*mean"):
            other.leave_by_itself(7)
        leaves = threads.submit(other.leave_by_itself, 8)  # it is first, and waits for the other one
        while not other._store.check(["leaves/1"]):
            assert not leaves.done()
        with pytest.raises(rejoin.InvalidArgument, match="rank 1 .* has left the job after step 8, and rank 0 goes on"):
            one.leaves_after(8, wants=False)
        leaves.result(10)


def test_ranks_whose_scripts_leave_alike_wait_for_each_other():
    one, other = ranks_of(torch.distributed.HashStore(), 2)
    with ThreadPoolExecutor() as threads:
        leaves = threads.submit(one.leave_by_itself, 3)
        while not one._store.check(["leaves/0"]):
            assert not leaves.done()
        other.leave_by_itself(3)
        leaves.result(10)


def test_where_the_job_ends_a_rank_without_metrics_waits_for_those_that_have_some():
    one, other = ranks_of(torch.distributed.HashStore(), 2)

    def ends(ranks: _ranks.Ranks, names: list[str]) -> None:
        session = SimpleNamespace(
            _ranks=ranks, _in_step=False, _leaving=_leaving.Leaving(), _contributed=True, _beginning=False,
            _may_have_begun=False, _group=None,
            _native=SimpleNamespace(begin_step=lambda: None),
            _metrics=SimpleNamespace(names=names, keep=lambda: None),
        )  # fmt: skip
        assert _loop.begin_step(session) is None and session._finished

    with ThreadPoolExecutor() as threads:
        ended = threads.submit(ends, one, [])  # the first stage of a pipeline
        while not one._store.check(["leaves/0"]):
            assert not ended.done()
        ends(other, ["loss"])
        ended.result(10)


def test_sigterm_of_one_rank_lets_all_leave_after_the_next_step():
    one, other = ranks_of(torch.distributed.HashStore(), 2)
    for step in range(1, 12):
        assert not one.leaves_after(step, wants=False) and not other.leaves_after(step, wants=False)
    assert not other.leaves_after(12, wants=False)
    assert not one.leaves_after(12, wants=True)
    assert other.leaves_after(13, wants=False) and one.leaves_after(13, wants=True)
    assert [step for step in range(20) if one._store.check([f"after/{step}"])] == [11, 12, 13, 14], "few are kept"


def test_a_leave_that_is_refused_ends_the_part_in_the_job_all_the_same(monkeypatch):
    done = []

    def refused(step: int) -> None:
        done.append(f"leaves after {step}")
        raise rejoin.InvalidArgument("another rank goes on")

    session = SimpleNamespace(
        _in_step=True, _updated=True, _ended=False, _step=SimpleNamespace(number=3),
        _metrics=SimpleNamespace(keep=lambda: done.append("keeps")), _ranks=SimpleNamespace(leave_by_itself=refused),
    )  # fmt: skip
    monkeypatch.setattr(_loop, "end", lambda of: done.append("ends") if of is session else None)
    with pytest.raises(rejoin.InvalidArgument, match="goes on"):
        _loop.leave(session)
    assert done == ["keeps", "leaves after 3", "ends"]
