"""Tuning: what the model says of costs that are known, that measuring disturbs nobody, and what comes of it."""

from __future__ import annotations

import dataclasses
import math
import random
import threading
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import muster
from muster import Collector, MultiAsyncCollector, MultiOptions, MultiSyncCollector
from muster.collectors.auto import auto_workers, choose_workers
from muster.collectors.options import CollectorOptions
from muster.collectors.setup import worker_options
from muster.collectors.tuning import collector_class, make, with_server, worth_trying
from muster.errors import BadOption, EnvError, PolicyError
from muster.testing import CountingEnv
from muster.tuning import machine
from muster.tuning.measure import Subject, measure
from muster.tuning.model import Costs, Setup, fewest, predict, propose, worker_numbers
from muster.tuning.wakeup import wake_up_s
from tests.tools import assert_same, counting, recorded

US = 1e-6
FREE: dict[str, Any] = {
    "loop_s": (2 * US, 0.0),
    "batch_s": 0.0,
    "order_s": 0.0,
    "wake_s": 0.0,
    "serve_s": (0.0, 0.0, 0.0),
}
BUSY = Costs(step_s=200 * US, step_cpu_s=200 * US, policy_s=(20 * US, 1 * US), cores=2.0, **FREE)
SLEEPING = Costs(step_s=2000 * US, step_cpu_s=0.0, policy_s=(20 * US, 1 * US), cores=2.0, **FREE)
EXPENSIVE = dataclasses.replace(BUSY, policy_s=(2000 * US, 0.0))


def frames_in(microseconds: float, frames: int) -> Any:
    return pytest.approx(frames / (microseconds * US))


# --- the model: known costs ------------------------------------------------------------------------


def test_in_one_process_environments_and_policy_take_turns() -> None:
    assert predict(BUSY, Setup(num_envs=8)) == frames_in(8 * 200 + 20 + 8 + 2, 8)
    assert predict(BUSY, Setup(num_envs=8, groups=3)) == frames_in(3 * (8 * 200 + 20 + 8 + 2), 24)


def test_a_batch_costs_what_handing_it_over_costs() -> None:
    costs = dataclasses.replace(BUSY, batch_s=100 * US, order_s=10 * US)
    assert predict(costs, Setup(num_envs=8, T=4)) == frames_in(4 * 1630 + 100, 32)
    assert predict(costs, Setup(num_envs=8, groups=2, workers=2, T=4)) == frames_in(4 * 1630 + 100 + 2 * 10, 64)


def test_resets_are_shared_by_the_steps_of_an_episode() -> None:
    costs = dataclasses.replace(BUSY, reset_s=1000 * US, reset_cpu_s=1000 * US, episode_length=10.0)
    assert predict(costs, Setup(num_envs=8)) == frames_in(8 * (200 + 1000 / 10) + 30, 8)


def test_two_workers_on_two_cores_are_twice_as_fast_as_one_and_four_are_no_faster() -> None:
    assert predict(BUSY, Setup(num_envs=8, groups=1, workers=1)) == frames_in(1630, 8)
    assert predict(BUSY, Setup(num_envs=8, groups=2, workers=2)) == frames_in(1630, 16)
    assert predict(BUSY, Setup(num_envs=8, groups=4, workers=4)) == frames_in(2 * 1630, 32)
    assert predict(BUSY, Setup(num_envs=8, groups=4, workers=2)) == frames_in(2 * 1630, 32)
    assert predict(BUSY, Setup(num_envs=8, groups=3, workers=2)) == frames_in(2 * 1630, 24)  # one waits for the other


def test_threads_share_one_core() -> None:
    assert predict(BUSY, Setup(num_envs=8, groups=2, workers=2, backend="threads")) == frames_in(2 * 1630, 16)
    step = 23 + math.hypot(2000, 15 * 23)  # its own policy call, and those of others
    setup = Setup(num_envs=1, groups=16, workers=16, backend="threads")
    assert predict(SLEEPING, setup) == frames_in(step, 16)


def test_who_waits_needs_no_core() -> None:
    step = 23 + math.hypot(2000, 7 * 23)
    assert predict(SLEEPING, Setup(num_envs=1, groups=16, workers=16)) == frames_in(step, 16)


def test_computing_side_by_side_can_be_slower_than_alone() -> None:
    costs = dataclasses.replace(BUSY, slowdown=1.5)
    assert predict(costs, Setup(num_envs=8, groups=2, workers=2)) == frames_in(1.5 * 1630, 16)
    assert predict(costs, Setup(num_envs=8, groups=1, workers=1)) == frames_in(1630, 8)


def test_a_server_acts_once_for_all() -> None:
    step = 2 * (200 + 2) + 2000  # four workers share two cores
    setup = Setup(num_envs=1, groups=4, workers=4, inference="server")
    assert predict(EXPENSIVE, setup) == frames_in(step, 4)
    costs = dataclasses.replace(EXPENSIVE, wake_s=7 * US, serve_s=(5 * US, 3 * US, 1 * US))
    assert predict(costs, setup) == frames_in(2 * (202 + 3) + 7 + 2000 + 5 + 4 * 3 + 4 * 1, 4)


def test_alternating_halves_overlap_with_the_policy() -> None:
    costs = dataclasses.replace(SLEEPING, policy_s=(0.0, 500 * US))  # four environments: as long as a step
    setup = Setup(num_envs=1, groups=4, workers=4, inference="server")
    assert predict(costs, setup) == frames_in(2002 + 4 * 500, 4)
    halves = dataclasses.replace(setup, alternating=True)
    assert predict(costs, halves) == frames_in(2002 + 2 * 500, 4)
    slow = dataclasses.replace(costs, policy_s=(0.0, 5000 * US))  # the server never rests
    assert predict(slow, halves) == frames_in(2 * 2 * 5000, 4)


def test_the_last_of_many_workers_is_later_than_the_average() -> None:
    costs = dataclasses.replace(SLEEPING, step_sd_s=100 * US)
    setup = Setup(num_envs=1, groups=4, workers=4, T=100)
    alone = 100 * (23 + math.hypot(2000, 23))
    late = 1.0489 * 100 * math.sqrt(100)  # of four normal numbers the greatest is 1.03 deviations above the mean
    assert predict(costs, setup) == pytest.approx(frames_in(alone + late, 400).expected, rel=1e-5)
    assert predict(costs, dataclasses.replace(setup, asynchronous=True)) == frames_in(alone, 400)
    never_late = dataclasses.replace(costs, step_tail_s=2000 * US)
    assert predict(never_late, setup) == frames_in(alone, 400)


# --- the model: what is better ---------------------------------------------------------------------


def best(costs: Costs, totals: list[int] | None = None) -> Setup:
    return max(propose(costs, totals or [8, 64], 2048), key=lambda setup: predict(costs, setup))


def test_busy_environments_want_a_worker_for_each_core() -> None:
    many = dataclasses.replace(BUSY, cores=4.0, serve_s=(60 * US, 30 * US, 0.0), wake_s=20 * US)
    assert (best(many).workers, best(many).inference) == (4, "worker")


def test_waiting_environments_want_a_worker_each() -> None:
    assert best(SLEEPING, [16]).workers == 16
    assert "threads" in {setup.backend for setup in propose(SLEEPING, [16], 2048)}
    assert {setup.backend for setup in propose(BUSY, [16], 2048)} == {"processes"}


def test_an_expensive_policy_wants_to_be_called_once_for_all() -> None:
    waiting = dataclasses.replace(SLEEPING, policy_s=(2000 * US, 1 * US), serve_s=(60 * US, 30 * US, 0.0))
    assert best(waiting, [16]).inference == "server"
    assert (
        best(dataclasses.replace(EXPENSIVE, serve_s=(60 * US, 30 * US, 0.0)), [8]).inference == "worker"
    )  # the cores are busy


def test_environments_that_cost_next_to_nothing_stay_in_one_process() -> None:
    costs = Costs(step_s=1 * US, step_cpu_s=1 * US, cores=2.0, batch_s=100 * US, order_s=1000 * US)
    assert best(costs).workers == 0


def test_one_core_makes_workers_useless_for_busy_environments() -> None:
    costs = dataclasses.replace(BUSY, cores=1.0, batch_s=100 * US, order_s=100 * US)
    assert best(costs).workers == 0


def test_setups_that_need_more_memory_than_there_is_are_left_out() -> None:
    small = dataclasses.replace(SLEEPING, worker_bytes=100.0, memory_bytes=1000.0)
    assert {s.workers for s in propose(small, [16], 2048) if s.backend == "processes"} == {0, 1, 2, 4}
    assert max(s.workers for s in propose(small, [16], 2048)) == 16  # threads need none


def test_random_actions_need_no_server() -> None:
    assert {s.inference for s in propose(dataclasses.replace(BUSY, policy_s=(0.0, 0.0)), [8], 2048)} == {"worker"}


def test_setups_have_the_environments_that_were_asked_for() -> None:
    for setup in propose(SLEEPING, [12, 16], 2048):
        assert setup.groups * setup.num_envs in (12, 16)
        assert setup.groups == max(1, setup.workers)
        assert abs(setup.frames - 2048) <= 8


def test_given_groups_stay_what_they_are() -> None:
    setups = propose(BUSY, [12], 2048, groups=6)
    assert {(s.groups, s.num_envs) for s in setups} == {(6, 2)}
    assert {s.workers for s in setups} == {0, 1, 2, 4}


def test_vector_environments_are_not_cut() -> None:
    setups = propose(dataclasses.replace(BUSY, env_batch=8), [8, 16, 20], 2048)
    assert {(s.groups, s.num_envs) for s in setups} == {(1, 8), (2, 8)}
    assert all(s.together and "num_envs" not in s.options() for s in setups)


@given(
    step=st.floats(1e-6, 1e-2),
    waits=st.floats(0, 1),
    deviation=st.floats(0, 1),
    fixed=st.floats(0, 1e-2),
    slope=st.floats(0, 1e-4),
    slowdown=st.floats(1, 2),
    cores=st.floats(0.25, 64),
    setup=st.builds(
        Setup,
        num_envs=st.integers(1, 64),
        groups=st.integers(1, 64),
        T=st.integers(1, 1024),
        workers=st.integers(0, 64),
        backend=st.sampled_from(["processes", "threads"]),
        inference=st.sampled_from(["worker", "server"]),
        alternating=st.booleans(),
        asynchronous=st.booleans(),
    ),
)
def test_better_machines_environments_and_policies_are_never_predicted_to_be_slower(
    step: float, waits: float, deviation: float, fixed: float, slope: float, slowdown: float, cores: float, setup: Setup
) -> None:
    setup = dataclasses.replace(setup, workers=min(setup.workers, setup.groups))
    costs = Costs(
        step_s=step,
        step_cpu_s=step * (1 - waits),
        step_sd_s=step * deviation,
        policy_s=(fixed, slope),
        slowdown=slowdown,
        cores=cores,
    )
    rate = predict(costs, setup)
    assert 0 < rate < math.inf
    better = [{"cores": 2 * cores}, {"step_cpu_s": 0.5 * costs.step_cpu_s}, {"policy_s": (fixed / 2, slope / 2)}]
    better += [{"step_sd_s": 0.0}, {"slowdown": 1.0}, {"batch_s": 0.0}, {"order_s": 0.0}, {"wake_s": 0.0}]
    for change in better:
        assert predict(dataclasses.replace(costs, **change), setup) >= rate * (1 - 1e-9), change
    # Nothing is faster than its parts: cores for what computes, and environments one after another in a worker.
    assert rate * costs.frame_cpu_s <= cores * (1 + 1e-9)
    assert rate * step <= max(1, setup.workers) * (1 + 1e-9)


# --- numbers of workers ----------------------------------------------------------------------------


def options(**keywords: Any) -> MultiOptions:
    return MultiOptions.parse({"frames_per_batch": 2048, "num_workers": "auto", **keywords})


def test_as_many_workers_as_cores_for_busy_environments_and_more_for_those_that_wait() -> None:
    four = dataclasses.replace(BUSY, cores=4.0)
    assert choose_workers(four, options(num_envs=8), None, alone=False) == 4
    assert choose_workers(SLEEPING, options(num_envs=1), None, alone=False) == 64
    assert choose_workers(four, options(num_envs=8, backend="threads"), None, alone=False) == 1


def test_no_more_workers_than_groups_and_none_that_does_not_pay() -> None:
    four = dataclasses.replace(BUSY, cores=4.0)
    assert choose_workers(four, options(num_envs=8), 3, alone=False) == 3
    assert choose_workers(four, options(num_envs=8), 8, alone=False) == 4
    assert choose_workers(dataclasses.replace(four, cores=1.0), options(num_envs=8), 8, alone=False) == 1


def test_every_environment_gets_a_step_of_the_batch() -> None:
    assert choose_workers(SLEEPING, options(frames_per_batch=20, num_envs=2), None, alone=False) <= 10


def test_where_a_batch_has_few_time_steps_workers_pay_less() -> None:
    costs = dataclasses.replace(SLEEPING, order_s=2000 * US)
    assert choose_workers(costs, options(frames_per_batch=1 << 20, num_envs=1), None, alone=False) == 64
    assert choose_workers(costs, options(frames_per_batch=128, num_envs=1), None, alone=False) < 32


def test_an_expensive_policy_asks_for_fewer_workers_of_its_own_than_of_a_server() -> None:
    own, served = (
        choose_workers(EXPENSIVE, options(num_envs=1, inference=where), None, alone=True)
        for where in ("worker", "server")
    )
    assert own <= 2
    assert served > own


def test_numbers_of_workers_to_think_about() -> None:
    assert worker_numbers(BUSY, 100) == [1, 2, 4]
    assert worker_numbers(SLEEPING, 100) == [1, 2, 4, 8, 16, 32, 64]
    assert worker_numbers(SLEEPING, 6) == [1, 2, 4, 6]
    assert worker_numbers(dataclasses.replace(BUSY, cores=0.5), 100) == [1, 2]


def test_of_setups_that_are_about_as_fast_the_one_with_the_fewest_workers_is_taken() -> None:
    setups = [Setup(num_envs=8, groups=8, workers=w) for w in (8, 4, 2, 1)]
    assert fewest(BUSY, setups).workers == 2


@pytest.mark.parametrize("cls", [MultiSyncCollector, MultiAsyncCollector])
def test_auto_makes_a_group_for_each_worker_of_a_function(cls: Any) -> None:
    with cls(counting(), None, num_workers="auto", num_envs=2, frames_per_batch=64, total_frames=64) as collector:
        (batch,) = list(collector)
        workers = len(collector.stats().workers)
    assert 1 <= workers <= 32
    assert batch.shape == ((workers, 2, 32 // workers) if cls is MultiSyncCollector else (2, 32))


def test_with_a_list_auto_changes_nothing_but_the_number_of_workers() -> None:
    batches = []
    for workers in ("auto", 1, 3):
        makers = [counting(n, noise=True) for n in (3, 4, 5)]
        with MultiSyncCollector(makers, num_workers=workers, num_envs=2, frames_per_batch=60, seed=3) as collector:
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


# --- measuring -------------------------------------------------------------------------------------


def subject(maker: Any = "CartPole-v1", policy: Any = None, *, num_envs: int | None = 1, **keywords: Any) -> Subject:
    told = worker_options(CollectorOptions.parse({"frames_per_batch": 64, "num_envs": num_envs, **keywords}))
    return Subject(maker, None, policy, told)


def test_costs_of_a_counting_environment() -> None:
    factory, made = recorded(counting(5))
    costs = measure(subject(factory), 0.5, stacked=4)
    assert costs.episode_length == pytest.approx(5, rel=0.1)
    assert costs.step_cpu_s > 0
    assert 0 < costs.step_s <= costs.step_tail_s
    assert costs.policy_s == (0.0, 0.0)  # random actions are the loop's
    assert costs.loop_s[0] > 0
    assert (costs.env_batch, costs.cores) == (1, machine.usable_cores())
    assert [env.closed for env in made] == [1] * 5  # one alone, and four together


def test_environments_that_are_slow_to_make_are_made_once() -> None:
    factory, made = recorded(counting(5))
    measure(subject(factory), 1e-6, stacked=4)
    assert len(made) == 1


def test_a_policy_that_does_more_costs_more() -> None:
    big = nn.Sequential(nn.Linear(4, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 2))
    costs = [measure(subject(policy=muster.policies.categorical(net)), 0.6) for net in (nn.Linear(4, 2), big)]
    small_s, big_s = (c.policy_s[0] + 64 * c.policy_s[1] for c in costs)
    assert big_s > 2 * small_s


def test_waiting_is_told_from_computing() -> None:
    event = threading.Event()

    class Waiting(CountingEnv):
        def step(self, action: Any) -> Any:
            event.wait(0.002)
            return super().step(action)

    assert measure(subject(Waiting), 0.3).waits
    assert not measure(subject(), 0.2).waits


def test_a_vector_environment_is_measured_whole() -> None:
    costs = measure(subject(lambda: gymnasium.make_vec("CartPole-v1", 6, "sync"), num_envs=None), 0.3, stacked=4)
    assert costs.env_batch == 6
    assert costs.episode_length > 8


def test_an_unbatched_policy_sees_no_batch() -> None:
    shapes = set()

    def policy(obs: torch.Tensor) -> torch.Tensor:
        shapes.add(tuple(obs.shape))
        assert obs.shape == (4,)
        return torch.zeros((), dtype=torch.int64)

    assert measure(subject(policy=policy, num_envs=None), 0.2).policy_s[1] == 0


def test_measuring_leaves_generators_and_policy_alone() -> None:
    class Noisy(CountingEnv):
        def step(self, action: Any) -> Any:
            random.random(), np.random.rand(), torch.rand(1)
            return super().step(action)

    net = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.LayerNorm(2))
    before = [value.clone() for value in net.state_dict().values()]
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    auto_workers(Noisy, muster.policies.categorical(net), options(num_envs=2), alone=False)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states
    assert all(torch.equal(a, b) for a, b in zip(before, net.state_dict().values(), strict=True))
    assert [b.grad for b in net.parameters()] == [None] * 4


def test_lazy_layers_stay_lazy() -> None:
    net = nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 2))
    measure(subject(policy=muster.policies.categorical(net)), 0.2)
    assert isinstance(net[0].weight, nn.parameter.UninitializedParameter)


@pytest.mark.parametrize("keywords", [{"reset_when_done": False}, {"max_frames_per_traj": 7}, {"compact_obs": True}])
def test_options_of_rollouts_do_not_stand_in_the_way(keywords: Any) -> None:
    class Stop:
        def collection_stopped(self) -> bool:
            raise AssertionError("somebody else's")

    costs = measure(subject(counting(10), interruptor=Stop(), **keywords), 0.1)
    assert costs.episode_length == pytest.approx(keywords.get("max_frames_per_traj", 10), rel=0.1)


def test_errors_of_environments_and_policies_come_through_and_environments_are_closed() -> None:
    def fails(obs: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no")

    factory, made = recorded(counting())
    with pytest.raises(PolicyError, match="no"):
        measure(subject(factory, fails), 0.1)
    assert [env.closed for env in made] == [1]
    with pytest.raises(EnvError, match="no such"):
        measure(subject(partial(_fail, "no such thing")), 0.1)


def _fail(message: str) -> Any:
    raise RuntimeError(message)


def test_a_wake_up_takes_time_and_leaves_nothing_behind() -> None:
    before = set(Path("/proc/self/fd").iterdir()) if Path("/proc/self/fd").exists() else set()
    assert 0 < wake_up_s(0.01) < 1
    after = set(Path("/proc/self/fd").iterdir()) if before else set()
    assert len(after) == len(before)


# --- the machine -----------------------------------------------------------------------------------


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_the_share_of_a_container_counts_not_the_cores_of_its_host(tmp_path: Path) -> None:
    cores = machine.usable_cores(tmp_path)  # nothing is known there
    new = {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "50000 100000\n"}
    assert machine.usable_cores(tree(tmp_path / "new", new)) == min(cores, 0.5)
    inner = {**new, "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}
    assert machine.usable_cores(tree(tmp_path / "inner", inner)) == min(cores, 0.5)
    old = {
        "proc/self/cgroup": "3:cpu,cpuacct:/x\n2:memory:/\n",
        "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "25000\n",
        "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n",
    }
    assert machine.usable_cores(tree(tmp_path / "old", old)) == min(cores, 0.25)
    unlimited = {"proc/self/cgroup": "1:cpu:/\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n"}
    assert machine.usable_cores(tree(tmp_path / "unlimited", unlimited)) == cores


def test_memory_is_what_the_machine_or_the_container_has_left(tmp_path: Path) -> None:
    assert machine.free_bytes(tmp_path) == math.inf
    host = {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 4 kB\n"}
    assert machine.free_bytes(tree(tmp_path / "host", host)) == 4096
    new = {**host, "proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "1000"}
    new["sys/fs/cgroup/a/memory.current"] = "400"
    assert machine.free_bytes(tree(tmp_path / "new", new)) == 600
    assert machine.own_bytes("no such process") == 0


# --- all of it -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tuning() -> Any:
    said: list[str] = []
    found = muster.tune(counting(9), seconds=1.0, num_envs=[4, 8], frames_per_batch=64, say=said.append)
    assert said[0] == "measuring environments and policy"
    return found


def test_three_are_tried_and_the_fastest_of_them_is_the_best(tuning: muster.Tuning) -> None:
    tried = [c for c in tuning.candidates if c.measured is not None]
    assert len(tried) == 3
    assert max(sum(c.setup.kind == other.setup.kind for c in tried) for other in tried) <= 2
    assert tuning.best == max(tried, key=lambda c: c.measured or 0)
    assert [c.predicted for c in tuning.candidates] == sorted((c.predicted for c in tuning.candidates), reverse=True)
    assert all(c.predicted == predict(tuning.costs, c.setup) for c in tuning.candidates)
    assert {c.setup.groups * c.setup.num_envs for c in tuning.candidates} == {4, 8}


def test_three_are_tried_and_not_all_of_one_kind() -> None:
    here, there = Setup(num_envs=1), Setup(num_envs=1, workers=1)
    assert worth_trying(here, [here])
    assert not worth_trying(here, [here, here])
    assert worth_trying(there, [here, here])
    assert not worth_trying(there, [here, here, there])


def test_workers_have_been_looked_at(tuning: muster.Tuning) -> None:
    defaults = Costs(step_s=1.0, step_cpu_s=1.0)
    assert tuning.costs.order_s != defaults.order_s
    assert tuning.costs.wake_s != defaults.wake_s
    assert tuning.costs.worker_bytes != defaults.worker_bytes
    assert tuning.costs.slowdown >= 1


def test_with_a_policy_servers_are_thought_of_and_looked_at() -> None:
    policy = muster.policies.categorical(nn.Linear(2, 2))
    found = muster.tune(counting(9), policy, seconds=1.0, num_envs=4, frames_per_batch=64)
    assert {(c.setup.inference, c.setup.alternating) for c in found.candidates if c.setup.workers > 1} == {
        ("worker", False),
        ("server", False),
        ("server", True),
    }
    usual = Costs(step_s=1.0, step_cpu_s=1.0).serve_s
    times = [seen / before for seen, before in zip(found.costs.serve_s, usual, strict=True)]
    assert times == pytest.approx([times[0]] * 3)
    assert 0.25 <= times[0] <= 4
    assert times[0] != 1


def test_a_server_costs_what_its_process_spends_besides_the_policy() -> None:
    costs = dataclasses.replace(BUSY, batch_s=100 * US, serve_s=(90 * US, 28 * US, 2 * US))
    setup = Setup(num_envs=8, groups=2, workers=2, T=4, inference="server")
    usual = 90 + 2 * 28 + 16 * 2
    for times, found in ((2, 2), (1, 1), (0.5, 0.5), (0, 0.25), (100, 4)):
        spent = (100 + 4 * (20 + 16 + times * usual)) * US
        assert with_server(costs, setup, spent).serve_s == pytest.approx([found * part for part in costs.serve_s])


def test_the_constructor_call_makes_what_was_measured(tuning: muster.Tuning) -> None:
    for candidate in [tuning.best, *tuning.candidates[:1], Setup(num_envs=4, groups=1, T=16)]:
        setup = getattr(candidate, "setup", candidate)
        found = dataclasses.replace(tuning, best=dataclasses.replace(tuning.best, setup=setup))
        call = found.constructor_call("counting(9)", "None", more=", seed=1")
        with eval(call, {**vars(muster), "counting": counting, **classes()}) as collector:
            shown = collector.rollout()
        with found.make(counting(9), seed=1) as collector:
            assert_same(shown, collector.rollout())
        assert shown.numel() == setup.frames


def classes() -> dict[str, Any]:
    return {cls.__name__: cls for cls in (Collector, MultiSyncCollector, MultiAsyncCollector)}


@pytest.mark.parametrize(
    ("setup", "call"),
    [
        (Setup(num_envs=8, T=4), "Collector(f, p, num_envs=8, frames_per_batch=32)"),
        (
            Setup(num_envs=8, groups=2, workers=2, T=4),
            "MultiSyncCollector([f] * 2, p, num_envs=8, frames_per_batch=64)",
        ),
        (
            Setup(num_envs=8, groups=4, workers=2, T=4, inference="server", alternating=True, backend="threads"),
            "MultiSyncCollector([f] * 4, p, num_workers=2, num_envs=8, frames_per_batch=128, "
            "backend='threads', inference='server', alternating=True)",
        ),
        (
            Setup(num_envs=8, groups=2, workers=2, T=4, asynchronous=True),
            "MultiAsyncCollector([f] * 2, p, num_envs=8, frames_per_batch=32)",
        ),
    ],
)
def test_constructor_calls(tuning: muster.Tuning, setup: Setup, call: str) -> None:
    found = dataclasses.replace(tuning, best=dataclasses.replace(tuning.best, setup=setup))
    assert found.constructor_call("f", "p") == call


def test_a_list_stays_a_list() -> None:
    makers = [counting(3), counting(4)]
    found = muster.tune(makers, seconds=0.5, frames_per_batch=32)
    assert {(c.setup.groups, c.setup.num_envs) for c in found.candidates} == {(2, 1)}
    assert found.constructor_call("makers").partition("(")[2].startswith("makers, policy, ")
    with make(Setup(num_envs=1, groups=2, workers=1, T=4), makers) as collector:
        assert collector.rollout().shape == (2, 1, 4)


def test_vector_environments_are_taken_as_they_come() -> None:
    def make_vec() -> Any:
        return gymnasium.make_vec("CartPole-v1", 3, "sync")

    found = muster.tune(make_vec, seconds=0.5, frames_per_batch=32)
    assert {c.setup.num_envs for c in found.candidates} == {3}
    assert "num_envs" not in found.constructor_call()
    with found.make(make_vec) as collector:
        assert collector.rollout().shape[-2] == 3


def test_setups_that_are_refused_are_named_and_the_next_is_tried() -> None:
    found = muster.tune(counting(3), seconds=0.5, num_envs=4, frames_per_batch=32, return_same_td=True)
    assert all(isinstance(c.refused, str) for c in found.candidates if c.refused)
    assert found.best.measured


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"seconds": 0}, "seconds=0: expected more than 0"),
        ({"num_envs": 0}, "num_envs=0: expected integers of at least 1"),
        ({"num_envs": [8, True]}, "expected integers"),
        ({"create_env_fn": ["CartPole-v1"] * 2, "num_envs": 3}, "multiples of the 2 groups"),
        ({"create_env_fn": CountingEnv()}, "create_env_fn is an environment"),
        ({"policy_factory": lambda: None}, "policy_factory"),
        ({"frames_per_batchs": 3}, "did you mean 'frames_per_batch'"),
        ({"policy": (open, Path)}, "policy"),
    ],
)
def test_impossible_requests_are_refused(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(BadOption, match=message):
        muster.tune(**{"create_env_fn": "CartPole-v1", "seconds": 0.1, **keywords})


def test_collectors_of_setups() -> None:
    assert collector_class(Setup(num_envs=1)) is Collector
    assert collector_class(Setup(num_envs=1, workers=1)) is MultiSyncCollector
    assert collector_class(Setup(num_envs=1, workers=1, asynchronous=True)) is MultiAsyncCollector
