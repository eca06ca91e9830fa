"""Rows of the compat layer's buffers stay what they were, whatever is done later with what they
were made of.

Environments, vector environments and policies here keep everything that they return or are given,
and spoil it as soon as they are called again. The same program without that must give the same
buffer.
"""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

pytest.importorskip("tianshou")

from tianshou.algorithm.algorithm_base import Policy
from tianshou.data import Batch, CachedReplayBuffer, ReplayBuffer, VectorReplayBuffer
from tianshou.env import DummyVectorEnv, ShmemVectorEnv, SubprocVectorEnv
from tianshou.env.venv_wrappers import VectorEnvWrapper

from muster.compat.tianshou import AsyncCollector, Collector
from tests.fakes.ray_cluster import needs_ray, ray_cluster  # noqa: F401 (a fixture)
from tests.parity.test_tianshou_async import one_by_one, scripted
from tests.parity.tianshou_envs import plain
from tests.parity.tianshou_tools import assert_same

LENGTHS = 3, 5, 2
CALLS: list[dict[str, Any]] = [
    {"n_step": 9},
    {"n_episode": 4},
    {"n_step": 6},
    {"n_step": 6, "random": True},
]


class Thing:
    """An object of the user's."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Thing) and other.value == self.value

    __hash__ = None  # type: ignore[assignment]


def spoil(tree: Any) -> None:
    """Change everything in it that can be changed."""
    if isinstance(tree, np.ndarray):
        if tree.dtype == object:
            for value in tree.reshape(-1).tolist():
                spoil(value)
        if tree.flags.writeable:
            tree[...] = (
                None if tree.dtype == object else 1 if tree.dtype == bool else 77
            )
    elif isinstance(tree, torch.Tensor):
        tree.detach().fill_(77)
    elif isinstance(tree, Thing):
        tree.value = 77
    elif isinstance(tree, Batch | dict):
        values = tree.__dict__ if isinstance(tree, Batch) else tree
        for value in list(values.values()):
            spoil(value)
        values.clear()
    elif isinstance(tree, list | tuple):
        for value in tree:
            spoil(value)
        if isinstance(tree, list):
            tree.clear()
    elif isinstance(tree, set):
        tree.clear()


class Kept:
    """What was returned or given, until the next call."""

    def __init__(self, *, spoils: bool) -> None:
        self.spoils, self.trees = spoils, list[Any]()

    def spoil(self) -> None:
        if self.spoils:
            spoil(self.trees)
        self.trees = []

    def __call__(self, tree: Any) -> Any:
        self.trees.append(tree)
        return tree


BOX = spaces.Box(-99, 99, (2,), np.float32)
OBSERVATIONS: dict[str, tuple[spaces.Space[Any], Callable[[int, int], Any]]] = {
    "array": (BOX, lambda n, t: np.array([n, t], np.float32)),
    "dict": (
        spaces.Dict(
            {"e": BOX, "f": spaces.Dict({"x": spaces.Box(0, 99, (1,), np.int64)})}
        ),
        lambda n, t: {
            "e": np.array([n, t], np.float32),
            "f": {"x": np.array([t], np.int64)},
        },
    ),
    "ragged": (BOX, lambda n, t: np.arange(n + t, dtype=np.float32)),
    "mixed": (
        BOX,
        lambda n, t: {
            "e": np.array([n, t], np.float32),
            "word": [n, t],
            "thing": Thing(t),
        },
    ),
}


class Env(gymnasium.Env[Any, Any]):
    """Counts. Infos have arrays, lists, tuples, sets and objects, and come and go."""

    def __init__(
        self, length: int, obs: str, *, spoils: bool, infos: bool = True
    ) -> None:
        self.observation_space, self._observe = OBSERVATIONS[obs]
        self.action_space = spaces.Box(-1, 1, (2,), np.float32)
        self.length, self.t, self.infos = length, 0, infos
        self.kept = Kept(spoils=spoils)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> Any:
        self.kept.spoil()
        self.t = 0
        return self.kept((self._observe(self.length, 0), self._info()))

    def step(self, action: Any) -> Any:
        self.kept.spoil()
        self.t += 1
        reward = np.array(self.t + action.sum() / 7)
        if self.kept.spoils:
            spoil(action)  # its own, as Gymnasium allows
        done = self.t >= self.length
        return self.kept(
            (self._observe(self.length, self.t), reward, done, False, self._info())
        )

    def _info(self) -> dict[str, Any]:
        if not self.infos or self.t % 3 == 2:
            return {}
        t, array = self.t, np.full(2, self.t)
        kinds = {
            "list": [t, t + 1],
            "tuple": (array.copy(), t),
            "set": {t},
            "thing": Thing(t),
            "things": [Thing(t)],
        }
        return {
            "t": t,
            "array": array,
            "deep": {"x": np.array(t / 2), "thing": Thing(t)},
            **kinds,
        }


def spoiling(venv: Any, kept: Kept) -> Any:
    """Have a vector environment spoil what it has returned when it is called again."""

    def kept_of(method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            kept.spoil()
            return kept(method(*args, **kwargs))

        return call

    venv.reset, venv.step = kept_of(venv.reset), kept_of(venv.step)
    return venv


class Acting(Policy):
    """Acts with numbers of its own, and has a state and entries of one kind."""

    def __init__(self, kind: str, *, spoils: bool) -> None:
        super().__init__(
            action_space=spaces.Box(-1, 1, (2,), np.float32), action_scaling=False
        )
        self.kind, self.calls, self.kept = kind, 0, Kept(spoils=spoils)
        self.states: list[Any] = []

    def forward(self, batch: Any, state: Any = None, **kwargs: Any) -> Any:
        self.states.append(deepcopy(plain(state)))
        self.kept.spoil()
        self.calls += 1
        self.kept((batch.obs, batch.info, state))
        n = len(batch.obs)
        act = np.full((n, 2), (self.calls % 9) / 10, np.float32)
        result = Batch(act=act)
        if self.kind != "bare":
            value = np.full((n, 2), self.calls)
            things = np.array([Thing(self.calls) for _ in range(n)], object)
            tensor = torch.full((n,), float(self.calls))
            result.policy = Batch(
                act=act, value=value, deep=Batch(tensor=tensor, things=things)
            )
            states = {
                "array": value.copy(),
                "tensor": tensor.clone(),
                "batch": Batch(h=value.copy(), things=things),
            }
            result.state = states[self.kind]
        return self.kept(result)


def forked_shmem(fns: Any) -> Any:
    """Its processes are forks; new interpreters would import torch and the tests, one by one."""
    before = (
        multiprocessing.get_start_method()
    )  # TorchRL sets "spawn" when it is imported
    multiprocessing.set_start_method("fork", force=True)
    try:
        return ShmemVectorEnv(fns)
    finally:
        multiprocessing.set_start_method(before, force=True)


VENVS: dict[str, tuple[Any, Any]] = {
    "direct": (Collector, DummyVectorEnv),
    "wrapped": (Collector, DummyVectorEnv),
    "subproc": (Collector, partial(SubprocVectorEnv, context="fork")),
    "shared": (Collector, partial(SubprocVectorEnv, context="fork", share_memory=True)),
    "shmem": (Collector, forked_shmem),
    "async": (AsyncCollector, scripted(one_by_one)),
}
IN_PROCESSES = "subproc", "shared", "shmem"


def program(
    venv: str, obs: str, kind: str, *, spoils: bool, by_row: bool, buffer: Any = None
) -> Any:
    """The contents of the buffer, and the states that the policy was called with."""
    collector_class, venv_class = VENVS[venv]
    fns = [partial(Env, n, obs, spoils=spoils) for n in LENGTHS]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if venv == "async":
            venv_class = scripted(one_by_one)  # its numbers of waits begin anew
        envs = venv_class(fns)
        kept = Kept(spoils=spoils)
        if venv != "direct":
            envs = spoiling(envs if venv == "async" else VectorEnvWrapper(envs), kept)
        buffer = VectorReplayBuffer(90, len(LENGTHS)) if buffer is None else buffer()
        policy = Acting(kind, spoils=spoils)
        collector = collector_class(policy, envs, buffer, raise_on_nan_in_buffer=False)
        if by_row:
            collector.set_on_step_hook(lambda action, step: None)
        for i, space in enumerate(collector.action_space):
            space.seed(i)
        collector.reset()
        for call in CALLS:
            collector.collect(**call)
    policy.kept.spoil()
    kept.spoil()
    found = plain(collector.buffer[collector.buffer.sample_indices(0)]), policy.states
    collector.close()
    return found


@pytest.mark.parametrize("kind", ["bare", "array", "tensor", "batch"])
@pytest.mark.parametrize("obs", OBSERVATIONS)
@pytest.mark.parametrize("venv", ["direct", "wrapped", "async"])
def test_what_is_changed_later_is_stored_as_it_was(
    venv: str, obs: str, kind: str
) -> None:
    for by_row in (False, True):
        ours, expected = (
            program(venv, obs, kind, spoils=spoils, by_row=by_row)
            for spoils in (True, False)
        )
        assert_same(ours, expected)


@pytest.mark.parametrize("obs", ["array", "dict"])
@pytest.mark.parametrize("venv", IN_PROCESSES)
def test_so_it_is_with_environments_in_processes(venv: str, obs: str) -> None:
    ours = program(venv, obs, "array", spoils=True, by_row=False)
    expected = program("wrapped", obs, "array", spoils=False, by_row=False)
    assert_same(ours, expected)


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize("venv", ["ray"])
def test_so_it_is_on_ray(venv: str, ray_cluster: Any) -> None:  # noqa: F811
    from tianshou.env import RayVectorEnv

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(VENVS, venv, (Collector, RayVectorEnv))
        ours = program(venv, "dict", "array", spoils=True, by_row=False)
    assert_same(ours, program("wrapped", "dict", "array", spoils=False, by_row=False))


@pytest.mark.parametrize(
    "buffer",
    [lambda: CachedReplayBuffer(ReplayBuffer(60), 3, 20), lambda: ReplayBuffer(60)],
)
def test_so_it_is_in_other_buffers(
    buffer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(buffer(), ReplayBuffer) and not isinstance(
        buffer(), CachedReplayBuffer
    ):
        monkeypatch.setattr("tests.parity.test_tianshou_memory.LENGTHS", (3,))
    for obs in ("dict", "mixed"):
        runs = [
            program("direct", obs, "batch", spoils=s, by_row=False, buffer=buffer)
            for s in (True, False)
        ]
        assert_same(*runs)


def test_a_dict_space_in_shared_memory_has_the_observation_of_its_own_step() -> None:
    stored, _ = program("shmem", "dict", "bare", spoils=False, by_row=False)
    times = stored["obs"]["f"]["x"][:, 0]
    assert stored["obs"]["e"][:, 1].tolist() == times.tolist()
    assert (stored["obs_next"]["f"]["x"][:, 0] == times + 1).all()
    assert set(times.tolist()) == {0, 1, 2, 3, 4}


def test_first_observations_wait_for_their_call_as_they_were() -> None:
    """Environment 2 ends first and is not needed any more.

    It was reset when the policy fails, and starts later.
    """

    class Failing(Acting):
        def forward(self, batch: Any, state: Any = None, **kwargs: Any) -> Any:
            if self.calls == 3:
                self.calls += 1
                raise RuntimeError("broken")
            return super().forward(batch, state, **kwargs)

    for obs in ("array", "dict"):
        venv = DummyVectorEnv([partial(Env, n, obs, spoils=True) for n in LENGTHS])
        kept = Kept(spoils=True)
        policy = Failing("bare", spoils=True)
        collector = Collector(
            policy, spoiling(VectorEnvWrapper(venv), kept), VectorReplayBuffer(90, 3)
        )
        collector.reset()
        with pytest.raises(RuntimeError, match="broken"):
            collector.collect(n_episode=3)
        kept.spoil()
        collector.collect(n_step=3)
        stored = (
            collector.buffer[:].obs if obs == "array" else collector.buffer[:].obs.e
        )
        assert stored[:, 0].tolist() == [3] * 4 + [5] * 4 + [2] * 3
        assert stored[:, 1].tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 0, 1, 0]


@pytest.mark.parametrize("venv", ["direct", "async"])
def test_what_a_hook_was_given_stays_as_it_was(venv: str) -> None:
    """Over several calls, which write into the same lanes."""
    kept: list[Any] = []
    seen: list[Any] = []

    def hook(action: Any, step: Any) -> None:
        kept.append((action, step))
        seen.append(deepcopy((plain(action), plain(step))))

    collector_class, venv_class = VENVS[venv]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        envs = (scripted(one_by_one) if venv == "async" else venv_class)(
            [partial(Env, n, "mixed", spoils=True) for n in LENGTHS]
        )
        collector = collector_class(
            Acting("batch", spoils=False), envs, raise_on_nan_in_buffer=False
        )
    collector.set_on_step_hook(hook)
    collector.reset()
    for call in CALLS:
        collector.collect(**call)
    for (action, step), expected in zip(kept, seen, strict=True):
        step.pop("dist", None)
        expected[1].pop("dist")
        assert_same((plain(action), plain(step)), expected)


def test_environments_that_share_one_info_do_not_share_rows() -> None:
    class Sharing(Env):
        INFO: dict[str, Any] = {}  # noqa: RUF012

        def step(self, action: Any) -> Any:
            *rest, _ = super().step(action)
            if self.length == 2:
                self.INFO["t"] = self.t
            else:
                self.INFO.pop("t", None)
            return *rest, self.INFO

    envs = DummyVectorEnv([partial(Sharing, n, "array", spoils=False) for n in (3, 2)])
    collector = Collector(Acting("bare", spoils=False), envs, VectorReplayBuffer(20, 2))
    collector.reset()
    collector.collect(n_step=4)
    info = collector.buffer.info
    assert info.env_id[[0, 1, 10, 11]].tolist() == [0, 0, 1, 1]
    assert info.t[[0, 1, 10, 11]].tolist() == [0, 0, 1, 2]
