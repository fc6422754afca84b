"""Rejoin under Hugging Face's Trainer.

    session = rejoin.torch.Session.from_environment()
    trainer = RejoinTrainer(model=model, args=args, train_dataset=data, callbacks=[RejoinCallback(session)])
    trainer.train()
    trainer.save_model()

The Trainer's `max_steps` is the job's `--steps`. Of its arguments `max_grad_norm` is the limit of the mean gradient's
norm, its scheduler gives the job's learning rates, and `gradient_accumulation_steps` divides a step's samples, of which
there are `--batch`: `per_device_train_batch_size` says nothing.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from rejoin.errors import InvalidArgument, RejoinError
from rejoin.torch._feed import Feed
from rejoin.torch._frameworks import Part
from rejoin.torch._session import Session

try:
    import transformers
    from safetensors import SafetensorError
except ModuleNotFoundError as error:
    if error.name not in ("transformers", "safetensors"):
        raise
    raise ModuleNotFoundError(
        "rejoin.transformers is for Hugging Face's Trainer, and there is none in this environment: "
        "pip install transformers accelerate",
        name="transformers",
    ) from error

log = logging.getLogger("rejoin")


class RejoinCallback(transformers.TrainerCallback):  # type: ignore[misc]  # it has types of its own where it is there
    """Attach a Trainer's model and optimizer to a session, and let the Trainer's counters be the job's.

    For a Trainer that is a `RejoinMixin`, too. Evaluations run in `session.busy()`, and of the average of the weights
    where `ema=` is given.
    """

    def __init__(self, session: Session, *, checkpoint: str | os.PathLike[str] | None = None, **settings: Any) -> None:
        """`checkpoint`: a file that the leader writes with each checkpoint of the Trainer's, and the job goes on from.

        `settings`: those of `Session.attach()`. Without `max_norm` it is the Trainer's `max_grad_norm`, and without
        `lr` what its scheduler says.
        """
        self.part = Part(session, checkpoint, settings)
        self.trainer: Any = None  # set by a RejoinMixin

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Attach; the first step joins."""
        if self.part.feed is None:
            raise InvalidArgument(
                "RejoinCallback needs a Trainer that takes its data from the session: RejoinTrainer, or a class of "
                "yours that is a RejoinMixin first, as class MyTrainer(RejoinMixin, SFTTrainer)"
            )
        if args.load_best_model_at_end:
            raise InvalidArgument(
                "load_best_model_at_end=True: one replica would load it alone, while the job still runs. Load the best "
                "checkpoint behind the job"
            )
        if state.global_step > 0:
            raise InvalidArgument(
                "train(resume_from_checkpoint=…): a checkpoint of the Trainer's does not say where the job stands. "
                "Give RejoinCallback checkpoint=, a file that is written with each of those and loaded if it is there"
            )
        self.part.attach(given["model"], given["optimizer"], given.get("lr_scheduler"), args.max_grad_norm)

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Bring the Trainer's counter, which begins with 0 on a replica that has come back, to the job's step."""
        step, trainer = self.part.session.step, self.trainer
        if step is not None and state.global_step != step.number - 1:
            state.global_step = step.number - 1
            trainer._globalstep_last_logged = trainer._initial_global_step = state.global_step  # of which are the means

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Let the Trainer's epoch be that of the job's data."""
        step, feed = self.part.session.step, self.part.feed
        if step is not None and feed is not None and step.samples:
            state.epoch = step.samples[-1][1] / feed.loader.batch_sampler.size  # type: ignore[union-attr]

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Write the session's checkpoint."""
        self.part.save()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """End the loop where the job has ended, or this replica is to leave."""
        control.should_training_stop = control.should_training_stop or self.part.ended

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Take the job's end."""
        self.part.end()


# It has the file that the Trainer writes last. It may be the newest that there is, others being removed behind it.
def _is_whole(directory: Path) -> bool:
    try:
        json.loads((directory / transformers.trainer.TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


@contextmanager
def _removed_unless_whole(directory: Path) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        if not _is_whole(directory):
            shutil.rmtree(directory, ignore_errors=True)
            raise
        if not isinstance(error, OSError) or isinstance(error, RejoinError):
            raise
        log.error("%s is written, and training goes on; what the Trainer does behind that has failed: %s: %s",
                  directory, type(error).__name__, error)  # fmt: skip


class RejoinMixin:
    """What a Trainer does otherwise as a replica: `class MyTrainer(RejoinMixin, Trainer)`, with a `RejoinCallback`."""

    if TYPE_CHECKING:
        accelerator: Any
        args: Any
        callback_handler: Any
        state: Any

    @property
    def _part(self) -> Part:
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, RejoinCallback):
                callback.trainer = self
                return callback.part
        raise InvalidArgument(f"{type(self).__name__} has no RejoinCallback: callbacks=[RejoinCallback(session)]")

    def get_train_dataloader(self) -> Feed:
        """Give the data of the session's steps, with the collator and the columns of the Trainer's own loader."""
        part, args = self._part, self.args
        if args.max_steps <= 0:
            raise InvalidArgument("TrainingArguments without max_steps: let it be the job's --steps")
        own: Any = super().get_train_dataloader()  # type: ignore[misc]
        if not hasattr(own.dataset, "__len__"):
            raise InvalidArgument("a data set without len(): the job's samples are numbered, so it has to have one")
        seed = args.data_seed if args.data_seed is not None else args.seed
        loader: DataLoader[Any] = DataLoader(
            own.dataset,
            batch_sampler=part.session.batches(len(own.dataset), seed=seed),
            collate_fn=own.collate_fn,
            num_workers=own.num_workers,
            prefetch_factor=own.prefetch_factor,
            pin_memory=own.pin_memory,
            timeout=own.timeout,
            worker_init_fn=own.worker_init_fn,
            multiprocessing_context="forkserver" if own.num_workers > 0 else None,
        )
        # The mean of all replicas' gradients is clipped by optimizer.step(), and its norm is known then.
        self.accelerator.clip_grad_norm_ = lambda *_, **__: torch.tensor(part.session.last_norm or 0.0)
        self._give_runs_of_their_own()
        part.feed = part.session.data(loader, steps=args.max_steps, micro_batches=args.gradient_accumulation_steps)
        return part.feed

    # Replicas that start in the same second would share the directory that TensorBoard's takes a run for.
    def _give_runs_of_their_own(self) -> None:
        for callback in self.callback_handler.callbacks:
            if type(callback).__name__ == "TensorBoardCallback" and getattr(callback, "logging_dir", "") is None:
                run = f"{time.strftime('%b%d_%H-%M-%S')}_{socket.gethostname()}-replica{self._part.session.replica}"
                callback.logging_dir = os.path.join(self.args.output_dir, "runs", run)

    def log(self, logs: dict[str, float], *given: Any, **named: Any) -> None:
        """Log the norm and the learning rate of the job's step."""
        session = self._part.session
        if "learning_rate" in logs and session.last_lr:
            logs["learning_rate"] = session.last_lr[0]
        if logs.pop("grad_norm", None) is not None and session.last_norm is not None:
            logs["grad_norm"] = session.last_norm
        super().log(logs, *given, **named)  # type: ignore[misc]

    def evaluate(self, *given: Any, **named: Any) -> dict[str, float]:
        """Evaluate while the others wait, and the average of the weights where there is one."""
        with self._part.evaluates():
            metrics: dict[str, float] = super().evaluate(*given, **named)  # type: ignore[misc]
            return metrics

    def _save_checkpoint(self, *given: Any, **named: Any) -> None:
        part = self._part
        if not part.session.leads:  # the others have the same state, and may have the same disk
            return
        name = f"{transformers.trainer_utils.PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        directory = Path(self.args.output_dir, name)
        # An older one of the same step stays, and a part of a new one would fill the disk, or pass for a whole one.
        undone = _removed_unless_whole(directory) if not directory.exists() else nullcontext()
        errors = (RuntimeError, SafetensorError)  # what torch and safetensors make of the system's
        with part.busy("a checkpoint"), part.saving.of(directory, self.state.global_step, *errors), undone:
            super()._save_checkpoint(*given, **named)  # type: ignore[misc]

    # Each replica is the process of rank 0 to the Trainer. Behind the loop, too, it is the leader that writes. Who came
    # to a job that was finished leads nothing, and writes what is not there.
    def _writes(self, file: str) -> bool:
        session = self._part.session
        late = session.step is None and session.finished and not Path(self.args.output_dir, file).exists()
        if not session._joined or session.leads or late:
            return True
        log.info("replica %d leaves %s to the one that led its last step", session.replica, file)
        return False

    def save_state(self) -> None:
        """Save the Trainer's state; in the loop and behind it on the leader alone."""
        if self._writes("trainer_state.json"):
            super().save_state()  # type: ignore[misc]

    def save_metrics(self, split: str, *given: Any, **named: Any) -> None:
        """Save metrics; in the loop and behind it on the leader alone."""
        if self._writes(f"{split}_results.json"):
            super().save_metrics(split, *given, **named)  # type: ignore[misc]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model; behind the loop all replicas call it, and one of them writes: `Session.final_save()`."""
        session = self._part.session
        if _internal_call or not session._ended:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
            return
        with session.final_save(output_dir or self.args.output_dir) as mine:
            if mine:
                super().save_model(output_dir, _internal_call)  # type: ignore[misc]


class RejoinTrainer(RejoinMixin, transformers.Trainer):  # type: ignore[misc]
    """Hugging Face's Trainer as a replica of a job; `callbacks` has a `RejoinCallback`."""
