"""The modes of torch that updates are made in, whatever the script is in where it steps."""

import contextlib

import pytest

torch = pytest.importorskip("torch")

from test_session import Job, session  # noqa: E402


@contextlib.contextmanager
def default_type(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


PLAIN = (torch.float32, torch.device("cpu"), False, False, torch.float32)
MODES = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference": torch.inference_mode,
    "a default type": lambda: default_type(torch.float64),
    "a default device": lambda: torch.device("meta"),
    "gradients": torch.enable_grad,
}


class Seeing(torch.optim.SGD):
    """Notes what matrices are multiplied in, and what tensors that are made come to be."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.seen = set()  # shared with copies of it

    def step(self, closure=None):
        made, some = torch.empty(0), self.param_groups[0]["params"][0].grad.reshape(-1)[:2]
        self.seen.add(
            (
                (some.view(2, 1) @ some.view(1, 2)).dtype,
                made.device,
                torch.is_grad_enabled(),
                made.is_inference(),
                made.dtype,
            )
        )
        return super().step()


@pytest.mark.parametrize("catches_up", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_updates_are_made_in_the_modes_of_attach_whatever_blocks_the_script_is_in(
    tmp_path, monkeypatch, mode, catches_up
):
    """A replica that catches up applies them in session.steps(), outside of its loop's body, and to parts."""
    model = torch.nn.Linear(2, 2)
    one, native, optimizer = session(tmp_path), Job(2), Seeing(model.parameters())
    with torch.autocast("cpu"), torch.inference_mode():
        one.attach(model, optimizer, metrics=["loss"], loss_scale=2.0)
    assert optimizer.seen == {PLAIN}, "with the trials of attach()"
    optimizer.seen.clear()
    for of in (one, one._buckets, one._updates):
        monkeypatch.setattr(of, "_native", native)
    monkeypatch.setattr(one, "_joined", True)
    begin = native.begin_step

    def updates():
        native.broken = False
        return [
            (tensor.index, first, length, native.step, tensor.reduced[first:].data_ptr())
            for tensor in one._tensors
            for length in [2 if catches_up and tensor.is_parameter else tensor.count]
            for first in range(0, tensor.count, length)
        ]

    native.begin_update = updates
    if catches_up:
        native.begin_step = lambda: (begun := begin()) and (begun[0], False, *begun[2:])
    with MODES[mode]() if catches_up else contextlib.nullcontext():
        for _ in one.steps():
            model(torch.ones(1, 2)).sum().backward()
            with MODES[mode]():
                optimizer.step()
    assert native.step == 2 and optimizer.seen == {PLAIN}
