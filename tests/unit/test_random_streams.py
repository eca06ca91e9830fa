"""Random streams belong to the collector's groups; the user's are never touched."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import muster
from muster import Collector, Execution, MultiSyncCollector
from muster.errors import MusterError
from muster.restore.action_log import generator_of
from muster.restore.checkpoint import load, save
from muster.rng import GroupRng, global_streams
from muster.testing import CountingEnv, FaultyEnv
from muster.utils.private_names import VARIABLE
from tests.tools import assert_same, collect, counting


class GlobalEnv(CountingEnv):
    """Draws its third observation from one of the global generators."""

    def __init__(self, draw: Callable[[], float], length: int = 4) -> None:
        super().__init__(length, noise=True)
        self._draw = draw

    def _observe(self) -> Any:
        return np.array([self.length, self.t, self._draw()], np.float32)


GLOBALS: dict[str, Callable[[], float]] = {
    "numpy": np.random.random,
    "numpy_normal": np.random.randn,
    "python": random.random,
    "python_normal": lambda: random.gauss(0, 1),
    "torch": lambda: float(torch.rand(())),
    "torch_normal": lambda: float(torch.randn(())),
    "torch_normal_double": lambda: float(torch.randn((), dtype=torch.float64)),
}


def sampled(obs: torch.Tensor) -> Any:
    distribution = torch.distributions.Categorical(
        logits=torch.zeros(*obs.shape[:-1], 2)
    )
    action = distribution.sample()
    return action, {
        "noise": torch.randn(obs.shape[:-1]),
        "python": torch.full(obs.shape[:-1], random.random()),
    }


def head() -> Any:
    net = torch.nn.Linear(3, 2)
    for parameter in net.parameters():
        torch.nn.init.zeros_(parameter)
    return muster.policies.categorical(net)


POLICIES = {"random": lambda: None, "function": lambda: sampled, "head": head}


def user_draws() -> list[Any]:
    return [
        torch.rand(2).tolist(),
        torch.randn(1).tolist(),
        np.random.random(2).tolist(),
        np.random.randn(),
        random.random(),
        random.gauss(0, 1),
    ]


def user_seeds() -> None:
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)


# --- the user's generators ------------------------------------------------------------------------


def use_nothing() -> None:
    pass


def use_construction() -> None:
    Collector(
        counting(noise=True), head(), frames_per_batch=4, num_envs=2, seed=0
    ).shutdown()


def use_collecting(policy: Any = None, seed: int | None = None) -> None:
    collect(
        lambda: GlobalEnv(np.random.random),
        policy,
        frames_per_batch=10,
        num_envs=2,
        seed=seed,
        batches=2,
    )


def use_atari_like_ids() -> None:
    collect("CartPole-v1", frames_per_batch=10, num_envs=2)


def use_error_in_env() -> None:
    with pytest.raises(MusterError):
        collect(lambda: FaultyEnv(3, error=ValueError), sampled, frames_per_batch=10)


def use_error_in_policy() -> None:
    def policy(obs: torch.Tensor) -> Any:
        torch.rand(3)
        raise ValueError

    with Collector(counting(), policy, frames_per_batch=10) as collector:
        for _ in range(2):
            with pytest.raises(MusterError):
                collector.rollout()


USES = {
    "construction": use_construction,
    "random": use_collecting,
    "function": lambda: use_collecting(sampled),
    "head_seeded": lambda: use_collecting(head(), 3),
    "env_id": use_atari_like_ids,
    "error_in_env": use_error_in_env,
    "error_in_policy": use_error_in_policy,
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("already", [0, 1])
def test_the_users_generators_are_untouched(use, already):
    """``already``: an odd number of normal draws leaves a second number waiting in NumPy's and
    Python's generators.
    """
    drawn = []
    for action in (use_nothing, USES[use]):
        user_seeds()
        for _ in range(already):
            np.random.randn(), random.gauss(0, 1)
        if use in ("construction", "head_seeded") and action is use_nothing:
            head()  # making a network draws from torch's generator
        action()
        drawn.append(user_draws())
    assert drawn[0] == drawn[1]


# --- seeds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("source", GLOBALS)
def test_the_same_seed_gives_the_same_data_and_another_seed_gives_others(
    policy, source
):
    def data(seed: int) -> Any:
        return collect(
            lambda: GlobalEnv(GLOBALS[source]),
            POLICIES[policy](),
            num_envs=2,
            frames_per_batch=40,
            seed=seed,
            batches=2,
        )

    first = data(3)
    assert_same(first, data(3))
    other = data(4)
    assert not torch.equal(first["action"], other["action"])
    assert not torch.equal(first["observation"][..., 2], other["observation"][..., 2])


def test_without_a_seed_every_collection_is_another():
    first, second = (collect(counting(), frames_per_batch=64) for _ in range(2))
    assert not torch.equal(first["action"], second["action"])


@pytest.mark.parametrize("source", GLOBALS)
def test_global_draws_do_not_depend_on_where_batches_begin(source):
    def data(T: int) -> Any:
        return collect(
            lambda: GlobalEnv(GLOBALS[source]),
            sampled,
            frames_per_batch=T,
            batches=42 // T,
            seed=0,
        )

    assert_same(data(42), data(3))
    assert_same(data(42), data(1))


# --- GroupRng -------------------------------------------------------------------------------------


def test_streams_are_independent_of_each_other_and_of_their_order():
    forward, backward = GroupRng(0), GroupRng(0)
    a = [forward.stream(n).random() for n in range(4)]
    b = [backward.stream(n).random() for n in reversed(range(4))][::-1]
    assert a == b
    assert len(set(a)) == 4
    assert forward.stream(0).random() == backward.stream(0).random()


def test_the_groups_generators_are_the_global_ones_only_inside():
    user_seeds()
    expected = user_draws()
    rng = GroupRng(0)
    user_seeds()
    with rng.as_global():
        first = user_draws()
    assert user_draws() == expected
    with rng.as_global():
        assert user_draws() != first, "the group's streams go on"
    with pytest.raises(KeyError), GroupRng(0).as_global():
        assert user_draws() == first
        raise KeyError


def test_the_public_way_to_exchange_pythons_generator_gives_the_same_numbers(
    monkeypatch,
):
    def drawn() -> list[Any]:
        rng = GroupRng(0)
        random.seed(1)
        random.gauss(0, 1)  # leaves a second number in hand
        return [
            *all_draws(rng),
            random.gauss(0, 1),
            random.random(),
            *all_draws(rng),
            random.random(),
        ]

    assert muster.rng._user_python._memory is not None, "or both are the public way"
    private = drawn()
    monkeypatch.setenv(VARIABLE, "never")
    monkeypatch.setattr(
        muster.rng,
        "_user_python",
        muster.rng._PythonStream(muster.rng._user_python.generator),
    )
    assert drawn() == private


def all_draws(rng: GroupRng) -> list[Any]:
    with rng.as_global():
        drawn = user_draws()
    return [
        *drawn,
        rng.numpy.random(),
        rng.numpy.integers(9, dtype=np.int32),
        *(rng.stream(n).random() for n in range(3)),
    ]


@pytest.mark.parametrize("draws", range(4))
@pytest.mark.parametrize(
    "device", [None, *(["cuda"] if torch.cuda.is_available() else [])]
)
def test_a_saved_group_goes_on_with_the_very_same_numbers(draws, device, tmp_path):
    """One draw leaves a second normal number, and half of a 64-bit one, waiting in several
    generators.
    """
    cuda = device and torch.device(device)
    rng, other = GroupRng(3, 1, cuda), GroupRng(None, 0, cuda)
    handed_out, unused = other.stream(0), other.stream(7)
    other.stream(1).random()
    for _ in range(draws):
        with rng.as_global():
            np.random.randn(), random.gauss(0, 1), torch.randn(1, device=device)
        rng.numpy.integers(9, dtype=np.int32)
        rng.stream(0).random()
    save(tmp_path / "rng", rng.state_dict())
    all_draws(other)
    other.load_state_dict(load(tmp_path / "rng"))
    assert [all_draws(other) for _ in range(3)] == [all_draws(rng) for _ in range(3)]
    assert other.stream(0) is handed_out
    assert unused.random() == rng.stream(7).random(), (
        "streams that the saved group had not begun begin"
    )
    assert other.stream(9).random() == rng.stream(9).random()
    if device:
        with other.as_global():
            drawn = torch.rand(3, device=device)
        with rng.as_global():
            assert torch.equal(drawn, torch.rand(3, device=device))


@pytest.mark.parametrize("name", ["numpy", "legacy"])
@pytest.mark.parametrize("word", [0.5, 1e308, float("nan")])
def test_states_with_numbers_that_are_no_integers_are_refused(name, word):
    """NumPy casts them, with a warning at most."""
    state = GroupRng(3).state_dict()
    words = state[name]["state"]
    key = "state" if name == "numpy" else "key"
    words[key] = words[key].astype(float)
    words[key][0] = word
    with pytest.raises(ValueError, match="not integers"):
        GroupRng(3).load_state_dict(state)
    with pytest.raises(ValueError, match="not integers"):
        generator_of(state[name])


def test_without_streams_of_its_own_a_collector_draws_from_the_users():
    def draw(obs: torch.Tensor) -> torch.Tensor:
        return torch.randint(2, ())

    def collected(seed: int, own_rng: bool) -> tuple[list[int], float]:
        torch.manual_seed(seed)
        with Collector(
            CountingEnv,
            draw,
            frames_per_batch=16,
            seed=0,
            execution=Execution(own_rng=own_rng),
        ) as collector:
            return collector.rollout()["action"].tolist(), torch.rand(()).item()

    assert collected(1, own_rng=False) == collected(1, own_rng=False)
    assert collected(1, own_rng=False)[0] != collected(2, own_rng=False)[0]
    assert collected(1, own_rng=True)[0] == collected(2, own_rng=True)[0]
    torch.manual_seed(1)
    untouched = torch.rand(()).item()
    assert collected(1, own_rng=True)[1] == untouched != collected(1, own_rng=False)[1]


# --- threads --------------------------------------------------------------------------------------

NAMES = {
    "numpy": "numpy.random",
    "numpy_normal": "numpy.random",
    "python": "random",
    "python_normal": "random",
    "torch_normal": "torch",
    "torch_normal_double": "torch",
}


@pytest.mark.parametrize("name", GLOBALS)
def test_an_environment_in_a_thread_that_draws_from_a_global_generator_is_warned_of_once(
    name,
):
    factories = [lambda: GlobalEnv(GLOBALS[name])] * 2
    with MultiSyncCollector(
        factories, sampled, frames_per_batch=40, seed=0, backend="threads"
    ) as collector:
        with pytest.warns(UserWarning, match="moved while threads collected") as caught:
            collector.next()
        assert f"generators of {NAMES.get(name, name)} moved" in str(caught[0].message)
        assert "self.np_random" in str(caught[0].message)
        assert len(caught) == 1
        collector.next()  # a second warning would be an error here


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_in_threads_leaves_the_users_generators_where_they_are(name):
    policy, before = POLICIES[name](), global_streams()
    options = {"frames_per_batch": 40, "seed": 0, "backend": "threads"}
    with MultiSyncCollector(
        [counting(4, noise=True)] * 2, policy, **options
    ) as collector:
        for _ in range(3):
            collector.next()  # a warning would be an error
    assert global_streams() == before


def test_what_the_user_draws_between_batches_and_beside_a_collector_is_not_warned_of():
    options = {"frames_per_batch": 40, "seed": 0, "backend": "threads"}
    with MultiSyncCollector([counting(4)] * 2, sampled, **options) as collector:
        for _ in range(3):
            collector.next()
            user_draws()
    began, drawn = threading.Event(), threading.Event()

    class Waits(CountingEnv):
        def step(self, action: int) -> Any:
            began.set()
            drawn.wait(30)
            return super().step(action)

    class Buffer(list):
        pass

    options |= {"replay_buffer": Buffer(), "total_frames": 40}
    with MultiSyncCollector([Waits] * 2, sampled, **options) as collector:
        collector.start()
        assert began.wait(30)
        user_draws()
        drawn.set()
        collector.async_shutdown()
        assert collector.stats().frames == 40


# --- between two steps ----------------------------------------------------------------------------

BETWEEN: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "rand": lambda: torch.rand(3).tolist(),
    "randn": lambda: torch.randn(1).tolist(),
    "randn_double": lambda: torch.randn(1, dtype=torch.float64).tolist(),
    "permutation": lambda: torch.randperm(700).tolist(),
    "seed": lambda: torch.manual_seed(5).initial_seed(),
    "state": lambda: torch.set_rng_state(torch.Generator().manual_seed(9).get_state()),
    "numpy": lambda: np.random.randn(),
    "python": lambda: random.gauss(0, 1),
}


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("drawn", ["torch", "torch_normal", "torch_normal_double"])
def test_neither_sees_what_the_other_draws_between_two_steps(between, drawn):
    """The states of generators are read only if they have changed; see ``muster.rng``."""
    use = BETWEEN[between]

    def steps(draws: Callable[[], Any]) -> tuple[list[Any], list[Any]]:
        user_seeds()
        users = []
        observed = []
        with Collector(
            lambda: GlobalEnv(GLOBALS[drawn]), sampled, frames_per_batch=1, seed=0
        ) as collector:
            user_seeds()
            for _, batch in zip(range(6), collector, strict=False):
                observed.append(batch["next", "observation"].tolist())
                users.append(draws())
            users.append(user_draws())
        return observed, users

    mine, users = steps(use)
    undisturbed, _ = steps(lambda: None)
    assert mine == undisturbed
    user_seeds()
    assert users == [*(use() for _ in range(6)), user_draws()]
