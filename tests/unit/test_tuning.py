"""Tuning: the grid, what is measured, that measuring changes nothing of the user's, and what the
result makes.
"""

from __future__ import annotations

import dataclasses
import random
import threading
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import nn

import muster
from muster import CentralInference, Collector, MultiAsyncCollector, MultiSyncCollector
from muster.collectors.auto import Load, auto_workers, choose_workers, measure
from muster.collectors.multi_options import MultiOptions
from muster.collectors.options import CollectorOptions
from muster.errors import BadOption, EnvError, PolicyError
from muster.testing import CountingEnv, SpaceEnv
from muster.tuning import Candidate, Setup
from muster.tuning.search import grid
from muster.utils.cpus import usable_cores
from tests.tools import assert_same, counting, recorded

BUSY, SLEEPING = Load(1.0), Load(0.01)


# --- the grid -------------------------------------------------------------------------------------


def setups_of(
    load: Load = BUSY, cores: float = 2.0, totals: Any = (8,), **more: Any
) -> list[Setup]:
    return grid(load, cores, totals, 2048, **{"groups": None, "policy": False, **more})


def test_the_grid_of_an_environment_that_computes() -> None:
    assert [
        (s.workers, s.groups, s.num_envs, s.T) for s in setups_of(totals=(8, 32))
    ] == [
        (0, 1, 8, 256),
        (2, 2, 4, 256),
        (4, 4, 2, 256),
        (0, 1, 32, 64),
        (2, 2, 16, 64),
        (4, 4, 8, 64),
    ]
    assert {s.backend for s in setups_of()} == {"processes"}


def test_more_workers_than_cores_and_threads_are_tried_where_environments_wait() -> (
    None
):
    found = {
        (s.workers, s.backend) for s in setups_of(SLEEPING, totals=(64,)) if s.workers
    }
    assert found == {
        (n, backend) for n in (2, 4, 64) for backend in ("processes", "threads")
    }
    assert (
        max(s.workers for s in setups_of(SLEEPING, totals=(16,))) == 16
    )  # one environment in each


def test_central_inference_is_tried_where_there_is_a_policy() -> None:
    alternating = CentralInference(alternating=True)
    assert {s.inference for s in setups_of(policy=True) if s.workers} == {
        "worker",
        "server",
        alternating,
    }
    assert {s.inference for s in setups_of()} == {"worker"}


def test_setups_have_the_requested_environments() -> None:
    for setup in setups_of(SLEEPING, totals=(12, 16)):
        assert setup.groups * setup.num_envs in (12, 16)
        assert setup.groups == max(1, setup.workers)
        assert abs(setup.frames - 2048) <= 8


def test_given_groups_stay_as_they_are() -> None:
    setups = setups_of(totals=(12,), groups=6)
    assert {(s.groups, s.num_envs) for s in setups} == {(6, 2)}
    assert {s.workers for s in setups} == {0, 2, 4}
    assert {s.workers for s in setups_of(totals=(2,), groups=1)} == {0}


def test_vector_environments_are_not_cut() -> None:
    setups = setups_of(Load(1.0, env_batch=8), totals=(8, 16, 20))
    assert {(s.groups, s.num_envs) for s in setups} == {(1, 8), (2, 8)}
    assert all(s.from_vector and "num_envs" not in s.options() for s in setups)


# --- numbers of workers ---------------------------------------------------------------------------


def options(**keywords: Any) -> MultiOptions:
    return MultiOptions(
        None, **{"frames_per_batch": 2048, "num_workers": "auto", **keywords}
    )


@pytest.mark.parametrize(
    ("load", "cores", "groups", "keywords", "workers"),
    [
        (BUSY, 4.0, None, {"num_envs": 8}, 4),
        (BUSY, 4.0, 3, {"num_envs": 8}, 3),
        (BUSY, 4.0, 8, {"num_envs": 8}, 4),
        (BUSY, 1.0, 8, {"num_envs": 8}, 1),
        (BUSY, 0.5, None, {"num_envs": 8}, 1),
        (
            BUSY,
            4.0,
            None,
            {"num_envs": 8, "backend": "threads"},
            1,
        ),  # threads share one core
        (Load(0.5), 4.0, None, {"num_envs": 8}, 8),
        (Load(0.95), 4.0, None, {"num_envs": 8}, 4),
        (SLEEPING, 4.0, None, {"num_envs": 1}, 64),
        (SLEEPING, 4.0, None, {"num_envs": 1, "backend": "threads"}, 64),
        (
            SLEEPING,
            4.0,
            None,
            {"num_envs": 2, "frames_per_batch": 20},
            10,
        ),  # a step for every environment
    ],
)
def test_as_many_workers_as_keep_the_cores_busy(
    load: Load, cores: float, groups: int | None, keywords: dict[str, Any], workers: int
) -> None:
    assert (
        choose_workers(load, options(**keywords), groups, cores, alone=False) == workers
    )


def test_groups_that_fill_batches_of_their_own_need_no_share_of_one() -> None:
    assert (
        choose_workers(
            SLEEPING, options(frames_per_batch=20, num_envs=20), None, 2.0, alone=True
        )
        == 64
    )


@pytest.mark.parametrize("cls", [MultiSyncCollector, MultiAsyncCollector])
def test_auto_makes_a_group_for_each_worker_of_a_function(cls: Any) -> None:
    with cls(
        counting(),
        None,
        num_workers="auto",
        num_envs=2,
        frames_per_batch=64,
        total_frames=64,
    ) as collector:
        (batch,) = list(collector)
        workers = len(collector.stats().workers)
    assert 1 <= workers <= 32
    assert batch.shape == (
        (workers, 2, 32 // workers) if cls is MultiSyncCollector else (2, 32)
    )


def test_with_a_list_auto_changes_nothing_but_the_number_of_workers() -> None:
    batches = []
    for workers in ("auto", 1, 3):
        factories = [counting(n, noise=True) for n in (3, 4, 5)]
        with MultiSyncCollector(
            factories, num_workers=workers, num_envs=2, frames_per_batch=60, seed=3
        ) as collector:
            batches.append(collector.rollout().clone())
            assert len(collector.stats().workers) <= 3
    assert_same(batches[0], batches[1])
    assert_same(batches[0], batches[2])


def test_auto_makes_one_environment_here_and_closes_it() -> None:
    factory, made = recorded(counting())
    assert auto_workers(factory, None, options(num_envs=4), alone=False) >= 1
    assert [env.closed for env in made] == [1]


def test_auto_refuses_an_environment_object_before_it_is_touched() -> None:
    env = CountingEnv()
    with pytest.raises(BadOption, match=r"create_env_fn\[0\] is an environment"):
        MultiSyncCollector([env], num_workers="auto", frames_per_batch=8)
    assert (env.executed, env.closed, env.seeds) == (0, 0, [])


def test_other_words_than_auto_are_refused() -> None:
    with pytest.raises(BadOption, match="num_workers='many'"):
        options(num_workers="many")


# --- measuring ------------------------------------------------------------------------------------


def measured(
    factory: Any = "CartPole-v1",
    policy: Any = None,
    seconds: float = 0.1,
    **keywords: Any,
) -> Load:
    wanted = {"frames_per_batch": 64, "num_envs": 1, **keywords}
    return measure(factory, policy, CollectorOptions(factory, **wanted), seconds)


def test_waiting_is_told_from_computing() -> None:
    event = threading.Event()

    class Waiting(CountingEnv):
        def step(self, action: Any) -> Any:
            event.wait(0.002)
            return super().step(action)

    assert measured(Waiting, seconds=0.3).waits
    assert not measured().waits


def test_a_slow_environment_is_not_measured_for_a_whole_rollout() -> None:
    steps, event = [0], threading.Event()

    class Slow(CountingEnv):
        def step(self, action: Any) -> Any:
            steps[0] += 1
            event.wait(0.2)
            return super().step(action)

    assert measured(Slow, seconds=0.1).waits
    assert steps[0] <= 4


def test_a_vector_environment_is_measured_whole() -> None:
    assert (
        measured(
            lambda: gymnasium.make_vec("CartPole-v1", 6, "sync"), num_envs=None
        ).env_batch
        == 6
    )


def test_an_unbatched_policy_sees_no_batch() -> None:
    def policy(obs: torch.Tensor) -> torch.Tensor:
        assert obs.shape == (4,)
        return torch.zeros((), dtype=torch.int64)

    measured(policy=policy, num_envs=None)


def test_measuring_leaves_generators_and_policy_alone() -> None:
    class Noisy(CountingEnv):
        def step(self, action: Any) -> Any:
            random.random(), np.random.rand(), torch.rand(1)
            return super().step(action)

    net = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.LayerNorm(2))
    before = [value.clone() for value in net.state_dict().values()]
    states = (
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.get_rng_state().tolist(),
    )
    auto_workers(
        Noisy, muster.policies.categorical(net), options(num_envs=2), alone=False
    )
    assert (
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.get_rng_state().tolist(),
    ) == states
    assert all(
        torch.equal(a, b)
        for a, b in zip(before, net.state_dict().values(), strict=True)
    )
    assert [b.grad for b in net.parameters()] == [None] * 4


def test_lazy_layers_stay_lazy() -> None:
    net = nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 2))
    measured(policy=muster.policies.categorical(net))
    assert isinstance(net[0].weight, nn.parameter.UninitializedParameter)


@pytest.mark.parametrize(
    "keywords",
    [{"reset_when_done": False}, {"max_frames_per_traj": 7}, {"compact_obs": True}],
)
def test_options_of_rollouts_do_not_disturb_the_measurement(keywords: Any) -> None:
    class Stop:
        def collection_stopped(self) -> bool:
            raise AssertionError("the user's interruptor")

    factory, made = recorded(counting(10))
    measured(factory, interruptor=Stop(), **keywords)
    assert [env.closed for env in made] == [1]


def test_errors_of_environments_and_policies_are_raised_and_environments_are_closed() -> (
    None
):
    def fails(obs: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no")

    factory, made = recorded(counting())
    with pytest.raises(PolicyError, match="no"):
        measured(factory, fails)
    assert [env.closed for env in made] == [1]
    with pytest.raises(EnvError, match="no such"):
        measured(partial(_fail, "no such thing"))


def _fail(message: str) -> Any:
    raise RuntimeError(message)


def test_keywords_of_the_first_entry_are_used() -> None:
    lengths = []

    def make(length: int) -> CountingEnv:
        lengths.append(length)
        return CountingEnv(length)

    kwargs = [{"length": 3}, {"length": 4}]
    measure(
        [make, make],
        None,
        CollectorOptions(
            None, frames_per_batch=64, num_envs=1, create_env_kwargs=kwargs
        ),
        0.05,
    )
    assert lengths == [3]


# --- the machine ----------------------------------------------------------------------------------


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_the_share_of_a_container_counts_not_the_cores_of_its_host(
    tmp_path: Path,
) -> None:
    cores = usable_cores(tmp_path)  # nothing is known there
    new = {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "50000 100000\n"}
    assert usable_cores(tree(tmp_path / "new", new)) == min(cores, 0.5)
    inner = {**new, "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}
    assert usable_cores(tree(tmp_path / "inner", inner)) == min(cores, 0.5)
    old = {
        "proc/self/cgroup": "3:cpu,cpuacct:/x\n2:memory:/\n",
        "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "25000\n",
        "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n",
    }
    assert usable_cores(tree(tmp_path / "old", old)) == min(cores, 0.25)
    unlimited = {
        "proc/self/cgroup": "1:cpu:/\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
    }
    assert usable_cores(tree(tmp_path / "unlimited", unlimited)) == cores


# --- all of it ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tuning() -> Any:
    said: list[str] = []
    found = muster.tune(
        counting(9), seconds=1.0, num_envs=[4, 8], frames_per_batch=64, say=said.append
    )
    assert said[0] == "measuring how much the environment computes"
    assert len(said) == 2 + len(found.candidates)
    return found


def test_every_setup_is_timed_and_the_fastest_three_in_turns(
    tuning: muster.Tuning,
) -> None:
    final = [c for c in tuning.candidates if c.final]
    assert len(final) == 3
    assert tuning.candidates[:3] == tuple(final)
    assert tuning.best == max(final, key=lambda c: c.rate or 0)
    others = [c.rate for c in tuning.candidates[3:]]
    assert all(rate is not None and rate > 0 for rate in others)
    assert others == sorted(others, key=lambda rate: -(rate or 0))
    assert {c.setup.groups * c.setup.num_envs for c in tuning.candidates} == {4, 8}
    assert len({c.setup for c in tuning.candidates}) == len(tuning.candidates)
    assert 0 < tuning.cpu_share <= 1
    assert tuning.cores == usable_cores()


def test_the_constructor_call_makes_what_was_measured(tuning: muster.Tuning) -> None:
    collectors = {
        cls.__name__: cls
        for cls in (Collector, MultiSyncCollector, MultiAsyncCollector)
    }
    for setup in (
        tuning.best.setup,
        tuning.candidates[-1].setup,
        Setup(num_envs=4, groups=1, T=16),
    ):
        found = with_best(tuning, setup)
        call = found.constructor_call("counting(9)", "None", more=", seed=1")
        with eval(call, {"counting": counting, **collectors}) as collector:
            shown = collector.rollout()
        with found.make(counting(9), seed=1) as collector:
            assert_same(shown, collector.rollout())
        assert shown.numel() == setup.frames


def with_best(tuning: muster.Tuning, setup: Setup) -> muster.Tuning:
    return dataclasses.replace(tuning, candidates=(Candidate(setup, 1.0),))


@pytest.mark.parametrize(
    ("setup", "call"),
    [
        (Setup(num_envs=8, T=4), "Collector(f, p, num_envs=8, frames_per_batch=32)"),
        (
            Setup(num_envs=8, groups=2, workers=2, T=4),
            "MultiSyncCollector([f] * 2, p, num_envs=8, frames_per_batch=64)",
        ),
        (
            Setup(
                num_envs=8,
                groups=4,
                workers=2,
                T=4,
                inference=CentralInference(alternating=True),
                backend="threads",
            ),
            "MultiSyncCollector([f] * 4, p, num_workers=2, num_envs=8, frames_per_batch=128, "
            "backend='threads', inference=CentralInference(alternating=True))",
        ),
    ],
)
def test_constructor_calls(tuning: muster.Tuning, setup: Setup, call: str) -> None:
    assert with_best(tuning, setup).constructor_call("f", "p") == call


def test_with_a_policy_a_server_is_timed_too() -> None:
    policy = muster.policies.categorical(nn.Linear(2, 2))
    found = muster.tune(
        counting(9), policy, seconds=0.5, num_envs=4, frames_per_batch=64
    )
    served = [c for c in found.candidates if c.setup.inference != "worker"]
    assert {c.setup.inference for c in served} == {
        "server",
        CentralInference(alternating=True),
    }
    assert all(c.rate for c in served)


def test_a_list_stays_a_list() -> None:
    factories = [counting(3), counting(4)]
    found = muster.tune(factories, seconds=0.5, frames_per_batch=32)
    assert {(c.setup.groups, c.setup.num_envs) for c in found.candidates} == {(2, 1)}
    assert (
        found.constructor_call("factories")
        .partition("(")[2]
        .startswith("factories, policy, ")
    )
    with found.make(factories) as collector:
        assert collector.rollout().numel() == 32


def test_vector_environments_are_taken_as_they_come() -> None:
    def make_vec() -> Any:
        return gymnasium.make_vec("CartPole-v1", 3, "sync")

    found = muster.tune(make_vec, seconds=0.5, frames_per_batch=32)
    assert {c.setup.num_envs for c in found.candidates} == {3}
    assert "num_envs" not in found.constructor_call()
    with found.make(make_vec) as collector:
        assert collector.rollout().shape[-2] == 3


def test_setups_that_are_refused_are_listed_with_the_reason() -> None:
    def policy(obs: Any) -> torch.Tensor:
        return torch.zeros(len(obs["text"]), dtype=torch.int64)

    text = gymnasium.spaces.Dict({"text": gymnasium.spaces.Text(9)})
    speaking = partial(SpaceEnv, text, gymnasium.spaces.Discrete(2))
    found = muster.tune(speaking, policy, seconds=0.3, num_envs=4, frames_per_batch=32)
    refused = [c for c in found.candidates if c.rate is None]
    assert {c.setup.inference for c in refused} == {
        "server",
        CentralInference(alternating=True),
    }
    assert all("Python objects" in (c.refused or "") for c in refused)
    assert found.best.rate
    assert found.candidates[-len(refused) :] == tuple(refused)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"seconds": 0}, "seconds=0: expected more than 0"),
        ({"num_envs": 0}, "num_envs=0: expected integers of at least 1"),
        ({"num_envs": [8, True]}, "expected integers"),
        (
            {"create_env_fn": ["CartPole-v1"] * 2, "num_envs": 3},
            "multiples of the 2 groups",
        ),
        ({"create_env_fn": CountingEnv()}, "create_env_fn is an environment"),
        ({"policy_factory": lambda: None}, "policy_factory"),
        ({"frames_per_batchs": 3}, "did you mean 'frames_per_batch'"),
        ({"policy": (open, Path)}, "policy"),
    ],
)
def test_impossible_requests_are_refused(
    keywords: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadOption, match=message):
        muster.tune(**{"create_env_fn": "CartPole-v1", "seconds": 0.1, **keywords})
