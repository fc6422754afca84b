"""What a script's author may do wrong, and hears at once."""

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import rejoin  # noqa: E402
from rejoin import run  # noqa: E402
from rejoin.torch import Session  # noqa: E402


def session(tmp_path, **settings):
    return Session(replica=0, rank=0, socket=tmp_path / "nobody", **settings)


def test_replica_and_rank_come_from_the_launcher():
    place = rejoin.place_from_environment
    assert place({"REPLICA_GROUP_ID": "3", "RANK": "1"}) == rejoin.Place(3, 1)
    assert place({"REJOIN_REPLICA": "2", "SLURM_ARRAY_TASK_ID": "7", "SLURM_PROCID": "4"}) == rejoin.Place(2, 4)
    assert place({"LWS_GROUP_INDEX": "0"}) == rejoin.Place(0, 0)
    with pytest.raises(rejoin.InvalidArgument, match="REJOIN_REPLICA='x' is no number"):
        place({"REJOIN_REPLICA": "x"})
    with pytest.raises(rejoin.InvalidArgument, match="nothing says which replica"):
        place({"GROUP_RANK": "1", "TORCHX_REPLICA_IDX": "2"})


def test_errors_have_classes_and_say_what_to_do(tmp_path):
    with pytest.raises(rejoin.InvalidArgument, match="carrier-pigeon"):
        session(tmp_path, transport="carrier-pigeon")
    with pytest.raises(rejoin.RejoinError, match="frobnicate"):
        session(tmp_path, frobnicate=1)
    model = torch.nn.Linear(2, 2)
    one = session(tmp_path, patience_ms=200)
    one.attach(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(rejoin.Unavailable, match="nobody"):
        one.join()
    with pytest.raises(rejoin.InvalidArgument, match="comes once"):
        one.attach(model, torch.optim.AdamW(model.parameters()))


def test_attaching_what_can_not_be_kept_equal_is_refused(tmp_path):
    model = torch.nn.Linear(2, 2)
    with pytest.raises(rejoin.InvalidArgument, match="'bias' wants a gradient and is in no group"):
        session(tmp_path).attach(model, torch.optim.AdamW([model.weight]))
    other = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(rejoin.InvalidArgument, match="1 parameters of the optimizer are not the model's"):
        session(tmp_path).attach(model, torch.optim.AdamW([*model.parameters(), other]))
    bad = torch.nn.Linear(2, 2, dtype=torch.complex64)
    with pytest.raises(rejoin.InvalidArgument, match="complex64"):
        session(tmp_path).attach(bad, torch.optim.SGD(bad.parameters(), lr=0.1))


def test_attached_parameters_keep_their_values_and_identity(tmp_path):
    model = torch.nn.Sequential(torch.nn.Embedding(7, 5), torch.nn.Linear(5, 7, bias=False), torch.nn.BatchNorm1d(7))
    model[1].weight = model[0].weight  # tied
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters())
    weight = model[0].weight
    one = session(tmp_path)
    one.attach(model, optimizer)
    assert model[0].weight is weight is model[1].weight
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert set(optimizer.state[weight]) == {"step", "exp_avg", "exp_avg_sq"}
    with pytest.raises(rejoin.InvalidArgument, match="due once in each step"):
        optimizer.step()
    # Tensors outlive the session: its memory stays as long as they do.
    held = model[1].weight.detach()
    del one, model, optimizer, weight
    assert torch.isfinite(held).all()


def test_rejoin_run_says_what_is_missing(capsys):
    for arguments, told in (([], "the command to run is missing"), (["--replicas", "0", "--", "x"], "--replicas 0")):
        with pytest.raises(SystemExit):
            run.main(arguments)
        assert told in capsys.readouterr().err
    version = subprocess.run([sys.executable, "-m", "rejoin.run", "--version"], capture_output=True, text=True)
    assert version.stdout == f"rejoin {rejoin.__version__}\n"
