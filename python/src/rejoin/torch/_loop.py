"""The turns of a session's loop: a step begins, and is updated; what is caught up with goes by in between."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils.data import DataLoader

from rejoin.errors import InvalidArgument, RejoinError
from rejoin.torch import _attach
from rejoin.torch._buckets import FIRST
from rejoin.torch._data import LONGEST_WAIT, Fetcher
from rejoin.torch._leaving import Terminated
from rejoin.torch._refusals import refuse_interrupted
from rejoin.torch._sharding import check_reduced, drop_gradients, gather_again
from rejoin.torch._step import Step
from rejoin.torch._tensors import Tensor

if TYPE_CHECKING:
    from rejoin.torch._session import Session

log = logging.getLogger("rejoin")

_MOST_LOADERS = 2  # whose workers stay: of two that a script takes by turns, say


def fetcher_of(session: Session, loader: DataLoader[Any]) -> Fetcher:
    """Give this loader's fetcher. Where a new one comes in each data epoch, say, workers of those before are let go."""
    fetcher = session._fetchers.get(id(loader))
    if fetcher is None:
        fetcher = Fetcher(loader, session._busy.with_ours, _look_of(session))
        while len(session._fetchers) >= _MOST_LOADERS:
            with session._busy.with_ours("the end of a DataLoader's workers", LONGEST_WAIT):
                session._fetchers.pop(next(iter(session._fetchers))).stop()
    others = {key: one for key, one in session._fetchers.items() if one is not fetcher}
    session._fetchers = {**others, id(loader): fetcher}  # behind those that were used before
    return fetcher


# What ends a wait for workers: that the replica is out of the job, or SIGTERM.
def _look_of(session: Session) -> Callable[[], None]:
    check, leaving = session._native.check, session._leaving

    def look() -> None:
        check()
        leaving.look()

    return look


def fetch(session: Session, fetcher: Fetcher, step: Step) -> Any:
    """Give the data of a step's samples."""
    with session._leaving.waiting(at_once=False):
        return fetcher.fetch(step.samples, session._native.upcoming)


# What is raised within comes out of the native session's wait, in which no step has begun, or from behind it.
def _begun(session: Session) -> tuple[int, bool, bool, int, list[tuple[int, int]], int, int, bool] | None:
    before, session._may_have_begun = session._may_have_begun, True
    try:
        begun = session._native.begin_step()
    except InvalidArgument:
        if before:
            refuse_interrupted(session._native.check, "the beginning of a step")
        raise
    session._beginning = begun is not None
    session._may_have_begun = False
    return begun


def begin_step(session: Session) -> Step | None:
    """Give the next step that this replica contributes to, and go through those before, in which it catches up."""
    assert session._ranks is not None
    if session._in_step and session._updated:
        assert session._step is not None
        session._in_step = False
        # Ranks that train a step together end it together: this says with which one, also where the loop was left.
        if session._ranks.leaves_after(session._step.number, session._leaving.is_set()):
            session._metrics.keep()
            session._ranks.leave_together()
            return None
    while not session._leaving.is_set() or (session._ranks.several and session._contributed):
        if session._in_step:
            return _again(session)
        if session._beginning:  # something was raised between the native session's beginning of a step and the loop's
            refuse_interrupted(session._native.check, "the beginning of a step")
        if session._group is not None:
            session._group.end_step()
        with session._leaving.waiting(at_once=not (session._ranks.several and session._contributed)):
            begun = _begun(session)
        if begun is None:
            session._finished = True
            if session._metrics.names:
                session._metrics.keep()
            # A slower rank may ask for the last step's mean, which this one has the store of, or no part in.
            session._ranks.leave_together()
            return None
        _attach.refuse_averaged(session)  # not before: behind the last step it does no harm
        number, contributes, leads, contributors, batch, weight, epoch, settled = begun
        assert session._updates is not None
        session._updates.settings.begin(number, contributes)
        if contributes:
            if not session._contributed:  # what came after the last update has changed the session's memory alone
                _refresh(session)
            session._contributed = True
            zero_grad(session)  # of a backward() before
            session._buckets.begin(weight, early=session._updates.settings.early(number, FIRST))
            if session._group is not None:
                session._group.begin(number, epoch, settled, session._native.cards())
            session._step = Step(number, leads, contributors, tuple(batch), weight, session)
            # Last: what a handler raises before is met by a refusal, and behind it by _again().
            session._in_step, session._updated, session._beginning = True, False, False
            return session._step
        session._contributed = False
        session._updates.check(number)
        update(session, number)
        session._beginning = False
    return None


# The step that the loop was left in, such as by break.
def _again(session: Session) -> Step:
    step = session._step
    assert step is not None and session._updates is not None
    session._native.check()
    if any(tensor.arrived for tensor in session._tensors):
        raise InvalidArgument(
            f"session.steps() was left in step {step.number} after its backward(), and the others have its gradients: "
            "leave it after optimizer.step()"
        )
    _refresh(session)  # of what its forward() has written to buffers
    zero_grad(session)
    session._buckets.begin(step.weight, early=session._updates.settings.early(step.number, FIRST))
    return step


@contextmanager
def computes(session: Session, step: Step) -> Iterator[None]:
    """Let the others wait within this block, up to `optimizer.step()`, where the batch is the first of its size."""
    session._busy.begin_step(sum(end - begin for begin, end in step.samples))
    session._passes, session._parts_left = 1, 0
    try:
        yield
    finally:
        session._busy.end_step(trained=False)


def on_gradient(session: Session, tensor: Tensor) -> None:
    """Take what backward() has brought, and hand over what is complete with it."""
    if session._ended or not session._in_step or session._updated:  # another session may have the model by now
        return
    session._buckets.note_backward()
    tensor.came += not session._accumulating
    if (session._accumulating or tensor.came < session._passes) and not tensor.arrived:
        if tensor.main_grad:
            session._buckets.add_up(tensor)
        return
    if tensor.arrived:
        raise InvalidArgument(
            f"a second gradient of '{tensor.name}' in step {session._step.number if session._step else 0}: all but the "
            "last backward() of a step belong into 'with session.accumulate():', and so does the only one where "
            "checkpoint(use_reentrant=True) runs a layer twice; use_reentrant=False needs none. Where one has raised "
            "when it had brought some, it can't be tried again: let this process end, it is started again"
        )
    session._buckets.bring(tensor)


def zero_grad(session: Session) -> None:
    """Take back the gradients that have not been handed over: the optimizer's zero_grad(), as the script calls it."""
    drop_gradients(session._sharded)
    if not any(tensor.arrived for tensor in session._tensors):
        session._buckets.forget_backward()
    for tensor in session._tensors:
        if tensor.is_parameter:
            tensor.value.grad = None
        if not tensor.arrived:
            tensor.came = 0
        if tensor.main_grad and not tensor.arrived and session._in_step and not session._updated:
            tensor.gradient.zero_()


def _refresh(session: Session) -> None:
    assert session._updates is not None
    with torch.no_grad():
        session._updates.refresh()
    gather_again(session._sharded)


@contextmanager
def averaged(session: Session) -> Iterator[None]:
    """Let the parameters be their averages within this block: `Session.averaged()`."""
    if session._rules.ema is None:
        raise InvalidArgument("averaged() without averages: attach(…, ema=0.999)")
    if session._in_step and not session._updated:
        raise InvalidArgument("averaged() comes after optimizer.step()")
    if session._averaging:  # a block within another one: they are averages up to the end of that
        yield
        return
    session._averaging = True
    try:
        _attach.lay(session, -1)
        yield
    finally:
        _attach.lay(session, 0)
        session._averaging = False


def steps(session: Session, loader: DataLoader[Any] | None) -> Iterator[tuple[Step, Any]]:
    """Give each step and its data, up to the job's end."""
    if session._ended:
        return
    fetcher = fetcher_of(session, loader) if loader is not None else None
    begins = _attach.uncompiled(begin_step)  # it applies updates
    try:
        if not session._joined:
            session.join()
        while (step := begins(session)) is not None:
            data = fetch(session, fetcher, step) if fetcher else step.samples
            with computes(session, step):
                yield step, data
            if not session._updated:
                _refuse_without_update(session, step)
    except Terminated:
        pass
    log.info("replica %d rank %d leaves after step %d", session.replica, session.rank, session._native.committed())
    session.leave()


# The loop asks for the next step's data, and has not ended this one: it may have passed over what step() raised.
def _refuse_without_update(session: Session, step: Step) -> NoReturn:
    session._native.check()
    raise InvalidArgument(
        f"step {step.number} has ended without optimizer.step(), which each step that is given ends with. To leave a "
        "batch out, as after an exception, call optimizer.step() without its backward(): it counts as zeros. A loop "
        "that takes data ahead has to be told how much comes, session.data(loader, steps=…); one that accumulates "
        "gradients over several batches gets them as parts of one step's, session.data(loader, micro_batches=…), or "
        "divides it and does all but the last part within session.accumulate()"
    )


def commit(session: Session, closure: Callable[[], Any] | None) -> Any:
    """End a step: the optimizer's step(), as the script calls it. Gives what the closure does, which is called once."""
    assert session._optimizer is not None
    _attach.refuse_scaler(session._optimizer)
    warming = session._warming and not session._joined  # a function that is compiled with its optimizer.step()
    if not warming and (not session._in_step or session._updated):
        raise InvalidArgument("optimizer.step() is due once in each step that session.steps() gives")
    if session._parts_left > 0 and not warming:
        raise InvalidArgument(
            f"optimizer.step() with {session._parts_left} of this step's {session._passes} parts of data to come, "
            "which would not be trained: call it behind the last one, as many as session.data(micro_batches=…) says"
        )
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    if warming:
        zero_grad(session)
    else:
        _commit(session)
    return loss


def _commit(session: Session) -> None:
    assert session._step is not None and session._updates is not None
    check_reduced(session._sharded)
    for tensor in session._tensors:
        tensor.check_place()
        tensor.check_version()
    _attach.refuse_state_of_forward(session)
    session._updates.check(session._step.number)
    session._buckets.bring_rest()
    session._busy.end_step()
    try:
        update(session, session._step.number)
    except Terminated:
        with suppress(RejoinError):
            session.leave()
        raise


def update(session: Session, step: int) -> None:
    """Wait for the step's decision, and apply it. Handlers of signals wait, and run when all is done."""
    with session._leaving.signals.held():
        try:
            _update(session, step)
        except BaseException as error:
            _abandon(session, error)
            raise
        if session._in_step:
            session._updated = True
    assert session._updates is not None
    session._updates.refuse_late_state()  # not before: the step is decided, and the state can be saved


def _update(session: Session, step: int) -> None:
    assert session._updates is not None
    with session._leaving.waiting(at_once=not session._in_step):
        updates = session._native.begin_update()
    session._buckets.follow()
    if updates is None:
        return
    assert session._modes is not None
    with session._modes.held():
        session._updates.look(step)
        if session._in_step:
            session._metrics.tell(step)
        session._updates.apply(step, updates)
    for tensor in session._tensors:  # a Queue's thread may move them at any time
        tensor.check_memory()
    gather_again(session._sharded)
    session._native.end_update(session._stream())
    if session._in_step:  # what has been caught up with was not coded here
        session._updates.scale_feedback(step)


# What was raised may have come before the update had begun, or behind its end: then there is none to abandon.
def _abandon(session: Session, error: BaseException) -> None:
    try:
        session._native.abandon_update(f"{type(error).__name__}: {error}")
    except InvalidArgument:
        pass
    except RejoinError as ended:
        if str(ended) != str(error):
            log.error("%s", ended)


def leave(session: Session) -> None:
    """End this replica's part in the job, as the script says, or where nothing is left to do."""
    if session._in_step and session._updated and not session._ended and session._ranks is not None:
        assert session._step is not None
        try:
            session._metrics.keep()
            session._ranks.leave_by_itself(session._step.number)
        except BaseException:
            with suppress(RejoinError):
                end(session)
            raise
    end(session)


def end(session: Session) -> None:
    """End this replica's part in the job, wherever it is, and wait for nobody."""
    session._ended = True
    session._standing.stop()
    with ExitStack() as ends:  # the others wait for none of these: torch gives each worker 5 s to end
        for fetcher in session._fetchers.values():
            ends.callback(fetcher.stop)
        if session._group is not None:
            session._group.end()
            ends.callback(session._group.shutdown)
        if session._joined:
            _leave(session)


# Also where an exception, which another thread may raise here anywhere, has kept update() from abandoning.
def _leave(session: Session) -> None:
    try:
        session._native.leave()
    except InvalidArgument:
        _abandon(session, InvalidArgument("the script leaves in the midst of it"))
