"""Ctrl-C, wherever it comes: it is raised once, nothing is lost or doubled, and the next call goes on."""

from __future__ import annotations

import os
import signal
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from tensordict.nn import TensorDictModule

import muster
from muster import Collector, MultiAsyncCollector, MultiSyncCollector
from muster.testing import CountingEnv, OracleEnv, check_stream
from muster.utils.interrupts import allowed, postponed

ROOT = Path(muster.__file__).parent
BOOKS = [
    str(ROOT / part) for part in ("workers", "utils/interrupts.py", "collectors/engine.py", "collectors/batch_views.py")
]


def press():
    signal.raise_signal(signal.SIGINT)


def iterated(collector):
    return collector.next()


def on_demand(collector, **options):
    return collector.collect_batch(n_step=6, **options).batch


# --- the two contexts -------------------------------------------------------------------------------


def test_it_is_raised_at_the_end_of_what_it_would_disturb():
    done = []
    with pytest.raises(KeyboardInterrupt), postponed():
        press()
        done.append(1)
    assert done == [1]


def test_it_is_raised_in_the_next_wait_and_only_there():
    done = []
    with postponed():
        press()
        with pytest.raises(KeyboardInterrupt), allowed():
            done.append(1)
        done.append(2)
    assert done == [2]


def test_in_a_wait_it_is_raised_at_once():
    done = []
    with pytest.raises(KeyboardInterrupt), postponed(), allowed():
        press()
        done.append(1)
    assert done == []


def test_the_second_one_is_raised_at_once():
    done = []
    with pytest.raises(KeyboardInterrupt), postponed():
        press()
        done.append(1)
        press()
        done.append(2)
    assert done == [1]


def test_contexts_may_be_entered_inside_one_another():
    done = []
    with pytest.raises(KeyboardInterrupt), postponed():
        with postponed():
            press()
        done.append("the inner end is not the end")
        with allowed(), postponed():  # a collector inside the environment of another one
            pytest.fail("it was to be raised before")
    assert done == ["the inner end is not the end"]
    done = []
    with postponed(), pytest.raises(KeyboardInterrupt), allowed():
        with postponed():
            press()
            done.append("the inner books are right")
        pytest.fail("the user's code goes on undisturbed")
    assert done == ["the inner books are right"]


def test_the_usual_handler_decides_what_happens():
    got = []
    before = signal.signal(signal.SIGINT, lambda number, frame: got.append(number))
    try:
        mine = signal.getsignal(signal.SIGINT)
        with postponed():
            press()
            assert got == []
        assert got == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is mine
        press()
        assert len(got) == 2
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_is_no_python_handler_is_left_alone(handler):
    before = signal.signal(signal.SIGINT, handler)
    try:
        with postponed(), allowed():
            assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_that_is_set_inside_stays():
    before, mine = signal.getsignal(signal.SIGINT), lambda number, frame: None
    try:
        with postponed():
            signal.signal(signal.SIGINT, mine)
        assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_have_no_part_in_it():
    def waits():
        with postponed(), allowed():
            inside.set()
            leave.wait(10)

    inside, leave, done = threading.Event(), threading.Event(), []
    thread = threading.Thread(target=waits)
    thread.start()
    inside.wait(10)
    try:
        with pytest.raises(KeyboardInterrupt), postponed():
            press()
            done.append(1)
    finally:
        leave.set()
        thread.join()
    assert done == [1]


# --- code of the user's -----------------------------------------------------------------------------


REACHED, GO_ON = [], threading.Event()


class Presses(CountingEnv):
    """And calls of a policy or hook, of which one presses Ctrl-C; nothing that comes after that is to be reached.

    Args:
        where: "step", "reset" or "call".
        at: which of them.
    """

    def __init__(self, where, at=1):
        super().__init__()
        self.where, self.left = where, at

    def come_to(self, where):
        if where == self.where:
            self.left -= 1
            if not self.left:
                press()
                REACHED.append(where)

    def step(self, action):
        self.come_to("step")
        return super().step(action)

    def reset(self, **given):
        self.come_to("reset")
        return super().reset(**given)

    def __call__(self, *given):
        self.come_to("call")
        if isinstance(given[0], torch.Tensor):  # observations
            lead = given[0].shape[:-1]
            return torch.zeros(lead, dtype=torch.int64), torch.zeros((*lead, 1))
        return None


def acting(at):
    return TensorDictModule(Presses("call", at), ["observation"], ["action", "state_value"])


WRITTEN = {
    "step": ({"create_env_fn": partial(Presses, "step", 3)}, iterated),
    "reset": ({"create_env_fn": partial(Presses, "reset", 3)}, iterated),
    "policy": ({"policy": acting(5)}, iterated),
    "policy, called once for its columns": ({"policy": acting(1)}, iterated),
    "policy, asked for values": ({"policy": acting(7)}, partial(on_demand, bootstrap=True)),
    "hook": ({"post_collect_hook": Presses("call")}, iterated),
}


@pytest.mark.parametrize("what", WRITTEN)
def test_what_the_user_has_written_is_interrupted_at_once(what):
    options, ask = WRITTEN[what]
    REACHED.clear()
    given = {"create_env_fn": partial(CountingEnv, 4), "policy": None, "frames_per_batch": 6} | options
    with Collector(**given) as collector:
        with pytest.raises(KeyboardInterrupt):
            ask(collector)
        assert REACHED == []
        assert ask(collector).numel() == 6


class HangsOnServer:
    """A policy that interrupts the collector's process, which waits for it, and goes on when that has ended."""

    def __init__(self):
        self.calls = 0

    def __call__(self, observation):
        self.calls += 1
        if self.calls == 1:
            os.kill(os.getpid(), signal.SIGINT)
            if not GO_ON.wait(30):
                REACHED.append("the answer")
        return torch.zeros(observation.shape[:-1], dtype=torch.int64)


def test_waiting_for_the_server_is_interrupted_at_once():
    REACHED.clear()
    options = {"backend": "threads", "inference": "server", "frames_per_batch": 6}
    with MultiSyncCollector([CountingEnv] * 2, HangsOnServer(), **options) as collector:
        with pytest.raises(KeyboardInterrupt):
            collector.next()
        assert REACHED == []
        GO_ON.set()
        assert collector.next().numel() == 6


class InterruptsCaller(CountingEnv):
    """Interrupts, in its first reset, the process that waits for it."""

    def __init__(self, caller):
        super().__init__()
        self.caller = caller

    def reset(self, **given):
        if not self.seeds:
            os.kill(self.caller, signal.SIGINT)
        return super().reset(**given)


def test_an_answer_that_nobody_waits_for_any_more_is_not_taken_for_another():
    with MultiSyncCollector(
        [partial(InterruptsCaller, os.getpid()), CountingEnv], None, frames_per_batch=6
    ) as collector:
        with pytest.raises(KeyboardInterrupt):
            collector.next()
        assert collector.collect(n_episode=2).n_collected_episodes == 2  # asks workers this and that
        assert collector.next().numel() == 6


# --- the books --------------------------------------------------------------------------------------


class PressesInBooks:
    """Traces this thread, and presses Ctrl-C at a line of those that keep the books."""

    def __init__(self, at):
        self.left = at

    def __enter__(self):
        sys.settrace(self.enter)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    @property
    def done(self):
        return self.left <= 0

    def enter(self, frame, event, argument):
        return self.line if frame.f_code.co_filename.startswith(tuple(BOOKS)) else None

    def line(self, frame, event, argument):
        if event == "line":
            self.left -= 1
            if not self.left:
                sys.settrace(None)
                press()
        return self.line


KINDS = {
    "in_process": (Collector, {}),
    "sync": (MultiSyncCollector, {}),
    "async": (MultiAsyncCollector, {}),
    "async_served": (MultiAsyncCollector, {"inference": "server"}),
    "sync_served": (MultiSyncCollector, {"inference": "server"}),
    "sync_threads": (MultiSyncCollector, {"backend": "threads"}),
    "async_threads": (MultiAsyncCollector, {"backend": "threads"}),
}


@pytest.mark.parametrize("ask", [iterated, on_demand])
@pytest.mark.parametrize("kind", KINDS)
def test_wherever_it_comes_collecting_goes_on_as_if_nothing_had_been(tmp_path, kind, ask):
    path, batches, pressed = tmp_path / "counts", [], 0
    make, options = KINDS[kind]
    factories = [partial(OracleEnv, path, number) for number in range(2)]
    factories = factories[0] if make is Collector else factories
    with make(factories, None, frames_per_batch=6, seed=1, **options) as collector:
        batches += [ask(collector).clone() for _ in range(3)]
        at = 1
        while True:
            with PressesInBooks(at) as presses:
                try:
                    batches.append(ask(collector).clone())
                except KeyboardInterrupt:
                    assert presses.done
                    pressed += 1
                else:
                    assert not presses.done, "it was raised"
                    break  # at the end of all lines
            batches += [ask(collector).clone() for _ in range(2)]
            at += 3
        assert sum(collector.stats().slots.values()) <= (6 if make is MultiAsyncCollector else 2), "none got lost"
        batches.append(ask(collector).clone())
    assert pressed > 30
    check_stream(batches)
    stats = collector.stats()
    assert stats.frames == sum(batch.numel() for batch in batches)
    assert stats.executed == stats.frames + sum(stats.discarded.values()) == OracleEnv.read(path)[:, 2].sum()
    assert stats.in_flight == 0
