"""Where numbers go."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import logging
import multiprocessing
import os
import re
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from muster import Collector, CollectorStats, JsonlLogger, TensorBoardLogger
from muster.episodes.record import Episodes
from muster.errors import BadOption, HookError
from muster.observing.loggers import CollectionLog, as_logger
from muster.observing.progress import progress
from muster.testing import CountingEnv
from muster.utils.streams import Unfailing
from tests.fakes.stats import stats, worker
from tests.tools import counting, files_limited_to


class Calls(list):
    """What was called, and how; the methods of the loggers below append to it."""


class BoardLike(Calls):
    def add_scalar(
        self,
        tag: str,
        scalar_value: float,
        global_step: int | None = None,
        walltime: Any = None,
    ) -> None:
        self.append((tag, scalar_value, global_step))


class RunLike(Calls):
    def log(
        self,
        data: dict[str, float],
        step: int | None = None,
        commit: bool | None = None,
    ) -> None:
        assert type(data) is dict
        self.append((data, step))


class TrackingLike(Calls):
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.append((metrics, step))


class PrtLike(Calls):
    def log_scalar(self, name: str, value: float, iteration: int | None = None) -> None:
        self.append((name, value, iteration))

    def log_metrics(
        self, metrics: dict[str, float], iteration: int | None = None
    ) -> None:
        raise AssertionError("takes no step=")


class TorchRLLike(Calls):
    def log_scalar(self, name: str, value: float, *, step: int | None = None) -> None:
        self.append((name, value, step))


class FunctionLike(Calls):
    def __call__(self, metrics: dict[str, float], step: int) -> None:
        self.append((metrics, step))


METRICS = {"a": 1.0, "b": 2.5}
SCALARS = [("a", 1.0, 7), ("b", 2.5, 7)]
RECORDS = [(METRICS, 7)]


@pytest.mark.parametrize(
    ("kind", "calls"),
    [
        *((kind, SCALARS) for kind in (BoardLike, PrtLike, TorchRLLike)),
        *((kind, RECORDS) for kind in (RunLike, TrackingLike, FunctionLike)),
    ],
)
def test_loggers_of_scalars_get_a_call_for_each_and_those_of_records_one(kind, calls):
    logger = kind()
    as_logger(logger)(METRICS, 7)
    assert logger == calls


def test_a_method_is_looked_up_when_it_is_called():
    class Module:  # wandb.log is replaced by wandb.init()
        log = staticmethod(
            lambda *args, **kwargs: pytest.fail("the function of before")
        )

    module, seen = Module(), []
    log = as_logger(module)
    module.log = lambda data, step: seen.append((data, step))
    log(METRICS, 7)
    assert seen == [(METRICS, 7)]


@pytest.mark.parametrize(
    "given",
    [
        None,
        "log.jsonl",
        3,
        {},
        [],
        object(),
        lambda metrics: None,
        BoardLike,
        logging.getLogger(),
        [].append,
    ],
    ids=lambda given: getattr(given, "__name__", type(given).__name__),
)
def test_anything_else_is_refused(given):
    with pytest.raises(BadOption, match="expected an object with add_scalar"):
        as_logger(given)


def test_a_class_is_refused_with_the_advice_to_make_an_instance():
    with pytest.raises(BadOption, match="give an instance"):
        as_logger(BoardLike)
    with pytest.raises(BadOption, match="wrap it in such a function"):
        as_logger(object())


def test_should_log_is_asked_once_for_a_step():
    class Selective(BoardLike):
        def should_log(self, step: int) -> bool:
            self.append(step)
            return step != 2

    logger = Selective()
    log = as_logger(logger)
    for step in (1, 1, 2, 2, 1):
        log({"a": 0.0}, step)
    assert logger == [1, ("a", 0.0, 1), ("a", 0.0, 1), 2, 1, ("a", 0.0, 1)]


def test_whatever_a_logger_raises_is_a_hook_error_with_its_cause():
    def broken(metrics, step):
        raise KeyError("no run")

    with pytest.raises(
        HookError, match=r"the logger .*broken raised KeyError at step 7: 'no run'"
    ) as caught:
        as_logger(broken)(METRICS, 7)
    assert isinstance(caught.value.__cause__, KeyError)
    again = as_logger(as_logger(broken))
    with pytest.raises(HookError) as caught:
        again(METRICS, 7)
    assert isinstance(caught.value.__cause__, KeyError)


# --- JSON lines -----------------------------------------------------------------------------------


def lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def records(path: Path) -> list[tuple[int, dict[str, Any]]]:
    return [(line["step"], line["metrics"]) for line in lines(path)]


def test_a_line_has_step_time_and_metrics(tmp_path):
    before = time.time()
    with JsonlLogger(tmp_path / "runs" / "log.jsonl") as logger:
        logger({"return": 1.5, "episodes": 3}, 10)
        logger({}, np.int64(20))
    first, second = lines(tmp_path / "runs" / "log.jsonl")
    assert list(first) == ["step", "time", "metrics"]
    assert (first["step"], first["metrics"]) == (10, {"return": 1.5, "episodes": 3})
    assert isinstance(first["metrics"]["episodes"], int)
    assert before <= first["time"] <= second["time"] <= time.time()
    assert (second["step"], second["metrics"]) == (20, {})


def test_every_record_is_in_the_file_at_once_and_a_second_logger_goes_on(tmp_path):
    path = tmp_path / "log"
    with JsonlLogger(path) as logger:
        logger({"a": 1}, 1)
        assert records(path) == [(1, {"a": 1})]
    with JsonlLogger(str(path)) as logger:
        logger({"a": 2}, 2)
    assert records(path) == [(1, {"a": 1}), (2, {"a": 2})]


def test_half_a_record_that_a_crash_has_left_is_removed(tmp_path):
    path = tmp_path / "log"
    with JsonlLogger(path) as logger:
        logger({"a": 1}, 1)
        logger({"}}": 2}, 2)
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        with JsonlLogger(path) as logger:
            logger({"a": 3}, 3)
        kept = (cut >= first - 1) + (
            cut >= len(whole) - 1
        )  # whole but for its end of line, too
        assert records(path) == [*[(1, {"a": 1}), (2, {"}}": 2})][:kept], (3, {"a": 3})]


@pytest.mark.parametrize(
    "content",
    [b"notes", b'{"step":1}', b"12", b"a,b\n1,2", b"x" * (1 << 21)],
    ids=range(5),
)
def test_half_a_line_of_something_else_is_never_removed(tmp_path, content):
    path = tmp_path / "log"
    path.write_bytes(content)
    with pytest.raises(BadOption, match="another path"):
        JsonlLogger(path)
    assert path.read_bytes() == content


def test_what_is_no_number_is_refused_and_leaves_the_file_as_it_was(tmp_path):
    with JsonlLogger(tmp_path / "log") as logger:
        logger({"a": 1}, 1)
        with pytest.raises(HookError, match="could not convert"):
            as_logger(logger)({"a": 1, "b": "text"}, 2)
        logger({"a": 3}, 3)
    assert records(tmp_path / "log") == [(1, {"a": 1}), (3, {"a": 3})]


def test_threads_may_share_a_file(tmp_path):
    with JsonlLogger(tmp_path / "log") as logger:
        threads = [
            threading.Thread(
                target=lambda k=k: [logger({"k": k}, i) for i in range(100)],
                daemon=True,
            )
            for k in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    found = records(tmp_path / "log")
    assert len(found) == 400
    assert [
        [step for step, metrics in found if metrics["k"] == k] for k in range(4)
    ] == [list(range(100))] * 4


def test_processes_may_not_share_a_file(tmp_path):
    path, context = tmp_path / "log", multiprocessing.get_context("fork")

    def append(answers: Any) -> None:
        try:
            with JsonlLogger(path) as logger:
                logger({"a": 1}, 1)
            answers.put("appended")
        except BadOption as error:
            answers.put(str(error))

    def elsewhere() -> str:
        answers = context.SimpleQueue()
        process = context.Process(target=append, args=(answers,))
        process.start()
        process.join(60)
        return answers.get()

    with JsonlLogger(path) as first:
        second = JsonlLogger(path)  # a notebook's cell that is run again
        first.close()
        assert "another process appends to this file" in elsewhere()
        second.close()
    assert elsewhere() == "appended"
    assert records(path) == [(1, {"a": 1})]


def test_a_closed_logger_says_so(tmp_path):
    logger = JsonlLogger(tmp_path / "log")
    logger.close()
    logger.close()
    with pytest.raises(BadOption, match="closed"):
        logger({}, 1)


def test_a_record_that_does_not_fit_on_the_disk_leaves_no_half_line(tmp_path):
    logger = JsonlLogger(tmp_path / "log")
    logger({"a": 1}, 1)
    size = logger.path.stat().st_size
    with files_limited_to(size + 20), pytest.raises(OSError, match="no space"):
        logger({"a": 2}, 2)
    assert logger.path.stat().st_size == size
    logger({"a": 3}, 3)
    assert records(tmp_path / "log") == [(1, {"a": 1}), (3, {"a": 3})]
    logger.close()


# --- TensorBoard ----------------------------------------------------------------------------------


def test_tensorboard_reads_what_was_logged(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with TensorBoardLogger(tmp_path / "run") as logger:
        as_logger(logger)({"collect/return_mean": 1.5, "collect/episodes": 2}, 10)
        logger({"collect/return_mean": 2.5}, 20)
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("collect/return_mean")] == [
        (10, 1.5),
        (20, 2.5),
    ]
    assert [(e.step, e.value) for e in events.Scalars("collect/episodes")] == [
        (10, 2.0)
    ]


def test_a_closed_tensorboard_logger_begins_no_other_file(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    logger({"a": 1}, 1)
    logger.close()
    logger.close()
    with pytest.raises(BadOption, match="closed"):
        logger({"a": 2}, 2)
    assert len(list(tmp_path.iterdir())) == 1


def test_without_tensorboard_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(BadOption, match=r"pip install 'muster-rl\[tensorboard\]'"):
        TensorBoardLogger(tmp_path / "run")
    assert not (tmp_path / "run").exists()


# --- what a collector logs ------------------------------------------------------------------------


STATS = stats(
    frames=64,
    discarded=Counter(surplus=7, after_done=2),
    in_flight=7,
    episodes=5,
    return_mean=99.0,
    length_mean=99.0,
    frames_per_s=123.0,
    env_s=2.0,
    policy_s=4.0,
    policy_version=4,
    policy_lag={0: 1, 2: 1},
    restarts=1,
)


def logged(
    *written: tuple[CollectorStats, Any], **options: Any
) -> list[tuple[dict[str, float], int]]:
    logger = FunctionLike()
    log = CollectionLog(logger, **options)
    for given, episodes in written:
        log.wrote(given, episodes)
    return logger


def test_a_batch_without_episodes_is_logged_with_rates_counts_and_shares():
    assert logged((STATS, ())) == [
        (
            {
                "collect/frames_per_s": 123.0,
                "collect/episodes": 5,
                "collect/discarded": 9,
                "collect/in_flight": 7,
                "collect/restarts": 1,
                "collect/env_share": 0.25,
                "collect/policy_share": 0.5,
                "collect/copy_share": 0.125,
                "collect/policy_version": 4,
                "collect/policy_lag": 2,
            },
            64,
        )
    ]


EPISODES = Episodes(
    *map(np.array, ([0, 1], [0, 1], [2.0, 6.0], [3, 9], [True, False], [False, True]))
)


def test_the_episodes_of_the_batch_are_summarised():
    [(record, _)] = logged((STATS, EPISODES), prefix="")
    of_episodes = {
        name: value
        for name, value in record.items()
        if name.startswith(("return", "length"))
    }
    assert of_episodes == {
        "return_mean": 4.0,
        "return_std": 2.0,
        "return_max": 6.0,
        "return_min": 2.0,
        "length_mean": 6.0,
        "length_std": 3.0,
        "length_max": 9.0,
        "length_min": 3.0,
    }
    assert not any(isinstance(value, np.generic) for value in record.values())


def test_the_lag_is_that_of_the_newest_batch():
    after = [{0: 1}, {0: 1, 3: 1}, {0: 2, 3: 1}, {0: 2, 3: 2}, {0: 2, 3: 2}]
    found = logged(
        *[(dataclasses.replace(STATS, policy_lag=lags), ()) for lags in after]
    )
    assert [record.get("collect/policy_lag") for record, _ in found] == [
        0,
        3,
        0,
        3,
        None,
    ]


def test_before_any_time_was_measured_there_are_no_shares():
    [(record, _)] = logged(
        (
            dataclasses.replace(STATS, env_s=0.0, policy_s=0.0, copy_s=0.0, rest_s=0.0),
            (),
        )
    )
    assert not [name for name in record if name.endswith("share")]


def test_every_worker_has_its_rate():
    [(record, _)] = logged(
        (
            dataclasses.replace(
                STATS,
                workers=(worker(0, frames_per_s=10.0), worker(3, frames_per_s=20.0)),
            ),
            (),
        ),
        prefix="a/",
    )
    assert {name: value for name, value in record.items() if "worker" in name} == {
        "a/worker_0/frames_per_s": 10.0,
        "a/worker_3/frames_per_s": 20.0,
    }


# --- the option -----------------------------------------------------------------------------------


def test_every_batch_of_a_collector_is_logged(tmp_path):
    with JsonlLogger(tmp_path / "log") as logger:
        options = {
            "num_envs": 2,
            "frames_per_batch": 10,
            "total_frames": 30,
            "logger": logger,
        }
        with Collector(counting(3), **options) as collector:
            assert len(list(collector)) == 3
    found = records(tmp_path / "log")
    assert [(step, metrics["collect/episodes"]) for step, metrics in found] == [
        (10, 2),
        (20, 6),
        (30, 10),
    ]
    assert [metrics["collect/return_mean"] for _, metrics in found] == [6.0] * 3


def test_the_rate_of_a_batch_that_is_logged_includes_it():
    logged = []
    with Collector(
        counting(3),
        frames_per_batch=10,
        total_frames=30,
        logger=lambda metrics, _: logged.append(metrics["collect/frames_per_s"]),
    ) as collector:
        for _ in collector:
            assert logged.pop() == collector.stats().frames_per_s > 0


def test_an_error_of_the_logger_loses_no_batch():
    seen = []

    def fails_at_first(metrics, step):
        seen.append(step)
        if len(seen) == 1:
            raise OSError("disk full")

    with Collector(
        counting(3), frames_per_batch=5, total_frames=15, logger=fails_at_first
    ) as collector:
        with pytest.raises(HookError, match="disk full"):
            next(iter(collector))
        batches = list(collector)
    assert (
        torch.cat([batch["next", "reward"] for batch in batches]).flatten().tolist()
        == [1, 2, 3] * 5
    )
    assert seen == [5, 10, 15]


class TestProgress:
    def shown(self, monkeypatch, **options):
        """What a terminal shows while a collector runs, and whether a display was left open."""
        main, terminal = os.openpty()
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "200")
        with os.fdopen(terminal, "w") as stderr:
            monkeypatch.setattr("sys.stderr", stderr)
            with Collector(
                CountingEnv, None, frames_per_batch=12, progress=True, seed=0, **options
            ) as collector:
                for _ in range(3):
                    assert collector.next() is not None
            monkeypatch.undo()
        said = b""
        with contextlib.suppress(
            OSError
        ):  # EIO: all is read, which may come in pieces, and the other end is closed
            while piece := os.read(main, 1 << 16):
                said += piece
        os.close(main)
        refreshing = [
            thread
            for thread in threading.enumerate()
            if "Refresh" in type(thread).__name__
        ]
        for thread in refreshing:
            thread.join(60)  # rich tells it to end and does not wait for it
        return said.decode(), [t.name for t in refreshing if t.is_alive()]

    def test_a_terminal_shows_frames_and_returns(self, monkeypatch):
        said, threads = self.shown(monkeypatch, total_frames=36)
        assert "collect" in said
        assert "36/36 frames" in said
        assert "frames/s  episodes 12  return" in said
        assert "100%" in said
        assert not threads

    def test_an_endless_collection_has_no_percentage_and_ends_with_the_collector(
        self, monkeypatch
    ):
        said, threads = self.shown(monkeypatch, total_frames=-1)
        assert "36 frames" in said
        assert "100%" not in said
        assert not threads

    @pytest.mark.parametrize(
        "kind", ["none", "closed", "a logger", "full", "no reader"]
    )
    @pytest.mark.parametrize("terminal", [False, True])
    def test_a_stream_that_cannot_be_written_to_ends_no_run(
        self, kind, terminal, monkeypatch
    ):
        stream: Any = None
        logged = []
        if kind == "closed":
            stream = io.StringIO()
            stream.close()
        elif kind == "a logger":
            stream = SimpleNamespace(write=logged.append)
        elif kind == "full":
            stream = open("/dev/full", "w")  # noqa: SIM115 (closed below)
        elif kind == "no reader":
            reader, writer = os.pipe()
            os.close(reader)
            stream = os.fdopen(writer, "w")
        if terminal and stream is not None:
            monkeypatch.setattr(Unfailing, "isatty", lambda _: True)
        monkeypatch.setattr("sys.stderr", stream)
        with Collector(
            CountingEnv, None, frames_per_batch=12, total_frames=36, progress=True
        ) as collector:
            assert len(list(collector)) == 3
        with progress("collect", 36, every_s=0.0, stream=Unfailing(stream)) as show:
            show(12, "twelve")
        monkeypatch.undo()
        if kind == "a logger":
            assert "twelve" in "".join(logged) or terminal
        if kind in ("full", "no reader"):
            with contextlib.suppress(OSError):
                stream.close()

    def test_a_pipe_gets_lines(self, capsys):
        with Collector(
            CountingEnv, None, frames_per_batch=12, total_frames=36, progress=True
        ) as collector:
            list(collector)
        assert capsys.readouterr() == ("", ""), "no line every 5 seconds"
        stream = io.StringIO()
        for total, first in ((36, "collect  33%  12 eta"), (-1, "collect  12")):
            with progress("collect", total, every_s=0.0, stream=stream) as show:
                show(12, "12")
                show(36, "36")
            lines = stream.getvalue().splitlines()
            assert re.sub(" +", " ", lines[0]).startswith(re.sub(" +", " ", first))
            assert len(lines) == (1 if total > 0 else 2)
            stream.seek(0)
            stream.truncate()
