"""Parameters that take an attached one's place in the model: nobody would train them, and each replica has its own."""

import re
import types

import pytest

torch = pytest.importorskip("torch")
prune = pytest.importorskip("torch.nn.utils.prune")


from test_changes import in_a_step  # noqa: E402
from test_session import Job, session  # noqa: E402

import rejoin  # noqa: E402


def model_of_three():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 2))
    model.tied = torch.nn.Linear(2, 2)
    model.tied.weight = model[2].weight
    return model


def assign(model):
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def replace_head(model):
    model[2] = torch.nn.Linear(2, 2)


def replace_by_what_is_frozen(model):
    model[2] = torch.nn.Linear(2, 2).requires_grad_(False)


def untie(model):
    model.tied.weight = torch.nn.Parameter(torch.ones(2, 2))


def add(model):
    model[0].more = torch.nn.Linear(2, 2)


def parametrize(model):
    torch.nn.utils.parametrizations.weight_norm(model[0])


ANOTHER = "parameter '{}' is another tensor than with attach.., .* load_state_dict.assign=True"
NEW = "parameter '{}' wants a gradient and is none of the session's: .*give it to the optimizer"


@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (assign, ANOTHER.format("0.weight")),
        (replace_head, ANOTHER.format("2.weight")),
        (replace_by_what_is_frozen, ANOTHER.format("2.weight")),
        (untie, ANOTHER.format("tied.weight")),
        (add, NEW.format("0.more.weight")),
        (parametrize, NEW.format("0.parametrizations.weight.original0")),
    ],
)
def test_what_takes_a_parameters_place_is_refused(tmp_path, monkeypatch, change, told, in_step):
    model = model_of_three()
    one, _ = in_a_step(tmp_path, monkeypatch, model)
    if not in_step:
        change(model)
        with pytest.raises(rejoin.InvalidArgument, match=told):
            one.join()
        return
    for of in (one, one._buckets, one._updates):
        monkeypatch.setattr(of, "_native", Job(1))
    one.join()
    monkeypatch.setattr(one, "_step", types.SimpleNamespace(number=1))
    change(model)
    with pytest.raises(rejoin.InvalidArgument, match=told):
        one._optimizer.step()


def test_what_is_thawed_after_attach_is_refused(tmp_path, monkeypatch):
    model = model_of_three()
    one, _ = in_a_step(tmp_path, monkeypatch, model)
    teach(model)
    one._places.check()
    model.teacher.requires_grad_(True)
    with pytest.raises(rejoin.InvalidArgument, match=NEW.format("teacher.weight")):
        one._places.check()


def test_what_is_thawed_late_is_frozen_again_and_all_go_on(tmp_path, monkeypatch, caplog):
    """All replicas would end in the same step, with all that was trained."""
    model, native = model_of_three(), Job(9)
    teach(model)
    one = session(tmp_path)
    one.attach(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]))
    for of in (one, one._buckets, one._updates):
        monkeypatch.setattr(of, "_native", native)
    told = {}
    for step, _ in one.steps():
        caplog.clear()
        if 3 <= step.number <= 7:
            model.teacher.requires_grad_(True)
        model.teacher(model(torch.ones(1, 2))).sum().backward()
        one._optimizer.step()
        assert not any(p.requires_grad or p.grad is not None for p in model.teacher.parameters())
        told[step.number] = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert [step for step in told if told[step]] == [3, 4, 6] and len(told) == 9, "at the first, second, fourth time"
    assert re.match(f"step 3: {NEW.format('teacher.weight')}.* It was frozen again .so far: 1.: all rep", told[3][0])
    monkeypatch.setattr(one, "_in_step", True)
    monkeypatch.setattr(one, "_updated", False)
    model.teacher.requires_grad_(True)
    untie(model)
    with pytest.raises(rejoin.InvalidArgument, match=ANOTHER.format("tied.weight")):
        one._optimizer.step()


def move_by_name(model):
    prune.identity(model[0], "weight")  # the same object as weight_orig


def take_away(model):
    model.tied = torch.nn.Identity()


def teach(model):
    model.teacher = torch.nn.Linear(2, 2).requires_grad_(False)


@pytest.mark.parametrize("change", [move_by_name, take_away, teach, lambda model: None])
def test_what_trains_on_is_let_be(tmp_path, monkeypatch, change):
    model = model_of_three()
    one, _ = in_a_step(tmp_path, monkeypatch, model)
    one._places.check()
    seen = one._places._seen
    one._places.check()
    assert one._places._seen is seen, "the model was gone through once more"
    change(model)
    one._places.check()
    one._places.check()
