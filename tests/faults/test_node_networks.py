"""Nodes on other machines: networks that are cut and healed, that are slow, and strangers in them.

The machines are network namespaces; see ``tests/fakes/netns.py``.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from muster.cluster.direct import DirectCarrier
from muster.cluster.distributed import TorchCarrier
from muster.cluster.launchers import Launcher
from muster.cluster.link import Block, Link, LinkLost
from muster.cluster.rendezvous import Rendezvous
from muster.cluster.token import write_token
from muster.errors import BadOption
from tests.fakes.netns import Host, listening, missing, network
from tests.fakes.ray_cluster import needs_ray
from tests.faults.test_engine_networks import Machines, two_machines
from tests.waits import wait_until

WHY_NOT = missing()
pytestmark = [pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]

JOIN_S = 90.0
REJOIN_S = 60.0


@pytest.fixture
def hosts() -> Iterator[tuple[Host, ...]]:
    with network(3) as made:
        yield made


@pytest.fixture
def token(tmp_path):
    path = tmp_path / "token"
    write_token(path, b"0123456789abcdef" * 2)
    return path


@pytest.fixture(params=["direct", "torch_distributed"])
def serving(request, hosts, token):
    """Open a carrier for one node on the first machine; closed in the end."""
    engines = {
        "direct": DirectCarrier,
        "torch_distributed": partial(TorchCarrier, large=1),
    }
    with contextlib.ExitStack() as stack:

        def open_(deadline_s: float = 2.0) -> Any:
            with hosts[0].entered():
                rendezvous = Rendezvous(1, bind=hosts[0].address, token=token)
                stack.callback(rendezvous.close)
                carrier = engines[request.param](Launcher(), rendezvous, deadline_s)
            stack.callback(carrier.close)
            return carrier

        yield open_


class Program:
    """A program on a machine, and what it says, line by line."""

    def __init__(self, host: Host, *arguments: str, env: Any = None) -> None:
        environment = {
            **(env or os.environ),
            "PYTHONPATH": os.pathsep.join(["src", *sys.path]),
        }
        self.process = host.start(
            [sys.executable, "-m", *arguments],
            stdin=-1,
            stdout=-1,
            stderr=-1,
            env=environment,
        )
        self.said: list[str] = []
        self.errors = ""
        self._more = threading.Condition()
        self._threads = [
            threading.Thread(target=self._listen),
            threading.Thread(target=self._read_errors),
        ]
        for thread in self._threads:
            thread.start()

    def says(self, word: str, times: int, within_s: float) -> str:
        """The last of so many lines that begin with a word."""

        def lines() -> list[str]:
            return [line for line in self.said if line.startswith(word)]

        with self._more:
            assert self._more.wait_for(lambda: len(lines()) >= times, within_s), (
                self.said,
                self.errors,
            )
            return lines()[times - 1]

    def ended(self, within_s: float) -> str:
        """What it wrote on standard error until it ended."""
        self.process.wait(within_s)
        self._threads[1].join(JOIN_S)
        return self.errors

    def _listen(self) -> None:
        for line in self.process.stdout:
            with self._more:
                self.said.append(line.strip())
                self._more.notify_all()

    def _read_errors(self) -> None:
        for line in self.process.stderr:
            self.errors += line


def node_at(
    host: Host,
    address: str,
    path: Any,
    what: str = "netns_nodes:beating",
    env: Any = None,
) -> Program:
    """A node's process on a machine, which joins there with this token."""
    return Program(host, "tests.fakes.netns_nodes", what, address, str(path), env=env)


class Session:
    """The main process' end of a link: sends beats, keeps what comes."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.came: list[bytes] = []
        self.lost: str | None = (
            None  # not the error: its frames would keep the link's connections
        )
        self._more = threading.Condition()
        for run in (self._send, self._receive):
            threading.Thread(target=run, daemon=True).start()

    def has(self, count: int, within_s: float = 60.0) -> None:
        with self._more:
            assert self._more.wait_for(lambda: len(self.came) >= count, within_s), (
                self.came,
                self.lost,
            )

    def ends(self, within_s: float) -> str:
        with self._more:
            assert self._more.wait_for(lambda: self.lost is not None, within_s), (
                "the link is not lost"
            )
        return self.lost

    def _send(self) -> None:
        pause = threading.Event()
        with contextlib.suppress(LinkLost):
            while not pause.wait(0.2):
                self.link.send(b"beat")

    def _receive(self) -> None:
        while self.lost is None:
            try:
                message = self.link.receive().message
            except LinkLost as lost:
                with self._more:
                    self.lost = str(lost)
                    self._more.notify_all()
            else:
                with self._more:
                    self.came.append(message)
                    self._more.notify_all()


def connect(main: Host, carrier: Any, epoch: int = 0) -> Link:
    with main.entered():
        return carrier.connect(0, epoch, JOIN_S, threading.Event())


class Connecting:
    """``connect`` in a thread."""

    def __init__(self, main: Host, carrier: Any, epoch: int) -> None:
        self.links: list[Link] = []
        self._thread = threading.Thread(
            target=lambda: self.links.append(connect(main, carrier, epoch))
        )
        self._thread.start()

    def within(self, seconds: float) -> Link:
        self._thread.join(seconds)
        assert self.links, f"not joined within {seconds:g} s"
        return self.links[0]


def everywhere(main: Host) -> set[tuple[str, int]]:
    """Where this process listens."""
    with main.entered():
        inside = listening(os.getpid())
    return inside | listening(os.getpid())


class TestMachines:
    def test_cut_network_is_noticed_at_both_ends_and_the_node_comes_back(
        self, hosts, serving, token
    ):
        main, machine, _ = hosts
        carrier = serving(deadline_s=2.0)
        node = node_at(machine, carrier.address, token)
        old = Session(connect(main, carrier))
        old.has(3)
        machine.unplug()
        cut = time.monotonic()
        assert "2 s" in old.ends(JOIN_S)
        node.says("lost", 1, JOIN_S)
        assert time.monotonic() - cut > 1.5
        old.link.close()
        number_of_old = len(old.came)

        coming = Connecting(main, carrier, 1)
        machine.plug_in()
        new = Session(coming.within(REJOIN_S))
        number = node.says("joined", 2, JOIN_S).split()[1].encode()
        new.has(5)
        assert set(new.came) == {number}
        assert len(old.came) == number_of_old
        with pytest.raises(LinkLost):
            old.link.send(b"anybody?")
        new.link.close()

    @pytest.mark.slow
    def test_node_that_missed_its_own_end_is_not_heard_any_more(
        self, hosts, serving, token
    ):
        """The network is away for less than the deadline; meanwhile the main process has given the
        session up.
        """
        main, machine, _ = hosts
        carrier = serving(deadline_s=5.0)
        node = node_at(machine, carrier.address, token)
        old = Session(connect(main, carrier))
        old.has(3)
        first = node.says("joined", 1, JOIN_S).split()[1].encode()
        machine.unplug()
        threading.Event().wait(1.0)  # it goes on sending, into nowhere
        old.link.close()
        coming = Connecting(main, carrier, 1)
        machine.plug_in()
        new = Session(coming.within(REJOIN_S))
        new.has(10)
        assert first not in new.came
        node.says("lost", 1, JOIN_S)
        new.link.close()

    @pytest.mark.slow
    def test_short_cut_is_no_loss(self, hosts, serving, token):
        main, machine, _ = hosts
        carrier = serving(deadline_s=10.0)
        node = node_at(machine, carrier.address, token)
        session = Session(connect(main, carrier))
        session.has(3)
        machine.unplug()
        threading.Event().wait(1.0)
        before = len(session.came)
        machine.plug_in()
        session.has(before + 10)
        assert session.lost is None
        assert not [line for line in node.said if line.startswith("lost")]
        session.link.close()

    @pytest.mark.slow
    def test_slow_network(self, hosts, serving, token):
        main, machine, _ = hosts
        carrier = serving(deadline_s=15.0)
        machine.cable(delay_s=0.05)
        node_at(machine, carrier.address, token, "link_nodes:echo")
        link = connect(main, carrier)
        block = np.random.default_rng(0).integers(0, 256, 300_000, np.uint8)
        memory = np.zeros(300_000, np.uint8)
        begin = time.monotonic()
        for tag in range(1, 4):
            link.expect(tag, memory)
            link.send(b"there and back", Block(block), tag)
            got = link.receive()
            assert got.message == b"there and back"
            assert np.shares_memory(got.block, memory)
            assert (memory == block).all()
        assert time.monotonic() - begin > 3 * 0.1
        link.send(b"bye")
        link.close()

    @pytest.mark.slow
    def test_node_with_another_token_is_refused(self, hosts, serving, token, tmp_path):
        main, machine, _ = hosts
        carrier = serving(deadline_s=5.0)
        write_token(tmp_path / "other", b"fedcba9876543210" * 2)
        node = node_at(machine, carrier.address, tmp_path / "other")
        coming = Connecting(main, carrier, 0)
        assert "has another token" in node.ended(JOIN_S)
        assert not node.said  # its function was never called
        assert "does not know the token" in carrier.rendezvous.refused()
        node_at(machine, carrier.address, token)
        coming.within(JOIN_S).close()

    @pytest.mark.slow
    def test_nothing_listens_but_at_the_bound_address(self, hosts, serving, token):
        main, machine, _ = hosts
        before = everywhere(main)
        carrier = serving(deadline_s=10.0)
        node = node_at(machine, carrier.address, token)
        session = Session(connect(main, carrier))
        session.has(1)
        here, there = everywhere(main) - before, listening(node.process.pid)
        assert {host for host, _ in here} == {main.address}
        assert {host for host, _ in there} <= {machine.address}
        session.link.close()
        carrier.close()
        assert everywhere(main) == before


class MainProgram(Program):
    """The main process as a program; see ``netns_mains``."""

    def asks(self, what: str, epoch: int) -> None:
        self.process.stdin.write(f"{what} {epoch}\n")
        self.process.stdin.flush()

    def came(self, epoch: int) -> list[str]:
        """The messages of a session so far."""
        begin = f"came {epoch} "
        return [
            line.removeprefix(begin)
            for line in list(self.said)
            if line.startswith(begin)
        ]

    def has(self, epoch: int, times: int) -> None:
        self.says(f"came {epoch} ", times, JOIN_S)


class Actors:
    """What nodes say that are Ray actors, from Ray's logs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def says(self, word: str, times: int, within_s: float) -> str:
        wait_until(lambda: len(self._lines(word)) >= times, within_s)
        return self._lines(word)[times - 1]

    def _lines(self, word: str) -> list[str]:
        logs = sorted(
            self._folder.rglob("logs/worker-*.out"), key=lambda log: log.stat().st_ctime
        )
        lines = [line for log in logs for line in log.read_text().splitlines()]
        return [line for line in lines if line.startswith(word)]


class TestMainProcessesOfTheirOwn:
    """The cuts of ``TestMachines`` for engines of which a process has one agent or connection."""

    @pytest.fixture
    def machines(self) -> Iterator[Machines]:
        with two_machines() as made:
            yield made

    @pytest.fixture(params=["rpc", pytest.param("ray", marks=[needs_ray])])
    def start(self, request, machines) -> Any:
        """Start the main process and a node; return both."""

        def start(deadline_s: float) -> tuple[MainProgram, Any]:
            token = str(machines.folder / "muster-token")
            address = machines.main.address
            if request.param == "ray":
                address = machines.starts_raylets(
                    main_cpus=0
                )  # the node is on the other machine
            main = MainProgram(
                machines.main,
                "tests.fakes.netns_mains",
                request.param,
                address,
                token,
                str(deadline_s),
                env=machines.env,
            )
            joins_at = main.says("listens", 1, JOIN_S).split()[1]
            if request.param == "ray":
                return main, Actors(machines.folder)
            return main, node_at(machines.other, joins_at, token, env=machines.env)

        return start

    @pytest.mark.slow
    @pytest.mark.timeout(600)
    def test_cut_network_is_noticed_at_both_ends_and_the_node_comes_back(
        self, start, machines
    ):
        main, node = start(deadline_s=3.0)
        main.asks("connect", 0)
        main.has(0, 3)
        machines.other.unplug()
        assert "3 s" in main.says("lost 0", 1, JOIN_S)
        node.says("lost", 1, JOIN_S)
        main.asks("close", 0)
        main.says("closed 0", 1, JOIN_S)
        number_of_old = len(main.came(0))

        main.asks("connect", 1)
        machines.other.plug_in()
        main.has(1, 5)
        number = node.says("joined", 2, JOIN_S).split()[1]
        assert set(main.came(1)) == {number}
        assert len(main.came(0)) == number_of_old
        main.asks("send", 0)
        main.says("refused 0", 1, JOIN_S)

    @pytest.mark.slow
    @pytest.mark.timeout(600)
    def test_node_that_missed_its_own_end_is_not_heard_any_more(self, start, machines):
        main, node = start(deadline_s=8.0)
        main.asks("connect", 0)
        main.has(0, 3)
        first = node.says("joined", 1, JOIN_S).split()[1]
        machines.other.unplug()
        threading.Event().wait(1.0)  # it goes on sending, into nowhere
        main.asks("close", 0)
        main.says("closed 0", 1, JOIN_S)
        main.asks("connect", 1)
        machines.other.plug_in()
        main.has(1, 10)
        assert first not in main.came(1)

    @pytest.mark.slow
    @pytest.mark.timeout(600)
    def test_short_cut_is_no_loss(self, start, machines):
        main, node = start(deadline_s=15.0)
        main.asks("connect", 0)
        main.has(0, 3)
        machines.other.unplug()
        threading.Event().wait(1.0)
        before = len(main.came(0))
        machines.other.plug_in()
        main.has(0, before + 10)
        assert not [line for line in main.said if line.startswith("lost")]
        with pytest.raises(AssertionError):
            node.says("lost", 1, 0.0)


def test_nothing_is_unpickled_that_comes_from_strangers(hosts, token, tmp_path):
    main, machine, stranger = hosts
    with main.entered():
        rendezvous = Rendezvous(1, bind=main.address, token=token)
        carrier = DirectCarrier(
            launcher=Launcher(), rendezvous=rendezvous, deadline_s=5.0
        )
    try:
        marker = tmp_path / "marker"
        coming = Connecting(main, carrier, 0)
        node_at(stranger, carrier.address, marker, "hostile").says("lost", 2, JOIN_S)
        assert not marker.exists()
        wait_until(
            lambda: "2 connections were refused" in carrier.rendezvous.refused(), JOIN_S
        )
        node_at(machine, carrier.address, token)  # which has the token
        session = Session(coming.within(JOIN_S))
        session.has(3)
        session.link.close()
    finally:
        carrier.close()


def test_a_firewall_lets_through_only_what_it_is_told(hosts):
    """The one of ``test_engine_networks``."""
    main, machine, _ = hosts
    machine.cable(opened="29600,29700-29710")
    for port, passes in ((29600, True), (29705, True), (29601, False), (22, False)):
        with main.entered():
            listening_socket = socket.create_server((main.address, port))
        with listening_socket, machine.entered():
            outcome = (
                contextlib.nullcontext() if passes else pytest.raises(TimeoutError)
            )
            with outcome:
                socket.create_connection(
                    (main.address, port), timeout=20 if passes else 0.5
                ).close()


class TestListening:
    def test_on_loopback_cannot_be_reached_from_another_machine(self, hosts):
        main, _, stranger = hosts
        before = everywhere(main)
        with main.entered():
            carrier = DirectCarrier(launcher=Launcher(), rendezvous=Rendezvous(1))
        try:
            ports = [port for _, port in everywhere(main) - before]
            assert ports
            with stranger.entered():
                for port in ports:
                    with pytest.raises(ConnectionRefusedError):
                        socket.create_connection((main.address, port), timeout=5)
        finally:
            carrier.close()

    def test_elsewhere_needs_a_token(self, hosts, monkeypatch):
        monkeypatch.delenv("MUSTER_TOKEN", raising=False)
        monkeypatch.delenv("MUSTER_TOKEN_FILE", raising=False)
        with hosts[0].entered(), pytest.raises(BadOption, match="token"):
            Rendezvous(1, bind=hosts[0].address)
