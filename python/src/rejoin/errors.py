"""What calls raise: one class for each code of the library, all of them a `RejoinError`.

After `Cancelled` this replica is out of the job: let the process end, and start it again. After `InvalidArgument`
starting it again unchanged does not help, and after `Mismatch` and `Refused` only where others have been changed; the
text says what does.
"""

from __future__ import annotations

from rejoin import _native


class RejoinError(Exception):
    """A call failed; its text names the thing, the value and the remedy."""

    code = 0


class InvalidArgument(RejoinError):
    """The caller or the user gave something unusable, or the call is not due."""

    code = 1


class NotFound(RejoinError):
    """What was named does not exist."""

    code = 2


class Mismatch(RejoinError):
    """Two parties disagree: version, plan, key, state."""

    code = 3


class Refused(RejoinError):
    """The job said no, and why."""

    code = 4


class Unavailable(RejoinError):
    """The peer, the daemon or the device is not there, or no longer."""

    code = 5


class DeadlinePassed(RejoinError, TimeoutError):
    """A deadline passed."""

    code = 6


class Cancelled(RejoinError):
    """This replica is out, or was interrupted: end the process, start it again, and it catches up."""

    code = 7


class Exhausted(RejoinError):
    """A bound was reached: memory, disk, descriptors."""

    code = 8


class SystemFailure(RejoinError, OSError):
    """The operating system said no."""

    code = 9


class Unreachable(RejoinError):
    """A device can't get at this memory; another may."""

    code = 10


class Corrupt(RejoinError):
    """Bytes that cannot be what they claim to be."""

    code = 11


_CODES: dict[int, type[RejoinError]] = {
    kind.code: kind
    for kind in (
        InvalidArgument,
        NotFound,
        Mismatch,
        Refused,
        Unavailable,
        DeadlinePassed,
        Cancelled,
        Exhausted,
        SystemFailure,
        Unreachable,
        Corrupt,
    )
}


# Of Cancelled, as the coordinator says it.
_HANGS = "it hangs: its processes are heard, wait for nobody and do not go on"
# Of Refused, where it is this process that has the place: the program's words, for a caller in Python.
_OF_THIS_PROCESS = "close that session first"


def _make(code: int, message: str) -> RejoinError:
    if _HANGS in message:
        message += ". What takes long goes into session.busy(), as an evaluation does: the others wait for it then"
    message = message.replace(_OF_THIS_PROCESS, "call leave() of that session first")
    return _CODES.get(code, RejoinError)(message)


_native.set_error(_make)
