"""When a bucket is handed over, and behind what."""

import pytest

torch = pytest.importorskip("torch")

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
