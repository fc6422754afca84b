"""What a job waits for, on rejoin-run's terminal: who has started a job looks there, and not into the logs."""

from __future__ import annotations

import math
import re
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from rejoin._kept import ranks_of

LOOKS_EVERY_SECONDS = 10.0
STANDS_SECONDS = 30.0  # without a step, once the job has begun; a job of long steps stands still for so many of them:
_STANDS_STEPS = 3.0
_STEPS_REMEMBERED = 9  # of which the middle one counts, so that an outage makes no long steps
_HANGS_SECONDS = 60.0  # a script that has not ended so long after its replica was put out
_BEGUN_SECONDS = 20.0  # before that; one that has begun since compiles, say. It may be known late who is lost
_GOES_ON_AFTER = 3  # steps since a line, and what the job waits for is told again when it stands still again

_ROLL_BACK = " (with rejoin-run REJOIN_ROLL_BACK_TO=STEP@STEPS in its environment)"
_REMEDY = re.compile(r"(\. Start|, end one replica, and start) the coordinator, or all of several, again.*", re.DOTALL)
_ITS_SCRIPT = "its trainers have to be started again"  # of what comes next
_STOPPED = (
    ". Its processes wait, with their states, for who wants to look at them, and none of them can go on under this "
    "rejoin-run: end it with Ctrl-C, and start it again with the same --directory and scripts that load a checkpoint "
    "of before (it says then with which REJOIN_ROLL_BACK_TO), or with another directory"
)


class Waits:
    """Looks now and then at what the job waits for, and says each thing once.

    Until a step is committed that is whatever it waits for; from then on, what it has stood still for for long.
    """

    def __init__(
        self,
        status: Callable[[], dict[str, Any]],
        say: Callable[[str], None],
        on_begun: Callable[[], None],
        lives: Callable[[int], tuple[int, float] | None] = lambda _: None,
        by_torchrun: bool = False,
    ) -> None:
        """`status`: the coordinator's, or nothing where it can't be had. `on_begun`: the first step is committed.
        `lives`: the process of a replica's script, and since when, while it runs; `by_torchrun`: of its torchrun."""
        self._status, self._say, self._on_begun, self._lives = status, say, on_begun, lives
        self._by_torchrun = by_torchrun
        self._hang: set[int] = set()  # processes that were told of
        self._out_since: dict[tuple[int, int], float] = {}  # replica and process, of those that are out
        self.look_at = math.inf
        self.first: int | None = None  # the last committed step when one was first seen
        self.has_begun = True
        self._committed: int | None = None
        self._since = 0.0  # when that was first seen
        self._took: deque[float] = deque(maxlen=_STEPS_REMEMBERED)  # a step, from look to look
        self._told: set[str] = set()
        self._told_at = 0  # the last committed step then
        self._stopped: str | None = None  # at the last look

    def begin(self, status: dict[str, Any]) -> None:
        """Look from now on, unless the job is finished."""
        self.first = self._committed = status.get("committed")
        self._since = time.monotonic()
        if not status.get("finished"):
            self.has_begun, self.look_at = False, self._since + LOOKS_EVERY_SECONDS

    def stop(self) -> None:
        """Look no more: the job ends."""
        self.has_begun, self.look_at = True, math.inf

    def look(self) -> None:
        """Look once, and say what there is to say."""
        now = time.monotonic()
        self.look_at = now + LOOKS_EVERY_SECONDS
        status = self._status()
        if not status:
            return
        self._look_at_those_out(status, now)
        committed = int(status["committed"])
        if self.first is None:
            self.first = self._committed = committed
        stopped, before = status.get("stopped"), self._stopped
        self._stopped = stopped
        if committed != self._committed:
            self._goes_on(committed, now)
        elif stopped:
            # Of a job that is started again it may be what stopped the one before, until all have registered.
            if self.has_begun or stopped == before:
                self._tell(f"the job has stopped: {_REMEDY.sub('', stopped)}{_STOPPED}")
        elif not self.has_begun or now - self._since >= self._stands_seconds():
            for line in status.get("waiting_for", []):
                self._tell(f"the job waits for {line}{_ROLL_BACK if '--roll-back-to' in line else ''}")

    # Its script can't come back, and ends when it hears so; one that hangs, or is stopped, hears nothing.
    def _look_at_those_out(self, status: dict[str, Any], now: float) -> None:
        out_since = {}
        for out in status.get("out", []):
            replica, lives = int(out["replica"]), self._lives(int(out["replica"]))
            if lives is None:
                continue
            process, began = lives
            # A coordinator that was started again does not know it of who was out before.
            since = now - out["for_ms"] / 1000 if "for_ms" in out else self._out_since.get((replica, process), now)
            out_since[replica, process] = since
            if now - since < _HANGS_SECONDS or not out["next"].endswith(_ITS_SCRIPT):
                continue
            if process in self._hang or since - began < _BEGUN_SECONDS:
                continue
            self._hang.add(process)
            self._say(
                f"replica {replica} is out of the job for {now - since:.0f} s, and its {self._how_to_end(process)}: it "
                f"is started again. The job goes on without it: {out['reason']}"
            )
        self._out_since = out_since

    def _how_to_end(self, process: int) -> str:
        end = f"and end it (kill -9 {process})"
        if self._by_torchrun:
            if ranks := ranks_of(process):
                return (
                    f"torchrun, process {process}, does not end: one of the ranks that it has started hangs, or is "
                    f"stopped: {'; '.join(ranks)}. See where (py-spy dump --pid of each), {end}"
                )
            return (
                f"torchrun, process {process}, does not end: one of the ranks that it has started hangs, or is "
                f"stopped. See which and where (py-spy dump --pid of each that pgrep -P {process} gives), {end}"
            )
        return (
            f"script, process {process}, does not end: it hangs, or is stopped. See where (py-spy dump --pid "
            f"{process}), {end}"
        )

    def _goes_on(self, committed: int, now: float) -> None:
        if self.has_begun:
            self._took.append((now - self._since) / max(1, committed - (self._committed or 0)))
        if not self.has_begun or committed - self._told_at >= _GOES_ON_AFTER:
            self._told.clear()
        if not self.has_begun:
            self.has_begun = True
            self._on_begun()
        self._committed, self._since = committed, now

    def _stands_seconds(self) -> float:
        return max(STANDS_SECONDS, _STANDS_STEPS * statistics.median(self._took)) if self._took else STANDS_SECONDS

    def _tell(self, line: str) -> None:
        # What goes on in it: times, and in a step who waits for which part of what.
        known = re.sub(r"(: its reduction of step).*|[0-9.]+ m?s\b|step [0-9]+", r"\1", line, flags=re.DOTALL)
        if known not in self._told:
            self._told.add(known)
            self._told_at = self._committed or 0
            self._say(line)
