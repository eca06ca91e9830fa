"""Recorded rollouts: bit for bit those that run row by row, and refused where they cannot be.

``TapeGraph`` takes the place of a CUDA graph: it replays operations on the same memory, and runs no
Python of environments and policies.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from gymnasium.vector import AutoresetMode
from tensordict.nn import TensorDictModule
from torch import nn

from muster import Collector, ReplayMemory, policies
from muster.capture import graph, recording
from muster.errors import BadOption, CaptureRefused
from muster.testing import TorchCartPole
from tests.fakes import torch_envs
from tests.fakes.device_rows import on_device
from tests.fakes.tape import TapePool
from tests.tools import assert_accounted, assert_same

B = 4
MODES = [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED]
OF_MODE = pytest.mark.parametrize("mode", MODES, ids=["same step", "by mask"])
CartPole = partial(TorchCartPole, B, max_steps=23)


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[TapePool]:
    """Graphs of the CPU are tapes; those that a test makes, by group."""
    made: list[TapePool] = []

    def pool(device: torch.device) -> TapePool:
        made.append(TapePool(device))
        return made[-1]

    monkeypatch.setitem(graph.GRAPHS, "cpu", pool)
    return made


class Kept:
    """A factory that keeps the environments that it makes."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self.envs: list[Any] = []

    def __call__(self) -> Any:
        self.envs.append(self._make())
        return self.envs[-1]


class Twins:
    """The same collector without and with ``capture``."""

    def __init__(
        self,
        make: Callable[[], Any] | list[Callable[[], Any]],
        policy: Callable[[], Any] = lambda: None,
        *,
        capture: Any = True,
        second: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        given = {"frames_per_batch": 8 * B, "seed": 3, **options}
        self.policies = [policy(), policy()]
        several = isinstance(make, list)
        makes = make if isinstance(make, list) else [make]
        self.kept = [[Kept(each) for each in makes] for _ in range(2)]
        made: list[Any] = [[on_device(each) for each in kept] for kept in self.kept]
        envs = made if several else [first for (first,) in made]
        self.plain = Collector(envs[0], self.policies[0], **given)
        given |= second or {}
        self.recorded = Collector(envs[1], self.policies[1], capture=capture, **given)
        self.both = [self.plain, self.recorded]

    def __enter__(self) -> Twins:
        return self

    def __exit__(self, *_: object) -> None:
        for collector in self.both:
            collector.shutdown()

    def do(self, call: Callable[[Collector], Any]) -> list[Any]:
        return [call(collector) for collector in self.both]

    def alike(self, batches: int = 5) -> None:
        """The next batches are equal, and so is everything that is known of them."""
        for number in range(batches):
            a, b = self.do(Collector.next)
            assert_same(a, b)
            self.same_around(f"batch {number}")

    def same_around(self, where: str = "") -> None:
        """Records, counters, the environments' own state and all random numbers are equal."""
        here, there = (collector.episodes.columns() for collector in self.both)
        for x, y in zip(here, there, strict=True):
            assert x.tobytes() == y.tobytes(), where
        stats = self.do(Collector.stats)
        for name in ("frames", "executed", "discarded", "episodes", "return_mean", "policy_lag"):
            assert getattr(stats[0], name) == getattr(stats[1], name), (name, where)
        self.do(assert_accounted)
        for one, other in zip(*self.kept, strict=True):
            states = [state_of(kept.envs[-1]) for kept in (one, other)]
            assert states[0].keys() == states[1].keys()
            for name, value in states[0].items():
                assert torch.equal(value, states[1][name]), (name, where)
        rngs = [
            [group.rng.state_dict()["torch"] for group in collector._engine.groups]
            for collector in self.both
        ]
        assert all(map(torch.equal, *rngs)), where

    @property
    def replays(self) -> int:
        capture = self.recorded.stats().capture
        assert capture is not None
        return capture.replays


def state_of(env: Any) -> dict[str, torch.Tensor]:
    """The tensors of an environment that are attributes, and the state of its generator."""
    found = {}
    for name, value in vars(env).items():
        if torch.is_tensor(value):
            found[name] = value.clone()
        if isinstance(value, torch.Generator):
            found[name] = value.get_state()
    return found


def net(outputs: int = 2, inputs: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


class Sampling(nn.Module):
    """Draws from the global generator, and returns an extra."""

    def __init__(self, inputs: int = 4) -> None:
        super().__init__()
        self.net = net(inputs=inputs)

    def forward(self, obs: torch.Tensor) -> Any:
        log_probs = self.net(obs).log_softmax(-1)
        action = (log_probs - torch.empty_like(log_probs).exponential_().log()).argmax(-1)
        return action, {"value": log_probs.gather(-1, action[:, None])[:, 0]}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell = nn.GRUCell(4, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, obs: torch.Tensor, state: torch.Tensor | None) -> Any:
        state = self.cell(obs, state)
        return self.head(state).argmax(-1), state


class Chooses(nn.Module):
    """A module for TensorDicts: logits, and an action drawn with torch's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, obs: torch.Tensor) -> Any:
        logits = self.net(obs)
        noise = torch.rand_like(logits)
        return (logits + noise).argmax(-1), logits


POLICIES: dict[str, Callable[[], Any]] = {
    "random": lambda: None,
    "head": lambda: policies.categorical(net()),
    "greedy": lambda: policies.deterministic(net()),
    "module": Sampling,
    "function": lambda: lambda obs: (obs[:, 2] > 0).long(),
    "recurrent": Recurrent,
    "tensordict": lambda: TensorDictModule(Chooses(), ["observation"], ["action", "logits"]),
}


@OF_MODE
@pytest.mark.parametrize("policy", POLICIES)
def test_recorded_rollouts_are_bit_equal(pools, policy, mode):
    with Twins(partial(CartPole, autoreset=mode), POLICIES[policy]) as twins:
        twins.alike(6)
        assert twins.replays >= 3
        assert len(pools[0].made) == 1
        assert twins.plain.stats().episodes


OPTIONS: dict[str, dict[str, Any]] = {
    "one row": {"frames_per_batch": B},
    "limit": {"max_frames_per_traj": 7},
    "random first": {"init_random_frames": 5 * 8 * B},
    "uneven": {"frames_per_batch": 8 * B - 3},
    "marked ends": {"set_truncated": True},
    "reset each": {"reset_at_each_iter": True},
    "versions": {"track_policy_version": True},
    "whole episodes": {"trajs_per_batch": 3},
    "mode": {"exploration_type": "mode"},
    "modules": {"execution": {"executor": False}},
    "no inference mode": {"execution": {"inference_mode": False}},
    "process's generators": {"execution": {"own_rng": False}},
    "time major": {"layout": "time_major"},
}


@OF_MODE
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.filterwarnings("ignore:.*cannot be shared equally")
def test_with_options(pools, options, mode):
    from muster import Execution

    given = dict(OPTIONS[options])
    if "execution" in given:
        given["execution"] = Execution(**given["execution"])
    head = POLICIES["head"]
    with Twins(partial(CartPole, autoreset=mode), head, **given) as twins:
        if options == "process's generators":
            for collector in twins.both * 4:
                torch.manual_seed(collector.stats().batches)
                collector.next()
            twins.same_around()
        else:
            twins.alike(8)
        assert twins.replays >= 2


@pytest.mark.parametrize("kind", ["Remembers", "Nested", "InPlace"])
@OF_MODE
def test_state_in_every_place(pools, kind, mode):
    make = partial(getattr(torch_envs, kind), B, autoreset=mode)
    with Twins(make, lambda: policies.categorical(net(inputs=2))) as twins:
        twins.alike(6)
        assert twins.replays >= 3
        assert twins.plain.stats().episodes


def test_rows_of_one_step_and_a_name_that_moves_on(pools):
    """With one row, the name of the state before is the recorded tensor of the state."""
    make = partial(torch_envs.Remembers, B)
    with Twins(make, frames_per_batch=B) as twins:
        twins.alike(8)
        assert twins.replays >= 4


@pytest.mark.parametrize("random", [True, False])
def test_action_masks(pools, random):
    policy = POLICIES["random"] if random else lambda: policies.categorical(net(inputs=2))
    with Twins(partial(torch_envs.Masked, B), policy) as twins:
        twins.alike(6)
        assert twins.replays >= 3


REFUSED = {
    "Counts": r"env\.counter: \d+ -> \d+",
    "Logs": r"env\.history: \d+ entries -> \d+",
    "OnHost": r"env\.visits: an array in host memory changes",
    "DrawsOnHost": "draw random numbers on the host",
    "DrawsItsOwn": r"env\.random draws random numbers on the host",
    "Synchronizes": "_local_scalar_dense.*a number for Python",
    "MakesGenerators": r"env\.generator is another generator",
    "Grows": r"env\.past: \(\d+,\) float32 -> \(\d+,\) float32",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_recorded_is_refused_with_its_name(pools, kind):
    make = partial(getattr(torch_envs, kind), B)
    reason = REFUSED[kind]
    with Twins(make) as twins:
        with pytest.raises(CaptureRefused, match=reason):
            for _ in range(4):
                a = twins.plain.next()
                assert_same(a, twins.recorded.next())
        assert_same(a, twins.recorded.next())  # the rows of the refused rollout are not lost
        twins.alike(3)


@pytest.mark.parametrize("kind", REFUSED)
def test_auto_goes_on_row_by_row_and_says_why_once(pools, kind, caplog):
    make = partial(getattr(torch_envs, kind), B)
    with caplog.at_level(logging.WARNING), Twins(make, capture="auto") as twins:
        twins.alike(6)
        capture = twins.recorded.stats().capture
        assert capture.state == "refused"
        assert not capture.replays
        assert not capture.graphs
    (record,) = caplog.records
    assert capture.reason in record.getMessage()


def test_hidden_state_is_noticed_and_its_environments_are_reset(pools):
    env = Kept(partial(torch_envs.HidesState, B))
    with Collector(on_device(env), frames_per_batch=8 * B, seed=3, capture="auto") as collector:
        for _ in range(2):
            collector.next()
        capture = collector.stats().capture
        assert "replay 1" in capture.reason
        assert "Hidden" in capture.reason
        batch = collector.next()
        assert (batch["observation"][:, 0, 1] == 0).all()
        assert_accounted(collector)


@pytest.mark.parametrize("mode", [True, "auto"])
def test_a_recording_that_fails_leaves_everything_as_it_was(pools, mode):
    with Twins(CartPole, POLICIES["module"], capture=mode) as twins:
        pools[0].fail_at = 0
        twins.alike(1)
        a = twins.plain.next()
        if mode is True:
            with pytest.raises(CaptureRefused, match="this recording fails"):
                twins.recorded.next()
        assert_same(a, twins.recorded.next())
        twins.alike(4)
        assert pools[0].made[0].released


def test_weights_change_in_place_between_replays(pools):
    def change(twins: Twins) -> None:
        for policy in twins.policies:
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter.mul_(1.1).add_(0.05)

    for make in (POLICIES["head"], POLICIES["module"], POLICIES["tensordict"]):
        with Twins(CartPole, make) as twins:
            for _ in range(6):
                twins.alike(1)
                change(twins)
            assert twins.replays >= 3


def test_weights_in_other_memory_are_recorded_again(pools):
    def replace(policy: Any) -> None:
        layer = policy.net[0]
        layer.weight.data = layer.weight.data * -1.5

    def other(policy: Any) -> None:
        layer = policy.net[0]
        layer.weight = nn.Parameter(layer.weight.detach() * -1.5)

    for change in (replace, other):
        with Twins(CartPole, POLICIES["module"]) as twins:
            twins.alike(5)
            replays = twins.replays
            for policy in twins.policies:
                change(policy)
            twins.alike(4)
            assert twins.replays > replays
            assert len(pools[-1].made) == 2
            weights = [policy.net[0].weight for policy in twins.policies]
            assert torch.equal(*weights)


def test_a_number_of_the_policy_that_changes(pools):
    class Blurred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.epsilon = 0.5

        def forward(self, obs: torch.Tensor) -> torch.Tensor:
            logits = self.net(obs)
            return (logits + self.epsilon * torch.rand_like(logits)).argmax(-1)

    with Twins(CartPole, Blurred, capture="auto") as twins:
        twins.alike(4)
        assert twins.replays
        for policy in twins.policies:
            policy.epsilon = 2.0
        twins.alike(4)
        assert twins.recorded.stats().capture.state == "replaying"
        for number in range(12):
            for policy in twins.policies:
                policy.epsilon = 1 / (number + 2)
            twins.alike(1)
        assert "policy.fn.epsilon" in twins.recorded.stats().capture.reason


def test_resets_seeds_and_saved_states_between_replays(pools):
    make = partial(CartPole, autoreset=AutoresetMode.DISABLED)
    with Twins(make, POLICIES["head"]) as twins:
        twins.alike(4)
        for call in (
            lambda c: c.reset([1, 3]),
            lambda c: c.set_seed(8),
            lambda c: c.reset(),
            lambda c: c.collect_batch(n_step=5 * B),
            lambda c: c.collect_batch(n_episode=3),
        ):
            twins.do(call)
            before = twins.replays
            twins.alike(4)
            assert twins.replays > before


class Saved(TorchCartPole):
    """Can be saved."""

    def get_state(self) -> dict[str, Any]:
        return {name: value.numpy().copy() for name, value in state_of(self).items()}

    def set_state(self, state: dict[str, Any]) -> None:
        self.state = torch.from_numpy(state["state"].copy())
        self._steps = torch.from_numpy(state["_steps"].copy())
        self._generator.set_state(torch.from_numpy(state["_generator"]))


def test_a_state_is_loaded_between_replays(pools):
    with Twins(partial(Saved, B), POLICIES["head"]) as twins:
        twins.alike(4)
        state = twins.recorded.state_dict()
        expected = [twins.recorded.next().clone() for _ in range(3)]
        twins.recorded.next()
        before = twins.replays
        twins.recorded.load_state_dict(state)
        for batch in expected:
            assert_same(batch, twins.recorded.next())
        assert twins.replays > before
        twins.plain.load_state_dict(state)
        for batch in expected:
            assert_same(batch, twins.plain.next())


def test_several_groups_and_batches_that_are_kept(pools):
    makes = [CartPole, partial(CartPole, autoreset=AutoresetMode.DISABLED)]
    with Twins(makes, POLICIES["head"], frames_per_batch=2 * 8 * B) as twins:
        kept = [twins.do(Collector.next) for _ in range(6)]
        copies = [b.clone() for _, b in kept]
        twins.alike(3)
        for (a, b), copy in zip(kept, copies, strict=True):
            assert_same(a, b)
            assert_same(copy, b)
        assert len(pools) == 2
        assert twins.replays >= 6


def test_into_a_replay_memory(pools):
    memories = [ReplayMemory(20 * 8 * B, seed=1) for _ in range(2)]
    with Twins(
        CartPole,
        POLICIES["head"],
        total_frames=8 * 8 * B,
        replay_buffer=memories[0],
        second={"replay_buffer": memories[1]},
    ) as twins:
        for _ in zip(*twins.both, strict=True):
            twins.same_around()
        assert twins.replays
    assert_same(memories[0].sample(64), memories[1].sample(64))


def test_random_rollouts_between_others(pools):
    with Twins(CartPole, POLICIES["head"]) as twins:
        for _ in range(3):
            twins.alike(3)
            a, b = twins.do(lambda c: c.collect_batch(n_step=8 * B, random=True)[0])
            assert_same(a, b)
        assert twins.replays >= 2


def test_a_graph_goes_with_its_lane(pools):
    with Collector(on_device(CartPole), frames_per_batch=8 * B, seed=0, capture=True) as collector:
        for _ in range(4):
            collector.next()
        assert collector.stats().capture.graphs == 1
        collector._engine.source.bundles[0].ring.forget_views()
        gc.collect()
        collector.next()
        assert collector.stats().capture.graphs == 0
        for _ in range(2):
            collector.next()
        assert collector.stats().capture.graphs == 1
        assert len(pools[0].made) == 2


def test_stats_and_their_table(pools):
    with Collector(on_device(CartPole), frames_per_batch=8 * B, seed=0, capture=True) as collector:
        assert collector.stats().capture is None
        collector.next()
        assert collector.stats().capture.state == "waiting"
        for _ in range(3):
            collector.next()
        capture = collector.stats().capture
        assert (capture.state, capture.graphs, capture.reason) == ("replaying", 1, "")
        assert capture.nbytes > 0
        assert "replaying" in collector.stats()._repr_html_()


def test_where_there_is_nothing_to_record():
    with pytest.raises(BadOption, match="rows of CountingEnv are in host memory"):
        from muster.testing import CountingEnv

        Collector(CountingEnv, frames_per_batch=8, capture=True)
    with pytest.raises(BadOption, match="no graphs of operations on cpu"):
        Collector(on_device(CartPole), frames_per_batch=8, capture=True)
    with pytest.raises(BadOption, match="capture='always': expected True, False or 'auto'"):
        Collector(on_device(CartPole), frames_per_batch=8, capture="always")
    with pytest.raises(BadOption, match="on_step needs Python between two steps"):
        Collector(on_device(CartPole), frames_per_batch=8, capture=True, on_step=print)
    with Collector(on_device(CartPole), frames_per_batch=4 * B, capture="auto") as collector:
        collector.next()
        assert collector.stats().capture.state == "refused"
        assert "cpu" in collector.stats().capture.reason


def test_the_number_of_graphs_is_bounded(pools, monkeypatch):
    monkeypatch.setattr(recording, "MOST_GRAPHS", 2)
    makes = [CartPole]
    with Twins(makes, POLICIES["head"]) as twins:
        twins.alike(4)
        for steps in (2, 3, 4, 5):
            for _ in range(4):
                a, b = twins.do(lambda c, n=steps: c.collect_batch(n_step=n * B)[0])
                assert_same(a, b)
            assert twins.recorded.stats().capture.graphs <= 2
        twins.alike(4)


@pytest.mark.parametrize("capture", [False, True])
def test_a_compiled_step(pools, capture):
    """With the backend "eager" the operations are those of the environment."""
    second = {"compile_env": {"backend": "eager"}}
    with Twins(CartPole, POLICIES["head"], second=second, capture=capture) as twins:
        twins.alike(5)
        assert not capture or twins.replays >= 2


def test_what_the_graph_does_not_have_shows_in_the_trial(pools):
    with Twins(partial(torch_envs.Elsewhere, B), capture="auto") as twins:
        twins.alike(4)
        reason = "replay 1 of the recorded rollout differs from a rollout row by row in observation"
        assert reason in twins.recorded.stats().capture.reason


def test_a_compiled_policy(pools):
    options = {"compile_policy": {"backend": "eager"}}
    for policy in ("tensordict", "module"):
        with Twins(CartPole, POLICIES[policy], second=options) as twins:
            twins.alike(5)
            assert twins.replays >= 2


def test_only_steps_on_tensors_are_compiled():
    from muster.testing import CountingEnv

    with pytest.raises(BadOption, match="compile_env is for .*CountingEnv is stepped in host"):
        Collector(CountingEnv, frames_per_batch=8, compile_env=True)
