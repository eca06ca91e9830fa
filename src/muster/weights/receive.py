"""Weights that a parent sends to a collector: the receiving side of TorchRL's weight sync schemes."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from muster.errors import BadOption, BadWeights, CollectorClosed
from muster.weights.names import replica
from muster.weights.publish import PolicyWeights


class Receivers:
    """The receiving ends of a collector's weight sync schemes.

    A scheme writes into a copy of the model, at any time and in any thread. Weights that it
    announces are published like any others, so that the policy changes between rollouts only. A
    collector with workers publishes to them, so that weights reach all levels of a hierarchy.

    Args:
        weights: of the policy.
        collector: whose ``get_model(id)`` finds the model. It is held weakly: one without
            references ends at once, with its environment, and not when garbage is collected.
        worker_idx: given to schemes that ask.

    Attributes:
        schemes: by model id.
    """

    def __init__(
        self, weights: PolicyWeights, collector: Any, worker_idx: int | None
    ) -> None:
        self._weights = weights
        self._collector = weakref.ref(collector)
        self._worker_idx = worker_idx
        self.schemes: dict[str, Any] = {}
        self._contexts: dict[str, _Context] = {}

    def register(self, schemes: Mapping[str, Any], *, synchronize: bool = True) -> None:
        """Begin to receive; a scheme that was registered for the same model before is shut down.

        Args:
            schemes: by model id; anything with ``init_on_receiver``, ``connect`` and ``receive``.
            synchronize: wait for the sender's first weights now.
        """
        for model_id, scheme in schemes.items():
            for method in ("init_on_receiver", "connect", "receive"):
                if not hasattr(scheme, method):
                    raise BadOption(
                        f"the weight sync scheme for {model_id!r} is {scheme!r}, which has no"
                        f" {method}()"
                    )
            before = self.schemes.get(model_id)
            if before is not None and before is not scheme:
                before.shutdown()
            context = self._contexts[model_id] = _Context(
                self, model_id, self._worker_idx
            )
            if not getattr(scheme, "initialized_on_receiver", False):
                scheme.init_on_receiver(
                    model_id=model_id, context=context, worker_idx=self._worker_idx
                )
            else:
                scheme.context = context
            self.schemes[model_id] = scheme
            if synchronize and not getattr(scheme, "synchronized_on_receiver", False):
                scheme.connect(worker_idx=self._worker_idx)
                self.publish(model_id, context.model)

    def receive_or_publish(self, given: Any) -> None:
        """Receive weights through the schemes, or, without schemes, publish the given ones.

        Raises ``BadOption`` if weights were given although there are schemes.
        """
        if not self.schemes:
            self._weights.publish(given)
        elif given is not None:
            raise BadOption(
                "this collector receives its weights through schemes: call receive_weights()"
                " without any"
            )
        else:
            self.receive()

    def receive(self) -> None:
        """Take what has been sent by now."""
        for scheme in self.schemes.values():
            scheme.receive()

    def publish(self, model_id: str, weights: Any) -> None:
        """Publish what a scheme has received."""
        model: Any = self.model(model_id)
        if not isinstance(model, torch.nn.Module):
            model = None
        self._weights.publish(weights, model=model)

    def model(self, model_id: str) -> Any:
        """The collector's model."""
        collector = self._collector()
        if collector is None:
            raise CollectorClosed(
                "the collector that these weights are for does not exist any more"
            )
        return collector.get_model(model_id)

    def close(self) -> None:
        """Shut all schemes down; may be called again."""
        for scheme in self.schemes.values():
            getattr(scheme, "shutdown", lambda: None)()
        self.schemes = {}


class _Context:
    """What a scheme sees of the collector."""

    def __init__(
        self, receivers: Receivers, model_id: str, worker_idx: int | None
    ) -> None:
        model = receivers.model(model_id)
        if not isinstance(model, torch.nn.Module):
            raise BadWeights(
                f"model {model_id!r} is {type(model).__name__}, which has no weights to receive"
            )
        self._receivers = receivers
        self._model_id = model_id
        self.worker_idx = worker_idx
        try:
            self.model = copy.deepcopy(model)
        except Exception:  # noqa: BLE001  (the user's code)
            self.model = replica(model, only_weights=True)
        self.policy = self.model

    def get_model(self, model_id: str) -> Any:
        return self.model

    def update_policy_weights_(
        self, policy_or_weights: Any = None, *, model_id: str | None = None, **_: Any
    ) -> None:
        weights = self.model if policy_or_weights is None else policy_or_weights
        self._receivers.publish(model_id or self._model_id, weights)


def only_source(*sources: Any) -> Any:
    """Return the one of these arguments that is not None; None: all are."""
    given = [source for source in sources if source is not None]
    if len(given) > 1:
        raise BadOption(
            "the weights are given more than once: pass them as the argument, as weights= or as"
            " policy="
        )
    return given[0] if given else None
