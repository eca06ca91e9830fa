"""Channels, status pages and worker processes; real ones, really killed."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from multiprocessing.connection import wait
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.errors import BadOption, MusterError
from muster.rollout.progress import ORDER, PHASE, Phase
from muster.workers import launch as launching
from muster.workers import lifelines
from muster.workers.channel import Channel, StatusPage
from muster.workers.launch import UNKNOWN, launch, shutdown_forkserver
from tests.fakes.fault_runs import alive, all_gone
from tests.storms import storm
from tests.waits import descriptors_left

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
TARGETS = "tests.fakes.worker_targets"
WAIT_S = 60.0  # for what comes at once, on a machine that is not overloaded


@pytest.fixture(scope="module", autouse=True)
def one_fork_server():
    """Of the tests in this file, and with buffers, as users have them."""
    shutdown_forkserver()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONUNBUFFERED", raising=False)
        yield
    shutdown_forkserver()


@pytest.fixture
def pair():
    ends = Channel.pair()
    yield ends
    for end in ends:
        end.close()


@pytest.fixture
def start():
    """Start a worker: its channel and the child."""
    started = []

    def start_one(function: str, **options):
        ours, theirs = Channel.pair()
        child = launch(
            f"{TARGETS}:{function}", theirs, name=f"test-{len(started)}", **options
        )
        started.append((ours, child))
        return ours, child

    yield start_one
    for channel, child in started:
        channel.close()
        child.kill()
        child.join(WAIT_S)
        child.close()


@pytest.fixture
def ask(start):
    """What an expression is in a worker."""
    channel, _ = start("asked")

    def value(expression: str):
        channel.send(expression)
        return channel.receive(WAIT_S)[0]

    return value


@pytest.fixture
def light(monkeypatch):
    """Fork servers import nothing beforehand: for tests that need several."""
    monkeypatch.setattr(launching, "_preloadable", lambda module: False)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def descriptors() -> list[str]:
    gc.collect()  # or garbage of other tests closes its own between two counts
    return os.listdir("/proc/self/fd")


def server_pid() -> int:
    return launching._ForkServer.shared[False].pid


# -------------------------------------------------------------------------------------- channels


def test_descriptors_arrive_with_their_message_and_are_not_inherited(pair):
    a, b = pair
    files = [os.memfd_create(str(i)) for i in range(4)]
    for i, fd in enumerate(files):
        os.write(fd, f"file {i}".encode())
    a.send("none")
    a.send("first", files[:1])
    a.send("others", files[1:])
    a.send("none again")
    for fd in files:
        os.close(fd)
    received = [b.receive() for _ in range(4)]
    assert [message for message, _ in received] == [
        "none",
        "first",
        "others",
        "none again",
    ]
    assert [[os.pread(fd, 9, 0) for fd in fds] for _, fds in received] == [
        *([], [b"file 0"], [b"file 1", b"file 2", b"file 3"], []),
    ]
    assert not any(os.get_inheritable(fd) for _, fds in received for fd in fds)
    for _, fds in received:
        for fd in fds:
            os.close(fd)


@given(
    st.lists(st.tuples(st.integers(0, 400_000), st.integers(0, 3)), max_size=8),
    st.booleans(),
)
def test_messages_of_any_size_arrive_whole_with_their_descriptors(shapes, deadline):
    a, b = Channel.pair()
    null = os.open(os.devnull, os.O_RDONLY)
    timeout = WAIT_S if deadline else None
    sender = threading.Thread(
        target=lambda: [
            a.send(bytes([i]) * size, [null] * fds, timeout)
            for i, (size, fds) in enumerate(shapes)
        ]
    )
    sender.start()
    for i, (size, fds) in enumerate(shapes):
        message, received = b.receive(timeout)
        assert message == bytes([i]) * size
        assert len(received) == fds
        for fd in received:
            os.close(fd)
    sender.join()
    os.close(null)
    a.close()
    b.close()


def test_the_end_comes_after_what_was_sent_before_it(pair):
    a, b = pair
    a.send("unread by a's side")
    b.send("unread")
    a.send("last")
    a.close()
    assert b.receive(WAIT_S) == ("unread by a's side", [])
    assert b.receive(WAIT_S) == ("last", [])
    for timeout in (None, WAIT_S):
        with pytest.raises(EOFError):
            b.receive(timeout)
        with pytest.raises(EOFError):
            b.send("to nobody", timeout=timeout)


@pytest.mark.parametrize("cut", [1, 15, 16, 30, -1])
def test_an_end_in_the_middle_of_a_message_is_an_end(cut):
    a, b = Channel.pair()
    a.send("a message of some length")
    raw = b._sock.recv(1000)
    c, d = socket.socketpair()
    c.send(raw[:cut])
    c.close()
    channel = Channel(d)
    with pytest.raises(EOFError):
        channel.receive()
    for end in (a, b, channel):
        end.close()


def test_a_message_that_came_in_pieces_can_be_waited_for_again():
    c, d = socket.socketpair()
    payload = pickle.dumps("whole")
    raw = len(payload).to_bytes(8, sys.byteorder) + bytes(8) + payload
    channel = Channel(d)
    for byte in raw[:-1]:
        c.send(bytes([byte]))
        assert not channel.poll()
        with pytest.raises(TimeoutError, match="has not sent a message"):
            channel.receive(timeout=0)
    c.send(raw[-1:])
    assert channel.poll()
    assert channel.receive() == ("whole", [])
    c.close()
    channel.close()


def test_poll_knows_of_messages_that_came_together_and_of_the_end(pair):
    a, b = pair
    assert not b.poll()
    assert not b.poll(0.01)
    a.send(1)
    a.send(2)
    assert b.poll()
    assert b.receive() == (1, [])
    assert b.poll()
    assert b.receive() == (2, [])
    assert not b.poll()
    a.close()
    assert b.poll()


def test_a_peer_that_does_not_read_is_given_up_and_nothing_gets_out_of_step(pair):
    a, b = pair
    big = bytes(3_000_000)
    with pytest.raises(TimeoutError, match="has not read in time"):
        a.send(big, timeout=0.05)
    with pytest.raises(TimeoutError):
        a.send("withdrawn: the rest of the big one goes first", timeout=0)
    got = []
    reader = threading.Thread(
        target=lambda: got.extend(b.receive(WAIT_S)[0] for _ in range(2))
    )
    reader.start()
    a.send("after", timeout=WAIT_S)
    reader.join()
    assert got == [big, "after"]


def test_a_message_of_which_nothing_could_be_sent_is_withdrawn_with_its_descriptors(
    pair,
):
    a, b = pair
    null = os.open(os.devnull, os.O_RDONLY)
    sent = 0
    with pytest.raises(TimeoutError):
        while True:
            a.send(
                sent, [null], timeout=0
            )  # small: the system takes all of it or nothing
            sent += 1
    got = [b.receive(WAIT_S) for _ in range(sent)]
    a.send("end", timeout=WAIT_S)
    got.append(b.receive(WAIT_S))
    assert [message for message, _ in got] == [*range(sent), "end"]
    assert [len(fds) for _, fds in got] == [1] * sent + [0]
    for fd in [null, *(fd for _, fds in got for fd in fds)]:
        os.close(fd)


def test_a_second_interruption_while_a_message_is_withdrawn_does_not_part_it_from_its_descriptors(
    pair, monkeypatch
):
    a, b = pair
    with pytest.raises(TimeoutError):
        while True:
            a.send("first", timeout=0)  # small: the system takes all of it or nothing
    made = []

    def memoryview_(*given):
        made.append(memoryview(*given))
        if len(made) > 1:  # as of a signal handler, which can run after any call
            raise Interrupt
        return made[0]

    monkeypatch.setattr("muster.workers.channel.memoryview", memoryview_, raising=False)
    with contextlib.suppress(TimeoutError, Interrupt):
        a.send("withdrawn", [0], timeout=0)
    monkeypatch.undo()
    drained = threading.Thread(target=lambda: a.send("last", [0]))
    drained.start()
    got = []
    while not got or got[-1][0] != "last":
        got.append(b.receive(WAIT_S))
    drained.join()
    for message, fds in got:
        assert len(fds) == (message in ("withdrawn", "last")), message
        for fd in fds:
            os.close(fd)


def test_what_cannot_be_pickled_or_read_leaves_the_next_message_alone(pair):
    a, b = pair
    with pytest.raises(BadOption, match="a message is a _thread.lock, which cannot"):
        a.send(threading.Lock())
    sys.modules["gone"] = type(sys)("gone")
    sys.modules["gone"].Gone = type("Gone", (), {"__module__": "gone"})
    before = len(descriptors())
    a.send(sys.modules["gone"].Gone(), [0])
    a.send("next", [0])
    del sys.modules["gone"]
    with pytest.raises(ModuleNotFoundError):
        b.receive()
    message, fds = b.receive()
    assert (message, len(fds)) == ("next", 1)
    os.close(fds[0])
    assert len(descriptors()) == before


class Interrupted:
    """Unpickling calls Python code, in which the process may be signalled."""

    signals = 0

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)
        if Interrupted.signals:
            Interrupted.signals -= 1
            signal.raise_signal(signal.SIGUSR2)


def test_an_exception_of_a_signal_handler_within_unpickling_loses_no_message(
    pair, monkeypatch
):
    def interrupt(*_) -> None:
        raise Interrupt

    a, b = pair
    sent = Interrupted()
    sent.content = "first"
    a.send(sent, [0])
    a.send("next")
    monkeypatch.setattr(Interrupted, "signals", 1)
    previous = signal.signal(signal.SIGUSR2, interrupt)
    try:
        with pytest.raises(Interrupt):
            b.receive()
    finally:
        signal.signal(signal.SIGUSR2, previous)
    message, fds = b.receive()
    assert (message.content, len(fds)) == ("first", 1)
    os.close(fds[0])
    assert b.receive() == ("next", [])


def test_descriptors_for_which_there_is_no_room_are_an_error(pair):
    a, b = pair
    a.send("with", [0, 0])
    with descriptors_left(0), pytest.raises(OSError, match="too many open files"):
        b.receive()


def test_a_closed_channel_closes_what_nobody_took_and_says_so(pair):
    a, b = pair
    before = len(descriptors())
    a.send("untaken", [0, 0])
    a.send("too")
    b.poll()
    assert len(descriptors()) == before + 2
    b.close()
    b.close()
    assert len(descriptors()) == before - 1
    with pytest.raises(EOFError, match="This end"):
        b.send("x", timeout=1)
    c, d = Channel.pair()
    c.close()
    with pytest.raises(EOFError, match="This end"):
        c.receive(1)
    d.close()


class Interrupt(Exception):
    """What a signal handler raises in the tests, as Python's own raises KeyboardInterrupt."""


@pytest.mark.slow
def test_exceptions_of_signal_handlers_lose_and_double_nothing(start):
    channel, _ = start("echo")
    file = os.memfd_create("passed")
    armed, interrupted, closed = False, 0, 0
    got: list[tuple[tuple[int, bytes], list[int]]] = []

    def interrupt(*_) -> None:
        if armed:
            raise Interrupt

    def size(i: int) -> int:
        return 300_000 if i % 40 == 0 else i % 300

    with storm(interrupt):
        for i in itertools.count():
            if (
                i >= 300 and interrupted > 5
            ):  # a storm is as strong as the machine has time for it
                break
            try:
                armed = True
                channel.send((i, bytes(size(i))), [file])
            except Interrupt:
                interrupted += 1
            finally:
                armed = False
            for attempt in range(10):
                if got and got[-1][0][0] == i:
                    break
                try:
                    armed = attempt < 5
                    got.extend(
                        map(channel.receive, (0.02,))
                    )  # nothing is between the call and the list
                except (
                    TimeoutError
                ):  # it was withdrawn, or its rest goes before the next message
                    break
                except Interrupt:
                    interrupted += 1
                finally:
                    armed = False
            while closed < len(got):
                os.close(*got[closed][1])
                closed += 1
    channel.send("last")
    while got[-1][0] != "last":
        got.append(channel.receive(WAIT_S))
    numbers = [message[0] for message, _ in got[:-1]]
    assert numbers == sorted(set(numbers))
    assert len(numbers) + interrupted >= i
    assert all(len(message[1]) == size(message[0]) for message, _ in got[:-1])
    assert [len(fds) for _, fds in got] == [1] * len(numbers) + [0]
    for _, fds in got[closed:]:
        for fd in fds:
            os.close(fd)
    os.close(file)


def test_a_message_that_comes_together_with_an_interruption_is_not_lost(start):
    channel, _ = start("sends_and_signals")
    armed, interrupted = False, 0

    def interrupt(*_) -> None:
        if armed:
            raise Interrupt

    previous = signal.signal(signal.SIGUSR2, interrupt)
    got = []
    try:
        for i in range(20_000):
            if (
                i >= 200 and interrupted > 5
            ):  # how often both come together is the system's affair
                break
            channel.send((i, os.getpid()))
            while len(got) <= i:
                try:
                    armed = True
                    got.extend(map(channel.receive, (WAIT_S if i % 2 else None,)))
                except Interrupt:
                    interrupted += 1
                finally:
                    armed = False
            channel.receive(WAIT_S)  # the signal has been sent
    finally:
        signal.signal(signal.SIGUSR2, previous)
    assert [message for message, _ in got] == list(range(len(got)))
    assert interrupted > 5


# --------------------------------------------------------------------------------------- status pages


def test_the_parent_sees_what_a_worker_counts(start):
    status_page = StatusPage.create()
    assert status_page.cells.tolist() == [0] * 64
    status_page.cells[ORDER] = -(2**63)
    channel, child = start("holds_the_gil")
    channel.send("here", [status_page.fd])
    channel.receive(WAIT_S)
    assert status_page.cells[PHASE] == Phase.STEP
    assert status_page.cells[ORDER] == -(2**63)
    cells = status_page.cells
    status_page.close()
    status_page.close()
    child.kill()
    assert child.join(WAIT_S)
    assert cells[PHASE] == Phase.STEP


def test_the_stack_of_a_worker_that_holds_the_gil_names_file_and_line(start):
    status_page = StatusPage.create()
    channel, child = start("holds_the_gil")
    channel.send("here", [status_page.fd])
    channel.receive(WAIT_S)
    assert status_page.stack() == ""
    lines = Path("tests/fakes/worker_targets.py").read_text().splitlines()
    number = next(i for i, line in enumerate(lines, start=1) if "# HERE" in line)
    stacks = []
    while len(stacks) < 50 and not (
        stacks and "in holds_the_gil" in stacks[-1].splitlines()[1]
    ):
        child.send_signal(signal.SIGUSR1)  # the first may find it still in `send`
        stacks.append(status_page.stack(within_s=WAIT_S))
    assert (
        f'worker_targets.py", line {number} in holds_the_gil'
        in stacks[-1].splitlines()[1]
    )
    assert stacks[-1].count("most recent call first") == 1, (
        "what was read before comes again"
    )
    assert status_page.stack() == ""
    assert child.exit_code() is None
    status_page.close()


def test_the_stack_of_a_crash_is_kept(start):
    status_page = StatusPage.create()
    channel, child = start("crashes")
    channel.send("here", [status_page.fd])
    assert child.join(WAIT_S)
    assert child.exit_code() == -signal.SIGSEGV
    stack = status_page.stack()
    assert "Segmentation fault" in stack
    assert "in crashes" in stack
    status_page.close()


# ------------------------------------------------------------------------------------- processes


@pytest.mark.parametrize(
    ("how", "code", "written"),
    [
        ("return", 0, ""),
        ("exit 3", 3, ""),
        ("exit text", 1, "no more frames"),
        ("exception", 1, 'raise ValueError("boom")'),
        (int(signal.SIGKILL), -signal.SIGKILL, ""),
        (int(signal.SIGSEGV), -signal.SIGSEGV, ""),
        (int(signal.SIGTERM), -signal.SIGTERM, ""),
    ],
)
def test_the_exit_code_says_how_a_worker_ended(start, capfd, how, code, written):
    channel, child = start("ends")
    assert child.exit_code() is None
    assert not child.join(0.01)
    channel.send(how)
    assert wait([child], WAIT_S) == [child]
    assert child.exit_code() == code
    assert child.join(0)
    child.close()
    child.close()
    assert child.exit_code() == code
    child.kill()
    child.send_signal(signal.SIGKILL)
    out, err = capfd.readouterr()
    assert out == "said before the end\n" + "no newline" * (how == "return")
    assert written in err
    assert bool(written) == bool(err)


def test_a_worker_sees_the_surroundings_that_the_parent_has_now(
    ask, start, tmp_path, monkeypatch, capfd
):
    assert ask("os.getcwd()") == os.getcwd()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MUSTER_TEST", "a=b ü \udcff")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["here", "now"])
    (tmp_path / "brand_new.py").write_text(
        "def run(channel):\n    channel.send(__file__)\n"
    )
    channel, _ = start("asked")
    before = os.umask(0o31)
    expected = [str(tmp_path), "a=b ü \udcff", None, sys.path, ["here", "now"], 0o31]
    try:
        late, _ = start("asked")
        late.send(
            "[os.getcwd(), os.getenv('MUSTER_TEST'), os.getenv('HOME'), sys.path, sys.argv, os.umask(0)]"
        )
        assert late.receive(WAIT_S)[0] == expected
    finally:
        os.umask(before)
    channel.send("os.umask(0)")
    assert channel.receive(WAIT_S)[0] == before
    ours, theirs = Channel.pair()
    child = launch("brand_new:run", theirs, name="new")
    assert ours.receive(WAIT_S)[0] == str(tmp_path / "brand_new.py")
    assert child.join(WAIT_S)
    child.close()
    ours.close()
    late.send("[print('to the present stdout'), print('and err', file=sys.stderr)]")
    late.receive(WAIT_S)
    assert capfd.readouterr() == ("to the present stdout\n", "and err\n")


@pytest.mark.slow
def test_a_parent_without_a_directory_or_output_can_start_workers_all_the_same(
    tmp_path,
):
    (tmp_path / "gone").mkdir()
    process = driver(
        """
        assert sys.stdout is None
        os.rmdir(os.getcwd())
        for method in "forkserver", "spawn":
            worker("asked", method=method, first="[os.getcwd(), os.readlink('/proc/self/fd/1')]")
        print(pids[1::2], file=sys.stderr)
        """,
        shell="exec >&-",
        cwd=tmp_path / "gone",
    )
    assert process.stderr.read() == "[['/', '/dev/null'], ['/', '/dev/null']]\n"
    process.wait()


def test_a_worker_is_a_process_of_its_own(ask):
    assert ask("os.getsid(0) == os.getpgrp() == os.getpid()")
    assert ask("signal.getsignal(signal.SIGINT) is signal.SIG_IGN")
    for number in ("SIGTERM", "SIGCHLD", "SIGIO"):
        assert ask(f"signal.getsignal(signal.{number}) is signal.SIG_DFL")
    assert ask("len(signal.pthread_sigmask(signal.SIG_BLOCK, ()))") == 0
    assert ask("os.readlink('/proc/self/fd/0')") == os.devnull
    assert ask("open('/proc/self/comm').read()") == "test-0\n"
    assert ask("sys.stdout.line_buffering")


def test_a_worker_holds_no_descriptor_of_the_server_or_of_other_workers(start):
    for _ in range(3):
        start("ready")[0].receive(WAIT_S)
    channel, _ = start("asked")
    channel.send("descriptors()")
    held = channel.receive(WAIT_S)[0]
    assert len(held) == 2, held  # its channel and its lifeline
    assert all(
        name.startswith("socket:") and not inheritable for name, inheritable in held
    )


def test_workers_find_the_parent_s_heavy_modules_imported_and_no_threads(start):
    import torch

    first, second = start("asked")[0], start("asked")[0]
    values = []
    for channel in (first, second):
        channel.send("sys.modules['torch'].cuda.is_initialized()")
        assert channel.receive(WAIT_S)[0] is False
        channel.send("sys.modules['torch'].get_num_threads()")
        assert channel.receive(WAIT_S)[0] >= 1
        channel.send(
            "[line for line in open('/proc/self/status') if 'Threads' in line]"
        )
        assert channel.receive(WAIT_S)[0] == ["Threads:\t1\n"]
        channel.send(
            "[random.random(), float(sys.modules['numpy'].random.rand()), float(sys.modules['torch'].rand(()))]"
        )
        values += [channel.receive(WAIT_S)[0]]
    assert all(a != b for a, b in zip(*values, strict=True)), (
        "workers share a global random stream"
    )
    assert torch.get_num_threads() == 1


def test_jax_is_never_imported_before_a_fork():
    assert not any("jax" in module for module in launching.PRELOADED)
    assert not launching._preloadable("muster.envs.jax")
    assert not launching._preloadable("jax")
    assert not launching._preloadable("musterpiece.envs")
    assert launching._preloadable("muster.workers.channel")


def test_a_module_that_cannot_be_imported_beforehand_harms_nobody(start, monkeypatch):
    monkeypatch.setattr(launching, "PRELOADED", ("no_such_module",))
    monkeypatch.setitem(sys.modules, "no_such_module", sys)
    channel, _ = start("asked")
    channel.send("1 + 1")
    assert channel.receive(WAIT_S)[0] == 2


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@pytest.mark.parametrize("end", ["killed", "returned", "kill()", "keeper killed"])
def test_what_a_worker_started_in_other_sessions_ends_with_it_before_its_end_is_known(
    start, light, end, method
):
    (channel, child), (other_channel, _) = (
        start("with_daemons", method=method),
        start("with_daemons"),
    )
    pids, others = channel.receive(WAIT_S)[0], other_channel.receive(WAIT_S)[0]
    assert pids[0] == child.pid
    assert all(map(alive, pids))
    if end == "killed":
        os.kill(child.pid, signal.SIGKILL)
    elif end == "returned":
        channel.send("stop")
    elif end == "kill()":
        child.kill()
    else:
        os.kill(parent(child.pid), signal.SIGKILL)
    assert child.join(WAIT_S)
    if end != "keeper killed":
        assert child.exit_code() == (0 if end == "returned" else -signal.SIGKILL)
        assert not any(map(alive, pids)), (
            "where another worker takes its place, they are gone already"
        )
    else:
        assert all_gone(pids)
    assert all(map(alive, others)), "the other worker's are left alone"


def test_an_interpreter_that_cannot_begin_is_an_error_and_leaves_nothing(
    start, monkeypatch
):
    before = len(descriptors())
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", [])  # no module can be imported there
        with pytest.raises(MusterError, match="ended before it had started test-0"):
            start("ready", method="spawn")
    assert len(descriptors()) == before


@pytest.mark.parametrize("how", ["return", signal.SIGKILL])
def test_what_a_worker_leaves_that_ended_well_is_asked_to_end(
    start, light, tmp_path, how
):
    channel, child = start("with_polite_daemon")
    channel.send(str(tmp_path / "asked"))
    pids = channel.receive(WAIT_S)[0]
    channel.send(how)
    assert child.join(WAIT_S)
    assert not any(map(alive, pids))
    assert (tmp_path / "asked").exists() == (how == "return")


def test_orphans_that_end_while_the_worker_lives_leave_no_zombies(start, light):
    channel, child = start("with_short_lived_orphans")
    keeper = channel.receive(WAIT_S)[0]
    below = Path(f"/proc/{keeper}/task/{keeper}/children")
    deadline = time.monotonic() + WAIT_S
    while below.read_text().split() != [str(child.pid)]:
        assert time.monotonic() < deadline
        select.select([], [], [], 0.01)


@pytest.mark.slow
def test_a_keeper_without_the_kernels_list_of_children_finds_them_all_the_same(
    monkeypatch,
):
    with subprocess.Popen(["sleep", "1000"]) as child:
        mine = [pid for pid in lifelines.children() if pid == child.pid]
        monkeypatch.setattr(lifelines, "_text", missing := MissingList(lifelines._text))
        assert (
            [pid for pid in lifelines.children() if pid == child.pid]
            == mine
            == [child.pid]
        )
        assert missing.asked
        child.kill()


class MissingList:
    """Reads files on a kernel without CONFIG_PROC_CHILDREN."""

    def __init__(self, honest):
        self.honest, self.asked = honest, False

    def __call__(self, path):
        if path.endswith("/children"):
            self.asked = True
            raise FileNotFoundError(path)
        return self.honest(path)


def test_many_ends_at_once_are_all_reported(start, light):
    workers = [start("ready") for _ in range(30)]
    for channel, _ in workers:
        channel.receive(WAIT_S)
    for _, child in workers:
        os.kill(child.pid, signal.SIGKILL)
    assert [child.join(WAIT_S) for _, child in workers] == [True] * 30
    assert {child.exit_code() for _, child in workers} == {-signal.SIGKILL}


def test_a_worker_whose_server_died_before_it_looked_does_not_run():
    code = (
        "import socket; from muster.workers.lifelines import tie_life; "
        "ours, lifeline = socket.socketpair(); ours.close(); tie_life(lifeline); print('runs')"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", "")


def test_the_server_leaves_no_zombies(start):
    channel, child = start("with_grandchild")
    pids, _ = channel.receive(WAIT_S)
    child.kill()
    assert child.join(WAIT_S)
    start("asked")  # the server answers: it has reaped
    deadline = time.monotonic() + 5
    while (
        any(Path(f"/proc/{pid}").exists() for pid in pids)
        and time.monotonic() < deadline
    ):
        select.select([], [], [], 0.01)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_killed_server_takes_its_workers_along_and_another_takes_its_place(
    start, light
):
    workers = [start("with_grandchild"), start("spins")]
    (pids, _), (pid, _) = (channel.receive(WAIT_S) for channel, _ in workers)
    old = server_pid()
    os.kill(old, signal.SIGKILL)
    assert all_gone([*pids, pid])
    assert [child.join(WAIT_S) for _, child in workers] == [True, True]
    assert [child.exit_code() for _, child in workers] == [UNKNOWN, UNKNOWN]
    channel, child = start("ready")
    assert channel.receive(WAIT_S)[0] == child.pid
    assert server_pid() != old


def test_sigterm_for_the_server_ends_its_workers(start, light):
    channel, _ = start("with_grandchild")
    pids, _ = channel.receive(WAIT_S)
    os.kill(server_pid(), signal.SIGTERM)
    assert all_gone(pids)


def test_the_server_ignores_sigint(start, light):
    channel, child = start("ready")
    channel.receive(WAIT_S)
    os.kill(server_pid(), signal.SIGINT)
    again, _ = start("ready")
    again.receive(WAIT_S)
    assert child.exit_code() is None


def test_a_worker_outlives_the_thread_that_started_it_and_the_server(start, light):
    shutdown_forkserver()
    shutdown_forkserver()
    started = []
    thread = threading.Thread(target=lambda: started.append(start("echo")))
    thread.start()
    thread.join()
    channel, child = started[0]
    channel.send("still there")
    assert channel.receive(WAIT_S)[0] == "still there"
    assert child.exit_code() is None


def test_a_launch_that_is_interrupted_does_not_mix_up_the_next_ones(start, light):
    def interrupt(*_) -> None:
        if armed:
            raise Interrupt

    armed, interrupted = False, 0
    with storm(interrupt):
        for number in range(500):
            if number >= 15 and interrupted:
                break
            (ours, theirs), child = Channel.pair(), None
            try:
                armed = True
                child = launch(f"{TARGETS}:ready", theirs, name="interrupted")
                armed = False
            except Interrupt:
                interrupted += 1
            finally:
                armed = False
                if child is not None:
                    child.kill()
                ours.close()
                theirs.close()
    assert interrupted
    channel, child = start("ready")
    assert channel.receive(WAIT_S)[0] == child.pid


def test_a_worker_costs_three_descriptors_with_its_status_page_and_none_after_its_end(
    start,
):
    start("asked")
    gc.collect()
    before = len(descriptors())
    workers = []
    for _ in range(5):
        channel, child = start("ready")
        workers.append((channel, child, StatusPage.create()))
    assert len(descriptors()) == before + 15
    for channel, child, status_page in workers:
        child.kill()
        child.join(WAIT_S)
        for one in (channel, child, status_page):
            one.close()
    assert len(descriptors()) == before


def test_too_few_descriptors_are_an_error_that_says_what_to_do():
    ours, theirs = Channel.pair()
    before = descriptors()
    with (
        descriptors_left(9),
        pytest.raises(
            BadOption,
            match="worker-7 cannot be started: of the .* 9 are left.*`ulimit -n 4096",
        ),
    ):
        launch(f"{TARGETS}:echo", theirs, name="worker-7")
    assert len(descriptors()) == len(before)
    ours.close()
    theirs.close()


def test_impossible_methods_and_systems_are_refused(monkeypatch, pair):
    with pytest.raises(
        BadOption, match="'fork' is unknown; there are .*forkserver.*spawn"
    ):
        launch(f"{TARGETS}:echo", pair[0], name="w", method="fork")
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(BadOption, match="backend='threads' works everywhere"):
        launch(f"{TARGETS}:echo", pair[0], name="w")


def test_a_spawned_worker_behaves_like_a_forked_one(start, monkeypatch, capfd):
    monkeypatch.setenv("MUSTER_TEST", "spawned")
    monkeypatch.setattr(sys, "argv", ["of the parent"])
    before = len(descriptors())
    channel, child = start("asked", method="spawn")
    assert len(descriptors()) == before + 4, (
        "channels to it and to its fork server, whose life hangs on one more"
    )
    for expression, value in {
        "os.getpid()": child.pid,
        "os.getsid(0)": child.pid,
        "os.getenv('MUSTER_TEST')": "spawned",
        "sys.argv": ["of the parent"],
        "sys.path": sys.path,
        "signal.getsignal(signal.SIGINT) is signal.SIG_IGN": True,
        "len(descriptors()), any(inheritable for _, inheritable in descriptors())": (
            2,
            False,
        ),
        "open('/proc/self/comm').read()": "test-0\n",
    }.items():
        channel.send(expression)
        assert channel.receive(WAIT_S)[0] == value, expression
    assert child.exit_code() is None
    channel.send("os.spawnlp(os.P_NOWAIT, 'sleep', 'sleep', '1000')")
    grandchild = channel.receive(WAIT_S)[0]
    channel.send("sys.exit(3)")
    assert wait([child], WAIT_S) == [child]
    assert child.join(WAIT_S)
    assert child.exit_code() == 3
    assert all_gone([grandchild])
    child.close()
    assert capfd.readouterr().err == ""


# --------------------------------------------------------------------------------- ends of parents

DRIVER = """
import os, sys, time
print("main module runs", flush=True)
from muster.workers import launch as launching
from muster.workers.channel import Channel, StatusPage
channels, pids = [], []
def worker(function, method=None, first=None, fds=()):
    ours, theirs = Channel.pair()
    child = launching.launch("tests.fakes.worker_targets:" + function, theirs, name=function, method=method)
    if first is not None:
        ours.send(first, fds)
    answer = ours.receive(60)[0]
    pids.extend([child.pid, *([answer] if isinstance(answer, list) else [])])
    channels.append((ours, child))
"""


def driver(code: str, shell: str = ":", **options) -> subprocess.Popen[str]:
    """A process of its own that runs ``DRIVER`` and more code."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, os.getcwd()])}
    command = [
        "sh",
        "-c",
        f'{shell}; exec "$0" "$@"',
        sys.executable,
        "-c",
        DRIVER + textwrap.dedent(code),
    ]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, env=environ, **options
    )


def flat(values) -> list[int]:
    return [
        pid
        for value in values
        for pid in (value if isinstance(value, list) else [value])
    ]


def test_nothing_is_left_of_a_killed_parent():
    process = driver(
        """
        status_page = StatusPage.create()
        worker("ready"); worker("spins"); worker("holds_the_gil", first="", fds=[status_page.fd])
        worker("with_grandchild")
        worker("with_nested_worker"); worker("with_grandchild", method="spawn"); worker("spins", method="spawn")
        worker("with_daemons"); worker("with_daemons", method="spawn")
        print(pids + [launching._ForkServer.shared[False].pid], flush=True)
        time.sleep(1000)
        """
    )
    assert process.stdout.readline() == "main module runs\n"
    pids = flat(eval(process.stdout.readline()))
    assert len(set(pids)) == 7 + 3 + 1 + 2 * 5
    assert all(map(alive, pids))
    process.kill()
    process.wait()
    assert all_gone(pids)


@pytest.mark.slow
def test_a_parent_may_be_killed_while_its_server_imports(tmp_path):
    (tmp_path / "slow_import.py").write_text(
        "import time\nprint('importing', flush=True)\ntime.sleep(1000)\n"
    )
    process = driver(
        f"""
        worker("spins"); worker("with_grandchild")
        print(pids + [launching._ForkServer.shared[False].pid], flush=True)
        sys.path.insert(0, {str(tmp_path)!r})
        launching.PRELOADED = ["slow_import"]
        sys.modules["slow_import"] = sys
        worker("ready")
        """
    )
    process.stdout.readline()
    pids = flat(eval(process.stdout.readline()))
    assert process.stdout.readline() == "importing\n"
    process.kill()
    process.wait()
    assert all_gone(pids)


def test_a_fork_of_the_parent_keeps_nothing_alive_and_harms_nothing():
    process = driver(
        """
        worker("spins"); worker("spins", method="spawn")
        fork = os.fork()
        if fork == 0:
            for _, child in channels:
                assert child.exit_code() == launching.UNKNOWN
                child.kill()
            ours, theirs = Channel.pair()
            own = launching.launch("tests.fakes.worker_targets:ready", theirs, name="own")
            print([os.getpid(), ours.receive(60)[0]], flush=True)
            time.sleep(1000)
        time.sleep(1000)
        """.replace("fork = os.fork()", "print(pids, flush=True); fork = os.fork()")
    )
    process.stdout.readline()
    pids = eval(process.stdout.readline())
    fork, own = eval(process.stdout.readline())
    assert all(map(alive, [*pids, fork, own]))
    process.kill()
    process.wait()
    assert all_gone(pids)
    assert alive(fork)
    assert alive(own)
    os.kill(fork, signal.SIGKILL)
    assert all_gone([own])


def test_a_parent_that_ends_by_itself_is_not_held_up_by_its_workers():
    process = driver(
        """
        worker("spins"); worker("with_grandchild"); worker("spins", method="spawn"); worker("with_daemons")
        print(pids + [launching._ForkServer.shared[False].pid], flush=True)
        """
    )
    lines = (
        process.stdout.read().splitlines()
    )  # ends only when no worker holds its standard output
    assert process.wait(WAIT_S) == 0
    assert lines[0] == "main module runs"
    assert len(lines) == 2, "a worker has imported the main module again"
    assert all_gone(flat(eval(lines[1])))
