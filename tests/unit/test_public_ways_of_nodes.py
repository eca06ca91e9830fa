"""Nodes with ``MUSTER_PRIVATE_NAMES=never``: gloo listens by its public options, RPC and Ray say what to do."""

from __future__ import annotations

import socket
import threading

import numpy as np
import pytest

from muster.errors import BadOption
from muster.nodes.gloo import join_group
from muster.nodes.link import Block
from muster.nodes.seal import seal
from muster.nodes.socket_link import SocketLink
from muster.private_names import VARIABLE


@pytest.fixture(autouse=True)
def _never(monkeypatch):
    monkeypatch.setenv(VARIABLE, "never")


def test_gloo_carries_messages_and_blocks():
    channels, links = [SocketLink(end, 60.0) for end in socket.socketpair()], {}

    def join(rank: int) -> None:
        link = join_group(channels[rank], rank, "127.0.0.1", 60.0)
        links[rank] = seal(link, b"0123456789abcdef", main=rank == 0)

    other = threading.Thread(target=join, args=(1,))
    other.start()
    join(0)
    other.join(60.0)
    sent = np.arange(500_000, dtype=np.uint8)
    sending = threading.Thread(target=lambda: links[0].send(b"take", Block(sent), 3))
    sending.start()
    got = links[1].receive()
    sending.join(60.0)
    assert (got.message, got.tag) == (b"take", 3)
    assert (got.block == sent).all()
    for link in links.values():
        link.close()


def test_rpc_names_the_collectors_that_can_do_it():
    from muster.nodes.torch_rpc import check_rpc

    with pytest.raises(BadOption, match=r"RPCCollector.*private names of torch.*DistributedCollector"):
        check_rpc()


def test_ray_is_not_started_but_used_where_it_runs():
    ray = pytest.importorskip("ray")
    from muster.nodes.ray_runtime import Lease

    assert not ray.is_initialized()
    with pytest.raises(BadOption, match=r"loopback only.*Call ray\.init\(\) before"):
        Lease({"address": "local"})
    assert not ray.is_initialized()
