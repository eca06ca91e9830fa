"""Publishing weights to workers that have copies of the policy."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from muster.errors import BadWeights, described
from muster.utils.attributes import name_of
from muster.weights.local import LocalWeights, Waiting, copy_pairs
from muster.weights.names import Weights, named_tensors, weight_bearer
from muster.weights.schemes import scheme_for
from muster.weights.transport import Publisher, Ticket, chosen


class SentWeights(LocalWeights):
    """``LocalWeights`` of a policy that acts elsewhere: what was published is copied, and goes to workers as a whole.

    Within ``acting()`` (a rollout of all workers together) a publish waits for its end, so one batch has one version;
    outside, workers take it at their next rollout. Workers that were left out keep what they have; what they get
    next is everything that was published by then.

    Args:
        policy: the user's; a module, or anything that reaches modules (see ``named_tensors``). Workers have copies.
        workers: their number.
        scheme: see ``scheme_for``.
        counter: see ``LocalWeights``.

    Attributes:
        policy: a private copy of the modules, on the CPU: what workers have or will get. None without any.
        original: the user's modules.

    Raises:
        BadWeights: the policy cannot be copied.
    """

    def __init__(self, policy: Any, workers: int, scheme: Any = None, counter: Any = None) -> None:
        original = weight_bearer(policy)
        super().__init__(_copy_on_cpu(original), original, counter)
        self._named, self._workers, self._scheme = name_of(policy), workers, scheme_for(scheme)
        self._updates: list[_Update] = []
        self._tensors: Weights = {}
        self._publisher: Publisher | None = None
        if not self.lazy:
            self._open()

    @property
    def lazy(self) -> bool:
        """Layers of the policy have no weights before its first call; ``materialise`` them before anything else."""
        state = {} if self.policy is None else self.policy.state_dict(keep_vars=True)
        return any(torch.nn.parameter.is_lazy(tensor) for tensor in state.values())

    def materialise(self, state: Weights) -> None:
        """Give lazy layers, here and in the user's policy, the weights that a worker has made.

        Args:
            state: ``named_tensors`` of the worker's policy, after its first call.

        Raises:
            BadWeights: some are missing.
        """
        first: dict[int, str] = {}  # tied weights were sent once
        names = {name: first.setdefault(id(t), name) for name, t in self.policy.state_dict(keep_vars=True).items()}
        if missing := set(names.values()) - state.keys():
            raise BadWeights(f"the worker's policy has no weights named {sorted(missing)}, but the collector's has")
        full = {name: state[sent] for name, sent in names.items()}
        self.policy.load_state_dict(full)
        self.original.load_state_dict(full)
        self._open()

    def publish(self, source: Any = None, *, model: Any = None, workers: Collection[int] | None = None) -> int | str:
        """See ``LocalWeights``; ``workers`` are those who get it, None is all.

        Raises:
            BadWeights: the weights do not fit or are not finite. Nothing was changed.
            BadOption: there is no such worker.
            SlotsExhausted: no memory; the publish is repeated with the next one.
        """
        return self.publish_all([(source, model)], workers=workers)

    def publish_all(self, sources: Sequence[tuple[Any, Any]], *, workers: Collection[int] | None = None) -> int | str:
        """``publish`` for several (source, model), as one version; all of them or none."""
        return self._publish(self._pairs(sources), chosen(workers, self._workers))

    def restore(self, version: int | str) -> None:
        """Set the version after a load into ``policy``, which the user's policy and the workers then get too."""
        super().restore(version)
        if self.original is not None:
            self.original.load_state_dict(self.policy.state_dict())
        with self._lock:
            self._wait({}, version, None)
            self._apply()

    def catch_up(self) -> None:
        """Send what workers missed that did not read in time; before they are given work outside of ``acting()``."""
        with self._lock:
            self._apply()

    def ticket(self, worker: int) -> Ticket:
        """How a (new) worker subscribes to what was published last for it; its ``take`` wants ``named_tensors``."""
        with self._lock:
            return self._opened().ticket(worker)

    def close(self) -> None:
        """Release what the transport holds; may be called again."""
        if self._publisher is not None:
            self._publisher.close()

    # --- steps of a publish -----------------------------------------------------------------------

    def _wait(self, pairs: Waiting, version: int | str, workers: Collection[int] | None) -> None:
        """Nobody waits for two updates: an update that has no receivers left becomes part of the one after it."""
        update = _Update(pairs, version, set(chosen(workers, self._workers)))
        kept, before = [], Waiting()
        for earlier in self._updates:
            earlier.pairs = {**before, **earlier.pairs}
            earlier.workers -= update.workers
            before = {} if earlier.workers else earlier.pairs
            kept += [earlier] if earlier.workers else []
        update.pairs = {**before, **pairs}
        self._updates = [*kept, update]

    def _apply(self) -> None:
        while self._updates:
            update = self._updates[0]
            copy_pairs(update.pairs)
            update.pairs = {}  # should the rest fail and be repeated: the user's tensors may be others by then
            if self._publisher is not None:
                self._publisher.publish(self._tensors, update.version, update.workers)
            del self._updates[0]
        if self._publisher is not None:
            self._publisher.catch_up()

    def _is_inside(self, source: Any) -> bool:
        self._opened()
        return False

    def _target(self, source: Any, model: Any) -> Any:
        if self.policy is None:
            raise BadWeights(
                f"the policy ({self._named}) has no modules that Muster can find, so there is nothing in the workers "
                f"to copy weights to. Make the policy a module, or let it hold its networks as attributes."
            )
        part = super()._target(source, model)
        if part is model and part is not None and not any(part is module for module in self.policy.modules()):
            raise BadWeights(f"the model {type(model).__name__} is no part of the policy that workers have")
        return part

    def _open(self) -> None:
        self._tensors = named_tensors(self.policy)
        self._publisher = self._scheme.publisher(self._tensors, self._workers, self.version)

    def _opened(self) -> Publisher:
        if self._publisher is None:
            raise BadWeights("the policy has lazy layers, which get their weights with its first call in a worker")
        return self._publisher


@dataclass
class _Update:
    """A publish that is not visible yet, and the workers that it is for."""

    pairs: Waiting
    version: int | str
    workers: set[int]


def _copy_on_cpu(module: torch.nn.Module | None) -> torch.nn.Module | None:
    try:
        return None if module is None else copy.deepcopy(module).cpu()
    except Exception as error:
        raise BadWeights(
            f"the policy cannot be copied for its workers: copy.deepcopy raised {described(error)}"
        ) from error
