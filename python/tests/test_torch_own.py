"""torch's own tests of torch.distributed: some of them. By hand, all of them: python tests/torch_own.py."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SOME = [
    "all_gather", "all_gather_coalesced_simple", "all_gather_object_default_pg", "all_reduce_coalesced_group_sum",
    "all_reduce_product", "all_reduce_sum_complex", "all_to_all", "all_to_all_single_unequal_split_group",
    "barrier_full_group", "broadcast_group", "gather_group", "irecv", "reduce_max", "scatter_complex",
    "send_recv_with_tag", "isend", "DistributedDataParallelCPU", "ddp_device", "accumulate_gradients_no_sync",
    "reduce_scatter_tensor",
]  # fmt: skip


@pytest.mark.thorough
def test_some_of_torchs_own_tests_pass():
    pytest.importorskip("expecttest", reason="torch's own tests need expecttest: pip install expecttest")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "torch_own.py"), f"^test_({'|'.join(SOME)})$"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    passed, failed = map(int, re.search(r"(\d+) passed, (\d+) failed", done.stdout).groups())
    assert passed >= 15
    assert failed == 0
