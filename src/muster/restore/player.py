"""Replays the actions and resets of an environment in this process: for ``muster replay``, and for
videos.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch

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
        self.batch.max_steps = crash_report.max_frames_per_traj
        layout = Layout(
            1,
            spec.num_envs,
            lane_columns(spec, (), RolloutOptions()),
            1,
            spec.batch_shape,
        )
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
        at = [(int(resets[n, 1]), ("reset", int(n))) for n in first]
        steps = len(next(iter(self.crash_report.actions.values()), ()))
        order = sorted(
            [*at, *((row, ("step", row)) for row in range(steps))], key=lambda entry: entry[0]
        )
        return [move for _, move in order]  # sorted() keeps resets before the step of the same row

    def make(self, move: tuple[str, int]) -> None:
        """Make a move; raises like a rollout, with the environment's own exception as the cause."""
        with torch.no_grad():
            (self._reset if move[0] == "reset" else self._step)(move[1])

    def observation(self) -> dict[Any, Array]:
        """The newest observation, ``[B, *shape]`` per leaf."""
        return {key: _host(self._lane.data[key][0]) for key in self.batch.spec.observation_specs}

    def outcome(self) -> tuple[Array, Array, Array]:
        """Reward, terminated and truncated of the newest step, ``[B]`` each."""
        arrays = self._lane.arrays
        self._lane.pull(
            (self.batch.spec.reward_key, next_of(("terminated",)), next_of(("truncated",)))
        )
        return arrays[self.batch.spec.reward_key][0], *(
            arrays[next_of((f,))][0] for f in ("terminated", "truncated")
        )

    def action(self, row: int) -> Any:
        leaves = {key: array[row] for key, array in self.crash_report.actions.items()}
        codec = getattr(self.batch, "actions", None)
        if not self.crash_report.alone or codec is None:
            return leaves
        value = codec.build([leaves[key][0] for key in codec.specs])
        return value.item() if codec.single and not codec.specs[next(iter(leaves))].shape else value

    def verdict(self) -> str:
        expected, got = self.crash_report.observation, self.observation()
        if not expected:
            return ""
        if all(
            same_bits(_as_stored(got[key], value), value)
            for key, value in expected.items()
            if key in got
        ):
            return "The observation before the failure is bit for bit the recorded one."
        return (
            "The observation before the failure is NOT the recorded one: this environment is not"
            f" determined by its seed and actions alone. {self.crash_report.caveat}"
        ).rstrip()

    def close(self) -> None:
        self.batch.close()

    def _check(self) -> None:
        actions = self.crash_report.actions
        resets = self.crash_report.resets
        specs = self.batch.spec.action_specs
        expected = {key: tuple(self._lane.data[key].shape[1:]) for key in specs}
        got = {key: array.shape[1:] for key, array in actions.items()}
        if (actions and got != expected) or len({len(array) for array in actions.values()}) > 1:
            raise BadCrashReport(
                f"{self.crash_report.name} takes actions {expected}, and the crash report holds"
                f" {got}."
            )
        if (
            len(resets)
            and not 0 <= resets[:, 2].min() <= resets[:, 2].max() < self.batch.spec.num_envs
        ):
            raise BadCrashReport(
                f"the crash report resets environments beyond the {self.batch.spec.num_envs} that"
                " there"
                " are."
            )

    def _reset(self, n: int) -> None:
        resets = self.crash_report.resets
        rows = list(
            itertools.takewhile(lambda i: resets[i, 0] == resets[n, 0], range(n, len(resets)))
        )
        which = [int(resets[i, 2]) for i in rows]
        special = [self.crash_report.special.get(i, Special(None, None, None)) for i in rows]
        for i, state in zip(which, (entry.state for entry in special), strict=True):
            if state is not None:
                try:
                    env: Any = self.batch.objects()[i]
                    env.unwrapped.np_random = generator_of(state)
                except (LookupError, TypeError, ValueError) as error:
                    raise BadCrashReport(
                        f"the random state in the crash report is damaged: {error}"
                    ) from error
        seeds = [entry.seed for entry in special if entry.seed is not None]
        self.batch.reset_options = special[0].options
        self.batch.reset(self._lane.data, 0, which, seeds if len(seeds) == len(which) else None)

    def _step(self, row: int) -> None:
        data = self._lane.data
        for flag in FLAGS:  # environments set flags, and never clear them
            for key in (flag, next_of(flag)):
                data[key][...] = self._lane.arrays[key][...] = False
        for key, array in self.crash_report.actions.items():
            data[key][0] = (
                torch.as_tensor(array[row], device="cpu")
                if torch.is_tensor(data[key])
                else array[row]
            )
        self.batch.start(self._lane)(0)
        for key in self.batch.spec.observation_specs:
            data[key][0] = data[key][1]


def same_bits(a: Array, b: Array) -> bool:
    """Whether two arrays are equal bit for bit."""
    if a.dtype == object:
        return bool(a.tolist() == b.tolist())
    return (a.shape, a.dtype, a.tobytes()) == (b.shape, b.dtype, b.tobytes())


def _as_stored(value: Array, recorded: Array) -> Array:
    """A floating observation in the dtype in which the collector stored it (``obs_dtype``)."""
    floats = value.dtype.kind == "f" and recorded.dtype.kind == "f"
    return value.astype(recorded.dtype) if floats else value


def _host(value: Any) -> Any:
    return value.cpu().numpy() if hasattr(value, "cpu") else value
