"""Optimizers that go by a tensor's size."""

import pytest

torch = pytest.importorskip("torch")

from rejoin.torch import Session  # noqa: E402


class In8Bits(torch.optim.Optimizer):
    """Momentum that is rounded to 8 bits, of tensors of so many elements and more."""

    def __init__(self, parameters, least=4096):
        super().__init__(parameters, {"lr": 0.1, "least": least})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.mul_(0.9).add_(p.grad)
                if p.numel() >= group["least"]:
                    momentum.mul_(127).round_().div_(127)
                p.sub_(momentum, alpha=group["lr"])


@pytest.mark.parametrize(
    ("shape", "least", "elementwise"),
    [
        ((40, 100), 4096, True),
        ((41, 100), 4096, False),
        ((64, 16421), 500_000, False),
        ((3, 1 << 20), 1 << 20, False),
        ((2, 3, 2000), 12_000, False),
        ((65,), 65, False),
        ((64,), 64, True),
    ],
)
def test_an_optimizer_that_goes_by_the_size_of_a_tensor_is_found_out(tmp_path, shape, least, elementwise):
    """By the largest of each kind, wherever in the model that is, so that small ones are whole in all of its models."""
    model = torch.nn.Module()
    for name, of in (("first", (1,) * len(shape)), ("large", shape), ("last", (2,) * len(shape))):
        model.register_parameter(name, torch.nn.Parameter(torch.zeros(of)))
    one = Session(replica=0, rank=0, socket=tmp_path / "nobody")
    one.attach(model, In8Bits(model.parameters(), least))
    assert [tensor.elementwise for tensor in one._tensors] == [elementwise] * 3
