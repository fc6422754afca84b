"""The save at a job's end, which is made also where the replica that makes it dies: `Session.final_save()`."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
        self._file = os.open(path.with_name(f"{path.name}.saved"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def comes(self) -> bool:
        """Wait for it; false where another replica has written meanwhile, or is left to after SIGTERM."""
        since, told = time.monotonic(), False
        while True:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in _TAKEN:
                    log.warning("%s: its file system has no locks (%s): if the leader dies while it writes, nobody "
                                "writes it", self._path, error.strerror)  # fmt: skip
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
        os.pwrite(self._file, self._line, 0)
        os.fsync(self._file)

    def end(self) -> None:
        """Let the next one go on."""
        os.close(self._file)


@contextmanager
def final_save(session: Session, path: str | os.PathLike[str]) -> Iterator[bool]:
    """Let one replica write, and the others wait for it: `Session.final_save()`."""
    path = Path(path)
    if session._step is None or session.version is None or session._ranks is None:
        log.warning("replica %d has not the job's last state, and leaves %s to those that have", session.replica, path)
        yield False
        return
    if not session.finished and not session.leads:  # it left before: after SIGTERM, or with a break
        yield False
        return
    ranks = session._ranks
    name = f"final {session._saves}"
    session._saves += 1
    turn = _Turn(session, path) if ranks.rank == 0 else None
    try:
        mine = ranks.first_says(name, turn.comes if turn is not None else None)
        yield mine
        if mine:
            ranks.gather(f"{name} is written", b"", patient=True)
            if turn is not None:
                turn.written()
    finally:
        if turn is not None:
            turn.end()
