"""What links over torch RPC do besides what all links do: agents, members, ports, ends of programs,
users' agents.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from muster import MultiSyncCollector, RPCCollector
from muster.cluster.link import Block, LinkLost
from muster.errors import BadOption
from muster.testing import CountingEnv
from tests.fakes.fault_runs import FRAMES
from tests.fakes.fault_runs import run as run_oracle
from tests.fakes.link_nodes import pattern
from tests.fakes.netns import listening
from tests.fakes.node_runs import rpc_sync_nodes
from tests.waits import free_port, wait_until

pytestmark = [
    pytest.mark.skipif(
        not torch.distributed.rpc.is_available(), reason="this PyTorch has no RPC"
    ),
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
]
NODES = "tests.fakes.link_nodes:"
ROOT = Path(__file__).parents[2]
WITHIN_S = 150.0
PROGRAM = "from tests.fakes import rpc_programs; rpc_programs.main()"


@pytest.fixture
def nodes():
    """Open a carrier whose nodes run a function of ``link_nodes.py``."""
    from muster.cluster.launchers import MpLauncher
    from muster.cluster.rendezvous import Rendezvous
    from muster.cluster.rpc_nodes import RpcCarrier

    with contextlib.ExitStack() as stack:

        def start(function, count=1, **options):
            carrier = RpcCarrier(
                MpLauncher(NODES + function), Rendezvous(count), **options
            )
            stack.callback(carrier.close)
            return carrier

        yield start


def connected(carrier, node=0, epoch=0, within_s=90.0):
    return carrier.connect(node, epoch, within_s, threading.Event())


def members(carrier) -> dict[str, int]:
    return {info.name: info.id for info in carrier._agent._agent.get_worker_infos()}


class TestMembers:
    def test_a_node_that_joins_again_keeps_its_name_and_gets_another_number(
        self, nodes
    ):
        carrier = nodes("introduced")
        own = members(carrier)
        assert list(own.values()) == [0]
        links = [connected(carrier, epoch=0)]
        first = members(carrier).items() - own.items()
        links.append(connected(carrier, epoch=1))
        second = members(carrier).items() - own.items()
        assert [name for name, _ in first] == [name for name, _ in second]
        assert dict(first) != dict(second)
        with pytest.raises(LinkLost):
            links[0].send(b"to the one before")
            while True:
                links[0].receive()
        links[1].receive()
        links[1].send(b"hello")
        assert links[1].receive().message == b"hello"
        carrier._end(0)
        assert members(carrier) == own

    def test_calls_name_their_session(self, nodes):
        """A message of another session is answered, and not received."""
        from muster.cluster import rpc_link

        carrier = nodes("echo")
        link = connected(carrier)
        node = next(iter(carrier._members.values()))
        stranger = rpc_link.RpcEnd(node, "another", main=True, deadline_s=30.0)
        stranger.send(b"bye")
        with pytest.raises(LinkLost, match="closed the link"):
            stranger.receive()
        link.send(b"hello")
        assert link.receive().message == b"hello"

    def test_messages_that_are_delivered_in_another_order_are_received_in_order(self):
        from torch._C._distributed_rpc import WorkerInfo

        from muster.cluster import rpc_link

        end = rpc_link.RpcEnd(
            WorkerInfo("nowhere", 3), "here", main=True, deadline_s=30.0
        )
        memory = np.zeros(200_000, np.uint8)
        end.expect(1, memory)
        sent = pattern(memory.size, 4)
        parts = torch.split(torch.from_numpy(sent), 70_000)
        answers = [
            rpc_link.deliver(("here", True), 1, b"second", 1, None, *parts),
            rpc_link.deliver(("here", True), 2, b"third", 2, b"small"),
            rpc_link.deliver(("here", True), 0, b"first", 0, None),
        ]
        assert [end.receive().message for _ in range(2)] == [b"first", b"second"]
        assert (memory == sent).all()
        assert [answer.done() for answer in answers] == [True, False, True], (
            "answered as they are read"
        )
        end.close()
        assert answers[1].value() == 0, "closed after no message"
        assert rpc_link.deliver(("here", True), 3, b"late", 0, None).value() == 0
        del end
        assert (
            rpc_link.deliver(("here", True), 4, b"later", 0, None).value()
            == rpc_link.GONE
        )

    def test_a_node_that_reads_nothing_is_sent_only_some_messages(self, nodes):
        from muster.cluster import end

        link = connected(nodes("deaf", deadline_s=3.0))
        link.receive()
        for _ in range(end.WAITING):
            link.send(b"small")
        begin = time.monotonic()
        with pytest.raises(LinkLost, match="has not read for 3 s"):
            link.send(b"one more")
        assert time.monotonic() - begin > 2.0

    def test_blocks_of_all_sizes_are_the_receivers_own(self, nodes):
        from muster.cluster import rpc_link

        link = connected(nodes("echo"))
        for tag, size in enumerate(
            [1, rpc_link.SMALL, rpc_link.SMALL + 1, rpc_link.PART, rpc_link.PART + 1], 1
        ):
            sent = pattern(size, tag)
            link.send(b"take", Block(sent), tag)
            got = link.receive().block
            assert (got == sent).all()
            got[:] = 0


class TestOptions:
    def test_agents_have_the_options(self, nodes):
        options = {"num_worker_threads": 3, "rpc_timeout": 77.0}
        carrier = nodes("echo", options=options)
        connected(carrier)
        from torch.distributed import rpc

        from tests.fakes import rpc_programs

        found = carrier._agent._agent._get_backend_options()
        assert (found.num_worker_threads, found.rpc_timeout) == (3, 77.0)
        node = next(iter(carrier._members.values()))
        assert rpc.rpc_sync(node, rpc_programs.threads_of_agent) == 3

    def test_other_transports_and_channels(self, nodes):
        carrier = nodes(
            "echo", options={"_transports": ["shm"], "_channels": ["basic"]}
        )
        assert carrier._agent.address.startswith("shm://")
        link = connected(carrier)
        sent = pattern(3_000_000, 2)
        link.send(b"take", Block(sent), 1)
        assert (link.receive().block == sent).all()

    def test_transports_that_this_machine_lacks(self, nodes):
        before = listening(os.getpid())
        with pytest.raises(
            BadOption, match=r"torch RPC refuses .*'_transports': \['ibv'\]"
        ):
            nodes("echo", options={"_transports": ["ibv"], "_channels": ["basic"]})
        assert not torch._C._distributed_rpc._is_current_rpc_agent_set()
        assert listening(os.getpid()) == before

    def test_other_machines_are_not_let_in_without_trust(self):
        host = _other_address()
        before = listening(os.getpid())
        options: dict[str, Any] = {
            "frames_per_batch": 10,
            "launcher": "manual",
            "token": b"x" * 32,
        }
        with pytest.raises(
            BadOption,
            match=r"without a token.*trust_network=True.*DistributedCollector",
        ):
            RPCCollector([CountingEnv], None, bind=host, **options)
        assert listening(os.getpid()) == before

    def test_a_node_opens_no_port_to_other_machines_without_trust(self):
        from muster.cluster.rpc_nodes import _lease

        before = listening(os.getpid())
        told = {
            "trust_network": False,
            "main": ["m", 0, ""],
            "node": ["n", 1],
            "options": {},
            "device": None,
        }
        with pytest.raises(
            BadOption, match="would open a port at 192.0.2.7.*trust_network=True"
        ):
            _lease(told, "192.0.2.7")
        assert listening(os.getpid()) == before

    def test_an_address_that_is_no_interfaces_own_is_refused(self):
        from muster.cluster.rpc_agent import AgentLease, Settings

        with pytest.raises(
            BadOption, match="192.0.2.7 is not the first IPv4 address of an interface"
        ):
            AgentLease("somebody", 0, Settings("192.0.2.7"))
        assert not torch._C._distributed_rpc._is_current_rpc_agent_set()

    def test_a_gpu_that_the_machine_of_the_node_lacks(self):
        from muster.cluster.rpc_nodes import _lease

        told = {
            "trust_network": False,
            "main": ["m", 0, ""],
            "node": ["n", 1],
            "options": {},
        }
        with pytest.raises(
            BadOption, match="visible_devices names cuda:99, but this machine has"
        ):
            _lease(told | {"device": ["cuda:0", "cuda:99"]}, "127.0.0.1")

    def test_transport(self):
        with pytest.raises(
            BadOption, match="transport='tcp': expected 'rpc' or 'direct'"
        ):
            RPCCollector(
                [CountingEnv], None, frames_per_batch=10, launcher="mp", transport="tcp"
            )


def test_the_rows_are_those_of_workers_of_this_machine(tmp_path):
    theirs = run_oracle(tmp_path, None, MultiSyncCollector)
    mine = run_oracle(tmp_path, None, rpc_sync_nodes)
    mine.check()
    assert mine.stats.engine == "rpc"
    for env in range(2):
        mine.check_rows(theirs, env, FRAMES // 2)


def _other_address() -> str:
    """An address of this machine that is not loopback."""
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking,
        contextlib.suppress(OSError),
    ):
        asking.connect(("192.0.2.7", 9))  # sends nothing
        return str(asking.getsockname()[0])
    pytest.skip("this machine has loopback only")


def test_methods_are_found_by_the_name_of_the_decorated_class():
    from muster.compat.torchrl._utils import accept_remote_rref_udf_invocation

    assert pickle.loads(pickle.dumps(RPCCollector.next)) is RPCCollector.next
    assert (
        pickle.loads(pickle.dumps(RPCCollector.update_policy_weights_))
        is RPCCollector.update_policy_weights_
    )

    class Base:
        def value(self):
            return "base"

        def _own(self):
            return "own"

    @accept_remote_rref_udf_invocation
    class Decorated(Base):
        @staticmethod
        def plain(number):
            return number

    class Inherits(Decorated):
        def value(self):
            return f"inherits {super().value()}"

    assert Decorated.value is not Base.value
    assert Decorated.__dict__.keys().isdisjoint({"_own"})
    assert (Decorated().value(), Decorated.plain(3), Inherits().value()) == (
        "base",
        3,
        "inherits base",
    )


# --- programs -------------------------------------------------------------------------------------


def run(*arguments: str, status: int = 0) -> tuple[dict[str, Any], str]:
    """Run a program of ``rpc_programs.py``; what it has said, and its standard error."""
    return ended(started(*arguments), status)


def started(*arguments: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, *arguments]
    env = os.environ | {"PYTHONPATH": path, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ended(
    program: subprocess.Popen[str], status: int = 0
) -> tuple[dict[str, Any], str]:
    try:
        said, errors = program.communicate(timeout=WITHIN_S)
    finally:
        program.kill()
    assert program.returncode == status, errors[-3000:]
    found: dict[str, Any] = {}
    for line in said.splitlines():
        found |= json.loads(line)
    return found, errors


def group(name: str, world: int, *more: str, killed: bool = False) -> dict[str, Any]:
    """Run a group of programs; what rank 0 has said."""
    port = str(free_port())
    others = [
        started(name, port, str(rank), str(world), *more) for rank in range(1, world)
    ]
    try:
        found, _ = run(name, port, "0", str(world), *more)
        for other in others:
            ended(other, -9 if killed else 0)
    finally:
        for other in others:
            other.kill()
    return found


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "how",
    [
        "",
        *(
            pytest.param(how, marks=pytest.mark.slow)
            for how in ("error", "called", "stopped", "fork")
        ),
    ],
)
def test_a_program_that_does_not_shut_down_ends_with_its_own_status(how):
    """Also while a function of the user's is executed by the agent, and in a fork."""
    found, errors = run("ends", how, status=how == "error")
    assert found["engine"] == "rpc"
    assert found.get("status", 7) == 7
    assert errors.count("Traceback") == (how == "error")


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_collectors_share_an_agent_and_the_user_can_have_one_afterwards():
    found, _ = run("own_agents", str(free_port()))
    name = found["names"][0]
    assert found["names"] == [name, f"{name}-0-node-0"]
    assert (found["same"], found["members"], found["left"]) == (True, 3, 2)
    assert found["threads"] == [3, 3]
    assert "{'num_worker_threads': 3}" in found["refused"]
    assert not found["is_set"]
    assert "'mine', has no other workers" in found["alone"]
    assert (found["works"], found["engine"]) == (2, "rpc")


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_trusted_network():
    """Agents listen at the address that was given, and nowhere else; torch does not change it
    within a process.
    """
    host = _other_address()
    found, _ = run("trusts", host)
    assert found["own"] == [host]
    assert found["nodes"] == [host] * 2
    assert f"torch RPC listens at {host}, not at 127.0.0.1" in found["refused"]
    assert found["left"] == 0


@pytest.mark.slow
@pytest.mark.timeout(400)
class TestTheUsersAgent:
    def test_the_seeds_manual_set_up(self):
        assert group("seed", 2) == {"frames": [40, 40], "engine": "rpc"}

    def test_nodes_are_its_other_workers_in_turn(self):
        found = group("member", 3, "collects")
        assert found["places"] == [
            "COLLECTOR_NODE_1",
            "COLLECTOR_NODE_2",
            "COLLECTOR_NODE_1",
        ]
        assert (found["first"], found["second"], found["engine"]) == (
            [0.0],
            [3.0],
            "rpc",
        )
        assert found["shape"] == [3, 20, 3], (
            "a worker has called the collector by reference"
        )
        assert (found["still"], found["threads"]) == (2.0, [])

    def test_a_lost_node_goes_on_in_the_next_worker_and_then_is_refused(self):
        found = group("member", 3, "loses_a_worker", killed=True)
        assert found["before"] == ["COLLECTOR_NODE_1", "COLLECTOR_NODE_2"]
        assert found["after"][0] == "COLLECTOR_NODE_2"
        assert "torch RPC has no way back for its name" in found["died"]


def test_nothing_is_left_of_agents(nodes):
    gc.collect()  # links of other tests close theirs now, and not in between
    before = threading.active_count(), listening(os.getpid())
    for _ in range(3):
        carrier = nodes("echo")
        link = connected(carrier)
        link.close()
        carrier.close()
    assert not torch._C._distributed_rpc._is_current_rpc_agent_set()
    wait_until(
        lambda: threading.active_count() <= before[0]
    )  # threads that other tests have left may end
    assert listening(os.getpid()) == before[1]
