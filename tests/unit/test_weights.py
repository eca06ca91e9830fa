"""Publishing weights: what counts as weights, what fits, and that it is all or nothing."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictParams
from torch import nn

from muster.errors import BadWeights
from muster.weights.local import LocalWeights, named_weights


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
    "named_tensors": lambda m: {**dict(m.named_parameters()), **dict(m.named_buffers())},
    "tensordict": lambda m: TensorDict.from_module(m),
    "tensordict_params": lambda m: TensorDictParams(TensorDict.from_module(m)),
    "nested_tensordict": lambda m: TensorDict.from_module(m).detach().clone(),
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
    weights = LocalWeights(policy)
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
        (lambda s: s.update(extra=torch.ones(1)), r"missing nothing, unknown \['extra'\]"),
        (lambda s: s.update({"2.bias": torch.ones(2)}), r"2.bias has shape \(2,\).*expected \(1,\)"),
        (lambda s: s.update({"2.bias": torch.ones(1).double()}), "2.bias .* torch.float64, expected .* torch.float32"),
        (lambda s: s.update({"1.num_batches_tracked": torch.tensor(1.0)}), "num_batches_tracked .* torch.int64"),
        (lambda s: s["2.bias"].fill_(torch.nan), "2.bias is not finite"),
        (lambda s: s["1.running_var"].fill_(torch.inf), "1.running_var is not finite"),
    ],
)
def test_what_does_not_fit_changes_nothing(change, message):
    policy = net()
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    weights, state = LocalWeights(policy), filled(2.0).state_dict()
    change(state)
    with pytest.raises(BadWeights, match=message):
        weights.publish(state)
    assert weights.version == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.state_dict().items())


@pytest.mark.parametrize("source", [3, "weights.pt", [torch.ones(1)], {"a": 1.0}, object()], ids=str)
def test_what_holds_no_weights(source):
    with pytest.raises(BadWeights, match="cannot take weights from"):
        LocalWeights(net()).publish(source)


def test_the_network_of_a_tensordict_module_fits():
    policy = TensorDictModule(net(), in_keys=["observation"], out_keys=["action"])
    assert LocalWeights(policy).publish(filled(2.0)) == 1
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
    weights = LocalWeights(reachable(module)[kind])
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
    weights = LocalWeights(acting, original)
    for tensor in original.state_dict().values():
        tensor.fill_(3.0)
    assert weights.publish() == 1
    assert bool((acting[0].weight == 3).all())


def test_nothing_to_publish_only_counts():
    assert LocalWeights(None).publish() == 1
    assert LocalWeights(nn.Tanh()).publish({}) == 1


def test_tied_weights_are_no_second_part():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = self.b = nn.Linear(2, 2)

    policy = Tied()
    assert LocalWeights(policy).publish(nn.Linear(2, 2)) == 1
