"""torch's own tests of torch.distributed, for CPU tensors, with Rejoin as the backend.

usage: torch_own.py [REGEX]     those whose name it is found in; by default all

It takes the tests of the torch that it runs under (torch/testing/_internal/distributed/distributed_test.py) as they run
for Gloo, and those of all_to_all as they run for MPI. It fails if one fails that is not in LEFT_OUT below.
"""

from __future__ import annotations

import collections
import importlib
import os
import re
import shutil
import sys
import tempfile
import unittest

MEMBERS = 4
os.environ.update(OMP_NUM_THREADS="1", MASTER_ADDR="127.0.0.1", WORLD_SIZE=str(MEMBERS), BACKEND="gloo")
os.environ["TEMP_DIR"] = tempfile.mkdtemp(prefix="rejoin-torch-own-")

import torch  # noqa: E402

import rejoin.distributed  # noqa: E402, F401 - it registers the backend

LEFT_OUT = {
    "any_source": "Rejoin receives from a rank that is named",
    "barrier_timeout": "it looks for the words of Gloo's errors",
    "monitored_barrier": "it is of Gloo's own, or looks for its words",
    "sparse_all_reduce|sparse_gradients": "Rejoin takes dense tensors",
}
THEIRS = "torch.testing._internal.distributed.distributed_test"


class _LikeGloo(str):
    """Rejoin's name; a test that asks whether it is Gloo's hears that it is."""

    def __eq__(self, other):
        return other in ("rejoin", "gloo")

    __hash__ = str.__hash__


def tests_for(backend, pattern):
    """Give torch's tests as they are for this backend, to be run over Rejoin."""
    os.environ["BACKEND"] = backend
    # Those of groups of some of the members ask for eight, and need four; those of GPUs fork, to see that none is here.
    common = importlib.import_module("torch.testing._internal.common_distributed")
    common.skip_if_small_worldsize = lambda test: test
    if not torch.cuda.is_available():
        common.skip_if_no_gpu = unittest.skip("it needs a GPU")
        common.skip_if_lt_x_gpu = lambda *_, **__: unittest.skip("it needs a GPU")
    sys.modules.pop(THEIRS, None)
    theirs = importlib.import_module(THEIRS)
    os.environ["BACKEND"] = theirs.BACKEND = _LikeGloo("rejoin")

    class Own(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):
        def setUp(self):
            super().setUp()
            # Forked: they need not import torch each.
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return [Own(name) for name in dir(Own) if name.startswith("test_") and re.search(pattern, name)]


class Result(unittest.TextTestResult):
    """Counts those that have passed, too."""

    passed = 0

    def addSuccess(self, test):
        super().addSuccess(test)
        self.passed += 1


def main():
    wanted = re.compile(sys.argv[1] if len(sys.argv) > 1 else "")
    left_out, skipped = collections.Counter(), collections.Counter()
    passed, failed = 0, []
    for backend, pattern in (("mpi", "^test_all_to_all"), ("gloo", "^test_(?!all_to_all)")):
        suite = unittest.TestSuite()
        for test in tests_for(backend, pattern):
            name = test._testMethodName
            reasons = [reason for names, reason in LEFT_OUT.items() if re.search(names, name)]
            if not wanted.search(name):
                continue
            if reasons:
                left_out[reasons[0]] += 1
            else:
                suite.addTest(test)
        result = unittest.TextTestRunner(sys.stdout, verbosity=2, resultclass=Result).run(suite)
        passed += result.passed
        failed += [test._testMethodName for test, _ in result.failures + result.errors]
        skipped.update(reason for _, reason in result.skipped)
    for reason, count in skipped.most_common():
        print(f"{count} skipped by torch: {reason}")
    for reason, count in left_out.items():
        print(f"{count} left out: {reason}")
    print(f"torch {torch.__version__}: {passed} passed, {len(failed)} failed", *failed)
    shutil.rmtree(os.environ["TEMP_DIR"], ignore_errors=True)
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
