"""TorchRL's older way to update collectors in Ray actors; deprecated there, and kept for programs that use it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from muster.utils.attributes import optional
from muster.weights.updaters import WeightUpdaterBase


class RayWeightUpdater(WeightUpdaterBase):
    """Calls ``update_policy_weights_`` of collectors in Ray actors that the user has made.

    The weights are put into Ray's object store once per push. A push does not wait for the actors: what one of them
    raised comes with a later push to it. (``RayCollector`` needs no updater, its own nodes have no such actors.)

    Args:
        policy_weights: what is pushed where nothing is given: a module, TensorDict or dict.
        remote_collectors: handles of the actors.
        max_interval: how many pushes pass an actor by before one reaches it.

    Raises:
        BadOption: Ray is not installed.
    """

    def __init__(self, policy_weights: Any, remote_collectors: Sequence[Any], max_interval: int = 0) -> None:
        with optional("RayWeightUpdater", "ray", "ray"):
            import ray
        self._ray: Any = ray
        self.policy_weights, self.remote_collectors = policy_weights, list(remote_collectors)
        self.max_interval = max(0, max_interval)
        self._passed_by = [0] * len(self.remote_collectors)
        self._asked: dict[int, Any] = {}

    def all_worker_ids(self) -> Collection[int]:
        return range(len(self.remote_collectors))

    def _get_server_weights(self) -> Any:
        return self.policy_weights

    def _maybe_map_weights(self, policy_or_weights: Any) -> Any:
        return self._ray.put(super()._maybe_map_weights(policy_or_weights))

    def _skip_update(self, worker_id: int) -> bool:
        self._passed_by[worker_id] += 1
        return self._passed_by[worker_id] <= self.max_interval

    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
        before = self._asked.pop(worker_id, None)
        if before is not None and self._ray.wait([before], timeout=0)[0]:
            self._ray.get(before)  # raises what it raised
        collector = self.remote_collectors[worker_id]
        self._asked[worker_id] = collector.update_policy_weights_.remote(server_weights)
        self._passed_by[worker_id] = 0
