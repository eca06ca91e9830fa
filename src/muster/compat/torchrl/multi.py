"""TorchRL's collectors with worker processes: Muster collects in each worker, TorchRL joins the
batches.

Each of TorchRL's workers has a collector of the class ``collector_class``, which is Muster's here.
Batches, hooks, states and attributes of workers are TorchRL's. ``WorkerCalls`` adds what TorchRL's
classes lack: the errors of workers, the end of a collector that was shut down, and weights in every
form.

The life of a collector:

1. The constructor starts the workers. An error there is raised by it, and ends all workers.
2. Every use of the workers is inside ``_workers()``: it raises ``CollectorClosed`` after the end,
   and, if a worker has exited, the error that it has raised, or ``WorkerDied``. Then the collector
   is at its end, too.
3. ``shutdown`` ends the workers. After ``start()``, where no call looks at them, it raises the
   error of a worker.
"""

from __future__ import annotations

import atexit
import inspect
import time
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torchrl.collectors
import torchrl.weight_update
from torchrl._comm.backends import _get_service_backend, normalize_service_backend
from torchrl.envs import EnvBase

from muster.compat.torchrl.collector import Collector
from muster.compat.torchrl.progress import SharedProgress
from muster.compat.torchrl.setup import SELECTORS, signature_of, written_as_asked
from muster.compat.torchrl.weight_update import NoWeightSyncScheme
from muster.compat.torchrl.worker_calls import LOOK_S, WorkerCalls
from muster.compat.torchrl.worker_errors import (
    ErrorFolder,
    WatchedClass,
    WatchedFunction,
    raise_original,
)
from muster.compat.torchrl.worker_ids import with_ids
from muster.utils.tracebacks import trimmed

# its metaclass, which selects the class for a backend
_DISPATCH: Any = type(torchrl.collectors.Collector)


class _ByArgument(type(torchrl.collectors.MultiCollector)):  # type: ignore[misc]
    """Metaclass with which ``MultiCollector(sync=...)`` makes one of its subclasses."""

    def __call__(cls, *args: Any, sync: bool | None = None, **kwargs: Any) -> Any:
        chosen = cls
        if cls is MultiCollector and sync is not None:
            chosen = MultiSyncCollector if sync else MultiAsyncCollector
        return type.__call__(chosen, *args, **kwargs)


class MultiCollector(WorkerCalls, metaclass=_ByArgument):
    """TorchRL 0.14's ``MultiCollector``: its arguments, defaults, attributes and results.

    ``torchrl.collectors.MultiCollector`` documents them. ``sync=True`` makes a
    ``MultiSyncCollector``, ``sync=False`` a ``MultiAsyncCollector``.

    Args:
        create_env_fn: a list with an entry for each worker, or one entry: a function that makes an
            environment, an environment, or an environment id.
        policy: TorchRL's argument.
        num_workers: number of workers, if ``create_env_fn`` is one entry. None: one.
        collector_class: class of the workers' collectors: ``Collector`` of this package, or a
            subclass.
        init_fn: TorchRL's argument.
        cat_results: TorchRL's argument. "cat", which its documentation has, is 0: the first
            dimension.
        weight_sync_schemes: TorchRL's argument. A policy that is a module always has a scheme:
            TorchRL's default.
        **kwargs: TorchRL's arguments.

    Raises:
        Exception: a worker has raised it; its cause names the worker and the place.
        WorkerDied: a worker has exited without an error.
    """

    __signature__ = signature_of(torchrl.collectors.MultiCollector)

    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        num_workers: int | None = None,
        collector_class: Any = None,
        init_fn: Any = None,
        weight_sync_schemes: dict[str, Any] | None = None,
        cat_results: Any = None,
        **kwargs: Any,
    ) -> None:
        self.replay_write_mode = kwargs.get("replay_write_mode")
        kwargs = written_as_asked(torchrl.collectors.MultiCollector, kwargs)
        self._errors = ErrorFolder()
        several = isinstance(create_env_fn, Sequence) and not isinstance(
            create_env_fn, (str, bytes)
        )
        if num_workers is None and not several:
            num_workers = 1
        self._progress = SharedProgress(
            len(create_env_fn) if several else (num_workers or 1)
        )
        envs = (
            [_function(entry) for entry in create_env_fn]
            if several
            else _function(create_env_fn)
        )
        made_by = Collector if collector_class is None else collector_class
        with trimmed:
            try:
                super().__init__(
                    envs,
                    policy,
                    num_workers=num_workers,
                    collector_class=WatchedClass(
                        made_by, self._errors.path, self._progress
                    ),
                    init_fn=WatchedFunction(with_ids(init_fn), self._errors.path),
                    cat_results=(
                        0
                        if isinstance(cat_results, str) and cat_results == "cat"
                        else cat_results
                    ),
                    weight_sync_schemes=_for_meta_policies(
                        weight_sync_schemes, policy, kwargs.get("policy_factory")
                    ),
                    **kwargs,
                )
            except Exception as error:
                failure = self._failure(error)
                if hasattr(
                    self, "procs"
                ):  # TorchRL leaves them running after some errors
                    self.shutdown(raise_on_error=False)
                self._errors.close()
                if failure is not None:
                    raise_original(failure)
                raise
        self.collector_class = made_by
        self._is_made = True
        # else Python's exit and the workers wait for each other
        atexit.register(_shutdown, weakref.ref(self))

    def shutdown(
        self,
        timeout: float | None = None,
        close_env: bool = True,
        raise_on_error: bool = True,
    ) -> None:
        """End the workers as TorchRL does, and the weight sync schemes, which can otherwise hang at
        Python's exit.

        Args:
            timeout: seconds until workers are killed. None: 10.
            close_env: True: the environments end with their workers.
            raise_on_error: after ``start()``, raise the error of a worker, if there is one.

        Raises:
            Exception: a worker has raised it since ``start()``.
            WorkerDied: a worker has exited without an error since ``start()``.
        """
        failure = self._end()
        super().shutdown(
            timeout=timeout, close_env=close_env, raise_on_error=raise_on_error
        )
        for scheme in (getattr(self, "_weight_sync_schemes", None) or {}).values():
            scheme.shutdown()
        if failure is not None and raise_on_error:
            with trimmed:
                raise_original(failure)


class MultiSyncCollector(MultiCollector, torchrl.collectors.MultiSyncCollector):  # type: ignore[misc]
    """TorchRL 0.14's ``MultiSyncCollector``; see ``MultiCollector``."""


class MultiAsyncCollector(MultiCollector, torchrl.collectors.MultiAsyncCollector):  # type: ignore[misc]
    """TorchRL 0.14's ``MultiAsyncCollector``; see ``MultiCollector``."""


class AsyncCollector(MultiAsyncCollector, torchrl.collectors.AsyncCollector):  # type: ignore[misc]
    """TorchRL 0.14's ``AsyncCollector``; see ``MultiCollector``."""

    __signature__ = signature_of(torchrl.collectors.AsyncCollector)


class Evaluator(torchrl.collectors.Evaluator):  # type: ignore[misc]
    """TorchRL 0.14's ``Evaluator``, which documents the arguments; collects with ``Collector`` of
    this package.

    An error of the environment or the policy is raised by ``evaluate``, and after ``trigger_eval``
    by ``wait`` and ``poll``.

    Args:
        *args: TorchRL's arguments.
        collector_cls: another class, or the name of a class in
            ``muster.compat.torchrl.collectors``.
        collector_kwargs: TorchRL's argument.
        **options: TorchRL's arguments.
    """

    __signature__ = inspect.signature(torchrl.collectors.Evaluator)

    def __init__(
        self,
        *args: Any,
        collector_cls: Any = None,
        collector_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if isinstance(collector_cls, str):
            from muster.compat.torchrl import collectors

            collector_cls = getattr(collectors, collector_cls)
        self._errors = ErrorFolder()
        self._in_process = (
            options.get("backend") == "process"
            or options.get("weight_sync_schemes") is not None
        )
        given = dict(collector_kwargs or {})
        if self._in_process:
            given["collector_class"] = WatchedClass(
                given.get("collector_class") or Collector, self._errors.path
            )
        if self._in_process or options.get("backend") == "ray":
            options["init_fn"] = with_ids(options.get("init_fn"))
        chosen = WatchedClass(collector_cls or Collector, self._errors.path)
        super().__init__(*args, collector_cls=chosen, collector_kwargs=given, **options)

    def evaluate(self, *args: Any, **options: Any) -> dict[str, Any]:
        """Evaluate as TorchRL.

        An error of the environment or the policy is raised as it was raised.
        """
        try:
            return dict(super().evaluate(*args, **options))
        except Exception:
            if self._in_process:
                self._raise_reported()
            raise

    def poll(self, timeout: float = 0) -> dict[str, Any] | None:
        """Return a result, or None as TorchRL. Raises the error that has ended the evaluation."""
        result: dict[str, Any] | None = super().poll(timeout)
        if result is None:
            self._raise_reported()
        return result

    def wait(self, timeout: float | None = None) -> dict[str, Any] | None:
        """Wait for a result as TorchRL. Raises the error that has ended the evaluation."""
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            rest = (
                LOOK_S
                if until is None
                else max(0.0, min(LOOK_S, until - time.monotonic()))
            )
            result: dict[str, Any] | None = super().wait(rest)
            if result is not None:
                return result
            self._raise_reported()
            if until is not None and time.monotonic() >= until:
                return None

    def shutdown(self, timeout: float = 5.0) -> None:
        """End the evaluation as TorchRL."""
        super().shutdown(timeout)
        self._errors.close()

    def _raise_reported(self) -> None:
        reported = self._errors.first()
        if reported is not None:
            with trimmed:
                raise_original(reported[1])


def _for_meta_policies(
    schemes: dict[str, Any] | None, policy: Any, factory: Any
) -> dict[str, Any] | None:
    """Return the weight sync schemes with one for a policy that TorchRL sends without its weights.

    It does so with every module, as soon as there is a scheme, also if that is for another model or
    sends nothing.
    """
    if not schemes:
        return schemes
    sending = {
        model_id: (
            NoWeightSyncScheme()
            if type(scheme) is torchrl.weight_update.NoWeightSyncScheme
            else scheme
        )
        for model_id, scheme in schemes.items()
    }
    if isinstance(policy, torch.nn.Module) and factory is None:
        sending.setdefault("policy", torchrl.weight_update.SharedMemWeightSyncScheme())
    return sending


def _function(entry: Any) -> Any:
    """Return an entry of ``create_env_fn`` that TorchRL's workers can call, or an environment of
    TorchRL's.

    Ids and environments of other libraries are returned by a function.
    """
    return (
        entry
        if callable(entry) or isinstance(entry, EnvBase)
        else partial(_given, entry)
    )


def _given(env: Any, **_kwargs: Any) -> Any:
    """Return ``env``.

    The collector of the worker passes on the keyword arguments, if it is an id.
    """
    return env


def _shutdown(reference: weakref.ref[MultiCollector]) -> None:
    if (collector := reference()) is not None:
        collector.shutdown(raise_on_error=False)


def made_elsewhere(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the collector for ``Collector(backend=..., num_collectors=...)``; None: collect in
    this process.
    """
    given = {"backend": None, "num_collectors": None, **kwargs}
    count = given["num_collectors"]
    backend = given["backend"]
    if count is not None and (isinstance(count, bool) or not isinstance(count, int)):
        raise TypeError("num_collectors must be a positive integer.")
    if count is not None and count < 1:
        raise ValueError("num_collectors must be a positive integer.")
    given_by = ""
    if backend is not None:
        backend = normalize_service_backend(backend)
    elif (backend := _get_service_backend()) is not None:
        given_by = " An enclosing torchrl.service_backend context has chosen it: give backend=."
    else:
        backend = "direct" if count is None else "process"
    if backend not in _DISPATCH._BACKENDS:
        known = sorted(_DISPATCH._BACKENDS)
        raise ValueError(
            f"Collector does not support backend={backend!r}. Expected one of {known}.{given_by}"
        )
    sync, extra = given.get("sync"), given.get("backend_options") or {}
    if backend == "direct":
        if count not in (None, 1):
            raise ValueError("backend='direct' supports at most one collector.")
        if sync is not None:
            raise ValueError("sync is only valid for non-direct collectors.")
        if extra:
            raise ValueError(
                "backend_options are only valid for non-direct collectors."
            )
        return None
    if len(args) > 2:
        raise TypeError(
            "Collector accepts at most create_env_fn and policy positionally."
        )
    if sync is not None and not isinstance(sync, bool):
        raise TypeError("sync must be a boolean or None.")
    options = dict(zip(("create_env_fn", "policy"), args, strict=False))
    # a copy, changed below
    options |= {name: value for name, value in kwargs.items() if name not in SELECTORS}
    if reserved := _DISPATCH._RESERVED_OPTIONS & extra.keys():
        raise ValueError(
            f"backend_options contains reserved selector keys: {sorted(reserved)}."
        )
    if twice := extra.keys() & options.keys():
        raise ValueError(
            f"Backend options duplicate top-level collector arguments: {sorted(twice)}."
        )
    _, _, count = _DISPATCH._normalize_env_fns((), options, count)
    envs = [options.pop("create_env_fn")] if "create_env_fn" in options else []
    cls: Any = MultiCollector
    if backend == "process":
        _DISPATCH._drop_inapplicable_defaults(
            torchrl.collectors.MultiCollector, options
        )
        return cls(*envs, sync=bool(sync), **options, **extra)
    from muster.compat.torchrl.collectors import distributed

    cls = distributed.DistributedCollector
    if backend == "ray":
        cls = distributed.RayCollector
        extra = {"num_collectors": count, **extra}
    elif backend == "rpc":
        cls = distributed.RPCCollector
    elif backend == "submitit":
        extra = {"launcher": "submitit", **extra}
        if extra["launcher"] != "submitit":
            raise ValueError("backend='submitit' requires launcher='submitit'.")
    _DISPATCH._drop_inapplicable_defaults(cls, options)
    return cls(*envs, sync=bool(sync), **options, **extra)
