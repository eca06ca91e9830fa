"""What collectors write into a ``ReplayMemory`` is what they yield without one, for every
collector and every kind of environment.

Where the order of rollouts is not determined, every transition of an ``OracleEnv`` can be checked
by itself.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict

from muster import (
    AsyncCollector,
    Collector,
    MultiAsyncCollector,
    MultiSyncCollector,
    ReplayMemory,
)
from muster.envs.envpool import EnvPoolVectorEnv
from muster.errors import BadOption, NothingToSample, PolicyError
from muster.testing import CountingEnv, Fault, OracleEnv, TorchCartPole
from muster.testing.oracle import follow
from tests.fakes import on_nodes
from tests.fakes.envpool import GymnasiumEnvPool
from tests.tools import assert_accounted

VALID = ("collector", "valid")
KNOWN = ("collector", "next_obs_valid")
Make = Callable[..., Any]


# --- parity with batches --------------------------------------------------------------------------


def transitions(batches: list[Any], sizes: list[int], capacity: int) -> list[Any]:
    """The newest rows of each group as ``memory[:]`` has them."""
    rows = capacity // sum(sizes)
    found = []
    for first, size in zip(np.cumsum([0, *sizes]), sizes, strict=False):
        parts = []
        for batch in batches:
            lines = batch.reshape(-1, batch.shape[-1])[first : first + size]
            valid = torch.ones(lines.shape, dtype=torch.bool)
            if VALID in lines.keys(True, True):
                valid &= lines[VALID].reshape(lines.shape)
            some = valid.any(0)  # rows of padding are not written
            if KNOWN in lines.keys(True, True):
                known = lines[KNOWN].reshape(lines.shape)
                valid &= known | lines["next", "terminated"].squeeze(-1)
            parts += [
                (lines[:, t], valid[:, t]) for t in range(lines.shape[1]) if some[t]
            ]
        found += [line[valid] for line, valid in parts[-rows:]]
    return found


def is_left_out(key: Any) -> bool:
    """Of a batch, and not in samples without ``keep``."""
    flags = ("done", "terminated", "truncated")
    return key[0] == "collector" or key in (*flags, "step_count")


def assert_equal(memory: ReplayMemory, expected: list[Any]) -> None:
    every = memory[:]
    for key in every.keys(
        True, True, is_leaf=lambda kind: issubclass(kind, torch.Tensor)
    ):
        if key == "index" or key not in expected[0].keys(True, True):
            continue  # with ``compact_obs`` batches have no next observations
        joined = torch.cat([part[key] for part in expected])
        there = torch.ones(len(joined), dtype=torch.bool)
        if isinstance(key, tuple) and key[-1] not in (
            "reward",
            "done",
            "terminated",
            "truncated",
        ):
            # a next observation that is not known is of no use after a termination
            there = ~torch.cat(
                [part["next", "terminated"] for part in expected]
            ).squeeze(-1)
            there |= all(KNOWN not in part.keys(True, True) for part in expected)
        assert torch.equal(every[key][there], joined[there]), key
    returned = {key for key in expected[0].keys(True, True) if not is_left_out(key)}
    assert returned <= set(every.keys(True, True))
    assert len(memory) == sum(len(part) for part in expected)


def check_parity(
    cls: Any,
    make: Make,
    sizes: list[int],
    *,
    capacity: int,
    batches: int,
    stack: int = 1,
    **options: Any,
) -> ReplayMemory:
    """Collect the same twice; ``make(name)`` makes the environments of a collector."""
    plain = cls(make("plain"), None, seed=3, **options)
    expected = [batch.clone() for batch in taken(plain, batches)]
    plain.shutdown()
    memory = ReplayMemory(capacity, seed=0, stack=stack)
    collector = cls(make("memory"), None, seed=3, replay_buffer=memory, **options)
    for number, none in enumerate(taken(collector, batches), 1):
        assert none is None
        if number % 7 == 1:
            assert_equal(memory, transitions(expected[:number], sizes, capacity))
    assert_equal(memory, transitions(expected, sizes, capacity))
    assert_accounted(collector)
    collector.shutdown()
    return memory


def taken(collector: Any, batches: int) -> Iterator[Any]:
    every = iter(collector)
    for _ in range(batches):
        yield next(every)


def oracles(tmp_path: Any, groups: int = 1, count: int = 1) -> Make:
    """Make a factory for each group, of environments with other numbers."""

    def make(name: str) -> Any:
        path = tmp_path / name
        made = [partial(OracleEnv, path, count * i, count) for i in range(groups)]
        return made if groups > 1 else made[0]

    return make


def vectors(tmp_path: Any, mode: AutoresetMode) -> Make:
    def make(name: str) -> Any:
        one = partial(OracleEnv, tmp_path / name, 0, 3)
        return lambda: SyncVectorEnv([one] * 3, autoreset_mode=mode)

    return make


@pytest.mark.parametrize("frames", [1, 7, 30])
@pytest.mark.parametrize("capacity", [30, 41])
def test_one_environment(tmp_path, frames, capacity):
    check_parity(
        Collector,
        oracles(tmp_path),
        [1],
        capacity=capacity,
        batches=200 // frames,
        frames_per_batch=frames,
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compact_obs": True},
        {"max_frames_per_traj": 4},
        {"reset_when_done": False},
        {"reset_when_done": False, "compact_obs": True},
        {"track_policy_version": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [1, 5])
def test_several_environments(tmp_path, options, rows):
    memory = check_parity(
        Collector,
        oracles(tmp_path, count=3),
        [3],
        capacity=50,
        batches=80 // rows,
        num_envs=3,
        frames_per_batch=3 * rows,
        **options,
    )
    check_begins(memory)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("padding", ["reset", "zero"])
@pytest.mark.parametrize(
    "options", [{}, {"compact_obs": True}, {"reset_when_done": False}], ids=str
)
def test_stacks_of_frames(tmp_path, rows, padding, options):
    def make(name: str) -> Any:
        one = partial(OracleEnv, tmp_path / name, 0, 2)
        return lambda: gymnasium.wrappers.FrameStackObservation(
            one(), 3, padding_type=padding
        )

    memory = check_parity(
        Collector,
        make,
        [2],
        capacity=51,
        batches=60 // rows,
        stack=3,
        num_envs=2,
        frames_per_batch=2 * rows,
        **options,
    )
    assert memory.rings[0].stored.tensors["observation",].shape[1:] == (2, 6)


@pytest.mark.parametrize(
    "cls", [Collector, MultiSyncCollector], ids=lambda cls: cls.__name__
)
def test_several_groups(tmp_path, cls):
    options = {"backend": "threads"} if cls is MultiSyncCollector else {}
    check_parity(
        cls,
        oracles(tmp_path, 2, 2),
        [2, 2],
        capacity=63,
        batches=40,
        num_envs=2,
        frames_per_batch=4 * 3,
        **options,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "cls", [MultiSyncCollector, on_nodes.Together], ids=lambda cls: cls.__name__
)
def test_groups_in_processes(tmp_path, cls):
    check_parity(
        cls,
        oracles(tmp_path, 2, 2),
        [2, 2],
        capacity=63,
        batches=30,
        num_envs=2,
        frames_per_batch=4 * 3,
    )


@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
@pytest.mark.parametrize("compact", [False, True], ids=["whole", "compact"])
def test_vector_environments(tmp_path, mode, compact):
    memory = check_parity(
        Collector,
        vectors(tmp_path, mode),
        [3],
        capacity=60,
        batches=60,
        frames_per_batch=6,
        compact_obs=compact,
    )
    check_begins(memory)


@pytest.mark.parametrize("final_obs", [True, False])
@pytest.mark.parametrize(
    "mode",
    [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED],
    ids=lambda mode: mode.name,
)
def test_tensors(mode, final_obs):
    if mode is AutoresetMode.DISABLED and not final_obs:
        pytest.skip("the last observations are always known")
    memory = check_parity(
        Collector,
        lambda _: partial(
            TorchCartPole, 4, autoreset=mode, final_obs=final_obs, max_steps=12
        ),
        [4],
        capacity=90,
        batches=50,
        frames_per_batch=8,
    )
    batch = memory.sample(500)
    model = TorchCartPole(500, max_steps=10**6, autoreset=AutoresetMode.DISABLED)
    model.state = batch["observation"].clone()
    after = model.step(batch["action"])[0]
    known = ~batch["next", "terminated"].squeeze(-1) | final_obs
    torch.testing.assert_close(batch["next", "observation"][known], after[known])
    assert (batch["next", "observation"][~known] == 0).all()
    if not final_obs:
        assert not known.all()
        assert not batch["next", "truncated"].any()


@pytest.mark.parametrize("rows", [3, 30])
def test_an_unknown_last_observation_is_never_that_of_a_reset(rows):
    from torchrl.data import Unbounded
    from torchrl.testing.mocking_classes import CountingBatchedEnv

    class ResetsItself(CountingBatchedEnv):
        """As TorchRL's simulators on a GPU do: a finished environment returns its first observation,
        here 1, and TorchRL makes NaN of it.
        """

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self._torchrl_native_autoreset = True
            self.observation_spec["observation"] = Unbounded(
                (3, 1), dtype=torch.float32
            )

        def _step(self, tensordict: Any) -> Any:
            td = super()._step(tensordict)
            self.count[td["done"]] = 0
            return td.set("observation", self.count + 1.0)

        def _reset(self, tensordict: Any = None, **options: Any) -> Any:
            td = super()._reset(tensordict, **options)
            return td.set("observation", td["observation"].float())

    memory = ReplayMemory(300, seed=0)
    make = partial(ResetsItself, max_steps=torch.tensor([4, 5, 7]), batch_size=(3,))
    with Collector(
        make, None, frames_per_batch=rows, replay_buffer=memory
    ) as collector:
        collector.collect(n_step=90)
    batch = memory[:]
    ended = batch["next", "terminated"].squeeze(-1)
    assert ended.any()
    assert (batch["next", "observation"][ended] == 0).all()
    assert (batch["next", "observation"][~ended] > 0).all()


def test_an_episode_begins_after_an_end_that_is_no_transition():
    """The last observation of a truncated episode is unknown, so its last cell is left out."""
    make = partial(
        TorchCartPole,
        1,
        autoreset=AutoresetMode.SAME_STEP,
        final_obs=False,
        max_steps=3,
    )
    memory = ReplayMemory(100, seed=0)
    with Collector(
        make, None, frames_per_batch=30, replay_buffer=memory, seed=0
    ) as collector:
        collector.next()
    assert len(memory) == 20
    begins = memory.sample(200, sequence=2)["is_init"].squeeze(-1)
    assert torch.equal(begins, torch.tensor([[True, False]]).expand(200, 2))


def test_an_episode_begins_after_a_surplus_cell_in_a_loaded_memory():
    """The third step has two environments, and one of its cells is too many."""
    memory = ReplayMemory(100, seed=0)
    make = partial(CountingEnv, 1)
    with Collector(
        make, None, num_envs=2, frames_per_batch=2, replay_buffer=memory
    ) as collector:
        collector.collect(n_step=5)
        memory.load_state_dict(memory.state_dict())
        collector.next()
    assert memory.sample(100, sequence=1)["is_init"].all()


class Moved(torch.nn.Module):
    """Draws its actions."""

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return torch.randint(5, observation.shape[:-1])


class StopsAfter:
    """An interruptor that ends every batch after some of its steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.calls = 0

    def collection_stopped(self) -> bool:
        self.calls += 1
        return self.calls % self.steps == 0


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("compact", [False, True], ids=["whole", "compact"])
def test_batches_that_are_stopped(tmp_path, steps, compact):
    """The observation after the newest row is there, also if no row follows it, or that of a reset."""
    memory = ReplayMemory(100, seed=0)
    collector = Collector(
        partial(OracleEnv, tmp_path / "oracle", 0, 2),
        None,
        num_envs=2,
        frames_per_batch=12,
        interruptor=StopsAfter(steps),
        compact_obs=compact,
        replay_buffer=memory,
        seed=0,
    )
    for number in range(20):
        collector.next()
        check_oracle(memory[:])
        if number % 3 == 2:
            collector.reset([number % 2])
            check_oracle(memory[:])
    assert len(memory) == min(20 * 2 * steps, 100)
    collector.shutdown()


@pytest.mark.filterwarnings("ignore:EnvPool cannot be seeded")
def test_envpool(tmp_path):
    def make(name: str) -> Any:
        one = partial(OracleEnv, tmp_path / name, 0, 3)
        return lambda: EnvPoolVectorEnv(GymnasiumEnvPool(one, 3))

    memory = check_parity(
        Collector, make, [3], capacity=60, batches=60, frames_per_batch=6
    )
    check_begins(memory)


def test_torchrl(tmp_path):
    envs = pytest.importorskip("torchrl.envs")

    def make(name: str) -> Any:
        path = tmp_path / name
        return lambda: envs.GymWrapper(OracleEnv(path))

    check_parity(Collector, make, [1], capacity=60, batches=60, frames_per_batch=5)


def test_parallel_agents():
    pytest.importorskip("pettingzoo")
    from tests.unit.test_pettingzoo import Shifts

    memory = check_parity(
        Collector,
        lambda _: Shifts,
        [2],
        capacity=40,
        batches=20,
        num_envs=2,
        frames_per_batch=6,
    )
    assert memory.sample(5, n_step=2).shape == (5,)


@pytest.mark.parametrize("n_step", [2, 3, 9])
def test_windows_of_agents_end_where_they_do(n_step):
    """Not with the episode of the environment: some leave before, come later, or come back."""
    pytest.importorskip("pettingzoo")
    from tests.unit.test_pettingzoo import Shifts

    class Returning(Shifts):
        """The cook with the number 1 comes back in the row after that in which it left."""

        def step(self, actions: Any) -> Any:
            if self.t == 3:
                self.times = {**self.times, "cook_1": (4, 6, False)}
            return super().step(actions)

        def reset(self, **options: Any) -> Any:
            self.times = {
                "cook_0": (0, 4, True),
                "cook_1": (1, 3, False),
                "waiter": (0, 8, False),
            }
            return super().reset(**options)

    gamma = 0.5
    memory = ReplayMemory(200, seed=0)
    with Collector(Returning, None, frames_per_batch=40, replay_buffer=memory) as c:
        c.next()
    rows = memory[0 : len(memory)]
    over = rows["next", "done"].squeeze(-1).tolist()
    batch = memory.sample(300, n_step=n_step, gamma=gamma)
    assert len(batch["index"].unique()) > 30
    for sampled in batch:
        i = int(sampled["index"])
        for group in ("cook", "waiter"):
            for agent, there in enumerate(rows[i][group, "mask"].tolist()):
                j, total = i, float(rows[i]["next", group, "reward"][agent])
                gone = rows["next", group, "done"][:, agent, 0].tolist()
                while there and j + 1 < len(rows) and j + 1 < i + n_step:
                    if over[j] or gone[j]:
                        break
                    j += 1
                    reward = float(rows[j]["next", group, "reward"][agent])
                    total += gamma ** (j - i) * reward
                after, last = sampled["next", group], rows[j]["next", group]
                assert float(after["reward"][agent]) == total
                for key in ("observation", "done", "terminated", "truncated", "mask"):
                    assert torch.equal(after[key][agent], last[key][agent])
                assert sampled[group, "steps_to_next_obs"][agent].tolist() == [
                    j - i + 1
                ]
                assert sampled[group, "gamma"][agent].item() == gamma ** (j - i + 1)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(0, 1, (1,), np.bool_),
        spaces.Box(0, 1, (1,), np.float32),
        spaces.MultiBinary(3),
        spaces.Discrete(2),
    ],
    ids=str,
)
def test_an_observation_may_be_called_done(space):
    """It is none of the flags that end the windows of agents."""

    class Tasks(CountingEnv):
        def __init__(self) -> None:
            super().__init__(9)
            task = spaces.Dict(done=space, t=spaces.Box(0, 9, (1,), np.float32))
            self.observation_space = spaces.Dict(task=task)

        def _observe(self) -> Any:
            done = np.full(space.shape, self.t % 2, space.dtype)
            return {"task": {"done": done, "t": np.array([self.t], np.float32)}}

    memory = ReplayMemory(100, seed=0)
    with Collector(Tasks, None, frames_per_batch=45, replay_buffer=memory) as c:
        c.next()
    rows = memory.sample(60, n_step=3)
    begin, after = rows["task", "t"], rows["next", "task", "t"]
    assert torch.equal(after - begin, rows["steps_to_next_obs"].float())
    assert set(rows["task"].keys()) == {"done", "t"}


@pytest.mark.parametrize("flags", [(3, 1), (1,), (3,)], ids=str)
def test_windows_of_torchrl_agents(flags):
    """Those of rewards with the shape of the flags end with an agent, others with the episode."""
    envs = pytest.importorskip("torchrl.envs")
    from torchrl.data import Categorical, Composite, Unbounded

    def of(spec: Any) -> Any:
        return Composite(agents=Composite(**spec))

    class Three(envs.EnvBase):
        def __init__(self) -> None:
            super().__init__(batch_size=[])
            names = ("done", "terminated", "truncated")
            root = Categorical(2, shape=(1,), dtype=torch.bool)
            own = Categorical(2, shape=flags, dtype=torch.bool)
            self.observation_spec = of({"observation": Unbounded((3, 1))})
            self.action_spec = of({"action": Categorical(2, shape=(3,))})
            self.reward_spec = of({"reward": Unbounded((3, 1))})
            done = of(dict.fromkeys(names, own))
            done.update(dict.fromkeys(names, root))
            self.full_done_spec = done

        def _set_seed(self, seed: Any) -> None: ...

        def _state(self) -> TensorDict:
            over = torch.tensor([self.t == 6])
            left = torch.zeros(flags, dtype=torch.bool)
            if self.t >= 2 and flags == (3, 1):
                left[1] = True
            left |= over
            agents = {"observation": torch.full((3, 1), float(self.t))}
            none = torch.zeros_like
            for there, done in ((agents, left), (result := {}, over)):
                there |= {"done": done, "terminated": done, "truncated": none(done)}
            return TensorDict({**result, "agents": agents}, [])

        def _reset(self, td: Any = None, **options: Any) -> TensorDict:
            self.t = 0
            return self._state()

        def _step(self, td: Any) -> TensorDict:
            self.t += 1
            after = self._state()
            after["agents", "reward"] = torch.ones(3, 1)
            return after

    memory = ReplayMemory(100, seed=0)
    with Collector(Three, None, frames_per_batch=12, replay_buffer=memory) as c:
        c.next()
    rows = memory.sample(80, n_step=3, gamma=1.0)
    t = rows["agents", "observation"][:, :1]
    end = torch.full((len(rows), 3, 1), 6.0)
    if flags == (3, 1):
        end[:, 1] = 2
        assert rows["agents", "gamma"].shape == (80, 3, 1)
    else:
        assert ("agents", "gamma") not in rows.keys(True)
    steps = (end - t).clamp(1, 3)
    assert torch.equal(rows["next", "agents", "reward"], steps)
    assert torch.equal(rows["next", "agents", "observation"], t + steps)


def test_an_observation_of_agents_may_be_called_gamma():
    pytest.importorskip("pettingzoo")
    from tests.unit.test_pettingzoo import Shifts

    class Named(Shifts):
        def observation_space(self, agent: str) -> Any:
            return spaces.Dict(gamma=super().observation_space(agent))

        def see(self, agent: str) -> Any:
            return {"gamma": super().see(agent)}

    memory = ReplayMemory(200, seed=0)
    with Collector(Named, None, frames_per_batch=8, replay_buffer=memory) as collector:
        collector.next()
    assert memory.sample(4)["cook", "observation", "gamma"].shape == (4, 2, 2)
    assert memory.sample(4, n_step=2)["cook", "gamma"].shape == (4, 2, 1)


def check_begins(memory: ReplayMemory) -> None:
    """Sequences across episodes say where each begins; within, they are one step after another."""
    for across in (False, True):
        batch = memory.sample(200, sequence=2, across_episodes=across)
        t = batch["observation"][..., 3]
        assert torch.equal(batch["is_init"].squeeze(-1), t == 0)
        assert across or torch.equal(t[:, 1], t[:, 0] + 1)


# --- what cannot be compared with batches ---------------------------------------------------------


def check_oracle(batch: Any) -> None:
    """Every transition is what the environment has made of its observation and action."""
    batch = batch.reshape(-1)
    after, reward, terminated, truncated = follow(
        tuple(batch["observation"].numpy().T), batch["action"].numpy().astype(np.int64)
    )
    np.testing.assert_array_equal(
        batch["next", "observation"].numpy().T, np.array(after)
    )
    np.testing.assert_array_equal(batch["next", "reward"].squeeze(-1), reward)
    np.testing.assert_array_equal(batch["next", "terminated"].squeeze(-1), terminated)
    assert (batch["next", "truncated"].squeeze(-1).numpy() >= truncated).all()


def check_sequences(memory: ReplayMemory, length: int = 3) -> None:
    """Sequences are one step after another; across episodes, ``is_init`` says where one begins."""
    for across in (False, True):
        batch = memory.sample(40, sequence=length, across_episodes=across)
        check_oracle(batch)
        env, run, episode, t, _, _ = batch["observation"].unbind(-1)
        begins = batch["is_init"].squeeze(-1)
        assert (env == env[:, :1]).all()
        goes_on = (run[:, 1:] == run[:, :-1]) & (episode[:, 1:] == episode[:, :-1])
        goes_on &= t[:, 1:] == t[:, :-1] + 1
        assert (goes_on == ~begins[:, 1:]).all()
        assert across or goes_on.all()


# --- where episodes begin -------------------------------------------------------------------------


def check_beginnings(memory: ReplayMemory) -> None:
    """``is_init`` is the first step of an episode of the environment, whatever is in the memory; and
    sequences go on only to the next step, or to the beginning of an episode.
    """
    for across in (False, True):
        for length in (1, 3):
            batch = memory.sample(100, sequence=length, across_episodes=across)
            check_oracle(batch)
            env, run, episode, t, _, _ = batch["observation"].unbind(-1)
            assert torch.equal(batch["is_init"].squeeze(-1), t == 0)
            goes_on = (run[:, 1:] == run[:, :-1]) & (episode[:, 1:] == episode[:, :-1])
            goes_on &= t[:, 1:] == t[:, :-1] + 1
            assert (env == env[:, :1]).all()
            assert (goes_on | across & (t[:, 1:] == 0)).all()


def check_nothing_is_cut(memory: ReplayMemory) -> None:
    """A sequence begins with every step whose next one is there."""
    every = memory[:]
    there = {
        tuple(row[:5]): number
        for row, number in zip(
            every["observation"].tolist(), every["index"].tolist(), strict=True
        )
    }
    expected = {
        number
        for (env, run, episode, t, total), number in there.items()
        if (env, run, episode, t + 1, total + 1) in there
    }
    begins = memory.sample(2000, sequence=2)["index"][:, 0]
    assert set(begins.tolist()) == expected


PLACES = [
    pytest.param(Collector, 1, {}, id="row by row"),
    pytest.param(Collector, 3, {}, id="here"),
    pytest.param(Collector, 3, {"compact_obs": True}, id="compact"),
    pytest.param(MultiSyncCollector, 3, {"backend": "threads"}, id="sync"),
    pytest.param(MultiAsyncCollector, 3, {"backend": "threads"}, id="async"),
    pytest.param(MultiSyncCollector, 3, {}, marks=pytest.mark.slow, id="processes"),
    pytest.param(on_nodes.Together, 3, {}, marks=pytest.mark.slow, id="nodes"),
]


@pytest.mark.parametrize(("cls", "rows", "options"), PLACES)
@pytest.mark.parametrize("random_start", [0, 6])
def test_is_init_is_the_first_step_of_an_episode(
    tmp_path, cls, rows, options, random_start
):
    """Also after rows were dropped, and where the rows before were never in the memory."""
    groups = 1 if cls is Collector else 2
    make = oracles(tmp_path, groups, 2)("oracle")
    memory = ReplayMemory(60, seed=0)  # a ring is full after 15 or 30 rows
    collector = cls(
        make,
        None,
        num_envs=2,
        frames_per_batch=2 * rows * (groups if cls is not MultiAsyncCollector else 1),
        max_decorrelation_steps=random_start,
        replay_buffer=memory,
        seed=0,
        **options,
    )
    rounds = 0
    for number, _ in enumerate(taken(collector, 240 // rows), 1):
        if number % (15 // rows):
            continue
        check_beginnings(memory)
        check_nothing_is_cut(memory)
        rounds += 1
        if rounds % 3:
            memory.clear()
        if rounds % 2:
            memory.load_state_dict(memory.state_dict())
    collector.shutdown()


@pytest.mark.parametrize("rows", [1, 3])
def test_is_init_with_two_collectors_on_one_memory(tmp_path, rows):
    """A row of one collector does not begin an episode because a row of the other is before it."""
    memory = ReplayMemory(60, seed=0)
    every = [
        Collector(
            partial(OracleEnv, tmp_path / f"{i}", 0, 2),
            None,
            num_envs=2,
            frames_per_batch=2 * rows,
            max_decorrelation_steps=4 * i,
            replay_buffer=memory,
            seed=i,
        )
        for i in range(2)
    ]
    for number in range(30):
        next(iter(every[number % 2]))
        begins = memory.sample(100, sequence=1)
        t = begins["observation"][..., 3]
        assert torch.equal(begins["is_init"].squeeze(-1), t == 0)
        for length in (1, rows):
            batch = memory.sample(50, sequence=length, across_episodes=True)
            check_oracle(batch)
            t = batch["observation"][..., 3]
            assert ((t[:, 1:] == t[:, :-1] + 1) | (t[:, 1:] == 0)).all()


class Blind(gymnasium.Env[Any, Any]):
    """Its observations are always the same. The reward is the number of the step over all episodes,
    after ``first``.
    """

    observation_space = gymnasium.spaces.Box(0, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, first: int, length: int) -> None:
        self.number = first
        self.length = length
        self.t = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.number += 1
        self.t += 1
        over = self.t == self.length
        return np.zeros(2, np.float32), float(self.number), over, False, {}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("begun", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("saved", [False, True], ids=["same", "saved"])
def test_equal_observations_do_not_join_episodes(tmp_path, rows, begun, saved):
    """A memory that another collector goes on with, whose environments cannot be told apart by
    their observations.
    """

    def make(memory: ReplayMemory, first: int) -> Any:
        return Collector(
            lambda: Blind(first, 50),
            None,
            frames_per_batch=rows,
            replay_buffer=memory,
            seed=0,
        )

    memory = ReplayMemory(400, seed=0)
    for _ in taken(make(memory, 0), 4):
        pass
    if saved:
        memory.save(tmp_path)
        memory = ReplayMemory(400, seed=0)
        memory.load(tmp_path)
    other = make(memory, 1000)
    if begun:
        other.rollout()  # which no memory gets
    for _ in taken(other, 4):
        pass
    for across in (False, not begun):
        lines = memory.sample(300, sequence=2, across_episodes=across)
        number = lines["next", "reward"].squeeze(-1)
        begins = lines["is_init"].squeeze(-1)
        assert torch.equal(begins, number % 1000 == 1)
        assert ((number[:, 1] == number[:, 0] + 1) | begins[:, 1]).all()
    later = memory.sample(300, n_step=2, gamma=1.0)
    numbers = later["next", "reward"].reshape(-1)
    two = later["steps_to_next_obs"].reshape(-1) == 2
    assert (numbers[two] % 2 == 1).all()  # of a step and the one after it
    newest = {float(row["next", "reward"]) for row in memory.newest(1)}
    newest.add(4.0 * rows)  # of the first collector
    assert set(numbers[~two].tolist()) == newest


@pytest.mark.parametrize("rows", [1, 3])
def test_equal_observations_do_not_join_the_episodes_of_two_collectors(rows):
    """They take turns, and are always at the same step of the same trajectory."""
    memory = ReplayMemory(400, seed=0)
    every = [
        Collector(
            partial(Blind, first, 50),
            None,
            frames_per_batch=rows,
            replay_buffer=memory,
            seed=0,
        )
        for first in (0, 1000)
    ]
    for number in range(8):
        next(iter(every[number % 2]))
    batch = memory.sample(300, n_step=2, gamma=1.0)
    two = batch["steps_to_next_obs"].squeeze(-1) == 2
    assert two.any() == (rows > 1)
    assert (batch["next", "reward"].squeeze(-1)[two] % 2 == 1).all()  # of two in a row
    lines = memory.sample(300, sequence=1)
    is_first = lines["next", "reward"] % 1000 == 1
    assert torch.equal(lines["is_init"], is_first)


def numbers(memory: ReplayMemory) -> Counter[tuple[int, int, int]]:
    """Environment, run, and number of the step in this run, of every transition."""
    every = memory[:]
    check_oracle(every)
    places = every["observation"][:, [0, 1, 4]].tolist()
    return Counter((env, run, total) for env, run, total in places)


def check_whole(memory: ReplayMemory, path: Any, left: int) -> None:
    """No transition is there twice, and all of the newest are there but ``left`` in all."""
    found = numbers(memory)
    assert set(found.values()) == {1}
    executed = OracleEnv.read(path)[:, 2]
    missing = 0
    for env, steps in enumerate(executed.tolist()):
        mine = sorted((run, total) for number, run, total in found if number == env)
        assert mine
        missing += steps - mine[-1][1] - 1 if mine[-1][0] == 0 else 0
        runs = Counter(run for run, _ in mine)
        if len(runs) == 1:
            assert mine[-1][1] - mine[0][1] + 1 == len(mine)
    assert missing <= left


FIRST_READY = [
    (MultiAsyncCollector, {"backend": "threads"}),
    (MultiAsyncCollector, {"backend": "threads", "num_workers": 1}),
    pytest.param(MultiAsyncCollector, {"num_workers": 2}, marks=pytest.mark.slow),
    pytest.param(on_nodes.AsReady, {}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("cls", "options"), FIRST_READY)
def test_first_ready(tmp_path, cls, options):
    memory = ReplayMemory(100, seed=0)
    path = tmp_path / "oracle"
    collector = cls(
        [partial(OracleEnv, path, 2 * i, 2) for i in range(3)],
        None,
        num_envs=2,
        frames_per_batch=8,
        replay_buffer=memory,
        seed=0,
        **options,
    )
    for none in taken(collector, 40):
        assert none is None
        check_oracle(memory.sample(20))
    check_sequences(memory)
    assert_accounted(collector)
    collector.shutdown()
    found = numbers(memory)
    assert set(found.values()) == {1}


@pytest.mark.parametrize("rows", [1, 6])
def test_resets_by_number(tmp_path, rows):
    """The rows after a reset do not continue the episode before, whose last observation stays."""
    memory = ReplayMemory(400, seed=0)
    path = tmp_path / "oracle"
    collector = Collector(
        partial(OracleEnv, path, 0, 3),
        None,
        num_envs=3,
        frames_per_batch=3 * rows,
        replay_buffer=memory,
        seed=0,
    )
    rng = np.random.default_rng(0)
    for number, _ in enumerate(taken(collector, 300 // rows)):
        if number % 3 == 0:
            collector.reset(sorted({int(env) for env in rng.integers(0, 3, 2)}))
        if number % 10 == 0:
            numbers(memory)
        if number == 100 // rows:
            collector.reset()
    found = numbers(memory)
    assert sum(found.values()) == len(memory) == 399
    check_sequences(memory)


@pytest.mark.parametrize("cls", [Collector, MultiSyncCollector, MultiAsyncCollector])
@pytest.mark.parametrize(
    "between", ["rollout", "episodes", "surplus", "steps", "clear", "state", "reset"]
)
@pytest.mark.parametrize("rows", [1, 3])
def test_calls_between_batches(tmp_path, cls, between, rows):
    """What another call has collected is not in the memory, or is; it is never skipped over."""
    memory = ReplayMemory(400, seed=0)
    path = tmp_path / "oracle"
    make = partial(OracleEnv, path, 0, 2)
    collector = cls(
        make if cls is Collector else [make],
        None,
        num_envs=2,
        frames_per_batch=2 * rows,
        replay_buffer=memory,
        seed=0,
        **({} if cls is Collector else {"backend": "threads"}),
    )
    for _ in taken(collector, 12):
        if between == "rollout":
            batch = collector.rollout()
            check_oracle(batch)
        elif between == "episodes":
            collector.collect(n_episode=2)
        elif between == "surplus":
            collector.collect(n_episode=2, surplus="discard")
        elif between == "steps":
            collector.collect(n_step=4)
        elif between == "clear":
            memory.clear()
            collector.collect(n_step=3)
        elif between == "reset":
            collector.reset()
        else:
            collector.load_state_dict(collector.state_dict())
    assert set(numbers(memory).values()) == {1}
    if between == "steps" and cls is not MultiAsyncCollector:
        assert len(memory) == 12 * 2 * rows + 12 * 4
    if between in ("episodes", "surplus", "steps") or (rows > 1 and between != "clear"):
        check_sequences(memory)
    assert_accounted(collector)
    collector.shutdown()


def test_a_state_from_before_is_loaded(tmp_path):
    """The same rows are collected again: they follow the newest ones, and continue none."""
    memory = ReplayMemory(400, seed=0)
    collector = Collector(
        lambda: CountingEnv(5, noise=True),
        None,
        frames_per_batch=3,
        replay_buffer=memory,
        seed=0,
    )
    next(iter(collector))
    state = collector.state_dict()
    for _ in taken(collector, 2):
        pass
    collector.load_state_dict(state)
    for _ in taken(collector, 3):
        pass
    every = memory[:]
    over = every["next", "done"].squeeze(-1)
    assert torch.equal(
        every["next", "observation"][:, 1], every["observation"][:, 1] + 1
    )
    assert (over == (every["next", "observation"][:, 1] == 5)).all()
    starts = memory.sample(100, sequence=4)["observation"][..., 1]
    assert torch.equal(starts, starts[:, :1] + torch.arange(4))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("new", [False, True], ids=["same", "new"])
def test_a_loaded_state_goes_on_with_its_episodes(rows, new):
    """They are recognized by the observation after the newest row."""
    memory = ReplayMemory(400, seed=0)

    def make() -> Any:
        return Collector(
            lambda: CountingEnv(10**6),
            None,
            num_envs=2,
            frames_per_batch=2 * rows,
            replay_buffer=memory,
            seed=0,
        )

    collector = make()
    for _ in range(4):
        for _ in taken(collector, 3):
            pass
        state = collector.state_dict()
        if new:
            collector = make()
        collector.load_state_dict(state)
    size = 4 * 3 * rows
    batch = memory.sample(1, sequence=size)
    assert batch["observation"][0, :, 1].tolist() == list(range(size))
    assert len(memory) == 2 * size


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("goes_on", [False, True], ids=["new", "resumed"])
def test_a_loaded_memory_continues_episodes_if_the_collector_does(
    tmp_path, rows, goes_on
):
    def make(memory: ReplayMemory) -> Any:
        return Collector(
            lambda: CountingEnv(10**6, noise=True),
            None,
            num_envs=2,
            frames_per_batch=2 * rows,
            replay_buffer=memory,
            seed=0,
        )

    memory = ReplayMemory(400, seed=0)
    collector = make(memory)
    for _ in taken(collector, 5):
        pass
    memory.save(tmp_path)
    state = collector.state_dict()
    loaded = ReplayMemory(400)
    loaded.load(tmp_path)
    assert torch.equal(loaded.sample(30)["index"], memory.sample(30)["index"])
    other = make(loaded)
    if goes_on:
        other.load_state_dict(state)
    for _ in taken(other, 5):
        pass
    every = loaded[:]
    assert torch.equal(
        every["next", "observation"][:, 1], every["observation"][:, 1] + 1
    )
    size = 10 * rows
    if goes_on:
        batch = loaded.sample(1, sequence=size)
        assert batch["observation"][0, :, 1].tolist() == list(range(size))
    else:
        with pytest.raises(NothingToSample):
            loaded.sample(1, sequence=size // 2 + 1)
        batch = loaded.sample(1, sequence=size, across_episodes=True)
        assert batch["is_init"].sum() == 2


@pytest.mark.parametrize("rows", [1, 3])
def test_two_collectors_take_turns(tmp_path, rows):
    memory = ReplayMemory(300, seed=0)
    every = [
        Collector(
            partial(OracleEnv, tmp_path / f"{i}"),
            None,
            frames_per_batch=rows,
            replay_buffer=memory,
            seed=i,
        )
        for i in range(2)
    ]
    for _ in range(40):
        for collector in every:
            next(iter(collector))
        check_oracle(memory.sample(30))
    check_oracle(memory[:])
    if rows > 1:
        check_oracle(memory.sample(100, sequence=rows))


@pytest.mark.parametrize("workers", [False, True], ids=["here", "threads"])
def test_random_frames_first(tmp_path, workers):
    memory = ReplayMemory(300, seed=0)
    path = tmp_path / "oracle"
    make = partial(OracleEnv, path, 0, 2)
    cls = partial(MultiSyncCollector, backend="threads") if workers else Collector
    collector = cls(
        [make] if workers else make,
        None,
        num_envs=2,
        frames_per_batch=4,
        init_random_frames=20,
        replay_buffer=memory,
        seed=0,
    )
    next(iter(collector))
    assert len(memory) >= 4
    for _ in taken(collector, 9):
        pass
    assert set(numbers(memory).values()) == {1}
    assert len(memory) == 40
    collector.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("cls", [MultiSyncCollector, MultiAsyncCollector])
def test_restarts_of_workers(tmp_path, cls):
    memory = ReplayMemory(1000, seed=0)
    path = tmp_path / "oracle"
    faults = [Fault(_raise, at=13), None]
    collector = cls(
        [partial(OracleEnv, path, 2 * i, 2, faults[i]) for i in range(2)],
        None,
        num_envs=2,
        frames_per_batch=8 if cls is MultiSyncCollector else 4,
        replay_buffer=memory,
        on_failure="restart",
        seed=0,
    )
    found = Counter[tuple[int, int, int]]()
    for _ in taken(collector, 100_000):
        check_oracle(memory.sample(10))
        found = numbers(memory)
        if any(run for _, run, _ in found) and len(found) > 200:
            break
    check_sequences(memory)
    assert set(found.values()) == {1}
    assert {run for env, run, _ in found if env < 2} == {0, 1}
    assert_accounted(collector)
    collector.shutdown()


def _raise(_: Any) -> Any:
    raise RuntimeError("the gripper slipped")


def test_an_environment_fails_here(tmp_path):
    memory = ReplayMemory(1000, seed=0)
    collector = Collector(
        partial(OracleEnv, tmp_path / "oracle", 0, 2, Fault(_raise, at=13)),
        None,
        num_envs=2,
        frames_per_batch=8,
        replay_buffer=memory,
        seed=0,
    )
    errors = 0
    for _ in range(20):
        try:
            next(iter(collector))
        except Exception:  # noqa: BLE001 (whatever it is, the next call goes on)
            errors += 1
    assert errors
    assert set(numbers(memory).values()) == {1}
    check_sequences(memory)


class Moody(torch.nn.Module):
    """Fails in every fifth call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls % 5 == 0:
            raise RuntimeError("not now")
        return observation.sum(-1) % 5


@pytest.mark.parametrize("rows", [1, 4])
def test_rows_that_another_call_discards(tmp_path, rows):
    """After an error another call gives up the rows so far, in the middle of an episode."""
    memory = ReplayMemory(1000, seed=0)
    collector = Collector(
        partial(OracleEnv, tmp_path / "oracle", 0, 2),
        Moody(),
        num_envs=2,
        frames_per_batch=2 * rows,
        replay_buffer=memory,
        seed=0,
    )
    every = [
        lambda: next(iter(collector)),
        lambda: collector.collect(n_step=6),
        collector.rollout,
    ]
    errors = 0
    for number in range(120):
        try:
            every[number % 3]()
        except PolicyError:
            errors += 1
        if len(memory):
            check_oracle(memory[:])
    assert errors > 10
    assert rows == 1 or collector.stats().discarded
    assert set(numbers(memory).values()) == {1}
    check_sequences(memory, 2)
    assert_accounted(collector)


@pytest.mark.parametrize("rows", [1, 3])
def test_two_threads_write_while_a_third_samples(tmp_path, rows):
    memory = ReplayMemory(40, seed=0)
    every = [
        Collector(
            partial(OracleEnv, tmp_path / f"{i}", 0, 2),
            None,
            num_envs=2,
            frames_per_batch=2 * rows,
            total_frames=1200 * rows,
            replay_buffer=memory,
            seed=i,
        )
        for i in range(2)
    ]
    for collector in every:
        collector.start()
    sampled = 0
    while any(collector.is_running() for collector in every):
        if len(memory):
            check_oracle(memory.sample(16))
            sampled += 1
    assert sampled
    check_oracle(memory[:])
    for collector in every:
        collector.shutdown()


BACKGROUND = [
    (Collector, {}),
    (AsyncCollector, {}),
    (MultiAsyncCollector, {"backend": "threads"}),
    (MultiSyncCollector, {"backend": "threads"}),
    pytest.param(MultiAsyncCollector, {"num_workers": 2}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("cls", "options"), BACKGROUND)
def test_the_learner_samples_while_rows_are_written(tmp_path, cls, options):
    """A small memory, so that rows are overwritten all the time; resets, for what is kept aside."""
    groups = 1 if cls in (Collector, AsyncCollector) else 2
    memory = ReplayMemory(24 * groups, seed=0, alpha=0.5)
    make = oracles(tmp_path, groups, 2)
    collector = cls(
        make("oracle"),
        None,
        num_envs=2,
        frames_per_batch=4 * groups,
        replay_buffer=memory,
        total_frames=1200 * groups,
        max_frames_per_traj=3,
        seed=0,
        **options,
    )
    if cls is AsyncCollector:
        collecting = threading.Thread(target=lambda: [None for _ in collector])
        collecting.start()
        is_running = collecting.is_alive
    else:
        collector.start()
        is_running = collector.is_running
    sampled = 0
    while is_running():
        if len(memory) < 20:
            continue
        batch = memory.sample(16)
        check_oracle(batch)
        memory.update_priority(batch["index"], torch.rand(16))
        batch = memory.sample(16, sequence=2)
        check_oracle(batch)
        t = batch["observation"][..., 3]
        assert (t[:, 1] == t[:, 0] + 1).all()
        check_oracle(memory[:])
        sampled += 1
    assert sampled
    collector.shutdown()
    assert set(numbers(memory).values()) == {1}


# --- errors ---------------------------------------------------------------------------------------


def collecting(memory: ReplayMemory, env: Any = CountingEnv, **options: Any) -> Any:
    """A collector that has collected something."""
    collector = Collector(
        env, None, replay_buffer=memory, **{"frames_per_batch": 4, "seed": 0, **options}
    )
    next(iter(collector))
    return collector


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"postproc": lambda batch: batch}, "leave postproc out"),
        ({"split_trajs": True}, "leave split_trajs out"),
        ({"trajs_per_batch": 2}, "leave trajs_per_batch out"),
        ({"set_truncated": True}, "leave set_truncated out"),
        ({"extend_buffer": False}, "leave extend_buffer=False out"),
    ],
)
def test_options_that_change_batches(options, match):
    with pytest.raises(BadOption, match=match):
        collecting(ReplayMemory(10), **options)


@pytest.mark.parametrize(
    "cls", [Collector, MultiSyncCollector], ids=lambda cls: cls.__name__
)
def test_batches_after_episodes_if_columns_are_hidden(cls):
    options: dict[str, Any] = {} if cls is Collector else {"backend": "threads"}
    memory = ReplayMemory(100)
    with cls(
        [CountingEnv],
        None,
        frames_per_batch=5,
        track_traj_ids=False,
        replay_buffer=memory,
        **options,
    ) as collector:
        collector.collect(n_episode=2)
        collector.next()
        collector.next()
        assert_accounted(collector)
    assert len(memory) == 16


def test_a_memory_that_is_too_small():
    with pytest.raises(BadOption, match="is smaller than a rollout: 4 steps of 1"):
        collecting(ReplayMemory(3))
    with pytest.raises(BadOption, match="is smaller"):
        collecting(ReplayMemory(3), num_envs=4)
    collecting(ReplayMemory(4))


def test_a_call_for_more_steps_than_the_memory_has_room_for():
    """It has no effect on the batches of a collector that resumes after it."""

    def made(memory: ReplayMemory) -> Collector:
        return Collector(
            partial(CountingEnv, 5),
            None,
            frames_per_batch=2,
            replay_buffer=memory,
            seed=0,
        )

    memory = ReplayMemory(6)
    with made(memory) as first:
        first.collect(n_step=600)
        assert memory[:]["observation"][:, 1].tolist() == [4, 0, 1, 2, 3, 4]
        state = first.state_dict()
    loaded = ReplayMemory(6)
    loaded.load_state_dict(memory.state_dict())
    with made(loaded) as second:
        second.load_state_dict(state)
        second.next()
        assert loaded[:]["observation"][:, 1].tolist() == [1, 2, 3, 4, 0, 1]
        second.collect(n_step=7)
        assert loaded[:]["observation"][:, 1].tolist() == [3, 4, 0, 1, 2, 3]
        assert_accounted(second)


@pytest.mark.parametrize("frames", [2, 6])
@pytest.mark.parametrize("policy", [None, Moved], ids=["random", "policy"])
@pytest.mark.parametrize("cut", [1, 2, 4])
def test_random_frames_are_those_of_batches_also_after_a_resume(
    tmp_path, frames, policy, cut
):
    def made(name: str, memory: ReplayMemory | None) -> Collector:
        return Collector(
            partial(OracleEnv, tmp_path / name, 0, 2),
            None if policy is None else policy(),
            num_envs=2,
            frames_per_batch=frames,
            init_random_frames=2 * frames,
            replay_buffer=memory,
            seed=0,
        )

    with made("plain", None) as plain:
        batches = [batch["action"].clone() for batch in taken(plain, 6)]
    expected = torch.cat(batches, 1)
    memory = ReplayMemory(100)
    with made("memory", memory) as first:
        for _ in taken(first, cut):
            pass
        state = first.state_dict()
    loaded = ReplayMemory(100)
    loaded.load_state_dict(memory.state_dict())
    with made("memory", loaded) as second:
        second.load_state_dict(state)
        for _ in taken(second, 6 - cut):
            pass
    assert torch.equal(loaded[:]["action"].reshape(-1, 2).T, expected)


def test_keys_that_do_not_exist():
    with pytest.raises(BadOption, match=r"there is no value.*collector\.traj_ids"):
        collecting(ReplayMemory(10, keep=["value"]))


def test_objects_are_not_stored():
    class Texts(gymnasium.ObservationWrapper[Any, Any, Any]):
        observation_space = gymnasium.spaces.Text(4)

        def observation(self, observation: Any) -> str:
            return "abc"

    with pytest.raises(BadOption, match="observation are Python objects"):
        collecting(ReplayMemory(10), lambda: Texts(CountingEnv()))


def test_a_memory_of_other_environments():
    memory = ReplayMemory(100)
    collecting(memory)
    with pytest.raises(
        BadOption, match=r"\[1\] environments, and the collector has \[2\]"
    ):
        collecting(memory, num_envs=2)
    with pytest.raises(BadOption, match="differ: .'observation'"):
        collecting(memory, lambda: CountingEnv(noise=True))
    assert len(memory) == 4


class Acts(gymnasium.Env[Any, Any]):
    """Any action, and an observation that counts the steps of episodes of five."""

    observation_space = gymnasium.spaces.Box(0, 5, (), np.float32)

    def __init__(self, action_space: gymnasium.Space[Any]) -> None:
        self.action_space = action_space
        self.t = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return np.float32(self.t), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return np.float32(self.t), float(self.t), self.t == 5, False, {}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "space",
    [
        spaces.Dict(arm=spaces.Discrete(3), leg=spaces.Box(-1, 1, (2,))),
        spaces.Tuple((spaces.Discrete(3), spaces.MultiBinary(2))),
        spaces.Dict(arm=spaces.Dict(hand=spaces.MultiDiscrete([2, 3]))),
    ],
    ids=["dict", "tuple", "nested"],
)
def test_actions_of_several_parts(space, rows):
    memory = check_parity(
        Collector,
        lambda _: partial(Acts, space),
        [2],
        capacity=40,
        batches=20,
        num_envs=2,
        frames_per_batch=2 * rows,
    )
    kept = ReplayMemory(40, keep=["action"])
    collecting(kept, partial(Acts, space))
    assert set(kept[:].keys(True, True)) == set(memory[:].keys(True, True))


def test_an_action_that_is_an_object():
    with pytest.raises(BadOption, match="action are Python objects"):
        collecting(ReplayMemory(10), partial(Acts, spaces.Text(4)))


def named() -> Any:
    """A TorchRL environment whose action and rewards have names of its own."""
    data = pytest.importorskip("torchrl.data")
    envs = pytest.importorskip("torchrl.envs")

    class NamedByItself(envs.EnvBase):
        def __init__(self) -> None:
            super().__init__()
            self.t = 0
            self.observation_spec = data.Composite(place=data.Unbounded((1,)))
            self.action_spec = data.Composite(
                move=data.Bounded(-1, 1, (2,)),
                crew=data.Composite(turn=data.Categorical(3, (1,))),
            )
            self.reward_spec = data.Composite(
                gain=data.Unbounded((1,)),
                crew=data.Composite(pay=data.Unbounded((2, 1))),
            )

        def _out(self, **more: Any) -> Any:
            return TensorDict({"place": torch.tensor([float(self.t)]), **more})

        def _reset(self, tensordict: Any = None, **_: Any) -> Any:
            self.t = 0
            return self._out()

        def _step(self, tensordict: Any) -> Any:
            self.t += 1
            pay = torch.tensor([[10.0], [100.0]]) * self.t
            return self._out(
                gain=torch.tensor([float(self.t)]),
                crew={"pay": pay},
                done=torch.tensor([self.t == 4]),
            )

        def _set_seed(self, seed: Any) -> None:
            torch.manual_seed(0 if seed is None else seed)

    return NamedByItself()


@pytest.mark.parametrize("rows", [1, 3])
def test_actions_and_rewards_with_names_of_the_environment(rows):
    memory = check_parity(
        Collector,
        lambda _: named,
        [1],
        capacity=40,
        batches=20,
        frames_per_batch=rows,
    )
    batch = memory.sample(50, n_step=2, gamma=0.5)
    first = batch["place"] + 1
    expected = first + (first < 4) * 0.5 * (first + 1)
    assert torch.equal(batch["next", "gain"], expected)
    shares = torch.tensor([[10.0], [100.0]])
    assert torch.equal(batch["next", "crew", "pay"], expected.unsqueeze(-1) * shares)


class Named(gymnasium.Env[Any, Any]):
    """An observation of any name and shape, which counts steps."""

    action_space = spaces.Discrete(2)

    def __init__(self, name: str, shape: tuple[int, ...] = (2,)) -> None:
        self.t = 0
        one = spaces.Box(0, 99, shape)
        self.observation_space = spaces.Dict({name: one, "x": one})

    def observation(self) -> Any:
        return {
            name: np.full(space.shape, self.t, np.float32)
            for name, space in self.observation_space.items()
        }

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.t = 0
        return self.observation(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return self.observation(), 1.0, self.t == 5, False, {}


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(
    ("name", "memory", "asked", "of"),
    [
        ("index", {}, {}, "ReplayMemory"),
        ("weight", {"alpha": 0.5}, {}, "ReplayMemory(alpha=...)"),
        ("gamma", {}, {"n_step": 2}, "sample(n_step=...)"),
        ("steps_to_next_obs", {}, {"n_step": 2}, "sample(n_step=...)"),
        ("is_init", {}, {"sequence": 2}, "sample(sequence=...)"),
        ("steps", {}, {"relabel": lambda *_: None}, "sample(relabel=...)"),
    ],
)
def test_observations_whose_names_a_sample_needs_itself(name, memory, asked, of, rows):
    made = ReplayMemory(20, **memory)
    with pytest.raises(BadOption, match=re.escape(f"{of} writes '{name}' into")):
        collector = collecting(made, lambda: Named(name), frames_per_batch=rows)
        for _ in taken(collector, 4):
            pass
        made.sample(4, **asked)
    if asked:
        assert made[:][name].equal(made[:]["x"])
    if memory:
        other = ReplayMemory(20)
        collecting(other, lambda: Named(name), frames_per_batch=rows)
        assert other[:][name].equal(other[:]["x"])


@pytest.mark.parametrize("rows", [1, 4])
def test_observations_without_elements(rows):
    memory = ReplayMemory(20)
    collecting(memory, lambda: Named("empty", (0, 3)), frames_per_batch=rows)
    assert memory.sample(4)["empty"].shape == (4, 0, 3)
    assert memory.sample(4, n_step=2)["next", "empty"].shape == (4, 0, 3)
    assert memory.sample(4, sequence=1)["empty"].shape == (4, 1, 0, 3)


@pytest.mark.parametrize("capacity", [10**15, 2**62])
def test_a_memory_that_is_too_large(capacity):
    with pytest.raises(BadOption, match="Give it a smaller capacity"):
        collecting(ReplayMemory(capacity))


def test_agents_that_take_turns():
    pytest.importorskip("pettingzoo")
    from pettingzoo.classic import tictactoe_v3

    with pytest.raises(BadOption, match="take turns"):
        collecting(ReplayMemory(100), lambda: tictactoe_v3.env())
