"""The examples, as a reader would run them."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import forked  # noqa: E402

EXAMPLES = Path(__file__).parent.parent / "examples"
DATA = EXAMPLES.parent.parent / "data" / "shakespeare.txt"


def losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)$", text, re.M)]


def test_the_example_survives_a_kill_and_learns_as_the_plain_script_does(tmp_path):
    command = [sys.executable, "-m", "rejoin.run", "--replicas", "2", "--batch", "16", "--steps", "120",
               "--directory", str(tmp_path / "job"), "--",
               sys.executable, str(EXAMPLES / "ddp.py"), str(DATA)]  # fmt: skip
    job = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    log = tmp_path / "job" / "replica1.log"
    deadline = time.monotonic() + 60
    while not (log.exists() and "step 20 " in log.read_text()):
        assert time.monotonic() < deadline and job.poll() is None
        time.sleep(0.05)
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    victim = next(int(pid) for pid in children if b"REJOIN_REPLICA=1" in Path(f"/proc/{pid}/environ").read_bytes())
    os.kill(victim, signal.SIGKILL)
    _, errors = job.communicate(timeout=110)
    assert job.returncode == 0, errors
    assert "replica 1 ended with signal SIGKILL, and is started again" in errors
    seen = losses((tmp_path / "job" / "replica0.log").read_text())
    assert len(seen) == 12 and seen[-1] < seen[0] - 0.3, seen
    assert (tmp_path / "gpt.pt").exists()


def test_the_plain_script_runs(tmp_path):
    script = [sys.executable, str(EXAMPLES / "plain.py"), str(DATA), "--steps", "20"]
    done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    seen = losses(done.stdout)
    assert len(seen) == 2 and seen[1] < seen[0]


def test_the_diff_in_the_documentation_is_the_examples():
    diff = subprocess.run(["diff", "plain.py", "ddp.py"], cwd=EXAMPLES, capture_output=True, text=True).stdout
    changed = [line[2:].strip() for line in diff.splitlines() if line.startswith(("<", ">"))]
    root = EXAMPLES.parent.parent
    pages = {page: (root / page).read_text() for page in ("docs/pytorch.md", "README.md")}
    shown = [line for line in changed if line and not line.startswith(('"""', "rejoin-run"))]
    assert len(shown) < 26
    for name, page in pages.items():
        for line in shown:
            assert line in page, f"{name} does not show: {line}"
    assert len(pages["README.md"].splitlines()) <= 120


def rank_of(job: int, replica: int, rank: int) -> int:
    """The process of that rank, which torchrun has started."""
    children = Path(f"/proc/{job}/task/{job}/children").read_text().split()
    for parent in children:
        if b"REJOIN_REPLICA=%d" % replica in Path(f"/proc/{parent}/environ").read_bytes():
            for task in Path(f"/proc/{parent}/task").iterdir():
                for pid in (task / "children").read_text().split():
                    if b"\0RANK=%d\0" % rank in Path(f"/proc/{pid}/environ").read_bytes():
                        return int(pid)
    raise AssertionError(f"rank {rank} of replica {replica} is not there")


def test_a_disk_that_is_full_for_the_name_of_a_sharded_checkpoint_is_heard_of_by_all_ranks(tmp_path):
    told = forked.run_ranks(2, f"""
import errno, os, sys
from pathlib import Path
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
sys.path.insert(0, {str(EXAMPLES)!r})
import hsdp
dist.init_process_group("gloo")
fsync = os.fsync
def fails(file):
    if "latest" in os.readlink(f"/proc/self/fd/{{file}}"):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
    fsync(file)
for name, error in (("1", "none"), ("2", "fsync"), ("3", "opening"), ("4", "none")):
    writer = hsdp.Named(Path({str(tmp_path)!r}, name))
    os.fsync = fails if error == "fsync" else fsync
    replacing = hsdp.rj.replacing
    if error == "opening":
        hsdp.rj.replacing = lambda path: replacing(path / "nowhere")
    try:
        with writer.latest:
            dcp.save({{"weight": torch.ones(3)}}, storage_writer=writer)
        told = "saved"
    except dcp.CheckpointException:
        told = "not saved"
    hsdp.rj.replacing = replacing
    dist.barrier()
    print(dist.get_rank(), name, told, Path({str(tmp_path)!r}, "latest").read_text(), flush=True)
    dist.barrier()
""")  # fmt: skip
    expected = [("1", "saved 1"), ("2", "not saved 1"), ("3", "not saved 1"), ("4", "saved 4")]
    assert sorted(told.splitlines()) == [f"{rank} {name} {what}" for rank in (0, 1) for name, what in expected]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "3", "4", "latest"]


@pytest.mark.thorough
def test_the_sharded_example_loses_a_rank_and_goes_on_from_its_checkpoint(tmp_path):
    def run(directory: str, steps: int, kill: bool = False) -> list[float]:
        command = [sys.executable, "-m", "rejoin.run", "--replicas", "2", "--ranks", "2", "--batch", "16",
                   "--steps", str(steps), "--directory", str(tmp_path / directory), "--",
                   sys.executable, str(EXAMPLES / "hsdp.py"), str(DATA),
                   "--checkpoint", str(tmp_path / "checkpoint")]  # fmt: skip
        job = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        try:
            if kill:
                log = tmp_path / directory / "replica1.log"
                deadline = time.monotonic() + 120
                while not (log.exists() and "step 20 " in log.read_text()):
                    assert time.monotonic() < deadline and job.poll() is None
                    time.sleep(0.05)
                os.kill(rank_of(job.pid, 1, 1), signal.SIGKILL)
            _, errors = job.communicate(timeout=170)
        finally:
            job.terminate()
        text = (tmp_path / directory / "replica0.log").read_text()
        assert job.returncode == 0, errors + text[-3000:]
        assert errors.count("replica 1 ended with status 1, and is started again") == kill, errors
        return losses(text)

    first = run("first", 110, kill=True)
    assert len(first) == 11 and first[-1] < first[0] - 0.3, first
    assert (tmp_path / "checkpoint" / "latest").read_text() == "100"
    second = run("second", 120)
    assert len(second) == 2 and abs(second[0] - first[-1]) < 0.2, (first, second)  # steps 110 and 120


def test_the_demo_kills_a_replica_and_proves_that_it_came_back():
    script = [sys.executable, str(EXAMPLES.parent / "demo.py"), "--data", str(DATA), "--kill", "2@20"]
    done = subprocess.run([*script, "--steps", "60"], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "replica 2 trains again from step" in done.stdout
    assert re.search(r"same bits on all replicas, after each of \d+ steps: yes", done.stdout)
    committed = re.search(r"(\d+) steps committed", done.stdout)
    assert committed and int(committed[1]) >= 60 and " 0 lost, 0 repeated" in done.stdout, done.stdout
    wrong = subprocess.run([*script[:4], "--kill", "7@1"], capture_output=True, text=True)
    assert wrong.returncode == 2 and "--kill 7@1: it is REPLICA@STEP" in wrong.stderr


def test_the_slurm_script_starts_a_replica_again_and_passes_sigterm_on(tmp_path):
    """With a stand-in of srun, whose first run dies."""
    (tmp_path / "srun").write_text(
        "#!/bin/bash\n"
        "trap 'echo left >>runs; exit 0' TERM\n"
        "printf '%s\\n' \"$*\" >>runs\n"
        "[[ $(wc -l <runs) -gt 1 ]] || exit 1\n"
        "sleep 60 & wait\n"
    )
    (tmp_path / "srun").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "RANKS": "2"}
    script, runs = [str(EXAMPLES / "slurm.sh"), "train.py"], tmp_path / "runs"
    refused = subprocess.run(script, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert refused.returncode != 0 and "REJOIN_COORDINATOR: is not set" in refused.stderr
    environment |= {"REJOIN_COORDINATOR": "host:1", "REJOIN_JOB_KEY_FILE": "key"}
    task = subprocess.Popen(script, env=environment, cwd=tmp_path, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while not (runs.exists() and len(runs.read_text().splitlines()) == 2):
            assert time.monotonic() < deadline and task.poll() is None
            time.sleep(0.02)
        task.terminate()
        task.wait(60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(task.pid, signal.SIGKILL)  # the stand-in's sleep
    assert runs.read_text().splitlines()[2:] == ["left"]
    assert "torchrun --standalone --nproc-per-node 2 train.py" in runs.read_text()
    (tmp_path / "srun").write_text("#!/bin/bash\nexit 2\n")  # a setting is wrong
    assert subprocess.run(script, env=environment, cwd=tmp_path, timeout=60).returncode == 2
