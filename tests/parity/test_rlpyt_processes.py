"""rlpyt's collectors in the worker processes of its samplers: with a copy of the agent, and with an
action server.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from muster.compat.rlpyt import (
    CpuEvalCollector,
    CpuResetCollector,
    CpuWaitResetCollector,
    GpuEvalCollector,
    GpuResetCollector,
    GpuWaitResetCollector,
    TrajInfo,
)
from muster.compat.rlpyt.trees import leaves
from muster.errors import MusterError
from tests.fakes.rlpyt_parts import (
    Agent,
    Counting,
    make_samples,
    make_step_buffer,
    shared_zeros,
)
from tests.fakes.rlpyt_samplers import WAIT_S, ParallelSampler, SerialSampler, fork

LENGTHS = (5, 1), (4, 2), (2, 2), (7, 3)  # of episodes, and of lives
GPU = {
    CpuResetCollector: GpuResetCollector,
    CpuWaitResetCollector: GpuWaitResetCollector,
}


def make_env(i: int) -> Counting:
    return Counting(*LENGTHS[i % 4])


@contextmanager
def running(*args: Any, **options: Any) -> Iterator[ParallelSampler]:
    sampler = ParallelSampler(*args, **options)
    try:
        yield sampler
        assert sampler.close() == [0, 0]
    finally:
        for process in sampler.processes:
            process.kill()
            process.join(WAIT_S)


def values(samples: Any) -> dict[Any, Any]:
    return {key: np.array(leaf).tolist() for key, leaf in leaves(samples).items()}


@pytest.mark.parametrize("cls", list(GPU))
@pytest.mark.parametrize("T", [4, 9])
def test_a_server_records_what_an_agent_beside_the_environments_records(
    cls: Any, T: int
) -> None:
    agent, served = Agent(4), Agent(4)
    alone = SerialSampler(
        cls,
        [make_env(i) for i in range(4)],
        agent,
        TrajInfo,
        T,
        samples=make_samples(T, 4, bootstrap=True),
    )
    with running(
        GPU[cls], GpuEvalCollector, make_env, served, TrajInfo, T=T, bootstrap=True
    ) as sampler:
        for itr in range(4):
            expected, infos = alone.obtain_samples(itr)
            assert values(sampler.obtain_samples(itr)) == values(expected)
            got = sorted(sampler.queue.get(timeout=WAIT_S).Length for _ in infos)
            assert got == sorted(info.Length for info in infos)
    assert served.inputs == agent.inputs
    assert sorted(served.resets) == sorted(agent.resets)


@pytest.mark.parametrize("cls", list(GPU))
def test_two_halves_that_take_turns_record_the_same(cls: Any) -> None:
    alone = SerialSampler(
        cls,
        [make_env(i) for i in range(4)],
        Agent(4),
        TrajInfo,
        6,
        samples=make_samples(6, 4, bootstrap=True),
    )
    agents = [Agent(2), Agent(2)]
    with running(
        GPU[cls], GpuEvalCollector, make_env, agents, TrajInfo, T=6, bootstrap=True
    ) as sampler:
        for itr in range(3):
            assert values(sampler.obtain_samples(itr)) == values(
                alone.obtain_samples(itr)[0]
            )


@pytest.mark.parametrize(
    ("cls", "T"), [(CpuResetCollector, 5), (CpuWaitResetCollector, 9)]
)
def test_workers_with_an_agent_each_record_what_one_process_records(
    cls: Any, T: int
) -> None:
    alone = SerialSampler(cls, [make_env(i) for i in range(4)], Agent(4), TrajInfo, T)
    with running(
        cls, CpuEvalCollector, make_env, Agent(2), TrajInfo, T=T, server=False
    ) as sampler:
        for itr in range(3):
            assert values(sampler.obtain_samples(itr)) == values(
                alone.obtain_samples(itr)[0]
            )


def test_random_steps_are_shown_to_the_server() -> None:
    agent = Agent(4)
    with running(
        GpuResetCollector,
        GpuEvalCollector,
        lambda i: Counting(99),
        agent,
        TrajInfo,
        T=2,
        max_decorrelation_steps=9,
    ) as sampler:
        samples = sampler.obtain_samples(0)
    first = samples.env.observation[0, :, 1].tolist()
    assert all(1 <= t <= 9 for t in first)
    assert samples.env.prev_reward[0].tolist() == first
    assert agent.inputs[0] == (
        [[99, t] for t in first],
        samples.agent.prev_action[0].tolist(),
        first,
    )


@pytest.mark.parametrize("server", [True, False])
def test_evaluations_go_between_batches_and_do_not_touch_them(server: bool) -> None:
    T, kinds = (
        3,
        (GpuResetCollector, GpuEvalCollector)
        if server
        else (CpuResetCollector, CpuEvalCollector),
    )
    alone = SerialSampler(
        CpuResetCollector, [make_env(i) for i in range(4)], Agent(4), TrajInfo, T
    )
    first = values(alone.obtain_samples(0)[0])
    with running(
        *kinds,
        make_env,
        Agent(4 if server else 2),
        TrajInfo,
        T=T,
        server=server,
        eval_max_T=13,
    ) as sampler:
        assert values(sampler.obtain_samples(0)) == first
        for itr in (1, 2):
            infos = sampler.evaluate_agent(itr)
            assert sorted(info.Length for info in infos) == sorted(
                [5] * 2 + [4] * 3 + [2] * 6 + [7]
            )
        assert values(sampler.obtain_samples(3))[("env", "observation")] == [
            [[n, t] for (n, _), t in zip(LENGTHS, row, strict=True)]
            for row in ([3, 3, 1, 3], [4, 0, 0, 4], [0, 1, 1, 5])
        ]


def test_a_server_stops_an_evaluation_with_an_answer() -> None:
    agent = Agent(4)
    with running(
        GpuResetCollector,
        GpuEvalCollector,
        make_env,
        agent,
        TrajInfo,
        T=2,
        eval_max_T=10_000,
        eval_max_trajectories=6,
    ) as sampler:
        for itr in range(2):
            infos = sampler.evaluate_agent(itr)
            assert 6 <= len(infos) < 40
            sampler.obtain_samples(itr)
    firsts = [
        observation
        for observation, _, _ in agent.inputs
        if observation == [[n, 0] for n, _ in LENGTHS]
    ]
    assert len(firsts) >= 3  # both evaluations and the first batch


def test_workers_with_agents_stop_at_the_signal() -> None:
    with running(
        CpuResetCollector,
        CpuEvalCollector,
        make_env,
        Agent(2),
        TrajInfo,
        T=2,
        server=False,
        eval_max_T=1_000_000,
        eval_max_trajectories=6,
    ) as sampler:
        assert len(sampler.evaluate_agent(0)) >= 6


def test_a_worker_does_not_outlive_the_process_of_its_server() -> None:
    ended, alive = os.pipe()
    with os.fdopen(ended, "rb", buffering=0) as reading:
        server = fork.Process(target=_serve_nothing, args=(alive,))
        server.start()
        os.close(alive)
        try:
            assert select.select([reading], [], [], WAIT_S)[0]
            assert reading.read(100) == b"asked "  # the worker waits for actions
        finally:
            server.kill()
            server.join(WAIT_S)
        assert select.select([reading], [], [], WAIT_S)[0], "the worker still waits"
        assert reading.read(100) == b"WorkerDied"


def _serve_nothing(report: int) -> None:
    """Start a worker, and never answer it."""
    obs_ready, act_ready = fork.Semaphore(0), fork.Semaphore(0)
    fork.Process(
        target=_ask,
        args=(report, SimpleNamespace(obs_ready=obs_ready, act_ready=act_ready)),
    ).start()
    obs_ready.acquire()
    os.write(report, b"asked ")
    signal.pause()


def _ask(report: int, sync: Any) -> None:
    step = make_step_buffer(1, shared_zeros)
    collector = GpuResetCollector(
        0,
        [Counting(3)],
        make_samples(2, 1),
        2,
        TrajInfo,
        sync=sync,
        step_buffer_np=step,
    )
    inputs, infos = collector.start_envs()
    try:
        collector.collect_batch(inputs, infos, 0)
    except MusterError as error:
        os.write(report, type(error).__name__.encode())
