"""The same program on TorchRL's collectors with worker processes and on Muster's: the same batches,
leaf by leaf.
"""

from __future__ import annotations

import copy
import importlib
import multiprocessing
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchrl")

import torch
import torchrl.collectors
import torchrl.weight_update
from tensordict import TensorDict
from torch import multiprocessing as mp
from torchrl.data import LazyTensorStorage, ReplayBuffer

import muster.compat.torchrl.collectors
from muster.compat.torchrl import progress, weight_update
from muster.errors import BadOption, BadWeights
from tests.parity import torchrl_workers as workers
from tests.parity.test_torchrl_collector import assert_equal
from tests.parity.torchrl_workers import ENVS, IDS, Weighted

pytestmark = pytest.mark.filterwarnings("ignore")
SOURCES = (torchrl.collectors, muster.compat.torchrl.collectors)
PRELOADED = (
    "torchrl.collectors",
    "muster.compat.torchrl.multi",
    "tests.parity.torchrl_workers",
    "muster.workers.main",
)


@pytest.fixture(scope="module", autouse=True)
def _workers_start_in_milliseconds() -> Iterator[None]:
    """From a fork server that has imported what they need; TorchRL starts its workers as the
    program says.
    """
    before = mp.get_start_method(allow_none=True)
    multiprocessing.set_forkserver_preload([*PRELOADED])
    mp.set_start_method("forkserver", force=True)
    yield
    mp.set_start_method(before, force=True)


def both(program: Callable[[Any], Any]) -> None:
    """Run ``program`` with the collectors of either, and compare what it returns."""
    theirs, mine = (program(source) for source in SOURCES)
    assert_equal(mine, theirs)


def made(
    source: Any,
    name: str = "MultiSyncCollector",
    envs: Any = None,
    policy: Any = None,
    **options: Any,
) -> Any:
    """A collector of 8 frames in a batch."""
    acts = Weighted() if policy is None and "policy_factory" not in options else policy
    told = {"frames_per_batch": 8, "total_frames": 32, **options}
    return getattr(source, name)(ENVS if envs is None else envs, acts, **told)


class Numbered:
    """Which worker gets which trajectory id is a matter of time: counts them in each worker
    instead.
    """

    def __init__(self) -> None:
        self.seen: dict[int, dict[int, int]] = {}

    def __call__(self, batch: Any, stacked: bool) -> Any:
        batch = batch.clone()
        parts = list(batch.unbind(0)) if stacked else [batch]
        for worker, part in enumerate(parts):
            known = self.seen.setdefault(worker, {-1: -1})
            for number in part[IDS].flatten().tolist():
                known.setdefault(number, len(known) - 1)
            part[IDS].apply_(lambda number, known=known: known[int(number)])
        numbers = [
            number for known in self.seen.values() for number in known if number >= 0
        ]
        assert not stacked or len(numbers) == len(set(numbers))
        return batch


SYNC: dict[str, dict[str, Any]] = {
    "frames that do not divide": {
        "frames_per_batch": 9,
        "total_frames": 20,
        "reset_at_each_iter": True,
    },
    "frames by worker": {
        **{
            "frames_per_batch": [4, 8],
            "cat_results": -1,
            "device": ["cpu", "cpu"],
            "compact_obs": True,
        },
        **{"max_frames_per_traj": 2, "policy": workers.WithoutKeys()},
    },
    "concatenated": {
        "cat_results": 0,
        "postproc": workers.Privately(),
        "init_random_frames": 8,
        "num_workers": 2,
    },
    "split": {
        "split_trajs": True,
        "policy": workers.ByArgument(),
        "storing_device": "cpu",
    },
    "batched": {
        "envs": [workers.two_counting] * 2,
        "policy": workers.ones,
        "trust_policy": True,
    },
    "heterogeneous": {
        "envs": [workers.heterogeneous] * 2,
        "policy": torchrl.collectors.RandomPolicy(),
        "device": "cpu",
    },
    "instances": {
        "envs": [workers.counting(3), workers.counting(4)],
        "policy": None,
        "policy_factory": None,
    },
    "factories": {
        "policy_factory": [
            partial(workers.weighted, 1.0),
            partial(workers.weighted, 2.0),
        ]
    },
    "a factory beside a policy": {
        "policy": Weighted(3.0),
        "policy_factory": partial(workers.weighted, 1.0),
    },
    "trajectories": {
        "trajs_per_batch": 2,
        "traj_format": "cat",
        "envs": ENVS[:1],
    },  # of one: several come in any order
    "padded trajectories": {
        "trajs_per_batch": 3,
        "traj_format": "padded",
        "envs": ENVS[:1],
        "update_at_each_batch": True,
    },
    "versions": {"track_policy_version": True},
    "hooks": {
        "post_collect_hook": workers.Noted(1),
        "pre_collect_hook": workers.Noted(0),
    },
}
RANDOM = {
    "heterogeneous",
    "instances",
    "concatenated",
}  # what acts at random: keys, shapes and flags of the end are equal


QUICK = {"frames that do not divide", "split", "hooks"}


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in SYNC
    ],
)
def test_batches_are_equal(name: str) -> None:
    options = SYNC[name]
    stacked = not {"cat_results", "split_trajs", "trajs_per_batch"} & options.keys()

    def program(source: Any) -> Any:
        number = Numbered()
        collector = made(source, **copy.deepcopy(options))
        try:
            batches = [
                batch.exclude(IDS)
                if "split_trajs" in options
                else number(batch, stacked)
                for batch in collector
            ]
            return [batch.zero_() if name in RANDOM else batch for batch in batches]
        finally:
            collector.shutdown()

    both(program)


def test_cat_is_the_first_dimension() -> None:
    """TorchRL's documentation has ``cat_results="cat"``, and TorchRL takes 0."""
    found = []
    for source, cat in zip(SOURCES, (0, "cat"), strict=True):
        collector = made(
            source,
            envs=[workers.two_counting] * 2,
            policy=workers.ones,
            cat_results=cat,
            total_frames=8,
        )
        found.append([batch.exclude(IDS) for batch in collector])
        collector.shutdown()
    assert found[1][0].shape == (4, 2)
    assert_equal(found[1], found[0])


def test_a_program_that_looks_into_workers(tmp_path: Any) -> None:
    def program(source: Any) -> Any:
        policy = Weighted(1.0)
        collector = made(
            source, policy=policy, track_policy_version=True, total_frames=-1
        )
        try:
            return list(look(collector, policy, tmp_path / source.__name__))
        finally:
            collector.shutdown()
            collector.shutdown()  # may be called again

    both(program)


def look(collector: Any, policy: Any, folder: Any) -> Iterator[Any]:
    """What a program sees of a collector with two workers, in turn."""
    yield (
        collector.get_distant_attr("policy.name"),
        collector.get_distant_attr("frames_per_batch"),
    )
    yield (
        collector.map_fn("policy.doubled", list_of_args=[(1,), (2,)]),
        collector.getattr_env("max_steps"),
    )
    yield (
        collector.set_seed(3),
        collector.frames_per_batch_worker(worker_idx=0),
        collector.requested_frames_per_batch,
    )
    yield len(collector.procs), collector.num_workers, collector.policy is policy
    folder.mkdir()
    collector.enable_profile(
        workers=[0],
        num_rollouts=2,
        warmup_rollouts=1,
        save_path=folder / "{worker_idx}.json",
    )
    number, batches = Numbered(), iter(collector)
    yield [number(next(batches), True) for _ in range(2)], (folder / "0.json").exists()
    collector.disable_profile()
    with torch.no_grad():
        policy.weight.fill_(2.0)
    collector.update_policy_weights_()
    yield next(batches)["weight"]
    collector.update_policy_weights_(TensorDict.from_module(Weighted(5.0)).data)
    yield next(batches)["weight"]
    collector.update_policy_weights_(Weighted(6.0))
    yield next(batches)["weight"]
    yield collector.get_distant_attr("policy_version"), collector.policy_version
    collector.post_collect_hook = workers.Noted(3)
    yield collector.get_distant_attr("post_collect_hook.fn.mark")
    yield {
        name: value
        for name, value in collector.stats(workers="both").items()
        if "alive" not in name and name.rpartition("/")[2] not in progress.NAMES
    }
    state = collector.state_dict()
    yield list(state), {name: sorted(state[name]) for name in ("worker0", "worker1")}
    yield next(batches)["observation"][:, -1]
    collector.load_state_dict(state)
    yield collector.get_distant_attr("policy_version"), collector.stats()["frames"]
    yield next(batches)["weight"]
    collector.reset()
    yield next(batches)["observation"][:, 0]
    with pytest.raises(AttributeError):
        collector.get_distant_attr("policy.nothing")
    yield next(batches).shape  # it goes on after the error


@pytest.mark.parametrize(
    "name",
    ["MultiAsyncCollector", pytest.param("AsyncCollector", marks=pytest.mark.slow)],
)
def test_batches_of_each_worker_are_equal(name: str) -> None:
    """How many batches there are of each worker is a matter of time: those that both have are
    compared.
    """
    one = name == "AsyncCollector"
    factories = [partial(workers.weighted, float(worker)) for worker in range(2)]
    found = []
    for source in SOURCES:
        given: dict[str, Any] = (
            {"envs": ENVS[0], "policy_factory": factories[0]}
            if one
            else {"policy_factory": factories}
        )
        collector = made(source, name, total_frames=50, max_frames_per_traj=3, **given)
        of_workers: dict[int, list[Any]] = {0: [], 1: []}
        frames = 0
        for batch in collector:
            frames += batch.numel()
            of_workers[int(batch["weight"][0])].append(batch.exclude(IDS))
        collector.shutdown()
        assert frames == 56
        found.append(of_workers)
    for worker in range(2):
        pairs = list(zip(found[0][worker], found[1][worker], strict=False))
        assert pairs or worker == one
        for theirs, mine in pairs:
            assert_equal(mine, theirs)


@pytest.mark.parametrize("extend", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_workers_fill_a_shared_replay_buffer(extend: bool) -> None:
    def program(source: Any) -> Any:
        buffer = ReplayBuffer(storage=LazyTensorStorage(64), batch_size=4, shared=True)
        options: dict[str, Any] = {
            "policy": workers.ones,
            "replay_buffer": buffer,
            "extend_buffer": extend,
        }
        collector = made(source, total_frames=16, init_random_frames=0, **options)
        try:
            assert list(collector) == [None, None]
        finally:
            collector.shutdown()
        stored = buffer[:].exclude(IDS, "index")
        return (
            buffer.write_count,
            stored["observation"].flatten().sort().values,
            sorted(map(str, stored.keys(True, True))),
        )

    both(program)


@pytest.mark.slow
def test_the_last_row_is_marked_in_workers() -> None:
    """TorchRL's workers raise where a batch of a device is marked as truncated."""
    collector = made(
        muster.compat.torchrl.collectors,
        set_truncated=True,
        max_frames_per_traj=9,
        device="cpu",
    )
    try:
        for batch in collector:
            assert batch["next", "truncated"][..., -1, 0].all()
            assert not batch["truncated"].any()
    finally:
        collector.shutdown()


@pytest.mark.slow
def test_the_slower_worker_is_cut_short() -> None:
    collector = made(
        muster.compat.torchrl.collectors, preemptive_threshold=0.5, frames_per_batch=16
    )
    try:
        for batch in collector:
            assert batch.shape == (2, 8)
            mask = batch["collector", "mask"]
            assert (mask == (batch[IDS] >= 0)).all()
            assert (mask.long().diff(dim=-1) <= 0).all(), "valid rows come first"
            assert mask.any(-1).all()
    finally:
        collector.shutdown()


FORGOTTEN = """
    from muster.compat.torchrl.collectors import MultiSyncCollector
    from tests.parity.torchrl_workers import ENVS, Weighted

    if __name__ == "__main__":
        collector = MultiSyncCollector(ENVS, Weighted(), frames_per_batch=8)
        print("collected", next(iter(collector)).numel(), flush=True)
"""


@pytest.mark.slow
def test_a_program_ends_that_does_not_shut_down(tmp_path: Any) -> None:
    """TorchRL's waits for its workers, which wait for it."""
    (tmp_path / "forgotten.py").write_text(textwrap.dedent(FORGOTTEN))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(tmp_path / "forgotten.py")],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert (done.returncode, done.stdout.split()[:2]) == (0, ["collected", "8"]), (
        done.stderr
    )


# --- arguments ------------------------------------------------------------------------------------


WRONG: dict[str, Callable[[Any], Any]] = {
    "a policy that cannot be wrapped": lambda m: made(m, policy=workers.NotWrapped()),
    "an environment that is not made": lambda m: made(m, envs=[workers.broken] * 2),
    "frames for other workers": lambda m: made(m, frames_per_batch=[4, 4, 4]),
    "devices for other workers": lambda m: made(m, device=["cpu"]),
    "keywords for other workers": lambda m: made(m, create_env_kwargs=[{}]),
    "an unknown way to concatenate": lambda m: made(
        m, "MultiAsyncCollector", envs=ENVS[:1], cat_results=0
    ),
    "a format of no trajectories": lambda m: made(m, traj_format="cat"),
    "an impossible threshold": lambda m: made(m, preemptive_threshold=2.0),
    "schemes and an updater": lambda m: made(
        m, weight_sync_schemes={}, weight_updater=m.VanillaWeightUpdater
    ),
    "an unknown keyword": lambda m: made(m, nothing=1),
    "a backend without collectors": lambda m: m.Collector(
        ENVS[0], backend="threading", frames_per_batch=8
    ),
    "an unknown backend": lambda m: m.Collector(
        ENVS[0], backend="nothing", frames_per_batch=8
    ),
    "no collectors": lambda m: m.Collector(
        ENVS[0], num_collectors=0, frames_per_batch=8
    ),
    "half a collector": lambda m: m.Collector(
        ENVS[0], num_collectors=0.5, frames_per_batch=8
    ),
    "several directly": lambda m: m.Collector(
        ENVS[0], backend="direct", num_collectors=2, frames_per_batch=8
    ),
    "other collectors than environments": lambda m: m.Collector(
        ENVS, num_collectors=3, frames_per_batch=8
    ),
    "sync directly": lambda m: m.Collector(ENVS[0], sync=True, frames_per_batch=8),
    "sync that is none": lambda m: m.Collector(
        ENVS[0], num_collectors=2, sync=1, frames_per_batch=8
    ),
    "an option twice": lambda m: m.Collector(
        ENVS[0],
        num_collectors=2,
        frames_per_batch=8,
        backend_options={"frames_per_batch": 4},
    ),
    "a reserved option": lambda m: m.Collector(
        ENVS[0],
        num_collectors=2,
        frames_per_batch=8,
        backend_options={"num_workers": 4},
    ),
    "no environments": lambda m: m.Collector([], backend="process", frames_per_batch=8),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_raise_the_same_type(name: str) -> None:
    def program(source: Any) -> Any:
        with pytest.raises(Exception) as caught:  # noqa: PT011 (of TorchRL's type, whatever that is)
            WRONG[name](source)
        return caught.type.__name__

    both(program)


def test_a_collector_chooses_its_class_by_arguments() -> None:
    def program(source: Any) -> Any:
        options: dict[str, Any] = {
            "total_frames": 16,
            "split_trajs": False,
            "exploration_type": None,
        }
        collector = source.Collector(
            workers.counting,
            Weighted(),
            frames_per_batch=8,
            num_collectors=2,
            sync=True,
            backend_options={},
            **options,
        )
        try:
            assert type(collector) is source.MultiSyncCollector
            assert isinstance(collector, source.MultiCollector)
            return [batch.exclude(IDS) for batch in collector]
        finally:
            collector.shutdown()

    both(program)


@pytest.mark.slow
def test_sync_chooses_a_class() -> None:
    ours = muster.compat.torchrl.collectors
    with pytest.raises(ValueError, match="one value per worker"):
        ours.MultiCollector(ENVS, sync=True, frames_per_batch=[1])
    for sync, cls in (
        (True, ours.MultiSyncCollector),
        (False, ours.MultiAsyncCollector),
    ):
        collector = ours.MultiCollector(
            ENVS[:1], Weighted(), sync=sync, frames_per_batch=8
        )
        collector.shutdown()
        assert type(collector) is cls


@pytest.mark.parametrize(
    "name", ["SharedMemWeightSyncScheme", "MultiProcessWeightSyncScheme"]
)
def test_our_weight_sync_schemes_change_weights_between_batches(name: str) -> None:
    scheme = getattr(weight_update, name)()
    collector = made(
        muster.compat.torchrl.collectors,
        policy=Weighted(1.0),
        weight_sync_schemes={"policy": scheme},
        total_frames=-1,
    )
    try:
        batches, got = iter(collector), []
        for value in (2.0, 3.0):
            got += next(batches)["weight"].unique().tolist()
            collector.update_policy_weights_(Weighted(value))
        assert [*got, *next(batches)["weight"].unique().tolist()] == [1.0, 2.0, 3.0]
    finally:
        collector.shutdown()


@pytest.mark.parametrize("ours", [False, True])
def test_weights_of_each_worker(ours: bool) -> None:
    source = SOURCES[ours]
    schemes = weight_update if ours else torchrl.weight_update
    scheme = schemes.SharedMemWeightSyncScheme(per_worker_weights=True)
    factories = [partial(workers.weighted, float(worker)) for worker in range(2)]
    collector = made(
        source,
        policy_factory=factories,
        weight_sync_schemes={"policy": scheme},
        total_frames=-1,
    )
    try:
        batches = iter(collector)
        found = [[part.unique().item() for part in next(batches)["weight"]]]
        for new in ({0: 5.0}, {0: 6.0, 1: 7.0}):
            collector.update_policy_weights_(
                {k: TensorDict.from_module(Weighted(v)).data for k, v in new.items()}
            )
            found.append([part.unique().item() for part in next(batches)["weight"]])
    finally:
        collector.shutdown()
    assert found == [[0.0, 1.0], [5.0, 1.0], [6.0, 7.0]]


# --- weights in every form ------------------------------------------------------------------------


def tensors(policy: Any) -> Any:
    return TensorDict.from_module(policy).data


FORMS: dict[str, Callable[[Any], Any]] = {
    "module": lambda new: new,
    "module inside": lambda new: new.inner,
    "state dict": lambda new: new.state_dict(),
    "state dict of the module inside": lambda new: new.inner.state_dict(),
    "TensorDict": tensors,
    "TensorDict of parameters": TensorDict.from_module,
    "nested dict": lambda new: tensors(new).to_dict(),
    "nested dict of the module inside": lambda new: tensors(new.inner).to_dict(),
    "dict by paths": lambda new: dict(tensors(new).items(True, True)),
    "arrays": lambda new: {
        name: tensor.numpy() for name, tensor in new.state_dict().items()
    },
}
SCHEMES: dict[str, Callable[[], dict[str, Any]]] = {
    "default": dict,
    **{
        f"{package} {name}": lambda schemes=schemes, name=name: {  # type: ignore[misc]
            "weight_sync_schemes": {"policy": getattr(schemes, name)()}
        }
        for package, schemes in (
            ("torchrl", torchrl.weight_update),
            ("muster", weight_update),
        )
        for name in ("SharedMemWeightSyncScheme", "MultiProcessWeightSyncScheme")
    },
}
WAYS: dict[str, Callable[[Any, Any], None]] = {
    "positional": lambda c, new: c.update_policy_weights_(new),
    "keyword": lambda c, new: c.update_policy_weights_(
        **{"policy" if isinstance(new, torch.nn.Module) else "weights": new}
    ),
    "by model": lambda c, new: c.update_policy_weights_(weights_dict={"policy": new}),
    "model_id": lambda c, new: c.update_policy_weights_(new, model_id="policy"),
    "received": lambda c, new: c.receive_weights(new),
    "received keyword": lambda c, new: c.receive_weights(
        **{"policy" if isinstance(new, torch.nn.Module) else "weights": new}
    ),
}


def acted(batches: Iterator[Any]) -> tuple[float, float]:
    """With which weights, and with which buffer that is not saved."""
    batch = next(batches)
    (weight,), (fixed,) = (
        batch["weight"].unique().tolist(),
        batch["fixed"].unique().tolist(),
    )
    return weight, fixed


@pytest.mark.parametrize(
    "scheme",
    [
        name if name == "default" else pytest.param(name, marks=pytest.mark.slow)
        for name in SCHEMES
    ],
)
def test_weights_come_to_workers_in_any_form(scheme: str) -> None:
    """As to ``Collector``.

    TorchRL takes modules and TensorDicts, and nothing by keyword in ``receive_weights``.
    """
    options = {
        "policy": workers.Deep(0.0),
        "total_frames": -1,
        "track_policy_version": True,
        **SCHEMES[scheme](),
    }
    collector = made(muster.compat.torchrl.collectors, **options)
    try:
        batches, value, before = iter(collector), 0.0, 0.5
        assert acted(batches) == (value, before)
        for way, publish in WAYS.items():
            for form, given in FORMS.items():
                value += 1.0
                publish(collector, given(workers.Deep(value)))
                weight, fixed = acted(batches)
                assert weight == value, (way, form)
                assert fixed in (before, value + 0.5), (way, form)
                before = fixed
        assert next(batches)["policy_version"].unique().tolist() == [
            len(WAYS) * len(FORMS)
        ]
    finally:
        collector.shutdown()


WRONG_WEIGHTS: dict[str, Callable[[], Any]] = {
    "nothing": dict,
    "a name is missing": lambda: {"inner": {"0": {"weight": torch.ones(2, 2)}}},
    "an unknown name": lambda: {
        **workers.Deep(1.0).state_dict(),
        "other": torch.ones(1),
    },
    "another shape": lambda: {
        **workers.Deep(1.0).state_dict(),
        "inner.0.bias": torch.ones(3),
    },
    "another dtype": lambda: {
        **workers.Deep(1.0).state_dict(),
        "inner.0.bias": torch.ones(2, dtype=torch.float64),
    },
    "not finite": lambda: {
        **workers.Deep(1.0).state_dict(),
        "inner.0.bias": torch.full((2,), torch.nan),
    },
    "a module of another kind": lambda: torch.nn.Linear(3, 3),
    "a number": lambda: 3,
    "no tensors": lambda: {"inner.0.bias": "ones"},
}


@pytest.mark.parametrize(
    "scheme",
    [
        name if name == "default" else pytest.param(name, marks=pytest.mark.slow)
        for name in SCHEMES
    ],
)
def test_weights_that_do_not_fit_change_nothing_in_workers(scheme: str) -> None:
    """TorchRL takes some of them, and waits for ever after others."""
    policy = workers.Deep(0.0)
    options = {"policy": policy, "total_frames": -1, **SCHEMES[scheme]()}
    collector = made(muster.compat.torchrl.collectors, **options)
    try:
        batches = iter(collector)
        for name, give in WRONG_WEIGHTS.items():
            for way in ("positional", "by model", "received"):
                with pytest.raises(BadWeights):
                    WAYS[way](collector, give())
                assert acted(batches) == (0.0, 0.5), (name, way)
        for way in (
            lambda: collector.update_policy_weights_(
                weights_dict={"policy": tensors(policy), "critic": policy}
            ),
        ):
            with pytest.raises(KeyError, match="critic"):
                way()
        with pytest.raises(ValueError, match="policy_or_weights"):
            collector.update_policy_weights_(policy, weights=tensors(policy))
        with pytest.raises(ValueError, match="more than once"):
            collector.receive_weights(policy, weights=tensors(policy))
        with torch.no_grad():
            policy.inner[0].bias.fill_(torch.inf)
        with pytest.raises(BadWeights, match="not finite"):
            collector.update_policy_weights_()
    finally:
        collector.shutdown()


@pytest.mark.parametrize("ours", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_weights_of_each_worker_in_any_form(ours: bool) -> None:
    schemes = weight_update if ours else torchrl.weight_update
    factories = [partial(workers.Deep, float(worker)) for worker in range(2)]
    scheme = schemes.SharedMemWeightSyncScheme(per_worker_weights=True)
    options: dict[str, Any] = {
        "policy_factory": factories,
        "weight_sync_schemes": {"policy": scheme},
    }
    collector = made(muster.compat.torchrl.collectors, total_frames=-1, **options)
    try:
        batches, expected = iter(collector), [0.0, 1.0]
        for number, give in enumerate(FORMS.values()):
            expected[number % 2] = 2.0 + number
            collector.update_policy_weights_(
                {number % 2: give(workers.Deep(2.0 + number))}
            )
            assert [
                part.unique().item() for part in next(batches)["weight"]
            ] == expected
        with pytest.raises(BadWeights, match=r"shape \(3,\)"):
            collector.update_policy_weights_({1: WRONG_WEIGHTS["another shape"]()})
        assert [part.unique().item() for part in next(batches)["weight"]] == expected
    finally:
        collector.shutdown()


def test_torchrls_scheme_with_messages_has_the_same_weights_for_all() -> None:
    """With weights by worker its receiving threads fail, and TorchRL waits for ever."""
    scheme = torchrl.weight_update.MultiProcessWeightSyncScheme()
    collector = made(
        muster.compat.torchrl.collectors, weight_sync_schemes={"policy": scheme}
    )
    try:
        with pytest.raises(BadOption, match="SharedMemWeightSyncScheme"):
            collector.update_policy_weights_({0: tensors(Weighted(1.0))})
    finally:
        collector.shutdown()


class Two(Weighted):
    """Has a module that is a model of its own."""

    def __init__(self, value: float) -> None:
        super().__init__(value)
        self.critic = torch.nn.Linear(1, 1)


NO_NEWS: dict[str, Callable[[], dict[str, Any]]] = {
    "muster's": lambda: {"policy": weight_update.NoWeightSyncScheme()},
    "muster's by name": lambda: {
        "policy": weight_update.WeightSyncScheme.from_backend("direct")
    },
    "torchrl's": lambda: {"policy": torchrl.weight_update.NoWeightSyncScheme()},
}


@pytest.mark.parametrize("name", NO_NEWS)
def test_workers_keep_their_first_weights(name: str) -> None:
    """In TorchRL they die: the policy is sent without weights."""
    policy = workers.Deep(2.0)
    options = {
        "policy": policy,
        "weight_sync_schemes": NO_NEWS[name](),
        "total_frames": -1,
    }
    collector = made(muster.compat.torchrl.collectors, **options)
    try:
        batches = iter(collector)
        assert acted(batches) == (2.0, 2.5)
        collector.update_policy_weights_(workers.Deep(3.0))
        with torch.no_grad():
            policy.inner[0].bias.fill_(3.0)
        collector.update_policy_weights_()
        assert acted(batches) == (2.0, 2.5)
    finally:
        collector.shutdown()


def test_a_scheme_for_another_model_leaves_the_policy_its_weights() -> None:
    """In TorchRL the workers die."""
    scheme = torchrl.weight_update.SharedMemWeightSyncScheme()
    options: dict[str, Any] = {
        "policy": Two(2.0),
        "weight_sync_schemes": {"policy.critic": scheme},
    }
    collector = made(muster.compat.torchrl.collectors, total_frames=-1, **options)
    try:
        batches = iter(collector)
        assert next(batches)["weight"].unique().tolist() == [2.0]
        collector.update_policy_weights_(tensors(Two(3.0)))
        assert next(batches)["weight"].unique().tolist() == [3.0]
    finally:
        collector.shutdown()


def test_an_updater_of_this_package_takes_every_form() -> None:
    """The program of TorchRL's documentation, with more forms."""
    policy = workers.Deep(0.0)
    updater = partial(
        muster.compat.torchrl.collectors.VanillaWeightUpdater,
        policy_weights=TensorDict.from_module(policy).lock_(),
    )
    collector = made(
        muster.compat.torchrl.collectors,
        policy=policy,
        weight_updater=updater,
        total_frames=-1,
    )
    try:
        batches = iter(collector)
        for number, form in enumerate(
            ("TensorDict", "TensorDict of parameters", "nested dict", "dict by paths")
        ):
            collector.update_policy_weights_(FORMS[form](workers.Deep(1.0 + number)))
            assert acted(batches) == (1.0 + number, 1.5 + number)
    finally:
        collector.shutdown()


@pytest.mark.parametrize(
    "backend", ["thread", pytest.param("process", marks=pytest.mark.slow)]
)
def test_evaluations_are_equal(backend: str) -> None:
    def program(source: Any) -> Any:
        evaluator = source.Evaluator(
            workers.counting,
            policy_factory=workers.acting,
            num_trajectories=2,
            max_steps=6,
            backend=backend,
        )
        try:
            found = evaluator.evaluate(step=1)
        finally:
            evaluator.shutdown()
        return {
            name: value
            for name, value in found.items()
            if "fps" not in name and "time" not in name
        }

    both(program)


# --- names ----------------------------------------------------------------------------------------

NAMES = [
    *(
        "collectors",
        "collectors.utils",
        "collectors.weight_update",
        "collectors.distributed",
    ),
    *(
        "collectors.distributed.default_configs",
        "collectors.distributed.ray",
        "weight_update",
    ),
]


@pytest.mark.parametrize("path", NAMES)
def test_every_name_is_there_by_torchrls_path(path: str) -> None:
    theirs, ours = (
        importlib.import_module(f"{root}.{path}")
        for root in ("torchrl", "muster.compat.torchrl")
    )
    public = {name for name in vars(theirs) if name[0].isupper()}
    found = {
        "collectors.utils": {"split_trajectories"},
        "collectors.weight_update": {
            name for name in public if name.endswith(("Updater", "UpdaterBase"))
        },
        "collectors.distributed.default_configs": {
            name for name in public if name.isupper()
        },
        "collectors.distributed.ray": {
            "DEFAULT_RAY_INIT_CONFIG",
            "DEFAULT_REMOTE_CLASS_CONFIG",
            "RayCollector",
        },
    }
    names = found.get(path) or {*theirs.__all__}
    assert {name for name in names if not hasattr(ours, name)} == set()
    assert all(hasattr(ours, name) for name in ours.__all__)


def test_the_package_has_the_names_of_collectors() -> None:
    assert set(muster.compat.torchrl.__all__) == set(torchrl.collectors.__all__)
    for name in muster.compat.torchrl.__all__:
        assert getattr(muster.compat.torchrl, name) is getattr(
            muster.compat.torchrl.collectors, name
        )
