"""A worker as its pool sees it: what a successor is told, whose answer is whose, and which states
follow on which.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from muster.errors import WorkerError
from muster.memory.shared import Arena
from muster.memory.slots import Layout, Slot
from muster.rollout.request import RolloutRequest
from muster.workers.channel import StatusPage
from muster.workers.config import WorkerConfig, WorkerPlace
from muster.workers.failures import pack
from muster.workers.life import WorkerState
from muster.workers.messages import BIRTH, Answer, Tell
from muster.workers.proxy import Shared, WorkerProxy
from muster.workers.requests import Call, LayOut, Seed
from muster.workers.worker import running


class Wire:
    """The parent's end of a channel to a worker that says what a test lets it say."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.said: deque[Any] = deque()

    def fileno(self) -> int:
        return -1

    def send(
        self, message: Any, fds: Sequence[int] = (), timeout: float | None = None
    ) -> None:
        self.sent.append(message)

    def poll(self) -> bool:
        return bool(self.said)

    def receive(self, timeout: float | None = None) -> tuple[Any, list[int]]:
        return self.said.popleft(), []

    def close(self) -> None:
        """There is nothing to release."""


class Gone:
    """A process that ends when it is killed."""

    pid, late, lost = 1, False, ""

    def kill(self) -> None:
        """It has."""

    def close(self) -> None:
        """There is nothing to release."""


class Answering:
    """As a ``SupervisedPool``: the worker answers at once, as the test says; an exception is raised
    instead.
    """

    notes = None  # nobody keeps histories
    counters: Sequence[Any] = ()

    def __init__(self) -> None:
        self.answers: deque[Callable[[int], Sequence[Answer]] | BaseException] = deque()

    def note_change(self) -> None:
        """Nobody listens."""

    def wait_for(
        self, handle: WorkerProxy, ready: Callable[[], bool], start: int | None = None
    ) -> bool:
        answer = (
            self.answers.popleft() if self.answers else lambda number: [Answer(number)]
        )
        if isinstance(answer, BaseException):
            raise answer
        wire = handle.process.channel
        wire.said += answer(wire.sent[-1].number)
        handle.pump()
        assert ready()
        return True

    def count_last_steps(self, handle: WorkerProxy) -> None:
        """Nobody keeps accounts."""


def launch(name: str, preload: bool) -> Any:
    return Gone(), Wire(), StatusPage.create()


@pytest.fixture
def proxy():
    """Of a worker that has its place."""
    arena = Arena.create("muster-test")
    config = WorkerConfig(3, [0], [b""], b"", b"", False, b"", in_thread=True)
    of_pool: Any = SimpleNamespace(timeout=lambda phase: 1.0)
    shared = Shared(of_pool, arena, launch, None, None, None)
    made = WorkerProxy(config, Answering(), shared)
    made.start()
    made.process.channel.said.append(Answer(BIRTH, ["info"]))
    made.pump()
    made.assign(WorkerPlace({0: 0}, 1, False, 5))
    yield made
    arena.close()


def test_a_successor_gets_the_config_that_its_predecessor_would_have_now(proxy):
    proxy.call(Seed(7, True))
    proxy.call(LayOut("policy", {0: 4}))
    requests = [message.args[0] for message in proxy.process.channel.sent[2:]]
    assert requests == [Seed(7, True), LayOut("policy", {0: 4})]
    request = RolloutRequest(1, 0, 0, "policy")
    proxy.submit(request, Slot(Layout(1, 1, ()), "heap"))
    proxy.end()
    proxy.start()
    config, *rest = proxy.process.channel.sent
    assert (config.generation, config.factories) == (1, [b""])
    assert config.place == WorkerPlace(
        {0: 0}, 1, False, 7, True, columns=LayOut("policy", {0: 4})
    )
    assert [message for message in rest if isinstance(message, RolloutRequest)] == [
        request
    ]
    assert len(rest) == 1, "nothing is told again message by message"


def test_an_answer_that_nobody_waits_for_any_more_is_not_taken_for_another(proxy):
    patience = proxy._pool
    late = Answer(2, failure=pack(ValueError("late"), phase="call"))
    patience.answers += [
        KeyboardInterrupt(),
        lambda number: [late, Answer(number, "of this one")],
    ]
    with pytest.raises(KeyboardInterrupt):
        proxy.call(Call(running))
    assert [m.number for m in proxy.process.channel.sent if isinstance(m, Tell)] == [
        1,
        2,
    ]
    assert proxy.call(Call(running)) == ["of this one"]


def test_a_failure_is_raised_where_it_was_asked_for(proxy):
    failure = pack(ValueError("no"), phase="call")
    proxy._pool.answers.append(lambda number: [Answer(number, failure=failure)])
    with pytest.raises(WorkerError, match="no"):
        proxy.call(Call(running))
    assert proxy.call(Call(running)) == [None]


def test_a_state_follows_only_on_those_that_it_can_follow_on(proxy):
    assert proxy.state is WorkerState.RUNNING
    for state in (WorkerState.NEW, WorkerState.RESTARTING, WorkerState.CLOSED):
        with pytest.raises(
            AssertionError, match=f"WorkerProxy 3: RUNNING -> {state.name}"
        ):
            proxy.life.become(state)
    proxy.end()
    assert (proxy.state, proxy.alive) == (WorkerState.DEAD, False)
    proxy.life.become(WorkerState.DROPPED)
    with pytest.raises(AssertionError, match="DROPPED -> RUNNING"):
        proxy.start()
