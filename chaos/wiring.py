"""Where the job runs: which process on which host, over which links, with its log on which disk."""
import os
import subprocess
import time
from dataclasses import dataclass

import network

DISK_BYTES = 48 << 20


@dataclass
class Node:
    name: str
    replica: int
    ranks: list
    host: object


class Disk:
    """A small file system for the coordinator's log: ext4 on a loop device, which can be frozen; otherwise in memory.
    Mounted in the runner's own mount namespace, so that it is gone with the runner."""

    def __init__(self, directory):
        self.path = f"{directory}/disk"
        os.makedirs(self.path)
        self.thawer = None
        image = f"{directory}/disk.img"
        with open(image, "wb") as file:
            file.truncate(DISK_BYTES)
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.freezes = (os.path.exists("/dev/loop-control")
                        and subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], **quiet).returncode == 0
                        and subprocess.run(["mount", "-o", "loop", image, self.path], **quiet).returncode == 0)
        if not self.freezes:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "chaos", self.path], check=True)

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
        self.settings = settings
        self.rails = 2 if settings.transport == "rails" else 1
        self.shared = settings.transport == "shm"  # all replicas on one host
        self.switch = self.disk = self.relay = None
        self.log_directory = f"{directory}/log"
        if settings.confined:
            self.control = network.Host(100, self.rails)
            self.stranger = network.Host(200, self.rails)
            self.hosts = [self.control]
            if settings.relay:
                self.relay = network.Host(101, self.rails)
                self.hosts.append(self.relay)
            self.disk = Disk(directory)
            self.log_directory = f"{self.disk.path}/log"
        else:
            self.control = self.stranger = self.relay = network.Here()
            self.hosts = [self.control]
        self.nodes = list(self.make_nodes())
        for node in self.nodes:
            if node.host not in self.hosts:
                self.hosts.append(node.host)
        if settings.confined:
            self.switch = network.Switch([*self.hosts, self.stranger], seed)
            self.switch.start()

    def make_nodes(self):
        """A node for each replica; the first replica is on two, a rank on each, if it has so many."""
        shared = (network.Host(1, self.rails) if self.settings.confined else self.control) if self.shared else None
        number = 1
        for replica in range(self.settings.replicas):
            ranks = list(range(self.settings.ranks))
            parts = [ranks[:1], ranks[1:]] if replica == 0 and len(ranks) > 1 else [ranks]
            for part in parts:
                host = shared or (network.Host(number, self.rails) if self.settings.confined else self.control)
                yield Node(f"node{number}", replica, part, host)
                number += 1

    def transport(self, host):
        if self.shared:
            return "shm"
        if self.rails == 1:
            return "tcp"
        return "tcp:" + ",".join(host.address(rail) for rail in range(self.rails))

    def has(self, need):
        """Whether a fault that needs this can strike here."""
        return {None: True, "relay": self.settings.relay, "links": self.switch is not None,
                "data links": self.switch is not None and not self.shared, "rails": self.rails > 1,
                "one data path": self.switch is not None and not self.shared and self.rails == 1,
                "disk": self.disk is not None, "freezing disk": self.disk is not None and self.disk.freezes}[need]

    def name_of(self, host):
        if host is self.control:
            return "the coordinator's host"
        if host is self.relay:
            return "the relay's host"
        return "+".join(node.name for node in self.nodes if node.host is host)
