"""Command lines: rejoin-run's own, and torchrun's, by which it starts several ranks of a replica."""

from __future__ import annotations

import argparse
import codecs
import contextlib
import io
import re
import sys
from pathlib import Path

from rejoin import _native


def by_torchrun(ranks: int, command: list[str]) -> list[str]:
    """Give torchrun's own way to run a script, by way of a program that ends with it."""
    if re.fullmatch(r"python[0-9.]*", Path(command[0]).name):
        command = [command[0], "-u", *command[1:]]
    worker = str(Path(__file__).with_name("_torchrun_worker.py"))
    # The shell becomes torchrun: its workers are told which process they are to end with.
    return ["sh", "-c", '_TORCHRUN=$$ exec "$@"', "sh", sys.executable, "-m", "torch.distributed.run", "--standalone",
            "--nproc-per-node", str(ranks), worker, *command]  # fmt: skip


def _as_it_is(error: UnicodeError) -> tuple[str | bytes, int]:
    assert isinstance(error, UnicodeEncodeError)
    one = error.object[error.start]
    byte = ord(one) - 0xDC00  # as Python keeps those that are no text
    return (bytes([byte]) if 0x80 <= byte <= 0xFF else ascii(one)[1:-1]), error.start + 1


def show_names_as_they_are() -> None:
    """Let names of files, and what logs have, be shown with the bytes that they have, also where those are no text."""
    codecs.register_error("rejoin-run", _as_it_is)
    if isinstance(sys.stderr, io.TextIOWrapper):
        with contextlib.suppress(OSError):  # it was a file when it was opened, and is none now: they are shown escaped
            sys.stderr.reconfigure(errors="rejoin-run")


def run_parser() -> argparse.ArgumentParser:
    """Give the parser of rejoin-run's command line."""
    parser = argparse.ArgumentParser(
        prog="rejoin-run",
        description="A whole job on this machine: the coordinator, and for each replica a daemon and your script. "
        "What dies is started again, until the job is finished.",
    )
    parser.add_argument("--version", action="version", version=f"rejoin {_native.version()}")
    parser.add_argument("--replicas", type=int, default=2, help="replicas of the job (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=1, help="ranks of a replica, by torchrun (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="samples of a replica in a step (default: %(default)s)")
    parser.add_argument(
        "--constant-batch", action="store_true", help="replicas × batch samples in each step, however few contribute"
    )
    parser.add_argument(
        "--balance-batches", action="store_true", help="replicas that are slower than others train fewer samples"
    )
    parser.add_argument("--steps", type=int, default=0, help="steps of the job; 0: no end (default: %(default)s)")
    parser.add_argument("--silence-ms", type=int, default=2000, help="how long a peer may be silent (default: 2000)")
    parser.add_argument(
        "--leave-within", type=float, default=60.0, metavar="SECONDS",
        help="after a signal: a replica that has not left by then is killed, as at a second signal (default: 60)",
    )  # fmt: skip
    parser.add_argument("--directory", type=Path, help="for sockets and logs, kept afterwards (default: a fresh one)")
    parser.add_argument("--show", action="store_true", help="replicas write to this terminal, not into logs")
    parser.add_argument(
        "--deaths-a-minute",
        type=int,
        default=10,
        help="of one process, before the job is given up; or as many before its first step (default: 10)",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="your script, after --: python train.py …")
    return parser
