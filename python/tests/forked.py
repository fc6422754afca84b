"""Python programs in processes that are forked from one that has imported torch already: most tests start theirs so.

To import torch takes a processor two seconds, and the tests start a hundred programs that do. One does so here, the
server, and waits. Each program that is asked for runs in a fork of it, with arguments, an environment, a directory and
files of its own as `python SCRIPT …` would have them, and ends like that one, interpreter and all. Nothing but imports
has happened in the server: it has one thread, and no files or sessions. What all forks have alike are the addresses of
what is loaded and the order of sets: so the tests of examples, torchrun and a GPU's memory start programs as users do.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import IO

from rejoin import _kept, run

LONGEST_ORDER = 1 << 17
NUMBER = struct.Struct("q")
POLL_SECONDS = 0.01


def _number(told: bytes) -> int:
    assert told, "the server, or who waits for the process, has died"
    return int(NUMBER.unpack(told)[0])


class _Process:
    """A process that this one has forked, as subprocess.Popen has it."""

    returncode: int | None = None

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def _look(self) -> int | None:
        found, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if found else None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._look()
        return self.returncode

    def wait(self, timeout: float = float("inf")) -> int:
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(POLL_SECONDS)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Popen(_Process):
    """`python ARGUMENTS`, forked from the server: a script's, "-c", a text and its, or "-m", "rejoin.run" and its.

    The scripts that such a rejoin-run starts are its children as ever, and forked, too.
    """

    def __init__(self, arguments: list[str], env: dict[str, str] | None = None,
                 stdout: int | IO[str] | None = None, stderr: int | IO[str] | None = None) -> None:  # fmt: skip
        pipes, files = {}, []
        for name, given in (("stdout", stdout), ("stderr", stderr)):
            if given == subprocess.PIPE:
                reads, writes = os.pipe()
                pipes[name] = os.fdopen(reads)
                files.append(writes)
            elif given == subprocess.DEVNULL:
                files.append(os.open(os.devnull, os.O_WRONLY))
            else:
                files.append(os.dup(len(files) + 1 if given is None else given.fileno()))
        told, tells = os.pipe()
        order = {"arguments": [str(each) for each in arguments], "directory": os.getcwd(),
                 "environment": dict(os.environ if env is None else env)}  # fmt: skip
        socket.send_fds(_server(), [json.dumps(order).encode()], [*files, tells])
        for file in (*files, tells):
            os.close(file)
        self.stdout, self.stderr, self._told = pipes.get("stdout"), pipes.get("stderr"), told
        self._pipes, self._readers, self._read = pipes, [], {}
        super().__init__(_number(os.read(told, NUMBER.size)))
        os.set_blocking(told, False)

    def _look(self) -> int | None:
        try:
            status = os.read(self._told, NUMBER.size)
        except BlockingIOError:
            return None
        os.close(self._told)
        return _number(status)

    def communicate(self, timeout: float = float("inf")) -> tuple[str | None, str | None]:
        def reads(name: str) -> None:
            self._read[name] = self._pipes[name].read()

        if not self._readers:
            self._readers = [threading.Thread(target=reads, args=(name,), daemon=True) for name in self._pipes]
            for reader in self._readers:
                reader.start()
        deadline = time.monotonic() + timeout
        self.wait(timeout)
        for reader in self._readers:
            reader.join(min(threading.TIMEOUT_MAX, max(0.0, deadline - time.monotonic())))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return self._read.get("stdout"), self._read.get("stderr")


def run_ranks(count: int, text: str) -> str:
    """Run it in processes that have of torchrun what ranks need; give what they print."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(count),
                   "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}  # fmt: skip
    ranks = [
        Popen(["-c", text], {**environment, "RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for rank in range(count)
    ]
    deadline = time.monotonic() + 120
    while any([rank.poll() is None for rank in ranks]) and time.monotonic() < deadline:
        if any(rank.returncode for rank in ranks):
            break
        time.sleep(POLL_SECONDS)
    for rank in ranks:
        rank.kill()  # where one has failed, or they have not ended in time
    told = [rank.communicate(60) for rank in ranks]
    assert not any(rank.returncode for rank in ranks), "".join(f"{out}\n{err[-3000:]}" for out, err in told)
    return "".join(out for out, _ in told)


@functools.cache
def _server() -> socket.socket:
    """Start it; it ends when this process does."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        subprocess.Popen([sys.executable, __file__, str(its.fileno())], pass_fds=[its.fileno()],
                         stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                         env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    return ours


def _next_program(connection: socket.socket) -> dict:
    """Give what is to be run, in a process of its own each: the server's own stays in here."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        order, files, *_ = socket.recv_fds(connection, LONGEST_ORDER, 3)
        if not order:
            os._exit(0)
        if os.fork() != 0:
            for file in files:
                os.close(file)
            continue
        # This one waits for the program's, and tells how it ends: it would be the server's to do.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        pid = os.fork()
        if pid == 0:
            os.dup2(files[0], 1)
            os.dup2(files[1], 2)
            return json.loads(order)
        for file in (connection.fileno(), 1, 2, *files[:2]):
            os.close(file)
        os.write(files[2], NUMBER.pack(pid))
        os.write(files[2], NUMBER.pack(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
        os._exit(0)


class _Forked(BaseException):
    """Leads out of rejoin-run, in the process of a replica."""

    def __init__(self, order: dict) -> None:
        super().__init__()
        self.order = order


class _Job(run.Job):
    """Forks its replicas, where they are scripts for this Python."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self._own = os.getpid()

    def _stop(self) -> None:
        if os.getpid() == self._own:
            super()._stop()


class _Subprocess:
    """What rejoin-run starts processes with, in the place of the module."""

    def __getattr__(self, name: str) -> object:
        return getattr(subprocess, name)

    @staticmethod
    def Popen(
        command: list[str], env: dict[str, str], stdin: int, stdout: IO[bytes] | int, stderr: int, preexec_fn
    ) -> object:
        if os.path.normpath(command[0]) != os.path.normpath(sys.executable):
            return subprocess.Popen(command, env=env, stdin=stdin, stdout=stdout, stderr=stderr, preexec_fn=preexec_fn)
        assert (stdin, stderr) == (subprocess.DEVNULL, subprocess.STDOUT) and isinstance(stdout, int)
        pid = os.fork()
        if pid:
            return _Process(pid)
        os.dup2(stdout, 1)
        os.dup2(1, 2)
        preexec_fn()
        Path("/proc/self/comm").write_text(f"replica{env['REJOIN_REPLICA']}")  # by which a test finds it
        raise _Forked({"arguments": command[1:], "directory": os.getcwd(), "environment": env})


def _take(order: dict) -> list[str]:
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # they are of the process that this one was forked from
    os.chdir(order["directory"])
    os.environ.clear()
    os.environ.update(order["environment"])
    return order["arguments"]


def _program(order: dict) -> list[str]:
    """Give the arguments of what is to be run in the end, after a rejoin-run only where it has forked a replica."""
    arguments = _take(order)
    if arguments[:2] != ["-m", "rejoin.run"]:
        return arguments
    run.Job, _kept.subprocess = _Job, _Subprocess()
    try:
        sys.exit(run.main(arguments[2:]))
    except _Forked as forked:
        order = forked.order
    return _take(order)


def _main() -> None:
    for name in ("torch._dynamo", "rejoin.distributed", "rejoin.torch"):
        importlib.import_module(name)  # optimizers import the first one
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "what is forked has this thread only"
    gc.collect()
    gc.freeze()  # else the first collection in each of them would write to, and so copy, all that it has
    script, *rest = _program(_next_program(socket.socket(fileno=int(sys.argv[1]))))
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if script == "-c":
        text, *rest = rest
        sys.path[0], name = "", "<string>"
    else:
        text, sys.path[0], name = Path(script).read_text(), str(Path(script).parent), script
        main.__file__ = script
    sys.argv = [script, *rest]
    exec(compile(text, name, "exec"), vars(main))


if __name__ == "__main__":
    _main()
