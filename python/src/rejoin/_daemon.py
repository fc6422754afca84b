"""The daemon of this machine, where nobody else starts one: the trainer of local rank 0 does, and it ends with that."""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping

from rejoin._job_variables import without_roles
from rejoin._programs import path
from rejoin.errors import InvalidArgument, Unavailable
from rejoin.launch import Place, local_rank

log = logging.getLogger("rejoin")

_STARTS_WITHIN_SECONDS = 60.0
_started: set[tuple[int, str]] = set()  # by the process, which a forked one is not, and the socket


def _is_there(name: str) -> bool:
    # Number, references, protocol, flags (10000: it listens), type, state, inode, name. Sockets of others are here,
    # too, and may have any bytes in their names.
    with open("/proc/net/unix", "rb") as sockets:
        fields = (line.rstrip(b"\n").split(maxsplit=7) for line in sockets)
        return any(len(of) == 8 and of[3] == b"00010000" and of[7] == name.encode() for of in fields)


def _until(condition: bool, name: str, process: subprocess.Popen[bytes] | None, why: str) -> None:
    deadline = time.monotonic() + _STARTS_WITHIN_SECONDS
    while _is_there(name) != condition:
        if process is not None and process.poll() is not None:
            raise Unavailable(f"rejoind has ended with status {process.returncode}: the lines above say why")
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
            "coordinator's HOST:PORT (of several: all, with commas between), and a daemon is started; or start the "
            "script with rejoin-run"
        )
    if not variables.get("REJOIN_JOB_KEY_FILE"):
        raise InvalidArgument("REJOIN_COORDINATOR is set, and REJOIN_JOB_KEY_FILE is not: the daemon wants the job key")
    of = hashlib.sha256(f"{coordinator} {place.replica}".encode()).hexdigest()[:12]
    name = f"@rejoin-{os.getuid()}-{of}"
    if local_rank(variables) != 0:
        _until(True, name, None, "local rank 0 has not started its daemon")
        return name
    if (os.getpid(), name) in _started:  # for a session before this one; it is there, or started again
        _until(True, name, None, "rejoind has not started again")
        return name
    # That of a trainer before this one is about to end with it.
    other = (
        f"another trainer of replica {place.replica} runs here (LOCAL_RANK tells ranks apart): its daemon has not ended"
    )
    _until(False, name, None, other)
    variables = without_roles(variables)
    host = os.fsencode(socket.gethostname()).decode("utf-8", "replace")  # the kernel takes any bytes, rejoind text
    variables.setdefault("REJOIN_NODE", f"replica{place.replica}-{host}")
    variables.setdefault("REJOIN_LOG_LEVEL", "warn")
    command = [path("rejoind"), "--socket", name, "--end-with", str(os.getpid())]

    # In a session of its own: launchers signal the whole group of a process that is to leave, and it needs its daemon.
    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, start_new_session=True)

    process = start()
    _until(True, name, process, "rejoind has not started")
    _started.add((os.getpid(), name))
    threading.Thread(target=_start_again, args=(process, start), name="rejoind", daemon=True).start()
    return name


# For as long as this process lives: it does not come here when the daemon ends with it.
def _start_again(process: subprocess.Popen[bytes], start: Callable[[], subprocess.Popen[bytes]]) -> None:
    started = time.monotonic()
    while True:
        status = process.wait()
        log.warning("rejoind has ended with status %d, and is started again", status)
        time.sleep(max(0.0, 1.0 - (time.monotonic() - started)))  # at most once a second
        started = time.monotonic()
        try:
            process = start()
        except OSError as error:  # no process, no memory: again later
            log.error("rejoind can't be started: %s", error)
