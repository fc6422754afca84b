"""The binding with a GPU's memory and streams, over the driver made of software that the C++ tests have."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from test_job import Job, check_equal  # noqa: E402

DRIVER = Path(os.environ.get("REJOIN_FAKE_CUDA_FOLDER", "nowhere"))


needs_driver = pytest.mark.skipif(
    not (DRIVER / "libcuda.so.1").exists(),
    reason="REJOIN_FAKE_CUDA_FOLDER has no driver; python_test.sh sets it",
)


@needs_driver
def test_a_replica_whose_state_and_streams_are_a_gpus_comes_back_with_the_same_bits(tmp_path, monkeypatch):
    pytest.importorskip("numpy")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(DRIVER))
    job = Job(tmp_path, steps=0, script="trainer_device.py", forks=False, kill={1: ("all-reduce", 11)})
    job.until(lambda: job.killed(1))
    trained = job.trains(1)
    job.until(lambda: job.trains(1) > trained + 10)
    # One that leaves while its stream has not done the last update has the state of that step.
    (tmp_path / "leave.1").touch()
    job.until(lambda: "it has left" in job.log(1))
    alone = job.trains(0)
    job.until(lambda: job.trains(0) > alone + 3)
    job.process.terminate()
    assert job.wait(60).count("replica 1 ended with signal SIGKILL") == 1
    check_equal(job, 2)


@needs_driver
def test_a_process_groups_collectives_of_gpu_memory_wait_on_streams_alone():
    pytest.importorskip("numpy")
    done = subprocess.run(
        [sys.executable, Path(__file__).parent / "group_device.py"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "LD_LIBRARY_PATH": str(DRIVER)},
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "the collectives of GPU memory are right" in done.stdout
