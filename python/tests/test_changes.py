"""What a script may not change under a session that it is attached to: settings, gradients, buffers."""

import contextlib
import math

import pytest

torch = pytest.importorskip("torch")

from test_session import session  # noqa: E402

import rejoin  # noqa: E402


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("lr", 0.01, "the learning rate of group 0 has changed from 0.001 to 0.01 .* give attach.. lr="),
        ("weight_decay", 0.5, "weight_decay of the optimizer's group 0 has changed from 0.1 to 0.5"),
        ("betas", (0.5, 0.999), "betas of .* from .0.9, 0.999. to .0.5, 0.999."),
    ],
)
def test_settings_that_change_by_step_are_refused(tmp_path, name, value, told):
    """A replica that catches up would apply steps of before with those of now."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, weight_decay=0.1)
    one = session(tmp_path)
    one.attach(model, optimizer)
    one._updates.check(1)
    optimizer.param_groups[0][name] = value
    with pytest.raises(rejoin.InvalidArgument, match=told):
        one._updates.check(2)


@pytest.mark.parametrize("kind", ["pre", "post"])
def test_hooks_that_come_after_attach_are_refused(tmp_path, kind):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    one = session(tmp_path)
    one.attach(model, optimizer)
    one._updates.check(1)
    getattr(optimizer, f"register_step_{kind}_hook")(lambda *_: None)
    with pytest.raises(rejoin.InvalidArgument, match="the optimizer has hooks on step"):
        one._updates.check(2)


def test_a_rate_in_a_tensor_is_compared_to_its_last_bit(tmp_path):
    model = torch.nn.Linear(2, 2)
    rate = torch.tensor(0.001)
    one = session(tmp_path)
    one.attach(model, torch.optim.AdamW(model.parameters(), lr=rate, foreach=False))
    one._updates.check(1)
    rate.mul_(1 + 1e-6)
    with pytest.raises(rejoin.InvalidArgument, match="the learning rate of group 0 has changed"):
        one._updates.check(2)


@pytest.mark.parametrize("rates", [[0.1, 0.2], "x", float("nan"), -1.0, None])
def test_a_schedule_gives_a_rate_for_each_group(tmp_path, rates):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    one = session(tmp_path)
    one.attach(model, optimizer, lr=lambda step: rates if step == 2 else [0.5])
    one._updates.check(1)
    with pytest.raises(rejoin.InvalidArgument, match=r"lr\(2\) of attach.. is .*for each of the optimizer's 1 groups"):
        one._updates.check(2)


def in_a_step(tmp_path, monkeypatch, model, **rules):
    """Give a session in a step of no job, and the buckets that it hands over, as they go."""
    one, handed_over = session(tmp_path), []
    one.attach(model, torch.optim.AdamW(model.parameters()), **rules)
    monkeypatch.setattr(one._buckets, "_hand_over", handed_over.append)
    monkeypatch.setattr(one, "_in_step", True)
    one._buckets.begin()
    return one, handed_over


def test_a_gradient_that_a_hook_takes_away_before_the_session_sees_it_is_refused(tmp_path, monkeypatch):
    model = torch.nn.Linear(2, 2)
    model.bias.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    in_a_step(tmp_path, monkeypatch, model)
    with pytest.raises(
        rejoin.InvalidArgument, match="gradient of 'bias' was taken away .*, by a hook of before attach"
    ):
        model(torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize("how", ["clip", "set", "scale", "data", "one of data"])
def test_a_gradient_that_is_changed_after_backward_is_refused(tmp_path, monkeypatch, how):
    model = torch.nn.Linear(2, 2)
    one, handed_over = in_a_step(tmp_path, monkeypatch, model)
    for step in range(2):
        one._buckets.begin(1 if how == "data" else 3)
        model.zero_grad()
        with one.accumulate():
            model(torch.ones(1, 2)).sum().backward()
        model(torch.ones(1, 2)).sum().backward()
        assert float(model.bias.grad.norm()) > 0  # it may be read
        if step == 0:
            one._buckets.bring_rest()
            assert handed_over.pop() == len(one._buckets._buckets) - 1
    handed_over.clear()
    if how == "clip":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    elif how == "set":
        model.bias.grad = 2 * model.bias.grad
    elif how == "scale":
        model.bias.grad /= 2
    elif how == "data":
        model.bias.grad.data.mul_(0.5)
    elif how == "one of data":
        model.weight.grad.data[1].clamp_(-1e-3, 1e-3)
    with pytest.raises(rejoin.InvalidArgument, match="the gradient of '.*' was changed after .* max_norm="):
        one._buckets.bring_rest()
    assert len(one._buckets._buckets) - 1 not in handed_over, "the step is committed when all buckets are out"


@pytest.mark.parametrize("how", ["no limit", "a high limit", "a copy"])
def test_a_gradient_that_is_written_to_and_stays_what_it_is_is_taken(tmp_path, monkeypatch, caplog, how):
    """As by a framework that clips by an infinite norm, only to know it."""
    model = torch.nn.Linear(2, 2)
    one, _ = in_a_step(tmp_path, monkeypatch, model)
    monkeypatch.setattr(one._buckets, "_looks", lambda written_to: written_to)
    for _ in range(2):
        one._buckets.begin(3)
        one._zero_grad()
        (model(torch.ones(1, 2)).sum() * 5).backward()
        if how == "a copy":
            model.bias.grad = model.bias.grad.clone()
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), torch.inf if how == "no limit" else 1e6)
        one._buckets.bring_rest()
    assert caplog.text.count("was written to after the backward() that handed it over, and is what it was") == 1
    one._buckets.begin(3)
    one._zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    for _ in range(2):
        model.bias.grad.mul_(0.5)
        with pytest.raises(rejoin.InvalidArgument, match="the gradient of 'bias' was changed after"):
            one._buckets.bring_rest()
    one._buckets._early = False  # all replicas might end by a clip that had nothing to clip so far
    one._buckets.bring_rest()
    one._buckets.bring_rest()
    assert caplog.text.count("counts as it was (so far in 1 steps). To clip, give attach() max_norm=") == 1


@pytest.mark.parametrize("main_grad", [False, True])
def test_accumulate_after_the_backward_that_hands_over_is_refused(tmp_path, monkeypatch, main_grad):
    model = torch.nn.Linear(2, 2)
    one, _ = in_a_step(tmp_path, monkeypatch, model, main_grad=main_grad)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(rejoin.InvalidArgument, match="a second gradient of"), one.accumulate():
        model(torch.ones(1, 2)).sum().backward()


def test_a_backward_after_the_update_is_no_part_of_the_step(tmp_path, monkeypatch):
    model = torch.nn.Linear(2, 2)
    one, _ = in_a_step(tmp_path, monkeypatch, model)
    model(torch.ones(1, 2)).sum().backward()
    one._buckets.bring_rest()
    monkeypatch.setattr(one, "_updated", True)
    model(torch.ones(1, 2)).sum().backward()  # as a look at gradients, when the loop was left


class Concatenated(torch.nn.Module):
    """Its gradients are views of one tensor, and have one version."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Parameter(torch.ones(2, 3)) for _ in range(3))

    def forward(self, x):
        return torch.nn.functional.linear(x, torch.cat([self.q, self.k, self.v]))


@pytest.mark.parametrize("how", ["", "clip", "scale"])
def test_gradients_that_share_a_version_may_be_accumulated_and_not_be_changed(tmp_path, monkeypatch, how):
    model = Concatenated()
    one, _ = in_a_step(tmp_path, monkeypatch, model)
    monkeypatch.setattr(one._buckets, "_looks", lambda written_to: written_to)  # as in most steps
    with one.accumulate():
        model(torch.ones(1, 3)).sum().backward()
    model(torch.ones(1, 3)).sum().backward()
    if how == "clip":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    elif how == "scale":
        model.q.grad /= 2
    if how:
        with pytest.raises(rejoin.InvalidArgument, match="the gradient of '.*' was changed after"):
            one._buckets.bring_rest()
    else:
        one._buckets.bring_rest()
        assert all(bool((tensor.gradient == 2).all()) for tensor in one._tensors)


def test_a_changed_gradient_is_refused_before_the_step_can_be_decided(tmp_path, monkeypatch):
    """Else the others, or all of them, have committed a step that nobody applies."""
    model = torch.nn.BatchNorm1d(2)
    one, handed_over = in_a_step(tmp_path, monkeypatch, model)
    model(torch.randn(4, 2)).square().sum().backward()
    before = list(handed_over)
    model.bias.grad.mul_(0.5)
    with pytest.raises(rejoin.InvalidArgument, match="the gradient of 'bias' was changed after"):
        one._buckets.bring_rest()
    assert handed_over == before and len(before) < len(one._buckets._buckets)


@pytest.mark.parametrize("how", ["reentrant", "reentrant in accumulate()", "not reentrant"])
def test_a_layer_that_is_checkpointed_twice_by_nested_backward_passes_belongs_into_accumulate(
    tmp_path, monkeypatch, how
):
    model = torch.nn.Linear(2, 2)
    one, _ = in_a_step(tmp_path, monkeypatch, model)
    x = torch.ones(1, 2, requires_grad=True)
    for _ in range(2):
        x = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=how != "not reentrant")
    if how == "reentrant":
        with pytest.raises(rejoin.InvalidArgument, match="second gradient of '.*' .*use_reentrant=False needs none"):
            x.sum().backward()
        return
    with one.accumulate() if "accumulate" in how else contextlib.nullcontext():
        x.sum().backward()
    one._buckets.bring_rest()
    assert all(torch.equal(tensor.view(tensor.gradient), tensor.value.grad) for tensor in one._tensors)


def test_a_gradient_that_is_taken_away_after_backward_is_refused_and_a_batch_may_be_left_out(tmp_path, monkeypatch):
    model = torch.nn.Linear(2, 2)
    one, _ = in_a_step(tmp_path, monkeypatch, model)
    (model(torch.ones(1, 2)).sum() * torch.nan).backward()
    one._buckets.bring_rest()  # what is no number is no change
    model.zero_grad()
    with pytest.raises(rejoin.InvalidArgument, match="was taken away after .* do not call backward.. on it"):
        one._buckets.bring_rest()
    one._buckets.begin()
    one._buckets.bring_rest()
    assert all(not tensor.gradient.any() for tensor in one._tensors)


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_step_that_is_skipped_changes_no_buffer(tmp_path, finite, parts):
    """One replica's bad sample would else be in BatchNorm's statistics of all of them for ever."""
    model = torch.nn.BatchNorm1d(2)
    one = session(tmp_path)
    one.attach(model, torch.optim.AdamW(model.parameters()), skip_nonfinite=True, metrics=["loss"])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model.running_mean.fill_(5.0)  # as the forward() has left it
        for tensor in one._tensors:
            tensor.reduced.fill_(1.0 if finite else torch.nan if tensor.gradient_dtype.is_floating_point else 1)
        one._updates.look(1)
        size = {tensor.index: -(-tensor.count // parts) for tensor in one._tensors}
        one._updates.apply(1, [
            (t.index, first, min(size[t.index], t.count - first), 1,
             t.reduced.data_ptr() + first * t.gradient_dtype.itemsize)
            for t in one._tensors for first in range(0, t.count, size[t.index])
        ])  # fmt: skip
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) != finite or name == "running_var", name
    assert math.isnan(float(one._metrics.values[0])) != finite


def test_another_session_over_the_same_model_is_not_disturbed_by_one_that_has_left_within_a_step(tmp_path, monkeypatch):
    model = torch.nn.Linear(2, 2)
    first, _ = in_a_step(tmp_path, monkeypatch, model)
    first.leave()
    other, handed_over = in_a_step(tmp_path, monkeypatch, model)
    for _ in range(2):
        other._buckets.begin()
        other._zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        other._buckets.bring_rest()
    assert len(handed_over) == 2 * len(other._buckets._buckets) and next(first.steps(), None) is None


def test_a_sparse_gradient_is_refused(tmp_path, monkeypatch):
    model = torch.nn.Embedding(7, 2, sparse=True)
    one = session(tmp_path)
    one.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    monkeypatch.setattr(one, "_in_step", True)
    one._buckets.begin()
    with pytest.raises(rejoin.InvalidArgument, match="the gradient of 'weight' is sparse.* sparse=False"):
        model(torch.tensor([1])).sum().backward()


class Counts(torch.nn.Linear):
    """Keeps numbers of half width in buffers."""

    def __init__(self):
        super().__init__(2, 2)
        self.register_buffer("narrow", torch.tensor([2000.0, torch.finfo(torch.float16).min], dtype=torch.float16))
        self.register_buffer("brain", torch.tensor([1.3671875], dtype=torch.bfloat16))
        self.register_buffer("large", torch.tensor([2_000_000_000], dtype=torch.int32))


def test_sums_of_buffers_over_all_samples_fit_in_the_type_that_they_are_added_up_in(tmp_path, monkeypatch):
    model = Counts()
    one = session(tmp_path)
    one.attach(model, torch.optim.AdamW(model.parameters()))
    monkeypatch.setattr(one._buckets, "_hand_over", lambda bucket: None)  # there is no job
    one._buckets.begin(48)
    one._buckets.bring_rest()
    for name in ("narrow", "brain", "large"):
        (tensor,) = (tensor for tensor in one._tensors if tensor.name == name)
        assert torch.equal((tensor.gradient / 48).to(tensor.dtype), getattr(model, name)), name


def test_a_buffer_whose_sum_might_not_fit_is_refused(tmp_path, monkeypatch):
    model = torch.nn.Linear(2, 2)
    model.register_buffer("count", torch.tensor([2**62, -(2**63)]))
    model.register_buffer("wide", torch.tensor([torch.inf, 1e298], dtype=torch.float64))
    one = session(tmp_path)
    one.attach(model, torch.optim.AdamW(model.parameters()))
    monkeypatch.setattr(one._buckets, "_hand_over", lambda bucket: None)  # there is no job
    for by, fits in ((2**31 - 1, True), (1 - 2**31, True), (2**31, False), (-(2**31), False), (-(2**63), False)):
        one._buckets.begin(2)
        model.count[0] = 2**62 + by if by > -(2**62) else by
        if fits:
            one._buckets.bring_rest()
            continue
        with pytest.raises(rejoin.InvalidArgument, match="buffer 'count' of int64 has changed by 2.31 or more"):
            one._buckets.bring_rest()
    model.count[0] = 2**62
    model.wide[1] = torch.finfo(torch.float64).max
    one._buckets.begin()
    with pytest.raises(rejoin.InvalidArgument, match="buffer 'wide' of float64 has values beyond 2.990"):
        one._buckets.bring_rest()


def test_a_buffer_that_is_assigned_anew_is_refused(tmp_path, monkeypatch):
    model = Counts()
    one = session(tmp_path)
    one.attach(model, torch.optim.AdamW(model.parameters()))
    monkeypatch.setattr(one, "_in_step", True)
    model.narrow.mul_(0.5)
    for tensor in one._tensors:
        tensor.check_place()
    model.narrow = 0.5 * model.narrow
    with pytest.raises(rejoin.InvalidArgument, match="buffer 'narrow' is another tensor .*self.narrow.copy"):
        for tensor in one._tensors:
            tensor.check_place()
    model.register_buffer("narrow", torch.zeros(1).expand(3))
    with pytest.raises(rejoin.InvalidArgument, match="buffer 'narrow' is expanded"):
        session(tmp_path).attach(model, torch.optim.AdamW(model.parameters()))
    parts = [torch.ones(2), torch.ones(3)]
    for kind, buffer in (
        ("sparse_coo", torch.eye(3).to_sparse()),
        ("sparse_csr", torch.eye(3).to_sparse_csr()),
        ("nested", torch.nested.nested_tensor(parts)),
        ("nested", torch.nested.nested_tensor(parts, layout=torch.jagged)),
    ):
        plain = torch.nn.Linear(2, 2)
        plain.register_buffer("odd", buffer)
        with pytest.raises(rejoin.InvalidArgument, match=f"buffer 'odd' is a {kind} tensor.*persistent=False"):
            session(tmp_path).attach(plain, torch.optim.AdamW(plain.parameters()))
        plain = torch.nn.Linear(2, 2)
        plain.register_buffer("odd", buffer, persistent=False)
        session(tmp_path).attach(plain, torch.optim.AdamW(plain.parameters()))


@pytest.mark.parametrize("unscaled", [False, True])
def test_a_gradient_scaler_of_torch_is_refused(tmp_path, unscaled):
    """It changes gradients without a trace, and by a factor of this replica's own."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session(tmp_path).attach(model, optimizer)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    if unscaled:
        scaler.unscale_(optimizer)
    with pytest.raises(rejoin.InvalidArgument, match="GradScaler.*loss_scale="):
        scaler.step(optimizer)
    with pytest.raises(rejoin.InvalidArgument, match="due once in each step"):
        torch.amp.GradScaler("cpu", enabled=False).step(optimizer)
