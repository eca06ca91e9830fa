"""TorchRL environments: Muster's batches beside those of TorchRL's own collector, leaf by leaf."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import nn
from torchrl.data import Unbounded
from torchrl.envs import (
    ActionDiscretizer,
    ActionMask,
    CatFrames,
    Compose,
    DoubleToFloat,
    DTypeCastTransform,
    EnvCreator,
    GymEnv,
    GymWrapper,
    InitTracker,
    ObservationNorm,
    ParallelEnv,
    RenameTransform,
    RewardSum,
    SerialEnv,
    StepCounter,
    TensorDictPrimer,
    TransformedEnv,
    VecNorm,
)
from torchrl.envs.utils import ExplorationType
from torchrl.modules import GRUModule, LSTMModule, OneHotCategorical, ProbabilisticActor
from torchrl.testing import mocking_classes as mocks

from muster import Collector, MultiSyncCollector
from muster.errors import BadOption
from muster.testing import CountingEnv
from tests.parity.torchrl_tools import assert_equal, assert_same_batches, both

pytestmark = pytest.mark.filterwarnings("ignore")


def gym(name: str, *transforms: Any, **options: Any) -> Any:
    env = GymEnv(name, **options)
    return TransformedEnv(env, Compose(*transforms)) if transforms else env


class ReadsPolicyOutputs(mocks.CountingEnv):
    """Its reward is what the policy said besides the action."""

    def _step(self, tensordict: Any) -> Any:
        return super()._step(tensordict).set("reward", tensordict["bonus"])


class Patchwork(mocks.CountingEnv):
    """Returns neither all flags nor the declared shapes, as ``EnvBase.step`` allows, and not always
    the same ones.
    """

    def _step(self, tensordict: Any) -> Any:
        td = super()._step(tensordict)
        for key in ("reward", "done", "terminated"):
            td.set(key, td[key].squeeze(-1))
        return td.exclude("done" if self.count % 2 else "terminated")


MOCKS = {
    "counting": partial(mocks.CountingEnv, max_steps=3),
    "patchwork": partial(Patchwork, max_steps=3),
    "text": partial(mocks.CountingEnvWithString, max_steps=3),
    "text actions": mocks.Str2StrEnv,
    "metadata": mocks.EnvWithMetadata,
    "multi-key": partial(mocks.MultiKeyCountingEnv, max_steps=2),
    "batched multi-key": partial(
        mocks.MultiKeyCountingEnv, batch_size=(2,), max_steps=2
    ),
    "nested": partial(mocks.NestedCountingEnv, max_steps=3),
    "nested observations": partial(
        mocks.NestedCountingEnv, max_steps=3, nest_done=False, nest_reward=False
    ),
    "nested and root flags": partial(
        mocks.NestedCountingEnv, max_steps=3, has_root_done=True
    ),
    "agents": partial(mocks.MultiAgentCountingEnv, n_agents=3, max_steps=3),
    "batched": partial(
        mocks.CountingBatchedEnv, max_steps=torch.tensor([1, 2, 5]), batch_size=(3,)
    ),
    "two batch dimensions": partial(
        mocks.CountingBatchedEnv,
        max_steps=torch.arange(6).view(2, 3),
        batch_size=(2, 3),
    ),
    "batch-locked": mocks.MockBatchedLockedEnv,
    "batched state": partial(mocks.MockBatchedLockedEnv, batch_size=(2,)),
    "stateless": mocks.StateLessCountingEnv,
    "incrementing": partial(mocks.IncrementingEnv, max_steps=3),
    "scalar actions": mocks.EnvWithScalarAction,
    "tensorclass": partial(mocks.EnvWithTensorClass, max_steps=3),
    "resets itself": partial(mocks.AutoResettingCountingEnv, 4, auto_reset=True),
    "heterogeneous": partial(mocks.HeterogeneousCountingEnv, max_steps=3),
    "batched heterogeneous": partial(
        mocks.HeterogeneousCountingEnv, max_steps=3, batch_size=(2,)
    ),
    "dynamic": mocks.EnvWithDynamicSpec,
    "serial": partial(SerialEnv, 3, partial(mocks.CountingEnv, max_steps=3)),
    "serial dynamic": partial(SerialEnv, 2, mocks.EnvWithDynamicSpec),
    "serial text": partial(
        SerialEnv, 2, partial(mocks.CountingEnvWithString, max_steps=3)
    ),
    "serial of different": lambda: SerialEnv(
        2, [partial(mocks.CountingEnv, max_steps=n) for n in (1, 3)]
    ),
    "created": lambda: SerialEnv(
        2, EnvCreator(partial(mocks.CountingEnv, max_steps=3))
    ),
    "vecnorm": lambda: TransformedEnv(
        mocks.MockBatchedLockedEnv(batch_size=(2,)),
        VecNorm(in_keys=["observation", "reward"]),
    ),
    "transformed serial": lambda: TransformedEnv(
        SerialEnv(2, partial(mocks.CountingEnv, max_steps=3)),
        Compose(StepCounter(3), RewardSum(), InitTracker()),
    ),
}
DRAWS_FIRST = {
    "text",
    "text actions",
    "agents",
    "stateless",
    "scalar actions",
    "serial text",
}  # at random, unseeded


@pytest.mark.parametrize("name", MOCKS)
def test_torchrls_mock_environments_give_the_same_batches(name):
    assert_same_batches(
        MOCKS[name],
        skip=name in DRAWS_FIRST,
        seed=1 if name == "text actions" else None,
    )


@pytest.mark.parametrize(
    "name", ["counting", "batched", "serial", "transformed counting"]
)
def test_cut_trajectories_are_the_same(name):
    make = {
        "counting": partial(mocks.CountingEnv, max_steps=30),
        "batched": partial(
            mocks.CountingBatchedEnv,
            max_steps=torch.tensor([1, 40, 50]),
            batch_size=(3,),
        ),
        "serial": partial(SerialEnv, 2, partial(mocks.CountingEnv, max_steps=50)),
        "transformed counting": lambda: TransformedEnv(
            mocks.CountingEnv(max_steps=30), RewardSum()
        ),
    }[name]
    assert_same_batches(make, max_frames_per_traj=5)


GYMS = {
    "pendulum": partial(gym, "Pendulum-v1"),
    "one-hot": partial(gym, "CartPole-v1"),
    "categorical": partial(gym, "CartPole-v1", categorical_action_encoding=True),
    "discrete observations": partial(gym, "FrozenLake-v1"),
    "frame skip": partial(gym, "Pendulum-v1", frame_skip=2),
    "sums": lambda: gym(
        "CartPole-v1", RewardSum(), StepCounter(10), InitTracker(), DoubleToFloat()
    ),
    "norm": lambda: gym(
        "Pendulum-v1", ObservationNorm(0.5, 2.0, in_keys=["observation"])
    ),
    "frames": lambda: gym(
        "CartPole-v1", CatFrames(N=3, dim=-1, in_keys=["observation"])
    ),
    "truncated": lambda: gym("Pendulum-v1", RewardSum(), max_episode_steps=12),
    "renamed": lambda: gym(
        "CartPole-v1", RenameTransform(["observation"], [("inner", "state")])
    ),
    "discretized": lambda: gym("Pendulum-v1", ActionDiscretizer(4)),
    "primed": lambda: gym(
        "CartPole-v1", TensorDictPrimer(memory=Unbounded((2,)), default_value=3.0)
    ),
}


@pytest.mark.parametrize("name", GYMS)
def test_gym_environments_and_transforms_give_the_same_batches(name):
    assert_same_batches(GYMS[name], seed=5, T=30)


def test_a_wrapped_environment_gives_the_same_batches():
    assert_same_batches(lambda: GymWrapper(CountingEnv(4)), T=9)


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_wrapped_vector_environments_give_the_same_batches(mode):
    def make() -> Any:
        return GymWrapper(
            SyncVectorEnv(
                [partial(CountingEnv, n) for n in (2, 3)], autoreset_mode=mode
            )
        )

    assert_same_batches(make)


class ResetsNatively(mocks.CountingBatchedEnv):
    """As simulators on a GPU do: a finished environment's next observation is its first one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._torchrl_native_autoreset = True

    def _step(self, tensordict: Any) -> Any:
        td = super()._step(tensordict)
        self.count[td["done"]] = 0
        return td.set("observation", self.count.clone())

    def _reset(self, tensordict: Any = None, **options: Any) -> Any:
        assert tensordict is None, "it has reset itself"
        return super()._reset(tensordict, **options)


def test_environments_that_reset_natively_give_the_same_batches_and_say_what_is_unknown():
    make = partial(ResetsNatively, max_steps=torch.tensor([1, 2, 5]), batch_size=(3,))
    mine, theirs = both(make)
    for a, b in zip(mine, theirs, strict=True):
        valid = a["collector"].pop("next_obs_valid")
        assert torch.equal(valid, ~b["next", "done"][..., 0])
        assert_equal(a, b)
    assert any(batch["next", "done"].any() for batch in mine)


def test_max_frames_per_traj_is_the_same_on_gym_environments():
    assert_same_batches(
        partial(gym, "Pendulum-v1"), seed=5, T=30, max_frames_per_traj=7
    )


def actor(env: Any) -> Any:
    torch.manual_seed(0)
    width = env.observation_spec["observation"].shape[-1]
    return ProbabilisticActor(
        TensorDictModule(nn.Linear(width, 2), ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
        return_log_prob=True,
    )


def test_an_actors_log_probabilities_are_the_same():
    assert_same_batches(
        partial(gym, "CartPole-v1"),
        actor,
        seed=5,
        T=40,
        exploration_type=ExplorationType.MODE,
    )


class Generous(TensorDictModuleBase):
    in_keys = ["observation"]  # noqa: RUF012
    out_keys = ["action", "bonus"]  # noqa: RUF012

    def forward(self, td: Any) -> Any:
        td.set("bonus", td["observation"].float() * 2 + 1)
        return td.set("action", torch.ones(1, dtype=torch.int8))


def test_environments_read_what_the_policy_said_besides():
    batch = assert_same_batches(
        partial(ReadsPolicyOutputs, max_steps=3), lambda env: Generous()
    )[0]
    assert torch.equal(batch["next", "reward"], batch["bonus"])


def recurrent(kind: str, *, python_based: bool = True) -> tuple[Any, Any]:
    """An environment with the primer of a recurrent module, and the policy."""
    torch.manual_seed(0)
    cls = {"gru": GRUModule, "lstm": LSTMModule}[kind]
    cell = cls(
        input_size=4,
        hidden_size=8,
        in_key="observation",
        out_key="embed",
        python_based=python_based,
    )
    env = TransformedEnv(
        GymEnv("CartPole-v1"), Compose(InitTracker(), cell.make_tensordict_primer())
    )
    head = TensorDictModule(
        lambda x: nn.functional.one_hot((x.sum(-1) > 0).long(), 2),
        ["embed"],
        ["action"],
    )
    return env, TensorDictSequential(cell, head)


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_recurrent_modules_with_their_primer_give_the_same_batches(kind):
    batches = assert_same_batches(
        lambda: recurrent(kind)[0], lambda env: recurrent(kind)[1], seed=3, T=25
    )
    key = "recurrent_state" if kind == "gru" else "recurrent_state_h"
    assert (batches[0][key][0] == 0).all()
    assert batches[1]["next", key].any()


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_batched_environments_with_recurrent_modules_give_the_same_batches(kind):
    def cell() -> Any:
        torch.manual_seed(0)
        cls = {"gru": GRUModule, "lstm": LSTMModule}[kind]
        return cls(input_size=1, hidden_size=8, in_key="observation", out_key="embed")

    def make() -> Any:
        env = mocks.CountingBatchedEnv(
            max_steps=torch.tensor([1, 2, 4]), batch_size=(3,)
        )
        floats = DTypeCastTransform(torch.int32, torch.float32, in_keys=["observation"])
        return TransformedEnv(
            env, Compose(floats, InitTracker(), cell().make_tensordict_primer())
        )

    head = TensorDictModule(
        lambda x: (x.sum(-1, keepdim=True) > 0).to(torch.int8), ["embed"], ["action"]
    )
    assert_same_batches(make, lambda env: TensorDictSequential(cell(), head), T=12)


class CountsCalls(TensorDictModuleBase):
    """A recurrent state that is not zero after a reset, and that the action shows."""

    in_keys = ["observation", "memory"]  # noqa: RUF012
    out_keys = ["action", ("next", "memory")]  # noqa: RUF012

    def forward(self, td: Any) -> Any:
        td.set("action", (td["memory"] % 2).to(torch.int8))
        return td.set(("next", "memory"), td["memory"] + 1)


def test_a_primers_default_is_the_recurrent_state_after_a_reset():
    def make() -> Any:
        primer = TensorDictPrimer(memory=Unbounded((1,)), default_value=5.0)
        return TransformedEnv(mocks.CountingEnv(max_steps=1), primer)

    batch = assert_same_batches(make, lambda env: CountsCalls(), T=9)[0]
    assert batch["memory"].flatten().tolist() == [5, 6, 7, 5, 6, 7, 5, 6, 7]
    assert batch["next", "memory"].flatten().tolist() == [6, 7, 8, 6, 7, 8, 6, 7, 8]


def with_truncated(env: Any) -> Any:
    return env.add_truncated_keys()


class Ones(TensorDictModuleBase):
    """An action that lets a counting environment count."""

    in_keys: list[Any] = []  # noqa: RUF012

    def __init__(self, spec: Any) -> None:
        super().__init__()
        self.spec = spec
        self.out_keys = list(spec.keys(True, True))

    def forward(self, td: Any) -> Any:
        return td.update(self.spec.zero().apply(lambda leaf: leaf + 1))


def counts(env: Any) -> Any:
    return Ones(env.full_action_spec)


NESTED = {
    "nested": {},
    "nested, with a root": {"has_root_done": True, "max_steps": 50},
    "agents of one flag": {"nest_done": False},
    "batched": {"batch_size": (2,)},
}


@pytest.mark.parametrize("name", NESTED)
@pytest.mark.parametrize("more", [{}, {"device": "cpu"}], ids=str)
def test_flags_below_the_root_are_truncated_at_the_end_of_batches(name, more):
    """With batches that end within an episode; where one ends by itself, Muster does not say that
    it was cut.
    """

    def make() -> Any:
        return with_truncated(
            mocks.NestedCountingEnv(**{"max_steps": 5, **NESTED[name]})
        )

    mine = assert_same_batches(make, counts, T=7, batches=3, set_truncated=True, **more)
    for batch in mine:
        key = ("data",) if name != "agents of one flag" else ()
        last = (slice(None),) * (batch.ndim - 1) + (-1,)
        for flag in ("truncated", "done"):
            assert batch[("next", *key, flag)][last].all()
        before = (slice(None),) * (batch.ndim - 1) + (slice(0, -1),)
        assert not batch[("next", *key, "truncated")][before].any()
        assert not batch[(*key, "truncated")].any()


@pytest.mark.parametrize("place", ["threads", "processes"])
def test_flags_below_the_root_are_truncated_by_workers_too(place):
    def make() -> Any:
        return with_truncated(mocks.NestedCountingEnv(max_steps=5))

    policy = counts(make())
    options = {"frames_per_batch": 14, "set_truncated": True}
    with Collector([make] * 2, policy, **options) as c:
        expected = [c.next().clone() for _ in range(3)]
    with MultiSyncCollector([make] * 2, policy, backend=place, **options) as c:
        for batch in expected:
            assert_equal(c.next(), batch)
    assert expected[1]["next", "data", "truncated"][:, -1].all()


def test_nothing_can_be_marked_where_there_is_no_flag_or_it_is_left_out():
    with pytest.raises(BadOption, match="has no 'truncated' flag"):
        Collector(
            mocks.NestedCountingEnv(), None, frames_per_batch=4, set_truncated=True
        )
    with pytest.raises(
        BadOption, match="marks next.data.truncated, which compact_obs=True leaves out"
    ):
        Collector(
            with_truncated(mocks.NestedCountingEnv()),
            None,
            frames_per_batch=4,
            set_truncated=True,
            compact_obs=True,
        )


HETEROGENEOUS = {
    "alone": partial(mocks.HeterogeneousCountingEnv, max_steps=3),
    "two": partial(mocks.HeterogeneousCountingEnv, max_steps=3, batch_size=(2,)),
}
DEVICES = ["device", "policy_device", "env_device", "storing_device"]


def het_policy(env: Any) -> Any:
    return mocks.HeterogeneousCountingEnvPolicy(env.full_action_spec)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("env", HETEROGENEOUS)
def test_heterogeneous_agents_on_a_device_give_the_same_batches(env, device):
    for options in ({}, {"exploration_type": ExplorationType.DETERMINISTIC}):
        mine = assert_same_batches(
            HETEROGENEOUS[env], het_policy, batches=2, **{device: "cpu"}, **options
        )
        assert mine[0].device == (
            torch.device("cpu") if device in ("device", "storing_device") else None
        )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("place", ["threads", "processes"])
def test_heterogeneous_agents_on_a_device_are_the_same_in_workers(place, device):
    if place == "processes" and device != "device":
        pytest.skip(
            "one start of processes is enough: workers are told nothing else by the others"
        )
    env = HETEROGENEOUS["alone"]
    options = {"frames_per_batch": 12, device: "cpu"}
    with Collector([env] * 2, het_policy(env()), **options) as c:
        expected = [c.next().clone() for _ in range(2)]
    with MultiSyncCollector(
        [env] * 2, het_policy(env()), backend=place, **options
    ) as c:
        for batch in expected:
            got = c.next()
            assert got.device == batch.device
            assert got.names == batch.names
            assert_equal(got, batch)


def test_processes_give_the_same_batches():
    make = partial(
        ParallelEnv, 2, partial(mocks.CountingEnv, max_steps=3), mp_start_method="fork"
    )
    mine, theirs = both(make, batches=2)
    for a, b in zip(mine, theirs, strict=True):
        assert_equal(a, b)


def test_the_inner_environments_steps_are_those_of_the_torchrl_environment():
    class Derived(GymEnv):
        pass

    for name in (
        "CartPole-v1",
        "Pendulum-v1",
        "MountainCarContinuous-v0",
        "Acrobot-v1",
    ):
        batches = []
        for cls in (GymEnv, Derived):
            with Collector(
                partial(cls, name), None, num_envs=2, frames_per_batch=400, seed=1
            ) as collector:
                assert type(collector._engine.groups[0].env._ones[0]).__name__ == (
                    "PlainGym" if cls is GymEnv else "OneEnv"
                )
                batches.append([collector.rollout().clone() for _ in range(2)])
        for a, b in zip(*batches, strict=True):
            assert_equal(a, b)
            assert torch.equal(a["collector", "traj_ids"], b["collector", "traj_ids"])


class Team(TensorDictModuleBase):
    """Acts for three agents at once, and says more about each."""

    in_keys = [("data", "states")]  # noqa: RUF012
    out_keys = [("data", "action"), ("data", "value"), "total"]  # noqa: RUF012

    def forward(self, td: Any) -> Any:
        assert td["data"].batch_size == (*td.batch_size, 3)
        states = td["data", "states"]
        td.set(("data", "action"), (states % 2 == 0).to(torch.int8))
        td.set(("data", "value"), states.float() / 2)
        return td.set("total", states.sum((-1, -2)))


@pytest.mark.parametrize("lead", [(), (2,)])
def test_policies_of_several_agents_give_the_same_batches(lead):
    make = partial(mocks.NestedCountingEnv, max_steps=3, batch_size=lead)
    batch = assert_same_batches(make, lambda env: Team())[0]
    assert batch["data", "value"].shape == (*batch.batch_size, 3, 1)


def test_an_env_creator_is_a_function_that_makes_environments():
    create = EnvCreator(partial(mocks.CountingEnv, max_steps=3))
    with Collector(create, None, num_envs=2, frames_per_batch=8) as collector:
        assert collector.rollout().batch_size == (2, 4)


def test_the_printed_example_of_the_seed():
    with Collector(
        lambda: GymEnv("Pendulum-v1"),
        None,
        frames_per_batch=200,
        max_frames_per_traj=50,
    ) as collector:
        mine = collector.rollout()
    with Collector(
        lambda: gymnasium.make("Pendulum-v1"),
        None,
        frames_per_batch=200,
        max_frames_per_traj=50,
    ) as c:
        other = c.rollout()
    assert {k: (v.shape, v.dtype) for k, v in mine.items(True, True)} == {
        k: (v.shape, v.dtype) for k, v in other.items(True, True)
    }
    assert isinstance(mine, TensorDict)


def test_masked_actions_stay_in_their_mask():
    env = TransformedEnv(Masked(), ActionMask())
    with Collector(env, None, frames_per_batch=60, seed=0) as collector:
        batch = torch.cat([collector.rollout().clone() for _ in range(2)])
    with Collector(
        TransformedEnv(Masked(), ActionMask()), None, frames_per_batch=1, seed=0
    ) as collector:
        assert_equal(
            torch.cat([collector.rollout().clone() for _ in range(120)]), batch
        )
    allowed = batch["action_mask"].gather(
        -1, batch["action"].long().argmax(-1, keepdim=True)
    )
    assert allowed.all()
    assert len(batch["action"].long().argmax(-1).unique()) == 4


class Masked(mocks.EnvBase):
    """Allows two of four actions, others at every step."""

    def __init__(self) -> None:
        from torchrl.data import Binary, Composite, OneHot

        super().__init__()
        self.action_spec = OneHot(4)
        self.observation_spec = Composite(action_mask=Binary(4, dtype=torch.bool))
        self.reward_spec = Unbounded(1)
        self.t = 0

    def _mask(self) -> Any:
        return TensorDict({"action_mask": torch.arange(4).add(self.t) % 4 < 2})

    def _reset(self, tensordict: Any = None) -> Any:
        self.t = 0
        return self._mask()

    def _step(self, tensordict: Any) -> Any:
        assert tensordict["action_mask"][tensordict["action"].long().argmax()], (
            "a forbidden action"
        )
        self.t += 1
        return self._mask().update(
            {"reward": torch.zeros(1), "done": torch.tensor([self.t >= 9])}
        )

    def _set_seed(self, seed: int | None) -> None:
        pass


@pytest.mark.parametrize(
    "options", [{"split_trajs": True}, {"trajs_per_batch": 1}], ids=str
)
def test_flags_that_an_environment_does_not_show_are_not_shown_after_splitting_either(
    options,
):
    def make() -> Any:
        return mocks.NestedCountingEnv(max_steps=3)

    given: dict[str, Any] = {"policy": None, "frames_per_batch": 8}
    with (
        Collector(make(), **given) as plain,
        Collector(make(), **given, **options) as split,
    ):
        keys = set(plain.rollout().keys(True, True))
        assert set(next(iter(split)).keys(True, True)) - {("collector", "mask")} == keys
        assert set(split.rollout().keys(True, True)) == keys
