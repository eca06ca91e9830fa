"""Collectors of environments with rows on a device: the same batches, ids, records and statistics
as with rows on the host, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from gymnasium.vector import AutoresetMode
from torch import nn

from muster import Collector, ReplayMemory, policies
from muster.testing import TorchCartPole
from tests.fakes.device_rows import on_device
from tests.tools import assert_accounted, assert_same

MODES = [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED]
OF_MODE = pytest.mark.parametrize("mode", MODES, ids=["same step", "by mask"])


class Uneven(TorchCartPole):
    """Rewards of very different size: sums show in which order they were added."""

    def step(self, action: torch.Tensor) -> Any:
        obs, _, terminated, truncated, info = super().step(action)
        last = info.get("final_obs", obs)
        sizes = torch.tensor([1e-4, 1e4, 3.0, 0.1], device=self.device)
        return obs, (last * sizes).sum(1), terminated, truncated, info


def make(B: int = 5, mode: AutoresetMode = AutoresetMode.SAME_STEP) -> Callable[[], Any]:
    return partial(Uneven, B, autoreset=mode, max_steps=23)


def both(
    env: Callable[[], Any] | list[Callable[[], Any]],
    policy: Callable[[], Any] = lambda: None,
    **options: Any,
) -> list[Collector]:
    """The same collector with rows on the host, and on the device."""
    several = isinstance(env, list)
    there: Any = [on_device(each) for each in env] if several else on_device(env)
    made = []
    for envs in (env, there):
        given = {"frames_per_batch": 100, "seed": 3, **options}
        made.append(Collector(envs, policy(), **given))
    return made


def assert_alike(here: Collector, there: Collector, batches: int = 4) -> None:
    """The next batches are equal, and so is everything that is known of them."""
    for _ in range(batches):
        assert_same(here.next(), there.next())
        assert_same_records(here, there)


def assert_same_records(here: Collector, there: Collector) -> None:
    for a, b in zip(here.episodes.columns(), there.episodes.columns(), strict=True):
        assert a.dtype == b.dtype
        assert a.tobytes() == b.tobytes()
    stats, others = here.stats(), there.stats()
    for name in ("frames", "executed", "discarded", "episodes", "return_mean", "length_mean"):
        assert getattr(stats, name) == getattr(others, name), name
    assert stats.completed == others.completed
    for collector in (here, there):
        assert_accounted(collector)


def tilt(obs: torch.Tensor) -> torch.Tensor:
    return (obs[:, 2] > 0).long()


def counting(obs: torch.Tensor, state: torch.Tensor | None) -> Any:
    state = torch.zeros_like(obs[:, :1]) if state is None else state
    return state[:, 0].long() % 2, state + 1


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one row": {"frames_per_batch": 5},
    "limit": {"max_frames_per_traj": 11},
    "ids hidden": {"track_traj_ids": False},
    "versions": {"track_policy_version": True},
    "random first": {"init_random_frames": 150},
    "cut frames": {"frames_per_batch": 98},
    "marked ends": {"set_truncated": True},
    "reset each": {"reset_at_each_iter": True},
    "waiting": {"reset_when_done": False},
    "all checked": {"validate": "full"},
    "unchecked": {"validate": "off"},
    "hooked": {"on_step": lambda step: None},
    "whole episodes": {"trajs_per_batch": 3},
    "split": {"split_trajs": True},
}


@OF_MODE
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.filterwarnings("ignore:.*cannot be shared equally")
def test_batches_and_records_are_those_of_rows_on_the_host(options, mode):
    here, there = both(make(mode=mode), lambda: tilt, **OPTIONS[options])
    with here, there:
        assert_alike(here, there)


@OF_MODE
@pytest.mark.parametrize("B", [1, 2, 300])
def test_with_few_and_with_many_environments(B, mode):
    here, there = both(make(B, mode), frames_per_batch=60 * B)
    with here, there:
        assert_alike(here, there, 3)
        assert here.stats().episodes


@pytest.mark.parametrize(
    "policy",
    [lambda: None, lambda: tilt, lambda: counting, lambda: policies.deterministic(nn.Linear(4, 2))],
    ids=["random", "function", "recurrent", "head"],
)
def test_with_any_policy(policy):
    torch.manual_seed(0)
    net = policy()
    here, there = both(make(), lambda: net)
    with here, there:
        assert_alike(here, there)


def test_with_several_groups():
    here, there = both([make(), make()])
    with here, there:
        assert_alike(here, there)


@OF_MODE
def test_after_a_reset_of_some_environments(mode):
    here, there = both(make(mode=mode), max_frames_per_traj=11)
    with here, there:
        assert_alike(here, there, 2)
        for collector in (here, there):
            collector.reset([1, 3])
        assert_alike(here, there, 2)
        for collector in (here, there):
            collector.set_seed(8)
        assert_alike(here, there, 2)


def test_steps_and_episodes_on_demand():
    here, there = both(make())
    with here, there:
        for _ in range(2):
            for wanted in ({"n_step": 35}, {"n_episode": 7}, {"n_step": 100}):
                (batch, stats), (other, others) = (
                    collector.collect_batch(**wanted) for collector in (here, there)
                )
                assert_same(batch, other)
                assert stats.returns.tobytes() == others.returns.tobytes()
                assert stats.lens.tobytes() == others.lens.tobytes()
            assert_alike(here, there, 2)


def test_from_a_state_that_was_saved():
    here, there = both(make(), lambda: tilt, max_frames_per_traj=11)
    with here, there:
        assert_alike(here, there, 2)
        states = [collector.state_dict() for collector in (here, there)]
    again = both(make(), lambda: tilt, max_frames_per_traj=11)
    with again[0], again[1]:
        for collector, state in zip(again, states, strict=True):
            collector.load_state_dict(state)
        assert_same_records(*again)
        assert_alike(*again, 2)


@pytest.mark.parametrize("rows", [1, 20])
def test_into_a_replay_memory(rows):
    memories = [ReplayMemory(500, seed=1) for _ in range(2)]
    collectors = [
        Collector(
            envs, tilt, frames_per_batch=5 * rows, seed=3, replay_buffer=memory, total_frames=900
        )
        for envs, memory in zip((make(), on_device(make())), memories, strict=True)
    ]
    with collectors[0] as here, collectors[1] as there:
        for _ in zip(here, there, strict=True):
            assert_same_records(here, there)
    assert len(memories[0]) == len(memories[1])
    assert_same(memories[0].sample(64), memories[1].sample(64))
