"""Environments that are played by clients: other programs, which connect, send observations, and
get actions.
"""

from __future__ import annotations

import hmac
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from muster.envs.spaces import action_codec, observation_codec
from muster.envs.stacked import StackedEnvs
from muster.errors import BadOption, CollectorClosed
from muster.keys import ACTION_MASK, NEXT_OBS_VALID
from muster.memory.slots import Lane
from muster.protocols import Step
from muster.serving.client_link import (
    DRAIN_S,
    LARGEST_REWARD,
    PROTOCOL,
    ClientLost,
    Connection,
    WireFormat,
)
from muster.utils.addresses import host_and_port, is_loopback, listening
from muster.utils.exits import EndingThread
from muster.utils.strangers import Strangers

TOKEN_VARIABLE = "MUSTER_SERVE_TOKEN"
SHORTEST_TOKEN = 16  # of addresses beyond loopback
HANDSHAKE_S = 10.0
MOST_WAITING = 64  # clients that wait for the place of another
LOOK_S = 1.0  # interval at which the listening thread looks whether it has to end


@dataclass(frozen=True)
class ClientSpaces:
    """Spaces of all clients, and how their values are sent."""

    observation_space: Any
    action_space: Any
    observations: WireFormat
    actions: WireFormat

    @property
    def formats(self) -> dict[str, WireFormat]:
        """By the name of the field that describes it in messages."""
        return {"observation": self.observations, "action": self.actions}


def _spaces(
    observation_space: Any, action_space: Any, *, check_bounds: bool
) -> ClientSpaces:
    observations = WireFormat(
        observation_codec(observation_space), "observation", check_bounds=check_bounds
    )
    actions = WireFormat(action_codec(action_space), "action")
    return ClientSpaces(observation_space, action_space, observations, actions)


class Clients:
    """Listens at an address, and gives each client that connects to one of the environments.

    Args:
        observation_space, action_space: spaces of all clients.
        address: ``host:port``; port 0 is any free port.
        token: secret that clients send; None: the environment variable ``MUSTER_SERVE_TOKEN``, or
            none on loopback.
        count: maximum number of clients at the same time; ``make_env`` makes as many environments.
        timeouts: seconds that a client may take for a "step", and between episodes for a "reset";
            None: no limit.
        check_bounds: refuse observations out of the bounds of their space.

    Attributes:
        address: where it listens.
        lost: number of clients whose connection has ended, by reason.
        laying_out: a reset returns zeros without a client, for the policy's first call, whose
            action is not used.

    Raises:
        BadOption: the address is not available, or the token is missing or too short.
        UnsupportedSpace: a part of a space has no fixed shape.
    """

    def __init__(
        self,
        observation_space: Any,
        action_space: Any,
        *,
        address: str,
        token: str | None,
        count: int,
        timeouts: Mapping[str, float | None],
        check_bounds: bool,
    ) -> None:
        self.spaces = _spaces(
            observation_space, action_space, check_bounds=check_bounds
        )
        self.count = count
        self.timeouts = timeouts
        self.lost: Counter[str] = Counter()
        self.laying_out = False
        self.closed = False
        self._changed = threading.Condition()
        self._connected: list[Connection | None] = [None] * count  # by environment
        self._welcomed: set[Connection] = set()
        self._strangers = Strangers()
        self._waiting = 0  # number of admitted clients without a place
        host, _ = host_and_port(address)
        self._token = _checked_token(token, host)
        self._listener = listening(address, "address")
        self._listener.settimeout(LOOK_S)
        self.address = (
            f"{f'[{host}]' if ':' in host else host}:{self._listener.getsockname()[1]}"
        )
        # At the end of a program it closes: environments wait for their clients without a deadline.
        listening_thread = EndingThread(self._accept, "muster-serve", self.close)
        try:
            listening_thread.start()
        except RuntimeError:  # the system allows no more threads
            self._listener.close()
            raise

    @property
    def connected(self) -> int:
        """Number of clients that are connected."""
        return sum(connection is not None for connection in self._connected)

    def make_env(self, number: int) -> ClientEnvs:
        """Make the environment with this number.

        A client gets the free environment with the lowest number.
        """
        self.drop(number)  # that of an environment whose worker was restarted
        return ClientEnvs(self, number)

    def drop(self, number: int) -> None:
        """End the connection of an environment, if it has one."""
        if (connection := self._connected[number]) is not None:
            self.end(connection, ClientLost("closed"))

    @contextmanager
    def without_clients(self) -> Iterator[None]:
        """Context with ``laying_out``."""
        self.laying_out = True
        try:
            yield
        finally:
            self.laying_out = False

    def take(self, number: int) -> Connection:
        """Wait for a client of this environment, and return its connection.

        Raises:
            CollectorClosed: ``close`` was called.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._connected[number] in self._welcomed or self.closed
            )
            self.check_open()
            connection = self._connected[number]
            assert connection is not None
            return connection

    def end(self, connection: Connection, lost: ClientLost) -> None:
        """End a connection, and tell the client why."""
        connection.refuse(lost)
        with self._changed:
            self._welcomed.discard(connection)
            if connection in self._connected:
                self._connected[self._connected.index(connection)] = None
            self.lost[lost.reason] += 1
            self._changed.notify_all()

    def check_open(self) -> None:
        """Raise ``CollectorClosed`` after ``close``."""
        if self.closed:
            raise CollectorClosed(
                "the policy server was closed while its environments waited for clients"
            )

    def close(self) -> None:
        """End all connections, and wake all environments that wait for a client.

        May be called again.
        """
        with self._changed:
            self.closed = True
            self._changed.notify_all()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        deadline = time.monotonic() + DRAIN_S  # of all of them: some may not read
        for connection in list(self._connected):
            if connection is not None:
                connection.close(deadline - time.monotonic())

    # --- the listening thread, and one for each handshake -----------------------------------------

    def _accept(self) -> None:
        while not self.closed:
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                if not self.closed:
                    threading.Event().wait(LOOK_S)  # too many open files, most often
                continue
            self._strangers.add(sock)
            try:
                threading.Thread(
                    target=self._welcome,
                    args=(sock,),
                    name="muster-handshake",
                    daemon=True,
                ).start()
            except RuntimeError:  # the system allows no more threads
                self._strangers.remove(sock)
                sock.close()

    def _welcome(self, sock: socket.socket) -> None:
        try:
            sock.settimeout(HANDSHAKE_S)
            connection = Connection(sock)
            try:
                self._check(connection.receive({"hello": 0}, HANDSHAKE_S)[0])
                if not self._strangers.remove(sock):
                    raise ClientLost("closed")
                self._admit(connection)
            except ClientLost as lost:
                self.end(connection, lost)
        except OSError:  # it has gone
            sock.close()
        finally:
            self._strangers.remove(sock)

    def _check(self, hello: Mapping[str, Any]) -> None:
        given = hello.get("token", "")
        secret = (
            given.encode("utf-8", "backslashreplace") if isinstance(given, str) else b""
        )
        if self._token and not hmac.compare_digest(secret, self._token.encode()):
            raise ClientLost(
                "bad_token", "the token of the message hello is missing or wrong"
            )
        if hello.get("protocol") != PROTOCOL:
            raise ClientLost(
                "bad_protocol",
                f"the client has the protocol {hello.get('protocol')!r:.60}, expected {PROTOCOL}",
            )
        for name, wire in self.spaces.formats.items():
            if hello.get(name, wire.description) != wire.description:
                raise ClientLost(
                    "bad_spaces",
                    f"{name} of the server is {wire.description}, which the client has not",
                )

    def _admit(self, connection: Connection) -> None:
        with (
            self._changed
        ):  # a client that was replaced by this one may not be missed yet
            self._waiting += 1
            within_s = HANDSHAKE_S if self._waiting <= MOST_WAITING else 0.0
            has_room = self._changed.wait_for(
                lambda: None in self._connected or self.closed, within_s
            )
            self._waiting -= 1
            if self.closed:
                raise ClientLost("closed")
            if not has_room:
                raise ClientLost(
                    "full",
                    f"{self.connected} clients are connected, which is the maximum",
                )
            self._connected[self._connected.index(None)] = connection
        described = {
            name: wire.description for name, wire in self.spaces.formats.items()
        }
        connection.send(
            {"type": "welcome", "protocol": PROTOCOL, **described}, within_s=HANDSHAKE_S
        )
        with self._changed:
            self._welcomed.add(connection)
            self._changed.notify_all()


class ClientEnv:
    """The environment that a client plays: has what ``StackedEnvs`` uses of a Gymnasium
    environment.

    A client that is lost in an episode truncates it: the step returns the last known observation
    and the reward 0. The next reset waits for the next episode of another client.

    Attributes:
        cut: the last step was such a truncation.
    """

    def __init__(self, clients: Clients, number: int) -> None:
        self.observation_space = clients.spaces.observation_space
        self.action_space = clients.spaces.action_space
        self.unwrapped = self
        self.cut = False
        self._number = number
        self._clients = clients
        self._connection: Connection | None = None
        self._playing = False
        # observation of an episode that the client has begun, and ``reset`` has not returned
        self._first: Any = None
        self._last: Any = None
        self._expected = {
            "reset": clients.spaces.observations.nbytes,
            "step": clients.spaces.observations.nbytes,
            "close": 0,
        }

    def reset(
        self, *, seed: int | None = None, options: Any = None
    ) -> tuple[Any, dict[str, Any]]:
        clients = self._clients
        if clients.laying_out:
            wire = clients.spaces.observations
            return _allowing_all(wire.decode(bytes(wire.nbytes))), {}
        if self._playing:
            self._end_episode()
        while self._first is None:
            clients.check_open()
            if self._connection is None:
                self._connection = clients.take(self._number)
            try:
                kind, obs, *_ = self._receive("reset")
            except ClientLost as lost:
                self._lose(lost)
            else:
                self._first = obs
                if kind == "step":
                    self._first = None
                    self._lose(
                        ClientLost(
                            "bad_message", "a step before the reset of its episode"
                        )
                    )
        self._last = self._first
        self._first = None
        self._playing = True
        return self._last, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        clients = self._clients
        self.cut = False
        assert self._connection is not None, "step before reset"
        try:
            is_early = self._connection.has_more()
            self._connection.send(
                {"type": "action"},
                clients.spaces.actions.encode(action),
                clients.timeouts["step"],
            )
            kind, obs, reward, terminated, truncated = self._receive("step")
            if is_early and kind == "step":
                raise ClientLost(
                    "bad_message",
                    "a step was sent before the action that it is the result of: wait for each action",
                )
        except ClientLost as lost:
            clients.check_open()
            self._lose(lost)
            return self._truncation()
        if kind == "reset":  # the client has given its episode up
            self._first = obs
            return self._truncation()
        self._last = obs
        self._playing = not (terminated or truncated)
        return obs, reward, terminated, truncated, {}

    def close(self) -> None:
        self._clients.drop(self._number)

    def _truncation(self) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._playing = False
        self.cut = True
        return self._last, 0.0, False, True, {}

    def _end_episode(self) -> None:
        """The collector has ended the episode, and not the client: ask it for a new one."""
        self._playing = False
        try:
            if self._connection is not None:
                self._connection.send(
                    {"type": "reset"}, within_s=self._clients.timeouts["step"]
                )
        except ClientLost as lost:
            self._lose(lost)

    def _receive(self, phase: str) -> tuple[str, Any, float, bool, bool]:
        """Return the next message of the client: its type, the observation, and the results of a
        step.
        """
        assert self._connection is not None
        about, values = self._connection.receive(
            self._expected, self._clients.timeouts[phase]
        )
        if about["type"] == "close":
            raise ClientLost("closed")
        obs = self._clients.spaces.observations.decode(values)
        if about["type"] == "reset":
            return "reset", obs, 0.0, False, False
        reward: Any = about.get("reward")
        flags: list[Any] = [about.get(name) for name in ("terminated", "truncated")]
        if (
            type(reward) not in (int, float)
            or not -LARGEST_REWARD <= reward <= LARGEST_REWARD
        ):
            raise ClientLost(
                "bad_message", f"reward is {reward!r:.60}, expected a finite number"
            )
        if not all(isinstance(flag, bool) for flag in flags):
            raise ClientLost(
                "bad_message",
                f"terminated and truncated are {flags!r:.60}, expected true or false",
            )
        return "step", obs, float(reward), flags[0], flags[1]

    def _lose(self, lost: ClientLost) -> None:
        if self._connection is not None:
            self._clients.end(self._connection, lost)
        self._connection = None


def _allowing_all(blank: Any) -> Any:
    """Return a blank observation with ones in its action mask, since a policy cannot act where
    nothing is allowed.
    """

    def ones(mask: Any) -> Any:
        return (
            {name: ones(part) for name, part in mask.items()}
            if isinstance(mask, Mapping)
            else np.ones_like(mask)
        )

    (name,) = ACTION_MASK
    return (
        {**blank, name: ones(blank[name])}
        if isinstance(blank, Mapping) and name in blank
        else blank
    )


class ClientEnvs(StackedEnvs):
    """Implements ``EnvBatch`` for the environment of one client.

    Marks steps whose result is unknown.
    """

    def __init__(self, clients: Clients, number: int) -> None:
        self._env = ClientEnv(clients, number)
        super().__init__([self._env])
        self.spec = replace(self.spec, final_obs_certain=False)

    def start(self, lane: Lane) -> Step:
        step = super().start(lane)
        env = self._env
        known = lane.arrays[NEXT_OBS_VALID]

        def step_and_mark(t: int) -> Sequence[int] | None:
            finished = step(t)
            if env.cut:
                known[t] = False
            return finished

        return step_and_mark


def _checked_token(given: str | None, host: str) -> str:
    token = os.environ.get(TOKEN_VARIABLE, "") if given is None else given
    if not isinstance(token, str):
        raise BadOption(f"token: expected a text, got {type(token).__name__}")
    if not is_loopback(host) and len(token) < SHORTEST_TOKEN:
        raise BadOption(
            f"Other machines can reach {host}, so clients need a token of at least {SHORTEST_TOKEN}"
            f" characters: pass token=, or set {TOKEN_VARIABLE}, here and for every client."
            " (127.0.0.1 needs none.)"
        )
    return token
