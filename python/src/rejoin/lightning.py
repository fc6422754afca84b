"""Rejoin under PyTorch Lightning.

    session = rejoin.torch.Session.from_environment()
    loader = DataLoader(data, batch_sampler=session.batches(len(data)))
    trainer = Trainer(max_steps=1000, callbacks=[RejoinCallback(session)], gradient_clip_val=1.0, …)
    trainer.fit(module, session.data(loader, steps=1000))

The Trainer's `max_steps` is the job's `--steps`. Its `gradient_clip_val` is the limit of the mean gradient's norm, and
its scheduler gives the job's learning rates.
"""

from __future__ import annotations

import logging
import os
import signal
from contextlib import AbstractContextManager
from typing import Any

from rejoin.errors import InvalidArgument
from rejoin.torch._feed import Feed
from rejoin.torch._frameworks import Part
from rejoin.torch._session import Session

try:
    try:
        import lightning.pytorch as pl
    except ModuleNotFoundError as error:
        if error.name not in ("lightning", "lightning.pytorch"):
            raise
        import pytorch_lightning as pl
except ModuleNotFoundError as error:
    if error.name != "pytorch_lightning":
        raise
    raise ModuleNotFoundError(
        "rejoin.lightning is for PyTorch Lightning, and there is none in this environment: pip install lightning",
        name="lightning",
    ) from error

log = logging.getLogger("rejoin")

# They write averages into the weights by way of .data, and keep them on one replica.
_AVERAGING = ("WeightAveraging", "EMAWeightAveraging", "StochasticWeightAveraging")


class RejoinCallback(pl.Callback):  # type: ignore[misc]  # it has types of its own where it is there
    """Attach a module and its optimizer to a session, and let the Trainer's counters be the job's.

    With automatic optimization, or one `step()` of one optimizer in each `training_step()`. Validations run in
    `session.busy()`, and of the average of the weights where `ema=` is given.
    """

    def __init__(
        self,
        session: Session,
        *,
        checkpoint: str | os.PathLike[str] | None = None,
        every_n_steps: int = 1000,
        **settings: Any,
    ) -> None:
        """`checkpoint`: a file that the leader writes every so many steps, and that the job goes on from.

        `settings`: those of `Session.attach()`. Without `max_norm` it is the Trainer's `gradient_clip_val`, and without
        `lr` what its scheduler says.
        """
        self.part = Part(session, checkpoint, settings)
        self._every = every_n_steps
        self._max_norm: float | None = None
        self._evaluation: AbstractContextManager[None] | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Look at what the Trainer is to do, before it begins."""
        if stage != "fit":
            return
        for callback in trainer.callbacks:
            if any(kind.__name__ in _AVERAGING for kind in type(callback).__mro__):
                raise InvalidArgument(
                    f"{type(callback).__name__} lays averages into the weights, which a replica that comes back would "
                    "read, and begins anew there: leave it out, and give RejoinCallback ema=, such as 0.999"
                )
        if trainer.checkpoint_callbacks:
            log.warning(
                "each replica writes what ModelCheckpoint does: give it a directory of the replica's own, or the "
                "Trainer enable_checkpointing=False. What a job goes on from is RejoinCallback's checkpoint="
            )
        if trainer.gradient_clip_val is not None:
            if str(getattr(trainer, "gradient_clip_algorithm", None) or "norm").rpartition(".")[2].lower() != "norm":
                raise InvalidArgument("gradient_clip_algorithm='value': the mean gradient is clipped by its norm alone")
            self._max_norm, trainer.gradient_clip_val = trainer.gradient_clip_val, None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach; the first step joins."""
        feed = trainer.train_dataloader
        if not isinstance(feed, Feed):
            raise InvalidArgument(
                f"fit() was given a {type(feed).__name__}, of which each replica would train all: give it "
                "session.data(loader, steps=…), of a DataLoader with batch_sampler=session.batches(len(data))"
            )
        if feed.micro_batches != trainer.accumulate_grad_batches and pl_module.automatic_optimization:
            raise InvalidArgument(
                f"accumulate_grad_batches={trainer.accumulate_grad_batches}: give session.data() "
                f"micro_batches={trainer.accumulate_grad_batches}, by which it divides a step's data"
            )
        if trainer.global_step > 0:
            raise InvalidArgument(
                "fit(ckpt_path=…): a checkpoint of Lightning's does not say where the job stands. Give RejoinCallback "
                "checkpoint=, a file that is written every so many steps and loaded if it is there"
            )
        if "DDP" in type(trainer.strategy).__name__:
            raise InvalidArgument("a Trainer of several devices: each process is a replica, with devices=1")
        if len(trainer.optimizers) != 1:
            raise InvalidArgument(f"{len(trainer.optimizers)} optimizers: a session has one, with groups if need be")
        self.part.feed = feed
        scheduler = self._scheduler_of(trainer, pl_module)
        self.part.attach(pl_module, trainer.optimizers[0], scheduler, self._max_norm)
        self._let_session_hear_sigterm(trainer)

    def _scheduler_of(self, trainer: Any, pl_module: Any) -> Any:
        configs = trainer.lr_scheduler_configs
        if not configs or self.part.has_rates:
            return None
        if len(configs) > 1:
            raise InvalidArgument(
                f"{len(configs)} schedulers: give RejoinCallback lr=, a function of the step's number"
            )
        one = configs[0]
        if pl_module.automatic_optimization and (one.interval != "step" or one.frequency != 1):
            raise InvalidArgument(
                f"a scheduler with the interval '{one.interval}' and the frequency {one.frequency}, and a job's rates "
                "are those of its steps: let configure_optimizers() return {'scheduler': …, 'interval': 'step'} with a "
                "function of the step's number, or give RejoinCallback lr="
            )
        return one.scheduler

    # Lightning's handler ends the process with an error behind a batch, and no wait: the session's leaves in order.
    @staticmethod
    def _let_session_hear_sigterm(trainer: Any) -> None:
        handler = signal.getsignal(signal.SIGTERM)
        if type(handler).__module__.partition(".")[0] not in ("lightning", "pytorch_lightning"):
            return
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if trainer.received_sigterm:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Bring the Trainer's counters, which begin with 0 on a replica that has come back, to the job's step."""
        session, feed, loop = self.part.session, self.part.feed, trainer.fit_loop.epoch_loop
        step = session.step
        if step is None or feed is None:
            return
        before, batches = step.number - 1, loop.batch_progress
        for total in (
            loop.automatic_optimization.optim_progress.optimizer.step.total,
            loop.manual_optimization.optim_step_progress.total,
        ):
            total.ready = total.completed = before
        missed = before - (batches.total.ready - 1) // feed.micro_batches
        for progress in (batches.total, batches.current) if missed > 0 else ():
            for name in ("ready", "started", "processed", "completed"):
                setattr(progress, name, getattr(progress, name) + missed * feed.micro_batches)
        loop._batches_that_stepped = before  # the loggers' step
        if session._rules.lr is not None:  # what a LearningRateMonitor behind this callback reads
            for group, rate in zip(trainer.optimizers[0].param_groups, self._rates(step.number), strict=True):
                group["lr"] = rate

    def _rates(self, step: int) -> list[float]:
        assert self.part.session._updates is not None and self.part.session._updates._rates is not None
        return self.part.session._updates._rates.of(step)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Write the session's checkpoint."""
        step = self.part.session.step
        if step is not None and step.number % self._every == 0 and self.part.session._updated:
            self.part.save()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Let the others wait."""
        self._evaluation = self.part.evaluates()
        self._evaluation.__enter__()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Go on."""
        if self._evaluation is not None:
            self._evaluation.__exit__(None, None, None)
            self._evaluation = None

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End what a validation has begun, which may have raised, and let nobody wait for a first step that has."""
        self.on_validation_end(trainer, pl_module)
        self.part.session._busy.end_step(trained=False)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """End the loop where the job has ended, or this replica is to leave."""
        trainer.should_stop = trainer.should_stop or self.part.ended

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Take the job's end."""
        self.part.end()
