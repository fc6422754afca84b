"""Metrics: what is compared when replicas join, and what `record()` and `mean()` take and give."""

import math

import pytest

torch = pytest.importorskip("torch")

from test_session import session  # noqa: E402

import rejoin  # noqa: E402


def attached(tmp_path, metrics):
    model, one = torch.nn.Linear(2, 2), session(tmp_path)
    one.attach(model, torch.optim.AdamW(model.parameters()), metrics=metrics)
    return one


@pytest.mark.parametrize(
    ("metrics", "told"),
    [
        ({"loss", "accuracy"}, "metrics={.*}: give a list of names, .* the same order on all replicas"),
        (frozenset(["loss"]), "metrics=frozenset.*: give a list of names"),
        ([1, 2], r"metrics=\[1, 2\]: names are texts"),
        (None, "metrics=None: give a list of names"),
        ("loss", r"metrics='loss': give a list of names, metrics=\['loss'\]"),
    ],
)
def test_metrics_without_an_order_or_a_name_are_refused(tmp_path, metrics, told):
    with pytest.raises(rejoin.InvalidArgument, match=told):
        attached(tmp_path, metrics)


def test_names_of_metrics_and_their_order_are_compared_when_replicas_join(tmp_path, monkeypatch):
    """Their means are told apart by their places alone: one replica's loss would be added to another's accuracy."""
    told = []
    for metrics in (["loss", "accuracy"], ("loss", "accuracy"), ["accuracy", "loss"], ["loss", "norm"], []):
        one = attached(tmp_path, metrics)
        monkeypatch.setattr(one, "_native", type("N", (), {"set_fingerprint": told.append, "join": lambda *_: None}))
        one.join()
    assert '; metrics ["loss", "accuracy"]' in told[0] and len(set(told)) == 4 and told[0] == told[1]
    assert "metrics" not in told[-1], "as before there were names in it"


def test_what_is_recorded_for_the_next_step_is_not_in_the_mean_of_this_one(tmp_path):
    one = attached(tmp_path, ["loss", "norm"])
    metrics = one._metrics
    metrics.record({"loss": 3.0, "norm": torch.tensor([2.0])})
    metrics.tensor.settle(metrics.tensor.columns[0], torch.tensor([1.0, 4.0], dtype=torch.float64))
    metrics.tensor.refresh()
    metrics.record({"loss": 7.0})
    assert metrics.mean("loss", 1) == 1.0 and metrics.mean("norm", 1) == 4.0
    assert metrics.values.tolist() == [7.0, 4.0], "what it adds to the next step's mean"


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (torch.ones(2), r"record\(norm=…\) was given a tensor of shape \(2,\) and type torch.float32: a metric is"),
        (torch.ones(1, dtype=torch.complex64), "a tensor of shape .1,. and type torch.complex64"),
        (1j, "was given 1j: a metric is a real number"),
        ("x", "was given 'x': a metric is a real number"),
        (None, "was given None"),
        pytest.param(10**400, "was given 1000", id="huge"),
    ],
)
def test_what_is_no_number_is_refused_and_nothing_of_it_recorded(tmp_path, value, told):
    one = attached(tmp_path, ["loss", "norm"])
    with pytest.raises(rejoin.InvalidArgument, match=told):
        one._metrics.record({"loss": 1.0, "norm": value})
    with pytest.raises(rejoin.InvalidArgument, match="'other' is none of the metrics"):
        one._metrics.record({"loss": 1.0, "other": 2.0})
    assert one._metrics.values.tolist() == [0.0, 0.0] and not one._metrics._recorded
    one._metrics.record({"loss": math.inf, "norm": torch.tensor(2)})
    assert one._metrics.values.tolist() == [math.inf, 2.0]
