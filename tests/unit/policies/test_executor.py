"""The executor gives what the module gives, or stands aside."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from muster.policies.executor import plan

ACTIVATIONS = [
    nn.Tanh,
    nn.ReLU,
    nn.Sigmoid,
    nn.SiLU,
    nn.ELU,
    nn.GELU,
    nn.Softplus,
    nn.Identity,
    lambda: nn.LeakyReLU(0.2),
    lambda: nn.GELU(approximate="tanh"),
    lambda: nn.Dropout(0.5).eval(),
    lambda: nn.ELU(0.3, inplace=True),
]


def mlp(hidden: int = 16, inputs: int = 4, outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs)
    )


@st.composite
def networks(draw):
    torch.manual_seed(draw(st.integers(0, 1000)))
    sizes = draw(st.lists(st.integers(1, 40), min_size=2, max_size=5))
    layers: list[nn.Module] = (
        [draw(st.sampled_from(ACTIVATIONS))()] if draw(st.booleans()) else []
    )
    for n, m in itertools.pairwise(sizes):
        layers.append(nn.Linear(n, m, bias=draw(st.booleans())))
        if draw(st.booleans()):
            layers.append(nn.LayerNorm(m, elementwise_affine=draw(st.booleans())))
        layers.append(draw(st.sampled_from(ACTIVATIONS))())
    if draw(st.booleans()):
        layers = [nn.Sequential(*layers[:2]), *layers[2:]]
    lead = draw(st.sampled_from([(), (1,), (8,), (64,)]))
    return nn.Sequential(*layers), sizes[0], lead


@settings(max_examples=60, deadline=None)
@given(networks(), st.sampled_from([torch.float32, torch.float64]))
def test_torch_programs_are_bit_equal_on_every_batch(network, dtype):
    net, n, lead = network
    net = net.to(dtype)
    program = plan(net, torch.randn(*lead, n, dtype=dtype), numpy_ok=False)
    assert program is not None
    assert program.kind == "torch"
    for _ in range(3):
        x = torch.randn(*lead, n, dtype=dtype) * 3
        given = x.clone()
        with torch.no_grad():
            assert torch.equal(program(given), net(x.clone()))
        assert torch.equal(given, x), "a program never writes into its input"


@settings(max_examples=50, deadline=None)
@given(networks())
def test_numpy_programs_are_equal_up_to_rounding(network):
    net, n, lead = network
    program = plan(net, torch.randn(*lead, n))
    assert program is not None
    for _ in range(3):
        x = torch.randn(*lead, n) * 3
        given = x.numpy().copy()
        out = program(given) if program.kind == "numpy" else program(x.clone()).numpy()
        np.testing.assert_allclose(
            out, net(x.clone()).detach().numpy(), rtol=1e-4, atol=1e-5
        )
        assert (given == x.numpy()).all()


def test_float64_is_for_torch():
    assert plan(mlp().double(), torch.randn(2, 4, dtype=torch.float64)).kind == "torch"


def test_convolutions_run_in_torch():
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 9, 2)
    )
    x = torch.randn(5, 3, 8, 8)
    program = plan(net, x)
    assert program.kind == "torch"
    assert torch.equal(program(x), net(x))


def test_a_bare_linear_and_a_leading_flatten_are_networks():
    x = torch.randn(3, 2, 2)
    for net, batch in (
        (nn.Linear(2, 5), x[:, 0]),
        (nn.Sequential(nn.Flatten(), nn.Linear(4, 5)), x),
    ):
        for numpy_ok in (True, False):
            program = plan(net, batch, numpy_ok=numpy_ok)
            out = program(batch.numpy() if numpy_ok else batch)
            np.testing.assert_allclose(
                np.asarray(out), net(batch).detach().numpy(), rtol=1e-5, atol=1e-6
            )


def test_torchrl_mlp_and_parameter_extractors():
    torchrl = pytest.importorskip("torchrl.modules")
    net = nn.Sequential(
        torchrl.MLP(in_features=4, out_features=6, num_cells=[8]),
        torchrl.NormalParamExtractor(),
    )
    x = torch.randn(7, 4)
    loc, scale = plan(net, x)(x)
    assert torch.equal(loc, net(x)[0])
    assert torch.equal(scale, net(x)[1])


@pytest.mark.parametrize("numpy_ok", [True, False])
def test_weights_updated_in_place_are_followed(numpy_ok):
    net, x = mlp(), torch.randn(3, 4)
    program = plan(net, x, numpy_ok=numpy_ok)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    net(x).square().sum().backward()
    optimizer.step()
    assert program.current()
    out = torch.as_tensor(program(x.numpy() if numpy_ok else x))
    assert torch.allclose(out, net(x), atol=1e-6)
    net.load_state_dict(mlp().state_dict())
    assert program.current()
    assert torch.allclose(
        torch.as_tensor(program(x.numpy() if numpy_ok else x)), net(x), atol=1e-6
    )


class Doubling(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


def _change(name):
    def change(net):
        if name == "parameter":
            net[0].weight = nn.Parameter(torch.zeros_like(net[0].weight))
        elif name == "data":
            net[0].weight.data = torch.zeros_like(net[0].weight)
        elif name == "no bias":
            net[0].bias = None
        elif name == "layer":
            net[1] = nn.ReLU()
        elif name == "longer":
            net.append(nn.Tanh())
        elif name == "hook":
            net[2].register_forward_hook(lambda module, args, out: out * 0)
        elif name == "pre-hook":
            net.register_forward_pre_hook(lambda module, args: (args[0] * 0,))
        elif name == "forward":
            net[1].forward = torch.relu
        elif name == "parametrization":
            nn.utils.parametrize.register_parametrization(
                net[0], "weight", nn.Identity()
            )
        elif name == "dtype":
            net.double()
        elif name == "class":
            net[0].__class__ = Doubling
        elif name == "dropout":
            net[3].train()
        elif name == "slope":
            net[4].negative_slope = 0.5

    return pytest.param(change, id=name)


CHANGES = [
    "parameter",
    "data",
    "no bias",
    "layer",
    "longer",
    "hook",
    "pre-hook",
    "forward",
    "parametrization",
]


@pytest.mark.parametrize(
    "change", [*map(_change, [*CHANGES, "dtype", "class", "dropout", "slope"])]
)
@pytest.mark.parametrize("numpy_ok", [True, False])
def test_changes_that_need_a_new_plan_are_noticed(change, numpy_ok):
    net = nn.Sequential(*mlp(), nn.Dropout().eval(), nn.LeakyReLU(0.1))
    program = plan(net, torch.randn(3, 4), numpy_ok=numpy_ok)
    assert program.current()
    change(net)
    assert not program.current()


@pytest.mark.parametrize(
    "change",
    [
        *map(
            _change,
            ["hook", "pre-hook", "forward", "parametrization", "class", "dropout"],
        )
    ],
)
def test_what_is_not_exactly_what_it_seems_is_not_planned(change):
    net = nn.Sequential(*mlp(), nn.Dropout().eval(), nn.LeakyReLU(0.1))
    change(net)
    assert plan(net, torch.randn(3, 4)) is None


class Own(nn.Module):
    def forward(self, x):
        return x


@pytest.mark.parametrize(
    "net",
    [
        Own(),
        nn.Sequential(nn.Linear(4, 4), Own()),
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
        nn.Sequential(nn.Dropout(), nn.Linear(4, 4)),
        nn.Sequential(),
        nn.Identity(),
        nn.Linear(5, 4),  # does not take the input; its own message is better
    ],
    ids=str,
)
def test_unknown_networks_are_left_to_the_module(net):
    assert plan(net, torch.randn(3, 4)) is None


def test_integers_only_where_the_module_takes_them():
    assert plan(mlp(), torch.zeros(3, 4, dtype=torch.uint8)) is None


def test_global_hooks_and_autocast_stand_in_the_way():
    net, x = mlp(), torch.randn(3, 4)
    program = plan(net, x)
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, out: None
    )
    try:
        assert plan(net, x) is None
        assert not program.current()
    finally:
        handle.remove()
    with torch.autocast("cpu", torch.bfloat16):
        assert plan(net, x) is None
        assert not program.current()
    assert program.current()


def test_nan_on_the_first_batch_is_left_to_the_module():
    assert plan(mlp(), torch.full((3, 4), torch.nan)) is None
