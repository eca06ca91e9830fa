"""Policies for TorchRL's environments."""

from __future__ import annotations

from typing import Any

import torch
from tensordict.nn import TensorDictModuleBase
from torch import nn


class Constant(TensorDictModuleBase):
    """Its actions have no last dimension, and are floats; those of TorchRL's ``CountingEnv`` are
    ``[1]`` and int8.
    """

    in_keys: list[Any] = []  # noqa: RUF012
    out_keys = ["action"]  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.0))

    def forward(self, td: Any) -> Any:
        return td.set("action", self.weight.expand(td.shape).clone())
