import os
import subprocess
import sys

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


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
