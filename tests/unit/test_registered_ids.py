"""Ids that the program registers with ``gymnasium.register``: they mean the same wherever its
environments are made.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec, WrapperSpec, registry
from gymnasium.vector import SyncVectorEnv

from muster import (
    AsyncCollector,
    Collector,
    DistributedCollector,
    Evaluator,
    MultiAsyncCollector,
    MultiSyncCollector,
)
from muster.cli.main import main
from muster.compat.gymnasium import VectorEnv
from muster.errors import BadCrashReport, BadOption, EnvError, ImportRefused
from muster.restore import checkpoint
from muster.restore.crash_report import CrashReport, EnvFactory
from muster.restore.player import Player
from muster.restore.registered import ids_of_this_process, installed, with_later_ids
from muster.testing import CountingEnv
from tests.command_line import refused, run
from tests.tools import assert_same
from tests.waits import wait_until
from tests.warned import noted_warnings

LOCK = threading.Lock()
FRAMES = 16


@pytest.fixture(autouse=True)
def _own_registry() -> Iterator[None]:
    """What a test registers is forgotten after it."""
    before = dict(registry)
    yield
    registry.clear()
    registry.update(before)


class Mine(CountingEnv):
    """A class that its entry point names, in a module that workers can import."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(
        self, length: int = 3, render_mode: str | None = None, **given: Any
    ) -> None:
        super().__init__(length)
        self.render_mode, self.given = render_mode, given


class Doubled(
    gymnasium.Wrapper[Any, Any, Any, Any], gymnasium.utils.RecordConstructorArgs
):
    """A wrapper that a spec names."""

    def __init__(self, env: Any, factor: int = 2) -> None:
        gymnasium.utils.RecordConstructorArgs.__init__(self, factor=factor)
        super().__init__(env)
        self.factor = factor


class Setting:
    """An argument of an environment that is no plain data."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Setting) and other.value == self.value


def register_all() -> list[str]:
    """Register an id of every kind, and return them."""

    class Local(Mine):
        pass

    length = 4
    box = spaces.Dict({"x": spaces.Box(0, 1, (2,))})
    gymnasium.register("Text-v0", entry_point=f"{__name__}:Mine", max_episode_steps=2)
    gymnasium.register(
        "Gymnasiums-v0",
        entry_point="gymnasium.envs.classic_control.cartpole:CartPoleEnv",
    )
    gymnasium.register(
        "Class-v0", entry_point=Mine, kwargs={"length": 5}, order_enforce=False
    )
    gymnasium.register(
        "Local-v0", entry_point=Local, disable_env_checker=True, reward_threshold=1.5
    )
    gymnasium.register(
        "Lambda-v0",
        entry_point=lambda **given: Local(length, **given),
        nondeterministic=True,
    )
    gymnasium.register("Partial-v0", entry_point=partial(Mine, 6))
    gymnasium.register(
        "Kwargs-v0",
        entry_point=f"{__name__}:Mine",
        kwargs={"deep": {"a": [1, (2, None)]}, "x": 1.5},
    )
    gymnasium.register(
        "Objects-v0",
        entry_point=Mine,
        kwargs={"setting": Setting(3), "a": np.int64(3), "box": box},
    )
    gymnasium.register("House/Spaced-v7", entry_point=Mine)
    gymnasium.register("Newest-v1", entry_point=Mine, kwargs={"length": 1})
    gymnasium.register("Newest-v2", entry_point=Mine, kwargs={"length": 2})
    gymnasium.register("Plainly", entry_point=Mine, kwargs={"length": 7})
    wrapper = WrapperSpec("Doubled", f"{__name__}:Doubled", {"factor": 3})
    gymnasium.register("Wrapped-v0", entry_point=Mine, additional_wrappers=(wrapper,))
    gymnasium.register(
        "Outer-v0", entry_point=lambda: Doubled(gymnasium.make("Local-v0"))
    )
    registry["Direct-v0"] = EnvSpec("Direct-v0", entry_point=Mine, max_episode_steps=2)
    with pytest.warns(UserWarning, match="Overriding"):
        gymnasium.register(
            "CartPole-v1",
            entry_point="gymnasium.envs.classic_control.cartpole:CartPoleEnv",
        )
    registry["Acrobot-v1"].max_episode_steps = 7
    names = "Text-v0 Gymnasiums-v0 Class-v0 Local-v0 Lambda-v0 Partial-v0 Kwargs-v0 Objects-v0 House/Spaced-v7 Newest"
    return [
        *names.split(),
        "Newest-v1",
        "Plainly",
        "Wrapped-v0",
        "Outer-v0",
        "Direct-v0",
        "CartPole-v1",
        "Acrobot-v1",
    ]


def facts(env_id: str) -> dict[str, Any]:
    """What an id is in this process."""
    env = gymnasium.make(env_id)
    spec, inner = env.spec, env.unwrapped
    assert spec is not None
    found = {
        "wrappers": re.sub(r"0x\w+", "", str(env)),
        "class": type(inner).__name__,
        "given": getattr(inner, "given", None),
        "length": getattr(inner, "length", None),
        "entry point": spec.entry_point
        if isinstance(spec.entry_point, str)
        else type(spec.entry_point).__name__,
        "factor": env.get_wrapper_attr("factor")
        if env.has_wrapper_attr("factor")
        else None,
    }
    plain = "id namespace name version reward_threshold nondeterministic max_episode_steps order_enforce kwargs"
    found |= {
        name: getattr(spec, name)
        for name in [*plain.split(), "disable_env_checker", "additional_wrappers"]
    }
    env.close()
    return found


class Look(CountingEnv):
    """Keeps what a function returns in the process of the environment."""

    def __init__(self, look: Callable[[], Any]) -> None:
        super().__init__(3)
        self.found = look()


def in_a_worker(look: Callable[[], Any], **options: Any) -> Any:
    """What a function returns in a worker, where an environment is made."""
    with MultiSyncCollector(
        [partial(Look, look)], None, frames_per_batch=3, **options
    ) as collector:
        return collector.getattr_env("found")[0]


def lengths_of(sources: list[Any], **options: Any) -> list[int]:
    """The lengths of the counting environments that workers make."""
    with MultiSyncCollector(sources, None, frames_per_batch=24, **options) as collector:
        found: list[int] = (
            collector.next()["observation"][..., 0, 0].flatten().int().tolist()
        )
        return found


# --- kinds of ids ---------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*:UserWarning:gymnasium")
def test_an_id_of_every_kind_is_the_same_in_a_worker() -> None:
    ids = register_all()
    got = in_a_worker(lambda: {env_id: facts(env_id) for env_id in ids})
    for env_id in ids:
        assert got[env_id] == facts(env_id), env_id


def vector(num_envs: int, length: int = 3, **_: Any) -> SyncVectorEnv:
    return SyncVectorEnv([partial(CountingEnv, length)] * num_envs)


def test_ids_of_vector_environments_are_there_too() -> None:
    register = partial(gymnasium.register, max_episode_steps=3)
    register(
        "Vector-v0", entry_point=None, vector_entry_point=vector, kwargs={"length": 5}
    )
    register(
        "VectorText-v0", vector_entry_point=f"{__name__}:vector", kwargs={"length": 6}
    )
    register(
        "VectorLambda-v0",
        entry_point=Mine,
        vector_entry_point=lambda num_envs, **_: vector(num_envs, 7),
    )

    def look() -> list[Any]:
        envs = [
            gymnasium.make_vec(f"{name}-v0", 2)
            for name in ("Vector", "VectorText", "VectorLambda")
        ]
        return [(env.num_envs, env.get_attr("length")) for env in envs]  # type: ignore[attr-defined]

    assert in_a_worker(look) == look() == [(2, (5, 5)), (2, (6, 6)), (2, (7, 7))]


def test_rendering_and_specs_of_sent_ids_work_as_in_the_program() -> None:
    class Local(Mine):
        def render(self) -> Any:
            return np.zeros((2, 2, 3), np.uint8)

    gymnasium.register("Local-v0", entry_point=Local, max_episode_steps=4)
    gymnasium.register("Text-v0", entry_point=f"{__name__}:Mine", max_episode_steps=4)

    def look() -> Any:
        spec = gymnasium.spec("Local-v0")
        spec.max_episode_steps = 9  # as programs do before gymnasium.make(spec)
        picture = gymnasium.make(spec, render_mode="rgb_array_list")
        picture.reset()
        text = gymnasium.spec("Text-v0")
        again = gymnasium.make(EnvSpec.from_json(text.to_json()))
        shown = len(gymnasium.pprint_registry(disable_print=True) or "")
        return (
            len(picture.render()),
            picture.spec.max_episode_steps,
            again.spec.max_episode_steps,
            text.id,
            shown,
        )  # type: ignore

    assert in_a_worker(look) == look() == (1, 9, 4, "Text-v0", look()[-1])


# --- ways to run environments ---------------------------------------------------------------------


def policy(observation: torch.Tensor) -> torch.Tensor:
    return observation[..., 1].long() % 2


def by(kind: Callable[..., Any], **options: Any) -> Callable[[Any], Any]:
    """A way to make a batch of four environments in two groups."""

    def batch(sources: list[Any]) -> Any:
        more = {"num_envs": 2, "frames_per_batch": FRAMES, "seed": 0, **options}
        with kind(sources, policy, **more) as collector:
            return collector.next()

    return batch


def by_async(sources: list[Any]) -> Any:
    batches = {}
    with MultiAsyncCollector(
        sources, policy, num_envs=2, frames_per_batch=FRAMES // 2, seed=0
    ) as collector:
        while len(batches) < 2:
            batch = collector.next()
            batches.setdefault(int(batch["collector", "traj_ids"].min()) % 4, batch)
    return torch.stack([batches[key] for key in sorted(batches)])


WAYS: dict[str, Callable[[Any], Any]] = {
    "processes": by(MultiSyncCollector),
    "one process": by(MultiSyncCollector, num_workers=1),
    "auto": by(MultiSyncCollector, num_workers="auto"),
    "threads": by(MultiSyncCollector, backend="threads"),
    "server": by(MultiSyncCollector, inference="server"),
    "spawn": by(MultiSyncCollector, start_method="spawn", num_workers=1),
    "async": by_async,
    "nodes": by(
        DistributedCollector, launcher="mp", sync=True, frames_per_batch=FRAMES // 2
    ),
    "server on nodes": by(
        DistributedCollector,
        launcher="mp",
        sync=True,
        frames_per_batch=FRAMES // 2,
        inference="server",
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_collect_knows_the_ids(way: str) -> None:
    class Local(Mine):
        pass

    gymnasium.register("Text-v0", entry_point=f"{__name__}:Mine", max_episode_steps=2)
    gymnasium.register("Local-v0", entry_point=Local, kwargs={"length": 4})
    sources = ["Text-v0", lambda: gymnasium.make("Local-v0")]
    assert_same(WAYS[way](sources), by(Collector)(sources))


def test_ids_keep_their_meaning_when_a_package_registers_them_again_in_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "house.py").write_text(
        textwrap.dedent(
            f"""
            import gymnasium
            from {__name__} import Mine

            def make():
                return gymnasium.make("House-v0")

            for name in ("House", "Garden"):
                gymnasium.register(f"{{name}}-v0", entry_point="house:Mine", kwargs={{"length": 2}})
            """
        )
    )
    monkeypatch.syspath_prepend(tmp_path)
    import house  # type: ignore[import-not-found]

    monkeypatch.setitem(sys.modules, "house", house)
    with pytest.warns(UserWarning, match="Overriding"):
        gymnasium.register("House-v0", entry_point="house:Mine", kwargs={"length": 7})
    for source in (
        "House-v0",
        "Garden-v0",
        house.make,
        lambda: gymnasium.make("House-v0"),
    ):
        assert (
            lengths_of([source], num_envs=3) == [2 if source == "Garden-v0" else 7] * 3
        )


def test_what_an_environment_registers_itself_counts_in_its_worker() -> None:
    gymnasium.register("Mine-v0", entry_point=Mine, kwargs={"length": 2})

    def make() -> Any:
        gymnasium.register("Mine-v0", entry_point=Mine, kwargs={"length": 8})
        return gymnasium.make("Mine-v0")

    assert lengths_of([make], num_envs=2) == [8, 8]


def test_ids_that_nothing_uses_are_neither_imported_nor_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unused_package.py").write_text("class Env:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    import unused_package  # type: ignore[import-not-found]

    monkeypatch.setitem(sys.modules, "unused_package", unused_package)
    gymnasium.register("ByClass-v0", entry_point=unused_package.Env)
    gymnasium.register("ByText-v0", entry_point="unused_package:Env")
    gymnasium.register("Lock-v0", entry_point=lambda: LOCK)
    gymnasium.register("Used-v0", entry_point=Mine)
    gymnasium.register("Used-v1", entry_point="unused_package:Env")

    def look() -> bool:
        gymnasium.make("Used-v0")
        ids_of_this_process()  # as a collector in this worker does
        known = {"ByClass-v0", "ByText-v0", "Lock-v0"} <= gymnasium.registry.keys()
        return known and "unused_package" not in sys.modules

    assert in_a_worker(look)


# --- ids that cannot be sent ----------------------------------------------------------------------


def failure(error: pytest.ExceptionInfo[BaseException]) -> str:
    return str(error.value).partition("\n\n")[0]


def test_an_id_that_cannot_be_sent_is_named_before_a_worker_starts_with_a_remedy_that_works() -> (
    None
):
    lock = threading.Lock()
    gymnasium.register("Locked-v0", entry_point=lambda: Mine() if lock else None)
    with pytest.raises(BadOption) as error:
        MultiSyncCollector(["CartPole-v1", "Locked-v0"], None, frames_per_batch=4)
    assert str(error.value) == (
        "create_env_fn[1]: 'Locked-v0' is registered in this program, and cannot be sent to other processes: "
        "entry_point: closure variable 'lock' is a _thread.lock, which cannot be pickled. Make it inside what "
        "entry_point names, or move the environment into a module, and register it with "
        "entry_point='my_module:MyEnv'."
    )
    with pytest.warns(UserWarning, match="Overriding"):
        gymnasium.register(
            "Locked-v0", entry_point=lambda: Mine() if threading.Lock() else None
        )
    assert lengths_of(["Locked-v0"]) == [3]
    with pytest.warns(UserWarning, match="Overriding"):
        gymnasium.register("Locked-v0", entry_point=f"{__name__}:Mine")
    assert lengths_of(["Locked-v0"]) == [3]


@pytest.mark.parametrize("source", ["Locked", "Locked-v3", "tests.tools:Locked-v3"])
def test_ids_without_version_and_with_a_module_are_checked_too(source: str) -> None:
    gymnasium.register("Locked-v2", entry_point=Mine)
    gymnasium.register("Locked-v3", entry_point=Mine, kwargs={"lock": threading.Lock()})
    with pytest.raises(BadOption) as error:
        MultiSyncCollector([source], None, frames_per_batch=4)
    assert failure(error) == (
        "create_env_fn[0]: 'Locked-v3' is registered in this program, and cannot be sent to other processes: kwargs: "
        "item 'lock' is a _thread.lock, which cannot be pickled. Make it in the environment, instead of passing it as "
        "kwargs=."
    )


@pytest.mark.parametrize("way", ["collector", "vector"])
def test_an_id_inside_a_function_that_cannot_be_sent_fails_where_it_is_made_and_nowhere_else(
    way: str,
) -> None:
    lock = threading.Lock()
    gymnasium.register("Locked-v0", entry_point=lambda: Mine() if lock else None)
    gymnasium.register("Fine-v0", entry_point=lambda: Mine(4))
    fine, locked = (
        partial(gymnasium.make, f"{name}-v0") for name in ("Fine", "Locked")
    )
    if way == "vector":
        VectorEnv([fine, fine], num_workers=2).close()
        with pytest.raises(EnvError) as error:
            VectorEnv([fine, locked], num_workers=2)
    else:
        assert lengths_of([fine, fine]) == [4, 4]
        with pytest.raises(EnvError) as error:
            MultiSyncCollector([fine, locked], None, frames_per_batch=8)
    assert (
        "raised BadOption: 'Locked-v0' is registered in this program, and cannot be sent to other processes: "
        "entry_point: closure variable 'lock' is a _thread.lock, which cannot be pickled. Make it inside what "
        "entry_point names, or move"
    ) in failure(error)
    assert error.value.worker == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("by_class", [True, False])
def test_a_module_that_other_processes_do_not_find_is_named_with_a_remedy_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_class: bool
) -> None:
    text = f"from {__name__} import Mine\nclass Made(Mine):\n    pass\n"
    made = types.ModuleType("made_up")
    monkeypatch.setitem(sys.modules, "made_up", made)
    exec(text, vars(made))
    gymnasium.register("Made-v0", entry_point=made.Made if by_class else "made_up:Made")
    with pytest.raises(EnvError) as error:
        MultiSyncCollector(["Made-v0"], None, frames_per_batch=4)
    said = failure(error)
    assert "ModuleNotFoundError: No module named 'made_up'" in said
    assert "'Made-v0'" in said
    assert (
        "must be importable there"
        if by_class
        else "put its folder on sys.path in the main program"
    ) in said
    (tmp_path / "made_up.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert lengths_of(["Made-v0"]) == [3]


def test_ids_that_are_nowhere_say_how_to_register_them() -> None:
    remedy = (
        "Register it, or import the package that registers it, in the main program before the environments are made; "
        "or name the package with the id, as in 'ale_py:ALE/Pong-v5'."
    )
    makers = (
        lambda: Collector("Nowhere-v0", None, frames_per_batch=4),
        lambda: MultiSyncCollector(["Nowhere-v0"], None, frames_per_batch=4),
        lambda: MultiSyncCollector(
            [lambda: gymnasium.make("Never/Nowhere-v0")], None, frames_per_batch=4
        ),
        lambda: VectorEnv([lambda: gymnasium.make("Nowhere-v0")]),
    )
    for make in makers:
        with pytest.raises(EnvError, match=r"Nowhere|Never") as error:
            make()
        assert remedy in failure(error)


# --- later, and elsewhere -------------------------------------------------------------------------


class Reader(Mine):
    """Reads ids where it is made."""

    def __init__(self) -> None:
        super().__init__(3)
        self.known = {
            name: facts(name)["length"] if name in registry else None
            for name in ("Mine-v0", "Later-v0")
        }
        self.pid = os.getpid()


def test_a_restarted_worker_has_the_ids_of_its_predecessor_and_those_registered_since() -> (
    None
):
    gymnasium.register("Mine-v0", entry_point=lambda: Mine(4))
    with MultiSyncCollector(
        [Reader, Reader], None, frames_per_batch=4, on_failure="restart"
    ) as collector:
        collector.next()
        assert collector.getattr_env("known") == [{"Mine-v0": 4, "Later-v0": None}] * 2
        with pytest.warns(UserWarning, match="Overriding"):
            gymnasium.register("Mine-v0", entry_point=lambda: Mine(9))
        gymnasium.register("Later-v0", entry_point=lambda: Mine(5))
        first, second = collector.getattr_env("pid")
        os.kill(second, signal.SIGKILL)
        collector.next()
        assert collector.getattr_env("pid")[0] == first
        wait_until(lambda: collector.getattr_env("pid")[1] != second)
        assert collector.getattr_env("known") == [
            {"Mine-v0": 4, "Later-v0": None},
            {"Mine-v0": 4, "Later-v0": 5},
        ]


def test_a_node_that_joins_again_has_the_ids_registered_since() -> None:
    gymnasium.register("Mine-v0", entry_point=lambda: Mine(4))
    options = {
        "launcher": "mp",
        "sync": True,
        "on_failure": "restart",
        "frames_per_batch": 4,
    }
    with DistributedCollector([ParentReader], None, **options) as collector:  # type: ignore[arg-type]
        collector.next()
        (node,) = collector.getattr_env("node")
        gymnasium.register("Later-v0", entry_point=lambda: Mine(5))
        os.kill(node, signal.SIGKILL)
        collector.next()
        assert collector.getattr_env("node") != [node]
        assert collector.getattr_env("known") == [{"Mine-v0": 4, "Later-v0": 5}]


class ParentReader(Reader):
    """Knows the node of its worker: the parent of the fork server, which is the parent of the
    keeper.
    """

    def __init__(self) -> None:
        super().__init__()
        pid = os.getpid()
        for _ in range(3):
            pid = int(
                Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
            )
        self.node = pid


def test_factories_of_policies_may_use_ids_in_workers_and_on_nodes() -> None:
    gymnasium.register("Mine-v0", entry_point=lambda: Mine(4))

    def make() -> Any:
        (size,) = gymnasium.make("Mine-v0").observation_space.shape  # type: ignore[misc]
        return torch.nn.Sequential(torch.nn.Linear(size, 1), Zero())

    on_nodes = {"launcher": "mp", "sync": True, "frames_per_batch": 4}
    for kind, options in (
        (MultiSyncCollector, {"frames_per_batch": 4}),
        (DistributedCollector, on_nodes),
        (DistributedCollector, {**on_nodes, "inference": "server"}),
    ):
        with kind(["Mine-v0"], policy_factory=make, **options) as collector:  # type: ignore[operator]
            assert collector.next()["action"].sum() == 0


class Zero(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x[..., 0] * 0).long()


def test_a_collector_inside_a_worker_passes_the_ids_on() -> None:
    gymnasium.register("Mine-v0", entry_point=lambda: Mine(4))
    gymnasium.register("Text-v0", entry_point=f"{__name__}:Mine", kwargs={"length": 6})

    assert in_a_worker(lambda: lengths_of(["Mine-v0", "Text-v0"])) == [4, 6]


def test_a_state_is_loaded_where_the_same_ids_are_registered() -> None:
    gymnasium.register("Local-v0", entry_point=lambda: Mine(5))
    options = {"frames_per_batch": 6, "seed": 0}
    with MultiSyncCollector(["Local-v0"] * 2, None, **options) as collector:  # type: ignore[arg-type]
        collector.next()
        state, expected = collector.state_dict(), collector.next().clone()
    with MultiSyncCollector(["Local-v0"] * 2, None, **options) as collector:  # type: ignore[arg-type]
        report = collector.load_state_dict(state)
        assert_same(collector.next(), expected)
    with Collector(["Local-v0"] * 2, None, **options) as collector:  # type: ignore[arg-type]
        assert collector.load_state_dict(state).exact == report.exact
        assert_same(collector.next(), expected)


# --- other ways to run environments ---------------------------------------------------------------


@pytest.fixture
def ids() -> list[str]:
    """Two ids: one with an entry point as text, and one of a class that no other process can
    import.
    """

    class Local(Mine):
        pass

    gymnasium.register("Text-v0", entry_point=f"{__name__}:Mine", kwargs={"length": 4})
    gymnasium.register("Local-v0", entry_point=Local, kwargs={"length": 4})
    return ["Text-v0", "Local-v0"]


def test_one_worker_that_collects_in_the_background_knows_the_ids(
    ids: list[str],
) -> None:
    for env_id in ids:
        with AsyncCollector(env_id, None, frames_per_batch=4) as collector:
            assert collector.next()["observation"][:, 0].tolist() == [4] * 4


def test_vector_environments_know_the_ids(ids: list[str]) -> None:
    envs = VectorEnv([partial(gymnasium.make, env_id) for env_id in ids], num_workers=2)
    try:
        assert envs.reset(seed=0)[0].tolist() == [[4, 0], [4, 0]]
    finally:
        envs.close()


def test_vector_environments_of_sb3_and_its_algorithms_know_the_ids(
    ids: list[str],
) -> None:
    sb3 = pytest.importorskip("stable_baselines3")
    from stable_baselines3.common.env_util import make_vec_env

    from muster.compat.sb3 import VecEnv, collect_with_muster

    envs = VecEnv([partial(gymnasium.make, env_id) for env_id in ids], num_workers=1)
    assert envs.reset().tolist() == [[4, 0], [4, 0]]
    envs.close()
    for env_id in ids:
        model = sb3.PPO(
            "MlpPolicy",
            make_vec_env(env_id, n_envs=2),
            n_steps=4,
            batch_size=8,
            n_epochs=1,
        )
        with collect_with_muster(model, env_id, num_workers=1):
            model.learn(8)
        assert model.num_timesteps == 8


def test_torchrl_environments_of_ids_are_made_in_workers(ids: list[str]) -> None:
    torchrl = pytest.importorskip("torchrl.envs")
    factories = [partial(torchrl.GymEnv, env_id) for env_id in ids]
    with MultiSyncCollector(factories, None, frames_per_batch=8) as collector:
        assert collector.next()["observation"][..., 0].unique().tolist() == [4]


def both(ids: list[str], of: Callable[[str], Any]) -> Any:
    """A TorchRL environment of the second id, if the first one can be made as well."""
    of(ids[0])
    return of(ids[1])


@pytest.mark.slow
def test_the_workers_of_torchrls_collectors_know_the_ids_before_the_users_init_fn(
    ids: list[str],
) -> None:
    torchrl = pytest.importorskip("torchrl.envs")
    from muster.compat import torchrl as compat

    def init_fn() -> None:
        assert gymnasium.make(ids[1]).unwrapped.length == 4  # type: ignore[attr-defined]
        os.environ["MUSTER_TEST_INIT_FN"] = "called"

    def make() -> Any:
        assert os.environ["MUSTER_TEST_INIT_FN"] == "called"
        return both(ids, torchrl.GymEnv)

    collector = compat.MultiSyncCollector(
        [make], init_fn=init_fn, frames_per_batch=8, total_frames=8
    )
    try:
        (batch,) = collector
        assert batch["observation"][..., 0].unique().tolist() == [4]
    finally:
        collector.shutdown()


@pytest.mark.slow
def test_the_process_of_torchrls_evaluator_knows_the_ids(ids: list[str]) -> None:
    torchrl = pytest.importorskip("torchrl.envs")
    from torchrl.modules import RandomPolicy

    from muster.compat import torchrl as compat

    evaluator = compat.Evaluator(
        partial(both, ids, torchrl.GymEnv),
        policy_factory=lambda: RandomPolicy(both(ids, torchrl.GymEnv).action_spec),
        num_trajectories=1,
        max_steps=8,
        backend="process",
    )
    try:
        assert evaluator.evaluate()["eval/reward"] == 10
    finally:
        evaluator.shutdown()


def test_torchrls_collectors_for_many_machines_know_the_ids(ids: list[str]) -> None:
    torchrl = pytest.importorskip("torchrl.envs")
    from muster.compat.torchrl.collectors import distributed

    options: dict[str, Any] = {
        "frames_per_batch": 8,
        "total_frames": 8,
        "sync": True,
        "launcher": "mp",
    }
    with distributed.DistributedCollector(
        [partial(both, ids, torchrl.GymEnv)], None, **options
    ) as collector:
        assert next(iter(collector))["observation"][..., 0].unique().tolist() == [4]


def test_evaluators_and_tune_know_the_ids(ids: list[str]) -> None:
    from muster import tune

    for env_id in ids:
        with Evaluator(env_id, None, episodes=2, num_workers=1, seed=0) as evaluator:
            assert evaluator.evaluate().returns.tolist() == [10, 10]
            evaluator.trigger()
            assert wait_until(evaluator.poll).returns.tolist() == [10, 10]
    tuning = tune(ids[1], seconds=0.2, num_envs=2, frames_per_batch=8)
    assert all(candidate.refused is None for candidate in tuning.candidates)
    assert any(candidate.setup.workers for candidate in tuning.candidates)


# --- crash reports --------------------------------------------------------------------------------


class Breaks(Mine):
    def step(self, action: int) -> Any:
        if self.t == 2:
            raise ValueError("as asked")
        return super().step(action)


def forget(*ids: str) -> None:
    """As in a new process."""
    for env_id in ids:
        del registry[env_id]


def report_of(source: Any) -> tuple[Path, list[str]]:
    """The crash report of a collector whose environment raises, and the command in its error."""
    with (
        pytest.raises(EnvError) as error,
        MultiSyncCollector([source], None, frames_per_batch=50, seed=0) as collector,
    ):
        collector.next()
    (command,) = re.findall(r"muster (replay .*)$", str(error.value), re.MULTILINE)
    assert error.value.crash_report is not None
    return error.value.crash_report, command.split()


@pytest.mark.parametrize("kind", ["text", "class", "function", "inner"])
def test_a_crash_report_can_be_replayed_where_the_id_is_not_registered(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    class Local(Breaks):
        pass

    gymnasium.register(
        "Text-v0", entry_point=f"{__name__}:Breaks", kwargs={"length": 4}
    )
    gymnasium.register("Local-v0", entry_point=Local)
    gymnasium.register("Inner-v0", entry_point=lambda: gymnasium.make("Local-v0"))
    source: Any = {"text": "Text-v0", "class": "Local-v0", "inner": "Inner-v0"}.get(
        kind
    )
    path, command = report_of(source or (lambda: gymnasium.make("Local-v0")))
    forget("Text-v0", "Local-v0", "Inner-v0")
    with pytest.raises(ImportRefused, match="add --trust"):
        CrashReport.load(path)
    capsys.readouterr()
    assert main([*command, "--no-pdb"]) == 1
    said = capsys.readouterr()
    assert "ValueError: as asked" in said.err
    assert "Failed again in env.step" in said.out


def test_a_crash_report_of_an_own_id_for_a_class_of_gymnasium_runs_no_other_code_and_needs_no_trust(
    tmp_path: Path,
) -> None:
    entry_point = "gymnasium.envs.classic_control.cartpole:CartPoleEnv"
    gymnasium.register("Short-v0", entry_point=entry_point, max_episode_steps=9)
    path = tmp_path / "report"
    report = CrashReport(
        "Short-v0", EnvFactory("Short-v0", 1), [0], True, "step", "E", "x"
    )
    assert report.command(path) == f"muster replay {path}"
    report.save(path)
    forget("Short-v0")
    with closing(Player(CrashReport.load(path))) as player:
        assert player.env.spec.max_episode_steps == 9
    with pytest.warns(UserWarning, match="Overriding"):
        gymnasium.register("Short-v0", entry_point=entry_point, max_episode_steps=5)
    with closing(Player(CrashReport.load(path))) as player:
        assert player.env.spec.max_episode_steps == 9
    before = registry["CartPole-v1"]
    with closing(Player(saved_report(tmp_path / "other", "CartPole-v1"))):
        assert registry["CartPole-v1"] is before  # it is the same here


def saved_report(path: Path, source: str, **changes: Any) -> CrashReport:
    """A crash report that was saved, perhaps changed by another user, and loaded without trust."""
    report = CrashReport(source, EnvFactory(source, 1), [0], True, "step", "E", "x")
    state = report.state()
    for name, value in changes.items():
        state["spec"][name] = value
    checkpoint.save(path, state)
    return CrashReport.load(path)


@pytest.mark.parametrize(
    "entry_point",
    [
        "os:system",
        "gymnasium.envs.registration:make",
        "gymnasium.envs.registration:Wrapper",
        "gymnasium.envs:registration",
        "gymnasium.envs.classic_control..cartpole:CartPoleEnv",
        "gymnasium.envs.classic_control.cartpole",
        "gymnasium_envs:CartPoleEnv",
        "",
    ],
)
def test_a_changed_crash_report_runs_no_foreign_code_without_trust(
    tmp_path: Path, entry_point: str
) -> None:
    with pytest.raises(ImportRefused, match="--trust"):
        saved_report(tmp_path / "report", "CartPole-v1", entry_point=entry_point)


@pytest.mark.parametrize(
    "changes",
    [
        {"id": "not an id"},
        {"kwargs": {1: 2}},
        {"max_episode_steps": "9"},
        {"more": 1},
        {"entry_point": None},
    ],
    ids=str,
)
def test_a_damaged_id_in_a_crash_report_is_refused(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    with pytest.raises(BadCrashReport, match="spec"):
        saved_report(tmp_path / "report", "CartPole-v1", **changes)


def test_a_crash_report_without_ids_is_read(tmp_path: Path) -> None:
    state = CrashReport(
        "x", EnvFactory("CartPole-v1", 1), [0], True, "step", "E", "x"
    ).state()
    del state["spec"], state["registered"]
    checkpoint.save(tmp_path / "report", state)
    with closing(Player(CrashReport.load(tmp_path / "report"))) as player:
        assert player.env.spec.id == "CartPole-v1"


def test_an_id_with_much_data_is_left_out_of_crash_reports_of_functions(
    tmp_path: Path,
) -> None:
    data = np.zeros(1 << 18)
    gymnasium.register("Large-v0", entry_point=lambda: Mine(3 + int(data[0])))
    gymnasium.register("Small-v0", entry_point=lambda: Mine(5))
    report = CrashReport(
        "x", EnvFactory(lambda: gymnasium.make("Small-v0")), [0], True, "step", "E", "x"
    )
    report.save(tmp_path / "report")
    assert (tmp_path / "report").stat().st_size < 1 << 20
    loaded = CrashReport.load(tmp_path / "report", trust=True)
    forget("Large-v0", "Small-v0")
    with closing(Player(loaded)) as player:
        assert player.env.unwrapped.length == 5
    with pytest.raises(
        BadOption, match=r"The pickle of 'Large-v0' has more than 1,048,576 bytes"
    ):
        gymnasium.make("Large-v0")


# --- programs -------------------------------------------------------------------------------------

PROGRAM = """
import gymnasium
from muster import Collector, MultiSyncCollector
from muster.compat.gymnasium import VectorEnv
from muster.testing import CountingEnv

class Mine(CountingEnv):
    def __init__(self, length=5):
        super().__init__(length)

class Wrapped(gymnasium.Wrapper, gymnasium.utils.RecordConstructorArgs):
    def __init__(self, env):
        gymnasium.utils.RecordConstructorArgs.__init__(self)
        super().__init__(env)

def vector(num_envs, **_):
    return gymnasium.vector.SyncVectorEnv([Mine] * num_envs)

def doubled():
    return Mine(2 * gymnasium.make("Class-v0").unwrapped.length)

wrapper = gymnasium.envs.registration.WrapperSpec("Wrapped", "__main__:Wrapped", {})
gymnasium.register("Class-v0", entry_point=Mine)
gymnasium.register("Text-v0", entry_point="__main__:Mine", additional_wrappers=(wrapper,))
gymnasium.register("Function-v0", entry_point="__main__:doubled")
gymnasium.register("Vector-v0", vector_entry_point="__main__:vector")
sources = ["Class-v0", "Text-v0", "Function-v0", lambda: gymnasium.make("Text-v0")]
options = {"num_envs": 1, "frames_per_batch": 16, "seed": 0}
with Collector(sources, None, **options) as collector:
    expected = collector.next()
with MultiSyncCollector(sources, None, num_workers=2, **options) as collector:
    assert (collector.next() == expected).all()
with MultiSyncCollector([lambda: gymnasium.make_vec("Vector-v0", 2)], None, frames_per_batch=4) as collector:
    assert collector.next()["observation"].shape == (1, 2, 2, 2)
envs = VectorEnv([lambda: gymnasium.make("Text-v0"), lambda: gymnasium.make("Class-v0")], num_workers=1)
assert envs.reset()[0].tolist() == [[5, 0], [5, 0]]
envs.close()
print("done")
"""


@pytest.mark.parametrize("how", ["script", pytest.param("-c", marks=pytest.mark.slow)])
def test_classes_of_the_main_module_are_found_by_reference_and_by_name(
    tmp_path: Path, how: str
) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    command = [sys.executable, *(["-c", PROGRAM] if how == "-c" else [str(script)])]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=200, check=False
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_environments_of_atari_are_known_in_workers_once_ale_py_is_imported() -> None:
    ale_py = pytest.importorskip("ale_py")
    gymnasium.register_envs(ale_py)
    options = {"frames_per_batch": 4, "seed": 0}
    sources = ["ALE/Pong-v5", lambda: gymnasium.make("ALE/Breakout-v5")]
    with Collector(sources[:1], None, **options) as collector:  # type: ignore[arg-type]
        expected = collector.next()["observation"]
    with MultiAsyncCollector(sources, None, **options) as collector:  # type: ignore[arg-type]
        batches = [collector.next() for _ in range(4)]
    assert any(torch.equal(batch["observation"], expected[0]) for batch in batches)


def test_the_command_line_says_how_to_name_the_module_of_an_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_arena.py").write_text(
        f"import gymnasium\ngymnasium.register('Arena-v0', entry_point='{__name__}:Mine', kwargs={{'length': 4}})\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    said = refused(capsys, "collect", "Arena-v0", "--frames", "8", "--num-envs", "1")
    assert "PACKAGE:Arena-v0 --allow-import" in said
    options = [
        "--frames",
        "8",
        "--num-envs",
        "1",
        "--workers",
        "2",
        "--allow-import",
        "--quiet",
    ]
    assert run(capsys, "collect", "my_arena:Arena-v0", *options)[0] == 0
    code, _, said = run(capsys, "collect", "my_arena:Area-v0", *options)
    assert code == 2
    assert "There is no environment 'Area-v0'." in said
    assert "Importing 'my_arena' does not register it." in said
    monkeypatch.delitem(sys.modules, "my_arena")


# --- what is sent ---------------------------------------------------------------------------------


def test_ids_are_sent_only_once_they_are_there_and_gymnasiums_own_change_nothing() -> (
    None
):
    before = dict(registry)
    sent = ids_of_this_process()
    assert with_later_ids(sent) is sent
    assert sum(map(len, sent.packed.values())) < 500 * len(
        sent.packed
    )  # bytes; about 60 ids are Gymnasium's own
    with installed(sent):
        assert all(registry[env_id] is spec for env_id, spec in before.items())
    with installed(None):
        pass
    assert registry == before


def test_a_package_that_registers_ids_once_more_in_another_process_warns_of_nothing() -> (
    None
):
    gymnasium.register("Mine-v0", entry_point=Mine)
    sent = ids_of_this_process()
    forget("Mine-v0")
    with noted_warnings() as caught, installed(sent):
        gymnasium.register("Mine-v0", entry_point=Mine)
    assert not caught


def test_specs_that_are_no_plain_ones_are_sent_as_they_are() -> None:
    class Own(EnvSpec):
        pass

    registry["Own-v0"] = Own("Own-v0", entry_point=Mine, kwargs={"length": 6})
    registry["Alias-v0"] = registry["Own-v0"]
    registry["Odd-v0"] = "no spec"  # type: ignore[assignment]
    registry["no id!"] = EnvSpec("Odd-v1", entry_point=Mine)
    registry["Odd-v2"] = EnvSpec("Odd-v2", entry_point=Mine, additional_wrappers=None)  # type: ignore[arg-type]
    assert lengths_of(["Own-v0", "Alias-v0"]) == [6, 6]
    with pytest.raises(
        BadOption, match="'Odd-v2' is registered in this program, and cannot be sent"
    ):
        MultiSyncCollector(["Odd-v2"], None, frames_per_batch=4)
