"""Publishing weights: what counts as weights, what fits, that it is all or nothing, and what
workers get of it.
"""

from __future__ import annotations

import copy
import functools
import pickle
import threading
from types import SimpleNamespace
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictParams
from torch import nn

from muster.errors import BadOption, BadWeights
from muster.policies import tanh_gaussian
from muster.testing import CountingEnv
from muster.weights import NoSync, SharedMemory, VanillaWeightUpdater, WeightUpdaterBase
from muster.weights.choice import transport_for
from muster.weights.names import copy_tensor, modules_of, named_tensors, named_weights
from muster.weights.publish import PolicyWeights
from muster.weights.receive import Receivers
from tests.fakes.actors import Two
from tests.tools import stable


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def filled(value: float) -> nn.Sequential:
    module = net()
    for tensor in module.state_dict().values():
        tensor.fill_(value)
    return module


FORMS = {
    "module": lambda m: m,
    "state_dict": lambda m: m.state_dict(),
    "named_tensors": lambda m: {
        **dict(m.named_parameters()),
        **dict(m.named_buffers()),
    },
    "tensordict": lambda m: TensorDict.from_module(m),
    "tensordict_params": lambda m: TensorDictParams(TensorDict.from_module(m)),
    "nested_tensordict": lambda m: TensorDict.from_module(m).detach().clone(),
    "nested_dict": lambda m: TensorDict.from_module(m).data.to_dict(),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_the_names_of_the_state_dict(form):
    module = filled(2.0)
    named = named_weights(FORMS[form](module))
    assert named.keys() == module.state_dict().keys()
    assert all(bool((tensor == 2).all()) for tensor in named.values())
    assert not any(tensor.requires_grad for tensor in named.values())


@pytest.mark.parametrize("form", FORMS)
def test_parameters_and_buffers_are_copied_in_place(form):
    policy, source = net(), filled(2.0)
    pointers = {name: tensor.data_ptr() for name, tensor in policy.state_dict().items()}
    weights = PolicyWeights(policy)
    assert weights.publish(FORMS[form](source)) == 1
    state = policy.state_dict()
    assert all(bool((tensor == 2).all()) for tensor in state.values())
    assert {name: tensor.data_ptr() for name, tensor in state.items()} == pointers
    source[0].weight.data.fill_(9.0)
    assert bool((policy[0].weight == 2).all())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("2.bias"), r"missing \['2.bias'\], unknown nothing"),
        (
            lambda s: s.update(extra=torch.ones(1)),
            r"missing nothing, unknown \['extra'\]",
        ),
        (
            lambda s: s.update({"2.bias": torch.ones(2)}),
            r"2.bias has shape \(2,\).*expected \(1,\)",
        ),
        (
            lambda s: s.update({"2.bias": torch.ones(1).double()}),
            "2.bias .* torch.float64, expected .* torch.float32",
        ),
        (
            lambda s: s.update({"1.num_batches_tracked": torch.tensor(1.0)}),
            "num_batches_tracked .* torch.int64",
        ),
        (lambda s: s["2.bias"].fill_(torch.nan), "2.bias is not finite"),
        (lambda s: s["1.running_var"].fill_(torch.inf), "1.running_var is not finite"),
    ],
)
def test_what_does_not_fit_changes_nothing(change, message):
    policy = net()
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    weights, state = PolicyWeights(policy), filled(2.0).state_dict()
    change(state)
    with pytest.raises(BadWeights, match=message):
        weights.publish(state)
    assert weights.version == 0
    assert all(
        torch.equal(tensor, before[name])
        for name, tensor in policy.state_dict().items()
    )


@pytest.mark.parametrize(
    "source", [3, "weights.pt", [torch.ones(1)], {"a": 1.0}, object()], ids=stable
)
def test_what_holds_no_weights(source):
    with pytest.raises(BadWeights, match="cannot take weights from"):
        PolicyWeights(net()).publish(source)


def test_the_network_of_a_tensordict_module_fits():
    policy = TensorDictModule(net(), in_keys=["observation"], out_keys=["action"])
    assert PolicyWeights(policy).publish(filled(2.0)) == 1
    assert bool((policy.module[0].weight == 2).all())


def reachable(module: nn.Module) -> list[Any]:
    class Agent:
        def __init__(self) -> None:
            self.net = module

        def act(self, obs: Any) -> Any:
            return self.net(obs)

        def __call__(self, obs: Any) -> Any:
            return self.net(obs)

    return [
        lambda obs: module(obs),
        Agent().act,
        Agent(),
        functools.partial(lambda m, obs: m(obs), module),
        functools.partial(Agent().act),
    ]


@pytest.mark.parametrize("kind", range(5))
def test_a_network_that_a_function_uses_is_recognised(kind):
    module = net()
    weights = PolicyWeights(reachable(module)[kind])
    assert weights.publish(module) == 1
    assert weights.publish(module[0]) == 2
    with pytest.raises(BadWeights, match="not a module"):
        weights.publish(net())
    module[0].weight.data[0] = torch.nan
    with pytest.raises(BadWeights, match="diverged"):
        weights.publish(module)
    assert weights.version == 2


def test_a_copy_on_another_device_follows_the_original():
    original, acting = net(), net()
    weights = PolicyWeights(acting, original)
    for tensor in original.state_dict().values():
        tensor.fill_(3.0)
    assert weights.publish() == 1
    assert bool((acting[0].weight == 3).all())


def test_nothing_to_publish_only_counts():
    assert PolicyWeights(None).publish() == 1
    assert PolicyWeights(nn.Tanh()).publish({}) == 1


def test_tied_weights_are_no_second_part():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = self.b = nn.Linear(2, 2)

    policy = Tied()
    assert PolicyWeights(policy).publish(nn.Linear(2, 2)) == 1


def test_a_model_of_the_original_is_the_same_part_of_the_copy():
    original = nn.ModuleDict({"actor": nn.Linear(2, 2), "critic": nn.Linear(2, 2)})
    acting = copy.deepcopy(original)
    weights = PolicyWeights(acting, original)
    nn.init.constant_(original["actor"].weight, 5.0)
    nn.init.constant_(original["critic"].weight, 6.0)
    weights.publish(original["critic"], model=original["critic"])
    assert bool((acting["critic"].weight == 6).all())
    assert not bool((acting["actor"].weight == 5).any())
    weights.publish(original["critic"])
    assert bool((acting["actor"].weight == 5).all())
    weights.publish(nn.Linear(2, 2), model=original["actor"])
    assert not bool((acting["actor"].weight == 5).any())
    with pytest.raises(
        BadWeights, match="fit several parts of the policy: actor, critic"
    ):
        weights.publish(nn.Linear(2, 2))


def test_a_compiled_module_has_the_names_of_the_module():
    module = filled(2.0)
    compiled = torch.compile(module)
    assert (
        named_weights(compiled).keys()
        == module.state_dict().keys()
        == named_tensors(compiled).keys()
    )


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.float8_e5m2],
)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_infinite_values_are_found_in_every_dtype(dtype, bad):
    policy = nn.Module()
    policy.register_buffer("w", torch.ones(300, dtype=dtype))
    weights = PolicyWeights(policy)
    new = torch.ones(300).to(dtype)
    weights.publish({"w": new})
    values = torch.ones(
        300, dtype=torch.complex64 if dtype.is_complex else torch.float32
    )
    values[77] = bad
    with pytest.raises(BadWeights, match="w is not finite"):
        weights.publish({"w": values.to(dtype)})
    assert weights.version == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_large_values_whose_sum_is_infinite_are_finite(dtype):
    policy = nn.Module()
    policy.register_buffer("w", torch.ones(300, dtype=dtype))
    assert (
        PolicyWeights(policy).publish(
            {"w": torch.full((300,), torch.finfo(dtype).max, dtype=dtype)}
        )
        == 1
    )


KINDS = {
    "few": lambda: torch.ones(3, 2),
    "one": lambda: torch.ones(()),
    "many": lambda: torch.ones(3, 9_001),
    "more than torch sums in one thread": lambda: torch.ones(300, 301),
    "not in C order": lambda: torch.ones(200, 3).t(),
    "parts of others": lambda: torch.ones(200, 30)[:, 4:9],
    "double": lambda: torch.ones(9_001, dtype=torch.float64),
    "half": lambda: torch.ones(70, dtype=torch.float16),
    "complex": lambda: torch.ones(70, dtype=torch.complex64),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("meanwhile", ["nothing", "replaced", "enlarged"])
def test_values_of_the_policy_itself_are_looked_at(kind, bad, meanwhile, recwarn):
    policy = nn.Module()
    policy.register_buffer("others", torch.ones(5))
    policy.w = nn.Parameter(KINDS[kind]())
    weights = PolicyWeights(policy)
    weights.publish()
    if meanwhile == "replaced":
        policy.w.data = policy.w.data.clone()
    elif meanwhile == "enlarged":  # in the same memory
        memory = torch.ones(2 * policy.w.numel(), dtype=policy.w.dtype)
        policy.w.data = memory[: policy.w.numel()]
        weights.publish()
        policy.w.data = memory
    weights.publish()
    published = weights.version
    for place in {0, policy.w.numel() // 2, policy.w.numel() - 1}:
        where = np.unravel_index(place, policy.w.shape)
        before = policy.w.data[where].clone()
        policy.w.data[where] = bad
        with pytest.raises(BadWeights, match="w is not finite"):
            weights.publish()
        policy.w.data[where] = before
    assert weights.publish() == published + 1
    assert not recwarn.list


# --- names on both sides --------------------------------------------------------------------------


class Agent:
    """Holds its networks in all sorts of places; acts with one of them."""

    def __init__(self) -> None:
        self.net = nn.Linear(2, 3)
        self.heads = {"a": nn.Linear(3, 1), "b": [nn.Linear(3, 2)]}
        self.same = self.net
        self.data = [nn.Linear(7, 7)] * 1000  # too many to be networks that act

    def act(self, obs: Any) -> Any:
        return self.heads["a"](self.net(obs))


def by_closure() -> Any:
    agent = Agent()
    return lambda obs: agent.act(obs)


WITH_MODULES: dict[str, Any] = {
    "object": lambda: Agent().act,
    "closure": by_closure,
    "partial": lambda: functools.partial(lambda agent, obs: agent.act(obs), Agent()),
    "function in function": lambda: (lambda inner: lambda obs: inner(obs))(
        by_closure()
    ),
}


@pytest.mark.parametrize("kind", WITH_MODULES)
def test_a_copy_of_a_function_has_the_same_names(kind):
    policy = WITH_MODULES[kind]()
    here, there = (
        named_tensors(policy),
        named_tensors(cloudpickle.loads(cloudpickle.dumps(policy))),
    )
    assert [(name, t.shape) for name, t in here.items()] == [
        (name, t.shape) for name, t in there.items()
    ]
    assert [tuple(t.shape) for t in here.values()][:4] == [(3, 2), (3,), (1, 3), (1,)]
    assert len(here) == 6
    assert list(here)[:2] == ["0.weight", "0.bias"]
    here["0.weight"].fill_(4.0)
    assert bool((modules_of(policy)[0].weight == 4).all())


def test_environments_are_not_searched():
    env = CountingEnv(3)
    env.net = nn.Linear(2, 2)
    assert named_tensors(lambda obs: env.step(obs)) == {}
    assert named_tensors(None) == {}


def test_tied_weights_have_one_name():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = module[0].weight
    assert list(named_tensors(module)) == ["0.weight", "0.bias", "1.bias"]


def test_lazy_layers_have_no_weights_yet():
    with pytest.raises(BadWeights, match=r"weight 0.weight is of a lazy layer"):
        named_tensors(nn.Sequential(nn.LazyLinear(3)))


# --- sent to workers ------------------------------------------------------------------------------


class Worker:
    """A copy of the policy that takes what is sent to it."""

    def __init__(self, weights: PolicyWeights, policy: Any, number: int = 0) -> None:
        self.policy = cloudpickle.loads(cloudpickle.dumps(policy))
        ticket = weights.ticket(number)
        self.subscriber = pickle.loads(pickle.dumps(ticket)).open(ticket.fds)
        ticket.close()

    def take(self) -> Any:
        return self.subscriber.take(named_tensors(self.policy))

    @property
    def values(self) -> list[float]:
        return sorted(
            {float(v) for t in named_tensors(self.policy).values() for v in t.unique()}
        )


def constant(value: float) -> nn.Sequential:
    """A policy of two equal parts."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for tensor in module.state_dict().values():
        tensor.fill_(value)
    return module


@pytest.fixture
def sent() -> Any:
    made: list[Any] = []

    def make(policy: Any, workers: int = 1, **options: Any) -> Any:
        weights = PolicyWeights.of_workers(policy, workers, **options)
        made.append(weights)
        for number in range(0 if weights.lazy else workers):
            made.append(Worker(weights, policy, number))
        return weights, *made[1:]

    yield make
    for worker in made[1:]:
        worker.subscriber.close()
    made[0].close()
    made[0].close()


def test_workers_get_what_is_published_and_not_what_is_trained(sent):
    policy = constant(1.0)
    weights, worker = sent(policy)
    assert (worker.take(), worker.take()) == (0, None)
    for tensor in policy.state_dict().values():
        tensor.fill_(2.0)
    assert worker.take() is None
    assert weights.publish() == weights.version == 1
    for tensor in policy.state_dict().values():
        tensor.fill_(3.0)
    assert (worker.take(), worker.values) == (1, [2.0])
    assert weights.publish(policy) == 2
    assert (worker.take(), worker.values) == (2, [3.0])


@pytest.mark.parametrize("form", FORMS)
def test_every_form_reaches_the_workers(sent, form):
    weights, worker = sent(filled(1.0))
    weights.publish(FORMS[form](filled(2.0)))
    assert (worker.take(), worker.values) == (1, [2.0])


def test_models_are_published_one_by_one_and_together(sent):
    policy = constant(1.0)
    weights, worker = sent(policy)
    nn.init.constant_(policy[0].weight, 5.0)
    nn.init.constant_(policy[1].weight, 6.0)
    weights.publish(policy[1], model=policy[1])
    assert (worker.take(), worker.values) == (1, [1.0, 6.0])
    weights.publish(constant(7.0)[0], model=policy[0])
    assert (worker.take(), worker.policy[0].weight.unique().tolist()) == (2, [7.0])
    weights.publish_all([(constant(8.0)[0], policy[0]), (constant(9.0)[0], policy[1])])
    assert (worker.take(), worker.values) == (3, [8.0, 9.0])
    with pytest.raises(BadWeights, match="fit several parts"):
        weights.publish(constant(1.0)[0])
    with pytest.raises(
        BadWeights, match="is not a part of the policy that workers have"
    ):
        weights.publish(constant(1.0)[0], model=constant(1.0)[0])
    with pytest.raises(BadWeights, match="not finite"):
        weights.publish_all(
            [(constant(8.0)[0], policy[0]), (constant(torch.nan)[0], policy[1])]
        )
    assert weights.version == 3
    assert worker.take() is None


@pytest.mark.parametrize("kind", WITH_MODULES)
def test_functions_that_hold_networks_are_updated(sent, kind):
    policy = WITH_MODULES[kind]()
    weights, worker = sent(policy)
    worker.take()
    for module in modules_of(policy):
        for tensor in module.state_dict().values():
            tensor.fill_(2.0)
    weights.publish()
    assert (worker.take(), worker.values) == (1, [2.0])
    first = modules_of(policy)[0]
    weights.publish(
        {name: torch.full_like(t, 3.0) for name, t in first.state_dict().items()},
        model=first,
    )
    assert (worker.take(), worker.values) == (2, [2.0, 3.0])


@pytest.mark.parametrize("policy", [None, lambda obs: obs], ids=["none", "function"])
def test_without_modules_versions_are_sent(sent, policy):
    weights, worker = sent(policy)
    assert (weights.policy, weights.original) == (None, None)
    assert (weights.publish(), worker.take()) == (1, 1)
    assert (weights.publish_all([]), worker.take()) == (2, 2)
    weights.restore(7)
    assert worker.take() == 7
    with pytest.raises(BadWeights, match="has no modules that Muster can find"):
        weights.publish(net())


def test_some_workers_are_left_out_until_the_next_publish(sent):
    weights, one, two = sent(constant(1.0), 2)
    assert (one.take(), two.take()) == (0, 0)
    weights.publish(constant(2.0), workers=[1])
    assert (one.take(), two.take(), one.values, two.values) == (None, 1, [1.0], [2.0])
    with pytest.raises(BadOption, match="no worker 2"):
        weights.publish(constant(3.0), workers=[2])
    assert weights.version == 1
    weights.publish(constant(3.0))
    assert (one.take(), two.take(), one.values, two.values) == (2, 2, [3.0], [3.0])


def test_what_is_published_in_a_rollout_is_visible_after_it(sent):
    policy = constant(1.0)
    weights, one, two = sent(policy, 2)
    with weights.acting() as version:
        assert version == 0
        assert (one.take(), two.take()) == (0, 0)
        for value in (2.0, 3.0):
            source = constant(value)
            weights.publish(source)
            for tensor in source.state_dict().values():
                tensor.fill_(99.0)
        weights.publish(constant(4.0), workers=[1])
        weights.publish(constant(5.0)[0], model=policy[0], workers=[0])
        assert weights.version == 4
        assert (one.take(), two.take()) == (None, None)
    with weights.acting() as version:
        assert version == 4
        assert (one.take(), two.take()) == (4, 3)
        assert (one.values, two.values) == ([4.0, 5.0], [4.0])


def test_parts_that_wait_for_the_end_of_a_rollout_add_up(sent):
    policy = constant(0.0)
    weights, one, two = sent(policy, 2)
    one.take()
    with weights.acting():
        weights.publish(constant(1.0)[0], model=policy[0], workers=[0])
        weights.publish(constant(2.0)[1], model=policy[1], workers=[1])
        weights.publish(constant(3.0)[1], model=policy[1], workers=[0])
    with weights.acting():
        assert (one.take(), two.take()) == (3, 2)
        assert (one.values, two.values) == ([1.0, 3.0], [1.0, 2.0])
    with weights.acting():
        weights.publish(constant(4.0)[0], model=policy[0])
        weights.publish(constant(5.0)[1], model=policy[1])
    with weights.acting():
        assert (one.take(), two.take()) == (5, 5)
        assert one.values == two.values == [4.0, 5.0]


def test_a_worker_that_did_not_read_has_caught_up_when_it_is_given_work():
    policy = nn.Linear(2000, 1000, bias=False)
    weights = PolicyWeights.of_workers(policy, 1)
    ticket = weights.ticket(0)
    for value in (1.0, 2.0, 3.0):
        weights.publish({"weight": torch.full((1000, 2000), value)})
    subscriber, into = ticket.open(ticket.fds), {"weight": torch.zeros(1000, 2000)}
    with weights.acting() as version:
        assert subscriber.take(into) == version == 3
        assert into["weight"].unique().tolist() == [3.0]
    for thing in (ticket, subscriber, weights):
        thing.close()


def test_what_waits_is_a_copy(sent):
    weights, worker = sent(constant(1.0))
    worker.take()
    with weights.acting():
        weights.publish(source := constant(2.0))
        for tensor in source.state_dict().values():
            tensor.fill_(99.0)
    with weights.acting():
        assert (worker.take(), worker.values) == (1, [2.0])


@given(
    targets=st.lists(st.none() | st.sets(st.integers(0, 2)), min_size=1, max_size=12)
)
def test_updates_that_wait_are_at_most_one_for_each_worker(targets):
    policy, weights = constant(0.0), PolicyWeights.of_workers(constant(0.0), 3)
    expected = [0, 0, 0]
    with weights.acting():
        for version, workers in enumerate(targets, 1):
            weights.publish(constant(version), workers=workers)
            expected = [
                version if workers is None or i in workers else old
                for i, old in enumerate(expected)
            ]
            assert len(weights._updates.waiting) <= 4
    with weights.acting():
        workers = [Worker(weights, policy, i) for i in range(3)]
        assert [worker.take() for worker in workers] == expected
        assert [worker.values for worker in workers] == [
            [version] for version in expected
        ]
    assert {
        float(v) for t in weights.policy.state_dict().values() for v in t.unique()
    } == {len(targets)}
    for worker in workers:
        worker.subscriber.close()
    weights.close()


def test_counters_give_versions_of_their_own(sent):
    counter = SimpleNamespace(version="v0")
    counter.increment_version = lambda: setattr(
        counter, "version", f"v{int(counter.version[1:]) + 1}"
    )
    weights, worker = sent(constant(1.0), counter=counter)
    assert worker.take() == "v0"
    assert (weights.publish(), worker.take()) == ("v1", "v1")
    assert (weights.publish_all([]), worker.take()) == ("v2", "v2")


@pytest.mark.parametrize("counted", [False, True])
def test_a_learner_that_counts_gives_the_version(sent, counted):
    counter = SimpleNamespace(version=0)
    counter.increment_version = lambda: setattr(counter, "version", counter.version + 1)
    weights, worker = sent(constant(1.0), counter=counter if counted else None)
    new = [(constant(2.0).state_dict(), None)]
    assert (weights.publish_all(new, version=5), worker.take()) == (5, 5)
    assert (weights.version, worker.values) == (5, [2.0])
    assert (weights.lag(0), weights.lag(5)) == (1, 0)
    assert (weights.publish(), worker.take()) == (6, 6)
    # a learner that was restored from a checkpoint
    assert (weights.publish_all(new, version=2), worker.take()) == (2, 2)
    assert (weights.lag(5), weights.lag(6), weights.lag(2)) == (2, 1, 0)


def test_what_is_loaded_goes_to_the_user_and_to_the_workers(sent):
    policy = constant(1.0)
    weights, worker = sent(policy)
    weights.policy.load_state_dict(constant(4.0).state_dict())
    weights.restore(12)
    assert (weights.version, worker.take(), worker.values) == (12, 12, [4.0])
    assert bool((policy[0].weight == 4).all())
    assert (weights.publish(), worker.take()) == (13, 13)


def test_lazy_layers_get_the_weights_that_a_worker_made(sent):
    policy = nn.Sequential(nn.LazyLinear(3), nn.Tanh(), nn.LazyLinear(2))
    there = copy.deepcopy(policy)
    weights, *_ = sent(policy)
    assert weights.lazy
    for refused in (
        weights.publish,
        lambda: weights.publish(net()),
        lambda: weights.ticket(0),
    ):
        with pytest.raises(BadWeights, match="lazy layers"):
            refused()
    weights.publish_all([])
    there(torch.zeros(1, 4))
    made = named_tensors(there)
    with pytest.raises(BadWeights, match=r"has no weights named \['0.bias'\]"):
        weights.materialise({name: t for name, t in made.items() if name != "0.bias"})
    weights.materialise(made)
    assert not weights.lazy
    for mine in (policy, weights.policy):
        assert all(
            torch.equal(tensor, made[name])
            for name, tensor in mine.state_dict().items()
        )
    policy(torch.zeros(1, 4))
    worker = Worker(weights, policy)
    assert worker.take() == 1
    assert (
        weights.publish(filled_like(policy, 6.0)),
        worker.take(),
        worker.values,
    ) == (
        2,
        2,
        [6.0],
    )
    worker.subscriber.close()


def filled_like(module: nn.Module, value: float) -> dict[str, torch.Tensor]:
    return {
        name: torch.full_like(tensor, value)
        for name, tensor in module.state_dict().items()
    }


def test_tied_lazy_layers_stay_tied():
    policy = nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(4))
    policy[1] = policy[0]
    there = copy.deepcopy(policy)
    there(torch.zeros(1, 4))
    weights = PolicyWeights.of_workers(policy, 1)
    weights.materialise(named_tensors(there))
    assert weights.policy[1].weight is weights.policy[0].weight
    assert torch.equal(policy[1].weight, there[0].weight)
    weights.close()


def test_a_policy_that_cannot_be_copied_is_refused():
    policy = net()
    policy.lock = threading.Lock()
    with pytest.raises(
        BadWeights,
        match="cannot be copied for its workers: copy.deepcopy raised TypeError",
    ):
        PolicyWeights.of_workers(policy, 1)


def test_a_publish_without_memory_is_repeated_with_the_next():
    weights = PolicyWeights.of_workers(constant(1.0), 1, "shared")
    worker = Worker(weights, constant(0.0))
    worker.take()
    publisher = weights._updates._publisher
    original, source = publisher._spare, constant(2.0)

    def fail() -> int:
        raise MemoryError

    publisher._spare = fail
    with pytest.raises(MemoryError):
        weights.publish(source)
    publisher._spare = original
    for tensor in source.state_dict().values():
        tensor.fill_(torch.nan)
    assert worker.take() is None
    weights.catch_up()
    assert (worker.take(), worker.values) == (1, [2.0])
    worker.subscriber.close()
    weights.close()


@pytest.mark.parametrize("form", ["part", "half", "nested"])
def test_a_scheme_brings_all_of_the_policy_too(sent, form):
    policy = Two()
    weights, worker = sent(policy)
    worker.take()

    class Scheme:
        initialized_on_receiver = synchronized_on_receiver = True
        context: Any = None

        def init_on_receiver(self, **_: Any) -> None: ...

        def connect(self, **_: Any) -> None: ...

        def receive(self) -> None:
            model = Two(2.0, 3.0)
            given = {
                "part": model.actor,
                "half": {"actor": {"weight": torch.ones(1)}},
                "nested": nested(model),
            }
            self.context.update_policy_weights_(given[form])

    class Parent:
        def get_model(self, model_id: str) -> Any:
            return policy

    parent = Parent()
    receivers = Receivers(weights, parent, 0)
    receivers.register({"policy": Scheme()})
    if form == "nested":
        receivers.receive()
        assert (worker.take(), worker.values) == (1, [2.0, 3.0])
    else:
        with pytest.raises(
            BadWeights, match="missing .'critic.weight'.|fit several parts"
        ):
            receivers.receive()
        assert worker.take() is None
    receivers.close()


def nested(module: nn.Module) -> Any:
    return TensorDict.from_module(module).data.to_dict()


def test_a_scheme_writes_into_a_copy_also_of_a_policy_that_deepcopy_cannot_copy():
    policy = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    policy.lock = threading.Lock()
    weights = PolicyWeights.of_workers(policy, 1, only_weights=True)

    class Scheme:
        initialized_on_receiver = False

        def init_on_receiver(
            self, *, model_id: str, context: Any, worker_idx: int | None
        ) -> None:
            self.context = context

        def connect(self, *, worker_idx: int | None) -> None:
            self.context.model.load_state_dict(constant(2.0).state_dict())

        def receive(self) -> None: ...

    class Parent:
        def get_model(self, model_id: str) -> Any:
            return policy

    parent = Parent()
    receivers = Receivers(weights, parent, 0)
    receivers.register({"policy": Scheme()})
    assert {
        float(v) for t in weights.policy.state_dict().values() for v in t.unique()
    } == {2.0}
    assert not bool((policy[0].weight == 2).any())
    receivers.close()
    weights.close()


def test_what_a_parent_sends_goes_on_to_the_workers(sent):
    """A collector that is a worker itself: its schemes receive, and its own workers get it."""
    policy = constant(1.0)
    weights, one, two = sent(policy, 2)
    assert (one.take(), two.take()) == (0, 0)

    class Scheme:
        initialized_on_receiver = False

        def init_on_receiver(
            self, *, model_id: str, context: Any, worker_idx: int | None
        ) -> None:
            self.context = context

        def connect(self, *, worker_idx: int | None) -> None:
            self.context.model.load_state_dict(constant(2.0).state_dict())

        def receive(self) -> None:
            self.context.update_policy_weights_(constant(3.0))

    class Parent:
        def get_model(self, model_id: str) -> Any:
            return policy

    parent = Parent()
    receivers = Receivers(weights, parent, 0)
    receivers.register({"policy": Scheme()})
    assert (one.take(), one.values) == (1, [2.0])
    with weights.acting():
        receivers.receive()
        assert (one.take(), two.take(), two.values) == (None, 1, [2.0])
    with weights.acting():
        assert (one.take(), two.take(), one.values, two.values) == (2, 2, [3.0], [3.0])
    receivers.close()


# --- transports -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, SharedMemory()),
        ("shared", SharedMemory()),
        ("none", NoSync()),
        (SharedMemory(deadline_s=3.0), SharedMemory(deadline_s=3.0)),
    ],
    ids=stable,
)
def test_transports_by_name_and_by_object(given, expected):
    assert transport_for(given) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("SharedMemWeightSyncScheme", SharedMemory()),
        ("MultiProcessWeightSyncScheme", SharedMemory()),
        ("NoWeightSyncScheme", NoSync()),
    ],
)
def test_torchrls_schemes_are_known_by_name(name, expected):
    of_torchrl = getattr(pytest.importorskip("torchrl.weight_update"), name)
    assert transport_for(of_torchrl()) == expected
    assert transport_for(type("Mine", (of_torchrl,), {})()) == expected


@pytest.mark.parametrize(
    "wrong",
    ["Shared", "pipe", 3, SharedMemory, object(), {"policy": NoSync()}],
    ids=stable,
)
def test_other_schemes_are_refused(wrong):
    with pytest.raises(
        BadOption,
        match="is not a way to send weights to workers on this machine: expected",
    ):
        transport_for(wrong)


# --- updaters -------------------------------------------------------------------------------------


def vanilla(policy: nn.Module, **options: Any) -> VanillaWeightUpdater:
    with pytest.warns(
        DeprecationWarning,
        match="VanillaWeightUpdater is a WeightUpdaterBase, which is deprecated",
    ):
        return VanillaWeightUpdater(
            policy_weights=TensorDict.from_module(policy).lock_(), **options
        )


@pytest.mark.parametrize("form", FORMS)
def test_an_updater_copies_into_the_policy(form):
    policy = net()
    vanilla(policy).push_weights(FORMS[form](filled(2.0)))
    assert all(bool((tensor == 2).all()) for tensor in policy.state_dict().values())


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
def test_an_updater_of_a_head_takes_its_state_dict():
    """The bounds of the environment are buffers that are not in it."""
    policy, other = tanh_gaussian(nn.Linear(2, 2)), tanh_gaussian(nn.Linear(2, 2))
    updater = VanillaWeightUpdater.from_policy(policy)
    for source in (
        other.state_dict(),
        other,
        TensorDict.from_module(other.net).data.to_dict(),
    ):
        nn.init.uniform_(other.net.weight)
        if isinstance(source, dict) and "weight" in source:
            with pytest.raises(
                BadWeights,
                match=r"missing \['net.bias', 'net.weight'\], unknown \['bias', 'weight'\]",
            ):
                updater.push_weights(source)
            continue
        updater.push_weights(source)
        assert torch.equal(policy.net.weight, other.net.weight)


def test_an_updater_made_from_a_policy_and_one_that_fetches_weights():
    policy = net()
    with pytest.warns(DeprecationWarning, match="Vanilla"):
        updater = VanillaWeightUpdater.from_policy(policy)
    updater(policy)
    updater.push_weights()
    assert torch.equal(policy[0].weight, net()[0].weight)
    vanilla(policy, weight_getter=lambda: filled(3.0)).push_weights()
    assert bool((policy[0].weight == 3).all())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("2.bias"), "missing .'2.bias'."),
        (lambda s: s.update({"2.bias": torch.ones(2)}), "2.bias has shape"),
        (lambda s: s["2.bias"].fill_(torch.nan), "2.bias is not finite"),
    ],
)
def test_an_updater_takes_all_or_nothing(change, message):
    policy, state = net(), filled(2.0).state_dict()
    change(state)
    with pytest.raises(BadWeights, match=message):
        vanilla(policy).push_weights(state)
    assert torch.equal(policy[0].weight, net()[0].weight)


class Noting(WeightUpdaterBase):
    """Notes what it is told to do."""

    def __init__(self, ids: Any = None) -> None:
        self.ids, self.synced = ids, []

    def all_worker_ids(self) -> Any:
        return self.ids

    def _get_server_weights(self) -> Any:
        return {"from": "server"}

    def _skip_update(self, worker_id: Any) -> bool:
        return worker_id == 1

    def _sync_weights_with_worker(
        self, *, worker_id: Any = "unnumbered", server_weights: Any
    ) -> None:
        self.synced.append((worker_id, server_weights))


def test_a_subclass_is_asked_for_each_worker():
    with pytest.warns(DeprecationWarning, match="Noting is a WeightUpdaterBase"):
        updater = Noting()
    given = {"a": torch.ones(1)}
    updater.push_weights(given)
    updater.push_weights(given, worker_ids=0)
    updater.push_weights(given, worker_ids=torch.device("cpu"))
    updater.push_weights(worker_ids=[0, 1, 2])
    updater.ids = [5, 1]
    updater()
    server = {"from": "server"}
    cpu = torch.device("cpu")
    expected = [
        ("unnumbered", given),
        (0, given),
        (cpu, given),
        (0, server),
        (2, server),
        (5, server),
    ]
    assert updater.synced == expected
    updater.synced.clear()
    updater.ids = None
    updater.push_weights(filled(2.0))
    assert bool((updater.synced[0][1]["0", "weight"] == 2).all())
    with pytest.raises(BadWeights, match="cannot push weights from int"):
        updater.push_weights(3)


def test_an_updater_knows_its_collectors_and_calls_its_hooks():
    class Counting:
        def increment_version(self) -> None:
            calls.append(self)

    calls: list[Any] = []
    with pytest.warns(DeprecationWarning, match="Noting"):
        updater = Noting()
    collectors = [Counting(), Counting()]
    assert (updater.collector, updater.collectors, Noting.from_policy(net())) == (
        None,
        None,
        None,
    )
    updater.increment_version()
    updater.register_collector(collectors[0])
    assert updater.collector is collectors[0]
    updater.register_collector(collectors[1])
    assert updater.collectors == collectors
    with pytest.raises(BadOption, match="several collectors"):
        _ = updater.collector
    updater.increment_version()
    updater.register_post_hook(lambda: calls.append("first"))
    updater.register_post_hook(lambda: calls.append("second"))
    updater.init(1, a=2)
    updater.push_weights({})
    assert calls == [*collectors, "first", "second"]
    calls.clear()
    assert len(updater.post_hooks) == 2
    collectors.pop()
    assert updater.collectors == [collectors[0], None]
    updater.increment_version()
    assert calls == [collectors[0]]


LARGE = (200, 300)  # enough for threads


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.int64,
        torch.bool,
        torch.complex64,
    ],
    ids=str,
)
def test_large_tensors_are_copied_as_they_are(dtype):
    source, into = (torch.rand(LARGE) * 5).to(dtype), torch.zeros(LARGE, dtype=dtype)
    copy_tensor(into, source)
    assert torch.equal(into, source)
    turned = torch.zeros(LARGE[::-1], dtype=dtype)
    copy_tensor(turned, source.T)
    assert torch.equal(turned, source.T)
    if dtype.is_complex:
        copy_tensor(into, source.conj())
        assert torch.equal(into, source.conj())


def test_a_graph_does_not_outlive_the_weights_that_it_was_made_with():
    weight = nn.Parameter(torch.ones(LARGE))
    loss = (weight * weight).sum()
    copy_tensor(weight, torch.zeros(LARGE))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize(
    ("values", "fine"),
    [
        ((), True),
        ((torch.nan,), False),
        ((torch.inf,), False),
        ((torch.inf, -torch.inf), False),
    ],
    ids=["finite", "nan", "inf", "both"],
)
@pytest.mark.filterwarnings("error", "ignore::ResourceWarning")
def test_large_tensors_are_searched_for_what_is_not_finite(dtype, values, fine):
    tensor = torch.full(
        LARGE, torch.finfo(dtype).max, dtype=dtype
    )  # their sum is not finite
    tensor.view(-1)[7 : 7 + len(values)] = torch.tensor(values, dtype=dtype)
    weights = PolicyWeights(
        nn.ParameterDict({"w": nn.Parameter(torch.zeros(LARGE, dtype=dtype))})
    )
    if fine:
        weights.publish({"w": tensor})
    else:
        with pytest.raises(BadWeights, match="w is not finite"):
            weights.publish({"w": tensor})


def test_a_policy_that_acts_here_is_checked_also_where_it_was_changed_since() -> None:
    policy = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    weights = PolicyWeights(policy)
    nan = torch.full((2,), torch.nan)
    assert weights.publish() == 1

    def refused(name: str) -> None:
        version = weights.version
        with pytest.raises(BadWeights, match=f"{name} is not finite"):
            weights.publish()
        assert weights.version == version

    with torch.no_grad():
        policy[0].bias.fill_(torch.inf)
    refused("0.bias")
    policy[0].bias.data = torch.zeros(2)
    assert weights.publish() == 2
    policy[0].bias = torch.nn.Parameter(nan)
    refused("0.bias")
    policy[0] = torch.nn.Linear(2, 2)
    assert weights.publish() == 3
    policy[1].running_mean.data = nan
    refused("1.running_mean")
    policy[1].running_mean = torch.zeros(2)
    assert weights.publish() == 4
    policy.append(torch.nn.Linear(2, 2))
    assert weights.publish() == 5
    policy[2].weight.data[0, 0] = torch.nan
    refused("2.weight")
