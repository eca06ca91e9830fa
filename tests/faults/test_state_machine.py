"""One collector, used in any order: whatever a user does, whatever happens to its workers, data and
counts are right.

``MUSTER_EXAMPLES=2000`` runs so many sequences, other ones each time.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

import muster
from muster import (
    AsyncCollector,
    Collector,
    MultiAsyncCollector,
    MultiSyncCollector,
    Restart,
)
from muster.errors import EnvError, WorkerDied
from muster.testing.oracle import EXECUTED, follow
from tests.fakes.adding import Adds
from tests.fakes.obedient import EXIT, INTERRUPT, RAISE, ObedientEnv, orders
from tests.tools import assert_accounted
from tests.waits import wait_until

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="kills processes")]

WORKERS, ENVS, T = 2, 2, 8  # environments per worker, rows per batch

KINDS: dict[str, Callable[..., Any]] = {
    "in process": Collector,
    "sync": MultiSyncCollector,
    "async": MultiAsyncCollector,
    "threads": partial(MultiSyncCollector, backend="threads"),
    "server": partial(MultiSyncCollector, inference="server"),
    "async server": partial(MultiAsyncCollector, inference="server"),
    "one worker": AsyncCollector,
}


class AnyOrder(RuleBasedStateMachine):
    @initialize(
        kind=st.sampled_from([*KINDS]), on_failure=st.sampled_from(["raise", "restart"])
    )
    def made(self, kind: str, on_failure: str) -> None:
        self.folder = tempfile.TemporaryDirectory()
        path = Path(self.folder.name)
        (path / "orders").write_bytes(bytes(8 * WORKERS * ENVS))
        self.orders = orders(path / "orders")
        factories = [
            partial(ObedientEnv, path, ENVS * worker, ENVS) for worker in range(WORKERS)
        ]
        given: dict[str, Any] = {
            "num_envs": ENVS,
            "frames_per_batch": T * ENVS,
            "seed": 1,
        }
        if kind in ("in process", "one worker"):
            factories, self.envs = factories[:1], ENVS
        else:
            self.envs = WORKERS * ENVS
        if "async" not in kind:
            given["frames_per_batch"] = T * self.envs
        if kind != "in process":
            given["on_failure"] = (
                "raise" if on_failure == "raise" else Restart(max_restarts=None)
            )
        self.is_raised = kind == "in process" or on_failure == "raise"
        self.in_processes = kind not in ("in process", "threads")
        self.here = kind == "in process"
        self.make = lambda policy: KINDS[kind](factories, policy, **given)
        self.policy = Adds()
        self.collector = self.make(self.policy)
        self.kind, self.path = kind, path
        self.troubles = self.kills = self.errors = self.frames = 0
        self.is_exact = True  # the environments' own counts include nothing that a restored state has repeated
        self.random = False  # some actions were random
        self.seen: set[tuple[int, ...]] = set()  # environment, run and step of each row
        self.ids: dict[int, tuple[int, ...]] = {}  # episodes by id

    # --- what is done ----------------------------------------------------------------------------

    @rule()
    def next_batch(self) -> None:
        self.attempt(lambda: self.check(self.collector.next()))

    @rule(count=st.integers(1, 3))
    def some_batches(self, count: int) -> None:
        def iterate() -> None:
            for number, batch in enumerate(self.collector, 1):
                self.check(batch)
                if number == count:
                    break

        self.attempt(iterate)

    @rule(steps=st.integers(1, 30), random=st.booleans())
    def n_step(self, steps: int, random: bool) -> None:
        self.random |= random
        self.attempt(
            lambda: self.check(
                self.collector.collect_batch(n_step=steps, random=random).batch
            )
        )

    @rule(episodes=st.integers(1, 5))
    def n_episode(self, episodes: int) -> None:
        self.attempt(
            lambda: self.check(self.collector.collect_batch(n_episode=episodes).batch)
        )

    @rule()
    def rollout(self) -> None:
        self.attempt(lambda: self.check(self.collector.rollout()))

    @rule(added=st.integers(0, 4))
    def publish(self, added: int) -> None:
        with torch.no_grad():
            self.policy.added.fill_(added)
        self.attempt(self.collector.update_policy_weights_)

    @rule(index=st.sampled_from([None, [0], [1]]))
    def reset(self, index: Any) -> None:
        self.attempt(lambda: self.collector.reset(index))

    @rule(seed=st.integers(0, 3))
    def seed(self, seed: int) -> None:
        self.attempt(lambda: self.collector.set_seed(seed))

    @rule()
    def save_and_load(self) -> None:
        def load() -> None:
            seen, self.seen = (
                self.seen,
                set(),
            )  # an environment that fails while its actions are repeated counts anew
            if self.collector.load_state_dict(
                self.collector.state_dict(), trust=True
            ).exact:
                self.seen = seen

        self.attempt(load)
        self.is_exact = False

    @rule(ahead=st.integers(1, 3))
    def go_on_elsewhere(self, ahead: int) -> None:
        """Save, load into a new collector, and use that from now on: it delivers what this one
        would have.
        """
        states: list[Any] = []
        self.attempt(lambda: states.append(self.collector.state_dict()))
        if not states:
            return
        muster.save_state(self.path / "state", states[0])
        policy = Adds()
        other = self.make(policy)
        report = other.load_state_dict(self.path / "state", trust=True)
        assert_accounted(other)
        old, self.collector, self.policy = self.collector, other, policy
        self.is_exact = False
        try:
            if report.exact:
                self.orders[:] = (
                    0  # or one of the two collectors would have the trouble
                )
                followed: list[Any] = []
                self.attempt(
                    lambda: followed.extend(old.next().clone() for _ in range(ahead))
                )
                following = [
                    other.next() for _ in followed
                ]  # all, but for a worker that was killed and died only now
                self.compare(followed, following)
                for batch in following:
                    self.check(batch)
        finally:
            self.attempt(old.shutdown)
            old.shutdown()

    @rule()
    def pause(self) -> None:
        with self.collector.pause():
            assert_accounted(self.collector)

    # --- what happens to it ----------------------------------------------------------------------

    @rule(
        env=st.integers(0, WORKERS * ENVS - 1),
        order=st.sampled_from([RAISE, EXIT, INTERRUPT]),
    )
    def fail_in_the_next_step(self, env: int, order: int) -> None:
        possible = {RAISE: True, EXIT: self.in_processes, INTERRUPT: self.here}[order]
        if env < self.envs and possible:
            self.orders[env] = order
            self.troubles += 1

    @precondition(lambda self: self.in_processes)
    @rule(
        worker=st.integers(0, WORKERS - 1),
        number=st.sampled_from([signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV]),
    )
    def kill(self, worker: int, number: int) -> None:
        workers = self.collector.stats().workers
        told = workers[worker % len(workers)]
        if told.state == "working" and told.pid:
            self.kills += 1
            self.troubles += 1
            with suppress(
                ProcessLookupError
            ):  # it has ended, and the collector has not noticed yet
                os.kill(told.pid, number)

    # --- what holds -----------------------------------------------------------------------------

    def attempt(self, action: Callable[[], object]) -> None:
        """Do it. It may fail only because of an earlier trouble, and once for each."""
        try:
            action()
            return
        except (EnvError, WorkerDied, KeyboardInterrupt) as raised:
            error = raised
        self.errors += 1
        assert self.errors <= self.troubles, (
            f"nothing has happened that explains this: {error!r}"
        )
        assert self.is_raised or isinstance(error, KeyboardInterrupt), error

    def compare(self, followed: list[Any], following: list[Any]) -> None:
        """Their batches are equal; where groups do not wait for each other, the rows of each group."""
        if "async" not in self.kind:
            for expected, found in zip(followed, following, strict=True):
                assert set(found.keys(True, True)) == set(expected.keys(True, True))
                assert (found == expected).all()
            return
        by_env: list[dict[int, list[Any]]] = [{}, {}]
        for of_one, batches in zip(by_env, (followed, following), strict=True):
            for batch in batches:
                rows = batch.reshape(-1)
                columns = zip(
                    rows["observation"].tolist(), rows["action"].tolist(), strict=True
                )
                ids = rows["collector", "traj_ids"].flatten().tolist()
                for number, (obs, action) in zip(ids, columns, strict=True):
                    of_one.setdefault(obs[0], []).append((number, obs, action))
        for env in by_env[0].keys() & by_env[1].keys():
            both = min(len(of_one[env]) for of_one in by_env)
            assert by_env[0][env][:both] == by_env[1][env][:both]

    def check(self, batch: Any) -> None:
        """Every row follows from itself, and comes once; not in order, since kept episodes come
        with a later call.
        """
        valid = batch.get(("collector", "valid"), None)
        rows = batch.reshape(-1) if valid is None else batch[valid]
        self.frames += len(rows)
        obs, action, after = (
            rows["observation"].numpy(),
            rows["action"].numpy(),
            rows["next", "observation"].numpy(),
        )
        expected, reward, terminated, truncated = follow(
            np.moveaxis(obs, -1, 0), action
        )
        assert (after == np.stack(expected, -1)).all()
        assert (rows["next", "reward"].flatten().numpy() == reward).all()
        assert (rows["next", "terminated"].flatten().numpy() == terminated).all()
        assert (rows["next", "truncated"].flatten().numpy() >= truncated).all()
        ids = rows["collector", "traj_ids"].flatten().tolist()
        for (env, run, episode, _, total, _), number in zip(
            obs.tolist(), ids, strict=True
        ):
            assert (env, run, total) not in self.seen, (
                f"environment {env}, run {run}: step {total} comes again"
            )
            self.seen.add((env, run, total))
            known = self.ids.setdefault(number, (env, run, episode))
            assert known == (env, run, episode), (
                f"id {number} is of {known} and {(env, run, episode)}"
            )

    @invariant()
    def every_step_is_accounted_for(self) -> None:
        if hasattr(self, "collector"):
            assert_accounted(self.collector)
            assert self.collector.stats().frames == self.frames

    def teardown(self) -> None:
        if not hasattr(self, "collector"):
            return
        pids = [
            worker.pid
            for worker in self.collector.stats().workers
            if self.in_processes and worker.pid
        ]
        self.attempt(self.collector.shutdown)
        self.collector.shutdown()
        stats, made = (
            self.collector.stats(),
            int(ObedientEnv.read(self.path / "counts")[:, EXECUTED].sum()),
        )
        assert stats.in_flight == 0
        assert_accounted(self.collector)
        # who is killed after a step and before its reward is stored has made one that nobody knows
        if self.is_exact:
            assert 0 <= made - stats.executed <= self.kills
        for pid in pids:
            wait_until(lambda pid=pid: not Path(f"/proc/{pid}").exists())
        self.folder.cleanup()


given = int(os.environ.get("MUSTER_EXAMPLES", "0"))
AnyOrder.TestCase.settings = settings(
    max_examples=given or 50,
    stateful_step_count=12,
    deadline=None,
    derandomize=not given,
    suppress_health_check=[*HealthCheck],
)
test_any_order_of_calls_and_troubles = pytest.mark.slow(
    pytest.mark.timeout(5 * (given or 50))(AnyOrder.TestCase)
)
