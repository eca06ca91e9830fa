"""Errors of everything that the user passes to a collector, beside Tianshou's own collectors.

The same exception object leaves ``collect``, and the buffer has the same rows. ``StopIteration`` in
a reset ends the collection of finite environments. What is counted and what comes afterwards is
Muster's: see docs/tianshou.md.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("tianshou")

from tianshou import data
from tianshou.data import (
    Batch,
    CachedReplayBuffer,
    CollectStats,
    ReplayBuffer,
    VectorReplayBuffer,
)
from tianshou.env import BaseVectorEnv, DummyVectorEnv, SubprocVectorEnv
from tianshou.env.venv_wrappers import VectorEnvWrapper

from muster.compat import tianshou as compat
from muster.errors import BadPolicyOutput, EnvError, MusterError
from tests.parity.test_tianshou_async import one_by_one, scripted
from tests.parity.tianshou_envs import (
    ACTIONS,
    POLICIES,
    Counter,
    Counting,
    plain,
)
from tests.parity.tianshou_tools import assert_same, contents

LENGTHS = 3, 5, 2
ERRORS: dict[str, Callable[[], Exception]] = {
    "plain": lambda: RuntimeError("broken"),
    "stop": StopIteration,
    "muster's": lambda: EnvError("of an environment that uses Muster"),
    "caused": lambda: caused(),
}


class Odd(Exception):
    """Cannot be made with one argument, as unpickling and copying would."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


def caused() -> Exception:
    error = Odd(1, 2)
    error.__cause__ = KeyError("the user's own cause")
    return error


class Bomb:
    """Raises an error in the call of a number, counted over all places of one kind."""

    def __init__(self, error: Exception, at: int) -> None:
        self.error, self.at, self.calls = error, at, 0

    def __call__(self) -> None:
        self.calls += 1
        if self.calls == self.at:
            raise self.error


def never() -> None:
    """Raise nothing."""


class Env(Counting):
    def __init__(self, length: int, bombs: dict[str, Callable[[], None]]) -> None:
        super().__init__(length, infos="all")
        self.bombs = bombs

    def reset(self, **kwargs: Any) -> Any:
        if self.log:  # in the first one there is no collection yet
            self.bombs.get("reset", never)()
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        self.bombs.get("step", never)()
        return super().step(action)

    def render(self) -> None:
        super().render()
        self.bombs.get("render", never)()


class Acting(Counter):
    bombs: dict[str, Callable[[], None]]

    def forward(self, batch: Any, state: Any = None, **kwargs: Any) -> Any:
        self.bombs.get("policy", never)()
        return super().forward(batch, state, **kwargs)

    def map_action(self, act: Any) -> Any:
        self.bombs.get("map_action", never)()
        return super().map_action(act)

    def add_exploration_noise(self, act: Any, batch: Any) -> Any:
        self.bombs.get("noise", never)()
        return act


class Adding(VectorReplayBuffer):
    bombs: dict[str, Callable[[], None]]

    def add(self, batch: Any, buffer_ids: Any = None) -> Any:
        self.bombs.get("add", never)()
        return super().add(batch, buffer_ids)


@dataclass
class Run:
    """What an error has left."""

    raised: BaseException
    buffer: Any
    logs: list[Any]
    counters: tuple[int, int]
    collector: Any


def stats_class(bombs: dict[str, Callable[[], None]]) -> Any:
    class Stats(CollectStats):
        def update_at_step_batch(self, *args: Any, **kwargs: Any) -> None:
            bombs.get("stats of a step", never)()
            super().update_at_step_batch(*args, **kwargs)

        def update_at_episode_done(self, *args: Any, **kwargs: Any) -> None:
            bombs.get("stats of an episode", never)()
            super().update_at_episode_done(*args, **kwargs)

    return Stats


BY_ROW = "step hook", "episode hook", "stats of a step", "stats of an episode", "add"
PLACES = "reset", "step", "render", "policy", "map_action", "noise", *BY_ROW


def run(
    module: Any,
    place: str,
    error: Exception,
    at: int,
    call: dict[str, Any],
    venv: Callable[[Any], Any] = DummyVectorEnv,
    *,
    asynchronous: bool = False,
) -> Run:
    bombs: dict[str, Callable[[], None]] = {}
    envs = [Env(n, bombs) for n in LENGTHS]
    policy = Acting(ACTIONS["discrete"](), "array")
    policy.bombs = bombs
    buffer = Adding(60, 3) if place == "add" else VectorReplayBuffer(60, 3)
    if place == "add":
        buffer.bombs = bombs
    options: dict[str, Any] = {"exploration_noise": True}
    if place == "step hook":
        options["on_step_hook"] = lambda action, step: bombs.get(place, never)()
    if place == "episode hook":
        options["on_episode_done_hook"] = lambda episode: bombs.get(place, never)()
    if place.startswith("stats"):
        options["collect_stats_class"] = stats_class(bombs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = venv([lambda env=env: env for env in envs])
        collector = (module.AsyncCollector if asynchronous else module.Collector)(
            policy, made, buffer, **options
        )
        collector.reset()
        collector.collect(n_step=3)
        bombs[place] = Bomb(error, at)
        render = {"render": 1e-12} if place == "render" else {}
        with pytest.raises(BaseException) as caught:  # noqa: PT011 (which one it is, is what is tested)
            collector.collect(**call, **render)
    bombs.clear()
    counters = int(collector.collect_step), int(collector.collect_episode)
    return Run(
        caught.value,
        contents(collector.buffer),
        [list(env.log) for env in envs],
        counters,
        collector,
    )


CALLS = {"steps": {"n_step": 60}, "episodes": {"n_episode": 12}}


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("at", [1, 2, 5])
@pytest.mark.parametrize("place", PLACES)
def test_the_same_error_leaves_the_same_rows(
    place: str, at: int, call: str, kind: str
) -> None:
    if kind == "muster's" and place in ("policy", "map_action", "noise"):
        pytest.skip("one of an environment")
    errors = [ERRORS[kind]() for _ in range(2)]
    causes = [error.__cause__ for error in errors]
    ours, theirs = (
        run(module, place, error, at, CALLS[call])
        for module, error in zip((compat, data), errors, strict=True)
    )
    assert [ours.raised, theirs.raised] == errors
    assert errors[0].__cause__ is causes[0]
    assert_same(ours.buffer, theirs.buffer)
    assert_same(ours.logs, theirs.logs)
    rows = ours.buffer["memory"]["done"]
    assert ours.counters == (ours.buffer["length"], int(rows.sum()))
    assert (
        theirs.counters[0] == 3
    )  # Tianshou does not count what a call with an error has stored


@pytest.mark.parametrize("wrap", [VectorEnvWrapper, lambda venv: venv])
@pytest.mark.parametrize("place", ["reset", "step", "render"])
def test_so_it_is_with_wrapped_vector_environments(wrap: Any, place: str) -> None:
    errors = [RuntimeError("broken") for _ in range(2)]
    ours, theirs = (
        run(
            module,
            place,
            error,
            4,
            {"n_step": 60},
            lambda fns: wrap(DummyVectorEnv(fns)),
        )
        for module, error in zip((compat, data), errors, strict=True)
    )
    assert [ours.raised, theirs.raised] == errors
    assert_same(ours.buffer, theirs.buffer)
    assert_same(ours.logs, theirs.logs)


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize(
    "place", ["reset", "step", "policy", "map_action", "noise", "add"]
)
@pytest.mark.parametrize("at", [1, 4])
def test_so_it_is_with_the_async_collector(place: str, at: int, kind: str) -> None:
    errors = [ERRORS[kind]() for _ in range(2)]
    ours, theirs = (
        run(
            module,
            place,
            error,
            at,
            {"n_step": 40},
            scripted(one_by_one),
            asynchronous=True,
        )
        for module, error in zip((compat, data), errors, strict=True)
    )
    assert [ours.raised, theirs.raised] == errors
    for part, expected in zip(
        ours.buffer["parts"], theirs.buffer["parts"], strict=True
    ):
        assert_same(part, expected)
    for key in ("obs", "obs_next", "rew", "done", "info", "policy"):
        assert_same(ours.buffer["memory"][key], theirs.buffer["memory"][key], key)
    assert_same(ours.logs, theirs.logs)
    assert ours.counters[0] == ours.buffer["length"]


def test_the_episode_hook_is_not_called_for_an_episode_after_which_the_reset_failed() -> (
    None
):
    seen = []
    for module in (compat, data):
        bombs: dict[str, Callable[[], None]] = {}
        venv = DummyVectorEnv([lambda n=n, bombs=bombs: Env(n, bombs) for n in LENGTHS])
        collector = module.Collector(
            Acting(ACTIONS["discrete"](), "array"), venv, VectorReplayBuffer(60, 3)
        )
        collector.policy.bombs = {}
        notes: list[Any] = []
        collector.set_on_episode_done_hook(
            lambda episode, notes=notes: notes.append(len(episode))
        )
        collector.reset()
        bombs["reset"] = Bomb(RuntimeError("broken"), 2)
        with pytest.raises(RuntimeError, match="broken"):
            collector.collect(n_step=60)
        seen.append(
            (list(notes), len(collector.buffer), int(collector.buffer.done.sum()))
        )
    assert seen[0] == seen[1] == ([2], 9, 2)


def test_the_error_says_where_it_was_raised() -> None:
    for place, at, note in (
        ("step", 2, "Environment 1 of DummyVectorEnv raised this in step"),
        ("reset", 1, "DummyVectorEnv raised this in reset"),
        ("render", 1, "DummyVectorEnv raised this in render"),
        ("policy", 1, "Acting raised this. No environment was stepped since"),
    ):
        found = run(compat, place, RuntimeError("broken"), at, {"n_step": 60})
        assert note in "".join(found.raised.__notes__)
    again = run(compat, "step", found.raised, 1, {"n_step": 60}).raised
    assert sum("raised this in step" in line for line in again.__notes__) == 1
    run(compat, "step", again, 1, {"n_step": 60})
    assert len(set(again.__notes__)) == len(again.__notes__)


@pytest.mark.parametrize("place", ["reset", "step", "render"])
@pytest.mark.parametrize("call", CALLS)
def test_after_an_error_of_an_environment_all_are_reset(place: str, call: str) -> None:
    found = run(compat, place, RuntimeError("broken"), 3, CALLS[call])
    before = found.buffer["length"]
    stats = found.collector.collect(n_step=6)
    assert stats.n_collected_steps == 6
    buffer = found.collector.buffer
    times = [
        part.obs[part._insertion_idx - 2 : part._insertion_idx, 1].tolist()
        for part in buffer.buffers
    ]
    assert times == [[0, 1]] * 3
    hidden = [
        part.policy.hidden_state[part._insertion_idx - 2 : part._insertion_idx, 0]
        for part in buffer.buffers
    ]
    assert np.array(hidden).tolist() == [[1, 2]] * 3
    assert len(buffer) == before + 6
    assert stats.lens.tolist() == [2]


@pytest.mark.parametrize("place", ["policy", "step hook", "episode hook", "add"])
def test_after_any_other_error_the_episodes_go_on(place: str) -> None:
    found = run(compat, place, RuntimeError("broken"), 2, {"n_step": 60})
    found.collector.collect(n_step=12)
    for worker, part in zip(
        found.collector.env.workers, found.collector.buffer.buffers, strict=True
    ):
        steps = sum(method == "step" for method, _ in worker.env.log)
        times = [step % worker.env.length for step in range(steps)]
        if place in ("step hook", "add"):
            del times[2]  # the row that was lost
        assert part.obs[: len(part), 1].tolist() == times
        assert part.obs_next[: len(part), 1].tolist() == [t + 1 for t in times]


@pytest.mark.parametrize("place", ["step hook", "add"])
def test_returns_and_lengths_count_a_step_whose_row_was_lost(place: str) -> None:
    found = run(compat, place, RuntimeError("broken"), 1, {"n_step": 60})
    assert found.collector.collect(n_step=9).lens.tolist() == [3, 2, 5]


class Shape(Counter):
    """Returns something else in call ``at``, which the buffer refuses."""

    at, odd = 5, "act"

    def forward(self, batch: Any, state: Any = None, **kwargs: Any) -> Any:
        result = super().forward(batch, state, **kwargs)
        if len(self.seen) == self.at:
            n = len(batch.obs)
            if self.odd == "act":
                result.act = np.zeros((n, 3), int)
            else:
                result.policy.logp = np.zeros((n, 2))
        return result

    def map_action(self, act: Any) -> Any:
        return np.zeros(len(act), int)


class OddInfo(Counting):
    def step(self, action: Any) -> Any:
        *rest, info = super().step(action)
        return *rest, {
            **info,
            "array": np.zeros(2 if sum(m == "step" for m, _ in self.log) < 5 else 3),
        }


@pytest.mark.parametrize("odd", ["act", "policy", "info"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: VectorReplayBuffer(60, 2),
        lambda: CachedReplayBuffer(ReplayBuffer(30), 2, 9),
    ],
)
@pytest.mark.parametrize("before", [0, 4])
def test_a_row_that_tianshous_buffer_refuses_leaves_those_before_it(
    odd: str, make: Any, before: int
) -> None:
    found = []
    for module in (compat, data):
        policy = Shape(ACTIONS["discrete"](), "none")
        policy.odd, policy.at = odd, 0 if odd == "info" else 5
        kind = OddInfo if odd == "info" else Counting
        venv = DummyVectorEnv(
            [partial(kind, 7, infos="all"), partial(kind, 9, infos="all")]
        )
        collector = module.Collector(policy, venv, make())
        collector.reset()
        if before:
            collector.collect(n_step=before)
        with pytest.raises((ValueError, TypeError, IndexError)) as caught:
            collector.collect(n_step=40)
        found.append(
            (
                type(caught.value),
                contents(collector.buffer)["parts"],
                plain_obs(collector.buffer),
            )
        )
        if module is compat:
            assert collector.collect_step == 8
            if (
                odd != "info"
            ):  # the steps after the refused one count for their episodes
                assert {*collector.collect(n_step=40).lens.tolist()} == {7, 9}
    assert_same(*found)


def plain_obs(buffer: Any) -> Any:
    """The observations of the rows before the refused one."""
    return [
        buffer.obs[begin : begin + 4].copy()
        for begin in (*buffer.subbuffer_edges[:-1],)[-2:]
    ]


def test_a_policy_returns_a_row_for_each_environment_that_has_arrived() -> None:
    class Wide(Counter):
        def forward(self, batch: Any, state: Any = None, **kwargs: Any) -> Any:
            result = super().forward(batch, state, **kwargs)
            if len(self.seen) == 3:
                result.state = np.zeros((3, 2))
            return result

    venv = scripted(lambda wait, waiting: waiting[:2])
    collector = compat.AsyncCollector(
        Wide(ACTIONS["discrete"](), "array"),
        venv([partial(Counting, 9) for _ in range(3)]),
        VectorReplayBuffer(60, 3),
    )
    collector.reset()
    with pytest.raises(BadPolicyOutput, match=r"state=ndarray of shape \(3, 2\) for 2"):
        collector.collect(n_step=12)
    assert collector.collect_step == len(collector.buffer) == 4
    collector.collect(n_step=12)
    for part in collector.buffer.buffers:
        times = np.arange(len(part))
        np.testing.assert_array_equal(part.obs[: len(part), 1], times)
        np.testing.assert_array_equal(
            part.policy.hidden_state[: len(part), 0], times + 1
        )


class Tensors(Counting):
    """In step 5 the info has tensors of which no Batch can be made."""

    def step(self, action: Any) -> Any:
        *rest, info = super().step(action)
        if sum(method == "step" for method, _ in self.log) == 5:
            info["x"] = [torch.zeros(2), torch.zeros(3)]
        return *rest, info


def test_a_row_of_which_no_batch_can_be_made_leaves_those_before_it() -> None:
    found = []
    for module in (compat, data):
        venv = DummyVectorEnv([partial(Counting, 9), partial(Tensors, 9)])
        policy = POLICIES["array"](ACTIONS["discrete"]())
        collector = module.Collector(policy, venv, VectorReplayBuffer(60, 2))
        collector.reset()
        with pytest.raises(TypeError, match="Batch does not support"):
            collector.collect(n_step=20)
        found.append(contents(collector.buffer))
    assert_same(*found)
    assert found[0]["length"] == 8


def test_so_does_a_buffer_with_observations_of_another_shape() -> None:
    found = []
    for module in (compat, data):
        filled, collector = (
            module.Collector(
                POLICIES["none"](ACTIONS["discrete"]()),
                DummyVectorEnv([partial(Counting, 9, obs=obs)] * 3),
                VectorReplayBuffer(60, 3),
            )
            for obs in ("pixels", "array")
        )
        for one in (filled, collector):
            one.reset()
            one.collect(n_step=6)
        collector.buffer = filled.buffer
        with pytest.raises(ValueError, match="could not be broadcast"):
            collector.collect(n_step=12)
        found.append(contents(collector.buffer))
    assert_same(*found)
    assert found[0]["length"] == 9  # Tianshou's buffer counts the row that it refuses


# --- finite environments --------------------------------------------------------------------------


class Samples(Counting):
    """The episodes ``rank``, ``rank + 3``, ...; their observation is their number.

    Afterwards None is observed once.
    """

    def __init__(self, rank: int, episodes: int) -> None:
        super().__init__(1)
        self.mine, self.next = list(range(rank, episodes, 3)), 0

    def reset(self, **kwargs: Any) -> Any:
        if self.next == len(self.mine):
            self.next = 0
            return None, {}
        self.sample = self.mine[self.next]
        self.next += 1
        super().reset(**kwargs)
        self.length = 3 * self.sample % 5 + 1
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        assert self.t < self.length
        *rest, info = super().step(action)
        return *rest, {**info, "sample": self.sample}

    def _observe(self) -> Any:
        return np.array([self.sample, self.t], np.float32)


class Finite(BaseVectorEnv):
    """Leaves exhausted environments out.

    When all are, it begins again, and raises ``StopIteration``.

    This is the vector environment of Tianshou's ``test_env_finite.py`` and of Qlib.
    """

    alive: set[int] = set()  # noqa: RUF012
    blank: Any = None

    def reset(self, env_id: Any = None, **kwargs: Any) -> Any:
        ids = list(self._wrap_id(env_id))
        self.alive = self.alive or set(range(self.env_num))
        asked = [i for i in ids if i in self.alive]
        got = (
            dict(
                zip(
                    asked,
                    zip(*super().reset(asked, **kwargs), strict=True),
                    strict=True,
                )
            )
            if asked
            else {}
        )
        self.alive = self.alive - {i for i, (obs, _) in got.items() if obs is None}
        for obs, info in got.values():
            self.blank = self.blank or (obs, info)
        if not self.alive:
            self.reset()
            raise StopIteration
        found = [
            got[i] if i in got and got[i][0] is not None else self.blank for i in ids
        ]
        return np.stack([obs for obs, _ in found]), np.array(
            [info for _, info in found]
        )

    def step(self, action: Any, id: Any = None) -> Any:
        ids = list(self._wrap_id(id))
        asked = [i for i in ids if i in self.alive]
        acts = np.stack([action[ids.index(i)] for i in asked])
        got = dict(
            zip(asked, zip(*super().step(acts, asked), strict=True), strict=True)
        )
        self.seen += [
            (got[i][4]["sample"], bool(got[i][2] or got[i][3])) for i in asked
        ]
        absent = self.blank[0], 0.0, False, False, {"sample": -1}
        return tuple(
            np.stack(part)
            for part in zip(*(got.get(i, absent) for i in ids), strict=True)
        )


class FiniteDummy(Finite, DummyVectorEnv):
    pass


class FiniteSubproc(Finite, SubprocVectorEnv):
    pass


@pytest.mark.parametrize("make", [FiniteDummy, partial(FiniteSubproc, context="fork")])
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("call", [{"n_step": 10**18}, {"n_episode": 10**9}])
def test_finite_environments_end_the_call_and_begin_again(
    make: Any, by_row: bool, call: Any
) -> None:
    seen = []
    for module in (compat, data):
        venv = make([partial(Samples, rank, 20) for rank in range(3)])
        collector = module.Collector(
            POLICIES["none"](ACTIONS["discrete"]()), venv, VectorReplayBuffer(600, 3)
        )
        if by_row:
            collector.set_on_step_hook(lambda action, step: None)
        venv.seen = []
        collector.reset()
        rounds: list[Any] = []
        for _ in range(3):
            venv.seen = []
            with pytest.raises(StopIteration):
                collector.collect(**call)
            assert sorted(sample for sample, done in venv.seen if done) == list(
                range(20)
            )
            assert len(venv.seen) == sum(3 * sample % 5 + 1 for sample in range(20))
            rounds.append(
                (
                    list(venv.seen),
                    len(collector.buffer),
                    int(collector.buffer.done.sum()),
                )
            )
        if module is compat:
            assert collector.collect_step == len(collector.buffer)
            assert collector.collect_episode == 60
        seen.append(rounds)
        collector.close()
    assert seen[0] == seen[1]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_other_environments_go_on_after_stop_iteration_in_a_reset(
    asynchronous: bool,
) -> None:
    venv = scripted(lambda wait, waiting: waiting) if asynchronous else DummyVectorEnv
    found = run(
        compat,
        "reset",
        StopIteration(),
        1,
        {"n_step": 60},
        venv,
        asynchronous=asynchronous,
    )
    resets = [sum(method == "reset" for method, _ in log) for log in found.logs]
    assert resets == [1, 1, 1]
    found.collector.collect(n_step=3)
    assert [len(worker.env.log) for worker in found.collector.env.workers] == [
        len(log) + more for log, more in zip(found.logs, (2, 1, 2), strict=True)
    ]
    part = found.collector.buffer.buffers[1]
    assert part.obs[: len(part), 1].tolist() == [0, 1, 2]
    part = found.collector.buffer.buffers[2]
    assert part.obs[: len(part), 1].tolist() == [
        0,
        1,
        2,
    ]  # it did not start again: from its last observation on
    assert part.policy.hidden_state[: len(part), 0].tolist() == [1, 2, 1]


@pytest.mark.parametrize("method", ["reset", "reset_env"])
def test_a_reset_of_the_users_that_fails_is_made_again_before_the_next_step(
    method: str,
) -> None:
    found = run(compat, "policy", RuntimeError("broken"), 1, {"n_step": 6})
    env = found.collector.env.workers[1].env
    env.bombs["reset"] = Bomb(OSError("no more"), 2)
    with pytest.raises(OSError, match="no more"):
        getattr(found.collector, method)()
    env.bombs.clear()
    before = len(found.collector.buffer)
    found.collector.collect(n_step=3)
    parts = found.collector.buffer.buffers
    assert [part.obs[part._insertion_idx - 1, 1] for part in parts] == [0, 0, 0]
    assert len(found.collector.buffer) == before + 3


def test_an_error_of_the_reset_after_the_last_episode_is_raised_and_all_is_counted() -> (
    None
):
    counts = []
    for module in (compat, data):
        error = RuntimeError("broken")
        found = run(module, "reset", error, 4, {"n_episode": 3})
        assert found.raised is error
        counts.append((found.counters, found.buffer["length"]))
        if module is compat:
            found.collector.collect(n_step=3)
            assert [
                part.obs[part._insertion_idx - 1, 1]
                for part in found.collector.buffer.buffers
            ] == [0, 0, 0]
    assert counts[0] == counts[1]


def test_the_time_of_a_call_with_an_error_counts() -> None:
    collector = run(compat, "step", RuntimeError("broken"), 2, {"n_step": 60}).collector
    before = collector.collect_time
    collector.env.workers[0].env.bombs["step"] = Bomb(RuntimeError("broken"), 1)
    with pytest.raises(RuntimeError, match="broken"):
        collector.collect(n_step=3)
    assert collector.collect_time > before > 0


def test_an_error_of_muster_stays_one() -> None:
    class Changing(Counting):
        def _observe(self) -> Any:
            return np.zeros(3 if self.t == 2 else 2, np.float32)

    collector = compat.Collector(
        POLICIES["none"](ACTIONS["discrete"]()), DummyVectorEnv([partial(Changing, 5)])
    )
    collector.reset()
    with pytest.raises(MusterError, match=r"\(3,\)"):
        collector.collect(n_step=4)
    assert len(collector.buffer) == 1


@pytest.mark.parametrize(
    ("place", "at"),
    [("step", 4), ("reset", 1), ("policy", 2), ("step hook", 2), ("episode hook", 1)],
)
def test_interrupts_leave_whole_rows(place: str, at: int) -> None:
    found = run(compat, place, KeyboardInterrupt(), at, {"n_step": 60})  # type: ignore[arg-type]
    assert type(found.raised) is KeyboardInterrupt
    assert len({part["_size"] for part in found.buffer["parts"]}) == 1
    assert found.counters[0] == found.buffer["length"]
    assert found.collector.collect(n_step=6).n_collected_steps == 6
    for worker, part in zip(
        found.collector.env.workers, found.collector.buffer.buffers, strict=True
    ):
        assert (
            part.obs[part._insertion_idx - 2 : part._insertion_idx, 1].tolist()[0]
            < worker.env.length
        )


# --- values of any kind ---------------------------------------------------------------------------

VALUES: list[Callable[[random.Random], Any]] = [
    lambda rng: rng.randint(0, 5),
    lambda rng: rng.random(),
    lambda rng: None,
    lambda rng: f"word {rng.randint(0, 3)}",
    lambda rng: [1, 2],
    lambda rng: [1, 2, 3],
    lambda rng: np.array([rng.random(), 1.0]),
    lambda rng: np.float32(rng.random()),
    lambda rng: np.int64(3),
    lambda rng: {"deep": rng.randint(0, 3)},
    lambda rng: True,
    lambda rng: np.array(2),
    lambda rng: np.arange(3),
]


class Anything(Counting):
    """Infos with entries that come and go, and sometimes change their kind."""

    def __init__(
        self, length: int, rng: random.Random, missing: float, changing: float
    ) -> None:
        super().__init__(length)
        self.rng, self.missing, self.changing = rng, missing, changing
        self.kinds = {name: rng.choice(VALUES) for name in "abc"}

    def step(self, action: Any) -> Any:
        obs, _, terminated, truncated, _ = super().step(action)
        return obs, self.rng.choice([0, 1.5, 2]), terminated, truncated, self._info()

    def _info(self) -> dict[str, Any]:
        info = {}
        for name, kind in self.kinds.items():
            if self.rng.random() >= self.missing:
                info[name] = (
                    self.rng.choice(VALUES)
                    if self.rng.random() < self.changing
                    else kind
                )(self.rng)
        return info


class Fickle(Counter):
    """Entries and actions whose dtype and shape change sometimes."""

    def __init__(self, rng: random.Random, changing: float) -> None:
        super().__init__(ACTIONS["discrete"](), "none")
        self.rng, self.changing = rng, changing

    def forward(self, batch: Any, state: Any = None, **kwargs: Any) -> Any:
        n, changes = len(batch.obs), lambda: self.rng.random() < self.changing
        result = Batch(act=np.zeros(n, np.int32 if changes() else int))
        if not changes():
            result.policy = Batch(
                value=np.full((n, 2), 1) if changes() else np.full(n, self.rng.random())
            )
        return result


class OneRow(Counter):
    """Returns an entry of one row, in some calls or in all: Tianshou stores it for all environments."""

    def __init__(self, make: Any, calls: Any) -> None:
        super().__init__(ACTIONS["discrete"](), "array")
        self.make, self.calls = make, calls

    def forward(self, batch: Any, state: Any = None, **kwargs: Any) -> Any:
        result = super().forward(batch, state, **kwargs)
        k = len(self.seen)
        rows = 1 if k in self.calls else len(batch.obs)
        result.policy.x = self.make([[k, -k]] * rows)
        return result


@pytest.mark.parametrize("calls", [{3}, {1}, range(99), {2, 3, 7}])
@pytest.mark.parametrize("make", [np.array, torch.tensor])
@pytest.mark.parametrize("by_row", [False, True])
def test_one_row_for_all_environments_is_stored_as_by_tianshou(
    make: Any, calls: Any, by_row: bool
) -> None:
    found = []
    for module in (compat, data):
        notes: list[Any] = []
        venv = DummyVectorEnv([partial(Counting, n) for n in LENGTHS])
        collector = module.Collector(
            OneRow(make, calls), venv, VectorReplayBuffer(60, 3)
        )
        if by_row:
            collector.set_on_step_hook(
                lambda action, step, notes=notes: notes.append(
                    (plain(action.policy_entry), plain(step.policy))
                )
            )
        collector.reset()
        collector.collect(n_step=12)
        collector.collect(n_episode=4)
        found.append((contents(collector.buffer), notes))
    assert_same(*found)
    assert found[0][0]["memory"]["policy"]["x"][2].tolist() == [3, -3]


@pytest.mark.parametrize("seed", range(60))
def test_values_of_any_kind_are_stored_or_refused_as_by_tianshou(seed: int) -> None:
    found = []
    for module in (compat, data):
        rng = random.Random(seed)
        n = rng.randint(1, 3)
        missing, changing, fickle = (
            rng.choice([0, 0.3]),
            rng.choice([0, 0.05, 0.3]),
            rng.choice([0, 0, 0.1]),
        )
        buffers = [
            lambda n=n: VectorReplayBuffer(60 * n, n),
            lambda n=n: VectorReplayBuffer(7 * n, n),
            lambda n=n: CachedReplayBuffer(ReplayBuffer(40), n, 12),
        ]
        envs = [
            Anything(2 + i, random.Random(seed * 10 + i), missing, changing)
            for i in range(n)
        ]
        buffer = rng.choice(buffers)()
        collector = module.Collector(
            Fickle(random.Random(seed), fickle),
            DummyVectorEnv([lambda env=env: env for env in envs]),
            buffer,
        )
        collector.reset()
        results: list[Any] = []
        try:
            for _ in range(4):
                call = rng.choice(
                    [{"n_step": rng.randint(1, 12)}, {"n_episode": rng.randint(1, 5)}]
                )
                results.append(int(collector.collect(**call).n_collected_steps))
        except (
            TypeError,
            ValueError,
        ):  # of the entry that Tianshou stores first, whichever that is in its set
            found.append((results, "refused", contents(buffer)["parts"]))
        else:
            found.append((results, "", contents(buffer)))
    assert_same(*found)
