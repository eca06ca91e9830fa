"""The weight methods of TorchRL's ``Collector``."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torchrl.weight_update
from torchrl.collectors import BaseCollector, WeightUpdaterBase

from muster.compat.torchrl import updaters
from muster.compat.torchrl.weight_names import (
    by_name,
    fitting_parts,
    flattened,
    is_tensordict,
    unsaved_buffers,
)
from muster.compat.torchrl.weight_update import WeightSyncScheme
from muster.weights.publish import PolicyWeights
from muster.weights.receive import Receivers, only_source

# TorchRL's collectors and their subclasses then accept our schemes and updaters.
torchrl.weight_update.WeightSyncScheme.register(WeightSyncScheme)
WeightUpdaterBase.register(updaters.WeightUpdaterBase)


class TorchRLPolicyWeights(PolicyWeights):
    """Weights of a policy in this process.

    Takes all forms in which TorchRL's functions and schemes give weights.

    These are nested dicts, and TensorDicts of modules, which have non-persistent buffers and extra
    state besides what is in a state dict. The buffers are copied as well; extra state is left to
    the scheme that has sent it.
    """

    def publish_all(
        self,
        sources: Sequence[tuple[Any, Any]],
        *,
        workers: Collection[int] | None = None,
        version: int | None = None,
    ) -> int | str:
        parts = [
            part for source, model in sources for part in self._parts(source, model)
        ]
        return super().publish_all(parts, workers=workers, version=version)

    def _parts(self, source: Any, model: Any) -> list[tuple[Any, Any]]:
        """Return the weights, and apart from them the non-persistent buffers, each with its model."""
        source = flattened(source)
        target = self.policy if model is None else model
        if not isinstance(target, torch.nn.Module) or not (
            isinstance(source, dict) or is_tensordict(source)
        ):
            return [(source, model)]
        named = by_name(source)
        fitting = list(fitting_parts(named.keys(), target).values())
        buffers = unsaved_buffers(fitting[0]) if fitting else {}
        given = buffers.keys() & named.keys()
        if not given:
            return [(named, model)]
        holder, apart = torch.nn.Module(), {}
        for number, name in enumerate(sorted(given)):
            holder.register_buffer(str(number), buffers[name])
            apart[str(number)] = named.pop(name)
        return [(named, model), (apart, holder)]


class TorchRLWeights:
    """Mixin of TorchRL's collectors: publishes weights as Muster does, with TorchRL's names."""

    policy: Any
    _wrapped_policy: Any
    worker_idx: Any
    policy_version_tracker: Any
    weight_updater: Any
    _weight_sync_schemes: Any
    _check_open: Any
    _weights: PolicyWeights

    def update_policy_weights_(
        self, policy_or_weights: Any = None, *, worker_ids: Any = None, **kwargs: Any
    ) -> None:
        """Use new weights from the next batch on.

        Args:
            policy_or_weights: a TensorDict, a module, or a dict of tensors: a state dict, or nested
                as a TensorDict is. None: the policy that the collector was made with.
            worker_ids: passed to weight updaters and schemes.
            **kwargs: ``weights``, ``policy``, ``model_id``, ``weights_dict``, as in TorchRL.
                Without schemes, TorchRL ignores ``weights_dict``; here its entry "policy" is used.
        """
        if "policy_weights" in kwargs:
            warnings.warn(
                "`policy_weights` is deprecated. Use `policy_or_weights` instead.",
                DeprecationWarning,
                2,
            )
            policy_or_weights = kwargs.pop("policy_weights")
        named = {name: value for name, value in kwargs.items() if value is not None}
        direct = not self._weight_sync_schemes and self.weight_updater is None
        if direct and policy_or_weights is None and named.keys() == {"weights_dict"}:
            if unknown := kwargs.pop("weights_dict").keys() - {"policy"}:
                raise KeyError(
                    f"Collector has no local weight target for model_id={sorted(unknown)[0]!r}."
                )
            policy_or_weights = named["weights_dict"]["policy"]
        BaseCollector.update_policy_weights_(
            self, policy_or_weights, worker_ids=worker_ids, **kwargs
        )
        if self._weight_sync_schemes or self.weight_updater is not None:
            self._weights.publish_all([])

    def register_scheme_receiver(
        self,
        weight_recv_schemes: Mapping[str, Any],
        *,
        synchronize_weights: bool = True,
    ) -> None:
        """Receive weights from a parent collector; see ``Collector.register_scheme_receiver``."""
        self._check_open()
        self._receivers.register(weight_recv_schemes, synchronize=synchronize_weights)

    def receive_weights(
        self, policy_or_weights: Any = None, *, weights: Any = None, policy: Any = None
    ) -> None:
        """Use the weights that the registered schemes have received, or, without schemes, the given
        weights.

        Args:
            policy_or_weights: see ``update_policy_weights_``. None: copy them from the policy that
                the collector was made with.
            weights: the same as a keyword.
            policy: the same as a keyword.

        Raises:
            ValueError: weights were given although schemes are registered, or twice.
            BadWeights: the weights do not fit, or are not finite. Nothing was changed.
        """
        given = only_source(policy_or_weights, weights, policy)
        self._check_open()
        self._receivers.receive_or_publish(given)

    def increment_version(self) -> None:
        """Increment the version, with ``track_policy_version``."""
        if self.policy_version_tracker is not None:
            self._weights.publish_all([])

    # --- parts ------------------------------------------------------------------------------------

    @property
    def _receiver_schemes(self) -> dict[str, Any] | None:
        return self._receivers.schemes or None

    def _set_up_weights(self, original: Any) -> None:
        """``original``: the policy before it was moved."""
        acting = (
            self._wrapped_policy
            if isinstance(self._wrapped_policy, torch.nn.Module)
            else self.policy
        )
        moved = None if original is self.policy else original
        self._weights = TorchRLPolicyWeights(acting, moved, self.policy_version_tracker)
        self._receivers = Receivers(self._weights, self, self.worker_idx)

    def _maybe_fallback_update(
        self, policy_or_weights: Any = None, *, model_id: str | None = None
    ) -> None:
        if model_id not in (None, "policy"):
            raise KeyError(
                f"Collector has no local weight target for model_id={model_id!r}."
            )
        if not isinstance(self._weights.policy, torch.nn.Module):
            raise RuntimeError(
                "Collector cannot update policy weights without explicit weights or an original"
                " policy module."
            )
        self._weights.publish(policy_or_weights)


def is_for_workers(scheme: Any) -> bool:
    """Return whether a scheme only names the transport of a collector with workers."""
    is_local = isinstance(scheme, WeightSyncScheme) and scheme.backend in (
        "shared",
        "process",
    )
    return is_local and not scheme.initialized_on_sender
