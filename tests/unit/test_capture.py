"""Recorded rollouts: bit for bit those that run row by row, and refused where they cannot be.

``TapeGraph`` takes the place of a CUDA graph: it replays operations on the same memory, and runs no
Python of environments and policies.
"""

from __future__ import annotations

import copy
import gc
import io
import logging
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from gymnasium.vector import AutoresetMode
from tensordict.nn import TensorDictModule
from torch import nn

from muster import Collector, Execution, ReplayMemory, policies
from muster.capture import recording
from muster.episodes.tensor_clock import TensorClock
from muster.errors import BadEnvOutput, BadOption, CaptureRefused, EnvError
from muster.observing.snapshots import EpisodeTotals, snapshot
from muster.testing import TorchCartPole
from tests.fakes import torch_envs
from tests.fakes.device_rows import on_device
from tests.fakes.recorded_policies import Chooses, Recurrent, Sampling
from tests.fakes.tape import pools
from tests.fakes.twins import B, Kept, Twins, state_of
from tests.tools import assert_accounted, assert_same
from tests.waits import wait_until

__all__ = ["pools"]  # a fixture
MODES = [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED]
OF_MODE = pytest.mark.parametrize("mode", MODES, ids=["same step", "by mask"])
CartPole = partial(TorchCartPole, B, max_steps=23)


def net(outputs: int = 2, inputs: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


POLICIES: dict[str, Callable[[], Any]] = {
    "random": lambda: None,
    "head": lambda: policies.categorical(net()),
    "greedy": lambda: policies.deterministic(net()),
    "module": lambda: Sampling(net()),
    "function": lambda: lambda obs: (obs[:, 2] > 0).long(),
    "recurrent": lambda: Recurrent(6),
    "tensordict": lambda: TensorDictModule(
        Chooses(net()), ["observation"], ["action", "logits"]
    ),
}


@OF_MODE
@pytest.mark.parametrize("policy", POLICIES)
def test_recorded_rollouts_are_bit_equal(pools, policy, mode):
    with Twins(partial(CartPole, autoreset=mode), POLICIES[policy]) as twins:
        twins.alike(6)
        assert twins.replays >= 3
        assert len(pools[0].made) == 1
        assert twins.plain.stats().episodes


def advances(collector: Collector, batches: int) -> int:
    """How often Python completes rows on the device in so many batches."""
    count = 0

    def profile(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        if event == "call" and frame.f_code is TensorClock.advance.__code__:
            count += 1

    sys.setprofile(profile)
    try:
        for _ in range(batches):
            collector.next()
    finally:
        sys.setprofile(None)
    return count


def test_rows_are_completed_in_the_graph(pools):
    with Collector(
        on_device(CartPole), frames_per_batch=8 * B, seed=0, capture=True
    ) as collector:
        assert advances(collector, 2) >= 2
        assert advances(collector, 4) == 0
        assert collector.stats().capture.replays == 4
        assert collector.stats().episodes
        assert_accounted(collector)


@pytest.mark.filterwarnings("ignore:.*cannot be shared equally")
def test_rollouts_that_the_host_completes_between_others(pools):
    """A graph that completes rows is not replayed for them."""
    with Twins(CartPole, POLICIES["head"]) as twins:
        for number in range(10):
            frames = 8 * B - 3 if number % 5 == 4 else 8 * B
            (a, _), (b, _) = twins.do(
                lambda collector, frames=frames: collector.collect_batch(n_step=frames)
            )
            assert_same(a, b)
            del a, b
            twins.same_around(f"batch {number}")
        assert twins.replays >= 3


class Spoiled(TorchCartPole):
    """The reward of environment 2 is bad in some step, which a tensor counts."""

    def __init__(self, B: int) -> None:
        super().__init__(B, max_steps=23)
        self.made = torch.zeros((), dtype=torch.int64)

    def step(self, action: torch.Tensor) -> Any:
        obs, reward, *rest = super().step(action)
        bad = (torch.arange(B) == 2) & (self.made == 8 * 5 + 3)
        self.made = self.made + 1
        return obs, torch.where(bad, torch.nan, reward), *rest


def test_a_bad_reward_in_a_replay_is_noticed_in_the_next_batch(pools):
    with Collector(
        on_device(partial(Spoiled, B)), frames_per_batch=8 * B, seed=0, capture=True
    ) as collector:
        for _ in range(6):
            collector.next()
        with pytest.raises(
            BadEnvOutput, match=r"\[2\].step \(row 3 of the last rollout"
        ):
            collector.next()
        assert collector.stats().capture.replays == 4
        collector.next()
        assert_accounted(collector)


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
    "waiting": {"reset_when_done": False},
    "all checked": {"validate": "full"},
    "split": {"split_trajs": True},
    "one thread": {"num_threads": None},
}


@pytest.mark.parametrize(
    "mode",
    [MODES[0], pytest.param(MODES[1], marks=pytest.mark.slow)],
    ids=["same step", "by mask"],
)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.filterwarnings("ignore:.*cannot be shared equally")
def test_with_options(pools, options, mode):
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


@pytest.mark.parametrize("kind", ["Remembers", "Nested", "InPlace", "Expanded"])
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
    policy = (
        POLICIES["random"] if random else lambda: policies.categorical(net(inputs=2))
    )
    with Twins(partial(torch_envs.Masked, B), policy) as twins:
        twins.alike(6)
        assert twins.replays >= 3


REFUSED = {
    "Counts": r"env\.counter: \d+ -> \d+",
    "CountsForAll": r"type\(env\)\.steps: \d+ -> \d+",
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
        assert_same(
            a, twins.recorded.next()
        )  # the rows of the refused rollout are not lost
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
    with Collector(
        on_device(env), frames_per_batch=8 * B, seed=3, capture="auto"
    ) as collector:
        for _ in range(2):
            collector.next()
        capture = collector.stats().capture
        assert "replay 1" in capture.reason
        assert "the state of HASH" in capture.reason
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
        twins.alike(4)
        with twins.keeping(4):
            twins.alike(5)
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
    with Collector(
        on_device(CartPole), frames_per_batch=8 * B, seed=0, capture=True
    ) as collector:
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
    with Collector(
        on_device(CartPole), frames_per_batch=8 * B, seed=0, capture=True
    ) as collector:
        assert collector.stats().capture is None
        collector.next()
        assert collector.stats().capture.state == "waiting"
        for _ in range(3):
            collector.next()
        capture = collector.stats().capture
        assert (capture.state, capture.graphs, capture.reason) == ("replaying", 1, "")
        assert capture.nbytes > 0
        assert "replaying" in collector.stats()._repr_html_()
        shown = snapshot(collector.stats(), EpisodeTotals())
        assert shown["capture"] == "replaying"


class NeverStops:
    """An interruptor."""

    def collection_stopped(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("option", "value"),
    [("on_step", lambda view: None), ("interruptor", NeverStops())],
)
def test_options_that_need_python_between_two_steps(pools, option, value):
    """With "auto" they are the reason why nothing is recorded."""
    with Twins(CartPole, capture="auto", **{option: value}) as twins:
        twins.alike(2)
        capture = twins.recorded.stats().capture
        assert capture.state == "refused"
        assert capture.reason == f"{option} needs Python between two steps"
    with pytest.raises(BadOption, match=f"{option} needs Python between two"):
        Twins(CartPole, **{option: value})


class Valued(nn.Module):
    """Has values of its observations, and a state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell = nn.GRUCell(4, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, obs: torch.Tensor, state: torch.Tensor | None) -> Any:
        state = self.cell(obs, state)
        out = self.head(state)
        return out[:, :2].argmax(-1), {"state_value": out[:, 2]}, state


@pytest.mark.parametrize("recurrent", [False, True])
@OF_MODE
def test_values_of_next_observations(pools, recurrent, mode):
    """``bootstrap`` needs the host after a rollout, and the rollout is a replay."""
    plain = partial(Valued1, 3)
    with Twins(
        partial(CartPole, autoreset=mode), Valued if recurrent else plain
    ) as twins:
        for number in range(6):
            wanted = "truncations" if number % 2 else True
            (a, one), (b, other) = twins.do(
                lambda c, wanted=wanted: c.collect_batch(n_step=8 * B, bootstrap=wanted)
            )
            assert_same(a, b)
            assert one.last_value_est.any()
            assert torch.equal(one.last_value_est, other.last_value_est)
            del a, b
            twins.same_around(f"batch {number}")
        assert twins.replays >= 2


class Valued1(nn.Module):
    """Has values of its observations."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.net = net(outputs)

    def forward(self, obs: torch.Tensor) -> Any:
        out = self.net(obs)
        return out[:, :2].argmax(-1), {"state_value": out[:, 2]}


def test_weights_of_a_copy_are_updated_between_replays(pools):
    options = {"policy_device": "cpu"}
    with Twins(CartPole, POLICIES["module"], **options) as twins:
        for _ in range(6):
            twins.alike(1)
            for policy in twins.policies:
                with torch.no_grad():
                    for parameter in policy.parameters():
                        parameter.mul_(1.1).add_(0.05)
            twins.do(Collector.update_policy_weights_)
        assert twins.replays >= 3


def test_where_there_is_nothing_to_record():
    with pytest.raises(BadOption, match="rows of CountingEnv are in host memory"):
        from muster.testing import CountingEnv

        Collector(CountingEnv, frames_per_batch=8, capture=True)
    with pytest.raises(BadOption, match="no graphs of operations on cpu"):
        Collector(on_device(CartPole), frames_per_batch=8, capture=True)
    with pytest.raises(
        BadOption, match="capture='always': expected True, False or 'auto'"
    ):
        Collector(on_device(CartPole), frames_per_batch=8, capture="always")
    with pytest.raises(BadOption, match="on_step needs Python between two steps"):
        Collector(on_device(CartPole), frames_per_batch=8, capture=True, on_step=print)
    with Collector(
        on_device(CartPole), frames_per_batch=4 * B, capture="auto"
    ) as collector:
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

    with pytest.raises(
        BadOption, match="compile_env is for .*CountingEnv is stepped in host"
    ):
        Collector(CountingEnv, frames_per_batch=8, compile_env=True)


def test_an_interrupt_during_a_replay_takes_effect_after_it(pools):
    with Twins(CartPole, POLICIES["head"]) as twins:
        twins.alike(4)
        pools[0].made[0].during = lambda: signal.raise_signal(signal.SIGINT)
        before = twins.replays
        with pytest.raises(KeyboardInterrupt):
            twins.recorded.next()
        pools[0].made[0].during = None
        assert_same(*twins.do(Collector.next))  # the rows of the replay
        twins.alike(2)
        assert twins.replays == before + 3


steps_left = io.BytesIO()  # of ``Fails``, where no walk finds it: one byte each


def fail_after(steps: int) -> None:
    """The step of ``Fails`` that comes as number ``steps`` fails."""
    steps_left.truncate(0)
    steps_left.seek(0)
    steps_left.write(b"." * steps)


class Fails(TorchCartPole):
    """Raises in the step in which the number in ``steps_left`` has come to 0."""

    def step(self, action: torch.Tensor) -> Any:
        left = len(steps_left.getvalue())
        if left:
            fail_after(left - 1)
            if left == 1:
                raise ValueError("no more steps")
        return super().step(action)


def test_an_error_of_the_environments_in_the_rollout_of_a_trial(pools):
    with Twins(partial(Fails, B), POLICIES["head"]) as twins:
        twins.alike(1)
        for collector in twins.both:
            fail_after(5)
            with pytest.raises(EnvError, match="no more steps"):
                collector.next()
        twins.alike(5)
        assert twins.replays >= 2


def test_an_error_of_the_environments_in_the_rollout_after_it(pools):
    with Twins(partial(Fails, B), POLICIES["head"], capture="auto") as twins:
        twins.alike(1)
        a = twins.plain.next()
        fail_after(8 + 5)
        assert_same(a, twins.recorded.next())
        twins.alike(3)
        assert "no more steps" in twins.recorded.stats().capture.reason


def test_a_policy_that_keeps_its_last_observations(pools):
    """They are rows of a lane, which may be lent to the user when another lane is filled."""

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.last = torch.zeros(B, 4)
            self.sums = {"obs": torch.zeros(B, 4)}

        def forward(self, obs: torch.Tensor) -> Any:
            change = obs - self.last
            self.last = obs
            self.sums = {"obs": self.sums["obs"] * 0.9 + change}
            return self.net(self.sums["obs"]).argmax(-1), {"change": change.clone()}

    with Twins(CartPole, Keeps, execution=Execution(executor=False)) as twins:
        twins.alike(4)
        with twins.keeping(4):
            twins.alike(5)
        assert twins.replays >= 4


def test_two_batches_at_a_time(pools):
    """As in a loop over a collector: a batch is held until the next one has come."""
    with Twins(CartPole, POLICIES["head"]) as twins:
        held = twins.do(Collector.next)
        for _ in range(8):
            held = twins.do(Collector.next)
            assert_same(*held)
        assert len(pools[0].made) == 2
        assert twins.replays >= 4


def test_environments_that_another_object_replaces(pools):
    with Twins(CartPole, POLICIES["head"]) as twins:
        twins.alike(4)
        for collector, kept in zip(twins.both, twins.kept, strict=True):
            (old,) = kept[0].envs
            new = copy.copy(old)
            kept[0].envs.append(new)
            collector._engine.groups[0].env.env = new
            collector._engine.groups[0].env._stepping = new
        replays = twins.replays
        twins.alike(4)
        assert twins.replays > replays
        assert twins.recorded._engine.groups[0].env.env is twins.kept[1][0].envs[-1]


def in_background(capture: Any, policy: Any, **options: Any) -> tuple[Any, Any]:
    """The memory after 30 batches in a background thread, and what ``capture`` says."""
    memory = ReplayMemory(40 * 8 * B, seed=1)
    chosen = {
        "frames_per_batch": 8 * B,
        "total_frames": 30 * 8 * B,
        "replay_buffer": memory,
        **options,
    }
    torch.manual_seed(4)
    with Collector(
        on_device(CartPole), policy(), seed=0, capture=capture, **chosen
    ) as collector:
        collector.start()
        wait_until(lambda: not collector.is_running())
        assert_accounted(collector)
        assert len(memory) == 30 * 8 * B
        drawn = torch.rand(3)
        return memory.sample(256).set("after", drawn.expand(256, 3)), collector.stats()


@pytest.mark.parametrize(
    "policy",
    ["head", "module", "recurrent", pytest.param("random", marks=pytest.mark.slow)],
)
def test_a_background_thread_replays_what_start_has_recorded(pools, policy):
    expected, _ = in_background(False, POLICIES[policy])
    sampled, stats = in_background(True, POLICIES[policy])
    assert_same(expected, sampled)
    assert stats.capture.state == "replaying"
    assert stats.capture.replays == 30 - 2


def test_start_collects_random_frames_before_it_records(pools):
    options = {"init_random_frames": 5 * 8 * B}
    expected, _ = in_background(False, POLICIES["head"], **options)
    sampled, stats = in_background(True, POLICIES["head"], **options)
    assert_same(expected, sampled)
    assert stats.capture.replays == 30 - 4


def test_another_policy_is_not_recorded_in_the_background(pools, monkeypatch):
    monkeypatch.setattr("muster.collectors.base.MOST_BEFORE_RECORDED", 1)
    sampled, stats = in_background("auto", POLICIES["head"])
    expected, _ = in_background(False, POLICIES["head"])
    assert_same(expected, sampled)
    assert "those of this policy were not" in stats.capture.reason


def test_start_says_why_nothing_can_be_recorded_and_goes_on_when_it_is_called_again(
    pools,
):
    memory = ReplayMemory(40 * 8 * B, seed=1)
    with Collector(
        on_device(partial(torch_envs.Counts, B)),
        frames_per_batch=8 * B,
        total_frames=9 * 8 * B,
        replay_buffer=memory,
        capture=True,
    ) as collector:
        with pytest.raises(CaptureRefused, match="env.counter"):
            collector.start()
        assert not collector.is_running()
        collector.start()
        wait_until(lambda: not collector.is_running())
        assert len(memory) == 9 * 8 * B
        assert_accounted(collector)


@pytest.mark.parametrize("what", ["wind", "scale", "gravity", "global"])
def test_numbers_outside_of_the_device_change_between_rollouts(
    pools, monkeypatch, what
):
    """A graph has them as constants: it is recorded again."""
    monkeypatch.setattr(torch_envs.Blown, "gravity", 0.1)
    monkeypatch.setitem(globals(), "threshold", 0.0)
    policy = POLICIES["random"] if what != "global" else lambda: beyond
    with Twins(partial(torch_envs.Blown, B), policy) as twins:
        twins.alike(4)
        for collector in twins.kept:
            env = collector[0].envs[0]
            if what == "wind":
                env.wind[0] = 0.5
            elif what == "scale":
                env.scale += 3
        if what == "gravity":
            torch_envs.Blown.gravity = 3.0
        elif what == "global":
            monkeypatch.setitem(globals(), "threshold", 0.8)
        replays = twins.replays
        twins.alike(4)
        assert twins.replays >= replays + 3
        # the tape has its "device" in host memory: the tensor there is no constant
        assert len(pools[0].made) == (1 if what == "scale" else 2)


threshold = 0.0


def beyond(obs: torch.Tensor) -> torch.Tensor:
    return (obs[:, 0] > threshold).long()


total = torch.zeros(B)


def sums_up(obs: torch.Tensor) -> torch.Tensor:
    global total
    total = total * 0.9 + obs[:, 0]
    return (total > 0).long()


def test_a_global_that_a_policy_replaces(pools, monkeypatch):
    found = []
    for capture in (False, True):
        monkeypatch.setitem(globals(), "total", torch.zeros(B))
        given = {"frames_per_batch": 8 * B, "seed": 0, "capture": capture}
        with Collector(on_device(CartPole), sums_up, **given) as collector:
            found.append([collector.next().clone() for _ in range(6)])
            found[-1].append({"total": total.clone()})
    assert pools[0].made[0].replays >= 4
    for a, b in zip(*(batches[:-1] for batches in found), strict=True):
        assert_same(a, b)
    assert torch.equal(*(batches[-1]["total"] for batches in found))
