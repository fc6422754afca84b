"""RejoinTransport under torchft's own test of transports, and by itself: in place, changed meanwhile, a dead sender."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from unittest import TestCase

import pytest
import torch

pytest.importorskip("torchft", reason="torchft is not installed here")

from torchft.checkpointing.transport_test import run_multi_recovery_test  # noqa: E402

import rejoin  # noqa: E402
from rejoin import _native  # noqa: E402
from rejoin.torchft import RejoinTransport  # noqa: E402

LONG = timedelta(seconds=30)


def transport(**settings):
    return RejoinTransport(**{"timeout": LONG, "listen": "127.0.0.1:0", **settings})


@pytest.mark.parametrize("name", ["tcp", "shm"])
def test_torchfts_own_test(name):
    run_multi_recovery_test(TestCase(), lambda rank, world: transport(transport=name), torch.device("cpu"))


def state(seed):
    torch.manual_seed(seed)
    return {
        "weight": torch.randn(1000, 1001),
        "half": torch.randn(7, 3).bfloat16(),
        "strided": torch.randn(8, 6)[:, ::2],
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3.5),
        "step": 12,
        "nested": [{"mask": torch.tensor([True, False])}, None],
    }


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name in ("weight", "half", "strided", "empty", "scalar"):
        assert one[name].dtype == other[name].dtype
        assert torch.equal(one[name], other[name]), name
    assert one["step"] == other["step"]
    assert torch.equal(one["nested"][0]["mask"], other["nested"][0]["mask"])


def test_into_the_receivers_own_tensors():
    sender, mine = transport(), state(2)
    mine["half"] = mine["half"][:1].expand(7, 3)  # can't be received into
    receiver = transport(state_dict=lambda: mine)
    sender.send_checkpoint([1], 3, state(1), LONG)
    before = {name: mine[name].data_ptr() for name in ("weight", "strided")}
    got = receiver.recv_checkpoint(0, sender.metadata(), 3, LONG)
    assert_equal(got, state(1))
    assert got["weight"] is mine["weight"]
    assert {name: got[name].data_ptr() for name in before} == before
    for one in (sender, receiver):
        one.shutdown()


def test_a_tensor_that_changed_before_it_was_disallowed_is_refused():
    sender, receiver, sent = transport(), transport(), state(1)
    sender.send_checkpoint([1], 3, sent, LONG)
    sent["weight"][500, 500] += 1
    with pytest.raises(rejoin.Corrupt, match="changed before it was withdrawn"):
        receiver.recv_checkpoint(0, sender.metadata(), 3, LONG)


def test_disallow_waits_for_who_receives_and_no_longer_than_its_timeout():
    sender = transport(timeout=timedelta(milliseconds=200))
    sender.send_checkpoint([1], 3, state(1), LONG)
    stuck = _native.CheckpointFetch("tcp", sender.metadata(), 3, 10_000)
    start = time.monotonic()
    sender.disallow_checkpoint()
    assert 0.15 < time.monotonic() - start < 5
    stuck.close()
    with pytest.raises(rejoin.DeadlinePassed):
        transport().recv_checkpoint(0, sender.metadata(), 3, timedelta(milliseconds=50))


def test_shutdown_beside_a_wait_for_who_receives():
    sender = transport()
    sender.send_checkpoint([1], 3, state(1), LONG)
    stuck = _native.CheckpointFetch("tcp", sender.metadata(), 3, 10_000)
    waiting = threading.Thread(target=sender.disallow_checkpoint)
    waiting.start()
    sender.shutdown(wait=False)
    stuck.close()
    waiting.join(20)
    assert not waiting.is_alive()


def test_a_state_without_tensors_and_views_that_are_not_what_their_bytes_say():
    sender, receiver = transport(), transport()
    sender.send_checkpoint([1], 3, {"step": 3}, LONG)
    assert receiver.recv_checkpoint(0, sender.metadata(), 3, LONG) == {"step": 3}
    sender.disallow_checkpoint()
    with pytest.raises(rejoin.DeadlinePassed):
        receiver.recv_checkpoint(0, sender.metadata(), 3, timedelta(milliseconds=50))
    turned = torch.tensor([1 + 2j, 3 - 4j]).conj()
    sender.send_checkpoint([1], 4, {"turned": turned, "masked": torch.nn.Parameter(torch.ones(3))}, LONG)
    got = receiver.recv_checkpoint(0, sender.metadata(), 4, LONG)
    assert torch.equal(got["turned"], turned)
    mine = {"turned": torch.zeros(2, dtype=torch.complex64).conj(), "masked": torch.zeros(3)}
    in_place = transport(state_dict=lambda: mine).recv_checkpoint(0, sender.metadata(), 4, LONG)
    assert in_place["turned"] is mine["turned"]
    assert torch.equal(mine["turned"], turned)
    assert torch.equal(got["masked"], torch.ones(3))


def test_after_shutdown_it_says_so():
    sender = transport()
    sender.shutdown()
    sender.shutdown()
    with pytest.raises(rejoin.Unavailable, match="was shut down"):
        sender.metadata()


SENDER = """
import sys, torch
from datetime import timedelta
from rejoin.torchft import RejoinTransport
t = RejoinTransport(listen="127.0.0.1:0")
t.send_checkpoint([1], 3, {"weight": torch.zeros(64 << 20)}, timedelta(seconds=30))
print(t.metadata(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def sender():
    process = subprocess.Popen([sys.executable, "-c", SENDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield process, process.stdout.readline().strip()
    process.kill()
    process.wait()


def test_a_sender_that_is_killed_is_seen_at_once(sender):
    process, address = sender
    killed = threading.Thread(target=lambda: (time.sleep(0.02), process.kill()))
    killed.start()
    start = time.monotonic()
    with pytest.raises(rejoin.Unavailable):
        while True:  # until the kill comes
            transport().recv_checkpoint(0, address, 3, LONG)
    assert time.monotonic() - start < 10
    killed.join()


def test_a_sender_that_stops_costs_the_timeout_and_ctrl_c_ends_the_wait(sender):
    process, address = sender
    signal.signal(signal.SIGINT, signal.default_int_handler)  # who was started in the background ignores it
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(TimeoutError, match="timed out waiting"):
        transport().recv_checkpoint(0, address, 3, timedelta(milliseconds=300))
    timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        transport().recv_checkpoint(0, address, 3, LONG)
