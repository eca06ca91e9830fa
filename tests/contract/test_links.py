"""Every link and carrier: what the core of the many-machine collectors relies on.

A kind is a function from the node's function ("module:function", of a link and a number) and
options to a carrier of one node (or ``count``). Real processes, real kills.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from muster.cluster.link import Block, LinkLost
from tests.fakes.link_nodes import pattern
from tests.waits import wait_until

NODES = "tests.fakes.link_nodes:"
JOIN_S = 60.0  # on a busy machine
SILENCE_S = 200.0  # more than JOIN_S: what is lost by then was not lost for its silence


def _direct(
    target: str, count: int = 1, deadline_s: float = SILENCE_S, **options: Any
) -> Any:
    from muster.cluster.direct import DirectCarrier
    from muster.cluster.launchers import MpLauncher
    from muster.cluster.rendezvous import Rendezvous

    launcher = MpLauncher(target, **options)
    return DirectCarrier(
        launcher=launcher, rendezvous=Rendezvous(count), deadline_s=deadline_s
    )


def _torch(
    target: str, count: int = 1, deadline_s: float = SILENCE_S, **options: Any
) -> Any:
    from muster.cluster.distributed import TorchCarrier
    from muster.cluster.launchers import MpLauncher
    from muster.cluster.rendezvous import Rendezvous

    return TorchCarrier(MpLauncher(target), Rendezvous(count), deadline_s, **options)


def _ray(
    target: str,
    count: int = 1,
    deadline_s: float = SILENCE_S,
    *,
    transport: str = "ray",
) -> Any:
    from tests.fakes.ray_cluster import cluster

    cluster()
    from muster.cluster import ray_nodes

    actors = ray_nodes.Actors(count=count, target=target)
    return ray_nodes.ray_carrier(transport, actors, deadline_s)


def _rpc(target: str, count: int = 1, deadline_s: float = SILENCE_S) -> Any:
    from muster.cluster.launchers import MpLauncher
    from muster.cluster.rendezvous import Rendezvous
    from muster.cluster.rpc_nodes import RpcCarrier

    return RpcCarrier(MpLauncher(target), Rendezvous(count), deadline_s=deadline_s)


KINDS: dict[str, Callable[..., Any]] = {
    "direct": _direct,
    "torch_distributed": _torch,
    "torch_distributed, all blocks": functools.partial(_torch, large=1),
}
if torch.distributed.rpc.is_available():
    KINDS["rpc"] = _rpc
if importlib.util.find_spec("ray") is not None:
    KINDS["ray"] = _ray
    KINDS["ray, direct"] = functools.partial(_ray, transport="direct")


@pytest.fixture(params=sorted(KINDS))
def nodes(request):
    """Open a carrier whose nodes run a function of ``tests/fakes/link_nodes.py``; all are closed in
    the end.
    """
    with contextlib.ExitStack() as stack:

        def start(function: str, **options: Any) -> Any:
            carrier = KINDS[request.param](NODES + function, **options)
            stack.callback(carrier.close)
            connect = carrier.connect

            def connecting(
                node: int = 0,
                epoch: int = 0,
                within_s: float = JOIN_S,
                given_up: Any = None,
            ) -> Any:
                link = connect(node, epoch, within_s, given_up or threading.Event())
                stack.callback(link.close)
                return link

            carrier.connecting = connecting
            return carrier

        yield start


@pytest.fixture(scope="module", params=sorted(KINDS))
def echo(request):
    """A link to a node that sends back what it gets, for all tests that leave it as it was."""
    with contextlib.closing(KINDS[request.param](NODES + "echo")) as carrier:
        link = carrier.connect(0, 0, JOIN_S, threading.Event())
        yield link
        link.close()


def raised(call: Callable[[], Any], within_s: float = JOIN_S) -> LinkLost:
    """The LinkLost that a call in a thread of its own ends with."""
    ends: list[Any] = []

    def run() -> None:
        try:
            while True:
                ends.append(call())
        except LinkLost as error:
            ends.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(within_s)
    assert not thread.is_alive(), f"still waiting after {within_s:g} s"
    assert ends, "another exception"  # which pytest shows
    assert isinstance(ends[-1], LinkLost), ends[-1]
    return ends[-1]


def content(path: Any) -> str:
    wait_until(path.exists, JOIN_S)
    return path.read_text()


def gone(pid: int, within_s: float = JOIN_S) -> bool:
    deadline = time.monotonic() + within_s
    while os.path.exists(f"/proc/{pid}"):
        if time.monotonic() > deadline:
            return False
        threading.Event().wait(0.02)
    return True


class TestMessages:
    def test_come_back_as_they_were_in_order(self, echo):
        link = echo
        messages = [
            b"",
            b"x",
            bytes(range(256)) * 40,
            os.urandom(300_000),
            *(b"%d" % n for n in range(200)),
        ]
        for message in messages[:4]:
            link.send(message)
            assert link.receive().message == message
        sending = threading.Thread(
            target=lambda: [link.send(message) for message in messages]
        )
        sending.start()
        assert [link.receive().message for _ in messages] == messages
        sending.join()

    def test_of_lengths_around_those_of_frames(self, echo):
        link = echo
        for length in [*range(4030, 4100), *range(65_480, 65_540)]:
            message = os.urandom(length)
            link.send(message)
            assert link.receive().message == message

    def test_are_read_without_an_answer(self, nodes):
        link = nodes("listens", deadline_s=30.0).connecting()
        answers: list[Any] = []
        receiving = threading.Thread(
            target=lambda: answers.append(link.receive().message), daemon=True
        )
        receiving.start()
        link.send(b"130")
        for _ in range(100):
            link.send(b"small")
        block = Block(np.ones(4_000_000, np.uint8))
        for tag in range(1, 31):
            link.send(b"large", block, tag)
        receiving.join(JOIN_S)
        assert answers == [b"120000000"]


class TestBlocks:
    @pytest.mark.parametrize("size", [1, 3, 4096, 30_000_000])
    @pytest.mark.parametrize("expected", [False, True])
    def test_arrive_whole_and_nowhere_else(self, echo, size, expected):
        link = echo
        memory = np.full(size + 20, 7, np.uint8)
        if expected:
            link.expect(3, memory[10:-10])
        sent = pattern(size, 1)
        link.send(b"take", Block(sent), 3)
        got = link.receive()
        assert (got.message, got.tag) == (b"take", 3)
        assert (got.block == sent).all()
        assert (got.block.size, got.block.dtype) == (size, np.uint8)
        assert np.shares_memory(got.block, memory) == expected
        assert (memory[:10] == 7).all()
        assert (memory[-10:] == 7).all()
        assert expected or (memory == 7).all()

    def test_of_no_bytes(self, echo):
        link = echo
        link.send(b"none", Block(np.empty(0, np.uint8)), 4)
        got = link.receive()
        assert (got.message, got.tag, got.block.size) == (b"none", 4, 0)

    def test_may_be_read_only_and_go_to_two_nodes(self, nodes):
        carrier = nodes("echo", count=2)
        sent = pattern(1_000_000, 5)
        sent.flags.writeable = False
        block = Block(sent)
        for node in range(2):
            link = carrier.connecting(node)
            link.send(b"weights", block, 1)
            assert (link.receive().block == sent).all()

    def test_are_written_where_they_are_expected_in_the_order_of_sending(self, nodes):
        link = nodes("sender").connecting()
        sizes = {tag: 1000 * tag + 1 for tag in range(1, 9)}
        memories = {tag: np.zeros(size, np.uint8) for tag, size in sizes.items()}
        for tag in (8, 2, 5, 1, 7):  # the others are not
            link.expect(tag, memories[tag])
        request = [3, 1, 2, 8, 4, 7, 6, 5]
        link.send(",".join(f"{sizes[tag]} {tag} {tag}" for tag in request).encode())
        for tag in request:
            got = link.receive()
            assert got.tag == tag
            assert (got.block == pattern(sizes[tag], tag)).all()
            assert np.shares_memory(got.block, memories[tag]) == (
                tag in (8, 2, 5, 1, 7)
            )
        for tag, memory in memories.items():
            assert (
                memory == (pattern(sizes[tag], tag) if tag in (8, 2, 5, 1, 7) else 0)
            ).all()

    def test_of_another_length_than_expected_is_not_written_past_the_end(self, nodes):
        link = nodes("echo").connecting()
        memory = np.zeros(100, np.uint8)
        link.expect(1, memory[:50])
        with contextlib.suppress(LinkLost):
            link.send(b"longer", Block(np.ones(70, np.uint8)), 1)
        raised(link.receive)
        assert (memory[50:] == 0).all()

    def test_may_be_overwritten_as_soon_as_they_are_sent(self, nodes):
        link = nodes("reuser").connecting()
        link.send(b"3000000")
        for tag in range(1, 6):
            got = link.receive()
            assert got.tag == tag
            assert (got.block == tag).all()

    def test_arrive_in_expected_memory_of_the_node(self, nodes):
        link = nodes("expects").connecting()
        link.send(b"5000")
        assert link.receive().message == b"ready"
        sent = pattern(5000, 3)
        link.send(b"here", Block(sent), 5)
        got = link.receive()
        assert (got.block[10:-10] == sent).all()
        assert (got.block[:10] == 7).all()
        assert (got.block[-10:] == 7).all()

    def test_go_both_ways_at_once(self, nodes):
        link = nodes("both_ways").connecting()
        count, size = 10, 2_000_000
        link.send(b"%d %d" % (count, size))

        def send() -> None:
            for tag in range(1, count + 1):
                link.send(b"down %d" % tag, Block(pattern(size, 100 + tag)), tag)

        sending = threading.Thread(target=send)
        sending.start()
        for tag in range(1, count + 1):
            got = link.receive()
            assert got.message == b"up %d" % tag
            assert (got.block == pattern(size, tag)).all()
        assert link.receive().message == b"%d" % count
        sending.join()


class TestLost:
    def test_by_a_killed_node_while_receiving(self, nodes):
        link = nodes("introduced").connecting()
        pid = int(link.receive().message.split()[1])
        os.kill(pid, signal.SIGKILL)
        assert str(raised(link.receive))
        assert str(raised(lambda: link.send(b"anybody?")))

    def test_by_a_killed_node_while_sending(self, nodes):
        link = nodes("deaf").connecting()
        pid = int(link.receive().message)
        threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
        tags = iter(range(1, 10_000))
        raised(
            lambda: link.send(b"x", Block(np.zeros(5_000_000, np.uint8)), next(tags))
        )

    def test_by_a_node_that_is_killed_in_the_middle_of_a_block(self, nodes, tmp_path):
        link = nodes("sends_until_lost").connecting()
        size = 200_000_000
        memory = np.zeros(size, np.uint8)
        link.expect(1, memory)
        link.send(f"{size} {tmp_path / 'outcome'}".encode())
        pid = int(link.receive().message)
        ends: list[LinkLost] = []
        receiving = threading.Thread(
            target=lambda: ends.append(raised(link.receive, 60))
        )
        receiving.start()
        begun = time.monotonic() + JOIN_S
        while (
            not memory[0] and time.monotonic() < begun
        ):  # the block has begun to arrive
            pass
        os.kill(pid, signal.SIGKILL)
        receiving.join(JOIN_S)
        assert ends

    def test_by_a_stopped_node_at_the_deadline(self, nodes):
        link = nodes("introduced", deadline_s=2.0).connecting()
        pid = int(link.receive().message.split()[1])
        os.kill(pid, signal.SIGSTOP)
        begin = time.monotonic()
        lost = raised(link.receive)
        assert time.monotonic() - begin > 1.5
        assert "2 s" in str(lost)

    def test_by_a_node_that_does_not_read(self, nodes):
        link = nodes("deaf", deadline_s=2.0).connecting()
        link.receive()
        tags = iter(range(1, 10_000))
        begin = time.monotonic()
        raised(
            lambda: link.send(b"x", Block(np.zeros(5_000_000, np.uint8)), next(tags))
        )
        assert time.monotonic() - begin > 1.5

    def test_by_closing_the_other_end(self, nodes):
        link = nodes("closes").connecting()
        link.send(b"close")
        assert link.receive().message == b"last words"
        raised(link.receive)
        raised(lambda: link.send(b"more"))

    def test_by_closing_the_other_end_after_much(self, nodes):
        link = nodes("closes_after_much").connecting()
        link.send(b"close")
        for number in range(10):
            assert link.receive().message == b"%d" % number + bytes(50_000)
        raised(link.receive)

    def test_by_closing_the_other_end_after_a_large_message(self, nodes):
        link = nodes("closes_after_a_large_message").connecting()
        link.send(b"60000000")
        assert len(link.receive().message) == 60_000_000
        raised(link.receive)

    def test_by_closing_this_end_while_both_wait(self, nodes, tmp_path):
        link = nodes("loses").connecting()
        link.send(str(tmp_path / "outcome").encode())
        threading.Timer(0.3, link.close).start()
        raised(link.receive)
        assert content(tmp_path / "outcome").startswith("lost")
        link.close()  # again
        raised(link.receive)
        raised(lambda: link.send(b"more"))
        link.expect(1, np.zeros(3, np.uint8))  # does nothing

    def test_by_closing_this_end_while_it_sends_to_a_node_that_does_not_read(
        self, nodes
    ):
        link = nodes("deaf").connecting()
        link.receive()
        tags = iter(range(1, 10_000))
        threading.Timer(0.5, link.close).start()
        raised(
            lambda: link.send(b"x", Block(np.zeros(5_000_000, np.uint8)), next(tags))
        )

    def test_and_then_no_expected_memory_is_written(self, nodes, tmp_path):
        link = nodes("sends_until_lost").connecting()
        size = 80_000_000
        memory = np.zeros(size, np.uint8)
        link.expect(1, memory)
        link.send(f"{size} {tmp_path / 'outcome'}".encode())
        link.receive()
        receiving = threading.Thread(target=raised, args=(link.receive, 60))
        receiving.start()
        begun = time.monotonic() + JOIN_S
        while not memory[0]:  # the block has begun to arrive
            assert time.monotonic() < begun
        link.close()
        before = memory.copy()
        assert content(tmp_path / "outcome").startswith("lost")  # nothing more can come
        receiving.join()
        assert (memory == before).all()


class TestEpochs:
    def test_next_one_after_a_kill(self, nodes):
        carrier = nodes("introduced")
        link = carrier.connecting(epoch=0)
        first = int(link.receive().message.split()[1])
        os.kill(first, signal.SIGKILL)
        raised(link.receive)
        link.close()
        link = carrier.connecting(epoch=1)
        number, second = map(int, link.receive().message.split())
        assert number == 0
        assert second != first
        link.send(b"hello")
        assert link.receive().message == b"hello"

    def test_nodes_are_told_their_numbers(self, nodes):
        carrier = nodes("introduced", count=3)
        links = [carrier.connecting(node) for node in (2, 0, 1)]
        assert [int(link.receive().message.split()[0]) for link in links] == [2, 0, 1]

    def test_old_node_that_wakes_up_is_not_heard(self, nodes, tmp_path):
        carrier = nodes("stops", deadline_s=2.0)
        link = carrier.connecting()
        link.send(str(tmp_path / "outcome").encode())
        pid = int(link.receive().message)
        with contextlib.suppress(
            LinkLost
        ):  # it may stop before it has said that this has arrived
            link.send(b"stop")
        raised(link.receive)
        link.close()
        new = carrier.connecting(epoch=1)
        with contextlib.suppress(
            ProcessLookupError
        ):  # else the carrier has ended it, which is as good
            os.kill(pid, signal.SIGCONT)
        if not gone(pid, 5):
            assert content(tmp_path / "outcome").startswith("lost")
        new.send(str(tmp_path / "second").encode())
        other = int(new.receive().message)
        assert other != pid
        os.kill(other, signal.SIGKILL)
        raised(new.receive)

    def test_ends_nodes_in_the_end(self, nodes):
        carrier = nodes("introduced")
        link = carrier.connecting()
        pid = int(link.receive().message.split()[1])
        link.close()
        carrier.close()
        carrier.close()
        assert gone(pid)


@pytest.fixture
def started():
    """A carrier whose node is a process that runs a function of ``tests/fakes/link_nodes.py`` and
    nothing else.
    """
    with contextlib.ExitStack() as stack:

        def start(function: str) -> Any:
            carrier = _direct(NODES + "echo", entry=NODES + function)
            stack.callback(carrier.close)
            return carrier

        yield start


class TestJoining:
    def test_given_up(self, started):
        given_up = threading.Event()
        threading.Timer(0.5, given_up.set).start()
        begin = time.monotonic()
        with pytest.raises(LinkLost, match="given up"):
            started("never_joins").connect(0, 0, JOIN_S, given_up)
        assert time.monotonic() - begin < JOIN_S / 2

    def test_not_in_time(self, started):
        with pytest.raises(
            LinkLost, match=r"Node 0 .* within 1 s\. Its process \d+ is running\."
        ):
            started("never_joins").connect(0, 0, 1.0, threading.Event())

    def test_process_that_ends_at_once(self, started):
        with pytest.raises(LinkLost, match="Node 0 .* exit code 3"):
            started("exits").connect(0, 0, JOIN_S, threading.Event())
