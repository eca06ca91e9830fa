"""Links are authenticated: whoever does not know the token, or changes, repeats or reorders
messages, is not heard.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from dataclasses import replace

import numpy as np
import pytest

from muster.cluster.link import Block, LinkLost, WrongToken
from muster.cluster.socket_link import MAC_BYTES, MAGIC, SocketLink
from tests.fakes.linked import TOKEN, Frame, linked, read_exactly, read_frame

DEADLINE_S = 20.0


@pytest.fixture
def ends():
    with linked() as both:
        yield both


@pytest.fixture
def stranger(closing):
    """A socket of a stranger, and that of an end."""
    return [closing(end) for end in socket.socketpair()]


def to_the_end(stranger):
    """What is still to be read: whether the other end has closed."""
    with contextlib.suppress(ConnectionResetError):  # it has not read everything
        while stranger.recv(1 << 16):
            pass
    return True


def test_messages_and_blocks_pass_in_both_directions(ends):
    ends.main.send(b"one")
    ends.main.send(b"", Block(np.arange(5, dtype=np.uint8)), 7)
    for _ in range(2):
        ends.to_node.sendall(bytes(read_frame(ends.to_main)))
    assert ends.node.receive().message == b"one"
    got = ends.node.receive()
    assert (got.message, got.tag, got.block.tolist()) == (b"", 7, [0, 1, 2, 3, 4])
    memory = np.zeros(3, np.uint8)
    ends.main.expect(4, memory)
    ends.node.send(b"back", Block(np.full(3, 9, np.uint8)), 4)
    ends.to_main.sendall(bytes(read_frame(ends.to_node)))
    assert ends.main.receive().message == b"back"
    assert memory.tolist() == [9, 9, 9]
    ends.main.close()
    assert to_the_end(ends.to_main)
    ends.to_node.close()
    with pytest.raises(LinkLost, match="closed"):
        ends.node.receive()


def test_both_ends_learn_that_the_other_does_not_know_the_token():
    other = b"another one, as long"
    with linked(node_token=other) as ends:
        assert isinstance(ends.main, WrongToken)
        assert isinstance(ends.node, WrongToken)
        assert to_the_end(ends.to_main)
        assert to_the_end(ends.to_node)
        assert not any(
            text in frame.message for frame in ends.handshake for text in (TOKEN, other)
        )


def test_nothing_but_the_handshake_was_sent_before_both_have_proved(ends):
    assert [len(frame.message) for frame in ends.handshake] == [len(MAGIC) + 32] * 2 + [
        MAC_BYTES
    ] * 2
    for end in (ends.to_main, ends.to_node):
        end.setblocking(False)
        with pytest.raises(BlockingIOError):
            end.recv(1)


def test_own_proof_sent_back_is_none(stranger):
    there, here = stranger

    def reflect():
        for size in (24 + len(MAGIC) + 32, 24 + MAC_BYTES):
            there.sendall(read_exactly(there, size))

    thread = threading.Thread(target=reflect)
    thread.start()
    with pytest.raises(WrongToken):
        SocketLink(here, TOKEN, main=True, deadline_s=DEADLINE_S)
    thread.join(30)


def test_handshake_of_an_earlier_session_repeated_is_refused(ends, stranger):
    there, here = stranger
    for frame in ends.handshake[1::2]:
        there.sendall(bytes(frame))
    with pytest.raises(WrongToken):
        SocketLink(here, TOKEN, main=True, deadline_s=DEADLINE_S)


@pytest.mark.parametrize(
    ("first", "why"),
    [
        (Frame(b"GET / HTTP/1.0"), "sent 14 bytes where 40 were expected"),
        (Frame(b"x" * 40), "another version of this protocol: b'xxxxxxxx'"),
        (Frame(MAGIC + b"n" * 32, 1), "where 40 were expected"),
        (
            Frame(MAGIC + b"n" * 32, 1, b"x"),
            "announced a message of 40 and a block of 1 bytes",
        ),
    ],
)
def test_what_speaks_something_else_is_refused(stranger, first, why):
    there, here = stranger
    there.sendall(bytes(first))
    with pytest.raises(LinkLost, match=why):
        SocketLink(here, TOKEN, main=True, deadline_s=DEADLINE_S)
    assert read_frame(there).message.startswith(MAGIC)
    assert to_the_end(there)


def flipped(frame):
    return replace(frame, message=frame.message[:-1] + bytes([frame.message[-1] ^ 1]))


def flipped_mac(frame):
    return replace(frame, message=bytes([frame.message[0] ^ 1]) + frame.message[1:])


def other_tag(frame):
    return replace(frame, tag=frame.tag + 1)


def shorter_block(frame):
    return replace(frame, block=frame.block[:-1])


def no_block(frame):
    return replace(frame, block=b"")


def longer(frame):
    return replace(frame, message=frame.message + b"x")


def cut(frame):
    return replace(frame, message=frame.message[:10])


@pytest.mark.parametrize(
    "change", [flipped, flipped_mac, other_tag, shorter_block, no_block, longer, cut]
)
def test_changed_message_is_never_returned(ends, change):
    ends.main.send(b"do this", Block(np.ones(9, np.uint8)), 2)
    ends.to_node.sendall(bytes(change(read_frame(ends.to_main))))
    with pytest.raises(LinkLost, match="Message 0 of the main .* made up"):
        ends.node.receive()
    assert to_the_end(ends.to_node)


@pytest.mark.parametrize("order", [(0, 0), (1, 0), (1,)])
def test_repeated_reordered_or_missing_messages_are_refused(ends, order):
    ends.main.send(b"zero")
    ends.main.send(b"one")
    held = [read_frame(ends.to_main) for _ in range(2)]
    for number in order:
        ends.to_node.sendall(bytes(held[number]))
    if order[0] == 0:
        assert ends.node.receive().message == b"zero"
    with pytest.raises(LinkLost, match="repeated"):
        ends.node.receive()


def test_own_message_sent_back_is_refused(ends):
    ends.main.send(b"mine")
    ends.to_main.sendall(bytes(read_frame(ends.to_main)))
    with pytest.raises(LinkLost, match="Message 0 of the node"):
        ends.main.receive()


def test_message_of_another_session_is_refused(ends):
    with linked() as earlier:
        earlier.node.send(b"late")
        ends.to_main.sendall(bytes(read_frame(earlier.to_node)))
    with pytest.raises(LinkLost, match="made up"):
        ends.main.receive()
