"""How rejoin-run starts a job's programs: torchrun's command line, and the daemons' environment."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path


def by_torchrun(ranks: int, command: list[str]) -> list[str]:
    """Give torchrun's own way to run a script, by way of a program that ends with it."""
    if "python" in Path(command[0]).name:
        command = [sys.executable, "-u", *command[1:]]
    worker = str(Path(__file__).with_name("_torchrun_worker.py"))
    # The shell becomes torchrun: its workers are told which process they are to end with.
    return ["sh", "-c", '_TORCHRUN=$$ exec "$@"', "sh", sys.executable, "-m", "torch.distributed.run", "--standalone",
            "--nproc-per-node", str(ranks), worker, *command]  # fmt: skip


def of_daemons(environment: Mapping[str, str]) -> dict[str, str]:
    """Give the variables for a job's daemons: no two can have one socket or port, nor a role that one gives to all."""
    variables = dict(environment)
    for name in ("SOCKET", "COORDINATOR", "COORDINATOR_ROLE", "RELAY", "ADDRESS_FILE"):
        variables.pop(f"REJOIN_{name}", None)
    if not variables.get("REJOIN_STATUS", "").endswith(":0"):  # a port that is free
        variables.pop("REJOIN_STATUS", None)
    return variables
