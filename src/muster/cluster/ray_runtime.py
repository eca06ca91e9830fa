"""Ray in the main process: started or joined for the first ``Lease``, and left after the last."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import ray
from ray import exceptions
from ray.util import client

from muster.cluster.versions import installed
from muster.errors import BadOption, CollectorTimeout
from muster.utils.loans import Loans
from muster.utils.private_names import VARIABLE, usable

try:
    from ray._private import ray_constants, services
except ImportError:
    ray_constants = services = None  # type: ignore[assignment]

LOOPBACK = "127.0.0.1"
STEP_S = 1.0  # between two looks whether this process is still connected
# the latter two: of a Ray that was shut down
LOST = (exceptions.RayError, ValueError, RuntimeError)
# in Ray's messages
DETAILS = (
    "class_name",
    "actor_id",
    "namespace",
    "name",
    "repr",
    "pid",
    "ip",
    "node_id",
)


class _RunningRay:
    """A run of Ray, from start to shutdown, which ends with its last holder if it is ours.

    Args:
        ours: a lease has started or joined it.
        joined: it is a cluster that remains when this process leaves it.
    """

    def __init__(self, *, ours: bool, joined: bool) -> None:
        self.ours = ours
        self._joined = joined
        self._connection = RayConnection()
        self._holders = 0
        self._lent: Loans[None] = Loans()

    def is_current(self) -> bool:
        """Whether this process is still connected to it: the user may have shut it down."""
        try:
            self._connection.check()
        except RuntimeError:
            return False
        return True

    def lend(self, memory: Any) -> None:
        """Note that an object of the store is used as long as ``memory`` lives."""
        self._lent.ended()
        self._lent.lend(None, memory)

    @property
    def is_needed(self) -> bool:
        """Whether memory of the store is used that the cluster would use again if this process left
        it.
        """
        self._lent.ended()
        return self._joined and len(self._lent) > 0

    def add_holder(self) -> None:
        self._holders += 1

    def remove_holder(self) -> bool:
        """Return whether it was the last one."""
        self._holders -= 1
        return not self._holders


_lock = threading.Lock()
_run: _RunningRay | None = None  # the one that this process uses


class Lease:
    """A reference to Ray.

    The first lease starts or joins Ray unless it runs already; closing the last one leaves it.

    If the user has started or joined Ray, it is used unchanged, and still runs after all leases are
    closed. A Ray that is started here listens on loopback only and has no dashboard, unless
    ``config`` sets them.

    A cluster that was joined is not left as long as batches lie in its store
    (``keep_connected_for``), but by the next lease that is closed without such batches, or when
    this process ends.

    Args:
        config: keyword arguments of ``ray.init``. None: join the Ray that runs on this machine, or
            else start one.

    Raises:
        BadOption: ``ray.init`` refuses ``config``, or the cluster does not exist or has a different
            token.
    """

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        global _run
        config = dict(config or {})
        _refuse_clients(config.get("address"), running=ray.is_initialized())
        self._held = True
        with _lock:
            if not ray.is_initialized():
                joined = _init(config)
                _run = _RunningRay(ours=True, joined=joined)
            elif _run is None or not _run.is_current():
                _run = _RunningRay(ours=False, joined=True)
            self._mine = _run
            self._mine.add_holder()

    def close(self) -> None:
        """Release Ray. May be called again."""
        global _run
        with _lock:
            if not self._held:
                return
            self._held = False
            if not self._mine.remove_holder() or _run is not self._mine:
                return  # others hold it, or the user has shut it down since
            if self._mine.ours and self._mine.is_needed:
                return
            _run = None
            if self._mine.ours and self._mine.is_current():
                ray.shutdown()


def keep_connected_for(memory: Any) -> None:
    """Stay in the cluster as long as this memory in its store lives, if a lease has joined it."""
    with _lock:
        if _run is not None:
            _run.lend(memory)


def _refuse_clients(address: Any, *, running: bool) -> None:
    """Raise BadOption for a Ray client, which has no object store."""
    found = ""
    said = None
    if not running and address in (None, "auto"):
        said = os.environ.get("RAY_ADDRESS")
    if isinstance(address, str) and address.startswith("ray://"):
        found = f"ray_init_config has address={address!r}, a Ray client"
    elif said is not None and said.startswith("ray://"):
        found = f"RAY_ADDRESS is {said!r}, a Ray client"
    elif client.ray.is_connected():  # type: ignore[no-untyped-call]
        found = "this process is connected to a Ray cluster as a client (ray.init('ray://...'))"
    if found:
        raise BadOption(
            f"{found}: all batches would pass through its proxy. Run this on a machine of the"
            " cluster (`ray start --address=...` makes it one) with address='auto'"
        )


def _init(config: dict[str, Any]) -> bool:
    """Call ``ray.init``. Return whether a cluster was joined, which was there before.

    A new cluster listens on loopback only, unless ``config`` has ``_node_ip_address``.
    """
    address = config.get("address")
    existing = None
    try:
        if not _can_stay_on_loopback():
            _join(config)
            return True
        existing = services.canonicalize_bootstrap_address(
            address,  # type: ignore[arg-type]
            config.get("_temp_dir"),
        )
        at = None if existing is None else _where(existing)
        if existing is not None and at is None:
            said, existing = existing, None
            if address is not None or "RAY_ADDRESS" in os.environ:
                raise ConnectionError(
                    f"nothing listens at {said}, where a Ray cluster was said to be."
                )
            config["address"] = "local"  # the address of a cluster that has ended
        if existing is None:
            config.setdefault("include_dashboard", False)
            config.setdefault("_node_ip_address", LOOPBACK)
            on_loopback = config["_node_ip_address"] == LOOPBACK
        else:
            on_loopback = at == LOOPBACK
        with _on_loopback() if on_loopback else contextlib.nullcontext():
            ray.init(**config)
    except (
        ValueError,
        RuntimeError,
        TypeError,
        ConnectionError,
        exceptions.RayError,
    ) as error:
        what = f"ray.init(**{config!r})" if config else "ray.init()"
        raise BadOption(
            f"{what} failed: {first_line(error)} {_advice(error, existing)}".rstrip()
        ) from error
    return existing is not None


def _can_stay_on_loopback() -> bool:
    """Return whether this Ray has the private names needed to find a cluster, or to start one on
    loopback only.
    """
    return usable(
        "ray",
        (services, ("canonicalize_bootstrap_address",)),
        (ray_constants, ("ENABLE_RAY_CLUSTER",)),
    )


def _join(config: dict[str, Any]) -> None:
    """Join a running cluster with Ray's public names.

    Raises RuntimeError if one would have to be started.
    """
    address = config.get("address")
    try:
        if address == "local":
            raise ConnectionError("none was looked for")
        ray.init(**{**config, "address": address or "auto"})
    except ConnectionError as error:
        if address not in (None, "local"):
            raise
        raise RuntimeError(
            "Muster starts a cluster on loopback only, which takes private names that Ray"
            f" {ray.__version__} does not have, or {VARIABLE}=never forbids. Call ray.init() before"
            " you make the collector: a Ray that runs in this process is used as it is."
        ) from error


def _advice(error: BaseException, existing: str | None) -> str:
    refused = isinstance(error, exceptions.AuthenticationError)
    if refused or (isinstance(error, ConnectionError) and existing is not None):
        return (
            "If a cluster runs there, this process' token is not the cluster's: take it from a"
            " machine of the cluster (`ray get-auth-token`), and set RAY_AUTH_MODE=token and"
            " RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH to a file with it, before Ray is imported."
            " `ray start --head` starts a cluster."
        )
    if isinstance(error, ConnectionError):
        return "Start one with `ray start --head`, or leave `address` out of ray_init_config."
    if "existing cluster" in str(error):
        return "A Ray runs on this machine already: address='local' starts another."
    return ""


def _where(existing: str) -> str | None:
    """Return the host at which the cluster is reachable: Ray has replaced 127.0.0.1 by this
    machine's address.
    """
    host, _, port = existing.rpartition(":")
    return next((one for one in (host, LOOPBACK) if listens(one, int(port))), None)


def listens(host: str, port: int) -> bool:
    """Return whether a process listens at the address."""
    try:
        socket.create_connection((host.strip("[]"), port), 1.0).close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """Keep Ray from replacing 127.0.0.1 by this machine's address, so that it does not listen on
    all interfaces.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False  # the default on macOS and Windows
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


# --- calls ----------------------------------------------------------------------------------------


class RayConnection:
    """The connection of this process to a cluster, as it is when this object is made.

    Raises:
        RuntimeError: there is none.
    """

    def __init__(self) -> None:
        if not ray.is_initialized():
            raise RuntimeError("this process is not connected to a Ray cluster")
        self._number = self._current()

    def check(self) -> None:
        """Raise RuntimeError if the connection has ended.

        Otherwise a call of an actor, ``ray.put`` and ``ray.get`` would start Ray again, or wait for
        objects that a new connection does not know.
        """
        if not ray.is_initialized() or self._current() != self._number:
            raise RuntimeError("Ray was shut down in this process")

    @staticmethod
    def _current() -> tuple[str, str]:
        context = ray.get_runtime_context()
        return context.get_session_name(), context.get_job_id()


def arrived(ref: Any, within_s: float) -> bool:
    """Return whether the result (or error) ``ref`` is available within ``within_s`` seconds."""
    if not ray.is_initialized():  # `ray.wait` would start Ray again
        raise RuntimeError("Ray was shut down in this process")
    return bool(ray.wait([ref], timeout=within_s)[0])


def awaited(ref: Any, timeout_s: float, late: str) -> Any:
    """Return the result ``ref``, or raise its error.

    Args:
        late: text of the error after ``timeout_s`` seconds.

    Raises:
        CollectorTimeout: it has not arrived in time.
        RuntimeError: Ray was shut down in this process.
        RayError: the actor has ended, or the call has failed.
    """
    deadline = time.monotonic() + timeout_s
    while not arrived(ref, min(STEP_S, timeout_s)):
        if time.monotonic() > deadline:
            raise CollectorTimeout(late)
    return ray.get(ref)


def first_line(error: BaseException) -> str:
    """Return Ray's message as one line with a full stop, without tables, tracebacks and general
    advice.
    """
    if isinstance(error, exceptions.RayTaskError):
        return (
            f"{type(error.cause).__name__}: {error.cause}".split("\n")[0].rstrip(".")
            + "."
        )
    lines = [
        line.strip() for line in re.sub(r"\x1b\[\d*m", "", str(error)).splitlines()
    ]
    lines = [line for line in lines if line and line.split(":")[0] not in DETAILS]
    # the last line of a traceback has the error
    if any(line.startswith('File "') for line in lines):
        del lines[:-1]
    text = " ".join(lines[:2]).split(" Some common causes")[0]
    return (text or type(error).__name__).rstrip(".") + "."


# --- actors ---------------------------------------------------------------------------------------


def search_path() -> list[str]:
    """Return ``sys.path`` as absolute paths, for processes that start elsewhere."""
    return [os.path.abspath(entry) for entry in sys.path]


def actor_class(target: str, methods: Collection[str] = ()) -> Any:
    """Return a Ray actor class around ``"module:class"``, which need not be importable where Ray's
    processes start.

    Args:
        target: class to wrap. ``remote`` takes ``search_path()``, and then the arguments of this
            class.
        methods: methods of the object that the actor has too, for callers that do not use ``call``.
    """
    ours = installed()

    class MusterActor:  # a local class: it is pickled with its code
        def __init__(self, path: list[str], *args: Any, **kwargs: Any) -> None:
            import importlib
            import sys

            sys.path.extend(entry for entry in path if entry not in sys.path)
            self._muster: dict[str, str] = self._installed()
            self._object: Any = None
            if all(self._muster[key] == ours[key] for key in ("version", "protocol")):
                module, _, name = target.partition(":")
                cls = getattr(importlib.import_module(module), name)
                self._object = cls(*args, **kwargs)

        def _installed(self) -> dict[str, str]:
            import importlib
            import os
            import platform

            try:
                from muster.cluster.versions import installed as here
            except ImportError:  # a version without it
                there = importlib.import_module("muster")
                return {
                    "version": str(getattr(there, "__version__", None)),
                    "path": os.path.dirname(str(there.__file__)),
                    "protocol": "",
                    "host": platform.node(),
                }
            return here()

        def where(self) -> tuple[str, str, int, dict[str, str]]:
            """Host, id of the Ray node, process, and its Muster.

            The object does not exist if that is another Muster than the main process has.
            """
            import os
            import socket

            return (
                socket.gethostname(),
                ray.get_runtime_context().get_node_id(),
                os.getpid(),
                self._muster,
            )

        def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
            if self._object is None:
                raise RuntimeError(
                    f"the actor has the Muster {self._muster}, and the process that made it has"
                    f" {ours}: install the same version on all machines"
                )
            return getattr(self._object, name)(*args, **kwargs)

        # each argument that Ray sends takes 15 us
        def handle(self, packed: bytes, *large: Any) -> Any:
            return self._object.handle(packed, *large)

    for name in methods:
        setattr(MusterActor, name, _calling(name))
    return ray.remote(MusterActor)


def _calling(name: str) -> Callable[..., Any]:
    """Return a method of an actor that calls this one of its object."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.call(name, *args, **kwargs)

    return method


def call(actor: Any, name: str, *args: Any) -> Any:
    """Call a method of the object in an actor of ``actor_class``; returns a reference to the
    result.
    """
    return actor.call.remote(name, *args)
