#!/usr/bin/env python3
"""Chaos: a real job of real processes, to which everything happens that can happen to one. See README.md."""
import argparse
import ctypes
import os
import pathlib
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time

import ending
import etcd
import faults
import network
import store_faults  # noqa: F401: its kinds are among faults.KINDS
from checker import Checker, Events
from job import Job
from leaders import LeadersChecker
from report import Record, recovery_of, table
from wiring import Wiring

TRANSPORTS = ("shm", "tcp", "rails")
SOURCE = pathlib.Path(__file__).resolve().parent.parent


class Stuck(Exception):
    """The job does not go on."""


class Run:
    """One job over one transport, with faults until its time is over. Violations are in checker.violations."""

    def __init__(self, settings, directory, until):
        self.settings, self.directory, self.until = settings, directory, until
        self.silence = settings.silence_ms * 1e-3
        # Without a fault, or after it: for a restart, for finding out who is silent, for connecting again.
        self.stall_budget = 5 + 5 * self.silence
        self.recovery_budget = 20 + 10 * self.silence
        self.begun = time.monotonic()
        self.log_file = open(f"{directory}/chaos.log", "w")
        self.wiring = Wiring(settings, directory, settings.seed)
        self.switch = self.wiring.switch
        self.job = Job(settings, self.wiring, directory, random.Random(f"restarts {settings.seed}"))
        checker = LeadersChecker if settings.several else Checker
        self.checker = checker(settings.replicas, settings.ranks, settings.elements)
        self.events = Events(f"{directory}/events")
        self.records, self.active = [], {}
        self.expected_since = self.begun  # since then steps ought to be committed
        self.faulted_at = self.begun       # then a replica was touched last
        self.reported = self.timed = self.asked_at = 0
        self.pids = {}

    def log(self, text):
        line = f"{time.monotonic() - self.begun:8.2f}  {text}"
        print(line, flush=True)
        print(line, file=self.log_file, flush=True)

    def log_violations(self):
        for invariant, text in self.checker.violations[self.reported:]:
            self.log(f"VIOLATION {invariant}: {text}")
        self.reported = len(self.checker.violations)

    # ---- the job goes on

    def turn(self):
        """Looks after the processes, hears what they have said, judges it."""
        deaths = self.job.look_after()
        for process in self.job.processes.values():
            if process.pid and self.pids.get(process.name) != process.pid:
                self.pids[process.name] = process.pid
                self.events.follow(process.speaker, process.pid)
                if process.role == "trainer":
                    self.checker.on_started(process.replica, process.rank, process.pid)
        for event in self.events.read():
            if event["kind"] == "epoch" and event["who"] == "coordinator":
                self.log(f"    epoch {event['epoch']} after step {event['step'] - 1}: {event['members'] or 'nobody'} "
                         f"({event.get('reason', '')})")
            elif event["kind"] == "leader":
                self.log(f"    {self.name_of(event['pid'])} leads in term {event['term']}")
            self.checker.on_event(event)
        for death in deaths:
            if not death.killed:
                self.log(f"    {death.process.name} ended: {death.how}")
            self.checker.on_death(death)
            self.events.forget(death.process.speaker, death.pid)
        self.log_violations()
        if self.reported > 20:
            raise Stuck("more than 20 violations")
        self.expect_progress()
        self.operate()
        time.sleep(0.01)

    def name_of(self, pid):
        return next((process.name for process in self.job.processes.values() if process.pid == pid), f"process {pid}")

    def leader(self):
        """Of several coordinators, as far as they have said."""
        return next((p for p in self.job.named("coordinator") if p.pid and p.pid == self.checker.leader()), None)

    def can_decide(self, touched):
        """A coordinator is left alone, and where there are several, so are most members of etcd."""
        members = self.wiring.members
        return (any(seat.name not in touched for seat in self.wiring.coordinators)
                and 2 * sum(seat.name in touched for seat in members) <= len(members))

    def expect_progress(self):
        """While who decides and one replica that contributes are left alone, steps are committed."""
        now = time.monotonic()
        touched = set().union(*(touched for touched, _ in self.active.values())) if self.active else set()
        able = {r for r, contributes in self.checker.members.items() if contributes} - touched
        if self.checker.finished or not self.can_decide(touched) or (self.active and not able):
            self.expected_since = now
        if self.settings.several:
            self.forgive()
        last = self.checker.commits[-1] if self.checker.commits else 0
        if now - max(last, self.expected_since) > self.stall_budget:
            raise Stuck(f"no step was committed for {self.stall_budget:.1f} s, though "
                        + (f"replicas {sorted(able)} were left alone" if self.active else "nothing is wrong any more"))

    def operate(self):
        """After a true loss the operator says that the job may start from what there is; for this once."""
        now = time.monotonic()
        if self.checker.true_loss and not self.active and now - self.asked_at >= 1:
            self.asked_at = now
            if (word := ending.word_for_step_0(self)) not in (None, self.job.roll_back_to):  # also when it has changed
                self.log(f"    the operator: --roll-back-to {word}")
                self.restart_coordinators(roll_back_to=word)
        elif not self.checker.true_loss and self.job.roll_back_to is not None:
            self.job.roll_back_to = None
            self.job.renew_coordinators()

    def restart_coordinators(self, steps=None, roll_back_to=None):
        self.job.steps = self.job.steps if steps is None else steps
        self.job.roll_back_to = roll_back_to
        self.job.renew_coordinators()
        for process in self.job.named("coordinator"):
            self.job.kill(process.name)

    def wait(self, condition, seconds, what):
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise Stuck(f"{what} within {seconds:.0f} s")
            self.turn()

    def all_contribute(self):
        members = self.checker.members
        return len(members) == self.settings.replicas and all(members.values())

    # ---- faults

    def draw(self, number):
        """The faults of a round: (when, how long, kind, its random)."""
        chance = random.Random(f"{self.settings.seed} {self.settings.transport} {number}")
        names = [name for name in faults.KINDS if self.settings.only is None or name in self.settings.only]
        if not self.settings.several:
            names = [name for name in names if not (faults.KINDS[name].needs or "").startswith("store")]
        if self.settings.only is None:
            names = [name for name in names if name not in self.settings.without]
        weights = [faults.KINDS[name].weight for name in names]
        drawn = []
        for i in range(chance.choice((1, 1, 1, 2, 2, 3))):
            kind = faults.KINDS[chance.choices(names, weights)[0]]
            shortest, longest = kind.lasts or (0, 0)
            lasts = self.silence * shortest * (longest / shortest) ** chance.random() if kind.lasts else 0.0
            at = 0.0 if i == 0 else chance.uniform(0, 2 * self.silence)
            drawn.append((at, lasts, kind, random.Random(f"{self.settings.seed} {number} {i}")))
        return drawn, chance.random() < 0.5, chance.uniform(0, 1)

    def round(self, number):
        drawn, until_recovered, pause = self.draw(number)
        begun = time.monotonic()
        self.log(f"round {number}, step {self.checker.committed}")
        due = [(begun + at, self.strike, number, lasts, kind, chance) for at, lasts, kind, chance in drawn]
        self.ends = []
        while due or self.ends:
            now = time.monotonic()
            for entry in [e for e in due if e[0] <= now]:
                due.remove(entry)
                entry[1](*entry[2:])
            for entry in [e for e in self.ends if e[0] <= now]:
                self.ends.remove(entry)
                self.mend(*entry[1:])
            self.turn()
        self.expected_since = ended = time.monotonic()
        self.wait(lambda: self.checker.commits and self.checker.commits[-1] > ended, self.stall_budget + 1,
                  "no step was committed after the faults")
        self.take_times()
        if until_recovered or number % 5 == 4:
            self.wait(self.all_contribute, self.recovery_budget, "not all replicas contribute again")
        self.wait(lambda: time.monotonic() > ended + pause, 60, "")

    def take_times(self):
        """How soon the job went on after each fault of the round."""
        for record in self.records[self.timed:]:
            record.until = record.until or time.monotonic()
            record.recovery = recovery_of(record, self.checker.commits)
        self.timed = len(self.records)

    def strike(self, number, lasts, kind, chance):
        if not self.wiring.has(kind.needs):
            return
        fault = kind.strike(self, chance)
        record = Record(kind.name, time.monotonic())
        try:
            what, touched = next(fault)
        except faults.Skipped as why:
            return self.log(f"  {kind.name} left out: {why}")
        for earlier in self.records[self.timed:]:
            earlier.until = earlier.until or record.at
        self.records.append(record)
        self.active[record.number] = (touched, fault)
        self.take_note(touched)
        self.log(f"  {kind.name}: {what}" + (f" for {1e3 * lasts:.0f} ms" if kind.lasts else ""))
        self.ends.append((time.monotonic() + lasts, record, fault, kind, what))

    def take_note(self, touched):
        """Of replicas that may be put out for what happens to them."""
        replicas = touched & set(range(self.settings.replicas))
        if self.settings.several and replicas:
            self.checker.faulted |= replicas
            self.faulted_at = time.monotonic()

    def forgive(self):
        """What happened to a replica has been noticed long ago, by one who could decide."""
        commits = self.checker.commits
        if commits and commits[-1] - self.faulted_at > 3 * self.silence and self.all_contribute():
            self.checker.faulted.clear()

    def mend(self, record, fault, kind, what):
        try:
            next(fault)
        except StopIteration as over:
            record.struck = over.value != 0
        touched, _ = self.active.pop(record.number)
        self.take_note(touched)
        now = time.monotonic()
        # What is over needs time to be noticed, before others are expected to do without.
        self.expected_since = max(self.expected_since, now)
        record.counts_from = now if kind.blocks else record.at
        if kind.lasts:
            self.log(f"  over: {kind.name}: {what}")

    # ---- all of it

    def play(self):
        """True where nothing was violated."""
        try:
            self.job.start()
            self.wait(self.all_contribute, 30, "the job did not start")
            self.settled = self.job.descriptors()
            number = self.settings.first_round
            while time.monotonic() < self.until:
                self.round(number)
                number += 1
            self.finish()
            self.checker.on_end()
            played = number - self.settings.first_round
            if played >= 5 and not any(record.struck for record in self.records):
                self.checker.violate("checked", f"no fault has struck in {played} rounds")
        except Stuck as stuck:
            self.checker.violate("progress", str(stuck))
            for line in ending.waits_for(self):
                self.log(f"    {line}")
        finally:
            self.log_violations()
            self.end()
        self.take_times()
        return not self.checker.violations

    def finish(self):
        """The job ends as jobs do: it comes to its last step, and everybody leaves."""
        self.log("no more faults: the job is to finish")
        self.expected_since = time.monotonic()
        self.wait(self.all_contribute, self.recovery_budget, "not all replicas contribute at the end")
        for (name, pid), count in self.job.descriptors().items():
            if count > self.settled.get((name, pid), count) + 32:
                self.checker.violate("bounded-memory", f"{name} had {self.settled[name, pid]} descriptors, now {count}")
        self.job.ending = False
        self.restart_coordinators(steps=self.checker.committed + 60)
        self.wait(lambda: self.checker.finished, 20 + self.recovery_budget, "the job did not finish")
        self.job.ending = True
        self.wait(lambda: not any(p.child for p in self.job.named("trainer")), 20, "trainers did not leave")
        left = time.monotonic()
        self.wait(lambda: time.monotonic() > left + self.silence, 60, "")  # for all copies of the log
        for process in self.job.processes.values():
            self.job.kill(process.name, 9 if process.role == "etcd" else 15)
        self.wait(lambda: not any(p.child for p in self.job.processes.values()), 20, "daemons did not end on SIGTERM")
        ending.audit(self)
        ending.look_for_remains(self)

    def end(self):
        for _, fault in self.active.values():
            next(fault, None)
        self.job.ending = True
        self.job.go_on_all()
        for process in self.job.processes.values():
            self.job.kill(process.name)
        for process in self.job.processes.values():
            if process.child is not None:
                process.child.wait()
        for seat in self.wiring.seats():
            if seat.disk is None:
                continue
            if (self.checker.violations or self.settings.keep) and seat in self.wiring.coordinators:  # the disk goes
                shutil.copytree(seat.directory, f"{self.directory}/{os.path.basename(seat.directory)}.{seat.name}")
            seat.disk.unmount()


def arguments():
    parser = argparse.ArgumentParser(prog="./run chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5, help="for all transports together (default 5)")
    parser.add_argument("--seed", default=None, help="of the faults (default: any)")
    parser.add_argument("--transport", choices=(*TRANSPORTS, "all"), default="all",
                        help="shm: all replicas on one host; tcp; rails: TCP over two; all: one after the other")
    parser.add_argument("--threads", type=int, default=0,
                        help="TCP: so many for bulk; it takes --elements 2000000 for chunks that are bulk (default 0)")
    parser.add_argument("--store", choices=("file", "etcd"), default="file",
                        help="file: one coordinator; etcd: three, with three members of etcd, and faults of them all")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--relay", action=argparse.BooleanOptionalAction, default=True,
                        help="the last replica's daemon reaches the coordinator through a relay")
    parser.add_argument("--silence-ms", type=int, default=1000)
    parser.add_argument("--compute-ms", type=int, default=40, help="of each step")
    parser.add_argument("--elements", type=int, default=40000, help="of a rank's state, times two; a multiple of 16")
    parser.add_argument("--only", type=lambda text: text.split(","), help="faults of these kinds: "
                        + " ".join(faults.KINDS))
    parser.add_argument("--without", type=lambda text: text.split(","), default=["corrupt_all_reduce"],
                        help="no faults of these kinds (default: corrupt_all_reduce: see README.md)")
    parser.add_argument("--first-round", type=int, default=0, help="begin with this round of the seed's")
    parser.add_argument("--keep", action="store_true", help="keep the directory, which is kept anyhow after a failure")
    parser.add_argument("--binaries", default=str(SOURCE / "build/release/bin"))
    return parser


def parse():
    parser = arguments()
    settings = parser.parse_args()
    settings.several = settings.store == "etcd"
    for name in [*(settings.only or ()), *settings.without]:
        if name not in faults.KINDS:
            parser.error(f"no fault '{name}'; there are {' '.join(faults.KINDS)}")
    if settings.seed is None:
        settings.seed = str(random.SystemRandom().randrange(10**6))
    return settings


def confine():
    """Into a mount namespace of our own; as an ordinary user by way of a user namespace. False where that can't be."""
    if os.geteuid() != 0 and "REJOIN_CHAOS_INSIDE" not in os.environ:
        inside = ["unshare", "--user", "--map-root-user", "--mount"]
        if subprocess.run([*inside, "true"], capture_output=True).returncode == 0:
            os.environ["REJOIN_CHAOS_INSIDE"] = "1"
            os.execvp(inside[0], [*inside, sys.executable, *sys.argv])
    try:
        network.check(network.libc.unshare(network.CLONE_NEWNS), "a mount namespace")
        for what in (["--make-rprivate", "/"], ["-t", "tmpfs", "shm", "/dev/shm"]):
            subprocess.run(["mount", *what], check=True, capture_output=True)
        network.Host(1, 1)
        return True
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"chaos: no namespaces here ({error}): links and disks are left alone")
        return False


def main():
    settings = parse()
    if settings.several and etcd.program() is None:
        print("chaos: SKIPPED: --store etcd needs the package etcd-server")
        return 77
    settings.confined = confine()
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: nobody escapes
    resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    transports = TRANSPORTS if settings.transport == "all" else (settings.transport,)
    again = f"./run chaos --seed {settings.seed}" + (" --store etcd" if settings.several else "")
    print(f"{again} --minutes {settings.minutes:g} --transport {settings.transport}", flush=True)
    good = True
    for transport in transports:
        settings.transport = transport
        directory = tempfile.mkdtemp(prefix="rejoin-chaos-")
        print(f"\n{transport}: everything is in {directory}", flush=True)
        run = Run(settings, directory, time.monotonic() + 60 * settings.minutes / len(transports))
        held = run.play()
        print(table(run), flush=True)
        if held and not settings.keep:
            shutil.rmtree(directory)
        if not held:
            print(f"kept: {directory}; again: {again} --transport {transport} "
                  f"--minutes {settings.minutes / len(transports):g}", flush=True)
        good &= held
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
