"""The distribution of squashed actions, beside the one that torch puts together."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributions as D

from muster.policies.distributions import SquashedNormal

DRAWS = ("rsample", "sample", "given")


class Tanh(D.TanhTransform):
    def _inverse(self, y):
        limit = 1 - torch.finfo(y.dtype).eps
        return y.clamp(-limit, limit).atanh()


def parameters(lead, shape, dtype=torch.float64):
    """Mean and logarithm of the deviation, with gradients, and the middle and half of an interval."""
    mean = torch.randn((*lead, *shape), dtype=dtype)
    log_std = torch.randn((*lead, *shape), dtype=dtype) / 2
    middle = torch.randn(shape, dtype=dtype)
    halfwidth = torch.rand(shape, dtype=dtype) + 0.5
    return mean.requires_grad_(), log_std.requires_grad_(), middle, halfwidth


def of_torch(mean, log_std, middle, halfwidth):
    normal = D.Independent(D.Normal(mean, log_std.exp()), middle.ndim)
    scale = D.AffineTransform(middle, halfwidth, cache_size=1)
    return D.TransformedDistribution(normal, [Tanh(1), scale])


def ours(mean, log_std, middle, halfwidth):
    return SquashedNormal(mean, log_std, middle, halfwidth, middle.ndim)


def drawn(distribution, how, sample_shape=()):
    torch.manual_seed(5)
    if how == "given":
        return distribution.sample(sample_shape).clone()
    return getattr(distribution, how)(sample_shape)


@given(
    lead=st.lists(st.integers(1, 3), max_size=2),
    shape=st.lists(st.integers(1, 3), max_size=2),
    sample_shape=st.lists(st.integers(1, 3), max_size=1),
    how=st.sampled_from(DRAWS),
    seed=st.integers(0, 1000),
)
def test_draws_densities_and_gradients_are_those_of_torch(
    lead, shape, sample_shape, how, seed
):
    torch.manual_seed(seed)
    given_parameters = parameters(lead, shape)
    weights = torch.randn((*sample_shape, *lead), dtype=torch.float64)
    found = []
    for make in (ours, of_torch):
        distribution = make(*given_parameters)
        action = drawn(distribution, how, torch.Size(sample_shape))
        log_prob = distribution.log_prob(action)
        loss = (log_prob * weights).sum() + action.square().sum()
        found.append(
            (action, log_prob, *torch.autograd.grad(loss, given_parameters[:2]))
        )
    for own, expected in zip(*found, strict=True):
        assert own.shape == expected.shape
        torch.testing.assert_close(own, expected, rtol=1e-8, atol=1e-8)
    assert distribution.batch_shape == torch.Size(lead)
    assert ours(*given_parameters).event_shape == torch.Size(shape)


@pytest.mark.parametrize("how", DRAWS)
def test_without_gradients_the_density_is_the_same(how):
    torch.manual_seed(0)
    given_parameters = parameters((4,), (2,))
    with torch.no_grad():
        distributions = ours(*given_parameters), of_torch(*given_parameters)
        log_probs = [each.log_prob(drawn(each, how)) for each in distributions]
    torch.testing.assert_close(*log_probs)


def test_only_the_last_action_is_known():
    torch.manual_seed(0)
    given_parameters = parameters((4,), (2,))
    distribution = ours(*given_parameters)
    first = distribution.rsample()
    distribution.rsample()
    expected = of_torch(*given_parameters).log_prob(first)
    torch.testing.assert_close(distribution.log_prob(first), expected)


def test_an_action_that_was_drawn_as_a_constant_may_get_gradients():
    torch.manual_seed(0)
    given_parameters = parameters((4,), (2,))
    gradients = []
    distribution = ours(*given_parameters)
    action = distribution.sample()
    for known, value in (
        (distribution, action.requires_grad_()),
        (of_torch(*given_parameters), action.detach().clone().requires_grad_()),
    ):
        log_prob = known.log_prob(value).sum()
        gradients.append(torch.autograd.grad(log_prob, (value, *given_parameters[:2])))
    for own, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(own, expected)


def test_the_mode_is_the_squashed_mean():
    mean, log_std, middle, halfwidth = parameters((4,), (2,))
    expected = middle + halfwidth * mean.tanh()
    torch.testing.assert_close(ours(mean, log_std, middle, halfwidth).mode, expected)


def test_an_action_at_a_bound_has_the_density_of_the_nearest_inside():
    mean, log_std, middle, halfwidth = parameters((), (2,), torch.float32)
    distribution = ours(mean, log_std, middle, halfwidth)
    inside = middle + halfwidth * (1 - torch.finfo(torch.float32).eps)
    expected = distribution.log_prob(inside)
    assert distribution.log_prob(middle + halfwidth).isfinite()
    torch.testing.assert_close(
        distribution.log_prob(middle + halfwidth), expected, rtol=0.1, atol=1.0
    )


def test_the_divergence_is_that_of_torch():
    torch.manual_seed(0)
    mean, log_std, middle, halfwidth = parameters((4,), (2, 3))
    other = (mean.detach() + 0.3, log_std.detach() - 0.2, middle, halfwidth)
    found = []
    for make in (ours, of_torch):
        p = make(mean, log_std, middle, halfwidth)
        divergence = D.kl_divergence(p, make(*other))
        found.append((divergence, *torch.autograd.grad(divergence.sum(), mean)))
    for own, expected in zip(*found, strict=True):
        torch.testing.assert_close(own, expected)


def test_the_divergence_of_actions_with_different_bounds_is_refused():
    mean, log_std, middle, halfwidth = parameters((4,), (2,))
    p = ours(mean, log_std, middle, halfwidth)
    with pytest.raises(NotImplementedError, match="different bounds"):
        D.kl_divergence(p, ours(mean, log_std, middle, 2 * halfwidth))


@pytest.fixture
def checked():
    """Torch's distributions check what they get, which other packages turn off for all."""
    try:
        D.Normal(math.nan, 1.0)
        before = False
    except ValueError:
        before = True
    D.Distribution.set_default_validate_args(True)
    yield
    D.Distribution.set_default_validate_args(before)


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("of", ["mean", "log_std", "value"])
def test_what_is_not_a_number_is_refused(of):
    mean, log_std, middle, halfwidth = parameters((4,), (2,))
    value = torch.zeros(4, 2, dtype=torch.float64)
    with torch.no_grad():
        {"mean": mean, "log_std": log_std, "value": value}[of][1, 1] = math.nan
    with pytest.raises(ValueError, match="found invalid values|within the support"):
        ours(mean, log_std, middle, halfwidth).log_prob(value)
