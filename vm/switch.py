"""An Ethernet switch between QEMUs (-netdev socket,connect=…): frames go to the port their address was seen at, or to
all. One thread for each."""
import selectors
import socket
import struct
import threading


class Switch(threading.Thread):
    def __init__(self):
        super().__init__(daemon=True)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.waiting = {}  # port → bytes of frames not yet whole
        self.seen_at = {}  # address → port
        self.start()

    def run(self):
        while True:
            for key, _ in self.selector.select():
                if key.fileobj is self.listener:
                    port, _ = self.listener.accept()
                    port.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    self.waiting[port] = b""
                    self.selector.register(port, selectors.EVENT_READ)
                else:
                    self.receive(key.fileobj)

    def receive(self, port):
        try:
            got = port.recv(1 << 18)
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
            try:
                other.sendall(b"".join(frames))
            except OSError:
                self.drop(other)

    def drop(self, port):
        if self.waiting.pop(port, None) is None:
            return
        self.selector.unregister(port)
        self.seen_at = {address: at for address, at in self.seen_at.items() if at is not port}
        port.close()
