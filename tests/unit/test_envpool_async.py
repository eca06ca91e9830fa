"""Asynchronous EnvPools fill rows in any order of readiness, and give the batches of synchronous
ones.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from muster import Collector, MultiAsyncCollector, MultiSyncCollector, policies
from muster.envs.envpool import adapt
from muster.envs.envpool_async import AsyncPoolEnvs
from muster.errors import BadEnvOutput, BadOption, EnvError, PolicyError, UnsupportedEnv
from muster.testing import ChainEnv, CountingEnv, EnvContract
from tests.fakes.envpool import GymnasiumEnvPool
from tests.fakes.telling import Counts
from tests.tools import assert_accounted, assert_chain, assert_same, collect, column
from tests.warned import warnings_are_errors

NO_PARTIAL_RESETS = (
    "EnvPool resets single environments only at the ends of their episodes"
)


def pools(
    num_envs: int = 5, batch_size: int = 2, make: Any = ChainEnv, **options: Any
) -> tuple[Any, list[Any]]:
    """A factory of env batches of pools (synchronous if ``batch_size`` is ``num_envs``), and those
    that it made.
    """
    made: list[Any] = []

    def factory() -> Any:
        pool = GymnasiumEnvPool(
            make, num_envs, batch_size=batch_size, **{"seed": 0, **options}
        )
        made.append(adapt([pool], None))
        return made[-1]

    return factory, made


def pool(*sizes: Any, **options: Any) -> Any:
    return pools(*sizes, **options)[0]


def follow(obs: Any) -> Any:
    """A policy that depends on the observation alone: each environment has the same actions in any
    order.
    """
    return (obs[:, 1] + obs[:, 2]) % 2


@pytest.mark.filterwarnings("ignore:EnvPool cannot be seeded")
class TestContract(EnvContract):
    num_envs = None

    def make_env(self) -> Any:
        return pool()()

    def test_time_limits_truncate_and_count(self) -> None:
        with pytest.raises(BadOption, match="max_episode_steps"):
            self.collect(max_frames_per_traj=3)

    def test_neither_the_size_of_batches_nor_their_layout_changes_the_data(
        self,
    ) -> None:
        """True only of policies that draw no random numbers, which are tested below."""

    def test_every_step_is_accounted_for(self) -> None:
        """A reset discards steps made ahead; see below."""


# --- the rows are those of a synchronous pool -----------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_order_of_readiness_gives_the_batches_of_a_synchronous_pool(data):
    n = data.draw(st.integers(2, 7), "num_envs")
    m = data.draw(st.integers(1, n - 1), "batch_size")
    order = data.draw(st.integers(0, 1000), "order")
    late = data.draw(st.sets(st.integers(0, n - 1), max_size=2), "late")
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=n, max_size=n), "lengths")
    options: Any = {
        "frames_per_batch": n * data.draw(st.integers(1, 12), "T"),
        "batches": 3,
        "seed": 0,
    }
    options |= data.draw(
        st.sampled_from([{}, {"compact_obs": True}, {"set_truncated": True}]), "options"
    )
    if data.draw(st.booleans(), "chains"):
        make, act = ChainEnv, follow
    else:
        make, act = iter([*map(CountingEnv, lengths)] * 2).__next__, None
        act = lambda obs: obs[:, 1].long() % 2  # noqa: E731
    alone = collect(pool(n, n, make=make), act, **options)
    factory, made = pools(n, m, make=make, order=order)
    env = factory()
    env.objects()[0].late = late
    assert_same(collect(env, act, **options), alone)
    assert made[0]._rows.size <= 64, "environments that are ahead wait for the others"


def test_expected_rows():
    lengths = iter([2, 3, 9])
    factory, made = pools(3, 2, make=lambda: CountingEnv(next(lengths)))
    batch = collect(
        factory,
        lambda obs: torch.zeros(len(obs), dtype=torch.int64),
        frames_per_batch=15,
        batches=2,
    )
    assert column(batch, "next", "reward") == [
        [1, 2] * 5,
        [1, 2, 3] * 3 + [1],
        [1, 2, 3, 4, 5, 6, 7, 8, 9, 1],
    ]
    assert batch["observation"][1].tolist() == [[3, t] for t in [0, 1, 2] * 3 + [0]]
    assert batch["next", "observation"][1].tolist() == [
        [3, t] for t in [1, 2, 3] * 3 + [1]
    ]
    assert column(batch, "next", "terminated")[1] == [False, False, True] * 3 + [False]
    assert batch["collector", "traj_ids"].tolist() == [
        [0, 0, 3, 3, 6, 6, 9, 9, 12, 12],
        [1, 1, 1, 4, 4, 4, 7, 7, 7, 10],
        [2] * 9 + [5],
    ]
    assert made[0].objects()[0].resets == [[0, 1, 2]], (
        "finished environments are reset by the pool, in their next step"
    )


def test_the_policy_acts_for_the_ready_environments_only_and_no_call_more_than_the_pool_returns():
    sizes: list[int] = []

    def act(obs: Any) -> Any:
        sizes.append(len(obs))
        return follow(obs)

    factory, made = pools(6, 2)
    with Collector(factory, act, frames_per_batch=60) as collector:
        collector.rollout()
        assert set(sizes) == {2}
        # The first call finds the columns, and the last results wait for the next batch.
        assert len(sizes) == made[0].objects()[0].batches


def remembers(obs: Any, state: Any) -> Any:
    """Adds up what it has seen since the start of the episode."""
    total = obs[:, 1:2].float() + 1 + (0 if state is None else state)
    return total[:, 0].long() % 2, {"seen": total.clone()}, total


class Remembers:
    """The same, which looks where episodes begin."""

    in_keys, out_keys = ("observation", "sum", "is_init"), ("action", ("next", "sum"))

    def __call__(self, tensordict: Any) -> Any:
        total = (
            tensordict["sum"]
            if "sum" in tensordict.keys()  # noqa: SIM118
            else torch.zeros(len(tensordict))
        )
        total = (
            torch.where(tensordict["is_init"][..., 0], 0.0, total)
            + tensordict["observation"][:, 1]
            + 1
        )
        return tensordict.set("action", total.long() % 2).set(("next", "sum"), total)


@pytest.mark.parametrize("policy", [remembers, Remembers()], ids=["state", "is_init"])
def test_recurrent_states_stay_with_their_environments(policy):
    options: Any = {"frames_per_batch": 40, "batches": 3, "seed": 0}
    alone = collect(pool(5, 5), policy, **options)
    assert_same(collect(pool(5, 3, order=1), policy, **options), alone)
    assert len(alone["action"].unique()) == 2


@pytest.mark.parametrize("random", [0, 12], ids=["", "after random frames"])
def test_stored_states_are_those_that_the_policy_began_with(random: int) -> None:
    policy = policies.recurrent(Counts(), initial_state="h0")
    batch = collect(
        pool(4, 2, partial(CountingEnv, 9)),
        policy,
        frames_per_batch=12,
        batches=6,
        init_random_frames=random,
        seed=0,
    )
    assert batch["is_init"][..., 0].int()[0].tolist() == [1, *[0] * 8] * 2
    for states, seen in zip(
        batch["recurrent_state"][..., 0].tolist(),
        batch["seen"][..., 0].tolist(),
        strict=True,
    ):
        of_policy = next(t for t, value in enumerate(seen) if value == value)
        # some environments are ahead when the policy begins to act
        assert random // 4 <= of_policy < (9 if random else 1)
        assert states[:of_policy] == [0.0] * of_policy
        expected = [5.0 + t for t in range(9 - of_policy)] + [5.0 + t for t in range(9)]
        assert states[of_policy:] == seen[of_policy:] == expected


def test_the_version_of_each_row_is_that_of_the_weights_that_acted():
    net = nn.Linear(3, 2)

    def act(obs: Any) -> Any:
        return follow(obs), {"bias": net.bias[:1].expand(len(obs)).clone()}

    factory, _ = pools(6, 2)
    with (
        torch.no_grad(),
        Collector(
            factory, act, frames_per_batch=30, track_policy_version=True
        ) as collector,
    ):
        for version in range(4):
            net.bias.fill_(collector.policy_version if version else 0)
            batch = collector.rollout()
            assert (batch["bias"] == batch["collector", "policy_version"]).all()
            collector.update_policy_weights_()
        assert len(batch["collector", "policy_version"].unique()) > 1, (
            "some rows were made ahead of their batch"
        )


# --- counts, errors, resets -----------------------------------------------------------------------


class Counted(ChainEnv):
    steps = 0

    def step(self, action: Any) -> Any:
        type(self).steps += 1
        return super().step(action)


def ahead_of(env: Any) -> int:
    """The number of steps that the pool has made, and that are in no batch yet."""
    return env._ahead - int(np.count_nonzero(env._running & ~env._rows.over))


@pytest.mark.parametrize("batch_size", [2, 3, 4])
def test_a_reset_discards_the_steps_made_ahead_and_counts_them(batch_size):
    Counted.steps = 0
    env = pool(5, batch_size, make=Counted)()
    with Collector(env, follow, frames_per_batch=20) as collector:
        for _ in range(3):
            assert_chain(collector.rollout())
            collector.reset()
        collector.rollout()
        stats = collector.stats()
        assert_accounted(collector)
        assert stats.frames == 80
        assert set(stats.discarded) == {"reset"}
        assert stats.executed + ahead_of(env) == Counted.steps


def test_after_an_error_of_the_policy_the_batch_continues_without_a_lost_row():
    options: Any = {"frames_per_batch": 40, "seed": 0}
    calls = iter(range(10_000))

    def act(obs: Any) -> Any:
        if next(calls) in (9, 20):
            raise ValueError("not today")
        return follow(obs)

    with Collector(pool(order=3), act, **options) as collector:
        parts, failures = [], 0
        while len(parts) < 3:
            try:
                parts.append(collector.rollout().clone())
            except PolicyError:
                failures += 1
        assert failures == 2
        assert not collector.stats().discarded
    assert_same(torch.cat(parts, 1), collect(pool(5, 5), follow, batches=3, **options))


def test_after_an_error_of_the_pool_its_steps_are_counted_and_it_is_reset():
    Counted.steps = 0
    factory, made = pools(make=Counted)
    with Collector(factory, follow, frames_per_batch=40) as collector:
        collector.rollout()
        made[0].objects()[0].fails = True
        with pytest.raises(
            EnvError, match="GymnasiumEnvPool.recv raised RuntimeError: the pool failed"
        ):
            collector.rollout()
        for _ in range(2):
            assert (collector.rollout()["next", "observation"][..., 1] > 0).all()
        assert_accounted(collector)
        stats = collector.stats()
        assert stats.frames == 120
        assert stats.discarded["env_error"] > 0
        assert stats.executed + ahead_of(made[0]) == Counted.steps


def test_results_of_environments_that_did_not_act_are_refused():
    env = pool(5, 2)()
    with Collector(env, follow, frames_per_batch=10) as collector:
        collector.rollout()
        env._running[:] = False
        with pytest.raises(
            BadEnvOutput,
            match=r"recv returned the environments \[.*\], expected 2 of \[",
        ):
            collector.rollout()


def test_environments_wait_for_one_that_is_late():
    env = pool(6, 2)()
    env.objects()[0].late = {5}
    with Collector(env, follow, frames_per_batch=600) as collector:
        for _ in range(2):
            assert_chain(collector.rollout())
        assert env._rows.steps.max() <= 100 + 6


def test_a_loaded_collector_resets_the_pool_and_says_so():
    with Collector(pool(), follow, frames_per_batch=10) as collector:
        collector.rollout()
        state = collector.state_dict()
    with Collector(pool(), follow, frames_per_batch=10) as other:
        reasons = other.load_state_dict(state)
        assert "keeps state outside its __dict__" in str(reasons)
        batch = other.rollout()
        assert (batch["observation"][:, 0, 1] == 0).all(), "all episodes are new"
        assert_accounted(other)


def test_rows_of_other_columns_need_a_reset():
    env = pool()()
    from muster.memory.specs import Column

    float32 = np.dtype(np.float32)
    assert env._rows.hold([Column(("a",), (), float32)], ()) is False
    assert env._rows.hold([Column(("a",), (), float32)], ()) is True


def test_values_of_next_observations_and_whole_episodes():
    act = lambda obs: (follow(obs), {"state_value": obs[:, 1].float() * 10})  # noqa: E731
    options: Any
    for options in [{"n_step": 10, "bootstrap": "truncations"}, {"n_episode": 7}]:
        with (
            Collector(pool(), act, seed=0) as one,
            Collector(pool(5, 5), act, seed=0) as other,
        ):
            (batch, stats), (expected, told) = (
                one.collect_batch(**options),
                other.collect_batch(**options),
            )
            assert_same(batch, expected)
            if "bootstrap" in options:
                assert torch.equal(stats.last_value_est, told.last_value_est)


# --- other collectors, and what is refused --------------------------------------------------------


def test_pools_in_threads():
    options: Any = {"frames_per_batch": 40, "seed": 0, "backend": "threads"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with MultiSyncCollector(
            [pool(), pool(order=1)], follow, **options
        ) as collector:
            assert_chain(collector.rollout())
        with MultiAsyncCollector(
            [pool(), pool(order=1)], follow, **options
        ) as collector:
            for _ in range(4):
                assert_chain(collector.rollout())
            assert_accounted(collector)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_frames_per_traj", 3),
        ("reset_when_done", False),
        ("max_decorrelation_steps", 2),
        ("prev_action_reward", True),
    ],
)
def test_options_that_reset_or_read_single_environments_are_refused(option, value):
    with pytest.raises(
        BadOption,
        match=rf"{option}.*asynchronous \(batch_size=2 of num_envs=5\).*leave batch_size out",
    ):
        Collector(pool(), follow, frames_per_batch=10, **{option: value})


def test_a_server_cannot_act_for_a_pool():
    with pytest.raises(BadOption, match="calls the policy itself"):
        MultiSyncCollector(
            [pool()], follow, frames_per_batch=10, backend="threads", inference="server"
        )


def test_single_environments_cannot_be_reset_and_others_cannot_step_the_pool():
    env = pool()()
    assert isinstance(env, AsyncPoolEnvs)
    with pytest.raises(UnsupportedEnv, match=NO_PARTIAL_RESETS):
        env.reset({}, 0, [1], None)
    with pytest.raises(UnsupportedEnv, match="steps all environments at the same time"):
        env.start(None)  # type: ignore[arg-type]


def test_infos_are_refused():
    with pytest.raises(BadOption, match="info"):
        Collector(pool(), follow, frames_per_batch=10, info=True)


def test_another_seed_than_that_of_the_pool_is_reported_once():
    with pytest.warns(
        UserWarning,
        match=r"made with the seeds \[7, 8, 9\].*although \[1, 2, 3\]... were asked for",
    ):
        collect(pool(seed=7), follow, frames_per_batch=10, seed=1)
    with warnings_are_errors():
        collect(pool(seed=7), follow, frames_per_batch=10, seed=7)


# --- the real package -----------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [3, 5, 7])
def test_a_real_pool_gives_the_batches_of_a_synchronous_one(batch_size):
    envpool = pytest.importorskip("envpool")
    make = partial(
        envpool.make_gymnasium,
        "CartPole-v1",
        num_envs=8,
        seed=3,
        max_episode_steps=30,
        num_threads=2,
    )
    act = lambda obs: (obs[:, 2] + obs[:, 3] / 2 > 0).long()  # noqa: E731
    options: Any = {"frames_per_batch": 400, "batches": 4, "seed": 3}
    alone = collect(make, act, **options)
    assert_same(collect(partial(make, batch_size=batch_size), act, **options), alone)
    assert alone["next", "done"].sum() > 40
    with Collector(
        partial(make, batch_size=batch_size), None, frames_per_batch=400, seed=3
    ) as collector:
        for _ in range(3):
            collector.rollout()
            collector.reset()
        assert_accounted(collector)
