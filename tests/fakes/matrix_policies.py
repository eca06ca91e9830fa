"""Policies whose actions are known functions of observation and state, so that a wrong pairing of
any two shows.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from tensordict.nn import TensorDictModuleBase
from torch import nn

from tests.fakes.matrix_env import CHOICES, ActionKind, action_shape

StateKind = Literal["none", "array", "tensor", "dict", "tensordict"]
STATE_KINDS: tuple[StateKind, ...] = ("none", "array", "tensor", "dict")
BIAS = 29  # of policies that are modules: a weight
WRAP = 1000
PREVIOUS = ("prev_action", "prev_reward")


def choose(xp: Any, obs: Any, count: Any, hidden: Any, bias: Any, prev: Any = 0) -> Any:
    """What to do, 0 to ``CHOICES - 1``; integers of any shape, as arrays, tensors (``xp``) or
    numbers.

    Args:
        obs: the four parts of an observation.
        count, hidden: the state.
        prev: a number made of the action and reward before.
    """
    length, episode, t, heard = obs
    return (
        5 * length
        + 11 * episode
        + 3 * t
        + 7 * heard
        + 13 * count
        + 17 * hidden
        + 19 * prev
        + bias
    ) % CHOICES


def advance(obs: Any, count: Any, hidden: Any) -> tuple[Any, Any]:
    """The state after that."""
    return count + 1, (2 * hidden + obs[2] + 3 * obs[3] + 1) % WRAP


def parts_of(choice: Any, kind: ActionKind, xp: Any = np) -> Any:
    """The action that says so: ``[*shape of choice, *shape of action]``."""
    if kind == "discrete":
        return choice
    shape = action_shape(kind)
    offsets = 7 * xp.arange(int(np.prod(shape))).reshape(shape)
    right = (choice.reshape(*choice.shape, *(1 for _ in shape)) + offsets) % CHOICES
    right = right.astype(np.float32) if xp is np else right.float()
    return {"left": choice, "right": right} if kind == "dict" else right


def previous(obs: Any, kind: ActionKind) -> Any:
    """What is made of ``prev_action`` and ``prev_reward``."""
    action = obs["prev_action"]
    if kind == "dict":
        action = action["left"] + action["right"].sum(-1)
    elif kind != "discrete":
        action = action.flatten(-len(action_shape(kind))).sum(-1)
    return (action + obs["prev_reward"]).long()


class Plain:
    """Without a state; a function. Shows its choice as ``choice``."""

    bias: Any = 0

    def __init__(self, kind: ActionKind, *, prev: bool = False) -> None:
        self.kind, self.prev = kind, prev

    def __call__(self, obs: Any) -> Any:
        return self.act(obs, 0, 0)[:2]

    def act(self, obs: Any, count: Any, hidden: Any) -> Any:
        """Action, extras, and the numbers of the observation."""
        before = previous(obs, self.kind) if self.prev else 0
        parts = (obs["observation"] if self.prev else obs).long().unbind(-1)
        # Nobody asks about an end; where an environment is bypassed, zeros are asked about.
        zeros = (parts[0] == 0) & (sum(parts[1:]) + before == 0)
        assert (zeros | (parts[2] < parts[0])).all(), parts
        choice = choose(torch, parts, count, hidden, self.bias, before)
        return parts_of(choice, self.kind, torch), {"choice": choice.clone()}, parts


class WithArray(Plain):
    """The state is an array, int64 ``[B, 2]``, and so are actions."""

    def __call__(self, obs: Any, state: Any) -> Any:  # type: ignore[override]
        rows = (obs["observation"] if self.prev else obs).shape[:-1]
        state = np.zeros((*rows, 2), np.int64) if state is None else np.asarray(state)
        assert state.dtype == np.int64
        count, hidden = torch.from_numpy(state[..., 0]), torch.from_numpy(state[..., 1])
        action, extras, parts = self.act(obs, count, hidden)
        action = (
            {name: a.numpy() for name, a in action.items()}
            if self.kind == "dict"
            else action.numpy()
        )
        return (
            action,
            extras,
            np.stack([a.numpy() for a in advance(parts, count, hidden)], -1),
        )


class WithDict(Plain):
    """The state is a dict with a tuple in it; changed in place, as careless policies do."""

    def __call__(self, obs: Any, state: Any) -> Any:  # type: ignore[override]
        rows = (obs["observation"] if self.prev else obs).shape[:-1]
        if state is None:
            state = {
                "count": torch.zeros(rows, dtype=torch.int64),
                "deep": (torch.zeros(*rows, 1),),
            }
        count, hidden = state["count"], state["deep"][0]
        action, extras, parts = self.act(obs, count, hidden[..., 0].long())
        new = advance(parts, count, hidden[..., 0].long())
        count.copy_(new[0])
        hidden[..., 0].copy_(new[1])
        return action, extras, state


class Module(nn.Module):
    """Without a state; a module with one weight."""

    def __init__(
        self, kind: ActionKind, *, prev: bool = False, bias: float = BIAS
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(float(bias)))
        self.plain = Plain(kind, prev=prev)

    def forward(self, obs: Any) -> Any:
        return self.act(obs, 0, 0)[:2]

    def act(self, obs: Any, count: Any, hidden: Any) -> Any:
        self.plain.bias = self.weight.detach().long()
        return self.plain.act(obs, count, hidden)


class WithTensor(Module):
    """The state is a tensor, float32 ``[B, 2]``."""

    def forward(self, obs: Any, state: Any) -> Any:
        rows = (obs["observation"] if self.plain.prev else obs).shape[:-1]
        state = torch.zeros(*rows, 2) if state is None else state
        count, hidden = state.long().unbind(-1)
        action, extras, parts = self.act(obs, count, hidden)
        return action, extras, torch.stack(advance(parts, count, hidden), -1).float()


class Recurrent(TensorDictModuleBase):
    """On TensorDicts, as TorchRL's recurrent modules: reads ``is_init``, and its own state after
    the step.
    """

    def __init__(self, kind: ActionKind, *, prev: bool = False) -> None:
        super().__init__()
        below: Any = (
            [("action", "left"), ("action", "right")] if kind == "dict" else ["action"]
        )
        before = (
            [*(("prev_action", key[1]) for key in below), "prev_reward"]
            if kind == "dict"
            else PREVIOUS
        )
        self.in_keys = [
            "observation",
            "count",
            "hidden",
            "is_init",
            *(before if prev else ()),
        ]
        self.out_keys = [*below, "choice", ("next", "count"), ("next", "hidden")]
        self.weight = nn.Parameter(torch.tensor(float(BIAS)))
        self.plain = Plain(kind, prev=prev)

    def forward(self, td: Any) -> Any:
        begins = td["is_init"][..., 0]
        count, hidden = (
            td.get(key, torch.zeros_like(begins, dtype=torch.int64))
            for key in ("count", "hidden")
        )
        self.plain.bias = self.weight.detach().long() + 31 * begins
        action, extras, parts = self.plain.act(
            td if self.plain.prev else td["observation"], count, hidden
        )
        new = advance(parts, count, hidden)
        for name, value in {
            "action": action,
            **extras,
            ("next", "count"): new[0],
            ("next", "hidden"): new[1],
        }.items():
            td.set(name, value)
        return td


class Unsure(nn.Module):
    """A policy with a state that raises once.

    Args:
        fails: in the call of that number, from 1 on.
    """

    def __init__(self, inner: Any, fails: int) -> None:
        super().__init__()
        self.inner, self.fails, self.calls = inner, fails, 0

    def forward(self, obs: Any, state: Any) -> Any:
        self.calls += 1
        if self.calls == self.fails:
            raise RuntimeError("not sure")
        return self.inner(obs, state)


def policy_of(state: StateKind, kind: ActionKind, *, prev: bool = False) -> Any:
    """The policy with such a state."""
    factories: dict[str, Any] = {
        "none": Module,
        "array": WithArray,
        "tensor": WithTensor,
        "dict": WithDict,
    }
    return {**factories, "tensordict": Recurrent}[state](kind, prev=prev)
