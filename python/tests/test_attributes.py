"""Attributes of parameters: whatever stands for a parameter in the optimizer's step() has them, too."""

import logging

import pytest

torch = pytest.importorskip("torch")

from test_session import Job, session  # noqa: E402

import rejoin  # noqa: E402
from rejoin.torch import _attributes, _kinds  # noqa: E402
from rejoin.torch._attributes import told  # noqa: E402


class Layerwise(torch.optim.Optimizer):
    """Takes a part of the rate from the parameter, and centralises gradients where that says so."""

    def __init__(self, parameters, lr=0.5):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                moment = self.state[p].setdefault("m", torch.zeros_like(p))
                g = p.grad
                if getattr(p, "centralise", False) and p.dim() > 1:
                    g = g - g.mean(1, keepdim=True)
                moment.mul_(0.9).add_(g)
                p.add_(moment, alpha=-group["lr"] * float(getattr(p, "lr_scale", 1.0)))


class Own(torch.nn.Parameter):
    """Has it from its class."""

    lr_scale = 0.25


def made(dtype=torch.float32):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16, dtype=dtype), torch.nn.Linear(16, 4, dtype=dtype))
    model[0].weight.lr_scale = 0.0
    model[0].bias.lr_scale = torch.tensor(0.125)
    model[1].weight = Own(model[1].weight.detach())
    return model


def updates(one, step, pieces):
    """Give an update of all tensors in so many pieces of each."""
    size = {t.index: -(-t.count // pieces) for t in one._tensors}
    return [
        (t.index, first, min(size[t.index], t.count - first), step,
         t.reduced.data_ptr() + first * t.gradient_dtype.itemsize)
        for t in one._tensors for first in range(0, t.count, size[t.index])
    ]  # fmt: skip


def trained(tmp_path, pieces, masters=False):
    """Give the session's columns after some steps, which were applied in so many pieces."""
    model, one = made(torch.bfloat16 if masters else torch.float32), session(tmp_path)
    one.attach(model, Layerwise(model.parameters()), masters=masters)
    random = torch.Generator().manual_seed(2)
    for step in range(1, 4):
        for tensor in one._tensors:
            tensor.reduced.copy_(torch.randn(tensor.count, generator=random))
        with torch.no_grad():
            one._updates.apply(step, updates(one, step, pieces))
    return [column.clone() for tensor in one._tensors for column in tensor.columns]


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("masters", [False, True])
def test_parts_and_masters_have_the_attributes_of_their_parameters(tmp_path, masters, pieces):
    model, random = made(torch.bfloat16 if masters else torch.float32), torch.Generator().manual_seed(2)
    plain = [_attributes.standing_for(p, p.detach().float()) for p in model.parameters()]
    optimizer = Layerwise(plain)
    for _ in range(3):
        for p in plain:
            p.grad = torch.randn(p.numel(), generator=random).view(p.shape)
        optimizer.step()
    expected = [column.reshape(-1) for p in plain for column in (p.detach(), optimizer.state[p]["m"])]
    given = trained(tmp_path, pieces, masters)
    assert all(torch.equal(one, other) for one, other in zip(given, expected, strict=True))
    assert torch.equal(given[0], made(torch.bfloat16 if masters else torch.float32)[0].weight.detach().float().view(-1))


def test_a_parameter_that_an_attribute_lets_be_updated_as_a_whole_is_found_out(tmp_path):
    model, one = made(), session(tmp_path)
    model[1].weight.centralise = True
    model[0].weight.centralise = False
    one.attach(model, Layerwise(model.parameters()))
    assert [tensor.elementwise for tensor in one._tensors] == [True, True, False, True]
    assert all(tensor.goes_by == {"lr_scale", "centralise"} for tensor in one._tensors)


def test_attributes_that_no_optimizer_goes_by_cost_no_trials(tmp_path, monkeypatch):
    """Such as names of parameters, which are others on each."""
    checks = []
    monkeypatch.setattr(_kinds, "self_check", lambda *given: not checks.append(given))
    model = torch.nn.Sequential(*[torch.nn.Linear(3, 3, bias=False) for _ in range(20)])
    for name, parameter in model.named_parameters():
        parameter.fqn, parameter.mask = name, torch.ones(3, 3)
    session(tmp_path).attach(model, torch.optim.AdamW(model.parameters()))
    assert len(checks) == 1


class Masked(torch.optim.SGD):
    """Goes by what `of` gives of a parameter."""

    def __init__(self, parameters, of):
        super().__init__(parameters, lr=0.1)
        self.of = of

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.of(p)
        return super().step()


def counts(p):
    p.times = getattr(p, "times", 0) + 1


@pytest.mark.parametrize(
    ("of", "told"),
    [
        (
            lambda p: p.mul_(p.mask),
            "Masked goes by the attribute 'mask' of 'weight', a tensor of shape .2, 2.*one",
        ),
        (lambda p: vars(p)["mask"], "Masked goes by the attribute 'mask' of 'weight'"),
        (lambda p: p.lists["a"], "Masked goes by the attribute 'lists' of 'weight', a tensor of shape .3,"),
        (lambda p: p.main_grad, "Masked reads the parameters' 'main_grad', which is this replica's own"),
        (counts, "Masked keeps state of its own in attributes of the parameter"),
        (lambda p: p.of_another, "Masked can't update a tensor .* no attribute 'of_another'"),
    ],
)
def test_what_parts_can_not_be_given_is_refused_by_name(tmp_path, of, told):
    model = torch.nn.Linear(2, 2, bias=False)
    model.weight.mask, model.weight.lists = torch.ones(2, 2), {"a": [torch.ones(3)]}
    with pytest.raises(rejoin.InvalidArgument, match=told):
        session(tmp_path).attach(model, Masked(model.parameters(), of), main_grad=True)
    session(tmp_path).attach(model, torch.optim.SGD(model.parameters(), lr=0.1), main_grad=True)


def test_hooks_gradients_and_what_lies_in_the_sessions_memory_are_not_carried():
    original = torch.nn.Parameter(torch.zeros(3))
    original.lr_scale, original.main_grad, original.grad_added_to_main_grad = 0.1, torch.ones(3), True
    original._dynamo_static_input_type = "guarded"
    original.grad = torch.ones(3)
    original.register_hook(lambda gradient: None)
    original.register_post_accumulate_grad_hook(lambda parameter: None)
    part = _attributes.standing_for(original, torch.ones(2))
    assert vars(part) == {"lr_scale": 0.1} and part.requires_grad and part.grad is None
    assert not part._backward_hooks and not part._post_accumulate_grad_hooks


def test_attributes_that_the_optimizer_goes_by_are_the_same_on_all_replicas_and_in_all_steps(
    tmp_path, monkeypatch, caplog
):
    model, one = made(), session(tmp_path)
    one.attach(model, Layerwise(model.parameters()))
    assert told(one._tensors) == "attributes of parameters: lr_scale=0.0 of 0.weight, lr_scale=0.125 of 0.bias"
    fingerprints = []
    for of in (one, one._buckets, one._updates):
        monkeypatch.setattr(of, "_native", Job(1))
    monkeypatch.setattr(Job, "set_fingerprint", lambda self, given: fingerprints.append(given), raising=False)
    one.join()
    assert told(one._tensors) in fingerprints[0]
    one._updates.check(1)
    model[1].bias.lr_scale = 0.5  # it had none
    with pytest.raises(rejoin.InvalidArgument, match="'lr_scale' of '1.bias' has changed from nothing to 0.5"):
        one._updates.check(2)
    model[0].bias.lr_scale.mul_(2)
    with caplog.at_level(logging.ERROR, "rejoin"):
        one._updates.check(3)
    assert not hasattr(model[1].bias, "lr_scale") and float(model[0].bias.lr_scale) == 0.125
    assert len(caplog.records) == 2
    model[1].weight.tag = "read by nobody"
    one._updates.check(4)
    assert len(caplog.records) == 2
