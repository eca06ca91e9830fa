"""Workers that hang: found within the deadline of what they are at, with the line that they hang
in.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from muster import MultiSyncCollector, Restart
from muster.errors import WorkerHung
from muster.rollout.progress import PHASE, Phase
from muster.testing import CountingEnv, Fault, OracleEnv, check_stream
from muster.workers.proxy import WorkerProxy
from muster.workers.under_way import UnderWay
from tests.fakes import faults
from tests.fakes.fault_runs import FRAMES, KINDS, MODES, T, alive, deadlines, run
from tests.fakes.node_runs import NODE_KINDS, async_nodes, sync_nodes
from tests.tools import assert_balanced
from tests.waits import wait_for_time, wait_until, without_delays

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
]

WAYS = {"wait": faults.waits, "GIL": faults.holds_the_gil, "SIGSTOP": faults.stops}
BACKENDS = [
    ("wait", "processes"),
    ("GIL", "processes"),
    ("SIGSTOP", "processes"),
    ("wait", "threads"),
]
DEADLINE_S = 1.5  # a healthy worker on a busy machine stands still for more than 0.5 s
SHORT_S = 0.5  # where a worker may also be ended that only stands still
AT = 30


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    return {kind: run(folder, None, kind, backend="threads") for kind in KINDS}


@pytest.fixture(scope="module", autouse=True)
def fork_server(tmp_path_factory):
    """One that has imported what workers need, so that deadlines are not about imports."""
    run(tmp_path_factory.mktemp("first"), None)


@pytest.mark.parametrize("on_failure", MODES)
@pytest.mark.parametrize(("way", "backend"), BACKENDS)
def test_a_hang_in_a_step_loses_the_rollout_at_work_and_nothing_else(
    tmp_path, undisturbed, way, backend, on_failure
):
    for kind in KINDS if way == "wait" else KINDS[:1]:
        fault = Fault(WAYS[way], at=AT)
        timeouts = {**deadlines(60.0), "step": DEADLINE_S}
        got = run(
            tmp_path,
            fault,
            kind,
            on_failure=on_failure,
            backend=backend,
            timeouts=timeouts,
        )
        got.check(undisturbed=undisturbed[kind])
        assert got.stats.discarded == {"worker_hung": AT - T}
        assert got.counts[0].tolist()[:1] == [1 if on_failure == "drop" else 2]
        assert len(got.errors) == (on_failure == "raise")
        for error in got.errors:
            assert_said(error, "step", WAYS[way], row=AT - T)


@pytest.mark.parametrize(("way", "backend"), BACKENDS)
def test_a_hang_in_a_reset_says_so(tmp_path, undisturbed, way, backend):
    timeouts = {**deadlines(60.0), "reset": DEADLINE_S}
    got = run(
        tmp_path, Fault(WAYS[way], "reset", at=3), backend=backend, timeouts=timeouts
    )
    got.check(undisturbed=undisturbed[MultiSyncCollector])
    assert list(got.stats.discarded) == ["worker_hung"]
    assert_said(got.error, "reset", WAYS[way])


@pytest.mark.parametrize(("way", "backend"), BACKENDS)
def test_a_hang_while_environments_are_made_ends_the_construction(
    tmp_path, way, backend
):
    with pytest.raises(WorkerHung) as caught:
        run(
            tmp_path,
            Fault(WAYS[way], "construct"),
            backend=backend,
            timeouts={"construct": 2 * DEADLINE_S},
        )
    assert_said(caught.value, "construct", WAYS[way])


def test_a_process_that_has_not_begun_yet_has_the_deadline_of_a_construction(
    monkeypatch,
):
    """It was in the phase "idle", with the deadline of a step."""
    start, phases = WorkerProxy.start, []

    def noting(proxy):
        start(proxy)
        phases.append(proxy.phase)

    monkeypatch.setattr(WorkerProxy, "start", noting)
    with MultiSyncCollector([CountingEnv] * 2, None, frames_per_batch=4) as collector:
        assert collector.next() is not None
    assert phases == [Phase.CONSTRUCT] * 2


def test_workers_that_hang_in_close_share_one_deadline(tmp_path):
    path = tmp_path / "counts"
    factories = [
        partial(OracleEnv, path, number, 1, Fault(faults.waits, "close"))
        for number in range(4)
    ]
    timeouts = {**deadlines(60.0), "close": 4.0}
    collector = MultiSyncCollector(
        factories, None, frames_per_batch=4 * T, timeouts=timeouts
    )
    pids = [worker.pid for worker in collector.stats().workers]
    begun = time.monotonic()
    collector.shutdown()
    assert 4.0 <= time.monotonic() - begun < 12.0
    assert not any(map(alive, pids))


@pytest.mark.parametrize(("way", "backend"), BACKENDS)
def test_a_hang_in_close_does_not_keep_shutdown(tmp_path, undisturbed, way, backend):
    got = run(
        tmp_path,
        Fault(WAYS[way], "close"),
        backend=backend,
        timeouts={"close": DEADLINE_S},
    )
    got.check(undisturbed=undisturbed[MultiSyncCollector])
    assert (got.errors, got.stats.discarded, got.stats.executed) == ([], {}, FRAMES)
    assert got.counts[:, 3].tolist() == [0, 1]  # the other one was closed in peace


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize(("way", "backend"), BACKENDS)
def test_a_hang_in_the_policy_says_so(tmp_path, way, backend, at):
    policy = faults.FaultyPolicy(str(tmp_path / "mark"), WAYS[way], at)
    alone = KINDS[
        1
    ]  # threads that share batches take turns with the policy: who waits for it has not hung
    timeouts = {**deadlines(60.0), "policy": DEADLINE_S}
    got = run(tmp_path, None, alone, policy=policy, backend=backend, timeouts=timeouts)
    got.check()
    assert_said(got.error, "policy", WAYS[way])


class PolicyOfSuccessor(torch.nn.Module):
    """Waits in its first call for an environment's second run until there is a file "on"."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, obs):
        if obs[..., 1] == 1 and not (self.folder / "acting").exists():
            (self.folder / "acting").touch()
            wait_until((self.folder / "on").exists)
        return torch.ones(obs.shape[:-1], dtype=torch.int64)


def made_slowly_again(path, go):
    env = OracleEnv(
        path, 0, 1, Fault(faults.KilledAndNoted(go.with_name("pid")), at=30)
    )
    if env.run:
        wait_until(go.exists)
    return env


def test_time_in_one_phase_does_not_count_for_the_next(tmp_path, monkeypatch):
    """The successor's construction takes longer than the deadline of its policy, and it goes on
    from one to the other while the supervisor looks.
    """
    go, constructs = tmp_path / "go", []
    read = UnderWay.signs

    def signs(under_way, cells):
        found = read(under_way, cells)
        runs = OracleEnv.read(tmp_path / "counts")[:1, 0]
        if runs.sum() < 2:
            return found
        if cells[PHASE] == Phase.CONSTRUCT and not go.exists():
            constructs.append(time.monotonic())
            if constructs[-1] - constructs[0] > 2 * SHORT_S:
                go.touch()
                wait_until((tmp_path / "acting").exists)
        elif (tmp_path / "acting").exists():
            (tmp_path / "on").touch()
        return found

    monkeypatch.setattr(UnderWay, "signs", signs)
    counts = tmp_path / "counts"
    got = run(
        tmp_path,
        None,
        counts=counts,
        create_env_fn=[
            partial(made_slowly_again, counts, go),
            partial(OracleEnv, counts, 1),
        ],
        policy=PolicyOfSuccessor(tmp_path),
        on_failure="restart",
        timeouts={**deadlines(60.0), "policy": SHORT_S},
    )
    got.check()
    assert (tmp_path / "on").exists()
    assert (got.errors, got.stats.restarts) == ([], 1)
    assert list(got.stats.discarded) == ["worker_died"]


@pytest.mark.slow  # a program of its own
def test_a_program_that_was_stopped_with_its_workers_does_not_take_that_for_a_hang(
    tmp_path, start
):
    """As ``docker pause``, Slurm's suspend or a debugger do it."""
    program = start("stopped_midway")
    main, others = program.process.pid, program.family()
    wait_until_it_has_looked(main)
    for pid in (main, *others):
        os.kill(pid, signal.SIGSTOP)
    wait_for_time(4.0)  # the deadline is 3 s
    os.kill(main, signal.SIGCONT)
    wait_until_it_has_looked(main)
    for pid in others:
        os.kill(pid, signal.SIGCONT)
    (tmp_path / "go").touch()
    assert program.process.stdout.readline() == f"{8 * T}\n"
    assert program.end()[1] == 0


def wait_until_it_has_looked(pid):
    """Which it does between two waits."""

    def waits():
        text = Path(f"/proc/{pid}/status").read_text()
        return int(re.search(r"\nvoluntary_ctxt_switches:\s*(\d+)", text)[1])

    before = waits()
    wait_until(lambda: waits() > before + 5)


class Noting:
    """Hangs, and notes in which thread."""

    def __init__(self, path):
        self.path = path

    def __call__(self, _):
        self.path.write_text(threading.current_thread().name)
        threading.Event().wait()  # HERE


@pytest.mark.parametrize("at", [0, 25])
@pytest.mark.parametrize("on_failure", MODES)
def test_a_hang_in_the_policy_of_one_thread_is_not_that_of_those_who_wait_for_their_turn(
    tmp_path, on_failure, at
):
    noting = Noting(tmp_path / "thread")
    policy = faults.FaultyPolicy(str(tmp_path / "mark"), noting, at)
    timeouts = {
        **deadlines(60.0),
        "step": 2 * DEADLINE_S,
        "policy": 3 * DEADLINE_S,
    }  # waiting is neither
    got = run(
        tmp_path,
        None,
        policy=policy,
        backend="threads",
        on_failure=on_failure,
        timeouts=timeouts,
    )
    got.check()
    assert set(got.stats.discarded) <= {"worker_hung"}
    worker = int(noting.path.read_text().removeprefix("muster-worker-"))
    assert got.counts[:, 0].tolist() == [
        1 + (on_failure != "drop" and number == worker) for number in range(2)
    ]
    assert len(got.errors) == (on_failure == "raise")
    for error in got.errors:
        assert (error.worker, error.phase) == (worker, "policy")
        assert f" at {faults.line_of(noting)} in __call__; its deadline is " in str(
            error
        )


HUNG = []  # threads
WAKE = threading.Event()


class HangsUntilWoken(torch.nn.Module):
    """Hangs in the 26th call of the first copy that gets there."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, obs):
        self.calls += 1
        if self.calls > 25 and not HUNG:
            HUNG.append(threading.current_thread())
            WAKE.wait(50)
            return torch.full(obs.shape[:-1], 4)
        return torch.randint(5, obs.shape[:-1])


def test_a_thread_that_wakes_up_after_it_was_given_up_changes_nothing(tmp_path):
    HUNG.clear()
    WAKE.clear()
    factories = [partial(OracleEnv, tmp_path / "counts", number) for number in range(3)]
    timeouts = {**deadlines(60.0), "policy": DEADLINE_S}
    options = {
        "frames_per_batch": 3 * T,
        "on_failure": "restart",
        "backend": "threads",
        "timeouts": timeouts,
        "seed": 1,
    }
    users = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    with MultiSyncCollector(factories, HangsUntilWoken(), **options) as collector:
        batches = []
        while collector.stats().restarts == 0:
            batches.append(collector.next())
        batches += [collector.next() for _ in range(2)]
        copies = [batch.clone() for batch in batches]
        WAKE.set()
        HUNG[0].join(30)
        assert not HUNG[0].is_alive()
        assert all(
            (batch == copy).all() for batch, copy in zip(batches, copies, strict=True)
        )
        batches += [collector.next() for _ in range(2)]
        stats = collector.stats()
        rows = check_stream(batches)
    assert torch.equal(torch.get_rng_state(), users[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == users[1:]
    assert (stats.restarts, list(stats.discarded)) == (1, ["worker_hung"])
    executed = OracleEnv.read(tmp_path / "counts")[:, 2].sum()
    assert stats.executed == executed
    assert stats.frames == sum(rows.values())
    assert_balanced(stats, in_flight=0)


HANGS_AND_ENDS = """
import threading, muster
from muster.testing import CountingEnv
hung = []
class Hangs(CountingEnv):
    def step(self, action):
        if not hung and self.executed == 3:
            hung.append(self)
            threading.Event().wait()
        return super().step(action)
collector = muster.MultiSyncCollector([Hangs] * 2, None, backend="threads", frames_per_batch=40,
                                      on_failure="restart", timeouts={"step": 0.5})
while collector.stats().restarts == 0:
    collector.next()
"""


@pytest.mark.slow
def test_a_program_ends_in_silence_beside_a_thread_that_hangs_and_its_successor():
    done = subprocess.run(
        [sys.executable, "-c", HANGS_AND_ENDS],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, without_delays(done.stderr)) == (0, "")


def test_a_hang_while_weights_are_taken_says_so(tmp_path):
    from muster.weights import SharedMemory

    policy = faults.FaultyPolicy(str(tmp_path / "never"), None, at=1 << 60)
    scheme = faults.FaultyScheme(
        SharedMemory(), str(tmp_path / "mark"), faults.waits, at=4
    )
    timeouts = {
        **deadlines(60.0),
        "weights": 4 * DEADLINE_S,
    }  # the successor takes weights, too
    got = run(
        tmp_path,
        None,
        policy=policy,
        weight_sync_schemes={"policy": scheme},
        timeouts=timeouts,
    )
    got.check()
    assert_said(got.error, "weights", faults.waits)


def test_a_hang_in_a_call_says_so(tmp_path):
    class Freezing(OracleEnv):
        def freeze(self):
            faults.waits(None)

    path = tmp_path / "counts"
    factories = [partial(Freezing, path, number) for number in range(2)]
    with MultiSyncCollector(
        factories, None, frames_per_batch=2 * T, timeouts={"call": DEADLINE_S}
    ) as collector:
        batches = [collector.rollout().clone()]
        with pytest.raises(WorkerHung) as caught:
            collector.cascade_execute("env.unwrapped.freeze")
        assert_said(caught.value, "call", faults.waits)
        batches += [collector.rollout().clone() for _ in range(2)]  # with its successor
        assert list(check_stream(batches)) == [(0, 0), (1, 0), (0, 1)]


def test_a_worker_that_was_stopped_from_outside_hangs(tmp_path):
    path = tmp_path / "counts"
    factories = [partial(OracleEnv, path, number) for number in range(2)]
    timeouts = deadlines(2 * DEADLINE_S)
    with MultiSyncCollector(
        factories, None, frames_per_batch=2 * T, timeouts=timeouts
    ) as collector:
        collector.next()
        os.kill(collector.stats().workers[1].pid, signal.SIGSTOP)
        with pytest.raises(
            WorkerHung,
            match=rf"its deadline is {2 * DEADLINE_S:g} s\. The process is stopped",
        ) as caught:
            collector.next()
        assert caught.value.worker == 1
        assert collector.next() is not None


@pytest.mark.parametrize("on_failure", MODES)
@pytest.mark.parametrize("kind", NODE_KINDS)
def test_a_hang_of_a_worker_on_a_node_loses_the_rollout_at_work_and_nothing_else(
    tmp_path, kind, on_failure
):
    timeouts = {**deadlines(60.0), "step": DEADLINE_S}
    for way in (
        (faults.waits, faults.holds_the_gil)
        if on_failure == "raise"
        else (faults.waits,)
    ):
        got = run(
            tmp_path, Fault(way, at=AT), kind, on_failure=on_failure, timeouts=timeouts
        )
        got.check()
        assert got.stats.discarded == {"worker_hung": AT - T}
        assert len(got.errors) == (on_failure == "raise")
        for error in got.errors:
            assert_said(error, "step", way, row=AT - T)


def test_a_worker_on_a_node_that_is_stopped_hangs(tmp_path):
    timeouts = {**deadlines(60.0), "step": DEADLINE_S}
    got = run(tmp_path, Fault(faults.stops, at=AT), sync_nodes, timeouts=timeouts)
    got.check()
    assert got.stats.discarded == {"worker_hung": AT - T}
    assert re.search(r"has been in step for \d+\.\d s", str(got.error))


@pytest.mark.parametrize("phase", ["reset", "construct", "close"])
def test_a_hang_of_a_worker_on_a_node_elsewhere_than_in_a_step(tmp_path, phase):
    timeouts = {**deadlines(60.0), phase: 2 * DEADLINE_S}
    fault = Fault(faults.waits, phase, at=3 if phase == "reset" else 0)
    if phase == "construct":
        with pytest.raises(WorkerHung) as caught:
            run(tmp_path, fault, sync_nodes, timeouts=timeouts)
        assert_said(caught.value, phase, faults.waits)
        return
    got = run(tmp_path, fault, sync_nodes, timeouts=timeouts)
    got.check()
    if phase == "close":
        assert (got.errors, got.stats.discarded, got.stats.executed) == ([], {}, FRAMES)
        assert got.counts[:, 3].tolist() == [0, 1]  # the other one was closed in peace
    else:
        assert_said(got.error, phase, faults.waits)


# --- those that get on again ----------------------------------------------------------------------


class Reviving(OracleEnv):
    """Its first run hangs in the middle of its second rollout until it gets a signal, and again 1.5
    rollouts later.
    """

    def step(self, action):
        hangs = {AT: faults.waits_for_a_signal, AT + T // 2 + T: faults.waits}
        step = int(self._cells[1])
        self.fault = Fault(hangs[step], at=step) if step in hangs else None
        return super().step(action)


def served(factories, **options):
    policy = faults.FaultyPolicy("", None, at=1 << 60)
    return MultiSyncCollector(factories, policy, inference="server", **options)


@pytest.mark.filterwarnings("ignore:a worker is dropped")
@pytest.mark.parametrize(
    ("kind", "on_failure"),
    [
        *product(KINDS, MODES),
        (served, "restart"),
        (sync_nodes, "raise"),
        (async_nodes, "restart"),
    ],
)
def test_what_a_worker_makes_while_its_hang_is_dealt_with_is_in_the_account(
    tmp_path, kind, on_failure
):
    """The signal that asks for the stack ends the call that hangs, and the worker completes its
    rollout.
    """
    path = tmp_path / "counts"
    factories = [partial(Reviving, path, 0), partial(OracleEnv, path, 1)]
    options = {
        "frames_per_batch": 2 * T,
        "on_failure": on_failure,
        "seed": 1,
        "crash_dir": tmp_path,
    }
    batches, errors = [], []
    with kind(
        factories, timeouts={**deadlines(60.0), "step": DEADLINE_S}, **options
    ) as collector:
        while (
            len(batches) < 8
            or (made := OracleEnv.read(path)[0])[0] + (on_failure == "drop") < 2
            or not made[2] > AT
        ):
            try:
                batches.append(collector.next().clone())
            except WorkerHung as error:
                errors.append(error)
    assert len(errors) == (on_failure == "raise")
    for error in errors:
        assert_said(error, "step", faults.waits_for_a_signal)
    assert_all_known(collector.stats(), batches, path, kills=1)


@pytest.mark.parametrize("backend", ["processes", "threads"])
@pytest.mark.parametrize("kind", KINDS)
def test_hangs_that_end_about_when_they_are_found(tmp_path, kind, backend):
    path = tmp_path / "counts"

    def make():
        env = OracleEnv(path)
        step, rng = env.step, random.Random(env.run)

        def slow_step(action):
            if env._cells[1] % 50 == 49:
                threading.Event().wait(
                    SHORT_S + rng.uniform(0.0, 0.2)
                )  # the parent looks every 0.2 s
            return step(action)

        env.step = slow_step
        return env

    options = {
        "on_failure": Restart(max_restarts=None),
        "timeouts": {**deadlines(60.0), "step": SHORT_S},
    }
    with kind(
        make, None, frames_per_batch=T, total_frames=20 * T, backend=backend, **options
    ) as collector:
        batches = [batch.clone() for batch in collector]
    assert_all_known(
        collector.stats(), batches, path, kills=collector.stats().restarts + 1
    )


def test_a_call_that_is_answered_when_its_hang_was_found_is_an_error(tmp_path):
    class Freezing(OracleEnv):
        def freeze(self):
            faults.waits_for_a_signal(None)

    path = tmp_path / "counts"
    with MultiSyncCollector(
        partial(Freezing, path), None, frames_per_batch=T, timeouts={"call": DEADLINE_S}
    ) as collector:
        batches = [collector.rollout().clone()]
        with pytest.raises(WorkerHung) as caught:
            collector.cascade_execute("env.unwrapped.freeze")
        assert_said(caught.value, "call", faults.waits_for_a_signal)
        batches.append(collector.rollout().clone())
    assert list(check_stream(batches)) == [(0, 0), (0, 1)]


def assert_all_known(stats, batches, path, *, kills):
    assert stats.frames == sum(check_stream(batches).values())
    assert_balanced(stats, in_flight=0)
    # Whoever is killed after a step and before its reward is stored has made one that nobody can
    # know of.
    assert 0 <= OracleEnv.read(path)[:, 2].sum() - stats.executed <= kills


def test_slow_is_not_hung(tmp_path):
    """Every step takes a good part of the deadline; a rollout takes several deadlines."""
    path = tmp_path / "counts"

    def make():
        env = OracleEnv(path)
        step = env.step

        def slow_step(action):
            threading.Event().wait(DEADLINE_S / 4)
            return step(action)

        env.step = slow_step
        return env

    options = {
        "frames_per_batch": 10,
        "timeouts": {**deadlines(60.0), "step": DEADLINE_S},
    }
    for kind in (
        MultiSyncCollector,
        partial(MultiSyncCollector, backend="threads"),
        sync_nodes,
    ):
        with kind(make, None, **options) as collector:
            assert collector.next().numel() == 10


def test_a_hanging_rollout_does_not_keep_shutdown(tmp_path):
    """The consumer leaves while a worker hangs, long before the deadline of the step."""
    path = tmp_path / "counts"
    factories = [
        partial(OracleEnv, path, 0, 1, Fault(faults.holds_the_gil, at=AT)),
        partial(OracleEnv, path, 1),
    ]
    collector = KINDS[1](
        factories, None, frames_per_batch=T, timeouts={"close": DEADLINE_S}
    )
    while OracleEnv.read(path)[0, 1] < AT + 1 if len(OracleEnv.read(path)) else True:
        assert collector.next() is not None
    collector.shutdown()
    stats = collector.stats()
    assert_balanced(stats, in_flight=0)
    assert stats.executed == OracleEnv.read(path)[:, 2].sum()


def assert_said(error, phase, where, row=None):
    assert type(error) is WorkerHung
    text = str(error)
    place = (
        r"(?:, environment (\d))?(?:, row \d+)?(?:, seed \d+)?"
        if row is None
        else rf", environment (\d), row {row}, seed \d+"
    )
    found = re.match(
        rf"Worker (\d) \(pid \d+(?:, node 0 \(\S+\))?\){place} has been in {phase} for (\d+\.\d) s",
        text,
    )
    assert found, text
    assert (error.worker, error.phase) == (int(found[1]), phase)
    if where is faults.stops:
        assert (
            "The process is stopped (SIGSTOP, or a debugger), so its stack could not be taken"
            in text
        )
    else:
        assert (
            f" at {faults.line_of(where)} in {where.__name__}; its deadline is " in text
        )
        assert "Stack of the worker" in text
