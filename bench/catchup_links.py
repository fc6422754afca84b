#!/usr/bin/env python3
"""A replica catches up from two sources over links that take so many bytes a second, beside bulk writes over the same.

usage: catchup_links.py [--rate 200] [--slow 20] [--size 512M] [-n 3]

Each replica has a network namespace of its own, and all are at one bridge. What leaves one is limited (in MB/s) by a
token bucket: first all alike, then the second source's to --slow; then there is the first source alone. Bulk is the
same bytes in plain writes, as many from each source. Needs root, ip and tc. Prints a table for docs/performance.md.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from slow_links import Hosts, built


def positive(text):
    value = int(text)
    if value <= 0:
        raise ValueError
    return value


def size(text):
    if not re.fullmatch(r"[1-9][0-9]*[KMG]?", text):
        raise ValueError
    return text


def measure(perf, names, size, times):
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        subprocess.run([perf, "--transport", "tcp", "--compression", "off", "-s", size, "-n", str(times), "--sources", str(len(names) - 1),
                        "--hosts", ",".join(names), "--json", out.name], check=True, stdout=subprocess.DEVNULL)  # fmt: skip
        return json.loads(Path(out.name).read_text())["runs"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=positive, default=200, help="MB/s of a link")
    parser.add_argument("--slow", type=positive, default=20, help="MB/s of the second source's, in the second measurement")
    parser.add_argument("--size", type=size, default="512M", help="state")
    parser.add_argument("-n", type=positive, default=3, help="repetitions")
    arguments = parser.parse_args()
    perf = built("rejoin_catchup_bw")
    print("| sources' links, MB/s | bulk, GB/s | verified, GB/s | sent by the second |\n|---|---|---|---|")
    with Hosts(3) as hosts:
        hosts.limit(arguments.rate)
        for rates in ([arguments.rate] * 2, [arguments.rate, arguments.slow], [arguments.rate]):
            hosts.limit(rates[-1], [hosts.names[len(rates)]])
            runs = measure(perf, hosts.names[: 1 + len(rates)], arguments.size, arguments.n)
            bulk, verified = ([run[key] for run in runs] for key in ("bulk_gbps", "verified_gbps"))
            share = f"{100 * sum(run['shares'][1] for run in runs) / len(runs):.1f} %" if len(rates) > 1 else ""
            print(f"| {', '.join(map(str, rates))} | {min(bulk):.3f}–{max(bulk):.3f} | {min(verified):.3f}–{max(verified):.3f} | {share} |",
                  flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
