"""How rejoin-run starts several ranks of a replica: torchrun's command line."""

from __future__ import annotations

import sys
from pathlib import Path


def by_torchrun(ranks: int, command: list[str]) -> list[str]:
    """Give torchrun's own way to run a script, by way of a program that ends with it."""
    if "python" in Path(command[0]).name:
        command = [sys.executable, "-u", *command[1:]]
    worker = str(Path(__file__).with_name("_torchrun_worker.py"))
    # The shell becomes torchrun: its workers are told which process they are to end with.
    return ["sh", "-c", '_TORCHRUN=$$ exec "$@"', "sh", sys.executable, "-m", "torch.distributed.run", "--standalone",
            "--nproc-per-node", str(ranks), worker, *command]  # fmt: skip
