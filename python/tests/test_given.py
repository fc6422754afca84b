"""What calls are given that is not what they take: named, with what it is to be, before anything is done."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from test_session import session  # noqa: E402

import rejoin  # noqa: E402
from rejoin.torch import Session  # noqa: E402


def test_what_a_session_is_given_it_does_not_ask_the_launcher_for(tmp_path, monkeypatch):
    for name in ("REJOIN_REPLICA", "REPLICA_GROUP_ID", "LWS_GROUP_INDEX", "SLURM_ARRAY_TASK_ID", "REJOIN_RANK", "RANK"):
        monkeypatch.delenv(name, raising=False)
    one = Session(replica=3, socket=tmp_path / "nobody")
    assert (one.replica, one.rank) == (3, 0)
    with pytest.raises(rejoin.InvalidArgument, match="nothing says which replica"):
        Session(rank=1, socket=tmp_path / "nobody")
    for settings, told in (({"replica": "x"}, "replica='x'"), ({"replica": 0, "rank": -1}, "rank=-1")):
        with pytest.raises(rejoin.InvalidArgument, match=f"{told}: it is to be a whole number, from 0"):
            Session(**settings)
    with pytest.raises(rejoin.InvalidArgument, match="longest_standing='5': it is to be a number"):
        session(tmp_path, longest_standing="5")


def test_attach_names_what_is_no_number_and_no_function(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    for settings, told in (
        ({"max_norm": "1"}, "max_norm='1': it is to be a number"),
        ({"ema": "0.9"}, "ema='0.9': it is to be a number"),
        ({"loss_scale": "1024"}, "loss_scale='1024': it is to be a number"),
        ({"loss_scale": 2**2000}, "loss_scale=.*: it is to be a number"),
        ({"bucket_bytes": None}, "bucket_bytes=None: it is to be a number"),
        ({"lr": 0.1}, "lr=0.1: it is a function of the step, such as lr=lambda step: 0.1"),
        ({"lr": plateau}, "lr=<.*ReduceLROnPlateau.*>: it is a function of the step"),
    ):
        with pytest.raises(rejoin.InvalidArgument, match=told):
            session(tmp_path).attach(model, optimizer, **settings)
    for one, other in ((lambda x: x, optimizer), (model, SimpleNamespace())):
        with pytest.raises(rejoin.InvalidArgument, match="takes a torch.nn.Module and a torch.optim.Optimizer, not a"):
            session(tmp_path).attach(one, other)
    session(tmp_path).attach(model, optimizer, max_norm=torch.tensor(1.0), lr=lambda step: 0.1, loss_scale=1024)


def test_batches_are_of_whole_numbers(tmp_path):
    one = session(tmp_path)
    for settings, told in (({"size": 10.5}, "size 10.5"), ({"size": "9"}, "size '9'"), ({"shards": 2.0}, "shards 2.0")):
        with pytest.raises(rejoin.InvalidArgument, match=f"{told} of batches..: it is to be a whole number"):
            one.batches(**{"size": 100, **settings})
    assert type(one.batches(torch.tensor(10)).size) is int


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="a torch without grad_dtype")
@pytest.mark.parametrize("masters", [False, True])
def test_a_gradient_of_another_type_than_the_parameter_has_is_taken_for_masters_alone(tmp_path, masters):
    """torch refuses to give the optimizer one of the parameter's type, in the first update, on all replicas."""
    from test_skipped import take

    model, one = torch.nn.Linear(4, 1, dtype=torch.bfloat16), session(tmp_path)
    for p in model.parameters():
        p.grad_dtype = torch.float32
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if not masters:
        with pytest.raises(rejoin.InvalidArgument, match="'weight' has type torch.bfloat16 and grad_dtype torch.float"):
            one.attach(model, optimizer, gradients=torch.float32)
        for p in model.parameters():
            p.grad_dtype = torch.bfloat16
    one.attach(model, optimizer, masters=masters)
    before = model.weight.clone()
    one._in_step = True
    one._buckets.begin()
    model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    assert all(tensor.arrived for tensor in one._tensors)
    take(one, 1, 1.0)
    assert torch.equal(model.weight, (before - 0.5).to(torch.bfloat16))
