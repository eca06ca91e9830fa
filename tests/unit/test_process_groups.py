"""Pairs of process groups, and the links over them.

Both ends are threads of this process, unless one is stopped.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from muster import DistributedCollector
from muster.cluster import process_groups
from muster.cluster.distributed_link import DistributedLink, Groups
from muster.cluster.link import Block, LinkLost
from muster.cluster.process_groups import (
    BufferedWay,
    GlooWay,
    LinkStore,
    check_backend,
    two_ways,
)
from muster.cluster.rendezvous import hear, say
from muster.cluster.socket_link import SocketLink
from muster.errors import BadOption
from muster.utils.private_names import VARIABLE
from tests.fakes.link_nodes import pattern
from tests.waits import open_files, wait_until

pytestmark = [
    pytest.mark.skipif(
        not (dist.is_available() and dist.is_gloo_available()),
        reason="this PyTorch has no gloo",
    ),
]
TOKEN = b"0123456789abcdef"
WITHIN_S = 60.0  # on a busy machine
DEADLINE_S = 100.0
LARGE = 1000


def both(main: Any, node: Any) -> list[Any]:
    """What two functions return (or raise) that run at the same time."""

    def outcome(call: Any) -> Any:
        try:
            return call()
        except Exception as error:  # noqa: BLE001
            return error

    with ThreadPoolExecutor(2) as pool:
        return [
            future.result(WITHIN_S)
            for future in [pool.submit(outcome, call) for call in (main, node)]
        ]


def channels(stack: contextlib.ExitStack) -> list[SocketLink]:
    """Both ends of a connection over TCP."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = socket.create_connection(listener.getsockname())
        here, _ = listener.accept()
    made = both(
        lambda: SocketLink(here, TOKEN, main=True, deadline_s=DEADLINE_S),
        lambda: SocketLink(there, TOKEN, main=False, deadline_s=DEADLINE_S),
    )
    for channel in made:
        stack.callback(channel.close)
    return made


def linked(ends: list[SocketLink], large: int = LARGE) -> list[DistributedLink]:
    """The links over both ends of a connection."""
    main, node = ends
    groups = Groups("gloo", large)
    return both(
        lambda: DistributedLink(main, groups, main=True),
        lambda: DistributedLink(node, groups, main=False),
    )


@pytest.fixture
def connected():
    with contextlib.ExitStack() as stack:
        yield channels(stack)


@pytest.fixture
def ends():
    with contextlib.ExitStack() as stack:
        main, node = channels(stack)
        groups = Groups("gloo", LARGE)
        links = both(
            lambda: DistributedLink(main, groups, main=True),
            lambda: DistributedLink(node, groups, main=False),
        )
        for link in links:
            stack.callback(link.close)
        yield links


def lost(call: Any) -> str:
    with pytest.raises(LinkLost) as found:
        call()
    return str(found.value)


def listening() -> set[tuple[str, int]]:
    """Addresses at which this process listens."""
    found = set()
    for name in ("tcp", "tcp6"):
        with open(f"/proc/net/{name}") as table:
            rows = [row.split() for row in table.readlines()[1:]]
        inodes = {row[9]: row[1] for row in rows if row[3] == "0A"}
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{fd}")
                if target.startswith("socket:[") and target[8:-1] in inodes:
                    host, _, port = inodes[target[8:-1]].partition(":")
                    found.add((host, int(port, 16)))
    return found


# --- what goes through a group --------------------------------------------------------------------


def test_blocks_arrive_in_the_expected_memory_from_the_given_size_on(ends):
    main, node = ends
    for size in (LARGE - 1, LARGE, LARGE + 1, 3_000_000):
        memory = np.full(size + 20, 7, np.uint8)
        node.expect(size, memory[10:-10])
        sent = pattern(size, size)
        sent.flags.writeable = False
        _, got = both(lambda: main.send(b"take", Block(sent), size), node.receive)  # noqa: B023
        assert (got.message, got.tag) == (b"take", size)
        assert np.shares_memory(got.block, memory)
        assert (memory[10:-10] == sent).all()
        assert (memory[:10] == 7).all()
        assert (memory[-10:] == 7).all()


@pytest.mark.parametrize("size", [LARGE, LARGE + 5, 5 * LARGE])
def test_a_block_of_another_size_than_expected_is_refused_before_gloo_sees_it(
    ends, size
):
    """gloo would end this process."""
    main, node = ends
    memory = np.zeros(LARGE + 1, np.uint8)
    main.expect(1, memory)
    sending, receiving = both(
        lambda: node.send(b"x", Block(np.ones(size, np.uint8)), 1), main.receive
    )
    assert isinstance(sending, LinkLost)
    assert (
        str(receiving) == f"Block 1 has {size} bytes where {LARGE + 1} were expected."
    )
    assert not memory.any()
    lost(lambda: node.send(b"more"))


def test_a_small_block_where_a_large_one_is_expected_is_refused(ends):
    main, node = ends
    main.expect(1, np.zeros(LARGE + 1, np.uint8))
    node.send(b"x", Block(np.ones(3, np.uint8)), 1)
    assert lost(main.receive) == f"Block 1 has 3 bytes where {LARGE + 1} were expected."


def test_a_block_that_does_not_come_is_lost_at_the_deadline(ends):
    main, node = ends
    main._channel.deadline_s = 0.5
    node._channel.send(
        (9).to_bytes(8, "little") + (2000).to_bytes(8, "little")
    )  # announced, and nothing more
    memory = np.zeros(2000, np.uint8)
    main.expect(9, memory)
    begin = time.monotonic()
    assert lost(main.receive) == "The other end has not sent a block for 0.5 s."
    assert 0.5 <= time.monotonic() - begin < WITHIN_S / 2
    with pytest.raises(LinkLost):
        node.send(b"x", Block(np.ones(2000, np.uint8)), 9)
    assert not memory.any()


def test_closing_ends_both_threads_of_both_ends_in_the_middle_of_blocks(ends):
    main, node = ends
    memory = np.zeros(1 << 28, np.uint8)
    main.expect(1, memory)
    block = Block(np.ones(memory.size, np.uint8))
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(main.receive), pool.submit(node.send, b"x", block, 1)]
        waiting += [pool.submit(node.receive), pool.submit(main.send, b"y", block, 2)]
        wait_until(lambda: memory[0])
        main.close()
        before = memory.copy()
        for future in waiting:
            with pytest.raises(LinkLost):
                future.result(WITHIN_S)
        assert (memory == before).all()


def test_a_stopped_process_in_the_middle_of_a_block_does_not_delay_closing(tmp_path):
    """Nor does anything write afterwards, when it goes on."""
    program = """
        import socket, sys
        import numpy as np
        from muster.cluster.distributed_link import DistributedLink, Groups
        from muster.cluster.link import Block, LinkLost
        from muster.cluster.socket_link import SocketLink
        channel = SocketLink(socket.create_connection(("127.0.0.1", int(sys.argv[1]))), b"0123456789abcdef", main=False,
            deadline_s=100)
        link = DistributedLink(channel, Groups("gloo", 1), main=False)
        try:
            link.send(b"x", Block(np.ones(1 << 28, np.uint8)), 1)
        except LinkLost:
            sys.exit(5)
    """
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        command = [
            sys.executable,
            "-c",
            textwrap.dedent(program),
            str(listener.getsockname()[1]),
        ]
        process = stack.enter_context(subprocess.Popen(command))
        stack.callback(process.kill)
        link = DistributedLink(
            SocketLink(listener.accept()[0], TOKEN, main=True, deadline_s=DEADLINE_S),
            Groups("gloo", 1),
            main=True,
        )
        memory = np.zeros(1 << 28, np.uint8)
        link.expect(1, memory)
        with ThreadPoolExecutor(1) as pool:
            receiving = pool.submit(link.receive)
            wait_until(lambda: memory[0])
            process.send_signal(signal.SIGSTOP)
            begin = time.monotonic()
            link.close()
            before = memory.copy()
            with pytest.raises(LinkLost):
                receiving.result(WITHIN_S)
            assert time.monotonic() - begin < WITHIN_S / 2
        process.send_signal(signal.SIGCONT)
        assert process.wait(WITHIN_S) == 5
        assert (memory == before).all()


# --- the groups -----------------------------------------------------------------------------------


def test_ports_are_those_of_the_link_and_end_with_it(connected):
    before, files, threads = listening(), open_files(), threading.active_count()
    links = linked(connected)
    opened = listening() - before
    assert opened
    assert {host for host, _ in opened} == {"0100007F"}, (
        "loopback only, as the connection; and no store"
    )
    for link in links:
        link.close()
    del links, link
    connected.clear()
    wait_until(lambda: open_files() <= files)
    wait_until(lambda: listening() <= before)
    wait_until(lambda: threading.active_count() <= threads)


def test_another_process_that_has_taken_the_connection_is_found(connected, monkeypatch):
    main, node = connected
    monkeypatch.setattr(node, "derived", lambda purpose: bytes(32))
    found = both(
        lambda: two_ways(main, "gloo", main=True),
        lambda: two_ways(node, "gloo", main=False),
    )
    assert all(isinstance(error, LinkLost) for error in found), found
    assert any(
        "Another process has taken the connection" in str(error) for error in found
    ), found


def test_an_end_that_has_no_group_says_why(connected, monkeypatch):
    main, node = connected
    monkeypatch.setattr(
        node.__class__,
        "host",
        property(lambda self: "127.0.0.1" if self is main else "192.0.2.7"),
    )
    here, there = both(
        lambda: two_ways(main, "gloo", main=True),
        lambda: two_ways(node, "gloo", main=False),
    )
    assert isinstance(there, LinkLost)
    assert "192.0.2.7" in str(there)
    assert isinstance(here, LinkLost)
    assert "The other end has no process group: " in str(here)
    assert "192.0.2.7" in str(here)
    assert "transport='direct'" in str(here)


def test_an_end_that_exits_meanwhile(connected):
    main, node = connected
    node.close()
    with pytest.raises(LinkLost, match="has not connected 127.0.0.1"):
        two_ways(main, "gloo", main=True)


def test_without_private_names_groups_are_made_as_well(connected, monkeypatch):
    """gloo then listens at the address of the host's name."""
    monkeypatch.setenv(VARIABLE, "never")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    main, node = connected
    here, there = both(
        lambda: two_ways(main, "gloo", main=True),
        lambda: two_ways(node, "gloo", main=False),
    )
    memory = np.zeros(5000, np.uint8)
    both(
        lambda: here[0].send(pattern(5000, 1), 10.0),
        lambda: there[1].receive(memory, 10.0),
    )
    assert (memory == pattern(5000, 1)).all()
    for way in (*here, *there):
        way.abort()


def test_a_store_has_what_either_end_sets(connected):
    here, there = map(LinkStore, connected)
    here.set("text", "abc")
    here.set("bytes", b"\0\xff")
    there.set("back", b"1")
    assert (there.get("bytes"), there.get("text"), here.get("back")) == (
        b"\0\xff",
        b"abc",
        b"1",
    )
    here.set("late", b"2")
    both(here.end, there.end)
    assert there.check(["late", "text"])
    assert not there.check(["late", "never"])
    there.set("later", b"3")  # stays here
    assert not here.check(["later"])
    with pytest.raises(LinkLost, match="'never'"):
        here.get("never")
    say(connected[0], nothing=True)
    assert hear(connected[1]) == {"nothing": True}, (
        "the stores have left nothing unread"
    )


# --- backends whose works are asked whether they are complete -------------------------------------


@pytest.fixture
def buffered():
    """The ways of nccl and ucc, over gloo's broadcasts: from one end to the other."""

    def made(rank: int) -> BufferedWay:
        group = dist.ProcessGroupGloo(
            dist.PrefixStore("b", store), rank, 2, process_groups.timedelta(seconds=3)
        )
        return BufferedWay(group, 0, torch.device("cpu"))

    store = dist.HashStore()
    ways = both(lambda: made(0), lambda: made(1))
    yield ways
    for way in ways:
        way.abort()


def test_blocks_through_buffers(buffered):
    sender, receiver = buffered
    for size in (1, 5000, 3_000_000):
        memory, sent = np.zeros(size, np.uint8), pattern(size, size)
        send = partial(sender.send, sent, 10.0)
        receive = partial(receiver.receive, memory, 10.0)
        assert both(send, receive) == [None, None]
        assert (memory == sent).all()


def test_buffers_of_a_closed_way_are_not_copied(buffered):
    sender, receiver = buffered
    memory = np.zeros(5000, np.uint8)
    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(receiver.receive, memory, WITHIN_S)
        receiver.abort()
        with pytest.raises(ConnectionError):
            receiving.result(WITHIN_S)
    with contextlib.suppress(ConnectionError, TimeoutError):
        sender.send(np.ones(5000, np.uint8), 5.0)
    assert not memory.any()


class ClosedMeanwhile(BufferedWay):
    """Closed when a block has arrived in its buffer."""

    def _broadcast(self, buffer, within_s):
        super()._broadcast(buffer, within_s)
        self.abort()


def test_a_block_that_has_arrived_in_its_buffer_is_not_copied_after_closing(buffered):
    sender, receiver = buffered
    closed = ClosedMeanwhile(receiver.group, 0, torch.device("cpu"))
    memory = np.zeros(5000, np.uint8)
    _, error = both(
        lambda: sender.send(np.ones(5000, np.uint8), 10.0),
        lambda: closed.receive(memory, 10.0),
    )
    assert isinstance(error, ConnectionError)
    assert not memory.any()


def test_buffers_that_do_not_come(buffered):
    _, receiver = buffered
    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        receiver.receive(np.zeros(5, np.uint8), 0.2)
    assert time.monotonic() - begin < WITHIN_S / 2


@pytest.mark.parametrize("backend", ["nccl", "ucc", "mpi"])
def test_a_backend_that_torch_lacks_is_refused_with_its_reason(backend):
    if getattr(dist, f"is_{backend}_available")():
        pytest.skip(f"this PyTorch has {backend}")
    name = backend.upper()
    with pytest.raises(
        BadOption,
        match=f"backend='{backend}' .*torch {torch.__version__.replace('+', '.')} says: .*{name}",
    ):
        DistributedCollector(
            ["CartPole-v1"], frames_per_batch=10, launcher="mp", backend=backend
        )


def test_a_backend_that_does_not_exist_is_refused():
    with pytest.raises(BadOption, match="'smoke' is unknown: expected one of 'gloo'"):
        DistributedCollector(
            ["CartPole-v1"], frames_per_batch=10, launcher="mp", backend="smoke"
        )
    with pytest.raises(
        BadOption, match="transport='ray': expected 'torch_distributed' or 'direct'"
    ):
        DistributedCollector(
            ["CartPole-v1"], frames_per_batch=10, launcher="mp", transport="ray"
        )
    check_backend("gloo")


# --- the default group ----------------------------------------------------------------------------

DEFAULT = """
    import os, sys
    import torch
    import torch.distributed as dist
    from muster import DistributedCollector
    from tests.fakes.node_runs import all_blocks_in_groups

    def init():
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", "0"
        dist.init_process_group(backend="gloo", init_method="env://", rank=0, world_size=1)

    if sys.argv[1] == "before":
        init()
    options = {"frames_per_batch": 20, "total_frames": -1, "sync": True, "launcher": "mp"}
    with all_blocks_in_groups():
        made = DistributedCollector(["CartPole-v1"] * 2, None, **options)
    made.next()
    assert made.stats().engine == "torch_distributed"
    assert dist.is_initialized() == (sys.argv[1] == "before")
    if sys.argv[1] == "later":
        init()
    total = torch.ones(())
    dist.all_reduce(total, group=dist.new_group([0]))
    assert (total, dist.get_world_size()) == (1, 1)
    made.next()
    dist.destroy_process_group()
    made.next()
    made.shutdown()
    print("through")
"""


@pytest.mark.parametrize("when", ["before", "later"])
def test_a_default_group_of_the_programs_own(when):
    command = [sys.executable, "-c", textwrap.dedent(DEFAULT), when]
    run = subprocess.run(command, timeout=100, capture_output=True, text=True)
    assert run.stdout == "through\n", run.stderr
    assert run.returncode == 0


# --- processes that end, and forks ----------------------------------------------------------------

ENDS = """
    import os, sys, threading
    import numpy as np
    from tests.unit.test_process_groups import *
    stack = contextlib.ExitStack()
    links = linked(channels(stack), 1)
    memory, block = np.zeros(1 << 28, np.uint8), Block(np.ones(1 << 28, np.uint8))
    def run(call, *given):
        try:
            call(*given)
        except LinkLost:
            pass
    for call in ((links[0].receive,), (links[1].send, b"x", block, 1), (links[0].send, b"x", block, 2)):
        threading.Thread(target=run, args=call, daemon=True).start()
    links[0].expect(1, memory)
    HOW
"""


@pytest.mark.parametrize(
    ("how", "status"),
    [("sys.exit(7)", 7), ("raise ValueError", 1), ("wait_until(lambda: 1)", 0)],
)
def test_a_program_ends_with_its_own_status_while_threads_are_in_torch(how, status):
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(ENDS).replace("HOW", how)],
        timeout=100,
        capture_output=True,
        text=True,
    )
    assert run.returncode == status, run.stderr
    assert "terminate" not in run.stderr, run.stderr


def test_a_fork_ends_and_leaves_the_link_alone(ends):
    """Freeing a group waits for its threads, which a fork does not have."""
    main, node = ends
    pid = os.fork()
    if pid == 0:
        try:
            del main, node
            ends.clear()
        finally:
            os._exit(3)
    watch = os.pidfd_open(pid)
    try:
        assert select.select([watch], [], [], WITHIN_S)[0], "the fork hangs"
    finally:
        os.close(watch)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 3
    sent = pattern(5000, 2)
    _, got = both(lambda: main.send(b"still there", Block(sent), 1), node.receive)
    assert (got.block == sent).all()


def test_ways_of_gloo_are_used(ends):
    assert all(isinstance(way, GlooWay) for link in ends for way in link._ways)
