"""The same program on Tianshou's collectors and on the compat layer's, and all that comes of it
side by side.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Number
from typing import Any

import numpy as np
import torch
from tianshou import data
from tianshou.data import (
    CachedReplayBuffer,
    PrioritizedReplayBuffer,
    PrioritizedVectorReplayBuffer,
    ReplayBuffer,
    ReplayBufferManager,
    VectorReplayBuffer,
)
from tianshou.env import DummyVectorEnv

from muster.compat import tianshou as compat
from tests.parity.tianshou_envs import POLICIES, Counting, plain

BUFFERS: dict[str, Callable[[int], ReplayBuffer]] = {
    "vector": lambda n: VectorReplayBuffer(200 * n, n),
    "small": lambda n: VectorReplayBuffer(13 * n, n),
    "prioritized": lambda n: PrioritizedVectorReplayBuffer(
        23 * n, n, alpha=0.6, beta=0.4
    ),
    "cached": lambda n: CachedReplayBuffer(ReplayBuffer(31), n, 20),
    "stacked": lambda n: VectorReplayBuffer(
        50 * n, n, stack_num=3, ignore_obs_next=True
    ),
    "last": lambda n: VectorReplayBuffer(
        50 * n, n, stack_num=4, save_only_last_obs=True
    ),
    "single": lambda n: ReplayBuffer(17),
}


@dataclass(frozen=True)
class Program:
    """What is done with a collector.

    Args:
        lengths: of the episodes of each environment; even-numbered ones are truncated.
        calls: method and keyword arguments, one after another; a result of ``collect`` is compared
            too.
        env, collector: keyword arguments.
        buffer: which of ``BUFFERS``.
        policy: which of ``POLICIES``.
        venv: makes the vector environment.
        within_training: as in a trainer's training step.
        true_rewards: what is stored are the environments' own.
        hooks: more keyword arguments, made from a list in which hooks may note what is to be
            compared.
    """

    lengths: Sequence[int]
    calls: Sequence[tuple[str, dict[str, Any]]]
    policy: str = "values"
    buffer: str = "vector"
    env: dict[str, Any] = field(default_factory=dict)
    collector: dict[str, Any] = field(default_factory=dict)
    venv: Callable[..., Any] = DummyVectorEnv
    within_training: bool = False
    true_rewards: bool = True
    hooks: Callable[[list[Any]], dict[str, Any]] = lambda notes: {}


def collects(*calls: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """A ``reset``, and one ``collect`` after another."""
    return [("reset", {}), *(("collect", call) for call in calls)]


def sync(module: Any) -> Any:
    """The collector of ``module``."""
    return module.Collector


def play(module: Any, program: Program, kind: Callable[[Any], Any] = sync) -> list[Any]:
    """Run the program with a collector of ``module``.

    Returns:
        one entry per call: all that can be seen afterwards.
    """
    torch.manual_seed(7)
    np.random.seed(7)
    ends: list[Any] = []
    envs = [
        Counting(n, truncate=i % 2 == 0, ends=ends, **program.env)
        for i, n in enumerate(program.lengths)
    ]
    for i, env in enumerate(envs):
        env.action_space.seed(i)
    venv = program.venv([lambda env=env: env for env in envs])
    policy = POLICIES[program.policy](envs[0].action_space)
    policy.is_within_training_step = program.within_training
    buffer = BUFFERS[program.buffer](len(envs))
    seen: list[Any] = []
    notes: list[Any] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        collector = kind(module)(
            policy, venv, buffer, **program.collector, **program.hooks(notes)
        )
        for method, kwargs in program.calls:
            before = len(ends)
            result = getattr(collector, method)(**kwargs)
            entry = {**observed(collector, policy, envs), "notes": plain(list(notes))}
            if method == "collect":
                entry["stats"], entry["episodes"] = stats(result), episodes(result)
                if (
                    module is not data
                    and envs[0].log
                    and program.true_rewards
                    and not venv.is_async
                ):
                    assert_same(
                        entry["episodes"],
                        true_episodes(result, ends[before:]),
                        f"{len(seen)} {kwargs}",
                    )
            elif result is not None:
                entry["result"] = [plain(part) for part in result]
            seen.append(entry)
    return seen


def observed(collector: Any, policy: Any, envs: Sequence[Any]) -> dict[str, Any]:
    """The state of everything around a collector."""
    return {
        "buffer": contents(collector.buffer),
        "counters": (int(collector.collect_step), int(collector.collect_episode)),
        "envs": [list(env.log) for env in envs],
        "policy": list(getattr(policy, "seen", ())),
        "training": policy.training,
        "torch": torch.get_rng_state().numpy(),
        "numpy": np.random.get_state()[1:],
    }


def stats(result: Any) -> dict[str, Any]:
    """The fields of a ``CollectStats`` that do not depend on the clock."""
    assert result.collect_time > 0
    assert np.isclose(
        result.collect_speed, result.n_collected_steps / result.collect_time
    )
    names = ("n_collected_episodes", "n_collected_steps", "pred_dist_std_array")
    found: dict[str, Any] = {name: plain(getattr(result, name)) for name in names}
    by_dim = result.pred_dist_std_array_stat
    found["pred_dist_std_array_stat"] = by_dim and {
        str(key): _summary(value) for key, value in by_dim.items()
    }
    return found


def episodes(result: Any) -> dict[str, Any]:
    """What a ``CollectStats`` says of the episodes that have ended."""
    said = {"returns": result.returns, "lens": result.lens}
    return plain(
        {
            **said,
            "returns_stat": _summary(result.returns_stat),
            "lens_stat": _summary(result.lens_stat),
        }
    )


def true_episodes(result: Any, ends: Sequence[Any]) -> dict[str, Any]:
    """The same, from what the environments know."""
    returns, lens = (
        np.array([end[i] for end in ends], kind) for i, kind in enumerate((float, int))
    )
    return episodes(type(result).with_autogenerated_stats(returns=returns, lens=lens))


def _summary(stat: Any) -> Any:
    return stat and {
        name: getattr(stat, name) for name in ("mean", "std", "max", "min")
    }


def contents(buffer: ReplayBuffer) -> dict[str, Any]:
    """Everything a buffer holds, read and unread."""
    parts = (
        list(buffer.buffers) if isinstance(buffer, ReplayBufferManager) else [buffer]
    )
    names = (
        "_insertion_idx",
        "_size",
        "last_index",
        "_ep_return",
        "_ep_len",
        "_ep_start_idx",
    )
    found: dict[str, Any] = {
        "memory": plain(buffer._meta),
        "parts": [
            {name: plain(getattr(part, name)) for name in names} for part in parts
        ],
        "part memory": [plain(part._meta) for part in parts],
        "last_index": buffer.last_index.copy(),
        "length": len(buffer),
    }
    if isinstance(buffer, ReplayBufferManager):
        found["lengths"] = buffer._lengths.copy()
    if isinstance(buffer, PrioritizedReplayBuffer):
        found["weight"] = [
            buffer.weight[np.arange(buffer.maxsize)],
            buffer._max_prio,
            buffer._min_prio,
        ]
    if len(buffer):
        found["read"] = plain(buffer[:])
        found["unfinished"] = buffer.unfinished_index()
        found["sampled"] = buffer.sample_indices(0)
    return found


def assert_same(ours: Any, theirs: Any, where: str = "") -> None:
    """Equal in structure, dtype, shape and value; or say where not."""
    if isinstance(theirs, dict):
        assert isinstance(ours, dict), f"{where}: {ours!r}, expected {theirs!r}"
        assert set(ours) == set(theirs), (
            f"{where}: {sorted(ours)}, expected {sorted(theirs)}"
        )
        for key in theirs:
            assert_same(ours[key], theirs[key], f"{where}.{key}")
    elif isinstance(theirs, list | tuple):
        assert isinstance(ours, list | tuple), f"{where}: {ours!r}, expected {theirs!r}"
        assert len(ours) == len(theirs), (
            f"{where}: {len(ours)} entries, expected {len(theirs)}\n{ours}\n{theirs}"
        )
        for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(one, other, f"{where}[{i}]")
    elif isinstance(theirs, np.ndarray):
        assert isinstance(ours, np.ndarray), f"{where}: {ours!r}, expected {theirs!r}"
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), (
            f"{where}: {ours.dtype}{ours.shape}, expected {theirs.dtype}{theirs.shape}"
        )
        if theirs.dtype == object:
            assert_same(ours.tolist(), theirs.tolist(), where)
        else:
            np.testing.assert_array_equal(ours, theirs, err_msg=where)
    else:
        numbers = isinstance(ours, Number) and isinstance(theirs, Number)
        assert numbers or type(ours) is type(theirs), (
            f"{where}: {ours!r}, expected {theirs!r}"
        )
        assert ours == theirs or (ours != ours and theirs != theirs), (
            f"{where}: {ours!r}, expected {theirs!r}"
        )


def assert_equal_to_tianshou(
    program: Program, kind: Callable[[Any], Any] = sync, *, knows_episodes: bool = True
) -> list[Any]:
    """Run it on both; returns what was seen.

    Args:
        knows_episodes: Tianshou can tell which steps are one episode. It takes them from the
            buffer, which may hold fewer, and more where an environment was reset before its end.
    """
    ours, theirs = play(compat, program, kind), play(data, program, kind)
    for entry in () if knows_episodes else (*ours, *theirs):
        entry.pop("episodes", None)
    assert_same(ours, theirs)
    return ours
