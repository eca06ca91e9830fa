"""Policies, batches and environments on a CUDA device give what they give on the CPU."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from muster import (
    Collector,
    MultiAsyncCollector,
    MultiSyncCollector,
    load_state,
    policies,
    save_state,
)
from muster.episodes.clock import TrajectoryClock
from muster.testing import ChainEnv, CountingEnv, OracleEnv, TorchCartPole, check_stream
from tests.tools import assert_accounted, assert_chain, assert_same

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

PROCESSES = partial(MultiSyncCollector, num_workers=2)
KINDS = {
    "in process": Collector,
    "processes": PROCESSES,
    "threads": partial(PROCESSES, backend="threads"),
    "server": partial(PROCESSES, inference="server"),
    "first ready": partial(MultiAsyncCollector, num_workers=2),
}
KIND = pytest.mark.parametrize("kind", KINDS)


def parity(obs: torch.Tensor) -> torch.Tensor:
    """A deterministic policy whose results are exact on every device."""
    return obs.sum(-1).long() % 2


class Parity(nn.Module):
    """``parity`` as a module; it has a parameter, and so a device."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return (obs.sum(-1).long() + self.shift.round().long()) % 2


class Sampling(nn.Module):
    """A plain module that draws from the global generator of its device."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 2)

    def forward(
        self, obs: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        drawn = torch.distributions.Categorical(logits=self.net(obs))
        action = drawn.sample()
        return action, {"action_log_prob": drawn.log_prob(action)}


def collector(
    kind: str, env: Any, policy: Any, *, num_envs: int = 2, **options: Any
) -> Any:
    envs = env if kind == "in process" else [env, env]
    return KINDS[kind](
        envs,
        policy,
        num_envs=num_envs,
        **{"frames_per_batch": 64, "seed": 3, **options},
    )


def oracles(kind: str, tmp_path: Any, policy: Any, **options: Any) -> Any:
    """A collector of environments whose data says by itself if any is lost or doubled."""
    envs = [
        partial(OracleEnv, tmp_path / "counts", 2 * i, 2)
        for i in range(1 if kind == "in process" else 2)
    ]
    return KINDS[kind](
        envs, policy, **{"num_envs": 2, "frames_per_batch": 64, "seed": 3, **options}
    )


def batches(kind: str, env: Any, policy: Any, n: int = 3, **options: Any) -> Any:
    with collector(kind, env, policy, **options) as running:
        got = [running.next() for _ in range(n)]
        assert_accounted(running)
    return got


@KIND
@pytest.mark.parametrize(
    ("option", "is_on"),
    [("policy_device", "cpu"), ("storing_device", DEVICE), ("device", DEVICE)],
)
def test_a_device_changes_where_a_batch_is_and_nothing_else(kind, option, is_on):
    here = batches(kind, ChainEnv, Parity())
    there = batches(kind, ChainEnv, Parity(), **{option: DEVICE})
    for a, b in zip(here, there, strict=True):
        leaves = [leaf for leaf in b.values(True, True) if torch.is_tensor(leaf)]
        assert {leaf.device.type for leaf in leaves} == {torch.device(is_on).type}
        assert_chain(b.cpu())
        if (
            kind != "first ready"
        ):  # the order of batches is that in which workers finish
            assert_same(a, b.cpu())


@pytest.mark.parametrize("kind", ["in process", "processes"])
def test_a_batch_is_complete_while_the_device_is_busy(kind):
    """The rows of a slot are reused only after they were copied to the device."""
    expected = batches(kind, ChainEnv, parity, 6, frames_per_batch=4096)
    got = []
    with collector(
        kind, ChainEnv, parity, frames_per_batch=4096, storing_device=DEVICE
    ) as running:
        for _ in range(6):
            torch.cuda._sleep(50_000_000)  # the copy waits in the stream behind it
            got.append(running.next())
    for a, b in zip(expected, got, strict=True):
        assert_same(a, b.cpu())


@KIND
@pytest.mark.parametrize(
    "make",
    [
        lambda: policies.categorical(nn.Linear(4, 2)),
        Sampling,
        lambda: TensorDictModule(
            nn.Sequential(nn.Linear(4, 2), Argmax()), ["observation"], ["action"]
        ),
    ],
    ids=["head", "module", "tensordict"],
)
def test_the_same_seed_gives_the_same_batches(kind, make):
    torch.manual_seed(1)
    policy = make().to(DEVICE)
    first = batches(kind, "CartPole-v1", policy, policy_device=DEVICE)
    before = torch.cuda.get_rng_state(), torch.get_rng_state()
    second = batches(kind, "CartPole-v1", policy, policy_device=DEVICE)
    assert all(
        map(torch.equal, before, (torch.cuda.get_rng_state(), torch.get_rng_state()))
    )
    if kind != "first ready":
        for a, b in zip(first, second, strict=True):
            assert_same(a, b)


class Argmax(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.argmax(-1)


class Saved(TorchCartPole):
    """Can be saved."""

    def get_state(self) -> dict[str, Any]:
        parts = {
            "state": self.state,
            "steps": self._steps,
            "generator": self._generator.get_state(),
        }
        return {name: part.cpu().numpy().copy() for name, part in parts.items()}

    def set_state(self, state: dict[str, Any]) -> None:
        self.state, self._steps = (
            torch.from_numpy(state[name]).to(self.device) for name in ("state", "steps")
        )
        self._generator.set_state(torch.from_numpy(state["generator"]))


@pytest.mark.parametrize("on", ["rows", "policy"])
def test_a_collection_goes_on_bit_by_bit_after_loading(on):
    torch.manual_seed(1)
    net = nn.Linear(4, 2).to(DEVICE)
    env: Any = partial(Saved, 4, DEVICE) if on == "rows" else "CartPole-v1"
    options: dict[str, Any] = {} if on == "rows" else {"num_envs": 4}
    policy = policies.categorical(net) if on == "rows" else Sampling().to(DEVICE)

    def make() -> Collector:
        return Collector(env, policy, frames_per_batch=64, seed=3, **options)

    with make() as running:
        running.next()
        state = running.state_dict()
        expected = [running.next().clone() for _ in range(2)]
    with make() as running:
        running.load_state_dict(state)
        for batch in expected:
            assert_same(batch.cpu(), running.next().cpu())


def test_a_policy_that_is_on_the_device_is_not_copied():
    """``device="cuda"`` means the current device, on which the policy is already: its changes act
    at once.
    """
    policy = Parity().to(DEVICE)
    with Collector(
        ChainEnv, policy, num_envs=2, frames_per_batch=8, device=DEVICE, seed=0
    ) as running:
        before = running.next()
        with torch.no_grad():
            policy.shift += 1
        after = running.next()
    for batch, shift in ((before, 0), (after, 1)):
        assert torch.equal(batch["action"], (batch["observation"].sum(-1) + shift) % 2)


@KIND
@pytest.mark.parametrize(
    ("trained", "acting"), [(DEVICE, "cpu"), (DEVICE, DEVICE), ("cpu", DEVICE)]
)
def test_weights_reach_the_policy_on_another_device(kind, trained, acting):
    policy = Parity().to(trained)
    with collector(
        kind, ChainEnv, policy, policy_device=acting, track_policy_version=True
    ) as running:
        for shift in range(4):
            with torch.no_grad():
                policy.shift.fill_(shift)
            running.update_policy_weights_(policy)
            batch = running.next()
            versions = batch["collector", "policy_version"].reshape(
                batch["action"].shape
            )
            if (
                kind != "first ready"
            ):  # there, a rollout may have begun with the weights before
                assert (versions == shift + 1).all()
            acted = (versions - 1).clamp(
                min=0
            )  # the shift of that version; the first weights have none
            assert torch.equal(
                batch["action"], (batch["observation"].sum(-1) + acted) % 2
            ), shift


@KIND
def test_a_killed_worker_that_computes_on_the_device_is_restarted(kind, tmp_path):
    if kind in ("in process", "threads"):
        pytest.skip("no process to kill")
    with oracles(
        kind, tmp_path, Parity(), policy_device=DEVICE, on_failure="restart"
    ) as running:
        got = [running.next().clone() for _ in range(2)]
        os.kill(running.stats().workers[0].pid, signal.SIGKILL)
        got += [running.next().clone() for _ in range(6)]
        assert_accounted(running)
        assert sum(worker.restarts for worker in running.stats().workers) == 1
    check_stream(got)


@pytest.mark.parametrize("option", ["compile_policy", "cudagraph_policy"])
@pytest.mark.parametrize("envs", ["host", "device"])
def test_a_compiled_policy_gives_the_same_batches(option, envs):
    torch.manual_seed(1)
    policy = TensorDictModule(
        nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2), Argmax()),
        ["observation"],
        ["action"],
    ).to(DEVICE)
    env: Any = partial(TorchCartPole, 64, DEVICE) if envs == "device" else "CartPole-v1"
    options = {} if envs == "device" else {"num_envs": 2}
    expected, got = (
        batches(
            "in process",
            env,
            copy.deepcopy(policy),
            3,
            frames_per_batch=640,
            seed=3,
            num_envs=options.get("num_envs"),
            policy_device=DEVICE,
            **more,
        )
        for more in ({}, {option: True})
    )
    for a, b in zip(expected, got, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("stream", ["default", "own"])
@pytest.mark.parametrize("kind", ["in process", "threads"])
def test_environments_on_the_device(kind, stream):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2)).to(DEVICE)
    make: Callable[..., Any] = partial(TorchCartPole, 256, DEVICE)
    on = torch.cuda.current_stream() if stream == "default" else torch.cuda.Stream()
    with (
        torch.cuda.stream(on),
        collector(
            kind,
            make,
            policies.categorical(net),
            num_envs=None,
            frames_per_batch=256 * 128,
            max_frames_per_traj=60,
            storing_device=DEVICE,  # the rows of several workers are on the host
        ) as running,
    ):
        kept = [running.next() for _ in range(3)]
        assert_accounted(running)
        whole = torch.cat(kept, -1)
        assert whole["observation"].device.type == torch.device(DEVICE).type
        after, done = whole["next"], whole["next", "done"][..., 0]
        going_on = ~done[..., :-1]
        assert torch.equal(
            after["observation"][..., :-1, :][going_on],
            whole["observation"][..., 1:, :][going_on],
        )
        ids = whole["collector", "traj_ids"]
        assert torch.equal(ids[..., 1:] != ids[..., :-1], done[..., :-1])
        assert torch.equal(done, (after["terminated"] | after["truncated"])[..., 0])
        counts = whole["step_count"][..., 0]
        assert torch.equal(counts[..., 1:][going_on], counts[..., :-1][going_on] + 1)
        assert not counts[..., 1:][~going_on].any()
        late = (after["step_count"] >= 60) & ~after["terminated"]
        assert torch.equal(after["truncated"], late)
        assert whole["action"].float().mean().item() not in (0, 1)
        logits = net(whole["observation"])
        log_probs = logits.log_softmax(-1).gather(-1, whole["action"][..., None])[
            ..., 0
        ]
        assert torch.allclose(log_probs, whole["action_log_prob"], atol=1e-4)


class Remembering(nn.Module):
    """A recurrent actor-critic: the state counts the steps of an episode, and is the value."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(1))

    def forward(self, obs: torch.Tensor, state: torch.Tensor | None) -> Any:
        state = (
            obs.new_zeros((*obs.shape[:-1], 1), dtype=torch.float32)
            if state is None
            else state
        )
        state = state + self.one
        return (state[..., 0] % 2).long(), {"state_value": state}, state


@pytest.mark.parametrize("kind", ["in process", "processes", "threads"])
def test_a_recurrent_policy_begins_anew_with_each_episode(kind):
    for batch in batches(
        kind, partial(CountingEnv, 5), Remembering(), policy_device=DEVICE
    ):
        since = batch["observation"][..., -1]
        assert torch.equal(batch["state_value"][..., 0], since.float() + 1)
        assert torch.equal(batch["action"], (since + 1).long() % 2)


def test_values_after_the_last_rows():
    make, policy = partial(CountingEnv, 5), Remembering()
    found = []
    for device in (None, DEVICE):
        with Collector(
            make, copy.deepcopy(policy), num_envs=2, seed=0, policy_device=device
        ) as running:
            _, stats = running.collect_batch(n_step=16, bootstrap="truncations")
        found.append(stats.last_value_est)
    assert found[0].any()
    assert torch.equal(found[0], found[1].cpu())


@pytest.mark.parametrize("envs", ["host", "device"])
def test_collecting_steps_and_episodes_into_a_buffer_on_the_device(envs):
    data = pytest.importorskip("torchrl.data")
    buffer = data.ReplayBuffer(storage=data.LazyTensorStorage(20_000, device=DEVICE))
    make: Any = (
        partial(TorchCartPole, 16, DEVICE) if envs == "device" else "CartPole-v1"
    )
    options = {} if envs == "device" else {"num_envs": 16}
    with Collector(
        make, frames_per_batch=160, seed=0, replay_buffer=buffer, **options
    ) as running:
        steps = running.collect(n_step=320)
        assert len(buffer) == steps.n_collected_steps == 320
        episodes = running.collect(n_episode=20)
        assert_accounted(running)
    assert episodes.n_collected_episodes == 20
    assert int(episodes.lens.sum()) <= episodes.n_collected_steps
    held = buffer[:]
    assert len(buffer) == 320 + episodes.n_collected_steps
    assert held["observation"].device.type == torch.device(DEVICE).type


@KIND
def test_a_replay_buffer_on_the_device_holds_every_frame_once(kind, tmp_path):
    data = pytest.importorskip("torchrl.data")
    buffer = data.ReplayBuffer(storage=data.LazyTensorStorage(1_000, device=DEVICE))
    with oracles(
        kind,
        tmp_path,
        Parity(),
        policy_device=DEVICE,
        replay_buffer=buffer,
        total_frames=256,
    ) as running:
        for _ in running:
            pass
    held = buffer[:]["observation"]
    assert held.device.type == torch.device(DEVICE).type
    assert len({tuple(row) for row in held.tolist()}) == 256


def test_evaluation():
    from muster import Evaluator

    found = []
    for policy in (Parity().to(DEVICE), Parity()):
        with Evaluator(
            partial(CountingEnv, 5), policy, episodes=4, num_envs=2, seed=0
        ) as evaluator:
            found.append(
                [
                    (r.env_id, r.episode_return, r.length)
                    for r in evaluator.evaluate().records
                ]
            )
    assert found[0] == found[1]
    assert len(found[0]) == 4


def test_a_recording_of_batches_on_the_device(tmp_path):
    from muster import load

    with Collector(
        partial(TorchCartPole, 4, DEVICE),
        frames_per_batch=40,
        seed=0,
        record=tmp_path / "run",
    ) as running:
        got = [running.next().cpu() for _ in range(3)]
    for a, b in zip(got, load(tmp_path / "run"), strict=True):
        assert_same(a, b)


def test_a_saved_training_state(tmp_path):
    net = nn.Linear(4, 2).to(DEVICE)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 4, device=DEVICE)).sum().backward()
    optimizer.step()
    save_state(
        tmp_path / "saved",
        {"net": net.state_dict(), "optimizer": optimizer.state_dict()},
    )
    loaded = load_state(tmp_path / "saved")
    other = nn.Linear(4, 2).to(DEVICE)
    again = torch.optim.Adam(other.parameters())
    other.load_state_dict(loaded["net"])
    again.load_state_dict(loaded["optimizer"])
    moment = again.state[other.weight]["exp_avg"]
    assert moment.device == net.weight.device
    assert torch.equal(moment, optimizer.state[net.weight]["exp_avg"])
    assert torch.equal(other.weight, net.weight)


def test_nodes_get_weights_from_a_policy_on_the_device():
    from muster import DistributedCollector

    policy = Parity().to(DEVICE)
    with DistributedCollector(
        [ChainEnv] * 2,
        policy,
        frames_per_batch=32,
        total_frames=-1,
        backend="gloo",
        sync=True,
        seed=0,
        policy_device="cpu",
        launcher="mp",
    ) as running:
        for shift in range(2):
            with torch.no_grad():
                policy.shift.fill_(shift)
            running.update_policy_weights_(policy)
            batch = running.next()
            assert torch.equal(
                batch["action"], (batch["observation"].sum(-1) + shift) % 2
            )


@pytest.mark.parametrize("B", [1, 64, 5000])
def test_ids_and_records_are_those_of_the_clock_on_arrays(B):
    """Computed from the batches, bit by bit."""
    clock = TrajectoryClock(np.arange(B), B)
    make = partial(TorchCartPole, B, DEVICE, max_steps=40)
    with Collector(
        make, frames_per_batch=B * 50, max_frames_per_traj=30, seed=0
    ) as running:
        for _ in range(4):
            batch = running.next().cpu()
            reward, terminated, truncated, done, counts = (
                column.reshape(B, 50).T.numpy()
                for column in (
                    batch["next", "reward"],
                    batch["next", "terminated"],
                    batch["next", "truncated"],
                    batch["next", "done"],
                    batch["step_count"],
                )
            )
            ids = np.zeros((50, B), np.int64)
            steps = np.zeros((50, B), np.int64)
            clock.fill_ids(ids, done)
            clock.fill_step_counts(steps, done)
            assert (
                batch["collector", "traj_ids"].reshape(B, 50).T.numpy() == ids
            ).all()
            assert (counts == steps).all()
            expected = clock.advance(reward, terminated, truncated, done)
            for a, b in zip(
                expected.columns(), running.episodes.columns(), strict=True
            ):
                assert a.dtype == b.dtype
                assert a.tobytes() == b.tobytes()
        assert_accounted(running)


def test_no_batch_waits_for_the_device():
    torch.manual_seed(0)
    head = policies.categorical(nn.Linear(4, 2).to(DEVICE))
    with Collector(
        partial(TorchCartPole, 64, DEVICE), head, frames_per_batch=64 * 20
    ) as running:
        for _ in range(3):
            running.next()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(5):
                running.next()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert running.stats().episodes


def test_a_batch_is_the_memory_that_the_environments_write_and_comes_back():
    with Collector(
        partial(TorchCartPole, 8, DEVICE), frames_per_batch=80, seed=0
    ) as running:
        kept = running.next()["next", "reward"]
        copy_of_it = kept.clone()
        others = {running.next()["observation"].data_ptr() for _ in range(5)}
        assert len(others) <= 3
        assert torch.equal(kept, copy_of_it)
        assert running.stats().slots["lent"] == 1
        del kept
        assert running.stats().slots["lent"] == 0
