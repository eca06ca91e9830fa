"""``OracleEnv`` and ``check_stream``: honest data passes, and every way of spoiling it is found."""

from __future__ import annotations

import os
import signal
from functools import partial

import numpy as np
import pytest
import torch

from muster import Collector
from muster.testing import Fault, OracleEnv, check_stream
from muster.testing.oracle import follow

T, ENVS = 40, 2


@pytest.fixture
def path(tmp_path):
    return tmp_path / "counts"


@pytest.fixture
def batches(path):
    factories = partial(OracleEnv, path, 0, ENVS)
    with Collector(
        factories, None, num_envs=ENVS, frames_per_batch=ENVS * T, seed=0
    ) as collector:
        return [collector.rollout().clone() for _ in range(3)]


def test_honest_data_passes(batches, path):
    assert check_stream(batches) == {(0, 0): 3 * T, (1, 0): 3 * T}
    assert check_stream(iter(batches)) == {(0, 0): 3 * T, (1, 0): 3 * T}
    assert OracleEnv.read(path).tolist() == [[1, 3 * T, 3 * T, 1]] * ENVS
    ends = torch.cat([batch["next", "done"] for batch in batches], 1).sum()
    assert 2 * 3 * T / 14 < ends < 2 * 3 * T / 3


def lost_row(batches):
    batches[1] = torch.cat([batches[1][:, :10], batches[1][:, 11:]], 1)


def lost_batch(batches):
    del batches[1]


def doubled_batch(batches):
    batches.insert(1, batches[1])


def swapped_batches(batches):
    batches[0], batches[1] = batches[1], batches[0]


def swapped_environments(batches):
    batches[1]["action"][:] = batches[1]["action"].flip(0)


def shifted_reward(batches):
    batches[1]["next", "reward"][:, 1:] = batches[1]["next", "reward"][:, :-1].clone()


def reset_observation_instead_of_the_last(batches):
    rows = batches[0]["next", "done"][:, :-1, 0].nonzero()
    env, t = rows[0].tolist()
    batches[0]["next", "observation"][env, t] = batches[0]["observation"][env, t + 1]


def forgotten_end(batches):
    batches[0]["next", "terminated"][:] = False
    batches[0]["next", "done"][:] = batches[0]["next", "truncated"]


def made_up_end(batches):
    batches[0]["next", "terminated"][:] = True
    batches[0]["next", "done"][:] = True


def done_without_a_reason(batches):
    batches[0]["next", "done"][:] = True


def changed_id(batches):
    batches[2]["collector", "traj_ids"][0, -1] += 2


def ids_that_begin_anew_with_every_batch(batches):
    for number, batch in enumerate(batches):
        batch["collector", "traj_ids"] += 1000 * number


def shared_id(batches):
    batches[0]["collector", "traj_ids"][:] = 0


def forgotten_reset(batches):
    batches[0]["observation"][:, :, 2] = 0
    batches[0]["next", "observation"][:, :, 2] = 0


@pytest.mark.parametrize(
    "spoil",
    [
        *(
            lost_row,
            lost_batch,
            doubled_batch,
            swapped_batches,
            swapped_environments,
            shifted_reward,
        ),
        *(
            reset_observation_instead_of_the_last,
            forgotten_end,
            made_up_end,
            done_without_a_reason,
        ),
        *(changed_id, ids_that_begin_anew_with_every_batch, shared_id, forgotten_reset),
    ],
)
def test_spoiled_data_is_found(batches, spoil):
    spoil(batches)
    with pytest.raises(AssertionError, match="batch \\d"):
        check_stream(batches)


def test_blank_rows_are_left_out(batches):
    valid = torch.ones(ENVS, T, dtype=torch.bool)
    valid[1] = False
    batches[2]["collector", "valid"] = valid
    batches[2]["observation"][1] = 0
    assert check_stream(batches) == {(0, 0): 3 * T, (1, 0): 2 * T}


def test_a_cut_may_set_truncated_besides(path):
    factories = partial(OracleEnv, path, 0, ENVS)
    with Collector(
        factories, None, num_envs=ENVS, frames_per_batch=ENVS * T, max_frames_per_traj=4
    ) as collector:
        assert (
            sum(check_stream(collector.rollout().clone() for _ in range(2)).values())
            == 4 * T
        )


def test_steps_that_are_missing_are_counted(batches):
    done = batches[1]["next", "done"][:, :, 0]
    env, t = (done[:, : T // 2].nonzero()[0]).tolist()
    assert env == 0
    alone = [batch[:1] for batch in batches]
    after = int(done[0, t + 1 :].nonzero()[0, 0]) + t + 1  # a whole episode is missing
    alone[1] = torch.cat([alone[1][:, : t + 1], alone[1][:, after + 1 :]], 1)
    with pytest.raises(AssertionError, match=f"{after - t} steps are missing, not 0"):
        check_stream(alone)
    assert check_stream(alone, gaps=after - t) == {(0, 0): 3 * T - (after - t)}


def test_a_new_run_begins_at_its_beginning(path):
    def collected():
        with Collector(partial(OracleEnv, path), None, frames_per_batch=T) as collector:
            return [collector.rollout().clone() for _ in range(2)]

    first, second = collected(), collected()
    for batch in second:
        batch["collector", "traj_ids"] += 1000
    assert check_stream([*first, *second]) == {(0, 0): 2 * T, (0, 1): 2 * T}
    for wrong, message in (
        ([*second, *first], "run 0 of environment 0 after run 1"),
        ([*first, second[1]], "begins with"),
    ):
        with pytest.raises(AssertionError, match=message):
            check_stream([batch.clone() for batch in wrong])


def test_many_rows_follow_as_one_does(path):
    env = OracleEnv(path, 5)
    env.reset(seed=1)
    before, actions, after = [], [], []
    for action in np.random.default_rng(0).integers(5, size=50).tolist():
        before.append(env._now)
        actions.append(action)
        after.append(tuple(env.step(action)[0].tolist()))
    got, *_ = follow(np.array(before).T, np.array(actions))
    assert list(zip(*(column.tolist() for column in got), strict=True)) == after


def test_counts_survive_a_kill(path):
    pid = os.fork()
    if pid == 0:
        env = OracleEnv(
            path, 2, fault=Fault(lambda _: os.kill(os.getpid(), signal.SIGKILL), at=7)
        )
        env.reset()
        while True:
            env.step(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert OracleEnv.read(path).tolist() == [[0] * 4, [0] * 4, [1, 8, 7, 0]]
    assert OracleEnv(path, 2).run == 1


@pytest.mark.parametrize("on", ["construct", "reset", "step", "close"])
def test_a_fault_comes_in_its_call_and_its_runs_only(path, on):
    seen = []

    def note(honest):
        seen.append(honest)
        return honest

    for _ in range(3):
        env = OracleEnv(path, fault=Fault(note, on, at=0, runs=2))
        for _ in range(2):
            env.reset()
            env.step(1)
            env.step(1)
        env.close()
    assert len(seen) == 2


def test_what_a_fault_returns_is_returned(path):
    env = OracleEnv(
        path,
        fault=Fault(lambda honest: (*honest[:1], None, *honest[2:]), at=1, runs=None),
    )
    env.reset()
    assert [env.step(0)[1] is None for _ in range(3)] == [False, True, False]


def test_several_environments_of_one_maker_have_numbers_of_their_own(path):
    assert [OracleEnv(path, 6, 3).number for _ in range(7)] == [6, 7, 8, 6, 7, 8, 6]
