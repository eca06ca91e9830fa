"""Attributes of environments as plain data, restored without a pickle.

Plain data are numbers, text, bytes, arrays, tensors, generators of NumPy and torch, and tuples,
lists, dicts and deques of these. An object that occurs twice is restored as one object. Spaces,
types, devices and enum members are facts of the construction: the live object keeps its own, which
must be equal to the saved one; only the random state of a space is restored.
"""

from __future__ import annotations

import sys
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium.spaces import Discrete, Space

from muster.restore.action_log import GENERATORS, generator_of

if TYPE_CHECKING:
    import torch
else:
    from muster.utils import lazy_torch as torch

SCALARS = (type(None), bool, int, float, str, bytes)
# types of objects whose memory belongs to one array
OWNERS = ("ndarray", "PyCapsule", "memoryview")


def _owner_of(array: Any) -> tuple[int, str]:
    """Return the id of what owns the memory of an array, and its type's name. Nothing may refer to it
    afterwards: references to a ``bytearray`` are counted when arrays are pickled.
    """
    owner = array
    while type(owner) is np.ndarray and owner.base is not None:
        owner = owner.base
    kind = type(owner).__name__
    while isinstance(owner, memoryview):  # others may show the same memory
        owner = owner.obj
    return id(owner), kind


def _space_generator() -> str | None:
    """The attribute in which Gymnasium's spaces store their generator; None if it is not found."""
    drawn: Space[Any] = Discrete(2, seed=0)
    generator = drawn.np_random
    found = [name for name, value in vars(drawn).items() if value is generator]
    if len(found) != 1:
        return None
    return found[0]


SPACE_GENERATOR = _space_generator()


class NotPlain(Exception):
    """The value is not plain data; only a pickle can contain it."""


class Mismatch(Exception):
    """The live object was not built like the saved one.

    The message ends a sentence: "X is ..., and was ...".
    """


class Encoder:
    """Encodes values as plain data that share no memory with them.

    Args:
        layers: numbers of environments by ``id``.
        compares: the result is only compared with another one, so it does not matter what shares
            memory.
    """

    def __init__(self, layers: Mapping[int, int], *, compares: bool = False) -> None:
        self._layers = layers
        self._compares = compares
        self._seen: dict[int, int] = {}
        self._alive: list[
            Any
        ] = []  # keeps the objects alive, so that their ids stay unique
        self._owners: dict[int, Any] = {}  # owners of arrays' memory, by id

    def encode(self, value: Any, *, attribute: bool = True) -> Any:
        """Encode ``value`` for ``Decoder.decode``.

        Raises ``NotPlain``. An ``attribute`` has a live counterpart.
        """
        kind = type(value)
        if kind in SCALARS:
            return value
        if id(value) in self._layers:
            return ["layer", self._layers[id(value)]]
        if id(value) in self._seen:
            return ["same", self._seen[id(value)]]
        if kind is tuple:
            return ["tuple", [self._item(item) for item in value]]
        if isinstance(value, np.generic) and value.dtype.kind in "biufc":
            return ["scalar", np.array(value)]
        if attribute and isinstance(value, Space) and SPACE_GENERATOR is not None:
            generators = []
            for space in _tree(value):
                generator = vars(space).get(SPACE_GENERATOR)
                generators.append(self._item(generator))
            return ["space", _facts(value), generators]
        # else no object is one
        of_torch = (torch.device, torch.dtype) if "torch" in sys.modules else ()
        if attribute and isinstance(value, (type, Enum, np.dtype, *of_torch)):
            return ["fact", _facts(value)]
        self._seen[id(value)] = len(self._alive)
        self._alive.append(value)
        if kind is list:
            return ["list", [self._item(item) for item in value]]
        if kind is dict:
            entries = []
            for key, item in value.items():
                entries.append([self._item(key), self._item(item)])
            return ["dict", entries]
        if kind is deque:
            return ["deque", value.maxlen, [self._item(item) for item in value]]
        if kind is np.ndarray:
            name = "array" if value.flags.writeable else "read-only array"
            return [name, self._copy(value)]
        if kind is np.random.Generator:
            bits = value.bit_generator
            name = type(bits).__name__
            seeds = getattr(bits, "seed_seq", None)  # the state of ``spawn``
            if name in GENERATORS and type(seeds) is np.random.SeedSequence:
                return ["generator", name, bits.state, seeds.state]
        if of_torch and kind is torch.Generator:
            state = value.get_state().numpy().copy()
            return ["torch generator", str(value.device), state]
        if of_torch and kind is torch.Tensor:
            return ["tensor", str(value.device), self._copy_of_tensor(value)]
        raise NotPlain

    def _item(self, value: Any) -> Any:
        return self.encode(value, attribute=False)

    def _copy(self, array: Any) -> Any:
        """Copy a contiguous array of numbers.

        Raises ``NotPlain`` for others, and for memory of one copied before.
        """
        place, kind = _owner_of(array)
        if array.dtype.kind not in "biufc" or not array.dtype.isnative:
            raise NotPlain
        if not array.flags.c_contiguous:
            raise NotPlain
        copied_before = place in self._owners
        own = kind in OWNERS and not copied_before
        comparable = self._compares and (kind == "Tensor" or copied_before)
        if not own and not comparable:
            raise NotPlain
        self._owners[place] = array  # which keeps the owner alive
        return array.copy()

    def _copy_of_tensor(self, tensor: torch.Tensor) -> Any:
        """Copy a contiguous tensor of numbers.

        Raises ``NotPlain`` for others, and for memory that something shares.
        """
        strided = tensor.layout is torch.strided and tensor.is_contiguous()
        if not strided or tensor.device.type not in ("cpu", "cuda"):
            raise NotPlain
        if tensor.requires_grad or tensor.is_conj() or tensor.is_neg():
            raise NotPlain
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        # not resizable: the memory of an array
        copied_before = bool(place) and place in self._owners
        own = storage.resizable() and not copied_before
        if not own and not self._compares:
            raise NotPlain
        self._owners[place] = tensor
        try:
            # of a clone: ``numpy`` makes memory not resizable
            return tensor.clone().cpu().numpy().copy()
        except TypeError as error:  # NumPy has no such dtype
            raise NotPlain from error


class Decoder:
    """Decodes the results of one ``Encoder``, in the same order; ``layers``: the live environments."""

    def __init__(self, layers: list[Any]) -> None:
        self._layers = layers
        self._made: list[Any] = []

    def decode(self, encoded: Any, live: Any = None) -> Any:
        """Return the value of ``encoded``; ``live`` is the present value of the attribute.

        Raises ``Mismatch``.
        """
        made: Any
        match encoded:
            case ["layer", number]:
                return self._layers[number]
            case ["same", number]:
                return self._made[number]
            case ["tuple", items]:
                return tuple(self.decode(item) for item in items)
            case ["list", items]:
                made = self._keep([])
                made.extend(self.decode(item) for item in items)
                return made
            case ["dict", items]:
                made = self._keep({})
                for key, value in items:
                    decoded_key = self.decode(key)
                    made[decoded_key] = self.decode(value)
                return made
            case ["deque", maxlen, items]:
                made = self._keep(deque(maxlen=maxlen))
                made.extend(self.decode(item) for item in items)
                return made
            case ["scalar", array]:
                return array[()]
            case ["array", array]:
                return self._keep(array.copy())
            case ["read-only array", array]:
                made = self._keep(array.copy())
                made.setflags(write=False)
                return made
            case ["tensor", device, array]:
                tensor = torch.from_numpy(array).clone()
                return self._keep(tensor.to(device))
            case ["torch generator", device, state]:
                made = self._keep(torch.Generator(device))
                made.set_state(torch.from_numpy(state.copy()))
                return made
            case ["generator", _, state, seeds]:
                return self._keep(generator_of(state, seeds))
            case ["fact", facts]:
                return _of_facts(live, facts)
            case ["space", facts, generators]:
                spaces = _tree(_of_facts(live, facts))
                for space, generator in zip(spaces, generators, strict=True):
                    # not None, as when it was saved
                    setattr(space, str(SPACE_GENERATOR), self.decode(generator))
                return live
            case [kind, *_]:
                raise Mismatch(
                    f"is saved as {kind!r}, which this version of Muster does not know"
                )
        return encoded

    def _keep(self, made: Any) -> Any:
        """Number an object, which later values may name as the same."""
        self._made.append(made)
        return made


def _of_facts(live: Any, facts: str) -> Any:
    now = _facts(live)
    if now != facts:
        raise Mismatch(f"is {now}, and was {facts}")
    return live


def same(a: Any, b: Any) -> bool:
    """Whether two encoded values are equal in every bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        return bool(a.tobytes() == b.tobytes())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    both_nan = a != a and b != b
    return bool(a == b or both_nan)


def _tree(space: Space[Any]) -> Iterator[Any]:
    """The space and all spaces inside it, which have separate random states."""
    yield space
    for value in vars(space).values():
        children = [value]
        if isinstance(value, dict):
            children = list(value.values())
        elif isinstance(value, (tuple, list)):
            children = list(value)
        for child in children:
            if isinstance(child, Space):
                yield from _tree(child)


def _facts(value: Any) -> str:
    if not isinstance(value, Space):
        return f"{type(value).__qualname__} {value!r}"
    crc = 0  # of the bounds, of which ``repr`` shows only the extremes
    for space in _tree(value):
        for _, bound in sorted(vars(space).items()):
            if isinstance(bound, np.ndarray):
                crc = zlib.crc32(bound.tobytes(), crc)
    return f"{value!r} (crc32 {crc:08x})"
