"""Hosts of a chaos run: network namespaces whose interfaces are taps of this process. It is the switch between them,
so it can lose, delay, break and forge any frame, one way or both. A namespace lives as long as a descriptor of it:
nothing is left when the runner ends, however it ends."""
import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import threading
import time
from dataclasses import dataclass, field

CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
MTU = 9000
libc = ctypes.CDLL(None, use_errno=True)


def check(result, what):
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def in_thread(function):
    """Runs it in a thread of its own, whose namespaces may be changed, and gives what it gives."""
    result = {}

    def run():
        try:
            result["value"] = function()
        except BaseException as error:  # raised again below, in the caller's thread
            result["error"] = error

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if "error" in result:
        raise result["error"]
    return result["value"]


class Here:
    """The one host where namespaces can't be had: this machine, without links of its own."""
    number = 0
    prefix = ["setpriv", "--pdeathsig", "KILL"]

    def address(self, rail=0):
        return "127.0.0.1"

    def run(self, function):
        return function()


class Host:
    """A network namespace with one interface for each rail. Only processes started with its prefix are in it."""

    def __init__(self, number, rails):
        self.number = number
        self.taps = []

        def make():
            check(libc.unshare(CLONE_NEWNET), "a network namespace")
            for rail in range(rails):
                tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
                fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", f"eth{rail}".encode(), IFF_TAP | IFF_NO_PI))
                self.taps.append(tap)
            return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

        self.namespace = in_thread(make)
        enter = ["nsenter", f"--net=/proc/{os.getpid()}/fd/{self.namespace}", "--"]
        # Nothing outlives the runner.
        self.prefix = enter + Here.prefix
        self.ip_prefix = enter + ["ip"]
        self.ip("link", "set", "lo", "up")
        for rail in range(rails):
            self.ip("link", "set", f"eth{rail}", "address", f"02:00:00:00:{rail:02x}:{number:02x}", "mtu", str(MTU))
            self.ip("addr", "add", f"{self.address(rail)}/24", "dev", f"eth{rail}")
            self.ip("link", "set", f"eth{rail}", "up")

    def address(self, rail=0):
        return f"10.66.{rail}.{self.number}"

    def ip(self, *arguments):
        subprocess.run([*self.ip_prefix, *arguments], check=True, stdin=subprocess.DEVNULL)

    def run(self, function):
        """In a thread that is in this namespace: for sockets, which stay in it."""
        def inside():
            check(libc.setns(self.namespace, CLONE_NEWNET), "setns")
            return function()
        return in_thread(inside)


@dataclass
class Rule:
    """What happens to frames from one of `source` to one of `target` (hosts' numbers; nothing: all) on these rails, to
    or from these TCP ports, each with this probability. The first rule that strikes decides."""
    action: str  # drop, delay, reset, corrupt
    source: set = field(default_factory=set)
    target: set = field(default_factory=set)
    rails: set = field(default_factory=set)
    ports: set = field(default_factory=set)
    probability: float = 1.0
    seconds: float = 0.0  # of delay
    struck: int = 0

    def concerns(self, source, target, rail):
        return ((not self.source or source in self.source) and (not self.target or target in self.target)
                and (not self.rails or rail in self.rails))


class Switch(threading.Thread):
    """Owns the taps. add() and remove() may be called from any thread."""

    def __init__(self, hosts, seed):
        super().__init__(daemon=True, name="switch")
        self.random = random.Random(f"switch {seed}")
        self.lock = threading.Lock()
        self.rules = []
        self.frames = 0
        self.ports = {}  # (rail, host number) → tap
        self.from_tap = {}
        self.delayed, self.sequence = [], 0
        self.poll = select.poll()
        for host in hosts:
            for rail, tap in enumerate(host.taps):
                self.ports[rail, host.number] = tap
                self.from_tap[tap] = (rail, host.number)
                self.poll.register(tap, select.POLLIN)

    def add(self, rule):
        with self.lock:
            self.rules = self.rules + [rule]
        return rule

    def remove(self, rule):
        with self.lock:
            self.rules = [r for r in self.rules if r is not rule]

    def run(self):
        while True:
            timeout = None
            if self.delayed:
                timeout = max(0, 1e3 * (self.delayed[0][0] - time.monotonic()))
            for tap, _ in self.poll.poll(timeout):
                for _ in range(64):
                    try:
                        frame = os.read(tap, 65536)
                    except BlockingIOError:
                        break
                    except OSError:  # the interface is down
                        break
                    self.forward(frame, *self.from_tap[tap])
            now = time.monotonic()
            while self.delayed and self.delayed[0][0] <= now:
                _, _, tap, frame = heapq.heappop(self.delayed)
                self.put(tap, frame)

    @staticmethod
    def put(tap, frame):
        try:
            os.write(tap, frame)
        except OSError:  # the interface is down, or its queue full: a network loses frames
            pass

    def forward(self, frame, rail, source):
        self.frames += 1
        if frame[0] & 1:  # to all, for ARP
            targets = [number for r, number in self.ports if r == rail and number != source]
        else:
            targets = [frame[5]] if (rail, frame[5]) in self.ports else []
        for target in targets:
            self.pass_on(frame, rail, source, target)

    def pass_on(self, frame, rail, source, target):
        tap = self.ports[rail, target]
        for rule in self.rules:
            if not rule.concerns(source, target, rail):
                continue
            tcp = tcp_offset(frame)
            if rule.ports and (tcp is None or not rule.ports & set(struct.unpack_from("!HH", frame, tcp))):
                continue
            if rule.probability < 1 and self.random.random() >= rule.probability:
                continue
            if rule.action == "drop":
                rule.struck += 1
                return
            if rule.action == "delay":
                rule.struck += 1
                self.sequence += 1
                heapq.heappush(self.delayed, (time.monotonic() + rule.seconds, self.sequence, tap, frame))
                return
            changed = {"reset": reset_of, "corrupt": self.corrupted}[rule.action](frame, tcp)
            if changed is not None:
                rule.struck += 1
                return self.put(tap, changed)
        self.put(tap, frame)

    def corrupted(self, frame, tcp):
        """One bit of the payload, in a segment whose checksum is right: as a bad switch or bad memory does it."""
        if tcp is None:
            return None
        payload = tcp + 4 * (frame[tcp + 12] >> 4)
        end = 14 + struct.unpack_from("!H", frame, 16)[0]
        if payload >= end:
            return None
        changed = bytearray(frame[:end])
        changed[self.random.randrange(payload, end)] ^= 1 << self.random.randrange(8)
        return seal(changed, tcp)


def tcp_offset(frame):
    if len(frame) < 54 or frame[12:14] != b"\x08\x00" or frame[23] != 6:
        return None
    return 14 + 4 * (frame[14] & 15)


def reset_of(frame, tcp):
    """The same segment as a reset; what comes after it meets a closed socket, which resets the other side."""
    if tcp is None or frame[tcp + 13] & 0x06:  # SYN and RST pass
        return None
    reset = bytearray(frame[:tcp + 20])
    reset[tcp + 12] = 5 << 4
    reset[tcp + 13] = 0x14  # RST, ACK
    struct.pack_into("!H", reset, 16, len(reset) - 14)
    struct.pack_into("!H", reset, 24, 0)
    struct.pack_into("!H", reset, 24, ones_complement(reset[14:tcp]))
    return seal(reset, tcp)


def seal(frame, tcp):
    struct.pack_into("!H", frame, tcp + 16, 0)
    pseudo = bytes(frame[26:34]) + struct.pack("!HH", 6, len(frame) - tcp)
    struct.pack_into("!H", frame, tcp + 16, ones_complement(pseudo + bytes(frame[tcp:])))
    return bytes(frame)


def ones_complement(data):
    if len(data) % 2:
        data = bytes(data) + b"\0"
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
