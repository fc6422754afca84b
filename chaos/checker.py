"""What must hold, judged by what the processes say when (their event files) and by who ended when (the runner knows).
It shares no code with what it judges.

  one-decision    commits count up by one, and one that was not told of is the last of a coordinator that has ended
  same-bits       all replicas have the same digest after the same step
  exactly-once    the gradient of each step is the mean over the batches that its contributors say they trained, and
                  `rejoin audit` counts every sample once
  state-survives  commits never go back while a replica lives that has the last committed state; and no such replica is
                  told to leave where it is the only one
  no-crash        no process ends by itself, but a trainer that is told to start again"""
import json
import os
from collections import deque

KEPT_STEPS = 400


class Events:
    """The event files of all processes, read as they grow."""

    def __init__(self, directory):
        self.directory = directory
        self.files = {}  # path → open file

    def follow(self, who, pid):
        self.files.setdefault(f"{self.directory}/{who}.{pid}.jsonl", None)

    def read(self):
        """What is new, in order of time. The coordinator's files come last, so that what trainers act on is there."""
        fresh = []
        for path in sorted(self.files, key=lambda p: os.path.basename(p).startswith("coordinator")):
            file = self.files[path]
            if file is None:
                if not os.path.exists(path):
                    continue
                file = self.files[path] = open(path, "rb")
            pid = int(path.split(".")[-2])
            while True:
                at, line = file.tell(), file.readline()
                if not line.endswith(b"\n"):
                    file.seek(at)
                    break
                event = json.loads(line)
                event["pid"] = pid
                fresh.append(event)
        fresh.sort(key=lambda e: e["t"])
        return fresh

    def forget(self, who, pid):
        """Of a process that has ended, when everything has been read."""
        file = self.files.pop(f"{self.directory}/{who}.{pid}.jsonl", None)
        if file is not None:
            file.close()


def sum_of(batch, elements):
    """What the gradients of a batch add up to, over both tensors: see add_sample() in trainer.cc."""
    ranges = [tuple(map(int, part.split("-"))) for part in batch.split(",")]
    values = sum((k * 2654435761 & 0xFFFFFFFF) >> 28 for begin, end in ranges for k in range(begin, end))
    samples = sum(end - begin for begin, end in ranges)
    return elements * values + samples * elements // 16 * 120


class Checker:
    def __init__(self, replicas, ranks, elements):
        self.replicas, self.ranks, self.elements = replicas, ranks, elements + 16
        self.violations = []  # (invariant, text)
        self.committed = 0
        self.commits = deque(maxlen=20000)  # when, in seconds
        self.members = {}                   # of the present epoch: replica → contributes
        self.epochs = {}                    # number → its contributors
        self.contributors = set()           # of the last commit
        self.generation = 0                 # counts the times that the job went back
        self.steps_rolled_back = self.steps_lost = 0  # all; those for which there was no reason
        self.true_loss = None               # how the last holder of the committed state was lost, since the last commit
        self.alive = {}                     # (replica, rank) → pid
        self.last = {}                      # (replica, rank) → pid, step it works on, step it has applied
        self.digests, self.trained, self.by_step = {}, {}, {}
        self.checked_sums = self.checked_digests = self.epochs_seen = 0
        self.teller = None                  # the pid of the coordinator that has told of a step last
        self.finished = False

    def violate(self, invariant, text):
        self.violations.append((invariant, text))

    # ---- what is said

    def on_event(self, event):
        kind, who = event["kind"], event["who"]
        if kind == "commit":
            self.on_commit(event)
        elif kind in ("epoch", "recovered") and who == "coordinator":
            self.on_epoch(event)
        elif kind == "finished":
            self.finished = True
        elif kind in ("trained", "applied") and who[0] == "r" and "." in who:
            replica, rank = map(int, who[1:].split("."))
            self.on_trainer(event, replica, rank)

    def follows(self, event):
        """Only one that is killed between writing down and telling leaves a step out."""
        if event["step"] - 1 > self.committed and event["pid"] == self.teller:
            self.violate("one-decision", f"process {event['pid']} goes on with step {event['step']}, and step "
                         f"{self.committed} is the last that it has committed")
        self.teller = event["pid"]

    def on_commit(self, event):
        self.follows(event)
        step = event["step"]
        self.went_back(step - 1, f"step {step} was committed again")
        self.committed = step
        self.commits.append(event["t"] * 1e-9)
        self.contributors = self.epochs.get(event["epoch"], set())
        if self.holders():  # they may all have died while the disk under the log was slow
            self.true_loss = None
        self.by_step[step] = self.contributors
        for old in (self.digests, self.trained):
            for key in [k for k in old if k[1] < step - KEPT_STEPS]:
                del old[key]
        self.by_step.pop(step - KEPT_STEPS, None)

    def on_epoch(self, event):
        self.follows(event)
        self.epochs_seen += event["kind"] == "epoch"
        members = [m for m in event["members"].split(",") if m]
        self.members = {int(m.rstrip("c")): not m.endswith("c") for m in members}
        self.epochs[event["epoch"]] = {r for r, contributes in self.members.items() if contributes}
        self.epochs.pop(event["epoch"] - 200, None)
        self.went_back(event["step"] - 1, f"an epoch began after step {event['step'] - 1}: {event.get('reason', '')}")

    def went_back(self, before, what):
        """The job goes on after step `before`."""
        if before > self.committed:  # a coordinator that was killed between writing down and telling
            self.committed = before
        if before >= self.committed:
            return
        lost = self.committed - before
        self.steps_rolled_back += lost
        if self.true_loss is None:
            self.steps_lost += lost
            self.violate("state-survives", f"{lost} committed steps, up to {self.committed}, are gone: {what}; "
                         f"replicas that hold them: {self.holders() or 'none by now'}")
        self.generation += 1
        self.committed, self.contributors = before, set()
        self.by_step.clear()

    def on_trainer(self, event, replica, rank):
        step, pid = event["step"], event["pid"]
        known = self.last.get((replica, rank), (0, 0, 0))
        works_on, applied = known[1:] if known[0] == pid else (0, 0)
        key = (self.generation, step)
        if event["kind"] == "trained":
            self.last[replica, rank] = (pid, step, applied)
            self.trained[*key, replica, rank] = event["batch"]
            return
        self.last[replica, rank] = (pid, works_on, step)
        who = f"{event['who']} (pid {pid})"
        first = self.digests.setdefault((*key, rank), (event["digest"], who))
        self.checked_digests += first[1] != who
        if first[0] != event["digest"]:
            self.violate("same-bits", f"after step {step} {who} has {event['digest']}, {first[1]} has {first[0]}")
        self.check_sum(event, key, rank, who)

    def check_sum(self, event, key, rank, who):
        contributors = self.by_step.get(key[1])
        batches = [self.trained.get((*key, replica, rank)) for replica in contributors or ()]
        if not batches or None in batches:
            return  # its commit or a batch was said by a process that died before it could say it
        expected = sum(sum_of(batch, self.elements) for batch in batches) / len(batches)
        self.checked_sums += 1
        if abs(event["sum"] - expected) > 1e-6 * max(1, expected):
            self.violate("exactly-once", f"step {key[1]}: {who} applied gradients that add up to {event['sum']}; the "
                         f"mean over the batches of replicas {sorted(contributors)} is {expected}")

    def on_end(self):
        """What is compared depends on what the processes say; where they say too little nothing was checked."""
        for what, count in (("digests", self.checked_digests), ("gradients", self.checked_sums)):
            if count < self.committed // 4:
                self.violate("checked", f"only {count} {what} were compared in {self.committed} steps")

    # ---- who ended

    def on_started(self, replica, rank, pid):
        self.alive[replica, rank] = pid

    def holders(self):
        """The replicas all of whose processes live and surely have the last committed step, or will apply it next."""
        return [r for r in range(self.replicas) if all(self.holds(r, rank) for rank in range(self.ranks))]

    def holds(self, replica, rank):
        pid, works_on, applied = self.last.get((replica, rank), (0, 0, 0))
        if self.alive.get((replica, rank)) != pid or pid == 0:
            return False
        return max(applied, works_on - 1) >= self.committed or (
            works_on == self.committed and replica in self.contributors)

    def on_death(self, death):
        process = death.process
        if process.role == "trainer":
            before = self.holders()
            self.alive.pop((process.replica, process.rank), None)
            if before and not self.holders() and not self.finished and self.committed > 0:
                self.true_loss = f"{process.name} {death.how}"
                if not death.killed:
                    self.violate("state-survives", f"replica {process.replica} was the last to hold step "
                                 f"{self.committed}; {process.name} ended: {death.how}: {last_line(death.output)}")
        if not death.killed and not self.explained(death):
            self.violate("no-crash", f"{process.name} (pid {death.pid}) ended by itself: {death.how}: "
                         f"{last_line(death.output)}")

    def explained(self, death):
        """Ends that are no crash: a trainer that is to start again, or that has not found its daemon at its start."""
        role, status, output = death.process.role, death.status, death.output
        if role == "trainer":
            return status == 3 or (status == 0 and self.finished) or (
                status == 1 and ("no Rejoin daemon at" in output or "trainer: the daemon at" in output))
        if role == "coordinator":  # it may not decide what it can't write down
            return status in (1, 4) and "No space left" in output
        return False


def last_line(output):
    lines = [line for line in output.strip().split("\n") if line]
    return lines[-1][:400] if lines else "it said nothing"
