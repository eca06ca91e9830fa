"""The context in which environments and policies run."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from muster.rollout.group import Group
else:
    from muster.utils import lazy_torch as torch


class RolloutContext:
    """Makes the group's generators global, sets torch's threads, and disables gradients.

    Reusable, not reentrant.

    In a thread beside the user's thread, it does not change the process's generators and threads.

    Args:
        own_rng: False: do not change the generators.
        first: disable gradients without inference mode: a module may create tensors in its first
            call and keep them, such as lazy parameters, and tensors created in inference mode
            cannot be trained.
    """

    def __init__(self, group: Group, *, own_rng: bool = True, first: bool = False) -> None:
        self._group = group
        self._own_rng = own_rng
        self._first = first
        # kept, since ``inference_mode()`` and ``no_grad()`` take 5 us
        self._modes: dict[bool, Any] = {}
        self._user: Any = None
        self._grad: Any = None
        self._threads_before: int | None = None

    def __enter__(self) -> None:
        options, background = self._group.options, self._group.in_background()
        try:
            if self._own_rng and options.execution.own_rng and not background:
                self._user = self._group.rng.install()
            # else no environment uses it, and the policy acts in another process
            if "torch" in sys.modules:
                if not background and options.num_threads not in (
                    None,
                    threads := torch.get_num_threads(),
                ):
                    self._threads_before = threads
                    torch.set_num_threads(options.num_threads)
                inference = options.execution.inference_mode and not self._first
                grad = self._modes.get(inference)
                if grad is None:
                    grad = self._modes[inference] = (
                        torch.inference_mode() if inference else torch.no_grad()
                    )
                grad.__enter__()
                self._grad = grad
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self._grad is not None:
            self._grad.__exit__(kind, error, trace)
            self._grad = None
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)
            self._threads_before = None
        if self._user is not None:
            self._group.rng.remove(self._user)
            self._user = None
