"""From what the user gave (id, factory, environment) to an env batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium
from gymnasium.vector import VectorEnv

from muster.envs.stacked import StackedEnvs
from muster.envs.vector import VectorEnvBatch
from muster.errors import BadOption, EnvError, UnsupportedEnv
from muster.protocols import EnvBatch

ACCEPTED = "an env id, a gymnasium.Env, a gymnasium.vector.VectorEnv, or a function that returns one of these"


@dataclass(frozen=True)
class BuiltEnv:
    """An env batch, and whether its environments are a dimension of the user's batch."""

    env: EnvBatch
    batched: bool


def build_env(source: Any, num_envs: int | None) -> BuiltEnv:
    """Make the env batch of one group.

    Args:
        source: see ``ACCEPTED``.
        num_envs: that many environments from an id or a factory; None is one, without a batch dimension.

    Raises:
        UnsupportedEnv: nothing an adapter takes.
        BadOption: ``num_envs`` for something that cannot be multiplied.
        EnvError: the factory raised; the original is the cause.
    """
    if isinstance(source, str):
        return _stack(lambda: gymnasium.make(source), num_envs, name=source)
    if isinstance(source, (gymnasium.Env, VectorEnv)):
        if num_envs is not None and num_envs != getattr(source, "num_envs", 1):
            raise BadOption(
                f"num_envs={num_envs} was given with one environment object, which cannot be multiplied: "
                f"pass an env id or a function that makes one."
            )
        return _wrap([source], batched=num_envs is not None)
    if not callable(source):
        raise UnsupportedEnv(f"create_env_fn is {type(source).__name__} {source!r}, expected {ACCEPTED}")
    return _stack(source, num_envs, name=getattr(source, "__name__", repr(source)))


def _stack(factory: Callable[[], Any], num_envs: int | None, *, name: str) -> BuiltEnv:
    envs = []
    try:
        for i in range(num_envs or 1):
            try:
                envs.append(factory())
            except Exception as error:
                raise EnvError(f"making env {i} from {name} raised {type(error).__name__}: {error}") from error
        return _wrap(envs, batched=num_envs is not None, name=name)
    except BaseException:
        for env in envs:
            getattr(env, "close", lambda: None)()
        raise


def _wrap(envs: list[Any], *, batched: bool, name: str = "") -> BuiltEnv:
    if isinstance(envs[0], VectorEnv):
        if len(envs) > 1:
            raise BadOption(
                f"num_envs={len(envs)} was given, but {name} makes a VectorEnv, which is a batch already: "
                f"leave num_envs out, or pass a list of factories for several groups."
            )
        return BuiltEnv(VectorEnvBatch(envs[0]), batched=True)
    for env in envs:
        if not isinstance(env, gymnasium.Env):
            raise UnsupportedEnv(f"{name} returned {type(env).__name__}, expected {ACCEPTED}")
    return BuiltEnv(StackedEnvs(envs), batched=batched)
