"""Checkpoints that can't be written, for which no replica ends: the next ones would, until nobody has the state."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

from rejoin.errors import InvalidArgument, RejoinError, Unavailable
from rejoin.torch._files import replacing, sync

if TYPE_CHECKING:
    from rejoin.torch._ranks import Ranks
    from rejoin.torch._session import Session

log = logging.getLogger("rejoin")

# What torch.save() and safetensors have in the place of the system's error.
_OF_WRITING = re.compile(
    r"PytorchStreamWriter|inline_container|iostream error|file write failed|^write\(\): fd|Parent directory"
    r"|I/?O ?error",
    re.IGNORECASE,
)


def _is_of_writing(error: BaseException | None) -> bool:
    """Whether it was made of an error of the system's: others are bugs, and of no disk."""
    while error is not None:
        if isinstance(error, OSError) or _OF_WRITING.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


class Saving:
    """What has become of the saves of one kind."""

    def __init__(self) -> None:
        self._failed: dict[str, int] = {}  # in a row, by the directory
        self._last: dict[str, int] = {}  # the step of the last one that is written there
        self._compared = False  # the ranks' paths
        self._alone = False  # other ranks do not call save(), or came too late
        self._number = 0  # of saves of several ranks

    @contextmanager
    def of(self, path: str | os.PathLike[str], step: int, *errors: type[Exception]) -> Iterator[None]:
        """Within this block this file is written. Errors of files, and these where they are made of such, end it with a
        line in the log: for the first one in a row, the second, the fourth, and so on."""
        where = os.path.dirname(os.path.abspath(path))
        failed, last = self._failed.get(where, 0), self._last.get(where)
        try:
            yield
        except Exception as error:
            of_session = isinstance(error, RejoinError) and not isinstance(error, Unavailable)
            of_library = isinstance(error, errors) and _is_of_writing(error)
            of_system = isinstance(error, OSError) and error.errno is not None  # no alarm's TimeoutError
            if of_session or not (of_library or of_system or isinstance(error, Unavailable)):
                raise
            failed += 1
            self._failed[where] = failed
            if failed & (failed - 1) == 0:
                log.error(
                    "the checkpoint of step %d is not written to %s, and training goes on (%d in a row that were not; "
                    "the last one that this process has written there: %s): %s: %s. If all replicas are lost, so are "
                    "the steps since the last checkpoint: make room, or mend the path",
                    step,
                    os.fspath(path),
                    failed,
                    "none" if last is None else f"of step {last}",
                    type(error).__name__,
                    error,
                )
            return
        if failed:
            log.warning("the checkpoint of step %d is written to %s, after %d that were not",
                        step, os.fspath(path), failed)  # fmt: skip
        self._failed[where], self._last[where] = 0, step

    def compare(self, ranks: Ranks, path: str | os.PathLike[str]) -> None:
        """Raise on all ranks of this replica where two of them give the same path, at the first call; wait for them."""
        if self._compared:
            return
        self._compared = True
        try:
            paths = ranks.gather("path of save()", os.fsencode(os.path.realpath(path)))
        except (Unavailable, torch.distributed.DistError) as error:  # a rank that writes none; or it comes late
            log.warning("%s. This one writes %s all the same: let all ranks call save()", error, os.fspath(path))
            self._alone = True
            return
        if len(set(paths)) < len(paths):
            same = [str(rank) for rank, other in enumerate(paths) if paths.count(other) > 1]
            raise InvalidArgument(
                f"save('{os.fspath(path)}') on rank {ranks.rank}: ranks {', '.join(same)} of this replica give the "
                "same path as another one, and each writes its own part of the state: let each give a path of its own, "
                f"such as '{os.fspath(path)}.rank{ranks.rank}', and load that one"
            )

    @contextmanager
    def on_all(self, ranks: Ranks) -> Iterator[Callable[[], None]]:
        """Within this block this rank's file is written; what it gives is called when it is, and raises `Unavailable`
        where another rank's is not: files of several steps are no checkpoint."""
        name, told = f"save {self._number} is written", False
        self._number += 1

        def is_written() -> None:
            nonlocal told
            ranks.say(name, b"1")
            told = True
            try:
                others = ranks.told(name) if not self._alone else []
            except Unavailable as error:
                log.warning("%s. This one puts its file in place all the same", error)
                return
            if b"0" in others:
                raise Unavailable(f"rank {others.index(b'0')} of this replica has not written its file, and says why")

        try:
            yield is_written
        finally:
            if not told:
                ranks.say(name, b"0")


def save(session: Session, path: str | os.PathLike[str]) -> bool:
    """Write the state as `Session.save()` says."""
    if not session.leads:
        return False
    trains = session._joined and not session._ended
    with session.busy("a checkpoint") if trains else nullcontext():
        ranks = session._ranks if trains and session._ranks is not None and session._ranks.several else None
        if ranks is not None:
            session._saving.compare(ranks, path)
        state, step = session.state_dict(), session.committed
        with session._saving.of(path, step):
            on_all = session._saving.on_all(ranks) if ranks is not None else nullcontext()
            with on_all as is_written, replacing(path) as file:
                torch.save(state, file)
                if is_written is not None:
                    file.flush()
                    sync(file.fileno())
                    is_written()
            return True
    return False
