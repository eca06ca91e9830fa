"""TorchRL's collectors with worker processes: Muster collects in each worker, TorchRL joins the batches.

Each of TorchRL's workers has a collector of the class ``collector_class``, which is Muster's here. All other code is
TorchRL's, so batches, hooks, states, attributes and weights of workers are the same.
"""

from __future__ import annotations

import atexit
import inspect
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torchrl.collectors
from torchrl._comm.backends import _get_service_backend, normalize_service_backend

from muster.compat.torchrl.collector import Collector
from muster.compat.torchrl.setup import SELECTORS
from muster.compat.torchrl.worker_ids import with_ids

_DISPATCH: Any = type(torchrl.collectors.Collector)  # its metaclass, which selects the class for a backend


class _ByArgument(type(torchrl.collectors.MultiCollector)):  # type: ignore[misc]
    """Metaclass with which ``MultiCollector(sync=...)`` makes one of its subclasses."""

    def __call__(cls, *args: Any, sync: bool | None = None, **kwargs: Any) -> Any:
        chosen = cls
        if cls is MultiCollector and sync is not None:
            chosen = MultiSyncCollector if sync else MultiAsyncCollector
        return type.__call__(chosen, *args, **kwargs)


class MultiCollector(torchrl.collectors.MultiCollector, metaclass=_ByArgument):  # type: ignore[misc]
    """TorchRL 0.14's ``MultiCollector``: its arguments, defaults, attributes and results.

    ``torchrl.collectors.MultiCollector`` documents them. ``sync=True`` makes a ``MultiSyncCollector``, ``sync=False`` a
    ``MultiAsyncCollector``.

    Args:
        *args: TorchRL's arguments.
        collector_class: class of the workers' collectors: ``Collector`` of this package, or a subclass.
        init_fn: TorchRL's argument.
        **kwargs: TorchRL's arguments.
    """

    __signature__ = inspect.signature(torchrl.collectors.MultiCollector.__init__)

    def __init__(self, *args: Any, collector_class: Any = None, init_fn: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, collector_class=collector_class or Collector, init_fn=with_ids(init_fn), **kwargs)
        atexit.register(_shutdown, weakref.ref(self))  # else Python's exit and the workers wait for each other

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """End the workers as TorchRL does, and the weight sync schemes, which can otherwise hang at Python's exit."""
        super().shutdown(timeout=timeout, close_env=close_env, raise_on_error=raise_on_error)
        for scheme in (self._weight_sync_schemes or {}).values():
            scheme.shutdown()


class MultiSyncCollector(MultiCollector, torchrl.collectors.MultiSyncCollector):  # type: ignore[misc]
    """TorchRL 0.14's ``MultiSyncCollector``; see ``MultiCollector``."""


class MultiAsyncCollector(MultiCollector, torchrl.collectors.MultiAsyncCollector):  # type: ignore[misc]
    """TorchRL 0.14's ``MultiAsyncCollector``; see ``MultiCollector``."""


class AsyncCollector(MultiAsyncCollector, torchrl.collectors.AsyncCollector):  # type: ignore[misc]
    """TorchRL 0.14's ``AsyncCollector``; see ``MultiCollector``."""

    __signature__ = inspect.signature(torchrl.collectors.AsyncCollector.__init__)


class Evaluator(torchrl.collectors.Evaluator):  # type: ignore[misc]
    """TorchRL 0.14's ``Evaluator``, which documents the arguments; collects with ``Collector`` of this package.

    Args:
        *args: TorchRL's arguments.
        collector_cls: another class, or the name of a class in ``muster.compat.torchrl.collectors``.
        collector_kwargs: TorchRL's argument.
        **options: TorchRL's arguments.
    """

    __signature__ = inspect.signature(torchrl.collectors.Evaluator)

    def __init__(
        self, *args: Any, collector_cls: Any = None, collector_kwargs: dict[str, Any] | None = None, **options: Any
    ) -> None:
        if isinstance(collector_cls, str):
            from muster.compat.torchrl import collectors

            collector_cls = getattr(collectors, collector_cls)
        in_process = options.get("backend") == "process" or options.get("weight_sync_schemes") is not None
        if in_process:
            collector_kwargs = {"collector_class": Collector} | (collector_kwargs or {})
        if in_process or options.get("backend") == "ray":
            options["init_fn"] = with_ids(options.get("init_fn"))
        super().__init__(*args, collector_cls=collector_cls or Collector, collector_kwargs=collector_kwargs, **options)


def _shutdown(reference: weakref.ref[MultiCollector]) -> None:
    if (collector := reference()) is not None:
        collector.shutdown(raise_on_error=False)


def made_elsewhere(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the collector for ``Collector(backend=..., num_collectors=...)``; None: collect in this process."""
    given = {"backend": None, "num_collectors": None, **kwargs}
    count, backend = given["num_collectors"], given["backend"]
    if count is not None and (isinstance(count, bool) or not isinstance(count, int)):
        raise TypeError("num_collectors must be a positive integer.")
    if count is not None and count < 1:
        raise ValueError("num_collectors must be a positive integer.")
    if backend is not None:
        backend = normalize_service_backend(backend)
    else:
        backend = _get_service_backend() or ("direct" if count is None else "process")
    if backend not in _DISPATCH._BACKENDS:
        known = sorted(_DISPATCH._BACKENDS)
        raise ValueError(f"Collector does not support backend={backend!r}. Expected one of {known}.")
    sync, extra = given.get("sync"), given.get("backend_options") or {}
    if backend == "direct":
        if count not in (None, 1):
            raise ValueError("backend='direct' supports at most one collector.")
        if sync is not None:
            raise ValueError("sync is only valid for non-direct collectors.")
        if extra:
            raise ValueError("backend_options are only valid for non-direct collectors.")
        return None
    if len(args) > 2:
        raise TypeError("Collector accepts at most create_env_fn and policy positionally.")
    if sync is not None and not isinstance(sync, bool):
        raise TypeError("sync must be a boolean or None.")
    options = dict(zip(("create_env_fn", "policy"), args, strict=False))
    options |= {name: value for name, value in kwargs.items() if name not in SELECTORS}  # a copy, changed below
    if reserved := _DISPATCH._RESERVED_OPTIONS & extra.keys():
        raise ValueError(f"backend_options contains reserved selector keys: {sorted(reserved)}.")
    if twice := extra.keys() & options.keys():
        raise ValueError(f"Backend options duplicate top-level collector arguments: {sorted(twice)}.")
    _DISPATCH._normalize_env_fns((), options, count)
    if backend == "process":
        _DISPATCH._drop_inapplicable_defaults(torchrl.collectors.MultiCollector, options)
        return MultiCollector(sync=bool(sync), **options, **extra)
    from muster.compat.torchrl.collectors import distributed

    cls = {"ray": distributed.RayCollector, "rpc": distributed.RPCCollector}.get(
        backend, distributed.DistributedCollector
    )
    if backend == "submitit":
        extra = {"launcher": "submitit", **extra}
        if extra["launcher"] != "submitit":
            raise ValueError("backend='submitit' requires launcher='submitit'.")
    _DISPATCH._drop_inapplicable_defaults(cls, options)
    return cls(sync=bool(sync), **options, **extra)
