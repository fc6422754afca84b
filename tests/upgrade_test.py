#!/usr/bin/env python3
"""A rolling upgrade of a real job, from the last revision of an older protocol to this one: every process is exchanged
for the newer one under load, a few go back, and at last all are of this release. It is a chaos run (chaos/README.md)
in which nothing fails: what must hold there must hold here, and nobody loses a step or a sample."""
import argparse
import ctypes
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

SOURCE = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(SOURCE / "chaos"))

import etcd  # noqa: E402
import run as chaos  # noqa: E402

TARGETS = ("rejoind", "rejoin_cli", "rejoin-chaos-trainer")
NUMBER = re.compile(r"kProtocolVersion = (\d+)")
PLACES = ("membership/versions.h", "membership/node.h")  # where the number is, now and once
STEPS = 8  # that are committed in each state of the job, at least


def git(*arguments):
    return subprocess.run(["git", *arguments], cwd=SOURCE, check=True, capture_output=True, text=True).stdout.strip()


def protocol_of(revision):
    """Of a revision; without one, of the files as they are."""
    for place in PLACES:
        if revision is None:
            text = (SOURCE / place).read_text() if (SOURCE / place).exists() else ""
        else:
            shown = subprocess.run(["git", "show", f"{revision}:{place}"], cwd=SOURCE, capture_output=True, text=True)
            text = shown.stdout
        if found := NUMBER.search(text):
            return int(found[1])
    raise SystemExit(f"upgrade-test: no protocol number in {' or '.join(PLACES)} of {revision or 'this tree'}")


def last_older():
    """The last revision with a lower number: the one before the first that has this one's."""
    current = protocol_of(None)
    first = None
    for revision in git("log", "--format=%H", "--", *PLACES).split():
        if protocol_of(revision) < current:
            return git("rev-parse", f"{first}^") if first else git("rev-parse", "HEAD")
        first = revision
    raise SystemExit(f"upgrade-test: no revision here has a protocol before {current}; name one, in a whole clone")


def build(revision):
    """What this revision's processes need, beside this tree's build."""
    directory = SOURCE / "build/upgrade" / revision[:12]
    if not (directory / "CMakeLists.txt").exists():
        directory.mkdir(parents=True, exist_ok=True)
        archive = subprocess.Popen(["git", "archive", revision], cwd=SOURCE, stdout=subprocess.PIPE)
        subprocess.run(["tar", "x", "-C", directory], stdin=archive.stdout, check=True)
        if archive.wait() != 0:
            raise SystemExit(f"upgrade-test: git has no revision {revision}")
    environment = {**os.environ, "CCACHE_BASEDIR": str(directory), "CCACHE_NOHASHDIR": "1"}
    print(f"upgrade-test: building {revision[:12]} in {directory}, which takes minutes the first time", flush=True)
    for command in (["cmake", "--preset", "release"],
                    ["cmake", "--build", "--preset", "release", "--target", *TARGETS]):
        made = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
        if made.returncode != 0:
            raise SystemExit(made.stdout + made.stderr)
    return directory / "build/release/bin"


class Upgrade(chaos.Run):
    """The job, whose processes are exchanged one after the other."""

    def __init__(self, settings, directory, older, newer):
        settings.binaries = str(older)
        super().__init__(settings, directory, until=0)
        self.older, self.newer = str(older), str(newer)

    # ---- one process, or all trainers of a replica, is exchanged

    def exchange(self, names, binaries, stays=()):
        """These end as an operator ends them, and their supervisor starts the other program. Processes in `stays` live
        through it."""
        processes = [self.job.processes[name] for name in names]
        touched = {p.replica for p in processes if p.replica >= 0} | set(names)
        self.active[0] = (touched, iter(()))
        self.take_note(touched)
        lived = {name: self.job.processes[name].pid for name in stays}
        starts = {p.name: p.starts for p in processes}
        for process in processes:
            process.arguments[0] = f"{binaries}/{os.path.basename(process.arguments[0])}"
            self.job.kill(process.name, signal.SIGTERM)
        self.wait(lambda: all(p.pid and p.starts > starts[p.name] for p in processes), 20, f"{names} did not start")
        self.wait(lambda: all(self.is_of(p, binaries) for p in processes), 10, f"{names} are not of {binaries}")
        del self.active[0]
        self.take_note(touched)
        self.expected_since = time.monotonic()
        self.wait(self.all_contribute, self.recovery_budget, f"not all contribute after {names}")
        self.go_on()
        for name, pid in lived.items():
            if self.job.processes[name].pid != pid:
                self.checker.violate("no-crash", f"{name} ended when {names} were exchanged")

    def is_of(self, process, binaries):
        try:
            return os.readlink(f"/proc/{process.pid}/exe").startswith(f"{binaries}/")
        except OSError:  # it has just ended
            return False

    def go_on(self, steps=STEPS):
        """So many steps are committed from here on."""
        target = self.checker.committed + steps
        self.wait(lambda: self.checker.committed >= target, self.stall_budget + 5, f"step {target} is not committed")

    def seats(self):
        """The coordinators, the one that decides last."""
        leader = self.leader() if self.settings.several else None
        names = [seat.name for seat in self.wiring.coordinators]
        return sorted(names, key=lambda name: leader is not None and name == leader.name)

    def trainers(self, replica=None):
        return [p.name for p in self.job.named("trainer", replica)]

    # ---- what the job says of it

    def status(self, name):
        address = self.job.addresses[name]["status"]
        fetch = ["python3", "-c", "import sys, urllib.request\n"
                 "print(urllib.request.urlopen(sys.argv[1], timeout=10).read().decode())", f"http://{address}/status"]
        host = next(seat.host for seat in self.wiring.coordinators if seat.name == name)
        return json.loads(subprocess.run([*host.prefix, *fetch], check=True, capture_output=True, text=True).stdout)

    def versions(self):
        """As the coordinator that decides says; None where it is too old to say."""
        for name in self.seats()[::-1]:
            role = self.status(name)["coordinator_role"]
            if role["store"]["leads"]:
                return role.get("versions")
        return None

    def expect(self, protocol, mixed, when):
        """Becomes so, and is said."""
        deadline = time.monotonic() + 10 + 5 * self.silence
        while True:
            versions = self.versions()
            if versions and (versions["protocol"], versions["mixed"]) == (protocol, mixed):
                break
            if time.monotonic() > deadline:
                return self.checker.violate("versions", f"{when}: expected protocol {protocol}"
                                            f"{', mixed' if mixed else ''}; it says {json.dumps(versions)}")
            self.turn()
        groups = [f"{g['count']} {kind} speak {g['protocol']}" for kind in ("nodes", "ranks") for g in versions[kind]]
        self.log(f"    {when}: protocol {protocol}{', mixed' if mixed else ''}: {', '.join(groups)}")

    # ---- the whole roll

    def roll(self):
        old, new = protocol_of(self.settings.revision), protocol_of(None)
        for name in self.seats():
            self.log(f"  {name} is upgraded")
            self.exchange([name], self.newer, stays=self.trainers())
        self.expect(old, True, "coordinators are newer")
        for process in [*self.job.named("relay"), *self.job.named("daemon")]:
            self.log(f"  {process.name} is upgraded")
            self.exchange([process.name], self.newer, stays=self.trainers())
        self.expect(old, True, "daemons are newer, and trainers are not")
        for replica in range(self.settings.replicas):
            self.log(f"  the trainers of replica {replica} are upgraded")
            self.exchange(self.trainers(replica), self.newer)
        self.expect(new, False, "all are newer")
        self.go_back(old, new)

    def go_back(self, old, new):
        """One of each kind is taken back, and upgraded again."""
        daemon = self.job.named("daemon")[-1].name
        self.log(f"  {daemon} goes back, under trainers that stay newer")
        self.exchange([daemon], self.older, stays=self.trainers())
        self.expect(old, True, "a daemon is older")
        self.log(f"  {daemon} comes forward again")
        self.exchange([daemon], self.newer, stays=self.trainers())
        self.expect(new, False, "all are newer again")
        # The log says by now that all speak the newer one.
        leader = self.seats()[-1]
        self.log(f"  {leader}, which decides, goes back")
        self.exchange([leader], self.older, stays=self.trainers())
        if self.settings.several:  # another one decides now
            self.expect(old, True, "a coordinator is older")
        self.log("  the trainers of replica 0 go back")
        self.exchange(self.trainers(0), self.older)
        self.log(f"  {leader} comes forward again")
        self.exchange([leader], self.newer, stays=self.trainers())
        self.expect(old, True, "trainers are older")
        self.log("  the trainers of replica 0 come forward again")
        self.exchange(self.trainers(0), self.newer)
        self.expect(new, False, "all are newer at last")

    def play(self):
        try:
            self.job.start()
            self.wait(self.all_contribute, 60, "the job did not start")
            self.settled = self.job.descriptors()
            self.go_on()
            self.roll()
            self.settings.binaries = self.newer
            self.finish()
            self.read_with_older()
        except chaos.Stuck as stuck:
            self.checker.violate("progress", str(stuck))
            for line in chaos.ending.waits_for(self):
                self.log(f"    {line}")
        finally:
            self.log_violations()
            self.end()
        return not self.checker.violations

    def read_with_older(self):
        """The log, which both have written, is read by the older release, too."""
        for seat in self.wiring.coordinators:
            audit = subprocess.run([f"{self.older}/rejoin", "audit", f"{seat.directory}/decisions.log", "--steps",
                                    str(self.job.steps)], capture_output=True, text=True)
            if audit.returncode != 0:
                self.checker.violate("exactly-once", f"the older rejoin audit: {audit.stdout}{audit.stderr}")


def parse():
    parser = argparse.ArgumentParser(prog="./run upgrade-test", description=__doc__)
    parser.add_argument("revision", nargs="?", help="to upgrade from (default: the last one with an older protocol)")
    parser.add_argument("--store", choices=("file", "etcd", "both"), default="both",
                        help="file: one coordinator; etcd: three, with three members of etcd (default: one after the other)")
    parser.add_argument("--transport", choices=("shm", "tcp", "rails"), default="tcp")
    parser.add_argument("--binaries", default=str(SOURCE / "build/release/bin"), help="the newer programs")
    parser.add_argument("--keep", action="store_true", help="keep the directory, which is kept anyhow after a failure")
    settings = chaos.arguments().parse_args([])  # the job's, as it is without faults
    vars(settings).update(vars(parser.parse_args()))
    settings.revision = git("rev-parse", f"{settings.revision}^{{commit}}") if settings.revision else last_older()
    settings.seed, settings.without = "1", []
    return settings


def main():
    settings = parse()
    older, newer = build(settings.revision), settings.binaries
    stores = ("file", "etcd") if settings.store == "both" else (settings.store,)
    settings.confined = chaos.confine()
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: nobody escapes
    good = True
    for store in stores:
        if store == "etcd" and etcd.program() is None:
            print("upgrade-test: three coordinators: SKIPPED: they need the package etcd-server")
            continue
        settings.several = store == "etcd"
        directory = tempfile.mkdtemp(prefix="rejoin-upgrade-")
        print(f"\nfrom {settings.revision[:12]} (protocol {protocol_of(settings.revision)}) to this tree (protocol "
              f"{protocol_of(None)}), {'three coordinators' if settings.several else 'one coordinator'}; everything is "
              f"in {directory}", flush=True)
        upgrade = Upgrade(settings, directory, older, newer)
        held = upgrade.play()
        checker = upgrade.checker
        print(f"{checker.committed} steps, {checker.epochs_seen} epochs, {checker.checked_digests} digests and "
              f"{checker.checked_sums} sums of gradients compared, {checker.steps_rolled_back} steps lost: "
              f"{'all held' if held else 'VIOLATIONS, see above'}", flush=True)
        if held and not settings.keep:
            shutil.rmtree(directory)
        elif not held:
            print(f"kept: {directory}", flush=True)
        good &= held
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
