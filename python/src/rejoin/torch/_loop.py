"""The turns of a session's loop: a step begins, and is updated; what is caught up with goes by in between."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from rejoin.errors import RejoinError
from rejoin.torch._sharding import gather_again
from rejoin.torch._step import Step

if TYPE_CHECKING:
    from rejoin.torch._session import Session

log = logging.getLogger("rejoin")


def begin_step(session: Session) -> Step | None:
    """Give the next step that this replica contributes to, and go through those before, in which it catches up."""
    assert session._ranks is not None
    # Ranks that train a step together end it together: leaves_after() says with which one.
    while not session._leaving.is_set() or (session._ranks.several and session._contributed):
        with session._leaving.waiting(at_once=not (session._ranks.several and session._contributed)):
            begun = session._native.begin_step()
        if begun is None:
            session._finished = True
            return None
        number, contributes, leads, contributors, batch = begun
        if contributes:
            if not session._contributed:  # what came after the last update has changed the session's memory alone
                _refresh(session)
            session._contributed = True
            session._zero_grad()  # of a backward() before
            session._buckets.begin()
            session._in_step, session._updated = True, False
            session._step = Step(number, leads, contributors, tuple(batch), session)
            return session._step
        session._contributed = False
        update(session, number)
    return None


def _refresh(session: Session) -> None:
    assert session._updates is not None
    with torch.no_grad():
        session._updates.refresh()
    gather_again(session._sharded)


def update(session: Session, step: int) -> None:
    """Wait for the step's decision, and apply it."""
    assert session._updates is not None
    with session._leaving.waiting(at_once=not session._in_step):
        pieces = session._native.begin_update()
    session._buckets.follow()
    if pieces is None:
        return
    try:
        with torch.no_grad():
            session._updates.look(step)
            session._updates.apply(step, pieces)
        gather_again(session._sharded)
    except BaseException as error:
        try:
            session._native.abandon_update(f"{type(error).__name__}: {error}")
        except RejoinError as ended:
            log.error("%s", ended)
        raise
    session._native.end_update(session._stream())
