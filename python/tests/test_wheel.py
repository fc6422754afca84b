"""The package as a user gets it: pip builds the library, too, and an environment that had nothing runs an example."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
EXAMPLE, DATA = ROOT / "python" / "examples" / "ddp.py", ROOT / "data" / "shakespeare.txt"

pytestmark = pytest.mark.thorough


def run(*command: object, **more: object) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **more)
    assert done.returncode == 0, f"{command}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


def test_pip_builds_a_wheel_that_a_fresh_environment_trains_with(tmp_path):
    """What build/release has compiled comes out of the compiler's cache; without one this takes minutes."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "wheel", "-q", "--no-build-isolation", "--no-deps", "--wheel-dir", tmp_path, ROOT / "python")
    (wheel,) = tmp_path.glob("rejoin-*.whl")
    fresh = tmp_path / "fresh"
    run(sys.executable, "-m", "venv", fresh)
    python, programs = fresh / "bin" / "python", fresh / "bin"
    run(python, "-m", "pip", "install", "-q", "--no-index", "--no-deps", wheel)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    told = run(python, "-c", "import rejoin; print(rejoin.__file__, rejoin.__version__)").split()
    assert Path(told[0]).is_relative_to(fresh)
    for program in ("rejoin", "rejoind", "rejoin-run"):
        assert run(programs / program, "--version").split()[-1] == told[1]
    missing = subprocess.run([python, "-c", "import rejoin.torch"], capture_output=True, text=True)
    assert "pip install torch" in missing.stderr, missing.stderr

    # torch is that of these tests: what the environment has itself comes before it.
    (site / "torch.pth").write_text(sysconfig.get_path("purelib"))
    assert Path(run(python, "-c", "import rejoin.torch; print(rejoin.torch.__file__)").strip()).is_relative_to(fresh)
    run(programs / "rejoin-run", "--replicas", 2, "--batch", 4, "--steps", 10, "--directory", tmp_path / "job", "--",
        python, EXAMPLE, DATA, cwd=tmp_path, timeout=120)  # fmt: skip
    assert (tmp_path / "gpt.pt").exists()
    assert "step 10 loss" in (tmp_path / "job" / "replica0.log").read_text()


def test_what_the_machine_lacks_is_named_at_once(tmp_path):
    environment = {**os.environ, "PKG_CONFIG_LIBDIR": str(tmp_path), "PKG_CONFIG_PATH": ""}
    settings = ["-DREJOIN_TESTS=OFF", "-DCMAKE_DISABLE_FIND_PACKAGE_Protobuf=ON"]
    done = subprocess.run(
        ["cmake", "-G", "Ninja", "-S", ROOT, "-B", tmp_path / "build", *settings],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    told = " ".join(done.stderr.split())
    for package in ("libprotobuf-dev", "protobuf-compiler", "libucx-dev", "libibverbs-dev", "libzstd-dev"):
        assert package in told.split("apt-get install ")[1], told
    assert "libssl-dev" not in told
