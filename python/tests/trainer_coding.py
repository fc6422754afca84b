"""A trainer for the tests of coded gradients: one gradient is far too large, and it clips or skips."""

import argparse
from pathlib import Path

import torch

import rejoin.torch as rj

FEATURES = 700
SAMPLES = 500


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--max-norm", type=float)
    parser.add_argument("--loss-scale", type=float)
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--spike", type=float, help="what a part of one replica's gradient is multiplied with, and where")
    parser.add_argument("--at", type=int, nargs="*", default=[], help="in these steps")
    given = parser.parse_args()

    session = rj.Session.from_environment()
    torch.manual_seed(1)
    model = torch.nn.Linear(FEATURES, FEATURES)
    optimizer = torch.optim.SGD(model.parameters(), lr=given.rate)
    session.attach(
        model, optimizer, max_norm=given.max_norm, loss_scale=given.loss_scale, metrics=("loss",)
    )  # fmt: skip
    torch.manual_seed(5)
    data = torch.utils.data.TensorDataset(torch.randn(SAMPLES, FEATURES))
    loader = torch.utils.data.DataLoader(data, batch_sampler=session.batches(SAMPLES))
    spiky = given.spike * torch.randn(100, FEATURES) if given.spike else None

    now = 0

    def spike(gradient: torch.Tensor) -> torch.Tensor:
        if spiky is None or session.replica != 1 or now not in given.at:
            return gradient
        return torch.cat([spiky, gradient[100:]])

    model.weight.register_hook(spike)
    for step, (x,) in session.steps(loader):
        now = step.number
        loss = (model(x) - x).pow(2).mean()
        (step.scale(loss) if given.loss_scale else loss).backward()
        step.record(loss=loss)
        optimizer.step()
        print(f"step {now} mean {step.mean('loss'):.6f} norm {session.last_norm:.4g}", flush=True)


if __name__ == "__main__":
    main()
