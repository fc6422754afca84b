"""What the callbacks for frameworks have in common: how a session goes along with a loop that is not its own."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from rejoin.errors import InvalidArgument
from rejoin.torch._feed import Feed
from rejoin.torch._rates import Schedule
from rejoin.torch._saving import Saving
from rejoin.torch._session import Session

log = logging.getLogger("rejoin")


def schedule_of(scheduler: Any) -> Schedule | None:
    """Give the function of the step that a scheduler of torch's is, for `attach(lr=)`; None where there is none."""
    if scheduler is None:
        return None
    if not isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):
        raise InvalidArgument(
            f"{type(scheduler).__name__} does not say what the rate of a step is, which a replica that catches up has "
            "to know of steps before: take a LambdaLR, as transformers' get_cosine_schedule_with_warmup() and the like "
            "give it, or give the RejoinCallback lr=, a function of the step, from 1"
        )
    bases = [float(base) for base in scheduler.base_lrs]
    factors = list(scheduler.lr_lambdas)
    return lambda step: [base * factor(step - 1) for base, factor in zip(bases, factors, strict=True)]


class Part:
    """A session in a framework's loop, and what its callback was told about it."""

    def __init__(self, session: Session, checkpoint: str | os.PathLike[str] | None, settings: dict[str, Any]) -> None:
        self.session = session
        self.feed: Feed | None = None
        self.saving = Saving()  # of the framework's own checkpoints
        self._checkpoint = Path(checkpoint) if checkpoint is not None else None
        self._settings = settings  # of attach()

    @property
    def has_rates(self) -> bool:
        """Whether the settings have learning rates, so that no scheduler is asked for them."""
        return "lr" in self._settings

    def attach(self, model: Any, optimizer: Any, scheduler: Any, max_norm: float | None) -> None:
        """Attach them, restore the checkpoint if there is one, and give this replica random numbers of its own."""
        settings = dict(self._settings)
        settings.setdefault("max_norm", max_norm if max_norm else None)
        if not self.has_rates:
            settings["lr"] = schedule_of(getattr(scheduler, "scheduler", scheduler))
        self.session.attach(model, getattr(optimizer, "optimizer", optimizer), **settings)
        if self._checkpoint is not None and self._checkpoint.exists():
            self.session.load_state_dict(torch.load(self._checkpoint, map_location="cpu", weights_only=True))
        torch.manual_seed((torch.initial_seed() + self.session.replica) % (1 << 63))

    def save(self) -> None:
        """Write the checkpoint, on the replica that leads, between steps."""
        if self._checkpoint is not None:
            self.session.save(self._checkpoint)

    def busy(self, reason: str) -> AbstractContextManager[None]:
        """Let the others wait within this block, where they do."""
        takes_part = self.session._joined and not self.session._ended
        return self.session.busy(reason) if takes_part else nullcontext()

    @contextmanager
    def evaluates(self) -> Iterator[None]:
        """Let the others wait within this block, and the model be the average of its weights where there is one."""
        session = self.session
        averages = session._joined and not session._ended and session._rules.ema is not None
        if averages and not session._updated:
            averages = False
            log.warning("this evaluation is within a step, and of the weights: their average is there between steps")
        with self.busy("an evaluation"), self.session.averaged() if averages else nullcontext():
            yield

    @property
    def ended(self) -> bool:
        """Whether no data comes any more, so that the loop is to end."""
        return self.feed is not None and self.feed.ended

    def end(self) -> None:
        """End the replica's part, where the loop has ended."""
        if self.feed is not None:
            self.feed.end()
