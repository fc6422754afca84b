#!/usr/bin/env python3
"""Three replicas of one GPT on this machine: torch's DDP over Gloo, torchft over Gloo, Gloo reconfigured, and Rejoin.

Each trains without faults; then, but for DDP, replica 1 kills itself when it has computed its gradients, and is started
again at once. All in one run; each process has one thread.

Gloo reconfigured is what one would write on torch's own enable_reconfigure: an agent (here this program) that sees who
has died and who is back; survivors that repeat their all-reduce with what they have computed; a broadcast of the state
to who comes back, for which all wait.
"""

import argparse
import itertools
import os
import re
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from peers_workers import REPLICAS, WORKERS, make

HERE = Path(__file__).resolve().parent
CALM, AFTER = 20, 25  # steps before and after the kill


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Run:
    def __init__(self, kind, given, environment, store=None):
        self.kind, self.given, self.environment, self.store = kind, given, environment, store
        self.steps = [{} for _ in range(REPLICAS)]
        self.dead = self.ready = None
        self.lost = 0
        self.processes = {}

    def start(self, peer, *more, **environment):
        command = [
            sys.executable,
            __file__,
            "--worker",
            self.kind,
            "--data",
            str(self.given.data),
            "--width",
            str(self.given.width),
            "--blocks",
            str(self.given.blocks),
            "--steps",
            str(self.steps_in_all()),
            *more,
        ]
        self.processes[peer] = subprocess.Popen(
            command, stdout=self.write, stderr=subprocess.DEVNULL if not self.given.verbose else None,
            env={**os.environ, **self.environment(peer), "PEER": str(peer), "OMP_NUM_THREADS": "1", **environment},
        )  # fmt: skip

    def steps_in_all(self):
        return CALM if self.kind == "ddp" else CALM + AFTER

    def run(self):
        read, self.write = os.pipe()
        for peer in range(REPLICAS):
            self.start(peer, *(["--dies-at", str(CALM)] if peer == 1 and self.kind != "ddp" else []))
        deadline = time.monotonic() + 300
        rest = b""
        while any(process.poll() is None for peer, process in self.processes.items() if peer != 1):
            if time.monotonic() > deadline:
                print(f"{self.kind}: stopped after 300 s")
                break
            rest += os.read(read, 65536)
            *lines, rest = rest.split(b"\n")
            for line in lines:
                self.hear(line.decode())
            if all(len(steps) >= self.steps_in_all() - 1 for peer, steps in enumerate(self.steps) if peer != 1):
                break
        for process in self.processes.values():
            process.kill()
            process.wait()
        os.close(read)
        os.close(self.write)

    def announce(self, generation, members):
        if self.store:
            self.store.set(f"members {generation}", members)

    def hear(self, line):
        match = re.match(r"(\d) (step|dies|ready|lost) ?(\d*) at ([\d.]+)$", line)
        if not match:
            return
        peer, what, step, at = int(match[1]), match[2], match[3], float(match[4])
        if what == "dies":
            self.dead = at
            self.processes[1].wait()
            self.announce(2, "0 2")
            self.start(1, GENERATION="3")
        elif what == "ready" and peer == 1 and self.dead:
            self.ready = at
            self.announce(3, "0 1 2")
        elif what == "lost":
            self.lost += 1
        elif what == "step":
            if peer == 1 and self.dead and at > self.dead and not hasattr(self, "back"):
                self.back = (int(step), at)
            self.steps[peer][int(step)] = at

    def report(self):
        ours = self.steps[0]
        calm = [ours[n + 1] - ours[n] for n in range(5, CALM - 2) if n in ours and n + 1 in ours]
        row = {"step": statistics.median(calm) if calm else None}
        if self.dead:
            after = [t for peer in (0, 2) for n, t in self.steps[peer].items() if n >= CALM and t > self.dead]
            row["next"] = min(after) - self.dead if after else None
            if hasattr(self, "back") and self.ready:
                row["joined"] = self.back[1] - self.ready
                times = sorted(t for t in ours.values() if self.ready - 1 < t <= self.back[1])
                row["longest"] = max((b - a for a, b in itertools.pairwise(times)), default=None)
            row["lost"] = self.lost
        return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=HERE.parent / "data" / "shakespeare.txt")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=9)
    parser.add_argument("--steps", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--dies-at", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--only", default="ddp,torchft,gloo,rejoin")
    parser.add_argument("--verbose", action="store_true")
    given = parser.parse_args()
    if given.worker:
        WORKERS[given.worker](given)
        return

    from rejoin._programs import path

    model, _, _ = make(given)
    print(
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, {REPLICAS} replicas, torch {torch.__version__}"
    )
    with tempfile.TemporaryDirectory() as scratch:
        helpers = []

        def ddp():
            port = free_port()
            return lambda peer: {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(peer),
                                 "WORLD_SIZE": str(REPLICAS)}  # fmt: skip

        def torchft():

            port = free_port()
            lighthouse = Path(sys.executable).parent / "torchft_lighthouse"
            helpers.append(subprocess.Popen(
                [lighthouse, "--bind", f"127.0.0.1:{port}", "--min_replicas", "2", "--join_timeout_ms", "1000",
                 "--quorum_tick_ms", "10", "--heartbeat_timeout_ms", "1000"],
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))  # fmt: skip
            return lambda peer: {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"}

        def rejoin():
            key, addresses = Path(scratch, "key"), Path(scratch, "addresses")
            key.touch(mode=0o600)
            key.write_text(secrets.token_hex(32))
            helpers.append(subprocess.Popen(
                [path("rejoind"), "--coordinator", "--replicas", str(REPLICAS), "--ranks", "1", "--log-directory",
                 f"{scratch}/log", "--address-file", str(addresses), "--job-key-file", str(key)],
                stderr=subprocess.DEVNULL))  # fmt: skip
            while not addresses.exists():
                time.sleep(0.01)
            coordinator = re.search(r'"coordinator":"([^"]+)"', addresses.read_text())[1]
            return lambda peer: {"REJOIN_COORDINATOR": coordinator, "REJOIN_JOB_KEY_FILE": str(key),
                                 "REJOIN_REPLICA": str(peer)}  # fmt: skip

        def gloo():
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            store.set("members 1", "0 1 2")
            return lambda peer: {"STORE": str(store.port), "GENERATION": "1"}, store

        head = (
            "",
            "step, ms",
            "kill to the next commit, ms",
            "batches lost",
            "ready to contributing, ms",
            "others' longest step, ms",
        )
        print(" | ".join(head))
        for name, prepare in (("ddp", ddp), ("torchft", torchft), ("gloo", gloo), ("rejoin", rejoin)):
            if name not in given.only.split(","):
                continue
            if name == "gloo" and not hasattr(dist, "_reconfigure"):
                print(f"gloo | torch {torch.__version__} can't reconfigure its process groups: 2.14 can")
                continue
            prepared = prepare()
            run = Run(name, given, *(prepared if isinstance(prepared, tuple) else (prepared,)))
            run.run()
            row = run.report()

            def ms(key, row=row):
                return f"{1000 * row[key]:.0f}" if row.get(key) is not None else "-"

            print(
                " | ".join([name, ms("step"), ms("next"), str(row.get("lost", "-")), ms("joined"), ms("longest")]),
                flush=True,
            )
        for helper in helpers:
            helper.kill()
            helper.wait()


if __name__ == "__main__":
    main()
