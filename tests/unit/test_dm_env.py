"""dm_env environments: specs become spaces, time steps become transitions that say how an episode
ended.
"""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import dm_env
import numpy as np
import pytest
from dm_env import specs
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from muster.envs.dm_env import DmEnv, adapt, takes
from muster.errors import BadEnvOutput, BadOption, UnsupportedEnv, UnsupportedSpace
from muster.testing import CountingEnv, EnvContract
from tests.fakes.chains import OneWayChain
from tests.tools import assert_same, collect
from tests.warned import warnings_are_errors

Pair = namedtuple("Pair", "a b")


class DmChain(dm_env.Environment):
    """A ``OneWayChain`` that speaks dm_env; resets itself in the step after LAST, as dm_env asks
    for.
    """

    def __init__(self) -> None:
        self.chain, self.next_seed, self.over = OneWayChain(), None, True

    def seed(self, seed: int) -> None:
        self.next_seed = seed

    def reset(self) -> dm_env.TimeStep:
        obs, _ = self.chain.reset(seed=self.next_seed)
        self.next_seed, self.over = None, False
        return dm_env.restart(obs)

    def step(self, action: Any) -> dm_env.TimeStep:
        if self.over:
            return self.reset()
        obs, reward, terminated, truncated, _ = self.chain.step(action)
        self.over = terminated or truncated
        if terminated:
            return dm_env.termination(reward, obs)
        return (dm_env.truncation if truncated else dm_env.transition)(reward, obs)

    def observation_spec(self) -> Any:
        return specs.BoundedArray((3,), np.int64, 0, 2**31)

    def action_spec(self) -> Any:
        return specs.DiscreteArray(5)


class Scripted(dm_env.Environment):
    """Returns given time steps, repeats the last one; notes the actions."""

    def __init__(
        self,
        *steps: Any,
        observation: Any = None,
        action: Any = None,
        reward: Any = None,
        discount: Any = None,
    ) -> None:
        self.steps = list(steps) or [dm_env.restart(np.zeros(2))]
        self.observation, self.action = (
            observation or specs.Array((2,), float),
            action or specs.DiscreteArray(2),
        )
        self.reward, self.discount = reward, discount
        self.actions: list[Any] = []
        self.closed = 0

    def reset(self) -> Any:
        firsts = (
            i
            for i, step in enumerate(self.steps)
            if step.step_type == dm_env.StepType.FIRST
        )
        del self.steps[: next(firsts, 0)]
        return self._next()

    def step(self, action: Any) -> Any:
        self.actions.append(action)
        return self._next()

    def _next(self) -> Any:
        return self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]

    def observation_spec(self) -> Any:
        return self.observation

    def action_spec(self) -> Any:
        return self.action

    def reward_spec(self) -> Any:
        return self.reward or super().reward_spec()

    def discount_spec(self) -> Any:
        return self.discount or super().discount_spec()

    def close(self) -> None:
        self.closed += 1


class Seeded(Scripted):
    """Observes a draw of the generator that dm_control or bsuite would keep where ``keep`` puts it."""

    def __init__(self, keep: Any) -> None:
        super().__init__(observation=specs.Array((), float))
        self.rng = np.random.RandomState(7)
        keep(self, self.rng)

    def reset(self) -> Any:
        return dm_env.restart(self.rng.random_sample())

    def step(self, action: Any) -> Any:
        return dm_env.transition(0.0, self.rng.random_sample())


class TestChain(EnvContract):
    def make_env(self) -> Any:
        return DmEnv(DmChain())


class TestUnbatchedChain(EnvContract):
    num_envs = None

    def make_env(self) -> Any:
        return DmEnv(DmChain())


@pytest.mark.filterwarnings("ignore:Scripted has no random generator")
class TestNestedFloats(EnvContract):
    """Dicts, lists, float64, Python scalars and bools, one episode that ends and one that is cut."""

    def make_env(self) -> Any:
        def obs(t: int) -> Any:
            return OrderedDict(
                x=np.full(2, t / 3), flags=[np.array([True, False]), t], speed=float(t)
            )

        spec = OrderedDict(
            x=specs.Array((2,), np.float64),
            flags=[specs.Array((2,), bool), specs.DiscreteArray(9)],
            speed=specs.BoundedArray((), np.float32, -1, np.inf),
        )
        episodes = [
            dm_env.restart(obs(0)),
            dm_env.transition(1.0, obs(1)),
            dm_env.termination(2.0, obs(2)),
        ]
        episodes += [dm_env.restart(obs(3)), dm_env.truncation(1.5, obs(4), 0.9)]
        return DmEnv(Scripted(*episodes * 80, observation=spec, action=spec))


@pytest.mark.parametrize(
    "options", [{}, {"max_frames_per_traj": 3}], ids=["whole", "cut"]
)
def test_dm_env_gives_the_transitions_of_the_same_gymnasium_environment(options):
    options = {
        "num_envs": 3,
        "frames_per_batch": 90,
        "seed": 0,
        "batches": 2,
        **options,
    }
    got = collect(lambda: DmEnv(DmChain()), **options)
    assert_same(got, collect(OneWayChain, **options))
    assert got["next", "terminated"].any()
    assert got["next", "truncated"].any()


def test_discount_zero_at_the_last_step_terminates_and_any_other_truncates():
    obs = np.zeros(2)
    for discount, ended in [
        (0.0, True),
        (np.float32(0), True),
        (np.array(0.0), True),
        (1.0, False),
        (1e-9, False),
    ]:
        env = DmEnv(
            Scripted(
                dm_env.restart(obs),
                dm_env.TimeStep(dm_env.StepType.LAST, 1.0, discount, obs),
            )
        )
        env.reset()
        _, reward, terminated, truncated, info = env.step(0)
        assert (reward, terminated, truncated) == (1.0, ended, not ended)
        assert info["discount"] == discount


@given(
    st.sampled_from([np.float64, np.float32, np.int64, np.int8, np.uint8, np.uint64]),
    st.lists(st.integers(1, 3), max_size=2),
    st.booleans(),
)
def test_array_specs_become_boxes_of_their_own_dtype_shape_and_bounds(
    dtype, shape, bounded
):
    spec = (
        specs.BoundedArray(shape, dtype, 1, 5) if bounded else specs.Array(shape, dtype)
    )
    space = DmEnv(Scripted(observation=spec)).observation_space
    assert isinstance(space, spaces.Box)
    assert (space.dtype, space.shape) == (dtype, tuple(shape))
    if np.dtype(dtype).kind == "f":
        low, high = -np.inf, np.inf
    else:
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    assert (space.low == (1 if bounded else low)).all()
    assert (space.high == (5 if bounded else high)).all()


def test_nested_specs_become_dicts_and_tuples():
    spec = {
        "a": [specs.DiscreteArray(3), specs.Array((2,), bool)],
        "b": Pair(specs.Array((), float), {}),
    }
    assert DmEnv(Scripted(observation=spec)).observation_space == spaces.Dict(
        {
            "a": spaces.Tuple([spaces.Discrete(3), spaces.MultiBinary((2,))]),
            "b": spaces.Tuple(
                [spaces.Box(-np.inf, np.inf, (), np.float64), spaces.Dict({})]
            ),
        }
    )


@pytest.mark.filterwarnings("ignore:Scripted has no random generator")
def test_actions_come_in_the_dtypes_and_containers_of_their_spec():
    spec = {
        "n": specs.DiscreteArray(3),
        "l": [specs.BoundedArray((2,), np.float32, -1, 1)],
        "p": Pair(specs.Array((), bool), (specs.BoundedArray((), np.int8, 0, 5),)),
    }
    env = Scripted(
        dm_env.restart(np.zeros(2)), dm_env.transition(0.0, np.zeros(2)), action=spec
    )
    collect(lambda: DmEnv(env), frames_per_batch=5, seed=0)
    assert len(env.actions) == 5
    for action in env.actions:
        assert type(action["n"]) is np.int32
        assert (type(action["l"]), action["l"][0].dtype, action["l"][0].shape) == (
            list,
            np.float32,
            (2,),
        )
        assert type(action["p"]) is Pair
        assert type(action["p"].a) is np.bool_
        assert (type(action["p"].b), type(action["p"].b[0])) == (tuple, np.int8)
        assert {0: "hashable"}.get(action["n"], "") in ("", "hashable")


def test_observations_keep_the_spec_dtype_and_python_numbers_take_it():
    spec = {
        "d": specs.DiscreteArray(9),
        "f": specs.Array((), np.float32),
        "x": specs.Array((2,), np.float64),
    }
    first = {"d": np.array(4, np.int32), "f": 0.1, "x": np.array([0.1, 0.2])}
    batch = collect(lambda: _only(first, spec), frames_per_batch=2)
    assert batch["d"][0].item() == 4
    assert batch["f"].numpy()[0] == np.float32(0.1)
    assert batch["x"].numpy()[0].tolist() == [0.1, 0.2]
    assert [str(batch[k].dtype) for k in "dfx"] == [
        "torch.int64",
        "torch.float32",
        "torch.float64",
    ]


def _only(obs: Any, spec: Any) -> DmEnv:
    return DmEnv(
        Scripted(dm_env.restart(obs), dm_env.transition(0.0, obs), observation=spec)
    )


@pytest.mark.parametrize(
    ("observation", "message"),
    [
        (np.zeros(2, np.float32), None),  # no digits are lost
        (np.zeros(3), r"observation is an array of shape \(3,\)"),
        (np.zeros(2, complex), "observation is an array of dtype complex128"),
        ({"x": 1}, "observation is an array of shape"),
    ],
    ids=str,
)
def test_observations_that_do_not_fit_their_spec_are_named(observation, message):
    make = lambda: _only(observation, specs.Array((2,), np.float64))  # noqa: E731
    if message is None:
        assert (
            collect(make, frames_per_batch=2)["observation"].numpy().dtype == np.float64
        )
        return
    with pytest.raises(BadEnvOutput, match=message):
        collect(make, frames_per_batch=2)


@pytest.mark.parametrize(
    "keep",
    [
        lambda env, rng: setattr(env, "random_state", rng),
        lambda env, rng: setattr(env, "task", type("Task", (), {"random": rng})),
        lambda env, rng: setattr(env, "_rng", rng),
    ],
    ids=["composer", "suite", "bsuite"],
)
def test_generators_in_their_usual_places_are_seeded(keep):
    options = {"frames_per_batch": 6, "num_envs": 2}
    one, two, other = (
        collect(lambda: DmEnv(Seeded(keep)), seed=s, **options)["observation"]
        for s in (3, 3, 4)
    )
    assert one.equal(two)
    assert not one.equal(other)
    assert one[0, 0] == np.random.RandomState(3).random_sample()
    assert one[1, 0] == np.random.RandomState(4).random_sample()


def test_new_style_generators_are_seeded_too():
    env = Scripted()
    env._rng = np.random.default_rng()
    DmEnv(env).reset(seed=5)
    assert env._rng.random() == np.random.default_rng(5).random()


def test_seeds_that_reach_nothing_are_reported_once():
    env = DmEnv(Scripted())
    with pytest.warns(
        UserWarning,
        match="Scripted has no random generator that Muster finds, so seed 1 had no effect",
    ):
        env.reset(seed=1)
    with warnings_are_errors():
        env.reset(seed=2)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (
            [dm_env.transition(0.0, np.zeros(2))],
            r"Scripted.reset\(\) returned step_type .*MID.*expected FIRST",
        ),
        ([dm_env.restart(np.zeros(2))] * 2, r"Scripted.step\(\) began a new episode"),
        (
            [dm_env.restart(np.zeros(2)), dm_env.truncation(1.0, np.zeros(2), None)],
            "LAST with discount None",
        ),
        (
            [
                dm_env.restart(np.zeros(2)),
                dm_env.truncation(1.0, np.zeros(2), np.ones(2)),
            ],
            r"discount array\(\[1., 1.\]\)",
        ),
    ],
    ids=["reset", "first", "discount", "discounts"],
)
def test_time_steps_that_break_the_protocol_are_named(steps, message):
    env = DmEnv(Scripted(*steps))
    with pytest.raises(BadEnvOutput, match=message):
        env.reset(), env.step(0)


def test_a_missing_reward_is_named():
    steps = dm_env.restart(np.zeros(2)), dm_env.transition(None, np.zeros(2))
    with pytest.raises(BadEnvOutput, match="reward is NoneType None"):
        collect(lambda: DmEnv(Scripted(*steps)), frames_per_batch=2)


@pytest.mark.parametrize("kind", ["reward", "discount"])
@pytest.mark.parametrize(
    "spec",
    [specs.Array((2,), float), {"a": specs.Array((), float)}],
    ids=["vector", "dict"],
)
def test_rewards_and_discounts_that_are_not_one_number_are_refused(kind, spec):
    with pytest.raises(
        UnsupportedEnv,
        match=rf"Scripted.{kind}_spec\(\) is .*expected one number per step",
    ):
        DmEnv(Scripted(**{kind: spec}))


def test_strings_are_refused_by_name():
    with pytest.raises(
        UnsupportedSpace,
        match=r"Scripted.observation_spec\(\)\['a'\]\[1\] is StringArray",
    ):
        DmEnv(
            Scripted(observation={"a": [specs.Array((), float), specs.StringArray(())]})
        )


def test_reset_options_are_refused():
    with pytest.raises(BadOption, match=r"reset\(\) takes no options, but \['x'\]"):
        DmEnv(Scripted()).reset(options={"x": 1})


def test_closing_closes_the_environment():
    env = Scripted()
    DmEnv(env).close()
    assert env.closed == 1


def test_a_batch_of_them_needs_different_ones():
    env = Scripted()
    assert adapt([env, Scripted()], None).spec.num_envs == 2
    with pytest.raises(
        UnsupportedEnv, match="Scripted: the factory returned the same object twice"
    ):
        adapt([env, env], None)


def test_dm_envs_are_recognised_and_nothing_else():
    assert takes(Scripted())
    assert not any(map(takes, (CountingEnv(), Scripted, DmEnv(Scripted()), None, 3)))
