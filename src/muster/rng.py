"""Random streams of one group of environments, separate from the user's.

Modules and environments that draw from torch's, NumPy's or Python's *global* generators get the
group's own streams during a rollout. The user's streams are restored unchanged afterwards. This is
done in every rollout, because it is not known beforehand whether any code will draw. So it must be
cheap: NumPy's generator is replaced by another, torch's state is set, and read if it has changed
(``_TorchStream``), and Python's is copied in place (``_PythonStream``).
"""

from __future__ import annotations

import ctypes
import os
import random
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.random import mtrand

from muster.utils.private_names import VARIABLE, usable

if TYPE_CHECKING:
    import torch
else:
    from muster.utils import lazy_torch as torch

_RESTARTS = 1 << 31  # a spawn key that no stream uses
MT_BYTES = 625 * 4  # size of a Mersenne Twister: 624 words and a position
# the position, and 8 words beside it: any draw changes the position, and 624 draws the words
MT_PROBE = 9 * 4
TORCH_HEAD = 24  # of a state of torch's: seed, position and flags
TORCH_BYTES = 2620  # of a generator's memory, in which its words are searched
TORCH_BEFORE = 20  # seed and position, before the words
TORCH_BEHIND = 24  # the cached normal numbers, behind them
TORCH_PROBE = (
    TORCH_BEFORE + 8 * 4
)  # as ``MT_PROBE``: any draw changes it, or the cached numbers


# The user's generators, saved while a group's streams replace them: NumPy's stream, the states of
# Python's and torch's generators, and of CUDA's; None: torch is not loaded, or the group uses no GPU.
# No class, since one is made in every rollout.
UserStreams: TypeAlias = "tuple[_NumpyStream, Any, Any, Any]"


class GroupRng:
    """All random streams of one group, derived from ``(seed, group)`` and the generation of its
    worker.

    Attributes:
        numpy: generator for Muster's own draws (the heads' noise).
    """

    def __init__(
        self,
        seed: int | Sequence[int] | None,
        group: int = 0,
        device: torch.device | None = None,
        generation: int = 0,
    ) -> None:
        again = (_RESTARTS, generation) if generation else ()
        root = np.random.SeedSequence(seed, spawn_key=(group, *again))
        self._root, self._streams = root, dict[int, np.random.Generator]()
        own, legacy, torch_global, python = root.spawn(4)
        self.numpy = np.random.Generator(np.random.SFC64(own))
        self._legacy = _NumpyStream(np.random.MT19937(legacy))
        self._python = _PythonStream(random.Random(_word(python))).state()
        # of the user, before the last rollout
        self._users_python: Any = None
        self._torch_seed = _word(torch_global)
        self._torch: torch.Tensor | None = None  # None: the initial state
        self.device = device
        self._cuda = device if device is not None and device.type == "cuda" else None
        self._cuda_state: torch.Tensor | None = None
        if self._cuda is not None:
            self._cuda_state = (
                torch.Generator(self._cuda).manual_seed(self._torch_seed).get_state()
            )

    def stream(self, number: int) -> np.random.Generator:
        """Return one of any number of further streams. Code that draws a fixed amount per step from
        a separate stream draws the same numbers for every batch size.
        """
        if number not in self._streams:
            self._streams[number] = np.random.Generator(
                self._stream_at_its_beginning(number)
            )
        return self._streams[number]

    def _child(self, number: int) -> np.random.SeedSequence:
        return np.random.SeedSequence(
            self._root.entropy, spawn_key=(*self._root.spawn_key, number)
        )

    def _stream_at_its_beginning(self, number: int) -> np.random.SFC64:
        return np.random.SFC64(self._child(4 + number))

    def state_dict(self) -> dict[str, Any]:
        """Return all streams as plain data, including those that ``stream`` has not made yet.

        Not in ``as_global``.
        """
        python = random.Random(0)
        _PythonStream(python).restore(self._python)
        version, words, gauss = python.getstate()
        return {
            "entropy": self._root.entropy,
            "spawn_key": list(self._root.spawn_key),
            "numpy": self.numpy.bit_generator.state,
            "streams": {
                number: stream.bit_generator.state
                for number, stream in self._streams.items()
            },
            "legacy": self._legacy.bit_generator.state,
            "legacy_in_hand": dict(self._legacy.in_hand),
            "python": [version, list(words), gauss],
            "torch": self._torch_state() if "torch" in sys.modules else None,
            "cuda": self._cuda_state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict()``, also in generators that ``stream`` has returned: they draw the
        same numbers again.

        CUDA's stream is not changed unless both the saved and the present group use a GPU.
        """
        self._root = np.random.SeedSequence(
            state["entropy"], spawn_key=tuple(state["spawn_key"])
        )
        set_state(self.numpy.bit_generator, state["numpy"])
        for number in {*self._streams, *state["streams"]}:
            begun = state["streams"].get(number)
            set_state(
                self.stream(number).bit_generator,
                begun or self._stream_at_its_beginning(number).state,
            )
        legacy = np.random.MT19937(0)
        set_state(legacy, state["legacy"])
        self._legacy = _NumpyStream(legacy, state["legacy_in_hand"])
        version, words, gauss = state["python"]
        python = random.Random(0)
        python.setstate((version, tuple(words), gauss))
        self._python = _PythonStream(python).state()
        if state["torch"] is not None and "torch" in sys.modules:
            torch.Generator().set_state(state["torch"])  # raises if it is none
        self._torch, self._torch_seed = state["torch"], _word(self._child(2))
        if self._cuda is not None and state["cuda"] is not None:
            self._cuda_state = state["cuda"]

    @contextmanager
    def unmoved(self) -> Iterator[None]:
        """Restore all streams when the context exits, so that its draws are repeated.

        Not in ``as_global``.
        """
        known = dict(self._streams)
        generators = [
            self.numpy.bit_generator,
            self._legacy.bit_generator,
            *(s.bit_generator for s in known.values()),
        ]
        states = [generator.state for generator in generators]
        python = self._python
        torch_state = self._torch
        cuda_state = self._cuda_state
        in_hand = dict(self._legacy.in_hand)
        try:
            yield
        finally:
            self._streams = known
            self._python = python
            self._torch = torch_state
            self._cuda_state = cuda_state
            for generator, state in zip(generators, states, strict=True):
                generator.state = state
            self._legacy.rewound(in_hand)

    @contextmanager
    def as_global(self) -> Iterator[None]:
        """Replace the global streams by the group's while the context is active."""
        user = self.install()
        try:
            yield
        finally:
            self.remove(user)

    def install(self) -> UserStreams:
        """Replace the global streams by the group's, until ``remove`` is called with the result."""
        numpy_user = _user_numpy
        if numpy_user.bit_generator is not mtrand.get_bit_generator():
            numpy_user = _user_stream()
        numpy_user.give_way_to(self._legacy)
        python_user = _user_python.exchange(self._python, self._users_python)
        self._users_python = python_user
        torch_user = None
        cuda_user = None
        if "torch" in sys.modules:
            own = self._torch_state() if self._torch is None else self._torch
            torch_user = _user_torch().exchange(own)
        if self._cuda is not None and self._cuda_state is not None:
            cuda_user = torch.cuda.get_rng_state(self._cuda)
            torch.cuda.set_rng_state(self._cuda_state, self._cuda)
        return numpy_user, python_user, torch_user, cuda_user

    def remove(self, user: UserStreams) -> None:
        """Restore the user's streams."""
        # the program exits during a thread's rollout: there are no more draws
        if sys.is_finalizing():
            return
        numpy_user, python_user, torch_user, cuda_user = user
        self._python = _user_python.exchange(python_user, self._python)
        self._legacy.give_way_to(numpy_user)
        if torch_user is not None:
            self._torch = _user_torch().exchange(torch_user)
        if self._cuda is not None and cuda_user is not None:
            self._cuda_state = torch.cuda.get_rng_state(self._cuda)
            torch.cuda.set_rng_state(cuda_user, self._cuda)

    def _torch_state(self) -> torch.Tensor:
        return (
            torch.Generator().manual_seed(self._torch_seed).get_state()
            if self._torch is None
            else self._torch
        )


class _NumpyStream:
    """The state of ``np.random``: a bit generator, and the second normal number that ``randn``
    caches.

    Setting a bit generator drops the cached number, and reading it costs 40 us or more. So it is
    read only if the generator has advanced: a number is cached only then (or after ``set_state`` to
    the same position, which is not detected).
    """

    def __init__(
        self, bit_generator: Any, in_hand: Mapping[str, Any] | None = None
    ) -> None:
        self.bit_generator = bit_generator
        self.in_hand: dict[str, Any] = dict(in_hand or {})
        self._seen = b""
        self._memory: Any = None
        if type(bit_generator) is np.random.MT19937:
            end = bit_generator.ctypes.state_address + MT_BYTES
            self._memory = (ctypes.c_char * MT_PROBE).from_address(end - MT_PROBE)

    def give_way_to(self, other: _NumpyStream) -> None:
        """Save the cached number of this stream, which is installed, and install another one."""
        memory = self._memory
        if memory is None or self.in_hand or memory.raw != self._seen:
            self._remember()
        mtrand.set_bit_generator(other.bit_generator)
        if other.in_hand:
            np.random.set_state({**np.random.get_state(legacy=False), **other.in_hand})

    def _remember(self) -> None:
        if self._memory is not None:
            self._seen = self._memory.raw
        state: dict[str, Any] = np.random.get_state(legacy=False)
        self.in_hand = (
            {key: state[key] for key in ("has_gauss", "gauss")}
            if state["has_gauss"]
            else {}
        )

    def rewound(self, in_hand: dict[str, Any]) -> None:
        """Note that the bit generator was set to an earlier state, with this cached number."""
        self.in_hand = in_hand
        self._seen = b""  # the same draws come again, and end where these did


_user_numpy = _NumpyStream(None)  # the stream before the last rollout


class _PythonStream:
    """A ``random.Random``, whose state is read and set as bytes in its memory.

    ``getstate`` and ``setstate`` convert 625 Python integers each time, which costs 40 us per
    rollout.
    """

    def __init__(self, generator: Any) -> None:
        self.generator = generator
        offset = None if os.environ.get(VARIABLE) == "never" else _python_offset()
        self._memory: Any = None
        if offset is not None:
            self._memory = (ctypes.c_char * MT_BYTES).from_address(
                id(generator) + offset
            )
            self._begin = (ctypes.c_char * MT_PROBE).from_address(
                id(generator) + offset
            )

    def state(self) -> Any:
        """Return the state for ``restore``."""
        if self._memory is None:
            return self.generator.getstate()
        return self._memory.raw, self.generator.gauss_next

    def exchange(self, state: Any, known: Any) -> Any:
        """Set a state from ``state()``, and return the one before: ``known``, if nothing was drawn
        since.
        """
        if self._memory is None:
            before = self.generator.getstate()
            self.generator.setstate(state)
            return before
        gauss = self.generator.gauss_next
        if (
            known is None
            or known[1] != gauss
            or not known[0].startswith(self._begin.raw)
        ):
            known = self._memory.raw, gauss
        self._memory.raw, self.generator.gauss_next = state
        return known

    def restore(self, state: Any) -> None:
        """Set a state from ``state()``."""
        if self._memory is None:
            self.generator.setstate(state)
        else:
            self._memory.raw, self.generator.gauss_next = state


@cache
def _python_offset() -> int | None:
    """The offset of position and 624 words in a ``random.Random``, from the object's address; None:
    unknown.

    It is found by a search for a known state, without assumptions about the layout of the object.
    """
    if sys.implementation.name != "cpython":
        return None
    sample = random.Random(0)
    *words, position = sample.getstate()[1]
    expected = struct.pack("625I", position, *words)
    found = ctypes.string_at(id(sample), type(sample).__basicsize__).find(expected)
    return found if found >= 0 else None


_user_python = _PythonStream(random.random.__self__)  # type: ignore[attr-defined]


class _TorchStream:
    """Torch's generator on the CPU. Its state is read only if its memory has changed since it was
    read or set: a state is a tensor of 5 kB, and reading it takes most of the time of an exchange.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._set = generator.set_state
        self._probes = _torch_probes(generator)
        self._seen = (b"", b"")
        self._state: Any = None

    def exchange(self, state: torch.Tensor) -> torch.Tensor:
        """Set a state, and return the one before; neither is ever written to."""
        before: torch.Tensor
        if self._probes is None:
            before = self._generator.get_state()
            self._set(state)
            return before
        head, tail = self._probes
        if (head.raw, tail.raw) != self._seen:
            self._state = self._generator.get_state()
        before = self._state
        self._set(state)
        self._state = state
        self._seen = (head.raw, tail.raw)
        return before


def _torch_probes(generator: Any) -> tuple[Any, Any] | None:
    """Return what is read of the memory of a generator of torch's, one part of which changes with
    any draw: from its seed to its first words, and its cached normal numbers. None: unknown.
    """
    begin = _torch_begin()
    if begin is None:
        return None
    return _probes_at(generator._cdata + begin)


def _probes_at(address: int) -> tuple[Any, Any]:
    behind = address + TORCH_BEFORE + 624 * 4
    head = (ctypes.c_char * TORCH_PROBE).from_address(address)
    tail = (ctypes.c_char * TORCH_BEHIND).from_address(behind)
    return head, tail


@cache
def _torch_begin() -> int | None:
    """The first byte of that memory, from the address of the generator; None: unknown.

    As in ``_python_offset``, a known state is searched. What is before and behind its words is
    found by drawing: each draw has to change a byte.
    """
    sample: Any = torch.Generator()
    if not usable("torch", (sample, ("_cdata",))):
        return None
    sample.manual_seed(0)
    words = sample.get_state().numpy().tobytes()[TORCH_HEAD : TORCH_HEAD + 8 * 624]
    expected = struct.pack("624I", *struct.unpack("624Q", words))
    found = ctypes.string_at(sample._cdata, TORCH_BYTES).find(expected)
    if found < TORCH_BEFORE:
        return None
    begin = found - TORCH_BEFORE
    head, tail = _probes_at(sample._cdata + begin)
    draws: list[Callable[[], Any]] = [lambda: torch.rand(1, generator=sample)]
    for dtype in (torch.float32, torch.float64):
        for _ in range(2):  # the second one is cached by the first
            draws.append(partial(torch.randn, 1, generator=sample, dtype=dtype))
    draws.append(lambda: torch.rand(624, generator=sample))
    draws.append(lambda: sample.manual_seed(1))
    for draw in draws:
        before = head.raw, tail.raw
        draw()
        if (head.raw, tail.raw) == before:
            return None
    return begin


@cache
def _user_torch() -> _TorchStream:
    return _TorchStream(torch.default_generator)


def _user_stream() -> _NumpyStream:
    """Return the stream that is installed now, from here on ``_user_numpy``."""
    global _user_numpy
    _user_numpy = _NumpyStream(mtrand.get_bit_generator())
    return _user_numpy


def set_state(bits: np.random.BitGenerator, state: Mapping[str, Any]) -> None:
    """Set the state of a bit generator.

    Raises ValueError for numbers that are no integers, which NumPy would cast.
    """
    parts: dict[str, Any] = {**state, **state["state"]}
    if any(np.asarray(part).dtype.kind in "fc" for part in parts.values()):
        raise ValueError(
            "the state of a random generator has numbers that are not integers"
        )
    bits.state = state


def global_streams() -> dict[str, Any]:
    """Return the states of the process's generators, to compare with ``==``, in 20 us.

    Torch's only if it is loaded.
    """
    bits = mtrand.get_bit_generator()
    numpy = (
        ctypes.string_at(bits.ctypes.state_address, 625 * 4)
        if type(bits) is np.random.MT19937
        else str(bits.state)
    )
    states = {"numpy.random": (id(bits), numpy), "random": random.getstate()}
    return states | (
        {"torch": torch.get_rng_state().numpy().tobytes()}
        if "torch" in sys.modules
        else {}
    )


def _word(sequence: np.random.SeedSequence) -> int:
    return int(sequence.generate_state(1, np.uint64)[0] >> 1)


# --- seeds of environments ----------------------------------------------------------------------


def entries(seeds: Sequence[int], places: Sequence[int]) -> list[int]:
    """Return the entries at these places of a list that starts over at its end."""
    return [seeds[place % len(seeds)] for place in places]


def seeds_of(
    seed: int | Sequence[int], env_ids: Sequence[int], generation: int
) -> list[int]:
    """Return seeds for environments: ``seed + env_id``, or its entry of a list.

    Those of a restarted worker get others, so that episodes are not repeated.
    """
    if isinstance(seed, int):
        own = [seed + i for i in env_ids]
        parts = [[seed, i, generation] for i in env_ids]
    else:
        own = [seed[i] for i in env_ids]
        parts = [[seed[i], i, generation] for i in env_ids]
    if not generation:
        return own
    roots = map(np.random.SeedSequence, parts)
    return [int(root.generate_state(1)[0] >> 1) for root in roots]
