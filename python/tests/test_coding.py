"""Coded gradients, where the trainer clips them or skips steps."""

import math
import re
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from test_job import Job  # noqa: E402

from rejoin.torch._update import Rules, Update  # noqa: E402


def log_of(path, monkeypatch, coding: str, *flags: str, steps: int = 20) -> str:
    monkeypatch.setenv("REJOIN_CODING", coding)
    path.mkdir()
    job = Job(path, *flags, steps=steps, batch=500, script="trainer_coding.py")
    job.wait()
    return job.log(0)


def last_loss(log: str, steps: int = 20) -> float:
    return float(re.search(rf"^step {steps} mean (\S+)", log, re.M).group(1))


@pytest.mark.parametrize(
    "flags", [("--max-norm", "1"), pytest.param(("--skip-nonfinite",), marks=pytest.mark.thorough)]
)
def test_a_spike_that_is_clipped_or_skipped_is_felt_no_longer_than_uncoded(tmp_path, monkeypatch, flags):
    of = {
        c: last_loss(log_of(tmp_path / c, monkeypatch, c, *flags, "--spike", "1e15", "--at", "10"))
        for c in ("off", "8", "4")
    }
    for coding in ("8", "4"):
        assert of[coding] == pytest.approx(of["off"], rel=0.02), of


def test_what_coding_loses_is_made_up_for_where_each_step_is_clipped(tmp_path, monkeypatch):
    log = log_of(tmp_path / "4", monkeypatch, "4", "--constant", "--max-norm", "1", steps=60)
    off = re.findall(r"^statistics off by (\S+)", log, re.M)
    assert len(off) == 60 and float(off[-1]) == 0, "a buffer's mean is off"
    norm, way = re.search(r"^step 60 mean \S+ norm (\S+)\nway 60 (\S+)", log, re.M).groups()
    assert float(norm) > 10, "each step is clipped by more than that"
    assert float(way) == pytest.approx(1, abs=0.2), "all but what the first steps lose, when it is not known yet"


def told(norm: float, log_scale: int, next_log_scale: int, rules: Rules) -> float:
    factors: list[tuple[int, float]] = []
    update = Update(
        SimpleNamespace(scale_feedback=lambda step, factor: factors.append((step, factor))),
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0),
        [],
        rules,
        torch.device("cpu"),
        SimpleNamespace(total=lambda step, mine: mine),
    )
    update._next_scale = 2.0**next_log_scale
    update._seen[7] = ((norm * 2.0**log_scale) ** 2, 2.0**log_scale)
    for _ in range(2):
        update.scale_feedback(7)
    assert len(set(factors)) <= 1 and all(step == 7 for step, _ in factors)
    return factors[0][1] if factors else 1.0


def test_a_step_counts_as_it_was_clipped_in_units_of_the_next_ones_loss():
    clips, skips = Rules(max_norm=2.0), Rules(skip_nonfinite=True)
    assert told(8.0, 0, 0, clips) == pytest.approx(0.25)
    assert told(1.0, 0, 0, clips) == 1.0
    assert told(8.0, 16, 17, clips) == pytest.approx(0.5), "the loss's scale has grown"
    assert told(1.0, 16, 17, skips) == 2.0
    assert told(math.inf, 16, 15, skips) == 0.0, "it was skipped"
    assert told(math.inf, 0, 0, Rules()) == 1.0, "nobody looks"
