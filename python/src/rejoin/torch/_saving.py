"""Checkpoints that can't be written, for which no replica ends: the next ones would, until nobody has the state."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

from rejoin.errors import RejoinError, Unavailable
from rejoin.torch._files import replacing

if TYPE_CHECKING:
    from rejoin.torch._session import Session

log = logging.getLogger("rejoin")


class Saving:
    """What has become of the saves of one kind."""

    def __init__(self) -> None:
        self._failed = 0  # in a row
        self._last: int | None = None  # the step of the last one that is written

    @contextmanager
    def of(self, path: str | os.PathLike[str], step: int, *errors: type[Exception]) -> Iterator[None]:
        """Within this block this file is written. Errors of files, and these, end it with a line in the log: for the
        first one in a row, the second, the fourth, and so on."""
        try:
            yield
        except Exception as error:
            of_session = isinstance(error, RejoinError) and not isinstance(error, Unavailable)
            if of_session or not isinstance(error, (OSError, Unavailable, *errors)):
                raise
            self._failed += 1
            if self._failed & (self._failed - 1) == 0:
                log.error(
                    "the checkpoint of step %d is not written to %s, and training goes on (%d in a row that were not; "
                    "the last one that this process has written: %s): %s: %s. If all replicas are lost, so are the "
                    "steps since the last checkpoint: make room, or mend the path",
                    step,
                    os.fspath(path),
                    self._failed,
                    "none" if self._last is None else f"of step {self._last}",
                    type(error).__name__,
                    error,
                )
            return
        if self._failed:
            log.warning("the checkpoint of step %d is written to %s, after %d that were not",
                        step, os.fspath(path), self._failed)  # fmt: skip
        self._failed, self._last = 0, step


def save(session: Session, path: str | os.PathLike[str]) -> bool:
    """Write the state as `Session.save()` says."""
    if not session.leads:
        return False
    with session.busy("a checkpoint") if session._joined and not session._ended else nullcontext():
        state, step = session.state_dict(), session.committed
        with session._saving.of(path, step):
            with replacing(path) as file:
                torch.save(state, file)
            return True
    return False
