"""What the others hear that a replica is busy with."""

import math

import pytest

torch = pytest.importorskip("torch")

from test_session import session  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from rejoin import errors  # noqa: E402
from rejoin.torch import Batches, _busy  # noqa: E402
from rejoin.torch._busy import Busy  # noqa: E402
from rejoin.torch._data import Fetcher  # noqa: E402


class Native:
    def __init__(self):
        self.said, self.now = [], None

    def busy(self, limit_ms, reason, how="busy"):
        if self.now:
            raise errors.InvalidArgument("busy() twice")
        self.now = reason
        self.said.append((how, limit_ms, reason))

    def busy_in_step(self, limit_ms, reason):
        self.busy(limit_ms, reason, "in step")

    def done(self):
        assert self.now
        self.now = None
        self.said.append("done")


class Reads:
    """A data set of which one sample takes long, as it says."""

    def __init__(self, busy):
        self.busy = busy

    def __len__(self):
        return 8

    def __getitem__(self, number):
        if number == 2:
            with self.busy.with_scripts("a large file", 30):
                return number
        return number


DATA = ("in step", 120_000, "its data")


def test_data_without_workers_is_waited_for_and_may_say_for_what_itself():
    native = Native()
    busy = Busy(native)
    loader = DataLoader(Reads(busy), batch_sampler=Batches(8, shuffle=False))
    got = Fetcher(loader, busy.with_ours).fetch(((0, 4),), lambda _: [])
    assert got.tolist() == [0, 1, 2, 3]
    assert native.said == [DATA, "done", ("busy", 30_000, "a large file"), "done", DATA, "done"]


def test_what_the_script_is_busy_with_covers_what_the_session_is():
    native = Native()
    busy = Busy(native)
    with busy.with_scripts("an evaluation", 60):
        with busy.with_ours("its DataLoader's workers", 120):
            assert native.now == "an evaluation"
        assert native.now == "an evaluation"
        with busy.with_scripts("a large file", 30):
            assert native.now == "an evaluation"
        assert native.now == "an evaluation"
    with busy.with_ours("its DataLoader's workers", 120), pytest.raises(OSError), busy.with_scripts("a file", 60):
        raise OSError
    assert native.said == [
        ("busy", 60_000, "an evaluation"), "done",
        ("busy", 120_000, "its DataLoader's workers"), "done", ("busy", 60_000, "a file"), "done",
        ("busy", 120_000, "its DataLoader's workers"), "done",
    ]  # fmt: skip


def test_what_ends_a_block_is_not_replaced_by_the_end_of_the_session():
    """Such as SIGTERM's own exception, whose status is 0, behind leave()."""

    def left():
        raise errors.Cancelled("this session has left the job")

    for within in ("with_scripts", "with_ours"):
        for raised, told in ((SystemExit(0), SystemExit), (None, errors.Cancelled)):
            native = Native()
            native.done = left
            with pytest.raises(told), getattr(Busy(native), within)("compiling", 60):
                if raised is not None:
                    raise raised


@pytest.mark.parametrize(
    ("reason", "seconds", "told"),
    [
        ("it evaluates", math.inf, "'it evaluates', seconds=inf.: they are to be above 0, and 604800 at most"),
        ("it evaluates", math.nan, "seconds=nan.: they"),
        ("it evaluates", -1, "seconds=-1.: they"),
        ("it evaluates", 604801, "seconds=604801.: they"),
        ("it evaluates", "60", "seconds='60': it is to be a number"),
        (None, 60, "busy.None.: the reason is a text"),
    ],
)
def test_what_nobody_can_be_busy_with_is_refused_before_anything_ends_for_it(reason, seconds, told):
    native = Native()
    busy = Busy(native)
    with busy.with_ours("its data", 120):
        with pytest.raises(errors.InvalidArgument, match=told), busy.with_scripts(reason, seconds):
            pass
        assert native.now == "its data" and len(native.said) == 1
    with busy.with_scripts("it evaluates", 604800):
        assert native.said[-1] == ("busy", 604_800_000, "it evaluates")


def test_the_script_is_busy_for_no_longer_than_it_has_said(monkeypatch):
    """Else a rank that stands within a save would keep the others of its replica, once that is out, for ever."""
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    busy = Busy(Native())
    with busy.with_scripts("a checkpoint", 20):
        now = 119.0
        assert busy.with_what_the_script_says()
        now = 121.0
        assert not busy.with_what_the_script_says()


def first(size):
    return "in step", 120_000, f"its first batch of {size} samples, which it may compile for"


def test_the_first_step_of_each_size_of_batch_is_waited_for():
    """A compiled model may compile anew for it, on all replicas in one step, and not equally fast."""
    native = Native()
    busy = Busy(native)
    for size in (8, 8, 12, 8, 12, 8):
        busy.begin_step(size)
        busy.end_step()
        busy.end_step(trained=False)  # where the loop's body ends
    assert native.said == [first(8), "done", first(12), "done"]

    native.said.clear()
    busy.begin_step(16)
    busy.end_step(trained=False)  # left, and given again
    busy.begin_step(16)
    with busy.with_scripts("compiling", 600):
        assert native.now == "compiling"
    with busy.with_scripts("compiling, and more", 600):
        busy.end_step()
    busy.end_step(trained=False)
    with busy.with_scripts("the loop", 600):
        busy.begin_step(20)
        busy.end_step()
    busy.begin_step(20)
    assert native.now is None
    assert native.said == [
        first(16), "done", first(16), "done", ("busy", 600_000, "compiling"), "done", first(16), "done",
        ("busy", 600_000, "compiling, and more"), "done", ("busy", 600_000, "the loop"), "done",
    ]  # fmt: skip


def test_a_session_at_its_end_has_no_error_of_its_own_for_the_end_of_a_step():
    native = Native()
    busy = Busy(native)
    busy.begin_step(16)

    def done():
        raise errors.Cancelled("out")

    native.done = done
    busy.end_step()


def test_a_script_that_ends_within_a_first_step_is_not_waited_for_while_its_exit_takes_long(monkeypatch):
    native, hooks = Native(), []
    monkeypatch.setattr(_busy.atexit, "register", lambda *given, **named: hooks.append((given, named)))
    monkeypatch.setattr(_busy.atexit, "unregister", lambda of: hooks.pop() if hooks[0][0] == (of,) else None)
    busy = Busy(native)
    busy.begin_step(16)
    ((end,), settings) = hooks[0]
    end(**settings)
    assert native.said[-1] == "done" and not hooks
    busy.begin_step(16)  # it was not trained
    assert native.said[-1] != "done" and hooks
    busy.end_step()
    busy.begin_step(16)
    assert native.said[-1] == "done" and not hooks


def test_who_is_out_since_it_hangs_hears_of_busy():
    hangs = "this replica is out of the job: it hangs: its processes are heard, wait for nobody and do not go on; x"
    assert "into session.busy()" in str(errors._make(7, hangs))
    assert "busy" not in str(errors._make(7, "this replica is out of the job: it was silent"))


class Looped(Native):
    """In the place of the native session: step 1 is caught up with; of those from step 5 on a batch is larger."""

    def __init__(self):
        super().__init__()
        self.step = 0

    def begin_step(self):
        self.step += 1
        self.said.append(("begin", self.step))
        size = 8 if self.step < 5 else 12
        return self.step, self.step > 1, True, 1, [(size * self.step, size * (self.step + 1))], 1, 1, True

    def begin_update(self):
        self.said.append("begin_update")

    def busy(self, limit_ms, reason, how="busy"):
        super().busy(limit_ms, reason, how)
        if reason.startswith("its first batch"):
            self.said[-1] = "busy"

    def __getattr__(self, name):
        return lambda *_: None


def test_the_loop_lets_the_others_wait_up_to_the_update_of_a_first_step_and_no_longer(tmp_path, monkeypatch):
    one, native = session(tmp_path), Looped()
    model = torch.nn.Linear(2, 2)
    one.attach(model, torch.optim.AdamW(model.parameters()))
    for of in (one, one._buckets, one._updates, one._busy):
        monkeypatch.setattr(of, "_native", native)
    monkeypatch.setattr(one, "_joined", True)
    left = False
    for _ in range(2):
        for step, _samples in one.steps():
            native.said.append("computes")
            if step.number == 2 and not left:
                left = True
                break  # and it is given again
            one._optimizer.step()
            native.said.append("evaluates")
            if step.number == 5:
                break
    assert native.said == [
        ("begin", 1), "begin_update",
        ("begin", 2), "busy", "computes", "done",
        "busy", "computes", "done", "begin_update", "evaluates",
        ("begin", 3), "computes", "begin_update", "evaluates",
        ("begin", 4), "computes", "begin_update", "evaluates",
        ("begin", 5), "busy", "computes", "done", "begin_update", "evaluates",
    ]  # fmt: skip
