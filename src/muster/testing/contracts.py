"""The requirements of Muster on every environment, as tests that you inherit::

    class TestMyEnv(muster.testing.EnvContract):
        def make_env(self):
            return MyEnv()

Each test states its rule in its name and message. All tests collect with random actions.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from muster.collectors import Collector
from muster.collectors.options import CollectorOptions
from muster.collectors.signatures import passes_on
from muster.errors import BadOption
from muster.keys import key_of
from muster.protocols import EnvBatch
from muster.testing.poison import poisoned

if TYPE_CHECKING:
    from tensordict import TensorDict

Key = tuple[str, ...]


class EnvContract:
    """Subclass it and implement ``make_env``; the environment can be of any kind that ``Collector``
    accepts.

    Attributes:
        num_envs: environments stepped together; None if ``make_env`` returns a batch.
        steps: steps per environment and batch; a multiple of 4, and enough for some episodes to
            end.
    """

    num_envs: int | None = 2
    steps = 24

    def make_env(self) -> Any:
        """Return a new environment (or vector environment)."""
        raise NotImplementedError("return a new environment")

    @passes_on(CollectorOptions)
    def collect(
        self,
        batches: int = 2,
        *,
        seed: int = 0,
        **options: Any,
    ) -> TensorDict:
        """Collect ``batches`` batches and concatenate them in time, ``[B, batches * steps]``."""
        with self._collector(seed=seed, **options) as collector:
            return _joined(collector, batches)

    def test_next_observation_is_the_observation_of_the_next_row_unless_the_episode_ended(
        self,
    ) -> None:
        batch = self._collect_with_infos(self.make_env)
        inside = ~_ended(batch)[..., :-1]
        for key in _observation_keys(batch):
            after = _without(batch, ("next", *key), last=True)
            before = _without(batch, key, last=False)
            assert _equal(after[inside], before[inside]), (
                f"{key}: next[t] must be obs[t + 1] inside an episode"
            )

    def test_done_is_terminated_or_truncated_and_never_set_before_a_step(self) -> None:
        batch = self.collect()
        after = batch["next"]
        flags = ("done", "terminated", "truncated")
        own = [flag for flag in flags if flag in after.keys()]  # noqa: SIM118
        if len(own) == 3:
            assert torch.equal(
                after["done"], after["terminated"] | after["truncated"]
            ), "done = terminated | truncated"
        for flag in own:
            assert not batch[flag].any(), (
                f"{flag} at the root: the environment was not reset before the step"
            )

    def test_trajectory_ids_change_exactly_where_an_episode_ended(self) -> None:
        batch = self.collect()
        ids = batch["collector", "traj_ids"]
        done = _ended(batch)
        changes = ids[..., 1:] != ids[..., :-1]
        assert torch.equal(changes, done[..., :-1]), "one id per episode"
        num_envs = done[..., 0].numel()
        pieces = int(done[..., :-1].sum()) + num_envs
        assert len(ids.unique()) == pieces, "no id is used twice"

    def test_rewards_are_finite_numbers(self) -> None:
        after = self.collect()["next"]
        keys = after.keys(True, True)
        rewards = [key for key in keys if key == "reward" or key[-1] == "reward"]
        assert rewards, "there is a reward, or one per group of agents"
        for key in rewards:
            assert torch.isfinite(after.get(key)).all(), "rewards must be finite"

    def test_the_same_seed_gives_the_same_data(self) -> None:
        self._assert_equal(
            self.collect(seed=3),
            self.collect(seed=3),
            "differs between two collections with one seed",
        )

    def test_neither_the_size_of_batches_nor_their_layout_changes_the_data(
        self,
    ) -> None:
        whole = self.collect(batches=1)
        quarter = self._frames() // 4
        parts = self.collect(batches=4, frames_per_batch=quarter)
        self._assert_equal(parts, whole, "depends on frames_per_batch")
        time_major = self.collect(batches=1, layout="time_major")
        time_last = time_major.permute(*range(1, whole.ndim), 0)
        self._assert_equal(time_last, whole, "depends on the layout")

    def test_time_limits_truncate_and_count(self) -> None:
        batch = self.collect(max_frames_per_traj=5)
        ended = _ended(batch)
        counts = batch["next", "step_count"]
        assert counts.max() <= 5, "no episode is longer than max_frames_per_traj"
        at_limit = counts == 5
        assert ended.unsqueeze(-1)[at_limit].all(), "an episode ends at its limit"
        following = batch["step_count"][..., 1:, 0]
        assert not following[ended[..., :-1]].any(), (
            "the first row of an episode has step_count 0"
        )

    def test_batches_stay_unchanged_while_collecting_goes_on(self) -> None:
        with self._collector() as collector:
            kept = collector.rollout()
            copy = kept.clone()
            for _ in range(3):
                collector.rollout()
            self._assert_equal(kept, copy, "of a kept batch changed")

    def test_what_the_environment_changes_later_changes_no_row(self) -> None:
        expected = self._collect_with_infos(self.make_env)
        found = self._collect_with_infos(lambda: poisoned(self.make_env()))
        differing = self._differing(found, expected)
        if differing:  # times, for instance, are never the same
            repeated = self._collect_with_infos(self.make_env)
            differing -= self._differing(repeated, expected)
        assert not differing, (
            f"{differing} depend on what the environment does later with the memory it returned"
        )

    def test_every_step_is_accounted_for(self) -> None:
        with self._collector() as collector:
            collector.rollout()
            collector.reset()
            collector.rollout()
            stats = collector.stats()
            frames = 2 * self._frames()
            assert stats.executed == stats.frames == frames, (
                "executed = delivered, without errors"
            )
            assert stats.discarded == {}, "nothing is discarded"
            assert stats.in_flight == 0, "nothing waits"

    def test_collecting_leaves_the_global_random_generators_alone(self) -> None:
        with self._collector() as collector:
            before = _global_state()
            collector.rollout()
            assert _global_state() == before, (
                "a global generator of torch, NumPy or Python has moved"
            )

    def _collect_with_infos(self, make: Callable[[], Any]) -> TensorDict:
        """Collect two batches from environments that ``make`` returns, with their infos, if they
        have any.
        """
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", ".*info .* is ignored", UserWarning
            )  # it comes later
            try:
                collector = self._collector(make, info=True)
            except BadOption:  # there are none
                collector = self._collector(make)
            with collector:
                return _joined(collector, 2)

    def _collector(
        self,
        make: Callable[[], Any] | None = None,
        **options: Any,
    ) -> Collector:
        defaults = {
            "num_envs": self.num_envs,
            "frames_per_batch": self._frames(),
            "validate": "full",
            "seed": 0,
        }
        return Collector(make or self.make_env, None, **(defaults | options))

    def _frames(self) -> int:
        if self.num_envs is not None:
            return self.steps * self.num_envs
        env = self.make_env()
        size = getattr(env, "batch_size", None)
        count: int
        if EnvBatch in type(env).__mro__:
            count = int(env.spec.num_envs)
        elif isinstance(size, tuple):
            count = math.prod(size)
        else:
            count = int(getattr(env, "num_envs", 1))
        if not getattr(env, "is_closed", False):
            env.close()
        return self.steps * count

    def _assert_equal(
        self,
        a: TensorDict,
        b: TensorDict,
        problem: str,
    ) -> None:
        for key in self._differing(a, b):
            raise AssertionError(f"{key} {problem}")

    def _differing(self, a: TensorDict, b: TensorDict) -> set[Any]:
        """Return the keys of columns that are not equal."""
        keys = _columns(a)
        assert keys == _columns(b), "the columns are the same"
        return {key for key in keys if not _equal(a.get(key), b.get(key))}


def _joined(collector: Collector, batches: int) -> TensorDict:
    parts = [collector.rollout().clone() for _ in range(batches)]
    return torch.cat(parts, parts[0].names.index("time"))


def _ended(batch: TensorDict) -> torch.Tensor:
    """Ends of episodes, ``[..., T]``: ``next/done``; if there is none, any flag below ``next``."""
    after = batch["next"]
    if "done" in after.keys():  # noqa: SIM118
        done: torch.Tensor = after["done"][..., 0]
        return done
    flags = ("done", "terminated", "truncated")
    keys = []
    for key in after.keys(True, True):
        name = key if isinstance(key, str) else key[-1]
        if name.endswith(flags):
            keys.append(key)
    ends = []
    for key in keys:
        of_env = after.get(key).flatten(batch.ndim)
        ends.append(of_env.any(-1))
    return torch.stack(ends).any(0)


def _columns(batch: TensorDict) -> set[Any]:
    """Return the keys of all columns, those of objects included."""
    from tensordict import is_leaf_nontensor

    return set(batch.keys(True, True, is_leaf=is_leaf_nontensor))


def _observation_keys(batch: TensorDict) -> list[Key]:
    before = _paths(batch)
    after = _paths(batch["next"])
    others = ("done", "terminated", "truncated", "step_count")
    return [key for key in sorted(after & before) if key[0] not in others]


def _paths(batch: TensorDict) -> set[Key]:
    """Return the keys of all columns, each as a tuple."""
    keys = _columns(batch)
    return {key_of(key) for key in keys}


def _without(batch: TensorDict, key: Key, *, last: bool) -> Any:
    """Return a column of tensors or objects without its last (or first) row in time."""
    rows = slice(None, -1) if last else slice(1, None)
    leading = (slice(None),) * (batch.ndim - 1)
    index = (*leading, rows)
    return batch.get(key)[index]


def _equal(a: Any, b: Any) -> bool:
    """Whether tensors (NaN equals NaN), or nested objects with arrays, are equal."""
    if torch.is_tensor(a):
        if a.shape != b.shape:
            return False
        close = torch.isclose(a, b, 0.0, 0.0, equal_nan=True)
        return bool(close.all())
    if hasattr(a, "tolist"):
        a = a.tolist()
        b = b.tolist()
    if isinstance(a, dict):
        if a.keys() != b.keys():
            return False
        return all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b)


def _global_state() -> tuple[Any, ...]:
    of_numpy = np.random.get_state(legacy=False)
    of_torch = torch.get_rng_state()
    return of_torch.tolist(), repr(of_numpy), random.getstate()
