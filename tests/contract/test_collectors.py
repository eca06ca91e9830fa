"""What every collector promises, on every collector; where data are compared, with those of
``Collector``.

Three groups of two counting environments each. Where groups fill batches of their own, the n-th
rollout of a group is its part of the n-th batch of ``Collector``, whatever comes first.
"""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import nn

import muster
from muster import (
    AsyncCollector,
    CentralInference,
    Collector,
    Execution,
    MultiAsyncCollector,
    MultiSyncCollector,
    Watch,
    policies,
)
from muster.errors import (
    BadOption,
    BadWeights,
    CollectorBusy,
    CollectorClosed,
    CollectorTimeout,
    EnvError,
    PolicyError,
    SlotsExhausted,
)
from muster.observing.snapshots import RunHistory
from muster.testing import ChainEnv, CountingEnv, FaultyEnv, SpaceEnv
from muster.weights import NoSync, SharedMemory, VanillaWeightUpdater, WeightUpdaterBase
from tests.fakes import on_nodes
from tests.fakes.actors import Actor, Moody, Two
from tests.fakes.buffers import Extends
from tests.fakes.seeded import SeededEnv
from tests.fakes.telling import Counts, telling
from tests.tools import assert_accounted, assert_chain, assert_same, column, counting
from tests.waits import wait_until

B, T = 2, 4
PATIENCE = 60.0  # seconds after which a test gives up
IDS, VERSION, VALID = (
    ("collector", name) for name in ("traj_ids", "policy_version", "valid")
)


@dataclass(frozen=True)
class Kind:
    """A collector, where its workers run, and how many groups it has."""

    name: str
    cls: Any
    groups: int = 3
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def alone(self) -> bool:
        """Every group fills batches of its own."""
        return issubclass(self.cls, (MultiAsyncCollector, *on_nodes.AS_READY))

    @property
    def frames(self) -> int:
        """In a batch."""
        return B * T if self.alone else self.groups * B * T

    @property
    def shape(self) -> tuple[int, ...]:
        return (B, T) if self.alone else (self.groups, B, T)


KINDS = [
    Kind("Collector", Collector),
    *(
        Kind(f"sync-{n}", MultiSyncCollector, options={"num_workers": n})
        for n in (1, 2, 3)
    ),
    Kind("sync-threads", MultiSyncCollector, options={"backend": "threads"}),
    Kind("async", MultiAsyncCollector, options={"num_workers": 2}),
    Kind("async-threads", MultiAsyncCollector, options={"backend": "threads"}),
    Kind("AsyncCollector", AsyncCollector, groups=1),
    Kind(
        "sync-server",
        MultiSyncCollector,
        options={"num_workers": 2, "inference": "server"},
    ),
    Kind(
        "sync-server-alternating",
        MultiSyncCollector,
        options={"inference": CentralInference(alternating=True)},
    ),
    Kind(
        "sync-server-threads",
        MultiSyncCollector,
        options={"inference": "server", "backend": "threads"},
    ),
    Kind("async-server", MultiAsyncCollector, options={"inference": "server"}),
    Kind(
        "AsyncCollector-server",
        AsyncCollector,
        groups=1,
        options={"inference": "server"},
    ),
    Kind("nodes-sync", on_nodes.Together),
    Kind("nodes-async", on_nodes.AsReady),
    Kind("nodes-sync-server", on_nodes.Together, options={"inference": "server"}),
    Kind("nodes-async-server", on_nodes.AsReady, options={"inference": "server"}),
    Kind("direct-async", on_nodes.DirectAsReady),
    Kind("rpc-sync", on_nodes.RpcTogether),
    Kind("ray-sync", on_nodes.RayTogether, groups=2),  # an actor takes seconds to start
    Kind("ray-async", on_nodes.RayAsReady, groups=2),
]
WITH_WORKERS = KINDS[1:]


def make(
    kind: Kind,
    env: Any = None,
    policy: Any = None,
    *,
    batches: int = -1,
    **options: Any,
) -> Any:
    """A collector of ``batches`` batches (-1: endless); ``env`` may be a list of factories, one for
    each group.
    """
    factories = (
        env if isinstance(env, list) else [env or counting(noise=True)] * kind.groups
    )
    total = batches * kind.frames if batches > 0 else -1
    common = {
        "num_envs": B,
        "frames_per_batch": kind.frames,
        "total_frames": total,
        "seed": 3,
    }
    return kind.cls(
        factories[-kind.groups :], policy, **{**common, **kind.options, **options}
    )


def serial(kind: Kind, env: Any = None, policy: Any = None, **options: Any) -> Any:
    """A collector whose workers are never ahead: what is asked of it counts for the next
    ``rollout()``.
    """
    c = make(kind, env, policy, batches=kind.groups if kind.alone else 1, **options)
    assert len([None for _ in c]) == len(c)
    return c


def whole(kind: Kind, c: Any) -> Any:
    """A rollout of every group, ``[groups, B, T]``."""
    parts = (
        [c.rollout() for _ in range(kind.groups)] if kind.alone else list(c.rollout())
    )
    return torch.stack(sorted(parts, key=lambda part: group_of(kind, part)))


def group_of(kind: Kind, part: Any) -> int:
    return int(part[IDS][0, 0]) % (kind.groups * B) // B


def streams(kind: Kind, c: Any, rollouts: int) -> list[list[Any]]:
    """The next rollouts of every group."""
    found: list[list[Any]] = [[] for _ in range(kind.groups)]
    batches = iter(c)
    while min(map(len, found)) < rollouts:
        batch = next(batches)
        for part in [batch] if kind.alone else batch.unbind(0):
            found[group_of(kind, part)].append(part)
    return [of_group[:rollouts] for of_group in found]


def assert_same_streams(found: list[list[Any]], expected: list[list[Any]]) -> None:
    for of_group, others in zip(found, expected, strict=True):
        for part, other in zip(of_group, others, strict=True):
            assert_same(part, other)


def reference(kind: Kind) -> Kind:
    """What a kind is compared with."""
    return Kind("Collector", Collector, kind.groups)


@pytest.fixture(scope="module")
def shared(kind: Kind) -> Iterator[Any]:
    """A collector for all tests that leave it as good as new."""
    with serial(kind, None, Two(), track_policy_version=True) as c:
        yield c


AS_READY = {  # where it matters who comes when
    "test_after_a_break_another_loop_goes_on_and_only_one_runs_at_a_time",
    "test_in_the_background",
    "test_every_row_says_which_weights_acted",
    "test_shutdown_may_be_repeated_and_ends_everything_else",
    "test_an_error_of_an_environment_is_typed_and_collecting_goes_on_with_the_rows_before_it",
}
IN_MAIN_PROCESS = {  # what is done with batches, wherever they are from
    "test_final_observations_are_those_of_the_last_batch",
    "test_split_trajectories_and_postproc_see_the_whole_batch",
    "test_whole_episodes",
    "test_a_replay_buffer_takes_the_batches",
    "test_hooks_are_called_around_every_batch",
    "test_the_context_manager_closes_also_after_an_error",
    "test_shutdown_completes_the_batch_that_another_thread_collects",
}


WITH_OTHER_WORKERS = {
    "test_the_data_are_those_of_collector",
    "test_memory_is_bounded_and_running_out_of_it_loses_nothing",
}
FEW = {
    "Collector",
    "sync-2",
    "sync-threads",
    "async",
    "AsyncCollector",
    "async-server",
    "nodes-sync",
    "nodes-async",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests that make collectors of their own run where others would not do."""
    chosen = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if "kind" in metafunc.fixturenames and "kind" not in chosen:
        test = (
            ""
            if "shared" in metafunc.fixturenames
            else metafunc.definition.originalname
        )
        kinds = [kind for kind in KINDS if runs(test, kind.name)]
        metafunc.parametrize(
            "kind", kinds, ids=[kind.name for kind in kinds], scope="module"
        )


def runs(test: str, kind: str) -> bool:
    if not test:
        return True
    if test in IN_MAIN_PROCESS:
        return kind in FEW
    if kind in (
        "sync-1",
        "sync-3",
    ):  # sync-2 has a worker with two groups and one with a single one
        return test in WITH_OTHER_WORKERS
    return kind != "ray-async" or test in AS_READY  # an actor takes seconds to start


# --- batches --------------------------------------------------------------------------------------


def test_keys_shapes_dtypes_and_names(kind, shared):
    batch = shared.rollout()
    shape = kind.shape
    flags = {
        (*where, flag): ((*shape, 1), torch.bool)
        for where in ((), ("next",))
        for flag in FLAGS
    }
    expected = {
        ("observation",): ((*shape, 3), torch.float32),
        ("next", "observation"): ((*shape, 3), torch.float32),
        ("next", "reward"): ((*shape, 1), torch.float32),
        ("action",): (shape, torch.int64),
        ("weight",): (shape, torch.float32),
        ("value",): (shape, torch.float32),
        IDS: (shape, torch.int64),
        VERSION: (shape, torch.int64),
        **flags,
    }
    found = {
        key if isinstance(key, tuple) else (key,): value
        for key, value in batch.items(True, True)
    }
    assert {key: (tuple(v.shape), v.dtype) for key, v in found.items()} == expected
    assert batch.shape == shape
    assert batch.names == [*[None] * (len(shape) - 1), "time"]
    assert batch.device is None
    assert_same_layout(shared.fake_tensordict(), batch)
    assert all(not value.any() for value in shared.fake_tensordict().values(True, True))


FLAGS = ("done", "terminated", "truncated")


def assert_same_layout(a: Any, b: Any) -> None:
    assert (a.shape, a.names) == (b.shape, b.names)
    assert {k: (v.shape, v.dtype) for k, v in a.items(True, True)} == {
        k: (v.shape, v.dtype) for k, v in b.items(True, True)
    }


def test_batches_stay_valid_and_never_share_memory(kind, shared):
    batches = [shared.rollout() for _ in range(3)]
    copies = [batch.clone() for batch in batches]
    batches[0].apply_(lambda tensor: tensor.zero_())
    shared.rollout()
    for batch, copy in zip(batches[1:], copies[1:], strict=True):
        assert_same(batch, copy)
    assert shared.stats().slots["lent"] == 3
    kept = batches[1]["next", "reward"]
    rewards = kept.clone()
    del batches, batch
    gc.collect()
    assert shared.stats().slots["lent"] == 1, "one tensor keeps its batch alive"
    shared.rollout()
    assert torch.equal(kept, rewards)
    del kept
    gc.collect()
    assert shared.stats().slots["lent"] == 0


def test_memory_is_bounded_and_running_out_of_it_loses_nothing(kind):
    with make(kind, counting(10**6), slot_memory_limit=8192 * kind.groups) as c:
        kept: list[Any] = []
        with pytest.raises(SlotsExhausted, match="slot_memory_limit"):
            while len(kept) < 50:
                kept.append(c.next())
        steps: dict[int, list[float]] = {}
        for _ in range(4 * kind.groups):
            for batch in kept:
                for ids, rewards in zip(
                    batch[IDS].reshape(-1, T),
                    batch["next", "reward"].reshape(-1, T),
                    strict=True,
                ):
                    steps.setdefault(int(ids[0]), []).extend(rewards.tolist())
            kept.clear()
            del batch, ids, rewards
            kept.append(c.next())
        assert len(steps) == kind.groups * B
        assert all(
            of_env == list(range(1, len(of_env) + 1)) for of_env in steps.values()
        )
        assert_accounted(c)


def test_batches_outlive_the_collector(kind):
    with make(kind, batches=1) as c:
        (batch,) = c
        copy = batch.clone()
    del c
    gc.collect()
    assert_same(batch, copy)


# --- data -----------------------------------------------------------------------------------------


def marked(batch: Any) -> Any:
    batch["twice"] = 2 * batch["next", "reward"]
    return batch


OPTIONS: dict[str, dict[str, Any]] = {
    "postproc, cut episodes": {
        "max_frames_per_traj": 2,
        "set_truncated": True,
        "postproc": marked,
    },
    "reset_at_each_iter": {
        "reset_at_each_iter": True,
        "execution": Execution(own_rng=False, executor=False),
    },
    "reset_when_done=False": {"reset_when_done": False, "max_frames_per_traj": 3},
    "random frames": {"init_random_frames": 3 * B * T, "track_policy_version": True},
    "compact": {
        "compact_obs": True,
        "max_frames_per_traj": 2,
        "execution": Execution(inference_mode=False),
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_data_are_those_of_collector(kind, name):
    if kind.name == "ray-sync" and name not in (
        "postproc, cut episodes",
        "random frames",
    ):
        pytest.skip("as in other workers")
    options = dict(OPTIONS[name])
    if "init_random_frames" in options:
        options["init_random_frames"] = kind.groups * B * T
    found, expected = [], []
    for of, into in ((kind, found), (reference(kind), expected)):
        with make(
            of, ChainEnv if "reset_when_done" in options else None, Actor(), **options
        ) as c:
            into += streams(of, c, 4)
            assert_accounted(c)
    assert_same_streams(found, expected)


def test_the_users_head_has_the_distribution_from_which_copies_drew(kind):
    """Its shape and numbering come from the action space, also where only copies of it act."""
    env = partial(
        SpaceEnv, spaces.Box(-1, 1, (4,)), spaces.MultiDiscrete([2, 3], start=[1, 0])
    )
    head = policies.categorical(nn.Linear(4, 5))
    with make(kind, env, head) as c:
        batch = c.rollout()
        log_prob = head.distribution(batch["observation"]).log_prob(batch["action"])
    torch.testing.assert_close(log_prob, batch["action_log_prob"])


def test_what_is_collected_in_inference_mode_can_be_trained_on(kind):
    net = nn.Linear(2, 1)
    with make(kind, counting(3)) as c:
        with torch.inference_mode():
            batch = c.rollout()
        assert not any(leaf.is_inference() for leaf in batch.values(True, True))
        net(batch["observation"]).sum().backward()
    assert net.weight.grad is not None


def test_final_observations_are_those_of_the_last_batch(kind):
    with make(kind, counting(3), compact_obs=True) as c:
        (batch,) = [c.next() for _ in range(2)][1:]
        finals = c.final_observations()
        for env, row, obs in zip(
            *(finals[k].tolist() for k in ("env", "row", "observation")), strict=True
        ):
            part = batch if kind.alone else batch[env // B]
            assert obs == [3.0, part["next", "reward"][env % B, row, 0].item()]
        assert len(finals) == int(batch["next", "done"].sum()) + batch.numel() // T


def test_split_trajectories_and_postproc_see_the_whole_batch(kind):
    seen = []
    with make(
        kind, counting(3), split_trajs=True, postproc=seen.append, batches=2
    ) as c:
        batches = list(c)
    assert [batch["collector", "mask"].sum() for batch in batches] == [kind.frames] * 2
    first = [
        [int(r) for r in column(batch, "next", "reward")[0] if r] for batch in batches
    ]
    assert first[0] == [1, 2, 3]
    assert first[1] in (
        [2, 3],
        [1, 2, 3],
    )  # the same group's second batch, or the first of another one
    assert all(a is b for a, b in zip(seen, batches, strict=True))


def test_whole_episodes(kind):
    with make(kind, counting(3), trajs_per_batch=4, traj_format="pad") as c:
        for batch in [c.next() for _ in range(4)]:
            assert column(batch, "next", "reward") == [[1, 2, 3]] * 4
            assert batch["next", "done"][:, -1].all()
            assert_accounted(c)


def test_complete_episodes_are_written_into_a_replay_buffer(kind):
    buffer = Extends()
    told = {"replay_buffer": buffer, "replay_write_mode": "trajectory"}
    with make(kind, counting(3), batches=3, **told) as c:
        assert list(c) == [None] * 3
        stats = c.stats()
        assert stats.executed == 3 * kind.frames
        assert (
            stats.written == stats.frames == sum(len(batch) for batch in buffer.batches)
        )
        assert stats.written + stats.in_flight == stats.executed
        assert stats.written == 3 * stats.episodes == stats.completed
        assert_accounted(c)
    for batch in buffer.batches:
        assert column(batch, "next", "reward") == [1, 2, 3] * (len(batch) // 3)
        assert (batch[IDS].reshape(-1, 3) == batch[IDS][::3, None]).all(), (
            "none is in two pieces"
        )


# --- how many -------------------------------------------------------------------------------------


def test_total_frames_are_exact_and_nothing_more_is_executed(kind):
    with make(kind, batches=5) as c:
        assert len(c) == 5
        batches = list(c)
        assert [batch.shape for batch in batches] == [kind.shape] * 5
        assert list(c) == []
        assert c.next() is None
        stats = c.stats()
        assert (stats.frames, stats.batches, stats.executed) == (
            5 * kind.frames,
            5,
            5 * kind.frames,
        )
        c.rollout()
        assert c.stats().frames == 6 * kind.frames
        assert list(c) == []
        assert_accounted(c)


def test_an_endless_collector_has_no_length(shared):
    with pytest.raises(TypeError, match="endless"):
        len(Collector(CountingEnv, None, frames_per_batch=2))


def test_frames_that_cannot_be_shared_equally_are_marked(kind):
    if kind.cls in on_nodes.TOGETHER:
        pytest.skip("frames_per_batch counts per node")
    frames = kind.frames - 1
    with pytest.warns(UserWarning, match="cannot be shared equally"):
        c = make(kind, frames_per_batch=frames, total_frames=3 * frames)
    with c:
        batches = list(c)
        assert [int(batch[VALID].sum()) for batch in batches] == [frames] * 3
        assert {batch.shape for batch in batches} == {kind.shape}
        stats = c.stats()
        assert stats.frames == 3 * frames
        assert stats.discarded == {"surplus": 3}
        assert_accounted(c)


def test_after_a_break_another_loop_goes_on_and_only_one_runs_at_a_time(kind):
    with make(kind, counting(3), batches=8) as c:
        for _ in c:
            break
        first = iter(c)
        parts = [next(first)]
        with pytest.raises(CollectorBusy, match="del it"):
            iter(c)
        del first
        gc.collect()
        parts += [c.next(), *c]
        assert len(parts) == 7
        assert_accounted(c)
    last: dict[int, tuple[int, float]] = {}
    for part in (
        p for batch in parts for p in ([batch] if kind.alone else batch.unbind(0))
    ):
        for ids, rewards in zip(
            part[IDS].tolist(), column(part, "next", "reward"), strict=True
        ):
            env = ids[0] % (kind.groups * B)
            before = last.get(env)
            assert before is None or rewards[0] == before[1] % 3 + 1, (
                "the steps of an environment follow each other"
            )
            last[env] = ids[-1], rewards[-1]


# --- resets and seeds -----------------------------------------------------------------------------


def test_reset_begins_new_episodes_where_it_is_told(kind):
    found, expected = [], []
    for of, into in ((kind, found), (reference(kind), expected)):
        with serial(of, counting(9, noise=True)) as c:
            into.append(whole(of, c))
            c.reset([1])
            into.append(whole(of, c))
            c.reset()
            into.append(whole(of, c))
            with pytest.raises(BadOption, match="numbered 0 to"):
                c.reset(kind.groups * B)
    for part, other in zip(found, expected, strict=True):
        assert_same(part, other)
    assert column(found[1], "next", "reward")[0] == [[9, 1, 2, 3], [1, 2, 3, 4]]
    assert found[2]["observation"][..., 0, 1].eq(0).all()


@pytest.mark.parametrize("static", [False, True])
def test_set_seed_repeats_the_data_and_returns_the_last_seed(kind, shared, static):
    assert shared.set_seed(7, static_seed=static) == (
        7 if static else 7 + kind.groups * B - 1
    )
    first = whole(kind, shared)
    whole(kind, shared)
    shared.set_seed(7, static_seed=static)
    assert_same(first, whole(kind, shared), ignore=[IDS, VERSION])
    noise = first["observation"].reshape(-1, T, 3)[:, 0, 2]
    assert len(noise.unique()) == (1 if static else len(noise))
    with pytest.raises(BadOption, match="set_seed"):
        shared.set_seed(-1)


# --- hooks, buffers, background -------------------------------------------------------------------


def test_a_function_is_called_for_every_environment(kind):
    total = kind.groups * B
    with serial(kind, SeededEnv, seed=5) as c:
        numbers = c.map_envs(
            lambda env, by, *, factor: factor * env.seeds[0] + by, 1, factor=10
        )
        assert numbers == [10 * (5 + i) + 1 for i in range(total)]
        c.map_envs(setattr, "t", -5)
        assert c.map_envs(getattr, "t") == [-5] * total
        with pytest.raises(BadOption, match="expected a function of an environment"):
            c.map_envs("reset")
        with pytest.raises(Exception, match="has no attribute 'nothing'"):
            c.map_envs(getattr, "nothing")
        c.reset()
        assert whole(kind, c)["observation"][..., 0, 1].unique().tolist() == [0]


def test_the_hook_after_each_batch_can_be_replaced(kind):
    first: list[Any] = []
    second: list[Any] = []
    with make(kind, batches=4, post_collect_hook=first.append) as c:
        batches = iter(c)
        next(batches)
        c.set_post_collect_hook(second.append)
        assert c.options.post_collect_hook == second.append
        next(batches)
        with pytest.raises(
            BadOption, match="post_collect_hook='print': expected a function"
        ):
            c.set_post_collect_hook("print")
        c.set_post_collect_hook(None)
        next(batches)
        c.set_post_collect_hook(first.append)
        last = next(batches)
    assert (len(first), len(second)) == (2, 1)
    assert_same(first[1], last)


def test_trajectory_ids_can_be_left_out(kind):
    with make(kind, track_traj_ids=False) as c, make(kind) as plain:
        batch = c.next()
        assert set(plain.next().keys(True, True)) - set(batch.keys(True, True)) == {IDS}
        assert batch.shape == kind.shape
        assert {record.traj_id for record in c.episodes} <= set(
            range(4 * kind.groups * B)
        )
        assert len(c.episodes)


def test_every_environment_can_have_a_seed_of_its_own(kind):
    seeds = [17, 4, 23, 8, 15, 42][: kind.groups * B]
    with serial(kind, SeededEnv, seed=seeds) as c:
        with pytest.raises(
            BadOption, match=f"set_seed has 7 seeds for {len(seeds)} environments"
        ):
            c.set_seed(range(7))
        with pytest.raises(
            BadOption, match="static_seed gives all environments one seed"
        ):
            c.set_seed(seeds, static_seed=True)
        assert c.set_seed(seeds) == seeds[-1]
        first = whole(kind, c)
        assert first["observation"][..., 0, 0].flatten().tolist() == seeds
        assert c.set_seed(seeds[::-1]) == seeds[0]
        assert (
            whole(kind, c)["observation"][..., 0, 0].flatten().tolist() == seeds[::-1]
        )
        c.set_seed(seeds)
        assert_same(whole(kind, c), first, ignore=(IDS,))


def test_every_episode_can_have_a_seed_of_a_list(kind):
    """Episode k of environment i has entry ``i + k * environments``."""
    seeds = [5, 3, 11, 7, 2]
    total = kind.groups * B
    with make(kind, SeededEnv, episode_seeds=seeds) as c:
        for part in (part for parts in streams(kind, c, 3) for part in parts):
            expected = torch.tensor(seeds)[part[IDS] % len(seeds)]
            assert torch.equal(part["observation"][..., 0].long(), expected)
            assert part[IDS].max() < 3 * T * total
    with serial(kind, SeededEnv, episode_seeds=seeds) as c:
        c.set_seed(1)
        again = whole(kind, c)["observation"][..., 0]
        assert again[..., 0].flatten().long().tolist() == [
            seeds[i % 5] for i in range(total)
        ]


def test_hooks_are_called_around_every_batch(kind):
    seen: list[Any] = []
    with make(
        kind,
        batches=3,
        pre_collect_hook=lambda: seen.append("before"),
        post_collect_hook=lambda b: seen.append(b),
    ) as c:
        batches = list(c)
    assert seen[::2] == ["before"] * 3
    assert all(a is b for a, b in zip(seen[1::2], batches, strict=True))


def test_own_metrics_are_logged_at_the_delivered_frames(kind, tmp_path):
    logged: list[tuple[int, Any]] = []
    options = {
        "logger": lambda metrics, step: logged.append((step, metrics)),
        "watch": Watch(tmp_path, None),
    }
    with make(kind, batches=3, **options) as c:
        c.log({"loss": 9.0})
        for number, _ in enumerate(c):
            c.log({"loss": torch.tensor(0.5), "number": number})
        c.log({"at the end": 1}, step=1000)
        with pytest.raises(
            BadOption, match="'loss' is of shape \\[2\\]: expected one number"
        ):
            c.log({"loss": torch.zeros(2)})
    own = [
        (step, metrics)
        for step, metrics in logged
        if "collect/frames_per_s" not in metrics
    ]
    assert own == [
        (0, {"loss": 9.0}),
        *((n * kind.frames, {"loss": 0.5, "number": n - 1.0}) for n in (1, 2, 3)),
        (1000, {"at the end": 1.0}),
    ]
    assert [step for step, _ in logged] == [
        *(0, kind.frames, kind.frames, 2 * kind.frames, 2 * kind.frames),
        *(3 * kind.frames, 3 * kind.frames, 1000),
    ]
    shown = [s for s in RunHistory.read(tmp_path).snapshots if "metrics" in s]
    assert sum(s["metrics"].get("loss", [0, 0, 0])[1] for s in shown) == 4
    assert shown[-1]["metrics"]["at the end"] == [1.0, 1, 0]
    assert shown[-1]["metrics_at"] == 3 * kind.frames
    with pytest.raises(CollectorClosed):
        c.log({"loss": 1.0})


def test_a_replay_buffer_takes_the_batches(kind):
    buffer = Extends()
    with make(kind, batches=3, replay_buffer=buffer) as c:
        assert list(c) == [None] * 3
        assert [batch.shape for batch in buffer.batches] == [kind.shape] * 3
        assert c.getattr_rb("batches") is buffer.batches
        assert_accounted(c)


def test_a_buffer_of_torchrl_gets_one_item_per_frame(kind):
    data, batches = pytest.importorskip("torchrl.data"), []
    buffer = data.ReplayBuffer(storage=data.LazyTensorStorage(1000), batch_size=4)
    with make(
        kind,
        batches=3,
        replay_buffer=buffer,
        on_batch=lambda batch: batches.append(batch.clone()),
    ) as c:
        assert list(c) == [None] * 3
        assert buffer.write_count == c.stats().frames == 3 * kind.frames
        assert_same(buffer[:], torch.cat([batch.reshape(-1) for batch in batches]))
        assert buffer[:].shape == (3 * kind.frames,)
        for amount in ({"n_step": 2 * kind.frames}, {"n_step": 5}, {"n_episode": 3}):
            before = buffer.write_count
            assert c.collect(**amount).n_collected_steps == buffer.write_count - before
        assert_accounted(c)


def test_in_the_background(kind):
    buffer = Extends()
    with make(
        kind, None, Actor(), replay_buffer=buffer, track_policy_version=True
    ) as c:
        assert not c.is_running()
        c.start()
        buffer.until(2)
        with c.pause():
            assert c.is_running()
            count = len(buffer.batches)
            c.rollout()
            assert c.state_dict()["engine"]["frames"] >= (count + 1) * kind.frames
            assert len(buffer.batches) == count
        c.update_policy_weights_(Actor(2.0))
        buffer.until(count + 1)
        buffer.until_true(lambda: buffer.batches[-1][VERSION].unique().tolist() == [1])
        c.async_shutdown()
        assert not c.is_running()
        assert_accounted(c)
        with pytest.raises(CollectorClosed):
            c.start()
    for batch in buffer.batches:
        assert torch.equal(batch["weight"], batch[VERSION] + 1.0)


def test_start_needs_a_buffer(shared):
    with pytest.raises(BadOption, match="replay_buffer="):
        shared.start()


# --- weights --------------------------------------------------------------------------------------

FORMS: dict[str, Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "module": lambda: ((Two(2.0, 5.0),), {}),
    "TensorDict": lambda: ((TensorDict.from_module(Two(2.0, 5.0)),), {}),
    "dict": lambda: ((Two(2.0, 5.0).state_dict(),), {}),
    "nested dict": lambda: (
        (TensorDict.from_module(Two(2.0, 5.0)).data.to_dict(),),
        {},
    ),
    "dict of modules": lambda: ((), {"weights": dict(Two(2.0, 5.0).named_children())}),
    "weights=": lambda: ((), {"weights": Two(2.0, 5.0).state_dict()}),
    "policy=": lambda: ((), {"policy": Two(2.0, 5.0)}),
    "weights_dict": lambda: (
        (),
        {
            "weights_dict": {
                "actor": Actor(2.0),
                "policy.critic": Actor(5.0).state_dict(),
            }
        },
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_weights_in_every_form(shared, form):
    shared.update_policy_weights_(Two(1.0, 0.0))
    before = shared.policy_version
    args, keywords = FORMS[form]()
    shared.update_policy_weights_(*args, **keywords)
    batch = shared.rollout()
    assert (batch["weight"].unique().tolist(), batch["value"].unique().tolist()) == (
        [2.0],
        [5.0],
    )
    assert torch.equal(batch["action"], (batch["observation"][..., 1] >= 2).long())
    assert shared.policy_version == shared.get_policy_version() == before + 1
    assert batch[VERSION].unique().tolist() == [before + 1]


def test_a_part_is_named_by_its_path(shared):
    shared.update_policy_weights_(Two(1.0, 0.0))
    shared.update_policy_weights_(Actor(3.0), model_id="critic")
    batch = shared.rollout()
    assert (batch["weight"].unique().tolist(), batch["value"].unique().tolist()) == (
        [1.0],
        [3.0],
    )
    with pytest.raises(BadOption, match="model_id='nothing'"):
        shared.update_policy_weights_(Actor(3.0), model_id="nothing")


@pytest.mark.parametrize(
    "wrong",
    [
        {"actor.weight": torch.ones(1)},
        {"actor.weight": torch.ones(2), "critic.weight": torch.ones(1)},
        {"actor.weight": torch.full((1,), torch.nan), "critic.weight": torch.ones(1)},
        nn.Linear(2, 2),
        3,
    ],
    ids=["missing", "shape", "nan", "module", "number"],
)
def test_bad_weights_change_nothing(shared, wrong):
    shared.update_policy_weights_(Two(1.0, 4.0))
    before = shared.policy_version
    with pytest.raises(BadWeights):
        shared.update_policy_weights_(wrong)
    with pytest.raises(BadOption, match="once"):
        shared.update_policy_weights_(Two(), weights=Two().state_dict())
    batch = shared.rollout()
    assert (batch["weight"].unique().tolist(), batch["value"].unique().tolist()) == (
        [1.0],
        [4.0],
    )
    assert shared.policy_version == before


def test_nothing_given_is_what_the_optimizer_has_changed(kind, shared):
    policy = shared.policy
    policy.actor.weight.data.fill_(3.0)
    shared.update_policy_weights_()
    assert shared.rollout()["weight"].unique().tolist() == [3.0]
    if kind.cls is not Collector:
        policy.actor.weight.data.fill_(-3.0)
        assert shared.rollout()["weight"].unique().tolist() == [3.0], (
            "workers have copies"
        )
    policy.actor.weight.data.fill_(1.0)
    shared.update_policy_weights_()


def test_a_part_of_the_policy_stands_for_all_of_it(shared):
    policy = shared.policy
    policy.actor.weight.data.fill_(2.0)
    policy.critic.weight.data.fill_(7.0)
    shared.update_policy_weights_(policy.actor)
    batch, before = shared.rollout(), shared.policy_version
    assert (batch["weight"].unique().tolist(), batch["value"].unique().tolist()) == (
        [2.0],
        [7.0],
    )
    for part in (
        {"actor": {"weight": torch.ones(1)}},
        {"actor": Actor(3.0)},
        Actor(3.0),
    ):
        with pytest.raises(
            BadWeights, match="missing .'critic.weight'.|fit several parts"
        ):
            shared.update_policy_weights_(part)
    batch = shared.rollout()
    assert (batch["weight"].unique().tolist(), batch["value"].unique().tolist()) == (
        [2.0],
        [7.0],
    )
    assert shared.policy_version == before
    policy.actor.weight.data.fill_(1.0)
    policy.critic.weight.data.fill_(0.0)
    shared.update_policy_weights_()


def test_collecting_changes_neither_the_mode_nor_the_statistics_of_the_policy(kind):
    """It acts in evaluation mode, wherever it acts, and the statistics that training finds are
    published.
    """
    policy = Moody()
    modes, untrained = policy.modes(), deepcopy(policy)
    with make(kind, None, policy, track_policy_version=True) as c:
        batches = [c.next(), c.next()]
        policy.norm(
            torch.randn(64, 3, generator=torch.Generator().manual_seed(0)) * 3 + 1
        )  # as in training
        state = deepcopy(policy.state_dict())
        assert not torch.equal(state["norm.running_mean"], untrained.norm.running_mean)
        c.update_policy_weights_(policy.norm)
        while (batches[-1][VERSION] == 0).all():
            batches.append(c.next())
        batches.append(c.next())
    for batch in batches:
        old = (batch[VERSION] == 0).unsqueeze(-1)
        expected = torch.where(
            old,
            untrained.evaluated(batch["observation"]),
            policy.evaluated(batch["observation"]),
        )
        torch.testing.assert_close(batch["seen"], expected)
    assert policy.modes() == modes
    assert all(
        torch.equal(tensor, state[name]) for name, tensor in policy.state_dict().items()
    )


def test_every_row_says_which_weights_acted(kind):
    """Weights change whenever they like; from the version, action and weight of every row follow."""
    with make(kind, None, Actor(0.0), track_policy_version=True, batches=24) as c:
        for number, batch in enumerate(c):
            assert torch.equal(batch["weight"], batch[VERSION].float())
            assert torch.equal(
                batch["action"],
                (batch["observation"][..., 1] >= batch["weight"]).long(),
            )
            rows = batch[VERSION].reshape(-1, T)
            if (
                kind.name == "async-server"
            ):  # one policy for all: it changes where any of the rollouts begins
                assert (rows[:, 1:] >= rows[:, :-1]).all()
            else:
                assert (rows[:, 1:] == rows[:, 1:2]).all(), "a rollout has one version"
            assert (rows[:, 0] <= rows[:, 1]).all(), (
                "but for its first row: the policy's first call shows its columns"
            )
            assert int(rows.max()) <= number
            assert kind.alone or rows.unique().tolist() == [number]
            c.update_policy_weights_(Actor(number + 1.0))
        lags = c.stats().policy_lag
        assert sum(lags.values()) == 24
        assert kind.alone or lags == {0: 24}


class Scaling(WeightUpdaterBase):
    """Adds ten to what it is given, and notes for which workers."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def _sync_weights_with_worker(
        self, *, worker_id: Any = None, server_weights: Any
    ) -> None:
        self.told.append(worker_id)
        with torch.no_grad():
            self.collector.policy.weight.copy_(server_weights["weight"] + 10)


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
@pytest.mark.parametrize("own", [False, True], ids=["vanilla", "own"])
def test_weight_updaters(kind, own):
    policy = Actor(1.0)
    updater = Scaling() if own else VanillaWeightUpdater.from_policy(policy)
    with serial(
        kind, None, policy, weight_updater=updater, track_policy_version=True
    ) as c:
        c.update_policy_weights_(Actor(2.0))
        batch = c.rollout()
        assert batch["weight"].unique().tolist() == [12.0 if own else 2.0]
        assert batch[VERSION].unique().tolist() == [1]
        if own:
            c.update_policy_weights_(Actor(3.0), worker_ids=[0])
            assert updater.told == [None, 0]
            assert whole(kind, c)["weight"][0].unique().tolist() == [13.0]


@pytest.mark.parametrize(
    "scheme", ["shared", "none", SharedMemory(), NoSync()], ids=str
)
@pytest.mark.parametrize(
    "kind", [WITH_WORKERS[1], WITH_WORKERS[3], WITH_WORKERS[4]], ids=lambda k: k.name
)
def test_weight_sync_schemes(kind, scheme):
    with serial(
        kind,
        None,
        Actor(1.0),
        weight_sync_schemes={"policy": scheme},
        track_policy_version=True,
    ) as c:
        c.update_policy_weights_(Actor(2.0))
        c.update_policy_weights_(Actor(3.0))
        weights = c.rollout()["weight"].unique().tolist()
        assert weights == [
            1.0 if scheme == "none" or isinstance(scheme, NoSync) else 3.0
        ]


def test_episodes_begin_with_the_state_that_the_policy_gives(kind):
    policy = policies.recurrent(Counts(), initial_state="h0")
    with serial(kind, counting(3), policy) as c:
        for h0 in (5.0, 9.0):
            with torch.no_grad():
                policy.h0.fill_(h0)
            c.update_policy_weights_()
            c.reset()
            batch = whole(kind, c)
            steps = torch.tensor([0.0, 1.0, 2.0, 0.0])
            expected = (h0 + steps)[:, None].expand(kind.groups, B, T, 2)
            assert torch.equal(batch["recurrent_state"], expected)
            assert torch.equal(batch["seen"], expected)
            assert torch.equal(
                batch["is_init"][..., 0], (steps == 0).expand(kind.groups, B, T)
            )


def test_each_worker_can_make_its_own_policy(kind):
    if kind.cls is Collector or "inference" in kind.options:
        pytest.skip("there is one policy")
    workers = kind.options.get("num_workers", kind.groups)
    factories = [telling(10 + worker) for worker in range(workers)]
    with make(kind, policy_factory=factories, policy_device=["cpu"] * workers) as c:
        assert c.policy.number == 10
        with torch.no_grad():
            c.policy.weight.fill_(2.0)
        c.update_policy_weights_(worker_ids=[torch.device("cpu")])
        for group, (part,) in enumerate(streams(kind, c, 1)):
            assert part["number"].unique().tolist() == [
                10 + group * workers // kind.groups
            ]
    with pytest.raises(BadOption, match=f"policy_factory has {workers + 1} entries"):
        make(kind, policy_factory=[*factories, telling(1)])


def test_only_collectors_with_workers_send_weights(kind):
    if kind.cls is Collector:
        with pytest.raises(ValueError, match="weight_recv_schemes"):
            make(kind, None, Actor(), weight_sync_schemes={"policy": "shared"})
    else:
        with pytest.raises(BadOption, match="critic"):
            make(kind, None, Actor(), weight_sync_schemes={"critic": "none"})


@pytest.mark.parametrize("kind", KINDS[2:5], ids=lambda k: k.name)
def test_weights_for_some_workers(kind):
    with make(kind, None, Actor(1.0), track_policy_version=True) as c:
        c.update_policy_weights_(Actor(2.0), worker_ids=[1])
        batch = c.rollout()
        assert torch.equal(batch["weight"], batch[VERSION] + 1.0)
        of_group = batch["weight"][:, 0, 0].tolist()
        assert of_group == (
            [1.0, 1.0, 2.0] if kind.name == "sync-2" else [1.0, 2.0, 1.0]
        )
        with pytest.raises(BadOption, match="worker"):
            c.update_policy_weights_(Actor(2.0), worker_ids=[7])
        with pytest.raises(
            BadOption,
            match="worker_ids=device.type='meta'.: the policies of all workers are on cpu",
        ):
            c.update_policy_weights_(Actor(2.0), worker_ids=torch.device("meta"))
        with pytest.raises(
            BadOption,
            match="worker_ids has 'cpu': expected numbers of workers, or devices",
        ):
            c.update_policy_weights_(Actor(2.0), worker_ids="cpu")
        c.update_policy_weights_(Actor(5.0), worker_ids=0)
        assert c.rollout()["weight"][0].unique().tolist() == [5.0]
        everyone = range(len(c.stats().workers))
        with pytest.raises(
            BadOption,
            match="worker_ids=device.type='cpu', index=1.: the policies of all workers",
        ):
            c.update_policy_weights_(Actor(2.0), worker_ids=[torch.device("cpu", 1)])
        for version, ids in enumerate(
            (torch.device("cpu"), [torch.device("cpu", 0), 0], everyone), 3
        ):
            c.update_policy_weights_(Actor(float(version)), worker_ids=ids)
            batch = c.rollout()
            assert (
                batch["weight"].unique().tolist(),
                batch[VERSION].unique().tolist(),
            ) == (
                [version],
                [version],
            )
        c.update_policy_weights_()
        assert c.rollout()[VERSION].unique().tolist() == [6]


def test_collector_has_no_workers_to_choose_from():
    with (
        serial(KINDS[0], None, Actor()) as c,
        pytest.raises(TypeError, match="worker_ids"),
    ):
        c.update_policy_weights_(Actor(2.0), worker_ids=[0])


# --- state ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("saver", "loader"),
    [(0, 0), (0, 2), (2, 0), (3, 2), (4, 1), (5, 5), (5, 6), (6, 5), (7, 7)],
    ids=lambda number: KINDS[number].name,
)
def test_collecting_goes_on_exactly_in_another_collector(saver, loader, tmp_path):
    of, into = KINDS[saver], KINDS[loader]
    options = {"track_policy_version": True, "max_frames_per_traj": 5}
    with (
        make(of, ChainEnv, Actor(0.0), **options) as first,
        make(into, ChainEnv, Actor(9.0), **options) as second,
    ):
        for number in range(4):
            first.next()
            first.update_policy_weights_(Actor(number + 1.0))
        muster.save_state(tmp_path / "state", first.state_dict())
        second.next()  # what it has made before does not matter
        result = second.load_state_dict(tmp_path / "state")
        assert result.exact, str(result)
        assert second.policy_version == 4
        assert second.policy.weight.tolist() == [4.0]
        a, b = first.stats(), second.stats()
        assert [(s.frames, s.executed, s.batches) for s in (a, b)] == [
            (a.frames, a.executed, a.batches)
        ] * 2
        expected, found = streams(of, first, 4), streams(into, second, 4)
        for parts, others in zip(found, expected, strict=True):
            for part, other in zip(parts, others, strict=True):
                assert_same(part, other)
            assert_chain(torch.cat(list(parts), -1))
        assert_accounted(first)
        assert_accounted(second)


def test_undelivered_rollouts_are_in_the_state():
    """All that workers had made when the state was taken is delivered after it, here and there, and
    only once.
    """
    kind = KINDS[5]
    with (
        make(kind, ChainEnv, batches=9) as first,
        make(kind, ChainEnv, batches=9) as second,
    ):
        first.next()
        state = first.state_dict()
        expected = list(first)
        second.load_state_dict(state)
        found = list(second)
        assert len(found) == len(expected) == 8
        by_group = [[[] for _ in range(kind.groups)] for _ in range(2)]
        for c, batches, parts in zip(
            (first, second), (expected, found), by_group, strict=True
        ):
            assert (c.stats().frames, c.stats().executed) == (
                9 * kind.frames,
                9 * kind.frames,
            )
            for batch in batches:
                parts[group_of(kind, batch)].append(batch)
        for of_group, others in zip(*by_group, strict=True):
            assert len(of_group) >= 1
            for part, other in zip(of_group, others, strict=False):
                assert_same(part, other)


# --- looking at it --------------------------------------------------------------------------------


def test_the_timeline_shows_all_groups(kind, tmp_path):
    with make(kind, batches=4) as c:
        c.timeline.start()
        list(c)
        c.timeline.stop()
        c.timeline.save(tmp_path / "timeline.json")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    names = {event["name"] for event in events if event["ph"] == "X"}
    assert {"rollout", "policy", "env", "collect"} <= names
    tracks = {
        event["tid"]
        for event in events
        if event["ph"] == "X" and event["name"] == "rollout"
    }
    assert tracks <= {0, 2, 4}
    assert kind.alone or len(tracks) == kind.groups


@pytest.mark.parametrize("chosen", [None, [0], [1]], ids=str)
@pytest.mark.parametrize("kind", [KINDS[0], KINDS[2], KINDS[5]], ids=lambda k: k.name)
def test_profiles_of_chosen_workers(kind, chosen, tmp_path):
    if kind.cls is Collector and chosen == [1]:
        pytest.skip("it is worker 0")
    with make(kind, batches=6) as c:
        path = tmp_path / "trace_{worker_idx}.json"
        c.enable_profile(
            workers=chosen,
            num_rollouts=2,
            warmup_rollouts=1,
            save_path=path,
            activities=["cpu"],
        )
        list(c)
        c.disable_profile()
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        f"trace_{n}.json" for n in chosen or [0]
    ]


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[2], KINDS[4]], ids=lambda k: k.name)
def test_a_function_may_take_the_profile(kind, tmp_path):
    path = tmp_path / "steps"
    with make(kind, batches=4) as c:
        c.enable_profile(
            activities=["cpu"],
            on_trace_ready=lambda profile: path.write_text(str(profile.step_num)),
        )
        list(c)
        c.disable_profile()
    assert int(path.read_text()) > 0


def test_what_workers_tell_about_themselves(kind, shared):
    stats = shared.stats()
    assert_accounted(shared)
    if kind.cls is Collector:
        assert stats.workers == ()
        return
    envs = [i for worker in stats.workers for i in worker.env_ids]
    assert envs == list(range(kind.groups * B))
    assert {worker.state for worker in stats.workers} == {"working"}
    assert sum(worker.frames for worker in stats.workers) == stats.frames
    assert sum(worker.share for worker in stats.workers) == pytest.approx(1.0)
    assert shared.getattr_env("length") == [3] * (kind.groups * B)
    assert shared.getattr_policy("training")
    with pytest.raises(BadOption, match="getattr_env"):
        _ = shared.env


def test_repr(kind, shared):
    envs = f"CountingEnv x {kind.groups * B}"
    assert repr(shared).startswith(
        f"{kind.cls.__name__}({envs}, frames_per_batch={kind.frames}, "
    )


# --- the end --------------------------------------------------------------------------------------


def test_shutdown_may_be_repeated_and_ends_everything_else(kind):
    c = make(kind, None, Actor())
    batch = c.next()
    copy = batch.clone()
    c.shutdown()
    c.shutdown()
    stats = c.stats()
    assert_accounted(c)
    assert (stats.in_flight, stats.frames) == (0, kind.frames)
    assert_same(batch, copy)
    assert "closed" in repr(c)
    for use in (
        iter,
        lambda c: c.rollout(),
        lambda c: c.reset(),
        lambda c: c.set_seed(1),
        lambda c: c.state_dict(),
    ):
        with pytest.raises(CollectorClosed, match="make a new one"):
            use(c)
    for use in (
        lambda c: c.update_policy_weights_(),
        lambda c: c.__enter__(),
        lambda c: c.fake_tensordict(),
    ):
        with pytest.raises(CollectorClosed, match="make a new one"):
            use(c)


def test_shutdown_completes_the_batch_that_another_thread_collects(kind):
    c = make(kind)
    ends: list[Any] = []
    seen = 0

    def collect() -> None:
        nonlocal seen
        try:
            while True:
                c.next()
                seen += 1
        except Exception as error:  # noqa: BLE001 (whatever ends the loop)
            ends.append(error)

    thread = threading.Thread(target=collect)
    thread.start()
    wait_until(lambda: seen > 2)
    c.shutdown()
    thread.join(PATIENCE)
    assert [type(error) for error in ends] == [CollectorClosed]
    assert_accounted(c)
    assert c.stats().frames == seen * kind.frames


def test_shutdown_does_not_wait_for_ever_for_another_thread():
    c = make(Kind("Collector", Collector))
    inside, is_over = threading.Event(), threading.Event()

    def hold() -> None:
        with c.pause():
            inside.set()
            is_over.wait(PATIENCE)

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(PATIENCE)
    with pytest.raises(CollectorTimeout, match=r"has used this collector for 0\.01 s"):
        c.shutdown(timeout=0.01)
    is_over.set()
    thread.join(PATIENCE)
    assert c.next().shape == (3, B, T)
    c.shutdown()


def test_the_context_manager_closes_also_after_an_error(kind):
    with pytest.raises(ZeroDivisionError), make(kind) as c:
        batches = iter(c)
        next(batches)
        _ = 1 / 0
    with pytest.raises(CollectorClosed):
        next(batches)
    assert_accounted(c)


# --- errors ---------------------------------------------------------------------------------------


def broken() -> Exception:
    return ValueError("joint 3 is stuck")


def test_an_error_of_an_environment_is_typed_and_collecting_goes_on_with_the_rows_before_it(
    kind,
):
    """Each environment of one group raises at its 7th step, in the second rollout; all other data
    are untouched.
    """
    bad = partial(FaultyEnv, 6, error=broken)
    factories = [counting(3), counting(4), bad]
    found, expected = [], []
    for of, into in ((kind, found), (reference(kind), expected)):
        with make(of, factories, seed=3) as c:
            errors, parts = [], [[] for _ in range(kind.groups)]
            while min(map(len, parts)) < 4:
                try:
                    batch = c.next()
                except EnvError as error:
                    errors.append(error)
                    assert_accounted(c)
                    continue
                for part in [batch] if of.alone else batch.unbind(0):
                    parts[group_of(of, part)].append(part)
            into += [of_group[:4] for of_group in parts]
            assert [type(error.__cause__) for error in errors] == [ValueError] * B
            assert_accounted(c)
            assert c.stats().in_flight == 0 or of.alone
        if of.cls is not Collector:
            (error, _) = errors
            assert "joint 3 is stuck" in str(error)
            assert "in step\n    raise self.error()" in str(error), (
                "the traceback in the worker"
            )
            assert str(error.__cause__) == "joint 3 is stuck"
            first = (kind.groups - 1) * B
            assert (error.env_id, error.env_index, error.phase) == (first, 0, "step")
            assert error.seed == 3 + first
            assert error.worker == c.stats().workers[-1].index
    assert_same_streams(found, expected)


class Picky(Actor):
    """Cannot stand the third step of episodes of four, while its weight is negative."""

    def forward(self, obs: torch.Tensor) -> Any:
        if float(self.weight.min()) < 0 and bool(
            ((obs[..., 0] == 4) & (obs[..., 1] == 2)).any()
        ):
            raise KeyError("no such step")
        return super().forward(obs)


def test_an_error_of_a_policy_is_typed_and_the_step_is_repeated_with_better_weights(
    kind,
):
    factories = [counting(3), counting(3), counting(4)]
    options = {"track_policy_version": True, "execution": Execution(executor=False)}
    found, expected = [], []
    for of, into in ((kind, found), (reference(kind), expected)):
        with make(of, factories, Picky(-1.0), **options) as c:
            with pytest.raises(PolicyError, match="no such step") as caught:
                while True:
                    c.next()
            assert isinstance(caught.value.__cause__, KeyError)
            assert_accounted(c)
            if of.cls is not Collector:
                assert caught.value.phase == "policy"
                assert "in forward" in str(caught.value)
            c.update_policy_weights_(Picky(1.0))
            parts = streams(of, c, 3) if not of.alone else None
            into += (
                parts if parts is not None else streams(of, c, 2)
            )  # the other groups have gone on meanwhile
            assert_accounted(c)
    last = found[-1][0]
    assert last["weight"].tolist() == [[-1, -1, 1, 1]] * B
    assert last[VERSION].tolist() == [[0, 0, 1, 1]] * B
    assert_same(last, expected[-1][0])
    if not kind.alone and kind.name not in (
        "sync-server",
        "sync-server-threads",
    ):  # there all repeat the common call
        assert_same_streams(found, expected)


def test_an_error_while_making_environments_ends_the_construction(kind):
    def fails() -> Any:
        raise OSError("no display")

    with pytest.raises(EnvError, match="no display") as caught:
        make(kind, [counting(), counting(), fails])
    assert isinstance(caught.value.__cause__, OSError)
    if kind.cls is not Collector:
        assert caught.value.phase == "construct"
