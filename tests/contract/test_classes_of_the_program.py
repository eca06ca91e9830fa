"""Classes that are defined in a script, notebook or function are one class in each process, wherever
their objects, policies and environments go: nothing that is sent later sets it back.
"""

from __future__ import annotations

import sys
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from muster import Collector, Evaluator, MultiAsyncCollector, MultiSyncCollector
from muster.compat.gymnasium import VectorEnv
from tests.fakes.node_runs import sync_nodes

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no worker processes")


class Program:
    """What a script defines: classes, and a setting that their methods read."""

    def __init__(self) -> None:
        program = self
        self.setting = 1

        class CountsSteps(gymnasium.Env[Any, Any]):
            """Observations are the number of steps of all environments of this class."""

            observation_space = spaces.Box(0, 999, (1,))
            action_space = spaces.Discrete(9)
            steps = 0

            def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
                super().reset(seed=seed)
                return np.zeros(1, np.float32), {}

            def step(self, action: Any) -> Any:
                CountsSteps.steps += 1
                number = np.array([CountsSteps.steps], np.float32)
                return number, float(action), False, False, {}

        class Policy(nn.Module):
            calls = 0

            def forward(self, observation: Tensor) -> Tensor:
                Policy.calls += 1
                return torch.full(observation.shape[:-1], program.setting)

        self.env = CountsSteps
        self.policy = Policy


WHERE = {
    "process": (Collector, {}),
    "threads": (MultiSyncCollector, {"backend": "threads"}),
    "threads-server": (
        MultiSyncCollector,
        {"backend": "threads", "inference": "server"},
    ),
    "sync": (MultiSyncCollector, {}),
    "async": (MultiAsyncCollector, {}),
    "nodes": (sync_nodes, {}),
}


FACTOR = 3  # which the functions of a script read


class Script:
    """Classes of a program's ``__main__``, and an environment with objects of its script."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Inner:
            value = 0

        class OfScript(gymnasium.Env[Any, Any]):
            """Observations are the number of the step, and what its functions make of it."""

            observation_space = spaces.Box(0, 9999, (5,))
            action_space = spaces.Discrete(9)

            def __init__(self) -> None:
                self.inner = Inner()
                self.functions = [lambda x: x * FACTOR, self.twice, Inner, self.inner]
                self.cls = Inner

            def twice(self, x: float) -> float:
                return 2 * x

            def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
                super().reset(seed=seed)
                self.t = 0
                return self.observation(), {}

            def step(self, action: Any) -> Any:
                self.t += 1
                self.inner.value += 1
                return self.observation(), 0.0, False, self.t >= 5, {}

            def observation(self) -> Any:
                triple, twice, cls, inner = self.functions
                assert type(inner) is cls is self.cls
                assert inner is self.inner
                numbers = [self.t, inner.value, triple(self.t), twice(self.t), 0]
                return np.array(numbers, np.float32)

        for cls in (Inner, OfScript):
            cls.__module__ = "__main__"
            cls.__qualname__ = cls.__name__
            main = sys.modules["__main__"]
            monkeypatch.setattr(main, cls.__name__, cls, raising=False)
        self.env = OfScript


def steps_of(env: Any) -> int:
    return int(type(env.unwrapped).steps)


@pytest.mark.parametrize("where", WHERE)
def test_the_classes_of_workers_keep_their_state(where: str) -> None:
    """Functions that are sent to them know the same classes."""
    program = Program()
    kind, options = WHERE[where]
    envs = [program.env] * (2 if where == "nodes" else 1)
    with kind(
        envs, program.policy(), frames_per_batch=4 * len(envs), seed=0, **options
    ) as c:
        seen = []
        for _ in range(3):
            batch = c.next()
            seen += batch["next", "observation"].reshape(len(envs), -1)[0].tolist()
            c.map_envs(lambda env, cls: isinstance(env.unwrapped, cls), program.env)
            steps = c.map_envs(steps_of)  # of rollouts that are ahead, too
            assert min(steps) >= seen[-1]
    assert seen == list(range(1, len(seen) + 1))


@pytest.mark.parametrize("where", WHERE)
def test_the_classes_of_the_program_stay_as_they_are(where: str) -> None:
    program = Program()
    kind, options = WHERE[where]
    program.policy.calls = 1000
    policy = program.policy()
    forward = program.policy.forward
    attributes = dict(vars(program.policy))
    envs = [program.env] * (2 if where == "nodes" else 1)
    with kind(envs, policy, frames_per_batch=4 * len(envs), seed=0, **options) as c:
        c.next()
        program.policy.calls = 2000
        c.update_policy_weights_()
        c.next()
    assert program.policy.forward is forward
    assert vars(program.policy).keys() == attributes.keys()
    in_this_process = where in ("process", "threads", "threads-server")
    assert (program.policy.calls > 2000) == in_this_process
    program.setting = 2
    assert policy(torch.zeros(1, 1)).tolist() == [2]


def test_evaluation_leaves_the_classes_of_the_program_alone() -> None:
    program = Program()
    forward = program.policy.forward
    policy = program.policy()
    with Evaluator(
        lambda: gymnasium.wrappers.TimeLimit(program.env(), 3), policy, episodes=2
    ) as evaluator:
        program.policy.calls = 5
        assert evaluator.evaluate().mean == 3.0
    assert program.policy.forward is forward
    assert program.policy.calls >= 5


def test_a_vector_environment_keeps_the_state_of_its_classes() -> None:
    program = Program()
    envs = VectorEnv([program.env], num_workers=1)
    envs.reset()
    seen = []
    for _ in range(3):
        seen += envs.step(np.array([1]))[0].reshape(-1).tolist()
        assert envs.call("get_wrapper_attr", "steps") == (seen[-1],)
    envs.close()
    assert seen == [1, 2, 3]


@pytest.mark.parametrize("where", ["process", "threads", "sync", "async", "nodes"])
def test_environments_with_objects_of_the_script_resume_exactly(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, options = WHERE[where]
    env = Script(monkeypatch).env

    def made() -> Any:
        return kind([env] * 2, None, frames_per_batch=12, seed=0, **options)

    with made() as c:
        c.next()
        state = c.state_dict()
        following = [c.next().clone() for _ in range(2)]
    with made() as c:
        report = c.load_state_dict(state, trust=True)
        assert report.exact, report
        again = [c.next() for _ in range(2)]
    for batch, other in zip(following, again, strict=True):
        assert batch["observation"].equal(other["observation"])
        assert batch["observation"].max() > 4
