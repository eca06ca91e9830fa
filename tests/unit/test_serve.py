"""``muster.serve``: steps of clients arrive as those of environments, and lost clients lose nothing
of others.
"""

from __future__ import annotations

import gc
import json
import os
import random
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

import muster
from examples import serve_client
from examples.serve_client import Client
from muster import Collector, policies
from muster.cli.serve import parse_space
from muster.envs.spaces import observation_codec
from muster.errors import BadOption, CollectorClosed, UnknownOption, UnsupportedSpace
from muster.serving.client_link import ClientLost, Connection, WireFormat
from muster.testing import CountingEnv
from muster.utils.strangers import MOST
from tests.command_line import refused, run
from tests.tools import assert_balanced, assert_same, column, counting
from tests.waits import free_port, wait_until

SPACES: dict[str, Any] = {
    "observation_space": CountingEnv().observation_space,
    "action_space": CountingEnv().action_space,
}
IDS = ("collector", "traj_ids")
KNOWN = ("collector", "next_obs_valid")


def play(
    env: Any,
    client: Client,
    steps: int | None = None,
    *,
    decode: Callable[[bytes], Any] | None = None,
) -> int:
    """Play until the server closes, or for a number of steps; returns the number of steps with a
    result.
    """
    made, decode = 0, decode or (lambda action: struct.unpack("<q", action)[0])
    with suppress(ConnectionError):
        while steps is None or made < steps:
            action: bytes | None = client.reset(env.reset()[0].tobytes())
            while action is not None and (steps is None or made < steps):
                obs, reward, terminated, truncated, _ = env.step(decode(action))
                made += 1
                action = client.step(obs.tobytes(), reward, terminated, truncated)
    return made


@contextmanager
def playing(address: str, env: Any, **options: Any) -> Iterator[Client]:
    """A client that plays in a thread, until the server closes."""
    client = Client(address)
    client.socket.settimeout(60)
    thread = threading.Thread(target=play, args=(env, client), kwargs=options)
    thread.start()
    try:
        yield client
    finally:
        client.socket.shutdown(socket.SHUT_RDWR)
        thread.join(60)
        client.file.close()
        client.socket.close()
        assert not thread.is_alive()


@contextmanager
def serving(policy: Any = None, **options: Any) -> Iterator[Any]:
    """A server, and at its end the check that every frame is accounted for and no thread is left."""
    server = muster.serve(
        policy, **{**SPACES, "frames_per_batch": 6, "seed": 3, **options}
    )
    try:
        yield server
    finally:
        server.shutdown()
        stats = server.stats()
        assert_balanced(stats, in_flight=0)
        wait_until(
            lambda: (
                not [
                    t
                    for t in threading.enumerate()
                    if t.name in ("muster-serve", "muster-handshake")
                ]
            )
        )


def request(server: Any, until: Callable[[], Any] = lambda: True) -> Future[Any]:
    """The next batch, or the list of those until a condition.

    Clients get no actions before a batch is requested.
    """
    future: Future[Any] = Future()

    def collect() -> None:
        try:
            batches = [server.next()]
            while not until():
                batches.append(server.next())
        except BaseException as error:  # noqa: BLE001 (raised by the caller)
            future.set_exception(error)
        else:
            future.set_result(batches if len(batches) > 1 else batches[0])

    threading.Thread(target=collect, daemon=True).start()
    return future


@pytest.fixture
def connected(closing):
    """A function that connects a client, which is closed after the test."""

    def connect(address: str) -> Client:
        client = Client(address)
        closing(client.socket)
        closing(client.file)
        client.socket.settimeout(60)
        return client

    return connect


def hang_up(client: Client) -> None:
    client.file.close()
    client.socket.close()


def obs(t: float, length: float = 3) -> bytes:
    return struct.pack("<2f", length, t)


# --- the data -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "extra", [{}, {"inference": "server", "max_clients": 2}, {"trajs_per_batch": 2}]
)
def test_steps_of_a_client_equal_those_of_the_environment(extra):
    policy = policies.categorical(torch.nn.Linear(2, 2))
    options = {"frames_per_batch": 10, "total_frames": 30, "seed": 5}
    whole = {"trajs_per_batch": 2} if "trajs_per_batch" in extra else {}
    with (
        serving(policy, **options, **extra) as server,
        playing(server.address, CountingEnv(3)),
    ):
        got = list(server)
        assert server.stats().frames == 30 if not whole else server.stats().frames <= 30
    with Collector(counting(3), policy, **options, **whole) as collector:
        for batch, expected in zip(got, collector, strict=True):
            assert batch[KNOWN].all()
            assert_same(batch, expected, ignore=(IDS, KNOWN))


def test_random_actions_are_those_of_a_collector_with_this_seed():
    with (
        serving(frames_per_batch=20, total_frames=20) as server,
        playing(server.address, CountingEnv(3)),
    ):
        (got,) = server
    with Collector(
        counting(3), None, frames_per_batch=20, total_frames=20, seed=3
    ) as collector:
        (expected,) = collector
    assert got["action"].tolist() == expected["action"].tolist()


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("head", [False, True])
def test_clients_can_send_action_masks(joint, head):
    action = spaces.MultiDiscrete([2, 3])
    shape = (2, 3) if joint else (5,)
    space = spaces.Dict(
        action_mask=spaces.MultiBinary(shape),
        position=spaces.Box(0, 9, (2,), np.float32),
    )
    wire = WireFormat(observation_codec(space), "observation")
    policy = policies.categorical(torch.nn.Linear(2, 5)) if head else None

    def mask(t: int) -> Any:
        return ((np.arange(np.prod(shape)) + t) % 2).reshape(shape).astype(np.int8)

    class Masked(CountingEnv):
        def seen(self, obs: Any) -> Any:
            return np.frombuffer(
                wire.encode({"action_mask": mask(self.t), "position": obs}), np.uint8
            )

        def reset(self, **options: Any) -> Any:
            obs, info = super().reset(**options)
            return self.seen(obs), info

        def step(self, action: Any) -> Any:
            obs, *rest = super().step(0)
            return self.seen(obs), *rest

    options = {
        "observation_space": space,
        "action_space": action,
        "frames_per_batch": 40,
        "total_frames": 40,
    }
    decode = partial(struct.unpack, "<2q")
    with (
        serving(policy, **options) as server,
        playing(server.address, Masked(3), decode=decode),
    ):
        (batch,) = server
    first, second = batch["action"].unbind(-1)
    flat = batch["action_mask"].flatten(1)
    if joint:
        assert flat.gather(1, (first * 3 + second)[:, None]).all()
    else:
        assert flat.gather(1, torch.stack([first, 2 + second], 1)).all()


def test_parts_of_observations_and_actions_keep_their_values():
    space = spaces.Dict(
        image=spaces.Box(0, 255, (2, 3), np.uint8),
        place=spaces.Tuple(
            [spaces.Discrete(4, start=2), spaces.Box(-1, 1, (2,), np.float64)]
        ),
        switches=spaces.Box(0, 1, (3,), np.bool_),
        kinds=spaces.MultiDiscrete([3, 2]),
    )
    wire = WireFormat(observation_codec(space), "observation")
    space.seed(1)
    for _ in range(20):
        value = space.sample()
        again = wire.decode(bytearray(wire.encode(value)))
        assert again["place"][0] == value["place"][0]
        assert again["place"][1].tolist() == value["place"][1].tolist()
        for name in ("image", "switches", "kinds"):
            assert again[name].tolist() == value[name].tolist()
            assert again[name].dtype == value[name].dtype
    assert wire.nbytes == 6 + 8 + 16 + 3 + 16
    assert wire.description[0] == {"key": "image", "dtype": "uint8", "shape": [2, 3]}


def test_continuous_actions_reach_the_client():
    space, got = spaces.Box(-1, 1, (3,), np.float32), []

    def decode(action: bytes) -> int:
        got.append(np.frombuffer(action, "<f4").tolist())
        return 0

    with (
        serving(action_space=space, total_frames=6) as server,
        playing(server.address, CountingEnv(3), decode=decode),
    ):
        (batch,) = server
    assert got[:6] == batch["action"].tolist()


def test_published_weights_act():
    policy = policies.deterministic(torch.nn.Linear(2, 2, bias=False))
    with (
        serving(policy, track_policy_version=True) as server,
        playing(server.address, CountingEnv(3)),
    ):
        server.next()
        with torch.no_grad():
            policy.net.weight.copy_(torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
        server.update_policy_weights_()
        batches = [
            server.next() for _ in range(4)
        ]  # at most two rollouts were requested before
    assert batches[-1]["action"].tolist() == [1] * 6
    assert set(batches[-1]["collector", "policy_version"].tolist()) == {1}


# --- ends of episodes -----------------------------------------------------------------------------


def check_cut(batch: Any) -> None:
    """Rows of an episode of which two steps are known, and of the first episode of the next client."""
    assert column(batch, "observation")[:3] == [[3, 0], [3, 1], [3, 2]]
    assert column(batch, "next", "observation")[:3] == [[3, 1], [3, 2], [3, 2]]
    assert column(batch, "next", "reward")[:3] == [1, 2, 0]
    assert column(batch, "next", "truncated") == [
        False,
        False,
        True,
        False,
        False,
        True,
    ]
    assert not batch["next", "terminated"].any()
    assert batch[KNOWN].tolist() == [True, True, False, True, True, True]
    assert column(batch, "observation")[3:] == [[3, 0], [3, 1], [3, 2]]
    ids = batch[IDS].tolist()
    assert ids[0] == ids[1] == ids[2] != ids[3] == ids[4] == ids[5]


@pytest.mark.parametrize(
    "how", ["hangs up", "closes", "resets", "is slow", "breaks the protocol"]
)
def test_a_lost_client_truncates_its_episode(how, connected):
    with serving(timeouts={"step": 0.3} if how == "is slow" else None) as server:
        batch, client = request(server), connected(server.address)
        play(CountingEnv(3), client, 2)  # two steps, and an action without an answer
        reasons = {"closed": 1}
        if how == "hangs up":
            hang_up(client)
        elif how == "closes":
            client.ask({"type": "close"}, answered=False)
        elif how == "is slow":
            assert b"within the deadline" in client.socket.recv(1000)
            reasons = {"timeout": 1}
        elif how == "breaks the protocol":
            with pytest.raises(ConnectionError, match="reward is 'much'"):
                client.ask(
                    {
                        "type": "step",
                        "reward": "much",
                        "terminated": False,
                        "truncated": False,
                    },
                    obs(3),
                )
            reasons = {"bad_message": 1}
        if how == "resets":
            client.reset(obs(0))
            for t in (1, 2, 3):
                client.step(obs(t), t, False, t == 3)
            client.ask(
                {"type": "reset"}, obs(0), answered=False
            )  # a batch is complete when the next episode begins
            check_cut(batch.result(60))
            return
        with playing(server.address, CountingEnv(3, truncate=True)):
            check_cut(batch.result(60))
            assert reasons.items() <= server.lost.items()


def test_a_client_that_leaves_between_episodes_truncates_nothing(connected):
    with serving() as server:
        future, client = request(server), connected(server.address)
        play(CountingEnv(3), client, 3)
        hang_up(client)
        with playing(server.address, CountingEnv(3)):
            batch = future.result(60)
    assert column(batch, "next", "terminated") == [False, False, True] * 2
    assert not batch["next", "truncated"].any()
    assert batch[KNOWN].all()


def test_the_server_ends_an_episode_and_the_client_begins_another():
    with (
        serving(max_frames_per_traj=2) as server,
        playing(server.address, CountingEnv(5)),
    ):
        batch = server.next()
    assert column(batch, "observation") == [[5, 0], [5, 1]] * 3
    assert column(batch, "next", "observation") == [[5, 1], [5, 2]] * 3
    assert column(batch, "next", "truncated") == [False, True] * 3
    assert batch[KNOWN].all()


# --- several clients ------------------------------------------------------------------------------


def test_a_slow_client_does_not_delay_others_and_unused_places_do_not_count(connected):
    with serving(max_clients=3, total_frames=60) as server:
        slow = connected(server.address)
        slow.ask({"type": "reset"}, obs(0), answered=False)
        with playing(server.address, CountingEnv(3)):
            batches = list(server)  # also the last ones, which no unused place holds
        assert server.connected <= 2
        assert {worker.frames for worker in server.stats().workers} == {0, 60}
        assert len(batches) == 10
        hang_up(slow)


def test_two_clients_have_batches_of_their_own():
    with (
        serving(max_clients=2, frames_per_batch=4) as server,
        playing(server.address, CountingEnv(3)),
        playing(server.address, CountingEnv(5)),
    ):
        lengths = set[float]()

        def has_both() -> bool:
            found = set(server.next()["observation"][:, 0].tolist())
            assert len(found) == 1
            lengths.update(found)
            return lengths == {3, 5}

        wait_until(has_both)  # which client is how fast depends on the machine


# --- strangers and errors -------------------------------------------------------------------------


def error_of(address: str, about: dict[str, Any], values: bytes = b"") -> str:
    """The type of the error with which the server answers a first message."""
    client = Client.__new__(Client)
    client.socket = socket.create_connection(address.rsplit(":", 1), 60)
    client.file = client.socket.makefile("rb")
    with pytest.raises(ConnectionError):
        client.ask(about, values)
    hang_up(client)
    return str(about)


def test_clients_that_cannot_play_are_refused_and_others_play_on():
    description = [{"key": "observation", "dtype": "float32", "shape": [3]}]
    with serving(token="secret of mine") as server:
        batch, client = request(server), Client(server.address, "secret of mine")
        for wrong in (
            {"type": "hello", "protocol": 1},
            {"type": "hello", "protocol": 1, "token": "secret of yours"},
            {"type": "hello", "protocol": 1, "token": ["secret of mine"]},
            {"type": "hello", "protocol": 2, "token": "secret of mine"},
            {
                "type": "hello",
                "protocol": 1,
                "token": "secret of mine",
                "observation": description,
            },
            {"type": "step", "token": "secret of mine"},
        ):
            error_of(server.address, wrong)
        wait_until(lambda: server.lost.total() == 6)
        assert server.lost == {
            "bad_token": 3,
            "bad_protocol": 1,
            "bad_spaces": 1,
            "bad_message": 1,
        }
        action: bytes | None = client.reset(obs(0))
        for t in (1, 2, 3, 4, 5, 6):
            assert action is not None
            action = client.step(obs(t), t, False, False)
        assert column(batch.result(60), "next", "reward") == [1, 2, 3, 4, 5, 6]
        hang_up(client)


def test_a_client_too_many_is_told_so(monkeypatch, connected):
    monkeypatch.setattr("muster.serving.clients.HANDSHAKE_S", 0.2)
    with serving() as server:
        client = connected(server.address)
        with pytest.raises(
            ConnectionError, match="1 clients are connected, which is the maximum"
        ):
            connected(server.address)
        hang_up(client)


def silent(address: str, count: int, said: bytes = b"") -> list[socket.socket]:
    """Connections that have begun a message, and do not end it."""
    made = []
    for _ in range(count):
        made.append(socket.create_connection(address.rsplit(":", 1), 60))
        made[-1].sendall(said)
    return made


@pytest.mark.parametrize("said", [b"", b"\x02"], ids=["silent", "slow"])
def test_connections_that_say_nothing_keep_no_client_out(connected, said):
    with serving(token="secret of mine") as server, ExitStack() as made:
        for connection in silent(server.address, 2 * MOST, said):
            made.enter_context(connection)
        batch, client = request(server), Client(server.address, "secret of mine")
        action: bytes | None = client.reset(obs(0))
        for t in (1, 2, 3, 4, 5, 6):
            assert action is not None
            action = client.step(obs(t), t, False, False)
        assert column(batch.result(60), "next", "reward") == [1, 2, 3, 4, 5, 6]
        hang_up(client)


def test_clients_that_wait_for_a_place_are_limited_and_the_others_are_told_at_once(
    monkeypatch, connected
):
    monkeypatch.setattr("muster.serving.clients.MOST_WAITING", 1)
    monkeypatch.setattr("muster.serving.clients.HANDSHAKE_S", 60.0)
    with serving() as server:
        client = connected(server.address)
        place: list[Client] = []

        def wait() -> None:
            with suppress(ConnectionError):
                place.append(Client(server.address))

        waiting = threading.Thread(target=wait)
        waiting.start()
        wait_until(lambda: server._clients._waiting == 1)
        with pytest.raises(
            ConnectionError, match="1 clients are connected, which is the maximum"
        ):
            connected(server.address)
        hang_up(client)
        request(server)  # environments hear of lost clients while they are stepped
        waiting.join(60)
        assert not waiting.is_alive()
        assert server.connected == 1
        hang_up(place[0])


BAD_STEPS: dict[str, Any] = {
    "an unknown type": (
        {"type": "jump"},
        b"",
        "type 'jump', expected reset or step or close",
    ),
    "no object": ([1], b"", "type None"),
    "too few values": (
        {"type": "step"},
        b"1234",
        "step has 4 bytes of values, expected 8",
    ),
    "too many values": ({"type": "step"}, bytes(9), "9 of values"),
    "an infinite value": (
        {"type": "step"},
        struct.pack("<2f", 1, float("inf")),
        "not finite",
    ),
    "no reward": (
        {"type": "step", "terminated": False, "truncated": False},
        obs(1),
        "reward is None",
    ),
    "a huge reward": (
        {"type": "step", "reward": 1e300},
        obs(1),
        "expected a finite number",
    ),
    "an undefined reward": (
        {"type": "step", "reward": float("nan")},
        obs(1),
        "expected a finite number",
    ),
    "a true reward": (
        {"type": "step", "reward": True},
        obs(1),
        "expected a finite number",
    ),
    "no flag": (
        {"type": "step", "reward": 1, "terminated": 0, "truncated": False},
        obs(1),
        "true or false",
    ),
}


def test_a_bad_message_is_answered_and_ends_that_client_only(connected):
    with serving(max_clients=2) as server, playing(server.address, CountingEnv(3)):
        done = threading.Event()
        batches = request(server, done.is_set)
        for about, values, message in BAD_STEPS.values():
            client = connected(server.address)
            client.reset(obs(0))
            with pytest.raises(ConnectionError, match=message):
                client.ask(about, values)
            hang_up(client)
        done.set()
        for batch in batches.result(60):
            good = batch[KNOWN]
            assert not batch["next", "reward"][~good].any()
            assert_reward_is_time(batch[good])
        assert server.lost["bad_message"] == len(BAD_STEPS)


def test_a_step_before_its_action_is_refused(connected):
    """It would be taken for the result of an action that the client has not seen."""
    with serving() as server:
        result = request(server, lambda: server.lost.get("bad_message"))
        client = connected(server.address)
        client.reset(obs(0))
        both = b""
        for t in (1, 2):
            about = {"type": "step", "reward": t, "terminated": False}
            text = json.dumps({**about, "truncated": False}).encode()
            both += struct.pack("<II", len(text), 8) + text + obs(t)
        client.socket.sendall(both)
        assert b"before the action" in client.file.read()
        hang_up(client)
        with playing(server.address, CountingEnv(3)):
            found = result.result(60)
    batches = found if isinstance(found, list) else [found]
    rows = torch.cat([batch.reshape(-1) for batch in batches])
    good = rows[rows[KNOWN]]
    assert_reward_is_time(good)
    assert good["observation"][:2, 1].tolist() == [0, 0], "one step of the first client"


def assert_reward_is_time(batch: Any) -> None:
    assert torch.equal(
        batch["next", "reward"].squeeze(-1), batch["next", "observation"][:, 1]
    )


def test_integers_out_of_the_space_are_refused():
    wire = WireFormat(observation_codec(spaces.Discrete(3)), "observation")
    assert wire.decode(struct.pack("<q", 2)) == 2
    with pytest.raises(ClientLost, match="above the space's high 2"):
        wire.decode(struct.pack("<q", 3))
    box = observation_codec(spaces.Box(-1, 1, (1,), np.float32))
    assert WireFormat(box, "observation").decode(struct.pack("<f", 2)) == 2
    with pytest.raises(ClientLost, match="above"):
        WireFormat(box, "observation", check_bounds=True).decode(struct.pack("<f", 2))


def test_any_bytes_are_read_or_refused():
    from tests.faults.test_untrusted_bytes import changed_bytes

    hello = b'{"type": "hello", "protocol": 1, "token": ""}'
    step = b'{"type": "step", "reward": 1.5, "terminated": false, "truncated": true}'
    reset = b'{"type": "reset"}'
    pack = struct.Struct("<II").pack
    valid = b"".join(
        pack(len(text), 8 * (text is not hello)) + text + obs(1) * (text is not hello)
        for text in (hello, reset, step, reset, step)
    )
    read = refusals = 0
    sizes = {"hello": 0, "reset": 8, "step": 8}
    wire = WireFormat(observation_codec(SPACES["observation_space"]), "observation")
    for number in range(int(os.environ.get("MUSTER_EXAMPLES", "300"))):
        near, far = socket.socketpair(socket.AF_UNIX)
        with near, far, suppress(OSError):
            far.sendall(changed_bytes(random.Random(number), valid))
            far.shutdown(socket.SHUT_WR)
            connection = Connection.__new__(Connection)
            connection._socket, connection._received = near, bytearray()
            try:
                while True:
                    about, values = connection.receive(sizes, 60)
                    assert len(values) == sizes[about["type"]]
                    if values:
                        wire.decode(values)
                    read += 1
            except ClientLost as lost:
                refusals += lost.reason == "bad_message"
    assert read
    assert refusals
    with serving() as server:
        done = threading.Event()
        batches = request(server, done.is_set)
        for number in range(30):
            with (
                suppress(OSError),
                socket.create_connection(server.address.rsplit(":", 1), 60) as stranger,
            ):
                stranger.sendall(changed_bytes(random.Random(number), valid))
        wait_until(lambda: server.lost.total() == 30)
        with playing(server.address, CountingEnv(3)):
            done.set()
            assert batches.result(60)


# --- the server -----------------------------------------------------------------------------------


def test_a_shutdown_does_not_wait_for_clients(connected):
    with serving(max_clients=3) as server:
        waiting, slow = (
            connected(server.address),
            connected(server.address),
        )  # in no episode, and in one
        slow.ask({"type": "reset"}, obs(0), answered=False)
        with playing(server.address, CountingEnv(3)):
            server.next()
        server.shutdown()
        server.shutdown()
        for client in (waiting, slow):
            assert client.file.read().endswith(b'{"type": "close"}')
            hang_up(client)
        with pytest.raises(CollectorClosed):
            server.next()
    with pytest.raises(ConnectionError):
        Client(server.address)


def test_a_dropped_server_listens_no_longer():
    server = muster.serve(None, **SPACES, frames_per_batch=4)
    address = server.address
    del server
    gc.collect()
    wait_until(lambda: refuses(address))


def refuses(address: str) -> bool:
    try:
        hang_up(Client(address))
    except OSError:
        return True
    return False


def test_options_that_clients_decide_are_refused():
    with serving() as server:
        for call in (
            server.reset,
            server.state_dict,
            partial(server.set_seed, 1),
            partial(server.getattr_env, "x"),
            partial(server.load_state_dict, {}),
        ):
            with pytest.raises(BadOption, match="not available for muster.serve"):
                call()
    for wrong, error in (
        ({"num_envs": 2}, BadOption),
        ({"frames_per_bach": 2}, UnknownOption),
        ({"max_clients": 0}, BadOption),
        ({"timeouts": {"jump": 1}}, BadOption),
        ({"address": "nowhere"}, BadOption),
        ({"address": "0.0.0.0:0"}, BadOption),
        ({"address": "0.0.0.0:0", "token": "short"}, BadOption),
        ({"observation_space": spaces.Text(5)}, UnsupportedSpace),
    ):
        with pytest.raises(error):
            muster.serve(None, **{**SPACES, "frames_per_batch": 4, **wrong})
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(BadOption, match="cannot listen"),
    ):
        muster.serve(
            None,
            **SPACES,
            frames_per_batch=4,
            address=f"127.0.0.1:{taken.getsockname()[1]}",
        )


# --- the command ----------------------------------------------------------------------------------


def test_the_command_records_what_a_client_in_plain_python_plays(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("MUSTER_SERVE_TOKEN", "of this test")
    address, ended = f"127.0.0.1:{free_port()}", []

    def client() -> None:
        wait_until(lambda: not refuses_tcp(address))
        program = [sys.executable, "-I", str(Path(serve_client.__file__)), address]
        ended.append(
            subprocess.run(
                program, capture_output=True, text=True, timeout=60, check=False
            )
        )

    thread = threading.Thread(target=client)
    thread.start()
    sizes = (
        "--obs",
        "float32:2",
        "--act",
        "discrete:2",
        "--frames",
        200,
        "--frames-per-batch",
        100,
    )
    code, out, _ = run(
        capsys,
        "serve",
        "random",
        *sizes,
        "--address",
        address,
        "--out",
        tmp_path / "run",
        "--seed",
        1,
    )
    thread.join(60)

    assert code == 0
    assert f"serving   {address}" in out
    assert "frames    200 in 2 batches" in out
    assert "the server has closed" in ended[0].stdout, ended[0].stderr
    recording = muster.load(tmp_path / "run")
    batches = list(recording)
    assert sum(batch.numel() for batch in batches) == 200
    assert {batch["observation"][:, 0].unique().item() for batch in batches} == {5}
    reward, last = (
        torch.cat([batch["next", key] for batch in batches])
        for key in ("reward", "terminated")
    )
    assert torch.equal(reward.bool(), last)


def refuses_tcp(address: str) -> bool:
    try:
        socket.create_connection(address.rsplit(":", 1), 60).close()
    except OSError:
        return True
    return False


def test_spaces_as_text(capsys):
    assert parse_space("--obs", "float32:4") == spaces.Box(
        -np.inf, np.inf, (4,), np.float32
    )
    assert parse_space("--obs", "uint8:8,8,3") == spaces.Box(
        0, 255, (8, 8, 3), np.uint8
    )
    assert parse_space("--obs", "int64:2") == spaces.Box(
        -(2**63), 2**63 - 1, (2,), np.int64
    )
    assert parse_space("--act", "float32:2:-1:1") == spaces.Box(-1, 1, (2,), np.float32)
    assert parse_space("--act", "multidiscrete:3,2") == spaces.MultiDiscrete([3, 2])
    assert parse_space("--act", "multibinary:4") == spaces.MultiBinary([4])
    for wrong in (
        "",
        "float32",
        "float32:4:1",
        "float32:0",
        "discrete:x",
        "discrete:0",
        "foo:3",
        "object:2",
    ):
        with pytest.raises(BadOption, match="expected discrete:N"):
            parse_space("--obs", wrong)
    assert "--act 'x'" in refused(
        capsys, "serve", "random", "--obs", "float32:2", "--act", "x", "--frames", "10"
    )


def test_the_client_needs_no_more_than_sixty_lines_and_the_standard_library():
    lines = Path(serve_client.__file__).read_text().splitlines()
    assert len(lines) <= 60
    assert not [
        line
        for line in lines
        if line.startswith(("import ", "from ")) and "numpy" in line
    ]
