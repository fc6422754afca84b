"""Handlers of signals that come while a step is updated: what they raise and read is of a whole state."""

import os
import signal
import threading
import time

import pytest

torch = pytest.importorskip("torch")

from test_session import Job, session  # noqa: E402

import rejoin  # noqa: E402
from rejoin.torch import _buckets, _leaving, _signals  # noqa: E402


class Updating(Job):
    """In the place of the native session: signals come within its calls, and it knows whether an update goes on."""

    def __init__(self, last: int) -> None:
        super().__init__(last)
        self.updating, self.comes = False, {}  # by call: what is done within it

    def _called(self, name: str) -> None:
        self.calls.append(name)
        self.comes.pop(name, lambda: None)()

    def begin_update(self):
        self.broken, self.updating = False, True
        self._called("begin_update")
        return []

    def end_update(self, stream):
        self._called("end_update")
        self.updating = False

    def abandon_update(self, what):
        if not self.updating:
            raise rejoin.InvalidArgument("abandon_update() without an update: begin_update() begins one")
        self.updating = False
        self.calls.append(f"abandoned: {what}")
        raise rejoin.Unavailable("this replica is out")

    def leave(self):
        if self.updating:
            raise rejoin.InvalidArgument("leave() before end_update(), or abandon_update(), of step 1")
        self.calls.append("leave")

    def position(self):
        assert not self.updating
        return "step=1"

    def committed(self):
        return self.step


@pytest.fixture
def in_a_job(tmp_path, monkeypatch):
    """Give a session that is in step 1 of 2."""
    model = torch.nn.Linear(2, 2)
    one, native = session(tmp_path), Updating(2)
    one.attach(model, torch.optim.AdamW(model.parameters()))
    for of in (one, one._buckets, one._updates):
        monkeypatch.setattr(of, "_native", native)
    monkeypatch.setattr(one, "_joined", True)
    next(one.steps())
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield one, native
    for number, handler in before.items():
        signal.signal(number, handler)


def sends(*numbers):
    def send():
        for number in numbers:
            os.kill(os.getpid(), number)  # to the main thread, which is this one: it is there when this returns

    return send


@pytest.mark.parametrize("call", ["begin_update", "end_update", "scale_feedback"])
def test_what_a_handler_raises_in_an_update_is_raised_behind_it_and_leaves_a_whole_state(in_a_job, monkeypatch, call):
    one, native = in_a_job
    if call == "scale_feedback":
        monkeypatch.setattr(one._updates, "scale_feedback", lambda step: native._called(call))
    ran = []

    def handler(number, frame):
        assert frame is not None
        ran.append((number, one.state_dict()["rejoin"]["rank0"]["version"]))

    signal.signal(signal.SIGUSR1, handler)
    signal.signal(signal.SIGUSR2, handler)
    native.comes[call] = sends(signal.SIGUSR1, signal.SIGINT, signal.SIGUSR2, signal.SIGUSR1)
    with pytest.raises(KeyboardInterrupt):
        one._optimizer.step()
    assert sorted(ran) == [(signal.SIGUSR1, 1), (signal.SIGUSR2, 1)], "each once, and not one is lost"
    assert "end_update" in native.calls and not any("abandoned" in one for one in native.calls)
    assert signal.getsignal(signal.SIGUSR1) is handler and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    step, _ = next(one.steps())  # the session goes on with the next one
    assert step.number == 2
    one.leave()
    assert native.calls[-1] == "leave"


def test_a_handler_that_runs_while_handlers_are_taken_or_given_back_finds_a_whole_state(in_a_job, monkeypatch):
    one, native = in_a_job
    ran, make, give_back = [], _signals._Holder.__init__, _signals._give_back

    def taken(*arguments):
        sends(signal.SIGUSR1)()
        make(*arguments)

    def given_back(*arguments):
        sends(signal.SIGUSR1)()
        give_back(*arguments)

    monkeypatch.setattr(_signals._Holder, "__init__", taken)
    monkeypatch.setattr(_signals, "_give_back", given_back)
    signal.signal(signal.SIGUSR1, lambda number, frame: ran.append(one.state_dict()["rejoin"]["rank0"]["version"]))
    one._optimizer.step()
    assert len(ran) >= 4 and native.calls[-1] == "end_update", ran
    assert not isinstance(signal.getsignal(signal.SIGUSR1), _signals._Holder)


def test_ctrl_c_ends_the_wait_for_a_step_at_once_and_a_scripts_own_handler_runs_there_after_ten_seconds(
    in_a_job, monkeypatch, caplog
):
    one, native = in_a_job
    ran, limits = [], iter((3600.0, 3600.0, 0.0))

    def looks():
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            os.kill(os.getpid(), number)
            monkeypatch.setattr(_signals, "LONGEST_WAIT_SECONDS", next(limits))
            one._leaving.look()
        assert ran == [], "they are for when the step has ended"
        monkeypatch.setattr(_signals, "LONGEST_WAIT_SECONDS", next(limits))
        time.sleep(0.001)  # the clock goes on
        one._leaving.look()
        assert ran == [signal.SIGUSR1]
        os.kill(os.getpid(), signal.SIGINT)
        native.updating = False  # it is interrupted before the step is decided
        monkeypatch.setattr(_signals, "LONGEST_WAIT_SECONDS", 3600.0)
        one._leaving.look()

    def save(number, frame):
        one.state_dict()

    signal.signal(signal.SIGUSR1, lambda number, frame: ran.append(number))
    signal.signal(signal.SIGUSR2, save)
    native.comes["begin_update"] = looks
    with pytest.raises(KeyboardInterrupt):
        one._optimizer.step()
    assert "state_dict() within optimizer.step()" in caplog.text and "a signal's handler set a flag" in caplog.text
    assert "end_update" not in native.calls
    one.leave()
    assert native.calls[-1] == "leave"


@pytest.mark.parametrize("where", ["behind begin_update()", "behind the update", "in another thread"])
def test_whatever_is_raised_between_the_two_ends_of_an_update_abandons_it_and_the_script_can_leave(
    in_a_job, monkeypatch, where
):
    """Such as by PyThreadState_SetAsyncExc(), which comes anywhere."""
    one, native = in_a_job

    def fail(*_):
        raise TimeoutError("the cell took too long")

    if where == "behind begin_update()":
        monkeypatch.setattr(one._buckets, "follow", fail)
    else:
        monkeypatch.setattr(one._updates, "apply", fail)
    raised = []

    def step():
        try:
            one._optimizer.step()
        except TimeoutError as error:
            raised.append(error)

    if where == "in another thread":
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
    else:
        step()
    assert len(raised) == 1 and native.calls[-1] == "abandoned: TimeoutError: the cell took too long"
    one.leave()
    assert native.calls[-1] == "leave"


def test_a_script_that_leaves_in_the_midst_of_an_update_abandons_it(in_a_job):
    one, native = in_a_job
    native.updating = True
    one.leave()
    assert native.calls[-1] == "abandoned: InvalidArgument: the script leaves in the midst of it"


def test_a_thread_that_can_not_hear_sigterm_says_so(caplog):
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        thread = threading.Thread(target=_leaving.Leaving.listen)
        thread.start()
        thread.join()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "SIGTERM is not heard, and ends this process at once" in caplog.text


def test_a_step_whose_beginning_was_interrupted_is_not_taken_for_the_one_before(in_a_job, monkeypatch):
    one, native = in_a_job
    one._optimizer.step()

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as within:
        within.setattr(one._buckets, "begin", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(one.steps())
    for _ in range(2):
        with pytest.raises(rejoin.InvalidArgument, match="beginning of a step was interrupted.*: end this process"):
            next(one.steps())


@pytest.mark.parametrize("behind", [False, True])
def test_an_interrupt_behind_the_native_sessions_beginning_of_a_step_is_named_and_one_in_its_wait_is_none(
    in_a_job, monkeypatch, behind
):
    one, native = in_a_job
    one._optimizer.step()
    begin, begun = native.begin_step, []

    def interrupted():
        if behind and begun:
            raise rejoin.InvalidArgument("begin_step() in step 2, which commit() has not ended yet")
        if behind:
            begun.append(begin())
        raise KeyboardInterrupt

    with monkeypatch.context() as within:
        within.setattr(native, "begin_step", interrupted)
        for _ in range(2):
            told = pytest.raises(
                rejoin.InvalidArgument, match="beginning of a step was interrupted.*: end this process"
            )
            with told if begun else pytest.raises(KeyboardInterrupt):
                next(one.steps())
    if not behind:
        assert next(one.steps())[0].number == 2


@pytest.mark.parametrize("within", ["_arrive", "_hand_over", "_add_up", "check_sums"])
def test_an_interrupt_within_the_hand_over_of_gradients_is_named_by_what_comes_behind_it(in_a_job, monkeypatch, within):
    one, native = in_a_job
    calls = []

    def interrupted(*given):
        calls.append(given)
        if within == "_hand_over":
            native.all_reduce(given[0], None)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_buckets if within == "check_sums" else one._buckets, within, interrupted)
        with pytest.raises(KeyboardInterrupt):
            one._model(torch.ones(1, 2)).sum().backward()
            one._optimizer.step()
    assert len(calls) == 1
    for _ in range(2):
        with pytest.raises(rejoin.InvalidArgument, match="hand-over of gradients was interrupted.*: end this process"):
            one._optimizer.step()


def test_state_dict_within_an_update_is_refused(in_a_job, monkeypatch):
    one, native = in_a_job
    monkeypatch.setattr(one._updates, "apply", lambda *_: one.state_dict())
    with pytest.raises(rejoin.Unavailable, match="within optimizer.step.*the state is of no one step. Let a signal's"):
        one._optimizer.step()
    assert native.calls[-1].startswith("abandoned: WithinUpdate")


def test_sigterm_in_warm_up_ends_the_process_behind_it(tmp_path, monkeypatch, caplog):
    """A compiler that ends while it writes to its cache leaves what ends each later start."""
    model = torch.nn.Linear(2, 2)
    one, own, ended = session(tmp_path), os.kill, []
    one.attach(model, torch.optim.AdamW(model.parameters()))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "my cache"))
    monkeypatch.setattr(_leaving, "_asked_at", 1.0)  # a session of before has heard one
    monkeypatch.setattr(os, "kill", lambda pid, number: ended.append((pid, number, signal.getsignal(number))))
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with one.warm_up():
            pass
        assert not ended and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        with pytest.raises(ImportError), one.warm_up():
            own(os.getpid(), signal.SIGTERM)
            assert not ended and caplog.text.count("SIGTERM: this process ends behind warm_up()") == 1
            own(os.getpid(), signal.SIGTERM)
            child = os.fork()
            if child == 0:
                os._exit(signal.getsignal(signal.SIGTERM) != signal.SIG_DFL)
            assert os.waitpid(child, 0)[1] == 0, "a child ends at once"
            with pytest.raises(rejoin.InvalidArgument, match="join.. within warm_up"):
                one.join()
            with pytest.raises(rejoin.InvalidArgument, match="join.. within warm_up"):
                next(one.steps())
            raise ImportError("cjnp.main.so: file too short")
        assert ended == [(os.getpid(), signal.SIGTERM, signal.SIG_DFL)]
        assert caplog.text.count("SIGTERM: this process") == 1
        assert f"find '{tmp_path}/my cache' -name '*.so' -size -64c -delete" in caplog.text
        signal.signal(signal.SIGTERM, lambda *_: None)  # the script's own
        with one.warm_up():
            own(os.getpid(), signal.SIGTERM)
        assert len(ended) == 1
    finally:
        signal.signal(signal.SIGTERM, before)
