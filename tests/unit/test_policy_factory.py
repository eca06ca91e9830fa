"""Policies that cannot be pickled: the error names the part and ``policy_factory``, which then
works everywhere.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import muster
from muster import (
    AsyncCollector,
    Collector,
    DistributedCollector,
    Evaluator,
    MultiAsyncCollector,
    MultiSyncCollector,
    RPCCollector,
    policies,
)
from muster.errors import BadOption
from muster.testing import CountingEnv
from tests.fakes.buffers import Extends
from tests.tools import counting

REMEDY = "Pass policy_factory=make in place of policy=, where make is a function that returns the policy."


class Drawing(nn.Module):
    """Draws from a generator of its own, as Python means the word."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.noise = nn.Linear(2, 2), (0.1 * n for n in itertools.count())

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return (self.net(obs) + next(self.noise)).argmax(-1)


class Locked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.lock = nn.Linear(2, 2), threading.Lock()

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        with self.lock:
            return self.net(obs).argmax(-1)


def function() -> Callable[[torch.Tensor], torch.Tensor]:
    net, lock = nn.Linear(2, 2), threading.Lock()

    def act(obs: torch.Tensor) -> torch.Tensor:
        with lock:
            return net(obs).argmax(-1)

    return act


POLICIES: dict[str, tuple[Callable[[], Any], str]] = {
    "weight_norm": (
        lambda: policies.categorical(parametrizations.weight_norm(nn.Linear(2, 2))),
        r"attribute '_modules' -> item 'net' is a .*ParametrizedLinear, which cannot be pickled .RuntimeError",
    ),
    "spectral_norm": (
        lambda: policies.categorical(
            nn.Sequential(parametrizations.spectral_norm(nn.Linear(2, 2)))
        ),
        r"ParametrizedLinear, which cannot be pickled",
    ),
    "generator": (
        Drawing,
        r"attribute 'noise' is a generator, which cannot be pickled",
    ),
    "lock": (Locked, r"attribute 'lock' is a _thread.lock, which cannot be pickled"),
    "function": (
        function,
        r"closure variable 'lock' is a _thread.lock, which cannot be pickled",
    ),
}
SPACES: dict[str, Any] = {
    "observation_space": CountingEnv().observation_space,
    "action_space": CountingEnv().action_space,
}
OPTIONS: dict[str, Any] = {"num_envs": 2, "frames_per_batch": 8}
ENTRIES: dict[str, Callable[..., Any]] = {
    "MultiSyncCollector": lambda **policy: MultiSyncCollector(
        [counting()] * 2, **policy, **OPTIONS
    ),
    "threads": lambda **policy: MultiSyncCollector(
        [counting()] * 2, backend="threads", **policy, **OPTIONS
    ),
    "auto": lambda **policy: MultiSyncCollector(
        counting(), num_workers="auto", **policy, **OPTIONS
    ),
    "server": lambda **policy: MultiSyncCollector(
        [counting()] * 2, inference="server", **policy, **OPTIONS
    ),
    "MultiAsyncCollector": lambda **policy: MultiAsyncCollector(
        [counting()] * 2, **policy, **OPTIONS
    ),
    "AsyncCollector": lambda **policy: AsyncCollector(counting(), **policy, **OPTIONS),
    "DistributedCollector": lambda **policy: DistributedCollector(
        [counting()], launcher="mp", **policy, **OPTIONS
    ),
    "RPCCollector": lambda **policy: RPCCollector(
        [counting()], launcher="mp", **policy, **OPTIONS
    ),
    "serve": lambda **policy: muster.serve(**SPACES, **policy, frames_per_batch=8),
    "Evaluator": lambda **policy: Evaluator(
        counting(), num_workers=1, episodes=2, **policy
    ),
    "tune": lambda **policy: muster.tune(
        counting(), seconds=0.1, num_envs=2, frames_per_batch=8, **policy
    ),
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", POLICIES)
def test_the_error_names_the_part_and_the_option_that_helps(
    entry: str, name: str
) -> None:
    made, culprit = POLICIES[name]
    with pytest.raises(BadOption, match=f"^policy: .*{culprit}") as refused:
        ENTRIES[entry](policy=made())
    assert str(refused.value).endswith(REMEDY)


WORKS = {  # entry, and its policy; each policy and each entry once
    "MultiSyncCollector": "weight_norm",
    "threads": "lock",
    "auto": "generator",
    "server": "spectral_norm",
    "MultiAsyncCollector": "function",
    "AsyncCollector": "lock",
    "DistributedCollector": "generator",
    "RPCCollector": "weight_norm",
    "serve": "lock",
    "Evaluator": "spectral_norm",
    "tune": "function",
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_option_helps(entry: str) -> None:
    made = ENTRIES[entry](policy_factory=POLICIES[WORKS[entry]][0])
    if entry == "tune":
        assert made.best.rate
        return
    with made:
        if entry == "Evaluator":
            assert len(made.evaluate().records) == 2
        elif entry != "serve":
            assert made.next() is not None
            made.update_policy_weights_()
            assert made.next() is not None
        if entry not in ("Evaluator", "serve"):
            assert made.policy_version == 1


@pytest.mark.parametrize("name", [*POLICIES, "old weight_norm"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_weights_arrive_in_a_policy_that_a_function_makes(name: str) -> None:
    def old() -> Any:
        return policies.categorical(nn.utils.weight_norm(nn.Linear(2, 2)))

    make = old if name == "old weight_norm" else POLICIES[name][0]
    with MultiSyncCollector(
        [counting(9)], policy_factory=make, backend="threads", **OPTIONS
    ) as c:
        for action in (0, 1, 0):
            chosen = 100 * torch.eye(2)[action]
            modules = (
                [cell.cell_contents for cell in c.policy.__closure__]
                if name == "function"
                else [c.policy]
            )
            for tensor in (
                t for m in modules if isinstance(m, nn.Module) for t in m.parameters()
            ):
                tensor.data.copy_(
                    chosen if tensor.shape == (2,) else torch.full_like(tensor, 1e-9)
                )
            c.update_policy_weights_()
            assert c.rollout()["action"].unique().tolist() == [action]


def test_a_policy_that_only_deepcopy_refuses_needs_no_function() -> None:
    """``torch.nn.utils.weight_norm`` after its first call: it can be pickled."""
    with pytest.warns(FutureWarning):
        policy = policies.categorical(nn.utils.weight_norm(nn.Linear(2, 2)))
    policy(torch.ones(1, 2))
    with MultiSyncCollector([counting(9)], policy, backend="threads", **OPTIONS) as c:
        policy.net.bias.data.copy_(torch.tensor([-9.0, 9.0]))
        policy.net.weight_g.data.fill_(1e-9)
        c.update_policy_weights_(policy.net)
        assert c.next()["action"].unique().tolist() == [1]
    with Evaluator(counting(9), policy, episodes=2) as evaluator:
        assert evaluator.evaluate().mean > 0


# --- copies in this process -----------------------------------------------------------------------


def test_the_background_acts_with_a_policy_of_its_own() -> None:
    buffer = Extends()
    with Collector(counting(9), Locked(), replay_buffer=buffer, **OPTIONS) as c:
        c.next()
        with pytest.raises(
            BadOption, match="^policy: attribute 'lock' is a _thread.lock"
        ) as refused:
            c.start()
        assert str(refused.value).endswith(REMEDY)
        assert not c.is_running()
        c.next()
    with Collector(
        counting(9), policy_factory=Locked, replay_buffer=buffer, **OPTIONS
    ) as c:
        users = c.policy
        count = len(buffer.batches)
        c.start()
        assert c.policy is not users
        assert torch.equal(c.policy.net.weight, users.net.weight)
        users.net.weight.data.zero_()
        users.net.bias.data.copy_(torch.tensor([-9.0, 9.0]))
        c.update_policy_weights_()
        buffer.until_true(
            lambda: (
                len(buffer.batches) > count
                and bool((buffer.batches[-1]["action"] == 1).all())
            )
        )
        assert users.training
        c.async_shutdown()


def test_a_device_to_which_a_policy_cannot_be_copied() -> None:
    with pytest.raises(
        BadOption,
        match=r"policy_device='meta': the policy is on cpu, and cannot be copied.*policy.to\(",
    ):
        Collector(counting(9), Locked(), policy_device="meta", **OPTIONS)


# --- other arguments ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"create_env_kwargs": {"length": threading.Lock()}},
            r"^create_env_kwargs: item 0 -> item 'length' is a _thread.lock, which cannot be pickled. Make it inside a "
            r"function, and pass that function as create_env_fn.$",
        ),
        (
            {"on_step": lambda view, lock=threading.Lock(): None},  # noqa: B008
            r"^the options: .*'on_step' -> default of 'lock' is a _thread.lock, which cannot be pickled. Make it "
            r"inside the function when it is first called, or leave the option out.$",
        ),
    ],
    ids=["create_env_kwargs", "on_step"],
)
def test_remedies_for_other_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadOption, match=message):
        MultiSyncCollector([CountingEnv] * 2, None, **OPTIONS, **options)


def test_an_evaluator_takes_a_policy_or_a_function_that_makes_one() -> None:
    with pytest.raises(BadOption, match="policy_factory cannot be used with policy"):
        Evaluator(counting(), Locked(), policy_factory=Locked)
    with pytest.raises(BadOption, match="policy_factory cannot be used with policy"):
        muster.tune(counting(), Locked(), policy_factory=Locked, seconds=0.1)
    with pytest.raises(BadOption, match=f"^policy: attribute 'lock'.*{REMEDY}"):
        Evaluator(counting(), Locked())
    with Evaluator(counting(5), policy_factory=Locked, episodes=4) as evaluator:
        before = evaluator.evaluate(version=0)
        assert evaluator.evaluate(version=0).records == before.records
        right, wrong = Locked(), Locked()
        for policy, bias in ((right, [-9.0, 9.0]), (wrong, [9.0, -9.0])):
            policy.net.weight.data.zero_()
            policy.net.bias.data.copy_(torch.tensor(bias))
        assert evaluator.evaluate(right).version == 3
        assert evaluator.evaluate({"net": wrong.net}).version == 4
