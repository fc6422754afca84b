"""The faults. Each is a generator: up to its first yield it strikes, and yields what it did and whom it concerns
(a coordinator's or an etcd member's name, or a replica's number): from those nobody expects anything until it is over.
What follows mends it, and gives how many frames it has met, where it is one of a link.
All chance comes from the `random` it is given, of which every fault has its own."""
import os
import socket
import struct

from network import Rule

KINDS = {}  # name → Kind


class Skipped(Exception):
    """It can't be done here and now, and why."""


# How long a fault lasts, in silences; short ones as often as long ones.
LONG, LASTING, SHORT = (0.001, 5.0), (0.3, 5.0), (0.01, 0.1)


class Kind:
    def __init__(self, strike, weight, lasts, needs, blocks):
        self.name, self.strike, self.weight, self.lasts, self.needs = strike.__name__, strike, weight, lasts, needs
        self.blocks = blocks  # while it lasts the job may stand still: recovery is counted from its end


def kind(weight, lasts=None, needs=None, blocks=False):
    def register(strike):
        KINDS[strike.__name__] = Kind(strike, weight, lasts, needs, blocks)
        return strike
    return register


# ---- processes

def kill_trainers(run, trainers):
    """At once, but never the last who have the committed state: that is a fault of its own."""
    replicas = {t.replica for t in trainers}
    if not set(run.checker.holders()) - replicas:
        raise Skipped(f"replicas {sorted(replicas)} are the last to hold the committed state")
    for trainer in trainers:
        run.job.kill(trainer.name)
    return replicas


@kind(weight=4)
def kill_rank(run, random):
    victim = random.choice(run.job.named("trainer"))
    yield f"{victim.name}", kill_trainers(run, [victim])


@kind(weight=2)
def kill_ranks(run, random):
    """Several, of any replicas, at once."""
    trainers = run.job.named("trainer")
    victims = random.sample(trainers, random.randint(2, len(trainers) - 1))
    yield " ".join(v.name for v in victims), kill_trainers(run, victims)


@kind(weight=2)
def kill_node(run, random):
    """A node loses power: its daemon and all its trainers."""
    node = random.choice(run.wiring.nodes)
    touched = kill_trainers(run, [p for p in run.job.on_node(node.name) if p.role == "trainer"])
    run.job.kill(node.name)
    yield node.name, touched


@kind(weight=2)
def kill_all_but_one(run, random):
    holders = run.checker.holders()
    if not holders:
        raise Skipped("nobody surely holds the committed state")
    kept = random.choice(holders)
    yield f"all replicas but {kept}", kill_trainers(
        run, [t for t in run.job.named("trainer") if t.replica != kept])


@kind(weight=2)
def kill_two_replicas(run, random):
    """All ranks of two replicas at once: they come back together, and catch up from each other, too."""
    trainers = run.job.named("trainer")
    two = random.sample(sorted({t.replica for t in trainers}), 2)
    yield f"replicas {two[0]} and {two[1]}", kill_trainers(run, [t for t in trainers if t.replica in two])


@kind(weight=3)
def kill_daemon(run, random):
    victim = random.choice(run.job.named("daemon"))
    run.job.kill(victim.name)
    yield victim.name, {victim.replica}


@kind(weight=2, needs="relay")
def kill_relay(run, random):
    run.job.kill("relay")
    yield "relay", {run.job.settings.replicas - 1}


@kind(weight=3, blocks=True)
def kill_coordinator(run, random):
    victim = random.choice(run.job.named("coordinator"))
    run.job.kill(victim.name)
    yield victim.name, {victim.name}


@kind(weight=1, blocks=True)
def kill_everybody(run, random):
    """All trainers: the state is truly lost. The runner then says, as its operator, that the job may start afresh."""
    if run.checker.committed == 0:
        raise Skipped("nothing has been committed")
    for trainer in run.job.named("trainer"):
        run.job.kill(trainer.name)
    yield "all trainers", set(range(run.job.settings.replicas))


def stop_them(run, processes, touched):
    fault = object()
    for process in processes:
        run.job.stop(process.name, fault)
    yield " ".join(p.name for p in processes), touched
    for process in processes:
        run.job.go_on(process.name, fault)


@kind(weight=4, lasts=LONG)
def stop_rank(run, random):
    victim = random.choice(run.job.named("trainer"))
    yield from stop_them(run, [victim], {victim.replica})


@kind(weight=2, lasts=LONG)
def stop_ranks(run, random):
    trainers = run.job.named("trainer")
    victims = random.sample(trainers, random.randint(2, len(trainers)))
    yield from stop_them(run, victims, {v.replica for v in victims})


@kind(weight=2, lasts=LONG)
def stop_node(run, random):
    node = random.choice(run.wiring.nodes)
    yield from stop_them(run, run.job.on_node(node.name), {node.replica})


@kind(weight=3, lasts=LONG)
def stop_daemon(run, random):
    victim = random.choice(run.job.named("daemon"))
    yield from stop_them(run, [victim], {victim.replica})


@kind(weight=1, lasts=LONG, needs="relay")
def stop_relay(run, random):
    yield from stop_them(run, run.job.named("relay"), {run.job.settings.replicas - 1})


@kind(weight=4, lasts=LONG, blocks=True)
def stop_coordinator(run, random):
    victim = random.choice(run.job.named("coordinator"))
    yield from stop_them(run, [victim], {victim.name})


@kind(weight=3, lasts=LONG, blocks=True)
def stop_everything(run, random):
    """A suspended machine, a laptop's lid."""
    yield from stop_them(run, list(run.job.processes.values()),
                         {*run.job.processes, *range(run.job.settings.replicas)})


@kind(weight=2, lasts=LONG)
def hang_rank(run, random):
    """It computes and computes; its progress thread and its daemon are well."""
    victim = random.choice(run.job.named("trainer"))
    path = run.job.hold(victim.name)
    open(path, "w").close()
    yield victim.name, {victim.replica}
    if os.path.exists(path):
        os.remove(path)


# ---- links

def touched_by(run, numbers):
    touched = {node.replica for node in run.wiring.nodes if node.host.number in numbers}
    touched |= {seat.name for seat in run.wiring.seats() if seat.host.number in numbers}
    if run.wiring.relay is not None and run.wiring.relay.number in numbers:
        touched.add(run.job.settings.replicas - 1)
    return touched


def ruled(run, rules, text, touched):
    for rule in rules:
        run.switch.add(rule)
    yield text, touched
    for rule in rules:
        run.switch.remove(rule)
    struck = sum(rule.struck for rule in rules)
    run.log(f"    that struck {struck} frames")
    return struck


@kind(weight=4, lasts=LONG, needs="links")
def cut_host(run, random):
    """Both ways, or one of them."""
    host = random.choice(run.wiring.hosts)
    ways = random.choice(["both ways", "out", "in"])
    rules = []
    if ways != "in":
        rules.append(Rule("drop", source={host.number}))
    if ways != "out":
        rules.append(Rule("drop", target={host.number}))
    return (yield from ruled(run, rules, f"{run.wiring.name_of(host)}, {ways}", touched_by(run, {host.number})))


@kind(weight=3, lasts=LONG, needs="links")
def cut_pair(run, random):
    """Between two hosts only, both ways or one."""
    one, other = random.sample(run.wiring.hosts, 2)
    rules = [Rule("drop", source={one.number}, target={other.number})]
    both = random.random() < 0.5
    if both:
        rules.append(Rule("drop", source={other.number}, target={one.number}))
    text = f"{run.wiring.name_of(one)} {'<>' if both else '>'} {run.wiring.name_of(other)}"
    return (yield from ruled(run, rules, text, touched_by(run, {one.number, other.number})))


@kind(weight=2, lasts=LONG, needs="links")
def link_down(run, random):
    """`ip link set down`: the host itself sees it."""
    host = random.choice(run.wiring.hosts)
    rail = random.randrange(len(host.taps))
    host.ip("link", "set", f"eth{rail}", "down")
    yield f"{run.wiring.name_of(host)} eth{rail}", touched_by(run, {host.number})
    host.ip("link", "set", f"eth{rail}", "up")


@kind(weight=4, lasts=LONG, needs="rails")
def cut_rail(run, random):
    """The data rail that nothing else goes over: nobody is to suffer."""
    rules = [Rule("drop", rails={1})]
    text = "rail 1 everywhere"
    if random.random() < 0.7:
        host = random.choice([node.host for node in run.wiring.nodes])
        rules, text = [Rule("drop", rails={1}, source={host.number})], f"rail 1 of {run.wiring.name_of(host)}, out"
    return (yield from ruled(run, rules, text, set()))


@kind(weight=3, lasts=SHORT, needs="rails")
def reset_rail(run, random):
    """Connections of that rail are reset, with whatever was under way on them."""
    rules = [Rule("reset", rails={1}, probability=10 ** random.uniform(-1.5, 0))]
    return (yield from ruled(run, rules, "rail 1 everywhere", set()))


@kind(weight=3, lasts=LONG, needs="links")
def slow_link(run, random):
    host = random.choice(run.wiring.hosts)
    delay = 1e-3 * 30 ** random.random()
    text = f"{run.wiring.name_of(host)} by {1e3 * delay:.1f} ms"
    rules = [Rule("delay", source={host.number}, seconds=delay)]
    return (yield from ruled(run, rules, text, touched_by(run, {host.number})))


@kind(weight=2, lasts=LONG, needs="links")
def lossy_link(run, random):
    host = random.choice(run.wiring.hosts)
    part = random.uniform(0.01, 0.2)
    text = f"{run.wiring.name_of(host)} loses {100 * part:.0f} %"
    rules = [Rule("drop", source={host.number}, probability=part)]
    return (yield from ruled(run, rules, text, touched_by(run, {host.number})))


def tcp_rule(run, random, action, role):
    """A rule for connections to what processes of this role listen at."""
    ports = {port for _, port in run.job.ports(role)}
    if not ports:
        raise Skipped(f"no {role} listens")
    part = 1.0 if action == "reset" else 10 ** random.uniform(-2, 0)
    return [Rule(action, ports=ports, probability=part)], f"{role}s' ports {sorted(ports)}, {100 * part:.0f} %"


@kind(weight=3, lasts=SHORT, needs="links")
def reset_host(run, random):
    """Whatever connection of a host says something is reset."""
    host = random.choice(run.wiring.hosts)
    rules = [Rule("reset", source={host.number}), Rule("reset", target={host.number})]
    return (yield from ruled(run, rules, run.wiring.name_of(host), touched_by(run, {host.number})))


@kind(weight=2, lasts=SHORT, needs="data links")
def reset_all_reduce(run, random):
    rules, text = tcp_rule(run, random, "reset", "trainer")
    return (yield from ruled(run, rules, text, set(range(run.job.settings.replicas))))


@kind(weight=3, lasts=LASTING, needs="one data path")
def corrupt_stream(run, random):
    """Bits of the catch-up stream flip, while a replica that has lost a rank catches up."""
    rules, text = tcp_rule(run, random, "corrupt", "daemon")
    victim = random.choice(run.job.named("trainer"))
    touched = kill_trainers(run, [victim])
    return (yield from ruled(run, rules, f"{victim.name} killed; {text}", touched))


@kind(weight=2, lasts=LONG, needs="data links")
def corrupt_all_reduce(run, random):
    rules, text = tcp_rule(run, random, "corrupt", "trainer")
    return (yield from ruled(run, rules, text, set(range(run.job.settings.replicas))))


@kind(weight=2, lasts=LONG, needs="links", blocks=True)
def corrupt_control(run, random):
    """Of all coordinators, so that they hear from nobody what is to be heard."""
    rules, text = tcp_rule(run, random, "corrupt", "coordinator")
    touched = {seat.name for seat in run.wiring.coordinators}
    return (yield from ruled(run, rules, text, touched | set(range(run.job.settings.replicas))))


# ---- disks

def touched_by_disk(run, seat):
    """One of several coordinators has a copy there, and nobody waits for that."""
    return set() if run.job.settings.several else {seat.name}


@kind(weight=2, lasts=LASTING, needs="disk", blocks=True)
def fill_disk(run, random):
    """The log's. The coordinator ends, and comes up again when there is room; one of several goes on."""
    seat = random.choice(run.wiring.coordinators)
    ballast = f"{seat.disk.path}/ballast{len(run.records)}"
    with open(ballast, "wb", buffering=0) as file:
        size = 1 << 20
        while size >= 1:
            try:
                if file.write(b"\1" * size) < size:
                    size //= 2
            except OSError:
                size //= 2
    yield f"{seat.name}'s", touched_by_disk(run, seat)
    os.remove(ballast)


@kind(weight=2, lasts=LASTING, needs="freezing disk", blocks=True)
def freeze_disk(run, random):
    """The log's: whoever writes or syncs waits."""
    seat = random.choice(run.wiring.coordinators)
    seat.disk.freeze()
    yield f"{seat.name}'s", touched_by_disk(run, seat)
    seat.disk.thaw()


# ---- strangers

@kind(weight=3, lasts=LONG)
def strangers(run, random):
    """Connections from nowhere: garbage, half a frame, silence; at every port that anyone listens at."""
    places = sorted({(host.address(), port) for role in ("coordinator", "relay", "daemon", "trainer")
                     for host, port in run.job.ports(role)})
    host = run.wiring.stranger
    held = []
    for address, port in places:
        for said in (random.randbytes(random.randint(1, 4096)), struct.pack("<I", 24) + b"rejoin control 2" + b"\0" * 8,
                     struct.pack("<I", 0xFFFFFFF0), b"GET /status HTTP/1.1\r\n", b""):
            try:
                held.append(host.run(lambda: send_to(address, port, said)))
            except OSError:  # refused, or cut off by another fault
                pass
    yield f"{len(held)} connections to {len(places)} ports", set()
    for connection in held:
        connection.close()


def send_to(address, port, said):
    connection = socket.create_connection((address, port), timeout=0.2)
    try:
        connection.sendall(said)
    except OSError:  # hung up on: as it should be
        pass
    return connection


@kind(weight=2)
def garbage_to_socket(run, random):
    """A local process says nonsense to a daemon's socket."""
    node = random.choice(run.wiring.nodes)
    for _ in range(8):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            try:
                connection.settimeout(0.2)
                connection.connect(run.job.socket(node.name))
                connection.send(random.randbytes(random.randint(1, 3000)))
            except OSError:
                pass
    yield node.name, set()
