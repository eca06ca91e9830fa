"""Random streams that belong to one group of environments, and never to the user.

Modules and environments that draw from torch's, NumPy's or Python's *global* generators get the
group's own streams for the time of a rollout; afterwards the user's are back, untouched.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch
else:
    from muster import lazy_torch as torch

_RESTARTS = 1 << 31  # a spawn key that no stream has


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
        self._python = random.Random(_word(python)).getstate()
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
        version, words, gauss = self._python
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
        self._python = (version, tuple(words), gauss)
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
        numpy_user = _user_stream()
        numpy_user.remember()
        self._legacy.install()
        python_user = random.getstate()
        random.setstate(self._python)
        try:
            with self._torch_as_global() if "torch" in sys.modules else nullcontext():
                yield
        finally:
            if not sys.is_finalizing():  # else a thread was acting when the program ended, and nobody draws any more
                self._python = random.getstate()
                self._legacy.remember()
                numpy_user.install()
                random.setstate(python_user)

    @contextmanager
    def _torch_as_global(self) -> Iterator[None]:
        torch_user = torch.get_rng_state()
        cuda_user = torch.cuda.get_rng_state(self._cuda) if self._cuda else None
        torch.set_rng_state(self._torch_state())
        if self._cuda is not None and self._cuda_state is not None:
            torch.cuda.set_rng_state(self._cuda_state, self._cuda)
        try:
            yield
        finally:
            self._torch = torch.get_rng_state()
            torch.set_rng_state(torch_user)
            if self._cuda is not None and cuda_user is not None:
                self._cuda_state = torch.cuda.get_rng_state(self._cuda)
                torch.cuda.set_rng_state(cuda_user, self._cuda)

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

    def install(self) -> None:
        np.random.mtrand.set_bit_generator(self.bit_generator)
        if self.in_hand:
            np.random.set_state({**np.random.get_state(legacy=False), **self.in_hand})

    def remember(self) -> None:
        """Note what is in hand, while this stream is installed."""
        if type(self.bit_generator) is np.random.MT19937:
            now = ctypes.string_at(self.bit_generator.ctypes.state_address, 625 * 4)  # 624 words and a position
            if now == self._seen and not self.in_hand:
                return
            self._seen = now
        state: dict[str, Any] = np.random.get_state(legacy=False)
        self.in_hand = {key: state[key] for key in ("has_gauss", "gauss")} if state["has_gauss"] else {}


_user_numpy = _NumpyStream(None)  # the stream that was there when a rollout began


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


@contextmanager
def torch_threads(number: int | None) -> Iterator[None]:
    """Let torch use so many threads, and the user's number again afterwards; None changes nothing."""
    before = torch.get_num_threads()
    if number is None or number == before:
        yield
        return
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _word(sequence: np.random.SeedSequence) -> int:
    return int(sequence.generate_state(1, np.uint64)[0] >> 1)
