"""What the errors of heads say to do: each remedy, followed to the letter, leads to a policy that
acts.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import nn

from muster import Collector, MultiSyncCollector, policies
from muster.errors import BadOption, BadPolicyOutput
from muster.memory.specs import OBJECT, ArraySpec
from muster.policies.checks import PolicySetting
from muster.policies.head_policy import HeadPolicy
from muster.rng import GroupRng
from muster.testing import SpaceEnv

OBS, ACTION = ("observation",), ("action",)
ZEROS = re.compile(r"log_std=torch\.zeros\((\d+)\)")


def integers(low: Any, high: Any) -> ArraySpec:
    return ArraySpec(np.shape(low), np.dtype(np.int64), np.array(low), np.array(high))


def box(n: int, high: float = 1.0) -> ArraySpec:
    return ArraySpec(
        (n,),
        np.dtype(np.float32),
        np.full(n, -high, np.float32),
        np.full(n, high, np.float32),
    )


SPACES = {
    "Discrete(2)": integers(0, 1),
    "Discrete(3, start=-1)": integers(-1, 1),
    "MultiDiscrete([2, 2])": integers([0, 0], [1, 1]),
    "Box(1)": box(1),
    "Box(2)": box(2),
    "Box(3)": box(3),
    "unbounded Box(2)": box(2, np.inf),
    "Box without bounds": ArraySpec((2,), np.dtype(np.float32)),
}
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "categorical": ("categorical", {}),
    "categorical, nvec": ("categorical", {"nvec": (3,)}),
    "gaussian": ("gaussian", {}),
    "gaussian by state": ("gaussian", {"log_std": None}),
    "gaussian, 1": ("gaussian", {"log_std": torch.zeros(1)}),
    "gaussian, 2": ("gaussian", {"log_std": torch.zeros(2)}),
    "gaussian, 5": ("gaussian", {"log_std": torch.zeros(5)}),
    "tanh_gaussian": ("tanh_gaussian", {}),
    "deterministic": ("deterministic", {}),
    "epsilon_greedy": ("epsilon_greedy", {}),
}


def act(head: str, keywords: dict[str, Any], outputs: int, spec: ArraySpec) -> None:
    """Make the head, fit it to the space, and let it act."""
    made = getattr(policies, head)(nn.Linear(4, outputs), **keywords)
    setting = PolicySetting(
        {OBS: ArraySpec((4,), np.dtype(np.float32))}, {ACTION: spec}, (5,)
    )
    HeadPolicy(made, setting).first({OBS: torch.randn(5, 4)}, GroupRng(0))


def remedies(
    text: str, head: str, keywords: dict[str, Any], outputs: int
) -> list[tuple[str, dict[str, Any], int]]:
    """All that a message says to do, as heads with keywords and numbers of outputs."""
    others = {
        name: value
        for name, value in keywords.items()
        if name not in ("log_std", "nvec")
    }
    found: list[tuple[str, dict[str, Any], int]] = []
    for name, width in re.findall(
        r"(\w+)\(net\), with (?:a network|one) that returns (\d+)", text
    ):
        found.append((name, {}, int(width)))
    for width in re.findall(
        r"Use gaussian\(net, log_std=None\), with a network that returns (\d+)", text
    ):
        found.append(("gaussian", {"log_std": None}, int(width)))
    if "Pass log_std=None if the network returns mean and log_std" in text:
        found.append((head, others | {"log_std": None}, outputs))
    for n, width in re.findall(
        r"log_std=torch\.zeros\((\d+)\) with a network that returns (\d+)", text
    ):
        found.append((head, others | {"log_std": torch.zeros(int(n))}, int(width)))
    for width in re.findall(r"log_std=None with one that returns (\d+)", text):
        found.append((head, others | {"log_std": None}, int(width)))
    for width in re.findall(r"(\d+) \(mean and log_std\) with log_std=None", text):
        found.append((head, others | {"log_std": None}, int(width)))
    for n in re.findall(
        r"Or pass log_std=torch\.zeros\((\d+)\) if it returns the mean only", text
    ):
        found.append((head, others | {"log_std": torch.zeros(int(n))}, outputs))
    for n in re.findall(
        r"If the network returns \d+ values? all the same, pass log_std=torch\.zeros\((\d+)\)",
        text,
    ):
        found.append((head, others | {"log_std": torch.zeros(int(n))}, int(n)))
    for width in re.findall(r"Leave nvec out, and let the network return (\d+)", text):
        found.append((head, others, int(width)))
    for width in re.findall(r"[Cc]hange the last layer to return (\d+)", text):
        found.append((head, keywords, int(width)))
    return found


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("head", HEADS)
def test_every_remedy_of_every_error_leads_to_a_policy_that_acts(
    head: str, space: str
) -> None:
    name, keywords = HEADS[head]
    for outputs in range(1, 8):
        try:
            act(name, keywords, outputs, SPACES[space])
        except (BadOption, BadPolicyOutput) as error:
            text = str(error)
        else:
            continue
        named = remedies(text, name, keywords, outputs)
        assert named, f"no remedy in: {text}"
        mentioned = set(ZEROS.findall(text))
        assert mentioned <= {
            str(len(k["log_std"])) for _, k, _ in named if k.get("log_std") is not None
        }
        for other, given, width in named:
            try:
                act(other, given, width, SPACES[space])
            except (BadOption, BadPolicyOutput) as again:
                pytest.fail(
                    f"{text}\n  {other}(net with {width} outputs, {given}) is refused: {again}"
                )


def collect(policy: Any, space: gymnasium.Space[Any], **options: Any) -> Any:
    env = partial(SpaceEnv, gymnasium.spaces.Box(-1.0, 1.0, (4,)), space)
    with Collector(env, policy, num_envs=2, frames_per_batch=8, seed=0, **options) as c:
        return c.next()


def test_a_deterministic_head_for_several_choices() -> None:
    space = gymnasium.spaces.MultiDiscrete([2, 3])
    with pytest.raises(
        BadOption,
        match="Use categorical.net., with a network that returns 5 values and explor",
    ) as refused:
        collect(policies.deterministic(nn.Linear(4, 5)), space)
    (how,) = re.findall(r"exploration_type='(\w+)'", str(refused.value))
    actor = policies.categorical(nn.Linear(4, 5))
    batch = collect(actor, space, exploration_type=how)
    assert torch.equal(batch["action"], actor.mode(batch["observation"]))


def test_a_space_of_several_parts() -> None:
    space = gymnasium.spaces.Dict(
        {"gas": gymnasium.spaces.Box(0, 1, (1,)), "gear": gymnasium.spaces.Discrete(3)}
    )
    with pytest.raises(
        BadOption,
        match=r"parts: \['action.gas', 'action.gear'\]. Use a function or a TensorDict",
    ):
        collect(policies.categorical(nn.Linear(4, 3)), space)
    net = nn.Linear(4, 4)

    def drive(obs: torch.Tensor) -> dict[str, torch.Tensor]:
        out = net(obs)
        return {"gas": out[..., :1].sigmoid(), "gear": out[..., 1:].argmax(-1)}

    assert collect(drive, space)["action", "gear"].shape == (2, 4)


@pytest.mark.parametrize(
    "name",
    ["categorical", "gaussian", "tanh_gaussian", "deterministic", "epsilon_greedy"],
)
def test_objects_and_unbounded_integers_have_no_head(name: str) -> None:
    head = getattr(policies, name)
    for spec, what in (
        (ArraySpec((), OBJECT), "Use a function that returns actions"),
        (
            ArraySpec((), np.dtype(np.int64)),
            "Use an environment whose actions have bounds",
        ),
    ):
        with pytest.raises(BadOption, match=what):
            act(name, {}, 2, spec)
    with pytest.raises(
        BadOption, match=f"{name}: the network is the class Linear. Pass an nn.Module"
    ):
        head(nn.Linear)
    with pytest.raises(
        BadOption, match=f"{name}: the network is of type int. Pass an nn.Module"
    ):
        head(3)


@pytest.mark.parametrize(
    "wrong", [[0.0], np.zeros(1), "0"], ids=["list", "array", "text"]
)
def test_log_std_of_another_type(wrong: Any) -> None:
    with pytest.raises(
        BadOption,
        match=r"log_std is \w+, expected a number, a tensor, or None.*torch.as_tensor",
    ):
        policies.gaussian(nn.Linear(4, 1), log_std=wrong)


def test_a_head_may_use_a_function_as_its_network() -> None:
    """Functions have no layers to look at: the number of actions has to be said."""
    net = nn.Linear(4, 2)
    space = gymnasium.spaces.Box(-1.0, 1.0, (2,))
    with pytest.raises(
        BadOption,
        match=r"cannot see from function how many actions it returns. For n actions pass",
    ):
        policies.gaussian(lambda obs: net(obs))
    for head in (
        policies.gaussian(lambda obs: net(obs), log_std=torch.zeros(2)),
        policies.gaussian(net),
    ):
        assert collect(head, space)["action"].shape == (2, 4, 2)
    assert policies.gaussian(lambda obs: net(obs), log_std=torch.zeros(2)).mode(
        torch.ones(3, 4)
    ).shape == (3, 2)


def test_programs_of_a_newcomer() -> None:
    """One network for mean and log_std, on an environment with one action."""
    space = gymnasium.spaces.Box(-2.0, 2.0, (1,))
    for keywords in ({}, {"log_std": torch.zeros(1)}):
        with pytest.raises(
            (BadOption, BadPolicyOutput),
            match="Pass log_std=None if the network returns mean and log_std",
        ):
            collect(policies.gaussian(nn.Linear(4, 2), **keywords), space)
    assert collect(policies.gaussian(nn.Linear(4, 2), log_std=None), space)[
        "action"
    ].shape == (
        2,
        4,
        1,
    )


def test_the_users_head_with_a_function_is_fitted_where_workers_act() -> None:
    net = nn.Linear(4, 5)
    env = partial(
        SpaceEnv,
        gymnasium.spaces.Box(-1.0, 1.0, (4,)),
        gymnasium.spaces.MultiDiscrete([2, 3]),
    )
    head = policies.categorical(lambda obs: net(obs))
    with MultiSyncCollector(
        [env], head, num_envs=2, frames_per_batch=8, backend="threads"
    ) as c:
        batch = c.next()
        log_prob = head.distribution(batch["observation"]).log_prob(batch["action"])
        torch.testing.assert_close(log_prob, batch["action_log_prob"])
        nn.init.zeros_(net.weight)
        net.bias.data.copy_(torch.tensor([99.0, 0.0, 0.0, 99.0, 0.0]))
        c.update_policy_weights_(net)
        assert c.rollout()["action"].reshape(-1, 2).unique(dim=0).tolist() == [[0, 1]]
