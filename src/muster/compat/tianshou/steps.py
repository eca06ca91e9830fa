"""Between Tianshou's buffers and Muster's loop: a group of environments, its policy, and the steps
of a ``collect``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tianshou
import torch
from tianshou.data import (
    Batch,
    CachedReplayBuffer,
    HERReplayBuffer,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    ReplayBufferManager,
    to_numpy,
)
from tianshou.data.batch import create_value
from tianshou.data.collector import EpisodeRolloutHookMerged as TianshouMerged
from tianshou.data.collector import get_stddev_from_dist

from muster.compat.base import GroupRunner, borrowed
from muster.compat.tianshou.envs import (
    NUMBERS,
    PLAIN,
    REAL,
    Row,
    VectorEnvs,
    batch_of,
    stacked,
)
from muster.compat.tianshou.policies import TianshouActor
from muster.episodes.rules import Rule
from muster.errors import BadOption
from muster.keys import OBSERVATION, TERMINATED, TRUNCATED, next_of
from muster.memory.slots import Lane, Layout
from muster.memory.specs import Array
from muster.rng import GroupRng
from muster.rollout.columns import lane_columns

TESTED = "2.0.1"
"""Of Tianshou: whose ``add`` takes several steps of one environment in one call, which is not documented."""

ADDS = ReplayBufferManager.add, PrioritizedReplayBuffer.add

KEYS = frozenset(
    {
        "obs",
        "act",
        "rew",
        "terminated",
        "truncated",
        "done",
        "obs_next",
        "info",
        "policy",
    }
)
"""Entries of a step that every buffer stores."""


class Taken(NamedTuple):
    """Steps of some rows: ``batch`` has Tianshou's keys, ``[M, ...]``, by row, then environment;
    ``env`` is ``[M]``.

    ``ends`` are the indices between the rows, from 0 to M.
    """

    env: Array
    ends: Sequence[int]
    batch: Any


class Ended(NamedTuple):
    """An ended episode."""

    env: int
    total: Any
    steps: int


class Going(NamedTuple):
    """Rewards (``[N]`` or ``[N, agents]``) and steps (``[N]``) so far of the running episodes."""

    totals: Array
    steps: Array

    def forget(self, which: list[int]) -> None:
        self.totals[which], self.steps[which] = 0, 0

    def after(self, taken: Taken) -> tuple[Going, list[Ended]]:
        """Return the running episodes after these steps, and the episodes that ended in them, by
        time.

        Rewards are added one by one in their own precision, as in Tianshou's buffers.
        """
        rew = taken.batch.rew
        done = taken.batch.done
        N = len(self.steps)
        totals = np.zeros(
            (N, *rew.shape[1:]), rew.dtype if rew.dtype.kind == "f" else float
        )
        before = self.totals
        if before.ndim < rew.ndim:
            before = before.reshape(N, *[1] * (rew.ndim - 1))
        totals += before
        going, ended = Going(totals, self.steps.copy()), list[Ended]()
        for begin, end in itertools.pairwise(taken.ends):
            which = taken.env[begin:end] if end - begin < N else slice(None)
            going.totals[which] += rew[begin:end]
            going.steps[which] += 1
            if done[begin:end].any():
                over = taken.env[begin:end][done[begin:end]].tolist()
                ended += [
                    Ended(env, going.totals[env].copy(), int(going.steps[env]))
                    for env in over
                ]
                going.forget(over)
        return going, ended


# limits of the memory between the environments and the buffer
LANE_BYTES = 1 << 26
LANE_ROWS = 512

FLAGS = next_of(TERMINATED), next_of(TRUNCATED)
OPTIONS = borrowed(validate="off")  # Tianshou accepts any reward


class Sampling(GroupRunner):
    """Runs a policy in environments, with the running episodes (``going``) and the ``last`` lane."""

    def __init__(self, envs: VectorEnvs, actor: TianshouActor) -> None:
        super().__init__(envs, OPTIONS, rng=GroupRng(0))
        self.envs = envs
        self.actor = actor
        row_bytes = Layout(
            1, envs.spec.num_envs, lane_columns(envs.spec, (), OPTIONS)
        ).nbytes
        self.most_rows = max(1, min(LANE_ROWS, LANE_BYTES // max(row_bytes, 1)))
        self.going: Going
        self.last: Lane | None = None

    def begin(self, obs: Array, infos: Any) -> None:
        self.envs.begin(obs, infos)
        self.actor.forget()
        self.going = Going(np.zeros(len(infos)), np.zeros(len(infos), int))
        self.group.reset()
        self.begin_episodes()

    def make(
        self,
        rows: int,
        rule: Rule | None,
        watch: Callable[[Lane, int], object] | None,
        on_row: Callable[[Lane, int], object] | None = None,
    ) -> Lane:
        """Collect ``rows`` rows, fewer if the rule is complete, into ``last``; their number is its
        ``done_steps``.

        Args:
            watch: called after each row, and after the resets that are due in it.
            on_row: called after each row, before these resets.

        Raises:
            Exception: what the environments, the policy or ``on_row`` have raised, as it is. After
                an error of the environments all of them are reset before the next row, except after
                ``StopIteration`` in a reset.
        """
        envs = self.envs
        self.last = None
        envs.begin_rows(on_row)
        lane = self.last = self.lane(self.actor, rows)
        try:
            self.run(self.actor, lane, rule=rule, watch=watch)
        except BaseException as error:
            self.end_early()
            if envs.failure is None or not isinstance(error, Exception):
                raise
        if envs.unreset:
            self.lose(envs.unreset)
        envs.raise_failure()
        return lane

    def advance_episodes(self, taken: Taken) -> list[Ended]:
        """Add steps to the running episodes; returns those that ended in them, by time."""
        self.going, ended = self.going.after(taken)
        return ended

    def lose(self, which: Sequence[int]) -> None:
        """Reset these environments before the next row: their episodes have ended, or their states
        are unknown.
        """
        self.envs.forget(which)
        self.group.reset(which)

    def pieces(self, lane: Lane) -> Iterator[tuple[int, int]]:
        """Split the lane's rows into pieces of one structure: mostly one piece.

        Yields first row and end of each.

        A row in which the environments' infos differ in structure is a piece.
        """
        begin, structure = 0, Structure()
        for t, row in enumerate(self.envs.rows[: lane.done_steps]):
            if structure.fits(row):
                continue
            if t > begin:
                yield begin, t
            begin, structure = t, Structure()
            if not structure.fits(row):
                yield t, t + 1
                begin, structure = t + 1, Structure()
        if begin < lane.done_steps:
            yield begin, lane.done_steps

    def rewarded(self, lane: Lane, begin: int, end: int) -> Taken:
        """Return rewards and flags of rows ``begin`` to ``end``."""
        rows = self.envs.rows[begin:end]
        env = _joined([row.ids for row in rows])
        ends = [0, *itertools.accumulate(len(row.ids) for row in rows)]
        cells: Any = slice(begin, end)
        if ends[-1] != lane.B * len(rows):
            cells = begin + np.repeat(np.arange(len(rows)), np.diff(ends)), env
        terminated, truncated = (lane.arrays[key][cells].flatten() for key in FLAGS)
        flags = {
            "terminated": terminated,
            "truncated": truncated,
            "done": terminated | truncated,
        }
        return Taken(
            env, ends, batch_of(rew=_joined([row.rew for row in rows]), **flags)
        )

    def taken(
        self,
        lane: Lane,
        begin: int,
        end: int,
        *,
        lent: bool = False,
        before_resets: bool = False,
    ) -> Taken:
        """Return the steps of rows ``begin`` to ``end``.

        Args:
            lent: observations may be views of the lane.
            before_resets: the environments that ended in these rows were not reset yet.
        """
        rows = self.envs.rows[begin:end]
        env, ends, results = self.rewarded(lane, begin, end)
        now = lane.arrays[OBSERVATION]
        after = now[1:] if before_resets else lane.arrays[next_of(OBSERVATION)]
        if ends[-1] == lane.B * len(rows):
            obs, obs_next = (
                array[begin:end].reshape(-1, *array.shape[2:]) for array in (now, after)
            )
            if not lent:
                obs, obs_next = obs.copy(), obs_next.copy()
        else:
            t = begin + np.repeat(np.arange(len(rows)), np.diff(ends))
            obs = now[t, env]
            obs_next = after[t, env]
        batch = batch_of(
            obs=stacked(obs),
            act=_joined([row.act for row in rows]),
            policy=_joined([row.policy for row in rows]),
            obs_next=stacked(obs_next),
            **results.__dict__,
            info=_infos(rows, env),
        )
        return Taken(env, ends, batch)


class Structure:
    """The types, dtypes and shapes of some rows.

    Infos may come and go, each with one type and shape.
    """

    def __init__(self) -> None:
        self._arrays: Any = None
        self._infos: dict[str, Any] = {}

    def fits(self, row: Row) -> bool:
        """Add a row, and return True; False if it differs from the rows before, or has to be added
        on its own.
        """
        if not row.actions.has_rows:
            return False
        act = row.act
        rew = row.rew
        arrays = (
            _kind(act) if type(act) is Batch else (act.dtype, act.shape[1:]),
            rew.dtype.kind in NUMBERS,
            rew.shape[1:],
            _kind(row.policy),
        )
        if self._arrays not in (None, arrays):
            return False
        self._arrays = arrays
        return row.infos is None or all(
            _info_fits(info, self._infos) for info in row.infos
        )


def _info_fits(info: dict[str, Any], known: dict[str, Any]) -> bool:
    """Add the kinds of an info's entries to the ``known`` ones, and return True; False if one
    differs.
    """
    for key, value in info.items():
        if isinstance(value, dict):
            deeper = known.setdefault(key, {})
            if type(deeper) is not dict or not _info_fits(value, deeper):
                return False
            continue
        kind = _kind(value, whole=True)
        if known.setdefault(key, kind) != kind:
            return False
    return True


def _kind(tree: Any, *, whole: bool = False) -> Any:
    """Return type, dtype and shape (without the first dimension, unless ``whole``) of the leaves of
    a tree.
    """
    kind = type(tree)
    if kind in PLAIN:
        return kind
    if kind is Batch:
        return [
            (key, _kind(value, whole=whole)) for key, value in tree.__dict__.items()
        ]
    if issubclass(kind, list | tuple):
        return kind, [_kind(value, whole=True) for value in tree]
    shape = getattr(tree, "shape", ())
    return kind, getattr(tree, "dtype", None), shape if whole else shape[1:]


def _joined(parts: Sequence[Any]) -> Any:
    """Concatenate arrays, tensors, or Batches of them with one structure."""
    first = parts[0]
    if len(parts) == 1 or first is None:
        return first
    if isinstance(first, Batch):
        return batch_of(
            **{key: _joined([part[key] for part in parts]) for key in first.get_keys()}
        )
    return (
        torch.cat(list(parts))
        if isinstance(first, torch.Tensor)
        else np.concatenate(parts)
    )


def _infos(rows: Sequence[Row], env: Array) -> Any:
    """Return all infos as a Batch; skips its slow conversion if all infos have the same names and
    only numbers.
    """
    if all(row.infos is None for row in rows):
        return batch_of(env_id=env.copy())
    infos: list[dict[str, Any]] = []
    for row in rows:
        infos += [{"env_id": i} for i in row.ids] if row.infos is None else row.infos
    names = infos[0].keys()
    if all(info.keys() == names for info in infos):
        columns = {name: [info[name] for info in infos] for name in names}
        kinds = {type(value) for column in columns.values() for value in column}
        if kinds <= {int, float, bool, np.float64, np.float32, np.int64, np.bool_}:
            return batch_of(
                **{name: np.array(column) for name, column in columns.items()}
            )
    return Batch(np.array(infos, object))


def is_tianshous(buffer: Any) -> bool:
    """Whether rows can be added some time after they were made: ``add`` is one of Tianshou's, and
    does nothing else.
    """
    known = *ADDS, ReplayBuffer.add, CachedReplayBuffer.add, HERReplayBuffer.add
    return getattr(type(buffer), "add", None) in known and "add" not in getattr(
        buffer, "__dict__", {}
    )


def takes_many(buffer: Any) -> bool:
    """Whether one ``add`` may get several steps per environment; classes with another ``add`` get
    single rows.
    """
    own = isinstance(buffer, ReplayBufferManager) and type(buffer).add in ADDS
    return own and tianshou.__version__ == TESTED


def add(
    buffer: Any, taken: Taken, added: Callable[[Array], object] = lambda done: None
) -> None:
    """Add steps, with the same result as adding every row separately.

    Parts of several rows are so long that no ring overwrites itself; the first row is a part,
    because it allocates the buffer.

    Args:
        added: called after each part with its done flags.
    """
    most = (
        max(1, int(np.diff(buffer.subbuffer_edges).min())) if takes_many(buffer) else 1
    )
    row = 0
    last = len(taken.ends) - 1
    while row < last:
        after = min(last, row + (most if hasattr(buffer, "obs") else 1))
        part = slice(taken.ends[row], taken.ends[after])
        buffer.add(taken.batch[part], buffer_ids=taken.env[part])
        added(taken.batch.done[part])
        row = after


def has_columns(buffer: Any, batch: Any) -> bool:
    """Whether the buffer stores all entries as they are.

    Else it may make columns, refuse rows, or broadcast values.

    Observations can be in a buffer without all but the last of their frames.
    """
    if not hasattr(buffer, "obs"):
        return False
    if not _alike(buffer.obs, batch.obs, frames=True):
        return False
    entries = "act", "rew", "policy", "info"
    return all(_alike(getattr(buffer, entry, None), batch[entry]) for entry in entries)


def _alike(column: Any, values: Any, *, frames: bool = False) -> bool:
    if isinstance(values, Batch):
        own = values.__dict__
        if not own:
            return True
        return isinstance(column, Batch) and all(
            _alike(column.__dict__.get(key), own[key], frames=frames) for key in own
        )
    if type(column) is not type(values):
        return False
    shapes = (values.shape[1:], values.shape[2:]) if frames else (values.shape[1:],)
    if column.shape[1:] not in shapes:
        return False
    if column.dtype == values.dtype:
        return True
    return (
        isinstance(values, np.ndarray)
        and column.dtype.kind in REAL
        and values.dtype.kind in REAL
    )


class Collection:
    """The steps and episodes of one call of ``collect``: adds them to the ``owner``'s buffer, and
    counts them.

    Args:
        owner: the collector.
        by_row: add every row as soon as it is complete, and call hooks and statistics with it. Else
            rows are added together.
        adds_entries: an ``on_episode_done_hook`` may return entries.

    Attributes:
        stats: a new ``CollectStats``; see ``close``.
        steps, episodes: numbers of those that are in the buffer.
    """

    def __init__(
        self, owner: Any, sampling: Sampling, *, by_row: bool, adds_entries: bool
    ) -> None:
        self.owner = owner
        self.sampling = sampling
        self.by_row = by_row
        self.adds_entries = adds_entries
        self.stats, self.steps, self.episodes = owner.collect_stats_class(), 0, 0
        self._ended: list[Ended] = []
        # with the first and last place of each in the buffer
        self._in_buffer: list[tuple[Ended, int, int]] = []
        self._deviations: list[Array] = []

    def make(
        self,
        rows: int,
        rule: Rule | None = None,
        enough: Callable[[], bool] | None = None,
    ) -> None:
        """Collect rows: ``rows``, or fewer if the rule is complete, or after a row if ``enough()``."""
        sampling = self.sampling

        def watch(lane: Lane, t: int) -> None:
            if sampling.envs.failure is None:
                self._end_episodes()
            if enough is not None and enough():
                lane.stop()

        try:
            watches = self.by_row or enough is not None
            sampling.make(
                rows,
                rule,
                watch if watches else None,
                self._add_row if self.by_row else None,
            )
        finally:
            if sampling.last is not None and not self.by_row:
                self._add_all(sampling.last)
            sampling.going.forget(sampling.group.pending)

    def _add_all(self, lane: Lane) -> None:
        sampling = self.sampling
        pieces = list(sampling.pieces(lane))
        for begin, end in pieces:  # all rows, also if one cannot be added
            self._ended += sampling.advance_episodes(
                sampling.rewarded(lane, begin, end)
            )
        with torch.no_grad():
            for begin, end in pieces:
                self._add_piece(lane, begin, end)
        dists = [
            row.actions.dist
            for row in sampling.envs.rows[: lane.done_steps]
            if row.actions.dist is not None
        ]
        self._deviations += [
            np.atleast_2d(to_numpy(get_stddev_from_dist(dist))) for dist in dists
        ]

    def _add_piece(self, lane: Lane, begin: int, end: int) -> None:
        """Add rows of one structure: all at once if the buffer has columns for them, maybe after
        the first row.
        """
        buffer = self.owner.buffer
        sampling = self.sampling
        for t in range(begin, end):
            rest = self._rest(lane, t, end) if t <= begin + 1 else None
            if rest is not None and has_columns(buffer, rest.batch):
                add(buffer, rest, self._count)
                return
            add(buffer, sampling.taken(lane, t, t + 1), self._count)

    def _rest(self, lane: Lane, t: int, end: int) -> Taken | None:
        """Return the rows from ``t`` on; None if one of them cannot be made a Batch: added by
        themselves, those before it are in the buffer when it raises.
        """
        lent = takes_many(self.owner.buffer)
        try:
            return self.sampling.taken(lane, t, end, lent=lent)
        except Exception:  # noqa: BLE001 (raised again for the row)
            return None

    def _count(self, done: Array) -> None:
        self.steps += len(done)
        self.episodes += int(np.sum(done))

    def close(self) -> Any:
        """Return the statistics, complete except for times and summaries."""
        if not self.by_row:
            self.stats.n_collected_steps, self.stats.n_collected_episodes = (
                self.steps,
                self.episodes,
            )
        if self._ended:
            self.stats.returns = np.array(
                [episode.total for episode in self._ended], float
            )
            self.stats.lens = np.array([episode.steps for episode in self._ended], int)
        if self._deviations:
            self.stats.pred_dist_std_array = np.concatenate(self._deviations)
        return self.stats

    def _add_row(self, lane: Lane, t: int) -> None:
        """Call the hook with a complete row, then add it."""
        owner = self.owner
        row = self.sampling.envs.rows[t]
        actions, taken = (
            row.actions,
            self.sampling.taken(lane, t, t + 1, before_resets=True),
        )
        step = taken.batch
        done = taken.batch.done
        step.dist = actions.dist if np.array_equal(row.ids, actions.ids) else None
        chosen = Batch(
            act=actions.act,
            act_normalized=actions.mapped,
            policy_entry=actions.policy,
            dist=actions.dist,
            hidden_state=actions.state,
        )
        rew = step.rew
        try:
            owner.run_on_step_hook(chosen, step)
            _check_rewards(step.rew, rew)
            rew = step.rew
        finally:  # the episodes go on, also if this row is lost
            ended = self.sampling.advance_episodes(
                taken._replace(batch=Batch(rew=rew, done=done))
            )
        self.stats.update_at_step_batch(step)
        step.pop("dist")
        places, _, _, starts = owner.buffer.add(step, buffer_ids=taken.env)
        self._count(done)
        _add_entries(owner.buffer, step, places)
        for episode in ended:
            k = int(np.searchsorted(taken.env, episode.env))
            self._in_buffer.append((episode, int(starts[k]), int(places[k])))

    def _end_episodes(self) -> None:
        ended, self._in_buffer = self._in_buffer, []
        for episode, first, last in ended:
            self._end(episode, first, last)

    def _end(self, episode: Ended, first: int, last: int) -> None:
        """Process an ended episode, which is in the buffer from position ``first`` to ``last``."""
        owner = self.owner
        stats = self.stats
        where = _places(owner.buffer, first, last, episode)
        batch = owner.buffer[where]
        entries = owner.run_on_episode_done(batch)
        if entries is not None and not hasattr(entries, "items"):
            raise BadOption(
                f"the on_episode_done_hook returned {type(entries).__name__}, expected a dictionary"
                " of arrays with an element for each step of the episode, or None"
            )
        if entries is not None and not self.adds_entries:
            raise BadOption(
                f"the on_episode_done_hook returned {sorted(entries)}: these can be stored with"
                " n_episode only, as with n_step some of an episode's steps can be missing."
                " Collect episodes, or return None"
            )
        for key, values in (entries or {}).items():
            owner.buffer.set_array_at_key(values, key, index=where)
            batch.set_array_at_key(values, key)
        known = len(stats.lens)
        stats.update_at_episode_done(episode_batch=batch, episode_return=episode.total)
        if len(stats.lens) > known:
            stats.lens[-1] = episode.steps  # the buffer may contain only its last steps


def _check_rewards(new: Any, old: Array) -> None:
    """Raise ``BadOption`` unless the rewards that a hook has left are numbers of each environment."""
    is_array = isinstance(new, np.ndarray)
    if is_array and new.dtype.kind in REAL and new.shape[:1] == old.shape[:1]:
        return
    found = f"of shape {new.shape} and dtype {new.dtype}" if is_array else ""
    raise BadOption(
        f"the on_step_hook has set the rewards to {type(new).__name__} {found}, expected an array of"
        f" numbers with one row for each of {len(old)} environments"
    )


def _places(buffer: Any, first: int, last: int, episode: Ended) -> Array:
    """The positions of an episode in the buffer, in order; only its last steps if it is longer than
    its ring.
    """
    edges = buffer.subbuffer_edges
    begin = edges[np.searchsorted(edges, last, side="right") - 1]
    size = edges[np.searchsorted(edges, last, side="right")] - begin
    count = (last - first) % size + 1
    if episode.steps >= size and not isinstance(buffer, CachedReplayBuffer):
        count = size
    return np.asarray(begin + (last - begin - np.arange(count)[::-1]) % size)


def _add_entries(buffer: Any, step: Any, places: Array) -> None:
    """Store entries that a hook has added to a row; a single ring has stored them already, others
    drop them.
    """
    if not isinstance(buffer, ReplayBufferManager):
        return
    added = [key for key in step.get_keys() if key not in KEYS]
    if added and isinstance(buffer, CachedReplayBuffer):
        raise BadOption(
            f"the on_step_hook added {added}, which a CachedReplayBuffer does not move to its main"
            " buffer: use another buffer, or put them into rollout_batch.policy"
        )
    for key in added:
        if not hasattr(buffer, key):
            own = isinstance(step[key], np.ndarray | Batch) or hasattr(
                step[key], "new_zeros"
            )
            made = (
                create_value(step[key], buffer.maxsize, stack=False)
                if own
                else np.full(buffer.maxsize, None)
            )
            buffer.set_array_at_key(made, key)
        stored = getattr(buffer, key)
        if isinstance(stored, np.ndarray) and not isinstance(step[key], np.ndarray):
            for k, place in enumerate(places):  # a distribution
                stored[place] = step[[k]][key]
        else:
            stored[places] = step[key]


class EpisodeRolloutHookMerged(TianshouMerged):  # type: ignore[misc] # of a package that mypy skips
    """Merges several episode hooks.

    Tianshou's own class refuses every entry that the first hook returns.

    Args:
        episode_rollout_hooks: called in this order.
        check_overlapping_keys: raise ``KeyError`` if two hooks return an entry of one name; else
            the last one is used.
    """

    def __call__(self, episode_batch: Any) -> dict[str, Any] | None:
        merged: dict[str, Any] = {}
        for hook in self.episode_rollout_hooks:
            entries = hook(episode_batch) or {}
            if self.check_overlapping_keys and (
                twice := sorted(merged.keys() & entries.keys())
            ):
                raise KeyError(
                    f"{hook} returns {twice}, as a hook before it does: give them names of"
                    " their own"
                )
            merged.update(entries)
        return merged or None
