"""A replay buffer in a Ray actor, which all nodes and the main process can read and write.

::

    buffer = RayBuffer(lambda: TensorDictReplayBuffer(storage=LazyTensorStorage(100_000)))
    collector = RayCollector(..., replay_buffer=buffer)
    batch = buffer.sample(256)
"""

from __future__ import annotations

import contextlib
import io
import pickle
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from muster.episodes.stored import StoredItems
from muster.errors import BadOption, WorkerDied
from muster.memory.specs import Array
from muster.restore.pickling import Pickler, dumps, loads, unpickle
from muster.utils.attributes import optional

if TYPE_CHECKING:
    from muster.cluster.ray_runtime import Lease, RayConnection

Packed = tuple[
    bytes, list[Array]
]  # a pickle, and the memory of the tensors and arrays in it


class RayBuffer:
    """A handle to a buffer in a Ray actor: any object with ``extend`` or ``add``.

    The handle has the public methods and attributes of the buffer. A call returns when the buffer
    has executed it, and raises the buffer's errors. Tensors travel through Ray's object store. The
    buffer gets read-only views of the store, without a copy; a storage that keeps references keeps
    the memory there. Results are copied once, and belong to the caller.

    The handle can be pickled to any process that is connected to the cluster. The buffer ends with
    ``close``, or with the process that made it.

    Args:
        buffer: function that makes the buffer in the actor, or a buffer, which is pickled to the
            actor.
        ray_init_config: keyword arguments of ``ray.init``, if Ray does not run in this process yet.
        timeout_s: timeout of each call and of the start, in seconds.
        remote_config: options of the Ray actor, such as ``num_cpus`` (default 0) or ``memory``.

    Raises:
        BadOption: Ray is not installed, ``buffer`` is no buffer or cannot be pickled, or Ray
            refuses an option. From ``extend``: a TorchRL buffer stores batches of another shape;
            nothing was written.
        WorkerDied: the buffer could not be made in the actor, or (from any method) the actor has
            ended.
        CollectorTimeout: no answer within ``timeout_s``.
    """

    def __init__(
        self,
        buffer: Any,
        *,
        ray_init_config: Mapping[str, Any] | None = None,
        timeout_s: float = 60.0,
        remote_config: Mapping[str, Any] | None = None,
    ) -> None:
        with optional("RayBuffer", "ray", "ray"):
            from muster.cluster.ray_runtime import (
                Lease,
                actor_class,
                first_line,
                search_path,
            )
        if not callable(buffer) and not _is_buffer(buffer):
            raise BadOption(
                f"RayBuffer got a {type(buffer).__name__}: expected a function that makes a buffer,"
                " or an object with extend(batch) or add(transition)"
            )
        made = dumps(buffer, "buffer")
        self._timeout_s = timeout_s
        self._closed = False
        self._lease: Lease | None = Lease(ray_init_config)
        self._connection: RayConnection | None = (
            None  # of this process, with the first call
        )
        try:
            cls = actor_class("muster.cluster.ray_buffer:BufferActor")
            try:
                config = {"num_cpus": 0, **(remote_config or {})}
                cls = cls.options(**config)
            except (ValueError, TypeError) as error:
                raise BadOption(
                    f"RayBuffer: {first_line(error)} Options of Ray actors are expected"
                ) from error
            self._actor = cls.remote(search_path(), made)
            self._look("__class__")  # waits until the buffer is made
        except BaseException:
            self._lease.close()
            raise

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_lease": None, "_connection": None}

    def extend(self, data: Any) -> Any:
        """Write a batch; returns the result of the buffer's ``extend``."""
        return self._call("extend", data)

    def add(self, data: Any) -> Any:
        """Write one transition; returns the result of the buffer's ``add``."""
        return self._call("add", data)

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the buffer's ``sample``, copied out of the object store."""
        return self._call("sample", *args, **kwargs)

    def __len__(self) -> int:
        return int(self._call("__len__"))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(
                f"RayBuffer has no attribute {name!r}; private ones of the buffer are not reached"
            )
        is_method, value = self._look(name)
        return partial(self._call, name) if is_method else value

    def close(self) -> None:
        """End the buffer, if this handle has made it. May be called again."""
        lease, self._lease = self._lease, None
        if lease is not None:
            import ray
            from ray import exceptions

            self._closed = True
            # it has ended with its connection
            with contextlib.suppress(exceptions.RayError, ValueError, RuntimeError):
                if self._connection is not None:
                    self._connection.check()
                    ray.kill(self._actor, no_restart=True)
            lease.close()

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        payload, arrays = _pack((args, kwargs))
        return self._answer(f"{name}()", "call", name, payload, arrays)

    def _look(self, name: str) -> tuple[bool, Any]:
        return self._answer(name, "look", name)  # type: ignore[no-any-return]

    def _answer(self, what: str, method: str, *args: Any) -> Any:
        from ray import exceptions

        from muster.cluster.ray_runtime import RayConnection, awaited, call, first_line

        if self._closed:
            raise WorkerDied("the replay buffer (a Ray actor) was closed")
        try:
            self._connection = self._connection or RayConnection()
            self._connection.check()
            answer = call(self._actor, method, *args)
            late = (
                f"the replay buffer (a Ray actor) has not answered {what} within"
                f" {self._timeout_s:g} s; is it waiting for a machine with the resources it"
                " asks for? timeout_s= lets it take longer"
            )
            return _unpack(*awaited(answer, self._timeout_s, late))
        except exceptions.RayTaskError as error:
            raise error.cause from error
        except (
            exceptions.RayError,
            RuntimeError,
        ) as error:  # the latter: Ray was shut down
            raise WorkerDied(
                f"the replay buffer (a Ray actor) cannot be reached: {first_line(error)}"
            ) from error


class BufferActor:
    """The object in the actor: it makes the buffer and executes calls."""

    def __init__(self, made: bytes) -> None:
        # views of Ray's store
        warnings.filterwarnings(
            "ignore", message="The given NumPy array is not writable"
        )
        buffer = loads(made, "buffer")
        self._buffer = buffer if _is_buffer(buffer) else buffer()
        if not _is_buffer(self._buffer):
            raise BadOption(
                f"the function given to RayBuffer made a {type(self._buffer).__name__}: expected an"
                " object with extend(batch) or add(transition)"
            )

        # made for the first batch, since it initialises a lazy buffer
        self._stored: StoredItems | None = None

    def call(self, name: str, payload: bytes, arrays: Sequence[Array]) -> Packed:
        args, kwargs = _unpack(payload, arrays, copy=False)
        if name == "extend":
            self._check(args[0])
        method = getattr(self._buffer, name)
        return _pack(method(*args, **kwargs))

    def look(self, name: str) -> Packed:
        """Return whether ``name`` is a method, and its value if it is not."""
        value = getattr(self._buffer, name)
        if callable(value):
            return _pack((True, None))
        return _pack((False, value))

    def _check(self, data: Any) -> None:
        """Raise ``BadOption`` if a TorchRL buffer stores batches of another shape."""
        if self._stored is None:
            self._stored = StoredItems(self._buffer)
        problem = self._stored.problem(data)
        if problem and self._stored.is_certain:
            raise BadOption(problem)


def for_nodes(buffer: Any) -> Any:
    """Return the object that nodes write into: a ``RayBuffer`` itself, or the client of TorchRL's
    ``RayReplayBuffer``.

    Raises:
        BadOption: only this process can reach the buffer.
    """
    if isinstance(buffer, RayBuffer):
        return buffer
    if getattr(buffer, "service_backend", None) == "ray" and callable(
        getattr(buffer, "client", None)
    ):
        return buffer.client()
    raise BadOption(
        f"replay_buffer is a {type(buffer).__name__}, which nodes cannot write into: expected a"
        " muster.RayBuffer (RayBuffer(make_buffer)) or TorchRL's RayReplayBuffer"
    )


def _is_buffer(thing: Any) -> bool:
    if isinstance(thing, type):
        return False
    methods = [getattr(thing, name, None) for name in ("extend", "add")]
    return any(callable(method) for method in methods)


# --- tensors as arrays ----------------------------------------------------------------------------


class _Pickler(Pickler):
    """Pickles ordinary tensors as out-of-band buffers, without a copy if they are contiguous."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and _is_ordinary(obj):
            memory = np.empty(0, np.uint8)
            if obj.numel():
                flat = obj.contiguous().view(-1)
                memory = flat.view(torch.uint8).numpy()
            return _tensor, (memory, obj.dtype, tuple(obj.shape))
        return super().reducer_override(obj)


def _is_ordinary(tensor: torch.Tensor) -> bool:
    if tensor.requires_grad or tensor.is_quantized:
        return False
    if tensor.is_conj() or tensor.is_neg():
        return False
    return tensor.device.type == "cpu" and tensor.layout == torch.strided


def _tensor(memory: Array, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not memory.size:
        return torch.empty(shape, dtype=dtype, device="cpu")
    flat = torch.from_numpy(memory)
    return flat.view(dtype).view(shape)


def _pack(thing: Any) -> Packed:
    """Return a pickle, and the memory of all tensors and arrays in it, which Ray copies into its
    store.
    """
    file = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    pickler = _Pickler(file, protocol=5, buffer_callback=buffers.append)
    pickler.dump(thing)
    arrays = [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers]
    return file.getvalue(), arrays


def _unpack(payload: bytes, arrays: Sequence[Array], *, copy: bool = True) -> Any:
    if copy:
        arrays = [array.copy() for array in arrays]
    return unpickle(payload, arrays)
