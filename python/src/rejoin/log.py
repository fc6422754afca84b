"""The library's log lines as Python's: they go to standard error, until `to_logging()` is called."""

from __future__ import annotations

import logging
import os
import sys
import threading

from rejoin import _native

_LEVELS = (logging.DEBUG, logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR)
_lock = threading.Lock()
_pipe: int | None = None  # the end that the library writes to, once there is one


def to_logging(logger: logging.Logger | None = None) -> None:
    """Hand the library's lines to this logger from now on; by default to the one that is named "rejoin".

    A thread of its own does it, so that the library never waits for Python; a line that comes while 64 KiB of them
    are unread is left out. Lines of less weight than the logger's level are not made. Once in a process.
    """
    global _pipe
    target = logger or logging.getLogger("rejoin")
    with _lock:
        if _pipe is not None:
            raise RuntimeError("the library's lines go to logging already")
        reading, _pipe = os.pipe()
        os.set_blocking(_pipe, False)
        threading.Thread(target=_read, args=(reading, target), name="rejoin log", daemon=True).start()
        set_level(target.getEffectiveLevel())
        _native.log_to(_pipe)


def set_level(level: int) -> None:
    """Leave out the library's lines of less weight than this level of `logging`."""
    if level > logging.ERROR:
        _native.set_log_level(5)
    elif level < logging.DEBUG:
        _native.set_log_level(0)
    else:
        _native.set_log_level(next(i for i, own in enumerate(_LEVELS) if i > 0 and own >= level))


def _read(reading: int, logger: logging.Logger) -> None:
    with os.fdopen(reading, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                logger.log(_LEVELS[min(int(line[0]), 4)], "%s", line[1:].rstrip("\n"))
            except Exception:  # of somebody's filter or handler: the next line may be taken
                sys.excepthook(*sys.exc_info())
