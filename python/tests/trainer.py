"""A trainer for the tests: it writes down what it trains, and kills itself where it is told to."""

import argparse
import json
import os
import signal
from pathlib import Path

import torch
import torch.nn.functional as F

import rejoin.torch as rj

FEATURES, CLASSES = 32, 10


def make_model() -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 300),
        torch.nn.BatchNorm1d(300),
        torch.nn.GELU(),
        torch.nn.Linear(300, 300),
        torch.nn.GELU(),
        torch.nn.Linear(300, CLASSES),
    )


def make_optimizer(kind: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
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
    parser.add_argument("--restore", action="store_true")
    parser.add_argument("--save-every", type=int, default=0)
    given = parser.parse_args()

    session = rj.Session.from_environment()
    me = session.replica
    model = make_model()
    optimizer = make_optimizer(given.optimizer, model)
    session.attach(model, optimizer, lr=rate, max_norm=given.max_norm, metrics=("loss",), bucket_bytes=100_000)
    if given.restore:
        session.load_state_dict(torch.load(given.out / "checkpoint.pt", weights_only=True))
    data = make_data()
    loader = torch.utils.data.DataLoader(
        data,
        batch_sampler=session.batches(len(data), seed=5),
        num_workers=given.workers,
        multiprocessing_context="forkserver" if given.workers else None,
    )

    order = given.out / f"kill.{me}"  # "PLACE:STEP": there, and not before that step; obeyed once

    def dies(step: int, place: str) -> None:
        if not order.exists():
            return
        where, at = order.read_text().split(":")
        if where == place and step >= int(at):
            order.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    now = 0
    # The last layer's gradient comes first: its bucket is on its way when this is called.
    model[0].weight.register_hook(lambda _: dies(now, "backward"))
    apply = session._updates.apply

    def dying_apply(step, pieces):
        if not session._in_step:
            dies(step, "joining")
        dies(step, "before update")
        apply(step, pieces)
        dies(step, "updated")

    session._updates.apply = dying_apply
    with (given.out / f"trained.{me}").open("a") as trained:
        for step, (x, y) in session.steps(loader):
            now = step.number
            trained.write(json.dumps([step.number, step.samples]) + "\n")
            trained.flush()
            dies(now, "forward")
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            step.record(loss=loss)
            dies(now, "step")
            optimizer.step()
            assert loss.item() == loss.item()
            dies(now, "after")
            print(f"step {now} mean {step.mean('loss'):.9g} digest {session.state_digest():016x}", flush=True)
            if given.save_every and now % given.save_every == 0 and step.leads:
                with session.busy("a checkpoint", seconds=60):
                    torch.save(session.state_dict(), given.out / "checkpoint.new")
                    os.replace(given.out / "checkpoint.new", given.out / "checkpoint.pt")
            if session.version is not None:
                last = session.state_digest()
    if now and step.leads:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, given.out / "final.pt")
    print(f"end {session.committed} {last if now else 0:016x}", flush=True)


if __name__ == "__main__":
    main()
