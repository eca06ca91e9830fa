"""The methods of collectors for weights: publish, receive, versions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch

from muster.errors import BadOption
from muster.utils.tracebacks import trimmed
from muster.weights.names import tensors_in

if TYPE_CHECKING:
    from muster.collectors.options import CollectorOptions
    from muster.weights.publish import PolicyWeights
    from muster.weights.receive import Receivers


class WeightMethods:
    """Mixin of collectors: policy weights and their version."""

    options: CollectorOptions
    policy: Any
    _weights: PolicyWeights
    _receivers: Receivers
    _updater: Any

    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        *,
        weights: Any = None,
        policy: Any = None,
        worker_ids: Any = None,
        model_id: str | None = None,
        weights_dict: Mapping[str, Any] | None = None,
    ) -> None:
        """Publish new weights for the next batch. May be called from any thread.

        Without arguments it publishes the policy that the collector was made with, all its
        parameters and buffers: this is what you need after an optimizer step. A module that is a
        part of this policy stands for all of it. Weights from elsewhere (a copy, a ``state_dict``,
        a TensorDict) must cover all of it, or name their part with ``model_id``. Buffers that are
        not in the ``state_dict`` are never published.

        Args:
            policy_or_weights: the policy, a part of it, a copy of the policy, a TensorDict, or a
                dict of tensors, which may be nested. None: the policy that the collector was made
                with.
            weights, policy: the same as keywords. Only one of the three may be used.
            worker_ids: the workers that get the weights; the others keep theirs. A number, or the
                ``torch.device`` of the workers' policies, or a list of these. None: all. Passed on
                to the ``weight_updater``, if there is one.
            model_id: the model that the weights are for, see ``get_model``; other models keep
                theirs. None: "policy". Weights from elsewhere that a model was given stay in
                workers until the whole policy is published without arguments, or the model itself.
            weights_dict: weights by model id, published together as one version.

        Raises:
            BadWeights: the weights do not fit, are those of a part only (the message names the
                others), or are not finite. Nothing was changed.
            BadOption: contradicting arguments, an unknown model, or no such worker.
            TypeError: ``worker_ids`` without workers or a ``weight_updater``.
        """
        given = _the_one(policy_or_weights, weights, policy)
        self._check_open()
        if worker_ids is not None and self._updater is None and self._weights.workers is None:
            raise TypeError(
                "worker_ids were given, but this collector has no workers and no weight_updater:"
                " leave them out"
            )
        if weights_dict is not None and (given is not None or model_id is not None):
            raise BadOption("weights_dict has the weights of all models: give nothing else with it")
        if self._updater is not None:
            if weights_dict is not None or model_id not in (None, "policy"):
                raise BadOption(
                    "the weight_updater knows one policy: leave model_id and weights_dict out"
                )
            self._updater.push_weights(given, worker_ids)
            # its changes are in the policy
            given = None
            weights_dict = {}
        parts = {model_id or "policy": given} if weights_dict is None else weights_dict
        with trimmed:
            sources = [(source, self._part(name)) for name, source in parts.items()]
            if self._weights.workers is None:
                self._weights.publish_all(sources)
            else:
                self._weights.publish_all(
                    sources or [(None, None)], workers=self._workers_of(worker_ids)
                )

    def receive_weights(
        self, policy_or_weights: Any = None, *, weights: Any = None, policy: Any = None
    ) -> None:
        """Use the weights that the registered schemes have received, or, without schemes, the given
        weights.

        Args:
            policy_or_weights, weights, policy: see ``update_policy_weights_``. None: those of the
                policy that the collector was made with.

        Raises:
            BadOption: weights were given although schemes are registered, or twice.
            BadWeights: the weights do not fit.
        """
        given = _the_one(policy_or_weights, weights, policy)
        self._check_open()
        if not self._receivers.schemes:
            self._weights.publish(given)
        elif given is not None:
            raise BadOption(
                "this collector receives its weights through schemes: call receive_weights()"
                " without any"
            )
        else:
            self._receivers.receive()

    def register_scheme_receiver(
        self, weight_recv_schemes: Mapping[str, Any], *, synchronize_weights: bool = True
    ) -> None:
        """Receive weights from a parent collector.

        Args:
            weight_recv_schemes: TorchRL's ``WeightSyncScheme``, or an object with its receiving
                methods, by model id. A scheme may receive in a thread of its own; the next batch
                uses its weights.
            synchronize_weights: wait for the parent's first weights.
        """
        self._check_open()
        self._receivers.register(weight_recv_schemes, synchronize=synchronize_weights)

    def init_updater(self, *args: Any, **kwargs: Any) -> None:
        """Call ``init`` of the ``weight_updater``, if there is one."""
        self._raise_from_background()
        if self._updater is not None:
            self._updater.init(*args, **kwargs)

    @property
    def _receiver_schemes(self) -> dict[str, Any]:
        """The receiving schemes under the name used by TorchRL's senders through
        ``cascade_execute``.
        """
        return self._receivers.schemes

    @property
    def policy_version(self) -> int | str:
        """The number of weight publications, or the version of ``track_policy_version``'s object."""
        return self._weights.version

    def get_policy_version(self) -> int | str | None:
        """Return ``policy_version``; None without ``track_policy_version``."""
        return self._weights.version if self.options.track_policy_version else None

    def increment_version(self) -> None:
        """Increment the version, for weights that were changed in another way."""
        self._check_open()
        self._weights.publish_all([])

    def _workers_of(self, worker_ids: Any) -> list[int] | None:
        """The numbers of workers that were given by number and by the device of their policies;
        None: all.
        """
        if worker_ids is None:
            return None
        several = isinstance(worker_ids, Collection) and not isinstance(worker_ids, str)
        numbers: list[int] = []
        for worker in worker_ids if several else [worker_ids]:
            if isinstance(worker, torch.device):
                numbers += self._workers_on(worker)
            elif isinstance(worker, Integral) and not isinstance(worker, bool):
                numbers.append(int(worker))
            else:
                raise BadOption(
                    f"worker_ids has {worker!r}: expected numbers of workers, or devices"
                )
        return list(dict.fromkeys(numbers))

    def _workers_on(self, device: torch.device) -> range:
        """The workers whose policies are on a device: all, or none."""
        acts_on = self.options.devices.policy
        if acts_on is None:
            first = next(
                iter(tensors_in(self.policy) if isinstance(self.policy, torch.nn.Module) else ()),
                None,
            )
            acts_on = torch.device("cpu") if first is None else first.device
        if device.type != acts_on.type or device.index not in (None, acts_on.index or 0):
            raise BadOption(f"worker_ids={device!r}: the policies of all workers are on {acts_on}")
        return range(self._weights.workers or 0)

    def _part(self, model_id: str) -> torch.nn.Module | None:
        model = None if model_id == "policy" else self.get_model(model_id)
        if model is not None and not isinstance(model, torch.nn.Module):
            raise BadOption(
                f"model_id={model_id!r} is {type(model).__name__}, which has no weights"
            )
        return model

    if TYPE_CHECKING:

        def get_model(self, model_id: str) -> Any: ...
        def _check_open(self) -> None: ...
        def _raise_from_background(self) -> None: ...


def _the_one(*sources: Any) -> Any:
    given = [source for source in sources if source is not None]
    if len(given) > 1:
        raise BadOption(
            "the weights are given more than once: pass them as the argument, as weights= or as"
            " policy="
        )
    return given[0] if given else None
