"""What becomes of a batch: hooks, postproc, replay buffers."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from muster import Collector, Trajectories
from muster.collectors.replay_buffer import ReplaySink
from muster.errors import BadOption, EnvError
from muster.testing import FaultyEnv
from tests.fakes.buffers import Adds, Extends
from tests.fakes.words import Words
from tests.tools import assert_accounted, assert_same, column, counting, stable

# --- postproc -------------------------------------------------------------------------------------


def test_postproc_changes_what_is_yielded_and_not_what_rollout_gives():
    with Collector(
        counting(3), None, frames_per_batch=4, total_frames=8, postproc=lambda b: b[:2]
    ) as c:
        assert [b.shape for b in c] == [(2,), (2,)]
        assert c.stats().frames == 8
        assert c.rollout().shape == (4,)


def test_a_postproc_that_returns_nothing_has_changed_the_batch_in_place():
    def double(batch: Any) -> None:
        batch["next", "reward"] *= 2

    with Collector(
        counting(3), None, frames_per_batch=4, total_frames=8, postproc=double
    ) as c:
        assert [column(b, "next", "reward") for b in c] == [[2, 4, 6, 2], [4, 6, 2, 4]]


def test_torchrls_multistep_is_a_postproc():
    multi_step = pytest.importorskip("torchrl.data").MultiStep(gamma=0.5, n_steps=2)
    with Collector(
        counting(4), None, num_envs=2, frames_per_batch=8, postproc=multi_step
    ) as c:
        batch = next(iter(c))
    assert batch.shape == (2, 4)
    assert column(batch, "next", "reward") == [[2.0, 3.5, 5.0, 4.0]] * 2, (
        "r + r' / 2, over no end"
    )
    assert batch["next", "observation"][0, :, 1].tolist() == [2, 3, 4, 4]


# --- extend_buffer=False --------------------------------------------------------------------------


def test_a_time_step_that_the_buffer_refuses_is_there_when_it_takes_it_again():
    buffer = Adds(room=3)
    with Collector(
        counting(5), None, replay_buffer=buffer, extend_buffer=False, frames_per_batch=6
    ) as collector:
        with pytest.raises(OSError, match="full"):
            collector.next()
        buffer.room = None
        collector.next()
        assert [int(row["observation"].reshape(-1)[-1]) for row in buffer.rows] == [
            0,
            1,
            2,
            3,
            4,
            0,
        ], "one batch"
        assert_accounted(collector)


@pytest.mark.parametrize("num_envs", [None, 2])
def test_single_steps_are_in_the_buffer_as_soon_as_they_are_made(num_envs):
    buffer = Adds()
    seen: list[int] = []

    def policy(obs: torch.Tensor) -> torch.Tensor:
        seen.append(len(buffer.rows))
        return torch.zeros(obs.shape[:-1], dtype=torch.int64)

    frames = 4 * (num_envs or 1)
    options = {
        "num_envs": num_envs,
        "frames_per_batch": frames,
        "total_frames": 2 * frames,
        "extend_buffer": False,
    }
    with Collector(counting(3), policy, replay_buffer=buffer, **options) as c:
        assert list(c) == [None, None]
        assert c.stats().frames == 2 * frames
        assert c.stats().batches == 2
        assert_accounted(c)
    assert seen == list(range(8))
    shape = () if num_envs is None else (num_envs,)
    assert {row.shape for row in buffer.rows} == {shape}
    joined = torch.stack([row["next", "reward"].reshape(-1)[0] for row in buffer.rows])
    assert joined.tolist() == [1, 2, 3, 1, 2, 3, 1, 2]
    ids = [
        row["collector", "traj_ids"].reshape(-1)[0].item() // (num_envs or 1)
        for row in buffer.rows
    ]
    assert ids == [0, 0, 0, 1, 1, 1, 2, 2]


def test_single_steps_with_a_limit_and_random_frames_count_whole_batches():
    buffer = Adds()
    calls = []

    def policy(obs: torch.Tensor) -> torch.Tensor:
        calls.append(len(buffer.rows))
        return torch.tensor(0)

    options = {
        "frames_per_batch": 4,
        "total_frames": 12,
        "extend_buffer": False,
        "init_random_frames": 5,
    }
    with Collector(
        counting(9), policy, replay_buffer=buffer, max_frames_per_traj=3, **options
    ) as c:
        list(c)
    assert calls == [0, 8, 9, 10, 11], "the first one shows what the policy returns"
    assert [row["step_count"].item() for row in buffer.rows] == [0, 1, 2] * 4
    assert [row["next", "truncated"].item() for row in buffer.rows] == [
        False,
        False,
        True,
    ] * 4


def test_after_an_error_between_single_steps_the_frames_stay_exact():
    buffer = Adds()
    env = FaultyEnv(2, error=RuntimeError, length=9)
    options = {"frames_per_batch": 4, "total_frames": 8, "extend_buffer": False}
    with Collector(env, None, replay_buffer=buffer, **options) as c:
        with pytest.raises(EnvError):
            list(c)
        assert len(buffer.rows) == 2
        list(c)
        assert c.stats().frames == len(buffer.rows) == 8
        assert [row["next", "reward"].item() for row in buffer.rows] == [
            1,
            2,
            1,
            2,
            3,
            4,
            5,
            6,
        ]
        assert_accounted(c)


def test_rollout_is_a_whole_batch_also_where_a_buffer_takes_steps():
    options: Any = {"num_envs": 2, "frames_per_batch": 8, "extend_buffer": False}
    with Collector(counting(3), None, replay_buffer=Adds(), **options) as c:
        assert c.fake_tensordict().shape == (2, 4)
        batch = c.rollout()
        assert column(batch, "next", "reward") == [[1, 2, 3, 1]] * 2
        assert batch.names == [None, "time"]


@pytest.mark.filterwarnings("error", "ignore::ResourceWarning")
def test_single_steps_are_exact_in_number_too():
    buffer = Adds()
    options = {
        "num_envs": 2,
        "frames_per_batch": 3,
        "total_frames": 6,
        "extend_buffer": False,
    }
    with Collector(counting(9), None, replay_buffer=buffer, **options) as c:
        list(c)
        assert c.stats().frames == 6
        assert c.stats().discarded == {"surplus": 2}
        assert [row["collector", "valid"].tolist() for row in buffer.rows] == [
            [True, True],
            [True, False],
        ] * 2
        assert_accounted(c)


# --- what is impossible ---------------------------------------------------------------------------

IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"extend_buffer": False}, "needs a replay_buffer"),
    (
        {"extend_buffer": False, "replay_buffer": Adds(), "postproc": print},
        "need whole batches",
    ),
    (
        {"extend_buffer": False, "replay_buffer": Adds(), "split_trajs": True},
        "need whole batches",
    ),
    (
        {"extend_buffer": False, "replay_buffer": Adds(), "post_collect_hook": print},
        "need whole batches",
    ),
    (
        {"extend_buffer": False, "replay_buffer": Adds(), "set_truncated": True},
        "need whole batches",
    ),
    (
        {"extend_buffer": False, "replay_buffer": Adds(), "on_episode_done": print},
        "need whole batches",
    ),
    (
        {"extend_buffer": False, "replay_buffer": Adds(), "on_batch": print},
        "on_batch and record need whole batches",
    ),
    (
        {"extend_buffer": False, "replay_buffer": Adds(), "reset_when_done": False},
        "cannot end early",
    ),
    (
        {"extend_buffer": False, "replay_buffer": Extends()},
        "needs replay_buffer.add, which Extends has not",
    ),
    ({"return_same_td": True, "replay_buffer": Extends()}, "give one of them"),
    ({"return_same_td": True, "split_trajs": True}, "leave return_same_td out"),
    ({"split_trajs": True, "trajs_per_batch": 2}, "give one"),
    ({"set_truncated": True, "trajs_per_batch": 2}, "waits for real ones"),
    (
        {"set_truncated": True, "on_episode_done": print},
        "on_episode_done waits for real ones",
    ),
    (
        {"replay_buffer": 3},
        r"replay_buffer is a int: expected .* with extend\(batch\) or add\(transition\)",
    ),
    (
        {"replay_buffer": Extends},
        "replay_buffer is the class Extends: expected an object with extend",
    ),
    ({"interruptor": 3}, "collection_stopped"),
    ({"weight_sync_schemes": {}}, "weight_recv_schemes"),
    *(
        ({name: 3}, f"{name}=3: expected a function")
        for name in ("postproc", "on_step", "on_episode_done", "on_batch")
    ),
    ({"trajs_per_batch": 0}, "trajs_per_batch=0: expected an integer of at least 1"),
]


@pytest.mark.parametrize(("options", "message"), IMPOSSIBLE, ids=stable)
def test_what_contradicts_itself_is_refused_before_an_environment_is_made(
    options, message
):
    def make() -> Any:
        raise AssertionError("made")

    with pytest.raises(BadOption, match=message):
        Collector(make, None, frames_per_batch=8, **options)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("shortest", "first_begun"),
        ("fair", r"rule='fair': this rule is called 'first_begun'"),
    ],
)
def test_rules_that_do_not_exist_are_refused(rule, message):
    with pytest.raises(BadOption, match=message):
        Trajectories(2, rule=rule)


# --- TorchRL's buffers ----------------------------------------------------------------------------


def torchrl_buffer(storage: str = "LazyTensorStorage", **options: Any) -> Any:
    data = pytest.importorskip("torchrl.data")
    return data.ReplayBuffer(
        storage=getattr(data, storage)(100, **options), batch_size=4
    )


@pytest.mark.parametrize("layout", ["batch_major", "time_major"])
def test_torchrls_one_dimensional_buffer_has_one_item_per_frame(layout):
    buffer = torchrl_buffer()
    options = {
        "num_envs": 2,
        "frames_per_batch": 8,
        "total_frames": 16,
        "layout": layout,
    }
    with Collector(counting(3), None, replay_buffer=buffer, **options) as c:
        list(c)
    assert buffer.write_count == 16
    assert buffer[:].shape == (16,)
    assert column(buffer[:], "next", "reward") == [1, 2, 3, 1] * 2 + [2, 3, 1, 2] * 2


def test_cells_that_are_no_transitions_are_no_items():
    buffer = torchrl_buffer()
    with pytest.warns(UserWarning, match="cannot be shared"):
        c = Collector(
            counting(3),
            None,
            num_envs=2,
            frames_per_batch=5,
            total_frames=10,
            replay_buffer=buffer,
        )
    with c:
        list(c)
        assert c.stats().frames == buffer.write_count == 10
    assert column(buffer[:], "next", "reward") == [1, 2, 3, 1, 2, 1, 2, 3, 1, 2]


@pytest.mark.parametrize("storage", ["LazyTensorStorage", "ListStorage"])
def test_single_steps_go_into_torchrls_buffer(storage):
    buffer = torchrl_buffer(storage)
    options = {"frames_per_batch": 4, "total_frames": 8, "extend_buffer": False}
    with Collector(counting(3), None, replay_buffer=buffer, **options) as c:
        assert list(c) == [None, None]
    assert len(buffer) == 8
    rows = buffer[list(range(8))]
    rows = torch.stack(list(rows)) if isinstance(rows, list) else rows
    assert rows["next", "reward"].flatten().tolist() == [1, 2, 3, 1, 2, 3, 1, 2]


# --- objects, and time first ----------------------------------------------------------------------


def in_order(batch: Any) -> list[tuple[Any, ...]]:
    """Every row, environment by environment or line by line, each in order of time; None for
    padding.
    """
    if not isinstance(batch, list) and batch.ndim > 1:
        lines = batch.unbind(1 if batch.names[0] == "time" else 0)
        batch = [row for line in lines for row in line.unbind(0)]
    rows = []
    for row in batch:
        leaves = [
            row.get(key) for key in ("t", "word", ("next", "word"), ("next", "t"))
        ]
        values = [
            v
            if v is None or isinstance(v, str)
            else int(v)
            if torch.is_tensor(v)
            else v.data
            for v in leaves
        ]
        ragged = row.get("rows", None)
        rows.append((*values, str(getattr(ragged, "data", ragged))))
    return rows


WORDS = [(t, f"at {t}", f"at {t + 1}", t + 1) for t in range(5)]
AMOUNTS: dict[str, dict[str, Any]] = {
    "batches": {"frames_per_batch": 16},
    "lines": {"frames_per_batch": 16, "split_trajs": True},
    "episodes": {"frames_per_batch": 16, "trajs_per_batch": 2},
    "padded episodes": {
        "frames_per_batch": 16,
        "trajs_per_batch": 2,
        "traj_format": "pad",
    },
}


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("amount", AMOUNTS)
def test_objects_are_the_same_in_either_layout(amount, ragged):
    options = {"num_envs": 2, "seed": 0, **AMOUNTS[amount]}
    with (
        Collector(partial(Words, 5, ragged=ragged), None, **options) as c,
        Collector(
            partial(Words, 5, ragged=ragged), None, layout="time_major", **options
        ) as other,
    ):
        for _ in range(3):
            batch, time_first = c.next(), other.next()
            if amount != "batches":
                assert batch.shape == time_first.shape
            rows = in_order(time_first)
            assert rows == in_order(batch)
            written = [row[:4] for row in rows if row[1] is not None]
            assert set(written) <= set(WORDS)
            if "episodes" in amount:
                assert written == WORDS * 2
        assert_accounted(other)


def test_objects_of_several_groups_are_the_same_in_either_layout():
    options = {"num_envs": 2, "seed": 0, "frames_per_batch": 24}
    for split in (False, True):
        with (
            Collector(
                [Words, partial(Words, 5)], None, split_trajs=split, **options
            ) as c,
            Collector(
                [Words, partial(Words, 5)],
                None,
                split_trajs=split,
                layout="time_major",
                **options,
            ) as other,
        ):
            for _ in range(2):
                batch, time_first = c.next(), other.next()
                if not split:
                    assert time_first.names == ["time", None, None]
                    time_first = time_first.permute(1, 2, 0)
                for env in np.ndindex(*batch.shape[:-1]):
                    for t in range(batch.shape[-1]):
                        row, as_row = batch[env][t], time_first[env][t]
                        for key in ("word", ("next", "word"), "t"):
                            assert row[key] == as_row[key], (env, t, key)


def test_an_episode_hook_sees_the_same_objects_in_either_layout():
    seen: dict[str, list[Any]] = {"batch_major": [], "time_major": []}
    for layout, episodes in seen.items():
        look = partial(lambda kept, episode: kept.append(in_order(episode)), episodes)
        options = {"num_envs": 2, "frames_per_batch": 16, "layout": layout, "seed": 0}
        with Collector(partial(Words, 5), None, on_episode_done=look, **options) as c:
            for _ in range(3):
                c.next()
    assert (
        seen["time_major"]
        == seen["batch_major"]
        == [[(*row, "None") for row in WORDS]] * 8
    )


class AddsAndExtends(Adds, Extends):
    pass


def collector(**options: Any) -> Collector:
    return Collector(
        [counting(2), counting(3)], None, frames_per_batch=10, seed=0, **options
    )


@pytest.fixture
def batch() -> Any:
    with collector() as c:
        yield c.rollout()


# --- the sink alone: plain objects ----------------------------------------------------------------


@pytest.mark.parametrize("layout", ["batch_major", "time_major"])
@pytest.mark.parametrize(
    ("buffer", "options"), [(Adds, {}), (AddsAndExtends, {"extend": False})]
)
def test_add_gets_transitions_by_environment_and_time(buffer, options, layout):
    buffer = buffer()
    with collector(layout=layout) as c:
        ReplaySink(buffer, **options).write(c.rollout())
        assert c.stats().slots["lent"] == 0, "transitions are copies"
    assert all(item.shape == () for item in buffer.rows)
    observations = [
        [2, 0],
        [2, 1],
        [2, 0],
        [2, 1],
        [2, 0],
        [3, 0],
        [3, 1],
        [3, 2],
        [3, 0],
        [3, 1],
    ]
    assert [item["observation"].tolist() for item in buffer.rows] == observations
    assert [item["next", "reward"].item() for item in buffer.rows] == [
        1,
        2,
        1,
        2,
        1,
        1,
        2,
        3,
        1,
        2,
    ]


def test_a_list_is_a_buffer(batch):
    buffer: list[Any] = []
    ReplaySink(buffer).write(batch)
    assert [item.shape for item in buffer] == [(5,), (5,)]


# --- the sink alone: TorchRL's --------------------------------------------------------------------


@pytest.mark.parametrize("make", ["ReplayBuffer", "TensorDictReplayBuffer"])
@pytest.mark.parametrize(
    ("storage", "options"),
    [
        ("LazyTensorStorage", {}),
        ("LazyMemmapStorage", {}),
        ("LazyTensorStorage", {"ndim": 2}),
        ("ListStorage", {}),
    ],
)
def test_torchrls_storages(tmp_path, make, storage, options):
    data = pytest.importorskip("torchrl.data")
    if storage == "LazyMemmapStorage":
        options = {**options, "scratch_dir": str(tmp_path)}
    buffer = getattr(data, make)(
        storage=getattr(data, storage)(100, **options), batch_size=4
    )
    with collector() as c:
        batch = c.rollout()
        expected, keys = batch.clone(), set(batch.keys(True, True))
        ReplaySink(buffer).write(batch)
        assert set(batch.keys(True, True)) == keys, (
            "the batch has no more columns than before"
        )
        del batch
        assert c.stats().slots["lent"] == 0
        assert len(buffer) == 10
        if not options.get("ndim"):
            stored = buffer[:]
            stored = torch.stack(list(stored)) if isinstance(stored, list) else stored
            assert_same(stored, expected.reshape(-1), ignore=("index",))
        sample = buffer.sample()
        assert sample.shape == (4,)
        follows = (
            sample["next", "observation"][..., 1] == sample["observation"][..., 1] + 1
        )
        assert follows.all()


def test_torchrls_prioritized_buffer():
    data = pytest.importorskip("torchrl.data")
    try:
        buffer = data.TensorDictPrioritizedReplayBuffer(
            alpha=0.7, beta=0.5, storage=data.LazyTensorStorage(100), batch_size=4
        )
    except RuntimeError as error:
        pytest.skip(f"this TorchRL has no prioritized sampler: {error}")
    with Collector(counting(3), None, frames_per_batch=6) as c:
        ReplaySink(buffer).write(c.rollout())
    assert len(buffer) == 6
    assert "index" in buffer.sample().keys()  # noqa: SIM118
