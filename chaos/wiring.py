"""Where the job runs: which process on which host, over which links, with its log or its data on which disk."""
import os
import subprocess
import time
from dataclasses import dataclass

import network

LOG_BYTES, STORE_BYTES = 48 << 20, 256 << 20  # of the disks; etcd asks for 64 MiB at once
COORDINATORS, MEMBERS = 3, 3  # where there are several


@dataclass
class Node:
    name: str
    replica: int
    ranks: list
    host: object


@dataclass
class Seat:
    """Of a coordinator, with its log; or of one of etcd's members, with its data."""
    name: str
    host: object
    disk: object
    directory: str


class Disk:
    """A small file system for the coordinator's log: ext4 on a loop device, which can be frozen; otherwise in memory.
    Mounted in the runner's own mount namespace, so that it is gone with the runner."""

    def __init__(self, path, size):
        self.path = path
        os.makedirs(self.path)
        self.thawer = None
        image = f"{path}.img"
        with open(image, "wb") as file:
            file.truncate(size)
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.freezes = (os.path.exists("/dev/loop-control")
                        and subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], **quiet).returncode == 0
                        and subprocess.run(["mount", "-o", "loop", image, self.path], **quiet).returncode == 0)
        if not self.freezes:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "chaos", self.path], check=True)

    def freeze(self):
        if self.thawer is not None:
            return
        # What thaws it is not the runner, who may wait for the frozen disk himself when it is being filled: nor can
        # one who waits so be killed. So it thaws after 3 s in any case.
        wait = f"fsfreeze -f {self.path} && timeout 3 sh -c 'read -r _'; fsfreeze -u {self.path}"
        self.thawer = subprocess.Popen(["sh", "-c", wait],
                                       stdin=subprocess.PIPE, start_new_session=True)
        time.sleep(0.01)

    def thaw(self):
        thawer, self.thawer = self.thawer, None
        if thawer is not None:
            thawer.communicate(b"\n")

    def unmount(self):
        subprocess.run(["umount", self.path], check=False)


class Wiring:
    def __init__(self, settings, directory, seed):
        self.settings, self.directory = settings, directory
        self.rails = 2 if settings.transport == "rails" else 1
        self.shared = settings.transport == "shm"  # all replicas on one host
        self.switch = None
        self.stranger = network.Host(200, self.rails) if settings.confined else network.Here()
        self.relay = self.stranger
        if settings.confined:
            self.relay = network.Host(101, self.rails) if settings.relay else None
        if settings.several:
            self.coordinators = [self.seat(f"coordinator{i}", 110 + i, "log", LOG_BYTES) for i in range(COORDINATORS)]
            self.members = [self.seat(f"etcd{i}", 120 + i, "data", STORE_BYTES) for i in range(MEMBERS)]
        else:
            self.coordinators, self.members = [self.seat("coordinator", 100, "log", LOG_BYTES)], []
        self.hosts = [self.coordinators[0].host]
        self.nodes = list(self.make_nodes())
        for host in (self.relay, *(node.host for node in self.nodes), *(seat.host for seat in self.seats())):
            if host is not None and host not in self.hosts:
                self.hosts.append(host)
        if settings.confined:
            self.switch = network.Switch([*self.hosts, self.stranger], seed)
            self.switch.start()

    def seats(self):
        return [*self.coordinators, *self.members]

    def seat(self, name, number, what, size):
        """With a disk of its own, which fills up and freezes without the runner's."""
        if not self.settings.confined:
            return Seat(name, self.stranger, None, f"{self.directory}/{name}.{what}")
        disk = Disk(f"{self.directory}/{name}.disk", size)
        return Seat(name, network.Host(number, self.rails), disk, f"{disk.path}/{what}")

    def make_nodes(self):
        """A node for each replica; the first replica is on two, a rank on each, if it has so many."""
        shared = (network.Host(1, self.rails) if self.settings.confined else self.stranger) if self.shared else None
        number = 1
        for replica in range(self.settings.replicas):
            ranks = list(range(self.settings.ranks))
            parts = [ranks[:1], ranks[1:]] if replica == 0 and len(ranks) > 1 else [ranks]
            for part in parts:
                host = shared or (network.Host(number, self.rails) if self.settings.confined else self.stranger)
                yield Node(f"node{number}", replica, part, host)
                number += 1

    def transport(self, host):
        if self.shared:
            return "shm"
        addresses = ":" + ",".join(host.address(rail) for rail in range(self.rails)) if self.rails > 1 else ""
        threads = f";threads={self.settings.threads}" if self.settings.threads else ""  # older programs know none
        return f"tcp{addresses}{threads}"

    def has(self, need):
        """Whether a fault that needs this can strike here."""
        links, disk = self.switch is not None, self.coordinators[0].disk
        return {None: True, "relay": self.settings.relay, "links": links, "data links": links and not self.shared,
                "rails": self.rails > 1, "one data path": links and not self.shared and self.rails == 1,
                "disk": disk is not None, "freezing disk": disk is not None and disk.freezes,
                "store": self.settings.several, "store links": self.settings.several and links,
                "store disk": self.settings.several and disk is not None and disk.freezes}[need]

    def name_of(self, host):
        if host is self.relay:
            return "the relay's host"
        names = [seat.name for seat in self.seats() if seat.host is host]
        if names:
            return f"{names[0]}'s host" if self.settings.several else "the coordinator's host"
        return "+".join(node.name for node in self.nodes if node.host is host)
