"""SB3's vector environments give the transitions of their single environments."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from muster.envs.sb3 import Sb3VectorEnv, adapt, takes
from muster.errors import BadOption, MusterError, UnsupportedEnv
from muster.testing import CountingEnv, EnvContract, SpaceEnv
from tests.fakes.chains import DictChain, OneWayChain, StackedChain, TupleChain
from tests.tools import assert_same, collect, column, counting, recorded

sb3 = pytest.importorskip("stable_baselines3.common.vec_env")
VALID = (("collector", "next_obs_valid"),)
CUT = {"max_frames_per_traj": 3}


def vector(make: Any = OneWayChain, num_envs: int = 3, wrap: Any = None) -> Any:
    """A factory of ``DummyVecEnv`` in ``wrap``, behind the adapter."""
    return lambda: Sb3VectorEnv(
        (wrap or (lambda env: env))(sb3.DummyVecEnv([make] * num_envs))
    )


class Strange(sb3.VecEnvWrapper):
    """A wrapper that is not SB3's own."""

    def reset(self) -> Any:
        return self.venv.reset()

    def step_wait(self) -> Any:
        return self.venv.step_wait()


class TestDummyVecEnv(EnvContract):
    num_envs = None

    def make_env(self) -> Any:
        return vector()()


class TestCartPoleInWrappers(EnvContract):
    num_envs = None
    steps = 60

    def make_env(self) -> Any:
        env = sb3.DummyVecEnv([lambda: gymnasium.make("CartPole-v1")] * 2)
        return Sb3VectorEnv(sb3.VecNormalize(sb3.VecFrameStack(sb3.VecMonitor(env), 2)))


# --- transitions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [{}, CUT], ids=["whole", "cut"])
@pytest.mark.parametrize(
    "env", [OneWayChain, DictChain, TupleChain], ids=["box", "dict", "tuple"]
)
def test_the_transitions_are_those_of_the_single_environments(env, cut):
    options = {"frames_per_batch": 90, "seed": 0, "batches": 2, **cut}
    alone = collect(env, num_envs=3, **options)
    assert_same(collect(vector(env), **options), alone)
    assert alone["next", "terminated"].any()
    assert alone["next", "truncated"].any()


@pytest.mark.parametrize("cut", [{}, CUT], ids=["whole", "cut"])
def test_subprocesses(cut):
    options = {"frames_per_batch": 60, "seed": 0, **cut}
    make = lambda: Sb3VectorEnv(sb3.SubprocVecEnv([DictChain] * 2, start_method="fork"))  # noqa: E731
    assert_same(collect(make, **options), collect(DictChain, num_envs=2, **options))


@pytest.mark.parametrize("cut", [{}, CUT], ids=["whole", "cut"])
def test_stacked_frames_begin_empty_wherever_an_episode_begins(cut):
    options = {"frames_per_batch": 90, "seed": 0, "batches": 2, **cut}
    wrap = partial(sb3.VecFrameStack, n_stack=3)
    assert_same(
        collect(vector(wrap=wrap), **options),
        collect(StackedChain, num_envs=3, **options),
    )


@pytest.mark.parametrize("cut", [{}, CUT], ids=["whole", "cut"])
def test_wrappers_in_wrappers(cut):
    options = {"frames_per_batch": 90, "seed": 0, "batches": 2, **cut}

    def wrap(env: Any) -> Any:
        return sb3.VecMonitor(
            sb3.VecFrameStack(sb3.VecExtractDictObs(sb3.VecMonitor(env), "chain"), 3)
        )

    assert_same(
        collect(vector(DictChain, wrap=wrap), **options),
        collect(StackedChain, num_envs=3, **options),
    )


@pytest.mark.parametrize("cut", [{}, CUT], ids=["whole", "cut"])
def test_stacks_of_dicts_and_transposed_images(cut):
    class Images(OneWayChain):
        """The chain in an image, and the transposed one."""

        transposed = False

        def __init__(self) -> None:
            super().__init__()
            self.observation_space = spaces.Box(
                0, 255, (1, 3, 40) if self.transposed else (3, 40, 1), np.uint8
            )

        def _image(self, obs: Any) -> Any:
            image = np.zeros((3, 40, 1), np.uint8)
            image[:, 7, 0] = obs % 251
            return image.transpose(2, 0, 1) if self.transposed else image

        def reset(self, **options: Any) -> Any:
            obs, info = super().reset(**options)
            return self._image(obs), info

        def step(self, action: Any) -> Any:
            after, *rest = super().step(action)
            return self._image(after), *rest

    class Transposed(Images):
        transposed = True

    options = {"frames_per_batch": 60, "seed": 0, **cut}
    got = collect(vector(Images, 2, sb3.VecTransposeImage), **options)
    assert_same(got, collect(Transposed, num_envs=2, **options))
    stacked = collect(
        vector(DictChain, 2, partial(sb3.VecFrameStack, n_stack=3)), **options
    )
    assert torch.equal(
        stacked["chain"], collect(StackedChain, num_envs=2, **options)["observation"]
    )


def test_composite_actions_reach_the_environments():
    space = spaces.Dict(
        {
            "a": spaces.Discrete(10),
            "b": spaces.Tuple((spaces.Box(-1, 1, (2,)), spaces.MultiBinary(2))),
        }
    )
    factory, made = recorded(lambda: SpaceEnv(spaces.Discrete(2), space))
    batch = collect(vector(factory, 2), frames_per_batch=6, validate="full")
    for b, env in enumerate(made[-2:]):
        for t, action in enumerate(env.actions):
            assert space.contains(action)
            assert batch["action", "a"][b, t] == action["a"]
            assert batch["action", "b", "0"][b, t].tolist() == action["b"][0].tolist()


# --- resets of some -------------------------------------------------------------------------------


def test_seeds_in_a_list_and_with_a_mask():
    factory, made = recorded(counting())
    env = vector(factory)()
    env.reset(seed=[5, 5, None])
    env.reset(seed=[None, 7, 8], options={"reset_mask": np.array([False, True, False])})
    env.reset(seed=20, options={"reset_mask": np.array([True, False, True])})
    env.reset()
    assert [e.seeds for e in made] == [[5, 20, None], [5, 7, None], [None, 22, None]]
    with pytest.raises(BadOption, match=r"got 2 seeds for 3 environments"):
        env.reset(seed=[1, 2])


def test_a_masked_reset_leaves_stacks_that_were_returned_alone():
    env = vector(counting(9), wrap=partial(sb3.VecFrameStack, n_stack=2))()
    env.reset()
    stepped = env.step(np.zeros(3, np.int64))[0]
    env.reset(options={"reset_mask": np.array([True, False, True])})
    assert stepped.tolist() == [[9, 0, 9, 1]] * 3
    assert env.step(np.zeros(3, np.int64))[0].tolist() == [
        [9, 0, 9, 1],
        [9, 1, 9, 2],
        [9, 0, 9, 1],
    ]


def test_monitors_count_anew_after_a_masked_reset():
    env = vector(counting(9), wrap=sb3.VecMonitor)()
    env.reset()
    env.step(np.zeros(3, np.int64))
    env.step(np.zeros(3, np.int64))
    env.reset(options={"reset_mask": np.array([True, False, False])})
    assert env.env.episode_lengths.tolist() == [0, 2, 2]
    assert env.env.episode_returns.tolist() == [0, 3, 3]


def test_statistics_take_in_the_first_observations_of_a_masked_reset():
    env = vector(counting(9, noise=True), wrap=sb3.VecNormalize)()
    env.reset(seed=1)
    env.step(np.zeros(3, np.int64))
    norm = env.env
    returns, count = norm.returns.copy(), norm.obs_rms.count
    obs, _ = env.reset(options={"reset_mask": np.array([False, True, True])})
    assert norm.obs_rms.count == count + 2
    assert norm.returns.tolist() == [returns[0], 0, 0]
    assert obs.dtype == np.float32
    raw = np.array([9, 0], np.float32)
    assert np.allclose(
        obs[1:, :2],
        ((raw - norm.obs_rms.mean[:2]) / np.sqrt(norm.obs_rms.var[:2] + 1e-8)),
        atol=1e-5,
    )
    norm.training, count = False, norm.obs_rms.count
    env.reset(options={"reset_mask": np.array([False, True, True])})
    assert norm.obs_rms.count == count


def test_normalized_observations_have_the_dtype_and_bounds_that_they_have():
    class Wide(CountingEnv):
        """Observations in float64 within narrow bounds, which normalized ones leave."""

        def __init__(self) -> None:
            super().__init__(5)
            self.observation_space = spaces.Box(0, 6, (2,), np.float64)

        def _observe(self) -> Any:
            return np.array([self.length, self.t], np.float64)

    wrap = lambda env: sb3.VecMonitor(sb3.VecNormalize(env, clip_obs=3.0))  # noqa: E731
    options = {"frames_per_batch": 60, "validate": "full"}
    env = vector(Wide, wrap=wrap)()
    assert env.single_observation_space == spaces.Box(-3, 3, (2,), np.float32)
    for cut in ({}, CUT):
        batch = collect(vector(Wide, wrap=wrap), **options, **cut)
        assert batch["observation"].dtype == torch.float32
        assert batch["next", "observation"].min() < 0
        ends = batch["next", "done"][:, :-1, 0]
        assert torch.equal(
            batch["next", "observation"][:, :-1][~ends],
            batch["observation"][:, 1:][~ends],
        ), "the policy acts on what the batch shows"
    plain = vector(Wide, wrap=lambda env: sb3.VecNormalize(env, norm_obs=False))()
    assert plain.single_observation_space == spaces.Box(0, 6, (2,), np.float64)


def test_normalized_dicts_change_the_keys_that_are_normalized():
    wrap = partial(sb3.VecNormalize, norm_obs_keys=["t"], clip_obs=4.0)
    space = vector(DictChain, wrap=wrap)().single_observation_space
    assert space["t"] == spaces.Box(-4, 4, (1,))
    assert space["chain"] == OneWayChain().observation_space
    batch = collect(
        vector(DictChain, wrap=wrap),
        frames_per_batch=60,
        validate="full",
        seed=0,
        **CUT,
    )
    assert batch["next", "t"].min() < 0


# --- what is not SB3's own ------------------------------------------------------------------------


def test_a_class_that_does_not_call_the_constructor_of_its_base_needs_no_metadata():
    """As SuperSuit's ``concat_vec_envs_v1(..., base_class="stable_baselines3")``."""

    class Bare(sb3.VecEnvWrapper):
        def __init__(self, venv: Any) -> None:
            self.venv = venv
            self.num_envs = venv.num_envs
            self.observation_space = venv.observation_space
            self.action_space = venv.action_space

        def reset(self) -> Any:
            return self.venv.reset()

        def step_wait(self) -> Any:
            return self.venv.step_wait()

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(name)

    options = {"frames_per_batch": 60}
    make = lambda: Bare(sb3.DummyVecEnv([counting(4)] * 3))  # noqa: E731
    batch = collect(make, **options)
    expected = collect(vector(counting(4)), **options)
    assert torch.equal(batch["next", "observation"], expected["next", "observation"])


def test_wrappers_of_others_are_taken_as_long_as_nothing_is_reset_alone():
    options = {"frames_per_batch": 60, "seed": 0}
    got = collect(vector(wrap=Strange), **options)
    assert got["collector", "next_obs_valid"].all()
    assert_same(got.exclude(*VALID), collect(OneWayChain, num_envs=3, **options))


def test_wrappers_of_others_cannot_be_reset_alone():
    env = vector(wrap=lambda env: sb3.VecMonitor(Strange(env)))()
    with pytest.raises(
        UnsupportedEnv,
        match=r"VecMonitor: environments \[1\].*what Strange keeps.*TimeLimit",
    ):
        env.reset(options={"reset_mask": np.array([False, True, False])})
    with pytest.raises(MusterError, match="Strange keeps"):
        collect(vector(wrap=Strange), frames_per_batch=60, **CUT)


def test_vector_environments_of_others_may_not_tell_the_last_observation():
    class Silent(sb3.DummyVecEnv):
        def step_wait(self) -> Any:
            *values, infos = super().step_wait()
            for info in infos:
                info.pop("terminal_observation", None)
                info.pop("TimeLimit.truncated")
            return *values, infos

    batch = collect(lambda: Sb3VectorEnv(Silent([counting(2)] * 2)), frames_per_batch=8)
    assert (
        column(batch, "collector", "next_obs_valid") == [[True, False, True, False]] * 2
    )
    assert column(batch, "next", "terminated") == [[False, True, False, True]] * 2


# --- the rest -------------------------------------------------------------------------------------


def test_sb3_environments_are_recognised_wrapped_or_not():
    env = sb3.DummyVecEnv([CountingEnv])
    assert takes(env)
    assert takes(Strange(env))
    others = [
        CountingEnv(),
        sb3.DummyVecEnv,
        Sb3VectorEnv(env),
        SimpleNamespace(num_envs=2),
        None,
    ]
    assert not any(map(takes, others))


def test_only_one_makes_a_batch():
    envs = [sb3.DummyVecEnv([CountingEnv] * 3) for _ in range(2)]
    batch = adapt(envs[:1], None)
    assert (batch.spec.num_envs, batch.spec.final_obs_certain) == (3, True)
    with pytest.raises(
        BadOption, match="num_envs=2 was given, but DummyVecEnv is a batch"
    ):
        adapt(envs, None)
