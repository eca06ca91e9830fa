"""Every option: what is impossible, and what the message says about it."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections import UserDict, UserList
from typing import Any

import pytest
import torch

import muster
from muster import (
    AsyncCollector,
    Collector,
    DistributedCollector,
    Evaluator,
    Execution,
    MultiAsyncCollector,
    MultiSyncCollector,
    RayCollector,
    RPCCollector,
)
from muster.collectors.options import CollectorOptions, Devices
from muster.errors import BadOption, UnknownOption
from muster.testing import CountingEnv


def options(**given: Any) -> CollectorOptions:
    return CollectorOptions(None, **{"frames_per_batch": 8, **given})


INTEGERS = {
    "frames_per_batch": [0, -5, 1.5, "8", True],
    "total_frames": [0, -2, 8.0, "8", None, True],
    "num_envs": [0, -1, 2.0, "2", True],
    "num_threads": [0, -1, 1.0, "1", True],
    "slot_memory_limit": [0, -1, 1e9, "1G", True],
    "max_frames_per_traj": [2.0, "2", True],
    "init_random_frames": [2.0, "2", False],
    "seed": [-1, 1.0, "1", True],
}
BOOLEANS = {
    name: [0, 1, None, "yes"]
    for name in ("reset_at_each_iter", "set_truncated", "return_same_td")
}
CHOICES = {
    "layout": ["[B, T]", None, 0],
    "validate": ["on", True, None],
    "exploration_type": ["greedy", None, 3],
    **{
        f"{kind}device": ["gpu", "cpu:x", 1.5]
        for kind in ("", "storing_", "policy_", "env_")
    },
}
IMPOSSIBLE = [
    (name, value)
    for table in (INTEGERS, BOOLEANS, CHOICES)
    for name in table
    for value in table[name]
]


@pytest.mark.parametrize(("name", "value"), IMPOSSIBLE, ids=str)
def test_impossible_values_are_refused_by_name(name, value):
    with pytest.raises(BadOption, match=rf"\b{name}=") as caught:
        options(**{name: value})
    assert str(value) in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("name", ["executor", "inference_mode", "own_rng"])
@pytest.mark.parametrize("value", [0, None, "yes"])
def test_details_of_the_execution_are_checked_too(name, value):
    with pytest.raises(BadOption, match=f"{name}={value!r}: expected True or False"):
        Execution(**{name: value})


def test_an_execution_is_given_as_one():
    with pytest.raises(
        BadOption, match=r"execution=\{'executor': False\}: expected muster.Execution"
    ):
        options(execution={"executor": False})
    with pytest.raises(
        BadOption, match="an evaluation always draws from generators of its own"
    ):
        Evaluator(CountingEnv, execution=Execution(own_rng=False))


def test_defaults():
    chosen = options()
    assert (chosen.total_frames, chosen.num_envs, chosen.seed) == (-1, None, None)
    assert (chosen.layout, chosen.validate, chosen.exploration_type) == (
        "batch_major",
        "fast",
        "random",
    )
    assert chosen.slot_memory_limit is not None
    assert chosen.slot_memory_limit > 1 << 20
    assert chosen.devices == Devices(storing=None, policy=None, env=None)


def test_device_fills_in_for_the_three():
    chosen = options(device="cpu", policy_device="meta").devices
    cpu = torch.device("cpu")
    assert chosen == Devices(storing=cpu, policy=torch.device("meta"), env=cpu)


class ExplorationType:
    name = "DETERMINISTIC"


@pytest.mark.parametrize("value", ["deterministic", "DETERMINISTIC", ExplorationType()])
def test_exploration_types_by_name_and_as_torchrls_enum(value):
    assert options(exploration_type=value).exploration_type == "deterministic"


# --- exact numbers --------------------------------------------------------------------------------


@pytest.mark.parametrize(("total", "near"), [(20, "16 and 24"), (7, "8")])
def test_total_frames_is_exact_or_refused(total, near):
    with pytest.raises(
        BadOption,
        match=f"total_frames={total} is not a multiple.*nearest possible are {near}",
    ):
        options(total_frames=total)


@pytest.mark.parametrize(("total", "kept"), [(20, 24), (16, 16), (7, 8), (-1, -1)])
def test_total_frames_are_rounded_up_on_request(total, kept):
    chosen = options(total_frames=total, round_up_total_frames=True)
    assert chosen.total_frames == kept


def test_rounded_up_total_frames_are_collected():
    collector = Collector(
        CountingEnv,
        None,
        frames_per_batch=8,
        total_frames=20,
        round_up_total_frames=True,
    )
    with collector:
        assert len(collector) == 3
        assert sum(batch.numel() for batch in collector) == 24


def test_rounding_up_needs_a_size_of_batches():
    with pytest.raises(BadOption, match="total_frames ends an iteration"):
        Collector(CountingEnv, None, total_frames=10, round_up_total_frames=True)


# --- lists and dicts of other libraries -----------------------------------------------------------


def counting(length: int) -> CountingEnv:
    return CountingEnv(length)


def lengths_of(batch) -> list[int]:
    ends = batch["next", "done"].squeeze(-1)
    return [int(row.nonzero()[0]) + 1 for row in ends]


def test_sequences_and_mappings_are_lists_and_dicts():
    """``UserList`` and ``UserDict``: as OmegaConf's, no subclasses of list and dict."""
    kwargs = UserList([UserDict(length=2), UserDict(length=3)])
    made = UserList([counting, counting])
    with Collector(
        made, None, frames_per_batch=8, create_env_kwargs=kwargs
    ) as collector:
        assert lengths_of(collector.next()) == [2, 3]
    with MultiSyncCollector(
        made, None, frames_per_batch=8, create_env_kwargs=kwargs, backend="threads"
    ) as collector:
        assert lengths_of(collector.next()) == [2, 3]
    with Collector(
        counting, None, frames_per_batch=4, create_env_kwargs=UserDict(length=2)
    ) as collector:
        assert int(collector.next()["next", "done"].sum()) == 2
    with Evaluator(made, None, episodes=2, create_env_kwargs=kwargs) as evaluator:
        assert sorted(evaluator.evaluate().lengths.tolist()) == [2, 3]


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("frame_per_batch", "frames_per_batch"),
        ("total_frame", "total_frames"),
        ("max_frames_per_trajectory", "max_frames_per_traj"),
        ("store_device", "storing_device"),
        ("num_env", "num_envs"),
    ],
)
def test_unknown_options_name_the_nearest(wrong, right):
    with pytest.raises(
        UnknownOption, match=f"'{wrong}'; did you mean '{right}'"
    ) as caught:
        Collector(CountingEnv, None, frames_per_batch=8, **{wrong: 1})
    assert isinstance(caught.value, TypeError)


def test_total_frames_need_frames_per_batch():
    with pytest.raises(BadOption, match="total_frames ends an iteration"):
        Collector(lambda: CountingEnv(3), total_frames=10)


SIGNED = [
    *(Collector, MultiSyncCollector, MultiAsyncCollector, AsyncCollector),
    *(DistributedCollector, RPCCollector, RayCollector),
]


@pytest.mark.parametrize("cls", SIGNED)
def test_the_signature_of_a_collector_shows_every_option_with_type_default_and_meaning(
    cls,
):
    meanings = {
        name
        for line in re.findall(r"^    (\w[\w, ]*):", cls.__init__.__doc__, re.M)
        for name in line.split(", ")
    }
    parameters = inspect.signature(cls).parameters
    assert list(parameters)[:3] == ["create_env_fn", "policy", "frames_per_batch"]
    assert {p.kind for p in list(parameters.values())[2:]} == {
        inspect.Parameter.KEYWORD_ONLY
    }
    assert meanings == set(parameters)
    assert all(
        p.annotation is not p.empty and not isinstance(p.annotation, str)
        for p in parameters.values()
    )
    assert [p.name for p in parameters.values() if p.default is p.empty] == [
        "create_env_fn"
    ]
    assert "timeouts" not in parameters or parameters["timeouts"].default == {}


def test_a_constructor_says_what_is_missing():
    with pytest.raises(TypeError, match="missing a required argument: 'create_env_fn'"):
        Collector(frames_per_batch=3)


def test_signatures_of_those_who_pass_options_on():
    shown = inspect.signature(Evaluator).parameters
    assert {"episodes", "max_frames_per_traj", "inference", "timeouts"} <= set(shown)
    assert not {"replay_buffer", "total_frames", "options"} & set(shown)
    with pytest.raises(
        UnknownOption, match="'replay_bufer'; did you mean 'replay_buffer'"
    ):
        muster.tune(CountingEnv, None, replay_bufer=[])


@pytest.mark.parametrize(
    "function",
    [Evaluator, muster.tune, muster.Tuning.make, Collector.enable_profile],
    ids=lambda f: f.__qualname__,
)
def test_help_of_those_who_pass_options_on_shows_their_meaning(function):
    text = "\n".join(
        inspect.getdoc(each) or ""
        for each in (function, getattr(function, "__init__", None))
    )
    meanings = {
        name
        for line in re.findall(r"^    (\w[\w, ]*):", text, re.M)
        for name in line.split(", ")
    }
    own = {"self", "create_env_fn", "policy"}
    assert set(inspect.signature(function).parameters) - own <= meanings


def test_errors_of_a_dataclass_are_no_meanings_of_its_options():
    assert "BadOption" not in Collector.enable_profile.__doc__


def test_options_cannot_be_changed_afterwards():
    with pytest.raises(dataclasses.FrozenInstanceError):
        options().seed = 3  # type: ignore[misc]


# --- options that change how, not what ------------------------------------------------------------


def test_threads_of_the_user_are_back_between_batches():
    seen = []

    def policy(obs: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return torch.tensor(0)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for number in (1, 3, None):
            with Collector(
                CountingEnv, policy, frames_per_batch=2, num_threads=number
            ) as collector:
                collector.rollout()
                assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 1, 3, 3, 2, 2]


@pytest.mark.parametrize(
    ("kind", "same"),
    [("random", False), ("mode", True), ("mean", True), ("deterministic", True)],
)
def test_exploration_type_decides_whether_heads_draw(kind, same):
    net = torch.nn.Linear(2, 2)
    torch.nn.init.zeros_(net.weight)
    net.bias.data = torch.tensor([0.0, 0.1])
    policy = muster.policies.categorical(net)
    with Collector(
        CountingEnv, policy, frames_per_batch=64, exploration_type=kind, seed=0
    ) as collector:
        actions = set(collector.rollout()["action"].tolist())
    assert actions == ({1} if same else {0, 1})
