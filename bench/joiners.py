"""How long replicas take that come back at once, who sends them their state, and what the others notice: real daemons
and trainers of one machine over TCP, each daemon's stream limited to a rate, which stands for its link.

For each number of joiners one job runs: one replica that stays, and so many that are killed at once and start again.
`--rejoind` may name another build's daemon, to compare with; `--draw` draws the results of several runs as one picture."""
import argparse
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request

SOURCE = pathlib.Path(__file__).resolve().parent.parent
TENSORS, PATIENCE = 192, 240


class Events:
    """What the coordinator has told of its decisions."""

    def __init__(self, path):
        self.path, self.commits, self.roles, self.epochs, self.file, self.rest = path, {}, {}, [], None, ""

    def read(self):
        if self.file is None:
            if not os.path.exists(self.path):
                return
            self.file = open(self.path)
        self.rest += self.file.read()
        *lines, self.rest = self.rest.split("\n")
        for line in lines:
            event = json.loads(line)
            if event["kind"] == "commit":
                self.commits[event["step"]] = event["t"] * 1e-9
            elif event["kind"] == "epoch":
                members = [m for m in event["members"].split(",") if m]
                self.roles = {int(m.rstrip("c")): m.endswith("c") for m in members}
                self.epochs.append((event["t"] * 1e-9, dict(self.roles)))


class Job:
    def __init__(self, settings, replicas):
        self.s, self.replicas = settings, replicas
        self.directory = tempfile.mkdtemp(prefix="rejoin-joiners-")
        self.children, self.trainers, self.status = [], {}, {}
        with open(os.open(f"{self.directory}/key", os.O_WRONLY | os.O_CREAT, 0o600), "w") as key:
            key.write(os.urandom(32).hex())
        for name in ("events", "flight"):
            os.mkdir(f"{self.directory}/{name}")
        self.environment = {**os.environ, "REJOIN_FLIGHT_DIR": f"{self.directory}/flight"}
        coordinator = self.daemon("coordinator", "--coordinator", "--log-directory", f"{self.directory}/log",
                                  "--replicas", str(replicas), "--ranks", "1", "--batch", "4")
        self.events = Events(f"{self.directory}/events/coordinator.{self.children[-1].pid}.jsonl")
        for replica in range(replicas):
            self.status[replica] = self.daemon(
                f"node{replica}", "--socket", f"{self.directory}/node{replica}.sock", "--connect",
                coordinator["coordinator"], "--transport", "tcp", "--compression", "off", "--stream-limit",
                str(settings.limit))["status"]
            self.train(replica)

    def launch(self, name, *arguments):
        with open(f"{self.directory}/{name}.out", "ab") as out:
            child = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                                     env=self.environment, cwd=self.directory)
        self.children.append(child)
        return child

    def daemon(self, name, *more):
        self.launch(name, self.s.rejoind or f"{self.s.binaries}/rejoind", "--name", name, "--job-key-file", f"{self.directory}/key",
                    "--address-file", f"{self.directory}/{name}.json", "--status", "127.0.0.1:0", "--silence-ms",
                    "5000", "--events", f"{self.directory}/events", *more)
        return self.wait(lambda: self.addresses(name), f"{name} did not come up")

    def addresses(self, name):
        try:
            with open(f"{self.directory}/{name}.json") as file:
                found = json.load(file)
            return found if "status" in found and ("socket" in found or "coordinator" in found) else None
        except (OSError, ValueError):
            return None

    def train(self, replica):
        self.trainers[replica] = self.launch(
            f"r{replica}", f"{self.s.binaries}/rejoin-chaos-trainer", "--replica", str(replica), "--rank", "0",
            "--socket", f"{self.directory}/node{replica}.sock", "--transport", "tcp", "--elements",
            str(self.s.elements), "--tensors", str(TENSORS), "--compute-ms", "100")

    def wait(self, condition, what):
        """Until it holds; looks every few milliseconds, since files and pages tell nobody that they change."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if found := condition():
                return found
            time.sleep(0.02)
        raise SystemExit(f"joiners: {what} in {PATIENCE} s; see {self.directory}")

    def contribute(self, replicas):
        self.events.read()
        return set(self.events.roles) == set(replicas) and not any(self.events.roles.values())

    def served(self):
        """Bytes: by contributors, by joiners."""
        all_bytes = passed_on = 0
        for address in self.status.values():
            with urllib.request.urlopen(f"http://{address}/status", timeout=10) as page:
                node = json.load(page)["node_role"]
            all_bytes += node["bytes_served"]
            passed_on += node.get("bytes_passed_on", 0)
        return all_bytes - passed_on, passed_on

    def end(self):
        for child in self.children:
            if child.poll() is None:
                child.kill()
            child.wait()
        if self.s.keep:
            print(f"# kept: {self.directory}")
        else:
            shutil.rmtree(self.directory)


def measure(settings, joiners):
    job = Job(settings, joiners + 1)
    try:
        everybody = range(joiners + 1)
        job.wait(lambda: job.contribute(everybody) and len(job.events.commits) >= 10, "the job did not start")
        for replica in everybody[1:]:
            job.trainers[replica].send_signal(signal.SIGKILL)
        job.wait(lambda: job.contribute([0]), "the others were not put out")
        before = job.served()
        started = time.monotonic()
        for replica in everybody[1:]:
            job.train(replica)
        job.wait(lambda: job.contribute(everybody), "the joiners did not catch up")
        admitted = next(t for t, roles in job.events.epochs if t > started and len(roles) > 1)
        ended = job.events.epochs[-1][0]
        after = job.served()
        own = []  # of each joiner, from its admission to its promotion
        for replica in everybody[1:]:
            roles = [(t, roles[replica]) for t, roles in job.events.epochs if t > started and replica in roles]
            own.append(next(t for t, joins in roles if not joins) - next(t for t, joins in roles if joins))
        times = sorted(t for t in job.events.commits.values() if admitted <= t <= ended)
        steps = [b - a for a, b in zip(times, times[1:])]
        state = (TENSORS * settings.elements + 16) * 8
        return {"joiners": joiners, "seconds": ended - admitted, "slowest": max(own), "by_contributors": (after[0] - before[0]) / state,
                "by_joiners": (after[1] - before[1]) / state, "longest_step_ms": max(steps) * 1e3,
                "median_step_ms": sorted(steps)[len(steps) // 2] * 1e3}
    finally:
        job.end()


def draw(files, out):
    sys.path.insert(0, str(SOURCE / "sim"))
    import plot
    runs = [(name, json.loads(pathlib.Path(path).read_text())) for name, path in (f.split("=", 1) for f in files)]
    charts = []
    for title, y, key in (("until all have caught up", "seconds", "seconds"),
                          ("sent by contributors", "times the state", "by_contributors")):
        chart = plot.Chart(title, "replicas that come back at once", y, low=0)
        for name, run in runs:
            chart.line(name, [(row["joiners"], row[key]) for row in run["rows"]])
        charts.append(chart)
    note = (f"state {runs[0][1]['state_mb']:.1f} MB, one contributor, each daemon sends {runs[0][1]['limit_mbs']:g} MB/s; "
            "bench/joiners.py")
    pathlib.Path(out).write_text(plot.page("Joiners that pass on what they have", charts, notes=[note]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--joiners", type=lambda text: [int(k) for k in text.split(",")], default=[1, 2, 4, 6])
    parser.add_argument("--elements", type=int, default=5328, help=f"of each of {TENSORS} tensors (a multiple of 16)")
    parser.add_argument("--limit", type=float, default=1.0, help="MB/s that each daemon's stream may send (default 1)")
    parser.add_argument("--binaries", default=str(SOURCE / "build/release/bin"))
    parser.add_argument("--rejoind", help="another daemon than the one there")
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--keep", action="store_true", help="leave what the processes have written")
    parser.add_argument("--draw", nargs="+", metavar="NAME=FILE", help="draw results of runs, instead of a run")
    parser.add_argument("--out", default="joiners.svg", help="of --draw")
    settings = parser.parse_args()
    if settings.draw:
        return draw(settings.draw, settings.out)
    state = (TENSORS * settings.elements + 16) * 8
    print(f"# one contributor, state {state / 1e6:.1f} MB, each daemon sends {settings.limit:g} MB/s")
    print(f"#{'joiners':>8} {'seconds':>8} {'of one':>7} {'slowest (s)':>12} {'of one':>7} {'by contributors':>16} {'by joiners':>11} {'longest step (ms)':>18} "
          f"{'median (ms)':>12}")
    rows = []
    for joiners in settings.joiners:
        row = measure(settings, joiners)
        rows.append(row)
        print(f" {joiners:8} {row['seconds']:8.2f} {row['seconds'] / rows[0]['seconds']:7.2f} "
              f"{row['slowest']:12.2f} {row['slowest'] / rows[0]['slowest']:7.2f} {row['by_contributors']:16.2f} "
              f"{row['by_joiners']:11.2f} {row['longest_step_ms']:18.0f} {row['median_step_ms']:12.0f}", flush=True)
    if settings.json:
        pathlib.Path(settings.json).write_text(
            json.dumps({"state_mb": state / 1e6, "limit_mbs": settings.limit, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
