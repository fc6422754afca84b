"""What a job waits for, on rejoin-run's terminal: who has started a job looks there, and not into the logs."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from typing import Any

LOOKS_EVERY_SECONDS = 10.0
STANDS_SECONDS = 30.0  # without a step, once the job has begun: a step may take long
_GOES_ON_AFTER = 3  # steps between two looks, and what it waits for is told again when it stands still again

_ROLL_BACK = " (with rejoin-run REJOIN_ROLL_BACK_TO=STEP@STEPS in its environment)"
_STOPPED = (
    ". Its processes wait, with their states, for who wants to look at them; none of them goes on under this "
    "rejoin-run, which can't be given that word: end it with Ctrl-C, and start it again with the same --directory and "
    "scripts that load a checkpoint of before (it says then with which REJOIN_ROLL_BACK_TO), or with another directory"
)


class Waits:
    """Looks now and then at what the job waits for, and says each thing once.

    Until a step is committed that is whatever it waits for; from then on, what it has stood still for for long.
    """

    def __init__(
        self, status: Callable[[], dict[str, Any]], say: Callable[[str], None], on_begun: Callable[[], None]
    ) -> None:
        """`status`: the coordinator's, or nothing where it can't be had. `on_begun`: the first step is committed."""
        self._status, self._say, self._on_begun = status, say, on_begun
        self.look_at = math.inf
        self.first: int | None = None  # the last committed step when one was first seen
        self.has_begun = True
        self._committed: int | None = None
        self._since = 0.0  # when that was first seen
        self._told: set[str] = set()

    def begin(self, status: dict[str, Any]) -> None:
        """Look from now on, unless the job is finished."""
        self.first = self._committed = status.get("committed")
        self._since = time.monotonic()
        if not status.get("finished"):
            self.has_begun, self.look_at = False, self._since + LOOKS_EVERY_SECONDS

    def look(self) -> None:
        """Look once, and say what there is to say."""
        now = time.monotonic()
        self.look_at = now + LOOKS_EVERY_SECONDS
        status = self._status()
        if not status:
            return
        committed = int(status["committed"])
        if self.first is None:
            self.first = self._committed = committed
        if committed != self._committed:
            if not self.has_begun or committed - (self._committed or 0) >= _GOES_ON_AFTER:
                self._told.clear()
            if not self.has_begun:
                self.has_begun = True
                self._on_begun()
            self._committed, self._since = committed, now
            return
        if stopped := status.get("stopped"):
            self._tell(f"the job has stopped: {stopped}{_STOPPED}")
        elif not self.has_begun or now - self._since >= STANDS_SECONDS:
            for line in status.get("waiting_for", []):
                self._tell(f"the job waits for {line}{_ROLL_BACK if '--roll-back-to' in line else ''}")

    def _tell(self, line: str) -> None:
        known = re.sub(r"[0-9.]+ m?s\b|step [0-9]+", "", line)  # what goes on in it
        if known not in self._told:
            self._told.add(known)
            self._say(line)
