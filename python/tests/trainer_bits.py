"""A trainer for test_bits.py: bfloat16 with masters, LoRA over frozen weights, two groups, accumulation."""

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from trainer import CLASSES, FEATURES, make_data

import rejoin.torch as rj

HIDDEN, NOT_FINITE, HOLDS = 203, 7, 30  # features; steps

# They are equal on all replicas, and stay so: what is in them, and the numbers that are added in each step.
ODD = [torch.finfo(torch.float32).min, torch.inf, torch.nan, -0.0, 1e-44, *(10000 ** (-k / 37) for k in range(37))]
BUFFERS = {
    "mask": torch.tensor(ODD),
    "short_float": torch.tensor(ODD).bfloat16(),
    "narrow_float": torch.tensor(ODD).half(),
    "wide_float": torch.tensor(ODD, dtype=torch.float64),
    "hash": torch.tensor([2**62 + 12345, 7, -(2**63)]),
    "narrow_int": torch.tensor([2**31 - 1, -(2**31)], dtype=torch.int32),
    "rises": torch.tensor([0.0, 1e30]),
    "seen": torch.tensor([0, 2**62 + 1]),
}
RISES, SEEN = 0.1, 2**31 - 1


class Lora(torch.nn.Module):
    """A frozen layer, and what is learned beside it."""

    def __init__(self, width: int, rank: int = 3) -> None:
        super().__init__()
        self.base = torch.nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = torch.nn.Linear(width, rank, bias=False), torch.nn.Linear(rank, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def make_model() -> torch.nn.Module:
    torch.manual_seed(7)
    layers = [torch.nn.Linear(FEATURES, HIDDEN), torch.nn.LayerNorm(HIDDEN), torch.nn.GELU(), Lora(HIDDEN)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(HIDDEN, CLASSES)).bfloat16()
    model[1].float()
    model.register_parameter("unused", torch.nn.Parameter(torch.ones(5)))
    for name, value in BUFFERS.items():
        model.register_buffer(name, value.clone())
    return model


def groups_of(parameters: list[torch.Tensor]) -> list[dict]:
    matrices, vectors = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim == 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def rates(step: int) -> list[float]:
    return [2e-3 * min(1.0, step / 20), 5e-3 / (1 + step / 50)]


def schedule(step: int) -> list[float]:
    """Give rates(), and none for some late steps, in which those of last_scheduled() hold, also for who catches up."""
    if last_scheduled(step) != step:
        raise IndexError(f"no rates for step {step}")
    return rates(step)


def last_scheduled(step: int) -> int:
    return step - 1 if step >= 10 and step % 4 == 3 else step


def loss_of(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, step: int, replica: int) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    return loss * float("inf") if step == NOT_FINITE and replica == 0 else loss


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    session = rj.Session.from_environment()
    me = session.replica

    order, other = given.out / f"kill.{me}", given.out / "other.2"
    model = make_model()
    if me == 2 and other.exists():
        other.unlink()
        model[3].base.bias.data[11] += 0.5
    optimizer = torch.optim.AdamW(groups_of([p for p in model.parameters() if p.requires_grad]))
    session.attach(
        model, optimizer, lr=schedule, masters=True, skip_nonfinite=True, metrics=["loss"], bucket_bytes=20_000
    )
    places = [[t.name, t.bucket, t.gradient.data_ptr(), t.count] for t in session._tensors if t.is_parameter]
    (given.out / f"layout.{me}").write_text(json.dumps(places))
    data = make_data()
    loader = torch.utils.data.DataLoader(data, batch_sampler=session.batches(len(data), seed=5))
    with (given.out / f"trained.{me}").open("a") as trained:
        for step, (x, y) in session.steps(loader):
            trained.write(json.dumps([step.number, step.samples]) + "\n")
            trained.flush()
            with session.accumulate():
                loss_of(model, x[:3], y[:3], step.number, me).backward()
            if order.exists() and step.number >= int(order.read_text().split(":")[1]):
                order.unlink()
                if me == 2:
                    other.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            loss = loss_of(model, x[3:], y[3:], step.number, me)
            loss.backward()
            step.record(loss=loss.nan_to_num(0.0, 0.0))
            model.rises.add_(RISES)
            model.seen.add_(SEEN)
            optimizer.step()
            print(f"step {step.number} mean {step.mean('loss'):.9g} digest {session.state_digest():016x}", flush=True)
            if step.number > HOLDS:
                time.sleep(0.02)  # what is computed once more, by one process, is not to be much
            if me == 0 and step.number == HOLDS:  # until those that were killed are about to come back
                with session.busy("a test", seconds=120):
                    while not (given.out / "go").exists():
                        time.sleep(0.01)
    if me == 0:
        torch.save(session.state_dict(), given.out / "final.pt")


if __name__ == "__main__":
    main()
