"""Authenticated links: whoever does not know the token, or changes, repeats or reorders messages, is not heard."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from muster.cluster.authenticated_link import MAC_BYTES, MAGIC, WrongToken, authenticate
from muster.cluster.link import Block, LinkLost, Received

TOKEN = b"0123456789abcdef"
END = Received(b"", -1)


@dataclass
class Wire:
    """One end of a link within this process; what it sends can be changed on its way."""

    inbox: queue.Queue
    outbox: queue.Queue
    sent: list = field(default_factory=list)
    change: object = None
    closed: bool = False

    def send(self, message, block=None, tag=0):
        if self.closed:
            raise LinkLost("closed")
        got = Received(message, tag, None if block is None else block.array.copy())
        self.sent.append(got)
        self.outbox.put(self.change(got) if self.change else got)

    def expect(self, tag, memory):
        self.expected = tag, memory

    def receive(self):
        got = self.inbox.get(timeout=20)
        if got is END:
            raise LinkLost("the other end has closed")
        return got

    def close(self):
        if not self.closed:
            self.closed = True
            self.outbox.put(END)


def wires():
    one, two = queue.Queue(), queue.Queue()
    return Wire(one, two), Wire(two, one)


def authenticated(main_wire, node_wire, *, main_token=TOKEN, node_token=TOKEN):
    """Both ends after the handshake; an exception in the place of one that failed."""
    ends = {}

    def run(name, *args, **options):
        try:
            ends[name] = authenticate(*args, **options)
        except LinkLost as error:
            ends[name] = error

    node = threading.Thread(target=run, args=("node", node_wire, node_token), kwargs={"main": False})
    node.start()
    run("main", main_wire, main_token, main=True)
    node.join(30)
    return ends["main"], ends["node"]


def test_messages_and_blocks_pass_in_both_directions():
    main, node = authenticated(*wires())
    main.send(b"one")
    main.send(b"", Block(np.arange(5, dtype=np.uint8)), 7)
    assert node.receive().message == b"one"
    got = node.receive()
    assert (got.message, got.tag, got.block.tolist()) == (b"", 7, [0, 1, 2, 3, 4])
    node.send(b"back")
    assert main.receive().message == b"back"
    memory = np.zeros(3, np.uint8)
    main.expect(4, memory)
    assert main._link.expected == (4, memory)
    main.close()
    with pytest.raises(LinkLost, match="closed"):
        node.receive()


def test_both_ends_learn_that_the_other_does_not_know_the_token():
    main_wire, node_wire = wires()
    other = b"another one, as long"
    main, node = authenticated(main_wire, node_wire, node_token=other)
    assert isinstance(main, WrongToken)
    assert isinstance(node, WrongToken)
    assert main_wire.closed
    assert node_wire.closed
    assert not any(text in got.message for got in main_wire.sent + node_wire.sent for text in (TOKEN, other))


def test_nothing_but_the_handshake_was_sent_before_both_have_proved():
    main_wire, node_wire = wires()
    authenticated(main_wire, node_wire)
    for wire in (main_wire, node_wire):
        assert [len(got.message) for got in wire.sent] == [len(MAGIC) + 32, MAC_BYTES]


def test_own_proof_sent_back_is_none():
    main_wire, node_wire = wires()

    def reflect():
        for _ in range(2):
            node_wire.send(node_wire.receive().message)

    thread = threading.Thread(target=reflect)
    thread.start()
    with pytest.raises(WrongToken):
        authenticate(main_wire, TOKEN, main=True)
    thread.join(30)


def test_handshake_of_an_earlier_session_repeated_is_refused():
    recorded = wires()
    authenticated(*recorded)
    main_wire, node_wire = wires()
    for got in recorded[1].sent:
        node_wire.send(got.message)
    with pytest.raises(WrongToken):
        authenticate(main_wire, TOKEN, main=True)


@pytest.mark.parametrize(
    ("first", "why"),
    [
        (Received(b"GET / HTTP/1.0"), "sent 14 bytes where 40 were expected"),
        (Received(b"x" * 40), "another version of this protocol: b'xxxxxxxx'"),
        (Received(MAGIC + b"n" * 32, 1, np.zeros(1, np.uint8)), "where 40 were expected"),
    ],
)
def test_what_speaks_something_else_is_refused(first, why):
    main_wire, _ = wires()
    main_wire.inbox.put(first)
    with pytest.raises(LinkLost, match=why):
        authenticate(main_wire, TOKEN, main=True)
    assert main_wire.closed


def flipped(got):
    return replace(got, message=got.message[:-1] + bytes([got.message[-1] ^ 1]))


def flipped_mac(got):
    return replace(got, message=bytes([got.message[0] ^ 1]) + got.message[1:])


def other_tag(got):
    return replace(got, tag=got.tag + 1)


def shorter_block(got):
    return replace(got, block=got.block[:-1])


def no_block(got):
    return replace(got, block=None)


def longer(got):
    return replace(got, message=got.message + b"x")


def cut(got):
    return replace(got, message=got.message[:10])


@pytest.mark.parametrize("change", [flipped, flipped_mac, other_tag, shorter_block, no_block, longer, cut])
def test_changed_message_is_never_returned(change):
    main_wire, node_wire = wires()
    main, node = authenticated(main_wire, node_wire)
    main_wire.change = change
    main.send(b"do this", Block(np.ones(9, np.uint8)), 2)
    with pytest.raises(LinkLost, match="Message 0 of the main .* made up"):
        node.receive()
    assert node_wire.closed


@pytest.mark.parametrize("order", [(0, 0), (1, 0), (1,)])
def test_repeated_reordered_or_missing_messages_are_refused(order):
    main_wire, node_wire = wires()
    main, node = authenticated(main_wire, node_wire)
    held = []
    main_wire.change = lambda got: held.append(got) or Received(b"", -2)
    main.send(b"zero")
    main.send(b"one")
    while not node_wire.inbox.empty():
        node_wire.inbox.get()
    for number in order:
        node_wire.inbox.put(held[number])
    if order[0] == 0:
        assert node.receive().message == b"zero"
    with pytest.raises(LinkLost, match="repeated"):
        node.receive()


def test_own_message_sent_back_is_refused():
    main_wire, node_wire = wires()
    main, _ = authenticated(main_wire, node_wire)
    main.send(b"mine")
    main_wire.inbox.put(main_wire.sent[-1])
    with pytest.raises(LinkLost, match="Message 0 of the node"):
        main.receive()


def test_message_of_another_session_is_refused():
    _, earlier = authenticated(*wires())
    earlier.send(b"late")
    main_wire, node_wire = wires()
    main, _ = authenticated(main_wire, node_wire)
    main_wire.inbox.put(earlier._link.sent[-1])
    with pytest.raises(LinkLost, match="made up"):
        main.receive()
