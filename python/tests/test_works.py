"""Operations of process groups under way: who holds their memory, and what signals' handlers find."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from pairs import make_pair

import rejoin
from rejoin._collectives import Staged
from rejoin._work import Work

LONG = timedelta(seconds=60)


class Memory(bytearray):
    """What a tensor lies in; it can be asked whether it is still there."""

    def tensor(self):
        return torch.frombuffer(self, dtype=torch.float32)


@pytest.fixture
def pair():
    """Two members in this process."""
    groups = make_pair(LONG)
    yield groups
    for group in groups:
        group.shutdown()


def until(true):
    limit = time.monotonic() + 60
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.001)


class Interrupted:
    """The native group of one whose signal's handler raises when an operation has just begun."""

    def __init__(self, native):
        self.native = native

    def start(self, *args):
        self.native.start(*args)
        raise KeyboardInterrupt


def test_what_is_interrupted_when_it_has_begun_keeps_its_memory_until_it_has_ended(pair):
    """Others still write there."""
    memory = Memory(4_000_000)
    held, group, native = weakref.ref(memory), pair[0], pair[0]._native
    group._native = Interrupted(native)
    with pytest.raises(KeyboardInterrupt):
        group.allreduce([memory.tensor()])
    group._native = native
    del memory
    group.let_go_of_ended()
    gc.collect()
    assert held() is not None
    pair[1].allreduce([torch.ones(1_000_000)]).wait()

    def freed():
        group.let_go_of_ended()
        return held() is None

    until(freed)


def test_one_that_does_not_begin_keeps_nothing(pair):
    memory = Memory(400)
    held = weakref.ref(memory)
    options = dist.ReduceOptions()
    options.rootRank = 7
    with pytest.raises(rejoin.InvalidArgument, match="rank 7"):
        pair[0].reduce([memory.tensor()], options)
    del memory
    gc.collect()
    assert held() is None


def test_a_message_that_is_long_waited_for_keeps_no_other_works_memory(pair):
    later = pair[0].recv([torch.empty(10)], 1, 9)
    held = []
    for _ in range(40):
        memory = Memory(4000)
        held.append(weakref.ref(memory))
        works = [pair[0].allreduce([memory.tensor()]), pair[1].allreduce([torch.ones(1000)])]
        until(lambda works=works: all(work.is_completed() for work in works))
        del memory, works
    gc.collect()
    assert sum(one() is not None for one in held) < 5
    assert not later.is_completed()
    pair[1].send([torch.ones(10)], 0, 9)
    later.wait()


class Native:
    """An operation that ends when it is told to."""

    def __init__(self):
        self.ended = threading.Event()

    def done(self):
        return self.ended.is_set()

    def wait(self, limit_ms):
        if not self.ended.wait(limit_ms / 1000):
            raise rejoin.DeadlinePassed("not yet")


class Group:
    """Has nothing to do with them."""

    def let_go_of(self, *_):
        pass

    let_go_of_ended = settle_when_done = let_go_of


def test_several_have_ended_when_all_have(pair):
    """A small one may end before a big one that was begun before it."""
    big, small, group = Work(Group(), Staged(), []), None, Group()
    small = Work(group, Staged(others=[big]), [])
    big.begun.append(first := Native())
    small.begun.append(second := Native())
    second.ended.set()
    assert not small.is_completed()
    assert not small.is_success()
    with pytest.raises(rejoin.DeadlinePassed):
        big.wait(timedelta(milliseconds=1))
    first.ended.set()
    assert small.is_completed()
    assert small.wait()
    # And so of torch's calls: what is complete is there.
    tensors = [[torch.ones(8_000_000), torch.ones(3)] for _ in pair]
    works = [group.allreduce_coalesced(mine) for group, mine in zip(pair, tensors, strict=True)]
    until(works[0].is_completed)
    assert all(tensor.eq(2).all() for tensor in tensors[0])
    works[1].wait()


def test_results_are_in_tensors_that_are_copied_when_the_operation_is_complete(pair):
    strided, small = ([torch.ones(2, 6)[:, ::2] for _ in pair], [torch.ones(3, dtype=torch.uint8) for _ in pair])
    for tensors in (strided, small):
        works = [group.allreduce([mine]) for group, mine in zip(pair, tensors, strict=True)]
        until(works[0].is_completed)
        assert tensors[0].eq(2).all()
        tensors[0].zero_()  # it is the caller's again
        works[1].wait()
        for group in pair:
            group.let_go_of_ended()
        works[0].wait()
        assert tensors[0].eq(0).all()


class Breaks(Staged):
    """Its copies are interrupted once."""

    interrupted = 0

    def write_back(self):
        if self.interrupted == 0:
            self.interrupted = 1
            raise KeyboardInterrupt
        super().write_back()


def test_a_result_whose_copy_was_interrupted_is_copied_by_the_next_wait():
    to, group = torch.zeros(3), Group()
    work = Work(group, Breaks(copies=[(to, torch.ones(3))]), [to])
    work.begun.append(native := Native())
    native.ended.set()
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    assert work.wait()
    assert to.eq(1).all()


class Again(Staged):
    """A signal's handler waits for the work whose result is just copied."""

    def write_back(self):
        handled, self.handled = getattr(self, "handled", False), True
        if not handled:
            self.work.settle()
        super().write_back()


def test_a_signals_handler_may_wait_for_the_work_that_it_has_interrupted():
    to, group = torch.zeros(3), Group()
    staged = Again(copies=[(to, torch.ones(3))])
    staged.work = work = Work(group, staged, [to])
    work.begun.append(native := Native())
    native.ended.set()
    thread = threading.Thread(target=work.wait, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert to.eq(1).all()


def test_a_future_that_is_asked_for_after_the_end_is_complete(pair):
    works = [group.allreduce([torch.ones(10)]) for group in pair]
    for work in works:
        work.begun[0].wait(60_000)  # the operation has ended, and nobody has asked torch's work
    late = pair[0].allreduce([torch.ones(10)])  # alone
    for group in pair:
        group.shutdown()
    assert works[0].get_future().wait()[0].eq(2).all()
    with pytest.raises(Exception, match="shut down|has left"):
        late.get_future().wait()


def test_a_callback_may_begin_a_collective_and_wait_for_it(pair):
    """It runs in the thread that completes futures, which is one for each group."""

    def callback(group, depth):
        def call(_):
            future = group.allreduce([torch.full((5,), float(depth))]).get_future()
            if depth == 3:
                return future.wait()[0]
            return future.then(callback(group, depth + 1)).wait()

        return call

    def run(group):
        given.append(group.allreduce([torch.ones(10)]).get_future().then(callback(group, 1)).wait())

    given = []
    threads = [threading.Thread(target=run, args=(group,), daemon=True) for group in pair]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [one.tolist() for one in given] == [[6.0] * 5] * 2


def test_a_callback_that_begins_a_collective_behind_others_is_refused(pair):
    """Ranks would differ in which comes first, and sum what does not belong together."""
    works = [pair[0].allreduce([torch.ones(10)]) for _ in range(2)]
    refused = works[0].get_future().then(lambda _: pair[0].allreduce([torch.ones(10)]))
    message = works[0].get_future().then(lambda _: pair[0].send([torch.ones(3)], 1, 5))
    for _ in range(2):
        pair[1].allreduce([torch.ones(10)])
    with pytest.raises(RuntimeError, match=r"all_reduce\(\) in the callback of a future.*begun other collectives"):
        refused.wait()
    message.wait()
    pair[1].recv([got := torch.empty(3)], 0, 5).wait()
    assert got.eq(1).all()
    for group in pair:  # nothing has begun for it
        works.append(group.allreduce([torch.ones(10)]))
    assert all(work.wait() for work in works)


def test_what_fails_is_an_error_of_its_future_for_users_in_cpp_too(pair):
    future = pair[0].allreduce([torch.ones(10)]).get_future()
    seen = []
    behind = future.then(lambda one: seen.append(one.value()))
    pair[1].shutdown()
    for one in (future, behind, torch.futures.collect_all([future])):
        with pytest.raises(RuntimeError, match=r"rank 1 \([^)]*\) has left the process group"):
            one.wait()
    assert not seen


def test_a_monitored_barrier_says_whom_it_lacks(pair):
    with pytest.raises(rejoin.DeadlinePassed, match=r"barrier waits for bytes from rank 1 \("):
        pair[0].monitored_barrier(timedelta(milliseconds=50), wait_all_ranks=True)


def test_types_that_differ_are_refused(pair):
    for call in (
        lambda: pair[0]._allgather_base(torch.empty(20), torch.ones(10, dtype=torch.int32)),
        lambda: pair[0].alltoall_base(torch.empty(20), torch.ones(20, dtype=torch.int32), [], []),
        lambda: pair[0]._reduce_scatter_base(torch.empty(10), torch.ones(20, dtype=torch.int32)),
    ):
        with pytest.raises(ValueError, match=r"one type, not of torch.float32, torch.int32"):
            call()


class Wrapper(torch.Tensor):
    """Has another tensor, and no memory, as a DTensor does."""

    @staticmethod
    def __new__(cls, tensor):
        return torch.Tensor._make_wrapper_subclass(cls, tensor.size())

    @classmethod
    def __torch_dispatch__(cls, call, *_):
        raise NotImplementedError(str(call))


def test_what_can_be_no_argument_is_named(pair):
    bare = Wrapper(torch.ones(3))
    out, whole = torch.zeros(1).expand(4), torch.ones(2)
    root = dist.BroadcastOptions()
    root.rootRank = 1
    mean = dist.AllreduceOptions()
    mean.reduceOp = dist.ReduceOp.AVG
    for call, told in (
        (lambda: pair[0].allreduce([bare]), r"memory of their own, not a test_works\.Wrapper"),
        (lambda: pair[0].send([bare], 1, 0), "memory of their own"),
        (lambda: pair[0].allreduce([out]), r"this tensor of \[4\], whose elements share memory .* clone\(\)"),
        (lambda: pair[0]._allgather_base(out, whole), "elements share memory"),
        (lambda: pair[0].broadcast([out], root), "elements share memory"),
        (lambda: pair[0]._start_coalescing(torch.device("cpu")), "no device"),
        (lambda: pair[0].send([torch.ones(1)], -1, 0), r"rank -1 of send\(\): it is a number from 0"),
        (lambda: pair[0].recv([torch.ones(1)], 1, -2), r"tag -2 of recv\(\): it is a number from 0"),
        (lambda: pair[0].reconfigure(uuid=-1, handles=["x"]), r"uuid -1 of reconfigure\(\)"),
        (lambda: pair[0].allreduce([torch.ones(3, device="meta")]), "not one on the device 'meta'"),
        (lambda: pair[0].allreduce([torch.eye(3).to_sparse()]), "dense tensors, not one of layout torch.sparse_coo"),
        (lambda: pair[0].allreduce([torch.ones(3) > 0], mean), r"AVG of bool is no bool: reduce by MAX \(any\) or MIN"),
    ):
        with pytest.raises(ValueError, match=told):
            call()
    works = [group.allreduce([torch.ones(10)]) for group in pair]  # nothing has begun that the other one waits for
    for work in works:
        work.wait()
