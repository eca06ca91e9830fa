"""Wherever environments and policies keep state, recorded rollouts are those that run row by row, or
are refused with the name of the place.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from torch import nn

from muster import Collector, Execution, policies
from muster.capture.walk import survey
from muster.errors import CaptureRefused
from tests.fakes import hiding_envs, torch_envs
from tests.fakes.hiding_envs import RECORDED, REFUSED
from tests.fakes.tape import pools
from tests.fakes.twins import B, Twins

__all__ = ["pools"]  # a fixture
MODES = [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED]
OF_MODE = pytest.mark.parametrize("mode", MODES, ids=["same step", "by mask"])


def name_of(value: Any) -> str | None:
    return value.__name__ if isinstance(value, type) else None


def head() -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
    return policies.categorical(net)


@OF_MODE
@pytest.mark.parametrize("kind", RECORDED, ids=name_of)
def test_tensors_in_every_place(pools, kind, mode):
    """Also after resets and rollouts row by row, which leave other tensors there."""
    with Twins(partial(kind, B, autoreset=mode), head) as twins:
        twins.alike(4)
        for call in (
            lambda c: c.reset([1, 3]),
            lambda c: c.collect_batch(n_step=5 * B),
            lambda c: c.set_seed(8),
        ):
            twins.do(call)
            twins.alike(3)
        assert twins.replays >= 6


@pytest.mark.parametrize("kind", REFUSED, ids=name_of)
def test_what_python_changes_is_refused_wherever_it_is(pools, kind):
    """It makes a difference only after more steps than a trial has."""
    with Twins(partial(kind, B)) as twins:
        twins.recorded.next()
        with pytest.raises(CaptureRefused, match=REFUSED[kind]):
            twins.recorded.next()
        assert not pools[0].made
        twins.recorded.next()


def replace_gain(env: Any, made: dict[str, Any]) -> None:
    env.gain = made["gain"] = SimpleNamespace(value=env.gain.value)


def change_replaced_gain(env: Any, made: dict[str, Any]) -> None:
    made["gain"].value = 0.7


def replace_task(env: Any, made: dict[str, Any]) -> None:
    env.task = hiding_envs.Tuned.Hard()


def replace_function_of_torch(env: Any, made: dict[str, Any]) -> None:
    env.squashed = torch.relu


def replace_function(env: Any, made: dict[str, Any]) -> None:
    env.shaped = lambda value: value * 3


def replace_goal(env: Any, made: dict[str, Any]) -> None:
    env.goal = made["goal"] = torch.full((B,), 0.3)


def change_replaced_goal(env: Any, made: dict[str, Any]) -> None:
    made["goal"].fill_(-0.4)


def change_table(env: Any, made: dict[str, Any]) -> None:
    env.table += 1e-6


USERS = [
    (replace_gain, change_replaced_gain),
    (replace_task,),
    (replace_function_of_torch,),
    (replace_function,),
    (replace_goal, change_replaced_goal),
    (change_table,),
]


@pytest.mark.parametrize("changes", USERS, ids=lambda changes: changes[0].__name__)
def test_what_the_user_replaces_between_rollouts(pools, changes):
    """It takes effect, stays the user's to change, and nothing else changes with it."""
    with Twins(partial(hiding_envs.Tuned, B), head) as twins:
        twins.alike(4)
        made: list[dict[str, Any]] = [{}, {}]
        for change in changes:
            for (kept,), given in zip(twins.kept, made, strict=True):
                change(kept.envs[-1], given)
            twins.alike(4)
        assert twins.replays >= 4


def test_another_method_of_the_class(pools, monkeypatch):
    with Twins(partial(hiding_envs.Tuned, B), head) as twins:
        twins.alike(4)
        monkeypatch.setattr(hiding_envs.Tuned.Easy, "bonus", lambda _, x: x * 9)
        twins.alike(4)
        assert twins.replays >= 4


class Drops(nn.Module):
    """Has buffers, one in place and one that is replaced, and draws in training mode."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(2)
        self.drop = nn.Dropout(0.5)
        self.layer = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        self.mean = self.mean * 0.9 + obs.mean(0)
        return self.layer(self.drop(self.norm(obs - self.mean))).argmax(-1)


@pytest.mark.parametrize("executor", [True, False])
def test_a_policy_with_buffers_that_is_trained_and_evaluated(pools, executor):
    options = {"execution": Execution(executor=executor)}
    with Twins(partial(torch_envs.Remembers, B), Drops, **options) as twins:
        twins.alike(4)
        for training in (False, True):
            replays = twins.replays
            for policy in twins.policies:
                policy.train(training)
            twins.alike(3)
            assert twins.replays > replays
        buffers = [dict(policy.named_buffers()) for policy in twins.policies]
        for name, value in buffers[0].items():
            assert torch.equal(value, buffers[1][name]), name


def test_modes_of_torch_that_change_between_rollouts(pools):
    """Eager rollouts follow them, and so do recorded ones."""
    with Twins(partial(torch_envs.Remembers, B), head) as twins:
        twins.alike(4)
        for enabled in (True, False):
            replays = twins.replays
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                twins.alike(4)
            assert twins.replays >= replays + 2
        assert len(pools[0].made) == 3


@pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch < 2.9"
)
def test_a_precision_of_matrix_products_that_is_set_between_rollouts(pools):
    """By the attribute after which torch refuses to say the precision by its older name."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    with Twins(partial(torch_envs.Remembers, B), head) as twins:
        try:
            twins.alike(4)
            matmul.fp32_precision = "tf32"
            with pytest.raises(RuntimeError):
                torch.get_float32_matmul_precision()
            twins.alike(4)
        finally:
            matmul.fp32_precision = before
        assert twins.replays >= 4
        assert len(pools[0].made) == 2


def test_a_state_that_is_never_as_rollouts_leave_it(pools):
    """Then rollouts run row by row, and the reason says so."""
    with Twins(partial(hiding_envs.Resets, B), head, capture="auto") as twins:
        twins.alike(4)
        for _ in range(5):
            twins.do(Collector.reset)
            twins.alike(1)
        capture = twins.recorded.stats().capture
        assert capture.state == "refused"
        assert "before each rollout, and not after it" in capture.reason


def test_an_object_that_cannot_be_looked_at(pools):
    class Breaks:
        @property
        def __dict__(self) -> Any:
            raise RuntimeError("do not look")

    def make() -> Any:
        env = torch_envs.Remembers(B)
        env.part = Breaks()
        return env

    with Twins(make, head, capture="auto") as twins:
        twins.alike(3)
        assert "do not look" in twins.recorded.stats().capture.reason


def test_paths_are_unique():
    tensors = [torch.zeros(1) for _ in range(6)]
    root = {
        (1, "a"): tensors[0],
        (1, "b"): tensors[1],
        hiding_envs.Key(): tensors[2],
        hiding_envs.Key(): tensors[3],
        1: tensors[4],
        "1": tensors[5],
    }
    found = survey({"env": root}, torch.device("cpu"))
    assert sorted(map(id, found.tensors.values())) == sorted(map(id, tensors))
    assert found.places.keys() == found.tensors.keys()


class Holds:
    """Has containers of every kind."""

    shared = "of the class"

    class Slots:
        __slots__ = ("first", "second")

    def __init__(self) -> None:
        self.number = 1000.5
        self.tensor = torch.zeros(1)
        self.mapping = {"a": 1, "b": 2}
        self.other = {"c": 3}
        self.empty: dict[str, Any] = {}
        self.ordered = OrderedDict(a=1, b=2)
        self.counter = Counter("aab")
        self.rows = [1, 2]
        self.past = deque([1, 2])
        self.names = {"x"}
        self.slots = self.Slots()
        self.slots.first = 1
        self.objects = np.array([1, None], dtype=object)
        self.array = np.arange(6.0)
        self.large = np.zeros(1 << 16)
        self.host = torch.zeros(3, device="cpu")
        kept = "kept"
        self.function = lambda: kept

    def cell(self) -> Any:
        return self.function.__closure__[0]


def rename(held: Holds) -> None:
    held.mapping["d"] = held.mapping.pop("b")


def move(held: Holds) -> None:
    held.other["b"] = held.mapping.pop("b")


def reorder(held: Holds) -> None:
    held.mapping["a"] = held.mapping.pop("a")


CHANGES: dict[str, Callable[[Holds], Any]] = {
    "number": lambda held: setattr(held, "number", 1000.75),
    "type": lambda held: setattr(held, "rows", (1, 2)),
    "equal tensor": lambda held: setattr(held, "tensor", torch.zeros(1)),
    "new attribute": lambda held: setattr(held, "more", None),
    "renamed": rename,
    "moved": move,
    "order": reorder,
    "ordered": lambda held: held.ordered.move_to_end("a"),
    "filled": lambda held: held.empty.update(a=1),
    "counter": lambda held: held.counter.update("a"),
    "list": lambda held: held.rows.append(3),
    "entry": lambda held: held.rows.__setitem__(0, 5),
    "deque": lambda held: held.past.rotate(1),
    "set": lambda held: held.names.add("y"),
    "slot": lambda held: setattr(held.slots, "second", 1),
    "no slot": lambda held: delattr(held.slots, "first"),
    "objects": lambda held: held.objects.__setitem__(1, 1),
    "array": lambda held: held.array.__setitem__(5, 0.0),
    "shape": lambda held: setattr(held.array, "shape", (2, 3)),
    "large array": lambda held: held.large.fill(1.0),
    "host": lambda held: held.host.add_(1),
    "cell": lambda held: setattr(held.cell(), "cell_contents", "other"),
    "no cell": lambda held: delattr(held.cell(), "cell_contents"),
    "class": lambda held: setattr(type(held), "shared", "changed"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_noticed_before_a_replay(monkeypatch, change):
    """Also by the comparison by identity, which is made from the second look on."""
    monkeypatch.setattr(Holds, "shared", "of the class")
    held = Holds()
    found = survey({"env": held}, torch.device("meta"))
    for _ in range(3):
        assert found.has_its_entries
    CHANGES[change](held)
    for _ in range(3):
        assert not found.has_its_entries


def test_an_equal_constant_is_no_change():
    held = Holds()
    found = survey({"env": held}, torch.device("meta"))
    assert found.has_its_entries
    before = held.number
    held.number = float("1000.5")
    assert held.number is not before
    for _ in range(3):
        assert found.has_its_entries
    held.number = 1001.5
    assert not found.has_its_entries


def test_a_look_before_a_replay_takes_few_calls():
    """However many modules a policy has: modules have twenty containers each."""
    calls = 0

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call"

    net = nn.Sequential(*(nn.Linear(2, 2) for _ in range(50)))
    found = survey({"policy": net}, torch.device("cpu"))
    assert len(found.entries) > 1000
    assert found.has_its_entries
    sys.setprofile(count)
    try:
        assert found.has_its_entries
    finally:
        sys.setprofile(None)
    assert calls < 10
