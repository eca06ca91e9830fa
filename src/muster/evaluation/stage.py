"""The collector of an evaluator, with its own environments and its own copy of the policy."""

from __future__ import annotations

import copy
import itertools
import time
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from muster.collectors import Collector, MultiSyncCollector
from muster.collectors.setup import factories_of, keywords_of
from muster.envs.build import EpisodeSeeds, SeedingFactory, is_environment, is_single
from muster.errors import BadWeights, MusterError, described
from muster.evaluation.result import Evaluation
from muster.evaluation.run import Plan, Progress, Run
from muster.evaluation.video import Tape
from muster.keys import Key
from muster.memory.specs import Array
from muster.restore.pickling import dumps, loads
from muster.rng import GroupRng
from muster.weights.names import Weights, modules_of, named_tensors, named_weights, weight_bearer
from muster.workers.messages import GroupInfo
from muster.workers.requests import Call
from muster.workers.worker import env_attributes

if TYPE_CHECKING:
    from tensordict import TensorDict

    from muster.collectors.base import BaseCollector

ROWS = 32  # time steps per rollout: few, to end soon after the last episode; enough for a negligible overhead


class Stage:
    """A collector with its own environments and its own copy of the policy (``shared``: it could not be copied).

    Rollouts have at most ``rows`` time steps. ``record`` keeps actions. ``options`` are the collector's.
    """

    def __init__(
        self,
        create_env_fn: Any,
        policy: Any,
        *,
        num_workers: int,
        rows: int | None,
        record: bool,
        options: dict[str, Any],
    ) -> None:
        several = isinstance(create_env_fn, (list, tuple))
        factories = factories_of(create_env_fn)
        self.factories = factories if several else factories * max(1, num_workers)
        self._several = several or num_workers > 0
        self._num_workers, self._record, self._rows = num_workers, record, min(ROWS, rows or ROWS)
        self._kwargs = keywords_of(options.get("create_env_kwargs"), len(self.factories))
        self._own, self._options = private_copy(policy), options
        self.shared = num_workers == 0 and shares_modules(self._own, policy)
        self._collector: BaseCollector | None = None
        self._num_envs = len(self.factories) * (options["num_envs"] or 1)
        self._seeded = False
        self.open()

    @property
    def num_envs(self) -> int:
        return self._num_envs

    @property
    def executed(self) -> int:
        return 0 if self._collector is None else self._collector.stats().executed

    def open(self) -> BaseCollector:
        if self._collector is None:
            with self._undisturbed():
                self._collector = self._make()
        return self._collector

    def play(
        self, plan: Plan, *, weights: Weights | None, seed: int, version: int | str, progress: Progress | None
    ) -> Evaluation:
        """Run one evaluation. After an error the stage must be closed."""
        began = time.perf_counter()
        collector = self.open()
        info = collector._engine.source.pool.counters[0].info
        self._publish(collector, weights)
        collector.set_seed(seed)
        run = Run(plan, self._num_envs, seed=seed, seeded=self._seeded, version=version)
        tape = self._tape(info) if self._record else None
        while not run.stopped_by:
            batch = collector.rollout()
            run.add(collector.episodes, _rewards(batch, info.reward_key, self._num_envs), len(batch))
            if tape is not None:
                tape.rollouts.append({key: _rows(batch, key, self._num_envs).copy() for key in info.action_specs})
            if progress is not None and progress(len(run.records), run.t * self._num_envs) is False:
                run.stopped_by = run.stopped_by or "progress"
        return run.result(info.name, time.perf_counter() - began, tape)

    def close(self, *, objects: bool = True) -> None:
        """End workers and close environments; those given as objects only if ``objects``. May be called again."""
        collector, self._collector = self._collector, None
        if collector is not None:
            collector.shutdown(close_env=objects or not any(map(is_environment, self.factories)), raise_on_error=False)

    def kill(self) -> None:
        """Kill workers that do not end by themselves. Called from another thread."""
        if self._collector is not None:
            for handle in self._collector._engine.source.pool.handles:
                handle.kill()

    def _make(self) -> BaseCollector:
        """Make a collector whose rollouts have at most ``ROWS`` time steps. A factory may make several environments."""
        sources = [self._seeding(factory) for factory in self.factories]
        options = self._options | {
            "frames_per_batch": self._rows * self._num_envs,
            "layout": "time_major",
            "compact_obs": True,
        }
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "frames_per_batch=")
            if self._num_workers:
                collector: BaseCollector = MultiSyncCollector(
                    sources, self._own, num_workers=self._num_workers, **options
                )
            else:
                collector = Collector(sources if self._several else sources[0], self._own, **options)
        found = collector._engine.num_envs
        if found != self._num_envs:
            self._num_envs, self._collector = found, collector
            self.close(objects=False)
            return self._make()
        self._seeded = _has_seeds(collector)
        return collector

    def _seeding(self, factory: Any) -> Any:
        if is_environment(factory):
            return EpisodeSeeds(factory, self._num_envs) if is_single(factory) else factory
        return SeedingFactory(factory, self._num_envs) if isinstance(factory, str) or callable(factory) else factory

    def _publish(self, collector: BaseCollector, weights: Weights | None) -> None:
        if weights is not None:
            function = self._num_workers == 0 and not isinstance(self._own, torch.nn.Module)
            collector._weights.publish(weights, model=weight_bearer(self._own) if function else None)

    def _tape(self, info: GroupInfo) -> Tape:
        return Tape(info.name, list(zip(self.factories, self._kwargs, strict=True)), info.num_envs)

    def _undisturbed(self) -> AbstractContextManager[None]:
        """Return a context that protects the user's random streams from environments that draw while they are made."""
        return nullcontext() if self._num_workers else GroupRng(0).as_global()


def _rows(batch: TensorDict, key: Key, num_envs: int) -> Array:
    """Return a column as ``[T, num_envs, *shape]``."""
    array: Array = batch.get(key).detach().cpu().numpy()
    return array.reshape(len(batch), num_envs, *array.shape[batch.ndim :])


def _rewards(batch: TensorDict, key: Key, num_envs: int) -> Array:
    """Return the rewards, ``[T, num_envs]``; NaN if the batch does not contain those used for returns."""
    if key not in batch.keys(True):
        return np.full((len(batch), num_envs), np.nan)
    return _rows(batch, key, num_envs)[..., 0]


def _has_seeds(collector: BaseCollector) -> bool:
    try:
        return all(itertools.chain(*collector._engine.source.pool.call(Call(env_attributes, ("seeds_episodes",)))))
    except (AttributeError, MusterError):  # raised by environments of other kinds
        return False


def private_copy(policy: Any) -> Any:
    """Copy a policy, with its modules in evaluation mode. ``BadWeights`` or ``BadOption`` if it cannot be copied.

    Modules that a function of an importable file accesses by name cannot be copied: they stay the user's, unchanged.
    """
    if policy is None:
        return None
    named_tensors(policy)  # raises for lazy layers
    try:
        own = copy.deepcopy(policy) if isinstance(policy, torch.nn.Module) else loads(dumps(policy, "policy"), "policy")
    except (RuntimeError, TypeError) as error:
        raise BadWeights(f"the policy cannot be copied: {described(error)}") from error
    for module in modules_of(own):
        if not shares_modules(module, policy):
            module.eval()
    return own


def shares_modules(policy: Any, other: Any) -> bool:
    """Return whether the two share a module."""
    others = {id(module) for module in modules_of(other)}
    return any(id(module) in others for module in modules_of(policy))


def weights_of(source: Any, *, copied: bool) -> Weights | None:
    """Return the weights of a policy, module, TensorDict or dict by name, ``copied`` or shared; None if it has none."""
    plain = isinstance(source, (torch.nn.Module, Mapping)) or hasattr(source, "flatten_keys")
    bearer = source if plain else weight_bearer(source)
    if bearer is None:
        return None
    if isinstance(bearer, torch.nn.Module):
        named_tensors(bearer)  # raises for lazy layers
    weights = named_weights(bearer)
    return {name: tensor.clone() for name, tensor in weights.items()} if copied else weights
