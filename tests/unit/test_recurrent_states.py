"""Recurrent states in the layouts of nn.GRU and nn.LSTM: whose dimension is whose, and which rows a
reset clears.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from muster import Collector, MultiSyncCollector, load_state, policies, save_state
from muster.errors import BadOption, BadPolicyOutput, MusterError
from muster.testing import CountingEnv
from tests.tools import assert_same, collect, lengths, recorded

HIDDEN = 5
ENDS = (2, 100, 3)  # lengths of episodes, environment by environment


class Recurrent(nn.Module):
    """``cell`` of torch for one step; the action is a sign of its output.

    Attributes:
        calls: sizes of the batches of all calls.
    """

    def __init__(self, kind: str = "gru", layers: int = 1, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.layers = kind, layers
        if kind == "cell":
            self.cell: Any = nn.GRUCell(2, HIDDEN)
        else:
            self.cell = {"gru": nn.GRU, "lstm": nn.LSTM}[kind](
                2, HIDDEN, layers, **options
            )
        self.calls: list[int] = []

    def forward(self, obs: torch.Tensor, state: Any) -> Any:
        self.calls.append(len(obs) if obs.ndim > 1 else 0)
        if self.kind == "cell":
            out = state = self.cell(obs, state)
        elif obs.ndim == 1:  # torch's "unbatched" input
            out, state = self.cell(obs[None], state)
            out = out[0]
        else:
            first = self.cell.batch_first
            out, state = self.cell(obs[:, None] if first else obs[None], state)
            out = out[:, 0] if first else out[0]
        return (out.sum(-1) > 0).long(), state


KINDS: dict[str, Callable[[], Recurrent]] = {
    "GRU": lambda: Recurrent("gru"),
    "GRU of 2 layers": lambda: Recurrent("gru", 2),
    "GRU of 3 layers": lambda: Recurrent("gru", 3),
    "batch_first": lambda: Recurrent("gru", 2, batch_first=True),
    "bidirectional": lambda: Recurrent("gru", 1, bidirectional=True),
    "LSTM": lambda: Recurrent("lstm", 2),
    "projection": lambda: Recurrent("lstm", 2, proj_size=2),
    "cell": lambda: Recurrent("cell"),
}


def leaves_of(state: Any) -> list[torch.Tensor]:
    return list(state) if isinstance(state, tuple) else [state]


def expected_states(policy: Recurrent, batch: Any, env: int) -> list[torch.Tensor]:
    """The states before each step of one environment, by a loop over that environment alone: ``[T,
    *shape]`` each.
    """
    obs, done = batch["observation"].float(), batch["next", "done"][..., 0]
    if obs.ndim == 3:
        obs, done = obs[env], done[env]
    state, rows = None, []
    with torch.no_grad():
        for t in range(len(obs)):
            if t and done[t - 1]:
                state = None
            after = policy(obs[t : t + 1], state)[1]
            before = (
                [torch.zeros_like(leaf) for leaf in leaves_of(after)]
                if state is None
                else leaves_of(state)
            )
            rows.append(
                [
                    leaf.squeeze(0 if policy.kind == "cell" else 1).clone()
                    for leaf in before
                ]
            )
            state = after
    return [torch.stack(leaf) for leaf in zip(*rows, strict=True)]


def states_of(batch: Any) -> list[torch.Tensor]:
    state = batch["recurrent_state"]
    return (
        [state]
        if torch.is_tensor(state)
        else [state[key] for key in sorted(state.keys())]
    )


def assert_states(policy: Recurrent, batch: Any, num_envs: int | None) -> None:
    for env in range(num_envs or 1):
        found = [
            state if num_envs is None else state[env] for state in states_of(batch)
        ]
        for mine, theirs in zip(
            found, expected_states(policy, batch, env), strict=True
        ):
            assert torch.allclose(mine.reshape(theirs.shape), theirs, atol=1e-6), env


@pytest.mark.parametrize("num_envs", [None, 1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_every_environment_has_the_states_of_its_own_episode(kind, num_envs):
    policy = KINDS[kind]()
    batch = collect(
        lengths(*ENDS),
        policy,
        num_envs=num_envs,
        frames_per_batch=4 * (num_envs or 1),
        batches=3,
        obs_dtype=torch.float32,
    )
    assert_states(policy, batch, num_envs)
    layers = (
        ()
        if kind == "cell"
        else (policy.layers * (2 if kind == "bidirectional" else 1),)
    )
    lead = (12,) if num_envs is None else (num_envs, 12)
    assert states_of(batch)[0].shape[: len(lead) + len(layers)] == (*lead, *layers), (
        "environments come first"
    )


@pytest.mark.parametrize("kind", ["GRU of 2 layers", "LSTM", "cell"])
def test_a_module_is_only_asked_where_the_sizes_do_not_tell(kind):
    policy = KINDS[kind]()
    collect(
        lengths(*ENDS), policy, num_envs=3, frames_per_batch=12, obs_dtype=torch.float32
    )
    collect(
        lengths(*ENDS), policy, num_envs=2, frames_per_batch=8, obs_dtype=torch.float32
    )
    assert policy.calls == [3] * 4 + [2] * 4, (
        "a copy is called, never the policy itself"
    )


def test_the_trial_leaves_no_trace():
    class Draws(Recurrent):
        def forward(self, obs: torch.Tensor, state: Any) -> Any:
            action, state = super().forward(obs, state)
            noise = torch.rand(len(obs)) + float(np.random.rand())
            return (action + (noise > 1)).clamp(0, 1), state

    options: dict[str, Any] = {
        "num_envs": 2,
        "frames_per_batch": 20,
        "obs_dtype": torch.float32,
        "seed": 0,
    }
    tried = Draws("gru", 2)
    said = policies.recurrent(Draws("gru", 2), batch_dim=1)
    assert_same(
        collect(lengths(*ENDS), tried, **options),
        collect(lengths(*ENDS), said, **options),
    )
    assert tried.calls == said.calls


class Layers(nn.Module):
    """Counts the steps of an episode in each layer, ``[layers, B]`` or with ``where`` the layout of
    the state.
    """

    def __init__(
        self, layers: int = 2, where: int = 1, tail: tuple[int, ...] = ()
    ) -> None:
        super().__init__()
        self.layers, self.where, self.tail = layers, where, tail

    def forward(self, obs: torch.Tensor, state: Any) -> Any:
        if state is None:
            size = [self.layers, *self.tail]
            size.insert(self.where, len(obs))
            state = torch.zeros(size)
        assert state.is_contiguous()
        return torch.zeros(len(obs), dtype=torch.long), state + 1


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("tail", [(), (1,), (2,), (2, 2)])
def test_counters_of_layers_are_those_of_their_environment(where, tail):
    batch = collect(
        lengths(*ENDS), Layers(2, where, tail), num_envs=2, frames_per_batch=12
    )
    state = batch["recurrent_state"]
    assert state.shape == (2, 6, 2, *tail)
    for layer in state.flatten(2).unbind(-1):
        assert layer.tolist() == [[0, 1, 0, 1, 0, 1], [0, 1, 2, 3, 4, 5]]


def function(policy: nn.Module) -> Callable[..., Any]:
    def act(obs: torch.Tensor, state: Any) -> Any:
        return policy(obs, state)

    return act


def test_a_function_is_asked_for_the_dimension_where_sizes_do_not_tell():
    for where in (0, 1):
        act = function(Layers(2, where, (3,)))
        with pytest.raises(
            BadPolicyOutput,
            match=r"act returned recurrent_state with shape \(2, 2, 3\).*batch_dim=0\), or",
        ):
            collect(lengths(*ENDS), act, num_envs=2, frames_per_batch=12)
        state = collect(lengths(*ENDS), act, num_envs=3, frames_per_batch=18)[
            "recurrent_state"
        ]  # the sizes tell
        assert state[:2, :, 0, 2].tolist() == [[0, 1, 0, 1, 0, 1], [0, 1, 2, 3, 4, 5]]
        said = policies.recurrent(act, batch_dim=where)
        assert said is act
        state = collect(lengths(*ENDS), said, num_envs=2, frames_per_batch=12)[
            "recurrent_state"
        ]
        assert state[..., 1, 2].tolist() == [[0, 1, 0, 1, 0, 1], [0, 1, 2, 3, 4, 5]]


def test_two_dimensions_of_a_function_begin_with_environments():
    act = function(Layers(2, 0))
    state = collect(lengths(*ENDS), act, num_envs=2, frames_per_batch=12)[
        "recurrent_state"
    ]
    assert state[..., 1].tolist() == [[0, 1, 0, 1, 0, 1], [0, 1, 2, 3, 4, 5]]
    said = policies.recurrent(function(Layers(2, 1)), batch_dim=1)
    state = collect(lengths(*ENDS), said, num_envs=2, frames_per_batch=12)[
        "recurrent_state"
    ]
    assert state[..., 1].tolist() == [[0, 1, 0, 1, 0, 1], [0, 1, 2, 3, 4, 5]]


def test_the_states_of_one_environment_need_no_dimension():
    for where in (0, 1):
        act = function(Layers(1, where, (3,)))
        state = collect(lengths(*ENDS), act, num_envs=1, frames_per_batch=4)[
            "recurrent_state"
        ]
        assert state[0, :, 0].tolist() == [[0] * 3, [1] * 3] * 2


def test_a_module_that_cannot_be_copied_is_asked():
    policy = Layers(2, 1, (1,))
    policy.lock = threading.Lock()
    with pytest.raises(BadPolicyOutput, match="batch_dim"):
        collect(lengths(*ENDS), policy, num_envs=2, frames_per_batch=12)
    state = collect(
        lengths(*ENDS),
        policies.recurrent(policy, batch_dim=1),
        num_envs=2,
        frames_per_batch=12,
    )
    assert state["recurrent_state"][1, :, 0, 0].tolist() == [0, 1, 2, 3, 4, 5]


def test_a_module_for_a_fixed_number_of_environments_is_asked():
    class Fixed(Layers):
        def forward(self, obs: torch.Tensor, state: Any) -> Any:
            assert len(obs) == 2
            return super().forward(obs, state)

    with pytest.raises(BadPolicyOutput, match="batch_dim"):
        collect(lengths(*ENDS), Fixed(2, 1, (1,)), num_envs=2, frames_per_batch=12)


def test_the_dimension_can_be_a_later_one_or_one_for_each_tensor():
    last = policies.recurrent(Layers(3, 2, (4,)), batch_dim=2)
    state = collect(lengths(*ENDS), last, num_envs=2, frames_per_batch=12)[
        "recurrent_state"
    ]
    assert state.shape == (2, 6, 3, 4)
    assert state[..., 2, 3].tolist() == [[0, 1, 0, 1, 0, 1], [0, 1, 2, 3, 4, 5]]

    def act(obs: torch.Tensor, state: Any) -> Any:
        h, (c,) = (
            (torch.zeros(2, 2), {0: torch.zeros(2)}.values())
            if state is None
            else (state["h"], state["c"])
        )
        return torch.zeros(2, dtype=torch.long), {"h": h + 1, "c": [c + 1]}

    batch = collect(
        lengths(*ENDS),
        policies.recurrent(act, batch_dim={"h": 1, "c": [0]}),
        num_envs=2,
        frames_per_batch=12,
    )
    for leaf in (
        batch["recurrent_state", "h"][..., 0],
        batch["recurrent_state", "c", "0"],
    ):
        assert leaf.tolist() == [[0, 1, 0, 1, 0, 1], [0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize(
    ("batch_dim", "message"),
    [
        (2, r"with shape \(2, 3\), expected 3 entries.*in dimension 2"),
        (0, r"with shape \(2, 3\), expected 3 entries.*in dimension 0"),
        ({"h": 1}, "has {'h': 1} for recurrent_state"),
        ((1, 1), r"has \(1, 1\) for recurrent_state"),
    ],
)
def test_a_dimension_that_is_not_there_is_refused(batch_dim, message):
    policy = policies.recurrent(Layers(), batch_dim=batch_dim)
    with pytest.raises(MusterError, match=message):
        collect(lengths(*ENDS), policy, num_envs=3, frames_per_batch=12)


def test_every_tensor_of_a_state_needs_its_dimension():
    for short in ((1,), {"0": 1}):
        with pytest.raises(
            BadOption, match=r"batch_dim=.* has no entry for recurrent_state.1"
        ):
            collect(
                lengths(*ENDS),
                policies.recurrent(KINDS["LSTM"](), batch_dim=short),
                num_envs=2,
                frames_per_batch=4,
            )


@pytest.mark.parametrize("batch_dim", [-1, 1.0, True, None, "1", (0, -1), {"h": 0.5}])
def test_a_dimension_is_a_number_from_0(batch_dim):
    with pytest.raises(
        BadOption, match=r"policies.recurrent\(batch_dim=.*expected an integer"
    ):
        policies.recurrent(Layers(), batch_dim=batch_dim)


def test_what_takes_no_attributes_is_refused():
    with pytest.raises(BadOption, match="method takes no attributes"):
        policies.recurrent(Layers().forward, batch_dim=1)


def test_a_state_of_other_sizes_is_refused_with_the_remedy():
    with pytest.raises(
        BadPolicyOutput,
        match=r"shape \(2, 4, 3\), expected 3 entries.*batch_dim=\.\.\.",
    ):
        collect(lengths(*ENDS), Layers(2, 2, (4,)), num_envs=3, frames_per_batch=12)


@pytest.mark.parametrize("inference", ["worker", "server"])
def test_workers_and_the_server_find_the_same_layout(inference):
    policy = KINDS["LSTM"]()
    make = [lengths_of(2, 100), lengths_of(3, 4)]
    options: dict[str, Any] = {
        "num_envs": 2,
        "frames_per_batch": 24,
        "obs_dtype": torch.float32,
        "seed": 0,
    }
    expected = collect(make, policy, **options)
    with MultiSyncCollector(
        make,
        policy,
        inference=inference,
        cat_results="stack",
        backend="threads",
        **options,
    ) as c:
        batch = c.rollout()
    for group in range(2):
        assert_states(policy, batch[group], 2)
        for mine, theirs in zip(
            states_of(batch[group]), states_of(expected[group]), strict=True
        ):
            assert torch.allclose(mine, theirs, atol=1e-6)


def lengths_of(*each: int) -> Callable[[], Any]:
    return recorded(lambda i: CountingEnv(each[i % len(each)]))[0]


def test_processes_get_what_the_user_said(tmp_path):
    policy = policies.recurrent(Layers(), batch_dim=1)
    with MultiSyncCollector(
        [lengths_of(2, 100)], policy, num_envs=2, frames_per_batch=12
    ) as collector:
        state = collector.rollout()["recurrent_state"].squeeze()
    assert state[..., 0].tolist() == [[0, 1, 0, 1, 0, 1], [0, 1, 2, 3, 4, 5]]


def test_states_go_on_after_loading_random_steps_and_bootstrapping(tmp_path):
    options: dict[str, Any] = {
        "num_envs": 2,
        "frames_per_batch": 6,
        "obs_dtype": torch.float32,
        "seed": 0,
    }
    with Collector(
        lengths_of(5, 100), KINDS["GRU of 2 layers"](), **options
    ) as collector:
        collector.rollout()
        collector.rollout()
        save_state(tmp_path / "state", collector.state_dict())
        expected = collector.rollout().clone()
    with Collector(
        lengths_of(5, 100), KINDS["GRU of 2 layers"](), **options
    ) as collector:
        collector.load_state_dict(load_state(tmp_path / "state"), trust=True)
        assert_same(expected, collector.rollout(), ignore=(("collector", "resumed"),))

    class Values(Recurrent):
        def forward(self, obs: torch.Tensor, state: Any) -> Any:
            action, state = super().forward(obs, state)
            return action, {"state_value": state.sum((0, 2))}, state

    policy = Values("gru", 2)
    with Collector(lengths_of(5, 100), policy, **options) as collector:
        values = collector.collect_batch(n_step=6, bootstrap=True).stats.last_value_est
        after = collector.collect_batch(n_step=6).batch
    assert torch.allclose(values[..., 0], after["state_value"][:, 0], atol=1e-6)
    with Collector(
        lengths_of(5, 100), KINDS["GRU of 2 layers"](), init_random_frames=6, **options
    ) as collector:
        assert not collector.rollout()["recurrent_state"].any()
        assert not collector.rollout()["recurrent_state"][:, 0].any()


# --- modules on TensorDicts -----------------------------------------------------------------------


def tensordict_policy(layers: int, *, batch_first: bool) -> Any:
    from tensordict.nn import TensorDictModule, TensorDictSequential

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(2, HIDDEN, layers)

        def forward(self, obs: torch.Tensor, h: Any = None) -> Any:
            if h is not None and batch_first:
                h = h.movedim(0, 1).contiguous()
            _, h = self.gru(obs.float()[None], h)
            action = (h[-1].sum(-1) > 0).long()
            return action, h.movedim(1, 0) if batch_first else h

    return TensorDictSequential(
        TensorDictModule(Step(), ["observation", "h"], ["action", ("next", "h")])
    )


def test_states_of_tensordicts_begin_with_environments():
    batch = collect(
        lengths(*ENDS),
        tensordict_policy(2, batch_first=True),
        num_envs=2,
        frames_per_batch=12,
    )
    assert batch["h"].shape == (2, 6, 2, HIDDEN)
    assert [row.any(-1).any(-1).tolist() for row in batch["h"]] == [
        [False, True, False, True, False, True],
        [False, True, True, True, True, True],
    ]
    wrong = tensordict_policy(2, batch_first=False)
    with pytest.raises(
        BadPolicyOutput,
        match=r"next.h with shape \(2, 2, 5\).*GRUModule.*movedim\(1, 0\)",
    ):
        collect(lengths(*ENDS), wrong, num_envs=2, frames_per_batch=12)
    said = policies.recurrent(tensordict_policy(2, batch_first=True), batch_dim=0)
    collect(lengths(*ENDS), said, num_envs=2, frames_per_batch=12)
    with pytest.raises(BadPolicyOutput, match="next.h"):
        collect(
            lengths(*ENDS),
            policies.recurrent(wrong, batch_dim=1),
            num_envs=2,
            frames_per_batch=12,
        )
