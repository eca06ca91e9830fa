"""Checks of a collector's arguments, which Tianshou's classes take as they are."""

from __future__ import annotations

from typing import Any

from gymnasium.vector import VectorEnv
from tianshou.algorithm.algorithm_base import Algorithm
from tianshou.data import CollectStats

from muster.errors import BadOption, UnsupportedEnv
from muster.utils.attributes import kind_of
from muster.utils.integers import integer


def check_env(env: Any) -> None:
    """Raise ``UnsupportedEnv`` unless it is an environment, or several with Tianshou's interface."""
    if isinstance(env, VectorEnv):
        raise UnsupportedEnv(
            f"{type(env).__name__} is a vector environment of Gymnasium: pass one of"
            " Tianshou's, such as DummyVectorEnv(env_fns) or SubprocVectorEnv(env_fns)"
        )
    if not _has(env, "reset", "step"):
        raise UnsupportedEnv(
            f"env is {_shown(env)}, expected a vector environment of Tianshou, such as"
            " DummyVectorEnv([make_env] * 8) with a function that makes an environment, or one"
            " environment, such as gym.make('CartPole-v1')"
        )


def check_policy(policy: Any) -> None:
    """Raise ``BadOption`` unless it has what a collector calls of a policy."""
    if callable(policy) and _has(policy, "map_action", "train"):
        return
    if isinstance(policy, Algorithm):
        raise BadOption(
            f"collector.policy is {_shown(policy)}, an algorithm: set collector.policy to its .policy"
        )
    raise BadOption(
        f"policy is {_shown(policy)}, expected a Policy of Tianshou, or an Algorithm, which has one."
        " For any actions, pass RandomActionPolicy(action_space)"
    )


def check_buffer(buffer: Any) -> None:
    """Raise ``BadOption`` unless it has what a collector uses of a buffer."""
    if not _has(buffer, "add", "maxsize"):
        raise BadOption(
            f"buffer is {_shown(buffer)}, expected a ReplayBuffer of Tianshou, such as"
            " VectorReplayBuffer(total_size, number of environments), or None"
        )


def check_hook(name: str, hook: Any) -> None:
    """Raise ``BadOption`` unless the hook is None or can be called."""
    if hook is not None and not callable(hook):
        raise BadOption(f"{name} is {_shown(hook)}, expected a function, or None")


def check_stats_class(kind: Any) -> None:
    """Raise ``BadOption`` unless it is a class like ``CollectStats``."""
    wanted = "update_at_step_batch", "update_at_episode_done", "set_collect_time"
    if not isinstance(kind, type) or not all(hasattr(kind, name) for name in wanted):
        raise BadOption(
            f"collect_stats_class is {_shown(kind)}, expected {CollectStats.__name__} or a class"
            " derived from it"
        )


def count(name: str, value: Any) -> int | None:
    """Convert a number of steps or episodes to an ``int``; None stays None.

    Tianshou takes whole numbers of every type, such as ``1e4``.
    """
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return None if value is None else integer(name, value, None)


def _has(thing: Any, *names: str) -> bool:
    """Whether an object has these attributes; False of a class, which has those of its objects."""
    is_object = not isinstance(thing, type)
    return is_object and all(hasattr(thing, name) for name in names)


def _shown(thing: Any) -> str:
    return "None" if thing is None else kind_of(thing)
