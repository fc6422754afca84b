"""Files of which a reader finds the old one or the new one, whole: `rejoin.torch.replacing()`."""

from __future__ import annotations

import errno
import glob
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from rejoin.errors import Unavailable


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Give a file to write, which takes this one's place at the end of the block, on disk as a whole; or not at all.

    Who begins later wins: a replica that was stopped in the block, put out, and goes on when another one has written
    since, raises `Unavailable` at the end, and leaves the other's file as it is. Any thread.
    """
    path = Path(path)
    new = path.with_name(f"{path.name}.{secrets.token_hex(8)}.new")  # of its own: others may write at the same time
    for other in path.parent.glob(f"{glob.escape(path.name)}.{'[0-9a-f]' * 16}.new"):
        other.unlink(missing_ok=True)
    with new.open("xb") as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            _rename(new, path)
        finally:
            with suppress(OSError):
                new.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    except OSError as error:  # some file systems have no such thing
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(directory)


def _rename(new: Path, path: Path) -> None:
    try:
        new.rename(path)
    except FileNotFoundError as error:
        raise Unavailable(
            f"{path} is not written: another writer has begun since, as when this replica was put out meanwhile"
        ) from error
