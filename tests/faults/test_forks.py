"""Forks: of the user's program, which share nothing of a collector's, and those that environments
make in workers.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import muster
from muster import (
    Collector,
    Evaluator,
    MultiAsyncCollector,
    MultiSyncCollector,
    Recorder,
)
from muster.errors import ForkedProcess
from muster.testing import CountingEnv, OracleEnv, check_stream
from tests.fakes import faults, forks
from tests.fakes.fault_runs import T
from tests.fakes.node_runs import async_nodes
from tests.tools import assert_balanced
from tests.waits import without_delays

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="forks"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

ROOT = Path(__file__).parents[2]
WITHIN_S = 100.0


def in_fork(function):
    """What a function returns in a fork of this process, which ends with it."""
    here, there = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001
            result = f"{type(error).__name__}: {error}"
        finally:
            os.write(there, json.dumps(result).encode())
            os._exit(0)
    os.close(there)
    try:
        assert select.select([here], [], [], WITHIN_S)[0], "the fork hangs"
        return json.loads(os.read(here, 1 << 16))
    finally:
        os.close(here)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def said(call):
    """The type of what a call raises."""
    try:
        call()
    except BaseException as error:  # noqa: BLE001
        return type(error).__name__ if isinstance(error, ForkedProcess) else repr(error)
    return None


# --- of the user's program ------------------------------------------------------------------------


def served(factories, _, **options):
    return MultiSyncCollector(
        factories,
        faults.FaultyPolicy("", None, at=1 << 60),
        inference="server",
        **options,
    )


KINDS = {
    "sync": MultiSyncCollector,
    "first-ready": MultiAsyncCollector,
    "threads": partial(MultiSyncCollector, backend="threads"),
    "spawned": partial(MultiSyncCollector, start_method="spawn"),
    "served": served,
    "nodes": async_nodes,
}
USES = {
    "next": lambda c: c.next(),
    "iter": iter,
    "rollout": lambda c: c.rollout(),
    "collect": lambda c: c.collect(n_step=4),
    "reset": lambda c: c.reset(),
    "set_seed": lambda c: c.set_seed(1),
    "state_dict": lambda c: c.state_dict(),
    "load_state_dict": lambda c: c.load_state_dict({}),
    "update_policy_weights_": lambda c: c.update_policy_weights_(),
    "receive_weights": lambda c: c.receive_weights(),
    "increment_version": lambda c: c.increment_version(),
    "getattr_env": lambda c: c.getattr_env("number"),
    "cascade_execute": lambda c: c.cascade_execute("env.close"),
    "fake_tensordict": lambda c: c.fake_tensordict(),
    "enable_profile": lambda c: c.enable_profile(),
    "start": lambda c: c.start(),
    "pause": lambda c: c.pause(),
    "with": lambda c: c.__enter__(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_fork_has_no_workers_and_leaves_those_of_its_parent_alone(tmp_path, kind):
    path = tmp_path / "counts"
    factories = [partial(OracleEnv, path, number) for number in range(2)]
    collector = KINDS[kind](factories, None, frames_per_batch=2 * T, seed=1)
    batches = iter(collector)
    mine = {
        "collector": collector,
        "batches": batches,
        "held": [next(batches) for _ in range(4)],
    }
    copies = [batch.clone() for batch in mine["held"]]
    pids = [worker.pid for worker in collector.stats().workers]
    del batches, collector

    def use():
        collector = mine["collector"]
        found = {name: said(partial(call, collector)) for name, call in USES.items()}
        found["an iterator from before"] = said(partial(next, mine["batches"]))
        assert collector.stats().frames == sum(copy.numel() for copy in copies)
        collector.shutdown()
        collector.shutdown()
        collector.async_shutdown()
        del collector
        mine.clear()  # its finalizers run, and those of the memory of its batches
        gc.collect()
        return found

    assert in_fork(use) == dict.fromkeys(
        [*USES, "an iterator from before"], "ForkedProcess"
    )
    assert "workers of it belong to that process" in in_fork(
        lambda: mine["collector"].next()
    )
    with mine["collector"] as collector:
        for held, copy in zip(mine["held"], copies, strict=True):
            assert (held == copy).all()
        copies += [next(mine["batches"]).clone() for _ in range(4)]
        stats = collector.stats()
        assert [worker.pid for worker in stats.workers] == pids
        assert stats.restarts == 0
    stats = collector.stats()
    assert stats.frames == sum(check_stream(copies).values())
    # On a busy machine the end comes in the middle of a rollout: the step that was being made is
    # "interrupted".
    assert set(stats.discarded) <= {"shutdown", "interrupted"}
    assert_balanced(stats, in_flight=0)
    assert stats.executed == OracleEnv.read(path)[:, 2].sum()


@pytest.mark.slow
def test_a_fork_that_goes_on_to_the_end_of_the_program_disturbs_nobody():
    script = """if True:
        import os, muster
        collector = muster.MultiAsyncCollector(["CartPole-v1"] * 2, None, frames_per_batch=64, seed=0)
        with collector as c:
            batches = iter(c)
            next(batches)
            pid = os.fork()
            if pid:
                assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
                for _ in range(50):
                    next(batches)
                print(c.stats().restarts, c.stats().executed >= 51 * 64)
            else:
                print("left")
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert (done.stdout.splitlines(), without_delays(done.stderr), done.returncode) == (
        ["left", "0 True"],
        "",
        0,
    )


def test_a_collector_without_workers_is_copied():
    collector = Collector(
        partial(CountingEnv, 5), None, num_envs=2, frames_per_batch=16, seed=1
    )
    collector.next()

    def rest():
        actions = collector.next()["action"].tolist()
        collector.shutdown()
        return actions

    theirs = in_fork(rest)
    assert theirs == collector.next()["action"].tolist()
    collector.shutdown()


def test_a_background_thread_stays_with_its_process():
    taken = forks.Buffer()
    collector = Collector(
        partial(CountingEnv, 5), None, frames_per_batch=16, replay_buffer=taken
    )
    collector.start()

    def use():
        found = [
            said(collector.next),
            said(collector.start),
            said(collector.pause),
            collector.is_running(),
        ]
        collector.async_shutdown()
        return found

    assert in_fork(use) == [*["ForkedProcess"] * 3, False]
    before = taken.count
    taken.wait_for(before + 2)
    collector.async_shutdown()


def test_an_evaluator_in_a_fork_says_so():
    with Evaluator(
        partial(CountingEnv, 5), None, num_workers=1, episodes=2
    ) as evaluator:
        evaluator.trigger()

        def use():
            found = [
                said(call)
                for call in (
                    evaluator.poll,
                    evaluator.wait,
                    evaluator.evaluate,
                    evaluator.trigger,
                )
            ]
            evaluator.shutdown()
            return found

        assert in_fork(use) == ["ForkedProcess"] * 4
        assert len(evaluator.wait(WITHIN_S).records) == 2


def test_one_process_writes_a_recording(tmp_path):
    collector = Collector(partial(CountingEnv, 5), None, frames_per_batch=8, seed=1)
    batches = [collector.next() for _ in range(2)]
    recorder = Recorder(tmp_path / "recording", meta={})
    recorder.write(batches[0])

    def use():
        found = [said(lambda: recorder.write(batches[1])), said(recorder.flush)]
        with recorder:
            pass
        recorder.close()
        return found

    assert in_fork(use) == ["ForkedProcess"] * 2
    recorder.write(batches[1])
    recorder.close()
    assert len(muster.load(tmp_path / "recording")) == 16
    collector.shutdown()


# --- by environments in workers -------------------------------------------------------------------


class Forking(gymnasium.Env):
    """Forks at the beginning of some of its calls; who goes on from there counts the calls in a
    file.
    """

    observation_space, action_space = (
        spaces.Box(-1, 1, (1,), np.float32),
        spaces.Discrete(2),
    )

    def __init__(self, path, on, do):
        self.path, self.on, self.do, self.calls = path, on, do, 0
        self.fork("construct")

    def fork(self, on):
        self.calls += 1
        if on == self.on and (self.calls % 5 == 1 or on == "construct"):
            self.do(self.path)

    def reset(self, **_):
        self.fork("reset")
        return np.zeros(1, np.float32), {}

    def step(self, _):
        self.fork("step")
        return np.ones(1, np.float32), 1.0, self.calls % 7 == 0, False, {}


@pytest.mark.parametrize("on", ["construct", "reset", "step"])
@pytest.mark.parametrize("do", forks.WAYS, ids=lambda do: do.__name__)
def test_a_fork_that_an_environment_makes_is_never_the_worker(tmp_path, do, on):
    """It ends as soon as it is back in Muster's code; those that do not come back do what they were
    made for.
    """
    found = []
    for times in range(2):
        make = partial(
            Forking, tmp_path / f"{times}", on, do if times else forks.nothing
        )
        with MultiAsyncCollector(
            make, None, num_envs=3, frames_per_batch=63, total_frames=252, seed=1
        ) as collector:
            found.append([batch.clone() for batch in collector])
        stats = collector.stats()
        assert (stats.frames, stats.restarts) == (252, 0)
        assert_balanced(stats, in_flight=0)
    for with_forks, without in zip(*found, strict=True):
        assert (with_forks == without).all()
    forks.check(tmp_path / "1", do)


def test_a_policy_that_forks_in_a_worker_is_asked_by_the_worker_alone(tmp_path):
    policy = forks.ForkingPolicy(str(tmp_path / "forks"))
    path = tmp_path / "counts"
    with MultiSyncCollector(
        partial(OracleEnv, path), policy, frames_per_batch=T, total_frames=4 * T
    ) as collector:
        rows = check_stream(batch.clone() for batch in collector)
    assert (
        rows[0, 0] == collector.stats().executed == OracleEnv.read(path)[0, 2] == 4 * T
    )
    forks.check(tmp_path / "forks", forks.returns)
