"""What a session has goes to and comes from safetensors and torch's distributed checkpoints."""

import copy
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from torch.optim import SGD  # noqa: E402

from rejoin.errors import InvalidArgument, Mismatch, Unavailable  # noqa: E402
from rejoin.torch import Session, _form, replacing  # noqa: E402


def tied() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Embedding(7, 5), torch.nn.Linear(5, 7, bias=False), torch.nn.BatchNorm1d(7))
    model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize("masters", [False, True])
def test_a_tied_model_of_a_session_goes_to_safetensors_and_back(tmp_path, masters):
    safetensors = pytest.importorskip("safetensors.torch")

    def attached() -> tuple[torch.nn.Module, Session]:
        model = tied().bfloat16() if masters else tied()
        session = Session(replica=0, rank=0, socket=tmp_path / "nobody")
        session.attach(model, torch.optim.AdamW(model.parameters()), masters=masters, ema=0.9)
        return model, session

    model, session = attached()
    safetensors.save_model(model, str(tmp_path / "model.safetensors"))
    safetensors.save_file(session.state_dict()["average"], str(tmp_path / "average.safetensors"))
    assert set(safetensors.load_file(tmp_path / "average.safetensors")) == {"0.weight", "2.weight", "2.bias"}
    plain, (other, loaded) = tied().to(model[0].weight.dtype), attached()
    lies_at = other[0].weight.data_ptr()
    for one in (plain, other):
        safetensors.load_model(one, str(tmp_path / "model.safetensors"))
        assert one[0].weight is one[1].weight
        for name, value in one.state_dict().items():
            assert torch.equal(value, model.state_dict()[name]), name
    assert other[0].weight.data_ptr() == lies_at
    for tensor in loaded._tensors:
        tensor.check_place()


def test_a_distributed_checkpoint_is_a_plain_jobs_too(tmp_path):
    dcp = pytest.importorskip("torch.distributed.checkpoint")

    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = tied()
        return model, torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)

    def attached() -> tuple[torch.nn.Module, torch.optim.Optimizer, Session]:
        model, optimizer = made()
        session = Session(replica=0, rank=0, socket=tmp_path / "nobody")
        session.attach(model, optimizer, metrics=["loss"])
        return model, optimizer, session

    def everything(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        kept = [(f"{i} {name}", value) for i, state in optimizer.state_dict()["state"].items()
                for name, value in state.items()]  # fmt: skip
        return {**model.state_dict(), **dict(kept)}

    model, optimizer, session = attached()
    for state in optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name].uniform_()
    dcp.save(session.state_dict(), checkpoint_id=tmp_path / "checkpoint")
    saved = {name: value.clone() for name, value in everything(model, optimizer).items()}
    assert len(saved) == 16  # the tied weight counts twice, and three of BatchNorm's are buffers

    plain, plains = made()
    for p in plain.parameters():
        p.grad = torch.zeros_like(p)
    plains.step()  # so that it has a state to load into
    state = {"model": plain.state_dict(), "optimizer": plains.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "checkpoint")
    plain.load_state_dict(state["model"])
    plains.load_state_dict(state["optimizer"])

    other, others, loaded = attached()
    whole = loaded.state_dict()
    dcp.load(whole, checkpoint_id=tmp_path / "checkpoint")
    loaded.load_state_dict(whole)
    for tensor in loaded._tensors:
        tensor.check_place()
    for one in (everything(plain, plains), everything(other, others)):
        assert one.keys() == saved.keys()
        for name, value in saved.items():
            assert torch.equal(one[name], value), name


def test_what_is_written_after_an_update_is_of_the_next_step_and_not_of_the_checkpoint(tmp_path, monkeypatch):
    """The position that is saved with it has the digest of what the update has left."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3))
    model[1].running_mean = model[0].running_mean
    session = Session(replica=0, rank=0, socket=tmp_path / "nobody")
    session.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), metrics=["loss"])
    monkeypatch.setattr(session, "_native", SimpleNamespace(position=lambda: None, committed=lambda: 1))
    monkeypatch.setattr(session, "_joined", True)
    before = {name: value.clone() for name, value in session.state_dict()["model"].items()}
    model(torch.randn(8, 3))
    session._metrics.record({"loss": 1.0})
    saved = session.state_dict()
    assert saved["model"].keys() == before.keys() == model.state_dict().keys()
    assert all(torch.equal(value, before[name]) for name, value in saved["model"].items())
    assert saved["rejoin"]["rank0"]["metrics"].tolist() == [0.0]
    assert not torch.equal(model[1].running_mean, before["1.running_mean"])


@pytest.mark.parametrize("exact", [True, False])
def test_what_the_optimizer_had_counted_before_the_job_is_exact_beyond_what_its_float32_can_tell(
    tmp_path, monkeypatch, exact
):
    """All replicas have to say the same number, also those that come back with a later checkpoint."""

    def attached(counted: float) -> Session:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        for p in model.parameters():
            zeros = torch.zeros_like(p)
            optimizer.state[p] = {"step": torch.tensor(counted), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
        session = Session(replica=0, rank=0, socket=tmp_path / "nobody")
        session.attach(model, optimizer)
        return session

    before = 2.0**24 if exact else 1000.0
    one, other = attached(before), attached(0.0)
    monkeypatch.setattr(one, "_native", SimpleNamespace(position=lambda: "of step 11", committed=lambda: 11))
    monkeypatch.setattr(one, "_joined", True)
    for state in one._optimizer.state.values():
        state["step"].fill_(10 + before).add_(1)  # as torch counts: of 2^24 + 11 it makes 2^24 + 12
    saved = one.state_dict()
    if not exact:
        saved["rejoin"]["rank0"]["position"] = "of step 11"  # a checkpoint of before
    monkeypatch.setattr(_form, "_native", SimpleNamespace(position_step=lambda position: 11))
    other.load_state_dict(saved)
    assert other._updates.offset == before and other._position == "of step 11"


def made(tmp_path, kind=torch.optim.AdamW, model=None, **settings) -> Session:
    torch.manual_seed(1)
    model = model or torch.nn.Linear(3, 2)
    session = Session(replica=0, rank=0, socket=tmp_path / "nobody")
    session.attach(model, kind(model.parameters(), **({"lr": 0.1, "momentum": 0.9} if kind is SGD else {})), **settings)
    return session


@pytest.fixture
def saved(tmp_path, monkeypatch) -> dict:
    """A checkpoint of step 20 of a job with AdamW and the metrics "loss" and "norm"."""
    one = made(tmp_path, metrics=["loss", "norm"])
    for tensor in one._tensors:
        for number, column in enumerate(tensor.columns):
            column.fill_(0.25 * (number + 1))
        tensor.refresh()
    one._metrics.values.copy_(torch.tensor([3.0, 5.0]))
    one._tensors[-1].take_changes()
    one._updates.count_all(20)
    monkeypatch.setattr(one, "_native", SimpleNamespace(position=lambda: "of step 20", committed=lambda: 20))
    monkeypatch.setattr(one, "_joined", True)
    monkeypatch.setattr(_form._native, "position_step", lambda position: 20)
    return copy.deepcopy(one.state_dict())


@pytest.mark.parametrize(
    "names, values", [(["norm", "acc"], [5.0, 0.0]), (["loss", "acc", "norm"], [3.0, 0.0, 5.0]), ([], [])]
)
def test_a_job_goes_on_with_other_metrics(tmp_path, saved, names, values):
    one = made(tmp_path, metrics=names)
    if names:
        with pytest.raises(InvalidArgument, match=r"has the metrics \['loss', 'norm'\], .*changed=True"):
            one.load_state_dict(saved)
    one.load_state_dict(saved, changed=True)
    assert one._metrics.values.tolist() == values
    assert float(one._optimizer.state[one._model.weight]["step"]) == 20 and one._updates.offset == 0
    assert (one._position, one._compares) == ("of step 20", False)


def test_a_checkpoint_of_before_tells_no_names_of_metrics(tmp_path, saved):
    of_rank = saved["rejoin"]["rank0"]
    of_rank["position"] = of_rank["position"].partition(" metrics=")[0]
    same, more = made(tmp_path, metrics=["loss", "norm"]), made(tmp_path, metrics=["loss"])
    same.load_state_dict(saved)
    assert same._metrics.values.tolist() == [3.0, 5.0] and same._compares
    with pytest.raises(InvalidArgument, match="has 2 metrics, and attach.. was given .'loss'.: .*changed=True"):
        more.load_state_dict(saved)
    more.load_state_dict(saved, changed=True)
    assert more._metrics.values.tolist() == [0.0]


def test_a_job_goes_on_with_an_average_a_scale_and_another_optimizer(tmp_path, saved):
    one = made(tmp_path, SGD, metrics=["loss", "norm"], ema=0.9, loss_scale=1024.0)
    one.load_state_dict(saved, changed=True)
    weight = one._tensors[0]
    assert all(bool((column == value).all()) for column, value in zip(weight.columns, [0.25, 0.0, 0.25], strict=True))
    assert one._loss_scale.tolist() == [10.0, 0.0]
    # What begins anew counts from the job's next step on, so that AdamW corrects its moments as it should.
    without = {**saved, "optimizer": {"state": {}, "param_groups": []}}
    other = made(tmp_path, metrics=["loss", "norm"])
    other.load_state_dict(without, changed=True)
    assert other._updates.offset == -20 and float(other._optimizer.state[other._model.weight]["step"]) == 0


def as_of(session: Session, saved: dict) -> list[bool]:
    """Say of each moment of a layer's weight whether it is the checkpoint's."""
    of = session._optimizer.state[session._model[0].weight]
    return [bool((of[name] != 0).all()) for name in ("exp_avg", "exp_avg_sq")]


def test_another_optimizer_that_shares_a_moment_begins_anew_and_so_do_other_groups(tmp_path, monkeypatch, caplog):
    """A part of the moments is nothing to another rule, and in other groups the numbers mean other parameters."""

    def of(moments: dict, number: int) -> dict:
        return {name: value if value.dim() == 0 or number % 2 == 0 else value[0] for name, value in moments.items()}

    state = {"step": torch.tensor(20.0), "exp_avg": torch.ones(2, 2), "exp_inf": torch.ones(2, 2)}
    monkeypatch.setattr(_form._native, "position_step", lambda position: 20)
    kept = {"exp_avg": torch.ones(2, 2), "exp_avg_sq": torch.ones(2, 2), "step": torch.tensor(20.0)}
    for moments, groups, same in (
        (state, [[0, 1, 2, 3]], False),
        (kept, [[0], [1, 2, 3]], False),
        (kept, [[0, 1, 2, 3]], True),
    ):
        one = made(tmp_path, model=torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)))
        checkpoint = one.state_dict()
        checkpoint["optimizer"] = {
            "state": {n: of(moments, n) for n in range(4)},
            "param_groups": [{"params": group} for group in groups],
        }
        checkpoint["rejoin"]["rank0"]["position"] = "of step 20"
        one.load_state_dict(checkpoint, changed=True)
        assert as_of(one, checkpoint) == [same, same]
        assert one._updates.offset == (0 if same else -20)
        assert ("begins anew" in caplog.text) != same
        caplog.clear()


def test_buffers_may_be_others_than_the_checkpoints_and_parameters_may_not(tmp_path, caplog):
    plain, normed = (torch.nn.Sequential(torch.nn.Linear(2, 2)) for _ in range(2))
    normed.register_buffer("seen", torch.ones(3))
    checkpoint = copy.deepcopy(made(tmp_path, model=plain).state_dict())
    one = made(tmp_path, model=normed)
    with pytest.raises(RuntimeError, match="seen"):
        one.load_state_dict(checkpoint)
    one.load_state_dict(checkpoint, changed=True)
    assert "lacks the buffers 'seen'" in caplog.text and normed.seen.tolist() == [1.0, 1.0, 1.0]
    del checkpoint["model"]["0.bias"]
    with pytest.raises(InvalidArgument, match="no parameter '0.bias'"):
        made(tmp_path, model=torch.nn.Sequential(torch.nn.Linear(2, 2))).load_state_dict(checkpoint, changed=True)


def test_a_distributed_checkpoint_fills_so_much_of_a_state_as_it_has(tmp_path, saved, caplog):
    """dcp.load() itself refuses one that lacks something, or has other metrics."""
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    dcp.save(saved, checkpoint_id=tmp_path / "checkpoint")

    def loaded(kind=torch.optim.AdamW, **settings) -> tuple[Session, dict]:
        one = made(tmp_path, kind, **settings)
        state = one.state_dict(of=tmp_path / "checkpoint")
        dcp.load(state, checkpoint_id=tmp_path / "checkpoint")
        return one, state

    one, state = loaded(metrics=["loss", "norm"])
    assert set(state) == {"model", "optimizer", "rejoin"} and state["optimizer"] == one._optimizer.state_dict()
    one.load_state_dict(state)
    assert (
        one._compares
        and [bool((c == 0.25 * (n + 1)).all()) for n, c in enumerate(one._tensors[0].columns)] == [True] * 3
    )
    one, state = loaded(metrics=["norm", "acc", "loss"], ema=0.9, loss_scale=1024.0)
    with pytest.raises(InvalidArgument, match=r"has the metrics \['loss', 'norm'\], .*changed=True"):
        one.load_state_dict(state)
    one.load_state_dict(state, changed=True)
    assert one._metrics.values.tolist() == [5.0, 0.0, 3.0] and one._loss_scale.tolist() == [10.0, 0.0]
    assert bool((one._tensors[0].columns[-1] == 0.25).all()) and one._updates.offset == 0
    one, state = loaded(SGD)
    assert "begins anew" not in caplog.text
    one.load_state_dict(state, changed=True)
    assert "begins anew" in caplog.text and not one._tensors[0].columns[1].any()
    plain = {"model": one._model.state_dict(), "optimizer": {"state": {"0.weight": {"exp_avg": torch.ones(2)}}}}
    dcp.save(plain, checkpoint_id=tmp_path / "by names")
    with pytest.raises(InvalidArgument, match="the optimizer's state is by names .'optimizer.state.0.weight.exp_avg'"):
        one.state_dict(of=dcp.FileSystemReader(tmp_path / "by names"))
    # Of more groups: the numbers of their parameters are not this optimizer's.
    more = {**saved["optimizer"], "param_groups": [{"params": [7, 8]}, *saved["optimizer"]["param_groups"]]}
    dcp.save({**saved, "optimizer": more}, checkpoint_id=tmp_path / "more")
    one = made(tmp_path, metrics=["loss", "norm"])
    state = one.state_dict(of=tmp_path / "more")
    dcp.load(state, checkpoint_id=tmp_path / "more")
    assert len(state["optimizer"]["param_groups"]) == 2
    caplog.clear()
    one.load_state_dict(state, changed=True)
    assert "begins anew" in caplog.text and not one._tensors[0].columns[1].any()
    dcp.save({"model": plain["model"]}, checkpoint_id=tmp_path / "model")
    state = one.state_dict(of=tmp_path / "model")
    dcp.load(state, checkpoint_id=tmp_path / "model")
    with pytest.raises(InvalidArgument, match="has no optimizer's state: .*changed=True"):
        one.load_state_dict(state)
    one.load_state_dict(state, changed=True)
    one._joined = True
    with pytest.raises(InvalidArgument, match="fills before join"):
        one.state_dict(of=tmp_path / "checkpoint")


def test_a_state_that_differs_names_the_remedy_in_python(tmp_path, saved, monkeypatch):
    one = made(tmp_path, metrics=["loss", "norm"], ema=0.9)
    one.load_state_dict(saved)
    given = []

    def join(position, compare):
        given.append((position, compare))
        if compare:
            raise Mismatch("its digest is 1, and should be 2; where they are meant to differ, give join() the position")

    monkeypatch.setattr(one, "_native", SimpleNamespace(set_fingerprint=lambda text: None, join=join))
    with pytest.raises(Mismatch, match=r"should be 2; where .* session.load_state_dict\(state, changed=True\)"):
        one.join()
    one.load_state_dict(saved, changed=True)
    one.join()
    assert given == [("of step 20", True), ("of step 20", False)]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "gpt [1].pt"
    path.write_bytes(b"old")
    with replacing(path) as file:
        torch.save({"step": 1}, file)
        assert path.read_bytes() == b"old"
    assert torch.load(path, weights_only=True) == {"step": 1}
    with pytest.raises(ZeroDivisionError), replacing(path) as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert torch.load(path, weights_only=True) == {"step": 1}
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "nowhere" / "gpt.pt"):
        pass
    with pytest.raises(FileNotFoundError, match="of the script"), replacing(path):
        raise FileNotFoundError("of the script")


def test_a_leader_that_was_stopped_while_it_wrote_leaves_the_next_ones_file_as_it_is(tmp_path):
    path = tmp_path / "gpt.pt"
    dead = replacing(path)
    dead.__enter__().write(b"killed while it wrote")
    for next_one_is_through in (True, False):
        stopped, following = replacing(path), replacing(path)
        stopped.__enter__().write(b"half of it, ")
        after = following.__enter__()
        after.write(b"the next one's")
        if next_one_is_through:
            following.__exit__(None, None, None)
        with pytest.raises(Unavailable, match="gpt.pt is not written: another writer has begun since"):
            stopped.__exit__(None, None, None)
        if not next_one_is_through:
            following.__exit__(None, None, None)
        assert path.read_bytes() == b"the next one's"
        assert [one.name for one in tmp_path.iterdir()] == ["gpt.pt"]
