"""Sampling: turns a network's output into rows of actions and log-probabilities, in NumPy.

Noise is drawn once per rollout, or for the next rows of one that stays open. All paths of a head with
rows on the host (NumPy, torch, module, GPU) use the same noise, so that their data are equal up to
the rounding of the network::

    emitter = categorical(rows, nvec=(2,), low=zeros)
    emitter.draw(0, T, rng.numpy)
    for t in range(T):
        emitter.emit(t, logits)  # float32 [B, n]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from muster.errors import BadEnvOutput, BadPolicyOutput, UnsupportedSpace
from muster.keys import ACTION, ACTION_MASK, INFO, Key, dotted
from muster.memory.specs import Array, choices_of, is_joint_mask

if TYPE_CHECKING:
    import torch

    from muster.env_spec import EnvSpec
else:
    from muster.utils import lazy_torch as torch

Emit = Callable[[int, Array], None]
Draw = Callable[[int, int, "np.random.Generator | None"], None]
Read = Callable[[], Array]  # of a parameter that may change

# Below this many actions, one environment's row is faster in Python floats: 1.5 us against 6.9 for
# 2 actions, 3.7 against 6.3 for 18.
SMALL = 16
# Bounds of Gumbel noise: in float32 exp(difference of two) stays finite, so that the
# log-probability of the chosen action needs no maximum: logits[j] - logits[chosen] <= noise[chosen]
# - noise[j].
LEAST_EXPONENTIAL = 1e-30


class Emitter(NamedTuple):
    """Completes rows of actions and log-probabilities.

    Attributes:
        draw: called with the first of the next rows, the row behind the last one, and the generator
            of their noise; None: the mode. It also reads the head's own parameters, so it is called
            before each rollout, and before each request of one that stays open. For any number of
            rows it draws the same as row by row.
        emit: called with a row, and the network's output for it, ``[B, n]``.
    """

    draw: Draw
    emit: Emit


def _draws_nothing(begin: int, end: int, rng: np.random.Generator | None) -> None:
    """Draw no noise."""


@dataclass(frozen=True)
class ActionMask:
    """The action mask of one action, ``[B, *shape]`` per row.

    It has an entry for each choice of each variable, one variable after another, or, if it is
    ``joint``, one for each combination of choices, in C order. Actions of ``agents`` with equal
    spaces have a mask for each, one after another.

    Attributes:
        nvec, low: number of choices, and first choice, of each variable; those of all agents.
        one_hot: actions are one-hot vectors, one after another.
    """

    env_name: str
    action: Key
    key: Key
    nvec: tuple[int, ...]
    low: tuple[int, ...]
    joint: bool = False
    agents: int = 1
    one_hot: bool = False

    @property
    def drawn(self) -> tuple[int, ...]:
        """Numbers of choices of the variables that are drawn independently: for a joint mask, one
        for each agent.
        """
        if not self.joint:
            return self.nvec
        combinations = math.prod(self.own_nvec)
        return (combinations,) * self.agents

    @property
    def own_nvec(self) -> tuple[int, ...]:
        """Numbers of choices of one agent's variables."""
        variables = len(self.nvec) // self.agents
        return self.nvec[:variables]

    def draw(self, rows: Array, uniform: Array) -> Array:
        """Return uniformly random allowed actions, ``[B, n]``, from uniform numbers ``[B,
        len(drawn)]``.

        Raises:
            BadEnvOutput: a variable has no allowed choice.
        """
        widest = max(self.drawn)
        flat = rows.reshape(len(rows), -1) != 0
        legal = flat
        cells = len(self.drawn) * widest
        if cells != sum(self.drawn):
            legal = np.zeros((len(rows), cells), bool)
            legal[:, _places(self.drawn)] = flat
        legal = legal.reshape(*uniform.shape, -1)
        count = legal.sum(-1)
        if not count.all():
            refused = self.refused(rows)
            if refused is not None:
                raise refused
        nth = (uniform * count).astype(np.int64)
        is_beyond = legal.cumsum(-1) > nth[..., None]
        index = is_beyond.argmax(-1)
        if self.joint:
            choices = np.unravel_index(index, self.own_nvec)
            index = np.stack(choices, -1)
            index = index.reshape(len(rows), -1)
        if not self.one_hot:
            drawn: Array = index + np.array(self.low)
            return drawn
        vectors = np.zeros((len(rows), sum(self.nvec)), np.int64)
        first = np.cumsum((0, *self.nvec[:-1]))
        np.put_along_axis(vectors, index + first, 1, 1)
        return vectors

    def draw_on_device(self, rows: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        """Draw like ``draw``, without waiting for the device: a variable without allowed choices
        gets its first one.
        """
        flat = rows.reshape(len(rows), -1) != 0
        legal = torch.split(flat, list(self.drawn), 1)
        chosen = []
        for part, numbers in zip(legal, uniform.unbind(1), strict=True):
            total = part.cumsum(1)
            nth = (numbers * total[:, -1]).long()
            is_beyond = total > nth[:, None]
            index = is_beyond.byte().argmax(1)
            if self.joint:
                chosen += split_index(index, self.own_nvec)
            else:
                chosen.append(index)
        if self.one_hot:
            one_hot = torch.nn.functional.one_hot
            vectors = []
            for choice, n in zip(chosen, self.nvec, strict=True):
                vectors.append(one_hot(choice, n))
            return torch.cat(vectors, 1)
        actions = []
        for choice, low in zip(chosen, self.low, strict=True):
            actions.append(choice + low)
        return torch.stack(actions, 1)

    def refused(self, rows: Array) -> BadEnvOutput | None:
        """Return the error for masks without an allowed choice, ``[B, *shape]``; None if there is
        none.
        """
        flat = rows.reshape(len(rows), -1) != 0
        ends = np.cumsum(self.drawn)[:-1]
        parts = np.split(flat, ends, 1)
        allows = np.logical_and.reduce([part.any(1) for part in parts])
        bad = np.flatnonzero(~allows).tolist()
        if not bad:
            return None
        return BadEnvOutput(
            f"{self.env_name}[{bad[0]}]: {dotted(self.key)} allows no action (environments"
            f" {bad[:8]}). A policy chooses among allowed actions only: let the environment allow"
            " at least one, or end the episode before. collector.reset() starts new episodes."
        )


def masks_of(spec: EnvSpec) -> list[ActionMask]:
    """Return the masks for random actions: none if the env batch's own are allowed."""
    if spec.samples_allowed:
        return []
    return all_masks_of(spec)


def all_masks_of(spec: EnvSpec) -> list[ActionMask]:
    """Return the action masks, except those that ``check_masks`` refuses."""
    masks = []
    for action, key in spec.action_masks.items():
        mask = _mask_or_problem(spec, action, key)
        if isinstance(mask, ActionMask):
            masks.append(mask)
    return masks


def check_masks(spec: EnvSpec) -> None:
    """Raise ``UnsupportedSpace`` if an action mask does not fit its action."""
    for action, key in spec.action_masks.items():
        problem = _mask_or_problem(spec, action, key)
        if isinstance(problem, str):
            raise UnsupportedSpace(
                f"{spec.name}: {problem}. Change the mask, or rename the key if it is not a mask of"
                " allowed actions."
            )


def _mask_or_problem(env: EnvSpec, action: Key, key: Key) -> ActionMask | str:
    """Return the mask ``key`` of an action, or what is wrong with it."""
    spec = env.action_specs[action]
    mask = env.carried_specs[key]
    place = key[1:] if key[0] == INFO else key
    if place[:1] == ACTION_MASK and place[1:] != action[1:]:
        parts = [name for name, each in env.action_specs.items() if each.is_discrete]
        if len(place) > 1 or parts != [action]:
            names = [dotted(each) for each in env.action_specs]
            above = key[: len(key) - len(place)]
            root = (*above, *ACTION_MASK)
            wanted = [dotted((*root, *each[1:])) for each in parts]
            return (
                f"{dotted(key)} is a mask of no action: the actions are {names}. Expected the masks"
                f" {wanted or 'of discrete actions'}, those of discrete actions by their names"
            )
    if not spec.is_discrete:
        return (
            f"{dotted(key)} is an action mask, and {dotted(action)} has {spec}: masks are for"
            " discrete actions (Discrete, MultiDiscrete, MultiBinary)"
        )
    if not mask.is_tensor:
        return f"the action mask {dotted(key)} has no fixed shape: expected an array"
    nvec, low = choices_of(spec)
    agents = 1
    shape = mask.shape
    # (team, "action"), and a mask for each agent
    if len(action) == 2 and action[1:] == ACTION and spec.shape:
        agents = spec.shape[0]
        shape = mask.shape[1:]
    try:
        variables = len(nvec) // agents
        joint = is_joint_mask(nvec[:variables], shape)
    except ValueError as error:
        return f"the action mask {dotted(key)} with {error}"
    return ActionMask(
        env.name,
        action,
        key,
        nvec,
        low,
        joint,
        agents,
        bool(spec.one_hot),
    )


def split_index(index: torch.Tensor, nvec: tuple[int, ...]) -> list[torch.Tensor]:
    """Return the choice of each variable from the number of a combination, in C order; like
    ``np.unravel_index``.
    """
    parts = []
    for n in reversed(nvec):
        parts.append(index % n)
        index = index // n
    return parts[::-1]


def _places(nvec: tuple[int, ...]) -> Array:
    """Return the places of all choices where every variable has as many places as the largest one."""
    choice = np.arange(max(nvec))
    is_choice = choice < np.array(nvec)[:, None]
    return np.flatnonzero(is_choice)


class ActionRows:
    """The actions (``[T, B, *shape]``) and log-probabilities (``[T, B]`` float32, or None) of one
    rollout.

    ``masked`` are an action mask and its rows, ``[T, B, *shape]``; None: all actions are allowed.
    """

    def __init__(
        self,
        name: str,
        action: Array,
        log_prob: Array | None,
        masked: tuple[ActionMask, Array] | None = None,
    ) -> None:
        self.name = name
        self.action = action
        self._masked = masked
        self.T, self.B = action.shape[:2]
        if log_prob is None:
            log_prob = np.empty((self.T, self.B), np.float32)
        self.log_prob_array = log_prob

    @cached_property
    def flat(self) -> list[Array]:
        return list(self.action.reshape(self.T, -1))

    @cached_property
    def matrix(self) -> list[Array]:
        return list(self.action.reshape(self.T, self.B, -1))

    @cached_property
    def log_prob(self) -> list[Array]:
        return list(self.log_prob_array)

    @property
    def mask(self) -> ActionMask | None:
        """The action mask."""
        return None if self._masked is None else self._masked[0]

    @cached_property
    def joint_mask(self) -> ActionMask | None:
        """The action mask, if it is one of combinations of choices."""
        if self._masked is None or not self._masked[0].joint:
            return None
        return self._masked[0]

    @cached_property
    def legal(self) -> list[Array] | None:
        """Rows of the action mask, ``[B, n]`` each; 0: not allowed."""
        if self._masked is None:
            return None
        _, rows = self._masked
        return list(rows.reshape(len(rows), self.B, -1))

    def of_combinations(self) -> ActionRows:
        """Return rows for the numbers of combinations of a joint mask, with the same
        log-probabilities and mask.
        """
        assert self._masked is not None
        mask, rows = self._masked
        numbers = np.zeros((self.T, self.B, mask.agents), np.int64)
        of_numbers = replace(
            mask,
            nvec=mask.drawn,
            low=(0,) * mask.agents,
            joint=False,
            agents=1,
        )
        return ActionRows(self.name, numbers, self.log_prob_array, (of_numbers, rows))

    def not_finite(self, t: int, params: Array) -> BadPolicyOutput | BadEnvOutput:
        if self._masked is not None:
            mask, legal = self._masked
            refused = mask.refused(legal[t])
            if refused is not None:
                return refused
        if self.name == "categorical":
            wrong = np.isnan(params).any(1)
        else:
            wrong = ~np.isfinite(params).all(1)
        bad = np.flatnonzero(wrong)
        who = f"environments {bad[:8].tolist()}" if len(bad) else "some environment"
        return BadPolicyOutput(
            f"{self.name}: the network returned NaN or infinity for {who} at step {t}; no such"
            " action can be taken. Check the observations there and the last weight update"
            " (learning rate, gradient norm)."
        )


def categorical(
    rows: ActionRows,
    *,
    nvec: tuple[int, ...],
    low: Array,
) -> Emitter:
    """Sample one or several categorical variables per environment; the mode is the most probable
    value of each.

    Variables have ``nvec`` choices, numbered from ``low``; ``params`` are their logits,
    concatenated. With a joint mask, see ``_categorical_jointly``.
    """
    mask = rows.joint_mask
    if mask is not None:
        return _categorical_jointly(rows, mask)
    B = rows.B
    k = len(nvec)
    n = max(nvec)
    if B * k == 1 and n <= SMALL:
        return _categorical_one(rows, n, int(low[0]))
    gumbel = np.zeros((rows.T, B * k, n), np.float32)

    def draw(begin: int, end: int, rng: np.random.Generator | None) -> None:
        if rng is not None:
            gumbel[begin:end] = _gumbel(rng, (end - begin, B * k, n))

    noise = list(gumbel)
    actions = rows.flat
    log_probs = rows.log_prob
    not_finite = rows.not_finite
    direct = rows.action.dtype == np.int64 and not low.any()
    start = np.tile(low, B)
    scores = np.empty((B * k, n), np.float32)
    index = np.empty(B * k, np.intp)
    at = np.empty(B * k, np.intp)
    offsets = np.arange(0, B * k * n, n)
    chosen = np.empty(B * k, np.float32)
    chosen_column = chosen[:, None]
    ones_n = np.ones(n, np.float32)
    ones_k = np.ones(k, np.float32)
    ones_B = np.ones(B, np.float32)
    # Variables with fewer choices than others are padded with impossible choices.
    padded = None if min(nvec) == n else np.full((B, k * n), -np.inf, np.float32)
    where = _places(nvec)
    legal = rows.legal
    impossible = np.float32(-np.inf)
    add = np.add
    subtract = np.subtract
    exp = np.exp
    log = np.log
    negative = np.negative
    isfinite = math.isfinite
    several = k > 1

    def emit(t: int, logits: Array) -> None:
        if legal is not None:
            logits = np.where(legal[t], logits, impossible)
        if padded is not None:
            padded[:, where] = logits
            logits = padded
        if several:
            logits = logits.reshape(-1, n)
        add(logits, noise[t], scores)
        picked = actions[t] if direct else index
        scores.argmax(1, picked)
        if not direct:
            add(index, start, out=actions[t], casting="unsafe")
        add(picked, offsets, at)
        logits.take(at, None, chosen, "clip")
        if legal is not None and chosen.min() == impossible:
            raise not_finite(t, logits.reshape(-1, k * n))
        exp(subtract(logits, chosen_column, scores), scores)
        out = log_probs[t]
        if several:
            log(scores.dot(ones_n), chosen).reshape(-1, k).dot(ones_k, out)
        else:
            log(scores.dot(ones_n, out), out)
        negative(out, out)
        if not isfinite(out.dot(ones_B)):
            raise not_finite(t, logits.reshape(-1, k * n))

    return Emitter(draw, emit)


def _gumbel(rng: np.random.Generator, size: tuple[int, ...]) -> Array:
    """Return Gumbel noise, in float64."""
    exponential = rng.standard_exponential(size)
    noise: Array = -np.log(np.maximum(exponential, LEAST_EXPONENTIAL))
    return noise


def _categorical_jointly(rows: ActionRows, mask: ActionMask) -> Emitter:
    """Sample from the product of categorical variables, renormalised over the allowed combinations
    of choices.
    """
    combinations = rows.of_combinations()
    start = np.zeros(mask.agents, np.int64)
    of_numbers = categorical(combinations, nvec=mask.drawn, low=start)
    emit_numbers = of_numbers.emit
    numbers = combinations.matrix
    actions = rows.matrix
    nvec = mask.own_nvec
    low = np.array(mask.low)
    ends = np.cumsum(nvec).tolist()

    def emit(t: int, logits: Array) -> None:
        own = logits.reshape(-1, ends[-1])  # of each agent
        joint = own[:, : ends[0]]
        for begin, end in pairwise(ends):
            joint = (joint[:, :, None] + own[:, None, begin:end]).reshape(len(own), -1)
        emit_numbers(t, joint.reshape(rows.B, -1))
        choices = np.stack(np.unravel_index(numbers[t], nvec), -1)
        np.add(choices.reshape(rows.B, -1), low, out=actions[t], casting="unsafe")

    return Emitter(of_numbers.draw, emit)


def _categorical_one(rows: ActionRows, n: int, low: int) -> Emitter:
    gumbel = [[0.0] * n for _ in range(rows.T)]

    def draw(begin: int, end: int, rng: np.random.Generator | None) -> None:
        if rng is not None:
            noise = _gumbel(rng, (end - begin, n)).astype(np.float32)
            gumbel[begin:end] = noise.tolist()

    actions = rows.flat
    log_probs = rows.log_prob
    not_finite = rows.not_finite
    legal = rows.legal
    exp = math.exp
    log = math.log
    impossible = np.float32(-np.inf)

    def emit(t: int, logits: Array) -> None:
        if legal is not None:
            logits = np.where(legal[t], logits, impossible)
        values = logits.tolist()[0]
        scores = [
            value + noise for value, noise in zip(values, gumbel[t], strict=False)
        ]
        action = scores.index(max(scores))
        chosen = values[action]
        total = 0.0
        for value in values:
            total += exp(value - chosen)
        if not total < math.inf:
            raise not_finite(t, logits)
        actions[t][0] = action + low
        log_probs[t][0] = -log(total)

    return Emitter(draw, emit)


def gaussian(rows: ActionRows, *, log_std: Read) -> Emitter:
    """``params + exp(log_std) * noise`` with a standard deviation (``[n]``) that does not depend on
    the state.

    The log-probability depends on the noise only, and is computed for all rows at once. It is still
    stored row by row, because a row that ``act`` has not reached may contain the output of the
    policy's first call.
    """
    n = rows.matrix[0].shape[1]
    scaled = np.zeros((rows.T, rows.B, n), np.float32)
    of_rows = np.zeros((rows.T, rows.B), np.float32)

    def draw(begin: int, end: int, rng: np.random.Generator | None) -> None:
        unit, base = _normal(end - begin, rows.B, n, rng)
        logarithm = log_std()
        np.multiply(unit, np.exp(logarithm), out=scaled[begin:end])
        of_rows[begin:end] = base - np.add.reduce(logarithm)

    noise = list(scaled)
    densities = list(of_rows)
    actions = rows.matrix
    log_probs = rows.log_prob
    not_finite = rows.not_finite
    add = np.add
    copyto = np.copyto
    isfinite = math.isfinite
    ones = np.ones(rows.B * n, np.float32)

    def emit(t: int, mean: Array) -> None:
        if not isfinite(mean.reshape(-1).dot(ones)):
            raise not_finite(t, mean)
        add(mean, noise[t], actions[t])
        copyto(log_probs[t], densities[t])

    return Emitter(draw, emit)


def gaussian_by_state(
    rows: ActionRows,
    *,
    log_std_bounds: tuple[float, float],
    squash: tuple[Array, Array] | None,
) -> Emitter:
    """Like ``gaussian``, with ``params`` the means and log standard deviations (clamped to bounds),
    ``[B, 2 n]``.

    ``squash`` has middle and half width, ``[n]``, of the interval to which tanh maps; None: actions
    are not bounded.
    """
    B = rows.B
    n = rows.matrix[0].shape[1]
    of_squash = 0.0
    if squash is not None:
        middle, half = squash
        of_squash = 2 * n * math.log(2) + np.log(half).sum()
        low = middle - half
        high = middle + half
        minus_two = np.full((B, n), -2, np.float32)
    units = np.zeros((rows.T, B, n), np.float32)
    of_rows = np.zeros((rows.T, B), np.float32)

    def draw(begin: int, end: int, rng: np.random.Generator | None) -> None:
        units[begin:end], base = _normal(end - begin, B, n, rng)
        of_rows[begin:end] = base - of_squash

    noise = list(units)
    constant = list(of_rows)
    lowest_log_std, highest_log_std = log_std_bounds
    least = np.full((B, n), lowest_log_std, np.float32)
    most = np.full((B, n), highest_log_std, np.float32)
    log_std = np.empty((B, n), np.float32)
    u = np.empty((B, n), np.float32)
    part = np.empty((B, n), np.float32)
    ones = np.ones(n, np.float32)
    twos = np.full(n, 2, np.float32)
    ones_all = np.ones(2 * B * n, np.float32)
    actions = rows.matrix
    log_probs = rows.log_prob
    not_finite = rows.not_finite
    add = np.add
    subtract = np.subtract
    multiply = np.multiply
    exp = np.exp
    isfinite = math.isfinite
    maximum = np.maximum
    minimum = np.minimum
    absolute = np.absolute
    log1p = np.log1p
    tanh = np.tanh
    total = np.empty(B, np.float32)

    def emit(t: int, params: Array) -> None:
        if not isfinite(params.reshape(-1).dot(ones_all)):
            raise not_finite(t, params)
        maximum(params[:, n:], least, out=log_std)
        minimum(log_std, most, out=log_std)
        multiply(exp(log_std, part), noise[t], part)
        action = actions[t]
        out = log_probs[t]
        subtract(constant[t], log_std.dot(ones, total), out)
        if squash is None:
            add(params[:, :n], part, action)
            return
        add(params[:, :n], part, u)
        tanh(u, part)
        add(multiply(part, half, part), middle, part)
        minimum(
            maximum(part, low, out=part), high, out=action
        )  # rounding can exceed the bounds
        # log(1 - tanh(u)^2) = 2 (log 2 - |u| - log(1 + exp(-2 |u|))): exact where tanh(u) rounds to
        # 1.
        absolute(u, u)
        log1p(exp(multiply(u, minus_two, part), part), part)
        add(out, add(u, part, u).dot(twos, total), out)

    return Emitter(draw, emit)


def clipped(
    rows: ActionRows,
    emitter: Emitter,
    low: Array,
    high: Array,
    *,
    log_std: Read | None,
    log_std_bounds: tuple[float, float],
) -> Emitter:
    """Clip the actions of ``gaussian`` or ``gaussian_by_state`` to ``[low, high]``, ``[n]`` each.

    The log-probability of a bound is that of all values beyond it. ``log_std`` is that of
    ``gaussian``; None: the parameters have it.
    """
    n = len(low)
    emit = emitter.emit
    of_actions = np.zeros(n)

    def draw(begin: int, end: int, rng: np.random.Generator | None) -> None:
        emitter.draw(begin, end, rng)
        if log_std is not None:
            of_actions[...] = log_std()

    actions = rows.matrix
    log_probs = rows.log_prob

    def emit_clipped(t: int, params: Array) -> None:
        emit(t, params)
        action = actions[t]
        below = action <= low
        above = action >= high
        outside = below | above
        if not outside.any():
            return
        np.clip(action, low, high, out=action)
        mean = params[:, :n].astype(np.float64)
        of_rows = of_actions
        if log_std is None:
            of_rows = params[:, n:].clip(*log_std_bounds)
        std = np.exp(np.broadcast_to(of_rows, mean.shape).astype(np.float64))
        density = (
            -0.5 * ((action - mean) / std) ** 2
            - np.log(std)
            - 0.5 * math.log(2 * math.pi)
        )
        for b, i in np.argwhere(outside).tolist():
            beyond = low[i] - mean[b, i] if below[b, i] else mean[b, i] - high[i]
            density[b, i] = log_normal_cdf(beyond / std[b, i])
        some = outside.any(1)
        log_probs[t][some] = density[some].sum(1)

    return Emitter(draw, emit_clipped)


def log_normal_cdf(x: float) -> float:
    """Return the logarithm of the probability that a standard normal variable is at most ``x``."""
    if x > -20:
        return math.log(0.5 * math.erfc(-x / math.sqrt(2)))
    # the asymptotic series, since ``erfc`` would soon be 0
    squared = x * x
    series = -1 / squared + 3 / squared**2 - 15 / squared**3
    return (
        -0.5 * squared - math.log(-x) - 0.5 * math.log(2 * math.pi) + math.log1p(series)
    )


def greedy(rows: ActionRows, *, low: Array) -> Emitter:
    """Choose the action with the highest value; ``params``: values ``[B, n]``."""
    actions = rows.flat
    start = int(low[0])
    isfinite = math.isfinite
    legal = rows.legal
    direct = rows.action.dtype == np.int64 and not start
    impossible = np.float32(-np.inf)

    def emit(t: int, values: Array) -> None:
        if legal is not None:
            values = np.where(legal[t], values, impossible)
        # NaN is the maximum of a row with a NaN. Infinities are allowed, to mask actions.
        if not (
            isfinite(values.reshape(-1).dot(_ones(values.size)))
            or np.isfinite(values.max(1)).all()
        ):
            raise rows.not_finite(t, values)
        if direct:
            values.argmax(1, actions[t])
        else:
            np.add(values.argmax(1), start, out=actions[t], casting="unsafe")

    return Emitter(_draws_nothing, emit)


def epsilon_greedy(
    rows: ActionRows,
    *,
    low: Array,
    epsilon: Callable[[], float],
) -> Emitter:
    """Choose the action with the highest value, or with probability ``epsilon`` any allowed one; the
    mode is the former. ``params``: values ``[B, n]``.
    """
    choose_best = greedy(rows, low=low).emit
    mask = rows.mask
    actions = rows.flat
    log_probs = rows.log_prob
    legal = rows.legal
    start = int(low[0])
    explores: Array = np.zeros((rows.T, rows.B), bool)
    which = np.zeros((rows.T, rows.B))
    some_explore = [False] * rows.T
    probability = 0.0

    def draw(begin: int, end: int, rng: np.random.Generator | None) -> None:
        nonlocal probability
        probability = epsilon()
        if rng is None:
            return
        # a fixed amount per row, so that rollouts of any length draw the same
        drawn = rng.random((end - begin, rows.B, 2))
        part: Any = explores[begin:end]
        np.less(drawn[..., 0], probability, out=part)
        which[begin:end] = drawn[..., 1]
        some_explore[begin:end] = part.any(1).tolist()

    def emit(t: int, values: Array) -> None:
        choose_best(t, values)
        counts = values.shape[1] if legal is None else (legal[t] != 0).sum(1)
        of_other = probability / counts
        np.log(of_other + (1 - probability), out=log_probs[t], casting="unsafe")
        if not some_explore[t]:
            return
        if mask is None or legal is None:
            drawn = start + (which[t] * counts).astype(np.int64)
        else:
            drawn = mask.draw(legal[t], which[t][:, None])[:, 0]
        row = actions[t]
        is_other = explores[t] & (drawn != row)
        np.copyto(row, drawn, where=is_other, casting="unsafe")
        np.log(of_other, out=log_probs[t], where=is_other, casting="unsafe")

    return Emitter(draw, emit)


def identity(rows: ActionRows) -> Emitter:
    """Use the network's output as the action."""
    actions = rows.matrix

    def emit(t: int, action: Array) -> None:
        if not math.isfinite(action.reshape(-1).dot(_ones(action.size))):
            raise rows.not_finite(t, action)
        np.copyto(actions[t], action)

    return Emitter(_draws_nothing, emit)


@lru_cache(maxsize=64)
def _ones(n: int) -> Array:
    """Ones for sums by ``dot``, which takes a tenth of the time of a reduction."""
    return np.ones(n, np.float32)


def _normal(
    count: int,
    B: int,
    n: int,
    rng: np.random.Generator | None,
) -> tuple[Array, Array]:
    """Return standard normal noise ``[count, B, n]`` and its log-density ``[count, B]``."""
    if rng is None:
        noise = np.zeros((count, B, n), np.float32)
    else:
        noise = rng.standard_normal((count, B, n), np.float32)
    # ``reduce`` is what ``sum`` calls, after some microseconds
    squares = np.add.reduce(np.square(noise, dtype=np.float64), -1)
    return noise, -0.5 * squares - 0.5 * n * math.log(2 * math.pi)
