"""Mailbox between workers and a server: no question is lost, none is answered twice, and who sleeps
is woken.
"""

from __future__ import annotations

import mmap
import os
import select
import sys
import threading
from functools import partial

import pytest

from muster.errors import MusterError, PolicyError
from muster.memory.shared import Arena
from muster.workers import mailbox as module
from muster.workers.channel import Channel, WakeUp
from muster.workers.launch import launch
from muster.workers.mailbox import (
    ASKED,
    ASLEEP,
    CELLS,
    FINISHED,
    Mailbox,
    MailboxClient,
)
from tests.fakes.served import rows_of
from tests.waits import open_files, wait_until

pytestmark = [pytest.mark.skipif(sys.platform == "win32", reason="no worker processes")]
LONG_S = 60.0  # for what comes at once


@pytest.fixture(params=["eventfd", "pipe"])
def wake_up(request, monkeypatch):
    if request.param == "pipe":
        monkeypatch.delattr(os, "eventfd", raising=False)
    made = WakeUp()
    assert len(made.fds) == (2 if request.param == "pipe" else 1)
    yield made
    made.close()


@pytest.fixture
def mailbox(monkeypatch):
    monkeypatch.setattr(
        module, "LOOK_S", 1000.0
    )  # who is not woken by a wake-up is not woken
    made = Mailbox(2)
    yield made
    made.close()


@pytest.fixture
def client(mailbox):
    """Of worker 1, in this process."""
    made = MailboxClient(1, 2, [os.dup(fd) for fd in mailbox.fds_for(1)], lambda: False)
    yield made
    made.close()


def rings(wake_up):
    return bool(select.select([wake_up.fds[0]], [], [], 0)[0])


def finished(mailbox, worker):
    """The last request that it was done with."""
    return mailbox.cells[worker * CELLS + FINISHED]


def in_thread(function):
    """Start it; what it returns or raises is in the list once the thread has ended."""
    got = []

    def run():
        try:
            got.append(function())
        except MusterError as error:
            got.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, got


# --- wake-ups -------------------------------------------------------------------------------------


def test_a_wake_up_that_rings_many_times_is_heard_once(wake_up):
    assert not rings(wake_up)
    for _ in range(100_000):  # more than a pipe holds
        wake_up.ring()
    assert rings(wake_up)
    wake_up.wait(LONG_S)
    assert not rings(wake_up)
    wake_up.ring()
    wake_up.wait(LONG_S)
    assert not rings(wake_up)


def test_who_waits_for_a_wake_up_that_does_not_ring_waits_no_longer_than_that(wake_up):
    assert not wake_up.wait(0.0)
    assert not wake_up.wait(0.01)
    assert not rings(wake_up)


def test_a_wake_up_wakes_who_sleeps_on_it_in_another_hand(wake_up):
    other = WakeUp(*[os.dup(fd) for fd in wake_up.fds])
    thread, got = in_thread(lambda: wake_up.wait(LONG_S))
    other.ring()
    thread.join(LONG_S)
    assert got == [True]
    other.close()


def test_senders_that_rang_are_given_once_each(wake_up):
    for sender in (2, 1, 2, 3):
        wake_up.ring(sender)
    wake_up.ring()
    wake_up.clear()
    assert wake_up.unattended
    with wake_up.senders() as senders:
        assert senders == [2, 1, 3]
    assert not wake_up.unattended
    with wake_up.senders() as senders:
        assert senders == []


def test_after_an_error_the_senders_ring_again(wake_up):
    wake_up.ring(1)
    wake_up.ring(2)
    wake_up.clear()
    with pytest.raises(KeyError), wake_up.senders():
        wake_up.ring(3)  # one that comes meanwhile
        raise KeyError
    assert rings(wake_up)
    with wake_up.senders() as senders:
        assert sorted(senders) == [1, 2, 3]


def test_closed_wake_ups_have_no_descriptors_and_close_again(wake_up):
    fds = wake_up.fds
    wake_up.close()
    wake_up.close()
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_no_descriptor_of_lines_is_left(mailbox):
    before = open_files()
    for _ in range(3):
        made = Mailbox(5)
        worker = MailboxClient(
            4, 5, [os.dup(fd) for fd in made.fds_for(4)], lambda: False
        )
        worker.close()
        worker.close()
        made.close()
        made.close()
    wait_until(lambda: open_files() <= before)


# --- questions and answers ------------------------------------------------------------------------


def test_a_question_says_what_and_lasts_until_its_answer(mailbox, client):
    assert mailbox.question(1) == 0
    thread, got = in_thread(lambda: client.ask(7, 3))
    wait_until(lambda: mailbox.question(1))
    assert (
        mailbox.question(1),
        mailbox.request(1),
        mailbox.row(1),
        mailbox.question(0),
    ) == (
        1,
        7,
        3,
        0,
    )
    mailbox.answer(1, 1)
    thread.join(LONG_S)
    assert (got, mailbox.question(1)) == ([None], 0)


def test_an_answer_that_it_has_failed_is_an_error_and_the_next_question_is_another(
    mailbox, client
):
    thread, got = in_thread(lambda: client.ask(7, 3))
    wait_until(lambda: mailbox.question(1))
    mailbox.answer(1, 1, failed=True)
    thread.join(LONG_S)
    assert isinstance(got[0], PolicyError)
    assert mailbox.question(1) == 0
    thread, got = in_thread(lambda: client.ask(7, 3))
    wait_until(lambda: mailbox.question(1) == 2)
    mailbox.answer(1, 2)
    thread.join(LONG_S)
    assert got == [None]


@pytest.mark.parametrize("late", [1, -1])
def test_late_answers_to_one_who_is_gone_do_not_answer_its_successor(
    mailbox, client, late
):
    """The server was still at the first question."""
    client._cells[ASKED] = 1
    assert mailbox.question(1) == 1
    mailbox.reset(1)
    assert mailbox.question(1) == 0
    successor = MailboxClient(
        1, 2, [os.dup(fd) for fd in mailbox.fds_for(1)], lambda: False
    )
    thread, got = in_thread(lambda: successor.ask(8, 0))
    wait_until(lambda: mailbox.question(1) == 2)
    mailbox.answer(1, 1, failed=late < 0)
    assert mailbox.question(1) == 2
    assert got == []
    mailbox.answer(1, 2)
    thread.join(LONG_S)
    assert got == [None]
    successor.close()


def test_a_successor_does_not_inherit_the_sleep_of_who_was_killed(mailbox, client):
    client._cells[ASLEEP] = 1
    MailboxClient(
        1, 2, [os.dup(fd) for fd in mailbox.fds_for(1)], lambda: False
    ).close()
    mailbox.answer(1, 0)
    assert not rings(mailbox._wake_ups[1])


def test_who_is_given_up_does_not_wait_for_ever(mailbox, monkeypatch):
    """A thread whose collector is closed."""
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    client = MailboxClient(
        0, 2, [os.dup(fd) for fd in mailbox.fds_for(0)], lambda: True
    )
    with pytest.raises(
        MusterError, match="This worker's rollouts are not awaited any more"
    ):
        client.ask(1, 0)
    client.close()


def test_who_has_finished_says_so_and_wakes_a_server_that_sleeps(mailbox, client):
    thread, got = in_thread(
        lambda: mailbox.sleep(lambda: finished(mailbox, 1) == 5, LONG_S) or "woken"
    )
    wait_until(lambda: mailbox.cells[2 * CELLS + ASLEEP])
    client.finished(5)
    thread.join(LONG_S)
    assert (got, finished(mailbox, 0)) == (["woken"], 0)
    assert mailbox.cells[2 * CELLS + ASLEEP] == 0


def test_who_is_at_work_is_known_until_it_has_finished(mailbox, client):
    assert mailbox.look([0, 1]) == ([], 0)
    mailbox.expect(1, 5)
    mailbox.expect(1, 4)
    assert mailbox.look([0, 1]) == ([], 1)
    assert mailbox.look([0]) == ([], 0)
    thread, _ = in_thread(lambda: client.ask(4, 0))
    wait_until(lambda: mailbox.question(1))
    assert mailbox.look([0, 1]) == ([(1, 1)], 1)
    mailbox.answer(1, 1)
    thread.join(LONG_S)
    client.finished(4)
    assert mailbox.look([0, 1]) == ([], 1)
    client.finished(5)
    assert mailbox.look([0, 1]) == ([], 0)
    mailbox.expect(1, 4)  # it failed, and is to go on
    assert mailbox.look([0, 1]) == ([], 1)
    mailbox.reset(1)
    assert mailbox.look([0, 1]) == ([], 0)


def test_of_those_who_are_answered_together_the_last_one_rings():
    made = Mailbox(4, groups=[[0, 1, 3], [2]])
    hands = [
        MailboxClient(n, 4, [os.dup(fd) for fd in made.fds_for(n)], lambda: False)
        for n in range(4)
    ]
    for worker in (0, 1, 2):
        made.expect(worker, worker + 1)
    made.cells[4 * CELLS + ASLEEP] = 1
    threads = []
    for worker, wakes in (
        (0, False),
        (2, True),
        (1, True),
    ):  # nobody waits for 3, which has nothing to do
        while rings(made.wake_up):
            made.wake_up.wait(0)
        threads.append(in_thread(partial(hands[worker].ask, worker + 1, 0))[0])
        wait_until(partial(made.question, worker))
        wait_until(lambda worker=worker: made.cells[worker * CELLS + ASLEEP])
        assert rings(made.wake_up) == wakes, worker
    for worker in (0, 1, 2):
        made.answer(worker, 1)
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive()
    for end in (*hands, made):
        end.close()


def test_a_server_that_sleeps_is_woken_by_a_question_and_a_worker_by_its_answer(
    mailbox, client
):
    """Both have stopped looking by then."""
    asked, got = in_thread(lambda: client.ask(1, 0))
    wait_until(lambda: mailbox.cells[CELLS + ASLEEP])
    mailbox.answer(1, 1)
    asked.join(LONG_S)
    served, woken = in_thread(
        lambda: mailbox.sleep(lambda: bool(mailbox.question(1)), LONG_S) or "woken"
    )
    wait_until(lambda: mailbox.cells[2 * CELLS + ASLEEP])
    asked, got = in_thread(lambda: client.ask(1, 1))
    served.join(LONG_S)
    assert woken == ["woken"]
    mailbox.answer(1, 2)
    asked.join(LONG_S)
    assert got == [None]


def test_a_server_does_not_sleep_through_what_came_before(mailbox, monkeypatch):
    mailbox.sleep(lambda: True, LONG_S)
    monkeypatch.setattr("muster.workers.mailbox.SERVER_SPIN_S", 10.0)
    looks = iter([False] * 3)
    mailbox.sleep(lambda: next(looks, True), LONG_S)  # while it looks


# --- between processes ----------------------------------------------------------------------------


def served(mailbox, counts, *, late_s=0.0, fails=lambda row: False):
    """Answer the questions of processes; the rows that each asked for, and what they say at the
    end.

    A question must not be seen before its observations, nor an answer before its actions (as it can
    on ARM64 without ``keep_order``).
    """
    started, arena = [], Arena.create("test-rows")
    arena.allocate(mmap.PAGESIZE * len(counts))
    lanes = [rows_of(arena, worker) for worker in range(len(counts))]
    for worker, count in enumerate(counts):
        ours, theirs = Channel.pair()
        child = launch(
            "tests.fakes.served:asks", theirs, name=f"test-client-{worker}", light=True
        )
        ours.send(
            (worker, len(counts), count, late_s), [*mailbox.fds_for(worker), arena.fd]
        )
        started.append((ours, child))
    rows = [[] for _ in counts]

    def over():
        return all(finished(mailbox, worker) for worker in range(len(counts)))

    try:
        while not over():
            mailbox.sleep(
                lambda: any(map(mailbox.question, range(len(counts)))) or over(), 1.0
            )
            for worker in range(len(counts)):
                if number := mailbox.question(worker):
                    assert mailbox.request(worker) == worker + 1
                    rows[worker].append(mailbox.row(worker))
                    observations, actions = lanes[worker]
                    assert (observations == mailbox.row(worker)).all()
                    actions[:] = -observations
                    mailbox.answer(worker, number, failed=fails(mailbox.row(worker)))
            for channel, child in started:
                assert child.exit_code() is None or channel.poll(), "it has died"
        return rows, [channel.receive(LONG_S)[0] for channel, _ in started]
    finally:
        for channel, child in started:
            channel.close()
            child.kill()
            child.join(LONG_S)
            child.close()
        arena.close()


def test_many_thousand_questions_of_processes_are_each_answered_once():
    counts = [3_000, 1_000, 2_000]
    made = Mailbox(len(counts))
    rows, refused = served(made, counts, fails=lambda row: row % 7 == 3)
    assert rows == [list(range(count)) for count in counts]
    assert refused == [
        [row for row in range(count) if row % 7 == 3] for count in counts
    ]
    made.close()


def test_processes_and_a_server_that_sleep_before_every_question_wake_each_other():
    """No question has to wait for the look that comes every ``LOOK_S``."""
    made = Mailbox(2)
    rows, refused = served(made, [100, 100], late_s=0.0005)
    assert (rows, refused) == ([list(range(100))] * 2, [[], []])
    made.close()
