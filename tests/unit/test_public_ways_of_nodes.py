"""Nodes with ``MUSTER_PRIVATE_NAMES=never``: RPC and Ray say what to do."""

from __future__ import annotations

import pytest

from muster.errors import BadOption
from muster.utils.private_names import VARIABLE


@pytest.fixture(autouse=True)
def _never(monkeypatch):
    monkeypatch.setenv(VARIABLE, "never")


def test_rpc_names_the_collectors_that_can_do_it():
    from muster.cluster.torch_rpc import check_rpc

    with pytest.raises(BadOption, match=r"RPCCollector.*private names of torch.*DistributedCollector"):
        check_rpc()


def test_ray_is_not_started_but_used_where_it_runs():
    ray = pytest.importorskip("ray")
    from muster.cluster.ray_runtime import Lease

    assert not ray.is_initialized()
    with pytest.raises(BadOption, match=r"loopback only.*Call ray\.init\(\) before"):
        Lease({"address": "local"})
    assert not ray.is_initialized()
