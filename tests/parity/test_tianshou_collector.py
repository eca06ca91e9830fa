"""The compat layer's Collector beside Tianshou's own: from equal environments, policies and seeds,
equal everything.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("tianshou")

from tianshou import data
from tianshou.data import Batch, VectorReplayBuffer
from tianshou.env import DummyVectorEnv, SubprocVectorEnv, VectorEnvNormObs

from muster.compat import tianshou as compat
from tests.parity.tianshou_envs import ACTIONS, POLICIES, Counter, Counting
from tests.parity.tianshou_tools import (
    BUFFERS,
    Program,
    assert_equal_to_tianshou,
    assert_same,
    collects,
    contents,
)

STEPS = {"n_step": 7}, {"n_step": 6}, {"n_step": 1}
EPISODES = {"n_episode": 5}, {"n_episode": 2}, {"n_episode": 3}
MIXED = collects(*itertools.chain(*zip(STEPS, EPISODES, strict=True)))
MATRIX = [
    (policy, act)
    for policy, act in itertools.product(POLICIES, ACTIONS)
    if act != "many"
    or policy not in ("values", "actor")  # Tianshou has none of those for MultiDiscrete
]


# --- every array ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "act"), [pair for pair in MATRIX if pair[0] != "tensor"]
)
def test_every_kind_of_policy_and_of_action(policy: str, act: str) -> None:
    noise = {"exploration_noise": policy == "values"}
    seen = assert_equal_to_tianshou(
        Program((3, 5, 2), MIXED, policy, env={"act": act}, collector=noise)
    )
    assert [entry["stats"]["n_collected_episodes"] for entry in seen[2::2]] == [5, 2, 3]


@pytest.mark.parametrize(
    ("buffer", "obs"),
    [*itertools.product(BUFFERS, ["array", "dict", "pixels", "text"])],
)
def test_every_kind_of_buffer_and_of_observation(buffer: str, obs: str) -> None:
    if buffer == "last" and obs in ("dict", "text"):
        pytest.skip("there is no last one of those")
    lengths = (4,) if buffer == "single" else (3, 5, 2)
    assert_equal_to_tianshou(Program(lengths, MIXED, "batch", buffer, env={"obs": obs}))


@pytest.mark.parametrize(
    ("buffer", "infos"),
    [*itertools.product(["vector", "small", "single", "cached"], ["all", "some"])],
)
def test_infos_that_are_always_there_and_that_come_and_go(
    buffer: str, infos: str
) -> None:
    lengths = (4,) if buffer == "single" else (3, 5, 2)
    assert_equal_to_tianshou(
        Program(lengths, MIXED, "none", buffer, env={"infos": infos})
    )


@pytest.mark.parametrize("reward", ["int", "vector"])
def test_rewards_that_are_not_floats(reward: str) -> None:
    assert_equal_to_tianshou(Program((3, 5, 2), MIXED, "array", env={"reward": reward}))


@pytest.mark.parametrize(
    ("act", "policy"),
    [("discrete", "values"), ("many", "array"), ("boxes", "actor"), ("grid", "values")],
)
def test_random_actions_come_from_the_spaces_of_the_environments(
    act: str, policy: str
) -> None:
    calls = collects(
        {"n_step": 7, "random": True},
        {"n_step": 5},
        {"n_episode": 4, "random": True},
        {"n_step": 3},
    )
    seen = assert_equal_to_tianshou(Program((3, 5, 2), calls, policy, env={"act": act}))
    assert seen[1]["policy"] == []


@pytest.mark.parametrize("within_training", [False, True])
def test_a_policy_is_in_eval_mode_and_knows_whether_it_is_trained(
    within_training: bool,
) -> None:
    program = Program(
        (3, 2),
        MIXED,
        collector={"exploration_noise": True},
        within_training=within_training,
    )
    seen = assert_equal_to_tianshou(program)
    assert {mode for entry in seen for *_, mode in entry["policy"]} == {
        (False, within_training)
    }
    assert seen[-1]["training"]


# --- numbers of steps and of episodes -------------------------------------------------------------


@pytest.mark.parametrize(
    "lengths", [(4, 4, 4, 4), (1, 1, 1), (1, 7, 2, 2), (9, 1), (3,)]
)
@pytest.mark.parametrize("n", range(1, 12))
def test_every_number_of_episodes(lengths: tuple[int, ...], n: int) -> None:
    seen = assert_equal_to_tianshou(
        Program(lengths, collects({"n_episode": n}, {"n_episode": n}), "array")
    )
    assert [entry["stats"]["n_collected_episodes"] for entry in seen[1:]] == [n, n]


@pytest.mark.parametrize("n", [1, 3, 4, 5, 30, 64, 65, 257])
def test_every_number_of_steps(n: int) -> None:
    seen = assert_equal_to_tianshou(
        Program((3, 20, 2, 1), collects({"n_step": n}, {"n_step": 2}), "array")
    )
    assert seen[1]["stats"]["n_collected_steps"] == -(-n // 4) * 4


def test_long_episodes_of_many_rows() -> None:
    calls = collects({"n_episode": 3}, {"n_step": 500}, {"n_episode": 1})
    assert_equal_to_tianshou(
        Program((150, 181), calls, "values", collector={"exploration_noise": True})
    )


@pytest.mark.parametrize("policy", ["none", "batch"])
def test_more_steps_in_one_call_than_a_ring_has_room_for(policy: str) -> None:
    calls = collects({"n_step": 100}, {"n_step": 2}, {"n_episode": 20})
    assert_equal_to_tianshou(
        Program((3, 5), calls, policy, "small", env={"infos": "some"})
    )


calls = st.one_of(
    st.fixed_dictionaries({"n_step": st.integers(1, 20)}),
    st.fixed_dictionaries({"n_episode": st.integers(1, 7)}),
).flatmap(
    lambda call: st.fixed_dictionaries(
        {},
        optional={
            "random": st.booleans(),
            "reset_before_collect": st.booleans(),
            "gym_reset_kwargs": st.sampled_from(
                [None, {"seed": 5}, {"options": {"start": 1}}]
            ),
        },
    ).map(lambda more: ("collect", {**call, **more}))
)
others = st.one_of(
    st.just(("reset_env", {})),
    st.just(("reset_stat", {})),
    st.booleans().map(lambda keep: ("reset_buffer", {"keep_statistics": keep})),
    st.booleans().map(
        lambda buffer: ("reset", {"reset_buffer": buffer, "reset_stats": not buffer})
    ),
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_whatever_is_done_in_whatever_order(data: Any) -> None:
    lengths = data.draw(st.lists(st.integers(2, 8), min_size=1, max_size=4))
    policy, act = data.draw(
        st.sampled_from([pair for pair in MATRIX if pair[0] != "tensor"])
    )
    env = {"act": act, "infos": data.draw(st.sampled_from(["none", "all", "some"]))}
    env["obs"] = data.draw(st.sampled_from(["array", "dict", "pixels"]))
    program = Program(
        lengths,
        [
            ("reset", {}),
            *data.draw(
                st.lists(st.one_of(calls, calls, others), min_size=1, max_size=5)
            ),
        ],
        policy,
        data.draw(st.sampled_from(["vector", "small", "prioritized", "stacked"])),
        env=env,
        collector={
            "exploration_noise": data.draw(st.booleans()) and policy == "values"
        },
    )
    assert_equal_to_tianshou(program, knows_episodes=False)


# --- resets, vector environments ------------------------------------------------------------------


def test_reset_before_collect_and_reset_arguments_reach_the_environments() -> None:
    start = {"gym_reset_kwargs": {"options": {"start": 1}}}
    program = Program(
        (3, 5, 2),
        [
            ("collect", {"n_step": 6, "reset_before_collect": True, **start}),
            ("collect", {"n_step": 9, **start}),
            ("collect", {"n_episode": 4, "gym_reset_kwargs": {"seed": 3}}),
            ("collect", {"n_episode": 4, "reset_before_collect": True}),
            ("reset", start),
            ("reset_env", start),
            ("collect", {"n_step": 3}),
        ],
        "batch",
    )
    seen = assert_equal_to_tianshou(program, knows_episodes=False)
    assert seen[3]["counters"][1] == 4
    assert ("reset", (None, {"start": 1})) in seen[0]["envs"][0]


@pytest.mark.parametrize("act", ["discrete", "boxes"])
def test_environments_in_processes(act: str) -> None:
    calls = [
        *MIXED,
        ("collect", {"n_step": 9, "random": True}),
        ("collect", {"n_step": 6}),
    ]
    forked = partial(
        SubprocVectorEnv, context="fork"
    )  # TorchRL makes "spawn" the default, once it is imported
    program = Program(
        (3, 5, 2), calls, "actor", env={"act": act, "infos": "some"}, venv=forked
    )
    assert_equal_to_tianshou(program)


def test_wrappers_of_vector_environments_change_observations() -> None:
    def venv(fns: Any) -> Any:
        return VectorEnvNormObs(DummyVectorEnv(fns))

    seen = assert_equal_to_tianshou(Program((3, 5, 2), MIXED, "array", venv=venv))
    assert seen[1]["buffer"]["memory"]["obs"].max() < 5


def test_actions_that_are_batches() -> None:
    class Pairs(Counter):
        def forward(self, batch: Any, state: Any = None, **kwargs: Any) -> Any:
            result = super().forward(batch, state, **kwargs)
            result.act = Batch(a=result.act, b=np.stack([result.act] * 2, -1))
            return result

        def map_action(self, act: Any) -> Any:
            return act

    class Taking(Counting):
        def step(self, action: Any) -> Any:
            return super().step(action.a + action.b.sum())

    found = []
    for module in (compat, data):
        policy = Pairs(ACTIONS["discrete"](), "array")
        venv = DummyVectorEnv([partial(Taking, n) for n in (3, 5, 2)])
        collector = module.Collector(policy, venv, VectorReplayBuffer(90, 3))
        collector.reset()
        for call in ({"n_step": 9}, {"n_episode": 4}, {"n_step": 6}):
            collector.collect(**call)
        found.append(contents(collector.buffer))
    assert_same(*found)
    assert set(found[0]["memory"]["act"]) == {"a", "b"}
