"""Values by reference: what others keep and change later changes no stored row, and batches share
nothing.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import NonTensorData, TensorDict
from tensordict.nn import TensorDictModuleBase

from muster import Collector, MultiSyncCollector
from muster.compat.gymnasium import VectorEnv
from muster.errors import BadEnvOutput
from muster.testing import CountingEnv, EnvContract, InfoEnv, SpaceEnv
from muster.testing.poison import poisoned, spoil
from tests.fakes.coroutines import Awaited
from tests.tools import collect

# --- environments that change what they returned --------------------------------------------------


class Board:
    """An object of a custom space."""

    def __init__(self, count: int) -> None:
        self.count, self.cells = count, np.full(3, count)


class Anything(spaces.Space[Any]):
    """A space of objects that Muster does not know."""

    def __init__(self) -> None:
        super().__init__(None, None)

    def contains(self, x: Any) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Anything)


def graph(count: int, memory: Any) -> Any:
    nodes, links = memory.setdefault(
        "graph", (np.zeros((2, 1), np.float32), np.zeros((1, 2), np.int64))
    )
    nodes[:], links[:] = count, count
    return spaces.GraphInstance(nodes, None, links)


def sequence(count: int, memory: Any) -> Any:
    part = memory.setdefault("part", np.zeros(1, np.float32))
    part[:] = count
    return (part,) * 2


def board(count: int, memory: Any) -> Any:
    made = memory.setdefault("board", Board(0))
    made.count, made.cells[:] = count, count
    return made


def growing(count: int, memory: Any) -> Any:
    kept = memory.setdefault("list", [])
    kept[:] = range(count + 1)
    return kept


def parts(count: int, memory: Any) -> Any:
    return memory.setdefault("parts", {}) | {
        "graph": graph(count, memory),
        "number": np.array([count]),
    }


KINDS: dict[str, tuple[Any, Callable[[int, Any], Any], Callable[[Any], Any]]] = {
    "graph": (
        spaces.Graph(spaces.Box(-9, 9, (1,)), None),
        graph,
        lambda o: {*o.nodes.flat, *o.edge_links.flat},
    ),
    "sequence": (
        spaces.Sequence(spaces.Box(-9, 9, (1,))),
        sequence,
        lambda o: {float(p[0]) for p in o},
    ),
    "custom": (Anything(), board, lambda o: {o.count, *o.cells.tolist()}),
    "list": (Anything(), growing, lambda o: {o[-1], len(o) - 1}),
}


class InPlace(gymnasium.Env[Any, Any]):
    """Counts its steps, and observes one object that it changes. Episodes have 3 steps."""

    def __init__(self, kind: str) -> None:
        self.observation_space, self.make, _ = KINDS[kind]
        self.action_space = spaces.Discrete(2)
        self.memory: dict[str, Any] = {}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self.make(0, self.memory), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return self.make(self.t, self.memory), 1.0, self.t == 3, False, {}


def counts(batch: Any, kind: str, *key: str) -> list[list[int]]:
    """The counts in a column of objects, ``[B, T]``."""
    rows = []
    for row in batch.get((*key, "observation")).tolist():
        found = [KINDS[kind][2](cell) for cell in row]
        assert all(len(each) == 1 for each in found), (
            "all parts of an object have the same count"
        )
        rows.append([int(each.pop()) for each in found])
    return rows


def sync(kind: str, mode: AutoresetMode) -> Any:
    return SyncVectorEnv([partial(InPlace, kind)] * 2, autoreset_mode=mode)


BATCHES: dict[str, Callable[[str], Any]] = {
    "stacked": lambda kind: (partial(InPlace, kind), {"num_envs": 2}),
    "coroutines": lambda kind: (lambda: Awaited(InPlace(kind)), {"num_envs": 2}),
    "poisoned": lambda kind: (lambda: poisoned(InPlace(kind)), {"num_envs": 2}),
    **{
        mode.name: lambda kind, mode=mode: (partial(sync, kind, mode), {})
        for mode in AutoresetMode
    },
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", BATCHES)
def test_objects_that_the_environment_changes(kind: str, batch: str) -> None:
    make, options = BATCHES[batch](kind)
    with Collector(make, None, frames_per_batch=14, **options) as collector:
        first, second = collector.rollout(), collector.rollout()
    assert first.get("observation").batch_size == (2, 7), (
        "also of objects that are lists"
    )
    assert counts(first, kind) == [[0, 1, 2, 0, 1, 2, 0]] * 2
    assert counts(first, kind, "next") == [[1, 2, 3, 1, 2, 3, 1]] * 2
    assert counts(second, kind) == [[1, 2, 0, 1, 2, 0, 1]] * 2
    assert counts(second, kind, "next") == [[2, 3, 1, 2, 3, 1, 2]] * 2


def test_objects_in_workers() -> None:
    with MultiSyncCollector(
        [partial(InPlace, "graph")] * 2, None, num_workers=1, frames_per_batch=14
    ) as collector:
        batch = collector.rollout().reshape(2, 7)
    assert counts(batch, "graph") == [[0, 1, 2, 0, 1, 2, 0]] * 2
    assert counts(batch, "graph", "next") == [[1, 2, 3, 1, 2, 3, 1]] * 2


@pytest.mark.parametrize("mode", AutoresetMode, ids=str)
def test_last_observations_of_environments_that_use_their_memory_again(
    mode: AutoresetMode,
) -> None:
    """Gymnasium keeps last observations over a reset without copying them."""
    make = lambda: SyncVectorEnv(  # noqa: E731
        [partial(CountingEnv, 2, reuse=True)] * 2, autoreset_mode=mode
    )
    batch = collect(make, frames_per_batch=10)
    assert batch["next", "observation"][..., 1].tolist() == [[1, 2, 1, 2, 1]] * 2


def test_last_observations_in_stable_baselines() -> None:
    sb3 = pytest.importorskip("stable_baselines3.common.vec_env")
    batch = collect(
        lambda: sb3.DummyVecEnv([partial(CountingEnv, 2, reuse=True)] * 2),
        frames_per_batch=10,
    )
    assert batch["next", "observation"][..., 1].tolist() == [[1, 2, 1, 2, 1]] * 2


class OneInfo(InfoEnv):
    """All environments of the class return the same dict and array."""

    memory: dict[str, Any] = {"place": np.zeros(2, np.float32)}  # noqa: RUF012

    def step(self, action: int) -> Any:
        *rest, info = super().step(action)
        self.memory["place"][:] = info["place"]
        self.memory.update(t=info["t"], stage=info["stage"])
        return (*rest, self.memory)


def test_infos_in_memory_that_environments_share() -> None:
    lengths = iter([3, 4] * 2)
    spaces_of = {
        "t": spaces.Discrete(9),
        "place": spaces.Box(0, 9, (2,)),
        "stage": spaces.Text(9),
    }
    batch = collect(
        lambda: OneInfo(next(lengths)), num_envs=2, frames_per_batch=16, info=spaces_of
    )["next", "info"]
    assert batch["t"].tolist() == [[1, 2, 3, 1, 2, 3, 1, 2], [1, 2, 3, 4] * 2]
    assert batch["place"][..., 0].tolist() == [[3] * 8, [4] * 8]
    assert batch["place"][..., 1].tolist() == batch["t"].tolist()
    assert list(batch["stage"]) == [
        ["on", "on", "end"] * 2 + ["on", "on"],
        ["on", "on", "on", "end"] * 2,
    ]


class TestInfos(EnvContract):
    def make_env(self) -> Any:
        return InfoEnv()


class TestVectorOfObjects(EnvContract):
    num_envs = None
    steps = 8

    def make_env(self) -> Any:
        each = spaces.Tuple(
            (
                spaces.Graph(spaces.Box(0, 1, (2,)), None),
                spaces.Sequence(spaces.Discrete(5)),
            )
        )
        make = lambda: SpaceEnv(copy.deepcopy(each), spaces.Discrete(2))  # noqa: E731
        return SyncVectorEnv([make] * 2, autoreset_mode=AutoresetMode.SAME_STEP)


def test_objects_that_cannot_be_copied_are_refused_by_name() -> None:
    class Locked(InPlace):
        def step(self, action: Any) -> Any:
            _, *rest = super().step(action)
            return ({"lock": threading.Lock()} if self.t == 2 else [self.t], *rest)

    with Collector(
        lambda: Locked("list"), None, num_envs=1, frames_per_batch=4
    ) as collector:
        with pytest.raises(
            BadEnvOutput,
            match=r"Locked\[0\].*observation is a _?thread.lock .*__deepcopy__",
        ):
            collector.rollout()
        assert collector.stats().in_flight == 1


@pytest.mark.parametrize(
    "wrap", [lambda env: env, Awaited], ids=["stacked", "coroutines"]
)
def test_environments_that_empty_their_reset_options(wrap: Any) -> None:
    class Popping(CountingEnv):
        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            start = (options or {}).pop("start", [0])
            obs, info = super().reset(seed=seed)
            return obs + start.pop(), info

    given = {"start": [5]}
    with Collector(
        lambda: wrap(Popping()), None, num_envs=2, frames_per_batch=4
    ) as collector:
        collector.rollout()
        collector.reset(options=given)
        assert collector.rollout()["observation"][:, 0, 1].tolist() == [5, 5]
    assert given == {"start": [5]}


# --- environments that change their actions -------------------------------------------------------


class Takes(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Spoils its action after each step, and again in the next one."""

    kept: Any = None

    def step(self, action: Any) -> Any:
        spoil(self.kept)
        returned = self.env.step(copy.deepcopy(action))
        self.kept = action
        spoil(action)
        return returned


class OfActions(gymnasium.Env[Any, Any]):
    """Its reward is computed from the action."""

    def __init__(self, space: Any) -> None:
        self.observation_space, self.action_space, self.t = (
            spaces.Box(0, 9, (1,)),
            space,
            0,
        )

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return np.full(1, self.t, np.float32), total(action), self.t == 3, False, {}


def total(action: Any) -> float:
    if isinstance(action, dict):
        return sum(map(total, action.values()))
    if isinstance(action, (tuple, list)):
        return sum(total(part) for part in action if part is not None)
    return float(np.sum(np.asarray(action)))


ACTIONS = {
    "box": spaces.Box(-1, 1, (3,)),
    "dict": spaces.Dict(
        {"a": spaces.Box(-1, 1, (2,)), "b": spaces.MultiDiscrete([3, 4])}
    ),
    "graph": spaces.Graph(spaces.Box(-1, 1, (2,)), None),
    "with objects": spaces.Dict(
        {"a": spaces.Box(-1, 1, (2,)), "g": spaces.Sequence(spaces.Box(0, 1, (1,)))}
    ),
}


@pytest.mark.parametrize("space", ACTIONS)
@pytest.mark.parametrize("batch", ["stacked", "coroutines", "vector"])
def test_environments_that_change_their_actions(space: str, batch: str) -> None:
    single = lambda: Takes(OfActions(copy.deepcopy(ACTIONS[space])))  # noqa: E731
    make, options = {
        "stacked": (single, {"num_envs": 2}),
        "coroutines": (lambda: Awaited(single()), {"num_envs": 2}),
        "vector": (lambda: SyncVectorEnv([single] * 2), {}),
    }[batch]
    rows = collect(make, frames_per_batch=14, seed=0, **options)
    action = rows.get("action")
    for b in range(2):
        for t in range(7):
            stored = action[b, t]
            stored = stored.to_dict() if isinstance(stored, TensorDict) else stored
            stored = stored.data if isinstance(stored, NonTensorData) else stored
            assert total(stored) == pytest.approx(
                float(rows["next", "reward"][b, t, 0]), abs=1e-5
            )


# --- TorchRL --------------------------------------------------------------------------------------


def torchrl_env() -> Any:
    pytest.importorskip("torchrl")
    from torchrl.data import Categorical, Composite, NonTensor, Unbounded
    from torchrl.envs import EnvBase

    class Notes(EnvBase):
        """Observes a list that grows, in one object, and spoils what it gets."""

        def __init__(self) -> None:
            super().__init__()
            self.observation_spec = Composite(
                observation=Unbounded(1), note=NonTensor(shape=())
            )
            self.action_spec, self.reward_spec = Categorical(2), Unbounded(1)
            self.note: list[int] = []
            self.seen = torch.zeros(1)

        def _observe(self) -> Any:
            self.note.append(len(self.note))
            self.seen += 1
            return TensorDict(
                {"observation": self.seen, "note": NonTensorData(self.note)}
            )

        def _reset(self, tensordict: Any = None) -> Any:
            self.note.clear()
            self.seen.zero_()
            return self._observe()

        def _step(self, tensordict: Any) -> Any:
            spoil(tensordict["note"])
            tensordict["action"].fill_(9)
            done = torch.tensor([len(self.note) == 3])
            return self._observe().update({"reward": torch.ones(1), "done": done})

        def _set_seed(self, seed: Any) -> None:
            return

    return Notes()


@pytest.mark.filterwarnings("ignore")
def test_torchrl_environments_with_objects() -> None:
    batch = collect(torchrl_env, num_envs=2, frames_per_batch=14, seed=0)
    lengths = [[len(note) for note in row] for row in batch.get("note").tolist()]
    after = [
        [len(note) for note in row] for row in batch.get(("next", "note")).tolist()
    ]
    assert lengths == [[1, 2, 3, 1, 2, 3, 1]] * 2
    assert after == [[2, 3, 4, 2, 3, 4, 2]] * 2
    assert batch["observation"][..., 0].tolist() == lengths
    assert batch["action"].max() < 2


# --- what the user gets ---------------------------------------------------------------------------


def every_object(batch: Any) -> Iterator[Any]:
    from tensordict import is_leaf_nontensor

    for key in batch.keys(True, True, is_leaf=is_leaf_nontensor):
        value = batch.get(key)
        if not torch.is_tensor(value):
            for row in value.tolist():
                yield from row if isinstance(row, list) else [row]


def spoil_objects(batch: Any) -> None:
    for each in every_object(batch):
        spoil(each)


@pytest.mark.parametrize(
    "where", ["loop", "on_batch", "on_episode_done", "postproc", "on_step"]
)
def test_what_the_user_does_to_objects_of_a_batch_is_in_no_other(where: str) -> None:
    options: dict[str, Any] = {}
    shown: list[Any] = []
    if where == "on_step":
        options["on_step"] = lambda step: shown.append(
            copy.deepcopy(step["observation"])
        )
    elif where != "loop":
        options[where] = lambda item: (
            (shown.append(item), spoil_objects(item))[2:] or None
        )
    with Collector(
        partial(InPlace, "graph"), None, num_envs=2, frames_per_batch=14, **options
    ) as collector:
        for first in (
            [0, 1, 2, 0, 1, 2, 0],
            [1, 2, 0, 1, 2, 0, 1],
            [2, 0, 1, 2, 0, 1, 2],
        ):
            batch = next(iter(collector))
            if where not in ("on_batch", "postproc"):
                assert counts(batch, "graph") == [first] * 2
                assert counts(batch, "graph", "next") == [[t + 1 for t in first]] * 2
                spoil_objects(batch)
            else:
                assert all(np.isnan(each.nodes).all() for each in every_object(batch))
    assert bool(shown) == (where != "loop")


def test_observations_and_next_observations_are_different_objects() -> None:
    batch = collect(partial(InPlace, "graph"), num_envs=2, frames_per_batch=14)
    ids = [id(each.nodes) for each in every_object(batch)]
    assert len(set(ids)) == len(ids)


def test_final_observations_are_the_users() -> None:
    with Collector(
        partial(InPlace, "custom"),
        None,
        num_envs=2,
        frames_per_batch=10,
        compact_obs=True,
    ) as collector:
        for expected in ([3, 2], [3, 3, 1]):
            collector.rollout()
            for _ in range(2):
                finals = collector.final_observations()
                by_env = list(finals["observation"])
                assert [each.count for each in by_env] == expected * 2
                for each in by_env:
                    each.count = -1


@pytest.mark.parametrize("form", ["cat", "pad"])
def test_what_a_hook_does_to_whole_episodes_is_not_in_their_batch(form: str) -> None:
    def hook(episode: Any) -> Any:
        spoil_objects(episode)
        episode["next", "reward"].zero_()
        return {"length": torch.full((len(episode),), len(episode))}

    options = {
        "frames_per_batch": 14,
        "trajs_per_batch": 4,
        "traj_format": form,
        "on_episode_done": hook,
    }
    with Collector(partial(InPlace, "graph"), None, num_envs=2, **options) as collector:
        batch = next(iter(collector))
    found = [
        int(each.nodes[0, 0])
        for each in batch.reshape(-1).get(("next", "observation")).tolist()
    ]
    assert found == [1, 2, 3] * 4
    assert (batch["next", "reward"] == 1).all()
    assert (batch["length"] == 3).all()


def test_records_of_episodes_keep_their_infos() -> None:
    place = {"place": spaces.Box(0, 9, (2,))}
    with Collector(
        InfoEnv, None, num_envs=2, frames_per_batch=6, info=place
    ) as collector:
        batch = collector.rollout()
        kept = list(collector.episodes)
        batch["next", "info", "place"].zero_()
        del batch
        for _ in range(4):
            collector.rollout()
    assert [record.info["place"].tolist() for record in kept] == [[3, 3]] * 2


def test_text_is_kept_where_an_environment_goes_on_after_a_lost_life() -> None:
    class Lives(InfoEnv):
        def step(self, action: int) -> Any:
            obs, reward, _, truncated, info = super().step(action)
            return obs, reward, self.t % 2 == 0, truncated, info | {"over": self.t == 4}

    options = {
        "traj_done_key": "over",
        "reset_when_done": False,
        "info": {"stage": spaces.Text(9)},
    }
    with Collector(
        partial(Lives, 9), None, num_envs=2, frames_per_batch=8, **options
    ) as collector:
        first, second = collector.rollout(), collector.rollout()
    assert [row[:2] for row in first["info", "stage"]] == [["begin", "on"]] * 2
    assert [row[:2] for row in second["info", "stage"]] == [["on", "on"]] * 2
    assert (
        first["next", "observation"][:, 1].tolist()
        == second["observation"][:, 0].tolist()
        == [[9, 2]] * 2
    )


# --- policies that keep and change objects --------------------------------------------------------


def test_objects_that_policies_get_are_theirs() -> None:
    kept: list[Any] = []

    def policy(obs: Any) -> Any:
        kept.extend(obs)
        spoil(kept)
        obs[...] = None
        return torch.zeros(2, dtype=torch.int64)

    for kind in KINDS:
        batch = collect(partial(InPlace, kind), policy, num_envs=2, frames_per_batch=14)
        assert counts(batch, kind) == [[0, 1, 2, 0, 1, 2, 0]] * 2
        assert counts(batch, kind, "next") == [[1, 2, 3, 1, 2, 3, 1]] * 2


class Notary(TensorDictModuleBase):
    """Writes the same list in every step, and spoils what it reads."""

    in_keys = ["observation"]  # noqa: RUF012
    out_keys = ["action", "said"]  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.said: list[int] = []

    def forward(self, td: Any) -> Any:
        seen = td.get("observation")
        spoil([seen.data] if isinstance(seen, NonTensorData) else list(seen.tolist()))
        self.said.append(len(self.said))
        td.set("said", NonTensorData(self.said))
        return td.set("action", torch.tensor(0))


def test_objects_that_policies_return_are_copied() -> None:
    batch = collect(partial(InPlace, "graph"), Notary(), frames_per_batch=7)
    lengths = [len(said) for said in batch.get("said").tolist()]
    assert lengths == list(range(lengths[0], lengths[0] + 7))
    row = [int(each.nodes[0, 0]) for each in batch.get("observation").tolist()]
    assert row == [0, 1, 2, 0, 1, 2, 0]


# --- the facades of vector environments -----------------------------------------------------------


class Reuses(InfoEnv):
    """Returns the same array and the same dict every time."""

    def __init__(self, length: int) -> None:
        super().__init__(length, reuse=True)
        self.told: dict[str, Any] = {"place": np.zeros(2, np.float32)}

    def reset(self, **options: Any) -> Any:
        obs, info = super().reset(**options)
        self.told["place"][:] = -1
        self.told.update(info)
        return obs, self.told

    def step(self, action: int) -> Any:
        *rest, info = super().step(action)
        self.told["place"][:] = info["place"]
        self.told.update(t=info["t"], stage=info["stage"])
        return (*rest, self.told)


def test_final_infos_and_observations_of_vector_environments() -> None:
    envs = VectorEnv(
        [partial(Reuses, 2), partial(Reuses, 3)],
        num_workers=1,
        autoreset_mode=AutoresetMode.SAME_STEP,
    )
    try:
        envs.reset(seed=0)
        for t in range(1, 7):
            obs, _, terminated, _, info = envs.step(np.zeros(2, np.int64))
            assert obs[:, 1].tolist() == [t % 2, t % 3]
            for i, length in enumerate((2, 3)):
                if not terminated[i]:
                    assert info["t"][i] == t % length
                    continue
                assert info["final_obs"][i].tolist() == [length, length]
                assert info["final_info"]["t"][i] == length
                assert info["final_info"]["stage"][i] == "end"
                assert info["final_info"]["place"][i].tolist() == [length, length]
                assert info["t"][i] == 0
    finally:
        envs.close()


class OneMemory(CountingEnv):
    """All environments of the class observe in the same array, which a failing step has written
    into.
    """

    memory = np.zeros(2, np.float32)

    def __init__(self, length: int, fails_at: int) -> None:
        super().__init__(length)
        self.fails_at = fails_at

    def _observe(self) -> Any:
        self.memory[:] = self.length, self.t
        return self.memory

    def step(self, action: int) -> Any:
        returned = super().step(action)
        if self.t == self.fails_at:
            self.memory[:] = -1
            raise ArithmeticError
        return returned


def test_observations_of_vector_environments_in_memory_that_they_share() -> None:
    lengths = [partial(OneMemory, 5, 0), partial(OneMemory, 9, 3)]
    envs = VectorEnv(
        lengths,
        num_workers=1,
        on_failure="restart",
        autoreset_mode=AutoresetMode.SAME_STEP,
    )
    try:
        obs, _ = envs.reset(seed=0)
        assert obs.tolist() == [[5, 0], [9, 0]]
        for t in (1, 2):
            assert envs.step(np.zeros(2, np.int64))[0].tolist() == [[5, t], [9, t]]
        obs, _, _, truncated, info = envs.step(np.zeros(2, np.int64))
        assert (obs.tolist(), truncated.tolist()) == ([[5, 3], [9, 0]], [False, True])
        assert info["final_obs"][1].tolist() == [9, 2], "the last one that it returned"
    finally:
        envs.close()
