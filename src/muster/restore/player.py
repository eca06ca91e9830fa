"""Replays the actions and resets of an environment in this process: for ``muster replay``, and for
videos.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from muster.capabilities import WritesNext, capability, pass_options
from muster.envs.build import build_env
from muster.errors import BadCrashReport
from muster.keys import FLAGS, next_of
from muster.memory.slots import Layout, Slot
from muster.memory.specs import Array
from muster.restore.action_log import generator_of
from muster.restore.crash_report import CrashReport, Special
from muster.restore.registered import installed
from muster.rollout.columns import lane_columns
from muster.rollout.options import RolloutOptions


class Player:
    """A new environment (``env``, or the list of a batch), and the recorded moves: its resets and
    steps.

    Raises ``EnvError`` if it cannot be made, ``BadCrashReport`` if the record does not fit it.
    """

    def __init__(self, crash_report: CrashReport) -> None:
        factory = crash_report.factory
        device = None if factory.device is None else torch.device(factory.device)
        num_envs = None if crash_report.alone else factory.num_envs
        with installed(crash_report.registered):
            self.batch = build_env(factory.source, num_envs, factory.kwargs, device)
        self.crash_report = crash_report
        spec = self.batch.spec
        writing = capability(self.batch, WritesNext)
        if writing is not None and crash_report.max_frames_per_traj is not None:
            writing.limit_episodes(crash_report.max_frames_per_traj)
        columns = lane_columns(spec, (), RolloutOptions())
        layout = Layout(1, spec.num_envs, columns, 1, spec.batch_shape)
        self._lane = Slot(layout, spec.device or "heap").lanes[0]
        try:
            self._check()
        except BadCrashReport:
            self.close()
            raise
        objects = list(self.batch.objects())
        self.env: Any = objects[0] if len(objects) == 1 else objects

    def moves(self) -> list[tuple[str, int]]:
        """The moves in order: ("reset", its first row in ``resets``) and ("step", row of
        ``actions``).
        """
        resets = self.crash_report.resets
        _, first = np.unique(resets[:, 0], return_index=True)
        order = [(int(resets[n, 1]), ("reset", int(n))) for n in first]
        steps = len(next(iter(self.crash_report.actions.values()), ()))
        order += [(row, ("step", row)) for row in range(steps)]
        order.sort(
            key=lambda entry: entry[0]
        )  # keeps resets before the step of the same row
        return [move for _, move in order]

    def make(self, move: tuple[str, int]) -> None:
        """Make a move; raises like a rollout, with the environment's own exception as the cause."""
        with torch.no_grad():
            kind, place = move
            if kind == "reset":
                self._reset(place)
            else:
                self._step(place)

    def observation(self) -> dict[Any, Array]:
        """The newest observation, ``[B, *shape]`` per leaf."""
        newest = {}
        for key in self.batch.spec.observation_specs:
            newest[key] = _host(self._lane.data[key][0])
        return newest

    def outcome(self) -> tuple[Array, Array, Array]:
        """Reward, terminated and truncated of the newest step, ``[B]`` each."""
        arrays = self._lane.arrays
        reward = self.batch.spec.reward_key
        terminated = next_of(("terminated",))
        truncated = next_of(("truncated",))
        self._lane.pull((reward, terminated, truncated))
        return arrays[reward][0], arrays[terminated][0], arrays[truncated][0]

    def action(self, row: int) -> Any:
        leaves = {key: array[row] for key, array in self.crash_report.actions.items()}
        codec = getattr(self.batch, "actions", None)
        if not self.crash_report.alone or codec is None:
            return leaves
        value = codec.build([leaves[key][0] for key in codec.specs])
        if not codec.single:
            return value
        spec = codec.specs[next(iter(leaves))]
        return value if spec.shape else value.item()

    def verdict(self) -> str:
        expected = self.crash_report.observation
        if not expected:
            return ""
        got = self.observation()
        for key, recorded in expected.items():
            if key in got and not same_bits(_as_stored(got[key], recorded), recorded):
                return (
                    "The observation before the failure is NOT the recorded one: this environment"
                    " is not determined by its seed and actions alone."
                    f" {self.crash_report.caveat}"
                ).rstrip()
        return "The observation before the failure is bit for bit the recorded one."

    def close(self) -> None:
        self.batch.close()

    def _check(self) -> None:
        actions = self.crash_report.actions
        resets = self.crash_report.resets
        specs = self.batch.spec.action_specs
        expected = {key: tuple(self._lane.data[key].shape[1:]) for key in specs}
        got = {key: array.shape[1:] for key, array in actions.items()}
        lengths = {len(array) for array in actions.values()}
        if (actions and got != expected) or len(lengths) > 1:
            raise BadCrashReport(
                f"{self.crash_report.name} takes actions {expected}, and the crash report holds"
                f" {got}."
            )
        envs = resets[:, 2]
        num_envs = self.batch.spec.num_envs
        if len(envs) and not 0 <= envs.min() <= envs.max() < num_envs:
            raise BadCrashReport(
                f"the crash report resets environments beyond the {num_envs} that there are."
            )

    def _reset(self, n: int) -> None:
        resets = self.crash_report.resets
        call = resets[n, 0]
        which: list[int] = []
        special: list[Special] = []
        for row in range(n, len(resets)):
            if resets[row, 0] != call:
                break
            which.append(int(resets[row, 2]))
            special.append(
                self.crash_report.special.get(row, Special(None, None, None))
            )
        for i, entry in zip(which, special, strict=True):
            if entry.state is not None:
                self._set_random_state(i, entry.state)
        seeds = [entry.seed for entry in special if entry.seed is not None]
        pass_options(self.batch, special[0].options)
        given = seeds if len(seeds) == len(which) else None
        self.batch.reset(self._lane.data, 0, which, given)

    def _set_random_state(self, i: int, state: Any) -> None:
        try:
            env: Any = self.batch.objects()[i]
            env.unwrapped.np_random = generator_of(state)
        except (LookupError, TypeError, ValueError) as error:
            raise BadCrashReport(
                f"the random state in the crash report is damaged: {error}"
            ) from error

    def _step(self, row: int) -> None:
        data = self._lane.data
        for flag in FLAGS:  # environments set flags, and never clear them
            for key in (flag, next_of(flag)):
                data[key][...] = False
                self._lane.arrays[key][...] = False
        for key, array in self.crash_report.actions.items():
            action = array[row]
            if torch.is_tensor(data[key]):
                action = torch.as_tensor(action, device="cpu")
            data[key][0] = action
        self.batch.start(self._lane)(0)
        for key in self.batch.spec.observation_specs:
            data[key][0] = data[key][1]


def same_bits(a: Array, b: Array) -> bool:
    """Whether two arrays are equal bit for bit."""
    if a.dtype == object:
        return bool(a.tolist() == b.tolist())
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return a.tobytes() == b.tobytes()


def _as_stored(value: Array, recorded: Array) -> Array:
    """A floating observation in the dtype in which the collector stored it (``obs_dtype``)."""
    if value.dtype.kind == "f" and recorded.dtype.kind == "f":
        return value.astype(recorded.dtype)
    return value


def _host(value: Any) -> Any:
    if hasattr(value, "cpu"):
        return value.cpu().numpy()
    return value
