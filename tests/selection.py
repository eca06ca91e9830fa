"""Which tests run: the hook that leaves variants out, and marks some as ``slow``.

A suite (``SUITES``) runs every test for many kinds of collectors, environments, engines or faults.
All combinations would take hours. So:

1. A test runs *pairwise*: with as few variants as have every pair of choices of its parameters
   (``_pairwise``). ``MUSTER_TESTS=full`` runs all combinations.
2. ``make test`` runs everything that is not marked ``slow``. Of each test of a suite it has a few
   variants (``SHARE``), other ones for each test, so that every test and every kind is there; the
   others are marked (``_leave_to_the_rest``). ``make test-rest`` runs what is marked.
3. ``MUSTER_TESTS=quick`` leaves out the tests of nodes (``OF_NODES``): they start many processes, or
   need a Ray cluster, several machines (network namespaces) or SLURM.
4. ``MUSTER_TESTS_MINUTES=30`` begins no test later than that: the others are skipped, and counted
   in the summary. CI runs on machines of which some are half as fast as others, in limited time.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

OF_NODES = re.compile(
    r"/test_(links|ray_\w+|rpc_\w+|slurm|hierarchies|elastic|sync_schemes|\w*nodes?\w*|\w*clusters?\w*)\.py"
    r"|::.*(nodes|random_kills|[\[-](ray|rpc)\b)"  # also one engine of a suite that runs on all
)

SUITES = re.compile(
    r"tests/(contract|docs|faults|parity)/"
    r"|/test_(crash_report|cli_\w+|device_lanes|elastic|evaluator|inference_server|joined_batches"
    r"|multi_collectors|resume|rollout|sync_schemes|submitit|torchrl_\w+|whole_episodes)\.py"
)
SHARE = 2  # variants of a test in `make test`; of one that only nodes run, or that starts a program: 1
PROGRAMS = re.compile(
    r"::test_(nothing_outlives|ctrl_c_is_one)_"
)  # some 5 CPU seconds each
ON_RAY = re.compile(r"[\[-]ray\b")
RAY_SHARE = 1  # of the tests of a file that run on Ray, too; each actor takes some 6 CPU seconds to start

MINUTES = "MUSTER_TESTS_MINUTES"
# of the monotonic clock; what processes of `-n` are told
DEADLINE = "MUSTER_TESTS_DEADLINE"


def pytest_configure(config: pytest.Config) -> None:
    minutes = os.environ.get(MINUTES)
    if minutes and not hasattr(config, "workerinput"):
        os.environ[DEADLINE] = str(time.monotonic() + 60 * float(minutes))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    if time.monotonic() > float(os.environ.get(DEADLINE, "inf")):
        pytest.skip(f"not begun in the {os.environ[MINUTES]} minutes of {MINUTES}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    tests: dict[str, list[Any]] = {}
    for item in items:
        if SUITES.search(item.nodeid) and hasattr(item, "callspec"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out: set[Any] = set()
    if os.environ.get("MUSTER_TESTS") != "full":
        for number, (test, variants) in enumerate(tests.items()):
            tests[test] = _pairwise(variants, number)
            left_out.update(set(variants) - set(tests[test]))
    _leave_to_the_rest(tests)
    if os.environ.get("MUSTER_TESTS") == "quick":
        left_out.update(item for item in items if OF_NODES.search(item.nodeid))
    if left_out:
        config.hook.pytest_deselected(
            items=[item for item in items if item in left_out]
        )
        items[:] = [item for item in items if item not in left_out]


def _pairwise(variants: list[Any], turn: int) -> list[Any]:
    """Few variants of a test that have all pairs of choices that all of them have; another one
    first at each turn.
    """
    pairs = {}
    for item in variants:
        choices = [
            choice
            for name, value in item.callspec.params.items()
            for choice in _choices(name, value)
        ]
        pairs[item] = {
            frozenset([one, other])
            for one in choices
            for other in choices
            if one == other or one[0] != other[0]
        }
    missing = set().union(*pairs.values())
    rotated = variants[turn % len(variants) :] + variants[: turn % len(variants)]
    best, kept = rotated[0], set()
    while missing:
        kept.add(best)
        missing -= pairs[best]
        best = max(rotated, key=lambda item: len(pairs[item] & missing))
    return [item for item in variants if item in kept]


def _choices(name: str, value: Any) -> list[tuple[str, Any]]:
    """What a parameter chooses: a name of several words all of them, a record each of its fields."""
    if isinstance(words := getattr(value, "name", None), str):
        return [(name, word) for word in words.split("-")]
    if is_dataclass(value):
        return [
            (f"{name}.{field.name}", repr(getattr(value, field.name)))
            for field in fields(value)
        ]
    return [(name, id(value))]


def _leave_to_the_rest(tests: dict[str, list[Any]]) -> None:
    """Mark all but a few variants of each test ``slow``; the next test keeps the next ones."""
    on_ray: dict[str, int] = {}
    for number, (test, variants) in enumerate(tests.items()):
        variants = [
            item for item in variants if item.get_closest_marker("slow") is None
        ]
        of_ray = {item for item in variants if ON_RAY.search(item.nodeid)}
        file = test.partition("::")[0]
        if on_ray.get(file, 0) >= RAY_SHARE:
            for item in of_ray:
                item.add_marker(pytest.mark.slow)
            variants = [item for item in variants if item not in of_ray]
        share = 1 if OF_NODES.search(test) or PROGRAMS.search(test) else SHARE
        sizes: dict[str, int] = {}
        for item in variants:
            for name, index in item.callspec.indices.items():
                sizes[name] = max(sizes.get(name, 0), index + 1)
        kept: set[Any] = set()
        for turn in range(number * share, (number + 1) * share):
            chosen = {name: turn % size for name, size in sizes.items()}
            left_out = kept | of_ray if on_ray.get(file, 0) >= RAY_SHARE else kept
            rest = [item for item in variants if item not in left_out]
            if rest:
                best = max(rest, key=lambda item: _agreement(item, chosen))
                kept.add(best)
                on_ray[file] = on_ray.get(file, 0) + (best in of_ray)
        for item in variants:
            if item not in kept:
                item.add_marker(pytest.mark.slow)


def _agreement(item: Any, chosen: dict[str, int]) -> int:
    """How many parameters of a variant have the chosen index."""
    return sum(chosen[name] == index for name, index in item.callspec.indices.items())
