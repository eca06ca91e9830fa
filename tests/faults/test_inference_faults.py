"""Workers, environments and policies that go wrong while a server acts: nothing is lost, and nobody
waits for ever.
"""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import sys
import threading
import traceback
from functools import partial

import pytest
import torch
from torch import nn

from muster import (
    AsyncCollector,
    CentralInference,
    MultiAsyncCollector,
    MultiSyncCollector,
    Restart,
)
from muster.errors import EnvError, PolicyError, WorkerDied, WorkerHung
from muster.policies import categorical
from muster.testing import CountingEnv, Fault, OracleEnv, check_stream
from tests.fakes import faults
from tests.fakes.fault_runs import FRAMES, KINDS, MODES, T, all_gone, deadlines, run
from tests.fakes.killers import Killer
from tests.fakes.served import Known, pid_of
from tests.faults.test_worker_deaths import kills_a_worker
from tests.tools import assert_balanced

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="kills processes"),
    pytest.mark.filterwarnings("ignore:a worker is dropped"),
]

AT = 30  # row 10 of the second rollout
SERVED = {"inference": "server"}
# a healthy worker on a busy machine stands still for more than 0.5 s
SHORT_S = 1.5
DIES = faults.Signalled(signal.SIGKILL)
BOOM = partial(ValueError, "boom")


class Mod5(nn.Module):
    """Action: the state, modulo 5, however rows are batched; calls ``do`` with the observations
    before.
    """

    def __init__(self, do=None):
        super().__init__()
        self.do, self.weight = do, nn.Parameter(torch.zeros(1))

    def forward(self, obs):
        if self.do is not None:
            self.do(obs)
        return obs[..., 5] % 5


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """In lockstep; else it depends on who is quick how much there is to compare."""
    kind, folder = MultiSyncCollector, tmp_path_factory.mktemp("undisturbed")
    return {kind: run(folder, None, kind, backend="threads", policy=Mod5(), **SERVED)}


def server_threads():
    return [
        thread for thread in threading.enumerate() if thread.name == "muster-inference"
    ]


@pytest.fixture(autouse=True)
def no_server_is_left():
    before = {*server_threads()}
    yield
    gc.collect()
    for thread in {*server_threads()} - before:
        thread.join(60)
        assert not thread.is_alive()


# --- workers that die -----------------------------------------------------------------------------


@pytest.mark.parametrize("on_failure", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_death_in_a_step_loses_the_rollout_at_work_and_nothing_else(
    tmp_path, undisturbed, kind, on_failure
):
    got = run(
        tmp_path,
        Fault(DIES, at=AT),
        kind,
        on_failure=on_failure,
        policy=Mod5(),
        **SERVED,
    )
    rows = got.check(undisturbed=undisturbed.get(kind))
    assert got.stats.discarded == {"worker_died": AT - T}
    assert rows[0, 0] == T
    assert got.counts[0, 0] == (1 if on_failure == "drop" else 2)
    assert len(got.errors) == (on_failure == "raise")
    for error in got.errors:
        assert type(error) is WorkerDied
        assert "was killed by SIGKILL during step" in str(error)
        assert (error.worker, error.env_id, error.phase) == (0, 0, "step")


class Kills:
    """Kills the worker of environment 0 during a call of the policy, once: that for step ``AT`` of
    ``watched``.
    """

    def __init__(self, path, watched):
        self.path, self.watched, self.done = path, watched, False

    def __call__(self, obs):
        now = obs.reshape(-1, 6)
        if not self.done and bool(
            ((now[:, 0] == self.watched) & (now[:, 4] == AT)).any()
        ):
            self.done = True
            os.kill(pid_of(self.path, 0), signal.SIGKILL)
            assert all_gone([pid_of(self.path, 0)])


@pytest.mark.parametrize("on_failure", MODES)
@pytest.mark.parametrize("watched", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_may_die_while_it_waits_for_the_server(
    tmp_path, kind, watched, on_failure
):
    """Or while the server acts with its row, which then is nobody's."""
    path = tmp_path / "counts"
    factories = [partial(Known, path, number) for number in range(2)]
    options = {
        "on_failure": on_failure,
        "inference": CentralInference(max_batch=1 if watched else None),
    }
    got = run(
        tmp_path,
        None,
        kind,
        create_env_fn=factories,
        policy=Mod5(Kills(path, watched)),
        **(SERVED | options),
    )
    got.counts = OracleEnv.read(path)
    got.check()
    assert set(got.stats.discarded) <= {"worker_died"}
    if got.in_lockstep:  # elsewhere the others may have made all the rest before it would be started again
        assert (
            got.counts[0, 0]
            == 1 + got.stats.restarts
            == (1 if on_failure == "drop" else 2)
        )
    assert got.counts[0, 0] <= 1 + got.stats.restarts
    assert got.counts[1, 0] == 1
    for error in got.errors:
        assert type(error) is WorkerDied
        assert error.worker == 0
    if not watched:  # else it can have been done with its part
        assert len(got.errors) == (on_failure == "raise")
        assert got.stats.discarded == {"worker_died": AT % T}
        assert all(
            "was killed by SIGKILL during policy" in str(error) for error in got.errors
        )


@pytest.mark.parametrize("on", ["construct", "reset"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_death_elsewhere_says_so(tmp_path, undisturbed, kind, on):
    fault = Fault(DIES, on, at=0 if on == "construct" else 3)
    if on == "construct":
        with pytest.raises(WorkerDied, match="was killed by SIGKILL during construct"):
            run(tmp_path, fault, kind, policy=Mod5(), **SERVED)
        return
    got = run(tmp_path, fault, kind, policy=Mod5(), **SERVED)
    got.check(undisturbed=undisturbed.get(kind))
    assert f"was killed by SIGKILL during {on}" in str(got.error)


def test_a_death_at_the_same_step_gives_the_same_streams(tmp_path):
    """Where calls are for the same workers: here for one at a time, each with its own random
    numbers.
    """
    for kind in KINDS:
        fault, options = (
            Fault(DIES, at=AT, runs=2),
            {"on_failure": "restart", "inference": CentralInference(alternating=True)},
        )
        first, second = (
            run(
                tmp_path,
                fault,
                kind,
                policy=categorical(Logits()),
                **(SERVED | options),
            )
            for _ in "ab"
        )
        first.check()
        if first.in_lockstep:  # else the other worker may make all there is
            assert first.stats.restarts == 2
        for env in (0, 1):
            first.check_rows(second, env, 2 * T if first.in_lockstep else 0)
        actions = [batch["action"].reshape(-1, T) for batch in first.batches]
        assert len(torch.cat(actions).unique()) == 5


class Logits(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5))

    def forward(self, obs):
        return self.weight.expand(*obs.shape[:-1], 5)


@pytest.mark.parametrize("kind", KINDS)
def test_random_kills_lose_nothing_and_double_nothing(tmp_path, kind):
    kills, path = 12, tmp_path / "counts"
    factories = [partial(OracleEnv, path, 3 * i, 3) for i in range(3)]
    options = {
        "num_envs": 3,
        "frames_per_batch": 450,
        "seed": 1,
        "on_failure": Restart(max_restarts=None),
    }
    collector = kind(factories, Mod5(), **(SERVED | options))
    killer = Killer(kills, random.Random(kills), 0.3, kills_a_worker)
    rows = check_stream(killer.until_done(collector))
    collector.shutdown()
    stats, counts = collector.stats(), OracleEnv.read(path)
    assert stats.frames == sum(rows.values())
    assert_balanced(stats, in_flight=0)
    assert 0 <= counts[:, 2].sum() - stats.executed <= kills
    assert killer.done == kills


# --- environments ---------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["processes", "threads"])
@pytest.mark.parametrize("on_failure", MODES)
def test_an_error_of_an_environment_is_raised_or_ends_its_worker(
    tmp_path, undisturbed, on_failure, backend
):
    for kind in KINDS:
        fault = Fault(faults.Raising(BOOM), at=AT)
        got = run(
            tmp_path,
            fault,
            kind,
            policy=Mod5(),
            on_failure=on_failure,
            backend=backend,
            **SERVED,
        )
        got.check(undisturbed=undisturbed.get(kind))
        assert got.stats.discarded == (
            {} if on_failure == "raise" else {"env_error": AT - T}
        )
        assert len(got.errors) == (on_failure == "raise")
        for error in got.errors:
            assert type(error) is EnvError
            assert isinstance(error.__cause__, ValueError)
            assert (error.worker, error.env_id, error.phase) == (0, 0, "step")


@pytest.mark.parametrize("backend", ["processes", "threads"])
@pytest.mark.parametrize("on_failure", MODES)
def test_who_waits_with_others_for_one_that_hangs_is_not_blamed(
    tmp_path, undisturbed, on_failure, backend
):
    """The server waits for all, and so for the one."""
    timeouts = {**deadlines(60.0), "step": SHORT_S}
    options = {
        "on_failure": on_failure,
        "backend": backend,
        "timeouts": timeouts,
        "policy": Mod5(),
    }
    got = run(tmp_path, Fault(faults.waits, at=AT), **(SERVED | options))
    got.check(undisturbed=undisturbed[MultiSyncCollector])
    assert got.stats.discarded == {"worker_hung": AT - T}
    assert got.counts[1, 0] == 1
    for error in got.errors:
        assert type(error) is WorkerHung
        assert (error.worker, error.phase) == (0, "step")
        assert f"at {faults.line_of(faults.waits)} in waits; its deadline" in str(error)


def test_an_environment_that_hangs_keeps_no_shutdown(tmp_path):
    path = tmp_path / "counts"
    factories = [
        partial(OracleEnv, path, 0, 1, Fault(faults.holds_the_gil, at=AT)),
        partial(OracleEnv, path, 1),
    ]
    collector = MultiAsyncCollector(
        factories, Mod5(), frames_per_batch=T, timeouts={"close": 0.5}, **SERVED
    )
    while not len(OracleEnv.read(path)) or OracleEnv.read(path)[0, 1] < AT + 1:
        assert collector.next() is not None
    collector.shutdown()
    stats = collector.stats()
    assert_balanced(stats, in_flight=0)
    assert stats.executed == OracleEnv.read(path)[:, 2].sum()


# --- the policy -----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["processes", "threads"])
@pytest.mark.parametrize("at", [0, 1, 2, 30])
@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_the_policy_is_raised_once_and_costs_nothing(
    tmp_path, kind, at, backend
):
    for error in (BOOM, partial(faults.TwoArguments, 3, "why"), partial(SystemExit, 3))[
        : 3 if at else 2
    ]:
        policy = faults.FaultyPolicy(
            str(tmp_path / f"mark {error.func.__name__}"), faults.Raising(error), at
        )
        got = run(tmp_path, None, kind, policy=policy, backend=backend, **SERVED)
        got.check()
        assert (got.stats.discarded, got.stats.restarts) == ({}, 0)
        assert type(got.error) is PolicyError
        assert type(got.error.__cause__) is error.func
        line = faults.line_of(faults.Raising(None)).replace(":", '", line ')
        frames = "".join(traceback.format_exception(got.error.__cause__))
        for part in ("FaultyPolicy", error.func.__name__, *([line] if at else [])):
            assert part in str(got.error)
        assert line in frames


@pytest.mark.parametrize("on_failure", ["restart", "drop"])
def test_an_error_of_the_policy_is_raised_in_every_mode(tmp_path, on_failure):
    for kind in KINDS:
        policy = faults.FaultyPolicy(
            str(tmp_path / kind.__name__), faults.Raising(BOOM), 3
        )
        got = run(
            tmp_path,
            None,
            kind,
            policy=policy,
            on_failure=on_failure,
            backend="threads",
            **SERVED,
        )
        got.check()
        assert type(got.error) is PolicyError
        assert got.stats.restarts == 0


class Fails:
    """From step ``at`` on, until it is told to stop."""

    wrong = True

    def __init__(self, at):
        self.at = at

    def __call__(self, obs):
        if Fails.wrong and bool((obs[..., 4] >= self.at).any()):
            raise ValueError("again")


@pytest.mark.parametrize("kind", [*KINDS, AsyncCollector])
def test_while_the_policy_fails_nothing_is_stepped_and_the_next_call_tries_again(
    tmp_path, kind, monkeypatch
):
    path, batches = tmp_path / "counts", []
    factories = (
        partial(OracleEnv, path)
        if kind is AsyncCollector
        else [partial(OracleEnv, path, n) for n in range(2)]
    )
    monkeypatch.setattr(Fails, "wrong", True)
    frames = 2 * T if kind is MultiSyncCollector else T
    with kind(
        factories, Mod5(Fails(AT)), frames_per_batch=frames, backend="threads", **SERVED
    ) as collector:
        errors = []
        while len(errors) < 4:
            try:
                batches.append(collector.next().clone())
            except PolicyError as error:
                errors.append(error)
                stepped = OracleEnv.read(path)[:, 2].tolist()
                assert (
                    max(stepped) == AT
                    if kind is not MultiAsyncCollector
                    else max(stepped) <= AT
                )
        row = (
            r"\d+" if kind is MultiAsyncCollector else "(10|9)"
        )  # of the first for whom it was called
        for error in errors:
            assert re.search(f"ValueError at row {row} of the batch: again", str(error))
        Fails.wrong = False
        while len(batches) < 8:
            try:
                batches.append(collector.next().clone())
            except PolicyError as error:  # of before
                errors.append(error)
        assert len(errors) <= 4 + (2 if kind is MultiAsyncCollector else 1)
        check_stream(batches)
        stats = collector.stats()
        assert stats.discarded == {}
        assert stats.inference.calls > 8
    assert collector.stats().executed == OracleEnv.read(path)[:, 2].sum()


def test_calls_after_an_error_are_for_all_again(tmp_path):
    policy = faults.FaultyPolicy(str(tmp_path / "mark"), faults.Raising(BOOM), at=AT)
    got = run(tmp_path, None, policy=policy, backend="threads", **SERVED)
    assert type(got.error) is PolicyError
    assert got.stats.inference.calls == FRAMES // 2 + 1  # the one that failed


class Waits:
    """In call ``at``, until the test is over."""

    over = threading.Event()

    def __init__(self, at):
        self.at, self.calls = at, 0

    def __call__(self, obs):
        self.calls += 1
        torch.rand(1)
        if self.calls == self.at:
            Waits.over.wait()  # HERE


@pytest.fixture
def over():
    Waits.over.clear()
    yield Waits.over
    Waits.over.set()


@pytest.mark.parametrize("on_failure", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_that_hangs_is_named_with_its_line_and_nobody_is_killed_for_it(
    tmp_path, over, kind, on_failure
):
    path = tmp_path / "counts"
    factories = [partial(OracleEnv, path, number) for number in range(2)]
    options = {
        "frames_per_batch": 2 * T,
        "timeouts": {**deadlines(60.0), "policy": SHORT_S},
        "on_failure": on_failure,
    }
    with kind(factories, Mod5(Waits(30)), **(SERVED | options)) as collector:
        pids = [worker.pid for worker in collector.stats().workers]
        batches, random_state = [], torch.random.get_rng_state()
        for _ in range(2):  # and again, as long as it does
            with pytest.raises(WorkerHung) as caught:
                while True:
                    batches.append(collector.next().clone())
            said = str(caught.value)
            assert re.search(r"has not returned for \d\.\d s", said)
            if (
                kind is MultiSyncCollector
            ):  # elsewhere policies draw from the same generators as the user
                assert torch.equal(torch.random.get_rng_state(), random_state)
            assert (
                f"at {faults.line_of(Waits(0))} in __call__; its deadline is"
                f" {SHORT_S:g} s"
            ) in said
        over.set()
        while len(batches) < 6:
            try:
                batches.append(collector.next().clone())
            except WorkerHung:  # it has not returned yet
                pass
        check_stream(batches)
        stats = collector.stats()
        assert [worker.pid for worker in stats.workers] == pids
        assert (stats.restarts, stats.discarded) == (0, {})
    assert collector.stats().executed == OracleEnv.read(path)[:, 2].sum()


@pytest.mark.parametrize("backend", ["processes", "threads"])
def test_a_policy_that_hangs_does_not_keep_shutdown(tmp_path, over, backend):
    """It is waited for, but once for all workers."""
    path = tmp_path / "counts"
    factories = [partial(OracleEnv, path, number) for number in range(4)]
    timeouts = {**deadlines(0.5), "construct": 60.0}
    collector = MultiSyncCollector(
        factories,
        Mod5(Waits(30)),
        frames_per_batch=4 * T,
        timeouts=timeouts,
        backend=backend,
        **SERVED,
    )
    with pytest.raises(WorkerHung):
        while True:
            collector.next()
    ended = threading.Event()
    closing = threading.Thread(target=lambda: collector.shutdown() or ended.set())
    closing.start()
    assert ended.wait(12.0)
    closing.join()
    stats = collector.stats()
    assert_balanced(stats, in_flight=0)
    assert stats.executed == OracleEnv.read(path)[:, 2].sum()


def test_a_policy_that_fails_at_first_sight_ends_nothing(tmp_path):
    """It is called once for its columns, before anybody steps."""
    policy = faults.FaultyPolicy(str(tmp_path / "mark"), faults.Raising(BOOM))
    collector = MultiSyncCollector(
        [CountingEnv] * 2, policy, frames_per_batch=20, backend="threads", **SERVED
    )
    with collector:
        with pytest.raises(PolicyError, match="boom"):
            collector.next()
        assert collector.next()["action"].eq(1).all()


# --- Ctrl-C, the end, and what is left ------------------------------------------------------------


class Interrupts:
    """Sends this process a SIGINT in some calls."""

    def __init__(self, *at):
        self.at, self.calls = at, 0

    def __call__(self, obs):
        self.calls += 1
        if self.calls in self.at:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("backend", ["processes", "threads"])
@pytest.mark.parametrize("kind", KINDS)
def test_after_ctrl_c_the_next_call_goes_on(tmp_path, kind, backend):
    path, batches, errors = tmp_path / "counts", [], []
    factories = [partial(OracleEnv, path, number) for number in range(2)]
    # Two signals that come before the main thread has looked at the first one are one: so much is
    # between them.
    with kind(
        factories,
        Mod5(Interrupts(30, 300)),
        frames_per_batch=2 * T,
        backend=backend,
        **SERVED,
    ) as collector:
        while len(batches) < 5 or len(errors) < 2:  # one call can be for both workers
            try:
                batch = collector.next()
                batches.append(batch.clone())
            except KeyboardInterrupt as error:
                errors.append(error)
    assert len(errors) == 2
    if (
        kind is MultiSyncCollector
    ):  # it waits for the policy then; elsewhere it can be at anything
        check_stream(batches)
        assert collector.stats().frames == len(batches) * 2 * T
    stats = collector.stats()
    assert_balanced(stats, in_flight=0)
    assert stats.executed == OracleEnv.read(path)[:, 2].sum()


@pytest.mark.parametrize("backend", ["processes", "threads"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_collector_that_is_thrown_away_ends(tmp_path, kind, backend):
    before = {*server_threads()}
    factories = [partial(OracleEnv, tmp_path / "counts", number) for number in range(2)]
    collector = kind(factories, Mod5(), frames_per_batch=40, backend=backend, **SERVED)
    batch = collector.next()
    pids = {worker.pid for worker in collector.stats().workers} - {os.getpid()}
    kept = batch.clone()
    del collector
    gc.collect()
    assert all_gone(pids)
    for thread in {*server_threads()} - before:
        thread.join(60)
        assert not thread.is_alive()
    assert (batch == kept).all()  # what the user holds is still there


@pytest.mark.parametrize("backend", ["processes", "threads"])
def test_shutdown_in_the_middle_of_rollouts_is_quick_and_accounted(tmp_path, backend):
    path = tmp_path / "counts"
    factories = [partial(OracleEnv, path, number) for number in range(3)]
    collector = MultiAsyncCollector(
        factories, Mod5(), frames_per_batch=5000, backend=backend, **SERVED
    )
    assert collector.next() is not None
    collector.shutdown()
    collector.shutdown()
    stats, counts = collector.stats(), OracleEnv.read(path)
    assert_balanced(stats, in_flight=0)
    assert stats.executed == counts[:, 2].sum()
    assert counts[:, 3].tolist() == [1, 1, 1]
