"""Where nodes and the main process meet: what listens where, tokens, offers.

Real sockets, real torchrun.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import stat
import subprocess
import sys
import threading
import time
import warnings
from functools import partial
from pathlib import Path

import pytest

from muster import DistributedCollector, RPCCollector
from muster.cluster.admissions import Terms
from muster.cluster.direct import DirectCarrier, check_backend
from muster.cluster.joining import Member, run_node
from muster.cluster.launchers import Launcher, MpLauncher
from muster.cluster.link import LinkLost, WrongToken
from muster.cluster.rendezvous import Rendezvous, hear, say
from muster.cluster.socket_link import SocketLink
from muster.cluster.token import read_token, write_token
from muster.cluster.torchrun import TorchrunLauncher, find_rendezvous
from muster.cluster.versions import installed
from muster.errors import BadOption
from muster.utils.addresses import is_loopback
from tests.fakes.netns import listening
from tests.waits import descriptors_left, wait_until

TOKEN = b"0123456789abcdef"
INTRODUCED = "tests.fakes.link_nodes:introduced"


@pytest.fixture
def rendezvous():
    with contextlib.closing(Rendezvous(3)) as opened:
        yield opened


@pytest.fixture(autouse=True)
def _no_token_around(monkeypatch):
    for name in ("MUSTER_TOKEN", "MUSTER_TOKEN_FILE", "RANK"):
        monkeypatch.delenv(name, raising=False)


def outward_address():
    """Of this machine, where others reach it; there need not be one."""
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
    ):
        probe.connect(("192.0.2.1", 9))  # nothing is sent
        if not is_loopback(address := probe.getsockname()[0]):
            return address
    return pytest.skip("this machine has no address but loopback")


def test_a_node_that_cannot_be_accepted_is_lost_with_the_reason(
    rendezvous, monkeypatch
):
    monkeypatch.setattr("muster.cluster.rendezvous.STUCK_S", 0.0)
    carrier = DirectCarrier(launcher=Launcher(), rendezvous=rendezvous)
    host, port = rendezvous.address.split(":")
    with contextlib.ExitStack() as nodes:
        several = [
            nodes.enter_context(socket.socket()) for _ in range(5)
        ]  # threads of other tests may free some
        with descriptors_left(0):
            for node in several:
                node.connect((host, int(port)))
            with pytest.raises(
                LinkLost,
                match=r"cannot be accepted \(Too many open files\)\. Close files, or raise",
            ):
                carrier.connect(0, 0, 60.0, threading.Event())
        wait_until(lambda: not rendezvous.stuck())  # there are descriptors again


@pytest.fixture
def join(closing):
    """A function in which a member joins; the connection is closed after the test."""

    def joined(member):
        if (membership := member.join()) is not None:
            closing(membership.channel)
        return membership

    return joined


class TestListening:
    @pytest.mark.skipif(not os.path.exists("/proc/self/net/tcp"), reason="needs Linux")
    def test_on_loopback_only_with_nodes_there(self):
        before = listening(os.getpid())
        rendezvous = Rendezvous(1)
        carrier = DirectCarrier(launcher=MpLauncher(INTRODUCED), rendezvous=rendezvous)
        try:
            link = carrier.connect(0, 0, 60.0, threading.Event())
            link.receive()
            new = listening(os.getpid()) - before
            assert len(new) >= 1
            assert {host for host, _ in new} == {"127.0.0.1"}
            link.close()
        finally:
            carrier.close()
        assert listening(os.getpid()) <= before

    def test_at_the_given_port_and_address_of_ipv6(self, join):
        with contextlib.closing(Rendezvous(1, bind="::1")) as rendezvous:
            host, port = rendezvous.address.rsplit(":", 1)
            assert host == "[::1]"
            rendezvous.admit(0, 4)
            assert join(Member(rendezvous.address, rendezvous.token, 0)).epoch == 4
        with contextlib.closing(
            Rendezvous(1, bind="localhost", tcp_port=int(port))
        ) as rendezvous:
            assert (
                rendezvous.address == f"{rendezvous.host}:{port}"
                or rendezvous.host == "::1"
            )

    def test_port_that_is_taken(self, rendezvous):
        port = int(rendezvous.address.split(":")[1])
        with pytest.raises(
            BadOption,
            match=rf"127.0.0.1:{port}: Address already in use.*ss -ltnp.*tcp_port=0",
        ):
            Rendezvous(1, tcp_port=port)

    @pytest.mark.parametrize("bind", ["0.0.0.0", "::"])
    def test_not_everywhere(self, bind):
        with pytest.raises(BadOption, match="not one address"):
            Rendezvous(1, bind=bind, token=TOKEN)

    @pytest.mark.parametrize("bind", ["203.0.113.7", "no such host"])
    def test_not_at_foreign_addresses(self, bind):
        with pytest.raises(BadOption, match=bind):
            Rendezvous(1, bind=bind, token=TOKEN)

    @pytest.mark.parametrize("port", [-1, 70_000, "http"])
    def test_not_at_impossible_ports_and_without_a_socket_left_open(self, port):
        gc.collect()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ResourceWarning)
            with pytest.raises(BadOption, match="tcp_port"):
                Rendezvous(1, tcp_port=port)
            gc.collect()
        assert [str(each.message) for each in caught] == []

    def test_beyond_loopback_only_with_a_token(self):
        address = outward_address()
        with pytest.raises(BadOption, match="need a token"):
            Rendezvous(1, bind=address)
        with contextlib.closing(Rendezvous(1, bind=address, token=TOKEN)) as rendezvous:
            assert rendezvous.address.startswith(address)
            assert rendezvous.token == TOKEN

    def test_goes_on_after_garbage(self, rendezvous, join):
        host, port = rendezvous.address.split(":")
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(1000), b""):
            with socket.create_connection((host, int(port)), 10) as stranger:
                stranger.sendall(garbage)
        rendezvous.admit(1, 0)
        assert join(Member(rendezvous.address, rendezvous.token, 1)).node == 1


class TestTokens:
    def test_are_random(self, rendezvous):
        with contextlib.closing(Rendezvous(1)) as other:
            assert len(rendezvous.token) >= 32
            assert rendezvous.token != other.token

    def test_come_from_the_environment(self, monkeypatch, tmp_path):
        monkeypatch.setenv("MUSTER_TOKEN", "text of some length")
        assert read_token(None) == b"text of some length"
        write_token(tmp_path / "token", TOKEN + b"\n")
        monkeypatch.setenv("MUSTER_TOKEN_FILE", str(tmp_path / "token"))
        assert read_token(None) == TOKEN
        assert read_token(b"given, not found") == b"given, not found"
        with contextlib.closing(Rendezvous(1)) as rendezvous:
            assert rendezvous.token == TOKEN

    def test_file_that_is_written_is_read_by_its_user_only(self, tmp_path):
        write_token(tmp_path / "token", TOKEN)
        assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
        assert read_token(tmp_path / "token") == TOKEN

    @pytest.mark.parametrize("mode", [0o640, 0o604])
    def test_file_that_others_may_read_is_refused(self, tmp_path, mode):
        write_token(tmp_path / "token", TOKEN)
        (tmp_path / "token").chmod(mode)
        with pytest.raises(BadOption, match=f"mode 0{mode:o}.*chmod 600"):
            read_token(tmp_path / "token")

    def test_missing_file_and_short_token(self, tmp_path):
        with pytest.raises(BadOption, match="cannot be read: No such file"):
            read_token(tmp_path / "none")
        with pytest.raises(BadOption, match="has 5 bytes"):
            read_token(b"12345")

    def test_node_without_one(self):
        with pytest.raises(BadOption, match="MUSTER_TOKEN_FILE"):
            run_node("127.0.0.1:1")

    def test_node_with_another_one_is_told_so_and_so_is_the_main_process(self):
        rendezvous = Rendezvous(1)
        carrier = DirectCarrier(launcher=Launcher(), rendezvous=rendezvous)
        try:
            with pytest.raises(WrongToken, match="another token than this node"):
                run_node(rendezvous.address, 0, TOKEN, target=INTRODUCED)
            with pytest.raises(
                LinkLost,
                match=r"1 connections were refused; .* does not know the token",
            ):
                carrier.connect(0, 0, 0.1, threading.Event())
        finally:
            carrier.close()

    def test_stranger_does_not_keep_the_right_node_out(self):
        rendezvous = Rendezvous(1)
        carrier = DirectCarrier(launcher=MpLauncher(INTRODUCED), rendezvous=rendezvous)
        try:
            with pytest.raises(WrongToken):
                run_node(rendezvous.address, 0, TOKEN, target=INTRODUCED)
            carrier.connect(0, 0, 60.0, threading.Event()).close()
        finally:
            carrier.close()


class TestAdmission:
    def test_are_accepted_once(self, rendezvous, closing, join):
        rendezvous.admit(1, 5)
        first = join(Member(rendezvous.address, rendezvous.token, 1))
        assert (first.node, first.epoch) == (1, 5)
        assert rendezvous.joined(1, 6, 0) is None
        channel = closing(rendezvous.joined(1, 5, 30))
        say(first.channel, text="through this channel")
        assert hear(channel) == {"text": "through this channel"}
        assert rendezvous.joined(1, 5, 0) is None
        second = Member(rendezvous.address, rendezvous.token, 1)
        later = []
        thread = threading.Thread(target=lambda: later.append(join(second)))
        thread.start()
        rendezvous.admit(1, 6)
        thread.join(30)
        assert later[0].epoch == 6

    def test_are_not_lost_with_the_answer(self, rendezvous, join):
        rendezvous.admit(0, 0)
        host, port = rendezvous.address.split(":")
        for answers in (1, 2):
            connection = socket.create_connection((host, int(port)))
            with contextlib.closing(
                SocketLink(connection, rendezvous.token, main=False, deadline_s=10.0)
            ) as channel:
                say(channel, node=None, muster=installed())
                assert hear(channel)["node"] == 0
                assert answers  # and it is gone without having accepted
        assert join(Member(rendezvous.address, rendezvous.token)).node == 0

    def test_that_are_accepted_too_late_are_none(self, rendezvous, join):
        rendezvous.admit(0, 0)
        host, port = rendezvous.address.split(":")
        connection = socket.create_connection((host, int(port)))
        with contextlib.closing(
            SocketLink(connection, rendezvous.token, main=False, deadline_s=10.0)
        ) as channel:
            say(channel, node=0, muster=installed())
            assert hear(channel)["epoch"] == 0
            rendezvous.withdraw(0)
            rendezvous.admit(0, 1)
            say(channel, accepted=True)
            with pytest.raises(LinkLost):
                hear(channel)
        assert rendezvous.joined(0, 0, 0) is None
        assert join(Member(rendezvous.address, rendezvous.token, 0)).epoch == 1

    def test_go_to_whoever_is_free(self, rendezvous, join):
        members = [Member(rendezvous.address, rendezvous.token) for _ in range(3)]
        for node in range(3):
            rendezvous.admit(node, 0)
        assert sorted(join(member).node for member in members) == [0, 1, 2]
        rendezvous.admit(1, 1)
        membership = join(members[0])
        assert (membership.node, membership.epoch) == (1, 1)

    def test_tell_the_deadline(self, rendezvous, join):
        rendezvous.admit(0, 0, Terms(deadline_s=3.5))
        assert join(Member(rendezvous.address, rendezvous.token, 0)).deadline_s == 3.5

    def test_that_are_withdrawn(self, rendezvous, join):
        rendezvous.admit(0, 0)
        rendezvous.withdraw(0)
        rendezvous.admit(2, 7)
        assert join(Member(rendezvous.address, rendezvous.token)).node == 2

    def test_end_with_the_main_process(self, rendezvous, join):
        member = Member(rendezvous.address, rendezvous.token)
        rendezvous.admit(0, 0)
        assert join(member).node == 0
        ends = []
        thread = threading.Thread(target=lambda: ends.append(join(member)))
        thread.start()
        rendezvous.close()
        thread.join(30)
        assert ends == [None]

    def test_guest_comes_first(self, join):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        found = []
        thread = threading.Thread(
            target=lambda: found.append(join(Member(f"127.0.0.1:{port}", TOKEN, 0)))
        )
        thread.start()
        with contextlib.closing(
            Rendezvous(1, tcp_port=port, token=TOKEN)
        ) as rendezvous:
            rendezvous.admit(0, 3)
            thread.join(30)
            assert found[0].epoch == 3

    def test_guest_does_not_wait_for_ever(self):
        with socket.socket() as bound:  # nobody listens
            bound.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{bound.getsockname()[1]}"
            with pytest.raises(
                LinkLost, match=f"{address} could not be reached for 0.3 s"
            ):
                Member(address, TOKEN, within_s=0.3).join()

    @pytest.mark.parametrize("address", ["host", "host:", "host:port", ""])
    def test_need_an_address(self, address):
        with pytest.raises(BadOption, match="host:port"):
            Member(address, TOKEN)

    def test_node_that_nobody_expects(self, rendezvous):
        with pytest.raises(BadOption, match=r"node=3.*expects 3 nodes"):
            Member(rendezvous.address, rendezvous.token, 3).join()


class TestWaitingNodes:
    def test_serve_session_after_session_until_goodbye(self):
        rendezvous = Rendezvous(1)
        carrier = DirectCarrier(launcher=Launcher(), rendezvous=rendezvous)
        ends = []
        arguments = (rendezvous.address, None, rendezvous.token)
        thread = threading.Thread(
            target=lambda: ends.append(run_node(*arguments, target=INTRODUCED))
        )
        thread.start()
        try:
            for epoch in range(3):
                link = carrier.connect(0, epoch, 60.0, threading.Event())
                assert link.receive().message == f"0 {os.getpid()}".encode()
                if epoch == 2:
                    link.send(b"bye")
                    thread.join(30)
                link.close()
            assert ends == [True]
        finally:
            carrier.close()

    def test_end_with_a_main_process_that_says_nothing(self):
        rendezvous = Rendezvous(1)
        carrier = DirectCarrier(launcher=Launcher(), rendezvous=rendezvous)
        ends = []
        arguments = (rendezvous.address, 0, rendezvous.token)
        thread = threading.Thread(
            target=lambda: ends.append(run_node(*arguments, target=INTRODUCED))
        )
        thread.start()
        carrier.connect(0, 0, 60.0, threading.Event()).close()
        carrier.close()
        thread.join(30)
        assert ends == [False]

    def test_that_do_not_come_are_asked_for(self, rendezvous):
        carrier = DirectCarrier(launcher=Launcher(), rendezvous=rendezvous)
        begin = time.monotonic()
        with pytest.raises(
            LinkLost,
            match=rf"Node 2 .*{rendezvous.address} within 0.2 s.*run_node\(address\)",
        ):
            carrier.connect(2, 0, 0.2, threading.Event())
        assert time.monotonic() - begin < 10

    def test_that_say_nothing_once_they_have_joined(self, join):
        rendezvous = Rendezvous(1)
        carrier = DirectCarrier(
            launcher=Launcher(), rendezvous=rendezvous, deadline_s=1.0
        )
        try:
            accepted = []
            thread = threading.Thread(
                target=lambda: accepted.append(
                    join(Member(rendezvous.address, rendezvous.token, 0))
                )
            )
            thread.start()
            link = carrier.connect(0, 0, 60.0, threading.Event())
            thread.join(30)
            with pytest.raises(LinkLost, match="has not said anything for 1 s"):
                link.receive()
            with pytest.raises(LinkLost):  # it comes late
                accepted[0].channel.receive()
        finally:
            carrier.close()


class TestBackends:
    @pytest.mark.parametrize(
        "kind", [partial(DistributedCollector, transport="direct"), RPCCollector]
    )
    @pytest.mark.parametrize("backend", ["ucc", "mpi", "nccl"])
    def test_that_have_not_run(self, kind, backend):
        with pytest.raises(
            BadOption,
            match=f"backend='{backend}' has not run with Muster on devices .* backend='gloo'",
        ):
            kind(["CartPole-v1"], frames_per_batch=10, launcher="mp", backend=backend)

    def test_that_nobody_has(self):
        with pytest.raises(BadOption, match="'smoke' is unknown"):
            check_backend("smoke")


class TestTorchrun:
    @pytest.mark.slow
    def test_ranks_above_0_are_nodes(self):
        command = (
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=3",
        )
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(["src", "."]),
        }
        run = subprocess.run(
            [*command, "-m", "tests.fakes.link_nodes"],
            cwd=Path(__file__).parents[2],
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert run.returncode == 0, run.stderr
        assert run.stdout.splitlines() == ["node 0 is rank 1", "node 1 is rank 2"] * 2

    def test_elsewhere(self, monkeypatch):
        with pytest.raises(BadOption, match="address of its main process"):
            run_node(token=TOKEN)
        with pytest.raises(BadOption, match="in rank None"):
            TorchrunLauncher()
        for name, value in {
            "RANK": "0",
            "WORLD_SIZE": "3",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "1",
        }.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(BadOption, match="in rank 0"):
            find_rendezvous(None, 1.0)
        with (
            contextlib.closing(Rendezvous(3)) as rendezvous,
            pytest.raises(BadOption, match=r"3 ranks, but 3 .* start 4"),
        ):
            TorchrunLauncher().start(0, 0, rendezvous)
        monkeypatch.setenv("RANK", "1")
        with pytest.raises(BadOption, match="in rank 1"):
            TorchrunLauncher()
