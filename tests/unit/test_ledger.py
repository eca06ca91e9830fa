"""The ledger: ``executed = delivered + discarded + in flight`` after every call of every kind of
collector.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest

from muster import (
    AsyncCollector,
    Collector,
    DistributedCollector,
    MultiAsyncCollector,
    MultiSyncCollector,
)
from muster.collectors.ledger import Ledger
from muster.errors import EnvError
from muster.testing import CountingEnv, FaultyEnv
from tests.tools import terms_balance

IN_THREADS = {"backend": "threads"}
KINDS = {
    "one process": (Collector, lambda env: [env, env], {}),
    "sync": (MultiSyncCollector, lambda env: [env, env], IN_THREADS),
    "async": (MultiAsyncCollector, lambda env: [env, env], IN_THREADS),
    "one worker": (AsyncCollector, lambda env: env, IN_THREADS),
    "nodes": (
        DistributedCollector,
        lambda env: [env, env],
        {"launcher": "mp", "sync": True},
    ),
    "nodes, async": (DistributedCollector, lambda env: [env, env], {"launcher": "mp"}),
}
CALLS = {
    "next": lambda c: next(iter(c)),
    "collect steps": lambda c: c.collect(n_step=12),
    "collect episodes": lambda c: c.collect(n_episode=3),
    "collect episodes and keep others": lambda c: c.collect(
        n_episode=3, surplus="keep"
    ),
    "collect with random actions": lambda c: c.collect(n_step=8, random=True),
    "rollout": lambda c: c.rollout(),
    "reset": lambda c: c.reset(),
    "seed": lambda c: c.set_seed(3),
    "save": lambda c: c.state_dict(),
    "load": lambda c: c.load_state_dict(c.state_dict(), trust=True),
    "close": lambda c: c.shutdown(),
}


def assert_terms_balance(ledger: Ledger) -> None:
    terms = ledger.terms()
    assert terms_balance(terms), terms


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "more", [{}, {"trajs_per_batch": 2}, {"init_random_frames": 16}], ids=str
)
def test_the_equation_holds_after_every_call(kind, more):
    cls, envs, options = KINDS[kind]
    calls = dict(CALLS)
    if more.get("trajs_per_batch"):
        calls = {name: call for name, call in calls.items() if "steps" not in name}
        calls.pop("collect with random actions")
    with cls(
        envs(lambda: CountingEnv(5)), frames_per_batch=8, seed=0, **options, **more
    ) as c:
        assert_terms_balance(c._engine.ledger)
        for call in calls.values():
            call(c)
            assert_terms_balance(c._engine.ledger)
        assert c._engine.ledger.terms().in_flight == 0


@pytest.mark.parametrize("kind", ["one process", "sync"])
def test_the_equation_holds_after_an_error(kind):
    cls, envs, options = KINDS[kind]
    faulty = partial(FaultyEnv, 7, error=partial(ValueError, "no"), length=5)
    with cls(envs(faulty), frames_per_batch=8, seed=0, **options) as c:
        with pytest.raises(EnvError):
            for _ in range(8):
                c.next()
                assert_terms_balance(c._engine.ledger)
        assert_terms_balance(c._engine.ledger)
        c.shutdown(raise_on_error=False)
        assert_terms_balance(c._engine.ledger)


def test_terms_have_names():
    with Collector(lambda: CountingEnv(5), frames_per_batch=4) as c:
        c.next()
        terms = c._engine.ledger.terms()
    assert (terms.executed, terms.delivered, terms.in_flight) == (4, 4, 0)
    assert terms.discarded == Counter()
