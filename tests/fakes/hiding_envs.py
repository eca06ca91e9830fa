"""Environments on tensors whose steps keep state in places that are easily overlooked."""

from __future__ import annotations

import array
import ctypes
import functools
import itertools
from collections import OrderedDict, UserDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from tests.fakes.torch_envs import Walk

EVERY = 20  # steps after which something changes: more than a trial makes


def push(amount: Any) -> torch.Tensor:
    """What is added to a state, ``[B, 2]``."""
    return torch.stack([amount, torch.zeros_like(amount)], 1)


# --- tensors: these can be recorded ---------------------------------------------------------------


class Deep(Walk):
    """Replaces a tensor several objects deep, in objects with slots, some of them frozen."""

    class Slots:
        __slots__ = ("__secret", "inner", "missing")

        def __init__(self, value: torch.Tensor) -> None:
            self.inner = SimpleNamespace(value=value)
            self.__secret = value.clone()

        def advance(self, by: torch.Tensor) -> torch.Tensor:
            self.__secret = self.__secret * 0.5 + by
            self.inner.value = self.inner.value * 0.9 + self.__secret
            return self.inner.value

    @dataclass(frozen=True, slots=True)
    class Frozen:
        value: torch.Tensor

        def advanced(self, by: torch.Tensor) -> Deep.Frozen:
            return Deep.Frozen(self.value * 0.5 + by)

    class Pair(NamedTuple):
        one: torch.Tensor
        two: list[torch.Tensor]

    def start(self) -> None:
        zero = torch.zeros(self.num_envs, device=self.device)
        self.slots = {"a": [self.Slots(zero.clone())]}
        self.frozen = self.Frozen(zero.clone())
        self.pair = self.Pair(zero.clone(), [zero.clone()])

    def keep(self, state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        moved = self.slots["a"][0].advance(state[:, 0])
        self.frozen = self.frozen.advanced(moved)
        self.pair = self.Pair(self.pair.two[0], [self.frozen.value + self.pair.one])
        return state + push(1e-2 * (moved + self.pair.one))


class Keyed(Walk):
    """Keeps tensors in a dict whose keys are tuples and objects, and in an array of objects."""

    def start(self) -> None:
        zero = torch.zeros(self.num_envs, device=self.device)
        self.keys = [SimpleNamespace(), SimpleNamespace()]
        self.at = {(0, 1): zero.clone(), (1, 0): zero.clone()}
        self.of = {id(key): zero.clone() for key in self.keys}
        self.by = {Key(): zero.clone(), Key(): zero.clone()}
        self.array = np.array([None, None], dtype=object)
        self.array[:] = [zero.clone(), zero.clone()]
        self.user = UserDict(a=zero.clone())

    def keep(self, state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        at = self.at
        at[0, 1], at[1, 0] = at[1, 0] * 0.9 + state[:, 0], at[0, 1] + 0.1
        first, second = self.by
        self.by[first] = self.by[second] * 0.5 + at[0, 1]
        self.by[second] = self.by[first] - 0.1
        self.array[0], self.array[1] = self.array[1] * 0.9 + 0.1, self.by[second]
        self.user["a"] = self.user["a"] * 0.9 + self.array[0]
        return state + push(1e-2 * (self.user["a"] + self.by[first]))


class Key:
    """A key of a dict."""


class Named(Walk):
    """A closure's variable has the name of an attribute of the object that it is bound to."""

    def start(self) -> None:
        self.total = torch.zeros(self.num_envs, device=self.device)
        self.advance = _with_total(self.total.clone()).__get__(self)

    def keep(self, state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return state + push(1e-2 * self.advance(state[:, 0]))


def _with_total(total: torch.Tensor) -> Any:
    def advance(self: Named, by: torch.Tensor) -> torch.Tensor:
        nonlocal total
        total = total * 0.5 + by
        self.total = self.total * 0.9 - total
        return self.total

    return advance


class Swaps(Walk):
    """Two buffers take turns, by name and in place."""

    def start(self) -> None:
        self.front = SimpleNamespace(x=torch.zeros(self.num_envs, device=self.device))
        self.back = SimpleNamespace(x=torch.zeros(self.num_envs, device=self.device))

    def keep(self, state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        self.front, self.back = self.back, self.front
        self.front.x.copy_(self.back.x * 0.9 + state[:, 0])
        return state + push(1e-2 * self.front.x)


class Resets(Walk):
    """Names that are views of each other after a step are not after a reset."""

    def start(self) -> None:
        self.before = self.state
        self.position = self.state[:, 0]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        found = super().reset(seed=seed, options=options)
        self.before = torch.zeros_like(self.state)
        self.position = torch.ones(self.num_envs, device=self.device)
        return found

    def keep(self, state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        state = state + 0.1 * self.before + push(0.05 * self.position)
        self.before = self.state
        self.position = self.before[:, 0]
        return state


class Foreign(Walk):
    """Keeps its state in an array of another package, over memory of the device."""

    class Array:
        """Shows its memory, as arrays of CuPy and Warp do."""

        def __init__(self, values: torch.Tensor) -> None:
            self.values = values

        @property
        def __array_interface__(self) -> Any:
            return self.values.numpy().__array_interface__

    def start(self) -> None:
        self.memory = self.Array(torch.zeros(self.num_envs))

    def keep(self, state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        values = self.memory.values
        values.mul_(0.9).add_(state[:, 0])
        return state + push(1e-2 * values)


class Sparse(Walk):
    """Has a sparse tensor, and one in host memory of a type that NumPy does not have."""

    def start(self) -> None:
        self.links = [torch.eye(self.num_envs, device=self.device).to_sparse()]
        self.half = torch.ones(3, dtype=torch.bfloat16)


RECORDED = [Deep, Keyed, Named, Swaps, Resets, Foreign, Sparse]


class Tuned(Walk):
    """Has parts that the user may replace between two rollouts."""

    class Easy:
        def bonus(self, position: torch.Tensor) -> torch.Tensor:
            return position * 0.5

    class Hard:
        def bonus(self, position: torch.Tensor) -> torch.Tensor:
            return position * -2.0

    def start(self) -> None:
        self.gain = SimpleNamespace(value=0.1)
        self.task: Any = self.Easy()
        self.squashed: Any = torch.tanh
        self.shaped: Any = halved
        self.default = torch.zeros(self.num_envs, device=self.device)
        self.goal = self.default
        self.table = np.zeros(1 << 17)

    def keep(self, state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        extra = self.task.bonus(self.squashed(state[:, 0])) + self.goal + self.default
        return state + push(self.gain.value * self.shaped(extra) + self.table.sum())


def halved(value: torch.Tensor) -> torch.Tensor:
    """A part of ``Tuned``."""
    return value * 0.5


# --- Python: these cannot --------------------------------------------------------------------------


class Scheduled(Walk):
    """Something changes every ``EVERY`` steps. Subclasses say where the steps are counted."""

    def count(self) -> int:
        """Return the number of steps so far."""
        raise NotImplementedError

    def keep(self, state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return state + 0.1 * (self.count() // EVERY)


class InGenerator(Scheduled):
    """In a generator in a dict."""

    def start(self) -> None:
        self.sources = {"steps": self.numbers()}

    @staticmethod
    def numbers() -> Any:
        number = 0
        while True:
            yield number
            number += 1

    def count(self) -> int:
        return next(self.sources["steps"])


class OfGenerator(Walk):
    """In a generator whose local variable is a tensor."""

    def start(self) -> None:
        self.source = self.values(torch.zeros(self.num_envs, device=self.device))

    @staticmethod
    def values(value: torch.Tensor) -> Any:
        while True:
            value = value * 0.5 + 1
            yield value

    def keep(self, state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return state + push(1e-2 * next(self.source))


class InIterator(Scheduled):
    def start(self) -> None:
        self.numbers = iter(range(10_000))

    def count(self) -> int:
        return next(self.numbers)


class InCycle(Scheduled):
    def start(self) -> None:
        self.numbers = itertools.cycle(range(100))

    def count(self) -> int:
        return next(self.numbers)


class InBytes(Scheduled):
    def start(self) -> None:
        self.digits = bytearray(4)

    def count(self) -> int:
        number = int.from_bytes(self.digits, "big") + 1
        self.digits[:] = number.to_bytes(4, "big")
        return number


class InArray(Scheduled):
    def start(self) -> None:
        self.numbers = array.array("q", [0])

    def count(self) -> int:
        self.numbers[0] += 1
        return self.numbers[0]


class InCtypes(Scheduled):
    def start(self) -> None:
        self.number = ctypes.c_long(0)

    def count(self) -> int:
        self.number.value += 1
        return self.number.value


class InOrder(Scheduled):
    """In the order of a dict's entries."""

    def start(self) -> None:
        self.numbers = OrderedDict.fromkeys(range(10 * EVERY + 1))

    def count(self) -> int:
        first = next(iter(self.numbers))
        self.numbers.move_to_end(first)
        return first


class InClassArray(Scheduled):
    """In an array that all environments of the class share."""

    shared = np.zeros(1)

    def count(self) -> int:
        type(self).shared[0] += 1
        return int(self.shared[0])


class Config:
    """A class that is used as an object."""

    steps = 0


class InOtherClass(Scheduled):
    def start(self) -> None:
        self.config = Config

    def count(self) -> int:
        self.config.steps += 1
        return self.config.steps


class ByDescriptor(Scheduled):
    """In a descriptor of the class."""

    class Counting:
        def __init__(self) -> None:
            self.reads = 0

        def __get__(self, obj: Any, owner: Any = None) -> int:
            self.reads += 1
            return self.reads

    steps = Counting()

    def count(self) -> int:
        return self.steps


class ByDefault(Scheduled):
    """In the default of a keyword of a method."""

    def count(self, *, numbers: list[int] = [0]) -> int:  # noqa: B006 (meant)
        numbers[0] += 1
        return numbers[0]


made = 0
settings = {"made": 0}


class ByGlobal(Scheduled):
    """In a global of a method's module."""

    def count(self) -> int:
        global made
        made += 1
        return made


class ByHelper(Scheduled):
    """In a global of a function that a method calls."""

    def count(self) -> int:
        return _count()


def _count() -> int:
    settings["made"] += 1
    return settings["made"]


class ByWrapped(Scheduled):
    """In the closure of a decorator of a method."""

    @staticmethod
    def counted(method: Any) -> Any:
        count = 0

        @functools.wraps(method)
        def wrapper(self: Any) -> int:
            nonlocal count
            count += 1
            return count

        return wrapper

    @counted
    def count(self) -> int:
        return 0


class BySet(Scheduled):
    """In a set of objects."""

    def start(self) -> None:
        self.keys = {Key()}

    def count(self) -> int:
        self.keys.add(Key())
        return len(self.keys)


REFUSED = {
    InGenerator: r"env\.sources\['steps'\]\.number: \d+ -> \d+",
    OfGenerator: r"env\.source\.value is another tensor",
    InIterator: r"env\.numbers: position\[.\]",
    InCycle: r"env\.numbers: position\[",
    InBytes: r"env\.digits: an array in host memory changes",
    InArray: r"env\.numbers: an array in host memory changes",
    InCtypes: r"env\.number: an array in host memory changes",
    InOrder: r"env\.numbers: order of its entries changes",
    InClassArray: r"type\(env\)\.shared: an array in host memory changes",
    InOtherClass: r"type\(env\.config\)\.steps: \d+ -> \d+",
    ByDescriptor: r"type\(env\)\.steps\.reads: \d+ -> \d+",
    ByDefault: r"type\(env\)\.count\.__kwdefaults__\['numbers'\]\[0\]: \d+ -> \d+",
    ByGlobal: r"type\(env\)\.count: global made: \d+ -> \d+",
    ByHelper: r"type\(env\)\.count: global _count: global settings\['made'\]: \d+ -> \d+",
    ByWrapped: r"type\(env\)\.count\.count: \d+ -> \d+",
    BySet: r"env\.keys: \d+ entries -> \d+",
}
