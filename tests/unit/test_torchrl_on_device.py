"""TorchRL environments whose rows are on their device: the same batches, ids and records as with rows
on the host, bit for bit; nothing waits, or one look per step; recorded where that is possible.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict.nn import TensorDictModule
from torch import nn

from muster import Collector
from muster.errors import BadEnvOutput, BadOption, CaptureRefused
from muster.policies import deterministic
from tests.fakes.device_rows import torchrl_on_device
from tests.fakes.tape import pools
from tests.fakes.twins import Twins
from tests.fakes.waiting import Waits
from tests.tools import assert_accounted, assert_same

pytest.importorskip("torchrl")

from tensordict import TensorDict
from torchrl.data import Categorical
from torchrl.envs import (
    Compose,
    InitTracker,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
)
from torchrl.testing import mocking_classes as mocks

from muster.envs.torchrl import TorchRLOnDevice, can_have_rows_there
from tests.fakes.torchrl_batches import Forgetful, Looking, Pendulums, Walkers

__all__ = ["pools"]  # a fixture
pytestmark = pytest.mark.filterwarnings("ignore")

B = 4


def transformed() -> Any:
    counters = Compose(StepCounter(max_steps=6), RewardSum(), InitTracker())
    return TransformedEnv(Pendulums(B), counters)


BY_MASK: dict[str, Callable[[], Any]] = {
    "stateless": partial(Pendulums, B),
    "with state": partial(Walkers, B),
    "transformed": transformed,
    "counting": partial(mocks.CountingEnv, max_steps=3, batch_size=(B,)),
}
LOOKING: dict[str, Callable[[], Any]] = {
    "looks": partial(Looking, B),
    "forgetful": partial(Forgetful, B),
    "batched": partial(
        mocks.CountingBatchedEnv, max_steps=torch.tensor([1, 2, 5, 9]), batch_size=(B,)
    ),
    "nested": partial(mocks.NestedCountingEnv, max_steps=3, batch_size=(B,)),
    "nested and root flags": partial(
        mocks.NestedCountingEnv, max_steps=3, has_root_done=True, batch_size=(B,)
    ),
    "several keys": partial(mocks.MultiKeyCountingEnv, max_steps=2, batch_size=(B,)),
    "two dimensions": partial(
        mocks.CountingBatchedEnv,
        max_steps=torch.arange(4).view(2, 2),
        batch_size=(2, 2),
    ),
}
ALL = {**BY_MASK, **LOOKING}


def both(
    make: Callable[[], Any], policy: Callable[[], Any] = lambda: None, **options: Any
) -> list[Collector]:
    """The same collector with rows on the host, and on the device."""
    chosen = {"frames_per_batch": 20 * B, "seed": 3, **options}
    return [
        Collector(envs, policy(), **chosen) for envs in (make, torchrl_on_device(make))
    ]


def assert_alike(here: Collector, there: Collector, batches: int = 4) -> None:
    for _ in range(batches):
        assert_same(here.next(), there.next())
        for a, b in zip(here.episodes.columns(), there.episodes.columns(), strict=True):
            assert a.tobytes() == b.tobytes()
        for name in ("frames", "executed", "discarded", "episodes", "return_mean"):
            assert getattr(here.stats(), name) == getattr(there.stats(), name), name
        for collector in (here, there):
            assert_accounted(collector)


def adapter_of(collector: Collector) -> TorchRLOnDevice:
    env = collector._engine.groups[0].env
    assert isinstance(env, TorchRLOnDevice)
    return env


@pytest.mark.parametrize("name", ALL)
def test_batches_and_records_are_those_of_rows_on_the_host(name):
    here, there = both(ALL[name])
    with here, there:
        assert_alike(here, there)
        # the mock environment never sets its flag at the root
        assert here.stats().episodes or name == "nested and root flags"
        assert (adapter_of(there).why_waiting == "") == (name in BY_MASK)


OPTIONS: dict[str, dict[str, Any]] = {
    "one row": {"frames_per_batch": B},
    "limit": {"max_frames_per_traj": 4},
    "versions": {"track_policy_version": True},
    "random first": {"init_random_frames": 30 * B},
    "marked ends": {"set_truncated": True},
    "reset each": {"reset_at_each_iter": True},
    "all checked": {"validate": "full"},
    "unchecked": {"validate": "off"},
    "hooked": {"on_step": lambda step: None},
    "whole episodes": {"trajs_per_batch": 3},
    "split": {"split_trajs": True},
}


@pytest.mark.parametrize("name", ["stateless", "with state", "looks"])
@pytest.mark.parametrize("options", OPTIONS)
def test_with_options(name, options):
    if options == "marked ends" and name != "stateless":
        pytest.skip("it has no flag to mark")
    here, there = both(ALL[name], **OPTIONS[options])
    with here, there:
        assert_alike(here, there)


@pytest.mark.parametrize("name", ["stateless", "looks", "nested", "several keys"])
def test_after_a_reset_of_some_environments(name):
    here, there = both(ALL[name], frames_per_batch=7 * B)
    with here, there:
        for which in ([1, 3], [0], range(B)):
            assert_alike(here, there, 1)
            for collector in (here, there):
                collector.reset(list(which))
        assert_alike(here, there, 1)
        for collector in (here, there):
            collector.set_seed(8)
        assert_alike(here, there, 1)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from([*BY_MASK, "looks", "several keys"]),
    st.integers(1, 13),
    st.one_of(st.none(), st.integers(1, 7)),
    st.lists(
        st.one_of(
            st.just("next"),
            st.just("seed"),
            st.sets(st.integers(0, B - 1), min_size=1, max_size=B),
            st.integers(1, 30),
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_whatever_is_done_between_batches(name, T, limit, calls):
    if name == "transformed":
        limit = None  # it counts steps itself
    here, there = both(ALL[name], frames_per_batch=T * B, max_frames_per_traj=limit)
    with here, there:
        for call in calls:
            for collector in (here, there):
                if call == "seed":
                    collector.set_seed(8)
                elif isinstance(call, set):
                    collector.reset(sorted(call))
            if isinstance(call, int):
                (a, _), (b, _) = (
                    each.collect_batch(n_step=call * B) for each in (here, there)
                )
                assert_same(a, b)
            assert_alike(here, there, 1)


def push(td: Any) -> Any:
    return td.set("action", td["th"].clamp(-1, 1))


class Counts(nn.Module):
    """Has a recurrent state."""

    def forward(self, obs: torch.Tensor, state: torch.Tensor | None) -> Any:
        state = torch.zeros_like(obs[:, :1]) if state is None else state
        return (state % 2) - 0.5, state + 1


POLICIES: dict[str, tuple[str, Callable[[], Any]]] = {
    "tensordict": (
        "stateless",
        lambda: TensorDictModule(lambda th: th.clamp(-1, 1), ["th"], ["action"]),
    ),
    "on TensorDicts": ("stateless", lambda: push),
    "head": ("with state", lambda: deterministic(nn.Linear(2, 1))),
    "recurrent": ("with state", Counts),
}


@pytest.mark.parametrize("kind", POLICIES)
def test_with_policies(kind):
    name, policy = POLICIES[kind]
    torch.manual_seed(0)
    made = policy()
    here, there = both(ALL[name], lambda: made)
    with here, there:
        assert_alike(here, there)


def test_from_a_state_that_was_saved():
    chosen: dict[str, Any] = {"max_frames_per_traj": 5}
    here, there = both(ALL["with state"], **chosen)
    with here, there:
        assert_alike(here, there, 2)
        states = [each.state_dict() for each in (here, there)]
    here, there = both(ALL["with state"], **chosen)
    with here, there:
        for each, state in zip((here, there), states, strict=True):
            each.load_state_dict(state)
        assert_alike(here, there, 2)


@pytest.mark.parametrize("name", ["stateless", "with state"])
def test_a_reset_that_draws_draws_at_every_step_and_only_finished_environments_begin_anew(
    name,
):
    make = partial(Walkers, B, noise=True)
    given_ = {"seed": 3}
    long, short = (
        Collector(torchrl_on_device(make), frames_per_batch=T * B, **given_)
        for T in (40, 10)
    )
    with long, short:
        batch = long.next()
        assert_same(batch, torch.cat([short.next().clone() for _ in range(4)], 1))
    done = batch["next", "done"][..., 0]
    after = batch["next", "observation"][:, :-1]
    before = batch["observation"][:, 1:]
    goes_on = ~done[:, :-1]
    assert done.any()
    assert torch.equal(after[goes_on], before[goes_on])
    begun = before[~goes_on]
    assert (begun[:, 1] == 0).all()
    assert len(begun[:, 0].unique()) == len(begun)


# --- waiting --------------------------------------------------------------------------------------


def waits_of(make: Callable[[], Any], T: int, **options: Any) -> dict[str, int]:
    with Collector(
        torchrl_on_device(make), frames_per_batch=T * B, seed=3, **options
    ) as there:
        for _ in range(3):
            there.next()
        with Waits() as mode:
            there.next()
        assert mode.calls > T
        assert there.stats().episodes
        return dict(mode.found)


@pytest.mark.parametrize("options", [{}, {"max_frames_per_traj": 4}], ids=str)
@pytest.mark.parametrize("name", ["stateless", "with state"])
def test_nothing_waits_where_resets_are_by_mask(name, options):
    assert not waits_of(BY_MASK[name], 20, **options)


def test_otherwise_the_host_looks_once_per_step():
    class Quiet(Looking):
        """Never ends: so only looks are counted."""

        def _step(self, tensordict: Any) -> Any:
            td = super()._step(tensordict)
            for key in ("done", "terminated"):
                td.set(key, torch.zeros_like(td[key]))
            return td

    with Collector(
        torchrl_on_device(partial(Quiet, B)), frames_per_batch=20 * B, seed=3
    ) as there:
        there.next()
        with Waits() as mode:
            there.next()
    # two numbers of one copy: whether any ended, and whether any flags contradict each other
    assert mode.found == {"_local_scalar_dense": 2 * 20}


# --- capture --------------------------------------------------------------------------------------


RECORDED: dict[str, Callable[[], Any]] = {
    "stateless": BY_MASK["stateless"],
    "with state": BY_MASK["with state"],
    "random numbers": partial(Walkers, B, noise=True),
    "transformed": transformed,
}


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("options", [{}, {"max_frames_per_traj": 4}], ids=str)
def test_recorded_rollouts_are_bit_equal(pools, name, options):
    if name == "transformed":
        options = {}
    with Twins(RECORDED[name], rows=torchrl_on_device, **options) as twins:
        twins.alike(4)
        twins.do(lambda collector: collector.reset([1]))
        twins.alike(2)
        twins.do(lambda collector: collector.set_seed(5))
        twins.alike(2)
        assert twins.replays >= 4
        assert twins.plain.stats().episodes


@pytest.mark.parametrize("name", ["looks", "several keys"])
def test_where_the_host_looks_nothing_is_recorded_and_the_reason_says_so(pools, name):
    make = torchrl_on_device(ALL[name])
    with Collector(make, frames_per_batch=8 * B, seed=3, capture=True) as collector:
        collector.next()
        with pytest.raises(CaptureRefused, match="the host looks after each step"):
            collector.next()
        assert_accounted(collector)
    with Twins(ALL[name], rows=torchrl_on_device, capture="auto") as twins:
        twins.alike(4)
        assert not twins.replays
        assert "looks after each step" in twins.recorded.stats().capture.reason


# --- errors ---------------------------------------------------------------------------------------


class Contradicts(Looking):
    def _step(self, tensordict: Any) -> Any:
        td = super()._step(tensordict)
        return td.set("terminated", td["observation"][:, 1:] == 3)


def test_flags_that_contradict_each_other_are_noticed_where_the_host_looks():
    with Collector(
        torchrl_on_device(partial(Contradicts, B)), frames_per_batch=20 * B, seed=3
    ) as there:
        with pytest.raises(BadEnvOutput, match=r"row 2 of the batch.*\[0, 1, 2\]"):
            there.next()
        assert_accounted(there)


class Loses(Walkers):
    """Leaves something out of a step, or of resets by mask."""

    lost: str = ""

    def _step(self, tensordict: Any) -> Any:
        td = super()._step(tensordict)
        return td.exclude("observation") if self.lost == "step" else td

    def _reset(self, tensordict: Any = None, **options: Any) -> Any:
        td = super()._reset(tensordict)
        is_lost = self.lost == "reset" and tensordict is not None
        return td.set("observation", td["observation"].double()) if is_lost else td


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("step", r"step \(row 0 of the batch\): observation is missing"),
        (
            "reset",
            r"Loses.reset: observation is a tensor of shape \(4, 2\) and dtype torch",
        ),
    ],
)
def test_what_does_not_fit_the_specs_is_refused(lost, message):
    def make() -> Any:
        env = Loses(B)
        env.lost = lost
        return env

    with Collector(torchrl_on_device(make), frames_per_batch=20 * B, seed=3) as there:
        with pytest.raises(BadEnvOutput, match=message):
            there.next()
        assert_accounted(there)


def test_last_observations_cannot_be_kept_aside():
    with pytest.raises(BadOption, match="compact_obs: Pendulums resets on the device"):
        Collector(
            torchrl_on_device(ALL["stateless"]),
            frames_per_batch=20 * B,
            compact_obs=True,
        )


def test_which_environments_have_rows_on_their_device():
    class Masked(Walkers):
        def __init__(self) -> None:
            super().__init__(B)
            mask = torch.ones(B, 3, dtype=torch.bool)
            self.action_spec = Categorical(3, (B,), mask=mask)

    for make in ALL.values():
        assert can_have_rows_there(make())
    counting = partial(mocks.CountingEnv, max_steps=3)
    for env in (
        counting(),
        SerialEnv(2, counting),
        mocks.CountingEnvWithString(max_steps=3),
        mocks.HeterogeneousCountingEnv(max_steps=3, batch_size=(2,)),
        Masked(),
    ):
        assert not can_have_rows_there(env), env
    itself = Pendulums(B)
    itself._torchrl_native_autoreset = True
    assert not can_have_rows_there(itself)


@pytest.mark.parametrize("scenario", ["balance", "navigation", "simple_tag"])
def test_vmas(scenario):
    pytest.importorskip("vmas")
    from torchrl.envs import VmasEnv

    make = partial(VmasEnv, scenario, num_envs=B, max_steps=9)
    batches: list[list[TensorDict]] = []
    for envs in (make, torchrl_on_device(make)):  # it has one generator per process
        with Collector(envs, frames_per_batch=20 * B, seed=3) as collector:
            batches.append([collector.next().clone() for _ in range(3)])
            assert collector.stats().episodes
    for here, there in zip(*batches, strict=True):
        assert_same(here, there)
