"""What is done before a session joins, and leaves no trace: a model that is compiled when it is first called."""

from __future__ import annotations

import logging
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from rejoin.errors import InvalidArgument
from rejoin.torch._leaving import kept_back
from rejoin.torch._loop import zero_grad
from rejoin.torch._sharding import gather_again

if TYPE_CHECKING:
    from rejoin.torch._session import Session

log = logging.getLogger("rejoin")


# As a shell takes it.
def _cache_of_compiler() -> str:
    try:
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        return shlex.quote(str(cache_dir()))
    except (ImportError, OSError):  # older releases of torch have it elsewhere
        return f'"${{TORCHINDUCTOR_CACHE_DIR:-{tempfile.gettempdir()}/torchinductor_$USER}}"'


@contextmanager
def warmed_up(session: Session) -> Iterator[None]:
    """Leave no trace of what is done within this block: `Session.warm_up()`."""
    if session._model is None or session._joined:
        raise InvalidArgument("warm_up() comes after attach() and before join()")
    before = [(buffer, buffer.clone()) for buffer in session._model.buffers()]
    devices = [session.device] if session.device.type == "cuda" else []
    session._warming = True
    try:
        with kept_back("warm_up()"), torch.random.fork_rng(devices=devices):  # a compiler's files are written there
            yield
    except Exception as error:
        if "file too short" in str(error):
            log.error(
                "a file in the compiler's cache is cut off, as by a process that was killed while it compiled, and "
                "ends each start: find %s -name '*.so' -size -64c -delete, or remove the cache",
                _cache_of_compiler(),
            )
        raise
    finally:
        session._warming = False
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)
        zero_grad(session)
        gather_again(session._sharded)
