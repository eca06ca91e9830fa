"""Builds an env batch from the user's env id, factory or environment."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import gymnasium
from gymnasium.vector import VectorEnv

from muster.envs import coroutines
from muster.envs.checks import takes_seed, the_only
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
    "an env id, an environment (gymnasium.Env or VectorEnv, an object with reset, step,"
    " observation_space and action_space like gymnasium.Env, TorchRL EnvBase, PettingZoo"
    " ParallelEnv, dm_env.Environment, SB3 VecEnv, EnvPool, a batch of torch or JAX environments,"
    " an object whose reset and step are coroutine functions; see docs/environments.md), or a"
    " function that returns one"
)

Adapt = Callable[[list[Any], "torch.device | None"], EnvBatch]


def build_env(
    source: Any,
    num_envs: int | None,
    kwargs: Mapping[str, Any] | None = None,
    device: torch.device | None = None,
) -> EnvBatch:
    """Make the env batch of one group, with ``num_envs`` environments of an id or factory (None:
    one, unbatched).

    Raises:
        UnsupportedEnv: no adapter supports the environment.
        BadOption: ``num_envs`` or ``kwargs`` with an environment object.
        EnvError: the factory raised an error; that is the cause.
    """
    if isinstance(source, str):
        given = kwargs or {}
        return _make(lambda: gymnasium.make(source, **given), num_envs, source, device)
    if _adapter(source) is not None:
        if num_envs is not None and num_envs != _count(source):
            raise BadOption(
                f"num_envs={num_envs} was given with one environment object, which cannot be"
                " multiplied: pass an env id or a function that makes one."
            )
        if kwargs:
            raise BadOption(
                f"create_env_kwargs {sorted(kwargs)} were given with an environment object, which"
                " exists already: pass a function that makes one."
            )
        return _wrap([source], num_envs, type(source).__name__, device)
    if not callable(source):
        raise UnsupportedEnv(
            f"create_env_fn is of type {type(source).__name__}, expected {ACCEPTED}"
        )
    factory = (lambda: source(**kwargs)) if kwargs else source
    return _make(factory, num_envs, name_of(source), device)


def _count(env: Any) -> int:
    """Return the number of environments in an environment object."""
    if EnvBatch in type(env).__mro__:
        return int(env.spec.num_envs)
    return int(getattr(env, "num_envs", 1))


def is_environment(source: Any) -> bool:
    """Return whether ``source`` is an environment object, not an env id or factory."""
    return not isinstance(source, str) and _adapter(source) is not None


def is_single(env: Any) -> bool:
    """Return whether ``env`` is a single ``gymnasium.Env`` that takes seeds, without a third-party
    adapter.
    """
    return (
        _adapter(env) is _stacked and isinstance(env, gymnasium.Env) and takes_seed(env)
    )


def _make(
    factory: Callable[[], Any],
    num_envs: int | None,
    name: str,
    device: torch.device | None,
) -> EnvBatch:
    envs: list[Any] = []
    try:
        for i in range(num_envs or 1):
            try:
                envs.append(factory())
            except EnvError:  # complete
                raise
            except Exception as error:
                failed = EnvError(
                    f"making env {i} from {name} raised {described(error)}{advice_for(error)}"
                )
                failed.phase = "construct"
                raise failed from error
        return _wrap(envs, num_envs, name, device)
    except BaseException:
        for env in envs:
            with suppress(Exception):  # the error says more
                getattr(env, "close", lambda: None)()
        raise


def advice_for(error: Exception) -> str:
    """Return what to do about an error of making an environment, if its id is not registered; else
    nothing.
    """
    if not isinstance(
        error, (gymnasium.error.NameNotFound, gymnasium.error.NamespaceNotFound)
    ):
        return ""
    return (
        " Register it, or import the package that registers it, in the main program before the"
        " environments are made; or name the package with the id, as in 'ale_py:ALE/Pong-v5'."
    )


def _wrap(
    envs: list[Any],
    num_envs: int | None,
    name: str,
    device: torch.device | None,
) -> EnvBatch:
    adapters = [_adapter(env) for env in envs]
    adapt = adapters[0]
    for env, found in zip(envs, adapters, strict=True):
        if found is None or found is not adapt:
            raise UnsupportedEnv(
                f"{name} returned {type(env).__name__}, expected {ACCEPTED}"
            )
    assert adapt is not None
    env = adapt(envs, device)
    spec = env.spec
    if spec.single:
        unbatched = num_envs is None and spec.num_envs == 1
        batch_shape = () if unbatched else (spec.num_envs,)
        env.store_as(replace(spec, batch_shape=batch_shape))
    return env


def _stacked(envs: list[Any], device: torch.device | None) -> EnvBatch:
    return StackedEnvs(envs)


def _vector(envs: list[Any], device: torch.device | None) -> EnvBatch:
    return VectorEnvBatch(the_only(envs))


def _coroutines(envs: list[Any], device: torch.device | None) -> EnvBatch:
    return cast(EnvBatch, coroutines.CoroutineEnvs(envs))


def _own(envs: list[Any], device: torch.device | None) -> EnvBatch:
    return cast(EnvBatch, the_only(envs))


def _adapter(env: Any) -> Adapt | None:
    for package, module in _THIRD_PARTY.items():
        # First, since the classes of some are derived from gymnasium's, but behave differently. A
        # package that was not imported has no objects.
        if package not in sys.modules:
            continue
        home = import_module(module)
        if home.takes(env):
            adapt: Adapt = home.adapt
            return adapt
    if EnvBatch in type(env).__mro__:
        return _own
    if coroutines.takes(env):
        return _coroutines
    if isinstance(env, VectorEnv):
        return _vector
    return _stacked if isinstance(env, gymnasium.Env) or _is_like_one(env) else None


def _is_like_one(env: Any) -> bool:
    """Return whether an object has all that is used of a single ``gymnasium.Env``."""
    if isinstance(env, type) or hasattr(
        env, "num_envs"
    ):  # a class; a batch of environments
        return False
    has_spaces = all(
        isinstance(getattr(env, name, None), gymnasium.Space)
        for name in ("observation_space", "action_space")
    )
    return has_spaces and all(
        callable(getattr(env, name, None)) for name in ("reset", "step")
    )


# Modules with takes(obj) -> bool and adapt(envs, device) -> EnvBatch, by the package that defines
# the objects.
_THIRD_PARTY: dict[str, str] = {
    # first, since its pools are also gymnasium or dm_env environments
    "envpool": "muster.envs.envpool",
    "stable_baselines3": "muster.envs.sb3",
    "dm_env": "muster.envs.dm_env",
    "torchrl": "muster.envs.torchrl",
    "pettingzoo": "muster.envs.pettingzoo",
    "jax": "muster.envs.jax",
    "torch": "muster.envs.torch_batch",
}


# --- a seed for every episode ---------------------------------------------------------------------


class EpisodeSeeds(gymnasium.Wrapper[Any, Any, Any, Any]):
    """After ``reset(seed=s)``, resets without a seed use ``s + stride``, ``s + 2 * stride`` and so
    on.

    An episode then depends neither on earlier episodes nor on the number of environments, and can
    be repeated without the others.
    """

    seeds_episodes = True

    def __init__(self, env: gymnasium.Env[Any, Any], stride: int) -> None:
        super().__init__(env)
        self._stride = stride
        self._next: int | None = None
        self.step = env.step  # type: ignore[method-assign]  # avoids a call

    def reset(
        self,
        *,
        seed: int | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        seed = self._next if seed is None else seed
        self._next = None if seed is None else seed + self._stride
        return self.env.reset(seed=seed, options=options)

    @property
    def spec(self) -> Any:  # type: ignore[override]  # a property there, too
        return self.env.spec


@dataclass(frozen=True)
class SeedingFactory:
    """Makes environments from ``source``, with ``EpisodeSeeds`` around single Gymnasium
    environments.
    """

    source: Any
    stride: int

    def __call__(self, **kwargs: Any) -> Any:
        if isinstance(self.source, str):
            make: Any = gymnasium.make
            env = make(self.source, **kwargs)
        else:
            env = self.source(**kwargs)
        return EpisodeSeeds(env, self.stride) if is_single(env) else env

    @property
    def __name__(self) -> str:
        return self.source if isinstance(self.source, str) else name_of(self.source)
