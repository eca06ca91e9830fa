"""Calls a user's module or function with gradients enabled, inside a loop without gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch

from muster.protocols import Policy


@contextmanager
def gradients_enabled(policy: Policy) -> Iterator[None]:
    """Call the user's policy with gradients enabled, and detach its outputs, until the context
    exits.

    Do not use this in inference mode. The executor is not used for modules with the hooks that this
    registers.
    """
    policy = getattr(policy, "inner", policy)
    with ExitStack() as undo:
        if hasattr(policy, "head"):
            _enable(policy.head, "net", undo)
        for name in ("fn", "module"):  # of FunctionPolicy and TensorDictPolicy
            if hasattr(policy, name):
                _enable(policy, name, undo)
        yield


def _enable(policy: Any, name: str, undo: ExitStack) -> None:
    given = getattr(policy, name)
    if isinstance(given, torch.nn.Module):
        _hook(given, undo)
        return

    @wraps(given)
    def called(*args: Any) -> Any:
        with torch.enable_grad():
            return _detached(given(*args))

    setattr(policy, name, called)
    undo.callback(setattr, policy, name, given)


def _hook(module: torch.nn.Module, undo: ExitStack) -> None:
    def before(*_: Any) -> None:
        torch.set_grad_enabled(True)

    def after(module: torch.nn.Module, args: Any, out: Any) -> Any:
        torch.set_grad_enabled(False)
        return _detached(out)

    undo.callback(module.register_forward_pre_hook(before).remove)
    undo.callback(module.register_forward_hook(after, always_call=True).remove)


def _detached(out: Any) -> Any:
    from tensordict import is_tensor_collection

    if torch.is_tensor(out):
        return out.detach()
    if is_tensor_collection(out):
        return out.detach_()
    if isinstance(out, dict):
        return {key: _detached(value) for key, value in out.items()}
    if isinstance(out, tuple) and hasattr(out, "_fields"):
        return type(out)(*map(_detached, out))
    if isinstance(out, (tuple, list)):
        return type(out)(map(_detached, out))
    return out
