"""Rows on a device, on a machine without one: the CPU is taken for the device.

Every path that rows on a GPU take is taken: slots of tensors, with arrays in host memory beside
them, heads that sample with torch's noise, and no synchronisation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from muster.envs.torch_batch import TorchEnvs
from muster.protocols import EnvBatch


def on_device(make: Callable[[], Any]) -> Callable[[], EnvBatch]:
    """Return a factory of ``make()``'s environments, whose rows are "on a device".

    Pass it to a collector as ``create_env_fn``.
    """
    return partial(_on_device, make)


def _on_device(make: Callable[[], Any]) -> EnvBatch:
    envs: EnvBatch = TorchEnvs(make())
    envs.store_as(replace(envs.spec, device=torch.device("cpu")))
    return envs


def torchrl_on_device(make: Callable[[], Any]) -> Callable[[], EnvBatch]:
    """The same for one of TorchRL's environments."""
    return partial(_torchrl_on_device, make)


def _torchrl_on_device(make: Callable[[], Any]) -> EnvBatch:
    from muster.envs.torchrl import TorchRLOnDevice, can_have_rows_there

    env = make()
    assert can_have_rows_there(env)
    return TorchRLOnDevice(env, torch.device("cpu"))
