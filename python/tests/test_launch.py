"""One torchrun for each replica, started again when it has ended: local rank 0 starts its machine's daemon."""

import contextlib
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from test_job import DIGEST  # noqa: E402

from rejoin import InvalidArgument, Place, Unavailable  # noqa: E402
from rejoin._daemon import _is_there, local_daemon  # noqa: E402
from rejoin._programs import path  # noqa: E402

HERE = Path(__file__).parent


def until(condition, limit: float = 60) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def text(file: Path) -> str:
    return file.read_text() if file.exists() else ""


@pytest.fixture
def key(tmp_path) -> Path:
    key = tmp_path / "key"
    key.touch(mode=0o600)
    key.write_text(secrets.token_hex(32))
    return key


def test_what_is_missing_is_named():
    with pytest.raises(InvalidArgument, match="set REJOIN_SOCKET"):
        local_daemon(Place(0, 0), {})
    with pytest.raises(InvalidArgument, match="REJOIN_JOB_KEY_FILE is not"):
        local_daemon(Place(0, 0), {"REJOIN_COORDINATOR": "127.0.0.1:1"})


@pytest.mark.thorough
def test_replicas_of_torchrun_need_a_coordinator_and_nothing_else(tmp_path, key):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "REJOIN_JOB_KEY_FILE": str(key), "REJOIN_SILENCE_MS": "5000"}
    with contextlib.ExitStack() as all_processes:

        def start(log: str, *command: str, **variables: str) -> subprocess.Popen:
            out = all_processes.enter_context((tmp_path / log).open("w"))
            process = subprocess.Popen(command, env={**environment, **variables}, stdout=out, stderr=subprocess.STDOUT)
            all_processes.callback(process.wait)
            all_processes.callback(process.terminate)
            return process

        addresses = tmp_path / "addresses.json"
        start("coordinator.log", path("rejoind"), "--coordinator", "--replicas", "2", "--ranks", "2", "--batch", "8",
              "--log-directory", str(tmp_path / "log"),
              "--address-file", str(addresses))  # fmt: skip
        until(lambda: addresses.exists() and addresses.stat().st_size > 0)
        coordinator = json.loads(addresses.read_text())["coordinator"]

        def replica(number: int) -> subprocess.Popen:
            return start(f"replica{number}.log", sys.executable, "-m", "torch.distributed.run", "--standalone",
                         "--nproc-per-node", "2", "--monitor-interval", "0.1",
                         str(HERE / "trainer.py"), "--out", str(tmp_path), "--optimizer", "sharded",
                         REPLICA_GROUP_ID=str(number), REJOIN_COORDINATOR=coordinator)  # fmt: skip

        replicas = [replica(0), replica(1)]
        logs = [tmp_path / "replica0.log", tmp_path / "replica1.log"]
        until(lambda: all("step 20 " in text(log) for log in logs))
        (tmp_path / "kill.1").write_text("backward:0")
        assert replicas[1].wait(60) != 0
        logs[1].rename(tmp_path / "before.log")
        replicas[1] = replica(1)
        until(lambda: len(re.findall(r"^step \d+ mean", text(logs[1]), re.M)) > 20)
        assert all(process.poll() is None for process in replicas)
        seen: dict[str, set[str]] = {}
        for log in [*logs, tmp_path / "before.log"]:
            for step, of in re.findall(DIGEST, text(log)):
                seen.setdefault(step, set()).add(of)
        assert len(seen) > 40
        for step, digests in seen.items():
            assert len(digests) == 1, (step, digests)


@pytest.mark.parametrize("name", [b"\0caf\xe9", b"\0a\nb", b"\0a\n\nb", b"", b"\0 two  words "])
def test_names_of_other_sockets_of_the_machine_do_not_matter(name):
    ours = f"rejoin-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as other, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as daemon:
        other.bind(name)
        other.listen()
        assert not _is_there(f"@{ours}")
        daemon.bind(f"\0{ours}")
        assert not _is_there(f"@{ours}"), "nobody listens there yet"
        daemon.listen()
        assert _is_there(f"@{ours}")


# Python gives bytes that are no UTF-8 as surrogates, and to a process it starts as they were.
def test_a_host_may_have_a_name_that_is_no_text(key, monkeypatch, tmp_path):
    monkeypatch.setattr(socket, "gethostname", lambda: b"caf\xe9".decode("utf-8", "surrogateescape"))
    given = {}

    def started(command: list[str], env: dict[str, str], **_: object) -> subprocess.Popen:
        given.update(env)
        return real(["false"])

    real = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", started)
    with pytest.raises(Unavailable, match="ended with status 1"):
        local_daemon(Place(3, 0), {"REJOIN_COORDINATOR": str(tmp_path), "REJOIN_JOB_KEY_FILE": str(key)})
    assert given["REJOIN_NODE"] == "replica3-caf\ufffd"


def test_the_daemon_ends_with_its_trainer(key):
    script = (
        "import rejoin._daemon, rejoin, signal, os, sys\n"
        "names = {rejoin._daemon.local_daemon(rejoin.Place(0, 0)) for _ in range(2)}\n"  # one for both sessions
        "print(*names, flush=True)\n"
        "signal.pause()\n"
    )
    environment = {**os.environ, "REJOIN_JOB_KEY_FILE": str(key), "REJOIN_COORDINATOR": "127.0.0.1:9"}
    for _ in range(2):  # the second one takes the name that the first one had
        trainer = subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True)
        assert trainer.stdout is not None and re.match(r"@rejoin-\S+$", trainer.stdout.readline())
        children = Path(f"/proc/{trainer.pid}/task/{trainer.pid}/children").read_text().split()
        assert len(children) == 1
        os.kill(int(children[0]), signal.SIGKILL)  # it is started again
        tasks = Path(f"/proc/{trainer.pid}/task")

        def others(tasks: Path = tasks, killed: str = children[0]) -> set[str]:
            return {pid for task in tasks.iterdir() for pid in (task / "children").read_text().split()} - {killed}

        until(others, 10)
        (again,) = others()
        os.kill(trainer.pid, signal.SIGKILL)
        trainer.wait()
        until(lambda again=again: not Path(f"/proc/{again}").exists(), 10)
