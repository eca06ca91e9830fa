"""Batches of TorchRL's own collector beside Muster's, from equal environments and policies."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import is_non_tensor
from torchrl.collectors import Collector as TorchRLCollector

from muster import Collector

IDS = ("collector", "traj_ids")


class Scripted(TensorDictModuleBase):
    """Random actions that depend on nothing but the number of the call; so does what the
    environment draws next.
    """

    in_keys: list[Any] = []  # noqa: RUF012

    def __init__(self, spec: Any) -> None:
        super().__init__()
        self.spec, self.calls = spec, 0
        self.out_keys = list(spec.keys(True, True))

    def forward(self, td: Any) -> Any:
        torch.manual_seed(self.calls)
        random.seed(self.calls)
        self.calls += 1
        return td.update(self.spec.rand())


def both(
    make: Callable[[], Any],
    make_policy: Callable[[Any], Any] | None = None,
    *,
    T: int = 7,
    batches: int = 4,
    seed: int | None = None,
    **options: Any,
) -> tuple[list[Any], list[Any]]:
    """The first batches of Muster's and TorchRL's collector.

    Args:
        make_policy: from an environment; None is ``Scripted``.
        seed: of both; TorchRL's environments are reset after it, as Muster's are.
    """
    results = []
    for cls in (Collector, TorchRLCollector):
        env = make()
        policy = (
            Scripted(env.full_action_spec) if make_policy is None else make_policy(env)
        )
        frames = T * max(1, env.batch_size.numel())
        extra = {} if cls is Collector else {"total_frames": -1}
        collector = cls(env, policy, frames_per_batch=frames, **extra, **options)  # type: ignore[operator]
        if seed is not None:
            collector.set_seed(seed)
            if cls is TorchRLCollector:
                collector.reset()
        if isinstance(policy, Scripted):
            policy.calls = 0
        torch.manual_seed(0)
        results.append(
            [batch.clone() for batch, _ in zip(collector, range(batches), strict=False)]
        )
        collector.shutdown()
    return results[0], results[1]


def assert_equal(mine: Any, theirs: Any, path: tuple[str, ...] = ()) -> None:
    """The same keys, shapes, dtypes, values and batch sizes; trajectory ids aside."""
    if is_non_tensor(theirs) or (
        not isinstance(theirs, (TensorDictBase, torch.Tensor))
        and not hasattr(theirs, "keys")
    ):
        assert _plain(mine) == _plain(theirs), path
    elif torch.is_tensor(theirs):
        assert torch.is_tensor(mine), path
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype), path
        assert torch.equal(torch.nan_to_num(mine), torch.nan_to_num(theirs)), (
            path,
            mine,
            theirs,
        )
    else:
        assert mine.batch_size == theirs.batch_size, path
        if any(isinstance(td, LazyStackedTensorDict) for td in (mine, theirs)):
            for i, (a, b) in enumerate(
                zip(mine.unbind(0), theirs.unbind(0), strict=True)
            ):
                assert_equal(a, b, (*path, str(i)))
            return
        assert set(mine.keys()) == set(theirs.keys()), path
        for key in theirs.keys():  # noqa: SIM118
            if (*path, key)[-2:] != IDS:
                assert_equal(mine.get(key), theirs.get(key), (*path, key))


def assert_same_batches(*args: Any, skip: int = 0, **options: Any) -> list[Any]:
    """Both collectors give the same batches (but for the first ``skip``); returns Muster's."""
    mine, theirs = both(*args, **options)
    for a, b in zip(mine[skip:], theirs[skip:], strict=True):
        assert a.names == b.names
        assert_equal(a, b)
    ids = [torch.cat([b[IDS] for b in batches], -1) for batches in (mine, theirs)]
    assert ids[0].dtype == ids[1].dtype
    return mine


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value
