"""The loop: exact rows whatever the batches, the limits and the resets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

import muster
from muster import Collector
from muster.testing import ChainEnv, CountingEnv
from tests.tools import (
    assert_accounted,
    assert_chain,
    assert_same,
    collect,
    column,
    counting,
    recorded,
)


def choose(obs: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A stochastic policy in torch, with an extra."""
    logits = torch.stack(
        [
            obs[..., 1].float().sin(),
            obs[..., 2].float().cos(),
            torch.ones(obs.shape[:-1]),
        ],
        -1,
    )
    distribution = torch.distributions.Categorical(logits=logits)
    action = distribution.sample()
    return action, {"action_log_prob": distribution.log_prob(action)}


def head() -> Any:
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)
    )
    return muster.policies.categorical(net)


POLICIES = {"random": lambda: None, "function": lambda: choose, "head": head}


# --- batches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("T", [1, 7, 50])
@pytest.mark.parametrize("limit", [None, 4])
def test_data_do_not_depend_on_where_batches_begin(policy, T, limit):
    env = counting(5, noise=True) if policy == "head" else ChainEnv
    options = {"num_envs": 3, "seed": 1, "max_frames_per_traj": limit}
    whole = collect(env, POLICIES[policy](), frames_per_batch=3 * 350, **options)
    parts = collect(
        env, POLICIES[policy](), frames_per_batch=3 * T, batches=350 // T, **options
    )
    assert_same(whole, parts)
    if env is ChainEnv:
        assert_chain(whole)


@settings(max_examples=15)
@given(
    B=st.sampled_from([None, 1, 3]),
    groups=st.sampled_from([None, 1, 2]),
    T=st.integers(1, 12),
    ends=st.integers(1, 6),
    limit=st.sampled_from([None, 1, 2, 5]),
    resets=st.lists(st.integers(0, 5), max_size=3),
    reset_each=st.booleans(),
    order=st.sampled_from(["batch_major", "time_major"]),
)
def test_every_batch_is_a_chain_and_every_frame_is_accounted_for(
    B, groups, T, ends, limit, resets, reset_each, order
):
    factories: Any = (
        (lambda: ChainEnv(ends))
        if groups is None
        else [lambda: ChainEnv(ends)] * groups
    )
    total = (B or 1) * (groups or 1)
    options = {
        "reset_at_each_iter": reset_each,
        "max_frames_per_traj": limit,
        "layout": order,
        "seed": 0,
    }
    with Collector(
        factories, choose, num_envs=B, frames_per_batch=T * total, **options
    ) as collector:
        finished: dict[int, int] = {}
        open_ids: set[int] = set()
        for n in range(5):
            batch = collector.rollout()
            if order == "time_major":
                batch = batch.permute(*range(1, batch.ndim), 0)
            assert_chain(batch, ends)
            ids, done = batch["collector", "traj_ids"], batch["next", "done"][..., 0]
            seen = set(ids.flatten().tolist())
            assert not seen & finished.keys(), "an id came back after its episode ended"
            assert (ids % total).reshape(-1, T)[:, 0].tolist() == list(range(total))
            records = {record.traj_id: record.length for record in collector.episodes}
            assert records.keys() == set(ids[done].tolist())
            finished |= records
            open_ids = (open_ids | seen) - finished.keys()
            if limit:
                assert batch["next", "step_count"].max() <= limit
                assert torch.equal(
                    batch["step_count"][..., 0], batch["observation"][..., 1]
                )
                late = batch["next", "step_count"] == limit
                own = batch["next", "terminated"]
                assert (batch["next", "truncated"] | own)[late].all()
            if n in resets:
                collector.reset(n % total)
            assert_accounted(collector)
        assert collector.stats().frames == 5 * T * total
        assert collector.stats().discarded == {}


# --- ends of episodes -----------------------------------------------------------------------------


@pytest.mark.parametrize("truncate", [False, True])
def test_terminated_and_truncated_are_not_mixed_up(truncate):
    batch = collect(counting(2, truncate=truncate), frames_per_batch=4)
    assert column(batch, "next", "terminated") == [False, not truncate] * 2
    assert column(batch, "next", "truncated") == [False, truncate] * 2
    assert column(batch, "next", "done") == [False, True] * 2
    assert (
        column(batch, "terminated")
        == column(batch, "truncated")
        == column(batch, "done")
        == [False] * 4
    )


def test_reset_at_each_iter_does_not_reset_twice_what_just_ended():
    factory, made = recorded(counting(3))
    collect(factory, frames_per_batch=3, batches=2, reset_at_each_iter=True)
    assert len(made[0].seeds) <= 4


# --- episodes -------------------------------------------------------------------------------------


def test_episode_records_are_the_environments_own():
    lengths = iter([2, 3, 7])
    factory, made = recorded(lambda: CountingEnv(next(lengths)))
    seen: dict[int, list[tuple[float, int]]] = {0: [], 1: [], 2: []}
    with Collector(
        factory, None, num_envs=3, frames_per_batch=12, total_frames=120
    ) as collector:
        for batch in collector:
            done = batch["next", "done"][..., 0]
            assert len(collector.episodes) == done.sum()
            for record in collector.episodes:
                seen[record.env_id].append((record.episode_return, record.length))
                assert record.terminated
                assert not record.truncated
        stats = collector.stats()
    assert [seen[i] for i in range(3)] == [env.tally for env in made]
    everything = [record for env in made for record in env.tally]
    assert stats.episodes == len(everything)
    assert stats.return_mean == pytest.approx(
        sum(r for r, _ in everything) / len(everything)
    )
    assert stats.length_mean == pytest.approx(
        sum(n for _, n in everything) / len(everything)
    )
    assert stats.executed == sum(env.executed for env in made) == 120


# --- groups and warm-up ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "random_batches"),
    [(None, 0), (-1, 0), (0, 0), (1, 1), (4, 1), (5, 2), (8, 2)],
)
def test_init_random_frames_are_rounded_up_to_whole_batches(wanted, random_batches):
    calls = []

    def policy(obs: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return torch.tensor(0)

    with Collector(
        counting(3),
        policy,
        frames_per_batch=4,
        total_frames=16,
        init_random_frames=wanted,
        seed=0,
    ) as c:
        batches, paths = [], []
        for batch in c:
            batches.append(batch)
            paths.append(c.stats().policy_path)
    assert paths == ["random"] * random_batches + ["module"] * (4 - random_batches)
    assert len(calls) == (random_batches > 0) + 4 * (4 - random_batches), (
        "and once to see what it returns"
    )
    acted = torch.cat(
        [batch["action"] for batch in batches[:random_batches] or batches]
    )
    assert bool(acted.any()) == bool(random_batches)
    assert [r for b in batches for r in column(b, "next", "reward")] == [
        1,
        2,
        3,
    ] * 5 + [1]


@pytest.mark.parametrize("width", [1, 40_000])
def test_next_observations_are_copied_in_pieces_of_any_size(width):
    """Small observations are copied at the end of the rollout, large ones while they are in the
    cache.
    """

    class Wide(CountingEnv):
        def __init__(self) -> None:
            super().__init__(5)
            self.observation_space = spaces.Box(-np.inf, np.inf, (width,), np.float32)

        def _observe(self) -> Any:
            return np.full(width, self.t, np.float32)

    batch = collect(Wide, num_envs=2, frames_per_batch=26)
    assert batch["observation"][..., 0].tolist() == [[t % 5 for t in range(13)]] * 2
    assert (
        batch["next", "observation"][..., -1].tolist()
        == [[t % 5 + 1 for t in range(13)]] * 2
    )
