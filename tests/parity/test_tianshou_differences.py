"""Where Tianshou 2.0.1 does something else than its documentation says: the compat layer does what
that says.

Each test shows both, so that a Tianshou that has changed is noticed. The two findings about
AsyncCollector (policies without state, actions of more than one number) are in
test_tianshou_async.py.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("tianshou")

from tianshou import data
from tianshou.data import Batch, CachedReplayBuffer, ReplayBuffer, VectorReplayBuffer
from tianshou.env import DummyVectorEnv

from muster.compat import tianshou as compat
from muster.errors import BadOption
from tests.parity.tianshou_envs import ACTIONS, POLICIES, Counter, Counting
from tests.parity.tianshou_tools import Program, assert_same, collects, play

CALLS = collects({"n_step": 8}, {"n_episode": 4}, {"n_step": 6})


def make(
    module: Any, lengths: tuple[int, ...], buffer: Any = None, policy: Any = None
) -> Any:
    envs = DummyVectorEnv([lambda n=n: Counting(n) for n in lengths])
    return module.Collector(
        policy or POLICIES["none"](ACTIONS["discrete"]()), envs, buffer
    )


@pytest.mark.parametrize("act", ["discrete", "boxes"])
def test_a_state_that_is_a_tensor_begins_anew_with_the_episode(act: str) -> None:
    ours, same = (
        play(compat, Program((3, 2), CALLS, policy, env={"act": act}))
        for policy in ("tensor", "array")
    )
    assert_same(ours, same)
    theirs = play(data, Program((3, 2), CALLS, "tensor", env={"act": act}))
    hidden = [
        entry["buffer"]["memory"]["policy"]["hidden_state"][:4, 0].tolist()
        for entry in (ours[1], theirs[1])
    ]
    assert hidden == [[1, 2, 3, 1], [1, 2, 3, 4]]


def test_a_state_that_is_a_tensor_stays_one_in_the_buffer() -> None:
    collector = make(compat, (3, 2), policy=POLICIES["tensor"](ACTIONS["discrete"]()))
    collector.reset()
    collector.collect(n_step=8)
    assert isinstance(collector.buffer.policy.hidden_state, torch.Tensor)


@pytest.mark.parametrize("buffer", ["vector", "small", "prioritized", "single"])
def test_what_a_step_hook_adds_is_in_every_buffer(buffer: str) -> None:
    def add(action: Any, step: Any) -> None:
        step.twice = 2 * step.rew
        step.deep = Batch(act=np.array(action.act) * 10)

    lengths = (3,) if buffer == "single" else (3, 2)
    program = Program(
        lengths, CALLS, "array", buffer, hooks=lambda notes: {"on_step_hook": add}
    )
    ours, theirs = (play(module, program) for module in (compat, data))
    for entry in ours[1:]:
        stored = entry["buffer"]["read"]
        np.testing.assert_array_equal(stored["twice"], 2 * stored["rew"])
        np.testing.assert_array_equal(stored["deep"]["act"], 10 * stored["act"])
    assert ("twice" in theirs[-1]["buffer"]["memory"]) == (buffer == "single")
    for entry in (*ours, *theirs):
        for key in ("memory", "read", "part memory"):
            for memory in (
                entry["buffer"][key]
                if key == "part memory"
                else [entry["buffer"].get(key, {})]
            ):
                memory.pop("twice", None)
                memory.pop("deep", None)
    assert_same(ours, theirs)


@pytest.mark.parametrize(("size", "held"), [(2, 1), (3, 2), (4, 1)])
def test_lens_are_those_of_the_episodes_and_not_of_what_a_small_buffer_holds(
    size: int, held: int
) -> None:
    for module, lens in ((compat, [5, 5]), (data, [held, held])):
        collector = make(module, (5,), VectorReplayBuffer(size, 1))
        collector.reset()
        assert collector.collect(n_episode=2).lens.tolist() == lens


def test_an_episode_that_a_reset_cut_is_no_part_of_the_next_one() -> None:
    found = []
    for module in (compat, data):
        collector = make(module, (4, 3))
        collector.reset()
        collector.collect(n_step=4)
        stats = collector.collect(n_episode=2, reset_before_collect=True)
        found.append((sorted(stats.lens.tolist()), collector.buffer.done.sum()))
    assert found == [([3, 4], 2), ([5, 6], 2)]


def test_lens_and_returns_are_whole_where_the_buffer_was_emptied_in_the_middle() -> (
    None
):
    found = []
    for module in (compat, data):
        collector = make(module, (4,))
        collector.reset()
        for keep in (True, False):
            collector.collect(n_step=3)
            collector.reset_buffer(keep_statistics=keep)
            stats = collector.collect(n_step=1)
            found.append((int(stats.lens[0]), stats.returns[0] > 4.5))
            collector.reset_buffer()
    assert found == [(4, True), (4, True), (1, True), (1, False)]


def test_one_and_only_one_number_is_given() -> None:
    for numbers in (
        {"n_step": 4, "n_episode": 1},
        {},
        {"n_step": 0},
        {"n_episode": -1},
    ):
        ours = make(compat, (3, 2))
        ours.reset()
        with pytest.raises(BadOption, match="n_step"):
            ours.collect(**numbers)
    theirs = make(data, (3, 2))
    theirs.reset()
    assert theirs.collect(n_step=4, n_episode=1).n_collected_steps == 4


class Keeper(Counter):
    """Keeps the observations it is shown, and spoils every other one."""

    def forward(self, batch: Any, state: Any = None, **kwargs: Any) -> Any:
        result = super().forward(batch, state, **kwargs)
        self.__dict__.setdefault("kept", []).append(batch.obs)
        if len(self.kept) % 2:
            batch.obs += 100
        return result


def test_what_a_policy_does_with_observations_is_its_own_business() -> None:
    found = []
    for module in (compat, data):
        policy = Keeper(ACTIONS["discrete"](), "array")
        collector = make(module, (9, 9), policy=policy)
        collector.reset()
        for _ in range(3):
            collector.collect(n_step=6)
        kept = np.array([obs[:, 1] for obs in policy.kept])
        assert kept[:, 0].tolist() == [100, 1, 102, 3, 104, 5, 106, 7, 108]
        found.append(collector.buffer.obs[:9, 1].tolist())
    assert found == [
        list(range(9)),
        kept[:, 0].tolist(),
    ]  # Tianshou stores what the policy has made of it


class Grad(POLICIES["none"](ACTIONS["discrete"]()).__class__):  # type: ignore[misc]
    """Says whether there are gradients, and stores a value that has one."""

    def forward(self, batch: Any, state: Any = None, **kwargs: Any) -> Any:
        weight = torch.ones(len(batch.obs), requires_grad=True)
        act = np.full(len(batch.obs), int(torch.is_grad_enabled()))
        return Batch(act=act, policy=Batch(value=weight * 2))


@pytest.mark.parametrize("no_grad", [True, False])
def test_the_policy_is_called_without_gradients_unless_asked_for(no_grad: bool) -> None:
    collector = make(compat, (3, 2), policy=Grad(ACTIONS["discrete"](), "none"))
    collector.reset()
    collector.collect(n_step=8, no_grad=no_grad)
    assert set(collector.buffer.act[collector.buffer.rew > 0].tolist()) == {
        int(not no_grad)
    }
    assert torch.is_grad_enabled()


def test_values_with_gradients_go_into_a_cached_buffer() -> None:
    found = []
    for module in (compat, data):
        buffer = CachedReplayBuffer(ReplayBuffer(20), 2, 10)
        collector = make(module, (3, 2), buffer, Grad(ACTIONS["discrete"](), "none"))
        collector.reset()
        try:
            collector.collect(n_episode=4)
            found.append(buffer[:].policy.value.tolist())
        except RuntimeError as error:
            found.append("requires grad" in str(error))
    assert found == [[2.0] * 10, True]


class Broken(Counting):
    """Goes wrong once, at its fifth step."""

    def step(self, action: Any) -> Any:
        if (
            sum(method == "step" for method, _ in self.log) == 4
            and ("broken", 0) not in self.log
        ):
            self.log.append(("broken", 0))
            raise RuntimeError("broken")
        return super().step(action)


@pytest.mark.parametrize("by_step", [False, True])
def test_after_an_error_of_an_environment_all_begin_anew(by_step: bool) -> None:
    found = []
    for module in (compat, data):
        envs = [Broken(9), Counting(9)]
        venv = DummyVectorEnv([lambda env=env: env for env in envs])
        collector = module.Collector(POLICIES["array"](ACTIONS["discrete"]()), venv)
        if by_step:
            collector.set_on_step_hook(lambda action, step: None)
        collector.reset()
        with pytest.raises(RuntimeError, match="broken") as error:
            collector.collect(n_step=20)
        assert type(error.value) is RuntimeError  # the environment's own in both
        before = len(collector.buffer)
        collector.collect(n_step=4)
        rows = collector.buffer[[4, 5]]
        found.append(
            (before, rows.obs[:, 1].tolist(), rows.policy.hidden_state[:, 0].tolist())
        )
    assert found == [(8, [0, 1], [1, 2]), (8, [0, 5], [1, 2])]


def test_closing_is_seen_and_can_be_repeated() -> None:
    with make(compat, (3, 2)) as collector:
        assert collector.is_closed is False
    assert collector.is_closed is True
    collector.close()
    assert not hasattr(data.Collector, "is_closed")


def test_collect_time_is_counted() -> None:
    times = []
    for module in (compat, data):
        collector = make(module, (3, 2))
        collector.reset()
        stats = [collector.collect(n_step=8), collector.collect(n_episode=2)]
        times.append(
            collector.collect_time
            == pytest.approx(sum(each.collect_time for each in stats))
        )
    assert times == [True, False]


def test_a_clock_that_is_set_back_does_not_fail_a_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of_day = itertools.count(1e9, -60.0)
    monkeypatch.setattr(time, "time", lambda: next(of_day))
    for module in (compat, data):
        collector = make(module, (3, 2))
        collector.reset()
        if module is compat:
            stats = collector.collect(n_step=8)
            assert 0 < stats.collect_time == collector.collect_time < 60
            assert stats.collect_speed == pytest.approx(8 / stats.collect_time)
        else:
            with pytest.raises(ValueError, match="Collect time should be non-negative"):
                collector.collect(n_step=8)


@pytest.mark.parametrize(
    ("policy", "act", "random"), [("none", "discrete", True), ("array", "boxes", False)]
)
def test_tianshous_async_collector_still_cannot_do_this(
    policy: str, act: str, random: bool
) -> None:
    envs = DummyVectorEnv([lambda: Counting(3, act=act)] * 2, wait_num=1)
    with pytest.warns(UserWarning, match="extra transitions"):
        collector = data.AsyncCollector(POLICIES[policy](ACTIONS[act]()), envs)
    collector.reset()
    with pytest.raises((IndexError, ValueError, TypeError)):
        collector.collect(n_step=8, random=random)
