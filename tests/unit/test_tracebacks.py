"""What a user sees of a mistake: the lines that are theirs, and few of ours."""

from __future__ import annotations

import re
import threading
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch

import muster
from muster import (
    Collector,
    DistributedCollector,
    Evaluator,
    MultiAsyncCollector,
    MultiSyncCollector,
)
from muster.errors import EnvError, PolicyError
from muster.restore.crash_report import CrashReport
from muster.testing import CountingEnv
from muster.workers.worker import Worker

OURS = re.escape(str(Path(muster.__file__).parent))
MOST = 15


class Raises(gymnasium.Wrapper):
    """Raises at one of its methods, ``at`` "make", "reset" or "step"."""

    def __init__(self, at: str) -> None:
        super().__init__(CountingEnv())
        self._at = at
        if at == "make":
            raise ValueError("the simulator is missing")

    def reset(self, **kwargs: Any) -> Any:
        if self._at == "reset":
            raise ValueError("the simulator does not answer")
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        if self._at == "step":
            raise ValueError("the simulator has stopped")
        return super().step(action)


class WrongObs(gymnasium.Wrapper):
    """Its observations are not those of its space."""

    def step(self, action: Any) -> Any:
        _, *others = super().step(action)
        return torch.zeros(7).numpy(), *others


def raising(*_: Any, **__: Any) -> Any:
    raise KeyError("no such thing")


def raising_policy(obs: Any) -> Any:
    return torch.zeros(3, 4) @ torch.zeros(5, 6)


def wrong_shape(obs: Any) -> Any:
    return torch.zeros(17, 3)


class Schedule:
    """A hook with state."""

    def __call__(self, *_: Any) -> Any:
        return raising()


def make(at: str = "", wrong: bool = False) -> Callable[[], Any]:
    return partial(Raises, at) if not wrong else partial(WrongObs, CountingEnv())


def iterate(
    kind: Any = Collector,
    envs: Any = None,
    policy: Any = None,
    n: int = 2,
    **options: Any,
) -> None:
    options = {"frames_per_batch": 8} | options
    if envs is None:
        envs = CountingEnv
    if kind is not Collector and not isinstance(envs, list):
        envs = [envs]
    with kind(envs, policy, **options) as collector:
        for _, _ in zip(range(n), collector, strict=False):
            pass


def after_shutdown() -> None:
    collector = Collector(CountingEnv, frames_per_batch=8)
    collector.shutdown()
    collector.next()


def iterated_after_shutdown() -> None:
    collector = Collector(CountingEnv, frames_per_batch=8)
    batches = iter(collector)
    next(batches)
    collector.shutdown()
    next(batches)


def with_collector(
    use: Callable[[Any], Any], kind: Any = Collector, envs: Any = None, **options: Any
) -> None:
    options = {"frames_per_batch": 8} | options
    policy = options.pop("policy", torch.nn.Linear(2, 3))
    with kind(
        envs or (CountingEnv if kind is Collector else [CountingEnv]), policy, **options
    ) as collector:
        use(collector)


def bad_weights() -> dict[str, torch.Tensor]:
    return {"weight": torch.zeros(5, 5), "bias": torch.zeros(3)}


def torchrl(
    use: Callable[[Any], Any],
    envs: Any = CountingEnv,
    policy: Any = None,
    **options: Any,
) -> None:
    compat = pytest.importorskip("muster.compat.torchrl")
    options = {"frames_per_batch": 8, "total_frames": 16} | options
    use(compat.Collector(envs, policy, **options))


def prt_rl(env: Any) -> None:
    compat = pytest.importorskip("muster.compat.prt_rl")
    compat.Collector(env).collect_experience(
        muster.policies.categorical(torch.nn.Linear(2, 2)), 8
    )


def tianshou(env: Any) -> None:
    compat, envs = (
        pytest.importorskip(name) for name in ("muster.compat.tianshou", "tianshou.env")
    )
    from tests.parity.tianshou_envs import POLICIES

    with compat.Collector(
        POLICIES["none"](env.action_space), envs.DummyVectorEnv([lambda: env])
    ) as collector:
        collector.collect(n_step=8, reset_before_collect=True)


class Full:
    """A buffer that takes nothing."""

    def extend(self, batch: Any) -> None:
        raise MemoryError("the buffer is full")


SERVED = {"kind": MultiSyncCollector, "inference": "server"}
MISTAKES: dict[str, Callable[[], Any]] = {
    "unknown option": lambda: Collector(CountingEnv, frames_per_bach=8),
    "wrong type": lambda: Collector(CountingEnv, frames_per_batch="8"),
    "contradiction": lambda: Collector(
        CountingEnv, frames_per_batch=8, split_trajs=True, trajs_per_batch=2
    ),
    "contradiction of workers": lambda: MultiSyncCollector(
        [CountingEnv], frames_per_batch=8, max_policy_lag=1
    ),
    "too many arguments": lambda: Collector(CountingEnv, None, 8),
    "nothing to step": lambda: Collector(3, frames_per_batch=8),
    "no environments": lambda: Collector([], frames_per_batch=8),
    "unknown env id": lambda: Collector("CartPol-v1", frames_per_batch=8),
    "unknown env id in a worker": lambda: MultiSyncCollector(
        ["CartPol-v1"], frames_per_batch=8
    ),
    "not picklable": lambda: MultiSyncCollector(
        [partial(CountingEnv, threading.Lock())], frames_per_batch=8
    ),
    "factory raises": lambda: iterate(envs=make("make")),
    "factory raises in a worker": lambda: iterate(MultiSyncCollector, make("make")),
    "factory raises in a thread": lambda: iterate(
        MultiSyncCollector, make("make"), backend="threads"
    ),
    "reset raises": lambda: iterate(envs=make("reset")),
    "step raises": lambda: iterate(envs=make("step")),
    "step raises in a batch of environments": lambda: iterate(
        envs=make("step"), num_envs=2
    ),
    "step raises in collector.next": lambda: with_collector(
        lambda c: c.next(), envs=make("step"), policy=None
    ),
    "step raises in collect": lambda: with_collector(
        lambda c: c.collect(n_step=8), envs=make("step"), policy=None
    ),
    "step raises in collect of episodes": lambda: with_collector(
        lambda c: c.collect(n_episode=2), envs=make("step"), policy=None
    ),
    "step raises in rollout": lambda: with_collector(
        lambda c: c.rollout(), envs=make("step"), policy=None
    ),
    "wrong observation": lambda: iterate(envs=make(wrong=True)),
    "reset raises in a worker": lambda: iterate(MultiSyncCollector, make("reset")),
    "step raises in a worker": lambda: iterate(MultiSyncCollector, make("step")),
    "step raises in one of several": lambda: iterate(
        MultiAsyncCollector, [make("step"), CountingEnv]
    ),
    "step raises in a thread": lambda: iterate(
        MultiSyncCollector, make("step"), backend="threads"
    ),
    "step raises with the server": lambda: iterate(envs=make("step"), **SERVED),
    "policy raises": lambda: iterate(policy=raising_policy),
    "policy raises in a worker": lambda: iterate(
        MultiSyncCollector, policy=raising_policy
    ),
    "policy raises on the server": lambda: iterate(policy=raising_policy, **SERVED),
    "policy factory raises": lambda: Collector(
        CountingEnv, policy_factory=raising, frames_per_batch=8
    ),
    "policy factory raises in a worker": lambda: iterate(
        MultiSyncCollector, policy_factory=raising
    ),
    "module of a wrong size": lambda: iterate(policy=torch.nn.Linear(5, 3)),
    "head of a wrong size": lambda: iterate(
        policy=muster.policies.categorical(torch.nn.Linear(5, 3))
    ),
    "policy of wrong shape": lambda: iterate(policy=wrong_shape),
    "policy of wrong shape in a worker": lambda: iterate(
        MultiSyncCollector, policy=wrong_shape
    ),
    "postproc raises": lambda: iterate(postproc=raising),
    "pre_collect_hook raises": lambda: iterate(pre_collect_hook=raising),
    "post_collect_hook raises": lambda: iterate(post_collect_hook=raising),
    "on_step raises": lambda: iterate(on_step=raising),
    "on_step raises in a worker": lambda: iterate(MultiSyncCollector, on_step=raising),
    "on_batch raises": lambda: iterate(on_batch=Schedule()),
    "on_episode_done raises": lambda: iterate(on_episode_done=raising),
    "logger raises": lambda: iterate(logger=raising),
    "buffer raises": lambda: iterate(replay_buffer=Full()),
    "next after shutdown": after_shutdown,
    "iterating after shutdown": iterated_after_shutdown,
    "two iterators": lambda: with_collector(
        lambda c: zip(*[c, c], strict=True).__next__()
    ),
    "bad weights": lambda: with_collector(
        lambda c: c.update_policy_weights_(bad_weights())
    ),
    "bad weights for workers": lambda: with_collector(
        lambda c: c.update_policy_weights_(bad_weights()), MultiSyncCollector
    ),
    "unknown model": lambda: with_collector(
        lambda c: c.update_policy_weights_(None, model_id="critic")
    ),
    "wrong n_step": lambda: with_collector(lambda c: c.collect(n_step=0)),
    "no amount": lambda: with_collector(lambda c: c.collect()),
    "no bootstrap value": lambda: with_collector(
        lambda c: c.collect(n_step=8, bootstrap=True)
    ),
    "reset of no environment": lambda: with_collector(lambda c: c.reset(7)),
    "seed": lambda: with_collector(lambda c: c.set_seed(-1)),
    "state of something else": lambda: with_collector(
        lambda c: c.load_state_dict({"a": 1})
    ),
    "state from no file": lambda: with_collector(
        lambda c: c.load_state_dict("/nowhere/state")
    ),
    "no attribute in workers": lambda: with_collector(
        lambda c: c.getattr_env("nothing"), MultiSyncCollector
    ),
    "evaluator": lambda: Evaluator(CountingEnv, episodes=0),
    "evaluator's environment": lambda: Evaluator(
        make("step"), None, episodes=2
    ).evaluate(),
    "evaluator's policy": lambda: Evaluator(
        CountingEnv, raising_policy, episodes=2
    ).evaluate(),
    "tune": lambda: muster.tune(make("make"), seconds=1.0),
    "cluster": lambda: DistributedCollector(
        [CountingEnv], frames_per_batch=8, launcher="nothing"
    ),
    "torchrl: unknown option": lambda: torchrl(list, frames_per_bach=8),
    "torchrl: factory raises": lambda: torchrl(list, make("make")),
    "torchrl: step raises": lambda: torchrl(list, make("step")),
    "torchrl: policy raises": lambda: torchrl(list, policy=raising_policy),
    "prt_rl: step raises": lambda: prt_rl(Raises("step")),
    "tianshou: step raises": lambda: tianshou(Raises("step")),
}


def shown(mistake: Callable[[], Any]) -> list[str]:
    """The lines that Python prints of it."""
    try:
        mistake()
    except Exception as error:  # noqa: BLE001 (any is a case)
        return "".join(traceback.format_exception(error)).splitlines()
    raise AssertionError("nothing was raised")


def ours(lines: list[str]) -> list[str]:
    """Those of frames of ours, with what they show of the source."""
    found = []
    frame = None  # indentation of one of ours, while its lines follow
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if re.search(r'File "', line):
            frame = indent if re.search(f'File "{OURS}/', line) else None
        elif frame is not None and indent <= frame:
            frame = None
        if frame is not None:
            found.append(line)
    return found


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_shows_at_most_15_lines_of_ours(name):
    lines = shown(MISTAKES[name])
    assert len(ours(lines)) <= MOST, "\n".join(lines)


def test_the_environment_variable_keeps_all_frames(monkeypatch):
    few = shown(MISTAKES["step raises"])
    monkeypatch.setenv("MUSTER_TRACEBACK", "full")
    assert len(ours(shown(MISTAKES["step raises"]))) > 3 * len(ours(few))


def test_the_users_frames_and_the_cause_stay():
    with pytest.raises(EnvError) as caught:
        iterate(envs=make("step"))
    frames = [
        Path(frame.filename).name
        for frame in traceback.extract_tb(caught.value.__traceback__)
    ]
    cause = traceback.extract_tb(caught.value.__cause__.__traceback__)
    assert frames == ["test_tracebacks.py", "test_tracebacks.py", "engine.py"]
    assert [(Path(frame.filename).name, frame.name) for frame in cause] == [
        ("test_tracebacks.py", "step")
    ]


def test_a_bug_of_ours_keeps_all_frames(monkeypatch):
    monkeypatch.setattr(Worker, "run", None)
    assert any("in collect" in line for line in ours(shown(iterate)))


def test_interruptions_keep_all_frames():
    def interrupt(obs: Any) -> Any:
        raise KeyboardInterrupt

    with (
        Collector(CountingEnv, interrupt, frames_per_batch=8) as collector,
        pytest.raises(KeyboardInterrupt) as caught,
    ):
        collector.next()
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert frames[-1].name == "interrupt"
    assert len(frames) > 6


def test_a_crash_report_has_all_frames(tmp_path):
    with pytest.raises(EnvError) as caught:
        iterate(MultiSyncCollector, make("step"), crash_dir=tmp_path)
    report = CrashReport.load(caught.value.crash_report, trust=True)
    assert report.message.endswith(caught.value.traceback)


def test_errors_of_workers_have_all_frames_beside_their_message():
    with pytest.raises(PolicyError) as caught:
        iterate(MultiSyncCollector, policy=raising_policy)
    assert "functions.py" in caught.value.traceback
    assert "functions.py" not in str(caught.value)
