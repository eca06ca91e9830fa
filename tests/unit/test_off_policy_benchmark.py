"""``benchmarks.off_policy`` measures what it says."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.off_policy import HEAD_TARGETS, PAGE, RESULTS, TARGETS, with_tables
from benchmarks.off_policy_systems import CAPACITY, CASES, SAMPLE, Hand, Muster
from benchmarks.systems import SYSTEMS

SMALL = replace(CASES["off-floats"], B=2, T=3, fill=4)  # 24 transitions


def test_targets_compare_systems_that_are_measured():
    assert {target.workload for target in TARGETS} == set(CASES)
    for target in TARGETS + HEAD_TARGETS:
        assert {*target.over, *target.under} <= set(CASES[target.workload].systems)
    for case in CASES.values():
        assert set(case.systems) <= set(SYSTEMS)


def test_the_tables_of_the_page_are_those_of_the_results():
    page = PAGE.read_text("utf-8")
    results = json.loads(RESULTS.read_text("utf-8"))

    assert set(results["workloads"]) == set(CASES)
    assert with_tables(page, results) == page


@pytest.mark.parametrize("collects", [True, False])
def test_an_iteration_of_the_loop_by_hand_collects_and_samples(collects):
    hand = Hand(replace(SMALL, collects=collects))
    assert hand.ring.size == 24

    frames = hand.rollout()

    assert hand.ring.size == (30 if collects else 24)
    assert frames == (6 if collects else 2)
    assert [len(column) for column in hand.sample()] == [SAMPLE] * 5
    hand.close()


def test_the_ring_by_hand_is_full_at_its_capacity_and_pairs_observations():
    cartpole = replace(CASES["off-cartpole"], T=64, fill=CAPACITY // 64 + 1)
    hand = Hand(cartpole)

    obs, action, reward, done, after = (column.numpy() for column in hand.sample())
    hand.close()

    assert hand.ring.size == CAPACITY
    assert hand.bytes_per_transition() == 2 * 4 * 4 + 8 + 4 + 1
    assert np.allclose(
        after[:, 0], obs[:, 0] + 0.02 * obs[:, 1], atol=1e-6
    )  # CartPole's position
    assert np.array_equal(
        np.sign(after[:, 1] - obs[:, 1]), 2 * action - 1
    )  # and its push
    assert (reward == 1).all()
    assert 0 < done.sum() < SAMPLE / 2


@pytest.mark.parametrize(
    ("buffer", "policy"),
    [("memory", "plain"), ("memory", "head"), ("torchrl", "plain")],
)
def test_an_iteration_of_muster_collects_and_samples(buffer, policy):
    muster = Muster(SMALL, buffer, policy)
    assert len(muster.memory) == 24

    frames = muster.rollout()

    assert frames == 6
    assert len(muster.memory) == 30
    assert muster.sample().shape == (SAMPLE,)
    assert muster.bytes_per_transition() > 2 * 17 * 4 * (
        0.5 if buffer == "memory" else 1
    )
    muster.close()
