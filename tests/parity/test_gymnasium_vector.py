"""``muster.compat.gymnasium.VectorEnv`` returns what ``SyncVectorEnv`` returns, and is used like
it.
"""

from __future__ import annotations

import gc
import inspect
import multiprocessing
import random
import sys
import time
from copy import deepcopy
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.error import (
    AlreadyPendingCallError,
    ClosedEnvironmentError,
    NoAsyncCallError,
)
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from muster.compat.gymnasium import VectorEnv
from muster.errors import (
    BadOption,
    CollectorClosed,
    CollectorTimeout,
    EnvError,
    MusterError,
)
from muster.testing import CountingEnv, InfoEnv, SpaceEnv
from tests.fakes.fault_runs import all_gone
from tests.fakes.vector_faults import Closing, Drawing, Gated, Telling
from tests.waits import open_files
from tests.warned import warnings_are_errors

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="worker processes")

BOX = spaces.Box(-1, 1, (2, 3), np.float32)
cart_pole = partial(gymnasium.make, "CartPole-v1", max_episode_steps=20)
SPACES = {
    "image": spaces.Box(0, 255, (16, 16, 3), np.uint8),
    "discrete": spaces.Discrete(7, start=2),
    "multi": spaces.MultiDiscrete([3, 5]),
    "binary": spaces.MultiBinary(4),
    "dict": spaces.Dict({"b": BOX, "a": spaces.Dict({"n": spaces.Discrete(5)})}),
    "tuple": spaces.Tuple((BOX, spaces.Discrete(3), spaces.Dict({"x": BOX}))),
    "text": spaces.Text(6),
    "graph": spaces.Graph(BOX, None),
    "mixed": spaces.Dict({"words": spaces.Text(4), "box": BOX}),
}


def assert_equal(a: Any, b: Any) -> None:
    """Two results have the same structure, values, types and dtypes."""
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, (tuple, list)) or (
        isinstance(a, np.ndarray) and a.dtype == object
    ):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)
    else:
        np.testing.assert_array_equal(a, b)
        assert getattr(a, "dtype", None) == getattr(b, "dtype", None)


def both(
    env_fns: list[Any], steps: int, *, num_workers: int = 2, **options: Any
) -> None:
    """Both vector environments return the same in these steps."""
    ours, theirs = (
        VectorEnv(env_fns, num_workers=num_workers, **options),
        SyncVectorEnv(env_fns, **options),
    )
    assert ours.metadata == theirs.metadata
    for name in (
        "observation_space",
        "single_observation_space",
        "action_space",
        "single_action_space",
    ):
        assert getattr(ours, name) == getattr(theirs, name)
    assert_equal(ours.reset(seed=5), theirs.reset(seed=5))
    theirs.action_space.seed(1)
    for _ in range(steps):
        actions = theirs.action_space.sample()
        got, expected = ours.step(actions), theirs.step(actions)
        assert_equal(got, expected)
        ended = got[2] | got[3]
        if ours.autoreset_mode is AutoresetMode.DISABLED and ended.any():
            masks = [{"reset_mask": ended.copy(), "other": 1} for _ in range(2)]
            assert_equal(ours.reset(options=masks[0]), theirs.reset(options=masks[1]))
            assert masks[0] == {"other": 1}
    assert_equal(
        ours.reset(seed=[3, None, 4][: len(env_fns)])[1],
        theirs.reset(seed=[3, None, 4][: len(env_fns)])[1],
    )
    ours.close()
    theirs.close()


# --- the same results -----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", AutoresetMode)
def test_infos_may_have_the_names_of_those_of_muster(mode: Any) -> None:
    names = [["muster"], ["final_obs", "muster"]]
    makers = [lambda names=names: Telling(3, names) for names in names]
    both(makers, 8, autoreset_mode=mode)


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_episodes_and_infos_are_those_of_sync_vector_env(
    mode: Any, num_workers: int
) -> None:
    both(
        [lambda n=n: InfoEnv(n) for n in (1, 2, 5)],
        12,
        num_workers=num_workers,
        autoreset_mode=mode,
    )


@pytest.mark.parametrize("mode", AutoresetMode)
def test_cart_pole_has_the_trajectories_of_sync_vector_env(mode: Any) -> None:
    both([cart_pole] * 3, 60, autoreset_mode=mode)


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_observations_and_actions_in_every_space(space: str, mode: Any) -> None:
    actions = SPACES["tuple" if space in ("text", "graph", "mixed") else space]
    both(
        [lambda: SpaceEnv(deepcopy(SPACES[space]), actions)] * 3, 7, autoreset_mode=mode
    )


def test_environments_get_the_actions_as_they_were_given() -> None:
    with_actions = VectorEnv([lambda: SpaceEnv(BOX, BOX)] * 2, num_workers=2)
    with_actions.reset(seed=0)
    given = np.arange(12, dtype=np.float64).reshape(2, 2, 3) / 7
    with_actions.step(given)
    with_actions.step(torch.from_numpy(given).numpy())
    for i, got in enumerate(with_actions.get_attr("actions")):
        assert_equal(got, [given[i], given[i]])
    with_actions.close()


def test_results_larger_than_the_shared_memory_travel_as_messages() -> None:
    """Actions of 800 kB, and last observations of that size in the infos."""
    large = spaces.Box(-1, 1, (300, 350), np.float64)
    both(
        [lambda: SpaceEnv(deepcopy(large), large, 2)] * 2,
        4,
        autoreset_mode=AutoresetMode.SAME_STEP,
    )


def test_spaces_that_differ() -> None:
    env_fns = [
        lambda high=high: SpaceEnv(
            spaces.Box(0, high, (2,), np.float32), spaces.Discrete(2)
        )
        for high in (1, 2)
    ]
    with pytest.raises(RuntimeError, match="Environment 1 has the observation space"):
        VectorEnv(env_fns, num_workers=2)
    both(env_fns, 4, observation_mode="different")
    single = spaces.Box(0, 5, (2,), np.float32)
    both(env_fns, 4, observation_mode=(spaces.Box(0, 5, (2, 2), np.float32), single))
    with pytest.raises(RuntimeError, match="Environment 0 has the observation space"):
        VectorEnv(env_fns, observation_mode=(BOX, BOX))
    with pytest.raises(ValueError, match="observation_mode='equal'"):
        VectorEnv(env_fns, observation_mode="equal")
    with pytest.raises(RuntimeError, match="Environment 1 has the action space"):
        VectorEnv([lambda n=n: SpaceEnv(BOX, spaces.Discrete(n)) for n in (2, 3)])


@pytest.mark.parametrize("copy", [True, False])
def test_returned_observations_are_copies_unless_not_wanted(copy: bool) -> None:
    envs = VectorEnv([lambda: CountingEnv(9)] * 2, copy, num_workers=2)
    first, _ = envs.reset()
    envs.step(np.zeros(2, int))
    envs.step(np.zeros(2, int))
    assert first[:, 1].tolist() == ([0, 0] if copy else [2, 2])
    envs.close()


# --- calls ----------------------------------------------------------------------------------------


def test_calls_and_attributes_reach_each_environment() -> None:
    class Callable(CountingEnv):
        def plus(self, a: int, *, b: int) -> int:
            return self.t + a + b

        def render(self) -> Any:
            return np.full((2, 2), self.t)

    envs = VectorEnv([Callable] * 3, num_workers=2)
    envs.reset(seed=[4, 5, 6])
    envs.step(np.zeros(3, int))
    assert envs.call("plus", 10, b=100) == (111, 111, 111)
    assert envs.get_attr("seeds") == ([4], [5], [6])
    assert_equal(envs.np_random_seed, (4, 5, 6))
    envs.set_attr("length", [7, 8, 9])
    assert envs.get_attr("length") == (7, 8, 9)
    envs.set_attr("length", 4)
    assert envs.call("length") == (4, 4, 4)
    assert [frame.tolist() for frame in envs.render()] == [[[1, 1], [1, 1]]] * 3
    with pytest.raises(ValueError, match="2 values were given for 3"):
        envs.set_attr("length", [1, 2])
    with pytest.raises(EnvError, match="no_such_name") as caught:
        envs.get_attr("no_such_name")
    assert isinstance(caught.value.__cause__, AttributeError)
    envs.close()


def test_wrappers_of_gymnasium_work() -> None:
    ours = RecordEpisodeStatistics(
        VectorEnv([lambda: CountingEnv(3)] * 2, num_workers=2)
    )
    theirs = RecordEpisodeStatistics(SyncVectorEnv([lambda: CountingEnv(3)] * 2))
    ours.reset(), theirs.reset()
    for _ in range(9):
        got, expected = ours.step(np.zeros(2, int)), theirs.step(np.zeros(2, int))
        for infos in (got[-1], expected[-1]):
            infos.get("episode", {}).pop("t", None)
            infos.get("episode", {}).pop("_t", None)
        assert_equal(got, expected)
    ours.close()


# --- AsyncVectorEnv -------------------------------------------------------------------------------


def test_every_public_member_of_async_vector_env_is_there_or_says_why_not() -> None:
    envs = VectorEnv([lambda: CountingEnv(3)] * 2, num_workers=2)
    theirs = {
        name
        for name in {*dir(AsyncVectorEnv), *AsyncVectorEnv.__annotations__}
        if not name.startswith("_")
    }
    absent = {"processes", "parent_pipes", "error_queue"}
    assert absent < theirs
    assert {name for name in theirs if not hasattr(envs, name)} == absent
    for name in (*absent, "envs"):
        with pytest.raises(
            AttributeError, match=f"VectorEnv.{name} is not available: "
        ):
            getattr(envs, name)
    with pytest.raises(
        AttributeError, match="'VectorEnv' object has no attribute 'no_such_name'"
    ):
        _ = envs.no_such_name
    assert (
        envs.shared_memory,
        envs.daemon,
        envs.context,
        envs.worker,
        envs.max_concurrency,
    ) == (
        True,
        True,
        None,
        None,
        None,
    )
    assert len(envs.env_fns) == 2
    options = inspect.signature(AsyncVectorEnv.__init__).parameters
    found = inspect.signature(VectorEnv.__init__).parameters
    assert {*options} <= {*found}
    assert all(found[name].default == options[name].default for name in options)
    for method in (
        "reset_async",
        "reset_wait",
        "step_async",
        "step_wait",
        "call_async",
        "call_wait",
        "close_extras",
    ):
        ours, expected = (
            inspect.signature(getattr(kind, method)).parameters
            for kind in (VectorEnv, AsyncVectorEnv)
        )
        assert [(p.name, p.kind, p.default) for p in ours.values()] == [
            (p.name, p.kind, p.default) for p in expected.values()
        ]
    envs.close()


@pytest.mark.parametrize("space", ["image", "dict", "tuple", "text"])
@pytest.mark.parametrize("shared_memory", [True, False])
def test_without_shared_memory_it_is_the_same(space: str, shared_memory: bool) -> None:
    actions = SPACES["discrete" if space == "text" else space]
    fns = [lambda: SpaceEnv(deepcopy(SPACES[space]), actions)] * 3
    ours, theirs = (
        VectorEnv(fns, num_workers=2, shared_memory=shared_memory),
        SyncVectorEnv(fns),
    )
    assert type(ours.observations) is type(
        theirs._observations
    )  # before the first reset, too
    assert_equal(ours.reset(seed=5), theirs.reset(seed=5))
    theirs.action_space.seed(1)
    for _ in range(5):
        action = theirs.action_space.sample()
        assert_equal(ours.step(action), theirs.step(action))
        assert_equal(ours.observations, theirs._observations)
    assert (ours._workers.rows.obs is None) == (not shared_memory or space == "text")
    ours.close()


def test_calls_are_sent_and_waited_for() -> None:
    ours, theirs = (
        kind([partial(InfoEnv, n) for n in (1, 2, 5)], **options)
        for kind, options in both_kinds()
    )
    for envs in (ours, theirs):
        envs.reset_async(seed=3, options={"a": 1})
    assert_equal(ours.reset_wait(), theirs.reset_wait())
    for _ in range(7):
        for envs in (ours, theirs):
            envs.step_async(np.zeros(3, int))
        assert_equal(ours.step_wait(), theirs.step_wait())
    for envs in (ours, theirs):
        envs.call_async("get_wrapper_attr", "t")
    assert ours.call_wait() == theirs.call_wait()
    for envs in (ours, theirs):
        envs.reset_async(seed=[1, None, 2])
    assert_equal(ours.reset_wait(timeout=60), theirs.reset_wait(timeout=60))
    for envs in (ours, theirs):
        envs.close()


def both_kinds() -> list[Any]:
    return [(VectorEnv, {"num_workers": 2}), (AsyncVectorEnv, {"context": "fork"})]


BEGIN: dict[str, Any] = {
    "reset": lambda envs: envs.reset_async(),
    "step": lambda envs: envs.step_async(np.zeros(2, int)),
    "call": lambda envs: envs.call_async("spec"),
}
REFUSED: dict[str, Any] = {
    "reset": lambda envs: envs.reset(),
    "reset_async": lambda envs: envs.reset_async(
        options={"reset_mask": None}
    ),  # a wrong mask is found later
    "step": lambda envs: envs.step(np.zeros(2, int)),
    "step_async": lambda envs: envs.step_async(np.zeros(2, int)),
    "call": lambda envs: envs.call("spec"),
    "get_attr": lambda envs: envs.get_attr("spec"),
    "render": lambda envs: envs.render(),
    "set_attr": lambda envs: envs.set_attr("length", 3),
}


@pytest.mark.parametrize("pending", BEGIN)
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
def test_calls_in_a_wrong_order_raise_what_async_vector_env_raises(
    pending: str, mode: Any
) -> None:
    for kind, options in both_kinds():
        envs = kind([lambda: CountingEnv(9)] * 2, autoreset_mode=mode, **options)
        envs.reset()
        for name in BEGIN:
            with pytest.raises(
                NoAsyncCallError,
                match=f"`{name}_wait` without any prior call to `{name}_async`",
            ) as no:
                getattr(envs, f"{name}_wait")()
            assert no.value.name == name
        BEGIN[pending](envs)
        for call in REFUSED.values():
            with pytest.raises(
                AlreadyPendingCallError,
                match=f"pending call to `{pending}` to complete",
            ) as raised:
                call(envs)
            assert raised.value.name == pending
        for name in {*BEGIN} - {pending}:
            with pytest.raises(NoAsyncCallError, match=f"`{name}_wait` without"):
                getattr(envs, f"{name}_wait")()
        getattr(envs, f"{pending}_wait")()
        assert (
            envs.step(np.zeros(2, int))[0][:, 1].tolist()
            == [2 if pending == "step" else 1] * 2
        )
        envs.close()
        for call in (
            *BEGIN.values(),
            *REFUSED.values(),
            *(lambda envs, n=n: getattr(envs, f"{n}_wait")() for n in BEGIN),
        ):
            with pytest.raises(ClosedEnvironmentError):
                call(envs)


@pytest.fixture
def gate(tmp_path: Any) -> Any:
    """The file for which ``Gated`` environments wait.

    At the end it is there, so that nothing waits.
    """
    yield tmp_path / "gate"
    (tmp_path / "gate").touch()


@pytest.mark.skipif(sys.platform != "linux", reason="a start method")
@pytest.mark.parametrize("timeout", [0, 0.05])
@pytest.mark.parametrize("call", ["reset", "step", "call", "large", "take"])
def test_a_timeout_raises_and_what_comes_next_is_right(
    call: str, timeout: float, gate: Any
) -> None:
    envs = VectorEnv([partial(Gated, str(gate))] * 3, num_workers=2)
    gate.touch()
    envs.reset(seed=3)
    envs.step(np.zeros(3, int))
    gate.unlink()
    begin: dict[str, Any] = {
        "reset": lambda: envs.reset_async(seed=7),
        "step": lambda: envs.step_async(np.zeros(3, int)),
        "call": lambda: envs.call_async("wait"),
        "large": lambda: envs.call_async(
            "large"
        ),  # the result has no room in shared memory
        "take": lambda: envs.call_async(
            "take", bytes(1 << 20)
        ),  # the argument has none
    }
    begin[call]()
    waited = call if call in ("reset", "step") else "call"
    before = time.monotonic()
    with pytest.raises(
        multiprocessing.TimeoutError,
        match=f"`{waited}_wait` has timed out after {timeout}",
    ) as caught:
        getattr(envs, f"{waited}_wait")(timeout)
    assert isinstance(caught.value, CollectorTimeout)
    assert time.monotonic() - before < 15
    with pytest.raises(NoAsyncCallError):
        getattr(envs, f"{waited}_wait")()
    gate.touch()
    if waited == "call":
        assert envs.get_attr("t") == (1, 1, 1)
        assert envs.step(np.zeros(3, int))[0][:, 1].tolist() == [2, 2, 2]
    else:
        with pytest.raises(MusterError, match="After CallTimeout .* call reset"):
            envs.step(np.zeros(3, int))
        with pytest.raises(MusterError, match="After CallTimeout .* call reset"):
            envs.reset(options={"reset_mask": np.array([True, False, False])})
    assert envs.reset(seed=[4, 5, 6])[0][:, 1].tolist() == [0, 0, 0]
    assert [seeds[-1] for seeds in envs.get_attr("seeds")] == [4, 5, 6]
    begin[call]()
    getattr(envs, f"{waited}_wait")(timeout=60)
    assert envs.reset()[0][:, 1].tolist() == [0, 0, 0]
    assert envs.step(np.zeros(3, int))[0][:, 1].tolist() == [1, 1, 1]
    envs.close()


@pytest.mark.skipif(sys.platform != "linux", reason="a start method")
@pytest.mark.parametrize(
    "options", [{"terminate": True}, {"timeout": 0}, {"timeout": 0.05}]
)
@pytest.mark.parametrize("pending", ["reset", "step", "call"])
def test_close_with_a_pending_call_warns_and_kills_after_the_timeout(
    pending: str, options: Any, gate: Any
) -> None:
    envs = VectorEnv(
        [partial(Gated, str(gate))] * 2, num_workers=2, timeouts={"close": 60.0}
    )
    gate.touch()
    envs.reset()
    gate.unlink()
    pids = [handle.process.child.pid for handle in envs._workers._slices.handles]
    begin = {**BEGIN, "call": lambda envs: envs.call_async("wait")}[pending]
    begin(envs)
    before = time.monotonic()
    with pytest.warns(
        UserWarning,
        match=f"Calling `close` while waiting for a pending call to `{pending}`",
    ) as warned:
        envs.close(**options)
    assert warned[0].filename == __file__
    assert time.monotonic() - before < 30  # far less than the deadline for closing
    assert all_gone(pids, 10)
    envs.close()
    with pytest.raises(ClosedEnvironmentError):
        envs.reset()


@pytest.mark.parametrize(
    ("options", "closed"),
    [({}, True), ({"timeout": 60}, True), ({"terminate": True}, False)],
)
def test_environments_are_closed_unless_the_workers_are_terminated(
    options: Any, closed: bool, tmp_path: Any
) -> None:
    marks = [tmp_path / str(i) for i in range(2)]
    envs = VectorEnv([partial(Closing, str(mark)) for mark in marks], num_workers=2)
    envs.reset()
    with warnings_are_errors():
        envs.close(**options)
    assert [mark.exists() for mark in marks] == [closed] * 2
    if not options.get("terminate"):
        marks[0].unlink()
        envs = VectorEnv([partial(Closing, str(mark)) for mark in marks], num_workers=1)
        envs.reset()
        envs.step_async(np.zeros(2, int))
        with pytest.warns(UserWarning, match="pending call to `step`"):
            envs.close(**options)
        assert marks[0].exists()


def test_an_error_is_raised_by_the_wait() -> None:
    envs = VectorEnv([lambda: CountingEnv(9)] * 2, num_workers=2)
    envs.reset()
    envs.call_async("no_such_name")
    with pytest.raises(EnvError, match="no_such_name") as caught:
        envs.call_wait()
    assert isinstance(caught.value.__cause__, AttributeError)
    assert envs.step(np.zeros(2, int))[0][:, 1].tolist() == [1, 1]  # a call is no step
    envs.close()


@pytest.mark.parametrize(
    "name", ["reset", "step", "close", "_setattr", "_check_spaces"]
)
def test_call_refuses_what_has_a_method_of_its_own(name: str) -> None:
    envs = VectorEnv([lambda: CountingEnv(3)] * 2, num_workers=1)
    with pytest.raises(
        ValueError,
        match=f"Trying to call function `{name}` with `call`, use `{name}` directly",
    ):
        envs.call(name)
    envs.reset()
    envs.close()


def test_a_step_before_any_reset_is_one_as_in_sync_vector_env() -> None:
    results = []
    for make in (partial(VectorEnv, num_workers=2), SyncVectorEnv):
        envs = make([lambda: CountingEnv(3)] * 2)
        results.append(envs.step(np.zeros(2, int)))
        envs.close()
    assert_equal(*results)
    envs = VectorEnv([cart_pole] * 2, num_workers=1)
    with pytest.raises(EnvError, match="ResetNeeded"):
        envs.step(np.zeros(2, int))
    envs.close()


def test_options_of_async_vector_env_are_refused_only_if_they_cannot_be() -> None:
    fns = [lambda: CountingEnv(3)] * 4
    with pytest.raises(BadOption, match="worker= is not possible"):
        VectorEnv(fns, worker=lambda *args: None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot find context for 'threads'"):
        VectorEnv(fns, context="threads")  # type: ignore[arg-type]
    with pytest.raises(
        BadOption, match="context='spawn' and start_method='forkserver' differ"
    ):
        VectorEnv(fns, context="spawn", start_method="forkserver")
    for wrong in (0, 1.5, True, "2"):
        with pytest.raises(ValueError, match="max_concurrency"):
            VectorEnv(fns, max_concurrency=wrong)  # type: ignore[arg-type]
    with pytest.raises(BadOption, match="num_workers=3 and max_concurrency=2"):
        VectorEnv(fns, num_workers=3, max_concurrency=2)
    for options, workers in (
        ({"max_concurrency": 1}, 1),
        ({"max_concurrency": 3, "num_workers": 3}, 3),
        ({"context": "fork", "daemon": False, "num_workers": 1, "worker": None}, 1),
    ):
        envs = VectorEnv(fns, **options)
        assert envs.daemon == options.get("daemon", True)
        assert len(envs._workers._slices.handles) == workers
        envs.reset()
        assert envs.step(np.zeros(4, int))[1].tolist() == [1] * 4
        envs.close()


# --- global generators ----------------------------------------------------------------------------


def drawn(envs: Any, seed: Any, *, by_call: bool = True) -> list[Any]:
    found = [envs.reset(seed=seed)]
    for t in range(9):
        found.append(envs.step(np.arange(envs.num_envs) * t % 3))
        if by_call and t == 4:
            found.append(envs.call("draw"))
    return found


@pytest.mark.parametrize(
    ("mode", "from_torch"),
    [(AutoresetMode.NEXT_STEP, False), (AutoresetMode.SAME_STEP, True)],
)
def test_environments_that_draw_from_global_generators_are_reproducible(
    mode: Any, from_torch: bool
) -> None:
    runs = []
    for workers in (1, 2, 4):
        fns = [partial(Drawing, n, from_torch=from_torch) for n in (3, 4, 5, 2)]
        envs = VectorEnv(fns, num_workers=workers, autoreset_mode=mode)
        assert len(set(envs.get_attr("made"))) == 4
        runs += [drawn(envs, 0), drawn(envs, 0)]
        other = drawn(envs, 100)
        envs.close()
    for run in runs[1:]:
        assert_equal(run, runs[0])
    first = runs[0][0][0]
    assert len({*first.ravel().tolist()}) == first.size
    assert not np.isin(other[0][0], first).any()


def test_a_reset_of_one_environment_with_a_seed_leaves_the_streams_of_others() -> None:
    runs = []
    for number in (1, 2):
        envs = VectorEnv(
            [Drawing] * 3, num_workers=1, autoreset_mode=AutoresetMode.DISABLED
        )
        first = envs.reset(seed=0)
        envs.step(np.zeros(3, int))
        mask = np.arange(3) == number
        again = envs.reset(seed=[0, 1, 2], options={"reset_mask": mask})
        assert_equal(again[0][number], first[0][number])
        runs.append(envs.step(np.zeros(3, int))[0])
        envs.close()
    np.testing.assert_array_equal(runs[0][0], runs[1][0])
    assert not np.isin(runs[0][1:], runs[1][1:]).any()


def test_streams_without_a_seed_differ_between_environments_and_runs() -> None:
    seen = []
    for workers in (1, 2):
        envs = VectorEnv([Drawing] * 2, num_workers=workers)
        seen += drawn(envs, None)[0][0].ravel().tolist()
        envs.close()
    assert len(set(seen)) == 8


def test_the_callers_generators_are_not_touched() -> None:
    before = (
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.get_rng_state().tolist(),
    )
    envs = VectorEnv([Drawing] * 2, num_workers=2)
    drawn(envs, 0)
    envs.close()
    assert (
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.get_rng_state().tolist(),
    ) == before


# --- misuse, and the end --------------------------------------------------------------------------


def test_misuse_is_an_error_at_once() -> None:
    with pytest.raises(BadOption, match="env_fns is empty"):
        VectorEnv([])
    with pytest.raises(BadOption, match="no phase 'stpe'"):
        VectorEnv([cart_pole], timeouts={"stpe": 1})
    with pytest.raises(BadOption, match="timeouts=0"):
        VectorEnv([cart_pole], timeouts=0)  # type: ignore[arg-type]
    with pytest.raises(BadOption, match="on_failure='drop'"):
        VectorEnv([cart_pole], on_failure="drop")  # type: ignore[arg-type]
    envs = VectorEnv([cart_pole] * 2, autoreset_mode="Disabled")
    envs.reset()
    for mask, error in (
        (None, TypeError),
        (np.ones(2), TypeError),
        (np.ones(3, bool), ValueError),
    ):
        with pytest.raises(error, match="reset_mask"):
            envs.reset(options={"reset_mask": mask})
    with pytest.raises(ValueError, match="reset_mask"):
        envs.reset(options={"reset_mask": np.zeros(2, bool)})
    with pytest.raises(ValueError, match="1 seeds were given for 2"):
        envs.reset(seed=[1])
    with pytest.raises(ValueError, match="3 actions were given for 2"):
        envs.step(np.zeros(3, int))
    with pytest.raises(BadOption, match="without a step") as raised:
        envs.step_wait()
    assert isinstance(raised.value, NoAsyncCallError)
    envs.step_async(np.zeros(2, int))
    for call in (
        lambda: envs.step_async(np.zeros(2, int)),
        envs.reset,
        lambda: envs.get_attr("spec"),
    ):
        with pytest.raises(BadOption, match="step_wait") as raised:
            call()
        assert isinstance(raised.value, AlreadyPendingCallError)
    assert envs.step_wait()[1].tolist() == [1, 1]
    envs.close()
    envs.close()
    with pytest.raises(CollectorClosed) as closed:
        envs.step(np.zeros(2, int))
    assert isinstance(closed.value, ClosedEnvironmentError)


def test_without_autoreset_an_ended_episode_is_not_stepped() -> None:
    envs = VectorEnv(
        [lambda n=n: CountingEnv(n) for n in (1, 5)],
        autoreset_mode=AutoresetMode.DISABLED,
    )
    envs.reset()
    envs.step(np.zeros(2, int))
    with pytest.raises(
        gymnasium.error.ResetNeeded, match=r"environments \[0\] have ended"
    ):
        envs.step(np.zeros(2, int))
    obs, _ = envs.reset(options={"reset_mask": np.array([True, False])})
    assert obs[:, 1].tolist() == [0, 1]
    assert envs.step(np.zeros(2, int))[0][:, 1].tolist() == [1, 2]
    envs.close()


def test_an_environment_that_cannot_be_made_says_which() -> None:
    def fails() -> Any:
        raise ValueError("no simulator")

    with pytest.raises(
        EnvError, match=r"environment 2: env_fns\[2\] raised ValueError: no simulator"
    ) as caught:
        VectorEnv([cart_pole, cart_pole, fails], num_workers=2)
    assert caught.value.phase == "construct"
    assert isinstance(caught.value.__cause__, ValueError)


def test_nothing_is_left_behind() -> None:
    VectorEnv([cart_pole] * 2, num_workers=2).close()  # starts the fork server
    gc.collect()
    before = open_files()
    envs = VectorEnv([lambda: CountingEnv(3)] * 4, num_workers=2)
    envs.reset()
    pids = set(
        envs.call("__class__")
        and [handle.process.child.pid for handle in envs._workers._slices.handles]
    )
    envs.step_async(np.zeros(4, int))  # is not waited for
    envs.close()
    assert all_gone(pids)
    del envs
    gc.collect()
    assert open_files() == before
    forgotten = VectorEnv([lambda: CountingEnv(3)] * 2, num_workers=2)
    forgotten.reset()
    del forgotten
    gc.collect()
    assert open_files() == before


def test_a_fork_of_the_program_is_refused() -> None:
    from tests.faults.test_forks import in_fork

    envs = VectorEnv([lambda: CountingEnv(3)] * 2, num_workers=2)
    envs.reset()

    def step() -> str:
        try:
            envs.step(np.zeros(2, int))
        except MusterError as error:
            return type(error).__name__
        return "stepped"

    assert in_fork(step) == "ForkedProcess"
    assert envs.step(np.zeros(2, int))[1].tolist() == [1, 1]
    envs.close()


# --- a training loop ------------------------------------------------------------------------------


def trained(make_envs: Any) -> list[float]:
    """Losses of a small actor-critic with a loop as people write it for ``gymnasium.vector``."""
    torch.manual_seed(0)
    envs = make_envs([cart_pole for _ in range(4)])
    assert isinstance(envs.single_action_space, spaces.Discrete)
    net = torch.nn.Sequential(
        torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)
    )
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    losses = []
    obs, done = torch.Tensor(envs.reset(seed=1)[0]), torch.zeros(4)
    for _ in range(3):
        log_probs, values, rewards, dones = [], [], [], []
        for _ in range(16):
            out = net(obs)
            choice = torch.distributions.Categorical(logits=out[:, :2])
            action = choice.sample()
            log_probs.append(choice.log_prob(action))
            values.append(out[:, 2])
            dones.append(done)
            next_obs, reward, terminations, truncations, _ = envs.step(action.numpy())
            rewards.append(torch.tensor(reward, dtype=torch.float32))
            obs, done = (
                torch.Tensor(next_obs),
                torch.Tensor(np.logical_or(terminations, truncations)),
            )
        following = net(obs)[:, 2].detach()
        loss = torch.zeros(())
        for t in reversed(range(16)):
            going_on = 1 - (dones[t + 1] if t < 15 else done)
            following = rewards[t] + 0.99 * following * going_on
            advantage = following - values[t]
            loss = loss + (advantage.pow(2) - log_probs[t] * advantage.detach()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    envs.close()
    return losses


def test_a_training_loop_is_the_same_with_one_name_changed() -> None:
    assert trained(VectorEnv) == trained(SyncVectorEnv)
