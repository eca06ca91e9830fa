"""Which process of ``pytest -n`` runs which tests."""

from __future__ import annotations

import pytest

from tests.scheduling import kind_of, kinds_for


@pytest.mark.parametrize(
    ("test", "kind"),
    [
        ("tests/unit/test_spaces.py::test_a[Box]", "any"),
        ("tests/contract/test_collectors.py::test_a[sync]", "any"),
        ("tests/contract/test_collectors.py::test_a[ray-sync]", "ray"),
        ("tests/contract/test_collectors.py::test_a[rpc-sync]", "nodes"),
        ("tests/contract/test_links.py::TestLost::test_a[direct]", "nodes"),
        ("tests/contract/test_links.py::TestLost::test_a[ray]", "ray"),
        ("tests/unit/test_ray_nodes.py::test_a", "ray"),
        ("tests/unit/test_memory.py::test_a", "counts"),
        ("tests/faults/test_worker_deaths.py::test_a[sync]", "counts"),
        ("tests/faults/test_worker_deaths.py::test_a[sync_nodes]", "nodes"),
    ],
)
def test_kinds_of_tests(test: str, kind: str) -> None:
    assert kind_of(test) == kind


@pytest.mark.parametrize("processes", range(1, 9))
def test_every_kind_has_a_process_and_those_that_count_are_apart_from_nodes(
    processes: int,
) -> None:
    kinds = [kinds_for(number, processes) for number in range(processes)]
    assert {kind for each in kinds for kind in each} == {
        "counts",
        "nodes",
        "ray",
        "any",
    }
    assert all("any" in each for each in kinds)
    if processes > 1:
        assert not any(
            "counts" in each and {"nodes", "ray"} & {*each} for each in kinds
        )
    last = [kinds_for(number, processes, counting=False) for number in range(processes)]
    assert all({*each} >= {"any", "nodes", "ray"} for each in last)
    assert kinds_for(processes, processes) == [
        "counts",
        "nodes",
        "ray",
        "any",
    ]  # replaces another
