"""What torch goes by besides its arguments: modes that a script is in at one moment, and not in another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


class Modes:
    """Those that updates are made in, wherever they are.

    The script calls optimizer.step() in its own blocks, such as `with torch.autocast(…)`, and a replica that catches up
    applies the same step in session.steps(), outside of them. So both are in the modes in which attach() has tried the
    optimizer: without autocast, gradients and inference mode, and with the default type and device of that moment.

    Nothing is compiled there. An optimizer whose step() calls what it has compiled would have the bits of its compiler
    for some shapes, and others behind torch's limit of recompilations, which parts of tensors, and trials, use up.
    """

    def __init__(self, device: torch.device) -> None:
        """`device`: the session's."""
        self._types = sorted({"cpu", device.type})
        self._dtype, self._device = torch.get_default_dtype(), _default_device()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Be in them within this block."""
        with ExitStack() as before:
            if torch.is_inference_mode_enabled():
                before.enter_context(torch.inference_mode(False))
            before.enter_context(torch.no_grad())  # inside of that, which turns gradients on
            for kind in self._types:
                if torch.is_autocast_enabled(kind):
                    before.enter_context(torch.autocast(kind, enabled=False))
            if _default_device() != self._device:
                before.enter_context(self._device)
            if (stance := getattr(torch.compiler, "set_stance", None)) is not None:  # from torch 2.6 on
                before.enter_context(stance("force_eager"))
            if (dtype := torch.get_default_dtype()) != self._dtype:
                before.callback(torch.set_default_dtype, dtype)
                torch.set_default_dtype(self._dtype)
            yield


# As it is, also within `with torch.device(…)`, which torch.get_default_device() does not see in all of its releases.
def _default_device() -> torch.device:
    return torch.empty(0).device


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """Let torch compute with one thread within this block, where the device is the CPU.

    With several it divides a tensor of more than 32,768 elements at borders that depend on their number and are no
    multiple of a vector; elements beside a border are rounded otherwise.
    """
    if device.type != "cpu":
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
