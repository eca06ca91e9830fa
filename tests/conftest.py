"""What all tests run under, what ``make test`` leaves to ``make test-rest``, and in which of two
processes tests run.

Suites that run every test for many kinds of collectors, environments or faults (``SUITES``) run it
pairwise: with as few variants as have every pair of what the parameters can be. A collector is a
class, a place for its workers and one for the policy; not every combination of them runs every
test. ``MUSTER_TESTS=full`` runs the products.

``make test`` has all but what is marked ``slow``, by hand or here: suites run each test for a few
variants, other ones for each test, so that every kind and every test is there. ``make test-rest``
runs what is marked, ``make test-all`` everything.

The tests of nodes have a process of their own (``pytest -n 2``): Ray and gloo start threads and
open files in it that others would count. These tests start many processes, or need a Ray cluster,
several machines (network namespaces) or SLURM; among them are the whole suites of collectors once
more for each engine. ``MUSTER_TESTS=quick`` leaves them out. The other process runs what counts
(``COUNTS``) and all other files; files that do not mind are for whichever process has nothing else
to do.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Tianshou compiles its helpers in every process that imports it, which takes 6 to 15 seconds of CPU
# time each; the same functions as plain Python give the same numbers.
os.environ.setdefault("NUMBA_DISABLE_JIT", "1")

try:
    import torch
except (
    ImportError
):  # Python versions without a CPU build of torch: scripts/pythons.py runs what needs none
    pass
else:
    torch.set_num_threads(1)

# Shells start what runs in the background with Ctrl-C ignored, and what the tests start would
# inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

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


@pytest.fixture
def closing() -> Iterator[Callable[[Any], Any]]:
    """A function that returns what is passed to it, and closes it after the test.

    The garbage collector may find an open socket while code of Muster runs, and then another test
    fails.
    """
    with contextlib.ExitStack() as at_the_end:
        yield lambda opened: at_the_end.enter_context(contextlib.closing(opened))


@pytest.fixture(autouse=True, scope="session")
def _temporary_files_here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Crash reports and the like go where pytest cleans up."""
    before, tempfile.tempdir = tempfile.tempdir, str(tmp_path_factory.mktemp("temporary"))
    yield
    tempfile.tempdir = before


@pytest.fixture(autouse=True, scope="session")
def _fork_servers_import_pytest() -> None:
    """Workers import the modules of tests; pytest and hypothesis are imported once, not by each
    worker.
    """
    if (launch := sys.modules.get("muster.workers.launch")) is not None:
        launch.PRELOADED += ("pytest", "hypothesis")


@pytest.fixture(autouse=True, scope="module")
def _ray_is_left() -> Iterator[None]:
    """A connection to Ray's cluster lasts no longer than the tests of the file that has made it."""
    yield
    if (module := sys.modules.get("tests.fakes.ray_cluster")) is not None:
        module.leave()


OF_NODES = re.compile(
    r"/test_(links|ray_\w+|rpc_\w+|slurm|hierarchies|elastic|sync_schemes|\w*nodes?\w*|\w*clusters?\w*)\.py"
    r"|::.*(nodes|random_kills|[\[-](ray|rpc)\b)"  # also one engine of a suite that runs on all
)


COUNTS = re.compile(  # threads, files, memory; or forks this process
    r"/faults/|/test_(weight_transports|cli|inference_server|lines|loggers|memory|multi_collectors|oracle|processes"
    r"|recording|shared_memory)\.py"
)
SUITES = re.compile(
    r"tests/(contract|docs|faults|parity)/"
    r"|/test_(crash_report|cli_\w+|device_lanes|elastic|evaluator|inference_server|joining|multi_collectors|resume|rollout"
    r"|sync_schemes|submitit|seed_\w+|torchrl_\w+|whole_episodes)\.py"
)
SHARE = (
    2  # variants of a test in `make test`; of one that only nodes run, or that starts a program: 1
)
PROGRAMS = re.compile(r"::test_(nothing_outlives|ctrl_c_is_one)_")  # some 5 CPU seconds each
ON_RAY = re.compile(r"[\[-]ray\b")
RAY_SHARE = (
    1  # of the tests of a file that run on Ray, too; each actor takes some 6 CPU seconds to start
)


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
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
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
            (f"{name}.{field.name}", repr(getattr(value, field.name))) for field in fields(value)
        ]
    return [(name, id(value))]


def _leave_to_the_rest(tests: dict[str, list[Any]]) -> None:
    """Mark all but a few variants of each test ``slow``; the next test keeps the next ones."""
    on_ray: dict[str, int] = {}
    for number, (test, variants) in enumerate(tests.items()):
        variants = [item for item in variants if item.get_closest_marker("slow") is None]
        file = test.partition("::")[0]
        if on_ray.get(file, 0) >= RAY_SHARE:
            for item in variants:
                if ON_RAY.search(item.nodeid):
                    item.add_marker(pytest.mark.slow)
            variants = [item for item in variants if not ON_RAY.search(item.nodeid)]
        share = 1 if OF_NODES.search(test) or PROGRAMS.search(test) else SHARE
        sizes: dict[str, int] = {}
        for item in variants:
            for name, index in item.callspec.indices.items():
                sizes[name] = max(sizes.get(name, 0), index + 1)
        kept: list[Any] = []
        for turn in range(number * share, (number + 1) * share):
            chosen = {name: turn % size for name, size in sizes.items()}
            full = on_ray.get(file, 0) >= RAY_SHARE
            rest = [
                item
                for item in variants
                if item not in kept and not (full and ON_RAY.search(item.nodeid))
            ]
            if rest:
                kept.append(
                    max(rest, key=lambda item: len(chosen.items() & item.callspec.indices.items()))
                )
                on_ray[file] = on_ray.get(file, 0) + bool(ON_RAY.search(kept[-1].nodeid))
        for item in variants:
            if item not in kept:
                item.add_marker(pytest.mark.slow)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For ``pytest -n 2``; another ``--dist`` is left alone."""
    if config.getvalue("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Apart(LoadScopeScheduling):  # type: ignore[misc]
        """By file.

        The last process begins with the tests of nodes, the others with those that count.
        """

        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            kind = (
                "nodes" if OF_NODES.search(nodeid) else "counts" if COUNTS.search(file) else "any"
            )
            return f"{kind}: {file}"

        def _assign_work_unit(self, node: Any) -> None:
            processes = list(self.assigned_work)
            if len(processes) > 1:
                first, not_here = (
                    ("nodes", "counts") if node is processes[-1] else ("counts", "nodes")
                )
                suitable = [scope for scope in self.workqueue if not scope.startswith(not_here)]
                if not suitable:
                    node.shutdown()
                    return
                best = min(suitable, key=lambda scope: not scope.startswith(first))
                self.workqueue.move_to_end(best, last=False)
            super()._assign_work_unit(node)

    return Apart(config, log)
