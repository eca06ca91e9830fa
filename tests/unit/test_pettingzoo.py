"""PettingZoo: groups, agents that come and go, masks, and what TorchRL makes of the same
environments.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from muster import Collector, MultiSyncCollector
from muster.errors import BadEnvOutput, EnvError, UnsupportedEnv, UnsupportedSpace
from muster.testing import EnvContract
from tests.tools import assert_accounted, assert_same, collect, column, joined

pettingzoo = pytest.importorskip("pettingzoo")
ParallelEnv = pettingzoo.ParallelEnv
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in (
        "The old environment creation API",
        "PettingZoo in TorchRL is tested",
        "The base environment",
    )
]


class Shifts(ParallelEnv):
    """Agents come and go by timetable.

    Observation ``[number of the agent, t]``, reward ``10 * number + t``.

    Args:
        times: per agent, the step at which it comes, the step after which it leaves, and whether
            that is a truncation.
    """

    def __init__(
        self,
        times: dict[str, tuple[int, int, bool]] | None = None,
        *,
        masks: str = "",
        state: bool = False,
    ) -> None:
        self.times = times or {
            "cook_0": (0, 3, False),
            "cook_1": (1, 2, True),
            "waiter": (0, 4, False),
        }
        self.possible_agents = list(self.times)
        self.agents: list[str] = []
        self.metadata = {"name": "shifts_v0"}
        self.masks = masks
        if state:
            self.state_space = spaces.Box(0, 100, (1,), np.int64)
        self.t = 0
        self.got: list[dict[str, Any]] = []
        self.resets: list[Any] = []
        self.closed = 0

    def observation_space(self, agent: str) -> Any:
        box = spaces.Box(0, 100, (2,), np.float32)
        if self.masks != "obs":
            return box
        return spaces.Dict(
            {"observation": box, "action_mask": spaces.Box(0, 1, (3,), np.int8)}
        )

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(3)

    def legal(self, agent: str) -> Any:
        return np.array([self.t % 2 == 0, True, self.t % 2 == 1], np.int8)

    def see(self, agent: str) -> Any:
        box = np.array([self.possible_agents.index(agent), self.t], np.float32)
        return (
            {"observation": box, "action_mask": self.legal(agent)}
            if self.masks == "obs"
            else box
        )

    def infos(self, agents: Any) -> Any:
        return {
            a: {"action_mask": self.legal(a)} if self.masks == "info" else {}
            for a in agents
        }

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.resets.append((seed, options))
        self.t = 0
        self.agents = [a for a, (comes, _, _) in self.times.items() if comes == 0]
        return {a: self.see(a) for a in self.agents}, self.infos(self.agents)

    def step(self, actions: dict[str, Any]) -> Any:
        assert actions.keys() == set(self.agents)
        self.got.append(actions)
        acted, self.t = self.agents, self.t + 1
        leaves = {a: self.t == self.times[a][1] for a in acted}
        self.agents = [
            a
            for a, (comes, goes, _) in self.times.items()
            if (a in acted and not leaves[a]) or comes == self.t < goes
        ]
        seen = dict.fromkeys([*acted, *self.agents])
        return (
            {a: self.see(a) for a in seen},
            {a: 10.0 * self.possible_agents.index(a) + self.t for a in acted},
            {a: leaves[a] and not self.times[a][2] for a in acted},
            {a: leaves[a] and self.times[a][2] for a in acted},
            self.infos(seen),
        )

    def state(self) -> Any:
        return np.array([self.t])

    def close(self) -> None:
        self.closed += 1


def shifts(**options: Any) -> Any:
    return lambda: Shifts(**options)


# --- expected arrays ------------------------------------------------------------------------------


def test_agents_come_and_go_with_zeros_and_a_mask():
    """All follows from the timetable: cook 1 comes at step 1 and is cut at step 2, two others are
    terminated later.
    """
    env = Shifts()
    batch = collect(env, None, frames_per_batch=8, validate="full")
    after = batch["next"]
    assert batch.shape == (8,)
    for group, place, agent in (
        ("cook", 0, "cook_0"),
        ("cook", 1, "cook_1"),
        ("waiter", 0, "waiter"),
    ):
        number, (comes, goes, cut) = env.possible_agents.index(agent), env.times[agent]

        def seen(
            t: int, number: int = number, comes: int = comes, goes: int = goes
        ) -> list[int]:
            return (
                [number, t] if comes <= t <= goes else [0, 0]
            )  # the last one is seen, too

        steps = [*range(4)] * 2
        of_agent, of_next = batch[group][:, place], after[group][:, place]
        assert of_agent["observation"].tolist() == [seen(t) for t in steps]
        assert of_next["observation"].tolist() == [seen(t + 1) for t in steps]
        assert of_agent["mask"].tolist() == [comes <= t < goes for t in steps]
        assert of_next["mask"].tolist() == [comes <= t + 1 < goes for t in steps]
        assert column(of_next, "reward") == [
            10 * number + t + 1 if comes <= t < goes else 0 for t in steps
        ]
        assert column(of_next, "terminated") == [
            t + 1 >= goes and not cut for t in steps
        ]
        assert column(of_next, "truncated") == [t + 1 >= goes and cut for t in steps]
        assert torch.equal(
            of_next["done"], of_next["terminated"] | of_next["truncated"]
        )
        assert column(of_agent, "done") == [not comes <= t < goes for t in steps], (
            "also before it comes"
        )
    assert after["done"].tolist() == [[False], [False], [False], [True]] * 2
    # One of the agents was truncated: so was the episode.
    assert torch.equal(after["truncated"], after["done"])
    assert not after["terminated"].any()
    assert ("next", "reward") not in batch.keys(True)


def test_each_agent_gets_its_own_action_while_it_is_there():
    env = Shifts()
    batch = collect(env, None, frames_per_batch=8, seed=1)
    expected = []
    for t in range(8):
        there = [("cook", 0, "cook_0"), ("cook", 1, "cook_1"), ("waiter", 0, "waiter")]
        there = [
            (group, i, agent) for group, i, agent in there if batch[group, "mask"][t, i]
        ]
        expected.append(
            {agent: batch[group, "action"][t, i] for group, i, agent in there}
        )
    assert env.got == expected


def test_several_environments_are_a_batch_of_their_own_episodes():
    made: list[Shifts] = []

    def make() -> Shifts:
        made.append(Shifts({"a_0": (0, 2 + len(made), False), "a_1": (0, 1, False)}))
        return made[-1]

    batch = collect(make, None, num_envs=3, frames_per_batch=36, seed=5)
    assert batch["a", "observation"].shape == (3, 12, 2, 2)
    for i in range(3):
        ends = [(t + 1) % (2 + i) == 0 for t in range(12)]
        assert batch["next", "done"][i, :, 0].tolist() == ends
        assert (5 + i, None) in made[i].resets
        assert made[i].closed == 1


@pytest.mark.parametrize("masks", ["obs", "info"])
def test_action_masks_say_what_is_legal_and_random_actions_obey(masks):
    batch = collect(
        shifts(masks=masks),
        None,
        num_envs=2,
        frames_per_batch=400,
        seed=0,
        validate="full",
    )
    mask, there = batch["cook", "action_mask"], batch["cook", "mask"]
    assert mask.dtype == torch.bool
    assert mask.shape == (2, 200, 2, 3)
    t = torch.arange(200) % 4
    legal = torch.stack([t % 2 == 0, t >= 0, t % 2 == 1], -1)[None, :, None].expand_as(
        mask
    )
    assert torch.equal(
        mask, legal | ~there[..., None]
    )  # an agent that is away could do anything
    action = batch["cook", "action"]
    assert mask.gather(-1, action[..., None]).all()
    counts = torch.stack([(action[there] == i).sum() for i in range(3)]) / there.sum()
    assert torch.allclose(counts, torch.tensor([0.25, 0.5, 0.25]), atol=0.07)
    if masks == "obs":
        assert batch["cook", "observation", "observation"].shape == (2, 200, 2, 2)


def test_agents_that_come_later_have_masks_in_infos_as_the_others():
    times = {"cook": (0, 6, False), "late": (2, 5, False)}
    make = shifts(times=times, masks="info")
    batch = collect(make, None, num_envs=2, frames_per_batch=120, seed=0)
    for name in times:
        mask, there = batch[name, "action_mask"], batch[name, "mask"]
        assert mask.gather(-1, batch[name, "action"][..., None]).all()
        assert not mask[there].all()
        assert mask[~there].all()


class Secretive(Shifts):
    """Its masks are in the infos of steps, and not in those of resets."""

    def reset(self, **options: Any) -> Any:
        seen, _ = super().reset(**options)
        return seen, {agent: {} for agent in seen}


def test_a_mask_in_an_info_that_has_no_column_is_an_error_and_loses_nothing():
    make = lambda: Secretive(masks="info")  # noqa: E731
    with (
        Collector(make, None, frames_per_batch=8, seed=0) as collector,
        pytest.raises(
            BadEnvOutput, match=r"cook_0: its info has an action_mask.*Let reset"
        ),
    ):
        collector.rollout()


def test_the_global_state_is_stored_where_there_is_one():
    batch = collect(Shifts(state=True), None, frames_per_batch=8, validate="full")
    assert batch["state"].tolist() == [[0], [1], [2], [3]] * 2
    assert batch["next", "state"].tolist() == [[1], [2], [3], [4]] * 2
    assert "state" not in collect(Shifts(), None, frames_per_batch=8)


# --- groups ---------------------------------------------------------------------------------------


def test_a_saved_collector_goes_on_in_the_middle_of_an_episode():
    make = shifts(masks="info", times={"a_0": (0, 5, False), "a_1": (1, 3, True)})
    with Collector(make, None, num_envs=2, frames_per_batch=6, seed=0) as collector:
        collector.rollout()
        saved = collector.state_dict()
        expected = joined(collector, 4)
    with Collector(make, None, num_envs=2, frames_per_batch=6, seed=1) as other:
        other.load_state_dict(saved, trust=True)
        assert_same(expected, joined(other, 4), ignore=(("collector", "resumed"),))


class Zoo(Shifts):
    """Agents of several kinds."""

    def __init__(self, names: tuple[str, ...], wide: tuple[str, ...] = ()) -> None:
        super().__init__(dict.fromkeys(names, (0, 3, False)))
        self.wide = wide

    def action_space(self, agent: str) -> Any:
        return (
            spaces.Box(-1, 1, (2,), np.float32)
            if agent in self.wide
            else spaces.Discrete(3)
        )


@pytest.mark.parametrize(
    ("names", "wide", "groups"),
    [
        (("agent_0", "agent_1", "adversary_0"), (), {"agent": 2, "adversary": 1}),
        (("first", "second"), (), {"first": 1, "second": 1}),
        (("agent_0", "agent_1", "agent_2"), ("agent_1",), {"agent": 2, "agent_1": 1}),
        (("agent", "agent_0"), (), {"agent": 1, "agent_0": 1}),
        (("red_team_0", "red_team_1", "blue_x"), (), {"red_team": 2, "blue_x": 1}),
    ],
)
def test_agents_of_one_name_and_equal_spaces_are_a_group(names, wide, groups):
    batch = collect(Zoo(names, wide), None, frames_per_batch=6, validate="full")
    found = {
        key[0]: batch[key].shape[-1]
        for key in batch.keys(True, True)
        if key[1:] == ("mask",)
    }
    assert found == groups
    for name in wide:
        assert batch[name, "action"].shape == (6, 1, 2)


def test_names_that_a_batch_needs_are_refused():
    with pytest.raises(UnsupportedEnv, match="'next'.*rename"):
        Collector(Zoo(("next_0", "next_1")), None, frames_per_batch=3)
    env = Zoo(("a_0",))
    env.possible_agents = []
    with pytest.raises(UnsupportedEnv, match="possible_agents"):
        Collector(env, None, frames_per_batch=3)


def test_the_environments_of_a_batch_are_alike_and_different_objects():
    made = iter(
        [
            Zoo(("a_0", "a_1")),
            Zoo(("a_0", "b_1")),
            Zoo(("a_0",)),
            Zoo(("a_0",), ("a_0",)),
        ]
    )
    for _ in range(2):
        with pytest.raises(
            UnsupportedEnv, match="environment 1 has other agents or spaces"
        ):
            Collector(lambda: next(made), None, num_envs=2, frames_per_batch=4)
    one = Zoo(("a_0",))
    with pytest.raises(UnsupportedEnv, match="same object twice"):
        Collector(lambda: one, None, num_envs=2, frames_per_batch=4)


def test_spaces_without_arrays_and_masks_of_continuous_actions_are_refused():
    class Texts(Shifts):
        def observation_space(self, agent: str) -> Any:
            return spaces.Text(3)

    with pytest.raises(UnsupportedSpace, match="not arrays"):
        Collector(Texts(), None, frames_per_batch=3)

    class Masked(Shifts):
        def action_space(self, agent: str) -> Any:
            return spaces.Box(-1, 1, (2,))

    with pytest.raises(UnsupportedSpace, match="action_mask"):
        Collector(Masked(masks="info"), None, frames_per_batch=3)


# --- what an environment must not do --------------------------------------------------------------


def without(place: int, agent: str) -> Any:
    def spoil(out: list[Any]) -> None:
        del out[place][agent]

    return spoil


def with_value(place: int, value: Any) -> Any:
    def spoil(out: list[Any]) -> None:
        out[place]["waiter"] = value

    return spoil


SPOILT: dict[str, tuple[Any, str]] = {
    "reward": (without(1, "waiter"), r"no reward of \['waiter'\]"),
    "termination": (without(2, "cook_0"), r"no termination of \['cook_0'\]"),
    "observation": (without(0, "waiter"), "no observation of waiter"),
    "last observation": (without(0, "cook_1"), "no observation of cook_1"),
    "shape": (
        with_value(0, np.zeros(3, np.float32)),
        "waiter: waiter.observation is an array of shape",
    ),
    "number": (with_value(1, "much"), "waiter: reward is str"),
    "flag": (with_value(2, 0.5), "termination of waiter is float"),
    "four": (lambda out: out.pop(), "expected five dicts"),
}


def test_what_keeps_its_values_is_cast_with_one_warning_for_each_cause():
    class Wide(Shifts):
        def step(self, actions: Any) -> Any:
            obs, rewards, *rest = super().step(actions)
            rewards = {agent: np.array([reward]) for agent, reward in rewards.items()}
            return (
                {agent: np.asarray(seen, np.float64) for agent, seen in obs.items()},
                rewards,
                *rest,
            )

    with pytest.warns(UserWarning, match="It is cast") as caught:
        batch = collect(Wide(), None, frames_per_batch=8)
    causes = [str(warning.message).split(". It")[0] for warning in caught]
    assert causes == [
        "shifts_v0: the reward has shape (1,), expected a number",
        "shifts_v0: cook.observation has dtype float64, but its space says float32",
        "shifts_v0: waiter.observation has dtype float64, but its space says float32",
    ]
    assert_same(
        batch,
        collect(Shifts(), None, frames_per_batch=8),
        ignore=(("cook", "action"), ("waiter", "action")),
    )


@pytest.mark.parametrize("case", SPOILT)
def test_a_bad_output_is_refused_and_the_rows_before_it_are_kept(case):
    spoil, message = SPOILT[case]

    class Bad(Shifts):
        def step(self, actions: Any) -> Any:
            out = list(super().step(actions))
            if len(self.got) == 2:
                spoil(out)
            return tuple(out)

    with Collector(Bad(), None, frames_per_batch=4) as collector:
        with pytest.raises(BadEnvOutput, match=message):
            collector.rollout()
        assert collector.rollout()["waiter", "observation"][:, 0, 1].tolist() == [
            0,
            0,
            1,
            2,
        ]
        assert_accounted(collector)


def test_an_agent_that_vanishes_is_an_error():
    class Vanishing(Shifts):
        def step(self, actions: Any) -> Any:
            out = super().step(actions)
            self.agents = [a for a in self.agents if a != "waiter"]
            return out

    collector = Collector(Vanishing(), None, frames_per_batch=4)
    with pytest.raises(BadEnvOutput, match="waiter is gone"):
        collector.rollout()


# --- the real thing -------------------------------------------------------------------------------


def rps() -> Any:
    from pettingzoo.classic import rps_v2

    return rps_v2.parallel_env(max_cycles=4)


def test_rock_paper_scissors_gives_what_torchrl_gives():
    libs = pytest.importorskip("torchrl.envs.libs.pettingzoo")
    theirs = libs.PettingZooWrapper(
        rps(), use_mask=True, done_on_any=False, categorical_actions=True
    )
    theirs.set_seed(0)
    ours = collect(rps(), None, frames_per_batch=12, seed=0)

    actions = iter(ours["player", "action"])
    expected = theirs.rollout(
        12,
        lambda td: td.set(("player", "action"), next(actions)),
        break_when_any_done=False,
    )
    for part in (expected, expected["next"]):  # one-hot there, the number itself here
        part["player", "observation"] = part["player", "observation"].long().argmax(-1)
    assert_same(ours, expected, ignore=(("collector", "traj_ids"),))


class Lenient(Shifts):
    """TorchRL gives actions to all agents."""

    def step(self, actions: Any) -> Any:
        return super().step({agent: actions[agent] for agent in self.agents})


@pytest.mark.parametrize("masks", ["obs", "info", ""])
def test_agents_that_go_have_the_columns_that_torchrl_gives_them(masks):
    libs = pytest.importorskip("torchrl.envs.libs.pettingzoo")
    times = {"cook_0": (0, 3, False), "cook_1": (0, 4, False)}
    options = {
        "use_mask": True,
        "done_on_any": False,
        "categorical_actions": True,
        "return_state": True,
    }
    theirs = libs.PettingZooWrapper(Lenient(times, masks=masks, state=True), **options)
    expected = theirs.rollout(4, break_when_any_done=False)
    ours = collect(Shifts(times, masks=masks, state=True), None, frames_per_batch=4)
    # They say of an agent that has left that it was truncated as well as terminated.
    differ = [
        ("cook", "action"),
        *((*at, "cook", "truncated") for at in ((), ("next",))),
    ]
    for key in differ:
        assert (ours[key].shape, ours[key].dtype) == (
            expected[key].shape,
            expected[key].dtype,
        )
    assert_same(ours, expected, ignore=(("collector", "traj_ids"), *differ))


def test_an_aec_environment_that_can_is_run_in_parallel():
    from pettingzoo.utils.conversions import parallel_to_aec

    batch = collect(
        parallel_to_aec(Shifts({"a_0": (0, 2, False), "a_1": (0, 2, False)})),
        None,
        frames_per_batch=4,
    )
    assert batch["next", "done"].tolist() == [[False], [True]] * 2


class TestShifts(EnvContract):
    def make_env(self) -> Any:
        return Shifts(masks="obs", state=True)


class TestRockPaperScissors(EnvContract):
    num_envs = None

    def make_env(self) -> Any:
        return rps()


# --- returns of agents ----------------------------------------------------------------------------


def returns_by_hand(batches: list[Any]) -> dict[int, dict[str, float]]:
    """The sums of the rewards of each agent by trajectory, from the rows of the batches."""
    found: dict[int, dict[str, float]] = {}
    for batch in batches:
        ids = batch["collector", "traj_ids"].flatten().tolist()
        cooks = batch["next", "cook", "reward"].flatten(0, -3)[..., 0].tolist()
        waiters = batch["next", "waiter", "reward"].flatten(0, -3)[..., 0].tolist()
        for traj, cook, waiter in zip(ids, cooks, waiters, strict=True):
            sums = found.setdefault(traj, {"cook_0": 0.0, "cook_1": 0.0, "waiter": 0.0})
            for name, reward in zip(sums, [*cook, *waiter], strict=True):
                sums[name] += reward
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_frames_per_traj": 3},
        {"reset_when_done": False},
        {"reset_at_each_iter": True},
        {"frames_per_batch": 4},
        {"num_envs": None},
        {"backend": "threads"},
    ],
    ids=str,
)
def test_records_have_the_return_of_each_agent(options: dict[str, Any]) -> None:
    given = {"num_envs": 2, "frames_per_batch": 28, "total_frames": 84, **options}
    cls: Any = MultiSyncCollector if "backend" in options else Collector
    with cls([Shifts, Shifts], None, **given) as c:
        batches = []
        records = []
        for batch in c:
            batches.append(batch.clone())
            records += list(c.episodes)
    expected = returns_by_hand(batches)
    assert len(records) > 3
    for record in records:
        assert record.info["agent_returns"] == expected[record.traj_id]
        assert record.episode_return == sum(record.info["agent_returns"].values())


def test_returns_of_agents_in_batches_of_whole_episodes() -> None:
    with Collector(
        Shifts, None, num_envs=2, frames_per_batch=14, trajs_per_batch=3
    ) as c:
        for _ in range(3):
            expected = returns_by_hand([c.next()])
            assert {r.traj_id: r.info["agent_returns"] for r in c.episodes} == expected


def test_returns_of_agents_go_on_after_a_load_and_an_error() -> None:
    """An episode that an error cuts has no record; the next one begins with nothing."""

    class Failing(Shifts):
        steps = 0

        def step(self, actions: Any) -> Any:
            Failing.steps += 1
            if Failing.steps == 23:
                raise RuntimeError("planned")
            return super().step(actions)

    options: dict[str, Any] = {"num_envs": 2, "frames_per_batch": 12}
    batches = []
    with Collector(Failing, None, **options) as c:
        batches.append(c.next().clone())
        state = c.state_dict()
    with Collector(Failing, None, **options) as c:
        c.load_state_dict(state)
        records = []
        with pytest.raises(EnvError, match="planned"):
            c.next()
        for _ in range(3):
            batches.append(c.next().clone())
            records += list(c.episodes)
    expected = returns_by_hand(batches)
    assert len(records) > 5
    for record in records:
        assert record.info["agent_returns"] == expected[record.traj_id]
