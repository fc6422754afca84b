"""The demo over several VMs as nodes in two rooms, two RoCE rails between them; one node loses power and comes back."""
import json
import os
import queue
import re
import subprocess
import threading
import time

import rig
from switch import Switch

TRANSPORT = "ibverbs:rxe0,rxe1"
KEY = "0123456789abcdef0123456789abcdef"
RANKS = 2
STANDSTILL = 20  # seconds without a step, after which all nodes are asked what they see
QUESTION = ("uptime; tail -n 5 *.out; cat /proc/net/dev; rdma link; rdma res show qp; netstat -tn; dmesg | tail -n 15; "
            "grep -H . /sys/class/net/eth*/queues/tx-*/tx_timeout; ps -o pid,stat,wchan,comm")

NO_NETWORK = "no ping comes through"


def location(node):
    return f"dc/room{node % 2}/node{node}"


def job(node, nodes, params, silence):
    """The shell script of one node: its daemon, its replica's trainers, and with the first the coordinator."""
    common = f"--job-key-file key --silence-ms {silence} --events ev"
    # told WHO PROGRAM ARGS…: runs a program and shows its events. Its file (base/events.h) is there, and followed, before
    # it starts: a process that replaces the shell keeps its pid.
    lines = ["cd /tmp", f"printf {KEY} >key", "chmod 600 key", "mkdir ev", "cat >told <<'END'", "file=ev/$1.$$.jsonl", ": >$file",
             "tail -n +1 -f $file | awk '/\"(progress|digest|catch_up|catch_up_started|promoted|failed|entered)\"/ "
             "{ print \"vm-event \" $0; fflush() }' >/dev/ttyS0 &", "shift", 'exec "$@"', "END"]
    if node == 0:
        lines.append(f"sh told coordinator rejoind --coordinator --listen 10.77.0.1:7000 --log-directory log --replicas {nodes} "
                     f"--ranks {RANKS} --batch 8 {common} >coordinator.out 2>&1 &")
    lines.append(f"sh told node{node} rejoind --name node{node} --socket /tmp/sock --connect 10.77.0.1:7000 --transport {TRANSPORT} "
                 f"--location {location(node)} {common} --address-file node.json >node.out 2>&1 &")
    lines.append("until [ -e node.json ]; do usleep 20000; done")
    for rank in range(RANKS):
        lines.append(f"( for life in 1 2 3; do sh told r{node}.{rank} rejoin-demo-trainer --replica {node} --rank {rank} "
                     f"--socket /tmp/sock --transport {TRANSPORT} --data /data.txt --params {params} --digest-every 10 --events ev; "
                     "[ $? -eq 3 ] || break; done; echo \"vm-trainer-ended $?\" ) 2>&1 &")
    if os.environ.get("VM_DEBUG"):
        lines.append("( sleep 1; tail -n +1 -f node.out ) | awk '{ print \"vm-log \" $0; fflush() }' &")
    # What the rig asks for, line by line, until the power goes.
    lines.append('while read -r line; do eval "$line" 2>&1 | sed "s/^/vm-answer /"; done </dev/ttyS0')
    return "\n".join(lines) + "\n"


def follows_locations(nodes, tell):
    """Whether the ring enters each room once, as status tells. Tells from whom who came back has fetched, too, which is its
    own room, unless that takes long to connect on a busy machine. Nobody else has fetched anything so far."""
    questions = {vm.number: (vm, "rejoin status 127.0.0.1:7002 | grep 'served to joiners'",
                             re.compile(rf"vm-answer node{vm.number}: .*, (.*) served to joiners")) for vm in nodes}
    questions["order"] = (nodes[0], "rejoin status 127.0.0.1:7001 | grep -o 'dc/room.*' | tr '\\n' ' '; echo in the order of the ring",
                          re.compile("vm-answer (.*) in the order of the ring"))
    told = {}
    for _ in range(6):  # a console loses parts
        for key, (vm, question, _) in questions.items():
            if key not in told:
                vm.ask(question)
        deadline = time.monotonic() + 10
        while len(told) < len(questions) and time.monotonic() < deadline:
            for key, (vm, _, answer) in questions.items():
                told |= {key: match[1] for match in map(answer.search, vm.lines) if match}
            time.sleep(0.1)
    expected = " ".join(location(n) for n in sorted((vm.number for vm in nodes), key=lambda n: (n % 2, n)))
    order = told.get("order")
    tell(f"the ring's order: {order}; node {nodes[-1].number} fetched " +
         " and ".join(f"{told.get(vm.number, 'nobody knows what')} from node {vm.number}" for vm in nodes[:-1]))
    if order != expected:
        tell(f"expected was the order {expected}")
    return order == expected


class Node:
    def __init__(self, number, script, switches, programs, events):
        network = []
        for rail, switch in enumerate(switches):
            network += ["-netdev", f"socket,id=rail{rail},connect=127.0.0.1:{switch.port}", "-device",
                        f"virtio-net-pci,netdev=rail{rail},mac=52:54:00:0{rail}:00:{number:02x},host_mtu=9000"]
        command, self.image = rig.prepare(script, programs, node=number, network=network, memory=1024,
                                       files=[(rig.ROOT / "data" / "shakespeare.txt", "/data.txt")])
        self.number, self.lines = number, []
        self.machine = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                        text=True, errors="replace")
        self.reader = threading.Thread(target=self.read, args=(events,), daemon=True)
        self.reader.start()

    def read(self, events):
        for line in self.machine.stdout:
            line = line.rstrip("\r\n")
            self.lines.append(line)
            match = re.match(r"vm-event (\{.*\})$", line)
            if match:
                try:
                    events.put((time.monotonic(), self.number, json.loads(match[1])))
                except json.JSONDecodeError:
                    pass  # the console lost a part of it
            elif line.startswith(("vm: up", "vm-trainer", "trainer:", "vm-log", "vm-answer")):
                events.put((time.monotonic(), self.number, {"kind": "console", "line": line}))

    def ask(self, question):
        """Lets the node's shell run this; read() collects what it answers."""
        try:
            self.machine.stdin.write(question + "\n")
            self.machine.stdin.flush()
        except OSError as error:
            self.lines.append(f"vm-answer no question can be put to it: {error}")

    def power_off(self):
        self.machine.kill()
        self.machine.wait()
        os.unlink(self.image)


def run(nodes=3, params=20000, limit=420):
    """Gives the exit status. A network of the emulator's that has stopped by itself judges nobody: all is booted anew."""
    for again in (True, True, False):
        status = play(nodes, params, limit)
        if status is not None:
            return status
        print("vm: the emulated network stood still, not what is tested on it" + ("; once more" if again else ""), flush=True)
    return 1


def play(nodes, params, limit, kill_at=15, silence=4000):
    names = ["rejoind", "rejoin-demo-trainer", "rejoin"]
    programs = [rig.BIN / name for name in names]
    switches = [Switch(), Switch()]
    events = queue.Queue()
    started = time.monotonic()
    scripts = [job(n, nodes, params, silence) for n in range(nodes)]
    vms = [Node(n, scripts[n], switches, programs, events) for n in range(nodes)]
    victim, killed_at, promoted_at, resumed_at, back_at, entered_at = nodes - 1, None, None, None, None, None
    digests, last, wire = {}, {}, 0  # version → who → digest; node → step
    proven, different = [], []       # versions that all ranks have told, after the node came back
    moved = {}                       # node → when it was started, had its last step, or was asked about that

    def log(text):
        print(f"{time.monotonic() - started:7.1f} s  {text}", flush=True)

    def ask_who_stands_still():
        now = time.monotonic()
        still = [n for n in moved if now - moved[n] > STANDSTILL]
        if not still:
            return
        log(f"nodes {still} have had no step for {STANDSTILL} s; every node is asked what it sees")
        running = [vm.number for vm in vms if vm.number != victim or promoted_at or not killed_at]
        for vm in vms:
            moved[vm.number] = now + 4 * STANDSTILL
            vm.ask(QUESTION)
            if vm.number not in running:
                continue
            for rail in range(len(switches)):
                for other in running:
                    address = f"10.77.{rail}.{other + 1}"
                    vm.ask(f"ping -c 3 -W 5 {address} >/dev/null || echo {NO_NETWORK} to {address}")

    log(f"{nodes} VMs are starting, each a node with a replica of {RANKS} ranks and two RoCE rails")
    try:
        while len(proven) < 2 and not different:
            if time.monotonic() - started > limit:
                log(f"not done after {limit} s")
                break
            if killed_at:
                ask_who_stands_still()
            try:
                at, node, event = events.get(timeout=1)
            except queue.Empty:
                continue
            kind = event["kind"]
            if kind == "console":
                log(f"node {node}: {event['line']}")
                if NO_NETWORK in event["line"]:
                    return None
            elif kind == "digest":
                told = digests.setdefault(event["version"], {})
                told[event["who"]] = event["digest"]
                for rank in range(RANKS):
                    if len({d for who, d in told.items() if who.endswith(f".{rank}")}) > 1:
                        different.append(event["version"])
                if promoted_at is not None and len(told) == nodes * RANKS:
                    proven.append(event["version"])
                    log(f"version {event['version']}: " + ", ".join(f"{who} {told[who]}" for who in sorted(told)))
            elif kind == "progress":
                step = event["step"]
                if step > last.get(node, 0):
                    last[node], moved[node] = step, time.monotonic()
                    if step % (10 if step < 100 else 100) == 0:
                        log(f"node {node}: step {step}, loss {event['loss']:.3f}" if event["loss"] >= 0 else f"node {node}: step {step}")
                if killed_at is None and node == 0 and step >= kill_at:
                    vms[victim].power_off()
                    killed_at = time.monotonic()
                    moved.pop(victim, None)
                    log(f"node {victim}: power cut (its QEMU was killed) after step {step}")
                elif entered_at and resumed_at is None and node == 0:
                    resumed_at = at
                    log(f"the others go on: step {step} committed {at - killed_at:.2f} s after the power cut "
                        f"(silence allowed: {silence / 1000:.1f} s)")
                    vms[victim] = Node(victim, scripts[victim], switches, programs, events)
                    moved[victim] = time.monotonic() + STANDSTILL  # it has to boot
                    log(f"node {victim}: power on")
            elif kind == "entered" and killed_at and node == 0 and entered_at is None:
                entered_at = at
            elif kind == "catch_up_started" and back_at is None:
                back_at = at
                log(f"node {node}: replica {event['replica']} catches up, from step {event['step']}")
            elif kind == "catch_up":
                wire = event["bytes"]
                if os.environ.get("VM_DEBUG"):
                    log(f"node {node}: {event}")
            elif kind == "promoted" and promoted_at is None:
                promoted_at = at
                log(f"node {node}: replica {event['replica']} contributes again from step {event['step']}; "
                    f"{wire / 1e6:.1f} MB of state a rank received over verbs while the others trained on")
        good = len(proven) >= 2 and not different
        log("same bits on all nodes, one of which lost power in between" if good
            else f"different bits at version {different[0]}" if different else "it did not come back in time")
        good = good and follows_locations(vms, log)
        if not good:
            for vm in vms:
                print(f"---- node {vm.number}, the end of its console:")
                print("\n".join(line for line in vm.lines[-25:]))
        return 0 if good else 1
    finally:
        for vm in vms:
            if vm.machine.poll() is None:
                vm.power_off()
