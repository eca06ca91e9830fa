"""Options of collectors with nodes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from inspect import signature
from typing import Annotated, Any, ClassVar

from muster.cluster.carrier import Carrier
from muster.collectors.multi_options import PoolOptions
from muster.collectors.options import PER_WORKER
from muster.collectors.setup import factories_of
from muster.collectors.signatures import check_names
from muster.errors import BadOption
from muster.utils.checked import PositiveNumber, at_least
from muster.utils.containers import is_several
from muster.utils.integers import integer

CLASSES = ("single", "sync", "async")
_OF_CLASS = {
    "Collector": "single",
    "SyncDataCollector": "single",
    "MultiSyncCollector": "sync",
    "MultiSyncDataCollector": "sync",
    "MultiAsyncCollector": "async",
    "MultiaSyncDataCollector": "async",
    "AsyncCollector": "async",
}


@dataclass(frozen=True, kw_only=True)
class ClusterOptions(PoolOptions, ABC):
    """Checked options of collectors with nodes.

    Attributes:
        create_env_fn: a list with one entry per node; see ``muster.Collector`` for entries.
        frames_per_batch: number of environment steps in a batch of one node; see
            ``muster.Collector``.
        sync: True: a batch has the rollouts of all nodes, ``frames_per_batch`` times their number.
            False: a batch has the rollouts of one node, the first that is ready.
        collector_class: "single": a node has one worker. "sync": the workers of a node share its
            batches. "async": each worker fills its own batches. Or the corresponding collector
            class. A value for all nodes, or a list.
        collector_kwargs: options of the workers, such as ``inference``: a dict for all nodes, or a
            list with one dict per node. Dicts in a list may differ in ``create_env_kwargs``,
            ``num_envs``, ``policy_factory``, ``policy_device``, ``env_device``, ``device``,
            ``exploration_type``, ``compile_policy``, ``cudagraph_policy`` and ``num_sub_threads``.
        num_workers_per_collector: number of workers of each node: a number for all nodes, or a
            list.
        update_after_each_batch: before each batch, publish the policy's weights to the nodes of the
            previous batch.
        max_weight_update_interval: before each batch, publish the policy's weights to nodes that
            have contributed to more than this number of batches since the last such publish. -1:
            never.
        min_nodes: number of nodes with which collection starts, for ``sync=False``. Other nodes are
            used as soon as they join, and take over the rollouts of lost nodes. None: wait for all
            nodes.
    """

    acts_elsewhere: ClassVar[bool] = True

    sync: bool = False
    collector_class: Any = "single"
    collector_kwargs: Any = None
    num_workers_per_collector: Any = 1
    update_after_each_batch: bool = False
    max_weight_update_interval: Annotated[int, at_least(-1)] = -1
    min_nodes: PositiveNumber | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.update_after_each_batch and self.max_weight_update_interval > -1:
            raise BadOption(
                "update_after_each_batch and max_weight_update_interval both say when to publish:"
                " give one"
            )
        if self.min_nodes is not None and self.sync:
            raise BadOption(
                f"min_nodes={self.min_nodes} with sync=True: a synchronous batch has the rollouts"
                " of all nodes, so all have to be there. Leave min_nodes out, or take sync=False."
            )

    @property
    def num_nodes(self) -> int | None:
        """The number of nodes; None: one per entry of ``create_env_fn``."""
        return None

    @abstractmethod
    def carrier(self, nodes: int, workers: int, deadline_s: float) -> Carrier:
        """Return the carrier for ``nodes`` with at most ``workers`` workers each; ``deadline_s``:
        deadline of links.
        """


# options that may differ from node to node in ``collector_kwargs``, beside ``create_env_kwargs``
OF_NODE = (
    *PER_WORKER,
    "num_envs",
    "exploration_type",
    "compile_policy",
    "cudagraph_policy",
    "num_sub_threads",
)


@dataclass(frozen=True)
class OverNodes:
    """The options of a collector with nodes, for its workers.

    Attributes:
        options: of all workers together; lists have an entry for each worker.
        others: further options of each worker, by name.
        of_leaf: the node of each worker.
        shared: the workers that share batches.
    """

    options: ClusterOptions
    others: list[dict[str, Any]]
    of_leaf: list[int]
    shared: list[list[int]]


def over_nodes(options: ClusterOptions) -> OverNodes:
    """Return the options of a collector with nodes, for its workers.

    Raises:
        BadOption: an option is wrong.
    """
    factories = _factories(options.create_env_fn, options.num_nodes)
    kinds = [
        _kind(given)
        for given in spread("collector_class", options.collector_class, len(factories))
    ]
    workers = spread(
        "num_workers_per_collector", options.num_workers_per_collector, len(factories)
    )
    workers = [integer("num_workers_per_collector", count) for count in workers]
    for count, kind in zip(workers, kinds, strict=True):
        if kind == "single" and count > 1:
            raise BadOption(
                f"num_workers_per_collector={count} needs a collector_class with workers: 'sync' or"
                " 'async' (MultiSyncCollector, MultiAsyncCollector), not 'single'"
            )
    if (options.min_nodes or 1) > len(factories):
        raise BadOption(
            f"min_nodes={options.min_nodes}, but there are {len(factories)} nodes: expected at most"
            " that"
        )
    of_leaf = [node for node, count in enumerate(workers) for _ in range(count)]
    shared: list[list[int]] = []
    for node, kind in enumerate(kinds):
        leaves = [leaf for leaf, place in enumerate(of_leaf) if place == node]
        shared += [leaves] if kind == "sync" else [[leaf] for leaf in leaves]
    common, of_node = _node_keywords(options.collector_kwargs, len(factories))
    options = replace(options, **common)
    lists: dict[str, Any] = {}
    for name in PER_WORKER:
        given = getattr(options, name)
        values = spread(name, given, len(factories))
        values = [
            own.pop(name, value) for own, value in zip(of_node, values, strict=True)
        ]
        if is_several(given) or any(value is not given for value in values):
            lists[name] = [values[node] for node in of_leaf]
    if None in lists.get("policy_factory", ()):
        raise BadOption(
            "collector_kwargs has a policy_factory for some nodes: give one for each node"
        )
    options = replace(options, **lists)
    kwargs = options.create_env_kwargs
    frames = options.frames_per_batch
    if is_several(kwargs):
        by_node = spread("create_env_kwargs", kwargs, len(factories))
        kwargs = [by_node[node] for node in of_leaf]
    if options.sync and isinstance(frames, int):
        frames *= len(factories)
    envs = [factories[node] for node in of_leaf]
    options = replace(
        options, create_env_fn=envs, create_env_kwargs=kwargs, frames_per_batch=frames
    )
    return OverNodes(options, [of_node[node] for node in of_leaf], of_leaf, shared)


def _factories(create_env_fn: Any, num_nodes: int | None) -> list[Any]:
    """Return one environment factory per node."""
    factories = factories_of(create_env_fn)
    if num_nodes is None:
        return factories
    factories = factories * num_nodes if len(factories) == 1 else factories
    if len(factories) != num_nodes:
        raise BadOption(
            f"num_collectors={num_nodes}, but create_env_fn has {len(factories)} entries: one for"
            " each node"
        )
    return factories


def _node_keywords(
    collector_kwargs: Any, count: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the options in ``collector_kwargs`` for all workers, and those of ``OF_NODE`` that
    differ, for each node. If it is a list, so is ``create_env_kwargs``.
    """
    every = [
        dict(given or {})
        for given in spread("collector_kwargs", collector_kwargs, count)
    ]
    shared = dict(every[0])
    if is_several(collector_kwargs) and any(
        "create_env_kwargs" in given for given in every
    ):
        shared["create_env_kwargs"] = [
            given.pop("create_env_kwargs", None) for given in every
        ]
    for given in every:
        check_names(signature(PoolOptions), given)
    own: list[dict[str, Any]] = [{} for _ in every]
    for name in OF_NODE:
        if any(not _equal(every[0].get(name), given.get(name)) for given in every):
            shared.pop(name, None)
            for node, given in enumerate(every):
                if name in given:
                    own[node][name] = given.pop(name)
    for number, other in enumerate(every):
        if differing := sorted(
            key
            for key in {*every[0], *other}
            if not _equal(every[0].get(key), other.get(key))
        ):
            raise BadOption(
                f"collector_kwargs[{number}] differs from collector_kwargs[0] in"
                f" {', '.join(differing)}: only {', '.join(('create_env_kwargs', *OF_NODE))} can"
                " differ. Give the same to all nodes, or let create_env_fn (an entry for each node)"
                " make the difference."
            )
    return shared, own


def _equal(one: Any, other: Any) -> bool:
    """Return whether two options are equal. Different array objects never are."""
    try:
        return one is other or bool(one == other)
    except (ValueError, RuntimeError):
        return False


def spread(name: str, given: Any, count: int) -> list[Any]:
    """Return a list with one value per node; ``given`` is such a list, or a value for all nodes."""
    if not is_several(given):
        return [given] * count
    if len(given) != count:
        raise BadOption(
            f"{name} has {len(given)} entries for {count} nodes: expected one for all, or one for"
            " each"
        )
    return list(given)


def _kind(given: Any) -> str:
    if isinstance(given, str):
        if given in CLASSES:
            return given
    elif isinstance(given, type):
        for cls in given.__mro__:
            if cls.__name__ in _OF_CLASS:
                return _OF_CLASS[cls.__name__]
    raise BadOption(
        f"collector_class={given!r}: expected 'single', 'sync' or 'async', or Collector,"
        " MultiSyncCollector or MultiAsyncCollector"
    )
