"""Every parameter of a collector has a place on its page."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import muster

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_every_parameter_of_a_collector_in_this_process_or_with_workers_has_a_group(
    monkeypatch,
):
    monkeypatch.syspath_prepend(DOCS)
    monkeypatch.delitem(sys.modules, "builder", raising=False)
    from builder.parameters import GROUPS

    named = [name for names in GROUPS.values() for name in names]
    assert len(named) == len(set(named))
    given = {
        name
        for cls in (
            muster.Collector,
            muster.MultiSyncCollector,
            muster.MultiAsyncCollector,
        )
        for name in inspect.signature(cls).parameters
    }
    assert given == set(named)
