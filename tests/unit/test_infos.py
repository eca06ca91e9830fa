"""The option ``info``: what is stored, what is refused, and that everything behind a rollout keeps
the columns.
"""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorWrapper

import muster
from muster import Collector, DistributedCollector, MultiSyncCollector
from muster.capabilities import Bypasses, capability
from muster.envs.envpool import EnvPoolVectorEnv
from muster.envs.infos import with_infos
from muster.envs.stacked import StackedEnvs
from muster.errors import BadEnvOutput, BadOption, EnvError
from muster.memory.slots import Layout, Slot
from muster.recording import Recorder, load
from muster.rollout.columns import lane_columns
from muster.rollout.options import RolloutOptions
from muster.testing import CountingEnv, InfoEnv, TorchCartPole
from tests.fakes.envpool import GymnasiumEnvPool
from tests.tools import assert_accounted, assert_same, collect, recorded
from tests.warned import warnings_are_errors

NAMES = {"t": None, "stage": None, "goal": None, **InfoEnv.SPACES}
SUCCESS = {"success": spaces.Discrete(2)}


class ToldEnv(CountingEnv):
    """Gives what it is told to: ``at(0)`` by reset, ``at(t)`` by step ``t``."""

    def __init__(self, at: Any, length: int = 3) -> None:
        super().__init__(length)
        self.at = at

    def reset(self, **options: Any) -> Any:
        return super().reset(**options)[0], self.at(0)

    def step(self, action: int) -> Any:
        return (*super().step(action)[:4], self.at(self.t))


def told(at: Any, length: int = 3) -> Any:
    return lambda: ToldEnv(at, length)


# --- which columns there are ----------------------------------------------------------------------


def test_true_takes_what_a_reset_and_a_step_show_and_warns_once_of_others() -> None:
    with Collector(InfoEnv, None, frames_per_batch=6, info=True) as c:
        with pytest.warns(UserWarning, match="info 'even' is ignored") as caught:
            batch = c.rollout()
        assert sorted(str(w.message).split("'")[1] for w in caught) == [
            "even",
            "success",
        ]
        fields = {"t", "stage", "half", "place", "goal"}
        assert set(batch["info"].keys()) == fields | {
            f"_{name}" for name in fields - {"goal"}
        }
        assert batch["info", "t"].dtype == torch.int64
        assert batch["info", "half"].dtype == torch.float64
        assert batch["info", "place"].shape == (6, 2)
        assert batch["info", "goal", "near"].dtype == torch.bool
        with warnings_are_errors():
            c.rollout()


def test_names_select_whole_dicts_and_parts_of_them() -> None:
    at = lambda t: {"a": {"x": t, "y": {"z": 2 * t}}, "b": t}  # noqa: E731
    batch = collect(told(at), None, frames_per_batch=3, info=["a"])
    assert set(batch["info"].keys(True, True)) == {
        ("a", "x"),
        ("a", "_x"),
        ("a", "y", "z"),
        ("a", "y", "_z"),
    }
    batch = collect(told(at), None, frames_per_batch=3, info=[("a", "y", "z"), "b"])
    assert set(batch["info"].keys(True, True)) == {
        ("a", "y", "z"),
        ("a", "y", "_z"),
        "b",
        "_b",
    }
    assert batch["next", "info", "a", "y", "z"].tolist() == [2, 4, 6]
    given = {"a": spaces.Dict({"x": spaces.Box(0, 9, (), np.float32)})}
    batch = collect(told(at), None, frames_per_batch=3, info=given)
    assert batch["next", "info", "a", "x"].equal(torch.tensor([1.0, 2.0, 3.0]))


def test_whole_numbers_at_first_and_fractions_later_are_floats() -> None:
    batch = collect(
        told(lambda t: {"cost": t / 2 if t else 0}), None, frames_per_batch=4, info=True
    )
    assert batch["next", "info", "cost"].tolist() == [0.5, 1.0, 1.5, 0.5]
    assert batch["info", "cost"].tolist() == [0.0, 0.5, 1.0, 0.0]


def test_without_the_option_there_are_none_and_steps_are_the_environments_own() -> None:
    with Collector(InfoEnv, None, num_envs=2, frames_per_batch=4) as c:
        assert "info" not in set(c.rollout().keys())
        env = c._engine.source.pool.local.groups[0].env
        assert [step.__func__ for step in env._steps] == [InfoEnv.step] * 2


def test_one_more_environment_is_made_and_closed() -> None:
    make, made = recorded(InfoEnv)
    with Collector(make, None, num_envs=2, frames_per_batch=6, info=["t"]) as c:
        c.rollout()
        assert [env.executed for env in made] == [3, 3, 1]
        assert [env.closed for env in made] == [0, 0, 1]
    make, made = recorded(InfoEnv)
    with Collector([make] * 3, None, frames_per_batch=6, info=["t"]):
        assert len(made) == 4, "one for all groups"
    make, made = recorded(InfoEnv)
    with Collector(make, None, frames_per_batch=6, info=SUCCESS):
        assert len(made) == 1, "spaces say everything"


@pytest.mark.parametrize(
    "given",
    [lambda env: env, lambda env: lambda: env],
    ids=["instance", "factory of one"],
)
def test_environments_that_exist_are_reset_and_never_stepped(given: Any) -> None:
    env = InfoEnv()
    with Collector(given(env), None, frames_per_batch=3, info=True, seed=7) as c:
        assert (env.executed, env.closed, len(env.seeds)) == (0, 0, 1)
        with pytest.warns(UserWarning, match="is ignored"):
            batch = c.rollout()
        assert set(batch["info"].keys()) == {"t", "_t", "stage", "_stage"}
        assert env.seeds[1] == 7
    with pytest.raises(
        BadOption,
        match=r"'half' was in the infos .* Give the spaces .* info=\{'half': spaces",
    ):
        Collector(given(InfoEnv()), None, frames_per_batch=3, info=["half"])


def test_the_users_generators_stay_where_they_are() -> None:
    def drawing(t: int) -> Any:
        np.random.rand(), random.random(), torch.rand(())
        return {"t": t}

    np.random.seed(0), random.seed(0), torch.manual_seed(0)
    expected = np.random.rand(), random.random(), torch.rand(())
    np.random.seed(0), random.seed(0), torch.manual_seed(0)
    with Collector(told(drawing), None, frames_per_batch=3, info=True) as c:
        c.rollout()
    assert (np.random.rand(), random.random(), torch.rand(())) == expected


def test_environments_that_are_left_out_of_a_step_have_none() -> None:
    env = with_infos(
        StackedEnvs([InfoEnv(), InfoEnv()]), {"t": spaces.Discrete(9)}, dict
    )
    (lane,) = Slot(Layout(2, 2, lane_columns(env.spec, (), RolloutOptions()))).lanes
    env.reset(lane.arrays, 0, [0, 1], None)
    step = env.start(lane)
    step(0)
    bypassing = capability(env, Bypasses)
    assert bypassing is not None
    bypassing.bypass([1])
    step(1)
    assert lane.arrays["info", "t"].tolist() == [[0, 0], [1, 1], [2, 0]]
    assert lane.arrays["info", "_t"].tolist() == [
        [True, True],
        [True, True],
        [True, False],
    ]


# --- refusals and errors --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "info", "message"),
    [
        ("CartPole-v1", True, "no number, array or text at all was in the infos"),
        ("CartPole-v1", ["success"], "Give the spaces of what comes later"),
        (InfoEnv, [("goal", "far")], r"\('goal', 'far'\)"),
        (lambda: TorchCartPole(2), True, "steps on a device"),
        (InfoEnv, "t", "expected True, a list of names"),
        (InfoEnv, [], "expected True, a list of names"),
        (InfoEnv, ["_t"], "do not begin with '_'"),
        (InfoEnv, [3], "expected True, a list of names"),
        (
            InfoEnv,
            {"t": spaces.Sequence(spaces.Discrete(2))},
            "expected numbers, arrays, text",
        ),
        (InfoEnv, {"t": 3}, "Space"),
        (
            told(lambda t: {"x": "text" if t else 1}),
            True,
            "'x' has .* at first, and then",
        ),
        (
            told(lambda t: {"x": {"y": 1} if t else 1}),
            True,
            "is a dict, and also a value",
        ),
    ],
)
def test_refusals(env: Any, info: Any, message: str) -> None:
    with pytest.raises((BadOption, TypeError), match=message):
        Collector(env, None, frames_per_batch=4, info=info)


@pytest.mark.parametrize("value", ["text", 0.5, np.zeros(2), None], ids=str)
def test_a_field_that_changes_shape_or_kind_is_an_error_that_says_so(
    value: Any,
) -> None:
    make = told(lambda t: {"x": value if t == 3 else t})
    with Collector(
        [told(lambda t: {"x": t}, 9), make], None, frames_per_batch=8, info=True
    ) as c:
        if value is None:  # absent, as far as anyone can tell
            assert c.rollout()["next", "info", "_x"].tolist() == [
                [True] * 4,
                [True, True, False, True],
            ]
            return
        with pytest.raises(
            EnvError,
            match=r"ToldEnv\[0\]: info 'x' is .*expected shape \(\), dtype int64",
        ) as caught:
            c.rollout()
        assert caught.value.env_index == 0
        assert_accounted(c)


def test_the_error_names_the_worker() -> None:
    make = told(lambda t: {"x": "text" if t == 2 else t})
    with (
        MultiSyncCollector(
            [told(lambda t: {"x": t}), make], None, frames_per_batch=8, info=True
        ) as c,
        pytest.raises(EnvError, match="info 'x' is str 'text'") as caught,
    ):
        c.rollout()
    assert (caught.value.worker, caught.value.env_id) == (1, 1)


def test_a_failing_environment_is_named_where_one_more_cannot_be_made() -> None:
    made: list[Any] = []

    def once() -> Any:
        if made:
            raise RuntimeError("the port is taken")
        made.append(InfoEnv())
        return made[0]

    with pytest.raises(EnvError, match="the port is taken"):
        Collector(once, None, frames_per_batch=4, info=True)
    assert made[0].closed == 1


# --- infos of batches that are not one for each environment ---------------------------------------

ODD: dict[str, Any] = {  # of two environments
    "scalar": {"odd": 7},
    "array of no dimension": {"odd": np.array(7)},
    "text": {"odd": "ab"},
    "object": {"odd": object()},
    "list of another length": {"odd": [1, 2, 3]},
    "rows of different lengths": {"odd": [[1], [2, 3]]},
    "array of another length": {"odd": np.zeros(3)},
    "mask of another length": {"odd": np.zeros(2), "_odd": np.ones(3, bool)},
    "mask that is none": {"odd": np.zeros(2), "_odd": "yes"},
    "mask of numbers": {"odd": np.zeros(2), "_odd": np.array([0.0, 1.0])},
    "nested": {"odd": {"er": 7}},
    "nested mask": {"odd": {"er": np.zeros(2)}, "_odd": np.ones(3, bool)},
    "objects": {"odd": np.array([object(), object()])},
    "dicts": {"odd": [{"a": 1}, {"a": 2}]},
    "action_mask": {"action_mask": 7, "odd": 7},
}


class Odd(VectorWrapper):
    """Adds something to the infos of a batch, from its step ``since`` on."""

    def __init__(self, env: Any, more: Any, since: int = 0) -> None:
        super().__init__(env)
        self.more, self.left = more, since

    def _with(self, info: Any) -> Any:
        self.left -= 1
        return info | self.more if self.left < 0 else info

    def reset(self, **options: Any) -> Any:
        obs, info = self.env.reset(**options)
        return obs, self._with(info)

    def step(self, actions: Any) -> Any:
        *rest, info = self.env.step(actions)
        return (*rest, self._with(info))


def odd(more: Any, mode: Any = AutoresetMode.NEXT_STEP, since: int = 0) -> Any:
    return lambda: Odd(vector(mode)(), more, since)


@pytest.mark.parametrize("mode", AutoresetMode, ids=str)
@pytest.mark.parametrize("kind", ODD)
def test_fields_that_nobody_asked_for_are_no_error(kind: str, mode: Any) -> None:
    options = {"frames_per_batch": 24, "seed": 0, "info": ["t", "place"]}
    expected = collect(vector(mode), **options)
    assert_same(collect(odd(ODD[kind], mode), **options), expected)
    assert_same(collect(odd(ODD[kind], mode, since=3), **options), expected)


@pytest.mark.parametrize("kind", ODD)
def test_with_all_infos_odd_ones_are_left_out_with_a_warning(kind: str) -> None:
    with pytest.warns(UserWarning, match=r"info .*odd.* is ignored: it (is|has) "):
        batch = collect(odd(ODD[kind]), frames_per_batch=24, info=True)
    assert "odd" not in set(batch["info"].keys())
    assert batch["next", "info", "t"].max() == 4


@pytest.mark.parametrize("kind", ODD)
def test_an_odd_field_that_was_asked_for_is_named_in_a_typed_error(kind: str) -> None:
    with pytest.raises(BadOption, match=r"info: SyncVectorEnv: .*odd.* (is|has) "):
        Collector(odd(ODD[kind]), None, frames_per_batch=24, info=["t", "odd"])
    name, space = (
        (("odd", "er") if "nested" in kind else ("odd",)),
        spaces.Box(0, 9, (), np.float64),
    )
    given = (
        {name[0]: spaces.Dict({name[1]: space})} if len(name) > 1 else {name[0]: space}
    )
    with Collector(
        odd(ODD[kind], since=3), None, frames_per_batch=24, info=given
    ) as collector:
        with pytest.raises(
            EnvError, match=r"SyncVectorEnv.*info .*odd.* (is|has) "
        ) as caught:
            collector.rollout()
        assert "ValueError" not in str(caught.value)
        assert collector.stats().in_flight == 2 * 2, "the rows before it are kept"
        assert_accounted(collector)


def test_text_of_the_whole_batch_is_no_text_of_its_environments() -> None:
    with (
        Collector(
            odd({"odd": "ab"}), None, frames_per_batch=24, info={"odd": spaces.Text(9)}
        ) as collector,
        pytest.raises(
            EnvError,
            match="info 'odd' is str 'ab', expected a value for each of 2 environments",
        ),
    ):
        collector.rollout()


def test_a_field_without_a_mask_is_of_all_environments() -> None:
    batch = collect(
        odd({"odd": [5, 6], "_odd": None}), frames_per_batch=24, info=["odd"]
    )
    assert batch["info", "odd"].tolist() == [[5] * 12, [6] * 12]
    assert batch["info", "_odd"].all()


@pytest.mark.parametrize("info", [None, 3, [{}], [{}, {}, {}], "ab"], ids=str)
def test_infos_that_are_no_infos(info: Any) -> None:
    class NoInfos(VectorWrapper):
        def step(self, actions: Any) -> Any:
            return (*self.env.step(actions)[:4], info)

    make = lambda: NoInfos(vector(AutoresetMode.SAME_STEP)())  # noqa: E731
    with Collector(
        make, None, frames_per_batch=4, info={"t": spaces.Discrete(9)}
    ) as collector:
        with pytest.raises(BadEnvOutput, match="SyncVectorEnv.* returned the infos? "):
            collector.rollout()
        assert_accounted(collector)
    with pytest.raises(BadEnvOutput, match="SyncVectorEnv.* returned the infos? "):
        Collector(make, None, frames_per_batch=4, info=["t"])


@pytest.mark.parametrize("info", [[], 3, "text"], ids=str)
def test_infos_of_single_environments_that_are_no_dicts(info: Any) -> None:
    class NoDict(CountingEnv):
        def step(self, action: int) -> Any:
            return (*super().step(action)[:4], info)

    with pytest.raises(
        BadEnvOutput, match=r"NoDict\[0\] returned the info .*expected a dict"
    ):
        Collector(NoDict, None, frames_per_batch=4, info=["t"])


def test_a_value_of_rows_of_different_lengths_is_named() -> None:
    make = told(lambda t: {"x": [[1], [2, 3]] if t == 2 else np.zeros(2)})
    with Collector(make, None, frames_per_batch=4, info=["x"]) as collector:
        with pytest.raises(
            EnvError,
            match=r"info 'x' is list \[\[1\], \[2, 3\]\], expected shape \(2,\)",
        ):
            collector.rollout()
        assert_accounted(collector)


# --- other adapters -------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffled", [False, True])
def test_envpool(shuffled: bool) -> None:
    pool = lambda: EnvPoolVectorEnv(GymnasiumEnvPool(CountingEnv, 3, shuffled=shuffled))  # noqa: E731
    batch = collect(pool, None, frames_per_batch=24, info=True, max_frames_per_traj=2)
    assert batch["info", "elapsed_step"].tolist() == [[0, 1] * 4] * 3
    assert batch["next", "info", "elapsed_step"].tolist() == [[1, 2] * 4] * 3
    assert batch["info", "env_id"].tolist() == [[i] * 8 for i in range(3)]


class Leftovers(VectorWrapper):
    """Leaves values where masks say that there are none."""

    def step(self, actions: Any) -> Any:
        *rest, info = self.env.step(actions)
        if "even" in info:
            info["even"] = np.where(info["_even"], info["even"], 7)
        return (*rest, info)


def test_what_masks_leave_out_is_zero() -> None:
    make = lambda: Leftovers(vector(AutoresetMode.DISABLED)())  # noqa: E731
    batch = collect(make, None, frames_per_batch=24, info=InfoEnv.SPACES)
    assert batch["next", "info", "_even"].tolist() == [
        [t % 3 == 1 for t in range(12)],
        [False, True] * 6,
    ]
    assert batch["next", "info", "even"].equal(batch["next", "info", "_even"].long())


def test_dm_env() -> None:
    pytest.importorskip("dm_env")
    from tests.unit.test_dm_env import DmChain

    with Collector(DmChain, None, frames_per_batch=60, info=["discount"], seed=0) as c:
        batch = c.rollout()
    assert (batch["next", "info", "discount"] == 0).equal(
        batch["next", "terminated"].squeeze(-1)
    )


def test_agents_have_infos_of_their_own() -> None:
    pytest.importorskip("pettingzoo")
    from tests.unit.test_pettingzoo import Shifts

    class Paid(Shifts):
        def infos(self, agents: Any) -> Any:
            return {agent: {"paid": float(self.t)} for agent in agents}

    batch = collect(
        Paid, None, num_envs=2, frames_per_batch=10, info=["cook_0", "waiter"]
    )
    assert batch["info", "cook_0", "paid"].tolist() == [[0, 1, 2, 3, 0]] * 2
    assert batch["next", "info", "cook_0", "paid"].tolist() == [[1, 2, 3, 0, 1]] * 2
    assert (
        batch["next", "info", "cook_0", "_paid"].tolist()
        == [[True, True, True, False, True]] * 2
    )
    assert batch["next", "info", "waiter", "paid"].tolist() == [[1, 2, 3, 4, 1]] * 2


# --- what comes after -----------------------------------------------------------------------------


def vector(mode: AutoresetMode) -> Any:
    return lambda: SyncVectorEnv(
        [partial(InfoEnv, 3), partial(InfoEnv, 4)],
        autoreset_mode=mode,
        observation_mode="different",
    )


SHAPES: dict[str, Any] = {
    "single": (InfoEnv, {"frames_per_batch": 5}),
    "stacked": (InfoEnv, {"frames_per_batch": 10, "num_envs": 2}),
    "SAME_STEP": (vector(AutoresetMode.SAME_STEP), {"frames_per_batch": 6}),
    "DISABLED": (vector(AutoresetMode.DISABLED), {"frames_per_batch": 6}),
    "waiting": (
        vector(AutoresetMode.SAME_STEP),
        {"frames_per_batch": 6, "reset_when_done": False},
    ),
    "compact": (InfoEnv, {"frames_per_batch": 10, "num_envs": 2, "compact_obs": True}),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_state_goes_on_bit_by_bit(shape: str, tmp_path: Path) -> None:
    env, options = SHAPES[shape]
    with (
        Collector(env, None, info=NAMES, seed=0, **options) as first,
        Collector(env, None, info=NAMES, seed=0, **options) as second,
    ):
        for _ in range(2):
            first.rollout()
        muster.save_state(tmp_path / "state", first.state_dict())
        second.rollout()
        assert second.load_state_dict(tmp_path / "state", trust=True).exact
        for _ in range(4):
            assert_same(first.rollout(), second.rollout())
            assert list(first.episodes) == list(second.episodes)
        assert first.stats().success_rate == second.stats().success_rate


def test_a_state_of_rollouts_that_wait_has_their_infos() -> None:
    options = {"frames_per_batch": 6, "info": NAMES, "seed": 0}
    with (
        muster.MultiAsyncCollector([InfoEnv] * 2, None, **options) as first,
        muster.MultiAsyncCollector([InfoEnv] * 2, None, **options) as second,
    ):
        first.rollout()
        second.load_state_dict(first.state_dict())
        for _ in range(3):
            assert {
                record.info["stage"]
                for record in (second.rollout(), second.episodes)[1]
            } == {"end"}


def test_recordings_keep_the_columns(tmp_path: Path) -> None:
    with (
        Collector(InfoEnv, None, num_envs=2, frames_per_batch=14, info=NAMES) as c,
        Recorder(tmp_path / "r", meta={}) as recorder,
    ):
        batch = c.rollout()
        recorder.write(batch)
    data = load(tmp_path / "r").episode(0)
    assert data["info", "t"].tolist() == [0, 1, 2]
    assert data["next", "info", "success"].tolist() == [0, 0, 0]
    assert data["next", "info", "_success"].tolist() == [False, False, True]
    assert list(data["next", "info", "stage"]) == ["on", "on", "end"]


def yielded(**options: Any) -> Any:
    with Collector(InfoEnv, None, num_envs=2, info=NAMES, **options) as c:
        return next(iter(c))


def test_batches_in_other_forms_have_the_same_infos() -> None:
    plain = collect(InfoEnv, None, num_envs=2, frames_per_batch=18, info=NAMES)
    major = collect(
        InfoEnv, None, num_envs=2, frames_per_batch=18, info=NAMES, layout="time_major"
    )
    assert major["next", "info", "t"].T.equal(plain["next", "info", "t"])
    split = yielded(frames_per_batch=18, split_trajs=True)
    assert split["next", "info", "t"].tolist() == [[1, 2, 3]] * 6
    assert split["next", "info", "_success"].tolist() == [[False, False, True]] * 6
    for form in ("cat", "pad"):
        whole = yielded(frames_per_batch=8, trajs_per_batch=4, traj_format=form)
        assert whole["next", "info", "t"].reshape(-1).tolist() == [1, 2, 3] * 4
        with Collector(
            InfoEnv, None, num_envs=2, frames_per_batch=8, info=NAMES, traj_format=form
        ) as c:
            c.collect(n_episode=3)
            assert [record.info["stage"] for record in c.episodes] == ["end"] * 3
            assert [record.info["success"] for record in c.episodes] == [0] * 3


def test_replay_buffers_get_them() -> None:
    rb = pytest.importorskip("torchrl.data")
    buffer = rb.ReplayBuffer(storage=rb.LazyTensorStorage(20), batch_size=20)
    names = {name: space for name, space in NAMES.items() if name != "stage"}
    with Collector(
        InfoEnv,
        None,
        frames_per_batch=10,
        info=names,
        replay_buffer=buffer,
        total_frames=20,
    ) as c:
        for _ in c:
            pass
    assert sorted(buffer[:]["next", "info", "t"].tolist()) == sorted(
        [t % 3 + 1 for t in range(20)]
    )


@pytest.mark.parametrize(
    "options",
    [
        {"reset_when_done": False},
        {"prev_action_reward": True},
        {"max_decorrelation_steps": 5},
        {"validate": "full"},
        {"set_truncated": True},
        {"init_random_frames": 24},
    ],
    ids=lambda options: next(iter(options)),
)
def test_with_other_options_infos_stay_with_their_observations(options: Any) -> None:
    with Collector(
        InfoEnv, None, num_envs=2, frames_per_batch=24, info=["t"], **options
    ) as c:
        for _ in range(3):
            batch = c.rollout()
            assert batch["info", "t"].equal(batch["observation"][..., 1].long())
            assert batch["next", "info", "t"].equal(
                batch["next", "observation"][..., 1].long()
            )
            valid = (
                batch["collector", "valid"]
                if "valid" in set(batch["collector"].keys())
                else True
            )
            assert batch["info", "_t"].equal(
                torch.ones_like(batch["info", "_t"]) & valid
            )


def test_loggers_get_the_success_rate() -> None:
    records: list[Any] = []
    log = lambda metrics, step: records.append(metrics)  # noqa: E731
    envs = [partial(InfoEnv, length) for length in (3, 4)]
    with Collector(envs, None, frames_per_batch=24, info=SUCCESS, logger=log) as c:
        next(iter(c))
        assert c.stats().success_rate == pytest.approx(3 / 7)
    assert records[0]["collect/success_rate"] == pytest.approx(3 / 7)


def test_nodes_send_infos() -> None:
    options = {"num_envs": 2, "frames_per_batch": 14, "info": NAMES, "seed": 0}
    with Collector([InfoEnv], None, **options) as c:
        expected, records = c.rollout(), list(c.episodes)
    with DistributedCollector(
        [InfoEnv], None, launcher="mp", sync=True, **options
    ) as c:
        batch = c.rollout()
        assert_same(batch.reshape(expected.shape), expected)
        assert list(c.episodes) == records
