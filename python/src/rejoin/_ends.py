"""How processes end."""

from __future__ import annotations

import signal


def how(status: int) -> str:
    """Say how a process has ended."""
    if status >= 0:
        return f"status {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:  # most real-time signals have no name
        return f"signal {-status}"
