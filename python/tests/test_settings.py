"""Schedules of torch, and settings that change late: refused before anything is lost, or put back."""

import functools
import json
import logging
import math
import re
from types import SimpleNamespace

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


def test_a_hook_that_comes_late_is_taken_off_and_the_log_has_an_error(tmp_path, caplog):
    """Such as a profiler's: all replicas would end in the same step, with all that was trained."""
    called = []
    one, optimizer, _ = attached(tmp_path)
    one._updates.check(3)
    for step in range(4, 10):
        handle = optimizer.register_step_post_hook(lambda *_: called.append(1))
        optimizer.register_step_pre_hook(lambda *_: called.append(1))
        one._updates.check(step)
        one._updates._optimizer_step()
    handle.remove()  # as whoever has put it there may do
    told = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert not called and [message.split(":")[0] for message in told] == ["step 4", "step 5", "step 7"]
    assert "the optimizer has hooks on step()" in told[0] and "They were taken off (so far: 1): all" in told[0]


def decay(step):
    return 0.5 * (1 - step / 50)  # below 0 from step 51 on


def listed(step):
    return [0.25, 0.5, 0.125][step - 1] if step < 60 else float("nan")


def now_and_then(step):
    return step / 100 if step in (1, 2, 10, 11, 20) else None


@pytest.mark.parametrize(
    ("schedule", "good", "told"),
    [
        (decay, {51: 50, 52: 50, 1000: 50}, r"step 51: lr\(51\) of attach.. is -0.01.* it is to be a number of 0 or"),
        (listed, {4: 3, 5: 3, 59: 3, 60: 3, 70: 3}, r"step 4: lr\(4\) of attach.. raised IndexError: list index out"),
        (now_and_then, {3: 2, 9: 2, 10: 10, 12: 11, 19: 2, 21: 20, 300: 2}, r"lr\(3\) of attach.. is None"),
    ],
)
def test_a_schedule_that_ends_late_leaves_the_last_good_rate_on_all_replicas(
    tmp_path, monkeypatch, caplog, schedule, good, told
):
    """All would end in one step, with all that they have trained. Those that catch up begin in the midst of it."""
    one, optimizer, _ = attached(tmp_path, lr=schedule)
    group = optimizer.param_groups[0]
    with caplog.at_level(logging.ERROR, "rejoin"):
        for step in range(1, max(good) + 1):
            one._updates.check(step)
            one._updates._set_lr(step)
            if step in good:
                assert group["lr"] == schedule(good[step]), step
    late = [record.getMessage() for record in caplog.records]
    times = (
        sum(1 for step in range(1, max(good) + 1) if step not in (1, 2, 10, 11, 20))
        if schedule is now_and_then
        else None
    )
    assert re.search(told, late[0]) and f"The rate of step {min(good.values())} was kept (so far: 1)" in late[0], late
    assert len(late) == int(math.log2(times or max(good) - min(good.values()))) + 1, (
        "at the first, second, fourth … time"
    )
    for begin in good:
        back, optimizer, _ = attached(tmp_path, lr=schedule)
        caplog.clear()
        for step in (begin, begin + 5, begin - 1, begin, begin):  # parts of the state are of different steps
            back._updates.check(step + 2)
            back._updates._set_lr(step)
        assert optimizer.param_groups[0]["lr"] == schedule(good[begin]), begin
        told = [re.match(r"step (\d+):", record.getMessage()) for record in caplog.records]
        assert [int(step[1]) for step in told] == [step for step in (begin, begin + 5) if good.get(step) != step]


@pytest.mark.parametrize("end", [1, 2, 50, 64, 4097, 500_000, 999_998])
def test_the_last_good_rate_is_found_by_few_questions(tmp_path, monkeypatch, end):
    """All replicas wait for them, in each late step, and most of all for those of one that comes back."""
    asked = []

    def schedule(step):
        asked.append(step)
        return step / 1e6 if step <= end else None

    back, optimizer, _ = attached(tmp_path, lr=schedule)
    asked.clear()
    for step in (1_000_000, *range(1_000_001, 1_002_049)):
        back._updates._set_lr(step)
        assert optimizer.param_groups[0]["lr"] == end / 1e6, step
        assert len(asked) <= 64 + 4 * (step - 1_000_000), step


def test_a_hole_in_a_schedule_leaves_the_rate_of_before_it(tmp_path):
    """Such as a division by zero; and one may have rates from a late step on alone, in a job that goes on from it."""

    def schedule(step):
        return 0.5 / (step % 1024) if step > 5000 else None

    for hole in range(6 * 1024, 20_000, 1024):
        one, optimizer, _ = attached(tmp_path, lr=schedule)
        one._updates._set_lr(hole)
        assert optimizer.param_groups[0]["lr"] == schedule(hole - 1), hole
    one, optimizer, _ = attached(tmp_path, lr=lambda step: 0.5 if 5000 < step < 6000 else -step / 1e6)
    one._updates._set_lr(7000)
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("restored", [0, 1000])
def test_a_schedule_that_gives_no_rate_is_refused_in_the_first_steps(tmp_path, monkeypatch, restored):
    asked = []
    one, _, _ = attached(tmp_path, lr=lambda step: asked.append(step) or (-1.0 if step > 1000 else [1.0, 1.0]))
    one._updates.settings.restored = restored
    for step in (restored + 1, restored + 2):
        with pytest.raises(
            rejoin.InvalidArgument, match=rf"lr.{step}. of attach.. is .*or one for each of the .* 1 group"
        ):
            one._updates.check(step)
    with pytest.raises(rejoin.InvalidArgument, match="lr.7. of attach.. is"):  # no step before it has one
        one._updates._set_lr(7)


@pytest.mark.parametrize(
    "raised",
    [MemoryError, RecursionError, OSError, ImportError, json.JSONDecodeError("cut off", "", 0), RuntimeError("CUDA")],
)
def test_what_fails_in_this_process_alone_ends_it(tmp_path, raised):
    """The other replicas have the step's rate: with that of before this one would differ from them."""

    def schedule(step):
        if step == 9:
            raise raised
        return 0.5

    one, _, _ = attached(tmp_path, lr=schedule)
    with pytest.raises(raised if isinstance(raised, type) else type(raised)):
        one._updates._set_lr(9)


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


class Borrowing(torch.optim.Optimizer):
    """Has the groups of another one, as wrappers do."""

    def __init__(self, parameters):
        self.hidden = SimpleNamespace(of=torch.optim.AdamW(parameters))

    @property
    def param_groups(self):
        return self.hidden.of.param_groups


def test_an_optimizer_without_groups_of_its_own_is_refused(tmp_path):
    model = torch.nn.Linear(2, 2)
    with pytest.raises(rejoin.InvalidArgument, match="Borrowing has no 'param_groups' of its own.*attach that one"):
        session(tmp_path).attach(model, Borrowing(model.parameters()))
