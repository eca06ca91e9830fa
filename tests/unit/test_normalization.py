"""Running normalisation: exact over all batches and workers, and the same where the policy acts."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import muster
from muster import Collector, MultiSyncCollector, policies
from muster.errors import BadOption
from muster.policies.executor import plan
from muster.testing import ChainEnv, CountingEnv
from tests.tools import assert_same, collect

PARTS = st.lists(st.integers(0, 20), min_size=1, max_size=8)


@given(PARTS, st.integers(0, 2**31), st.sampled_from([1e-3, 1.0, 1e6]))
def test_the_statistics_are_those_of_all_observations_however_they_are_divided(
    parts, seed, size
):
    rng = np.random.default_rng(seed)
    norm, rows = policies.RunningNorm(3), rng.normal(size, 2.0, (sum(parts), 3))
    for part in np.split(rows, np.cumsum(parts)[:-1]):
        norm.update(torch.from_numpy(part))
    assert norm.count == len(rows)
    if len(rows):
        np.testing.assert_allclose(norm.mean, rows.mean(0), rtol=1e-12)
        np.testing.assert_allclose(
            norm.variance, rows.var(0), rtol=1e-9, atol=1e-18 * size**2
        )
        np.testing.assert_allclose(norm.scale, (rows.var(0) + 1e-8) ** -0.5, rtol=1e-5)


def test_the_layer_normalises_and_clips_and_changes_nothing_before_the_first_update():
    norm = policies.RunningNorm((2,), clip=1.5)
    assert norm(torch.tensor([0.5, -9.0])).tolist() == [0.5, -1.5]
    norm.update(torch.tensor([[1, 10], [3, 30]], dtype=torch.int64))
    assert norm(torch.tensor([[2, 40]])).tolist() == [[0.0, 1.5]]
    assert norm(torch.tensor([[3.0, 10.0]])).tolist() == [pytest.approx([1.0, -1.0])]


def test_a_mask_says_which_rows_count():
    norm, rows = policies.RunningNorm(1), torch.arange(6.0).reshape(2, 3, 1)
    norm.update(rows, torch.tensor([[True, False, True], [False, False, True]]))
    assert (norm.count, norm.mean.item()) == (3, pytest.approx(7 / 3))


@pytest.mark.parametrize(
    "bad", [torch.zeros(4, 3), torch.zeros(()), torch.tensor([[1.0, float("nan")]])]
)
def test_other_observations_are_refused_and_change_nothing(bad):
    norm = policies.RunningNorm(2)
    norm.update(torch.tensor([[1.0, 2.0]]))
    with pytest.raises(BadOption):
        norm.update(bad)
    assert norm.count == 1


@pytest.mark.parametrize(
    ("rows", "kind"), [(1, "numpy"), (64, "numpy"), (8192, "torch")]
)
def test_executors_compute_what_the_module_does(rows, kind):
    norm = policies.RunningNorm(4, clip=0.3)
    net, x = (
        nn.Sequential(norm, nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)),
        torch.randn(rows, 4) * 3,
    )
    program = plan(net, x)
    for _ in range(3):
        norm.update(
            torch.randn(50, 4) * 5 + 1
        )  # the program reads the memory of the buffers
        assert program is not None
        assert program.kind == kind
        assert program.current()
        got = program(x.numpy().copy()) if program.kind == "numpy" else program(x)
        torch.testing.assert_close(
            torch.as_tensor(got), net(x).detach(), rtol=1e-5, atol=1e-6
        )
    norm.clip = 1.0
    assert not program.current()


def actor():
    torch.manual_seed(0)
    norm = policies.RunningNorm(3)
    return norm, policies.categorical(
        nn.Sequential(norm, nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 5))
    )


def trained(collector, norm, batches):
    found = []
    for batch in collector:
        found.append(batch.clone())
        norm.update(batch["observation"])
        collector.update_policy_weights_()
        if len(found) == batches:
            return found
    return found


def test_workers_act_with_the_published_statistics_and_batches_are_raw():
    given = {"num_envs": 2, "frames_per_batch": 32, "seed": 3}
    (norm, policy), (other, same) = actor(), actor()
    with (
        Collector([ChainEnv] * 2, policy, **given) as one,
        MultiSyncCollector([ChainEnv] * 2, same, **given) as two,
    ):
        for a, b in zip(trained(one, norm, 4), trained(two, other, 4), strict=True):
            assert_same(a.reshape(-1), b.reshape(-1))
    assert norm.count == 4 * 32
    torch.testing.assert_close(norm.mean, other.mean, rtol=1e-12, atol=0)


def test_a_state_has_the_statistics(tmp_path):
    given = {"num_envs": 2, "frames_per_batch": 16, "seed": 3}
    norm, policy = actor()
    with Collector(ChainEnv, policy, **given) as collector:
        trained(collector, norm, 3)
        muster.save_state(tmp_path / "state", collector.state_dict())
        expected = trained(collector, norm, 2)
    norm, policy = actor()
    with Collector(ChainEnv, policy, **given) as collector:
        collector.load_state_dict(tmp_path / "state")
        assert norm.count == 48
        for a, b in zip(expected, trained(collector, norm, 2), strict=True):
            assert_same(a, b)


def test_rewards_are_divided_by_the_deviation_of_returns_over_batches():
    scaler, returns, open_returns = policies.RewardScaler(0.5), [], {}
    given = {"num_envs": 2, "frames_per_batch": 10, "total_frames": 70}
    with Collector(partial(CountingEnv, 3), None, **given) as collector:
        for batch in collector:
            scaler.update(batch)
            for lane in batch:
                for row in lane:
                    number = int(row["collector", "traj_ids"])
                    value = open_returns.get(number, 0.0) * 0.5 + float(
                        row["next", "reward"]
                    )
                    open_returns[number] = value
                    if row["next", "done"]:
                        del open_returns[number]
                    returns.append(value)
    expected = 1 / np.sqrt(np.var(returns) + 1e-8)
    assert float(scaler(torch.ones(()))) == pytest.approx(min(expected, 10.0), rel=1e-5)
    again = policies.RewardScaler(0.5)
    again.load_state_dict(scaler.state_dict())
    assert again.open == scaler.open
    assert scaler.open == open_returns != {}


@pytest.mark.parametrize(
    "options",
    [
        {"split_trajs": True},
        {"reset_when_done": False},
        {"split_trajs": True, "reset_when_done": False},
        {"trajs_per_batch": 2, "traj_format": "pad"},
    ],
    ids=str,
)
def test_padding_is_no_return(options):
    lengths = iter([3, 5])
    padded = 0
    scaler = policies.RewardScaler(0.5)
    expected = policies.RewardScaler(0.5)
    with Collector(
        lambda: CountingEnv(next(lengths)),
        None,
        num_envs=2,
        frames_per_batch=20,
        total_frames=60,
        **options,
    ) as collector:
        for batch in collector:
            scaler.update(batch)
            made = batch["collector", "traj_ids"] >= 0
            for name in ("valid", "mask"):
                made = made & batch.get(("collector", name), made)
            expected.update(batch[made])
            padded += int((~made).sum())
    assert padded
    assert scaler.returns.count == expected.returns.count
    assert torch.equal(scaler.returns.scale, expected.returns.scale)
    assert scaler.open == expected.open
    assert all(number >= 0 for number in scaler.open)


def test_returns_need_the_ids_of_trajectories():
    batch = collect(CountingEnv, frames_per_batch=6, track_traj_ids=False)
    with pytest.raises(BadOption, match="track_traj_ids=True"):
        policies.RewardScaler(0.5).update(batch)


def test_bad_arguments_are_refused():
    for make in (
        partial(policies.RunningNorm, 2, clip=0.0),
        partial(policies.RunningNorm, 2, eps=-1.0),
        partial(policies.RewardScaler, 1.5),
    ):
        with pytest.raises(BadOption):
            make()
