"""Nodes that import another Muster than the main process: one typed error that names both, at once,
with every engine, and no restart.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import muster
from muster import DistributedCollector, RayCollector, RPCCollector
from muster.cluster import rpc_nodes
from muster.cluster.rendezvous import Rendezvous
from muster.cluster.versions import RECORDS, difference, installed
from muster.errors import VersionMismatch
from muster.testing import CountingEnv
from tests.fakes.ray_cluster import cluster, needs_ray
from tests.waits import wait_until

HERE = Path(muster.__file__).parent
SECRET = "a secret of this test"
ENGINES = ["torch_distributed", "direct"]
if torch.distributed.rpc.is_available():
    ENGINES.append("rpc")


@pytest.fixture
def other(tmp_path):
    """A folder with another Muster, which differs in nothing but its version."""
    package = tmp_path / "muster"
    package.mkdir()
    for entry in HERE.iterdir():
        if entry.name not in ("__init__.py", "__pycache__"):
            (package / entry.name).symlink_to(entry)
    text = (HERE / "__init__.py").read_text()
    changed = text.replace(f'"{muster.__version__}"', '"0.0.9"')
    assert changed != text
    (package / "__init__.py").write_text(changed)
    return tmp_path


def program(folder, address):
    """A node of the Muster in this folder, as ``muster node`` starts it."""
    return subprocess.Popen(
        [sys.executable, "-m", "muster", "node", address],
        env={**os.environ, "PYTHONPATH": str(folder), "MUSTER_TOKEN": SECRET},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def manual(engine, port, **options):
    cls = RPCCollector if engine == "rpc" else DistributedCollector
    return cls(
        [CountingEnv],
        launcher="manual",
        transport=engine,
        tcp_port=port,
        token=SECRET.encode(),
        frames_per_batch=8,
        **options,
    )


def free_port():
    found = Rendezvous(1)
    port = int(found.address.rpartition(":")[2])
    found.close()
    return port


def assert_names_both(text, folder):
    assert "Muster 0.0.9" in text
    assert str(folder / "muster") in text
    assert f"Muster {muster.__version__}" in text
    assert str(HERE) in text
    assert "Install the same version" in text


@pytest.mark.slow
@pytest.mark.parametrize("on_failure", ["raise", "restart"])
@pytest.mark.parametrize("engine", ENGINES)
def test_of_a_node_that_joins(other, engine, on_failure):
    port = free_port()
    node = program(other, f"127.0.0.1:{port}")
    try:
        with pytest.raises(VersionMismatch) as caught:
            manual(engine, port, on_failure=on_failure)
        assert_names_both(str(caught.value), other)
        said, _ = node.communicate(timeout=60)
        assert node.returncode not in (0, None)
        assert_names_both(said, other)
        assert "Traceback" not in said
    finally:
        node.kill()
        node.communicate()


@pytest.mark.slow
def test_of_a_node_that_joins_late_is_raised_once_and_not_restarted(other):
    port = free_port()
    right = program(HERE.parent, f"127.0.0.1:{port}")
    wrong = None
    try:
        with DistributedCollector(
            [CountingEnv] * 2,
            launcher="manual",
            tcp_port=port,
            token=SECRET.encode(),
            frames_per_batch=8,
            min_nodes=1,
            on_failure="restart",
        ) as collector:
            collector.next()
            wrong = program(other, f"127.0.0.1:{port}")
            deadline = time.monotonic() + 100
            with pytest.raises(VersionMismatch) as caught:
                while time.monotonic() < deadline:
                    collector.next()
            assert_names_both(str(caught.value), other)
            assert collector.stats().restarts == 0
            collector.next()  # of the node that fits
    finally:
        for node in (right, wrong):
            if node is not None:
                node.kill()
                node.communicate()


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize("transport", ["ray", "direct"])
def test_of_an_actor(other, transport):
    cluster()
    path = os.pathsep.join([str(other), str(HERE.parent)])
    room = {"num_cpus": 1, "memory": 2**28}
    configs = {**room, "runtime_env": {"env_vars": {"PYTHONPATH": path}}}
    with pytest.raises(VersionMismatch) as caught:
        RayCollector(
            [CountingEnv],
            frames_per_batch=8,
            transport=transport,
            remote_configs=configs,
            on_failure="restart",
        )
    assert_names_both(str(caught.value), other)


@pytest.mark.skipif("rpc" not in ENGINES, reason="no torch RPC")
def test_of_a_worker_of_the_users_rpc_agent():
    main = {**installed(), "version": "0.0.9", "path": "/elsewhere/muster"}
    threads = threading.active_count()
    why, here = rpc_nodes.start("main", "session", 0, 1.0, "no:thing", main)
    assert here == installed()
    assert "Muster 0.0.9 in /elsewhere/muster" in why
    assert f"Muster {muster.__version__} in {HERE}" in why
    # those that other tests have left may end meanwhile
    wait_until(lambda: threading.active_count() <= threads)


class TestDifference:
    def test_of_the_same(self):
        assert difference(installed(), dict(installed())) == ""
        elsewhere = {**installed(), "path": "/elsewhere", "host": "another"}
        assert difference(installed(), elsewhere) == ""

    @pytest.mark.parametrize("key", ["version", "protocol"])
    def test_of_what_messages_depend_on(self, key):
        assert "(protocol" in difference(installed(), {**installed(), key: "other"})
        assert "(protocol" in difference({**installed(), key: "other"}, installed())

    def test_of_files_that_have_changed_meanwhile(self):
        later = {**installed(), "protocol": "later"}
        why = difference(installed(), later)
        assert "protocol later" in why
        assert f"protocol {installed()['protocol']}" in why
        assert "have changed since" in why
        assert "Start it again" in why

    def test_of_a_version_that_says_nothing(self):
        assert "does not say its version" in difference(installed(), None)
        assert "does not say its version" in difference(None, installed())

    def test_protocol_is_that_of_all_records(self):
        names = {record.__name__ for record in RECORDS}
        assert {"NodeSetup", "Told", "RolloutRequest", "PoolConfig"} <= names
        assert len(installed()["protocol"]) == 8
