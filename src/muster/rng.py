"""Random streams that belong to one group of environments, and never to the user.

Modules and environments that draw from torch's, NumPy's or Python's *global* generators get the
group's own streams for the time of a rollout; afterwards the user's are back, untouched. This happens in every
rollout, whether or not anything draws: it cannot be seen beforehand. So it has to be cheap: NumPy's generator is
exchanged for another, torch's state is read and set, and Python's is copied where it lies (``_PythonStream``).
"""

from __future__ import annotations

import ctypes
import os
import random
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from muster.utils.private_names import VARIABLE

if TYPE_CHECKING:
    import torch
else:
    from muster.utils import lazy_torch as torch

_RESTARTS = 1 << 31  # a spawn key that no stream has
MT_BYTES = 625 * 4  # of a Mersenne Twister: 624 words and a position
MT_TAIL = 9 * 4  # the last 8 words and the position: any draw changes the position, and 624 draws the words


class UserStreams(NamedTuple):
    """The user's generators, for the time in which a group's stand in for them.

    Attributes:
        numpy: the bit generator.
        python: see ``_PythonStream.state``.
        torch, cuda: states; None where torch is not loaded, or nothing is on a GPU.
    """

    numpy: _NumpyStream
    python: Any
    torch: Any
    cuda: Any


class GroupRng:
    """All randomness of one group, derived from ``(seed, group)``, and from how often its worker was restarted.

    Attributes:
        numpy: for Muster's own draws (the heads' noise).
    """

    def __init__(
        self, seed: int | None, group: int = 0, device: torch.device | None = None, generation: int = 0
    ) -> None:
        again = (_RESTARTS, generation) if generation else ()
        root = np.random.SeedSequence(seed, spawn_key=(group, *again))
        self._root, self._streams = root, dict[int, np.random.Generator]()
        own, legacy, torch_global, python = root.spawn(4)
        self.numpy = np.random.Generator(np.random.SFC64(own))
        self._legacy = _NumpyStream(np.random.MT19937(legacy))
        self._python = _PythonStream(random.Random(_word(python))).state()
        self._torch_seed = _word(torch_global)
        self._torch: torch.Tensor | None = None  # at its beginning
        self.device = device
        self._cuda = device if device is not None and device.type == "cuda" else None
        self._cuda_state: torch.Tensor | None = None
        if self._cuda is not None:
            self._cuda_state = torch.Generator(self._cuda).manual_seed(self._torch_seed).get_state()

    def stream(self, number: int) -> np.random.Generator:
        """One of any number of further streams. What draws from a stream of its own, a fixed amount per step,
        draws the same numbers however the steps are cut into batches.
        """
        if number not in self._streams:
            self._streams[number] = np.random.Generator(self._stream_at_its_beginning(number))
        return self._streams[number]

    def _child(self, number: int) -> np.random.SeedSequence:
        return np.random.SeedSequence(self._root.entropy, spawn_key=(*self._root.spawn_key, number))

    def _stream_at_its_beginning(self, number: int) -> np.random.SFC64:
        return np.random.SFC64(self._child(4 + number))

    def state_dict(self) -> dict[str, Any]:
        """All streams as plain data, those that ``stream`` will make later included. Not within ``as_global``."""
        python = random.Random(0)
        _PythonStream(python).restore(self._python)
        version, words, gauss = python.getstate()
        return {
            "entropy": self._root.entropy,
            "spawn_key": list(self._root.spawn_key),
            "numpy": self.numpy.bit_generator.state,
            "streams": {number: stream.bit_generator.state for number, stream in self._streams.items()},
            "legacy": self._legacy.bit_generator.state,
            "legacy_in_hand": dict(self._legacy.in_hand),
            "python": [version, list(words), gauss],
            "torch": self._torch_state() if "torch" in sys.modules else None,
            "cuda": self._cuda_state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict()`` with the very same numbers; generators that were handed out go on, too.

        CUDA's stream stays as it is if only one of the two sides has a GPU.
        """
        self._root = np.random.SeedSequence(state["entropy"], spawn_key=tuple(state["spawn_key"]))
        self.numpy.bit_generator.state = state["numpy"]
        for number in {*self._streams, *state["streams"]}:
            begun = state["streams"].get(number)
            self.stream(number).bit_generator.state = begun or self._stream_at_its_beginning(number).state
        self._legacy = _NumpyStream(np.random.MT19937(0))
        self._legacy.bit_generator.state = state["legacy"]
        self._legacy.in_hand = dict(state["legacy_in_hand"])
        version, words, gauss = state["python"]
        python = random.Random(0)
        python.setstate((version, tuple(words), gauss))
        self._python = _PythonStream(python).state()
        self._torch, self._torch_seed = state["torch"], _word(self._child(2))
        if self._cuda is not None and state["cuda"] is not None:
            self._cuda_state = state["cuda"]

    @contextmanager
    def unmoved(self) -> Iterator[None]:
        """What is drawn meanwhile is drawn again afterwards. Not within ``as_global``."""
        known = dict(self._streams)
        generators = [self.numpy.bit_generator, self._legacy.bit_generator, *(s.bit_generator for s in known.values())]
        states = [generator.state for generator in generators]
        others = self._python, self._torch, self._cuda_state, dict(self._legacy.in_hand)
        try:
            yield
        finally:
            self._streams = known
            self._python, self._torch, self._cuda_state, self._legacy.in_hand = others
            for generator, state in zip(generators, states, strict=True):
                generator.state = state

    @contextmanager
    def as_global(self) -> Iterator[None]:
        """Put the group's streams in the place of the global ones."""
        user = self.install()
        try:
            yield
        finally:
            self.remove(user)

    def install(self) -> UserStreams:
        """Put the group's streams in the place of the global ones, until ``remove`` gets what is returned."""
        numpy_user = _user_stream()
        numpy_user.remember()
        python_user, torch_user, cuda_user = _user_python.state(), None, None
        if "torch" in sys.modules:
            generator = torch.default_generator
            torch_user = generator.get_state()
            generator.set_state(self._torch_state() if self._torch is None else self._torch)
        _user_python.restore(self._python)
        self._legacy.install()
        if self._cuda is not None and self._cuda_state is not None:
            cuda_user = torch.cuda.get_rng_state(self._cuda)
            torch.cuda.set_rng_state(self._cuda_state, self._cuda)
        return UserStreams(numpy_user, python_user, torch_user, cuda_user)

    def remove(self, user: UserStreams) -> None:
        """Put the user's streams back."""
        if sys.is_finalizing():  # a thread was acting when the program ended, and there are no more draws
            return
        self._python = _user_python.state()
        _user_python.restore(user.python)
        self._legacy.remember()
        user.numpy.install()
        if user.torch is not None:
            generator = torch.default_generator
            self._torch = generator.get_state()
            generator.set_state(user.torch)
        if self._cuda is not None and user.cuda is not None:
            self._cuda_state = torch.cuda.get_rng_state(self._cuda)
            torch.cuda.set_rng_state(user.cuda, self._cuda)

    def _torch_state(self) -> torch.Tensor:
        return torch.Generator().manual_seed(self._torch_seed).get_state() if self._torch is None else self._torch


class _NumpyStream:
    """What is behind ``np.random``: a bit generator, and the second normal number that ``randn`` keeps in hand.

    A change of bit generator loses the latter, and reading it costs 40 us and more, so it is read only when the
    generator has moved since: a number in hand comes from a move (or from ``set_state`` to the very same place,
    which is not seen).
    """

    def __init__(self, bit_generator: Any) -> None:
        self.bit_generator = bit_generator
        self.in_hand: dict[str, Any] = {}
        self._seen = b""
        self._memory: Any = None
        if type(bit_generator) is np.random.MT19937:
            end = bit_generator.ctypes.state_address + MT_BYTES
            self._memory = (ctypes.c_char * MT_TAIL).from_address(end - MT_TAIL)

    def install(self) -> None:
        np.random.mtrand.set_bit_generator(self.bit_generator)
        if self.in_hand:
            np.random.set_state({**np.random.get_state(legacy=False), **self.in_hand})

    def remember(self) -> None:
        """Note what is in hand, while this stream is installed."""
        if self._memory is not None:
            now = self._memory.raw
            if now == self._seen and not self.in_hand:
                return
            self._seen = now
        state: dict[str, Any] = np.random.get_state(legacy=False)
        self.in_hand = {key: state[key] for key in ("has_gauss", "gauss")} if state["has_gauss"] else {}


_user_numpy = _NumpyStream(None)  # the stream that was there when a rollout began


class _PythonStream:
    """A ``random.Random``, whose state is read and set as bytes where it lies.

    ``getstate`` and ``setstate`` make 625 Python integers each time, for 40 us per rollout.
    """

    def __init__(self, generator: Any) -> None:
        self.generator = generator
        offset = None if os.environ.get(VARIABLE) == "never" else _python_offset()
        self._memory: Any = None
        if offset is not None:
            self._memory = (ctypes.c_char * MT_BYTES).from_address(id(generator) + offset)

    def state(self) -> Any:
        """For ``restore``."""
        if self._memory is None:
            return self.generator.getstate()
        return self._memory.raw, self.generator.gauss_next

    def restore(self, state: Any) -> None:
        """Go on from ``state()``."""
        if self._memory is None:
            self.generator.setstate(state)
        else:
            self._memory.raw, self.generator.gauss_next = state


@cache
def _python_offset() -> int | None:
    """Where a ``random.Random`` keeps its position and its 624 words, from the object's address on; None: unknown.

    They are looked for in an object with a known state, and nothing is assumed about where they are.
    """
    if sys.implementation.name != "cpython":
        return None
    sample = random.Random(0)
    *words, position = sample.getstate()[1]
    expected = struct.pack("625I", position, *words)
    found = ctypes.string_at(id(sample), type(sample).__basicsize__).find(expected)
    return found if found >= 0 else None


_user_python = _PythonStream(random.random.__self__)  # type: ignore[attr-defined]


def _user_stream() -> _NumpyStream:
    global _user_numpy
    installed = np.random.mtrand.get_bit_generator()
    if _user_numpy.bit_generator is not installed:
        _user_numpy = _NumpyStream(installed)
    return _user_numpy


def global_streams() -> dict[str, Any]:
    """Where the process's generators are, to be compared with ``==``; for 20 us. Torch's is left out if not loaded."""
    bits = np.random.mtrand.get_bit_generator()
    numpy = ctypes.string_at(bits.ctypes.state_address, 625 * 4) if type(bits) is np.random.MT19937 else str(bits.state)
    states = {"numpy.random": (id(bits), numpy), "random": random.getstate()}
    return states | ({"torch": torch.get_rng_state().numpy().tobytes()} if "torch" in sys.modules else {})


def _word(sequence: np.random.SeedSequence) -> int:
    return int(sequence.generate_state(1, np.uint64)[0] >> 1)
