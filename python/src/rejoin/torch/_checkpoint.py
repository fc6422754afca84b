"""What a checkpoint of a session has, and how a session takes one in: `Session.state_dict()`, `load_state_dict()`."""

from __future__ import annotations

import itertools
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from rejoin.errors import Corrupt, InvalidArgument, Mismatch
from rejoin.torch import _form, _optimizer
from rejoin.torch._form import beside_position
from rejoin.torch._signals import WithinUpdate

if TYPE_CHECKING:
    from rejoin.torch._metrics import Metrics
    from rejoin.torch._session import Session
    from rejoin.torch._tensors import Tensor

log = logging.getLogger("rejoin")

# A setting of the same rule may have added it since, and then it begins with zeros, or dropped it.
_BY_SETTING = frozenset({"max_exp_avg_sq"})
_REMEDY = "where that is meant, session.load_state_dict(state, changed=True)"
_FIRST_RANK = "rank0"  # whose part those take that the checkpoint does not know
_BY_NUMBER = re.compile(r"optimizer\.state\.\d+\.\w+")
_BY_NUMBERS = "and optimizer.state_dict()'s is by numbers: save session.state_dict()"
_NOT_THERE = object()


def checkpoint_of(session: Session) -> dict[str, Any]:
    """Give the state as `Session.state_dict()` says."""
    if session._model is None or session._optimizer is None or session._updates is None:
        raise InvalidArgument("state_dict() comes after attach()")
    if session._leaving.signals.holds:
        raise WithinUpdate(
            "state_dict() within optimizer.step(), or while this replica catches up: the state is of no one step. Let "
            "a signal's handler set a flag, and the loop's body call state_dict() after optimizer.step(), if it is set"
        )
    if session._averaging:
        raise InvalidArgument('state_dict() within averaged(): it is always of the weights; ["average"] has these')
    for tensor in session._tensors:
        tensor.check_memory()
    state: dict[str, Any] = {"model": session._model.state_dict(), "optimizer": session._optimizer.state_dict()}
    updated = _as_updated(session, state["model"])
    parameters = [tensor for tensor in session._tensors if tensor.is_parameter]
    masters = {t.name: t.optimizers(t.columns[0]) for t in parameters if t.has_master}
    average = {t.name: t.optimizers(t.columns[-1]) for t in parameters if t.averaged}
    state.update({name: of for name, of in (("masters", masters), ("average", average)) if of})
    beside = (session._updates.offset, session._metrics.names)
    of_rank: dict[str, Any] = {
        "position": beside_position(session._native.position(), *beside) if session._joined else None,
        "version": session._native.committed() if session._joined else 0,
        "metrics": updated.get("rejoin.metrics"),  # of the last step: a part of the state
        "loss_scale": session._loss_scale,
    }
    if session._ranks is not None and session._ranks.several:  # of one name, and each rank's own
        of_rank["buffers"] = {t.name: updated[t.name] for t in session._tensors if t.is_buffer}
    state["rejoin"] = {f"rank{session.rank}": of_rank}
    return state


class _Entries(dict[int, Any]):
    """What an optimizer keeps for each parameter, so much as this one does too; `left_out`: moments of others."""

    def __init__(self, entries: Mapping[int, Any], stored: Mapping[str, Any]) -> None:
        super().__init__(entries)
        self.left_out: dict[int, set[str]] = {}
        for name, of in stored.items():
            if _BY_NUMBER.fullmatch(name) and hasattr(of, "properties"):  # a tensor
                number, moment = int(name.split(".")[2]), name.split(".")[3]
                if moment not in entries.get(number, ()):
                    self.left_out.setdefault(number, set()).add(moment)


def template_of(session: Session, checkpoint: Any) -> dict[str, Any]:
    """Give what `dcp.load()` is to fill, as `Session.state_dict(of=…)` says."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    if session._joined:
        raise InvalidArgument("state_dict(of=…) gives what dcp.load() fills before join()")
    by_path = isinstance(checkpoint, str | os.PathLike)
    stored = (FileSystemReader(checkpoint) if by_path else checkpoint).read_metadata().state_dict_metadata
    known = set(stored)  # and what they lie in
    for name in stored:
        if name.startswith("optimizer.state.") and not _BY_NUMBER.fullmatch(name):
            raise InvalidArgument(f"the optimizer's state is by names ('{name}'), {_BY_NUMBERS}")
        while name := name.rpartition(".")[0]:
            known.add(name)
    state = checkpoint_of(session)
    del state["rejoin"]
    template = {name: part for name, of in state.items() if (part := _part(of, name, known, stored)) is not _NOT_THERE}
    if "state" in template.get("optimizer", {}):
        template["optimizer"]["state"] = _Entries(template["optimizer"]["state"], stored)
    groups = template.get("optimizer", {}).get("param_groups", [])
    while f"optimizer.param_groups.{len(groups)}.params" in stored:  # so that load_state_dict() sees that it has more
        groups.append({"params": None})
    rank = f"rank{session.rank}" if f"rejoin.rank{session.rank}" in known else _FIRST_RANK
    if f"rejoin.{rank}" in known:
        template["rejoin"] = {rank: _of_rank(stored, f"rejoin.{rank}.")}
    return template


# Names are those of torch.distributed.checkpoint for what lies in dictionaries and lists: "optimizer.state.0.exp_avg".
def _part(of: Any, name: str, known: set[str], stored: Mapping[str, Any]) -> Any:
    if name in stored:
        return of
    if name not in known:
        return _NOT_THERE
    if isinstance(of, Mapping):
        parts = {key: _part(value, f"{name}.{key}", known, stored) for key, value in of.items()}
        return {key: part for key, part in parts.items() if part is not _NOT_THERE}
    if isinstance(of, list):
        every = [_part(value, f"{name}.{number}", known, stored) for number, value in enumerate(of)]
        return [part for part in every if part is not _NOT_THERE]
    return _NOT_THERE


# As it is stored: there may be other metrics.
def _of_rank(stored: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {"buffers": {}}
    for name, of in stored.items():
        if name.startswith(prefix):
            kind, _, buffer = name[len(prefix) :].partition(".")
            (found["buffers"] if buffer else found)[buffer or kind] = (
                torch.empty(of.size, dtype=of.properties.dtype, device="cpu") if hasattr(of, "properties") else None
            )
    return found


# What a script writes to buffers and metrics after the update is its part of the step to come; a position is of what
# they were before: that is put into the model's state, and given by name.
def _as_updated(session: Session, of_model: dict[str, Any]) -> dict[str, torch.Tensor]:
    others = [tensor for tensor in session._tensors if not tensor.is_parameter]
    if not session._joined:
        return {tensor.name: tensor.value for tensor in others}
    updated = {tensor.name: tensor.view(tensor.columns[0]).to(tensor.value.dtype) for tensor in others}
    at = {_place(tensor.value): tensor for tensor in others if tensor.is_buffer}
    for name, value in of_model.items():  # one that is shared has several names
        tensor = at.get(_place(value)) if type(value) is torch.Tensor else None
        if tensor is not None:
            of_model[name] = updated[tensor.name]
    return updated


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


@contextmanager
def remedy_in_python() -> Iterator[None]:
    """Within this block, in which the session joins: where the state is another one than the position's, say it so."""
    try:
        yield
    except Mismatch as error:
        what, found, _ = str(error).partition("; where they are meant to differ, ")
        if not found:
            raise
        raise Mismatch(
            f"{what}; where metrics, average, loss scale, masters, buffers, the optimizer or the number of ranks are "
            "meant to be others than the checkpoint's, session.load_state_dict(state, changed=True)"
        ) from None


def restore(session: Session, state: Mapping[str, Any], changed: bool = False) -> None:
    """Take the state in as `Session.load_state_dict()` says."""
    if session._model is None or session._optimizer is None or session._updates is None or session._joined:
        raise InvalidArgument("load_state_dict() comes after attach() and before join()")
    _form.check(state)
    place = _place_of(session, state["rejoin"], changed) if "rejoin" in state else None
    position = _form.Position.of(place) if place is not None else _form.Position()
    _load_model(session._model, state["model"], changed)
    if place is not None:
        _load_metrics(session._metrics, place.get("metrics"), position.metrics, changed)
        if session._loss_scale is not None and place.get("loss_scale") is not None:
            session._loss_scale.copy_(place["loss_scale"])
    _load_optimizer(session, state.get("optimizer") or {}, position, changed)
    session._position, session._compares = position.text or None, not changed
    buffers = place.get("buffers", {}) if place is not None else {}
    with torch.no_grad():
        for tensor in session._tensors:
            if tensor.name in buffers:
                tensor.value.copy_(buffers[tensor.name])
        for tensor in session._tensors:
            if not tensor.is_parameter:
                tensor.take_changes()
            elif tensor.has_master:
                tensor.take(tensor.columns[0], state.get("masters", {}).get(tensor.name, tensor.value))
            if tensor.averaged:
                tensor.average_loaded = tensor.name in state.get("average", {})
                tensor.take(tensor.columns[-1], state.get("average", {}).get(tensor.name, tensor.value))


def _place_of(session: Session, ranks: Mapping[str, Any], changed: bool) -> Mapping[str, Any]:
    place: Mapping[str, Any] | None = ranks.get(f"rank{session.rank}", ranks.get(_FIRST_RANK) if changed else None)
    if place is None and changed:
        raise InvalidArgument(
            f"the checkpoint knows {', '.join(ranks)}, and not {_FIRST_RANK}, from which other ranks than its own take "
            f"what is each rank's: give rank {session.rank} the file that {_FIRST_RANK} has written"
        )
    if place is None:
        raise InvalidArgument(
            f"the checkpoint knows {', '.join(ranks)}, and this is rank {session.rank} of its replica: where other "
            "ranks than the checkpoint's are meant, session.load_state_dict(state, changed=True)"
        )
    return place


class _AnotherModel(InvalidArgument, RuntimeError):
    """As torch has it, and as every call here."""


def _load_model(model: torch.nn.Module, state: Mapping[str, Any], changed: bool) -> None:
    try:
        loaded = model.load_state_dict(state, strict=not changed)
    except RuntimeError as error:  # torch's, which names what differs
        raise _AnotherModel(f"the checkpoint's model is another one: {error}") from error
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if missing := sorted(parameters.intersection(loaded.missing_keys)):
        raise InvalidArgument(f"the checkpoint has no parameter '{missing[0]}': buffers alone may be others than its")
    for names, what in (
        (loaded.missing_keys, "lacks the buffers"),
        (loaded.unexpected_keys, "has what is not the model's:"),
    ):
        if names:
            log.warning("the checkpoint %s %s", what, ", ".join(map(repr, names)))


# By name; those that the checkpoint does not have begin with zeros. Older ones have no names.
def _load_metrics(metrics: Metrics, values: torch.Tensor | None, names: list[str] | None, changed: bool) -> None:
    if values is None or metrics.state is None:
        return
    if names is None and len(values) == len(metrics.names):
        names = list(metrics.names)
    if names != list(metrics.names) and not changed:
        has = f"the metrics {names}" if names is not None else f"{len(values)} metrics"
        raise InvalidArgument(f"the checkpoint has {has}, and attach() was given {list(metrics.names)}: {_REMEDY}")
    if names is not None and len(names) != len(values):
        raise Corrupt(f"the checkpoint has the metrics {names}, and {len(values)} means of metrics")
    loaded = dict(zip(names or (), values.tolist(), strict=True)) if names is not None else {}
    metrics.values.copy_(torch.tensor([loaded.get(name, 0.0) for name in metrics.names], dtype=values.dtype))


def _load_optimizer(session: Session, saved: Mapping[str, Any], position: _form.Position, changed: bool) -> None:
    assert session._optimizer is not None and session._updates is not None
    saved = _of_trained(saved, session._optimizer)
    state: Mapping[int, Mapping[str, Any]] = saved.get("state", {})
    held = {id(tensor.value): tensor for tensor in session._tensors}
    order = [p for group in session._optimizer.param_groups for p in group["params"]]
    for number in state:
        if not isinstance(number, int):
            raise InvalidArgument(f"the optimizer's state is by names ('{number}'), {_BY_NUMBERS}")
        if number >= len(order):
            raise InvalidArgument(
                f"the checkpoint's optimizer has parameter number {number}, and this one {len(order)} of them"
            )
    tensors = [held[id(parameter)] for parameter in order]
    left_out = state.left_out if isinstance(state, _Entries) else {}
    entries = [(tensors[n], entry, left_out.get(n, set())) for n, entry in state.items()]
    another = _another(session, saved, entries, position.step)
    if another and not changed:
        raise InvalidArgument(f"{another}: {_REMEDY} lets it begin anew")
    if another:
        log.warning("the optimizer begins anew: %s", another)
    for number, entry in state.items():
        if another:
            tensors[number].drop_state(entry)
        else:
            tensors[number].take_state(entry)
    if another and any(tensor.kept.step is not None for tensor in tensors):  # it counts from the job's next step on
        session._updates.offset = -position.step
        session._updates.count_all(position.step)
        return
    counted = _optimizer.counted((t.name, t.kept, state.get(number, {})) for number, t in enumerate(tensors))
    if not another and state and counted is not None:
        session._updates.offset = position.counted if position.counted is not None else counted - position.step
        session._updates.count_all(position.step)


# A plain job's optimizer may have had frozen parameters, too, which it passed over: this one has the others alone, and
# numbers them anew.
def _of_trained(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> Mapping[str, Any]:
    groups, own = saved.get("param_groups"), _sizes(optimizer.param_groups)
    state = saved.get("state", {})
    if groups is None or _sizes(groups) in (None, own) or isinstance(state, _Entries):
        return saved
    trained = [[number for number in group["params"] if state.get(number)] for group in groups]
    trained = [numbers for numbers in trained if numbers]
    if [len(numbers) for numbers in trained] != own:
        return saved
    anew = {number: place for place, number in enumerate(itertools.chain(*trained))}
    return {
        "state": {anew[number]: entry for number, entry in state.items() if number in anew},
        "param_groups": [{"params": [anew[number] for number in numbers]} for numbers in trained],
    }


# Moments of one rule, or some of them, are nothing to another one. Where an optimizer has never updated a parameter, it
# keeps nothing for it, and it has kept nothing at all before its first step.
def _another(
    session: Session, saved: Mapping[str, Any], entries: list[tuple[Tensor, Mapping[str, Any], set[str]]], step: int
) -> str | None:
    """Say why the checkpoint's optimizer can't be this one; None where it can."""
    name = type(session._optimizer).__name__
    if not saved or ("state" not in saved and "param_groups" not in saved):
        return "the checkpoint has no optimizer's state"
    kept_at_all = False
    for tensor, entry, left_out in entries:
        kept = left_out | {key for key, value in entry.items() if value is not None}
        kept -= {key for key in tensor.kept.moments if not isinstance(entry.get(key), torch.Tensor)}
        if not kept:
            continue
        kept_at_all = True
        keeps = {*tensor.kept.moments, *([tensor.kept.step] if tensor.kept.step is not None else [])}
        if (kept ^ keeps) - _BY_SETTING:
            return (
                f"the checkpoint's optimizer is another one: for '{tensor.name}' it has kept "
                f"{', '.join(sorted(kept))}, and {name} keeps {', '.join(sorted(keeps)) or 'nothing'}"
            )
    assert session._optimizer is not None
    keeps_something = any(t.kept.moments or t.kept.step is not None for t in session._tensors if t.is_parameter)
    if not kept_at_all and step > 0 and keeps_something:
        return f"the checkpoint, of step {step}, has nothing of what {name} keeps for the parameters"
    sizes, own = _sizes(saved.get("param_groups")), _sizes(session._optimizer.param_groups)
    # Numbers of parameters are those of all groups in a row: they mean the same ones in the same groups alone.
    if sizes is not None and sizes != own:
        return f"the checkpoint's optimizer has groups of {sizes} parameters, and this {name} of {own}"
    return None


def _sizes(groups: Sequence[Mapping[str, Any]] | None) -> list[int] | None:
    params = [group.get("params") for group in groups or ()]
    if groups is None or not all(isinstance(of, list) for of in params):
        return None
    return [len(of) for of in params if of is not None]
