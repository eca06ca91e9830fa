"""Vector environments give the transitions of the same environments stepped one by one, in every
autoreset mode.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space

from muster import Collector, ReplayMemory
from muster.errors import BadEnvOutput, BadOption, EnvError, UnsupportedEnv
from muster.testing import ChainEnv, CountingEnv, FaultyEnv, SpaceEnv
from tests.tools import (
    assert_accounted,
    assert_chain,
    assert_same,
    collect,
    column,
    counting,
    recorded,
)

MODES = list(AutoresetMode)
KINDS = {"sync": SyncVectorEnv, "async": partial(AsyncVectorEnv, context="fork")}


class NestedEnv(ChainEnv):
    """A ``ChainEnv`` whose observation is a Dict with a Tuple in it."""

    def __init__(self) -> None:
        super().__init__()
        parts = spaces.Tuple((spaces.Discrete(5), spaces.Box(0, 1, (2,))))
        self.observation_space = spaces.Dict(
            {"chain": self.observation_space, "parts": parts}
        )

    def _nested(self, obs: Any) -> Any:
        return {
            "chain": obs,
            "parts": (np.int64(obs[1] % 5), np.full(2, obs[2] / 2**31, np.float32)),
        }

    def reset(self, **options: Any) -> Any:
        obs, info = super().reset(**options)
        return self._nested(obs), info

    def step(self, action: Any) -> Any:
        obs, *rest = super().step(action)
        return self._nested(obs), *rest


def only(part: str) -> type[NestedEnv]:
    class Part(NestedEnv):
        def __init__(self) -> None:
            super().__init__()
            self.observation_space = self.observation_space[part]

        def _nested(self, obs: Any) -> Any:
            return super()._nested(obs)[part]

    return Part


# --- Gymnasium's own ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "env", [ChainEnv, NestedEnv, only("parts")], ids=["box", "dict", "tuple"]
)
def test_every_mode_gives_the_transitions_of_single_environments(kind, env, mode):
    options = {"frames_per_batch": 90, "seed": 0, "batches": 2}
    alone = collect(env, num_envs=3, **options)
    assert_same(
        collect(lambda: KINDS[kind]([env] * 3, autoreset_mode=mode), **options), alone
    )
    if env is ChainEnv:
        assert_chain(alone)
        assert alone["next", "terminated"].any()
        assert alone["next", "truncated"].any()


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_cut_episodes_are_reset_in_every_mode(mode):
    """``max_frames_per_traj`` resets environments that do not know of it."""
    options = {
        "frames_per_batch": 90,
        "seed": 0,
        "batches": 2,
        "max_frames_per_traj": 3,
    }
    alone = collect(ChainEnv, num_envs=3, **options)
    assert_chain(alone)
    assert_same(
        collect(lambda: SyncVectorEnv([ChainEnv] * 3, autoreset_mode=mode), **options),
        alone,
    )


def test_num_envs_cannot_multiply_a_vector_environment():
    def make() -> Any:
        return SyncVectorEnv([counting()] * 2)

    with pytest.raises(
        BadOption, match="SyncVectorEnv is a batch of environments already"
    ):
        Collector(make, None, num_envs=2, frames_per_batch=4)
    assert collect(make(), num_envs=2, frames_per_batch=4).batch_size == (2, 2)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_resetting_some_seeds_and_resets_only_those(mode):
    options = {"frames_per_batch": 8, "seed": 0}
    make = counting(9, noise=True)
    vector = Collector(
        lambda: SyncVectorEnv([make] * 2, autoreset_mode=mode), None, **options
    )
    with vector, Collector(make, None, num_envs=2, **options) as stacked:
        for collector in (vector, stacked):
            collector.rollout()
            collector.reset(1)
        got, expected = vector.rollout(), stacked.rollout()
    assert_same(got, expected)
    assert column(got, "next", "reward") == [[5, 6, 7, 8], [1, 2, 3, 4]]


def test_composite_actions_reach_vector_environments():
    space = spaces.Dict(
        {
            "a": spaces.Discrete(10),
            "b": spaces.Tuple((spaces.Box(-1, 1, (2,)), spaces.MultiBinary(2))),
        }
    )
    factory, made = recorded(lambda: SpaceEnv(spaces.Discrete(2), space))
    batch = collect(
        lambda: SyncVectorEnv([factory] * 2), frames_per_batch=6, validate="full"
    )
    for b, env in enumerate(env for env in made if env.actions):
        for t, action in enumerate(env.actions):
            assert space.contains(action)
            assert batch["action", "a"][b, t] == action["a"]
            assert batch["action", "b", "0"][b, t].tolist() == action["b"][0].tolist()


def test_text_observations_of_vector_environments():
    factory, made = recorded(
        lambda: SpaceEnv(spaces.Text(6), spaces.Discrete(2), length=50)
    )
    batch = collect(
        lambda: SyncVectorEnv([factory] * 2), frames_per_batch=6, validate="full"
    )
    seen = [env.observations for env in made if env.observations]
    assert [list(row) for row in batch["observation"]] == [row[:3] for row in seen]


def test_forgetful_async_environments_are_refused():
    def make() -> Any:
        return AsyncVectorEnv([counting()] * 2, shared_memory=False, context="fork")

    with pytest.raises(UnsupportedEnv, match="shared_memory=True"):
        Collector(make, None, frames_per_batch=4)


# --- ALE ------------------------------------------------------------------------------------------


@pytest.fixture
def pong():
    """A factory of tiny Pong vector environments whose episodes are short, and of the same one by
    one.
    """
    from ale_py.vector_env import AtariVectorEnv

    def make(num_envs: int = 2, mode: AutoresetMode = AutoresetMode.NEXT_STEP) -> Any:
        return AtariVectorEnv(
            "pong",
            num_envs,
            num_threads=1,
            img_height=8,
            img_width=8,
            stack_num=2,
            noop_max=5,
            max_num_frames_per_episode=60,
            autoreset_mode=mode,
        )

    return make


def test_both_modes_of_atari_give_the_same_transitions(pong):
    options = {"frames_per_batch": 80, "seed": 3}
    first = collect(partial(pong, mode=AutoresetMode.NEXT_STEP), **options)
    assert_same(first, collect(partial(pong, mode=AutoresetMode.SAME_STEP), **options))
    assert first["observation"].dtype == torch.uint8
    assert first["next", "done"].sum() >= 4
    done = first["next", "done"][..., 0]
    going_on = ~done[:, :-1]
    assert torch.equal(
        first["next", "observation"][:, :-1][going_on],
        first["observation"][:, 1:][going_on],
    )
    last = first["next", "observation"][:, :-1][done[:, :-1]]
    assert not torch.equal(last, first["observation"][:, 1:][done[:, :-1]]), (
        "the last observation, not the reset one"
    )


# --- third parties --------------------------------------------------------------------------------


class ThirdParty(VectorEnv[Any, Any, Any]):
    """Counting environments in a vector environment Muster has never seen.

    Args:
        mode: declared in the metadata; None declares nothing.
        heeds_mask: ``reset`` leaves environments outside ``reset_mask`` alone.
        tells_final: ``info["final_obs"]`` in SAME_STEP mode.
        reuse: observations are one array that changes in place.
        output: replaces parts of what the step number ``at`` returns.
    """

    def __init__(
        self,
        mode: AutoresetMode | None,
        *,
        num_envs: int = 2,
        heeds_mask: bool = True,
        tells_final: bool = True,
        reuse: bool = False,
        nan: bool = False,
        output: dict[int, Any] | None = None,
        at: int = -1,
    ) -> None:
        self.num_envs, self.mode = num_envs, mode
        self.metadata = {} if mode is None else {"autoreset_mode": mode}
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.single_action_space = spaces.Discrete(2)
        self.heeds_mask, self.tells_final, self.reuse, self.nan = (
            heeds_mask,
            tells_final,
            reuse,
            nan,
        )
        self.output, self.at, self.steps = output or {}, at, 0
        self.t = np.zeros(num_envs, np.int64)
        self.pending = np.zeros(num_envs, bool)
        self._buffer = np.zeros((num_envs, 2), np.float32)

    def _lengths(self) -> Any:
        return np.arange(2, 2 + self.num_envs)

    def _observe(self) -> Any:
        self._buffer[:, 0], self._buffer[:, 1] = (
            np.nan if self.nan else self._lengths(),
            self.t,
        )
        return self._buffer if self.reuse else self._buffer.copy()

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        mask = (options or {}).get("reset_mask") if self.heeds_mask else None
        chosen = slice(None) if mask is None else mask
        self.t[chosen], self.pending[chosen] = 0, False
        return self._observe(), {}

    def step(self, actions: Any) -> Any:
        self.t = np.where(self.pending, 0, self.t + 1)
        done = self.t >= self._lengths()
        reward = np.where(self.pending, 0.0, self.t)
        info: dict[str, Any] = {}
        obs = self._observe()
        if self.mode is AutoresetMode.SAME_STEP and done.any():
            if self.tells_final:
                info = {"final_obs": obs.copy(), "_final_obs": done}
            self.t[done] = 0
            obs = self._observe()
        elif self.mode is AutoresetMode.NEXT_STEP:
            self.pending = done
        values = [obs, reward, done, np.zeros_like(done), info]
        if self.steps == self.at:
            values = [self.output.get(i, value) for i, value in enumerate(values)]
        self.steps += 1
        return tuple(values)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("nan", [False, True])
def test_a_third_partys_vector_environment(mode, reuse, nan):
    batch = collect(lambda: ThirdParty(mode, reuse=reuse, nan=nan), frames_per_batch=12)
    assert column(batch, "next", "reward") == [[1, 2, 1, 2, 1, 2], [1, 2, 3, 1, 2, 3]]
    assert batch["observation"][..., 1].tolist() == [
        [0, 1, 0, 1, 0, 1],
        [0, 1, 2, 0, 1, 2],
    ]
    assert batch["next", "observation"][..., 1].tolist() == [
        [1, 2, 1, 2, 1, 2],
        [1, 2, 3, 1, 2, 3],
    ]


def test_a_mode_that_is_not_declared_is_not_guessed():
    with pytest.raises(
        UnsupportedEnv,
        match=r"ThirdParty does not say how it resets: set metadata\['autoreset_mode'\]",
    ):
        Collector(lambda: ThirdParty(None), None, frames_per_batch=4)


@pytest.mark.parametrize(
    "mode", [AutoresetMode.DISABLED, AutoresetMode.NEXT_STEP], ids=str
)
@pytest.mark.parametrize("reuse", [False, True])
def test_an_environment_that_resets_others_too_is_found_out(mode, reuse):
    collector = Collector(
        lambda: ThirdParty(mode, heeds_mask=False, reuse=reuse),
        None,
        frames_per_batch=12,
    )
    with (
        collector,
        pytest.raises(UnsupportedEnv, match="also reset others.*reset_mask"),
    ):
        collector.rollout()


def vectorized(wrap: Any = lambda env: env, num_envs: int = 3, **options: Any) -> Any:
    """A factory of what ``gymnasium.make_vec`` returns for CartPole by default, which ignores
    ``reset_mask``.
    """
    return lambda: wrap(gymnasium.make_vec("CartPole-v1", num_envs, **options))


def assert_cartpole(batch: Any, limit: int = 500) -> None:
    """Every row is a transition of the single environment, and rows follow each other."""
    single = gymnasium.make("CartPole-v1").unwrapped
    before, after, done = (
        batch["observation"],
        batch["next", "observation"],
        batch["next", "done"][..., 0],
    )
    for b, t in np.ndindex(*batch.shape):
        single.reset()
        single.state = tuple(before[b, t].double().tolist())
        obs, reward, terminated, _, _ = single.step(int(batch["action"][b, t]))
        assert np.allclose(obs, after[b, t].numpy(), atol=1e-5)
        assert batch["next", "reward"][b, t] == reward == 1
        assert batch["next", "terminated"][b, t] == terminated
    assert before[:, 1:][~done[:, :-1]].equal(after[:, :-1][~done[:, :-1]])
    first = torch.cat([before[:, 0], before[:, 1:][done[:, :-1]]])
    assert first.abs().max() <= 0.05
    assert len(first.unique(dim=0)) == len(first)
    ids, counts = batch["collector", "traj_ids"].unique(return_counts=True)
    assert counts.max() <= limit
    assert len(ids) == len(first)
    assert done.sum() >= 5


@pytest.mark.parametrize(
    "wrap",
    [
        lambda env: env,
        gymnasium.wrappers.vector.RecordEpisodeStatistics,
        lambda env: gymnasium.wrappers.vector.ClipReward(
            gymnasium.wrappers.vector.RecordEpisodeStatistics(env), -1, 1
        ),
    ],
    ids=["bare", "wrapped", "wrapped twice"],
)
def test_gymnasiums_vectorized_cartpole(wrap):
    """It resets in the step after an end, whatever ``reset_mask`` says; that step is no row."""
    batch = collect(
        vectorized(wrap), frames_per_batch=150, seed=0, batches=2, validate="full"
    )
    assert_cartpole(batch)
    assert_same(
        batch, collect(vectorized(wrap), frames_per_batch=60, seed=0, batches=5)
    )


def batch_of(mode: AutoresetMode, B: int = 2, seed: int = 0) -> VectorEnv:
    """Episodes end after 3 and after 50 steps."""
    lengths = (3, 50)[:B]
    makers = [partial(CountingEnv, length) for length in lengths]
    return SyncVectorEnv(makers, autoreset_mode=mode)


def rewards_of(make: Any, frames: int = 60) -> Any:
    return collect(make, frames_per_batch=frames, seed=0)["next", "reward"][..., 0]


@pytest.mark.parametrize(
    ("wrapper", "mode"),
    [
        ("NormalizeReward", AutoresetMode.NEXT_STEP),
        ("NormalizeReward", AutoresetMode.DISABLED),
        ("NormalizeObservation", AutoresetMode.NEXT_STEP),  # takes no other
    ],
)
@pytest.mark.parametrize("outside", [False, True])
def test_wrappers_that_forget_all_environments_are_refused(wrapper, mode, outside):
    def make() -> VectorEnv:
        env = getattr(gymnasium.wrappers.vector, wrapper)(batch_of(mode))
        return gymnasium.wrappers.vector.ClipReward(env, -1, 1) if outside else env

    with pytest.raises(UnsupportedEnv, match=rf"wrapper {wrapper} .*Wrap the single"):
        Collector(make, None, frames_per_batch=8)


def test_a_wrapper_that_forgets_all_is_right_where_all_or_none_are_reset():
    wrap = gymnasium.wrappers.vector.NormalizeReward
    for mode in (AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED):
        alone = rewards_of(lambda mode=mode: wrap(batch_of(mode, B=1)))
        assert alone.isfinite().all()
    env = wrap(batch_of(AutoresetMode.SAME_STEP))
    env.reset(seed=0)
    expected = [env.step(np.zeros(2, int))[1] for _ in range(30)]
    found = rewards_of(lambda: wrap(batch_of(AutoresetMode.SAME_STEP)))
    torch.testing.assert_close(found, torch.from_numpy(np.stack(expected, 1)).float())


def test_a_wrapper_that_forgets_all_is_refused_when_one_environment_is_cut():
    wrap = gymnasium.wrappers.vector.NormalizeReward
    make = lambda: wrap(batch_of(AutoresetMode.SAME_STEP))  # noqa: E731
    with Collector(make, None, frames_per_batch=20, seed=0) as collector:
        collector.rollout()
        with pytest.raises(UnsupportedEnv, match="NormalizeReward"):
            collector.reset(1)
            collector.rollout()


class Returns(gymnasium.vector.VectorWrapper):
    """Adds up rewards, as programs do themselves; the reward is the sum so far."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.total = np.zeros(self.num_envs)
        return super().reset(seed=seed, options=options)

    def step(self, actions: Any) -> Any:
        obs, reward, *flags, info = super().step(actions)
        self.total += reward
        return obs, self.total.copy(), *flags, info


class ReturnsByMask(Returns):
    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        mask = (options or {}).get("reset_mask")
        if mask is None:
            return super().reset(seed=seed, options=options)
        self.total[mask] = 0
        return self.env.reset(seed=seed, options=options)


class ReturnsInPlace(Returns):
    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.total = np.zeros(self.num_envs)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.total[:] = 0
        return self.env.reset(seed=seed, options=options)


class ReturnsFilled(ReturnsInPlace):
    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.total.fill(0)
        return self.env.reset(seed=seed, options=options)


class Telling(gymnasium.vector.VectorWrapper):
    """Keeps nothing."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        obs, info = self.env.reset(seed=seed, options=options)
        info["envs"] = self.num_envs
        return obs, info


@pytest.mark.parametrize("wrapper", [Returns, ReturnsInPlace, ReturnsFilled])
def test_what_a_wrapper_keeps_is_seen_in_its_reset(wrapper):
    with pytest.warns(
        UserWarning, match=rf"{wrapper.__name__}.reset\(\) does not read"
    ):
        rewards_of(lambda: wrapper(batch_of(AutoresetMode.NEXT_STEP)))
    rewards_of(lambda: Telling(batch_of(AutoresetMode.NEXT_STEP)))  # no warning


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
def test_a_wrapper_of_the_users_that_does_not_read_the_mask_is_warned_of(mode):
    with pytest.warns(UserWarning, match=r"Returns.reset\(\) does not read"):
        rewards_of(lambda: Returns(batch_of(mode)))
    found = rewards_of(lambda: ReturnsByMask(batch_of(mode)))  # warnings are errors
    single = [rewards_of(partial(CountingEnv, length), 30) for length in (3, 50)]
    expected = []
    for rewards, length in zip(single, (3, 50), strict=True):
        parts = rewards.reshape(-1).split(length)
        expected.append(torch.cat([part.cumsum(0) for part in parts]))
    torch.testing.assert_close(found, torch.stack(expected))


def test_gymnasiums_vectorized_cartpole_alone_is_the_same_environment():
    """With one environment, all resets are of all: its own loop without the steps that are resets."""
    env = vectorized(num_envs=1)()
    batch = collect(vectorized(num_envs=1), frames_per_batch=90, seed=4)
    obs, _ = env.reset(seed=4)
    pending, rows = False, []
    while len(rows) < 90:
        after, _, terminated, _, _ = env.step(batch["action"][:, len(rows)].numpy())
        if not pending:
            rows.append(obs[0])
        obs, pending = after, bool(terminated[0])
    assert batch["observation"][0].equal(torch.from_numpy(np.stack(rows)))


def test_gymnasiums_vectorized_cartpole_is_cut_and_reset_alone():
    batch = collect(vectorized(), frames_per_batch=150, seed=0, max_frames_per_traj=7)
    assert_cartpole(batch, limit=7)
    with Collector(vectorized(), None, frames_per_batch=12, seed=0) as collector:
        first = collector.rollout()
        collector.reset(1)
        second = collector.rollout()
        assert_accounted(collector)
    going_on = (
        second["collector", "traj_ids"][:, 0] == first["collector", "traj_ids"][:, -1]
    )
    assert going_on.tolist() == [True, False, True]
    assert second["observation"][[0, 2], 0].equal(
        first["next", "observation"][[0, 2], -1]
    )
    assert second["observation"][1, 0].abs().max() <= 0.05


def test_gymnasiums_vectorized_cartpole_has_its_own_limit():
    batch = collect(vectorized(max_episode_steps=20), frames_per_batch=900, seed=0)
    assert_cartpole(batch, limit=20)
    ids, counts = batch["collector", "traj_ids"].unique(return_counts=True)
    truncated = batch["next", "truncated"]
    ended = ids[torch.isin(ids, batch["collector", "traj_ids"][truncated[..., 0]])]
    assert counts[torch.isin(ids, ended)].tolist() == [20] * len(ended)
    assert truncated.sum() > 9


def test_reset_options_of_gymnasiums_vectorized_cartpole():
    with Collector(vectorized(), None, frames_per_batch=30, seed=0) as collector:
        collector.rollout()
        collector.reset(options={"low": 0.01, "high": 0.02})
        assert (collector.rollout()["observation"][:, 0] >= 0.01).all()


def test_unknown_last_observations_are_flagged_and_not_guessed():
    batch = collect(
        lambda: ThirdParty(AutoresetMode.SAME_STEP, tells_final=False),
        frames_per_batch=12,
    )
    assert column(batch, "collector", "next_obs_valid") == [
        [True, False, True, False, True, False],
        [True, True, False, True, True, False],
    ]
    unknown = ~batch["collector", "next_obs_valid"]
    ended = batch["next", "terminated"].squeeze(-1)
    after = batch["next", "observation"]
    assert (after[unknown & ended] == 0).all(), "no target needs it"
    assert after[unknown & ~ended].isnan().all(), "it cannot be used unnoticed"
    assert not after[~unknown].isnan().any()
    assert batch["observation"][..., 1].tolist() == [
        [0, 1, 0, 1, 0, 1],
        [0, 1, 2, 0, 1, 2],
    ]


# --- bad output -----------------------------------------------------------------------------------

ROWS = np.zeros((2, 2), np.float32)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (
            {0: np.zeros((2, 3), np.float32)},
            r"observation is an array of shape \(2, 3\).*says shape \(2, 2\)",
        ),
        ({0: np.full((2, 2), 1e39)}, r"array of dtype float64.*dtype float32"),
        ({0: np.zeros((2, 2), complex)}, r"array of dtype complex128.*dtype float32"),
        ({0: None}, "observation is NoneType"),
        ({0: ROWS.tolist()}, "observation is list"),
        ({1: np.zeros(3)}, r"reward has shape \(3,\).*expected \(2,\) and a number"),
        ({1: None}, "reward has shape"),
        ({1: np.array(["a", "b"])}, "reward has shape .* dtype <U1"),
        ({2: np.array([0.0, 1.0])}, "terminated has shape .* float64.*bool"),
        ({2: "no"}, "terminated has shape"),
        ({3: np.array([0, 2])}, "truncated has shape .* int64.*bool"),
        ({3: None}, "truncated has shape"),
    ],
    ids=str,
)
@pytest.mark.parametrize("at", [0, 3, 5])
def test_bad_output_is_named_and_nothing_before_it_is_lost(output, message, at):
    make = lambda: ThirdParty(AutoresetMode.DISABLED, output=output, at=at)  # noqa: E731
    with Collector(make, None, frames_per_batch=12) as collector:
        with pytest.raises(BadEnvOutput, match=message) as caught:
            collector.rollout()
        assert "ThirdParty" in str(caught.value)
        assert collector.stats().in_flight == 2 * at
        assert collector.stats().discarded == {"bad_env_output": 2}
        batch = collector.rollout()
        assert_accounted(collector)
    expected = [[1, 2, 1, 2, 1, 2], [1, 2, 3, 1, 2, 3]]
    again = [row[:at] + row[: 6 - at] for row in expected]
    assert column(batch, "next", "reward") == again
    if at:
        assert batch["next", "done"][:, at - 1].all()


@pytest.mark.parametrize(
    ("output", "warning"),
    [
        (
            {0: np.array([[2.0, 1], [3, 1]])},
            "ThirdParty: observation has dtype float64, but its space says float32",
        ),
        ({0: np.array([[2, 1], [3, 1]])}, "ThirdParty: observation has dtype int64"),
        (
            {1: np.array([[1.0], [1.0]])},
            r"ThirdParty: rewards have shape \(2, 1\), expected \(2,\)",
        ),
    ],
    ids=str,
)
def test_what_keeps_its_values_is_cast_with_one_warning(output, warning):
    make = lambda: ThirdParty(AutoresetMode.DISABLED, output=output, at=0)  # noqa: E731
    with pytest.warns(UserWarning, match=warning) as caught:
        batch = collect(make, frames_per_batch=12)
    assert len(caught) == 1
    assert column(batch, "next", "reward") == [[1, 2, 1, 2, 1, 2], [1, 2, 3, 1, 2, 3]]
    assert column(batch, "next", "observation")[1] == [[3, 1], [3, 2], [3, 3]] * 2
    with Collector(make, None, frames_per_batch=12, validate="full") as collector:
        with pytest.raises(BadEnvOutput, match="expected|does not cast"):
            collector.rollout()
        assert_accounted(collector)


def test_final_observations_are_cast_too():
    class Wide(ThirdParty):
        def step(self, actions: Any) -> Any:
            *values, info = super().step(actions)
            if info:
                info["final_obs"] = info["final_obs"].astype(np.float64)
            return *values, info

    with pytest.warns(UserWarning, match="final_obs observation has dtype float64"):
        batch = collect(lambda: Wide(AutoresetMode.SAME_STEP), frames_per_batch=12)
    assert column(batch, "next", "observation")[0] == [[2, 1], [2, 2]] * 3


FINALS: dict[str, Any] = {"an array": lambda obs: obs, "a list": list, "a tuple": tuple}


@pytest.mark.parametrize("form", FINALS)
@pytest.mark.parametrize("mask", [np.array, list])
def test_a_mask_says_which_final_observations_are_there(form, mask):
    """Those of environment 0 are not."""

    class Partly(ThirdParty):
        def step(self, actions: Any) -> Any:
            *values, info = super().step(actions)
            if info:
                there = info["_final_obs"] & [False, True]
                given = np.where(there[:, None], info["final_obs"], -7)
                info = {"final_obs": FINALS[form](given), "_final_obs": mask(there)}
            return *values, info

    batch = collect(lambda: Partly(AutoresetMode.SAME_STEP), frames_per_batch=12)
    done = batch["next", "done"][..., 0]
    known = batch["collector", "next_obs_valid"]
    assert torch.equal(known[0], ~done[0])
    assert known[1].all()
    assert column(batch, "next", "observation")[1] == [[3, 1], [3, 2], [3, 3]] * 2
    assert not (batch["next", "observation"] == -7).any()


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("kind", ["dict", "tuple"])
def test_final_observations_in_the_form_of_a_step(kind, each):
    """Or one for each environment: with ``each``, in a tuple."""

    def formed(obs: Any) -> Any:
        wide = obs.astype(np.float64)
        return {"a": obs, "b": wide} if kind == "dict" else (obs, wide)

    class Formed(ThirdParty):
        def __init__(self) -> None:
            super().__init__(AutoresetMode.SAME_STEP)
            box = self.single_observation_space
            wide = spaces.Box(-np.inf, np.inf, box.shape, np.float64)
            single: Any = spaces.Tuple((box, wide))
            if kind == "dict":
                single = spaces.Dict({"a": box, "b": wide})
            self.single_observation_space = single
            self.observation_space = batch_space(single, self.num_envs)

        def reset(self, **options: Any) -> Any:
            obs, info = super().reset(**options)
            return formed(obs), info

        def step(self, actions: Any) -> Any:
            obs, *values, info = super().step(actions)
            if info:
                final = info["final_obs"]
                info["final_obs"] = tuple(map(formed, final)) if each else formed(final)
            return formed(obs), *values, info

    batch = collect(Formed, frames_per_batch=12)
    keys = (
        ("a", "b") if kind == "dict" else (("observation", "0"), ("observation", "1"))
    )
    for key in keys:
        name = key if isinstance(key, tuple) else (key,)
        assert column(batch, "next", *name)[1] == [[3, 1], [3, 2], [3, 3]] * 2
    assert batch["collector", "next_obs_valid"].all()


def test_an_error_inside_a_vector_environment():
    make = lambda: SyncVectorEnv(  # noqa: E731
        [counting(), lambda: FaultyEnv(2, error=lambda: OSError("boom"))]
    )
    with Collector(make, None, frames_per_batch=8) as collector:
        with pytest.raises(
            EnvError, match=r"SyncVectorEnv.step raised OSError: boom"
        ) as caught:
            collector.rollout()
        assert isinstance(caught.value.__cause__, OSError)
        batch = collector.rollout()
        assert_accounted(collector)
    assert column(batch, "next", "reward") == [[1, 2, 1, 2]] * 2
    assert column(batch, "next", "truncated") == [[False, True, False, False]] * 2


def test_final_observations_of_the_wrong_shape():
    class Wrong(ThirdParty):
        def step(self, actions: Any) -> Any:
            *values, info = super().step(actions)
            if info:
                info["final_obs"] = np.zeros((2, 5), np.float32)
            return *values, info

    collector = Collector(
        lambda: Wrong(AutoresetMode.SAME_STEP), None, frames_per_batch=12
    )
    with collector:
        with pytest.raises(
            BadEnvOutput,
            match=r"ThirdParty|Wrong.*final_obs observation is an array of shape \(5,\)",
        ):
            collector.rollout()
        assert_accounted(collector)


class Truncating(ThirdParty):
    """Its episodes are cut, and nobody knows the observations after them."""

    def __init__(self) -> None:
        super().__init__(AutoresetMode.SAME_STEP, tells_final=False)

    def step(self, actions: Any) -> Any:
        obs, reward, done, cut, info = super().step(actions)
        return obs, reward, cut, done, info


@pytest.mark.parametrize("rows", [1, 3, 12])
def test_a_memory_has_no_transition_to_an_unknown_observation(rows):
    memory = ReplayMemory(1000)
    with Collector(
        Truncating, None, frames_per_batch=2 * rows, replay_buffer=memory
    ) as collector:
        for _ in range(12 // rows):
            collector.next()
    batch = memory[:]
    steps = batch["next", "observation"][:, 1] - batch["observation"][:, 1]
    assert (steps == 1).all()
    assert len(memory) == 24 - 6 - 4  # of 2 and of 3 steps, each without the last one
