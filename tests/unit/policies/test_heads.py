"""Heads: distributions, and rollouts that give the same data on every path."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from muster.errors import BadOption, BadPolicyOutput
from muster.keys import LOG_PROB
from muster.memory.slots import Lane, Layout, Slot
from muster.memory.specs import ArraySpec, Column
from muster.policies import sampling
from muster.policies.checks import PolicySetting
from muster.policies.head_policy import HeadPolicy
from muster.policies.heads import (
    Head,
    categorical,
    deterministic,
    epsilon_greedy,
    gaussian,
    tanh_gaussian,
)
from muster.rng import GroupRng

OBS, ACTION = ("observation",), ("action",)
T = 12


def discrete(n=3, start=0, dtype=np.int64):
    return ArraySpec((), np.dtype(dtype), np.array(start), np.array(start + n - 1))


def multi(*nvec):
    return ArraySpec(
        (len(nvec),), np.dtype(np.int64), np.zeros(len(nvec), int), np.array(nvec) - 1
    )


def box(n=2, low=-2.0, high=3.0, dtype=np.float32):
    return ArraySpec(
        (n,), np.dtype(dtype), np.full(n, low, dtype), np.full(n, high, dtype)
    )


def net(outputs, seed=0, scale=1.0):
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, outputs))
    with torch.no_grad():
        layers[2].weight.mul_(scale)
    return layers


HEADS = {
    "categorical": lambda: (categorical(net(3)), discrete(3)),
    "many choices": lambda: (categorical(net(20)), discrete(20)),
    "start": lambda: (categorical(net(3)), discrete(3, start=-1)),
    "int32": lambda: (categorical(net(3)), discrete(3, dtype=np.int32)),
    "multi": lambda: (categorical(net(6), nvec=(3, 3)), multi(3, 3)),
    "uneven": lambda: (categorical(net(7)), multi(2, 4, 1)),
    "gaussian": lambda: (gaussian(net(2), log_std=-0.5), box()),
    "gaussian64": lambda: (
        gaussian(net(2), log_std=torch.tensor([0.1, -1.0])),
        box(dtype=np.float64),
    ),
    "gaussian by state": lambda: (gaussian(net(4), log_std=None), box()),
    "clipped": lambda: (
        gaussian(net(2), log_std=0.5, clip=True),
        box(low=-0.7, high=0.9),
    ),
    "clipped64": lambda: (
        gaussian(net(2), log_std=torch.tensor([0.1, 1.0]), clip=True),
        box(low=-0.1, high=np.inf, dtype=np.float64),
    ),
    "clipped by state": lambda: (
        gaussian(net(4), log_std=None, clip=True),
        box(low=-0.7, high=0.9),
    ),
    "tanh": lambda: (tanh_gaussian(net(4)), box()),
    "deterministic": lambda: (deterministic(net(2)), box()),
    "greedy": lambda: (deterministic(net(3)), discrete(3, start=2)),
    "epsilon": lambda: (epsilon_greedy(net(3), 0.5), discrete(3)),
    "epsilon, start": lambda: (epsilon_greedy(net(20), 0.7), discrete(20, start=-1)),
    "epsilon, int32": lambda: (epsilon_greedy(net(3)), discrete(3, dtype=np.int32)),
    "epsilon 1": lambda: (epsilon_greedy(net(3), 1), discrete(3)),
    "epsilon 0": lambda: (epsilon_greedy(net(3), 0.0), discrete(3)),
}


@pytest.fixture(params=HEADS)
def case(request) -> tuple[Head, ArraySpec]:
    return HEADS[request.param]()


def make(head, spec, *, batched=True, keys=(OBS,), **options) -> HeadPolicy:
    specs = dict.fromkeys(keys, ArraySpec((4,), np.dtype(np.float32)))
    return HeadPolicy(
        head, PolicySetting(specs, {ACTION: spec}, (8,) if batched else (), **options)
    )


def lane_for(policy, spec, obs, *, batched=True) -> Lane:
    """A lane with observations ``[T + 1, B, 4]``."""
    columns = (
        Column(OBS, obs.shape[2:], obs.dtype, carry=True),
        Column(ACTION, spec.shape, spec.dtype),
    )
    lead = None if batched else ()
    lane = Slot(
        Layout(
            len(obs) - 1, obs.shape[1], (*columns, *policy.columns()), batch_shape=lead
        )
    ).lanes[0]
    lane.arrays[OBS][...] = obs
    return lane


def observations(B=8, seed=0):
    return np.random.default_rng(seed).normal(size=(T + 1, B, 4)).astype(np.float32)


@torch.no_grad()
def collect(policy, spec, obs, *, batched=True, seed=0):
    lane = lane_for(policy, spec, obs, batched=batched)
    rng = GroupRng(seed)
    policy.first({OBS: lane.rows(OBS)[0]}, rng)
    act = policy.start(lane, rng)
    for t in range(lane.T):
        act(t)
    return lane.arrays[ACTION].copy(), lane.arrays[
        LOG_PROB
    ].copy() if LOG_PROB in lane.arrays else None


@pytest.mark.parametrize("B", [1, 8])
def test_all_paths_give_the_same_data(case, B, monkeypatch):
    head, spec = case
    obs = observations(B)
    results = {}
    for path in ("numpy executor", "torch executor", "module"):
        if path == "torch executor":
            monkeypatch.setattr("muster.policies.executor.NUMPY_LIMIT", 0)
        policy = make(head, spec, executor=path != "module")
        results[path] = collect(policy, spec, obs)
        assert policy.path == path
    action, log_prob = results["module"]
    for path, (got, got_log_prob) in results.items():
        np.testing.assert_allclose(got, action, rtol=1e-4, atol=1e-5, err_msg=path)
        if log_prob is not None:
            np.testing.assert_allclose(
                got_log_prob, log_prob, rtol=1e-3, atol=1e-4, err_msg=path
            )
    assert (results["torch executor"][0] == action).all(), (
        "the torch program is bit-equal"
    )


@pytest.mark.parametrize("B", [1, 8])
def test_log_probs_are_those_of_the_learner(case, B):
    head, spec = case
    obs = observations(B)
    action, log_prob = collect(make(head, spec), spec, obs)
    if log_prob is None:
        return
    distribution = head.distribution(torch.as_tensor(obs[:-1]))
    expected = distribution.log_prob(torch.as_tensor(action))
    assert expected.shape == (T, B)
    np.testing.assert_allclose(log_prob, expected.detach(), rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("executor", [True, False])
def test_unbatched_equals_a_batch_of_one(case, executor):
    head, spec = case
    obs = observations(1)
    batched = collect(make(head, spec, executor=executor), spec, obs)
    unbatched = collect(
        make(head, spec, batched=False, executor=executor), spec, obs, batched=False
    )
    np.testing.assert_allclose(unbatched[0], batched[0], rtol=1e-5, atol=1e-6)
    if batched[1] is not None:
        np.testing.assert_allclose(unbatched[1], batched[1], rtol=1e-4, atol=1e-5)


def test_actions_lie_in_the_space(case):
    head, spec = case
    action, _ = collect(make(head, spec), spec, observations())
    assert action.dtype == spec.dtype
    if (
        spec.dtype.kind == "i"
        or head.name == "tanh_gaussian"
        or getattr(head, "clip", False)
    ):
        assert (action >= spec.low).all()
        assert (action <= spec.high).all()


def test_deterministic_takes_the_mode(case):
    head, spec = case
    obs = observations()
    action, log_prob = collect(make(head, spec, exploration_type="mode"), spec, obs)
    mode = head.mode(torch.as_tensor(obs[:-1])).detach()
    np.testing.assert_allclose(action, mode, rtol=1e-5, atol=1e-5)
    if log_prob is not None:
        expected = head.distribution(torch.as_tensor(obs[:-1])).log_prob(mode)
        np.testing.assert_allclose(log_prob, expected.detach(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("n", "B"), [(3, 1), (3, 8), (20, 1)])
def test_categorical_frequencies(n, B):
    head = categorical(net(n, scale=4.0))
    obs = np.broadcast_to(np.ones(4, np.float32), (8001, B, 4))
    action, _ = collect(make(head, discrete(n)), discrete(n), obs)
    probs = head.distribution(torch.ones(4)).probs.detach().numpy()
    counts = np.bincount(action.ravel(), minlength=n)
    chi2 = ((counts - action.size * probs) ** 2 / (action.size * probs)).sum()
    assert chi2 < n - 1 + 5 * math.sqrt(2 * (n - 1))


@pytest.mark.parametrize("path", ["executor", "module", "torch"])
@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
def test_epsilon_greedy_frequencies(path, epsilon):
    head = epsilon_greedy(net(5), epsilon)
    obs = np.broadcast_to(np.ones(4, np.float32), (8001, 2, 4))
    policy = make(head, discrete(5), executor=path == "executor")
    if path == "torch":
        torch.manual_seed(0)
        action = head(torch.as_tensor(obs[:-1].copy()))[0].numpy()
    else:
        action, _ = collect(policy, discrete(5), obs)
    expected = np.full(5, epsilon / 5)
    expected[head.mode(torch.ones(4))] += 1 - epsilon
    counts = np.bincount(action.ravel(), minlength=5)
    assert not counts[expected == 0].any()
    some = expected * action.size
    some, counts = some[expected > 0], counts[expected > 0]
    chi2 = ((counts - some) ** 2 / some).sum()
    assert chi2 < 4 + 5 * math.sqrt(2 * 4)


def test_a_gradient_step_and_a_new_epsilon_are_followed_in_the_next_rollout():
    head = epsilon_greedy(net(3), 1.0)
    policy = make(head, discrete(3))
    obs = np.broadcast_to(np.ones(4, np.float32), (201, 8, 4))
    first, _ = collect(policy, discrete(3), obs)
    assert len(np.unique(first)) == 3
    head.epsilon.fill_(0)
    with torch.no_grad():
        head.net[2].bias.copy_(torch.tensor([0.0, 0.0, 9.0]))
    second, log_prob = collect(policy, discrete(3), obs)
    assert (second == 2).all()
    assert (log_prob == 0).all()


@pytest.mark.parametrize("wrong", [-0.1, 1.5, math.nan, "0.1", None, torch.ones(2)])
def test_epsilon_is_a_probability(wrong):
    with pytest.raises(BadOption, match="expected a number from 0 to 1"):
        epsilon_greedy(net(3), wrong)


def test_an_epsilon_that_was_changed_to_none_is_refused_before_a_rollout():
    head = epsilon_greedy(net(3))
    policy = make(head, discrete(3))
    collect(policy, discrete(3), observations())
    head.epsilon.fill_(1.5)
    with pytest.raises(BadOption, match="epsilon is tensor"):
        collect(policy, discrete(3), observations())


@pytest.mark.parametrize("kind", ["gaussian", "gaussian by state"])
def test_gaussian_moments(kind):
    head, spec = HEADS[kind]()
    obs = np.broadcast_to(np.ones(4, np.float32), (4001, 8, 4))
    action, _ = collect(make(head, spec), spec, obs)
    base = head.distribution(torch.ones(4)).base_dist
    mean, std = base.mean.detach().numpy(), base.stddev.detach().numpy()
    error = std / math.sqrt(action.shape[0] * action.shape[1])
    assert (abs(action.mean((0, 1)) - mean) < 5 * error).all()
    assert (abs(action.std((0, 1)) / std - 1) < 0.03).all()


@pytest.mark.parametrize("log_std", [-2.0, 0.0, 1.5])
def test_tanh_density_integrates_to_one(log_std):
    head = tanh_gaussian(nn.Linear(4, 2))
    nn.init.zeros_(head.net.weight)
    head.net.bias.data = torch.tensor([0.4, log_std])
    head.bind(box(1, low=-1.5, high=4.0))
    # Integrate over u, where the density is smooth: p(a(u)) da/du du.
    u = torch.linspace(-16, 16, 40001, dtype=torch.float64)
    squashed = 1.25 + 2.75 * torch.tanh(u)
    inside = (squashed - 1.25).abs() < 2.75 * (1 - 1e-12)
    u, squashed = u[inside], squashed[inside]
    head = head.double()
    density = (
        head.distribution(torch.zeros(len(u), 4, dtype=torch.float64))
        .log_prob(squashed[:, None])
        .exp()
    )
    total = torch.trapezoid(density * 2.75 / torch.cosh(u) ** 2, u)
    assert total.item() == pytest.approx(1, abs=2e-3)


def test_saturated_tanh_actions_have_a_finite_log_prob():
    head = tanh_gaussian(nn.Linear(4, 2))
    nn.init.zeros_(head.net.weight)
    head.net.bias.data = torch.tensor([30.0, -1.0])
    action, log_prob = collect(make(head, box(1)), box(1), observations())
    assert (action <= 3.0).all()
    assert (abs(log_prob - 2 * 30) < 10).all(), (
        "log |da/du| is about -2 u, so the log-prob grows with the mean"
    )


# --- clipped actions ------------------------------------------------------------------------------


def clipped(low=-0.5, high=1.0, log_std=0.0) -> Head:
    """A head for one action with the mean 0.2."""
    layer = nn.Linear(4, 1)
    nn.init.zeros_(layer.weight)
    nn.init.constant_(layer.bias, 0.2)
    head = gaussian(layer, log_std=log_std, clip=True)
    head.bind(box(1, low, high))
    return head


@pytest.mark.parametrize(("low", "high"), [(-0.5, 1.0), (-np.inf, 1.0), (-0.5, np.inf)])
def test_a_clipped_density_and_its_bounds_sum_to_one(low, high):
    head = clipped(low, high)
    distribution = head.distribution(torch.zeros(4))
    first, last = max(low, -8.0), min(high, 8.0)
    inside = torch.linspace(first, last, 20_001, dtype=torch.float64)[1:-1, None]
    mass = distribution.log_prob(inside).exp().sum() * (last - first) / 20_000
    for bound in (low, high):
        if np.isfinite(bound):
            mass += distribution.log_prob(torch.tensor([bound])).exp().item()
    assert abs(mass - 1) < 1e-3


def test_clipped_actions_are_at_the_bounds_as_often_as_their_log_prob_says():
    head = clipped()
    obs = np.zeros((8001, 4, 4), np.float32)
    action, log_prob = collect(make(head, box(1, -0.5, 1.0)), box(1, -0.5, 1.0), obs)
    for bound in (-0.5, 1.0):
        at = (action == bound)[..., 0]
        probability = (
            head.distribution(torch.zeros(4))
            .log_prob(torch.tensor([bound]))
            .exp()
            .item()
        )
        assert abs(at.mean() - probability) < 5 * math.sqrt(probability / at.size)
        np.testing.assert_allclose(np.exp(log_prob[at]), probability, rtol=1e-4)


@pytest.mark.parametrize("log_std", [-1.0, 0.0, 1.5])
@pytest.mark.parametrize("high", [1.0, np.inf])
def test_the_entropy_of_clipped_actions_is_the_mean_of_minus_log_prob(log_std, high):
    torch.manual_seed(0)
    distribution = clipped(high=high, log_std=log_std).distribution(torch.zeros(4))
    drawn = distribution.sample((200_000,))
    assert drawn.min() == -0.5
    assert drawn.max() <= high
    estimate = -distribution.log_prob(drawn).mean()
    assert abs(distribution.entropy() - estimate) < 0.01


def test_gradients_of_clipped_actions_are_finite_also_far_beyond_a_bound():
    head = clipped(-np.inf, 1.0)
    mean = head.net.bias
    for action in (torch.tensor([1.0]), torch.tensor([-30.0])):
        mean.grad = None
        head.distribution(torch.zeros(4)).log_prob(action).backward()
        assert mean.grad.isfinite().all()
        assert head.log_std.grad.isfinite().all()
        assert mean.grad.item() > 0 or action < 0
    with torch.no_grad():
        mean.fill_(-60.0)
    assert head.distribution(torch.zeros(4)).log_prob(torch.tensor([1.0])) < -1000


def test_drawing_on_a_device_clips_too():
    torch.manual_seed(0)
    head = clipped()
    out = torch.full((5000, 1), 0.2)
    action, log_prob = head.draw(out, deterministic=False)
    assert action.min() == -0.5
    assert action.max() == 1.0
    expected = head.distribution(torch.zeros(5000, 4)).log_prob(action)
    np.testing.assert_allclose(log_prob.detach(), expected.detach(), rtol=1e-5)


@pytest.mark.parametrize("x", [-40.0, -25.0, -20.0, -19.9, -3.0, 0.0, 4.0])
def test_the_log_of_the_normal_distribution_function(x):
    expected = torch.special.log_ndtr(torch.tensor(x, dtype=torch.float64)).item()
    assert sampling.log_normal_cdf(x) == pytest.approx(expected, rel=1e-7, abs=1e-9)


def test_bounds_are_no_part_of_the_state_and_are_kept_in_copies():
    head = clipped()
    assert set(head.state_dict()) == {"net.weight", "net.bias", "log_std"}
    again = copy.deepcopy(head)
    assert again.mode(torch.zeros(4)).item() == pytest.approx(0.2)
    assert again.low.item() == -0.5


def test_impossible_actions_are_never_taken():
    class Masked(nn.Module):
        def forward(self, x):
            return torch.cat([x[..., :2], torch.full_like(x[..., :1], -torch.inf)], -1)

    action, log_prob = collect(
        make(categorical(Masked()), discrete(3)), discrete(3), observations()
    )
    assert (action < 2).all()
    assert np.isfinite(log_prob).all()


def test_weights_updated_between_rollouts_are_used(case):
    head, spec = case
    policy, obs = make(head, spec), observations()
    collect(policy, spec, obs)
    with torch.no_grad():
        for p in head.parameters():
            p.mul_(1.5)
    fresh = make(head, spec)
    assert (collect(policy, spec, obs)[0] == collect(fresh, spec, obs)[0]).all()


def test_a_replaced_layer_is_used_from_the_next_rollout_on():
    head, spec, obs = categorical(net(3)), discrete(3), observations()
    policy = make(head, spec)
    lane, rng = lane_for(policy, spec, obs), GroupRng(0)
    policy.first({OBS: lane.rows(OBS)[0]}, rng)
    assert policy.path == "numpy executor"
    head.net[2] = nn.Linear(16, 3)
    nn.init.zeros_(head.net[2].weight)
    head.net[2].bias.data = torch.tensor([0.0, 90.0, 0.0])
    with torch.no_grad():
        act = policy.start(lane, rng)
        for t in range(T):
            act(t)
    assert (lane.arrays[ACTION] == 1).all()
    head.net.register_forward_hook(lambda module, args, out: -out)
    with torch.no_grad():
        act = policy.start(lane, rng)
        act(0)
    assert policy.path == "module"
    assert (lane.arrays[ACTION][0] != 1).all()


def test_float64_networks():
    obs = observations().astype(np.float64)
    results = []
    for executor in (True, False):
        head = categorical(net(3).double())
        policy = make(head, discrete(3), executor=executor)
        lane = Slot(
            Layout(
                T,
                8,
                (
                    Column(OBS, (4,), obs.dtype, carry=True),
                    Column(ACTION, (), np.dtype(int)),
                    *policy.columns(),
                ),
            )
        ).lanes[0]
        lane.arrays[OBS][...] = obs
        policy.first({OBS: lane.rows(OBS)[0]}, GroupRng(0))
        assert policy.path == ("torch executor" if executor else "module")
        with torch.no_grad():
            policy.start(lane, GroupRng(0))(0)
        results.append(lane.arrays[LOG_PROB][0].copy())
    assert (results[0] == results[1]).all()


def test_several_observations_come_as_a_nested_dict():
    class Adds(nn.Module):
        def forward(self, obs):
            return obs["a"] + obs["b"]["c"]

    keys, spec = [("a",), ("b", "c")], box()
    policy = make(deterministic(Adds()), spec, keys=keys)
    columns = [Column(key, (2,), np.dtype(np.float32), carry=True) for key in keys]
    lane = Slot(
        Layout(2, 3, (*columns, Column(ACTION, (2,), np.dtype(np.float32))))
    ).lanes[0]
    lane.arrays[keys[0]][...], lane.arrays[keys[1]][...] = 1, 2
    policy.first({key: lane.rows(key)[0] for key in keys}, GroupRng(0))
    policy.start(lane, GroupRng(0))(0)
    assert policy.path == "module"
    assert (lane.arrays[ACTION][0] == 3).all()


def test_forward_and_entropy(case):
    head, spec = case
    head.bind(spec)
    action, extras = head(torch.randn(2, 5, 4))
    assert action.shape == (2, 5, *spec.shape)
    if head.has_log_prob:
        assert extras["action_log_prob"].shape == (2, 5)
        if head.name != "tanh_gaussian":
            assert head.distribution(torch.randn(2, 5, 4)).entropy().shape == (2, 5)


@pytest.mark.parametrize(
    ("head", "spec", "match"),
    [
        (categorical(net(3)), box(), "categorical.*gaussian"),
        (gaussian(net(2)), discrete(), "gaussian.*categorical"),
        (tanh_gaussian(net(4)), box(high=np.inf), "unbounded"),
        (gaussian(net(2), clip=True), box(2, -np.inf, np.inf), "nothing to clip to"),
        (categorical(net(5), nvec=(2, 3)), multi(3, 2), "nvec"),
        (gaussian(net(2)), box(3), "log_std=torch.zeros"),
        (deterministic(net(3)), multi(2, 2), "categorical"),
    ],
)
def test_a_head_for_another_space_is_refused(head, spec, match):
    with pytest.raises(BadOption, match=match):
        make(head, spec)


def test_log_std_needs_a_visible_number_of_actions():
    with pytest.raises(BadOption, match="log_std=torch.zeros"):
        gaussian(nn.Tanh())


@pytest.mark.parametrize(
    ("head", "spec", "match"),
    [
        (
            categorical(net(3)),
            discrete(2),
            r"categorical.*\(5, 3\).*\(5, 2\).*Discrete\(2\)",
        ),
        (gaussian(net(2), log_std=None), box(2), "4 values"),
        (tanh_gaussian(net(3)), box(2), "4 values"),
        (deterministic(nn.Sequential(nn.Linear(4, 2), nn.Flatten(0))), box(2), "shape"),
        (categorical(nn.LSTM(4, 3)), discrete(3), "tuple"),
    ],
)
def test_outputs_that_do_not_fit_are_named(head, spec, match):
    with pytest.raises(BadPolicyOutput, match=match):
        make(head, spec).first({OBS: torch.randn(5, 4)}, GroupRng(0))


@pytest.mark.parametrize("B", [1, 8])
@pytest.mark.parametrize("executor", [True, False])
def test_nan_never_reaches_the_environment(case, executor, B):
    head, spec = case
    obs = observations(B)
    obs[3, B - 1] = np.nan
    policy = make(head, spec, executor=executor)
    lane, rng = lane_for(policy, spec, obs), GroupRng(0)
    policy.first({OBS: lane.rows(OBS)[0]}, rng)
    with torch.no_grad():
        act = policy.start(lane, rng)
        for t in range(3):
            act(t)
        with pytest.raises(
            BadPolicyOutput, match=rf"environments \[{B - 1}\] at step 3"
        ):
            act(3)


def test_a_network_that_writes_into_the_observation_is_refused():
    head = categorical(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 3)))
    with pytest.raises(BadPolicyOutput, match="in place"):
        make(head, discrete(3)).first({OBS: torch.randn(5, 4)}, GroupRng(0))
