import os
import subprocess
import sys

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser):
    parser.addoption("--thorough", action="store_true", help="the tests marked so, too")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--thorough"):
        return
    left_out = [item for item in items if item.get_closest_marker("thorough")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def no_job_outlives_its_test():
    """One that has failed would take the processors from all that come after it."""
    yield
    jobs = getattr(sys.modules.get("test_job"), "RUNNING", [])
    while jobs:
        process = jobs.pop()
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()  # and its processes hear that it has died
                process.wait()
