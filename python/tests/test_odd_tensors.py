"""Tensors of unusual layouts, types and names: they are trained, or refused by name and with a remedy."""

import pytest

torch = pytest.importorskip("torch")

from test_attributes import updates  # noqa: E402
from test_session import session  # noqa: E402

from rejoin._memory import bytes_of  # noqa: E402
from rejoin.errors import InvalidArgument  # noqa: E402
from rejoin.torch import _frozen  # noqa: E402


class Momentum(torch.optim.Optimizer):
    """Keeps what `make` gives of a parameter."""

    def __init__(self, parameters, make):
        super().__init__(parameters, {})
        self.make = make

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state.update(self.make(p))
            state["m"].copy_(0.9 * state["m"].float() + p.grad)
            p.sub_(0.1 * state["m"].to(p.dtype))


def transposed(p):
    return torch.zeros(p.shape[::-1], dtype=p.dtype).permute(tuple(reversed(range(p.dim()))))


def channels_last(p):
    return torch.zeros_like(p, memory_format=torch.channels_last if p.dim() == 4 else torch.preserve_format)


def each_second(p):
    return torch.zeros(*p.shape, 2, dtype=p.dtype)[..., 0]


class Model(torch.nn.Module):
    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(1)
        for number, shape in enumerate([(), (1,), (7,), (5, 3), (3, 4, 2), (4, 3, 2, 2)]):
            self.register_parameter(f"p{number}", torch.nn.Parameter(torch.randn(shape, dtype=dtype)))


def gradients(model, step):
    random = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=random).to(p.dtype) for p in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [transposed, channels_last, each_second])
def test_what_an_optimizer_keeps_may_lie_at_strides(tmp_path, layout, dtype):
    plain, model, one = Model(dtype), Model(dtype), session(tmp_path)
    of_plain, optimizer = (Momentum(each.parameters(), lambda p: {"m": layout(p)}) for each in (plain, model))
    assert not all(layout(p).is_contiguous() for p in model.parameters())

    def trained_alone(of, steps):
        for p, gradient in zip(of.param_groups[0]["params"], steps, strict=True):
            p.grad = gradient
        of.step()

    for of in (of_plain, optimizer):
        trained_alone(of, gradients(model, 1))  # what has been kept before goes on
    one.attach(model, optimizer)
    assert all(tensor.elementwise for tensor in one._tensors)
    for step, pieces in ((1, 1), (2, 3)):
        given = gradients(model, 1 + step)
        trained_alone(of_plain, given)
        for tensor, gradient in zip(one._tensors, given, strict=True):
            tensor.reduced.copy_(gradient.reshape(-1))
        with torch.no_grad():
            one._updates.apply(step, updates(one, step, pieces))
    for p, own in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, own) and torch.equal(of_plain.state[p]["m"], optimizer.state[own]["m"])


def test_bytes_are_those_of_the_elements_whatever_the_strides():
    whole = torch.arange(48, dtype=torch.float32).view(12, 4)
    for some in (whole, whole.t(), whole[::3, ::2], whole[::5, 1][:1], whole[2, 3], whole[:0], whole[:, :1][4:5]):
        assert bytes_of(some).numpy().tobytes() == some.contiguous().numpy().tobytes()
        assert _frozen.digest(some) == _frozen.digest(some.clone())
    assert bytes_of(whole).data_ptr() == whole.data_ptr()


def refused(tmp_path, model, match, make=None, **settings):
    optimizer = Momentum(model.parameters(), make) if make else torch.optim.AdamW(model.parameters())
    with pytest.raises(InvalidArgument, match=match):
        session(tmp_path).attach(model, optimizer, **settings)


def test_types_that_are_not_reduced_are_refused_by_name_and_with_a_remedy(tmp_path):
    narrow, six = torch.float8_e4m3fn, "float32, float64, bfloat16, float16, int32, int64"
    model = torch.nn.Linear(2, 2)
    model.q = torch.nn.Parameter(torch.ones(3).to(narrow))
    refused(tmp_path, model, "^parameter 'q' has type torch.float8_e4m3fn, .* let it be bfloat16 or float32, or freeze")
    model = torch.nn.Linear(2, 2)
    refused(tmp_path, model, "^gradients=torch.float8_e4m3fn: .* a type of .*: float32, .*float16$", gradients=narrow)
    for dtype in (torch.int8, torch.bool, narrow):
        kept = {"m": dtype}

        def made(p, kept=kept):
            return {name: torch.zeros_like(p, dtype=of) for name, of in kept.items()}

        refused(tmp_path, model, f"^Momentum's m has type {dtype}, .* {six}: .* another optimizer$", made)
    for dtype, remedy in (
        (torch.uint16, r"keep it as float32, int32 or int64$"),
        (narrow, r"keep it as float32, int32 or int64$"),
        (torch.complex64, r"keep it as float32 \(torch.view_as_real\(\)\)$"),
    ):
        model = torch.nn.Linear(2, 2)
        model.register_buffer("b", torch.zeros(3).to(dtype))
        refused(tmp_path, model, f"^buffer 'b' has type {dtype}, of which .*{remedy}")


def test_names_that_can_not_be_declared_are_refused(tmp_path):
    model = torch.nn.Linear(2, 2)
    model.register_parameter("a\udc80b", torch.nn.Parameter(torch.ones(2)))
    refused(tmp_path, model, r"^the name 'a\\udc80b' is no text in UTF-8: give .* another")
    model = inner = torch.nn.Linear(2, 2)
    for number in range(25):
        inner.add_module(f"layer_number_{number}", torch.nn.Linear(1, 1))
        inner = getattr(inner, f"layer_number_{number}")
    refused(tmp_path, model, "^tensor 'layer_number_0.*…' has a name of [0-9]+ bytes; .* 1 to 200: .*shorter")


def test_state_that_is_one_tensor_under_two_names_is_refused(tmp_path):
    model = torch.nn.Linear(2, 3)

    def shared(p):
        m = torch.zeros_like(p)
        return {"m": m, "n": m.view(p.shape)}

    told = "^Momentum keeps one tensor as 'm' and as 'n' for 'weight', .* under one name"
    refused(tmp_path, model, told, shared)
    optimizer = Momentum(model.parameters(), shared)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()  # it has all of its state
    with pytest.raises(InvalidArgument, match=told):
        session(tmp_path).attach(model, optimizer)
