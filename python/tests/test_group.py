"""The process group of those who train a step: it follows the session's members, and nobody waits for a lost one."""

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")

from test_job import Job, check_equal  # noqa: E402

from rejoin.distributed import Options  # noqa: E402
from rejoin.errors import RejoinError  # noqa: E402
from rejoin.torch._group import SessionGroup  # noqa: E402

LIMIT = timedelta(seconds=30)


def test_a_replica_that_dies_or_stands_still_in_a_collective_ends_it_for_the_others(tmp_path):
    job = Job(tmp_path, "--group", replicas=3, steps=60, silence_ms=2000, kill={1: ("group", 15)})
    job.until(lambda: job.killed(1) and job.trains(1) > 5)
    job.kill(2, "group stands", 30)
    errors = job.wait()
    assert "replica 1 ended with signal SIGKILL" in errors, errors
    check_equal(job, 3)
    log = job.log(0)
    sums = {int(step): (int(size), float(sum_)) for step, size, sum_ in re.findall(r"group (\d+) (\d+) (\S+)", log)}
    assert {size for size, _ in sums.values()} >= {2, 3}, log
    for step, (size, sum_) in sums.items():
        assert sum_ in ({1.0}, {3.0, 4.0}, {6.0})[size - 1], (step, size, sum_)
    broken = re.findall(r"group (\d+) failed after (\S+) s: (.*)", log)
    assert len(broken) >= 2, log
    assert not {int(step) for step, _, _ in broken} & set(sums)
    assert "a replica was lost" in broken[-1][2], "who stands still is put out, and not waited for until it has ended"
    assert all(float(seconds) < 20 for _, seconds, _ in broken), broken


def test_a_replica_that_joins_ends_no_collective_of_a_step_that_is_decided(tmp_path):
    job = Job(tmp_path, "--group", replicas=2, steps=40, kill={1: ("forward", 10)})
    job.until(lambda: job.killed(1))
    joined, busy = job.hold(1, "joined"), job.hold(0, "busy")
    job.until(lambda: joined.exists() and busy.exists())
    joined.unlink(), busy.unlink()
    job.wait()
    assert "replicas 0 1 (catching up)" in job.audit(), job.audit()
    failed = {int(step) for step in re.findall(r"(?:group|decided) (\d+) failed", job.log(0))}
    lost = next(step for step, members in job.contributors().items() if members == [0])
    assert failed <= {lost}, job.log(0)


class Members:
    """In the place of a session: all are there, until one is lost."""

    def __init__(self) -> None:
        self.looked_at = threading.Event()
        self.one_is_lost = False

    def set_card(self, card: str, listening: str) -> None:
        self.card, self.listening = card, listening

    def intact(self, milliseconds: int) -> bool:
        self.looked_at.set()
        time.sleep(milliseconds / 1000)
        return not self.one_is_lost


def group_of(replica: int) -> tuple[SessionGroup, str]:
    members = Members()
    return SessionGroup(members, replica, LIMIT, Options(listen="127.0.0.1:0", device="host")), members.card


def within(seconds: float, what) -> bool:
    end = time.monotonic() + seconds
    while not what() and time.monotonic() < end:
        time.sleep(0.01)
    return what()


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "127.0.0.1:0"])
def test_the_daemon_is_told_of_a_group_that_listens_everywhere_where_its_own_address_goes(listen):
    members = Members()
    group = SessionGroup(members, 0, LIMIT, Options(listen=listen, device="host"))
    host = listen.rpartition(":")[0]
    if host == "127.0.0.1":
        assert members.listening == ""
    else:
        known, _, address = members.card.rpartition(" ")
        assert members.listening == f"{known} {host}:{address.rpartition(':')[2]}"
        assert address.rpartition(":")[0] not in ("0.0.0.0", "[::]")
    group.shutdown()


# Not all hear of it in the same step. Who took it for another member would wait for others that have no reason to.
def test_a_member_whose_address_has_changed_is_the_same_one_for_those_who_have_heard_and_those_who_have_not():
    groups, cards = zip(*(group_of(replica) for replica in range(2)), strict=True)
    moved = cards[1].replace("127.0.0.1", "127.0.0.2")
    assert moved != cards[1]
    with ThreadPoolExecutor(2) as pool:
        for step, second in ((1, cards[1]), (2, moved)):
            tensors = [torch.ones(3) for _ in groups]
            for replica, group in enumerate(groups):
                group.begin(step, 1, True, [(0, cards[0]), (1, second if replica == 0 else cards[1])])
            works = pool.map(lambda group, tensor: group.allreduce([tensor]).wait(), groups, tensors)
            assert all(works)
            assert all(tensor.eq(2).all() for tensor in tensors)
    for group in groups:
        group.shutdown()


# One that is in C++ when the interpreter ends would end the process by a signal.
def test_the_thread_that_looks_at_the_members_has_ended_when_the_group_is_shut_down():
    group, card = group_of(0)
    group.begin(1, 1, True, [(0, card)])
    assert group._session.looked_at.wait(30)
    group.shutdown()
    assert "rejoin-members" not in [thread.name for thread in threading.enumerate()]
    group.begin(2, 1, True, [(0, card)])  # the session goes on
    with pytest.raises(RejoinError, match="this group was shut down$"):
        group.allreduce([torch.ones(1)])


@pytest.mark.parametrize("settled", ["by later ones", "by wait()", "by the group's thread"])
def test_an_operation_of_a_step_that_was_given_up_fails_no_later_step(settled):
    """Others have begun nothing that has failed, and would wait for this one."""
    groups, cards = zip(*(group_of(replica) for replica in range(2)), strict=True)

    def sums() -> list[float]:
        tensors = [torch.ones(2) for _ in groups]
        with ThreadPoolExecutor(2) as pool:
            works = pool.map(lambda group, mine: group.allreduce([mine]).wait(), groups, tensors)
            assert all(works)
        return [float(mine[0]) for mine in tensors]

    def begin(step: int, epoch: int) -> None:
        for group in groups:
            group.begin(step, epoch, True, list(enumerate(cards)))

    begin(1, 1)
    assert sums() == [2.0, 2.0]
    begin(2, 1)
    left = [groups[0].allreduce([torch.ones(2)]) for _ in range(6)]  # nobody waits for them
    for group in groups:
        group._refuse(2, "a replica was lost")
    begin(3, 2)
    for work in {"by later ones": [], "by wait()": left[:1], "by the group's thread": left}[settled]:
        with pytest.raises(RejoinError if settled == "by wait()" else RuntimeError, match="a replica was lost"):
            work.wait() if settled == "by wait()" else work.get_future().wait()
    for _ in range(4):
        assert sums() == [2.0, 2.0]
    assert all(work.exception() for work in left)
    for group in groups:
        group.shutdown()


def test_an_epoch_in_which_somebody_joins_ends_no_operation_and_a_loss_does_though_nobody_has_looked():
    groups, cards = zip(*(group_of(replica) for replica in range(3)), strict=True)
    options = torch.distributed.GatherOptions()
    options.rootRank = 1

    def begin(step: int, epoch: int, *of: int) -> None:
        for group in of or range(3):
            groups[group].begin(step, epoch, True, list(enumerate(cards)))

    def gather(group: int, of: list):
        return groups[group].gather([of] if group == 1 else [], [torch.tensor([group + 1.0])], options)

    def all_gather() -> list[float]:
        gathered = [torch.zeros(1) for _ in groups]
        with ThreadPoolExecutor(3) as pool:
            assert all(pool.map(lambda group: gather(group, gathered).wait(), range(3)))
        return [float(one) for one in gathered]

    begin(1, 1)
    assert all_gather() == [1.0, 2.0, 3.0]
    before, after = ([torch.zeros(1) for _ in groups] for _ in range(2))
    works = [gather(1, before), gather(0, before)]
    works[1].wait()
    begin(2, 2, 0)
    works.append(gather(0, after))
    works.append(gather(2, before))
    assert all(work.wait() for work in (works[0], works[3]))
    begin(2, 2, 1, 2)
    assert all(work.wait() for work in [gather(1, after), gather(2, after), works[2]])
    assert before == after == [torch.tensor([one]) for one in (1.0, 2.0, 3.0)]

    epoch, configured = groups[0]._epoch, [group._configured for group in groups]
    for group in groups:
        group._session.one_is_lost = True
        group.end_step()
        group._session.one_is_lost = False
    begin(3, epoch + 1)
    assert all(group._configured != of_before for group, of_before in zip(groups, configured, strict=True))
    assert all_gather() == [1.0, 2.0, 3.0]
    for group in groups:
        group.shutdown()


@pytest.mark.parametrize("what", ["collectives", "a message that nobody has waited for"])
def test_one_that_is_done_with_a_step_and_goes_on_with_a_joiner_ends_nothing_of_that_step_for_the_others(what):
    groups, cards = zip(*(group_of(replica) for replica in range(4)), strict=True)
    options = torch.distributed.GatherOptions()
    options.rootRank = 1

    def gather(group: int, of: list):
        return groups[group].gather([of] if group == 1 else [], [torch.tensor([group + 1.0])], options)

    def begin(step: int, epoch: int, members: int, *of: int) -> None:
        for group in of:
            groups[group].begin(step, epoch, True, list(enumerate(cards))[:members])

    def total(group: int) -> float:
        tensor = torch.tensor([1.0])
        groups[group].allreduce([tensor]).wait()
        return float(tensor[0])

    with ThreadPoolExecutor(4) as pool:
        begin(1, 1, 3, 0, 1, 2)
        assert list(pool.map(total, range(3))) == [3.0] * 3
        gathered, message = [torch.zeros(1) for _ in range(3)], torch.zeros(1)
        works = [gather(0, gathered), gather(1, gathered)]
        received = groups[1].recv([message], 2, 7)
        works[0].wait()
        begin(2, 2, 4, 0, 3)
        sums = [pool.submit(total, group) for group in (0, 3)]
        assert within(30, lambda: groups[0]._native.size() == 4)
        assert not within(0.2, works[1].is_completed)
        if what == "collectives":
            works += [gather(2, gathered), groups[2].send([torch.tensor([5.0])], 1, 7), received]
            assert all(work.wait() for work in works)
            begin(2, 2, 4, 1, 2)
            sums += [pool.submit(total, group) for group in (1, 2)]
        else:  # they begin the next step with what is under way
            works += [gather(2, gathered)]
            begin(2, 2, 4, 1)
            sums += [pool.submit(total, 1)]
            assert not within(0.2, lambda: received.is_completed() or groups[1]._native.size() == 4)
            works += [groups[2].send([torch.tensor([5.0])], 1, 7)]
            begin(2, 2, 4, 2)
            sums += [pool.submit(total, 2)]
        assert [one.result(30) for one in sums] == [4.0] * 4
        assert all(work.wait() for work in [*works, received])
    assert [float(one[0]) for one in [*gathered, message]] == [1.0, 2.0, 3.0, 5.0]
    for group in groups:
        group.shutdown()


def gather(groups: list[SessionGroup], rank: int, root: int = 0):
    options = torch.distributed.GatherOptions()
    options.rootRank = root
    into = [[torch.zeros(1) for _ in groups]] if rank == root else []
    return groups[rank].gather(into, [torch.ones(1)], options)


@pytest.fixture
def three():
    """Three members in the first step, whose connections are made; and what begins a step on those that are named."""
    groups, cards = zip(*(group_of(replica) for replica in range(3)), strict=True)

    def begin(step: int, *of: int) -> None:
        for group in of or range(3):
            groups[group].begin(step, 1, True, list(enumerate(cards)))

    def all_reduce() -> list[float]:
        tensors = [torch.ones(1) for _ in groups]
        with ThreadPoolExecutor(3) as pool:
            assert all(pool.map(lambda group, tensor: group.allreduce([tensor]).wait(), groups, tensors))
        return [float(tensor[0]) for tensor in tensors]

    begin(1)
    assert all_reduce() == [3.0] * 3
    yield groups, begin, all_reduce
    for group in groups:
        group.shutdown()


def test_what_fails_on_some_and_had_ended_well_on_another_is_gone_on_with_by_none_in_the_next_step(three):
    groups, begin, all_reduce = three
    begin(2)
    works = [gather(groups, rank) for rank in (0, 1)]
    assert works[1].wait()
    groups[0].abort()  # as at a time-out
    with pytest.raises(RejoinError, match=r"abort\(\) was called"):
        works[0].wait()
    with pytest.raises(RejoinError, match=r"rank 0 .* has given up"):  # late
        gather(groups, 2).wait()
    assert within(30, groups[1]._native.failed)
    begin(3)
    assert all_reduce() == [3.0] * 3
    begin(4)
    assert all_reduce() == [3.0] * 3


def test_who_makes_connections_in_a_step_that_another_has_begun_on_those_of_before_hears_of_it_and_does_not_wait(three):
    groups, begin, all_reduce = three
    begin(2, 1, 2)
    works = [gather(groups, rank, root=2) for rank in (1, 2)]
    assert works[0].wait(), "all that it has begun in this step has ended well"
    groups[0].abort()  # in the step before
    assert within(30, groups[0]._native.failed)
    begin(2, 0)
    begun = time.monotonic()
    with pytest.raises(RejoinError, match=r"in step 2, (another member|an operation) has"):
        gather(groups, 0, root=2).wait()
    assert time.monotonic() - begun < LIMIT.total_seconds() / 2
    with pytest.raises(RejoinError, match="has given up"):
        works[1].wait()
    begin(3)
    assert all_reduce() == [3.0] * 3


def test_a_wait_for_the_members_is_no_computing():
    said = []

    class Busy:
        @contextmanager
        def with_ours(self, reason: str, seconds: float):
            said.append((reason, seconds))
            yield

    members = Members()
    group = SessionGroup(members, 0, LIMIT, Options(listen="127.0.0.1:0", device="host"), Busy())
    for step in (1, 2):
        group.begin(step, 1, True, [(0, members.card)])
        assert group.allreduce([torch.ones(1)]).wait()
        ((reason, seconds),) = said
        assert "process group" in reason and seconds >= LIMIT.total_seconds()
    group.shutdown()
