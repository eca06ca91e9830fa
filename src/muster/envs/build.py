"""From what the user gave (id, factory, environment) to an env batch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import gymnasium
from gymnasium.vector import VectorEnv

from muster.envs.checks import the_only
from muster.envs.stacked import StackedEnvs
from muster.envs.vector import VectorEnvBatch
from muster.errors import BadOption, EnvError, UnsupportedEnv, described
from muster.protocols import EnvBatch
from muster.utils.attributes import name_of

if TYPE_CHECKING:
    import torch
else:
    from muster.utils import lazy_torch as torch

ACCEPTED = (
    "an env id, an environment (gymnasium.Env or VectorEnv, TorchRL EnvBase, PettingZoo ParallelEnv, "
    "dm_env.Environment, SB3 VecEnv, EnvPool, a batch of torch or JAX environments; see docs/environments.md), "
    "or a function that returns one"
)

Adapt = Callable[[list[Any], "torch.device | None"], EnvBatch]


@dataclass(frozen=True)
class BuiltEnv:
    """An env batch, and B as the user and the policy see it."""

    env: EnvBatch
    batch_shape: tuple[int, ...]


def build_env(
    source: Any,
    num_envs: int | None,
    kwargs: Mapping[str, Any] | None = None,
    device: torch.device | None = None,
) -> BuiltEnv:
    """Make the env batch of one group, of ``num_envs`` environments from an id or a factory (None: one, unbatched).

    Raises:
        UnsupportedEnv: nothing an adapter takes.
        BadOption: ``num_envs`` or ``kwargs`` for an environment that exists already.
        EnvError: the factory raised; the original is the cause.
    """
    if isinstance(source, str):
        return _make(lambda: gymnasium.make(source, **(kwargs or {})), num_envs, source, device)
    if _adapter(source) is not None:
        if num_envs is not None and num_envs != getattr(source, "num_envs", 1):
            raise BadOption(
                f"num_envs={num_envs} was given with one environment object, which cannot be multiplied: "
                f"pass an env id or a function that makes one."
            )
        if kwargs:
            raise BadOption(
                f"create_env_kwargs {sorted(kwargs)} were given with an environment object, which exists already: "
                f"pass a function that makes one."
            )
        return _wrap([source], num_envs, type(source).__name__, device)
    if not callable(source):
        raise UnsupportedEnv(f"create_env_fn is of type {type(source).__name__}, expected {ACCEPTED}")
    factory = (lambda: source(**kwargs)) if kwargs else source
    return _make(factory, num_envs, name_of(source), device)


def is_environment(source: Any) -> bool:
    """An environment object, as opposed to what makes one."""
    return not isinstance(source, str) and _adapter(source) is not None


def is_single(env: Any) -> bool:
    """One Gymnasium environment that no adapter of a third party takes."""
    return _adapter(env) is _stacked


def _make(factory: Callable[[], Any], num_envs: int | None, name: str, device: torch.device | None) -> BuiltEnv:
    envs: list[Any] = []
    try:
        for i in range(num_envs or 1):
            try:
                envs.append(factory())
            except Exception as error:
                raise EnvError(f"making env {i} from {name} raised {described(error)}") from error
        return _wrap(envs, num_envs, name, device)
    except BaseException:
        for env in envs:
            getattr(env, "close", lambda: None)()
        raise


def _wrap(envs: list[Any], num_envs: int | None, name: str, device: torch.device | None) -> BuiltEnv:
    adapters = [_adapter(env) for env in envs]
    adapt = adapters[0]
    for env, found in zip(envs, adapters, strict=True):
        if found is None or found is not adapt:
            raise UnsupportedEnv(f"{name} returned {type(env).__name__}, expected {ACCEPTED}")
    assert adapt is not None
    env = adapt(envs, device)
    shape = env.batch_shape
    if shape is None:
        shape = () if num_envs is None else (env.num_envs,)
    return BuiltEnv(env, shape)


def _stacked(envs: list[Any], device: torch.device | None) -> EnvBatch:
    return StackedEnvs(envs)


def _vector(envs: list[Any], device: torch.device | None) -> EnvBatch:
    return VectorEnvBatch(the_only(envs))


def _adapter(env: Any) -> Adapt | None:
    for package, module in _THIRD_PARTY.items():
        # First, since some of these are gymnasium environments by name only. An object of a package that was never
        # imported cannot exist.
        if package in sys.modules and (home := import_module(module)).takes(env):
            adapt: Adapt = home.adapt
            return adapt
    if isinstance(env, VectorEnv):
        return _vector
    return _stacked if isinstance(env, gymnasium.Env) else None


# Modules with takes(obj) -> bool and adapt(envs, device) -> EnvBatch, by the package that such objects come from.
_THIRD_PARTY: dict[str, str] = {
    "envpool": "muster.envs.envpool",  # before what its pools claim to be as well
    "stable_baselines3": "muster.envs.sb3",
    "dm_env": "muster.envs.dm_env",
    "torchrl": "muster.envs.torchrl",
    "pettingzoo": "muster.envs.pettingzoo",
    "jax": "muster.envs.jax",
    "torch": "muster.envs.torch_batch",
}


# --- a seed for every episode -----------------------------------------------------------------------


class EpisodeSeeds(gymnasium.Wrapper[Any, Any, Any, Any]):
    """After ``reset(seed=s)``, resets without a seed have ``s + stride``, ``s + 2 * stride`` and so on.

    Episodes then depend neither on those before them nor on how many environments share the work, and each can be
    repeated by itself.
    """

    seeds_episodes = True

    def __init__(self, env: gymnasium.Env[Any, Any], stride: int) -> None:
        super().__init__(env)
        self._stride, self._next = stride, None  # type: int, int | None
        self.step = env.step  # type: ignore[method-assign]  # without a call in between

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        seed = self._next if seed is None else seed
        self._next = None if seed is None else seed + self._stride
        return self.env.reset(seed=seed, options=options)

    @property
    def spec(self) -> Any:  # type: ignore[override]  # which is one there, too
        return self.env.spec


@dataclass(frozen=True)
class SeedingFactory:
    """Makes what ``source`` makes, with ``EpisodeSeeds`` around single Gymnasium environments."""

    source: Any
    stride: int

    def __call__(self, **kwargs: Any) -> Any:
        make: Any = gymnasium.make
        env = make(self.source, **kwargs) if isinstance(self.source, str) else self.source(**kwargs)
        return EpisodeSeeds(env, self.stride) if is_single(env) else env

    @property
    def __name__(self) -> str:
        return self.source if isinstance(self.source, str) else name_of(self.source)
