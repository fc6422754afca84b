"""What a script's author may do wrong, and hears at once."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import rejoin  # noqa: E402
from rejoin import run  # noqa: E402
from rejoin.torch import Batches, Session  # noqa: E402
from rejoin.torch._data import Fetcher  # noqa: E402


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
    with pytest.raises(rejoin.InvalidArgument, match="comes once.*ModuleList, with one optimizer"):
        one.attach(model, torch.optim.AdamW(model.parameters()))


def test_attaching_what_can_not_be_kept_equal_is_refused(tmp_path):
    model = torch.nn.Linear(2, 2)
    with pytest.raises(rejoin.InvalidArgument, match="'bias' wants a gradient and is in no group"):
        session(tmp_path).attach(model, torch.optim.AdamW([model.weight]))
    other = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(rejoin.InvalidArgument, match="1 parameters of the optimizer are not the model's"):
        session(tmp_path).attach(model, torch.optim.AdamW([*model.parameters(), other]))
    bad = torch.nn.Linear(2, 2, dtype=torch.complex64)
    with pytest.raises(rejoin.InvalidArgument, match="parameter 'weight' has type torch.complex64.*view_as_real.. of"):
        session(tmp_path).attach(bad, torch.optim.SGD(bad.parameters(), lr=0.1))
    sparse = torch.nn.ParameterDict({"eye": torch.nn.Parameter(torch.eye(3).to_sparse())})
    with pytest.raises(rejoin.InvalidArgument, match="parameter 'eye' is a sparse or nested tensor"):
        session(tmp_path).attach(sparse, torch.optim.SGD(sparse.parameters(), lr=0.1))
    model.empty = torch.nn.Parameter(torch.zeros(0))
    with pytest.raises(rejoin.InvalidArgument, match="'empty' has no elements: freeze it, and leave it out"):
        session(tmp_path).attach(model, torch.optim.AdamW(model.parameters()))
    lazy, images = torch.nn.LazyLinear(2), torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    with pytest.raises(rejoin.InvalidArgument, match="'weight' has no shape yet: call the model once"):
        session(tmp_path).attach(lazy, torch.optim.AdamW(lazy.parameters()))
    with pytest.raises(rejoin.InvalidArgument, match="'weight' is not contiguous.*memory_format=torch.contiguous_for"):
        session(tmp_path).attach(images, torch.optim.AdamW(images.parameters()))
    with torch.inference_mode():
        inference = torch.nn.Linear(2, 2)
    with pytest.raises(rejoin.InvalidArgument, match="'weight' was made within torch.inference_mode.*deepcopy"):
        session(tmp_path).attach(inference, torch.optim.AdamW(inference.parameters()))
    with pytest.raises(rejoin.InvalidArgument, match="steps.. takes a DataLoader .* not a list"):
        next(session(tmp_path).steps([1, 2]))


def test_what_would_leave_the_session_is_refused(tmp_path, monkeypatch):
    model = torch.nn.Linear(2, 2)

    def attach(**settings):
        session(tmp_path).attach(model, optimizer, **settings)

    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    for settings, told in (
        ({"ema": 1.5}, "ema=1.5: it is to be between 0 and 1"),
        ({"max_norm": -1.0}, "max_norm=-1.0: it is to be above 0"),
        ({"max_norm": float("nan")}, "max_norm=nan"),
        ({"metrics": ("loss", "loss")}, "one of them is there twice"),
        ({"metrics": "mae"}, "give a list of names"),
        ({"loss_scale": 1000.0}, "a power of 2"),
        ({"gradients": torch.int32}, "gradients=torch.int32: .* a type of floating point"),
    ):
        with pytest.raises(rejoin.InvalidArgument, match=told):
            attach(**settings)
    hook = optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(rejoin.InvalidArgument, match="the optimizer has hooks on step"):
        attach()
    hook.remove()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(rejoin.InvalidArgument, match="call torch.distributed.init_process_group"):
        attach()
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    with pytest.raises(rejoin.InvalidArgument, match="2 ranks .SLURM_STEP_NUM_TASKS.: call torch.distributed"):
        attach()
    monkeypatch.setenv("REJOIN_RANK", "0")  # each task of the srun is a replica of its own
    state = optimizer.state_dict()
    attach()
    with pytest.raises(rejoin.InvalidArgument, match="load it before, or by session.load_state_dict"):
        optimizer.load_state_dict(state)
    with pytest.raises(rejoin.InvalidArgument, match="all parameters are declared with attach"):
        optimizer.add_param_group({"params": []})


def test_the_fingerprint_says_what_makes_the_bits():
    from rejoin.torch._fingerprint import fingerprint
    from rejoin.torch._update import Rules

    model = torch.nn.Linear(2, 2)

    def of(rules, **settings):
        return fingerprint(torch.optim.AdamW(model.parameters(), **settings), rules, torch.device("cpu"), 0)

    one = of(Rules(max_norm=1.0))
    if torch.set_flush_denormal(True):
        told = of(Rules(max_norm=1.0))
        torch.set_flush_denormal(False)
        assert "flushes subnormal" in told
    assert f"torch {torch.__version__}" in one and "AdamW" in one and "max_norm=1.0" in one
    assert one == of(Rules(max_norm=1.0))
    assert one != of(Rules(max_norm=1.0), lr=0.5) and one != of(Rules(max_norm=2.0)) and one != of(Rules(ema=0.9))
    schedule = Rules(lr=lambda step: 1.0 / step)
    assert of(schedule) == of(schedule, lr=0.5), "the schedule sets it"
    assert of(schedule) != of(Rules(lr=lambda step: 2.0 / step))
    assert len(of(Rules(lr=lambda step: [0.1] * 1000)).encode()) <= 4096


def test_data_sets_are_compared_when_replicas_join(tmp_path, monkeypatch):
    """Sample k is another one where the size, the seed or the order is another."""
    told = []
    for settings in ({}, {"size": 96}, {"seed": 5}, {"shuffle": False}, {"shards": 2}, {"shards": 2, "shard": 1}):
        model = torch.nn.Linear(2, 2)
        one = session(tmp_path)
        one.attach(model, torch.optim.AdamW(model.parameters()))
        one.batches(**{"size": 100, **settings})
        monkeypatch.setattr(one, "_native", SimpleNamespace(set_fingerprint=told.append, join=lambda *_: None))
        one.join()
    assert "; data of 100 samples, seed 0, shuffle True, shards 1" in told[0], told
    assert len(set(told)) == 5 and told[-2] == told[-1], "which shard it is, is a rank's own"
    one.batches(100, shards=2)
    with pytest.raises(rejoin.InvalidArgument, match="batches.. of data of 99 samples.* after join"):
        one.batches(99)


def test_a_second_join_is_refused_before_anything_is_changed(tmp_path, monkeypatch):
    """It would take buffers, metrics and the average as they are at the time, on this replica alone."""
    model, one = torch.nn.BatchNorm1d(2), session(tmp_path)
    one.attach(model, torch.optim.AdamW(model.parameters()), ema=0.9, metrics=["loss"])
    answers = [rejoin.Unavailable("nobody"), None]  # one that has found no daemon may be tried again

    def join(*_):
        if error := answers.pop(0):
            raise error

    monkeypatch.setattr(one, "_native", SimpleNamespace(set_fingerprint=lambda _: None, join=join, leave=lambda: None))
    with pytest.raises(rejoin.Unavailable):
        one.join()
    one.join()
    with torch.no_grad():
        one._tensors[0].columns[0].fill_(2.0)
        model.running_mean.fill_(5.0)
    one._metrics.record({"loss": 7.0})
    before = [column.clone() for tensor in one._tensors for column in tensor.columns]
    version = one._tensors[0].version
    for told in ("join.. comes once, and this session has joined: session.steps..", "has left the job: open another"):
        with pytest.raises(rejoin.InvalidArgument, match=told):
            one.join()
        after = [column for tensor in one._tensors for column in tensor.columns]
        assert all(map(torch.equal, before, after)) and one._tensors[0].version == version
        one.leave()


def test_a_block_that_accumulates_may_be_in_another_one(tmp_path):
    one = session(tmp_path)
    with one.accumulate():
        with pytest.raises(OSError), one.accumulate():
            raise OSError
        assert one._accumulating, "what comes behind the inner block lies in the outer one"
    assert not one._accumulating


def test_warm_up_leaves_no_trace(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5))
    one = session(tmp_path)
    with pytest.raises(rejoin.InvalidArgument, match="after attach"), one.warm_up():
        pass
    optimizer = torch.optim.AdamW(model.parameters())
    one.attach(model, optimizer)
    before, random = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    with one.warm_up():
        for _ in range(2):  # as a compiled function does that calls optimizer.step()
            model(torch.randn(8, 3)).sum().backward()
            assert model[0].weight.grad is not None
            optimizer.step()
            assert model[0].weight.grad is None
            optimizer.zero_grad()
        model(torch.randn(8, 3)).sum().backward()
        with pytest.raises(rejoin.InvalidArgument, match="due once in each step"):
            one._joined = True
            optimizer.step()
        one._joined = False
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state()) and model[0].weight.grad is None
    with pytest.raises(rejoin.InvalidArgument, match="due once in each step"):
        optimizer.step()


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


class Job:
    """In the place of the native session: a job of some steps, and what was called."""

    def __init__(self, last: int) -> None:
        self.step, self.last, self.calls, self.broken = 0, last, [], False

    def begin_step(self):
        assert "leave" not in self.calls
        assert not self.broken, "begin_step() in a step that has not ended"
        if self.step == self.last:
            return None
        self.step, self.broken = self.step + 1, True
        return self.step, True, True, 1, [(self.step, self.step + 1)], 1, 1, True

    def begin_update(self):
        self.broken = False

    def __getattr__(self, name):
        return lambda *_: self.calls.append(name)


def a_job_of(tmp_path, monkeypatch, steps, **rules):
    model = torch.nn.Linear(2, 2)
    one, native = session(tmp_path), Job(steps)
    one.attach(model, torch.optim.AdamW(model.parameters()), **rules)
    for of in (one, one._buckets, one._updates):
        monkeypatch.setattr(of, "_native", native)
    monkeypatch.setattr(one, "_joined", True)
    return one, model, native


def test_a_loop_over_data_epochs_ends_where_the_job_does(tmp_path, monkeypatch):
    one, model, native = a_job_of(tmp_path, monkeypatch, 5)
    seen = []
    for _ in range(3):
        for step, _samples in one.steps():
            seen.append(step.number)
            one._optimizer.step()
            if step.number == 2:
                break
    assert seen == [1, 2, 3, 4, 5] and native.calls.count("leave") == 1
    assert one.finished


def test_a_step_that_was_left_before_its_update_is_given_again(tmp_path, monkeypatch):
    """Such as for data of another shape from some step on."""
    one, model, _ = a_job_of(tmp_path, monkeypatch, 5)
    for step, _samples in one.steps():
        if step.number > 2:
            with one.accumulate():
                model(torch.ones(1, 2)).sum().backward()
            break
        one._optimizer.step()
    for step, samples in one.steps():
        assert step.number == 3 and samples == ((3, 4),)
        assert model.weight.grad is None
        model(torch.ones(1, 2)).sum().backward()
        break
    with pytest.raises(rejoin.InvalidArgument, match="steps.. was left in step 3 .* after optimizer.step"):
        next(one.steps())


def test_workers_of_loaders_that_come_and_go_do_not_pile_up(tmp_path, monkeypatch):
    one, _, _ = a_job_of(tmp_path, monkeypatch, 50)
    batches, stopped = Batches(100), []
    monkeypatch.setattr(Fetcher, "stop", lambda fetcher: stopped.append(fetcher._loader))
    loaders = [torch.utils.data.DataLoader(range(100), batch_sampler=batches) for _ in range(4)]
    for loader in (*loaders[:2], *loaders[:2], *loaders[2:]):
        for _step, data in one.steps(loader):
            assert len(data) == 1
            one._optimizer.step()
            break
    assert stopped == loaders[:2], "two by turns keep their workers"


def test_the_others_do_not_wait_for_the_workers_and_the_group_of_a_replica_that_leaves(tmp_path):
    class Said(list):
        def end(self) -> None:
            self.append("the group ends")

        def leave(self) -> None:
            self.append("leaves")
            raise rejoin.Unavailable("the daemon has gone")

        def shutdown(self) -> None:
            self.append("the group has left")
            raise rejoin.SystemFailure("its memory can't be freed")

        def stop(self) -> None:
            self.append("workers end")

    one, said = session(tmp_path), Said()
    one._native, one._group, one._fetchers, one._joined = said, said, {0: said}, True
    with pytest.raises(rejoin.RejoinError):
        one.leave()
    assert said == ["the group ends", "leaves", "the group has left", "workers end"]


def test_rejoin_run_says_what_is_missing(capsys):
    for arguments, told in (
        ([], "the command to run is missing"),
        (["--replicas", "0", "--", "x"], "--replicas 0"),
        (["--", "/nowhere/python", "train.py"], "there is no program /nowhere/python"),
    ):
        with pytest.raises(SystemExit):
            run.main(arguments)
        assert told in capsys.readouterr().err
    assert run.main(["--directory", "/proc/x", "--", sys.executable]) == 1
    assert "rejoin-run: /proc/x: No such file" in capsys.readouterr().err
    version = subprocess.run([sys.executable, "-m", "rejoin.run", "--version"], capture_output=True, text=True)
    assert version.stdout == f"rejoin {rejoin.__version__}\n"


LOGGING = """
import logging, sys, threading
import rejoin.log
from rejoin import _native

class Seen(logging.Handler):
    def emit(self, record):
        print(record.name, record.levelname, record.getMessage(), flush=True)
        seen.set()

seen = threading.Event()
logging.getLogger().addHandler(Seen())
rejoin.log.to_logging()
rails = _native.CheckpointServer("tcp:127.0.0.1,127.0.0.1", "127.0.0.1:0", "")
scheme, secret, family, address = rails.address().split(" ")
try:  # without rails, which the server refuses and says so
    _native.CheckpointFetch("tcp", " ".join([scheme, secret, "tcp", address.split("|")[0]]), 1, 10_000)
except rejoin.Unavailable:
    assert seen.wait(30)
try:
    rejoin.log.to_logging()
except RuntimeError as error:
    print(error)
"""


def test_the_librarys_lines_go_to_logging():
    done = subprocess.run([sys.executable, "-c", LOGGING], capture_output=True, text=True, timeout=60)
    assert "rejoin WARNING a connection on rail 0 was refused" in done.stdout, done.stdout + done.stderr
    assert "refused" not in done.stderr
    assert "go to logging already" in done.stdout


def test_ranks_that_were_asked_to_leave_do_so_also_where_each_step_is_a_call_of_steps(tmp_path, monkeypatch):
    one, _, native = a_job_of(tmp_path, monkeypatch, 50)
    next(one.steps())
    one._optimizer.step()
    asked = []
    ranks = SimpleNamespace(
        several=True,
        leaves_after=lambda step, wants: asked.append((step, wants)) or wants,
        leave_together=lambda: asked.append("together"),
    )
    monkeypatch.setattr(one, "_ranks", ranks)
    monkeypatch.setattr(one._leaving, "is_set", lambda: True)
    for _ in range(2):
        assert list(one.steps()) == []
    assert asked == [(1, True), "together"] and native.calls.count("leave") == 1
