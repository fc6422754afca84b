"""The GPT with what a real run has: warm-up and decay, clipping, evaluation, checkpoints, a moving average.

rejoin-run --replicas 3 --batch 16 --steps 1000 -- python nanogpt.py data/shakespeare.txt --checkpoint gpt.pt
"""

import argparse
import math
import os
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from ddp import CONTEXT, Bytes, Gpt
from torch.utils.data import DataLoader

import rejoin.torch as rj

PEAK, WARM_UP = 3e-3, 50


def rate(step: int, steps: int) -> float:
    """Rise for the first steps, then fall along a cosine: a function of the step alone."""
    if step < WARM_UP:
        return PEAK * step / WARM_UP
    return PEAK * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, step / steps))))


@torch.no_grad()
def evaluate(model: torch.nn.Module, data: Bytes, batches: int = 4) -> float:
    random = torch.Generator().manual_seed(1)
    total = 0.0
    for _ in range(batches):
        at = torch.randint(len(data), (32,), generator=random)
        x, y = torch.utils.data.default_collate([data[int(i)] for i in at])
        total += F.cross_entropy(model(x).flatten(0, 1), y.flatten()).item()
    return total / batches


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("--steps", type=int, default=1000, help="over which the learning rate falls")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--evaluate-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--checkpoint", type=Path, help="written every 100 steps; the job goes on from it")
    parser.add_argument(
        "--each-step", action="store_true", help="print every step, with its time and the state's digest"
    )
    given = parser.parse_args()

    torch.manual_seed(0)
    model = Gpt(given.width, given.blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.95), weight_decay=0.1)
    data = Bytes(given.data)
    held_out = Bytes(given.data)
    held_out.bytes = data.bytes[-20_000:]
    data.bytes = data.bytes[:-20_000]

    session = rj.Session.from_environment()
    session.attach(model, optimizer, max_norm=1.0, lr=lambda step: rate(step, given.steps), metrics=["loss"], ema=0.99)
    if given.checkpoint and given.checkpoint.exists():
        session.load_state_dict(torch.load(given.checkpoint, weights_only=True))
    loader = DataLoader(data, batch_sampler=session.batches(len(data)))
    print(f"replica {session.replica} is process {os.getpid()}, with {CONTEXT} bytes of context", flush=True)
    for step, (x, y) in session.steps(loader):
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        step.record(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
        if given.each_step:
            sys.stdout.write(
                f"replica {session.replica} step {step.number} loss {step.mean('loss'):.4f} "
                f"at {time.monotonic():.4f} digest {session.state_digest():016x}\n"
            )
            sys.stdout.flush()
        elif step.number % 10 == 0:
            print(f"step {step.number} loss {step.mean('loss'):.4f}", flush=True)
        if step.number % given.evaluate_every == 0 and step.leads:
            with session.busy("an evaluation", seconds=120), session.averaged():
                print(f"after step {step.number}: {evaluate(model, held_out):.4f} on what is held out", flush=True)
        if given.checkpoint and step.number % 100 == 0:
            session.save(given.checkpoint)  # on the replica that leads; a full disk is no reason to end


if __name__ == "__main__":
    main()
