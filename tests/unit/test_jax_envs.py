"""JAX environments: in gymnax's and brax's style, with expected arrays; and the packages themselves
where installed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from muster import Collector
from muster.envs.build import build_env
from muster.errors import BadOption, UnsupportedEnv, UnsupportedSpace
from muster.testing import EnvContract
from tests.tools import assert_same, collect

jax = pytest.importorskip("jax")
jnp = jax.numpy

import dataclasses  # noqa: E402
from types import SimpleNamespace  # noqa: E402

from muster.envs.jax import JaxEnvs  # noqa: E402


class State(NamedTuple):
    t: Any
    length: Any
    noise: Any


@dataclasses.dataclass(frozen=True)
class Params:
    max_steps_in_episode: int = 4
    longest: int = 6


class Walk:
    """gymnax's style: episodes of 1 to ``longest`` steps; observation ``[length, t, noise]``,
    reward ``t + action``.

    Args:
        new: ends as gymnax 1.0 says them: the limit has a method of its own.
        grouped: observations are a dict.
    """

    default_params = Params()

    def __init__(self, new: bool = False, grouped: bool = False) -> None:
        self.new, self.grouped = new, grouped
        if new:
            self.is_truncated = lambda state, params: (
                state.t >= params.max_steps_in_episode
            )

    def action_space(self, params: Params) -> Any:
        return SimpleNamespace(n=3)

    def see(self, state: State) -> Any:
        obs = jnp.array([state.length, state.t, state.noise], jnp.float32)
        return (
            {"all": obs, "even": state.t % 2 == 0, "t": state.t}
            if self.grouped
            else obs
        )

    def reset_env(self, key: Any, params: Params) -> Any:
        state = State(
            jnp.int32(0),
            jax.random.randint(key, (), 1, params.longest + 1),
            jax.random.uniform(key),
        )
        return self.see(state), state

    def is_terminal(self, state: State, params: Params) -> Any:
        ended = state.t >= state.length
        return ended if self.new else ended | (state.t >= params.max_steps_in_episode)

    def step_env(self, key: Any, state: State, action: Any, params: Params) -> Any:
        state = State(state.t + 1, state.length, jax.random.uniform(key))
        return (
            self.see(state),
            state,
            (state.t + action).astype(jnp.float32),
            self.is_terminal(state, params),
            {},
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class BraxState:
    pipeline_state: Any
    obs: Any
    reward: Any
    done: Any
    metrics: dict[str, Any]
    info: dict[str, Any]


class Slide:
    """brax's style: terminated where the sum of actions passes 1, truncated after 5 steps."""

    observation_size, action_size = 2, 1

    def __init__(self, resets: bool = False, limit: bool = True) -> None:
        self.resets, self.limit = resets, limit

    def reset(self, rng: Any) -> Any:
        start = jax.random.uniform(rng, (), minval=-0.2, maxval=0.2)
        info = {
            "steps": jnp.zeros(()),
            **({"truncation": jnp.zeros(())} if self.limit else {}),
        }
        obs = jnp.stack([start, 0.0])
        if self.resets:
            info["first_obs"] = obs
        return BraxState(start, obs, jnp.zeros(()), jnp.zeros(()), {}, info)

    def step(self, state: Any, action: Any) -> Any:
        x, steps = state.pipeline_state + action[0], state.info["steps"] + 1
        out = jnp.where(jnp.abs(x) > 1, 1.0, 0.0)
        late = jnp.where(steps >= 5, 1.0, 0.0) if self.limit else 0.0
        info = {**state.info, "steps": steps}
        if self.limit:
            info["truncation"] = late * (1 - out)
        obs = jnp.stack([x, steps])
        return BraxState(x, obs, action[0], jnp.maximum(out, late), {}, info)


def zeros(obs: Any) -> Any:
    return torch.zeros(len(obs), dtype=torch.long)


# --- gymnax ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("new", [False, True])
def test_rows_follow_from_each_other_and_ends_are_told_apart(new):
    batch = collect(
        JaxEnvs(Walk(new), 16),
        None,
        batches=3,
        frames_per_batch=160,
        seed=0,
        validate="full",
    )
    obs, after = batch["observation"], batch["next", "observation"]
    length, t = obs[..., 0], obs[..., 1]
    assert torch.equal(after[..., :2], torch.stack([length, t + 1], -1))
    ended, limited = t + 1 >= length, t + 1 >= 4
    assert torch.equal(batch["next", "terminated"][..., 0], ended)
    assert torch.equal(
        batch["next", "truncated"][..., 0], limited & ~(ended & torch.tensor(not new))
    )
    assert torch.equal(batch["next", "reward"][..., 0], t + 1 + batch["action"])
    done = batch["next", "done"][:, :-1, 0]
    assert torch.equal(t[:, 1:], torch.where(done, 0.0, t[:, :-1] + 1))
    assert torch.equal(after[:, :-1][~done], obs[:, 1:][~done])
    assert (after[:, :-1, 2] != obs[:, 1:, 2])[
        done
    ].all()  # a reset draws its own numbers
    assert set(length.unique().tolist()) == {1, 2, 3, 4, 5, 6}
    assert (
        len(obs[..., 2].unique()) > 400
    )  # every environment and step has its own noise
    assert batch["action"].unique().tolist() == [0, 1, 2]


def test_an_environment_s_data_do_not_depend_on_how_many_there_are():
    few, many = (
        collect(JaxEnvs(Walk(), n), zeros, frames_per_batch=20 * n, seed=3)
        for n in (2, 5)
    )
    for key in ("observation", ("next", "observation"), ("next", "done")):
        assert torch.equal(few[key], many[key][:2])
    other = collect(JaxEnvs(Walk(), 2), zeros, frames_per_batch=40, seed=4)
    assert torch.equal(other["observation"][0], few["observation"][1])


def test_some_environments_can_begin_anew_and_the_others_go_on_as_if_nothing_was():
    endless = Params(10**6, 10**6)

    def run(*index: int) -> Any:
        with Collector(
            JaxEnvs(Walk(), 3, endless), zeros, frames_per_batch=6, seed=0
        ) as collector:
            first = collector.rollout().clone()
            if index:
                collector.reset(list(index))
            return torch.cat(
                [first, *(collector.rollout().clone() for _ in range(2))], 1
            )

    alone, cut = run(), run(1)
    assert cut["observation"][1, :, 1].tolist() == [0, 1, 0, 1, 2, 3]
    assert torch.equal(alone["observation"][[0, 2]], cut["observation"][[0, 2]])


def test_a_factory_and_one_environment_work_like_other_environments():
    built = build_env(Walk, 4)
    assert (built.spec.batch_shape, built.spec.num_envs) == ((4,), 4)
    alone = collect(Walk(), lambda obs: torch.tensor(0), frames_per_batch=12, seed=3)
    assert alone["observation"].shape == (12, 3)
    assert_same(
        alone[None], collect(Walk, zeros, frames_per_batch=12, num_envs=1, seed=3)
    )
    with pytest.raises(BadOption, match="JaxEnvs is a batch of environments already"):
        build_env(lambda: JaxEnvs(Walk(), 2), 2)


def test_actions_of_a_box_reach_the_environment():
    class Moved(Walk):
        def action_space(self, params: Params) -> Any:
            return SimpleNamespace(low=-2, high=jnp.array([3.0, 5.0]), shape=(2,))

        def step_env(self, key: Any, state: State, action: Any, params: Params) -> Any:
            return super().step_env(key, state, action[0] + 10 * action[1], params)

    batch = collect(JaxEnvs(Moved(), 4), None, frames_per_batch=400)
    action = batch["action"]
    expected = (
        batch["next", "observation"][..., 1] + action[..., 0] + 10 * action[..., 1]
    )
    torch.testing.assert_close(batch["next", "reward"][..., 0], expected)
    assert (action.amin((0, 1)) < -1.8).all()
    assert (action.amax((0, 1)).cpu() > torch.tensor([2.8, 4.8])).all()


# --- brax -----------------------------------------------------------------------------------------


def test_brax_tells_truncations_apart():
    batch = collect(
        JaxEnvs(Slide(), 8),
        None,
        batches=2,
        frames_per_batch=160,
        seed=0,
        validate="full",
    )
    after, action = batch["next", "observation"], batch["action"]
    torch.testing.assert_close(
        after[..., 0], batch["observation"][..., 0] + action[..., 0]
    )
    out = after[..., 0].abs() > 1
    late = after[..., 1] >= 5
    assert torch.equal(batch["next", "terminated"][..., 0], out)
    assert torch.equal(batch["next", "truncated"][..., 0], late & ~out)
    assert out.any()
    assert (late & ~out).any()
    assert torch.equal(batch["next", "reward"], action)
    assert (action.abs() <= 1).all()


def test_environments_that_reset_themselves_are_refused():
    with pytest.raises(UnsupportedEnv, match="Slide resets itself.*auto_reset=False"):
        JaxEnvs(Slide(resets=True), 2)


def test_other_objects_are_refused_with_what_is_expected():
    with pytest.raises(UnsupportedEnv, match="gymnax's reset_env.*brax's reset"):
        JaxEnvs(object(), 2)

    class Strange(Walk):
        def action_space(self, params: Params) -> Any:
            return "left or right"

    with pytest.raises(UnsupportedSpace, match="neither Discrete nor Box"):
        JaxEnvs(Strange(), 2)

    class Tuples(Walk):
        def see(self, state: State) -> Any:
            return state.t, state.length

    with pytest.raises(UnsupportedSpace, match="tuple.*expected arrays"):
        JaxEnvs(Tuples(), 2)


# --- the contract, and the packages ---------------------------------------------------------------


class OfJax(EnvContract):
    num_envs = None
    steps = 12


class TestGymnaxStyle(OfJax):
    def make_env(self) -> Any:
        return JaxEnvs(Walk(), 3)


class TestBraxStyle(OfJax):
    def make_env(self) -> Any:
        return JaxEnvs(Slide(), 3)


def test_gymnax_cart_pole_moves_as_gymnasium_s():
    gymnax = pytest.importorskip("gymnax")
    import gymnasium

    env, params = gymnax.make("CartPole-v1")
    batch = collect(JaxEnvs(env, 4, params), None, frames_per_batch=400, seed=0)
    theirs: Any = gymnasium.make("CartPole-v1").unwrapped
    theirs.reset()
    rows = batch.reshape(-1)
    for obs, action, after, ended in zip(
        rows["observation"],
        rows["action"],
        rows["next", "observation"],
        rows["next", "terminated"],
        strict=True,
    ):
        theirs.state, theirs.steps_beyond_terminated = obs.double().numpy(), None
        expected, _, terminated, *_ = theirs.step(int(action))
        np.testing.assert_allclose(after.numpy(), expected, rtol=1e-4, atol=1e-5)
        assert terminated == ended.item()
    assert rows["next", "terminated"].any()


@pytest.mark.parametrize(
    "name", ["MountainCar-v0", "Pendulum-v1", "Acrobot-v1", "Catch-bsuite"]
)
def test_gymnax_environments_run(name):
    gymnax = pytest.importorskip("gymnax")
    env, params = gymnax.make(name)
    batch = collect(
        JaxEnvs(env, 2, params), None, frames_per_batch=480, seed=0, validate="full"
    )
    going_on = ~batch["next", "done"][:, :-1, 0]
    assert torch.equal(
        batch["next", "observation"][:, :-1][going_on],
        batch["observation"][:, 1:][going_on],
    )
    if name in (
        "MountainCar-v0",
        "Pendulum-v1",
    ):  # 200 steps, and no other end by chance
        assert batch["next", "truncated"][:, 199].all()
        assert not batch["next", "terminated"].any()


@pytest.mark.slow
def test_a_brax_environment_runs():
    envs = pytest.importorskip("brax.envs")
    env = envs.create("fast", episode_length=7, auto_reset=False)
    batch = collect(JaxEnvs(env, 2), None, frames_per_batch=40, seed=0)
    assert batch["next", "truncated"][:, 6::7].all()
    with pytest.raises(UnsupportedEnv, match="resets itself"):
        JaxEnvs(envs.create("fast", episode_length=7), 2)
