"""Steps of a plain ``GymEnv`` without TorchRL's step: the same data from the inner environment, at
its own speed.

An environment is plain if its class is ``GymEnv`` or ``GymWrapper`` (no derived class, not
patched), around a single environment with vectors or images as observations, and one discrete or
continuous action. Plain environments in a ``SerialEnv`` or ``TransformedEnv`` are stepped directly,
too. All others are stepped by ``env._step``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torchrl.data import Bounded, Categorical, OneHot, Unbounded
from torchrl.envs import EnvBase, GymEnv, GymWrapper, SerialEnv, TransformedEnv

from muster.envs.checks import FIX, as_flag
from muster.envs.torchrl_one import Advance, OneEnv
from muster.envs.torchrl_specs import Declared, declared
from muster.errors import BadEnvOutput, shown
from muster.keys import FLAGS, REWARD, Key, next_of
from muster.memory.slots import Lane
from muster.utils.private_names import tensordict_maker

PATCHABLE = {
    "_step",
    "_reset",
    "step",
    "reset",
    "read_obs",
    "read_reward",
    "read_action",
    "read_done",
    "rand_action",
    "_output_transform",
    "_reset_output_transform",
    "_set_seed",
    "set_seed",
}
TERMINATED = next_of(("terminated",))
TRUNCATED = next_of(("truncated",))


def is_plain_gym(env: EnvBase, specs: Declared) -> bool:
    """Return whether ``PlainGym`` produces the same data as ``env``."""
    if type(env) not in (GymEnv, GymWrapper) or _is_patched(env):
        return False
    if (
        env._is_batched
        or env.info_dict_reader
        or env.from_pixels
        or env.wrapper_frame_skip != 1
    ):
        return False
    if env.device is not None and env.device.type != "cpu":
        return False
    if (
        len(specs.observations) != 1
        or specs.flags != FLAGS
        or specs.reward_key != REWARD
    ):
        return False
    inner: Any = env._env
    if not isinstance(inner, gymnasium.Env):
        return False
    (observation,) = specs.observations.values()
    space = inner.observation_space
    if not isinstance(space, spaces.Box) or not observation.shape:
        return False
    if space.shape != observation.shape or space.dtype != observation.dtype:
        return False
    return len(specs.actions) == 1 and _action_reader(env) is not None


def _is_patched(env: EnvBase) -> bool:
    own = [value for name, value in env.__dict__.items() if name in PATCHABLE]
    modules = [str(getattr(value, "__module__", "")) for value in own]
    return any(not module.startswith("torchrl.") for module in modules)


def plain_parts(env: EnvBase) -> list[Any] | None:
    """Return the environments in a ``SerialEnv`` if all are plain; else None."""
    if type(env) is not SerialEnv or "_step" in env.__dict__:
        return None
    if env.is_closed:
        env.start()
    parts = env._envs
    return (
        list(parts)
        if all(is_plain_gym(part, declared(part)) for part in parts)
        else None
    )


def fast_step(env: EnvBase) -> Callable[[Any], Any] | None:
    """Return a faster ``_step`` for a ``TransformedEnv`` around a plain environment; None for other
    environments.
    """
    if type(env) is not TransformedEnv or "_step" in env.__dict__:
        return None
    if env.base_env.device != env.device:
        return None
    base: Any = env.base_env
    specs = declared(base)
    if not is_plain_gym(base, specs):
        return None
    ((key, spec),) = specs.observations.items()
    (action_key,) = specs.actions
    step = base._env.step
    read = _action_reader(base)
    shape = spec.shape
    dtype = spec.dtype
    transform = env.transform
    assert read is not None
    make_td = tensordict_maker()

    def inner(td: Any) -> Any:
        action = read(td.get(action_key).numpy())
        obs, reward, terminated, truncated, _ = step(action)
        if type(obs) is np.ndarray and obs.shape == shape and obs.dtype == dtype:
            out = {key[0]: torch.from_numpy(obs.copy())}
        else:
            out = base.read_obs(obs)
        if isinstance(reward, float):
            out["reward"] = torch.tensor([float(reward)], device="cpu")
        else:
            out["reward"] = base.read_reward(reward)
        ended = as_flag(terminated, "terminated", "env")
        cut = as_flag(truncated, "truncated", "env")
        flags = torch.tensor([[ended or cut], [ended], [cut]], device="cpu")
        out["done"], out["terminated"], out["truncated"] = flags.unbind(0)
        return make_td(out, batch_size=torch.Size([]), device=base.device)

    def whole(td: Any) -> Any:
        given = td.get("next", None)
        td = transform.inv(td)
        after = inner(td)
        if given is not None:
            after.update(given.exclude(*after.keys(True, True)))
        return transform._step(td, after)

    return whole


class PlainGym(OneEnv):
    """Steps and resets the environment inside a ``GymEnv``."""

    def start(self, lane: Lane) -> Advance:
        env = self.env
        i = self.columns.start
        name = self.name
        ((key, spec),) = self.specs.observations.items()
        (action_key,) = self.specs.actions
        step = env._env.step
        read = _action_reader(env)
        shape = spec.shape
        dtype = spec.dtype
        observations = lane.arrays[key][:, i]
        actions = lane.arrays[action_key][:, i]
        rewards = lane.arrays[REWARD][:, i]
        terminated_rows = lane.arrays[TERMINATED]
        truncated_rows = lane.arrays[TRUNCATED]
        assert read is not None

        def advance(t: int) -> list[int] | None:
            self.executed = False
            try:
                got = step(read(actions[t]))
            except Exception as error:
                raise self.failed(f"step (row {t} of the batch)", error) from error
            self.executed = True
            try:
                obs, reward, terminated, truncated, _ = got
            except (TypeError, ValueError) as error:
                raise BadEnvOutput(
                    f"{name}.step (row {t} of the batch) returned {type(got).__name__}, "
                    f"expected (observation, reward, terminated, truncated, info). {FIX}"
                ) from error
            if type(obs) is np.ndarray and obs.shape == shape and obs.dtype == dtype:
                observations[t + 1] = obs
            else:
                observations[t + 1] = self._read(
                    obs, key, f"step (row {t} of the batch)"
                )
            rewards[t] = (
                reward if isinstance(reward, float) else env.read_reward(reward).item()
            )
            if terminated is False and truncated is False:
                return None
            ended = as_flag(terminated, "terminated", name)
            cut = as_flag(truncated, "truncated", name)
            terminated_rows[t, i] = ended
            truncated_rows[t, i] = cut
            return [i] if ended or cut else None

        return advance

    def reset(
        self,
        arrays: Mapping[Key, Any],
        row: int,
        which: Sequence[int],
        seeds: Sequence[int] | None,
        options: dict[str, Any] | None,
    ) -> None:
        (key,) = self.specs.observations
        with self.explained("reset"):
            if seeds is not None:
                self.env.set_seed(seeds[0])
            obs, _ = self.env._env.reset(**(options or {}))
        arrays[key][row, self.columns.start] = self._read(obs, key, "reset")

    def _read(self, obs: Any, key: Key, method: str) -> Any:
        """Return the observation as TorchRL reads it."""
        spec = self.specs.observations[key]

        def misfit() -> BadEnvOutput:
            returned = shown(lambda: repr(obs))
            return BadEnvOutput(
                f"{self.name}.{method} returned {returned}, its spec says {spec}. {FIX}"
            )

        try:
            value = self.env.read_obs(obs)[key[0]].numpy()
        except Exception as error:
            raise misfit() from error
        if value.shape != spec.shape or value.dtype != spec.dtype:
            raise misfit()
        return value


def _action_reader(env: Any) -> Callable[[Any], Any] | None:
    """Return a function from an action row to an action of the inner environment, like
    ``env.read_action``, or None.
    """
    spec = env.full_action_spec[env.action_keys[0]]
    space = env._env.action_space
    if isinstance(space, spaces.Discrete) and space.start == 0:
        if type(spec) is OneHot and len(spec.shape) == 1:
            return lambda row: int(row.argmax())
        if type(spec) is Categorical and not spec.shape:
            return int
    if not isinstance(space, spaces.Box) or not isinstance(spec, (Bounded, Unbounded)):
        return None
    return np.copy if spec.shape and spec.dtype.is_floating_point else None
