"""Collectors with workers: the same bits wherever groups run, and who works when."""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import nn

from muster import (
    Collector,
    Evaluator,
    Execution,
    MultiAsyncCollector,
    MultiSyncCollector,
)
from muster.errors import BadOption, BadWeights, EnvError, PolicyError, UnsupportedEnv
from muster.policies import categorical
from muster.rollout.progress import STOP
from muster.testing import ChainEnv, CountingEnv
from tests.fakes.actors import Actor
from tests.tools import assert_accounted, assert_same, column, counting
from tests.waits import wait_until
from tests.warned import noted_warnings

B, T, GROUPS = 2, 6, 3
PATIENCE = 60.0  # seconds after which a test gives up
IDS, VERSION, VALID = (
    ("collector", name) for name in ("traj_ids", "policy_version", "valid")
)


# --- what a worker has of its parent --------------------------------------------------------------


class Registered(CountingEnv):
    """Writes into a dictionary of another process who has made it."""

    def __init__(self, made: Any) -> None:
        super().__init__(3)
        made[os.getpid()] = (
            Path("/proc/self/cmdline").read_bytes()
            + Path("/proc/self/environ").read_bytes()
        )
        keeper = Path(f"/proc/{os.getppid()}")
        made[os.getppid()] = (keeper / "cmdline").read_bytes() + (
            keeper / "environ"
        ).read_bytes()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_workers_reach_a_manager_of_their_parent_and_nobody_else_can_read_its_key(
    method,
):
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        made = manager.dict()
        factory = partial(Registered, made)
        with MultiSyncCollector(
            [factory] * 2, None, frames_per_batch=4, start_method=method
        ) as collector:
            pids = {worker.pid for worker in collector.stats().workers}
            assert collector.next() is not None
        public = dict(made)
    assert pids < public.keys()
    key = bytes(multiprocessing.current_process().authkey)
    assert not any(
        secret in text
        for text in public.values()
        for secret in (key, key.hex().encode())
    )


# --- the same bits wherever groups run ------------------------------------------------------------


def mlp(inputs: int, outputs: int) -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


class Dropout(nn.Module):
    """Draws from torch's global generator."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.net = mlp(inputs, 2)

    def forward(self, obs: torch.Tensor) -> Any:
        logits = self.net(nn.functional.dropout(obs, 0.3))
        return torch.distributions.Categorical(logits=logits).sample(), {
            "logits": logits
        }


class Recurrent(nn.Module):
    """A cell with dropout: recurrent state, and draws from torch's global generator."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.cell, self.out = nn.GRUCell(inputs, 6), nn.Linear(6, 2)

    def forward(self, obs: torch.Tensor, state: torch.Tensor | None) -> Any:
        state = self.cell(nn.functional.dropout(obs, 0.3), state)
        return torch.distributions.Categorical(logits=self.out(state)).sample(), state


class Global(nn.Module):
    """Draws from Python's and NumPy's global generators."""

    def forward(self, obs: torch.Tensor) -> Any:
        draw = random.random() + np.random.rand()
        return torch.full(obs.shape[:-1], int(draw * 1000) % 2), {
            "draw": torch.full(obs.shape[:-1], draw)
        }


def sampled(logits: torch.Tensor) -> torch.Tensor:
    return torch.distributions.Categorical(logits=logits).sample()


def tensordict_policy() -> Any:
    net = TensorDictModule(mlp(4, 2), in_keys=["observation"], out_keys=["logits"])
    return TensorDictSequential(
        net, TensorDictModule(sampled, in_keys=["logits"], out_keys=["action"])
    )


def recurrent_tensordict_policy() -> Any:
    modules = pytest.importorskip("torchrl.modules")
    torch.manual_seed(7)
    lstm = modules.LSTMModule(4, 5, in_key="observation", out_key="features")
    net = TensorDictModule(nn.Linear(5, 2), in_keys=["features"], out_keys=["logits"])
    return TensorDictSequential(
        lstm, net, TensorDictModule(sampled, in_keys=["logits"], out_keys=["action"])
    )


def cart_pole() -> Any:
    return gymnasium.make("CartPole-v1", max_episode_steps=9)


def pendulum() -> Any:
    return gymnasium.make("Pendulum-v1", max_episode_steps=9)


def torchrl_pendulum() -> Any:
    from torchrl.envs import GymEnv

    return GymEnv("Pendulum-v1")


def vector() -> Any:
    return SyncVectorEnv([cart_pole] * B)


def linear() -> Any:
    torch.manual_seed(7)
    return TensorDictModule(
        nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"]
    )


CASES: dict[str, tuple[Any, Callable[[], Any], dict[str, Any]]] = {
    "head": (cart_pole, lambda: categorical(mlp(4, 2)), {}),
    "torch's generator": (
        counting(4, noise=True),
        lambda: Dropout(3),
        {"execution": Execution(executor=False)},
    ),
    "other generators": (counting(4, noise=True), Global, {}),
    "recurrent": (counting(4, noise=True), lambda: Recurrent(3), {}),
    "TensorDict": (cart_pole, tensordict_policy, {}),
    "recurrent TensorDict": (cart_pole, recurrent_tensordict_policy, {}),
    "random": (pendulum, lambda: None, {"max_frames_per_traj": 5}),
    "TorchRL": (torchrl_pendulum, linear, {"num_envs": None, "max_frames_per_traj": 4}),
    "vector": (vector, lambda: categorical(mlp(4, 2)), {"num_envs": None}),
}
PLACES: dict[str, dict[str, Any]] = {
    **{f"{n} processes": {"num_workers": n} for n in (1, 2, 3)},
    **{f"{n} threads": {"num_workers": n, "backend": "threads"} for n in (2, 3)},
}


def batches_of(
    cls: Any, env: Any, policy: Any, count: int = 3, **options: Any
) -> list[Any]:
    envs = options.get("num_envs", B) or (B if env is vector else 1)
    frames = envs * T * (1 if issubclass(cls, MultiAsyncCollector) else GROUPS)
    options = {
        "num_envs": B,
        "frames_per_batch": frames,
        "total_frames": count * frames,
        "seed": 5,
        **options,
    }
    with cls([env] * GROUPS, policy, **options) as c:
        found = list(c)
        assert_accounted(c)
    return found


@pytest.fixture(scope="module")
def here() -> dict[str, list[Any]]:
    """The batches of ``Collector``."""
    return {
        name: batches_of(Collector, env, policy(), **options)
        for name, (env, policy, options) in CASES.items()
        if name != "TorchRL" or gymnasium.spec("Pendulum-v1")
    }


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", CASES)
def test_where_groups_run_changes_no_bit(here, case, place):
    env, policy, options = CASES[case]
    found = batches_of(MultiSyncCollector, env, policy(), **options, **PLACES[place])
    for a, b in zip(found, here[case], strict=True):
        assert (a.shape, a.names) == (b.shape, b.names)
        assert_same(a, b)


def test_the_cases_are_random(here):
    for case, batches in here.items():
        columns = {"draw", "logits", "action"} & set(batches[0].keys())
        parts = [torch.cat([b[key] for b in batches], 0) for key in columns]
        assert all(len(part.unique()) > 1 for part in parts), case


@settings(max_examples=8)
@given(
    rows=st.integers(1, 5),
    fewer=st.integers(0, 1),
    random_batches=st.integers(0, 2),
    workers=st.fixed_dictionaries(
        {
            "num_workers": st.integers(1, 3),
            "backend": st.sampled_from(["processes", "threads"]),
        }
    ),
    options=st.fixed_dictionaries(
        {
            "num_envs": st.integers(1, 3),
            "max_frames_per_traj": st.sampled_from([None, 2, 3]),
            "reset_at_each_iter": st.booleans(),
            "reset_when_done": st.booleans(),
            "layout": st.sampled_from(["batch_major", "time_major"]),
            "compact_obs": st.booleans(),
        }
    ),
)
def test_whatever_the_options(rows, fewer, random_batches, workers, options):
    frames = GROUPS * options["num_envs"] * rows - fewer
    options |= {
        "frames_per_batch": frames,
        "total_frames": 4 * frames,
        "init_random_frames": random_batches * frames,
    }
    options |= {"seed": 11, "track_policy_version": True}
    runs = []
    for cls, more in ((Collector, {}), (MultiSyncCollector, workers)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            c = cls([ChainEnv] * GROUPS, Parity(), **options, **more)
        with c:
            runs.append((list(c), c.final_observations(), list(c.episodes)))
            stats = c.stats()
            assert stats.frames == 4 * frames
            assert_accounted(c)
    for a, b in zip(runs[0][0], runs[1][0], strict=True):
        assert_same(a, b)
    assert_same(runs[0][1], runs[1][1])
    assert runs[0][2] == runs[1][2]


class Parity(nn.Module):
    """Acts on states of ``ChainEnv`` and on draws from torch's global generator."""

    def forward(self, obs: torch.Tensor) -> Any:
        draw = torch.rand(obs.shape[:-1])
        return (obs[..., 2] + (draw * 100).long()) % 5, {"draw": draw}


def of_groups(batches: list[Any], envs: int = B) -> list[list[Any]]:
    """Batches of one rollout each, by the group that made them."""
    found: list[list[Any]] = [[] for _ in range(GROUPS)]
    for batch in batches:
        first = batch[IDS].reshape(-1, T)[0, 0]
        found[int(first) % (GROUPS * envs) // envs].append(batch)
    return found


@pytest.mark.parametrize("place", ["2 processes", "3 threads"])
@pytest.mark.parametrize("case", ["head", "recurrent", "TorchRL", "vector"])
def test_without_waiting_every_group_has_the_same_stream(here, case, place):
    if case == "recurrent" and "threads" in place:
        pytest.skip("threads beside the user's share the process's generators")
    env, policy, options = CASES[case]
    found = batches_of(
        MultiAsyncCollector, env, policy(), 9, **options, **PLACES[place]
    )
    envs = 1 if case == "TorchRL" else B
    for group, parts in enumerate(of_groups(found, envs)):
        for part, batch in zip(parts, here[case], strict=False):
            assert_same(part, batch[group])
    assert len(found) == 9


@pytest.mark.parametrize("cls", [MultiSyncCollector, MultiAsyncCollector])
@pytest.mark.parametrize("backend", ["processes", "threads"])
def test_the_users_generators_are_left_alone(cls, backend):
    policy = categorical(mlp(3, 2))
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    expected = (
        torch.rand(4).tolist(),
        np.random.rand(4).tolist(),
        [random.random() for _ in range(4)],
    )
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    drawn: tuple[list[float], list[float], list[float]] = ([], [], [])
    options = {"num_envs": B, "frames_per_batch": B * T * GROUPS, "backend": backend}
    with cls([counting(noise=True)] * GROUPS, policy, **options) as c:
        for _ in range(3):
            drawn[0].append(torch.rand(1).item())
            drawn[1].append(np.random.rand())
            drawn[2].append(random.random())
            c.next()
    drawn[0].append(torch.rand(1).item())
    drawn[1].append(np.random.rand())
    drawn[2].append(random.random())
    assert drawn == expected


# --- how rollouts are joined ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cat", "dim", "shape"),
    [
        ("stack", None, (3, B, T)),
        ("cat", 0, (3 * B, T)),
        (0, 0, (3 * B, T)),
        (1, 1, (B, 3 * T)),
        (-1, 1, (B, 3 * T)),
    ],
)
def test_rollouts_are_stacked_or_concatenated(here, cat, dim, shape):
    env, policy, options = CASES["head"]
    found = batches_of(
        MultiSyncCollector, env, policy(), **options, num_workers=2, cat_results=cat
    )
    for a, b in zip(found, here["head"], strict=True):
        assert a.shape == shape
        assert a.names[-1] == "time"
        assert_same(a, b if dim is None else torch.cat(b.unbind(0), dim))


def test_concatenated_batches_free_their_slots():
    with MultiSyncCollector(
        [CountingEnv] * 2,
        None,
        frames_per_batch=8,
        cat_results="cat",
        backend="threads",
    ) as c:
        batches = [c.next() for _ in range(5)]
        assert [column(b, "next", "reward") for b in batches[:2]] == [
            [1, 2, 3, 1] * 2,
            [2, 3, 1, 2] * 2,
        ]
        assert c.stats().slots["lent"] == 0
        assert {b.shape for b in batches} == {(8,)}


def test_groups_of_different_sizes_can_be_concatenated_but_not_stacked():
    factories = [
        partial(SyncVectorEnv, [counting(length)] * n)
        for length, n in ((3, 2), (4, 1), (5, 3))
    ]
    options = {"frames_per_batch": 6 * T, "seed": 1, "backend": "threads"}
    with MultiSyncCollector(factories, None, cat_results="cat", **options) as c:
        batch = c.next()
        assert batch.shape == (6, T)
        assert batch["observation"][:, 0, 0].tolist() == [3, 3, 4, 5, 5, 5]
        assert (batch[IDS][:, 0]).tolist() == [0, 1, 2, 3, 4, 5]
        assert c.stats().frames == 6 * T
    with (
        MultiSyncCollector(factories, None, **options) as c,
        pytest.raises(
            BadOption,
            match="differ in number of environments.*2 environments.*1 environments",
        ),
    ):
        c.next()
    with pytest.raises(
        BadOption, match=r"groups \[0, 1\] of worker 0 differ in number of environments"
    ):
        MultiSyncCollector(factories, None, cat_results="cat", **options, num_workers=2)


def test_a_dimension_that_batches_do_not_have():
    with pytest.raises(BadOption, match="cat_results=3"):
        MultiSyncCollector(
            [CountingEnv] * 2,
            None,
            frames_per_batch=8,
            cat_results=3,
            backend="threads",
        )


@pytest.mark.parametrize("cls", [MultiSyncCollector, MultiAsyncCollector])
def test_update_at_each_batch_publishes_what_the_optimizer_has_changed(cls):
    policy = Actor(0.0)
    options = {
        "frames_per_batch": 8,
        "total_frames": 48,
        "update_at_each_batch": True,
        "track_policy_version": True,
    }
    with cls([CountingEnv] * 2, policy, **options) as c:
        for number, batch in enumerate(c):
            assert torch.equal(batch["weight"] + 1, batch[VERSION].float())
            if cls is MultiSyncCollector:
                assert batch[VERSION].unique().tolist() == [number + 1]
            policy.weight.data += 1
        assert c.policy_version == 6


class Holder:
    """A policy that is no module, and has one."""

    def __init__(self) -> None:
        self.net = Actor(0.0)

    def __call__(self, obs: torch.Tensor) -> Any:
        return self.net(obs)


@pytest.mark.parametrize("model_id", ["net", "policy.net"])
def test_a_part_of_a_policy_that_is_no_module_is_named_by_its_path(model_id):
    with MultiSyncCollector(
        [CountingEnv] * 2, Holder(), frames_per_batch=8, backend="threads"
    ) as c:
        c.update_policy_weights_(Actor(7.0), model_id=model_id)
        assert c.next()["weight"].unique().tolist() == [7.0]


# --- who works when -------------------------------------------------------------------------------


class GatedEnv(CountingEnv):
    """Notes every step in a file, and waits from step ``free`` on (of its life) for a byte from a
    FIFO before each.
    """

    def __init__(
        self, log: Path, gate: Path | None = None, free: int = 0, length: int = 9
    ) -> None:
        super().__init__(length)
        self.log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.gate = os.open(gate, os.O_RDWR) if gate is not None else None
        self.free = free

    def step(self, action: int) -> Any:
        if self.gate is not None and self.executed >= self.free:
            os.read(self.gate, 1)
        os.write(self.log, b".")
        return super().step(action)

    def close(self) -> None:
        os.close(self.log)
        if self.gate is not None:
            os.close(self.gate)
        super().close()


class Gates:
    """Makes environments that wait, and lets them go on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        os.mkfifo(folder / "gate")
        self._gate = os.open(folder / "gate", os.O_RDWR)

    def env(
        self, group: int, *, gated: bool = False, free: int = 0
    ) -> Callable[[], GatedEnv]:
        return partial(
            GatedEnv,
            self.folder / f"log{group}",
            self.folder / "gate" if gated else None,
            free,
        )

    def open(self, steps: int) -> None:
        os.write(self._gate, b"." * steps)

    def steps(self, group: int) -> int:
        """Made by the environments of a group so far."""
        return (self.folder / f"log{group}").stat().st_size

    def close(self) -> None:
        os.close(self._gate)


@pytest.fixture
def gates(tmp_path: Path) -> Iterator[Gates]:
    made = Gates(tmp_path)
    yield made
    made.close()


@contextmanager
def beside(action: Callable[[], None]) -> Iterator[None]:
    """Something that a thread does meanwhile."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    yield
    thread.join(PATIENCE)
    assert not thread.is_alive()


@pytest.mark.parametrize("backend", ["processes", "threads"])
@pytest.mark.parametrize("cat", ["stack", -1])
def test_those_who_are_late_are_stopped_and_what_they_lack_is_blank_or_left_out(
    gates, backend, cat
):
    factories = [gates.env(0), gates.env(1), gates.env(2, gated=True, free=2)]
    options = {
        "num_envs": 1,
        "frames_per_batch": 12,
        "preemptive_threshold": 0.67,
        "seed": 1,
    }
    with MultiSyncCollector(
        factories, None, backend=backend, cat_results=cat, **options
    ) as c:
        cells = c._engine.source.pool.handles[2].process.status_page.cells

        def release() -> None:
            wait_until(lambda: cells[STOP] > 0)
            gates.open(1)  # it ends after that step

        with beside(release):
            batch = c.next()
        rows = gates.steps(2)  # at most 3; fewer if it was late already when it began
        assert [gates.steps(0), gates.steps(1)] == [4, 4]
        assert 1 <= rows <= 3
        blank = 4 - rows
        ahead = [1, 2, 3, 4]
        if cat == "stack":
            assert column(batch, "next", "reward") == [
                [ahead],
                [ahead],
                [ahead[:rows] + [0] * blank],
            ]
            assert batch[VALID][:, 0].tolist() == [
                [True] * 4,
                [True] * 4,
                [True] * rows + [False] * blank,
            ]
            assert batch[IDS][2, 0].tolist() == [2] * rows + [-1] * blank
            assert not batch["next", "done"].any()
        else:
            assert batch.shape == (1, 8 + rows)
            assert column(batch, "next", "reward") == [ahead + ahead + ahead[:rows]]
            assert batch[VALID].all()
        stats = c.stats()
        assert (stats.frames, stats.executed, stats.cut_short) == (
            8 + rows,
            8 + rows,
            blank,
        )
        gates.open(100)
        batch = c.next()  # it goes on where it was, whoever is stopped now
        assert batch["next", "reward"][batch[IDS] == 2][0] == rows + 1
        assert c.stats().frames == 8 + rows + int(batch[VALID].sum())
        assert_accounted(c)


def test_a_total_is_exact_where_some_are_stopped(gates):
    """What a stopped group lacks is made later."""
    factories = [gates.env(0), gates.env(1, gated=True, free=1)]
    options = {
        "frames_per_batch": 8,
        "total_frames": 16,
        "preemptive_threshold": 0.5,
        "seed": 1,
    }
    with MultiSyncCollector(factories, None, backend="threads", **options) as c:
        gates.open(1000)
        batches = list(c)
        assert (
            sum(int(batch[VALID].sum()) for batch in batches) == c.stats().frames == 16
        )
        assert all(int(batch[VALID].sum()) <= 8 for batch in batches)
        assert_accounted(c)


def test_every_group_is_two_rollouts_ahead_and_not_more(gates):
    factories = [gates.env(group) for group in range(3)]
    with MultiAsyncCollector(
        factories, None, num_workers=2, num_envs=B, frames_per_batch=B * T
    ) as c:
        c.next()
        wait_until(
            lambda: sum(gates.steps(group) for group in range(3)) == 7 * B * T
        )  # while nobody asks
        batches = [c.next() for _ in range(6)]
        c.state_dict()  # lets all of them come to rest
        made = sum(gates.steps(group) for group in range(3))
        assert made == (1 + 6 + 6) * B * T == c.stats().executed
        assert len(batches) == 6
        assert_accounted(c)
    assert sum(gates.steps(group) for group in range(3)) == made


def test_who_falls_behind_is_named_once(gates):
    factories = [gates.env(0), gates.env(1), gates.env(2, gated=True)]
    with MultiAsyncCollector(factories, None, frames_per_batch=2) as c:
        with noted_warnings() as caught:
            for _ in range(40):
                c.next()
        behind = [
            text for one in caught if "is falling behind" in (text := str(one.message))
        ]
        # On a busy machine one of the others may really be slow.
        assert [
            text.partition(" have")[0] for text in behind if "worker 2" in text
        ] == ["worker 2 is falling behind: environments [2] (GatedEnv)"]
        assert len(set(behind)) == len(behind)
        assert c.stats().workers[2].frames == 0
        gates.open(100)
        wait_until(lambda: (c.next(), c.stats().workers[2].frames)[1] > 0)
        assert_accounted(c)


@pytest.mark.parametrize("bound", [0, 1, 4])
def test_the_lag_of_weights_is_bounded(gates, bound):
    """One worker gets on slowly; weights are published with every batch."""
    factories = [gates.env(0), gates.env(1), gates.env(2, gated=True)]
    ended, pause = threading.Event(), threading.Event()

    def trickle() -> None:
        while not ended.is_set():
            gates.open(1)
            pause.wait(0.002)

    policy = Actor(0.0)
    options = {
        "frames_per_batch": 4,
        "max_policy_lag": bound,
        "track_policy_version": True,
    }
    with MultiAsyncCollector(factories, policy, **options) as c, beside(trickle):
        try:
            for published in range(40):
                batch = c.next()
                assert published - int(batch[VERSION].min()) <= bound
                assert torch.equal(batch["weight"], batch[VERSION].float())
                c.update_policy_weights_(Actor(published + 1.0))
            stats = c.stats()
            assert max(stats.policy_lag) <= bound
            assert sum(stats.policy_lag.values()) == 40
            assert all(
                worker.policy_lag <= bound and worker.frames > 0
                for worker in stats.workers
            )
        finally:
            ended.set()


def test_without_a_bound_weights_may_be_older(gates):
    """Group 1 is held while others' batches and their publishes go by."""
    factories = [gates.env(0), gates.env(1, gated=True, free=1)]
    with MultiAsyncCollector(
        factories, Actor(0.0), frames_per_batch=2, track_policy_version=True
    ) as c:
        for published in range(6):
            batch = c.next()
            assert batch[IDS][0] % 2 == 0
            wait_until(
                lambda: gates.steps(1) == 1
            )  # it has begun, with the first weights
            c.update_policy_weights_(Actor(published + 1.0))
        gates.open(2)
        while batch[IDS][0] % 2 == 0:
            batch = c.next()
        assert batch[VERSION].tolist() == [0, 0]
        assert max(c.stats().policy_lag) == 6
        assert c.stats().workers[1].policy_lag == 6


class CannotBeShown(TensorDictModuleBase):
    """Without ``in_keys``, which the ``repr`` of its base class looks up; and says nothing about
    itself.
    """

    def __init__(self, actions: int = 2) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.actions = actions

    def forward(self, td: Any) -> Any:
        return td.set("action", torch.ones(td.batch_size, dtype=torch.int64))

    def __repr__(self) -> str:
        raise RuntimeError("shown")

    __str__ = __format__ = __repr__  # type: ignore[assignment]


class Secretive:
    """A factory, and a policy, that says nothing about itself."""

    def __call__(self, obs: Any = None) -> Any:
        return (
            CountingEnv()
            if obs is None
            else torch.ones(obs.shape[:-1], dtype=torch.int64)
        )

    __repr__ = __str__ = __format__ = CannotBeShown.__repr__  # type: ignore[assignment]


class Broken(Secretive):
    def __call__(self, obs: Any = None) -> Any:
        raise ValueError("as asked")


def test_nothing_of_the_users_is_asked_to_show_itself():
    for cls, options in (
        (Collector, {}),
        (MultiSyncCollector, {"backend": "threads"}),
        (MultiAsyncCollector, {}),
    ):
        several = {} if cls is Collector else {"num_workers": 2, **options}
        factories = Secretive() if cls is Collector else [Secretive()] * 2
        for policy in (CannotBeShown(), Secretive()):
            with cls(factories, policy, num_envs=2, frames_per_batch=8, **several) as c:
                assert (c.next()["action"] == 1).all()
                assert "Counting" in repr(c)
                if isinstance(policy, Secretive) and cls is not Collector:
                    with pytest.raises(
                        BadWeights, match=r"the policy \(Secretive\) has no modules"
                    ):
                        c.update_policy_weights_({"weight": torch.ones(1)})
    with pytest.raises(
        EnvError, match="making env 0 from Broken raised ValueError: as asked"
    ):
        Collector(Broken(), None, frames_per_batch=8)
    with (
        pytest.raises(PolicyError, match="policy Broken raised ValueError .*as asked"),
        Collector(Secretive(), Broken(), frames_per_batch=8) as c,
    ):
        c.next()
    with Evaluator(Secretive(), Secretive(), episodes=2) as evaluator:
        assert "Secretive" in repr(evaluator)
        assert evaluator.evaluate().mean == 6
    with pytest.raises(BadOption, match="policy is of type Unusable, expected None"):
        Collector(Secretive(), Unusable(), frames_per_batch=8)
    with pytest.raises(
        UnsupportedEnv, match="create_env_fn is of type Unusable, expected"
    ):
        Collector(Unusable(), None, frames_per_batch=8)


class Unusable:
    __repr__ = CannotBeShown.__repr__
