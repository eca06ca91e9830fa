"""Nodes that come later than their collector, go, and come back; nodes are threads of this process."""

from __future__ import annotations

import pickle
import threading
import time
from contextlib import suppress
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch

from muster import MultiAsyncCollector, Restart
from muster.cluster.node_main import NodeMain
from muster.errors import BadOption, EnvError, WorkerDied
from tests.fakes.late_nodes import GatedCarrier, elastic, gated, nodes_of, second_waits
from tests.fakes.queue_links import JOIN_S, QueueCollector, net, two_beats
from tests.tools import assert_accounted, assert_balanced
from tests.waits import wait_until
from tests.warned import warnings_are_errors

pytestmark = pytest.mark.timeout(180)


def contributed(collector, batches, node):
    """Take batches until a node has more frames than now."""
    before = collector.stats().workers[node].frames
    for _ in range(2000):
        batch = next(batches)
        if collector.stats().workers[node].frames > before:
            return batch
    raise AssertionError(f"node {node} has given nothing: {collector.stats().workers}")


def states(collector):
    return [worker.state for worker in collector.stats().workers]


def built_late(path):
    wait_until(path.exists)
    return gymnasium.make("CartPole-v1")


class TestBeginning:
    def test_a_collector_begins_with_those_that_are_there(self):
        carrier = GatedCarrier(3, 1)
        with elastic(carrier) as collector:
            stats = collector.stats()
            assert [(w.state, w.phase, w.node) for w in stats.workers][::2] == [
                ("joining", "join", n) for n in "02"
            ]
            assert stats.workers[1].state == "working"
            assert stats.nodes == 1
            batches = iter(collector)
            assert [
                next(batches) is not None and nodes_of(collector) for _ in range(4)
            ] == [{1}] * 4

    def test_who_comes_later_is_used(self):
        carrier = GatedCarrier(3, 1)
        with elastic(carrier) as collector:
            batches = iter(collector)
            next(batches)
            carrier.gates[2].set()
            contributed(collector, batches, 2)
            assert nodes_of(collector) == {2}
            assert collector.stats().nodes == 2
            carrier.gates[0].set()
            contributed(collector, batches, 0)
            contributed(collector, batches, 1)
            assert states(collector) == ["working"] * 3
            assert collector.stats().restarts == 0
        assert_accounted(collector)

    def test_who_comes_while_a_batch_is_waited_for_is_ordered_from_at_once(
        self, tmp_path
    ):
        carrier = GatedCarrier(2, 0)
        with elastic(
            carrier, [gated(tmp_path / "never"), "CartPole-v1"], num_envs=1
        ) as collector:
            opening = threading.Timer(0.5, carrier.gates[1].set)
            opening.start()
            next(iter(collector))
            assert nodes_of(collector) == {1}
            (tmp_path / "never").touch()

    def test_as_many_are_waited_for_as_were_asked_for(self):
        carrier = GatedCarrier(3, 1)
        opening = threading.Timer(0.5, carrier.gates[0].set)
        opening.start()
        with elastic(carrier, min_nodes=2) as collector:
            assert states(collector) == ["working", "working", "joining"]

    def test_the_data_is_that_of_a_collector_whose_nodes_were_all_there(self):
        def first_of(collector, node):
            for batch in collector:
                if collector._engine.last.contributors == [node]:
                    return batch
            raise AssertionError

        with MultiAsyncCollector(
            ["CartPole-v1"] * 2, None, num_envs=2, frames_per_batch=20, seed=7
        ) as collector:
            expected = first_of(collector, 1)
        carrier = GatedCarrier(2, 0)
        with elastic(carrier, seed=3) as collector:
            collector.set_seed(7)
            carrier.gates[1].set()
            got = first_of(collector, 1)
        for key in ("observation", "action", ("next", "reward")):
            assert torch.equal(got[key], expected[key])

    def test_who_comes_acts_with_the_newest_weights(self):
        carrier, policy = GatedCarrier(2, 0), net()
        with elastic(carrier, policy=policy, track_policy_version=True) as collector:
            batches = iter(collector)
            for _ in range(3):
                next(batches)
                collector.update_policy_weights_()
            carrier.gates[1].set()
            batch = contributed(collector, batches, 1)
            assert (
                batch["collector", "policy_version"] == collector.policy_version
            ).all()

    def test_total_frames_does_not_wait_for_nodes(self):
        carrier = GatedCarrier(3, 2)
        with elastic(carrier, total_frames=100) as collector:
            assert [batch.numel() for batch in collector] == [20] * 5
        assert_accounted(collector)

    def test_nobody_is_said_to_fall_behind_who_was_not_there(self):
        carrier = GatedCarrier(2, 0)
        with elastic(carrier) as collector, warnings_are_errors():
            batches = iter(collector)
            for _ in range(40):
                next(batches)
            carrier.gates[1].set()
            contributed(collector, batches, 1)
            for _ in range(8):
                next(batches)

    @pytest.mark.parametrize("kind", ["sync", "async"])
    @pytest.mark.parametrize("inference", ["worker", "server"])
    def test_nodes_with_several_workers(self, kind, inference):
        carrier = GatedCarrier(2, 1)
        options = {
            "collector_class": kind,
            "num_workers_per_collector": 2,
            "inference": inference,
        }
        with elastic(
            carrier, policy=net(), on_failure="restart", **options
        ) as collector:
            batches = iter(collector)
            next(batches)
            assert nodes_of(collector) == {1}
            carrier.gates[0].set()
            contributed(collector, batches, 1)
            carrier.take(1)
            contributed(collector, batches, 0)
            assert nodes_of(collector) == {0}

    def test_whole_episodes_come_from_those_that_are_there(self):
        carrier = GatedCarrier(2, 0)
        with elastic(carrier, trajs_per_batch=2) as collector:
            batches = iter(collector)
            next(batches)
            assert nodes_of(collector) == {0}
            carrier.gates[1].set()
            contributed(collector, batches, 1)


class TestLosing:
    @pytest.mark.parametrize("kind", ["single", "sync"])
    def test_others_do_what_a_lost_node_had_to_do(self, kind):
        carrier = GatedCarrier(2, 0, 1)
        options = {
            "collector_class": kind,
            "num_workers_per_collector": 1 + (kind == "sync"),
            "frames_per_batch": 40,
        }
        with elastic(
            carrier, total_frames=4000, min_nodes=2, on_failure="restart", **options
        ) as collector:
            batches = iter(collector)
            for _ in range(5):
                next(batches)
            carrier.take(0)
            assert sum(1 for _ in batches) == 95  # although node 0 does not come back
            assert states(collector)[0] == "joining"
        stats = collector.stats()
        assert stats.frames == 4000
        assert_balanced(stats)

    def test_halves_of_a_lost_node_s_batches_are_discarded(self, tmp_path):
        carrier = GatedCarrier(2, 0, 1)
        factories = [second_waits(tmp_path), "CartPole-v1"]
        options = {
            "collector_class": "sync",
            "num_workers_per_collector": [2, 1],
            "num_envs": 1,
            "min_nodes": 2,
        }
        with elastic(carrier, factories, on_failure="restart", **options) as collector:
            batches, counters = iter(collector), collector._engine.source.pool.counters

            def halves():
                next(batches)
                return counters[0].in_flight + counters[1].in_flight >= 20

            wait_until(halves)  # two of 10 steps
            carrier.take(0)
            wait_until(
                lambda: (
                    next(batches) is not None
                    and states(collector)[:2] == ["joining"] * 2
                )
            )
            next(batches)
            assert counters[0].in_flight == counters[1].in_flight == 0
            assert collector.stats().discarded["worker_died"] >= 20
            (tmp_path / "go").touch()

    def test_who_comes_back_is_used_again(self):
        carrier = GatedCarrier(2, 0, 1)
        with elastic(carrier, on_failure="restart") as collector:
            batches = iter(collector)
            contributed(collector, batches, 1)
            carrier.take(1)
            for _ in range(10):
                next(batches)
            carrier.gates[1].set()
            contributed(collector, batches, 1)
            assert collector.stats().restarts == 1
        assert_accounted(collector)

    def test_a_node_that_was_alone_is_waited_for(self):
        carrier = GatedCarrier(2, 0)
        with elastic(carrier, on_failure="restart") as collector:
            batches = iter(collector)
            next(batches)
            carrier.take(0)
            opening = threading.Timer(0.5, carrier.gates[0].set)
            opening.start()
            for _ in range(3):
                next(batches)
            assert states(collector) == ["working", "joining"]

    def test_by_default_a_loss_is_raised_once(self):
        carrier = GatedCarrier(2, 0, 1)
        with elastic(carrier, min_nodes=2) as collector:
            next(iter(collector))
            carrier.take(0)
            with pytest.raises(WorkerDied, match="node 0"):
                for _ in collector:
                    pass
            batches = iter(collector)
            for _ in range(20):
                next(batches)
            carrier.gates[0].set()
            contributed(collector, batches, 0)
        assert_accounted(collector)


class TestWaiting:
    def test_a_node_that_does_not_come_in_time_is_raised_once_and_called_again(self):
        carrier = GatedCarrier(2, 0)
        with elastic(carrier, timeouts={"join": 1.0}) as collector:
            with pytest.raises(WorkerDied, match="has not come within 1 s"):
                for _ in collector:
                    pass
            batches = iter(collector)
            next(batches)
            carrier.gates[1].set()
            contributed(collector, batches, 1)
            assert carrier.asked[1] == 2

    def test_a_restart_budget_is_not_used_up_by_waiting(self):
        carrier = GatedCarrier(2, 0)
        with elastic(
            carrier, timeouts={"join": 0.2}, on_failure=Restart(max_restarts=1)
        ) as collector:
            batches = iter(collector)
            wait_until(lambda: next(batches) is not None and carrier.asked[1] > 4)
            carrier.gates[1].set()
            contributed(collector, batches, 1)
            assert collector.stats().restarts == 0

    def test_when_no_node_is_left_that_is_raised_at_the_deadline_every_time(self):
        carrier = GatedCarrier(2, 0)
        with elastic(
            carrier, timeouts={"join": 1.0}, on_failure="restart"
        ) as collector:
            next(iter(collector))
            carrier.take(0)
            for _ in range(2):
                begun = time.monotonic()
                with pytest.raises(WorkerDied, match="has not come within 1 s"):
                    for _ in collector:
                        pass
                assert time.monotonic() - begun < 20
            carrier.gates[1].set()
            batches = next_batches(collector, WorkerDied)
            assert nodes_of(collector) == {1}
            carrier.gates[0].set()
            contributed(collector, batches, 0)
        assert_accounted(collector)

    def test_a_node_that_does_not_come_in_time_is_dropped(self):
        carrier = GatedCarrier(2, 0)
        with elastic(carrier, timeouts={"join": 0.5}, on_failure="drop") as collector:
            batches = iter(collector)
            with pytest.warns(UserWarning, match="a worker is dropped"):
                wait_until(
                    lambda: (
                        next(batches) is not None and states(collector)[1] == "dropped"
                    )
                )
            assert states(collector) == ["working", "dropped"]
            next(batches)

    @pytest.mark.filterwarnings("ignore:a worker is dropped")
    def test_a_drop_of_the_last_one_is_seen_by_who_waits(self):
        carrier = GatedCarrier(2, 0)
        options = {"timeouts": {"join": 2.0}, "on_failure": "drop"}
        with elastic(carrier, **options) as collector:
            next(iter(collector))
            carrier.take(0)
            with pytest.raises(WorkerDied, match="all workers have been dropped"):
                wait_until(lambda: next(iter(collector)) is None)

    @pytest.mark.parametrize("on_failure", ["raise", "restart"])
    def test_what_needs_all_waits_for_them_so_long(self, on_failure):
        carrier = GatedCarrier(2, 0)
        with elastic(
            carrier, timeouts={"join": 1.0}, on_failure=on_failure
        ) as collector:
            next(iter(collector))
            with pytest.raises(WorkerDied, match="has not come within 1 s"):
                collector.state_dict()
            carrier.gates[1].set()
            assert len(collector.state_dict()["groups"]) == 2
            next(iter(collector))

    def test_what_does_not_need_all_does_not_wait(self):
        carrier = GatedCarrier(2, 0)
        with elastic(carrier) as collector:
            collector.reset()
            collector.set_seed(3)
            assert collector.fake_tensordict().shape == (2, 10)
            next(iter(collector))

    def test_it_ends_without_those_that_never_came(self):
        carrier = GatedCarrier(4, 3)
        with elastic(
            carrier, timeouts={"close": None}
        ) as collector:  # which would wait for ever
            next(iter(collector))


def next_batches(collector, error):
    """An iterator, after its first batch; errors before that are those of nodes that were called
    earlier.
    """
    while True:
        with suppress(error):
            batches = iter(collector)
            next(batches)
            return batches


def next_batch(collector):
    """Of the node that has not failed.

    Each call starts the other one again, which may fail before there is a batch.
    """
    while True:
        with suppress(EnvError):
            return next(iter(collector))


class TestUnlike:
    def test_another_number_of_environments_is_refused(self):
        vector = [
            partial(gymnasium.make_vec, "CartPole-v1", n, vectorization_mode="sync")
            for n in (2, 3)
        ]
        carrier = GatedCarrier(2, 0)
        with elastic(carrier, vector, num_envs=1, frames_per_batch=12) as collector:
            batches = iter(collector)
            next(batches)
            carrier.gates[1].set()
            with pytest.raises(
                EnvError,
                match=r"node 1 .* has come with 3 environments .* where 2 in \(2,\)",
            ):
                for _ in batches:
                    pass
            next_batch(collector)
        assert_accounted(collector)

    def test_other_observations_are_as_good_as_in_a_collector_that_began_with_them(
        self,
    ):
        carrier = GatedCarrier(2, 0)
        with elastic(carrier, ["CartPole-v1", "Acrobot-v1"], num_envs=1) as collector:
            batches = iter(collector)
            assert next(batches)["observation"].shape[-1] == 4
            carrier.gates[1].set()
            assert contributed(collector, batches, 1)["observation"].shape[-1] == 6
            assert "Acrobot" in repr(collector)

    def test_an_environment_that_cannot_be_made_is_an_error_of_its_own(self):
        carrier = GatedCarrier(2, 0)
        with elastic(carrier, ["CartPole-v1", "NoSuchEnv-v0"]) as collector:
            batches = iter(collector)
            next(batches)
            carrier.gates[1].set()
            with pytest.raises(EnvError, match="NoSuchEnv"):
                for _ in batches:
                    pass
            next_batch(collector)

    def test_who_is_late_does_not_keep_others_from_beginning(self, tmp_path):
        carrier = GatedCarrier(2, 0)
        opening = threading.Timer(1.0, (tmp_path / "go").touch)
        opening.start()
        slow = partial(built_late, tmp_path / "go")
        with elastic(
            carrier, [slow, slow], timeouts={"join": 0.2}, on_failure="restart"
        ) as collector:
            assert carrier.asked[1] == 1
            carrier.gates[1].set()
            contributed(collector, iter(collector), 1)

    def test_too_few_in_time_are_an_error(self):
        with pytest.raises(WorkerDied, match="has not come within"):
            elastic(
                GatedCarrier(2, 0),
                min_nodes=2,
                timeouts={"join": 0.2},
                on_failure="restart",
            )

    def test_failures_before_the_beginning_are_raised(self):
        with pytest.raises(EnvError, match="NoSuchEnv"):
            elastic(GatedCarrier(2, 1), ["CartPole-v1", "NoSuchEnv-v0"])


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "said"),
        [
            (
                {"min_nodes": 1, "sync": True},
                "a synchronous batch has the rollouts of all nodes",
            ),
            ({"min_nodes": 0}, "expected an integer of at least 1"),
            ({"min_nodes": True}, "expected an integer of at least 1"),
            ({"min_nodes": 3}, "min_nodes=3, but there are 2 nodes"),
            (
                {"collector_kwargs": [{"validate": "off"}, {"validate": "full"}]},
                r"collector_kwargs\[1\] .* in validate",
            ),
            (
                {"create_env_kwargs": [{}] * 3},
                "create_env_kwargs has 3 entries for 2 nodes",
            ),
        ],
    )
    def test_what_does_not_go_together_is_refused(self, options, said):
        with pytest.raises(BadOption, match=said):
            elastic(GatedCarrier(2), **options)

    @pytest.mark.parametrize("place", ["collector_kwargs", "create_env_kwargs"])
    def test_environments_of_nodes_may_have_keywords_of_their_own(self, place):
        given = [{"max_episode_steps": 3}, {"max_episode_steps": 5}]
        if place == "collector_kwargs":
            given = [{"create_env_kwargs": each} for each in given]
        options = {
            "min_nodes": None,
            "collector_class": "sync",
            "num_workers_per_collector": 2,
            place: given,
        }
        with elastic(GatedCarrier(2, 0, 1), **options) as collector:
            lengths = collector.getattr_env("_max_episode_steps")
        assert np.ravel(lengths).tolist() == [3] * 4 + [5] * 4


class TestCalls:
    def test_what_cannot_be_sent_is_the_callers_error(self):
        carrier = GatedCarrier(1, 0)
        with elastic(carrier) as collector:
            next(iter(collector))
            with pytest.raises(BadOption, match="which cannot be pickled"):
                collector.cascade_execute("env[0].reset", threading.Lock())
            next(iter(collector))
            assert collector.stats().restarts == 0
        assert len(carrier.links[0]) == 1

    def test_servers_that_come_back_know_what_they_were_told(self):
        carrier = GatedCarrier(2, 0, 1)
        factories = ["CartPole-v1"] * 2
        options = {
            "inference": "server",
            "on_failure": "restart",
            "frames_per_batch": 20,
            "total_frames": -1,
        }
        with QueueCollector(factories, net(), carrier=carrier, **options) as collector:
            pool = collector._engine.source.pool
            pool.server.ask("enable_grad", True)
            carrier.links[1][0].cut("a test cuts it")
            wait_until(lambda: pool.handles[1].session.lost)
            pool.server.ask("enable_grad", False)
            assert len(carrier.links[1]) == 1  # nobody was brought back for that
            next(iter(collector))
            asked = [
                said
                for link in carrier.links[1]
                for said in link.other.said
                if said.method is NodeMain.ask_server
            ]
            assert len(asked) == 2

    def test_the_end_waits_for_the_goodbye_to_be_heard(self):
        carrier = GatedCarrier(1, 0)
        with elastic(carrier):
            (link,) = carrier.links[0]
            close, receive, heard = link.close, link.other.receive, []

            def slowly():
                received = receive()
                if pickle.loads(received.message).method is NodeMain.bye:
                    threading.Event().wait(0.5)
                    heard.append("bye")
                return received

            def closing():
                heard.append("end")
                close()

            link.other.receive, link.close = slowly, closing
            two_beats(link.other)  # from here on the slow one receives
        for thread in carrier.threads:
            thread.join(JOIN_S)
        assert heard[0] == "bye"
        assert carrier.ended == [True]
