"""Which engines run which part of the suites of collectors.

All of them pass all of it (``MUSTER_TEST_KINDS=all``); an ordinary run takes the whole suite for nodes over
torch.distributed, and for the other engines, which differ in their links only, the tests that go through every part of
these. Each Ray actor imports torch, which takes seconds.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

SAMPLED = ("nodes-async-server", "rpc-sync", "rpc-async", "ray-sync", "ray-async")
SAMPLE = (
    "test_keys_shapes_dtypes_and_names",
    "test_the_data_are_those_of_collector",
    "test_set_seed_repeats_the_data_and_returns_the_last_seed",
    "test_in_the_background",
    "test_weights_in_every_form",
    "test_bad_weights_change_nothing",
    "test_every_row_says_which_weights_acted",
    "test_an_error_of_an_environment_is_typed_and_collecting_goes_on_with_the_rows_before_it",
    "test_what_workers_tell_about_themselves",
)
ON_DEMAND_SAMPLED = (*SAMPLED, "nodes-sync-server")


def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    if os.environ.get("MUSTER_TEST_KINDS") == "all":
        return
    left_out = [item for item in items if _is_left_out(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def _is_left_out(item: Any) -> bool:
    kind = getattr(getattr(item, "callspec", None), "params", {}).get("kind")
    name = getattr(kind, "name", "")
    sampled = ON_DEMAND_SAMPLED if item.path.name == "test_on_demand.py" else SAMPLED
    return name in sampled and item.originalname not in SAMPLE
