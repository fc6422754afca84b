"""The processes of a chaos run's job, and who looks after them: whatever ends is started again, as an operator's
supervisor would, and every end is written down with its cause."""
import json
import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass, field

import etcd


@dataclass
class Process:
    name: str
    role: str  # coordinator, etcd, relay, daemon, trainer
    arguments: list
    host: object
    node: str = ""      # its daemon's name, of a daemon or trainer
    replica: int = -1   # of a daemon or trainer
    rank: int = -1      # of a trainer
    child: object = None
    stops: set = field(default_factory=set)  # the faults for which it is stopped
    killed: bool = False                     # by us, since this start
    output_from: int = 0                     # of this start, in its output file
    started: float = 0.0
    restart_at: float = 0.0
    held_back: bool = False  # it is not started again before let_start()
    starts: int = 0

    @property
    def speaker(self):
        """Who it is in its events."""
        return self.role if self.role == "coordinator" else self.name

    @property
    def pid(self):
        return self.child.pid if self.child else 0


@dataclass
class Death:
    process: Process
    t: float
    pid: int
    status: int
    killed: bool
    output: str

    @property
    def how(self):
        return f"signal {signal.Signals(-self.status).name}" if self.status < 0 else f"exit {self.status}"


class Job:
    """One coordinator, or several with etcd; perhaps a relay, daemons and trainers. `wiring` says which host everything
    is on."""

    def __init__(self, settings, wiring, directory, random):
        self.settings, self.wiring, self.directory, self.random = settings, wiring, directory, random
        self.processes = {}
        self.steps = 0  # the job's last, when it is to end
        self.roll_back_to = None
        self.ending = False
        self.addresses = {}
        for name in ("out", "events", "cwd", "flight"):
            os.makedirs(f"{directory}/{name}")
        for name in [name for name in os.environ if name.startswith("REJOIN_")]:
            del os.environ[name]  # the checker knows the settings that are given here, and no others
        os.environ["REJOIN_FLIGHT_DIR"] = f"{directory}/flight"
        with open(os.open(f"{directory}/key", os.O_WRONLY | os.O_CREAT, 0o600), "w") as key:
            key.write(os.urandom(32).hex())

    # ---- what runs

    def daemon_arguments(self, name, more):
        return [f"{self.settings.binaries}/rejoind", "--name", name, "--job-key-file", f"{self.directory}/key",
                "--address-file", f"{self.directory}/{name}.json", "--silence-ms", str(self.settings.silence_ms),
                "--events", f"{self.directory}/events", *more]

    def coordinator_arguments(self, seat):
        known = self.addresses.get(seat.name, {})
        more = ["--coordinator", "--log-directory", seat.directory, "--replicas", str(self.settings.replicas),
                "--ranks", str(self.settings.ranks), "--batch", "4", "--steps", str(self.steps),
                "--listen", known.get("coordinator", seat.host.address() + ":0"),
                "--status", known.get("status", seat.host.address() + ":0")]
        if self.settings.several:
            more += ["--store", etcd.endpoints(self.wiring.members), "--job", "chaos"]
        if self.roll_back_to is not None:
            more += ["--roll-back-to", self.roll_back_to]
        return self.daemon_arguments(seat.name, more)

    def renew_coordinators(self):
        """From their next start on they run with what is set now."""
        for seat in self.wiring.coordinators:
            self.processes[seat.name].arguments = self.coordinator_arguments(seat)

    def start(self):
        for seat in self.wiring.members:
            self.add(Process(seat.name, "etcd", etcd.arguments(seat, self.wiring.members), seat.host))
        for seat in self.wiring.coordinators:
            self.add(Process(seat.name, "coordinator", self.coordinator_arguments(seat), seat.host))
            self.addresses[seat.name] = self.wait_for_addresses(seat.name, "coordinator")
        self.renew_coordinators()  # where they are now
        coordinators = ",".join(addresses["coordinator"] for addresses in self.addresses.values())
        upstream = {}
        if self.settings.relay:
            self.add(Process("relay", "relay", self.daemon_arguments("relay", [
                "--relay", self.wiring.relay.address() + ":0", "--connect", coordinators]), self.wiring.relay))
            address = self.wait_for_addresses("relay", "relay")["relay"]
            relay = self.processes["relay"]
            relay.arguments[relay.arguments.index("--relay") + 1] = address
            upstream[self.settings.replicas - 1] = address  # the last replica is behind it
        for node in self.wiring.nodes:
            connect = upstream.get(node.replica, coordinators)
            self.add(Process(node.name, "daemon", self.daemon_arguments(node.name, [
                "--socket", self.socket(node.name), "--connect", connect, "--transport",
                self.wiring.transport(node.host), "--data-listen", node.host.address() + ":0"]),
                node.host, node=node.name, replica=node.replica))
            self.wait_for_addresses(node.name, "socket")
        for node in self.wiring.nodes:
            for rank in node.ranks:
                name = f"r{node.replica}.{rank}"
                self.add(Process(name, "trainer", [
                    f"{self.settings.binaries}/rejoin-chaos-trainer", "--replica", str(node.replica), "--rank",
                    str(rank), "--socket", self.socket(node.name), "--transport", self.wiring.transport(node.host),
                    "--data-listen", node.host.address() + ":0", "--hold", self.hold(name), "--elements",
                    str(self.settings.elements), "--compute-ms", str(self.settings.compute_ms), "--events",
                    f"{self.directory}/events"],
                    node.host, node=node.name, replica=node.replica, rank=rank))

    def socket(self, node):
        return f"{self.directory}/{node}.sock"

    def hold(self, trainer):
        return f"{self.directory}/hold.{trainer}"

    def add(self, process):
        self.processes[process.name] = process
        self.launch(process)

    def launch(self, process):
        path = f"{self.directory}/out/{process.name}.out"
        with open(path, "ab") as out:
            process.output_from = out.tell()
            process.child = subprocess.Popen([*process.host.prefix, *process.arguments], stdin=subprocess.DEVNULL,
                                             stdout=out, stderr=subprocess.STDOUT, cwd=f"{self.directory}/cwd")
        process.killed, process.stops = False, set()
        process.started, process.restart_at = time.monotonic(), 0.0
        process.starts += 1

    def wait_for_addresses(self, name, key):
        """Of a daemon at the run's start; later ones come back where they were."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                with open(f"{self.directory}/{name}.json") as file:
                    addresses = json.load(file)
                if key in addresses:
                    return addresses
            except (OSError, ValueError):
                pass
            time.sleep(0.01)
        raise RuntimeError(f"{name} did not come up; its output:\n{self.output(self.processes[name])}")

    # ---- who looks after it

    def look_after(self):
        """Takes note of what has ended, and starts again what ended a moment ago."""
        deaths, now = [], time.monotonic()
        for process in self.processes.values():
            if process.child is not None and process.child.poll() is not None:
                deaths.append(Death(process, now, process.pid, process.child.returncode, process.killed,
                                    self.output(process)))
                process.child, process.stops = None, set()
                process.restart_at = now + self.random.uniform(0.05, 0.5)
            elif process.child is None and not (self.ending or process.held_back) and now >= process.restart_at:
                self.launch(process)
        return deaths

    def output(self, process, limit=2000):
        with open(f"{self.directory}/out/{process.name}.out", "rb") as file:
            file.seek(process.output_from)
            return file.read()[-limit:].decode(errors="replace")

    # ---- what is done to them

    def kill(self, name, number=signal.SIGKILL):
        process = self.processes[name]
        if process.child is not None:
            process.killed = True
            process.child.send_signal(number)

    def hold_back(self, name):
        self.kill(name)
        self.processes[name].held_back = True

    def let_start(self, name):
        self.processes[name].held_back = False

    def stop(self, name, fault):
        process = self.processes[name]
        if process.child is not None:
            process.stops.add(fault)
            process.child.send_signal(signal.SIGSTOP)

    def go_on(self, name, fault):
        process = self.processes[name]
        process.stops.discard(fault)
        if process.child is not None and not process.stops:
            process.child.send_signal(signal.SIGCONT)

    def go_on_all(self):
        for process in self.processes.values():
            process.stops.clear()
            if process.child is not None:
                process.child.send_signal(signal.SIGCONT)

    # ---- what is known of them

    def named(self, role, replica=None):
        return [p for p in self.processes.values() if p.role == role and (replica is None or p.replica == replica)]

    def on_node(self, node):
        return [p for p in self.processes.values() if p.node == node]

    def ports(self, role):
        """That its processes listen at, with their hosts: (host, port)."""
        found = set()
        for process in self.named(role):
            try:
                inodes = {match[1] for fd in os.listdir(f"/proc/{process.pid}/fd")
                          if (match := re.match(r"socket:\[(\d+)\]", os.readlink(f"/proc/{process.pid}/fd/{fd}")))}
                with open(f"/proc/{process.pid}/net/tcp") as table:
                    for row in list(table)[1:]:
                        column = row.split()
                        if column[3] == "0A" and column[9] in inodes:
                            found.add((process.host, int(column[1].split(":")[1], 16)))
            except OSError:  # it has just ended
                continue
        return found

    def descriptors(self):
        counts = {}
        for process in self.processes.values():
            try:
                counts[process.name, process.pid] = len(os.listdir(f"/proc/{process.pid}/fd"))
            except OSError:
                continue
        return counts
