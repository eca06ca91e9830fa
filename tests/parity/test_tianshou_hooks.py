"""Hooks, statistics classes and subclasses of the compat layer's Collector beside those of
Tianshou's own.
"""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tianshou")

from tianshou import data
from tianshou.data import Batch, CollectStats, VectorReplayBuffer
from tianshou.data import collector as tianshous
from tianshou.data.buffer.buffer_base import MalformedBufferError
from tianshou.data.collector import EpisodeRolloutHookMCReturn
from tianshou.env import DummyVectorEnv

from muster.compat import tianshou as compat
from tests.parity.tianshou_envs import ACTIONS, POLICIES, Counting, plain
from tests.parity.tianshou_tools import (
    BUFFERS,
    Program,
    assert_equal_to_tianshou,
    assert_same,
    collects,
    play,
)

MIXED = collects(
    {"n_step": 7}, {"n_episode": 5}, {"n_step": 6, "random": True}, {"n_episode": 2}
)
LENGTHS = 3, 5, 2


def noting_steps(notes: list[Any]) -> dict[str, Any]:
    return {
        "on_step_hook": lambda action, step: notes.append([plain(action), plain(step)])
    }


def noting_episodes(notes: list[Any]) -> dict[str, Any]:
    return {"on_episode_done_hook": lambda episode: notes.append(plain(episode))}


@pytest.mark.parametrize("policy", ["values", "actor", "batch", "none"])
def test_a_step_hook_sees_every_step_with_its_action_and_distribution(
    policy: str,
) -> None:
    seen = assert_equal_to_tianshou(
        Program(LENGTHS, MIXED, policy, env={"infos": "some"}, hooks=noting_steps)
    )
    assert len(seen[-1]["notes"]) > 10


@pytest.mark.parametrize("buffer", [name for name in BUFFERS if name != "last"])
def test_an_episode_hook_sees_every_episode_as_the_buffer_holds_it(buffer: str) -> None:
    lengths = (4,) if buffer == "single" else LENGTHS
    seen = assert_equal_to_tianshou(
        Program(lengths, MIXED, "actor", buffer, hooks=noting_episodes)
    )
    assert len(seen[-1]["notes"]) == seen[-1]["counters"][1]


@pytest.mark.parametrize("buffer", ["vector", "small", "single", "prioritized"])
def test_what_an_episode_hook_returns_is_in_the_buffer(buffer: str) -> None:
    lengths = (4,) if buffer == "single" else LENGTHS
    calls = collects({"n_episode": 5}, {"n_episode": 7})
    program = Program(
        lengths,
        calls,
        "array",
        buffer,
        hooks=lambda notes: {"on_episode_done_hook": mc_return()},
    )
    seen = assert_equal_to_tianshou(program)
    assert set(seen[-1]["buffer"]["memory"]) > {
        "mc_return_to_go",
        "full_episode_mc_return",
    }


def mc_return() -> Any:
    return EpisodeRolloutHookMCReturn(gamma=0.9)


def test_an_episode_hook_that_returns_something_is_for_whole_episodes() -> None:
    for module in (compat, data):
        with pytest.raises(ValueError, match="on_episode_done_hook"):
            play(
                module,
                Program(
                    LENGTHS,
                    MIXED,
                    hooks=lambda notes: {"on_episode_done_hook": mc_return()},
                ),
            )


def test_a_step_hook_changes_what_is_stored() -> None:
    def change(action: Any, step: Any) -> None:
        step.rew = step.rew * 10
        step.obs[:, 0] += 100
        step.policy = Batch(mark=np.arange(len(step)))

    program = Program(
        LENGTHS,
        MIXED,
        "array",
        true_rewards=False,
        hooks=lambda notes: {"on_step_hook": change},
    )
    seen = assert_equal_to_tianshou(program)
    assert seen[1]["buffer"]["memory"]["policy"].keys() == {"mark"}


def test_hooks_can_be_changed_between_calls() -> None:
    def swapping(module: Any) -> Any:
        class Swapping(module.Collector):  # type: ignore[misc]
            def swap(self) -> None:
                assert callable(self.get_on_step_hook())
                assert callable(self.get_on_episode_done_hook())
                self.set_on_step_hook(None)
                self.set_on_episode_done_hook(None)

        return Swapping

    hooks = {"hooks": lambda notes: {**noting_steps(notes), **noting_episodes(notes)}}
    calls = [
        *collects({"n_step": 6}, {"n_episode": 3}),
        ("swap", {}),
        ("collect", {"n_episode": 3}),
    ]
    ours, theirs = (
        play(module, Program(LENGTHS, calls, **hooks), swapping)
        for module in (compat, data)
    )
    assert_same(ours, theirs)
    assert len(ours[-1]["notes"]) == len(ours[-2]["notes"]) > len(ours[1]["notes"])


def test_subclasses_may_take_the_place_of_hooks() -> None:
    def subclass(module: Any) -> Any:
        class Mine(module.Collector):  # type: ignore[misc]
            def run_on_step_hook(self, action_batch: Any, rollout_batch: Any) -> None:
                rollout_batch.rew = rollout_batch.rew - 3

            def run_on_episode_done(self, episode_batch: Any) -> Any:
                return {"twice": 2 * episode_batch.rew}

        return Mine

    program = Program(
        LENGTHS, collects({"n_episode": 4}, {"n_episode": 3}), true_rewards=False
    )
    ours, theirs = (play(module, program, subclass) for module in (compat, data))
    assert_same(ours, theirs)
    stored = ours[-1]["buffer"]["read"]
    np.testing.assert_array_equal(stored["twice"], 2 * stored["rew"])


@dataclass(kw_only=True)
class Counted(CollectStats):
    seen_steps: int = 0
    seen_ends: int = 0

    def update_at_step_batch(
        self, step_batch: Any, refresh_sequence_stats: bool = False
    ) -> None:
        super().update_at_step_batch(step_batch, refresh_sequence_stats)
        self.seen_steps += int(step_batch.obs_next[:, 1].sum())

    def update_at_episode_done(
        self, episode_batch: Any, *args: Any, **kwargs: Any
    ) -> None:
        super().update_at_episode_done(episode_batch, *args, **kwargs)
        self.seen_ends += int(episode_batch.obs[0, 0])


def test_a_class_of_statistics_is_updated_with_steps_and_episodes() -> None:
    found: dict[Any, list[Any]] = {compat: [], data: []}

    def keeping(module: Any) -> Any:
        class Keeping(module.Collector):  # type: ignore[misc]
            def collect(self, *args: Any, **kwargs: Any) -> Any:
                result = super().collect(*args, **kwargs)
                assert type(result) is Counted
                found[module].append((result.seen_steps, result.seen_ends))
                return result

        return Keeping

    program = Program(
        LENGTHS, MIXED, "actor", collector={"collect_stats_class": Counted}
    )
    ours, theirs = (play(module, program, keeping) for module in (compat, data))
    assert_same(ours, theirs)
    assert found[compat] == found[data]


def test_a_buffer_with_nan_is_refused() -> None:
    def spoil(action: Any, step: Any) -> None:
        step.rew = step.rew.astype(float) * np.nan

    for module in (compat, data):
        hooks = {"on_step_hook": spoil, "raise_on_nan_in_buffer": True}
        with pytest.raises(MalformedBufferError, match="NaN"):
            play(
                module, Program(LENGTHS, MIXED, hooks=lambda notes, hooks=hooks: hooks)
            )


def test_environments_are_rendered_after_every_step() -> None:
    calls = collects(
        {"n_step": 6, "render": 1e-12},
        {"n_episode": 4, "render": 1e-12},
        {"n_step": 3, "render": 0.0},
    )
    seen = assert_equal_to_tianshou(Program(LENGTHS, calls))
    assert ("render", 1) in seen[1]["envs"][0]
    assert seen[2]["envs"][0].count(("render", 1)) == seen[3]["envs"][0].count(
        ("render", 1)
    )


# --- names ----------------------------------------------------------------------------------------


def test_every_class_of_tianshous_module_can_be_imported_from_here() -> None:
    own = {
        name
        for name, value in vars(tianshous).items()
        if not name.startswith("_")
        and getattr(value, "__module__", "") == tianshous.__name__
        and callable(value)
    }
    assert own <= set(compat.__all__)
    assert set(compat.__all__) - own == {"SequenceSummaryStats"}
    for name in own:
        ours, theirs = getattr(compat, name), getattr(tianshous, name)
        assert ours is theirs or issubclass(ours, theirs), name
    assert compat.SequenceSummaryStats is data.SequenceSummaryStats
    assert {
        name for name in own if getattr(compat, name) is not getattr(tianshous, name)
    } == {
        "AsyncCollector",
        "Collector",
        "EpisodeRolloutHookMerged",
    }


@pytest.mark.parametrize(
    "name", ["Collector", "AsyncCollector", "EpisodeRolloutHookMerged"]
)
def test_its_own_classes_have_tianshous_members_and_arguments(name: str) -> None:
    ours, theirs = getattr(compat, name), getattr(tianshous, name)
    assert {member for member in dir(theirs) if not member.startswith("_")} <= set(
        dir(ours)
    )
    expected = inspect.signature(theirs.__init__).parameters
    found = inspect.signature(ours.__init__).parameters
    assert [(p.name, p.kind, p.default) for p in found.values()] == [
        (p.name, p.kind, p.default) for p in expected.values()
    ]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_statistics_are_of_the_class_that_is_exported(asynchronous: bool) -> None:
    envs = DummyVectorEnv(
        [lambda: Counting(3)] * 2, **({"wait_num": 1} if asynchronous else {})
    )
    kind = compat.AsyncCollector if asynchronous else compat.Collector
    collector = kind(
        POLICIES["none"](ACTIONS["discrete"]()), envs, VectorReplayBuffer(20, 2)
    )
    collector.reset()
    stats = collector.collect(n_step=8)
    assert type(stats) is compat.CollectStats is data.CollectStats
    assert isinstance(stats, compat.CollectStatsBase)
    assert isinstance(stats.returns_stat, compat.SequenceSummaryStats)


def test_statistics_can_be_made_with_tianshous_defaults_and_methods() -> None:
    empty = compat.CollectStats()
    assert (
        empty.n_collected_steps
        == empty.n_collected_episodes
        == len(empty.returns)
        == len(empty.lens)
        == 0
    )
    names = [field.name for field in dataclasses.fields(empty)]
    assert names[:4] == [
        "n_collected_episodes",
        "n_collected_steps",
        "collect_time",
        "collect_speed",
    ]
    assert names[4:8] == ["returns", "returns_stat", "lens", "lens_stat"]
    assert names[8:] == ["pred_dist_std_array", "pred_dist_std_array_stat"]
    step = Batch(obs=np.zeros(2), dist=None)
    empty.update_at_step_batch(step)
    empty.update_at_episode_done(Batch(rew=np.ones(3)), 2.5)
    empty.set_collect_time(0.5)
    empty.refresh_all_sequence_stats()
    assert (
        empty.n_collected_steps,
        empty.n_collected_episodes,
        empty.collect_speed,
    ) == (2, 1, 4.0)
    assert (empty.returns_stat.mean, empty.lens_stat.max) == (2.5, 3)
    made = compat.CollectStats.with_autogenerated_stats(
        np.array([1.0, 3.0]), np.array([2, 4]), 2, 6, 1.0, 6.0
    )
    assert (made.returns_stat.mean, made.lens.tolist()) == (2.0, [2, 4])
    assert compat.CollectStatsBase(n_collected_steps=3).n_collected_steps == 3
