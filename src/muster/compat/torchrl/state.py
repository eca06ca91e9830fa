"""The state of TorchRL's ``Collector``: TorchRL's own state, and Muster's for exact resume."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs.batched_envs import BatchedEnvBase
from torchrl.modules import RandomPolicy

from muster.collectors import resume
from muster.collectors.engine import Engine
from muster.collectors.on_demand import OnDemand
from muster.errors import BadCheckpoint
from muster.weights.publish import PolicyWeights


class TorchRLState:
    """Mixin of TorchRL's collectors for saving and restoring state."""

    env: Any
    policy: Any
    n_env: int
    track_traj_ids: bool
    policy_version_tracker: Any
    _check_open: Any
    _engine: Engine
    _weights: PolicyWeights
    _on_demand: OnDemand
    shutdown: Any
    _numbering: Any
    _traj_pool: Any
    _registered: Any  # the environment at which this collector is registered

    def load_state_dict(self, state_dict: Mapping[str, Any], **kwargs: Any) -> None:
        """Load a ``state_dict``.

        The environment continues from where it is, with new trajectory ids.
        """
        strict = kwargs.get("strict", True)
        self._check_state(state_dict, strict=strict)
        if (strict or "env_state_dict" in state_dict) and isinstance(self.env, EnvBase):
            saved = state_dict["env_state_dict"]
            # other environments save nothing
            if saved or isinstance(self.env, (TransformedEnv, BatchedEnvBase)):
                self.env.load_state_dict(saved, **kwargs)
        if strict or "policy_state_dict" in state_dict:
            if not isinstance(self.policy, torch.nn.Module):
                raise ValueError(
                    "Underlying policy does not have state_dict to load policy_state_dict into."
                )
            self.policy.load_state_dict(state_dict["policy_state_dict"], **kwargs)
        self._frames = state_dict["frames"]
        self._iter = state_dict["iter"]
        if self.track_traj_ids:
            if state_dict.get("traj_pool") is not None:
                self._traj_pool.load_state_dict(state_dict["traj_pool"])
            self._numbering.renumber(range(self.n_env))
        if (
            state_dict.get("policy_version") is not None
            and self.policy_version_tracker is not None
        ):
            self.policy_version_tracker.version = state_dict["policy_version"]

    def _check_state(self, state_dict: Any, *, strict: bool) -> None:
        """Raise ``BadCheckpoint`` if something is missing."""
        needed = ["frames", "iter"]
        if strict and isinstance(self.policy, torch.nn.Module):
            needed.append("policy_state_dict")
        if strict and isinstance(self.env, EnvBase):
            needed.append("env_state_dict")
        is_state = isinstance(state_dict, Mapping)
        missing = [name for name in needed if not is_state or name not in state_dict]
        if missing:
            raise BadCheckpoint(
                f"load_state_dict: it has no {', '.join(missing)}; expected the state_dict() of a"
                " collector. Nothing was loaded."
            )

    def muster_state_dict(self) -> dict[str, Any]:
        """Return the full state: environments, their generators, open episodes; see
        ``muster.Collector.state_dict``.

        Torch's global generator, which environments and policies use, is not included: save it
        separately.
        """
        self._check_open()
        with self._unregistered():
            state = resume.state_of(self._parts())
        state["policy_is_module"] |= isinstance(
            self.policy, RandomPolicy
        )  # it has no state
        own = {
            "frames": self._frames,
            "iter": self._iter,
            "trajectories": self._numbering.state_dict(),
        }
        return {**state, "torchrl": own}

    def load_muster_state_dict(
        self, state: Mapping[str, Any], *, trust: bool = False
    ) -> resume.ResumeReport:
        """Restore a ``muster_state_dict`` for exact resume; see
        ``muster.Collector.load_state_dict``.
        """
        self._check_open()
        with self._unregistered():
            report = resume.load(
                self._parts(), state, trust=trust, close=self._close_quietly
            )
        own = state["torchrl"]
        self._frames = own["frames"]
        self._iter = own["iter"]
        self._numbering.load_state_dict(own["trajectories"])
        self._numbering.renumber(list(report.not_restored))
        return report

    def _parts(self) -> resume.CollectorParts:
        return resume.CollectorParts(
            type(self).__name__,
            self.policy,
            self._engine,
            self._weights,
            self._on_demand,
        )

    def _close_quietly(self) -> None:
        self.shutdown(raise_on_error=False)

    @contextlib.contextmanager
    def _unregistered(self) -> Iterator[None]:
        """Unregister this collector from the environment inside this context: it is not part of the
        state.
        """
        known = isinstance(self._registered, EnvBase)
        if known:
            self._registered._collector = None
        try:
            yield
        finally:
            if known:
                self._registered.register_collector(self)
