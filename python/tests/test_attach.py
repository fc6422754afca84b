"""What of a model attach() takes, and what it refuses or finds changed by join() or a step."""

import types

import pytest

torch = pytest.importorskip("torch")

import forked  # noqa: E402
from test_changes import in_a_step  # noqa: E402
from test_session import Job, session  # noqa: E402

import rejoin  # noqa: E402
from rejoin.torch import Batches, _attach  # noqa: E402


def attached(tmp_path, model, **settings):
    one = session(tmp_path)
    one.attach(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1), **settings)
    return one


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("how", ["tied by data", "a part", "a buffer", "a frozen one"])
def test_two_objects_in_the_same_memory_are_refused(tmp_path, how, masters):
    """attach() would untie them; plain torch updates the memory twice, or shows in one what it does to the other."""
    model = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5, bias=False)).bfloat16()
    other = "1.weight"
    if how == "a buffer":
        other = "seen"
        model.register_buffer("seen", model[0].weight.detach()[1:, 1])
    else:
        model[1].weight.data = model[0].weight.data
        model[1].requires_grad_(how != "a frozen one")
        if how == "a part":
            whole = torch.ones(30, dtype=torch.bfloat16)
            model[0].weight.data, model[1].weight.data = whole[:20].view(5, 4), whole[10:].view(5, 4)
    with pytest.raises(rejoin.InvalidArgument, match="lie in the same memory .*tie parameters") as told:
        attached(tmp_path, model, masters=masters)
    assert f"'{other}'" in str(told.value) and "'0.weight'" in str(told.value)


def test_neighbours_in_memory_and_what_is_tied_as_one_object_are_taken(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].weight = model[0].weight
    whole = torch.ones(8)
    model[0].bias.data, model[1].bias.data = whole[:4], whole[4:]
    model.register_buffer("mask", torch.ones(3))
    model[2].register_buffer("mask", model.mask)
    model.register_buffer("part", model.mask[1:])  # buffers stay where they are
    attached(tmp_path, model)


def test_an_average_begins_with_the_weights_that_the_job_begins_with(tmp_path, monkeypatch):
    for load in (False, True):
        model = torch.nn.Linear(2, 2)
        one = attached(tmp_path, model, ema=0.999)
        kept = one.state_dict()
        kept = {**kept, "average": {name: torch.full_like(value, 5.0) for name, value in kept["average"].items()}}
        if load:
            one.load_state_dict(kept)
        model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()})
        for of in (one, one._buckets, one._updates):
            monkeypatch.setattr(of, "_native", Job(1))
        one.join()
        assert all(bool((value == (5.0 if load else 1.0)).all()) for value in one.state_dict()["average"].values())


class Shaped(torch.nn.Linear):
    """Gets the shape of a buffer with its first call, as fake quantisation by channels does."""

    def __init__(self):
        super().__init__(2, 8)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x):
        self.scale.resize_(8)
        return super().forward(x)


@pytest.mark.parametrize("when", ["in a step", "in warm_up()", "before attach()"])
def test_a_buffer_that_changes_its_shape_is_refused(tmp_path, monkeypatch, when):
    model = Shaped()
    if when == "before attach()":
        model(torch.ones(1, 2))
    one, _ = in_a_step(tmp_path, monkeypatch, model)
    if when == "in warm_up()":
        with one.warm_up():
            model(torch.ones(1, 2))
    else:
        model(torch.ones(1, 2))
    for check in (one.join, lambda: [tensor.check_place() for tensor in one._tensors]):
        if when == "before attach()":
            one._tensors[-1].check_place()
            continue
        with pytest.raises(rejoin.InvalidArgument, match="buffer 'scale' had 1 elements .* shape .8,.*before attach"):
            check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_buffer_that_comes_after_attach_is_refused(tmp_path, persistent, dtype):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    one = attached(tmp_path, model)
    model[0].register_buffer("u", torch.ones(2, dtype=dtype), persistent=persistent)
    if not persistent:
        _attach.refuse_new_buffers(model, one._tensors)
        return
    with pytest.raises(rejoin.InvalidArgument, match="'0.u' was registered, or got"):
        one.join()


def test_a_buffer_that_the_first_forward_makes_is_refused(tmp_path, monkeypatch):
    model = torch.nn.Linear(2, 2)
    one, _ = in_a_step(tmp_path, monkeypatch, model)
    monkeypatch.setattr(one, "_step", types.SimpleNamespace(number=1))
    for tensor in one._tensors:
        tensor.note_version()
    model.register_buffer("observed", torch.ones(2))
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(rejoin.InvalidArgument, match="'observed' was registered, or got .*once before attach"):
        one._optimizer.step()


@pytest.mark.parametrize("how", ["a complex buffer", "memory of another's", "metrics"])
def test_what_attach_has_refused_may_be_mended_and_attached(tmp_path, how):
    model, metrics = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)), ["loss"]
    if how == "a complex buffer":
        model.register_buffer("phase", torch.ones(2, dtype=torch.complex64))
    elif how == "metrics":
        metrics = ["loss", "loss"]
    else:
        model[1].weight.data = model[0].weight.data
    one, optimizer = session(tmp_path), torch.optim.AdamW(model.parameters())
    for _ in range(2):
        with pytest.raises(rejoin.InvalidArgument, match="complex64|lie in the same memory|there twice"):
            one.attach(model, optimizer, metrics=metrics)
    if how == "a complex buffer":
        del model.phase
    elif how == "memory of another's":
        model[1].weight.data = model[0].weight.data.clone()
    one.attach(model, optimizer, metrics=["loss"])
    with pytest.raises(rejoin.InvalidArgument, match="comes once: .* open another Session"):
        one.attach(model, optimizer)


def test_a_frozen_parameter_without_plain_values_is_refused_by_name_and_a_conjugate_one_compared(tmp_path):
    from rejoin.torch._frozen import digest

    for value, told in (
        (torch.ones(2, 2).to_sparse(), "torch.sparse_coo"),
        (torch.ones(2, 2, device="meta"), "is on the meta device"),
    ):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Module())
        model[1].table = torch.nn.Parameter(value, requires_grad=False)
        one = session(tmp_path)
        one.attach(model, torch.optim.AdamW(model[0].parameters()))
        with pytest.raises(rejoin.InvalidArgument, match=f"frozen parameter '1.table' .*{told}.* can't be compared"):
            one.join()
    value = torch.tensor([1 + 2j, 3 - 1j, 5 + 1j])
    assert digest(value.conj()) == digest(torch.tensor([1 - 2j, 3 + 1j, 5 - 1j])) != digest(value)
    assert digest(value.conj().imag) == digest(torch.tensor([-2.0, 1.0, -1.0]))


class Calibrated(torch.nn.Linear):
    """It makes a buffer in its third call."""

    calls, given = 0, None

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("shift", None)

    def forward(self, x):
        self.calls += 1
        if self.calls == 3:
            self.shift = torch.ones(2)
        return super().forward(x)


def test_a_buffer_that_comes_in_a_later_step_is_an_error_in_the_log(tmp_path, monkeypatch, caplog):
    """All replicas would end in the same step, with all that was trained."""
    model, native = torch.nn.Sequential(Calibrated()), Job(5)
    one = attached(tmp_path, model)
    for of in (one, one._buckets, one._updates):
        monkeypatch.setattr(of, "_native", native)
    told = {}
    for step, _ in one.steps():
        caplog.clear()
        model(torch.ones(1, 2)).sum().backward()
        one._optimizer.step()
        told[step.number] = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(told[3]) == 1 and not any(told[step] for step in (1, 2, 4, 5)), "once, and not in each step"
    assert "step 3: buffer '0.shift' was registered, or got its elements, after attach()" in told[3][0]


class Counting(torch.nn.Linear):
    """It has a count outside of its buffers, and a constant."""

    def __init__(self, counts: bool) -> None:
        super().__init__(2, 2)
        self.counts, self.calls = counts, 0

    def forward(self, x):
        self.calls += self.counts
        return super().forward(x)

    def get_extra_state(self):
        return {"calls": self.calls, "scale": torch.ones(2000)}

    def set_extra_state(self, state):
        self.calls = state["calls"]


@pytest.mark.parametrize("counts", [False, True])
def test_extra_state_is_told_to_be_each_replicas_own_and_refused_where_it_changes(
    tmp_path, monkeypatch, caplog, counts
):
    model, native = torch.nn.Sequential(torch.nn.Linear(2, 2), Counting(counts)), Job(2)
    one = attached(tmp_path, model)
    for of in (one, one._buckets, one._updates):
        monkeypatch.setattr(of, "_native", native)
    for _ in one.steps():
        assert "what get_extra_state() gives of module '1' is no part of the session" in caplog.text
        model(torch.ones(1, 2)).sum().backward()
        if counts:
            with pytest.raises(
                rejoin.InvalidArgument, match="of module '1' changes in a step, .*in persistent buffers"
            ):
                one._optimizer.step()
            return
        one._optimizer.step()
    assert one.finished


@pytest.mark.parametrize("accumulated", [False, True])
def test_zero_grad_takes_back_what_was_accumulated_in_a_main_grad(tmp_path, monkeypatch, accumulated):
    """As of a micro-batch that is left out, or of an attack's own pass."""
    model = torch.nn.Linear(2, 2)
    one, _ = in_a_step(tmp_path, monkeypatch, model, main_grad=True)
    with one.accumulate():
        model(torch.ones(1, 2)).sum().backward()
    if not accumulated:
        one._optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    one._optimizer.zero_grad()  # what has been handed over stays
    assert bool((model.weight.main_grad == (2.0 if accumulated else 1.0)).all())


def test_modules_of_torchscript_are_refused(tmp_path):
    plain = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    teacher = torch.jit.script(torch.nn.Linear(4, 4).requires_grad_(False))
    attached(tmp_path, torch.nn.ModuleList([torch.nn.Linear(4, 4), teacher]))
    teacher = torch.jit.script(torch.nn.BatchNorm1d(4, affine=False))
    for model in (
        torch.jit.script(plain),
        torch.jit.trace(plain, torch.randn(3, 4)),
        torch.nn.Sequential(torch.nn.Linear(4, 4), teacher),
    ):
        with pytest.raises(rejoin.InvalidArgument, match="TorchScript in it.* attach the module that torch.jit.script"):
            attached(tmp_path, model)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn, torch.uint32])
def test_buffers_of_other_types_are_refused_with_the_remedy(tmp_path, dtype):
    model = torch.nn.Linear(4, 4)
    model.register_buffer("rotations", torch.ones(3).to(dtype))
    with pytest.raises(rejoin.InvalidArgument, match=f"buffer 'rotations' has type {dtype}.* persistent=False"):
        attached(tmp_path, model)


def test_calls_by_keywords_are_refused_alike(tmp_path):
    model = torch.nn.Linear(4, 4)
    optimizer = attached(tmp_path, model)._optimizer
    with pytest.raises(rejoin.InvalidArgument, match="load it before, or by session.load_state_dict"):
        optimizer.load_state_dict(state_dict={})
    with pytest.raises(rejoin.InvalidArgument, match="all parameters are declared with attach"):
        optimizer.add_param_group(param_group={})


def test_torchs_default_device_is_no_matter(tmp_path):
    model = torch.nn.Linear(4, 4)
    try:
        torch.set_default_device("meta")
        one = session(tmp_path)
        one.attach(model, torch.optim.AdamW(model.parameters()), metrics=["loss"], loss_scale=2.0)
        shuffled = Batches(100).indices(((0, 3),))
    finally:
        torch.set_default_device("cpu")
    assert shuffled == Batches(100).indices(((0, 3),))


def test_a_module_may_be_called_rejoin(tmp_path):
    model = torch.nn.ModuleDict({"rejoin": torch.nn.BatchNorm1d(4)})
    one = attached(tmp_path, model, metrics=["loss"])
    assert [tensor.is_buffer for tensor in one._tensors] == [False] * 2 + [True] * 3 + [False]


TENSOR_PARALLEL = """
import os
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from rejoin.torch import Session

dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 16), torch.nn.Linear(16, 8, bias=False))
plain = sum(p.numel() for p in model.parameters())
parallelize_module(model, mesh["tp"], {"1": ColwiseParallel(), "2": RowwiseParallel()})
fully_shard(model, mesh=mesh["dp"])
session = Session(replica=0, rank=rank, socket="/nowhere/nobody")
session.attach(model, torch.optim.AdamW(model.parameters()), max_norm=1e9)
session._ranks._check = lambda: None  # there is no job
for tensor in session._tensors:
    tensor.reduced.fill_(1.0)
session._updates.look(1)
session._updates._coefficient(1)
print(round(session.last_norm**2) - plain)
dist.barrier()
dist.destroy_process_group()
"""


def test_the_norm_counts_once_what_tensor_parallelism_leaves_whole():
    assert forked.run_ranks(2, TENSOR_PARALLEL).split() == ["0", "0"]
