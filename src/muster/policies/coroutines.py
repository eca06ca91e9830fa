"""Policies that are coroutine functions: ``async def policy(obs)``, for instance a request to an inference server."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from muster.utils.attributes import name_of
from muster.utils.event_loop import CoroutineCall, CoroutineRunner, is_coroutine_function


def takes(policy: Any) -> bool:
    """Return whether a call of ``policy`` returns a coroutine."""
    return is_coroutine_function(_function(policy))


class AwaitedPolicy:
    """A function that calls a coroutine function and waits for its result. It has the same name and signature.

    Args:
        policy: coroutine function, or module whose ``forward`` is one.
        timeouts: deadlines in seconds by phase, of which "policy" applies to each call.

    Attributes:
        coroutines: runs the coroutines.
    """

    def __init__(self, policy: Any, timeouts: Mapping[str, float | None]) -> None:
        self.__name__, self.__wrapped__ = name_of(policy), _function(policy)
        self._policy, self.coroutines = policy, CoroutineRunner()
        self.coroutines.timeouts = timeouts

    def __call__(self, *args: Any) -> Any:
        call = CoroutineCall(partial(self._policy, *args))
        self.coroutines.run([call], "policy")
        return call.result()


def _function(policy: Any) -> Any:
    return policy.forward if isinstance(policy, torch.nn.Module) else policy
