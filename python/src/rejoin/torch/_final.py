"""The save at a job's end, which is made also where the replica that makes it dies: `Session.final_save()`."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rejoin.errors import Unavailable

if TYPE_CHECKING:
    from rejoin.torch._ranks import Ranks
    from rejoin.torch._session import Session

log = logging.getLogger("rejoin")

_LOOKS_EVERY_SECONDS = 0.05
_TELLS_AFTER_SECONDS = 60.0
_TAKEN = (errno.EACCES, errno.EAGAIN)


class _Turn:
    """Whose turn it is to write a file: who has the lock of the file beside it, which says what has been written.

    The system takes the lock of a process that has died away, and a child of fork() does not get it.
    """

    def __init__(self, session: Session, path: Path) -> None:
        self._session, self._path = session, path
        self._line = f"step={session.committed} digest={session.state_digest():016x}\n".encode()
        self._file: int | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path.with_name(f"{path.name}.saved"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            self._has_none(error)

    def _has_none(self, error: OSError) -> None:
        log.warning("%s: there is no lock beside it (%s): if the leader dies while it writes, nobody writes it",
                    self._path, error.strerror)  # fmt: skip

    def comes(self) -> bool:
        """Wait for it; false where another replica has written meanwhile, or is left to after SIGTERM."""
        since, told = time.monotonic(), False
        if self._file is None:
            return self._session.leads
        while True:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in _TAKEN:
                    self._has_none(error)
                    return self._session.leads
            if self._session._leaving.is_set():
                log.warning("SIGTERM: another replica writes %s, and is not waited for", self._path)
                return False
            if not told and time.monotonic() - since > _TELLS_AFTER_SECONDS:
                told = True
                log.warning("this replica waits for another one, which writes %s", self._path)
            time.sleep(_LOOKS_EVERY_SECONDS)
        # A line from before this session began is another job's, which has come to the same state.
        if os.pread(self._file, 4096, 0) == self._line and os.fstat(self._file).st_mtime >= self._session._since:
            return False
        os.ftruncate(self._file, 0)
        return True

    def written(self) -> None:
        """Say so to those who wait."""
        if self._file is None:
            return
        try:
            os.pwrite(self._file, self._line, 0)
            os.fsync(self._file)
        except OSError as error:
            log.warning("%s is written, and there was no room to say so beside it (%s): others may write it again",
                        self._path, error.strerror)  # fmt: skip

    def end(self) -> None:
        """Let the next one go on."""
        if self._file is not None:
            os.close(self._file)


# It has trained it; or it has come, on all of its ranks, to a finished job with a checkpoint of its last step.
def _has_last_state(session: Session, ranks: Ranks) -> bool:
    if session._step is not None:
        return True
    if not session.finished:
        return False
    mine = 0 < session.committed == session.version
    return b"0" not in ranks.gather(f"final {session._saves} has its state", b"1" if mine else b"0", patient=True)


@contextmanager
def final_save(session: Session, path: str | os.PathLike[str]) -> Iterator[bool]:
    """Let one replica write, and the others wait for it: `Session.final_save()`."""
    path = Path(path)
    ranks = session._ranks
    if threading.current_thread() is threading.main_thread():
        session._leaving.listen()  # Lightning puts back who heard SIGTERM before its fit()
    if session.version is None or ranks is None or not _has_last_state(session, ranks):
        log.warning("replica %d has not the job's last state, and leaves %s to those that have", session.replica, path)
        yield False
        return
    # It left before: after SIGTERM, or with a break.
    early = not session.finished and not session.leads
    name = f"final {session._saves}"
    session._saves += 1
    turn = _Turn(session, path) if ranks.rank == 0 and not early else None
    comes = turn.comes if turn is not None else (lambda: False) if ranks.rank == 0 else None
    written = False
    try:
        mine = ranks.first_says(name, comes, f"whether it writes {path}, or another replica does, which it waits for,")
        try:
            yield mine
            written = mine
        finally:
            if mine and not written:
                ranks.say(f"{name} is written", b"0")
        if not mine:
            return ranks.leave_together(f"{name} is over")
        if b"0" in ranks.gather(f"{name} is written", b"1", patient=True):
            raise Unavailable(f"{path} is not written: another rank's block has failed")
        if turn is not None:
            turn.written()
    finally:
        if turn is not None:
            turn.end()
