"""The background thread: its beginning, pauses, weights, errors and end.

Steps wait for events, never for time.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torchrl.modules
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from muster import (
    Collector,
    Execution,
    MultiAsyncCollector,
    MultiSyncCollector,
    ReplayMemory,
    policies,
)
from muster.collectors import background
from muster.errors import BadOption, CollectorBusy, CollectorTimeout, EnvError
from muster.testing import CountingEnv, FaultyEnv, OracleEnv
from muster.testing.oracle import follow
from tests.fakes.buffers import PATIENCE, Extends
from tests.tools import assert_accounted, column, counting
from tests.unit.test_recurrent_states import Recurrent
from tests.warned import warnings_are_errors


class Gate:
    """Lets a given number of calls pass; the rest wait."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._allowed = 0
        self.passed = 0
        self.waiting = 0

    def __call__(self) -> None:
        with self._changed:
            self.waiting += 1
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self.passed < self._allowed, PATIENCE)
            self.waiting -= 1
            self.passed += 1
            self._changed.notify_all()

    def allow(self, calls: int) -> None:
        """Let so many more calls pass."""
        with self._changed:
            self._allowed += calls
            self._changed.notify_all()

    def until(self, condition: Callable[[Gate], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self), PATIENCE)

    def until_blocked(self) -> None:
        """All that were allowed have passed, and the next one waits."""
        self.until(lambda gate: gate.passed == gate._allowed and gate.waiting > 0)


class GatedEnv(CountingEnv):
    """Waits at a gate before every step."""

    def __init__(self, gate: Gate, length: int = 9) -> None:
        super().__init__(length)
        self.gate = gate

    def step(self, action: int) -> Any:
        self.gate()
        return super().step(action)


class FailingEnv(GatedEnv):
    """Raises in every step, after the gate."""

    def step(self, action: int) -> Any:
        super().step(action)
        raise RuntimeError("boom")


class Threshold(nn.Module):
    """Acts 1 where its two weights, which are always equal when published, are positive; -1 would
    be torn.
    """

    def __init__(self, value: float = -1.0) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Parameter(torch.tensor(value)),
            nn.Parameter(torch.tensor(value)),
        )

    def forward(self, obs: torch.Tensor) -> Any:
        extras = {
            "first": self.first.expand(obs.shape[:-1]),
            "second": self.second.expand(obs.shape[:-1]),
        }
        return (self.first > 0).long().expand(obs.shape[:-1]), extras


def failing(at: int = 3, **options: Any) -> Collector:
    """A collector whose environment raises in this step, once."""
    env = FaultyEnv(at, error=lambda: RuntimeError("boom"), length=9)
    return Collector(
        env, None, **{"frames_per_batch": 2, "replay_buffer": Extends(), **options}
    )


def run_to_its_end(collector: Collector) -> None:
    """Start the thread, and wait until it has ended by itself."""
    collector.start()
    thread = collector._background._thread  # type: ignore[union-attr]
    thread.join(PATIENCE)
    assert not thread.is_alive()


@contextmanager
def running(
    policy: Any = None, env: type[GatedEnv] = GatedEnv, **options: Any
) -> Iterator[tuple[Collector, Gate, GatedEnv, Extends]]:
    """A started collector; whatever happens, its thread ends afterwards."""
    buffer, gate = Extends(), Gate()
    gated = env(gate)
    collector = Collector(
        gated, policy, replay_buffer=buffer, **{"frames_per_batch": 2, **options}
    )
    try:
        collector.start()
        yield collector, gate, gated, buffer
    finally:
        gate.allow(1000)
        collector.shutdown(raise_on_error=False)
    assert not collector.is_running()


# --- beginning and end ----------------------------------------------------------------------------


def test_async_shutdown_ends_it_after_the_batch_and_closes_the_environments():
    with running() as (c, gate, env, buffer):
        gate.allow(3)
        gate.until_blocked()
        assert c.is_running()
        gate.allow(1)
        buffer.until(2)
        gate.allow(2)
        c.async_shutdown(PATIENCE)
        assert not c.is_running()
        assert env.closed == 1
        assert all(len(b) == 2 for b in buffer.batches)
        assert c.stats().frames == 2 * len(buffer.batches)
        assert_accounted(c)


def test_start_again_changes_nothing_and_iterating_meanwhile_is_refused():
    with running() as (c, gate, _, _):
        gate.until_blocked()
        thread = c._background
        c.start()
        assert c._background is thread
        with pytest.raises(CollectorBusy, match="async_shutdown"):
            iter(c)
        with pytest.raises(CollectorBusy):
            c.next()


def test_a_hanging_environment_is_a_timeout_and_nothing_is_closed():
    with running() as (c, gate, env, _):
        gate.until_blocked()
        for end in (c.async_shutdown, c.shutdown):
            with pytest.raises(
                CollectorTimeout, match=r"middle of a batch after 0\.01 s"
            ):
                end(timeout=0.01)
        assert env.closed == 0
        assert c.is_running()
        gate.allow(2)
        c.async_shutdown(PATIENCE)
        assert env.closed == 1


def test_a_pause_does_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr(background, "PATIENCE", 0.01)
    with running() as (c, gate, _, buffer):
        gate.until_blocked()
        with pytest.raises(CollectorTimeout, match="may hang"), c.pause():
            raise AssertionError("entered")
        gate.allow(4)
        buffer.until(2)  # what failed to pause does not keep it from going on


def test_groups_whole_episodes_and_single_steps_run_in_the_background_too():
    class Rows(Extends):
        add = Extends.extend

    for options in (
        {"trajs_per_batch": 2},
        {"extend_buffer": False},
        {"split_trajs": True},
    ):
        buffer = Rows()
        with Collector(
            [counting(3)] * 2,
            None,
            frames_per_batch=8,
            total_frames=48,
            replay_buffer=buffer,
            **options,
        ) as c:
            run_to_its_end(c)
            assert buffer.batches
            assert_accounted(c)
            c.async_shutdown()


# --- pauses ---------------------------------------------------------------------------------------


def test_nothing_is_collected_inside_a_pause():
    with running() as (c, gate, env, buffer):
        gate.until_blocked()
        gate.allow(2)
        with c.pause():
            frames = c.stats().frames
            gate.allow(50)
            assert frames == env.executed == 2 * len(buffer.batches)
            assert frames % 2 == 0
            assert c.is_running()
            executed = env.executed
        buffer.until(frames // 2 + 2)
        assert env.executed > executed


def test_a_pause_may_hold_calls_that_pause_and_another_pause():
    with Collector(counting(3), None, frames_per_batch=4, replay_buffer=Extends()) as c:
        c.start()
        with c.pause(), c.pause():
            state = c.state_dict()
            c.set_seed(3)
            c.reset()
            batch = c.rollout()
            assert column(batch, "next", "reward") == [1, 2, 3, 1]
            c.load_state_dict(state)
        assert c.is_running()


USES: list[Callable[[Collector], Any]] = [
    Collector.next,
    Collector.rollout,
    lambda c: c.collect(n_step=4),
    Collector.reset,
    Collector.state_dict,
    Collector.next,
]


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector, MultiAsyncCollector])
def test_a_pause_keeps_every_other_thread_from_collecting(kind):
    options = {} if kind is Collector else {"backend": "threads"}
    envs = [counting(3), counting(3)]
    with kind(envs, None, frames_per_batch=4, **options) as c:
        c.next()
        begun = threading.Event()
        made: list[Any] = []

        def use() -> None:
            begun.set()
            for call in USES:
                made.append(call(c))

        with c.pause():
            other = threading.Thread(target=use)
            other.start()
            assert begun.wait(PATIENCE)
            for _ in range(3):
                c.rollout()  # this thread may
            assert made == []
        other.join(PATIENCE)
        assert len(made) == len(USES)
        assert_accounted(c)


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector, MultiAsyncCollector])
def test_two_threads_that_collect_take_turns(tmp_path, kind):
    path = tmp_path / "counts"
    options = {} if kind is Collector else {"backend": "threads"}
    envs = [partial(OracleEnv, path, number) for number in range(2)]
    errors: list[BaseException] = []
    with kind(envs, None, frames_per_batch=8, seed=0, **options) as c:
        batches: list[Any] = []

        def use(call: Callable[[Collector], Any]) -> None:
            try:
                for _ in range(30):
                    batches.append(call(c).clone())
            except BaseException as error:  # noqa: BLE001 (shown below)
                errors.append(error)

        calls = [Collector.next, lambda c: c.collect_batch(n_step=8)[0]]
        threads = [threading.Thread(target=use, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert not errors
        assert_accounted(c)
        assert sum(batch.numel() for batch in batches) == c.stats().frames
    steps = set()
    for batch in batches:
        rows = batch["observation"].reshape(-1, 6)
        steps |= {tuple(row) for row in rows[:, [0, 1, 4]].tolist()}
        after = follow(tuple(rows.numpy().T), batch["action"].reshape(-1).numpy())[0]
        expected = np.array(after).T
        found = batch["next", "observation"].reshape(-1, 6).numpy()
        np.testing.assert_array_equal(found, expected)
    assert len(steps) == 30 * 2 * 8


def test_a_turn_that_another_thread_keeps_is_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr("muster.collectors.use.PATIENCE", 0.05)
    with Collector(counting(3), None, frames_per_batch=4) as c:
        errors: list[BaseException] = []

        def use() -> None:
            try:
                c.next()
            except CollectorTimeout as error:
                errors.append(error)

        with c.pause():
            other = threading.Thread(target=use)
            other.start()
            other.join(PATIENCE)
        assert "another thread has used this collector" in str(errors[0])
        assert c.next() is not None


# --- errors ---------------------------------------------------------------------------------------

CALLS: list[Callable[[Collector], Any]] = [
    Collector.rollout,
    Collector.reset,
    Collector.next,
    Collector.iterator,
    Collector.state_dict,
    Collector.pause,
    Collector.start,
    Collector.update_policy_weights_,
    Collector.fake_tensordict,
    Collector.async_shutdown,
    Collector.shutdown,
    lambda c: c.set_seed(1),
    lambda c: c.receive_weights(),
    lambda c: c.collect(n_step=2),
    Collector.increment_version,
    Collector.init_updater,
    Collector.disable_profile,
    Collector.final_observations,
    lambda c: c.getattr_env("length"),
    lambda c: c.getattr_policy("__class__"),
    lambda c: c.getattr_rb("batches"),
    lambda c: c.cascade_execute("is_running"),
]


@pytest.mark.parametrize("call", CALLS)
def test_an_error_in_the_thread_reaches_the_user_at_the_next_call_once(call):
    c = failing()
    with pytest.warns(
        RuntimeWarning,
        match="(?s)stopped collecting, because of EnvError: .*boom.*start",
    ):
        run_to_its_end(c)
    assert not c.is_running()
    assert c.stats().ended_by.startswith("EnvError: ")
    assert (
        repr(c),
        c.episodes,
        c.policy_version,
        c.env,
    ) is not None  # looking at it raises nothing
    with pytest.raises(EnvError, match="boom") as caught:
        call(c)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert c.stats().ended_by.startswith("EnvError: ")
    c.shutdown()
    assert c.env.closed == 1


def test_a_loop_that_only_looks_at_the_buffer_is_warned_while_it_does():
    warned = threading.Event()

    def show(message: Any, *_: Any, **__: Any) -> None:
        if "boom" in str(message):
            warned.set()

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        c = failing()
        c.start()
        assert warned.wait(PATIENCE)
    c.shutdown(raise_on_error=False)


def test_filters_that_make_warnings_errors_do_not_hide_the_error():
    with warnings_are_errors():
        c = failing()
        run_to_its_end(c)
    with pytest.raises(EnvError, match="boom"):
        c.rollout()
    c.shutdown()


def test_what_waits_for_the_batch_that_fails_raises_its_error():
    with running(env=FailingEnv) as (c, gate, _, _):
        gate.until_blocked()
        waiting = threading.Event()
        letting = threading.Thread(
            target=lambda: (waiting.wait(PATIENCE), gate.allow(1))
        )
        letting.start()
        pause = c.pause()  # so far nothing has failed
        waiting.set()
        with (
            pytest.warns(RuntimeWarning, match="boom"),
            pytest.raises(EnvError, match="boom"),
            pause,
        ):
            raise AssertionError("the thread is in the middle of a batch")
        letting.join()


def test_an_error_of_a_thread_that_is_being_ended_is_raised_and_not_announced_too(
    recwarn,
):
    with running(env=FailingEnv) as (c, gate, _, _):
        gate.until_blocked()
        with pytest.raises(CollectorTimeout):
            c.async_shutdown(timeout=0.0)
        gate.allow(1)
        with pytest.raises(EnvError, match="boom"):
            c.async_shutdown()
    assert not [w for w in recwarn if "stopped collecting" in str(w.message)]


def test_after_an_error_it_can_be_started_again():
    buffer = Extends()
    with failing(total_frames=8, replay_buffer=buffer) as c:
        run_to_its_end(c)
        with pytest.raises(EnvError):
            c.start()
        run_to_its_end(c)
        assert [column(b, "next", "reward") for b in buffer.batches] == [
            [1, 2],
            [3, 1],
            [2, 3],
            [4, 5],
        ]
        assert_accounted(c)
        assert c.stats().ended_by == ""


def test_leaving_the_context_tells_of_the_error_unless_there_is_another():
    with pytest.raises(EnvError, match="boom"), failing(1) as c:
        run_to_its_end(c)
    with pytest.raises(ZeroDivisionError), failing(1) as c:
        run_to_its_end(c)
        _ = 1 / 0
    c = failing(1)
    c.start()
    c.shutdown(raise_on_error=False)


# --- weights --------------------------------------------------------------------------------------


def test_weights_published_in_the_middle_of_a_batch_act_from_the_next_one():
    policy = Threshold()
    with running(policy, frames_per_batch=4, track_policy_version=True) as (
        c,
        gate,
        _,
        buffer,
    ):
        gate.allow(2)
        gate.until_blocked()
        with torch.no_grad():
            policy.first.fill_(1.0)
            policy.second.fill_(1.0)
        c.update_policy_weights_()
        assert c.policy_version == 1
        gate.allow(6)
        buffer.until(2)
        first, second = buffer.batches[:2]
        assert (first["action"].tolist(), second["action"].tolist()) == (
            [0] * 4,
            [1] * 4,
        )
        assert column(first, "collector", "policy_version") == [0] * 4
        assert column(second, "collector", "policy_version") == [1] * 4


def test_weights_are_never_torn_and_versions_are_those_that_acted():
    buffer = Extends()
    options = {
        "frames_per_batch": 8,
        "track_policy_version": True,
        "execution": Execution(executor=False),
    }
    with Collector(
        counting(5), Threshold(0.0), num_envs=2, replay_buffer=buffer, **options
    ) as c:
        c.start()
        for version in range(1, 200):
            c.update_policy_weights_(Threshold(float(version)))
        buffer.until(len(buffer.batches) + 2)
        c.async_shutdown(PATIENCE)
    for batch in buffer.batches:
        assert torch.equal(batch["first"], batch["second"])
        assert torch.equal(batch["first"].long(), batch["collector", "policy_version"])
        assert len(batch["first"].unique()) == 1, "one version per batch"


class Remembering(nn.Module):
    """Acts with the parity of the number of its calls in the episode, which is its state."""

    def __init__(self, h0: float | None) -> None:
        super().__init__()
        if h0 is not None:
            self.h0 = nn.Parameter(torch.full((1,), h0))

    def forward(self, observation: torch.Tensor, state: Any) -> Any:
        if state is None:
            state = torch.zeros((*observation.shape[:-1], 1))
        return state[..., 0].long() % 2, state + 1


def remembering_module() -> Any:
    """TorchRL's way: a module that gets and returns its state by key."""
    net = torchrl.modules.GRUModule(
        input_size=2,
        hidden_size=3,
        in_keys=["observation", "recurrent_state", "is_init"],
        out_keys=["features", ("next", "recurrent_state")],
    )
    choose = TensorDictModule(
        lambda features: (features.sum(-1) > 0).long(), ["features"], ["action"]
    )
    return TensorDictSequential(net, choose)


REMEMBERING: dict[str, Callable[[], Any]] = {
    "module": lambda: Remembering(None),
    "learned": lambda: policies.recurrent(Remembering(3.0), initial_state="h0"),
    "cell": lambda: Recurrent("cell"),
    "LSTM": lambda: Recurrent("lstm", 2),
    "TorchRL": remembering_module,
    "head": lambda: policies.categorical(nn.Linear(2, 2)),
}


@pytest.mark.parametrize("before", ["nothing", "batches", "a state", "its columns"])
@pytest.mark.parametrize("policy", REMEMBERING)
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_a_policy_goes_on_in_the_background_where_it_was(policy, before, rows):
    """The thread has a copy of it, which gets the states of the episodes that run."""

    def made() -> tuple[Collector, ReplayMemory]:
        torch.manual_seed(0)
        memory = ReplayMemory(
            1000, keep=["recurrent_state"] if policy != "head" else []
        )
        lengths = iter([7, 1000])
        return Collector(
            lambda: CountingEnv(next(lengths)),
            REMEMBERING[policy](),
            num_envs=2,
            frames_per_batch=2 * rows,
            total_frames=2 * 120,
            replay_buffer=memory,
            seed=0,
        ), memory

    twin, expected = made()
    with twin:
        for _ in twin:
            pass
    collector, memory = made()
    with collector:
        if before in ("batches", "a state"):
            for _ in range(40 // rows):
                collector.next()
        elif before == "its columns":
            collector._engine.layout()
        if before == "a state":
            state = collector.state_dict()
            collector, other = made()
            other.load_state_dict(memory.state_dict())
            memory = other
            assert collector.load_state_dict(state, trust=True).exact
        run_to_its_end(collector)
        collector.shutdown()
    assert len(memory) == len(expected) == 240
    names = set(expected[:].keys(True, True)) - {"index"}
    assert names == set(memory[:].keys(True, True)) - {"index"}
    for name in names:
        assert torch.equal(memory[:][name], expected[:][name]), name


# --- the user's own thread ------------------------------------------------------------------------


def test_the_users_gradients_and_threads_are_left_alone():
    seen = []

    def policy(obs: torch.Tensor) -> torch.Tensor:
        seen.append((torch.is_grad_enabled(), torch.get_num_threads()))
        return torch.tensor(0)

    threads = torch.get_num_threads()
    with running(policy, num_threads=threads + 1) as (_, gate, _, buffer):
        gate.allow(3)
        gate.until_blocked()
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        assert torch.get_num_threads() == threads
        gate.allow(1)
        buffer.until(2)
    assert not any(grad for grad, _ in seen)


def test_start_needs_a_buffer():
    with Collector(CountingEnv, None, frames_per_batch=6) as collector:
        with pytest.raises(
            RuntimeError, match="pass replay_buffer="
        ) as raised:  # seed 000: a RuntimeError
            collector.start()
        assert isinstance(raised.value, BadOption)
        assert collector.next().numel() == 6
