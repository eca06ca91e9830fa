"""What torch RPC adds to ``test_links``: one agent per process, its options, where it listens."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import rpc

from muster.cluster import rpc_link
from muster.cluster.launchers import MpLauncher
from muster.cluster.link import Block, LinkLost
from muster.cluster.meeting import Meeting
from muster.cluster.torch_rpc import RpcCarrier, check_devices
from muster.errors import BadOption
from tests.fakes.netns import listening

NODES = "tests.fakes.link_nodes:"


@pytest.fixture
def carriers():
    with contextlib.ExitStack() as stack:

        def make(count: int = 1, function: str = "introduced", **options: Any) -> RpcCarrier:
            meeting = Meeting(count)
            stack.callback(meeting.close)
            carrier = RpcCarrier(count, launcher=MpLauncher(NODES + function), meeting=meeting, **options)
            stack.callback(carrier.close)
            return carrier

        yield make


def connect(carrier: RpcCarrier, node: int = 0, epoch: int = 0) -> Any:
    return carrier.connect(node, epoch, 60.0, threading.Event())


def introduced(link: Any) -> int:
    return int(link.receive().message.split()[1])


class TestAgent:
    def test_listens_on_loopback_alone_here_and_in_nodes_until_the_carrier_is_closed(self, carriers):
        before = listening(os.getpid())
        carrier = carriers()
        pid = introduced(connect(carrier))
        here, there = listening(os.getpid()) - before, listening(pid)
        assert len(here) > 1  # the meeting's, and those of RPC
        assert there
        assert {host for host, _ in here | there} == {"127.0.0.1"}
        carrier.close()
        assert listening(os.getpid()) == before

    def test_listens_at_one_port_if_told_so(self, carriers):
        before = listening(os.getpid())
        connect(carriers(tensorpipe_options={"_transports": ["uv"], "_channels": ["basic"]}))
        assert len(listening(os.getpid()) - before) == 2  # the meeting and RPC

    def test_is_shared_by_the_collectors_of_a_process(self, carriers):
        first, second = carriers(), carriers()
        links = [connect(first), connect(second)]
        assert len({introduced(link) for link in links}) == 2
        first.close()
        links[1].send(b"still there")
        assert links[1].receive().message == b"still there"

    def test_with_other_options_is_refused_while_it_is_in_use(self, carriers):
        first = carriers(tensorpipe_options={"num_worker_threads": 4})
        with pytest.raises(BadOption, match=r"one RPC agent.*num_worker_threads.: 4.*close that collector first"):
            carriers(tensorpipe_options={"num_worker_threads": 5})
        first.close()
        introduced(connect(carriers(tensorpipe_options={"num_worker_threads": 5})))

    @pytest.mark.slow
    def test_of_the_user_is_used_and_left_alone(self, tmp_path):
        script = f"""
import threading
from torch.distributed import rpc
options = rpc.TensorPipeRpcBackendOptions(init_method="file://{tmp_path}/store")
rpc.init_rpc("mine", rank=0, world_size=1, rpc_backend_options=options)
from muster.errors import BadOption
from muster.cluster import rpc_link
from muster.cluster.launchers import MpLauncher
from muster.cluster.meeting import Meeting
from muster.cluster.torch_rpc import RpcCarrier
try:
    RpcCarrier(1, launcher=MpLauncher(), meeting=Meeting(1), tensorpipe_options={{"num_worker_threads": 3}})
except BadOption as error:
    assert "already called" in str(error)
else:
    raise AssertionError
carrier = RpcCarrier(1, launcher=MpLauncher("{NODES}echo"), meeting=Meeting(1))
for epoch in range(2):
    link = carrier.connect(0, epoch, 60.0, threading.Event())
    link.send(b"hello")
    assert link.receive().message == b"hello"
    link.close()
carrier.close()
assert rpc.rpc_sync("mine", len, args=([1, 2],)) == 2
rpc.shutdown()
"""
        environment = {**os.environ, "TP_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run([sys.executable, "-c", script], check=True, timeout=90, env=environment)


class TestNodes:
    def test_go_on_when_another_is_killed_and_replaced(self, carriers):
        carrier = carriers(count=2)
        links = [connect(carrier, node) for node in range(2)]
        pids = [introduced(link) for link in links]
        for epoch in range(1, 4):
            os.kill(pids[0], signal.SIGKILL)
            links[0].close()
            links[0] = connect(carrier, 0, epoch)
            pids[0] = introduced(links[0])
            for link in links:
                link.send(b"block", Block(np.full(1000, epoch, np.uint8)), epoch)
                assert (link.receive().block == epoch).all()

    def test_that_send_a_block_of_another_size_than_expected_are_lost(self, carriers):
        link = connect(carriers(function="sender"))
        memory = np.zeros(11, np.uint8)
        link.expect(1, memory[:10])
        link.send(b"11 1 0")
        with pytest.raises(LinkLost, match="Block 1 has 11 bytes where 10 were expected"):
            link.receive()
        assert not memory.any()

    def test_are_not_heard_by_the_session_of_another(self, carriers):
        carrier = carriers()
        link = connect(carrier)
        introduced(link)
        peer = link._link._peer
        assert rpc.rpc_sync(peer, rpc_link.announce, args=("no such session", 1)) is False
        for number in range(10):
            assert rpc.rpc_sync(peer, rpc_link.deliver, args=("no such session", number, b"", 0, None)) is False
        assert rpc.rpc_sync(peer, rpc_link.watch, args=("no such session",)) is False
        session = link._link._session
        assert rpc.rpc_sync(peer, rpc_link.deliver, args=(session, 99, b"out of order", 0, None)) is False
        link.send(b"mine")
        assert link.receive().message == b"mine"

    def test_are_waited_for_longer_when_they_have_announced_a_large_block(self):
        link = rpc_link.RpcLink("a session of this test", 0.2)
        link.announce(20_000_000)
        begin = time.monotonic()
        with pytest.raises(LinkLost, match="2.2 s"):
            link.receive()
        assert time.monotonic() - begin > 2
        link.close()

    def test_that_fill_their_room_with_blocks_wait(self):
        link = rpc_link.RpcLink("a third session of this test", 5.0)
        half = torch.zeros(rpc_link.ROOM_BYTES // 2, dtype=torch.uint8)
        sent = [link.deliver(number, b"m", number + 1, half) for number in range(3)]
        assert [future.done() for future in sent] == [True, True, False]
        link.close()
        assert sent[-1].done()
        assert sent[-1].wait() is False  # nobody will receive it

    def test_are_told_when_this_end_closes(self):
        link = rpc_link.RpcLink("a fourth session of this test", 5.0)
        watching = link.watch()
        assert not watching.done()
        link.close()
        assert watching.done()
        assert watching.wait() is False
        assert rpc_link.watch("a fourth session of this test").wait() is False

    def test_that_fill_their_room_wait(self):
        link = rpc_link.RpcLink("another session of this test", 5.0)
        sent = [link.deliver(number, b"m", 0, None) for number in range(rpc_link.ROOM_MESSAGES + 2)]
        assert [future.done() for future in sent] == [True] * rpc_link.ROOM_MESSAGES + [False] * 2
        link.receive()
        assert not sent[-1].done()
        link.receive()
        assert sent[-1].done()
        assert sent[-1].wait() is True
        link.close()

    @pytest.mark.parametrize("attempt", range(5))
    def test_last_message_before_the_other_end_closes_is_not_lost(self, carriers, attempt):
        link = connect(carriers(function="echo"))
        link.send(b"bye")  # after which the node closes its link and ends


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"init_method": "env://"}, "'init_method'.*tcp_port and bind"),
            ({"device_maps": {}}, "'device_maps'.*visible_devices"),
            ({"threads": 3}, "'threads'.*num_worker_threads, rpc_timeout"),
            ({"num_worker_threads": 0}, "must be positive"),
            ({"num_worker_threads": "many"}, "wrong type"),
            ({"_transports": ["pigeon"]}, "Unknown transport: pigeon"),
        ],
    )
    def test_of_tensorpipe_that_cannot_be(self, carriers, options, text):
        before = listening(os.getpid())
        with pytest.raises(BadOption, match=text):
            carriers(tensorpipe_options=options)
        assert len(listening(os.getpid()) - before) <= 1  # the meeting, which is the caller's

    def test_devices(self):
        assert check_devices(None, 2) == [None, None]
        assert check_devices(["cpu", torch.device("cpu")], 2) == [None, None]

    @pytest.mark.parametrize(
        ("devices", "text"),
        [
            (["cpu"], "1 devices for 2 nodes"),
            (["cpu", "gpu"], "'gpu', which is no device"),
            (["cpu", "meta"], "'meta'; RPC takes"),
            (["cpu", -3], "-3, which is no device"),
        ],
    )
    def test_devices_that_cannot_be(self, devices, text):
        with pytest.raises(BadOption, match=text):
            check_devices(devices, 2)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
    def test_devices_without_one_here(self):
        with pytest.raises(BadOption, match="this process has no CUDA device"):
            check_devices([1, "cpu"], 2)

    def test_without_rpc_name_the_alternatives(self, carriers, monkeypatch):
        monkeypatch.setattr("torch.distributed.rpc.is_available", lambda: False)  # what such a PyTorch says
        with pytest.raises(BadOption, match="DistributedCollector.*RayCollector"):
            carriers()

    def test_bind_must_be_an_address_of_an_interface(self, carriers):
        from muster.cluster.rpc_agent import interface_of

        assert interface_of("127.0.0.1") in ("lo", "lo0")
        with pytest.raises(BadOption, match="203.0.113.7.*'lo': '127.0.0.1'"):
            interface_of("203.0.113.7")
