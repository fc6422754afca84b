"""Tensors that are not plain memory, over the backend of torch.distributed; and processes that are forked from one."""

from __future__ import annotations

import forked

BEGIN = """
import os, sys, time, traceback
from datetime import timedelta
import torch, torch.distributed as dist
import torch.distributed._functional_collectives as functional
import rejoin, rejoin.distributed
dist.init_process_group("rejoin", timeout=timedelta(seconds=60))
ours = dist.group.WORLD
rank, size = dist.get_rank(), dist.get_world_size()
"""


def test_results_of_functional_collectives_may_go_into_others_as_over_gloo():
    """They wrap memory in which the result is once it is waited for."""
    forked.run_ranks(
        3,
        BEGIN
        + """
gloo = dist.new_group(backend="gloo")
def made(group, count):
    given = functional.all_reduce(torch.arange(float(count)) * (rank + 1), "sum", group)
    assert type(given) is functional.AsyncCollectiveTensor
    return given
def all_reduce(group, count):
    dist.all_reduce(one := made(group, count), group=group); return one
def broadcast(group, count):
    one = made(group, count) * (rank + 1) if rank else made(group, count)
    dist.broadcast(one, 1, group=group); return one
def all_gather(group, count):
    dist.all_gather_into_tensor(all := torch.empty(size * count), made(group, count), group=group); return all
def reduce_scatter(group, count):
    whole = made(group, size * count)
    if group is gloo: return (whole + torch.zeros(size * count)).chunk(size)[rank] * size
    dist.reduce_scatter_tensor(part := torch.empty(count), whole, group=group); return part
def message(group, count):
    one = made(group, count)
    got = torch.empty(count)
    if rank == 0: dist.send(one, 1, group=group)
    if rank == 1: dist.recv(got, 0, group=group)
    return got if rank == 1 else one
for count in (5, 50_000):
    for call in (all_reduce, broadcast, all_gather, reduce_scatter, message):
        one, other = (call(group, count) + 0 for group in (ours, gloo))
        assert torch.equal(one, other), (call, count, one, other)
dist.destroy_process_group()
""",
    )


def test_tensors_of_inference_mode_have_their_results_outside_of_it_as_over_gloo():
    forked.run_ranks(
        2,
        BEGIN
        + """
gloo = dist.new_group(backend="gloo")
def run(group):
    with torch.inference_mode():
        tensors = [torch.full((3,), rank + 1, dtype=dtype) for dtype in (torch.uint8, torch.float32, torch.int8)]
        wide = torch.full((4, 4), float(rank))
        tensors.append(wide[:, ::2] if group is ours else wide)  # Gloo takes none that are strided
        works = [dist.all_reduce(one, async_op=True, group=group) for one in tensors]
    normal = torch.full((3,), rank + 1, dtype=torch.uint8)
    with torch.inference_mode():
        works.append(dist.all_reduce(normal, async_op=True, group=group))
    for work in works[:2] + works[3:]: work.wait()
    works[2].get_future().wait()
    normal += 1
    if group is gloo: tensors[-1] = tensors[-1][:, ::2]
    return [*tensors, normal]
for one, other in zip(run(ours), run(gloo)): assert torch.equal(one, other), (one, other)
dist.destroy_process_group()
""",
    )


def test_tensors_whose_elements_share_memory_are_read_and_not_written():
    forked.run_ranks(
        2,
        BEGIN
        + """
one = torch.full((1,), 3.0)
for dtype in (torch.float32, torch.int8):
    expanded = one.to(dtype).expand(4)
    got = expanded if rank == 0 else torch.zeros(4, dtype=dtype)
    dist.broadcast(got, 0); assert got.tolist() == [3] * 4
    got = expanded if rank == 1 else torch.ones(4, dtype=dtype)
    dist.reduce(got, 0); assert got.tolist() == [3 if rank else 4] * 4
dist.all_gather_into_tensor(all := torch.empty(8), one.expand(4)); assert all.eq(3).all()
dist.destroy_process_group()
""",
    )


def test_a_child_of_fork_is_told_that_the_group_is_its_parents_and_leaves_it_alone():
    """As a DataLoader's workers are: nothing of theirs waits for a thread that only the parent has."""
    forked.run_ranks(
        2,
        BEGIN
        + """
import atexit
dist.all_reduce(torch.ones(1))
if rank == 1: dist.irecv(torch.ones(1), 0)
works = [dist.all_reduce(torch.ones(1), async_op=True)] if rank == 0 else []
futures = [work.get_future() for work in works]  # with the thread of futures
def refused(call):
    try: call()
    except (rejoin.Unavailable, RuntimeError) as error: assert "make another group in this process" in str(error), error
    else: raise AssertionError(call)
def calls():
    for call in (lambda: dist.all_reduce(torch.ones(1)), dist.barrier, lambda: dist.send(torch.ones(1), 1 - rank),
                 lambda: dist.all_reduce(torch.ones(1), async_op=True).get_future(),
                 lambda: ours.reconfigure(uuid=7, handles=[ours.get_reconfigure_handle()])): refused(call)
    if works: refused(works[0].wait); assert works[0].is_completed() and not works[0].is_success()
    assert dist.get_rank() == rank
for child in (calls, dist.destroy_process_group, atexit._run_exitfuncs, ours.__del__):
    began = time.monotonic()
    if (pid := os.fork()) == 0:
        code = 1
        try: child(); code = 0
        except BaseException: traceback.print_exc()
        finally:
            if code == 0 and time.monotonic() - began > 4.9: code = 2  # what waits for that thread waits for 5 seconds
            os._exit(code)
    assert (code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])) == 0, (child, code)
if rank == 0: dist.send(torch.ones(1), 1)
if rank == 1: dist.all_reduce(torch.ones(1))
dist.all_reduce(total := torch.ones(1)); assert total[0] == size  # the parents have lost nothing
for work in works: work.wait()
dist.destroy_process_group()
""",
    )
