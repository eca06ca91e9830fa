"""Every Gymnasium space: stored as returned, drawn within its bounds, refused where it cannot be."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from muster import Collector
from muster.envs.spaces import action_codec, observation_codec
from muster.errors import UnsupportedSpace
from muster.rng import GroupRng
from muster.testing import SpaceEnv
from tests.tools import recorded

WHOLE = {
    dtype: spaces.Box(np.iinfo(dtype).min, np.iinfo(dtype).max, (2,), dtype)
    for dtype in (
        np.int8,
        np.uint8,
        np.int16,
        np.uint16,
        np.int32,
        np.uint32,
        np.int64,
        np.uint64,
    )
}
BOUNDED = [
    *WHOLE.values(),
    spaces.Box(-1.0, 2.0, (3,), np.float32),
    spaces.Box(-1.0, 2.0, (3,), np.float64),
    spaces.Box(-1.0, 2.0, (2, 3), np.float16),
    spaces.Box(np.array([-1.0, 5.0]), np.array([1.0, 5.0]), dtype=np.float64),
    spaces.Box(0.0, 1.0, ()),
    spaces.Box(0.0, 1.0, (0,)),
    spaces.Box(-3, 3, (4,), np.int32),
    spaces.Box(0, 255, (4, 5, 3), np.uint8),
    spaces.Discrete(7),
    spaces.Discrete(3, start=-1),
    spaces.MultiDiscrete([2, 3, 4]),
    spaces.MultiDiscrete([[2, 3], [4, 5]]),
    spaces.MultiDiscrete([2, 3], start=[-1, 10]),
    spaces.MultiBinary(4),
    spaces.MultiBinary((2, 3)),
]
UNBOUNDED = [
    spaces.Box(-np.inf, np.inf, (2,), np.float32),
    spaces.Box(-np.inf, np.inf, (2,), np.int64),
    spaces.Box(1.0, np.inf, (2,), np.float32),
    spaces.Box(-np.inf, -1.0, (2,), np.float64),
    spaces.Box(
        np.array([-np.inf, 0, -np.inf, 0], "f"), np.array([np.inf, np.inf, 0, 1], "f")
    ),
]
COMPOSITE = [
    spaces.Dict(
        {
            "a": spaces.Box(-1, 1, (2,)),
            "b": spaces.Discrete(3),
            "c": spaces.Dict({"d": spaces.MultiBinary(2)}),
        }
    ),
    spaces.Tuple((spaces.Discrete(2), spaces.Box(0, 255, (2, 2), np.uint8))),
    spaces.Dict(
        {
            "t": spaces.Tuple(
                (spaces.Discrete(2), spaces.Dict({"x": spaces.Box(0, 1, ())}))
            ),
            "z": spaces.Discrete(4),
        }
    ),
    spaces.Tuple((spaces.Tuple((spaces.Discrete(2),)), spaces.MultiDiscrete([2, 2]))),
]
OBJECTS = [
    spaces.Text(5),
    spaces.Sequence(spaces.Box(0, 1, (2,))),
    spaces.Sequence(spaces.Discrete(3), stack=True),
    spaces.Graph(spaces.Box(0, 1, (2,)), spaces.Discrete(2)),
    spaces.OneOf([spaces.Discrete(2), spaces.Box(0, 1, (2,))]),
]
MIXED = [
    spaces.Dict({"words": spaces.Text(4), "n": spaces.Discrete(2)}),
    spaces.Tuple((spaces.Text(3), spaces.Box(0, 1, (2,)))),
]
EVERY = [*BOUNDED, *UNBOUNDED, *COMPOSITE, *OBJECTS, *MIXED]


def seeded(space: spaces.Space[Any]) -> spaces.Space[Any]:
    space.seed(0)
    return space


def equal(a: Any, b: Any) -> bool:
    """Two values of any space."""
    if isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in b)
    if isinstance(b, spaces.GraphInstance):
        return all(equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(b, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    return bool(a == b)


def cell(batch: Any, key: tuple[str, ...], index: tuple[int, ...]) -> Any:
    """One entry of a column, as NumPy or as the Python object it is."""
    value = batch.get(key)
    if torch.is_tensor(value):
        return value[index].numpy()
    found = value.tolist()
    for i in index:
        found = found[i]
    return found


def at(
    batch: Any, space: spaces.Space[Any], path: tuple[str, ...], index: tuple[int, ...]
) -> Any:
    """The value of ``space`` that the columns under ``path`` hold at ``index``."""
    if isinstance(space, spaces.Dict):
        return {k: at(batch, s, (*path, k), index) for k, s in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(
            at(batch, s, (*path, str(i)), index) for i, s in enumerate(space.spaces)
        )
    value = cell(batch, path, index)
    return space.dtype.type(value) if isinstance(space, spaces.Discrete) else value


@pytest.mark.parametrize("num_envs", [None, 2])
@pytest.mark.parametrize("space", EVERY, ids=str)
def test_observations_are_stored_as_the_environment_returned_them(space, num_envs):
    make, envs = recorded(lambda: SpaceEnv(seeded(space), spaces.Discrete(2), length=3))
    with Collector(
        make, None, num_envs=num_envs, frames_per_batch=5 * (num_envs or 1)
    ) as collector:
        batch = collector.rollout()
    root = () if isinstance(space, spaces.Dict) else ("observation",)
    for b, env in enumerate(envs):
        seen = iter(env.observations)
        obs = next(seen)
        for t in range(5):
            index = (t,) if num_envs is None else (b, t)
            assert equal(at(batch, space, root, index), obs)
            obs = next(seen)
            assert equal(at(batch, space, ("next", *root), index), obs)
            if t % 3 == 2:  # a reset
                obs = next(seen)


@pytest.mark.parametrize("num_envs", [None, 2])
@pytest.mark.parametrize("space", EVERY, ids=str)
@pytest.mark.filterwarnings("ignore:.*Casting input x to numpy array")
def test_random_actions_are_in_the_space_and_stored_as_the_environment_got_them(
    space, num_envs
):
    make, envs = recorded(lambda: SpaceEnv(spaces.Discrete(2), space))
    with Collector(
        make,
        None,
        num_envs=num_envs,
        frames_per_batch=6 * (num_envs or 1),
        seed=0,
        validate="full",
    ) as c:
        batch = c.rollout()
    for b, env in enumerate(envs):
        assert len(env.actions) == 6
        for t, action in enumerate(env.actions):
            assert space.contains(action), f"{action!r} is not in {space}"
            assert equal(
                at(batch, space, ("action",), (t,) if num_envs is None else (b, t)),
                action,
            )


def test_two_by_two_actions_reach_the_right_environment_and_part():
    space = spaces.Dict(
        {
            "a": spaces.Discrete(100),
            "b": spaces.Tuple((spaces.Discrete(100), spaces.Discrete(100))),
        }
    )
    make, envs = recorded(lambda: SpaceEnv(spaces.Discrete(2), space))

    def policy(obs: torch.Tensor) -> dict[str, Any]:
        return {
            "a": torch.tensor([1, 2]),
            "b": (torch.tensor([3, 4]), torch.tensor([5, 6])),
        }

    with Collector(make, policy, num_envs=2, frames_per_batch=2) as collector:
        batch = collector.rollout()
    assert [env.actions for env in envs] == [
        [{"a": 1, "b": (3, 5)}],
        [{"a": 2, "b": (4, 6)}],
    ]
    assert batch["action", "b", "1"].tolist() == [[5], [6]]


# --- distributions --------------------------------------------------------------------------------


def draws(space: spaces.Space[Any], n: int, seed: int = 0) -> np.ndarray:
    return action_codec(space).sample(GroupRng(seed), (n,))["action",]


def chi_square(values: np.ndarray, bins: int) -> float:
    counts = np.bincount(values, minlength=bins)
    assert len(counts) == bins
    expected = len(values) / bins
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    ("space", "bins"),
    [
        (spaces.Discrete(7, start=-3), 7),
        (spaces.Box(-3, 3, (), np.int8), 7),
        (spaces.Box(2, 9, (), np.uint64), 8),
    ],
    ids=str,
)
def test_integers_are_uniform_over_the_whole_range(space, bins):
    values = draws(space, 8000).astype(np.int64)
    assert (
        chi_square(values - values.min(), bins) < 27
    )  # far out for 6 or 7 degrees of freedom


def test_every_part_of_a_multi_discrete_is_uniform_and_independent():
    drawn = draws(spaces.MultiDiscrete([[2, 3], [4, 5]]), 8000)
    for index, n in (((0, 0), 2), ((0, 1), 3), ((1, 0), 4), ((1, 1), 5)):
        assert chi_square(drawn[(slice(None), *index)], n) < 22
    assert chi_square(drawn[:, 0, 1] * 5 + drawn[:, 1, 1], 15) < 40


def test_floats_are_uniform():
    drawn = draws(
        spaces.Box(np.array([-1.0, 4.0]), np.array([1.0, 8.0]), dtype=np.float64), 8000
    )
    assert chi_square(((drawn[:, 0] + 1) * 4).astype(int), 8) < 27
    assert chi_square(((drawn[:, 1] - 4) * 2).astype(int), 8) < 27


def test_floats_whose_range_overflows_are_uniform_too():
    drawn = draws(
        spaces.Box(np.finfo(np.float64).min, np.finfo(np.float64).max, (), np.float64),
        8000,
    )
    assert np.isfinite(drawn).all()
    assert chi_square((drawn / np.finfo(np.float64).max * 4 + 4).astype(int), 8) < 27


def test_unbounded_boxes_are_normal_and_one_sided_ones_exponential():
    low, high = np.array([-np.inf, 2.0, -np.inf]), np.array([np.inf, np.inf, -2.0])
    drawn = draws(spaces.Box(low, high, dtype=np.float64), 20_000)
    normal, above, below = drawn.T
    assert abs(normal.mean()) < 0.03
    assert abs(normal.std() - 1) < 0.03
    assert abs(np.mean(normal > 1) - 0.1587) < 0.01
    for shifted in (above - 2, -2 - below):
        assert shifted.min() >= 0
        assert abs(shifted.mean() - 1) < 0.03
        assert abs(np.mean(shifted > 1) - np.exp(-1)) < 0.015


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, len(EVERY) - 1)
)
def test_draws_do_not_depend_on_how_they_are_cut(cuts, which):
    codec = action_codec(EVERY[which])
    whole, rng = codec.sample(GroupRng(1), (sum(cuts),)), GroupRng(1)
    parts = [codec.sample(rng, (n,)) for n in cuts]
    for key, drawn in whole.items():
        assert equal(
            np.concatenate([part[key] for part in parts]).tolist(), drawn.tolist()
        )


# --- codecs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("space", EVERY, ids=str)
def test_flatten_and_build_are_inverse(space):
    value = seeded(space).sample()
    codec = action_codec(space)
    leaves = codec.flatten(value)
    assert len(leaves) == len(codec.specs)
    assert equal(codec.build(leaves), value)


@pytest.mark.parametrize(
    "key",
    [
        "action",
        "next",
        "collector",
        "reward",
        "done",
        "terminated",
        "truncated",
        "step_count",
    ],
)
def test_keys_that_a_batch_needs_are_refused_before_a_step(key):
    space = spaces.Dict({key: spaces.Discrete(2), "other": spaces.Discrete(2)})
    with pytest.raises(UnsupportedSpace, match=rf"\['{key}'\].*Rename"):
        Collector(lambda: SpaceEnv(space, spaces.Discrete(2)), None, frames_per_batch=1)


class TwoNames(spaces.Dict):
    """A Dict with the keys 1 and "1", which become the same name."""

    def __init__(self) -> None:
        super().__init__({"1": spaces.Discrete(2)})
        self.spaces[1] = spaces.Discrete(2)


def test_keys_that_become_the_same_are_refused():
    with pytest.raises(UnsupportedSpace, match="share the key '1'"):
        observation_codec(TwoNames())


@pytest.mark.parametrize(
    "empty",
    [spaces.Dict({}), spaces.Tuple(()), spaces.Dict({"a": spaces.Tuple(())})],
    ids=str,
)
def test_spaces_without_any_part_are_refused(empty):
    with pytest.raises(UnsupportedSpace, match="no part"):
        observation_codec(empty)
    with pytest.raises(UnsupportedSpace, match="no part"):
        action_codec(empty)


def test_what_is_no_space_is_refused():
    class Spaceless(gymnasium.Env[Any, Any]):
        observation_space = (4,)
        action_space = spaces.Discrete(2)

    with pytest.raises(UnsupportedSpace, match=r"tuple: \(4,\)"):
        Collector(Spaceless, None, frames_per_batch=1)
