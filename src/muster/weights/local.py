"""Publishing weights to a policy in this process: validated as a whole, then copied, then counted."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from muster.errors import BadWeights

Weights = dict[str, torch.Tensor]
Pairs = dict[str, tuple[torch.Tensor, torch.Tensor]]  # new and old
Waiting = dict[int, tuple[torch.Tensor, torch.Tensor]]  # by the old ones' place in memory


class LocalWeights:
    """The weights of a policy that lives here; safe to publish from any thread.

    Args:
        policy: what acts; its weights are replaced in place, between rollouts.
        original: what the user gave, where ``policy`` is a copy of it.

    Attributes:
        version: number of publishes, or what ``counter`` says.
        counter: an object with ``version`` and ``increment_version()`` that counts instead.
    """

    def __init__(self, policy: Any, original: Any = None, counter: Any = None) -> None:
        self.policy, self.original, self.counter = policy, original, counter
        self._count = 0
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
        pairs: Waiting = {}
        for source, model in sources:
            source = self.original if source is None else source
            if source is not None and not self._is_inside(source):
                fitting = _fitting_pairs(named_weights(source), self.policy if model is None else model)
                pairs.update({old.data_ptr(): (new, old) for new, old in fitting.values()})
        with self._lock:
            if self._in_rollout:
                pairs = {place: (new.clone(), old) for place, (new, old) in pairs.items()}
            self._waiting.update(pairs)  # what was published before may wait still
            if not self._in_rollout:
                self._copy_waiting()
            return self._increment()

    def increment(self) -> int | str:
        """Count a version."""
        with self._lock:
            return self._increment()

    @contextmanager
    def acting(self) -> Iterator[int | str]:
        """For the time of a rollout: the newest weights are in place, and stay as they are. Gives their version."""
        with self._lock:
            self._copy_waiting()
            self._in_rollout = True
            version = self.version
        try:
            yield version
        finally:
            with self._lock:
                self._in_rollout = False

    def restore(self, version: int | str) -> None:
        """Set the version, after a load."""
        if self.counter is not None:
            self.counter.version = version
        elif isinstance(version, int):
            self._count = version

    def _copy_waiting(self) -> None:
        with torch.no_grad():
            for new, old in self._waiting.values():
                old.copy_(new)
        self._waiting = {}

    def _increment(self) -> int | str:
        if self.counter is not None:
            self.counter.increment_version()
        else:
            self._count += 1
        return self.version

    def _is_inside(self, source: Any) -> bool:
        """``source`` is (a part of) the policy itself: what the optimizer changed is in place already."""
        holders = [self.policy, *_captured(self.policy)] if callable(self.policy) else []
        modules = [m for h in holders if isinstance(h, torch.nn.Module) for m in h.modules()]
        if not any(source is m for m in modules):
            return False
        _check_finite(named_weights(source))
        return True


def named_weights(source: Any) -> Weights:
    """The tensors of a module, TensorDict or dict, by ``state_dict`` name.

    Raises:
        BadWeights: of anything else.
    """
    if isinstance(source, torch.nn.Module) and not hasattr(source, "flatten_keys"):
        return {name: tensor.detach() for name, tensor in source.state_dict().items() if torch.is_tensor(tensor)}
    if hasattr(source, "flatten_keys"):  # a TensorDict, without importing tensordict to ask
        flat = source.flatten_keys(".")
        return {str(name): tensor.detach() for name, tensor in flat.items() if torch.is_tensor(tensor)}
    if isinstance(source, Mapping) and all(torch.is_tensor(v) for v in source.values()):
        return {str(name): tensor.detach() for name, tensor in source.items()}
    raise BadWeights(
        f"cannot take weights from {type(source).__name__}: expected a module, a TensorDict, or a dict of tensors "
        f"such as module.state_dict()"
    )


def _check_finite(weights: Weights) -> None:
    for name, tensor in weights.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise BadWeights(f"weight {name} is not finite: training has diverged. Nothing was published.")


def _captured(function: Callable[..., Any]) -> list[Any]:
    """Objects that a plain function, method or partial can reach by name."""
    if isinstance(function, torch.nn.Module):
        return []
    if isinstance(function, functools.partial):
        return [function.func, *function.args, *function.keywords.values(), *_captured(function.func)]
    bound = getattr(function, "__self__", None)
    held = [bound, *vars(bound).values()] if hasattr(bound, "__dict__") else []
    plain = inspect.unwrap(getattr(function, "__func__", function))
    if not inspect.isfunction(plain):
        return [*held, *vars(function).values()] if hasattr(function, "__dict__") else held
    known = inspect.getclosurevars(plain)
    return [*held, *known.nonlocals.values(), *known.globals.values()]


def _fitting_pairs(new: Weights, policy: Any) -> Pairs:
    """Pairs (new, old) by name, for the part of the policy that has these names and shapes."""
    if not isinstance(policy, torch.nn.Module):
        raise BadWeights(
            f"the policy {policy!r} is not a module, so Muster cannot reach its weights. Change them where "
            f"the policy finds them, and call update_policy_weights_() without arguments to count a version."
        )
    parts = {name: dict(m.state_dict(keep_vars=True)) for name, m in policy.named_modules()}
    named = {name: part for name, part in parts.items() if part.keys() == new.keys() and (part or not name)}
    if not named:
        missing, extra = sorted(parts[""].keys() - new.keys()), sorted(new.keys() - parts[""].keys())
        raise BadWeights(
            f"weights do not fit the policy: missing {missing or 'nothing'}, unknown {extra or 'nothing'}; "
            f"expected {sorted(parts[''])}. Nothing was changed."
        )
    fitting = {name: part for name, part in named.items() if all(new[n].shape == part[n].shape for n in new)}
    if len(fitting) > 1:
        raise BadWeights(
            f"weights named {sorted(new)} fit several parts of the policy: {', '.join(fitting)}. Give those of "
            f"the whole policy. Nothing was changed."
        )
    old = next(iter((fitting or named).values()))
    for name, tensor in new.items():
        if tensor.shape != old[name].shape or tensor.dtype != old[name].dtype:
            raise BadWeights(
                f"weight {name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}, expected "
                f"{tuple(old[name].shape)} and {old[name].dtype}. Nothing was changed."
            )
    _check_finite(new)
    return {name: (tensor, old[name].detach()) for name, tensor in new.items()}
