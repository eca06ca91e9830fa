"""Whatever environments and policies raise: what was executed is known from where the code was, and
nothing else.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import pytest

from muster import Collector, MultiSyncCollector
from muster.errors import BadPolicyOutput, EnvError, MusterError, PolicyError
from muster.testing import Fault, OracleEnv, check_stream
from tests.fakes import faults
from tests.fakes.foreign import ALL, BASES, T, Troubled
from tests.fakes.foreign_policy import TroubledPolicy
from tests.tools import assert_balanced

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="no worker processes"),
]

BACKENDS: dict[str, dict[str, Any]] = {
    "in process": {},
    "threads": {"backend": "threads"},
    "processes": {"backend": "processes"},
    "threads, served": {"backend": "threads", "inference": "server"},
    "processes, served": {"backend": "processes", "inference": "server"},
}
PLACES = {"step": EnvError, "reset": EnvError, "policy": PolicyError}


def collector_of(path: Any, place: str, policy: Any, backend: str) -> Any:
    kind = Collector if backend == "in process" else MultiSyncCollector
    factories = [partial(Troubled, str(path), first, place) for first in (0, 2)]
    options = {
        "frames_per_batch": 4 * T,
        "num_envs": 2,
        "seed": 1,
        "crash_dir": path.parent / "crashes",
    }
    if kind is Collector:
        del options["crash_dir"]
    return kind(factories, policy, **options, **BACKENDS[backend])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("place", PLACES)
def test_whatever_is_raised_no_pair_is_wrong_and_every_step_is_counted(
    tmp_path, place, backend
):
    policy = TroubledPolicy() if place == "policy" or "served" in backend else None
    if policy is not None and place != "policy":
        policy.raised = len(ALL)
    batches, raised = [], []
    with collector_of(tmp_path / "counts", place, policy, backend) as collector:
        while len(raised) < len(ALL) or len(batches) < 3:
            try:
                batches.append(collector.rollout().clone())
            except BaseException as error:  # noqa: BLE001 (as it comes)
                raised.append(error)
                stats = collector.stats()
                assert_balanced(stats)
                assert len(raised) <= len(ALL), raised[-1]
            assert len(batches) < 60, f"{len(raised)} of {len(ALL)}"
        batches.append(collector.rollout().clone())
    stats = collector.stats()
    check_stream(batches, gaps=sum(stats.discarded.values()))
    assert stats.executed == OracleEnv.read(tmp_path / "counts")[:, 2].sum(), (
        "as the environments have counted"
    )
    assert_balanced(stats, in_flight=0)
    if place == "policy":
        assert sum(stats.discarded.values()) == 0
    elif place == "step":  # environment 0 was stepped in each of these rows
        assert sum(stats.discarded.values()) == len(ALL)
    for name, error in zip(ALL, raised, strict=True):
        if backend == "in process" and name in BASES:
            assert not isinstance(error, Exception), name
            continue
        expected = (
            BadPolicyOutput
            if place == "policy" and name == "BadPolicyOutput"
            else PLACES[place]
        )
        assert isinstance(error, MusterError), name
        assert issubclass(type(error), expected), (name, type(error), error)
        assert error.phase == place, (name, error.phase)


def test_an_exit_in_a_reset_that_nobody_waits_for_is_raised_by_the_next_rollout(
    tmp_path,
):
    fault = Fault(faults.Raising(partial(SystemExit, 3)), "reset", at=1)
    options = {
        "frames_per_batch": T,
        "backend": "threads",
        "reset_when_done": False,
        "seed": 1,
    }
    with MultiSyncCollector(
        [partial(OracleEnv, tmp_path / "counts", 0, 1, fault)], None, **options
    ) as collector:
        collector.next()  # to the end of the first episode
        with pytest.raises(EnvError, match="SystemExit was raised: 3") as caught:
            collector.next()
        assert caught.value.phase == "reset"
        collector.next()
        assert collector.stats().restarts == 0
