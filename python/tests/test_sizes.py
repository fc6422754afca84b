"""Optimizers that go by a tensor's size, by how large what is in it is, or by its group's number."""

import pytest

torch = pytest.importorskip("torch")

import rejoin  # noqa: E402
from rejoin.torch import Session, _self_check  # noqa: E402


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


def test_groups_that_keep_other_state_are_tried_each(tmp_path):
    """Also where they differ in numbers alone, and the larger tensor is none of those that go by their size."""

    class Chosen(In8Bits):
        def __init__(self, groups):
            torch.optim.Optimizer.__init__(self, groups, {"lr": 0.1, "least": 4096, "momentum": 0.0})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    momentum.mul_(group["momentum"]).add_(p.grad)
                    if p.numel() >= group["least"] and group["momentum"]:
                        momentum.mul_(127).round_().div_(127)
                    p.sub_(momentum, alpha=group["lr"])

    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(count)) for count in (20_000, 10_000, 3_000)])
    optimizer = Chosen([{"params": [model[0]]}, *({"params": [model[i]], "momentum": 0.9} for i in (1, 2))])
    one = Session(replica=0, rank=0, socket=tmp_path / "nobody")
    one.attach(model, optimizer)
    assert [tensor.elementwise for tensor in one._tensors] == [True, False, False]


def skipping(p, state):
    return p.grad if p.grad.norm() < 1e3 else torch.zeros_like(p.grad)


def clipping(p, state):
    return p.grad * (1e5 / p.grad.norm()).clamp(max=1)


def clipping_in_place(p, state):
    torch.nn.utils.clip_grad_norm_(p, 1e3)
    return p.grad


def bounding(p, state):
    if p.norm() > 1e4:
        p.mul_(1e4 / p.norm())
    return p.grad


def late(p, state):
    return p.grad * p.norm() if state["step"] > 20_000 else p.grad


def clipping_each(p, state):
    return p.grad.clamp(-1e3, 1e3)


class Bounded(torch.optim.Optimizer):
    def __init__(self, parameters, rule):
        super().__init__(parameters, {"lr": 0.1})
        self.rule = rule

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state.setdefault("momentum", torch.zeros_like(p))
            state["step"] = state.get("step", 0) + 1
            state["momentum"].mul_(0.9).add_(self.rule(p, state))
            p.sub_(state["momentum"], alpha=0.1)


@pytest.mark.parametrize("finite", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rule", "elementwise"),
    [(skipping, False), (clipping, False), (bounding, False), (late, False), (clipping_each, True)],
)
def test_an_optimizer_that_goes_by_a_bound_of_the_whole_is_found_out(rule, elementwise, dtype, finite):
    p = torch.nn.Parameter(torch.zeros(4, 4, dtype=dtype))
    optimizer = Bounded([p], rule)
    assert _self_check.self_check(optimizer, optimizer.param_groups[0], p, finite=finite) == elementwise


def test_an_optimizer_that_changes_a_huge_gradient_is_refused():
    p = torch.nn.Parameter(torch.zeros(4, 4))
    optimizer = Bounded([p], clipping_in_place)
    with pytest.raises(rejoin.InvalidArgument, match="Bounded changes the gradients that it is given"):
        _self_check.self_check(optimizer, optimizer.param_groups[0], p)


class Numbered(torch.optim.SGD):
    """Goes by the number of a group, of which parts of a tensor may be the only one."""

    def __init__(self, parameters, lr=0.1):
        parameters = list(parameters)
        super().__init__([{"params": parameters[:1]}, {"params": parameters[1:]}], lr=lr)
        self.rates = [1.0, 0.5]

    @torch.no_grad()
    def step(self, closure=None):
        for number, group in enumerate(self.param_groups):
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] * self.rates[number])


def test_an_optimizer_that_goes_by_the_number_of_a_group_is_refused(tmp_path):
    model, one = torch.nn.Linear(2, 2), Session(replica=0, rank=0, socket=tmp_path / "nobody")
    with pytest.raises(rejoin.InvalidArgument, match="Numbered updates a tensor otherwise where another one .* before"):
        one.attach(model, Numbered(model.parameters()))


def test_an_optimizer_of_one_group_may_go_by_the_number_that_this_has():
    p = torch.nn.Parameter(torch.zeros(4, 4))
    optimizer = Numbered([p])
    del optimizer.param_groups[1], optimizer.rates[1]
    assert _self_check.self_check(optimizer, optimizer.param_groups[0], p)
