"""Buffers of bool and small integers: what they tell comes to a replica that comes back, with what they tell it of."""

import re

import pytest

torch = pytest.importorskip("torch")

from test_job import Job, check_equal  # noqa: E402
from test_session import session  # noqa: E402

SMALL = (torch.bool, torch.uint8, torch.int8, torch.int16)


def test_a_replica_that_comes_back_has_the_flags_and_counts_of_the_others(tmp_path):
    job = Job(tmp_path, "--flags", steps=0, kill={1: ("backward", 20)})
    job.until(lambda: job.killed(1))
    trained = job.trains(1)
    job.until(lambda: job.trains(1) > trained + 12)
    job.process.terminate()
    assert "replica 1 ended with signal SIGKILL" in job.wait(60)
    check_equal(job, 2)
    told = [dict(re.findall(r"^flags (\d+) (.*)$", job.log(replica), re.M)) for replica in (0, 1)]
    both = [step for step in told[0].keys() & told[1].keys() if int(step) > 20]
    assert len(both) > 10
    for step in both:
        assert told[0][step] == told[1][step], step
    assert told[1][max(both, key=int)].startswith("True ")


class Small(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        for dtype in SMALL:
            least, most = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
            self.register_buffer(str(dtype)[6:], torch.tensor([least, most, 1]).to(dtype))


# As a ring adds them up: in the type that they are exchanged in, times the reciprocal where that is no integer.
def exchanged(one, name: str, values: list[torch.Tensor], weights: list[int]) -> torch.Tensor:
    (tensor,) = (tensor for tensor in one._tensors if tensor.name == name)
    total = torch.zeros_like(tensor.gradient)
    for value, weight in zip(values, weights, strict=True):
        tensor.value.copy_(value)
        total += tensor.contribution().to(total.dtype) * weight
    tensor.settle(tensor.columns[0], total * torch.tensor(1 / sum(weights), dtype=total.dtype))
    tensor.refresh()
    return tensor.value


@pytest.mark.parametrize("weights", [[1] * 3, [16, 48, 7], [1] * 250, [40_000] * 9])
def test_what_is_equal_stays_and_what_differs_is_the_same_on_all(tmp_path, weights):
    model = Small()
    one = session(tmp_path)
    one.attach(model, torch.optim.AdamW(model.parameters()))
    for dtype in SMALL:
        name = str(dtype)[6:]
        equal = getattr(model, name).clone()
        assert torch.equal(exchanged(one, name, [equal] * len(weights), weights), equal)
    others = len(weights) - 1
    flags = [torch.tensor([True, False, False])] + [torch.tensor([False, False, True])] * others
    assert exchanged(one, "bool", flags, weights).tolist() == [True, False, True]
    counts = [torch.tensor([200, 0, 10])] + [torch.tensor([100, 0, 10])] * others
    nearest = round(100 + 100 * weights[0] / sum(weights))
    assert exchanged(one, "uint8", counts, weights).tolist() == [nearest, 0, 10]


def test_a_checkpoint_has_them_in_their_own_types(tmp_path, monkeypatch):
    model = Small()
    one = session(tmp_path)
    one.attach(model, torch.optim.AdamW(model.parameters()))
    monkeypatch.setattr(one, "_native", type("Native", (), {"position": lambda _: "", "committed": lambda _: 1})())
    monkeypatch.setattr(one, "_joined", True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.bool.logical_not_()  # after the update: of the next step
    saved = one.state_dict()["model"]
    assert all(saved[name].dtype == value.dtype and torch.equal(saved[name], value) for name, value in before.items())
