"""Weights of a collector's own policy that a learner on Ray sends (``learner_backend="ray"``).

::

    learner (Ray actors of TorchRL's trainer)
       |  TorchRL's RayWeightSyncScheme: torch.distributed, a call when to receive
    WeightsReceiver (one Ray actor per collector)
       |  the newest weights, before each batch
    RayCollector (main process) ---- publishes them as any others ----> actors

TorchRL's scheme sends to the collector of each actor. Here one actor receives for all of them: what
it has received is published as one version, so that all rows of a batch have the same.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict

from muster.cluster.ray_runtime import (
    RayConnection,
    actor_class,
    awaited,
    first_line,
    search_path,
)
from muster.errors import BadOption, WorkerDied
from muster.keys import key_of
from muster.weights.names import Weights, named_weights, plain_modules

POLICY = "policy"
# of an answer; of the first one: another machine may have to start, and imports TorchRL
TIMEOUT_S = 60.0
START_S = 300.0
# methods that TorchRL's scheme and learner call in the actor
CALLED = (
    "register_scheme_receiver",
    "_weight_sync_signature",
    "_connect_weights_scheme",
    "_receive_weights_scheme",
)


class OfLearner(NamedTuple):
    """Weights of one publication.

    Attributes:
        number: of publications until then.
        weights: tensors by name.
        version: the learner's; None: it has sent none.
    """

    number: int
    weights: Weights
    version: int | None


class LearnerWeights:
    """The main process' side: the newest weights of a learner.

    Args:
        policy: of the collector.

    Attributes:
        actor: handle of the receiving actor, for TorchRL's scheme.

    Raises:
        BadOption: the policy has no weights.
        WorkerDied: the actor could not be started.
        CollectorTimeout: it has not started in time.
    """

    def __init__(self, policy: Any) -> None:
        if not isinstance(policy, torch.nn.Module):
            raise BadOption(
                f"learner_backend='ray': the policy is {type(policy).__name__}, which has no"
                " weights that a learner could send. Give a torch.nn.Module"
            )
        self._connection = RayConnection()
        self._seen = 0
        cls = actor_class(
            "muster.compat.torchrl.learner_weights:WeightsReceiver", CALLED
        )
        # a call that waits for the learner must not hold up the one that asks for the newest
        options = {"num_cpus": 0, "max_concurrency": 2}
        self.actor = cls.options(**options).remote(search_path(), plain_modules(policy))
        self._answer(START_S, "newest", 0)

    def take(self) -> OfLearner | None:
        """Return the newest weights; None: they were taken before.

        Raises:
            WorkerDied: the actor has ended.
            CollectorTimeout: it does not answer.
        """
        found: OfLearner | None = self._answer(TIMEOUT_S, "newest", self._seen)
        if found is not None:
            self._seen = found.number
        return found

    def close(self) -> None:
        """End the actor. May be called again."""
        import ray
        from ray import exceptions

        # it has ended with its connection
        with contextlib.suppress(exceptions.RayError, ValueError, RuntimeError):
            self._connection.check()
            ray.kill(self.actor, no_restart=True)

    def _answer(self, timeout_s: float, name: str, *args: Any) -> Any:
        from ray import exceptions

        who = "the Ray actor that receives the learner's weights"
        try:
            self._connection.check()
            return awaited(
                self.actor.call.remote(name, *args),
                timeout_s,
                f"{who} has not answered within {timeout_s:g} s; is it waiting for a machine with"
                " room, or the machine overloaded?",
            )
        except (exceptions.RayError, RuntimeError) as error:
            raise WorkerDied(f"{who} cannot be reached: {first_line(error)}") from error


class WeightsReceiver:
    """The object in the actor, with the methods that TorchRL's scheme and learner call.

    Args:
        model: modules with the names of the policy's, and its weights.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._schemes: dict[str, Any] = {}
        self._newest = OfLearner(0, {}, None)
        self._lock = threading.Lock()

    def newest(self, seen: int) -> OfLearner | None:
        """Return the newest weights; None: they are those of publication ``seen``, or there are
        none.
        """
        with self._lock:
            return None if self._newest.number == seen else self._newest

    def register_scheme_receiver(
        self, schemes: Mapping[str, Any], *, synchronize_weights: bool = True
    ) -> None:
        """Receive over these schemes; one of before for the same model is shut down."""
        for model_id, scheme in schemes.items():
            before = self._schemes.get(model_id)
            if before is not None:
                before.shutdown()
            scheme.init_on_receiver(model_id=model_id, worker_idx=0, model=self._model)
            self._schemes[model_id] = scheme
        if synchronize_weights:
            self._connect_weights_scheme()

    def _weight_sync_signature(
        self, model_id: str
    ) -> tuple[tuple[tuple[str, ...], tuple[int, ...], str], ...]:
        """Return name, shape and dtype of each weight, which the learner compares with its own."""
        if model_id != POLICY:
            raise BadOption(
                f"model_id={model_id!r}: a learner on Ray sends the weights of the policy only"
            )
        named = {
            key_of(key): tensor
            for key, tensor in TensorDict.from_module(self._model).items(True, True)
        }
        return tuple(
            (key, tuple(named[key].shape), str(named[key].dtype))
            for key in sorted(named)
        )

    def _connect_weights_scheme(self, model_version: int | None = None) -> None:
        """Connect to the learner, and take its first weights."""
        for scheme in self._schemes.values():
            if not scheme.synchronized_on_receiver:
                scheme.connect(worker_idx=0)
        self._keep(model_version)

    def _receive_weights_scheme(self, model_version: int | None = None) -> None:
        """Take weights that the learner is about to send."""
        if not self._schemes:
            raise BadOption(
                "there is no scheme over which the learner sends weights: call"
                " register_scheme_receiver before"
            )
        for scheme in self._schemes.values():
            scheme.receive()
        self._keep(model_version)

    def _keep(self, version: int | None) -> None:
        weights = {
            name: tensor.detach().clone()
            for name, tensor in named_weights(self._model).items()
        }
        with self._lock:
            self._newest = OfLearner(self._newest.number + 1, weights, version)
