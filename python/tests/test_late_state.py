"""Optimizers whose state is not all there behind their first step, or moves later."""

import pytest

torch = pytest.importorskip("torch")

from test_attributes import updates  # noqa: E402
from test_session import Job, session  # noqa: E402

import rejoin  # noqa: E402


def slow(optimizer, state, p):
    state.setdefault("slow", p.clone())


def replace(optimizer, state, p):
    state["m"] = torch.zeros_like(p)


def switch(optimizer, state, p):
    optimizer.switched = "to SGD"


def use(optimizer, state, p):
    if state["step"] == 33:
        slow(optimizer, state, p)
    elif state["step"] > 33:
        p.lerp_(state["slow"], 0.5)


class Late(torch.optim.Optimizer):
    """SGD with momentum, and what `then` does where `when` says so, of the count of steps and the gradient."""

    def __init__(self, parameters, when, then=slow):
        super().__init__(parameters, {"lr": 0.1})
        self.when, self.then = when, then

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, m=torch.zeros_like(p), of_torch=None)
                state["step"] += 1
                state["m"].mul_(0.9).add_(p.grad)
                p.sub_(group["lr"] * state["m"])
                if self.when(state["step"], p.grad):
                    self.then(self, state, p)


def attached(tmp_path, when, then=slow):
    model, one = torch.nn.Linear(2, 2), session(tmp_path)
    one.attach(model, Late(model.parameters(), when, then))
    return one


@pytest.mark.parametrize(
    ("when", "then", "told"),
    [
        (lambda step, g: step % 5 == 0, slow, "Late begins to keep 'slow' in step 100: a replica that"),
        (lambda step, g: step % 11 == 0, slow, "keep 'slow' in step 720720"),
        (lambda step, g: step > 1 and (step - 1) % 13 == 0, slow, "keep 'slow' in step 720721"),
        (lambda step, g: step >= 5000, slow, "keep 'slow' in step 10000"),
        (lambda step, g: True, use, "KeyError: 'slow', perhaps of state that is not there from the first step on"),
        (lambda step, g: bool(g.any()), slow, "keep 'slow' in step 1:"),
        (lambda step, g: bool(g.isnan().any()), slow, "keep 'slow' where a gradient has nan"),
        (lambda step, g: step % 6 == 0, replace, "puts another tensor in the place of 'm' in step"),
        (lambda step, g: step % 5 == 0, switch, "Late changes its attribute 'switched' in step 100"),
    ],
)
def test_state_that_begins_or_moves_in_a_later_step_is_refused_with_attach(tmp_path, when, then, told):
    with pytest.raises(rejoin.InvalidArgument, match=f"{told}.*(Use AdamW|skip_nonfinite)"):
        attached(tmp_path, when, then)


class Updating(Job):
    """Its updates are of so many pieces of each tensor."""

    pieces, one = 1, None

    def begin_update(self):
        super().begin_update()
        return updates(self.one, self.step, self.pieces)


def exchange(optimizer, state, p):
    optimizer.state[p] = {**state, "m": torch.zeros_like(p)}


def keep_apart(optimizer, state, p):
    optimizer.state["total"] = p.sum()


@pytest.mark.parametrize(
    ("then", "pieces", "told"),
    [
        (slow, 1, "begins to keep 'slow' for 'bias' in step 5"),
        (slow, 3, "begins to keep 'slow' in step 5"),
        (replace, 1, "puts another tensor in the place of 'm' for 'bias' in step 5"),
        (replace, 3, "puts another tensor in the place of 'm' in step 5"),
        (exchange, 1, "puts another tensor in the place of 'm' for 'bias' in step 5"),
        (keep_apart, 1, "begins to keep state of its own in step 5"),
    ],
)
def test_state_that_begins_in_a_step_which_attach_has_not_tried_is_the_error_of_that_step(
    tmp_path, monkeypatch, then, pieces, told
):
    """And not, later and without its name, a tensor in which replicas differ. The step itself is over, and whole."""
    one, native = attached(tmp_path, lambda step, g: step == 5, then), Updating(6)
    monkeypatch.setattr(Updating, "one", one)
    native.pieces = pieces
    for of in (one, one._buckets, one._updates):
        monkeypatch.setattr(of, "_native", native)
    for step, _ in one.steps():
        one._model(torch.ones(1, 2)).sum().backward()
        if step.number < 5:
            one._optimizer.step()
            continue
        native.calls.clear()
        with pytest.raises(rejoin.InvalidArgument, match=f"Late {told}.*session.state_dict.. gives it here.*Use AdamW"):
            one._optimizer.step()
        assert "end_update" in native.calls and "abandon_update" not in native.calls and one._updated
        break
    assert step.number == 5


def test_what_the_optimizer_kept_before_for_others_is_none_of_the_job(tmp_path, monkeypatch):
    """A phase that trains less than the one before leaves state of what is frozen now, and a script has notes."""
    model, one, native = torch.nn.Linear(2, 2), session(tmp_path), Updating(6)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    model.bias.requires_grad_(False)
    optimizer.param_groups[0]["params"] = [model.weight]
    optimizer.state["note"] = 3
    one.attach(model, optimizer)
    monkeypatch.setattr(Updating, "one", one)
    for of in (one, one._buckets, one._updates):
        monkeypatch.setattr(of, "_native", native)
    for step, _ in one.steps():
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        if step.number == 3:
            break
    assert step.number == 3
