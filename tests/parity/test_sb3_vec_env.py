"""``muster.compat.sb3.VecEnv`` returns what ``DummyVecEnv`` returns, and works below SB3's wrappers
and algorithms.
"""

from __future__ import annotations

import inspect
import os
import signal
import sys
from collections import OrderedDict
from copy import deepcopy
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.error import NoAsyncCallError

from muster.errors import BadOption, EnvError, UnsupportedEnv
from muster.testing import CountingEnv, InfoEnv, SpaceEnv
from tests.fakes.vector_faults import Drawing, Locking, Rendering, Telling, Wrapped
from tests.warned import noted_warnings

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="worker processes")

vec_env = pytest.importorskip("stable_baselines3.common.vec_env")
compat = pytest.importorskip("muster.compat.sb3")

BOX = spaces.Box(-1, 1, (2, 3), np.float32)


def in_spaces(observation_space: Any, action_space: Any) -> Any:
    """Make an environment with spaces of its own, whose random numbers no other environment draws."""
    return SpaceEnv(deepcopy(observation_space), action_space)


MAKERS: dict[str, Any] = {
    "infos": [lambda n=n: InfoEnv(n) for n in (1, 2, 5)],
    "truncated": [lambda n=n: CountingEnv(n, truncate=True) for n in (2, 3)],
    "names of batches": [
        lambda names=names: Telling(3, names)
        for names in (
            ["final_obs"],
            ["final_info", "muster"],
            ["final_obs", "final_info", "muster", "terminal_observation"],
        )
    ],
    "cart pole": [partial(gymnasium.make, "CartPole-v1", max_episode_steps=15)] * 3,
    "pendulum": [partial(gymnasium.make, "Pendulum-v1", max_episode_steps=6)] * 2,
    "discrete": [lambda: in_spaces(spaces.Discrete(5), spaces.Discrete(3))] * 2,
    "dict": [
        lambda: in_spaces(
            spaces.Dict({"b": BOX, "a": spaces.MultiBinary(3)}),
            spaces.MultiDiscrete([2, 3]),
        )
    ]
    * 2,
    "tuple": [lambda: in_spaces(spaces.Tuple((BOX, spaces.Discrete(3))), BOX)] * 2,
}


def assert_equal(a: Any, b: Any) -> None:
    if isinstance(a, dict):
        assert dict(a).keys() == dict(b).keys()
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, (tuple, list)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)
    else:
        np.testing.assert_array_equal(a, b)
        assert getattr(a, "dtype", None) == getattr(b, "dtype", None)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("wrapper", ["none", "monitor", "normalize"])
def test_results_are_those_of_dummy_vec_env(kind: str, wrapper: str) -> None:
    wrap = {
        "none": lambda env: env,
        "monitor": vec_env.VecMonitor,
        "normalize": vec_env.VecNormalize,
    }[wrapper]
    if wrapper == "normalize" and kind in ("dict", "discrete", "tuple"):
        pytest.skip("VecNormalize normalizes boxes")
    ours, theirs = (
        wrap(compat.VecEnv(MAKERS[kind], num_workers=2)),
        wrap(vec_env.DummyVecEnv(MAKERS[kind])),
    )
    ours.seed(3), theirs.seed(3)
    assert_equal(ours.reset(), theirs.reset())
    assert_equal(ours.unwrapped.reset_infos, theirs.unwrapped.reset_infos)
    theirs.action_space.seed(1)
    for _ in range(20):
        actions = np.array([theirs.action_space.sample() for _ in range(ours.num_envs)])
        got, expected = ours.step(actions), theirs.step(actions)
        for info in (*got[3], *expected[3]):
            info.get("episode", {}).pop("t", None)
        assert_equal(got, expected)
        assert_equal(ours.unwrapped.reset_infos, theirs.unwrapped.reset_infos)
    ours.close()


def test_calls_and_attributes() -> None:
    envs = compat.VecEnv(
        [Wrapped] * 3, "fork", num_workers=2
    )  # safe here, so it is accepted
    envs.seed(4)
    envs.set_options([{}, {"x": 1}, {}])
    envs.reset()
    assert envs.get_attr("options") == [None, {"x": 1}, None]
    envs.reset()
    assert envs.get_attr("seeds", 1) == [[5, None]]
    assert envs.get_attr("seeds", [-1]) == [[6, None]]
    for index in (3, -4, [0, 3]):
        with pytest.raises(
            IndexError, match="3 environments: expected -3 to 2"
        ) as caught:
            envs.get_attr("seeds", index)
        assert isinstance(caught.value, BadOption)
    for index in ("a", 0.5, [0.5], [True, False, True]):
        with pytest.raises(BadOption, match="indices=.*expected an integer"):
            envs.get_attr("seeds", index)
    assert envs.get_attr("seeds", np.int64(1)) == [[5, None]]
    assert envs.get_attr("seeds", np.array([0, -1])) == [[4, None], [6, None]]
    assert envs.get_attr("options") == [None] * 3
    assert envs.env_method("plus", 1, b=2, indices=[2, 0]) == [3, 3]
    envs.set_attr("length", 4, indices=1)
    envs.set_attr("extra", 5)
    assert envs.get_attr("length") == [3, 4, 3]
    assert envs.get_attr("extra") == [5, 5, 5]
    assert envs.has_attr("length")
    assert not envs.has_attr("no_such_name")
    with pytest.raises(AttributeError):
        envs.get_attr("no_such_name")
    with pytest.raises(
        EnvError, match="environment 0 .*: the call raised ZeroDivisionError"
    ):
        envs.env_method("fails")
    assert envs.env_is_wrapped(gymnasium.wrappers.TimeLimit) == [True] * 3
    assert envs.env_is_wrapped(gymnasium.wrappers.ClipAction, [1]) == [False]
    assert [image.shape for image in envs.get_images()] == [(4, 4, 3)] * 3
    assert envs.render().shape == (8, 8, 3)
    envs.close()
    envs.close()


def test_every_public_member_is_there() -> None:
    ours, subproc, dummy = (
        compat.VecEnv([Wrapped] * 2, num_workers=1),
        vec_env.SubprocVecEnv,
        vec_env.DummyVecEnv,
    )
    absent = {
        "remotes",  # and others of the implementation
        "work_remotes",
        "processes",
    }
    theirs = subproc([Wrapped] * 2, start_method="fork")
    members = {name for name in dir(theirs) if not name.startswith("_")}
    assert {name for name in members if not hasattr(ours, name)} == absent
    assert {name for name in dir(dummy) if not name.startswith("_")} <= set(dir(ours))
    for name in (
        "step_async",
        "step_wait",
        "reset",
        "close",
        "seed",
        "set_options",
        "has_attr",
        "get_attr",
        "set_attr",
    ):
        found, expected = (
            list(inspect.signature(getattr(env, name)).parameters)
            for env in (ours, theirs)
        )
        assert found == expected
    for name in (
        "env_method",
        "env_is_wrapped",
        "get_images",
        "render",
        "getattr_depth_check",
    ):
        found, expected = (
            list(inspect.signature(getattr(env, name)).parameters)
            for env in (ours, theirs)
        )
        assert found == expected
    assert (ours.metadata, ours.render_mode) == (theirs.metadata, theirs.render_mode)
    assert (
        (ours.closed, ours.waiting) == (theirs.closed, theirs.waiting) == (False, False)
    )
    ours.reset(), theirs.reset()
    for env in (ours, theirs):
        env.step_async(np.zeros(2, int))
    assert ours.waiting
    assert theirs.waiting
    assert [
        env.getattr_depth_check("reset", already_found=True).endswith("VecEnv")
        for env in (ours, theirs)
    ] == [
        True,
        True,
    ]
    assert_equal(ours.step_wait()[0], theirs.step_wait()[0])
    assert not ours.waiting
    assert ours.seed(5) == theirs.seed(5)
    assert (ours.unwrapped, theirs.unwrapped) == (ours, theirs)
    for env in (ours, theirs):
        env.close()
        env.close()
        assert env.closed


@pytest.mark.parametrize("mode", [None, "rgb_array", "ansi"])
def test_rendering_and_its_warnings_are_those_of_subproc_vec_env(mode: Any) -> None:
    said = []
    for make in (
        partial(compat.VecEnv, num_workers=1),
        partial(vec_env.SubprocVecEnv, start_method="fork"),
    ):
        envs = make([partial(Rendering, mode)] * 3)
        envs.reset()
        with noted_warnings() as caught:
            frames = [envs.render(), envs.render("rgb_array"), envs.get_images()]
        said.append(
            (
                envs.metadata,
                frames,
                [str(warning.message) for warning in caught],
                envs.get_attr("rendered"),
            )
        )
        envs.close()
    assert said[0][2:] == said[1][2:]
    assert_equal(said[0][:2], said[1][:2])


def test_dicts_are_ordered_as_their_space() -> None:
    space = spaces.Dict(
        OrderedDict([("z", BOX), ("a", spaces.Discrete(3)), ("m", BOX)])
    )
    makers = [lambda: in_spaces(space, spaces.Discrete(2))] * 2
    ours, theirs = compat.VecEnv(makers, num_workers=2), vec_env.DummyVecEnv(makers)
    ours.seed(3), theirs.seed(3)
    results = [(ours.reset(), theirs.reset())]
    results += [
        (ours.step(actions)[0], theirs.step(actions)[0])
        for actions in (np.zeros(2, int),) * 3
    ]
    for found, expected in results:
        assert type(found) is type(expected) is OrderedDict
        assert list(found) == list(expected) == list(space.spaces)
        assert_equal(found, expected)
        found["z"][:] = 7
    assert not (ours.step(np.zeros(2, int))[0]["z"] == 7).any()
    ours.close()


def test_a_reset_cancels_a_step_as_the_interface_says() -> None:
    envs = compat.VecEnv([lambda: CountingEnv(9)] * 3, num_workers=2)
    envs.reset()
    envs.step_async(np.zeros(3, int))
    assert envs.waiting
    assert envs.reset()[:, 1].tolist() == [0, 0, 0]
    assert not envs.waiting
    with pytest.raises(NoAsyncCallError):
        envs.step_wait()
    assert envs.step(np.zeros(3, int))[0][:, 1].tolist() == [1, 1, 1]
    envs.close()


def test_attributes_that_cannot_be_pickled_are_there() -> None:
    envs = compat.VecEnv([Locking] * 2, num_workers=2)
    assert envs.has_attr("lock")
    assert not envs.has_attr("no_such_name")
    assert envs.env_method("is_locked") == [False, False]
    with pytest.raises(BadOption, match="what the environments returned"):
        envs.get_attr("lock")
    envs.reset()
    envs.close()


def test_environments_that_draw_from_global_generators_are_reproducible() -> None:
    runs = []
    for workers in (1, 2, 2):
        envs = compat.VecEnv([Drawing] * 3, num_workers=workers)
        for _ in range(2):
            envs.seed(4)
            runs.append(
                [envs.reset(), *(envs.step(np.zeros(3, int)) for _ in range(7))]
            )
        envs.close()
    for run in runs[1:]:
        assert_equal(run, runs[0])
    assert len({*runs[0][0].ravel().tolist()}) == 6


def test_the_start_methods_are_those_of_multiprocessing() -> None:
    with pytest.raises(ValueError, match="cannot find context for 'illegal_method'"):
        compat.VecEnv([Wrapped], start_method="illegal_method")


@pytest.mark.parametrize(
    ("env_fns", "message"),
    [
        (None, "NoneType, expected a list of functions"),
        (5, "int, expected a list"),
        ("CartPole-v1", "str, expected a list"),
        (Wrapped, "expected a list"),
        (["CartPole-v1"], "an entry of type str"),
        ([CountingEnv, CountingEnv()], "an entry of type CountingEnv"),
        ([], "env_fns is empty"),
    ],
)
def test_what_makes_no_environments_is_refused_before_workers_start(
    env_fns: Any, message: str
) -> None:
    with pytest.raises(BadOption, match=message) as caught:
        compat.VecEnv(env_fns)
    assert caught.value.worker is None


def test_wrong_arguments_change_nothing() -> None:
    envs = compat.VecEnv((make for make in [Wrapped] * 2), num_workers=1)
    envs.seed(4)
    envs.set_options({"x": 1})
    for options in ("x", [{}], [{}] * 3, [{}, "x"], 5):
        with pytest.raises(BadOption, match="a dict for each of 2 environments"):
            envs.set_options(options)
    for seed in ("x", 1.5, -1):
        with pytest.raises(BadOption, match="seed="):
            envs.seed(seed)
    assert envs.reset()[:, 1].tolist() == [0, 0]
    assert envs.get_attr("options") == [{"x": 1}] * 2
    assert envs.get_attr("seeds") == [[4], [5]]
    for actions in (None, 1, np.int64(1), np.array(1), [0], np.zeros(3, int), []):
        with pytest.raises(BadOption, match=r"for( each of)? 2 environments"):
            envs.step(actions)
    assert not envs.waiting
    assert envs.step(np.zeros(2, int))[0][:, 1].tolist() == [1, 1]
    assert envs.step([0, 0])[0][:, 1].tolist() == [2, 2]
    envs.close()


def test_unsupported_observations_are_refused() -> None:
    with pytest.raises(UnsupportedEnv, match="Text"):
        compat.VecEnv([lambda: SpaceEnv(spaces.Text(3), spaces.Discrete(2))])


@pytest.mark.skipif(sys.platform != "linux", reason="kills processes")
def test_a_restart_is_a_truncation() -> None:
    envs = compat.VecEnv(
        [lambda: CountingEnv(9)] * 4, num_workers=2, on_failure="restart"
    )
    envs.reset()
    envs.step(np.zeros(4, int))
    os.kill(envs._workers._slices.handles[1].process.child.pid, signal.SIGKILL)
    obs, rewards, dones, infos = envs.step(np.zeros(4, int))
    assert obs[:, 1].tolist() == [2, 2, 0, 0]
    assert dones.tolist() == [False, False, True, True]
    assert rewards.tolist() == [2, 2, 0, 0]
    for i in (2, 3):
        assert infos[i]["TimeLimit.truncated"]
        assert infos[i]["terminal_observation"].tolist() == [9, 1]
        assert "SIGKILL" in infos[i]["muster"]["error"]
    assert "muster" not in infos[0]
    assert envs.step(np.zeros(4, int))[0][:, 1].tolist() == [3, 3, 1, 1]
    envs.close()


def test_ppo_learns_the_same() -> None:
    from stable_baselines3 import PPO

    weights = []
    for make in (vec_env.DummyVecEnv, partial(compat.VecEnv, num_workers=2)):
        envs = make(MAKERS["cart pole"])
        model = PPO(
            "MlpPolicy",
            envs,
            n_steps=16,
            batch_size=16,
            n_epochs=1,
            seed=0,
            device="cpu",
        ).learn(96)
        weights.append(
            {name: value.numpy() for name, value in model.policy.state_dict().items()}
        )
        envs.close()
    assert_equal(*weights)
