"""How a model's and an optimizer's tensors come into a session's memory: `Session.attach()`."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch

from rejoin._memory import TYPES
from rejoin.errors import InvalidArgument
from rejoin.torch import _optimizer, _refusals
from rejoin.torch._buffers import buffers_of, reduced_buffers
from rejoin.torch._memory import tensor_at, type_of
from rejoin.torch._metrics import Metrics
from rejoin.torch._modes import one_thread
from rejoin.torch._places import Places
from rejoin.torch._ranks import Ranks
from rejoin.torch._sharding import gather_again, local, states_of
from rejoin.torch._tensors import Tensor, buckets_of, is_dense, parameters_of
from rejoin.torch._update import Rules, Update

if TYPE_CHECKING:
    from rejoin.torch._session import Session

log = logging.getLogger("rejoin")

Function = TypeVar("Function", bound=Callable[..., Any])


def check(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    rules: Rules,
    loss_scale: float | None,
    gradients: torch.dtype | None,
    bucket_bytes: int,
) -> None:
    """Refuse what no session can keep equal on all replicas."""
    if not isinstance(model, torch.nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgument(
            f"attach() takes a torch.nn.Module and a torch.optim.Optimizer, not a {type(model).__name__} and a "
            f"{type(optimizer).__name__}"
        )
    max_norm, ema = rules.max_norm, rules.ema
    for name, number in (("max_norm", max_norm), ("ema", ema), ("loss_scale", loss_scale)):
        if number is not None:
            _refusals.refuse_no_number(name, number)
    _refusals.refuse_no_number("bucket_bytes", bucket_bytes)
    if rules.lr is not None and not callable(rules.lr):
        raise InvalidArgument(f"lr={rules.lr!r}: it is a function of the step, such as lr=lambda step: 0.1")
    if max_norm is not None and not max_norm > 0.0:
        raise InvalidArgument(f"max_norm={max_norm}: it is to be above 0, such as 1.0; None does not clip")
    if ema is not None and not 0.0 < ema < 1.0:
        raise InvalidArgument(f"ema={ema}: it is to be between 0 and 1, such as 0.999")
    if gradients is not None and (gradients not in TYPES or not gradients.is_floating_point):
        raise InvalidArgument(
            f"gradients={gradients}: they are reduced in a type of floating point: float32, float64, bfloat16, float16"
        )
    _refusals.refuse_wrappers(optimizer)
    _refusals.refuse_hooks(optimizer)
    _refusals.refuse_step_of_its_own(optimizer)
    _refusals.refuse_closure(optimizer)
    if loss_scale is not None and (loss_scale < 1.0 or math.frexp(loss_scale)[0] != 0.5):
        raise InvalidArgument(f"loss_scale={loss_scale}: it is to be a power of 2, such as 65536")


def refuse_another() -> NoReturn:
    """Raise `InvalidArgument`: a session has been attached, or has failed where that can't be done once more."""
    raise InvalidArgument(
        "attach() comes once: several models go into one torch.nn.ModuleList, with one optimizer over them, whose "
        "groups may have settings of their own. After an attach() that has failed, open another Session"
    )


def refuse_overlaps(model: torch.nn.Module, tensors: list[Tensor]) -> None:
    """Raise `InvalidArgument` where a parameter shares memory with what is another object: one of them would move."""
    moved = {id(tensor.value) for tensor in tensors if tensor.is_parameter}
    spans: list[tuple[int, int, str, bool]] = []
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        own = local(value.detach())
        if type(own) is not torch.Tensor or not is_dense(own) or own.is_meta or own.numel() == 0:
            continue
        length = 1 + sum((size - 1) * stride for size, stride in zip(own.shape, own.stride(), strict=True))
        begin = own.data_ptr()
        spans.append((begin, begin + length * own.itemsize, name, id(value) in moved))
    furthest: dict[bool, tuple[int, str]] = {}  # of those that move, and of those that stay
    for begin, end, name, moves in sorted(spans):
        for of in (True, False) if moves else (True,):
            reach, other = furthest.get(of, (0, ""))
            if begin < reach:
                raise InvalidArgument(
                    f"'{name}' and '{other}' lie in the same memory and are two objects, of which attach() would move "
                    "one: tie parameters by assigning the one (out.weight = emb.weight), and let a buffer be a clone()"
                )
        furthest[moves] = max(furthest.get(moves, (0, "")), (end, name))


def refuse_new_buffers(model: torch.nn.Module, tensors: list[Tensor]) -> None:
    """Raise `InvalidArgument` where the model has buffers by now that it had not with attach()."""
    known = {id(tensor.value) for tensor in tensors}
    for name, buffer in reduced_buffers(model):
        if id(buffer) not in known:
            raise InvalidArgument(
                f"buffer '{name}' was registered, or got its elements, after attach(), and would be each replica's "
                "own: register it before, as spectral_norm() and other parametrizations do theirs, call the model "
                "once before attach() where forward() makes it, or register it with persistent=False"
            )


def refuse_join(session: Session) -> None:
    """Raise `InvalidArgument`, before anything is changed, where the session can't join."""
    if session._model is None:
        raise InvalidArgument("join() before attach()")
    if session._warming:
        raise InvalidArgument("join() within warm_up(): what is done there leaves no trace, so join behind it")
    if session._joined or session._ended:
        has = "has left the job: open another one" if session._ended else "has joined: session.steps() goes on with it"
        raise InvalidArgument(f"join() comes once, and this session {has}")


def take_what_was_done_since(session: Session) -> None:
    """Take what was written to the tensors between attach() and join(), and refuse what can't be trained so."""
    assert session._model is not None and session._optimizer is not None and session._places is not None
    refuse_averaged(session)
    if session._rules.lr is None:
        _refusals.refuse_schedule(session._optimizer)
    session._places.check()
    with torch.no_grad():
        for tensor in session._tensors:
            tensor.check_place()
            tensor.take_changes()
            tensor.note_version()
    refuse_new_buffers(session._model, session._tensors)
    session._places.extra.note()


def refuse_state_of_forward(session: Session) -> None:
    """Raise `InvalidArgument` where a step's forward() has put other parameters into the model, and in its first steps
    where it has thawed some, made buffers or changed what is no part of the session.

    Of what comes later there is an error in the log alone, since all replicas would end in the same step, or one that
    comes back in each of its lives, and what was thawed is frozen again.
    """
    if session._model is None or session._places is None:
        return
    assert session._step is not None and session._updates is not None
    places = session._places
    step = session._step.number
    early = session._updates.settings.early(step)
    try:
        changed = places.check()
    except InvalidArgument as error:
        if early or not places.freeze_again():
            raise
        changed = places.check()
        if (times := places.frozen_again) & (times - 1) == 0:
            log.error("step %d: %s. It was frozen again (so far: %d): all replicas go on as before", step, error, times)
    looks: list[Callable[[], None]] = []
    if changed or not places.trained:
        looks.append(partial(refuse_new_buffers, session._model, session._tensors))
    if early or not places.trained:
        looks.append(places.extra.check)
    for look in looks:
        try:
            look()
        except InvalidArgument as error:
            if early:
                raise
            log.error("step %d: %s", step, error)
    places.trained = True


def attach(
    session: Session,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    metrics: Sequence[str],
    loss_scale: float | None,
    masters: bool,
    gradients: torch.dtype | None,
    main_grad: bool,
    bucket_bytes: int,
) -> None:
    """Do what `Session.attach()` says, with what `check()` has passed. In the modes that updates are made in."""
    rules, device = session._rules, session.device
    ranks = session._ranks = Ranks(session.rank, session._leaving, session._native.check)
    _refusals.refuse_types(model, masters)
    with one_thread(device):
        parameters = parameters_of(
            model,
            optimizer,
            device,
            masters,
            rules.ema is not None,
            ranks.several,
            gradients,
            main_grad,
            rules.skip_nonfinite,
        )
    tensors = [*parameters, *buffers_of(model, device)]
    refuse_overlaps(model, tensors)
    _refusals.refuse_shared_state(optimizer, parameters)
    session._metrics = Metrics(metrics, device, ranks)
    session._model, session._optimizer, session._sharded = model, optimizer, states_of(model)  # what follows comes once
    double = torch.float64
    if session._metrics.names:
        session._metrics.tensor = Tensor("rejoin.metrics", session._metrics.values, dtype=double, gradient_dtype=double)
        tensors.append(session._metrics.tensor)
    scale = None
    if loss_scale is not None:
        session._loss_scale = torch.tensor([math.log2(loss_scale), 0.0], dtype=double, device=device)
        scale = Tensor("rejoin.loss_scale", session._loss_scale, False, dtype=double, gradient_dtype=double)
        tensors.append(scale)
    session._places = Places(model, tensors, session._sharded)
    declare(session, tensors, bucket_bytes)
    session._updates = Update(session._native, optimizer, tensors, rules, device, ranks, scale)
    for tensor in tensors:
        place(session, tensor)
    take_calls(optimizer, session._commit, session._zero_grad)


def declare(session: Session, tensors: list[Tensor], bucket_bytes: int) -> None:
    """Declare the tensors and their buckets, and have the session allocate memory for them."""
    _refusals.refuse_names(tensors)
    session._tensors = tensors
    for tensor in tensors:
        kind, *kinds = (type_of(f"'{tensor.name}'", dtype) for dtype in (tensor.dtype, *tensor.moments))
        reduced = type_of(f"'{tensor.name}'", tensor.gradient_dtype)
        tensor.index = session._native.add(
            tensor.name, kind, tensor.count, len(kinds), tensor.elementwise, None, kinds, reduced
        )
    for bucket in buckets_of(tensors, bucket_bytes):
        number = session._native.bucket([tensor.index for tensor in bucket])
        if not bucket[0].is_parameter:  # its mean is taken as it is: nothing makes up for what coding would lose
            session._native.keep_exact(number)
        for tensor in bucket:
            tensor.bucket = number
        session._buckets.add(bucket)
    session._native.allocate()
    session._native.use_weights()  # Buckets multiplies with them


def _at(session: Session, memory: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    return tensor_at(session._native, memory[0], memory[1] // dtype.itemsize, dtype, session.device)


def place(session: Session, tensor: Tensor) -> None:
    """Move a tensor, and what the optimizer keeps of it, into the session's memory."""
    dtype = tensor.dtype
    tensor.columns = [_at(session, session._native.weight(tensor.index), dtype)]
    tensor.columns += [_at(session, session._native.moment(tensor.index, i), of) for i, of in enumerate(tensor.moments)]
    tensor.gradient = _at(session, session._native.gradient(tensor.index), tensor.gradient_dtype)
    tensor.reduced = _at(session, session._native.reduced(tensor.index), tensor.gradient_dtype)
    tensor.place()
    if not tensor.is_parameter:
        return
    if tensor.averaged:
        tensor.columns[-1].copy_(tensor.columns[0])
    _take_over_state(session, tensor)
    parameter = tensor.value
    parameter.grad = None
    if tensor.main_grad:
        parameter.main_grad = tensor.view(tensor.gradient)  # type: ignore[attr-defined]
    hook: Any = parameter.register_post_accumulate_grad_hook  # type: ignore[attr-defined]
    reference = weakref.ref(session)  # autograd keeps its hooks where Python's collector does not look

    def on_gradient(_: torch.Tensor) -> None:
        if (alive := reference()) is not None:
            alive._on_gradient(tensor)

    hook(uncompiled(on_gradient))  # else it is compiled for each parameter, where backward() is


# What the optimizer has kept already, say from a checkpoint of plain PyTorch, goes on here.
def _take_over_state(session: Session, tensor: Tensor) -> None:
    assert session._optimizer is not None and session._updates is not None
    state = session._optimizer.state.get(tensor.value, {})
    if not tensor.kept.from_zeros and not set(tensor.kept.moments) <= set(state):
        raise InvalidArgument(
            f"{type(session._optimizer).__name__} begins with other state than zeros for '{tensor.name}', which is not "
            f"known before its first step. {_optimizer.USE}"
        )
    tensor.take_state(state)
    shaped = [tensor.optimizers(column) for column in tensor.columns[1 : 1 + len(tensor.kept.moments)]]
    session._optimizer.state[tensor.value] = tensor.kept.state(session._updates.offset, shaped, tensor.scratch)


def lay(session: Session, column: int) -> None:
    """Let the parameters be this column of theirs: 0 for the weights, -1 for their averages."""
    with torch.no_grad():
        for tensor in session._tensors:
            if tensor.averaged:
                tensor.lay(tensor.columns[column])
    gather_again(session._sharded)


def refuse_averaged(session: Session) -> None:
    """Raise `InvalidArgument` where the parameters are averages still, as none can be trained."""
    if session._averaging:
        raise InvalidArgument(
            "session.averaged() has not ended, and a step would train the averages: let its block end in the loop's "
            "body, behind optimizer.step(). One that a contextlib.ExitStack holds ends with that"
        )


def uncompiled(function: Function) -> Function:
    """Let this run as it is, also where a compiled function calls it.

    Compiled into that, an update has other bits than those of the parts that a replica which catches up applies.
    """
    return torch.compiler.disable(function)  # type: ignore[no-any-return, no-untyped-call]


def take_calls(
    optimizer: torch.optim.Optimizer, commit: Callable[[Any], Any], zero_grad: Callable[[bool], None]
) -> None:
    """Let the optimizer's calls be the session's."""
    commit, zero_grad = uncompiled(commit), uncompiled(zero_grad)

    def step(_: torch.optim.Optimizer, closure: Any = None) -> Any:
        return commit(closure)

    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):  # else a scheduler warns that it was overridden
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign] # torch's schedulers bind it once more
    optimizer.zero_grad = zero_grad  # type: ignore[assignment, method-assign]
    optimizer.load_state_dict = refuse_load  # type: ignore[assignment, method-assign]
    optimizer.add_param_group = refuse_group  # type: ignore[assignment, method-assign]
    # torch's GradScaler is to call step() as that of an optimizer which takes the scale itself, and is given it.
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]


def refuse_scaler(optimizer: torch.optim.Optimizer) -> None:
    """Raise `InvalidArgument` where it is a GradScaler that calls step()."""
    if vars(optimizer).pop("found_inf", None) is not None:
        raise InvalidArgument(
            "torch's GradScaler: its scale is each replica's own, and gradients would count as often as it says. Give "
            "attach() loss_scale=, and call step.scale(loss).backward() and optimizer.step()"
        )


def refuse_load(state_dict: Mapping[str, Any]) -> None:
    raise InvalidArgument(
        "optimizer.load_state_dict() after attach() would lay the state outside of the session: load it before, or by "
        "session.load_state_dict()"
    )


def refuse_group(param_group: Mapping[str, Any]) -> None:
    raise InvalidArgument("optimizer.add_param_group() after attach(): all parameters are declared with attach()")
