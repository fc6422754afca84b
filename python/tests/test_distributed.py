"""The backend of torch.distributed: torch's own users of it, against Gloo's results; kills, and other members."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from datetime import timedelta

import forked
import pytest
import torch
import torch.distributed as dist

import rejoin
from rejoin.distributed import Options, ProcessGroup

LONG = timedelta(seconds=30)
LOCAL = Options(listen="127.0.0.1:0")


def whole(body):
    return "import os, torch, torch.distributed as dist\nimport rejoin.distributed\n" + textwrap.dedent(body)


def run_members(count, body):
    """Run the text in that many processes; give what they print."""
    return forked.run_ranks(count, whole(body))


def run_by_torchrun(count, body):
    """As above, in processes of one torchrun."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}", "--no-python"]
        + [sys.executable, "-c", whole(body)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[:3000]


def test_collectives_give_what_gloos_give():
    output = run_members(
        3,
        """
        dist.init_process_group("rejoin")
        gloo = dist.new_group(backend="gloo")
        rank, size = dist.get_rank(), dist.get_world_size()
        types = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.int16,
                 torch.int8, torch.uint8, torch.bool, torch.complex64]
        compared = 0
        def tensor(*shape, dtype=torch.float32, by=1):
            torch.manual_seed(rank * by)
            return torch.randint(0, 2 if dtype == torch.bool else 5, shape).to(dtype)
        def same(one, other, what):
            global compared
            compared += 1
            assert one.dtype == other.dtype and torch.equal(one, other), (what, rank, one, other)
        for dtype in types:
            # Gloo takes fewer types.
            wide = {torch.int16: torch.int32, torch.bool: torch.int32, torch.bfloat16: torch.float32,
                    torch.float16: torch.float32, torch.complex64: torch.float32}.get(dtype, dtype)
            for shape in [(), (5,), (100, 7)] + [(300_000,)] * (dtype == torch.float32):
                ops = [dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT]
                if dtype == torch.bool: ops = ops[1:3]
                if dtype == torch.complex64: ops = ops[:1]
                if dtype in (torch.int8, torch.uint8, torch.int32, torch.int64):
                    ops += [dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR]
                for op in ops:
                    ours, theirs = tensor(*shape, dtype=dtype), tensor(*shape, dtype=dtype).to(wide)
                    dist.all_reduce(ours, op); dist.all_reduce(theirs, op, group=gloo)
                    same(ours, theirs.to(dtype), (dtype, shape, op))
                for root in range(size):
                    ours, theirs = tensor(*shape, dtype=dtype), tensor(*shape, dtype=dtype).to(wide)
                    dist.broadcast(ours, root); dist.broadcast(theirs, root, group=gloo)
                    same(ours, theirs.to(dtype), ("broadcast", dtype))
                ours, theirs = ([torch.empty(shape, dtype=one) for _ in range(size)] for one in (dtype, wide))
                dist.all_gather(ours, tensor(*shape, dtype=dtype))
                dist.all_gather(theirs, tensor(*shape, dtype=dtype).to(wide), group=gloo)
                for a, b in zip(ours, theirs): same(a, b.to(dtype), ("all_gather", dtype))
        # Strided tensors are written where they are.
        ours = torch.zeros(6, 4); ours[:, ::2] = rank + 1
        dist.all_reduce(ours[:, ::2]); assert ours[:, ::2].eq(6).all() and ours[:, 1::2].eq(0).all()
        mean = torch.full((3,), float(rank)); dist.all_reduce(mean, dist.ReduceOp.AVG); assert mean.eq(1).all()
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64):
            one = torch.arange(-900, 900).add(7 * rank).to(torch.float32).remainder(19).to(dtype)
            means, theirs, sums = one.clone(), one.clone(), one.clone()  # exact; their thirds are rounded
            dist.all_reduce(means, dist.ReduceOp.AVG); dist.all_reduce(sums)
            parts = torch.view_as_real if dtype.is_complex else torch.clone
            same(parts(means), parts(sums) / size, ("AVG", dtype))
            if dtype not in (torch.bfloat16, torch.complex64):
                dist.all_reduce(theirs, dist.ReduceOp.AVG, group=gloo); same(means, theirs, ("AVG", dtype))
        for root in range(size):
            ours, theirs = tensor(999), tensor(999)
            dist.reduce(ours, root); dist.reduce(theirs, root, group=gloo)
            if rank == root: same(ours, theirs, "reduce")
            ours, theirs = ([torch.empty(50) for _ in range(size)] if rank == root else None for _ in "ab")
            dist.gather(tensor(50), ours, root); dist.gather(tensor(50), theirs, root, group=gloo)
            if rank == root:
                for a, b in zip(ours, theirs): same(a, b, "gather")
            got = torch.empty(50); theirs = torch.empty(50)
            parts = [tensor(50, by=i + 2) for i in range(size)] if rank == root else None
            dist.scatter(got, parts, root); dist.scatter(theirs, parts, root, group=gloo)
            same(got, theirs, "scatter")
        got, theirs = torch.empty(40), torch.empty(40)
        parts = [tensor(40, by=i + 2) for i in range(size)]
        dist.reduce_scatter(got, parts); dist.all_reduce(whole := torch.stack(parts), group=gloo)
        same(got, whole[rank], "reduce_scatter")
        dist.reduce_scatter_tensor(got, torch.cat(parts)); same(got, whole[rank], "reduce_scatter_tensor")
        dist.all_gather_into_tensor(all := torch.empty(size * 40), parts[0])
        theirs = [torch.empty(40) for _ in range(size)]; dist.all_gather(theirs, parts[0], group=gloo)
        same(all, torch.cat(theirs), "all_gather_into_tensor")
        splits_in = [rank + i for i in range(size)]; splits_out = [i + rank for i in range(size)]
        ours, theirs = torch.empty(sum(splits_out), 3), torch.empty(sum(splits_out), 3)
        sent = tensor(sum(splits_in), 3)
        dist.all_to_all_single(ours, sent, splits_out, splits_in)
        dist.all_to_all_single(theirs, sent, splits_out, splits_in, group=gloo)
        same(ours, theirs, "all_to_all_single")
        sent = [torch.full((7,), 10. * rank + i) for i in range(size)]
        dist.all_to_all(got := [torch.empty(7) for _ in range(size)], sent)
        assert [int(one[0]) for one in got] == [10 * i + rank for i in range(size)]
        if rank == 0: dist.send(torch.arange(5.), 1, tag=3); dist.send(torch.ones(5), 1, tag=4)
        if rank == 1:
            later = dist.irecv(b := torch.empty(5), 0, tag=4); dist.recv(a := torch.empty(5), 0, tag=3); later.wait()
            assert a.tolist() == [0, 1, 2, 3, 4] and b.eq(1).all()
        swaps = [dist.P2POp(dist.isend, torch.full((9000,), float(rank)), (rank + 1) % size),
                 dist.P2POp(dist.irecv, x := torch.empty(9000), (rank - 1) % size)]
        for work in dist.batch_isend_irecv(swaps): work.wait()
        assert x.eq((rank - 1) % size).all()
        objects = [None] * size; dist.all_gather_object(objects, {"rank": rank}); assert objects[2] == {"rank": 2}
        pair = dist.new_group([0, 2])
        if rank != 1: dist.all_reduce(two := torch.ones(2), group=pair); assert two[0] == 2
        several = [torch.full((size_of,), float(rank)) for size_of in (3, 50_000, 1)]
        dist.all_reduce_coalesced(several); assert [one[0].item() for one in several] == [3.0] * 3
        for group in (dist.group.WORLD, gloo):
            works = [dist.all_reduce(torch.ones(2000), async_op=True, group=group) for _ in range(50)]
            for work in reversed(works): work.wait()
        future = dist.all_reduce(t := torch.ones(10), async_op=True).get_future()
        assert future.wait()[0][0] == size and t[0] == size
        whole, imaginary = torch.ones(1, dtype=torch.int32), torch.ones(1, dtype=torch.complex64)
        premul, band = dist._make_nccl_premul_sum(2.0), dist.ReduceOp.BAND
        for wrong, call in [("BXOR, not by PREMUL_SUM", lambda: dist.all_reduce(whole, premul)),
                            ("not torch.float32", lambda: dist.all_reduce(torch.ones(1), band)),
                            ("named", lambda: dist.recv(torch.ones(1))),
                            ("equal parts", lambda: dist.reduce_scatter_tensor(torch.empty(2), torch.ones(7))),
                            ("complex", lambda: dist.all_reduce(imaginary, dist.ReduceOp.MAX))]:
            try: call()
            except (ValueError, RuntimeError) as error: assert wrong in str(error), error
            else: raise AssertionError(wrong)
        assert dist.distributed_c10d._get_pg_default_device().type == "cpu"
        dist.barrier()
        if rank == 0: print("compared", compared)
        dist.destroy_process_group()
        dist.init_process_group("rejoin")  # another, by the same store
        dist.all_reduce(whole := torch.ones(1)); assert whole[0] == size
        dist.destroy_process_group()
        """,
    )
    assert int(output.split("compared")[1]) > 200


def test_ddp_dtensor_and_fsdp2_over_it():
    run_by_torchrun(
        2,
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor
        dist.init_process_group("rejoin")
        rank, size = dist.get_rank(), dist.get_world_size()
        def model():
            torch.manual_seed(0)
            return torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.GELU(), torch.nn.Linear(300, 8))
        def train(model, batch):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(3):
                torch.manual_seed(step)
                rows = torch.randn(4, 64)
                optimizer.zero_grad(); model(batch(rows)).pow(2).mean().backward(); optimizer.step()
            return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]
        plain = train(model(), lambda rows: rows)
        mine = lambda rows: rows.chunk(size)[rank]
        ddp = train(torch.nn.parallel.DistributedDataParallel(model(), bucket_cap_mb=0.01), mine)
        mesh = init_device_mesh("cpu", (size,))
        sharded = model(); fully_shard(sharded, mesh=mesh); sharded = train(sharded, mine)
        for one, two, three in zip(plain, ddp, sharded):
            torch.testing.assert_close(one, two); torch.testing.assert_close(one, three)
        d = distribute_tensor(torch.arange(12.).reshape(6, 2), mesh, [Shard(0)])
        assert torch.equal(d.redistribute(mesh, [Replicate()]).to_local(), torch.arange(12.).reshape(6, 2))
        """,  # nobody calls destroy_process_group(): they leave when they end
    )


def together(groups, call):
    """Call for each group, in a thread each; give the results, or what was raised."""
    results = [None] * len(groups)

    def run(i):
        try:
            results[i] = call(groups[i])
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_members_come_and_go_by_reconfigure(transport):
    def make():
        return ProcessGroup(LONG, Options(transport=transport, listen="" if transport == "shm" else "127.0.0.1:0"))

    groups = [make() for _ in range(3)]

    def configure(number):
        handles = [group.get_reconfigure_handle() for group in groups]
        for result in together(groups, lambda group: group.reconfigure(uuid=number, handles=handles)):
            assert not isinstance(result, Exception), result

    def total():
        def one(group):
            tensor = torch.ones(200_000)
            group.allreduce([tensor]).wait()
            return tensor

        return together(groups, one)

    assert all(group.supports_reconfigure for group in groups)
    configure(1)
    assert [group.rank() for group in groups] == [0, 1, 2]
    assert all(tensor.eq(3).all() for tensor in total())
    groups.pop(1).shutdown()
    for error in total():
        assert isinstance(error, rejoin.Unavailable)
        assert "has left the process group: reconfigure it without" in str(error)
    configure(2)
    assert all(tensor.eq(2).all() for tensor in total())
    groups.append(make())
    configure(3)
    assert [group.size() for group in groups] == [3, 3, 3]
    assert all(tensor.eq(3).all() for tensor in total())

    class TorchsOptions:  # ReconfigureOptions of newer versions
        uuid, timeout, hints = 9, LONG, None
        handles = {group.get_reconfigure_handle() for group in groups}

    assert all(work.wait() for work in together(groups, lambda group: group.reconfigure(TorchsOptions)))
    assert sorted(group.rank() for group in groups) == [0, 1, 2]
    for group in groups:
        group.shutdown()


def test_a_group_without_members_and_one_that_lacks_someone_say_so():
    group, other = ProcessGroup(LONG, LOCAL), ProcessGroup(LONG, LOCAL)
    with pytest.raises(rejoin.Unavailable, match="no members yet"):
        group.barrier()
    handles = [group.get_reconfigure_handle(), other.get_reconfigure_handle()]
    with pytest.raises(rejoin.DeadlinePassed, match=r"configuration 4 of 2 members lacks rank 1 \(127.0.0.1"):
        group.reconfigure(uuid=4, handles=handles, timeout=timedelta(milliseconds=300))
    with pytest.raises(rejoin.InvalidArgument, match="none of the 1 members is this one"):
        group.reconfigure(uuid=5, handles=handles[1:])
    group.shutdown()
    other.shutdown()
    group.shutdown()  # again


RECONFIGURED = """
import sys
from datetime import timedelta
import torch, torch.distributed as dist
import rejoin.distributed
backend, rank, size, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
store = dist.FileStore(folder + "/store", size)
dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60),
                        enable_reconfigure=True)  # and nobody waits for anybody
assert dist._supports_reconfigure()
assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
try: dist.all_reduce(torch.ones(1))
except (RuntimeError, rejoin.RejoinError) as error: assert "reconfigure" in str(error), error
else: raise AssertionError("there are no members yet")
def configure(number, ranks, kind=list):
    store.set(f"{number} {rank}", dist._get_reconfigure_handle())
    handles = kind(store.get(f"{number} {other}").decode() for other in ranks)
    assert dist._reconfigure(uuid=number, handles=handles, timeout=timedelta(seconds=60)).wait()
    return dist.get_rank(), dist.get_world_size()
def sum():
    dist.all_reduce(one := torch.ones(50_000))
    assert one.eq(one[0]).all()
    return int(one[0])
assert configure(1, [0, 1, 2]) == (rank, 3) and sum() == 3
assert configure(2, [2, 1, 0]) == (2 - rank, 3) and sum() == 3
if rank != 1:
    assert configure(3, [0, 2]) == (rank // 2, 2) and sum() == 2
else:
    dist.destroy_process_group()
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, enable_reconfigure=True)
ranks = [None] * 3
assert configure(4, [0, 1, 2], set)[1] == 3 and sum() == 3
dist.all_gather_object(ranks, dist.get_rank())
assert sorted(ranks) == [0, 1, 2]
dist.destroy_process_group()
"""


@pytest.mark.parametrize("backend", ["rejoin", "gloo"])
def test_torchs_own_calls_reconfigure_as_they_do_gloo(tmp_path, backend):
    if not hasattr(dist, "_reconfigure"):
        pytest.skip(f"torch {torch.__version__} has no init_process_group(enable_reconfigure=True); 2.14 has")
    command = [sys.executable, "-c", RECONFIGURED, backend]
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1"}
    members = [
        subprocess.Popen([*command, str(i), "3", str(tmp_path)], stderr=subprocess.PIPE, text=True, env=environment)
        for i in range(3)
    ]
    try:
        for member in members:
            _, said = member.communicate(timeout=120)
            assert member.returncode == 0, said
    finally:
        for member in members:
            member.kill()
            member.wait()


KILLED = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
import rejoin, rejoin.distributed
rank, size, folder, transport = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
store = dist.FileStore(folder + "/store", size)
dist.init_process_group("rejoin", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30),
                        pg_options=rejoin.distributed.Options(
                            transport, listen="127.0.0.1:0" if transport == "tcp" else ""))
group = dist.distributed_c10d._get_default_group()
store.set(f"handle{rank}", group.get_reconfigure_handle())
handles = [store.get(f"handle{i}").decode() for i in range(size)]
tensor = torch.ones(1_000_000)
try:
    for step in range(1_000_000):
        tensor.fill_(1)
        dist.all_reduce(tensor)
        if step == 20:
            open(f"{folder}/running{rank}", "w").close()
except rejoin.RejoinError as error:
    failed = time.monotonic()
    left = [handle for i, handle in enumerate(handles) if i != 1]
    group.reconfigure(uuid=1, handles=left)
    tensor.fill_(1)
    dist.all_reduce(tensor)
    took = 1000 * (time.monotonic() - failed)
    print(f"{time.monotonic():.4f} {took:.1f} {tensor[0].item()} {dist.get_world_size()} {error}", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("transport", ["tcp", pytest.param("shm", marks=pytest.mark.thorough)])
def test_a_killed_member_fails_the_others_at_once_by_its_name_and_they_go_on(tmp_path, transport):
    """The survivors are in all-reduces when it dies, and are through the next one, without it, soon."""
    members = [
        forked.Popen(["-c", KILLED, str(i), "3", str(tmp_path), transport], stdout=subprocess.PIPE) for i in range(3)
    ]
    try:
        limit = time.monotonic() + 60
        while not all((tmp_path / f"running{i}").exists() for i in range(3)):
            assert time.monotonic() < limit and all(member.poll() is None for member in members)
            time.sleep(0.02)
        killed = time.monotonic()
        members[1].send_signal(signal.SIGKILL)
        for i in (0, 2):
            output, _ = members[i].communicate(timeout=60)
            assert members[i].returncode == 0
            at, _, value, size, error = output.split(maxsplit=4)
            assert (float(value), int(size)) == (2.0, 2)
            assert re.findall(r"rank (\d) \([^)]*\) is gone", error) == ["1"], error
            assert float(at) - killed < 5  # a time-out of 30 s it was not
    finally:
        for member in members:
            member.kill()
            member.wait()
