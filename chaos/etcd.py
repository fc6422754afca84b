"""The members of the etcd cluster that several coordinators share: processes of the job, as all others."""
import shutil

CLIENTS, PEERS = 2379, 2380  # where each has a host of its own


def program():
    """Of etcd, where it is installed."""
    return shutil.which("etcd")


def ports(seat, members):
    """Of this member: for clients, and for the others. On one host all have other ones."""
    apart = len({member.host for member in members}) > 1
    shift = 0 if apart else 10 * (1 + members.index(seat))
    return CLIENTS + shift, PEERS + shift


def endpoints(members):
    """As a coordinator's --store."""
    return "etcd:" + ",".join(f"{member.host.address()}:{ports(member, members)[0]}" for member in members)


def arguments(seat, members):
    """Of the program. Once a member has data, that says what the cluster is. It writes snapshots often, so that one
    that was away gets one; and it waits for no disk, which is shared with whatever else runs here: processes die, and
    the machine does not."""
    peers = {member.name: f"http://{member.host.address()}:{ports(member, members)[1]}" for member in members}
    clients = f"http://{seat.host.address()}:{ports(seat, members)[0]}"
    return [program(), "--name", seat.name, "--data-dir", seat.directory, "--listen-client-urls", clients,
            "--advertise-client-urls", clients, "--listen-peer-urls", peers[seat.name],
            "--initial-advertise-peer-urls", peers[seat.name],
            "--initial-cluster", ",".join(f"{name}={url}" for name, url in peers.items()),
            "--snapshot-count", "1000", "--auto-compaction-mode", "periodic", "--auto-compaction-retention", "1m",
            "--unsafe-no-fsync", "--logger", "zap", "--log-level", "warn"]
