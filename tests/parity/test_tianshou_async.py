"""The compat layer's AsyncCollector: who is ready when is written in a script; every transition
belongs together.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("tianshou")

from tianshou import data
from tianshou.env import BaseVectorEnv, DummyVectorEnv, SubprocVectorEnv
from tianshou.env.worker import DummyEnvWorker

from muster.compat import tianshou as compat
from muster.compat.tianshou.envs import AsyncVectorEnvs
from muster.compat.tianshou.policies import TianshouActor
from muster.compat.tianshou.steps import Sampling
from muster.errors import BadOption
from tests.parity.tianshou_envs import ACTIONS, POLICIES, Counting
from tests.parity.tianshou_tools import Program, assert_same, collects, play

Script = Callable[[int, list[int]], list[int]]


def scripted(script: Script, wait_num: int = 1) -> Callable[..., BaseVectorEnv]:
    """Makes vector environments whose results arrive as the script says: from the number of the
    wait, who arrives.
    """
    waits, numbers = itertools.count(), itertools.count()

    class Worker(DummyEnvWorker):
        def __init__(self, env_fn: Any) -> None:
            super().__init__(env_fn)
            self.number = next(numbers)

        @staticmethod
        def wait(
            workers: list[Any], wait_num: int, timeout: float | None = None
        ) -> list[Any]:
            by_number = {worker.number: worker for worker in workers}
            return [by_number[i] for i in script(next(waits), sorted(by_number))]

    return lambda fns: BaseVectorEnv(fns, Worker, wait_num=wait_num, timeout=0.1)


def one_by_one(wait: int, waiting: list[int]) -> list[int]:
    return [waiting[wait % len(waiting)]]


def backwards(wait: int, waiting: list[int]) -> list[int]:
    return waiting[::-1] if wait % 3 else waiting[-1:]


def everybody(wait: int, waiting: list[int]) -> list[int]:
    return waiting


def asynchronous(module: Any) -> Any:
    return module.AsyncCollector


def run(
    lengths: Sequence[int],
    script: Script | None,
    calls: Any,
    policy: str = "array",
    act: str = "discrete",
) -> list[Any]:
    """Run a program on scripted environments; the data after every call must be unbroken chains of
    transitions.
    """
    env = {"act": act, "infos": "all"}
    noise = {"exploration_noise": policy == "values"}
    venv = scripted(script) if script else lambda fns: DummyVectorEnv(fns, wait_num=2)
    seen = play(
        compat,
        Program(lengths, calls, policy, env=env, collector=noise, venv=venv),
        asynchronous,
    )
    for entry in seen:
        for i, (length, part) in enumerate(
            zip(lengths, entry["buffer"]["parts"], strict=True)
        ):
            if n := part["_size"]:
                check_chain(
                    cut(entry["buffer"]["memory"], i * 200, n),
                    length,
                    i,
                    policy,
                    act,
                    entry["envs"][i],
                )
    memory = seen[-1]["buffer"]["memory"]
    ended = (
        sorted(memory["obs"][memory["done"], 0]) if seen[-1]["buffer"]["length"] else []
    )
    assert sorted(n for entry in seen[1:] for n in entry["episodes"]["lens"]) == ended
    return seen


def cut(tree: Any, begin: int, size: int) -> Any:
    if isinstance(tree, dict):
        return {key: cut(value, begin, size) for key, value in tree.items()}
    return tree[begin : begin + size]


def check_chain(
    rows: Any, length: int, env: int, policy: str, act: str, log: list[Any]
) -> None:
    """The rows are what one environment alone gives for the actions it got, and what the policy
    said about them.
    """
    n = len(rows["rew"])
    t = np.arange(n) % length
    sent = [np.array(action) for method, action in log if method == "step"]
    assert n <= len(sent) <= n + 1  # one may be on its way
    np.testing.assert_array_equal(rows["obs"], np.stack([np.full(n, length), t], -1))
    np.testing.assert_array_equal(
        rows["obs_next"], np.stack([np.full(n, length), t + 1], -1)
    )
    expected = [
        step + 1 + action.sum() / 7 for step, action in zip(t, sent, strict=False)
    ]
    np.testing.assert_allclose(rows["rew"], expected, rtol=1e-6)
    for flag, it_is in (
        ("done", True),
        ("truncated", env % 2 == 0),
        ("terminated", env % 2 == 1),
    ):
        np.testing.assert_array_equal(rows[flag], (t + 1 == length) & it_is)
    np.testing.assert_array_equal(rows["info"]["t"], t + 1)
    np.testing.assert_array_equal(rows["info"]["env_id"], np.full(n, env))
    mapped = POLICIES[policy](ACTIONS[act]()).map_action(rows["act"])
    np.testing.assert_allclose(
        mapped, np.array(sent[:n]).reshape(mapped.shape), rtol=1e-6
    )
    if isinstance(rows["policy"], dict) and "deep" in rows["policy"]:
        acted = (
            rows["policy"]["deep"]["count"][:, 0] > 0
        )  # by itself, and not at random
        calls = np.ones(n) if policy == "none" else t + 1
        np.testing.assert_array_equal(
            rows["policy"]["deep"]["count"][acted, 1], calls[acted]
        )
        np.testing.assert_array_equal(
            rows["policy"]["logp"], np.where(acted, (length + t) / 8, 0)
        )


MATRIX = [
    (policy, act)
    for policy, act in itertools.product(POLICIES, ACTIONS)
    if act != "many" or policy not in ("values", "actor")
]
CALLS = collects({"n_step": 7}, {"n_step": 6}, {"n_episode": 4}, {"n_step": 1})


@pytest.mark.parametrize("script", [one_by_one, backwards])
@pytest.mark.parametrize(("policy", "act"), MATRIX)
def test_policies_without_state_and_actions_of_any_shape_are_paired(
    policy: str, act: str, script: Script
) -> None:
    seen = run((3, 5, 2), script, CALLS, policy, act)
    assert seen[3]["stats"]["n_collected_episodes"] >= 4


@pytest.mark.parametrize("act", ACTIONS)
def test_random_actions_are_paired(act: str) -> None:
    calls = collects(
        {"n_step": 9, "random": True}, {"n_step": 8}, {"n_episode": 2, "random": True}
    )
    seen = run((3, 5, 2), one_by_one, calls, "none", act)
    assert [len(entry["policy"]) for entry in seen[:2]] == [0, 0]
    assert len(seen[3]["policy"]) == len(seen[2]["policy"]) > 3


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.lists(
        st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True),
        min_size=1,
        max_size=20,
    ),
    st.lists(
        st.one_of(
            st.integers(1, 12).map(lambda n: {"n_step": n}), st.just({"n_episode": 2})
        ),
        max_size=5,
    ),
    st.sampled_from(["array", "tensor", "batch", "none"]),
)
def test_any_order_of_arrivals(
    lengths: list[int], order: list[list[int]], calls: Any, policy: str
) -> None:
    def script(wait: int, waiting: list[int]) -> list[int]:
        return [i for i in order[wait % len(order)] if i in waiting] or waiting[:1]

    seen = run(lengths, script, collects(*calls), policy)
    for call, entry in zip(calls, seen[1:], strict=True):
        made = entry["stats"]["n_collected_steps"]
        assert made >= 1
        assert (
            call.get("n_step", 0) <= made <= call.get("n_step", 99) + len(lengths) - 1
        )
        assert call.get("n_episode", 0) <= entry["stats"]["n_collected_episodes"]
    assert seen[-1]["buffer"]["length"] == sum(
        entry["stats"]["n_collected_steps"] for entry in seen[1:]
    )


@pytest.mark.parametrize(("policy", "act"), MATRIX)
def test_where_all_are_always_ready_it_is_the_sync_collector(
    policy: str, act: str
) -> None:
    calls = collects(
        {"n_step": 9}, {"n_step": 30, "random": True}, {"n_step": 3}, {"n_step": 12}
    )
    collector = {
        "raise_on_nan_in_buffer": False
    }  # random steps have none of the policy's entries
    program = Program(
        (3, 5, 2), calls, policy, env={"act": act, "infos": "some"}, collector=collector
    )
    ours = play(compat, replace(program, venv=scripted(everybody)), asynchronous)
    assert_same(ours, play(compat, program))


def test_it_is_tianshous_where_that_works() -> None:
    def steps(entry: Any) -> Any:
        memory = {
            key: entry["buffer"]["memory"][key]
            for key in ("obs", "obs_next", "rew", "done", "info", "policy")
        }
        return (
            memory,
            entry["envs"],
            entry["stats"],
            entry["counters"],
            entry["buffer"]["memory"]["act"].astype(int),
        )

    program = Program((3, 5, 2), CALLS, "array", env={"infos": "all"})
    ours, theirs = (
        play(module, replace(program, venv=scripted(one_by_one)), asynchronous)
        for module in (compat, data)
    )
    assert_same(
        [steps(entry) for entry in ours[1:]], [steps(entry) for entry in theirs[1:]]
    )


def test_the_first_episodes_to_end_count() -> None:
    def only_one(wait: int, waiting: list[int]) -> list[int]:
        return [2] if 2 in waiting else waiting

    seen = run((2, 2, 3), only_one, collects({"n_episode": 2}, {"n_episode": 1}))
    assert seen[1]["episodes"]["lens"].tolist() == [3, 3]
    assert seen[1]["stats"]["n_collected_steps"] == 6
    assert [part["_size"] for part in seen[1]["buffer"]["parts"]] == [0, 0, 6]
    assert seen[2]["envs"][0] == seen[0]["envs"][0] + [("step", 1)]


def test_steps_on_their_way_are_part_of_the_next_call() -> None:
    late = {0: [0], 1: [0], 2: [0, 1, 2]}
    seen = run(
        (9, 9, 9),
        lambda wait, waiting: late.get(wait, waiting),
        collects({"n_step": 2}, {"n_step": 3}),
    )
    assert [
        [part["_size"] for part in entry["buffer"]["parts"]] for entry in seen[1:]
    ] == [
        [2, 0, 0],
        [3, 1, 1],
    ]
    assert seen[2]["stats"]["n_collected_steps"] == 3
    assert [len(log) for log in seen[2]["envs"]] == [4, 2, 2]  # a reset and the steps


@pytest.mark.parametrize("method", ["reset", "reset_env"])
def test_a_reset_waits_for_steps_on_their_way_and_forgets_them(method: str) -> None:
    calls = [*collects({"n_step": 2}), (method, {}), ("collect", {"n_step": 3})]
    program = Program(
        (9, 9, 9), calls, "array", venv=scripted(lambda wait, waiting: waiting[:1])
    )
    seen = play(compat, program, asynchronous)
    last = seen[-1]["buffer"]
    assert all(log[-1][0] == "step" for log in seen[-1]["envs"])
    assert seen[1]["envs"][2] == [("reset", (None, None)), ("step", 3)]
    assert seen[2]["envs"][2][-1] == ("reset", (None, None))
    kept = 2 if method == "reset_env" else 0
    assert last["length"] == kept + 3
    np.testing.assert_array_equal(last["memory"]["obs"][kept : kept + 3, 1], [0, 1, 2])
    np.testing.assert_array_equal(
        last["memory"]["policy"]["hidden_state"][kept : kept + 3, 0], [1, 2, 3]
    )


def test_reset_arguments_and_reset_before_collect() -> None:
    start = {"gym_reset_kwargs": {"options": {"start": 1}}}
    calls = [
        ("collect", {"n_step": 4, "reset_before_collect": True, **start}),
        ("collect", {"n_episode": 3, **start}),
    ]
    seen = play(compat, Program((3, 4), calls, venv=scripted(one_by_one)), asynchronous)
    resets = [call for log in seen[-1]["envs"] for call in log if call[0] == "reset"]
    assert set(map(str, resets)) == {str(("reset", (None, {"start": 1})))}
    assert seen[-1]["buffer"]["memory"]["obs"][:3, 1].tolist() == [1, 2, 1]


def test_a_dummy_vector_environment_gives_unbroken_chains() -> None:
    seen = run((3, 5, 2), None, CALLS)  # who arrives there is left to Tianshou
    assert seen[-1]["counters"][1] >= 4


def test_processes_give_unbroken_chains() -> None:
    lengths = 3, 5, 2, 4
    for options in ({"wait_num": 2}, {"timeout": 0.01}):
        program = Program(
            lengths,
            collects({"n_step": 30}, {"n_episode": 5}, {"n_step": 11, "random": True}),
            "array",
            env={"act": "boxes", "infos": "all"},
            venv=lambda fns, options=options: SubprocVectorEnv(
                fns, context="fork", **options
            ),
        )
        seen = play(compat, program, asynchronous)
        total = seen[-1]["buffer"]
        for i, (length, part) in enumerate(zip(lengths, total["parts"], strict=True)):
            rows = cut(total["memory"], 200 * i, part["_size"])
            t = np.arange(part["_size"]) % length
            np.testing.assert_array_equal(rows["obs"][:, 1], t)
            np.testing.assert_array_equal(rows["obs_next"][:, 1], t + 1)
            np.testing.assert_allclose(
                rows["rew"], t + 1 + rows["act"].sum(-1) / 7, rtol=1e-6
            )
            np.testing.assert_array_equal(rows["info"]["env_id"], np.full(len(t), i))
        assert total["length"] == sum(
            entry["stats"]["n_collected_steps"] for entry in seen[1:]
        )


def test_after_an_error_of_an_environment_all_begin_anew() -> None:
    class Faulty(Counting):
        def step(self, action: Any) -> Any:
            if self.length == 5 and self.t == 2:
                self.length = 4
                raise RuntimeError("broken")
            return super().step(action)

    envs = [Faulty(n) for n in (9, 5, 9)]
    collector = collecting(
        envs,
        lambda wait, waiting: waiting[:2],
        POLICIES["array"](ACTIONS["discrete"]()),
    )
    with pytest.raises(RuntimeError, match="broken") as error:
        collector.collect(n_step=100)
    assert type(error.value) is RuntimeError  # the environment's own, as with Tianshou
    before = len(collector.buffer)
    assert (before, collector.collect_step) == (4, 4)
    assert collector.collect(n_step=8).lens.tolist() == [4]
    assert [sum(call[0] == "reset" for call in env.log) for env in envs] == [2, 3, 2]
    rows = collector.buffer[[2, 3, 4, 5]]
    assert rows.obs[:, 1].tolist() == [0, 1, 2, 3]
    assert rows.policy.hidden_state[:, 0].tolist() == [1, 2, 3, 4]
    assert collector.collect_step == before + 8
    assert envs[2].log[-1][0] == "step"


def collecting(
    envs: list[Counting], script: Script, policy: Any, **options: Any
) -> Any:
    """A collector that has been reset."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        venv = scripted(script)([lambda env=env: env for env in envs])
        collector = compat.AsyncCollector(policy, venv, **options)
    collector.reset()
    return collector


def test_rows_of_environments_on_their_way_repeat_what_was_observed_and_say_nothing_else() -> (
    None
):
    envs = AsyncVectorEnvs(
        scripted(one_by_one)([lambda n=n: Counting(n) for n in (2, 9, 9)]),
        np.zeros((3, 2), "f"),
    )
    sampling = Sampling(envs, TianshouActor(envs, envs.venv.action_space))
    sampling.begin(*envs.venv.reset())
    sampling.actor.begin(
        POLICIES["none"](ACTIONS["discrete"]()), random=False, noise=False, no_grad=True
    )
    arrays = sampling.make(6, None, None).arrays
    assert [row.ids.tolist() for row in envs.rows] == [[0], [1], [2], [0], [1], [2]]
    times = [[0, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 2, 2], [0, 0, 0, 1, 1, 1, 2]]
    assert arrays["observation",][:, :, 1].T.tolist() == times
    assert np.floor(arrays["next", "reward"]).T.tolist() == [
        [1, 0, 0, 2, 0, 0],
        [0, 1, 0, 0, 2, 0],
        [0, 0, 1, 0, 0, 2],
    ]
    assert np.argwhere(
        arrays["next", "terminated"] | arrays["next", "truncated"]
    ).tolist() == [[3, 0]]


def test_hooks_work_here_too() -> None:
    notes: list[Any] = []
    seen: list[Any] = []
    collector = collecting(
        [Counting(n) for n in (3, 2)],
        one_by_one,
        POLICIES["none"](ACTIONS["discrete"]()),
    )
    collector.set_on_step_hook(
        lambda action, step: notes.append(step.obs_next[:, 1].tolist())
    )
    collector.set_on_episode_done_hook(
        lambda episode: seen.append(episode.obs[:, 1].tolist())
    )
    stats = collector.collect(n_episode=4)
    assert sum(map(len, notes)) == stats.n_collected_steps
    assert [len(times) for times in seen] == stats.lens.tolist()
    assert all(times == list(range(len(times))) for times in seen)


@pytest.mark.parametrize(
    ("script", "renders"), [(everybody, [2, 2]), (one_by_one, [0, 0])]
)
def test_environments_are_rendered_where_no_steps_are_pending(
    script: Script, renders: list[int]
) -> None:
    envs = [Counting(n) for n in (3, 2)]
    collector = collecting(envs, script, POLICIES["none"](ACTIONS["discrete"]()))
    for seconds in (1e-12, 0.0):
        collector.collect(n_step=4, render=seconds)
        assert [
            [call[0] for call in env.log].count("render") for env in envs
        ] == renders


def test_actions_keep_the_precision_they_were_made_with() -> None:
    kinds: list[Any] = []
    envs = [Counting(n, act="box") for n in (3, 2)]
    collector = collecting(
        envs, everybody, POLICIES["values"](ACTIONS["box"]()), exploration_noise=True
    )
    collector.set_on_step_hook(lambda action, step: kinds.append(step.act.dtype.name))
    for random in (True, False):
        collector.collect(n_step=2, random=random)
    assert kinds == ["float32", "float64"]


def test_a_trainer_sees_which_kind_it_is() -> None:
    envs = DummyVectorEnv([lambda: Counting(3)] * 2, wait_num=1)
    collector = compat.AsyncCollector(POLICIES["none"](ACTIONS["discrete"]()), envs)
    assert isinstance(collector, data.AsyncCollector)
    assert isinstance(collector, data.BaseCollector)
    assert not isinstance(
        compat.Collector(collector.policy, DummyVectorEnv([lambda: Counting(3)])),
        data.AsyncCollector,
    )


def test_the_wrong_collector_is_named() -> None:
    policy = POLICIES["none"](ACTIONS["discrete"]())
    with pytest.raises(BadOption, match="AsyncCollector"):
        compat.Collector(
            policy, DummyVectorEnv([lambda: Counting(3)] * 2, wait_num=1)
        ).reset()
    with pytest.warns(UserWarning, match="wait_num"):
        collector = compat.AsyncCollector(
            policy, DummyVectorEnv([lambda: Counting(3)] * 2)
        )
    collector.reset()
    assert collector.collect(n_step=4).n_collected_steps == 4
