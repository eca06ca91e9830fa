"""What all weight sync schemes are: an option of collectors, and a pair of a sender and its receivers."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Collection
from typing import Any, ClassVar

import torch

from muster.errors import BadOption, CollectorClosed
from muster.weights.local import check_names, check_values
from muster.weights.names import Weights, check_finite, named_weights
from muster.weights.sync_lines import Receiver, Sender
from muster.weights.transport import Scheme

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
    """

    backend: ClassVar[str] = ""
    transport: ClassVar[Scheme | None] = None
    _by_backend: ClassVar[dict[str, type[WeightSyncScheme]]] = {}

    _sender: Sender | None
    _line: Receiver | None
    _thread: threading.Thread | None
    _pid: int
    _source: Any
    _worker: int | None
    _model: Any
    _context: Any
    version: int | str | None
    initialized_on_receiver: bool
    synchronized_on_sender: bool
    synchronized_on_receiver: bool

    def __init__(self, strategy: str = "tensordict", *, sync: bool = True, deadline_s: float = 10.0) -> None:
        if strategy not in ("tensordict", "state_dict"):
            raise BadOption(f"strategy={strategy!r}: expected 'tensordict' or 'state_dict'")
        self.strategy, self.sync, self.deadline_s = strategy, sync, deadline_s
        self.model_id = "policy"
        self._path: str | None = None
        self._reset()

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
    ) -> None:
        """Make this the sending end.

        Args:
            model_id: for ``context``.
            context: what has the model, ``get_model(model_id)``, and ``num_workers``.
            model: whose weights are sent; or
            weights: a TensorDict or dict with the first ones.
            num_workers: receivers, numbered from 0.
            devices: one for each receiver, instead of their number. (Weights come to any device.)

        Raises:
            BadOption: contradicting or missing arguments.
            BadWeights: what was given has no weights that can be sent.
        """
        self._check_new()
        if context is not None and model is None and weights is None:
            model = context.get_model(model_id)
        if (model is None) == (weights is None):
            raise BadOption("init_on_sender needs the first weights: give a model, weights= or a context, and one only")
        count = _count(num_workers, devices, context)
        self.model_id, self._source = model_id, model
        first = named_weights(model if weights is None else weights)
        self._sender = self._make_sender(first, count)
        self._path, self.version = self._sender.path, 0

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
        self._publish(weights, worker_ids)

    # --- where they act -----------------------------------------------------------------------------

    def init_on_receiver(
        self, *, model_id: str = "policy", context: Any = None, model: Any = None, worker_idx: int | None = None
    ) -> None:
        """Make this copy of the sender's object a receiving end.

        Args:
            model_id: for ``context``.
            context: what has the model, ``get_model(model_id)``, and is told by ``update_policy_weights_``.
            model: a module, or a TensorDict or dict of tensors, to write the weights to.
            worker_idx: which of the sender's receivers this is; by default the context's.

        Raises:
            BadOption: this is no copy of an initialized sender, or arguments are missing.
        """
        if self._sender is not None and os.getpid() == self._pid:
            raise BadOption("this object is the sender: give the receiver a copy, copy.copy(scheme) or its pickle")
        if self._path is None:
            raise BadOption(f"there is no sender for {self}: call init_on_sender(...), then give receivers copies")
        self._reset()
        self.model_id, self.context, self.model = model_id, context, model
        if self.model is None:
            raise BadOption("init_on_receiver needs what gets the weights: give a model or a context")
        self._worker = getattr(context, "worker_idx", None) if worker_idx is None else worker_idx
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
        line = self._line
        if line is None:
            raise BadOption("receive() is for receivers: call init_on_receiver(...) and connect() before")
        wait_s = self.deadline_s if timeout is None else timeout
        if self._thread is not None:  # which hears for itself
            return self._take(line)
        line.hear(0.0)
        taken = self._take(line)
        if taken is None and wait_s > 0:
            if not line.alone and line.hear(wait_s):
                taken = self._take(line)
            if taken is None and line.alone:
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
        new, old = named_weights(weights), named_weights(self.model)
        check_names(new, old)
        check_values(new, old)
        with torch.no_grad():
            for name, tensor in old.items():
                tensor.copy_(new[name])

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
                self._publish(weights, None)
            self._sender.serve()
            self.synchronized_on_sender = True
            return
        self._worker = self._worker if worker_idx is None else worker_idx
        if not self.initialized_on_receiver or self._path is None or self._worker is None:
            raise BadOption("connect() comes after init_on_sender(...), or init_on_receiver(...) with a worker_idx")
        line = Receiver(self._path, self._worker, deadline_s=self.deadline_s, answers=self.sync)
        try:
            self._take_first(line)
        except BaseException:
            line.close()
            raise
        self._line, self.synchronized_on_receiver = line, True
        if self.context is not None:
            following = threading.Thread(
                target=_follow, args=(line, weakref.ref(self)), name="muster-weights", daemon=True
            )
            self._thread = following
            following.start()

    def shutdown(self) -> None:
        """Close this end; the other keeps what it has. May be called again."""
        if self._sender is not None:
            self._sender.close()
        line, following, self._line = self._line, self._thread, None
        if line is not None:
            line.hang_up()
            if following is not None and following is not threading.current_thread():
                following.join(self.deadline_s)
            line.close()

    @property
    def initialized_on_sender(self) -> bool:
        return self._sender is not None

    @property
    def worker_idx(self) -> int | None:
        """Number of this receiver."""
        return self._worker

    @property
    def context(self) -> Any:
        return self._context()

    @context.setter
    def context(self, context: Any) -> None:
        self._context = _nothing if context is None else weakref.ref(context)
        if context is not None:
            self._model = None

    @property
    def model(self) -> Any:
        """What gets the weights that are received."""
        if self._model is None and self.context is not None:
            self._model = self.context.get_model(self.model_id)
        return self._model

    @model.setter
    def model(self, model: Any) -> None:
        self._model = model

    def __getstate__(self) -> dict[str, Any]:
        """What a receiver needs to know."""
        names = ("strategy", "sync", "deadline_s", "model_id", "_path")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    # --- parts --------------------------------------------------------------------------------------

    def _reset(self) -> None:
        """Neither a sender nor a receiver; a fork lets go of what is its parent's."""
        self._sender, self._line, self._thread, self.version = None, None, None, None
        self._lock = threading.Lock()
        self._source = self._worker = self._model = None
        self._context = _nothing
        self._pid = os.getpid()
        self.initialized_on_receiver = self.synchronized_on_receiver = self.synchronized_on_sender = False

    def _check_new(self) -> None:
        if self._sender is not None or self.initialized_on_receiver:
            raise BadOption(f"{self} is initialized already: one object is one end, for one model")

    def _make_sender(self, first: Weights, count: int) -> Sender:
        if self.transport is None:
            raise BadOption(f"{self} cannot send by itself: take a subclass of WeightSyncScheme")
        check_finite(first)
        return Sender(first, count, self.transport, deadline_s=self.deadline_s)

    def _publish(self, weights: Any, worker_ids: Any) -> None:
        given = self._source if weights is None else weights
        if given is None:
            raise BadOption("send() without weights sends the model's, and init_on_sender got none: give weights")
        new = named_weights(given)
        check_finite(new)
        several = worker_ids is None or isinstance(worker_ids, Collection)
        receivers = worker_ids if several else [worker_ids]
        assert self._sender is not None
        with self._lock:
            assert isinstance(self.version, int)
            self._sender.publish(new, self.version + 1, receivers)
            self.version += 1
            if self.sync:
                self._sender.wait(receivers)

    def _take_first(self, line: Receiver) -> None:
        """As ``_take``; a context asks the model for them itself."""
        self.version = line.take(named_weights(self.model))
        if self.version is not None:
            line.answer(self.version)

    def _take(self, line: Receiver) -> Weights | None:
        with self._lock:
            weights = named_weights(self.model)
            version = line.take(weights)
            if version is None:
                return None
            self.version = version
            if self.context is not None:
                self.context.update_policy_weights_(self.model, model_id=self.model_id)
            line.answer(version)
            return weights


def _follow(line: Receiver, receiver: weakref.ref[WeightSyncScheme]) -> None:
    """Hand on what comes, in a thread, until either end is closed."""
    while line.hear(None):
        scheme = receiver()
        if scheme is None:
            break
        try:
            scheme._take(line)
        except CollectorClosed:
            break
        except Exception as error:  # noqa: BLE001 - whatever the collector says to these weights, its user has to know
            warnings.warn(f"weights for {scheme.model_id!r} came and were not taken: {error}", RuntimeWarning, 1)
            line.answer(scheme.version or 0)  # nobody waits for what was refused
        del scheme


def _count(num_workers: int | None, devices: Collection[Any] | None, context: Any) -> int:
    counts = [n for n in (num_workers, None if devices is None else len(devices)) if n is not None]
    count = counts[0] if counts else getattr(context, "num_workers", 1)
    if len(set(counts)) > 1 or isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise BadOption(f"num_workers={num_workers!r}, devices={devices!r}: expected the number of receivers, once")
    return count


def _nothing() -> None: ...
