"""Schedules of torch, and settings that change late: refused before anything is lost, or put back."""

import functools
import logging

import pytest

torch = pytest.importorskip("torch")

from test_session import Job, session  # noqa: E402

import rejoin  # noqa: E402
from rejoin.torch._fingerprint import fingerprint  # noqa: E402
from rejoin.torch._update import Rules  # noqa: E402


def attached(tmp_path, make=None, **rules):
    """Give a session, its optimizer, and what `make` makes of that before attach()."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    made, one = make and make(optimizer), session(tmp_path)
    one.attach(model, optimizer, **rules)
    return one, optimizer, made


def join(one, monkeypatch):
    for of in (one, one._buckets, one._updates):
        monkeypatch.setattr(of, "_native", Job(1))
    one.join()


SCHEDULES = [
    lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [30]),
    lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
    lambda optimizer: optimizer.param_groups[0].setdefault("initial_lr", 0.5),  # as other libraries' schedules do
]


@pytest.mark.parametrize("make", SCHEDULES)
@pytest.mark.parametrize("after", [False, True])
def test_a_schedule_of_torch_is_refused_before_the_first_step(tmp_path, monkeypatch, make, after):
    """It may change a rate in a far step alone, where all replicas would have to end with what they have trained."""
    one, optimizer, _ = attached(tmp_path, None if after else make)
    if after:
        make(optimizer)
    with pytest.raises(rejoin.InvalidArgument, match="a schedule of torch.optim.lr_scheduler .*give attach.. lr="):
        join(one, monkeypatch)
    assert not one._joined


@pytest.mark.parametrize("make", SCHEDULES)
@pytest.mark.parametrize("after", [False, True])
def test_a_schedule_of_torch_does_no_harm_where_attach_has_one(tmp_path, monkeypatch, make, after):
    one, optimizer, _ = attached(tmp_path, None if after else make, lr=lambda step: 0.25)
    if after:
        make(optimizer)
    join(one, monkeypatch)
    with pytest.raises(rejoin.InvalidArgument, match="due once in each step"):  # it is the session's
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 7.0
    one._updates.check(1)
    one._updates._set_lr(1)
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_a_schedule_that_is_made_after_join_is_refused_in_the_first_steps(tmp_path, monkeypatch):
    one, optimizer, _ = attached(tmp_path)
    join(one, monkeypatch)
    one._updates.check(1)
    torch.optim.lr_scheduler.StepLR(optimizer, 30)
    with pytest.raises(rejoin.InvalidArgument, match="a schedule of torch.optim.lr_scheduler"):
        one._updates.check(2)
    one._updates.check(3)  # no replica ends for what has changed nothing yet


@pytest.mark.parametrize("restored", [0, 1000])
@pytest.mark.parametrize("tensor", [False, True])
def test_a_setting_that_changes_late_is_put_back_and_the_log_has_an_error(
    tmp_path, monkeypatch, caplog, restored, tensor
):
    """ReduceLROnPlateau leaves no trace before. A replica that comes back begins with what attach() was given."""

    def rate_in_a_tensor(optimizer):
        optimizer.param_groups[0]["lr"] = torch.tensor(0.5)

    one, optimizer, _ = attached(tmp_path, rate_in_a_tensor if tensor else None)
    one._updates.settings.restored = restored
    group = optimizer.param_groups[0]
    held = group["lr"]
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    with pytest.raises(rejoin.InvalidArgument, match="momentum of .* has changed from 0.9 to 0.1"):
        group["momentum"] = 0.1
        one._updates.check(restored + 2)
    group["momentum"] = 0.9
    with caplog.at_level(logging.ERROR, "rejoin"):
        for step in range(restored + 3, restored + 10):
            plateau.step(1.0)
            one._updates.check(step)
            assert group["lr"] is held and float(held) == 0.5
        group["momentum"] = 0.1
        one._updates.check(restored + 10)
        assert group["momentum"] == 0.9
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 4, "of six changes of the rate the first, second and fourth"
    assert f"step {restored + 4}: the learning rate of group 0 has changed from 0.5 to 0.05" in told[0]
    assert "give attach() lr=" in told[0] and "put back (so far: 1)" in told[0]
    assert "momentum of the optimizer's group 0 has changed from 0.9 to 0.1" in told[3]


def test_a_step_of_an_optimizers_object_is_refused_by_attach(tmp_path):
    """Clipping by value, say, which a replica that catches up, and any with masters, would not do."""

    def patched(optimizer):
        own = optimizer.step
        optimizer.step = functools.wraps(own)(lambda closure=None: own(closure))

    def patched_after_a_schedule(optimizer):
        SCHEDULES[0](optimizer)
        patched(optimizer)

    def bound(optimizer):
        optimizer.step = torch.optim.SGD.zero_grad.__get__(optimizer)

    def compiled(optimizer):
        optimizer.step = torch.compile(optimizer.step, backend="eager")

    for make in (patched, patched_after_a_schedule, bound, compiled):
        with pytest.raises(rejoin.InvalidArgument, match="another step.. was put on .*a class of your own, derived"):
            attached(tmp_path, make, lr=lambda step: 0.5)
    one, optimizer, _ = attached(tmp_path)
    with pytest.raises(rejoin.InvalidArgument, match="or it is attached already"):
        session(tmp_path).attach(one._model, optimizer)


def warm(x, y):
    return x


class Shape:
    pass


def test_a_setting_is_told_alike_in_all_processes(tmp_path):
    """An object's address is its process's own, and replicas with other settings never join."""
    one, optimizer, _ = attached(tmp_path)

    def of(**settings):
        optimizer.param_groups[0].update(settings)
        return fingerprint(optimizer, Rules(), torch.device("cpu"), 0)

    told = of(shape=functools.partial(warm, 2), also=[Shape(), warm], then=warm)
    assert "0x" not in told and "partial(<function warm>, 2)" in told and "then=warm" in told
    assert of(also=[Shape(), warm]) == told
    assert of(shape=functools.partial(warm, 3)) != told
    assert "also={'a', 'b', 'c'}" in of(also={"b", "a", "c"})
