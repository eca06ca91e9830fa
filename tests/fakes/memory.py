"""A machine that runs out of memory once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from tensordict import TensorDict


@contextmanager
def out_of_memory(at: int) -> Iterator[list[int]]:
    """The ``at``-th time that rows of a TensorDict are indexed or joined, from 1 on, there is no
    memory for it.

    Yields:
        a list with as many entries as there were times.
    """
    times: list[int] = []

    def names(index: Any) -> bool:
        return isinstance(index, str) or (
            isinstance(index, tuple) and bool(index) and isinstance(index[0], str)
        )

    def short(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if names(args[-1]):
                return function(*args, **kwargs)
            times.append(1)
            if len(times) == at:
                raise MemoryError("there is none left")
            return function(*args, **kwargs)

        return call

    with (
        mock.patch.object(torch, "cat", short(torch.cat)),
        mock.patch.object(
            np, "unravel_index", short(np.unravel_index)
        ),  # what an index of rows begins with
        mock.patch.object(TensorDict, "__getitem__", short(TensorDict.__getitem__)),
    ):
        yield times
