"""A trainer for the tests: it writes down what it trains, and kills itself where it is told to."""

import argparse
import contextlib
import copy
import json
import multiprocessing
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

import rejoin
import rejoin.torch as rj
from rejoin.torch import _leaving

FEATURES, CLASSES = 32, 10


def make_model(kind: str = "adamw") -> torch.nn.Module:
    torch.manual_seed(7)
    if kind in ("sharded", "mixed", "half", "main"):
        model = torch.nn.Sequential(
            torch.nn.Linear(FEATURES, 301), torch.nn.GELU(), torch.nn.Linear(301, 301), torch.nn.GELU(),
            torch.nn.Linear(301, CLASSES),
        )  # fmt: skip
        return {"half": model.half, "main": model.bfloat16}.get(kind, lambda: model)()
    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 300),
        torch.nn.BatchNorm1d(300),
        torch.nn.GELU(),
        torch.nn.Linear(300, 300),
        torch.nn.GELU(),
        torch.nn.Linear(300, CLASSES),
    )


class Flags(torch.nn.Module):
    """Passes on what comes, and says in small integers that it did, and how often."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("begun", torch.tensor(False))
        self.register_buffer("counts", torch.zeros(3, dtype=torch.uint8))
        self.register_buffer("falls", torch.zeros(2, dtype=torch.int8))
        self.register_buffer("rises", torch.zeros((), dtype=torch.int16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.begun.fill_(True)
        self.counts.add_(7)
        self.falls.sub_(3)
        self.rises.add_(999)
        return x

    def told(self) -> str:
        return " ".join(str(buffer.tolist()) for buffer in self.buffers())


def make_optimizer(kind: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if kind == "half":
        return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, eps=1e-6)
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=kind == "fused")


def rate(step: int) -> float:
    return 1e-3 * min(1.0, step / 20)


def make_data(size: int = 997) -> torch.utils.data.TensorDataset:
    random = torch.Generator().manual_seed(3)
    x = torch.randn(size, FEATURES, generator=random)
    return torch.utils.data.TensorDataset(x, x[:, :CLASSES].argmax(1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--max-norm", type=float)
    parser.add_argument("--ema", type=float)
    parser.add_argument("--loss-scale", type=float)
    parser.add_argument("--slow", action="store_true")
    parser.add_argument("--compile", metavar="BACKEND")
    parser.add_argument("--restore", action="store_true")
    parser.add_argument("--changed", action="store_true")
    parser.add_argument("--flags", action="store_true")
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--leave-within", type=float)
    parser.add_argument("--longest-standing", type=float, default=10.0)
    parser.add_argument("--group", action="store_true")
    parser.add_argument("--sample-ms", type=float, nargs="+")  # what a sample takes longer, by replica
    given = parser.parse_args()
    if given.leave_within:
        _leaving.LONGEST_WAIT_SECONDS = given.leave_within

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    session = rj.Session.from_environment(longest_standing=given.longest_standing)
    me = session.replica
    model = make_model(given.optimizer)
    if ranks > 1:
        # Here: its import takes half a second, which the loader's workers need not spend.
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        dist.init_process_group("gloo")
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mixed = {"mp_policy": policy} if given.optimizer == "mixed" else {}
        fully_shard(model[2], **mixed)
        fully_shard(model, **mixed)
    if given.flags:
        model.append(Flags())
    optimizer = make_optimizer(given.optimizer, model)
    session.attach(
        model,
        optimizer,
        lr=rate,
        max_norm=given.max_norm,
        metrics=("loss",),
        bucket_bytes=100_000,
        masters=given.optimizer in ("half", "main"),
        main_grad=given.optimizer == "main",
        ema=given.ema,
        loss_scale=given.loss_scale,
    )
    if given.restore:
        session.load_state_dict(torch.load(given.out / "checkpoint.pt", weights_only=True), changed=given.changed)
    data = make_data()
    loader = torch.utils.data.DataLoader(
        data,
        batch_sampler=session.batches(len(data), seed=5, shard=session.rank, shards=ranks),
        num_workers=given.workers,
        multiprocessing_context="forkserver" if given.workers else None,
    )

    forward = torch.compile(model, backend=given.compile) if given.compile else model

    # An order is "PLACE:STEP": there, and not before that step; obeyed once.
    def told(order: Path, step: int, place: str) -> bool:
        if not order.exists():
            return False
        where, at = order.read_text().split(":")
        if where != place or step < int(at):
            return False
        order.unlink()
        return True

    def dies(step: int, place: str) -> None:
        if session.rank == 0 and told(given.out / f"kill.{me}", step, place):
            workers = multiprocessing.active_children()
            if place == "worker stands":
                for worker in workers:
                    os.kill(worker.pid, signal.SIGSTOP)
                    threading.Timer(6, os.kill, (worker.pid, signal.SIGCONT)).start()
            else:
                os.kill(workers[0].pid if place == "worker" else os.getpid(), signal.SIGKILL)

    def holds(step: int, place: str) -> None:
        if told(given.out / f"hold.{me}.{session.rank}", step, place):
            held = given.out / f"held.{me}.{session.rank}"
            held.touch()
            with session.busy("a test", seconds=300) if place == "busy" else contextlib.nullcontext():
                while held.exists():
                    time.sleep(0.01)

    now = 0
    # The last layer's gradient comes first: its bucket is on its way when this is called.
    if ranks == 1:
        model[0].weight.register_hook(lambda _: dies(now, "backward"))
    else:
        model[2].register_full_backward_hook(lambda *_: dies(now, "backward"))
    apply = session._updates.apply

    def dying_apply(step, updates):
        if not session._in_step:
            dies(step, "joining")
            holds(step, "joining")
        dies(step, "before update")
        apply(step, updates)
        dies(step, "updated")

    session._updates.apply = dying_apply
    look = session._updates.look

    def holding_look(step):
        holds(step, "norm")
        look(step)

    session._updates.look = holding_look
    before = [buffer.clone() for buffer in model.buffers()]
    random = torch.get_rng_state()
    with session.warm_up():
        x, y = torch.utils.data.default_collate([data[i] for i in range(4)])
        F.cross_entropy(forward(x.to(model[0].weight.dtype)).float(), y + 0 * torch.randint(9, y.shape)).backward()
        dies(0, "warm-up")
    assert all(torch.equal(was, buffer) for was, buffer in zip(before, model.buffers(), strict=True))
    assert torch.equal(random, torch.get_rng_state()) and all(p.grad is None for p in model.parameters())
    group = session.process_group() if given.group else None
    session.join()
    holds(0, "joined")

    def collective(step: int, where: str) -> None:
        dies(step, where)
        if told(given.out / f"kill.{me}", step, "group stands"):
            subprocess.Popen(["sh", "-c", f"sleep 20; kill -9 {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        began, total = time.monotonic(), torch.tensor([me + 1.0])
        try:
            dist.all_reduce(total, group=group)
        except rejoin.RejoinError as error:
            print(f"{where} {step} failed after {time.monotonic() - began:.2f} s: {error}", flush=True)
        else:
            print(f"{where} {step} {group.size()} {float(total)}", flush=True)

    def write(state, of_step: int) -> None:
        while of_step == given.save_every and now < of_step + 5:  # all train on meanwhile
            time.sleep(0.01)
        with rj.replacing(given.out / "checkpoint.pt") as file:
            torch.save(state, file)

    writing = threading.Thread(target=lambda: None)
    writing.start()
    who = f"rank {session.rank}: " if session.rank else ""
    with (
        (given.out / f"trained.{me}{'.' * session.rank}").open("a") as trained,
        (given.out / f"weights.{me}{'.' * session.rank}").open("a") as weights,
    ):
        for step, (x, y) in session.steps(loader):
            now = step.number
            if given.flags:
                print(f"flags {now} {model[-1].told()}", flush=True)
            trained.write(json.dumps([step.number, step.samples]) + "\n")
            trained.flush()
            if given.sample_ms:
                weights.write(json.dumps([step.number, step.weight]) + "\n")
                weights.flush()
                time.sleep(len(y) * given.sample_ms[me] * 1e-3)
            dies(now, "worker")
            dies(now, "worker stands")
            dies(now, "forward")
            holds(now, "forward")
            holds(now, "busy")
            loss = F.cross_entropy(forward(x.to(model[0].weight.dtype)).float(), y)
            if given.optimizer == "main":  # in two parts of a micro-batch each
                parts = [(x[: len(x) // 2], y[: len(y) // 2]), (x[len(x) // 2 :], y[len(y) // 2 :])]
                losses = [F.cross_entropy(forward(a.bfloat16()).float(), b) * len(b) / len(y) for a, b in parts]
                with session.accumulate():
                    losses[0].backward()
                loss = losses[1]
            (step.scale(loss) if given.loss_scale else loss).backward()
            step.record(loss=loss)
            assert f"{loss}" and loss.cpu().item() == loss.item()  # anywhere
            dies(now, "step")
            if group is not None:
                collective(now, "group")
            optimizer.step()
            if group is not None:
                collective(now, "decided")
            assert loss.item() == loss.item()
            dies(now, "after")
            if given.slow and session.rank:  # say it writes its part of a checkpoint
                time.sleep(0.3)
            print(f"{who}step {now} mean {step.mean('loss'):.9g} digest {session.state_digest():016x}", flush=True)
            if given.save_every and now % given.save_every == 0 and step.leads:
                writing.join()  # of the one before
                before = [buffer.clone() for buffer in model.buffers()]
                model(x)  # what it writes to the buffers, and what is recorded, is of the step to come
                step.record(loss=-1.0)
                writing = threading.Thread(target=write, args=(copy.deepcopy(session.state_dict()), now))
                writing.start()
                for was, buffer in zip(before, model.buffers(), strict=True):
                    buffer.copy_(was)
            if session.version is not None:
                last = session.state_digest()
    assert next(session.steps(loader), None) is None, "a loop over data epochs goes on here"
    writing.join()
    holds(now, "final")
    with session.final_save(given.out / "final.pt") as mine:
        dies(now, "final" if mine else "not mine")
        if mine and ranks == 1:
            with rj.replacing(given.out / "final.pt") as file:
                torch.save(session.state_dict(), file)
                dies(now, "saved")
            print("final save", flush=True)
        elif mine:
            shards = [p.to_local() for p in model.parameters()]
            moments = [optimizer.state[p]["exp_avg_sq"].to_local() for p in model.parameters()]
            torch.save([shards, moments], given.out / f"final.{session.rank}.pt")
    print(f"{who}end {session.committed} {last if now else 0:016x}", flush=True)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
