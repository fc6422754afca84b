"""What has to be the same on all replicas for their bits to be: the coordinator refuses whoever comes with another."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rejoin.torch._settings import constants
from rejoin.torch._update import Rules

_MOST = 4096  # bytes


def fingerprint(
    optimizer: torch.optim.Optimizer, rules: Rules, device: torch.device, counted: int, others: Sequence[str] = ()
) -> str:
    """Describe torch, the device's kind, the optimizer with its settings and what it has counted before the job, what
    else is done with a gradient, and what `others` say."""
    if device.type == "cuda":
        where = f"CUDA {torch.version.cuda}, capability {torch.cuda.get_device_capability(device)}"
    else:
        where = f"CPU with {torch.backends.cpu.get_cpu_capability()}"
        subnormal = torch.tensor(1e-40, dtype=torch.float32, device="cpu")
        if subnormal.mul(1.0).item() == 0.0:  # so it is for the optimizer, which is called by this thread
            where += ", which flushes subnormal numbers to zero"
    parts = [
        f"torch {torch.__version__}",
        where,
        f"{type(optimizer).__name__} {_groups(optimizer, rules)}",
        f"max_norm={rules.max_norm}, skip_nonfinite={rules.skip_nonfinite}, ema={rules.ema}",
        f"the optimizer has counted {counted} steps before the job's first",
        "buffers are summed in wider types" + ", and stay in steps that are skipped" * rules.skip_nonfinite,
        *filter(None, others),
    ]
    if rules.lr is not None:
        steps = [digit * 10**power for power in range(7) for digit in (1, 3)]
        parts.insert(3, f"lr of steps {steps}: {[_rate(rules, step) for step in steps]}")
    text = "; ".join(parts)
    if len(text.encode()) > _MOST:
        text = text[: _MOST // 4] + " … " + hashlib.sha256(text.encode()).hexdigest()
    return text


def _groups(optimizer: torch.optim.Optimizer, rules: Rules) -> str:
    all_settings: dict[str, list[int]] = {}
    for number, group in enumerate(optimizer.param_groups):
        all_settings.setdefault(_settings(group, rules), []).append(number)
    if len(all_settings) == 1:
        return next(iter(all_settings))
    return "; ".join(f"groups {numbers}: {settings}" for settings, numbers in all_settings.items())


def _settings(group: Mapping[str, Any], rules: Rules) -> str:
    return ", ".join(f"{name}={text}" for name, text in constants(group, rules.lr is not None).items())


def _rate(rules: Rules, step: int) -> str:
    assert rules.lr is not None
    try:
        return repr(rules.lr(step))
    except Exception as error:  # a schedule that ends before this step
        return type(error).__name__
