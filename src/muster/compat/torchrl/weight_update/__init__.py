"""TorchRL's weight sync schemes (``torchrl.weight_update``) over Muster's transports.

TorchRL is not needed.

As an option of a collector, a scheme selects a transport. Without a collector, it connects a sender
and its receivers.
"""

from __future__ import annotations

import importlib
import itertools
import os
import threading
import warnings
import weakref
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import safetensors.torch
import torch

from muster.compat.torchrl.scheme_ends import ReceivingEnd, SendingEnd
from muster.compat.torchrl.weight_names import by_name, flattened, unsaved_buffers
from muster.errors import BadOption, CollectorClosed
from muster.weights.names import (
    Weights,
    check_finite,
    copy_tensor,
    named_weights,
    overwrite,
)

__all__ = [
    "DistributedWeightSyncScheme",
    "MultiProcessWeightSyncScheme",
    "NoWeightSyncScheme",
    "RPCWeightSyncScheme",
    "RayWeightSyncScheme",
    "SharedMemWeightSyncScheme",
    "WeightSyncScheme",
]
_OF_TORCHRL = {  # parts of TorchRL's own schemes
    *(
        "DistributedTransport",
        "MPTransport",
        "RPCTransport",
        "RayTransport",
        "SharedMemTransport",
    ),
    *(
        "InitialSyncTransport",
        "RayModuleTransformScheme",
        "TransportBackend",
        "WeightStrategy",
        "WeightSyncBackend",
    ),
}
_ALIASES = {"direct": "none", "thread": "shared", "multiprocessing": "process"}


def __getattr__(name: str) -> Any:
    if name not in _OF_TORCHRL:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("torchrl.weight_update"), name)


class WeightSyncScheme:
    """Sends the weights of one model.

    A collector takes one scheme per model: ``weight_sync_schemes={"policy":
    SharedMemoryWeightSyncScheme()}``. Without a collector, one process sends, and others on this
    machine receive::

        scheme.init_on_sender(model=policy, num_workers=2)  # in the training process
        scheme.connect()                                    # workers get copies of `scheme`: pickled or forked
        ...
        scheme.init_on_receiver(model=policy, worker_idx=1)  # in a worker
        scheme.connect()                                     # the model now has the first weights
        ...
        scheme.send()     # in the training process, to publish new weights
        scheme.receive()  # in the worker, between two rollouts

    A collector in the worker receives automatically, with ``weight_recv_schemes={"policy":
    scheme}``: new weights act from its next rollout on. Versions do not queue up: the latest wins.

    Args:
        strategy: "tensordict" or "state_dict"; both have the same effect.
        sync: ``send`` waits until all connected receivers have taken the weights.
        deadline_s: timeout of that wait, and of a receiver's wait for the first weights, in
            seconds.
        per_worker_weights: no effect (an argument of TorchRL); every scheme can send different
            weights to receivers.

    Attributes:
        model_id: id of the model; "policy", unless it was initialized with another one.
        version: version of the weights that were last sent or taken. 0: the first weights. None:
            none yet.
        context: collector of a receiver, which gets the weights; None: there is none.
        model: model of a receiver, which gets the weights.
        worker_idx: number of the receiver.
    """

    backend: ClassVar[str] = ""
    _by_backend: ClassVar[dict[str, type[WeightSyncScheme]]] = {}

    model_id = "policy"
    version: int | str | None = None
    model: Any = None
    worker_idx: int | None = None
    initialized_on_receiver = synchronized_on_receiver = synchronized_on_sender = False
    _context: weakref.ref[Any] | None = None
    _source: Any = None  # the sender's model
    # names of non-persistent buffers: in no state dict, and never published
    _constants: frozenset[str] = frozenset()
    # tensors that only a receiver needs whose module has no memory yet
    _unsent: bytes | None = None
    _path: str | None = None
    _pid = 0
    _sender: SendingEnd | None = None
    _receiver: ReceivingEnd | None = None
    _following: threading.Thread | None = None

    def __init__(
        self,
        strategy: str = "tensordict",
        sync: bool = True,
        per_worker_weights: bool = False,
        deadline_s: float = 10.0,
    ) -> None:
        del per_worker_weights
        if strategy not in ("tensordict", "state_dict"):
            raise BadOption(
                f"strategy={strategy!r}: expected 'tensordict' or 'state_dict'"
            )
        self.strategy = strategy
        self.sync = sync
        self.deadline_s = deadline_s
        self._lock = threading.Lock()

    def __init_subclass__(cls) -> None:
        if "backend" in vars(cls):
            cls._by_backend.setdefault(cls.backend, cls)

    @classmethod
    def from_backend(cls, backend: str, **options: Any) -> WeightSyncScheme:
        """Return the scheme for "none", "shared", "process", "distributed", "rpc" or "ray", made
        with ``options``.
        """
        name = _ALIASES.get(backend, backend)
        if name not in cls._by_backend:
            raise BadOption(
                f"Unsupported weight-sync backend={backend!r}: expected one of"
                f" {', '.join([*cls._by_backend, *_ALIASES])}"
            )
        return cls._by_backend[name](**options)

    # --- sender -----------------------------------------------------------------------------------

    def init_on_sender(
        self,
        *,
        model_id: str = "policy",
        context: Any = None,
        model: Any = None,
        weights: Any = None,
        num_workers: int | None = None,
        devices: Collection[Any] | None = None,
        params_map: Mapping[int, Any] | None = None,
        ctx: Any = None,
    ) -> None:
        """Make this object the sender.

        Args:
            model_id: id of the model.
            context: object with ``get_model(model_id)`` and ``num_workers``, used if these
                arguments are missing. If it has no policy, its ``policy_factory`` (one function per
                worker) makes the first weights.
            model: model whose weights are sent.
            weights: TensorDict or dict with the first weights, in place of ``model``.
            num_workers: number of receivers, which are numbered from 0.
            devices: one device per receiver, in place of ``num_workers``. Receivers may use other
                devices.
            params_map: the weights to send by number of the receiver, in place of ``model`` and
                ``num_workers``.
            ctx: no effect (the ``multiprocessing`` context in TorchRL).

        Raises:
            BadOption: the scheme is initialized already, or arguments are missing or contradict
                each other.
            BadWeights: ``model`` or ``weights`` has no weights that can be sent.
        """
        del ctx
        if self._sender is not None or self.initialized_on_receiver:
            raise BadOption(
                f"{self} is initialized already: one object is one end, for one model"
            )
        if context is not None and model is None and weights is None:
            model, weights = _of_context(context, model_id)
        if params_map is not None and model is None:
            model = params_map
            num_workers = len(params_map)
        if (model is None) == (weights is None):
            raise BadOption(
                "init_on_sender needs the first weights: give a model, weights=, params_map= or a"
                " context, and one only"
            )
        if not self.backend:
            raise BadOption(
                f"{self} cannot send by itself: take a subclass of WeightSyncScheme"
            )
        count = _count(num_workers, devices, context)
        given = model if weights is None else weights
        modules = [
            each
            for each in (given.values() if _differ(given) else [given])
            if isinstance(each, torch.nn.Module)
        ]
        buffers = [unsaved_buffers(module) for module in modules]
        self._constants = frozenset(name for each in buffers for name in each)
        # a worker that makes its policy does not need them
        self._unsent = _packed(buffers[0]) if buffers else None
        self._source = model
        first = self._by_worker(given)
        self._sender = SendingEnd(next(iter(first.values())), count, self.deadline_s)
        for worker, own in first.items():
            if worker is not None:
                self._sender.publish(own, 0, [worker])
        self.model_id = model_id
        self._path, self._pid, self.version = self._sender.path, os.getpid(), 0

    def send(self, weights: Any = None, worker_ids: Any = None) -> None:
        """Publish weights to receivers.

        Args:
            weights: a module, TensorDict or dict; or a dict of these by number of the receiver.
                None: the model's.
            worker_ids: one number of a receiver, or several. None: all receivers.

        Raises:
            BadOption: the sender is not initialized or not connected, or a receiver does not exist.
            BadWeights: the weights do not fit, or are not finite. Nothing was sent.
            CollectorTimeout: with ``sync``, a receiver has not taken the weights in time.
        """
        if self._sender is None or not self.synchronized_on_sender:
            raise BadOption(
                "send() is for senders: call init_on_sender(...) and connect() before"
            )
        self._publish(self._sender, weights, worker_ids)

    # --- receiver ---------------------------------------------------------------------------------

    def init_on_receiver(
        self,
        *,
        model_id: str = "policy",
        context: Any = None,
        model: Any = None,
        worker_idx: int | None = None,
    ) -> None:
        """Make this copy of the sender's object a receiver.

        Args:
            model_id: id of the model.
            context: object with ``get_model(model_id)``; its ``update_policy_weights_`` is called
                after new weights.
            model: module, or TensorDict or dict of tensors, into which weights are written. Memory
                is allocated for a module on the device "meta", as TorchRL sends it to workers.
            worker_idx: number of this receiver. None: the context's ``worker_idx``.

        Raises:
            BadOption: this is not a copy of an initialized sender, or arguments are missing.
        """
        if self._sender is not None and os.getpid() == self._pid:
            raise BadOption(
                "this object is the sender: give the receiver a copy, copy.copy(scheme) or its"
                " pickle"
            )
        if self._path is None:
            raise BadOption(
                f"there is no sender for {self}: call init_on_sender(...), then give receivers"
                " copies"
            )
        told = self.__getstate__()
        self.__dict__.clear()  # a fork drops the objects of its parent
        self.__setstate__(told)
        self.model_id = model_id
        self.context = context
        self.model = self.model if model is None else model
        if self.model is None:
            raise BadOption(
                "init_on_receiver needs what gets the weights: give a model or a context"
            )
        _materialise(self.model, self._unsent)
        self.worker_idx = (
            getattr(context, "worker_idx", None) if worker_idx is None else worker_idx
        )
        self.initialized_on_receiver = True

    def receive(self, timeout: float | None = 0.0) -> Weights | None:
        """Copy the newest weights into the model, unless they were taken before.

        Call this between rollouts.

        Args:
            timeout: time to wait for new weights, in seconds. None: ``deadline_s``. With a
                collector this never waits.

        Returns:
            the model's tensors by name; None if there are no new weights.

        Raises:
            BadOption: the receiver is not initialized or not connected.
            BadWeights: the weights do not fit the model. Nothing was changed.
            CollectorClosed: there is nothing to wait for, because the sender has disconnected.
        """
        end = self._receiver
        if end is None:
            raise BadOption(
                "receive() is for receivers: call init_on_receiver(...) and connect() before"
            )
        if self._following is not None:  # the thread reads the notes
            return self._take(end)
        end.hear(0.0)
        taken, wait_s = self._take(end), self.deadline_s if timeout is None else timeout
        if taken is None and wait_s > 0:
            taken = self._take(end) if end.hear(wait_s) else None
            if taken is None and end.alone:
                raise CollectorClosed(
                    f"the sender of {self.model_id!r} is gone: there will be no more weights"
                )
        return taken

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Copy weights (a module, TensorDict or dict) into the model's tensors, which are never
        replaced.

        Raises:
            BadOption: there is no model, or ``inplace=False``.
            BadWeights: the weights do not fit, or are not finite. Nothing was changed.
        """
        if self.model is None or not inplace:
            raise BadOption(
                "apply_weights() writes into the model of a receiver: call init_on_receiver(...)"
                " before"
            )
        overwrite(
            named_weights(flattened(self.model)), named_weights(flattened(weights))
        )

    # --- both -------------------------------------------------------------------------------------

    def connect(self, *, worker_idx: int | None = None, weights: Any = None) -> None:
        """Sender: publish ``weights``, if given, and accept receivers.

        Receiver: wait for the first weights.

        Raises:
            BadOption: the scheme is not initialized, or the sender has no receiver with this
                number.
            CollectorClosed: the sender is closed, or its process has ended.
            CollectorTimeout: the sender has not called ``connect`` within ``deadline_s``.
        """
        if self._sender is not None:
            if weights is not None:
                self._publish(self._sender, weights, None)
            self._sender.serve()
            self.synchronized_on_sender = True
            return
        self.worker_idx = self.worker_idx if worker_idx is None else worker_idx
        if (
            not self.initialized_on_receiver
            or self._path is None
            or self.worker_idx is None
        ):
            raise BadOption(
                "connect() comes after init_on_sender(...), or init_on_receiver(...) with a"
                " worker_idx"
            )
        end = ReceivingEnd(
            self._path, self.worker_idx, deadline_s=self.deadline_s, answers=self.sync
        )
        try:
            self._take(
                end, announce=False
            )  # the collector reads the first weights from the model
        except BaseException:
            end.close()
            raise
        self._receiver = end
        self.synchronized_on_receiver = True
        self._follow_for_context()

    def shutdown(self) -> None:
        """Close this end; receivers keep their weights. May be called again."""
        if self._sender is not None:
            self._sender.close()
        end, self._receiver = self._receiver, None
        if end is not None:
            end.hang_up()
            if (
                self._following is not None
                and self._following is not threading.current_thread()
            ):
                self._following.join(self.deadline_s)
            end.close()

    @property
    def initialized_on_sender(self) -> bool:
        return self._sender is not None

    @property
    def context(self) -> Any:
        return None if self._context is None else self._context()

    @context.setter
    def context(self, context: Any) -> None:
        self._context = None if context is None else weakref.ref(context)
        self.model = None if context is None else context.get_model(self.model_id)
        self._follow_for_context()

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes that a receiver needs."""
        names = ("strategy", "sync", "deadline_s", "model_id", "_path", "_unsent")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    # --- parts ------------------------------------------------------------------------------------

    def _follow_for_context(self) -> None:
        """Start a thread that receives, once this is connected and has a context."""
        if (
            self._receiver is not None
            and self.context is not None
            and self._following is None
        ):
            args = (self._receiver, weakref.ref(self))
            self._following = threading.Thread(
                target=_follow, args=args, name="muster-weights", daemon=True
            )
            self._following.start()

    def _publish(self, sender: SendingEnd, weights: Any, worker_ids: Any) -> None:
        given = self._source if weights is None else weights
        if given is None:
            raise BadOption(
                "send() without weights sends the model's, and init_on_sender got none: give"
                " weights"
            )
        new = self._by_worker(given)
        several = worker_ids is None or isinstance(worker_ids, Collection)
        receivers = worker_ids if several else [worker_ids]
        with self._lock:
            assert isinstance(self.version, int)
            version = self.version + 1
            for worker, own in new.items():
                if worker is None or receivers is None or worker in receivers:
                    sender.publish(
                        own, version, receivers if worker is None else [worker]
                    )
            self.version = version
            if self.sync:
                sender.wait(receivers)

    def _by_worker(self, given: Any) -> dict[int | None, Weights]:
        """Return checked weights by number of the receiver; None stands for all receivers."""
        named = {}
        for worker, own in (given if _differ(given) else {None: given}).items():
            named[worker] = {
                name: tensor
                for name, tensor in by_name(own).items()
                if name not in self._constants
            }
            check_finite(named[worker])
        return named

    def _take(self, end: ReceivingEnd, *, announce: bool = True) -> Weights | None:
        with self._lock:
            context = self.context
            # TorchRL's workers set `model` to the acting policy, which may change between rollouts
            # only.
            model = self.model if context is None else context.get_model(self.model_id)
            weights = named_weights(flattened(model))
            version = end.take(weights)
            if version is None:
                return None
            self.version = version
            if context is not None and announce:
                context.update_policy_weights_(model, model_id=self.model_id)
            end.answer(version)
            return weights


class SharedMemoryWeightSyncScheme(WeightSyncScheme):
    """Sends weights through shared memory."""

    backend = "shared"


SharedMemWeightSyncScheme = SharedMemoryWeightSyncScheme


class MultiProcessWeightSyncScheme(WeightSyncScheme):
    """The same: processes of one machine share memory."""

    backend = "process"


class NoWeightSyncScheme(WeightSyncScheme):
    """Sends nothing: receivers keep their weights.

    TorchRL's workers start with those that the policy has then.
    """

    backend = "none"
    _sends = False

    def init_on_sender(
        self,
        *,
        model_id: str = "policy",
        context: Any = None,
        model: Any = None,
        **_: Any,
    ) -> None:
        """Make this object the sender; see ``WeightSyncScheme.init_on_sender``."""
        if context is not None and model is None:
            model = (
                getattr(context, "policy", None)
                if model_id == "policy"
                else context.get_model(model_id)
            )
        if isinstance(model, torch.nn.Module):
            self._unsent = _packed(named_weights(model) | unsaved_buffers(model))
        self.model_id = model_id
        self._sends = True

    def init_on_receiver(
        self, *, model_id: str = "policy", model: Any = None, **_: Any
    ) -> None:
        """Make this object a receiver, whose module on the device "meta" gets the weights of
        ``init_on_sender``.
        """
        _materialise(model, self._unsent)
        self.model_id = model_id
        self.initialized_on_receiver = True

    def connect(self, **_: Any) -> None:
        """Do not wait: no weights are sent."""
        self.synchronized_on_receiver = self.initialized_on_receiver
        self.synchronized_on_sender = self.initialized_on_sender

    def send(self, weights: Any = None, worker_ids: Any = None) -> None:
        """Send nothing."""

    def receive(self, timeout: float | None = 0.0) -> None:
        """Return None: there are never new weights."""

    @property
    def initialized_on_sender(self) -> bool:
        return self._sends


class _OfNodes(WeightSyncScheme):
    """An option of a collector with nodes, whose links carry the weights: one copy per version for
    all nodes.

    Args:
        strategy: see ``WeightSyncScheme``.
        backend: no effect (an argument of TorchRL); weights use the same connection as the
            collector's data.
        sync: no effect (an argument of TorchRL); publishing never waits. Workers use new weights in
            the next rollout.
    """

    collector: ClassVar[str] = ""

    def __init__(
        self, strategy: str = "tensordict", backend: str = "gloo", sync: bool = True
    ) -> None:
        super().__init__(strategy, sync=sync)
        del backend

    def init_on_sender(self, **_: Any) -> None:
        raise BadOption(
            f"{type(self).__name__} is an option of {self.collector}, whose own links to its nodes"
            f" carry the weights: {self.collector}(..., weight_sync_schemes={{{self.model_id!r}:"
            f" {self}}}). Without a collector, SharedMemoryWeightSyncScheme and"
            " MultiProcessWeightSyncScheme send to processes of one machine."
        )

    init_on_receiver = init_on_sender


class DistributedWeightSyncScheme(_OfNodes):
    """The default of ``DistributedCollector``: sends weights over its links to the nodes."""

    backend = "distributed"
    collector = "DistributedCollector"

    def __init__(self, backend: str = "gloo", sync: bool = True) -> None:
        super().__init__(backend=backend, sync=sync)


class RPCWeightSyncScheme(_OfNodes):
    """The default of ``RPCCollector``: sends weights over its links to the nodes."""

    backend = "rpc"
    collector = "RPCCollector"


class RayWeightSyncScheme(_OfNodes):
    """The default of ``RayCollector``: sends weights over its links to the nodes."""

    backend = "ray"
    collector = "RayCollector"


def _follow(end: ReceivingEnd, receiver: weakref.ref[WeightSyncScheme]) -> None:
    """Take new weights in a thread, until either end is closed."""
    while end.hear(None):
        scheme = receiver()
        if scheme is None:
            break
        try:
            scheme._take(end)
        except CollectorClosed:
            break
        except Exception as error:  # noqa: BLE001 - every error of the collector is reported to its user
            warnings.warn(
                f"weights for {scheme.model_id!r} came and were not taken: {error}",
                RuntimeWarning,
                1,
            )
            end.answer(
                scheme.version or 0
            )  # the sender must not wait for refused weights
        del scheme


def _of_context(context: Any, model_id: str) -> tuple[Any, Any]:
    """Return the context's model and None; or None and first weights, if its workers make the
    policy.
    """
    factories = getattr(context, "policy_factory", None)
    if (
        model_id != "policy"
        or not isinstance(factories, list)
        or getattr(context, "policy", None) is not None
    ):
        return context.get_model(model_id), None
    if all(factory is factories[0] for factory in factories):
        return None, factories[0]()
    return None, {worker: factory() for worker, factory in enumerate(factories)}


def _differ(given: Any) -> bool:
    """Return whether these are weights by number of the receiver."""
    return (
        type(given) is dict
        and bool(given)
        and all(isinstance(key, int) for key in given)
    )


def _materialise(model: Any, packed: bytes | None) -> None:
    """Allocate memory for a module on the device "meta", as TorchRL sends it to workers, and fill
    in ``packed``.
    """
    if not isinstance(model, torch.nn.Module):
        return
    if not any(
        tensor.is_meta
        for tensor in itertools.chain(model.parameters(), model.buffers())
    ):
        return
    model.to_empty(device="cpu")
    tensors = named_weights(model) | unsaved_buffers(model)
    given = {} if packed is None else safetensors.torch.load(packed)
    for name, tensor in given.items():
        copy_tensor(tensors[name], tensor)


def _packed(tensors: Weights) -> bytes | None:
    """Return tensors as bytes: pickled as tensors, they would be moved to shared memory."""
    copies = {
        name: tensor.cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    return safetensors.torch.save(copies) if copies else None


def _count(
    num_workers: int | None, devices: Collection[Any] | None, context: Any
) -> int:
    counts = [
        n
        for n in (num_workers, None if devices is None else len(devices))
        if n is not None
    ]
    count = counts[0] if counts else getattr(context, "num_workers", 1)
    if (
        len(set(counts)) > 1
        or isinstance(count, bool)
        or not isinstance(count, int)
        or count < 1
    ):
        raise BadOption(
            f"num_workers={num_workers!r}, devices={devices!r}: expected the number of receivers,"
            " once"
        )
    return count
