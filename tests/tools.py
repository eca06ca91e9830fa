"""Small helpers that several test files share."""

from __future__ import annotations

import re
import resource
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from muster import Collector, CollectorStats
from muster.collectors.ledger import FrameTerms
from muster.testing import ChainEnv, CountingEnv


def stable(value: Any) -> str:
    """What a parameter is called in every process: without the address of an object."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


@contextmanager
def files_limited_to(size: int) -> Iterator[None]:
    """No file may grow beyond ``size``: the kernel's own way to run out of space."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def counting(length: int = 3, **options: Any) -> Callable[[], CountingEnv]:
    """A factory of counting environments."""
    return partial(CountingEnv, length, **options)


def recorded(make: Callable[..., Any]) -> tuple[Callable[[], Any], list[Any]]:
    """``make`` (called with the number of the environment if it takes one), and the list of what it
    has made.
    """
    made: list[Any] = []
    numbered = (
        getattr(make, "__code__", None) is not None and make.__code__.co_argcount > 0
    )

    def factory() -> Any:
        made.append(make(len(made)) if numbered else make())
        return made[-1]

    return factory, made


def lengths(*each: int) -> Callable[[], Any]:
    """Counting environments with episodes of these lengths, environment by environment."""
    return recorded(lambda i: CountingEnv(each[i]))[0]


def column(batch: Any, *key: str) -> list[Any]:
    """A column as nested lists, without the trailing dimension of flags and rewards."""
    value = batch[key]
    last = key[-1]
    flat = last in ("reward", "done", "terminated", "truncated", "step_count")
    return (value.squeeze(-1) if flat else value).tolist()


def same(a: Any, b: Any) -> bool:
    """Two columns are equal; NaN equals NaN."""
    if torch.is_tensor(a):
        return (
            a.shape == b.shape
            and a.dtype == b.dtype
            and bool(torch.isclose(a, b, 0, 0, equal_nan=True).all())
        )
    return list(a) == list(b)


def assert_same(a: Any, b: Any, ignore: tuple[Any, ...] = ()) -> None:
    """Two batches have the same columns with the same values."""
    keys = set(a.keys(True, True)) - set(ignore)
    assert keys == set(b.keys(True, True)) - set(ignore)
    wrong = [key for key in keys if not same(a.get(key), b.get(key))]
    assert not wrong, f"columns differ: {wrong}"


def collect(env: Any, policy: Any = None, *, batches: int = 1, **options: Any) -> Any:
    """``batches`` batches joined in time."""
    with Collector(env, policy, **options) as collector:
        return joined(collector, batches)


def joined(collector: Collector, batches: int) -> Any:
    parts = [collector.rollout() for _ in range(batches)]
    return torch.cat([part.clone() for part in parts], parts[0].names.index("time"))


def assert_accounted(collector: Collector) -> None:
    """Every step that was executed is delivered, discarded or in flight."""
    assert_balanced(collector.stats())


def assert_balanced(stats: CollectorStats, *, in_flight: int | None = None) -> None:
    """The equation of the ledger holds, no term is negative, and so many steps are in flight (None:
    any number).
    """
    assert is_balanced(stats), stats
    assert in_flight in (None, stats.in_flight), stats


def is_balanced(stats: CollectorStats) -> bool:
    """Whether the equation of the ledger holds, and no term is negative."""
    discarded = Counter(stats.discarded)
    return terms_balance(
        FrameTerms(stats.executed, stats.frames, discarded, stats.in_flight)
    )


def terms_balance(terms: FrameTerms) -> bool:
    """Whether every step that was executed is delivered, discarded or in flight."""
    discarded = terms.discarded.values()
    parts = [terms.delivered, *discarded, terms.in_flight]
    return min(parts) >= 0 and terms.executed == sum(parts)


def assert_chain(batch: Any, ends: int = 5) -> None:
    """Every row of a ``ChainEnv`` batch follows from its own observation and action, and rows
    follow each other.

    Where an episode was cut (``max_frames_per_traj``, a fault), ``truncated`` may be set besides.
    """
    obs, action, after = (
        batch["observation"].numpy(),
        batch["action"].numpy(),
        batch["next"],
    )
    expected = ChainEnv(ends).follow(obs, action)
    assert (after["observation"].numpy() == expected[0]).all()
    assert (after["reward"].numpy()[..., 0] == expected[1]).all()
    assert (after["terminated"].numpy()[..., 0] == expected[2]).all()
    assert (after["truncated"].numpy()[..., 0] >= expected[3]).all()
    done = after["done"][..., 0]
    assert torch.equal(done, (after["terminated"] | after["truncated"])[..., 0])
    assert not any(batch[flag].any() for flag in ("done", "terminated", "truncated"))
    going_on = ~done[..., :-1]
    assert torch.equal(
        after["observation"][..., :-1, :][going_on],
        batch["observation"][..., 1:, :][going_on],
    )
    begins = batch["observation"][..., 1:, :][done[..., :-1]]
    assert (begins[..., 1] == 0).all()
    ids = batch["collector", "traj_ids"]
    assert torch.equal(ids[..., 1:] != ids[..., :-1], done[..., :-1])


class Stopper:
    """An interruptor that stops at its n-th question."""

    def __init__(self, at: int) -> None:
        self.left = at

    def collection_stopped(self) -> bool:
        self.left -= 1
        return self.left == 0


def push(episodes: Any, batch: Any, envs: Any = None) -> Any:
    """Add a batch to ``WholeEpisodes``, and return the groups that are complete then."""
    episodes.add(batch, envs)
    return episodes.groups()
