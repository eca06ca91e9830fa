"""What all tests run under. ``tests/selection.py`` says which tests run, ``tests/scheduling.py`` in
which process.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.scheduling import pytest_xdist_make_scheduler  # noqa: F401 (a hook)
from tests.selection import (  # noqa: F401 (hooks)
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_runtest_setup,
)

# Tianshou compiles its helpers in every process that imports it, which takes 6 to 15 seconds of CPU
# time each; the same functions as plain Python give the same numbers.
os.environ.setdefault("NUMBA_DISABLE_JIT", "1")

try:
    import torch
except ImportError:
    # Python versions without a CPU build of torch: scripts/pythons.py runs what needs none
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


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """What the collection of tests imports and makes (a million objects) stays to the end.

    The garbage collector looks at none of it: neither now, which takes a third of the time, nor
    whenever a test calls ``gc.collect()``, which would take 0.7 seconds of CPU time each.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


class _FailuresAtOnce:
    """Writes the name of what has failed: a run that is killed, or hangs, has no summary."""

    def __init__(self, reporter: Any) -> None:
        self._reporter = reporter

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._reporter.write_line(f"\n{report.nodeid} has failed ({report.when})")


def pytest_sessionstart(session: pytest.Session) -> None:
    plugins = session.config.pluginmanager
    reporter = plugins.get_plugin("terminalreporter")
    if reporter is not None:  # there is none in the processes of `-n`
        plugins.register(_FailuresAtOnce(reporter))


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
    before, tempfile.tempdir = (
        tempfile.tempdir,
        str(tmp_path_factory.mktemp("temporary")),
    )
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
