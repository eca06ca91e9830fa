"""What rlpyt's training collectors record, and what their agents are shown, as expected arrays."""

from __future__ import annotations

import inspect
import pickle
import threading
from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muster.compat import rlpyt
from muster.compat.rlpyt import (
    BaseCollector,
    CpuResetCollector,
    CpuWaitResetCollector,
    DecorrelatingStartCollector,
    GpuResetCollector,
    GpuWaitResetCollector,
    TrajInfo,
)
from muster.errors import (
    BadEnvOutput,
    BadOption,
    BadPolicyOutput,
    CollectorTimeout,
    EnvError,
    MusterError,
)
from tests.fakes.rlpyt_parts import (
    Actions,
    Agent,
    AgentSamples,
    AgentStep,
    Counting,
    EnvSamples,
    EnvStep,
    LateCounting,
    Move,
    Samples,
    Sight,
    make_samples,
    make_step_buffer,
)
from tests.fakes.rlpyt_reference import expected
from tests.fakes.rlpyt_samplers import SerialSampler

CPU = {False: CpuResetCollector, True: CpuWaitResetCollector}


def sampler(
    collector: Any, envs: list[Any], T: int, agent: Any = None, **options: Any
) -> SerialSampler:
    return SerialSampler(
        collector,
        envs,
        agent or Agent(len(envs)),
        options.pop("TrajInfoCls", TrajInfo),
        T,
        **options,
    )


def times(samples: Any) -> list[Any]:
    """``[B, T]``."""
    return samples.env.observation[..., 1].T.tolist()


def done(samples: Any) -> list[Any]:
    return samples.env.done.T.astype(int).tolist()


# --- both kinds of resets -------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=3),
    st.integers(1, 8),
    st.booleans(),
    st.booleans(),
)
def test_every_cell_is_what_one_environment_alone_would_give(
    envs: list[tuple[int, int]], T: int, wait: bool, one_memory: bool
) -> None:
    agent = Agent(len(envs))
    samples = make_samples(T, len(envs), one_memory=one_memory)
    run = sampler(
        CPU[wait], [Counting(n, life) for n, life in envs], T, agent, samples=samples
    )
    references = [expected(n, life, T, 3, wait=wait) for n, life in envs]
    for itr in range(3):
        agent.inputs.clear()
        got, infos = run.obtain_samples(itr)
        assert len(agent.inputs) == T
        for b, (parts, _) in enumerate(references):
            want = parts[itr]
            assert got.env.observation[:, b].tolist() == [
                [envs[b][0], t] if calls else [0, 0]
                for t, calls in zip(want["t"], want["calls"], strict=True)
            ]
            assert got.agent.action[:, b].tolist() == want["action"]
            assert got.env.reward[:, b].tolist() == want["reward"]
            assert got.env.done[:, b].tolist() == want["done"]
            assert got.env.env_info.traj_done[:, b].tolist() == want["over"]
            assert got.env.env_info.t[:, b].tolist() == want["reward"]
            assert got.agent.agent_info.memory.calls[:, b].tolist() == want["calls"]
            shown = [(o[b][1], a[b], r[b]) for o, a, r in agent.inputs]
            assert shown == want["inputs"]
            prev = list(
                zip(
                    got.agent.prev_action[:, b].tolist(),
                    got.env.prev_reward[:, b].tolist(),
                    strict=True,
                )
            )
            before = list(zip([0, *want["action"]], [0, *want["reward"]], strict=True))
            if one_memory:
                assert prev == [shown[0][1:], *before[1:T]]
            else:
                assert prev == [inputs[1:] for inputs in shown]
        assert sorted(info.Length for info in infos) == sorted(
            n for _, ended in references for n in ended[itr]
        )


@pytest.mark.parametrize(
    "part", [0, 1, 2], ids=["observation", "prev_action", "prev_reward"]
)
def test_an_agent_that_changes_its_input_is_named(part: int) -> None:
    class Meddling(Agent):
        def step(self, *inputs: Any) -> Any:
            returned = super().step(*inputs)
            if len(self.inputs) > 2:
                inputs[part].fill_(3)
            return returned

    name = ("observation", "prev_action", "prev_reward")[part]
    pattern = f"policy Meddling changed its input {name} in place at row 2 of the batch"
    with pytest.raises(BadPolicyOutput, match=pattern):
        sampler(
            CpuResetCollector, [Counting(3), Counting(4)], 5, Meddling(2)
        ).obtain_samples(0)


def test_an_agent_may_change_what_it_gets_after_the_last_row() -> None:
    class Meddling(Agent):
        def step(self, observation: Any, *rest: Any) -> Any:
            returned = super().step(observation, *rest)
            if not observation.any():  # all environments wait
                observation.fill_(7)
            return returned

    samples, _ = sampler(
        CpuWaitResetCollector, [Counting(2), Counting(2)], 5, Meddling(2)
    ).obtain_samples(0)
    assert times(samples) == [[0, 1, 0, 0, 0]] * 2


def test_records_cannot_write_into_observations() -> None:
    class Scaling(TrajInfo):
        def step(self, observation: Any, *rest: Any) -> None:
            observation /= 2

    with pytest.raises(
        MusterError,
        match=r"Scaling of Counting\[0\]: recording a step raised ValueError.*read-only",
    ):
        sampler(
            CpuResetCollector, [Counting(3)], 5, TrajInfoCls=Scaling
        ).obtain_samples(0)


def test_waiting_resets_happen_in_reset_if_needed() -> None:
    env = Counting(2)
    run = sampler(CpuWaitResetCollector, [env], 3)
    inputs, infos, _ = run.collector.collect_batch(run.agent_inputs, run.traj_infos, 0)
    assert env.resets == 1
    run.collector.reset_if_needed(inputs)
    assert (env.resets, inputs.observation.tolist()) == (2, [[2, 0]])
    run.collector.reset_if_needed(inputs)
    run.collector.collect_batch(inputs, infos, 1)
    assert env.resets == 2


def test_all_batches_are_written_to_the_same_memory() -> None:
    run = sampler(CpuResetCollector, [Counting(4)], 3)
    first, _ = run.obtain_samples(0)
    assert run.obtain_samples(1)[0] is first
    assert times(first) == [[3, 0, 1]]


def test_the_agent_is_told_who_and_when_it_is() -> None:
    agent = Agent(2)
    run = sampler(CpuResetCollector, [Counting(9), Counting(9)], 2, agent)
    assert agent.log == [
        ("collector_initialize", 2, [0, 1]),
        "reset",
        ("sample_mode", 0),
    ]
    run.obtain_samples(7)
    assert agent.log[3:] == [("sample_mode", 7)]


def test_names_and_arguments_are_those_of_rlpyt() -> None:
    training = "rank envs samples_np batch_T TrajInfoCls agent sync step_buffer_np global_B env_ranks"
    evaluating = (
        "rank envs TrajInfoCls traj_infos_queue max_T agent sync step_buffer_np"
    )
    for name in rlpyt.__all__:
        if not name.endswith("Collector"):
            continue
        arguments = inspect.signature(getattr(rlpyt, name)).parameters
        expected = training if "Eval" not in name else evaluating
        expected = (
            "envs agent TrajInfoCls max_T max_trajectories"
            if name.startswith("Serial")
            else expected
        )
        assert list(arguments) == expected.split()
        needed = (
            expected.split("agent sync")[0]
            if "Serial" not in name
            else "envs agent TrajInfoCls max_T"
        )
        assert [
            a for a, p in arguments.items() if p.default is p.empty
        ] == needed.split()


def test_the_class_says_whether_environments_are_reset_in_a_batch() -> None:
    assert [c.mid_batch_reset for c in (CpuResetCollector, GpuResetCollector)] == [
        True,
        True,
    ]
    assert [
        c.mid_batch_reset for c in (CpuWaitResetCollector, GpuWaitResetCollector)
    ] == [
        False,
        False,
    ]


def test_what_the_environment_calls_over_is_done_for_the_agent_as_well() -> None:
    class Over(Counting):
        def step(self, action: Any) -> Any:
            return super().step(action)._replace(done=False)

    env, agent = Over(2), Agent(1)
    samples, infos = sampler(CpuResetCollector, [env], 4, agent).obtain_samples(0)
    assert (times(samples), done(samples)) == ([[0, 1, 0, 1]], [[0, 1, 0, 1]])
    assert (len(infos), agent.resets) == (2, [0, 0])


# --- values of what comes next --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wait", "length", "value"),
    [
        (
            False,
            9,
            3 + 10 * 1 + 100 * 3,
        ),  # what is observed, done and earned in the third step; the action is 1
        (False, 3, 0),  # of the reset observation, with nothing before it
        (True, 3, 0),  # of zeros
        (True, 2, 0),
    ],
)
def test_the_bootstrap_value_is_of_what_the_agent_would_see_next(
    wait: bool, length: int, value: float
) -> None:
    agent = Agent(1)
    samples = make_samples(3, 1, bootstrap=True)
    samples.agent.bootstrap_value[:] = -1
    got, _ = sampler(
        CPU[wait], [Counting(length)], 3, agent, samples=samples
    ).obtain_samples(0)
    if length == 9:
        assert got.agent.action[2, 0] == 2
        value = 3 + 10 * 2 + 100 * 3
    assert got.agent.bootstrap_value.tolist() == [[value]]


# --- random steps at the beginning ----------------------------------------------------------------


def test_random_steps_are_one_to_the_limit_and_count_for_the_record() -> None:
    np.random.seed(1)
    envs, agent = [Counting(1000) for _ in range(64)], Agent(64)
    run = sampler(CpuResetCollector, envs, 2, agent, max_decorrelation_steps=4)
    steps = [env.t for env in envs]
    assert set(steps) == {1, 2, 3, 4}
    assert run.agent_inputs.observation[:, 1].tolist() == steps
    assert run.agent_inputs.prev_reward.tolist() == steps
    assert run.agent_inputs.prev_action.tolist() == [env.actions[-1] for env in envs]
    assert [info.Length for info in run.traj_infos] == steps
    assert [info.Return for info in run.traj_infos] == [n * (n + 1) / 2 for n in steps]
    assert (agent.inputs, agent.resets) == ([], [])
    samples, _ = run.obtain_samples(0)
    assert samples.env.observation[0, :, 1].tolist() == steps
    assert samples.env.prev_reward[0].tolist() == steps


def test_episodes_that_end_in_random_steps_have_no_record() -> None:
    np.random.seed(0)
    envs = [Counting(2) for _ in range(32)]
    run = sampler(CpuResetCollector, envs, 1, max_decorrelation_steps=5)
    made = [len(env.actions) for env in envs]
    assert set(made) == {1, 2, 3, 4, 5}
    assert [info.Length for info in run.traj_infos] == [n % 2 for n in made]
    assert run.agent_inputs.observation[:, 1].tolist() == [n % 2 for n in made]
    assert run.agent_inputs.prev_reward.tolist() == [n % 2 for n in made]
    assert [env.resets for env in envs] == [1 + n // 2 for n in made]
    _, infos = run.obtain_samples(0)
    assert [info.Length for info in infos] == [2] * sum(n % 2 for n in made)


def test_random_steps_depend_on_the_seed_of_the_process_only() -> None:
    def start(seed: int) -> list[Any]:
        np.random.seed(seed)
        envs = [Counting(50) for _ in range(8)]
        sampler(CpuResetCollector, envs, 1, max_decorrelation_steps=20)
        return [env.actions for env in envs]

    assert start(3) == start(3) != start(4)
    assert [len(actions) for actions in start(3)] != [
        len(actions) for actions in start(4)
    ]


def test_the_step_buffer_shows_where_the_environments_are() -> None:
    np.random.seed(1)
    envs, step = [Counting(9), Counting(9)], make_step_buffer(2)
    ready = SimpleNamespace(obs_ready=object(), act_ready=object())
    collector = GpuResetCollector(
        0,
        envs,
        make_samples(2, 2),
        2,
        TrajInfo,
        sync=ready,
        step_buffer_np=step,
        global_B=2,
        env_ranks=[0, 1],
    )
    inputs, _ = collector.start_envs(4)
    assert (
        step.observation.tolist()
        == inputs.observation.tolist()
        == [[9, env.t] for env in envs]
    )
    assert step.action.tolist() == [env.actions[-1] for env in envs]
    assert step.reward.tolist() == [env.t for env in envs]


# --- records of episodes --------------------------------------------------------------------------


def test_a_record_adds_up_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrajInfo, "_discount", 0.5)
    _, (info,) = sampler(CpuResetCollector, [Counting(3)], 4).obtain_samples(0)
    shown = {name: value for name, value in info.items() if not name.startswith("_")}
    assert shown == {
        "Length": 3,
        "Return": 6,
        "NonzeroRewards": 3,
        "DiscountedReturn": 2.75,
    }
    assert pickle.loads(pickle.dumps(info)) == info
    with pytest.raises(AttributeError, match="TrajInfo has no 'Size'"):
        _ = info.Size


def test_a_record_class_is_called_with_every_step_and_the_last_observation() -> None:
    class Notes(TrajInfo):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.steps = []

        def step(self, observation, action, reward, done, agent_info, env_info) -> None:  # type: ignore[no-untyped-def]
            seen = (
                observation.tolist(),
                int(action),
                reward,
                done,
                int(agent_info.memory.calls),
                env_info.t,
            )
            self.steps.append(seen)

        def terminate(self, observation: Any) -> Any:
            return [*self.steps, observation.tolist()]

    run = sampler(
        CpuResetCollector, [Counting(3), Counting(4, 2)], 5, TrajInfoCls=Notes
    )
    samples, infos = run.obtain_samples(0)
    actions = samples.agent.action.T.tolist()
    ends = [False, False, True], [False, True, False, True]
    calls = [1, 2, 3], [1, 2, 1, 2]
    assert infos == [
        [
            *[
                ([n, t], actions[b][t], t + 1.0, ends[b][t], calls[b][t], t + 1)
                for t in range(n)
            ],
            [n, n],
        ]
        for b, n in enumerate((3, 4))
    ]


# --- buffers of other shapes ----------------------------------------------------------------------


class Sights:
    """Observations and actions that consist of parts."""

    def __init__(self) -> None:
        self.t = 0
        self.actions: list[Any] = []
        self.action_space = SimpleNamespace(
            sample=lambda: Move(np.int64(1), np.ones(2, np.float32))
        )

    def reset(self) -> Any:
        self.t = 0
        return Sight(np.array([0]), np.float32(0))

    def step(self, action: Any) -> Any:
        self.actions.append((int(action.step), action.force.tolist()))
        action.force[:] = 99  # an environment may do that
        self.t += 1
        return EnvStep(
            Sight(np.array([self.t]), np.float32(-self.t)), 1, np.bool_(self.t == 3), ()
        )


class SightAgent(Agent):
    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> Any:
        self.inputs.append(
            (
                observation.extra.tolist(),
                prev_action.force.tolist(),
                prev_reward.tolist(),
            )
        )
        step = observation.count[:, 0] + 1
        return AgentStep(Move(step, torch.stack([step.float()] * 2, 1)), None)


@pytest.mark.parametrize("wait", [False, True])
def test_observations_and_actions_may_have_parts(wait: bool) -> None:
    T, agent, env = 4, SightAgent(1), Sights()
    move = Move(np.zeros((T, 1), np.int64), np.zeros((T, 1, 2), np.float32))
    before = Move(np.zeros((T, 1), np.int64), np.zeros((T, 1, 2), np.float32))
    sight = Sight(np.zeros((T, 1, 1), np.int64), np.zeros((T, 1), np.float32))
    samples = Samples(
        AgentSamples(move, before, None),
        EnvSamples(
            sight,
            np.zeros((T, 1), np.float32),
            np.zeros((T, 1), np.float32),
            np.zeros((T, 1), bool),
            None,
        ),
    )
    run = sampler(
        CPU[wait], [env], T, agent, samples=samples, max_decorrelation_steps=1
    )
    assert run.agent_inputs.prev_action.force.tolist() == [[1, 1]]
    assert isinstance(run.agent_inputs.observation, Sight)
    samples, _ = run.obtain_samples(0)
    last = 0 if wait else 1
    assert sight.count[:, 0, 0].tolist() == [1, 2, 0, last]
    assert sight.extra[:, 0].tolist() == [-1, -2, 0, -last]
    assert move.step[:, 0].tolist() == [2, 3, 0 if wait else 1, last * 2]
    assert move.force[:, 0, 1].tolist() == move.step[:, 0].tolist()
    assert before.step[:, 0].tolist() == [1, 2, 0, 0 if wait else 1]
    assert before.force[:, 0, 0].tolist() == [1, 2, 0, 0 if wait else 1]
    assert [a[1][0][0] for a in agent.inputs] == before.force[:, 0, 0].tolist()


def test_of_two_buffers_the_one_that_sync_names_is_written() -> None:
    pair, sync = (
        [make_samples(2, 1), make_samples(2, 1)],
        SimpleNamespace(db_idx=SimpleNamespace(value=0)),
    )
    collector = CpuResetCollector(
        0, [Counting(9)], pair, 2, TrajInfo, agent=Agent(1), sync=sync
    )
    inputs, infos = collector.start_envs()
    for sync.db_idx.value in (0, 1):
        inputs, infos, _ = collector.collect_batch(inputs, infos, 0)
    assert [times(samples) for samples in pair] == [[[0, 1]], [[2, 3]]]


def test_a_sampler_may_pass_on_copies_of_what_is_acted_on_next() -> None:
    Inputs = namedtuple("Inputs", "observation prev_action prev_reward")
    env = Counting(2)
    run = sampler(CpuWaitResetCollector, [env], 3)
    run.obtain_samples(0)
    inputs, infos, _ = run.collector.collect_batch(run.agent_inputs, run.traj_infos, 1)
    copied = Inputs(*(x.copy() for x in inputs))
    run.collector.reset_if_needed(copied)
    assert [x.tolist() for x in copied] == [[[2, 0]], [0], [0]]
    copied.prev_reward[:] = 7
    run.collector.collect_batch(copied, infos, 2)
    assert run.samples.env.prev_reward[0, 0] == 7


# --- what goes wrong ------------------------------------------------------------------------------


def make(cls: Any = CpuResetCollector, **given: Any) -> Any:
    given = {
        "rank": 0,
        "envs": [Counting(3)],
        "samples_np": make_samples(4, 1),
        "batch_T": 4,
        **given,
    }
    return cls(**{"TrajInfoCls": TrajInfo, "agent": Agent(1), **given})


@pytest.mark.parametrize("cls", [CpuResetCollector, CpuWaitResetCollector])
def test_without_an_agent_the_error_names_the_collectors_of_the_other_samplers(
    cls: Any,
) -> None:
    with pytest.raises(
        BadOption,
        match=f"{cls.__name__} got no agent.*SerialSampler and CpuSampler.*begin with Gpu",
    ):
        make(cls, agent=None)


@pytest.mark.parametrize("cls", [GpuResetCollector, GpuWaitResetCollector])
def test_without_a_step_buffer_the_error_names_the_samplers_that_have_one(
    cls: Any,
) -> None:
    with pytest.raises(
        BadOption,
        match=rf"{cls.__name__} got no sync.obs_ready, sync.act_ready, step_buffer_np.*Gpu",
    ):
        make(cls)
    sync = SimpleNamespace(obs_ready=object(), act_ready=object())
    with pytest.raises(
        BadOption,
        match=r"got no step_buffer_np, .*belongs to GpuSampler and AlternatingSampler",
    ):
        make(cls, sync=sync)


def test_buffers_of_another_size_are_refused() -> None:
    with pytest.raises(
        BadOption,
        match=r"samples_np.env.observation is \(4, 2, 2\), expected \(4, 1, ...\): batch_T",
    ):
        make(samples_np=make_samples(4, 2)).start_envs()
    with pytest.raises(BadOption, match=r"expected \(5, 1, ...\)"):
        make(batch_T=5).start_envs()
    with pytest.raises(BadOption, match="samples_np has no env.reward"):
        make(
            samples_np=Samples(None, SimpleNamespace(observation=np.zeros((4, 1))))
        ).start_envs()


def test_an_observation_that_does_not_fit_its_buffer_is_refused() -> None:
    class Grown(Counting):
        def observe(self) -> Any:
            return np.zeros(3) if self.t else super().observe()

    with pytest.raises(
        BadEnvOutput,
        match=r"Grown\[0\].step.*observation of shape \(3,\).*buffer is for \(2,\)",
    ):
        sampler(CpuResetCollector, [Grown(3)], 2).obtain_samples(0)


def test_an_info_that_comes_later_is_refused_and_not_dropped() -> None:
    run = sampler(CpuResetCollector, [LateCounting(9)], 1)
    run.obtain_samples(0)
    with pytest.raises(
        BadEnvOutput,
        match=r"LateCounting\[0\].step returned has next.env_info.bonus, for which",
    ):
        run.obtain_samples(1)


def test_an_info_that_is_left_out_is_zero() -> None:
    class Silent(Counting):
        def info(self, over: bool) -> Any:
            return () if self.t % 2 else super().info(over)

    run = sampler(CpuResetCollector, [Silent(9)], 3)
    infos = [
        run.obtain_samples(itr)[0].env.env_info.t[:, 0].tolist() for itr in range(3)
    ]
    assert infos == [[0, 2, 0], [4, 0, 6], [0, 8, 0]]


def test_environments_and_agents_draw_from_the_generators_of_the_process() -> None:
    class Noisy(Counting):
        def step(self, action: Any) -> Any:
            return super().step(action)._replace(reward=np.random.random())

    class Dice(Agent):
        def step(self, *inputs: Any) -> Any:
            return super().step(*inputs)._replace(action=torch.randint(5, (1,)))

    run = sampler(CpuResetCollector, [Noisy(9)], 4, Dice(1))
    np.random.seed(5)
    torch.manual_seed(5)
    samples, _ = run.obtain_samples(0)
    assert samples.env.reward[:, 0] == pytest.approx(
        np.random.RandomState(5).random_sample(4)
    )
    torch.manual_seed(5)
    assert samples.agent.action[:, 0].tolist() == [
        int(torch.randint(5, (1,))) for _ in range(4)
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda action: action + 0.5,
            "action of dtype float32, and its buffer is int64",
        ),
        (
            lambda action: np.int64(1),
            r"action of shape \(\), and its buffer is for \(1,\)",
        ),
    ],
)
def test_an_action_of_another_kind_is_refused(change: Any, message: str) -> None:
    class Odd(Agent):
        def step(self, *inputs: Any) -> Any:
            step = super().step(*inputs)
            return AgentStep(change(step.action), step.agent_info)

    with pytest.raises(BadPolicyOutput, match=f"what Odd returned has {message}"):
        sampler(
            CpuResetCollector, [Counting(3)], 2, Odd(1), max_decorrelation_steps=1
        ).obtain_samples(0)


def test_an_error_of_an_environment_says_which() -> None:
    class Broken(Counting):
        def step(self, action: Any) -> Any:
            raise ZeroDivisionError("no reason")

    with pytest.raises(
        EnvError, match=r"Broken\[1\].step raised ZeroDivisionError: no reason"
    ):
        sampler(CpuResetCollector, [Counting(3), Broken(3)], 2).obtain_samples(0)


def test_an_error_of_a_record_class_says_so() -> None:
    class Faulty(TrajInfo):
        def terminate(self, observation: Any) -> Any:
            raise KeyError("Lives")

    with pytest.raises(
        MusterError,
        match=r"Faulty of Counting\[0\]: recording a step raised KeyError: 'Lives'",
    ):
        sampler(CpuResetCollector, [Counting(2)], 2, TrajInfoCls=Faulty).obtain_samples(
            0
        )


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ((1, 2, 3), "returned tuple, expected"),
        (EnvStep(0, "x", False, ()), "reward is"),
        (EnvStep(0, 1, 2, ()), "done"),
    ],
)
def test_a_step_must_have_four_parts_of_the_right_kind(step: Any, message: str) -> None:
    class Wrong(Counting):
        def step(self, action: Any) -> Any:
            return step

    with pytest.raises(BadEnvOutput, match=message):
        sampler(CpuResetCollector, [Wrong(3)], 2).obtain_samples(0)


def test_collecting_before_starting_is_refused() -> None:
    with pytest.raises(
        MusterError, match=r"collect_batch\(\) comes after start_envs\(\)"
    ):
        make().collect_batch(None, [], 0)


def test_a_server_that_never_answers_ends_in_an_error() -> None:
    class Hasty(GpuResetCollector):
        max_wait_s = 0.05

    sync = SimpleNamespace(
        obs_ready=threading.Semaphore(0), act_ready=threading.Semaphore(0)
    )
    collector = make(Hasty, agent=None, sync=sync, step_buffer_np=make_step_buffer(1))
    inputs, infos = collector.start_envs()
    with pytest.raises(
        CollectorTimeout,
        match=r"no actions from the action server within 0.05 s.*max_wait_s",
    ):
        collector.collect_batch(inputs, infos, 0)


def test_collectors_of_your_own_build_on_the_base_classes() -> None:
    class Mine(DecorrelatingStartCollector):
        def collect_batch(
            self, agent_inputs: Any, traj_infos: list[Any], itr: int = 0
        ) -> Any:
            return agent_inputs, traj_infos, [itr]

    mine = make(Mine, agent=None)
    inputs, infos = mine.start_envs(3)
    mine.start_agent()
    mine.reset_if_needed(inputs)
    assert mine.collect_batch(inputs, infos, 5) == (inputs, infos, [5])
    with pytest.raises(TypeError, match="abstract"):
        make(BaseCollector)
    assert Actions().null_value() == 0
