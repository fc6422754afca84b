"""The daemon of this machine, where nobody else starts one: the trainer of local rank 0 does, and it ends with that."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import time
from collections.abc import Mapping

from rejoin._programs import path
from rejoin.errors import InvalidArgument, Unavailable
from rejoin.launch import Place, local_rank

_STARTS_WITHIN_SECONDS = 60.0
_running: list[subprocess.Popen[bytes]] = []  # they end when this process has ended


def _answers(name: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        try:
            probe.connect("\0" + name.removeprefix("@"))
        except OSError:
            return False
    return True


def _until(condition: bool, name: str, process: subprocess.Popen[bytes] | None, why: str) -> None:
    deadline = time.monotonic() + _STARTS_WITHIN_SECONDS
    while _answers(name) != condition:
        if process is not None and process.poll() is not None:
            raise Unavailable(f"rejoind has ended with status {process.returncode}: its log says why")
        if time.monotonic() > deadline:
            raise Unavailable(f"{why} within {_STARTS_WITHIN_SECONDS:.0f} s")
        time.sleep(0.02)


def local_daemon(place: Place, environment: Mapping[str, str] | None = None) -> str:
    """Give the socket of this machine's daemon for this replica; local rank 0 starts that, the others wait for it.

    The daemon takes its settings from the same REJOIN_* variables; REJOIN_COORDINATOR and REJOIN_JOB_KEY_FILE have to
    be there. Raises `InvalidArgument` where they are not, and `Unavailable` where it does not start.
    """
    variables = dict(os.environ if environment is None else environment)
    coordinator = variables.get("REJOIN_COORDINATOR")
    if not coordinator:
        raise InvalidArgument(
            "nothing says where the daemon is: set REJOIN_SOCKET to its socket; or REJOIN_COORDINATOR to the "
            "coordinator's HOST:PORT, and a daemon is started; or start the script with rejoin-run"
        )
    if not variables.get("REJOIN_JOB_KEY_FILE"):
        raise InvalidArgument("REJOIN_COORDINATOR is set, and REJOIN_JOB_KEY_FILE is not: the daemon wants the job key")
    of = hashlib.sha256(f"{coordinator} {place.replica}".encode()).hexdigest()[:12]
    name = f"@rejoin-{os.getuid()}-{of}"
    if local_rank(variables) != 0:
        _until(True, name, None, "local rank 0 has not started its daemon")
        return name
    # That of a trainer before this one is about to end with it.
    _until(False, name, None, f"another trainer of replica {place.replica} runs here: its daemon has not ended")
    for of_another in ("REJOIN_SOCKET", "REJOIN_COORDINATOR_ROLE", "REJOIN_RELAY", "REJOIN_ADDRESS_FILE"):
        variables.pop(of_another, None)
    variables.setdefault("REJOIN_NODE", f"replica{place.replica}")
    variables.setdefault("REJOIN_LOG_LEVEL", "warn")
    process = subprocess.Popen(
        [path("rejoind"), "--socket", name, "--end-with", str(os.getpid())], env=variables, stdin=subprocess.DEVNULL
    )
    _running.append(process)
    _until(True, name, process, "rejoind has not started")
    return name
