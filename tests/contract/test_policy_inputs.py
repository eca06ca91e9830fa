"""Policies that change what they read: noticed in every call, named, and all rows are as
environments wrote them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import nn

from muster import CentralInference, Collector, MultiSyncCollector, policies
from muster.errors import BadPolicyOutput, PolicyError
from muster.keys import OBSERVATION, next_of
from muster.memory.slots import Lane, Layout, Slot
from muster.memory.specs import Column
from muster.policies.inputs import KEPT_BYTES, LARGE_BYTES, SAMPLED, InputRows
from tests.tools import assert_accounted

B, T = 2, 12


class Steps(gymnasium.Env[Any, Any]):
    """Observes ``[steps over all episodes, step of the episode]``, which are 5 steps long."""

    def __init__(self, space: Any = None, *, parts: bool = False) -> None:
        box = spaces.Box(-1e6, 1e6, (2,), np.float32)
        self.parts = parts
        self.observation_space = spaces.Dict({"a": box, "b": box}) if parts else box
        self.action_space = spaces.Discrete(2) if space is None else space
        self.made = self.t = 0

    def _observe(self) -> Any:
        values = np.array([self.made, self.t], np.float32)
        return {"a": values, "b": values + 100} if self.parts else values

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        self.made += 1
        self.t += 1
        return self._observe(), 1.0, self.t == 5, False, {}


stopped = threading.Event()  # global, since policies of workers are copies


@pytest.fixture(autouse=True)
def _going_on() -> None:
    stopped.clear()


class Meddling:
    """Changes an observation in one of several ways in the calls for row ``at`` and later ones,
    until ``stopped``.
    """

    WAYS = ("torch", "numpy", "data", "slice", "kept", "kept numpy", "kept for long")

    def __init__(self, way: str, at: int) -> None:
        self.way, self.at = way, at
        self.kept: list[torch.Tensor] = []

    def see(self, obs: torch.Tensor) -> None:
        row = int(obs.reshape(-1, 2)[0, 0]) % 100
        if row >= self.at and not stopped.is_set():
            self.change(obs)
        self.kept.append(obs)

    def change(self, obs: torch.Tensor) -> None:
        if self.way == "torch":
            obs.mul_(2).add_(1)
        elif self.way == "numpy":
            obs.numpy()[...] = -5
        elif self.way == "data":
            obs.data.fill_(-5)
        elif self.way == "slice":
            obs[..., 1:] = -5
        elif self.way == "kept":
            self.kept[-1].fill_(-5)
        elif self.way == "kept numpy":
            self.kept[-1].numpy()[...] = -5
        else:
            self.kept[max(1, len(self.kept) - 6)].zero_().sub_(5)


class Net(nn.Module):
    def __init__(self, meddling: Meddling, out: int = 2) -> None:
        super().__init__()
        self.meddling, self.linear = meddling, nn.Linear(2, out)

    def forward(self, obs: Any) -> Any:
        obs = obs["b"] if isinstance(obs, dict) else obs
        self.meddling.see(obs)
        return self.linear(obs)


class Actions(Net):
    def forward(self, obs: Any) -> Any:
        return super().forward(obs).argmax(-1)


def function(meddling: Meddling) -> Any:
    def meddler(obs: Any) -> Any:
        meddling.see(obs)
        return torch.zeros(len(obs), dtype=torch.int64)

    return meddler


def with_extras(meddling: Meddling) -> Any:
    def meddler(obs: Any) -> Any:
        meddling.see(obs)
        return torch.zeros(len(obs), dtype=torch.int64), {"value": obs[:, 0].clone()}

    return meddler


def recurrent(meddling: Meddling) -> Any:
    def meddler(obs: Any, state: Any) -> Any:
        meddling.see(obs)
        state = torch.zeros(len(obs), 3) if state is None else state
        state += 1  # its own: a copy
        return torch.zeros(len(obs), dtype=torch.int64), state

    return meddler


def of_parts(meddling: Meddling) -> Any:
    def meddler(obs: Any) -> Any:
        meddling.see(obs["b"])
        return torch.zeros(len(obs["a"]), dtype=torch.int64)

    return meddler


def coroutine(meddling: Meddling) -> Any:
    async def meddler(obs: Any) -> Any:
        meddling.see(obs)
        return torch.zeros(len(obs), dtype=torch.int64)

    return meddler


def on_tensordict(meddling: Meddling) -> Any:
    def meddler(td: Any) -> Any:
        meddling.see(td["observation"])
        return td.set("action", torch.zeros(len(td), dtype=torch.int64))

    return meddler


class Remembers(TensorDictModuleBase):
    """Also writes into its recurrent state, which is a copy."""

    in_keys = ["observation", "memory", "is_init"]  # noqa: RUF012
    out_keys = ["action", ("next", "memory")]  # noqa: RUF012

    def __init__(self, meddling: Meddling) -> None:
        super().__init__()
        self.meddling = meddling

    def forward(self, td: Any) -> Any:
        self.meddling.see(td["observation"])
        memory = td.get("memory", None)
        memory = torch.zeros(len(td), 1) if memory is None else memory
        td.set(("next", "memory"), memory.add_(1))
        return td.set("action", torch.zeros(len(td), dtype=torch.int64))


POLICIES: dict[str, tuple[Callable[[Meddling], Any], str]] = {
    "function": (function, "observation"),
    "extras": (with_extras, "observation"),
    "module": (Actions, "observation"),
    "recurrent function": (recurrent, "observation"),
    "function of parts": (of_parts, "b"),
    "coroutine": (coroutine, "observation"),
    "head": (lambda meddling: policies.categorical(Net(meddling)), "observation"),
    "head of parts": (lambda meddling: policies.categorical(Net(meddling)), "b"),
    "function of a TensorDict": (on_tensordict, "observation"),
    "TensorDictModule": (
        lambda m: TensorDictModule(Actions(m), ["observation"], ["action"]),
        "observation",
    ),
    "recurrent TensorDictModule": (Remembers, "observation"),
}


def make(policy: str) -> Any:
    return lambda: Steps(parts="parts" in policy)


def check(batch: Any, parts: bool) -> None:
    """All rows are as the environments wrote them."""
    made = torch.arange(T, dtype=torch.float32)
    for b in range(B):
        for key, more in (("a", 0), ("b", 100)) if parts else (("observation", 0),):
            before, after = batch[key][b] - more, batch["next", key][b] - more
            assert before.equal(torch.stack([made, made % 5], -1)), (key, b)
            assert after.equal(torch.stack([made + 1, made % 5 + 1], -1)), (key, b)


@pytest.mark.parametrize("way", Meddling.WAYS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("at", [1, 9, T - 1], ids=["second", "tenth", "last"])
def test_a_policy_that_changes_its_input_is_named_and_no_row_is_lost(
    policy: str, way: str, at: int
) -> None:
    if way == "kept for long":
        at = max(at, 7)
    if way in ("kept", "kept numpy"):
        at = max(at, 2)  # the input of the first call is no row
    meddling = Meddling(way, at)
    made, key = POLICIES[policy]
    with Collector(
        make(policy), made(meddling), num_envs=B, frames_per_batch=B * T, seed=0
    ) as collector:
        pattern = rf"policy .* changed its input {key} in place at row {at} of the batch.*obs -= "
        with pytest.raises(BadPolicyOutput, match=pattern) as caught:
            collector.rollout()
        assert ("which it has kept" in str(caught.value)) == way.startswith("kept")
        assert collector.stats().in_flight == B * at
        with pytest.raises(BadPolicyOutput):
            collector.rollout()  # it goes on, and so does the error
        stopped.set()
        batch = collector.rollout()
        assert collector.stats().discarded == {}
        assert_accounted(collector)
    check(batch, "parts" in policy)
    if "recurrent" in policy:  # the states that it changes in place are copies
        state = batch["memory" if "memory" in set(batch.keys()) else "recurrent_state"]
        assert state[..., 0].tolist() == [[t % 5 for t in range(T)]] * B


@pytest.mark.parametrize("policy", POLICIES)
def test_the_first_call_is_checked_too(policy: str) -> None:
    made, key = POLICIES[policy]
    with Collector(
        make(policy), made(Meddling("torch", 0)), num_envs=B, frames_per_batch=B * T
    ) as collector:
        for _ in range(2):
            with pytest.raises(
                BadPolicyOutput, match=f"policy .* changed its input {key} in place"
            ):
                collector.rollout()
        stopped.set()
        check(collector.rollout(), "parts" in policy)


@pytest.mark.parametrize("policy", ["function", "module", "head", "TensorDictModule"])
def test_writing_what_is_there_already_is_no_change(policy: str) -> None:
    class Harmless(Meddling):
        def change(self, obs: torch.Tensor) -> None:
            obs.add_(0)
            self.kept[0].mul_(1)

    with Collector(
        make(policy),
        POLICIES[policy][0](Harmless("", 2)),
        num_envs=B,
        frames_per_batch=B * T,
    ) as collector:
        check(collector.rollout(), parts=False)


def test_the_rows_of_an_error_of_the_policy_are_restored_too() -> None:
    meddling = Meddling("torch", 4)

    def failing(obs: Any) -> Any:
        meddling.see(obs)
        if not stopped.is_set() and int(obs[0, 1]) > 4:
            raise ArithmeticError("nothing there")
        return torch.zeros(len(obs), dtype=torch.int64)

    with Collector(Steps, failing, num_envs=B, frames_per_batch=B * T) as collector:
        with pytest.raises(
            PolicyError, match="ArithmeticError at row 4 of the batch: nothing there"
        ):
            collector.rollout()
        stopped.set()
        check(collector.rollout(), parts=False)


def test_hooks_may_write_into_rows_that_the_policy_has_read() -> None:
    meddling = Meddling("torch", 6)

    def hook(step: Any) -> None:
        step["observation"][:, 1] += 50

    with Collector(
        Steps, function(meddling), num_envs=B, frames_per_batch=B * T, on_step=hook
    ) as collector:
        with pytest.raises(BadPolicyOutput, match="at row 6 of the batch"):
            collector.rollout()
        stopped.set()
        batch = collector.rollout()
    assert batch["observation"][0, :, 1].tolist() == [t % 5 + 50 for t in range(T)]
    assert batch["observation"][0, :, 0].tolist() == list(range(T))


@pytest.mark.parametrize("inference", ["worker", "server", "server of several"])
@pytest.mark.parametrize("way", ["torch", "numpy"])
def test_workers_and_servers(inference: str, way: str) -> None:
    workers = 2 if inference == "server of several" else 1
    meddling = Meddling(way, 4)
    served = "worker" if inference == "worker" else CentralInference()
    options = {
        "num_envs": B,
        "frames_per_batch": workers * B * T,
        "backend": "threads",
        "inference": served,
    }
    with MultiSyncCollector(
        [Steps] * workers, function(meddling), **options
    ) as collector:
        with pytest.raises(
            BadPolicyOutput,
            match="policy meddler changed its input observation in place",
        ):
            collector.rollout()
        stopped.set()
        batch = collector.rollout().reshape(-1, T)
        assert_accounted(collector)
    for b in range(0, len(batch), B):
        check(batch[b : b + B], parts=False)


def test_a_policy_of_one_agent() -> None:
    pytest.importorskip("pettingzoo")
    from tests.unit.test_turn_based import Quarrel

    calls = 0

    def second(obs: Any) -> Any:
        nonlocal calls
        actions = obs["action_mask"].byte().argmax(-1)
        calls += 1
        if calls > 4:
            obs["observation"].fill_(7)
        return actions

    env = Quarrel()
    named = {env.possible_agents[0]: second, "others": None}
    with (
        Collector(
            Quarrel, named, num_envs=B, frames_per_batch=B * T, seed=0
        ) as collector,
        pytest.raises(
            BadPolicyOutput,
            match=f"of '{env.possible_agents[0]}' changed its input observation in place",
        ),
    ):
        collector.rollout()


# --- rows of any size -----------------------------------------------------------------------------


def lane_of(width: int, rows: int) -> tuple[Lane, Any]:
    columns = (
        Column(OBSERVATION, (width,), np.dtype(np.float32), carry=True),
        Column(next_of(("terminated",)), (), np.dtype(bool)),
    )
    (lane,) = Slot(Layout(rows, 1, columns)).lanes
    lane.arrays[OBSERVATION][...] = np.arange(rows + 1)[:, None, None]
    return lane, InputRows(lane, [OBSERVATION], "meddler")


@pytest.mark.parametrize(
    "width", [1, LARGE_BYTES // 4, LARGE_BYTES // 4 + 1, KEPT_BYTES]
)
def test_rows_of_any_size_are_restored(width: int) -> None:
    lane, inputs = lane_of(width, 2 * SAMPLED + 2)
    rows, expected = inputs.rows(OBSERVATION), lane.arrays[OBSERVATION].copy()
    act = inputs.watched(lambda t: rows[t].add_(1))
    for t in (0, 1, SAMPLED + 3):
        with pytest.raises(BadPolicyOutput, match=f"at row {t} of the batch"):
            act(t)
        assert (lane.arrays[OBSERVATION] == expected).all()


@pytest.mark.parametrize("width", [1, LARGE_BYTES // 4, LARGE_BYTES // 4 + 1])
def test_numpys_writes_into_large_rows_are_noticed_in_some_calls(width: int) -> None:
    _, inputs = lane_of(width, 3 * SAMPLED)
    rows, noticed = inputs.rows(OBSERVATION), []

    def meddle(t: int) -> None:
        rows[t].numpy()[...] = -1

    act = inputs.watched(meddle)
    for t in range(3 * SAMPLED):
        try:
            act(t)
        except BadPolicyOutput:
            noticed.append(t)
    is_small = width * 4 <= LARGE_BYTES
    assert noticed == list(range(0, 3 * SAMPLED, 1 if is_small else SAMPLED))


def test_the_row_before_the_first_one_is_restored_too() -> None:
    lane, inputs = lane_of(1, 8)
    rows, expected = inputs.rows(OBSERVATION), lane.arrays[OBSERVATION].copy()
    act = inputs.watched(lambda t: rows[t - 1].add_(1))
    with pytest.raises(
        BadPolicyOutput,
        match="at row 5 of the batch .the input of row 4, which it has kept",
    ):
        act(5)
    assert (lane.arrays[OBSERVATION] == expected).all()


def test_what_environments_write_is_not_counted() -> None:
    lane, inputs = lane_of(1, 8)
    act = inputs.watched(lambda t: None)
    (copies,) = inputs._copies
    for t in range(8):
        lane.tensors[OBSERVATION][t].fill_(t)
        act(t)
        lane.tensors[OBSERVATION][t + 1].fill_(9)
        assert copies.counter._version == copies.seen == 0


def test_copies_of_many_rows_are_dropped() -> None:
    width = LARGE_BYTES // 4
    lane, inputs = lane_of(width, 3 * KEPT_BYTES // LARGE_BYTES)
    act = inputs.watched(lambda t: None)
    for t in range(lane.T):
        act(t)
    (copies,) = inputs._copies
    assert (
        sum(len(each) for each in copies.kept if each is not None)
        <= KEPT_BYTES + LARGE_BYTES
    )


def test_lanes_without_steps_have_no_rows_of_a_batch() -> None:
    columns = (Column(OBSERVATION, (1,), np.dtype(np.float32), carry=True),)
    (lane,) = Slot(Layout(3, 1, columns)).lanes
    inputs = InputRows(lane, [OBSERVATION], "meddler")
    rows = inputs.rows(OBSERVATION)
    with pytest.raises(
        BadPolicyOutput, match="changed its input observation in place. That memory"
    ):
        inputs.watched(lambda t: rows[t].add_(1))(1)
