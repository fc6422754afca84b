"""FSDP2 in a replica, float16 with masters and a scale, averages: with kills, against what torch computes alone."""

import math
import re

import pytest

torch = pytest.importorskip("torch")

import trainer  # noqa: E402
from test_job import Job, check_equal, same_bits  # noqa: E402

from rejoin.torch import Batches  # noqa: E402
from rejoin.torch._update import square_sums  # noqa: E402

MEAN = re.compile(r"(rank \d: )?step (\d+) mean (\S+) digest ")


def data_of(ranges, shard: int = 0, shards: int = 1):
    data = trainer.make_data()
    indices = Batches(997, seed=5, shard=shard, shards=shards).indices(tuple(map(tuple, ranges)))
    return torch.utils.data.default_collate([data[i] for i in indices])


def mean(gradients: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    return [sum(one) * torch.tensor(1 / len(one)) for one in zip(*gradients, strict=True)]


def clip(norm: float, most: float) -> float:
    return most / (norm + 1e-6) if norm > most else 1.0


def chunks(whole: torch.Tensor) -> list[torch.Tensor]:
    """As FSDP2 gives them to two ranks, flat and padded."""
    parts = list(torch.chunk(whole, 2))
    parts += [whole.new_zeros(0, *whole.shape[1:])] * (2 - len(parts))
    size = parts[0].numel()
    return [torch.nn.functional.pad(part.reshape(-1), (0, size - part.numel())) for part in parts]


def test_a_sharded_replica_with_mixed_precision_comes_back_and_has_what_one_process_computes(tmp_path):
    flags = ["--optimizer", "mixed", "--max-norm", "0.5"]
    job = Job(tmp_path, *flags, ranks=2, steps=50, kill={1: ("backward", 10)})
    errors = job.wait()
    assert "replica 1 ended with status 1" in errors, errors
    check_equal(job, 2)
    assert 1 in [len(members) for members in job.contributors().values()], "nobody was alone: nothing was killed"

    torch.set_num_threads(1)
    model, used = trainer.make_model("sharded"), trainer.make_model("sharded").bfloat16()
    optimizer = trainer.make_optimizer("sharded", model)
    parameters = list(model.parameters())
    contributors, samples = job.contributors(), {r: job.samples(r) for r in (0, 1)}
    means = {(rank, int(step)): float(mean) for rank, step, mean in re.findall(MEAN, job.log(0) + job.log(1))}
    for step in range(1, job.steps + 1):
        gradients, losses = [], []
        for replica in contributors[step]:
            by_rank = []
            for shard in range(2):
                x, y = data_of(samples[replica][step], shard, 2)
                used.zero_grad()
                with torch.no_grad():
                    for p, own in zip(used.parameters(), parameters, strict=True):
                        p.copy_(own)
                loss = torch.nn.functional.cross_entropy(used(x.bfloat16()).float(), y)
                loss.backward()
                losses.append(loss.item())
                by_rank.append([p.grad.float() for p in used.parameters()])
            gradients.append([(one + other) / 2 for one, other in zip(*by_rank, strict=True)])
        assert means["", step] == means["rank 1: ", step] == pytest.approx(sum(losses) / len(losses), rel=1e-8)
        reduced = mean(gradients)
        total = sum(sum(square_sums(chunks(g)[rank] for g in reduced)) for rank in range(2))
        coefficient = clip(math.sqrt(total), 0.5)
        for p, g in zip(parameters, reduced, strict=True):
            p.grad = g * coefficient if coefficient != 1.0 else g
        for group in optimizer.param_groups:
            group["lr"] = trainer.rate(step)
        optimizer.step()
    for rank in range(2):
        weights, moments = torch.load(tmp_path / f"final.{rank}.pt", weights_only=True)
        for p, weight, moment in zip(parameters, weights, moments, strict=True):
            assert same_bits(chunks(p.detach())[rank][: weight.numel()], weight)
            assert same_bits(chunks(optimizer.state[p]["exp_avg_sq"])[rank][: moment.numel()], moment)


@pytest.mark.thorough
def test_float16_with_masters_a_scale_and_an_average(tmp_path):
    flags = ["--optimizer", "half", "--max-norm", "0.5", "--ema", "0.99", "--loss-scale", str(2.0**22)]
    job = Job(tmp_path, *flags, steps=150, kill={1: ("backward", 20)})
    assert "replica 1 ended with signal SIGKILL" in job.wait()
    check_equal(job, 2)
    assert 1 in [len(members) for members in job.contributors().values()], "nobody was alone: nothing was killed"

    torch.set_num_threads(1)
    model = trainer.make_model("half")
    masters = [torch.nn.Parameter(p.detach().float()) for p in model.parameters()]
    averages = [p.detach().clone() for p in masters]
    optimizer = torch.optim.AdamW(masters, lr=1e-3, weight_decay=0.1, eps=1e-6)  # as the trainer has
    contributors, samples = job.contributors(), {r: job.samples(r) for r in (0, 1)}
    log_scale, skipped, good = 22, 0, 0
    for step in range(1, job.steps + 1):
        gradients = []
        for replica in contributors[step]:
            x, y = data_of(samples[replica][step])
            model.zero_grad()
            (torch.nn.functional.cross_entropy(model(x.half()).float(), y) * 2.0**log_scale).backward()
            gradients.append([p.grad.float() for p in model.parameters()])
        reduced = mean(gradients)
        total = sum(square_sums(g.reshape(-1) for g in reduced))
        if not math.isfinite(total):
            log_scale, skipped, good = log_scale - 1, skipped + 1, 0
            continue
        good += 1
        norm = math.sqrt(total) / 2.0**log_scale
        coefficient = clip(norm, 0.5) / 2.0**log_scale
        for p, g in zip(masters, reduced, strict=True):
            p.grad = g * coefficient
            if p in optimizer.state:
                optimizer.state[p]["step"].fill_(step - 1)
            else:
                zeros = torch.zeros_like(p)
                optimizer.state[p] = {
                    "step": torch.tensor(step - 1.0), "exp_avg": zeros, "exp_avg_sq": zeros.clone(),
                }  # fmt: skip
        for group in optimizer.param_groups:
            group["lr"] = trainer.rate(step)
        optimizer.step()
        with torch.no_grad():
            for average, master, p in zip(averages, masters, model.parameters(), strict=True):
                average.mul_(0.99).add_(master, alpha=1 - 0.99)
                p.copy_(master)
    assert 0 < skipped < 20, "the scale was meant to be too large at first, and no more"
    final = torch.load(tmp_path / "final.pt", weights_only=True)
    assert final["rejoin"]["rank0"]["loss_scale"].tolist() == [log_scale, good]
    for (name, p), master, average in zip(model.named_parameters(), masters, averages, strict=True):
        assert same_bits(final["model"][name], p), name
        assert same_bits(final["masters"][name], master), name
        assert same_bits(final["average"][name], average), name


def test_bfloat16_weights_with_float32_masters_and_gradients_in_a_job_of_a_constant_batch(tmp_path):
    job = Job(
        tmp_path, "--optimizer", "main", "--max-norm", "0.5", batch=7, steps=60, kill={1: ("backward", 20)},
        constant_batch=True,
    )  # fmt: skip
    assert "replica 1 ended with signal SIGKILL" in job.wait()
    check_equal(job, 2)
    contributors, samples = job.contributors(), {r: job.samples(r) for r in (0, 1)}
    counts = {step: sum(e - b for r in contributors[step] for b, e in samples[r][step]) for step in contributors}
    alone = [step for step, members in contributors.items() if len(members) == 1]
    assert alone, "nobody was alone: nothing was killed"
    assert {step for step, count in counts.items() if count != 14} == {alone[0]}, "only where one was lost in the step"
    assert counts[alone[0]] == 7

    torch.set_num_threads(1)
    model = trainer.make_model("main")
    masters = [torch.nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = trainer.make_optimizer("main", model)
    optimizer = torch.optim.AdamW(masters, **{k: optimizer.defaults[k] for k in ("lr", "weight_decay")})
    for step in range(1, job.steps + 1):
        total = [torch.zeros_like(p) for p in masters]
        for replica in contributors[step]:
            x, y = data_of(samples[replica][step])
            main = [torch.zeros_like(p) for p in masters]
            half = len(y) // 2
            for part in (slice(0, half), slice(half, None)):
                model.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(x[part].bfloat16()).float(), y[part])
                (loss * len(y[part]) / len(y)).backward()
                for g, p in zip(main, model.parameters(), strict=True):
                    g += p.grad
            for sum_, g in zip(total, main, strict=True):
                sum_ += g * len(y)
        reduced = [g * torch.tensor(1 / counts[step]) for g in total]
        coefficient = clip(math.sqrt(sum(square_sums(g.reshape(-1) for g in reduced))), 0.5)
        for p, g in zip(masters, reduced, strict=True):
            p.grad = g * coefficient if coefficient != 1.0 else g
        for group in optimizer.param_groups:
            group["lr"] = trainer.rate(step)
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)
    final = torch.load(tmp_path / "final.pt", weights_only=True)
    for (name, p), master in zip(model.named_parameters(), masters, strict=True):
        assert same_bits(final["model"][name], p), name
        assert same_bits(final["masters"][name], master), name


@pytest.mark.thorough
def test_ranks_leave_together(tmp_path):
    job = Job(tmp_path, "--optimizer", "sharded", "--slow", ranks=2, steps=0)
    job.until(lambda: job.trains(0) > 4 and job.trains(1) > 4)
    job.process.terminate()
    job.wait(60)
    for replica in range(2):
        ends = re.findall(r"end (\d+) ", job.log(replica))
        assert len(ends) == 2 and ends[0] == ends[1], job.log(replica)[-2000:]
        assert 'trainer.py", line' not in job.log(replica), job.log(replica)[-3000:]  # torchrun's own error is none


def test_sums_of_squares_come_together_and_have_the_bits_of_each_alone():
    def alone(flat: torch.Tensor) -> float:  # each sum fetched by itself, also where it has no element
        total = 0.0
        for part in torch.split(flat, 4096 * 2048):
            squares = part.double().square()
            whole = squares.numel() // 4096 * 4096
            total += float(squares[:whole].view(-1, 4096).sum(1).sum()) + float(squares[whole:].sum())
        return total

    class Fetched(torch.utils._python_dispatch.TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, arguments=(), named=None):
            Fetched.count += function is torch.ops.aten._local_scalar_dense.default
            return function(*arguments, **(named or {}))

    torch.manual_seed(0)
    sizes = (0, 1, 255, 4095, 4096, 4097, 3 * 4096, 100_003)
    flats = [torch.randn(size, dtype=dtype) for dtype in (torch.float32, torch.bfloat16) for size in sizes]
    flats += [torch.randn(4096 * 2048 + rest) for rest in (0, 7)] + [torch.tensor([1.0, math.inf])]
    flats += [torch.tensor([math.nan] * 5000), torch.full((9000,), 1e200, dtype=torch.float64)]
    wanted = torch.tensor([alone(flat) for flat in flats], dtype=torch.float64)
    with Fetched():
        sums = torch.tensor(square_sums(iter(flats)), dtype=torch.float64)
        assert square_sums([]) == [] and square_sums([flats[0]]) == [0.0]
    assert Fetched.count == 0, "a GPU is waited for once, behind all of them"
    assert same_bits(sums, wanted)
