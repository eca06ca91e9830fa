"""Nodes with ``MUSTER_PRIVATE_NAMES=never``: Ray says what to do."""

from __future__ import annotations

import pytest

from muster.errors import BadOption
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
