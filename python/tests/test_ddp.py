"""DistributedDataParallel over the backend of torch.distributed: one that dies, and hooks beside Gloo's."""

from __future__ import annotations

import re
import signal
import subprocess
import time

import forked

MODEL = """
import copy, os, sys
from datetime import timedelta
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
import rejoin.distributed
def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(40, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.ReLU(),
                               torch.nn.Linear(64, 8))
def step(ddp, optimizer, seed):
    torch.manual_seed(seed)
    optimizer.zero_grad(); ddp(torch.randn(6, 40)).pow(2).mean().backward(); optimizer.step()
"""

KILLED = (
    MODEL
    + """
rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
store = dist.FileStore(folder + "/store", size)
dist.init_process_group("rejoin", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30))
group = dist.group.WORLD
store.set(f"handle{rank}", group.get_reconfigure_handle())
handles = [store.get(f"handle{i}").decode() for i in range(size)]
ddp = DDP(model(), bucket_cap_mb=0.005)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
try:
    for number in range(1_000_000):
        step(ddp, optimizer, 100 * number + rank)
        if number == 20: open(f"{folder}/running{rank}", "w").close()
except RuntimeError as error:
    print(" ".join(str(error).split()))
group.reconfigure(uuid=1, handles=[handle for i, handle in enumerate(handles) if i != 1])
trained = copy.deepcopy(ddp.module)
del ddp  # whose hooks are of the other weights
ddp = DDP(trained, bucket_cap_mb=0.005)  # begins with rank 0's weights
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
for number in range(3): step(ddp, optimizer, 100 * number + rank)
weights = torch.cat([weight.detach().flatten() for weight in ddp.parameters()])
both = [torch.empty_like(weights) for _ in range(2)]
dist.all_gather(both, weights)
assert torch.equal(*both) and weights.isfinite().all()
print("went on")
dist.destroy_process_group()
"""
)


def test_a_member_that_dies_in_a_backward_fails_those_of_the_others_and_they_go_on(tmp_path):
    members = [forked.Popen(["-c", KILLED, str(i), "3", str(tmp_path)], stdout=subprocess.PIPE) for i in range(3)]
    try:
        limit = time.monotonic() + 60
        while not all((tmp_path / f"running{i}").exists() for i in range(3)):
            assert time.monotonic() < limit and all(member.poll() is None for member in members)
            time.sleep(0.02)
        members[1].send_signal(signal.SIGKILL)
        for i in (0, 2):
            output, _ = members[i].communicate(timeout=60)
            assert members[i].returncode == 0, output
            error, went_on = output.splitlines()
            assert re.findall(r"rank (\d) \([^)]*\) is gone", error)[0] == "1", error
            assert went_on == "went on"
    finally:
        for member in members:
            member.kill()
            member.wait()


def test_hooks_give_what_they_give_over_gloo():
    """Bit for bit, with two ranks, where no order of additions differs: also one that waits for more in callbacks."""
    forked.run_ranks(
        2,
        MODEL
        + """
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
dist.init_process_group("rejoin", timeout=timedelta(seconds=30))
gloo = dist.new_group(backend="gloo", timeout=timedelta(seconds=30))
rank = dist.get_rank()
def train(group, hook, bucket_mb):
    ddp = DDP(model(), bucket_cap_mb=bucket_mb, process_group=group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    if hook is not None:
        state = group
        if "power" in hook.__module__.lower():
            state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, hook)
    for number in range(5): step(ddp, optimizer, 100 * number + rank)
    return [weight.detach() for weight in ddp.parameters()]
for hook, bucket_mb in ((None, 0.005), (default_hooks.fp16_compress_hook, 0.005), (default_hooks.allreduce_hook, 0.005),
                        (powerSGD_hook.powerSGD_hook, 1)):
    ours, theirs = (train(group, hook, bucket_mb) for group in (dist.group.WORLD, gloo))
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs)), hook
    assert not torch.equal(ours[0], model()[0].weight), hook
""",
    )
