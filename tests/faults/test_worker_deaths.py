"""Workers that die: at every kind of place, in every way; not a step is lost, doubled or made up."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
from functools import partial
from typing import Any

import gymnasium
import pytest
import torch

from muster import MultiAsyncCollector, MultiSyncCollector, Restart
from muster.errors import EnvError, WorkerDied
from muster.restore.crash_report import CrashReport
from muster.testing import CountingEnv, Fault, OracleEnv, check_stream
from tests.fakes import faults
from tests.fakes.fault_runs import FRAMES, KINDS, MODES, T, alive, all_gone, run
from tests.fakes.killers import Killer
from tests.fakes.mortal import KilledByANeighbour
from tests.fakes.node_runs import NODE_KINDS, async_nodes
from tests.tools import assert_balanced
from tests.waits import wait_until

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="kills processes"),
]

WAYS = {
    "SIGKILL": (faults.Signalled(signal.SIGKILL), "was killed by SIGKILL", -9),
    "SIGSEGV": (faults.Signalled(signal.SIGSEGV), "was killed by SIGSEGV", -11),
    "SIGTERM": (faults.Signalled(signal.SIGTERM), "was killed by SIGTERM", -15),
    "os._exit(0)": (faults.exits_at_once, "ended with exit code 0", 0),
}
AT = 30  # the step at which it dies: row 10 of the second rollout
ALL_KINDS = [*KINDS, *NODE_KINDS]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    return {kind: run(folder, None, kind) for kind in ALL_KINDS}


# --- one death ------------------------------------------------------------------------------------


def test_the_main_process_listens_to_the_successor_instead():
    with MultiSyncCollector(
        [CountingEnv] * 2, None, frames_per_batch=8, seed=0, on_failure="restart"
    ) as collector:
        collector.next()
        (killed, *_) = (worker.pid for worker in collector.stats().workers)
        os.kill(killed, signal.SIGKILL)
        wait_until(
            lambda: (
                collector.next() is not None and collector.stats().workers[0].restarts
            )
        )
        watcher = collector._engine.source.pool
        _, of = watcher._listen()
        assert {fd: handle.index for fd, handle in of.items()} == {
            fd: handle.index
            for handle in watcher.handles
            for fd in handle.process.fds()
        }


def turns() -> Any:
    """Agents that take turns: a clock for each agent of each environment."""
    return pytest.importorskip("pettingzoo.classic").tictactoe_v3.env()


def cells() -> Any:
    """One environment object for several."""
    return gymnasium.vector.SyncVectorEnv([CountingEnv] * 2)


@pytest.mark.parametrize(
    ("env", "options"),
    [(CountingEnv, {"num_envs": 2}), (turns, {"num_envs": 2}), (cells, {})],
)
def test_a_death_before_the_first_rollout(env, options):
    with MultiSyncCollector(
        [env] * 2, None, frames_per_batch=8, seed=0, on_failure="restart", **options
    ) as collector:
        (killed, *_) = (worker.pid for worker in collector.stats().workers)
        os.kill(killed, signal.SIGKILL)
        batches = [collector.next() for _ in range(3)]
        assert [batch.shape for batch in batches] == [(2, 2, 2)] * 3
        assert_balanced(collector.stats())
        assert collector.stats().workers[0].restarts == 1


@pytest.mark.parametrize("on_failure", MODES)
@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_a_death_in_a_step_loses_the_rollout_at_work_and_nothing_else(
    tmp_path, undisturbed, way, kind, on_failure
):
    do, how, exitcode = WAYS[way]
    got = run(tmp_path, Fault(do, at=AT), kind, on_failure=on_failure)
    rows = got.check(undisturbed=undisturbed[kind])
    assert got.stats.discarded == {"worker_died": AT - T}
    assert rows[0, 0] == T
    made = rows[0, 0] + rows[0, 1] + AT - T
    assert got.counts[0].tolist()[:3] == [
        1 if on_failure == "drop" else 2,
        made + 1,
        made,
    ]  # the deadly step was begun
    if on_failure != "raise":
        assert got.errors == []
        return
    assert_said(got.error, rf"{how} during step", row=AT - T)
    assert got.error.exitcode == exitcode
    assert got.error.phase == "step"


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_a_death_in_a_reset_says_so(tmp_path, undisturbed, way, kind):
    do, how, _ = WAYS[way]
    got = run(
        tmp_path, Fault(do, "reset", at=1), kind
    )  # soon, or the other worker may have made all by then
    got.check(undisturbed=undisturbed[kind])
    assert list(got.stats.discarded) == ["worker_died"]
    assert_said(got.error, rf"{how} during reset")
    assert got.error.phase == "reset"


@pytest.mark.parametrize("on_failure", MODES)
@pytest.mark.parametrize("kind", [MultiAsyncCollector, async_nodes])
def test_a_death_while_another_worker_is_asked_keeps_the_rollouts_in_order(
    tmp_path, kind, on_failure
):
    """The next rollout of the dead worker must not be requested before the lost one is requested
    again.
    """
    path = tmp_path / "pid"
    dies = Fault(
        faults.KilledAndNoted(path), at=3
    )  # in its first rollout, before its second one is requested
    waits = Fault(
        faults.WaitsForTheEnd(path), "reset"
    )  # while it is asked for its layout
    factories = [
        partial(OracleEnv, tmp_path / "counts", 0, 1, dies),
        partial(OracleEnv, tmp_path / "counts", 1, 1, waits),
    ]
    got = run(tmp_path, None, kind, create_env_fn=factories, on_failure=on_failure)
    rows = check_stream(got.batches)
    assert sum(rows.values()) == FRAMES
    assert len(got.errors) == (on_failure == "raise")
    assert (rows[0, 1] >= 2 * T) == (
        on_failure != "drop"
    )  # in order, as ``check_stream`` has seen


@pytest.mark.parametrize("on_failure", MODES)
@pytest.mark.parametrize("way", WAYS)
def test_a_death_while_environments_are_made_ends_the_construction(
    tmp_path, way, on_failure
):
    do, how, exitcode = WAYS[way]
    with pytest.raises(
        WorkerDied, match=rf"^Worker 0 \(pid \d+\) {how} during construct\."
    ) as caught:
        run(tmp_path, Fault(do, "construct"), on_failure=on_failure)
    assert (caught.value.exitcode, caught.value.phase, caught.value.worker) == (
        exitcode,
        "construct",
        0,
    )


@pytest.mark.parametrize("on_failure", MODES)
@pytest.mark.parametrize("way", ["SIGKILL", "os._exit(0)"])
def test_a_death_while_environments_are_closed_costs_nothing(
    tmp_path, undisturbed, way, on_failure
):
    got = run(tmp_path, Fault(WAYS[way][0], "close"), on_failure=on_failure)
    got.check(undisturbed=undisturbed[MultiSyncCollector])
    assert (got.errors, got.stats.discarded, got.stats.executed) == ([], {}, FRAMES)


@pytest.mark.parametrize("way", ["SIGKILL", "SIGTERM"])
def test_a_death_in_the_middle_of_a_row_counts_those_that_were_stepped(tmp_path, way):
    path = tmp_path / "counts"

    def make():
        env = OracleEnv(path, 0, 3)
        if env.number == 2:
            env.fault = Fault(WAYS[way][0], at=AT)
        return env

    with MultiSyncCollector(
        make, None, num_workers=1, num_envs=3, frames_per_batch=3 * T
    ) as collector:
        batches = [collector.next().clone()]
        with pytest.raises(WorkerDied, match=rf"{WAYS[way][1]} during step"):
            collector.next()
        assert (
            collector.stats().discarded == {"worker_died": 3 * (AT - T) + 2}
            or way == "SIGTERM"
        )
        batches += [collector.next().clone() for _ in range(2)]
        stats = collector.stats()
        assert sum(check_stream(batches).values()) == stats.frames == 9 * T
    assert OracleEnv.read(path)[:, 2].tolist() == [
        3 * T + AT - T + 1,
        3 * T + AT - T + 1,
        3 * T + AT - T,
    ]
    assert_balanced(stats, in_flight=0)
    assert stats.executed == OracleEnv.read(path)[:, 2].sum()


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("on_failure", MODES)
def test_a_death_in_the_policy_says_so(tmp_path, on_failure, at):
    policy = faults.FaultyPolicy(
        str(tmp_path / "mark"), faults.Signalled(signal.SIGKILL), at
    )
    got = run(
        tmp_path, None, policy=policy, on_failure=on_failure
    )  # its first call shows what columns there are
    assert len(got.errors) == (on_failure == "raise")
    for error in got.errors:
        assert_said(error, "was killed by SIGKILL during policy")
    got.check()
    assert all(
        batch["action"][batch["observation"][..., 5] > 0].eq(1).all()
        for batch in got.batches
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_death_while_weights_are_taken_says_so(tmp_path, kind):
    from muster.weights import SharedMemory

    policy = faults.FaultyPolicy(str(tmp_path / "never"), None, at=1 << 60)
    scheme = faults.FaultyScheme(
        SharedMemory(), str(tmp_path / "mark"), faults.Signalled(signal.SIGKILL), at=4
    )
    got = run(
        tmp_path, None, kind, policy=policy, weight_sync_schemes={"policy": scheme}
    )
    got.check()
    assert_said(got.error, "was killed by SIGKILL during weights")


def assert_said(error, how, row=None):
    assert type(error) is WorkerDied
    place = (
        r"(?:, row \d+)?(?:, seed \d+)?" if row is None else rf", row {row}, seed \d+"
    )
    found = re.match(
        rf"Worker (\d) \(pid \d+(?:, node 0 \(\S+\))?\), environment (\d){place} {how}\. [A-Z]",
        str(error),
    )
    assert found, str(error)
    assert (error.worker, error.env_id) == (int(found[1]), int(found[2]))


# --- again and again ------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_death_at_the_same_step_gives_the_same_streams(tmp_path):
    for kind in ALL_KINDS:
        first, second = (
            run(
                tmp_path,
                Fault(WAYS["SIGKILL"][0], at=AT, runs=3),
                kind,
                on_failure="restart",
            )
            for _ in range(2)
        )
        first.check()
        if first.in_lockstep:  # else the other worker may make all there is
            assert first.stats.restarts >= 2
        for env in (0, 1):
            first.check_rows(second, env, 2 * T if first.in_lockstep else 0)


def test_a_successor_does_not_live_through_the_same_episodes_again(tmp_path):
    got = run(tmp_path, Fault(WAYS["SIGKILL"][0], at=AT), on_failure="restart")
    state = [batch["observation"][0, :, 5] for batch in got.batches]
    assert not torch.isin(torch.cat(state[1:]), state[0]).any()


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_worker_that_dies_at_once_every_time_is_given_up_with_its_last_cause(
    tmp_path, kind
):
    path = tmp_path / "counts"
    factories = [
        partial(OracleEnv, path, 0, 1, Fault(WAYS["SIGSEGV"][0], runs=None)),
        partial(OracleEnv, path, 1),
    ]
    with kind(
        factories, None, frames_per_batch=2 * T, on_failure=Restart(max_restarts=10)
    ) as collector:
        with pytest.raises(
            WorkerDied, match=r"restart 3\b.*killed by SIGSEGV during step"
        ):
            drain(collector)
        assert OracleEnv.read(path)[0, 0] == 4  # three restarts without a batch


def test_a_worker_that_dies_too_often_within_a_minute_is_given_up(tmp_path):
    path = tmp_path / "counts"
    factories = [
        partial(OracleEnv, path, 0, 1, Fault(WAYS["SIGKILL"][0], at=AT, runs=None)),
        partial(OracleEnv, path, 1),
    ]
    with MultiSyncCollector(
        factories, None, frames_per_batch=2 * T, on_failure=Restart(max_restarts=2)
    ) as collector:
        batches = []
        with pytest.raises(
            WorkerDied, match=r"restart 2\), .*killed by SIGKILL during step"
        ):
            batches.extend(batch.clone() for batch in collector)
        assert check_stream(batches)[0, 2] == T
        assert OracleEnv.read(path)[0, 0] == 3


class WrittenLate:
    """Makes an environment that is killed; cannot be written into a crash file before its successor
    was made.
    """

    def __init__(self, path):
        self.path = path

    def __call__(self):
        return OracleEnv(self.path, 0, 1, Fault(WAYS["SIGKILL"][0], at=AT))

    def __reduce__(self):
        if self.path.exists():
            wait_until(lambda: OracleEnv.read(self.path)[0, 0] == 2, 10.0)
        return WrittenLate, (self.path,)


@pytest.mark.parametrize("kind", KINDS)
def test_a_successor_does_not_wait_for_the_crash_file(tmp_path, kind):
    path, crashes = tmp_path / "counts", tmp_path / "crashes"
    options = {
        "frames_per_batch": T,
        "total_frames": 3 * T,
        "on_failure": "restart",
        "crash_dir": crashes,
    }
    with kind(WrittenLate(path), None, **options) as collector:
        rows = check_stream(batch.clone() for batch in collector)
        assert rows == {(0, 0): T, (0, 1): 2 * T}
        (crash,) = crashes.glob("*.crash")
        found = CrashReport.load(crash, trust=True)
        assert (found.missing, len(found.actions["action",])) == ("", AT + 1)


def test_an_environment_that_cannot_be_made_again_is_the_error(tmp_path):
    """Its successor fails while it is made, every time."""
    path = tmp_path / "counts"

    def make():
        env = OracleEnv(path, 0, 1, Fault(WAYS["SIGKILL"][0], at=AT))
        if env.run:
            raise OSError("no display")
        return env

    with MultiSyncCollector(
        [make, partial(OracleEnv, path, 1)],
        None,
        frames_per_batch=2 * T,
        on_failure="restart",
    ) as c:
        with pytest.raises(EnvError, match="no display") as caught:
            drain(c)
        assert isinstance(caught.value.__cause__, OSError)
        stats = c.stats()
    assert_balanced(stats)


def test_when_all_workers_are_dropped_the_end_is_said(tmp_path):
    path = tmp_path / "counts"
    factory = partial(
        OracleEnv, path, fault=Fault(WAYS["SIGKILL"][0], at=AT, runs=None)
    )
    for kind in KINDS:
        with kind(
            [factory] * 2, None, frames_per_batch=2 * T, on_failure="drop"
        ) as collector:
            with (
                pytest.raises(WorkerDied, match="all workers have been dropped"),
                pytest.warns(match="is dropped, and"),
            ):
                drain(collector)
            with pytest.raises(WorkerDied, match="all workers have been dropped"):
                collector.next()


def drain(collector):
    while collector.next() is not None:
        pass


def test_what_a_worker_has_started_dies_with_it(tmp_path):
    path, pids = tmp_path / "counts", tmp_path / "pids"
    fault = Fault(faults.HasChild(str(pids)), "construct", runs=None)
    with MultiSyncCollector(
        partial(OracleEnv, path, fault=fault),
        None,
        frames_per_batch=T,
        on_failure="restart",
    ) as c:
        c.next()
        (first,) = children(pids)
        os.kill(c.stats().workers[0].pid, signal.SIGKILL)
        c.next()
        assert all_gone([first])
        c.next()
    assert len(children(pids)) == 2
    assert all_gone(children(pids))


class AloneWithSimulator(OracleEnv):
    """Starts a simulator in a session of its own, and notes what there was of earlier ones."""

    def __init__(self, path, folder):
        super().__init__(path)
        before = children(folder / "pids") if (folder / "pids").exists() else []
        with open(folder / "left", "a") as file:
            file.write(f"{sum(map(alive, before))}\n")
        faults.HasChild(str(folder / "pids"), detached=True)(None)


@pytest.mark.parametrize(
    "method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)]
)
def test_the_simulator_of_a_dead_worker_is_gone_when_its_successor_makes_another(
    tmp_path, method
):
    factory = partial(AloneWithSimulator, tmp_path / "counts", tmp_path)
    options = {"frames_per_batch": T, "on_failure": "restart", "start_method": method}
    with MultiSyncCollector(factory, None, **options) as c:
        for _ in range(2):
            c.next()
            os.kill(c.stats().workers[0].pid, signal.SIGKILL)
        c.next()
    assert len(children(tmp_path / "pids")) == 3
    assert children(tmp_path / "left") == [0, 0, 0]
    assert not any(map(alive, children(tmp_path / "pids"))), "when shutdown() returns"


def children(path):
    return [int(pid) for pid in path.read_text().split()]


class Faulty(OracleEnv):
    """Fails in a step of its first rollout, waits for a file in another, and is killed in its
    second rollout.
    """

    def __init__(self, path, go):
        super().__init__(path)
        self.go = go

    def step(self, action):
        does = {
            5: faults.Raising(ValueError),
            10: self.wait,
            T + 4: faults.Signalled(signal.SIGKILL),
        }
        step = int(self._cells[1])
        self.fault = Fault(does[step], at=step) if step in does else None
        return super().step(action)

    def wait(self, honest):
        wait_until(self.go.exists)
        return honest


@pytest.mark.parametrize("ends", ["collects on", "shuts down"])
def test_a_death_after_a_rollout_that_was_repeated_and_that_nobody_has_taken(
    tmp_path, ends
):
    path, go = tmp_path / "counts", tmp_path / "go"
    factories = [partial(Faulty, path, go), partial(OracleEnv, path, 1)]
    with MultiAsyncCollector(factories, None, frames_per_batch=T, seed=1) as collector:
        batches = []
        with pytest.raises(EnvError):
            while True:
                batches.append(collector.next().clone())
        first = collector.stats().workers[0].pid
        batches += [
            collector.next().clone() for _ in range(6)
        ]  # of the other, while both rollouts are requested again
        go.touch()
        wait_until(lambda: not alive(first))
        if ends == "collects on":
            with pytest.raises(WorkerDied):
                while True:
                    batches.append(collector.next().clone())
            while (0, 0) not in check_stream(batches):
                batches.append(collector.next().clone())
    stats, counts = collector.stats(), OracleEnv.read(path)
    assert stats.discarded["worker_died"] == (3 if ends == "collects on" else 0)
    assert stats.frames == sum(check_stream(batches).values())
    assert_balanced(stats, in_flight=0)
    assert stats.executed == counts[:, 2].sum()


# --- at random ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_random_kills_lose_nothing_and_double_nothing(tmp_path, kind):
    kills, path = 30, tmp_path / "counts"
    factories = [partial(OracleEnv, path, 3 * i, 3) for i in range(2)]
    collector = kind(
        factories,
        None,
        num_envs=3,
        frames_per_batch=600,
        seed=1,
        on_failure=Restart(max_restarts=None),
    )
    killer = Killer(kills, random.Random(kills), 0.3, kills_a_worker)
    rows = check_stream(killer.until_done(collector))
    collector.shutdown()
    stats, counts = collector.stats(), OracleEnv.read(path)
    assert stats.frames == sum(rows.values())
    assert_balanced(stats, in_flight=0)
    begun, made = counts[:, 1].sum(), counts[:, 2].sum()
    assert 0 <= begun - made <= kills
    # Whoever is killed after a step and before its reward is stored has made one that nobody can
    # know of.
    assert 0 <= made - stats.executed <= kills
    assert all(rows[env, run] <= counts[env, 2] for env, run in rows)
    assert killer.done == kills
    assert stats.restarts >= kills // 2  # some had not been started again yet


def kills_a_worker(collector, rng):
    worker = rng.choice(collector.stats().workers)
    if not worker.pid:  # its node has not started it yet
        return False
    try:
        os.kill(
            worker.pid, rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
        )
    except ProcessLookupError:  # not started again yet
        return False
    return True


def test_a_death_after_the_last_step_of_a_rollout_is_raised_too(tmp_path):
    factories = [partial(KilledByANeighbour, tmp_path, number) for number in range(2)]
    with MultiSyncCollector(
        factories, None, num_workers=2, frames_per_batch=40, seed=0
    ) as collector:
        first = collector.next().clone()
        with pytest.raises(WorkerDied, match="Worker 0"):
            collector.next()
        second = collector.next()
        assert first["observation"][..., 1].tolist() == [[*range(20)]] * 2
        assert second["observation"][1, :, 1].tolist() == [*range(20, 40)]
        third = collector.next()
        assert (
            third["observation"][0, 0, 1] == 0 or second["observation"][0, 0, 1] == 0
        )  # begun again
