"""The same program on TorchRL's collector and on Muster's: the same TensorDicts, leaf by leaf."""

from __future__ import annotations

import functools
import inspect
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("torchrl")

import torchrl.collectors
from tensordict import (
    LazyStackedTensorDict,
    TensorDict,
    TensorDictBase,
    is_leaf_nontensor,
    is_non_tensor,
)
from tensordict.nn import (
    CudaGraphModule,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torchrl.data import (
    LazyTensorStorage,
    ListStorage,
    MultiStep,
    ReplayBuffer,
    SamplerWithoutReplacement,
)
from torchrl.envs import (
    Compose,
    GymEnv,
    InitTracker,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
)
from torchrl.envs.llm.transforms import PolicyVersion
from torchrl.envs.utils import ExplorationType
from torchrl.modules import (
    Actor,
    EGreedyModule,
    LSTMModule,
    OneHotCategorical,
    OrnsteinUhlenbeckProcessModule,
    ProbabilisticActor,
    QValueModule,
    RandomPolicy,
    ValueOperator,
)
from torchrl.objectives import ClipPPOLoss, DQNLoss
from torchrl.objectives.value import GAE
from torchrl.testing import mocking_classes as mocks
from torchrl.trainers import Trainer

from muster import ReplayMemory
from muster.compat.torchrl import Collector
from muster.compat.torchrl.progress import NAMES
from muster.errors import BadCheckpoint, BadOption
from tests.tools import Stopper
from tests.warned import noted_warnings

pytestmark = pytest.mark.filterwarnings("ignore")
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
Make = Callable[..., Any]  # one of the two Collectors


def both(program: Callable[[Make], Any]) -> None:
    """Run ``program`` twice, with either Collector, and compare what it returns."""
    results = []
    for make in (torchrl.collectors.Collector, Collector):
        torch.manual_seed(0)
        results.append(program(make))
    assert_equal(results[1], results[0])


def batches(
    env: Any, policy: Any = None, count: int = 4, **options: Any
) -> Callable[[Make], Any]:
    """A program: so many batches. ``env`` and ``policy(env)`` are functions."""

    def program(make: Make) -> Any:
        made = env()
        collector = make(
            made,
            None if policy is None else policy(made),
            **{"total_frames": -1, **options},
        )
        got = [keep(batch) for batch, _ in zip(collector, range(count), strict=False)]
        collector.shutdown()
        return got

    return program


def keep(batch: Any) -> Any:
    return None if batch is None else batch.clone()


def assert_equal(mine: Any, theirs: Any, path: str = "result") -> None:
    if isinstance(theirs, TensorDictBase):
        assert isinstance(mine, TensorDictBase), f"{path}: {type(mine)}"
        assert mine.batch_size == theirs.batch_size, (
            f"{path}: {mine.batch_size}, not {theirs.batch_size}"
        )
        assert is_non_tensor(theirs) or list(mine.names) == list(theirs.names), (
            f"{path}: names {mine.names}, not {theirs.names}"
        )
        assert mine.device == theirs.device, (
            f"{path}: device {mine.device}, not {theirs.device}"
        )
        assert batch_sizes(mine) == batch_sizes(theirs), path
        keys = set(theirs.keys(True, True, is_leaf=is_leaf_nontensor))
        got = set(mine.keys(True, True, is_leaf=is_leaf_nontensor))
        assert got == keys, f"{path}: lacks {keys - got}, has {got - keys} besides"
        for key in keys:
            uneven = any(
                isinstance(node, LazyStackedTensorDict) for node in nodes(theirs)
            )
            assert_equal(
                mine.get(key, as_list=uneven),
                theirs.get(key, as_list=uneven),
                f"{path}[{key}]",
            )
    elif isinstance(theirs, torch.Tensor):
        assert mine.dtype == theirs.dtype, f"{path}: {mine.dtype}, not {theirs.dtype}"
        assert mine.shape == theirs.shape, f"{path}: {mine.shape}, not {theirs.shape}"
        assert mine.device == theirs.device, (
            f"{path}: {mine.device}, not {theirs.device}"
        )
        assert torch.equal(mine, theirs), f"{path}:\n{mine}\nis not\n{theirs}"
    elif isinstance(theirs, dict):
        assert list(mine) == list(theirs), path
        for key in theirs:
            assert_equal(mine[key], theirs[key], f"{path}[{key!r}]")
    elif isinstance(theirs, (list, tuple)):
        assert len(mine) == len(theirs), f"{path}: {len(mine)}, not {len(theirs)}"
        for i, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            assert_equal(one, other, f"{path}[{i}]")
    elif hasattr(theirs, "tolist"):
        assert mine.tolist() == theirs.tolist(), path
    else:
        assert mine == theirs, f"{path}: {mine!r} is not {theirs!r}"


def nodes(td: Any) -> Iterator[Any]:
    """A TensorDict and those in it."""
    yield td
    for value in td.values() if not isinstance(td, LazyStackedTensorDict) else ():
        if isinstance(value, TensorDictBase):
            yield from nodes(value)


def batch_sizes(td: Any) -> dict[Any, torch.Size]:
    """Of the TensorDicts within, but for lazily stacked ones."""
    sizes = {}
    for key in () if isinstance(td, LazyStackedTensorDict) else td.keys():
        if type(node := td.get(key, as_list=True)) is TensorDict:
            sizes |= {(key,): node.batch_size} | {
                (key, *path): size for path, size in batch_sizes(node).items()
            }
    return sizes


# --- environments and policies --------------------------------------------------------------------


def cartpole() -> Any:
    env = GymEnv("CartPole-v1")
    env.set_seed(1)
    return env


def three_cartpoles() -> Any:
    env = SerialEnv(3, [functools.partial(GymEnv, "CartPole-v1")] * 3)
    env.set_seed(1)
    return env


def linear() -> Any:
    return TensorDictModule(
        torch.nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"]
    )


def pendulum() -> Any:
    env = GymEnv("Pendulum-v1")
    env.set_seed(0)
    return env


def counting() -> Any:
    return mocks.CountingEnv(max_steps=4)


def three_counting() -> Any:
    return SerialEnv(
        3, [functools.partial(mocks.CountingEnv, max_steps=n) for n in (2, 4, 7)]
    )


def actor(env: Any) -> Any:
    """Draws from torch's generator and returns more than an action."""
    size = env.observation_spec["observation"].shape[-1]
    n = env.full_action_spec["action"].shape[-1]
    net = TensorDictModule(
        torch.nn.Linear(size, n), in_keys=["observation"], out_keys=["logits"]
    )
    draw = ProbabilisticTensorDictModule(
        in_keys=["logits"],
        out_keys=["action"],
        distribution_class=OneHotCategorical,
        return_log_prob=True,
        default_interaction_type=ExplorationType.RANDOM,
    )
    return ProbabilisticTensorDictSequential(net, draw)


def counter(env: Any) -> Any:
    return mocks.CountingEnvCountPolicy(
        env.full_action_spec[env.action_key], env.action_key
    )


def lstm() -> LSTMModule:
    return LSTMModule(4, 8, in_key="observation", out_key="features")


def recurrent_env() -> Any:
    return TransformedEnv(
        cartpole(), Compose(InitTracker(), lstm().make_tensordict_primer())
    )


def recurrent(env: Any) -> Any:
    head = TensorDictModule(
        torch.nn.Linear(8, 2), in_keys=["features"], out_keys=["action_value"]
    )
    return TensorDictSequential(lstm(), head, QValueModule(action_space="one-hot"))


def two_agents() -> Any:
    return mocks.NestedCountingEnv(batch_size=(2, 1), nested_dim=5)


def outplace(td: Any) -> Any:
    return td.empty().set("action", torch.ones(*td.shape, 1))


def flat_action(tensordict):
    return tensordict.set("action", torch.ones(tensordict.shape, dtype=torch.int))


def float_one_hot(env: Any) -> Any:
    return ProbabilisticTensorDictSequential(
        TensorDictModule(
            torch.nn.Linear(4, 2), in_keys=["observation"], out_keys=["logits"]
        ),
        ProbabilisticTensorDictModule(
            ["logits"],
            ["action"],
            distribution_class=torch.distributions.OneHotCategorical,
        ),
    )


class OnDevice(TensorDictModuleBase):
    """Insists on the device that a collector should name."""

    def __init__(self, device: Any) -> None:
        super().__init__()
        self.in_keys, self.out_keys, self.device = ["observation"], ["action"], device

    def forward(self, tensordict):
        assert tensordict.device == self.device
        return tensordict.set("action", torch.zeros(*tensordict.shape, 1))


class Counting(TensorDictModuleBase):
    """Finds in the TensorDict what it wrote there the step before."""

    def __init__(self) -> None:
        super().__init__()
        self.in_keys, self.out_keys = ["observation"], ["action", "_n", "shown"]

    def forward(self, tensordict):
        n = tensordict.get("_n", torch.zeros(*tensordict.shape, 1))
        tensordict.set("_n", n + 1)
        tensordict.set("shown", tensordict.get("shown", n) + 2)
        return tensordict.set("action", n)


def correlated(env: Any) -> Any:
    noise = OrnsteinUhlenbeckProcessModule(spec=env.action_spec, eps_init=1.0)
    return TensorDictSequential(
        Actor(torch.nn.Linear(3, 1), spec=env.action_spec), noise
    )


class Hidden(TensorDictModuleBase):
    """Recurrent, with a state that the environment does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.in_keys = ["observation", "hidden"]
        self.out_keys = ["action", "hidden", ("next", "hidden")]

    def forward(self, tensordict):
        hidden = tensordict.get("hidden", torch.zeros(*tensordict.shape, 2))
        tensordict.set("hidden", hidden)
        tensordict.set(("next", "hidden"), hidden + 1)
        return tensordict.set("action", torch.zeros(*tensordict.shape, 1))


ENVS: dict[str, tuple[Any, Any, int]] = {
    "cartpole": (cartpole, actor, 1),
    "three cartpoles": (three_cartpoles, actor, 3),
    "random cartpole": (cartpole, None, 1),
    "three random cartpoles": (three_cartpoles, None, 3),
    "counting": (counting, counter, 1),
    "three counting": (three_counting, counter, 3),
    "batched": (
        lambda: mocks.CountingBatchedEnv(
            max_steps=torch.tensor([3, 5]), batch_size=[2]
        ),
        None,
        2,
    ),
    "discrete mock": (lambda: mocks.DiscreteActionVecMockEnv(), None, 1),
    "continuous mock": (lambda: mocks.ContinuousActionVecMockEnv(), None, 1),
    "locked": (
        lambda: mocks.MockBatchedLockedEnv(device=None, batch_size=[3]),
        None,
        3,
    ),
    "nested": (lambda: mocks.NestedCountingEnv(), counter, 1),
    "nested done": (
        lambda: mocks.NestedCountingEnv(nest_done=True, has_root_done=False),
        counter,
        1,
    ),
    "nested done and root": (
        lambda: mocks.NestedCountingEnv(nest_done=True, has_root_done=True),
        counter,
        1,
    ),
    "het": (
        lambda: mocks.HeterogeneousCountingEnv(max_steps=3),
        lambda env: mocks.HeterogeneousCountingEnvPolicy(env.full_action_spec),
        1,
    ),
    "multi key": (
        lambda: mocks.MultiKeyCountingEnv(max_steps=3),
        lambda env: mocks.MultiKeyCountingEnvPolicy(
            full_action_spec=env.full_action_spec
        ),
        1,
    ),
    "string": (lambda: mocks.CountingEnvWithString(max_steps=4), counter, 1),
    "scalar action": (lambda: mocks.EnvWithScalarAction(), None, 1),
    "transformed": (
        lambda: TransformedEnv(
            cartpole(), Compose(StepCounter(5), RewardSum(), InitTracker())
        ),
        actor,
        1,
    ),
    "multi agent": (lambda: mocks.MultiAgentCountingEnv(n_agents=3), None, 1),
    "changing shapes": (lambda: mocks.EnvWithDynamicSpec(max_count=4), None, 1),
    "tensor class": (lambda: mocks.EnvWithTensorClass(max_steps=4), counter, 1),
    "text": (lambda: mocks.Str2StrEnv(), None, 1),
    "metadata": (lambda: mocks.EnvWithMetadata(), None, 1),
    "resets by itself": (
        lambda: mocks.AutoResettingCountingEnv(max_steps=4, auto_reset=True),
        counter,
        1,
    ),
    "three het": (
        lambda: SerialEnv(
            3,
            [
                functools.partial(mocks.HeterogeneousCountingEnv, max_steps=n)
                for n in (2, 3, 5)
            ],
        ),
        lambda env: mocks.HeterogeneousCountingEnvPolicy(env.full_action_spec),
        3,
    ),
    "two by three": (
        lambda: SerialEnv(
            2,
            lambda: mocks.CountingBatchedEnv(
                max_steps=torch.tensor([2, 4, 7]), batch_size=[3]
            ),
        ),
        None,
        6,
    ),
    "nested, batched": (two_agents, counter, 2),
    "actions of another dtype": (counting, lambda env: outplace, 1),
    "actions of another dtype, batched": (three_counting, lambda env: outplace, 3),
    "one-hot floats": (cartpole, float_one_hot, 1),
    "three one-hot floats": (three_cartpoles, float_one_hot, 3),
    "actions without a last dimension": (
        counting,
        lambda env: (
            lambda tensordict: tensordict.set("action", torch.ones(tensordict.shape))
        ),
        1,
    ),
    "without a device": (pendulum, lambda env: OnDevice(None), 1),
    "a policy that counts its calls": (pendulum, lambda env: Counting(), 1),
    "correlated noise": (
        lambda: TransformedEnv(pendulum(), InitTracker()),
        correlated,
        1,
    ),
    "a recurrent policy": (recurrent_env, recurrent, 1),
    "own policy version": (
        lambda: TransformedEnv(cartpole(), PolicyVersion()),
        actor,
        1,
    ),
}


@pytest.mark.parametrize("name", ENVS)
def test_batches_are_equal(name):
    env, policy, n = ENVS[name]
    both(batches(env, policy, frames_per_batch=10 * n))


@pytest.mark.parametrize(
    ("device", "on"),
    [
        ("device", "cpu"),
        ("storing_device", "cpu"),
        *(
            pytest.param(name, "cuda", marks=CUDA)
            for name in ("device", "storing_device")
        ),
    ],
)
@pytest.mark.parametrize("name", [name for name in ENVS if name != "without a device"])
def test_batches_on_a_device_are_equal(name, device, on):
    env, policy, n = ENVS[name]
    program = batches(env, policy, count=2, frames_per_batch=7 * n, **{device: on})
    try:
        both(program)
    except RuntimeError:
        if on == "cpu" or "torchrl/collectors/_single.py" not in traceback.format_exc():
            raise
        pytest.skip("TorchRL's Collector mixes devices here")


OPTIONS: dict[str, dict[str, Any]] = {
    "rounded up": {"frames_per_batch": 32},
    "steps are limited": {"max_frames_per_traj": 4},
    "truncated at the end": {"set_truncated": True},
    "limited and truncated": {"set_truncated": True, "max_frames_per_traj": 3},
    "reset before every batch": {"reset_at_each_iter": True},
    "reset before every batch, limited": {
        "reset_at_each_iter": True,
        "max_frames_per_traj": 4,
    },
    "without ids": {"track_traj_ids": False},
    "split": {"split_trajs": True},
    "split and limited": {"split_trajs": True, "max_frames_per_traj": 4},
    "compact": {"compact_obs": True},
    "compact and limited": {"compact_obs": True, "max_frames_per_traj": 4},
    "random at first": {"init_random_frames": 60},
    "without buffers": {"use_buffers": False},
    "deterministic": {"exploration_type": ExplorationType.DETERMINISTIC},
    "on the cpu": {"device": "cpu"},
    "stored on the cpu": {"storing_device": "cpu"},
    "policy on the cpu": {"policy_device": "cpu"},
    "post-processed": {"postproc": lambda td: td.reshape(-1)[:7]},
    "whole trajectories, padded": {"trajs_per_batch": 3, "traj_format": "padded"},
    "whole trajectories, joined": {"trajs_per_batch": 3, "traj_format": "cat"},
    "whole limited trajectories": {
        "trajs_per_batch": 3,
        "max_frames_per_traj": 4,
        "traj_format": "cat",
    },
    "the same TensorDict": {"return_same_td": True},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", ["cartpole", "three counting"])
def test_batches_are_equal_with_options(name, option):
    env, policy, n = ENVS[name]
    if name == "three counting" and option == "truncated at the end":
        pytest.skip("the environment has no truncated flag")
    both(batches(env, policy, **{"frames_per_batch": 10 * n, **OPTIONS[option]}))


@pytest.mark.parametrize(
    "options",
    [{"device": "cpu"}, {"policy_device": "cpu"}, {"env_device": "cpu"}],
    ids=str,
)
@pytest.mark.parametrize("storing", [None, "cpu"])
def test_devices_are_named_alike(options, storing):
    named = torch.device("cpu") if "env_device" not in options else None
    both(
        batches(
            pendulum,
            lambda env: OnDevice(named),
            frames_per_batch=4,
            storing_device=storing,
            **options,
        )
    )


# --- programs -------------------------------------------------------------------------------------


def program(function: Callable[[Make], Any]) -> Callable[[], None]:
    """A test that runs ``function`` on both collectors; what it returns has to be equal."""

    @functools.wraps(function, updated=())
    def test() -> None:
        both(function)

    test.__dict__.pop("__wrapped__")
    return test


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returns; of what it raises, the types that a program could catch."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001
        known = (TypeError, ValueError, KeyError, RuntimeError, AttributeError)
        return [kind.__name__ for kind in known if isinstance(error, kind)]


def numbers(collector: Any) -> dict[str, Any]:
    """The numbers of ``stats()`` without the progress in frames, which TorchRL has from 0.15 on."""
    return {
        name: value for name, value in collector.stats().items() if name not in NAMES
    }


@program
def test_frames_and_the_end(make):
    collector = make(cartpole(), None, frames_per_batch=30, total_frames=50)
    shapes = [batch.shape for batch in collector]
    return [
        shapes,
        collector._frames,
        collector.next(),
        numbers(collector),
        len(collector),
        collector.env.is_closed,
    ]


@program
def test_numbers_that_programs_read(make):
    collector = make(three_cartpoles(), None, frames_per_batch=100, total_frames=1000)
    names = (
        "frames_per_batch",
        "requested_frames_per_batch",
        "total_frames",
        "n_env",
        "init_random_frames",
        "closed",
    )
    more = (
        "max_frames_per_traj",
        "split_trajs",
        "storing_device",
        "policy_device",
        "env_device",
        "return_same_td",
    )
    lengths = [
        len(collector),
        outcome(lambda: len(make(cartpole(), None, frames_per_batch=10))),
    ]
    return [
        *(getattr(collector, name) for name in (*names, *more)),
        numbers(collector),
        *lengths,
    ]


@program
def test_next_and_iteration_share_what_is_left(make):
    collector = make(cartpole(), None, frames_per_batch=10, total_frames=40)
    first = collector.next().clone()
    rest = [batch.clone() for batch in collector]
    return [first, rest, collector.next()]


@program
def test_resets_of_some_and_of_all(make):
    collector = make(three_counting(), counter(three_counting()), frames_per_batch=15)
    got = [collector.rollout().clone()]
    for index in (None, 1, [0, 2], None):
        collector.reset(index)
        got.append(collector.rollout().clone())
    collector.reset()
    collector.reset()
    return [*got, collector.rollout().clone()]


@program
def test_seeds(make):
    env = GymEnv("CartPole-v1")
    collector = make(env, None, frames_per_batch=10)
    out = [collector.set_seed(3), collector.set_seed(3, static_seed=True)]
    first = collector.rollout()
    return [
        *out,
        first[1:].exclude("action").clone(),
        collector.rollout()["collector", "traj_ids"].clone(),
    ]


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("at", [1, 4])
def test_an_interruptor_leaves_zeros(at, batched):
    @both
    def _(make):
        env = three_counting() if batched else counting()
        collector = make(
            env,
            counter(env),
            frames_per_batch=21 if batched else 7,
            interruptor=Stopper(at),
        )
        it = iter(collector)
        return [next(it).clone(), next(it).clone(), collector._frames]


@program
def test_hooks_and_their_order(make):
    calls: list[Any] = []
    collector = make(
        counting(),
        counter(counting()),
        frames_per_batch=5,
        total_frames=10,
        pre_collect_hook=lambda: calls.append("before"),
        post_collect_hook=lambda td: calls.append(td.shape),
        postproc=lambda td: td[:3],
    )
    for _ in collector:
        calls.append("yield")
    collector.set_post_collect_hook(None)
    return [calls, collector.post_collect_hook, collector.pre_collect_hook is not None]


FILLING: list[dict[str, Any]] = [
    *({}, {"extend_buffer": False}, {"max_frames_per_traj": 5, "compact_obs": True}),
    *({"trajs_per_batch": 2}, {"trajs_per_batch": 2, "trajs_per_write": 1}),
]


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"extend_buffer": False}, {"trajs_per_batch": 2}, {"trajs_per_write": 1}],
    ids=str,
)
def test_a_replay_buffer_is_filled(storage, batched, options):
    if options == {"trajs_per_write": 1}:
        options = {"trajs_per_batch": 2, "trajs_per_write": 1}

    @both
    def _(make):
        env = three_cartpoles() if batched else cartpole()
        rb = ReplayBuffer(storage=storage(200), batch_size=5)
        collector = make(
            env,
            actor(env),
            frames_per_batch=30,
            total_frames=90,
            replay_buffer=rb,
            **options,
        )
        yields = list(collector)
        return [yields, len(rb), rb.write_count, collector._frames, rb[:].contiguous()]


@program
def test_a_two_dimensional_storage(make):
    rb = ReplayBuffer(storage=LazyTensorStorage(200, ndim=2), batch_size=5)
    for _ in make(
        three_cartpoles(), None, frames_per_batch=30, total_frames=90, replay_buffer=rb
    ):
        pass
    return [len(rb), rb[:]]


@pytest.mark.parametrize("extend", [True, False])
def test_random_frames_are_counted_by_the_replay_buffer(extend):
    @both
    def _(make):
        env = cartpole()
        rb = ReplayBuffer(storage=ListStorage(200), batch_size=5)
        options = {"init_random_frames": 25, "extend_buffer": extend}
        for _ in make(
            env,
            actor(env),
            frames_per_batch=10,
            total_frames=60,
            replay_buffer=rb,
            **options,
        ):
            pass
        return [
            rb.write_count,
            *(rb[i]["action"] for i in range(60)),
            *("logits" in rb[i] for i in range(60)),
        ]


@program
def test_what_the_buffer_has_already_counts_as_random_frames(make):
    rb = ReplayBuffer(storage=ListStorage(200), batch_size=5)
    list(make(cartpole(), None, frames_per_batch=30, total_frames=30, replay_buffer=rb))
    env = cartpole()
    list(
        make(
            env,
            actor(env),
            frames_per_batch=10,
            total_frames=10,
            replay_buffer=rb,
            init_random_frames=20,
        )
    )
    return ["logits" in rb[i] for i in range(40)]


@program
def test_a_reset_of_some_drops_their_open_trajectories(make):
    env = three_counting()
    collector = make(
        env, counter(env), frames_per_batch=9, trajs_per_batch=2, traj_format="cat"
    )
    it = iter(collector)
    got = [next(it), sorted(collector._traj_assembly[0])]
    collector.reset([2])
    return [*got, sorted(collector._traj_assembly[0]), next(it), next(it)]


@program
def test_postprocessing_by_a_transform(make):
    env = cartpole()
    return batches(lambda: env, actor, frames_per_batch=10, postproc=MultiStep(0.9, 3))(
        make
    )


@program
def test_private_keys_are_left_out(make):
    def policy(tensordict):
        tensordict["action"] = torch.ones(*tensordict.shape, 2, dtype=torch.int64)
        tensordict["_hidden"] = torch.ones(*tensordict.shape, 3)
        tensordict["shown"] = torch.ones(*tensordict.shape, 3)
        tensordict["nested", "_hidden"] = torch.ones(*tensordict.shape, 3)
        return tensordict

    env = GymEnv("CartPole-v1")
    collector = make(env, policy, frames_per_batch=5)
    return sorted(map(str, next(iter(collector)).keys(True, True)))


@program
def test_private_keys_are_kept_on_request(make):
    env = three_counting()
    policy = counter(env)
    keys = ["_hidden", ("nested", "_hidden"), ("_nested", "shown")]
    copy = TensorDictModule(
        lambda seen: tuple(seen + n for n in range(3)),
        in_keys=["observation"],
        out_keys=keys,
    )
    collector = make(
        env, TensorDictSequential(policy, copy), frames_per_batch=9, total_frames=18
    )
    collector._exclude_private_keys = False
    return [collector._exclude_private_keys, *(batch.clone() for batch in collector)]


class ByName(torch.nn.Module):
    """Its argument is named as the observation."""

    def __init__(self, extra: bool) -> None:
        super().__init__()
        self.net, self.extra = torch.nn.Linear(3, 1), extra

    def forward(self, observation):
        out = self.net(observation)
        return (out, out * 2) if self.extra else out


@pytest.mark.parametrize("extra", [False, True])
def test_a_module_is_wrapped_by_the_names_of_its_arguments(extra):
    both(batches(pendulum, lambda env: ByName(extra), frames_per_batch=10))


@program
def test_a_trusted_function(make):
    def choose(td):
        return td.set("action", torch.zeros(*td.shape, 1))

    return batches(
        pendulum, lambda env: choose, frames_per_batch=10, trust_policy=True
    )(make)


@program
def test_a_function_that_reads_flags_and_step_counts(make):
    def choose(tensordict):
        assert not tensordict["done"].any()
        assert not tensordict["truncated"].any()
        return tensordict.set("action", tensordict["step_count"].float())

    return batches(
        pendulum, lambda env: choose, frames_per_batch=10, max_frames_per_traj=3
    )(make)


@program
def test_a_lazy_policy(make):
    def lazy(env):
        return TensorDictModule(
            torch.nn.LazyLinear(1), in_keys=["observation"], out_keys=["action"]
        )

    return batches(pendulum, lazy, frames_per_batch=10)(make)


EAGER = {"backend": "eager"}
FASTER: dict[str, dict[str, Any]] = {
    "compiled": {"compile_policy": EAGER},
    "compiled after three calls": {"compile_policy": {**EAGER, "warmup": 3}},
    "compiled at once": {"compile_policy": {**EAGER, "warmup": 0, "dynamic": False}},
    "graphs": {"cudagraph_policy": True},
    "graphs, no keywords": {"cudagraph_policy": {}},
    "graphs after three calls": {"cudagraph_policy": {"warmup": 3}},
    "both": {"compile_policy": EAGER, "cudagraph_policy": {"warmup": 1}},
    "both make graphs": {
        "compile_policy": {**EAGER, "mode": "reduce-overhead"},
        "cudagraph_policy": True,
    },
    "unknown to torch.compile": {"compile_policy": {"nothing": 1}},
    "unknown to graphs": {"cudagraph_policy": {"nothing": 1}},
    "a keyword of TorchRL's own": {"cudagraph_policy": {"in_keys": []}},
    "no warm-up of graphs": {"cudagraph_policy": {"warmup": 0}},
    "no such backend": {"compile_policy": {"backend": "nothing"}},
    "no synchronization": {
        "no_cuda_sync": True,
        "device": "cpu",
        "cudagraph_policy": True,
    },
}
POLICIES: dict[str, Callable[[Any], Any]] = {
    "module": lambda env: linear(),
    "by name": lambda env: ByName(True),
    "function": lambda env: lambda td: td.set("action", td["observation"][..., :1] / 8),
    "counts its calls": lambda env: Counting(),
    "random": lambda env: None,
    "a graph": lambda env: CudaGraphModule(linear()),
    "a graph of a function": lambda env: CudaGraphModule(
        lambda td: td.set("action", td["observation"][..., :1])
    ),
}
NO_CUDA = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="graphs are made, and cannot contain what acts here",
)


@NO_CUDA
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", FASTER)
def test_options_for_a_faster_policy_do_on_the_cpu_what_they_do_in_torchrl(
    name, policy
):
    """Without CUDA, TorchRL's graphs call the policy; its options are checked."""
    program = batches(
        pendulum, POLICIES[policy], count=2, frames_per_batch=5, **FASTER[name]
    )
    both(lambda make: outcome(lambda: program(make)))


def test_the_machine_without_cuda_is_warned_of():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    for make in (torchrl.collectors.Collector, Collector):
        with pytest.warns(UserWarning, match="without CUDA device"):
            make(
                pendulum(), linear(), frames_per_batch=5, cudagraph_policy=True
            ).shutdown()


@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_a_policy_is_compiled_after_so_many_calls(warmup):
    def backend(graph, inputs):
        compiled.append(calls[0])
        return graph.forward

    class Counted(TensorDictModule):
        @torch.compiler.disable
        def count(self):
            calls[0] += 1

        def forward(self, td):
            self.count()
            return super().forward(td)

    found = []
    for make in (torchrl.collectors.Collector, Collector):
        torch.compiler.reset()
        calls, compiled = [0], list[int]()
        policy = Counted(
            torch.nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"]
        )
        collector = make(
            pendulum(),
            policy,
            frames_per_batch=8,
            compile_policy={"backend": backend, "warmup": warmup},
        )
        collector.next()
        found.append(compiled[0])
    assert found[1] == found[0]


def test_a_compiled_policy_gets_new_weights():
    @both
    def _(make):
        policy = linear()
        collector = make(pendulum(), policy, frames_per_batch=5, compile_policy=EAGER)
        first = collector.next()
        collector.update_policy_weights_(TensorDict.from_module(policy).data * 0 + 1)
        return [first, collector.next(), type(collector.policy).__name__]


@program
def test_a_policy_factory(make):
    collector = make(
        pendulum, policy_factory=lambda: ByName(False), frames_per_batch=10
    )
    return [collector.next(), type(collector.policy).__name__]


@program
def test_an_empty_random_policy(make):
    collector = make(pendulum, RandomPolicy(), frames_per_batch=10)
    return [
        collector.next(),
        type(collector.policy).__name__,
        collector.getattr_policy("action_key"),
    ]


@program
def test_environments_from_functions_with_keywords(make):
    # The environments are not seeded; no episode of CartPole ends so soon.
    collector = make(
        GymEnv, None, frames_per_batch=5, create_env_kwargs={"env_name": "CartPole-v1"}
    )
    return [
        collector.next().exclude("observation", "next"),
        collector.getattr_env("batch_size"),
    ]


ERRORS: dict[str, dict[str, Any]] = {
    "unknown": {"foo": 1},
    "no frames": {"frames_per_batch": None},
    "policy and factory": {
        "policy": ByName(False),
        "policy_factory": lambda: ByName(False),
    },
    "reset_when_done": {"reset_when_done": False},
    "split without ids": {"split_trajs": True, "track_traj_ids": False},
    "kwargs for an object": {"create_env_kwargs": {"a": 1}},
    "same td and buffer": {"return_same_td": True, "replay_buffer": ReplayBuffer()},
    "postproc and add": {
        "postproc": len,
        "replay_buffer": ReplayBuffer(),
        "extend_buffer": False,
    },
    "split and add": {
        "split_trajs": True,
        "replay_buffer": ReplayBuffer(),
        "extend_buffer": False,
    },
    "buffers and buffer": {"use_buffers": True, "replay_buffer": ReplayBuffer()},
    "a linear layer": {"policy": torch.nn.Linear(3, 1)},
    "a function of obs": {"policy": lambda obs: obs},
    "format alone": {"traj_format": "cat"},
    "no format": {"traj_format": "cut", "trajs_per_batch": 1},
    "sync": {"sync": True},
    "step count twice": {"max_frames_per_traj": 3, "limited": True},
}


@pytest.mark.parametrize("error", ERRORS)
def test_errors_have_the_same_type(error):
    @both
    def _(make):
        options = {"policy": None, "frames_per_batch": 10, **ERRORS[error]}
        env = (
            TransformedEnv(pendulum(), StepCounter(3))
            if options.pop("limited", False)
            else pendulum()
        )
        if options["frames_per_batch"] is None:
            del options["frames_per_batch"]
        return outcome(lambda: type(make(env, options.pop("policy"), **options)))


def test_an_unknown_keyword_is_named_as_torchrl_does():
    with pytest.raises(TypeError, match=r"Keys \['foo'\] are unknown to Collector\."):
        Collector(pendulum(), None, frames_per_batch=10, foo=1)


class Broken(mocks.CountingEnv):
    """Raises at a step."""

    def _step(self, tensordict):
        if self.count == 3:
            raise FloatingPointError("the simulator diverged")
        return super()._step(tensordict)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"replay_buffer": 5}, "replay_buffer=5: expected a replay buffer"),
        ({"replay_buffer": {}}, r"replay_buffer=\{\}: expected a replay buffer"),
        ({"replay_buffer": ReplayBuffer}, "expected a replay buffer"),
        ({"replay_buffer": ReplayMemory(100)}, "use muster.Collector"),
        ({"frames_per_batch": None}, "frames_per_batch=None"),
        ({"total_frames": "x"}, "total_frames='x': expected an integer"),
        ({"total_frames": [40]}, r"total_frames=\[40\]: expected an integer"),
        ({"weight_sync_schemes": 5}, "weight_sync_schemes=5: expected a dict"),
    ],
)
def test_impossible_arguments_are_refused_before_anything_is_collected(options, match):
    given = {"frames_per_batch": 20, "total_frames": 40, **options}
    with pytest.raises(BadOption, match=match):
        Collector(pendulum(), None, **given)


def test_a_state_or_an_index_that_does_not_fit_changes_nothing():
    ours = Collector(pendulum(), None, frames_per_batch=20, total_frames=60)
    assert ours.next().shape == (20,)
    for state in (None, {}, 5, {"frames": 3}):
        with pytest.raises(BadCheckpoint, match="Nothing was loaded"):
            ours.load_state_dict(state)
    for index in (5, "x", [[True, False]]):
        with pytest.raises(BadOption, match="expected an index into the batch size"):
            ours.reset(index=index)
    batch = ours.next()
    assert ours.state_dict()["frames"] == 40
    assert batch["collector", "traj_ids"][0] >= 0
    ours.shutdown()


def test_errors_of_environments_and_policies_are_the_originals():
    def choose(td):
        raise ZeroDivisionError("of the policy")

    for make in (torchrl.collectors.Collector, Collector):
        collector = make(Broken(max_steps=9), counter(counting()), frames_per_batch=10)
        with pytest.raises(FloatingPointError, match="diverged"):
            next(iter(collector))
        assert collector.closed
        with pytest.raises(ZeroDivisionError):
            make(pendulum(), choose, frames_per_batch=10)


def warned(make: Make, **options: Any) -> list[str]:
    with noted_warnings() as caught:
        make(three_counting(), counter(three_counting()), **options)
    return sorted(f"{w.category.__name__}: {str(w.message)[:60]}" for w in caught)


@pytest.mark.parametrize(
    "options",
    [
        {"frames_per_batch": 10},
        {"frames_per_batch": 12, "total_frames": 20},
        {"frames_per_batch": 12, "init_random_frames": 20},
        {"frames_per_batch": 12, "trajs_per_batch": 2},
        {"frames_per_batch": 12, "split_trajs": True},
        {"frames_per_batch": 12, "auto_register_policy_transforms": False},
    ],
    ids=str,
)
def test_warnings_are_the_same(options):
    both(lambda make: warned(make, **options))


# --- weights, versions, state ---------------------------------------------------------------------


@program
def test_an_optimizer_changes_what_acts_and_updates_need_nothing(make):
    env = pendulum()
    policy = ByName(False)
    collector = make(env, policy, frames_per_batch=5)
    got = [collector.next()]
    with torch.no_grad():
        policy.net.weight.add_(1)
    got.append(collector.next())
    collector.update_policy_weights_()
    collector.update_policy_weights_(TensorDict.from_module(ByName(False)).data)
    return [*got, collector.next(), collector.policy is policy]


class Below(TensorDictModuleBase):
    """Writes below ``next`` what it does not read."""

    in_keys = ["observation"]  # noqa: RUF012
    out_keys = ["action", ("next", "hidden"), ("next", "deep", "er")]  # noqa: RUF012

    def forward(self, td: Any) -> Any:
        td["action"] = torch.ones_like(td["observation"])
        td["next", "hidden"] = td["observation"] + 0.5
        td["next", "deep", "er"] = td["observation"] * 2
        return td


@pytest.mark.parametrize(
    "options",
    [{}, {"use_buffers": False}, {"max_frames_per_traj": 3, "split_trajs": True}],
    ids=str,
)
@pytest.mark.parametrize("env", [counting, three_counting])
def test_what_a_policy_writes_below_next_is_there(env, options):
    both(batches(env, lambda _: Below(), frames_per_batch=12, **options))


@program
def test_versions_are_counted(make):
    collector = make(
        pendulum(), linear(), frames_per_batch=5, track_policy_version=True
    )
    got = [collector.next(), collector.get_policy_version()]
    for _ in range(3):
        collector.update_policy_weights_()
    batch = collector.next()[1:]  # TorchRL gives the first row the version before
    return [
        *got,
        batch["policy_version"],
        batch["next", "policy_version"],
        collector.policy_version,
        numbers(collector),
    ]


def test_the_first_row_after_an_update_has_its_version():
    collector = Collector(
        pendulum(), ByName(False), frames_per_batch=3, track_policy_version=True
    )
    collector.next()
    collector.update_policy_weights_()
    assert collector.next()["policy_version"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("random", [0, 20])
def test_a_state_that_only_the_policy_knows_is_there(random):
    keys = []
    for make in (torchrl.collectors.Collector, Collector):
        collector = make(
            pendulum(), Hidden(), frames_per_batch=5, init_random_frames=random
        )
        keys.append(set(collector.next().keys(True, True)))
    assert keys[0] == keys[1]
    if not random:  # TorchRL loses it from one step to the next
        batch = collector.next()
        assert batch["hidden"][:, 0].tolist() == [5, 6, 7, 8, 9]
        assert batch["next", "hidden"][:, 0].tolist() == [6, 7, 8, 9, 10]


@pytest.mark.parametrize("make_env", [counting, three_counting])
def test_an_environment_is_used_again_after_the_end(make_env):
    @both
    def _(make):
        env = make_env()
        got = []
        for _ in range(2):
            got += list(make(env, outplace, frames_per_batch=9, total_frames=18))
            env.reset()
        return got


@program
def test_truncated_keys_of_agents_are_set(make):
    env = TransformedEnv(mocks.NestedCountingEnv(), InitTracker()).add_truncated_keys()
    return batches(
        lambda: env,
        lambda env: env.rand_action,
        2,
        frames_per_batch=8,
        set_truncated=True,
        trust_policy=True,
    )(make)


@program
def test_bad_updates_are_refused_alike(make):
    collector = make(pendulum(), ByName(False), frames_per_batch=5)
    weights = TensorDict.from_module(ByName(False)).data
    return [
        outcome(lambda: collector.update_policy_weights_(weights, model_id="nope")),
        outcome(lambda: collector.update_policy_weights_(weights, weights=weights)),
        outcome(
            lambda: collector.update_policy_weights_(
                weights=weights, policy=ByName(False)
            )
        ),
        outcome(
            lambda: collector.update_policy_weights_(
                weights_dict={"policy": weights}, model_id="policy"
            )
        ),
        outcome(
            lambda: make(pendulum(), None, frames_per_batch=5).update_policy_weights_()
        ),
    ]


@program
def test_state_dicts_go_from_one_to_another(make):
    def build():
        return make(cartpole(), actor(cartpole()), frames_per_batch=10, total_frames=40)

    first = build()
    batch = first.next()
    state = first.state_dict()
    second = build()
    second.load_state_dict(state)
    rest = [b["collector", "traj_ids"] for b in second]
    return [batch, dict(state), rest, second._frames, second._iter]


def test_a_state_dict_of_torchrl_loads_here_and_the_other_way_round():
    kinds = (torchrl.collectors.Collector, Collector)
    for one, other in (kinds, kinds[::-1]):
        a = one(cartpole(), actor(cartpole()), frames_per_batch=10, total_frames=40)
        a.next()
        b = other(cartpole(), actor(cartpole()), frames_per_batch=10, total_frames=40)
        b.load_state_dict(a.state_dict())
        assert_equal(
            dict(b.state_dict()["policy_state_dict"]),
            dict(a.state_dict()["policy_state_dict"]),
        )
        assert (b._frames, len(list(b))) == (10, 3)


@program
def test_fake_tensordicts(make):
    made = []
    for options in (
        {},
        {"set_truncated": True},
        {"max_frames_per_traj": 5},
        {"compact_obs": True},
    ):
        env = three_cartpoles()
        collector = make(env, actor(env), frames_per_batch=30, **options)
        made += [collector.fake_tensordict(), collector.next()]
    return made


@program
def test_looking_around(make):
    env = pendulum()
    policy = ByName(False)
    collector = make(env, policy, frames_per_batch=5, worker_idx=2)
    return [
        collector.worker_idx,
        collector.get_distant_attr("policy.net.weight").shape,
        collector.map_fn("getattr_env", [("batch_size",)]),
        collector.cascade_execute("policy.net.weight.sum"),
        collector.get_model("policy") is policy,
        collector.getattr_env("batch_size"),
        outcome(collector.start),
        outcome(lambda: collector.getattr_rb("nope")),
        collector.is_running(),
        collector.closed,
        [collector.shutdown() for _ in range(2)],
        collector.closed,
        isinstance(collector, torchrl.collectors.BaseCollector),
    ]


def test_signatures_are_the_same():
    assert inspect.signature(Collector) == inspect.signature(
        torchrl.collectors.Collector
    )


@pytest.mark.parametrize("make", [torchrl.collectors.Collector, Collector])
def test_profiles_are_written(make, tmp_path):
    collector = make(
        counting(), counter(counting()), frames_per_batch=5, total_frames=25
    )
    collector.enable_profile(
        num_rollouts=2,
        warmup_rollouts=1,
        save_path=tmp_path / "trace.json",
        activities=["cpu"],
    )
    it = iter(collector)
    next(it)
    with pytest.raises(RuntimeError, match="Cannot enable profiling after iteration"):
        collector.enable_profile()
    list(it)
    assert (tmp_path / "trace.json").exists()
    collector.disable_profile()
    assert collector.profile_config is None


@pytest.mark.parametrize("make", [torchrl.collectors.Collector, Collector])
def test_collecting_in_the_background(make):
    rb = ReplayBuffer(storage=LazyTensorStorage(1000))
    last = threading.Event()
    collector = make(
        cartpole(),
        None,
        frames_per_batch=10,
        total_frames=100,
        replay_buffer=rb,
        post_collect_hook=lambda batch: last.set() if rb.write_count == 90 else None,
    )
    collector.start()
    assert last.wait(60)
    collector.async_shutdown()
    assert rb.write_count == 100
    assert not collector.is_running()


def test_the_same_tensordict_comes_every_time():
    collector = Collector(
        counting(), counter(counting()), frames_per_batch=6, return_same_td=True
    )
    it = iter(collector)
    first = next(it)
    before = first["observation"].clone()
    first.apply(
        lambda leaf: leaf.share_memory_(), filter_empty=True
    )  # as workers do, for the process that reads it
    memory = first["observation"].data_ptr()
    assert next(it) is first
    assert first["observation"].data_ptr() == memory
    assert not torch.equal(first["observation"], before)


def test_batches_are_not_written_to_again():
    collector = Collector(counting(), counter(counting()), frames_per_batch=5)
    it = iter(collector)
    first = next(it)
    kept = first.clone()
    for _ in range(3):
        next(it)
    assert_equal(first, kept)


# --- whole programs -------------------------------------------------------------------------------


def ppo(make: Make) -> Any:
    """Proximal policy optimisation on CartPole, as in TorchRL's tutorials."""
    env = TransformedEnv(cartpole(), Compose(StepCounter(200), RewardSum()))
    net = torch.nn.Sequential(
        torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2)
    )
    policy = ProbabilisticActor(
        TensorDictModule(net, in_keys=["observation"], out_keys=["logits"]),
        spec=env.action_spec,
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
        return_log_prob=True,
    )
    value = ValueOperator(torch.nn.Linear(4, 1), in_keys=["observation"])
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=value)
    loss = ClipPPOLoss(actor_network=policy, critic_network=value, entropy_coeff=0.01)
    optimizer = torch.optim.Adam(loss.parameters(), 1e-2)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(100),
        sampler=SamplerWithoutReplacement(),
        batch_size=25,
    )
    collector = make(
        env, policy, frames_per_batch=100, total_frames=400, split_trajs=False
    )
    collector.set_seed(0)
    rewards = []
    for data in collector:
        for _ in range(2):
            advantage(data)
            buffer.extend(data.reshape(-1))
            for _ in range(4):
                losses = loss(buffer.sample())
                total = (
                    losses["loss_objective"]
                    + losses["loss_critic"]
                    + losses["loss_entropy"]
                )
                optimizer.zero_grad()
                total.backward()
                optimizer.step()
        rewards.append(
            [
                data["next", "reward"].mean().item(),
                data["step_count"].max().item(),
                float(total),
            ]
        )
        collector.update_policy_weights_()
    collector.shutdown()
    return [rewards, [p.detach().clone() for p in policy.parameters()]]


def dqn(make: Make) -> Any:
    """Q-learning with random frames, exploration, a replay buffer and n-step returns."""
    env = cartpole()
    net = TensorDictModule(
        torch.nn.Linear(4, 2), in_keys=["observation"], out_keys=["action_value"]
    )
    q = TensorDictSequential(net, QValueModule(spec=env.action_spec))
    explore = EGreedyModule(env.action_spec, eps_init=0.5, annealing_num_steps=200)
    loss = DQNLoss(q, action_space=env.action_spec, delay_value=False)
    optimizer = torch.optim.Adam(loss.parameters(), 1e-2)
    buffer = ReplayBuffer(storage=LazyTensorStorage(500), batch_size=32)
    collector = make(
        env,
        TensorDictSequential(q, explore),
        frames_per_batch=20,
        total_frames=200,
        init_random_frames=60,
        max_frames_per_traj=30,
        postproc=MultiStep(0.99, 3),
    )
    losses = []
    for data in collector:
        buffer.extend(data.reshape(-1))
        explore.step(data.numel())
        for _ in range(2):
            total = loss(buffer.sample())["loss"]
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
        losses.append(total.item())
        collector.update_policy_weights_(TensorDict.from_module(collector.policy).data)
    return [losses, [p.detach().clone() for p in q.parameters()], buffer[:]]


def trainer(make: Make) -> Any:
    """TorchRL's own training loop."""
    env = cartpole()
    net = TensorDictModule(
        torch.nn.Linear(4, 2), in_keys=["observation"], out_keys=["action_value"]
    )
    loss = DQNLoss(
        TensorDictSequential(net, QValueModule(spec=env.action_spec)),
        action_space=env.action_spec,
    )
    training = Trainer(
        collector=make(env, loss.value_network, frames_per_batch=20, total_frames=100),
        total_frames=100,
        frame_skip=1,
        loss_module=loss,
        optimizer=torch.optim.Adam(loss.parameters(), 1e-2),
        optim_steps_per_batch=2,
        progress_bar=False,
    )
    training.train()
    return [training.collected_frames, [p.detach().clone() for p in net.parameters()]]


@pytest.mark.parametrize("algorithm", [ppo, dqn, trainer], ids=lambda f: f.__name__)
def test_a_whole_program_trains_alike(algorithm):
    both(algorithm)
