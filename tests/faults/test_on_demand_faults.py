"""Workers that die while ``collect`` waits for them: amounts stay exact, and every step is
accounted for.
"""

from __future__ import annotations

import signal
import sys
from functools import partial

import numpy as np
import pytest

from muster import Collector, MultiAsyncCollector, MultiSyncCollector
from muster.errors import EnvError, WorkerDied
from muster.testing import CountingEnv, Fault, OracleEnv
from muster.testing.oracle import follow
from tests.fakes import faults
from tests.fakes.mortal import Mortal
from tests.tools import assert_accounted, assert_balanced

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="kills processes"),
    pytest.mark.filterwarnings("ignore:a worker is dropped"),
]
AMOUNTS = {
    "steps": {"n_step": 80},
    "episodes": {"n_episode": 6},
    "kept": {"n_episode": 7, "rule": "fair", "surplus": "keep"},
    "last_even": {"n_episode": 5, "rule": "last_even", "surplus": "discard"},
}


@pytest.mark.parametrize("amount", AMOUNTS)
@pytest.mark.parametrize("on_failure", ["raise", "restart", "drop"])
@pytest.mark.parametrize("cls", [MultiSyncCollector, MultiAsyncCollector])
def test_amounts_stay_exact_when_a_worker_is_killed(tmp_path, cls, on_failure, amount):
    mark, asked, raised = tmp_path / "died", AMOUNTS[amount], []
    with cls(
        [partial(CountingEnv, 3), partial(Mortal, 5, mark, at=7)],
        None,
        num_envs=2,
        on_failure=on_failure,
    ) as c:
        for _ in range(4):
            try:
                stats = c.collect(**asked)
            except WorkerDied as error:
                raised.append((error.phase, error.exitcode))
            else:
                dropped = (
                    on_failure == "drop"
                    and cls is MultiSyncCollector
                    and stats.n_discarded_steps
                )
                if "n_step" in asked:
                    assert stats.n_collected_steps == asked["n_step"] // (
                        2 if dropped else 1
                    )
                else:
                    assert stats.n_collected_episodes == asked["n_episode"]
                    assert stats.n_collected_steps == len(c.buffer) == stats.lens.sum()
                assert {*stats.lens.tolist()} <= {3, 5}
                assert (stats.returns == stats.lens * (stats.lens + 1) / 2).all()
            assert_accounted(c)
    assert mark.exists()
    assert raised == [("step", -signal.SIGKILL)] * (on_failure == "raise")
    assert c.stats().discarded["worker_died"] > 0
    assert_accounted(c)


CALLS = {
    "episodes": lambda collector: collector.collect_batch(n_episode=1).batch,
    "steps": lambda collector: collector.collect_batch(n_step=16).batch,
    "next": lambda collector: collector.next(),
    "rollout": lambda collector: collector.rollout(),
}


@pytest.mark.parametrize("at", [0, 1, 5])
@pytest.mark.parametrize("then", CALLS)
@pytest.mark.parametrize("first", CALLS)
def test_another_call_after_one_that_failed_has_rows_of_all_its_environments(
    tmp_path, first, then, at
):
    """What chosen episodes leave out must not be missing in a batch of all."""
    fault = Fault(faults.Raising(RuntimeError), at=at)
    factory = partial(OracleEnv, tmp_path / "counts", 0, 2, fault)
    with Collector(factory, None, num_envs=2, frames_per_batch=16, seed=1) as collector:
        with pytest.raises(EnvError):
            CALLS[first](collector)
        collector.env[1].fault = None
        batch = CALLS[then](collector)
        obs, action, after = (
            batch[key].numpy()
            for key in ("observation", "action", ("next", "observation"))
        )
        assert (np.stack(follow(np.moveaxis(obs, -1, 0), action)[0], -1) == after).all()
        assert then == "episodes" or set(
            batch["observation"][..., 0].unique().tolist()
        ) == {0, 1}
        assert_accounted(collector)


def test_a_call_that_failed_goes_on_where_it_stopped_when_it_is_repeated(tmp_path):
    factories = [partial(CountingEnv, 4), partial(Mortal, 20, tmp_path / "died", at=50)]
    with MultiSyncCollector(
        factories, None, num_envs=1, frames_per_batch=32
    ) as collector:
        with pytest.raises(WorkerDied):
            collector.collect(n_episode=12, rule="fair")
        before = collector.stats()
        stats = collector.collect(n_episode=12, rule="fair")
        after = collector.stats()
    assert stats.lens.tolist().count(20) == 6
    assert before.in_flight > 2 * 20  # two of the long ones were complete
    assert after.executed - before.executed < 5 * 20 * 2
    assert after.discarded.keys() <= {
        "worker_died",
        "surplus",
        "cut",
    }  # the last one: of the episode it died in
    assert_balanced(after)
