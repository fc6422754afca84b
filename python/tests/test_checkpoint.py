"""Weights go to and come from safetensors."""

import pytest

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

from rejoin.torch import Session  # noqa: E402


def tied() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Embedding(7, 5), torch.nn.Linear(5, 7, bias=False), torch.nn.BatchNorm1d(7))
    model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize("masters", [False, True])
def test_a_tied_model_of_a_session_goes_to_safetensors_and_back(tmp_path, masters):
    def attached() -> tuple[torch.nn.Module, Session]:
        model = tied().bfloat16() if masters else tied()
        session = Session(replica=0, rank=0, socket=tmp_path / "nobody")
        session.attach(model, torch.optim.AdamW(model.parameters()), masters=masters, ema=0.9)
        return model, session

    model, session = attached()
    safetensors.save_model(model, str(tmp_path / "model.safetensors"))
    safetensors.save_file(session.state_dict()["average"], str(tmp_path / "average.safetensors"))
    assert set(safetensors.load_file(tmp_path / "average.safetensors")) == {"0.weight", "2.weight", "2.bias"}
    plain, (other, loaded) = tied().to(model[0].weight.dtype), attached()
    lies_at = other[0].weight.data_ptr()
    for one in (plain, other):
        safetensors.load_model(one, str(tmp_path / "model.safetensors"))
        assert one[0].weight is one[1].weight
        for name, value in one.state_dict().items():
            assert torch.equal(value, model.state_dict()[name]), name
    assert other[0].weight.data_ptr() == lies_at
    for tensor in loaded._tensors:
        tensor.check_place()
