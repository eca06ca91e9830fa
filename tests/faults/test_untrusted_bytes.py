"""Everything that parses bytes from outside: any input is read or refused with a typed error; no
code runs.

``MUSTER_EXAMPLES=100000`` feeds so many inputs to each parser, other ones each time.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import resource
import socket
import struct
import sys
import tempfile
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import muster
from muster import Collector, Watch
from muster.cluster.joining import Member
from muster.cluster.link import Block, LinkLost
from muster.cluster.rendezvous import Rendezvous
from muster.cluster.socket_link import MAGIC
from muster.errors import BadRecording, MusterError
from muster.observing.page_server import PageAddress, PageServer
from muster.observing.snapshots import NAME, SnapshotReader
from muster.restore.crash_report import CrashReport, EnvFactory
from muster.testing import ChainEnv, CountingEnv
from muster.utils import tensor_files
from tests.fakes.linked import linked

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="limits memory"),
]
GIVEN = int(os.environ.get("MUSTER_EXAMPLES", "0"))
SEED = random.randrange(1 << 30) if GIVEN else 0
ROOM = 2 << 30  # bytes of address space beyond what the process has
MARK = Path(tempfile.gettempdir(), f"muster-untrusted-{os.getpid()}")


class Code:
    """Leaves a mark when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, (str(MARK),)


@pytest.fixture(autouse=True)
def no_code_and_bounded_memory():
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(
        resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, before[1])
    )
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)
    assert not MARK.exists()


def inputs(count: int):
    """Random generators, one for each input."""
    for number in range(GIVEN or count):
        yield random.Random(f"{SEED} {number}")


# --- changes of bytes and of structures ---------------------------------------------------------


def changed_bytes(rng: random.Random, content: bytes) -> bytes:
    """A few bytes changed, cut out, put in or repeated."""
    found = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 8])):
        at = (
            rng.randrange(len(found) + 1)
            if rng.random() < 0.5
            else rng.randrange(min(len(found), 256) + 1)
        )
        size = rng.choice([1, 1, 2, 8, 64, 4096])
        kind = rng.randrange(5)
        if kind == 0:
            found[at : at + size] = rng.randbytes(size)
        elif kind == 1:
            del found[at : at + size]
        elif kind == 2:
            found[at:at] = rng.randbytes(size)
        elif kind == 3:
            found[at:at] = found[rng.randrange(len(found) + 1) :][:size]
        else:
            del found[at:]
    return bytes(found)


STRANGE = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        7,
        2**31,
        2**63 - 1,
        -(2**63),
        2**64,
        10**30,
        0.5,
        1e308,
        -0.0,
    ),
    *(
        "",
        "x",
        "../../etc/passwd",
        "/etc/passwd",
        "\x00",
        "\ud800",
        "a" * 5000,
        "os:system",
        "CartPole-v1",
        "float32",
    ),
    *(
        [],
        {},
        [[]],
        [None],
        {"": None},
        [[[[[[[[]]]]]]]],
        {"tuple": []},
        {"dict": [[1, 2]]},
        {"bytes": 0},
    ),
    *(
        {"tensor": 0},
        {"tensor": 99},
        {"int": "0x" + "f" * 3000},
        {"float": "zz"},
        {"array": 0, "dtype": "O"},
    ),
)


def changed_json(rng: random.Random, about: Any) -> Any:
    """A copy of a JSON value in which a few parts are others."""
    about = copy.deepcopy(about)
    for _ in range(rng.choice([1, 1, 1, 3])):
        places = list(_places(about))
        if not places:
            return rng.choice(STRANGE)
        node, key = rng.choice(places)
        kind = rng.randrange(4)
        if kind == 0:
            del node[key]
        elif kind == 1:
            other, place = rng.choice(places)
            node[key] = (
                copy.deepcopy(other[place])
                if place in other or isinstance(other, list)
                else None
            )
        elif kind == 2 and isinstance(node, list):
            node.insert(key, copy.deepcopy(rng.choice(STRANGE)))
        else:
            node[key] = copy.deepcopy(rng.choice(STRANGE))
    return about


def _places(node: Any):
    for key in list(node) if isinstance(node, dict) else range(len(node)):
        yield node, key
        if isinstance(node[key], (dict, list)):
            yield from _places(node[key])


def changed_file(rng: random.Random, content: bytes, path: Path) -> bytes:
    """A tensor file with other bytes; or one with valid checksums whose description or tensors are
    others.
    """
    if rng.random() < 0.4:
        return changed_bytes(rng, content)
    path.write_bytes(content)
    with open(path, "rb") as file, tensor_files.opened(file, path) as found:
        about, tensors = (
            found.about,
            {name: found.tensor(name).clone() for name in found.names},
        )
    if tensors and rng.random() < 0.3:
        name = rng.choice(sorted(tensors))
        kind = rng.randrange(5)
        if kind == 0:
            del tensors[name]
        elif kind == 1:
            tensors[name] = torch.zeros(rng.choice([(), (0,), (1,), (3, 5), (2, 2, 2)]))
        elif kind == 2:
            tensors[name] = tensors[name].reshape(-1)[1:].clone()
        elif kind == 3:
            tensors[name] = tensors[name].to(
                rng.choice([torch.float64, torch.bool, torch.uint8, torch.int16])
            )
        else:
            tensors[name] = torch.frombuffer(
                bytearray(pickle.dumps(Code())), dtype=torch.uint8
            )
    else:
        about = changed_json(rng, about)
    with suppress(ValueError, UnicodeEncodeError):
        return tensor_files.encode(tensors, about)
    return content


# --- files ------------------------------------------------------------------------------------


def test_recordings(tmp_path):
    source = tmp_path / "source"
    with Collector(
        ChainEnv, None, frames_per_batch=20, total_frames=60, record=source, seed=1
    ) as collector:
        list(collector)
    files = {
        path.name: path.read_bytes() for path in source.iterdir() if path.is_file()
    }
    target, read = tmp_path / "target", 0
    target.mkdir()
    for rng in inputs(400):
        name = rng.choice(sorted(files))
        for other, content in files.items():
            (target / other).write_bytes(content)
        if name.endswith(".json"):
            text = json.dumps(changed_json(rng, json.loads(files[name]))).encode()
            content = changed_bytes(rng, files[name]) if rng.random() < 0.4 else text
        else:
            content = changed_file(rng, files[name], tmp_path / "scratch")
        (target / name).write_bytes(content)
        with suppress(BadRecording):
            recording = muster.load(target, skip_damaged=rng.random() < 0.3)
            for batch in recording:
                assert batch.numel() >= 0
            for number in range(min(3, len(recording.episodes))):
                recording.episode(number)
            read += 1
    assert read  # some changes are harmless


def state_file(path):
    with Collector(
        CountingEnv, None, num_envs=2, frames_per_batch=8, seed=1
    ) as collector:
        collector.next()
        muster.save_state(path, collector.state_dict())
    return path.read_bytes()


def test_states_of_collectors(tmp_path):
    content = state_file(tmp_path / "state")
    loaded = 0
    for rng in inputs(400):
        (tmp_path / "changed").write_bytes(
            changed_file(rng, content, tmp_path / "scratch")
        )
        collector = Collector(CountingEnv, None, num_envs=2, frames_per_batch=8, seed=1)
        with suppress(MusterError):
            collector.load_state_dict(tmp_path / "changed")
            loaded += 1
            collector.next()
        collector.shutdown(
            raise_on_error=False
        )  # the attributes of an environment may be any
    assert loaded


def test_crash_reports(tmp_path):
    factory = EnvFactory("CartPole-v1", 1, {"render_mode": None}, None)
    report = CrashReport("CartPole-v1", factory, [0], True, "step", "E", "x")
    report.save(tmp_path / "report")
    content = (tmp_path / "report").read_bytes()
    for rng in inputs(400):
        (tmp_path / "changed").write_bytes(
            changed_file(rng, content, tmp_path / "scratch")
        )
        with suppress(MusterError):
            CrashReport.load(tmp_path / "changed")


# --- connections --------------------------------------------------------------------------------

HEADER = struct.Struct("<QQQ")  # length of the message, tag, length of the block
GREETING = HEADER.pack(len(MAGIC) + 32, 0, 0) + MAGIC + bytes(32)
PROOF = HEADER.pack(32, 0, 0) + bytes(32)


def test_a_rendezvous_goes_on_after_any_strangers():
    with closing(Rendezvous(1)) as rendezvous:
        host, port = rendezvous.address.split(":")
        for rng in inputs(300):
            with (
                socket.create_connection((host, int(port)), 60) as stranger,
                suppress(OSError),
            ):
                stranger.sendall(changed_bytes(rng, GREETING + PROOF))
        rendezvous.admit(0, 0)
        assert Member(rendezvous.address, rendezvous.token, 0).join().node == 0


def test_a_changed_message_is_never_delivered():
    """Whatever is changed on the way, the receiver gets what was sent, in order, and then the loss
    of the link.
    """
    sent = [(b"first", 0), (b"", 0), (b"x" * 3000, 700), (b"last", 0)]
    for rng in inputs(300):
        with linked() as ends:
            for tag, (message, size) in enumerate(sent, 1):
                ends.main.send(
                    message,
                    Block(np.full(size, 7, np.uint8)) if size else None,
                    tag if size else 0,
                )
            ends.main.close()
            data = b"".join(iter(lambda end=ends.to_main: end.recv(1 << 16), b""))
            ends.to_node.sendall(changed_bytes(rng, data))
            ends.to_node.close()
            got = []
            with pytest.raises(LinkLost):
                while True:
                    received = ends.node.receive()
                    got.append(
                        (
                            received.message,
                            0 if received.block is None else received.block.size,
                        )
                    )
            assert got == sent[: len(got)]


TOKEN = "of-sixteen-or-more-characters"
REQUESTS = [
    f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:8000\r\nCookie: x=1; muster_watch_%d={TOKEN}\r\n{more}\r\n\r\n"
    for method, path, more in (
        ("GET", "/", "Accept: text/html"),
        ("GET", f"/?token={TOKEN}", "Accept: text/html"),
        ("GET", "/page.js", "Accept-Encoding: gzip"),
        ("GET", "/events", "Accept: text/event-stream"),
        ("GET", "/films/0.mp4", "Range: bytes=0-1023"),
        ("POST", "/films/0/best", "X-Muster-Watch: 1\r\nContent-Length: 0"),
    )
]


@pytest.fixture
def watched(tmp_path):
    """A directory with the snapshots of a run."""
    watch = Watch(tmp_path / "run", None)
    with Collector(
        CountingEnv, None, frames_per_batch=8, total_frames=16, watch=watch
    ) as collector:
        list(collector)
    return tmp_path / "run"


def test_requests_of_the_live_page(watched):
    page = PageAddress("127.0.0.1:0")
    requests = [
        (request % page.socket.getsockname()[1]).encode() for request in REQUESTS
    ]
    with PageServer(watched, page.socket, TOKEN) as server:
        server.ending.set()  # streams end after the first message
        secret = [b"event: entries", *(content for content, _ in server.files.values())]
        admitted = 0
        for rng in inputs(1000):
            sent = changed_bytes(rng, rng.choice(requests))
            viewer, there = socket.socketpair()
            with viewer, there:
                viewer.sendall(sent)
                viewer.shutdown(socket.SHUT_WR)
                server.finish_request(there, ("", 0))
                there.shutdown(socket.SHUT_WR)
                reply = b"".join(iter(lambda viewer=viewer: viewer.recv(1 << 16), b""))
            shown = any(part in reply for part in secret)
            assert not shown or TOKEN.encode() in sent
            admitted += shown
        assert admitted


def test_snapshots_of_the_live_page(watched):
    content = (watched / NAME).read_bytes()
    for rng in inputs(400):
        (watched / NAME).write_bytes(changed_bytes(rng, content))
        with suppress(MusterError), closing(SnapshotReader(watched)) as reader:
            json.dumps(reader.read(), allow_nan=False)
