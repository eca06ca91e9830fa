"""Environments and policies for Tianshou's collectors that note everything they are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from tianshou.algorithm.algorithm_base import Policy
from tianshou.algorithm.modelfree.ddpg import ContinuousDeterministicPolicy
from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
from tianshou.algorithm.modelfree.reinforce import (
    DiscreteActorPolicy,
    ProbabilisticActorPolicy,
)
from tianshou.data import Batch
from tianshou.exploration import GaussianNoise
from torch import nn
from torch.distributions import Categorical, Distribution, Independent, Normal

ACTIONS = {
    "discrete": lambda: spaces.Discrete(5),
    "many": lambda: spaces.MultiDiscrete([3, 4]),
    "box": lambda: spaces.Box(-2.0, 3.0, (1,), np.float32),
    "boxes": lambda: spaces.Box(np.float32([-2, 0, 1]), np.float32([2, 4, 9])),
    "grid": lambda: spaces.Box(-1.0, 1.0, (2, 3), np.float32),
}


class Counting(gymnasium.Env[Any, Any]):
    """Observation ``[length, t]``, reward ``t`` and a bit of the action.

    Args:
        obs: "array", "dict" (nested), "pixels" (uint8 ``[4, 2]``, as stacked frames are) or "text".
        act: which of ``ACTIONS``.
        infos: "none", "all" (the same entries always) or "some" (of steps and ends, none at a
            reset).
        reward: "float", "int" or "vector" (two agents).

    Attributes:
        log: what it was asked, and when: ``(method, argument)``.
        ends: gets the return and the length of every episode that ended here.
    """

    def __init__(
        self,
        length: int,
        *,
        truncate: bool = False,
        obs: str = "array",
        act: str = "discrete",
        infos: str = "none",
        reward: str = "float",
        ends: list[Any] | None = None,
    ) -> None:
        self.length, self.truncate, self.obs, self.infos, self.reward = (
            length,
            truncate,
            obs,
            infos,
            reward,
        )
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = ACTIONS[act]()
        self.t, self.steps, self.total = 0, 0, 0.0
        self.log: list[tuple[str, Any]] = []
        self.ends = [] if ends is None else ends

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.log.append(("reset", (seed, options)))
        self.t, self.steps, self.total = (options or {}).get("start", 0), 0, 0.0
        return self._observe(), {
            "t": self.t,
            "deep": {"x": 0.5},
            "name": "reset",
        } if self.infos == "all" else {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.log.append(("step", np.array(action).tolist()))
        self.t += 1
        reward, done = self._reward(action), self.t >= self.length
        self.steps, self.total = self.steps + 1, self.total + reward
        if done:
            self.ends.append((self.total, self.steps))
        info: dict[str, Any] = {}
        if self.infos != "none":
            info = {
                "t": self.t,
                "deep": {"x": self.t / 2},
                "name": f"{self.length}/{self.t}",
            }
        if self.infos == "some":
            info = {**info, "seldom": self.t} if self.t % 3 == 2 else info
            info = (
                {**info, "episode": {"r": float(self.t), "l": self.t}} if done else info
            )
        return (
            self._observe(),
            reward,
            done and not self.truncate,
            done and self.truncate,
            info,
        )

    def render(self) -> None:
        self.log.append(("render", self.t))

    def _reward(self, action: Any) -> Any:
        if self.reward == "int":
            return self.t
        value = self.t + float(np.sum(action)) / 7
        return np.array([value, -value]) if self.reward == "vector" else value

    def _observe(self) -> Any:
        if self.obs == "dict":
            return {
                "count": np.array([self.length, self.t], np.int64),
                "deep": {"x": np.float32(self.t / 4)},
            }
        if self.obs == "pixels":
            return np.array(
                [[self.length, max(self.t - back, 0)] for back in (3, 2, 1, 0)],
                np.uint8,
            )
        if self.obs == "text":
            return f"{self.length} {self.t}"
        return np.array([self.length, self.t], np.float32)


def plain(tree: Any) -> Any:
    """Copies of all that a Batch holds, in dictionaries; tensors as arrays."""
    if isinstance(tree, Batch | dict):
        return {key: plain(tree[key]) for key in sorted(tree.keys())}
    if isinstance(tree, list | tuple):
        return [plain(part) for part in tree]
    if isinstance(tree, Distribution):
        return plain(
            vars(tree)["logits"]
            if isinstance(tree, Categorical)
            else tree.base_dist.loc
        )
    if isinstance(tree, torch.Tensor):
        return tree.detach().cpu().numpy().copy()
    return tree.copy() if isinstance(tree, np.ndarray) else tree


def numbers(obs: Any) -> torch.Tensor:
    """``[R, 2]`` of any kind of observation."""
    if isinstance(obs, Batch):
        count, x = torch.as_tensor(obs.count), torch.as_tensor(obs.deep.x)
        return torch.stack([count[:, 0] + x, count[:, 1] - x], -1).float()
    if obs.dtype == object:
        return torch.tensor([[float(word) for word in row.split()] for row in obs])
    return torch.as_tensor(obs).float().reshape(len(obs), -1)[:, -2:] / 8


class Body(nn.Module):
    """The network of all policies: ``[R, out]`` (two of them for a Gaussian), and no state."""

    def __init__(
        self, out: int, shape: tuple[int, ...] | None = None, *, gaussian: bool = False
    ) -> None:
        super().__init__()
        self.shape, self.gaussian = shape or (out,), gaussian
        self.max_action = np.inf if gaussian else 1.0
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, out))

    def forward(self, obs: Any, state: Any = None, info: Any = None) -> tuple[Any, Any]:
        out = self.net(numbers(obs)).reshape(-1, *self.shape)
        return (
            (out, torch.full_like(out, 0.6)) if self.gaussian else torch.tanh(out)
        ), state


class _Noting:
    """Before a policy class: notes what it is called with, in ``seen``."""

    def forward(self, batch: Any, state: Any = None, **kwargs: Any) -> Any:
        mode = self.training, self.is_within_training_step
        self.__dict__.setdefault("seen", []).append((plain(batch), plain(state), mode))
        return super().forward(batch, state, **kwargs)


class Dqn(_Noting, DiscreteQLearningPolicy):
    pass


class Actor(_Noting, DiscreteActorPolicy):
    pass


class Gaussian(_Noting, ProbabilisticActorPolicy):
    pass


class Deterministic(_Noting, ContinuousDeterministicPolicy):
    pass


class _Counter(Policy):
    """Counts its calls per environment, from nothing at the beginning of an episode; acts as the
    count says.

    Args:
        kind: of the state: "array" (``[R, 2]``), "tensor", "batch" (an array, a tensor and objects,
            nested), or "none", where only a ``policy`` entry is given.
    """

    def __init__(self, action_space: spaces.Space[Any], kind: str) -> None:
        super().__init__(
            action_space=action_space, action_scaling=False, action_bound_method=None
        )
        self.kind = kind

    def forward(self, batch: Any, state: Any = None, **kwargs: Any) -> Any:
        obs = numbers(batch.obs)
        count = self._before(len(obs), state) + 1
        total = np.arange(len(obs)) + count[:, 0]
        if isinstance(self.action_space, spaces.Discrete):
            act = total % 5
        else:
            shape = self.action_space.shape
            act = np.broadcast_to(
                (total % 7 / 10).reshape(-1, *[1] * len(shape)), (len(obs), *shape)
            ).copy()
        if isinstance(self.action_space, spaces.MultiDiscrete):
            act = (act * 4).astype(int)
        entry = Batch(logp=obs.sum(-1), deep=Batch(count=count.copy()))
        return Batch(act=act, state=self._after(count), policy=entry)

    def _before(self, rows: int, state: Any) -> Any:
        if state is None:
            return np.zeros((rows, 2))
        if self.kind == "batch":
            assert state.name.tolist() == [
                str(int(n)) if n else None for n in state.cell.n
            ]
            return np.stack([state.h.numpy(), state.cell.n], -1)
        return np.array(state.tolist())

    def _after(self, count: Any) -> Any:
        if self.kind == "batch":
            name = np.array([str(int(n)) for n in count[:, 1]], object)
            return Batch(
                h=torch.as_tensor(count[:, 0]),
                cell=Batch(n=count[:, 1].copy()),
                name=name,
            )
        return {"array": count, "tensor": torch.as_tensor(count), "none": None}[
            self.kind
        ]


class Counter(_Noting, _Counter):
    pass


def _gaussian(loc_scale: Any) -> Any:
    loc, scale = loc_scale
    return Independent(Normal(loc, scale), loc.ndim - 1)


def _actor(space: Any) -> Policy:
    if isinstance(space, spaces.Discrete):
        return Actor(actor=Body(5), action_space=space)
    body = Body(int(np.prod(space.shape)), space.shape, gaussian=True)
    return Gaussian(
        actor=body,
        dist_fn=_gaussian,
        action_space=space,
        action_scaling=True,
        action_bound_method="tanh",
    )


def _values(space: Any) -> Policy:
    if isinstance(space, spaces.Discrete):
        return Dqn(model=Body(5), action_space=space, eps_inference=0.4)
    body = Body(int(np.prod(space.shape)), space.shape)
    return Deterministic(
        actor=body, exploration_noise=GaussianNoise(sigma=0.5), action_space=space
    )


POLICIES: dict[str, Callable[[Any], Policy]] = {
    "values": _values,
    "actor": _actor,
    **{
        kind: lambda space, kind=kind: Counter(space, kind)
        for kind in ("array", "tensor", "batch", "none")
    },
}
