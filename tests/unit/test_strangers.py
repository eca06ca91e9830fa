"""Connections that have not shown yet that they may use a port."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from muster.utils.strangers import Strangers


@pytest.fixture
def pairs() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    """Connections: the end of the server, and that of the peer."""
    with ExitStack() as made:
        found = [socket.socketpair() for _ in range(4)]
        for ends in found:
            for end in ends:
                made.enter_context(end)
                end.settimeout(60)
        yield found


def is_open(peer: socket.socket) -> bool:
    peer.setblocking(False)
    try:
        return peer.recv(1) != b""
    except BlockingIOError:
        return True


def open_ones(pairs: Any) -> list[bool]:
    return [is_open(peer) for _, peer in pairs]


def test_a_new_one_takes_the_place_of_the_oldest(pairs):
    strangers = Strangers()
    assert [strangers.add(connection, 2) for connection, _ in pairs] == [True] * 4
    assert open_ones(pairs) == [False, False, True, True]
    assert [strangers.remove(connection) for connection, _ in pairs] == [
        False,
        False,
        True,
        True,
    ]
    assert strangers.remove(pairs[3][0]) is False


def test_one_that_has_shown_itself_keeps_its_place(pairs):
    strangers = Strangers()
    strangers.add(pairs[0][0], 2)
    assert strangers.remove(pairs[0][0])
    for connection, _ in pairs[1:]:
        strangers.add(connection, 2)
    assert open_ones(pairs) == [True, False, True, True]


def test_a_place_can_be_kept_for_a_while(pairs):
    strangers = Strangers(keeps_s=1000.0)
    assert [strangers.add(connection, 2) for connection, _ in pairs] == [
        True,
        True,
        False,
        False,
    ]
    assert open_ones(pairs) == [True] * 4, "the caller closes those that are refused"


def test_late_ones_are_ended_and_the_others_are_not(pairs):
    strangers = Strangers()
    for connection, _ in pairs[:2]:
        strangers.add(connection)
    strangers.end_late(1000.0)
    assert open_ones(pairs) == [True] * 4
    strangers.end_late(-1.0)
    assert open_ones(pairs) == [False, False, True, True]


def test_one_that_is_closed_already_is_no_error(pairs):
    strangers = Strangers()
    strangers.add(pairs[0][0])
    pairs[0][0].close()
    strangers.end_late(-1.0)
    assert not strangers.remove(pairs[0][0])
