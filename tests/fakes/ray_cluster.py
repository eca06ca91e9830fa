"""One Ray cluster of two nodes on loopback for all tests of a process: starting it takes some 15 seconds."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
STORE_BYTES = 400 * 2**20
NODE = {"num_cpus": 4, "node_ip_address": "127.0.0.1", "object_store_memory": STORE_BYTES}


def environment(folder: Path) -> dict[str, str]:
    """Of processes that use this cluster: nothing is read or written in the home folder or in /tmp/ray."""
    return {
        "RAY_TMPDIR": str(folder),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
        "RAY_USAGE_STATS_ENABLED": "0",
    }


@functools.cache
def cluster() -> Any:
    """A ``ray.cluster_utils.Cluster``, to which this process is connected."""
    folder = Path(tempfile.mkdtemp(prefix="muster-ray-", dir="/tmp"))  # sockets are in there: a short path
    (folder / "token").write_text(secrets.token_hex(32))
    os.environ.update(environment(folder))
    import ray
    from ray._private import authentication_test_utils, ray_constants
    from ray.cluster_utils import Cluster

    authentication_test_utils.reset_auth_token_state()  # Ray may have been imported before
    ray_constants.ENABLE_RAY_CLUSTER = False  # 127.0.0.1 stays what it is
    made = Cluster(initialize_head=True, head_node_args=NODE | {"include_dashboard": False})
    made.folder = folder
    atexit.register(_end, made)
    made.add_node(**NODE)
    ray.init(address=made.address, log_to_driver=False)
    return made


def _end(made: Any) -> None:
    import ray

    ray.shutdown()
    made.shutdown()
    shutil.rmtree(made.folder, ignore_errors=True)


@pytest.fixture
def ray_cluster() -> Any:
    """The cluster; what a test adds to it, the test removes."""
    return cluster()
