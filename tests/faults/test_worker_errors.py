"""Environments and policies of workers that raise, or return nonsense: errors as in process, and
nothing lost.
"""

from __future__ import annotations

import sys
import threading
from functools import partial

import pytest
import torch

from muster import AsyncCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from muster.errors import (
    BadEnvOutput,
    BadOption,
    EnvError,
    PolicyError,
    RemoteError,
    WorkerError,
)
from muster.testing import CountingEnv, Fault, OracleEnv, check_stream
from tests.fakes import faults
from tests.fakes.fault_runs import FRAMES, KINDS, MODES, T, run
from tests.fakes.node_runs import NODE_KINDS, sync_nodes
from tests.tools import assert_accounted

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="no worker processes"),
]

AT = 30  # row 10 of the second rollout
BACKENDS = ["processes", "threads"]
ERRORS = {  # what is raised: its cause in the parent, and the text
    "plain": (partial(ValueError, "boom"), ValueError, "ValueError: boom"),
    "two arguments": (
        partial(faults.TwoArguments, 3, "why"),
        (faults.TwoArguments, RemoteError),
        r"TwoArguments: why \(3\)",
    ),
    "unpicklable": (
        faults.Unpicklable,
        (faults.Unpicklable, RemoteError),
        "Unpicklable: holds a function",
    ),
    "sys.exit(3)": (partial(SystemExit, 3), SystemExit, "SystemExit was raised: 3"),
    "Ctrl-C": (KeyboardInterrupt, KeyboardInterrupt, "KeyboardInterrupt was raised"),
    "BaseException": (faults.OwnBase, faults.OwnBase, "OwnBase was raised"),
}
OUTPUTS = {  # executed steps that are discarded, and the message
    "NaN": (faults.nan_reward, T - AT % T, "reward is nan"),
    "shape": (
        faults.wrong_shape,
        1,
        r"observation is an array of shape \(3,\).*shape \(6,\)",
    ),
    "None": (faults.nothing, 1, "returned NoneType"),
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    return {kind: run(folder, None, kind, backend="threads") for kind in KINDS}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ERRORS)
def test_an_error_in_a_step_is_raised_with_all_that_is_known_and_costs_nothing(
    tmp_path, undisturbed, name, backend
):
    error, cause, text = ERRORS[name]
    for kind in KINDS:
        got = run(tmp_path, Fault(faults.Raising(error), at=AT), kind, backend=backend)
        rows = got.check(undisturbed=undisturbed[kind])
        assert (got.stats.discarded, got.stats.restarts) == ({}, 0)
        assert (0, 1) not in rows, "the same worker goes on"
        said = got.error
        assert type(said) is EnvError
        assert isinstance(said.__cause__, cause)
        assert_names(said, text, "step", row=AT - T)
        assert faults.line_of(faults.Raising(None)).replace(":", '", line ') in str(
            said
        ), "the user's own line"
        assert (said.worker, said.env_id, said.env_index, said.phase) == (
            0,
            0,
            0,
            "step",
        )


@pytest.mark.parametrize("on_failure", ["restart", "drop"])
@pytest.mark.parametrize("name", ERRORS)
def test_an_error_in_a_step_ends_the_worker_where_errors_are_not_to_be_raised(
    tmp_path, undisturbed, name, on_failure
):
    for kind in KINDS:
        fault = Fault(faults.Raising(ERRORS[name][0]), at=AT)
        got = run(tmp_path, fault, kind, backend="threads", on_failure=on_failure)
        rows = got.check(undisturbed=undisturbed[kind])
        assert got.errors == []
        assert got.stats.discarded == {"env_error": AT - T}
        assert rows[0, 0] == T
        assert got.counts[0, 0] == (2 if on_failure == "restart" else 1)


@pytest.mark.parametrize("on_failure", MODES)
@pytest.mark.parametrize("kind", NODE_KINDS)
def test_an_error_in_a_step_on_a_node_in_all_modes(tmp_path, kind, on_failure):
    for name in (
        ("plain", "unpicklable", "sys.exit(3)") if on_failure == "raise" else ("plain",)
    ):
        error, cause, text = ERRORS[name]
        got = run(
            tmp_path, Fault(faults.Raising(error), at=AT), kind, on_failure=on_failure
        )
        rows = got.check()
        assert got.stats.discarded == (
            {} if on_failure == "raise" else {"env_error": AT - T}
        )
        assert got.counts[0, 0] == (2 if on_failure == "restart" else 1)
        assert ((0, 1) in rows) == (on_failure == "restart")
        assert len(got.errors) == (on_failure == "raise")
        for said in got.errors:
            assert isinstance(said.__cause__, cause)
            assert_names(said, text, "step", row=AT - T)


@pytest.mark.parametrize("name", OUTPUTS)
def test_bad_output_on_a_node_is_refused(tmp_path, name):
    do, discarded, text = OUTPUTS[name]
    got = run(tmp_path, Fault(do, at=AT), sync_nodes)
    got.check(gaps=discarded)
    assert got.stats.discarded == {"bad_env_output": discarded}
    assert type(got.error) is BadEnvOutput
    assert_names(got.error, text, "step", row=AT - T)


@pytest.mark.parametrize("on", ["reset", "construct", "close", "policy"])
def test_an_error_on_a_node_elsewhere_than_in_a_step(tmp_path, on):
    error, cause, text = ERRORS["two arguments"]
    if on == "construct":
        with pytest.raises(EnvError, match=text) as caught:
            run(tmp_path, Fault(faults.Raising(error), on), sync_nodes)
        assert isinstance(caught.value.__cause__, cause)
        return
    policy = (
        faults.FaultyPolicy(str(tmp_path / "mark"), faults.Raising(error), 3)
        if on == "policy"
        else None
    )
    fault = (
        None
        if policy
        else Fault(faults.Raising(error), on, at=3 if on == "reset" else 0)
    )
    got = run(tmp_path, fault, sync_nodes, policy=policy)
    got.check()
    assert got.stats.discarded == {}
    assert isinstance(got.error.__cause__, cause)
    assert (type(got.error), got.error.phase) == (
        PolicyError if policy else EnvError,
        on,
    )


@pytest.mark.parametrize("on_failure", MODES)
def test_an_error_in_a_step_of_a_process_in_all_modes(
    tmp_path, undisturbed, on_failure
):
    got = run(
        tmp_path,
        Fault(faults.Raising(faults.Unpicklable), at=AT),
        on_failure=on_failure,
    )
    got.check(undisturbed=undisturbed[MultiSyncCollector])
    assert got.stats.discarded == (
        {} if on_failure == "raise" else {"env_error": AT - T}
    )


@pytest.mark.parametrize("on_failure", MODES)
@pytest.mark.parametrize("name", OUTPUTS)
def test_bad_output_is_refused(tmp_path, undisturbed, name, on_failure):
    do, discarded, text = OUTPUTS[name]
    for kind in KINDS:
        for backend in BACKENDS if on_failure == "raise" else ["threads"]:
            got = run(
                tmp_path, Fault(do, at=AT), kind, backend=backend, on_failure=on_failure
            )
            lost = {"bad_env_output": discarded} | (
                {} if on_failure == "raise" else {"env_error": AT - T}
            )
            assert got.stats.discarded == lost
            got.check(
                gaps=discarded if on_failure == "raise" else 0,
                undisturbed=undisturbed[kind],
            )
            assert len(got.errors) == (on_failure == "raise")
            for said in got.errors:
                assert type(said) is BadEnvOutput
                assert_names(said, text, "step", row=AT - T)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ERRORS)
def test_an_error_in_a_reset_says_so(tmp_path, undisturbed, name, backend):
    error, cause, text = ERRORS[name]
    got = run(tmp_path, Fault(faults.Raising(error), "reset", at=3), backend=backend)
    got.check(undisturbed=undisturbed[MultiSyncCollector])
    assert got.stats.discarded == {}
    assert type(got.error) is EnvError
    assert isinstance(got.error.__cause__, cause)
    assert_names(got.error, text, "reset")


@pytest.mark.parametrize("on_failure", MODES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_error_in_a_constructor_ends_the_construction(tmp_path, backend, on_failure):
    for name, (error, cause, text) in ERRORS.items():
        with pytest.raises(EnvError, match=text) as caught:
            run(
                tmp_path,
                Fault(faults.Raising(error), "construct"),
                backend=backend,
                on_failure=on_failure,
            )
        assert isinstance(caught.value.__cause__, cause), name
        assert (caught.value.worker, caught.value.phase) == (0, "construct")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ERRORS)
def test_an_error_in_close_is_raised_once_and_everything_is_closed(
    tmp_path, undisturbed, name, backend
):
    error, cause, _ = ERRORS[name]
    got = run(tmp_path, Fault(faults.Raising(error), "close"), backend=backend)
    got.check(undisturbed=undisturbed[MultiSyncCollector])
    assert isinstance(got.error, EnvError)
    assert isinstance(got.error.__cause__, cause)
    assert got.error.phase == "close"
    assert got.counts[:, 3].tolist() == [0, 1]


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["plain", "two arguments", "unpicklable"])
def test_an_error_in_the_policy_says_so(tmp_path, name, backend, at):
    error, cause, _ = ERRORS[name]
    for kind in KINDS:
        policy = faults.FaultyPolicy(
            str(tmp_path / f"mark {kind.__name__}"), faults.Raising(error), at
        )
        got = run(tmp_path, None, kind, policy=policy, backend=backend)
        got.check()
        assert got.stats.discarded == {}
        assert type(got.error) is PolicyError
        assert isinstance(got.error.__cause__, cause)
        assert got.error.phase == "policy"
        assert "FaultyPolicy" in str(got.error)


@pytest.mark.parametrize("on_failure", ["restart", "drop"])
def test_an_error_in_the_policy_is_raised_in_every_mode(tmp_path, on_failure):
    """It would be the same in a new worker."""
    for kind in KINDS:
        policy = faults.FaultyPolicy(
            str(tmp_path / kind.__name__),
            faults.Raising(partial(ValueError, "boom")),
            3,
        )
        got = run(
            tmp_path,
            None,
            kind,
            policy=policy,
            on_failure=on_failure,
            backend="threads",
        )
        got.check()
        assert type(got.error) is PolicyError
        assert (got.stats.restarts, got.stats.discarded) == (0, {})


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_error_while_weights_are_taken_says_so(tmp_path, backend):
    from muster.weights import SharedMemory

    for kind in KINDS:
        policy = faults.FaultyPolicy(str(tmp_path / "never"), None, at=1 << 60)
        do = faults.Raising(partial(ValueError, "no weights today"))
        scheme = faults.FaultyScheme(
            SharedMemory(), str(tmp_path / kind.__name__), do, at=4
        )
        got = run(
            tmp_path,
            None,
            kind,
            policy=policy,
            weight_sync_schemes={"policy": scheme},
            backend=backend,
        )
        got.check()
        assert isinstance(got.error, WorkerError)
        assert isinstance(got.error.__cause__, ValueError)
        assert got.error.phase == "weights"


def test_errors_are_those_of_a_collector_in_process(tmp_path):
    """The same class, and the same first words."""
    fault = Fault(faults.Raising(partial(ValueError, "boom")), at=AT)
    with Collector(
        partial(OracleEnv, tmp_path / "one", 0, 1, fault), None, frames_per_batch=T
    ) as collector:
        collector.rollout()
        with pytest.raises(EnvError) as alone:
            collector.rollout()
    got = run(tmp_path, fault, backend="threads")
    assert str(got.error).startswith(str(alone.value))


def test_everything_that_is_no_environment_is_refused_before_a_worker_starts(tmp_path):
    with pytest.raises(
        BadOption,
        match=r"create_env_fn\[0\] is an environment, which lives in this process",
    ):
        MultiSyncCollector([OracleEnv(tmp_path / "counts")], None, frames_per_batch=T)


def test_frames_stay_exact_over_errors_in_every_rollout(tmp_path):
    path = tmp_path / "counts"

    class Often(OracleEnv):
        def step(self, action):
            self.tries = getattr(self, "tries", 0) + 1
            if self.tries % 7 == 0:
                raise ValueError("again")
            return super().step(action)

    for kind in KINDS:
        with kind(
            [partial(Often, path, n) for n in range(2)],
            None,
            frames_per_batch=2 * T,
            total_frames=FRAMES,
        ) as c:
            frames = errors = 0
            while frames < FRAMES:
                try:
                    frames += sum(batch.numel() for batch in c)
                except EnvError:
                    errors += 1
                    frames = c.stats().frames
            stats = c.stats()
        assert errors > 10
        assert (stats.frames, stats.discarded) == (FRAMES, {})


def test_actions_and_ids_of_other_groups_are_those_of_an_undisturbed_run(
    tmp_path, undisturbed
):
    """Three faults in a row in worker 0."""
    fault = Fault(faults.Raising(partial(ValueError, "boom")), at=AT, runs=3)
    for kind in KINDS:
        got = run(tmp_path, fault, kind, backend="threads", on_failure="restart")
        got.check(undisturbed=undisturbed[kind])
        assert got.stats.restarts == min(3, got.counts[0, 0] - 1)
        ids = torch.cat(
            [batch["collector", "traj_ids"].reshape(-1) for batch in got.batches]
        ).unique()
        assert set((ids % 2).tolist()) == {0, 1}


def assert_names(error, text, phase, row=None):
    import re

    assert re.search(text, str(error), re.DOTALL), str(error)
    assert re.search(
        r"In worker 0 \(pid \d+(?:, node 0 \(\S+\))?\), environment 0, step \d+ of its episode \d+, ",
        str(error),
    ), str(error)
    assert f", seed 1, phase {phase}." in str(error), str(error)
    if row is not None:
        assert f"row {row}, seed" in str(error), str(error)
    assert (error.worker, error.env_id, error.seed, error.phase) == (0, 0, 1, phase)
    assert error.crash_report is not None
    assert error.crash_report.exists()
    assert (
        f"To see it happen again under a debugger: muster replay {error.crash_report}"
        in str(error)
    ), str(error)


def by_observation(obs: torch.Tensor) -> torch.Tensor:
    return obs.sum(-1) % 5


@pytest.mark.parametrize("cls", [AsyncCollector, MultiAsyncCollector])
@pytest.mark.parametrize("inference", ["worker", "server"])
def test_after_an_error_of_a_random_rollout_the_policy_does_not_reset_again(
    tmp_path, cls, inference
):
    """The worker is asked for the policy's columns before the random rollout goes on."""
    raising = Fault(faults.Raising(partial(ValueError, "boom")), at=8)

    def make() -> OracleEnv:
        env = OracleEnv(tmp_path / "oracle", 0, 2)
        env.fault = None if env.number else raising
        return env

    collector = cls(
        make if cls is AsyncCollector else [make],
        by_observation,
        num_envs=2,
        frames_per_batch=40,
        init_random_frames=40,
        backend="threads",
        inference=inference,
        seed=0,
    )
    batches = []
    errors = 0
    while len(batches) < 4:
        try:
            batches.append(collector.next().clone())
        except EnvError:
            errors += 1
    assert errors == 1
    check_stream(batches)
    assert_accounted(collector)
    collector.shutdown()


def lock_of(env: object) -> object:
    """A result that cannot leave its process."""
    return threading.Lock()


def raising(env: object) -> None:
    raise KeyError("planned")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_a_function_for_environments_costs_no_worker(kind, mode):
    """Its errors, and results that cannot be sent, are the caller's: no worker is lost by them."""
    with kind(
        [partial(CountingEnv, 5)] * 2, None, frames_per_batch=FRAMES, on_failure=mode
    ) as c:
        c.next()
        pids = [worker.pid for worker in c.stats().workers]
        with pytest.raises(
            BadOption, match="a result.* cannot be pickled.* Return arrays"
        ):
            c.map_envs(lock_of)
        with pytest.raises(WorkerError, match="planned") as raised:
            c.map_envs(raising)
        assert isinstance(raised.value.__cause__, KeyError)
        with pytest.raises(BadOption, match="which cannot be pickled"):
            c.map_envs(id, threading.Lock())
        assert len(c.map_envs(id)) == 2
        c.next()
        assert [worker.pid for worker in c.stats().workers] == pids
        assert_accounted(c)
