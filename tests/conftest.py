"""What all tests run under, and in which of the two processes of ``make test`` each of them runs.

The tests of nodes have a process of their own (``pytest -n 2 --dist loadgroup``): Ray, gloo and RPC start threads and
open files in it that others would count. These tests start many processes, or need a Ray cluster, several machines
(network namespaces) or SLURM; among them are the whole suites of collectors once more for each engine.
``MUSTER_TESTS=quick`` leaves them out.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

try:
    import torch
except ImportError:  # Python versions without a CPU build of torch: scripts/pythons.py runs what needs none
    pass
else:
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


@pytest.fixture(autouse=True, scope="module")
def _ray_is_left() -> Iterator[None]:
    """A connection to Ray's cluster lasts no longer than the tests of the file that has made it."""
    yield
    if (module := sys.modules.get("tests.fakes.ray_cluster")) is not None:
        module.leave()


OF_NODES = re.compile(
    r"/test_(links|rpc_links|ray_\w+|slurm|hierarchies|elastic|sync_schemes|\w*nodes?\w*|\w*clusters?\w*)\.py"
    r"|::.*(nodes|random_kills|[\[-](ray|rpc)\b)"  # also one engine of a suite that runs on all
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    if os.environ.get("MUSTER_TESTS") != "quick":
        return
    left_out = [item for item in items if OF_NODES.search(item.nodeid)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not OF_NODES.search(item.nodeid)]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For ``pytest -n 2``; another ``--dist`` is left alone."""
    if config.getvalue("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Apart(LoadScopeScheduling):  # type: ignore[misc]
        """One process takes all that are not of nodes, which come first, being the most; the others take the rest."""

        def _split_scope(self, nodeid: str) -> str:
            return nodeid.partition("::")[0] if OF_NODES.search(nodeid) else "others"

    return Apart(config, log)
