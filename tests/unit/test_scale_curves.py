"""How the points of a scale curve are judged."""

import pytest
import torch

from benchmarks.scale import judged
from benchmarks.scale_curves import CURVES, doublings
from benchmarks.scale_measure import Subject, growth, least, measure, slot_kib
from muster import Collector
from muster.testing import CountingEnv


def point(x, cost, **more):
    return {"x": x, "cost_us": cost, **more}


def test_growth_is_that_of_one_doubling():
    (first, second) = growth([point(1, 1.0), point(2, 3.0), point(8, 12.0)], "cost_us")
    assert first == (3.0, 2.2, 2)
    assert second == (2.0, 2.2, 8)


def test_where_the_bare_loop_more_than_doubles_as_much_more_is_allowed():
    ((times, allowed, _),) = growth(
        [point(1, 2.0, of_bare=2.0), point(2, 6.0, of_bare=2.0)], "cost_us"
    )
    assert times == 3.0
    assert allowed == pytest.approx(3.3)


@pytest.mark.parametrize(
    ("costs", "within"), [((1.0, 2.19), True), ((1.0, 2.21), False)]
)
def test_a_doubling_beyond_the_limit_is_a_cliff(costs, within):
    points = [point(x, cost) for x, cost in zip((1, 2), costs, strict=True)]
    assert judged(CURVES["envs"], {"points": points})["within"] is within


def test_a_slot_that_more_than_doubles_is_a_cliff_unless_it_is_small():
    for scale, within in ((1.0, True), (100.0, False)):
        points = [point(1, 1.0, slot_kib=scale), point(2, 1.0, slot_kib=3 * scale)]
        assert judged(CURVES["envs"], {"points": points})["within"] is within


def test_the_cheaper_points_of_two_measurements_count():
    assert least([point(1, 1.0), point(2, 9.0)], [point(1, 2.0), point(2, 3.0)]) == [
        point(1, 1.0),
        point(2, 3.0),
    ]


def test_sizes_double_up_to_the_last():
    assert doublings(1, 8) == (1, 2, 4, 8)
    assert doublings(1, 10) == (1, 2, 4, 8, 10)


def test_the_least_time_of_all_rounds_counts_or_the_mean_of_work_ahead():
    for ahead, cost in ((False, 3e6), (True, 4e6)):
        times = iter([0.0, 1.0] * 3 + [0.0, 5.0, 0.0, 3.0, 0.0, 4.0])
        subject = Subject(
            1, lambda: None, 2, clock=lambda times=times: next(times), ahead=ahead
        )
        assert measure([subject], rounds=3, seconds=0.0) == [
            {"x": 1, "cost_us": cost, "us_per_frame": cost / 2}
        ]


def test_the_memory_of_a_slot_is_counted_once():
    whole = torch.zeros(4096)
    with Collector([CountingEnv] * 4, None, frames_per_batch=4096, seed=0) as collector:
        batch = collector.rollout()
        size = sum(tensor.nbytes for tensor in batch.flatten_keys().values()) / 2**10
        assert size < 1.2 * slot_kib(batch) < 1.5 * size
    assert slot_kib(type(batch)({"a": whole, "b": whole[1:]}, [])) == 16.0
