#!/usr/bin/env python3
"""All-reduces between hosts whose links take so many bytes a second, with and without coding.

usage: slow_links.py [--rates 50,500] [--codings off,auto,8,4] [--ranks 3] [--size 64M] [--type float32] [--json FILE]

Each rank has a network namespace of its own, and all are at one bridge. What leaves one is limited to the rate (in MB/s)
by a token bucket. Needs root, ip and tc. The ranks are processes of this machine and share its CPUs.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def built(program):
    path = ROOT / "build/release/bin" / program
    if not path.exists():
        sys.exit(f"{path} is not there: ./run build release")
    return path


def run(*command):
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


class Hosts:
    """So many namespaces at a bridge, which is in a namespace of its own."""

    def __init__(self, count):
        mark = f"rejoin{os.getpid()}"
        self.bridge, self.names = f"{mark}-bridge", [f"{mark}-{i}" for i in range(count)]
        self.made = []

    def __enter__(self):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that what was made goes away
        try:
            for name in [self.bridge, *self.names]:
                run("ip", "netns", "add", name)
                self.made.append(name)
            run("ip", "-n", self.bridge, "link", "add", "name", "room", "type", "bridge")
            run("ip", "-n", self.bridge, "link", "set", "room", "up")
            for i, name in enumerate(self.names):
                run("ip", "-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", f"port{i}", "netns", self.bridge)
                run("ip", "-n", self.bridge, "link", "set", f"port{i}", "master", "room", "up")
                run("ip", "-n", name, "addr", "add", f"10.78.0.{i + 1}/24", "dev", "eth0")
                run("ip", "-n", name, "link", "set", "eth0", "up")
        except subprocess.CalledProcessError as error:
            self.__exit__()
            raise SystemExit(f"no network of namespaces can be had here (it needs root, ip and tc): {error}") from error
        return self

    def limit(self, megabytes, names=None):
        for name in names or self.names:
            run("ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev", "eth0", "root", "tbf",
                "rate", f"{megabytes * 8}mbit", "burst", "256k", "latency", "50ms")  # fmt: skip

    def sent(self):
        told = [json.loads(subprocess.check_output(["ip", "-n", name, "-s", "-j", "link", "show", "dev", "eth0"]))
                for name in self.names]  # fmt: skip
        return sum(one[0]["stats64"]["tx"]["bytes"] for one in told)

    def __exit__(self, *_):
        for name in self.made:
            subprocess.run(["ip", "netns", "del", name], check=False)


def measure(perf, hosts, coding, options):
    """Seconds of an all-reduce, and the bytes of all that a rank has sent for it, headers included."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "results.json"
        before = hosts.sent()
        warm, turns = 2, 10
        subprocess.run(
            [perf, "--hosts", ",".join(hosts.names), "--ranks", str(len(hosts.names)), "--transport", "tcp", "-b", options.size,
             "-e", options.size, "-d", options.type, "-o", "mean", "-n", str(turns), "-w", str(warm), "--coding", coding,
             "--json", out],
            check=True, stdout=subprocess.DEVNULL)  # fmt: skip
        row = json.loads(out.read_text())["rows"][0]
        if row["wrong"]:
            raise SystemExit(f"coding {coding}: {row['wrong']} elements are beyond the bound")
        operations = row["turns"] * row["operations_per_turn"] + warm + row["turns"] - 1
        return {
            "coding": coding,
            "seconds": row["seconds"],
            "best_seconds": row["best_seconds"],
            "chunk_bytes": row["chunk_bytes_sent_per_operation"],
            "wire_bytes": (hosts.sent() - before) / operations / len(hosts.names),
            "cpu_seconds_per_gib": row["cpu_seconds_per_gib"],
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", default="50,500")
    parser.add_argument("--codings", default="off,auto,8,4")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--size", default="64M")
    parser.add_argument("--type", default="float32")
    parser.add_argument("--json")
    options = parser.parse_args()
    perf = built("rejoin_allreduce_perf")
    results = []
    print(f"{options.ranks} ranks, {options.size} of {options.type}, the mean over 10 all-reduces")
    print("link (MB/s)  coding  time (ms)  against off  MB of chunks a rank  MB on its link")
    with Hosts(options.ranks) as hosts:
        for rate in [int(one) for one in options.rates.split(",")]:
            hosts.limit(rate)
            off = None
            for coding in options.codings.split(","):
                row = measure(perf, hosts, coding, options) | {"rate_mb": rate}
                off = off or row["seconds"]
                results.append(row)
                print(f"{rate:11}  {coding:>6}  {row['seconds'] * 1e3:9.1f}  {off / row['seconds']:10.2f}x"
                      f"  {row['chunk_bytes'] * 1e-6:19.1f}  {row['wire_bytes'] * 1e-6:14.1f}", flush=True)  # fmt: skip
    if options.json:
        Path(options.json).write_text(json.dumps({"ranks": options.ranks, "size": options.size, "type": options.type,
                                                  "rows": results}, indent=2) + "\n")  # fmt: skip


if __name__ == "__main__":
    main()
