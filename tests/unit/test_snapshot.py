"""A restored environment goes on as if it had never stopped, or says what it could not restore."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import pickle
import socket
import subprocess
import sys
import threading
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import wrappers
from gymnasium.utils import EzPickle
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from muster.restore.checkpoint import load, save
from muster.restore.snapshot import restore, take
from muster.testing import ChainEnv, CountingEnv, TorchCartPole

CLASSIC = [
    "CartPole-v1",
    "Pendulum-v1",
    "Acrobot-v1",
    "MountainCar-v0",
    "MountainCarContinuous-v0",
]
MUJOCO = (
    ["HalfCheetah-v5", "Hopper-v5", "Ant-v5", "Humanoid-v5"]
    if importlib.util.find_spec("mujoco")
    else []
)
ROOT = Path(__file__).parents[2]
drawn = [0]  # how often ``counted`` was called


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MuJoCo writes a log file where it is


def make(name: str) -> gymnasium.Env[Any, Any]:
    return gymnasium.make(name, max_episode_steps=60)


def begun(factory: Any, steps: int = 10, seed: int = 0) -> Any:
    """An environment in the middle of an episode."""
    env = factory() if callable(factory) else make(factory)
    env.reset(seed=seed)
    env.action_space.seed(seed)
    go_on(env, steps)
    return env


def go_on(env: Any, steps: int = 150) -> list[Any]:
    """All bits of what the next steps with sampled actions give, over the ends of episodes."""
    rows = []
    for _ in range(steps):
        obs, reward, terminated, truncated, info = env.step(env.action_space.sample())
        rows.append(
            (
                bits(obs),
                bits(reward),
                bits(terminated),
                bits(truncated),
                str(info.get("episode", {}).get("r")),
            )
        )
        if np.ndim(terminated) == 0 and (terminated or truncated):
            rows.append((bits(env.reset()[0]),))
    return rows


def bits(value: Any) -> Any:
    return np.asarray(value).tobytes()


def assert_goes_on(factory: Any, *, steps: int = 150, trust: bool = True) -> Any:
    """Saves an environment and goes on; fresh and used ones must go on likewise.

    Returns the last one.
    """
    env = begun(factory)
    snapshot = take(env)
    assert snapshot["way"] != "none", snapshot
    expected = go_on(env, steps)
    assert len(set(expected)) > 1, "the steps should differ"
    other = factory() if callable(factory) else make(factory)
    again = factory() if callable(factory) else make(factory)
    assert restore(again, snapshot, trust) is None
    saved_again = take(again)  # before it makes a step
    for used, saved in (
        (other, snapshot),
        (begun(factory, 7, seed=1), snapshot),
        (env, snapshot),
        (again, saved_again),
    ):
        layers = used, used.unwrapped, used.step
        assert restore(used, saved, trust) is None
        assert go_on(used, steps) == expected
        assert (used, used.unwrapped, used.step) == layers
    return other


# --- environments as they are ---------------------------------------------------------------------


@pytest.mark.parametrize("name", CLASSIC)
def test_classic_control_goes_on_without_trust(name):
    for steps in (0, 1, 59, 60, 95):
        env = begun(name, steps)
        snapshot, expected = take(env), go_on(env)
        fresh = make(name)
        assert restore(fresh, snapshot, False) is None
        assert go_on(fresh) == expected


@pytest.mark.parametrize("name", MUJOCO)
def test_mujoco_goes_on(name):
    assert_goes_on(name, steps=300)


@pytest.mark.slow
def test_environments_go_on_in_a_new_process(tmp_path):
    names, file = [*CLASSIC, *MUJOCO], tmp_path / "state"
    envs = {name: begun(name, 15 + n) for n, name in enumerate(names)}
    save(file, {name: take(env) for name, env in envs.items()})
    expected = [row for env in envs.values() for row in go_on(env, 200)]
    code = f"import tests.unit.test_snapshot as t; t.go_on_from({str(file)!r})"
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        check=True,
    )
    assert load(f"{file}.rows") == expected


def go_on_from(file: str) -> None:
    rows: list[Any] = []
    for name, snapshot in load(file).items():
        env = make(name)
        assert restore(env, snapshot, snapshot["way"] == "pickle") is None
        rows += go_on(env, 200)
    save(f"{file}.rows", rows)


@pytest.mark.parametrize("name", ["CartPole-v1", *MUJOCO[:1]])
def test_taking_changes_nothing(name):
    plain, watched = begun(name), begun(name)
    rows = []
    for _ in range(100):
        take(watched)
        rows += go_on(watched, 1)
    assert rows == go_on(plain, 100)


@pytest.mark.skipif(not MUJOCO, reason="MuJoCo is not installed")
def test_equal_mujoco_models_are_stored_once(tmp_path):
    snapshots = [take(begun("Hopper-v5", seed=n)) for n in range(4)]
    model = len(snapshots[0]["shared"][0])
    save(tmp_path / "state", snapshots)
    assert model < (tmp_path / "state").stat().st_size < model + 4 * 200_000
    assert load(tmp_path / "state") == snapshots


@pytest.mark.skipif(not MUJOCO, reason="MuJoCo is not installed")
def test_a_changed_mujoco_model_and_its_data_come_back_as_one():
    env = begun("Hopper-v5")
    env.unwrapped.model.body_mass[1] *= 2
    snapshot, expected, fresh = take(env), go_on(env), make("Hopper-v5")
    assert restore(fresh, snapshot, True) is None
    inner = fresh.unwrapped
    assert inner.data.model is inner.model is inner.mujoco_renderer.model
    assert inner.mujoco_renderer.data is inner.data
    assert go_on(fresh) == expected


@pytest.mark.skipif(not MUJOCO, reason="MuJoCo is not installed")
def test_mujoco_data_anywhere_in_the_graph_come_back_with_their_model():
    env = begun("Hopper-v5")
    inner = begun("Hopper-v5").unwrapped
    env.unwrapped.other = {"model": inner.model, "data": [inner.data]}
    fresh = make("Hopper-v5")
    assert restore(fresh, take(env), True) is None
    other = fresh.unwrapped.other
    assert other["data"][0].model is other["model"] is not fresh.unwrapped.model
    assert (other["data"][0].qpos == inner.data.qpos).all()
    env.unwrapped.other = {"view": inner.data.qpos, "data": inner.data}
    assert "HopperEnv.other['view'] (numpy.ndarray)" in take(env)["reason"]


@pytest.mark.skipif(not MUJOCO, reason="MuJoCo is not installed")
def test_two_mujoco_data_of_one_model_are_a_reason():
    env = begun("Hopper-v5")
    inner = env.unwrapped
    inner.plan = type(inner.data)(inner.model)
    assert "two MjData share one MjModel" in take(env)["reason"]


@pytest.mark.skipif(not MUJOCO, reason="MuJoCo is not installed")
def test_viewers_are_left_out():
    env = begun("Hopper-v5")
    env.unwrapped.mujoco_renderer._viewers["rgb_array"] = (
        threading.Lock()
    )  # as little to be pickled as a window
    fresh = make("Hopper-v5")
    assert restore(fresh, take(env), True) is None
    assert fresh.unwrapped.mujoco_renderer._viewers == {}


def test_windows_are_left_out():
    env = gymnasium.make("CartPole-v1", render_mode="rgb_array")
    env.reset(seed=0)
    frame = env.render()
    fresh = gymnasium.make("CartPole-v1", render_mode="rgb_array")
    assert restore(fresh, take(env), False) is None
    assert (fresh.render() == frame).all()
    env.step(0)
    assert restore(env, take(fresh), False) is None
    assert (env.render() == frame).all()


def stacked_frames() -> Any:
    return wrappers.FrameStackObservation(
        wrappers.RecordEpisodeStatistics(make("CartPole-v1")), 4
    )


def normalized() -> Any:
    return wrappers.TransformReward(
        wrappers.NormalizeObservation(make("Pendulum-v1")), lambda reward: reward * 2
    )


def synchronous() -> Any:
    return SyncVectorEnv([partial(make, "CartPole-v1")] * 2)


def vector() -> Any:
    return gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="vector_entry_point")


@pytest.mark.parametrize(
    "factory",
    [stacked_frames, normalized, synchronous, vector, ChainEnv, lambda: CountingEnv(9)],
)
def test_wrappers_vectors_and_own_environments_go_on(factory):
    assert_goes_on(factory)


def test_processes_are_a_reason():
    env = AsyncVectorEnv(
        [partial(make, "CartPole-v1")], shared_memory=False, context="fork"
    )
    try:
        snapshot = take(env)
        assert "AsyncVectorEnv.parent_pipes[0]" in snapshot["reason"]
        assert restore(env, snapshot, True) == snapshot["reason"]
    finally:
        env.close()


def test_ale_goes_on_from_its_own_state_but_that_is_not_complete():
    ale = pytest.importorskip("ale_py")
    gymnasium.register_envs(ale)
    factory = partial(gymnasium.make, "ALE/Pong-v5", frameskip=(2, 5), obs_type="ram")
    env = begun(factory, 50)
    snapshot, expected, fresh = take(env), go_on(env), factory()
    assert snapshot["way"] == "plain"
    assert "ALE's clone_state leaves out" in (restore(fresh, snapshot, False) or "")
    assert go_on(fresh) == expected


@pytest.mark.parametrize("transformed", [False, True])
def test_torchrl_environments_go_on(transformed):
    envs = pytest.importorskip("torchrl.envs")

    def factory() -> Any:
        env = envs.GymEnv("Pendulum-v1")
        return (
            envs.TransformedEnv(
                env, envs.Compose(envs.StepCounter(20), envs.RewardSum())
            )
            if transformed
            else env
        )

    def go(env: Any, data: Any, actions: list[Any]) -> list[Any]:
        rows = []
        for action in actions:
            data = env.step(data.set("action", action))
            rows.append(
                {
                    key: bits(value)
                    for key, value in data["next"].items(True, True)
                    if key != "pixels"
                }
            )
            data = env.step_mdp(data)
            data = env.reset() if data["done"].any() else data
        return rows

    env = factory()
    env.set_seed(0)
    data, actions = env.reset(), [env.action_spec.rand() for _ in range(50)]
    go(env, data.clone(), actions[:7])
    snapshot, expected, fresh = take(env), go(env, data.clone(), actions), factory()
    assert restore(fresh, snapshot, True) is None
    assert go(fresh, data.clone(), actions) == expected


# --- what pickling loses --------------------------------------------------------------------------


class Helper:
    def __init__(self) -> None:
        self.n = 0


class ConstructedAnew(CountingEnv, EzPickle):
    """Pickles its constructor arguments; ``helper`` makes it need a pickle."""

    def __init__(self) -> None:
        CountingEnv.__init__(self, 5, noise=True)
        EzPickle.__init__(self)
        self.helper = Helper()

    def step(self, action: int) -> Any:
        self.helper.n += 1
        obs, _, *rest = super().step(action)
        return obs, float(self.helper.n), *rest


class MadeByFactory(ConstructedAnew):
    def __reduce__(self) -> Any:
        return make_by_factory, ()


def make_by_factory() -> MadeByFactory:
    return MadeByFactory()


class Inner(ConstructedAnew):
    def __init__(self, kind: type[ConstructedAnew] = ConstructedAnew) -> None:
        super().__init__()
        self.planner = {"env": kind()}  # not a layer, so that it is pickled itself
        self.planner["env"].reset(seed=1)

    def step(self, action: int) -> Any:
        return self.planner["env"].step(action)[:1] + super().step(action)[1:]


class Forgetful(Helper):
    def __getstate__(self) -> dict[str, Any]:
        return {"n": 0}


class Remade(Helper):
    def __reduce__(self) -> Any:
        return Remade, ()


def with_helper(kind: type[Helper]) -> Any:
    env = ConstructedAnew()
    env.helper = kind()
    return env


@pytest.mark.parametrize(
    "factory",
    [
        ConstructedAnew,
        Inner,
        partial(Inner, MadeByFactory),
        partial(with_helper, Forgetful),
        partial(with_helper, Remade),
    ],
)
def test_state_that_pickling_would_lose_is_kept(factory):
    assert_goes_on(factory)


class Holding(CountingEnv):
    def __init__(self, **held: Any) -> None:
        super().__init__(4)
        vars(self).update(held, helper=Helper())


def restored(**held: Any) -> Holding:
    env = Holding()
    assert restore(env, take(Holding(**held)), True) is None
    return env


def test_arrays_that_share_memory_still_do():
    whole = np.arange(12.0).reshape(3, 4)
    fortran = np.asfortranarray(whole)
    env = restored(
        row=whole[1, ::-1], whole=whole, fortran=fortran, column=fortran[1:, 2]
    )
    env.whole[1] = 7
    env.fortran[:] = 8
    assert env.row.tolist() == [7, 7, 7, 7]
    assert env.column.tolist() == [8, 8]
    assert env.fortran.flags.f_contiguous


@pytest.mark.parametrize("protocol", [4, pickle.HIGHEST_PROTOCOL])
def test_arrays_that_were_unpickled_are_saved(protocol):
    """So are those of environments in workers, whose functions have arrays, and after a load."""
    whole = np.arange(12.0).reshape(3, 4)
    given = {"whole": whole, "fortran": np.asfortranarray(whole), "same": whole}
    held = pickle.loads(pickle.dumps(given, protocol))
    held["row"] = held["whole"][1, ::-1]
    held["swapped"] = np.arange(4.0).astype(">f8")
    held["last"] = held["swapped"][3:]
    held["permuted"] = np.zeros((2, 3, 4)).transpose(2, 0, 1) + 1
    held["constant"] = np.frombuffer(b"\1\2", np.uint8)  # cannot be written
    env = Holding(**held)
    for _ in range(3):
        env.whole += 1
        assert env.same is env.whole
        assert env.row.tolist() == env.whole[1, ::-1].tolist()
        assert env.fortran.flags.f_contiguous
        assert not env.constant.flags.writeable
        env.swapped += 1
        assert env.swapped.dtype == ">f8"
        assert env.last.tolist() == env.swapped[3:].tolist()
        assert np.shares_memory(env.permuted, env.permuted.transpose(1, 2, 0).ravel())
        again = Holding()
        assert restore(again, take(env), True) is None
        assert again.whole.tolist() == env.whole.tolist()
        assert again.swapped.tolist() == env.swapped.tolist()
        env = again


def test_snapshots_share_no_memory_with_environments():
    env = CountingEnv()
    env.total, env.many = np.zeros(2), [1]
    snapshot = take(env)
    for _ in range(2):
        env.total += 1
        env.many.append(2)
        assert restore(env, snapshot, False) is None
        assert (env.total.tolist(), env.many) == ([0, 0], [1])


def test_tensors_that_share_memory_still_do():
    whole = torch.arange(12.0).reshape(3, 4)
    env = restored(row=whole[1], whole=whole, transposed=whole.T)
    env.whole += 1
    assert env.row.tolist() == [5, 6, 7, 8]
    assert env.transposed[0].tolist() == [1, 5, 9]


def test_tensors_and_generators_of_torch_are_plain(tmp_path):
    saved, fresh = TorchCartPole(3), TorchCartPole(3)
    saved.reset(seed=0)
    saved.shown = [saved.state, torch.ones(2, dtype=torch.bool), torch.empty(0)]
    save(tmp_path / "state", {"env": take(saved)})
    snapshot = load(tmp_path / "state")["env"]
    assert snapshot["way"] == "plain"
    assert restore(fresh, snapshot, False) is None
    assert fresh.shown[0] is fresh.state
    for _ in range(60):  # several episodes
        expected, got = (
            env.step(torch.ones(3, dtype=torch.int64)) for env in (saved, fresh)
        )
        assert all(map(torch.equal, expected[:4], got[:4]))
    assert (
        saved.state.untyped_storage().data_ptr()
        != fresh.state.untyped_storage().data_ptr()
    )
    assert take(saved)["way"] == take(fresh)["way"] == "plain", "again"


def share() -> dict[str, Any]:
    array, tensor, other = np.zeros(2), torch.zeros(2), torch.zeros(2)
    several = np.zeros((2, 3))
    return {
        "two tensors": [other, other[:1]],
        "of an array": [torch.from_numpy(array)[::2]],
        "an array": [array, torch.from_numpy(array)],
        "an array afterwards": {"tensor": torch.from_numpy(array), "array": array},
        "parts": [several[:, 1:], torch.from_numpy(several[0])],
        "two tensors of an array": [torch.from_numpy(row) for row in (array, array)],
        "a tensor and its array": [tensor, tensor.numpy()],
        "trained": torch.zeros(2, requires_grad=True),
        "half": torch.zeros(2, dtype=torch.bfloat16),
        "transposed": torch.zeros(2, 3).T,
        "conjugated": torch.zeros(2, dtype=torch.complex64).conj(),
    }


SEPARATED = {
    "an array",
    "an array afterwards",
    "parts",
    "two tensors of an array",
    "a tensor and its array",
}


@pytest.mark.parametrize("name", share())
def test_other_tensors_are_not_plain(name):
    env = CountingEnv()
    env.held = share()[name]
    snapshot = take(env)
    assert snapshot["way"] == ("none" if name in SEPARATED else "pickle")
    if name in SEPARATED:
        assert "memory" in snapshot["reason"]


def test_one_object_in_two_places_is_one_object_again():
    many, array = [1, 2], np.zeros(2)
    pickled = restored(a=many, b={"c": many}, d=array, e=[array])
    plain, saved = CountingEnv(), CountingEnv()
    vars(saved).update(a=many, b={"c": many}, d=array, e=[array], me=saved)
    assert take(saved)["way"] == "plain"
    assert restore(plain, take(saved), False) is None
    assert plain.me is plain
    for env in (pickled, plain):
        assert env.a is env.b["c"]
        assert env.d is env.e[0]


def test_an_array_that_nothing_may_write_into_stays_so():
    table = np.arange(3.0)
    table.setflags(write=False)
    pickled = restored(a=table, b=[table], c=Helper())
    plain, saved = CountingEnv(), CountingEnv()
    vars(saved).update(a=table, b=[table], free=np.zeros(2))
    assert take(saved)["way"] == "plain"
    assert restore(plain, take(saved), False) is None
    assert plain.free.flags.writeable
    for env in (plain, pickled):
        assert env.a is env.b[0]
        assert (env.a == [0, 1, 2]).all()
        assert not env.a.flags.writeable


def counted() -> int:
    drawn[0] += 1
    return drawn[0]


def test_functions_come_back_on_their_modules_own_globals():
    count = [10]

    def draw() -> int:
        count[0] += 1
        return count[0] + counted()

    draw()
    before = drawn
    env = restored(draw=draw, direct=lambda: drawn, named=counted)
    drawn[0] = 100
    assert env.draw() == 12 + 101
    assert env.direct() is drawn is before
    assert env.named is counted
    assert count == [11]


def test_weak_references_to_what_comes_back_come_back():
    env = Holding()
    env.part = Helper()
    env.weak = [weakref.ref(env), weakref.ref(env.part)]
    fresh = Holding()
    assert restore(fresh, take(env), True) is None
    assert [reference() for reference in fresh.weak] == [fresh, fresh.part]


def numbers() -> Any:
    yield 1


HELD_BYTES = bytearray(8)


def shared_buffer() -> Any:
    return np.frombuffer(HELD_BYTES, np.uint8)


def shared_part() -> Any:
    return np.frombuffer(memoryview(HELD_BYTES)[2:], np.uint8).reshape(2, 3)


def two_over_one_view() -> Any:
    view = memoryview(bytearray(8))
    return [np.frombuffer(view, np.uint8), np.frombuffer(view[4:], np.uint8)]


def two_over_one_base() -> Any:
    first = np.frombuffer(bytearray(8), np.uint8)
    return [first, np.frombuffer(first.base, np.uint8)]


def array_and_its_view() -> Any:
    first = np.zeros(8, np.uint8)
    return [first, np.asarray(memoryview(first))]


def local_class() -> Any:
    class Local:
        pass

    return Local()


OUTSIDE = Helper()


@pytest.mark.parametrize(
    ("held", "why"),
    [
        (threading.Lock, "(_thread.lock) cannot be saved: TypeError: cannot pickle"),
        (socket.socket, "(socket.socket)"),
        (numbers, "(builtins.generator)"),
        (lambda: open(__file__), "it is an open file"),  # noqa: SIM115
        (shared_buffer, "it is a view into the memory of a bytearray"),
        (shared_part, "it is a view into the memory of a bytearray"),
        (two_over_one_view, "it is a view into the memory of a bytearray"),
        (two_over_one_base, "it is a view into the memory of a bytearray"),
        (array_and_its_view, "it is a view into the memory of a ndarray"),
        (lambda: torch.zeros(2).numpy(), "a view into the memory of a Tensor"),
        (lambda: (ctypes.c_double * 2)(), "it belongs to this process"),
        (lambda: weakref.ref(OUTSIDE), "a weak reference to a Helper held elsewhere"),
        (local_class, "class local_class.<locals>.Local is made in a function"),
        (lambda: eval("lambda: 0", {}), "belongs to no module"),
    ],
)
def test_what_cannot_be_saved_is_named_by_its_path(held, why):
    env = wrappers.TimeLimit(Holding(parts=[0, {"deep": (thing := held())}]), 5)
    snapshot = take(env)
    assert set(snapshot) == {"way", "reason"}
    assert "Holding.parts[1]['deep']" in snapshot["reason"]
    assert why in snapshot["reason"]
    assert (
        restore(wrappers.TimeLimit(Holding(), 5), snapshot, True) == snapshot["reason"]
    )
    getattr(thing, "close", lambda: None)()


class Slotted:
    __slots__ = ("n",)

    def reset(self) -> None: ...
    def step(self) -> None: ...


class HalfSlotted(Slotted):
    pass


@pytest.mark.parametrize("cls", [Slotted, HalfSlotted])
def test_state_outside_the_dict_is_a_reason(cls):
    assert f"{cls.__name__} keeps state outside its __dict__" in take(cls())["reason"]


# --- the environment's own methods ----------------------------------------------------------------


class Handle:
    """State that Python cannot see."""

    def __init__(self) -> None:
        self.lock, self.n = threading.Lock(), 0


class OwnState(CountingEnv):
    def __init__(self) -> None:
        super().__init__(5, noise=True)
        self.handle = Handle()

    def step(self, action: int) -> Any:
        self.handle.n += 1
        obs, _, *rest = super().step(action)
        return obs, float(self.handle.n), *rest

    def get_state(self) -> Any:
        return {
            "n": np.array(self.handle.n),
            "t": self.t,
            "rest": (self.executed, self.tally, self.seeds),
        }

    def set_state(self, state: Any) -> None:
        self.handle.n, self.t = int(state["n"]), state["t"]
        self.executed, self.tally, self.seeds = state["rest"]


class OwnObject(OwnState):
    """Its state is an object of its own."""

    def get_state(self) -> Any:
        state = Helper()
        state.n = super().get_state()
        return state

    def set_state(self, state: Any) -> None:
        super().set_state(state.n)


class Incomplete(OwnState):
    def set_state(self, state: Any) -> None:
        self.handle.n = state["n"]


class Failing(OwnState):
    def get_state(self) -> Any:
        raise OSError("the simulator is gone")


class Unrelated(ConstructedAnew):
    """Methods of these names that do something else."""

    def get_state(self, which: int) -> Any: ...
    def set_state(self, qpos: Any, qvel: Any) -> None: ...


def limited(cls: type) -> Any:
    return wrappers.TimeLimit(cls(), 7)


def test_own_methods_are_used_together_with_the_wrappers_and_the_generators():
    assert_goes_on(partial(limited, OwnState), trust=False)
    assert_goes_on(partial(limited, OwnObject))


class OnTensors(TorchCartPole):
    """Has tensors and a generator of torch as attributes, and methods of its own for them."""

    def __init__(self) -> None:
        super().__init__(3)

    def get_state(self) -> Any:
        parts = {
            "state": self.state,
            "steps": self._steps,
            "generator": self._generator.get_state(),
        }
        return {name: part.numpy().copy() for name, part in parts.items()}

    def set_state(self, state: Any) -> None:
        self.state = torch.from_numpy(
            state["state"]
        )  # the memory of the array, as on no other device
        self._steps = torch.from_numpy(state["steps"])
        self._generator.set_state(torch.from_numpy(state["generator"]))


class ForgetsSteps(OnTensors):
    def set_state(self, state: Any) -> None:
        super().set_state(state | {"steps": np.zeros_like(state["steps"])})


def test_own_methods_of_an_environment_on_tensors_are_plain_data(tmp_path):
    env, other = OnTensors(), OnTensors()
    env.reset(seed=1)
    for _ in range(5):
        env.step(torch.tensor([0, 1, 1]))
    save(tmp_path / "state", take(env))
    assert restore(other, load(tmp_path / "state"), False) is None
    for _ in range(40):
        ours = env.step(torch.tensor([1, 0, 1]))[:4]
        theirs = other.step(torch.tensor([1, 0, 1]))[:4]
        assert all(map(torch.equal, ours, theirs))
    reason = restore(
        ForgetsSteps(),
        take(env) | {"layers": [f"{ForgetsSteps.__module__}.ForgetsSteps"]},
        False,
    )
    assert "leave its attribute '_steps' out" in str(reason)


def test_own_methods_that_leave_something_out_are_a_reason():
    reason = restore(Incomplete(), take(begun(Incomplete, 3)), True)
    assert (
        "The own methods of tests.unit.test_snapshot.Incomplete for its state leave its attribute 't'"
        in str(reason)
    )


def test_own_methods_that_fail_are_a_reason():
    assert "Failing raised OSError: the simulator is gone" in take(Failing())["reason"]


def test_methods_that_only_have_the_name_are_not_used():
    assert_goes_on(Unrelated)


# --- what is refused ------------------------------------------------------------------------------


class Dangerous(Helper):
    def __reduce__(self) -> Any:
        return drawn.append, ("ran",)


def test_a_pickle_is_not_opened_without_trust():
    snapshot = take(Holding(bad=Dangerous()))
    assert snapshot["way"] == "pickle"
    env = Holding()
    before = dict(vars(env))
    assert "trust=True" in str(restore(env, snapshot, False))
    assert vars(env) == before
    assert "ran" not in drawn


def test_an_environment_of_another_make_is_refused_untouched():
    fresh = CountingEnv()
    reason = restore(fresh, take(limited(CountingEnv)), True)
    assert (
        "TimeLimit > muster.testing.envs.CountingEnv, and is now muster.testing.envs.CountingEnv"
        in str(reason)
    )
    assert fresh.seeds == []


def test_other_spaces_are_refused():
    saved = CountingEnv()
    saved.action_space = gymnasium.spaces.Discrete(3)
    reason = restore(CountingEnv(), take(saved), True)
    assert "CountingEnv.action_space is Discrete(2)" in str(reason)
    wide, narrow = (
        gymnasium.spaces.Box(np.linspace(0, 1, 3000, dtype=np.float32), np.float32(2))
        for _ in range(2)
    )
    narrow.low[1500] = 0.75
    other = CountingEnv()
    saved.action_space, other.action_space = wide, narrow
    assert restore(other, take(saved), True) is not None, (
        "bounds differ that no text shows"
    )


def test_a_pickle_of_another_python_is_refused():
    snapshot = take(Holding()) | {"python": "2.7"}
    assert "pickled by Python 2.7" in str(restore(Holding(), snapshot, True))


def test_a_class_that_is_gone_is_a_reason():
    snapshot = take(Holding())
    snapshot["data"] = snapshot["data"].replace(b"Helper", b"Hipper")
    assert "AttributeError" in str(restore(Holding(), snapshot, True))


def test_generators_come_back_with_what_they_spawn():
    for bits_of in (
        np.random.PCG64,
        np.random.MT19937,
        np.random.SFC64,
        np.random.Philox,
    ):
        env, fresh = CountingEnv(), CountingEnv()
        env.rng = np.random.Generator(bits_of(5))
        env.rng.spawn(2), env.rng.integers(3, dtype=np.int32)
        assert restore(fresh, take(env), False) is None
        assert fresh.rng.spawn(1)[0].random() == env.rng.spawn(1)[0].random()
        assert [fresh.rng.integers(9, dtype=np.int32) for _ in range(5)] == [
            env.rng.integers(9, dtype=np.int32) for _ in range(5)
        ]
