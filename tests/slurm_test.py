"""The replica's script for Slurm ends with its trainers, and with a daemon that is not made anew. srun is a program of this test."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SLURM = Path(sys.argv[1]).resolve() / "deploy/slurm"
SCRIPT = SLURM / "replica.sh"
# The first daemon dies; the trainers end while the script waits before it starts another one.
DAEMON_DIES = """
case "$*" in
*rejoind*) [[ -e died ]] && exec sleep 100; touch died; exit 139;;
*) until [[ -e died ]]; do sleep 0.05; done; sleep 0.3;;
esac
"""
TRAINERS_LEAVE = """
case "$*" in
*rejoind*) exec sleep 100;;
*) trap 'touch left; exit 0' TERM; touch trains; while :; do sleep 0.05; done;;
esac
"""
# Trainers that find no daemon fail.
DAEMON_ENDS = """
case "$*" in
*rejoind*) touch ended; exit {status};;
*) until [[ -e ended ]]; do sleep 0.05; done; echo >>starts; exit 1;;
esac
"""
TRAINERS_ARE_WRONG = """
case "$*" in
*rejoind*) exec sleep 100;;
*) exit 2;;
esac
"""


def script(directory: Path, srun: str) -> subprocess.Popen:
    for name, text in (("srun", srun), ("rejoin", "")):
        (directory / name).write_text(f"#!/bin/bash\n{text}")
        (directory / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{directory}:{os.environ['PATH']}",
        "TMPDIR": str(directory),
        "REJOIN_COORDINATOR": "service:7000",
        "REJOIN_JOB_KEY_FILE": "key",
        "SLURM_ARRAY_TASK_ID": "0",
        "SLURMD_NODENAME": "node0",
        "SLURM_JOB_ID": "1",
    }
    return subprocess.Popen(["bash", str(SCRIPT), "trainer"], cwd=directory, env=environment, start_new_session=True)


def left(group: int) -> list[str]:
    """Name the processes of the group that have not ended; nobody may have waited for one that has."""
    names = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = status.read_text(errors="replace").rpartition(") ")  # a name may be cut within a character
        except OSError:
            continue
        state, _, its_group = rest.split()[:3]
        if int(its_group) == group and state != "Z":
            names.append(f"{name})")
    return names


def ends(process: subprocess.Popen, what: str, expected: int = 0) -> None:
    try:
        status = process.wait(30)
        deadline = time.monotonic() + 10  # one that was told to end may take a moment
        while left(process.pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        remain = left(process.pid)
    except subprocess.TimeoutExpired:
        sys.exit(f"{what}: the script does not end")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if status != expected or remain:
        sys.exit(f"{what}: status {status}, and processes that are left: {', '.join(remain) or 'none'}")


def examined(directory: Path, **environment: str) -> str:
    """Return what the prolog has doctor look at; doctor is a program of this test."""
    (directory / "rejoin").write_text('#!/bin/bash\necho "$*"\n')
    (directory / "rejoin").chmod(0o755)
    environment = {"PATH": f"{directory}:{os.environ['PATH']}", "SLURM_JOB_COMMENT": "rejoin", **environment}
    return subprocess.run(["bash", str(SLURM / "prolog.sh")], env=environment, capture_output=True, text=True, check=True).stdout


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        for environment, wanted in (({}, "doctor --transport tcp "), ({"DOCTOR_TRANSPORT": "ibverbs"}, "doctor --transport ibverbs "), ({"SLURM_JOB_COMMENT": ""}, "")):
            said = examined(Path(scratch), **environment)
            if not said.startswith(wanted) or bool(said) != bool(wanted):
                sys.exit(f"the prolog with {environment}: {said}")
    with tempfile.TemporaryDirectory() as scratch:
        ends(script(Path(scratch), DAEMON_DIES), "the daemon is about to be started again when the trainers have ended")
    with tempfile.TemporaryDirectory() as scratch:
        process = script(Path(scratch), TRAINERS_LEAVE)
        deadline = time.monotonic() + 30
        while not (Path(scratch) / "trains").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        ends(process, "the trainers are told to leave")
        if not (Path(scratch) / "left").exists():
            sys.exit("the trainers were not told to leave")
    for status in (0, 2):
        with tempfile.TemporaryDirectory() as scratch:
            process = script(Path(scratch), DAEMON_ENDS.format(status=status))
            ends(process, f"the daemon ends with status {status}", status)
    with tempfile.TemporaryDirectory() as scratch:
        ends(script(Path(scratch), TRAINERS_ARE_WRONG), "a setting of the trainers is wrong", 2)


main()
