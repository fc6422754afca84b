"""What each process of bench/peers_torch.py does: one replica of the same GPT, by each way to train it."""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "python" / "examples"))
REPLICAS = 3


def make(given):
    from ddp import Bytes, Gpt

    torch.manual_seed(0)
    model = Gpt(given.width, given.blocks)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), Bytes(given.data)


def batch(data, sample):
    x, y = data[sample % len(data)]
    return x[None], y[None]


def tell(text):
    sys.stdout.write(f"{os.environ['PEER']} {text} at {time.monotonic():.4f}\n")
    sys.stdout.flush()


def dies(given, step):
    if given.dies_at and step == given.dies_at:
        tell("dies")
        os.kill(os.getpid(), signal.SIGKILL)


def worker_ddp(given):
    dist.init_process_group("gloo")
    model, optimizer, data = make(given)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    for step in range(1, given.steps + 1):
        x, y = batch(data, step * REPLICAS + dist.get_rank())
        F.cross_entropy(ddp(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        tell(f"step {step}")
    dist.destroy_process_group()


def worker_rejoin(given):
    import rejoin.torch as rj

    model, optimizer, data = make(given)
    session = rj.Session.from_environment()
    session.attach(model, optimizer)
    x, y = batch(data, 1)
    F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()  # as the others are warm
    optimizer.zero_grad()
    tell("ready")
    for step, samples in session.steps():
        x, y = batch(data, samples[0][0])
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        dies(given, step.number)
        optimizer.step()
        tell(f"step {step.number}")


def worker_torchft(given):
    from torchft import Manager, Optimizer, ProcessGroupGloo

    model, optimizer, data = make(given)
    x, y = batch(data, 1)
    F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    optimizer.zero_grad()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def state():
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load(state):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)), load_state_dict=load, state_dict=state, min_replica_size=2,
        timeout=timedelta(seconds=10), quorum_timeout=timedelta(seconds=60), connect_timeout=timedelta(seconds=10),
        rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port, replica_id=f"r{os.environ['PEER']}",
    )  # fmt: skip
    wrapped = Optimizer(manager, optimizer)
    tell("ready")
    while manager.current_step() < given.steps:
        x, y = batch(data, manager.current_step() * REPLICAS + int(os.environ["PEER"]))
        wrapped.zero_grad()
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        dies(given, manager.current_step() + 1)
        works = []
        for of in buckets_of(list(model.parameters())):
            flat = torch.cat([p.grad.reshape(-1) for p in of])
            works.append((manager.allreduce(flat), flat, of))
        for work, flat, of in works:
            work.wait()
            for p, part in zip(of, torch.split(flat, [p.numel() for p in of]), strict=True):
                p.grad.copy_(part.view_as(p))
        before = manager.current_step()
        wrapped.step()
        if manager.current_step() > before:
            tell(f"step {manager.current_step()}")
        else:
            tell(f"lost {before + 1}")
    manager.shutdown(wait=False)
    os._exit(0)  # its threads would go on


def buckets_of(parameters):
    """Give the parameters in buckets of about 25 MB, as torch's DDP would."""
    begin = 0
    while begin < len(parameters):
        end, size = begin, 0
        while end < len(parameters) and size < 25 << 20:
            size += parameters[end].grad.numel() * 4
            end += 1
        yield parameters[begin:end]
        begin = end


def worker_gloo(given):
    model, optimizer, data = make(given)
    x, y = batch(data, 1)
    F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    optimizer.zero_grad()
    peer, limit = os.environ["PEER"], timedelta(seconds=10)
    store = dist.TCPStore("127.0.0.1", int(os.environ["STORE"]), is_master=False, wait_for_workers=False)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    dist.init_process_group(
        "gloo", store=store, rank=int(peer), world_size=REPLICAS, timeout=limit, enable_reconfigure=True
    )
    parameters = list(model.parameters())

    def configure(generation):
        members = store.get(f"members {generation}").decode().split()
        store.set(f"{generation} {peer}", dist._get_reconfigure_handle())
        handles = [store.get(f"{generation} {member}").decode() for member in members]
        dist._reconfigure(uuid=generation, handles=handles, timeout=limit).wait()
        return members

    def share_state(step):  # the first member's
        at = torch.tensor([step])
        dist.broadcast(at, 0)
        for p in parameters:
            state = optimizer.state[p]
            if not state:
                state["step"] = torch.tensor(float(at))
                state.update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            for tensor in (p.data, state["step"], state["exp_avg"], state["exp_avg_sq"]):
                dist.broadcast(tensor, 0)
        return int(at)

    def reduce(members, generation):
        """Give the means by bucket, and whether the next generation begins after this step: the first member says so."""
        comes = members[0] == peer and store.check([f"members {generation + 1}"])
        works = []
        for of in buckets_of(parameters):
            flat = torch.cat([*(p.grad.reshape(-1) for p in of), torch.tensor([float(comes)])])
            works.append((dist.all_reduce(flat, async_op=True), flat, of))
        for work, _, _ in works:
            work.wait()
        return [(flat.div_(len(members)), of) for _, flat, of in works], bool(works[0][1][-1] > 0)

    tell("ready")
    step, generation = 0, int(os.environ["GENERATION"])
    members = configure(generation)
    if generation > 1:
        step = share_state(step)
    while step < given.steps:
        x, y = batch(data, step * REPLICAS + int(peer))
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        dies(given, step + 1)
        while True:
            try:
                reduced, next_begins = reduce(members, generation)
                break
            except RuntimeError:  # somebody has died; what was computed is still in the gradients
                generation += 1
                members = configure(generation)
        for flat, of in reduced:
            for p, part in zip(of, torch.split(flat[:-1], [p.numel() for p in of]), strict=True):
                p.grad.copy_(part.view_as(p))
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        tell(f"step {step}")
        if next_begins:
            generation += 1
            members = configure(generation)
            step = share_state(step)
    os._exit(0)


WORKERS = {"ddp": worker_ddp, "gloo": worker_gloo, "rejoin": worker_rejoin, "torchft": worker_torchft}
