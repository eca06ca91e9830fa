"""TorchRL's weight updaters.

TorchRL has deprecated them; they are kept for programs that use them.
"""

from __future__ import annotations

import abc
import warnings
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from typing_extensions import Self

from muster.compat.torchrl.weight_names import flattened
from muster.errors import BadOption, BadWeights
from muster.utils.attributes import optional
from muster.weights.names import named_weights, overwrite

__all__ = [
    "DistributedWeightUpdater",
    "RPCWeightUpdater",
    "RayWeightUpdater",
    "VanillaWeightUpdater",
    "WeightUpdaterBase",
]


class WeightUpdaterBase(abc.ABC):
    """Base of objects that update a policy's weights; ``collector.update_policy_weights_`` calls
    ``push_weights``.

    The collector then publishes the weights of its policy. Subclasses implement
    ``_sync_weights_with_worker``, and may override the other methods with an underscore.
    """

    _collectors: tuple[weakref.ref[Any], ...] = ()
    _post_hooks: list[Callable[[], Any]] | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        warnings.warn(
            f"{cls.__name__} is a WeightUpdaterBase, which is deprecated: call"
            " collector.update_policy_weights_(policy) without a weight_updater, and choose how"
            " weights get to workers with weight_sync_schemes.",
            DeprecationWarning,
            stacklevel=2,
        )
        return super().__new__(cls)

    @classmethod
    def from_policy(cls, policy: Any) -> WeightUpdaterBase | None:
        """Return an updater for the policy; None if the class cannot make one."""
        return None

    # --- called by collectors ---------------------------------------------------------------------

    def push_weights(
        self, policy_or_weights: Any = None, worker_ids: Any = None
    ) -> None:
        """Send weights to workers, then call the hooks.

        Args:
            policy_or_weights: a module, TensorDict or dict. None: the result of
                ``_get_server_weights``.
            worker_ids: one id or several. None: ``all_worker_ids()``.
        """
        self._push_weights(policy_or_weights=policy_or_weights, worker_ids=worker_ids)
        for hook in self.post_hooks:
            hook()

    def __call__(self, policy_or_weights: Any = None, worker_ids: Any = None) -> None:
        self.push_weights(policy_or_weights, worker_ids)

    def init(self, *args: Any, **kwargs: Any) -> None:
        """Called by ``collector.init_updater`` with its arguments."""
        return

    def register_collector(self, collector: Any) -> None:
        self._collectors = (*self._collectors, weakref.ref(collector))

    def _push_weights(
        self, *, policy_or_weights: Any = None, worker_ids: Any = None
    ) -> None:
        given = (
            self._get_server_weights()
            if policy_or_weights is None
            else policy_or_weights
        )
        weights = self._maybe_map_weights(given)
        several = isinstance(worker_ids, Collection) and not isinstance(
            worker_ids, (str, bytes)
        )
        ids = (
            self.all_worker_ids()
            if worker_ids is None
            else worker_ids
            if several
            else [worker_ids]
        )
        if ids is None:
            self._sync_weights_with_worker(server_weights=weights)
            return
        for worker in ids:
            if not self._skip_update(worker):
                self._sync_weights_with_worker(worker_id=worker, server_weights=weights)

    # --- for users and subclasses -----------------------------------------------------------------

    @property
    def collector(self) -> Any | None:
        """The collector of this updater; None if there is none, or if it was deleted.

        Raises:
            BadOption: the updater has several collectors; see ``collectors``.
        """
        if len(self._collectors) > 1:
            raise BadOption(
                "this weight updater belongs to several collectors: ask for `collectors`"
            )
        return self._collectors[0]() if self._collectors else None

    @property
    def collectors(self) -> list[Any] | None:
        """The collectors of this updater, with None for deleted ones; None before the first is
        registered.
        """
        return [reference() for reference in self._collectors] or None

    @property
    def post_hooks(self) -> list[Callable[[], Any]]:
        """Functions that are called without arguments after every push."""
        if self._post_hooks is None:
            self._post_hooks = []
        return self._post_hooks

    def register_post_hook(self, hook: Callable[[], Any]) -> None:
        self.post_hooks.append(hook)

    def increment_version(self) -> None:
        """Increment the policy version of all collectors that still exist."""
        for collector in self.collectors or ():
            if collector is not None:
                collector.increment_version()

    def all_worker_ids(self) -> Collection[Any] | None:
        """Return the ids of workers that are updated by default; None: there is a single target,
        without an id.
        """
        return None

    def _skip_update(self, worker_id: Any) -> bool:
        return False

    def _get_server_weights(self) -> Any:
        """Return the weights to push if none are given."""
        return None

    def _maybe_map_weights(self, policy_or_weights: Any) -> Any:
        """Return the weights to push: a module's tensors as a TensorDict, other weights unchanged."""
        if isinstance(policy_or_weights, torch.nn.Module):
            from tensordict import TensorDict

            return TensorDict.from_module(policy_or_weights).data
        if isinstance(policy_or_weights, dict) or hasattr(
            policy_or_weights, "flatten_keys"
        ):
            return policy_or_weights
        raise BadWeights(
            f"cannot push weights from {type(policy_or_weights).__name__}: expected a module, a"
            " TensorDict or a dict"
        )

    @abc.abstractmethod
    def _sync_weights_with_worker(
        self, *, worker_id: Any = None, server_weights: Any
    ) -> None:
        """Send ``server_weights`` to the worker ``worker_id``."""


class VanillaWeightUpdater(WeightUpdaterBase):
    """Copies weights into ``policy_weights`` in place; all or nothing.

    Args:
        weight_getter: function that returns the weights if none are given.
        policy_weights: TensorDict of the policy's own parameters,
            ``TensorDict.from_module(policy).lock_()``.
    """

    def __init__(
        self, *, weight_getter: Callable[[], Any] | None = None, policy_weights: Any
    ) -> None:
        self.weight_getter = weight_getter
        self.policy_weights = policy_weights

    @classmethod
    def from_policy(cls, policy: Any) -> VanillaWeightUpdater:
        from tensordict import TensorDict

        weights = TensorDict.from_module(policy)
        # are no weights
        unsaved = {
            name for name, _ in policy.named_buffers()
        } - policy.state_dict().keys()
        return cls(
            policy_weights=weights.exclude(
                *(tuple(name.split(".")) for name in unsaved)
            ).lock_()
        )

    def _get_server_weights(self) -> Any:
        return None if self.weight_getter is None else self.weight_getter()

    def _maybe_map_weights(self, policy_or_weights: Any) -> Any:
        return policy_or_weights

    def _sync_weights_with_worker(
        self, *, worker_id: Any = None, server_weights: Any
    ) -> None:
        if server_weights is not None:
            overwrite(
                named_weights(self.policy_weights),
                named_weights(flattened(server_weights)),
            )


class RayWeightUpdater(WeightUpdaterBase):
    """Calls ``update_policy_weights_`` of collectors in Ray actors that the user has made.

    The weights are put into Ray's object store once per push. A push does not wait for the actors:
    an error of an actor is raised by a later push to it. ``RayCollector`` needs no updater: its
    nodes are not such actors.

    Args:
        policy_weights: weights to push if none are given: a module, TensorDict or dict.
        remote_collectors: handles of the actors.
        max_interval: number of pushes that skip an actor before one reaches it.

    Raises:
        BadOption: Ray is not installed.
    """

    def __init__(
        self,
        policy_weights: Any,
        remote_collectors: Sequence[Any],
        max_interval: int = 0,
    ) -> None:
        with optional("RayWeightUpdater", "ray", "ray"):
            import ray
        self._ray: Any = ray
        self.policy_weights = policy_weights
        self.remote_collectors = list(remote_collectors)
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

    def _sync_weights_with_worker(
        self, *, worker_id: Any = None, server_weights: Any
    ) -> None:
        before = self._asked.pop(worker_id, None)
        if before is not None and self._ray.wait([before], timeout=0)[0]:
            self._ray.get(before)  # raises the actor's error
        collector = self.remote_collectors[worker_id]
        self._asked[worker_id] = collector.update_policy_weights_.remote(server_weights)
        self._passed_by[worker_id] = 0


class DistributedWeightUpdater(WeightUpdaterBase):
    """Copies weights into the policy of a ``DistributedCollector``, which publishes them to its
    nodes.

    Args:
        store: no effect (an argument of TorchRL): nodes get weights through the collector.
        policy_weights: weights to push if none are given: a module, TensorDict or dict. They may be
            those of the policy itself.
        num_workers: no effect; the collector knows its nodes.
        sync: no effect; a node takes the newest weights before its next rollout.
    """

    def __init__(
        self, store: Any, policy_weights: Any, num_workers: int, sync: bool = True
    ) -> None:
        self.store = store
        self.policy_weights = policy_weights
        self.num_workers = num_workers
        self.sync = sync

    def _get_server_weights(self) -> Any:
        return self.policy_weights

    def push_weights(
        self, policy_or_weights: Any = None, worker_ids: Any = None
    ) -> None:
        """Copy weights into the policy of the collectors, which then publish it to ``worker_ids``."""
        super().push_weights(policy_or_weights)

    def _sync_weights_with_worker(
        self, *, worker_id: Any = None, server_weights: Any
    ) -> None:
        given = named_weights(flattened(server_weights))
        for collector in self.collectors or ():
            if collector is not None:
                overwrite(named_weights(collector.policy), given)


class RPCWeightUpdater(WeightUpdaterBase):
    """Calls ``update_policy_weights_`` of collectors that the user has made in other RPC workers.

    ``RPCCollector`` needs no updater: its nodes get weights through it.

    Args:
        collector_infos: no effect (an argument of TorchRL).
        collector_class: no effect; a reference knows its class.
        collector_rrefs: references (``RRef``) to the collectors.
        policy_weights: weights to push if none are given: a module, TensorDict or dict.
        num_workers: number of the collectors that are updated by default: the first ones.
        wait_s: seconds to wait for the collectors. None: no limit.
    """

    def __init__(
        self,
        collector_infos: Any,
        collector_class: Any,
        collector_rrefs: Sequence[Any],
        policy_weights: Any,
        num_workers: int,
        wait_s: float | None = 60.0,
    ) -> None:
        self.collector_infos = collector_infos
        self.collector_class = collector_class
        self.collector_rrefs = list(collector_rrefs)
        self.policy_weights = policy_weights
        self.num_workers = num_workers
        self.wait_s = wait_s
        self._answers: list[Any] = []

    def all_worker_ids(self) -> Collection[int]:
        return range(self.num_workers)

    def push_weights(
        self,
        policy_or_weights: Any = None,
        worker_ids: Any = None,
        *,
        wait: bool = True,
    ) -> None:
        """Send weights to collectors, then call the hooks.

        Args:
            policy_or_weights: a module, TensorDict or dict. None: ``policy_weights``.
            worker_ids: number of a collector, or several. None: all.
            wait: wait until the collectors have the weights, and raise their errors.

        Raises:
            RuntimeError: a collector has raised an error, or has not answered in time.
        """
        super().push_weights(policy_or_weights, worker_ids)
        answers, self._answers = self._answers, []
        if wait:
            for answer in answers:
                answer.wait()

    def _get_server_weights(self) -> Any:
        return self.policy_weights

    def _sync_weights_with_worker(
        self, *, worker_id: Any = None, server_weights: Any
    ) -> None:
        # 0: torch RPC waits without a limit
        call = self.collector_rrefs[worker_id].rpc_async(timeout=self.wait_s or 0)
        self._answers.append(call.update_policy_weights_(server_weights))
