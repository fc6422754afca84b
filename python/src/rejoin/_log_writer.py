"""Writes the logs of rejoin-run's scripts, from their pipes: a full disk costs what they say then, and no script.

    _log_writer.py CONTROL PIPE LOG [PIPE LOG ...]

A process of its own, in a session of its own and with the signals blocked that rejoin-run waits for: scripts do not
wait for a reader while rejoin-run is stopped, and say their last words when it was killed. It ends when nobody has the
other ends of the pipes any more. Who asks by the control socket is answered when all that was in the pipes is written.
"""

import os
import select
import sys

_MOST_BYTES = 1 << 20  # all that a pipe of rejoin-run's holds


class _Log:
    def __init__(self, path: str) -> None:
        self._path = path
        self._in_line = False  # the last byte that was written ended none
        self._left_out = 0  # bytes, behind that one
        self.why = ""  # the last ones were left out

    # As it comes, since a progress bar ends no lines; and into the file that is there now, so that it may be moved
    # away or removed at any time.
    def write(self, said: bytes) -> None:
        head = b""
        if self._left_out:
            head = b"\n" * self._in_line + os.fsencode(
                f"... {self._left_out} bytes were left out, since this file did not take them: {self.why}\n"
            )
        rest = text = head + said
        try:
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                while rest:
                    rest = rest[os.write(file, rest) :]
            finally:
                os.close(file)
            self.why = ""
        except OSError as error:
            self.why = os.strerror(error.errno or 0)
        written = len(text) - len(rest)
        if written:
            self._in_line = text[written - 1] != ord("\n")
        self._left_out = (self._left_out if written < len(head) else 0) + min(len(rest), len(said))

    # Also of a script that says no more: how much is not there, as soon as there is room for that.
    def try_again(self) -> None:
        if self.why:
            self.write(b"")


def _main(control: int, logs: dict[int, _Log]) -> None:
    poll = select.poll()
    for each in (control, *logs):
        poll.register(each, select.POLLIN)

    def take(pipe: int) -> None:
        try:
            said = os.read(pipe, _MOST_BYTES)
        except BlockingIOError:
            return
        if said:
            logs[pipe].write(said)
        else:
            poll.unregister(pipe)
            logs.pop(pipe).try_again()

    def answer() -> None:
        try:
            question = os.read(control, 1)
            if question:
                for pipe in [*logs]:
                    take(pipe)
                for log in logs.values():
                    log.try_again()
                why = next((log.why for log in logs.values() if log.why), "")
                os.write(control, question + os.fsencode(why))
        except OSError:  # rejoin-run has ended
            question = b""
        if not question:
            poll.unregister(control)

    while logs:
        for each, _ in poll.poll():
            if each == control:
                answer()
            elif each in logs:
                take(each)


if __name__ == "__main__":
    _main(int(sys.argv[1]), {int(pipe): _Log(path) for pipe, path in zip(sys.argv[2::2], sys.argv[3::2], strict=True)})
