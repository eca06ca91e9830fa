"""Evaluation by rlpyt's collectors: which episodes are reported, and what the agent is shown."""

from __future__ import annotations

import logging
import queue
from types import SimpleNamespace
from typing import Any

import pytest

from muster.compat.rlpyt import (
    BaseEvalCollector,
    CpuEvalCollector,
    GpuEvalCollector,
    SerialEvalCollector,
    TrajInfo,
)
from muster.compat.rlpyt.collectors import ROWS
from muster.errors import BadOption
from tests.fakes.rlpyt_parts import Agent, Counting, make_step_buffer


def lengths(infos: list[Any]) -> list[int]:
    return [info.Length for info in infos]


def cpu(envs: list[Any], max_T: int, agent: Any = None) -> tuple[Any, Any]:
    sync = SimpleNamespace(stop_eval=SimpleNamespace(value=False))
    infos: Any = queue.SimpleQueue()
    return CpuEvalCollector(
        0, envs, TrajInfo, infos, max_T, agent=agent or Agent(len(envs)), sync=sync
    ), infos


def drained(infos: Any) -> list[Any]:
    found = []
    while not infos.empty():
        found.append(infos.get())
    return found


@pytest.mark.parametrize(
    ("most", "expected", "steps"),
    [
        (None, [2, 3, 2, 2, 3, 2, 3], 9),
        (3, [2, 3, 2], 4),
        (4, [2, 3, 2, 2, 3], 6),
        (1, [2], 2),
    ],
)
def test_evaluation_ends_with_the_step_in_which_there_are_enough(
    most: int | None, expected: list[int], steps: int
) -> None:
    envs = [Counting(2), Counting(3)]
    evaluator = SerialEvalCollector(envs, Agent(2), TrajInfo, 9, most)
    infos = evaluator.collect_evaluation(0)
    assert lengths(infos) == expected
    assert [len(env.actions) for env in envs] == [steps, steps]


def test_every_evaluation_begins_anew_and_resets_no_environment_in_vain() -> None:
    env, agent = Counting(4), Agent(1)
    evaluator = SerialEvalCollector([env], agent, TrajInfo, 6)
    for itr in range(2):
        agent.inputs.clear()
        assert lengths(evaluator.collect_evaluation(itr)) == [4]
        assert [o[0][1] for o, _, _ in agent.inputs] == [0, 1, 2, 3, 0, 1]
        assert [info.Length for info in evaluator.unfinished_infos] == [2]
        assert env.resets == 2 * (itr + 1)
    assert agent.log == [
        x for itr in (0, 1) for x in ("reset", ("eval_mode", itr), ("reset_one", 0))
    ]


def test_the_agent_sees_nothing_of_the_episode_before() -> None:
    agent = Agent(1)
    SerialEvalCollector([Counting(2)], agent, TrajInfo, 5).collect_evaluation(0)
    previous = [(action[0], reward[0]) for _, action, reward in agent.inputs]
    assert previous == [(0, 0), (1, 1), (0, 0), (1, 1), (0, 0)]


def test_a_lost_life_goes_on_in_the_same_record() -> None:
    env, agent = Counting(4, life=2), Agent(1)
    assert lengths(
        SerialEvalCollector([env], agent, TrajInfo, 8).collect_evaluation(0)
    ) == [4, 4]
    assert (env.resets, agent.resets) == (
        3,
        [0, 0, 0, 0],
    )  # the last reset is for nothing


def test_long_evaluations_go_through_little_memory() -> None:
    length = 3 * ROWS + 5
    env, agent = Counting(length), Agent(1)
    evaluator = SerialEvalCollector([env], agent, TrajInfo, length + ROWS + 1)
    assert lengths(evaluator.collect_evaluation(0)) == [length]
    assert [o[0][1] for o, _, _ in agent.inputs] == [*range(length), *range(ROWS + 1)]
    assert lengths(evaluator.unfinished_infos) == [ROWS + 1]


def test_records_are_queued_when_episodes_end_and_none_comes_last() -> None:
    evaluator, infos = cpu([Counting(2), Counting(3)], 6)
    evaluator.collect_evaluation(0)
    *found, last = drained(infos)
    assert (lengths(found), last) == ([2, 3, 2, 2, 3], None)
    assert evaluator.unfinished_infos == []


def test_a_signal_ends_the_evaluation_after_the_step() -> None:
    env = Counting(2)
    evaluator, infos = cpu([env], 10)

    class Stopping(Agent):
        def step(self, *inputs: Any) -> Any:
            evaluator.sync.stop_eval.value = len(self.inputs) == 2
            return super().step(*inputs)

    evaluator.agent = Stopping(1)
    evaluator.collect_evaluation(0)
    assert (lengths(drained(infos)[:-1]), len(env.actions)) == ([2], 3)
    assert lengths(evaluator.unfinished_infos) == [1]


def test_what_is_not_reported_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "muster.compat.rlpyt"):
        SerialEvalCollector(
            [Counting(9), Counting(2)], Agent(2), TrajInfo, 4
        ).collect_evaluation(3)
    assert [r.getMessage() for r in caplog.records] == [
        "evaluation 3, worker 0: 1 episodes were not finished, and do not count"
    ]


def test_what_is_missing_is_named() -> None:
    with pytest.raises(BadOption, match="CpuEvalCollector got no agent"):
        CpuEvalCollector(0, [Counting(2)], TrajInfo, queue.SimpleQueue(), 3)
    with pytest.raises(
        BadOption, match=r"GpuEvalCollector got no sync.obs_ready, .*step_buffer_np"
    ):
        GpuEvalCollector(0, [Counting(2)], TrajInfo, queue.SimpleQueue(), 3)
    with pytest.raises(BadOption, match=r"CpuEvalCollector got no sync.stop_eval"):
        CpuEvalCollector(
            0, [Counting(2)], TrajInfo, queue.SimpleQueue(), 3, agent=Agent(1)
        ).collect_evaluation(0)
    ready = SimpleNamespace(obs_ready=object(), act_ready=object())
    gpu = GpuEvalCollector(
        0,
        [Counting(2)],
        TrajInfo,
        queue.SimpleQueue(),
        3,
        sync=ready,
        step_buffer_np=make_step_buffer(1),
    )
    with pytest.raises(BadOption, match=r"GpuEvalCollector got no sync.stop_eval"):
        gpu.collect_evaluation(0)
    with pytest.raises(TypeError, match="abstract"):
        BaseEvalCollector(0, [Counting(2)], TrajInfo, queue.SimpleQueue(), 3)  # type: ignore[abstract]
