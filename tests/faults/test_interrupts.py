"""Ctrl-C, wherever it comes: it is raised once, nothing is lost or doubled, and the next call goes
on.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from tensordict.nn import TensorDictModule

import muster
from muster import (
    Collector,
    MultiAsyncCollector,
    MultiSyncCollector,
    ReplayMemory,
    delayed_interrupt,
)
from muster.testing import CountingEnv, OracleEnv, check_stream
from muster.utils import interrupts
from muster.utils.interrupts import allowed, postponed
from tests.storms import storm
from tests.tools import assert_accounted, assert_balanced
from tests.waits import without_gc

ROOT = Path(muster.__file__).parent
BOOKS = [
    str(ROOT / part)
    for part in (
        "workers",
        "utils/interrupts.py",
        "collectors/engine.py",
        "collectors/batch_views.py",
    )
]


def press():
    signal.raise_signal(signal.SIGINT)


def iterated(collector):
    return collector.next()


def on_demand(collector, **options):
    return collector.collect_batch(n_step=6, **options).batch


# --- the two contexts -----------------------------------------------------------------------------


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


def press_in(*modules: str) -> None:
    """Press Ctrl-C in the last module, which the one before it calls, and so on."""
    call = partial(signal.raise_signal, signal.SIGINT)
    for module in reversed(modules):
        scope = {"__name__": module, "inner": call}
        exec("def call():\n    inner()\n", scope)
        call = scope["call"]
    call()


@pytest.mark.parametrize(
    ("modules", "waits"),
    [
        (("muster.rollout.loop",), True),
        (("muster.memory.ring", "torch.utils", "contextlib"), True),
        (("muster.workers.sync", "namedtuple_FilledSlot"), True),
        (("muster.envs.gym", "gymnasium.core"), False),
        (("muster.envs.gym", "__main__", "numpy.random"), False),
        (("muster.envs.gym", "muster.testing.envs"), False),
        (("torch.utils",), False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_second_one_waits_between_two_lines_of_musters_own(modules, waits):
    done = []
    with pytest.raises(KeyboardInterrupt), postponed():
        press_in("muster.rollout.loop")
        press_in(*modules)
        done.append(1)
        press_in(*modules)
        done.append(2)
    assert done == ([1, 2] if waits else [])


def test_lines_of_musters_own_delay_it_for_some_seconds_only(monkeypatch):
    monkeypatch.setattr(interrupts, "GRACE_S", 0.0)
    press_again = threading.Event()
    with pytest.raises(KeyboardInterrupt), postponed():
        press_in("muster.rollout.loop")
        press_again.wait(60)
        pytest.fail("it is sent again when its time is over")
    with pytest.raises(KeyboardInterrupt), delayed_interrupt():
        press_in("__main__")
        with postponed():
            press_in("muster.rollout.loop")
            press_again.wait(60)
            pytest.fail("the second one starts the time")


@pytest.mark.slow
@pytest.mark.parametrize("frames", [1, 8])
@pytest.mark.parametrize("make", [Collector, MultiSyncCollector])
def test_many_of_them_leave_every_step_once_in_the_memory(make, frames, tmp_path):
    def interrupt(*_) -> None:
        if armed:
            raise KeyboardInterrupt

    armed, interrupted, chance = False, 0, random.Random(frames)
    memory = ReplayMemory(400, seed=0)
    factories = [partial(OracleEnv, tmp_path / "counts", i) for i in range(2)]
    options = {"frames_per_batch": 2 * frames, "replay_buffer": memory, "seed": 1}
    calls = [
        lambda: [collector.next() for _ in range(5)],
        lambda: memory.sample(32),
        lambda: memory[:],
        lambda: collector.collect(n_step=6),
        lambda: collector.state_dict(),
        lambda: memory.state_dict(),
        lambda: collector.reset(),
        lambda: collector.stats(),
    ]
    with make(factories, None, **options) as collector:
        # An import that is interrupted can leave Python's lock of the module.
        for call in calls:
            call()
        with storm(interrupt, signal.SIGINT, together=3, pause_s=2e-3):
            deadline = time.monotonic() + 60
            while interrupted < 80 and time.monotonic() < deadline:
                try:
                    armed = True
                    for call in chance.choices(calls, k=20):
                        call()
                except KeyboardInterrupt:
                    interrupted += 1
                finally:
                    armed = False
                assert_accounted(collector)
                rows = memory[:]
                before, after = rows["observation"], rows["next", "observation"]
                one_step = torch.tensor([0, 0, 0, 1, 1])
                assert (after[:, :5] == before[:, :5] + one_step).all()
                made = before[:, [0, 1, 4]]
                assert len(torch.unique(made, dim=0)) == len(made), "a row is doubled"
        assert interrupted > 10
        collector.next()
        assert_accounted(collector)


def test_contexts_may_be_entered_inside_one_another():
    done = []
    with pytest.raises(KeyboardInterrupt), postponed():
        with postponed():
            press()
        done.append("the inner end is not the end")
        with (
            allowed(),
            postponed(),
        ):  # a collector inside the environment of another one
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


# --- code of the user's ---------------------------------------------------------------------------


REACHED, GO_ON = [], threading.Event()


class Presses(CountingEnv):
    """And calls of a policy or hook, of which one presses Ctrl-C.

    Args:
        where: "step", "reset" or "call".
        at: which of them; 0: none.
        times: how often it presses.
        then: called after that.
    """

    def __init__(self, where, at=1, times=1, then=lambda: None):
        super().__init__()
        self.where, self.left, self.times, self.then = where, at, times, then

    def come_to(self, where):
        if where == self.where:
            self.left -= 1
            if not self.left:
                for _ in range(self.times):
                    press()
                self.then()
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


def acting(at, **options):
    return TensorDictModule(
        Presses("call", at, **options), ["observation"], ["action", "state_value"]
    )


HOOKS = {
    "post_collect_hook": {"post_collect_hook": Presses("call")},
    "postproc": {"postproc": Presses("call")},
    "on_batch": {"on_batch": Presses("call")},
    "on_episode_done": {"on_episode_done": Presses("call")},
}


@pytest.mark.parametrize("what", HOOKS)
def test_hooks_are_interrupted_at_once(what):
    REACHED.clear()
    with Collector(
        partial(CountingEnv, 4), None, frames_per_batch=6, **HOOKS[what]
    ) as collector:
        with pytest.raises(KeyboardInterrupt):
            collector.next()
        assert REACHED == []
        assert collector.next().numel() == 6


IN_ROWS = {
    "step": (
        lambda at, **how: {"create_env_fn": partial(Presses, "step", at, **how)},
        3,
        iterated,
    ),
    "reset": (
        lambda at, **how: {"create_env_fn": partial(Presses, "reset", at, **how)},
        2,
        iterated,
    ),
    "first reset": (
        lambda at, **how: {"create_env_fn": partial(Presses, "reset", at, **how)},
        1,
        iterated,
    ),
    "policy": (lambda at, **how: {"policy": acting(at, **how)}, 5, iterated),
    "policy, called once for its columns": (
        lambda at, **how: {"policy": acting(at, **how)},
        1,
        iterated,
    ),
    "policy, asked for values": (
        lambda at, **how: {"policy": acting(at, **how)},
        7,
        partial(on_demand, bootstrap=True),
    ),
}


def in_rows(what, at, **how):
    options, _, ask = IN_ROWS[what]
    given = {
        "create_env_fn": partial(CountingEnv, 4),
        "policy": None,
        "frames_per_batch": 6,
        "seed": 0,
    }
    return Collector(**given | options(at, **how)), ask


@pytest.mark.parametrize("what", IN_ROWS)
def test_a_row_that_is_being_made_is_completed_first(what):
    twin, ask = in_rows(what, 0)
    with twin:
        expected = [ask(twin).clone() for _ in range(3)]
    REACHED.clear()
    collector, ask = in_rows(what, IN_ROWS[what][1])
    with collector:
        with pytest.raises(KeyboardInterrupt):
            ask(collector)
        assert len(REACHED) == 1
        assert all((ask(collector) == batch).all() for batch in expected)
        stats = collector.stats()
        assert (stats.executed, stats.discarded) == (18, {})


@pytest.mark.parametrize("what", IN_ROWS)
def test_a_second_one_does_not_wait_for_the_row(what):
    REACHED.clear()
    collector, ask = in_rows(what, IN_ROWS[what][1], times=2)
    with collector:
        with pytest.raises(KeyboardInterrupt):
            ask(collector)
        assert REACHED == []
        assert ask(collector).numel() == 6


@pytest.mark.parametrize("what", ["step", "policy"])
def test_a_row_that_is_never_completed_delays_it_for_some_seconds_only(
    what, monkeypatch
):
    monkeypatch.setattr(interrupts, "GRACE_S", 0.1)
    REACHED.clear()
    never = threading.Event()
    collector, ask = in_rows(what, IN_ROWS[what][1], then=partial(never.wait, 60))
    with collector:
        with pytest.raises(KeyboardInterrupt):
            ask(collector)
        assert REACHED == []
        assert ask(collector).numel() == 6


def test_in_a_context_of_the_user_it_waits_for_the_next_call(monkeypatch):
    monkeypatch.setattr(interrupts, "GRACE_S", 0.0)  # of Muster's own contexts
    done = []
    with (
        Collector(partial(CountingEnv, 4), None, frames_per_batch=6) as collector,
        delayed_interrupt(),
    ):
        with pytest.raises(KeyboardInterrupt):
            for _ in collector:
                press()
                done.append("the batch is used")
        assert done == ["the batch is used"]
        assert collector.stats().executed == 6, "nothing more was collected"
        assert collector.next().numel() == 6
        press()
        with pytest.raises(KeyboardInterrupt):
            collector.collect(n_step=6)
        press()
        with pytest.raises(KeyboardInterrupt):
            collector.rollout()


def test_while_the_last_batch_is_used_it_waits_for_the_end_of_the_loop(monkeypatch):
    monkeypatch.setattr(interrupts, "GRACE_S", 0.0)
    with (
        Collector(
            partial(CountingEnv, 4), None, frames_per_batch=6, total_frames=6
        ) as collector,
        delayed_interrupt(),
    ):
        batches = []
        with pytest.raises(KeyboardInterrupt):
            for batch in collector:
                press()
                batches.append(batch)
        assert len(batches) == 1
        assert list(collector) == []


def test_what_is_left_of_a_context_of_the_user_is_raised_at_its_end():
    done = []
    with pytest.raises(KeyboardInterrupt), delayed_interrupt():
        press()
        done.append(1)
    assert done == [1]


class Nested(CountingEnv):
    """Collects with another collector in its third step, in which Ctrl-C is pressed."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def step(self, action):
        self.calls += 1
        with Collector(
            partial(Presses, "step", int(self.calls == 3) * 2), None, frames_per_batch=4
        ) as inner:
            REACHED.append(inner.next().numel())
        return super().step(action)


def test_a_collector_in_an_environment_leaves_it_to_the_one_around_it():
    REACHED.clear()
    with Collector(Nested, None, frames_per_batch=6) as collector:
        with pytest.raises(KeyboardInterrupt):
            collector.next()
        assert REACHED == [4, 4, "step", 4]
        assert collector.next().numel() == 6
        assert collector.stats().executed == 6


class HangsOnServer:
    """A policy that interrupts the collector's process, which waits for it, and goes on when that
    has ended.
    """

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
        assert (
            collector.collect(n_episode=2).n_collected_episodes == 2
        )  # asks workers this and that
        assert collector.next().numel() == 6


class Gated(OracleEnv):
    """Makes a step for every byte that it can read."""

    def __init__(self, path, number, gate):
        super().__init__(path, number)
        self.gate = os.open(gate, os.O_RDWR)

    def step(self, action):
        os.read(self.gate, 1)
        return super().step(action)

    def close(self):
        os.close(self.gate)


@contextlib.contextmanager
def interrupted():
    """A call that waits for what does not happen, until Ctrl-C is pressed."""
    timer = threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        yield
    timer.join()


def test_a_batch_that_interrupted_calls_give_up_is_no_part_of_the_next_one(tmp_path):
    counts, gate = tmp_path / "counts", tmp_path / "gate"
    os.mkfifo(gate)
    factories = [partial(Gated, counts, 0, gate), partial(OracleEnv, counts, 1)]
    steps = os.open(gate, os.O_RDWR)
    with MultiSyncCollector(factories, None, frames_per_batch=8) as collector:
        with interrupted():
            collector.next()
        with interrupted():
            on_demand(collector)  # another length: gives the batch up
        os.write(steps, b"." * 4)  # the rest of that batch
        with interrupted():
            on_demand(collector)
        os.write(steps, b"." * 40)
        batch = on_demand(collector)
        now, after = batch["observation"], batch["next", "observation"]
        assert (after[..., 4] - now[..., 4] == 1).all()
        assert (now[:, 1:, 4] - now[:, :-1, 4] == 1).all()
        stats = collector.stats()
        assert_balanced(stats, in_flight=0)
        assert stats.executed == OracleEnv.read(counts)[:, 2].sum()
    os.close(steps)


# --- the books ------------------------------------------------------------------------------------


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
def test_wherever_it_comes_collecting_goes_on_as_if_nothing_had_been(
    tmp_path, kind, ask
):
    path, batches, pressed = tmp_path / "counts", [], 0
    make, options = KINDS[kind]
    factories = [partial(OracleEnv, path, number) for number in range(2)]
    factories = factories[0] if make is Collector else factories
    with make(factories, None, frames_per_batch=6, seed=1, **options) as collector:
        batches += [ask(collector).clone() for _ in range(3)]
        at = 1
        while True:
            with without_gc(), PressesInBooks(at) as presses:
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
        assert sum(collector.stats().slots.values()) <= (
            6 if make is MultiAsyncCollector else 2
        ), "none got lost"
        batches.append(ask(collector).clone())
    assert pressed > 30
    check_stream(batches)
    stats = collector.stats()
    assert stats.frames == sum(batch.numel() for batch in batches)
    assert_balanced(stats, in_flight=0)
    assert stats.executed == OracleEnv.read(path)[:, 2].sum()
