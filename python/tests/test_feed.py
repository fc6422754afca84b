"""Loops that are not the script's own: what they iterate over, and closures that their steps come with."""

import collections
import contextlib
import importlib
import re
import sys
import types
from dataclasses import replace
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from test_session import a_job_of  # noqa: E402

import rejoin  # noqa: E402
from rejoin.torch._feed import parts_of  # noqa: E402


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, at):
        return float(at)


def a_feed_of(tmp_path, monkeypatch, last, samples=1, rules=None, **settings):
    one, model, native = a_job_of(tmp_path, monkeypatch, last, **(rules or {}))
    begin_step = native.begin_step

    def begin_wider_step():
        begun = begin_step()
        return begun and (*begun[:4], [(samples * begun[0], samples * (begun[0] + 1))], *begun[5:])

    monkeypatch.setattr(native, "begin_step", begin_wider_step)
    one._joined = False
    loader = torch.utils.data.DataLoader(Numbers(), batch_sampler=one.batches(100, shuffle=False))
    one._joined = True
    return one, model, native, one.data(loader, **settings)


def test_a_closure_is_called_once_with_gradients_and_its_value_is_given(tmp_path, monkeypatch):
    one, model, _ = a_job_of(tmp_path, monkeypatch, 3)
    optimizer, calls = one._optimizer, []

    def closure():
        calls.append(torch.is_grad_enabled())
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        assert model.weight.grad is not None
        return loss

    for _ in one.steps():
        with torch.no_grad():
            loss = optimizer.step(closure)
        assert loss.requires_grad
        with pytest.raises(rejoin.InvalidArgument, match="due once in each step"):
            optimizer.step(closure)
    assert calls == [True] * 3
    one._joined = False
    with one.warm_up():
        assert optimizer.step(lambda: 7.0) == 7.0


def test_a_closure_that_raises_leaves_the_step_to_be_tried_again(tmp_path, monkeypatch):
    one, _, _ = a_job_of(tmp_path, monkeypatch, 1)
    for _ in one.steps():
        with pytest.raises(ZeroDivisionError):
            one._optimizer.step(lambda: 1 / 0)
        assert one._optimizer.step() is None


def test_a_loop_that_is_not_the_scripts_own_gets_the_data_alone(tmp_path, monkeypatch):
    one, model, native, feed = a_feed_of(tmp_path, monkeypatch, 5, steps=5)
    assert len(feed) == 5 and one.step is None and not feed.ended
    seen = []
    for _ in range(3):  # as over epochs
        for at, data in enumerate(feed):
            seen.append((one.step.number, data.tolist()))
            one._optimizer.step()
            if at == 1:
                break
    assert seen == [(number, [float(number)]) for number in range(1, 6)]
    assert feed.ended and one.finished and native.calls.count("leave") == 1 and list(feed) == []
    feed.end()
    assert native.calls.count("leave") == 1
    with pytest.raises(TypeError, match="steps=…"):
        len(one.data(feed.loader))
    for wrong in ({"steps": 0}, {"micro_batches": 0}):
        with pytest.raises(rejoin.InvalidArgument, match="data"):
            one.data(feed.loader, **wrong)


@pytest.mark.parametrize("kind", ["steps", "data"])
def test_a_loop_that_takes_data_ahead_hears_what_to_do(tmp_path, monkeypatch, kind):
    one, _, _, feed = a_feed_of(tmp_path, monkeypatch, 5)
    ahead = iter(one.steps() if kind == "steps" else feed)
    next(ahead)
    told = r"step 1 has ended without .*leave a batch out.*as zeros.*steps=…\).*micro_batches=….*accumul"
    with pytest.raises(rejoin.InvalidArgument, match=told):
        next(ahead)
    one, _, _, feed = a_feed_of(tmp_path, monkeypatch, 5)
    one._model = None
    with pytest.raises(rejoin.InvalidArgument, match=r"before attach\(\): .*steps=…"):
        next(iter(feed))


def test_a_loop_that_passes_over_exceptions_hears_what_has_ended_the_session(tmp_path, monkeypatch):
    one, _, native = a_job_of(tmp_path, monkeypatch, 5)

    def out():
        raise rejoin.Cancelled("this process was silent for 16.0 s, so the daemon put it out")

    with pytest.raises(rejoin.Cancelled, match="was silent for 16.0 s"):
        for step, _samples in one.steps():
            if step.number == 3:
                monkeypatch.setattr(native, "check", out, raising=False)
                monkeypatch.setattr(native, "begin_update", out)
            with contextlib.suppress(Exception):
                one._optimizer.step()
    assert step.number == 3


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("rules", [{}, {"main_grad": True}])
def test_the_last_of_a_steps_micro_batches_hands_over_its_gradients(tmp_path, monkeypatch, ahead, rules):
    one, model, native, feed = a_feed_of(tmp_path, monkeypatch, 2, 4, rules, micro_batches=2, steps=2)
    handed_over = []
    monkeypatch.setattr(one._buckets, "_hand_over", handed_over.append)
    assert len(feed) == 4
    parts = iter(feed)
    for step in (1, 2):
        handed_over.clear()
        given = [next(parts), next(parts)] if ahead else [None, None]
        for number, part in enumerate(given):
            part = next(parts) if part is None else part
            begin = 4 * step + 2 * number
            assert part.tolist() == [begin, begin + 1]
            (model(torch.ones(1, 2)).sum() * part.sum()).backward()
            held = [tensor for tensor in one._tensors if tensor.is_parameter and not tensor.arrived]
            assert bool(held) == (number == 0)
        (weight,) = (tensor for tensor in one._tensors if tensor.name == "weight")
        assert float(weight.gradient[0]) == sum(range(4 * step, 4 * step + 4))
        one._optimizer.step()
        assert len(handed_over) == len(one._buckets._buckets)
    assert next(parts, None) is None and one.finished


def test_a_micro_batch_without_a_backward_keeps_nothing_back(tmp_path, monkeypatch):
    one, model, _, feed = a_feed_of(tmp_path, monkeypatch, 2, samples=2, micro_batches=2)
    for number, _ in enumerate(feed):
        if number % 2 == 0:
            model(torch.ones(1, 2)).sum().backward()
        else:
            one._optimizer.step()
            assert all(tensor.arrived for tensor in one._tensors)
            assert bool((one._tensors[0].gradient == 1).all())


@pytest.mark.parametrize(("ends_at", "left"), [(3, False), (2, True)])
def test_a_loop_that_counts_steps_itself_takes_the_jobs_end_or_leaves(tmp_path, monkeypatch, caplog, ends_at, left):
    one, _, native, feed = a_feed_of(tmp_path, monkeypatch, 3)
    for _ in feed:
        one._optimizer.step()
        if one.step.number == ends_at:
            break
    assert not one.finished and "leave" not in native.calls
    feed.end()
    assert native.calls.count("leave") == 1 and one.finished == (not left) and feed.ended
    assert ("the job goes on with step 3: let the loop's number of steps be the job's" in caplog.text) == left


def test_an_abandoned_iterator_does_not_end_a_later_ones_step(tmp_path, monkeypatch):
    one, _, _, feed = a_feed_of(tmp_path, monkeypatch, 3)
    first = iter(feed)
    next(first)
    one._optimizer.step()
    second = iter(feed)
    next(second)
    assert next(first, None) is None and one.step.number == 2
    one._optimizer.step()
    next(second)
    assert one.step.number == 3


def test_collated_data_is_divided_whatever_holds_it():
    Pair = collections.namedtuple("Pair", ["x", "y"])
    data = {
        "x": torch.arange(10).view(5, 2),
        "pair": Pair(torch.arange(5), torch.tensor(3)),
        "names": list("abcde"),
        "columns": [torch.arange(5), torch.ones(2)],
        "size": 5,
        "more": collections.UserDict(x=torch.arange(5)),
    }
    first, second = parts_of(data, 5, 2)
    assert first["x"].tolist() == [[0, 1], [2, 3]] and second["x"].tolist() == [[4, 5], [6, 7], [8, 9]]
    assert second["pair"].x.tolist() == [2, 3, 4] and type(second["pair"]) is Pair and second["pair"].y == 3
    assert first["names"] == ["a", "b"] and second["columns"][0].tolist() == [2, 3, 4]
    assert second["columns"][1].tolist() == [1, 1] and first["size"] == 5
    assert type(first["more"]) is collections.UserDict and first["more"]["x"].tolist() == [0, 1]
    with pytest.raises(rejoin.InvalidArgument, match="a step of 5 samples can't be divided into 6 micro-batches"):
        parts_of(data, 5, 6)


def test_a_step_is_not_ended_before_all_of_its_parts_were_asked_for(tmp_path, monkeypatch):
    one, model, _, feed = a_feed_of(tmp_path, monkeypatch, 2, samples=4, micro_batches=2)
    parts = iter(feed)
    next(parts)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(rejoin.InvalidArgument, match=r"step\(\) with 1 of this step's 2 parts of data to come"):
        one._optimizer.step()
    next(parts)
    with one.accumulate():  # a part of a part
        model(torch.ones(1, 2)).sum().backward()
    model(torch.ones(1, 2)).sum().backward()
    one._optimizer.step()
    next(parts)
    assert one.step.number == 2


def test_what_a_collate_fn_of_ones_own_gives_is_divided_by_samples():
    images = [torch.full((3, 4, 4), float(number)) for number in range(3)]  # as many channels as there are samples
    boxes = [{"box": torch.arange(3)} for _ in images]
    first, second, _ = parts_of((tuple(images), tuple(boxes)), 3, 3, by_default=False)
    assert first == ((images[0],), (boxes[0],)) and second == ((images[1],), (boxes[1],))
    first, second = parts_of({"images": images, "targets": boxes}, 3, 2, by_default=False)
    assert first == {"images": images[:1], "targets": boxes[:1]} and second["images"] == images[1:]
    assert parts_of(boxes, 3, 3, by_default=False) == [[box] for box in boxes]
    pair = [torch.arange(2), torch.arange(2, 4)]  # two fields of two samples
    first, second = parts_of(pair, 2, 2, by_default=False)
    assert [field.tolist() for field in first] == [[0], [2]] and [field.tolist() for field in second] == [[1], [3]]
    with pytest.raises(rejoin.InvalidArgument, match="nothing of a dict .* has an element for each of the 3 samples"):
        parts_of({"size": 7}, 3, 3, by_default=False)


def test_what_torchs_collate_fn_gives_has_fields_however_many_samples_there_are():
    for samples in (1, 2, 3):
        items = [({"x": number, "name": f"n{number}"}, {"y": torch.ones(samples)}) for number in range(samples)]
        parts = parts_of(torch.utils.data.default_collate(items), samples, samples)
        for number, (x, y) in enumerate(parts):
            assert x["x"].tolist() == [number] and list(x["name"]) == [f"n{number}"]
            assert y["y"].shape == (1, samples)


def test_the_last_updates_rates_are_known(tmp_path, monkeypatch):
    one, _, _ = a_job_of(tmp_path, monkeypatch, 1)
    assert one.last_lr == [0.001]


@pytest.mark.parametrize("kind", ["LambdaLR", "StepLR", None])
def test_a_schedule_of_lambdas_is_a_function_of_the_step(kind):
    from rejoin.torch._frameworks import schedule_of

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
    if kind is None:
        assert schedule_of(None) is None
        return
    if kind == "StepLR":
        with pytest.raises(rejoin.InvalidArgument, match="StepLR does not say .* lr=, a function of the step"):
            schedule_of(torch.optim.lr_scheduler.StepLR(optimizer, 3))
        return
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    rates = schedule_of(scheduler)
    for step in range(1, 5):
        assert rates(step) == [optimizer.param_groups[0]["lr"]]
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize(("name", "hidden"), [("transformers", ["transformers"]),
                                              ("lightning", ["lightning", "pytorch_lightning"])])  # fmt: skip
def test_where_a_framework_is_missing_it_is_said_what_to_install(monkeypatch, name, hidden):
    for one in hidden:
        monkeypatch.setitem(sys.modules, one, None)
    monkeypatch.delitem(sys.modules, f"rejoin.{name}", raising=False)
    with pytest.raises(ModuleNotFoundError, match=f"pip install {name}"):
        importlib.import_module(f"rejoin.{name}")


def adapter_for(monkeypatch, name, stand_in, **contents):
    """Give the module for this framework, over a stand-in of that."""
    module = types.ModuleType(stand_in)
    vars(module).update(contents)
    for hidden, value in ((name, None), (stand_in, module), (f"rejoin.{name}", None)):
        monkeypatch.setitem(sys.modules, hidden, value)
    del sys.modules[f"rejoin.{name}"]  # it is taken out, or put back, behind the test
    return importlib.import_module(f"rejoin.{name}")


def test_a_trainer_of_transformers_counts_the_jobs_steps_and_ends_with_the_job(tmp_path, monkeypatch):
    class Trainer:
        def __init__(self, callback):
            self.args = SimpleNamespace(
                max_steps=9, gradient_accumulation_steps=1, data_seed=None, seed=3, max_grad_norm=1.0, output_dir="out"
            )
            self.callback_handler = SimpleNamespace(callbacks=[TensorBoardCallback(), callback])
            self.accelerator = SimpleNamespace()
            self.logged, self.saved = [], []

        def get_train_dataloader(self):
            return torch.utils.data.DataLoader(Numbers(), batch_size=4)

        def log(self, logs):
            self.logged.append(logs)

        def save_model(self, output_dir, _internal_call):
            self.saved.append(output_dir)

        def save_state(self):
            self.saved.append("state")

        def save_metrics(self, split, metrics):
            self.saved.append(metrics)

    class TensorBoardCallback:
        logging_dir = None

    adapter = adapter_for(monkeypatch, "transformers", "transformers", Trainer=Trainer, TrainerCallback=object)
    one, _, native = a_job_of(tmp_path, monkeypatch, 9)
    one._joined = False
    callback = adapter.RejoinCallback(one)
    trainer = adapter.RejoinTrainer(callback)
    feed = trainer.get_train_dataloader()
    assert re.fullmatch(r"out/runs/\S+-replica0", trainer.callback_handler.callbacks[0].logging_dir)
    trainer.save_state()  # as each does that has not joined
    one._joined, native.step = True, 4  # it has come back
    trainer.save_state()
    assert len(feed) == 9 and float(trainer.accelerator.clip_grad_norm_([], float("inf"))) == 0.0
    state, control = SimpleNamespace(global_step=0, epoch=0.0), SimpleNamespace(should_training_stop=False)
    for number, _ in enumerate(feed, start=5):
        callback.on_step_begin(trainer.args, state, control)
        assert state.global_step == number - 1
        one._optimizer.step()
        state.global_step += 1
        callback.on_step_end(trainer.args, state, control)
        assert state.epoch == (number + 1) / 100
        callback.on_epoch_end(trainer.args, state, control)
        assert not control.should_training_stop
    assert trainer._globalstep_last_logged == 4
    callback.on_epoch_end(trainer.args, state, control)
    callback.on_train_end(trainer.args, state, control)
    assert control.should_training_stop and one.finished and native.calls.count("leave") == 1
    trainer.log({"loss": 1.0, "learning_rate": 7.0, "grad_norm": 0.0})
    assert trainer.logged == [{"loss": 1.0, "learning_rate": 0.001}]
    monkeypatch.setattr(one, "final_save", lambda path: contextlib.nullcontext(path == "mine"))
    for path in ("mine", "another's"):
        trainer.save_model(path)
    native.version = lambda: 9
    trainer.save_metrics("eval", {"loss": 1.0})
    one._step = replace(one._step, leads=False)
    trainer.save_metrics("eval", {"loss": 2.0})
    assert trainer.saved == ["state", "mine", {"loss": 1.0}]


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_trainer_of_lightning_counts_the_jobs_steps_and_ends_with_the_job(tmp_path, monkeypatch, micro_batches):
    class Progress(SimpleNamespace):
        def __init__(self):
            super().__init__(ready=0, started=0, processed=0, completed=0)

    adapter = adapter_for(monkeypatch, "lightning", "pytorch_lightning", Callback=object)
    rules = {"lr": lambda step: 0.1 * step}
    one, _, native, feed = a_feed_of(tmp_path, monkeypatch, 9, 3, rules, steps=9, micro_batches=micro_batches)
    native.step = 4  # it has come back
    callback = adapter.RejoinCallback(one)
    callback.part.feed = feed
    loop = SimpleNamespace(
        automatic_optimization=SimpleNamespace(optim_progress=SimpleNamespace(optimizer=SimpleNamespace(
            step=SimpleNamespace(total=Progress())))),
        manual_optimization=SimpleNamespace(optim_step_progress=SimpleNamespace(total=Progress())),
        batch_progress=SimpleNamespace(total=Progress(), current=Progress()),
    )  # fmt: skip
    trainer = SimpleNamespace(
        fit_loop=SimpleNamespace(epoch_loop=loop), optimizers=[one._optimizer], should_stop=False
    )  # fmt: skip
    for index, batch in enumerate(feed, start=4 * micro_batches):
        for progress in (loop.batch_progress.total, loop.batch_progress.current):
            progress.ready += 1
        callback.on_train_batch_start(trainer, None, batch, 0)
        step = 1 + index // micro_batches
        assert one.step.number == step and loop.batch_progress.total.ready == index + 1
        assert loop.automatic_optimization.optim_progress.optimizer.step.total.completed == step - 1
        assert loop._batches_that_stepped == step - 1 and one._optimizer.param_groups[0]["lr"] == 0.1 * step
        if (index + 1) % micro_batches == 0:
            one._optimizer.step()
        callback.on_train_batch_end(trainer, None, None, batch, 0)
        callback.on_train_epoch_end(trainer, None)
        assert not trainer.should_stop
    callback.on_train_epoch_end(trainer, None)
    callback.on_train_end(trainer, None)
    assert trainer.should_stop and one.finished and index == 9 * micro_batches - 1
