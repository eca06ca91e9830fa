"""Publishing the weights of a policy: checked as a whole, copied, counted, and visible between
rollouts only.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from typing_extensions import Self

from muster.errors import BadWeights
from muster.policies.modes import ActingMode
from muster.utils.attributes import name_of
from muster.weights.choice import transport_for
from muster.weights.coverage import NewWeights, taken, tensors_of
from muster.weights.names import Weights, check_finite, each_once, place_of
from muster.weights.own import OwnWeights
from muster.weights.parts import PolicyModules
from muster.weights.transport import Ticket, Transport, chosen
from muster.weights.updates import Pairs, Update, Updates
from muster.weights.versions import Versions


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
        modules: of the policy and of what acts.
        versions: counts publishes.
        workers: their number; None if the policy acts here.
    """

    def __init__(
        self,
        policy: Any,
        original: Any = None,
        counter: Any = None,
        mode: ActingMode | None = None,
    ) -> None:
        modules = PolicyModules.here(
            policy, original, [policy, original], name_of(policy)
        )
        self._connect(modules, counter, mode)

    def _connect(
        self,
        modules: PolicyModules,
        counter: Any,
        mode: ActingMode | None = None,
        workers: int | None = None,
        transport: Transport | None = None,
    ) -> None:
        self.modules = modules
        self.versions = Versions(counter)
        self.workers = workers
        self._mode = mode
        self._transport = transport
        # tensors of ``policy`` that were given for a model, from elsewhere
        self._elsewhere: set[Any] = set()
        self._lock = threading.Lock()
        self._in_rollout = False
        self._updates = Updates()
        self._own: OwnWeights | None = None
        if workers is not None and not modules.lazy:
            self._open()

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
        """Return the weights of a policy whose copies act in ``workers``.

        Args:
            policy: the user's; a module, or anything that reaches modules (see ``named_tensors``).
            workers: their number.
            transport: see ``transport_for``.
            counter: see the class.
            only_weights: also take policies that ``copy.deepcopy`` cannot copy; see ``replica``.

        Raises:
            BadWeights: the policy cannot be copied.
        """
        made = cls.__new__(cls)
        chosen_transport = transport_for(transport)
        modules = PolicyModules.of_workers(policy, only_weights=only_weights)
        made._connect(modules, counter, workers=workers, transport=chosen_transport)
        return made

    @property
    def policy(self) -> Any:
        """What acts here; with workers the private copy of the user's modules, on the CPU."""
        return self.modules.policy

    @property
    def original(self) -> Any:
        """With workers the user's modules; else the user's policy where ``policy`` is a copy."""
        return self.modules.original

    @property
    def version(self) -> int | str:
        """Number of publishes, or the version of ``counter``."""
        return self.versions.newest

    @property
    def publishes(self) -> int:
        """Number of publishes, whatever counts versions."""
        return self.versions.publishes

    def publish(
        self,
        source: Any = None,
        *,
        model: Any = None,
        workers: Collection[int] | None = None,
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
        self,
        sources: Sequence[tuple[Any, Any]],
        *,
        workers: Collection[int] | None = None,
        version: int | None = None,
    ) -> int | str:
        """``publish`` for several (source, model), as one version; all or none.

        Without any it counts a version.

        Args:
            version: of these weights, where a learner elsewhere counts; None: the next one.
        """
        receiving = chosen(workers, self.workers or 1)
        changes = self._changes(sources)
        pairs = changes.pairs
        with self._lock:
            if self._in_rollout:
                pairs = {
                    place: (new.clone(), old) for place, (new, old) in pairs.items()
                }
            self._elsewhere = (self._elsewhere - changes.own) | changes.elsewhere
            published = self.versions.increment(version)
            if pairs or self.workers is not None:
                self._updates.queue(Update(pairs, published, frozenset(receiving)))
            if not self._in_rollout:
                self._updates.apply()
            return published

    @contextmanager
    def acting(self) -> Iterator[int | str]:
        """``hold`` and ``release`` as a context manager, for a rollout."""
        version = self.hold()
        try:
            yield version
        finally:
            self.release()

    def hold(self) -> int | str:
        """Put the newest weights in place, where they stay as they are until ``release``, and the
        policy in the mode in which it acts.

        Returns their version.
        """
        updates = self._updates
        with self._lock:
            if updates.waiting:
                updates.apply()
            self._in_rollout = True
            version = self.versions.newest
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
        self.modules = self.modules.with_copy(policy)
        self._mode = None

    def restore(self, version: int | str) -> None:
        """Set the version after a load into ``policy``, which the user's policy and the workers
        then get too.
        """
        self.versions.restore(version)
        if self.workers is None:
            return
        if self.modules.users is not None:
            self.modules.users.load_state_dict(self.policy.state_dict())
        with self._lock:
            self._elsewhere.clear()
            self._updates.queue(Update({}, version, frozenset(range(self.workers))))
            self._updates.apply()

    def lag(self, version: int | str) -> int:
        """Return the number of publishes since a version; see ``Versions.lag``."""
        return self.versions.lag(version)

    # --- of workers -------------------------------------------------------------------------------

    @property
    def lazy(self) -> bool:
        """Layers of the policy have no weights before its first call; ``materialise`` them before
        anything else.
        """
        return self.modules.lazy

    def materialise(self, state: Weights) -> None:
        """Give lazy layers, here and in the user's policy, the weights that a worker has made.

        Args:
            state: ``named_tensors`` of the worker's policy, after its first call.

        Raises:
            BadWeights: some are missing.
        """
        users = self.modules.users
        assert users is not None
        first: dict[int, str] = {}  # tied weights were sent once
        names = {}
        for name, tensor in self.policy.state_dict(keep_vars=True).items():
            names[name] = first.setdefault(id(tensor), name)
        missing = set(names.values()) - state.keys()
        if missing:
            raise BadWeights(
                f"the worker's policy has no weights named {sorted(missing)}, but the"
                " collector's has"
            )
        full = {name: state[sent] for name, sent in names.items()}
        self.policy.load_state_dict(full)
        users.load_state_dict(full)
        self._open()

    def catch_up(self) -> None:
        """Make visible what is waiting, before workers are given work outside of ``acting()``."""
        with self._lock:
            self._updates.apply()

    def ticket(self, worker: int) -> Ticket:
        """How a (new) worker subscribes to what was published last for it; its ``take`` wants
        ``named_tensors``.
        """
        with self._lock:
            return self._updates.ticket(worker)

    def close(self) -> None:
        """Release what the transport holds; may be called again."""
        self._updates.close()

    # --- steps of a publish -----------------------------------------------------------------------

    def _changes(self, sources: Sequence[tuple[Any, Any]]) -> _Changes:
        """Find what is to be copied where, and check everything."""
        modules = self.modules
        changes = _Changes()
        for source, given_model in sources:
            model = given_model
            if model is not None and modules.is_whole(model):
                model = None
            if self.workers is not None:
                self._updates.check_open()
            part = modules.part(source, model)
            if part is None:  # no weights
                continue
            if (
                source is None
                and part.own is part.acting
                and self._own_are_finite(part.acting)
            ):
                continue
            model_id = partial(_model_id, part.path) if modules.has_model_ids else None
            new = taken(source, part.acting, part.own, model_id)
            old = tensors_of(part.acting)
            bounded = {
                name: tensor
                for name, tensor in new.weights.items()
                if not modules.may_be_infinite(old[name])
            }
            check_finite(bounded)
            if part.own is not part.acting or not new.is_own:
                pairs = self._pairs(new, old, model)
                changes.add(pairs, elsewhere=model is not None and not new.is_own)
        changes.separate()
        return changes

    def _own_are_finite(self, module: torch.nn.Module) -> bool:
        """Return whether the user's own tensors, which act, are certainly finite."""
        if self._own is None or self._own.module is not module:
            self._own = OwnWeights(module)
        return self._own.are_finite()

    def _pairs(self, new: NewWeights, old: Weights, model: Any) -> Pairs:
        """Pair the new values of a module with its tensors ``old``."""
        pairs: Pairs = {}
        for name, tensor in new.weights.items():
            place = place_of(old[name])
            if model is None and name not in new.given and place in self._elsewhere:
                continue
            first, _ = pairs.setdefault(place, (tensor, old[name]))
            if (
                first is not tensor
                and not new.is_own
                and not torch.equal(first, tensor)
            ):
                raise BadWeights(
                    f"weight {name} has another name in the policy, too (tied weights), and the two"
                    " have different values. Nothing was changed."
                )
        return pairs

    def _open(self) -> None:
        assert self._transport is not None
        assert self.workers is not None
        self._updates.open(
            self._transport, each_once(self.policy), self.workers, self.version
        )


class _Changes:
    """What a publish changes.

    Attributes:
        pairs: tensors to copy.
        elsewhere: keys of those that were given for a model, from elsewhere.
        own: keys of the others.
    """

    def __init__(self) -> None:
        self.pairs: Pairs = {}
        self.elsewhere: set[Any] = set()
        self.own: set[Any] = set()

    def add(self, pairs: Pairs, *, elsewhere: bool) -> None:
        """Add tensors of one source, which replace earlier ones for the same place."""
        self.pairs |= pairs
        if elsewhere:
            self.elsewhere |= pairs.keys()
            self.own -= pairs.keys()
        else:
            self.own |= pairs.keys()
            self.elsewhere -= pairs.keys()

    def separate(self) -> None:
        """Copy new values that are tensors to be changed: a policy that acts here may get weights
        of another part of it.
        """
        for place, (tensor, old) in self.pairs.items():
            if place_of(tensor) in self.pairs:
                self.pairs[place] = (tensor.clone(), old)


def _model_id(path: str, inner: str) -> str | None:
    """The argument that names a part of the policy, such as ``model_id='policy.module[0]'``; None:
    there is none.
    """
    names = f"{path}.{inner}".removeprefix(".").split(".")
    if not all(name.isdecimal() or name.isidentifier() for name in names):
        return None
    parts = [f"[{name}]" if name.isdecimal() else f".{name}" for name in names]
    model_id = "policy" + "".join(parts)
    return f"model_id={model_id!r}"
