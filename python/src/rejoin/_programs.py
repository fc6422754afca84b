"""The programs that come with the package, as console scripts."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn


def path(name: str) -> str:
    """Where the package has this program: `rejoind` or `rejoin`."""
    return str(Path(__file__).parent / "bin" / name)


def _become(name: str) -> NoReturn:
    program = path(name)
    os.execv(program, [name, *sys.argv[1:]])


def rejoin() -> NoReturn:
    """Run `rejoin`."""
    _become("rejoin")


def rejoind() -> NoReturn:
    """Run `rejoind`."""
    _become("rejoind")
