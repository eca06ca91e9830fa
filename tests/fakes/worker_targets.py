"""What test workers run: functions of a channel. Light to import, since every worker does."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys

from muster.rollout.progress import PHASE, Phase
from muster.workers.channel import Channel, StatusPage


def echo(channel):
    try:
        while True:
            message, fds = channel.receive()
            channel.send(message, fds)
            for fd in fds:
                os.close(fd)
    except EOFError:
        pass


def descriptors():
    """What descriptors above standard error lead to, and whether programs inherit them."""
    found = {}
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            found[fd] = os.readlink(f"/proc/self/fd/{fd}"), os.get_inheritable(fd)
        except OSError:  # the one that looked
            pass
    return [value for fd, value in found.items() if fd > 2]


def asked(channel):
    """Evaluate expressions, such as ``os.getcwd()``."""
    names = {
        "os": os,
        "sys": sys,
        "signal": signal,
        "random": random,
        "descriptors": descriptors,
    }
    try:
        while True:
            channel.send(eval(channel.receive()[0], names))
    except EOFError:
        pass


def ends(channel):
    """In the way it is told to."""
    how, _ = channel.receive()
    print("said before the end")
    if how == "return":
        print("no newline", end="")
    if how == "exit 3":
        sys.exit(3)
    if how == "exit text":
        sys.exit("no more frames")
    if how == "exception":
        raise ValueError("boom")
    if isinstance(how, int):
        os.kill(os.getpid(), how)


def sends_and_signals(channel):
    """So that the receiver finds a message and a signal when it wakes up."""
    try:
        while True:
            (number, receiver), _ = channel.receive()
            channel.send(number)
            os.kill(receiver, signal.SIGUSR2)
            channel.send("signalled")
    except EOFError:
        pass


def ready(channel):
    channel.send(os.getpid())
    channel.receive()  # until somebody closes or kills
    os.pause() if hasattr(os, "pause") else signal.pause()


def spins(channel):
    channel.send(os.getpid())
    while True:
        pass


def holds_the_gil(channel):
    status_page = StatusPage.attach(channel.receive()[1][0])
    status_page.arm()
    status_page.cells[PHASE] = Phase.STEP
    channel.send(os.getpid())
    sum(range(10**15))  # HERE: C code that lets no other thread run


def crashes(channel):
    status_page = StatusPage.attach(channel.receive()[1][0])
    status_page.arm()
    os.kill(os.getpid(), signal.SIGSEGV)  # CRASH


def with_grandchild(channel):
    grandchild = subprocess.Popen(["sleep", "1000"])
    channel.send([os.getpid(), grandchild.pid])
    if channel.receive()[0] == "stop":
        return
    signal.pause()


STUBBORN = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
print(os.getpid(), child.pid, flush=True)
signal.pause()
"""


def with_daemons(channel):
    """Sessions of their own: a child, an orphan without any variable of ours, and one that ignores
    SIGTERM.
    """
    simulator = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    orphan = subprocess.run(
        ["sh", "-c", "setsid sleep 1000 > /dev/null 2>&1 & echo $!"],
        env={},
        capture_output=True,
        text=True,
        check=True,
    )
    stubborn = subprocess.Popen(
        [sys.executable, "-c", STUBBORN], start_new_session=True, stdout=subprocess.PIPE
    )
    pids = [
        os.getpid(),
        simulator.pid,
        int(orphan.stdout),
        *map(int, stubborn.stdout.readline().split()),
    ]
    channel.send(pids)
    try:
        while channel.receive()[0] != "stop":
            pass
    except EOFError:
        pass


def with_polite_daemon(channel):
    """Which leaves a file when it is asked to end."""
    path = channel.receive()[0]
    shell = f"trap 'echo asked > {path}; exit' TERM; echo ready; while :; do sleep 0.1; done"
    daemon = subprocess.Popen(
        ["sh", "-c", shell], start_new_session=True, stdout=subprocess.PIPE
    )
    daemon.stdout.readline()
    channel.send([os.getpid(), daemon.pid])
    how = channel.receive()[0]
    if how != "return":
        os.kill(os.getpid(), how)


def with_short_lived_orphans(channel):
    """It answers with how many processes are below its parent after orphans have ended."""
    for _ in range(20):
        subprocess.run(["sh", "-c", "setsid true &"], check=True)
    channel.send(os.getppid())
    channel.receive()


def with_nested_worker(channel):
    from muster.workers.launch import launch

    ours, theirs = Channel.pair()
    child = launch("tests.fakes.worker_targets:spins", theirs, name="nested")
    channel.send([os.getpid(), ours.receive()[0]])
    child.join(1000)
