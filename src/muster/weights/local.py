"""Publishing weights to a policy in this process: validated as a whole, then copied, then counted."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from muster.errors import BadWeights
from muster.utils.attributes import name_of
from muster.weights.names import Weights, check_finite, copy_tensor, modules_of, named_weights

Pairs = dict[str, tuple[torch.Tensor, torch.Tensor]]  # new and old
REMEMBERED = 10_000  # versions whose age is known
Waiting = dict[int, tuple[torch.Tensor, torch.Tensor]]  # by the old ones' place in memory


class LocalWeights:
    """The weights of a policy that lives here; safe to publish from any thread.

    Args:
        policy: what acts; its weights are replaced in place, between rollouts.
        original: what the user gave, where ``policy`` is a copy of it.

    Attributes:
        version: number of publishes, or what ``counter`` says.
        counter: an object with ``version`` and ``increment_version()`` that counts instead.
        publishes: their number here, whoever counts versions.
    """

    def __init__(self, policy: Any, original: Any = None, counter: Any = None) -> None:
        self.policy, self.original, self.counter = policy, original, counter
        self._count = self.publishes = 0
        self._born: dict[int | str, int] = {}  # publishes before each of the last versions
        self._lock = threading.Lock()
        self._in_rollout = False
        self._waiting: Waiting = {}  # published while a rollout was going on

    @property
    def version(self) -> int | str:
        return self._count if self.counter is None else self.counter.version

    def publish(self, source: Any = None, *, model: Any = None) -> int | str:
        """Take over the weights of ``source``; all or nothing.

        Args:
            source: a module (the policy, the network inside it, or a copy of either), a TensorDict, a dict of
                tensors by ``state_dict`` name, or None for the module the collector was made with.
            model: the part of the policy that they are for.

        Returns:
            the new version.

        Raises:
            BadWeights: keys, shapes or dtypes that do not fit, or values that are not finite.
        """
        return self.publish_all([(source, model)])

    def publish_all(self, sources: Sequence[tuple[Any, Any]]) -> int | str:
        """``publish`` for several (source, model), as one version; all of them or none."""
        return self._publish(self._pairs(sources))

    def increment(self) -> int | str:
        """Count a version."""
        return self._publish({})

    @contextmanager
    def acting(self) -> Iterator[int | str]:
        """For the time of a rollout: ``hold``, and ``release``."""
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
        """Set the version, after a load into ``policy``."""
        if self.counter is not None:
            self.counter.version = version
        elif isinstance(version, int):
            self._count = version

    def lag(self, version: int | str) -> int:
        """Publishes since a version; one that is not known (from before a load) is taken to be the newest."""
        return self.publishes - self._born.get(version, self.publishes)

    # --- steps of a publish -----------------------------------------------------------------------

    def _pairs(self, sources: Sequence[tuple[Any, Any]]) -> Waiting:
        """What is to be copied where; everything has been checked."""
        pairs: Waiting = {}
        for source, model in sources:
            source = self.original if source is None else source
            if source is not None and not self._is_inside(source):
                fitting = _fitting_pairs(named_weights(source), self._target(source, model))
                pairs.update({old.data_ptr(): (new, old) for new, old in fitting.values()})
        return pairs

    def _publish(self, pairs: Waiting, workers: Collection[int] | None = None) -> int | str:
        with self._lock:
            if self._in_rollout:
                pairs = {place: (new.clone(), old) for place, (new, old) in pairs.items()}
            version = self._increment()
            self._wait(pairs, version, workers)
            if not self._in_rollout:
                self._apply()
            return version

    def _wait(self, pairs: Waiting, version: int | str, workers: Collection[int] | None) -> None:
        """Remember what was published; what was published before may be waiting still."""
        self._waiting.update(pairs)

    def _apply(self) -> None:
        """Make visible what is waiting."""
        if self._waiting:
            copy_pairs(self._waiting)
            self._waiting = {}

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

    def _is_inside(self, source: Any) -> bool:
        """``source`` is (a part of) the policy itself: what the optimizer changed is in place already."""
        if not any(source is module for held in modules_of(self.policy) for module in held.modules()):
            return False
        check_finite(named_weights(source))
        return True

    def _target(self, source: Any, model: Any) -> Any:
        """The part of ``policy`` that is meant: where ``model``, or else ``source``, has its place in ``original``."""
        meant = source if model is None else model
        if isinstance(self.original, torch.nn.Module) and isinstance(meant, torch.nn.Module):
            for path, module in self.original.named_modules():
                if module is meant:
                    return self.policy.get_submodule(path)
        return self.policy if model is None else model


def copy_pairs(pairs: Waiting) -> None:
    """Copy each new tensor over its old one."""
    for new, old in pairs.values():
        copy_tensor(old, new)


def _fitting_pairs(new: Weights, policy: Any) -> Pairs:
    """Pairs (new, old) by name, for the part of the policy that has these names and shapes."""
    if not isinstance(policy, torch.nn.Module):
        raise BadWeights(
            f"the policy ({name_of(policy)}) is not a module, so Muster cannot reach its weights. Change them where "
            f"the policy finds them, and call update_policy_weights_() without arguments to count a version."
        )
    old = _fitting_part(new, policy)
    check_values(new, old)
    return {name: (tensor, old[name].detach()) for name, tensor in new.items()}


def check_values(new: Weights, old: Weights) -> None:
    """Raise BadWeights unless ``new`` has the shapes and dtypes of ``old``, and is finite."""
    for name, tensor in new.items():
        if tensor.shape != old[name].shape or tensor.dtype != old[name].dtype:
            raise BadWeights(
                f"weight {name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}, expected "
                f"{tuple(old[name].shape)} and {old[name].dtype}. Nothing was changed."
            )
    check_finite(new)


def _fitting_part(new: Weights, policy: torch.nn.Module) -> Weights:
    whole = _tensors(policy)
    if whole.keys() == new.keys():  # then no part has these names too
        return whole
    parts = {name: _tensors(module) for name, module in policy.named_modules()}
    named = {name: part for name, part in parts.items() if part.keys() == new.keys() and part}
    if not named:
        check_names(new, whole)
    fitting = {name: part for name, part in named.items() if all(new[n].shape == part[n].shape for n in new)}
    if len(fitting) > 1:
        raise BadWeights(
            f"weights named {sorted(new)} fit several parts of the policy: {', '.join(fitting)}. Give those of "
            f"the whole policy. Nothing was changed."
        )
    return next(iter((fitting or named).values()))


def check_names(new: Weights, old: Weights) -> None:
    """Raise BadWeights unless ``new`` has the names of ``old``."""
    missing, extra = sorted(old.keys() - new.keys()), sorted(new.keys() - old.keys())
    if missing or extra:
        raise BadWeights(
            f"weights do not fit the policy: missing {missing or 'nothing'}, unknown {extra or 'nothing'}; "
            f"expected {sorted(old)}. Nothing was changed."
        )


def _tensors(module: torch.nn.Module) -> Weights:
    return {name: tensor for name, tensor in module.state_dict(keep_vars=True).items() if torch.is_tensor(tensor)}
