"""Models that FSDP2 divides: what holds on each rank of a replica. One job of two ranks looks at all of it."""

import os
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import forked  # noqa: E402
from test_attributes import Layerwise, updates  # noqa: E402
from test_checkpoint import made  # noqa: E402

import rejoin  # noqa: E402
from rejoin.torch import Session, _form, _loop  # noqa: E402

X = torch.linspace(-1, 1, 8).view(2, 4)
CLAIMS = []  # of the ranks' job


def raise_error(*_):
    raise MemoryError("a batch that is too large")


class Model(torch.nn.Module):
    """Has a block, and a layer of its own, whose parameters FSDP2 leaves gathered after a forward()."""

    def __init__(self):
        super().__init__()
        self.block, self.head = torch.nn.Linear(4, 6), torch.nn.Linear(6, 4)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x, raises=False, raises_backward=False):
        x = self.block(x).tanh()
        if raises:
            raise_error()
        if raises_backward:
            x.register_hook(raise_error)
        return self.head(x)


def attached(kind=torch.optim.AdamW, frozen=None, **settings):
    """Give this rank's session over a model that FSDP2 has divided; there is no job."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(3)
    model = Model()
    if frozen:
        model.get_parameter(frozen).requires_grad_(False)
    fully_shard(model.block)
    fully_shard(model)
    if kind is Layerwise:
        model.block.weight.lr_scale = 0.0
    session = Session(replica=0, rank=int(os.environ["RANK"]), socket="/nowhere/nobody")
    session.attach(model, kind([p for p in model.parameters() if p.requires_grad]), **settings)
    session._buckets._hand_over = lambda bucket: None
    return model, session


def begin(session):
    """Begin a step, or the one once more that this session is in the midst of."""
    begun = (1, True, True, 1, (), 1, 1, True)
    session._native = SimpleNamespace(begin_step=lambda: begun, check=lambda: None)
    _loop.begin_step(session)


def set_weights(session, value):
    """As an update does."""
    for tensor in session._tensors:
        tensor.columns[0].fill_(value)
    _loop._refresh(session)


def message_of(what, *given, **named):
    try:
        what(*given, **named)
    except (rejoin.InvalidArgument, MemoryError) as error:
        return str(error)
    raise AssertionError("nothing was raised")


@CLAIMS.append
def shards_have_the_attributes_of_their_parameters(folder):
    model, session = attached(Layerwise)
    session._places.check()
    before = [tensor.columns[0].clone() for tensor in session._tensors if tensor.is_parameter]
    for pieces in (1, 2):
        for tensor in session._tensors:
            tensor.reduced.fill_(1.0)
        with torch.no_grad():
            session._updates.apply(pieces, updates(session, pieces, pieces))
    stayed = [torch.equal(was, tensor.columns[0]) for was, tensor in zip(before, session._tensors, strict=False)]
    assert stayed == [True, False, False, False]
    model(X).sum().backward()
    session._places._seen.clear()
    session._places.check()


@CLAIMS.append
def gradients_may_be_accumulated_and_not_be_changed(folder):
    model, session = attached()
    for _ in range(2):
        begin(session)
        with session.accumulate():
            model(X).sum().backward()
        model(X).sum().backward()
        session._buckets.bring_rest()
        session._in_step = False
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert "was changed after" in message_of(session._buckets.bring_rest)


@CLAIMS.append
def a_backward_that_was_not_reduced_goes_with_the_step_that_was_left(folder):
    model, session = attached()

    def micro_batch(last):
        model.set_requires_gradient_sync(last)
        model(X).square().sum().backward()

    def new_step():
        session._in_step = False
        begin(session)

    new_step()
    micro_batch(last=True)
    whole = [p.grad.to_local().clone() for p in model.parameters()]
    for left_by in (new_step, lambda: begin(session), session._optimizer.zero_grad):
        new_step()
        micro_batch(last=False)
        left_by()
        micro_batch(last=True)
        for p, expected in zip(model.parameters(), whole, strict=True):
            assert torch.equal(p.grad.to_local(), expected)
    new_step()
    micro_batch(last=False)
    told = message_of(session._optimizer.step)
    assert "was not reduced" in told, told
    micro_batch(last=True)
    for p, expected in zip(model.parameters(), whole, strict=True):
        assert torch.equal(p.grad.to_local(), 2 * expected)


@CLAIMS.append
def a_forward_that_raised_leaves_no_weights_of_before(folder):
    model, session = attached()
    with session.warm_up():
        message_of(model, X, raises=True)
    session._places.check()
    for value in (0.5, 0.25):
        set_weights(session, value)
        hidden = (value * X.sum(1) + value).tanh()
        assert torch.allclose(model(X)[:, 0], 6 * value * hidden + value)
        message_of(model, X, raises=True)


@CLAIMS.append
def a_backward_that_raised_leaves_the_next_one_whole(folder):
    model, session = attached()
    begin(session)
    message_of(model(X, raises_backward=True).sum().backward)
    session._in_step = False
    _loop._refresh(session)
    begin(session)
    model(X).square().sum().backward()
    assert all(tensor.arrived for tensor in session._tensors if tensor.is_parameter)
    session._in_step = False
    begin(session)
    message_of(model(X, raises_backward=True).sum().backward)
    told = message_of(session._optimizer.step)
    assert "a backward() of this step has raised" in told, told
    session._optimizer.zero_grad()  # and in the same step
    model(X).square().sum().backward()
    assert all(tensor.arrived for tensor in session._tensors if tensor.is_parameter)


@CLAIMS.append
def what_is_thawed_or_new_is_refused(folder):
    for how in ("thawed", "thawed while it is gathered", "new", "assigned"):
        model, session = attached(frozen="head.bias")
        for _ in range(2):  # before FSDP2 has gathered any, and afterwards
            session._places.check()
            seen = session._places._seen
            session._places.check()
            assert session._places._seen is seen, "the model was gone through once more"
            bias = model.head.bias
            model(X)
        if how == "thawed":
            bias.requires_grad_(True)
        elif how == "thawed while it is gathered":
            assert model.head.bias is not bias
            model.head.bias.requires_grad_(True)
        elif how == "new":
            model.block.more = torch.nn.Parameter(torch.ones(2))
        else:
            _loop._refresh(session)  # what is gathered FSDP2 itself takes back
            model.head.weight = torch.nn.Parameter(torch.ones(4, 6))
        name = {"new": "block.more", "assigned": "head.weight"}.get(how, "head.bias")
        told = "is another tensor than with attach" if how == "assigned" else "wants a gradient and is none"
        assert f"parameter '{name}' {told}" in message_of(session._places.check)
        assert session._places.freeze_again()
        if how == "assigned":  # which no freezing mends
            assert told in message_of(session._places.check)
        else:  # late all go on with it
            model(X).sum().backward()
            session._places.check()
            assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
        if how.startswith("thawed"):
            bias.requires_grad_(False)
            model(X)
            session._places.check()


@CLAIMS.append
def a_checkpoint_of_one_rank_is_gone_on_with_by_two(folder):
    import torch.distributed.checkpoint as dcp

    _, session = attached(ema=0.9, loss_scale=1024.0, metrics=["loss"])
    state = session.state_dict(of=f"{folder}/one")
    dcp.load(state, checkpoint_id=f"{folder}/one")
    _form._native.position_step = lambda position: 20
    if session.rank == 1:
        told = message_of(session.load_state_dict, state)
        assert "knows rank0, and this is rank 1" in told and "changed=True" in told, told
    session.load_state_dict(state, changed=True)
    assert (session._position, session._compares) == ("of step 20", False)
    assert session._metrics.values.tolist() == [3.0] and session._loss_scale.tolist() == [5.0, 7.0]
    session._native, session._joined = SimpleNamespace(position=lambda: "of step 20", committed=lambda: 20), True
    dcp.save(session.state_dict(), checkpoint_id=f"{folder}/two")


def ranks(folder):
    import torch.distributed as dist

    dist.init_process_group("gloo")
    for claim in CLAIMS:
        claim(folder)
        print(claim.__name__)
    dist.destroy_process_group()


def test_what_the_ranks_of_a_divided_model_are_to_keep(tmp_path, monkeypatch):
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    settings = {"ema": 0.9, "loss_scale": 1024.0, "metrics": ["loss"]}
    one = made(tmp_path, model=Model(), **settings)
    for tensor in one._tensors:
        for number, column in enumerate(tensor.columns):
            column.copy_(torch.arange(tensor.count) + 100 * number)
        tensor.refresh()
    one._updates.count_all(20)
    one._metrics.values.fill_(3.0)
    one._loss_scale.copy_(torch.tensor([5.0, 7.0]))
    for tensor in one._tensors:
        if not tensor.is_parameter:
            tensor.take_changes()
    one._native, one._joined = SimpleNamespace(position=lambda: "of step 20", committed=lambda: 20), True
    dcp.save(one.state_dict(), checkpoint_id=tmp_path / "one")
    program = f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r}); import test_sharding\n"
    told = forked.run_ranks(2, f"{program}test_sharding.ranks({str(tmp_path)!r})")
    assert sorted(told.split()) == sorted(2 * [claim.__name__ for claim in CLAIMS])

    monkeypatch.setattr(_form._native, "position_step", lambda position: 20)
    other = made(tmp_path, model=Model(), **settings)
    state = other.state_dict(of=tmp_path / "two")
    dcp.load(state, checkpoint_id=tmp_path / "two")
    other.load_state_dict(state, changed=True)
    for tensor, expected in zip(other._tensors, one._tensors, strict=True):
        for column, value in zip(tensor.columns, expected.columns, strict=True):
            assert torch.equal(column, value), tensor.name
