"""TorchRL's weight sync schemes (``torchrl.weight_update``) over Muster's transports; needs no TorchRL.

To a collector a scheme is an option that names a transport. Without one it is a pair of a sender and its receivers.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Collection
from typing import Any, ClassVar

import torch

from muster.compat.torchrl.scheme_ends import ReceivingEnd, SendingEnd
from muster.errors import BadOption, CollectorClosed
from muster.weights.names import Weights, check_finite, named_weights, overwrite
from muster.weights.pipe import Pipe
from muster.weights.shared_memory import SharedMemory
from muster.weights.transport import Transport

__all__ = [
    "DistributedWeightSyncScheme",
    "MultiProcessWeightSyncScheme",
    "NoWeightSyncScheme",
    "RPCWeightSyncScheme",
    "RayWeightSyncScheme",
    "SharedMemWeightSyncScheme",
    "WeightSyncScheme",
]
_ALIASES = {"direct": "none", "thread": "shared", "multiprocessing": "process"}


class WeightSyncScheme:
    """Sends the weights of one model.

    A collector is given one for each model: ``weight_sync_schemes={"policy": SharedMemoryWeightSyncScheme()}``. Without
    a collector, one process sends, and others on this machine receive::

        scheme.init_on_sender(model=policy, num_workers=2)  # where it is trained
        scheme.connect()                                    # copies of `scheme` go to the workers: pickled or forked
        ...
        scheme.init_on_receiver(model=policy, worker_idx=1)  # in a worker
        scheme.connect()                                     # the first weights are in place
        ...
        scheme.send()     # the sender, whenever there is something new
        scheme.receive()  # the worker, between two rollouts

    A collector in the worker receives by itself, ``weight_recv_schemes={"policy": scheme}``; its batches have the new
    weights from the next rollout on. Nothing queues up: the latest wins.

    Args:
        strategy: "tensordict" or "state_dict"; both mean the same here.
        sync: ``send`` waits until all receivers that are connected have taken the weights.
        deadline_s: for that, and for a receiver to get the first weights.

    Attributes:
        model_id: "policy", or what it was initialized with.
        version: number of the weights that were sent or taken last; 0 for the first, None before.
        context: of a receiver: the collector that it hands weights to, if there is one.
        model: of a receiver: gets the weights.
        worker_idx: number of the receiver.
    """

    backend: ClassVar[str] = ""
    transport: ClassVar[Transport | None] = None
    _by_backend: ClassVar[dict[str, type[WeightSyncScheme]]] = {}

    model_id = "policy"
    version: int | str | None = None
    model: Any = None
    worker_idx: int | None = None
    initialized_on_receiver = synchronized_on_receiver = synchronized_on_sender = False
    _context: weakref.ref[Any] | None = None
    _source: Any = None  # the sender's model
    _path: str | None = None
    _pid = 0
    _sender: SendingEnd | None = None
    _receiver: ReceivingEnd | None = None
    _following: threading.Thread | None = None

    def __init__(self, strategy: str = "tensordict", *, sync: bool = True, deadline_s: float = 10.0) -> None:
        if strategy not in ("tensordict", "state_dict"):
            raise BadOption(f"strategy={strategy!r}: expected 'tensordict' or 'state_dict'")
        self.strategy, self.sync, self.deadline_s = strategy, sync, deadline_s
        self._lock = threading.Lock()

    def __init_subclass__(cls) -> None:
        if "backend" in vars(cls):
            cls._by_backend.setdefault(cls.backend, cls)

    @classmethod
    def from_backend(cls, backend: str, **options: Any) -> WeightSyncScheme:
        """The scheme for "none", "shared", "process", "distributed", "rpc" or "ray"; ``options`` are its own."""
        name = _ALIASES.get(backend, backend)
        if name not in cls._by_backend:
            raise BadOption(f"backend={backend!r}: expected one of {', '.join([*cls._by_backend, *_ALIASES])}")
        return cls._by_backend[name](**options)

    # --- where weights are trained ------------------------------------------------------------------

    def init_on_sender(
        self,
        *,
        model_id: str = "policy",
        context: Any = None,
        model: Any = None,
        weights: Any = None,
        num_workers: int | None = None,
        devices: Collection[Any] | None = None,
        ctx: Any = None,
    ) -> None:
        """Make this the sending end.

        Args:
            model_id: for ``context``.
            context: what has the model, ``get_model(model_id)``, and ``num_workers``.
            model: whose weights are sent; or
            weights: a TensorDict or dict with the first ones.
            num_workers: receivers, numbered from 0.
            devices: one for each receiver, instead of their number. (Weights come to any device.)
            ctx: TorchRL's, of ``multiprocessing``; not needed here.

        Raises:
            BadOption: contradicting or missing arguments.
            BadWeights: what was given has no weights that can be sent.
        """
        del ctx
        if self._sender is not None or self.initialized_on_receiver:
            raise BadOption(f"{self} is initialized already: one object is one end, for one model")
        if context is not None and model is None and weights is None:
            model = context.get_model(model_id)
        if (model is None) == (weights is None):
            raise BadOption("init_on_sender needs the first weights: give a model, weights= or a context, and one only")
        if self.transport is None:
            raise BadOption(f"{self} cannot send by itself: take a subclass of WeightSyncScheme")
        count = _count(num_workers, devices, context)
        first = named_weights(model if weights is None else weights)
        check_finite(first)
        self._sender = SendingEnd(first, count, self.transport, self.deadline_s)
        self.model_id, self._source = model_id, model
        self._path, self._pid, self.version = self._sender.path, os.getpid(), 0

    def send(self, weights: Any = None, worker_ids: Any = None) -> None:
        """Let receivers have new weights.

        Args:
            weights: a module, TensorDict or dict; None sends those of the model.
            worker_ids: the receivers that get them, one or several; None is all.

        Raises:
            BadOption: not initialized, not connected, or no such receiver.
            BadWeights: they do not fit, or are not finite. Nothing was sent.
            CollectorTimeout: with ``sync``: a receiver has not taken them in time.
        """
        if self._sender is None or not self.synchronized_on_sender:
            raise BadOption("send() is for senders: call init_on_sender(...) and connect() before")
        self._publish(self._sender, weights, worker_ids)

    # --- where they act -----------------------------------------------------------------------------

    def init_on_receiver(
        self, *, model_id: str = "policy", context: Any = None, model: Any = None, worker_idx: int | None = None
    ) -> None:
        """Make this copy of the sender's object a receiving end.

        Args:
            model_id: for ``context``.
            context: what has the model, ``get_model(model_id)``, and is told by ``update_policy_weights_``.
            model: a module, or a TensorDict or dict of tensors, to write the weights to. A module without memory (of
                device "meta", as TorchRL sends it to workers) gets some.
            worker_idx: which of the sender's receivers this is; by default the context's.

        Raises:
            BadOption: this is no copy of an initialized sender, or arguments are missing.
        """
        if self._sender is not None and os.getpid() == self._pid:
            raise BadOption("this object is the sender: give the receiver a copy, copy.copy(scheme) or its pickle")
        if self._path is None:
            raise BadOption(f"there is no sender for {self}: call init_on_sender(...), then give receivers copies")
        told = self.__getstate__()
        self.__dict__.clear()  # a fork lets go of what is its parent's
        self.__setstate__(told)
        self.model_id, self.context = model_id, context
        self.model = self.model if model is None else model
        if self.model is None:
            raise BadOption("init_on_receiver needs what gets the weights: give a model or a context")
        if isinstance(self.model, torch.nn.Module) and any(parameter.is_meta for parameter in self.model.parameters()):
            self.model.to_empty(device="cpu")
        self.worker_idx = getattr(context, "worker_idx", None) if worker_idx is None else worker_idx
        self.initialized_on_receiver = True

    def receive(self, timeout: float | None = 0.0) -> Weights | None:
        """Take the newest weights, if there are any that were not taken before; between rollouts.

        Args:
            timeout: seconds to wait for them; None is ``deadline_s``. With a collector this never waits.

        Returns:
            the model's tensors by name; None if there was nothing new.

        Raises:
            BadOption: not initialized, or not connected.
            BadWeights: the model has others. Nothing was changed.
            CollectorClosed: it would have to wait, and the sender is gone.
        """
        end = self._receiver
        if end is None:
            raise BadOption("receive() is for receivers: call init_on_receiver(...) and connect() before")
        if self._following is not None:  # which hears for itself
            return self._take(end)
        end.hear(0.0)
        taken, wait_s = self._take(end), self.deadline_s if timeout is None else timeout
        if taken is None and wait_s > 0:
            taken = self._take(end) if end.hear(wait_s) else None
            if taken is None and end.alone:
                raise CollectorClosed(f"the sender of {self.model_id!r} is gone: there will be no more weights")
        return taken

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Copy weights of any kind into the model; they replace its values, never its tensors.

        Raises:
            BadOption: there is no model here, or ``inplace=False``.
            BadWeights: they do not fit, or are not finite. Nothing was changed.
        """
        if self.model is None or not inplace:
            raise BadOption("apply_weights() writes into the model of a receiver: call init_on_receiver(...) before")
        overwrite(named_weights(self.model), named_weights(weights))

    # --- both ---------------------------------------------------------------------------------------

    def connect(self, *, worker_idx: int | None = None, weights: Any = None) -> None:
        """Sender: let receivers in, with ``weights`` if they are given. Receiver: wait for the first weights.

        Raises:
            BadOption: not initialized, or the sender has no receiver with this number.
            CollectorClosed: the sender is gone.
            CollectorTimeout: it has not called ``connect`` within ``deadline_s``.
        """
        if self._sender is not None:
            if weights is not None:
                self._publish(self._sender, weights, None)
            self._sender.serve()
            self.synchronized_on_sender = True
            return
        self.worker_idx = self.worker_idx if worker_idx is None else worker_idx
        if not self.initialized_on_receiver or self._path is None or self.worker_idx is None:
            raise BadOption("connect() comes after init_on_sender(...), or init_on_receiver(...) with a worker_idx")
        end = ReceivingEnd(self._path, self.worker_idx, deadline_s=self.deadline_s, answers=self.sync)
        try:
            self._take(end, announce=False)  # the collector asks the model for the first
        except BaseException:
            end.close()
            raise
        self._receiver, self.synchronized_on_receiver = end, True
        self._follow_for_context()

    def shutdown(self) -> None:
        """Close this end; the other keeps what it has. May be called again."""
        if self._sender is not None:
            self._sender.close()
        end, self._receiver = self._receiver, None
        if end is not None:
            end.hang_up()
            if self._following is not None and self._following is not threading.current_thread():
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
        """What a receiver needs to know."""
        names = ("strategy", "sync", "deadline_s", "model_id", "_path")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    # --- parts --------------------------------------------------------------------------------------

    def _follow_for_context(self) -> None:
        """Receive in a thread, once there are both a sender and what to hand weights to."""
        if self._receiver is not None and self.context is not None and self._following is None:
            args = (self._receiver, weakref.ref(self))
            self._following = threading.Thread(target=_follow, args=args, name="muster-weights", daemon=True)
            self._following.start()

    def _publish(self, sender: SendingEnd, weights: Any, worker_ids: Any) -> None:
        given = self._source if weights is None else weights
        if given is None:
            raise BadOption("send() without weights sends the model's, and init_on_sender got none: give weights")
        new = named_weights(given)
        check_finite(new)
        several = worker_ids is None or isinstance(worker_ids, Collection)
        receivers = worker_ids if several else [worker_ids]
        with self._lock:
            assert isinstance(self.version, int)
            version = self.version + 1
            sender.publish(new, version, receivers)
            self.version = version
            if self.sync:
                sender.wait(receivers)

    def _take(self, end: ReceivingEnd, *, announce: bool = True) -> Weights | None:
        with self._lock:
            context = self.context
            # TorchRL's workers set `model` to what acts, which changes between rollouts only.
            model = self.model if context is None else context.get_model(self.model_id)
            weights = named_weights(model)
            version = end.take(weights)
            if version is None:
                return None
            self.version = version
            if context is not None and announce:
                context.update_policy_weights_(model, model_id=self.model_id)
            end.answer(version)
            return weights


class SharedMemoryWeightSyncScheme(WeightSyncScheme):
    """Through memory that processes share."""

    backend = "shared"
    transport = SharedMemory()


SharedMemWeightSyncScheme = SharedMemoryWeightSyncScheme


class MultiProcessWeightSyncScheme(WeightSyncScheme):
    """As messages from process to process."""

    backend = "process"
    transport = Pipe()


class NoWeightSyncScheme(WeightSyncScheme):
    """Sends nothing: receivers keep what they have."""

    backend = "none"
    _sends = False

    def init_on_sender(self, *, model_id: str = "policy", **_: Any) -> None:
        self.model_id, self._sends = model_id, True

    def init_on_receiver(self, *, model_id: str = "policy", **_: Any) -> None:
        self.model_id, self.initialized_on_receiver = model_id, True

    def connect(self, **_: Any) -> None:
        """Nothing to wait for."""
        self.synchronized_on_receiver = self.initialized_on_receiver
        self.synchronized_on_sender = self.initialized_on_sender

    def send(self, weights: Any = None, worker_ids: Any = None) -> None:
        """Nothing is sent."""

    def receive(self, timeout: float | None = 0.0) -> None:
        """There is never anything new."""

    @property
    def initialized_on_sender(self) -> bool:
        return self._sends


class _OfNodes(WeightSyncScheme):
    """An option of a collector with nodes, whose links carry the weights anyway: one copy per version for all nodes.

    Args:
        strategy: see ``WeightSyncScheme``.
        backend: accepted for TorchRL, without effect: weights use the same connection as the collector's data.
        sync: accepted for TorchRL, without effect: ``publish`` never waits. A worker uses them in its next rollout.
    """

    collector: ClassVar[str] = ""

    def __init__(self, strategy: str = "tensordict", backend: str = "gloo", sync: bool = True) -> None:
        super().__init__(strategy, sync=sync)
        del backend

    def init_on_sender(self, **_: Any) -> None:
        raise BadOption(
            f"{type(self).__name__} is an option of {self.collector}, whose own links to its nodes carry the weights: "
            f"{self.collector}(..., weight_sync_schemes={{{self.model_id!r}: {self}}}). Without a collector, "
            f"SharedMemoryWeightSyncScheme and MultiProcessWeightSyncScheme send to processes of one machine."
        )

    init_on_receiver = init_on_sender


class DistributedWeightSyncScheme(_OfNodes):
    """The default of ``DistributedCollector``: weights through its links to the nodes."""

    backend, collector = "distributed", "DistributedCollector"

    def __init__(self, backend: str = "gloo", sync: bool = True) -> None:
        super().__init__(backend=backend, sync=sync)


class RPCWeightSyncScheme(_OfNodes):
    """The default of ``RPCCollector``: weights through its links to the nodes."""

    backend, collector = "rpc", "RPCCollector"


class RayWeightSyncScheme(_OfNodes):
    """The default of ``RayCollector``: weights through its links to the nodes."""

    backend, collector = "ray", "RayCollector"


def _follow(end: ReceivingEnd, receiver: weakref.ref[WeightSyncScheme]) -> None:
    """Hand on what comes, in a thread, until either end is closed."""
    while end.hear(None):
        scheme = receiver()
        if scheme is None:
            break
        try:
            scheme._take(end)
        except CollectorClosed:
            break
        except Exception as error:  # noqa: BLE001 - whatever the collector says to these weights, its user has to know
            warnings.warn(f"weights for {scheme.model_id!r} came and were not taken: {error}", RuntimeWarning, 1)
            end.answer(scheme.version or 0)  # the sender does not wait for what was refused
        del scheme


def _count(num_workers: int | None, devices: Collection[Any] | None, context: Any) -> int:
    counts = [n for n in (num_workers, None if devices is None else len(devices)) if n is not None]
    count = counts[0] if counts else getattr(context, "num_workers", 1)
    if len(set(counts)) > 1 or isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise BadOption(f"num_workers={num_workers!r}, devices={devices!r}: expected the number of receivers, once")
    return count
