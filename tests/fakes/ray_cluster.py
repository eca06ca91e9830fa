"""One Ray cluster of two nodes on loopback for all tests of a process: starting it takes some 15
seconds.

It runs in a session of processes of its own, which are no children of this one, and ends with it.
This process is connected only while a test needs it (see ``leave``). Clusters of several test
processes do not find one another: each has a folder, a token and ports of its own. A cluster that
did not answer is started a second time, and then not again: the other tests fail at once, for the same reason.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import importlib.util
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.ray_command import wait_for_no_agent

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed"
)
STORE_BYTES = 400 * 2**20
NODE = {
    "num_cpus": 4,
    "node_ip_address": "127.0.0.1",
    "object_store_memory": STORE_BYTES,
}
START_S = 150.0


def environment(folder: Path) -> dict[str, str]:
    """Of processes that use this cluster: nothing is read or written in the home folder or in
    /tmp/ray.
    """
    return {
        "RAY_TMPDIR": str(folder),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # 15 unless said: on a busy machine actors would come last
        "RAY_raylet_start_wait_time_s": "120",  # 30 unless said
    }


class Remote:
    """A ``ray.cluster_utils.Cluster`` in another process.

    Attributes:
        folder: of all that it writes.
        address: for ``ray.init``.
    """

    def __init__(self) -> None:
        self.folder = Path(
            tempfile.mkdtemp(prefix="muster-ray-", dir="/tmp")
        )  # sockets are in there: a short path
        (self.folder / "token").write_text(secrets.token_hex(32))
        here, there = socket.socketpair()
        self._pipe = Connection(here.detach())
        with contextlib.ExitStack() as if_it_fails:
            if_it_fails.callback(self._pipe.close)  # then the other process ends, too
            with there:
                self._start(there)
            self.address: str = self._answer()
            if_it_fails.pop_all()
        atexit.register(self.close)

    def _start(self, there: socket.socket) -> None:
        subprocess.run(
            [
                sys.executable,
                "-m",
                "tests.fakes.ray_cluster",
                str(there.fileno()),
                str(self.folder),
            ],
            env={
                **os.environ,
                **environment(self.folder),
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
            pass_fds=[there.fileno()],
            check=True,
            timeout=START_S,
        )

    def add_node(self, **options: Any) -> int:
        """Its number, for ``remove_node``."""
        return int(self._ask("add_node", options))

    def remove_node(self, number: int, *, allow_graceful: bool = True) -> None:
        self._ask("remove_node", {"number": number, "allow_graceful": allow_graceful})

    def close(self) -> None:
        """All its processes have ended when this returns."""
        atexit.unregister(self.close)
        with contextlib.suppress(RuntimeError, OSError):  # it has ended before
            self._ask("close", {})
        self._pipe.close()

    def _ask(self, what: str, options: dict[str, Any]) -> Any:
        self._pipe.send((what, options))
        return self._answer()

    def _answer(self) -> Any:
        if not self._pipe.poll(START_S):
            raise TimeoutError(
                f"Ray's cluster has not answered in {START_S:g} s; its logs are in {self.folder}"
            )
        try:
            answer = self._pipe.recv()
        except EOFError:
            raise RuntimeError(
                f"the process of Ray's cluster has ended; its logs are in {self.folder}"
            ) from None
        if isinstance(answer, Exception):
            raise answer
        return answer


def _remote() -> Remote:
    try:
        return Remote()
    except (TimeoutError, RuntimeError):
        return Remote()  # on a busy machine, a second start mostly succeeds


@functools.cache
def _started() -> Remote | Exception:
    """The cluster of this process, or why there is none."""
    try:
        made = _remote()
    except Exception as error:  # noqa: BLE001 (raised by ``cluster``)
        return error
    os.environ.update(environment(made.folder))
    from ray._private import authentication_test_utils

    authentication_test_utils.reset_auth_token_state()  # Ray may have been imported before
    return made


def cluster() -> Remote:
    """The cluster, to which this process is connected until the test has ended."""
    made = _started()
    if isinstance(made, Exception):
        raise RuntimeError(
            f"Ray's cluster of this test process could not be started: {made}. It is"
            " not tried again; start the tests again."
        ) from made
    import ray

    if not ray.is_initialized():
        with _on_loopback(), _ended_if_it_hangs():
            ray.init(address=made.address, log_to_driver=False)
    return made


def leave() -> None:
    """Disconnect this process, if it is connected to any Ray; see ``conftest``."""
    if "ray" in sys.modules:
        import ray

        if ray.is_initialized():
            ray.shutdown()


@pytest.fixture
def ray_cluster() -> Remote:
    """The cluster; what a test adds to it, the test removes."""
    return cluster()


@contextlib.contextmanager
def _ended_if_it_hangs() -> Iterator[None]:
    """End this process after ``START_S``: now and then a raylet never answers a driver, and Ray
    waits for it for ever, in C++, where no signal of a test's time limit gets through.
    """
    faulthandler.dump_traceback_later(START_S, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """127.0.0.1 stays what it is."""
    from ray._private import ray_constants

    before, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


# --- in the other process -------------------------------------------------------------------------


AGENTS = (
    "metrics_agent_port",
    "metrics_export_port",
    "dashboard_agent_listen_port",
    "runtime_env_agent_port",
)


def _ports() -> dict[str, int]:
    """Ports of a node's agents, for ``wait_for_no_agent``."""
    with contextlib.ExitStack() as open_together:
        return {agent: _free_port(open_together) for agent in AGENTS}


def _free_port(held: contextlib.ExitStack) -> int:
    """A port, until ``held`` closes it; not one of those that the kernel gives to others."""
    while True:
        found = held.enter_context(socket.socket())
        with contextlib.suppress(OSError):  # it is taken
            found.bind(("127.0.0.1", secrets.choice(range(12_000, 32_000))))
            return int(found.getsockname()[1])


def _serve(pipe: Connection, folder: Path) -> None:
    """Follow what the test process says, until it ends."""
    from ray._private import ray_constants
    from ray.cluster_utils import Cluster

    ray_constants.ENABLE_RAY_CLUSTER = False
    wait_for_no_agent()
    made = Cluster()
    try:
        made.add_node(**NODE, **_ports(), include_dashboard=False)
        nodes = [made.add_node(**NODE, **_ports())]
    except Exception as error:  # noqa: BLE001 (raised in the test)
        made.shutdown()  # its logs stay
        with contextlib.suppress(OSError):
            pipe.send(RuntimeError(f"{type(error).__name__}: {error} (logs: {folder})"))
        return
    answer: Any = made.address
    try:
        while True:
            pipe.send(answer)
            what, options = pipe.recv()
            if what == "close":
                break
            try:
                if what == "add_node":
                    nodes.append(made.add_node(**options, **_ports()))
                    answer = len(nodes) - 1
                else:
                    answer = made.remove_node(nodes[options.pop("number")], **options)
            except Exception as error:  # noqa: BLE001 (raised in the test)
                answer = RuntimeError(f"{type(error).__name__}: {error}")
    except (EOFError, OSError):
        pass  # the test process is gone
    finally:
        made.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        pipe.send(None)


if __name__ == "__main__":
    if os.fork():  # nobody's child any more
        os._exit(0)
    os.setsid()
    _serve(Connection(int(sys.argv[1])), Path(sys.argv[2]))
