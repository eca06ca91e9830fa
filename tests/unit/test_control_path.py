"""What runs between ``next()`` and the batch, in this process: which functions, and how many calls."""

from __future__ import annotations

import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

import muster
from muster import Collector, MultiAsyncCollector, MultiSyncCollector
from muster.testing import CountingEnv
from tests.fakes import queue_links
from tests.waits import without_gc

ROOT = Path(muster.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "control_path.md"
BATCHES = 64


def head() -> Any:
    torch.manual_seed(0)  # episodes of another policy end at other times
    layers = [
        torch.nn.Linear(4, 64),
        torch.nn.Tanh(),
        torch.nn.Linear(64, 64),
        torch.nn.Tanh(),
        torch.nn.Linear(64, 2),
    ]
    return muster.policies.categorical(torch.nn.Sequential(*layers))


def profiled(policy: Any, on_call: Callable[[FrameType], None]) -> None:
    """Batches of one step, after some others, with every call of a Python function."""

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            on_call(frame)

    with Collector("CartPole-v1", policy, frames_per_batch=1, seed=0) as collector:
        batches = iter(collector)
        for _ in range(32):
            next(batches)
        with without_gc():
            sys.setprofile(profile)
            try:
                for _ in range(BATCHES):
                    next(batches)
            finally:
                sys.setprofile(None)


@pytest.mark.parametrize("policy", [head, lambda: None], ids=["head", "random"])
def test_a_batch_of_one_step_makes_at_most_150_calls(policy):
    calls = []
    profiled(policy(), lambda frame: calls.append(frame.f_code))
    by_function = Counter((code.co_filename, code.co_name) for code in calls)
    if len(calls) / BATCHES > 150:  # all of them, which ``assert`` would shorten
        lines = [f"{number} {place}" for place, number in by_function.most_common()]
        pytest.fail("\n".join([f"{len(calls) / BATCHES} calls", *lines]))


def place(code: CodeType) -> tuple[str, str] | None:
    """File and name of a function of Muster's; None: it is another one."""
    path = Path(code.co_filename)
    return (
        (path.relative_to(ROOT).as_posix(), code.co_name)
        if path.is_relative_to(ROOT)
        else None
    )


def leads_somewhere(code: CodeType) -> bool:
    """It acts, steps, or makes a ``TensorDict``."""
    here = place(code)
    if here is None:
        return code.co_filename.endswith("tensordict/_td.py")
    return here[0].startswith(("policies/", "envs/")) and here[1].startswith(
        ("act", "step")
    )


def callers(frame: FrameType) -> list[tuple[str, str]]:
    """Our functions that have led to a call, outermost first; without those of adapters."""
    found = []
    below = frame.f_back
    while below is not None:
        if (here := place(below.f_code)) is not None and not here[0].startswith(
            ("policies/", "envs/")
        ):
            found.append(here)
        below = below.f_back
    return found[::-1]


def listed(after: str, before: str) -> list[tuple[str, str]]:
    """The functions in a table of the page, as ``place`` has them."""
    section = PAGE.read_text().partition(after)[2].partition(before)[0]
    rows = re.findall(r"^\| `([\w.]+)` \| `([\w/.]+)` \|", section, re.MULTILINE)
    return [(file, name.rpartition(".")[2]) for name, file in rows]


def test_the_control_path_is_the_one_of_the_architecture_page():
    path: dict[tuple[str, str], None] = {}

    def note(frame: FrameType) -> None:
        if leads_somewhere(frame.f_code):
            path.update(dict.fromkeys(callers(frame)))

    profiled(head(), note)
    assert list(path) == listed("## In this thread", "\n\nA batch of one step")
    assert len(path) <= 10
    assert len({file for file, _ in path}) <= 6


CHANNEL = [("workers/channel.py", "send"), ("workers/channel.py", "receive")]
SCHEDULE = ("workers/sync.py", "collect"), ("workers/first_ready.py", "collect")
SERVE = ("workers/main.py", "serve")


class Passed:
    """What leads to sending and to receiving, each with those functions themselves."""

    def __init__(self) -> None:
        self.out: dict[tuple[str, str], None] = {}
        self.back: dict[tuple[str, str], None] = {}

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and (here := place(frame.f_code)) in CHANNEL:
            path = self.out if here == CHANNEL[0] else self.back
            path.update(dict.fromkeys([*callers(frame), here]))


class Watched(CountingEnv):
    """Looks, in its worker, at what leads to a step, and at what sends and receives.

    Attributes:
        stepping: from the worker's loop on, to the first step.
        passed: after it.
    """

    def __init__(self) -> None:
        super().__init__(length=5)
        self.stepping: list[tuple[str, str]] = []
        self.passed = Passed()

    def step(self, action: Any) -> Any:
        if not self.stepping:
            self.stepping = callers(sys._getframe())
            sys.setprofile(self.passed.note)
        return super().step(action)


def below(
    path: Iterable[tuple[str, str]], *above: tuple[str, str]
) -> list[tuple[str, str]]:
    """What comes after one of these."""
    known = list(path)
    return known[max(known.index(place) for place in above if place in known) + 1 :]


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_so_is_that_with_worker_processes(kind):
    here = Passed()
    with kind([Watched] * 2, frames_per_batch=8, seed=0) as collector:
        batches = iter(collector)
        for _ in range(4):
            next(batches)
        sys.setprofile(here.note)
        try:
            for _ in range(8):
                next(batches)
        finally:
            sys.setprofile(None)
        stepping, *_ = collector.getattr_env("stepping")
        there, *_ = collector.getattr_env("passed")
    title = "## Sync" if kind is MultiSyncCollector else "## First ready"
    out, back = listed(f"{title}: out", "##"), listed(f"{title}: back", "##")
    into, answering = (
        listed("## In the worker: in", "##"),
        listed("## In the worker: out", "##"),
    )
    assert below(here.out, *SCHEDULE) == out
    assert below(here.back, *SCHEDULE) == back
    assert [SERVE, *below(stepping, SERVE)][: len(into) + 1] == [
        *into,
        ("workers/worker.py", "run"),
    ]
    assert below(there.back, SERVE) == CHANNEL[1:]
    of_questions = ("carry_out", "answer", "_answer")  # which ``getattr_env`` asked
    sending = [
        function
        for function in below(there.out, SERVE)
        if function[1] not in of_questions
    ]
    assert [SERVE, *sending] == [*into, *answering]
    assert max(map(len, (out, back, into, answering))) <= 5


def test_so_is_that_with_nodes():
    """Out: to the worker pool of the node.

    Back: from its results on, but for what waits as with worker processes.
    """
    post, submit = ("cluster/session.py", "post"), ("workers/proxy.py", "submit")
    say, finished = (
        ("cluster/node_main.py", "say"),
        ("cluster/node_proxy.py", "_finished"),
    )
    seen: dict[
        tuple[str, str], list[tuple[str, str]]
    ] = {}  # by what is called, or by thread and what it calls
    active = threading.Event()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not active.is_set():
            return
        function = place(frame.f_code)
        if (
            frame.f_code.co_filename == queue_links.__file__
            and frame.f_code.co_name
            in (
                "send",
                "receive",
            )
        ):
            function = threading.current_thread().name, frame.f_code.co_name
        if function in (post, submit, say, finished) or (
            function is not None and function[1] in ("send", "receive")
        ):
            seen.setdefault(function, callers(frame))

    threading.setprofile(note)  # of threads that are started from here on
    try:
        factories, carrier = (
            [partial(CountingEnv, length=5)],
            queue_links.QueueCarrier(),
        )
        with queue_links.QueueCollector(
            factories, carrier=carrier, frames_per_batch=8, seed=0
        ) as collector:
            batches = iter(collector)
            for _ in range(3):
                next(batches)
            sys.setprofile(note)
            active.set()
            for _ in range(4):
                next(batches)
            active.clear()
            sys.setprofile(None)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    node = ("cluster/node_main.py", "run")
    out = [
        *below(seen[post], ("workers/sync.py", "_work")),
        post,
        *seen["muster-node-0-sends", "send"],
    ]
    out += [*seen["muster-node-main-receives", "receive"], *below(seen[submit], node)]
    back = [*below(seen[say], node)[1:], say, *seen["muster-node-main-sends", "send"]]
    back += [*seen["muster-node-0-receives", "receive"]]
    back += [*below(seen[finished], ("cluster/node_pool.py", "wait")), finished]
    assert out == listed("## Nodes: out", "##")
    assert back == listed("## Nodes: back", "##")
    assert max(len(out), len(back)) <= 8
