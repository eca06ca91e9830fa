"""Threads whose policies take turns with the process's random generators."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from muster.errors import MusterError
from muster.rng import GroupRng
from muster.rollout.progress import ALL_ORDERS, PHASE, STOP, Phase, Progress
from muster.workers.turns import Turns
from tests.waits import wait_until


class Actor(threading.Thread):
    """Takes a turn, says so, and stays in it until it is told to end it."""

    def __init__(self, turns: Turns, number: int) -> None:
        super().__init__(daemon=True)
        self.turns, self.rng, self.progress = turns, GroupRng(1, number), Progress()
        self.progress.begin(Phase.STEP)
        self.has_it, self.may_end, self.error = (
            threading.Event(),
            threading.Event(),
            None,
        )
        self.start()

    def run(self) -> None:
        try:
            with self.turns.turn(self.rng, self.progress):
                self.has_it.set()
                self.may_end.wait(30)
        except MusterError as error:
            self.error = error

    def end(self) -> None:
        self.may_end.set()
        self.join(30)
        assert not self.is_alive()

    def installed(self) -> bool:
        return np.random.mtrand.get_bit_generator() is self.rng._legacy.bit_generator


@pytest.fixture(autouse=True)
def users_streams() -> Iterator[None]:
    def now() -> tuple[Any, ...]:
        return (
            np.random.mtrand.get_bit_generator(),
            random.getstate(),
            torch.get_rng_state().tolist(),
        )

    before = now()
    yield
    assert now() == before


def waits(actor: Actor) -> bool:
    return bool(actor.progress.cells[PHASE] == Phase.WAIT)


def two_actors() -> tuple[Turns, Actor, Actor]:
    """The first has the turn, and the second waits for it."""
    turns = Turns()
    first = Actor(turns, 0)
    assert first.has_it.wait(30)
    second = Actor(turns, 1)
    wait_until(lambda: waits(second))
    return turns, first, second


def test_who_waits_says_so_and_comes_next() -> None:
    _, first, second = two_actors()
    assert first.installed()
    assert not second.has_it.is_set()
    assert not waits(first)
    first.end()
    assert second.has_it.wait(30)
    assert second.installed()
    assert second.progress.cells[PHASE] == Phase.STEP
    second.end()
    assert (first.error, second.error) == (None, None)


def test_a_turn_that_was_revoked_ends_without_a_trace() -> None:
    turns, hangs, second = two_actors()
    turns.revoke(second.ident)  # it has none
    assert hangs.installed()
    turns.revoke(hangs.ident)
    assert second.has_it.wait(30)
    third = Actor(turns, 2)
    wait_until(lambda: waits(third))
    hangs.end()
    assert isinstance(hangs.error, MusterError), "its action is not used"
    assert second.installed()
    assert not third.has_it.is_set()
    second.end()
    assert third.has_it.wait(30)
    third.end()
    assert third.error is None


def test_who_is_ended_while_it_waits_does_not_wait_on() -> None:
    turns, first, second = two_actors()
    second.progress.cells[STOP] = ALL_ORDERS
    second.join(30)
    assert isinstance(second.error, MusterError)
    assert first.installed()
    first.end()
    third = Actor(turns, 2)
    assert third.has_it.wait(30)
    third.end()
