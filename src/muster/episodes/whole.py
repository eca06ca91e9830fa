"""Groups of complete episodes, joined over batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, takewhile
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args
from weakref import WeakSet

import numpy as np
import torch

from muster.episodes.kept import CopiedRows, Span, cut_out, gather
from muster.episodes.plain import Place, to_plain
from muster.episodes.rules import ENDLESS, StreamRule, check_stream_rule, make_queue
from muster.episodes.segment import (
    ENDED,
    NEVER,
    Pieces,
    find_pieces,
    padded,
    take,
    time_last,
)
from muster.errors import BadOption
from muster.keys import POLICY_VERSION, Key, dotted
from muster.memory.specs import Array
from muster.utils.integers import integer

if TYPE_CHECKING:
    from tensordict import TensorDict

Layout = Literal["cat", "pad"]
Envs = Sequence[int] | Array | None

# in place of an episode's number: why its rows are not kept
CUT = -2
MIXED = -3
GOING = -1  # in place of an episode's end
UNKNOWN = -2  # in place of an open episode's trajectory id
REASONS = {CUT: "cut", MIXED: "mixed_policy"}

# divided by the number of environments: the time of an environment without further rows
NO_MORE = 2**62


class EpisodeGroup(NamedTuple):
    """A group of episodes to deliver, and its number of frames without padding.

    The batch is ``[frames]`` with names ``["time"]``, or ``[n, longest]`` with ``("collector",
    "mask")``.
    """

    batch: TensorDict
    frames: int


@dataclass(eq=False, slots=True)
class HeldEpisode:
    """An episode whose rows (``length`` frames in ``parts``) are kept, or an open episode that was
    dropped.

    Attributes:
        traj_id: trajectory id, different from the next one. After the end, it and ``version`` (of
            row 0) are unused.
        agent: the agent that it is of, where agents take turns.
        number: time of its first row * number of environments + ``env``; negative if it was
            dropped.
        end: sum of all environments' times before the batch in which it ended, plus the row; or
            ``GOING``.
    """

    env: int
    traj_id: int
    number: int
    version: int
    length: int = 0
    end: int = GOING
    agent: int = 0
    parts: list[tuple[CopiedRows, Span]] = field(default_factory=list)

    def identify(self, traj_id: int) -> None:
        """Set the trajectory id, which was unknown."""
        self.traj_id = traj_id

    def extend(self, chunk: CopiedRows, span: Span) -> None:
        """Add rows of a chunk."""
        self.parts.append((chunk, span))
        self.length += span.length

    def end_at(self, row: int) -> None:
        """Set where it ended; see ``end``."""
        self.end = row

    def forget(self, reason: int) -> None:
        """Forget all rows; ``reason`` takes the place of the number."""
        self.number = reason
        self.length = 0
        self.parts = []


class WholeEpisodes:
    """Joins successive batches of one collector to groups of exactly ``n`` complete episodes.

    Groups are copies; no batch is kept alive. ``added = delivered + sum(dropped.values()) +
    frames_held``, in frames. Rows are copied and joined before any other change. If that fails (no
    memory, for instance), nothing is lost: a batch that cannot be copied was not added, and groups
    that cannot be joined are kept. An episode that never ends is kept for ever, and with
    "first_begun" all that started after it: such environments need ``max_frames_per_traj``. Waiting
    episodes cost memory, but no time.

    A batch may contain only some of the environments, in any order (``add(batch, envs)``). Time is
    the number of rows of each environment, so "first_begun" and "per_env" give the same groups
    whatever the environments' speeds.

    Args:
        n: number of episodes per group; ignored without a ``rule``.
        num_envs: number of environments (of a full batch: the product of its dimensions besides
            time; 1 without any).
        layout: ``"cat"``: one after another; ``"pad"``: one per line, zeros on the right, with
            trajectory id -1.
        rule: order of the episodes, see ``make_queue``. None: the caller chooses, with ``new_ends``
            and ``take``.
        on_policy_only: drop episodes in which several policy versions acted; the others are biased
            to short ones.
        done_key: column that marks the ends of episodes.
        from_resets: the first rows come after resets. False: the first episode of every environment
            is dropped.

    Attributes:
        frames_held: number of kept frames, in open episodes and in ended ones that wait for others.
        dropped: number of frames that no group will contain, by reason: "cut" (the episode
            continued without an end, or ``flush``), "mixed_policy", and the reasons of ``clear``.
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
            raise BadOption(
                f"WholeEpisodes(layout={layout!r}): expected 'cat' or 'pad'"
            )
        if rule is not None:
            check_stream_rule("rule", rule)
        if rule == "per_env" and self.n % num_envs:
            raise BadOption(
                f'WholeEpisodes({n}, rule="per_env"): {n} is not a multiple of num_envs={num_envs}'
            )
        self.layout = layout
        self.rule = rule
        self.on_policy_only = on_policy_only
        self.done_key = done_key
        self.dropped: Counter[str] = Counter()
        self.frames_held = 0
        self._time = np.zeros(
            self.num_envs, np.int64
        )  # number of rows so far, by environment
        self._middle = () if from_resets else range(self.num_envs)
        self._open: dict[tuple[int, int], HeldEpisode] = {}  # by environment and agent
        # Number of each environment's open episode, if it is kept; with a column for each agent.
        self._first_open = np.empty((self.num_envs, 0), np.int64)
        self._make_room(1)
        # by number, in order of their ends, then by environment
        self._ended: dict[int, HeldEpisode] = {}
        # of episodes that wait
        self._queue = None if rule is None else make_queue(rule, self.n, self.num_envs)
        self._due: list[int] = []  # episodes that do not wait, in order
        # rows of each environment since its last end
        self._without_end = np.zeros(self.num_envs, np.int64)
        self._asked = 0  # earlier ends were returned by ``new_ends`` already
        # Some of their rows were dropped since the last batch, or before that (see ``_compact``).
        # Episodes keep them.
        self._sparse = WeakSet[CopiedRows]()
        self._sparser = WeakSet[CopiedRows]()

    @property
    def held(self) -> list[int]:
        """The numbers of complete episodes, in order of their ends.

        Number k is of environment ``k % num_envs``.
        """
        return list(self._ended)

    def add(self, batch: TensorDict, envs: Envs = None) -> None:
        """Add a copy of the next batch, ``[*lead, T]``, of the environments ``envs`` (None: all).
        Raises ``BadOption`` if it does not fit.
        """
        batch = time_last(batch)
        numbers = self._numbers(batch, envs)
        self._check(batch)
        pieces = find_pieces(batch, self.done_key)
        T = batch.shape[-1]
        if len(pieces.rows):
            self._add_pieces(batch, pieces, numbers)
        self._time[numbers] += T
        self._compact()

    def _add_pieces(
        self,
        batch: TensorDict,
        pieces: Pieces,
        numbers: Array,
    ) -> None:
        T = batch.shape[-1]
        chunk = CopiedRows(take(batch, pieces.rows))
        self._make_room(int(pieces.agent.max()) + 1)
        place, t = np.divmod(pieces.rows[pieces.first], T)
        last = pieces.rows[pieces.first + pieces.length - 1]
        env = numbers[place]
        end = self._time.sum() + last % T
        begin = (self._time[env] + t) * self.num_envs + env
        version = self._versions(batch, pieces)
        columns = (
            env,
            pieces.agent,
            begin,
            pieces.first,
            pieces.length,
            pieces.traj_id,
            version,
        )
        rows = zip(*(column.tolist() for column in columns), strict=True)
        ends = np.where(pieces.ended, end, GOING).tolist()
        ended = []
        for piece, row in zip(rows, ends, strict=True):
            episode = self._follow(chunk, *piece)
            if row != GOING:
                episode.end_at(row)
                del self._open[episode.env, episode.agent]
                self._first_open[episode.env, episode.agent] = NO_MORE
                ended.append(episode)
        self._hold(ended)
        self._sparse.add(chunk)
        np.add.at(self._without_end, env, pieces.length)
        self._without_end[env[pieces.ended]] = 0

    def groups(self) -> list[EpisodeGroup]:
        """Return the groups that are now complete, often none."""
        if self._queue is None:
            return []
        # no later episode starts before these
        coming = self._time * self.num_envs + np.arange(self.num_envs)
        first_open = min(coming.min(), self._first_open.min())
        self._due += self._queue.pop(int(first_open))
        chosen = []
        for begin in range(0, len(self._due) - self.n + 1, self.n):
            numbers = self._due[begin : begin + self.n]
            chosen.append([self._ended[number] for number in numbers])
        made = [self._joined(episodes) for episodes in chosen]
        for episodes in chosen:
            self._let_go(episodes)
        del self._due[: len(made) * self.n]
        return made

    def new_ends(self) -> list[list[int]]:
        """Return the kept episodes that ended since the last call: a list per time step, ascending
        by environment.
        """

        def end_of(number: int) -> int:
            return self._ended[number].end

        last_first = takewhile(
            lambda number: end_of(number) >= self._asked, reversed(self._ended)
        )
        new = list(last_first)[::-1]
        self._asked = int(self._time.sum())
        return [list(step) for _, step in groupby(new, end_of)]

    def take(self, numbers: Sequence[int]) -> EpisodeGroup:
        """Remove these complete episodes, and return them as a group in this order.

        For ``rule=None``.
        """
        known = self.rule is None and all(number in self._ended for number in numbers)
        if not numbers or not known or len({*numbers}) < len(numbers):
            raise BadOption(
                f"take({numbers}): expected different numbers of complete episodes that are held"
            )
        episodes = [self._ended[number] for number in numbers]
        made = self._joined(episodes)
        self._let_go(episodes)
        return made

    def take_all(self, hidden: Sequence[Key] = ()) -> list[TensorDict]:
        """Remove all complete episodes, and return each, ``[L]``, in order of their ends.

        For ``rule=None``.

        Episodes share memory with each other, and with nothing else that is used later.

        Args:
            hidden: columns to leave out.
        """
        episodes = list(self._ended.values())
        made = cut_out([episode.parts for episode in episodes], hidden)
        self._let_go(episodes)
        return made

    def check_ends(self, waiting: str, *, resets: bool) -> None:
        """Raise ``BadOption`` if an awaited end has not occurred in ``ENDLESS`` steps, and restart
        the count.
        """
        steps = self._without_end
        worst = int(steps.argmin() if self.rule == "first_done" else steps.argmax())
        made = int(steps[worst])
        if made <= ENDLESS:
            return
        steps[:] = 0
        remedy = "Episodes need an end:"
        if resets:
            remedy = (
                "reset_at_each_iter=True cuts its episodes at the end of every batch: leave it out,"
                " collect batches longer than episodes (frames_per_batch), or"
            )
        raise BadOption(
            f"environment {worst} has made {made:,} steps, no episode of it has ended, and"
            f" {waiting} waits for that. {remedy} give the collector max_frames_per_traj=, which"
            " truncates them. Nothing was lost: another call waits on."
        )

    def skip(self, batch: TensorDict, envs: Envs = None) -> None:
        """Record a batch that is delivered elsewhere: drop the episodes with rows in it, which will
        not be complete.
        """
        batch = time_last(batch)
        numbers = self._numbers(batch, envs)
        pieces = find_pieces(batch, self.done_key)
        self.flush(numbers.tolist())
        env = numbers[pieces.rows[pieces.first] // batch.shape[-1]]
        self._make_room(int(pieces.agent.max(initial=0)) + 1)
        columns = (env, pieces.agent, pieces.traj_id, pieces.ended)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for i, agent, traj_id, ended in rows:
            self._open.pop((i, agent), None)
            if not ended:
                self._open[i, agent] = HeldEpisode(i, traj_id, CUT, 0, agent=agent)
        self._time[numbers] += batch.shape[-1]

    def flush(self, envs: Iterable[int] | None = None) -> int:
        """Drop the open episodes of ``envs`` (default: all), which will not continue.

        Return their number of frames.
        """
        before = self.frames_held
        for env in range(self.num_envs) if envs is None else envs:
            if not 0 <= env < self.num_envs:
                raise BadOption(
                    f"flush({envs}): environments are numbered 0 to {self.num_envs - 1}"
                )
            self._without_end[env] = 0
            for agent in range(self._first_open.shape[1]):
                if (env, agent) in self._open:
                    self._drop(self._open[env, agent], CUT)
        return before - self.frames_held

    def clear(self, reason: str) -> int:
        """Drop all kept episodes, complete or open (counted as ``reason``), and later rows of open
        ones (as "cut").

        Return the number of dropped frames.
        """
        frames = self.frames_held
        if frames:
            self.dropped[reason] += frames
        for episode in self._open.values():
            self._forget(episode, min(episode.number, CUT))
        self._ended.clear()
        self._sparse.clear()
        self._sparser.clear()
        self._queue = (
            None if self.rule is None else make_queue(self.rule, self.n, self.num_envs)
        )
        self._due = []
        self.frames_held = 0
        return frames

    def retire(self, envs: Iterable[int]) -> int:
        """Stop waiting for environments without further rows; ``groups`` then returns those that
        this completes.

        Returns the number of dropped frames. Raises ``BadOption`` if the rule needs them
        ("per_env").
        """
        envs = list(envs)
        if self.rule == "per_env" and envs:
            raise BadOption(
                f"retire({envs}): rule='per_env' needs episodes of every environment; use"
                " 'first_begun'"
            )
        frames = self.flush(envs)
        self._time[envs] = NO_MORE // self.num_envs
        return frames

    def state_dict(self) -> dict[str, Any]:
        """Return everything kept as numbers, tensors and lists, which share no memory with groups."""
        episodes = [*self._ended.values(), *self._open.values()]
        columns = [
            (e.env, e.traj_id, e.number, e.version, e.length, e.end, e.agent)
            for e in episodes
        ]
        return {
            "num_envs": self.num_envs,
            "time": torch.from_numpy(self._time.copy()),
            "dropped": dict(self.dropped),
            "episodes": torch.tensor(columns, dtype=torch.int64, device="cpu").reshape(
                -1, 7
            ),
            "asked": self._asked,
            "rows": to_plain(take(*_gathered(episodes))) if self.frames_held else None,
        }

    def load_state_dict(
        self,
        state: Mapping[str, Any],
        place: Place | None = None,
    ) -> None:
        """Restore ``state_dict()``. ``n``, ``layout`` and ``rule`` may be different, but not
        ``num_envs`` (``BadOption``).

        Args:
            place: where the batches are that will be added; None: in host memory, with the device
                None.
        """
        if state["num_envs"] != self.num_envs:
            raise BadOption(
                f"the state is of {state['num_envs']} environments, but num_envs={self.num_envs}"
            )
        self.clear("")
        self._time = state["time"].numpy().copy()
        self.dropped = Counter(state["dropped"])
        self._without_end[:] = 0
        episodes = [HeldEpisode(*columns) for columns in state["episodes"].tolist()]
        going = [episode for episode in episodes if episode.end == GOING]
        self._open = {(episode.env, episode.agent): episode for episode in going}
        self._make_room(1 + max((agent for _, agent in self._open), default=0))
        self._first_open[:] = NO_MORE
        for number, episode in self._open.items():
            self._first_open[number] = (
                episode.number if episode.number >= 0 else NO_MORE
            )
        place = place or Place(torch.device("cpu"), shown=False)
        chunk = None if state["rows"] is None else CopiedRows(place.take(state["rows"]))
        for episode in episodes:
            if chunk is not None and episode.length:
                span = chunk.keep(self.frames_held, episode.length)
                episode.parts.append((chunk, span))
                self.frames_held += episode.length
        self._hold(episode for episode in episodes if episode.end != GOING)
        self._asked = state["asked"]

    # --- parts ------------------------------------------------------------------------------------

    def _numbers(self, batch: TensorDict, envs: Envs) -> Array:
        numbers = np.arange(self.num_envs) if envs is None else np.asarray(envs)
        if envs is not None and not self._are_environments(numbers):
            raise BadOption(
                f"envs={envs}: expected different numbers from 0 to {self.num_envs - 1}"
            )
        found = batch.numel() // max(batch.shape[-1], 1) if batch.ndim else 0
        if found != len(numbers):
            which = (
                "num_envs; envs= names those of a part"
                if envs is None
                else f"envs={envs}"
            )
            raise BadOption(
                f"a batch of shape {list(batch.shape)} has {found} environments and then time;"
                f" expected {len(numbers)} environments, as in {which}"
            )
        return numbers.astype(np.int64)

    def _are_environments(self, numbers: Array) -> bool:
        if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
            return False
        known = {*numbers.tolist()}.intersection(range(self.num_envs))
        return len(known) == len(numbers)

    def _check(self, batch: TensorDict) -> None:
        needed = {
            self.done_key: "where episodes end; name the column that does: done_key="
        }
        if self.on_policy_only:
            needed[POLICY_VERSION] = (
                "which policy acted, for on_policy_only=True: track_policy_version=True"
            )
        for key, why in needed.items():
            if batch.get(key, None) is None:
                raise BadOption(f"the batch has no {dotted(key)}, which says {why}")

    def _versions(self, batch: TensorDict, pieces: Pieces) -> Array:
        """Return the policy version of each piece, ``MIXED`` for several; all 0 without
        ``on_policy_only``.
        """
        if not self.on_policy_only:
            return np.zeros_like(pieces.first)
        versions = batch[POLICY_VERSION].reshape(-1).cpu().numpy()[pieces.rows]
        low = np.minimum.reduceat(versions, pieces.first)
        high = np.maximum.reduceat(versions, pieces.first)
        return np.where(low == high, low, MIXED)

    def _make_room(self, agents: int) -> None:
        """Make columns for this number of agents.

        Their first episodes are dropped if the rows begin within some.
        """
        for agent in range(self._first_open.shape[1], agents):
            column = np.full((self.num_envs, 1), NO_MORE)
            self._first_open = np.concatenate([self._first_open, column], 1)
            for env in self._middle:
                self._open.setdefault(
                    (env, agent), HeldEpisode(env, UNKNOWN, CUT, 0, agent=agent)
                )

    def _follow(
        self,
        chunk: CopiedRows,
        env: int,
        agent: int,
        begin: int,
        first: int,
        length: int,
        traj_id: int,
        version: int,
    ) -> HeldEpisode:
        """Add a piece (rows of ``chunk`` from ``first`` on) to its episode, or to a new one of
        number ``begin``.
        """
        episode = self._open.get((env, agent))
        if episode is not None and episode.traj_id == UNKNOWN:
            episode.identify(traj_id)
        if episode is None or episode.traj_id != traj_id:
            if episode is not None:
                self._drop(episode, CUT)
            episode = self._open[env, agent] = HeldEpisode(
                env, traj_id, begin, version, agent=agent
            )
            self._first_open[env, agent] = begin
        if version != episode.version or version == MIXED:
            self._drop(episode, MIXED)
        if episode.number < 0:
            self.dropped[REASONS[episode.number]] += length
        else:
            episode.extend(chunk, chunk.keep(first, length))
            self.frames_held += length
        return episode

    def _hold(self, ended: Iterable[HeldEpisode]) -> None:
        for episode in sorted(ended, key=lambda episode: (episode.end, episode.env)):
            if episode.number >= 0:
                self._ended[episode.number] = episode
                if self._queue is not None:
                    self._queue.add(episode.number)

    def _drop(self, episode: HeldEpisode, reason: int) -> None:
        """Drop the rows of an open episode, and those that follow until its end."""
        if episode.number >= 0:
            self.dropped[REASONS[reason]] += episode.length
            self._release(episode)
            self._forget(episode, reason)

    def _forget(self, episode: HeldEpisode, reason: int) -> None:
        """Drop the later rows of an open episode, for this reason."""
        episode.forget(reason)
        self._first_open[episode.env, episode.agent] = NO_MORE

    def _joined(self, episodes: Sequence[HeldEpisode]) -> EpisodeGroup:
        length = np.array([episode.length for episode in episodes])
        rows, numbers = _gathered(episodes)
        if self.layout == "pad":
            joined = padded(rows, numbers, length, NEVER)
        else:
            joined = take(rows, numbers)
            joined.names = ["time"]
        return EpisodeGroup(joined, int(length.sum()))

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
        """Free the memory of rows that were dropped before the last batch: most others are free
        after the next one.
        """
        for chunk in self._sparser:
            chunk.compact()
        self._sparser = self._sparse
        self._sparse = WeakSet[CopiedRows]()


def _gathered(episodes: Iterable[HeldEpisode]) -> tuple[TensorDict, Array]:
    return gather([part for episode in episodes for part in episode.parts])
