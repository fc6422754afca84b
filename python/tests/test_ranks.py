"""What the ranks of one replica decide by has to be one number on all of them."""

import logging
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import rejoin  # noqa: E402
from rejoin.torch import _leaving, _ranks  # noqa: E402
from rejoin.torch._metrics import Metrics  # noqa: E402


def ranks_of(store: object, count: int) -> list[_ranks.Ranks]:
    made = [_ranks.Ranks(0, _leaving.Leaving(), lambda: None) for _ in range(count)]
    for number, one in enumerate(made):
        one.rank, one._size, one._store = number, count, store
    return made


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


def test_a_mean_of_the_last_step_is_known_after_the_loop(monkeypatch):
    class Gone:  # whoever had the store has left
        def check(self, keys):
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
    with pytest.raises(rejoin.Unavailable, match="the store of this replica's torch.distributed: gone"):
        other.mean("loss", 2)
