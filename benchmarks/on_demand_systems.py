"""``Collector.collect`` in its forms, and the peers: what there is to measure.

Importing this makes it known.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import muster
from benchmarks.nets import PlainPolicy, trunk
from benchmarks.on_demand_cases import Case
from benchmarks.systems import SYSTEMS
from benchmarks.systems.bare import BareWithPolicy
from benchmarks.systems.muster_ import head_for
from benchmarks.workers_systems import Crewed
from muster.observing.loggers import JsonlLogger

EPSILON = 0.1


class EpsilonGreedy(nn.Module):
    """What DQN collects with."""

    def __init__(self, env: Any) -> None:
        super().__init__()
        self.net = trunk(env)

    def forward(self, obs: Tensor) -> Tensor:
        best: Tensor = self.net(obs).argmax(-1)
        return torch.where(
            torch.rand(best.shape) < EPSILON, torch.randint(2, best.shape), best
        )


class LimitGreedy(BareWithPolicy):
    """The bare loop with ``EpsilonGreedy``."""

    def policy(self) -> Callable[[], Any]:
        module, obs = EpsilonGreedy(self.envs[0]), torch.from_numpy(self.obs)
        return lambda: module(obs).tolist()


class ActorCritic(PlainPolicy):
    """An actor and a critic of the same size, as PPO has."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.critic = trunk(env)
        self.critic[-1] = nn.Linear(64, 1)

    def forward(self, obs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        action, extras = super().forward(obs)
        return action, {**extras, "state_value": self.critic(obs)}


POLICIES = {
    "heads": head_for,
    "plain": PlainPolicy,
    "greedy": EpsilonGreedy,
    "critic": ActorCritic,
}


class Collect:
    """A call of ``collect`` per rollout.

    Args:
        arguments: of ``collect``.
        hook: option of the collector that gets a function which does nothing.
        jsonl: log to a file that swallows it.
    """

    def __init__(
        self,
        case: Case,
        policy: str = "heads",
        *,
        hook: str = "",
        jsonl: bool = False,
        **arguments: Any,
    ) -> None:
        options: dict[str, Any] = {hook: _nothing} if hook else {}
        if jsonl:
            options["logger"] = JsonlLogger(os.devnull)
        module, envs = POLICIES[policy](case.make()), None if case.B == 1 else case.B
        self.collector: Any = muster.Collector(
            case.make, module, num_envs=envs, seed=0, **options
        )
        self.asked = case.asked | arguments

    def rollout(self) -> int:
        return int(self.collector.collect(**self.asked).n_collected_steps)

    def close(self) -> None:
        self.collector.shutdown()


def _nothing(*_: Any) -> None: ...


def _here(name: str, label: str, **options: Any) -> Crewed:
    needs = ("torch", "gymnasium", "tensordict")
    return Crewed(
        f"on_demand_systems:{name}",
        label,
        needs,
        home="muster",
        children=False,
        options=options,
    )


def _collect(label: str, policy: str = "heads", **arguments: Any) -> Crewed:
    return _here("Collect", label, policy=policy, **arguments)


def _peer(name: str, label: str, needs: str, **options: Any) -> Crewed:
    """Peer and compat layer share a process, and with it the memory, in which one of them could be
    luckier.
    """
    modules = (needs, "tensordict") if name != "sb3" else (needs,)
    return Crewed(
        f"on_demand_peers:{name}",
        label,
        modules,
        home=needs,
        children=False,
        options=options,
    )


def _tianshou(kind: str) -> dict[str, Crewed]:
    return {
        f"limit-tianshou-{kind}": _peer(
            "tianshou_limit", f"bare loop + Tianshou's {kind}", "tianshou", kind=kind
        ),
        f"tianshou-{kind}": _peer(
            "tianshou", f"Tianshou, {kind}", "tianshou", kind=kind
        ),
        f"tianshou-compat-{kind}": _peer(
            "tianshou",
            f"Muster's compat layer, {kind}",
            "tianshou",
            kind=kind,
            compat=True,
        ),
    }


def _prt(kind: str) -> dict[str, Crewed]:
    return {
        f"limit-prt-{kind}": _peer(
            "prt_limit", f"bare loop + prt_rl policy, {kind}", "prt_rl", kind=kind
        ),
        f"prt-{kind}": _peer("prt", f"prt_rl, {kind}", "prt_rl", kind=kind),
        f"prt-compat-{kind}": _peer(
            "prt", f"Muster's compat layer, {kind}", "prt_rl", kind=kind, compat=True
        ),
    }


SYSTEMS.update(
    {
        **_tianshou("actor"),
        **_tianshou("dqn"),
        **_prt("sampled"),
        **_prt("greedy"),
        "prt-compat-heads": _peer(
            "prt",
            "Muster's prt_rl compat layer, heads",
            "prt_rl",
            kind="heads",
            compat=True,
        ),
        "sb3-critic": _peer("sb3", "Stable-Baselines3 PPO", "stable_baselines3"),
        "limit-greedy": _here("LimitGreedy", "bare loop + epsilon-greedy"),
        "collect-heads": _collect("Muster collect, heads"),
        "collect-plain": _collect("Muster collect, plain module", "plain"),
        "collect-greedy": _collect("Muster collect, epsilon-greedy", "greedy"),
        "collect-critic": _collect(
            "Muster collect, actor and critic, bootstrap", "critic", bootstrap=True
        ),
        "collect-critic-alone": _collect("... actor and critic", "critic"),
        "collect-critic-truncations": _collect(
            "... bootstrap='truncations'", "critic", bootstrap="truncations"
        ),
        "collect-on-step": _collect("... on_step", hook="on_step"),
        "collect-on-episode": _collect("... on_episode_done", hook="on_episode_done"),
        "collect-logger": _collect("... logger that does nothing", hook="logger"),
        "collect-jsonl": _collect("... JsonlLogger", jsonl=True),
        "collect-fair": _collect("Muster collect, heads, fair", rule="fair"),
        "collect-last-even": _collect(
            "Muster collect, heads, last_even", rule="last_even"
        ),
        "collect-per-env": _collect("Muster collect, heads, per_env", rule="per_env"),
        "collect-first-done": _collect(
            "Muster collect, heads, first_done", rule="first_done"
        ),
        "collect-kept": _collect(
            "Muster collect, heads, fair, surplus kept", rule="fair", surplus="keep"
        ),
        "collect-even-plain": _collect(
            "Muster collect, plain module, last_even", "plain", rule="last_even"
        ),
    }
)
