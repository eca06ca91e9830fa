"""Columns of infos: every adapter, collector and way to cut batches gives the same ones, decided by
equality.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import RecordEpisodeStatistics
from gymnasium.wrappers.vector import RecordEpisodeStatistics as RecordBatchStatistics

from muster import Collector, MultiAsyncCollector, MultiSyncCollector
from muster.errors import BadEnvOutput, EnvError
from muster.testing import InfoEnv
from tests.warned import warnings_are_errors

LENGTHS = 3, 4
ALL_INFOS = {
    "t": None,
    "stage": None,
    "half": None,
    "place": None,
    "goal": None,
    **InfoEnv.SPACES,
}
MAKERS = [partial(InfoEnv, length) for length in LENGTHS]


def makers(wrap: Callable[[Any], Any] = lambda env: env) -> list[Any]:
    return [lambda length=length: wrap(InfoEnv(length)) for length in LENGTHS]


def stacked() -> Any:
    made = iter([])

    def make() -> Any:
        nonlocal made
        env = next(made, None)
        if env is None:
            made = iter([maker() for maker in makers()])
            env = next(made)
        return env

    return make


VECTORS = {
    mode.name: (
        lambda mode=mode: SyncVectorEnv(
            MAKERS, autoreset_mode=mode, observation_mode="different"
        )
    )
    for mode in AutoresetMode
}
VECTORS |= {
    f"async {mode.name}": (
        lambda mode=mode: AsyncVectorEnv(MAKERS, autoreset_mode=mode, context="fork")
    )
    for mode in (AutoresetMode.SAME_STEP,)
}
if importlib.util.find_spec("stable_baselines3") is not None:
    from stable_baselines3.common.vec_env import DummyVecEnv

    VECTORS["sb3"] = lambda: DummyVecEnv(MAKERS)


def told(length: int, t: int) -> dict[str, Any]:
    """What is said with the observation of time ``t``."""
    return InfoEnv(length).info_of(t) if t else {"t": 0, "stage": "begin"}


def value(info: dict[str, Any], key: tuple[str, ...]) -> Any:
    *path, name = key
    for part in path:
        info = info.get(part, {})
    return info.get(name)


def check(batch: Any, lengths: tuple[int, ...], T: int) -> None:
    """``batch``, ``[B, T]``, shows the infos of environments that began with it."""
    keys = [
        key if isinstance(key, tuple) else (key,)
        for key in batch["info"].keys(True, True)
    ]
    fields = [(*key[:-1], key[-1][1:]) for key in keys if key[-1][0] == "_"]
    assert {key[0] for key in fields} == set(ALL_INFOS)
    for b, length in enumerate(lengths):
        for t in range(T):
            for root, at in (("info",), t % length), (("next", "info"), t % length + 1):
                for key in fields:
                    expected = value(told(length, at), key)
                    got = batch.get((*root, *key))
                    got = (
                        got[b, t].numpy()
                        if torch.is_tensor(got)
                        else got.tolist()[b][t]
                    )
                    there = batch.get((*root, *key[:-1], f"_{key[-1]}"))[b, t]
                    assert bool(there) == (expected is not None), (root, key, b, t)
                    right = (
                        not np.any(got)
                        if expected is None
                        else np.array_equal(got, expected)
                    )
                    assert right, (root, key, b, t, got)


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("T", [1, 7])
def test_single_environments(T: int, compact: bool) -> None:
    with Collector(
        stacked(),
        None,
        num_envs=2,
        frames_per_batch=2 * T,
        info=ALL_INFOS,
        compact_obs=compact,
    ) as c:
        batch = torch.cat([c.rollout().clone() for _ in range(14 // T)], 1)
        ended = list(c.episodes)
    if compact:
        assert "info" not in set(batch["next"].keys())
        assert batch["info", "t"].tolist() == [
            [t % length for t in range(14)] for length in LENGTHS
        ]
    else:
        check(batch, LENGTHS, 14)
    for record in ended:
        length = LENGTHS[record.env_id]
        assert record.info["t"] == length
        assert record.info["success"] == (length % 2 == 0)
        assert record.info["stage"] == "end"
        assert ("even" in record.info) == (length % 2 == 0)


@pytest.mark.parametrize("kind", VECTORS)
def test_batches_of_environments(kind: str) -> None:
    with Collector(VECTORS[kind], None, frames_per_batch=14, info=ALL_INFOS) as c:
        batch = torch.cat([c.rollout().clone() for _ in range(3)], 1)
        assert c.stats().success_rate == pytest.approx(5 / 12)
    check(batch, LENGTHS, 21)


@pytest.mark.parametrize("kind", [*VECTORS, "single"])
@pytest.mark.parametrize("limit", [2, 3])
def test_with_a_time_limit_of_ours(kind: str, limit: int) -> None:
    make, num_envs = (stacked(), 2) if kind == "single" else (VECTORS[kind], None)
    with Collector(
        make,
        None,
        num_envs=num_envs,
        frames_per_batch=24,
        info=["t"],
        max_frames_per_traj=limit,
    ) as c:
        batch = c.rollout()
        infos = [record.info for record in c.episodes]
    assert batch["info", "t"].tolist() == [[t % limit for t in range(12)]] * 2
    assert (
        batch["next", "info", "t"].tolist() == [[t % limit + 1 for t in range(12)]] * 2
    )
    assert infos == [{"t": limit}] * (24 // limit)


def statistics_of(env: Any) -> Any:
    with Collector(env, None, frames_per_batch=14, info=["episode"]) as c:
        batch = c.rollout()
        return batch, [record.info["episode"] for record in c.episodes]


@pytest.mark.parametrize(
    ("where", "mode"),
    [
        *(("inside", mode) for mode in AutoresetMode),
        ("outside", AutoresetMode.SAME_STEP),
    ],
)
def test_statistics_of_gymnasiums_wrappers(mode: AutoresetMode, where: str) -> None:
    """Raw returns are in ``info["episode"]``, whatever wrappers do with rewards.

    Outside, Gymnasium's wrapper forgets all episodes at a masked reset: the batch takes the mask
    out of its options.
    """
    if where == "inside":
        make = lambda: SyncVectorEnv(  # noqa: E731
            makers(RecordEpisodeStatistics),
            autoreset_mode=mode,
            observation_mode="different",
        )
    else:
        make = lambda: RecordBatchStatistics(VECTORS[mode.name]())  # noqa: E731
    batch, infos = statistics_of(make)
    assert [(info["r"], info["l"]) for info in infos] == [(6, 3), (10, 4), (6, 3)]
    done = batch["next", "done"].squeeze(-1)
    assert batch["next", "info", "episode", "_r"].equal(done)
    assert not batch["info", "episode", "_r"].any()
    assert not batch["info", "episode", "r"].any()


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
def test_statistics_of_a_batch_that_forgets_them_are_warned_of(mode: Any) -> None:
    make = lambda: RecordBatchStatistics(VECTORS[mode.name]())  # noqa: E731
    with warnings_are_errors():
        Collector(make, None, frames_per_batch=16).shutdown()  # nothing is read
    with pytest.warns(UserWarning, match="'episode' are wrong.*SAME_STEP"):
        statistics_of(make)


COLLECTORS: dict[str, Any] = {
    "1 worker": partial(MultiSyncCollector, num_workers=1),
    "2 workers": partial(MultiSyncCollector, num_workers=2),
    "threads": partial(MultiSyncCollector, backend="threads"),
    "server": partial(MultiSyncCollector, inference="server"),
    "first ready": partial(MultiAsyncCollector, cat_results=None),
}


def greedy(obs: torch.Tensor) -> torch.Tensor:
    assert obs.shape[-1] == 2, "a policy sees no infos"
    return torch.zeros(obs.shape[:-1], dtype=torch.int64)


@pytest.mark.parametrize("kind", ["1 worker", "2 workers", "threads", "server"])
def test_workers_give_the_same(kind: str) -> None:
    options = {"num_envs": 1, "frames_per_batch": 28, "info": ALL_INFOS, "seed": 0}
    with Collector(MAKERS, greedy, **options) as c:
        expected, records = c.rollout(), list(c.episodes)
    with COLLECTORS[kind](MAKERS, greedy, **options) as c:
        batch = c.rollout()
        for root in (("info",), ("next", "info")):
            assert (batch.get(root) == expected.get(root)).all()
        check(batch[:, 0], LENGTHS, 14)
        key = lambda record: record[:2]  # noqa: E731
        found = sorted(c.episodes, key=key)
        assert [r.info.keys() for r in found] == [
            r.info.keys() for r in sorted(records, key=key)
        ]
        assert c.stats().success_rate == pytest.approx(3 / 7)


def test_nothing_is_warned_of() -> None:
    with (
        warnings_are_errors(),
        Collector(
            stacked(), None, num_envs=2, frames_per_batch=14, info=ALL_INFOS
        ) as c,
    ):
        c.rollout()


class Endless(InfoEnv):
    """The info of each step has itself as an item."""

    def step(self, action: Any) -> Any:
        *returned, info = super().step(action)
        info["again"] = info
        return *returned, info


@pytest.mark.parametrize("num_envs", [None, 2])
def test_an_info_that_contains_itself_is_named(num_envs: int | None) -> None:
    options: Any = {"num_envs": num_envs, "frames_per_batch": 4, "info": True}
    expected = (BadEnvOutput, EnvError)
    with (
        pytest.raises(expected, match="contains itself.*'again'"),
        Collector(partial(Endless, 3), None, **options) as c,
    ):
        c.next()
