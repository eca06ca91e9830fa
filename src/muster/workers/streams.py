"""The random streams of groups that an inference server acts for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from muster.rng import GroupRng

if TYPE_CHECKING:
    import torch


class ServedStreams:
    """The random streams that the policy draws from, by group, and the groups that it has acted
    for.

    Args:
        device: device of the policy.
        exclusive: no other thread draws from the process's global generators during a call, so that
            they are replaced by the streams of the group.
        keeps: no thread draws between calls either (no environment threads): replaced until
            ``settle``.
    """

    def __init__(
        self, device: torch.device | None, *, exclusive: bool, keeps: bool
    ) -> None:
        self.exclusive = exclusive
        self._keeps = keeps
        self._device = device
        self._of: dict[int, GroupRng] = {}  # by group
        self._acted: set[int] = set()  # groups that the policy has acted for
        self._installed: GroupRng | None = None  # the global generators at present
        self._users = ExitStack()  # closing it restores the user's generators

    def __getitem__(self, group: int) -> GroupRng:
        return self._of[group]

    def add(self, group: int, state: dict[str, Any]) -> None:
        """Take over the streams of a group, unless they are here already."""
        if group not in self._of:
            self._of[group] = self.restored(group, state)

    def restored(self, group: int, state: dict[str, Any]) -> GroupRng:
        """Return streams in this state."""
        rng = GroupRng(0, group, self._device)
        rng.load_state_dict(state)
        return rng

    def reseed(
        self, groups: Sequence[int], seed: int | Sequence[int] | None, generation: int
    ) -> None:
        """Replace the streams of groups that have some here."""
        for group in set(groups) & self._of.keys():
            self._of[group] = GroupRng(seed, group, self._device, generation)

    def add_to(self, groups: Sequence[int], states: Sequence[dict[str, Any]]) -> None:
        """Write the policy's streams into the states of groups, and whether it has acted for them; the
        environments' streams are unchanged.
        """
        for group, state in zip(groups, states, strict=True):
            saved = state["group"].get("rng")
            if saved is None:  # its worker was dropped
                continue
            saved["acted"] = self.has_acted(group)
            if group in self._of:
                streams = self._of[group].state_dict()
                of_policy = ("numpy", "streams", "torch", "cuda")
                saved |= {name: streams[name] for name in of_policy}

    def load(self, states: Mapping[int, Mapping[str, Any]]) -> dict[int, Any]:
        """Restore the streams in states of groups.

        Return the states for workers, without those of torch.
        """
        left = {}
        for group, state in states.items():
            streams = state["group"].get("rng")
            self._acted.discard(group)
            if streams is None:  # its worker was dropped
                self._of.pop(group, None)
                left[group] = dict(state)
                continue
            if state["group"]["acting"] == "policy":
                self._of[group] = self.restored(group, streams)
                if streams.get("acted", True):  # earlier states do not say it
                    self._acted.add(group)
            else:  # ``add`` brings the streams before the first call
                self._of.pop(group, None)
            of_worker = {**streams, "torch": None, "cuda": None}
            left[group] = {**state, "group": {**state["group"], "rng": of_worker}}
        return left

    def has_acted(self, group: int) -> bool:
        """Return whether the policy has acted for a group."""
        return group in self._acted

    def note_acted(self, groups: Iterable[int]) -> None:
        """Note that the policy has acted for groups."""
        self._acted.update(groups)

    @contextmanager
    def installed(self, rng: GroupRng, *, globally: bool) -> Iterator[None]:
        """A context for a call of the policy with these streams.

        Args:
            globally: the policy draws from the process's generators.
        """
        # kept for the next calls: a change takes as long as a network's call
        if globally and self.exclusive and self._installed is not rng:
            self.settle()
            self._users.enter_context(rng.as_global())
            self._installed = rng
        try:
            yield
        finally:
            if not self._keeps:
                self.settle()

    def settle(self) -> None:
        """Make the user's generators the global ones again."""
        self._installed = None
        self._users.close()
