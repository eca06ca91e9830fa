"""Muster's collectors with either placement of the policy, and the parts of their limits, as
systems to measure.
"""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import muster
from benchmarks.envs import burn
from benchmarks.inference_cases import Case, spend
from benchmarks.systems import SYSTEMS, System
from benchmarks.systems.muster_ import head_for
from benchmarks.workers_systems import BareTwice, Crewed
from muster import CentralInference

LOOK_S = 0.1


class Costs(nn.Module):
    """A policy of given cost. Its actions are zeros."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self._call_s, self._row_s, self._sleeps = (
            case.call_s,
            case.row_s,
            case.policy == "sleeps",
        )

    def forward(self, obs: Tensor) -> Tensor:
        rows = obs.shape[:-1]
        spend(self._call_s + self._row_s * rows.numel(), self._sleeps)
        return torch.zeros(rows, dtype=torch.int64)


class Convolutional(nn.Module):
    """The network of DQN for images, and a sampled action."""

    def __init__(self, actions: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            *(
                nn.Conv2d(4, 32, 8, 4),
                nn.ReLU(),
                nn.Conv2d(32, 64, 4, 2),
                nn.ReLU(),
                nn.Conv2d(64, 64, 3, 1),
            ),
            *(
                nn.ReLU(),
                nn.Flatten(),
                nn.Linear(3136, 512),
                nn.ReLU(),
                nn.Linear(512, actions),
            ),
        )

    def forward(self, image: Tensor) -> Tensor:
        logits = self.net(image.permute(0, 3, 1, 2).float() / 255)
        action: Tensor = (
            logits - torch.empty_like(logits).exponential_().log()
        ).argmax(-1)
        return action


def has_gpu() -> bool:
    """Torch can use one."""
    return torch.cuda.is_available()


def policy_of(case: Case) -> Any:
    """The policy, by the case's description."""
    if case.policy == "heads":
        return head_for(case.make())
    return Convolutional(2) if case.policy == "convolutional" else Costs(case)


class Served:
    """A collector of workers.

    Args:
        kind: its class.
        options: of it.
    """

    def __init__(
        self, case: Case, kind: str = "MultiSyncCollector", **options: Any
    ) -> None:
        self._case = case
        self.AHEAD = (
            0 if "Sync" in kind else 2
        )  # rollouts that every group may be ahead
        self._batches_per_rollout = 1 if "Sync" in kind else case.workers
        self.collector: Any = getattr(muster, kind)(
            [case.make] * case.workers,
            policy_of(case),
            num_envs=case.B // case.workers,
            frames_per_batch=case.frames // self._batches_per_rollout,
            seed=0,
            **options,
        )
        self._batches: Any = iter(self.collector)

    def rollout(self) -> int:
        frames = 0
        for _ in range(self._batches_per_rollout):
            batch = next(self._batches)
            valid = batch.get(("collector", "valid"), None)
            frames += batch.numel() if valid is None else int(valid.sum())
            if self._case.train_s:
                burn(self._case.train_s)
        return frames

    def told(self) -> dict[str, float]:
        """What a table may say besides."""
        stats = self.collector.stats().inference
        if stats is None or not stats.calls:
            return {}
        return {
            "envs per call": stats.batch_mean,
            "ms per call": 1e3 * stats.busy_s / stats.calls,
        }

    def close(self) -> None:
        self.collector.shutdown()


class Calls:
    """Nothing but the policy, on as many environments at once as there are; on a GPU with the
    copies that it needs.
    """

    def __init__(self, case: Case, parts: int = 1) -> None:
        env = case.make()
        self._rows, self._T = case.B // parts, case.T
        space = env.observation_space
        obs = torch.zeros(
            self._rows,
            *(space.shape or ()),
            dtype=torch.from_numpy(space.sample()).dtype,
        )
        cuda = case.policy == "convolutional"
        self._device = torch.device("cuda" if cuda else "cpu")
        self._obs, self._policy = (
            obs.pin_memory() if cuda else obs,
            policy_of(case).to(self._device),
        )

    def rollout(self) -> int:
        with torch.inference_mode():
            for _ in range(self._T):
                self._policy(self._obs.to(self._device, non_blocking=True)).cpu()
        return self._rows * self._T

    def close(self) -> None: ...


class Pairs:
    """The mailbox alone: a process per worker asks, and all are answered as soon as all have asked."""

    def __init__(self, case: Case) -> None:
        from muster.workers.mailbox import Mailbox

        self._workers, self._T, self.frames = range(case.workers), case.T, case.frames
        self._mailbox = Mailbox(case.workers, [self._workers])
        context = multiprocessing.get_context("fork")
        self._pipes, self._processes = [], []
        for number in self._workers:
            here, there = context.Pipe()
            fds = self._mailbox.fds_for(number)
            self._mailbox.expect(number, 1)  # it is at work for ever
            process = context.Process(
                target=_ask,
                args=(number, case.workers, fds, there, case.T),
                daemon=True,
            )
            process.start()
            self._pipes.append(here)
            self._processes.append(process)

    def rollout(self) -> int:
        mailbox = self._mailbox
        for pipe in self._pipes:
            pipe.send_bytes(b"go")
        for _ in range(self._T):
            while not self._all_ask():
                mailbox.sleep(self._all_ask, LOOK_S)
            for worker, question in mailbox.look(self._workers)[0]:
                mailbox.answer(worker, question)
        for pipe in self._pipes:
            pipe.recv_bytes()
        return self.frames

    def _all_ask(self) -> bool:
        return len(self._mailbox.look(self._workers)[0]) == len(self._workers)

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
            process.join()
        self._mailbox.close()


def _ask(number: int, workers: int, fds: list[int], pipe: Any, times: int) -> None:
    from muster.workers.mailbox import MailboxClient

    client = MailboxClient(number, workers, fds, lambda: False)
    while pipe.recv_bytes():
        for t in range(times):
            client.ask(0, t)
        pipe.send_bytes(b"done")


def bare(case: Case, parts: int = 1) -> System:
    """The bare loop in as many processes as there are workers, or in a part of them with their
    environments.
    """
    return BareTwice(replace(case, B=case.B // parts), case.workers // parts)


@dataclass(frozen=True)
class Part(Crewed):
    """A system of this benchmark; all of them share a process."""

    needs: tuple[str, ...] = ("torch", "gymnasium", "tensordict")
    home: str = "muster-inference"


def _part(name: str, label: str, **options: Any) -> Part:
    return Part(f"inference_systems:{name}", label, options=options)


_SERVER: dict[str, Any] = {"inference": "server"}
_FREE: dict[str, Any] = {"kind": "MultiAsyncCollector"}
_CUDA: dict[str, Any] = {"policy_device": "cuda"}
_WAIT: dict[str, Any] = {"reset_when_done": False}

SYSTEMS.update(
    {
        "lines": _part("Pairs", "lines alone"),
        "bare-all": _part("bare", "bare env.step loops, a process per worker"),
        "bare-half": _part("bare", "... half of them", parts=2),
        "calls-all": _part("Calls", "policy alone, all envs in a call"),
        "calls-half": _part("Calls", "... half of them", parts=2),
        "bare-one": Part("workers_systems:bare_one", "bare loop of one env"),
        "worker": _part("Served", "inference in the workers"),
        "server": _part("Served", "inference on the server", **_SERVER),
        "alternating": _part(
            "Served", "... alternating", inference=CentralInference(alternating=True)
        ),
        "worker-wait": _part(
            "Served", "inference in the workers, resets wait", **_WAIT
        ),
        "server-wait": _part(
            "Served", "inference on the server, resets wait", **_SERVER, **_WAIT
        ),
        "free-worker": _part("Served", "inference in the workers", **_FREE),
        "free-threads": _part("Served", "... threads", **_FREE, backend="threads"),
        "free-server-0": _part("Served", "server, who is ready", **_FREE, **_SERVER),
        "free-server-1ms": _part(
            "Served",
            "server, max_wait_s=0.001",
            **_FREE,
            inference=CentralInference(max_wait_s=1e-3),
        ),
        "free-server-3ms": _part(
            "Served",
            "server, max_wait_s=0.003",
            **_FREE,
            inference=CentralInference(max_wait_s=3e-3),
        ),
        "free-threads-server": _part(
            "Served", "server, threads", **_FREE, **_SERVER, backend="threads"
        ),
        "cuda-worker": _part("Served", "GPU, inference in the workers", **_CUDA),
        "cuda-server": _part("Served", "GPU, server", **_CUDA, **_SERVER),
        "cuda-alternating": _part(
            "Served",
            "GPU, server, alternating",
            **_CUDA,
            inference=CentralInference(alternating=True),
        ),
        "cuda-graph": _part(
            "Served",
            "GPU, server, CUDA graph",
            **_CUDA,
            **_SERVER,
            cudagraph_policy=True,
        ),
    }
)
