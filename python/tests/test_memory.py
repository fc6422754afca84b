"""The memory that a session shares with its daemon, and what leads the model or the optimizer out of it."""

import copy
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from test_changes import in_a_step  # noqa: E402
from test_session import Job, session  # noqa: E402

import rejoin  # noqa: E402
from rejoin.torch import _loop  # noqa: E402


@pytest.mark.parametrize("how", ["share_memory", "weights", "moments", "average", "checkpoint", "main_grad"])
def test_what_is_given_to_another_process_and_moved_by_that_is_refused(tmp_path, monkeypatch, how):
    """torch moves the memory under all views of it; the optimizer would go on where no daemon looks."""
    model = torch.nn.BatchNorm1d(2)
    one, _ = in_a_step(tmp_path, monkeypatch, model, ema=0.9, main_grad=True, metrics=["loss"])
    before = one.state_dict()["model"]["weight"].data_ptr()
    if how == "share_memory":
        model.share_memory()
    elif how == "main_grad":
        ForkingPickler.dumps(model.bias.main_grad)
    else:
        state = one.state_dict()
        given = {"weights": state["model"], "moments": state["optimizer"], "average": state["average"]}
        ForkingPickler.dumps(given.get(how, state))
    assert (model.weight.data_ptr() != before) == (how in ("share_memory", "weights", "checkpoint"))
    for check in (one.state_dict, one.join, lambda: [tensor.check_place() for tensor in one._tensors]):
        with pytest.raises(rejoin.InvalidArgument, match="does not lie in the session's memory.*Give others a clone"):
            check()


def test_what_is_moved_after_the_step_was_checked_is_given_up(tmp_path, monkeypatch):
    """A Queue pickles in a thread of its own."""
    model = torch.nn.Linear(2, 2)
    one, said = session(tmp_path), []
    one.attach(model, torch.optim.AdamW(model.parameters()))
    native = SimpleNamespace(
        begin_update=lambda: ForkingPickler.dumps(model.state_dict()) and [],
        abandon_update=said.append,
        end_update=lambda stream: said.append("ended"),
    )
    monkeypatch.setattr(one, "_native", native)
    with pytest.raises(rejoin.InvalidArgument, match="'weight', or .* does not lie in the session's memory"):
        _loop.update(one, 1)
    assert len(said) == 1 and "Give others a clone" in said[0]


def test_a_copy_of_the_weights_may_be_given_to_another_process(tmp_path):
    model = torch.nn.Linear(2, 2)
    one = session(tmp_path)
    one.attach(model, torch.optim.AdamW(model.parameters()))
    copy.deepcopy(model).share_memory()
    ForkingPickler.dumps({name: value.clone() for name, value in model.state_dict().items()})
    for tensor in one._tensors:
        tensor.check_place()


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("how", ["put back", "renormed", "loaded before", "read", "averaged"])
def test_weights_that_are_written_between_updates_are_refused(tmp_path, monkeypatch, how, masters):
    """Replicas that catch up read them meanwhile, also where they are put back."""
    model = torch.nn.Embedding(3, 2, max_norm=0.1 if how == "renormed" else None, dtype=torch.bfloat16)
    one, native = session(tmp_path), Job(5)
    one.attach(model, torch.optim.AdamW(model.parameters()), ema=0.9, masters=masters)
    if how == "loaded before":
        model.load_state_dict({"weight": torch.ones(3, 2)})

    def begin_update():
        native.broken = False
        return [(0, 0, 6, native.step, one._tensors[0].reduced.data_ptr())]

    native.begin_update = begin_update
    for of in (one, one._buckets, one._updates):
        monkeypatch.setattr(of, "_native", native)
    for step, _ in one.steps():
        model(torch.tensor([1])).sum().backward()
        if step.number == {"renormed": 1, "put back": 2}.get(how) and not masters:
            with pytest.raises(rejoin.InvalidArgument, match="parameter 'weight' was written to between two updates"):
                one._optimizer.step()
            return
        one._optimizer.step()
        if how == "put back":
            kept = model.weight.detach().clone()
            with torch.no_grad():
                model.weight.mul_(1.01)
                model.weight.copy_(kept)
        elif how == "read":
            copy.deepcopy(model.to("cpu").eval())
        elif how == "averaged":
            with one.averaged():
                model(torch.tensor([1]))
    assert one.finished


@pytest.mark.parametrize("masters", [False, True])
def test_a_block_of_averages_within_another_one_changes_nothing_and_one_that_is_left_open_is_refused(
    tmp_path, monkeypatch, masters
):
    model = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
    one = session(tmp_path)
    one.attach(model, torch.optim.AdamW(model.parameters()), ema=0.9, masters=masters)
    for of in (one, one._buckets, one._updates):
        monkeypatch.setattr(of, "_native", Job(1))
    one._tensors[0].columns[-1].fill_(5.0)
    weight = model.weight.detach().clone()
    with one.averaged():
        for _ in range(2):
            assert bool((model.weight == 5.0).all())
            with pytest.raises(rejoin.InvalidArgument, match="within averaged"):
                one.state_dict()
            with one.averaged():
                assert bool((model.weight == 5.0).all())
    assert torch.equal(model.weight, weight)
    with monkeypatch.context() as within, pytest.raises(KeyboardInterrupt):
        within.setattr(one._tensors[-1], "lay", interrupted_once(one._tensors[-1].lay))
        with one.averaged():
            pass
    assert torch.equal(model.weight, weight), "as it was, also where the block's beginning was interrupted"
    held = one.averaged()
    held.__enter__()
    with pytest.raises(rejoin.InvalidArgument, match="averaged.. has not ended.*behind optimizer.step"):
        one.join()
    one._joined = True
    with pytest.raises(rejoin.InvalidArgument, match="averaged.. has not ended"):
        next(one.steps())
    held.__exit__(None, None, None)
    assert torch.equal(model.weight, weight)


def interrupted_once(function):
    """Give the function, whose first call is interrupted."""
    calls = []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        function(*arguments)

    return interrupted
