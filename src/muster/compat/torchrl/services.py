"""Policies that TorchRL's ``InferenceServer`` serves from an actor of Ray's, and learners on Ray.

A node's inference server calls a client of the service for all environments of the node, so the
clients are in the processes of Ray's actors, which alone are connected to Ray.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from muster.compat.torchrl.weight_names import is_tensordict
from muster.errors import BadOption, WorkerDied

TIMEOUT_S = 60.0  # of an actor's answer


def is_service(policy: Any) -> bool:
    """Return whether a policy is an ``InferenceServer(service_backend="ray")``."""
    return getattr(policy, "service_backend", None) == "ray" and callable(
        getattr(policy, "client", None)
    )


class ServedModule:
    """The policy of nodes: calls the service with a client of this process.

    Attributes:
        returns_any_actions: see ``muster.policies.tensordict.TensorDictPolicy``: TorchRL stores
            actions of any shape and dtype.

    Args:
        service: an ``InferenceServer``.
    """

    returns_any_actions = True

    def __init__(self, service: Any) -> None:
        self._owner = service._actor
        # that of the transport "distributed" makes its connection in the process that calls it
        self._client = service.client() if service._lazy_distributed else None

    def __call__(self, tensordict: Any) -> Any:
        if self._client is None:
            # each process has its own: results go to the client that has asked
            import ray

            self._client = ray.get(self._owner.client.remote())
        return self._client(tensordict)


def served_options(service: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a collector whose policy is served.

    Raises:
        BadOption: another policy or another place of inference was given.
    """
    if options.get("policy_factory") is not None:
        raise BadOption(
            "policy_factory cannot be combined with an inference service: give one of them"
        )
    where = options.get("inference", "server")
    if where == "worker":
        raise BadOption(
            "inference='worker' with an InferenceServer of Ray: workers are not connected to Ray."
            " Leave inference out: the node's inference server then calls the service"
        )
    return {**options, "inference": where, "trust_policy": True}


def update_service(service: Any, given: Any) -> None:
    """Give new weights to a service.

    Raises:
        BadOption: there are none: the policy is in the service only.
    """
    if given is None:
        raise BadOption(
            "update_policy_weights_() without weights: the policy is in the InferenceServer, and"
            " this process has none. Pass a module or its weights"
        )
    if isinstance(given, torch.nn.Module):
        given = TensorDict.from_module(given).data
    elif not is_tensordict(given):
        given = TensorDict(given).unflatten_keys(".")
    service.update_model_weights(given)


def connect_learner(target: Any) -> Any:
    """Return a weight sync scheme over which a learner on Ray sends weights to an actor.

    TorchRL's trainers with ``learner_backend="ray"`` ask the collector for it.

    Args:
        target: handle of the actor: of an ``InferenceServer``, or a ``WeightsReceiver``.

    Raises:
        WorkerDied: the actor has ended.
        CollectorTimeout: the actor does not answer.
    """
    from ray import exceptions
    from torchrl.weight_update import RayWeightSyncScheme

    from muster.cluster.ray_runtime import awaited, first_line

    scheme = RayWeightSyncScheme()
    scheme.init_on_sender(model_id="policy", remote_collectors=[target], num_workers=1)
    scheme._manage_receiver_connect = (
        True  # the sender tells the receivers when to connect
    )
    registered = target.register_scheme_receiver.remote(
        {"policy": scheme}, synchronize_weights=False
    )
    try:
        awaited(
            registered,
            TIMEOUT_S,
            "the Ray actor that a learner sends weights to has not answered within"
            f" {TIMEOUT_S:g} s; is it overloaded?",
        )
    except exceptions.RayActorError as error:
        raise WorkerDied(
            "the Ray actor that a learner sends weights to cannot be reached:"
            f" {first_line(error)}"
        ) from error
    return scheme
