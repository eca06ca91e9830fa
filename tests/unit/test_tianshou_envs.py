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


N = 3
ODD_OUTPUTS: list[tuple[Any, str]] = [
    (None, r"NoneType, expected a Batch\(act="),
    ({"act": np.zeros(N, int)}, r"dict, expected a Batch\(act="),
    (Batch(x=np.zeros(N)), r"a Batch with \['x'\], expected a Batch\(act="),
    (Batch(act=None), r"a Batch with \['act'\], expected"),
    (Batch(act=1), "returned ndarray without rows for 3"),
    (Batch(act=np.zeros(2, int)), "2 actions for 3"),
    (Batch(act=np.zeros(N, int), policy=3), "expected a Batch"),
    (
        Batch(act=np.zeros(N, int), policy=Batch(x=1.5)),
        r"policy.x=ndarray of shape \(\)",
    ),
    (Batch(act=np.zeros(N, int), policy=Batch(x="a")), "policy.x=str for 3"),
    (
        Batch(act=np.zeros(N, int), policy=Batch(x=np.zeros(4))),
        r"policy.x=ndarray of shape \(4,\) for 3",
    ),
    (
        Batch(act=np.zeros(N, int), policy=Batch(x=Batch(y=torch.zeros(2, 3)))),
        r"policy.x.y=Tensor of shape \(2, 3\) for 3",
    ),
    (Batch(act=np.zeros(N, int), state=np.zeros(4)), r"state=ndarray of shape \(4,\)"),
    (
        Batch(act=np.zeros(N, int), state=torch.zeros(1)),
        r"state=Tensor of shape \(1,\)",
    ),
    (
        Batch(act=np.zeros(N, int), state=Batch(h=np.zeros((2, N)))),
        r"state.h=ndarray of shape \(2, 3\)",
    ),
]


@pytest.mark.parametrize(("odd", "message"), ODD_OUTPUTS)
def test_a_policy_must_return_what_can_be_stored(odd: Any, message: str) -> None:
    made = collector([Env(9) for _ in range(N)], Numbering(odd, at=3))
    with pytest.raises(BadPolicyOutput, match=message) as caught:
        made.collect(n_step=6 * N)
    assert caught.value.__notes__ == [
        "No environment was stepped since; the next call tries again."
    ]
    assert numbers(made) == [[0, 1], [100, 101], [200, 201]]
    made.collect(n_step=2 * N)
    assert numbers(made) == [[0, 1, 2, 3], [100, 101, 102, 103], [200, 201, 202, 203]]
    assert [counts(made, env) for env in range(N)] == [[0, 1, 2, 3]] * N


class Numbering(Counter):
    """Returns the entry ``x`` and a state, in which environment and time can be read."""

    def forward(self, batch: Any, state: Any = None, **kwargs: Any) -> Any:
        result = super().forward(batch, state, **kwargs)
        if result is not self.odd:
            x = batch.obs[:, 1] + 100 * np.arange(len(batch.obs))
            result.policy = Batch(x=x)
            result.state = x[:, None]
        return result


def numbers(made: Collector) -> list[list[float]]:
    """The policy's entries of each environment, which equal its states."""
    rings = [ring[:] for ring in (made.buffer.buffers)]
    entries = [ring.policy.x.tolist() for ring in rings]
    assert [ring.policy.hidden_state[:, 0].tolist() for ring in rings] == entries
    return entries


@pytest.mark.parametrize("method", ["map_action", "add_exploration_noise"])
def test_so_must_its_other_methods(method: str) -> None:
    policy = Counter()
    made = collector([Env(9), Env(9)], policy, exploration_noise=True)
    made.collect(n_step=4)
    setattr(policy, method, lambda act, *args: np.zeros(3, int))
    with pytest.raises(BadPolicyOutput, match="3 actions for 2"):
        made.collect(n_step=4)
    delattr(policy, method)
    made.collect(n_step=4)
    assert counts(made) == counts(made, 1) == [0, 1, 2, 3]


def returns(**parts: Any) -> Any:
    """Something to replace parts of the result of a step."""
    names = "obs", "reward", "terminated", "truncated", "info"
    return lambda result: tuple(
        parts.get(name, part) for name, part in zip(names, result, strict=True)
    )


class Odd(Counting):
    """Returns something else in step ``at``."""

    def __init__(self, length: int, change: Any, at: int = 3) -> None:
        super().__init__(length)
        self.change, self.at, self.made = change, at, 0

    def step(self, action: Any) -> Any:
        self.made += 1
        result = super().step(action)
        return self.change(result) if self.made == self.at else result


ODD_RESULTS: dict[str, tuple[Any, str]] = {
    "no reward": (returns(reward=None), "the reward None, expected a number"),
    "a key": (returns(info={1: 2}), "has the key 1: Tianshou's Batch takes strings"),
    "a deep key": (returns(info={"a": {"b": {(): 1}}}), r"has the key \(\)"),
    "a listed key": (returns(info={"a": [{0: 1}]}), "has the key 0"),
}
ODD_ANSWERS: dict[str, tuple[Any, str]] = {
    "a word": (returns(reward="x"), "the reward 'x', expected a number"),
    "a complex reward": (returns(reward=1j), "the reward 1j, expected a number"),
    "nothing": (lambda result: None, "returned None from step, expected"),
    "four": (lambda result: result[:4], "from step, expected .*expected 5, got 4"),
    "no info": (returns(info=None), "from step, .* a dictionary: TypeError"),
    "one in an array": (
        returns(reward=np.ones(1)),
        r"reward array\(\[1.\]\), expected",
    ),
    "a word as flag": (returns(terminated="x"), "terminated is 'x', not True or False"),
    "no number": (returns(truncated=np.nan), "truncated is nan, not True or False"),
}


@pytest.mark.parametrize("case", [*ODD_RESULTS, *ODD_ANSWERS])
def test_an_odd_result_of_a_step_leaves_the_rows_before_it(case: str) -> None:
    check_odd(*(ODD_RESULTS | ODD_ANSWERS)[case], lambda venv: venv)


@pytest.mark.parametrize("case", ODD_RESULTS)
def test_so_it_does_in_other_vector_environments(case: str) -> None:
    check_odd(*ODD_RESULTS[case], VectorEnvWrapper)


@pytest.mark.parametrize("reward", ["x", 1j])
def test_rewards_of_a_vector_environment_are_numbers(reward: Any) -> None:
    envs = [Counting(9), Odd(9, returns(reward=reward))]
    venv = DummyVectorEnv([lambda env=env: env for env in envs])
    made = collector(VectorEnvWrapper(venv))
    with pytest.raises(
        BadEnvOutput, match="of VectorEnvWrapper returned rewards of dtype"
    ):
        made.collect(n_step=12)
    assert counts(made) == counts(made, 1) == [0, 1]


def check_odd(change: Any, message: str, wrap: Any) -> None:
    envs = [Counting(9), Odd(9, change)]
    made = collector(wrap(DummyVectorEnv([lambda env=env: env for env in envs])))
    with pytest.raises(BadEnvOutput, match=f"environment 1 of .*{message}"):
        made.collect(n_step=12)
    assert counts(made) == counts(made, 1) == [0, 1]
    assert made.buffer.rew[:2].tolist() == [1 + 1 / 7, 2 + 2 / 7]
    made.collect(n_step=6)
    assert counts(made) == counts(made, 1) == [0, 1, 0, 1, 2]
    assert made.collect_step == len(made.buffer) == 10


def test_so_does_an_odd_info_of_a_reset() -> None:
    class Reset(Counting):
        info: Any = None

        def reset(self, **kwargs: Any) -> Any:
            return super().reset(**kwargs)[0], self.info

    env = Reset(3)
    env.info = {}
    made = collector([env])
    made.collect(n_step=2)
    env.info = {0: 1}
    for use in (made.reset_env, lambda: made.collect(n_step=3)):
        with pytest.raises(BadEnvOutput, match="an info of environment 0 .* key 0"):
            use()
    env.info = {}
    made.collect(n_step=2)
    assert counts(made) == [0, 1, 0, 1]


def test_a_reward_in_an_array_is_a_number_where_it_was_one_before() -> None:
    made = collector([Odd(9, returns(reward=np.array([0.5])))])
    made.collect(n_step=2)
    made.collect(n_step=4)
    assert made.buffer.rew[:6].tolist()[2] == 0.5
    assert made.buffer.rew.shape == (40,)
    assert made.collect(n_episode=1).returns.shape == (1,)


def test_rewards_keep_their_shape() -> None:
    made = collector([Odd(9, returns(reward=np.array([0.5, 1.5])))])
    made.collect(n_step=2)
    with pytest.raises(BadEnvOutput, match=r"reward array\(\[0.5, 1.5\]\), expected a"):
        made.collect(n_step=2)
    made.collect(n_step=2)
    assert counts(made) == [0, 1, 0, 1]


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
