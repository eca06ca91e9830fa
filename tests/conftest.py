"""What all tests run under, and which of them an ordinary run leaves out.

``MUSTER_TESTS=all`` runs all: also those of nodes, which start many processes, or need a Ray cluster, several machines
(network namespaces) or SLURM; among them the whole suites of collectors once more for each engine.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

# The same examples in every run, and no clock that fails a test on a busy machine.
settings.register_profile(
    "muster",
    derandomize=True,
    deadline=None,
    max_examples=25,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("muster")


@pytest.fixture(autouse=True, scope="session")
def _temporary_files_here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Crash capsules and the like go where pytest cleans up."""
    before, tempfile.tempdir = tempfile.tempdir, str(tmp_path_factory.mktemp("temporary"))
    yield
    tempfile.tempdir = before


MACHINES = (  # files
    *("test_node_networks.py", "test_slurm.py", "test_rpc_links.py", "test_ray_links.py", "test_ray_buffer.py"),
    *("test_ray_nodes.py", "test_nodes.py", "test_node_faults.py", "test_links.py", "test_hierarchies.py"),
)
WHERE_SLOW = ("test_torchrl_clusters.py", "test_sync_schemes.py", "test_hierarchies.py", "test_seed_clusters.py")
ENGINES = ("ray", "rpc", "ray-sync", "ray-async", "rpc-sync", "rpc-async", "nodes-async-server")


def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    if os.environ.get("MUSTER_TESTS") == "all":
        return
    left_out = {item for item in items if _needs_machines(item)}
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def _needs_machines(item: Any) -> bool:
    file, parameters = item.path.name, getattr(getattr(item, "callspec", None), "params", {})
    engines = {value if isinstance(value, str) else _name(value) for value in parameters.values()}
    return bool(
        file in MACHINES
        or "nodes" in item.nodeid
        or "cluster" in file
        or "ray_cluster" in item.fixturenames
        or (file in WHERE_SLOW and item.get_closest_marker("slow"))
        or "random_kills" in item.name
        or not engines.isdisjoint(ENGINES)
        or (file == "test_on_demand.py" and "nodes-sync-server" in engines)
    )


def _name(value: Any) -> str:
    """Of a kind of collector."""
    return str(value.name) if type(value).__name__ == "Kind" else ""
