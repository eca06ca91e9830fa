"""As many resets and steps as an evaluation's episodes need, by environments that count them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, get_args

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from muster import Collector, Evaluator
from muster.episodes.rules import AtMost, FirstDone, RuleName, make_rule, part_of
from muster.errors import UnsupportedEnv
from muster.evaluation.episodes import EvaluatedEpisode
from muster.evaluation.run import Plan
from muster.evaluation.video import Tape
from muster.testing import CountingEnv, TorchCartPole
from tests.unit.test_envpool_async import pools

RULES = get_args(RuleName)
PATIENCE = 60.0  # seconds after which a test gives up


class Scenarios(gymnasium.Env[Any, Any]):
    """Its seed is a scenario: the length of its episodes.

    Counts resets and steps, and names the seeds.

    Args:
        lengths: lengths of its episodes, in turn; None: ``2 + seed % 3``.
        scenarios: there are so many.
    """

    def __init__(
        self, lengths: Sequence[int] | None = None, scenarios: int = 10**6
    ) -> None:
        self.observation_space = spaces.Box(0, 10**6, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.lengths, self.scenarios = (
            None if lengths is None else itertools.cycle(lengths),
            scenarios,
        )
        self.seeds: list[int | None] = []
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.seeds.append(seed)
        if seed is not None and seed >= self.scenarios:
            raise ValueError(f"there is no scenario {seed}")
        self.length = (
            2 + (seed or 0) % 3 if self.lengths is None else next(self.lengths)
        )
        self.t = 0
        return np.array([self.length, 0], np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        self.t += 1
        return (
            np.array([self.length, self.t], np.float32),
            1.0,
            self.t >= self.length,
            False,
            {},
        )


def making(
    made: list[Scenarios], *args: Any, **options: Any
) -> Callable[[], Scenarios]:
    def make() -> Scenarios:
        made.append(Scenarios(*args, **options))
        return made[-1]

    return make


def making_each(
    made: list[Scenarios], lengths: list[list[int]]
) -> Callable[[], Scenarios]:
    """Make environments with these lengths of episodes, one after another."""
    each = iter(lengths)

    def make() -> Scenarios:
        made.append(Scenarios(next(each)))
        return made[-1]

    return make


def act(obs: torch.Tensor) -> torch.Tensor:
    return torch.zeros(obs.shape[:-1], dtype=torch.long)


@pytest.mark.parametrize("num_envs", [None, 1, 2, 3, 4, 10, 16])
@pytest.mark.parametrize("rule", ["per_env", "last_even"])
def test_there_are_as_many_resets_as_episodes_and_no_step_more(rule, num_envs):
    made: list[Scenarios] = []
    with Evaluator(
        making(made), act, episodes=10, num_envs=num_envs, rule=rule
    ) as evaluator:
        for repeated in (1, 2):
            done = evaluator.evaluate()
            resets = sorted(
                seed for env in made for seed in env.seeds if seed is not None
            )
            assert len(resets) == 10 * repeated
            if rule == "per_env":
                assert resets == sorted([*range(10)] * repeated)
            assert (
                sum(env.steps for env in made)
                == repeated * done.frames
                == repeated * done.frames_counted
            )
            assert (done.started, done.discarded, done.uncounted, done.unfinished) == (
                10,
                {},
                (),
                (),
            )
            assert "more started" not in str(done)


def test_an_environment_whose_seeds_are_scenarios_is_never_asked_for_another_one():
    for groups, num_envs in ((1, 3), (2, 2), (5, 1), (3, 4)):
        made: list[Scenarios] = []
        source = [making(made, scenarios=10)] * groups
        with Evaluator(source, act, episodes=10, num_envs=num_envs) as evaluator:
            done = evaluator.evaluate()
        assert sorted(record.seed for record in done.records) == [*range(10)]
        assert len(made) == min(10, groups * num_envs)


@pytest.mark.parametrize(
    ("groups", "num_envs", "episodes"),
    [(1, 8, 5), (2, 4, 5), (3, 2, 5), (3, 4, 7), (3, 4, 8), (4, None, 2)],
)
@pytest.mark.parametrize("alike", [True, False])
def test_environments_that_take_no_part_are_not_made(groups, num_envs, episodes, alike):
    made: list[Scenarios] = []
    source = [making(made)] * groups if alike else [making(made) for _ in range(groups)]
    with Evaluator(source, act, episodes=episodes, num_envs=num_envs) as evaluator:
        done = evaluator.evaluate()
    assert len(made) == episodes
    assert [seed for env in made for seed in env.seeds] == [*range(episodes)]
    assert sorted((r.env_id, r.seed) for r in done.records) == [
        (i, i) for i in range(episodes)
    ]


def test_factories_keep_their_arguments_and_objects_are_closed():
    def make(length: int) -> Scenarios:
        return Scenarios([length])

    kwargs = [{"length": n} for n in (1, 2, 3)]
    with Evaluator(
        [make] * 3, act, episodes=4, num_envs=2, create_env_kwargs=kwargs
    ) as evaluator:
        assert sorted((r.env_id, r.length) for r in evaluator.evaluate().records) == [
            (0, 1),
            (1, 1),
            (2, 2),
            (3, 2),
        ]
    closed: list[int] = []

    class Closed(Scenarios):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

        def close(self) -> None:
            closed.append(self.number)

    envs = [Closed(i) for i in range(3)]
    evaluator = Evaluator(envs, act, episodes=2)
    evaluator.evaluate()
    assert envs[2].seeds == closed == []
    evaluator.shutdown()
    evaluator.shutdown()
    assert sorted(closed) == [0, 1, 2]


# --- every rule, and groups that are stepped apart ------------------------------------------------


class Needed(NamedTuple):
    counted: list[tuple[int, int]]  # environment, and number of its episode
    resets: list[int]
    steps: list[int]


def needed(
    name: RuleName,
    lengths: list[list[int]],
    episodes: int | None,
    most: int | None,
    max_T: int | None,
) -> Needed:
    """What an evaluation needs, step by step, with all ends known at once."""
    n = len(lengths)
    rule = make_rule(name, episodes, n)
    cycles = [itertools.cycle(each) for each in lengths]
    going = [rule.awaits(i) for i in range(n)]
    resets, steps, number = [int(g) for g in going], [0] * n, [0] * n
    left = [next(cycle) for cycle in cycles]
    counted: list[tuple[int, int]] = []
    for t in itertools.count(1):
        for i in range(n):
            steps[i] += going[i]
            left[i] -= going[i]
        ended = [i for i in range(n) if going[i] and left[i] == 0]
        chosen = sorted(
            rule.ended(ended)[: None if most is None else most - len(counted)]
        )
        counted += [(i, number[i]) for i in chosen]
        over = rule.complete or len(counted) == most
        for i in ended:
            number[i] += 1
            left[i] = next(cycles[i])
            going[i] = not over and rule.awaits(i)
            resets[i] += going[i]
        for i in range(n):
            going[i] &= rule.awaits(i)
        if over or t == max_T:
            return Needed(counted, resets, steps)
    raise AssertionError


@settings(max_examples=60)
@given(
    lengths=st.lists(
        st.lists(st.integers(1, 7), min_size=1, max_size=3), min_size=1, max_size=6
    ),
    groups=st.integers(1, 6),
    rule=st.sampled_from(RULES),
    episodes=st.one_of(st.none(), st.integers(1, 14)),
    most=st.one_of(st.none(), st.integers(1, 9)),
    max_T=st.one_of(st.none(), st.integers(1, 40)),
)
def test_groups_that_are_stepped_apart_do_what_one_group_does(
    lengths, groups, rule, episodes, most, max_T
):
    if episodes is None and most is None and max_T is None:
        episodes = 5
    n = len(lengths)
    sizes = max(
        size for size in range(1, n + 1) if n % size == 0 and n // size <= groups
    )
    expected = needed(rule, lengths, episodes, most, max_T)
    for per_group in {n, sizes}:
        made: list[Scenarios] = []
        source = [making(made, each) for each in lengths] if per_group == 1 else []
        for g in range(n // per_group if per_group > 1 else 0):
            source.append(
                making_each(made, lengths[g * per_group : (g + 1) * per_group])
            )
        options = {
            "episodes": episodes,
            "max_trajectories": most,
            "max_T": max_T,
            "rule": rule,
        }
        with Evaluator(source, act, num_envs=per_group, **options) as evaluator:
            done = evaluator.evaluate()
        assert [(r.env_id, r.episode) for r in done.records] == expected.counted
        takes_part = len(made)
        assert [env.steps for env in made] == expected.steps[:takes_part]
        assert not any(expected.steps[takes_part:])
        assert [len(env.seeds) for env in made] == [
            max(1, r) for r in expected.resets[:takes_part]
        ]
        assert done.frames == sum(expected.steps)
        assert "overrun" not in done.discarded


def assert_same_choice(
    rule: Any, parts: Sequence[Any], sides: Sequence[Sequence[int]]
) -> None:
    for part, side in zip(parts, sides, strict=True):
        assert [part.awaits(place) for place in range(len(side))] == [
            rule.awaits(i) for i in side
        ]


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=100)
@given(
    lengths=st.lists(
        st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=2, max_size=5
    ),
    episodes=st.integers(1, 14),
    most=st.one_of(st.none(), st.integers(1, 9)),
    data=st.data(),
)
def test_a_part_decides_as_the_rule_does_while_it_is_certain(
    name, lengths, episodes, most, data
):
    n = len(lengths)
    rule = make_rule(name, episodes, n)
    rule = rule if most is None else AtMost(rule, most, n)
    cycles = [itertools.cycle(each) for each in lengths]
    left = [next(cycle) for cycle in cycles]
    cut = data.draw(st.integers(1, n - 1))
    sides = [[*range(cut)], [*range(cut, n)]]
    while not rule.complete:
        certain, parts = rule.certain_steps, [part_of(rule, side) for side in sides]
        assert_same_choice(rule, parts, sides)
        steps = data.draw(st.integers(1, 9)) if certain is None else max(1, certain)
        for _ in range(steps):
            ended = []
            for i in [i for i in range(n) if rule.awaits(i)]:
                left[i] -= 1
                if left[i] == 0:
                    ended.append(i)
                    left[i] = next(cycles[i])
            rule.ended(ended)
            for part, side in zip(parts, sides, strict=True):
                part.ended([place for place, i in enumerate(side) if i in ended])
                if certain == 0:
                    assert not any(
                        part.awaits(place) for place, i in enumerate(side) if i in ended
                    )
            if certain != 0:
                assert_same_choice(rule, parts, sides)
            if rule.complete:
                assert certain == 0 or all(part.complete for part in parts)
                break


@pytest.mark.parametrize(
    ("name", "episodes", "num_envs", "certain"),
    [
        ("per_env", 7, 3, None),
        ("fair", 6, 3, None),
        ("fair", 7, 3, 2),
        ("fair", 2, 3, 0),
        ("last_even", 3, 3, None),
        ("last_even", 5, 3, 0),
        ("last_even", 9, 3, 2),
        ("first_done", 7, 3, 2),
        ("first_done", 6, 3, 1),
        ("first_done", 3, 3, 0),
    ],
)
def test_a_rule_is_certain_for_as_many_steps_as_short_episodes_allow(
    name, episodes, num_envs, certain
):
    assert make_rule(name, episodes, num_envs).certain_steps == certain
    assert (
        AtMost(make_rule("per_env", 100, num_envs), 7, num_envs).certain_steps
        == 6 // num_envs
    )


def test_nothing_is_awaited_after_the_most_episodes():
    rule = AtMost(make_rule("per_env", 10, 2), 3, 2)
    assert rule.ended([0, 1]) == [0, 1]
    assert rule.awaits(1)
    assert rule.ended([0, 1]) == [0]
    assert (rule.complete, rule.awaits(0), rule.awaits(1)) == (True, False, False)


def test_the_actions_of_an_episode_are_found_in_rollouts_of_any_length():
    actions, begins = np.arange(2 * 12).reshape(12, 2), [0, 5, 6, 7]
    ends = [*begins[1:], 12]
    padded = [
        np.pad(actions[b:e], ((0, 0 if e < 12 else 3), (0, 0)))
        for b, e in zip(begins, ends, strict=True)
    ]
    tape = Tape("env", [], 2, [{("action",): rows} for rows in padded], begins)
    for begin, length in itertools.product(range(12), range(1, 13)):
        if begin + length <= 12:
            episode = EvaluatedEpisode(1, 0, 0, begin, 0.0, length, True, False, 1)
            found = tape.actions(episode)[("action",)]
            assert found.tolist() == actions[begin : begin + length, 1:].tolist()


def test_a_first_done_rule_is_certain_as_long_as_it_cannot_be_complete():
    rule = FirstDone(10, 3)
    assert rule.certain_steps == 3
    rule.ended([0, 1, 2] * 3)
    assert (rule.certain_steps, rule.complete) == (0, False)


def test_limits_are_exact_when_environments_are_left_out():
    made: list[Scenarios] = []
    with Evaluator(
        making_each(made, [[3], [40], [200]]),
        act,
        episodes=3,
        num_envs=3,
        max_frames=100,
    ) as evaluator:
        done = evaluator.evaluate()
    # 3 steps of three environments, 37 of two, and the rest of one.
    assert [env.steps for env in made] == [3, 40, 57]
    assert (done.frames, done.stopped_by, done.complete) == (100, "max_frames", False)
    assert [(u.env_id, u.steps) for u in done.unfinished] == [(2, 57)]


# --- environments that cannot be left out ---------------------------------------------------------


def test_batches_that_reset_themselves_say_what_they_did_besides():
    made: list[Scenarios] = []
    lengths = [[2], [3], [9]]
    vector = SyncVectorEnv(
        [making(made, each) for each in lengths], autoreset_mode=AutoresetMode.SAME_STEP
    )
    with Evaluator(vector, act, episodes=3) as evaluator:
        done = evaluator.evaluate()
        assert [(r.env_id, r.length) for r in done.records] == [(0, 2), (1, 3), (2, 9)]
        assert done.frames == sum(env.steps for env in made) == 27
        assert done.discarded == {"uncounted": 13}, (
            "the rollout ends with the last episode"
        )
        assert done.started == 5 + 3 + 1
        assert f"{done.started - 3} more started" in str(done)
        assert done.as_dict()["started"] == done.started


def test_environments_on_tensors_go_on_to_the_end_of_a_rollout():
    with Evaluator(TorchCartPole(4), act, episodes=6) as evaluator:
        done, again = evaluator.evaluate(version=0), evaluator.evaluate(version=0)
    assert sorted((r.env_id, r.episode) for r in done.records) == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (2, 0),
        (3, 0),
    ]
    assert done.records == again.records
    end = max(record.begin + record.length for record in done.records)
    assert done.frames == 4 * end
    assert done.discarded["overrun"] == 4 * (-end % 32)
    assert done.started > 6


def test_asynchronous_pools_give_what_synchronous_ones_give():
    make, _ = pools(5, 5, make=partial(CountingEnv, 3))
    make_async, _ = pools(5, 2, make=partial(CountingEnv, 3))
    found = []
    for source in (make, make_async):
        with (
            pytest.warns(UserWarning, match="seed"),
            Evaluator(source, act, episodes=12, seed=1) as evaluator,
        ):
            found.append(evaluator.evaluate())
    assert found[0].records == found[1].records
    assert found[0].discarded == found[1].discarded == {"uncounted": 9}


def test_agents_that_take_turns_have_no_episodes_of_environments():
    pytest.importorskip("pettingzoo")
    from tests.unit.test_joint_masks import two_players

    with pytest.raises(
        UnsupportedEnv, match="both: its agents take turns.*collector.episodes"
    ):
        Evaluator(lambda: two_players(True, "obs"), None, episodes=3)


def test_a_plan_knows_which_environments_take_part():
    assert [Plan(3, rule=rule).taking_part(8) for rule in RULES] == [8, 3, 3, 8]
    assert Plan(None, max_T=5).taking_part(8) == 8
    assert Plan(9).taking_part(8) == 8


def test_other_collections_are_as_before():
    made: list[Scenarios] = []
    with Collector(
        making(made, [3]), None, num_envs=2, frames_per_batch=12
    ) as collector:
        assert collector.rollout()["next", "done"].sum() == 4
    assert [len(env.seeds) for env in made] == [3, 3]
