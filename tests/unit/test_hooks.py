"""Hooks: what they see, what they change, and that their errors lose nothing."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from muster import Collector, MultiAsyncCollector, MultiSyncCollector
from muster.collectors.episode_hook import EpisodeHook
from muster.collectors.replay_buffer import ReplaySink
from muster.envs.torch_batch import TorchEnvs
from muster.errors import BadOption, HookError
from muster.memory.slots import Layout, Slot
from muster.policies.random import RandomPolicy
from muster.rng import GroupRng
from muster.rollout.columns import lane_columns
from muster.rollout.first_call import prime
from muster.rollout.group import Group
from muster.rollout.loop import rollout
from muster.rollout.options import RolloutOptions
from muster.rollout.request import RolloutRequest
from muster.testing import CountingEnv, TorchCartPole
from tests.fakes.buffers import Adds, Extends
from tests.tools import (
    assert_accounted,
    assert_same,
    column,
    counting,
    lengths,
    recorded,
    stable,
)

REWARD, DONE, IDS = ("next", "reward"), ("next", "done"), ("collector", "traj_ids")


def zeros(obs: torch.Tensor) -> torch.Tensor:
    return torch.zeros(obs.shape[:-1], dtype=torch.int64)


class FailsAt:
    """Raises at the calls of these numbers, and passes the others on."""

    def __init__(self, *calls: int, then: Any = None) -> None:
        self.calls, self.count, self.then = calls, -1, then

    def __call__(self, value: Any) -> Any:
        self.count += 1
        if self.count in self.calls:
            raise ZeroDivisionError("mine")
        return None if self.then is None else self.then(value)


def insist(collector: Any) -> tuple[list[Any], int]:
    """All batches of a collector, whatever is raised in between; and how often that was."""
    batches, errors = [], 0
    while True:
        try:
            for batch in collector:
                batches.append(batch)
            return batches, errors
        except HookError:
            errors += 1


# --- everywhere -----------------------------------------------------------------------------------

EVERYWHERE = {
    "here": partial(Collector),
    "processes": partial(MultiSyncCollector),
    "threads": partial(MultiSyncCollector, backend="threads"),
    "server": partial(MultiSyncCollector, inference="server"),
    "first ready": partial(MultiAsyncCollector),
}


@pytest.mark.parametrize("where", EVERYWHERE)
def test_every_collector_calls_its_hooks_and_delivers_what_they_write(where):
    def shape(step: Any) -> None:
        step["next", "reward"] += 10 * step["observation"][:, 1] + 1000 * step.env_ids

    episodes, batches = [], []
    options: Any = {
        "frames_per_batch": 8 if where == "first ready" else 16,
        "total_frames": 64,
        "num_envs": 2,
        "on_step": shape,
        "on_episode_done": lambda episode: episodes.append(episode.clone()),
        "on_batch": batches.append,
        "replay_buffer": (buffer := Extends()),
    }
    with EVERYWHERE[where]([counting(2), counting(5)], zeros, **options) as c:
        assert list(c) == [None] * len(batches)
        assert_accounted(c)
    assert all(
        batch is written for batch, written in zip(batches, buffer.batches, strict=True)
    )
    for batch in batches:
        env_id = batch[IDS] % 4
        assert torch.equal(
            batch[REWARD][..., 0],
            batch["next", "observation"][..., 1]
            + 10 * batch["observation"][..., 1]
            + 1000 * env_id,
        )
    for episode in episodes:
        length = int(episode["observation"][0, 0])
        assert episode.shape == (length,)
        assert episode.names == ["time"]
        assert episode["observation"][:, 1].tolist() == list(range(length))
        assert column(episode, *DONE) == [False] * (length - 1) + [True]
        assert len(set(episode[IDS].tolist())) == 1
    rows = torch.cat([batch.reshape(-1) for batch in batches])
    whole = sorted(rows[IDS][rows[DONE][..., 0]].tolist())
    assert sorted(int(episode[IDS][0]) for episode in episodes) == whole, (
        "every one, once"
    )
    if where != "first ready":
        assert len(whole) == 2 * (16 // 2 + 16 // 5)


@pytest.mark.parametrize("backend", ["processes", "threads"])
def test_an_error_of_on_step_in_a_worker_says_where_and_loses_nothing(backend):
    def fail_once(step: Any, count: list[int] = []) -> None:  # noqa: B006 (kept from call to call)
        count.append(step.t)
        if len(count) == 6:
            raise ZeroDivisionError("mine")

    options: Any = {"frames_per_batch": 8, "total_frames": 16, "backend": backend}
    with MultiSyncCollector([counting(3)], None, on_step=fail_once, **options) as c:
        with pytest.raises(
            HookError, match=r"on_step raised ZeroDivisionError: mine.*worker 0"
        ) as caught:
            next(iter(c))
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert caught.value.crash_report is None, "there is nothing to replay"
        joined = torch.cat([batch.clone() for batch in c], -1)
        assert column(joined, *REWARD)[0] == [1, 2, 3] * 5 + [1]
        assert_accounted(c)
        assert c.stats().executed == 16
        assert c.stats().restarts == 0


# --- on_step --------------------------------------------------------------------------------------


def test_on_step_sees_complete_rows_with_the_true_next_observations():
    seen = []

    def look(step: Any) -> None:
        shown = [
            step[key].tolist()
            for key in ("observation", ("next", "observation"), REWARD)
        ]
        seen.append((step.t, step.env_ids.tolist(), *shown, step.finished.tolist()))

    with Collector(
        lengths(2, 3), zeros, num_envs=2, frames_per_batch=6, on_step=look
    ) as c:
        c.rollout()
        c.rollout()
    both = [0, 1]
    assert seen == [
        (0, both, [[2, 0], [3, 0]], [[2, 1], [3, 1]], [1, 1], []),
        (1, both, [[2, 1], [3, 1]], [[2, 2], [3, 2]], [2, 2], [0]),
        (2, both, [[2, 0], [3, 2]], [[2, 1], [3, 3]], [1, 3], [1]),
        (0, both, [[2, 1], [3, 0]], [[2, 2], [3, 1]], [2, 1], [0]),
        (1, both, [[2, 0], [3, 1]], [[2, 1], [3, 2]], [1, 2], []),
        (2, both, [[2, 1], [3, 2]], [[2, 2], [3, 3]], [2, 3], [0, 1]),
    ]


def test_what_on_step_writes_is_in_the_batch_and_in_the_returns_of_episodes():
    def shape(step: Any) -> None:
        step["next", "reward"] *= 10
        step["action"] = 1
        step["next", "observation"][step.finished] = -1

    with Collector(
        counting(3), zeros, num_envs=2, frames_per_batch=8, on_step=shape
    ) as c:
        batch = c.rollout()
        assert column(batch, *REWARD) == [[10, 20, 30, 10]] * 2
        assert (batch["action"] == 1).all()
        assert batch["next", "observation"][0, :, 1].tolist() == [1, 2, -1, 1]
        assert batch["observation"][0, :, 1].tolist() == [0, 1, 2, 0], (
            "the next row is not the next observation"
        )
        assert [e.episode_return for e in c.episodes] == [60, 60]


@pytest.mark.parametrize("together", [False, True], ids=["bypassed", "stepped on"])
def test_on_step_knows_who_waits_and_cannot_fill_their_cells(together):
    seen = []

    def look(step: Any) -> None:
        seen.append((step.valid.tolist(), step.finished.tolist()))
        step["next", "reward"] += 100

    factories = [counting(1), counting(4)]
    env = (lambda: SyncVectorEnv(factories)) if together else lengths(1, 4)
    options: Any = {"reset_when_done": False, "frames_per_batch": 6, "on_step": look}
    with Collector(env, zeros, **options, **({} if together else {"num_envs": 2})) as c:
        assert column(c.rollout(), *REWARD) == [[101, 0, 0], [101, 102, 103]]
        assert column(c.rollout(), *REWARD) == [[101, 0, 0], [104, 0, 0]]
        assert_accounted(c)
    both, second = [True, True], [False, True]
    assert seen == [(both, [0]), (second, []), (second, []), (both, [0, 1])]


def test_on_step_cannot_change_what_happened_nor_look_at_what_is_not_made_yet():
    refused = {
        ("next", "terminated"): "can only be read",
        "truncated": "can only be read",
        ("next", "done"): "when the rollout is complete",
        IDS: "when the rollout is complete",
        "nothing": r"no such column; there are observation, .*next.reward",
    }
    for key, why in refused.items():

        def write(step: Any, key: Any = key) -> None:
            step[key] = True

        with Collector(counting(9), None, frames_per_batch=2, on_step=write) as c:
            with pytest.raises(HookError, match=why) as caught:
                c.rollout()
            assert isinstance(caught.value.__cause__, BadOption)
        with Collector(
            counting(9),
            None,
            frames_per_batch=2,
            on_step=lambda s: s["next", "terminated"].fill(True),
        ) as c:
            with pytest.raises(HookError, match="read-only"):
                c.rollout()
            assert not c.episodes


@pytest.mark.parametrize("row", range(6))
def test_after_an_error_of_on_step_the_next_call_goes_on_after_its_row(row):
    options: Any = {"num_envs": 2, "frames_per_batch": 12, "total_frames": 24}
    with Collector(lengths(2, 3), zeros, **options) as c:
        expected = [batch.clone() for batch in c]
    rows: list[int] = []
    fails = FailsAt(row, then=lambda step: rows.append(step.t))
    with Collector(lengths(2, 3), zeros, **options, on_step=fails) as c:
        with pytest.raises(
            HookError,
            match="on_step raised ZeroDivisionError: mine. The row is complete",
        ):
            next(iter(c))
        for batch, other in zip(c, expected, strict=True):
            assert_same(batch, other)
        assert rows == [t for t in range(6) if t != row] + list(range(6)), (
            "no row is shown twice"
        )
        assert_accounted(c)
        assert c.stats().executed == 24


def test_on_step_gets_tensors_where_environments_step_on_a_device():
    env = TorchEnvs(TorchCartPole(3, max_steps=2))
    env.store_as(
        replace(env.spec, device=torch.device("cpu"))
    )  # takes every path that a GPU takes
    seen = []

    def shape(step: Any) -> None:
        seen.append(step.finished.tolist())
        step["next", "reward"] += 0.5
        step["next", "terminated"].fill_(True)  # a copy

    options = RolloutOptions(num_threads=None, on_step=shape)
    group = Group(
        env, env_ids=np.arange(3), total_envs=3, rng=GroupRng(0), options=options
    )
    policy = RandomPolicy(env.sample, (3,))
    prime(group, policy, 0)
    slot = Slot(
        Layout(
            4, 3, lane_columns(env.spec, policy.columns(), options), batch_shape=(3,)
        ),
        torch.device("cpu"),
    )
    outcome = rollout(
        group, policy, RolloutRequest(0, 0, 0, "policy"), lane := slot.lanes[0]
    )
    assert seen == [[], [0, 1, 2], [], [0, 1, 2]]
    assert torch.equal(lane.tensors[REWARD], torch.full((4, 3), 1.5))
    assert [e.episode_return for e in outcome.episodes] == [3.0] * 6


# --- rendering ------------------------------------------------------------------------------------


class RendersEnv(CountingEnv):
    """Writes down what time it was whenever it rendered."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.rendered: list[int] = []

    def render(self) -> None:
        self.rendered.append(self.t)


def test_rendering_shows_every_environment_after_every_step_and_on_step_before():
    factory, made = recorded(lambda i: RendersEnv(2 + i))
    steps = []
    with Collector(
        factory,
        None,
        num_envs=2,
        frames_per_batch=6,
        on_step=lambda s: steps.append(len(made[1].rendered)),
    ) as c:
        c.collect(n_step=6, render=0.0)
    assert [env.rendered for env in made] == [[1, 0, 1], [1, 2, 0]], "after resets"
    assert steps == [0, 1, 2]


def test_who_cannot_render_says_so_and_loses_nothing():
    class Blind(CountingEnv):
        def render(self) -> Any:
            raise NotImplementedError("no eyes")

    with Collector(Blind, None, frames_per_batch=2) as c:
        with pytest.raises(
            HookError, match=r"render raised NotImplementedError: no eyes.*render_mode"
        ):
            c.collect(n_step=2, render=0)
        assert column(c.rollout(), *REWARD) == [1, 2]


@pytest.mark.parametrize("seconds", [-1, True, "fast", float("nan")])
def test_rendering_waits_for_seconds_and_nothing_else(seconds):
    with (
        Collector(counting(3), None, frames_per_batch=2) as c,
        pytest.raises(BadOption, match="render="),
    ):
        c.collect(n_step=2, render=seconds)


# --- on_episode_done, where rows are delivered as they come ---------------------------------------


def shown(episode: Any) -> tuple[int, list[float]]:
    """Trajectory and rewards."""
    (traj_id,) = set(episode[IDS].tolist())
    return traj_id, column(episode, *REWARD)


@given(
    each=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    T=st.integers(1, 6),
    less=st.integers(0, 2),
    waits=st.booleans(),
    layout=st.sampled_from(["batch_major", "time_major"]),
)
@settings(max_examples=30, deadline=None)
@pytest.mark.filterwarnings("ignore:frames_per_batch")
def test_every_episode_is_shown_whole_once_and_in_order_of_its_end(
    each, T, less, waits, layout
):
    B = len(each)
    frames = T * B - min(
        less, B - 1
    )  # where that is not divisible, episodes are still whole
    episodes, batches = [], []
    options: Any = {
        "num_envs": B,
        "frames_per_batch": frames,
        "reset_when_done": not waits,
        "layout": layout,
    }
    with Collector(
        lengths(*each),
        None,
        on_episode_done=lambda e: episodes.append(shown(e)),
        **options,
    ) as c:
        for _ in range(5):
            batch = c.next().clone()
            batches.append(batch if layout == "batch_major" else batch.permute(1, 0))
    rows = torch.cat(batches, 1)
    # Blank rows repeat the flags of an episode that ended; they have no trajectory.
    ends = ((rows[IDS] >= 0) & rows[DONE][..., 0]).T.nonzero().tolist()
    assert episodes == [
        (int(rows[IDS][b, t]), list(range(1, each[b] + 1))) for t, b in ends
    ]


def test_columns_for_rows_that_were_delivered_are_an_error_that_names_the_way_out():
    options: Any = {"frames_per_batch": 4, "total_frames": 8}
    with Collector(
        counting(2), None, on_episode_done=lambda e: {"a": np.zeros(len(e))}, **options
    ) as c:
        with pytest.raises(
            HookError, match=r"collect\(n_episode=...\), trajs_per_batch"
        ):
            next(iter(c))
        batches, errors = insist(c)
        assert [column(batch, *REWARD) for batch in batches] == [[1, 2, 1, 2]] * 2
        assert errors == 3, "one for each episode that is left"


@pytest.mark.parametrize("failing", range(3))
def test_after_an_error_the_batch_comes_and_every_episode_is_shown_until_it_was_taken(
    failing,
):
    seen = []
    options: Any = {"num_envs": 2, "frames_per_batch": 8, "total_frames": 16}
    hook = FailsAt(failing, failing + 1, then=lambda e: seen.append(shown(e)))
    with Collector(lengths(2, 3), None, on_episode_done=hook, **options) as c:
        batches, errors = insist(c)
        assert_accounted(c)
    assert errors == 2
    assert [column(batch, *REWARD)[1] for batch in batches] == [
        [1, 2, 3, 1],
        [2, 3, 1, 2],
    ]
    assert [traj_id for traj_id, _ in seen] == [0, 1, 2, 4, 3, 6]


@pytest.mark.parametrize("layout", ["batch_major", "time_major"])
def test_a_collector_that_was_loaded_shows_the_next_whole_episodes(layout):
    def make(seen: list[Any]) -> Collector:
        options: Any = {
            "num_envs": 2,
            "frames_per_batch": 8,
            "seed": 0,
            "layout": layout,
        }
        return Collector(
            lengths(3, 5),
            None,
            on_episode_done=lambda e: seen.append(shown(e)),
            **options,
        )

    before: list[Any] = []
    after: list[Any] = []
    with make(before) as c:
        c.next()
        state = c.state_dict()
        expected = [c.next().clone() for _ in range(3)]
    with make(after) as c:
        c.load_state_dict(state, trust=True)
        for batch in expected:
            assert_same(c.next(), batch)
    assert [traj_id for traj_id, _ in before] == [0, 1, 2, 4, 3, 6, 8, 5]
    assert after == before[3:], "1 and 2 were going on"


# --- on_episode_done, where batches are whole episodes --------------------------------------------


def returns_to_go(episode: Any) -> dict[Any, Any]:
    reward = episode["next", "reward"][:, 0].numpy()
    return {
        "return": reward[::-1].cumsum()[::-1],
        ("next", "left"): torch.arange(len(episode)).flip(0)[:, None],
    }


@pytest.mark.parametrize("buffered", [False, True])
def test_columns_arrive_in_batches_of_whole_episodes_and_in_the_buffer(buffered):
    buffer = Extends()
    options: Any = {
        "num_envs": 2,
        "frames_per_batch": 4,
        "total_frames": 12,
        "trajs_per_batch": 2,
    }
    options |= {"replay_buffer": buffer} if buffered else {}
    with Collector(lengths(2, 3), None, on_episode_done=returns_to_go, **options) as c:
        yielded = list(c)
    batches = buffer.batches if buffered else yielded
    assert [batch["return"].tolist() for batch in batches] == [
        [3, 2, 6, 5, 3],
        [3, 2, 6, 5, 3],
    ]
    assert batches[0]["next", "left"].tolist() == [[1], [0], [2], [1], [0]]
    assert batches[0]["return"].dtype == torch.float32
    assert batches[0].names == ["time"]


@pytest.mark.parametrize("layout", ["cat", "pad"])
def test_an_error_in_the_middle_of_a_group_shows_nothing_twice_and_keeps_the_columns(
    layout,
):
    seen = []

    def mark(episode: Any) -> Any:
        seen.append(int(episode[IDS][0]))
        return {"number": torch.full((len(episode),), len(seen))}

    options: Any = {
        "frames_per_batch": 6,
        "total_frames": 6,
        "trajs_per_batch": 3,
        "traj_format": layout,
    }
    postproc = FailsAt(0)
    with Collector(
        counting(2),
        None,
        on_episode_done=FailsAt(1, then=mark),
        postproc=postproc,
        **options,
    ) as c:
        with pytest.raises(
            HookError,
            match=r"on_episode_done raised ZeroDivisionError: mine.*with this episode",
        ):
            next(iter(c))
        with pytest.raises(ZeroDivisionError):
            next(iter(c))
        (batch,) = list(c)
    assert seen == [0, 1, 2]
    assert batch["number"].reshape(-1).tolist() == [1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ([1, 2], "returned a list: expected None, or a dict"),
        (
            {"a": np.zeros(3)},
            r"a has shape \[3\], and the episode 2 steps: expected \[2, ...\]",
        ),
        ({"a": 1.0}, r"a has shape \[\]"),
        ({"a": ["x", "y"]}, "a is not an array of numbers"),
        ({("collector", "a"): np.zeros(2)}, "outside of 'collector'"),
        (
            {"b": np.zeros(2)},
            r"returned b \[\] torch.float64 for this episode, and a \[\] torch.float64 for the first",
        ),
        ({}, "returned no columns for this episode"),
        (None, "returned no columns for this episode"),
        ({"a": np.zeros((2, 1))}, r"returned a \[1\] torch.float64"),
        ({"a": np.zeros(2, np.float32)}, r"returned a \[\] torch.float32"),
    ],
    ids=stable,
)
def test_columns_that_do_not_fit_are_refused_and_the_group_comes_when_they_do(
    columns, message
):
    answers = iter([{"a": np.ones(2)}, columns, {"a": np.zeros(2)}])
    options: Any = {"frames_per_batch": 4, "total_frames": 4, "trajs_per_batch": 2}
    with Collector(
        counting(2), None, on_episode_done=lambda e: next(answers), **options
    ) as c:
        with pytest.raises(HookError, match=message):
            next(iter(c))
        assert next(iter(c))["a"].tolist() == [1, 1, 0, 0]


def test_groups_that_were_saved_get_their_columns_after_a_load():
    def make() -> Collector:
        options: Any = {"frames_per_batch": 4, "trajs_per_batch": 1, "seed": 0}
        return Collector(counting(2), None, on_episode_done=returns_to_go, **options)

    with make() as c:
        c.next()
        state = c.state_dict()  # the second group of the batch is ready
    with make() as c:
        c.load_state_dict(state, trust=True)
        assert c.next()["return"].tolist() == [3, 2]
        assert c.stats().frames == 4


def test_a_batch_that_was_shown_to_its_end_and_comes_again_is_shown_again():
    seen = []
    hook = EpisodeHook(lambda episode: seen.append(len(episode)), 1)
    batch = TensorDict(
        {DONE: torch.tensor([[False], [True], [True]]), IDS: torch.tensor([0, 0, 1])},
        [3],
    )
    assert hook.whole(hook.whole(batch)) is batch
    assert seen == [2, 1, 2, 1]


# --- when asked -----------------------------------------------------------------------------------


def test_episodes_that_were_asked_for_get_columns_and_steps_that_were_asked_for_show_theirs():
    seen = []

    def look(episode: Any) -> Any:
        seen.append(int(episode[IDS][0]))
        return returns_to_go(episode) if len(seen) <= 4 else None

    with Collector(lengths(2, 3), None, num_envs=2, on_episode_done=look) as c:
        batch = c.collect_batch(n_episode=2).batch
        assert batch["return"].tolist() == [3, 2, 6, 5, 3]
        c.collect(n_episode=2)
        assert len(seen) == 4
        before = list(seen)
        c.collect(n_step=16)
        assert c.buffer.shape == (2, 8)
        beginnings = c.buffer["observation"][..., 1] == 0
        ends = c.buffer[DONE][..., 0]
        whole = [int(i) for i in c.buffer[IDS][ends] if i in c.buffer[IDS][beginnings]]
        assert sorted(seen[4:]) == sorted(whole), "not those that went on from before"
        assert not set(before) & set(seen[4:])
        assert_accounted(c)


# --- on_batch, and what else can fail on the way out ----------------------------------------------


def test_no_function_that_succeeded_is_called_again_for_a_batch_that_another_kept():
    calls: list[str] = []

    def once(name: str, error: type[Exception]) -> Any:
        failed: list[int] = []

        def function(batch: Any) -> Any:
            calls.append(name)
            if not failed:
                failed.append(1)
                raise error("mine")
            return batch[:3] if name == "postproc" else None

        return function

    options: Any = {
        "frames_per_batch": 4,
        "total_frames": 4,
        "replay_buffer": (buffer := Extends(refuses=1)),
    }
    options |= {
        "postproc": once("postproc", KeyError),
        "on_batch": once("on_batch", ValueError),
    }
    with Collector(counting(3), None, **options) as c:
        for error, message in (
            (KeyError, "mine"),
            (HookError, "on_batch raised ValueError: mine"),
            (OSError, "full"),
        ):
            with pytest.raises(error, match=message):
                next(iter(c))
            assert_accounted(c)
        assert list(c) == [None]
        assert c.stats().executed == 4
    assert calls == ["postproc", "postproc", "on_batch", "on_batch"]
    assert [len(batch) for batch in buffer.batches] == [3]


def test_a_buffer_that_refuses_a_transition_gets_none_twice():
    buffer = Adds(room=2)
    with Collector(
        counting(3), None, frames_per_batch=4, total_frames=8, replay_buffer=buffer
    ) as c:
        with pytest.raises(OSError, match="full"):
            next(iter(c))
        buffer.room = None
        assert list(c) == [None, None]
    assert [row["next", "reward"].item() for row in buffer.rows] == [
        1,
        2,
        3,
        1,
        2,
        3,
        1,
        2,
    ]
    sink, batch = (
        ReplaySink(again := Adds(room=1)),
        TensorDict({REWARD: torch.ones(2, 1)}, [2]),
    )
    with pytest.raises(OSError, match="full"):
        sink.write(batch)
    again.room = None
    sink.write(batch)
    sink.write(batch)
    assert len(again.rows) == 4, "a second time, since all of it was written before"


def test_an_error_of_the_hook_after_collecting_keeps_the_batch():
    options: Any = {
        "frames_per_batch": 4,
        "total_frames": 8,
        "post_collect_hook": FailsAt(0),
    }
    with Collector(counting(3), None, **options) as c:
        with pytest.raises(ZeroDivisionError):
            next(iter(c))
        assert [column(batch, *REWARD) for batch in c] == [[1, 2, 3, 1], [2, 3, 1, 2]]


def test_the_hook_after_batches_is_refused_where_nodes_write_them() -> None:
    with Collector(counting(3), None, frames_per_batch=4, replay_buffer=Extends()) as c:
        c._engine.pipeline.leave_to_nodes()  # as RayCollector does with a RayBuffer
        with pytest.raises(
            BadOption, match="nodes write batches into the replay buffer"
        ):
            c.set_post_collect_hook(print)
        assert c.options.post_collect_hook is None
        c.set_post_collect_hook(None)
