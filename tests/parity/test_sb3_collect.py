"""``collect_with_muster`` fills the buffers of SB3's algorithms as SB3 does, and training goes on
from there.
"""

from __future__ import annotations

import copy
import os
import signal
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from muster.errors import BadOption, EnvError, UnsupportedEnv
from muster.testing import CountingEnv, SpaceEnv

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="worker processes")

sb3 = pytest.importorskip("stable_baselines3")
compat = pytest.importorskip("muster.compat.sb3")

from stable_baselines3.common import noise, vec_env  # noqa: E402
from stable_baselines3.common.callbacks import BaseCallback  # noqa: E402
from stable_baselines3.common.monitor import Monitor  # noqa: E402
from stable_baselines3.common.utils import set_random_seed  # noqa: E402

BOX = spaces.Box(-1, 1, (2,), np.float32)
OBSERVATIONS: dict[str, spaces.Space[Any]] = {
    "box": spaces.Box(-np.inf, np.inf, (3,), np.float32),
    "float64": spaces.Box(-np.inf, np.inf, (3,), np.float64),
    "dict": spaces.Dict(
        {
            "place": spaces.Box(-np.inf, np.inf, (2,), np.float32),
            "room": spaces.Discrete(4),
        }
    ),
}


class Walk(gymnasium.Env[Any, Any]):
    """A random walk that actions push: it terminates at 3, and is truncated after 7 steps."""

    def __init__(
        self, observation: str = "box", action_space: spaces.Space[Any] | None = None
    ) -> None:
        self.observation_space = OBSERVATIONS[observation]
        self.action_space = spaces.Discrete(3) if action_space is None else action_space
        self.t, self.x = 0, 0.0

    def reset(
        self, *, seed: int | None = None, options: Any = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t, self.x = 0, 0.0
        return self._observe(), {"first": True}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        push = float(np.sum(action))
        assert not isinstance(self.action_space, spaces.Box) or np.all(
            np.abs(action) <= self.action_space.high
        )
        self.x += 0.3 * push + self.np_random.normal()
        over = abs(self.x) > 3
        info = {"is_success": over, "x": self.x} if over or self.t == 2 else {}
        return self._observe(), self.x - push, over, self.t >= 7, info

    def _observe(self) -> Any:
        space = self.observation_space
        if isinstance(space, spaces.Dict):
            return {
                "place": np.array([self.x, self.t], np.float32),
                "room": np.int64(self.t % 4),
            }
        return np.array([self.x, self.t, 1 / (1 + self.t)], space.dtype)


class Watch(BaseCallback):
    """Keeps what a callback sees, the buffer of every rollout, and stops training after ``steps``
    calls.
    """

    def __init__(self, steps: int = 10**9) -> None:
        super().__init__()
        self.steps, self.seen, self.buffers = steps, list[Any](), list[dict[str, Any]]()

    def _on_step(self) -> bool:
        names = ("new_obs", "rewards", "dones", "actions", "clipped_actions", "infos")
        self.seen.append(
            copy.deepcopy(
                {name: self.locals[name] for name in names if name in self.locals}
            )
        )
        self.seen[-1]["num_timesteps"] = self.model.num_timesteps, self.num_timesteps
        return len(self.seen) < self.steps

    def _on_rollout_end(self) -> None:
        buffer: Any = getattr(self.model, "rollout_buffer", None)
        if buffer is not None:
            self.buffers.append(fields(buffer))


def fields(buffer: Any) -> dict[str, Any]:
    """Return copies of all arrays of a buffer."""
    return {
        name: copy.deepcopy(value)
        for name, value in vars(buffer).items()
        if isinstance(value, (np.ndarray, dict))
    }


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key in value:
            yield from leaves(value[key], f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from leaves(item, f"{path}/{i}")
    elif not path.endswith("/t"):  # a time of ``Monitor``
        yield path, value


def assert_same(got: Any, expected: Any, tolerance: float = 0.0) -> None:
    ours, theirs = dict(leaves(got)), dict(leaves(expected))
    assert ours.keys() == theirs.keys()
    for path, value in ours.items():
        exact = not tolerance or np.asarray(value).dtype.kind != "f"
        check = (
            np.testing.assert_array_equal
            if exact
            else partial(np.testing.assert_allclose, rtol=0, atol=tolerance)
        )
        check(value, theirs[path], err_msg=path)
        assert getattr(value, "dtype", None) == getattr(theirs[path], "dtype", None), (
            path
        )


def weights(model: Any) -> dict[str, Any]:
    return {
        name: value.numpy().copy() for name, value in model.policy.state_dict().items()
    }


def times(model: Any) -> list[list[int]]:
    """Return the second entry of observations after training, which has reshaped the buffer: by
    environment.
    """
    return model.rollout_buffer.observations[:, 1].reshape(model.n_envs, -1).tolist()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """More threads take turns on the cores of this machine, which takes ten times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def replay(policy: Any, actions: list[Any]) -> None:
    """Let a policy choose these actions, one after another."""
    left = iter(actions)

    def forward(obs: Any) -> Any:
        chosen = torch.as_tensor(next(left))
        values, log_probs, _ = policy.evaluate_actions(
            obs, chosen.flatten(1) if chosen.ndim > 2 else chosen
        )
        return chosen, values, log_probs

    policy.forward = forward


def made(algorithm: Any, env: Any, **options: Any) -> Any:
    policy = (
        "MultiInputPolicy"
        if isinstance(env.observation_space, spaces.Dict)
        else "MlpPolicy"
    )
    return algorithm(
        policy, env, seed=3, device="cpu", policy_kwargs={"net_arch": [8]}, **options
    )


def learn(model: Any, steps: int, **options: Any) -> Watch:
    watch = Watch()
    set_random_seed(5)
    model.learn(steps, watch, **options)
    return watch


ON_POLICY: dict[str, Any] = {
    "categorical": (sb3.PPO, "box", None, 0, {}),
    "categorical, processes": (sb3.A2C, "box", None, 2, {}),
    "gaussian": (
        sb3.PPO,
        "box",
        spaces.Box(-1, 1, (2, 2), np.float32),
        0,
        {"policy_kwargs": {"net_arch": [8], "log_std_init": 0.7}},
    ),
    "multi-discrete": (sb3.A2C, "box", spaces.MultiDiscrete([2, 3]), 0, {}),
    "whole policy": (sb3.PPO, "float64", spaces.MultiBinary(2), 0, {}),
    "whole policy, box": (sb3.PPO, "float64", BOX, 0, {}),
    "dict, processes": (sb3.PPO, "dict", None, 2, {}),
}


@pytest.mark.parametrize("case", ON_POLICY)
def test_rollouts_are_those_of_sb3_for_the_same_actions(case: str) -> None:
    algorithm, observation, action_space, num_workers, extra = ON_POLICY[case]
    env_fns = [lambda: Monitor(Walk(observation, action_space))] * 3
    options = {
        "n_steps": 12,
        **({"batch_size": 12, "n_epochs": 2} if algorithm is sb3.PPO else {}),
    }
    models = []
    for _ in range(2):
        set_random_seed(3)
        policy = "MultiInputPolicy" if observation == "dict" else "MlpPolicy"
        kwargs = {"policy_kwargs": {"net_arch": [8]}, **extra}
        models.append(
            algorithm(
                policy,
                vec_env.DummyVecEnv(env_fns),
                seed=3,
                device="cpu",
                gamma=0.9,
                **options,
                **kwargs,
            )
        )
    ours, theirs = models
    with compat.collect_with_muster(
        ours, env_fns, num_workers=num_workers
    ) as collection:
        got = learn(ours, 2 * 36)
        got_after = learn(ours, 36, reset_num_timesteps=False)
        got_reset = learn(ours, 36)
        is_whole = type(collection.collector.policy).__name__ == "WholePolicy"
    assert is_whole == (case.startswith(("whole", "dict")))
    seen = [*got.seen, *got_after.seen, *got_reset.seen]
    replay(theirs.policy, [step["actions"] for step in seen])
    expected = [
        learn(theirs, 2 * 36),
        learn(theirs, 36, reset_num_timesteps=False),
        learn(theirs, 36),
    ]

    assert_same(got.buffers[0], expected[0].buffers[0], 1e-6)
    for which in ("observations", "actions", "rewards", "episode_starts"):
        assert_same(got.buffers[0][which], expected[0].buffers[0][which])
    for mine, other in zip([got, got_after, got_reset], expected, strict=True):
        assert_same(mine.seen, other.seen)
        assert_same(mine.buffers, other.buffers, 1e-4)
    assert any(info["TimeLimit.truncated"] for step in seen for info in step["infos"])
    assert any(
        step["dones"].any() and not step["infos"][0]["TimeLimit.truncated"]
        for step in seen
    )
    assert_same(weights(ours), weights(theirs), 1e-4)
    assert_same(list(ours.ep_info_buffer), list(theirs.ep_info_buffer))
    assert list(ours.ep_success_buffer) == list(theirs.ep_success_buffer)
    assert len(ours.ep_info_buffer) >= 3
    assert_same(ours._last_episode_starts, theirs._last_episode_starts)


def test_a_head_draws_from_the_distribution_of_the_policy() -> None:
    env_fns = [lambda: CountingEnv(4)] * 2
    model = made(
        sb3.PPO, vec_env.DummyVecEnv(env_fns), n_steps=2000, batch_size=4000, n_epochs=1
    )
    with compat.collect_with_muster(model, env_fns, num_workers=0):
        model.learn(4000)
    buffer = model.rollout_buffer
    first = buffer.observations.reshape(-1, 2)[:, 1] == 0
    share = buffer.actions.reshape(-1)[first].mean()
    expected = np.exp(
        buffer.log_probs.reshape(-1)[first & (buffer.actions.reshape(-1) == 1)][0]
    )
    assert abs(share - expected) < 5 * np.sqrt(0.25 / first.sum())


def test_a_callback_ends_training_and_training_goes_on() -> None:
    env_fns = [lambda: CountingEnv(5)] * 2
    model = made(
        sb3.PPO, vec_env.DummyVecEnv(env_fns), n_steps=8, batch_size=16, n_epochs=1
    )
    with compat.collect_with_muster(model, env_fns, num_workers=0):
        before = weights(model)
        model.learn(100, Watch(steps=3))
        assert (model.num_timesteps, model.rollout_buffer.pos) == (6, 2)
        assert_same(weights(model), before)
        model.learn(
            16, reset_num_timesteps=False
        )  # goes on after the 8 steps of the collector
        assert model.num_timesteps == 22
        assert times(model) == [[3, 4, 0, 1, 2, 3, 4, 0]] * 2
        assert model.rollout_buffer.episode_starts[:, 0].tolist() == [
            0,
            0,
            1,
            0,
            0,
            0,
            0,
            1,
        ]
        with pytest.raises(ZeroDivisionError):
            model.learn(
                16, lambda *_: 1 / 0, reset_num_timesteps=False
            )  # 1 2 3 4 0 1 2 3
        model.learn(16, reset_num_timesteps=False)
        assert times(model) == [[4, 0, 1, 2, 3, 4, 0, 1]] * 2
        assert model.rollout_buffer.episode_starts[:, 0].tolist() == [
            0,
            1,
            0,
            0,
            0,
            0,
            1,
            0,
        ]
        model.learn(16)
        assert times(model) == [[0, 1, 2, 3, 4, 0, 1, 2]] * 2


def test_closing_gives_collection_back_to_sb3(tmp_path: Any) -> None:
    env_fns = [lambda: CountingEnv(5)] * 2
    model = made(sb3.A2C, vec_env.DummyVecEnv(env_fns), n_steps=3)
    collection = compat.collect_with_muster(model, env_fns, num_workers=0)
    assert isinstance(model, sb3.A2C)
    assert type(model).__name__ == "A2C"
    model.learn(12)
    model.save(tmp_path / "model")
    again = (
        type(model).load(tmp_path / "model", env=model.env).learn(6)
    )  # collects by itself
    with compat.collect_with_muster(again, env_fns, num_workers=0) as another:
        again.learn(6)
    assert another.collector.stats().frames == 6
    again.learn(6)
    assert collection.collector.stats().frames == 12
    with pytest.raises(BadOption, match="close that collection first"):
        compat.collect_with_muster(model, env_fns)
    collection.close()
    collection.close()
    assert type(model) is sb3.A2C
    model.learn(6, reset_num_timesteps=False)
    assert collection.collector.stats().frames == 12
    for each in (model, again):
        assert times(each) == [[0, 1, 2]] * 2
        assert each.rollout_buffer.episode_starts[:, 0].tolist() == [1, 0, 0]
    with compat.collect_with_muster(model, env_fns, num_workers=0):
        model.n_steps = 4
        with pytest.raises(BadOption, match="n_steps=3"):
            model.learn(8)


@pytest.mark.skipif(sys.platform != "linux", reason="kills processes")
def test_a_lost_worker_is_restarted() -> None:
    starts: list[list[bool]] = []

    class Kill(BaseCallback):
        def _on_rollout_start(self) -> None:
            if self.model.num_timesteps == 16:
                os.kill(collection.collector.stats().workers[1].pid, signal.SIGKILL)

        def _on_step(self) -> bool:
            return True

        def _on_rollout_end(self) -> None:
            starts.append(
                self.model.rollout_buffer.episode_starts[0].astype(bool).tolist()
            )

    env_fns = [lambda: CountingEnv(50)] * 4
    model = made(
        sb3.PPO, vec_env.DummyVecEnv(env_fns), n_steps=4, batch_size=16, n_epochs=1
    )
    with compat.collect_with_muster(
        model, env_fns, num_workers=2, on_failure="restart"
    ) as collection:
        model.learn(48, Kill())
        assert model.num_timesteps == 48
        assert (
            sum(worker.restarts for worker in collection.collector.stats().workers) == 1
        )
    assert times(model) == [[8, 9, 10, 11]] * 2 + [[4, 5, 6, 7]] * 2
    assert starts == [[True] * 4, [False, False, True, True], [False] * 4]


def test_errors_of_environments_are_raised() -> None:
    class Broken(CountingEnv):
        def step(self, action: Any) -> Any:
            raise RuntimeError("the simulator has crashed")

    model = made(sb3.PPO, vec_env.DummyVecEnv([CountingEnv]), n_steps=4, batch_size=4)
    with (
        compat.collect_with_muster(model, Broken, num_workers=0),
        pytest.raises(EnvError, match="has crashed"),
    ):
        model.learn(8)


OFF_POLICY: dict[str, Any] = {
    "DQN, n-step": (
        sb3.DQN,
        "box",
        None,
        3,
        {"n_steps": 3, "train_freq": 2, "target_update_interval": 6},
    ),
    "DQN, dict": (sb3.DQN, "dict", None, 2, {"exploration_fraction": 0.9}),
    "SAC, episodes": (
        sb3.SAC,
        "box",
        BOX,
        1,
        {"train_freq": (2, "episode"), "gradient_steps": 3},
    ),
    "TD3, noise": (
        sb3.TD3,
        "box",
        BOX,
        2,
        {
            "action_noise": noise.OrnsteinUhlenbeckActionNoise(
                np.zeros(2), np.full(2, 0.2)
            )
        },
    ),
    "DDPG, normalized": (sb3.DDPG, "box", BOX, 2, {}),
    "PPO, normalized": (
        sb3.PPO,
        "box",
        None,
        2,
        {"n_steps": 20, "batch_size": 20, "n_epochs": 2},
    ),
    "A2C, gSDE": (
        sb3.A2C,
        "box",
        BOX,
        2,
        {"n_steps": 20, "use_sde": True, "sde_sample_freq": 3},
    ),
}


@pytest.mark.parametrize("case", OFF_POLICY)
def test_steps_in_workers_train_the_same_model(case: str) -> None:
    algorithm, observation, action_space, num_envs, options = OFF_POLICY[case]
    env_fns = [lambda: Monitor(Walk(observation, action_space))] * num_envs
    if algorithm not in (sb3.PPO, sb3.A2C):
        options = {
            "learning_starts": 10,
            "buffer_size": 500,
            "batch_size": 8,
            **options,
        }
    found = []
    for which in ("ours", "theirs"):
        set_random_seed(3)
        env: Any = vec_env.DummyVecEnv(env_fns)
        model = made(
            algorithm,
            vec_env.VecNormalize(env) if "normalized" in case else env,
            **copy.deepcopy(options),
        )
        collection = (
            compat.collect_with_muster(model, env_fns, inference="server")
            if which == "ours"
            else None
        )
        watches = [
            learn(model, 45, log_interval=1),
            learn(model, 15, reset_num_timesteps=False),
        ]
        buffer = getattr(model, "replay_buffer", None) or model.rollout_buffer
        seen = [watch.seen for watch in watches]
        found.append(
            (
                fields(buffer),
                weights(model),
                list(model.ep_info_buffer),
                seen,
                model.num_timesteps,
            )
        )
        if collection is not None:
            assert isinstance(
                vec_env.unwrap_vec_wrapper(model.env, vec_env.VecNormalize)
                or model.env,
                vec_env.VecEnv,
            )
            collection.close()
            assert model.env.unwrapped is env
            model.learn(20, reset_num_timesteps=False)
    assert_same(found[0], found[1])
    timeouts = found[0][0].get("timeouts")
    assert timeouts is None or timeouts.any()


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"on_failure": "x"}, "on_failure='x': expected one of 'raise', 'restart'$"),
        ({"on_failure": "drop"}, "on_failure='drop'"),
        ({"timeouts": 5}, "timeouts=5: expected a dict"),
        ({"timeouts": 0}, "timeouts=0: expected a dict"),
        ({"timeouts": {"walk": 1.0}}, "no phase 'walk'"),
        ({"start_method": "x"}, "start_method='x'"),
    ],
)
def test_options_of_workers_are_checked_without_workers_too(
    num_workers: int, option: dict[str, Any], message: str
) -> None:
    env_fns = [lambda: CountingEnv(5)] * 2
    model = made(sb3.A2C, vec_env.DummyVecEnv(env_fns), n_steps=3)
    with pytest.raises(BadOption, match=message):
        compat.collect_with_muster(model, env_fns, num_workers=num_workers, **option)
    assert type(model) is sb3.A2C
    model.learn(6)
    assert times(model) == [[0, 1, 2]] * 2


def test_right_options_of_workers_are_accepted_without_workers() -> None:
    env_fns = [lambda: CountingEnv(5)] * 2
    model = made(sb3.A2C, vec_env.DummyVecEnv(env_fns), n_steps=3)
    options = {"on_failure": "restart", "timeouts": {"step": 3.0}}
    with compat.collect_with_muster(
        model, iter(env_fns), num_workers=0, start_method="spawn", **options
    ):
        model.learn(6)
    assert times(model) == [[0, 1, 2]] * 2


def test_a_dict_of_one_observation() -> None:
    space = spaces.Dict({"observation": BOX})
    env = vec_env.DummyVecEnv([lambda: SpaceEnv(space, spaces.Discrete(2), 3)])
    model = made(sb3.A2C, env, n_steps=4)
    with compat.collect_with_muster(
        model, lambda: SpaceEnv(space, spaces.Discrete(2), 3), num_workers=0
    ):
        model.learn(4)
    assert model.rollout_buffer.observations["observation"].all()


def test_what_cannot_be_collected_is_refused() -> None:
    fns = [lambda: Walk(action_space=BOX)] * 2
    env = vec_env.DummyVecEnv(fns)
    ppo, collect = made(sb3.PPO, env), compat.collect_with_muster

    class Masked(sb3.PPO):
        def collect_rollouts(self, *args: Any, **kwargs: Any) -> bool:
            return super().collect_rollouts(*args, **kwargs)

    for model, arguments, kwargs, message in (
        (object(), [fns], {}, "object, expected an algorithm"),
        (ppo, [fns[:1]], {}, "1 functions, but the model has 2"),
        (ppo, [["CartPole-v1"] * 2], {}, "type str, expected functions"),
        (
            ppo,
            [None],
            {},
            "NoneType, expected a list .*, or one function, or an env id",
        ),
        (ppo, [3], {}, "int, expected a list of functions"),
        (ppo, [fns[0]()], {}, "Walk, expected a list of functions"),
        (ppo, [env], {}, "DummyVecEnv, expected a list of functions"),
        (ppo, [fns], {"inference": "threads"}, "'worker', 'server' or None"),
        (ppo, [fns], {"num_workers": 0, "inference": "server"}, "at least 1 worker"),
        (ppo, [fns], {"num_workers": -1}, "num_workers"),
        (
            made(sb3.SAC, env, buffer_size=10),
            [fns],
            {"inference": "worker"},
            "SAC decides after every step",
        ),
        (made(sb3.PPO, env, use_sde=True), [fns], {}, "use_sde=True"),
        (made(sb3.PPO, vec_env.VecNormalize(env)), [fns], {}, "VecNormalize"),
        (made(Masked, env), [fns], {}, "Masked has a collect_rollouts of its own"),
    ):
        with pytest.raises(BadOption, match=message):
            collect(model, *arguments, **kwargs)
    for inference in ("worker", "server"):
        with pytest.raises(UnsupportedEnv, match="the model"):
            collect(
                ppo,
                lambda: Walk("dict", BOX),
                num_workers=int(inference == "server"),
                inference=inference,
            )
    assert type(ppo) is sb3.PPO
    assert ppo.env is env
    with collect(ppo, fns, num_workers=0):  # a refusal has changed nothing
        ppo.learn(10)
