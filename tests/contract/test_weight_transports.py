"""What every transport of weights does, between threads and between processes."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muster.errors import BadOption, BadWeights, CollectorTimeout
from muster.weights import NoSync, SharedMemory
from muster.weights.buffer import Buffer
from muster.weights.transport import Ticket
from tests.waits import open_files, wait_until

PATIENCE = 60.0
BIG = {"w": torch.zeros(3_000_000), "v": torch.zeros(3_000_000)}
DTYPES = [
    d
    for d in vars(torch).values()
    if isinstance(d, torch.dtype) and not str(d).startswith(("torch.q", "torch.bits"))
]


def weights(
    value: float, like: dict[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Tensors of all sorts that hold ``value``."""
    if like is not None:
        return {name: torch.full_like(tensor, value) for name, tensor in like.items()}
    return {
        "weight": torch.full((2, 3), value),
        "half": torch.full((5,), value, dtype=torch.bfloat16),
        "mask": torch.full((3,), bool(value)),
        "count": torch.tensor(int(value)),
        "none": torch.empty(0, 4),
        "phase": torch.full((2,), complex(value, -value)),
        "turned": torch.arange(6.0, dtype=torch.float64).view(2, 3).T + value,
    }


class Reader:
    """A subscriber with tensors of its own to take into."""

    def __init__(
        self, ticket: Ticket, fds: list[int], like: dict[str, torch.Tensor]
    ) -> None:
        self.subscriber = ticket.open(fds)
        self.into = {name: torch.zeros_like(tensor) for name, tensor in like.items()}

    def take(self) -> Any:
        version = self.subscriber.take(self.into)
        assert version is None or version == self.subscriber.version
        return version, {
            name: t.clone() for name, t in self.into.items() if t.numel() < 100
        }

    def extremes(self) -> Any:
        """Version, and the extremes over all tensors."""
        version = self.subscriber.take(self.into)
        return version, [
            min(float(t.min()) for t in self.into.values()),
            max(float(t.max()) for t in self.into.values()),
        ]

    def close(self) -> None:
        self.subscriber.close()
        self.subscriber.close()


# --- sides: where a reader lives ------------------------------------------------------------------


class ThreadSide:
    """Readers in another thread of this process."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1)

    def open(
        self, ticket: Ticket, like: dict[str, torch.Tensor]
    ) -> Callable[[str], Any]:
        reader = self.pool.submit(Reader, ticket, ticket.fds, like).result(PATIENCE)
        ticket.close()
        return lambda method: self.pool.submit(getattr(reader, method)).result(PATIENCE)

    def end(self) -> None:
        self.pool.shutdown()


class ProcessSide:
    """Readers in another process, which sees pickled tickets and descriptors only."""

    def __init__(self) -> None:
        self.socket, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(PATIENCE)
        code = f"from tests.contract.test_weight_transports import serve; serve({there.fileno()})"
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(["", *sys.path])}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=[there.fileno()], env=env
        )
        there.close()
        self.opened = 0

    def ask(self, *request: Any, fds: tuple[int, ...] = ()) -> Any:
        socket.send_fds(self.socket, [pickle.dumps(request)], fds)
        answer = pickle.loads(self.socket.recv(1 << 20))
        if isinstance(answer, Exception):
            raise answer
        return answer

    def open(
        self, ticket: Ticket, like: dict[str, torch.Tensor]
    ) -> Callable[[str], Any]:
        self.opened += 1
        number = self.opened
        shapes = {
            name: (tuple(tensor.shape), tensor.dtype) for name, tensor in like.items()
        }
        self.ask("open", number, ticket, shapes, fds=tuple(ticket.fds))
        ticket.close()
        return lambda method: self.ask(method, number)

    def end(self) -> None:
        self.socket.close()
        self.process.wait(PATIENCE)


def serve(fd: int) -> None:
    """What the other process does until its parent hangs up."""
    torch.set_num_threads(1)
    readers: dict[int, Reader] = {}
    with socket.socket(fileno=fd) as channel:
        while True:
            data, fds, _, _ = socket.recv_fds(channel, 1 << 20, 8)
            if not data:
                return
            method, number, *rest = pickle.loads(data)
            try:
                if method == "open":
                    ticket, shapes = rest
                    like = {
                        name: torch.empty(shape, dtype=dtype)
                        for name, (shape, dtype) in shapes.items()
                    }
                    readers[number] = Reader(ticket, fds, like)
                    for one in fds:
                        os.close(one)
                    answer = None
                else:
                    answer = getattr(readers[number], method)()
            except Exception as error:  # noqa: BLE001 (raised by the test)
                answer = error
            channel.send(pickle.dumps(answer))


@pytest.fixture(scope="module", params=["thread", "process"])
def side(request: Any) -> Iterator[Any]:
    made = ThreadSide() if request.param == "thread" else ProcessSide()
    yield made
    made.end()


@pytest.fixture
def scheme() -> Any:
    return SharedMemory()


@pytest.fixture
def pair(side: Any, scheme: Any) -> Iterator[tuple[Any, list[Any]]]:
    """A publisher of version 5 and its two workers."""
    publisher = scheme.publisher(weights(1), 2, 5)
    takers = [side.open(publisher.ticket(i), weights(0)) for i in range(2)]
    yield publisher, takers
    publisher.close()
    publisher.close()
    for taker in takers:
        taker("close")


def same(taken: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return all(
        torch.equal(taken[name], tensor) and taken[name].dtype == tensor.dtype
        for name, tensor in expected.items()
    )


# --- the contract ---------------------------------------------------------------------------------


def test_the_first_weights_are_those_that_the_publisher_was_made_with(pair):
    for taker in pair[1]:
        version, taken = taker("take")
        assert version == 5
        assert same(taken, weights(1))
        assert taker("take")[0] is None


def test_every_publish_arrives_as_it_was(pair):
    publisher, takers = pair
    for value in range(2, 12):
        given = weights(value)
        publisher.publish(given, value)
        for tensor in given.values():
            tensor.zero_()
        for taker in takers:
            version, taken = taker("take")
            assert version == value
            assert same(taken, weights(value))


def test_the_latest_wins(pair):
    publisher, takers = pair
    for value in range(2, 40):
        publisher.publish(weights(value), value)
    for taker in takers:
        version, taken = taker("take")
        assert version == 39
        assert same(taken, weights(39))
        assert taker("take")[0] is None


@pytest.mark.parametrize(
    "version", [0, -1, 2**63 - 1, -(2**63), "", "a" * 64, "\u00e9" * 32, "v1"]
)
def test_versions_are_numbers_or_texts(pair, version):
    publisher, takers = pair
    publisher.publish(weights(2), 10)
    publisher.publish(weights(2), version)
    assert takers[0]("take")[0] == version


@pytest.mark.parametrize("version", ["a" * 65, "\u00e9" * 33, 2**63])
def test_what_is_no_version_publishes_nothing(pair, version):
    publisher, takers = pair
    with pytest.raises(BadWeights, match="policy version .* cannot be sent"):
        publisher.publish(weights(2), version)
    version, taken = takers[0]("take")
    assert version == 5
    assert same(taken, weights(1))


def test_weights_for_some_workers_leave_the_others_alone(pair):
    publisher, (one, two) = pair
    assert one("take")[0] == two("take")[0] == 5
    for version in range(6, 12):
        publisher.publish(weights(version), version, workers=[1])
    assert one("take")[0] is None
    version, taken = two("take")
    assert version == 11
    assert same(taken, weights(11))
    publisher.publish(weights(20), 20, workers=[])
    assert (one("take")[0], two("take")[0]) == (None, None)
    publisher.publish(weights(21), 21)
    assert (one("take")[0], two("take")[0]) == (21, 21)


def test_a_successor_gets_what_its_number_was_given_last(pair, side):
    publisher, takers = pair
    publisher.publish(weights(6), 6, workers=[0])
    publisher.publish(weights(7), 7, workers=[1])
    takers[0]("close")
    publisher.publish(weights(8), 8, workers=[1])  # nobody is left to read for worker 0
    takers[0] = side.open(publisher.ticket(0), weights(0))
    version, taken = takers[0]("take")
    assert version == 6
    assert same(taken, weights(6))
    publisher.publish(weights(9), 9)
    assert [taker("take")[0] for taker in takers] == [9, 9]


def test_between_ticket_and_opening_nothing_is_lost(side, scheme):
    publisher = scheme.publisher(weights(1), 1)
    ticket = publisher.ticket(0)
    publisher.publish(weights(2), 2)
    publisher.publish(weights(3), 3)
    taker = side.open(ticket, weights(0))
    version, taken = taker("take")
    assert version == 3
    assert same(taken, weights(3))
    publisher.close()
    taker("close")


def test_a_worker_that_is_gone_hinders_nobody(pair):
    publisher, (one, two) = pair
    one("close")
    for version in range(6, 30):
        publisher.publish(weights(version), version)
    assert two("take")[0] == 29


def test_a_subscriber_outlives_the_publisher(pair):
    publisher, takers = pair
    publisher.publish(weights(6), 6)
    publisher.close()
    assert takers[0]("take")[0] == 6
    assert takers[0]("take")[0] is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("mask"), "named differently"),
        (lambda w: w.update(other=w.pop("mask")), "named differently"),
        (lambda w: w.update(more=torch.ones(1)), "named differently"),
        (
            lambda w: w.update(mask=torch.ones(3)),
            "mask has shape .3,. and dtype torch.float32, expected .* torch.bool",
        ),
        (lambda w: w.update(weight=torch.ones(3, 2)), "weight has shape .3, 2."),
    ],
)
def test_what_does_not_fit_is_refused_on_both_sides(
    pair, side, scheme, change, message
):
    publisher, takers = pair
    other = weights(2)
    change(other)
    with pytest.raises(BadWeights, match=message):
        publisher.publish(other, 6)
    assert takers[0]("take")[0] == 5
    taker = side.open(publisher.ticket(1), other)
    with pytest.raises(BadWeights, match=message):
        taker("take")
    taker("close")


def test_without_weights_versions_travel(side, scheme):
    publisher = scheme.publisher({}, 1, "first")
    taker = side.open(publisher.ticket(0), {})
    assert taker("take") == ("first", {})
    publisher.publish({}, "second")
    assert taker("take") == ("second", {})
    publisher.close()
    taker("close")


def test_large_weights_do_not_wait_for_a_worker_that_is_busy(side, scheme):
    publisher = scheme.publisher(BIG, 1)
    taker = side.open(publisher.ticket(0), BIG)
    for version in range(1, 6):
        publisher.publish(weights(version, BIG), version)
    assert taker("extremes") == (5, [5, 5])
    publisher.close()
    taker("close")


@pytest.mark.parametrize("side", ["process"], indirect=True)
def test_a_stopped_worker_gets_the_newest_when_it_goes_on(side, scheme):
    publisher = scheme.publisher(BIG, 2)
    takers = [side.open(publisher.ticket(i), BIG) for i in range(2)]
    here = Reader(ticket := publisher.ticket(1), ticket.fds, BIG)
    ticket.close()
    takers[0]("extremes")
    stop(side.process)
    for version in range(1, 6):
        publisher.publish(weights(version, BIG), version)
        assert here.extremes() == (version, [version, version])
    side.process.send_signal(signal.SIGCONT)
    taken = takers[0]("extremes")
    assert taken[1] in ([0, 0], [5, 5]), "not torn"
    assert (taken[0] or takers[0]("extremes")[0]) == 5
    for closing in (
        lambda: takers[0]("close"),
        lambda: takers[1]("close"),
        here.close,
        publisher.close,
    ):
        closing()


def stop(process: Any) -> None:
    """SIGSTOP, and wait until it has done what it does."""
    process.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 10
    while (
        Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        != "T"
    ):
        assert time.monotonic() < deadline
        os.sched_yield()


def test_a_publisher_that_is_killed_in_the_middle_has_changed_nothing():
    like = {"a": torch.zeros(1000), "b": torch.zeros(1000)}
    publisher = SharedMemory().publisher(weights(1, like), 1, 1)
    reader = Reader(ticket := publisher.ticket(0), ticket.fds, like)
    ticket.close()
    for version in (2, 3, 4):  # now all buffers are there: a fork cannot allocate
        publisher.publish(weights(version, like), version)
    for version in (5, 6, 7):  # whichever buffer is next
        child = os.fork()
        if child == 0:

            class Deadly(dict):  # type: ignore[type-arg]
                def __getitem__(self, name: str) -> Any:
                    if (
                        name == "b"
                        and publisher._buffers
                        and min(b.sequence for b in publisher._buffers.values()) < 0
                    ):
                        os.kill(os.getpid(), signal.SIGKILL)
                    return super().__getitem__(name)

            try:
                publisher.publish(Deadly(weights(100, like)), 100)
            finally:
                os._exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        assert reader.extremes() == (version - 1, [version - 1, version - 1])
        publisher.publish(weights(version, like), version)
    assert reader.extremes() == (7, [7, 7])
    publisher.close()
    reader.close()


class Meddling(dict):  # type: ignore[type-arg]
    """Tensors to take into; something happens after the first of them is in place."""

    def __init__(
        self, like: dict[str, torch.Tensor], meddle: Callable[[], None]
    ) -> None:
        super().__init__(
            {name: torch.zeros_like(tensor) for name, tensor in like.items()}
        )
        self.meddle = meddle

    def items(self) -> Any:
        for count, item in enumerate(super().items()):
            if count == 1:
                self.meddle()
            yield item


PAIR = {"a": torch.zeros(1000), "b": torch.zeros(1000)}


def test_what_is_being_read_is_not_written():
    publisher = SharedMemory().publisher(weights(1, PAIR), 2, 1)
    ticket = publisher.ticket(0)
    subscriber = ticket.open(ticket.fds)
    ticket.close()

    def publish() -> None:
        for version in range(2, 12):
            publisher.publish(weights(version, PAIR), version)
        assert len(publisher._buffers) == 3, (
            "two are enough beside the one that is read"
        )

    into = Meddling(PAIR, publish)
    assert subscriber.take(into) == 1
    assert [tensor.unique().tolist() for tensor in into.values()] == [[1], [1]]
    into.meddle = lambda: None
    assert subscriber.take(into) == 11
    assert [tensor.unique().tolist() for tensor in into.values()] == [[11], [11]]
    subscriber.close()
    publisher.close()


@pytest.mark.parametrize("publishes", [1, 2, 3, 4])
def test_publishes_before_a_reader_has_marked_what_it_reads(publishes):
    publisher = SharedMemory().publisher(weights(1, PAIR), 1, 1)
    ticket = publisher.ticket(0)
    subscriber = ticket.open(ticket.fds)
    ticket.close()

    class Slow(Buffer):
        """Its reader is overtaken when it first looks in here."""

        @property
        def sequence(self) -> int:
            found = Buffer.sequence.fget(self)  # type: ignore[attr-defined]
            subscriber._buffers.clear()
            for version in range(2, 2 + publishes):
                publisher.publish(weights(version, PAIR), version)
            return found

    for offset, buffer in publisher._buffers.items():
        subscriber._buffers[offset] = Slow(buffer.memory, publisher._manifest)
    into = Meddling(PAIR, lambda: publisher.publish(weights(100, PAIR), 100))
    assert subscriber.take(into) == publishes + 1
    assert [tensor.unique().tolist() for tensor in into.values()] == [
        [publishes + 1],
        [publishes + 1],
    ]
    subscriber.close()
    publisher.close()


def test_what_a_reader_killed_in_the_middle_was_reading_is_free_once_its_successor_reads():
    publisher = SharedMemory().publisher(weights(1, PAIR), 1, 1)
    ticket = publisher.ticket(0)
    child = os.fork()
    if child == 0:
        ticket.open(ticket.fds).take(
            Meddling(PAIR, lambda: os.kill(os.getpid(), signal.SIGKILL))
        )
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    used = []

    def publish(versions: range) -> set[int]:
        for version in versions:
            publisher.publish(weights(version, PAIR), version)
            used.append(int(publisher._cells[0]))
        return set(used)

    (first,) = publisher._buffers
    assert first not in publish(range(2, 10))
    reader = Reader(ticket, ticket.fds, PAIR)
    assert reader.extremes() == (9, [9, 9])
    assert first in publish(range(10, 20))
    assert reader.extremes() == (19, [19, 19])
    for thing in (ticket, reader, publisher):
        thing.close()


def test_weights_that_do_not_fit_keep_nothing_from_being_written():
    publisher = SharedMemory().publisher(weights(1, PAIR), 1, 1)
    ticket = publisher.ticket(0)
    subscriber = ticket.open(ticket.fds)
    with pytest.raises(BadWeights):
        subscriber.take({"a": torch.zeros(1000)})
    for version in range(2, 10):
        publisher.publish(weights(version, PAIR), version)
    assert len(publisher._buffers) == 3
    assert not publisher._reading.any()
    for thing in (ticket, subscriber, publisher):
        thing.close()


def test_weights_can_be_written_by_somebody_else_into_memory_that_is_lent():
    publisher = SharedMemory().publisher(weights(1, PAIR), 2, 1)
    tickets = [publisher.ticket(i) for i in range(2)]
    one, two = (Reader(ticket, ticket.fds, PAIR) for ticket in tickets)
    for version in range(2, 12, 2):
        memory = publisher.lend()
        assert publisher.lend() is memory
        sent = Buffer.private(publisher._manifest)
        sent.write(weights(version, PAIR), version, -1)
        memory[: len(memory) // 2] = sent.memory[: len(memory) // 2]
        assert one.extremes()[0] in (1, None), "half of it is there, and nobody sees it"
        publisher.publish(weights(version - 1, PAIR), version - 1)  # goes elsewhere
        assert two.extremes() == (version - 1, [version - 1, version - 1])
        memory[len(memory) // 2 :] = sent.memory[len(memory) // 2 :]
        publisher.publish_lent()
        assert one.extremes() == two.extremes() == (version, [version, version])
    assert len(publisher._buffers) <= 4
    for thing in (*tickets, one, two, publisher):
        thing.close()


def test_every_dense_dtype_is_sent(scheme):
    given = {}
    for dtype in DTYPES:
        try:
            given[str(dtype)] = torch.zeros(2, 3, dtype=dtype).copy_(
                torch.zeros(2, 3, dtype=dtype)
            )
        except (RuntimeError, NotImplementedError):  # torch itself cannot copy these
            continue
        given[str(dtype)].view(torch.uint8)[:] = 1
    assert len(given) > 15
    publisher = scheme.publisher(given, 1)
    ticket = publisher.ticket(0)
    subscriber = ticket.open(ticket.fds)
    ticket.close()
    into = {name: torch.zeros_like(tensor) for name, tensor in given.items()}
    subscriber.take(into)
    assert all(bool((tensor.view(torch.uint8) == 1).all()) for tensor in into.values())
    subscriber.close()
    publisher.close()


@pytest.mark.parametrize(
    "bad", [torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr()]
)
def test_sparse_tensors_are_refused(scheme, bad):
    with pytest.raises(BadWeights, match="weight w is sparse"):
        scheme.publisher({"w": bad}, 1)


@pytest.mark.parametrize("scheme", [SharedMemory(), NoSync()], ids=["shared", "none"])
@pytest.mark.parametrize("worker", [2, -1, True, "0", 0.0])
def test_unknown_workers_are_refused(scheme, worker):
    publisher = scheme.publisher(weights(0), 2)
    with pytest.raises(
        BadOption, match="there is no worker .*: workers are numbered 0 to 1"
    ):
        publisher.ticket(worker)
    with pytest.raises(BadOption, match="there is no worker"):
        publisher.publish(weights(1), 1, workers=[0, worker])
    publisher.close()


def test_nothing_is_sent_without_a_transport():
    publisher = NoSync().publisher(weights(1), 1)
    ticket = pickle.loads(pickle.dumps(publisher.ticket(0)))
    subscriber = ticket.open([])
    into = weights(0)
    publisher.publish(weights(2), 2)
    assert subscriber.take(into) is None
    assert same(into, weights(0))
    subscriber.close()
    publisher.close()


def test_all_descriptors_are_closed(scheme):
    before = open_files()
    for _ in range(3):
        publisher = scheme.publisher(weights(1), 2)
        tickets = [publisher.ticket(0), publisher.ticket(0), publisher.ticket(1)]
        subscribers = [ticket.open(ticket.fds) for ticket in tickets]
        publisher.publish(weights(2), 2)
        for thing in (
            *tickets,
            *tickets,
            *subscribers,
            *subscribers,
            publisher,
            publisher,
        ):
            thing.close()
    wait_until(lambda: open_files() <= before)


@pytest.mark.parametrize("step", [1, 0], ids=["replaced", "half-written"])
def test_a_reader_that_never_finds_peace_says_so(step):
    publisher = SharedMemory(deadline_s=0.05).publisher(weights(1), 1)
    ticket = publisher.ticket(0)
    subscriber = ticket.open(ticket.fds)
    ticket.close()

    class Replaced(Buffer):
        """Somebody else writes it all the time."""

        @property
        def sequence(self) -> int:
            self.reads = getattr(self, "reads", step - 1) + step
            return self.reads

    for offset, buffer in publisher._buffers.items():
        subscriber._buffers[offset] = Replaced(buffer.memory, publisher._manifest)
    into = weights(0)
    with pytest.raises(
        CollectorTimeout, match="replaced faster than they could be read"
    ):
        subscriber.take(into)
    assert same(into, weights(0))
    subscriber.close()
    publisher.close()


def test_a_buffer_that_was_the_newest_a_moment_ago_is_left_alone():
    """Somebody may have begun to read it."""
    publisher = SharedMemory().publisher(weights(0), 1)
    used = []
    for version in range(9):
        publisher.publish(weights(version), version)
        used.append(int(publisher._cells[0]))
    assert all(len(set(used[i : i + 3])) == 3 for i in range(7))
    assert len(publisher._buffers) == 3
    publisher.close()


def test_the_successor_of_a_worker_that_got_half_a_message(side, scheme):
    publisher = scheme.publisher(BIG, 1)
    ticket = publisher.ticket(0)  # of a worker that dies before it reads
    publisher.publish(weights(1, BIG), 1)
    publisher.publish(weights(2, BIG), 2)
    taker = side.open(publisher.ticket(0), BIG)
    ticket.close()
    assert taker("extremes") == (2, [2, 2])
    publisher.publish(weights(3, BIG), 3)
    assert taker("extremes") == (3, [3, 3])
    publisher.close()
    taker("close")


ACTIONS = st.one_of(
    st.tuples(st.just("publish"), st.none() | st.sets(st.integers(0, 2))),
    st.tuples(st.sampled_from(["take", "open"]), st.integers(0, 2)),
)


@given(actions=st.lists(ACTIONS, max_size=40))
def test_every_worker_has_what_was_published_last_for_it(actions):
    like = {"w": torch.zeros(3)}
    publisher = SharedMemory().publisher(like, 3)
    tickets = [publisher.ticket(i) for i in range(3)]
    readers = [Reader(ticket, ticket.fds, like) for ticket in tickets]
    newest, taken = [0, 0, 0], [None, None, None]
    for count, (action, which) in enumerate(actions, 1):
        if action == "publish":
            publisher.publish(weights(count, like), count, which)
            newest = [
                count if which is None or i in which else old
                for i, old in enumerate(newest)
            ]
        elif action == "open":
            readers[which].close()
            tickets.append(publisher.ticket(which))
            readers[which], taken[which] = (
                Reader(tickets[-1], tickets[-1].fds, like),
                None,
            )
        else:
            version, got = readers[which].take()
            assert version == (None if taken[which] == newest[which] else newest[which])
            taken[which] = newest[which]
            assert got["w"].tolist() == [newest[which]] * 3
    for thing in (*tickets, *readers, publisher):
        thing.close()
