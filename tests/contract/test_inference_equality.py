"""A server that acts for workers gives bit for bit what a collector gives that acts on the same
rows by itself.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn

from muster import CentralInference, Collector, Execution, MultiSyncCollector, policies
from tests.tools import assert_same

T = 6
pytestmark = pytest.mark.filterwarnings("ignore:frames_per_batch=45 cannot be shared")
cart = partial(gymnasium.make, "CartPole-v1", max_episode_steps=9)
pendulum = partial(gymnasium.make, "Pendulum-v1", max_episode_steps=5)


def net(n_in: int, n_out: int, width: int = 16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(n_in, width), nn.Tanh(), nn.Linear(width, n_out))


class Drawing(nn.Module):
    """Draws from torch's global generator."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net(4, 2)

    def forward(self, obs: torch.Tensor) -> Any:
        p = self.net(obs).softmax(-1)[..., 0]
        drawn = torch.rand_like(p)
        return (drawn > p).long(), {"drawn": drawn}


class Remembering(nn.Module):
    """Recurrent, and draws from torch's global generator."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.cell, self.out = nn.GRUCell(4, 8), nn.Linear(8, 2)

    def forward(self, obs: torch.Tensor, state: Any) -> Any:
        state = self.cell(obs, state)
        return torch.distributions.Categorical(logits=self.out(state)).sample(), state


def actor_on_tensordicts() -> nn.Module:
    """As TorchRL's ``ProbabilisticActor``."""
    logits = TensorDictModule(net(4, 2), in_keys=["observation"], out_keys=["logits"])
    sample = ProbabilisticTensorDictModule(
        in_keys=["logits"],
        out_keys=["action"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
        default_interaction_type="random",
    )
    return ProbabilisticTensorDictSequential(logits, sample)


ACTORS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "uniform": (cart, lambda: None),
    "categorical": (cart, lambda: policies.categorical(net(4, 2))),
    "categorical, torch": (cart, lambda: policies.categorical(net(4, 2, 4096))),
    "gaussian": (pendulum, lambda: policies.gaussian(net(3, 1))),
    "squashed": (pendulum, lambda: policies.tanh_gaussian(net(3, 2))),
    "deterministic": (pendulum, lambda: policies.deterministic(net(3, 1))),
    "epsilon": (cart, lambda: policies.epsilon_greedy(net(4, 2), 0.5)),
    "module": (cart, Drawing),
    "recurrent": (cart, Remembering),
    "tensordict": (cart, actor_on_tensordicts),
}
actors = pytest.mark.parametrize("actor", ACTORS)
acting = pytest.mark.parametrize(
    "actor", [name for name in ACTORS if name != "uniform"]
)

some_actors = pytest.mark.parametrize(
    "actor", ["categorical", "module", "recurrent", "tensordict"]
)


def make(cls: Any, actor: str, groups: int, num_envs: int, **options: Any) -> Any:
    """A collector of so many groups of so many environments."""
    env, policy = ACTORS[actor]
    common = {
        "num_envs": num_envs,
        "frames_per_batch": groups * num_envs * T,
        "seed": 3,
    }
    workers = {} if cls is Collector else {"backend": "threads"}
    return cls([env] * groups, policy(), **{**common, **workers, **options})


def take(c: Any, batches: int = 3) -> list[Any]:
    """So many batches, in memory of their own."""
    return [c.rollout().clone() for _ in range(batches)]


def assert_all_same(
    found: list[Any], expected: list[Any], envs: int | None = None
) -> None:
    """Batches are equal; with ``envs``, as those of so many environments side by side."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        pair = (
            (one, other)
            if envs is None
            else (td.reshape(envs, T) for td in (one, other))
        )
        assert_same(*pair)


def just_collect(c: Any) -> list[Any]:
    return take(c)


def seed_again(c: Any) -> list[Any]:
    before = take(c, 2)
    c.set_seed(5)
    between = take(c, 2)
    c.set_seed(5)
    again = take(c, 2)
    for one, other in zip(between, again, strict=True):
        assert_same(one, other, ignore=(("collector", "traj_ids"),))
    return before + between + again


def reset_between(c: Any) -> list[Any]:
    before = take(c, 1)
    c.reset()
    return before + take(c, 2)


def learn_between(c: Any) -> list[Any]:
    """New weights after every batch."""
    first = (
        {}
        if c.policy is None
        else {name: tensor.clone() for name, tensor in c.policy.state_dict().items()}
    )
    found = take(c, 1)
    for scale in (0.9, 0.8):
        if first:
            c.update_policy_weights_(
                {name: scale * tensor + 0.01 for name, tensor in first.items()}
            )
        found += take(c, 1)
    return found


def episodes_between(c: Any) -> list[Any]:
    """One group has enough episodes, so the other makes no step."""
    c.collect(n_episode=1)
    before = take(c, 1)
    c.collect(n_episode=1)
    return before + take(c, 2)


SCRIPTS = {
    "just collect": (just_collect, {}),
    "seed again": (seed_again, {}),
    "reset between": (reset_between, {}),
    "learn between": (learn_between, {"track_policy_version": True}),
    "random at first": (just_collect, {"init_random_frames": 8 * T + 1}),
    "episodes between": (episodes_between, {}),
}
OF_GROUPS = ("random at first", "episodes between")  # one group has other data
scripts = pytest.mark.parametrize("script", SCRIPTS)


@acting
@pytest.mark.parametrize("script", [name for name in SCRIPTS if name not in OF_GROUPS])
@pytest.mark.parametrize("groups", [2, 8])
def test_groups_that_are_acted_for_together_are_as_one_group(groups, script, actor):
    """But every group draws random actions of its own."""
    run, options = SCRIPTS[script]
    with make(Collector, actor, 1, 8, **options) as c:
        expected = run(c)
    with make(
        MultiSyncCollector, actor, groups, 8 // groups, inference="server", **options
    ) as c:
        assert_all_same(run(c), expected, 8)


@actors
@scripts
def test_groups_that_take_turns_are_as_workers_that_act_by_themselves(script, actor):
    run, options = SCRIPTS[script]
    with make(MultiSyncCollector, actor, 2, 4, **options) as c:
        expected = run(c)
    alternating = {"inference": CentralInference(alternating=True)}
    one_worker = {"inference": "server", "num_workers": 1}
    for served in (alternating, one_worker):
        with make(MultiSyncCollector, actor, 2, 4, **served, **options) as c:
            assert_all_same(run(c), expected)


OPTIONS: dict[str, dict[str, Any]] = {
    "waiting": {"reset_when_done": False},
    "waiting, short": {"reset_when_done": False, "max_frames_per_traj": 3},
    "cut": {"max_frames_per_traj": 4, "set_truncated": True},
    "anew": {"reset_at_each_iter": True, "compact_obs": True},
    "one row": {"frames_per_batch": 8},
    "part of a row": {"frames_per_batch": 8 * T - 3},
    "whole episodes": {"trajs_per_batch": 5},
    "modes": {"exploration_type": "mode"},
    "no executor": {"execution": Execution(executor=False, inference_mode=False)},
    "decorrelated": {"max_decorrelation_steps": 7},
    "time first": {"layout": "time_major", "validate": "full"},
}


# Who waits is not acted for; groups have random starts of their own, and stay side by side.
ALONE = {"waiting", "waiting, short", "decorrelated", "whole episodes", "time first"}


@some_actors
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_so_they_are_whatever_else_is_asked_for(options, actor):
    with make(MultiSyncCollector, actor, 2, 4, **options) as c:
        expected = take(c, 4)
    with make(
        MultiSyncCollector,
        actor,
        2,
        4,
        inference=CentralInference(alternating=True),
        **options,
    ) as c:
        assert_all_same(take(c, 4), expected)


@some_actors
@pytest.mark.parametrize("options", sorted(OPTIONS.keys() - ALONE))
def test_groups_acted_for_together_are_as_one_whatever_else_is_asked_for(
    options, actor
):
    asked = OPTIONS[options]
    with make(Collector, actor, 1, 8, **asked) as c:
        expected = take(c, 4)
    with make(MultiSyncCollector, actor, 4, 2, inference="server", **asked) as c:
        for one, other in zip(take(c, 4), expected, strict=True):
            assert_same(one.reshape(8, -1), other[0])


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "in process": (Collector, {}),
    "worker": (MultiSyncCollector, {}),
    "server": (MultiSyncCollector, {"inference": CentralInference(alternating=True)}),
}


@some_actors
def test_a_team_that_takes_turns_with_another_draws_nothing_of_the_other(actor):
    with make(Collector, actor, 1, 4) as c:
        expected = take(c, 4)
    with make(
        MultiSyncCollector, actor, 4, 2, inference=CentralInference(alternating=True)
    ) as c:
        for one, other in zip(take(c, 4), expected, strict=True):
            assert_same(
                one[:2].reshape(4, T), other[0], ignore=(("collector", "traj_ids"),)
            )


@acting
@pytest.mark.parametrize(
    "options",
    [{}, {"inference": CentralInference(alternating=True)}],
    ids=["", "alternating"],
)
def test_the_users_generators_go_on_as_if_nothing_had_been_collected(options, actor):
    def now() -> Any:
        numbers = np.random.get_state(legacy=False)["state"]
        return (
            torch.get_rng_state().tolist(),
            numbers["pos"],
            numbers["key"].tolist(),
            random.getstate(),
        )

    with make(
        MultiSyncCollector, actor, 2, 4, **({"inference": "server"} | options)
    ) as c:
        before = now()
        for _ in range(3):
            c.rollout()
            assert now() == before
            torch.rand(1), np.random.rand(), random.random()
            before = now()
        c.state_dict()
        assert now() == before


MOVES = [pair for pair in itertools.product(KINDS, KINDS) if "server" in pair]


@pytest.mark.parametrize("actor", ["categorical", "recurrent"])
@pytest.mark.parametrize("batches", [0, 1, 3])
@pytest.mark.parametrize(("before", "after"), MOVES)
def test_a_state_goes_on_wherever_the_policy_acts(before, after, batches, actor):
    """Of before the first call, of among random actions, and of later."""
    (first, of_first), (second, of_second) = KINDS[before], KINDS[after]
    options = {"init_random_frames": 8 * T + 1}
    with make(first, actor, 2, 4, **options, **of_first) as c:
        take(c, batches)
        state = c.state_dict()
        expected = take(c)
    for begun in (False, True):
        with make(second, actor, 2, 4, **options, **of_second) as c:
            take(c, 3 * begun)
            assert c.load_state_dict(state, trust=True).exact
            assert_all_same(take(c), expected)


@some_actors
@pytest.mark.parametrize(
    "served",
    [
        {"inference": "server", "num_workers": 1},
        {"inference": CentralInference(alternating=True)},
    ],
    ids=["one worker", "alternating"],
)
def test_a_state_from_before_the_first_call_for_a_group_goes_on(served, actor):
    """The first call is another function than the later ones: their last bits can differ."""
    with make(MultiSyncCollector, actor, 8, 1, **served) as c:
        c.collect(n_episode=1)
        state = c.state_dict()
        expected = take(c, 2)
    with make(MultiSyncCollector, actor, 8, 1, **served) as c:
        assert c.load_state_dict(state, trust=True).exact
        assert_all_same(take(c, 2), expected)


@some_actors
@pytest.mark.parametrize(
    "options",
    [{}, {"reset_when_done": False}, {"inference": CentralInference(max_batch=8)}],
    ids=["", "waiting", "in one"],
)
def test_a_state_of_groups_that_are_acted_for_together_goes_on(options, actor):
    """Noise that was prepared, and not used since episodes ended, is nowhere."""
    common = {"inference": "server", **options}
    with make(MultiSyncCollector, actor, 4, 2, **common) as c:
        take(c, 2)
        state = c.state_dict()
        expected = take(c, 3)
    with make(MultiSyncCollector, actor, 4, 2, **common) as c:
        assert c.load_state_dict(state, trust=True).exact
        assert_all_same(take(c, 3), expected)


@pytest.mark.parametrize("actor", ["uniform", "categorical", "module", "recurrent"])
@pytest.mark.parametrize(
    "options",
    [{}, {"inference": CentralInference(alternating=True)}],
    ids=["", "alternating"],
)
def test_workers_are_processes(options, actor):
    with make(Collector, actor, 2, 4) as c:
        alone = take(c)
    with make(Collector, actor, 1, 8) as c:
        as_one = take(c)
    with make(
        MultiSyncCollector,
        actor,
        2,
        4,
        **({"backend": "processes", "inference": "server"} | options),
    ) as c:
        together = not options and actor != "uniform"
        assert_all_same(take(c), as_one if together else alone, 8 if together else None)
