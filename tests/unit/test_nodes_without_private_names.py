"""Nodes with ``MUSTER_PRIVATE_NAMES=never``: Ray and torch RPC say what to do."""

from __future__ import annotations

import pytest
import torch

from muster import RPCCollector
from muster.errors import BadOption
from muster.testing import CountingEnv
from muster.utils.private_names import VARIABLE


@pytest.fixture(autouse=True)
def _never(monkeypatch):
    monkeypatch.setenv(VARIABLE, "never")


def test_ray_is_not_started_but_used_where_it_runs():
    ray = pytest.importorskip("ray")
    from muster.cluster.ray_runtime import Lease

    assert not ray.is_initialized()
    with pytest.raises(BadOption, match=r"loopback only.*Call ray\.init\(\) before"):
        Lease({"address": "local"})
    assert not ray.is_initialized()


def test_torch_rpc_is_refused():
    if not torch.distributed.rpc.is_available():
        pytest.skip("this PyTorch has no RPC")
    with pytest.raises(BadOption, match="private names of torch.*transport='direct'"):
        RPCCollector([CountingEnv], None, frames_per_batch=10, launcher="mp")
