"""When a bucket is handed over, and behind what."""

import pytest

torch = pytest.importorskip("torch")

from test_session import Job, session  # noqa: E402

from rejoin.torch._buckets import Buckets  # noqa: E402
from rejoin.torch._tensors import Tensor  # noqa: E402


class Stream:
    """In the place of torch's: it says whom it waits for."""

    def __init__(self, device: object = None) -> None:
        self.waits_for: list[Stream] = []
        self.cuda_stream = id(self)

    def wait_stream(self, other: "Stream") -> None:
        self.waits_for.append(other)


class Native:
    def __init__(self) -> None:
        self.handed_over: list[tuple[int, int]] = []

    def all_reduce(self, bucket: int, stream: int) -> None:
        self.handed_over.append((bucket, stream))


# As of a model with a branch on a stream of its own: backward() brings its gradients there.
def test_a_bucket_is_handed_over_behind_all_streams_that_its_gradients_came_on(monkeypatch):
    main, branch = Stream(), Stream()
    running = [main]
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: running[0])
    native = Native()
    buckets = Buckets(native, torch.device("cuda", 0))
    tensors = [
        Tensor(name, torch.nn.Parameter(torch.zeros(2)), group=0, bucket=number, gradient=torch.zeros(2))
        for number, name in ((0, "a"), (0, "b"), (1, "c"))
    ]
    buckets.add(tensors[:2])
    buckets.add(tensors[2:])
    for _ in range(2):
        native.handed_over.clear()
        buckets.begin()
        for tensor, stream in zip(tensors, (branch, main, main), strict=True):
            running[0] = stream
            tensor.value.grad = torch.ones(2)
            buckets.bring(tensor)
        assert [bucket for bucket, _ in native.handed_over] == [0], "the last one waits for the look at the others"
        buckets.bring_rest()
        assert [bucket for bucket, _ in native.handed_over] == [0, 1]
        sides = {side.cuda_stream: side for side in buckets._side_streams}
        first, second = (sides[stream] for _, stream in native.handed_over)
        assert set(first.waits_for) == {main, branch} and second.waits_for == [main]
        first.waits_for.clear(), second.waits_for.clear()


# What a float16 gradient has to hold then is more than what the script sees.
def test_gradients_of_float16_that_are_weighed_are_warned_of_once(caplog):
    buckets = Buckets(Native(), torch.device("cpu"))
    values = [torch.nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in (torch.float32, torch.float16)]
    buckets.add([Tensor(f"t{i}", v, group=0, bucket=0, gradient=v.data) for i, v in enumerate(values[:1])])
    buckets.begin(42)
    assert not caplog.messages
    buckets.add([Tensor("narrow", values[1], group=0, bucket=1, gradient=values[1].data)])
    for weight in (1, 42, 42, 1, 40):
        buckets.begin(weight)
    (told,) = caplog.messages
    assert "multiplied by theirs, 42 here" in told and "'narrow', are infinite from 1560 on" in told


def raise_error(_):
    raise MemoryError("within backward()")


def test_a_backward_that_has_raised_in_its_midst_is_an_error_in_the_log(tmp_path, monkeypatch, caplog):
    """What it has brought can't be taken back. One that raises before, or is none of those that count, does no harm."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[2].bias.requires_grad_(False)
    one, native = session(tmp_path), Job(9)
    one.attach(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]))
    for of in (one, one._buckets, one._updates):
        monkeypatch.setattr(of, "_native", native)
    monkeypatch.setattr(one, "_joined", True)

    def backward(raises=None, of=model):
        if raises is None:
            of(torch.ones(1, 2)).sum().backward()
            return
        hook = raises.register_hook(raise_error)
        with pytest.raises(MemoryError):
            of(torch.ones(1, 2)).sum().backward()
        hook.remove()

    told = {}
    for step, _ in one.steps():
        caplog.clear()
        if step.number == 1:
            backward(of=model[1:])  # the first layer is not used
        elif step.number == 2:
            with one.accumulate():
                backward()
                backward()
        elif step.number in (3, 4, 5, 6):
            backward(model[1].weight)
        elif step.number == 7:
            backward(model[2].weight)  # the first that comes
        elif step.number == 8:
            with one.accumulate():
                backward(model[1].weight)
            one._optimizer.zero_grad()
            backward()
        one._optimizer.step()
        told[step.number] = [record.getMessage() for record in caplog.records]
    assert one.finished and [step for step in told if told[step]] == [3, 4, 6], "the first, second and fourth time"
    assert "a backward() has raised when 2 of 5 parameters had their gradients" in told[3][0]


def test_nothing_is_told_of_a_compiled_backward(tmp_path, monkeypatch, caplog):
    """Within it nothing says when it ends."""
    compiled_autograd = pytest.importorskip("torch._dynamo.compiled_autograd")
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
    one, native = session(tmp_path), Job(2)
    one.attach(model, torch.optim.AdamW(model.parameters()))
    for of in (one, one._buckets, one._updates):
        monkeypatch.setattr(of, "_native", native)
    monkeypatch.setattr(one, "_joined", True)
    for _ in one.steps():
        with compiled_autograd._enable(lambda graph: graph):
            model[1](torch.ones(1, 2)).sum().backward()  # the first layer is not used
        one._optimizer.step()
    assert one.finished and not [told for told in caplog.records if told.name == "rejoin"]
