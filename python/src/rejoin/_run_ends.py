"""What rejoin-run says of a job whose scripts have ended."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any


class EarlyEnds:
    """Replicas whose scripts have ended with 0 before the job. That is said when the job goes on without them: scripts
    that stop early end all after the same step, one a little later than the other."""

    def __init__(self, status: Callable[[], dict[str, Any]], say: Callable[[str], None]) -> None:
        """`status`: the coordinator's, or nothing where it can't be had."""
        self._status, self._say = status, say
        self._ended: dict[str, int] = {}  # and what was committed then

    def add(self, name: str) -> None:
        """Take note that this one's script has ended with 0."""
        status = self._status()
        if status and not status.get("finished"):
            self._ended[name] = int(status["committed"])

    def look(self, left: int, replicas: int) -> None:
        """Say which have ended, of those that the job goes on without; at the job's end it is `at_the_end`'s."""
        status = self._status() if self._ended else {}
        if not status:
            return
        if status.get("finished") or left == 0:
            self._ended.clear()
        for name in [name for name, committed in self._ended.items() if committed < status["committed"]]:
            del self._ended[name]
            self._say(f"{name} ended with status 0 before the job's end, and is not started again, as it would be "
                      f"after any other: the job goes on with {left} of {replicas} replicas")  # fmt: skip


def at_the_end(status: dict[str, Any], first: int | None, steps: int, died: Set[str]) -> tuple[int, list[str]]:
    """Give the exit status of rejoin-run, and what to say when all scripts have ended, unasked.

    `first`: the step of the job that was committed when it was started; `died`: replicas, after the last commit. The
    exit status is 1 where all that had the last state are among these, and 0 where the scripts have ended by
    themselves, also before the job: they may have stopped early, all in the same step.
    """
    committed = status.get("committed")
    if not status.get("finished"):
        if committed is None:
            return 0, []
        if committed == first:
            return 0, ["no step was committed: the scripts have ended without one"]
        if not steps:  # it has no end of its own
            return 0, [f"all scripts have ended with status 0: step {committed} is committed"]
        return 0, [
            f"all scripts have ended with status 0, and the job is not finished: step {committed} of {steps} is "
            "committed, and what they have saved is what is left of it"
        ]
    said = [f"finished: step {committed} is committed"]
    had = {f"replica {one['replica']}" for one in status.get("members", []) if one["role"] == "contributor"}
    if not had or had - died:
        return 0, said
    return 1, [
        *said,
        "each replica that had the state of the last step has died before its script had ended: what it was to do at "
        "the end, such as a final save, may not be done",
    ]
