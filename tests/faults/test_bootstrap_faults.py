"""Errors in the middle of a rollout with ``bootstrap``: the values of next observations are those
without an error.
"""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import Any

import pytest
import torch

from muster import Collector
from muster.errors import BadEnvOutput, EnvError, MusterError, PolicyError, WorkerDied
from tests.contract.test_collectors import KINDS, Kind
from tests.fakes.faults import first_time
from tests.fakes.slipping import SlippingEnv, counts_time
from tests.tools import assert_accounted, assert_same

LENGTHS = [[1, 3], [2, 4]]  # every other episode is truncated
ROWS = 12
WORKERS = [
    kind
    for kind in KINDS
    if kind.name in ("sync-2", "sync-threads", "async", "AsyncCollector", "sync-server")
]


def collected(c: Any, n: int, **asked: Any) -> tuple[Any, list[MusterError]]:
    """What ``collect_batch`` gives in the end, and what it raised before."""
    raised: list[MusterError] = []
    while len(raised) < 20:
        try:
            return c.collect_batch(n_step=n, **asked), raised
        except MusterError as error:
            raised.append(error)
    raise AssertionError(raised)


def assert_true_values(made: Any, wanted: Any) -> None:
    """Of a policy whose value is the sum of all times of the episode, counted from 1."""
    batch, stats = made
    after = batch["next", "observation"][..., 2]
    worth = (after + 1) * (after + 2) / 2
    over, cut = (
        batch["next", flag].squeeze(-1) for flag in ("terminated", "truncated")
    )
    assert cut[..., :-1].any()
    cut = cut & ~over & (wanted == "truncations")
    cut[..., -1] |= ~over[..., -1]
    assert torch.equal(batch["next", "state_value"].squeeze(-1), worth * cut)
    assert torch.equal(stats.last_value_est.squeeze(-1), (worth * ~over)[..., -1])


@pytest.mark.parametrize("bootstrap", [True, "truncations"])
@pytest.mark.parametrize(
    ("does", "error"),
    [("raise", EnvError), ("nan", BadEnvOutput), ("raise in reset", EnvError)],
)
@pytest.mark.parametrize("at", range(1, ROWS))
def test_an_error_does_not_touch_the_values_of_episodes_that_were_truncated_before_it(
    at, does, error, bootstrap
):
    faulty, sound = (
        Collector(
            partial(SlippingEnv, LENGTHS, fault, does), counts_time, num_envs=2, seed=0
        )
        for fault in (at, -1)
    )
    with faulty, sound:
        made, raised = collected(faulty, 2 * ROWS, bootstrap=bootstrap)
        other = sound.collect_batch(n_step=2 * ROWS, bootstrap=bootstrap).batch
        assert {type(e) for e in raised} <= {error}
        assert raised or does == "raise in reset"
        assert_true_values(made, bootstrap)
        if does != "raise in reset":
            same = (
                made.batch[:, : at - 1],
                other[:, : at - 1],
            )  # the episode that the error cut is none of them
            assert torch.equal(*(part["next", "observation"] for part in same))
            assert torch.equal(*(part["next", "state_value"] for part in same))
        assert_true_values(
            collected(faulty, 2 * ROWS, bootstrap=bootstrap)[0], bootstrap
        )
        assert_accounted(faulty)


@pytest.mark.parametrize("kind", WORKERS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("does", ["raise", "nan"])
def test_workers_remember_what_was_truncated_before_an_error(kind: Kind, does):
    factories = [partial(SlippingEnv, LENGTHS, fault, does) for fault in (10, 7, 9)]
    with kind.cls(
        factories[: kind.groups], counts_time, num_envs=2, seed=0, **kind.options
    ) as c:
        made, raised = collected(c, kind.groups * 2 * ROWS, bootstrap="truncations")
        assert raised
        assert_true_values(made, "truncations")
        assert_accounted(c)


class Stuttering:
    """``counts_time``, but its call of number ``at`` raises."""

    def __init__(self, at: int) -> None:
        self.at, self.calls = at, 0

    def __call__(self, observation: torch.Tensor, state: Any) -> Any:
        self.calls += 1
        if self.calls == self.at:
            raise ValueError("out of memory")
        return counts_time(observation, state)


@pytest.mark.parametrize("at", [ROWS, ROWS + 2])
@pytest.mark.parametrize(
    "kind", [Kind("Collector", Collector), *WORKERS[:1]], ids=lambda kind: kind.name
)
def test_a_policy_that_fails_when_it_is_asked_for_values_is_asked_again_and_nothing_else_happens_twice(
    kind, at
):
    factories = partial(SlippingEnv, LENGTHS, -1, "raise")
    made = partial(
        kind.cls,
        factories if kind.cls is Collector else [factories],
        num_envs=2,
        seed=0,
    )
    with made(Stuttering(at)) as c, made(counts_time) as sound:
        for errors in ([PolicyError], [], [], []):
            found, raised = collected(
                c, 2 * ROWS - 2, bootstrap="truncations"
            )  # the last rows are in mid-episode
            assert [type(error) for error in raised] == errors
            other = sound.collect_batch(n_step=2 * ROWS - 2, bootstrap="truncations")
            assert_true_values(found, "truncations")
            assert_same(found.batch, other.batch)
            assert found.stats.lens.tolist() == other.stats.lens.tolist()
        assert_accounted(c)


SERVED = [
    kind
    for kind in KINDS
    if kind.name in ("sync-server", "async-server", "nodes-sync-server")
]


@pytest.mark.parametrize(
    "at", range(ROWS, ROWS + 3)
)  # the last rows of the first batch, and its values
@pytest.mark.parametrize("kind", SERVED, ids=lambda kind: kind.name)
def test_a_batch_waits_for_the_values_of_a_server_whose_policy_has_failed(
    kind: Kind, at
):
    made = partial(
        kind.cls,
        [partial(SlippingEnv, LENGTHS, -1, "raise")],
        num_envs=2,
        seed=0,
        **kind.options,
    )
    n, errors = 2 * ROWS - 2, []
    with made(Stuttering(at)) as c, made(counts_time) as sound:
        for _ in range(4):
            found, raised = collected(c, n, bootstrap="truncations")
            other = sound.collect_batch(n_step=n, bootstrap="truncations")
            assert_true_values(found, "truncations")
            assert_same(found.batch, other.batch)
            assert found.stats.lens.tolist() == other.stats.lens.tolist()
            errors += raised
        assert [type(error) for error in errors] == [PolicyError]
        assert_accounted(c)
        assert c.stats().frames == 4 * n


class Deadly(Stuttering):
    """Kills its process at the call ``at``, once."""

    def __init__(self, at: int, mark: str) -> None:
        super().__init__(-1)
        self.deadly, self.mark = at, mark

    def __call__(self, observation: torch.Tensor, state: Any) -> Any:
        if self.calls + 1 == self.deadly and first_time(self.mark):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(observation, state)


@pytest.mark.parametrize("at", [ROWS + 1, ROWS + 2])
def test_a_batch_whose_values_are_lost_with_a_node_is_accounted_for(tmp_path, at):
    (kind,) = [kind for kind in SERVED if kind.name == "nodes-sync-server"]
    made = partial(
        kind.cls,
        [partial(SlippingEnv, LENGTHS, -1, "raise")],
        num_envs=2,
        seed=0,
        **kind.options,
    )
    n = 2 * ROWS - 2
    with made(Deadly(at, str(tmp_path / "mark"))) as c:
        for _ in range(3):
            found, raised = collected(c, n, bootstrap="truncations")
            assert {type(error) for error in raised} <= {
                WorkerDied
            }  # of the server, and of the worker with it
            assert_true_values(found, "truncations")
            assert_accounted(c)
        stats = c.stats()
    assert (tmp_path / "mark").exists()
    assert stats.frames == 3 * n
    assert stats.discarded["worker_died"] + stats.unseen >= n
