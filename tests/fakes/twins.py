"""A collector without and with ``capture``, side by side: everything must be equal, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from muster import Collector
from tests.fakes.device_rows import on_device
from tests.tools import assert_accounted, assert_same

B = 4


class Kept:
    """A factory that keeps the environments that it makes."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self.envs: list[Any] = []

    def __call__(self) -> Any:
        self.envs.append(self._make())
        return self.envs[-1]


class Twins:
    """The same collector without and with ``capture``.

    Args:
        make: makes the environments, or several do.
        policy: makes the policy.
        second: options of the second one only.
        rows: makes the adapters of environments on the CPU; None: as a collector does.
        options: of both.
    """

    def __init__(
        self,
        make: Callable[[], Any] | list[Callable[[], Any]],
        policy: Callable[[], Any] = lambda: None,
        *,
        capture: Any = True,
        second: dict[str, Any] | None = None,
        rows: Any = on_device,
        **options: Any,
    ) -> None:
        given = {"frames_per_batch": 8 * B, "seed": 3, **options}
        self.policies = [policy(), policy()]
        several = isinstance(make, list)
        makes = make if isinstance(make, list) else [make]
        self.kept = [[Kept(each) for each in makes] for _ in range(2)]
        made: list[Any] = self.kept
        if rows is not None:
            made = [[rows(each) for each in kept] for kept in self.kept]
        envs = made if several else [first for (first,) in made]
        self.plain = Collector(envs[0], self.policies[0], **given)
        given |= second or {}
        self.recorded = Collector(envs[1], self.policies[1], capture=capture, **given)
        self.both = [self.plain, self.recorded]

    def __enter__(self) -> Twins:
        return self

    def __exit__(self, *_: object) -> None:
        for collector in self.both:
            collector.shutdown()

    def do(self, call: Callable[[Collector], Any]) -> list[Any]:
        """Do the same with both."""
        return [call(collector) for collector in self.both]

    def alike(self, batches: int = 5) -> None:
        """The next batches are equal, and so is everything that is known of them."""
        for number in range(batches):
            a, b = self.do(Collector.next)
            assert_same(a, b)
            del a, b  # their slots are the next ones
            self.same_around(f"batch {number}")

    @contextmanager
    def keeping(self, batches: int) -> Iterator[None]:
        """The next batches are kept, and what is done meanwhile does not change them."""
        kept = [self.do(Collector.next) for _ in range(batches)]
        copies = [b.clone() for _, b in kept]
        yield
        for (a, b), copied in zip(kept, copies, strict=True):
            assert_same(a, b)
            assert_same(copied, b)

    def same_around(self, where: str = "") -> None:
        """Records, counters, the environments' own state and all random numbers are equal."""
        here, there = (collector.episodes.columns() for collector in self.both)
        for x, y in zip(here, there, strict=True):
            assert x.tobytes() == y.tobytes(), where
        stats = self.do(Collector.stats)
        for name in (
            "frames",
            "executed",
            "discarded",
            "episodes",
            "return_mean",
            "policy_lag",
        ):
            assert getattr(stats[0], name) == getattr(stats[1], name), (name, where)
        self.do(assert_accounted)
        for one, other in zip(*self.kept, strict=True):
            states = [state_of(kept.envs[-1]) for kept in (one, other)]
            assert states[0].keys() == states[1].keys()
            for name, value in states[0].items():
                assert torch.equal(value, states[1][name]), (name, where)
        for one, other in zip(
            *(collector._engine.groups for collector in self.both), strict=True
        ):
            states = [group.rng.state_dict() for group in (one, other)]
            for name in ("torch", "cuda"):
                if states[0][name] is not None:
                    assert torch.equal(states[0][name], states[1][name]), (name, where)

    @property
    def replays(self) -> int:
        """Number of rollouts that were replays."""
        capture = self.recorded.stats().capture
        assert capture is not None
        return capture.replays


def state_of(env: Any) -> dict[str, torch.Tensor]:
    """The tensors of an environment that are attributes, and the state of its generator."""
    found = {}
    for name, value in vars(env).items():
        if torch.is_tensor(value):
            found[name] = value.clone()
        if isinstance(value, torch.Generator):
            found[name] = value.get_state()
    return found
