"""TorchRL environments behind ``EnvBatch``: what is stored, seeds, resets, errors, random actions."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import nn

from muster import Collector
from muster.errors import BadEnvOutput, BadOption, EnvError, UnsupportedEnv
from muster.policies import categorical
from muster.testing import CountingEnv
from tests.tools import assert_accounted, assert_same, collect, column

pytest.importorskip("torchrl")

from torchrl.data import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    Unbounded,
)
from torchrl.envs import (
    CatFrames,
    Compose,
    EnvBase,
    GymEnv,
    GymWrapper,
    InitTracker,
    ParallelEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    TensorDictPrimer,
    TransformedEnv,
)
from torchrl.testing import mocking_classes as mocks

from muster.envs.torchrl import TorchRLEnvs, adapt

pytestmark = pytest.mark.filterwarnings("ignore")


def ones(td: Any) -> Any:
    """A policy that counts on."""
    return td.set("action", torch.ones(*td.shape, 1, dtype=torch.int8))


class Counter(EnvBase):
    """Counts up; the episode number and the keywords of the last reset are in its observation."""

    def __init__(self, length: int = 3, **broken: Any) -> None:
        super().__init__()
        self.length, self.broken = length, broken
        self.observation_spec = Composite(observation=Unbounded(3, dtype=torch.int64))
        self.action_spec, self.reward_spec = Binary(1, dtype=torch.int8), Unbounded(1)
        self.t, self.episodes, self.start, self.seen = 0, 0, 0, []

    def _observe(self) -> Any:
        return TensorDict(
            {"observation": torch.tensor([self.episodes, self.t, self.start])}
        )

    def _reset(self, tensordict: Any = None, *, start: int = 0) -> Any:
        if "reset" in self.broken:
            raise RuntimeError("no reset today")
        self.episodes, self.t, self.start = self.episodes + 1, 0, start
        return self._observe()

    def _step(self, tensordict: Any) -> Any:
        self.seen.append(tensordict)
        self.t += 1
        td = self._observe().update(
            {"reward": torch.ones(1), "done": torch.tensor([self.t >= self.length])}
        )
        if self.t == 2 and "step" in self.broken:
            raise RuntimeError("no step today")
        if self.t == 2 and "output" in self.broken:
            td.update(self.broken["output"])
        return td.exclude(*self.broken.get("without", ())) if self.t == 2 else td

    def _set_seed(self, seed: int | None) -> None:
        self.start = -1
        self.episodes = seed


# --- shapes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "num_envs", "shape"),
    [
        (Counter, None, (6,)),
        (Counter, 1, (1, 6)),
        (Counter, 3, (3, 2)),
        (
            partial(mocks.CountingBatchedEnv, max_steps=torch.ones(3), batch_size=(3,)),
            None,
            (3, 2),
        ),
        (
            partial(
                mocks.CountingBatchedEnv, max_steps=torch.ones(2, 3), batch_size=(2, 3)
            ),
            None,
            (2, 3, 1),
        ),
        (lambda: SerialEnv(2, Counter), None, (2, 3)),
    ],
)
def test_the_batch_size_of_the_environment_is_that_of_the_batch(make, num_envs, shape):
    with Collector(make, None, num_envs=num_envs, frames_per_batch=6) as collector:
        batch = collector.rollout()
    assert batch.batch_size == shape
    assert batch["next", "reward"].shape == (*shape, 1)


def test_several_environments_of_a_factory_that_makes_batches_are_refused():
    make = partial(mocks.CountingBatchedEnv, max_steps=torch.ones(3), batch_size=(3,))
    with pytest.raises(BadOption, match="a batch of environments already"):
        Collector(make, None, num_envs=2, frames_per_batch=6)


def test_environments_with_unequal_specs_are_refused():
    widths = iter([3, 4])
    with pytest.raises(UnsupportedEnv, match="env 1 differ"):
        Collector(
            lambda: mocks.ContinuousActionVecMockEnv(
                observation_spec=None, action_spec=Bounded(-1, 1, (next(widths),))
            ),
            None,
            num_envs=2,
            frames_per_batch=6,
        )


def test_the_same_object_twice_is_refused():
    env = Counter()
    with pytest.raises(UnsupportedEnv, match="same object twice"):
        adapt([env, env], None)


def test_observations_with_names_of_the_batch_are_refused():
    env = Counter()
    env.observation_spec = Composite(action=Unbounded(3))
    with pytest.raises(UnsupportedEnv, match="RenameTransform"):
        adapt([env], None)


# --- pairing --------------------------------------------------------------------------------------


@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    batches=st.integers(1, 3),
    T=st.integers(1, 6),
    limit=st.none() | st.integers(1, 6),
)
def test_batched_environments_end_one_by_one(lengths, batches, T, limit):
    max_steps = torch.tensor(lengths) - 1
    make = partial(
        mocks.CountingBatchedEnv, max_steps=max_steps, batch_size=(len(lengths),)
    )
    frames = T * len(lengths)
    batch = collect(
        make, ones, batches=batches, frames_per_batch=frames, max_frames_per_traj=limit
    )
    for b, length in enumerate(lengths):
        end = min(length, limit or length)
        steps = [t % end for t in range(T * batches)]
        assert column(batch[b], "observation") == [[step] for step in steps]
        assert column(batch[b], "next", "observation") == [[step + 1] for step in steps]
        assert column(batch[b], "next", "done") == [step + 1 == end for step in steps]
        assert column(batch[b], "next", "terminated") == [
            step + 1 == length for step in steps
        ]


def test_any_flag_at_the_root_prevails_over_those_below():
    class Over(mocks.MockNestedResetEnv):
        def __init__(self) -> None:
            super().__init__(3, False)
            self.done_spec = Composite(
                {
                    "over": Binary(1, dtype=torch.bool),
                    ("agent", "done"): Binary(1, dtype=torch.bool),
                }
            )

        def _reset(self, tensordict: Any = None) -> Any:
            self._counter = 0
            return TensorDict({("agent", "done"): torch.zeros(1, dtype=bool)})

        def _step(self, tensordict: Any) -> Any:
            self._counter += 1
            return TensorDict(
                {
                    "over": torch.tensor([self._counter == 3]),
                    ("agent", "done"): torch.ones(1, dtype=bool),
                }
            )

    batch = collect(Over, None, frames_per_batch=7)
    assert batch["collector", "traj_ids"].tolist() == [0, 0, 0, 1, 1, 1, 2]
    assert batch["next", "over"].flatten().tolist() == [False, False, True] * 2 + [
        False
    ]


def test_rewards_of_several_agents_are_all_stored_and_their_sum_is_the_return():
    with Collector(
        partial(mocks.MultiKeyCountingEnv, max_steps=1),
        Everything(),
        frames_per_batch=8,
    ) as collector:
        batch = collector.rollout()
        episodes = collector.episodes
    after = batch["next"]
    parts = [after["reward"], after["nested_1", "gift"], after["nested_2", "reward"]]
    total = sum(part.reshape(8, -1).sum(-1) for part in parts)
    assert total[0] == 1 + 3 + 2 * 0.5
    assert [record.episode_return for record in episodes] == [
        float(total[i : i + 2].sum()) for i in (0, 2, 4, 6)
    ]


class Everything(TensorDictModuleBase):
    in_keys: list[Any] = []  # noqa: RUF012
    out_keys = ["action", ("nested_1", "action"), ("nested_2", "azione")]  # noqa: RUF012

    def forward(self, td: Any) -> Any:
        td.set("action", torch.tensor([0, 1]))
        td.set(("nested_1", "action"), torch.ones(3, dtype=torch.int64))
        td.set(("nested_2", "azione"), torch.full((2, 1), 0.5))
        return td


def test_a_step_count_of_the_environment_and_a_limit_exclude_each_other():
    with pytest.raises(BadOption, match="step_count"):
        Collector(
            TransformedEnv(Counter(3), StepCounter()),
            ones,
            frames_per_batch=5,
            max_frames_per_traj=2,
        )


# --- objects --------------------------------------------------------------------------------------


class Echo(TensorDictModuleBase):
    """Answers with the text it sees, and says how long it is."""

    in_keys = ["observation"]  # noqa: RUF012
    out_keys = ["action", "length", "note"]  # noqa: RUF012

    def forward(self, td: Any) -> Any:
        text = td["observation"]
        td.set("length", torch.tensor([len(t) for t in text] if td.ndim else len(text)))
        td.set("action", NonTensorStack.from_list(list(text)) if td.ndim else text)
        td.set(
            "note",
            NonTensorStack.from_list([f"saw {t}" for t in text])
            if td.ndim
            else f"saw {text}",
        )
        return td


@pytest.mark.parametrize("num_envs", [None, 2])
def test_policies_read_and_write_text(num_envs):
    batch = collect(
        mocks.Str2StrEnv,
        Echo(),
        num_envs=num_envs,
        batches=2,
        frames_per_batch=6,
        seed=0,
    )
    seen, said, noted = (batch[key] for key in ("observation", "action", "note"))
    rows = (
        [seen, said, noted]
        if num_envs is None
        else [[x for row in part for x in row] for part in (seen, said, noted)]
    )
    assert rows[0] == rows[1]
    assert [f"saw {text}" for text in rows[0]] == rows[2]
    assert batch["length"].flatten().tolist() == [len(text) for text in rows[0]]


class StopsAfter:
    """An interruptor that stops every rollout after ``n`` steps."""

    def __init__(self, n: int) -> None:
        self.n, self.asked = n, 0

    def collection_stopped(self) -> bool:
        self.asked += 1
        return self.asked % self.n == 0


def test_rows_that_were_not_collected_are_zeros_of_some_shape():
    for make in (
        mocks.EnvWithDynamicSpec,
        partial(mocks.HeterogeneousCountingEnv, max_steps=3),
    ):
        batch = collect(make, None, frames_per_batch=5, interruptor=StopsAfter(3))
        assert batch["collector", "traj_ids"].tolist() == [0, 0, 0, -1, -1]
        for cell in batch.unbind(0)[3:]:
            assert not any(
                part.any() for td in (cell, cell["next"]) for part in cells_of(td)
            )


def cells_of(td: Any) -> list[Any]:
    """Observations, also where they differ from agent to agent."""
    return (
        [td["observation"]]
        if "observation" in set(td.keys())
        else [part["lidar"] for part in td["lazy"].unbind(0)]
    )


class ByRow(TensorDictModuleBase):
    """Sums observations of any number of rows."""

    in_keys = ["observation"]  # noqa: RUF012
    out_keys = ["action", "rows"]  # noqa: RUF012

    def forward(self, td: Any) -> Any:
        parts = td.unbind(0) if td.ndim else [td]
        rows = torch.tensor([part["observation"].shape[1] for part in parts])
        td.set("rows", rows if td.ndim else rows[0])
        return td.set("action", torch.zeros(*td.shape, 2))


@pytest.mark.parametrize("num_envs", [None, 2])
def test_policies_read_observations_whose_shape_varies(num_envs):
    batch = collect(
        partial(mocks.EnvWithDynamicSpec, 3),
        ByRow(),
        num_envs=num_envs,
        frames_per_batch=8,
    )
    steps = batch["rows"].reshape(-1, batch.shape[-1]).tolist()
    assert steps == [[1, 2, 3, 1, 2, 3, 1, 2][: batch.shape[-1]]] * (num_envs or 1)
    cells = batch.reshape(-1).unbind(0)
    for t, cell in enumerate(cells):
        rows = steps[0][t % batch.shape[-1]]
        assert torch.equal(cell["observation"], torch.full((3, rows, 2), rows - 1.0))
        assert cell["next", "observation"].shape == (3, rows + 1, 2)


# --- seeds and resets -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrap", [lambda env: env, lambda env: TransformedEnv(env, RewardSum())]
)
def test_each_environment_in_a_serial_environment_gets_its_own_seed(wrap):
    batch = collect(
        lambda: wrap(SerialEnv(3, Counter)), ones, frames_per_batch=6, seed=10
    )
    assert batch["observation"][:, 0, 0].tolist() == [11, 12, 13]


def test_each_environment_in_a_process_gets_its_own_seed():
    make = partial(
        ParallelEnv, 2, partial(GymEnv, "Pendulum-v1"), mp_start_method="fork"
    )
    parallel = collect(make, None, frames_per_batch=12, seed=10)
    assert_same(
        parallel,
        collect(
            lambda: GymEnv("Pendulum-v1"),
            None,
            num_envs=2,
            frames_per_batch=12,
            seed=10,
        ),
    )


def test_closing_closes_what_is_open():
    envs = [SerialEnv(2, Counter), Counter()]
    for env in envs:
        Collector(env, None, frames_per_batch=4).shutdown()
        assert env.is_closed


# --- errors ---------------------------------------------------------------------------------------


def test_an_environment_that_raises_is_named_and_the_next_batch_begins_anew():
    broken = iter([{}, {"step": True}])
    with Collector(
        lambda: Counter(**next(broken)), ones, num_envs=2, frames_per_batch=8
    ) as collector:
        with pytest.raises(
            EnvError,
            match=r"Counter\[1\].step \(row 1 of the batch\) raised RuntimeError: no step",
        ) as e:
            collector.rollout()
        assert isinstance(e.value.__cause__, RuntimeError)
        stats = collector.stats()
        assert (stats.executed, stats.discarded, stats.in_flight) == (
            3,
            {"env_error": 1},
            2,
        )


class Thirds(EnvBase):
    """Observation ``t + 1/3`` in float64; what it knows of its past is what it is given: ``total``,
    in float64, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(
            observation=Unbounded(2, dtype=torch.float64),
            total=Unbounded(1, dtype=torch.float64),
        )
        self.state_spec = Composite(total=Unbounded(1, dtype=torch.float64))
        self.action_spec, self.reward_spec = Unbounded(1), Unbounded(1)
        self.given: list[Any] = []

    def _reset(self, tensordict: Any = None) -> Any:
        return TensorDict(
            {
                "observation": torch.full((2,), 1 / 3).double(),
                "total": torch.zeros(1).double(),
            }
        )

    def _step(self, tensordict: Any) -> Any:
        self.given.append(tensordict["observation"])
        total = tensordict["total"] + 1 / 3
        done = total > 0.9
        obs = total.expand(2).clone()
        return TensorDict(
            {"observation": obs, "total": total, "reward": torch.ones(1), "done": done}
        )

    def _set_seed(self, seed: int | None) -> None:
        pass


def test_observations_are_stored_in_the_dtype_of_the_network_and_state_is_not():
    env = Thirds()
    net = TensorDictModule(torch.nn.Linear(2, 1), ["observation"], ["action"])
    batch = collect(env, net, frames_per_batch=6)
    third = 1 / 3
    total = torch.tensor(
        [third, third + third, third + third + third] * 2, dtype=torch.float64
    )
    assert batch["next", "total"].dtype == torch.float64
    assert torch.equal(batch["next", "total"][:, 0], total)
    assert (
        batch["next", "observation"].dtype
        == batch["observation"].dtype
        == torch.float32
    )
    assert torch.equal(
        batch["next", "observation"], total.float()[:, None].expand(6, 2)
    )
    assert {given.dtype for given in env.given} == {torch.float64}, "as its spec says"


@pytest.mark.parametrize("plain", [True, False])
def test_mujoco_of_torchrl_with_a_float32_network(plain):
    make = partial(GymEnv, "HalfCheetah-v5", device="cpu")
    net = TensorDictModule(torch.nn.Linear(17, 6), ["observation"], ["action"])
    batch = collect(
        make if plain else lambda: TransformedEnv(make(), StepCounter()),
        net,
        frames_per_batch=10,
        seed=0,
    )
    env = make()
    env.set_seed(0)
    seen = [env.reset()]
    for action in batch["action"]:
        seen.append(env.step(seen[-1].select().set("action", action))["next"])
    expected = torch.stack([td["observation"] for td in seen])
    assert expected.dtype == torch.float64
    assert torch.equal(batch["observation"], expected[:-1].float())
    assert torch.equal(batch["next", "observation"], expected[1:].float())


def test_the_compat_stores_what_the_environment_gives_as_torchrl_does():
    from torchrl.collectors import Collector as Theirs

    from muster.compat.torchrl import Collector as Ours

    net = TensorDictModule(torch.nn.Linear(17, 6), ["observation"], ["action"])
    make = partial(GymEnv, "HalfCheetah-v5", device="cpu")
    for collector_class in (Ours, Theirs):
        with pytest.raises(
            Exception, match="must have the same dtype, but got Double and Float"
        ):
            next(iter(collector_class(make, net, frames_per_batch=10, total_frames=10)))
    collector = Ours(make(), net.double(), frames_per_batch=10, total_frames=10)
    assert next(iter(collector))["observation"].dtype == torch.float64
    collector.shutdown()


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (
            {"output": {"observation": torch.zeros(2, dtype=torch.int64)}},
            r"observation is a tensor of shape \(2,\)",
        ),
        (
            {"output": {"observation": torch.zeros(3)}},
            r"dtype torch.float32, but its spec says shape \(3,\)",
        ),
        (
            {"output": {"reward": torch.ones(1, dtype=torch.int64)}},
            r"reward is a tensor of shape \(1,\) and dtype",
        ),
        ({"without": ["observation"]}, "observation is missing"),
        (
            {"output": {"truncated": torch.tensor([True])}},
            "Cannot infer the value of terminated",
        ),
        (
            {
                "output": {
                    "terminated": torch.tensor([False]),
                    "truncated": torch.tensor([True]),
                }
            },
            "done must be terminated",
        ),
        (
            {
                "output": {
                    "done": torch.tensor([True]),
                    "terminated": torch.tensor([False]),
                }
            },
            "done must be terminated",
        ),
    ],
)
def test_what_does_not_fit_the_specs_is_refused(broken, message):
    def make() -> Any:
        env = Counter(**broken)
        env.add_truncated_keys()
        return env

    with Collector(make, ones, frames_per_batch=4) as collector:
        with pytest.raises(BadEnvOutput, match=message):
            collector.rollout()
        stats = collector.stats()
        assert (stats.executed, stats.discarded, stats.in_flight) == (
            2,
            {"bad_env_output": 1},
            1,
        )
        collector._engine.groups[0].env.envs[0].broken.clear()
        assert column(collector.rollout(), "observation") == [
            [1, 0, 0],
            [2, 0, 0],
            [2, 1, 0],
            [2, 2, 0],
        ]


def test_transforms_that_change_observations_between_steps_are_refused():
    from torchrl.envs import transforms

    class Hook(transforms.Transform):
        def _post_step_mdp_hooks(self, tensordict: Any, tensordict_: Any) -> Any:
            return tensordict, tensordict_

    with pytest.raises(UnsupportedEnv, match="Hook changes observations between"):
        adapt([TransformedEnv(Counter(), Compose(Hook()))], None)


# --- random actions -------------------------------------------------------------------------------

SPECS = {
    "one-hot": OneHot(3),
    "multi one-hot": MultiOneHot([2, 3]),
    "categorical": Categorical(4),
    "binary": Binary(3, dtype=torch.int8),
    "multi-categorical": MultiCategorical([2, 5]),
    "bounded": Bounded(torch.tensor([-1.0, 0.0]), torch.tensor([1.0, 3.0])),
    "integers": Bounded(2, 5, (2,), dtype=torch.int32),
    "unbounded": Unbounded((2,)),
    "wide integers": Bounded(-3, 3, (2,), dtype=torch.int64),
    "one-hot of floats": OneHot(3, dtype=torch.float32),
    "categorical of floats": Categorical(4, dtype=torch.float32),
    "binary of floats": Binary(3, dtype=torch.float32),
    "multi-categorical of floats": MultiCategorical([2, 5], dtype=torch.float32),
}


def with_actions(spec: Any, lead: tuple[int, ...] = ()) -> Any:
    class Acts(EnvBase):
        def __init__(self) -> None:
            super().__init__(batch_size=lead)
            self.action_spec = Composite(
                agent=Composite(move=spec.expand(*lead, *spec.shape), shape=lead),
                shape=lead,
            )
            self.observation_spec = Composite(
                observation=Unbounded((*lead, 1)), shape=lead
            )
            self.reward_spec = Unbounded((*lead, 1))

        def _reset(self, tensordict: Any = None) -> Any:
            return TensorDict({"observation": torch.zeros(*lead, 1)}, lead)

        def _step(self, tensordict: Any) -> Any:
            return self._reset().update(
                {
                    "reward": torch.rand(*lead, 1),
                    "done": torch.zeros(*lead, 1, dtype=bool),
                }
            )

        def _set_seed(self, seed: int | None) -> None:
            pass

    return Acts()


@pytest.mark.parametrize("lead", [(), (2,)])
@pytest.mark.parametrize("name", SPECS)
def test_random_actions_are_distributed_as_the_specs_own(name, lead):
    spec = SPECS[name]
    batch = collect(with_actions(spec, lead), None, frames_per_batch=1000, seed=0)
    got = batch["agent", "move"].reshape(-1, *spec.shape)
    torch.manual_seed(0)
    expected = spec.rand((3000,))
    assert got.dtype == expected.dtype
    assert spec.is_in(got) or name in ("unbounded",)
    for moment in (1, 2):
        a, b = ((x.double() ** moment).mean(0) for x in (got, expected))
        assert torch.allclose(a, b, atol=0.15 * (1 + float(b.abs().max()))), (a, b)
    kinds = len(expected.unique(dim=0))
    assert len(got.unique(dim=0)) >= min(kinds, 20) * 0.9
    if kinds <= 20:
        assert len(got.unique(dim=0)) <= kinds


class Rare(Categorical):
    """A kind of spec that is not known here: its own ``rand`` is asked."""


@pytest.mark.parametrize("spec", [OneHot(3), Rare(5)])
def test_random_actions_do_not_depend_on_how_steps_are_cut(spec):
    whole = collect(with_actions(spec), None, frames_per_batch=24, seed=3)
    assert_same(
        collect(with_actions(spec), None, batches=4, frames_per_batch=6, seed=3), whole
    )
    assert len(whole["agent", "move"].unique(dim=0)) >= 3


class Repeats(Counter):
    """Wants the action 1 in odd steps only."""

    def rand_action(self, tensordict: Any = None) -> Any:
        return tensordict.set(
            "action", (tensordict["observation"][1:2] % 2).to(torch.int8)
        )


def test_an_environment_that_draws_its_own_actions_is_asked_at_every_step():
    for num_envs in (None, 2):
        batch = collect(
            partial(Repeats, 5), None, num_envs=num_envs, batches=3, frames_per_batch=8
        )
        assert torch.equal(batch["action"].long(), batch["observation"][..., 1:2] % 2)


def test_an_environment_that_draws_its_own_actions_leaves_those_of_a_policy_alone():
    batch = collect(
        partial(Repeats, 5), ones, batches=2, frames_per_batch=8, init_random_frames=8
    )
    assert torch.equal(batch["action"][:8].long(), batch["observation"][:8, 1:2] % 2)
    assert batch["action"][8:].all()


# --- plain gymnasium inside -----------------------------------------------------------------------


def inner_kind(env: Any) -> str:
    return type(TorchRLEnvs([env])._ones[0]).__name__


def test_only_plain_gym_environments_are_stepped_through_their_inner_environment():
    class Derived(GymEnv):
        pass

    patched = GymEnv("CartPole-v1")
    patched.read_obs = lambda obs: {"observation": torch.from_numpy(obs) * 2}
    with_info = GymEnv("CartPole-v1").auto_register_info_dict()
    assert inner_kind(GymEnv("CartPole-v1")) == "PlainGym"
    assert inner_kind(GymWrapper(gymnasium.make("Pendulum-v1"))) == "PlainGym"
    others = [
        Derived("CartPole-v1"),
        patched,
        with_info,
        GymEnv("CartPole-v1", frame_skip=2),
        GymEnv("FrozenLake-v1"),
    ]
    assert [inner_kind(env) for env in others] == ["OneEnv"] * 5


def test_plain_gym_environments_in_a_serial_environment_are_stepped_one_by_one():
    def kinds(env: Any) -> list[str]:
        return [type(one).__name__ for one in TorchRLEnvs([env])._ones]

    make = partial(GymEnv, "CartPole-v1")
    assert kinds(SerialEnv(2, make)) == ["PlainGym"] * 2
    assert kinds(SerialEnv(2, partial(make, frame_skip=2))) == ["OneEnv"]
    serial = collect(SerialEnv(2, make), None, frames_per_batch=60, seed=1)
    assert_same(serial, collect(make, None, num_envs=2, frames_per_batch=60, seed=1))
    with Collector(SerialEnv(2, make), None, frames_per_batch=4) as collector:
        assert collector.rollout().batch_size == (2, 2)


class Odd(CountingEnv):
    """Returns what ``GymEnv`` converts."""

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = super().step(action)
        return (
            obs.astype(np.float64),
            np.int64(reward),
            np.bool_(terminated),
            truncated,
            info,
        )

    def reset(self, **options: Any) -> Any:
        obs, info = super().reset(**options)
        return obs.tolist(), info


def test_what_a_gym_environment_returns_is_converted_as_torchrl_does():
    assert inner_kind(GymWrapper(Odd(3))) == "PlainGym"
    got = collect(lambda: GymWrapper(Odd(3)), None, frames_per_batch=8, seed=0)
    assert_same(
        got,
        collect(lambda: GymWrapper(CountingEnv(3)), None, frames_per_batch=8, seed=0),
    )


def test_gym_environments_that_fail_are_named():
    class Fails(CountingEnv):
        def step(self, action: Any) -> Any:
            if self.t == 1:
                raise ValueError("no")
            return super().step(action)

    class Short(CountingEnv):
        def step(self, action: Any) -> Any:
            return super().step(action)[:4]

    class Wide(CountingEnv):
        def step(self, action: Any) -> Any:
            obs, *rest = super().step(action)
            return (np.append(obs, 1), *rest)

    for cls, error, message in (
        (Fails, EnvError, "raised ValueError: no"),
        (Short, BadEnvOutput, r"expected \(observation, reward"),
        (Wide, BadEnvOutput, "its spec says shape"),
    ):
        with Collector(
            lambda cls=cls: GymWrapper(cls(4)), None, frames_per_batch=4
        ) as collector:
            with pytest.raises(error, match=message):
                collector.rollout()
            assert_accounted(collector)


# --- recurrent state ------------------------------------------------------------------------------


class Remembers(TensorDictModuleBase):
    in_keys = ["observation", "memory", "is_init"]  # noqa: RUF012
    out_keys = ["action", ("next", "memory")]  # noqa: RUF012

    def forward(self, td: Any) -> Any:
        td.set("action", td["is_init"].to(torch.int8))
        return td.set(("next", "memory"), td["memory"] + 1)


def test_a_primer_in_each_of_several_environments_gives_the_state_after_a_reset():
    lengths = iter([2, 3])

    def make() -> Any:
        primer = TensorDictPrimer(memory=Unbounded((1,)), default_value=5.0)
        return TransformedEnv(Counter(next(lengths)), Compose(InitTracker(), primer))

    batch = collect(make, Remembers(), num_envs=2, batches=2, frames_per_batch=8)
    assert batch["memory"][..., 0].tolist() == [
        [5, 6, 5, 6, 5, 6, 5, 6],
        [5, 6, 7, 5, 6, 7, 5, 6],
    ]
    assert batch["next", "memory"][..., 0].tolist() == [
        [6, 7, 6, 7, 6, 7, 6, 7],
        [6, 7, 8, 6, 7, 8, 6, 7],
    ]
    assert torch.equal(batch["action"].bool(), batch["is_init"])
    assert len([key for key in set(batch.keys()) if "init" in key]) == 1


@pytest.mark.parametrize("num_envs", [None, 2])
def test_after_random_frames_the_policy_begins_with_the_state_of_a_primer(num_envs):
    def make() -> Any:
        primer = TensorDictPrimer(memory=Unbounded((1,)), default_value=5.0)
        return TransformedEnv(Counter(6), Compose(InitTracker(), primer))

    frames = 4 * (num_envs or 1)
    options: Any = {"frames_per_batch": frames, "init_random_frames": frames}
    batch = collect(make, Remembers(), num_envs=num_envs, batches=3, **options)
    for row in batch["memory"][..., 0].reshape(-1, 12).tolist():
        assert row == [5, 5, 5, 5, 5, 6, 5, 6, 7, 8, 9, 10]


def test_functions_and_heads_see_the_observation_and_not_what_transforms_count():
    def make() -> Any:
        env = GymEnv("CartPole-v1", categorical_action_encoding=True)
        return TransformedEnv(env, Compose(StepCounter(), RewardSum()))

    seen = []

    def tilt(obs: torch.Tensor) -> torch.Tensor:
        seen.append(obs.shape)
        return (obs[2] > 0).long()

    for policy in (tilt, categorical(nn.Linear(4, 2))):
        with Collector(make, policy, frames_per_batch=6) as collector:
            batch = collector.rollout()
            assert {"step_count", "episode_reward"} <= set(batch.keys())
    assert set(seen) == {(4,)}


def test_heads_refuse_one_hot_actions_and_say_what_to_do():
    with pytest.raises(BadOption, match="categorical_action_encoding=True"):
        Collector(
            lambda: GymEnv("CartPole-v1"),
            categorical(nn.Linear(4, 2)),
            frames_per_batch=6,
        )


RESUMED = {
    "plain": lambda: GymEnv("Pendulum-v1"),
    "frames": lambda: TransformedEnv(
        GymEnv("Pendulum-v1"), CatFrames(3, dim=-1, in_keys=["observation"])
    ),
    "serial": lambda: SerialEnv(
        2, lambda: TransformedEnv(GymEnv("Pendulum-v1"), StepCounter(15))
    ),
    "outside": lambda: TransformedEnv(
        SerialEnv(2, lambda: GymEnv("Pendulum-v1")),
        Compose(StepCounter(7), RewardSum()),
    ),
}


@pytest.mark.parametrize("make", RESUMED.values(), ids=RESUMED)
def test_a_restored_environment_goes_on_in_a_collector_that_was_used_before(make):
    policy = TensorDictModule(nn.LazyLinear(1), ["observation"], ["action"])
    common: dict[str, Any] = {"policy": policy, "frames_per_batch": 30}
    with (
        Collector(make, seed=0, **common) as first,
        Collector(make, **common) as second,
    ):
        first.rollout()
        second.rollout()
        state = first.state_dict()
        expected = [first.rollout().clone() for _ in range(4)]
        for collector in (second, first):
            assert collector.load_state_dict(state, trust=True).exact
            for batch in expected:
                assert_same(collector.rollout(), batch)
