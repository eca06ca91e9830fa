"""An environment whose data and counters account for every one of its steps, also after its process
was killed.
"""

from __future__ import annotations

import mmap
import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tensordict import TensorDict

Array = NDArray[Any]
Info = dict[str, Any]
Run = tuple[int, int]  # numbers of the environment and of its run

MOST = 1024  # environments per file
# columns of ``OracleEnv.read``
RUNS = 0
STARTED = 1
EXECUTED = 2
CLOSED = 3
COLUMNS = 4

ENDS = 7  # average number of steps per episode

_made: Counter[tuple[str, int]] = Counter()  # environments made in this process


@dataclass(frozen=True)
class Fault:
    """A failure of an ``OracleEnv``.

    Attributes:
        do: called within the failing call with its correct return value; the result is returned
            instead.
        on: the kind of call: "construct", "reset", "step" or "close".
        at: number of the call, counted over a run from 0.
        runs: number of runs of the environment that fail, from the first; None: all.
    """

    do: Callable[[Any], Any]
    on: str = "step"
    at: int = 0
    runs: int | None = 1


class OracleEnv(gymnasium.Env[Any, Any]):
    """Observation ``[env, run, episode, t, total, state]`` (int64); every row is computed from the
    one before.

    ``state`` is a hash of the last observation and action, and determines the reward and the ends
    of episodes. So ``check_stream`` detects lost, duplicated, shifted and wrongly paired rows from
    the data alone. A run lasts from one construction of the environment until its worker exits.
    ``total`` counts the steps of a run.

    The counters are in a memory-mapped file, and survive the process.

    Args:
        path: path of the file, created if it is missing; shared by all environments of a test.
        first, count: a worker makes ``count`` environments one after another, numbered ``first``,
            ``first + 1``, ... With ``create_env_fn=[partial(OracleEnv, path, 3 * i, 3) for i in
            range(2)]`` and ``num_envs=3`` the numbers are those of the collector.
        fault: the failure, if any.

    Attributes:
        number: number of the environment.
        run: number of the run, from 0.
        fault: may be changed.
    """

    def __init__(
        self,
        path: str | Path,
        first: int = 0,
        count: int = 1,
        fault: Fault | None = None,
    ) -> None:
        place = (str(path), first)
        self.number = first + _made[place] % count
        _made[place] += 1
        self._cells = _map(path)[self.number]
        self.run = int(self._cells[RUNS])
        self._cells[RUNS] += 1
        self.fault = fault
        self._calls = Counter[str]()
        self.observation_space = spaces.Box(0, 2**62, (6,), np.int64)
        self.action_space = spaces.Discrete(5)
        before_first_reset = (-1, 0, 0, 0)
        self._now = (self.number, self.run, *before_first_reset)
        self._pass("construct", None)

    @staticmethod
    def read(path: str | Path) -> Array:
        """Counts of each environment's runs, started steps, executed steps, and closes: int64
        ``[envs, 4]``.

        If a process was killed in the middle of a step, that step was started and not executed.
        """
        counts = np.array(_map(path))
        used = np.flatnonzero(counts[:, RUNS])
        if len(used) == 0:
            return counts[:0]
        last = int(used[-1])
        return counts[: last + 1]

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> Any:
        super().reset(seed=seed)
        env, run, episode, _, total, _ = self._now
        state = int(self.np_random.integers(2**31))
        self._now = (env, run, episode + 1, 0, total, state)
        honest: Any = (np.array(self._now), {})
        return self._pass("reset", honest)

    def step(self, action: int) -> Any:
        self._cells[STARTED] += 1
        results = follow(self._now, int(action))
        now, reward, terminated, truncated = results
        obs = np.array(now)
        honest: Any = (obs, float(reward), terminated, truncated, {})
        got = self._pass("step", honest)
        self._now = now
        self._cells[EXECUTED] += 1
        return got

    def close(self) -> None:
        self._pass("close", None)
        self._cells[CLOSED] += 1

    def _pass(self, on: str, honest: Any) -> Any:
        """Return the result of a call: ``honest``, or that of the fault."""
        number = self._calls[on]
        fault = self.fault
        self._calls[on] += 1
        if fault is None:
            return honest
        if fault.on != on:
            return honest
        if fault.at != number:
            return honest
        if fault.runs is not None and self.run >= fault.runs:
            return honest
        return fault.do(honest)


def follow(obs: Any, action: Any) -> tuple[Any, Any, Any, Any]:
    """Compute the results of ``action`` in an ``OracleEnv``; ``obs`` is six numbers, or six arrays
    for many at once.

    Returns:
        the next observation (a tuple of six), reward, terminated, truncated.
    """
    env, run, episode, t, total, state = obs
    for value in (env, run, episode, t, total, action):
        state = (state * 1103515245 + 12345 + value) % 2**31
    ended = (state >> 8) % ENDS == 0
    kind = (state >> 5) % 4
    after = (env, run, episode, t + 1, total + 1, state)
    reward = (state >> 4) % 1000
    terminated = ended & (kind != 1)
    truncated = ended & (kind <= 1)
    return after, reward, terminated, truncated


def check_stream(
    batches: Iterable[TensorDict],
    *,
    gaps: int = 0,
) -> Counter[Run]:
    """Check that batches of ``OracleEnv`` (time last) have every step of every run once, in order,
    up to some step.

    Rows that are not ``collector/valid`` are skipped; ``truncated`` may be set in further rows,
    where Muster truncated.

    Args:
        batches: all batches of a collector, in order; an iterator is checked batch by batch.
        gaps: expected number of missing steps after ends of episodes: those with outputs that
            Muster refused.

    Returns:
        the number of steps of each run, by ``(env, run)``.

    Raises:
        AssertionError: the data are wrong; the message has the first place.
    """
    stream = _Stream()
    for number, batch in enumerate(batches):
        stream.add(batch, f"batch {number}")
    assert stream.gaps == gaps, f"{stream.gaps} steps are missing, not {gaps}"
    return stream.rows


class _Stream:
    """The state of the check after some batches."""

    def __init__(self) -> None:
        self.rows = Counter[Run]()
        self.gaps = 0
        # by environment: observation after its last row; done
        self._last: dict[int, tuple[Array, bool]] = {}
        # trajectory ids by environment, run and episode
        self._ids: dict[tuple[int, ...], int] = {}
        # the inverse of ``_ids``
        self._used: dict[int, tuple[int, ...]] = {}

    def add(self, batch: TensorDict, where: str) -> None:
        assert batch.names[-1] == "time", f"{where}: time is the last dimension"
        steps = batch.shape[-1]
        obs = batch["observation"].numpy()
        obs = obs.reshape(-1, steps, 6)
        after = batch["next", "observation"].numpy()
        after = after.reshape(-1, steps, 6)
        rows = obs.shape[:2]
        marks = batch.get(("collector", "valid"), None)
        valid = np.ones(rows, bool)
        if marks is not None:
            valid = marks.numpy().reshape(rows)
        actions = batch["action"].numpy().reshape(rows)
        numbers = np.moveaxis(obs, -1, 0)
        results = follow(numbers, actions)
        expected_after, reward, terminated, truncated = results
        flags = {}
        for flag in ("reward", "terminated", "truncated", "done"):
            flags[flag] = batch["next", flag].numpy().reshape(rows)
        either = flags["terminated"] | flags["truncated"]
        differs = after != np.stack(expected_after, -1)
        wrong = {
            "next/observation": differs.any(-1),
            "reward": flags["reward"] != reward,
            "terminated": flags["terminated"] != terminated,
            "truncated": flags["truncated"] < truncated,
            "done": flags["done"] != either,
        }
        for name, at in wrong.items():
            at &= valid
            assert not at.any(), (
                f"{where}: {name} is not what follows from the row, first at {np.argwhere(at)[0]}"
            )
        ids = batch["collector", "traj_ids"].numpy().reshape(rows)
        for lane in range(rows[0]):
            shown = valid[lane]
            if shown.any():
                parts = (
                    obs[lane][shown],
                    after[lane][shown],
                    flags["done"][lane][shown],
                    ids[lane][shown],
                )
                self._append(*parts, f"{where}, lane {lane}")

    def _append(
        self,
        obs: Array,
        after: Array,
        done: Array,
        ids: Array,
        where: str,
    ) -> None:
        """Check and add rows of one environment."""
        first = obs[0]
        env = int(first[0])
        run = int(first[1])
        before, ended = self._last.get(env, (None, True))
        if before is not None and before[1] == run:
            was_end = np.array([ended])
            self._join(before[None], was_end, first[None], f"{where}, row 0")
        else:
            known = -1 if before is None else int(before[1])
            assert run > known, (
                f"{where}: run {run} of environment {env} after run {known}"
            )
            t = first[3]
            total = first[4]
            assert t == total == 0, (
                f"{where}: run {run} of environment {env} begins with {first.tolist()}"
            )
        followed = after[:-1]
        done_before = done[:-1]
        self._join(followed, done_before, obs[1:], where)
        last = after[-1].copy()
        self._last[env] = (last, bool(done[-1]))
        self.rows[env, run] += len(obs)
        starts = np.append(True, done_before)
        for row in np.flatnonzero(starts):
            key = tuple(obs[row, :3].tolist())
            number = int(ids[row])
            known_id = self._ids.setdefault(key, number)
            assert known_id == number, (
                f"{where}: episode {key} is trajectory {known_id} and {number}"
            )
            known_key = self._used.setdefault(number, key)
            assert known_key == key, f"{where}: {known_key} and {key} share an id"
        unchanged = ids[1:] == ids[:-1]
        assert unchanged[~done_before].all(), (
            f"{where}: the trajectory changes within an episode"
        )

    def _join(
        self,
        before: Array,
        ended: Array,
        obs: Array,
        where: str,
    ) -> None:
        """Check that the rows ``obs`` directly follow the observations ``before``."""
        steps_between = obs[:, 4] - before[:, 4]
        missing = np.where(ended, steps_between, 0)
        env_and_run = slice(0, 2)
        same = obs[:, env_and_run] == before[:, env_and_run]
        later_episode = obs[:, 2] > before[:, 2]
        first_row = obs[:, 3] == 0
        began = same.all(-1) & later_episode & first_row
        differs = (obs != before).any(-1)
        bad = np.where(ended, ~began, differs)
        self.gaps += int(missing.sum())
        if bad.any():
            row = int(bad.argmax())
            end = " (the end of an episode)" if ended[row] else ""
            raise AssertionError(
                f"{where}: after {before[row].tolist()}{end} comes"
                f" {obs[row].tolist()}, {row + 1} rows on"
            )


def _map(path: str | Path) -> Array:
    """Map the counters into shared memory."""
    size = MOST * COLUMNS * 8
    flags = os.O_RDWR | os.O_CREAT
    fd = os.open(path, flags, 0o600)
    try:
        os.ftruncate(fd, size)
        memory = mmap.mmap(fd, size)
        cells = np.frombuffer(memory, np.int64)
        return cells.reshape(MOST, COLUMNS)
    finally:
        os.close(fd)
