"""Batches of environments on tensors, as simulators on a GPU have them: for tests and benchmarks of
collectors on a device.

A step never waits for the device: it has no Python number that comes from a tensor, no tensor whose
shape depends on data, and no state in Python objects. So it can be recorded as a CUDA graph.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

if TYPE_CHECKING:
    import torch
else:
    from muster.utils import lazy_torch as torch

Info = dict[str, Any]
# what ``step`` returns: observation, reward, terminated, truncated, info
Stepped = tuple[Any, "torch.Tensor", "torch.Tensor", "torch.Tensor", Info]
# rewards, and which episodes terminated
Advanced = tuple["torch.Tensor", "torch.Tensor"]


class _TorchEnvs:
    """What batches of environments on tensors have in common: episodes, seeds and reset modes.

    A subclass has ``_advance``, ``_observe`` and ``_begin``.

    Attributes:
        DRAWN: random numbers that the first state of an episode needs.
    """

    DRAWN = 4

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        *,
        autoreset: AutoresetMode,
        max_steps: int,
        final_obs: bool = True,
    ) -> None:
        self.num_envs = num_envs
        self.device = torch.device(device)
        self.final_obs = final_obs
        self.max_steps = max_steps
        self.metadata = {"autoreset_mode": autoreset}
        self.single_observation_space = observation_space
        self.single_action_space = action_space
        self.muster_exact = (
            final_obs  # masks are respected, and every last observation is returned
        )
        self._generator = torch.Generator(self.device)
        self._generator.seed()
        self._steps = torch.zeros(
            num_envs,
            dtype=torch.int64,
            device=self.device,
        )

    def reset(
        self,
        *,
        seed: int | None = None,
        options: Info | None = None,
    ) -> tuple[Any, Info]:
        """Start new episodes, in all environments or those of ``options["reset_mask"]`` (bool
        ``[B]``).
        """
        if seed is not None:
            self._generator.manual_seed(seed)
        where = None
        if options is not None:
            where = options.get("reset_mask")
        if where is None:
            where = torch.ones(
                self.num_envs,
                dtype=torch.bool,
                device=self.device,
            )
        u = self._uniform()
        self._restart(where, u)
        return self._observe(), {}

    def step(self, action: torch.Tensor) -> Stepped:
        u = None
        if self.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP:
            # First, so that torch.compile, which cannot draw from generators, makes one piece of
            # all that follows.
            u = self._uniform()
        reward, terminated = self._advance(action)
        self._steps += 1
        truncated = self._steps >= self.max_steps
        info: Info = {}
        if u is not None:
            if self.final_obs:
                info["final_obs"] = self._observe()
            done = terminated | truncated
            self._restart(done, u)
        obs = self._observe()
        return obs, reward, terminated, truncated, info

    def close(self) -> None:
        """Do nothing."""

    def _restart(self, where: torch.Tensor, u: torch.Tensor) -> None:
        self._begin(where, u)
        self._steps.masked_fill_(where, 0)

    def _advance(self, action: torch.Tensor) -> Advanced:
        """Change the state by one step; return rewards, and which episodes terminated."""
        raise NotImplementedError

    def _observe(self) -> Any:
        """Return the observation of the state, in memory that no later step changes."""
        raise NotImplementedError

    def _begin(self, where: torch.Tensor, u: torch.Tensor) -> None:
        """Set first states, made from ``u``, where ``where`` says.

        Args:
            where: bool ``[B]``.
            u: numbers from 0 to 1, ``[B, DRAWN]``.
        """
        raise NotImplementedError

    def _uniform(self) -> torch.Tensor:
        size = (self.num_envs, self.DRAWN)
        return torch.rand(
            size,
            generator=self._generator,
            device=self.device,
        )


class TorchCartPole(_TorchEnvs):
    """A batch of B CartPole-v1 environments on tensors, like a simulator on a GPU.

    It never synchronizes.

    Args:
        num_envs: B.
        device: device of all tensors.
        autoreset: SAME_STEP (``info["final_obs"]`` has the last observations) or DISABLED
            (``reset`` by mask).
        final_obs: False leaves out the last observations, as some simulators do.
        max_steps: episodes are truncated after this number of steps.

    Attributes:
        state: ``[B, 4]`` float32: position, velocity, angle, angular velocity. Each step replaces
            the tensor.
    """

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        *,
        autoreset: AutoresetMode = AutoresetMode.SAME_STEP,
        final_obs: bool = True,
        max_steps: int = 500,
    ) -> None:
        angle = 24 * np.pi / 180
        limits = [4.8, np.inf, angle, np.inf]
        high = np.array(limits, np.float32)
        super().__init__(
            num_envs,
            device,
            spaces.Box(-high, high),
            spaces.Discrete(2),
            autoreset=autoreset,
            max_steps=max_steps,
            final_obs=final_obs,
        )
        self.state = torch.zeros(num_envs, 4, device=self.device)

    def _advance(self, action: torch.Tensor) -> Advanced:
        _, x_dot, theta, theta_dot = self.state.unbind(1)
        sin = theta.sin()
        cos = theta.cos()
        force = action * 20.0 - 10.0
        push = (force + 0.05 * theta_dot**2 * sin) / 1.1
        inertia = 0.5 * (4 / 3 - 0.1 * cos**2 / 1.1)
        theta_acc = (9.8 * sin - cos * push) / inertia
        x_acc = push - 0.05 * theta_acc * cos / 1.1
        rates = torch.stack([x_dot, x_acc, theta_dot, theta_acc], 1)
        self.state = self.state + 0.02 * rates
        position = self.state[:, 0]
        angle = self.state[:, 2]
        left = position.abs() > 2.4
        fell = angle.abs() > 12 * 2 * np.pi / 360
        reward = torch.ones(self.num_envs, device=self.device)
        return reward, left | fell

    def _observe(self) -> torch.Tensor:
        return self.state.clone()

    def _begin(self, where: torch.Tensor, u: torch.Tensor) -> None:
        fresh = u * 0.1 - 0.05
        self.state = torch.where(where[:, None], fresh, self.state)


class TorchPendulum(_TorchEnvs):
    """A batch of B double pendulums on tensors: swing the tip up with a torque at the elbow.

    The task of Gymnasium's Acrobot-v1 (equations of motion of Sutton and Barto, "Reinforcement
    Learning: An Introduction", first edition, section 11.3, with fourth-order Runge-Kutta steps),
    but with a continuous torque. Every step costs 1 until the tip is one link above the pivot,
    where the episode terminates. Without torque, energy is conserved.

    Observations are ``[B, 6]`` float32: cosine and sine of the first angle, and of the second
    angle, which is relative to the first link; then both angular velocities. Actions are ``[B, 1]``
    from -1 to 1.

    Args:
        num_envs: B.
        device: device of all tensors.
        autoreset: SAME_STEP (``info["final_obs"]`` has the last observations) or DISABLED
            (``reset`` by mask).
        max_steps: episodes are truncated after this number of steps.
        dt: seconds of a step.

    Attributes:
        state: ``[B, 4]`` float32: two angles, 0 when a link hangs down or is straight, from -pi to
            pi; two angular velocities, at most ``4 * pi`` and ``9 * pi``. Changed in place.
    """

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        *,
        autoreset: AutoresetMode = AutoresetMode.SAME_STEP,
        max_steps: int = 500,
        dt: float = 0.2,
    ) -> None:
        cosines_and_sines = [1, 1, 1, 1]
        rates = [4 * np.pi, 9 * np.pi]
        high = np.array(cosines_and_sines + rates, np.float32)
        super().__init__(
            num_envs,
            device,
            spaces.Box(-high, high),
            spaces.Box(-1.0, 1.0, (1,), np.float32),
            autoreset=autoreset,
            max_steps=max_steps,
        )
        self.dt = dt
        self.state = torch.zeros(num_envs, 4, device=self.device)

    def energy(self) -> torch.Tensor:
        """Return kinetic plus potential energy, ``[B]``, in joules."""
        theta1, theta2, rate1, rate2 = self.state.unbind(1)
        d1, d2 = _inertia(theta2)
        first = d1 * rate1**2 / 2
        both = d2 * rate1 * rate2
        second = 1.25 * rate2**2 / 2
        kinetic = first + both + second
        centres = 1.5 * theta1.cos() + 0.5 * (theta1 + theta2).cos()
        potential = -9.8 * centres
        return kinetic + potential

    def _advance(self, action: torch.Tensor) -> Advanced:
        torque = action[:, 0].clamp(-1, 1)
        dt = self.dt
        k1 = _rates(self.state, torque)
        k2 = _rates(self.state + dt / 2 * k1, torque)
        k3 = _rates(self.state + dt / 2 * k2, torque)
        k4 = _rates(self.state + dt * k3, torque)
        weighted = k1 + 2 * k2 + 2 * k3 + k4
        after = self.state + dt / 6 * weighted
        turned = after[:, :2] + math.pi
        angles = turned.remainder(2 * math.pi) - math.pi
        rate1 = after[:, 2]
        rate2 = after[:, 3]
        self.state[:, :2].copy_(angles)
        self.state[:, 2].copy_(rate1.clamp(-4 * math.pi, 4 * math.pi))
        self.state[:, 3].copy_(rate2.clamp(-9 * math.pi, 9 * math.pi))
        theta1 = angles[:, 0]
        height = -theta1.cos() - angles.sum(1).cos()
        terminated = height > 1
        return terminated.float() - 1, terminated

    def _observe(self) -> torch.Tensor:
        theta1, theta2, rate1, rate2 = self.state.unbind(1)
        parts = [
            theta1.cos(),
            theta1.sin(),
            theta2.cos(),
            theta2.sin(),
            rate1,
            rate2,
        ]
        return torch.stack(parts, 1)

    def _begin(self, where: torch.Tensor, u: torch.Tensor) -> None:
        fresh = u * 0.2 - 0.1
        state = torch.where(where[:, None], fresh, self.state)
        self.state.copy_(state)


def _inertia(theta2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the entries ``d1`` and ``d2`` of the mass matrix ``[[d1, d2], [d2, 1.25]]``.

    Links have mass 1 kg, length 1 m, their centre in the middle, and moment of inertia 1 kg m^2.
    """
    cos = theta2.cos()
    return 3.5 + cos, 1.25 + 0.5 * cos


def _rates(state: torch.Tensor, torque: torch.Tensor) -> torch.Tensor:
    """Return the derivative of the pendulum's state in time, ``[B, 4]``."""
    theta1, theta2, rate1, rate2 = state.unbind(1)
    d1, d2 = _inertia(theta2)
    sin = 0.5 * theta2.sin()
    phi2 = 4.9 * (theta1 + theta2).sin()
    coriolis = -sin * rate2**2 - 2 * sin * rate1 * rate2
    phi1 = coriolis + 14.7 * theta1.sin() + phi2
    left = torque + d2 / d1 * phi1 - sin * rate1**2 - phi2
    acc2 = left / (1.25 - d2**2 / d1)
    acc1 = -(d2 * acc2 + phi1) / d1
    return torch.stack([rate1, rate2, acc1, acc2], 1)


class TorchGridWorld(_TorchEnvs):
    """A batch of B grid worlds on tensors, with pixels and action masks: fetch the key, pass the
    door, reach the goal.

    A wall with a locked door divides the grid into two rooms. The agent and the key are in the left
    one, the goal is in the right one; wall, door, agent, key and goal have new random places in
    each episode. The agent takes the key when it enters its cell, and the door opens to an agent
    with the key. The goal gives a reward of 1 and terminates the episode; other rewards are 0.

    Observations are a dict. ``pixels``: ``[B, size * cell, size * cell, 3]`` uint8, each cell in
    its colour of ``COLOURS``; an agent with the key has a colour of its own. ``action_mask``:
    ``[B, 4]`` int8, 1 where the agent can move. Actions are 0 to 3: up, right, down, left. A move
    that is not allowed has no effect.

    Args:
        num_envs: B.
        device: device of all tensors.
        size: cells of a row and a column, at least 5; those at the border are walls.
        cell: pixels of a row and a column of a cell.
        autoreset: SAME_STEP (``info["final_obs"]`` has the last observations) or DISABLED
            (``reset`` by mask).
        max_steps: episodes are truncated after this number of steps; None is ``4 * size**2``.

    Attributes:
        agent, key, door, goal: ``[B, 2]`` int64: row and column. Changed in place. The wall between
            the rooms is the column of the door.
        has_key: ``[B]`` bool. Changed in place.
    """

    DRAWN = 6
    COLOURS: ClassVar[dict[str, tuple[int, int, int]]] = {
        "floor": (0, 0, 0),
        "wall": (100, 100, 100),
        "door": (150, 75, 0),
        "key": (255, 255, 0),
        "goal": (0, 255, 0),
        "agent": (255, 0, 0),
        "agent with key": (255, 150, 0),
    }

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        *,
        size: int = 8,
        cell: int = 1,
        autoreset: AutoresetMode = AutoresetMode.SAME_STEP,
        max_steps: int | None = None,
    ) -> None:
        if size < 5:
            raise ValueError(
                f"size={size}: two rooms between walls need at least 5 cells"
            )
        if max_steps is None:
            max_steps = 4 * size**2
        side = size * cell
        pixels = spaces.Box(0, 255, (side, side, 3), np.uint8)
        action_mask = spaces.MultiBinary(4)
        observation_space = spaces.Dict(
            {
                "pixels": pixels,
                "action_mask": action_mask,
            }
        )
        super().__init__(
            num_envs,
            device,
            observation_space,
            spaces.Discrete(4),
            autoreset=autoreset,
            max_steps=max_steps,
        )
        on = self.device
        self.size = size
        self.cell = cell
        self.agent = torch.ones(num_envs, 2, dtype=torch.int64, device=on)
        self.key = torch.ones_like(self.agent)
        self.door = torch.ones_like(self.agent)
        self.goal = torch.ones_like(self.agent)
        self.has_key = torch.zeros(num_envs, dtype=torch.bool, device=on)
        # Constants: a step must not copy from the host.
        up_right_down_left = [
            [-1, 0],
            [0, 1],
            [1, 0],
            [0, -1],
        ]
        self._moves = torch.tensor(up_right_down_left, device=on)
        colours = list(self.COLOURS.values())
        self._colours = torch.tensor(colours, dtype=torch.uint8, device=on)
        line = torch.arange(size, device=on)
        self._rows = line[:, None].expand(size, size)
        self._columns = line.expand(size, size)
        at_end = (line == 0) | (line == size - 1)
        self._border = at_end[:, None] | at_end

    def _advance(self, action: torch.Tensor) -> Advanced:
        allowed = self._allowed().gather(1, action[:, None])
        move = self._moves[action] * allowed
        self.agent.add_(move)
        finds_key = _same(self.agent, self.key)
        self.has_key.logical_or_(finds_key)
        terminated = _same(self.agent, self.goal)
        return terminated.float(), terminated

    def _observe(self) -> dict[str, torch.Tensor]:
        allowed = self._allowed()
        return {
            "pixels": self._pixels(),
            "action_mask": allowed.to(torch.int8),
        }

    def _allowed(self) -> torch.Tensor:
        """Whether the agent can make each of the four moves, ``[B, 4]``."""
        target = self.agent[:, None] + self._moves
        row = target[..., 0]
        column = target[..., 1]
        inside = (target > 0) & (target < self.size - 1)
        at_wall = column == self.door[:, None, 1]
        at_door = at_wall & (row == self.door[:, None, 0])
        opens = at_door & self.has_key[:, None]
        passes = ~at_wall | opens
        return inside.all(-1) & passes

    def _pixels(self) -> torch.Tensor:
        wall = self.door[:, 1, None, None]
        walls = self._border | (self._columns == wall)
        has_key = self.has_key[:, None, None]
        kinds = walls.long()  # places in ``COLOURS``
        door = self._at(self.door)
        key = self._at(self.key)
        goal = self._at(self.goal)
        agent = self._at(self.agent)
        kinds.masked_fill_(door, 2)
        kinds.masked_fill_(key & ~has_key, 3)
        kinds.masked_fill_(goal, 4)
        kinds.masked_fill_(agent & ~has_key, 5)
        kinds.masked_fill_(agent & has_key, 6)
        pixels = self._colours[kinds]
        if self.cell > 1:
            pixels = pixels.repeat_interleave(self.cell, 1)
            pixels = pixels.repeat_interleave(self.cell, 2)
        return pixels

    def _at(self, place: torch.Tensor) -> torch.Tensor:
        """Whether each cell is the given place, ``[B, size, size]``."""
        place = place[..., None, None]
        in_row = self._rows == place[:, 0]
        in_column = self._columns == place[:, 1]
        return in_row & in_column

    def _begin(self, where: torch.Tensor, u: torch.Tensor) -> None:
        inner = self.size - 2  # rows and columns without the border
        drawn = u.unbind(1)
        wall = 2 + _below(drawn[0], inner - 2)  # a room has at least one column
        door_row = 1 + _below(drawn[1], inner)
        cells = inner * (wall - 1)  # of the left room
        agent = _below(drawn[2], cells)
        from_agent = 1 + _below(drawn[3], cells - 1)
        key = (agent + from_agent) % cells
        right_columns = self.size - 2 - wall
        goal_column = wall + 1 + _below(drawn[4], right_columns)
        goal_row = 1 + _below(drawn[5], inner)
        places = [
            (self.agent, _in_left_room(agent, inner)),
            (self.key, _in_left_room(key, inner)),
            (self.door, torch.stack([door_row, wall], 1)),
            (self.goal, torch.stack([goal_row, goal_column], 1)),
        ]
        changed = where[:, None]
        for place, fresh in places:
            now = torch.where(changed, fresh, place)
            place.copy_(now)
        self.has_key.masked_fill_(where, False)


def _same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a == b).all(1)


def _below(u: torch.Tensor, n: int | torch.Tensor) -> torch.Tensor:
    """Return whole numbers from 0 to ``n - 1`` from numbers between 0 and 1."""
    number = (u * n).long()
    return number.clamp(max=n - 1)


def _in_left_room(cell: torch.Tensor, inner: int) -> torch.Tensor:
    """Return row and column of numbered cells of the left room, ``[B, 2]``."""
    row = 1 + cell % inner
    column = 1 + cell // inner
    return torch.stack([row, column], 1)
