"""From cells of a ring to the TensorDicts that learners get."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from muster.errors import BadOption
from muster.keys import IS_INIT, Key, dotted, is_below, next_of
from muster.memory.ring import Ring
from muster.memory.specs import Array
from muster.utils.private_names import tensordict_maker

if TYPE_CHECKING:
    from tensordict import TensorDict

INDEX: Key = ("index",)
WEIGHT: Key = ("weight",)  # only with priorities
GAMMA: Key = ("gamma",)
STEPS: Key = ("steps_to_next_obs",)
LATER: Key = ("steps",)  # of the second TensorDict of ``relabel``


class Gathering:
    """Gathers the transitions of a ring. What can be looked up before a sample is drawn is kept.

    Args:
        ring: has the rows.
        keep: keys of samples beside observations, actions and what a step returns; of leaves, or of
            all below them.
        number: number of the ring.
        count: number of rings of the memory.
    """

    def __init__(
        self,
        ring: Ring,
        keep: Sequence[Key],
        number: int,
        count: int,
    ) -> None:
        stored = ring.stored
        shown = []
        returned = []
        self._rewards = []
        self._ended_by: dict[Key, Key] = {}  # of rewards of agents that end one by one
        for column in stored.columns:
            key = column.key
            if key[0] == "next":
                returned.append(key)
                if column.role == "reward":
                    self._rewards.append(key)
                if column.ended_by is not None:
                    self._ended_by[key] = column.ended_by
            elif column.role is not None or is_below(key, keep):
                shown.append(key)
        following = list(map(next_of, stored.observed))
        self._ring = ring
        self._number = number
        self._count = count
        self._shown = [stored.reads[key] for key in shown]
        self._returned = [stored.reads[key] for key in returned]
        # of all leaves, and of what they are in
        self._names = {key[: n + 1] for key in shown for n in range(len(key))}
        self.check_free("ReplayMemory", INDEX)
        self._keys = (*shown, *returned, INDEX, *following)
        # an environment's own flag says the same, as that of TorchRL's InitTracker
        self._knows_begins = any(
            column.key == IS_INIT and column.dtype.kind == "b"
            for column in stored.columns
        )
        self._tree = KeyTree(self._keys)

    def check_free(self, of: str, *own: Key) -> None:
        """Raise ``BadOption`` if a key that Muster writes into a sample itself is one of its columns.

        ``of``: what needs these keys.
        """
        for key in own:
            if key in self._names:
                raise BadOption(
                    f"{of} writes {dotted(key)!r} into a sample, and the environment or policy has a"
                    " value of that name: rename it, with"
                    " gymnasium.wrappers.TransformObservation for example"
                )

    def transitions(self, cells: Array) -> TensorDict:
        """Return transitions, ``[n]``."""
        places = self._ring.places_of_readable(cells)
        columns = self._columns(cells, places, places)
        size = torch.Size((len(cells),))
        return self._tree.made(columns, size)

    def n_step(
        self,
        cells: Array,
        n_step: int,
        gamma: float,
    ) -> TensorDict:
        """Return transitions of up to ``n_step`` steps, ``[n]``. The window of an agent that ends
        before the others is shorter.
        """
        groups = [done[:-1] for done in self._ended_by.values()]
        for group in ((), *groups):
            self.check_free("sample(n_step=...)", (*group, *GAMMA), (*group, *STEPS))
        ring = self._ring
        stored = ring.stored
        read = stored.reads
        places = ring.places_of(cells)
        first = stored.on_device(places)
        rewards = {}
        for key in self._rewards:
            reward = stored.to_tensor(read[key](first, 0))
            if not (reward.is_floating_point() or reward.is_complex()):
                reward = reward.float()  # a discounted sum of integers is none
            rewards[key] = reward
        last = cells.copy()
        steps = np.ones(len(cells), np.int64)
        goes_on: Array = np.ones(len(cells), bool)
        windows = {}
        for done in self._ended_by.values():
            windows[done] = _AgentWindows(ring, done, cells)
        for k in range(1, n_step):
            later = cells + k * ring.B
            goes_on &= ring.continues(cells, later)
            if not goes_on.any():
                break
            last[goes_on] = later[goes_on]
            steps += goes_on
            read_cells = np.where(goes_on, later, cells)
            there = stored.on_device(ring.places_of(read_cells))
            for window in windows.values():
                window.advance(read_cells, goes_on)
            for key, reward in rewards.items():
                goes = goes_on
                if key in self._ended_by:
                    window = windows[self._ended_by[key]]
                    goes = window.shaped(window.goes_on)
                factors = self._tensor(goes * gamma**k)
                more = stored.to_tensor(read[key](there, 0))
                ones = [1] * (reward.ndim - goes.ndim)
                more = more * factors.reshape(*goes.shape, *ones)
                rewards[key] = reward + more.to(reward.dtype)
        ends = ring.places_of(last)
        columns = self._columns(cells, places, ends)
        entries = dict(zip(self._keys, columns, strict=True))
        for window in windows.values():
            self._take_ends(entries, window, cells, places, last)
            self._add_discount(
                entries, window.group, window.shaped(window.steps), gamma
            )
        entries |= rewards
        self._add_discount(entries, (), steps, gamma)
        return tensordict_of(entries, [len(cells)])

    def _add_discount(
        self,
        entries: dict[Key, torch.Tensor],
        group: Key,
        steps: Array,
        gamma: float,
    ) -> None:
        """Add the numbers of steps, and the factors of the values of next observations; of agents, or
        of the environment (no group).
        """
        made_steps = self._tensor(steps).unsqueeze(-1)
        discount = gamma ** made_steps.double()
        steps_key = (*group, *STEPS)
        gamma_key = (*group, *GAMMA)
        entries[steps_key] = made_steps
        entries[gamma_key] = discount.to(torch.float32)

    def _take_ends(
        self,
        entries: dict[Key, torch.Tensor],
        window: _AgentWindows,
        cells: Array,
        places: Array,
        last: Array,
    ) -> None:
        """Replace what the last steps of the windows of environments have returned to agents whose
        windows end before.
        """
        keys = [key for key in self._keys if is_below(key, [next_of(window.group)])]
        for agent, own_last in enumerate(window.last.T):
            if np.array_equal(own_last, last):
                continue
            ends = self._ring.places_of(own_last)
            columns = self._columns(cells, places, ends)
            own = dict(zip(self._keys, columns, strict=True))
            for key in keys:
                window.take(entries[key], own[key], agent)

    def sequences(self, cells: Array, length: int) -> TensorDict:
        """Return consecutive transitions that begin with cells, ``[n, length]``."""
        if not self._knows_begins:
            self.check_free("sample(sequence=...)", IS_INIT)
        ring = self._ring
        later = np.arange(length) * ring.B
        every = (cells[:, None] + later).reshape(-1)
        places = ring.places_of(every)
        columns = self._columns(every, places, places)
        entries = dict(zip(self._keys, columns, strict=True))
        begins = ring.stored.begins.reshape(-1)[places]
        entries[IS_INIT] = self._tensor(begins).unsqueeze(-1)
        n = len(cells)
        shaped = {}
        for key, rows in entries.items():
            shaped[key] = rows.reshape(n, length, *rows.shape[1:])
        return tensordict_of(shaped, [n, length])

    def later(self, cells: Array, steps: Array) -> TensorDict:
        """Return the observations after the transitions that are so many steps after ``cells``."""
        self.check_free("sample(relabel=...)", LATER)
        ring = self._ring
        later = cells + steps * ring.B
        entries: dict[Key, torch.Tensor] = {}
        places = ring.places_of(later)
        observations = ring.stored.next_observations(places)
        for key, rows in observations.items():
            entries[key] = ring.stored.to_tensor(rows)
        entries[LATER] = self._tensor(steps).unsqueeze(-1)
        entries[INDEX] = self._index_of(later)
        return tensordict_of(entries, [len(cells)])

    def _columns(
        self,
        cells: Array,
        places: Array,
        ends: Array,
    ) -> list[torch.Tensor]:
        """Return the columns of transitions in the order of ``_keys``. They begin with the cells at
        ``places``, and what the last step returned is that of the cells at ``ends``.
        """
        stored = self._ring.stored
        to_tensor = stored.to_tensor
        first = stored.on_device(places)
        last = first
        if ends is not places:
            last = stored.on_device(ends)
        found = []
        for read in self._shown:
            found.append(to_tensor(read(first, 0)))
        for read in self._returned:
            found.append(to_tensor(read(last, 0)))
        found.append(self._index_of(cells))
        for rows in stored.next_observations(ends).values():
            found.append(to_tensor(rows))
        return found

    def _index_of(self, cells: Array) -> torch.Tensor:
        if self._count == 1:
            return self._tensor(cells)
        return self._tensor(cells * self._count + self._number)

    def _tensor(self, values: Array) -> torch.Tensor:
        tensor = torch.from_numpy(values)
        device = self._ring.stored.device
        if device is None:
            return tensor
        return tensor.to(device)


class _AgentWindows:
    """The n-step windows of the agents of a group, which end where an agent does.

    Args:
        ring: has the rows.
        done: column that says where agents have ended.
        cells: first cells of the windows.

    Attributes:
        group: key of the group.
        lead: the dimensions of the agents in the group's columns; (): there is one without.
        last: last cells of the windows, ``[n, agents]``.
        steps: their numbers of steps.
        goes_on: which of them contain the step that was made last.
    """

    def __init__(self, ring: Ring, done: Key, cells: Array) -> None:
        self.group = done[:-1]
        self._ring = ring
        self._read = ring.stored.reads[done]
        self.lead = tuple(self._flags(cells).shape[1:-1])
        agents = math.prod(self.lead)
        self.last = np.repeat(cells[:, None], agents, 1)
        self.steps = np.ones((len(cells), agents), np.int64)
        self.goes_on = ~self._done(cells)  # an agent may be away

    def advance(self, cells: Array, goes_on: Array) -> None:
        """Make one more step, at ``cells`` where the environment ``goes_on``, ``[n]`` each."""
        self.goes_on &= goes_on[:, None] & ~self._done(cells)
        self.last = np.where(self.goes_on, cells[:, None], self.last)
        self.steps += self.goes_on

    def shaped(self, values: Array) -> Array:
        """Return values ``[n, agents]`` with the dimensions of the group."""
        return values.reshape(len(values), *self.lead)

    def take(self, rows: torch.Tensor, others: torch.Tensor, agent: int) -> None:
        """Replace the values of an agent in rows of a column, if the column has one for each."""
        if tuple(rows.shape[1 : 1 + len(self.lead)]) != self.lead:
            return
        size = (len(rows), len(self.last.T), -1)
        rows.view(size)[:, agent] = others.view(size)[:, agent]

    def _done(self, cells: Array) -> Array:
        """Return whether agents have ended, ``[n, agents]``."""
        flags = self._flags(cells)
        done: Array = flags.reshape(len(cells), -1).cpu().numpy()
        return done

    def _flags(self, cells: Array) -> torch.Tensor:
        stored = self._ring.stored
        places = stored.on_device(self._ring.places_of(cells))
        return stored.to_tensor(self._read(places, 0))


class KeyTree:
    """Makes TensorDicts with nested keys, which are looked at once.

    Args:
        keys: keys of the leaves.
    """

    def __init__(self, keys: Sequence[Key]) -> None:
        nodes: list[Key] = [()]
        for key in keys:
            for depth in range(1, len(key)):
                path = key[:depth]
                if path not in nodes:
                    nodes.append(path)
        # for each node, the names of its leaves, and their places among all
        self._leaves: list[tuple[list[str], list[int]]] = [([], []) for _ in nodes]
        for place, (*above, name) in enumerate(keys):
            names, places = self._leaves[nodes.index(tuple(above))]
            names.append(name)
            places.append(place)
        self._inner = []
        for i in reversed(range(1, len(nodes))):  # inner ones first
            *above, name = nodes[i]
            self._inner.append((i, nodes.index(tuple(above)), name))

    def made(self, values: Sequence[Any], size: torch.Size) -> TensorDict:
        """Return a TensorDict of leaves in the order of ``keys``."""
        make = tensordict_maker()
        nodes: list[dict[str, Any]] = []
        for names, places in self._leaves:
            leaves = map(values.__getitem__, places)
            nodes.append(dict(zip(names, leaves, strict=True)))
        for node, outer, name in self._inner:
            nodes[outer][name] = make(
                nodes[node],
                batch_size=size,
                names=None,
                device=None,
            )
        found: TensorDict = make(
            nodes[0],
            batch_size=size,
            names=None,
            device=None,
        )
        return found


def tensordict_of(
    entries: Mapping[Key, torch.Tensor],
    shape: Sequence[int],
) -> TensorDict:
    """Return a TensorDict of leaves with nested keys."""
    tree = _tree(tuple(entries))
    return tree.made(list(entries.values()), torch.Size(shape))


@lru_cache(maxsize=64)
def _tree(keys: tuple[Key, ...]) -> KeyTree:
    return KeyTree(keys)
