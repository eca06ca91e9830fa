"""What TorchRL's programs call on a collector with nodes, and on the collectors of its nodes.

In TorchRL a node has a collector, and a program reaches into it: ``map_fn("env.set_attr", ...)``.
A node of Muster's has workers. ``NodeCollector`` stands for the collector of a node: paths that
begin with "policy" or "env" are followed in the node's workers, and other names are methods here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from muster.errors import BadOption
from muster.observing.stats import CollectorStats, WorkerStats
from muster.utils.attributes import resolve
from muster.workers.requests import Call
from muster.workers.worker import Worker

Views = Literal["aggregate", "per_worker", "both"]
Given = tuple[
    tuple[Any, ...], dict[str, Any]
]  # positional and keyword arguments of a call
IN_WORKERS = ("policy", "env")


class SettableHook:
    """A hook before batches that can be replaced after the collector was made.

    Args:
        function: called before each batch; None: there is none.
    """

    def __init__(self, function: Callable[..., Any] | None) -> None:
        self.function = function

    def replace(self, function: Callable[..., Any] | None) -> None:
        self.function = function

    def __call__(self) -> None:
        if self.function is not None:
            self.function()


def follow(
    worker: Worker, path: str, calls: Mapping[int, Given | None]
) -> tuple[int, Any]:
    """Follow a path in a worker. To be called in it.

    Args:
        path: from the worker: "policy.weight", "env.render".
        calls: the arguments by number of the worker; None: return what is found.

    Returns:
        the number of the worker, and the result; None for a worker that is not in ``calls``.
    """
    if worker.index not in calls:
        return worker.index, None
    found = resolve(worker, path)
    given = calls[worker.index]
    if given is None:
        return worker.index, found
    args, kwargs = given
    if callable(found):
        return worker.index, found(*args, **kwargs)
    if args or kwargs:
        raise BadOption(
            f"{path!r} is {type(found).__name__}, which cannot be called: leave the arguments out"
        )
    return worker.index, found


class NodeCollector:
    """The collector of a node, by the names of TorchRL's.

    Args:
        collector: the collector with the nodes.
        worker_idx: number of the node.
    """

    def __init__(self, collector: Any, worker_idx: int) -> None:
        self._collector = collector
        self.worker_idx = worker_idx

    @property
    def frames_per_batch(self) -> int:
        """Number of environment steps of a batch of this node."""
        collector = self._collector
        frames = int(collector.options.frames_per_batch)
        return frames // collector.num_collectors if collector.options.sync else frames

    @property
    def replay_buffer(self) -> Any:
        """The replay buffer of the collector with the nodes."""
        return self._collector.options.replay_buffer

    def cascade_execute(self, attr_path: str, *args: Any, **kwargs: Any) -> Any:
        """Call a function by its path, or return the attribute there.

        A node with several workers returns a list with the result of each.

        Raises:
            BadOption: the path does not exist, or arguments were given for an attribute.
        """
        return self._collector.on_nodes(attr_path, {self.worker_idx: (args, kwargs)})[0]

    def get_distant_attr(self, attr: str) -> Any:
        """Return the attribute at a path, such as "worker_idx" or "policy.module[0].weight"."""
        return self._collector.on_nodes(attr, {self.worker_idx: None})[0]

    def getattr_env(self, attr: str) -> Any:
        """Return an attribute of the environment."""
        return self.get_distant_attr(f"env.{attr}")

    def getattr_policy(self, attr: str) -> Any:
        """Return an attribute of the policy."""
        return self.get_distant_attr(f"policy.{attr}")

    def map_fn(
        self,
        method_name: str,
        list_of_args: Sequence[Sequence[Any]] | None = None,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Any]:
        """Call a function by its path once for each entry of the lists."""
        return [
            self.cascade_execute(method_name, *args, **kwargs)
            for args, kwargs in calls_of(list_of_args, list_of_kwargs)
        ]

    def reset(self, **kwargs: Any) -> None:
        """Reset the environments of this node."""
        self._collector.reset(self._collector.env_ids_of(self.worker_idx), **kwargs)

    def update_policy_weights_(
        self, policy_or_weights: Any = None, **kwargs: Any
    ) -> None:
        """Publish weights to this node."""
        self._collector.update_policy_weights_(
            policy_or_weights, worker_ids=self.worker_idx, **kwargs
        )

    def stats(self) -> dict[str, Any]:
        """Return the numbers of this node."""
        numbers: dict[str, Any] = self._collector.stats_of(self.worker_idx)
        return numbers


class CollectorActor:
    """Stands for the handle of a collector's Ray actor: ``ray.get(actor.method.remote(...))``.

    The call is made by ``remote``, which raises its error, and has ended when ``remote`` returns.
    """

    def __init__(self, collector: NodeCollector) -> None:
        self._collector = collector

    def __getattr__(self, name: str) -> RemoteMethod:
        method = (
            None if name.startswith("_") else getattr(type(self._collector), name, None)
        )
        if not callable(method):
            raise AttributeError(
                f"the collector of a node has no method {name!r}. Its methods are"
                f" {', '.join(sorted(methods()))}"
            )
        return RemoteMethod(getattr(self._collector, name))


class RemoteMethod:
    """A method of ``CollectorActor``."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method, and return a reference to its result in Ray's object store."""
        import ray

        return ray.put(self._method(*args, **kwargs))


def methods() -> list[str]:
    """Return the names of the methods of ``NodeCollector``."""
    return [
        name
        for name, value in vars(NodeCollector).items()
        if callable(value) and not name.startswith("_")
    ]


def calls_of(
    list_of_args: Sequence[Sequence[Any]] | None,
    list_of_kwargs: Sequence[Mapping[str, Any]] | None,
    count: int | None = None,
) -> list[Given]:
    """Return the arguments of the calls of ``map_fn``.

    Args:
        count: number of the calls that are expected; None: any, and one without lists.

    Raises:
        BadOption: the lists have other lengths.
    """
    given = [
        entries for entries in (list_of_args, list_of_kwargs) if entries is not None
    ]
    length = len(given[0]) if given else count or 1
    every = list_of_args or [()] * length
    named = list_of_kwargs or [{}] * length
    if count is None and len(every) != len(named):
        raise BadOption(
            f"list_of_args has {len(every)} entries and list_of_kwargs {len(named)}: they must"
            " have the same length"
        )
    if count is not None and len(every) != count:
        raise BadOption(
            f"Expected {count} argument entries, one for each node, got {len(every)}"
        )
    if count is not None and len(named) != count:
        raise BadOption(
            f"Expected {count} keyword-argument entries, one for each node, got {len(named)}"
        )
    return [
        (tuple(args), dict(kwargs)) for args, kwargs in zip(every, named, strict=True)
    ]


def on_nodes(
    collector: Any,
    path: str,
    calls: Mapping[int, Given | None],
    leaves: Mapping[int, Sequence[int]],
    ask: Callable[[Call], list[tuple[int, Any]]],
) -> list[Any]:
    """Follow a path from the collectors of nodes, and return the results in the order of ``calls``.

    Args:
        collector: the collector with the nodes.
        calls: the arguments by node; None: return what is found.
        leaves: the numbers of a node's workers, by node.
        ask: sends a request to all workers, and returns their answers.
    """
    if path.partition(".")[0].partition("[")[0] not in IN_WORKERS:
        return [
            _here(NodeCollector(collector, node), path, given)
            for node, given in calls.items()
        ]
    by_worker = {leaf: given for node, given in calls.items() for leaf in leaves[node]}
    answers = dict(ask(Call(follow, (path, by_worker))))
    found = [[answers.get(leaf) for leaf in leaves[node]] for node in calls]
    return [results[0] if len(results) == 1 else results for results in found]


def _here(node: NodeCollector, path: str, given: Given | None) -> Any:
    """Follow a path from the collector of a node in this process."""
    found = resolve(node, path)
    if given is None or not callable(found):
        if given is not None and any(given):
            raise BadOption(
                f"{path!r} is {type(found).__name__}, which cannot be called: leave the arguments"
                " out"
            )
        return found
    args, kwargs = given
    return found(*args, **kwargs)


def stats_of_nodes(
    stats: CollectorStats,
    leaves: Mapping[int, Sequence[int]],
    view: Views,
    shared: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the numbers of a collector with nodes, with TorchRL's names.

    Args:
        leaves: the numbers of a node's workers, by node.
        view: "aggregate": of the collector. "per_worker": of each node. "both": of both.
        shared: further numbers of the collector.
    """
    if view not in ("aggregate", "per_worker", "both"):
        raise BadOption(
            f"workers={view!r}: workers must be one of 'aggregate', 'per_worker' or 'both'"
        )
    nodes = [[stats.workers[leaf] for leaf in leaves[node]] for node in leaves]
    alive = [any(worker.state == "working" for worker in workers) for workers in nodes]
    found: dict[str, Any] = {}
    if view != "per_worker":
        found |= {"frames": stats.frames, "batches": stats.batches, **shared}
        if isinstance(stats.policy_version, int):
            found["policy_version"] = stats.policy_version
        found["worker_frames"] = sum(
            worker.frames for workers in nodes for worker in workers
        )
    found |= {"workers": len(nodes), "workers_alive": sum(alive)}
    if view != "aggregate":
        for number, workers in enumerate(nodes):
            of_node = stats_of_node(workers)
            found |= {
                f"worker_{number}/{name}": value for name, value in of_node.items()
            }
    return found


def stats_of_node(workers: Sequence[WorkerStats]) -> dict[str, Any]:
    """Return the numbers of a node with these workers."""
    return {
        "frames": sum(worker.frames for worker in workers),
        "restarts": sum(worker.restarts for worker in workers),
        "busy_s": sum(worker.busy_s for worker in workers),
    }
