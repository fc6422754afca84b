"""A process group over those who train a step: `Session.process_group()`."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rejoin import _native
from rejoin._options import is_everywhere
from rejoin._work import LONGEST
from rejoin.distributed import Options, ProcessGroup
from rejoin.errors import InvalidArgument, RejoinError, Unavailable
from rejoin.torch._busy import MOST_SECONDS

if TYPE_CHECKING:
    from rejoin.torch._busy import Busy
    from rejoin.torch._session import Session

_WATCHED = 100  # milliseconds, of one look at the members
_ASKED_AGAIN = 0.01  # seconds; whether the thread that looks at the members has left the native group
_ENDS_WITHIN = 5.0  # seconds; it looks no more, or waits for what this thread holds, in a signal's handler


def _who(members: Sequence[tuple[int, str]]) -> list[tuple[int, str]]:
    """Give the members without where they are, which may change, and of which not all hear at the same time."""
    return [(replica, card.rpartition(" ")[0]) for replica, card in members]


class SessionGroup(ProcessGroup):
    """The contributors of the step under way, by the numbers of their replicas; of each the same rank.

    Who they are follows the session. An operation fails, and does not wait, when one of them is lost; and then all of
    that step do. From the next step on the group has those that are left.

    What one of them gives up is broken for all, also for those whose own operations had ended well: who hears of it
    before it begins a step makes the connections anew in that step. Others may have begun something in the same step
    on those of before, and can't begin that again: they give the step up, and tell those who wait for them in it.
    """

    def __init__(
        self, native: _native.Session, replica: int, timeout: timedelta, options: Options, busy: Busy | None = None
    ) -> None:
        super().__init__(timeout, options)
        native.set_card(self.get_reconfigure_handle(), self._listening())
        self._session, self._replica, self._busy = native, replica, busy
        self._thread = threading.get_ident()  # the session's
        self._changed = threading.Condition(self._lock)  # which guards all below, too
        self._number, self._epoch = 0, 0
        self._members: list[tuple[int, str]] = []
        self._configured: list[tuple[int, str]] = []  # among whom it has connections
        self._of_before: set[int] = set()  # works that were begun among other members; others need not have any
        self._refused: str | None = "the first step has not begun"
        self._begun_here = False  # in this step, on connections that there are
        self._made_here = False  # in this step
        self._to_tell: tuple[int, list[str], str] | None = None  # of a step that is given up: its number, members, why
        self._telling: str | None = None  # why; its members come together to hear it
        self._over = False
        self._watcher = threading.Thread(target=self._watch, name="rejoin-members", daemon=True)
        self._watcher.start()

    def begin(self, number: int, epoch: int, settled: bool, cards: Sequence[tuple[int, str]]) -> None:
        """Begin a step, with these members; where it is not settled, they may not all know the same ones."""
        with self._changed:
            if self._over:
                return
            if self._refused is not None or self._native.failed():
                self._configured = []  # what has failed is not gone on with, here or on another member
            self._begun_here = self._made_here = False
            self._thread = threading.get_ident()
            self._number, self._epoch, self._members = number, epoch, sorted(cards)
            if _who(self._configured) != _who(self._members):
                self._of_before = set(self._pending)
            self._refused = None if settled else f"a replica was lost in step {number}"
            without = [replica for replica, card in cards if not card]
            if without:
                self._refused = f"replica {without[0]} has made no process_group()"
            self._changed.notify_all()

    def end_step(self) -> None:
        """Refuse more of the step where a replica was lost in it, which all of its members know now."""
        if not self._session.intact(0):
            self._refuse(self._number, "a replica was lost")

    def getRank(self) -> int:  # noqa: N802 - the names that torch calls
        """Give this replica's place among the members."""
        return [replica for replica, _ in self._members].index(self._replica) if self._members else 0

    def getSize(self) -> int:  # noqa: N802
        """Give the number of members; 0 before the first step."""
        return len(self._members)

    def reconfigure(self, opts: Any = None, **more: Any) -> Any:
        """Refuse: the members follow the session's."""
        raise InvalidArgument("the members of session.process_group() follow the session's")

    def end(self) -> None:
        """Begin nothing any more, and take no loss for one: the session leaves."""
        with self._changed:
            self._over = True
            self._refused = "the session has left the job, or this group was shut down"
            self._changed.notify_all()

    def shutdown(self) -> None:
        """Leave."""
        self.end()
        self._stop_telling()
        super().shutdown()
        if self._watcher is not threading.current_thread():
            self._watcher.join(_ENDS_WITHIN)  # left in C++ when the interpreter ends, it would end the process

    def _forked(self) -> None:
        super()._forked()
        self._changed = threading.Condition(self._lock)
        self._to_tell = self._telling = None

    def _start(self, *operation: Any, **more: Any) -> Any:
        with self._changed:
            self._check()
            number, members, configuration = self._number, self._members, self._configuration()
            # Not in each epoch: others may still be in operations of the step before.
            anew = _who(self._configured) != _who(members)
            self._begun_here = self._begun_here or not anew
        if anew:
            try:
                with self._waiting_for_members():
                    self._end_what_is_decided()
                    self._stop_telling()
                    self._native.reconfigure(configuration, [card for _, card in members], self._limit(None))
            except BaseException as error:
                self._give_up(number, f"its members have not come together: {error}")
                raise
            with self._changed:
                self._check()
                self._configured = members
                self._begun_here = self._made_here = True
        return super()._start(*operation, **more)

    def _configuration(self) -> int:
        """Give the number of the connections that are made in this step, if any are."""
        return self._epoch << 32 | self._number & 0xFFFFFFFF

    def _waiting_for_members(self) -> contextlib.AbstractContextManager[None]:
        """Say that this replica waits, which is no computing; in a thread of the script's own the session does not."""
        if self._busy is None or threading.get_ident() != self._thread:
            return contextlib.nullcontext()
        seconds = min(2 * self._limit(None) / 1000 + _ENDS_WITHIN, MOST_SECONDS)  # what is decided, and the members
        return self._busy.with_ours("the members of its process group, who come together", seconds)

    def _listening(self) -> str:
        """Give the handle with where it listens; nothing, where that is what the handle has."""
        known, _, address = self.get_reconfigure_handle().rpartition(" ")
        kind = self.options_given.transport.partition(";")[0]
        one = kind in ("tcp", "tcp+aes", "ibverbs") and "|" not in address
        if not one or self.options_given.advertise or not is_everywhere(self._listen):
            return ""
        host, _, port = address.rpartition(":")
        return f"{known} {self._listen.rpartition(':')[0] or ('[::]' if host[:1] == '[' else '0.0.0.0')}:{port}"

    def _end_what_is_decided(self) -> None:
        """Wait for operations of steps before, which would fail with the connections among those members.

        Each has a time-out, and who is lost ends them all; what they fail with they tell whoever waits for them.
        """
        with self._changed:
            goes_on = bool(self._configured)  # among the members of before nothing has failed
            works = [work for work in self._pending.values() if goes_on and id(work) in self._of_before]
        for work in works:
            for native in work.begun:
                with contextlib.suppress(RejoinError):
                    native.wait(LONGEST)
        with self._changed:
            self._check()

    def _check(self) -> None:
        if self._refused is not None:
            then = "" if self._over else ". With the next step it goes on"
            raise Unavailable(f"session.process_group() in step {self._number}: {self._refused}{then}")

    def _refuse(self, number: int, why: str) -> None:
        with self._changed:
            if number != self._number or self._refused is not None:
                return
            self._refused = why
            self._native.abort(f"in step {number}, {why}")  # within the lock: none of a step that begins now

    def _give_up(self, number: int, why: str) -> None:
        """Refuse more of the step, and tell members who make connections in it, or wait for that, instead."""
        with self._changed:
            if number != self._number or self._refused is not None:
                return
            self._refuse(number, why)
            if not self._made_here:  # else they have heard it over these connections
                handles = [card for _, card in self._members]
                self._to_tell = self._configuration(), handles, f"in step {number}, {why}"
                self._changed.notify_all()

    def _tell(self, number: int, handles: list[str], why: str) -> None:
        """Come together with those who do in a step that is given up, for them to hear it; until the next one."""
        try:
            self._native.reconfigure(number, handles, self._limit(None))
            self._native.abort(why)
        except RejoinError:
            pass  # all have given it up, or go on
        finally:
            with self._changed:
                self._telling = None
                self._changed.notify_all()

    def _stop_telling(self) -> None:
        """Have the native group to oneself: what comes together in the step before is over."""
        end = time.monotonic() + _ENDS_WITHIN
        with self._changed:
            self._to_tell = None
            while self._telling is not None and time.monotonic() < end:
                self._native.abort(self._telling)  # again: that thread may have been about to begin
                self._changed.wait(_ASKED_AGAIN)

    def let_go_of(self, work: Any) -> None:
        """Keep nothing of a work that has been settled; where it has failed, others of its step do, too."""
        with self._changed:
            of_before = id(work) in self._of_before
            self._of_before.discard(id(work))
            super().let_go_of(work)
            if work._error is not None and not of_before:
                self._give_up(self._number, f"an operation has failed: {work._error}")

    # A member that has died is missed by the group itself; one that hangs, or was put out for another reason, is not.
    def _watch(self) -> None:
        number = 0
        while True:
            with self._changed:
                while not self._over and not self._to_tell and (self._number == number or self._refused is not None):
                    self._changed.wait()
                if self._over:
                    return
                watched, to_tell, self._to_tell = self._number, self._to_tell, None
                self._telling = to_tell[2] if to_tell else None
            if to_tell is not None:
                self._tell(*to_tell)
            elif self._session.intact(_WATCHED):
                self._see_what_others_have_given_up()
            else:
                number = watched
                self._refuse(watched, "a replica was lost")

    def _see_what_others_have_given_up(self) -> None:
        with self._changed:
            if not self._over and self._begun_here and self._native.failed():
                self._give_up(self._number, "another member has given up")


def made_for(session: Session, timeout: timedelta, options: Options | None) -> SessionGroup:
    """Make the group of a session, which has none yet."""
    if session._joined or session._group is not None:
        raise InvalidArgument("process_group() comes once, before join(): the others are told how it is reached")
    if options is None:  # at a port of its own where the session listens

        def setting(name: str) -> str:
            return str(session._settings.get(name) or os.environ.get(f"REJOIN_{name.upper()}", ""))

        host = setting("data_listen").rpartition(":")[0] or "127.0.0.1"
        options = Options(listen=f"{host}:0", advertise=setting("advertise").partition(",")[0], device="host")
    return SessionGroup(session._native, session.replica, timeout, options, session._busy)
