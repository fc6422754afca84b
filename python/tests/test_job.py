"""Real jobs: processes, sockets, kills. What PyTorch computes alone from the ledger is what the replicas must have."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import forked  # noqa: E402
import trainer  # noqa: E402

from rejoin._programs import path  # noqa: E402

HERE = Path(__file__).parent
RUNNING: list[forked.Popen | subprocess.Popen] = []  # conftest.py ends what a test has left
# Lines of several ranks may lie behind each other.
DIGEST = re.compile(r"((?:rank \d: )?step \d+) mean (\S+ digest [0-9a-f]{16})")


class Job:
    """A job of rejoin-run over tests/trainer.py, in a directory of its own."""

    def __init__(self, directory: Path, *flags: str, replicas: int = 2, ranks: int = 1, steps: int = 60, batch: int = 8,
                 kill: dict[int, tuple[str, int]] | None = None, script: str = "trainer.py",
                 silence_ms: int = 5000, constant_batch: bool = False,
                 balance_batches: bool = False, forks: bool = True) -> None:  # fmt: skip
        self.directory, self.steps, self.script = directory, steps, str(HERE / script)
        self.last_step = steps  # as the coordinator was told; 0: none
        for replica, order in (kill or {}).items():
            self.kill(replica, *order)
        command = ["-m", "rejoin.run", "--replicas", str(replicas), "--steps", str(steps), "--batch",
                   str(batch), "--directory", str(directory), "--silence-ms", str(silence_ms), "--",
                   sys.executable, self.script, "--out", str(directory), *flags]  # fmt: skip
        if constant_batch:
            command[6:6] = ["--constant-batch"]
        if balance_batches:
            command[6:6] = ["--balance-batches"]
        if ranks > 1:
            command[6:6] = ["--ranks", str(ranks)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process: forked.Popen | subprocess.Popen
        if forks and ranks == 1:
            self.process = forked.Popen(command, env=environment, stderr=subprocess.PIPE)
        else:
            command = [sys.executable, *command]
            self.process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        RUNNING.append(self.process)

    def wait(self, limit: float = 240) -> str:
        try:
            _, errors = self.process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            _, errors = self.process.communicate(timeout=30)
            pytest.fail(f"the job has not ended:\n{errors}\n{self.tails()}")
        assert self.process.returncode == 0, f"{errors}\n{self.tails()}"
        return errors

    def tails(self) -> str:
        return "\n".join(f"{log}:\n{log.read_text()[-3000:]}" for log in sorted(self.directory.glob("*.log")))

    def log(self, replica: int) -> str:
        file = self.directory / f"replica{replica}.log"
        return file.read_text() if file.exists() else ""

    def until(self, condition, limit: float = 150) -> None:
        deadline = time.monotonic() + limit
        while not condition():
            assert time.monotonic() < deadline, self.tails()
            assert self.process.poll() is None, self.tails()
            time.sleep(0.02)

    def kill(self, replica: int, place: str, step: int = 0) -> None:
        """That replica kills itself when it next comes to this place, from this step on."""
        order = self.directory / "order.new"
        order.write_text(f"{place}:{step}")
        order.rename(self.directory / f"kill.{replica}")

    def hold(self, replica: int, place: str, rank: int = 0) -> Path:
        """That rank waits when it next comes to this place: from when the file is there until it is removed."""
        order = self.directory / "order.new"
        order.write_text(f"{place}:0")
        order.rename(self.directory / f"hold.{replica}.{rank}")
        return self.directory / f"held.{replica}.{rank}"

    def child(self, name: str) -> int:
        """The process of rejoin-run's daemon with this name."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        (found,) = [
            int(pid) for pid in children if f"--name\0{name}\0".encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        return found

    def killed(self, replica: int) -> bool:
        return not (self.directory / f"kill.{replica}").exists()

    def trains(self, replica: int) -> int:
        """How many steps that replica has trained so far."""
        return len(re.findall(r"^step \d+ mean", self.log(replica), re.M))

    def audit(self) -> str:
        log = self.directory / "log" / "decisions.log"
        return subprocess.run(
            [path("rejoin"), "audit", str(log), *(["--steps", str(self.last_step)] if self.last_step else [])],
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    def contributors(self) -> dict[int, list[int]]:
        """By step: who contributed to it, as the coordinator's log says."""
        epochs: list[tuple[int, list[int]]] = []
        for after, members in re.findall(r"epoch +\d+ after step +(\d+): replicas ([^;]*);", self.audit()):
            catching_up = set(re.findall(r"(\d+) \(catching up\)", members))
            all_members = re.findall(r"(\d+)", members)
            epochs.append((int(after), [int(r) for r in all_members if r not in catching_up]))
        by_step = {}
        for step in range(1, self.steps + 1):
            by_step[step] = [members for after, members in epochs if after < step][-1]
        return by_step

    def samples(self, replica: int) -> dict[int, list[list[int]]]:
        lines = (self.directory / f"trained.{replica}").read_text().splitlines()
        return dict(json.loads(line) for line in lines)

    def weights(self, replica: int) -> dict[int, int]:
        """By step; of a job that weighs nothing there are none."""
        lines = (self.directory / f"weights.{replica}").read_text().splitlines()
        return dict(json.loads(line) for line in lines)

    def pid_of(self, replica: int, rank: int = 0) -> int:
        for child in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{child}/comm").read_text() == f"replica{replica}\n":  # forked
                    return int(child)
        for process in Path("/proc").iterdir():
            if not process.name.isdecimal():
                continue
            try:
                command = (process / "cmdline").read_bytes().split(b"\0")
                environment = (process / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if (
                self.script.encode() in command[:3]
                and str(self.directory).encode() in command
                and b"REJOIN_REPLICA=%d" % replica in environment
                and (rank == 0 or b"RANK=%d" % rank in environment)
            ):
                return int(process.name)
        raise AssertionError(f"replica {replica} is not there")


def check_equal(job: Job, replicas: int) -> None:
    """All replicas say the same digest after each step that several of them have trained."""
    digests: dict[str, set[str]] = {}
    who: dict[str, set[int]] = {}
    for replica in range(replicas):
        for step, of in re.findall(DIGEST, job.log(replica)):
            digests.setdefault(step, set()).add(of)
            who.setdefault(step, set()).add(replica)
    assert len(digests) >= job.steps // 2
    for step, seen in digests.items():
        assert len(seen) == 1, f"step {step}: {seen}"
    compared = sum(len(of) > 1 for of in who.values())
    assert compared >= 10, f"only {compared} steps were said by several replicas"
    assert " 0 lost, 0 repeated" in job.audit(), job.audit()


def alone(job: Job, kind: str, max_norm: float | None, start: dict | None = None) -> tuple[dict, dict]:
    """What one process of plain PyTorch computes from the ledger; of two replicas the order of the sum is no matter."""
    torch.set_num_threads(1)
    from rejoin.torch._data import Batches
    from rejoin.torch._update import square_sums

    model = trainer.make_model(kind)
    optimizer = trainer.make_optimizer(kind, model)
    if start is not None:
        model.load_state_dict(start["model"])
        optimizer.load_state_dict(start["optimizer"])
    data, batches = trainer.make_data(), Batches(997, seed=5)
    contributors, samples = job.contributors(), {r: job.samples(r) for r in (0, 1)}
    weights = {r: job.weights(r) for r in (0, 1)}
    for step in range(1, job.steps + 1):
        gradients, buffers, count = [], [], 0
        before = {name: b.clone() for name, b in model.named_buffers()}
        for replica in contributors[step]:
            for name, buffer in model.named_buffers():
                buffer.copy_(before[name])
            indices = batches.indices(tuple(map(tuple, samples[replica][step])))
            x, y = torch.utils.data.default_collate([data[i] for i in indices])
            model.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            weight = weights[replica].get(step, 1)
            gradients.append([p.grad * weight for p in model.parameters()])
            buffers.append([(b.double() if b.is_floating_point() else b) * weight for b in model.buffers()])
            count += weight
        with torch.no_grad():
            for i, buffer in enumerate(model.buffers()):
                total = sum(b[i] for b in buffers)
                buffer.copy_(total // count if not buffer.is_floating_point() else total * (1 / count))
            reduced = [sum(g[i] for g in gradients) * torch.tensor(1 / count) for i in range(len(gradients[0]))]
            coefficient = 1.0
            if max_norm is not None:
                norm = sum(square_sums(g.reshape(-1) for g in reduced)) ** 0.5
                coefficient = max_norm / (norm + 1e-6) if norm > max_norm else 1.0
            for p, g in zip(model.parameters(), reduced, strict=True):
                p.grad = g * coefficient if coefficient != 1.0 else g
        for group in optimizer.param_groups:
            group["lr"] = trainer.rate(step)
        optimizer.step()
    return model.state_dict(), optimizer.state_dict()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize(
    "kind", ["adamw", *(pytest.param(kind, marks=pytest.mark.thorough) for kind in ("fused", "sgd"))]
)
def test_a_killed_replica_comes_back_and_all_have_what_one_process_computes_from_the_ledger(tmp_path, kind):
    norm = ["--max-norm", "0.5"] if kind == "adamw" else []
    job = Job(tmp_path, "--optimizer", kind, *norm, steps=200, kill={1: ("backward", 20)})
    errors = job.wait()
    assert "replica 1 ended with signal SIGKILL" in errors
    check_equal(job, 2)
    assert "200 steps committed" in job.audit()
    sizes = [len(members) for members in job.contributors().values()]
    assert 1 in sizes, "nobody was alone: nothing was killed"
    final = torch.load(tmp_path / "final.pt", weights_only=True)
    model, optimizer = alone(job, kind, 0.5 if norm else None)
    for name, value in model.items():
        assert same_bits(value, final["model"][name]), f"{name} has other bits"
    for number, state in optimizer["state"].items():
        for name, value in state.items():
            if value is not None:
                assert same_bits(value, final["optimizer"]["state"][number][name]), f"{name} of {number}"


def test_a_slower_replica_trains_fewer_samples_and_all_have_what_one_process_computes_from_the_ledger(tmp_path):
    job = Job(tmp_path, "--sample-ms", "1", "3", "--workers", "1", steps=50, batch=16, balance_batches=True)
    job.wait()
    check_equal(job, 2)
    late = [
        sum(end - begin for step, ranges in job.samples(replica).items() if step > 30 for begin, end in ranges)
        for replica in (0, 1)
    ]
    assert sum(late) == 20 * 32 and late[1] < 0.8 * late[0], late
    assert job.weights(0)[50] == sum(end - begin for begin, end in job.samples(0)[50])
    final = torch.load(tmp_path / "final.pt", weights_only=True)
    for name, value in alone(job, "adamw", None)[0].items():
        assert same_bits(value, final["model"][name]), f"{name} has other bits"


@pytest.mark.parametrize(
    "places",
    [
        ("backward", "before update", "joining"),
        pytest.param(("forward", "step", "updated", "after"), marks=pytest.mark.thorough),
    ],
)
def test_kills_at_every_point_of_a_step_lose_nothing(tmp_path, places):
    job = Job(tmp_path, replicas=3, steps=0)
    job.until(lambda: all(job.trains(replica) > 20 for replica in range(3)))
    for number, place in enumerate(places):
        victim = number % 3
        if place == "joining":  # it dies once more while it catches up
            job.kill(victim, "forward")
            job.until(lambda victim=victim: job.killed(victim))
        before, others = job.trains(victim), job.trains((victim + 1) % 3)
        job.kill(victim, place)
        job.until(lambda victim=victim: job.killed(victim))
        job.until(lambda victim=victim, before=before: job.trains(victim) > before + 5)
        assert job.trains((victim + 1) % 3) > others
    os.kill(job.process.pid, signal.SIGTERM)
    errors = job.wait(30)
    assert errors.count("SIGKILL") == len(places) + ("joining" in places), errors
    check_equal(job, 3)


@pytest.mark.thorough
def test_a_compiled_model_loses_a_replica_and_gets_it_back(tmp_path):
    """It dies once more where it compiles, before join(). With "inductor" as the backend it takes half a minute."""
    job = Job(tmp_path, "--compile", "aot_eager", steps=0)
    job.until(lambda: all(job.trains(replica) > 10 for replica in range(2)), limit=240)
    job.kill(1, "backward")
    job.until(lambda: job.killed(1))
    job.kill(1, "warm-up")
    others = job.trains(0)
    job.until(lambda: job.killed(1))
    assert job.trains(0) > others, "the others waited for it"
    before = job.trains(1)
    job.until(lambda: job.trains(1) > before + 10, limit=240)
    os.kill(job.process.pid, signal.SIGTERM)
    assert job.wait(30).count("SIGKILL") == 2
    check_equal(job, 2)


def test_workers_of_the_loader_that_die_or_stand_cost_no_replica_and_no_sample(tmp_path):
    """They stand for 6 s, which is more than a trainer that is not busy has with a silence of 2 s."""
    kill = {1: ("worker", 20), 0: ("worker stands", 40)}
    job = Job(tmp_path, "--workers", "1", steps=80, kill=kill, silence_ms=2000)
    errors = job.wait()
    assert job.killed(1) and job.killed(0) and "ended with" not in errors, errors
    assert "the DataLoader's workers are started again" in job.log(1), job.log(1)
    check_equal(job, 2)


def test_sigterm_is_an_orderly_leave_and_a_stopped_replica_is_waited_for(tmp_path):
    job = Job(tmp_path, replicas=2, steps=0)
    job.until(lambda: "step 30 " in job.log(0) and "step 30 " in job.log(1))
    stopped = job.pid_of(1)
    os.kill(stopped, signal.SIGSTOP)
    before = len(job.log(0))
    time.sleep(1)
    os.kill(stopped, signal.SIGCONT)
    job.until(lambda: len(job.log(0)) > before + 2000)
    assert job.pid_of(1) == stopped, "it was put out for a second's pause"
    os.kill(job.process.pid, signal.SIGTERM)
    job.wait(30)
    for replica in (0, 1):
        assert re.search(r"^end \d+ [0-9a-f]{16}$", job.log(replica), re.M), job.log(replica)[-2000:]
    # Each leaves at the end of a step: nothing has to be noticed.
    assert "has left" in (tmp_path / "coordinator.log").read_text()


def test_daemon_and_coordinator_are_killed_and_nobody_loses_a_step(tmp_path):
    job = Job(tmp_path, replicas=2, steps=0)
    job.until(lambda: all(job.trains(replica) > 20 for replica in range(2)))
    assert Path(f"/proc/{job.pid_of(0)}/comm").read_text() == "replica0\n", "it is not forked: tests would take minutes"
    for name in ("node1", "coordinator"):
        victim = job.child(name)
        before = [job.trains(replica) for replica in range(2)]
        os.kill(victim, signal.SIGKILL)
        job.until(lambda before=before: all(job.trains(r) > before[r] + 20 for r in range(2)))
    job.process.terminate()
    errors = job.wait(30)
    assert "node1 ended with signal SIGKILL" in errors and "coordinator ended with signal SIGKILL" in errors
    assert not re.search(r"replica \d (ended|has not left)", errors), errors
    check_equal(job, 2)


def of_a_plain_job(steps: int) -> dict:
    """A checkpoint of so many steps of plain PyTorch."""
    model = trainer.make_model()
    optimizer = trainer.make_optimizer("adamw", model)
    for _ in range(steps):
        x, y = torch.utils.data.default_collate([trainer.make_data()[i] for i in range(8)])
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def test_a_job_goes_on_from_a_plain_checkpoint_and_plain_pytorch_from_one_of_a_job(tmp_path):
    """One replica writes it while all train."""
    torch.set_num_threads(1)
    plain = of_a_plain_job(5)
    torch.save(plain, tmp_path / "checkpoint.pt")
    first = Job(tmp_path, "--save-every", "20", "--workers", "1", "--restore", replicas=2, steps=60)
    first.wait()
    check_equal(first, 2)
    final, (weights, state) = torch.load(tmp_path / "final.pt", weights_only=True), alone(first, "adamw", None, plain)
    assert all(same_bits(final["model"][name], weight) for name, weight in weights.items())
    assert same_bits(final["optimizer"]["state"][0]["exp_avg_sq"], state["state"][0]["exp_avg_sq"])
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert saved["rejoin"]["rank0"]["version"] == 60
    model = trainer.make_model()
    model.load_state_dict(saved["model"])
    optimizer = trainer.make_optimizer("adamw", model)
    optimizer.load_state_dict(saved["optimizer"])
    assert {float(state["step"]) for state in optimizer.state_dict()["state"].values()} == {65.0}
    # A new coordinator, which knows of nothing: steps and samples go on where they stood.
    second_directory = tmp_path / "second"
    second_directory.mkdir()
    (second_directory / "checkpoint.pt").write_bytes((tmp_path / "checkpoint.pt").read_bytes())
    second = Job(second_directory, "--restore", replicas=2, steps=120, kill={0: ("forward", 70)})
    second.wait()
    used = [tuple(r) for job in (first, second) for replica in (0, 1) for r in sum(job.samples(replica).values(), [])]
    first_samples = {k for r in (0, 1) for ranges in first.samples(r).values() for b, e in ranges for k in range(b, e)}
    later = {k for r in (0, 1) for ranges in second.samples(r).values() for b, e in ranges for k in range(b, e)}
    assert min(later) == max(first_samples) + 1, "samples were trained twice, or left out"
    assert used
    assert "end 120" in second.log(1)
