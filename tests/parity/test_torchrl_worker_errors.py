"""What TorchRL's collectors with workers do not say: which error of a worker it was, and that they
were shut down.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import pytest

pytest.importorskip("torchrl")

import torch
import torchrl.weight_update
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import EnvCreator

import muster.compat.torchrl.collectors as ours
from muster.compat.torchrl import weight_update, worker_calls
from muster.errors import (
    BadOption,
    CollectorClosed,
    CollectorTimeout,
    EnvError,
    MusterError,
    WorkerDied,
    WorkerError,
)
from tests.parity import torchrl_workers as workers
from tests.parity.test_torchrl_multi import _workers_start_in_milliseconds, made
from tests.parity.torchrl_workers import Failing, FailingHook, FailingPolicy, Weighted
from tests.waits import wait_until

__all__ = ["_workers_start_in_milliseconds"]  # a fixture
pytestmark = pytest.mark.filterwarnings("ignore")
KINDS = ("MultiSyncCollector", "MultiAsyncCollector")
TYPES: dict[str, type[Exception]] = {
    "value": ValueError,
    "own": workers.Diverged,
    "eof": EOFError,
    "pipe": BrokenPipeError,
}


def failing(method: str, how: str, call: int = 1) -> list[Any]:
    """Environments of two workers, of which the second fails."""
    return [workers.counting, partial(Failing, method, how, call)]


def folders() -> set[str]:
    return {str(path) for path in Path(tempfile.gettempdir()).glob("muster-errors-*")}


@contextlib.contextmanager
def collector(name: str = "MultiSyncCollector", **options: Any) -> Iterator[Any]:
    """A collector of two workers. Afterwards none of its processes and files is left."""
    before = folders()
    opened = made(ours, name, **{"total_frames": -1, **options})
    try:
        yield opened
    finally:
        opened.shutdown(raise_on_error=False)
        assert not any(
            worker_calls.is_known(process) and process.is_alive()
            for process in opened.procs
        )
        assert folders() == before


def iterate(opened: Any) -> None:
    for _ in zip(range(200), opened, strict=False):
        pass


# Where an error can be raised: options, what the user calls, and the phase of the error.
PLACES: dict[str, tuple[Callable[[str], dict[str, Any]], Callable[[Any], Any], str]] = {
    "step": (lambda how: {"envs": failing("step", how, 7)}, iterate, "step"),
    "reset": (lambda how: {"envs": failing("reset", how, 3)}, iterate, "reset"),
    "first reset": (lambda how: {"envs": failing("reset", how)}, iterate, "construct"),
    "make": (
        lambda how: {"envs": [workers.counting, partial(workers.fail, how)]},
        iterate,
        "construct",
    ),
    "policy": (lambda how: {"policy": FailingPolicy(how, 9)}, iterate, "policy"),
    "policy_factory": (
        lambda how: {
            "policy_factory": [partial(Weighted, 1.0), partial(workers.fail, how)]
        },
        iterate,
        "construct",
    ),
    "init_fn": (lambda how: {"init_fn": FailingHook(how)}, iterate, "construct"),
    "pre_collect_hook": (
        lambda how: {"pre_collect_hook": FailingHook(how)},
        iterate,
        "call",
    ),
    "post_collect_hook": (
        lambda how: {"post_collect_hook": FailingHook(how)},
        iterate,
        "call",
    ),
    "set_seed": (
        lambda how: {"envs": failing("set_seed", how)},
        lambda opened: opened.set_seed(1),
        "call",
    ),
    "reset()": (
        lambda how: {"envs": failing("reset", how, 2)},
        lambda opened: opened.reset(),
        "reset",
    ),
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("how", TYPES)
@pytest.mark.parametrize("place", PLACES)
def test_errors_of_workers_are_the_originals(place: str, how: str, name: str) -> None:
    """Of the type that was raised, with the worker, the place and the traceback in the error that
    is their cause.
    """
    options, use, phase = PLACES[place]

    def run() -> None:
        with collector(name, **options(how)) as opened:
            try:
                use(opened)
            finally:
                with pytest.raises(CollectorClosed):
                    opened.next()

    before = folders()
    with pytest.raises(TYPES[how]) as caught:
        run()
    assert folders() == before
    error, cause = caught.value, caught.value.__cause__
    assert type(error) is TYPES[how]
    assert isinstance(cause, MusterError)
    assert (cause.phase, cause.worker) in {(phase, 0), (phase, 1)}
    if "envs" in options(how):
        assert cause.worker == 1
    if place != "init_fn":  # it does not know which worker it is in
        assert f"worker {cause.worker} (pid " in str(cause)
    assert "torchrl_workers.py" in str(cause), "the traceback in the worker"
    if "step" in place or "reset" in place:
        assert isinstance(cause, EnvError)
        assert ("Failing.step" if "step" in place else "Failing.reset") in str(cause)
    if how == "own":
        assert isinstance(error, workers.Diverged)
        assert (str(error), error.code) == ("simulator diverged", 7)
    shown = "".join(traceback.format_exception(error))
    assert "At least one process failed" not in shown
    assert "Cannot close a process" not in shown


def test_an_error_of_this_process_is_raised_as_it_is() -> None:
    def postproc(batch: Any) -> Any:
        raise ValueError("of the main process")

    with (
        collector(postproc=postproc) as opened,
        pytest.raises(ValueError, match="of the main process") as caught,
    ):
        opened.next()
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("how", ["value", "eof"])
def test_an_error_that_a_worker_survives_is_not_its_end(how: str) -> None:
    with collector(envs=failing("reset", how, 2), frames_per_batch=4) as opened:
        next(batches := iter(opened))
        with pytest.raises(TYPES[how], match="of the test") as caught:
            opened.map_fn("reset")
        assert caught.value.__cause__ is None, "TorchRL has pickled it"
        assert next(batches).shape == (2, 2)
        opened.procs[1].kill()
        opened.procs[1].join(60)
        with pytest.raises(WorkerDied, match="Worker 1 .* SIGKILL"):
            next(batches)


def test_errors_of_muster_say_where_they_were_raised() -> None:
    with pytest.raises(
        BadOption,
        match=r"frames_per_batch=0.* In worker 1 \(pid \d+\), phase construct",
    ):
        made(ours, frames_per_batch=[4, 0])


def test_an_error_of_the_replay_buffer_in_a_worker() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(64), shared=True)
    buffer.extend(
        workers.counting()
        .fake_tensordict()
        .expand(2)
        .clone()
        .set("observation", torch.zeros(2, 7))
    )
    with (
        collector(policy=workers.ones, replay_buffer=buffer) as opened,
        pytest.raises(RuntimeError) as caught,
    ):
        opened.next()
    assert isinstance(caught.value.__cause__, WorkerError)
    assert "torchrl/data/replay_buffers" in str(caught.value.__cause__)


@pytest.mark.parametrize("place", ["step", "make", "policy"])
def test_an_exit_in_a_worker_does_not_end_the_program(place: str) -> None:
    options, use, _ = PLACES[place]

    def run() -> None:
        with collector(**options("system exit")) as opened:
            use(opened)

    with pytest.raises(
        MusterError, match=r"SystemExit was raised: of the test. In worker \d"
    ) as caught:
        run()
    assert isinstance(caught.value.__cause__, SystemExit)


# --- workers that are gone ------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("how", "code"), [("kill", -signal.SIGKILL), ("exit", 7)])
@pytest.mark.parametrize("place", ["step", "make", "first reset", "policy_factory"])
def test_a_worker_that_dies(place: str, how: str, code: int, name: str) -> None:
    options, use, _ = PLACES[place]

    def run() -> None:
        with collector(name, **options(how)) as opened:
            use(opened)

    with pytest.raises(WorkerDied, match=r"Worker 1 \(pid \d+\)") as caught:
        run()
    assert (caught.value.worker, caught.value.exitcode) == (1, code)
    assert isinstance(caught.value, RuntimeError), "as TorchRL's"


def weights(value: float) -> Any:
    return TensorDict.from_module(Weighted(value)).data


CALLS: dict[str, Callable[[Any], Any]] = {
    "next": lambda c: c.next(),
    "a new iterator": lambda c: list(c),
    "set_seed": lambda c: c.set_seed(1),
    "reset": lambda c: c.reset(),
    "state_dict": lambda c: c.state_dict(),
    "load_state_dict": lambda c: c.load_state_dict(
        {"frames": 0, "iter": 0, "worker0": {}, "worker1": {}}
    ),
    "map_fn": lambda c: c.map_fn("stats"),
    "get_distant_attr": lambda c: c.get_distant_attr("policy"),
    "getattr_env": lambda c: c.getattr_env("max_steps"),
    "getattr_policy": lambda c: c.getattr_policy("weight"),
    "update_policy_weights_": lambda c: c.update_policy_weights_(weights(1.0)),
    "an update without weights": lambda c: c.update_policy_weights_(),
    "receive_weights": lambda c: c.receive_weights(weights(1.0)),
    "enable_profile": lambda c: c.enable_profile(workers=[0, 1]),
    "stats": lambda c: c.stats("both"),
}
ONLY_OPEN: dict[str, Callable[[Any], Any]] = {
    "start": lambda c: c.start(),
    "pause": lambda c: c.pause().__enter__(),
}


@pytest.mark.parametrize("call", CALLS)
def test_calls_after_the_death_of_a_worker(call: str) -> None:
    with collector() as opened:
        killed = opened.procs[0]
        os.kill(killed.pid, signal.SIGKILL)
        killed.join(60)
        with pytest.raises(WorkerDied, match=r"Worker 0 .* SIGKILL") as caught:
            CALLS[call](opened)
        assert (caught.value.worker, caught.value.exitcode) == (0, -signal.SIGKILL)
        with pytest.raises(CollectorClosed):
            CALLS[call](opened)
        assert opened.stats()["workers"] == 2
        assert opened.stats()["workers_alive"] == 0


@pytest.mark.parametrize("scheme", ["default", "torchrl", "muster"])
@pytest.mark.parametrize("name", KINDS)
def test_an_update_does_not_wait_for_a_worker_that_has_failed(
    name: str, scheme: str
) -> None:
    """TorchRL waits for its acknowledgment without a limit."""
    options = {
        "default": {},
        "torchrl": torchrl.weight_update,
        "muster": weight_update,
    }[scheme]
    given = (
        {}
        if options == {}
        else {"weight_sync_schemes": {"policy": options.MultiProcessWeightSyncScheme()}}
    )
    with collector(name, envs=failing("step", "value", 5), **given) as opened:
        batches = iter(opened)
        with pytest.raises(ValueError, match="of the test") as caught:
            if name == "MultiAsyncCollector":
                next(batches)
                wait_until(lambda: worker_calls.exit_code(opened.procs[1]) is not None)
            for _ in range(100):
                opened.update_policy_weights_(weights(1.0))
                next(batches)
        assert isinstance(caught.value.__cause__, EnvError)


@pytest.mark.slow
def test_an_update_that_a_worker_does_not_take_in_time(monkeypatch: Any) -> None:
    monkeypatch.setattr(worker_calls, "WEIGHTS_S", 0.5)
    with collector() as opened:
        next(iter(opened))
        os.kill(opened.procs[1].pid, signal.SIGSTOP)
        with pytest.raises(
            CollectorTimeout,
            match=r"not all workers have taken their weights within 0.5 s",
        ):
            opened.update_policy_weights_(weights(1.0))
        with pytest.raises(CollectorClosed):
            opened.next()


# --- in the background ----------------------------------------------------------------------------


def started(**options: Any) -> contextlib.AbstractContextManager[Any]:
    buffer = ReplayBuffer(storage=LazyTensorStorage(1_000), shared=True)
    return collector(
        "MultiAsyncCollector",
        policy=workers.ones,
        replay_buffer=buffer,
        frames_per_batch=4,
        **options,
    )


@pytest.mark.parametrize("method", ["shutdown", "async_shutdown"])
@pytest.mark.parametrize("how", ["value", "kill"])
def test_an_error_in_the_background_is_raised_at_the_end(how: str, method: str) -> None:
    with started(envs=failing("step", how, 20)) as opened:
        opened.start()
        wait_until(lambda: worker_calls.exit_code(opened.procs[1]) is not None)
        with pytest.raises(ValueError if how == "value" else WorkerDied) as caught:
            getattr(opened, method)()
        assert (
            getattr(
                caught.value if how == "kill" else caught.value.__cause__,
                "worker",
                None,
            )
            == 1
        )
        opened.shutdown()  # it was raised


def test_without_an_error_the_end_is_quiet() -> None:
    with started() as opened:
        opened.start()
        buffer = opened.replay_buffer
        wait_until(lambda: buffer.write_count >= 8)
        with opened.pause():
            count = buffer.write_count
            assert buffer.write_count == count
        wait_until(lambda: buffer.write_count > count)
        opened.async_shutdown()


def test_ctrl_c_in_workers_is_not_an_error() -> None:
    with started() as opened:
        opened.start()
        wait_until(lambda: opened.replay_buffer.write_count >= 8)
        for process in opened.procs:
            os.kill(process.pid, signal.SIGINT)
        wait_until(
            lambda: all(
                worker_calls.exit_code(process) is not None for process in opened.procs
            )
        )
        opened.shutdown()


# --- the end of a collector -----------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_a_closed_collector_says_so(name: str) -> None:
    with collector(name) as opened:
        batches = iter(opened)
        batch = next(batches).clone()
        opened.shutdown()
        opened.shutdown()
        opened.async_shutdown()
        with pytest.raises(CollectorClosed, match="shut down"):
            next(batches)
        for call in (*CALLS.values(), *ONLY_OPEN.values()):
            for _ in range(2):
                with pytest.raises(CollectorClosed, match="shut down"):
                    call(opened)
        assert opened.stats()["workers_alive"] == 0
        opened.pre_collect_hook = None
        assert batch["observation"].isfinite().all()


def test_a_collector_that_has_ended_is_not_closed() -> None:
    with collector(total_frames=8) as opened:
        assert len(list(opened)) == len(opened) == 1
        assert opened.next() is None
        assert opened.state_dict()["frames"] == 8


def test_an_endless_collector_has_no_length() -> None:
    with collector() as opened, pytest.raises(TypeError, match="endless collector"):
        len(opened)


def test_no_worker_is_left_by_a_constructor_that_fails_late() -> None:
    """TorchRL checks ``cat_results`` when the workers run."""
    running: list[Any] = []

    class Noted(ours.MultiSyncCollector):  # type: ignore[misc]
        def shutdown(self, *args: Any, **options: Any) -> None:
            running.extend(getattr(self, "procs", ()))
            super().shutdown(*args, **options)

    before = folders()
    with pytest.raises(ValueError, match="cat_results"):
        Noted(workers.ENVS, Weighted(), frames_per_batch=8, cat_results="nothing")
    assert running
    wait_until(lambda: not any(process.is_alive() for process in running))
    assert folders() == before


# --- create_env_fn --------------------------------------------------------------------------------


class Marked(ours.Collector):  # type: ignore[misc]
    """A class of a program."""

    mark = 5


ONE: dict[str, Any] = {
    "function": workers.counting,
    "environment": workers.counting(3),
    "EnvCreator": EnvCreator(workers.counting),
    "id": "CartPole-v1",
    "function of Gymnasium": partial(gymnasium.make, "CartPole-v1"),
    "environment of Gymnasium": gymnasium.make("CartPole-v1"),
}


@pytest.mark.parametrize("number", [None, 2])
@pytest.mark.parametrize("name", [*KINDS, "AsyncCollector"])
@pytest.mark.parametrize("entry", ONE)
def test_one_entry_is_one_worker(entry: str, name: str, number: int | None) -> None:
    """In TorchRL a ``TypeError``, or a worker for each letter of an id.

    ``num_workers`` says otherwise.
    """
    if number is not None and name == "AsyncCollector":
        pytest.skip("it has one worker")
    foreign = entry == "id" or "Gymnasium" in entry
    options: dict[str, Any] = {
        "envs": ONE[entry],
        "policy": workers.right if foreign else Weighted(),
    }
    with collector(name, num_workers=number, **options) as opened:
        assert opened.num_workers == len(opened.procs) == (number or 1)
        assert opened.next().shape[-1] == 8 // (
            number or 1 if name == "MultiSyncCollector" else 1
        )


def test_ids_with_keywords_and_a_class_of_the_program() -> None:
    options: dict[str, Any] = {
        "create_env_kwargs": {"max_episode_steps": 3},
        "collector_class": Marked,
    }
    with collector(
        envs=["CartPole-v1"] * 2, policy=workers.right, frames_per_batch=12, **options
    ) as opened:
        assert opened.next()["next", "truncated"].sum() == 4
        assert opened.collector_class is Marked
        assert opened.get_distant_attr("mark") == [5, 5]


# --- evaluation -----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["evaluate", "wait", "poll"])
@pytest.mark.parametrize("backend", ["thread", "process"])
def test_errors_of_an_evaluation(backend: str, way: str) -> None:
    """TorchRL's ``wait`` never returns."""
    before = folders()
    evaluator = ours.Evaluator(
        partial(Failing, "step", "own", 3),
        policy_factory=workers.acting,
        num_trajectories=2,
        backend=backend,
    )
    try:
        with pytest.raises(workers.Diverged, match="simulator diverged") as caught:
            if way == "evaluate":
                evaluator.evaluate()
            else:
                assert evaluator.trigger_eval()
                if way == "wait":
                    evaluator.wait()
                wait_until(lambda: evaluator.poll(0.1))
        assert isinstance(caught.value.__cause__, EnvError)
        assert "Failing.step" in str(caught.value.__cause__)
    finally:
        evaluator.shutdown()
    assert folders() == before


def test_waiting_for_an_evaluation_has_a_limit() -> None:
    evaluator = ours.Evaluator(
        workers.counting, policy_factory=workers.acting, num_trajectories=2, max_steps=6
    )
    try:
        assert evaluator.wait(0.0) is None
        assert evaluator.wait(0.3) is None
        assert evaluator.poll() is None
        evaluator.trigger_eval(step=4)
        assert evaluator.wait(60)["eval/step"] == 4
    finally:
        evaluator.shutdown()
