"""Ctrl-C anywhere, or an error of the user's code, then go on here or from a saved state in a new
collector.

The rows are those of a twin that is not interrupted.
``MUSTER_EXAMPLES=2000`` runs so many sequences of calls, other ones each time.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import muster
from muster import (
    AsyncCollector,
    Collector,
    MultiAsyncCollector,
    MultiSyncCollector,
    delayed_interrupt,
    policies,
)
from muster.errors import BadOption, HookError
from tests.tools import assert_accounted
from tests.waits import without_gc

EXAMPLES = int(os.environ.get("MUSTER_EXAMPLES", "0"))
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="as the other tests of Ctrl-C"),
    pytest.mark.timeout(max(240, 2 * EXAMPLES)),
]

PACKAGE = str(Path(muster.__file__).parent)
# Where a Ctrl-C is in Muster's hands, without ``delayed_interrupt``. Elsewhere the user may have
# the batch already.
PROTECTED = tuple(
    f"{PACKAGE}/{part}"
    for part in ("workers", "rollout", "policies", "envs", "memory", "weights")
)


class Restless(gymnasium.Env[Any, Any]):
    """Draws from its generator in every step; its episodes end at random."""

    observation_space = spaces.Box(-100, 100, (2,), np.float32)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.total = 0.0
        return self.np_random.random(2, np.float32), {"word": "begin", "value": 0.5}

    def step(self, action: Any) -> Any:
        drawn = self.np_random.random(2, np.float32)
        self.total += float(action)
        ended = bool(self.np_random.random() < 0.15)
        return (
            drawn,
            float(drawn[0]) + self.total,
            ended,
            False,
            {"word": f"w{int(action)}", "value": float(drawn[1])},
        )


class Remembers(nn.Module):
    """Samples from torch's global generator, and has a recurrent state and a value."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 3)

    def forward(self, obs: torch.Tensor, state: torch.Tensor | None) -> Any:
        if state is None:
            state = torch.zeros((*obs.shape[:-1], 1))
        logits = self.net(torch.cat([obs, state], -1))
        action = torch.distributions.Categorical(logits=logits).sample()
        return (
            action,
            {"state_value": logits.sum(-1, keepdim=True)},
            0.5 * state + obs.sum(-1, keepdim=True),
        )


def head() -> Any:
    torch.manual_seed(0)
    return policies.categorical(nn.Linear(2, 3))


def recurrent() -> Any:
    torch.manual_seed(0)
    return Remembers()


class Ordered(Exception):
    """The user's code fails, as it was told to."""


class UserCode:
    """Fails in its call number ``left``, counted from 1."""

    left = 0

    def call(self, *_: object) -> None:
        self.left -= 1
        if self.left == 0:
            raise Ordered

    def postproc(self, batch: Any) -> Any:
        """Change the batch in place, which is wrong if it is done twice."""
        self.call()
        batch["next", "reward"].mul_(2).add_(1)
        return batch


user_code = UserCode()


class Rows(list[Any]):
    """A replay buffer."""

    def extend(self, batch: Any) -> None:
        user_code.call()
        self.append(batch.clone())

    def add(self, row: Any) -> None:
        user_code.call()
        self.append(row.clone())


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "limited": {"max_frames_per_traj": 5, "track_policy_version": True},
    "marked": {"set_truncated": True, "reset_at_each_iter": True},
    "waiting": {"reset_when_done": False},
    "split": {"split_trajs": True},
    "episodes": {"trajs_per_batch": 2},
    "random first": {"init_random_frames": 30},
    "random starts": {"max_decorrelation_steps": 4},
    "infos": {"info": ["value", "word"]},
    "buffer": {"replay_buffer": Rows, "postproc": user_code.postproc},
    "hooks": {
        "on_batch": user_code.call,
        "on_episode_done": user_code.call,
        "post_collect_hook": user_code.call,
    },
    "hooks of episodes": {
        "on_batch": user_code.call,
        "on_episode_done": user_code.call,
        "trajs_per_batch": 1,
    },
    "hook of steps": {"on_step": user_code.call},
    "step by step": {
        "replay_buffer": Rows,
        "extend_buffer": False,
        "reset_at_each_iter": True,
    },
    "same batch": {"return_same_td": True},
    "compact": {"compact_obs": True},
}
Call = tuple[str, dict[str, Any]]


@dataclass
class Kind:
    """A kind of collector.

    ``ordered``: its batches come in one order. Else rollouts of one group come in order, and its
    rows are compared.
    """

    name: str
    make: Callable[..., Any]
    options: dict[str, Any] = field(default_factory=dict)
    groups: int = 1
    ordered: bool = True

    def collector(self, policy: Callable[[], Any], options: dict[str, Any]) -> Any:
        given = {
            name: value() if value is Rows else value for name, value in options.items()
        }
        envs = [Restless] * self.groups if self.groups > 1 else Restless
        given |= {
            "num_envs": 2,
            "frames_per_batch": 8 * self.groups if self.ordered else 8,
            "seed": 1,
        }
        return self.make(envs, policy(), **given, **self.options)


HERE = [Kind("in process", Collector), Kind("two groups", Collector, groups=2)]
ELSEWHERE = [
    Kind("threads", MultiSyncCollector, {"backend": "threads"}, groups=2),
    Kind("processes", MultiSyncCollector, groups=2),
    Kind(
        "served",
        MultiSyncCollector,
        {"inference": "server", "backend": "threads"},
        groups=2,
    ),
    Kind("one worker", AsyncCollector, {"backend": "threads"}, ordered=False),
    Kind(
        "first ready",
        MultiAsyncCollector,
        {"backend": "threads"},
        groups=2,
        ordered=False,
    ),
]


class Pressing:
    """Presses Ctrl-C at a line of Muster's, in this thread.

    Args:
        at: number of the line, of those that are reached.
        within: beginnings of the paths of the files that count.
    """

    def __init__(self, at: int, within: tuple[str, ...]) -> None:
        self.left, self.within = at, within

    def __enter__(self) -> None:
        sys.settrace(self.enter)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def enter(self, frame: Any, event: str, argument: Any) -> Any:
        return self.line if frame.f_code.co_filename.startswith(self.within) else None

    def line(self, frame: Any, event: str, argument: Any) -> Any:
        if event == "line":
            self.left -= 1
            if not self.left:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return self.line


@dataclass
class Trouble:
    """Trouble in a call, and whether the program ends then and continues from a file.

    ``at`` is the line at which Ctrl-C comes, ``fails`` the number of the call of the user's code
    that fails (0: none).
    """

    at: int
    fails: int
    resumes: bool


class Run:
    """One collector after another that are used by the same calls.

    ``rows`` is what they have delivered.
    """

    def __init__(
        self, kind: Kind, policy: Callable[[], Any], options: str, folder: Path
    ) -> None:
        user_code.left = 0
        self.kind, self.policy, self.options, self.folder = (
            kind,
            policy,
            OPTIONS[options],
            folder,
        )
        self.collector = kind.collector(policy, self.options)
        self.delivered: list[Any] = []
        self.buffers: list[Any] = [self.collector.options.replay_buffer]
        self.episodes: list[Any] = []

    def resume(self) -> None:
        """End the program, as far as it is Muster's, and begin it again."""
        with suppress(
            HookError
        ):  # of a worker that went on meanwhile; it is raised once
            self.collector.state_dict()
        muster.save_state(self.folder / "state", self.collector.state_dict())
        assert_accounted(self.collector)
        frames = self.collector.stats().frames
        self.collector.shutdown()
        self.collector = self.kind.collector(self.policy, self.options)
        report = self.collector.load_state_dict(self.folder / "state")
        assert report.exact, report
        assert self.collector.stats().frames == frames
        assert_accounted(self.collector)
        self.buffers.append(self.collector.options.replay_buffer)

    def do(self, call: Call) -> None:
        name, given = call
        collector = self.collector
        if name == "next":
            batch = collector.next()
        elif name == "rollout":
            batch = collector.rollout()
        elif name == "collect":
            try:
                batch = collector.collect_batch(**given).batch
            except BadOption:
                return  # this combination is refused, here and there
        else:
            getattr(collector, name)(**given)
            return
        self.delivered.append(None if batch is None else batch.clone())
        self.episodes.append([tuple(record)[:6] for record in collector.episodes])

    def do_all(
        self, calls: list[Call], troubles: list[Trouble | None], *, delayed: bool
    ) -> None:
        within = (PACKAGE,) if delayed else PROTECTED
        last: Trouble | None = None  # its Ctrl-C may take effect in the next call
        for call, trouble in zip(calls, troubles, strict=True):
            last = trouble or last
            pressing: Any = (
                nullcontext()
                if trouble is None or trouble.fails
                else Pressing(trouble.at, within)
            )
            user_code.left = 0 if trouble is None else trouble.fails
            while True:
                try:
                    with without_gc(), pressing:
                        self.do(call)
                    break
                except (KeyboardInterrupt, HookError, Ordered):
                    pressing = nullcontext()
                    assert last is not None
                    if last.resumes:
                        self.resume()
            assert_accounted(self.collector)

    def rows(self) -> list[Any]:
        """What was delivered, batch by batch, and then what is in the buffers."""
        written = [
            row for buffer in self.buffers if buffer is not None for row in buffer
        ]
        return [
            None if batch is None else plain(batch)
            for batch in (*self.delivered, *written)
        ]

    def by_env(self) -> dict[int, list[Any]]:
        """The delivered rows of each environment, in order."""
        found: dict[int, list[Any]] = {}
        for batch in self.delivered:
            valid = batch.get(("collector", "valid"), None)
            rows = batch.reshape(-1) if valid is None else batch[valid]
            ids = (
                rows["collector", "traj_ids"].flatten()
                % self.collector._engine.num_envs
            )
            columns = plain(rows.exclude(("collector", "valid")))
            del columns["shape",]
            for place, env in enumerate(ids.tolist()):
                found.setdefault(env, []).append(
                    {key: values[place] for key, values in columns.items()}
                )
        return found


def plain(batch: Any) -> dict[Any, Any]:
    """The columns of a batch as lists of texts, so that NaN is equal to itself."""
    columns: dict[Any, Any] = {("shape",): str(batch.shape)}
    for key in sorted(batch.keys(True, True), key=str):
        column = batch.get(key)
        values = column.tolist() if hasattr(column, "tolist") else column
        columns[key] = (
            [str(value) for value in values]
            if isinstance(values, list)
            else str(values)
        )
    return columns


steps = st.fixed_dictionaries(
    {"n_step": st.integers(1, 11)},
    optional={"bootstrap": st.sampled_from([True, "truncations"])},
)
episodes = st.fixed_dictionaries(
    {"n_episode": st.integers(1, 4)},
    optional={
        "surplus": st.sampled_from(["keep", "discard"]),
        "rule": st.sampled_from(["per_env", "fair", "first_done"]),
    },
)
in_order = [
    st.just(("next", {})),
    st.tuples(st.just("collect"), steps),
]
calls = st.one_of(
    *in_order,
    st.just(("next", {})),
    st.just(("rollout", {})),
    st.tuples(st.just("collect"), episodes),
    st.tuples(st.just("reset"), st.sampled_from([{}, {"index": [0]}, {"index": [1]}])),
    st.just(("set_seed", {"seed": 7})),
)
lines = st.one_of(st.integers(1, 900), st.integers(1, 5000))
troubles = st.one_of(
    st.none(),
    st.builds(Trouble, lines, st.just(0), st.booleans()),
    st.builds(Trouble, st.just(0), st.integers(1, 12), st.booleans()),
)


def examples(usual: int) -> settings:
    return settings(
        max_examples=EXAMPLES or usual,
        deadline=None,
        derandomize=not EXAMPLES,
        suppress_health_check=[*HealthCheck],
    )


def check(
    kind: Kind,
    policy: Any,
    options: str,
    do: list[Call],
    with_troubles: list[Any],
    *,
    delayed: bool,
) -> None:
    left = suppress(
        KeyboardInterrupt
    )  # one that was noted in the last call is raised at the end of the context
    with (
        TemporaryDirectory() as folder,
        left,
        delayed_interrupt() if delayed else nullcontext(),
    ):
        twin = Run(kind, policy, options, Path(folder))
        run = Run(kind, policy, options, Path(folder))
        try:
            twin.do_all(do, [None] * len(do), delayed=delayed)
            run.do_all(do, with_troubles, delayed=delayed)
            if kind.ordered:
                assert run.rows() == twin.rows()
                assert run.episodes == twin.episodes
                stats, expected = run.collector.stats(), twin.collector.stats()
                for name in (
                    "frames",
                    "executed",
                    "discarded",
                    "in_flight",
                    "batches",
                    "episodes",
                ):
                    assert getattr(stats, name) == getattr(expected, name), name
            else:
                rows, expected_rows = run.by_env(), twin.by_env()
                for env in rows.keys() & expected_rows.keys():
                    both = min(len(rows[env]), len(expected_rows[env]))
                    assert rows[env][:both] == expected_rows[env][:both]
        finally:
            run.collector.shutdown()
            twin.collector.shutdown()


sequences = st.lists(st.tuples(calls, troubles), min_size=2, max_size=6)


@pytest.mark.parametrize("kind", HERE, ids=lambda kind: kind.name)
@pytest.mark.parametrize("delayed", [True, False], ids=["delayed", "at once"])
@given(
    policy=st.sampled_from([head, recurrent]),
    options=st.sampled_from([*OPTIONS]),
    sequence=sequences,
)
@examples(40)
def test_in_this_thread(kind, delayed, policy, options, sequence):
    check(
        kind, policy, options, *map(list, zip(*sequence, strict=True)), delayed=delayed
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [kind for kind in ELSEWHERE if kind.ordered], ids=lambda kind: kind.name
)
@pytest.mark.parametrize("delayed", [True, False], ids=["delayed", "at once"])
@given(
    policy=st.sampled_from([head, recurrent]),
    options=st.sampled_from([*OPTIONS]),
    sequence=sequences,
)
@examples(6)
def test_in_workers(kind, delayed, policy, options, sequence):
    check(
        kind, policy, options, *map(list, zip(*sequence, strict=True)), delayed=delayed
    )


in_any_order = st.lists(
    st.tuples(st.one_of(*in_order), troubles), min_size=2, max_size=6
)
ROWS_OF_ANY_LENGTH = [
    "plain",
    "limited",
    "infos",
    "hook of steps",
]  # rows do not depend on where rollouts end


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [kind for kind in ELSEWHERE if not kind.ordered], ids=lambda kind: kind.name
)
@given(options=st.sampled_from(ROWS_OF_ANY_LENGTH), sequence=in_any_order)
@examples(6)
def test_in_workers_that_do_not_wait_for_each_other(kind, options, sequence):
    check(kind, head, options, *map(list, zip(*sequence, strict=True)), delayed=True)
