"""Environments and policies that are coroutines: what they return; no fault of theirs hangs, or
loses a frame.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TimeLimit

from muster import Collector, MultiAsyncCollector, MultiSyncCollector
from muster.errors import (
    BadOption,
    BadPolicyOutput,
    EnvError,
    PolicyError,
    UnsupportedEnv,
)
from muster.restore.crash_report import CrashReport
from muster.restore.player import Player
from muster.rollout.progress import ALL_ORDERS, CELLS, STOP, Phase, Progress
from muster.testing import ChainEnv, CountingEnv, EnvContract, InfoEnv, SpaceEnv
from muster.vector.env_slice import EnvSlice
from muster.workers.under_way import UnderWay
from tests.fakes import coroutines as fakes
from tests.fakes.coroutines import Awaited, FaultyEnv
from tests.tools import assert_accounted, assert_same, collect, column, recorded
from tests.waits import wait_until

PARTS = spaces.Dict(
    {
        "image": spaces.Box(0, 255, (3, 4), np.uint8),
        "n": spaces.Discrete(3),
        "word": spaces.Text(5),
    }
)
SECONDS = 60.0  # a deadline that no test reaches
EPISODES = {"length": 3, "truncate": True}


def sampled(actions: Any = PARTS) -> SpaceEnv:
    return SpaceEnv(
        copy.deepcopy(PARTS), copy.deepcopy(actions)
    )  # which have random generators


def awaited(make: Any, *args: Any, **options: Any) -> Any:
    return lambda: Awaited(make(*args, **options))


def faulty(*faults: Any, **options: Any) -> tuple[Any, list[Any]]:
    """A factory of environments with these faults, and the list of them."""
    return recorded(lambda n: FaultyEnv(faults[n % len(faults)], **options))


def zeros(obs: Any) -> Any:
    return torch.zeros(obs.shape[:-1], dtype=torch.int64)


def loops() -> list[Any]:
    gc.collect()
    return [
        thread for thread in threading.enumerate() if thread.name == "muster-event-loop"
    ]


# --- what they return -----------------------------------------------------------------------------


class TestCoroutineChain(EnvContract):
    num_envs = 3

    def make_env(self) -> Any:
        return Awaited(ChainEnv())


def test_rows_of_environments_that_count() -> None:
    batch = collect(
        awaited(CountingEnv, **EPISODES), zeros, num_envs=2, frames_per_batch=10
    )

    assert (
        column(batch, "observation") == [[[3, 0], [3, 1], [3, 2], [3, 0], [3, 1]]] * 2
    )
    assert (
        column(batch, "next", "observation")
        == [[[3, 1], [3, 2], [3, 3], [3, 1], [3, 2]]] * 2
    )
    assert column(batch, "next", "reward") == [[1, 2, 3, 1, 2]] * 2
    assert (
        column(batch, "next", "truncated") == [[False, False, True, False, False]] * 2
    )
    assert not batch["next", "terminated"].any()
    assert column(batch, "collector", "traj_ids") == [[0, 0, 0, 2, 2], [1, 1, 1, 3, 3]]


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (ChainEnv, {}),
        (ChainEnv, {"num_envs": None, "frames_per_batch": 12}),
        (ChainEnv, {"reset_when_done": False}),
        (ChainEnv, {"reset_at_each_iter": True}),
        (ChainEnv, {"compact_obs": True, "set_truncated": True}),
        (ChainEnv, {"max_frames_per_traj": 4, "prev_action_reward": True}),
        (ChainEnv, {"max_decorrelation_steps": 5, "track_policy_version": True}),
        (partial(CountingEnv, noise=True, reuse=True), {"seed": 5}),
        (InfoEnv, {"info": {"t": None, "stage": None, **InfoEnv.SPACES}}),
        (sampled, {}),
        (partial(sampled, spaces.Box(-1, 1, (2,))), {"init_random_frames": 24}),
    ],
)
def test_a_batch_is_bit_equal_to_that_of_the_same_environments_without_coroutines(
    make: Any, options: Any
) -> None:
    options = {"num_envs": 3, "frames_per_batch": 24, "seed": 1} | options

    assert_same(
        collect(awaited(make), batches=3, **options),
        collect(make, batches=3, **options),
    )


def test_collected_episodes_are_those_of_the_same_environments_without_coroutines() -> (
    None
):
    found = []
    for make in (awaited(ChainEnv), ChainEnv):
        with Collector(make, num_envs=3, seed=2) as c:
            found.append([c.collect_batch(n_episode=7).batch for _ in range(2)])
            assert_accounted(c)

    for one, other in zip(*found, strict=True):
        assert_same(one, other)


def test_resets_with_seeds_and_options() -> None:
    class Told(CountingEnv):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.length = (options or {}).get("length", self.length)
            return super().reset(seed=seed, options=options)

    make, made = recorded(awaited(Told))
    with Collector(make, num_envs=2, frames_per_batch=4, seed=7) as c:
        c.rollout()
        c.reset(options={"length": 9})
        assert c.rollout()["observation"][:, 0].tolist() == [[9, 0]] * 2

    assert [env.env.seeds[0] for env in made] == [7, 8]
    assert all(env.log == ["closed"] and env.env.closed == 1 for env in made)


def test_worker_processes_and_threads_collect_the_same_as_one_process() -> None:
    envs, options = (
        [awaited(ChainEnv)] * 2,
        {"num_envs": 2, "frames_per_batch": 24, "seed": 3},
    )
    with Collector(envs, **options) as c:
        expected = [c.rollout().clone() for _ in range(2)]

    for backend in ("processes", "threads"):
        with MultiSyncCollector(envs, **options, backend=backend) as workers:
            for batch in expected:
                assert_same(workers.rollout(), batch)
            assert_accounted(workers)


def test_a_restored_state_continues_exactly(tmp_path: Path) -> None:
    make = awaited(partial(CountingEnv, noise=True))
    with Collector(make, num_envs=2, frames_per_batch=8, seed=1) as c:
        c.rollout()
        state = c.state_dict()
        expected = c.rollout().clone()
    with Collector(make, num_envs=2, frames_per_batch=8, seed=2) as c:
        c.load_state_dict(state)
        assert_same(c.rollout(), expected, ignore=(("collector", "resumed"),))


# --- waiting --------------------------------------------------------------------------------------


class Meeting(Awaited):
    """Returns from a call when all ``n`` environments are in it: it would wait for ever if they
    took turns.
    """

    n, here = 50, 0

    def __init__(self) -> None:
        super().__init__(CountingEnv(4))

    async def _wait(self) -> None:
        cls = type(self)
        if cls.here % cls.n == 0:
            cls.complete = asyncio.Event()
        cls.here += 1
        if cls.here % cls.n == 0:
            cls.complete.set()
        await cls.complete.wait()


def test_all_environments_of_a_group_are_awaited_at_the_same_time() -> None:
    batch = collect(
        Meeting,
        zeros,
        num_envs=Meeting.n,
        frames_per_batch=6 * Meeting.n,
        timeouts={"step": SECONDS},
    )

    assert (
        batch["next", "reward"][:, :, 0] == torch.tensor([1.0, 2, 3, 4, 1, 2])
    ).all()


def test_threads_deliver_the_group_that_is_ready_first() -> None:
    class Gate(Awaited):
        opened = threading.Event()

        async def step(self, action: Any) -> Any:
            while not Gate.opened.is_set():
                await asyncio.sleep(0.01)
            return await super().step(action)

    envs = [lambda: Gate(CountingEnv(5)), awaited(CountingEnv, 7)]
    with MultiAsyncCollector(
        envs, zeros, num_envs=2, frames_per_batch=8, backend="threads"
    ) as c:
        lengths = [int(c.next()["observation"].flatten()[0]) for _ in range(3)]
        Gate.opened.set()
        while lengths[-1] == 7:
            lengths.append(int(c.next()["observation"].flatten()[0]))

    assert lengths[:3] == [7, 7, 7]
    assert lengths[-1] == 5


def test_the_loop_runs_between_batches_and_ends_with_the_last_collector() -> None:
    class Beating(Awaited):
        beats = 0

        async def reset(self, **options: Any) -> Any:
            self.heart = asyncio.create_task(self.beat())
            return await super().reset(**options)

        async def beat(self) -> None:
            while True:
                self.beats += 1
                await asyncio.sleep(0.001)

    before = len(loops())
    make, made = recorded(lambda: Beating(CountingEnv(10**6)))
    collectors = [
        Collector(make, zeros, num_envs=1, frames_per_batch=2) for _ in range(2)
    ]
    for c in collectors:
        c.rollout()
    assert len(loops()) == max(1, before)
    seen = made[0].beats
    wait_until(lambda: made[0].beats > seen + 3)
    for c in collectors:
        c.shutdown()
    assert len(loops()) == before
    assert made[0].heart.cancelled()


def test_a_collector_in_a_program_that_runs_an_event_loop_itself() -> None:
    async def notebook() -> Any:
        return collect(awaited(ChainEnv), num_envs=2, frames_per_batch=8, seed=1)

    assert_same(
        asyncio.run(notebook()),
        collect(ChainEnv, num_envs=2, frames_per_batch=8, seed=1),
    )


def test_gradients_are_disabled_in_coroutines() -> None:
    class Module(Awaited):
        weight = torch.ones(2, requires_grad=True)

        async def step(self, action: Any) -> Any:
            obs, *rest = await super().step(action)
            return (self.weight * torch.as_tensor(obs)).numpy(), *rest

    assert (
        collect(
            lambda: Module(CountingEnv()), zeros, num_envs=1, frames_per_batch=2
        ).numel()
        == 2
    )


# --- faults ---------------------------------------------------------------------------------------


def test_an_error_names_the_environment_and_the_others_complete_their_step() -> None:
    make, made = faulty(None, fakes.fail, None)
    with Collector(make, zeros, num_envs=3, frames_per_batch=12) as c:
        with pytest.raises(
            EnvError,
            match=r"FaultyEnv\[1\]\.step \(row 2 .*ConnectionError: the simulator is gone",
        ) as info:
            c.rollout()
        assert isinstance(info.value.__cause__, ConnectionError)
        assert (info.value.env_index, info.value.phase) == (1, "step")
        assert [env.env.executed for env in made] == [3, 2, 3]
        assert c.stats().discarded == {"env_error": 2}
        assert column(c.rollout(), "next", "reward")[0] == [1, 2, 1, 2]
        assert_accounted(c)
    assert not any("cancelled" in env.log for env in made)


@pytest.mark.parametrize(("at", "phase"), [(2, "step"), (-1, "reset")])
def test_a_deadline_cancels_the_coroutine_and_names_its_environment(
    at: int, phase: str
) -> None:
    make, made = faulty(fakes.hang, None, at=at)
    with Collector(
        make,
        zeros,
        num_envs=2,
        frames_per_batch=12,
        timeouts={"step": SECONDS, phase: 1},
    ) as c:
        with pytest.raises(
            EnvError,
            match=rf"FaultyEnv\[0\]\.{phase}.*within 1 s.*timeouts={{'{phase}': ...}}",
        ) as info:
            c.rollout()
        assert isinstance(info.value.__cause__, TimeoutError)
        assert (info.value.env_index, info.value.phase) == (0, phase)
        assert made[0].log == ["cancelled"]
        assert c.rollout().shape == (2, 6)
        assert_accounted(c)


def test_several_failures_are_one_error() -> None:
    make, _ = faulty(fakes.fail, fakes.fail, fakes.fail, at=-1)
    with (
        Collector(make, zeros, num_envs=3, frames_per_batch=12) as c,
        pytest.raises(
            EnvError,
            match=r"FaultyEnv\[0\]\.reset raised .*; 2 other environments of the group failed too",
        ),
    ):
        c.rollout()


def test_a_coroutine_that_ignores_its_cancellation_hangs_nothing() -> None:
    make, made = faulty(fakes.refuse_to_end)
    with Collector(
        make, zeros, num_envs=1, frames_per_batch=12, timeouts={"step": 0.1}
    ) as c:
        with pytest.raises(EnvError, match="within 0.1 s"):
            c.rollout()
        with pytest.raises(
            EnvError, match="its last call was cancelled, and still runs"
        ):
            c.rollout()
    assert made[0].log[:2] == ["ignored", "closed"]


def test_a_coroutine_that_blocks_the_loop_is_named_with_its_line() -> None:
    fakes.RELEASED.clear()
    make, _ = faulty(fakes.block, None)
    options: Any = {"num_envs": 2, "frames_per_batch": 12}
    with (
        Collector(
            awaited(CountingEnv), zeros, **options, timeouts={"step": 10}
        ) as other,
        Collector(make, zeros, **options, timeouts={"step": 0.1}) as c,
    ):
        other.rollout()
        with pytest.raises(
            EnvError,
            match=r"FaultyEnv\[0\].*blocks the event loop at .*coroutines.py:\d+ in step",
        ):
            c.rollout()
        assert other.rollout().numel() == 12  # on another event loop
        fakes.RELEASED.set()


@pytest.mark.parametrize("stop", [fakes.stop_the_loop, fakes.stop_the_loop_slowly])
def test_a_coroutine_that_stops_the_loop_is_an_error_and_the_next_call_has_another_loop(
    stop: Any,
) -> None:
    make, _ = faulty(stop, None)
    with Collector(
        make, zeros, num_envs=2, frames_per_batch=12, timeouts={"step": None}
    ) as c:
        with pytest.raises(EnvError, match="its coroutine was cancelled"):
            c.rollout()
        assert c.rollout().shape == (2, 6)
        assert_accounted(c)


def test_ctrl_c_cancels_the_coroutines_and_the_next_call_goes_on() -> None:
    make, made = faulty(fakes.press, fakes.hang, None)
    with Collector(make, zeros, num_envs=3, frames_per_batch=12) as c:
        with pytest.raises(KeyboardInterrupt):
            c.rollout()
        assert [env.log for env in made] == [["cancelled"], ["cancelled"], []]
        assert c.rollout().shape == (3, 4)
        assert c.stats().discarded == {"interrupted": 1}
        assert_accounted(c)


def test_sys_exit_in_a_coroutine_reaches_the_caller() -> None:
    make, _ = faulty(fakes.leave)
    with Collector(make, zeros, num_envs=1, frames_per_batch=4) as c:
        with pytest.raises(SystemExit):
            c.rollout()
        assert c.rollout().shape == (1, 4)


@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_shutdown_cancels_the_coroutines_of_workers(
    backend: str, tmp_path: Path
) -> None:
    def note(env: FaultyEnv, what: str) -> None:
        (tmp_path / f"{what} {id(env)}").touch()

    async def wait(env: FaultyEnv) -> None:
        note(env, "waits")
        try:
            await fakes.hang(env)
        finally:
            note(env, "cancelled")

    class Noting(FaultyEnv):
        async def close(self) -> None:
            note(self, "closed")

    def noted(what: str) -> int:
        return len(list(tmp_path.glob(f"{what} *")))

    c = MultiAsyncCollector(
        [lambda: Noting(wait, at=4)],
        zeros,
        num_envs=2,
        frames_per_batch=4,
        backend=backend,
    )
    c.next()
    wait_until(lambda: noted("waits") == 2)
    c.shutdown()

    assert noted("cancelled") == noted("closed") == 2


def test_a_worker_reports_a_deadline_and_a_killed_one_is_restarted(
    tmp_path: Path,
) -> None:
    def make(fault: Any) -> Any:
        mark = tmp_path / fault.__name__
        again = mark.exists()
        mark.touch()
        return FaultyEnv(None if again else fault)

    envs = [awaited(CountingEnv), partial(make, fakes.hang)]
    with MultiSyncCollector(
        envs, zeros, num_envs=None, frames_per_batch=8, seed=1, timeouts={"step": 1}
    ) as c:
        with pytest.raises(
            EnvError,
            match=r"raised TimeoutError.*In worker 1 .*environment 1, step 2.*phase step",
        ) as info:
            c.rollout()
        assert (info.value.env_id, info.value.worker, info.value.phase) == (
            1,
            1,
            "step",
        )
        assert (
            len(
                list(
                    Player(
                        CrashReport.load(info.value.crash_report, trust=True)
                    ).moves()
                )
            )
            == 4
        )
        assert c.rollout().shape == (2, 4)
        assert_accounted(c)

    envs = [awaited(CountingEnv), partial(make, fakes.die)]
    with MultiSyncCollector(
        envs, zeros, num_envs=None, frames_per_batch=8, on_failure="restart"
    ) as c:
        assert c.rollout().shape == (2, 4)
        assert c.stats().restarts == 1
        assert_accounted(c)


def test_a_wait_with_its_own_deadline_is_progress_for_the_supervisor() -> None:
    progress, under_way = Progress([0] * CELLS), UnderWay()
    progress.begin(Phase.RESET)
    before = under_way.signs(progress.cells)

    assert not progress.look()
    assert under_way.signs(progress.cells) != before
    progress.cells[STOP] = ALL_ORDERS
    assert progress.look()


# --- what is refused ------------------------------------------------------------------------------


class HalfEnv(CountingEnv):
    async def step(self, action: Any) -> Any:  # type: ignore[override]
        return super().step(action)


class CoroutineGymEnv(HalfEnv):
    async def reset(self, **options: Any) -> Any:  # type: ignore[override]
        return super().reset(**options)


class CoroutineVectorEnv(SyncVectorEnv):
    async def step(self, actions: Any) -> Any:  # type: ignore[override]
        return super().step(actions)


class NoSpaces:
    reset = step = CoroutineGymEnv.step


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (HalfEnv, r"HalfEnv.step is a coroutine function, but HalfEnv.reset is not"),
        (
            lambda: TimeLimit(CoroutineGymEnv(), 5),
            r"TimeLimit calls reset and step of CoroutineGymEnv.*max_frames",
        ),
        (
            lambda: CoroutineVectorEnv([CountingEnv]),
            r"CoroutineVectorEnv is a batch.*pass num_envs",
        ),
        (NoSpaces, r"NoSpaces has no observation_space and no action_space"),
    ],
)
def test_environments_that_cannot_work_are_refused(make: Any, message: str) -> None:
    with pytest.raises(UnsupportedEnv, match=message):
        Collector(make, frames_per_batch=4)


def test_vector_environments_refuse_them() -> None:
    with pytest.raises(
        UnsupportedEnv,
        match=r"env_fns\[4\] returned CoroutineGymEnv, whose methods are coroutine",
    ):
        EnvSlice(
            [CountingEnv, CoroutineGymEnv], 3, AutoresetMode.NEXT_STEP, replaces=False
        )


def test_a_gymnasium_environment_with_coroutines_and_an_object_of_it() -> None:
    assert_same(
        collect(CoroutineGymEnv, zeros, num_envs=2, frames_per_batch=8),
        collect(CountingEnv, zeros, num_envs=2, frames_per_batch=8),
    )
    assert collect(CoroutineGymEnv(), zeros, frames_per_batch=4).shape == (4,)
    with pytest.raises(BadOption, match="lives in this process"):
        MultiSyncCollector(CoroutineGymEnv(), frames_per_batch=4)


# --- policies -------------------------------------------------------------------------------------


class Served:
    """A policy elsewhere. Its version grows with every call."""

    def __init__(self, fault: Any = None) -> None:
        self.version, self.fault, self.log = 0, fault, []

    async def __call__(self, obs: torch.Tensor) -> Any:
        await asyncio.sleep(0)
        self.version += 1
        if self.version == 3 and self.fault is not None:
            fault, self.fault = self.fault, None
            try:
                await fault(self)
            except asyncio.CancelledError:
                self.log.append("cancelled")
                raise
        return obs[..., 1].long() % 2, {
            "value": obs[..., 1] * 2,
            "policy_version": self.version,
        }


def test_actions_extras_and_version_of_a_coroutine_function() -> None:
    with Collector(CountingEnv, Served(), num_envs=2, frames_per_batch=8) as c:
        for begin in (1, 5):
            batch = c.rollout()
            t = batch["observation"][..., 1]
            assert torch.equal(batch["action"], t.long() % 2)
            assert torch.equal(batch["value"], t * 2)
            assert (
                column(batch, "collector", "policy_version")
                == [list(range(begin, begin + 4))] * 2
            )
            assert batch["collector", "policy_version"].dtype is torch.int64
        assert "policy_version" not in batch
        assert c.stats().policy_path == "coroutine"


@pytest.mark.parametrize("tracked", [False, True])
def test_versions_of_each_environment_and_of_a_plain_function(tracked: bool) -> None:
    def policy(obs: torch.Tensor) -> Any:
        return zeros(obs), {"policy_version": np.array([4, 6])}

    batch = collect(
        CountingEnv,
        policy,
        num_envs=2,
        frames_per_batch=6,
        track_policy_version=tracked,
    )
    assert column(batch, "collector", "policy_version") == [[4] * 3, [6] * 3]


@pytest.mark.parametrize("version", [1.5, "seven", np.array([1, 2, 3]), True])
def test_a_version_that_is_no_integer_is_refused(version: Any) -> None:
    def policy(obs: torch.Tensor) -> Any:
        return zeros(obs), {"policy_version": version}

    with (
        Collector(CountingEnv, policy, num_envs=2, frames_per_batch=6) as c,
        pytest.raises(BadPolicyOutput),
    ):
        c.rollout()


async def with_td(td: Any) -> Any:
    await asyncio.sleep(0)
    return td.set("action", td["observation"][..., 1].long() % 2)


async def with_state(obs: torch.Tensor, state: Any) -> Any:
    await asyncio.sleep(0)
    state = torch.zeros(obs.shape[0]) if state is None else state + 1
    return state.long() % 2, {"seen": state}, state


class WithModule(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(3, 2, dtype=torch.float64)

    async def forward(self, obs: torch.Tensor) -> torch.Tensor:
        await asyncio.sleep(0)
        return self.net(obs.double()).argmax(-1)


def plain(policy: Any) -> Any:
    """The same policy without coroutines."""

    def call(*args: Any) -> Any:
        try:
            steps = policy(*args).__await__()
            while True:
                next(steps)
        except StopIteration as stop:
            return stop.value

    return call


@pytest.mark.parametrize("inference", ["worker", "server"])
@pytest.mark.parametrize("policy", [with_td, with_state, WithModule()])
def test_kinds_of_coroutine_functions_act_like_plain_functions(
    policy: Any, inference: str
) -> None:
    twin = {
        with_td: lambda td: plain(with_td)(td),
        with_state: lambda obs, state: plain(with_state)(obs, state),
    }
    options: dict[str, Any] = {"num_envs": 2, "frames_per_batch": 24, "seed": 1}
    with Collector(
        [ChainEnv] * 2, twin.get(policy, lambda obs: plain(policy)(obs)), **options
    ) as c:
        expected = [c.rollout().clone() for _ in range(2)]
    with MultiSyncCollector(
        [ChainEnv] * 2, policy, backend="threads", inference=inference, **options
    ) as c:
        for batch in expected:
            assert_same(c.rollout(), batch)


def test_policies_of_threads_are_awaited_at_the_same_time() -> None:
    fakes.MEETINGS.clear()

    async def policy(obs: torch.Tensor) -> torch.Tensor:
        meetings = fakes.MEETINGS  # each thread has a copy of this function
        meetings.append(asyncio.Event() if len(meetings) % 2 == 0 else meetings[-1])
        if len(meetings) <= 2:  # these calls find the columns, one after the other
            pass
        elif len(meetings) % 2:
            await meetings[-1].wait()
        else:
            meetings[-1].set()
        return zeros(obs)

    with MultiSyncCollector(
        [CountingEnv] * 2, policy, backend="threads", frames_per_batch=8
    ) as c:
        assert c.rollout().shape == (2, 4)


@pytest.mark.parametrize("inference", ["worker", "server"])
def test_a_deadline_cancels_the_policy_and_the_next_call_goes_on(
    inference: str,
) -> None:
    policy = Served(fakes.hang)
    options: Any = {"frames_per_batch": 12, "timeouts": {"policy": 1}}
    with MultiSyncCollector(
        [CountingEnv], policy, backend="threads", inference=inference, **options
    ) as c:
        with pytest.raises(
            PolicyError,
            match=r"policy Served raised TimeoutError.*within 1 s.*'policy'",
        ):
            c.rollout()
        assert c.rollout().shape == (1, 12)
        assert_accounted(c)


def test_errors_and_ctrl_c_of_a_policy() -> None:
    policy = Served(fakes.fail)
    with Collector(CountingEnv, policy, num_envs=2, frames_per_batch=12) as c:
        with pytest.raises(
            PolicyError,
            match=r"policy Served raised ConnectionError at row 2 .*simulator is gone",
        ):
            c.rollout()
        policy.version, policy.fault = 2, fakes.press
        with pytest.raises(KeyboardInterrupt):
            c.rollout()
        assert policy.log == ["cancelled"]
        assert c.rollout().shape == (2, 6)
        assert_accounted(c)


def test_compile_policy_is_refused() -> None:
    with pytest.raises(BadOption, match="with_td is a coroutine function"):
        Collector(CountingEnv, with_td, frames_per_batch=4, compile_policy=True)
