"""Ray in the main process: started or joined for the first collector that needs it, and left after the last."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import ray
from ray import exceptions
from ray.util import client

from muster.errors import BadOption
from muster.utils.private_names import VARIABLE, usable

try:
    from ray._private import ray_constants, services
except ImportError:
    ray_constants = services = None  # type: ignore[assignment]

LOOPBACK = "127.0.0.1"


@dataclass
class _RunningRay:
    """Ray, from a start to its shutdown; ``ours`` if a lease has started it."""

    ours: bool
    holders: int = 0


class Lease:
    """A right to Ray: it is started or joined for the first holder, unless it runs already, and left after the last.

    A Ray that the user has started or joined is used as it is, and stays when all leases have ended. A Ray that is
    started here listens on loopback only and has no dashboard, unless ``config`` says otherwise.

    Args:
        config: keywords of ``ray.init``. None: joins the Ray that runs on this machine, or else starts one.

    Raises:
        BadOption: ``ray.init`` refuses them, or there is no such cluster, or its token is another.
    """

    _lock = threading.Lock()
    _run: ClassVar[_RunningRay | None] = None

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        config = dict(config or {})
        _refuse_clients(config.get("address"), running=ray.is_initialized())
        self._held = True
        with Lease._lock:
            if not ray.is_initialized():
                _init(config)
                Lease._run = _RunningRay(ours=True)
            elif Lease._run is None:
                Lease._run = _RunningRay(ours=False)
            self._mine = Lease._run
            self._mine.holders += 1

    def close(self) -> None:
        """May be called again."""
        with Lease._lock:
            if not self._held:
                return
            self._held = False
            self._mine.holders -= 1
            if self._mine.holders == 0 and Lease._run is self._mine:  # else the user has shut Ray down in between
                Lease._run = None
                if self._mine.ours:
                    ray.shutdown()


def _refuse_clients(address: Any, *, running: bool) -> None:
    """A Ray client has no object store."""
    found, said = "", None if running or address not in (None, "auto") else os.environ.get("RAY_ADDRESS")
    if isinstance(address, str) and address.startswith("ray://"):
        found = f"ray_init_config has address={address!r}, a Ray client"
    elif said is not None and said.startswith("ray://"):
        found = f"RAY_ADDRESS is {said!r}, a Ray client"
    elif client.ray.is_connected():  # type: ignore[no-untyped-call]
        found = "this process is connected to a Ray cluster as a client (ray.init('ray://...'))"
    if found:
        raise BadOption(
            f"{found}: all batches would pass through its proxy. Run this on a machine of the cluster "
            f"(`ray start --address=...` makes it one) with address='auto'"
        )


def _init(config: dict[str, Any]) -> None:
    """``ray.init``; only on loopback where it starts a cluster and the configuration has no address."""
    address = config.get("address")
    existing = None
    try:
        if not _can_stay_on_loopback():
            _join(config)
            return
        existing = services.canonicalize_bootstrap_address(address, config.get("_temp_dir"))  # type: ignore[arg-type]
        at = None if existing is None else _where(existing)
        if existing is not None and at is None:
            said, existing = existing, None
            if address is not None or "RAY_ADDRESS" in os.environ:
                raise ConnectionError(f"nothing listens at {said}, where a Ray cluster was said to be.")
            config["address"] = "local"  # a cluster that ran here has left its address behind
        if existing is None:
            config.setdefault("include_dashboard", False)
            config.setdefault("_node_ip_address", LOOPBACK)
            on_loopback = config["_node_ip_address"] == LOOPBACK
        else:
            on_loopback = at == LOOPBACK
        with _on_loopback() if on_loopback else contextlib.nullcontext():
            ray.init(**config)
    except (ValueError, RuntimeError, TypeError, ConnectionError, exceptions.RayError) as error:
        what = f"ray.init(**{config!r})" if config else "ray.init()"
        raise BadOption(f"{what} failed: {first_line(error)} {_advice(error, existing)}".rstrip()) from error


def _can_stay_on_loopback() -> bool:
    """Whether this Ray has what it takes to find a cluster, or to start one that listens on loopback only."""
    owners = (services, ("canonicalize_bootstrap_address",)), (ray_constants, ("ENABLE_RAY_CLUSTER",))
    return usable("ray", *owners)


def _join(config: dict[str, Any]) -> None:
    """Join a cluster that runs, by Ray's public names; raises RuntimeError where one would have to be started."""
    address = config.get("address")
    try:
        if address == "local":
            raise ConnectionError("none was looked for")
        ray.init(**{**config, "address": address or "auto"})
    except ConnectionError as error:
        if address not in (None, "local"):
            raise
        raise RuntimeError(
            f"Muster starts a cluster on loopback only, which takes private names that Ray {ray.__version__} does not "
            f"have, or {VARIABLE}=never forbids. Call ray.init() before you make the collector: a Ray that runs in "
            f"this process is used as it is."
        ) from error


def _advice(error: BaseException, existing: str | None) -> str:
    refused = isinstance(error, exceptions.AuthenticationError)
    if refused or (isinstance(error, ConnectionError) and existing is not None):
        return (
            "If a cluster runs there, this process' token is not the cluster's: take it from a machine of the cluster "
            "(`ray get-auth-token`), and set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH to a file "
            "with it, before Ray is imported. `ray start --head` starts a cluster."
        )
    if isinstance(error, ConnectionError):
        return "Start one with `ray start --head`, or leave `address` out of ray_init_config."
    if "existing cluster" in str(error):
        return "A Ray runs on this machine already: address='local' starts another."
    return ""


def _where(existing: str) -> str | None:
    """On which address the cluster is reached: Ray has put this machine's own in the place of 127.0.0.1."""
    host, _, port = existing.rpartition(":")
    return next((one for one in (host, LOOPBACK) if listens(one, int(port))), None)


def listens(host: str, port: int) -> bool:
    """Whether there is one."""
    try:
        socket.create_connection((host.strip("[]"), port), 1.0).close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """Keep Ray from replacing 127.0.0.1 by the address under which others reach this machine, which would make all
    its processes listen on all interfaces. It has a switch for that, which is off on macOS and Windows.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


# --- calls ------------------------------------------------------------------------------------------


def arrived(ref: Any, within_s: float) -> bool:
    """Whether the actor is here, or will not come, ``within_s`` seconds from now."""
    if not ray.is_initialized():  # `ray.wait` would start another
        raise RuntimeError("Ray was shut down in this process")
    return bool(ray.wait([ref], timeout=within_s)[0])


def first_line(error: BaseException) -> str:
    """What Ray says, in one line that ends with a full stop: without tables, tracebacks and general advice."""
    if isinstance(error, exceptions.RayTaskError):
        return f"{type(error.cause).__name__}: {error.cause}".split("\n")[0].rstrip(".") + "."
    lines = [line.strip() for line in re.sub(r"\x1b\[\d*m", "", str(error)).splitlines()]
    lines = [line for line in lines if line and not _is_detail(line)]
    if any(line.startswith('File "') for line in lines):  # the last line of a traceback says it all
        del lines[:-1]
    text = " ".join(lines[:2]).split(" Some common causes")[0]
    return (text or type(error).__name__).rstrip(".") + "."


def _is_detail(line: str) -> bool:
    name = line.split(":")[0]
    return name in ("class_name", "actor_id", "namespace", "name", "repr", "pid", "ip", "node_id")


# --- actors -----------------------------------------------------------------------------------------


def search_path() -> list[str]:
    """Where this process finds modules, for processes that start elsewhere."""
    return [os.path.abspath(entry) for entry in sys.path]


def actor_class(target: str) -> Any:
    """A Ray actor around ``"module:class"``, which need not be importable where Ray's own processes start.

    Args:
        target: made with the arguments of ``remote`` after the first, which is ``search_path()``.
    """

    class MusterActor:  # in a function, so that it is pickled with its code
        def __init__(self, path: list[str], *args: Any, **kwargs: Any) -> None:
            import importlib
            import sys

            sys.path.extend(entry for entry in path if entry not in sys.path)
            module, _, name = target.partition(":")
            self._object = getattr(importlib.import_module(module), name)(*args, **kwargs)

        def call(self, name: str, *args: Any) -> Any:
            return getattr(self._object, name)(*args)

    return ray.remote(MusterActor)


def call(actor: Any, name: str, *args: Any) -> Any:
    """Call a method of what such an actor is around; gives the reference of its result."""
    return actor.call.remote(name, *args)
