"""The actions and resets since the last known start of each environment, from which its state can
be replayed.

The worker records resets (``Anchors``). The parent keeps actions (``ActionLog``), also after the
worker has died.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from muster.capabilities import ResetsWithOptions, capability
from muster.errors import MusterError, text_of
from muster.keys import Key
from muster.memory.specs import Array
from muster.protocols import EnvBatch
from muster.restore.crash_report import CrashReport, EnvFactory, Special
from muster.restore.pickling import unpickled
from muster.rng import set_state

LIMIT_BYTES = 64 << 20  # for all action logs of a collector
GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
SPECIAL_BYTES = 700  # size of a random state as a Python object
# columns of ``ResetLog.resets``
CALL = 0
ROW = 1
ENV = 2

NOT_KNOWN = (
    "It cannot be replayed: neither a seed nor a random state is known from which its actions are"
    " all known. Seed the collector; of environments that draw from generators of their own, only"
    " the time since the last seed counts."
)
TOO_LONG = (
    "It cannot be replayed: its beginning is missing, since the actions from there on passed {:,}"
    " bytes."
)
UNSURE = (
    "It cannot be replayed: it was reset by request before its first step, and the worker died"
    " before it told whether it had begun an episode before that."
)
BY_STATE = (
    "It begins with the random state before a reset: what the environment itself carries from"
    " episode to episode, and generators of other libraries, are as in a new one."
)
TOGETHER = "All environments of the batch are replayed together, from their seeds."


@dataclass
class ResetLog:
    """The resets of one rollout, ``[n, 3]`` int32 in order: number of the call, rows before it,
    environment.

    ``special``: their seeds, random states and options, by position. ``due``: resets pending for
    the next rollout.
    """

    resets: Array = field(default_factory=lambda: np.zeros((0, 3), np.int32))
    special: dict[int, Special] = field(default_factory=dict)
    due: dict[int, Special] = field(default_factory=dict)


def random_state(env: Any) -> dict[str, Any] | None:
    """The state of a Gymnasium environment's random generator; None if it has none."""
    try:
        # The first access creates the generator, as the first draw would.
        state: dict[str, Any] = env.unwrapped.np_random.bit_generator.state
    except Exception:  # noqa: BLE001  (foreign attributes can raise anything; the state is unknown then)
        return None
    return state


def generator_of(
    state: Mapping[str, Any],
    seeds: Mapping[str, Any] | None = None,
) -> np.random.Generator:
    """A NumPy generator whose bit generator has this state; ``seeds`` is the state of its
    ``SeedSequence``.
    """
    name = state["bit_generator"]
    if name not in GENERATORS:
        raise ValueError(f"{name!r} is not a bit generator of NumPy")
    seed = np.random.SeedSequence(**seeds) if seeds else 0
    bits = getattr(np.random, name)(seed)
    set_state(bits, state)
    return np.random.Generator(bits)


class Anchors:
    """Records the resets of a group in the worker: a list entry per reset, and 2 us per environment
    and rollout.

    Attributes:
        seeds: the last seed of each environment; None: it has never had one.
    """

    def __init__(self, env: EnvBatch) -> None:
        self._env = env
        self._with_options = capability(env, ResetsWithOptions)
        self._alone = env.spec.replays_alone
        self.seeds: list[int | None] = [None] * env.spec.num_envs
        self.forget()

    def before_reset(
        self,
        row: int,
        which: Sequence[int],
        seeds: Sequence[int] | None,
    ) -> None:
        """Record a reset.

        Call this before every reset, with the arguments of ``EnvBatch.reset``.
        """
        options = None
        if self._with_options is not None:
            options = self._with_options.reset_options or None
        if seeds is not None or options or not self._known.issuperset(which):
            self._note_special(which, seeds, options)
        self._resets += [(self._calls, row, i) for i in which]
        self._calls += 1

    def _note_special(
        self,
        which: Sequence[int],
        seeds: Sequence[int] | None,
        options: dict[str, Any] | None,
    ) -> None:
        envs = self._env.objects()
        for n, i in enumerate(which):
            seed = state = None
            if seeds is not None:
                seed = self.seeds[i] = int(seeds[n])
            elif self._alone and i not in self._known:
                state = random_state(envs[i])
            special = Special(seed, state, options)
            if special.is_anchor:
                self._known.add(i)
            if not special.is_plain:
                self._special[len(self._resets) + n] = special

    def take(self, begin: int = 0, due: Sequence[int] = ()) -> ResetLog:
        """Return the resets since the last call, with rows counted from ``begin``; ``due``: pending
        resets.
        """
        resets = np.array(self._resets, np.int32).reshape(-1, 3)
        resets[:, ROW] -= begin
        envs = self._env.objects()
        pending: dict[int, Special] = {}
        for i in due:
            state = random_state(envs[i]) if self._alone else None
            pending[i] = Special(None, state, None)
        log = ResetLog(resets, self._special, pending)
        self.forget()
        return log

    def forget(self) -> None:
        """Discard the resets since the last ``take``, because their rows will not be reported."""
        self._resets: list[tuple[int, int, int]] = []
        self._special: dict[int, Special] = {}
        self._known: set[int] = set()
        self._calls = 0

    def lost_track(self, which: Sequence[int]) -> None:
        """Mark environments stepped by actions that are not in the log.

        Only a known reset makes them replayable.
        """
        self.forget()
        self._resets = [(0, 0, i) for i in which]


@dataclass
class _Recorded:
    number: int
    actions: dict[Key, Array]  # [n, B, *shape]
    log: ResetLog
    stepped: Array | None = (
        None  # [n, B]; None: every environment was stepped in every row
    )

    @property
    def rows(self) -> int:
        return len(next(iter(self.actions.values())))

    def made(self, chosen: slice) -> Array:
        """``[n]`` bool: the rows in which the chosen environment was stepped; all rows for several
        environments.
        """
        if self.stepped is None or chosen.start is None:
            return np.ones(self.rows, bool)
        made: Array = self.stepped[:, chosen.start]
        return made

    @property
    def nbytes(self) -> int:
        arrays = (*self.actions.values(), self.log.resets)
        of_arrays = sum(array.nbytes for array in arrays)
        return of_arrays + SPECIAL_BYTES * len(self.log.special)


class ActionLog:
    """The actions of a group since the last known start of each of its environments, in the parent.

    When ``nbytes`` exceeds ``limit_bytes``, the oldest actions are dropped. A start before them
    cannot be replayed.
    """

    def __init__(
        self,
        factory: EnvFactory,
        *,
        name: str,
        env_ids: Sequence[int],
        alone: bool,
        limit_bytes: int = LIMIT_BYTES,
        max_frames_per_traj: int | None = None,
    ) -> None:
        self.factory = factory
        self.name = name
        self.env_ids = [int(i) for i in env_ids]
        self.alone = alone
        self.limit_bytes = limit_bytes
        self.max_frames_per_traj = max_frames_per_traj
        self._next = 0  # number of the next chunk
        self.forget()

    def forget(self) -> None:
        """Drop all actions, because the next ones do not follow them: after a failure, a restart,
        or lost rows.
        """
        self._chunks: deque[_Recorded] = deque()
        self.nbytes = 0
        # chunk, position in its resets
        self._anchors: list[tuple[int, int] | None] = [None] * len(self.env_ids)
        self._due: dict[
            int, Special
        ] = {}  # resets that no rollout result has contained yet
        # of these, environments that may have been reset already; and those that were to be reset
        # again after that
        self._maybe_reset: set[int] = set()
        self._unsure: set[int] = set()
        self._cut = False  # actions were dropped to save memory

    def reset(
        self,
        which: Sequence[int] | None = None,
        seeds: Sequence[int] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        """Record that environments (default all) will be reset by request, with the next rollout."""
        chosen = range(len(self.env_ids)) if which is None else sorted(set(which))
        for n, i in enumerate(chosen):
            due = self._due.get(i, Special(None, None, None))
            seeded = due if seeds is None else Special(int(seeds[n]), None, None)
            self._due[i] = seeded._replace(options=options)
            if seeds is not None:
                self._unsure.discard(i)
            elif i in self._maybe_reset:
                self._unsure.add(i)
            self._maybe_reset.discard(i)

    def may_have_reset(self) -> None:
        """Note that the resets that are due may have been executed, which the worker tells with its
        next rollout only.
        """
        self._maybe_reset.update(self._due)

    def add(
        self,
        actions: Mapping[Key, Array],
        log: ResetLog,
        stepped: Array | None = None,
    ) -> None:
        """Append a rollout: a copy of its actions, ``[n, B, *shape]`` per leaf, and its resets.

        ``stepped`` is ``[n, B]`` bool, False where an environment was bypassed; None: none was
        bypassed.
        """
        copies = {key: array.copy() for key, array in actions.items()}
        chunk = _Recorded(self._next, copies, log, stepped)
        self._chunks.append(chunk)
        self.nbytes += chunk.nbytes
        self._anchors = self._anchors_after(self._next, log)
        self._next += 1
        in_first_row = log.resets[:, ROW] == 0
        for i in log.resets[in_first_row, ENV].tolist():
            self._due.pop(i, None)
        self._maybe_reset.clear()
        self._unsure.clear()
        self._due = log.due | self._due
        self._trim()

    def crash_report(
        self,
        index: int | None,
        actions: Mapping[Key, Array],
        *,
        error: BaseException,
        phase: str,
        log: ResetLog | None = None,
        ended: Array | None = None,
        observation: Mapping[Key, Array] | None = None,
    ) -> CrashReport:
        """The crash report of environment ``index`` of the group (None: the failed environment is
        not known).

        Args:
            actions: actions of the failed rollout, ``[k, B, *shape]``; the last is that of the
                failed step, if any.
            error, phase: see ``CrashReport``.
            log: result of ``Anchors.take`` in the worker; None if it is lost.
            ended: ends of episodes, ``[k, B]`` bool, if the log is lost; it has no row for a failed
                step.
            observation: observation before the failure, ``[B, *shape]``, to check a replay.
        """
        is_lost = log is None
        if log is None:
            log = self._presumed(ended)
        if index is None and self.alone and len(self.env_ids) == 1:
            index = 0
        chunks = [*self._chunks, _Recorded(self._next, dict(actions), log)]
        anchor = self._anchor(index, phase, log)
        chosen = (
            slice(index, index + 1) if self.alone and index is not None else slice(None)
        )
        full = error.traceback if isinstance(error, MusterError) else ""
        texts = [text for text in (text_of(error), full) if text]
        crash_report = self._replay(
            anchor,
            chunks,
            chosen,
            alone=self.alone,
            phase=phase,
            kind=type(error).__name__,
            message="\n\n".join(texts),
        )
        missing = crash_report.missing
        caveat = ""
        if self.alone and index is None:
            missing = "It is not known which environment of the group it was."
        elif is_lost and not self._unsure.isdisjoint(range(len(self.env_ids))[chosen]):
            missing = UNSURE
        elif not self.alone:
            caveat = "" if anchor is None else TOGETHER
        elif anchor is not None and crash_report.special[0].seed is None:
            caveat = BY_STATE
        observed = {
            key: np.array(array[chosen]) for key, array in (observation or {}).items()
        }
        return replace(
            crash_report, observation=observed, missing=missing, caveat=caveat
        )

    def episode(
        self,
        index: int,
        end: int,
        actions: Mapping[Key, Array],
        log: ResetLog,
        stepped: Array | None,
    ) -> CrashReport:
        """The resets and actions of environment ``index`` up to the end of an episode, ``end`` rows
        into the rollout.

        The environments of the group are replayed ``alone``. ``actions``, ``log``, ``stepped``: as
        for ``add``.
        """
        count = int(
            (log.resets[:, ROW] < end).sum()
        )  # later ones start the next episodes
        special = {n: entry for n, entry in log.special.items() if n < count}
        log = ResetLog(log.resets[:count], special)
        last = {key: array[:end] for key, array in actions.items()}
        made = None if stepped is None else stepped[:end]
        chunks = [*self._chunks, _Recorded(self._next, last, log, made)]
        anchor = self._anchors_after(self._next, log)[index]
        chosen = slice(index, index + 1)
        return self._replay(
            anchor, chunks, chosen, alone=True, phase="close", kind="", message=""
        )

    def unpickle_factory(self) -> None:
        """Unpickle the functions that make the environments, for a crash report."""
        self.factory = unpickled(self.factory, "create_env_fn")

    def _replay(
        self,
        anchor: tuple[int, int] | None,
        chunks: list[_Recorded],
        chosen: slice,
        **known: Any,
    ) -> CrashReport:
        """Return the crash report of the chosen environments from a known start on; None: there is
        none.
        """
        crash_report = CrashReport(
            self.name,
            self.factory,
            self.env_ids[chosen],
            max_frames_per_traj=self.max_frames_per_traj,
            **known,
        )
        if anchor is None:
            missing = TOO_LONG.format(self.limit_bytes) if self._cut else NOT_KNOWN
            return replace(crash_report, missing=missing)
        number, position = anchor
        chunks = [chunk for chunk in chunks if chunk.number >= number]
        # if rows were bypassed, this reset is in row 0
        begin = int(chunks[0].log.resets[position, ROW])
        resets: list[Array] = []
        special: list[Special | None] = []
        rows = -begin
        calls = 0
        envs = np.arange(len(self.env_ids))[chosen]
        first_env = chosen.start or 0
        for chunk in chunks:
            places = np.flatnonzero(np.isin(chunk.log.resets[:, ENV], envs))
            places = places[places >= position]
            own = chunk.log.resets[places].astype(np.int64)
            resets.append(own + np.array([calls, rows, -first_env]))
            special += [chunk.log.special.get(place) for place in places.tolist()]
            calls += len(chunk.log.resets)
            rows += int(chunk.made(chosen).sum())
            position = 0
        actions: dict[Key, Array] = {}
        for key in chunks[0].actions:
            parts = [chunk.actions[key][chunk.made(chosen), chosen] for chunk in chunks]
            actions[key] = np.concatenate(parts)[begin:]
        return replace(
            crash_report,
            actions=actions,
            resets=np.concatenate(resets),
            special={n: entry for n, entry in enumerate(special) if entry is not None},
        )

    def _presumed(self, ended: Array | None) -> ResetLog:
        """The resets that the worker would have recorded, had it not died."""
        due = sorted(self._due.items())
        resets = [(0, 0, i) for i, _ in due]
        if ended is not None:
            resets += [(row + 1, row + 1, i) for row, i in np.argwhere(ended).tolist()]
        special = {n: entry for n, (_, entry) in enumerate(due) if not entry.is_plain}
        return ResetLog(np.array(resets, np.int32).reshape(-1, 3), special)

    def _anchor(
        self,
        index: int | None,
        phase: str,
        log: ResetLog,
    ) -> tuple[int, int] | None:
        """The chunk and the reset at which a replay starts, if the next chunk is the last and has
        ``log``.
        """
        if self.alone and index is None:
            return None
        before = self._anchors[index or 0]
        anchor = self._anchors_after(self._next, log)[index or 0]
        last = np.flatnonzero(log.resets[:, ENV] == index)[-1:].tolist()
        if phase == "reset" and before is not None and anchor == (self._next, *last):
            return before  # the failure of a reset can depend on the steps before it
        return anchor

    def _anchors_after(
        self,
        number: int,
        log: ResetLog,
    ) -> list[tuple[int, int] | None]:
        anchors = list(self._anchors)
        known = sorted(
            position for position, special in log.special.items() if special.is_anchor
        )
        if self.alone:
            for position in known:
                anchors[log.resets[position, ENV]] = (number, position)
            return anchors
        for call, count in Counter(log.resets[known, CALL].tolist()).items():
            if count == len(anchors):  # one call has reset all environments
                first = int(np.argmax(log.resets[:, CALL] == call))
                anchors = [(number, first)] * count
        return anchors

    def _trim(self) -> None:
        needed = [anchor[0] for anchor in self._anchors if anchor is not None]
        oldest = min(needed, default=self._next)
        while self._chunks and (
            self._chunks[0].number < oldest or self.nbytes > self.limit_bytes
        ):
            gone = self._chunks.popleft()
            self.nbytes -= gone.nbytes
            self._cut |= gone.number >= oldest
            for place, anchor in enumerate(self._anchors):
                if anchor is not None and anchor[0] <= gone.number:
                    self._anchors[place] = None
