"""Environments and a policy that live in another program, behind a network: Muster waits for all of them at once.

A server on this machine plays 100 games, and answers every request after a random delay. ``RemoteGame`` is its
client: ``reset`` and ``step`` are coroutines. ``ask_policy`` asks the same server for actions. Your simulator takes
the place of ``Server``. Run it: ``python examples/coroutine_envs.py``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import threading
import time
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from muster import Collector

LIMIT = 20  # steps per game


class Server:
    """Games by number, in a thread. A line of JSON is a request, and a line is its answer."""

    def __init__(self, delay: float) -> None:
        self.delay, self.games = delay, dict[int, list[int]]()
        self.ready = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self.run()), daemon=True)

    def __enter__(self) -> Server:
        self.thread.start()
        self.ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self.stopped.set)
        self.thread.join()

    async def run(self) -> None:
        self.loop, self.stopped = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self.ready.set()
        async with server:
            await self.stopped.wait()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.CancelledError):
            while line := await reader.readline():
                await asyncio.sleep(self.delay * random.uniform(0.5, 1.5))
                writer.write(json.dumps(self.answer(**json.loads(line))).encode() + b"\n")
        writer.close()

    def answer(self, game: int = 0, seed: int | None = None, action: int | None = None, obs: Any = None) -> Any:
        if obs is not None:  # a request for actions
            return {"action": [int(goal > at) for at, goal, _ in obs], "version": 1}
        if action is None:  # a new game
            self.games[game] = [0, random.Random(seed).randrange(-5, 6), 0]
            return {"obs": self.games[game]}
        at, goal, t = self.games[game]
        self.games[game] = [at + 2 * action - 1, goal, t + 1]
        return {"obs": self.games[game], "reward": -abs(goal - at), "over": t + 1 == LIMIT}


class Client:
    """One connection, made by the first request: only there an event loop runs."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def request(self, **what: Any) -> Any:
        self.streams = reader, writer = self.streams or await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(json.dumps(what).encode() + b"\n")
            return json.loads(await reader.readline())
        except BaseException:  # also cancellation: the answer to this request must not be read as that to the next
            await self.close()
            raise

    async def close(self) -> None:
        if self.streams is not None:
            self.streams[1].close()
            self.streams = None


class RemoteGame:
    """Observation ``[position, goal, step]``; action 1 goes up, 0 down; reward: minus the distance before it."""

    observation_space = spaces.Box(-LIMIT, LIMIT, (3,), np.float32)
    action_space = spaces.Discrete(2)
    count = 0

    def __init__(self, port: int) -> None:
        self.number, RemoteGame.count = RemoteGame.count, RemoteGame.count + 1
        self.client = Client(port)

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        answer = await self.client.request(game=self.number, seed=seed)
        return np.array(answer["obs"], np.float32), {}

    async def step(self, action: int) -> Any:
        answer = await self.client.request(game=self.number, action=action)
        return np.array(answer["obs"], np.float32), float(answer["reward"]), False, answer["over"], {}

    async def close(self) -> None:
        await self.client.close()


def main(argv: list[str] | None = None) -> float:
    """Collect, and return the mean reward."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-envs", type=int, default=100)
    parser.add_argument("--steps", type=int, default=20, help="time steps per batch")
    parser.add_argument("--delay", type=float, default=0.05, help="mean seconds of a request")
    args = parser.parse_args(argv)

    with Server(args.delay) as server:

        async def ask_policy(obs: Tensor) -> Any:
            client = Client(server.port)
            answer = await client.request(obs=obs.tolist())
            await client.close()
            return torch.tensor(answer["action"]), {"policy_version": answer["version"]}

        with Collector(
            lambda: RemoteGame(server.port),
            ask_policy,
            num_envs=args.num_envs,
            frames_per_batch=args.num_envs * args.steps,
            seed=0,
            timeouts={"reset": 30, "step": 10, "policy": 10},  # seconds for each request
        ) as collector:
            collector.rollout()  # connects
            began = time.perf_counter()
            batch = collector.rollout()
            delays = (time.perf_counter() - began) / args.steps / args.delay
            print(f"{batch.numel():,} steps of {args.num_envs} remote environments: {delays:.1f} delays per time step")
    return float(batch["next", "reward"].mean())


if __name__ == "__main__":
    main()
