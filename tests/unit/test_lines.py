"""Lines between workers and a server: no question is lost, none is answered twice, and who sleeps is woken."""

from __future__ import annotations

import os
import select
import sys
import threading
from functools import partial

import pytest

from muster.errors import MusterError, PolicyError
from muster.workers import lines as module
from muster.workers.channel import Channel, WakeUp
from muster.workers.launch import launch
from muster.workers.lines import ASKED, ASLEEP, CELLS, FINISHED, Line, Lines
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
def lines(monkeypatch):
    monkeypatch.setattr(module, "LOOK_S", 1000.0)  # who is not woken by a wake-up is not woken
    made = Lines(2)
    yield made
    made.close()


@pytest.fixture
def line(lines):
    """Of worker 1, in this process."""
    made = Line(1, 2, [os.dup(fd) for fd in lines.fds_for(1)], lambda: False)
    yield made
    made.close()


def rings(wake_up):
    return bool(select.select([wake_up.fds[0]], [], [], 0)[0])


def finished(lines, worker):
    """The last request that it was done with."""
    return lines.cells[worker * CELLS + FINISHED]


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


def until(ready):
    ended = threading.Event()
    while not ready():
        ended.wait(0.001)


# --- wake-ups ---------------------------------------------------------------------------------------


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


def test_closed_wake_ups_have_no_descriptors_and_close_again(wake_up):
    fds = wake_up.fds
    wake_up.close()
    wake_up.close()
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_no_descriptor_of_lines_is_left(lines):
    before = open_files()
    for _ in range(3):
        made = Lines(5)
        worker = Line(4, 5, [os.dup(fd) for fd in made.fds_for(4)], lambda: False)
        worker.close()
        worker.close()
        made.close()
        made.close()
    wait_until(lambda: open_files() <= before)


# --- questions and answers --------------------------------------------------------------------------


def test_a_question_says_what_and_lasts_until_its_answer(lines, line):
    assert lines.question(1) == 0
    thread, got = in_thread(lambda: line.ask(7, 3))
    until(lambda: lines.question(1))
    assert (lines.question(1), lines.request(1), lines.row(1), lines.question(0)) == (1, 7, 3, 0)
    lines.answer(1, 1)
    thread.join(LONG_S)
    assert (got, lines.question(1)) == ([None], 0)


def test_an_answer_that_it_has_failed_is_an_error_and_the_next_question_is_another(lines, line):
    thread, got = in_thread(lambda: line.ask(7, 3))
    until(lambda: lines.question(1))
    lines.answer(1, 1, failed=True)
    thread.join(LONG_S)
    assert isinstance(got[0], PolicyError)
    assert lines.question(1) == 0
    thread, got = in_thread(lambda: line.ask(7, 3))
    until(lambda: lines.question(1) == 2)
    lines.answer(1, 2)
    thread.join(LONG_S)
    assert got == [None]


@pytest.mark.parametrize("late", [1, -1])
def test_late_answers_to_one_who_is_gone_do_not_answer_its_successor(lines, line, late):
    """The server was still at the first question."""
    line._cells[ASKED] = 1
    assert lines.question(1) == 1
    lines.reset(1)
    assert lines.question(1) == 0
    successor = Line(1, 2, [os.dup(fd) for fd in lines.fds_for(1)], lambda: False)
    thread, got = in_thread(lambda: successor.ask(8, 0))
    until(lambda: lines.question(1) == 2)
    lines.answer(1, 1, failed=late < 0)
    assert lines.question(1) == 2
    assert got == []
    lines.answer(1, 2)
    thread.join(LONG_S)
    assert got == [None]
    successor.close()


def test_a_successor_does_not_inherit_the_sleep_of_who_was_killed(lines, line):
    line._cells[ASLEEP] = 1
    Line(1, 2, [os.dup(fd) for fd in lines.fds_for(1)], lambda: False).close()
    lines.answer(1, 0)
    assert not rings(lines._wake_ups[1])


def test_who_is_given_up_does_not_wait_for_ever(lines, monkeypatch):
    """A thread whose collector is closed."""
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    line = Line(0, 2, [os.dup(fd) for fd in lines.fds_for(0)], lambda: True)
    with pytest.raises(MusterError, match="Nobody waits for this worker any more"):
        line.ask(1, 0)
    line.close()


def test_who_has_finished_says_so_and_wakes_a_server_that_sleeps(lines, line):
    thread, got = in_thread(lambda: lines.sleep(lambda: finished(lines, 1) == 5, LONG_S) or "woken")
    until(lambda: lines.cells[2 * CELLS + ASLEEP])
    line.finished(5)
    thread.join(LONG_S)
    assert (got, finished(lines, 0)) == (["woken"], 0)
    assert lines.cells[2 * CELLS + ASLEEP] == 0


def test_who_is_at_work_is_known_until_it_has_finished(lines, line):
    assert lines.look([0, 1]) == ([], 0)
    lines.expect(1, 5)
    lines.expect(1, 4)
    assert lines.look([0, 1]) == ([], 1)
    assert lines.look([0]) == ([], 0)
    thread, _ = in_thread(lambda: line.ask(4, 0))
    until(lambda: lines.question(1))
    assert lines.look([0, 1]) == ([(1, 1)], 1)
    lines.answer(1, 1)
    thread.join(LONG_S)
    line.finished(4)
    assert lines.look([0, 1]) == ([], 1)
    line.finished(5)
    assert lines.look([0, 1]) == ([], 0)
    lines.expect(1, 4)  # it failed, and is to go on
    assert lines.look([0, 1]) == ([], 1)
    lines.reset(1)
    assert lines.look([0, 1]) == ([], 0)


def test_of_those_who_are_answered_together_the_last_one_rings():
    made = Lines(4, teams=[[0, 1, 3], [2]])
    hands = [Line(n, 4, [os.dup(fd) for fd in made.fds_for(n)], lambda: False) for n in range(4)]
    for worker in (0, 1, 2):
        made.expect(worker, worker + 1)
    made.cells[4 * CELLS + ASLEEP] = 1
    threads = []
    for worker, wakes in ((0, False), (2, True), (1, True)):  # nobody waits for 3, which has nothing to do
        while rings(made.wake_up):
            made.wake_up.wait(0)
        threads.append(in_thread(partial(hands[worker].ask, worker + 1, 0))[0])
        until(partial(made.question, worker))
        until(lambda worker=worker: made.cells[worker * CELLS + ASLEEP])
        assert rings(made.wake_up) == wakes, worker
    for worker in (0, 1, 2):
        made.answer(worker, 1)
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive()
    for end in (*hands, made):
        end.close()


def test_a_server_that_sleeps_is_woken_by_a_question_and_a_worker_by_its_answer(lines, line):
    """Both have stopped looking by then."""
    asked, got = in_thread(lambda: line.ask(1, 0))
    until(lambda: lines.cells[CELLS + ASLEEP])
    lines.answer(1, 1)
    asked.join(LONG_S)
    served, woken = in_thread(lambda: lines.sleep(lambda: bool(lines.question(1)), LONG_S) or "woken")
    until(lambda: lines.cells[2 * CELLS + ASLEEP])
    asked, got = in_thread(lambda: line.ask(1, 1))
    served.join(LONG_S)
    assert woken == ["woken"]
    lines.answer(1, 2)
    asked.join(LONG_S)
    assert got == [None]


def test_a_server_does_not_sleep_through_what_came_before(lines, monkeypatch):
    lines.sleep(lambda: True, LONG_S)
    monkeypatch.setattr("muster.workers.lines.SERVER_SPIN_S", 10.0)
    looks = iter([False] * 3)
    lines.sleep(lambda: next(looks, True), LONG_S)  # while it looks


# --- between processes ------------------------------------------------------------------------------


def served(lines, counts, *, late_s=0.0, fails=lambda row: False):
    """Answer the questions of processes; the rows that each asked for, and what they say at the end."""
    started = []
    for worker, count in enumerate(counts):
        ours, theirs = Channel.pair()
        child = launch("tests.fakes.served:asks", theirs, name=f"test-line-{worker}", light=True)
        ours.send((worker, len(counts), count, late_s), lines.fds_for(worker))
        started.append((ours, child))
    rows = [[] for _ in counts]

    def over():
        return all(finished(lines, worker) for worker in range(len(counts)))

    try:
        while not over():
            lines.sleep(lambda: any(map(lines.question, range(len(counts)))) or over(), 1.0)
            for worker in range(len(counts)):
                if number := lines.question(worker):
                    assert lines.request(worker) == worker + 1
                    rows[worker].append(lines.row(worker))
                    lines.answer(worker, number, failed=fails(lines.row(worker)))
            for channel, child in started:
                assert child.exit_code() is None or channel.poll(), "it has died"
        return rows, [channel.receive(LONG_S)[0] for channel, _ in started]
    finally:
        for channel, child in started:
            channel.close()
            child.kill()
            child.join(LONG_S)
            child.close()


def test_many_thousand_questions_of_processes_are_each_answered_once():
    counts = [3_000, 1_000, 2_000]
    made = Lines(len(counts))
    rows, refused = served(made, counts, fails=lambda row: row % 7 == 3)
    assert rows == [list(range(count)) for count in counts]
    assert refused == [[row for row in range(count) if row % 7 == 3] for count in counts]
    made.close()


def test_processes_and_a_server_that_sleep_before_every_question_wake_each_other():
    """No question has to wait for the look that comes every ``LOOK_S``."""
    made = Lines(2)
    rows, refused = served(made, [100, 100], late_s=0.0005)
    assert (rows, refused) == ([list(range(100))] * 2, [[], []])
    made.close()
