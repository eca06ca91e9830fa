"""``collect`` in this process: bootstrap values, resets, options that meet it, environments that
cannot rest.
"""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from muster import Collector, MultiSyncCollector
from muster.errors import BadOption, HookError, PolicyError
from muster.testing import CountingEnv, TorchCartPole
from tests.fakes.patterned import PatternEnv, contest, wholes
from tests.tools import assert_accounted, assert_same, recorded

LENGTHS = [[3], [1, 4], [2, 6]]


def make(policy: Any = None, lengths: Any = LENGTHS, **options: Any) -> Collector:
    return Collector(
        partial(PatternEnv, lengths),
        policy,
        **{"num_envs": len(lengths), "seed": 0, **options},
    )


class Guess(nn.Module):
    """Acts at random; knows what an observation is worth."""

    def __init__(self, inputs: int = 4) -> None:
        super().__init__()
        self.worth = nn.Parameter(torch.tensor([100.0, 10.0, 1.0, 0.0][:inputs]))

    def forward(self, obs: torch.Tensor) -> Any:
        value = (obs * self.worth).sum(-1, keepdim=True) + 1
        return torch.randint(2, obs.shape[:-1]), {"state_value": value}


def remembers(obs: Any, state: Any) -> Any:
    """Adds up what it has seen of time since its episode began, and says so as the value.

    Draws from all generators.
    """
    total = obs[..., 2:3] + 1 + (0 if state is None else state)
    noise = torch.full(obs.shape[:-1], np.random.randn() + random.random())
    return (
        torch.randint(2, obs.shape[:-1]),
        {"state_value": total.clone(), "noise": noise},
        total,
    )


# --- bootstrap ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bootstrap", [True, "truncations"])
@pytest.mark.parametrize("lengths", [LENGTHS, [[1, 4], [2]]])
def test_a_recurrent_policy_values_the_last_observation_with_its_state_and_goes_on_undisturbed(
    bootstrap, lengths
):
    B, cut_in_the_end = len(lengths), False
    with make(remembers, lengths) as c, make(remembers, lengths) as other:
        for n in (4 * B, B, 10 * B, B, B):
            batch, stats = c.collect_batch(n_step=n, bootstrap=bootstrap)
            t, values = batch["observation"][..., 2], batch["state_value"].squeeze(-1)
            assert torch.equal(values, (t + 1) * (t + 2) / 2), (
                "the state begins anew with every episode"
            )
            after = batch["next", "observation"][..., 2]
            worth = (after + 1) * (after + 2) / 2
            over, cut = (
                batch["next", flag].squeeze(-1) for flag in ("terminated", "truncated")
            )
            assert torch.equal(stats.last_value_est.squeeze(-1), (worth * ~over)[:, -1])
            cut_in_the_end |= bool(cut[:, -1].any())
            cut = cut & (bootstrap == "truncations")
            cut[:, -1] |= ~over[:, -1]
            assert torch.equal(batch["next", "state_value"].squeeze(-1), worth * cut)
            assert_same(
                batch,
                other.collect_batch(n_step=n).batch,
                ignore=[("next", "state_value")],
            )
    assert cut_in_the_end


def test_the_user_s_random_numbers_are_those_without_a_collector_for_random_actions_too():
    torch.manual_seed(3)
    np.random.seed(3)
    expected = torch.rand(3), np.random.rand(3)
    torch.manual_seed(3)
    np.random.seed(3)
    with make(Guess()) as c:
        c.collect(n_step=9, random=True)
        c.collect(n_episode=3, random=True, no_grad=False)
    assert torch.equal(torch.rand(3), expected[0])
    assert (np.random.rand(3) == expected[1]).all()


def test_a_single_environment_has_a_bootstrap_of_its_own():
    with make(Guess(), [[4]], num_envs=None) as c:
        batch, stats = c.collect_batch(n_step=6, bootstrap=True)
        assert batch.shape == (6,)
        assert stats.last_value_est.tolist() == [10 * 1 + 2 + 1]
        assert c.collect(n_step=2, bootstrap=True).last_value_est.tolist() == [
            10 + 4 + 1
        ], "truncated"
        c.collect(n_step=3)
        assert c.collect(n_step=1, bootstrap=True).last_value_est.tolist() == [0], (
            "terminated"
        )


# --- surplus --------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"trajs_per_batch": 3, "frames_per_batch": 2}])
def test_what_is_kept_for_the_next_call_is_discarded_at_shutdown(options):
    collector = Collector(partial(CountingEnv, 3), None, num_envs=2, **options)
    if options:
        collector.next()
    else:
        collector.collect(n_episode=1, surplus="keep")
    kept = collector.stats().in_flight
    assert kept > 0
    collector.shutdown()
    stats = collector.stats()
    assert (stats.in_flight, stats.discarded["shutdown"]) == (0, kept)
    assert_accounted(collector)


# --- with other options ---------------------------------------------------------------------------


def test_episodes_may_be_padded():
    with make(traj_format="pad") as c:
        batch, stats = c.collect_batch(n_episode=5)
        mask = batch["collector", "mask"]
        assert batch.shape == (5, int(stats.lens.max()))
        assert mask.sum(1).tolist() == stats.lens.tolist()
        assert stats.n_collected_steps == int(mask.sum())
        assert (batch["collector", "traj_ids"][~mask] == -1).all()
        assert_accounted(c)


def test_time_may_come_first():
    with make(layout="time_major") as c, make() as other:
        for n in (12, 7):
            batch, plain = (a.collect_batch(n_step=n).batch for a in (c, other))
            assert batch.shape == plain.shape[::-1]
            assert torch.equal(
                batch["observation"].transpose(0, 1), plain["observation"]
            )
        assert_same(
            c.collect_batch(n_episode=7).batch, other.collect_batch(n_episode=7).batch
        )


def test_a_mark_at_the_end_of_a_batch_ends_no_episode():
    with make(set_truncated=True) as c:
        assert c.collect(n_step=9).n_collected_steps == 9
        batch, stats = c.collect_batch(n_episode=8)
        ends = batch["next", "done"].squeeze(-1).nonzero().flatten().tolist()
        assert len(ends) == 8
        assert np.diff([-1, *ends]).tolist() == stats.lens.tolist()
        assert batch["observation"][:, 2].tolist() == [
            t for n in stats.lens for t in range(n)
        ]
        assert_accounted(c)


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({"reset_when_done": False}, {"n_episode": 3}),
        ({"compact_obs": True}, {"n_episode": 3}),
        ({"compact_obs": True}, {"n_step": 3, "bootstrap": True}),
        ({"return_same_td": True}, {"n_episode": 3}),
        ({"trajs_per_batch": 3}, {"n_step": 3}),
    ],
    ids=str,
)
def test_options_that_contradict_what_is_asked_for(options, asked):
    with make(Guess(), frames_per_batch=6, **options) as c:
        with pytest.raises(BadOption, match=next(iter(options))):
            c.collect(**asked)
        assert c.stats().executed == 0
        other = {"n_episode": 2} if "trajs_per_batch" in options else {"n_step": 6}
        assert c.collect(**other).n_collected_steps
        assert_accounted(c)


# --- environments ---------------------------------------------------------------------------------


def seen(c: Any, call: dict[str, Any]) -> Any:
    return c.collect_batch(**call).batch


@given(
    st.lists(
        st.lists(st.integers(1, 6), min_size=1, max_size=2), min_size=2, max_size=4
    ),
    st.lists(st.integers(1, 9), min_size=1, max_size=2),
    st.sampled_from(["fair", "last_even", "per_env", "first_done"]),
    st.sampled_from(AutoresetMode),
)
def test_batches_of_environments_that_cannot_rest_give_the_same_episodes(
    lengths, wanted, rule, mode
):
    env = lambda: SyncVectorEnv(  # noqa: E731
        [partial(PatternEnv, lengths)] * len(lengths), autoreset_mode=mode
    )
    with Collector(env, None, seed=0) as c:
        expected = contest(rule, wanted[0], lengths, [0] * len(lengths))
        assert (
            wholes(seen(c, {"n_episode": wanted[0], "rule": rule}), lengths)
            == expected.chosen
        )
        assert_accounted(c)
        for n in wanted[1:]:
            assert len(wholes(seen(c, {"n_episode": n, "rule": rule}), lengths)) == n
            assert_accounted(c)


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_batches_on_tensors(mode):
    with Collector(lambda: TorchCartPole(4, autoreset=mode), None, seed=0) as c:
        for rule in ("fair", "last_even", "per_env", "first_done"):
            batch = c.collect_batch(n_episode=6, rule=rule).batch
            ids = batch["collector", "traj_ids"]
            assert len(ids.unique()) == 6
            assert int(batch["next", "done"].sum()) == 6
            assert_accounted(c)
        assert c.collect(n_step=40).n_collected_steps == 40


# --- resets and rendering -------------------------------------------------------------------------


class Noting(PatternEnv):
    """Notes what its resets are given."""

    def __init__(self, lengths: Any = LENGTHS) -> None:
        super().__init__(lengths)
        self.resets: list[Any] = []

    def reset(self, **options: Any) -> Any:
        self.resets.append(options.get("options"))
        return super().reset(**options)


def test_an_environment_is_reset_no_more_often_than_it_must():
    factory, envs = recorded(Noting)
    with Collector(factory, None, num_envs=3, seed=0) as c:
        c.collect(n_episode=1, rule="per_env")
        assert [len(env.resets) for env in envs[-3:]] == [1, 1, 1]
        c.collect(n_episode=3)
        assert [len(env.resets) for env in envs[-3:]] == [2, 1, 1]
        c.collect(n_step=3)
        assert [len(env.resets) for env in envs[-3:]] == [3, 2, 2]


@pytest.mark.parametrize("amount", ["n_step", "n_episode"])
def test_rendering_shows_every_step_of_every_environment(amount):
    factory, envs = recorded(lambda: PatternEnv([[3], [3]]))
    with Collector(factory, None, num_envs=2, seed=0) as c:
        c.collect(**{amount: 6})
        assert [env.rendered for env in envs[-2:]] == [0, 0]
        before = [env.made for env in envs[-2:]]
        c.collect(**{amount: 6}, render=0.0)
        made = [env.made - n for env, n in zip(envs[-2:], before, strict=True)]
        assert [env.rendered for env in envs[-2:]] == made
        c.collect(**{amount: 6})
        assert [env.rendered for env in envs[-2:]] == made


# --- interruptions --------------------------------------------------------------------------------


class Once:
    """Refuses its second call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, batch: Any) -> None:
        self.calls += 1
        if self.calls == 2:
            raise ValueError("not now")


@pytest.mark.parametrize("asked", [{"n_step": 9}, {"n_episode": 4}], ids=str)
def test_what_a_hook_has_refused_comes_with_the_next_call_or_is_forgotten_by_a_load(
    asked,
):
    with make(Guess(), on_batch=Once()) as c, make(Guess()) as other:
        c.collect(n_step=6)
        state = c.state_dict()
        other.collect(n_step=6)
        with pytest.raises(HookError):
            c.collect(**asked)
        assert_accounted(c)
        assert c.stats().frames == 6
        executed = c.stats().executed
        batch = c.collect_batch(**asked).batch
        assert c.stats().executed == executed
        assert_same(batch, other.collect_batch(**asked).batch)
    with make(Guess(), on_batch=Once()) as c:
        c.collect(n_step=6)
        with pytest.raises(HookError):
            c.collect(**asked)
        c.load_state_dict(state)
        assert (c.stats().frames, c.stats().in_flight) == (6, 0)
        assert_accounted(c)
        assert c.collect(**asked).n_collected_steps == c.stats().frames - 6
        assert_accounted(c)


def fails_at_the_seventh_call() -> Any:
    calls = []

    def policy(obs: torch.Tensor) -> Any:
        calls.append(0)
        if len(calls) == 7:
            raise ValueError("no such observation")
        return torch.randint(2, obs.shape[:-1])

    return policy


@pytest.mark.parametrize(
    "asked", [{"n_step": 36}, {"n_episode": 12, "rule": "last_even"}], ids=str
)
def test_the_same_call_goes_on_after_an_error_and_another_one_begins_anew(asked):
    with (
        make(fails_at_the_seventh_call()) as c,
        make(lambda obs: torch.randint(2, obs.shape[:-1])) as other,
    ):
        with pytest.raises(PolicyError):
            c.collect(**asked)
        assert_accounted(c)
        assert_same(c.collect_batch(**asked).batch, other.collect_batch(**asked).batch)
        assert not +c.stats().discarded
        assert c.stats().executed == other.stats().executed
    with make(fails_at_the_seventh_call()) as c:
        with pytest.raises(PolicyError):
            c.collect(**asked)
        made = c.stats().executed
        assert c.collect(n_step=6).n_collected_steps == 6
        assert sum(c.stats().discarded.values()) == made
        assert_accounted(c)


# --- who is left out ------------------------------------------------------------------------------


def test_an_environment_that_is_left_out_keeps_the_seed_that_it_was_given():
    envs = [CountingEnv(4) for _ in range(3)]
    with Collector(lambda: envs.pop(0), None, num_envs=3) as c:
        made = c._engine.groups[0].env.objects()
        c.collect(n_step=3)
        c.set_seed(5)
        c.collect(n_episode=1, rule="per_env")
        assert [env.executed for env in made] == [5, 1, 1]
        assert [env.seeds[-1] for env in made] == [5, None, None]
        c.collect(n_step=3)
        assert [[seed for seed in env.seeds if seed is not None] for env in made] == [
            [5],
            [6],
            [7],
        ]


@pytest.mark.parametrize("cls", [Collector, MultiSyncCollector])
def test_a_group_that_has_given_its_episodes_makes_no_step_while_others_do(cls):
    with cls(
        [partial(CountingEnv, 3), partial(CountingEnv, 50)],
        None,
        num_envs=2,
        frames_per_batch=32,
    ) as c:
        for _ in range(2):
            stats = c.collect(n_episode=8, rule="per_env")
            assert sorted(stats.lens.tolist()) == [3] * 4 + [50] * 4
            assert stats.n_discarded_steps == 0
        assert c.stats().executed == c.stats().frames == 2 * 4 * 53
