"""What is unusual, all at once, in three replicas with kills: the same bits as one process of plain PyTorch."""

import json
import math
import re

import pytest

torch = pytest.importorskip("torch")

import trainer  # noqa: E402
import trainer_bits  # noqa: E402
from test_job import Job, check_equal, same_bits  # noqa: E402
from trainer_bits import HOLDS, NOT_FINITE  # noqa: E402

from rejoin.torch import Batches  # noqa: E402

LINE, DIRECT = 64, 32 << 10  # bytes, as ftar/ has them


def ring_mean(flats: list[torch.Tensor]) -> torch.Tensor:
    """Add up as the ring does (ftar/schedule.h): each segment from its second contributor on, its first one last."""
    count, size = len(flats), flats[0].numel() * 4
    if count == 1:
        return flats[0]
    if size <= DIRECT:
        starts, each = [0], size
    else:
        starts = list(range(1, count + 1))
        each = (-(-size // count) + LINE - 1) // LINE * LINE
    parts = []
    for segment, first in enumerate(starts):
        begin, end = segment * each // 4, min(size, (segment + 1) * each) // 4
        ordered = [flats[(first + i) % count][begin:end] for i in range(count)]
        total = ordered[0]
        for other in ordered[1:]:
            total = total + other
        parts.append(total * torch.tensor(1 / count))
    return torch.cat(parts)


class Layout:
    """Where the trainer's gradients lie in its buckets."""

    def __init__(self, text: str) -> None:
        self.buckets: dict[int, list[tuple[str, int, int]]] = {}
        places = json.loads(text)
        begins: dict[int, int] = {}
        for _, bucket, address, _ in places:
            begins[bucket] = min(address, begins.get(bucket, address))
        for name, bucket, address, count in places:
            self.buckets.setdefault(bucket, []).append((name, (address - begins[bucket]) // 4, count))

    def reduced(self, gradients: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        result = {}
        for tensors in self.buckets.values():
            size = max(at + count for _, at, count in tensors)
            flats = []
            for one in gradients:
                flat = torch.zeros(size)
                for name, at, count in tensors:
                    flat[at : at + count] = one[name].reshape(-1)
                flats.append(flat)
            mean = ring_mean(flats)
            for name, at, count in tensors:
                result[name] = mean[at : at + count].view(gradients[0][name].shape)
        return result


def test_the_unusual_has_the_bits_of_one_process(tmp_path):
    kill = {1: ("backward", 15), 2: ("backward", 15)}  # and 2 comes back with other frozen weights, at first
    job = Job(tmp_path, replicas=3, steps=0, script="trainer_bits.py", kill=kill)
    job.until(lambda: f"step {HOLDS} " in job.log(0) and "Refused" in job.log(2), limit=150)
    (tmp_path / "go").touch()
    trained = [job.trains(replica) for replica in range(3)]
    job.until(lambda: all(job.trains(replica) > trained[replica] + 10 for replica in range(3)), limit=150)
    job.process.terminate()
    assert job.wait(30).count("SIGKILL") == 2
    # Refused for other frozen weights, by name.
    refusal = next(line for line in job.log(2).splitlines() if "Refused" in line)
    biases = re.findall(r"3\.base\.bias ([0-9a-f]{16})", refusal)
    weights = re.findall(r"3\.base\.weight ([0-9a-f]{16})", refusal)
    assert len(set(biases)) == 2 and len(set(weights)) == 1, refusal

    final = torch.load(tmp_path / "final.pt", weights_only=True)
    job.steps = final["rejoin"]["rank0"]["version"]
    check_equal(job, 3)
    contributors, samples = job.contributors(), {r: job.samples(r) for r in range(3)}
    assert {len(members) for members in contributors.values()} >= {1, 3}
    assert NOT_FINITE < HOLDS and 0 in contributors[NOT_FINITE]
    torch.set_num_threads(1)
    layout = Layout((tmp_path / "layout.0").read_text())
    model, data, batches = trainer_bits.make_model(), trainer.make_data(), Batches(997, seed=5)
    learned = {name: p for name, p in model.named_parameters() if p.requires_grad}
    masters = {name: torch.nn.Parameter(p.detach().float()) for name, p in learned.items()}
    optimizer = torch.optim.AdamW(trainer_bits.groups_of(list(masters.values())))
    for p in masters.values():
        optimizer.state[p] = {
            "step": torch.tensor(0.0), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p),
        }  # fmt: skip
    skipped = 0
    for step in range(1, job.steps + 1):
        gradients = []
        for replica in contributors[step]:
            indices = batches.indices(tuple(map(tuple, samples[replica][step])))
            x, y = torch.utils.data.default_collate([data[i] for i in indices])
            model.zero_grad()
            for part in (slice(0, 3), slice(3, None)):
                trainer_bits.loss_of(model, x[part], y[part], step, replica).backward()
            gradients.append(
                {n: torch.zeros_like(p).float() if p.grad is None else p.grad.float() for n, p in learned.items()}
            )
        reduced = layout.reduced(gradients)
        finite = all(math.isfinite(float(g.double().square().sum())) for g in reduced.values())
        skipped += not finite
        for name, p in masters.items():
            p.grad = reduced[name]
            optimizer.state[p]["step"].fill_(step - 1)
        rates = trainer_bits.rates(trainer_bits.last_scheduled(step))
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        if finite:
            optimizer.step()
        with torch.no_grad():
            for name, p in learned.items():
                p.copy_(masters[name])
    assert skipped == 1
    for name, p in model.named_parameters():
        assert same_bits(final["model"][name], p), name
        if name in final["masters"]:
            assert same_bits(final["masters"][name], masters[name]), name
    for _ in range(job.steps - skipped):
        model.rises.add_(trainer_bits.RISES)
        model.seen.add_(trainer_bits.SEEN)
    for name, value in model.named_buffers():
        assert same_bits(final["model"][name], value), name
    assert set(final["masters"]) == {n for n, p in learned.items() if p.dtype == torch.bfloat16}
