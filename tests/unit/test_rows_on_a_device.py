"""Collectors of environments with rows on a device: the same batches, ids, records and statistics
as with rows on the host, bit for bit.
"""

from __future__ import annotations

import math
import pickle
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from muster import Collector, ReplayMemory, policies
from muster.collectors.last_rollouts import MOST_UNREAD
from muster.collectors.options import CollectorOptions
from muster.collectors.setup import slot_limit
from muster.episodes.clock import TrajectoryClock
from muster.episodes.record import PendingEpisodes, join_episodes
from muster.episodes.tensor_clock import TensorClock
from muster.errors import BadEnvOutput, EnvError
from muster.memory.slots import Lane, Layout, Slot
from muster.rollout.columns import lane_columns
from muster.rollout.on_device import OnDevice, device_rows
from muster.testing import TorchCartPole
from tests.fakes.device_rows import on_device
from tests.fakes.waiting import Waits
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


def make(
    B: int = 5, mode: AutoresetMode = AutoresetMode.SAME_STEP
) -> Callable[[], Any]:
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
    for name in (
        "frames",
        "executed",
        "discarded",
        "episodes",
        "return_mean",
        "length_mean",
    ):
        assert getattr(stats, name) == getattr(others, name), name
    assert stats.completed == others.completed
    for collector in (here, there):
        assert_accounted(collector)


def tilt(obs: torch.Tensor) -> torch.Tensor:
    return (obs[:, 2] > 0).long()


def counting(obs: torch.Tensor, state: torch.Tensor | None) -> Any:
    state = torch.zeros_like(obs[:, :1]) if state is None else state
    return state[:, 0].long() % 2, state + 1


POLICY = pytest.mark.parametrize(
    "policy",
    [
        lambda: None,
        lambda: tilt,
        lambda: counting,
        lambda: policies.deterministic(nn.Linear(4, 2)),
    ],
    ids=["random", "function", "recurrent", "head"],
)
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


@POLICY
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
            envs,
            tilt,
            frames_per_batch=5 * rows,
            seed=3,
            replay_buffer=memory,
            total_frames=900,
        )
        for envs, memory in zip((make(), on_device(make())), memories, strict=True)
    ]
    with collectors[0] as here, collectors[1] as there:
        for _ in zip(here, there, strict=True):
            assert_same_records(here, there)
    assert len(memories[0]) == len(memories[1])
    assert_same(memories[0].sample(64), memories[1].sample(64))


# --- nothing waits --------------------------------------------------------------------------------


def waits_of(
    collector: Collector, batches: int, then: Callable[[], Any] = lambda: None
) -> Counter[str]:
    """What waits for the device in so many batches: operations, and what copies to the host."""
    lane = collector._engine.source.bundles[0].ring.take().lanes[0]
    group = collector._engine.groups[0]
    codes = {
        Lane.pull.__code__: "pull",
        Lane.push.__code__: "push",
        TensorClock.on_host.__code__: "clock",
    }
    called: Counter[str] = Counter()

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in codes:
            called[codes[frame.f_code]] += 1

    assert lane.mirrored
    assert group.on_device is not None
    on_host = [array for array in lane.arrays.values() if array.dtype != object]
    with Waits(on_host) as mode:
        sys.setprofile(profile)
        try:
            for _ in range(batches):
                collector.next()
                then()
        finally:
            sys.setprofile(None)
    assert mode.calls > 100
    return mode.found + called


NEVER_WAIT = {
    name: OPTIONS[name]
    for name in (
        "plain",
        "one row",
        "limit",
        "ids hidden",
        "versions",
        "unchecked",
        "marked ends",
    )
}


@OF_MODE
@pytest.mark.parametrize("options", NEVER_WAIT)
def test_no_batch_waits_for_the_device(options, mode):
    assert_never_waits(tilt, mode, NEVER_WAIT[options])


@POLICY
def test_no_policy_waits_for_the_device(policy):
    assert_never_waits(policy(), AutoresetMode.SAME_STEP, {})


def assert_never_waits(policy: Any, mode: Any, options: dict[str, Any]) -> None:
    given = {"frames_per_batch": 100, "seed": 3, **options}
    batches = 400 // given["frames_per_batch"]
    with Collector(on_device(make(mode=mode)), policy, **given) as there:
        for _ in range(3):
            there.next()
        assert not waits_of(there, batches)
        assert there.stats().episodes
        assert there.stats().frames == (3 + batches) * given["frames_per_batch"]


@pytest.mark.parametrize(
    "options", ["waiting", "all checked", "hooked", "reset each", "cut frames"]
)
@pytest.mark.filterwarnings("ignore:.*cannot be shared equally")
def test_options_that_need_the_host_wait_for_it(options):
    given = {"frames_per_batch": 100, "seed": 3, **OPTIONS[options]}
    with Collector(on_device(make()), tilt, **given) as there:
        there.next()
        assert waits_of(there, 2)


def test_what_ended_is_read_where_it_is_used():
    with Collector(on_device(make()), tilt, frames_per_batch=100, seed=3) as there:
        for _ in range(6):
            there.next()
            episodes = there._engine.ended.shown
            assert isinstance(episodes, PendingEpisodes)
            assert episodes.would_wait
            assert len(there._engine.ended._unread) <= MOST_UNREAD
        assert bool(episodes) == bool(len(episodes))
        assert not episodes.would_wait
        assert there.episodes is episodes
        assert pickle.loads(pickle.dumps(episodes)) == list(episodes)


class Late:
    """Copies that are complete when the host has waited for them, or when ``come`` says so."""

    def __init__(self, waits: list[int]) -> None:
        self.has_come = False
        self._waits = waits

    def wait(self) -> None:
        if not self.has_come:
            self._waits.append(1)
        self.has_come = True

    def then(self, copy: Callable[[], Any]) -> Any:
        return copy(), type(self)(self._waits)


def test_records_that_arrive_late_are_waited_for_where_they_are_used_or_overwritten():
    """Two lanes in turn: the third rollout overwrites the records of the first one."""
    waits: list[int] = []
    with Collector(on_device(make()), frames_per_batch=100) as collector:
        group = collector._engine.groups[0]
    columns = lane_columns(group.env.spec, [], group.options)
    lanes = [
        Slot(Layout(20, 5, columns), torch.device("cpu")).lanes[0] for _ in range(2)
    ]
    rows = [device_rows(lane, group.env.spec) for lane in lanes]
    there = OnDevice(
        TrajectoryClock(np.arange(5), 5),
        group.env.spec,
        group.options,
        group.can,
        lambda device: Late(waits),
    )
    clock = TrajectoryClock(np.arange(5), 5)
    expected = []
    pending = []
    for number in range(4):
        clock_rows = rows[number % 2].clock
        clock_rows.reward.normal_()
        for flag in (clock_rows.terminated, clock_rows.truncated):
            flag.bernoulli_(0.1)
        there.look()
        there.prepare(rows[number % 2])
        there.compute(rows[number % 2])
        pending.append(there.send(rows[number % 2]))
        reward, terminated, truncated, done = (
            column.numpy() for column in clock_rows[:4]
        )
        expected.append(clock.advance(reward, terminated, truncated, done))
        assert len(waits) == max(0, number - 1)
    assert all(episodes.would_wait for episodes in pending)
    joined = join_episodes(pending)
    assert len(waits) == 2
    assert len(joined) == sum(map(len, expected))
    assert not any(episodes.would_wait for episodes in pending)
    assert list(joined) == [record for episodes in expected for record in episodes]


# --- bad values -----------------------------------------------------------------------------------


class Bad(Uneven):
    """One reward is bad, in step ``at`` of environment 2 (None: never)."""

    at: int | None = None

    def step(self, action: torch.Tensor) -> Any:
        obs, reward, *rest = super().step(action)
        self.made = getattr(self, "made", -1) + 1
        if self.made == self.at:
            reward[2] = math.nan
        return obs, reward, *rest


def bad_at(step: int) -> Callable[[], Any]:
    def made() -> Any:
        env = Bad(5, max_steps=23)
        env.at = step
        return env

    return on_device(made)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_bad_reward_is_noticed_in_the_next_batch(groups):
    envs: Any = bad_at(27)
    frames = 100
    if groups == 2:
        envs = [on_device(make()), envs]
        frames = 200
    with Collector(envs, tilt, frames_per_batch=frames, seed=3) as there:
        there.next()
        there.next()  # rows 20 to 39
        with pytest.raises(
            BadEnvOutput, match=r"\[2\].step \(row 7 of the last rollout\)"
        ) as info:
            there.next()
        assert "reward is nan" in str(info.value)
        assert_accounted(there)
        assert there.stats().frames == 2 * frames
        batch = there.next()
        assert torch.isfinite(batch["next", "reward"]).all()
        assert_accounted(there)
        starts = batch["collector", "traj_ids"].reshape(-1, 20)[-5:, 0]
        before = there.episodes
        assert len(set(starts.tolist())) == 5
        for _ in range(3):
            there.next()
        assert all(math.isfinite(each.episode_return) for each in before)
        assert_accounted(there)


def test_a_bad_reward_of_the_last_batch_is_noticed_at_the_end():
    with Collector(
        bad_at(27), tilt, frames_per_batch=100, total_frames=200, seed=3
    ) as there:
        got = []
        with pytest.raises(BadEnvOutput, match="reward is nan"):
            got.extend(there)
        assert_accounted(there)
        assert there.stats().frames == 200


def test_with_full_checks_a_bad_reward_is_in_no_batch():
    with Collector(
        bad_at(27), tilt, frames_per_batch=100, seed=3, validate="full"
    ) as there:
        there.next()
        with pytest.raises(BadEnvOutput, match=r"\[2\].step \(row 7 of the batch\)"):
            there.next()
        assert_accounted(there)
        assert torch.isfinite(there.next()["next", "reward"]).all()
        assert_accounted(there)


def test_without_checks_a_bad_reward_is_in_the_record_of_its_episode_only():
    here = Collector(
        bad_at(27).args[0], tilt, frames_per_batch=100, seed=3, validate="off"
    )
    there = Collector(bad_at(27), tilt, frames_per_batch=100, seed=3, validate="off")
    bad = 0
    with here, there:
        for _ in range(6):
            assert_same(here.next(), there.next())
            a, b = here.episodes, there.episodes
            assert a.traj_id.tolist() == b.traj_id.tolist()
            assert a.episode_return.tobytes() == b.episode_return.tobytes()
            bad += sum(math.isnan(each.episode_return) for each in b)
    assert bad == 1


class Failing(Uneven):
    """Raises in some steps."""

    made = 0

    def step(self, action: torch.Tensor) -> Any:
        self.made += 1
        if self.made in (7, 8, 52):
            raise RuntimeError("broken")
        return super().step(action)


def test_after_an_error_of_the_environments():
    env = partial(Failing, 5, max_steps=23)
    here, there = both(env, lambda: tilt, max_frames_per_traj=11)
    with here, there:
        batches = 0
        while batches < 5:
            got = []
            for collector in (here, there):
                try:
                    got.append(collector.next())
                except EnvError:
                    got.append(None)
                assert_accounted(collector)
            assert (got[0] is None) == (got[1] is None)
            if got[0] is not None:
                batches += 1
                assert_same(got[0], got[1])
                assert_same_records(here, there)


# --- slots ----------------------------------------------------------------------------------------


def starts(batch: Any) -> set[int]:
    return {leaf.data_ptr() for leaf in batch.values(True, True)}


def test_a_batch_is_the_memory_that_the_environments_write():
    """It comes back when the last tensor of a batch is dropped, and no other batch has it before."""
    with Collector(on_device(make()), tilt, frames_per_batch=100, seed=3) as there:
        lanes: list[Any] = []
        seen: list[set[int]] = []
        kept: list[Any] = []
        for number in range(6):
            batch = there.next()
            seen.append(starts(batch))
            if number in (1, 3):
                kept.append((batch["next", "reward"], batch["next", "reward"].clone()))
            lanes += [id(slot) for slot in there._engine.source.bundles[0].ring.slots]
            del batch
        held = [reward.data_ptr() for reward, _ in kept]
        assert all(torch.equal(reward, copy) for reward, copy in kept)
        for number, pointer in zip((1, 3), held, strict=True):
            assert pointer in seen[number]
            assert all(pointer not in later for later in seen[number + 1 :])
        assert len(set(lanes)) <= 4
        kept.clear()
        again = {pointer for _ in range(4) for pointer in starts(there.next())}
        assert again & set(held)


def test_beyond_the_limit_batches_on_a_device_are_copies():
    here = Collector(make(), tilt, frames_per_batch=100, seed=3)
    there = Collector(
        on_device(make()), tilt, frames_per_batch=100, seed=3, slot_memory_limit=25_000
    )
    with here, there:
        kept = [(here.next().clone(), there.next()) for _ in range(8)]
        for a, b in kept:
            assert_same(a, b)
        assert there.stats().slots["lent"] < 8
        assert_accounted(there)


def test_the_default_limit_of_slots_on_a_gpu_is_half_of_its_free_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (6 << 30, 8 << 30))
    options = CollectorOptions(make(), frames_per_batch=100)
    gpu = torch.device("cuda", 0)
    assert slot_limit(options, gpu) == 3 << 30
    for memory in ("heap", torch.device("cpu")):
        assert slot_limit(options, memory) == options.slot_memory_limit
    chosen = CollectorOptions(make(), frames_per_batch=100, slot_memory_limit=1 << 20)
    assert slot_limit(chosen, gpu) == 1 << 20


class Copies(TorchDispatchMode):
    """Counts copies that the host waits for, and those that it does not wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[bool] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.found[bool(args[2]) if len(args) > 2 else False] += 1
        return func(*args, **(kwargs or {}))


def test_columns_are_brought_to_the_host_together():
    """The host waits once, after the last copy has begun."""
    with Collector(on_device(make()), tilt, frames_per_batch=100, seed=3) as there:
        there.next()
        lane = there._engine.source.bundles[0].ring.take().lanes[0]
        lane.completed_there()
        with Copies() as copies:
            lane.bring_to_host()
        host = [column for column in lane.layout.tensor_columns if column.host]
        assert copies.found == {True: len(host)}
        for column in host:
            tensor = lane.tensors[column.key]
            assert (lane.arrays[column.key] == tensor.numpy()).all()


def test_what_a_user_writes_into_a_batch_is_in_no_other():
    here, there = both(
        make(), lambda: tilt, max_frames_per_traj=11, track_policy_version=True
    )
    with here, there:
        for _ in range(4):
            expected, batch = here.next(), there.next()
            assert_same(expected, batch)
            for leaf in batch.values(True, True):
                leaf.fill_(1)
            del batch, leaf


@pytest.mark.parametrize("validate", ["fast", "full"])
def test_memory_of_the_host_is_made_where_an_option_needs_it(validate):
    given = {"frames_per_batch": 40, "seed": 0, "track_policy_version": True}
    with Collector(on_device(make()), validate=validate, **given) as collector:
        for _ in range(3):
            collector.next()
        ring = collector._engine.source.bundles[0].ring
        (lane,) = [lane for slot in ring.slots for lane in slot.lanes]
        assert (len(lane.arrays) > 0) == (validate == "full")
        # ... and it counts as there
        assert ("next", "reward") in lane.arrays
        assert lane.arrays["next", "reward"].shape == (8, 5)
        assert lane.arrays.get(("observation",)) is None
