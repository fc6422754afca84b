"""The faults of several coordinators and of the store that they share; see faults.py."""
from faults import LASTING, LONG, Skipped, kind, ruled, stop_them, touched_by
from network import Rule

OUTAGE = (0.3, 8.0)  # of the whole store, in silences


def leader_of(run):
    leader = run.leader()
    if leader is None:
        raise Skipped("nobody leads")
    return leader


def cut(source, target, ways):
    """Both ways, or `out` of the one, or `in` to it."""
    rules = [Rule("drop", source=source, target=target)] if ways != "in" else []
    return rules + ([Rule("drop", source=target, target=source)] if ways != "out" else [])


# ---- coordinators

@kind(weight=6, needs="store")
def kill_leader(run, random):
    leader = leader_of(run)
    run.job.kill(leader.name)
    yield leader.name, {leader.name}


@kind(weight=6, lasts=LONG, needs="store")
def stop_leader(run, random):
    """And it goes on when others have taken over, or when they just have not."""
    leader = leader_of(run)
    yield from stop_them(run, [leader], {leader.name})


@kind(weight=2, needs="store")
def kill_standby(run, random):
    standby = random.choice([p for p in run.job.named("coordinator") if p is not run.leader()])
    run.job.kill(standby.name)
    yield standby.name, {standby.name}


@kind(weight=2, needs="store", blocks=True)
def kill_all_coordinators(run, random):
    coordinators = run.job.named("coordinator")
    for one in coordinators:
        run.job.kill(one.name)
    yield "all", {one.name for one in coordinators}


@kind(weight=5, lasts=LONG, needs="store links")
def cut_leader(run, random):
    """From some nodes, or all, and the relay; not from the store. It may take replicas for silent that it does not
    hear; but where most of the ranks hear nothing of it, others take over, and nobody has been silent for them."""
    leader = leader_of(run)
    last = run.job.settings.replicas - 1
    ranks = {}
    for node in run.wiring.nodes:
        host = run.wiring.relay if run.job.settings.relay and node.replica == last else node.host
        ranks[host] = ranks.get(host, 0) + len(node.ranks)
    hosts = random.sample(list(ranks), random.randint(1, len(ranks)))
    ways = random.choice(["both ways", "out", "in"])
    numbers = {host.number for host in hosts}
    touched = {leader.name}
    if ways == "in" or 2 * sum(ranks[host] for host in hosts) <= sum(ranks.values()):
        touched |= touched_by(run, numbers)
    text = f"{leader.name} from {' '.join(map(run.wiring.name_of, hosts))}, {ways}"
    return (yield from ruled(run, cut({leader.host.number}, numbers, ways), text, touched))


# ---- the store

@kind(weight=4, needs="store")
def kill_etcd_member(run, random):
    victim = random.choice(run.job.named("etcd"))
    run.job.kill(victim.name)
    yield victim.name, {victim.name}


@kind(weight=4, lasts=LONG, needs="store")
def stop_etcd_member(run, random):
    victim = random.choice(run.job.named("etcd"))
    yield from stop_them(run, [victim], {victim.name})


@kind(weight=2, lasts=OUTAGE, needs="store", blocks=True)
def kill_all_etcd(run, random):
    """They come back with their data."""
    members = run.job.named("etcd")
    for member in members:
        run.job.hold_back(member.name)
    yield "all members", {member.name for member in members}
    for member in members:
        run.job.let_start(member.name)


@kind(weight=2, lasts=OUTAGE, needs="store", blocks=True)
def stop_all_etcd(run, random):
    members = run.job.named("etcd")
    yield from stop_them(run, members, {member.name for member in members})


@kind(weight=5, lasts=LONG, needs="store links")
def cut_etcd(run, random):
    """A coordinator's way to the store, or a member's to all."""
    ways = random.choice(["both ways", "out", "in"])
    seat = random.choice(run.wiring.seats())
    others = set()
    if seat in run.wiring.coordinators:
        leader = run.leader()
        if leader is not None and random.random() < 0.5:
            seat = next(one for one in run.wiring.coordinators if one.name == leader.name)
        others = {member.host.number for member in run.wiring.members}
    text = f"{seat.name} from {'the store' if others else 'all'}, {ways}"
    return (yield from ruled(run, cut({seat.host.number}, others, ways), text, {seat.name}))


@kind(weight=2, lasts=LONG, needs="store links")
def slow_etcd(run, random):
    """All that its members say, to each other and to coordinators, comes late."""
    delay = 2e-3 * 75 ** random.random()
    rules = [Rule("delay", source={member.host.number for member in run.wiring.members}, seconds=delay)]
    return (yield from ruled(run, rules, f"by {1e3 * delay:.0f} ms", {member.name for member in run.wiring.members}))


@kind(weight=2, lasts=LASTING, needs="store disk")
def freeze_etcd_disk(run, random):
    """A member's disk is slow: whoever writes or syncs waits."""
    seat = random.choice(run.wiring.members)
    seat.disk.freeze()
    yield f"{seat.name}'s", {seat.name}
    seat.disk.thaw()
