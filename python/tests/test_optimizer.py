"""What optimizers keep, and that parts of a tensor get the bits of the whole."""

import pytest

torch = pytest.importorskip("torch")

from rejoin.errors import InvalidArgument  # noqa: E402
from rejoin.torch import Session, _optimizer, _self_check  # noqa: E402
from rejoin.torch._modes import one_thread  # noqa: E402

ADAM = ("exp_avg", "exp_avg_sq")
KINDS = [
    (torch.optim.AdamW, {}, ADAM),
    (torch.optim.AdamW, {"foreach": True}, ADAM),
    (torch.optim.AdamW, {"fused": True}, ADAM),
    (torch.optim.AdamW, {"foreach": False, "amsgrad": True}, (*ADAM, "max_exp_avg_sq")),
    (torch.optim.Adam, {"weight_decay": 0.1}, ADAM),
    (torch.optim.RAdam, {}, ADAM),
    (torch.optim.Adamax, {}, ("exp_avg", "exp_inf")),
    (torch.optim.RMSprop, {"momentum": 0.9}, ("square_avg", "momentum_buffer")),
    (torch.optim.Adagrad, {}, ("sum",)),
    (torch.optim.SGD, {"lr": 0.1}, ()),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}, ("momentum_buffer",)),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}, ("momentum_buffer",)),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "fused": True}, ("momentum_buffer",)),
]


def parameter(dtype=torch.float32):
    return torch.nn.Parameter(torch.zeros(4, 4, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "settings", "moments"), KINDS)
def test_parts_get_the_bits_of_the_whole(kind, settings, moments, dtype):
    p = parameter(dtype)
    optimizer = kind([p], **settings)
    if kind is torch.optim.SGD and settings.get("fused") and not _optimizer._fused_sgd_updates(p):
        with pytest.raises(InvalidArgument, match="the fused SGD of torch .* does not update .*bfloat16"):
            _optimizer.kept_by(optimizer, optimizer.param_groups[0], p)
        return
    before = len(optimizer.state)
    kept, _ = _optimizer.kept_by(optimizer, optimizer.param_groups[0], p)
    assert sorted(kept.moments) == sorted(moments)
    assert _self_check.self_check(optimizer, optimizer.param_groups[0], p)
    assert len(optimizer.state) == before, "the check has left something behind"


class Many(torch.optim.Optimizer):
    """Keeps seven tensors for each parameter, most of them wider than it."""

    def __init__(self, parameters, count=7):
        super().__init__(parameters, {"lr": 0.1, "count": count})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    types = [torch.float32, torch.float64, torch.bfloat16, torch.float32, torch.int32]
                    for i in range(group["count"]):
                        state[f"m{i}"] = torch.zeros_like(p, dtype=types[i % len(types)])
                for i in range(group["count"]):
                    state[f"m{i}"].mul_(2).add_(p.grad.to(state[f"m{i}"].dtype))
                p.sub_(group["lr"] * state["m0"].to(p.dtype))


def test_an_optimizer_may_keep_seven_tensors_of_several_types():
    p = parameter(torch.bfloat16)
    optimizer = Many([p])
    kept, _ = _optimizer.kept_by(optimizer, optimizer.param_groups[0], p)
    assert kept.moments == tuple(f"m{i}" for i in range(7))
    assert kept.types[1:3] == (torch.float64, torch.bfloat16)
    assert _self_check.self_check(optimizer, optimizer.param_groups[0], p)
    with pytest.raises(InvalidArgument, match="keeps m0, .*m6 for each parameter, and there is a moving average; 7"):
        _optimizer.kept_by(optimizer, optimizer.param_groups[0], p, reserved=1)
    with pytest.raises(InvalidArgument, match="keeps m0, .*m7 for each parameter; 7 can be kept"):
        eight = Many([p], 8)
        _optimizer.kept_by(eight, eight.param_groups[0], p)


def normed(p):
    return p.grad / (p.grad.norm() + 1e-6)


def centralised(p):
    return p.grad - p.grad.mean(tuple(range(1, p.dim())), keepdim=True) if p.dim() > 1 else p.grad


def none_where_all_are_zero(p):
    return p.grad if p.grad.any() else None


def none_where_one_is_not_finite(p):
    return p.grad if p.grad.isfinite().all() else None


def finite(p):
    return p.grad.nan_to_num(0.0, 0.0, 0.0)


def none_where_one_is_not_a_number(p):
    return None if p.grad.isnan().any() else p.grad


def none_where_one_is_minus_infinity(p):
    return None if (p.grad == -torch.inf).any() else p.grad


def finite_in_place(p):
    return p.grad.nan_to_num_(0.0, 0.0, 0.0)


def checked_when_it_is_late(p):
    """Where the step has been made in part."""
    p.add_(p.grad)
    assert p.grad.isfinite().all()
    return p.grad


def of_convolutions(p):
    return centralised(p) if p.dim() > 3 else p.grad


def projected(p):
    """As AdamP: where a row's gradient is nearly orthogonal to it."""
    if p.dim() < 2:
        return p.grad
    g, w = p.grad.double().flatten(1), p.double().flatten(1)
    along = (g * w).sum(1) / (g.norm(dim=1) * w.norm(dim=1))
    return p.grad / 2 if bool(along.abs().max() < 0.1 / w.size(1) ** 0.5) else p.grad


@pytest.mark.parametrize("rate", [0.1, 0.0, torch.tensor(0.0)])
@pytest.mark.parametrize(
    ("rule", "shape", "elementwise"),
    [
        (normed, (4, 4), False),
        (centralised, (4, 4), False),
        (centralised, (4,), True),
        (of_convolutions, (4, 4), True),
        (of_convolutions, (4, 4, 3, 3), False),
        (projected, (4, 4), False),
        (none_where_all_are_zero, (4, 4), False),
        (none_where_one_is_not_finite, (4,), False),
        (none_where_one_is_not_a_number, (4, 4), False),
        (none_where_one_is_minus_infinity, (4, 4), False),
        (finite, (4, 4), True),
        (finite_in_place, (4, 4), True),
        (checked_when_it_is_late, (4, 4), True),
    ],
)
def test_an_optimizer_that_looks_at_whole_tensors_is_found_out(rule, shape, elementwise, rate):
    """Also where its rate is 0 with attach(), before a warm-up."""

    class Ruled(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad = rule(p)
            return super().step()

    p = torch.nn.Parameter(torch.zeros(shape))
    optimizer = Ruled([p], lr=rate, weight_decay=0.1)
    assert _self_check.self_check(optimizer, optimizer.param_groups[0], p) == elementwise
    assert optimizer.param_groups[0]["lr"] is rate


def test_each_shape_of_a_model_is_tried(tmp_path):
    class Centralised(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad = centralised(p)
            return super().step()

    model = torch.nn.Sequential(torch.nn.Conv1d(3, 4, 3), torch.nn.Linear(4, 2))
    one = Session(replica=0, rank=0, socket=tmp_path / "nobody")
    one.attach(model, Centralised(model.parameters(), lr=0.1))
    assert [tensor.elementwise for tensor in one._tensors] == [False, True, False, True]


@pytest.mark.parametrize("rules", [{"skip_nonfinite": True}, {"loss_scale": 2.0}])
def test_what_an_optimizer_does_with_gradients_that_never_come_is_no_matter(tmp_path, rules):
    class Passing(torch.optim.SGD):
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                p.grad = none_where_one_is_not_finite(p)
            return super().step()

    for kind in (Passing, Finite):
        model, one = torch.nn.Linear(4, 2), Session(replica=0, rank=0, socket=tmp_path / "nobody")
        one.attach(model, kind(model.parameters()), **rules)
        assert all(tensor.elementwise for tensor in one._tensors if tensor.is_parameter)


def test_what_can_not_be_given_to_parts_is_refused_by_name():
    p = parameter()
    nadam = torch.optim.NAdam([p])
    with pytest.raises(InvalidArgument, match="NAdam keeps 'mu_product'"):
        _optimizer.kept_by(nadam, nadam.param_groups[0], p)
    damped = torch.optim.SGD([p], lr=0.1, momentum=0.9, dampening=0.1)
    with pytest.raises(InvalidArgument, match="dampening 0.1"):
        _optimizer.kept_by(damped, damped.param_groups[0], p)
    # torch adds the momentum to the gradient in place.
    nesterov = torch.optim.SGD([p], lr=0.1, momentum=0.9, nesterov=True, foreach=True)
    with pytest.raises(InvalidArgument, match="SGD changes the gradients that it is given.*foreach=False"):
        _self_check.self_check(nesterov, nesterov.param_groups[0], p)


@pytest.mark.parametrize("stepped", ["0.weight", "1.weight"])
@pytest.mark.parametrize("loads", [False, True])
def test_an_optimizer_that_has_counted_for_some_parameters_alone_is_refused_in_any_order(tmp_path, stepped, loads):
    """Those that plain torch has not updated would go on without Adam's corrections for a first step."""

    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = made()
    for _ in range(3):
        model.get_parameter(stepped).grad = torch.ones(2, 2)
        optimizer.step()
    session, other = Session(replica=0, rank=0, socket=tmp_path / "nobody"), "1.weight"
    if stepped == other:
        other = "0.weight"
    if not loads:
        with pytest.raises(InvalidArgument, match=f"has counted 3 steps for '{stepped}' and 0 for '{other}'.*freeze"):
            session.attach(model, optimizer)
        return
    session.attach(*made())
    with pytest.raises(InvalidArgument, match=f"has counted 3 steps for '{stepped}' and 0 for '{other}'.*freeze"):
        session.load_state_dict({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_the_number_of_threads_is_no_matter(kind):
    p = parameter()
    optimizer = kind([p], lr=0.1)
    group = optimizer.param_groups[0]
    kept, scratch = _optimizer.kept_by(optimizer, group, p)
    random = torch.Generator().manual_seed(1)
    value, gradient = torch.randn(300_007, generator=random), torch.randn(300_007, generator=random)
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            columns = [value.clone()] + [torch.zeros_like(value) for _ in kept.moments]
            with one_thread(value.device):
                for step in range(1, 4):
                    _optimizer.apply(optimizer, [(group, kept, scratch, columns, gradient, p)], step)
            assert torch.get_num_threads() == threads
            results.append(columns)
    finally:
        torch.set_num_threads(before)
    for columns in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(columns, results[0], strict=True))


def attach(tmp_path, model, optimizer):
    Session(replica=0, rank=0, socket=tmp_path / "nobody").attach(model, optimizer)


def test_an_optimizer_that_begins_with_other_state_than_zeros_is_refused_unless_it_has_it_already(tmp_path):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Rprop(model.parameters(), lr=0.01)
    with pytest.raises(InvalidArgument, match="Rprop begins with other state than zeros for 'weight'"):
        attach(tmp_path, model, optimizer)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    sizes = optimizer.state[model.weight]["step_size"].clone()
    attach(tmp_path, model, optimizer)
    assert torch.equal(optimizer.state[model.weight]["step_size"], sizes)
    model = torch.nn.Linear(4, 4)
    attach(tmp_path, model, torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.1))  # made with it


class Prodigious(torch.optim.SGD):
    """Keeps an estimate in its group, as Prodigy and D-Adaptation do."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.param_groups[0]["d"] = 1e-6

    def step(self, closure=None):
        self.param_groups[0]["d"] *= 2
        return super().step()


class Joined(torch.optim.SGD):
    """Divides by the norm of the whole group's gradient."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)

    def step(self, closure=None):
        together = torch.cat([p.grad.reshape(-1) for p in self.param_groups[0]["params"]]).norm() + 1e-6
        for p in self.param_groups[0]["params"]:
            p.grad = p.grad / together
        return super().step()


class Finite(torch.optim.SGD):
    """Passes over a step in which any gradient is not finite."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)

    def step(self, closure=None):
        if all(p.grad.isfinite().all() for p in self.param_groups[0]["params"]):
            super().step()


class InPlace(torch.optim.SGD):
    """Centralises gradients of matrices where they lie."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad.dim() > 1:
                p.grad.sub_(p.grad.mean(1, keepdim=True))
        return super().step()


class Factored(torch.optim.Optimizer):
    """Keeps less of large matrices, as Adafactor's kinds do."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            kept = self.state[p].setdefault("row", p.new_zeros(len(p)) if min(p.shape) >= 128 else torch.zeros_like(p))
            p.sub_(kept.add_(p.grad.mean(1) if kept.dim() == 1 else p.grad).view(len(p), -1))


class Counting(torch.optim.Optimizer):
    """Counts its steps in an attribute; with `inside`, in one that is written to."""

    def __init__(self, parameters, inside=False):
        super().__init__(parameters, {"lr": 0.1})
        self.t, self.times, self.inside = 0, {"t": torch.zeros(())}, inside

    @torch.no_grad()
    def step(self, closure=None):
        if self.inside:
            self.times["t"] += 1
        else:
            self.t += 1
        for p in self.param_groups[0]["params"]:
            p.sub_(self.param_groups[0]["lr"] * p.grad)


class Wrapping(torch.optim.Optimizer):
    """Hands its step on, as LARC's and accelerate's do; with `hidden`, to one that is none of its attributes."""

    def __init__(self, parameters, hidden=False):
        base = torch.optim.AdamW(parameters)
        super().__init__(base.param_groups, base.defaults)
        self.param_groups, self.state = base.param_groups, base.state
        self.of = base.step if hidden else base

    def step(self, closure=None):
        return getattr(self.of, "step", self.of)()


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (InPlace, "InPlace changes the gradients that it is given"),
        (Factored, "Factored keeps 'row' for a parameter of shape .256, 256., which is no plain tensor of that shape"),
        (Counting, "Counting keeps state of its own in its attribute 't'"),
        (lambda parameters: Counting(parameters, True), "Counting keeps state of its own in its attribute 'times'"),
        (Wrapping, "Wrapping wraps another optimizer .its 'of' is of class AdamW.*: attach that one"),
        (lambda parameters: Wrapping(parameters, True), "Wrapping does not update the parameters that it is given"),
        (getattr(torch.optim, "Muon", None), "Muon can't update a part of a tensor.*2D"),
        (torch.optim.LBFGS, "LBFGS computes the loss several times .* AdamW or SGD"),
        (torch.optim.SparseAdam, "SparseAdam can't update a tensor .* with a dense gradient"),
        (Prodigious, "Prodigious keeps state of its own in the group"),
        (Finite, "Finite updates a tensor otherwise where another one is.*skip_nonfinite=True"),
        (Joined, "Joined updates a tensor otherwise where another one is updated with it"),
    ],
)
def test_exotic_optimizers_are_refused_with_the_reason(tmp_path, kind, told):
    if kind is None:
        pytest.skip("this torch has no Muon")
    model = torch.nn.Linear(4, 4, bias=False)
    with pytest.raises(InvalidArgument, match=told):
        Session(replica=0, rank=0, socket=tmp_path / "nobody").attach(model, kind(model.parameters()))
