"""What torch RPC adds to ``test_links``: one agent per process, its options, where it listens."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import rpc

from muster.cluster import rpc_link
from muster.cluster.launchers import MpLauncher
from muster.cluster.link import Block, LinkLost
from muster.cluster.rendezvous import Rendezvous
from muster.cluster.rpc_agent import RpcAgent, Terms
from muster.cluster.socket_link import SocketLink
from muster.cluster.torch_rpc import RpcCarrier, check_devices
from muster.errors import BadOption
from tests.fakes.netns import listening

NODES = "tests.fakes.link_nodes:"


@pytest.fixture
def carriers():
    with contextlib.ExitStack() as stack:

        def make(count: int = 1, function: str = "introduced", **options: Any) -> RpcCarrier:
            rendezvous = Rendezvous(count)
            stack.callback(rendezvous.close)
            carrier = RpcCarrier(count, launcher=MpLauncher(NODES + function), rendezvous=rendezvous, **options)
            stack.callback(carrier.close)
            return carrier

        yield make


@pytest.fixture
def pair():
    """A link over a connection within this process, and the connection's other end; closed in the end."""
    with contextlib.ExitStack() as stack:

        def make(deadline_s: float) -> tuple[rpc_link.RpcLink, SocketLink]:
            channels = [SocketLink(one, deadline_s) for one in socket.socketpair()]
            for channel in channels:
                channel.know(deadline_s)
                stack.callback(channel.close)
            link = rpc_link.RpcLink(channels[0], "a session of this test", deadline_s)
            stack.callback(link.close)
            return link, channels[1]

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
        assert len(here) > 1  # the rendezvous's, and those of RPC
        assert there
        assert {host for host, _ in here | there} == {"127.0.0.1"}
        carrier.close()
        assert listening(os.getpid()) == before

    def test_listens_at_one_port_if_told_so(self, carriers):
        before = listening(os.getpid())
        connect(carriers(tensorpipe_options={"_transports": ["uv"], "_channels": ["basic"]}))
        assert len(listening(os.getpid()) - before) == 2  # the rendezvous and RPC

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
from muster.cluster.rendezvous import Rendezvous
from muster.cluster.torch_rpc import RpcCarrier
try:
    RpcCarrier(1, launcher=MpLauncher(), rendezvous=Rendezvous(1), tensorpipe_options={{"num_worker_threads": 3}})
except BadOption as error:
    assert "already called" in str(error)
else:
    raise AssertionError
carrier = RpcCarrier(1, launcher=MpLauncher("{NODES}echo"), rendezvous=Rendezvous(1))
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
        link = connect(carriers())
        introduced(link)
        block = torch.zeros(3, dtype=torch.uint8)
        for tag in range(10):
            assert rpc.rpc_sync(link._peer, rpc_link.deliver, args=("no such session", tag, block)) is False
        link.send(b"mine")
        assert link.receive().message == b"mine"

    def test_are_waited_for_as_long_as_they_say_that_a_block_is_on_its_way(self, pair):
        link, channel = pair(deadline_s=1.0)
        got = []
        receiving = threading.Thread(target=lambda: got.append(link.receive()))
        receiving.start()
        for _ in range(8):
            channel.send(b"", Block(np.empty(0, np.uint8)), rpc_link.BEAT)
            receiving.join(0.25)
        channel.send(b"there")
        receiving.join(60.0)
        assert [one.message for one in got] == [b"there"]

    def test_say_that_a_block_is_on_its_way(self, pair):
        link, channel = pair(deadline_s=60.0)
        agent = RpcAgent.hold("both-ends-of-a-test", Terms("127.0.0.1"))
        try:
            link.begin(agent, agent.meet("this-process-too", agent.url))
            half = Block(np.zeros(rpc_link.ROOM_BYTES // 2, np.uint8))
            ends = []

            def send():
                with pytest.raises(LinkLost) as caught:
                    for tag in range(1, 5):
                        link.send(b"m", half, tag)
                ends.append(str(caught.value))

            sending = threading.Thread(target=send)
            sending.start()
            assert [channel.receive().tag for _ in range(4)] == [1, 2, rpc_link.BEAT, rpc_link.BEAT]
            link.close()
            sending.join(60.0)
            assert ends == ["The link was closed here."]
        finally:
            agent.release()

    def test_that_send_a_message_without_its_block_are_lost(self, pair):
        link, channel = pair(deadline_s=60.0)
        channel.send(b"m", Block(np.empty(0, np.uint8)), 3)
        with pytest.raises(LinkLost, match="Block 3 has not come with its message"):
            link.receive()

    def test_that_fill_their_room_with_blocks_wait(self, pair):
        link, channel = pair(deadline_s=60.0)
        half = torch.zeros(rpc_link.ROOM_BYTES // 2, dtype=torch.uint8)
        sent = [link.take_in(tag, half) for tag in range(1, 4)]
        assert [future.done() for future in sent] == [True, True, False]
        channel.send(b"m", Block(np.empty(0, np.uint8)), 1)
        link.receive()
        assert sent[-1].wait() is True
        last = link.take_in(4, half)
        assert not last.done()
        link.close()
        assert last.wait() is False  # nobody will receive it
        assert rpc_link.deliver(link._session, 5, half).wait() is False

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
        assert len(listening(os.getpid()) - before) <= 1  # the rendezvous, which is the caller's

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
