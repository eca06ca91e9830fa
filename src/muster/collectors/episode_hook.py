"""``on_episode_done``: complete episodes for the user's function, and its columns in batches of
whole episodes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from muster.episodes.segment import ENDED, find_pieces, split, take, time_last
from muster.episodes.whole import Envs, WholeEpisodes
from muster.errors import HookError, text_of
from muster.keys import NEXT_VALUE, TRAJ_IDS, VALID, Key, dotted
from muster.rollout.hooks import call_hook
from muster.utils.interrupts import allowed

if TYPE_CHECKING:
    from tensordict import TensorDict

Columns = dict[Key, torch.Tensor]

KEPT = "The batch is kept: the next call goes on with this episode."
TOO_LATE = (
    "on_episode_done returned columns, but the rows of the episode were delivered before it ended,"
    " or may have been: collect whole episodes (collect(n_episode=...), trajs_per_batch=...), or"
    " return None"
)


class EpisodeHook:
    """Calls ``function`` with every complete episode, once.

    After an error, repeat the call: it continues there.

    ``function`` returns None, or a dict of columns, ``[L, ...]`` each. ``done_key`` marks the ends
    of episodes.
    """

    def __init__(
        self,
        function: Callable[[TensorDict], Any],
        num_envs: int,
        done_key: Key = ENDED,
    ) -> None:
        self._function = function
        self._num_envs = num_envs
        self._done_key = done_key
        # shape and dtype of each column of the first episode
        self._known: dict[Key, tuple[Any, ...]] | None = None
        self._episodes = self._nothing_yet()
        self._taken: TensorDict | None = (
            None  # the batch whose ``watch`` an error interrupted
        )
        self._under_way: TensorDict | None = (
            None  # the batch whose ``whole`` an error interrupted
        )
        self._left: deque[TensorDict] = (
            deque()
        )  # its episodes that ``function`` has not had yet
        self._made: list[Columns] = []  # the columns of its other episodes

    def begin_anew(self) -> None:
        """Forget open episodes.

        The environments may be in the middle of others, which are not shown.
        """
        self._episodes, self._under_way = self._nothing_yet(from_resets=False), None

    def watch(
        self, batch: TensorDict, envs: Envs = None, hidden: Sequence[Key] = ()
    ) -> deque[TensorDict]:
        """Record the next batch of ``envs`` (None: all), and return the episodes that end in it,
        for ``show``.

        After an error, repeat the call with the same batch. ``hidden`` columns are left out of the
        episodes.
        """
        if batch is not self._taken:
            self._episodes.add(_with_all_steps(batch), envs)
            self._taken = batch
        episodes = deque(self._episodes.take_all(hidden))
        self._taken = None
        return episodes

    def show(self, episodes: deque[TensorDict]) -> None:
        """Show and remove episodes whose rows may have been delivered already, so that no columns
        can be added.
        """
        while episodes:
            returned = self._call(episodes[0])
            episodes.popleft()
            if not (returned is None or returned == {}):
                raise HookError(TOO_LATE)

    def whole(self, batch: TensorDict) -> TensorDict:
        """Show the episodes of a batch, ``[frames]`` or ``[n, longest]``, in its order, and add
        their columns to it.
        """
        pieces = find_pieces(batch, self._done_key)
        if batch is not self._under_way:
            # copies: what the hook does to them
            episodes = split(take(batch, pieces.rows), pieces.length.tolist())
            self._left, self._made, self._under_way = deque(episodes), [], batch
        while self._left:
            self._made.append(
                self._checked(self._call(self._left[0]), len(self._left[0]))
            )
            self._left.popleft()
        rows = torch.from_numpy(pieces.rows)
        for key in self._made[0] if self._made else ():
            joined = torch.cat([columns[key] for columns in self._made]).to(
                batch[TRAJ_IDS].device
            )
            column = joined.new_zeros((batch.numel(), *joined.shape[1:]))
            column[rows] = joined
            batch.set(key, column.reshape(*batch.shape, *joined.shape[1:]))
        self._made = []
        self._under_way = None
        return batch

    def skip(self, batch: TensorDict, envs: Envs = None) -> None:
        """Record a batch whose episodes are not shown, not even those with rows in other batches."""
        self._episodes.skip(_with_all_steps(batch), envs)

    # --- parts ------------------------------------------------------------------------------------

    def _nothing_yet(self, *, from_resets: bool = True) -> WholeEpisodes:
        return WholeEpisodes(
            num_envs=self._num_envs,
            rule=None,
            done_key=self._done_key,
            from_resets=from_resets,
        )

    def _call(self, episode: TensorDict) -> Any:
        with allowed():
            return call_hook("on_episode_done", self._function, episode, KEPT)

    def _checked(self, returned: Any, length: int) -> Columns:
        """Return the function's result as tensors ``[length, ...]``."""
        if not (returned is None or isinstance(returned, Mapping)):
            kind = type(returned).__name__
            raise HookError(
                f"on_episode_done returned a {kind}: expected None, or a dict of arrays by column."
                f" {KEPT}"
            )
        columns: Columns = {}
        for name, value in (returned or {}).items():
            key = (name,) if isinstance(name, str) else tuple(name)
            try:
                tensor = (
                    value.detach()
                    if torch.is_tensor(value)
                    else torch.from_numpy(np.array(value))
                )
            except (TypeError, ValueError) as error:
                why = text_of(error)
                raise HookError(
                    f"on_episode_done: {dotted(key)} is not an array of numbers ({why}). {KEPT}"
                ) from error
            if tensor.shape[:1] != (length,) or key[0] == "collector":
                raise HookError(
                    f"on_episode_done: {dotted(key)} has shape {list(tensor.shape)}, and the"
                    f" episode {length} steps: expected [{length}, ...], under a name outside of"
                    f" 'collector'. {KEPT}"
                )
            columns[key] = tensor
        kinds = {
            key: (*tensor.shape[1:], tensor.dtype) for key, tensor in columns.items()
        }
        self._known = kinds if self._known is None else self._known
        if kinds != self._known:
            here, first = _text(kinds), _text(self._known)
            raise HookError(
                f"on_episode_done returned {here} for this episode, and {first} for the first one."
                f" {KEPT}"
            )
        return columns


def _with_all_steps(batch: TensorDict) -> TensorDict:
    """Return the batch with time last, and with rows beyond ``frames_per_batch``: their episodes
    need them.

    Without the columns that only some calls add: an episode can have rows of several calls.
    """
    all_steps: TensorDict = time_last(batch).exclude(VALID, NEXT_VALUE)
    return all_steps


def _text(kinds: Mapping[Key, tuple[Any, ...]]) -> str:
    """Describe columns in messages."""
    return (
        ", ".join(
            f"{dotted(key)} {list(kind[:-1])} {kind[-1]}" for key, kind in kinds.items()
        )
        or "no columns"
    )
