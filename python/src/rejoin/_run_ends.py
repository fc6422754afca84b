"""What rejoin-run says of a job whose scripts have ended."""

from __future__ import annotations

from collections.abc import Set
from typing import Any


def ended_early(status: dict[str, Any], name: str, left: int, replicas: int) -> str:
    """Say that this replica's script has ended with 0 before the job; nothing where the job has ended, by its status,
    or that is not known, or where no replica is left: what is to be said then is `at_the_end`'s."""
    if not status or status.get("finished") or left == 0:
        return ""
    return (
        f"{name} ended with status 0 before the job's end, and is not started again, as it would be after any other: "
        f"the job goes on with {left} of {replicas} replicas"
    )


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
        of = f" of {steps}" if steps else ""
        return 0, [
            f"all scripts have ended with status 0, and the job is not finished: step {committed}{of} is committed, "
            "and what they have saved is what is left of it"
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
