"""Groups of whole episodes, joined over batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, takewhile
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
import torch

from muster.episodes.kept import CopiedRows, Span, gather
from muster.episodes.plain import from_plain, to_plain
from muster.episodes.rules import ENDLESS, StreamRule, check_stream_rule, make_queue
from muster.episodes.segment import ENDED, NEVER, Pieces, find_pieces, padded, take, time_last
from muster.errors import BadOption
from muster.keys import POLICY_VERSION, Key, dotted
from muster.memory.specs import Array
from muster.utils.integers import integer

if TYPE_CHECKING:
    from tensordict import TensorDict

Layout = Literal["cat", "pad"]
Envs = Sequence[int] | Array | None

CUT, MIXED = -2, -3  # in the place of an episode's number: why its rows are not kept
GOING = -1  # in the place of an episode's end
UNKNOWN = -2  # in the place of an open episode's trajectory id
REASONS = {CUT: "cut", MIXED: "mixed_policy"}

NO_MORE = 2**62  # divided by the number of environments: the time of one from which nothing more will come


class EpisodeGroup(NamedTuple):
    """What is delivered at a time, and its frames without padding.

    The batch is ``[frames]`` with names ``["time"]``, or ``[n, longest]`` with ``("collector", "mask")``.
    """

    batch: TensorDict
    frames: int


@dataclass(eq=False, slots=True)
class HeldEpisode:
    """An episode whose rows (``length`` frames in ``parts``) are kept, or which is open and was dropped.

    Attributes:
        traj_id: tells it from the environment's next one; not used after its end, like ``version`` of its first row.
        number: time of its first row * number of environments + ``env``; negative if it was dropped.
        end: the sum of all environments' times before the batch in which it ended, plus the row; or ``GOING``.
    """

    env: int
    traj_id: int
    number: int
    version: int
    length: int = 0
    end: int = GOING
    parts: list[tuple[CopiedRows, Span]] = field(default_factory=list)


class WholeEpisodes:
    """Turns successive batches of one collector into groups of exactly ``n`` complete episodes.

    Groups are copies; no batch is kept alive. ``pushed = delivered + sum(dropped.values()) + frames_held``, in frames.
    Rows are copied and joined before anything else is changed. If that fails (no memory, for instance), nothing is
    lost: a batch that cannot be copied was not pushed, and groups that cannot be joined are held. An episode that never
    ends is held for ever, and with "first_begun" all that began after it: such environments need
    ``max_frames_per_traj``. What waits costs memory, but no time.

    Batches may also be of some of the environments each, in any order (``push(batch, envs)``). Time is then counted in
    every environment's own rows, so "first_begun" and "per_env" give the same groups whatever the speed of each.

    Args:
        n: episodes per group; without a ``rule`` it has no meaning.
        num_envs: environments in all batches (in one: the product of its dimensions other than time; 1 without any).
        layout: ``"cat"`` one after the other; ``"pad"`` one per line, zeros on the right, trajectory id -1 there.
        rule: which episodes come next, see ``make_queue``. None: taken by hand, with ``new_ends`` and ``take``.
        on_policy_only: drop episodes in which several policy versions acted; what is left is biased to short ones.
        done_key: the column that says that an episode ended.
        from_resets: the first rows come after resets. False: the first episode of every environment is dropped.

    Attributes:
        frames_held: frames kept for groups to come: of open episodes, and of ended ones that wait for others.
        dropped: frames that no group will show, by reason: "cut" (the episode went on without an end, or
            ``flush``), "mixed_policy", and those given to ``clear``.
    """

    def __init__(
        self,
        n: int | None = None,
        *,
        num_envs: int,
        layout: Layout = "cat",
        rule: StreamRule | None = "first_begun",
        on_policy_only: bool = False,
        done_key: Key = ENDED,
        from_resets: bool = True,
    ) -> None:
        self.n = 0 if rule is None else integer("n", n, of="WholeEpisodes")
        self.num_envs = integer("num_envs", num_envs, of="WholeEpisodes")
        if layout not in get_args(Layout):
            raise BadOption(f"WholeEpisodes(layout={layout!r}): expected 'cat' or 'pad'")
        if rule is not None:
            check_stream_rule("rule", rule)
        if rule == "per_env" and self.n % num_envs:
            raise BadOption(f'WholeEpisodes({n}, rule="per_env"): {n} is not a multiple of num_envs={num_envs}')
        self.layout, self.rule = layout, rule
        self.on_policy_only, self.done_key = on_policy_only, done_key
        self.dropped: Counter[str] = Counter()
        self.frames_held = 0
        self._time = np.zeros(self.num_envs, np.int64)  # rows so far, of each environment
        middle = () if from_resets else range(self.num_envs)
        self._open = {env: HeldEpisode(env, UNKNOWN, CUT, 0) for env in middle}  # by environment
        self._first_open = np.full(self.num_envs, NO_MORE)  # number of each environment's open episode that is held
        self._ended: dict[int, HeldEpisode] = {}  # by number, in order of their ends, then by environment
        self._queue = None if rule is None else make_queue(rule, self.n, self.num_envs)  # of those that wait for others
        self._due: list[int] = []  # those that do not, in order
        self._without_end = np.zeros(self.num_envs, np.int64)  # rows of each environment since an episode of it ended
        self._asked = 0  # what ended before was in ``new_ends`` already
        self._sparse: set[CopiedRows] = set()  # whose rows were dropped in part since they were last compacted

    @property
    def held(self) -> list[int]:
        """The numbers of complete episodes, in order of their ends. Number k is of environment ``k % num_envs``."""
        return list(self._ended)

    def push(self, batch: TensorDict, envs: Envs = None) -> list[EpisodeGroup]:
        """Take the next batch, ``[*lead, T]``, of the environments ``envs`` (None: all); it is copied. ``BadOption`` if
        it does not fit. Returns the groups that are complete now, often none.
        """
        self.add(batch, envs)
        return self.groups()

    def add(self, batch: TensorDict, envs: Envs = None) -> None:
        """The first half of ``push``: take the batch."""
        batch = time_last(batch)
        numbers = self._numbers(batch, envs)
        self._check(batch)
        pieces = find_pieces(batch, self.done_key)
        T = batch.shape[-1]
        if len(pieces.rows):
            chunk = CopiedRows(take(batch, pieces.rows))
            place, t = np.divmod(pieces.rows[pieces.first], T)
            env, end = numbers[place], self._time.sum() + t + pieces.length - 1
            begin = (self._time[env] + t) * self.num_envs + env
            version = self._versions(batch, pieces)
            columns = (env, begin, pieces.first, pieces.length, pieces.traj_id, version)
            ends = np.where(pieces.ended, end, GOING).tolist()
            ended = []
            for piece, row in zip(zip(*(c.tolist() for c in columns), strict=True), ends, strict=True):
                episode = self._follow(chunk, *piece)
                if row != GOING:
                    episode.end = row
                    del self._open[episode.env]
                    self._first_open[episode.env] = NO_MORE
                    ended.append(episode)
            self._hold(ended)
            self._sparse.add(chunk)
            np.add.at(self._without_end, env, pieces.length)
            self._without_end[env[pieces.ended]] = 0
        self._time[numbers] += T
        self._compact()

    def groups(self) -> list[EpisodeGroup]:
        """The second half of ``push``: the groups that are complete."""
        if self._queue is None:
            return []
        coming = self._time * self.num_envs + np.arange(self.num_envs)  # episodes to come do not begin before
        self._due += self._queue.pop(int(np.minimum(coming, self._first_open).min()))
        chosen = [
            [self._ended[number] for number in self._due[begin : begin + self.n]]
            for begin in range(0, len(self._due) - self.n + 1, self.n)
        ]
        made = [self._joined(episodes) for episodes in chosen]
        for episodes in chosen:
            self._let_go(episodes)
        del self._due[: len(made) * self.n]
        self._compact()
        return made

    def new_ends(self) -> list[list[int]]:
        """The episodes that ended since the last call and are held, by time step; ascending by environment within."""
        last_first = takewhile(lambda number: self._ended[number].end >= self._asked, reversed(self._ended))
        new = list(last_first)[::-1]
        self._asked = int(self._time.sum())
        return [list(step) for _, step in groupby(new, lambda number: self._ended[number].end)]

    def take(self, numbers: Sequence[int]) -> EpisodeGroup:
        """A group of these complete episodes, in this order; they are not held any more. For ``rule=None``."""
        known = self.rule is None and all(number in self._ended for number in numbers)
        if not numbers or not known or len({*numbers}) < len(numbers):
            raise BadOption(f"take({numbers}): expected different numbers of complete episodes that are held")
        episodes = [self._ended[number] for number in numbers]
        made = self._joined(episodes)
        self._let_go(episodes)
        self._compact()
        return made

    def check_ends(self, waiting: str, *, resets: bool) -> None:
        """Raise ``BadOption`` if an environment's end is awaited for over ``ENDLESS`` steps, and count from 0 again."""
        steps = self._without_end
        worst = int(steps.argmin() if self.rule == "first_done" else steps.argmax())
        if (made := int(steps[worst])) <= ENDLESS:
            return
        steps[:] = 0
        raise BadOption(
            f"environment {worst} has made {made:,} steps, no episode of it has ended, and {waiting} waits for that. "
            + (
                "reset_at_each_iter=True cuts its episodes at the end of every batch: leave it out, collect batches "
                "longer than episodes (frames_per_batch), or"
                if resets
                else "Episodes need an end:"
            )
            + " give the collector max_frames_per_traj=, which truncates them. Nothing was lost: another call waits on."
        )

    def skip(self, batch: TensorDict, envs: Envs = None) -> None:
        """Take note of a batch that goes elsewhere: episodes with a part in it will not be whole, and are dropped."""
        batch = time_last(batch)
        numbers = self._numbers(batch, envs)
        pieces = find_pieces(batch, self.done_key)
        self.flush(numbers.tolist())
        env = numbers[pieces.rows[pieces.first] // batch.shape[-1]]
        for i, traj_id, ended in zip(env.tolist(), pieces.traj_id.tolist(), pieces.ended.tolist(), strict=True):
            self._open.pop(i, None)
            if not ended:
                self._open[i] = HeldEpisode(i, traj_id, CUT, 0)
        self._time[numbers] += batch.shape[-1]

    def flush(self, envs: Iterable[int] | None = None) -> int:
        """Drop the open episodes of ``envs`` (default all), which will not go on; returns their frames."""
        before = self.frames_held
        for env in range(self.num_envs) if envs is None else envs:
            if not 0 <= env < self.num_envs:
                raise BadOption(f"flush({envs}): environments are numbered 0 to {self.num_envs - 1}")
            self._without_end[env] = 0
            if env in self._open:
                self._drop(self._open[env], CUT)
        self._compact()
        return before - self.frames_held

    def clear(self, reason: str) -> int:
        """Drop all that is held, complete or open (counted as ``reason``), and what open episodes go on with (as
        "cut").

        Returns the frames dropped.
        """
        frames = self.frames_held
        if frames:
            self.dropped[reason] += frames
        for episode in self._open.values():
            self._forget(episode, min(episode.number, CUT))
        self._ended.clear()
        self._sparse.clear()
        self._queue = None if self.rule is None else make_queue(self.rule, self.n, self.num_envs)
        self._due = []
        self.frames_held = 0
        return frames

    def retire(self, envs: Iterable[int]) -> int:
        """Wait no longer for environments that will give no more rows; ``push`` then gives what that completes.

        Returns the frames dropped. ``BadOption`` if the rule needs them ("per_env").
        """
        envs = list(envs)
        if self.rule == "per_env" and envs:
            raise BadOption(f"retire({envs}): rule='per_env' needs episodes of every environment; use 'first_begun'")
        frames = self.flush(envs)
        self._time[envs] = NO_MORE // self.num_envs
        return frames

    def state_dict(self) -> dict[str, Any]:
        """All that is held, as numbers, tensors and lists; it shares no memory with groups."""
        episodes = [*self._ended.values(), *self._open.values()]
        columns = [(e.env, e.traj_id, e.number, e.version, e.length, e.end) for e in episodes]
        return {
            "num_envs": self.num_envs,
            "time": torch.from_numpy(self._time.copy()),
            "dropped": dict(self.dropped),
            "episodes": torch.tensor(columns, dtype=torch.int64).reshape(-1, 6),
            "asked": self._asked,
            "rows": to_plain(take(*_gathered(episodes))) if self.frames_held else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was called; ``n``, ``layout`` and ``rule`` may have changed, ``num_envs`` not
        (``BadOption``).
        """
        if state["num_envs"] != self.num_envs:
            raise BadOption(f"the state is of {state['num_envs']} environments, but num_envs={self.num_envs}")
        self.clear("")
        self._time, self.dropped = state["time"].numpy().copy(), Counter(state["dropped"])
        self._without_end[:] = 0
        episodes = [HeldEpisode(*columns) for columns in state["episodes"].tolist()]
        self._open = {episode.env: episode for episode in episodes if episode.end == GOING}
        self._first_open[:] = NO_MORE
        for env, episode in self._open.items():
            self._first_open[env] = episode.number if episode.number >= 0 else NO_MORE
        chunk = None if state["rows"] is None else CopiedRows(from_plain(state["rows"]))
        for episode in episodes:
            if chunk is not None and episode.length:
                episode.parts.append((chunk, chunk.keep(self.frames_held, episode.length)))
                self.frames_held += episode.length
        self._hold(episode for episode in episodes if episode.end != GOING)
        self._asked = state["asked"]

    # --- parts ------------------------------------------------------------------------------------

    def _numbers(self, batch: TensorDict, envs: Envs) -> Array:
        numbers = np.arange(self.num_envs) if envs is None else np.asarray(envs)
        if envs is not None and not (
            numbers.ndim == 1
            and numbers.dtype.kind in "iu"
            and len({*numbers.tolist()}.intersection(range(self.num_envs))) == len(numbers)
        ):
            raise BadOption(f"envs={envs}: expected different numbers from 0 to {self.num_envs - 1}")
        found = batch.numel() // max(batch.shape[-1], 1) if batch.ndim else 0
        if found != len(numbers):
            raise BadOption(
                f"a batch of shape {list(batch.shape)} has {found} environments and then time; expected {len(numbers)} "
                f"environments, as in {'num_envs; envs= names those of a part' if envs is None else f'envs={envs}'}"
            )
        return numbers.astype(np.int64)

    def _check(self, batch: TensorDict) -> None:
        for key, why in (
            (self.done_key, "where episodes end; name the column that does: done_key="),
            (POLICY_VERSION, "which policy acted, for on_policy_only=True: track_policy_version=True"),
        ):
            if (key != POLICY_VERSION or self.on_policy_only) and batch.get(key, None) is None:
                raise BadOption(f"the batch has no {dotted(key)}, which says {why}")

    def _versions(self, batch: TensorDict, pieces: Pieces) -> Array:
        """The policy version of each piece, ``MIXED`` for several; all 0 where it does not matter."""
        if not self.on_policy_only:
            return np.zeros_like(pieces.first)
        versions = batch[POLICY_VERSION].reshape(-1).cpu().numpy()[pieces.rows]
        low, high = (function.reduceat(versions, pieces.first) for function in (np.minimum, np.maximum))
        return np.where(low == high, low, MIXED)

    def _follow(
        self, chunk: CopiedRows, env: int, begin: int, first: int, length: int, traj_id: int, version: int
    ) -> HeldEpisode:
        """Add a piece (rows of ``chunk`` from ``first`` on) to its episode, or to a new one of number ``begin``."""
        episode = self._open.get(env)
        if episode is not None and episode.traj_id == UNKNOWN:
            episode.traj_id = traj_id
        if episode is None or episode.traj_id != traj_id:
            if episode is not None:
                self._drop(episode, CUT)
            episode = self._open[env] = HeldEpisode(env, traj_id, begin, version)
            self._first_open[env] = begin
        if version != episode.version or version == MIXED:
            self._drop(episode, MIXED)
        if episode.number < 0:
            self.dropped[REASONS[episode.number]] += length
        else:
            episode.parts.append((chunk, chunk.keep(first, length)))
            episode.length += length
            self.frames_held += length
        return episode

    def _hold(self, ended: Iterable[HeldEpisode]) -> None:
        for episode in sorted(ended, key=lambda episode: (episode.end, episode.env)):
            if episode.number >= 0:
                self._ended[episode.number] = episode
                if self._queue is not None:
                    self._queue.add(episode.number)

    def _drop(self, episode: HeldEpisode, reason: int) -> None:
        """Let go of an open episode's rows, and of those to come until its end."""
        if episode.number >= 0:
            self.dropped[REASONS[reason]] += episode.length
            self._release(episode)
            self._forget(episode, reason)

    def _forget(self, episode: HeldEpisode, reason: int) -> None:
        """The rows of an open episode that are still to come are dropped for this reason."""
        episode.number, episode.length, episode.parts = reason, 0, []
        self._first_open[episode.env] = NO_MORE

    def _joined(self, episodes: Sequence[HeldEpisode]) -> EpisodeGroup:
        length = np.array([episode.length for episode in episodes])
        rows, numbers = _gathered(episodes)
        if self.layout == "pad":
            group = padded(rows, numbers, length, NEVER)
        else:
            group = take(rows, numbers)
            group.names = ["time"]
        return EpisodeGroup(group, int(length.sum()))

    def _let_go(self, episodes: Sequence[HeldEpisode]) -> None:
        for episode in episodes:
            del self._ended[episode.number]
            self._release(episode)

    def _release(self, episode: HeldEpisode) -> None:
        self.frames_held -= episode.length
        for chunk, span in episode.parts:
            chunk.drop(span)
            self._sparse.add(chunk)

    def _compact(self) -> None:
        for chunk in self._sparse:
            chunk.compact()
        self._sparse.clear()


def _gathered(episodes: Iterable[HeldEpisode]) -> tuple[TensorDict, Array]:
    return gather([part for episode in episodes for part in episode.parts])
