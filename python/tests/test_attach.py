"""What of a model attach() takes, and what it refuses or finds changed by join() or a step."""

import pytest

torch = pytest.importorskip("torch")

import forked  # noqa: E402
from test_changes import in_a_step  # noqa: E402
from test_session import Job, session  # noqa: E402


def attached(tmp_path, model, **settings):
    one = session(tmp_path)
    one.attach(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1), **settings)
    return one


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
