"""The save at a job's end: it survives the replica that makes it."""

import os
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import forked  # noqa: E402
from test_job import RUNNING, Job  # noqa: E402
from test_run import until  # noqa: E402
from writer import session  # noqa: E402

from rejoin.errors import Unavailable  # noqa: E402
from rejoin.torch import _final, _leaving, _ranks  # noqa: E402


@pytest.mark.parametrize("place", ["final", "saved"])
def test_a_leader_that_dies_in_its_final_save_is_followed_by_another(tmp_path, place):
    job = Job(tmp_path, steps=20, kill={0: (place, 20)})
    held = job.hold(1, "final")
    job.until(lambda: job.killed(0) and held.exists())
    held.unlink()
    errors = job.wait()
    assert "replica 0 ended with signal SIGKILL" in errors and "finished: step 20 is committed" in errors
    assert "may not be done" not in errors
    assert torch.load(tmp_path / "final.pt", weights_only=True)["rejoin"]["rank0"]["version"] == 20
    assert "final save" in job.log(1) and "final save" not in job.log(0)
    assert "replica 0 has not the job's last state, and leaves" in job.log(0)


def test_where_all_die_in_their_final_saves_the_job_does_not_end_as_if_all_was_well(tmp_path):
    job = Job(tmp_path, steps=20, kill={0: ("final", 20), 1: ("final", 20)})
    _, errors = job.process.communicate(timeout=240)
    assert job.process.returncode == 1, errors
    assert "each replica that had the state of the last step has died before its script had ended" in errors
    assert not (tmp_path / "final.pt").exists()


def test_where_all_have_died_so_the_checkpoint_of_the_last_step_gives_the_result(tmp_path):
    job = Job(tmp_path, "--save-every", "10", steps=20, kill={0: ("final", 20), 1: ("final", 20)})
    job.process.communicate(timeout=240)
    assert not (tmp_path / "final.pt").exists()
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["rejoin"]["rank0"]["version"] == 20
    Job(tmp_path, "--restore", steps=20).wait()
    assert torch.load(tmp_path / "final.pt", weights_only=True)["rejoin"]["rank0"]["version"] == 20


def process(path: Path, name: str) -> forked.Popen:
    started = forked.Popen([str(Path(__file__).with_name("writer.py")), str(path), name], env=dict(os.environ))
    RUNNING.append(started)
    return started


@pytest.mark.parametrize("how", ["ends", "is killed", "is stopped, and goes on"])
def test_the_others_wait_for_the_one_that_writes_and_one_of_them_takes_over_when_it_dies(tmp_path, how):
    path = tmp_path / "gpt.pt"
    first = process(path, "first")
    until((tmp_path / "first.True").exists)
    other = process(path, "other")
    if how == "is killed":
        first.kill()
        first.wait()
        until((tmp_path / "other.True").exists)
        (tmp_path / "other.go").touch()
        assert other.wait(60) == 0
        assert path.read_text() == "other"
        return
    if how != "ends":
        os.kill(first.pid, signal.SIGSTOP)
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(2)
        os.kill(first.pid, signal.SIGCONT)
    (tmp_path / "first.go").touch()
    assert first.wait(60) == 0 and other.wait(60) == 0
    assert (tmp_path / "other.False").exists() and path.read_text() == "first"


def test_all_ranks_of_a_replica_write_and_it_counts_when_all_have(tmp_path):
    store, path, seen = torch.distributed.HashStore(), tmp_path / "gpt", []
    first_has_written = threading.Event()

    def rank(number: int) -> None:
        ranks = _ranks.Ranks(0, _leaving.Leaving(), lambda: pytest.fail("it has left, and asks for nobody"))
        ranks.rank, ranks._size, ranks._store = number, 2, store
        one = session()
        one._ranks = ranks
        for _ in range(2):
            with _final.final_save(one, path) as mine:
                seen.append(mine)
                if mine and number == 0:
                    first_has_written.set()
                elif mine:
                    assert first_has_written.wait(60)
                    assert (tmp_path / "gpt.saved").read_text() == ""

    with ThreadPoolExecutor() as threads:
        list(threads.map(rank, (0, 1)))
    assert seen == [True, True, False, False]


def test_what_is_written_counts_for_this_job_and_this_state_alone(tmp_path):
    path = tmp_path / "gpt.pt"

    def writes(**state) -> bool:
        with _final.final_save(session(**state), path) as mine:
            return mine

    assert writes() and not writes()
    assert writes(digest=2) and writes(digest=1), "another job's with as many steps"
    assert writes(since=os.stat(f"{path}.saved").st_mtime + 1), "a job of before has come to the same state"
    with pytest.raises(ZeroDivisionError), _final.final_save(session(step=8), path):
        raise ZeroDivisionError
    assert writes(step=8), "a block that raises has not written"


def test_who_has_not_the_jobs_last_state_writes_nothing_and_who_left_before_as_it_leads(tmp_path):
    late, left, led = session(leads=True), session(), session(leads=True)
    late._step, late.committed, left.finished, led.finished = None, 0, False, False
    for one, writes in ((late, False), (left, False), (led, True)):
        with _final.final_save(one, tmp_path / "gpt.pt") as mine:
            assert mine == writes


def test_who_comes_to_a_finished_job_with_the_checkpoint_of_its_last_step_writes_the_result(tmp_path):
    again, other, waits = session(), session(), session()
    for one in (again, other, waits):
        one._step = None
    other.version, waits.finished = 5, False
    beside_other = session()
    beside_other._step, beside_other._ranks.gather = None, lambda name, mine, **more: [mine, b"0"]
    for one, writes in ((other, False), (beside_other, False), (waits, False), (again, True)):
        with _final.final_save(one, tmp_path / "gpt.pt") as mine:
            assert mine == writes


def test_sigterm_ends_the_wait_and_a_file_system_without_locks_leaves_it_to_the_leader(tmp_path, monkeypatch, caplog):
    path = tmp_path / "gpt.pt"
    first = process(path, "first")
    until((tmp_path / "first.True").exists)
    with _final.final_save(session(leaving=True), path) as mine:
        assert not mine
    assert "SIGTERM: another replica writes" in caplog.text
    (tmp_path / "first.go").touch()
    assert first.wait(60) == 0

    def lockf(*_) -> None:
        raise OSError(_final.errno.ENOLCK, "No locks available")

    monkeypatch.setattr(_final.fcntl, "lockf", lockf)
    for leads in (True, False):
        with _final.final_save(session(step=9, leads=leads), path) as mine:
            assert mine == leads
    assert "there is no lock beside it (No locks available)" in caplog.text


def test_the_folder_is_made_and_where_it_cant_be_the_leader_writes(tmp_path, caplog):
    with _final.final_save(session(), tmp_path / "out" / "of" / "here" / "gpt.pt") as mine:
        assert mine and not caplog.text
    (tmp_path / "file").touch()
    for leads in (True, False):
        with _final.final_save(session(leads=leads), tmp_path / "file" / "gpt.pt") as mine:
            assert mine == leads
    assert "there is no lock beside it (File exists)" in caplog.text


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_whose_block_fails_holds_no_other_up_and_nothing_is_written(tmp_path, failing):
    store, path = torch.distributed.HashStore(), tmp_path / "gpt"

    def rank(number: int) -> type | None:
        ranks = _ranks.Ranks(0, _leaving.Leaving(), lambda: None)
        ranks.rank, ranks._size, ranks._store = number, 2, store
        one = session()
        one._ranks = ranks
        try:
            with _final.final_save(one, path) as mine:
                assert mine
                if number == failing:
                    raise ZeroDivisionError
        except (ZeroDivisionError, Unavailable) as error:
            return type(error)

    with ThreadPoolExecutor() as threads:
        ends = list(threads.map(rank, (0, 1)))
    assert ends[failing] is ZeroDivisionError and ends[1 - failing] is Unavailable
    assert (tmp_path / "gpt.saved").read_text() == ""
