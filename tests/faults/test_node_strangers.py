"""Programs that reach what nodes and their main process listen at, but do not know the token:
nothing they say counts.

A stranger may listen where the main process should, stand between it and a node, or write into
torchrun's store.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from muster.cluster import joining, torchrun
from muster.cluster import rendezvous as rendezvous_module
from muster.cluster.admissions import ANSWER_S
from muster.cluster.joining import Member, run_node
from muster.cluster.link import LinkLost, WrongToken
from muster.cluster.rendezvous import Rendezvous
from muster.cluster.socket_link import (
    LONGEST,
    MAC_BYTES,
    MAGIC,
    NONCE_BYTES,
    SocketLink,
)
from muster.errors import BadOption
from tests.fakes.netns_nodes import Bomb
from tests.waits import wait_until

TOKEN, OTHER = b"0123456789abcdef", b"another one, as long"
TARGET = "tests.fakes.link_nodes:introduced"
DEADLINE_S = 60.0
LENGTH = struct.Struct("<Q16x")  # and no block
HANDSHAKE = 2  # messages that each end receives before it knows the other
NUMBER_OF_MESSAGES = {
    "main": 3,
    "node": 4,
}  # until a node has accepted an offer that was there
SAID_IN_A_STORE = {  # where nodes met before November 2026
    "run": "r",
    "epochs": [0],
    "settings": {"engine": "rpc", "backend": "gloo", "deadline_s": 5.0},
}


def listening() -> socket.socket:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(DEADLINE_S)
    return listener


def address_of(listener: socket.socket) -> str:
    return f"127.0.0.1:{listener.getsockname()[1]}"


@contextlib.contextmanager
def stranger(talk: Callable[[socket.socket], None]) -> Iterator[str]:
    """The address of a program that listens, and does this with each connection, which it then
    leaves open.
    """
    listener, met = listening(), list[socket.socket]()

    def attend(connection: socket.socket) -> None:
        with contextlib.suppress(OSError, LinkLost):
            talk(connection)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                met.append(listener.accept()[0])
                threading.Thread(target=attend, args=(met[-1],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield address_of(listener)
    finally:
        listener.close()
        for connection in met:
            connection.close()


def frames(connection: socket.socket) -> Iterator[bytes]:
    """Whole messages, with their lengths, until the other end closes."""
    with connection.makefile("rb") as file:
        while head := file.read(LENGTH.size):
            yield head + file.read(LENGTH.unpack(head)[0])


class Between:
    """Stands between nodes and a main process.

    Attributes:
        said: by "main" and "node", all frames as they came, of all connections.
        change: a function of who has said a frame and its number, which gives what is passed on.
    """

    def __init__(self, main: str) -> None:
        host, _, port = main.rpartition(":")
        self._main = host, int(port)
        self._listener = listening()
        self._ends = list[socket.socket]()
        self.address = address_of(self._listener)
        self.said: dict[str, list[bytes]] = {"main": [], "node": []}
        self.change: Any = lambda who, number, frame: frame
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                node, _ = self._listener.accept()
                main = socket.create_connection(self._main)
                self._ends += node, main
                for who, source, goal in (("main", main, node), ("node", node, main)):
                    threading.Thread(
                        target=self._pass_on, args=(who, source, goal), daemon=True
                    ).start()

    def _pass_on(self, who: str, source: socket.socket, goal: socket.socket) -> None:
        with contextlib.suppress(OSError):
            for number, frame in enumerate(frames(source)):
                self.said[who].append(frame)
                goal.sendall(self.change(who, number, frame))
            goal.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
        for end in self._ends:
            end.close()


@pytest.fixture(autouse=True)
def _no_token_around(monkeypatch):
    for name in ("MUSTER_TOKEN", "MUSTER_TOKEN_FILE", "RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def rendezvous():
    with contextlib.closing(Rendezvous(3, token=TOKEN)) as opened:
        yield opened


@pytest.fixture
def between(rendezvous):
    with contextlib.closing(Between(rendezvous.address)) as made:
        yield made


def end_of(member: Member) -> Any:
    """The error that waiting for an offer ends with."""
    with pytest.raises((LinkLost, BadOption)) as caught:
        member.join()
    return caught.value


class TestListeningInItsPlace:
    """Another program listens at the address of the main process."""

    def test_store_with_the_words_of_old_leads_nowhere(self, closing):
        """A node once followed what was written there into torch RPC, which runs what it is sent."""
        agent = closing(listening())
        agent.settimeout(0.0)
        store = dist.TCPStore(
            "127.0.0.1",
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=1),
        )
        card = {
            "url": f"uv://{address_of(agent)}",
            "session": "s" * 32,
            "options": {},
            "device": None,
        }
        store.set("muster/board", json.dumps(SAID_IN_A_STORE))
        store.set("muster/r/0/0/rpc/main", json.dumps(card))
        with pytest.raises(LinkLost, match="could not be reached for 1 s"):
            run_node(f"127.0.0.1:{store.port}", 0, TOKEN, target=TARGET, within_s=1.0)
        with pytest.raises(BlockingIOError):  # nobody has come
            agent.accept()

    @pytest.mark.parametrize(
        "says",
        [
            b"",
            b"GET / HTTP/1.0\r\n\r\n",
            LENGTH.pack(LONGEST + 1),
            LENGTH.pack(0xFFFFFFFF) + bytes(1000),
            LENGTH.pack(40) + MAGIC,
            LENGTH.pack(40) + b"muster-1" + bytes(NONCE_BYTES),
            LENGTH.pack(0) * 1000,
        ],
        ids=[
            "nothing",
            "http",
            "too long",
            "gigabytes",
            "half",
            "another version",
            "empty",
        ],
    )
    def test_garbage_is_no_offer(self, says, monkeypatch):
        monkeypatch.setattr(joining, "ANSWER_S", 0.3)
        with stranger(lambda connection: connection.sendall(says)) as address:
            error = end_of(Member(address, TOKEN, within_s=0.5))
        assert "could not be reached for 0.5 s" in str(error)

    def test_echo_of_its_own_proof_is_none(self):
        def reflect(connection: socket.socket) -> None:
            for frame in frames(connection):
                connection.sendall(frame)

        with stranger(reflect) as address:
            assert isinstance(end_of(Member(address, TOKEN)), WrongToken)

    def test_nothing_is_unpickled(self, tmp_path):
        bomb = pickle.dumps(Bomb(tmp_path / "marker"))

        def talk(connection: socket.socket) -> None:
            for message in (MAGIC + bytes(NONCE_BYTES), bytes(MAC_BYTES), bomb, bomb):
                connection.sendall(LENGTH.pack(len(message)) + message)

        with stranger(talk) as address:
            assert isinstance(end_of(Member(address, TOKEN)), WrongToken)
        assert not (tmp_path / "marker").exists()

    def test_other_main_process_is_not_served(self):
        with contextlib.closing(Rendezvous(1, token=OTHER)) as other:
            other.admit(0, 0)
            assert isinstance(end_of(Member(other.address, TOKEN)), WrongToken)
            assert other.joined(0, 0, 0) is None


class TestBetween:
    """Another program stands between a node and the main process."""

    def test_sees_no_token_and_passes_on_an_offer(self, rendezvous, between, closing):
        rendezvous.admit(1, 4)
        found = Member(between.address, TOKEN).join()
        closing(found.channel)
        assert (found.node, found.epoch) == (1, 4)
        channel = rendezvous.joined(1, 4, DEADLINE_S)
        assert channel is not None
        closing(channel)
        assert {
            who: len(said) for who, said in between.said.items()
        } == NUMBER_OF_MESSAGES
        assert not any(
            TOKEN in frame for said in between.said.values() for frame in said
        )

    @pytest.mark.parametrize(
        ("who", "number"),
        [
            (who, number)
            for who, count in NUMBER_OF_MESSAGES.items()
            for number in range(count)
        ],
    )
    @pytest.mark.parametrize("how", ["flip", "drop", "repeat", "longer"])
    def test_cannot_change_what_is_said(
        self, rendezvous, between, closing, monkeypatch, who, number, how
    ):
        """A node is admitted once the stranger lets everything pass, and not before."""
        for module in (joining, rendezvous_module):
            monkeypatch.setattr(module, "ANSWER_S", 1.0)
        rendezvous.admit(0, 0)
        changed = threading.Event()

        def change(speaker: str, at: int, frame: bytes) -> bytes:
            if (speaker, at) != (who, number) or changed.is_set():
                return frame
            changed.set()
            if how == "drop":
                return b""
            if how == "repeat":
                return frame * 2
            body = frame[LENGTH.size :]
            body = body + b"x" if how == "longer" else body[:-1] + bytes([body[-1] ^ 1])
            return LENGTH.pack(len(body)) + body

        between.change = change
        member = Member(between.address, TOKEN, within_s=DEADLINE_S)
        try:
            found = member.join()
        except WrongToken:
            found = member.join()
        assert changed.wait(DEADLINE_S)
        assert (found.node, found.epoch, found.deadline_s) == (0, 0, ANSWER_S)
        if (
            channel := rendezvous.joined(0, 0, 2.0)
        ) is None:  # what it has said last was refused
            found.channel.close()
            found = member.join()
            channel = rendezvous.joined(0, 0, DEADLINE_S)
        closing(found.channel)
        assert channel is not None
        closing(channel)

    def test_cannot_repeat_an_earlier_session(self, rendezvous, between, closing):
        rendezvous.admit(0, 7)
        closing(Member(between.address, TOKEN, 0).join().channel)
        recorded = list(between.said["main"])
        with stranger(
            lambda connection: connection.sendall(b"".join(recorded))
        ) as address:
            assert isinstance(end_of(Member(address, TOKEN, 0)), WrongToken)

    def test_cannot_be_a_node_with_what_a_node_has_said(
        self, rendezvous, between, closing
    ):
        rendezvous.admit(0, 0)
        closing(Member(between.address, TOKEN, 0).join().channel)
        rendezvous.admit(0, 1)
        host, _, port = rendezvous.address.rpartition(":")
        with socket.create_connection((host, int(port)), DEADLINE_S) as connection:
            connection.sendall(b"".join(between.said["node"]))
            with contextlib.suppress(ConnectionResetError):
                assert len(list(frames(connection))) <= HANDSHAKE
        assert rendezvous.joined(0, 1, 0) is None
        wait_until(
            lambda: "does not know the token" in rendezvous.refused(), DEADLINE_S
        )

    def test_cannot_give_one_node_the_offer_of_another(self, rendezvous, closing):
        """Frames of two connections change places."""
        rendezvous.admit(0, 0)
        rendezvous.admit(1, 0)
        host, _, port = rendezvous.address.rpartition(":")
        listener, found = listening(), []
        members = [Member(address_of(listener), TOKEN, node) for node in (0, 1)]
        asking = [
            threading.Thread(target=lambda member=member: found.append(member.join()))
            for member in members
        ]
        for thread in asking:
            thread.start()
        nodes = [closing(listener.accept()[0]) for _ in range(2)]
        mains = [
            closing(socket.create_connection((host, int(port)), DEADLINE_S))
            for _ in range(2)
        ]
        said = [
            (frames(node), frames(main))
            for node, main in zip(nodes, mains, strict=True)
        ]
        for _ in range(HANDSHAKE):
            for (node, main), to_node, to_main in zip(said, nodes, mains, strict=True):
                to_main.sendall(next(node))
                to_node.sendall(next(main))
        for (node, _), to_main in zip(said, mains, strict=True):
            to_main.sendall(next(node))
        offers = [next(main) for _, main in said]
        for offer, node in zip(reversed(offers), nodes, strict=True):
            node.sendall(offer)
        assert [list(node) for node, _ in said] == [[], []], (
            "they have accepted nothing"
        )
        listener.close()  # as if the main process had ended
        for thread in asking:
            thread.join(DEADLINE_S)
        assert found == [None, None]


class TestStrangersAtTheMainProcess:
    @pytest.mark.parametrize(
        "says",
        [
            b"",
            b"GET / HTTP/1.0\r\n\r\n",
            LENGTH.pack(1 << 31),
            LENGTH.pack(40) + MAGIC + bytes(NONCE_BYTES),
        ],
        ids=["nothing", "http", "gigabytes", "half a handshake"],
    )
    def test_do_not_keep_nodes_out(self, rendezvous, closing, monkeypatch, says):
        monkeypatch.setattr(rendezvous_module, "STRANGERS", 2)
        monkeypatch.setattr(rendezvous_module, "ANSWER_S", 0.5)
        host, _, port = rendezvous.address.rpartition(":")
        with contextlib.ExitStack() as open_:
            for _ in range(5):
                connection = open_.enter_context(
                    socket.create_connection((host, int(port)), DEADLINE_S)
                )
                with contextlib.suppress(OSError):  # it was refused at once
                    connection.sendall(says)
            rendezvous.admit(2, 0)
            found = Member(rendezvous.address, TOKEN).join()
            closing(found.channel)
            assert found.node == 2
        assert "the last one, from 127.0.0.1:" in rendezvous.refused()

    def test_that_are_slow_are_ended_for_others(self, rendezvous, closing, monkeypatch):
        """Long before their own deadline, however often they say a little."""
        monkeypatch.setattr(rendezvous_module, "STRANGERS", 2)
        monkeypatch.setattr(rendezvous_module, "ANSWER_S", 1000.0)
        host, _, port = rendezvous.address.rpartition(":")
        with contextlib.ExitStack() as open_:
            for _ in range(2):
                slow = open_.enter_context(
                    socket.create_connection((host, int(port)), DEADLINE_S)
                )
                slow.sendall(b"m")
            rendezvous.admit(2, 0)
            begun = time.monotonic()
            found = Member(rendezvous.address, TOKEN).join()
            closing(found.channel)
            assert found.node == 2
            assert time.monotonic() - begun < DEADLINE_S

    def test_do_not_stop_it_when_there_are_no_threads(
        self, rendezvous, closing, monkeypatch
    ):
        """The system refuses the first three threads; the node tries again."""
        refused = []
        start = threading.Thread.start

        def refusing(thread):
            if thread.name == "muster-joining" and len(refused) < 3:
                refused.append(thread)
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", refusing)
        rendezvous.admit(2, 0)
        found = Member(rendezvous.address, TOKEN).join()
        closing(found.channel)
        assert (found.node, len(refused)) == (2, 3)
        assert rendezvous.stuck() == ""

    def test_are_attended_to_a_few_at_a_time(self, rendezvous, monkeypatch):
        monkeypatch.setattr(rendezvous_module, "STRANGERS", 2)
        host, _, port = rendezvous.address.rpartition(":")
        with contextlib.ExitStack() as open_:
            silent = [
                open_.enter_context(
                    socket.create_connection((host, int(port)), DEADLINE_S)
                )
                for _ in range(5)
            ]
            first = [
                b"" if next(frames(one), b"") == b"" else b"a number" for one in silent
            ]
        assert first == [b"a number"] * 2 + [b""] * 3

    @pytest.mark.parametrize(
        ("header", "why"),
        [
            ((LONGEST, 0, 0), f"sent {LONGEST} bytes where 40 were expected"),
            ((LONGEST + 1, 0, 0), f"announced a message of {LONGEST + 1} "),
            ((0, 1, 1 << 20), "announced a message of 0 and a block of 1048576 bytes"),
        ],
    )
    def test_that_announce_too_much_are_cut_off(self, closing, header, why):
        one, other = (closing(end) for end in socket.socketpair())
        sending = threading.Thread(
            target=lambda: other.sendall(struct.pack("<QQQ", *header) + bytes(LONGEST))
        )
        sending.start()
        with pytest.raises(LinkLost, match=why):
            SocketLink(one, TOKEN, main=True, deadline_s=DEADLINE_S)
        sending.join(DEADLINE_S)

    def test_leave_no_threads_and_no_descriptors(self, monkeypatch):
        monkeypatch.setattr(rendezvous_module, "ANSWER_S", 0.2)
        with contextlib.closing(Rendezvous(1, token=TOKEN)) as rendezvous:
            host, _, port = rendezvous.address.rpartition(":")
            before = {
                thread
                for thread in threading.enumerate()
                if thread.name == "muster-meets"
            }
            for _ in range(20):
                socket.create_connection((host, int(port)), DEADLINE_S).close()
            wait_until(
                lambda: "20 connections were refused" in rendezvous.refused(),
                DEADLINE_S,
            )
            wait_until(lambda: not rendezvous._connections, DEADLINE_S)
            for thread in {
                thread
                for thread in threading.enumerate()
                if thread.name == "muster-meets"
            } - before:
                thread.join(DEADLINE_S)
                assert not thread.is_alive()


class TestTorchrunStore:
    """Whoever reaches torchrun's store writes there."""

    @pytest.fixture
    def store(self, monkeypatch, tmp_path):
        made = dist.TCPStore(
            "127.0.0.1",
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=5),
        )
        place = {
            "RANK": "1",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(made.port),
        }
        for name, value in {
            **place,
            "TORCHELASTIC_RUN_ID": "r",
            "XDG_RUNTIME_DIR": "",
            "TMPDIR": str(tmp_path),
        }.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(torchrun.tempfile, "tempdir", None)
        monkeypatch.setattr(torchrun, "_collectors", iter(range(100)))
        yield made
        torchrun.tempfile.tempdir = None

    @staticmethod
    def key(number: int) -> str:
        return f"muster/rendezvous/r//{number}"

    @pytest.mark.parametrize(
        "written",
        [
            b"",
            b"\xff" * 2000,
            b"[]",
            b'"text"',
            b"[" * 1024,
            json.dumps(["127.0.0.1:1", "/tmp/token-of-a-stranger"]),
            json.dumps(["127.0.0.1:1", None]),
            torchrun._signed(OTHER, "muster/rendezvous/r//0", "127.0.0.1:1"),
            torchrun._signed(TOKEN, "muster/rendezvous/r//1", "127.0.0.1:1"),
            torchrun._signed(TOKEN, "muster/rendezvous/r//0", "127.0.0.1:1").replace(
                ":1", ":2"
            ),
            torchrun._signed(TOKEN, "muster/rendezvous/r//0", "127.0.0.1:1")
            + " " * 2000,
        ],
        ids=[
            "nothing",
            "bytes",
            "list",
            "text",
            "nested",
            "path",
            "none",
            "other token",
            "other key",
            "changed",
            "long",
        ],
    )
    def test_only_what_is_signed_is_followed(self, store, written):
        store.set(self.key(0), written)
        with pytest.raises(
            LinkLost, match="within 0.3 s. Something else has written an address"
        ):
            torchrun.find_rendezvous(TOKEN, 0.3)

    def test_the_right_address_may_come_later(self, store):
        store.set(self.key(0), json.dumps(["127.0.0.1:1", None]))
        found: list[Any] = []
        node = threading.Thread(
            target=lambda: found.append(torchrun.find_rendezvous(TOKEN, DEADLINE_S))
        )
        node.start()
        store.set(self.key(0), torchrun._signed(TOKEN, self.key(0), "127.0.0.1:5"))
        node.join(DEADLINE_S)
        assert found == [("127.0.0.1:5", 0, TOKEN)]

    def test_token_of_one_machine_is_left_for_this_user_alone(
        self, store, monkeypatch, tmp_path
    ):
        monkeypatch.setenv("RANK", "0")
        launcher = torchrun.TorchrunLauncher()
        with contextlib.closing(Rendezvous(1)) as rendezvous:
            launcher.start(0, 0, rendezvous)
            (folder,) = tmp_path.iterdir()
            (file,) = folder.iterdir()
            assert (folder.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (
                0o700,
                0o600,
            )
            assert rendezvous.token not in store.get(self.key(0))
            monkeypatch.setenv("RANK", "1")
            monkeypatch.setattr(torchrun, "_collectors", iter(range(100)))
            assert torchrun.find_rendezvous(None, DEADLINE_S) == (
                rendezvous.address,
                0,
                rendezvous.token,
            )
            with pytest.raises(LinkLost):  # the next collector is another one
                torchrun.find_rendezvous(None, 0.2)
        launcher.close()
        assert not file.exists()

    @pytest.mark.parametrize("how", ["open", "link"])
    def test_folder_of_somebody_else_is_not_used(self, store, tmp_path, how):
        folder = Path(torchrun._own_folder())
        if how == "open":
            folder.chmod(0o755)
        else:
            folder.rmdir()
            (tmp_path / "elsewhere").mkdir(mode=0o700)
            folder.symlink_to(tmp_path / "elsewhere")
        store.set(self.key(0), torchrun._signed(TOKEN, self.key(0), "127.0.0.1:5"))
        with pytest.raises(BadOption, match="only this user can read"):
            torchrun.find_rendezvous(None, DEADLINE_S)
