"""What nodes do in the tests of links: functions of a link and the node's number."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading

import numpy as np

from muster.cluster.link import Block, LinkLost

BEAT = b"beat"


def pattern(size, seed):
    """Bytes that are wrong wherever one is lost, moved or doubled."""
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def echo(link, node):
    """Send back what comes, under the same tag; a message "bye" ends it."""
    while True:
        try:
            got = link.receive()
        except LinkLost:
            return False
        if got.message == b"bye":
            return True
        if got.message == BEAT:
            continue
        link.send(got.message, None if got.block is None else Block(got.block), got.tag)


def introduced(link, node):
    """Say who it is, then echo."""
    link.send(f"{node} {os.getpid()}".encode())
    return echo(link, node)


def sender(link, node):
    """Send what is asked for: "size tag seed" of each block."""
    for order in link.receive().message.decode().split(","):
        size, tag, seed = map(int, order.split())
        link.send(order.encode(), Block(pattern(size, seed)), tag)
    return echo(link, node)


def reuser(link, node):
    """Send blocks out of one piece of memory, which is overwritten as soon as ``send`` has
    returned.
    """
    memory = np.zeros(int(link.receive().message), np.uint8)
    for tag in range(1, 6):
        memory[:] = tag
        link.send(b"again", Block(memory), tag)
    memory[:] = 255
    return echo(link, node)


def both_ways(link, node):
    """Send and receive at once: "count size" blocks in each direction; then say what came."""
    count, size = map(int, link.receive().message.split())

    def send():
        for tag in range(1, count + 1):
            link.send(b"up %d" % tag, Block(pattern(size, tag)), tag)

    thread = threading.Thread(target=send)
    thread.start()
    right = 0
    for tag in range(1, count + 1):
        got = link.receive()
        right += got.message == b"down %d" % tag and bool(
            (got.block == pattern(size, 100 + tag)).all()
        )
    thread.join()
    link.send(b"%d" % right)
    return echo(link, node)


def expects(link, node):
    """Let the first block arrive in the middle of a larger array; send back all of it."""
    size = int(link.receive().message)
    memory = np.full(size + 20, 7, np.uint8)
    link.expect(5, memory[10:-10])
    link.send(b"ready")
    got = link.receive()
    assert got.block is not None
    assert np.shares_memory(got.block, memory)
    link.send(b"all", Block(memory), 1)
    return echo(link, node)


def deaf(link, node):
    """Say so, and do not read until the test is over (or its deadline)."""
    link.send(b"%d" % os.getpid())
    threading.Event().wait(60)
    return False


def write(path, outcome):
    """At once, for whoever waits for the file."""
    with open(path + ".part", "w") as file:
        file.write(outcome)
    os.rename(path + ".part", path)


def sends_until_lost(link, node):
    """Send blocks of ones, "size path", until the link is lost; then write down so."""
    size, path = link.receive().message.decode().split()
    link.send(b"%d" % os.getpid())
    try:
        for tag in range(1, 1000):
            link.send(b"ones", Block(np.ones(int(size), np.uint8)), tag)
        write(path, "heard")
    except LinkLost as lost:
        write(path, f"lost: {lost}")
    return False


def stops(link, node):
    """Stop as with SIGSTOP when told to; when it goes on, try to be heard, and write down what
    comes of it.
    """
    path = link.receive().message.decode()
    link.send(b"%d" % os.getpid())
    link.receive()  # what was sent has arrived
    os.kill(os.getpid(), signal.SIGSTOP)
    try:
        for number in range(100):
            link.send(b"late %d" % number, Block(np.ones(1000, np.uint8)), number + 1)
        outcome = "heard"
    except LinkLost as lost:
        outcome = f"lost: {lost}"
    write(path, outcome)
    return False


def closes(link, node):
    """Close the link when told to."""
    link.receive()
    link.send(b"last words")
    link.close()
    return True


def closes_after_much(link, node):
    """Send more than goes into one packet, and close the link at once."""
    link.receive()
    for number in range(10):
        link.send(b"%d" % number + bytes(50_000))
    link.close()
    return True


def closes_after_a_large_message(link, node):
    """Send a message that takes some time on its way, and close the link at once."""
    size = int(link.receive().message)
    link.send(bytes(size))
    link.close()
    return True


def listens(link, node):
    """Receive so many messages without an answer to any, then say how many bytes their blocks had."""
    total = 0
    for _ in range(int(link.receive().message)):
        block = link.receive().block
        total += 0 if block is None else block.size
    link.send(b"%d" % total)
    return echo(link, node)


def loses(link, node):
    """Wait for a message, and write down how that ends: with the name of the exception, and after
    saying where.
    """
    path = link.receive().message.decode()
    try:
        link.receive()
        outcome = "received"
    except LinkLost as lost:
        outcome = f"lost: {lost}"
    write(path, outcome)
    return False


def exits(channel):
    """The whole process of a node: ends before it joins."""
    channel.receive()
    sys.exit(3)


def never_joins(channel):
    """The whole process of a node: does not join."""
    channel.receive()
    threading.Event().wait(60)


def under_torchrun():
    """Rank 0 echoes through each of the others, twice; they are nodes. Run by ``torchrun -m``."""
    from muster.cluster.direct import DirectCarrier
    from muster.cluster.joining import run_node
    from muster.cluster.rendezvous import Rendezvous
    from muster.cluster.torchrun import TorchrunLauncher

    for _ in range(2):  # collectors, one after the other
        if os.environ["RANK"] != "0":
            assert run_node(target="tests.fakes.link_nodes:introduced")
            continue
        count = int(os.environ["WORLD_SIZE"]) - 1
        carrier = DirectCarrier(
            launcher=TorchrunLauncher(), rendezvous=Rendezvous(count)
        )
        for node in range(count):
            link = carrier.connect(node, 0, 60.0, threading.Event())
            said = link.receive().message.decode().split()
            print(f"node {node} is rank {int(said[0]) + 1}")
            link.send(b"bye")
            with contextlib.suppress(LinkLost):  # once the node has closed it
                link.receive()
        carrier.close()


if __name__ == "__main__":
    under_torchrun()
