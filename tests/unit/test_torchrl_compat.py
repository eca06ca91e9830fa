"""TorchRL's collector in the compat layer, where TorchRL's own is no measure: see tests/parity for
what is equal.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torchrl")

from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.collectors import BaseCollector, WeightUpdaterBase
from torchrl.collectors.utils import _TrajectoryPool
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import GymEnv, InitTracker, TransformedEnv
from torchrl.modules import LSTMModule

from muster import policies
from muster.compat.torchrl import Collector, VanillaWeightUpdater
from muster.compat.torchrl.numbering import Numbering
from muster.compat.torchrl.weight_names import flattened
from muster.compat.torchrl.weight_update import MultiProcessWeightSyncScheme
from muster.errors import BadOption, BadWeights, CollectorClosed
from muster.testing import CountingEnv
from tests.tools import Stopper, assert_same, column, counting
from tests.waits import without_gc

pytestmark = pytest.mark.filterwarnings("ignore")


def linear(bias: float = 0.0) -> TensorDictModule:
    net = torch.nn.Linear(3, 1)
    with torch.no_grad():
        net.bias.fill_(bias)
    return TensorDictModule(net, in_keys=["observation"], out_keys=["action"])


def pendulum() -> GymEnv:
    env = GymEnv("Pendulum-v1")
    env.set_seed(0)
    return env


def collect(n: int = 1, **options: Any) -> list[Any]:
    collector = Collector(pendulum(), linear(), **{"frames_per_batch": 5, **options})
    return [collector.next() for _ in range(n)]


def test_without_buffers_an_interruptor_makes_a_batch_shorter():
    short, full = collect(2, interruptor=Stopper(3), use_buffers=False)
    assert (short.shape, full.shape) == ((3,), (5,))
    assert (full["observation"][0] == short["next", "observation"][-1]).all()


# --- environments and policies of Muster's --------------------------------------------------------


@pytest.mark.parametrize(
    "source", [counting(3), CountingEnv(3)], ids=["factory", "object"]
)
def test_a_gymnasium_environment_with_a_function_on_observations(source):
    collector = Collector(
        source,
        lambda obs: obs[..., 1].long() % 2,
        frames_per_batch=7,
        max_frames_per_traj=2,
    )
    batch = collector.next()
    assert column(batch, "collector", "traj_ids") == [0, 0, 1, 1, 2, 2, 3]
    assert column(batch, "step_count") == [0, 1, 0, 1, 0, 1, 0]
    assert column(batch, "next", "truncated") == [
        False,
        True,
        False,
        True,
        False,
        True,
        False,
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_faster_functions_on_observations_without_cuda():
    options = {
        "compile_policy": {"backend": "eager", "warmup": 2},
        "cudagraph_policy": {"warmup": 3},
    }
    collector = Collector(
        CountingEnv(3),
        lambda obs: obs[..., 1].long() % 2,
        frames_per_batch=7,
        **options,
    )
    assert column(collector.next(), "collector", "traj_ids") == [0, 0, 0, 1, 1, 1, 2]
    with pytest.raises(TypeError, match="nothing"):
        Collector(
            CountingEnv(3), None, frames_per_batch=7, cudagraph_policy={"nothing": 1}
        )


def test_a_vector_environment_with_a_head():
    env = gymnasium.make_vec("CartPole-v1", 3, vectorization_mode="sync")
    collector = Collector(
        env, policies.categorical(torch.nn.Linear(4, 2)), frames_per_batch=30
    )
    batch = collector.next()
    assert batch.shape == (3, 10)
    assert batch["collector", "traj_ids"][:, 0].tolist() == [0, 1, 2]
    assert "action_log_prob" in batch


def test_seeding_an_environment_of_musters_begins_anew_and_repeats():
    collector = Collector(
        "CartPole-v1", lambda obs: (obs[..., 2] > 0).long(), frames_per_batch=10
    )
    runs = []
    for _ in range(2):
        collector.set_seed(5)
        runs.append(collector.next().exclude("collector"))
    assert_same(*runs)


def undecided() -> torch.nn.Linear:
    net = torch.nn.Linear(4, 2)
    for parameter in net.parameters():
        torch.nn.init.zeros_(parameter)
    return net


@pytest.mark.parametrize(
    "policy", [None, policies.categorical(undecided())], ids=["random", "head"]
)
def test_torchs_seed_decides_what_musters_own_policies_draw(policy):
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(
            Collector("CartPole-v1", policy, frames_per_batch=30)
            .next()["action"]
            .tolist()
        )
    assert runs[0] == runs[1] != runs[2]


def recurrent(observations: int, *head: Any) -> TensorDictSequential:
    lstm = LSTMModule(observations, 8, in_key="observation", out_key="features")
    return TensorDictSequential(lstm, *head)


def head(actions: int) -> TensorDictModule:
    return TensorDictModule(torch.nn.Linear(8, actions), ["features"], ["action"])


def test_a_recurrent_policy_needs_no_primer():
    one_hot = TensorDictModule(
        lambda a: torch.nn.functional.one_hot(a.argmax(-1), 2), ["action"], ["action"]
    )
    policy = recurrent(4, head(2), one_hot)
    env = TransformedEnv(GymEnv("CartPole-v1"), InitTracker())
    batch = Collector(env, policy, frames_per_batch=40).next()
    begins = torch.cat([torch.tensor([True]), batch["next", "done"][:-1, 0]])
    assert batch["recurrent_state_h"][begins].eq(0).all()
    assert batch["recurrent_state_h"][~begins].ne(0).any(-1).any(-1).all()


@pytest.mark.parametrize("adds", [False, None])
@pytest.mark.parametrize("writes", [False, True], ids=["batches", "into a buffer"])
def test_a_missing_is_init_is_an_error_as_in_torchrl(adds, writes):
    policy = recurrent(3, head(1))
    buffer = ReplayBuffer(storage=LazyTensorStorage(20)) if writes else None
    with (
        pytest.warns(FutureWarning) if adds is None else contextlib.nullcontext(),
        pytest.raises(KeyError, match="is_init.*auto_register_policy_transforms=True"),
    ):
        Collector(
            pendulum(),
            policy,
            frames_per_batch=5,
            replay_buffer=buffer,
            auto_register_policy_transforms=adds,
        )


def test_a_recurrent_policy_acts_in_an_environment_that_is_not_torchrls():
    policy = recurrent(3, head(1))
    collector = Collector("Pendulum-v1", policy, frames_per_batch=5)
    assert collector.next()["is_init"].squeeze(-1).tolist() == [True] + [False] * 4


def test_transforms_for_a_recurrent_policy_are_added_on_request():
    policy = recurrent(3, head(1))
    collector = Collector(
        pendulum(), policy, frames_per_batch=5, auto_register_policy_transforms=True
    )
    assert isinstance(collector.env, TransformedEnv)
    assert "is_init" in collector.next()


def test_policies_and_environments_are_told_of_the_collector():
    class Told:
        collector: Any = None

        def register_collector(self, collector: Any) -> None:
            self.collector = collector

        def __call__(self, td: Any) -> Any:
            return td.set("action", torch.zeros(*td.shape, 1))

    policy = Told()
    collector = Collector(pendulum(), policy, frames_per_batch=5, trust_policy=True)
    assert policy.collector is collector


# --- what is raised -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"frames_per_batch": 0}, {"frames_per_batch": 2.5}, {"total_frames": True}],
    ids=str,
)
def test_impossible_numbers_are_refused(options):
    with pytest.raises(BadOption, match=next(iter(options))):
        collect(**options)


def test_a_closed_collector_says_so():
    collector = Collector(pendulum(), linear(), frames_per_batch=5)
    batch = collector.next()
    collector.shutdown()
    collector.shutdown()
    assert batch["observation"].isfinite().all()
    assert collector.env.is_closed
    calls = (
        collector.next,
        collector.rollout,
        collector.reset,
        collector.fake_tensordict,
        lambda: list(collector),
    )
    for call in (*calls, *calls):
        with pytest.raises(CollectorClosed, match="shut down"):
            call()


def test_a_collector_is_closed_after_an_error_and_after_its_end():
    def fail(td: Any) -> Any:
        if calls:
            raise ZeroDivisionError("of the policy")
        calls.append(1)
        return td.set("action", torch.zeros(*td.shape, 1))

    calls: list[int] = []
    collector = Collector(pendulum(), fail, frames_per_batch=5, trust_policy=True)
    with pytest.raises(ZeroDivisionError):
        collector.next()
    with pytest.raises(CollectorClosed):
        collector.next()
    ended = Collector(pendulum(), linear(), frames_per_batch=5, total_frames=5)
    assert len(list(ended)) == 1
    assert ended.next() is None
    assert list(ended) == []
    ended.shutdown()
    for call in (ended.next, lambda: list(ended)):
        with pytest.raises(CollectorClosed):
            call()


def test_a_collector_that_nobody_refers_to_ends_at_once():
    """Left to the garbage collector it would close the environment while another collector uses it."""
    with without_gc():
        collector = Collector(pendulum(), linear(), frames_per_batch=5, total_frames=10)
        assert len(list(collector)) == 2
        ended = weakref.ref(collector)
        del collector
        assert ended() is None


@pytest.mark.slow
def test_warnings_are_silenced_by_the_environment_variable():
    code = (
        "import warnings; warnings.simplefilter('error', UserWarning)\n"
        "from muster.compat.torchrl import Collector\n"
        "Collector('CartPole-v1', None, frames_per_batch=10, total_frames=15, init_random_frames=3)\n"
    )
    for value, works in (("False", True), ("True", False)):
        run = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "RL_WARNINGS": value},
            capture_output=True,
        )
        assert (run.returncode == 0) == works, run.stderr.decode()[-500:]


# --- weights --------------------------------------------------------------------------------------


def deep(value: float = 0.0) -> TensorDictModule:
    """A policy with modules in modules, one of them without weights."""
    net = torch.nn.Sequential(
        torch.nn.Linear(3, 2), torch.nn.Tanh(), torch.nn.Linear(2, 1)
    )
    for parameter in net.parameters():
        torch.nn.init.constant_(parameter, value)
    return TensorDictModule(net, in_keys=["observation"], out_keys=["action"])


FORMS: dict[str, Callable[[TensorDictModule], Any]] = {
    "module": lambda new: new,
    "net": lambda new: new.module,
    "state dict": lambda new: new.state_dict(),
    "TensorDict": lambda new: TensorDict.from_module(new).data,
    "nested dict": lambda new: TensorDict.from_module(new).data.to_dict(),
    "nested dict of parameters": lambda new: TensorDict.from_module(new).to_dict(),
    "dict of TensorDicts": lambda new: dict(TensorDict.from_module(new).data.items()),
    "dict by paths": lambda new: dict(
        TensorDict.from_module(new).data.items(True, True)
    ),
    "dict of dicts of names": lambda new: {"module": new.module.state_dict()},
    "arrays": lambda new: {
        name: weight.numpy() for name, weight in new.state_dict().items()
    },
    "nested dict of the net": lambda new: TensorDict.from_module(
        new.module
    ).data.to_dict(),
}


@pytest.mark.parametrize("way", ["positional", "keyword", "by model"])
@pytest.mark.parametrize("method", ["update_policy_weights_", "receive_weights"])
@pytest.mark.parametrize("form", FORMS)
def test_weights_come_in_any_form(form, method, way):
    policy, given = deep(1.0), FORMS[form](deep(2.0))
    collector = Collector(
        pendulum(), policy, frames_per_batch=5, track_policy_version=True
    )
    keyword = "policy" if isinstance(given, torch.nn.Module) else "weights"
    if way == "by model":
        if method == "receive_weights":
            pytest.skip("has no such argument")
        collector.update_policy_weights_(weights_dict={"policy": given})
    elif way == "keyword":
        getattr(collector, method)(**{keyword: given})
    else:
        getattr(collector, method)(given)
    assert all((parameter == 2.0).all() for parameter in policy.parameters())
    assert collector.next()["policy_version"].unique().tolist() == [1]
    assert collector.policy_version == 1


@pytest.mark.parametrize("method", ["update_policy_weights_", "receive_weights"])
@pytest.mark.parametrize(
    "wrong", ["missing", "unknown", "shape", "not finite", "not a tensor", "twice"]
)
def test_nested_weights_that_do_not_fit_change_nothing(wrong, method):
    policy, given = deep(1.0), TensorDict.from_module(deep(2.0)).data.to_dict()
    layer = given["module"]["2"]
    if wrong == "missing":
        del layer["bias"]
    elif wrong == "unknown":
        given["module"]["3"] = {"weight": torch.ones(1)}
    elif wrong == "shape":
        layer["weight"] = torch.ones(2, 1)
    elif wrong == "not finite":
        layer["bias"] = torch.full((1,), torch.inf)
    elif wrong == "not a tensor":
        layer["bias"] = "zero"
    collector = Collector(pendulum(), policy, frames_per_batch=5)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (BadWeights, or TorchRL's own)
        if wrong == "twice":
            getattr(collector, method)(given, weights=given)
        else:
            getattr(collector, method)(given)
    assert isinstance(caught.value, BadWeights) == (wrong != "twice")
    assert all((parameter == 1.0).all() for parameter in policy.parameters())


def test_what_is_no_dict_is_not_flattened():
    td = TensorDict.from_module(deep())
    module = deep()
    assert flattened(td) is td
    assert flattened(module) is module
    assert flattened(None) is None
    assert list(flattened({"a": {"b.c": 1, ("d", "e"): {"f": 2}}, "g": {}})) == [
        "a.b.c",
        "a.d.e.f",
    ]


def test_weights_by_model_act_without_schemes():
    policy = linear()
    collector = Collector(
        pendulum(), policy, frames_per_batch=5, track_policy_version=True
    )
    collector.update_policy_weights_(
        weights_dict={"policy": TensorDict.from_module(linear()).data * 0 + 3}
    )
    assert (policy.module.weight == 3).all()
    assert collector.next()["policy_version"].unique().tolist() == [1]
    with pytest.raises(KeyError, match="critic"):
        collector.update_policy_weights_(weights_dict={"critic": linear()})
    assert collector.policy_version == 1


def test_schemes_and_updaters_of_this_package_fit():
    policy, given = linear(), TensorDict.from_module(linear()).data * 0 + 2
    schemes = {"policy": MultiProcessWeightSyncScheme()}
    collector = Collector(
        pendulum(), policy, frames_per_batch=5, weight_sync_schemes=schemes
    )
    collector.update_policy_weights_(given)
    assert (policy.module.weight == 2).all()
    with pytest.warns(DeprecationWarning, match="VanillaWeightUpdater"):
        updater = VanillaWeightUpdater.from_policy(policy)
    collector = Collector(
        pendulum(), policy, frames_per_batch=5, weight_updater=updater
    )
    collector.update_policy_weights_(given + 1)
    assert (policy.module.weight == 3).all()
    collector.update_policy_weights_((given + 2).to_dict())
    assert (policy.module.weight == 4).all()


def test_a_weight_updater_updates():
    class Updater(WeightUpdaterBase):
        pushed = 0

        def push_weights(
            self, policy_or_weights: Any = None, worker_ids: Any = None
        ) -> None:
            self.pushed += 1

        def _sync_weights_with_worker(self, *args: Any) -> None: ...
        def _get_server_weights(self) -> None: ...
        def _maybe_map_weights(self, *args: Any) -> None: ...
        def all_worker_ids(self) -> list[int]:
            return [0]

    updater = Updater()
    collector = Collector(
        pendulum(),
        linear(),
        frames_per_batch=5,
        weight_updater=lambda: updater,
        track_policy_version=True,
    )
    collector.update_policy_weights_(linear())
    assert (updater.pushed, updater.collector, collector.policy_version) == (
        1,
        collector,
        1,
    )


# --- in the background ----------------------------------------------------------------------------


def test_an_error_in_the_background_comes_at_the_end():
    def choose(td: Any) -> Any:
        calls.append(1)
        if len(calls) > 7:
            raising.set()
            raise ZeroDivisionError("in the thread")
        return td.set("action", torch.zeros(*td.shape, 1))

    calls: list[int] = []
    raising = threading.Event()
    buffer = ReplayBuffer(storage=LazyTensorStorage(100))
    collector = Collector(
        pendulum(), choose, frames_per_batch=5, replay_buffer=buffer, trust_policy=True
    )
    collector.start()
    assert raising.wait(60)
    with pytest.raises(ZeroDivisionError, match="in the thread"):
        collector.async_shutdown()
    collector.async_shutdown()
    assert len(buffer) == 5


def test_a_pause_stops_the_thread_between_batches():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10_000))
    collector = Collector(
        pendulum(), linear(), frames_per_batch=5, replay_buffer=buffer
    )
    collector.start()
    with collector.pause():
        before = buffer.write_count
        assert before % 5 == 0
        assert buffer.write_count == before
    collector.async_shutdown()


# --- state ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"max_frames_per_traj": 4}, {"reset_at_each_iter": True}], ids=str
)
def test_musters_state_goes_on_exactly(options):
    def build() -> Collector:
        return Collector(
            GymEnv("CartPole-v1"), None, frames_per_batch=15, total_frames=90, **options
        )

    torch.manual_seed(0)
    first = build()
    for _ in range(2):
        first.next()
    state, generator = first.muster_state_dict(), torch.get_rng_state()
    expected = list(first)
    second = build()
    report = second.load_muster_state_dict(state, trust=True)
    torch.set_rng_state(generator)
    got = list(second)
    assert report.exact
    assert len(got) == 4
    for mine, theirs in zip(got, expected, strict=True):
        assert_same(mine, theirs)


# --- trajectory ids -------------------------------------------------------------------------------


def test_two_collectors_share_a_pool_of_ids():
    pool = _TrajectoryPool()
    one, two = (
        Collector(counting(2), None, frames_per_batch=4, traj_pool=pool)
        for _ in range(2)
    )
    assert column(one.next(), "collector", "traj_ids") == [0, 0, 2, 2]
    assert column(two.next(), "collector", "traj_ids") == [1, 1, 4, 4]


@given(st.data())
def test_ids_are_handed_out_by_time_and_then_by_environment(data):
    B, T = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    flags = st.lists(st.booleans(), min_size=B * T, max_size=B * T)
    rounds = data.draw(st.lists(flags, min_size=1, max_size=3))
    numbering = Numbering(B, ["done"], _TrajectoryPool())
    current, following = list(range(B)), B
    for done in np.array(rounds).reshape(-1, B, T):
        batch = TensorDict(
            {("collector", "traj_ids"): torch.zeros(B, T, dtype=torch.int64)}, [B, T]
        )
        batch["next", "done"] = torch.from_numpy(done).unsqueeze(-1)
        numbering.write(batch)
        expected = np.empty((B, T), int)
        for t in range(T):
            for b in range(B):
                expected[b, t] = current[b]
                if done[b, t]:
                    current[b], following = following, following + 1
        assert batch["collector", "traj_ids"].tolist() == expected.tolist()


def test_it_is_a_collector_of_torchrls():
    assert issubclass(Collector, BaseCollector)
    assert "frames_per_batch" in repr(Collector.__signature__)
    assert repr(Collector(pendulum(), linear(), frames_per_batch=5)).startswith(
        "Collector(\n    env=GymEnv"
    )
