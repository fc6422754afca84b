"""What was given to `Session.load_state_dict()`: a checkpoint's parts, or an error that says what it is instead."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rejoin import _native
from rejoin.errors import Corrupt, InvalidArgument

# Behind a position: what the optimizer had counted before the job, which its own counts, of float32, tell up to 2^24.
# Behind that the metrics' names. They are no keys of their own, as dcp.load() refuses a checkpoint without one, such as
# an older one.
_COUNTED, _METRICS = " counted=", " metrics="
_TAKEN = "load_state_dict() takes what state_dict() gave, or a plain job's {'model': …, 'optimizer': …}"
_WEIGHTS = "load the weights into the model before attach(), model.load_state_dict(…), and the job begins with them"


def beside_position(position: str, counted: int, metrics: Sequence[str]) -> str:
    """Give a position with what is kept behind it."""
    return f"{position}{_COUNTED}{counted}{_METRICS}{json.dumps(list(metrics))}"


@dataclass(frozen=True)
class Position:
    """Where the job stood."""

    text: str = ""
    step: int = 0
    counted: int | None = None  # None: an older checkpoint does not say it
    metrics: list[str] | None = None

    @staticmethod
    def of(place: Mapping[str, Any]) -> Position:
        """Take it out of a rank's part of a checkpoint."""
        text = place.get("position")
        if "position" not in place or not isinstance(text, str | None):
            raise Corrupt("the checkpoint does not say where the job stood: its 'rejoin' is no session.state_dict()'s")
        if text is None:
            return Position()
        try:
            position, _, beside = text.partition(_COUNTED)
            counted, _, names = beside.partition(_METRICS)
            return Position(
                position,
                _native.position_step(position) if position else 0,
                int(counted) if counted else None,
                json.loads(names) if names else None,
            )
        except ValueError as error:
            raise Corrupt(f"the checkpoint's position can't be taken: {error}") from None


def check(state: Any) -> None:
    """Raise `InvalidArgument` for what has not the form of a checkpoint."""
    if not isinstance(state, Mapping):
        raise InvalidArgument(f"{_TAKEN}, and this is {_kind(state)}")
    if "model" not in state:
        raise InvalidArgument(f"{_TAKEN}, and this {_told(state)}")
    for name in ("model", "optimizer", "rejoin"):
        part = state.get(name, {})
        if not isinstance(part, Mapping) and not (name == "optimizer" and part is None):
            raise InvalidArgument(f"the checkpoint's '{name}' is {_kind(part)}, and has to be {_SHOULD_BE[name]}")
    optimizer = state.get("optimizer") or {}
    entries, groups = optimizer.get("state", {}), optimizer.get("param_groups", [])
    if not isinstance(entries, Mapping) or not all(isinstance(entry, Mapping) for entry in entries.values()):
        raise InvalidArgument("the checkpoint's 'optimizer' has a 'state' that is no optimizer.state_dict()'s")
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        raise InvalidArgument("the checkpoint's 'optimizer' has 'param_groups' that are no optimizer.state_dict()'s")
    for rank, place in state.get("rejoin", {}).items():
        if not isinstance(place, Mapping):
            raise Corrupt(f"the checkpoint's part of {rank} is {_kind(place)}")
    if "rejoin" in state and not state["rejoin"]:
        raise Corrupt("the checkpoint's 'rejoin' is empty, and has a part of each rank that session.state_dict() is of")


_SHOULD_BE = {
    "model": "model.state_dict()",
    "optimizer": "optimizer.state_dict()",
    "rejoin": "what session.state_dict() has there",
}


def _kind(what: Any) -> str:
    return "None" if what is None else f"of type {type(what).__name__}"


def _told(state: Mapping[str, Any]) -> str:
    names = ", ".join(map(repr, list(state)[:5])) + (", …" if len(state) > 5 else "")
    if state and all(isinstance(value, torch.Tensor) for value in state.values()):
        return f"is a model's state_dict() by itself ({names}): {_WEIGHTS}"
    if isinstance(state.get("state_dict"), Mapping):
        return f"has the weights in 'state_dict', as Lightning's: {_WEIGHTS}"
    if set(state) == {"state", "param_groups"}:
        return "is an optimizer's state_dict() by itself"
    return f"has {names or 'nothing'}"
