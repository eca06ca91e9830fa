"""Pickling for workers: what works, and how what does not is named."""

from __future__ import annotations

import enum
import functools
import gc
import io
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch

from muster.errors import BadOption
from muster.restore.pickling import dumps, loads, packed, unpickle
from muster.testing import CountingEnv

LOCK = threading.Lock()


class Sim:
    def __init__(self) -> None:
        self.size = 3
        self.lock = threading.Lock()

    def make(self) -> CountingEnv:
        return CountingEnv(self.size)


class Slotted:
    __slots__ = ("fine", "lock", "missing")

    def __init__(self) -> None:
        self.fine, self.lock = 1, threading.Lock()


class Stubborn:
    def __reduce__(self) -> Any:
        raise ValueError("not me")


class Wrapping:
    def __init__(self) -> None:
        self.inner = Stubborn()

    def __reduce__(self) -> Any:
        raise RuntimeError("something inside failed")


def refusal(obj: Any, what: str = "create_env_fn[2]") -> str:
    with pytest.raises(BadOption) as caught:
        dumps(obj, what)
    assert caught.value.__cause__ is not None
    return str(caught.value)


def test_lambdas_closures_and_local_classes_come_back() -> None:
    length = 4

    class Local(CountingEnv):
        def double(self) -> int:
            return 2 * self.length

    for make in (
        lambda: Local(length),
        functools.partial(Local, length),
        Sim.make.__get__(Local(length)),
    ):
        again = loads(dumps(make, "create_env_fn"), "create_env_fn")
        if make is not again and not hasattr(make, "__self__"):
            assert again().double() == 8
    weights = torch.arange(3.0)
    assert loads(dumps(lambda: weights, "policy"), "policy")().tolist() == [
        0.0,
        1.0,
        2.0,
    ]
    array = np.arange(3)
    assert loads(dumps(array, "x"), "x").tolist() == [0, 1, 2]


def made_by_functools() -> Any:
    """A class as PettingZoo's template has it, and functions, all unknown to other processes."""

    @functools.cache
    def fibonacci(n: int) -> int:
        return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

    @functools.singledispatch
    def kind(value: Any) -> str:
        return "other"

    @kind.register
    def _(value: int) -> str:
        return "int"

    class Local:
        @functools.lru_cache(maxsize=3, typed=True)  # noqa: B019 (what users write)
        def space(self, agent: str) -> list[str]:
            return [agent]

        @functools.cached_property
        def table(self) -> list[int]:
            return [fibonacci(30)]

        @functools.singledispatchmethod
        def named(self, value: Any) -> str:
            return kind(value)

        @named.register
        def _(self, value: str) -> str:
            return "text"

    return Local


def test_what_functools_makes_of_functions_comes_back() -> None:
    program = """if True:
        import sys
        from muster.restore.pickling import loads

        cls = loads(sys.stdin.buffer.read(), "x")
        made = cls()
        assert made.space("a") is made.space("a") == ["a"]
        assert cls.space.cache_parameters() == {"maxsize": 3, "typed": True}
        assert cls.space.cache_info().hits == 1
        assert made.table is made.table == [832040]
        print(*map(made.named, [1, 2.0, "three"]))
    """
    Local = made_by_functools()
    Local().space("a")
    Local().named(1)
    told = subprocess.run(
        [sys.executable, "-c", program],
        input=dumps(Local, "x"),
        capture_output=True,
        timeout=120,
        check=True,
    )
    assert told.stdout.split() == [b"int", b"other", b"text"]


def test_a_cached_function_of_a_module_stays_the_same() -> None:
    without_name = functools.lru_cache(functools.partial(int, base=2))
    assert loads(dumps(without_name, "x"), "x")("11") == 3
    assert loads(dumps(cached_here, "x"), "x") is cached_here


@functools.lru_cache
def cached_here() -> None:
    """Of a module."""


def test_a_closure_variable_is_named_with_the_attribute_that_fails() -> None:
    sim = Sim()
    assert refusal(lambda: CountingEnv(sim.size)) == (
        "create_env_fn[2]: closure variable 'sim' -> attribute 'lock' is a _thread.lock, which cannot be pickled. "
        "Make it inside the function instead."
    )


@pytest.mark.parametrize(
    ("obj", "where"),
    [
        (
            functools.partial(CountingEnv, 3, truncate=LOCK),
            "argument 'truncate' of the partial is a _thread.lock",
        ),
        (
            functools.partial(CountingEnv, LOCK),
            "argument 0 of the partial is a _thread.lock",
        ),
        (
            Sim().make,
            "the object it is a method of -> attribute 'lock' is a _thread.lock",
        ),
        ({"a": [1, (2, LOCK)]}, "item 'a' -> item 1 -> item 1 is a _thread.lock"),
        (Slotted(), "attribute 'lock' is a _thread.lock"),
        ([io.StringIO, Stubborn()], "item 1 is a "),
    ],
    ids=["keyword", "argument", "method", "containers", "slots", "stubborn"],
)
def test_the_culprit_is_found_wherever_it_hides(obj: Any, where: str) -> None:
    assert f"create_env_fn[2]: {where}" in refusal(obj)


def test_defaults_globals_attributes_and_nested_functions_are_searched() -> None:
    lock = threading.Lock()

    def with_default(a: int, lock: Any = lock) -> int:
        return a

    def with_keyword(*, guard: Any = lock) -> None: ...

    def with_attribute() -> None: ...

    with_attribute.guard = lock  # type: ignore[attr-defined]

    def with_wrapped() -> None: ...

    with_wrapped.__wrapped__ = lambda: None  # type: ignore[attr-defined]
    with_wrapped.__defaults__ = ()
    assert "default of 'lock' is a _thread.lock" in refusal(with_default)
    assert "default of 'guard' is a _thread.lock" in refusal(with_keyword)
    assert "attribute 'guard' is a _thread.lock" in refusal(with_attribute)
    # A function of a notebook is pickled with the globals that it uses, also in a function within
    # it.
    space = {"LOCK": LOCK, "lock": LOCK, "np": np}
    exec("def make():\n    np.zeros(3)\n    return lambda: LOCK", space)
    make: Any = space["make"]
    make.__module__ = "__main__"
    assert "create_env_fn[2]: global 'LOCK' is a _thread.lock" in refusal(make)

    class Local:
        guard = lock

    assert "class attribute 'guard' is a _thread.lock" in refusal(Local)
    assert "base class 'Local' -> class attribute 'guard'" in refusal(
        type("Derived", (Local,), {})
    )
    assert "the function of the partial -> closure variable 'lock'" in refusal(
        functools.partial(lambda: lock)
    )


def test_a_reason_other_than_the_type_is_told() -> None:
    assert "item 0 is a " in (text := refusal([Stubborn()]))
    assert (
        "Stubborn, which cannot be pickled (ValueError: not me). Pass a function that makes it."
        in text
    )
    assert "attribute 'inner' is a " in (text := refusal(Wrapping()))
    assert "(ValueError: not me)" in text


def test_what_is_wrong_itself_needs_no_path() -> None:
    assert (
        refusal(LOCK, "policy")
        == "policy is a _thread.lock, which cannot be pickled. Pass a function that makes it."
    )


def test_the_search_survives_cycles_and_depth() -> None:
    cycle: dict[str, Any] = {"lock": LOCK}
    cycle["self"] = cycle
    assert "item 'lock' is a _thread.lock" in refusal({"cycle": cycle})
    back: dict[str, Any] = {}
    back["inner"] = [back, Stubborn()]
    assert "item 'inner' -> item 1 is a " in refusal(back)
    deep: Any = LOCK
    for _ in range(200):
        deep = [deep]
    assert refusal(deep).count("item 0") == 50


def test_what_does_not_come_back_says_so() -> None:
    with pytest.raises(
        BadOption,
        match="create_env_fn was pickled, but could not be unpickled in another process",
    ):
        loads(b"\x80\x05cno_such_module\nThing\n.", "create_env_fn")


# --- classes of the program -----------------------------------------------------------------------


class Refuses:
    """Is unpickled if ``may``."""

    may = False

    def __reduce__(self) -> Any:
        return made_if_allowed, ()


def made_if_allowed() -> Refuses:
    if not Refuses.may:
        raise ValueError("not now")
    return Refuses()


def local_class() -> type:
    """Return a class that travels with its attributes, like those of a script."""

    class Local:
        made = 0
        seen: list[int] = []  # noqa: RUF012 (of the class)

        def count(self) -> int:
            type(self).made += 1
            return self.made

    return Local


@pytest.mark.parametrize("pickled", [dumps, packed])
def test_a_class_that_is_known_here_stays_as_it_is(pickled: Any) -> None:
    """What it was when it was pickled does not count."""
    cls: Any = local_class()
    data = pickled(cls(), "it")
    seen = cls.seen
    method = cls.count
    cls.made = 5
    cls.later = 1
    again = loads(data, "it")
    assert type(again) is cls
    assert (cls.made, cls.later) == (5, 1)
    assert cls.seen is seen
    assert cls.count is method


def test_a_class_that_is_not_known_here_comes_with_its_attributes() -> None:
    cls: Any = local_class()
    cls.made = 5
    data = dumps(cls(), "it")
    cls = None
    gc.collect()  # as in another process, no class has the id now
    first = loads(data, "it")
    assert first.count() == 6
    second = loads(data, "it")  # now it is known
    assert type(second) is type(first)
    assert second.count() == 7


def test_enums_of_a_script_stay_as_they_are() -> None:
    class Colour(enum.Enum):
        RED = 1
        BLUE = 2

    data = dumps([Colour.RED, Colour], "it")
    Colour.note = "mine"  # type: ignore[attr-defined]
    red, again = loads(data, "it")
    assert red is Colour.RED
    assert again is Colour
    assert Colour.note == "mine"  # type: ignore[attr-defined]


def test_a_class_whose_pickle_could_not_be_read_is_complete_the_next_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its attributes come last, after what could not be read."""

    class Local:
        part = Refuses()
        number = 3

    data = dumps([Local, Local()], "it")
    del Local
    gc.collect()
    with pytest.raises(BadOption, match="not now") as caught:
        loads(data, "it")  # the traceback keeps the class alive
    monkeypatch.setattr(Refuses, "may", True)
    cls, _ = loads(data, "it")
    assert cls.number == 3
    assert caught.value


def test_without_cloudpickles_private_names_objects_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MUSTER_PRIVATE_NAMES", "never")
    cls: Any = local_class()
    assert type(unpickle(dumps(cls(), "it"))) is cls
