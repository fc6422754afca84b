"""What load_state_dict() is given: files of other forms, and of other optimizers."""

import copy
import re

import pytest

torch = pytest.importorskip("torch")

from torch.optim import SGD, Adagrad, Adam, Adamax, AdamW, RAdam, RMSprop  # noqa: E402

from rejoin import RejoinError  # noqa: E402
from rejoin.errors import Corrupt, InvalidArgument  # noqa: E402
from rejoin.torch import Session, _form  # noqa: E402


class Lion(torch.optim.Optimizer):
    """It shares a moment with Adam."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            moment = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
            p.sub_(moment.mul(0.9).add(p.grad, alpha=0.1).sign_(), alpha=0.1)
            moment.mul_(0.9).add_(p.grad, alpha=0.1)


def halves(params, **settings):
    params = list(params)
    return AdamW([{"params": params[:1]}, {"params": params[1:], "lr": 0.5}], **settings)


KINDS = {
    "AdamW": AdamW,
    "Adam, foreach": lambda params: Adam(params, foreach=True),
    "AdamW, fused": lambda params: AdamW(params, fused=True),
    "AdamW, two groups": halves,
    "AdamW, amsgrad": lambda params: AdamW(params, amsgrad=True),
    "RAdam": RAdam,
    "Adamax": Adamax,
    "RMSprop": RMSprop,
    "RMSprop, all": lambda params: RMSprop(params, momentum=0.9, centered=True),
    "Adagrad": Adagrad,
    "SGD": SGD,
    "SGD, momentum": lambda params: SGD(params, lr=0.1, momentum=0.9),
    "Lion": Lion,
}
ADAMS = {name for name in KINDS if "Adam" in name} - {"AdamW, two groups", "Adamax"}


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2), torch.nn.Linear(2, 2))
    model[2].requires_grad_(False)
    return model


def made(kind: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = net()
    return model, KINDS[kind](p for p in model.parameters() if p.requires_grad)


def plain(kind: str, steps: int = 3) -> dict:
    model, optimizer = made(kind)
    for _ in range(steps):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def attached(tmp_path, kind: str) -> Session:
    session = Session(replica=0, rank=0, socket=tmp_path / "nobody")
    session.attach(*made(kind))
    return session


@pytest.fixture(scope="module")
def files() -> dict:
    return {kind: plain(kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_file_is_taken_by_its_own_optimizer_and_refused_by_another(tmp_path, files, kind):
    one = attached(tmp_path, kind)
    one.load_state_dict(plain(kind, 0))
    assert one._updates.offset == 0
    for name, state in files.items():
        of = state["optimizer"]["state"]
        if name != kind and not {name, kind} <= ADAMS and (of or "groups" in kind):  # SGD keeps nothing to forget
            with pytest.raises(InvalidArgument, match="optimizer .*changed=True. lets it begin anew"):
                one.load_state_dict(state)
            continue
        one.load_state_dict(copy.deepcopy(state))
        kept = [one._optimizer.state[p] for group in one._optimizer.param_groups for p in group["params"]]
        for number, entry in of.items():
            for moment in entry.keys() & kept[number].keys():
                assert torch.equal(torch.as_tensor(entry[moment]), torch.as_tensor(kept[number][moment])), (
                    name,
                    moment,
                )
        assert not of or one._updates.offset == (3 if "step" in of[0] else 0)


@pytest.mark.parametrize("name, kind", [("AdamW", "Lion"), ("Lion", "AdamW"), ("AdamW, two groups", "AdamW")])
def test_an_optimizer_that_is_meant_to_be_another_one_begins_anew(tmp_path, files, name, kind):
    one = attached(tmp_path, kind)
    one.load_state_dict(files[name], changed=True)
    assert not any(column.any() for tensor in one._tensors for column in tensor.columns[1:])
    assert one._updates.offset == 0


def test_what_an_optimizer_has_lost_or_miscounted_is_named(tmp_path, files):
    one = attached(tmp_path, "AdamW")

    def refused(why: str, changed: bool = False, **optimizer) -> None:
        state = copy.deepcopy(files["AdamW"])
        for name, of in optimizer.items():
            for entry in state["optimizer"]["state"].values() if name not in ("state", "param_groups") else ():
                entry.pop(name) if of is None else entry.update({name: of})
            if name in ("state", "param_groups"):
                state["optimizer"][name] = of
        with pytest.raises(InvalidArgument, match=why):
            one.load_state_dict(state, changed=changed)

    refused("for '0.weight' it has kept exp_avg, step, and AdamW keeps exp_avg, exp_avg_sq, step", exp_avg_sq=None)
    refused("for '0.weight' it has kept exp_avg, exp_avg_sq, and AdamW", step=None)
    refused("for '0.weight' it has kept exp_avg, step, and", exp_avg_sq=[1.0])
    for count in (-3, float("nan"), "many", torch.ones(2)):
        refused("the optimizer's state for '0.weight' says .* for its count of steps", step=count)
        refused("the optimizer's state for '0.weight' says .* for its count of steps", step=count, changed=True)
    other = [{"params": [0]}, {"params": [1, 2, 3]}]
    refused(r"has groups of \[1, 3\] parameters, and this AdamW of \[4\]", param_groups=other)
    refused("has a 'state' that is no optimizer.state_dict", state=[1])
    refused("has 'param_groups' that are no optimizer.state_dict", param_groups=[1])


def test_a_jobs_checkpoint_that_has_lost_the_optimizers_state_is_refused_and_begins_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(_form._native, "position_step", lambda position: 20)
    for optimizer in ({}, {"state": {}}, {"state": {}, "param_groups": [{"params": [0, 1, 2, 3]}]}):
        state = {"model": net().state_dict(), "optimizer": optimizer}
        state["rejoin"] = {"rank0": {"position": "of step 20", "version": 20, "metrics": None, "loss_scale": None}}
        one = attached(tmp_path, "AdamW")
        with pytest.raises(InvalidArgument, match="checkpoint.* has no.*changed=True. lets it begin anew"):
            one.load_state_dict(state)
        one.load_state_dict(state, changed=True)
        assert one._updates.offset == -20 and float(one._optimizer.state[one._model[0].weight]["step"]) == 0
    attached(tmp_path, "SGD").load_state_dict(state)


@pytest.mark.parametrize("name, kind", [("AdamW", "Lion"), ("AdamW", "SGD"), ("SGD, momentum", "AdamW")])
def test_a_distributed_checkpoint_of_another_optimizer_is_refused_though_a_part_of_it_is_filled_in(
    tmp_path, files, name, kind
):
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    dcp.save(files[name], checkpoint_id=tmp_path / "checkpoint")

    def filled(kind: str) -> tuple[Session, dict]:
        one = attached(tmp_path, kind)
        state = one.state_dict(of=tmp_path / "checkpoint")
        dcp.load(state, checkpoint_id=tmp_path / "checkpoint")
        return one, state

    one, state = filled(name)
    one.load_state_dict(state)
    one, state = filled(kind)
    with pytest.raises(InvalidArgument, match="the checkpoint's optimizer is another one: for '0.weight' it has kept "):
        one.load_state_dict(state)
    one.load_state_dict(state, changed=True)
    assert not any(column.any() for tensor in one._tensors for column in tensor.columns[1:])


def test_what_is_no_checkpoint_is_told_as_what_it_is(tmp_path, files):
    good = files["AdamW"]
    optimizer, place = good["optimizer"], {"metrics": None, "loss_scale": None}
    one = attached(tmp_path, "AdamW")
    renamed = {f"module.{name}": value for name, value in good["model"].items()}
    for state, why, kind in (
        (good["model"], "is a model's state_dict() by itself ('0.weight', '0.bias', '1.weight', ", InvalidArgument),
        ({"state_dict": good["model"], "epoch": 3}, "has the weights in 'state_dict', as Lightning's", InvalidArgument),
        (optimizer, "is an optimizer's state_dict() by itself", InvalidArgument),
        ({"optimizer": optimizer}, "{'model': …, 'optimizer': …}, and this has 'optimizer'", InvalidArgument),
        ({}, "and this has nothing", InvalidArgument),
        (None, "and this is None", InvalidArgument),
        (net(), "and this is of type Sequential", InvalidArgument),
        ({**good, "model": net()}, "'model' is of type Sequential, and has to be model.state_dict()", InvalidArgument),
        ({**good, "optimizer": None}, "the checkpoint has no optimizer's state", InvalidArgument),
        ({**good, "optimizer": 3}, "'optimizer' is of type int, and has to be optimizer.state_dict()", InvalidArgument),
        ({**good, "rejoin": {}}, "'rejoin' is empty", Corrupt),
        ({**good, "rejoin": {"rank0": None}}, "the checkpoint's part of rank0 is None", Corrupt),
        ({**good, "rejoin": {"rank0": place}}, "does not say where the job stood", Corrupt),
        ({**good, "rejoin": {"rank0": {**place, "position": 7}}}, "does not say where the job stood", Corrupt),
        ({**good, "rejoin": {"rank0": {**place, "position": "garbage"}}}, "the checkpoint's position can't", Corrupt),
        ({**good, "rejoin": {"rank1": place}}, "the checkpoint knows rank1, and this is rank 0", InvalidArgument),
        ({**good, "model": renamed}, "the checkpoint's model is another one: Error(s) in loading", RuntimeError),
    ):  # fmt: skip
        with pytest.raises(kind, match=re.escape(why)) as raised:
            one.load_state_dict(state)
        assert isinstance(raised.value, RejoinError)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_a_plain_jobs_optimizer_may_have_had_the_frozen_parameters_too(tmp_path, frozen):
    def model():
        made = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2), torch.nn.Linear(2, 2))
        made[frozen].requires_grad_(False)
        return made

    plain = model()
    optimizer = AdamW(plain.parameters())
    for _ in range(3):
        plain(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    mine = model()
    session = Session(replica=0, rank=0, socket=str(tmp_path / "none"))
    session.attach(mine, AdamW([p for p in mine.parameters() if p.requires_grad]))
    session.load_state_dict(copy.deepcopy({"model": plain.state_dict(), "optimizer": optimizer.state_dict()}))
    assert session._updates.offset == 3
    trained = [p for p in plain.parameters() if p.requires_grad]
    for before, tensor in zip(trained, (t for t in session._tensors if t.is_parameter), strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[before][name], session._optimizer.state[tensor.value][name])
