"""A process of rejoin-run's, which is started again when it has ended."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

_PR_SET_PDEATHSIG = 1

WAITED_FOR = frozenset({signal.SIGCHLD, signal.SIGTERM, signal.SIGINT})


# In a group of its own: Ctrl-C at a terminal is for rejoin-run, which ends replicas before their daemons.
def _before_program() -> None:
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WAITED_FOR)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill it, with what it has started. It has not been waited for: its number is nobody else's."""
    os.killpg(process.pid, signal.SIGKILL)


def how(status: int) -> str:
    """Say how a process has ended."""
    if status >= 0:
        return f"status {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:  # most real-time signals have no name
        return f"signal {-status}"


@dataclass
class Kept:
    """A process, and what to start it with."""

    name: str
    command: list[str]
    environment: dict[str, str]
    output: Path | None  # none: this program's own
    starts: int = 0
    process: subprocess.Popen[bytes] | None = None
    ended: bool = False  # for good
    again_at: float = 0.0
    died: list[float] = field(default_factory=list)

    def start(self) -> None:
        """Start it. Raises what `subprocess.Popen` does."""
        self.starts += 1
        target = self.output.open("ab") if self.output else None
        try:
            self.process = subprocess.Popen(
                self.command,
                env=self.environment,
                stdout=target,
                stderr=subprocess.STDOUT if target else None,
                preexec_fn=_before_program,
            )
        finally:
            if target:
                target.close()
