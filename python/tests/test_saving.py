"""Checkpoints that can't be written, and what becomes of the replica that wanted to."""

import copy
import errno
import logging
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from test_checkpoint import made  # noqa: E402
from writer import session as ended_session  # noqa: E402

from rejoin import errors  # noqa: E402
from rejoin.errors import Cancelled, InvalidArgument  # noqa: E402
from rejoin.torch import _files, _final, _leaving, _ranks, _saving, replacing  # noqa: E402
from rejoin.torch._signals import WithinUpdate  # noqa: E402

LARGE = {"weight": torch.ones(100_000)}


@contextmanager
def no_room(size: int = 64 << 10):
    """As on a full disk: the system takes no more of a file than this."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_the_disk_does_not_take_is_an_error_of_the_system_with_the_path(tmp_path, monkeypatch):
    """torch.save() has another one in its place, which says nothing of the disk."""
    path = tmp_path / "gpt.pt"
    path.write_bytes(b"old")
    with no_room(), pytest.raises(OSError, match="File too large: '.*/gpt.pt'") as raised, replacing(path) as file:
        torch.save(LARGE, file)
    assert raised.value.errno == errno.EFBIG
    with no_room(10), pytest.raises(OSError, match="File too large: '.*/gpt.pt'"), replacing(path) as file:
        file.write(b"what comes to the disk at the block's end")
    with pytest.raises(FileNotFoundError, match="'.*/nowhere/gpt.pt'"), replacing(tmp_path / "nowhere" / "gpt.pt"):
        pass

    def fsync(_: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with monkeypatch.context() as patched:
        patched.setattr(_files.os, "fsync", fsync)
        with pytest.raises(OSError, match="quota exceeded: '.*/gpt.pt'"), replacing(path) as file:
            file.write(b"new")
    assert path.read_bytes() == b"old" and [one.name for one in tmp_path.iterdir()] == ["gpt.pt"]


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path):
    (tmp_path / "large").mkdir()
    (tmp_path / "gpt.pt").symlink_to("large/really.pt")
    for content in (b"one", b"two"):
        with replacing(tmp_path / "gpt.pt") as file:
            file.write(content)
        assert (tmp_path / "gpt.pt").is_symlink() and (tmp_path / "large" / "really.pt").read_bytes() == content
    assert len(list(tmp_path.rglob("*"))) == 3


@pytest.fixture
def leader(tmp_path, monkeypatch):
    """A session that leads, after a step whose number is `leader.at`."""
    one = made(tmp_path, model=torch.nn.Linear(300, 300))
    native = SimpleNamespace(
        position=lambda: f"of step {one.at}", committed=lambda: one.at, version=lambda: one.at,
        busy=lambda milliseconds, reason: one.said.append(reason), done=lambda: one.said.append("done"),
    )  # fmt: skip
    one.at, one.said = 10, []
    monkeypatch.setattr(one, "_native", native)
    monkeypatch.setattr(one._busy, "_native", native)
    monkeypatch.setattr(one, "_joined", True)
    monkeypatch.setattr(one, "_step", SimpleNamespace(leads=True))
    return one


def test_a_save_that_fails_is_told_and_no_replicas_end(tmp_path, leader, caplog):
    path = tmp_path / "gpt.pt"
    caplog.set_level(logging.WARNING, "rejoin")
    assert leader.save(path) and not caplog.text and leader.said == ["a checkpoint", "done"]
    told = []
    for number in range(1, 6):
        leader.at = 10 + 10 * number
        with no_room():
            assert not leader.save(path)
        told.append(len(caplog.records))
    assert told == [1, 2, 2, 3, 3] and {record.levelname for record in caplog.records} == {"ERROR"}
    first = caplog.records[0].getMessage()
    assert f"the checkpoint of step 20 is not written to {path}, and training goes on (1 in a row that" in first
    assert "this process has written there: of step 10): OSError: [Errno 27] File too large: '" in first
    assert torch.load(path, weights_only=True)["rejoin"]["rank0"]["version"] == 10 and leader.said[-1] == "done"
    leader.at = 70
    assert leader.save(path) and torch.load(path, weights_only=True)["rejoin"]["rank0"]["version"] == 70
    assert f"the checkpoint of step 70 is written to {path}, after 5 that were not" in caplog.text
    assert not leader.save(tmp_path / "nowhere" / "gpt.pt") and "No such file or directory: '" in caplog.text


def test_other_replicas_write_nothing_and_what_fails_of_the_session_is_raised(tmp_path, leader, monkeypatch, caplog):
    path = tmp_path / "gpt.pt"
    with monkeypatch.context() as patched:
        patched.setattr(leader, "_step", SimpleNamespace(leads=False))
        assert not leader.save(path) and not path.exists() and not leader.said
    with monkeypatch.context() as patched:
        patched.setattr(leader._leaving.signals, "holds", True)
        with pytest.raises(WithinUpdate):
            leader.save(path)
    for error in (Cancelled("out"), errors.SystemFailure("of the daemon"), ZeroDivisionError(), RuntimeError("own")):
        with pytest.raises(type(error)), _saving.Saving().of(path, 1):
            raise error
    assert not caplog.text
    with _saving.Saving().of(path, 1, RuntimeError):
        raise RuntimeError("file write failed")
    assert "RuntimeError: file write failed" in caplog.text
    with _saving.Saving().of(path, 1), replacing(path) as mine, replacing(path):
        mine.write(b"of a replica that does not lead")
    assert "Unavailable: " in caplog.text and "several replicas write it: let the one write it that has step.leads" in (
        caplog.text
    )


def test_of_the_errors_of_libraries_those_of_writing_alone_are_taken_for_a_disks(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "rejoin")

    def save(how) -> None:
        with _saving.Saving().of(tmp_path, 1, RuntimeError):
            how()

    for bug in ("CUDA error: device-side assert", "Some tensors share memory, this will lead to duplicate memory on"):
        with pytest.raises(RuntimeError, match=bug), _saving.Saving().of(tmp_path, 1, RuntimeError):
            raise RuntimeError(bug)
    with pytest.raises(torch.OutOfMemoryError):
        save(lambda: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory")))
    assert not caplog.text
    with no_room(), open(tmp_path / "own.pt", "wb") as file:
        save(lambda: torch.save(LARGE, tmp_path / "gpt.pt"))
        save(lambda: torch.save(LARGE, file))
        save(lambda: torch.save(LARGE, tmp_path / "gpt.pt", _use_new_zipfile_serialization=False))
    save(lambda: torch.save(LARGE, tmp_path / "nowhere" / "gpt.pt"))
    save(lambda: torch.save(LARGE, tmp_path))
    assert len(caplog.records) == 5
    pytest.importorskip("safetensors.torch")
    from safetensors import SafetensorError
    from safetensors import torch as safetensors_torch

    with no_room(), _saving.Saving().of(tmp_path, 1, SafetensorError):
        safetensors_torch.save_file(LARGE, tmp_path / "gpt.safetensors")
    assert "SafetensorError" in caplog.text


def of_two_ranks(leader, paths, *, rounds: int = 1) -> list:
    """What save() of either gives or raises, both at once."""
    store = torch.distributed.HashStore()

    def rank(number: int) -> list:
        one = copy.copy(leader)
        one._saving, one._ranks = _saving.Saving(), _ranks.Ranks(0, _leaving.Leaving(), lambda: None)
        one._ranks.rank, one._ranks._size, one._ranks._store = number, 2, store
        try:
            return [one.save(paths[number]) for _ in range(rounds)]
        except InvalidArgument as error:
            return [str(error)]

    with ThreadPoolExecutor() as threads:
        return list(threads.map(rank, [number for number in (0, 1) if paths[number]]))


def test_ranks_that_would_write_over_each_others_part_are_refused_alike_and_before_they_write(tmp_path, leader):
    (tmp_path / "gpt.pt").write_text("of before")
    (tmp_path / "link").symlink_to(tmp_path)
    told = of_two_ranks(leader, [tmp_path / "gpt.pt", tmp_path / "link" / "gpt.pt"])
    assert all("ranks 0, 1 of this replica give the same path as another one" in text for (text,) in told)
    assert (tmp_path / "gpt.pt").read_text() == "of before"
    assert of_two_ranks(leader, [tmp_path / "0.pt", tmp_path / "1.pt"], rounds=2) == [[True, True]] * 2


def test_where_one_rank_can_not_write_its_file_no_rank_puts_its_own_in_place(tmp_path, leader, caplog):
    """Files of several steps are no checkpoint."""
    (tmp_path / "0.pt").write_text("of before")
    paths = [tmp_path / "0.pt", tmp_path / "nowhere" / "1.pt"]
    assert of_two_ranks(leader, paths, rounds=2) == [[False, False]] * 2
    assert "Unavailable: rank 1 of this replica has not written its file, and says why" in caplog.text
    assert "FileNotFoundError" in caplog.text and (tmp_path / "0.pt").read_text() == "of before"
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".new")] == []


def test_a_rank_that_writes_alone_is_not_held_up_for_ever(tmp_path, leader, monkeypatch, caplog):
    monkeypatch.setattr(_ranks, "LONGEST_WAIT_SECONDS", 0.05)
    assert of_two_ranks(leader, [tmp_path / "gpt.pt", None], rounds=2) == [[True, True]]
    assert "rank 1 of this replica has not told its 'path of save()'" in caplog.text and len(caplog.records) == 1


def test_a_result_that_is_written_is_not_lost_for_want_of_room_beside_it(tmp_path, caplog):
    with _final.final_save(ended_session(), tmp_path / "gpt.pt") as mine:
        limit = no_room(0) if mine else nullcontext()
        limit.__enter__()
    limit.__exit__(None, None, None)
    assert "gpt.pt is written, and there was no room to say so beside it (File too large)" in caplog.text


def test_a_second_session_of_a_process_is_told_what_to_call():
    error = errors._make(4, "process 7 is replica 0 already, by another session: close that session first, or give …")
    assert "call leave() of that session first, or give" in str(error)
