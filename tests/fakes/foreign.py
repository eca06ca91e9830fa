"""Exceptions of the user's that misbehave when they are looked at, or look like what they are not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from muster import errors
from muster.testing import OracleEnv


def _refuses(*_: object) -> NoReturn:
    raise ZeroDivisionError("looked at")


class Numeric(Exception):
    def __str__(self) -> str:
        return self.args[0]  # a number: TypeError


class Mute(Exception):
    __str__ = __repr__ = __format__ = _refuses


class Exits(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


class Odd(str):
    __slots__ = ()
    __format__ = __len__ = __getitem__ = encode = _refuses


class OddText(Exception):
    def __str__(self) -> str:
        return Odd("odd")


class Shy(Exception):
    """All that Python and Muster ask an exception for."""

    __notes__ = __cause__ = __context__ = __suppress_context__ = env_index = phase = (
        worker
    ) = property(_refuses)


class Unreducible(Exception):
    __reduce__ = __reduce_ex__ = _refuses


class ExitsWhenPickled(Exception):
    def __reduce__(self) -> Any:
        raise SystemExit(3)


class Nameless(type):
    __name__ = __module__ = property(_refuses)


class OfNameless(Exception, metaclass=Nameless):
    pass


class Liar(Exception):
    """``isinstance(error, PolicyError)`` is True."""

    __class__ = property(lambda self: errors.PolicyError)


class Classless(Exception):
    __class__ = property(_refuses)


@dataclass(frozen=True)
class Frozen(Exception):
    code: int = 3


class Indexed(Exception):
    env_index = 99


class ShyEnvError(errors.EnvError):
    env_index = property(_refuses, lambda self, value: None)


class MutePolicyError(errors.PolicyError):
    __str__ = _refuses


class OwnBase(BaseException):
    """No Exception."""


def inner_collector() -> NoReturn:
    """An environment, or a policy, that collects with Muster itself."""
    from muster import Collector
    from muster.testing import FaultyEnv

    with Collector(
        lambda: FaultyEnv(1, error=lambda: ValueError("inside")),
        None,
        frames_per_batch=4,
    ) as collector:
        collector.rollout()
    raise AssertionError("the inner collector raises")


def raising(make: Callable[[], BaseException]) -> Callable[[], NoReturn]:
    def fail() -> NoReturn:
        raise make()

    return fail


EXCEPTIONS: dict[str, Callable[[], NoReturn]] = {
    "number as text": raising(lambda: Numeric(17)),
    "no text": raising(Mute),
    "text that exits": raising(Exits),
    "odd text": raising(OddText),
    "lone surrogate": raising(lambda: ValueError("\udcff")),
    "shy": raising(Shy),
    "not to be reduced": raising(Unreducible),
    "exits when pickled": raising(ExitsWhenPickled),
    "no name": raising(OfNameless),
    "liar": raising(Liar),
    "no class": raising(Classless),
    "frozen": raising(Frozen),
    "foreign index": raising(Indexed),
    "shy EnvError": raising(lambda: ShyEnvError("mine")),
    "mute PolicyError": raising(lambda: MutePolicyError("mine")),
    "StopIteration": raising(lambda: StopIteration(7)),
    "EnvError": raising(lambda: errors.EnvError("mine", env_index=7)),
    "BadEnvOutput": raising(lambda: errors.BadEnvOutput("mine")),
    "UnsupportedEnv": raising(lambda: errors.UnsupportedEnv("mine")),
    "PolicyError": raising(lambda: errors.PolicyError("mine")),
    "BadPolicyOutput": raising(lambda: errors.BadPolicyOutput("mine")),
    "HookError": raising(lambda: errors.HookError("mine")),
    "WorkerDied": raising(lambda: errors.WorkerDied("mine")),
    "CollectorClosed": raising(lambda: errors.CollectorClosed("mine")),
    "inner collector": inner_collector,
}
BASES: dict[str, Callable[[], NoReturn]] = {
    "SystemExit": raising(lambda: SystemExit(3)),
    "KeyboardInterrupt": raising(KeyboardInterrupt),
    "GeneratorExit": raising(GeneratorExit),
    "BaseException": raising(OwnBase),
}
ALL = {**EXCEPTIONS, **BASES}
T = 16  # rows of a rollout
ROWS = (
    3,
    8,
    14,
)  # in which something is raised; not in the first, after which no row is left to be cut


class Troubled(OracleEnv):
    """Raises all of ``ALL`` in turn, in its second environment.

    Args:
        on: "step" or "reset".
    """

    def __init__(self, path: str, first: int, on: str) -> None:
        self.on, self.left, self.done = on, list(ALL.values()), -1
        super().__init__(path, first, 2)

    def _pass(self, on: str, honest: Any) -> Any:
        if on == self.on and self.number == 1 and self.left and self._is_due(on):
            self.done = self._now[4]
            self.left.pop(0)()
        return honest

    def _is_due(self, on: str) -> bool:
        total = self._now[4]
        return total > self.done and (on == "reset" or total % T in ROWS)
