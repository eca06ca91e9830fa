"""Rollouts of random actions: they have the columns of the policy, which goes on from them as from
a new episode.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import nn

from muster import Collector, MultiSyncCollector, policies
from muster.errors import PolicyError
from tests.tools import assert_accounted, assert_same, counting

LENGTH, B, T = 5, 2, 4


def zeros(obs: torch.Tensor) -> torch.Tensor:
    return torch.zeros(obs.shape[:-1], dtype=torch.int64)


def several_kinds(obs: torch.Tensor) -> Any:
    t = obs[..., 1]
    return zeros(obs), {
        "value": t + 1,
        "wide": obs.double() + 1,
        "whole": t.long() + 1,
        "flag": t >= 0,
    }


def remembers(obs: torch.Tensor, state: Any) -> Any:
    """Counts its calls in an episode, and says what it has read."""
    read = torch.zeros_like(obs[..., :1]) if state is None else state
    return zeros(obs), {"value": read.clone(), "whole": read.long() + 1}, read + 1


class Reads(TensorDictModuleBase):
    """The same on TensorDicts, with ``is_init``; in its extras it is as it was read."""

    in_keys = ("observation", "hidden", "is_init")
    out_keys = ("action", "value", "whole", "began", ("next", "hidden"))

    def forward(self, td: Any) -> Any:
        begins = td["is_init"]
        hidden = torch.where(begins, 0.0, td.get("hidden", torch.zeros(begins.shape)))
        td.update(
            {
                "action": zeros(td["observation"]),
                "value": hidden,
                "whole": hidden.long() + 1,
            }
        )
        td.update({"began": begins.clone(), "next": {"hidden": hidden + 1}})
        return td


def on_tensordicts(obs: torch.Tensor) -> Any:
    return zeros(obs), obs[..., 1], obs[..., 1].long() + 1


def module() -> TensorDictModule:
    return TensorDictModule(
        on_tensordicts,
        in_keys=["observation"],
        out_keys=["action", "value", ("deep", "whole")],
    )


POLICIES: dict[str, Any] = {
    "head": lambda: policies.categorical(nn.Linear(2, 2)),
    "extras": lambda: several_kinds,
    "remembers": lambda: remembers,
    "module": module,
    "recurrent module": Reads,
}


def make(policy: Any, **options: Any) -> Any:
    common = {
        "num_envs": B,
        "frames_per_batch": B * T,
        "init_random_frames": B * T,
        "seed": 0,
    }
    return Collector(counting(LENGTH), policy, **common | options)


def assert_unknown(batch: Any, policy: Any) -> None:
    """These rows have what the policy returns, and none of it is known."""
    with Collector(counting(LENGTH), policy(), num_envs=B, frames_per_batch=B * T) as c:
        shown = c.next()
    assert set(batch.keys(True, True)) == set(shown.keys(True, True))
    for key in {
        "action_log_prob",
        "value",
        "wide",
        "whole",
        "flag",
        "began",
        ("deep", "whole"),
    } & {*shown.keys(True)}:
        values = batch[key]
        assert values.dtype == shown[key].dtype
        assert (values.isnan() if values.is_floating_point() else values == 0).all(), (
            key
        )


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_random_rows_have_the_columns_of_the_policy(policy):
    with make(policy()) as c:
        batch = c.next()
        assert batch["observation"][..., 1].tolist() == [[0, 1, 2, 3]] * B
        assert_unknown(batch, policy)
        assert not any(
            value.isnan().any()
            for value in c.next().values(True, True)
            if value.is_floating_point()
        )
        assert_unknown(c.collect_batch(n_step=B * T, random=True)[0], policy)
        assert_unknown(
            c.collect_batch(n_episode=B, random=True)[0].reshape(B, LENGTH), policy
        )


def test_an_episode_that_began_at_random_goes_on_with_a_new_state():
    with make(remembers) as c:
        random, later = c.next(), c.next()
        assert random["value"].isnan().all()
        assert random["whole"].squeeze(-1).tolist() == [[0] * T] * B
        assert random["recurrent_state"].squeeze(-1).tolist() == [[0] * T] * B
        assert later["observation"][..., 1].tolist() == [[4, 0, 1, 2]] * B
        assert later["value"].squeeze(-1).tolist() == [[0, 0, 1, 2]] * B
        assert c.next()["value"].squeeze(-1).tolist() == [[3, 4, 0, 1]] * B
        again = c.collect_batch(n_step=B * T, random=True)[0]
        assert again["recurrent_state"].squeeze(-1).tolist() == [[2, 0, 0, 0]] * B
        assert again["observation"][..., 1].tolist() == [[2, 3, 4, 0]] * B
        assert c.next()["value"].squeeze(-1).tolist() == [[0, 1, 2, 3]] * B, (
            "not with what it knew before"
        )


def test_a_module_is_told_whether_an_episode_begins_where_it_begins_to_act():
    with make(Reads()) as c:
        random, later = c.next(), c.next()
        assert (
            random["is_init"].squeeze(-1).tolist() == [[True, False, False, False]] * B
        )
        assert random["hidden"].squeeze(-1).tolist() == [[0] * T] * B
        for key in ("is_init", "began"):
            assert (
                later[key].squeeze(-1).tolist() == [[False, True, False, False]] * B
            ), key
        assert later["value"].squeeze(-1).tolist() == [[0, 0, 1, 2]] * B
        assert later["hidden"].squeeze(-1).tolist() == [[0, 0, 1, 2]] * B


def test_objects_of_a_policy_are_none():
    with make(_Names()) as c:
        assert c.next()["why"] == [[None] * T] * B
        assert c.next()["why"] == [["because"] * T] * B


class _Names(TensorDictModuleBase):
    in_keys, out_keys = ("observation",), ("action", "why")

    def forward(self, td: Any) -> Any:
        td["action"] = zeros(td["observation"])
        td["why"] = ["because"] * B
        return td


class _Counts(nn.Module):
    """Draws from the global generators, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, obs: torch.Tensor) -> Any:
        self.calls += 1
        draw = torch.rand(obs.shape[:-1]) + np.random.rand()
        return zeros(obs), {"draw": draw}


def test_the_call_that_shows_the_columns_moves_no_random_stream():
    policy = _Counts()
    with make(policy) as c, make(_Counts(), init_random_frames=None) as other:
        c.next()
        assert policy.calls == 1
        assert torch.equal(c.next()["draw"], other.next()["draw"])
        assert policy.calls == 1 + T


def test_an_error_of_that_call_is_the_policy_s_and_loses_nothing():
    broken = [True]

    def policy(obs: torch.Tensor) -> Any:
        if broken:
            raise ValueError("no weights yet")
        return several_kinds(obs)

    with make(policy) as c:
        with pytest.raises(PolicyError, match="no weights yet"):
            c.next()
        assert c.stats().executed == 0
        broken.clear()
        assert c.next()["value"].isnan().all()
        assert_accounted(c)


@pytest.mark.parametrize(
    "where",
    [{}, {"num_workers": 2}, {"inference": "server"}, {"backend": "threads"}],
    ids=str,
)
def test_workers_give_the_same_random_rows(where):
    options = {
        "num_envs": 1,
        "frames_per_batch": 16,
        "init_random_frames": 32,
        "trajs_per_batch": 4,
        "seed": 0,
    }
    with (
        Collector([counting(LENGTH)] * 2, remembers, **options) as c,
        MultiSyncCollector(
            [counting(LENGTH)] * 2, remembers, **options, **where
        ) as other,
    ):
        for _ in range(3):
            batch = c.next()
            assert len(batch) == 4 * LENGTH
            assert_same(batch, other.next())
            assert_accounted(other)


CALLS: dict[str, Any] = {
    "next": lambda c: c.next(),
    "rollout": lambda c: c.rollout(),
    "steps": lambda c: c.collect_batch(n_step=7)[0],
    "random steps": lambda c: c.collect_batch(n_step=8, random=True)[0],
    "episodes": lambda c: c.collect_batch(n_episode=3, surplus="keep")[0],
    "random episodes": lambda c: c.collect_batch(n_episode=2, random=True)[0],
}


@given(
    policy=st.sampled_from(["extras", "remembers", "recurrent module"]),
    random_frames=st.sampled_from([0, 5, 16, 40]),
    calls=st.lists(st.sampled_from(sorted(CALLS)), min_size=1, max_size=8),
)
def test_whatever_is_collected_every_row_is_known_or_not_and_every_frame_is_accounted_for(
    policy, random_frames, calls
):
    with make(POLICIES[policy](), init_random_frames=random_frames) as c:
        for call in calls:
            batch: TensorDict = CALLS[call](c)
            valid = batch.get(
                ("collector", "valid"), torch.ones(batch.shape, dtype=torch.bool)
            ).reshape(batch.shape)
            unknown = batch["value"].reshape(batch.shape).isnan()
            assert torch.equal(
                (batch["whole"].reshape(batch.shape) == 0) & valid, unknown & valid
            )
            if call.startswith("random"):
                assert unknown[valid].all()
            assert (
                batch["next", "observation"][..., 1] == batch["observation"][..., 1] + 1
            )[valid].all()
            assert_accounted(c)
