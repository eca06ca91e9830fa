"""``collect_with_muster``: algorithms of Stable-Baselines3 collect with Muster's workers."""

from __future__ import annotations

import types
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal

import gymnasium
from stable_baselines3.common import vec_env
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm

from muster.collectors.collector import Collector
from muster.collectors.multi import MultiSyncCollector
from muster.compat.sb3.on_policy import ROLLOUTS, RolloutsByMuster, SB3Rollouts
from muster.compat.sb3.vec_env import EnvFn, VecEnv, env_fns_of
from muster.errors import BadOption, UnsupportedEnv
from muster.utils.checked import check_choice
from muster.utils.cpus import usable_cores
from muster.utils.integers import integer
from muster.workers.options import SupervisionOptions, check_timeouts


class SB3Collection:
    """Muster's part of a model of Stable-Baselines3, until ``close``.

    A context manager. See ``collect_with_muster``.

    Attributes:
        collector: makes the rollouts, with ``inference="worker"``; else None.
        env: the vector environment in Muster's workers, with ``inference="server"``; else None.
    """

    def __init__(
        self,
        undo: ExitStack,
        collector: Collector | MultiSyncCollector | None,
        env: VecEnv | None,
    ) -> None:
        self.collector = collector
        self.env = env
        self._undo = undo

    def close(self) -> None:
        """End the workers.

        The model collects with its former environments again, from new episodes on.
        """
        self._undo.close()

    def __enter__(self) -> SB3Collection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def collect_with_muster(
    model: BaseAlgorithm,
    env_fns: str | EnvFn | Sequence[EnvFn],
    *,
    inference: Literal["worker", "server"] | None = None,
    num_workers: int | None = None,
    on_failure: Literal["raise", "restart"] = "raise",
    timeouts: Mapping[str, float | None] | None = None,
    start_method: Literal["forkserver", "spawn"] | None = None,
) -> SB3Collection:
    """Let an algorithm of Stable-Baselines3 collect with Muster's workers, in environments of their
    own.

    ::

        model = PPO("MlpPolicy", make_vec_env("CartPole-v1", n_envs=8))
        collect_with_muster(model, "CartPole-v1", num_workers=2)
        model.learn(100_000)

    The model's own environments are only reset by ``learn``. Buffers, callbacks, logs, ``save`` and
    ``load`` work as before; docs/sb3.md has the differences.

    Args:
        model: PPO, A2C, DQN, SAC, TD3, DDPG, or another algorithm with ``collect_rollouts``.
        env_fns: functions that make the environments, one for each of the model's; or one function
            for all; or an env id, which is made as by ``make_vec_env``, with a ``Monitor``.
        inference: "worker": workers act with copies of the policy and make whole rollouts, and
            callbacks are called afterwards, for every step. Only for ``OnPolicyAlgorithm``.
            "server": SB3 collects, the policy acts in this process, and workers only step, as in
            ``muster.compat.sb3.VecEnv``; equal to ``DummyVecEnv`` for the same seeds. None:
            "worker" for PPO, A2C and others that derive from ``OnPolicyAlgorithm``, else "server".
        num_workers: number of worker processes; None: one for each CPU that this process may use.
            At most one for each environment. 0: whole rollouts in this process, only with "worker".
        on_failure: "raise": raise the error of an environment or worker. "restart": restart the
            worker. With "worker", the rollout is completed by its successor; with "server", the
            step is a truncation with reward 0.
        timeouts: seconds without progress after which a worker counts as hanging, by phase; see
            ``VecEnv``.
        start_method: "forkserver" or "spawn"; None: as the system allows. Without workers
            (``num_workers=0``) these three have no effect.

    Returns:
        an object whose ``close`` undoes the call.

    Raises:
        BadOption: an argument is wrong, or the model cannot collect in this way: with "worker",
            gSDE (``use_sde``), wrappers such as ``VecNormalize``, and algorithms with a
            ``collect_rollouts`` of their own.
        UnsupportedEnv: the environments have other spaces than the model.
        EnvError, WorkerDied, WorkerHung: making an environment failed.
    """
    fns, count = _checked(model, env_fns, num_workers)
    # also where no worker would find a wrong one
    check_choice("on_failure", on_failure, ("raise", "restart"))
    check_timeouts({} if timeouts is None else timeouts)
    acts = inference or ("worker" if isinstance(model, OnPolicyAlgorithm) else "server")
    options: dict[str, Any] = {"on_failure": on_failure, "start_method": start_method}
    if acts == "worker":
        SupervisionOptions(start_method=start_method)
    with ExitStack() as made:
        collector = None
        env = None
        if acts == "worker":
            if not isinstance(model, OnPolicyAlgorithm):
                raise BadOption(
                    f"inference='worker': {type(model).__name__} decides after every step"
                    " (exploration rate, noise, random actions at the start), so its policy acts"
                    " in this process. Leave inference out."
                )
            collector = _roll_out(
                model, fns, count, {**options, "timeouts": timeouts or {}}, made
            )
        elif acts == "server":
            if count == 0:
                raise BadOption(
                    "num_workers=0 with inference='server': expected at least 1 worker, or None."
                )
            env = _step(
                model,
                VecEnv(fns, num_workers=count, timeouts=timeouts, **options),
                made,
            )
        else:
            raise BadOption(
                f"inference={inference!r}: expected 'worker', 'server' or None."
            )
        _COLLECTIONS[model] = found = SB3Collection(made.pop_all(), collector, env)
    return found


_COLLECTIONS: weakref.WeakKeyDictionary[BaseAlgorithm, SB3Collection] = (
    weakref.WeakKeyDictionary()
)


def _checked(
    model: Any, env_fns: Any, num_workers: int | None
) -> tuple[list[EnvFn], int]:
    """Return a function for each environment, and the number of workers."""
    if not isinstance(model, BaseAlgorithm):
        raise BadOption(
            f"model is of type {type(model).__name__}, expected an algorithm of Stable-Baselines3."
        )
    if model in _COLLECTIONS:
        raise BadOption(
            "This model collects with Muster already: close that collection first."
        )
    if model.env is None:
        raise BadOption("The model has no environments: call model.set_env(env) first.")
    if isinstance(env_fns, str):
        fns: list[EnvFn] = [partial(_monitored, env_fns)] * model.n_envs
    elif callable(env_fns):
        fns = [env_fns] * model.n_envs
    else:
        fns = env_fns_of(env_fns, "one function, or an env id")
    if len(fns) != model.n_envs:
        raise BadOption(
            f"env_fns has {len(fns)} functions, but the model has {model.n_envs} environments."
        )
    workers = (
        max(1, int(usable_cores()))
        if num_workers is None
        else integer("num_workers", num_workers, 0)
    )
    return fns, min(len(fns), workers)


def _monitored(env_id: str) -> gymnasium.Env[Any, Any]:
    return Monitor(gymnasium.make(env_id))


def _roll_out(
    model: OnPolicyAlgorithm,
    fns: list[EnvFn],
    count: int,
    options: Mapping[str, Any],
    made: ExitStack,
) -> Collector | MultiSyncCollector:
    """Let workers make the rollouts of a model."""
    rollouts = SB3Rollouts(model, fns, count, options)
    made.callback(rollouts.collector.shutdown)
    before, which = type(model), weakref.ref(model)
    # Not an attribute of the model: its ``save`` pickles these.
    # it is for a copy of a model that collects with Muster
    if not isinstance(model, RolloutsByMuster):
        model.__class__ = types.new_class(before.__name__, (RolloutsByMuster, before))
    ROLLOUTS[model] = rollouts

    def undo() -> None:
        if (model := which()) is not None:
            model.__class__ = before
            del ROLLOUTS[model], _COLLECTIONS[model]
            _begin_anew(model)

    made.callback(undo)
    return rollouts.collector


def _step(model: BaseAlgorithm, env: VecEnv, made: ExitStack) -> VecEnv:
    """Replace the model's environments, inside of their wrappers."""
    made.callback(env.close)
    wrapper, base, which = None, model.env, weakref.ref(model)
    while isinstance(base, vec_env.VecEnvWrapper):
        wrapper, base = base, base.venv
    assert base is not None  # checked
    for name in ("observation_space", "action_space"):
        if getattr(env, name) != getattr(base, name):
            raise UnsupportedEnv(
                f"env_fns[0] has the {name} {getattr(env, name)}, but the model's environments have"
                f" {getattr(base, name)}. Make the same environments."
            )
    env.seed(model.seed)

    def put(inner: vec_env.VecEnv) -> None:
        if (model := which()) is None:
            return
        if wrapper is None:
            model.set_env(inner)
        else:
            wrapper.venv = inner
            _begin_anew(model)

    def undo() -> None:
        put(base)
        if (model := which()) is not None:
            _COLLECTIONS.pop(model, None)

    made.callback(undo)
    put(env)
    return env


def _begin_anew(model: BaseAlgorithm) -> None:
    """Let the next ``learn`` reset the environments."""
    assert model.env is not None
    model.set_env(model.env)
