"""Rejoin for Python: training goes on when a replica is lost, and the replica comes back without a pause.

`rejoin.torch` is what a PyTorch script needs. This module has what does not depend on any framework: the errors, the
settings that a launcher's variables give, and `rejoin._native.Session`, the C++ session with addresses for memory.
"""

try:
    from rejoin._native import position_step, version
except ImportError as missing:  # what it says names a file of the package's, and no remedy
    raise ImportError(
        f"{missing}: the package's own library can't be loaded. Where a file of the package is missing, or is of "
        "another Python, install it again: pip install --force-reinstall ./python, in a checkout",
        name=missing.name,
        path=missing.path,
    ) from missing
from rejoin.errors import (
    Cancelled,
    Corrupt,
    DeadlinePassed,
    Exhausted,
    InvalidArgument,
    Mismatch,
    NotFound,
    Refused,
    RejoinError,
    SystemFailure,
    Unavailable,
    Unreachable,
)
from rejoin.launch import Place, place_from_environment

__version__ = version()
__all__ = [
    "Cancelled",
    "Corrupt",
    "DeadlinePassed",
    "Exhausted",
    "InvalidArgument",
    "Mismatch",
    "NotFound",
    "Place",
    "Refused",
    "RejoinError",
    "SystemFailure",
    "Unavailable",
    "Unreachable",
    "place_from_environment",
    "position_step",
    "version",
]
