"""Groups of whole episodes, joined over batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
import torch

from muster.episode_rules import ENDLESS
from muster.errors import BadOption
from muster.integers import integer
from muster.keys import POLICY_VERSION, Key, dotted
from muster.memory.specs import Array
from muster.sinks.kept import GONE, KeptRows, Places
from muster.sinks.rows import ENDED, NEVER, Pieces, find_pieces, padded, take, time_last

if TYPE_CHECKING:
    from tensordict import TensorDict

Layout = Literal["cat", "pad"]
Rule = Literal["fair", "per_env", "first_done"]
Envs = Sequence[int] | Array | None

CUT, MIXED = -2, -3  # in the place of an episode's number: why its rows are not kept
REASONS = {CUT: "cut", MIXED: "mixed_policy"}

NO_MORE = 2**62  # divided by the number of environments: the time of one from which nothing more will come


class EpisodeGroup(NamedTuple):
    """What is delivered at a time.

    Attributes:
        batch: ``[frames]`` with names ``["time"]``, or ``[n, longest]`` with ``("collector", "mask")``.
        frames: of the episodes in it, padding not counted.
    """

    batch: TensorDict
    frames: int


@dataclass
class _Open:
    """The episode that an environment is in; ``number`` is negative if it was dropped."""

    env: int
    traj_id: int
    number: int
    version: int


class _Joined(NamedTuple):
    """A group, and what is let go of when nothing can go wrong with it any more."""

    group: EpisodeGroup
    numbers: Sequence[int]
    places: Places


class WholeEpisodes:
    """Turns successive batches of one collector into groups of exactly ``n`` complete episodes.

    ::

        episodes = WholeEpisodes(32, num_envs=8)
        for batch in collector:
            for group, frames in episodes.push(batch):
                learn(group)  # [frames], every episode from its first step to its end

    Groups are copies; no batch is kept alive. ``pushed = delivered + sum(dropped.values()) + frames_held``, in frames.
    Rows are copied and joined before anything else is changed. If that fails (no memory, for instance), nothing is
    lost: a batch that cannot be copied was not pushed, and groups that cannot be joined are held.
    An episode that never ends is held for ever, and with the fair rule all that began after it: such environments
    need ``max_frames_per_traj``.

    Batches may also be of some of the environments each, in any order (``push(batch, envs)``). Time is then counted in
    every environment's own rows, so "fair" and "per_env" give the same groups whatever the speed of each: the quick
    wait for the slowest, and what is held grows with the rows they are ahead. "first_done" waits for none, and gives
    what the quick ones make.

    Args:
        n: episodes per group; without a ``rule`` it has no meaning.
        num_envs: environments in all batches (in one: the product of its dimensions other than time; 1 without any).
        layout: ``"cat"`` one after the other; ``"pad"`` one per line, zeros on the right, trajectory id -1 there.
        rule: which episodes come next. ``"fair"``: in the order in which they began (then by environment), however
            long they take: every episode is delivered, and what ends early waits for what began before it.
            ``"per_env"``: the next ``n / num_envs`` of every environment, environment by environment; what the quick
            ones have in excess waits. ``"first_done"``: in the order in which they end (TorchRL's). The first
            groups then have too many short episodes, and so has a run that stops after a number of groups.
            None: groups are taken by hand, with ``new_ends`` and ``take``. (Rules for a number of episodes that is
            fixed beforehand are in ``muster.episode_rules``. This "fair", for a stream without an end, chooses as
            "last_even" does there, the first to begin; the "fair" there shares out the number among environments.)
        on_policy_only: drop episodes in which more than one policy version acted. That is more often true of
            long ones, so what is left is biased to short ones.
        done_key: the column that says that an episode ended. ``set_truncated`` marks ends that are none.

    Attributes:
        dropped: frames that no group will show, by reason: "cut" (the episode went on without an end, or
            ``flush``), "mixed_policy", and those given to ``clear``.

    Raises:
        BadOption: an impossible value.
    """

    def __init__(
        self,
        n: int | None = None,
        *,
        num_envs: int,
        layout: Layout = "cat",
        rule: Rule | None = "fair",
        on_policy_only: bool = False,
        done_key: Key = ENDED,
    ) -> None:
        self.n = 0 if rule is None else integer("n", n, of="WholeEpisodes")
        self.num_envs = integer("num_envs", num_envs, of="WholeEpisodes")
        for name, value, known in (("layout", layout, get_args(Layout)), ("rule", rule, (*get_args(Rule), None))):
            if value not in known:
                raise BadOption(f"WholeEpisodes({name}={value!r}): expected one of {', '.join(map(repr, known))}")
        if rule == "per_env" and self.n % num_envs:
            raise BadOption(f'WholeEpisodes({n}, rule="per_env"): {n} is not a multiple of num_envs={num_envs}')
        self.layout, self.rule = layout, rule
        self.on_policy_only, self.done_key = on_policy_only, done_key
        self.dropped: Counter[str] = Counter()
        self._time = np.zeros(self.num_envs, np.int64)  # rows so far, of each environment
        self._open: dict[int, _Open] = {}  # by environment
        self._length: dict[int, int] = {}  # frames of each episode held, by number = first row's time * num_envs + env
        self._ended: dict[int, int] = {}  # of those, when it ended: the sum of _time before the batch + time in it
        self._without_end = np.zeros(self.num_envs, np.int64)  # rows of each environment since an episode of it ended
        self._asked = 0  # what ended before was in ``new_ends`` already
        self._rows = KeptRows()

    @property
    def frames_held(self) -> int:
        """Frames kept for groups to come: of open episodes, and of ended ones that wait for others."""
        return sum(self._length.values())

    @property
    def held(self) -> list[int]:
        """The numbers of complete episodes, in order of their ends. Number k is of environment ``k % num_envs``."""
        return sorted(self._ended, key=lambda number: (self._ended[number], number % self.num_envs))

    @property
    def open_envs(self) -> list[int]:
        """Environments in an episode that is held from its first row on, ascending."""
        return sorted(env for env, episode in self._open.items() if episode.number >= 0)

    def push(self, batch: TensorDict, envs: Envs = None) -> list[EpisodeGroup]:
        """Take the next batch, ``[*lead, T]``; it is copied.

        Args:
            envs: the numbers of the batch's environments, in its order; None: all.

        Returns:
            the groups that are complete now, often none.

        Raises:
            BadOption: the batch has other environments, or lacks a column that is needed.
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
            copied = take(batch, pieces.rows)
            place, t = np.divmod(pieces.rows[pieces.first], T)
            env, end = numbers[place], self._time.sum() + t + pieces.length - 1
            low, high = self._versions(batch, pieces)
            begin = (self._time[env] + t) * self.num_envs + env
            columns = (env, begin, end, pieces.length, pieces.traj_id, pieces.ended, low, high)
            owners = [self._follow(*piece) for piece in zip(*(c.tolist() for c in columns), strict=True)]
            held = [number in self._length for number in owners]  # also not what was dropped later in this batch
            self._rows.add(copied, np.repeat(np.where(held, owners, GONE), pieces.length))
            np.add.at(self._without_end, env, pieces.length)
            self._without_end[env[pieces.ended]] = 0
        self._time[numbers] += T

    def groups(self) -> list[EpisodeGroup]:
        """The second half of ``push``: the groups that are complete."""
        made = [self._joined(chosen) for chosen in self._complete_groups()]
        for group in made:
            self._let_go(group)
        self._rows.release()
        return [group.group for group in made]

    def new_ends(self) -> list[list[int]]:
        """The numbers of episodes that ended since this was last asked and are held.

        Returns:
            one list for each time step at which some did, in order of time, ascending by environment within.
        """
        new = [number for number in self.held if self._ended[number] >= self._asked]
        self._asked = int(self._time.sum())
        return [list(step) for _, step in groupby(new, self._ended.__getitem__)]

    def take(self, numbers: Sequence[int]) -> EpisodeGroup:
        """A group of these complete episodes, in this order; they are not held any more.

        Raises:
            BadOption: one is not there, or twice, or there is none.
        """
        if not numbers or len({*numbers} & {*self._ended}) < len(numbers):
            raise BadOption(f"take({numbers}): expected different numbers of complete episodes that are held")
        made = self._joined(numbers)
        self._let_go(made)
        self._rows.release()
        return made.group

    def check_ends(self, waiting: str, *, resets: bool) -> None:
        """Raise if ``waiting`` (what it is called) waits in vain; then begin to count again, and hold all that is held.

        Args:
            resets: episodes are cut at the end of every batch.

        Raises:
            BadOption: an environment that the rule waits for has made over ``ENDLESS`` steps, and no episode ended.
        """
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
        """Take note of a batch that goes elsewhere: episodes with a part in it will not be whole, and are dropped.

        Raises:
            BadOption: as ``push``.
        """
        batch = time_last(batch)
        numbers = self._numbers(batch, envs)
        pieces = find_pieces(batch, self.done_key)
        self.flush(numbers.tolist())
        env = numbers[pieces.rows[pieces.first] // batch.shape[-1]]
        for i, traj_id, ended in zip(env.tolist(), pieces.traj_id.tolist(), pieces.ended.tolist(), strict=True):
            self._open.pop(i, None)
            if not ended:
                self._open[i] = _Open(i, traj_id, CUT, 0)
        self._time[numbers] += batch.shape[-1]

    def flush(self, envs: Iterable[int] | None = None) -> int:
        """Drop the open episodes of ``envs`` (default all), which will not go on: call it with ``Collector.reset``.

        Returns:
            frames dropped. Complete episodes stay.
        """
        before = self.frames_held
        for env in range(self.num_envs) if envs is None else envs:
            if not 0 <= env < self.num_envs:
                raise BadOption(f"flush({envs}): environments are numbered 0 to {self.num_envs - 1}")
            self._without_end[env] = 0
            if env in self._open:
                self._drop(self._open[env], CUT)
        self._rows.release()
        return before - self.frames_held

    def clear(self, reason: str) -> int:
        """Drop all that is held, complete or open, and what open episodes go on with (that as "cut").

        Returns:
            frames dropped, which ``dropped[reason]`` counts.
        """
        frames = self.frames_held
        if frames:
            self.dropped[reason] += frames
        for episode in self._open.values():
            episode.number = min(episode.number, CUT)
        self._length, self._ended, self._rows = {}, {}, KeptRows()
        return frames

    def retire(self, envs: Iterable[int]) -> int:
        """Wait no longer for environments that will give no more rows (``rule="per_env"`` cannot do without).

        Returns:
            frames dropped, as ``flush``. What is complete by it comes with the next ``push``.

        Raises:
            BadOption: the rule needs them.
        """
        envs = list(envs)
        if self.rule == "per_env" and envs:
            raise BadOption(f'retire({envs}): rule="per_env" needs episodes of every environment; use rule="fair"')
        frames = self.flush(envs)
        self._time[envs] = NO_MORE // self.num_envs
        return frames

    def state_dict(self) -> dict[str, Any]:
        """All that is held, as numbers, tensors and lists; it shares no memory with groups."""
        return {
            "num_envs": self.num_envs,
            "time": torch.from_numpy(self._time.copy()),
            "dropped": dict(self.dropped),
            "open": torch.tensor([astuple(o) for o in self._open.values()], dtype=torch.int64).reshape(-1, 4),
            "episodes": torch.tensor(
                [(s, length, self._ended.get(s, -1)) for s, length in self._length.items()], dtype=torch.int64
            ).reshape(-1, 3),
            "asked": self._asked,
            **self._rows.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was called; ``n``, ``layout`` and ``rule`` may have changed.

        Raises:
            BadOption: it was another number of environments; nothing is changed.
        """
        if state["num_envs"] != self.num_envs:
            raise BadOption(f"the state is of {state['num_envs']} environments, but num_envs={self.num_envs}")
        self._time, self.dropped = state["time"].numpy().copy(), Counter(state["dropped"])
        self._without_end[:] = 0
        self._open = {env: _Open(env, *rest) for env, *rest in state["open"].tolist()}
        self._length = {number: length for number, length, _ in state["episodes"].tolist()}
        self._ended = {number: end for number, _, end in state["episodes"].tolist() if end >= 0}
        self._asked = state["asked"]
        self._rows.load_state_dict(state)

    # --- parts ------------------------------------------------------------------------------------

    def _numbers(self, batch: TensorDict, envs: Envs) -> Array:
        """``[environments of the batch]``, their numbers."""
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

    def _versions(self, batch: TensorDict, pieces: Pieces) -> tuple[Array, Array]:
        """Lowest and highest policy version in each piece; both 0 where it does not matter."""
        if not self.on_policy_only:
            return np.zeros_like(pieces.first), np.zeros_like(pieces.first)
        versions = batch[POLICY_VERSION].reshape(-1).cpu().numpy()[pieces.rows]
        return np.minimum.reduceat(versions, pieces.first), np.maximum.reduceat(versions, pieces.first)

    def _follow(
        self, env: int, begin: int, end: int, length: int, traj_id: int, ended: bool, low: int, high: int
    ) -> int:
        """Add a piece to the episode it belongs to, or to a new one of number ``begin``; returns its number."""
        episode = self._open.get(env)
        if episode is None or episode.traj_id != traj_id:
            if episode is not None:
                self._drop(episode, CUT)
            episode = self._open[env] = _Open(env, traj_id, begin, low)
            self._length[episode.number] = 0
        if low != episode.version or high != episode.version:
            self._drop(episode, MIXED)
        if episode.number < 0:
            self.dropped[REASONS[episode.number]] += length
        else:
            self._length[episode.number] += length
        if ended:
            del self._open[env]
            if episode.number >= 0:
                self._ended[episode.number] = end
        return episode.number

    def _drop(self, episode: _Open, reason: int) -> None:
        """Let go of an open episode's rows, and of those to come until its end."""
        if episode.number >= 0:
            self.dropped[REASONS[reason]] += self._length.pop(episode.number)
            self._rows.drop(episode.number)
            episode.number = reason

    def _complete_groups(self) -> list[list[int]]:
        """The episodes of each group that is complete, in their order."""
        if self.rule == "per_env":
            by_env: list[list[int]] = [[] for _ in range(self.num_envs)]
            for number in self._ended:
                by_env[number % self.num_envs].append(number)
            share = self.n // self.num_envs
            shares = range(0, min(map(len, by_env)) - share + 1, share)
            order = [number for begin in shares for numbers in by_env for number in numbers[begin : begin + share]]
        elif self.rule == "fair":
            coming = self._time * self.num_envs + np.arange(self.num_envs)  # not before these
            for env, episode in self._open.items():
                if episode.number >= 0:
                    coming[env] = episode.number
            first = coming.min()
            order = sorted(number for number in self._ended if number < first)
        else:
            order = [] if self.rule is None else self.held
        return [order[begin : begin + self.n] for begin in range(0, len(order) - self.n + 1, self.n)] if order else []

    def _joined(self, chosen: Sequence[int]) -> _Joined:
        """A group of episodes, which stay held."""
        numbers = np.array(chosen)
        length = np.array([self._length[number] for number in chosen])
        rows, owner, places = self._rows.copy(numbers)
        ascending = np.argsort(numbers)
        place = ascending[np.searchsorted(numbers[ascending], owner)]
        order = np.argsort(place, kind="stable")  # within an episode rows are in order of time already
        if self.layout == "pad":
            group = padded(rows, order, length, NEVER)
        else:
            group = take(rows, order) if (place[1:] < place[:-1]).any() else rows
            group.names = ["time"]
        return _Joined(EpisodeGroup(group, int(length.sum())), chosen, places)

    def _let_go(self, made: _Joined) -> None:
        """Hold the episodes of a group no longer."""
        for number in made.numbers:
            del self._length[number], self._ended[number]
        self._rows.let_go(made.places)
