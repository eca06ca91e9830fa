"""Publishing the weights of a policy: checked as a whole, copied, counted, and visible between
rollouts only.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from typing_extensions import Self

from muster.errors import BadWeights
from muster.policies.modes import ActingMode
from muster.utils.attributes import name_of
from muster.weights.choice import transport_for
from muster.weights.coverage import NewWeights, is_own, taken, tensors_of
from muster.weights.names import (
    Weights,
    check_finite,
    copy_tensor,
    each_once,
    is_finite,
    place_of,
    replica,
    weight_bearer,
    with_unregistered,
)
from muster.weights.transport import Publisher, Ticket, Transport, chosen

Pairs = dict[Any, tuple[torch.Tensor, torch.Tensor]]  # new and old, by ``place_of`` the old one
REMEMBERED = 10_000  # versions whose age is known


class PolicyWeights:
    """The weights of a policy; safe to publish from any thread.

    Constructed directly, ``policy`` acts in this process: its weights are replaced in place.
    Constructed by ``of_workers``, copies of it act in workers: weights are published into
    ``policy``, a private copy, and from there to the workers, all at once.

    Between ``hold`` and ``release`` (a rollout) a publish waits for the end: one batch has one
    version. Workers that were left out keep their weights until their next publish, which brings
    all earlier ones.

    Args:
        policy: the policy that acts.
        original: the user's policy, where ``policy`` is a copy of it.
        counter: an object with ``version`` and ``increment_version()`` that counts versions
            instead.
        mode: the mode in which ``policy`` acts here; None: its modules keep theirs.

    Attributes:
        policy: with workers the private copy of the user's modules, on the CPU; None without any.
        original: with workers the user's modules; else as given.
        workers: their number; None if the policy acts here.
        publishes: their number, whatever counts versions.
    """

    def __init__(
        self, policy: Any, original: Any = None, counter: Any = None, mode: ActingMode | None = None
    ) -> None:
        self.policy = policy
        self.original = original
        self.counter = counter
        self._mode = mode
        self.workers: int | None = None
        self.publishes = 0
        self._count = 0
        self._named = name_of(policy)
        # all modules of the user's policy, where ``policy`` is a copy
        self._users: torch.nn.Module | None = None
        self._roots = [policy, original]  # objects that stand for the whole policy
        self._has_model_ids = False  # parts of the policy have ids: see ``get_model``
        # tensors of ``policy`` that were given for a model, from elsewhere
        self._elsewhere: set[Any] = set()
        # its buffers that were infinite from the start, such as masks
        self._unbounded: set[Any] = set()
        self._look_at_modules()
        self._born: dict[int | str, int] = {}  # publishes before each of the last versions
        self._lock = threading.Lock()
        self._in_rollout = False
        self._updates: list[_Update] = []
        self._transport: Transport | None = None
        self._publisher: Publisher | None = None
        self._tensors: Weights = {}

    @classmethod
    def of_workers(
        cls,
        policy: Any,
        workers: int,
        transport: Any = None,
        counter: Any = None,
        *,
        only_weights: bool = False,
    ) -> Self:
        """The weights of a policy whose copies act in ``workers``.

        Args:
            policy: the user's; a module, or anything that reaches modules (see ``named_tensors``).
            workers: their number.
            transport: see ``transport_for``.
            counter: see the class.
            only_weights: also take policies that ``copy.deepcopy`` cannot copy; see ``replica``.

        Raises:
            BadWeights: the policy cannot be copied.
        """
        made = cls(None, None, counter)
        made._named, made.workers, made._transport = (
            name_of(policy),
            workers,
            transport_for(transport),
        )
        users = made._users = weight_bearer(policy)
        if users is not None:
            made.original = policy if isinstance(policy, torch.nn.Module) else users
            made.policy = replica(users, only_weights=only_weights)
            made._unbounded = _infinite(made.policy)
        made._roots, made._has_model_ids = [policy, users], users is policy
        if not made.lazy:
            made._open(made._transport, workers)
        return made

    @property
    def version(self) -> int | str:
        """Number of publishes, or the version of ``counter``."""
        return self._count if self.counter is None else self.counter.version

    def publish(
        self, source: Any = None, *, model: Any = None, workers: Collection[int] | None = None
    ) -> int | str:
        """Take over the weights of ``source``; all or nothing.

        They are weights for all of the policy, or for all of ``model``. A module that is a part of
        the user's policy stands for all of it: its other parameters and buffers are taken from
        there, too, except those that were given for a model from elsewhere.

        Args:
            source: the user's policy or a part of it, a copy of the whole, a TensorDict, a dict of
                tensors by ``state_dict`` name, which may be nested, or None for the user's policy.
            model: the part of the policy that they are for.
            workers: those that get them; None is all.

        Returns:
            the new version.

        Raises:
            BadWeights: keys, shapes or dtypes that do not fit, weights of a part only, or values
                that are not finite. Nothing was changed.
            BadOption: there is no such worker.
            SlotsExhausted: no memory; the publish is repeated with the next one.
        """
        return self.publish_all([(source, model)], workers=workers)

    def publish_all(
        self, sources: Sequence[tuple[Any, Any]], *, workers: Collection[int] | None = None
    ) -> int | str:
        """``publish`` for several (source, model), as one version; all or none.

        Without any it counts a version.
        """
        receiving = set(chosen(workers, self.workers or 1))
        changes = self._changes(sources)
        pairs = changes.pairs
        with self._lock:
            if self._in_rollout:
                pairs = {place: (new.clone(), old) for place, (new, old) in pairs.items()}
            self._elsewhere = (self._elsewhere - changes.own) | changes.elsewhere
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
        """The newest weights are in place, and stay as they are until ``release``.

        Returns their version.

        The policy is in the mode in which it acts.
        """
        with self._lock:
            self._apply()
            self._in_rollout = True
            version: int | str = self._count if self.counter is None else self.counter.version
        if self._mode is not None:
            self._mode.enter()
        return version

    def release(self) -> None:
        """Publishes take effect again, and the policy has the user's mode."""
        if self._mode is not None:
            self._mode.leave()
        # without the lock: a publish that reads it meanwhile was during the rollout
        self._in_rollout = False

    @contextmanager
    def in_mode(self) -> Iterator[None]:
        """The policy is in the mode in which it acts: for calls of it outside of rollouts, and for
        copies of it.
        """
        if self._mode is None:
            yield
            return
        self._mode.enter()
        try:
            yield
        finally:
            self._mode.leave()

    def keep_modes(self) -> None:
        """From now on, the policy acts in the modes that its modules have."""
        self._mode = None

    def act_with(self, policy: torch.nn.Module) -> None:
        """From now on, a copy of the user's policy acts in this process, in its own mode;
        publishing copies to it.
        """
        self.original, self.policy = self.policy, policy
        self._mode = None
        self._roots.append(policy)
        self._look_at_modules()

    def restore(self, version: int | str) -> None:
        """Set the version after a load into ``policy``, which the user's policy and the workers
        then get too.
        """
        if self.counter is not None:
            self.counter.version = version
        elif isinstance(version, int):
            self._count = version
        if self.workers is None:
            return
        if self._users is not None:
            self._users.load_state_dict(self.policy.state_dict())
        with self._lock:
            self._elsewhere.clear()
            self._queue(_Update({}, version, set(range(self.workers))))
            self._apply()

    def lag(self, version: int | str) -> int:
        """Publishes since a version; an unknown version (from before a load) counts as the newest."""
        return self.publishes - self._born.get(version, self.publishes)

    # --- of workers -------------------------------------------------------------------------------

    @property
    def lazy(self) -> bool:
        """Layers of the policy have no weights before its first call; ``materialise`` them before
        anything else.
        """
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
        names = {
            name: first.setdefault(id(t), name)
            for name, t in self.policy.state_dict(keep_vars=True).items()
        }
        if missing := set(names.values()) - state.keys():
            raise BadWeights(
                f"the worker's policy has no weights named {sorted(missing)}, but the"
                " collector's has"
            )
        full = {name: state[sent] for name, sent in names.items()}
        assert self._users is not None
        self.policy.load_state_dict(full)
        self._users.load_state_dict(full)
        self._open(self._transport, self.workers)

    def catch_up(self) -> None:
        """Make visible what is waiting, before workers are given work outside of ``acting()``."""
        with self._lock:
            self._apply()

    def ticket(self, worker: int) -> Ticket:
        """How a (new) worker subscribes to what was published last for it; its ``take`` wants
        ``named_tensors``.
        """
        with self._lock:
            self._check_not_lazy()
            assert self._publisher is not None
            return self._publisher.ticket(worker)

    def close(self) -> None:
        """Release what the transport holds; may be called again."""
        if self._publisher is not None:
            self._publisher.close()

    # --- steps of a publish -----------------------------------------------------------------------

    def _changes(self, sources: Sequence[tuple[Any, Any]]) -> _Changes:
        """Find what is to be copied where, and check everything."""
        changes = _Changes({}, set(), set())
        for source, model in sources:
            if model is not None and any(model is root for root in self._roots):
                model = None
            part = self._part(source, model)
            if part is None:  # no weights
                continue
            target, own, path = part
            new = taken(
                source, target, own, partial(_model_id, path) if self._has_model_ids else None
            )
            self._check_finite(new.weights, tensors_of(target))
            if own is not target or not new.is_own:
                self._add(changes, new, tensors_of(target), model)
        for place, (tensor, old) in changes.pairs.items():
            # a policy that acts here gets weights of another part of it
            if place_of(tensor) in changes.pairs:
                changes.pairs[place] = tensor.clone(), old
        return changes

    def _add(self, changes: _Changes, new: NewWeights, old: Weights, model: Any) -> None:
        """Add the new values of a module, whose tensors are ``old``."""
        pairs: Pairs = {}
        for name, tensor in new.weights.items():
            place = place_of(old[name])
            if model is None and name not in new.given and place in self._elsewhere:
                continue
            first, _ = pairs.setdefault(place, (tensor, old[name]))
            if first is not tensor and not new.is_own and not torch.equal(first, tensor):
                raise BadWeights(
                    f"weight {name} has another name in the policy, too (tied weights), and the two"
                    " have different values. Nothing was changed."
                )
        changes.pairs |= pairs
        if model is not None and not new.is_own:
            changes.elsewhere |= pairs.keys()
            changes.own -= pairs.keys()
        else:
            changes.own |= pairs.keys()
            changes.elsewhere -= pairs.keys()

    def _part(self, source: Any, model: Any) -> tuple[torch.nn.Module, torch.nn.Module, str] | None:
        """The part of ``policy`` that is meant, the same part of the user's policy, and its path in
        both.

        None: there are no weights, and none were given.
        """
        policy = self.policy
        users = self.policy if self._users is None else self._users
        if self.workers is not None and policy is None:
            if source is None and model is None:
                return None
            raise BadWeights(
                f"the policy ({self._named}) has no modules that Muster can find, so there is"
                " nothing in the workers to copy weights to. Make the policy a module, or let it"
                " hold its networks as attributes."
            )
        if not isinstance(policy, torch.nn.Module):
            return self._part_of_function(source, model)
        self._check_not_lazy()
        if model is None:
            return policy, users, ""
        for tree in (users, policy):
            for path, module in tree.named_modules():
                if module is model:
                    return policy.get_submodule(path), users.get_submodule(path), path
        if self.workers is not None:
            raise BadWeights(
                f"the model {type(model).__name__} is no part of the policy that workers have"
            )
        return model, model, ""

    def _part_of_function(
        self, source: Any, model: Any
    ) -> tuple[torch.nn.Module, torch.nn.Module, str] | None:
        """``_part`` of a function that acts here, whose modules are the user's."""
        bearer = weight_bearer(self.policy) if model is None else model
        if model is None and source is None:
            return None if bearer is None else (bearer, bearer, "")
        if bearer is None or (model is None and not is_own(source, bearer)):
            raise BadWeights(
                f"the policy ({self._named}) is not a module, so Muster cannot reach its weights."
                " Change them where the policy finds them, and call update_policy_weights_()"
                " without arguments to count a version."
            )
        return bearer, bearer, ""

    def _check_finite(self, new: Weights, old: Weights) -> None:
        check_finite(
            {
                name: tensor
                for name, tensor in new.items()
                if place_of(old[name]) not in self._unbounded
            }
        )

    def _look_at_modules(self) -> None:
        """Find modules beside the submodules of a policy that acts here, and values that are
        infinite on purpose.
        """
        if isinstance(self.original, torch.nn.Module):
            self._users = with_unregistered(self.original)
        if not isinstance(self.policy, torch.nn.Module):
            self._unbounded = _infinite(weight_bearer(self.policy))
            return
        acting, self.policy = self.policy, with_unregistered(self.policy)
        self._has_model_ids = self.policy is acting
        self._unbounded = _infinite(self.policy)

    def _queue(self, update: _Update) -> None:
        """No worker waits for two updates: one that has no receivers left becomes part of the one
        after it.
        """
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
            # should the rest fail and be repeated: the user's tensors may be others by then
            update.pairs = {}
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
        self._tensors = each_once(self.policy)
        self._publisher = transport.publisher(self._tensors, workers, self.version)

    def _check_not_lazy(self) -> None:
        if self.workers is not None and self._publisher is None:
            raise BadWeights(
                "the policy has lazy layers, which get their weights with its first call in a"
                " worker"
            )


@dataclass
class _Changes:
    """What a publish changes.

    Attributes:
        pairs: tensors to copy.
        elsewhere: keys of those that were given for a model, from elsewhere.
        own: keys of the others.
    """

    pairs: Pairs
    elsewhere: set[Any]
    own: set[Any]


@dataclass
class _Update:
    """A publish that is not visible yet, and the workers that it is for."""

    pairs: Pairs
    version: int | str
    workers: set[int]


def _infinite(module: torch.nn.Module | None) -> set[Any]:
    """The buffers with infinite values, such as the mask of an attention."""
    return (
        set()
        if module is None
        else {place_of(buffer) for buffer in module.buffers() if not is_finite(buffer)}
    )


def _model_id(path: str, inner: str) -> str | None:
    """The argument that names a part of the policy, such as ``model_id='policy.module[0]'``; None:
    there is none.
    """
    names = f"{path}.{inner}".removeprefix(".").split(".")
    if not all(name.isdecimal() or name.isidentifier() for name in names):
        return None
    return "model_id=" + repr(
        "policy" + "".join(f"[{name}]" if name.isdecimal() else f".{name}" for name in names)
    )
