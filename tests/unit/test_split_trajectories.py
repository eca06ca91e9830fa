"""One line per trajectory: against a loop that cuts by hand, and against TorchRL."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

from muster import Collector
from muster.episodes.segment import split_trajectories
from muster.errors import BadOption
from tests.tools import assert_same, collect, counting


def batch_of(
    ids: Any, done: Any = None, valid: Any = None, **columns: Any
) -> TensorDict:
    """A batch in the shape of ``ids``; its column "row" numbers the rows from 1."""
    ids = torch.as_tensor(ids)
    done = (
        torch.zeros(ids.shape, dtype=torch.bool)
        if done is None
        else torch.as_tensor(done).bool()
    )
    entries = {
        "row": 1 + torch.arange(ids.numel()).reshape(ids.shape),
        "next": {"done": done.unsqueeze(-1)},
        "collector": {"traj_ids": ids}
        | ({} if valid is None else {"valid": torch.as_tensor(valid).bool()}),
    }
    return TensorDict(
        entries | columns, ids.shape, names=[*[None] * (ids.ndim - 1), "time"]
    )


def by_hand(batch: TensorDict) -> list[list[int]]:
    """Row numbers, line by line."""
    ids = batch["collector", "traj_ids"]
    valid = batch.get(("collector", "valid"), torch.ones_like(ids, dtype=torch.bool))
    lines: list[list[int]] = []
    for index in np.ndindex(*ids.shape[:-1]):
        before = None
        for t in range(ids.shape[-1]):
            at = (*index, t)
            if not valid[at] or ids[at] == -1:
                before = None
                continue
            if before is None or ids[at] != before:
                lines.append([])
            lines[-1].append(int(batch["row"][at]))
            before = None if batch["next", "done"][at] else ids[at]
    return lines


@st.composite
def batches(draw):
    shape = (*draw(st.sampled_from([(), (1,), (3,), (2, 2)])), draw(st.integers(1, 7)))
    column = lambda values: np.array(  # noqa: E731
        draw(
            st.lists(
                st.sampled_from(values),
                min_size=math.prod(shape),
                max_size=math.prod(shape),
            )
        )
    ).reshape(shape)
    valid = column([0, 1, 1]) if draw(st.booleans()) else None
    return batch_of(column([-1, 0, 4, 4]), column([0, 0, 1]), valid)


@given(batches(), st.sampled_from([-1, 0]))
def test_lines_equal_cutting_by_hand(batch, pad_id):
    lines = by_hand(batch)
    if not lines:
        with pytest.raises(BadOption, match="nothing to split"):
            split_trajectories(batch)
        return
    got = split_trajectories(batch, pad_id=pad_id)
    longest = max(map(len, lines))
    assert got.shape == (len(lines), longest)
    assert got.names == [None, "time"]
    assert got["row"].tolist() == [line + [0] * (longest - len(line)) for line in lines]
    assert got["collector", "mask"].tolist() == [
        [i < len(line) for i in range(longest)] for line in lines
    ]
    ids = batch["collector", "traj_ids"].flatten()
    assert got["collector", "traj_ids"].tolist() == [
        [int(ids[row - 1]) for row in line] + [pad_id] * (longest - len(line))
        for line in lines
    ]


def test_a_repeated_id_gives_two_lines():
    got = split_trajectories(batch_of([7, 7, 3, 7, 7, 7], [0, 0, 0, 0, 1, 0]))
    assert got["row"].tolist() == [[1, 2], [3, 0], [4, 5], [6, 0]]


def test_the_result_is_a_copy_and_the_batch_is_not_changed():
    with Collector(
        counting(3), None, num_envs=2, frames_per_batch=8, seed=0
    ) as collector:
        batch = collector.rollout()
        before = batch.clone()
        split = split_trajectories(batch)
        split.apply_(lambda leaf: leaf.fill_(1))
        assert_same(batch, before)
        assert batch.names == [None, "time"]


def test_objects_are_padded_with_none():
    words = [[f"{b}{t}" for t in range(3)] for b in range(2)]
    lists = NonTensorStack(
        *(NonTensorStack(*(NonTensorData([b, t]) for t in range(3))) for b in range(2))
    )
    batch = batch_of(
        [[0, 0, 2], [1, 1, 1]],
        text=NonTensorStack.from_list(words),
        inner={"lists": lists},
        same="x",
    )
    got = split_trajectories(batch)
    assert got.get("text").tolist() == [
        ["00", "01", None],
        ["02", None, None],
        ["10", "11", "12"],
    ]
    assert got.get(("inner", "lists")).tolist()[0] == [[0, 0], [0, 1], None]
    assert got.get("same").tolist()[1] == ["x", None, None]
    assert batch.get("text").tolist() == words
    assert batch["same"] == "x"


def test_entries_with_dimensions_of_their_own_keep_them():
    agents = TensorDict({"obs": torch.ones(2, 3, 4, 5)}, [2, 3, 4])
    got = split_trajectories(batch_of([[0, 0, 2], [1, 1, 1]], agents=agents))
    assert got["agents"].batch_size == (3, 3, 4)
    assert got["agents", "obs"][..., 0, 0].tolist() == [[1, 1, 0], [1, 0, 0], [1, 1, 1]]


def test_rows_of_changing_shapes_are_copied_and_padded():
    ragged = LazyStackedTensorDict(
        *(TensorDict({"x": torch.full((n,), float(n))}) for n in (1, 2, 3)), stack_dim=0
    )
    got = split_trajectories(batch_of([0, 0, 1], ragged=ragged))
    lines = [[got[i, t]["ragged", "x"].tolist() for t in range(2)] for i in range(2)]
    assert lines == [[[1.0], [2.0, 2.0]], [[3.0, 3.0, 3.0], [0.0]]]
    got[0, 0]["ragged", "x"].zero_()
    assert [row["x"][0].item() for row in ragged.tensordicts] == [1, 2, 3]


def test_without_an_end_column_ids_decide():
    batch = batch_of([0, 0, 1])
    del batch["next"]
    assert split_trajectories(batch)["row"].tolist() == [[1, 2], [3, 0]]


def test_the_column_of_ends_may_be_another():
    batch = batch_of(
        [0, 0, 0], agents={"end": torch.tensor([[0, 0], [0, 1], [0, 0]]).bool()}
    )
    assert split_trajectories(batch, done_key=("agents", "end"))["row"].tolist() == [
        [1, 2],
        [3, 0],
    ]


def test_a_batch_without_trajectory_ids_is_refused():
    batch = batch_of([0, 0])
    del batch["collector"]
    with pytest.raises(BadOption, match="collector.traj_ids.*track_traj_ids=True"):
        split_trajectories(batch)


@pytest.mark.filterwarnings("ignore")
def test_lines_equal_torchrls():
    utils = pytest.importorskip("torchrl.collectors.utils")
    batch = collect([counting(2), counting(5)], None, frames_per_batch=18, seed=0)
    expected, got = (
        utils.split_trajectories(batch.clone()),
        split_trajectories(batch, pad_id=0),
    )
    assert_same(expected, got)
    assert expected.shape == got.shape
