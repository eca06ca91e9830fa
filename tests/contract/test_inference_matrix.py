"""Where the policy acts, when environments are reset, who waits for whom, what the policy remembers
and chooses.

All combinations, each compared with a plain loop over environments and steps
(``tests/fakes/matrix_*``).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict.nn import TensorDictModule
from torch import nn

from muster import (
    AsyncCollector,
    CentralInference,
    Collector,
    MultiAsyncCollector,
    MultiSyncCollector,
    policies,
)
from muster.errors import PolicyError
from tests.fakes.matrix_env import (
    ACTION_KINDS,
    LENGTH,
    NUMBERS,
    ActionKind,
    MatrixEnv,
    Numbered,
    NumberEnv,
)
from tests.fakes.matrix_policies import (
    BIAS,
    STATE_KINDS,
    StateKind,
    Unsure,
    choose,
    policy_of,
)
from tests.fakes.matrix_reference import ID, OneEnv, Told
from tests.tools import assert_accounted

G, B, T = 3, 2, 5  # groups, environments of each, and rows of a batch
BATCHES = 4
STATES = [*STATE_KINDS, "tensordict"]
VERSION = ("collector", "policy_version")
INFERENCE = {
    "worker": {},
    "server": {"inference": "server"},
    "alternating": {"inference": CentralInference(alternating=True)},
}

SCHEDULES = {"sync": MultiSyncCollector, "first-ready": MultiAsyncCollector}


@dataclass(frozen=True)
class Cell:
    inference: str
    wait: bool
    schedule: str
    state: StateKind
    kind: ActionKind

    @property
    def in_processes(self) -> bool:
        """One cell of every inference, resets and schedule is; over all of them with every state
        and action.
        """
        place = (
            list(INFERENCE).index(self.inference) * 4
            + self.wait * 2
            + (self.schedule == "sync")
        )
        return (STATE_KINDS.index(self.state), ACTION_KINDS.index(self.kind)) == (
            place % 4,
            (place + place // 4) % 4,
        )

    def __str__(self) -> str:
        where = "processes" if self.in_processes else "threads"
        resets = "wait" if self.wait else "immediate"
        return f"{self.inference}-{resets}-{self.schedule}-{self.state}-{self.kind}-{where}"


CELLS = [
    Cell(*choices)
    for choices in itertools.product(
        INFERENCE, (False, True), SCHEDULES, STATE_KINDS, ACTION_KINDS
    )
]


def make(cls: Any, told: Told, policy: Any, groups: int = G, **options: Any) -> Any:
    """A collector whose environments have episodes of 2, 3, 4, ... steps."""
    num_envs = told.envs // groups
    factories = [
        Numbered(2 + num_envs * group, num_envs, told.kind, told.life)
        for group in range(groups)
    ]
    rows = num_envs if cls is MultiAsyncCollector else told.envs
    lives = {"traj_done_key": "traj_done"} if told.life else {}
    previous = {"prev_action_reward": True} if told.prev else {}
    common = {
        "num_envs": num_envs,
        "frames_per_batch": rows * told.T,
        "reset_when_done": not told.wait,
        "seed": 0,
    }
    return cls(factories, policy, **{**common, **lives, **previous, **options})


class Expected:
    """The reference's batches of groups of environments."""

    def __init__(
        self,
        told: Told,
        groups: int = G,
        *,
        numbers: Sequence[int] = (),
        biases: list[int] | None = None,
        batched: bool = True,
    ) -> None:
        self.envs = [
            OneEnv(told, number, 2 + number, biases or [])
            for number in numbers or range(told.envs)
        ]
        self.batched, self.groups, self.size = batched, groups, len(self.envs) // groups
        self._batches = [env.batches() for env in self.envs]

    def of_group(self, group: int) -> dict[tuple[str, ...], Any]:
        """Its next batch, ``[B, T, ...]`` per column; ``[T, ...]`` unbatched."""
        rows = [next(env) for env in self._batches[group * self.size :][: self.size]]
        return (
            {key: np.stack([row[key] for row in rows]) for key in rows[0]}
            if self.batched
            else rows[0]
        )

    def together(self) -> dict[tuple[str, ...], Any]:
        """Of all groups, ``[groups, ...]``."""
        parts = [self.of_group(group) for group in range(self.groups)]
        return {key: np.stack([part[key] for part in parts]) for key in parts[0]}


def assert_equal(batch: Any, expected: dict[tuple[str, ...], Any], where: str) -> None:
    """The same columns with the same values; flags and rewards have a dimension more."""
    columns = {
        key if isinstance(key, tuple) else (key,): value.numpy()
        for key, value in batch.items(True, True)
    }
    assert columns.keys() == expected.keys(), where
    for key, value in expected.items():
        got = (
            columns[key].reshape(value.shape)
            if columns[key].shape == (*value.shape, 1)
            else columns[key]
        )
        assert np.array_equal(got, value), f"{where}: {key} is\n{got}\nand not\n{value}"


def check(c: Any, expected: Expected, batches: Iterable[Any] = ()) -> None:
    """Some batches of every group are as expected, and every step is accounted for.

    Args:
        batches: of the collector; by default it is iterated over.
    """
    found: dict[int, int] = defaultdict(int)
    for number, batch in enumerate(batches or c):
        if isinstance(c, MultiAsyncCollector):
            group = int(batch[ID].max()) % len(expected.envs) // expected.size
            assert_equal(
                batch,
                expected.of_group(group),
                f"batch {found[group]} of group {group}",
            )
            found[group] += 1
        else:
            assert_equal(batch, expected.together(), f"batch {number}")
            found = defaultdict(int, dict.fromkeys(range(expected.groups), number + 1))
        if len(found) == expected.groups and min(found.values()) >= BATCHES:
            break
    assert_accounted(c)


def told_of(state: StateKind, kind: ActionKind, **told: Any) -> Told:
    """Modules have a weight."""
    bias = BIAS if state in ("none", "tensor", "tensordict") else 0
    return Told(kind, state, **{"T": T, "envs": G * B, "bias": bias, **told})


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_every_batch_is_what_a_plain_loop_gives(cell):
    told = told_of(cell.state, cell.kind, wait=cell.wait)
    backend = "processes" if cell.in_processes else "threads"
    with make(
        SCHEDULES[cell.schedule],
        told,
        policy_of(cell.state, cell.kind),
        backend=backend,
        **INFERENCE[cell.inference],
    ) as c:
        check(c, Expected(told))


@pytest.mark.parametrize("kind", ACTION_KINDS)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("wait", [False, True], ids=["immediate", "wait"])
def test_so_is_every_batch_of_a_collector_without_workers(wait, state, kind):
    told = told_of(state, kind, wait=wait)
    with make(Collector, told, policy_of(state, kind)) as c:
        check(c, Expected(told))


@pytest.mark.parametrize("kind", ["discrete", "dict"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("wait", [False, True], ids=["immediate", "wait"])
@pytest.mark.parametrize("inference", INFERENCE)
def test_recurrent_policies_on_tensordicts_know_where_episodes_begin(
    inference, wait, schedule, kind
):
    told = told_of("tensordict", kind, wait=wait)
    policy = policy_of("tensordict", kind)
    with make(
        SCHEDULES[schedule], told, policy, backend="threads", **INFERENCE[inference]
    ) as c:
        check(c, Expected(told))


@pytest.mark.parametrize(
    "options",
    [
        {"inference": CentralInference(max_batch=2)},
        {"inference": CentralInference(max_batch=3), "num_workers": 2},
        {"inference": CentralInference(max_batch=1)},
        {"inference": CentralInference(max_wait_s=0.0)},
        {"inference": CentralInference(max_batch=4, max_wait_s=0.001)},
        {"num_workers": 2, "inference": CentralInference(alternating=True)},
        {"num_workers": 1},
        {
            "num_workers": 1,
            "inference": CentralInference(alternating=True, max_batch=1),
        },
    ],
    ids=lambda options: "-".join(f"{name}={value}" for name, value in options.items()),
)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("wait", [False, True], ids=["immediate", "wait"])
def test_who_is_acted_for_together_changes_no_data(wait, schedule, options):
    told = told_of("dict", "dict", wait=wait)
    policy = policy_of("dict", "dict")
    with make(
        SCHEDULES[schedule],
        told,
        policy,
        **({"backend": "threads", "inference": "server"} | options),
    ) as c:
        check(c, Expected(told))


@pytest.mark.parametrize("state", STATE_KINDS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("inference", INFERENCE)
def test_single_environments_without_a_batch_dimension(inference, schedule, state):
    told = told_of(state, "n-d", envs=G)
    options = {"num_envs": None, "backend": "threads", **INFERENCE[inference]}
    with make(SCHEDULES[schedule], told, policy_of(state, "n-d"), **options) as c:
        check(c, Expected(told, batched=False))


@pytest.mark.parametrize("inference", ["worker", "server"])
@pytest.mark.parametrize("state", STATES)
def test_one_worker_that_collects_while_the_user_trains(state, inference):
    told = told_of(state, "1-d", envs=B)
    with make(
        AsyncCollector,
        told,
        policy_of(state, "1-d"),
        1,
        backend="threads",
        inference=inference,
    ) as c:
        check(c, Expected(told, 1))


@pytest.mark.parametrize(
    ("schedule", "state", "kind"),
    [
        ("sync", "none", "discrete"),
        ("sync", "dict", "dict"),
        ("sync", "tensordict", "dict"),
        ("first-ready", "array", "1-d"),
        ("first-ready", "tensor", "n-d"),
    ],
)
@pytest.mark.parametrize("wait", [False, True], ids=["immediate", "wait"])
@pytest.mark.parametrize("inference", INFERENCE)
def test_policies_see_the_action_and_the_reward_before(
    inference, wait, schedule, state, kind
):
    told = told_of(state, kind, wait=wait, prev=True)
    policy = policy_of(state, kind, prev=True)
    with make(
        SCHEDULES[schedule], told, policy, backend="threads", **INFERENCE[inference]
    ) as c:
        check(c, Expected(told))


@pytest.mark.parametrize(
    ("state", "prev"),
    [("none", True), ("array", False), ("dict", True), ("tensordict", True)],
)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("wait", [False, True], ids=["immediate", "wait"])
@pytest.mark.parametrize("inference", INFERENCE)
def test_an_agent_that_loses_a_life_forgets_and_its_environment_goes_on(
    inference, wait, schedule, state, prev
):
    told = told_of(state, "dict", wait=wait, life=2, prev=prev)
    policy = policy_of(state, "dict", prev=prev)
    with make(
        SCHEDULES[schedule], told, policy, backend="threads", **INFERENCE[inference]
    ) as c:
        check(c, Expected(told))


@pytest.mark.parametrize("wait", [False, True], ids=["immediate", "wait"])
@pytest.mark.parametrize("inference", INFERENCE)
def test_lives_and_what_was_before_in_worker_processes(inference, wait):
    told = told_of("dict", "n-d", wait=wait, life=3, prev=True)
    with make(
        MultiSyncCollector,
        told,
        policy_of("dict", "n-d", prev=True),
        **INFERENCE[inference],
    ) as c:
        check(c, Expected(told))


@pytest.mark.parametrize("state", ["none", "tensor", "tensordict"])
@pytest.mark.parametrize("inference", INFERENCE)
def test_a_batch_is_acted_on_with_the_weights_that_were_published_before_it(
    inference, state
):
    """``MultiSyncCollector``: all of it, from its first row on."""
    told = told_of(state, "1-d")
    biases = [BIAS, 7, 7, 60, 3]
    expected = Expected(told, biases=biases)
    policy = policy_of(state, "1-d")
    options = {
        "backend": "threads",
        "track_policy_version": True,
        **INFERENCE[inference],
    }
    with make(MultiSyncCollector, told, policy, **options) as c:
        for number, bias in enumerate(biases):
            if bias != policy.weight:
                c.update_policy_weights_({"weight": torch.tensor(float(bias))})
                with torch.no_grad():
                    policy.weight.fill_(bias)
            batch = c.rollout()
            assert (batch.pop(VERSION) == (0, 1, 1, 2, 3)[number]).all()
            assert_equal(batch, expected.together(), f"batch {number}")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"inference": CentralInference(max_batch=2)},
        {"inference": CentralInference(alternating=True)},
    ],
    ids=str,
)
def test_every_row_says_with_which_weights_it_was_acted_on(options):
    """``MultiAsyncCollector``: the server takes new weights when any worker begins a rollout."""
    told = told_of("tensor", "discrete")
    policy = policy_of("tensor", "discrete")
    common = {"backend": "threads", "inference": "server", "track_policy_version": True}
    with make(MultiAsyncCollector, told, policy, **(common | options)) as c:
        biases = [BIAS]
        for _, batch in zip(range(60), c, strict=False):
            obs = [part.numpy() for part in batch["observation"].long().unbind(-1)]
            count, hidden = (
                part.numpy() for part in batch["recurrent_state"].long().unbind(-1)
            )
            bias = np.array(biases)[batch[VERSION].numpy()]
            assert np.array_equal(
                batch["choice"].numpy(), choose(np, obs, count, hidden, bias)
            )
            biases.append((biases[-1] * 31 + 11) % 97)
            c.update_policy_weights_({"weight": torch.tensor(float(biases[-1]))})
            assert (batch[VERSION].diff() >= 0).all()
        assert batch[VERSION].max() > 20


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("inference", INFERENCE)
def test_an_error_of_the_policy_loses_no_step(inference, schedule):
    told = told_of("tensor", "n-d")
    policy = Unsure(policy_of("tensor", "n-d"), 13)
    with make(
        SCHEDULES[schedule], told, policy, backend="threads", **INFERENCE[inference]
    ) as c:
        errors: list[PolicyError] = []
        check(c, Expected(told), batches=survived(c, errors))
    assert 1 <= len(errors) <= G
    assert all("not sure" in str(error) for error in errors)


def survived(c: Any, errors: list[PolicyError]) -> Iterator[Any]:
    """Batches without an end, whatever the policy raises."""
    while True:
        try:
            yield c.rollout()
        except PolicyError as error:
            errors.append(error)


@pytest.mark.parametrize(
    "mode",
    [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED],
    ids=lambda mode: mode.name,
)
@pytest.mark.parametrize("inference", INFERENCE)
def test_groups_of_different_sizes_fill_batches_of_their_own(inference, mode):
    sizes = (1, 2, 3)
    factories, expected = [], []
    for first, size in zip((0, 1, 3), sizes, strict=True):
        factories.append(partial(vector_env, 2 + first, size, mode))
        told = told_of("dict", "n-d", T=12 // size, envs=6)
        expected.append(Expected(told, 1, numbers=range(first, first + size)))
    options = {"backend": "threads", "frames_per_batch": 12, **INFERENCE[inference]}
    with MultiAsyncCollector(factories, policy_of("dict", "n-d"), **options) as c:
        found = [0, 0, 0]
        for batch in c:
            group = sizes.index(len(batch))
            assert_equal(
                batch,
                expected[group].of_group(0),
                f"batch {found[group]} of group {group}",
            )
            found[group] += 1
            if min(found) == BATCHES:
                break
        assert_accounted(c)


def vector_env(first: int, size: int, mode: AutoresetMode) -> SyncVectorEnv:
    """Environments with episodes of ``first`` steps and more."""
    return SyncVectorEnv(
        [partial(MatrixEnv, first + i, "n-d") for i in range(size)], autoreset_mode=mode
    )


class Next(nn.Module):
    """The time step plus one, from a number of any shape; as logits for ``categorical``."""

    def __init__(self, shape: tuple[int, ...], *, logits: bool = False) -> None:
        super().__init__()
        self.shape, self.logits = shape, logits

    def forward(self, obs: Any) -> Any:
        number = obs.reshape(obs.shape[: obs.ndim - len(self.shape)]).long() + 1
        return nn.functional.one_hot(number, 7) * 1e6 if self.logits else number


def next_policy(kind: str, space: str) -> Any:
    module = Next(NUMBERS[space].shape or ())
    if kind == "head":
        return policies.categorical(Next(module.shape, logits=True))
    if kind == "module":
        return TensorDictModule(module, in_keys=["observation"], out_keys=["action"])
    return lambda obs: (module(obs), {"state_value": module(obs).float().unsqueeze(-1)})


def check_numbers(c: Any, num_envs: int | None, kind: str) -> None:
    """Seven rows in two batches, rows for values of next observations, and two whole episodes."""
    lead = c.rollout().shape[:-1]
    steps = torch.arange(14) % LENGTH
    for batch, t in (
        (c.rollout(), steps[7:14]),
        (c.rollout(), (steps + 4)[:7] % LENGTH),
    ):
        assert torch.equal(
            batch["observation"].reshape(-1, 7).long(), t.expand(batch.numel() // 7, 7)
        )
        assert torch.equal(batch["action"].long(), (t + 1).expand(*lead, 7))
        assert torch.equal(
            batch["next", "reward"].long(), (t + 1).expand(*lead, 7).unsqueeze(-1)
        )
        assert torch.equal(
            batch["next", "observation"].reshape(-1, 7).long(),
            (t + 1).expand(batch.numel() // 7, 7),
        )
    if kind == "function":
        made = c.collect(
            n_step=2 * (num_envs or 1) * len(c.stats().workers or (0,)), bootstrap=True
        )
        assert (made.last_value_est == 4).all()  # of observation 3, after rows 1 and 2
    batch, _ = c.collect_batch(n_episode=2)
    assert batch["action"].tolist() == [1, 2, 3, 4, 5] * 2
    assert_accounted(c)


@pytest.mark.parametrize("kind", ["function", "head", "module"])
@pytest.mark.parametrize("num_envs", [None, 1, 3])
@pytest.mark.parametrize("space", NUMBERS)
def test_observations_of_one_number(space, num_envs, kind):
    """Also where a row of them has no dimension at all: a single environment, without ``num_envs``."""
    options = {
        "num_envs": num_envs,
        "frames_per_batch": 7 * (num_envs or 1),
        "seed": 0,
        "validate": "full",
    }
    with Collector(partial(NumberEnv, space), next_policy(kind, space), **options) as c:
        check_numbers(c, num_envs, kind)
    for where in (
        {},
        {"inference": "server"},
        {"inference": CentralInference(alternating=True)},
    ):
        options |= {
            "frames_per_batch": 14 * (num_envs or 1),
            "backend": "threads",
            **where,
        }
        with MultiSyncCollector(
            [partial(NumberEnv, space)] * 2, next_policy(kind, space), **options
        ) as c:
            check_numbers(c, num_envs, kind)


@pytest.mark.parametrize(
    ("inference", "kind"), [("worker", "head"), ("server", "function")]
)
def test_observations_of_one_number_in_worker_processes(inference, kind):
    options = {"frames_per_batch": 14, "inference": inference, "seed": 0}
    with MultiSyncCollector(
        [partial(NumberEnv, "Discrete")] * 2, next_policy(kind, "Discrete"), **options
    ) as c:
        check_numbers(c, None, kind)
