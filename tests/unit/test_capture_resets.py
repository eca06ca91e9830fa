"""What resets and loads leave between recorded rollouts: it is taken over, and the graphs stay."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from gymnasium.vector import AutoresetMode
from torch import nn

from muster import Collector, policies
from tests.fakes.resetting_envs import Goals
from tests.fakes.tape import pools
from tests.fakes.torch_envs import Walk
from tests.fakes.twins import B, Twins
from tests.tools import assert_same

__all__ = ["pools"]  # a fixture


def head() -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
    return policies.categorical(net)


CALLS: dict[str, Callable[[Collector], Any]] = {
    "all": lambda c: c.reset(),
    "some": lambda c: c.reset([1, 3]),
    "seed": lambda c: c.set_seed(8),
    "episodes": lambda c: c.collect_batch(n_episode=3),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_graph_survives_resets_that_replace_tensors(pools, call):
    with Twins(partial(Goals, B), head) as twins:
        twins.alike(4)
        for _ in range(4):
            before = twins.replays
            twins.do(CALLS[call])
            twins.alike(2)
            assert twins.replays >= before + 2
        assert len(pools[0].made) == 1


def test_a_graph_survives_a_reset_at_each_iteration(pools):
    with Twins(partial(Goals, B), head, reset_at_each_iter=True) as twins:
        twins.alike(8)
        assert len(pools[0].made) == 1
        assert twins.replays == 6


def goals(twins: Twins) -> list[torch.Tensor]:
    return [kept[0].envs[-1].goal for kept in twins.kept]


def test_a_state_that_is_loaded_is_taken_over(pools):
    """Lanes are made anew, and so are graphs; the state is copied to where they read it."""
    with Twins(partial(Goals, B), head) as twins:
        twins.alike(4)
        states = twins.do(Collector.state_dict)
        saved = goals(twins)[0].clone()
        expected = [twins.do(Collector.next)[0].clone() for _ in range(3)]
        for _ in range(2):
            twins.do(Collector.reset)  # other goals
            twins.alike(2)
            held = goals(twins)[1]
            assert not torch.equal(goals(twins)[1], saved)
            for collector, state in zip(twins.both, states, strict=True):
                collector.load_state_dict(state)
            for batch in expected:
                for collector in twins.both:
                    assert_same(batch, collector.next())
            assert goals(twins)[1] is held
            assert torch.equal(held, saved)
            graphs = len(pools[0].made)
            replays = twins.replays
            twins.do(Collector.reset)
            twins.alike(3)
            assert len(pools[0].made) == graphs
            assert twins.replays == replays + 3


def test_a_saved_state_is_not_written_into(pools):
    """Its arrays are those of the environments after a load, which a graph may read."""
    with Twins(partial(Goals, B), head) as twins:
        twins.alike(1)
        states = twins.do(Collector.state_dict)
        for collector, state in zip(twins.both, states, strict=True):
            collector.load_state_dict(state)
        saved = goals(twins)[1].clone()
        twins.alike(4)
        for _ in range(2):
            twins.do(Collector.reset)
            twins.alike(3)
        assert (
            len(pools[0].made) == 2
        )  # with the loaded goals, and with those of resets
        for collector, state in zip(twins.both, states, strict=True):
            collector.load_state_dict(state)
        twins.alike(2)
        assert torch.equal(goals(twins)[1], saved)


def test_what_the_user_puts_there_stays_the_users(pools):
    """A reset lets the environments forget it; it is not overwritten, and it counts no more."""
    with Twins(partial(Goals, B), head) as twins:
        twins.alike(4)
        twins.do(Collector.reset)
        twins.alike(2)
        made = []
        for (kept,) in twins.kept:
            made.append(torch.full((B,), 0.3))
            kept.envs[-1].goal = made[-1]
        twins.alike(3)
        for goal in made:
            goal.fill_(-0.4)
        twins.alike(2)
        twins.do(Collector.reset)
        twins.alike(3)
        for goal in made:
            assert (goal == -0.4).all()
            goal.fill_(9.0)
        twins.alike(2)
        graphs = len(pools[0].made)
        twins.do(Collector.reset)
        twins.alike(3)
        assert len(pools[0].made) == graphs == 3


def test_what_the_user_puts_there_after_a_load(pools):
    """It is there before the next rollout, but the load has not left it."""
    with Twins(partial(Goals, B), head) as twins:
        twins.alike(4)
        made = []
        for collector, (kept,) in zip(twins.both, twins.kept, strict=True):
            collector.load_state_dict(collector.state_dict())
            made.append(torch.full((B,), 0.3))
            kept.envs[-1].goal = made[-1]
        twins.alike(3)
        for goal in made:
            goal.fill_(-0.4)
        twins.alike(3)
        assert len(pools[0].made) == 2


class Aliased(Goals):
    """A reset lets a name refer to a tensor that has another name, too."""

    def drawn(self) -> torch.Tensor:
        self.level = getattr(self, "level", torch.zeros(self.num_envs))
        self.level.add_(0.1)
        return super().drawn() + self.level

    def make_parts(self) -> None:
        super().make_parts()
        self.shown = getattr(self, "level", self.goal)


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_names_that_share_a_tensor(pools, mode):
    with Twins(partial(Aliased, B, autoreset=mode), head) as twins:
        twins.alike(4)
        for _ in range(4):
            twins.do(Collector.reset)
            twins.alike(3)
        assert twins.replays >= 8


class Grows(Walk):
    """A tensor has another shape after each reset."""

    def start(self) -> None:
        self.terrain = torch.zeros(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.terrain = torch.cat([self.terrain, torch.full((1,), 0.01)])
        return super().reset(seed=seed, options=options)

    def keep(self, state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return state + self.terrain.sum()


def test_a_shape_that_a_reset_changes_is_recorded_again(pools):
    with Twins(partial(Grows, B), head) as twins:
        twins.alike(4)
        twins.do(Collector.reset)
        before = twins.replays
        twins.alike(6)
        assert len(pools[0].made) == 2
        assert twins.replays >= before + 5


def test_a_shape_that_each_reset_changes_is_refused(pools):
    with Twins(partial(Grows, B), head, capture="auto") as twins:
        twins.alike(4)
        for _ in range(5):
            twins.do(Collector.reset)
            twins.alike(1)
        capture = twins.recorded.stats().capture
        assert capture.state == "refused"
        assert re.fullmatch(
            r"env\.terrain: \(\d,\) float32 -> \(\d,\) float32, again and again",
            capture.reason,
        )


class Counts(Goals):
    """A reset changes a number, which a graph has as a constant."""

    round = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.round += 1
        return super().reset(seed=seed, options=options)

    def keep(self, state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return super().keep(state, action) + 0.01 * self.round


def test_a_number_that_a_reset_changes_is_noticed(pools):
    with Twins(partial(Counts, B), head) as twins:
        twins.alike(4)
        twins.do(Collector.reset)
        twins.alike(4)
        assert len(pools[0].made) == 2


def test_what_cannot_be_looked_at_is_no_error_of_a_reset(pools):
    class Breaks:
        @property
        def __dict__(self) -> Any:
            raise RuntimeError("do not look")

    def make() -> Any:
        env = Goals(B)
        env.breaks = Breaks()
        return env

    with Twins(make, head, capture="auto") as twins:
        twins.alike(3)
        twins.do(Collector.reset)
        twins.alike(2)
        assert "do not look" in twins.recorded.stats().capture.reason
