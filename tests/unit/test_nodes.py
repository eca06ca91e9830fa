"""Sessions and nodes, where something ends while something else is under way."""

from __future__ import annotations

import hashlib
import os
import pickle
import signal
import threading
from functools import partial
from itertools import islice

import gymnasium
import numpy as np
import pytest
import torch

from muster.cluster.link import Block, LinkLost
from muster.cluster.messages import WEIGHTS, NodeSetup
from muster.cluster.node_main import NodeMain
from muster.cluster.nodes import Nodes, NodesPublisher
from muster.cluster.session import Outgoing, Session
from muster.errors import EnvError, WorkerDied, WorkerError
from muster.restore.crash_report import CrashReport
from muster.testing import Fault, OracleEnv, check_stream
from muster.testing.oracle import EXECUTED
from muster.weights.buffer import Buffer
from muster.workers.config import PoolConfig, WorkerConfig
from muster.workers.messages import Tell
from muster.workers.options import SupervisionOptions
from tests.fakes.faults import Signalled
from tests.fakes.queue_links import (
    JOIN_S,
    GatedBuffer,
    LateLink,
    QueueCarrier,
    QueueCollector,
    WritingCollector,
    is_beat,
    net,
    pair,
    served,
    two_beats,
)
from tests.tools import assert_balanced
from tests.waits import open_files, wait_until, without_gc

pytestmark = pytest.mark.timeout(180)

POLICY = b""


def setup(start_method=None):
    worker = WorkerConfig(0, [0], [], b"", b"?", False, b"")
    supervision = SupervisionOptions()
    vars(supervision)["start_method"] = (
        start_method  # also one that a node does not know
    )
    pool = PoolConfig([worker], b"", 1, None, [None], None, {}, supervision)
    return NodeSetup(pool, (), hashlib.sha256(POLICY).digest())


@pytest.fixture
def carrier():
    made = QueueCarrier()
    yield made
    for thread in made.threads:
        thread.join(JOIN_S)


@pytest.fixture
def node():
    """The main process' end of a link to a node, and how that ends."""
    ours, theirs = pair()
    ended = []
    thread = served(theirs, 0, ended)
    yield ours, thread, ended
    ours.close()
    thread.join(JOIN_S)
    assert not thread.is_alive()


def tell(link, method, *args, block=None, tag=0, urgent=False):
    link.send(pickle.dumps(Tell(method, args, urgent=urgent)), block, tag)


def heard(link, report):
    """The next report of a kind."""
    while True:
        told = pickle.loads(link.receive().message)
        if getattr(told, report):
            return getattr(told, report)


def oracles(path, count=1, **options):
    carrier = options.pop("carrier")
    cls = options.pop("cls", QueueCollector)
    factories = [partial(OracleEnv, path, node) for node in range(count)]
    return cls(factories, None, carrier=carrier, frames_per_batch=20, seed=0, **options)


class TestWorkers:
    def test_rollouts_stay_in_order_if_requests_cross_the_news_of_a_death(
        self, tmp_path
    ):
        factory = partial(
            OracleEnv, tmp_path / "o", fault=Fault(Signalled(signal.SIGKILL), at=50)
        )
        options = {"frames_per_batch": 20, "total_frames": -1, "sync": False, "seed": 0}
        batches = []
        with QueueCollector(
            [factory], None, carrier=QueueCarrier(LateLink), **options
        ) as collector:
            with pytest.raises(WorkerDied):
                batches.extend(batch.clone() for batch in collector)
            before = len(batches)
            batches.extend(batch.clone() for batch in islice(collector, 6))
        assert before == 2
        check_stream(batches)

    def test_a_batch_is_one_request_and_one_result_of_each_node(
        self, tmp_path, carrier
    ):
        options = {
            "collector_class": "sync",
            "num_workers_per_collector": 2,
            "total_frames": -1,
        }
        with oracles(tmp_path / "o", 2, carrier=carrier, **options) as collector:
            next(iter(collector))
            for links in carrier.links.values():
                (link,) = links
                before = len(link.other.said), len(link.said)
                next(iter(collector))
                asked = [
                    said for said in link.other.said[before[0] :] if not is_beat(said)
                ]
                (told,) = [said for said in link.said[before[1] :] if not is_beat(said)]
                assert [said.method for said in asked] == [NodeMain.follow]
                assert len(told.results) == 2

    def test_a_call_right_after_a_restart_gets_its_own_answer(self, tmp_path, carrier):
        gate = tmp_path / "gate"
        gate.touch()
        with served_collector(
            gate, carrier, workers=1, on_failure="raise"
        ) as collector:
            next(iter(collector))
            os.kill(collector.stats().workers[0].pid, signal.SIGKILL)
            with pytest.raises(WorkerDied):
                next(iter(collector))
            (metadata,) = collector.getattr_env("metadata")
            assert "render_modes" in metadata
            next(iter(collector))

    def test_a_worker_that_cannot_be_started_is_told_of(self, node):
        link, thread, ended = node
        tell(
            link,
            NodeMain.set_up,
            setup("teleport"),
            block=Block(np.frombuffer(POLICY, np.uint8)),
            tag=1,
        )
        tell(link, NodeMain.start)
        assert "teleport" in str(heard(link, "failure").error())
        link.close()
        thread.join(JOIN_S)
        assert ended == [False]

    def test_workers_of_a_lost_session_leave_no_descriptors(self, tmp_path, carrier):
        with oracles(
            tmp_path / "o", carrier=carrier, on_failure="restart", total_frames=-1
        ) as collector:
            next(iter(collector))
            with without_gc():
                carrier.links[0][-1].cut("a test cuts it")
                next(iter(collector))
                before = len(os.listdir("/proc/self/fd"))
                for _ in range(2):
                    carrier.links[0][-1].cut("a test cuts it")
                    next(iter(collector))
                wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before + 2)


class TestNodes:
    @pytest.mark.filterwarnings(
        "ignore::pytest.PytestUnhandledThreadExceptionWarning"
    )  # its node's log shows it
    def test_whatever_ends_the_reading_ends_the_session(self, node):
        link, thread, ended = node
        link.other.fail(MemoryError("no room for a block"))
        thread.join(JOIN_S)
        assert ended == [False]

    def test_its_threads_have_ended_with_it(self, node):
        link, thread, _ = node
        receive = link.other.receive

        def slowly():
            try:
                return receive()
            except LinkLost:
                threading.Event().wait(0.5)  # as one does that comes out of C++
                raise

        link.other.receive = slowly
        heard(link, "host")
        tell(link, NodeMain.beat)  # from here on the slow one receives
        assert "muster-node-main-receives" in {t.name for t in threading.enumerate()}
        mine = [
            t for t in threading.enumerate() if t.name.startswith("muster-node-main")
        ]
        tell(link, NodeMain.bye, urgent=True)
        thread.join(JOIN_S)
        assert not [t.name for t in mine if t.is_alive()]

    def test_a_goodbye_is_answered_by_closing_the_link(self, node):
        link, thread, ended = node
        heard(link, "host")
        tell(link, NodeMain.bye, urgent=True)
        thread.join(JOIN_S)
        with pytest.raises(LinkLost):
            heard(link, "failure")
        assert ended == [True]

    def test_a_goodbye_that_has_come_counts_although_nothing_more_can_be_sent(
        self, node
    ):
        link, thread, ended = node
        heard(link, "host")

        def closed(*args):
            raise LinkLost("the other end has closed it")

        link.other.send = closed
        wait_until(
            lambda: (
                "muster-node-main-sends" not in {t.name for t in threading.enumerate()}
            )
        )
        tell(link, NodeMain.bye, urgent=True)
        thread.join(JOIN_S)
        assert ended == [True]

    def test_a_policy_that_was_changed_on_its_way_is_not_unpickled(self, node):
        link, _, _ = node
        tell(
            link,
            NodeMain.set_up,
            setup(),
            block=Block(np.frombuffer(b"other", np.uint8)),
            tag=1,
        )
        assert "modified in transit" in str(heard(link, "failure").error())


class TestWeights:
    @pytest.fixture
    def act_with(self, carrier):
        """Publishes weights with which only one action is taken; the actions of the next batch."""
        policy = net()
        options = {"carrier": carrier, "frames_per_batch": 20, "total_frames": -1}
        with QueueCollector(
            [partial(gymnasium.make, "CartPole-v1")], policy, **options
        ) as collector:

            def publish(action):
                with torch.no_grad():
                    policy.module.bias.copy_(torch.tensor([1 - action, action]) * 1e6)
                collector.update_policy_weights_()
                return next(iter(collector))["action"].flatten()[
                    1:
                ]  # the first may be one that was asked before

            yield publish

    def test_they_arrive_where_workers_read_them(self, carrier, act_with):
        for number in range(1, 6):
            action = 1 - number % 2
            assert act_with(action).unique().tolist() == [action]
            expected = list(carrier.links[0][0].other.expected)
            assert expected == [WEIGHTS + number + 1], (
                "the next, and nothing that has come"
            )

    def test_some_that_come_before_they_are_expected_are_as_good(
        self, carrier, act_with
    ):
        for action in (0, 1, 0):
            carrier.links[0][0].other.expected.clear()
            assert act_with(action).unique().tolist() == [action]

    def test_a_buffer_is_written_again_once_no_node_has_it(self):
        nodes = Nodes(Never(), [0, 1], JOIN_S)
        weights = {"w": torch.zeros(1000)}
        publisher = NodesPublisher(nodes, weights)
        places, kept = set(), []
        for version in range(8):
            publisher.publish({"w": torch.full((1000,), float(version))}, version)
            manifest, block = nodes.newest[0]
            places.add(block.array.ctypes.data)
            if version == 3:
                kept.append(block)
        assert len(places) == 3, "one is kept, two take turns"
        found = Buffer(kept[0].array, manifest)
        assert found.version == 3
        assert found.tensors["w"].unique().tolist() == [3]
        assert found.sequence < 0, "only its nodes count"
        nodes.close()


class SlowToClose:
    """A carrier with one link, whose ``close`` takes until it is let."""

    name = "slow"

    def __init__(self):
        self.link, self.node_end = pair()
        self.closing, self.may_close = threading.Event(), threading.Event()
        close = self.link.close

        def slowly():
            self.closing.set()
            assert self.may_close.wait(JOIN_S)
            close()

        self.link.close = slowly

    def connect(self, node, epoch, within_s, given_up):
        return self.link

    def close(self): ...


class Never:
    """A carrier whose node never comes."""

    name = "never"

    def connect(self, node, epoch, within_s, given_up):
        given_up.wait(JOIN_S)
        raise LinkLost("given up")

    def close(self): ...


class TestSessions:
    def test_a_node_counts_as_lost_once_nothing_can_be_written_into_its_lanes(self):
        carrier = SlowToClose()
        session = Nodes(carrier, [0], JOIN_S).session(0)
        wait_until(lambda: session._link is not None)
        losing = threading.Thread(target=session.lose, args=("a test says so",))
        losing.start()
        assert carrier.closing.wait(JOIN_S)
        lost = session.lost
        carrier.may_close.set()
        losing.join(JOIN_S)
        assert (lost, session.lost) == ("", "a test says so")

    def test_whoever_loses_a_node_waits_for_a_link_that_is_being_closed(self):
        carrier = SlowToClose()
        session = Nodes(carrier, [0], JOIN_S).session(0)
        wait_until(lambda: session._link is not None)
        threads = [
            threading.Thread(target=session.lose, args=(why,))
            for why in ("a test says so", "again")
        ]
        threads[0].start()
        assert carrier.closing.wait(JOIN_S)
        threads[1].start()
        threads[1].join(0.2)
        waited = threads[1].is_alive()
        carrier.may_close.set()
        for thread in threads:
            thread.join(JOIN_S)
        assert waited
        assert session.lost == "a test says so"

    def test_a_lost_session_does_not_keep_what_is_published(self):
        nodes = Nodes(Never(), [0], JOIN_S)
        session = nodes.session(0)
        session.lose("over")
        before = session._outbox.qsize()
        for _ in range(5):
            nodes.publish(0, None, Block(np.zeros(1, np.uint8)))
        assert session._outbox.qsize() <= before

    def test_its_threads_have_ended_when_it_has(self, tmp_path, carrier):
        others = set(threading.enumerate())

        def running():
            return {
                t for t in threading.enumerate() if t.name.startswith("muster-node")
            } - others

        with oracles(tmp_path / "o", carrier=carrier, total_frames=20) as collector:
            next(iter(collector))
            assert running()
        for thread in carrier.threads:
            thread.join(JOIN_S)
        assert carrier.ended == [True]
        wait_until(lambda: not running())

    def test_nothing_is_left_open(self, tmp_path, carrier):
        def one(name):
            with oracles(
                tmp_path / name, carrier=QueueCarrier(), total_frames=20
            ) as collector:
                next(iter(collector))

        one("a")
        before = open_files()
        for name in "bcd":
            one(name)
        wait_until(
            lambda: open_files() <= before
        )  # a node, which is a thread here, may still be ending

    def test_a_fork_of_the_main_process_ends_nothing(self):
        carrier = QueueCarrier()
        nodes = Nodes(carrier, [0], JOIN_S)
        if (pid := os.fork()) == 0:
            nodes.close()
            os._exit(carrier.closed)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        nodes.close()
        nodes.close()
        assert carrier.closed


class TestServers:
    def test_a_node_comes_back_whose_workers_are_built_one_after_another(
        self, tmp_path, carrier
    ):
        gate = tmp_path / "gate"
        gate.touch()
        with served_collector(
            gate, carrier, workers=2, on_failure="restart"
        ) as collector:
            next(iter(collector))
            gate.unlink()
            (tmp_path / "first").touch()
            carrier.links[0][0].cut("a test cuts it")
            got = []
            going_on = threading.Thread(
                target=lambda: got.append(next(iter(collector)))
            )
            going_on.start()
            wait_until(lambda: len(carrier.links[0]) > 1)
            two_beats(carrier.links[0][1])
            gate.touch()
            going_on.join(JOIN_S)
            assert got
            assert len(carrier.links[0]) == 2


class TestWriters:
    @pytest.fixture(autouse=True)
    def shut(self):
        GatedBuffer.open_.clear()
        GatedBuffer.writing.clear()
        GatedBuffer.rows.clear()
        yield
        GatedBuffer.open_.set()

    def test_a_worker_is_restarted_once_its_rollouts_are_written(
        self, tmp_path, carrier
    ):
        options = {
            "on_failure": "restart",
            "total_frames": -1,
            "replay_buffer": GatedBuffer(),
            "cls": WritingCollector,
        }
        with oracles(tmp_path / "o", carrier=carrier, **options) as collector:
            got = []
            going_on = threading.Thread(
                target=lambda: got.append(next(iter(collector), None))
            )
            going_on.start()
            assert GatedBuffer.writing.wait(JOIN_S)
            (link,) = carrier.links[0]
            os.kill(collector.stats().workers[0].pid, signal.SIGKILL)
            two_beats(link)
            GatedBuffer.open_.set()
            going_on.join(JOIN_S)
            assert not going_on.is_alive()
            next(iter(collector))
            assert len(carrier.links[0]) == 1, link.said[-3:]
            assert len(GatedBuffer()) == collector.stats().frames == 40

    def test_what_never_comes_is_not_expected(self, tmp_path, carrier):
        GatedBuffer.open_.set()
        options = {
            "total_frames": 200,
            "replay_buffer": GatedBuffer(),
            "cls": WritingCollector,
        }
        with oracles(tmp_path / "o", carrier=carrier, **options) as collector:
            for _ in collector:
                pass
            (link,) = carrier.links[0]
            assert len(link.expected) <= 2
            assert len(GatedBuffer()) == 200

    @pytest.fixture
    def failing(self):
        """Sets how many writes fail."""
        GatedBuffer.open_.set()
        yield partial(FullBuffer.failures.__setitem__, 0)
        FullBuffer.failures[0] = 0

    def test_a_buffer_that_fails_is_an_error_of_the_worker_whose_rollout_it_was(
        self, tmp_path, carrier, failing
    ):
        failing(1)
        options = {
            "total_frames": -1,
            "replay_buffer": FullBuffer(),
            "cls": WritingCollector,
        }
        with oracles(tmp_path / "o", 2, carrier=carrier, **options) as collector:
            with pytest.raises(
                WorkerError,
                match=r"a FullBuffer, raised OSError: no space left.* node [01] ",
            ) as caught:
                next(iter(collector))
            assert isinstance(caught.value.__cause__, OSError)
            assert caught.value.crash_report is None, (
                "nothing is known that could be replayed"
            )
            for _ in range(2):
                next(iter(collector))
        self.check_books(collector, tmp_path)
        assert collector.stats().discarded == {"worker_died": 20}
        assert [len(links) for links in carrier.links.values()] == [1, 1], (
            "no node was lost"
        )

    def test_a_buffer_that_fails_for_good_uses_up_the_restarts(
        self, tmp_path, carrier, failing
    ):
        failing(1000)
        options = {
            "on_failure": "restart",
            "replay_buffer": FullBuffer(),
            "cls": WritingCollector,
        }
        with oracles(
            tmp_path / "o", carrier=carrier, total_frames=-1, **options
        ) as collector:
            with pytest.raises(WorkerError, match="no space left"):
                next(iter(collector))
            assert collector.stats().workers[0].restarts == 3
        self.check_books(collector, tmp_path)

    @pytest.mark.parametrize("at", [None, 35], ids=["finished", "at work"])
    def test_what_a_worker_has_begun_while_a_write_fails_is_counted_too(
        self, tmp_path, carrier, failing, at
    ):
        failing(1)
        GatedBuffer.open_.clear()
        fault = None if at is None else Fault(partial(waits, tmp_path / "never"), at=at)
        factories = [partial(OracleEnv, tmp_path / "o", 0, 1, fault)]
        options = {
            "on_failure": "restart",
            "replay_buffer": FullBuffer(),
            "sync": False,
            "frames_per_batch": 20,
        }
        with WritingCollector(
            factories, None, carrier=carrier, total_frames=200, seed=0, **options
        ) as collector:
            going_on = threading.Thread(target=lambda: [None for _ in collector])
            going_on.start()
            assert GatedBuffer.writing.wait(JOIN_S)
            wait_until(lambda: OracleEnv.read(tmp_path / "o")[:, EXECUTED].sum() > 30)
            GatedBuffer.open_.set()
            going_on.join(JOIN_S)
            assert collector.stats().frames == 200
        self.check_books(collector, tmp_path, kills=1)
        assert collector.stats().discarded["worker_died"] > 30

    def check_books(self, collector, tmp_path, kills=0):
        """Everything that was done is accounted for, but for a step in which a worker may have been
        killed.
        """
        stats = collector.stats()
        assert len(GatedBuffer()) == stats.frames
        assert_balanced(stats, in_flight=0)
        assert stats.unseen == 0
        assert (
            0
            <= OracleEnv.read(tmp_path / "o")[:, EXECUTED].sum() - stats.executed
            <= kills
        )

    def test_a_slow_buffer_does_not_lose_the_node_of_a_worker_that_is_ended(
        self, tmp_path, carrier
    ):
        factories = [partial(failing_when, tmp_path)]
        options = {
            "on_failure": "restart",
            "total_frames": -1,
            "replay_buffer": GatedBuffer(),
            "sync": True,
        }
        options |= {
            "collector_class": "sync",
            "num_workers_per_collector": 2,
            "frames_per_batch": 20,
        }
        (tmp_path / "first").touch()
        with WritingCollector(factories, None, carrier=carrier, **options) as collector:
            going_on = threading.Thread(target=lambda: next(iter(collector)))
            going_on.start()
            assert GatedBuffer.writing.wait(JOIN_S)
            (tmp_path / "fail").touch()
            (link,) = carrier.links[0]
            two_beats(link)
            GatedBuffer.open_.set()
            going_on.join(JOIN_S)
            assert not going_on.is_alive()
            assert len(carrier.links[0]) == 1, link.said[-3:]

    def test_a_rollout_that_is_elsewhere_can_be_replayed(
        self, tmp_path, carrier, failing
    ):
        fault = Fault(raises, at=21)
        factories = [partial(OracleEnv, tmp_path / "o", 0, 1, fault)]
        options = {
            "total_frames": -1,
            "replay_buffer": FullBuffer(),
            "frames_per_batch": 20,
            "seed": 0,
        }
        with WritingCollector(factories, None, carrier=carrier, **options) as collector:
            next(iter(collector))
            with pytest.raises(EnvError) as caught:
                next(iter(collector))
        crash_report = CrashReport.load(caught.value.crash_report, trust=True)
        assert not crash_report.missing
        assert crash_report.actions


class FullBuffer(GatedBuffer):
    """Whose next writes fail."""

    failures = [0]  # noqa: RUF012 (shared on purpose)

    def extend(self, batch):
        self.writing.set()
        assert self.open_.wait(JOIN_S)
        if self.failures[0]:
            self.failures[0] -= 1
            raise OSError("no space left")
        self.rows.append(batch.clone())


def waits(path, result):
    wait_until(path.exists)


def raises(result):
    raise ValueError("a test says so")


def failing_when(path):
    """An environment; the step 5 of one of them fails when there is a file "fail"."""

    def fails(result):
        wait_until((path / "fail").exists)
        raise ValueError("a test says so")

    try:
        (path / "first").unlink()
    except FileNotFoundError:
        return OracleEnv(path / "o", 0)
    return OracleEnv(path / "o", 1, fault=Fault(fails, at=5))


def served_collector(gate, carrier, *, workers, **options):
    """One node with a server."""
    return QueueCollector(
        [partial(gated, gate)],
        net(),
        carrier=carrier,
        frames_per_batch=20,
        collector_class="sync",
        num_workers_per_collector=workers,
        collector_kwargs={"inference": "server"},
        total_frames=-1,
        **options,
    )


def gated(gate):
    """An environment; the second one that waits does so until there is a file again."""
    if not gate.exists():
        try:
            (gate.parent / "first").unlink()
        except FileNotFoundError:
            wait_until(gate.exists)
    return gymnasium.make("CartPole-v1")


class Unread:
    """Implements ``Link`` as far as a session uses it that never gets to read."""

    def __init__(self):
        self.closed = False

    def close(self):
        self.closed = True


@pytest.mark.parametrize("lacks", ["sends", "receives"])
def test_a_session_without_threads_is_lost_at_once(monkeypatch, lacks):
    start = threading.Thread.start

    def refuse(thread):
        if thread.name == f"session-{lacks}":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    link, rung = Unread(), threading.Event()
    if lacks == "sends":
        with pytest.raises(RuntimeError, match="new thread"):
            Session(
                "session", lambda given_up: link, lambda: Outgoing("beat"), rung.set
            )
        return
    session = Session(
        "session", lambda given_up: link, lambda: Outgoing("beat"), rung.set
    )
    wait_until(lambda: session.lost)
    assert session.lost == "RuntimeError: can't start new thread"
    assert rung.is_set()
    assert link.closed
    session.finish("the end")
