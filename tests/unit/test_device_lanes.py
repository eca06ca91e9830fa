"""Rows on a device: the same data as on the host, and nothing in a step that waits for the device.

A slot in "device memory" on the CPU takes every path that one on a GPU takes. That nothing waits is
counted: an operation whose result Python must see (a number, a bool, how many entries are true)
would wait on a GPU.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from tensordict.nn import TensorDictModule
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from muster import policies
from muster.envs.torch_batch import TorchEnvs
from muster.keys import IS_INIT
from muster.memory.slots import Layout, Slot
from muster.memory.views import BatchView
from muster.policies.adapt import adapt, place
from muster.policies.random import random_policy
from muster.rng import GroupRng
from muster.rollout.columns import lane_columns
from muster.rollout.first_call import prime
from muster.rollout.group import Group
from muster.rollout.loop import rollout
from muster.rollout.options import RolloutOptions
from muster.rollout.request import RolloutRequest
from muster.rollout.running import Rollout
from muster.rollout.tally import Tally
from muster.testing import TorchCartPole
from muster.utils.devices import moved
from tests.fakes.waiting import Waits
from tests.tools import assert_same

B = 5
CUDA = pytest.param(
    "cuda:0",
    marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
)
ON = pytest.mark.parametrize("on", ["cpu", CUDA])


class Run:
    """One group, rollout after rollout, with rows on ``device``; None is the host."""

    def __init__(
        self,
        env: Any,
        policy: Any,
        T: int,
        device: str | None = None,
        exploration: str = "random",
        **options: Any,
    ) -> None:
        batch = TorchEnvs(env)
        rows_on = None if device is None else torch.device(device)
        batch.store_as(replace(batch.spec, device=rows_on))
        B = batch.spec.num_envs
        self.group = Group(
            batch,
            env_ids=np.arange(B),
            total_envs=B,
            rng=GroupRng(0, device=rows_on),
            options=RolloutOptions(**options),
        )
        self.group.reset(seeds=range(B))
        placed, on = place(policy, rows_on)
        self.policy = (
            random_policy(batch)
            if placed is None
            else adapt(placed, batch.spec, device=on, exploration_type=exploration)
        )
        prime(self.group, self.policy, 0)
        layout = Layout(
            T,
            B,
            lane_columns(
                self.group.env.spec, self.policy.columns(), self.group.options
            ),
            batch_shape=(B,),
        )
        self.slot = Slot(layout, "heap" if device is None else torch.device(device))
        self.view = BatchView(layout, stacked=False)

    def fill(self) -> None:
        lane = self.slot.lanes[0]
        lane.restart()
        rollout(self.group, self.policy, RolloutRequest(0, 0, 0, "policy"), lane)

    def batch(self) -> Any:
        self.fill()
        block = self.slot.block
        memory = (
            block.clone() if torch.is_tensor(block) else torch.from_numpy(block.copy())
        )
        return self.view.tensordict(memory, self.slot).to("cpu")

    def batches(self, n: int) -> Any:
        return torch.cat([self.batch() for _ in range(n)], 1)


def net(outputs: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, outputs))


def tilt(obs: torch.Tensor) -> torch.Tensor:
    return (obs[:, 2] > 0).long()


def with_extras(obs: torch.Tensor) -> Any:
    return tilt(obs), {"value": obs.sum(1, keepdim=True)}


def counting(obs: torch.Tensor, state: torch.Tensor | None) -> Any:
    state = torch.zeros_like(obs[:, :1]) if state is None else state
    return state[:, 0].long() % 2, state + 1


class Argmax(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return self.net(obs).argmax(-1)


class Remembering:
    """Counts steps in a recurrent state, and wants to know where episodes begin."""

    in_keys, out_keys = (
        ("observation", "count", "is_init"),
        ("action", ("next", "count")),
    )

    def __call__(self, tensordict: Any) -> Any:
        count = tensordict.get("count", torch.zeros(B))
        count = torch.where(tensordict["is_init"][..., 0], 0.0, count)
        return tensordict.set("action", count.long() % 2).set(
            ("next", "count"), count + 1
        )


def td_module() -> Any:
    return TensorDictModule(Argmax(), in_keys=["observation"], out_keys=["action"])


POLICIES: dict[str, Any] = {
    "random": lambda: None,
    "function": lambda: tilt,
    "extras": lambda: with_extras,
    "recurrent": lambda: counting,
    "module": Argmax,
    "tensordict": td_module,
    "head": lambda: policies.categorical(net()),
}
ALL = pytest.mark.parametrize("kind", POLICIES)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "limit": {"max_frames_per_traj": 7},
    "once": {"reset_when_done": False},
}


def run(
    kind: str,
    device: str | None,
    T: int = 40,
    mode: Any = AutoresetMode.SAME_STEP,
    **options: Any,
) -> Run:
    env = TorchCartPole(B, device or "cpu", autoreset=mode, max_steps=12)
    # Sampled actions come from torch's noise on a device, from NumPy's on the host; the most
    # probable are the same.
    return Run(env, POLICIES[kind](), T, device, exploration="mode", **options)


@ALL
@pytest.mark.parametrize("options", OPTIONS)
def test_rows_on_a_device_hold_what_rows_on_the_host_hold(kind, options):
    on_host, on_device = (
        run(kind, device, **OPTIONS[options]).batches(3) for device in (None, "cpu")
    )
    assert on_host["next", "done"].any()
    rounded = ("action_log_prob",)
    assert_same(on_host, on_device, ignore=rounded)
    if kind == "head":
        torch.testing.assert_close(on_host[rounded], on_device[rounded])


@pytest.mark.parametrize(
    "mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED], ids=str
)
@pytest.mark.parametrize("limit", [None, 7])
def test_rows_on_a_device_follow_from_each_other(mode, limit):
    whole, parts = (
        run("random", "cpu", T, mode, max_frames_per_traj=limit) for T in (60, 20)
    )
    batch = whole.batch()
    assert_same(batch, parts.batches(3))
    done = batch["next", "done"][..., 0]
    assert done.any()
    going_on = ~done[:, :-1]
    after, before = batch["next", "observation"][:, :-1], batch["observation"][:, 1:]
    assert torch.equal(after[going_on], before[going_on])
    assert (before[~going_on].abs() <= 0.05).all()
    if limit:
        assert torch.equal(
            batch["next", "truncated"] & ~batch["next", "terminated"],
            batch["next", "step_count"] == limit,
        )


# --- heads ----------------------------------------------------------------------------------------


def test_modules_hear_where_an_episode_begins():
    recurrent = Run(TorchCartPole(B, max_steps=12), Remembering(), 40, "cpu")
    recurrent.slot.lanes[0].tensors[IS_INIT][:] = (
        True  # what another rollout may have left there
    )
    batch = recurrent.batches(2)
    begins = torch.ones(B, 80, 1, dtype=torch.bool)
    begins[:, 1:] = batch["next", "done"][:, :-1]
    assert torch.equal(batch["is_init"], begins)


class Points:
    """B points that move by what the action says; for every kind of action."""

    def __init__(self, action_space: spaces.Space[Any], device: str = "cpu") -> None:
        self.num_envs, self.device = B, torch.device(device)
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.muster_exact = True
        self.single_action_space = action_space
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.actions: list[torch.Tensor] = []
        self.t = 0

    def _obs(self) -> torch.Tensor:
        return torch.linspace(-1, 1, 4 * B, device=self.device).reshape(B, 4) * (
            1 + self.t % 7
        )

    def reset(self, *, seed: Any = None) -> Any:
        self.t = 0
        return self._obs(), {}

    def step(self, action: torch.Tensor) -> Any:
        self.actions.append(action)
        self.t += 1
        never = torch.zeros(B, dtype=torch.bool, device=self.device)
        return (
            self._obs(),
            torch.zeros(B, device=self.device),
            never,
            never,
            {"final_obs": self._obs()},
        )


BOX = spaces.Box(np.array([-1, 0], np.float32), np.array([3, 0.5], np.float32))
HEADS: dict[str, Any] = {
    "one choice": (lambda: policies.categorical(net(3)), spaces.Discrete(3, start=-1)),
    "several choices": (
        lambda: policies.categorical(net(5)),
        spaces.MultiDiscrete([2, 3]),
    ),
    "yes or no": (lambda: policies.categorical(net(8)), spaces.MultiBinary((2, 2))),
    "gaussian": (lambda: policies.gaussian(net(2), log_std=-0.5), BOX),
    "gaussian by state": (lambda: policies.gaussian(net(4), log_std=None), BOX),
    "squashed": (lambda: policies.tanh_gaussian(net(4)), BOX),
    "epsilon": (
        lambda: policies.epsilon_greedy(net(3), 0.6),
        spaces.Discrete(3, start=-1),
    ),
}


@pytest.mark.parametrize("name", HEADS)
@ON
def test_actions_sampled_on_a_device_have_the_probability_that_the_head_says(name, on):
    make, space = HEADS[name]
    head = make().to(on)
    sampling = Run(Points(space, on), head, 400, on)
    batch = sampling.batch()
    with torch.no_grad():
        distribution = head.to("cpu").distribution(batch["observation"])
    torch.testing.assert_close(
        batch["action_log_prob"],
        distribution.log_prob(batch["action"]),
        atol=1e-4,
        rtol=1e-4,
    )
    # Log-probabilities of samples are on average the negative entropy.
    again = distribution.log_prob(distribution.sample())
    spread = float(again.std()) / np.sqrt(again.numel())
    assert (
        abs(float(batch["action_log_prob"].mean() - again.mean())) < 6 * spread + 1e-6
    )
    assert torch.equal(
        torch.stack(sampling.group.env.env.actions, 1).cpu(), batch["action"]
    )


@pytest.mark.parametrize("name", [*HEADS, "greedy", "identity"])
def test_the_most_probable_action_on_a_device_is_that_on_the_host(name):
    more = {
        "greedy": (
            lambda: policies.deterministic(net(3)),
            spaces.Discrete(3, start=-1),
        ),
        "identity": (lambda: policies.deterministic(net(2)), BOX),
    }
    make, space = {**HEADS, **more}[name]
    on_host, on_device = (
        Run(Points(space), make(), 20, device, "mode").batch()
        for device in (None, "cpu")
    )
    torch.testing.assert_close(on_device["action"], on_host["action"])
    if name not in more:
        torch.testing.assert_close(
            on_device["action_log_prob"],
            on_host["action_log_prob"],
            atol=1e-5,
            rtol=1e-5,
        )


def test_a_network_without_a_head_runs_on_a_device():
    on_host, on_device = (
        Run(Points(BOX), net(2), 20, device) for device in (None, "cpu")
    )
    torch.testing.assert_close(on_device.batch()["action"], on_host.batch()["action"])
    assert (on_host.policy.path, on_device.policy.path) == (
        "numpy executor",
        "torch executor",
    )


class MaskedPoints(Points):
    """At step t, point b may choose i where ``(i + b + t) % 3 < 2``; several variables one after
    another.
    """

    def __init__(self, action_space: Any, device: str = "cpu") -> None:
        super().__init__(action_space, device)
        nvec = [
            int(n)
            for n in getattr(action_space, "nvec", [getattr(action_space, "n", 0)])
        ]
        self.nvec, self.low = (
            nvec,
            int(getattr(action_space, "start", 0)) if len(nvec) == 1 else 0,
        )
        mask = spaces.MultiBinary(sum(nvec))
        self.single_observation_space = spaces.Dict(
            {"at": self.single_observation_space, "action_mask": mask}
        )

    def _obs(self) -> Any:
        places = torch.arange(sum(self.nvec)) + torch.arange(B)[:, None] + self.t
        return {
            "at": super()._obs(),
            "action_mask": (places % 3 < 2).to(torch.int8).to(self.device),
        }

    def step(self, action: torch.Tensor) -> Any:
        allowed = self._obs()["action_mask"].split(self.nvec, 1)
        for part, index in zip(
            allowed, (action - self.low).reshape(B, -1).unbind(1), strict=True
        ):
            assert part.gather(1, index[:, None]).all()
        return super().step(action)


class ResetByMask(MaskedPoints):
    """Muster tries out whether it respects masks of resets, with a step."""

    def __init__(self, action_space: Any) -> None:
        super().__init__(action_space)
        self.metadata, self.muster_exact = (
            {"autoreset_mode": AutoresetMode.DISABLED},
            False,
        )

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return super().reset(seed=seed) if options is None else (self._obs(), {})


class Unchecked(MaskedPoints):
    """Does not look at the actions, which would wait for the device."""

    step = Points.step


MASKED = {name: HEADS[name] for name in ("one choice", "several choices", "epsilon")}


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("name", MASKED)
def test_heads_choose_among_allowed_actions(name, device):
    make, space = MASKED[name]
    head = make()
    batch = Run(MaskedPoints(space), head, 400, device).batch()
    with torch.no_grad():
        distribution = head.distribution(batch.select("at", "action_mask"))
    torch.testing.assert_close(
        batch["action_log_prob"],
        distribution.log_prob(batch["action"]),
        atol=1e-4,
        rtol=1e-4,
    )
    again = distribution.log_prob(distribution.sample())
    spread = float(again.std()) / np.sqrt(again.numel())
    assert abs(float(batch["action_log_prob"].mean() - again.mean())) < 6 * spread


@pytest.mark.parametrize("name", MASKED)
def test_the_step_that_tries_out_a_reset_takes_an_allowed_action(name):
    trying = Run(ResetByMask(MASKED[name][1]), None, 5)
    trying.batch()
    assert len(trying.group.env.env.actions) == 6  # with the one that was tried out


@pytest.mark.parametrize("name", [*MASKED, "greedy"])
def test_the_most_probable_allowed_action_on_a_device_is_that_on_the_host(name):
    make, space = {
        **MASKED,
        "greedy": (
            lambda: policies.deterministic(net(3)),
            spaces.Discrete(3, start=-1),
        ),
    }[name]
    on_host, on_device = (
        Run(MaskedPoints(space), make(), 20, device, "mode").batch()
        for device in (None, "cpu")
    )
    torch.testing.assert_close(on_device["action"], on_host["action"])


@pytest.mark.parametrize("name", MASKED)
def test_random_allowed_actions_are_the_same_on_a_device_and_on_the_host(name):
    on_host, on_device = (
        Run(MaskedPoints(MASKED[name][1]), None, 50, device).batches(2)
        for device in (None, "cpu")
    )
    assert_same(on_host, on_device)
    counts = [
        column.unique(return_counts=True)[1]
        for column in on_host["action"].reshape(B * 100, -1).unbind(1)
    ]
    assert all(count.min() > 100 for count in counts)


# --- nothing waits --------------------------------------------------------------------------------


def test_a_head_follows_a_change_of_its_network():
    head = policies.deterministic(net(3))
    following = Run(Points(spaces.Discrete(3)), head, 4, "cpu")
    following.batch()
    head.net[2] = nn.Linear(16, 3, bias=True)
    nn.init.zeros_(head.net[2].weight)
    with torch.no_grad():
        head.net[2].bias.copy_(torch.tensor([0.0, 0.0, 9.0]))
    assert (following.batch()["action"] == 2).all()


def waits(make: Any, T: int) -> Counter[str]:
    running = make(T)
    running.fill()
    with Waits() as mode:
        running.fill()
    assert mode.calls > T  # it has been looking
    return mode.found


@ALL
@pytest.mark.parametrize("options", OPTIONS)
def test_no_step_waits_for_the_device(kind, options):
    make = partial(run, kind, "cpu", **OPTIONS[options])
    assert waits(make, 32) == waits(make, 8)


@pytest.mark.parametrize("name", HEADS)
def test_no_sample_waits_for_the_device(name):
    make, space = HEADS[name]
    assert waits(lambda T: Run(Points(space), make(), T, "cpu"), 32) == waits(
        lambda T: Run(Points(space), make(), T, "cpu"), 8
    )


@pytest.mark.parametrize(
    "policy", [lambda: None, MASKED["several choices"][0]], ids=["random", "head"]
)
def test_no_choice_among_allowed_actions_waits_for_the_device(policy):
    space = MASKED["several choices"][1]
    short, long = (
        waits(lambda T: Run(Unchecked(space), policy(), T, "cpu"), T) for T in (8, 32)
    )
    assert short == long


def test_resets_by_mask_do_not_wait_either():
    make = partial(run, "function", "cpu", mode=AutoresetMode.DISABLED)
    assert waits(make, 32) == waits(make, 8)


def looks(obs: torch.Tensor) -> torch.Tensor:
    return tilt(obs) if obs.sum() > 0 else 1 - tilt(obs)


def picks(obs: torch.Tensor) -> torch.Tensor:
    return tilt(obs[obs[:, 0] > -9])


def draws(obs: torch.Tensor) -> torch.Tensor:
    return torch.multinomial(obs[:, :2].abs(), 1)[:, 0]


@pytest.mark.parametrize("policy", [looks, picks, draws])
def test_waiting_would_be_seen(policy):
    many, few = (
        waits(lambda T: Run(TorchCartPole(B), policy, T, "cpu"), n) for n in (32, 8)
    )
    assert many.total() >= few.total() + 24


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@ALL
def test_cuda_itself_sees_nothing_that_waits_in_a_step(kind):
    running = run(kind, "cuda:0")
    running.fill()
    group, lane = running.group, running.slot.lanes[0]
    with group.contexts.usual:
        Rollout(group, RolloutRequest(0, 0, 0, "policy"), lane, Tally()).begin()
        act, step = running.policy.start(lane, group.rng), group.env.start(lane)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for t in range(lane.T):
                act(t)
                step(t)
        finally:
            torch.cuda.set_sync_debug_mode("default")


class SeesCopies(TorchDispatchMode):
    """Notes of each copy to a device whether the host goes on meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on: list[bool] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._to_copy.default:
            self.goes_on.append((kwargs or {}).get("non_blocking", False))
            return torch.zeros(3)
        return func(*args, **(kwargs or {}))


def test_the_host_waits_for_what_comes_into_its_memory():
    """Else a policy in host memory reads observations before they are there."""
    here = torch.zeros(3)
    there = torch.zeros(3, device="meta")
    with SeesCopies() as copies:
        moved(here, torch.device("meta"))
        moved(there, torch.device("cpu"))
    assert copies.goes_on == [True, False]
