"""A publish brings everything that acts: whatever a policy consists of, and whichever part of it is
given.
"""

from __future__ import annotations

import copy
import functools
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cloudpickle
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from muster import policies
from muster.errors import BadWeights
from muster.utils.attributes import resolve
from muster.weights.names import (
    each_once,
    named_tensors,
    place_of,
    tensors_in,
    weight_bearer,
)
from muster.weights.publish import PolicyWeights


class Wrapper(nn.Module):
    """A network, and a parameter and a buffer beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, obs: Any) -> Any:
        return self.net(obs) * self.scale


class Tied(nn.Module):
    """Two layers with one weight, and a module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(3, 3), nn.Linear(3, 3)
        self.decode.weight = self.encode.weight
        self.again = self.encode


class Agent:
    """No module; it has a network and a parameter."""

    def __init__(self) -> None:
        self.net = nn.Linear(3, 2)
        self.log_std = nn.Parameter(torch.zeros(2))
        self.temperature = torch.ones(1, requires_grad=True)

    def __call__(self, obs: Any) -> Any:
        return self.net(obs) + self.log_std.exp() * self.temperature


def of_closure(*, also: Any = None) -> Callable[[Any], Any]:
    net, log_std = nn.Linear(3, 2), nn.Parameter(torch.zeros(2))

    def act(obs: Any) -> Any:
        return net(obs) + log_std, also

    return act


def chain(first: Any, second: Any) -> TensorDictSequential:
    return TensorDictSequential(
        TensorDictModule(first, ["observation"], ["hidden"]),
        TensorDictModule(second, ["hidden"], ["action"]),
    )


@dataclass
class Case:
    """A policy, and the modules in it that a user may think of as the policy."""

    policy: Any
    parts: list[Any]


def case(name: str) -> Case:
    policy = CASES[name]()
    if isinstance(policy, Case):
        return policy
    bearer = weight_bearer(policy)
    return Case(
        policy,
        [part for part in bearer.modules() if part is not bearer and tensors_in(part)],
    )


def hidden(made: Callable[[Any], Any]) -> Case:
    """A policy with a function that uses a network."""
    net = nn.Linear(3, 2)
    return Case(made(lambda obs: net(obs)), [net])


CASES: dict[str, Callable[[], Any]] = {
    "categorical": lambda: policies.categorical(
        nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    ),
    "gaussian": lambda: policies.gaussian(nn.Linear(3, 2)),
    "gaussian, a parameter of the user's": lambda: policies.gaussian(
        nn.Linear(3, 2), log_std=nn.Parameter(torch.ones(2))
    ),
    "gaussian, fixed": lambda: policies.gaussian(
        nn.Linear(3, 2), log_std=torch.zeros(2)
    ),
    "gaussian by state": lambda: policies.gaussian(nn.Linear(3, 4), log_std=None),
    "tanh_gaussian": lambda: policies.tanh_gaussian(nn.Linear(3, 4)),
    "deterministic": lambda: policies.deterministic(nn.Linear(3, 2)),
    "epsilon_greedy": lambda: policies.epsilon_greedy(nn.Linear(3, 2)),
    "RunningNorm": lambda: policies.categorical(
        nn.Sequential(policies.RunningNorm(3), nn.Linear(3, 2))
    ),
    "BatchNorm": lambda: policies.gaussian(
        nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    ),
    "wrapper": Wrapper,
    "tied": Tied,
    "TensorDictModule": lambda: TensorDictModule(
        Wrapper(), ["observation"], ["action"]
    ),
    "TensorDictSequential": lambda: chain(nn.Linear(3, 4), nn.Linear(4, 2)),
    "per_agent": lambda: policies.per_agent(
        {"red": policies.gaussian(nn.Linear(3, 2)), "blue": Wrapper(), "others": None}
    ),
    "compiled network": lambda: policies.gaussian(
        torch.compile(nn.Sequential(nn.Linear(3, 2)))
    ),
    "compiled": lambda: torch.compile(Wrapper()),
    "function": of_closure,
    "object": Agent,
    "partial": lambda: functools.partial(lambda agent, obs: agent(obs), Agent()),
    "function in TensorDictModule": lambda: hidden(
        lambda f: TensorDictModule(f, ["observation"], ["action"])
    ),
    "function in per_agent": lambda: hidden(
        lambda f: policies.per_agent({"red": f, "others": Wrapper()})
    ),
    "function in a head": lambda: hidden(
        lambda f: policies.gaussian(f, log_std=nn.Parameter(torch.ones(2)))
    ),
    "object in TensorDictModule": lambda: TensorDictModule(
        Agent(), ["observation"], ["action"]
    ),
}
NAMES = list(CASES)
# written out: to make them all takes seconds (torch.compile imports its compiler), when tests are
# collected, too
MODULES = [name for name in NAMES if name not in ("function", "object", "partial")]


def tensors(policy: Any) -> dict[str, torch.Tensor]:
    return each_once(weight_bearer(policy))


def train(policy: Any, seed: int = 1) -> None:
    """Change every parameter and buffer in place, as optimizers and normalisation do."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors(policy).values():
        new = torch.rand(tensor.shape, generator=generator) * 9 + 1
        tensor.copy_(new.to(tensor.dtype))


def copied(policy: Any) -> Any:
    """As workers get it."""
    return cloudpickle.loads(cloudpickle.dumps(policy))


class Workers:
    """The weights of a policy, and a copy of it in a worker."""

    def __init__(self, policy: Any, **options: Any) -> None:
        self.weights = PolicyWeights.of_workers(policy, 1, **options)
        self.policy = copied(policy)
        ticket = self.weights.ticket(0)
        self._subscriber = pickle.loads(pickle.dumps(ticket)).open(ticket.fds)
        ticket.close()
        self.take()

    def take(self) -> dict[str, torch.Tensor]:
        """The newest weights of the worker."""
        own = named_tensors(self.policy)
        self._subscriber.take(own)
        return own

    def close(self) -> None:
        self._subscriber.close()
        self.weights.close()


@pytest.fixture
def workers() -> Any:
    made: list[Workers] = []

    def make(policy: Any, **options: Any) -> Workers:
        made.append(Workers(policy, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def assert_equal(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> None:
    assert list(found) == list(expected)
    different = [name for name in found if not torch.equal(found[name], expected[name])]
    assert not different


def snapshot(policy: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors(policy).items()}


# --- modules of the user's policy -----------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_part_of_the_policy_stands_for_all_of_it(name: str, workers: Any) -> None:
    given = case(name)
    sent = workers(given.policy)
    wholes = [
        None,
        given.policy,
        nn.ModuleDict(
            {"agent": weight_bearer(given.policy), "critic": nn.Linear(9, 9)}
        ),
    ]
    assert given.parts
    for seed, source in enumerate(
        [*wholes, *given.parts, *map(nn.Sequential, given.parts)], 1
    ):
        train(given.policy, seed)
        assert sent.weights.publish(source) == seed
        assert_equal(sent.take(), tensors(given.policy))


@pytest.mark.parametrize("name", MODULES)
def test_so_it_does_where_a_copy_acts_in_this_process(name: str) -> None:
    """On another device, or in the background."""
    given = case(name)
    acting = copied(given.policy)
    weights = PolicyWeights(acting, given.policy)
    for seed, source in enumerate([None, given.policy, *given.parts], 1):
        train(given.policy, seed)
        assert weights.publish(source) == seed
        assert_equal(tensors(acting), tensors(given.policy))


@pytest.mark.parametrize("name", NAMES)
def test_where_the_policy_itself_acts_all_of_it_is_checked(name: str) -> None:
    given = case(name)
    assert isinstance(given.policy, nn.Module) == (name in MODULES)
    weights = PolicyWeights(given.policy)
    for seed, source in enumerate([None, given.policy, *given.parts], 1):
        assert weights.publish(source) == seed
    version = weights.version
    for tensor in tensors(given.policy).values():
        if not tensor.is_floating_point():
            continue
        before = tensor.clone()
        tensor.fill_(torch.nan)
        for source in (None, given.policy, *given.parts):
            with pytest.raises(
                BadWeights, match="is not finite: training has diverged"
            ):
                weights.publish(source)
        tensor.copy_(before)
    assert weights.version == version


@pytest.mark.parametrize("acts_here", [True, False])
def test_two_models_get_each_others_weights(acts_here: bool, workers: Any) -> None:
    policy = policies.per_agent(
        {
            "red": policies.gaussian(nn.Linear(3, 2)),
            "blue": policies.gaussian(nn.Linear(3, 2)),
        }
    )
    train(policy)
    red, blue = snapshot(policy.red), snapshot(policy.blue)
    sent = None if acts_here else workers(policy)
    weights = PolicyWeights(policy) if sent is None else sent.weights
    weights.publish_all([(policy.blue, policy.red), (policy.red, policy.blue)])
    found = tensors(policy) if sent is None else sent.take()
    expected = {f"red.{name}": tensor for name, tensor in blue.items()}
    assert_equal(
        found, {**expected, **{f"blue.{name}": tensor for name, tensor in red.items()}}
    )


def test_a_part_of_a_model_stands_for_all_of_the_model_and_other_models_keep_theirs(
    workers: Any,
) -> None:
    red, blue = policies.gaussian(nn.Linear(3, 2)), policies.gaussian(nn.Linear(3, 2))
    policy = policies.per_agent({"red": red, "blue": blue})
    sent = workers(policy)
    before = snapshot(policy)
    train(policy)
    sent.weights.publish(red.net, model=red)
    now = tensors(policy)
    assert_equal(
        sent.take(),
        {name: (now if name.startswith("red") else before)[name] for name in before},
    )
    sent.weights.publish(model=blue)
    assert_equal(sent.take(), now)
    train(policy, 2)
    sent.weights.publish_all([(red.net, red), (blue, blue)])
    assert_equal(sent.take(), tensors(policy))


def test_weights_that_a_model_got_from_elsewhere_stay_until_all_is_published(
    workers: Any,
) -> None:
    """Self-play: the opponent acts with the learner's weights of an earlier time."""
    learner, opponent = (
        policies.gaussian(nn.Linear(3, 2)),
        policies.gaussian(nn.Linear(3, 2)),
    )
    policy = policies.per_agent({"red": learner, "blue": opponent})
    sent = workers(policy)
    train(policy, 1)
    old = snapshot(learner)
    sent.weights.publish(learner, model=opponent)
    train(policy, 2)
    for source in (learner, learner.net):
        sent.weights.publish(source)
        found = sent.take()
        assert_equal({name: found[f"red.{name}"] for name in old}, tensors(learner))
        assert_equal({name: found[f"blue.{name}"] for name in old}, old)
    sent.weights.publish(opponent.net)
    found = sent.take()
    assert torch.equal(found["blue.net.weight"], opponent.net.weight)
    assert torch.equal(found["blue.log_std"], old["log_std"])
    sent.weights.publish(learner, model=opponent)
    sent.weights.restore(sent.weights.version)
    train(policy, 5)
    sent.weights.publish(learner)
    assert_equal(sent.take(), tensors(policy))
    train(policy, 2)
    for again in (
        None,
        policy,
        {name: tensor.clone() for name, tensor in policy.state_dict().items()},
    ):
        sent.weights.publish(learner, model=opponent)
        sent.weights.publish(again)
        assert_equal(sent.take(), tensors(policy))
        train(policy, 3)
        sent.weights.publish(learner)
        assert_equal(sent.take(), tensors(policy))
        train(policy, 2)
    sent.weights.publish(learner, model=opponent)
    sent.weights.publish(opponent, model=opponent)
    train(policy, 4)
    sent.weights.publish(learner)
    assert_equal(sent.take(), tensors(policy))


# --- weights from elsewhere -----------------------------------------------------------------------


def nested(module: nn.Module) -> Any:
    return TensorDict.from_module(module).data.to_dict()


FROM_ELSEWHERE: dict[str, Callable[[nn.Module], Any]] = {
    "copy": copy.deepcopy,
    "state_dict": lambda module: copy.deepcopy(module).state_dict(),
    "named tensors": lambda module: {
        **dict(module.named_parameters()),
        **dict(module.named_buffers()),
    },
    "TensorDict": TensorDict.from_module,
    "nested dict": nested,
    "dict of modules": lambda module: {
        **dict(module.named_children()),
        **dict(module.named_parameters(recurse=False)),
        **dict(module.named_buffers(recurse=False)),
    },
}
WHOLE = [
    *(
        "categorical",
        "gaussian",
        "gaussian by state",
        "tanh_gaussian",
        "deterministic",
        "epsilon_greedy",
        "RunningNorm",
        "BatchNorm",
    ),
    *("wrapper", "tied", "TensorDictModule", "TensorDictSequential", "per_agent"),
]


@pytest.mark.parametrize("form", FROM_ELSEWHERE)
@pytest.mark.parametrize("name", WHOLE)
def test_weights_of_the_whole_policy_are_taken_in_every_form(
    name: str, form: str, workers: Any
) -> None:
    policy, other = case(name).policy, case(name).policy
    sent, here = workers(policy), PolicyWeights(policy)
    train(other)
    sent.weights.publish(FROM_ELSEWHERE[form](other))
    assert_equal(sent.take(), tensors(other))
    here.publish(FROM_ELSEWHERE[form](other))
    assert_equal(tensors(policy), tensors(other))


@pytest.mark.parametrize("form", FROM_ELSEWHERE)
@pytest.mark.parametrize("name", WHOLE)
def test_weights_of_a_part_are_refused_with_the_names_that_are_missing(
    name: str, form: str, workers: Any
) -> None:
    given = case(name)
    policy = given.policy
    sent, here = workers(policy), PolicyWeights(policy)
    everything = {
        name: place_of(tensor)
        for name, tensor in weight_bearer(policy).state_dict(keep_vars=True).items()
    }
    train(policy)
    before, there = (
        snapshot(policy),
        {name: tensor.clone() for name, tensor in sent.take().items()},
    )
    refused = 0
    for part in given.parts:
        source = FROM_ELSEWHERE[form](copy.deepcopy(part))
        inside = {place_of(tensor) for tensor in tensors_in(part)}
        missing = sorted(
            name for name, place in everything.items() if place not in inside
        )
        if not missing:
            continue
        for weights in (sent.weights, here):
            with pytest.raises(BadWeights, match=r"Nothing was changed\.$") as caught:
                weights.publish(source)
            text = str(caught.value)
            other = any(
                why in text
                for why in ("fit several parts", "named differently", "has shape")
            )
            assert other or f"missing {missing}" in text
            refused += f"missing {missing}" in text
    assert_equal(tensors(policy), before)
    assert_equal(sent.take(), there)
    assert (sent.weights.version, here.version) == (0, 0)
    assert refused or name in (
        "categorical",
        "gaussian by state",
        "tanh_gaussian",
        "deterministic",
        "per_agent",
        "tied",
    )


@pytest.mark.parametrize(
    "name",
    ["gaussian", "wrapper", "TensorDictModule", "TensorDictSequential", "BatchNorm"],
)
def test_the_remedies_of_a_refusal_work(name: str, workers: Any) -> None:
    policy = case(name).policy
    sent = workers(policy)
    net = next(
        part for part in reversed(list(policy.modules())) if isinstance(part, nn.Linear)
    )
    other = nn.Linear(net.in_features, net.out_features)
    with pytest.raises(BadWeights) as caught:
        sent.weights.publish(other)
    (model_id,) = re.findall(
        r"publish only this part with model_id='policy\.?([^']*)'", str(caught.value)
    )
    assert resolve(policy, model_id) is net
    before = sent.take()
    sent.weights.publish(other, model=resolve(policy, model_id))
    after = sent.take()
    changed = {id(tensor) for tensor in net.state_dict(keep_vars=True).values()}
    names = {
        name
        for name, tensor in policy.state_dict(keep_vars=True).items()
        if id(tensor) in changed
    }
    assert all(
        torch.equal(after[name], before[name]) for name in before if name not in names
    )
    assert any(torch.equal(after[name], other.weight) for name in names)
    assert (
        "Call update_policy_weights_() to publish the policy that the collector was made with"
        in str(caught.value)
    )
    train(policy)
    sent.weights.publish()
    assert_equal(sent.take(), tensors(policy))


def test_a_module_that_shares_some_layers_with_the_policy_is_from_elsewhere(
    workers: Any,
) -> None:
    trunk = nn.Linear(3, 3)
    policy, critic = (
        policies.gaussian(nn.Sequential(trunk, nn.Linear(3, 2))),
        nn.Sequential(trunk, nn.Linear(3, 1)),
    )
    sent = workers(policy)
    train(policy)
    for weights in (sent.weights, PolicyWeights(policy)):
        with pytest.raises(BadWeights, match="weight 1.weight has shape"):
            weights.publish(critic)
        assert weights.version == 0


def test_the_model_of_the_whole_policy_is_no_part(workers: Any) -> None:
    policy, other = (
        policies.gaussian(nn.Linear(3, 2)),
        policies.gaussian(nn.Linear(3, 2)),
    )
    sent = workers(policy)
    train(other)
    sent.weights.publish(other, model=policy)
    assert_equal(sent.take(), tensors(other))
    train(policy, 2)
    sent.weights.publish(policy.net)
    assert_equal(sent.take(), tensors(policy))


def test_a_policy_that_has_other_layers_now_is_refused(workers: Any) -> None:
    policy = policies.gaussian(nn.Sequential(nn.Linear(3, 2)))
    sent = workers(policy)
    policy.net.append(nn.Linear(2, 2))
    for source in (None, policy.net[0]):
        with pytest.raises(
            BadWeights, match=r"unknown \['net.1.bias', 'net.1.weight'\]"
        ):
            sent.weights.publish(source)
    policy.net.pop(1)
    policy.net[0] = nn.LazyLinear(2)
    with pytest.raises(BadWeights, match="weight net.0.weight is of a lazy layer"):
        sent.weights.publish()
    assert sent.weights.version == 0


def test_functions_refuse_a_part_too(workers: Any) -> None:
    act = of_closure()
    net = weight_bearer(act)[0]
    sent = workers(act)
    with pytest.raises(
        BadWeights,
        match=r"those of 0, which is only a part of the policy: missing \['1.0'\]",
    ):
        sent.weights.publish(copy.deepcopy(net))
    with pytest.raises(BadWeights, match="cannot take weights from function"):
        sent.weights.publish(lambda obs: obs)
    other = of_closure()
    train(other)
    sent.weights.publish(other)
    assert_equal(sent.take(), tensors(other))


def test_tied_weights_may_be_given_once_and_not_with_two_values(workers: Any) -> None:
    policy, other = Tied(), Tied()
    sent = workers(policy)
    train(other)
    once = dict(other.named_parameters())
    assert "decode.weight" not in once
    sent.weights.publish(once)
    assert_equal(sent.take(), tensors(other))
    state = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    sent.weights.publish(state)
    state["decode.weight"] += 1
    with pytest.raises(
        BadWeights,
        match="decode.weight has another name in the policy, too .tied weights.",
    ):
        sent.weights.publish(state)
    assert sent.weights.version == 2


def test_views_of_one_memory_are_different_weights() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("all", torch.zeros(4))
            self.register_buffer("first", self.all[:2])

    policy, here = Flat(), PolicyWeights(Flat())
    here.publish({"all": torch.ones(4), "first": torch.full((2,), 5.0)})
    assert here.policy.first.tolist() == [5.0, 5.0]
    with pytest.raises(BadWeights, match=r"missing \['first'\]"):
        PolicyWeights(policy).publish({"all": torch.ones(4)})


# --- dicts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        lambda m: nested(m),
        lambda m: {
            "net": nested(m.net),
            **{n: t for n, t in m.state_dict().items() if "." not in n},
        },
        lambda m: {"net": m.net, "scale": m.scale, "seen": m.seen},
        lambda m: {
            "net": TensorDict.from_module(m.net),
            "scale": m.scale,
            "seen": m.seen,
        },
        lambda m: dict(TensorDict.from_module(m).data.items(True, True)),
        lambda m: {
            ("net", "weight"): m.net.weight,
            "net": {"bias": m.net.bias},
            "scale": m.scale,
            "seen": m.seen,
        },
        lambda m: {
            **m.state_dict(),
            "_extra_state": {"epoch": 3},
            "net.nothing": None,
            "more": {},
        },
    ],
    ids=[
        "to_dict",
        "mixed",
        "modules",
        "TensorDicts",
        "tuples as keys",
        "halves",
        "extra state and None",
    ],
)
def test_dicts_may_be_nested(given: Callable[[Any], Any], workers: Any) -> None:
    other = Wrapper()
    train(other)
    sent = workers(Wrapper())
    sent.weights.publish(given(other))
    assert_equal(sent.take(), tensors(other))


def test_weights_whose_name_ends_like_that_of_an_extra_state_are_weights() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.extra_state = nn.Parameter(torch.zeros(1))

    here = PolicyWeights(Named())
    here.publish({"extra_state": torch.ones(1)})
    assert here.policy.extra_state.item() == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"net": {"weight": 1.0}},
            r"cannot take weights from dict: its entry 'weight' is float",
        ),
        ({"net": [torch.ones(1)]}, r"its entry 'net' is list"),
        (
            {"net": {"weight": torch.ones(2, 3)}, "net.weight": torch.ones(2, 3)},
            r"has \['net.weight'\] twice",
        ),
        ({1: torch.ones(1), "1": torch.ones(1)}, r"has \['1'\] twice"),
        (
            {"net": {"weight": torch.ones(2, 3)}},
            r"missing \['net.bias', 'scale', 'seen'\], unknown nothing",
        ),
        ({"net": {}}, "missing .*net.bias"),
    ],
)
def test_dicts_that_do_not_fit(given: Any, message: str) -> None:
    with pytest.raises(BadWeights, match=message):
        PolicyWeights(Wrapper()).publish(given)


# --- values ---------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Has a mask that is infinite on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 2)
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
        self.register_buffer("mean", torch.zeros(3))


def test_buffers_that_are_infinite_from_the_start_are_no_divergence(
    workers: Any,
) -> None:
    policy = Attention()
    sent, here = workers(policy), PolicyWeights(policy)
    for weights in (sent.weights, here):
        for source in (None, policy.net, copy.deepcopy(policy), policy.state_dict()):
            weights.publish(source)
    assert torch.isinf(sent.take()["mask"]).sum() == 3
    policy.mean[0] = torch.inf
    for weights in (sent.weights, here):
        with pytest.raises(BadWeights, match="weight mean is not finite"):
            weights.publish()
    policy.mean.zero_()
    with torch.no_grad():
        policy.net.weight[0, 0] = torch.inf
    for weights in (sent.weights, here):
        with pytest.raises(BadWeights, match="weight net.weight is not finite"):
            weights.publish()


def test_buffers_that_are_not_in_the_state_dict_stay_where_they_are(
    workers: Any,
) -> None:
    """They are bounds of the environment, caches, recurrent states: the worker has its own."""
    policy = policies.tanh_gaussian(nn.Linear(3, 4))
    sent = workers(policy)
    sent.policy.middle = torch.full((2,), 7.0)
    policy.middle.fill_(3.0)
    everything = {**dict(policy.named_parameters()), **dict(policy.named_buffers())}
    for source in (None, policy.net, TensorDict.from_module(policy), everything):
        train(policy)
        sent.weights.publish(source)
        assert_equal(sent.take(), tensors(policy))
    assert sent.policy.middle.tolist() == [7.0, 7.0]


def test_lazy_layers_have_nothing_to_give_and_nothing_to_take() -> None:
    policy, other = (
        policies.categorical(nn.LazyLinear(2)),
        policies.categorical(nn.Linear(3, 2)),
    )
    here = PolicyWeights(policy)
    assert (here.publish(), here.publish(policy), here.publish(policy.net)) == (1, 2, 3)
    with pytest.raises(
        BadWeights, match=r"weight net.weight is of a lazy layer.*Call the policy once"
    ):
        here.publish(other)
    with pytest.raises(BadWeights, match="weight net.weight is of a lazy layer"):
        PolicyWeights(other).publish(copy.deepcopy(policy))
    policy.net(torch.zeros(1, 3))
    train(other)
    here.publish(other)
    assert_equal(tensors(policy), tensors(other))


@pytest.mark.parametrize(
    "norm",
    [nn.utils.weight_norm, nn.utils.spectral_norm],
    ids=["weight_norm", "spectral_norm"],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_policies_that_deepcopy_cannot_copy(norm: Any, workers: Any) -> None:
    policy = policies.gaussian(
        nn.Sequential(norm(nn.Linear(3, 3)), norm(nn.Linear(3, 2)))
    )
    policy.net[0].register_buffer("bound", torch.ones(1), persistent=False)
    policy.again, policy.tied = policy.net[1], nn.Linear(3, 2)
    policy.tied.bias = policy.net[1].bias
    policy(torch.ones(4, 3))
    with pytest.raises(BadWeights, match="copy.deepcopy raised RuntimeError"):
        PolicyWeights.of_workers(policy, 1)
    sent = workers(policy, only_weights=True)
    assert sent.weights.policy.state_dict().keys() == policy.state_dict().keys()
    assert {*map(place_of, tensors_in(sent.weights.policy))}.isdisjoint(
        map(place_of, tensors_in(policy))
    )
    assert [n for n, _ in sent.weights.policy.named_modules()] == [
        n for n, _ in policy.named_modules()
    ]
    for source in (policy, policy.net[1], None):
        train(policy)
        sent.weights.publish(source)
        assert_equal(sent.take(), tensors(policy))
    sent.weights.publish(
        {name: tensor + 1 for name, tensor in policy.state_dict().items()}
    )
    sent.weights.restore(9)
    assert_equal(tensors(policy), sent.take())


def test_a_policy_that_makes_its_state_dict_in_its_own_way_has_to_be_copied() -> None:
    class Own(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("not me")

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {
                f"own.{name}": tensor
                for name, tensor in super().state_dict(*args, **kwargs).items()
            }

    with pytest.raises(BadWeights, match="copy.deepcopy raised TypeError: not me"):
        PolicyWeights.of_workers(Own(3, 2), 1, only_weights=True)
