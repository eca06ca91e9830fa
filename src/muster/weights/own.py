"""The weights of a policy that acts in this process with the user's own tensors: nothing is copied to
publish them, and only their values are looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from itertools import chain
from operator import itemgetter
from typing import Any

import torch

from muster.memory.specs import Array
from muster.policies.modes import all_modules
from muster.utils.private_names import usable
from muster.weights.coverage import tensors_of
from muster.weights.names import is_array, is_finite

_MODULES = itemgetter("_modules")
_PARAMETERS = itemgetter("_parameters")
_BUFFERS = itemgetter("_buffers")
PLAIN = (torch.Tensor, torch.nn.Parameter)
DOT = 8_192  # values of a scalar product; from 10,000 on, OpenBLAS starts threads


class OwnWeights:
    """Knows the tensors of a module, and finds them again if one of its modules or tensors was
    replaced.

    ``are_finite`` is for the usual case, and quick: True is certain. After False, each tensor has to
    be looked at by itself.

    Attributes:
        module: the module.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self._attributes: list[dict[str, Any]] = []
        self._held: list[
            Any
        ] = []  # the modules and tensors in it; they are kept, so are their ids
        self._ids: list[int] = []
        # methods of the tensors that are arrays: where their values are, and how many
        self._asked: list[Callable[[], int]] = []
        self._answers: list[int] = []
        self._arrays: list[Array] = []  # the values, up to ``DOT`` in each
        self._others: list[torch.Tensor] = []
        self._can_tell = _tensors_are_known()
        if self._can_tell:
            self._look()

    def are_finite(self) -> bool:
        """Return whether all values are certainly finite."""
        if not self._can_tell:
            return False
        are_the_same = list(map(id, self._held_now())) == self._ids
        if not are_the_same or [ask() for ask in self._asked] != self._answers:
            self._look()
            if not self._can_tell:
                return False
        # a sum of squares with one infinite or NaN term is one too
        squares = [array.dot(array) for array in self._arrays]
        return all(map(math.isfinite, squares)) and all(map(is_finite, self._others))

    def _held_now(self) -> chain[Any]:
        every = self._attributes
        kinds = chain(
            map(_MODULES, every), map(_PARAMETERS, every), map(_BUFFERS, every)
        )
        return chain.from_iterable(map(dict.values, kinds))

    def _look(self) -> None:
        self._attributes = [module.__dict__ for module in all_modules([self.module])]
        self._held = list(self._held_now())
        self._ids = list(map(id, self._held))
        weights = [*tensors_of(self.module).values()]
        inside = set(self._ids)
        # else a hook makes them for each ``state_dict``, or they have to be looked at with care
        self._can_tell = all(id(tensor) in inside for tensor in weights) and all(
            type(tensor) in PLAIN
            and tensor.device.type == "cpu"
            and not tensor.is_complex()
            for tensor in weights
        )
        if not self._can_tell:
            return
        floats = [tensor for tensor in weights if tensor.is_floating_point()]
        as_arrays = [tensor for tensor in floats if is_array(tensor)]
        self._others = [tensor for tensor in floats if not is_array(tensor)]
        self._asked = []
        self._arrays = []
        for tensor in as_arrays:
            self._asked += [tensor.data_ptr, tensor.numel]
            values = tensor.detach().view(-1).numpy()
            for start in range(0, len(values), DOT):
                self._arrays.append(values[start : start + DOT])
        self._answers = [ask() for ask in self._asked]


@cache
def _tensors_are_known() -> bool:
    """Whether this version of torch has the private names used here."""
    return usable("torch", (torch.nn.Module(), ("_modules", "_parameters", "_buffers")))
