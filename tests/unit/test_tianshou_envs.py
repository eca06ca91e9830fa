"""Tianshou's vector environments as an env batch, and its policies in it."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

pytest.importorskip("tianshou")
from tianshou.algorithm.algorithm_base import Policy
from tianshou.data import Batch, VectorReplayBuffer
from tianshou.data.collector import _HACKY_create_info_batch
from tianshou.env import DummyVectorEnv
from tianshou.env.venv_wrappers import VectorEnvWrapper

from muster.compat.tianshou import Collector
from muster.compat.tianshou.policies import info_batch
from muster.errors import BadEnvOutput, BadPolicyOutput
from tests.parity.tianshou_envs import Counting


class Env(Counting):
    """Counts; at the given step it returns ``odd`` instead of an observation, or raises it."""

    def __init__(
        self, length: int, odd: Any = None, at: int = 0, **kwargs: Any
    ) -> None:
        super().__init__(length, **kwargs)
        self.odd, self.at, self.made = odd, at, 0

    def step(self, action: Any) -> Any:
        self.made += 1
        if self.made == self.at and isinstance(self.odd, BaseException):
            raise self.odd
        obs, *rest = super().step(action)
        return (self.odd if self.made == self.at else obs), *rest


class Counter(Policy):
    """Acts with the number of its call; raises ``odd`` in call ``at``."""

    def __init__(self, odd: Any = None, at: int = 0) -> None:
        super().__init__(action_space=spaces.Discrete(5), action_bound_method=None)
        self.odd, self.at, self.calls, self.seen = odd, at, 0, []

    def forward(self, batch: Any, state: Any = None, **kwargs: Any) -> Any:
        self.calls += 1
        self.seen.append(batch.obs)
        if self.calls == self.at:
            if isinstance(self.odd, BaseException):
                raise self.odd
            return self.odd
        return Batch(act=np.full(len(batch.obs), self.calls % 5))


def collector(envs: Any, policy: Any = None, **kwargs: Any) -> Collector:
    venv = (
        DummyVectorEnv([lambda env=env: env for env in envs])
        if isinstance(envs, list)
        else envs
    )
    made = Collector(
        policy or Counter(),
        venv,
        VectorReplayBuffer(40 * len(venv), len(venv)),
        **kwargs,
    )
    made.reset()
    return made


def counts(made: Collector, env: int = 0) -> list[int]:
    """The second entry of all observations of an environment."""
    ring = made.buffer.buffers[env]
    return ring.obs[: len(ring), 1].astype(int).tolist()


def test_a_reset_is_made_as_soon_as_an_episode_ends_and_once_more_after_the_last_one() -> (
    None
):
    envs = [Env(2), Env(3)]
    made = collector(envs)
    made.collect(n_episode=2)
    assert [sum(method == "reset" for method, _ in env.log) for env in envs] == [3, 3]
    assert [len(env.log) for env in envs] == [5, 6]


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_observation_of_another_kind_is_an_error_that_says_whose(
    wrapped: bool,
) -> None:
    for odd in (
        np.zeros(3, np.float32),
        np.zeros((), np.float32),
        np.zeros(2, complex),
    ):
        envs = DummyVectorEnv(
            [lambda odd=odd: Env(9), lambda odd=odd: Env(9, odd, at=2)]
        )
        made = collector(VectorEnvWrapper(envs) if wrapped else envs)
        with pytest.raises(BadEnvOutput, match=r"environment [01] of .*Vector.*\(2,\)"):
            made.collect(n_step=8)
        assert [counts(made, env) for env in (0, 1)] == [[0], [0]]


def test_observations_keep_the_dtype_of_the_reset() -> None:
    made = collector([Env(9, np.array([3.5, 4.25]), at=2)])
    made.collect(n_step=3)
    assert made.buffer.obs.dtype == made.buffer.obs_next.dtype == np.float32
    assert made.buffer.obs_next[1].tolist() == [3.5, 4.25]


@pytest.mark.parametrize("wrapped", [False, True])
def test_steps_before_an_error_are_in_the_buffer_and_the_environments_begin_anew(
    wrapped: bool,
) -> None:
    envs = [Env(9), Env(9, RuntimeError("broken"), at=3)]
    venv = DummyVectorEnv([lambda env=env: env for env in envs])
    made = collector(VectorEnvWrapper(venv) if wrapped else venv)
    with pytest.raises(RuntimeError, match="^broken") as caught:
        made.collect(n_step=10)
    assert type(caught.value) is RuntimeError
    assert "raised this in step" in caught.value.__notes__[0]
    assert (made.collect_step, made.collect_episode) == (4, 0)
    assert counts(made) == counts(made, 1) == [0, 1]
    assert made.buffer.obs_next[:2, 1].tolist() == [1, 2]
    assert made.collect(n_episode=2).lens.tolist() == [9, 9]
    assert counts(made)[2:] == list(range(9))


def test_a_failing_reset_is_an_error_too() -> None:
    class Unwilling(Counting):
        def reset(self, **kwargs: Any) -> Any:
            if self.log:
                raise OSError("no more")
            return super().reset(**kwargs)

    made = collector([Unwilling(2)])
    with pytest.raises(OSError, match="^no more") as caught:
        made.collect(n_step=4)
    assert "raised this in reset" in caught.value.__notes__[0]
    assert counts(made) == [0, 1]  # the step that ended the episode is complete


def test_after_an_error_of_the_policy_its_call_is_repeated() -> None:
    made = collector([Env(9)], Counter(ZeroDivisionError("by zero"), at=3))
    with pytest.raises(ZeroDivisionError, match="^by zero") as caught:
        made.collect(n_step=5)
    assert (
        "Counter raised this. No environment was stepped since"
        in caught.value.__notes__[0]
    )
    assert counts(made) == [0, 1]
    made.collect(n_step=2)
    assert counts(made) == [0, 1, 2, 3]
    assert made.buffer.obs_next[:4, 1].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (Batch(act=np.zeros(2, int)), "2 actions for 1"),
        (Batch(act=np.zeros(1, int), policy=3), "expected a Batch"),
    ],
)
def test_a_policy_must_return_what_can_be_stored(odd: Any, message: str) -> None:
    made = collector([Env(9)], Counter(odd, at=2))
    with pytest.raises(BadPolicyOutput, match=message):
        made.collect(n_step=5)
    assert counts(made) == [0]


def test_an_interrupt_leaves_whole_rows() -> None:
    made = collector([Env(9), Env(9, KeyboardInterrupt(), at=4)])
    with pytest.raises(KeyboardInterrupt):
        made.collect(n_step=10)
    assert counts(made) == counts(made, 1) == [0, 1, 2]


def test_a_policy_may_keep_what_it_has_seen() -> None:
    policy = Counter()
    made = collector([Env(9), Env(4)], policy)
    for _ in range(3):
        made.collect(n_step=4)
    assert [obs[:, 1].tolist() for obs in policy.seen] == [[t, t % 4] for t in range(6)]


def test_what_environments_change_later_is_stored_as_it_was() -> None:
    class Reusing(gymnasium.Env[Any, Any]):
        observation_space = spaces.Dict({"x": spaces.Box(0, 99, (1,))})
        action_space = spaces.Discrete(5)

        def __init__(self) -> None:
            self.obs, self.info = (
                {"x": np.zeros(1)},
                {"deep": {"x": np.zeros(2)}, "list": [0]},
            )

        def reset(self, **kwargs: Any) -> Any:
            self.obs["x"][:] = 0
            return self.obs, self.info

        def step(self, action: Any) -> Any:
            self.obs["x"] += 1
            self.info["deep"]["x"] += 1
            self.info["list"][0] += 1
            return self.obs, 0.0, False, False, self.info

    made = collector([Reusing()])
    made.collect(n_step=4)
    assert made.buffer.obs.x[:4, 0].tolist() == [0, 1, 2, 3]
    assert made.buffer.obs_next.x[:4, 0].tolist() == [1, 2, 3, 4]
    assert made.buffer.info.deep.x[:4].tolist() == [[1, 1], [2, 2], [3, 3], [4, 4]]
    assert made.buffer.info.list[:4].tolist() == [[1], [2], [3], [4]]


@pytest.mark.parametrize(
    "infos",
    [
        [{}, {}],
        [{"env_id": 1}, {"env_id": 4}, {}],
        [{"a": 1}, {"a": 2}],
        [
            {},
            {"a": 1, "env_id": 3, "deep": {"x": 0.5}},
            {"a": 2, "env_id": 1, "deep": {"x": 1.5}},
        ],
        [{"a": 1, "env_id": 0}, {"env_id": 1}],
        [{"env_id": 3}, {"a": 1}],
        [{"name": "x", "env_id": 0}, {}],
    ],
)
def test_a_policy_sees_the_infos_that_tianshou_shows_it(
    infos: list[dict[str, Any]],
) -> None:
    theirs = _HACKY_create_info_batch(np.array(infos, object))
    ours = info_batch(infos)
    assert ours == theirs
    assert {key: getattr(ours[key], "dtype", None) for key in ours.get_keys()} == {
        key: getattr(theirs[key], "dtype", None) for key in theirs.get_keys()
    }


def test_a_policy_may_reuse_its_memory() -> None:
    class Reusing(Counter):
        def forward(self, batch: Any, state: Any = None, **kwargs: Any) -> Any:
            if state is None:
                state, self.act = (
                    np.zeros(len(batch.obs)),
                    np.zeros(len(batch.obs), int),
                )
                self.value = torch.zeros(len(batch.obs))
            state += 1
            self.act += 1
            self.value += 1
            return Batch(act=self.act, state=state, policy=Batch(value=self.value))

    made = collector([Env(9), Env(9)], Reusing())
    made.collect(n_step=6)
    for stored in (
        made.buffer.act,
        made.buffer.policy.hidden_state,
        made.buffer.policy.value,
    ):
        assert stored[:3].tolist() == stored[40:43].tolist() == [1, 2, 3]
