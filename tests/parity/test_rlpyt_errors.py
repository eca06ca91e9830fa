"""What rlpyt's collectors refuse, and what the next call does after an error."""

from __future__ import annotations

import functools
import signal
from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from muster.compat.rlpyt import (
    CpuEvalCollector,
    CpuResetCollector,
    CpuWaitResetCollector,
    GpuResetCollector,
    SerialEvalCollector,
    TrajInfo,
)
from muster.errors import (
    BadEnvOutput,
    BadOption,
    BadPolicyOutput,
    CollectorTimeout,
    EnvError,
    MusterError,
    PolicyError,
)
from tests.fakes.rlpyt_parts import (
    Agent,
    AgentStep,
    Counting,
    EnvInfo,
    EnvStep,
    make_samples,
    make_step_buffer,
)

T = 6
TRIED_AGAIN = "No environment was stepped since; the next call tries again from there"
DROPPED = "The batch is dropped: all environments are reset"


class Run:
    """A collector, with what it has returned last, as a sampler keeps it."""

    def __init__(self, cls: Any, envs: Any, agent: Any, samples: Any = None) -> None:
        self.samples = (
            make_samples(T, len(envs), bootstrap=True) if samples is None else samples
        )
        self.collector = cls(0, envs, self.samples, T, TrajInfo, agent)
        self.inputs, self.infos = self.collector.start_envs()
        self.collector.start_agent()

    def batch(self, itr: int = 0) -> list[int]:
        """Collect a batch; returns the lengths of the episodes that ended in it."""
        self.inputs, self.infos, ended = self.collector.collect_batch(
            self.inputs, self.infos, itr
        )
        self.collector.reset_if_needed(self.inputs)
        return [info.Length for info in ended]

    @property
    def values(self) -> list[Any]:
        """All that is in the buffers."""
        agent = self.samples.agent
        env = self.samples.env
        every = [agent.action, agent.prev_action, agent.bootstrap_value]
        every += [*agent.agent_info.memory, agent.agent_info.value]
        every += [env.observation, env.reward, env.prev_reward, env.done, *env.env_info]
        return [array.tolist() for array in every]


class Failing(Agent):
    """Fails once, in the call that is named: ``"step 3"``, ``"value"``."""

    def __init__(self, B: int, place: str, how: str) -> None:
        super().__init__(B)
        self.place = place
        self.how = how
        self.steps = 0
        self.is_in_step = False

    def step(self, *inputs: Any) -> Any:
        place = f"step {self.steps}"
        if self.place == place:
            self.place = ""
            self.fail()
            return AgentStep(torch.ones(7, dtype=torch.int64), None)
        self.steps += 1
        self.is_in_step = True
        try:
            return super().step(*inputs)
        finally:
            self.is_in_step = False

    def value(self, *inputs: Any) -> Any:
        value = super().value(*inputs)
        if self.place != "value" or self.is_in_step:
            return value
        self.place = ""
        self.fail()
        return value[:1]

    def fail(self) -> None:
        if self.how == "raise":
            raise ValueError("once")
        if self.how == "interrupt":
            signal.raise_signal(signal.SIGINT)


# --- errors of the agent --------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["raise", "shape"])
@pytest.mark.parametrize("place", ["step 0", "step 3", "step 5", "step 8", "value"])
@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("lengths", [(50, 50), (2, 9), (2, 3)])
@pytest.mark.parametrize("cls", [CpuResetCollector, CpuWaitResetCollector])
def test_an_error_of_the_agent_changes_nothing_in_the_batches(
    cls: Any, lengths: Any, copies: bool, place: str, how: str
) -> None:
    Inputs = namedtuple("Inputs", "observation prev_action prev_reward")
    usual = Run(cls, [Counting(n) for n in lengths], Agent(2))
    run = Run(cls, [Counting(n) for n in lengths], Failing(2, place, how))
    errors: list[str] = []
    for itr in range(3):
        ended = usual.batch(itr)
        if copies:
            run.inputs = Inputs(*(part.copy() for part in run.inputs))
        try:
            got = run.batch(itr)
        except (PolicyError, BadPolicyOutput) as error:
            errors.append(str(error))
            run.collector.reset_if_needed(run.inputs)
            got = run.batch(itr)
        assert got == ended
        assert run.values == usual.values
    # all environments wait, and what the agent returns is not used
    is_unused = how == "shape" and lengths == (2, 3) and place in ("step 3", "step 5")
    is_unused = is_unused and cls is CpuWaitResetCollector
    assert [TRIED_AGAIN in text for text in errors] == [True] * (not is_unused)


@pytest.mark.parametrize("place", ["step 3", "value"])
@pytest.mark.parametrize("cls", [CpuResetCollector, CpuWaitResetCollector])
def test_an_interrupt_leaves_no_part_of_a_batch(cls: Any, place: str) -> None:
    run = Run(cls, [Counting(4), Counting(9)], Failing(2, place, "interrupt"))
    usual = Run(cls, [Counting(4), Counting(9)], Agent(2))
    with pytest.raises(KeyboardInterrupt):
        run.batch()
    for _ in range(3):
        assert run.batch() == usual.batch()
        assert run.values == usual.values
    assert run.collector.envs[0].resets - usual.collector.envs[0].resets == (
        place != "value"
    )


@pytest.mark.parametrize(
    ("place", "steps", "message"),
    [
        ("step 4", 4, "policy Failing raised ValueError at row 4 of the batch: once"),
        (
            "value",
            T,
            "policy Failing: value raised ValueError after the last row: once",
        ),
    ],
)
def test_an_error_in_a_later_call_of_a_waiting_agent_repeats_none_before(
    place: str, steps: int, message: str
) -> None:
    agent = Failing(1, place, "raise")
    run = Run(CpuWaitResetCollector, [Counting(2)], agent)
    with pytest.raises(PolicyError, match=message):
        run.batch()
    assert agent.steps == steps
    assert run.batch() == [2]
    assert agent.steps == T


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, r"Odd.step returned NoneType None, expected \(action, agent_info\)"),
        ((1, 2, 3), r"Odd.step returned tuple \(1, 2, 3\), expected \(action"),
        (
            (torch.ones(2, dtype=torch.int64), SimpleNamespace(x=1)),
            r"what Odd returned has an agent_info without a part \[b\]",
        ),
        (
            (torch.full((2,), 300), None),
            "action with the value 300, which its buffer of int8 cannot hold",
        ),
        (([1, [2, 3]], None), "has action list .* which is no array"),
    ],
)
def test_what_an_agent_returns_is_refused_before_a_step_is_made(
    returned: Any, message: str
) -> None:
    class Odd(Agent):
        def step(self, *inputs: Any) -> Any:
            return returned

    samples = plain_samples(action=np.zeros((T, 2), np.int8))
    envs = [Counting(9), Counting(9)]
    with pytest.raises(BadPolicyOutput, match=message):
        Run(CpuResetCollector, envs, Odd(2), samples).batch()
    assert [env.actions for env in envs] == [[], []]


def test_a_record_gets_its_environments_part_of_a_plain_named_tuple() -> None:
    Info = namedtuple("Info", "p q")

    class Plain(Agent):
        def step(self, *inputs: Any) -> Any:
            return torch.ones(2, dtype=torch.int64), Info(
                torch.arange(2), -torch.arange(2)
            )

    class Notes(TrajInfo):
        def step(self, *step: Any) -> None:
            super().step(*step)
            self.Info = [int(part) for part in step[4]]

    collector = CpuResetCollector(
        0, [Counting(9), Counting(9)], plain_samples(), T, Notes, Plain(2)
    )
    inputs, infos = collector.start_envs()
    collector.collect_batch(inputs, infos, 0)
    assert [info.Info for info in infos] == [[0, 0], [1, -1]]


@pytest.mark.parametrize("value", [torch.zeros(1), torch.zeros(2, 1), None])
def test_a_value_for_each_environment_is_needed(value: Any) -> None:
    class Odd(Agent):
        def step(self, *inputs: Any) -> Any:
            return torch.ones(2, dtype=torch.int64), None

        def value(self, *inputs: Any) -> Any:
            return value

    samples = plain_samples()
    samples.agent.bootstrap_value = np.zeros((1, 2), np.float32)
    run = Run(CpuResetCollector, [Counting(9), Counting(9)], Odd(2), samples)
    with pytest.raises(
        BadPolicyOutput,
        match=r"Odd.value returned .*, expected an array of shape \(2,\)",
    ):
        run.batch()


# --- errors of environments -----------------------------------------------------------------------


class Breaking(Counting):
    """Fails once, at time ``at`` of its first episode: raises an error, or returns ``wrong``."""

    def __init__(self, length: int, at: int, wrong: Any = None) -> None:
        super().__init__(length)
        self.at = at
        self.wrong = wrong

    def step(self, action: Any) -> Any:
        step = super().step(action)
        if self.resets > 1 or self.t != self.at:
            return step
        if self.wrong is None:
            raise ZeroDivisionError("once")
        return self.wrong


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        EnvStep(np.zeros(2, np.float32), float("nan"), False, EnvInfo(False, 1)),
        EnvStep(np.zeros(3, np.float32), 1.0, False, EnvInfo(False, 1)),
    ],
)
@pytest.mark.parametrize("cls", [CpuResetCollector, CpuWaitResetCollector])
def test_after_an_error_of_an_environment_records_and_agent_begin_again(
    cls: Any, wrong: Any
) -> None:
    agent = Agent(2)
    run = Run(cls, [Counting(5), Breaking(5, 3, wrong)], agent)
    with pytest.raises((EnvError, BadEnvOutput), match=DROPPED) as caught:
        run.batch()
    assert "are kept" not in str(caught.value)
    usual = Run(cls, [Counting(5), Counting(5)], Agent(2))
    for _ in range(3):
        assert run.batch() == usual.batch()
        assert run.values == usual.values
    assert [(i.Length, i.Return) for i in run.infos] == [
        (i.Length, i.Return) for i in usual.infos
    ]


def test_after_a_start_that_fails_there_is_no_earlier_one() -> None:
    class Once(Counting):
        def reset(self) -> Any:
            if self.resets:
                raise ZeroDivisionError("no more")
            return super().reset()

    run = Run(CpuResetCollector, [Counting(9), Once(9)], Agent(2))
    run.batch()
    with pytest.raises(EnvError, match=r"Once\[1\].reset raised ZeroDivisionError"):
        run.collector.start_envs()
    with pytest.raises(MusterError, match=r"comes after start_envs\(\)"):
        run.batch()


def test_an_error_of_a_record_leaves_nothing_of_its_step() -> None:
    class Faulty(TrajInfo):
        fails = True

        def step(self, *step: Any) -> None:
            super().step(*step)
            if Faulty.fails:
                Faulty.fails = False
                raise KeyError("once")

    collector = CpuResetCollector(
        0, [Counting(3)], make_samples(3, 1), 3, functools.partial(Faulty), Agent(1)
    )
    inputs, infos = collector.start_envs()
    with pytest.raises(MusterError, match=r"Faulty of Counting\[0\]: recording a step"):
        collector.collect_batch(inputs, infos, 0)
    _, _, (ended,) = collector.collect_batch(inputs, infos, 0)
    assert (ended.Length, ended.Return) == (3, 6)


def test_an_error_of_reset_one_is_the_agents() -> None:
    class Unwilling(Agent):
        def reset_one(self, idx: int) -> None:
            raise ValueError("no")

    with pytest.raises(
        MusterError, match=r"^Unwilling.reset_one\(idx=0\) raised ValueError: no"
    ):
        Run(CpuResetCollector, [Counting(2)], Unwilling(1)).batch()


@pytest.mark.parametrize(
    ("observation", "dtype", "value"),
    [
        (np.array([300, 1]), np.int8, 300),
        (np.array([1, 300], np.uint64), np.uint8, 300),
        (np.array([1e6, 1], np.float32), np.float16, 1000000.0),
    ],
)
def test_an_observation_that_would_wrap_around_is_refused(
    observation: Any, dtype: Any, value: Any
) -> None:
    class Large(Counting):
        def observe(self) -> Any:
            return observation if self.t else observation * 0

    samples = plain_samples(observation=np.zeros((T, 1, 2), dtype))
    run = Run(CpuResetCollector, [Large(9)], OnlyActing(1), samples)
    with pytest.raises(
        BadEnvOutput,
        match=rf"observation with the value {value}, which its buffer of {np.dtype(dtype)}",
    ):
        run.batch()


def test_values_that_fit_a_narrower_buffer_are_stored() -> None:
    class Small(Counting):
        def observe(self) -> Any:
            return np.array([self.t, -128])

    samples = plain_samples(observation=np.zeros((T, 1, 2), np.int8))
    Run(CpuResetCollector, [Small(9)], OnlyActing(1), samples).batch()
    assert samples.env.observation[:, 0].tolist() == [[t, -128] for t in range(T)]


# --- an action server -----------------------------------------------------------------------------


class Ready:
    """A semaphore, which gives an answer only if ``answers`` is not empty."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.released = 0

    def release(self) -> None:
        self.released += 1

    def acquire(self, blocks: bool, timeout: float) -> bool:
        return bool(self.answers) and self.answers.pop()


def test_a_row_that_the_server_has_not_answered_is_shown_once() -> None:
    class Hasty(GpuResetCollector):
        max_wait_s = 0.0

    sync = SimpleNamespace(obs_ready=Ready(), act_ready=Ready())
    samples = make_samples(T, 1)
    collector = Hasty(
        0, [Counting(9)], samples, T, TrajInfo, None, sync, make_step_buffer(1)
    )
    inputs, infos = collector.start_envs()
    sync.act_ready.answers = [True] * 2
    with pytest.raises(CollectorTimeout):
        collector.collect_batch(inputs, infos, 0)
    assert sync.obs_ready.released == 3
    sync.act_ready.answers = [True] * (T - 2)
    collector.collect_batch(inputs, infos, 0)
    assert sync.obs_ready.released == T + 1  # and what comes after the batch
    assert samples.env.observation[:, 0, 1].tolist() == list(range(T))


# --- arguments ------------------------------------------------------------------------------------


class OnlyActing(Agent):
    """Takes observations of any dtype, and has no information."""

    def step(self, observation: Any, *rest: Any) -> Any:
        return torch.ones(len(observation), dtype=torch.int64), None


def plain_samples(**given: Any) -> Any:
    """Buffers of two environments, or as many as those given are for."""
    B = next(iter(given.values())).shape[1] if given else 2
    env = {
        "observation": np.zeros((T, B, 2), np.float32),
        "reward": np.zeros((T, B), np.float32),
        "done": np.zeros((T, B), bool),
    }
    agent = {"action": np.zeros((T, B), np.int64)}
    for name, array in given.items():
        side = agent if name in ("action", "prev_action", "bootstrap_value") else env
        side[name] = array
    return SimpleNamespace(env=SimpleNamespace(**env), agent=SimpleNamespace(**agent))


def read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        (
            "done",
            np.zeros((T, 2, 1), bool),
            r"env.done is \(6, 2, 1\), expected \(6, 2\)",
        ),
        (
            "reward",
            np.zeros((T, 2, 1)),
            r"env.reward is \(6, 2, 1\), expected \(6, 2\)",
        ),
        ("reward", np.zeros((T, 2), np.int32), "env.reward is int32, expected a float"),
        ("prev_reward", np.zeros((T, 2), bool), "env.prev_reward is bool, expected a"),
        ("reward", read_only(np.zeros((T, 2))), "env.reward is read-only"),
        ("reward", torch.zeros(T, 2), "env.reward is a Tensor, expected a NumPy array"),
        (
            "prev_action",
            np.zeros((T, 2, 5)),
            r"agent.prev_action is \(6, 2, 5\) of float64, and agent.action is \(6, 2\)",
        ),
        ("prev_action", np.zeros((T, 2), np.int8), "agent.prev_action is .* of int8"),
        (
            "bootstrap_value",
            np.zeros((1, 3)),
            r"agent.bootstrap_value is \(1, 3\), expected \(1, 2\)",
        ),
    ],
)
def test_buffers_that_no_batch_fits_are_refused_before_a_step(
    name: str, array: Any, message: str
) -> None:
    envs = [Counting(9), Counting(9)]
    samples = plain_samples()
    side = samples.env if hasattr(samples.env, name) else samples.agent
    if name == "prev_reward":
        side = samples.env
    setattr(side, name, array)
    with pytest.raises(BadOption, match=f"samples_np.{message}"):
        Run(CpuResetCollector, envs, OnlyActing(2), samples)
    assert [env.resets for env in envs] == [0, 0]


def test_a_buffer_of_values_needs_an_agent_that_computes_them() -> None:
    agent = SimpleNamespace(step=lambda *inputs: None)
    with pytest.raises(BadOption, match="SimpleNamespace has no method value"):
        Run(CpuResetCollector, [Counting(9)], agent, make_samples(T, 1, bootstrap=True))


def test_all_buffers_are_alike() -> None:
    other = plain_samples(observation=np.zeros((T, 2, 2), np.float16))
    collector = CpuResetCollector(
        0,
        [Counting(9), Counting(9)],
        [plain_samples(), other],
        T,
        TrajInfo,
        OnlyActing(2),
        SimpleNamespace(db_idx=SimpleNamespace(value=0)),
    )
    with pytest.raises(
        BadOption, match=r"env.observation is \(6, 2, 2\) of float16, and"
    ):
        collector.start_envs()
    collector = CpuResetCollector(
        0, collector.envs, plain_samples(), T, TrajInfo, OnlyActing(2)
    )
    inputs, infos = collector.start_envs()
    collector.samples_np = other
    with pytest.raises(BadOption, match="call it again for other buffers"):
        collector.collect_batch(inputs, infos, 0)
    assert [env.actions for env in collector.envs] == [[], []]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"envs": []}, r"envs=\[\]\): expected at least one environment"),
        ({"envs": None}, "envs=NoneType None.*expected a list of environments"),
        ({"envs": Counting(3)}, "envs=Counting .*expected a list of environments"),
        ({"envs": [Counting]}, r"envs\[0\] is type .*expected an environment"),
        ({"envs": [Counting(3)] * 2}, "the same environment is in envs more than once"),
        ({"env_ranks": [0, 1]}, r"env_ranks=\[0, 1\]\): expected 1 different integers"),
        ({"env_ranks": [-1]}, "expected 1 different integers of at least 0"),
        ({"global_B": 0}, "global_B=0"),
        ({"batch_T": 6.0}, "batch_T=6.0.*expected an integer of at least 1"),
        ({"TrajInfoCls": None}, "TrajInfoCls=NoneType None.*expected the class"),
        ({"TrajInfoCls": TrajInfo()}, "TrajInfoCls=TrajInfo .*expected the class"),
        ({"agent": Agent}, "agent=type .*expected an agent"),
        ({"agent": 5}, "agent=int 5.*expected an agent"),
    ],
)
def test_impossible_arguments_are_named(given: Any, message: str) -> None:
    arguments = {
        "rank": 0,
        "envs": [Counting(3)],
        "samples_np": make_samples(T, 1),
        "batch_T": T,
        "TrajInfoCls": TrajInfo,
        "agent": Agent(1),
        **given,
    }
    with pytest.raises(BadOption, match=f"CpuResetCollector.*{message}"):
        CpuResetCollector(**arguments)


@pytest.mark.parametrize("records", [None, [], [TrajInfo()], (TrajInfo(), TrajInfo())])
def test_a_record_for_each_environment_is_needed(records: Any) -> None:
    run = Run(CpuResetCollector, [Counting(9), Counting(9)], Agent(2))
    with pytest.raises(BadOption, match="expected the list of 2 records"):
        run.collector.collect_batch(run.inputs, records, 0)
    run.batch()
    assert run.samples.env.observation[:, 0, 1].tolist() == list(range(T))


def test_inputs_of_another_form_are_refused() -> None:
    run = Run(CpuWaitResetCollector, [Counting(9), Counting(9)], Agent(2))
    wide = run.inputs._replace(observation=np.zeros((2, 3), np.float32))
    for inputs, problem in [
        (wide, r"has observation of shape \(2, 3\), expected \(2, 2\)"),
        (tuple(run.inputs), "has nothing, expected observation, prev_action"),
        (
            run.inputs._replace(prev_action=np.zeros(2)),
            "has prev_action of dtype float64",
        ),
    ]:
        with pytest.raises(BadOption, match=f"agent_inputs {problem}"):
            run.collector.collect_batch(inputs, run.infos, 0)


# --- evaluations ----------------------------------------------------------------------------------


@pytest.mark.parametrize("max_T", [0, -3, None, 2.5, "9"])
def test_an_evaluation_has_steps(max_T: Any) -> None:
    with pytest.raises(BadOption, match="SerialEvalCollector.max_T=.*at least 1"):
        SerialEvalCollector([Counting(2)], Agent(1), TrajInfo, max_T)
    with pytest.raises(BadOption, match="CpuEvalCollector.max_T=.*at least 1"):
        CpuEvalCollector(0, [Counting(2)], TrajInfo, None, max_T, Agent(1))


@pytest.mark.parametrize("most", [0, -1, 1.5, "3"])
def test_an_evaluation_has_episodes(most: Any) -> None:
    with pytest.raises(BadOption, match="max_trajectories=.*or None: no limit"):
        SerialEvalCollector([Counting(2)], Agent(1), TrajInfo, 9, most)


@pytest.mark.parametrize(
    ("observation", "message"),
    [
        (None, "returned is NoneType None"),
        ((np.zeros(2), {}), "returned is no array: it is tuple"),
        ((3, {}), "returned has no numbers: it is tuple"),
    ],
)
def test_an_evaluation_needs_an_observation(observation: Any, message: str) -> None:
    class Odd(Counting):
        def reset(self) -> Any:
            return observation

    evaluator = SerialEvalCollector([Odd(2)], Agent(1), TrajInfo, 9)
    with pytest.raises(BadEnvOutput, match=rf"what Odd\[0\].reset {message}"):
        evaluator.collect_evaluation(0)


def test_an_evaluation_needs_a_null_value_and_a_queue() -> None:
    env = Counting(2)
    env.action_space = SimpleNamespace()  # type: ignore[assignment]
    evaluator = SerialEvalCollector([env], Agent(1), TrajInfo, 9)
    with pytest.raises(
        BadOption, match=r"Counting\[0\].action_space has no null_value"
    ):
        evaluator.collect_evaluation(0)
    sync = SimpleNamespace(stop_eval=SimpleNamespace(value=False))
    with pytest.raises(BadOption, match="traj_infos_queue=None.*expected a queue"):
        CpuEvalCollector(
            0, [Counting(2)], TrajInfo, None, 9, Agent(1), sync
        ).collect_evaluation(0)


def test_after_an_error_the_next_evaluation_is_a_whole_one() -> None:
    agent = Failing(1, "step 3", "raise")
    env = Counting(5)
    evaluator = SerialEvalCollector([env], agent, TrajInfo, 10)
    with pytest.raises(
        PolicyError,
        match="raised ValueError at row 3 of the batch: once. This evaluation has ended; the next"
        " one resets all environments",
    ):
        evaluator.collect_evaluation(0)
    assert [info.Length for info in evaluator.collect_evaluation(0)] == [5, 5]
