"""What every environment must do behind Muster, as tests you inherit::

    class TestMyEnv(muster.testing.EnvContract):
        def make_env(self):
            return MyEnv()

Each test states its rule in its name and message. They collect with random actions only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from muster.collectors import Collector

if TYPE_CHECKING:
    from tensordict import TensorDict


class EnvContract:
    """Inherit, and say how to make the environment; anything ``Collector`` takes will do."""

    steps = 24  # per environment and batch; a multiple of 4
    num_envs: int | None = 2  # None for environments that are a batch already

    def make_env(self) -> Any:
        """One new environment (or vector environment)."""
        raise NotImplementedError("return a new environment")

    def collect(self, batches: int = 2, *, seed: int = 0, **options: Any) -> TensorDict:
        """``batches`` batches joined in time, ``[B, batches * steps]``."""
        options = {"num_envs": self.num_envs, "frames_per_batch": self._frames(), "validate": "full", **options}
        with Collector(self.make_env, None, seed=seed, **options) as collector:
            return torch.cat([collector.rollout().clone() for _ in range(batches)], -1)

    def _frames(self) -> int:
        if self.num_envs is not None:
            return self.steps * self.num_envs
        env = self.make_env()
        env.close()
        return self.steps * int(getattr(env, "num_envs", 1))

    def test_next_observation_is_the_observation_of_the_next_row_unless_the_episode_ended(self) -> None:
        batch = self.collect()
        going_on = ~batch["next", "done"][..., :-1, 0]
        time = batch.ndim - 1
        for key in _observation_keys(batch):
            after, before = batch.get(("next", *key)), batch.get(key)
            last = before.shape[time] - 1
            after, before = after.narrow(time, 0, last)[going_on], before.narrow(time, 1, last)[going_on]
            assert _equal(after, before), f"{key}: next[t] must be obs[t + 1] inside an episode"

    def test_done_is_terminated_or_truncated_and_never_set_before_a_step(self) -> None:
        batch = self.collect()
        after = batch["next"]
        assert torch.equal(after["done"], after["terminated"] | after["truncated"])
        for flag in ("done", "terminated", "truncated"):
            assert not batch[flag].any(), f"{flag} at the root: the environment was reset before the step"

    def test_trajectory_ids_change_exactly_where_an_episode_ended(self) -> None:
        batch = self.collect()
        ids, done = batch["collector", "traj_ids"], batch["next", "done"][..., 0]
        assert torch.equal(ids[..., 1:] != ids[..., :-1], done[..., :-1])

    def test_rewards_are_finite_numbers(self) -> None:
        assert torch.isfinite(self.collect()["next", "reward"]).all()

    def test_the_same_seed_gives_the_same_data(self) -> None:
        first, second = self.collect(seed=3), self.collect(seed=3)
        for key in first.keys(True, True):
            assert _equal(first[key], second[key]), f"{key} differs between two collections with one seed"

    def test_the_size_of_batches_does_not_change_the_data(self) -> None:
        whole = self.collect(batches=1, frames_per_batch=self._frames())
        parts = self.collect(batches=4, frames_per_batch=self._frames() // 4)
        for key in whole.keys(True, True):
            assert _equal(parts[key], whole[key]), f"{key} depends on frames_per_batch"

    def test_time_limits_truncate_and_count(self) -> None:
        batch = self.collect(max_frames_per_traj=5)
        assert batch["next", "step_count"].max() <= 5
        late = batch["next", "step_count"] == 5
        assert (batch["next", "truncated"] | batch["next", "terminated"])[late].all()

    def test_batches_stay_unchanged_while_collecting_goes_on(self) -> None:
        with Collector(self.make_env, None, frames_per_batch=self._frames(), num_envs=self.num_envs) as collector:
            kept = collector.rollout()
            copy = kept.clone()
            for _ in range(3):
                collector.rollout()
            for key in kept.keys(True, True):
                assert _equal(kept[key], copy[key]), f"{key} of a kept batch changed"


def _observation_keys(batch: TensorDict) -> list[tuple[str, ...]]:
    own = {"action", "done", "terminated", "truncated", "step_count", "collector", "next"}
    keys = [key if isinstance(key, tuple) else (key,) for key in batch.keys(True, True)]
    return [key for key in keys if key[0] not in own and torch.is_tensor(batch.get(key))]


def _equal(a: Any, b: Any) -> bool:
    if torch.is_tensor(a):
        return bool(
            torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)) if a.is_floating_point() else torch.equal(a, b)
        )
    return bool(a.tolist() == b.tolist() if hasattr(a, "tolist") else a == b)
