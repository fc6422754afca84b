"""Files of which a reader finds the old one or the new one, whole: `rejoin.torch.replacing()`."""

from __future__ import annotations

import errno
import glob
import io
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

from rejoin.errors import Unavailable

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _File(io.FileIO):
    """A file that knows what the system has said no to: torch.save() ends with an error of its own then."""

    failed: OSError | None = None

    def write(self, data: ReadableBuffer, /) -> int:
        """Write them."""
        try:
            return super().write(data)
        except OSError as error:
            self.failed = error
            raise


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Give a file to write, which takes this one's place at the end of the block, on disk as a whole; or not at all.

    What the disk does not take raises an `OSError` with the path, also where torch.save() has made another error of it.
    Who begins later wins: a replica that was stopped in the block, put out, and goes on when another one has written
    since, raises `Unavailable` at the end, and leaves the other's file as it is. Where `path` is a link, it is the file
    that it leads to. Any thread.
    """
    path = Path(os.path.realpath(path) if os.path.islink(path) else os.path.abspath(path))
    new = path.with_name(f"{path.name}.{secrets.token_hex(8)}.new")  # of its own: others may write at the same time
    with _of(path):
        for other in path.parent.glob(f"{glob.escape(path.name)}.{'[0-9a-f]' * 16}.new"):
            other.unlink(missing_ok=True)
        raw = _File(new, "xb")
    file = io.BufferedWriter(raw)
    try:
        try:
            yield file
        except Exception as error:
            if raw.failed is None:
                raise
            raise _naming(path, raw.failed) from error
        with _of(path):
            file.flush()
            sync(file.fileno())
            _rename(new, path)
    finally:
        with suppress(OSError):
            file.close()
        with suppress(OSError):
            new.unlink(missing_ok=True)
    with _of(path):
        _sync_directory(path.parent)


@contextmanager
def _of(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _naming(path, error) from error


def _naming(path: Path, error: OSError) -> OSError:
    return OSError(error.errno, error.strerror, str(path))


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync(directory)
    finally:
        os.close(directory)


def sync(descriptor: int) -> None:
    """Have it on disk."""
    try:
        os.fsync(descriptor)
    except OSError as error:  # some file systems have no such thing
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def _rename(new: Path, path: Path) -> None:
    try:
        new.rename(path)
    except FileNotFoundError as error:
        raise Unavailable(
            f"{path} is not written: another writer has begun since, as when this replica was put out meanwhile, or "
            "where several replicas write it: let the one write it that has step.leads, and each "
            "of its ranks a file of its own"
        ) from error
