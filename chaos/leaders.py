"""What must hold besides where there are several coordinators. Each says what it decides from when on it leads; see
checker.py.

  one-decision    a term has one leader; one that others have superseded decides nothing; and what their copies of the
                  log have at the same place is the same
  nobody-put-out  a replica to which nothing has happened is not put out, whatever happens to who decides"""
import glob
import os
import struct

from checker import KEPT_STEPS, Checker

SNAPSHOT_FIELD, POSITION_FIELD = 24, 19  # in control.proto: of LogRecord, and of its Snapshot
DECISIONS = ("commit", "epoch", "recovered", "rolled_back")
MAGIC, MARK = b"RJNLOG02", 0xFFFFFFFF  # in log.cc


class LeadersChecker(Checker):
    def __init__(self, replicas, ranks, elements):
        super().__init__(replicas, ranks, elements)
        self.terms = {}       # pid → the term in which it said last that it leads
        self.led = {}         # term → pid
        self.epoch_of = {}    # step → the epoch in which it was committed
        self.faulted = set()  # replicas to which something has happened since all of them contributed
        self.late = 0         # decisions that a leader has told of when others had superseded it

    def leader(self):
        """The pid of the one that leads, as far as they have said."""
        return self.led[max(self.led)] if self.led else 0

    def on_event(self, event):
        if event["who"] != "coordinator":
            return super().on_event(event)
        kind, pid = event["kind"], event["pid"]
        if kind == "leader":
            term = event["term"]
            if self.led.setdefault(term, pid) != pid:
                self.violate("one-decision", f"processes {self.led[term]} and {pid} both lead in term {term}")
            self.terms[pid] = term
        elif kind in DECISIONS and self.terms.get(pid, 0) < max(self.led, default=0):
            return self.on_late(event)
        super().on_event(event)

    def on_late(self, event):
        """Told by one that was superseded: it may hear late that the store has taken what it wrote before that. Then
        the next leader has found it there."""
        self.late += 1
        kind, now = event["kind"], max(self.epochs, default=0)
        who = f"process {event['pid']}, leader in term {self.terms.get(event['pid'], 0)} before {max(self.led)}"
        if kind == "commit":
            step, known = event["step"], self.epoch_of.get(event["step"])
            if step > self.committed or known not in (None, event["epoch"]):
                self.violate("one-decision", f"{who}, committed step {step} in epoch {event['epoch']}; others are at "
                             f"step {self.committed}, and committed it in epoch {known}")
            elif known is None:
                self.epoch_of[step] = event["epoch"]
                self.by_step[step] = self.epochs.get(event["epoch"], set())
        elif kind == "epoch":
            members = self.contributors_of(event)
            if event["epoch"] > now or self.epochs.get(event["epoch"], members) != members:
                self.violate("one-decision", f"{who}, began epoch {event['epoch']} with {event['members']}; others are "
                             f"in epoch {now}, with {self.epochs.get(event['epoch'])} in that one")

    def on_commit(self, event):
        super().on_commit(event)
        self.epoch_of[event["step"]] = event["epoch"]
        self.epoch_of.pop(event["step"] - KEPT_STEPS, None)

    def on_epoch(self, event):
        before = set(self.members)
        if event["kind"] == "epoch":
            self.begins_once(event)
        super().on_epoch(event)
        for replica in sorted(before - set(self.members) - self.faulted):
            self.violate("nobody-put-out", f"replica {replica}, to which nothing has happened, is not in epoch "
                         f"{event['epoch']}: {event.get('reason', event['kind'])}")

    def begins_once(self, event):
        members, known = self.contributors_of(event), self.epochs.get(event["epoch"])
        if known is not None and known != members:
            self.violate("one-decision", f"epoch {event['epoch']} began twice: with contributors {sorted(known)}, and "
                         f"with {sorted(members)}")

    def went_back(self, before, what):
        if before < self.committed:
            self.epoch_of.clear()
        super().went_back(before, what)

    def on_death(self, death):
        if death.process.role == "trainer":
            self.faulted.add(death.process.replica)
        super().on_death(death)

    @staticmethod
    def contributors_of(event):
        return {int(member) for member in event["members"].split(",") if member and not member.endswith("c")}


# ---- the copies of the log

def varint(data, at):
    value = shift = 0
    while True:
        byte = data[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at


def field(message, wanted):
    """Of a protobuf message: bytes, or a number; None where it is not there."""
    at, found = 0, None
    while at < len(message):
        tag, at = varint(message, at)
        if tag & 7 == 0:
            value, at = varint(message, at)
        elif tag & 7 == 2:
            length, at = varint(message, at)
            value, at = message[at:at + length], at + length
        else:
            size = {1: 8, 5: 4}[tag & 7]
            value, at = message[at:at + size], at + size
        if tag >> 3 == wanted:
            found = value
    return found


def records_of(path):
    with open(path, "rb") as file:
        data = file.read()
    if data and not data.startswith(MAGIC):
        raise ValueError(f"{path} is no log")
    at = len(MAGIC)
    while at + 16 <= len(data):
        length, position, _ = struct.unpack_from("<IIQ", data, at)
        if position != at & 0xFFFFFFFF:
            return
        at += 16
        if length == MARK:
            continue
        if at + length > len(data):
            return
        yield data[at:at + length]
        at += length


def copy_in(directory):
    """What a copy has, with the archives beside it: position in the job's log → record."""
    records = {}
    for path in sorted(glob.glob(f"{directory}/decisions*.log"), key=os.path.getmtime):
        position = 0
        for record in records_of(path):
            snapshot = field(record, SNAPSHOT_FIELD)
            if snapshot is not None:
                position = field(snapshot, POSITION_FIELD)
                continue
            records[position] = record
            position += 1
    return records


def compare_copies(checker, directories):
    """How many records were compared."""
    copies = [(directory, copy_in(directory)) for directory in directories]
    compared, first = 0, {}
    for directory, records in copies:
        for position, record in records.items():
            known = first.setdefault(position, (record, directory))
            compared += known[1] != directory
            if known[0] != record:
                checker.violate("one-decision", f"record {position} is not the same in {directory} and {known[1]}")
                break
    return compared, [len(records) for _, records in copies]
