"""The moving average of the weights: `attach(…, ema=)`."""

import pytest

torch = pytest.importorskip("torch")

from rejoin.torch import Session  # noqa: E402
from rejoin.torch._update import Rules  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_average_moves_whatever_the_weights_type(tmp_path, dtype):
    model = torch.nn.Linear(64, 1, bias=False).to(dtype)
    with torch.no_grad():
        model.weight.fill_(0.5)
    one = Session(replica=0, rank=0, socket=tmp_path / "nobody")
    one.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), ema=0.999)
    assert one._updates._rules == Rules(ema=0.999)
    (tensor,) = (tensor for tensor in one._tensors if tensor.is_parameter)
    weight, average = tensor.columns
    average.fill_(0.5)
    weight.fill_(1.0)
    for _ in range(1000):
        one._updates._average([weight, average])
    torch.testing.assert_close(average.float(), torch.full((64,), 1.0 - 0.5 * 0.999**1000), rtol=1e-4, atol=0)
    assert one.state_dict()["average"]["weight"].dtype == torch.float32
    with one.averaged():
        assert model.weight.dtype == dtype and torch.equal(model.weight.view(-1), average.to(dtype))
        model(torch.ones(1, 64, dtype=dtype)).sum().backward()
    assert model.weight.data_ptr() == weight.data_ptr(), "where it lay"
