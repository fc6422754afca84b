"""Jobs under the frameworks themselves, by `./run frameworks`: kills, and what their loops count."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
lightning = pytest.importorskip("lightning")
pytest.importorskip("accelerate")

from test_job import Job  # noqa: E402
from test_session import session  # noqa: E402
from trainer_frameworks import Gpt, Tokens  # noqa: E402

import rejoin  # noqa: E402

EXAMPLES = Path(__file__).parent.parent / "examples"
DATA = EXAMPLES.parent.parent / "data" / "shakespeare.txt"
ROW = re.compile(r"^step (\d+) counted (\d+) (lr \S+ norm \S+ digest \S+) pid (\d+)", re.M)
STEPS = 400
LOADS = 300  # seconds, at most, in which a framework is imported


def job_of(directory: Path, framework: str, *flags: str, steps: int = STEPS, checkpoint: Path | None = None) -> Job:
    given = [framework, "--steps", str(steps), *flags]
    if checkpoint is not None:
        given += ["--checkpoint", str(checkpoint)]
    return Job(directory, *given, steps=steps, script="trainer_frameworks.py", forks=False)


def rows(job: Job, replica: int) -> list[tuple[int, int, str, int]]:
    """Of each step that it has trained: its number, what the framework counts, the job's numbers, the process."""
    return [(int(step), int(counted), of, int(pid)) for step, counted, of, pid in ROW.findall(job.log(replica))]


def check_equal(job: Job, least: int) -> None:
    """Both say the same of each step that both have trained: the last one, and more than so many others."""
    mine, others = ({step: of for step, _, of, _ in rows(job, replica)} for replica in (0, 1))
    both = mine.keys() & others.keys()
    assert len(both) > least and job.steps in both, both
    assert {step: (mine[step], others[step]) for step in both if mine[step] != others[step]} == {}


@pytest.mark.parametrize(
    ("framework", "flags"),
    [
        ("transformers", ("--micro-batches", "2")),
        ("transformers", ("--bf16",)),
        ("lightning", ("--micro-batches", "2")),
        ("lightning", ("--manual", "--bf16")),
        ("accelerate", ("--micro-batches", "2")),
    ],
)
def test_a_replica_is_killed_and_comes_back(tmp_path, framework, flags):
    job = job_of(tmp_path, framework, "--slow", "0.5", *flags, checkpoint=tmp_path / "state.pt")
    job.until(lambda: len(rows(job, 1)) >= 5, LOADS)
    victim = rows(job, 1)[-1][3]
    os.kill(victim, signal.SIGKILL)
    job.until(lambda: sum(pid != victim for *_, pid in rows(job, 1)) >= 3, LOADS)
    (tmp_path / "fast").touch()
    errors = job.wait()
    assert errors.count("replica 1 ended with signal SIGKILL, and is started again") == 1, errors
    check_equal(job, 200)
    assert len(rows(job, 0)) == STEPS > len(rows(job, 1)), "the job went on meanwhile"
    audit = job.audit()
    assert " 0 lost, 0 repeated" in audit, audit
    for replica in (0, 1):
        assert all(step == counted for step, counted, *_ in rows(job, replica))
        assert f"ended at {STEPS}, finished True" in job.log(replica), job.tails()
        assert f"step {STEPS + 1} waits" not in job.log(replica), job.tails()
    written = "model.safetensors" if framework == "transformers" else "result.pt"
    assert (tmp_path / written).exists()
    if framework == "transformers":
        assert f'"global_step": {STEPS},' in (tmp_path / "trainer_state.json").read_text()
    if framework != "accelerate":
        assert (tmp_path / "state.pt").exists()
    if framework == "lightning":
        told = re.findall(r"^validated (\d+) averages: (\w+)$", job.log(0), re.M)
        assert len(told) == STEPS // 10 and all(int(count) > 10 and same == "True" for count, same in told), told


@pytest.mark.parametrize("framework", ["transformers", "lightning"])
def test_a_replica_that_comes_back_to_the_finished_job_ends_and_writes_nothing(tmp_path, framework):
    """And no checkpoint that can't be written ends one: neither the session's, nor the Trainer's own."""
    (tmp_path / "checkpoint-20").touch()  # in the place of its directory
    job = job_of(tmp_path, framework, "--slow", "0.5", steps=60, checkpoint=tmp_path / "gone" / "state.pt")
    job.until(lambda: len(rows(job, 1)) >= 5, LOADS)
    (tmp_path / "fast").touch()
    os.kill(rows(job, 1)[-1][3], signal.SIGKILL)
    errors = job.wait()
    assert "replica 1 ended with signal SIGKILL, and is started again" in errors, errors
    assert errors.count("is started again") == 1, errors
    logs = job.log(0) + job.log(1)
    assert f"is not written to {tmp_path}/gone/state.pt, and training goes on (1 in a row" in logs, job.tails()
    if framework == "transformers":
        assert f"the checkpoint of step 20 is not written to {tmp_path}/checkpoint-20, and training" in logs
        assert f"the checkpoint of step 30 is written to {tmp_path}/checkpoint-30, after 1 that" in logs, job.tails()
        assert (tmp_path / "checkpoint-20").is_file() and (tmp_path / "checkpoint-60" / "trainer_state.json").exists()
    assert "ended at 60, finished True" in job.log(0), job.tails()
    assert "ended at 0, finished True" in job.log(1) or "ended at 60, finished True" in job.log(1), job.tails()
    if "ended at 0" in job.log(1):
        assert "has not the job's last state, and leaves" in job.log(1), job.tails()


@pytest.mark.parametrize("framework", ["transformers", "lightning"])
def test_a_job_is_ended_by_a_signal_and_goes_on_from_its_checkpoint(tmp_path, framework):
    checkpoint = tmp_path / "state.pt"
    first = job_of(tmp_path / "first", framework, "--slow", "0.05", checkpoint=checkpoint)
    first.until(lambda: len(rows(first, 0)) >= 25 and len(rows(first, 1)) >= 25, LOADS)
    first.process.terminate()
    first.process.communicate(timeout=100)
    last = max(step for replica in (0, 1) for step, *_ in rows(first, replica))
    for replica in (0, 1):
        assert re.search(r"ended at \d+, finished False", first.log(replica)), first.tails()
    assert "killed" not in first.tails()
    second = job_of(tmp_path / "second", framework, steps=60, checkpoint=checkpoint)
    second.wait(LOADS)
    for replica in (0, 1):
        steps = [step for step, *_ in rows(second, replica)]
        assert 11 <= steps[0] <= last + 1 and steps[-1] == 60, steps
        assert all(step == counted for step, counted, *_ in rows(second, replica))
    check_equal(second, 30)


@pytest.mark.parametrize("name", ["hf_trainer.py", "lightning_trainer.py"])
def test_an_example_learns(tmp_path, name):
    command = [sys.executable, "-m", "rejoin.run", "--replicas", "2", "--batch", "16", "--steps", "60",
               "--directory", str(tmp_path / "job"), "--",
               sys.executable, str(EXAMPLES / name), str(DATA), "--steps", "60"]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400)
    log = (tmp_path / "job" / "replica0.log").read_text()
    assert done.returncode == 0, done.stderr + log
    losses = [float(loss) for loss in re.findall(r"(?:^step \d+ loss |\{'loss': ')([0-9.]+)", log, re.M)]
    assert len(losses) == 6 and losses[-1] < losses[0] - 0.3, log
    assert (tmp_path / "gpt").exists() or (tmp_path / "gpt.pt").exists()


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.gpt = Gpt()

    def training_step(self, batch, index):
        return self.gpt(**batch)["loss"]

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def test_what_lightning_can_not_have_is_refused_before_it_trains(tmp_path):
    from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging

    from rejoin.lightning import RejoinCallback

    def refused(why: str, *callbacks, feed=None, **settings) -> None:
        one = session(tmp_path)
        loader = torch.utils.data.DataLoader(Tokens(), batch_sampler=one.batches(256))
        trainer = lightning.Trainer(
            accelerator="cpu", max_steps=5, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            callbacks=[RejoinCallback(one), *callbacks], default_root_dir=tmp_path, **settings,
        )  # fmt: skip
        with pytest.raises(rejoin.InvalidArgument, match=why):
            trainer.fit(Module(), one.data(loader, steps=5) if feed is None else feed)

    refused("EMAWeightAveraging lays averages .* RejoinCallback ema=", EMAWeightAveraging())
    refused("StochasticWeightAveraging lays averages", StochasticWeightAveraging(swa_lrs=0.1))
    refused("clipped by its norm alone", gradient_clip_val=1.0, gradient_clip_algorithm="value")
    refused("accumulate_grad_batches=3: give session.data.. micro_batches=3", accumulate_grad_batches=3)
    refused("given a DataLoader, of which .* session.data", feed=torch.utils.data.DataLoader(Tokens()))
    one = session(tmp_path)
    loader = torch.utils.data.DataLoader(Tokens(), batch_sampler=one.batches(256))
    refused(r"data of the first step was asked for before attach.*steps=….*lr_find.*plain", feed=one.data(loader))


def test_a_trainers_checkpoint_that_was_begun_and_is_not_whole_is_removed(tmp_path, caplog):
    from rejoin.transformers import _removed_unless_whole

    directory = tmp_path / "checkpoint-10"
    for state in (None, '{"epoch": 1.', ""):
        with pytest.raises(OSError, match="no room"), _removed_unless_whole(directory):
            directory.mkdir()
            if state is not None:
                (directory / "trainer_state.json").write_text(state)
            raise OSError("no room")
        assert not directory.exists() and not caplog.text
    with _removed_unless_whole(directory):
        directory.mkdir()
        (directory / "trainer_state.json").write_text('{"epoch": 1.0}')
        raise ConnectionError("503 of the hub, to which a whole one is pushed")
    assert f"{directory} is written, and training goes on; what the Trainer does behind that" in caplog.text
    for error in (KeyboardInterrupt, rejoin.InvalidArgument, RuntimeError):
        with pytest.raises(error), _removed_unless_whole(directory):
            raise error
        assert directory.exists()


def test_what_a_trainer_can_not_have_is_refused_before_it_trains(tmp_path):
    from rejoin.transformers import RejoinCallback, RejoinTrainer

    def refused(why: str, kind=RejoinTrainer, callback: bool = True, **settings) -> None:
        one = session(tmp_path)
        arguments = transformers.TrainingArguments(tmp_path, use_cpu=True, report_to=[], **{"max_steps": 5, **settings})
        trainer = kind(
            model=Gpt(),
            args=arguments,
            train_dataset=Tokens(),
            eval_dataset=Tokens(),
            callbacks=[RejoinCallback(one)] if callback else [],
        )
        with pytest.raises(rejoin.InvalidArgument, match=why):
            trainer.train()

    refused("RejoinCallback needs a Trainer that takes its data", transformers.Trainer)
    refused("RejoinTrainer has no RejoinCallback: callbacks=", callback=False)
    refused("without max_steps: let it be the job's --steps", max_steps=-1)
    refused(
        "ReduceLROnPlateau does not say what the rate", lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="epoch"
    )
