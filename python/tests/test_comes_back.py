"""What a replica that comes back to a job under way does with what ends all of them in the job's first steps."""

import re

import pytest

torch = pytest.importorskip("torch")

from test_session import Job, session  # noqa: E402

import rejoin  # noqa: E402


class Noticing(torch.nn.Linear):
    """What its forward() leaves behind."""

    def __init__(self):
        super().__init__(2, 2)
        self.calls, self.frozen, self.does = 0, torch.nn.Parameter(torch.ones(2), requires_grad=False), None

    def forward(self, x):
        self.calls += self.does == "extra state"
        if self.does == "a buffer" and not hasattr(self, "late"):
            self.register_buffer("late", torch.ones(2))
        self.frozen.requires_grad_(self.does == "a thawed parameter")
        return super().forward(x)

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


def a_step_of(one, does):
    one._model.does = does
    one._model(torch.ones(1, 2)).sum().backward()
    if does == "a gradient":
        one._model.bias.grad.mul_(0.5)
    elif does == "a setting":
        one._optimizer.param_groups[0]["momentum"] = 0.1
    elif does == "a hook":
        one._optimizer.register_step_post_hook(lambda *_: None)
    one._optimizer.step()


class UnderWay(Job):
    """It has come to this step, and is gone through from the next one on: in so many steps others contribute alone."""

    def __init__(self, step, catches_up):
        super().__init__(step + catches_up + 3)
        self.step, self.catches_up = step, step + catches_up

    def begin_step(self):
        begun = super().begin_step()
        return begun and (begun[0], begun[0] > self.catches_up, *begun[2:])


TOLD = {
    "a buffer": "buffer 'late' was registered",
    "extra state": "changes in a step",
    "a thawed parameter": "'frozen' wants a gradient and is none of the session's.* frozen again",
    "a gradient": "the gradient of 'bias' was changed after",
    "a setting": "momentum of .* was put back",
    "a hook": "the optimizer has hooks .* were taken off",
}


@pytest.mark.parametrize("does", TOLD)
@pytest.mark.parametrize(
    ("restored", "step", "catches_up", "ends"),
    [(0, 40, 0, False), (39, 40, 0, False), (40, 40, 1, False), (40, 40, 0, True), (0, 0, 0, True)],
    ids=["without a checkpoint", "a checkpoint of before", "the last one, and others train", "all of them", "new"],
)
def test_what_the_others_have_in_their_logs_ends_none_that_comes_back(
    tmp_path, monkeypatch, caplog, does, restored, step, catches_up, ends
):
    """It would in each of its lives. Those that have begun together end together, when nothing is lost."""
    one, native = session(tmp_path), UnderWay(step, catches_up)
    model = Noticing()
    one.attach(model, torch.optim.SGD([model.weight, model.bias], lr=0.1, momentum=0.9))
    for of in (one, one._buckets, one._updates):
        monkeypatch.setattr(of, "_native", native)
    one._position = f"step {restored}" if restored else None
    monkeypatch.setattr("rejoin._native.position_step", lambda position: restored)
    taken = []
    for given, _ in one.steps():
        if ends:
            with pytest.raises(rejoin.InvalidArgument, match=TOLD[does].split(".*")[0]):
                a_step_of(one, does)
            return
        a_step_of(one, does)
        taken.append(given.number)
    assert taken == [step + catches_up + i for i in (1, 2, 3)] and one.finished
    told = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert told and re.search(TOLD[does], told[0]), told
