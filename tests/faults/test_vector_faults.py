"""Faults in the workers of vector environments: named errors, or truncations of the episodes that
were lost.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from muster.compat.gymnasium import VectorEnv
from muster.errors import (
    BadOption,
    EnvError,
    MusterError,
    WorkerDied,
    WorkerHung,
    WorkerNotStarted,
)
from muster.testing import CountingEnv
from tests.fakes import faults
from tests.fakes.fault_runs import all_gone
from tests.fakes.vector_faults import AT, AlwaysDies, AlwaysFails, FailsOnce, Locked
from tests.waits import descriptors_left

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kills processes")

KILL = faults.Signalled(signal.SIGKILL)


def made(
    tmp_path: Any,
    do: Any,
    *,
    bad: int = 2,
    num_envs: int = 4,
    on_reset: bool = False,
    **options: Any,
) -> VectorEnv:
    """Environments over two workers, of which ``bad`` fails once."""
    env_fns = [partial(CountingEnv, 9, noise=True) for _ in range(num_envs)]
    env_fns[bad] = partial(FailsOnce, do, str(tmp_path / "mark"), on_reset=on_reset)
    return VectorEnv(env_fns, num_workers=2, **options)


def steps(envs: VectorEnv, number: int) -> list[Any]:
    return [envs.step(np.zeros(envs.num_envs, int)) for _ in range(number)]


# --- raise ----------------------------------------------------------------------------------------


def assert_goes_on(envs: VectorEnv) -> None:
    """After an error, only ``reset`` and ``close`` are possible; then all is as after any reset."""
    with pytest.raises(MusterError, match="call reset"):
        envs.step(np.zeros(envs.num_envs, int))
    envs.reset(seed=0)
    assert steps(envs, 5)[-1][0][:, 1].tolist() == [5] * 4
    envs.close()


@pytest.mark.parametrize("on_reset", [False, True])
def test_a_killed_worker_raises(tmp_path: Any, on_reset: bool) -> None:
    envs = made(tmp_path, KILL, on_reset=on_reset)
    envs.reset(seed=0)
    with pytest.raises(WorkerDied, match="killed by SIGKILL") as caught:
        envs.reset(seed=1) if on_reset else steps(envs, AT)
    error = caught.value
    assert (error.worker, error.env_id, error.phase, error.exitcode) == (
        1,
        2,
        "reset" if on_reset else "step",
        -9,
    )
    assert (
        error.pid
        if hasattr(error, "pid")
        else f"(pid {envs._workers._slices.handles[1].process.child.pid})" in str(error)
    )
    assert "The environment is number 2. Call reset()" in str(error)
    assert_goes_on(envs)


def test_a_worker_that_is_killed_between_steps_raises(tmp_path: Any) -> None:
    envs = made(tmp_path, faults.nothing)
    envs.reset(seed=0)
    os.kill(envs._workers._slices.handles[0].process.child.pid, signal.SIGKILL)
    with pytest.raises(
        WorkerDied, match="Worker 0 .* was killed by SIGKILL during idle"
    ):
        steps(envs, 1)
    assert_goes_on(envs)


def test_a_hanging_environment_raises_with_its_stack(tmp_path: Any) -> None:
    envs = made(tmp_path, faults.waits, timeouts={"step": 2.0})
    envs.reset(seed=0)
    with pytest.raises(
        WorkerHung,
        match=r"in step for .* at .*faults.py:\d+ in waits; its deadline is 2 s",
    ) as caught:
        steps(envs, AT)
    assert (caught.value.worker, caught.value.env_id) == (1, 2)
    assert_goes_on(envs)


@pytest.mark.parametrize(
    "error",
    [
        ValueError,
        faults.Unpicklable,
        partial(faults.TwoArguments, 1, "two"),
        faults.OwnBase,
    ],
)
@pytest.mark.parametrize("on_reset", [False, True])
def test_an_environment_that_raises(tmp_path: Any, error: Any, on_reset: bool) -> None:
    envs = made(tmp_path, faults.Raising(error), on_reset=on_reset)
    envs.reset(seed=0)
    with pytest.raises(EnvError) as caught:
        envs.reset(seed=1) if on_reset else steps(envs, AT)
    name = getattr(error, "func", error).__name__
    assert name in str(caught.value)
    assert "HERE" in str(caught.value)
    assert (caught.value.worker, caught.value.phase) == (
        1,
        "reset" if on_reset else "step",
    )
    if error is not faults.OwnBase:
        assert f"environment 2 (FailsOnce): {caught.value.phase} raised" in str(
            caught.value
        )
        assert caught.value.env_id == 2
    assert_goes_on(envs)


def test_infos_that_cannot_be_pickled_are_named() -> None:
    envs = VectorEnv([CountingEnv, Locked], num_workers=1)
    envs.reset()
    with pytest.raises(
        BadOption,
        match="the info of environment 1: item 'lock' .* Let the environment return",
    ):
        steps(envs, 1)
    envs.close()


def test_close_does_not_wait_for_a_hanging_environment(tmp_path: Any) -> None:
    envs = made(tmp_path, faults.waits, timeouts={"close": 0.5})
    envs.reset(seed=0)
    pids = [handle.process.child.pid for handle in envs._workers._slices.handles]
    steps(envs, AT - 1)
    envs.step_async(np.zeros(4, int))
    envs.close()
    assert all_gone(pids, 10)


# --- restart --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("do", [KILL, faults.waits, faults.Raising(faults.Unpicklable)])
def test_a_restart_is_a_truncation(tmp_path: Any, do: Any, mode: Any) -> None:
    envs = made(
        tmp_path, do, on_failure="restart", timeouts={"step": 2.0}, autoreset_mode=mode
    )
    whole = made(tmp_path, faults.nothing, autoreset_mode=mode)
    lost = (
        [2] if isinstance(do, faults.Raising) else [2, 3]
    )  # only the environment, or all of its worker
    kept = [i for i in range(4) if i not in lost]
    envs.reset(seed=0)
    whole.reset(seed=0)
    before, expected = steps(envs, AT - 1)[-1], steps(whole, AT - 1)[-1]
    np.testing.assert_array_equal(before[0], expected[0])
    (obs, rewards, terminated, truncated, infos), expected = (
        steps(envs, 1)[0],
        steps(whole, 1)[0],
    )
    np.testing.assert_array_equal(obs[kept], expected[0][kept])
    assert (
        np.flatnonzero(truncated).tolist()
        == np.flatnonzero(infos["_muster"]).tolist()
        == lost
    )
    assert not terminated.any()
    assert rewards.tolist() == [0 if i in lost else AT for i in range(4)]
    assert all("environment" in infos["muster"]["error"][i] for i in lost)
    if mode is AutoresetMode.SAME_STEP:
        assert [infos["final_obs"][i].tolist() for i in lost] == before[0][
            lost
        ].tolist()
        begin = obs
    else:
        np.testing.assert_array_equal(obs[lost], before[0][lost])
        if mode is AutoresetMode.DISABLED:
            begin, _ = envs.reset(options={"reset_mask": truncated})
        else:
            begin, rewards, _, truncated, infos = steps(envs, 1)[0]
            assert not truncated.any()
            assert "muster" not in infos
            assert rewards[lost].tolist() == [0] * len(lost)
    assert begin[lost, 1].tolist() == [0] * len(lost)
    assert (steps(envs, 2)[-1][0][lost, 1] == 2).all()
    envs.close()
    whole.close()


def test_a_restart_keeps_attributes_and_draws_other_numbers(tmp_path: Any) -> None:
    draws = []
    for run in range(2):
        envs = made(
            tmp_path / str(run), KILL, on_failure="restart", autoreset_mode="SameStep"
        )
        (tmp_path / str(run)).mkdir()
        first = envs.reset(seed=7)[0][2, 2]
        envs.set_attr("length", [5, 6, 7, 8])
        obs = steps(envs, AT)[-1][0]
        assert envs.get_attr("length") == (5, 6, 7, 8)
        assert obs[2, 2] != first
        draws.append(obs[2:, 2].tolist())
        envs.close()
    assert draws[0] == draws[1]


def test_a_worker_that_is_killed_between_steps_is_restarted(tmp_path: Any) -> None:
    envs = made(tmp_path, faults.nothing, on_failure="restart")
    envs.reset(seed=0)
    steps(envs, 2)
    os.kill(envs._workers._slices.handles[0].process.child.pid, signal.SIGKILL)
    assert envs.get_attr("length") == (9, 9, 9, 9)
    obs, _, _, truncated, infos = steps(envs, 1)[0]
    assert truncated.tolist() == [True, True, False, False]
    assert obs[:, 1].tolist() == [2, 2, 3, 3]
    assert "SIGKILL" in infos["muster"]["error"][0]
    os.kill(envs._workers._slices.handles[0].process.child.pid, signal.SIGKILL)
    envs.reset(seed=0)
    assert steps(envs, 1)[0][3].tolist() == [False] * 4
    envs.close()


@pytest.mark.parametrize("make", [AlwaysFails, AlwaysDies])
def test_restarts_have_a_budget(make: Any) -> None:
    envs = VectorEnv(
        [CountingEnv, make],
        num_workers=2,
        on_failure="restart",
        autoreset_mode="SameStep",
    )
    envs.reset()
    with pytest.raises((EnvError, WorkerDied), match="broken|exit code 5"):
        steps(envs, 40)
    envs.close()


@pytest.mark.parametrize("on_failure", ["raise", "restart"])
def test_workers_that_cannot_be_started_say_so_until_they_can(
    tmp_path: Any, on_failure: Any
) -> None:
    envs = made(tmp_path, faults.nothing, on_failure=on_failure)
    envs.reset(seed=0)
    steps(envs, 2)
    pids = [handle.process.child.pid for handle in envs._workers._slices.handles]
    with descriptors_left(3):
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert all_gone(pids)
        with pytest.raises(WorkerDied):
            steps(envs, 1)
        for _ in range(3):
            with pytest.raises(
                WorkerNotStarted, match=r"could not be started: .*`ulimit -n 4096`"
            ):
                envs.reset(seed=0)
            with pytest.raises(MusterError, match="call reset"):
                steps(envs, 1)
    envs.reset(seed=0)
    assert steps(envs, 5)[-1][0][:, 1].tolist() == [5] * 4
    envs.close()


# --- Ctrl-C, and the end of the program -----------------------------------------------------------


def test_ctrl_c_during_a_step(tmp_path: Any) -> None:
    envs = made(tmp_path, faults.waits, timeouts={"step": 4.0})
    envs.reset(seed=0)
    steps(envs, AT - 1)
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        steps(envs, 1)
    with pytest.raises(MusterError, match="After KeyboardInterrupt .* call reset"):
        steps(envs, 1)
    envs.reset(seed=0)  # the hanging worker is past its deadline some time
    assert steps(envs, 5)[-1][0][:, 1].tolist() == [5] * 4
    envs.close()


def test_workers_end_with_a_killed_parent() -> None:
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        envs = VectorEnv([lambda: CountingEnv(3)] * 2, num_workers=2)
        envs.reset()
        pids = [handle.process.child.pid for handle in envs._workers._slices.handles]
        os.write(writer, " ".join(map(str, pids)).encode())
        signal.pause()
    pids = [int(word) for word in os.read(reader, 100).split()]
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(reader)
    os.close(writer)
    assert all_gone(pids, 20)
