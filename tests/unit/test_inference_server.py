"""Central inference: who is acted for together, with which weights, and that nobody else notices."""

from __future__ import annotations

import os
import random
import select
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from muster import CentralInference, Execution, MultiAsyncCollector, MultiSyncCollector
from muster.errors import BadOption, BadPolicyOutput, PolicyError, UnsupportedEnv
from muster.policies import categorical
from muster.testing import CountingEnv, SpaceEnv, TorchCartPole
from muster.workers.proxy import WorkerProxy
from muster.workers.selection import Client, oldest
from tests.tools import assert_accounted, assert_same, counting
from tests.waits import wait_until

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="no worker processes"),
]
KINDS = [MultiSyncCollector, MultiAsyncCollector]
THREADS: dict[str, Any] = {"inference": "server", "backend": "threads"}
CALLS: list[Any] = []  # of policies in this process
GATE = threading.Event()


@pytest.fixture(autouse=True)
def nothing_called():
    CALLS.clear()
    GATE.clear()


class Parity(nn.Module):
    """Action: the sum of the observation, modulo 2; the same bits however rows are batched."""

    def forward(self, obs: Any) -> torch.Tensor:
        CALLS.append(self.seen(obs))
        return obs.float().nan_to_num(0.0).sum(-1).long().remainder(2)

    def seen(self, obs: Any) -> Any:
        return obs.shape


class Logged(Parity):
    """Notes the numbers of the environments of every call, which their observations begin with."""

    def seen(self, obs: Any) -> Any:
        return obs[..., 0].long().reshape(-1).tolist()


class Numbered(CountingEnv):
    """Observation: its number, and t. Where it is told to, its steps wait for the gate."""

    def __init__(self, number: int, length: int = 1000, *, waits: bool = False) -> None:
        super().__init__(length)
        self.number, self.waits = number, waits

    def _observe(self) -> Any:
        return np.array([self.number, self.t], np.float32)

    def step(self, action: int) -> Any:
        if self.waits:
            assert GATE.wait(30)
        return super().step(action)


def numbered(count: int, **options: Any) -> list[Any]:
    return [partial(Numbered, number, **options) for number in range(count)]


def calls() -> list[list[int]]:
    """Without those that only showed what the policy returns."""
    return CALLS[1:]


# --- who is acted for together --------------------------------------------------------------------


def test_all_who_are_at_work_on_a_batch_are_acted_for_in_one_call():
    with MultiSyncCollector(
        numbered(3), Logged(), frames_per_batch=30, **THREADS
    ) as collector:
        for _ in range(3):
            collector.next()
        stats = collector.stats()
    together = [call for call in calls() if len(call) == 3]
    assert together == [[0, 1, 2]] * len(together)
    assert [call for call in calls() if len(call) != 3] == []
    assert (
        stats.inference.rows,
        stats.inference.calls,
        stats.inference.batch_mean,
    ) == (
        90,
        30,
        3.0,
    )
    assert stats.inference.busy_s > 0
    assert stats.policy_path.startswith("server: ")


def test_nobody_is_acted_for_before_all_have_their_orders(monkeypatch):
    """However long the others take to get theirs: here until the first one waits for the server."""
    submit = WorkerProxy.submit

    def late(handle: WorkerProxy, request: Any, slot: Any) -> None:
        server = handle._shared.server
        assert server is not None
        if handle.index:
            ended = threading.Event()
            while not server.waits(0):
                ended.wait(0.001)
            ended.wait(0.02)
        submit(handle, request, slot)

    monkeypatch.setattr(WorkerProxy, "submit", late)
    with MultiSyncCollector(
        numbered(2), Logged(), frames_per_batch=8, **THREADS
    ) as collector:
        for _ in range(3):
            collector.next()
        assert collector.stats().inference.calls == 12
    assert calls() == [[0, 1]] * len(calls())


def test_what_the_server_saw_while_workers_were_given_work_does_not_count(monkeypatch):
    """It begins to look before any has work, and sees that one of two has asked and the other is
    not at work yet.
    """
    looking, asked, looked = threading.Event(), threading.Event(), threading.Event()
    submit = WorkerProxy.submit

    def between(handle: WorkerProxy, request: Any, slot: Any) -> None:
        if handle.index and looking.is_set():
            server = handle._shared.server
            assert server is not None
            wait_until(lambda: server.waits(0))
            asked.set()
            assert looked.wait(30)
        submit(handle, request, slot)

    with MultiSyncCollector(
        numbered(2), Logged(), frames_per_batch=8, **THREADS
    ) as collector:
        collector.next()
        server = collector._engine.source.pool.server
        look = server.mailbox.look

        def late(group: Any) -> Any:
            if looking.is_set():
                return look(group)
            looking.set()
            assert asked.wait(30)
            try:
                return look(group)
            finally:
                looked.set()

        monkeypatch.setattr(server.mailbox, "look", late)
        monkeypatch.setattr(WorkerProxy, "submit", between)
        server.mailbox.wake_up.ring()
        assert looking.wait(30)
        collector.next()
    assert calls() == [[0, 1]] * len(calls())


def test_several_environments_and_several_groups_in_a_worker_count_as_many():
    options: dict[str, Any] = {
        "num_envs": 2,
        "frames_per_batch": 8 * 5,
        "num_workers": 2,
        **THREADS,
    }
    with MultiSyncCollector(
        [partial(Numbered, n) for n in range(4)], Logged(), **options
    ) as collector:
        collector.next()
        stats = collector.stats()
    assert stats.inference.rows == 40
    assert {tuple(call) for call in calls() if len(call) == 4} <= {
        (0, 0, 2, 2),
        (1, 1, 3, 3),
    }
    assert stats.inference.batch_mean == 4.0  # a group of each worker at a time


def test_who_has_finished_is_not_waited_for():
    """Rollouts that end with their environment's episode."""
    factories = [
        partial(Numbered, number, length) for number, length in enumerate([3, 9, 5])
    ]
    options: dict[str, Any] = {"frames_per_batch": 3 * 12, "reset_when_done": False}
    with MultiSyncCollector(factories, Logged(), **(THREADS | options)) as collector:
        batch = collector.next()
    assert batch["collector", "valid"].sum(1).tolist() == [3, 9, 5]
    assert [len(call) for call in calls() if len(call) < 3][-4:] == [1] * 4


def test_a_call_is_for_so_many_environments_at_most():
    with MultiSyncCollector(
        numbered(5),
        Logged(),
        frames_per_batch=50,
        **(THREADS | {"inference": CentralInference(max_batch=2)}),
    ) as collector:
        collector.next()
        assert collector.stats().inference.rows == 50
    assert max(map(len, calls())) == 2


def test_a_group_that_is_more_than_that_is_acted_for_alone():
    options: dict[str, Any] = {
        "num_envs": 3,
        "frames_per_batch": 30,
        "inference": CentralInference(max_batch=2),
    }
    with MultiSyncCollector(numbered(2), Logged(), **(THREADS | options)) as collector:
        collector.next()
    assert {tuple(call) for call in calls()} == {(0, 0, 0), (1, 1, 1)}


@pytest.mark.parametrize(
    ("most", "chosen"),
    [(1, [2]), (2, [2]), (3, [0, 2]), (4, [0, 2, 3]), (9, [0, 1, 2, 3])],
)
def test_those_who_have_waited_longest_come_first_in_the_order_of_workers(most, chosen):
    handle: Any = None
    envs, since = (1, 2, 2, 1), (2.0, 9.0, 1.0, 3.0)
    clients = [Client(n, handle, envs[n], since=since[n]) for n in range(4)]
    assert [client.worker for client in oldest(clients, most)] == chosen


class Opens(Logged):
    """Opens the gate when environment 0 has been acted for alone three times."""

    def seen(self, obs: Any) -> Any:
        if sum(call == [0] for call in calls()) >= 3:
            GATE.set()
        return super().seen(obs)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (MultiSyncCollector, {"inference": CentralInference(max_wait_s=0.001)}),
        (MultiSyncCollector, {"inference": CentralInference(max_wait_s=0)}),
        (MultiSyncCollector, {"inference": CentralInference(max_batch=1)}),
        (MultiSyncCollector, {"inference": CentralInference(alternating=True)}),
        (MultiAsyncCollector, {}),
        (MultiAsyncCollector, {"inference": CentralInference(alternating=True)}),
        (MultiAsyncCollector, {"inference": CentralInference(max_wait_s=0.001)}),
    ],
)
def test_nobody_waits_longer_than_that_for_one_who_steps(kind, options):
    """Environment 1 does not get on before environment 0 has."""
    factories = [partial(Numbered, 0), partial(Numbered, 1, waits=True)]
    with kind(
        factories, Opens(), frames_per_batch=20, **(THREADS | options)
    ) as collector:
        assert collector.next() is not None
    assert GATE.is_set() or kind is MultiAsyncCollector


def test_first_ready_workers_can_be_made_to_wait_for_each_other():
    with MultiAsyncCollector(
        numbered(2),
        Logged(),
        frames_per_batch=10,
        **(THREADS | {"inference": CentralInference(max_wait_s=30.0)}),
    ) as collector:
        for _ in range(4):
            collector.next()
        stats = collector.stats().inference
    assert stats.batch_mean > 1.5


@pytest.mark.parametrize("workers", [1, 2, 4, 5])
def test_alternating_halves_are_acted_for_by_themselves(workers):
    halves = [[*range(-(-workers // 2))], [*range(-(-workers // 2), workers)]]
    with MultiSyncCollector(
        numbered(workers),
        Logged(),
        frames_per_batch=10 * workers,
        **(THREADS | {"inference": CentralInference(alternating=True)}),
    ) as collector:
        collector.next()
        collector.next()
        assert collector.stats().inference.calls == 20 * min(workers, 2)
    assert all(call in halves for call in calls())


# --- weights --------------------------------------------------------------------------------------


def test_what_a_policy_returns_may_change_later():
    """A view on its weights, and rows of many kinds."""

    class Kinds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.zeros(2))

        def forward(self, obs: torch.Tensor) -> Any:
            n = obs[..., 1]
            extras = {
                "flag": n > 1,
                "number": n.long() * 3,
                "small": n.to(torch.uint8)[..., None].expand(*n.shape, 4),
                "double": n.double() / 3,
                "table": self.table.expand(*n.shape, 2),
            }
            return n.long() % 2, extras

    policy = Kinds()
    with MultiSyncCollector(
        [counting(5)] * 2, policy, frames_per_batch=20, **THREADS
    ) as collector:
        batch = collector.next()
        t = batch["observation"][..., 1]
        assert torch.equal(batch["flag"].reshape(t.shape), t > 1)
        assert torch.equal(batch["number"].reshape(t.shape), t.long() * 3)
        assert (batch["small"].dtype, batch["small"].shape) == (torch.uint8, (2, 10, 4))
        assert torch.equal(batch["small"][..., 3], t.to(torch.uint8))
        assert torch.equal(batch["double"].reshape(t.shape), t.double() / 3)
        with torch.no_grad():
            policy.table.fill_(5.0)
        collector.update_policy_weights_()
        assert (collector.next()["table"] == 5).all()
        assert (batch["table"] == 0).all()


def test_a_policy_that_changes_what_it_returns_is_refused():
    class Changes(nn.Module):
        def forward(self, obs: torch.Tensor) -> Any:
            CALLS.append(1)
            shape = (*obs.shape[:-1], 1 if len(CALLS) < 8 else 2)
            return torch.zeros(obs.shape[:-1], dtype=torch.int64), {
                "extra": torch.zeros(shape)
            }

    collector = MultiSyncCollector(
        [counting()] * 2, Changes(), frames_per_batch=40, **THREADS
    )
    with collector, pytest.raises(BadPolicyOutput, match="extra"):
        collector.next()


@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_a_factory_makes_the_servers_own_copy_which_gets_the_users_weights(backend):
    def make() -> Any:
        torch.manual_seed(3)
        return categorical(nn.Linear(2, 2))

    options: dict[str, Any] = {
        "frames_per_batch": 40,
        "seed": 4,
        "inference": "server",
        "backend": backend,
    }
    with MultiSyncCollector([counting()] * 2, policy_factory=make, **options) as c:
        first = [c.next().clone(), c.next().clone()]
    with MultiSyncCollector([counting()] * 2, make(), **options) as c:
        for batch in first:
            assert_same(c.next(), batch)


def test_lazy_layers_get_their_weights_before_anybody_acts():
    policy = nn.Sequential(nn.LazyLinear(2))
    head = categorical(policy)
    with MultiSyncCollector(
        [counting()] * 2,
        head,
        frames_per_batch=20,
        update_at_each_batch=True,
        **THREADS,
    ) as c:
        c.next()
        assert policy[0].weight.shape == (2, 2)
        weight = policy[0].weight.detach().clone()
        with torch.no_grad():
            policy[0].weight.fill_(0.0)
            policy[0].bias.copy_(torch.tensor([100.0, -100.0]))
        assert (c.next()["action"] == 0).all()
        assert not torch.equal(weight, policy[0].weight)


def test_a_policy_acts_in_evaluation_mode_or_in_the_mode_that_it_was_given_in():
    class Mode(Parity):
        def seen(self, obs: Any) -> Any:
            return self.training

    for training in (True, False):
        for mode, expected in (("eval", False), ("as_given", training)):
            CALLS.clear()
            policy, options = (
                Mode().train(training),
                {"execution": Execution(policy_mode=mode), **THREADS},
            )
            with MultiSyncCollector(
                [counting()] * 2, policy, frames_per_batch=8, **options
            ) as c:
                c.next()
            assert set(CALLS) == {expected}
            assert policy.training is training


def test_compiling_is_done_on_the_server():
    def backend(graph: Any, _: Any) -> Any:
        CALLS.append("compiled")
        return graph

    class Plain(nn.Module):
        def forward(self, obs: torch.Tensor) -> torch.Tensor:
            return obs.sum(-1).long().remainder(2)

    options: dict[str, Any] = {
        "frames_per_batch": 8,
        "compile_policy": {"backend": backend},
    }
    with MultiSyncCollector(
        [counting()] * 2, Plain(), **(THREADS | options)
    ) as collector:
        batch = collector.next()
    assert "compiled" in CALLS
    assert torch.equal(
        batch["action"], batch["observation"].sum(-1).long().remainder(2)
    )


# --- what is the user's ---------------------------------------------------------------------------


def test_the_servers_number_of_threads_is_its_own():
    class Threads(Parity):
        def seen(self, obs: Any) -> Any:
            return torch.get_num_threads()

    def of_new_thread() -> int:
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        return found[0]

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for given, seen in ((1, 1), (3, 3), (None, 2)):
            CALLS.clear()
            options: dict[str, Any] = {"frames_per_batch": 8, "num_sub_threads": given}
            with MultiSyncCollector(
                [counting()] * 2, Threads(), **(THREADS | options)
            ) as collector:
                collector.next()
                assert (torch.get_num_threads(), of_new_thread()) == (2, 2)
            assert set(CALLS) == {seen}
            assert (torch.get_num_threads(), of_new_thread()) == (2, 2)
    finally:
        torch.set_num_threads(before)


def test_the_users_random_numbers_are_theirs_again_after_an_error():
    class Fails(nn.Module):
        def forward(self, obs: torch.Tensor) -> torch.Tensor:
            draw = torch.rand(obs.shape[:-1]) + random.random() + np.random.rand()
            if bool((obs[..., 1] == 3).any()):
                raise ValueError("three")
            return (draw * 1000).long() % 2

    def state() -> list[Any]:
        return [
            torch.random.get_rng_state().tolist(),
            random.getstate(),
            np.random.get_state()[1].tolist(),
        ]

    before = state()
    with MultiSyncCollector(
        [counting(9)] * 2, Fails(), frames_per_batch=40, **THREADS
    ) as collector:
        for _ in range(3):
            with pytest.raises(PolicyError, match="three"):
                collector.next()
            assert state() == before
    assert state() == before


# --- the same data as where workers act -----------------------------------------------------------


def torchrl_pendulum() -> Any:
    from torchrl.envs import GymEnv

    return GymEnv("Pendulum-v1")


class Push(Parity):
    """For continuous actions."""

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return super().forward(obs)[..., None].float()


class Dicts(Parity):
    """Of observations with an image and a vector."""

    def forward(self, obs: Any) -> torch.Tensor:
        assert obs["image"].dtype == torch.uint8
        return super().forward(obs["image"].flatten(-3)) ^ super().forward(
            obs["vector"]
        )


class Stops:
    """An interruptor that ends rollouts at every 7th look."""

    def __init__(self) -> None:
        self.looks = 0

    def collection_stopped(self) -> bool:
        self.looks += 1
        return self.looks % 7 == 0


def images() -> Any:
    parts = {
        "image": spaces.Box(0, 255, (4, 4, 3), np.uint8),
        "vector": spaces.Box(-1, 1, (3,), np.float64),
    }
    return SpaceEnv(spaces.Dict(parts), spaces.Discrete(2), length=4)


def image() -> Any:
    return SpaceEnv(
        spaces.Box(0, 255, (8, 8, 3), np.uint8), spaces.Discrete(2), length=4
    )


class Flat(Parity):
    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        assert obs.dtype == torch.uint8
        return super().forward(obs.flatten(-3))


SAME: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "on a device": (
        partial(TorchCartPole, 2),
        Parity,
        {"num_envs": None},
    ),  # the CPU: it acts like others
    "TorchRL": (torchrl_pendulum, Push, {"num_envs": None, "max_frames_per_traj": 4}),
    "dict": (images, Dicts, {"num_envs": 2}),
    "image": (image, Flat, {"num_envs": 2}),
    "split": (counting(4, noise=True), Parity, {"split_trajs": True}),
    "joined": (counting(4, noise=True), Parity, {"cat_results": -1}),
    "joined over environments": (
        counting(4, noise=True),
        Parity,
        {"cat_results": "cat", "num_envs": 2},
    ),
    "the same memory": (counting(4, noise=True), Parity, {"return_same_td": True}),
}


@pytest.mark.parametrize("name", SAME)
def test_data_is_that_of_workers_that_act(name):
    make, policy, options = SAME[name]
    options = {"frames_per_batch": 24, "total_frames": 96, "seed": 2, **options}
    with MultiSyncCollector(
        [make] * 2, policy(), backend="threads", **options
    ) as collector:
        expected = [batch.clone() for batch in collector]
    assert len(expected) > 1
    with MultiSyncCollector([make] * 2, policy(), **(THREADS | options)) as collector:
        for batch, other in zip(collector, expected, strict=True):
            assert_same(batch, other)
            assert batch.names == other.names
        assert_accounted(collector)
        assert collector.stats().inference.calls > 0


@pytest.mark.parametrize("kind", KINDS)
def test_data_of_an_interrupted_rollout_is_marked(kind):
    options: dict[str, Any] = {
        "frames_per_batch": 40,
        "interruptor": Stops(),
        "total_frames": 400,
    }
    with kind([counting(4)] * 2, Parity(), **(THREADS | options)) as collector:
        rows = 0
        for batch in collector:
            valid = batch["collector", "valid"]
            rows += int(valid.sum())
            assert torch.equal(
                batch["action"][valid],
                batch["observation"][valid].sum(-1).long().remainder(2),
            )
        assert_accounted(collector)
        assert 0 < rows == collector.stats().frames


def test_a_preempted_batch_has_what_was_acted_for():
    """Environment 1 waits until the other one has made its last step. It has a thousand to make, in
    which the news comes that it is late.
    """

    class Last(Numbered):
        def step(self, action: int) -> Any:
            got = super().step(action)
            if self.number == 0 and self.executed == 1000:
                GATE.set()
            return got

    factories = [partial(Last, 0), partial(Last, 1, waits=True)]
    options: dict[str, Any] = {
        "frames_per_batch": 2000,
        "preemptive_threshold": 0.5,
        "inference": CentralInference(max_wait_s=0),
    }
    with MultiSyncCollector(factories, Logged(), **(THREADS | options)) as collector:
        batch = collector.next()
        valid = batch["collector", "valid"]
        assert valid[0].all()
        assert not valid[1].all()
        assert collector.next() is not None
        assert_accounted(collector)


def test_single_steps_go_into_a_buffer():
    from torchrl.data import LazyTensorStorage, ReplayBuffer

    found = []
    for options in ({"backend": "threads"}, THREADS):
        buffer = ReplayBuffer(storage=LazyTensorStorage(100))
        options = {
            **options,
            "replay_buffer": buffer,
            "extend_buffer": False,
            "total_frames": 40,
            "seed": 1,
        }
        with MultiSyncCollector(
            [counting(4, noise=True)] * 2, Parity(), frames_per_batch=20, **options
        ) as collector:
            for _ in collector:
                pass
        found.append(buffer[:])
    assert_same(*found)


def test_random_actions_need_no_server():
    with MultiSyncCollector(
        [counting(noise=True)] * 2, None, frames_per_batch=20, seed=1, **THREADS
    ) as served:
        with MultiSyncCollector(
            [counting(noise=True)] * 2, None, frames_per_batch=20, seed=1
        ) as collector:
            assert_same(served.next(), collector.next())
        assert served.stats().inference is None


# --- what is refused ------------------------------------------------------------------------------


def text() -> Any:
    return SpaceEnv(spaces.Text(5), spaces.Discrete(2))


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "no environment": (
        [counting()],
        lambda: CentralInference(max_batch=0),
        "max_batch=0: expected a number, at least 1, or None",
    ),
    "half": (
        [counting()],
        lambda: CentralInference(max_batch=1.5),
        "max_batch=1.5: expected",
    ),
    "before": (
        [counting()],
        lambda: CentralInference(max_wait_s=-1),
        "max_wait_s=-1: expected a number, at least 0, or None",
    ),
    "where": ([counting()], {"inference": "gpu"}, "inference='gpu'.*worker.*server"),
    "objects": (
        [text],
        {},
        "needs fixed shapes, and .* has Python objects in .*observation",
    ),
    "kinds": (
        [counting(), counting(noise=True)],
        {"cat_results": -1},
        "differ in observations or actions: use a collector for each kind",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_with_the_way_out(name):
    factories, options, said = REFUSED[name]
    with pytest.raises((BadOption, UnsupportedEnv), match=said):
        given = options if isinstance(options, dict) else {"inference": options()}
        MultiSyncCollector(
            factories,
            **(
                {"policy": Parity(), "frames_per_batch": 20, "inference": "server"}
                | given
            ),
        )
    wait_until(
        lambda: (
            not [
                thread
                for thread in threading.enumerate()
                if thread.name == "muster-inference"
            ]
        )
    )


# --- processes that only step ---------------------------------------------------------------------

processes_only = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@processes_only
@pytest.mark.parametrize("env", ["CartPole-v1", CountingEnv])
@pytest.mark.parametrize("kind", KINDS)
def test_workers_that_only_step_never_load_torch(kind, env):
    policy = nn.Sequential(nn.Linear(4 if env == "CartPole-v1" else 2, 2))
    options: dict[str, Any] = {
        "frames_per_batch": 40,
        "on_failure": "restart",
        "inference": "server",
    }
    with kind(
        [env] * 2, categorical(policy), track_policy_version=True, **options
    ) as collector:
        collector.next()
        assert_light(collector)
        collector.set_seed(3)
        collector.update_policy_weights_()
        collector.next()
        state = collector.state_dict()
        collector.next()
        assert_light(collector)
        first = collector.stats().workers[0].pid
        os.kill(first, 9)
        while collector.stats().workers[0].pid == first:
            collector.next()
        collector.load_state_dict(state)
        collector.reset()
        collector.next()
        assert_light(collector)


def assert_light(collector: Any) -> None:
    for worker in collector.stats().workers:
        assert "libtorch" not in Path(f"/proc/{worker.pid}/maps").read_text()


class Sleeps(Parity):
    """Every call of ``at`` and later takes a second."""

    def seen(self, obs: Any) -> Any:
        if len(CALLS) == 6:
            select.select([], [], [], 1.0)


def processor_s(ids: list[int]) -> float:
    """Of processes, or threads of this one."""
    ticks = 0
    for number in ids:
        path = Path(f"/proc/{number}/stat")
        ticks += sum(map(int, path.read_text().rpartition(")")[2].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


@processes_only
def test_workers_sleep_while_the_policy_computes():
    factories = [partial(Numbered, number) for number in range(2)]
    with MultiSyncCollector(
        factories, Sleeps(), frames_per_batch=20, inference="server"
    ) as collector:
        pids = [worker.pid for worker in collector.stats().workers]
        before = processor_s(pids)
        collector.next()
        assert len(CALLS) >= 7
        assert processor_s(pids) - before <= 0.2  # of two times a second
        collector.next()


@processes_only
@pytest.mark.parametrize("kind", KINDS)
def test_a_server_sleeps_while_nobody_asks(kind):
    with kind(
        [counting()] * 2, Parity(), frames_per_batch=400, inference="server"
    ) as collector:
        collector.next()
        server = [
            thread
            for thread in threading.enumerate()
            if thread.name == "muster-inference"
        ][-1]
        ids = [worker.pid for worker in collector.stats().workers]
        task = f"self/task/{server.native_id}"

        def sleeps() -> bool:
            before = processor_s([task, *ids])
            select.select([], [], [], 0.5)
            return processor_s([task, *ids]) - before <= 0.02

        wait_until(sleeps)  # those who are ahead make what they may
