"""Steps that change nothing, since their mean gradient is no number."""

import logging

import pytest

torch = pytest.importorskip("torch")

from test_session import session  # noqa: E402


def attached(tmp_path, **rules):
    model, one = torch.nn.Linear(3, 1), session(tmp_path)
    one.attach(model, torch.optim.SGD(model.parameters(), lr=0.5), **rules)
    return one, model


def take(one, step, gradient, parts=1):
    """Apply a step that has reduced this for all gradients, and what is equal on all replicas for the rest."""
    with torch.no_grad():
        updates = []
        for tensor in one._tensors:
            tensor.reduced.copy_(tensor.columns[0]) if not tensor.is_parameter else tensor.reduced.fill_(gradient)
            size = -(-tensor.count // parts) if tensor.elementwise else tensor.count
            for first in range(0, tensor.count, size):
                address = tensor.reduced.data_ptr() + first * tensor.gradient_dtype.itemsize
                updates.append((tensor.index, first, min(size, tensor.count - first), step, address))
        one._updates.look(step)
        one._updates.apply(step, updates)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_job_goes_on_behind_any_number_of_steps_that_were_skipped(tmp_path, caplog, parts):
    """As where a broken GPU gives NaN until somebody comes. 2^-1075 is 0, and 0 times 2^154 is no float32."""
    one, model = attached(tmp_path, loss_scale=65536)
    before = model.weight.clone()
    with caplog.at_level(logging.INFO, "rejoin"):
        for step in range(1, 1201):
            take(one, step, torch.nan, parts)
        scale = 2.0 ** float(one._loss_scale[0])
        assert torch.equal(model.weight, before) and scale == 2.0**-14
        take(one, 1201, 0.0, parts)
        assert torch.equal(model.weight, before)
        take(one, 1202, scale, parts)
        assert torch.equal(model.weight, before - 0.5) and one._loss_scale.tolist() == [-14, 2]
        take(one, 1203, torch.inf, parts)
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    steps = [*(1 << power for power in range(11)), 1203]
    assert [message.split(":")[0] for _, message in told] == [f"step {step}" for step in steps]
    assert [level for level, _ in told] == ["INFO"] * 3 + ["WARNING"] * 8 + ["INFO"], "a scale finds itself"
    assert "(8 in a row, at a loss scale of 512, which is halved down to 6.10352e-05)" in told[3][1]


def test_what_is_skipped_without_a_scale_is_told(tmp_path, caplog):
    one, model = attached(tmp_path, skip_nonfinite=True)
    with caplog.at_level(logging.INFO, "rejoin"):
        for step, gradient in enumerate([1.0, torch.nan, torch.inf, torch.nan, 1.0, torch.nan], 1):
            take(one, step, gradient)
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in told] == ["WARNING"] * 3
    for (_, message), step, row in zip(told, (2, 3, 6), (1, 2, 1), strict=True):
        assert message.startswith(f"step {step}: the mean gradient has an infinity or a NaN, and the step changes noth")
        assert f"on all replicas ({row} in a row)" in message
