"""Slots of the main process that adopt the memory in which a node's rollouts have arrived."""

from __future__ import annotations

import numpy as np
import pytest

from muster.cluster.lane_runs import LaneRuns
from muster.errors import WorkerDied
from muster.memory.slots import Layout, Slot
from muster.memory.specs import Column
from muster.rollout.request import RolloutRequest
from muster.testing import ChainEnv
from tests.fakes.queue_links import QueueCarrier, QueueCollector
from tests.tools import assert_accounted, assert_chain, assert_same

COLUMNS = (Column(("observation",), (3,), np.dtype(np.float32), carry=True),)


def requests(groups, slot):
    return [
        (RolloutRequest(number, group, lane, "policy"), slot)
        for number, (lane, group) in enumerate(groups.items())
    ]


class TestRuns:
    def runs(self, groups, slot, **options):
        made = LaneRuns([2, 3], apart=False, comes_back=True, adopts=True, **options)
        return made, *made.of(requests(groups, slot))

    def test_of_the_whole_slot_expect_nothing_and_let_it_adopt(self):
        slot = Slot(Layout(T=4, B=2, columns=COLUMNS, lanes=2))
        made, (run,), expected = self.runs({0: 2, 1: 3}, slot)
        assert not expected
        block = np.ones(slot.block.size, np.uint8)
        made.has_arrived(run.tag, block)
        assert slot.block is block
        made.has_arrived(run.tag, np.zeros(slot.block.size, np.uint8))  # only once
        assert slot.block is block

    def test_of_some_lanes_are_received_in_them(self):
        slot = Slot(Layout(T=4, B=2, columns=COLUMNS, lanes=4))
        made, (run,), expected = self.runs({1: 2, 2: 3}, slot)
        (memory,) = expected.values()
        assert np.shares_memory(memory, slot.lanes[1].arrays["observation",])
        assert np.shares_memory(memory, slot.lanes[2].arrays["observation",])
        made.has_arrived(run.tag, memory)
        assert not slot.adopts

    def test_of_a_lost_session_adopt_nothing(self):
        slot = Slot(Layout(T=4, B=2, columns=COLUMNS, lanes=2))
        made, (run,), _ = self.runs({0: 2, 1: 3}, slot)
        made.forget()
        made.has_arrived(run.tag, np.ones(slot.block.size, np.uint8))
        assert not slot.adopts


def collector(carrier, count=1, **options):
    return QueueCollector(
        [ChainEnv] * count,
        carrier=carrier,
        num_envs=2,
        frames_per_batch=64,
        seed=0,
        **options,
    )


class TestCollector:
    def test_batches_are_those_of_copies(self):
        seen = []
        for gives_memory in (True, False):
            carrier = QueueCarrier(gives_memory=gives_memory)
            with collector(carrier) as ours:
                batches = [ours.next() for _ in range(4)]
                link = carrier.links[0][0]
                assert not link.expected
                assert ours._engine.source.ahead is None or not gives_memory
                assert_accounted(ours)
            seen.append(batches)
        for one, other in zip(*seen, strict=True):
            assert_same(one, other)
            assert_chain(one)

    def test_of_several_nodes_are_copied_together(self):
        with collector(QueueCarrier(gives_memory=True), 2, sync=True) as ours:
            batch = ours.next()
            assert batch.shape[0] == 2
            assert_chain(batch)

    def test_rollout_that_does_not_fit_loses_the_node(self):
        carrier = QueueCarrier(gives_memory=True)
        with collector(carrier, on_failure="raise") as ours:
            ours.next()
            link = carrier.links[0][0]
            receive = link.receive

            def cut_short():
                received = receive()
                if received.block is None:
                    return received
                return type(received)(
                    received.message, received.tag, received.block[1:]
                )

            link.receive = cut_short
            with pytest.raises(WorkerDied, match="does not fit: a slot of"):
                for _ in range(3):
                    ours.next()
            assert_chain(ours.next())  # of its successor
            assert_accounted(ours)
