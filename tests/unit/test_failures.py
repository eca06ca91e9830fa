"""Errors, deaths and hangs of workers, as they arrive in the parent."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from muster import Collector, errors
from muster.errors import (
    EnvError,
    MusterError,
    PolicyError,
    RemoteError,
    WorkerDied,
    WorkerError,
    WorkerHung,
)
from muster.testing import FaultyEnv
from muster.workers.failures import (
    SentError,
    Where,
    died,
    hung,
    innermost_user_frame,
    oom_kills,
    pack,
    thread_stack,
)

WHERE = {
    "worker": 1,
    "pid": 4711,
    "generation": 0,
    "env_ids": (5,),
    "row": 3,
    "episode": 2,
    "step": 17,
    "seed": 42,
}


class TwoArguments(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


class Holds(Exception):
    def __init__(self, what: Any) -> None:
        super().__init__("holds")
        self.what = what


class ReducesToAnother(Exception):
    def __reduce__(self) -> Any:
        return ValueError, ("something else",)


class ExitsWhenPickled(Exception):
    def __reduce__(self) -> Any:
        raise SystemExit(3)


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


class OwnEnvError(EnvError):
    pass


def raised(error: BaseException) -> BaseException:
    """The exception with a traceback that ends in this file."""
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001
        return caught


def by_env(
    make: Callable[[], BaseException], *, at: int = 3, on_reset: bool = False
) -> BaseException:
    """What a collector says when an environment raises; the collector is in process."""
    env = FaultyEnv(at, error=make, on_reset=on_reset)
    with (
        Collector(env, None, frames_per_batch=6) as collector,
        pytest.raises(BaseException) as caught,  # noqa: PT011
    ):
        collector.rollout()
    return caught.value


def carried(error: BaseException, phase: str = "step", **where: Any) -> MusterError:
    """Through a pipe."""
    failure: SentError = pickle.loads(
        pickle.dumps(pack(error, phase=phase, **{**WHERE, **where}))
    )
    return failure.error()


def test_an_error_of_an_environment_arrives_with_place_original_and_traceback() -> None:
    error = carried(by_env(lambda: ValueError("boom")))
    assert type(error) is EnvError
    first, traceback = str(error).split("\n\n")
    assert first == (
        "FaultyEnv[0].step (row 3 of the batch) raised ValueError: boom. In worker 1 (pid 4711), environment 5, "
        "step 17 of its episode 2, row 3, seed 42, phase step."
    )
    lines = traceback.splitlines()
    assert lines[0] == "Traceback in the worker:"
    assert lines[-1] == "ValueError: boom"
    assert lines[-2].strip() == "raise self.error()"
    assert type(error.__cause__) is ValueError
    assert error.__cause__.args == ("boom",)
    assert (
        error.worker,
        error.env_id,
        error.seed,
        error.phase,
        error.crash_report,
    ) == (
        1,
        5,
        42,
        "step",
        None,
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: TwoArguments(1, 2),
        lambda: Holds(threading.Lock()),
        lambda: Holds(b"x" * 3_000_000),
        lambda: ReducesToAnother("mine"),
        lambda: ExitsWhenPickled("mine"),
        lambda: Mute("mine"),
    ],
    ids=["two arguments", "lock", "huge", "another", "exits", "mute"],
)
def test_what_does_not_survive_pickling_arrives_as_text(
    make: Callable[[], Exception],
) -> None:
    error = carried(EnvError("env raised"), phase="step")
    assert error.__cause__ is None
    try:
        raise EnvError("env raised") from raised(make())
    except EnvError as caught:
        error = carried(caught)
    cause = error.__cause__
    assert type(cause) is RemoteError
    name = type(make()).__qualname__
    assert cause.type_name.endswith(f"test_failures.{name}")
    expected = {
        "TwoArguments": "1 and 2",
        "Holds": "holds",
        "Mute": "<could not be shown: RuntimeError>",
    }
    assert str(cause) == f"{cause.type_name}: {expected.get(name, 'mine')}"
    assert "raise error" in cause.traceback
    assert cause.traceback in str(error)


def test_exceptions_that_hold_lambdas_survive() -> None:
    cause = carried(raised(Holds(lambda: 7))).__cause__
    assert type(cause) is Holds
    assert cause.what() == 7


@pytest.mark.parametrize(
    "make", [lambda: SystemExit(3), KeyboardInterrupt, lambda: GeneratorExit("x")]
)
def test_what_is_no_exception_ends_nothing_and_arrives(
    make: Callable[[], BaseException],
) -> None:
    name = type(make()).__name__
    error = carried(raised(make()))
    assert type(error) is EnvError
    assert str(error).startswith(f"{name} was raised")
    assert type(error.__cause__) is type(make())
    assert error.__cause__.args == make().args


def test_notes_come_along() -> None:
    original = ValueError("boom")
    original.__notes__ = ["the third level", "of the maze"]  # type: ignore[attr-defined]  # add_note of Python 3.11
    error = carried(raised(original))
    assert (
        "ValueError was raised: boom\nthe third level\nof the maze. In worker 1"
        in str(error)
    )
    assert error.__cause__.__notes__ == ["the third level", "of the maze"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "kind",
    [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, MusterError)
    ],
)
def test_errors_of_muster_keep_their_class(kind: type[MusterError]) -> None:
    error = carried(kind("what happened"))
    assert type(error) is kind
    assert str(error).startswith("what happened. In worker 1")
    assert "Traceback" not in str(error)
    assert error.__cause__ is None


def test_a_class_derived_from_one_of_musters_arrives_as_that() -> None:
    assert type(carried(OwnEnvError("mine"))) is EnvError


@pytest.mark.parametrize(
    ("phase", "kind"),
    [
        ("construct", EnvError),
        ("reset", EnvError),
        ("step", EnvError),
        ("close", EnvError),
        ("policy", PolicyError),
        ("weights", WorkerError),
        ("call", WorkerError),
    ],
)
def test_other_errors_get_the_class_of_their_phase(
    phase: str, kind: type[MusterError]
) -> None:
    error = carried(raised(KeyError("a")), phase=phase)
    assert type(error) is kind
    assert str(error).startswith("KeyError was raised: 'a'. In worker 1")
    assert f", phase {phase}." in str(error)
    assert type(error.__cause__) is KeyError


def test_an_error_that_knows_its_environment_says_which() -> None:
    error = EnvError("one of them")
    assert carried(error, env_ids=(4, 5, 6)).env_id is None
    assert "one of the environments 4, 5, 6" in str(carried(error, env_ids=(4, 5, 6)))
    error.env_index = 2
    assert (
        carried(error, env_ids=(4, 5, 6)).env_id,
        carried(error, env_ids=(4, 5, 6)).env_index,
    ) == (6, 2)
    assert "environment 6," in str(carried(error, env_ids=(4, 5, 6)))


def test_a_missing_module_in_the_parent_leaves_the_text() -> None:
    failure = pack(raised(ValueError("boom")), phase="step", **WHERE)
    object.__setattr__(failure, "pickled", b"\x80\x05cno_such_module\nThing\n.")
    cause = failure.error().__cause__
    assert type(cause) is RemoteError
    assert str(cause) == "ValueError: boom"


def test_endless_texts_are_shortened() -> None:
    failure = pack(raised(ValueError("x" * 10**6)), phase="step")
    assert len(str(failure.cause)) < 21_000
    assert "[...]" in str(failure.cause)
    assert len(str(failure.error())) < 70_000
    assert "In a worker, phase step" in str(failure.error())


# --- deaths ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("exitcode", "kills", "expected"),
    [
        (
            -9,
            0,
            "was killed by SIGKILL during step. Another program sent SIGKILL: the out-of-memory killer",
        ),
        (
            -9,
            1,
            "SIGKILL during step. Probably out of memory: the kernel has killed 1 process of this control group",
        ),
        (-9, 3, "the kernel has killed 3 processes of"),
        (-11, 0, "was killed by SIGSEGV during step. That is a crash in native code"),
        (-11, 2, "That is a crash in native code"),
        (-15, 0, "was killed by SIGTERM during step. Muster did not send that signal."),
        (-250, 0, "was killed by signal 250"),
        (0, 0, "ended with exit code 0 during step. The process ended by itself"),
        (
            1,
            0,
            "the worker could not go on (closed descriptors, for example): see standard error for a traceback.",
        ),
        (7, 0, "ended with exit code 7"),
        (
            None,
            0,
            "ended in an unknown way during step. The process that waits for its end and tells the exit code"
            if sys.platform == "linux"
            else "ended in an unknown way during step. Another part of this program reaped",
        ),
        (None, 1, "Probably out of memory: the kernel has killed 1 process"),
    ],
)
def test_a_death_says_how_and_what_that_may_mean(
    exitcode: int | None, kills: int, expected: str
) -> None:
    error = died(Where(**WHERE), phase="step", exitcode=exitcode, oom_kills=kills)
    assert type(error) is WorkerDied
    assert str(error).startswith(
        "Worker 1 (pid 4711), environment 5, step 17 of its episode 2, row 3, seed 42 "
    )
    assert expected in str(error)
    assert (error.worker, error.env_id, error.phase, error.exitcode) == (
        1,
        5,
        "step",
        exitcode,
    )
    assert type(pickle.loads(pickle.dumps(error))) is WorkerDied


def test_a_crash_shows_where_it_was(tmp_path: Path) -> None:
    (tmp_path / "native.py").write_text(
        "import ctypes, faulthandler\nfaulthandler.enable()\ndef step():\n    ctypes.string_at(0)\nstep()\n"
    )
    done = subprocess.run(
        [sys.executable, tmp_path / "native.py"],
        capture_output=True,
        text=True,
        check=False,
    )
    error = died(
        Where(worker=0, generation=2),
        phase="step",
        exitcode=done.returncode,
        stack=done.stderr,
    )
    assert done.returncode == -signal.SIGSEGV
    assert str(error).startswith(
        "Worker 0 (restart 2) was killed by SIGSEGV during step."
    )
    assert f"It was at {tmp_path / 'native.py'}:4 in step." in str(error)
    assert "\n\nStack of the worker" in str(error)


def test_processes_killed_for_memory_are_counted() -> None:
    assert oom_kills() >= 0


# --- hangs ----------------------------------------------------------------------------------------


def a_stack(call: Callable[[Callable[[], None]], Any]) -> str:
    """What faulthandler writes while ``call`` runs what it is given.

    Other tests may have left threads that hang.
    """
    with tempfile.TemporaryFile("w+") as file:
        call(lambda: faulthandler.dump_traceback(file, all_threads=False))
        file.seek(0)
        return file.read()


def dumping_step(dump: Callable[[], None]) -> None:
    np.frompyfunc(lambda _: dump(), 1, 1)(0)


def test_a_hang_names_the_users_frame_first_and_has_the_stack() -> None:
    stack = a_stack(dumping_step)
    error = hung(Where(**WHERE), phase="step", seconds=61.23, deadline=60, stack=stack)
    assert type(error) is WorkerHung
    first, rest = str(error).split("\n\n", 1)
    line = dumping_step.__code__.co_firstlineno + 1
    assert first.startswith("Worker 1 (pid 4711), environment 5, ")
    assert f" has been in step for 61.2 s at {__file__}:" in first
    assert "; its deadline is 60 s." in first
    assert rest.startswith("Stack of the worker (most recent call first):\n")
    assert f'File "{__file__}", line {line}' in rest
    assert (error.phase, error.worker, error.env_id) == ("step", 1, 5)


def test_the_users_frame_is_found_below_installed_ones_and_in_musters_thread() -> None:
    muster = str(Path(errors.__file__).parent)
    stdlib, numpy_file = os.__file__, np.__file__
    stack = (
        'Thread 0x1 (most recent call first):\n  File "/home/u/other.py", line 1 in wait\n\n'
        "Thread 0x2 (most recent call first):\n"
        f'  File "{stdlib}", line 2 in read\n  File "{numpy_file}", line 3 in load\n'
        f'  File "<frozen importlib>", line 9 in load\n'
        '  File "/home/u/maze.py", line 34 in step\n  File "/home/u/wrap.py", line 5 in step\n'
        f'  File "{muster}/rollout/loop.py", line 62 in rollout\n\n'
        'Current thread 0x3 (most recent call first):\n  File "/home/u/third.py", line 1 in main\n'
    )
    assert innermost_user_frame(stack) == "/home/u/maze.py:34 in step"
    without_user = stack.replace("/home/u/maze.py", stdlib).replace(
        "/home/u/wrap.py", numpy_file
    )
    assert innermost_user_frame(without_user) == f"{stdlib}:2 in read"
    without_muster = stack.replace(muster, "/home/u")
    assert innermost_user_frame(without_muster) == "/home/u/third.py:1 in main"
    assert (
        innermost_user_frame(f'Thread 0x2:\n  File "{muster}/a.py", line 7 in b')
        == f"{muster}/a.py:7 in b"
    )
    assert innermost_user_frame("nothing to see") is None


def test_a_hang_without_a_stack_says_why() -> None:
    plain = str(hung(Where(worker=1), phase="reset", seconds=1, deadline=0.5))
    assert plain.startswith(
        "Worker 1 has been in reset for 1.0 s; its deadline is 0.5 s. Its stack could not be taken"
    )
    stopped = str(
        hung(Where(worker=1), phase="reset", seconds=1, deadline=0.5, stopped=True)
    )
    assert (
        "The process is stopped (SIGSTOP, or a debugger), so its stack could not be taken."
        in stopped
    )
    assert "Stack of" not in plain + stopped


def test_a_thread_shows_what_it_is_at() -> None:
    ready, end = threading.Event(), threading.Event()

    def step() -> None:
        ready.set()
        end.wait()

    def outer() -> None:
        step()

    thread = threading.Thread(target=outer)
    thread.start()
    ready.wait()
    stack = thread_stack(thread.ident or 0)
    end.set()
    thread.join()
    assert (
        innermost_user_frame(stack)
        == f"{__file__}:{step.__code__.co_firstlineno + 2} in step"
    )
    assert thread_stack(0) == ""
