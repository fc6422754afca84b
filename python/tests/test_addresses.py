"""Where a process group and a checkpoint server say that they are, on machines with one family of addresses or both."""

import json
import subprocess
from importlib.util import find_spec

import pytest

pytest.importorskip("torch")

import forked  # noqa: E402

SERVER = ["server"] if find_spec("torchft") else []

# It makes the network namespace, in which "ip" is told the first argument. Each further one is a MASTER_ADDR and what a
# group listens on; "server": a checkpoint server.
PROGRAM = """
import ctypes, json, os, subprocess, sys
from datetime import timedelta
from rejoin.distributed import Options, ProcessGroup
network, *cases = sys.argv[1:]
CLONE_NEWNET, libc = 0x40000000, ctypes.CDLL(None, use_errno=True)
if libc.unshare(CLONE_NEWNET) != 0:
    print("unshare():", os.strerror(ctypes.get_errno()), file=sys.stderr)
    sys.exit(77)
for line in json.loads(network):
    if subprocess.run(["ip", *line.split()]).returncode != 0:
        sys.exit(77)
os.environ["MASTER_PORT"] = "4711"
for case in cases:
    os.environ["MASTER_ADDR"], _, listen = case.partition(" ")
    try:
        if case == "server":
            from rejoin.torchft import RejoinTransport
            transport = RejoinTransport()
            print("TOLD", transport.metadata().split(" ")[-1].rpartition(":")[0])
            transport.shutdown()
        else:
            group = ProcessGroup(timedelta(seconds=9), Options(listen=listen, device="host"))
            print("TOLD", group.get_reconfigure_handle().split(" ")[-1].rpartition(":")[0])
            group.shutdown()
    except Exception as error:
        print("TOLD", error)
"""
IPV6, BRIDGE = "addr add fd00:5::1/64 dev eth0 nodad", "addr add 172.17.0.1/16 dev eth1"
ROUTE = "-6 route add default via fd00:5::9 dev eth0"


def told_on_a_machine(*network, cases):
    """Give what each says in a network namespace of their own."""
    lines = ["link set lo up", "link add eth0 type veth peer name eth1", "link set eth0 up", "link set eth1 up"]
    arguments = ["-c", PROGRAM, json.dumps([*lines, *network]), *cases]
    process = forked.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, errors = process.communicate(100)
    if process.returncode == 77:
        pytest.skip(f"network namespaces with IPv6 can't be had: {errors}")
    told = [line.removeprefix("TOLD ") for line in out.splitlines() if line.startswith("TOLD ")]
    assert len(told) == len(cases), out + errors
    return told


def test_on_a_machine_with_ipv6_alone_its_ipv6_address_is_told_and_what_can_not_be_reached_is_refused():
    *told, refused = told_on_a_machine(
        IPV6,
        cases=["localhost 0.0.0.0:0", "fd00:5::1 ", "fd00:5::1 [::]:0", "fd00:5::2 ", *SERVER, "fd00:5::1 0.0.0.0:0"],
    )
    assert told == ["127.0.0.1", *["[fd00:5::1]"] * (3 + len(SERVER))]
    assert "over IPv4 alone, and this machine has no IPv4 address that others could be told: give [::]:PORT" in refused


def test_the_address_from_which_the_master_is_reached_is_told_or_else_the_default_routes_and_not_that_of_a_bridge():
    cases = ["fd00:5::2 ", "fd00:5::2 [::]:0", "172.17.0.2 ", "localhost ", " "]
    told = told_on_a_machine(IPV6, BRIDGE, ROUTE, cases=cases)
    assert told == ["[fd00:5::1]", "[fd00:5::1]", "172.17.0.1", "127.0.0.1", "[fd00:5::1]"]


def test_the_loopback_is_told_where_there_is_nothing_else_and_nobody_is_known_to_be_elsewhere():
    alone, refused = told_on_a_machine(cases=[" ", "fd00:5::1 "])
    assert alone == "127.0.0.1"
    assert "this machine has no address that others could be told" in refused
