"""``max_decorrelation_steps``: random steps before the first batch, so that environments are at
different places.
"""

from __future__ import annotations

import signal
import sys
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from muster import Collector, MultiAsyncCollector, MultiSyncCollector
from muster.errors import BadOption, EnvError, WorkerDied
from muster.policies import categorical
from muster.testing import (
    ChainEnv,
    CountingEnv,
    Fault,
    FaultyEnv,
    OracleEnv,
    TorchCartPole,
)
from tests.fakes import faults
from tests.tools import assert_accounted, assert_chain, assert_same, counting, recorded


def times(batch: Any) -> Any:
    """Of the first row."""
    return batch["observation"][..., 0, 1].int().tolist()


def never(obs: torch.Tensor) -> torch.Tensor:
    raise AssertionError("the policy was called")


def test_environments_begin_after_one_to_so_many_steps():
    make, made = recorded(lambda: CountingEnv(100))
    with Collector(
        make, None, num_envs=64, frames_per_batch=64, max_decorrelation_steps=5, seed=0
    ) as c:
        assert not any(env.executed for env in made)
        first = c.rollout()
        began = Counter(times(first))
        assert set(began) == {1, 2, 3, 4, 5}
        assert min(began.values()) > 4
        stats, steps = c.stats(), sum(times(first))
        assert (stats.executed, stats.frames, stats.discarded) == (
            steps + 64,
            64,
            {"decorrelation": steps},
        )
        assert [env.executed - 1 for env in made] == times(first)
        assert times(c.rollout()) == [t + 1 for t in times(first)]
        assert c.stats().discarded == {"decorrelation": steps}


def test_what_ends_is_dropped_and_what_goes_on_keeps_its_steps_and_rewards():
    make, made = recorded(lambda: CountingEnv(4))
    with Collector(
        make, None, num_envs=8, frames_per_batch=32, max_decorrelation_steps=9, seed=2
    ) as c:
        batch = c.rollout()
        before = [env.executed - 4 for env in made]
        assert max(before) > 4
        assert times(batch) == [n % 4 for n in before]
        ids = batch["collector", "traj_ids"][:, 0].tolist()
        assert ids == [env + 8 * (n // 4) for env, n in enumerate(before)]
        assert {(e.length, e.episode_return) for e in c.episodes} == {(4, 10.0)}
        assert len(c.episodes) == 8
        assert_accounted(c)


def test_the_policy_is_not_called_and_draws_what_it_would_draw():
    def drawn(**options: Any) -> Any:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(2, 2))
        torch.nn.init.zeros_(net[0].weight)
        with Collector(
            counting(100),
            categorical(net),
            num_envs=3,
            frames_per_batch=30,
            seed=4,
            **options,
        ) as c:
            return c.rollout()["action"].tolist()

    assert drawn() == drawn(max_decorrelation_steps=7)
    with Collector(
        counting(100), never, frames_per_batch=3, max_decorrelation_steps=7
    ) as c:
        with pytest.raises(Exception, match="the policy was called"):
            c.rollout()
        assert c.env.executed > 0


@pytest.mark.parametrize(
    "wait",
    [{}, {"reset_when_done": False}, {"compact_obs": True}, {"set_truncated": True}],
)
@pytest.mark.parametrize("kind", ["stacked", "vector"])
def test_it_is_the_same_with_every_option_and_kind_of_batch(kind, wait):
    def make() -> Any:
        return SyncVectorEnv([partial(ChainEnv, 6)] * 4)

    stacked = {"num_envs": 4} if kind == "stacked" else {}
    env = partial(ChainEnv, 6) if stacked else make
    options = {
        "frames_per_batch": 40,
        "max_decorrelation_steps": 8,
        "seed": 3,
        "track_policy_version": True,
    }
    with Collector(env, None, **stacked, **options, **wait) as c:
        first = c.rollout()
        if not wait:
            assert_chain(first, 6)
        assert len(set(first["observation"][:, 0, 1].tolist())) > 1
        assert c.stats().discarded["decorrelation"] > 4
        c.rollout()
        assert_accounted(c)


# --- seeds, states, workers -----------------------------------------------------------------------


@settings(max_examples=10, deadline=None)
@given(
    workers=st.integers(1, 3),
    backend=st.sampled_from(["threads", "threads", "processes"]),
    wait=st.booleans(),
    envs=st.integers(1, 3),
)
def test_workers_make_the_same_steps(workers, backend, wait, envs):
    options = {
        "num_envs": envs,
        "frames_per_batch": 12 * envs,
        "max_decorrelation_steps": 9,
        "seed": 6,
    }
    runs = []
    for cls, more in (
        (Collector, {}),
        (MultiSyncCollector, {"num_workers": workers, "backend": backend}),
    ):
        with cls(
            [partial(ChainEnv, 5)] * 3,
            None,
            reset_when_done=not wait,
            **options,
            **more,
        ) as c:
            runs.append([c.next().clone() for _ in range(3)])
            stats = c.stats()
            runs[-1].append((stats.executed, stats.discarded))
            assert_accounted(c)
    assert runs[0].pop() == runs[1].pop()
    for a, b in zip(*runs, strict=True):
        assert_same(a, b)


def first_rows(collector: Any, seeds: list[int]) -> list[Any]:
    rows = []
    for seed in seeds:
        collector.set_seed(seed)
        rows.append(collector.rollout()["observation"][..., 0, :].tolist())
    return rows


def test_a_seed_before_the_first_batch_begins_it_anew_and_later_ones_do_not():
    def make(**more: Any) -> Collector:
        options = {"num_envs": 5, "frames_per_batch": 5, "max_decorrelation_steps": 9}
        return Collector(partial(CountingEnv, 20, noise=True), None, **options, **more)

    with make(seed=8) as a, make() as b, make(seed=8) as plain:
        assert (
            first_rows(a, [8])[0] == plain.rollout()["observation"][..., 0, :].tolist()
        )
        began, later = first_rows(b, [8, 9])
        assert [row[1] for row in later] == [0] * 5
        assert [row[1] for row in began] != [0] * 5


def test_a_worker_that_begins_again_makes_random_steps_again():
    env = partial(FaultyEnv, 30, error=RuntimeError, length=100)
    options = {
        "frames_per_batch": 10,
        "max_decorrelation_steps": 9,
        "seed": 0,
        "on_failure": "restart",
    }
    with MultiAsyncCollector([env], None, backend="threads", **options) as c:
        first, *_ = batches = [c.next().clone() for _ in range(8)]
        stats = c.stats()
        assert_accounted(c)
    again = next(batch for batch in batches if batch["collector", "traj_ids"][0] == 1)
    assert stats.workers[0].restarts > 0
    assert first["observation"][0, 1] > 0
    assert again["observation"][0, 1] > 0
    assert (
        stats.discarded["decorrelation"]
        >= first["observation"][0, 1] + again["observation"][0, 1]
    )


# --- what goes wrong ------------------------------------------------------------------------------


def test_an_error_on_the_way_is_raised_and_begins_anew():
    make, made = recorded(
        lambda i: FaultyEnv(
            3 if i else 99, error=lambda: ValueError("as asked"), length=50
        )
    )
    with Collector(
        make, None, num_envs=2, frames_per_batch=8, max_decorrelation_steps=40, seed=0
    ) as c:
        with pytest.raises(EnvError, match="as asked"):
            c.rollout()
        batch = c.rollout()
        assert min(times(batch)) > 0
        assert made[1].steps > made[1].executed
        assert_accounted(c)


def test_devices_and_resets_before_every_batch_are_refused():
    with pytest.raises(BadOption, match="at once on a device"):
        Collector(
            lambda: TorchCartPole(4),
            None,
            frames_per_batch=8,
            max_decorrelation_steps=3,
        )
    with pytest.raises(BadOption, match="give one of them"):
        Collector(
            counting(),
            None,
            frames_per_batch=8,
            max_decorrelation_steps=3,
            reset_at_each_iter=True,
        )
    for wrong in (-1, 2.5, None, True):
        with pytest.raises(BadOption, match="max_decorrelation_steps"):
            Collector(
                counting(), None, frames_per_batch=8, max_decorrelation_steps=wrong
            )


@pytest.mark.skipif(sys.platform != "linux", reason="kills processes")
def test_a_death_in_the_first_batch_counts_the_random_steps(tmp_path):
    env = partial(
        OracleEnv,
        tmp_path / "counts",
        fault=Fault(faults.Signalled(signal.SIGKILL), at=25),
    )
    with MultiSyncCollector(
        [env], None, frames_per_batch=40, max_decorrelation_steps=9, seed=0
    ) as c:
        with pytest.raises(WorkerDied):
            c.next()
        assert c.stats().discarded == {"worker_died": 25}
        c.next()
        assert_accounted(c)
        assert c.stats().executed == OracleEnv.read(tmp_path / "counts")[:, 2].sum()
        assert c.stats().discarded["decorrelation"] > 0


def test_legal_actions_of_random_steps_are_not_those_of_the_policy():
    """Agents with action masks draw random actions in ``step``; only while actions are random."""
    pytest.importorskip("pettingzoo")
    from tests.unit.test_pettingzoo import Shifts

    def ones(tensordict):
        for name, agents in (("cook", 2), ("waiter", 1)):
            tensordict[name, "action"] = torch.ones(agents, dtype=torch.int64)
        return tensordict

    with Collector(
        lambda: Shifts(masks="info"),
        ones,
        frames_per_batch=12,
        max_decorrelation_steps=3,
        seed=0,
    ) as c:
        batch = c.rollout()
    assert (batch["cook", "action"] == 1).all()
    assert (batch["waiter", "action"] == 1).all()
