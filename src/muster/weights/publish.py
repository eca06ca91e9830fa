"""Publishing the weights of a policy: checked as a whole, copied, counted, and visible between rollouts only."""

from __future__ import annotations

import copy
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import Self

from muster.errors import BadWeights, described
from muster.utils.attributes import name_of
from muster.weights.choice import transport_for
from muster.weights.names import (
    Weights,
    check_finite,
    check_fit,
    copy_tensor,
    modules_of,
    named_tensors,
    named_weights,
    weight_bearer,
)
from muster.weights.transport import Publisher, Ticket, Transport, chosen

Pairs = dict[int, tuple[torch.Tensor, torch.Tensor]]  # new and old, by the old one's place in memory
REMEMBERED = 10_000  # versions whose age is known


class PolicyWeights:
    """The weights of a policy; safe to publish from any thread.

    Constructed directly, ``policy`` acts in this process: its weights are replaced in place. Constructed by
    ``of_workers``, copies of it act in workers: weights are published into ``policy``, a private copy, and from
    there to the workers, all at once.

    Between ``hold`` and ``release`` (a rollout) a publish waits for the end: one batch has one version. Workers that
    were left out keep their weights until their next publish, which brings all earlier ones.

    Args:
        policy: the policy that acts.
        original: the user's policy, where ``policy`` is a copy of it.
        counter: an object with ``version`` and ``increment_version()`` that counts versions instead.

    Attributes:
        policy: with workers the private copy of the user's modules, on the CPU; None without any.
        original: with workers the user's modules.
        workers: their number; None if the policy acts here.
        publishes: their number, whatever counts versions.
    """

    def __init__(self, policy: Any, original: Any = None, counter: Any = None) -> None:
        self.policy, self.original, self.counter = policy, original, counter
        self.workers: int | None = None
        self.publishes = 0
        self._count = 0
        self._named = name_of(policy)
        self._born: dict[int | str, int] = {}  # publishes before each of the last versions
        self._lock = threading.Lock()
        self._in_rollout = False
        self._updates: list[_Update] = []
        self._transport: Transport | None = None
        self._publisher: Publisher | None = None
        self._tensors: Weights = {}

    @classmethod
    def of_workers(cls, policy: Any, workers: int, transport: Any = None, counter: Any = None) -> Self:
        """The weights of a policy whose copies act in ``workers``.

        Args:
            policy: the user's; a module, or anything that reaches modules (see ``named_tensors``).
            workers: their number.
            transport: see ``transport_for``.
            counter: see the class.

        Raises:
            BadWeights: the policy cannot be copied.
        """
        original = weight_bearer(policy)
        made = cls(_copy_on_cpu(original), original, counter)
        made._named, made.workers, made._transport = name_of(policy), workers, transport_for(transport)
        if not made.lazy:
            made._open(made._transport, workers)
        return made

    @property
    def version(self) -> int | str:
        """Number of publishes, or the version of ``counter``."""
        return self._count if self.counter is None else self.counter.version

    def publish(self, source: Any = None, *, model: Any = None, workers: Collection[int] | None = None) -> int | str:
        """Take over the weights of ``source``; all or nothing.

        Args:
            source: a module (the policy, the network inside it, or a copy of either), a TensorDict, a dict of
                tensors by ``state_dict`` name, or None for the user's policy.
            model: the part of the policy that they are for.
            workers: those that get them; None is all.

        Returns:
            the new version.

        Raises:
            BadWeights: keys, shapes or dtypes that do not fit, or values that are not finite. Nothing was changed.
            BadOption: there is no such worker.
            SlotsExhausted: no memory; the publish is repeated with the next one.
        """
        return self.publish_all([(source, model)], workers=workers)

    def publish_all(self, sources: Sequence[tuple[Any, Any]], *, workers: Collection[int] | None = None) -> int | str:
        """``publish`` for several (source, model), as one version; all or none. Without any it counts a version."""
        receiving = set(chosen(workers, self.workers or 1))
        pairs = self._pairs(sources)
        with self._lock:
            if self._in_rollout:
                pairs = {place: (new.clone(), old) for place, (new, old) in pairs.items()}
            version = self._increment()
            self._queue(_Update(pairs, version, receiving))
            if not self._in_rollout:
                self._apply()
            return version

    @contextmanager
    def acting(self) -> Iterator[int | str]:
        """``hold`` and ``release`` as a context manager, for a rollout."""
        version = self.hold()
        try:
            yield version
        finally:
            self.release()

    def hold(self) -> int | str:
        """The newest weights are in place, and stay as they are until ``release``. Returns their version."""
        with self._lock:
            self._apply()
            self._in_rollout = True
            return self._count if self.counter is None else self.counter.version

    def release(self) -> None:
        """Publishes take effect again."""
        self._in_rollout = False  # without the lock: a publish that reads it meanwhile was during the rollout

    def restore(self, version: int | str) -> None:
        """Set the version after a load into ``policy``, which the user's policy and the workers then get too."""
        if self.counter is not None:
            self.counter.version = version
        elif isinstance(version, int):
            self._count = version
        if self.workers is None:
            return
        if self.original is not None:
            self.original.load_state_dict(self.policy.state_dict())
        with self._lock:
            self._queue(_Update({}, version, set(range(self.workers))))
            self._apply()

    def lag(self, version: int | str) -> int:
        """Publishes since a version; an unknown version (from before a load) counts as the newest."""
        return self.publishes - self._born.get(version, self.publishes)

    # --- of workers -------------------------------------------------------------------------------

    @property
    def lazy(self) -> bool:
        """Layers of the policy have no weights before its first call; ``materialise`` them before anything else."""
        if self.workers is None or self.policy is None:
            return False
        return any(map(torch.nn.parameter.is_lazy, self.policy.state_dict(keep_vars=True).values()))

    def materialise(self, state: Weights) -> None:
        """Give lazy layers, here and in the user's policy, the weights that a worker has made.

        Args:
            state: ``named_tensors`` of the worker's policy, after its first call.

        Raises:
            BadWeights: some are missing.
        """
        assert self._transport is not None
        assert self.workers is not None
        first: dict[int, str] = {}  # tied weights were sent once
        names = {name: first.setdefault(id(t), name) for name, t in self.policy.state_dict(keep_vars=True).items()}
        if missing := set(names.values()) - state.keys():
            raise BadWeights(f"the worker's policy has no weights named {sorted(missing)}, but the collector's has")
        full = {name: state[sent] for name, sent in names.items()}
        self.policy.load_state_dict(full)
        self.original.load_state_dict(full)
        self._open(self._transport, self.workers)

    def catch_up(self) -> None:
        """Make visible what is waiting, before workers are given work outside of ``acting()``."""
        with self._lock:
            self._apply()

    def ticket(self, worker: int) -> Ticket:
        """How a (new) worker subscribes to what was published last for it; its ``take`` wants ``named_tensors``."""
        with self._lock:
            self._check_not_lazy()
            assert self._publisher is not None
            return self._publisher.ticket(worker)

    def close(self) -> None:
        """Release what the transport holds; may be called again."""
        if self._publisher is not None:
            self._publisher.close()

    # --- steps of a publish -----------------------------------------------------------------------

    def _pairs(self, sources: Sequence[tuple[Any, Any]]) -> Pairs:
        """What is to be copied where; everything has been checked."""
        pairs: Pairs = {}
        for source, model in sources:
            source = self.original if source is None else source
            if source is None:
                continue
            self._check_not_lazy()
            if any(source is module for held in modules_of(self.policy) for module in held.modules()):
                check_finite(named_weights(source))  # the optimizer's changes are in place already
                continue
            new = named_weights(source)
            old = _fitting_part(new, self._target(source, model))
            check_fit(new, old)
            check_finite(new)
            pairs |= {old[name].data_ptr(): (tensor, old[name].detach()) for name, tensor in new.items()}
        return pairs

    def _target(self, source: Any, model: Any) -> torch.nn.Module:
        """The part of ``policy`` that is meant: where ``model``, or else ``source``, has its place in ``original``."""
        if self.workers is not None and self.policy is None:
            raise BadWeights(
                f"the policy ({self._named}) has no modules that Muster can find, so there is nothing in the workers "
                f"to copy weights to. Make the policy a module, or let it hold its networks as attributes."
            )
        meant = source if model is None else model
        if isinstance(self.original, torch.nn.Module) and isinstance(meant, torch.nn.Module):
            for path, module in self.original.named_modules():
                if module is meant:
                    part: torch.nn.Module = self.policy.get_submodule(path)
                    return part
        target = self.policy if model is None else model
        if not isinstance(target, torch.nn.Module):
            raise BadWeights(
                f"the policy ({self._named}) is not a module, so Muster cannot reach its weights. Change them where "
                f"the policy finds them, and call update_policy_weights_() without arguments to count a version."
            )
        if self.workers is not None and not any(target is module for module in self.policy.modules()):
            raise BadWeights(f"the model {type(model).__name__} is no part of the policy that workers have")
        return target

    def _queue(self, update: _Update) -> None:
        """No worker waits for two updates: one that has no receivers left becomes part of the one after it."""
        kept, before = [], Pairs()
        for earlier in self._updates:
            earlier.pairs = {**before, **earlier.pairs}
            earlier.workers -= update.workers
            before = {} if earlier.workers else earlier.pairs
            kept += [earlier] if earlier.workers else []
        update.pairs = {**before, **update.pairs}
        self._updates = [*kept, update]

    def _apply(self) -> None:
        """Make visible what is waiting."""
        while self._updates:
            update = self._updates[0]
            for new, old in update.pairs.values():
                copy_tensor(old, new)
            update.pairs = {}  # should the rest fail and be repeated: the user's tensors may be others by then
            if self._publisher is not None:
                self._publisher.publish(self._tensors, update.version, update.workers)
            del self._updates[0]

    def _increment(self) -> int | str:
        before = self.version
        if self.counter is not None:
            self.counter.increment_version()
        else:
            self._count += 1
        if not self._born:
            self._born[before] = self.publishes
        self.publishes += 1
        self._born[self.version] = self.publishes
        if len(self._born) > REMEMBERED:
            del self._born[next(iter(self._born))]
        return self.version

    def _open(self, transport: Transport, workers: int) -> None:
        self._tensors = named_tensors(self.policy)
        self._publisher = transport.publisher(self._tensors, workers, self.version)

    def _check_not_lazy(self) -> None:
        if self.workers is not None and self._publisher is None:
            raise BadWeights("the policy has lazy layers, which get their weights with its first call in a worker")


@dataclass
class _Update:
    """A publish that is not visible yet, and the workers that it is for."""

    pairs: Pairs
    version: int | str
    workers: set[int]


def _fitting_part(new: Weights, policy: torch.nn.Module) -> Weights:
    """The tensors of the part of the policy that has these names and shapes."""
    whole = _tensors(policy)
    if whole.keys() == new.keys():  # then no part has these names too
        return whole
    parts = {name: _tensors(module) for name, module in policy.named_modules()}
    named = {name: part for name, part in parts.items() if part.keys() == new.keys() and part}
    fitting = {name: part for name, part in named.items() if all(new[n].shape == part[n].shape for n in new)}
    if len(fitting) > 1:
        raise BadWeights(
            f"weights named {sorted(new)} fit several parts of the policy: {', '.join(fitting)}. Give those of "
            f"the whole policy. Nothing was changed."
        )
    return next(iter((fitting or named).values()), whole)


def _tensors(module: torch.nn.Module) -> Weights:
    return {name: tensor for name, tensor in module.state_dict(keep_vars=True).items() if torch.is_tensor(tensor)}


def _copy_on_cpu(module: torch.nn.Module | None) -> torch.nn.Module | None:
    try:
        return None if module is None else copy.deepcopy(module).cpu()
    except Exception as error:
        raise BadWeights(
            f"the policy cannot be copied for its workers: copy.deepcopy raised {described(error)}"
        ) from error
