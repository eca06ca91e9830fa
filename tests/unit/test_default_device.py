"""``torch.set_default_device`` is about the user's tensors: rows and bookkeeping stay where they
are.

The device is "meta", on which a tensor has no values: one that Muster made there by mistake raises
an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from muster import Collector, Evaluator, MultiSyncCollector, load, policies
from muster.testing import InfoEnv, TorchCartPole

NET = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


class Sampling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = NET

    def forward(
        self, obs: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        drawn = torch.distributions.Categorical(logits=self.net(obs))
        action = drawn.sample()
        return action, {
            "action_log_prob": drawn.log_prob(action),
            "state_value": drawn.entropy()[..., None],
        }


class Argmax(nn.Module):
    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        return scores.argmax(-1)


POLICIES: dict[str, Callable[[], Any]] = {
    "head": lambda: policies.categorical(NET),
    "module": Sampling,
    "tensordict": lambda: TensorDictModule(
        nn.Sequential(NET, Argmax()), ["observation"], ["action"]
    ),
    "random": lambda: None,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "limited": {"max_frames_per_traj": 5, "split_trajs": True},
    "whole": {"trajs_per_batch": 3},
    "compact": {"compact_obs": True},
    "many": {"num_envs": 300, "frames_per_batch": 900},
}


@pytest.fixture(autouse=True)
def elsewhere() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def batches(make: Any, *args: Any, **options: Any) -> list[Any]:
    with make(
        *args, **{"num_envs": 2, "frames_per_batch": 64, "seed": 0, **options}
    ) as collector:
        got = [collector.next() for _ in range(2)]
    assert all(
        leaf.device.type == "cpu" for batch in got for leaf in batch.values(True, True)
    )
    assert all(batch["observation"].isfinite().all() for batch in got)
    return got


@pytest.mark.parametrize("policy", POLICIES)
def test_policies(policy):
    batches(Collector, "CartPole-v1", POLICIES[policy]())


@pytest.mark.parametrize("options", OPTIONS)
def test_options(options):
    batches(Collector, "CartPole-v1", POLICIES["head"](), **OPTIONS[options])


def test_environments():
    batches(Collector, "Pendulum-v1")
    batches(
        Collector, partial(TorchCartPole, 4, "cpu"), POLICIES["head"](), num_envs=None
    )
    batches(Collector, InfoEnv, info=["t"])


@pytest.mark.parametrize(
    "options", [{}, {"inference": "server"}, {"backend": "threads"}], ids=str
)
def test_workers(options):
    with MultiSyncCollector(
        ["CartPole-v1"] * 2,
        Sampling(),
        num_envs=2,
        frames_per_batch=64,
        seed=0,
        **options,
    ) as collector:
        collector.next()
        collector.update_policy_weights_(NET)
        state = collector.state_dict()
        expected = collector.next().clone()
        collector.load_state_dict(state)
        assert torch.equal(expected["action"], collector.next()["action"])


def test_collecting_on_demand_and_values():
    with Collector("CartPole-v1", Sampling(), num_envs=2, seed=0) as collector:
        batch, _ = collector.collect_batch(n_step=64, bootstrap="truncations")
        assert batch.numel() == 64
        _, stats = collector.collect_batch(n_episode=3)
        assert stats.n_collected_episodes == 3


def test_evaluation():
    with Evaluator(
        "CartPole-v1", POLICIES["head"](), episodes=3, num_envs=2
    ) as evaluator:
        assert len(evaluator.evaluate().records) == 3


def test_recordings(tmp_path):
    (expected, _) = batches(
        Collector, "CartPole-v1", Sampling(), record=tmp_path / "run"
    )
    assert torch.equal(next(iter(load(tmp_path / "run")))["action"], expected["action"])
