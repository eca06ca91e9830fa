"""Environments with prt_rl's interface, or Gymnasium's, as an env batch; and their states in
prt_rl's form.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from muster.capabilities import Bypasses, CountsSteps, DrawsActions
from muster.env_spec import EnvSpec
from muster.envs.build import build_env
from muster.envs.checks import call
from muster.envs.stacked import StackedEnvs
from muster.errors import BadEnvOutput, BadOption, UnsupportedEnv
from muster.keys import ACTION, OBSERVATION, REWARD, Key, next_of
from muster.memory.slots import Lane, numpy_dtype
from muster.memory.specs import Array, ArraySpec, Column, Specs
from muster.protocols import EnvBatch, Step
from muster.rng import GroupRng
from muster.utils.integers import integer
from muster.utils.private_names import usable

TERMINATED = next_of(("terminated",))
DEPTH = 32  # of wrappers around a vector environment
METHODS = ("get_num_envs", "reset", "step")
GYMNASIUM_WRAPPER = "prt_rl.env.wrappers.gymnasium_envs.GymnasiumWrapper"


class Side(NamedTuple):
    """Environments; ``show`` copies states ``[..., *shape]`` in prt_rl's form."""

    env: EnvBatch
    show: Callable[[torch.Tensor], torch.Tensor]

    def rewards(self, lane: Lane) -> torch.Tensor:
        """Rewards, ``[T, N, 1]``, or of the environment's own shape and dtype per step."""
        own: torch.Tensor | None = lane.cache.get(REWARD)
        return lane.tensors[REWARD].unsqueeze(-1) if own is None else own


def side_of(env: Any) -> Side:
    """Return the environments of a collector, recognized by their methods; ``UnsupportedEnv`` for
    other objects.

    The environments inside prt_rl's own ``GymnasiumWrapper`` are stepped one by one, as in its
    vector environment, and reset once. Subclasses and wrappers of it are stepped through their own
    methods.
    """
    if (inside := _inside(env)) is not None:
        return _gymnasium(StackedEnvs(inside), env.device)
    if all(callable(getattr(env, name, None)) for name in METHODS):
        envs = PrtEnvs(env)
        return Side(
            envs,
            lambda rows: (
                rows.to(envs.state_device)
                if envs.state_device.type != "cpu"
                else rows.clone()
            ),
        )
    return _gymnasium(build_env(env, None), torch.device("cpu"))


class PrtEnvs(EnvBatch, Bypasses, CountsSteps, DrawsActions):
    """N environments behind one object with prt_rl's interface; implements ``EnvBatch``.

    Rows are on the host.
    """

    bypassed = ()

    def __init__(self, env: Any) -> None:
        B = _number_of(env)
        self.env = env
        # observations are added at the first reset, and actions at the first action
        self.spec = EnvSpec(type(env).__name__, B, (B,), {}, {})
        self.state_device = torch.device("cpu")
        self.action_device = torch.device("cpu")
        self._state_dtype: torch.dtype | None = None  # of the first states
        # the next reset of all is one call of ``reset``, not one ``reset_index`` for each
        self._resets_all = True
        self._first: torch.Tensor | None = None
        self._reward_kind: tuple[tuple[int, ...], torch.dtype] | None = None
        self._plain_rewards = False
        self._vector = _sync_vector_in(env)

    def look(self) -> None:
        """Reset the environments to find shape and dtype of states; the first ``reset`` uses these
        states.
        """
        if self.spec.observation_specs:
            return
        state = self._reset_all().clone()
        if state.layout is not torch.strided:
            raise BadEnvOutput(
                f"{self.spec.name}.reset returned a sparse tensor: return state.to_dense()"
            )
        try:
            dtype = numpy_dtype(state.dtype)
        except TypeError as error:
            raise BadEnvOutput(
                f"{self.spec.name}.reset returned a state of dtype {state.dtype}. Rows have the"
                " dtypes of NumPy, which lacks it: return state.float()"
            ) from error
        self._first = state
        observed: Specs = {OBSERVATION: ArraySpec(tuple(state.shape[1:]), dtype)}
        self.spec = replace(self.spec, observation_specs=observed)
        self.state_device = state.device
        self._state_dtype = state.dtype

    def accept(self, column: Column, device: torch.device) -> None:
        """Take actions like the first one: a column, on a device."""
        actions: Specs = {ACTION: ArraySpec(column.shape, column.dtype)}
        self.spec = replace(self.spec, action_specs=actions)
        self.action_device = device

    def reset_all_next(self) -> None:
        """Reset all environments with one call of ``reset``, when they are reset next."""
        self._resets_all = True

    def sample(self, rng: GroupRng, shape: tuple[int, ...]) -> dict[Key, Array]:
        raise NotImplementedError(
            f"{self.spec.name}: actions are the policy's, and random ones are not supported"
        )

    def reset(
        self,
        arrays: Mapping[Key, Any],
        row: int,
        which: Sequence[int],
        seeds: Sequence[int] | None,
    ) -> None:
        rows: Array = arrays[OBSERVATION][row]
        one_by_one = hasattr(self.env, "reset_index")
        if len(which) == self.spec.num_envs and (self._resets_all or not one_by_one):
            state = self._first
            self._first = None
            self._resets_all = False
            rows[...] = (self._reset_all() if state is None else state).cpu().numpy()
            return
        if not one_by_one:
            raise UnsupportedEnv(
                f"{self.spec.name} has no reset_index(index), by which one of {self.spec.num_envs}"
                " environments is reset where its episode is over"
            )
        for i in which:
            state = self._pair("reset_index", i)
            if isinstance(state, torch.Tensor) and state.ndim < rows.ndim:
                state = state.unsqueeze(0)
            rows[i] = self._checked(state, 1, "reset_index")[0].cpu().numpy()
            # else it would reset the environment again instead of its next step
            if self._vector is not None:
                self._vector._autoreset_envs[i] = False

    def start(self, lane: Lane) -> Step:
        if self not in lane.cache:
            (action_key,) = self.spec.action_specs
            columns = (
                lane.tensors[action_key],
                lane.tensors[OBSERVATION][1:],
                lane.tensors[REWARD].unsqueeze(-1),
            )
            lane.cache[self] = [column.unbind(0) for column in columns]
        actions, states, rewards = lane.cache[self]
        terminated = lane.arrays[TERMINATED]
        B = self.spec.num_envs
        device = self.action_device
        plain = (B, 1)

        def step(t: int) -> Sequence[int] | None:
            got = call(
                self.env,
                "step",
                self.spec.name,
                actions[t].clone() if device.type == "cpu" else actions[t].to(device),
            )
            self.executed_in_row = B
            if not isinstance(got, tuple) or len(got) != 4:
                raise BadEnvOutput(
                    f"{self.spec.name}.step returned {_kind(got)}, expected (state, reward, done,"
                    " info)"
                )
            state, reward, done, _ = got
            states[t].copy_(self._checked(state, B, "step"))
            if (
                self._plain_rewards
                and getattr(reward, "shape", None) == plain
                and reward.dtype is torch.float32
            ):
                rewards[t].copy_(reward)
            else:
                self._store_reward(lane, t, reward)
            if getattr(done, "dtype", None) is torch.bool:
                flags = done.reshape(-1).tolist()
            else:
                flags = self._flags(done)
            if len(flags) != B:
                raise BadEnvOutput(
                    f"{self.spec.name}.step returned {len(flags)} done flags for {B} environments"
                )
            finished = [i for i, over in enumerate(flags) if over]
            if finished:
                terminated[t, finished] = True
            self.executed_in_row = 0
            return finished or None

        return step

    def bypass(self, which: Collection[int]) -> None:
        """Do nothing: environments are left out only after the last step of a rollout."""

    def objects(self) -> Sequence[object]:
        return [self.env]

    def _store_reward(self, lane: Lane, t: int, reward: Any) -> None:
        """Store rewards, which must be like the first; if not ``[N, 1]`` float32, in addition to
        the column of sums.
        """
        B = self.spec.num_envs
        reward = _tensor(reward, f"{self.spec.name}.step returned rewards")
        reward = reward.reshape(-1, 1) if reward.ndim < 2 else reward
        kind = tuple(reward.shape), reward.dtype
        is_one_each = len(reward) == B and reward.numel() > 0
        if self._reward_kind is None and is_one_each and not reward.is_complex():
            self._reward_kind = kind
            self._plain_rewards = kind == ((B, 1), torch.float32)
        if kind != self._reward_kind:
            raise BadEnvOutput(
                f"{self.spec.name}.step returned rewards of shape {kind[0]} and dtype {kind[1]},"
                f" expected {self._reward_kind or f'a number for each of {B} environments, [{B}, 1]'}"
            )
        lane.tensors[REWARD][t] = reward.reshape(B, -1).sum(1)
        if not self._plain_rewards:
            if REWARD not in lane.cache:
                lane.cache[REWARD] = torch.zeros(
                    (lane.T, *reward.shape), dtype=reward.dtype, device="cpu"
                )
            lane.cache[REWARD][t] = reward

    def _flags(self, done: Any) -> list[Any]:
        """Return flags that are not a tensor of bools, one after another."""
        flags: list[Any] = (
            _tensor(done, f"{self.spec.name}.step returned done flags")
            .reshape(-1)
            .tolist()
        )
        for i, flag in enumerate(flags):
            if flag not in (0, 1):
                raise BadEnvOutput(
                    f"{self.spec.name}.step returned {flag} as done flag of environment {i},"
                    " expected True or False"
                )
        return flags

    def _reset_all(self) -> torch.Tensor:
        return self._checked(self._pair("reset"), self.spec.num_envs, "reset")

    def _pair(self, method: str, *args: Any) -> Any:
        """Return the state from a method that returns ``(state, info)``."""
        got = call(self.env, method, self.spec.name, *args)
        if not isinstance(got, tuple) or len(got) != 2:
            raise BadEnvOutput(
                f"{self.spec.name}.{method} returned {_kind(got)}, expected (state, info)"
            )
        return got[0]

    def _checked(self, state: Any, n: int, method: str) -> torch.Tensor:
        """Return ``state`` if it is a tensor ``[n, *shape]`` like the first one; else raise
        ``BadEnvOutput``.
        """
        spec = self.spec.observation_specs.get(OBSERVATION)
        if not isinstance(state, torch.Tensor):
            raise BadEnvOutput(
                f"{self.spec.name}.{method} returned a state that is {_kind(state)}, expected a"
                " tensor"
            )
        shape = tuple(state.shape[1:]) if spec is None else spec.shape
        dtype = self._state_dtype
        is_cast = dtype is not None and state.dtype is not dtype
        if state.shape != (n, *shape) or (is_cast and not _holds(dtype, state)):
            expected = (
                f"({n}, ...)" if spec is None else f"{(n, *shape)}, dtype {spec.dtype}"
            )
            raise BadEnvOutput(
                f"{self.spec.name}.{method} returned a state of shape {tuple(state.shape)}, dtype"
                f" {state.dtype}, expected {expected}: one row for each of {self.spec.num_envs}"
                " environments, always of the same kind"
            )
        return state


def _gymnasium(env: EnvBatch, device: torch.device) -> Side:
    """Environments with states in the form of ``GymnasiumWrapper``: float32 instead of float64,
    scalars as ``[1]``.
    """
    spec = env.spec
    if (
        len(spec.observation_specs) != 1
        or len(spec.action_specs) != 1
        or spec.device is not None
    ):
        raise UnsupportedEnv(
            f"{spec.name} has observations {sorted(spec.observation_specs)} and actions"
            f" {sorted(spec.action_specs)}, and a prt_rl policy gets one tensor and returns one, in"
            " the host's memory. Flatten them with a wrapper, or use muster.Collector"
        )
    (leaf,) = spec.observation_specs.values()
    if not leaf.is_tensor:
        raise UnsupportedEnv(
            f"{spec.name}: observations must be arrays for a prt_rl policy, got {leaf}"
        )

    env.store_as(replace(spec, batch_shape=(spec.num_envs,)))
    if leaf.shape and leaf.dtype != np.float64 and device.type == "cpu":
        return Side(env, torch.clone)

    def show(rows: torch.Tensor) -> torch.Tensor:
        rows = rows if leaf.shape else rows.unsqueeze(-1)
        return rows.to(
            device,
            torch.float32 if rows.dtype == torch.float64 else rows.dtype,
            copy=True,
        )

    return Side(env, show)


def _inside(env: Any) -> list[Any] | None:
    """The environments in prt_rl's own wrapper, if the wrapper adds nothing to their behaviour;
    else None.
    """
    if (
        f"{type(env).__module__}.{type(env).__name__}" != GYMNASIUM_WRAPPER
        or env.render_mode == "rgb_array"
    ):
        return None
    composite = not isinstance(env.get_parameters().action_continuous, bool)
    if composite or not vars(env).keys().isdisjoint({*METHODS, "reset_index"}):
        return None
    if env.num_envs == 1:
        return [env.env]
    return list(env.env.envs) if type(env.env).__name__ == "SyncVectorEnv" else None


def _sync_vector_in(env: Any) -> Any:
    """The inner vector environment that resets environments at the step after their last one; or
    None.
    """
    for _ in range(DEPTH):
        mode = getattr(getattr(env, "autoreset_mode", None), "name", "")
        if mode and hasattr(env, "envs"):
            if mode == "SAME_STEP":
                raise UnsupportedEnv(
                    f"{type(env).__name__} resets an environment within the last step of its"
                    " episode, and the last state is lost on the way: make it with"
                    " autoreset_mode=AutoresetMode.DISABLED"
                )
            if usable("gymnasium", (env, ("_autoreset_envs",))):
                return env
            if mode == "NEXT_STEP":
                raise UnsupportedEnv(
                    f"{type(env).__name__} resets an environment with the step after its last one,"
                    " and this version of Gymnasium has no way to keep it from that: make it with"
                    " autoreset_mode=AutoresetMode.DISABLED"
                )
            return None
        env = getattr(env, "env", None)
    return None


def _number_of(env: Any) -> int:
    """Return the number of environments behind an object with prt_rl's interface."""
    name = type(env).__name__
    if isinstance(env, type):
        raise UnsupportedEnv(
            f"env is the class {env.__name__}: pass an object, {env.__name__}(...)"
        )
    given = call(env, "get_num_envs", name)
    try:
        return integer("get_num_envs()", given)
    except BadOption as error:
        raise UnsupportedEnv(
            f"{name}.get_num_envs() returned {given!r}, expected an integer of at least 1"
        ) from error


def _holds(dtype: Any, state: torch.Tensor) -> bool:
    """Return whether states of another dtype can be stored as ``dtype``, with no loss but digits of
    floats.
    """
    if not torch.can_cast(state.dtype, dtype):
        return False
    if dtype in (torch.float32, torch.float64):  # their range is that of all others
        return True
    stored = state.to(dtype)
    if stored.is_floating_point() or stored.is_complex():
        return torch.equal(stored.isfinite(), state.isfinite())
    return torch.equal(stored.to(state.dtype), state)


def _tensor(value: Any, what: str) -> torch.Tensor:
    """Return numbers of the environment as a tensor on the host; ``what`` begins the error if they
    are none.
    """
    try:
        return torch.as_tensor(value, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadEnvOutput(
            f"{what} of type {_kind(value)}, expected a tensor, one value for each environment"
        ) from error


def _kind(value: Any) -> str:
    return (
        f"{type(value).__name__} of {len(value)}"
        if isinstance(value, tuple)
        else type(value).__name__
    )
