"""What environments and policies run in."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from muster.rng import GroupRng
from muster.rollout.columns import RolloutOptions

if TYPE_CHECKING:
    import torch
else:
    from muster.utils import lazy_torch as torch


_IDLE: dict[bool, list[Any]] = {True: [], False: []}  # ``inference_mode`` and ``no_grad``, which take 5 us to make


class RolloutContext:
    """The group's generators as global ones, torch's threads, no gradients; to be entered once.

    Args:
        background: this thread runs beside the user's, and leaves generators and threads of the process alone.
        first: not in inference mode: a module may make things in its first call that it keeps, such as lazy
            parameters, and what is made in inference mode cannot be trained.
    """

    def __init__(self, rng: GroupRng, options: RolloutOptions, *, background: bool, first: bool) -> None:
        self._rng = rng if options.own_rng and not background else None
        self._threads = None if background else options.num_threads
        self._inference = options.inference_mode and not first
        self._user: Any = None
        self._grad: Any = None
        self._threads_before: int | None = None

    def __enter__(self) -> None:
        try:
            if self._rng is not None:
                self._user = self._rng.install()
            if "torch" in sys.modules:  # else environments do without, and the policy acts elsewhere
                threads = torch.get_num_threads()
                if self._threads is not None and self._threads != threads:
                    self._threads_before = threads
                    torch.set_num_threads(self._threads)
                idle = _IDLE[self._inference]
                grad: Any = idle.pop() if idle else torch.inference_mode() if self._inference else torch.no_grad()
                grad.__enter__()
                self._grad = grad
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self._grad is not None:
            self._grad.__exit__(kind, error, trace)
            _IDLE[self._inference].append(self._grad)
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)
        if self._rng is not None and self._user is not None:
            self._rng.remove(self._user)
