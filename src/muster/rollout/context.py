"""The context in which environments and policies run."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from muster.rng import GroupRng
from muster.rollout.options import RolloutOptions

if TYPE_CHECKING:
    import torch
else:
    from muster.utils import lazy_torch as torch


class _Thread(threading.local):
    """How rollouts in a thread run.

    Attributes:
        is_beside_user: it runs beside the user's thread.
        shares: they do not change the process's generators and threads.
    """

    is_beside_user = False
    shares = False

    def run_beside_user(self) -> None:
        self.is_beside_user = True
        self.shares = True

    @contextmanager
    def sharing(self) -> Iterator[None]:
        before = self.shares
        self.shares = True
        try:
            yield
        finally:
            self.shares = before


_thread = _Thread()


def run_beside_user() -> None:
    """Say that the calling thread runs beside the user's thread from now on.

    Rollouts in it do not change the process's generators and threads, which the user may be using.
    """
    _thread.run_beside_user()


def as_beside_user() -> AbstractContextManager[None]:
    """Return a context in which rollouts in the user's thread are as those beside it."""
    return _thread.sharing()


def runs_beside_user() -> bool:
    """Return whether the calling thread runs beside the user's thread."""
    return _thread.is_beside_user


class RolloutContext:
    """Makes a group's generators global, sets torch's threads, and disables gradients.

    Reusable, not reentrant. In a thread beside the user's thread (``run_beside_user``), it does not
    change the process's generators and threads.

    Args:
        own_rng: False: do not change the generators.
        inference: disable gradients with torch's inference mode, not only with ``no_grad``. Not for
            a policy's first call: a module may create tensors in it and keep them, such as lazy
            parameters, and tensors created in inference mode cannot be trained.
    """

    def __init__(
        self,
        rng: GroupRng,
        options: RolloutOptions,
        *,
        own_rng: bool = True,
        inference: bool,
    ) -> None:
        self._rng = rng
        self._own_rng = own_rng and options.execution.own_rng
        self._num_threads = options.num_threads
        self._inference = inference
        # kept, since ``inference_mode()`` and ``no_grad()`` take 5 us
        self._mode: Any = None
        self._is_in_mode = False
        self._user: Any = None
        self._threads_before: int | None = None

    def __enter__(self) -> None:
        shares = _thread.shares
        try:
            if self._own_rng and not shares:
                self._user = self._rng.install()
            # else no environment uses it, and the policy acts in another process
            mode = self._mode
            if mode is not None or "torch" in sys.modules:
                if not shares and self._num_threads is not None:
                    threads = torch.get_num_threads()
                    if threads != self._num_threads:
                        self._threads_before = threads
                        torch.set_num_threads(self._num_threads)
                if mode is None:
                    mode = (
                        torch.inference_mode() if self._inference else torch.no_grad()
                    )
                    self._mode = mode
                mode.__enter__()
                self._is_in_mode = True
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self._is_in_mode:
            self._is_in_mode = False
            self._mode.__exit__(kind, error, trace)
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)
            self._threads_before = None
        if self._user is not None:
            self._rng.remove(self._user)
            self._user = None


class Contexts:
    """The contexts of one group, made once.

    Attributes:
        rng: random streams of the group.
        usual: the context of rollouts.
        without_inference: that of a policy's first call, and of rollouts with gradients enabled.
    """

    def __init__(self, rng: GroupRng, options: RolloutOptions) -> None:
        self.rng = rng
        self.usual = RolloutContext(
            rng, options, inference=options.execution.inference_mode
        )
        self.without_inference = RolloutContext(rng, options, inference=False)
