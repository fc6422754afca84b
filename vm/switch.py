"""An Ethernet switch between QEMUs (-netdev socket,connect=…): frames go to the port their address was seen at, or to
all. It waits for nobody: a port that does not read loses frames, as with a real switch, and the others go on. (If it
waited, the others' QEMUs could not write meanwhile, and a guest's transmit queue that has stood still may stay so.)
One thread for each."""
import selectors
import socket
import struct
import threading

MOST_PENDING = 16 << 20  # bytes for a port that does not read


class Switch(threading.Thread):
    def __init__(self):
        super().__init__(daemon=True)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.waiting = {}  # port → bytes of frames not yet whole
        self.pending = {}  # port → bytes of whole frames that it has not taken yet
        self.seen_at = {}  # address → port
        self.start()

    def run(self):
        while True:
            for key, ready in self.selector.select():
                if key.fileobj is self.listener:
                    port, _ = self.listener.accept()
                    port.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    port.setblocking(False)
                    self.waiting[port], self.pending[port] = b"", bytearray()
                    self.selector.register(port, selectors.EVENT_READ)
                    continue
                if ready & selectors.EVENT_WRITE:
                    self.send(key.fileobj)
                if ready & selectors.EVENT_READ and key.fileobj in self.waiting:
                    self.receive(key.fileobj)

    def receive(self, port):
        try:
            got = port.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            got = b""
        if not got:
            return self.drop(port)
        data = self.waiting[port] + got
        at, outgoing = 0, {}
        while len(data) - at >= 4:
            (length,) = struct.unpack_from(">I", data, at)
            if len(data) - at - 4 < length:
                break
            frame = data[at:at + 4 + length]
            at += 4 + length
            to, source = frame[4:10], frame[10:16]
            self.seen_at[source] = port
            known = self.seen_at.get(to)
            for other in [known] if known is not None else [p for p in self.waiting if p is not port]:
                if other is not port:
                    outgoing.setdefault(other, []).append(frame)
        self.waiting[port] = data[at:]
        for other, frames in outgoing.items():
            if other in self.pending and len(self.pending[other]) < MOST_PENDING:
                self.pending[other] += b"".join(frames)
                self.send(other)

    def send(self, port):
        if port not in self.pending:
            return
        pending = self.pending[port]
        try:
            while pending:
                del pending[:port.send(pending[:1 << 18])]
        except BlockingIOError:
            pass
        except OSError:
            return self.drop(port)
        self.selector.modify(port, selectors.EVENT_READ | (selectors.EVENT_WRITE if pending else 0))

    def drop(self, port):
        if self.waiting.pop(port, None) is None:
            return
        del self.pending[port]
        self.selector.unregister(port)
        self.seen_at = {address: at for address, at in self.seen_at.items() if at is not port}
        port.close()
