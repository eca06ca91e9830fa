"""Whether a node's own thread hangs."""

from __future__ import annotations

from muster.cluster.attention import Attention
from muster.cluster.session import BEAT_S
from muster.workers.worker_pool import STOPPED_S
from tests.waits import wait_for_time, wait_until

LIMIT_S = 0.2


def test_a_thread_that_is_not_renewed_hangs():
    attention = Attention("node")
    assert attention.failure() is None
    attention.limit([LIMIT_S, 0.1])
    error = wait_until(attention.failure)
    assert "node" in str(error)
    attention.renew()
    assert attention.failure() is None


def test_time_in_which_nobody_could_ask_is_no_hang():
    """The process was stopped: the thread that asks, too."""
    attention = Attention("node")
    attention.limit([BEAT_S + LIMIT_S])
    wait_for_time(BEAT_S + STOPPED_S + 2 * LIMIT_S)
    assert attention.failure() is None
    wait_until(attention.failure)


def test_a_longer_limit_ends_with_its_context():
    attention = Attention("node")
    attention.limit([LIMIT_S])
    with attention.at_least(60.0):
        wait_for_time(2 * LIMIT_S)
        assert attention.failure() is None
    assert attention.failure() is None
    wait_until(attention.failure)


def test_no_limit_stays_none():
    attention = Attention("node")
    attention.limit([LIMIT_S, None])
    with attention.at_least(LIMIT_S):
        wait_for_time(2 * LIMIT_S)
        assert attention.failure() is None
    wait_for_time(2 * LIMIT_S)
    assert attention.failure() is None
