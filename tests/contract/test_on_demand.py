"""``collect`` promises the same on every collector; where groups are not in step, what it can."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import nn

import muster
from muster import Collector, MultiSyncCollector
from muster.errors import BadOption, CollectorClosed, EnvError
from muster.testing import ChainEnv
from tests.contract.test_collectors import IDS, KINDS, VALID, B, Kind, make, reference
from tests.fakes.actors import Actor
from tests.fakes.buffers import Extends
from tests.fakes.echo import EchoEnv, remembering
from tests.fakes.patterned import (
    PatternEnv,
    Whole,
    contest,
    length,
    return_of,
    walk,
    wholes,
)
from tests.tools import assert_accounted, assert_same

LENGTHS = [[3], [1, 4], [2], [9, 2], [5], [1]]
RULES = ["fair", "last_even", "per_env", "first_done"]
ON_RAY = [kind for kind in KINDS if kind.name.startswith("ray")]
ELSEWHERE = [
    kind for kind in KINDS if kind not in ON_RAY
]  # an actor takes seconds to start: few tests make their own
IN_STEP = [kind for kind in ELSEWHERE if not kind.alone]
MANY = [
    kind
    for kind in ELSEWHERE
    if kind.name not in ("sync-1", "sync-3", "async-threads", "sync-server-threads")
]
A_FEW = [
    kind
    for kind in MANY
    if kind.name in ("Collector", "sync-2", "sync-threads", "async", "AsyncCollector")
]


class Guess(nn.Module):
    """Acts at random; knows what an observation is worth, and how it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.worth = nn.Parameter(torch.tensor([100.0, 10.0, 1.0, 0.0]))

    def forward(self, obs: torch.Tensor) -> Any:
        value = (obs * self.worth).sum(-1, keepdim=True) + 1
        grad = torch.full(obs.shape[:-1], float(torch.is_grad_enabled()))
        return torch.randint(2, obs.shape[:-1]), {"state_value": value, "grad": grad}


def patterned(kind: Kind, policy: Any = None, **options: Any) -> Any:
    return make(
        kind, partial(PatternEnv, LENGTHS), policy or Guess(), **{"seed": 0, **options}
    )


def only_on_demand(kind: Kind) -> Any:
    """Without ``frames_per_batch``."""
    options = {"num_envs": B, "seed": 0, **kind.options}
    return kind.cls([partial(PatternEnv, LENGTHS)] * kind.groups, Guess(), **options)


def named(kind: Kind) -> str:
    return kind.name


@pytest.fixture(scope="module", params=KINDS, ids=named)
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture(scope="module")
def made(kind: Kind) -> Iterator[Any]:
    with only_on_demand(kind) as c:
        yield c


@pytest.fixture
def shared(made: Any) -> Any:
    """As good as new, but for its counters."""
    made.set_seed(0)
    return made


def valid(batch: Any) -> torch.Tensor:
    """Where a batch has transitions, in its shape."""
    shown = batch.get(VALID, None)
    return (
        torch.ones(batch.shape, dtype=torch.bool)
        if shown is None
        else shown.reshape(batch.shape)
    )


def assert_stats(stats: Any, episodes: list[Whole], *, in_order: bool = True) -> None:
    found = list(zip(stats.lens.tolist(), stats.returns.tolist(), strict=True))
    expected = [(whole.length, return_of(whole)) for whole in episodes]
    assert found == expected if in_order else sorted(found) == sorted(expected)
    assert stats.n_collected_episodes == len(episodes)
    if episodes:
        assert (stats.lens_stat.max, stats.lens_stat.min) == (
            stats.lens.max(),
            stats.lens.min(),
        )
        assert stats.returns_stat.mean == pytest.approx(stats.returns.mean())


# --- steps ----------------------------------------------------------------------------------------


def test_steps_are_exact_or_more_than_asked_for_and_go_on_where_the_last_ones_ended(
    kind, shared
):
    envs = kind.groups * B
    at = [(0, 0)] * envs
    for n in (1, 3 * envs, 4 * envs + 1, 2):
        before = shared.stats()
        batch, stats = shared.collect_batch(n_step=n)
        after = shared.stats()
        assert_accounted(shared)
        assert (
            stats.n_collected_steps
            == int(valid(batch).sum())
            == after.frames - before.frames
        )
        assert stats.n_discarded_steps == sum(after.discarded.values()) - sum(
            before.discarded.values()
        )
        if kind.alone:
            assert stats.n_collected_steps >= n
            continue
        assert stats.n_collected_steps == n
        assert batch.shape == (kind.groups, B, -(-n // envs))
        assert stats.n_discarded_steps == batch.numel() - n
        at, ended = walk(
            batch["observation"][..., :3].flatten(0, 1).tolist(), at, LENGTHS
        )
        assert_stats(stats, ended, in_order=kind.groups == 1)
        assert stats.rule is None
        assert not stats.biased


@pytest.mark.parametrize("kind", IN_STEP, ids=named)
def test_steps_are_those_of_iteration_whatever_the_amounts(kind):
    envs = kind.groups * B
    with (
        make(kind, ChainEnv, Actor()) as c,
        make(reference(kind), ChainEnv, Actor(), frames_per_batch=2 * envs) as other,
    ):
        found = [c.collect_batch(n_step=n * envs).batch for n in (1, 5, 2)]
        batches = iter(other)
        assert_same(
            torch.cat(found, -1), torch.cat([next(batches) for _ in range(4)], -1)
        )


# --- episodes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_n_episodes_are_exactly_those_of_the_rule(kind, shared, rule):
    n, envs = 9, kind.groups * B
    for surplus in ("discard", "keep"):
        shared.set_seed(0)
        before = shared.stats()
        batch, stats = shared.collect_batch(n_episode=n, rule=rule, surplus=surplus)
        after = shared.stats()
        assert_accounted(shared)
        found = wholes(batch, LENGTHS)
        assert_stats(stats, found)
        assert stats.n_collected_steps == len(batch) == after.frames - before.frames
        assert stats.n_discarded_steps == sum(after.discarded.values()) - sum(
            before.discarded.values()
        )
        assert stats.n_kept_steps == after.in_flight
        if surplus == "discard":
            assert stats.n_kept_steps == 0
        elif not kind.alone:  # there what is under way when the seed is set is cut
            assert stats.n_discarded_steps == 0
        assert stats.rule == rule
        assert stats.biased or rule != "first_done"
        assert not stats.biased or rule in ("first_done", "fair")
        if not kind.alone:
            assert found == contest(rule, n, LENGTHS[:envs], [0] * envs).chosen
        assert_fits(rule, n, found, envs)
    shared.collect(n_episode=1, surplus="discard")
    assert shared.stats().in_flight == 0


def assert_fits(rule: str, n: int, found: list[Whole], envs: int) -> None:
    """As the rule says, whoever was quick."""
    assert len(found) == n
    counts = [sum(whole.env == i for whole in found) for i in range(envs)]
    share, more = divmod(n, envs)
    assert rule != "per_env" or counts == [share + (i < more) for i in range(envs)]
    assert (
        rule != "fair" or sorted(counts) == [share] * (envs - more) + [share + 1] * more
    )
    assert rule != "last_even" or all(counts[:n])
    for i in range(envs):
        numbers = [whole.episode for whole in found if whole.env == i]
        assert (
            numbers == list(range(numbers[0], numbers[0] + len(numbers)))
            if numbers
            else True
        )


@pytest.mark.parametrize("kind", [*MANY, *ON_RAY], ids=named)
def test_calls_of_all_kinds_go_on_where_others_ended(kind):
    """In every environment time goes on, and whatever is shown of an episode is a piece without a
    gap.
    """
    rows: dict[int, list[list[float]]] = {}
    with patterned(kind) as c:
        for call in (
            lambda: c.collect_batch(n_step=14).batch,
            lambda: c.rollout(),
            lambda: c.collect_batch(n_episode=4, surplus="discard").batch,
            lambda: next(iter(c)),
            lambda: (
                c.collect_batch(n_episode=7, rule="last_even", surplus="discard").batch
            ),
            lambda: c.collect_batch(n_step=5).batch,
            lambda: c.collect_batch(n_step=40, random=True).batch,
            lambda: c.rollout(),
        ):
            batch = call()
            shown = batch["observation"][valid(batch)].tolist()
            for row in shown:
                rows.setdefault(int(row[0]), []).append(row[1:3])
            assert_accounted(c)
    assert sorted(rows) == list(range(kind.groups * B))
    for env, of_env in rows.items():
        for (episode, t), (next_episode, next_t) in pairwise(of_env):
            ended = t + 1 == length(LENGTHS, env, int(episode))
            if next_episode == episode:
                assert next_t > t
                assert not ended
            else:
                assert next_episode > episode


@pytest.mark.parametrize("kind", MANY, ids=named)
def test_a_kept_episode_is_delivered_by_the_next_call(kind):
    seen: list[Whole] = []
    with patterned(kind) as c:
        for n in (2, 5, 1, 8):
            batch, stats = c.collect_batch(
                n_episode=n, rule="first_done", surplus="keep"
            )
            seen += wholes(batch, LENGTHS)
            assert_stats(stats, wholes(batch, LENGTHS))
            assert stats.n_kept_steps == c.stats().in_flight
            assert not c.stats().discarded
            assert_accounted(c)
        copy = batch.clone()
    assert_same(batch, copy)
    assert_accounted(c)
    for call in (c.collect, c.collect_batch):
        with pytest.raises(CollectorClosed, match="make a new one"):
            call(n_step=1)
    assert len({*seen}) == 16
    envs = kind.groups * B
    assert (
        kind.alone
        or seen == contest("first_done", 16, LENGTHS[:envs], [0] * envs).chosen
    )
    for i in range(kind.groups * B):
        numbers = [whole.episode for whole in seen if whole.env == i]
        assert numbers == list(range(len(numbers))), "none is left out"


def test_what_is_done_with_surplus_by_default(kind, shared):
    stats = shared.collect(n_episode=1, rule="per_env")
    assert stats.n_kept_steps == 0 or kind.alone
    assert_accounted(shared)
    shared.collect(n_episode=1, surplus="discard")
    assert shared.stats().in_flight == 0


# --- how ------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_data(kind, shared):
    if kind.alone:
        pytest.skip("whose rollouts come first is nobody's choice")
    found = []
    for _ in range(2):
        shared.set_seed(5)
        found.append(
            [
                shared.collect_batch(**{amount: n}).batch
                for amount, n in (("n_step", 7), ("n_episode", 5))
            ]
        )
    for one, other in zip(*found, strict=True):
        assert_same(one, other, ignore=[IDS])


@pytest.mark.parametrize("surplus", ["discard", "keep"])
def test_random_actions_for_a_call(shared, surplus):
    for random in (False, True, False, True):
        for asked in (
            {"n_step": 30},
            {"n_episode": 9, "rule": "first_done", "surplus": surplus},
        ):
            batch = shared.collect_batch(**asked, random=random).batch
            unknown = batch["grad"][valid(batch)].isnan()
            assert unknown.all() if random else not unknown.any(), (
                "where the policy was not called, its extras are NaN"
            )
            assert batch["action"][valid(batch)].unique().tolist() == [0, 1]
            assert_accounted(shared)


def test_gradients_only_where_they_are_asked_for(shared):
    for no_grad in (True, False, True):
        for asked in ({"n_step": 24}, {"n_episode": 3, "surplus": "discard"}):
            batch = shared.collect_batch(**asked, no_grad=no_grad).batch
            assert batch["grad"][valid(batch)].unique().tolist() == [
                0.0 if no_grad else 1.0
            ]
            assert not any(leaf.requires_grad for leaf in batch.values(True, True))


def test_reset_before_collect_begins_anew_with_the_given_keywords(kind, shared):
    envs = kind.groups * B
    for asked in ({"n_step": 4 * envs}, {"n_episode": 2 * envs, "surplus": "discard"}):
        shared.collect(n_step=envs)
        shared.collect(n_episode=1)
        batch = shared.collect_batch(
            **asked, reset_before_collect=True, reset_kwargs={"options": {"mark": 7}}
        ).batch
        assert_accounted(shared)
        obs = batch["observation"][valid(batch)]
        for env in obs[:, 0].unique():
            of_env = obs[obs[:, 0] == env]
            assert of_env[0, 2] == 0, "of a whole episode"
            marked = of_env[:, 1] == of_env[0, 1]
            assert (of_env[:, 3] == torch.where(marked, 7.0, 0.0)).all(), (
                "they are for this reset alone"
            )


@pytest.mark.parametrize("kind", ELSEWHERE, ids=named)
@pytest.mark.parametrize("random", [False, True])
def test_observation_action_next_observation_and_state_belong_together(kind, random):
    with make(kind, EchoEnv, remembering, seed=0) as c:
        for asked in ({"n_step": 30}, {"n_episode": 7}, {"n_step": 12}):
            batch = c.collect_batch(**asked, random=random).batch
            shown = valid(batch)
            obs, action, after = (
                batch[key][shown]
                for key in ("observation", "action", ("next", "observation"))
            )
            assert len(obs) >= asked.get("n_step", 7)
            assert torch.equal(after[:, 2:], action.reshape(-1, 4)), (
                "it is the action that the environment was given"
            )
            assert torch.equal(
                after[:, :2] - obs[:, :2],
                torch.tensor([[0.0, 1.0]]).expand(len(obs), 2),
            )
            if not random:
                t = obs[:, 1]
                assert torch.equal(action[:, 0], obs[:, :2])
                assert torch.equal(
                    action[:, 1], torch.stack([t, (t - 1).clamp(min=0)], -1)
                ), "its state is its own"
            assert_accounted(c)


# --- where it goes --------------------------------------------------------------------------------


def test_the_buffer_is_the_last_batch(shared):
    stats = shared.collect(n_step=12)
    first = shared.buffer
    assert int(valid(first).sum()) == stats.n_collected_steps
    copy = first.clone()
    stats = shared.collect(n_episode=3)
    assert shared.buffer.shape == (stats.n_collected_steps,)
    assert len(wholes(shared.buffer, LENGTHS)) == 3
    assert_same(first, copy)
    assert shared.collect_batch(n_step=12).batch is shared.buffer


@pytest.mark.parametrize("kind", MANY, ids=named)
def test_a_replay_buffer_takes_what_is_collected_and_total_frames_are_those_of_iteration(
    kind,
):
    buffer = Extends()
    with patterned(kind, replay_buffer=buffer, total_frames=2 * kind.frames) as c:
        assert c.buffer is buffer
        stats = c.collect(n_step=12)
        assert (
            sum(int(valid(batch).sum()) for batch in buffer.batches)
            == stats.n_collected_steps
        )
        assert list(c) == [None, None]
        stats = c.collect(n_episode=4)
        assert len(buffer.batches[-1]) == stats.n_collected_steps
        assert len(wholes(buffer.batches[-1], LENGTHS)) == 4
        assert list(c) == []
        assert c.collect(n_step=1).n_collected_steps >= 1
        assert c.buffer is buffer
        assert_accounted(c)


def knows_time(obs: torch.Tensor) -> Any:
    """Says what time it is in the episode, from 1 on."""
    return torch.zeros(obs.shape[:-1], dtype=torch.int64), {
        "time": obs[..., 2] + 1,
        "whole": obs[..., 2].long() + 1,
    }


def assert_known_or_not(batch: Any) -> torch.Tensor:
    """Rows in which the policy has acted have its columns, the others NaN and 0; returns which are
    which.
    """
    known, here = batch["whole"] > 0, valid(batch)
    assert torch.equal(
        batch["time"][known & here], batch["observation"][..., 2][known & here] + 1
    )
    assert batch["time"][~known & here].isnan().all()
    return known[here]


@pytest.mark.parametrize("kind", MANY, ids=named)
def test_random_steps_have_the_columns_of_the_policy(kind):
    random = 3 * kind.frames
    with patterned(kind, knows_time, init_random_frames=random) as c:
        assert not assert_known_or_not(c.next()).any()
        for amount in (
            {"n_step": 20},
            {"n_episode": 8},
            {"n_step": 3 * kind.frames + 1},
            {"n_episode": 3},
        ):
            assert_known_or_not(c.collect_batch(**amount)[0])
            assert_accounted(c)
        assert assert_known_or_not(c.rollout()).any()
        assert not assert_known_or_not(c.collect_batch(n_step=8, random=True)[0]).any()
        assert not assert_known_or_not(
            c.collect_batch(n_episode=2, random=True)[0]
        ).any()
        assert_known_or_not(c.next())
        assert_accounted(c)


@pytest.mark.parametrize("kind", A_FEW, ids=named)
def test_episodes_that_begin_at_random_are_whole(kind):
    options = {"init_random_frames": 2 * kind.frames, "trajs_per_batch": 4}
    with patterned(kind, knows_time, **options) as c:
        known = []
        while not (known and known[-1].all()):
            batch = c.next()
            known.append(assert_known_or_not(batch))
            assert len(wholes(batch, LENGTHS)) == 4
            assert_accounted(c)
        assert not known[0].all()


def test_no_frames_per_batch_are_needed_but_for_iteration(shared):
    for use in (iter, lambda c: c.next(), lambda c: c.rollout()):
        with pytest.raises(BadOption, match="frames_per_batch"):
            use(shared)
    assert shared.collect(n_step=12).n_collected_steps >= 12


# --- errors ---------------------------------------------------------------------------------------


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "n_step"),
    ({"n_step": 3, "n_episode": 3}, "n_step"),
    ({"n_step": 0}, "n_step=0"),
    ({"n_step": -1}, "n_step=-1"),
    ({"n_step": True}, "n_step=True"),
    ({"n_step": 2.5}, "n_step=2.5"),
    ({"n_episode": 0}, "n_episode=0"),
    ({"n_episode": "3"}, "n_episode='3'"),
    ({"n_episode": False}, "n_episode=False"),
    ({"n_episode": 3, "rule": "quickest"}, "quickest"),
    ({"n_episode": 3, "surplus": "burn"}, "burn"),
    ({"n_step": 3, "bootstrap": "sometimes"}, "sometimes"),
    ({"n_step": 3, "bootstrap": True, "random": True}, "bootstrap"),
    ({"n_episode": 3, "bootstrap": True}, "bootstrap"),
    ({"n_step": 3, "rule": "fair"}, "n_episode"),
    ({"n_step": 3, "surplus": "keep"}, "n_episode"),
    ({"n_step": 3, "random": 1}, "random"),
    ({"n_step": 3, "no_grad": None}, "no_grad"),
    ({"n_step": 3, "reset_before_collect": "yes"}, "reset_before_collect"),
    ({"n_step": 3, "reset_kwargs": {"options": {}}}, "reset_before_collect"),
    ({"n_step": 3, "render": -1.0}, "render"),
]


def test_what_makes_no_sense_is_refused_before_anything_is_stepped(shared):
    before = shared.stats()
    for asked, said in WRONG:
        for call in (shared.collect, shared.collect_batch):
            with pytest.raises(BadOption, match=said):
                call(**asked)
    after = shared.stats()
    assert (after.executed, after.discarded) == (before.executed, before.discarded)


@pytest.mark.parametrize("kind", [*MANY, ON_RAY[1]], ids=named)
@pytest.mark.parametrize("amount", ["n_step", "n_episode"])
def test_an_error_of_an_environment_loses_nothing_that_was_complete(kind, amount):
    """Each environment of the last group raises at its 6th step."""
    whole, bad = partial(PatternEnv, LENGTHS), partial(PatternEnv, LENGTHS, 5)
    with make(kind, [whole, whole, bad], Guess(), seed=0) as c:
        errors, collected, steps = 0, 0, 0
        while errors < B or collected < 72:
            try:
                stats = c.collect(**{amount: 36})
            except EnvError as error:
                errors += isinstance(error.__cause__, ValueError)
            else:
                collected += (
                    stats.n_collected_steps
                    if amount == "n_step"
                    else stats.n_collected_episodes
                )
                steps += stats.n_collected_steps
                assert steps == c.stats().frames, (
                    "what was made before an error is not lost"
                )
            assert_accounted(c)
        assert errors == B
        assert collected == 72 or kind.alone
        c.collect(
            n_episode=1, surplus="discard"
        )  # episodes that errors have cut are truncated ones
        assert len(wholes(c.collect_batch(n_episode=36).batch, LENGTHS)) == 36
        assert_accounted(c)


# --- state ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", A_FEW, ids=named)
def test_kept_episodes_are_in_the_state(kind, tmp_path):
    asked = {"rule": "first_done", "surplus": "keep"}
    with only_on_demand(kind) as first, only_on_demand(kind) as second:
        delivered = sum(
            first.collect(**amount).n_collected_steps
            for amount in ({"n_step": 5}, {"n_episode": 3, **asked})
        )
        muster.save_state(tmp_path / "state", first.state_dict())
        second.collect(
            n_episode=1, surplus="keep"
        )  # what it has made before does not matter
        assert second.load_state_dict(tmp_path / "state").exact
        a, b = first.stats(), second.stats()
        assert (a.frames, a.executed, a.in_flight) == (
            b.frames,
            b.executed,
            b.in_flight,
        )
        assert a.frames == delivered
        found = [c.collect_batch(n_episode=8, **asked) for c in (first, second)]
        if not kind.alone:
            assert_same(found[0].batch, found[1].batch)
        for c, (batch, stats) in zip((first, second), found, strict=True):
            assert_stats(stats, wholes(batch, LENGTHS))
            assert stats.n_discarded_steps == 0
            assert c.stats().frames == delivered + stats.n_collected_steps
            assert_accounted(c)
            c.collect(n_episode=2, surplus="discard")
            assert c.stats().in_flight == 0
            assert_accounted(c)


# --- bootstrap ------------------------------------------------------------------------------------


def worth(obs: torch.Tensor) -> torch.Tensor:
    return (obs * torch.tensor([100.0, 10.0, 1.0, 0.0])).sum(-1, keepdim=True) + 1


@pytest.mark.parametrize("bootstrap", [True, "truncations"])
def test_bootstrap_is_the_value_of_the_true_last_observation_and_changes_nothing(
    kind, shared, bootstrap
):
    parts: list[list[Any]] = []
    for wanted in (bootstrap, False):
        shared.set_seed(0)
        parts.append(
            [
                shared.collect_batch(n_step=4 * kind.frames, bootstrap=wanted)
                for _ in range(2)
            ]
        )
    for batch, stats in parts[0]:
        after, over = batch["next", "observation"], batch["next", "terminated"]
        assert torch.equal(
            stats.last_value_est, worth(after[..., -1, :]) * ~over[..., -1, :]
        )
        cut = batch["next", "truncated"] & ~over & (bootstrap == "truncations")
        cut[..., -1, :] |= ~over[..., -1, :]
        assert torch.equal(
            batch["next", "state_value"],
            torch.where(cut, worth(after), torch.zeros(())),
        )
    if not kind.alone:
        for (batch, _), (other, stats) in zip(*parts, strict=True):
            assert_same(batch, other, ignore=[("next", "state_value"), IDS])
            assert stats.last_value_est is None


@pytest.mark.parametrize("kind", A_FEW, ids=named)
def test_bootstrap_needs_values(kind):
    with make(kind, partial(PatternEnv, LENGTHS), Actor(), seed=0) as c:
        with pytest.raises(BadOption, match="state_value"):
            c.collect(n_step=kind.frames, bootstrap=True)
        assert c.collect(n_step=kind.frames).n_collected_steps >= kind.frames
        assert_accounted(c)


class Drawing(gymnasium.Env[Any, Any]):
    """Draws from its generator in every step and reset, so that one more of either changes all that
    follows.
    """

    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self.np_random.random(1, np.float32), {}

    def step(self, action: Any) -> Any:
        return (
            self.np_random.random(1, np.float32),
            0.0,
            bool(self.np_random.random() < 0.2),
            False,
            {},
        )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("surplus", ["discard", "keep"])
@pytest.mark.parametrize("groups", [1, 2])
def test_what_follows_a_call_for_episodes_does_not_depend_on_where_environments_run(
    groups, surplus, rule
):
    def data(cls: Any, *, resets: bool, **where: Any) -> Any:
        options = {"num_envs": 2, "frames_per_batch": 8 * groups, "seed": 0, **where}
        with cls([Drawing] * groups, None, **options) as collector:
            calls = [
                collector.collect_batch(n_episode=3, surplus=surplus, rule=rule).batch
            ]
            if resets:
                collector.reset([0])
            calls += [
                collector.collect_batch(n_step=8).batch,
                collector.collect_batch(n_episode=2).batch,
            ]
            stats = collector.stats()
            return (
                [batch["observation"].flatten().tolist() for batch in calls],
                stats.executed,
                stats.discarded,
            )

    for resets in (False, True):
        expected = data(Collector, resets=resets)
        assert (
            data(MultiSyncCollector, resets=resets, backend="threads", num_workers=1)
            == expected
        )
        assert (
            data(
                MultiSyncCollector, resets=resets, backend="threads", num_workers=groups
            )
            == expected
        )
