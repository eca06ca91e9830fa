"""Operations of torch as they are called, and those among them that would wait for a device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# the host must see their result: a number, a bool, how many entries are true
WAITS = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "unique",
    "unique2",
    "multinomial",
    "is_nonzero",
    "equal",
}

# operations that launch nothing: views, and memory
NO_LAUNCH = {
    "alias",
    "as_strided",
    "detach",
    "empty",
    "empty_like",
    "empty_strided",
    "expand",
    "lift_fresh",
    "new_empty",
    "permute",
    "reshape",
    "select",
    "slice",
    "split",
    "split_with_sizes",
    "squeeze",
    "t",
    "transpose",
    "unbind",
    "unsqueeze",
    "view",
    "_unsafe_view",
    "_reshape_alias",
}


class Waits(TorchDispatchMode):
    """Counts what would make the host wait for a device.

    Args:
        on_host: arrays in host memory: copies into them wait as well.

    Attributes:
        found: number of waits, by name of the operation.
        operations: names of all operations, in order.
    """

    def __init__(self, on_host: Iterable[Any] = ()) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.operations: list[str] = []
        self._on_host = {array.ctypes.data for array in on_host}

    @property
    def launches(self) -> Counter[str]:
        """Number of operations that a device has to execute, by name."""
        return Counter(name for name in self.operations if name not in NO_LAUNCH)

    @property
    def calls(self) -> int:
        return len(self.operations)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8)
            for index in args[1]
        )
        to_host = name == "copy_" and args[0].data_ptr() in self._on_host
        if name in WAITS or by_mask or to_host:
            self.found[name] += 1
        result = func(*args, **(kwargs or {}))
        if name in ("to", "contiguous") and result.data_ptr() == args[0].data_ptr():
            name = "alias"
        self.operations.append(name)
        return result
