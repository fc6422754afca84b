"""A trainer for the tests of coded gradients: some of one replica's gradients are far too large, and it clips."""

import argparse
from pathlib import Path

import torch

import rejoin.torch as rj

FEATURES = 700
SAMPLES = 500


class Constant(torch.nn.Module):
    """Its gradient is the same in each step: of a block one value, and others that 4 bits make zeros of.

    So are its statistics, of which 4 bits would make zeros, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(FEATURES, 64))
        self.register_buffer("pattern", torch.full((64,), 1 / 40), persistent=False)
        self.pattern[::16] = 1.0
        self.register_buffer("statistics", torch.rand(20000) ** 8)

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        return (self.weight * self.pattern).sum()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--constant", action="store_true")
    parser.add_argument("--max-norm", type=float)
    parser.add_argument("--skip-nonfinite", action="store_true")
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--spike", type=float, default=0.0, help="what is instead of some gradients of replica 1")
    parser.add_argument("--at", type=int, help="in this step")
    given = parser.parse_args()

    session = rj.Session.from_environment()
    torch.manual_seed(1)
    model = Constant() if given.constant else torch.nn.Linear(FEATURES, FEATURES)
    statistics = model.statistics.clone() if given.constant else None
    optimizer = torch.optim.SGD(model.parameters(), lr=given.rate)
    session.attach(
        model, optimizer, max_norm=given.max_norm, skip_nonfinite=given.skip_nonfinite, metrics=("loss",)
    )  # fmt: skip
    torch.manual_seed(5)
    data = torch.utils.data.TensorDataset(torch.randn(SAMPLES, FEATURES))
    loader = torch.utils.data.DataLoader(data, batch_sampler=session.batches(SAMPLES))
    spikes = given.spike * torch.randn(100, FEATURES)
    if given.skip_nonfinite:
        spikes[0, 0] = torch.inf
    now = 0

    def spike(gradient: torch.Tensor) -> torch.Tensor:
        if session.replica != 1 or now != given.at:
            return gradient
        return torch.cat([spikes, gradient[100:]])

    model.weight.register_hook(spike)
    for step, (x,) in session.steps(loader):
        now = step.number
        loss = model(x) if given.constant else (model(x) - x).pow(2).mean()
        loss.backward()
        step.record(loss=loss)
        optimizer.step()
        print(f"step {now} mean {step.mean('loss'):.6f} norm {session.last_norm:.4g}", flush=True)
        if given.constant:  # of the way that its small values would have gone uncoded
            way = given.rate * now * given.max_norm / session.last_norm / 40
            print(f"way {now} {-float(model.weight[:, 1].mean()) / way:.4f}", flush=True)
            print(f"statistics off by {float((model.statistics / statistics - 1).abs().max()):.3g}", flush=True)


if __name__ == "__main__":
    main()
