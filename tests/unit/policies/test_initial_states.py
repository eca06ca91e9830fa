"""Recurrent states with which episodes begin, given by the policy (a learned h0)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from muster import Collector, MultiSyncCollector, ReplayMemory, policies
from muster.errors import BadOption, BadPolicyOutput
from tests.fakes.telling import Counts
from tests.tools import assert_same, counting


class Recurrent(nn.Module):
    """An LSTM of two layers: its state is a tuple of ``[2, B, 3]``, and it learns the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 3, num_layers=2)
        self.h0 = nn.Parameter(torch.arange(6.0).reshape(2, 3))
        self.c0 = nn.Parameter(-torch.ones(2, 3))

    def begin(self) -> Any:
        return self.h0, self.c0

    def forward(self, obs: torch.Tensor, state: Any) -> Any:
        out, state = self.lstm(obs.reshape(1, -1, 2), state)
        return out[0, ..., 0].gt(0).long().reshape(obs.shape[:-1]), state


def collected(policy: Any, batches: int = 1, **options: Any) -> list[Any]:
    given = {"num_envs": 2, "frames_per_batch": 16, "seed": 0, **options}
    with Collector(counting(3), policy, **given) as c:
        return [c.next().clone() for _ in range(batches)]


def test_states_of_several_parts_and_layers() -> None:
    torch.manual_seed(0)
    policy = policies.recurrent(Recurrent(), batch_dim=1, initial_state="begin")
    (batch,) = collected(policy)
    begins = batch["is_init"][..., 0]
    assert begins[0].tolist() == [True, False, False] * 2 + [True, False]
    for name, first in (("0", policy.h0), ("1", policy.c0)):
        states = batch["recurrent_state", name]
        assert states.shape == (2, 8, 2, 3)
        assert torch.equal(
            states[begins], first.detach().expand(int(begins.sum()), 2, 3)
        )
        assert not torch.equal(states[0, 1], first.detach())
    hidden = tuple(
        batch["recurrent_state", n][:, 0].movedim(0, 1).contiguous() for n in "01"
    )
    _, (h, _) = policy.lstm(batch["observation"][None, :, 0], hidden)
    torch.testing.assert_close(h.movedim(1, 0), batch["recurrent_state", "0"][:, 1])


@pytest.mark.parametrize("frames", [2, 6, 16])
def test_batches_of_any_length_are_the_same(frames: int) -> None:
    policy = policies.recurrent(Counts(), initial_state="h0")
    (expected,) = collected(policy, frames_per_batch=96)
    parts = collected(policy, 96 // frames, frames_per_batch=frames)
    assert_same(torch.cat(parts, -1), expected)


@pytest.mark.parametrize(
    "options",
    [
        {"reset_when_done": False},
        {"max_frames_per_traj": 2},
        {"compact_obs": True},
        {"num_envs": None},
        {"layout": "time_major"},
    ],
    ids=str,
)
def test_every_episode_begins_with_it(options: dict[str, Any]) -> None:
    policy = policies.recurrent(Counts(), initial_state="h0")
    for batch in collected(policy, 3, **options):
        begins = batch["is_init"][..., 0]
        if "reset_when_done" in options:
            begins = begins & batch["collector", "valid"]
        assert begins.any()
        assert batch["recurrent_state"][begins].unique(dim=0).tolist() == [[5.0, 70.0]]
        counts = batch["recurrent_state"][..., 0] - 5
        if "reset_when_done" not in options:
            assert torch.equal(counts, batch["observation"][..., 1])


def test_it_is_read_when_an_episode_starts() -> None:
    policy = policies.recurrent(Counts(), initial_state="h0")
    with Collector(counting(3), policy, num_envs=1, frames_per_batch=4) as c:
        c.next()
        with torch.no_grad():
            policy.h0.fill_(1.0)
        later = c.next()["recurrent_state"][0, :, 0].tolist()
    assert later == [6.0, 7.0, 1.0, 2.0]


# --- after random frames --------------------------------------------------------------------------

# two random steps, and then those of the policy in the same episode; and the next episode
CONTINUED = [0.0, 0.0, 5.0, 6.0, 7.0, 8.0, 5.0, 6.0]


@pytest.mark.parametrize("frames", [2, 4])
def test_the_first_step_after_random_frames_starts_from_it(frames: int) -> None:
    policy = policies.recurrent(Counts(), initial_state="h0")
    with Collector(
        counting(6), policy, num_envs=2, frames_per_batch=frames, init_random_frames=4
    ) as c:
        batches = [c.next().clone() for _ in range(16 // frames)]
    batch = torch.cat(batches, -1)
    for env in range(2):
        assert batch["recurrent_state"][env, :, 0].tolist() == CONTINUED
        assert batch["seen"][env, 2:, 0].tolist() == CONTINUED[2:], (
            "stored as it was used"
        )
        assert batch["is_init"][env, :, 0].int().tolist() == [1, 0, 0, 0, 0, 0, 1, 0]


def test_it_is_that_of_the_first_step_after_random_frames() -> None:
    policy = policies.recurrent(Counts(), initial_state="h0")
    with Collector(
        counting(6), policy, num_envs=1, frames_per_batch=2, init_random_frames=2
    ) as c:
        c.next()
        with torch.no_grad():
            policy.h0.fill_(1.0)
        assert c.next()["recurrent_state"][0, :, 0].tolist() == [1.0, 2.0]


def test_sequences_of_a_memory_have_it_after_random_frames() -> None:
    policy = policies.recurrent(Counts(), initial_state="h0")
    memory = ReplayMemory(16, keep=["recurrent_state"])
    with Collector(
        counting(6),
        policy,
        num_envs=2,
        frames_per_batch=2,
        init_random_frames=4,
        replay_buffer=memory,
    ) as c:
        for _ in range(8):
            c.next()
    assert memory.newest(16)["recurrent_state"][::2, 0].tolist() == CONTINUED
    sample = memory.sample(32, sequence=4, across_episodes=True)
    after_random = sample["recurrent_state"][..., 0] >= 5
    expected = 5 + sample["observation"][..., 1] - 2 * (sample["index"] < 12)
    assert after_random.any()
    assert torch.equal(
        sample["recurrent_state"][..., 0][after_random], expected[after_random].float()
    )


@pytest.mark.parametrize("inference", ["worker", "server"])
def test_workers_start_from_it_after_random_frames(inference: Any) -> None:
    policy = policies.recurrent(Counts(), initial_state="h0")
    with MultiSyncCollector(
        [counting(6)] * 2,
        policy,
        frames_per_batch=4,
        init_random_frames=4,
        backend="threads",
        inference=inference,
    ) as c:
        batch = torch.cat([c.next().clone() for _ in range(2)], -1)
    assert batch["recurrent_state"][0, :, 0].tolist() == [0.0, 0.0, 5.0, 6.0]


def test_a_state_without_it_is_zero_after_random_frames() -> None:
    def act(obs: torch.Tensor, state: Any) -> Any:
        before = torch.zeros(obs.shape[:-1]) if state is None else state
        return torch.zeros(obs.shape[:-1], dtype=torch.long), before + 1

    with Collector(
        counting(6), act, num_envs=2, frames_per_batch=4, init_random_frames=4
    ) as c:
        batch = torch.cat([c.next().clone() for _ in range(4)], -1)
    assert batch["recurrent_state"][0].tolist() == [0, 0, 0, 1, 2, 3, 0, 1]


def test_functions() -> None:
    h0 = torch.tensor([4.0])

    def act(obs: torch.Tensor, state: Any) -> Any:
        return torch.zeros(obs.shape[:-1], dtype=torch.long), {"h": state["h"] * 2}

    policy = policies.recurrent(act, initial_state=lambda: {"h": h0})
    (batch,) = collected(policy)
    assert batch["recurrent_state", "h"][0, :4, 0].tolist() == [4, 8, 16, 4]


def test_a_saved_collection_continues(tmp_path: Any) -> None:
    options: dict[str, Any] = {"num_envs": 2, "frames_per_batch": 8}
    policy = policies.recurrent(Counts(), initial_state="h0")
    with Collector(counting(3), policy, **options) as c:
        c.fake_tensordict()  # makes the first call, which is in the state
        state = c.state_dict()
        expected = [c.next().clone(), c.next().clone()]
    with Collector(counting(3), policy, **options) as c:
        c.load_state_dict(state)
        for batch in expected:
            assert_same(c.next(), batch)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: policies.recurrent(Counts()),
            "expected an integer of at least 0, or initial_state",
        ),
        (
            lambda: policies.recurrent(Counts(), initial_state="h1"),
            "initial_state='h1', and Counts has none",
        ),
        (
            lambda: policies.recurrent(Counts(), initial_state=torch.zeros),
            "is the name of its attribute",
        ),
        (
            lambda: policies.recurrent(lambda obs, state: None, initial_state="h0"),
            "expected a function without arguments",
        ),
    ],
)
def test_wrong_initial_states(make: Any, message: str) -> None:
    with pytest.raises(BadOption, match=message):
        make()


def test_a_state_of_another_shape_is_refused() -> None:
    class Other(Counts):
        def forward(self, obs: torch.Tensor, state: Any) -> Any:
            action, extras, state = super().forward(obs, state)
            return action, extras, state[..., :1]

    with pytest.raises(
        BadPolicyOutput, match=r"initial_state has recurrent_state with shape"
    ):
        collected(policies.recurrent(Other(), initial_state="h0"))
