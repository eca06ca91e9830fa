"""What ``collect`` is measured on: so many steps or episodes per call."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.envs import BUSY
from benchmarks.workloads import WORKLOADS, Workload


@dataclass(frozen=True)
class Case(Workload):
    """A workload, of which every call collects ``T`` steps of each environment, or ``episodes``
    whole episodes.

    Args:
        systems: names in ``on_demand_systems``.
    """

    systems: tuple[str, ...] = ()
    episodes: int = 0

    @property
    def asked(self) -> dict[str, int]:
        """The arguments of a call."""
        return (
            {"n_episode": self.episodes} if self.episodes else {"n_step": self.frames}
        )


BARE = ("bare", "limit-plain", "limit-heads", "limit-greedy")
TIANSHOU = ("limit-tianshou-actor", "tianshou-actor", "tianshou-compat-actor")
DQN = ("limit-tianshou-dqn", "tianshou-dqn", "tianshou-compat-dqn")
PRT = ("limit-prt-sampled", "prt-sampled", "prt-compat-sampled", "prt-compat-heads")
PRT_GREEDY = ("limit-prt-greedy", "prt-greedy", "prt-compat-greedy")
NATIVE = ("collect-heads", "collect-plain", "collect-greedy", "collect-critic")
ITERATED = ("muster-heads", "muster-plain")
STEPS = (*BARE, *TIANSHOU, *DQN, *PRT, *PRT_GREEDY, "sb3-critic", *NATIVE, *ITERATED)
EPISODES = (
    *(
        "tianshou-actor",
        "tianshou-compat-actor",
        "prt-sampled",
        "prt-compat-sampled",
        "prt-compat-heads",
    ),
    *(
        f"collect-{rule}"
        for rule in ("fair", "last-even", "per-env", "first-done", "kept", "even-plain")
    ),
)
COSTS = (
    *(
        "muster-heads",
        "collect-heads",
        "collect-on-step",
        "collect-on-episode",
        "collect-logger",
        "collect-jsonl",
    ),
    *("collect-critic-alone", "collect-critic", "collect-critic-truncations"),
)
CRITICS = ("sb3-critic", "collect-critic")
CALLS = (
    "tianshou-actor",
    "tianshou-compat-actor",
    "prt-sampled",
    "prt-compat-sampled",
    *CRITICS,
    *NATIVE[:-1],
)


def _steps(envs: int) -> Case:
    return Case(
        f"steps-{envs}",
        "CartPole-v1",
        envs,
        100,
        f"{envs} x CartPole, n_step = 100 of each",
        STEPS,
    )


CASES = {
    case.name: case
    for case in (
        *map(_steps, (1, 8, 32)),
        Case(
            "episodes-8",
            "CartPole-v1",
            8,
            0,
            "8 x CartPole, n_episode = 32",
            EPISODES,
            32,
        ),
        Case(
            "costs-8",
            "CartPole-v1",
            8,
            100,
            "8 x CartPole, n_step = 100 of each",
            COSTS,
        ),
        Case(
            "a2c-8",
            "CartPole-v1",
            8,
            5,
            "8 x CartPole, n_step = 5 of each",
            (*CRITICS, "collect-critic-alone"),
        ),
        Case(
            "call-1",
            "CartPole-v1",
            1,
            1,
            "one CartPole, n_step = 1",
            (*CALLS, *ITERATED),
        ),
        Case(
            "call-8",
            "CartPole-v1",
            8,
            1,
            "8 x CartPole, n_step = 1 of each",
            (*CALLS, *ITERATED),
        ),
        Case(
            "busy-8",
            BUSY,
            8,
            20,
            "8 envs whose step costs 200 us of CPU time, n_step = 20 of each",
            (*BARE, *CALLS),
        ),
    )
}
WORKLOADS.update(CASES)
