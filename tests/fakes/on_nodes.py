"""Collectors with nodes on this machine, made as those with workers are: a node for each group."""

from __future__ import annotations

from typing import Any, ClassVar

from muster import DistributedCollector, RayCollector, RPCCollector
from tests.fakes.node_runs import all_blocks_in_groups
from tests.fakes.ray_cluster import cluster


class _Together:
    """A batch has the rollouts of all nodes; ``frames_per_batch`` counts for all of them, not for
    each.
    """

    always: ClassVar[dict[str, Any]] = {"launcher": "mp", "sync": True}

    def __init__(
        self, factories: list[Any], policy: Any = None, **options: Any
    ) -> None:
        if isinstance(frames := options.get("frames_per_batch"), int):
            options["frames_per_batch"] = frames // len(factories)
        super().__init__(factories, policy, **{**self.always, **options})  # type: ignore[call-arg]


class _AsReady:
    """A batch is one node's."""

    always: ClassVar[dict[str, Any]] = {"launcher": "mp", "sync": False}

    def __init__(
        self, factories: list[Any], policy: Any = None, **options: Any
    ) -> None:
        super().__init__(factories, policy, **{**self.always, **options})  # type: ignore[call-arg]


class _InGroups(DistributedCollector):
    """All blocks go through process groups."""

    def __init__(self, *given: Any, **options: Any) -> None:
        with all_blocks_in_groups():
            super().__init__(*given, **options)


class Together(_Together, _InGroups): ...


class AsReady(_AsReady, _InGroups): ...


class DirectAsReady(_AsReady, DistributedCollector):
    always: ClassVar[dict[str, Any]] = {**_AsReady.always, "transport": "direct"}


class RpcTogether(_Together, RPCCollector): ...


class _OnRay(RayCollector):
    def __init__(self, *given: Any, **options: Any) -> None:
        cluster()
        options.pop("launcher")
        super().__init__(
            *given, **{"remote_configs": {"num_cpus": 1, "memory": 2**28}, **options}
        )


class RayTogether(_Together, _OnRay): ...


class RayAsReady(_AsReady, _OnRay): ...


TOGETHER = (Together, RpcTogether, RayTogether)
AS_READY = (AsReady, DirectAsReady, RayAsReady)
