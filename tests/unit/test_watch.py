"""``watch=``: snapshots of a collection, the page that shows them, and pictures of it."""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import http.client
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import muster
from muster import Collector, MultiSyncCollector, Watch, load
from muster.collectors.about import options_of
from muster.collectors.clusters import DistributedOptions, RPCOptions
from muster.collectors.ledger import FrameTerms
from muster.episodes.curve import (
    MOST_POINTS,
    WINDOW,
    EpisodeCurve,
    EpisodeTotals,
    running_means,
)
from muster.episodes.record import Episodes
from muster.errors import BadOption, CollectorClosed, HookError
from muster.observing import page_server, watching
from muster.observing.own_metrics import MOST_METRICS, MOST_NAME, MetricMeans, joined
from muster.observing.page_server import TOKEN_VARIABLE, PageAddress, PageServer
from muster.observing.plot import plot_run
from muster.observing.run_process import RunProcess
from muster.observing.snapshots import (
    MOST_ERRORS,
    NAME,
    RunHistory,
    SnapshotFile,
    SnapshotReader,
    append_exit,
    parsed,
    snapshot,
)
from muster.testing import CountingEnv
from muster.utils.addresses import host_and_port, is_loopback
from muster.utils.strangers import MOST
from tests.command_line import refused, run
from tests.tools import files_limited_to, terms_balance
from tests.waits import open_files, wait_until

ENV = partial(CountingEnv, 3)  # returns of 6, lengths of 3
OPTIONS = {"frames_per_batch": 12, "total_frames": 36, "seed": 0}


def episodes(returns, lengths=None, infos=None):
    n = len(returns)
    lengths = np.arange(1, n + 1) if lengths is None else np.array(lengths, np.int64)
    flags = np.zeros(n, bool)
    info = None if infos is None else np.array(infos, object)
    return Episodes(
        np.arange(n),
        np.zeros(n, np.int64),
        np.array(returns, float),
        lengths,
        flags,
        flags,
        info,
    )


def stats():
    with Collector(ENV, None, **OPTIONS) as collector:
        list(collector)
        return collector.stats()


STATS = stats()


def line(frames=0, **changes):
    totals = EpisodeTotals(
        frames, 0.0, 6.0 * frames, 36.0 * frames, 3.0 * frames, 9.0 * frames
    )
    return {
        "kind": "snapshot",
        "time": 1000.0 + frames,
        **snapshot(STATS, totals),
        "frames": frames,
        **changes,
    }


def written(path, *entries):
    path.mkdir(exist_ok=True)
    (path / NAME).write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    return path


RUN = {"kind": "run", "time": 1000.0, "env": "CartPole-v1", "every_s": 1.0}


# --- sums over episodes ---------------------------------------------------------------------------


@given(
    st.lists(
        st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=5), min_size=1, max_size=12
    ),
    st.floats(-1e6, 1e6),
    st.data(),
)
def test_differences_of_totals_are_the_statistics_of_the_episodes_between(
    parts, offset, data
):
    totals, after = EpisodeTotals(), [EpisodeTotals()]
    for part in parts:
        totals = totals.plus(episodes(np.array(part) + offset))
        after.append(totals)
    first = data.draw(st.integers(0, len(parts) - 1))
    returns = np.concatenate([np.array(part) + offset for part in parts[first:]])
    n, mean, half = totals.mean("return", after[first])
    assert n == len(returns)
    np.testing.assert_allclose(mean, returns.mean(), atol=1e-6)
    np.testing.assert_allclose(half, 1.96 * returns.std() / math.sqrt(n), atol=1e-2)
    lengths = np.concatenate([np.arange(1, len(part) + 1) for part in parts[first:]])
    np.testing.assert_allclose(totals.mean("length", after[first])[1], lengths.mean())


def test_infinite_returns_are_left_out_and_successes_are_counted():
    infos = [{"success": True}, {"is_success": 0.0}, {}]
    totals = (
        EpisodeTotals()
        .plus(episodes([5.0, math.inf, math.nan], infos=infos))
        .plus(episodes([7.0]))
    )
    assert totals.mean("return", EpisodeTotals())[:2] == (2, 6.0)
    assert totals.mean("length", EpisodeTotals())[:2] == (2, 1.0)
    assert totals.mean("success", EpisodeTotals())[:2] == (2, 0.5)
    n, mean, half = EpisodeTotals().mean("return", EpisodeTotals())
    assert n == 0
    assert math.isnan(mean)
    assert math.isnan(half)


def test_a_running_mean_has_at_least_100_episodes_where_there_are_as_many():
    rng, curve, returns, sizes = np.random.default_rng(0), EpisodeCurve(), [], []
    for batch in range(40):
        new = rng.normal(batch, 3.0, rng.integers(0, 30))
        returns.extend(new)
        sizes.append(len(new))
        curve.add(10 * (batch + 1), episodes(new))
    rows = running_means(curve.points, "return")
    counts = np.cumsum(sizes)
    batches = [b for b in range(40) if sizes[b]]
    assert rows[:, 0].tolist() == [10 * (b + 1) for b in batches]
    for row, b in zip(rows, batches, strict=True):
        starts = [0, *(n for n in counts[:b] if counts[b] - n >= WINDOW)]
        own = np.array(returns[max(starts) : counts[b]])
        np.testing.assert_allclose(
            row[1:], [own.mean(), 1.96 * own.std() / math.sqrt(len(own))]
        )


def test_a_curve_is_bounded_and_keeps_both_ends():
    curve = EpisodeCurve()
    for batch in range(5 * MOST_POINTS):
        curve.add(8 * batch, episodes([float(batch)], [4]))
        assert len(curve.points) <= MOST_POINTS
    frames = [frames for frames, _ in curve.points]
    assert frames[0] == 0
    assert frames[-1] == 8 * (5 * MOST_POINTS - 1)
    assert frames == sorted(set(frames))
    assert len(frames) > MOST_POINTS // 4
    assert max(np.diff(frames)) <= 8 * 32
    assert curve.points[-1][1] is curve.totals


# --- the file -------------------------------------------------------------------------------------


def test_a_file_that_is_too_large_loses_every_second_snapshot_only(tmp_path):
    file, reader = (
        SnapshotFile(tmp_path, {"env": "a"}, limit_bytes=20_000),
        SnapshotReader(tmp_path),
    )
    rows = [
        {
            "index": 0,
            **dict.fromkeys(
                ("pid", "frames", "share", "frames_per_s", "restarts", "policy_lag"), 0
            ),
        }
    ]
    rows[0] |= dict.fromkeys(("state", "phase", "node", "lane"), "")
    replaced = []
    for number in range(200):
        file.append(**line(number, workers=rows))
        if number < 3:
            file.append("error", id=number, text="x")
        assert file.path.stat().st_size <= 20_000
        again, entries = reader.read()
        replaced.append(again)
        if again:
            assert entries[0]["kind"] == "run"
            assert [
                entry["frames"] for entry in entries if entry["kind"] == "snapshot"
            ][-2:] == [
                number - 1,
                number,
            ]
    file.append("end", error="")
    file.close()
    history = RunHistory.read(tmp_path)
    assert history.about["env"] == "a"
    assert [error["id"] for error in history.errors] == [0, 1, 2]
    assert history.end is not None
    frames = [s["frames"] for s in history.snapshots]
    assert frames[-1] == 199
    assert frames == sorted(set(frames))
    assert 1 < sum(replaced) < 40
    assert history.snapshots[-1]["workers"] == rows
    _, rest = reader.read()
    assert [entry["kind"] for entry in rest] == ["end"]
    reader.close()


def test_errors_are_bounded_too(tmp_path):
    file = SnapshotFile(tmp_path, {}, limit_bytes=300_000)
    for number in range(3 * MOST_ERRORS):
        file.append("error", id=number, text="x" * 2000)
    file.append(**line(1))
    file.close()
    assert [error["id"] for error in RunHistory.read(tmp_path).errors] == list(
        range(2 * MOST_ERRORS, 3 * MOST_ERRORS)
    )


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path):
    file = SnapshotFile(tmp_path, {})
    size = file.path.stat().st_size
    with files_limited_to(size + 10), pytest.raises(OSError, match=NAME):
        file.append(**line(1))
    assert file.path.stat().st_size == size
    file.append("end", error="")
    file.close()
    assert RunHistory.read(tmp_path).end is not None


def test_a_line_is_read_when_it_is_complete(tmp_path):
    path = written(tmp_path, RUN, line(1))
    reader = SnapshotReader(path)
    assert [entry["kind"] for entry in reader.read()[1]] == ["run", "snapshot"]
    text = json.dumps(line(2)).encode() + b"\n"
    for end in (1, 40, 400):
        with open(path / NAME, "ab") as file:
            file.write(text[:end])
        assert reader.read() == (False, [])
        text = text[end:]
    with open(path / NAME, "ab") as file:
        file.write(text)
    assert [entry["frames"] for entry in reader.read()[1]] == [2]
    (path / NAME).unlink()
    assert reader.read() == (False, []), "what was read stays"
    reader.close()


@given(st.binary(max_size=200), st.integers(0, 2000), st.integers(0, 60))
@example(b"", 3, 0)
def test_any_bytes_are_a_checked_entry_or_none(junk, at, length):
    text = json.dumps(line(7)).encode()
    at %= len(text)
    for given_line in (junk, text[:at] + junk + text[at + length :]):
        entry = parsed(given_line)
        if entry is not None:
            json.dumps(entry, allow_nan=False)
            if entry["kind"] == "snapshot":
                history = RunHistory(snapshots=[entry])
                running_means(history.points(), "return")


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)


@settings(max_examples=40)
@given(st.sampled_from([name for name in line() if name != "kind"]), JSON)
@example("time", 1e999)
@example("policy_lag", {"-1": 2})
@example("workers", [{"index": "<script>"}])
@example("totals", {"episodes": 1})
def test_an_entry_of_another_type_is_no_snapshot_or_can_be_drawn(name, value):
    entry = parsed(json.dumps(line(3) | {name: value}).encode())
    if entry is not None:
        figure = plot_run(RunHistory(snapshots=[line(1), entry]))
        assert len(figure.axes) == 9


def test_deep_nesting_and_nan_are_no_entries():
    assert parsed(b"[" * 100_000) is None
    assert (
        parsed(json.dumps(line(1)).replace('"frames": 1', '"frames": NaN').encode())
        is None
    )
    assert (
        parsed(
            json.dumps(line(1, memory=7))
            .replace('"memory": 7', '"memory": 1e999')
            .encode()
        )
        is None
    )
    assert parsed(b'{"kind": "run", "time": true}') is None


def test_a_directory_has_the_snapshots_of_one_run(tmp_path):
    SnapshotFile(tmp_path, {}).close()
    with pytest.raises(BadOption, match="another run. Give another directory"):
        Collector(ENV, None, watch=Watch(tmp_path, None), **OPTIONS)
    with pytest.raises(BadOption, match="has no snapshots"):
        SnapshotReader(tmp_path / "elsewhere")


# --- the option -----------------------------------------------------------------------------------


def test_snapshots_have_the_counters_of_the_collector(tmp_path):
    with Collector(
        ENV, None, num_envs=2, watch=Watch(tmp_path / "run", None), **OPTIONS
    ) as collector:
        assert collector.watch_url is None
        collector.next()
        between = wait_until(
            lambda: [
                s for s in RunHistory.read(tmp_path / "run").snapshots if s["frames"]
            ]
        )
        assert (
            between[-1]["frames"],
            between[-1]["executed"],
            between[-1]["in_flight"],
        ) == (
            12,
            12,
            0,
        )
        list(collector)
        before = collector.stats()
    history = RunHistory.read(tmp_path / "run")
    assert (history.about["collector"], history.about["env"]) == (
        "Collector",
        "CountingEnv",
    )
    assert (
        history.about["total_frames"],
        history.about["num_envs"],
        history.about["seed"],
    ) == (
        36,
        2,
        0,
    )
    for s in history.snapshots:
        terms = FrameTerms(
            s["executed"], s["frames"], Counter(s["discarded"]), s["in_flight"]
        )
        assert terms_balance(terms), s
    newest = history.snapshots[-1]
    assert (newest["frames"], newest["batches"], newest["episodes"]) == (36, 3, 12)
    assert (newest["return_mean"], newest["env_s"]) == (6.0, before.env_s)
    assert newest["memory"] > 1 << 20
    [(frames, totals)] = history.points()[-1:]
    assert frames == 36
    assert totals.mean("return", EpisodeTotals()) == (12, 6.0, 0.0)
    assert totals.mean("length", EpisodeTotals()) == (12, 3.0, 0.0)
    assert history.end == {"kind": "end", "time": history.end["time"], "error": ""}


def test_collect_is_watched_and_the_error_that_ends_a_collection_is_told(tmp_path):
    with (
        pytest.raises(ValueError, match="by me"),
        Collector(ENV, None, watch=Watch(tmp_path, None), seed=0) as collector,
    ):
        collector.collect(n_step=6)
        raise ValueError("by me")
    history = RunHistory.read(tmp_path)
    assert history.snapshots[-1]["frames"] == 6
    assert history.end["error"] == "ValueError: by me"


def test_a_recording_and_its_snapshots_share_a_directory(tmp_path):
    with Collector(
        ENV, None, record=tmp_path / "run", watch=True, **OPTIONS
    ) as collector:
        list(collector)
    assert RunHistory.read(tmp_path / "run").snapshots[-1]["frames"] == 36
    assert len(list(load(tmp_path / "run"))) == 3


def test_the_default_directory_is_new_and_a_dropped_collector_ends_its_page(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    collector = Collector(ENV, None, watch=True, **OPTIONS)
    url = collector.watch_url
    port = int(url.rpartition(":")[2].strip("/"))
    next(iter(collector))
    [directory] = (tmp_path / "runs").iterdir()
    assert (
        f"watch     {url}  (afterwards: muster watch {directory})"
        in capfd.readouterr().err
    )
    assert wait_until(lambda: fetched(port, "/")).status == 200
    del collector

    def is_gone():
        # again: a thread that had a reference for a moment may be the last to give it up
        gc.collect()
        return "muster-watch" not in [thread.name for thread in threading.enumerate()]

    wait_until(is_gone)
    wait_until(lambda: fetched(port, "/") is None)
    wait_until(lambda: RunHistory.read(directory).end)


class Faulty(CountingEnv):
    def step(self, action):
        if self.executed >= 40:
            raise ValueError("by me")
        return super().step(action)


def test_an_error_of_an_environment_is_told_with_its_crash_report(tmp_path):
    options = {
        "backend": "threads",
        "on_failure": "restart",
        "crash_dir": tmp_path / "crashes",
        "seed": 0,
    }
    watch = Watch(tmp_path / "run", None)
    with MultiSyncCollector(
        [ENV, Faulty], None, num_workers=2, frames_per_batch=32, watch=watch, **options
    ) as made:
        for _ in range(4):
            made.next()
        discarded = dict(made.stats().discarded)
    history = RunHistory.read(tmp_path / "run")
    [error] = history.errors
    assert error["worker"] == 1
    assert "ValueError: by me" in error["text"]
    assert error["replay"] == f"muster replay {error['crash_report']} --trust"
    assert "muster replay" not in error["text"], "the command is told once"
    assert [error["crash_report"]] == [
        str(path) for path in (tmp_path / "crashes").iterdir()
    ]
    assert history.snapshots[-1]["discarded"] == discarded != {}
    assert any(
        label.get_text() == "discarded: env_error"
        for label in plot_run(history).axes[4].get_yticklabels()
    )


def test_a_killed_worker_is_red_then_green(tmp_path):
    options = {
        "on_failure": "restart",
        "watch": Watch(tmp_path, None),
        "frames_per_batch": 64,
        "seed": 0,
    }
    with MultiSyncCollector([ENV] * 2, None, num_workers=2, **options) as collector:
        collector.next()
        os.kill(collector.stats().workers[1].pid, signal.SIGKILL)

        def told():
            collector.next()
            history = RunHistory.read(tmp_path)
            states = [
                s["workers"][1]["state"]
                for s in history.snapshots
                if len(s["workers"]) == 2
            ]
            return (
                history.errors
                and states[-1] == "working"
                and "restarting" in states
                and (history, states)
            )

        history, states = wait_until(told)
    assert states[0] == "working"
    [error] = history.errors
    assert error["worker"] == 1
    assert "SIGKILL" in error["text"]
    assert history.snapshots[-1]["restarts"] == 1
    assert {s["workers"][0]["state"] for s in history.snapshots if s["workers"]} == {
        "working"
    }
    assert all(
        set(row["lane"]) <= set(".crspwqx-jDX")
        for s in history.snapshots
        for row in s["workers"]
    )


PARENT = """
import sys, time
from muster import Collector
from muster.testing import CountingEnv

with Collector(CountingEnv, None, frames_per_batch=8, watch=True, record=sys.argv[1]) as collector:
    next(iter(collector))
    print(collector.watch_url, flush=True)
    sys.stdin.read()
"""


def test_the_page_of_a_killed_run_exits_and_the_run_stays_viewable(tmp_path):
    command = [sys.executable, "-c", PARENT, str(tmp_path / "run")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        port = int(parent.stdout.readline().rpartition(":")[2].strip("/\n"))
        assert wait_until(lambda: fetched(port, "/")).status == 200
        wait_until(lambda: RunHistory.read(tmp_path / "run").snapshots)
        parent.kill()
        zombie = os.waitid(os.P_PID, parent.pid, os.WEXITED | os.WNOWAIT)
        assert wait_until(
            lambda: fetched(port, "/") is None
        )  # every kernel tells how, until now
        history = wait_until(lambda: (h := RunHistory.read(tmp_path / "run")).end and h)
    assert zombie.si_status == signal.SIGKILL
    assert (history.end["error"], history.end["signal"]) == ("", "SIGKILL")
    assert history.snapshots
    assert plot_run(history).axes


@pytest.mark.parametrize("stage", ["begins", "serves", "stands still"])
def test_a_page_that_is_killed_costs_the_collection_nothing(
    tmp_path, stage, monkeypatch
):
    monkeypatch.setattr(watching, "END_S", 2.0)
    with Collector(ENV, None, watch=Watch(tmp_path), **OPTIONS) as collector:
        process = collector._observers.watched._page
        if stage != "begins":
            port = int(collector.watch_url.rpartition(":")[2].strip("/"))
            assert wait_until(lambda: fetched(port, "/")).status == 200
        process.send_signal(
            signal.SIGSTOP if stage == "stands still" else signal.SIGKILL
        )
        assert all(collector.next() is not None for _ in range(3))
        begun = time.monotonic()
    assert time.monotonic() - begun < 20
    assert process.poll() is not None
    assert RunHistory.read(tmp_path).end is not None


@pytest.mark.parametrize("lacks", ["processes", "threads"])
def test_a_page_that_cannot_be_started_leaves_nothing(tmp_path, lacks, monkeypatch):
    started = []
    popen, start = subprocess.Popen, threading.Thread.start

    def refuse(*args, **options):
        if lacks == "processes":
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        started.append(popen(*args, **options))
        return started[-1]

    def refuse_thread(thread):
        if lacks == "threads" and thread.name == "muster-watch":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(watching.subprocess, "Popen", refuse)
    monkeypatch.setattr(threading.Thread, "start", refuse_thread)
    before = open_files()
    with pytest.raises(
        (BadOption, RuntimeError),
        match="the page cannot be started: Resource|can't start new thread",
    ):
        Collector(ENV, None, watch=Watch(tmp_path), **OPTIONS)
    assert [process.poll() is not None for process in started] == [True] * (
        lacks == "threads"
    )
    assert open_files() <= before


@pytest.mark.parametrize(
    "given_option", [1, "localhost", "a:b", ":80", "h:99999", Watch]
)
def test_a_wrong_option_is_refused(given_option):
    with pytest.raises(BadOption, match="host:port"):
        Collector(ENV, None, watch=given_option)
    with pytest.raises(BadOption, match="host:port"):
        Watch(address="8000")


def test_an_address_in_use_is_refused(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(BadOption, match="cannot listen at 127.0.0.1"):
            Collector(ENV, None, watch=Watch(tmp_path, address), **OPTIONS)
    assert not list(tmp_path.iterdir())


# --- how a run has ended --------------------------------------------------------------------------

IDENTIFIED = """
import json, os, sys
from muster.observing.run_process import identity
print(json.dumps(identity()), flush=True)
sys.stdin.read()
os._exit(3)
"""


@pytest.fixture
def another():
    """A process, and what identifies it."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", IDENTIFIED], **pipes) as process:
        yield process, json.loads(process.stdout.readline())
        process.kill()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV, 3])
def test_a_process_is_alive_then_stopped_then_has_exited(another, how):
    process, about = another
    observed = RunProcess(about)
    assert observed.state() == ("alive", "", None)
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: observed.state() == ("stopped", "", None))
    process.send_signal(signal.SIGCONT)
    wait_until(lambda: observed.state() == ("alive", "", None))
    if isinstance(how, signal.Signals):
        process.send_signal(how)
        expected = ("exited", how.name, None)
    else:
        process.stdin.close()
        expected = ("exited", "", how)
    wait_until(lambda: observed.state().state == "exited")
    assert observed.state() == expected
    process.wait(60)
    assert observed.state() == expected, "also when it was reaped"
    late = RunProcess(about)
    assert late.state() == ("exited", "", None), "but not how, for one who comes later"
    assert late.state().entries() == {}
    observed.close()
    observed.close()


def test_a_process_elsewhere_is_unknown_and_another_of_its_number_is_not_it(another):
    _, about = another
    for unknown in (
        about | {"machine": "another"},
        {},
        {"pid": os.getpid()},
        about | {"pid": "1"},
    ):
        assert RunProcess(unknown).state() == ("unknown", "", None)
    assert RunProcess(about | {"started": about["started"] - 1}).state() == (
        "exited",
        "",
        None,
    )


def test_a_killed_run_gets_its_last_line_once(tmp_path):
    path = written(tmp_path, RUN, line(1)) / NAME
    append_exit(tmp_path, {})
    assert RunHistory.read(tmp_path).end is None, "not known how"
    with open(path, "a") as file:
        file.write(json.dumps(line(2))[:40])  # it was killed while it wrote
    append_exit(tmp_path, {"signal": "SIGTERM"})
    append_exit(tmp_path, {"signal": "SIGKILL"})
    history = RunHistory.read(tmp_path)
    assert (history.end["signal"], len(history.snapshots)) == ("SIGTERM", 1)
    assert "ended by SIGTERM" in plot_run(history).get_suptitle()
    path.unlink()
    append_exit(tmp_path, {"signal": "SIGTERM"})
    assert not path.exists()


FAILS = """
import sys
from muster import Collector, Watch
from muster.testing import CountingEnv

collector = Collector(CountingEnv, None, frames_per_batch=8, watch=Watch(sys.argv[1], None))
collector.next()
{end}
"""


@pytest.mark.parametrize(
    ("end", "error"),
    [
        ("raise ValueError('by me')", "ValueError: by me"),
        pytest.param(
            "raise KeyboardInterrupt", "KeyboardInterrupt", marks=pytest.mark.slow
        ),
        pytest.param("raise SystemExit(0)", "", marks=pytest.mark.slow),
        pytest.param("", "", marks=pytest.mark.slow),
    ],
)
def test_the_error_of_a_program_without_a_with_block_is_that_of_its_collection(
    tmp_path, end, error
):
    program = [sys.executable, "-c", FAILS.format(end=end), str(tmp_path)]
    subprocess.run(program, stderr=subprocess.DEVNULL, check=False, timeout=120)
    assert RunHistory.read(tmp_path).end["error"] == error


# --- the user's own metrics -----------------------------------------------------------------------


def test_metrics_are_logged_and_shown(tmp_path):
    logged = []
    with Collector(
        ENV,
        None,
        logger=lambda metrics, step: logged.append((step, metrics)),
        watch=Watch(tmp_path, None),
        **OPTIONS,
    ) as collector:
        for number, _ in enumerate(collector):
            collector.log(
                {
                    "loss": torch.tensor(float(number), requires_grad=True),
                    "n": np.int8(7),
                }
            )
            collector.log({"bad": math.inf}, step=number)
    own = [
        (step, metrics)
        for step, metrics in logged
        if "loss" in metrics or "bad" in metrics
    ]
    assert own[::2] == [(12 * n, {"loss": n - 1.0, "n": 7.0}) for n in (1, 2, 3)]
    assert own[1::2] == [(n, {"bad": math.inf}) for n in range(3)]
    shown = [
        s["metrics"] for s in RunHistory.read(tmp_path).snapshots if "metrics" in s
    ]
    whole = functools.reduce(
        lambda a, b: {n: joined(a.get(n), b.get(n)) for n in a | b}, shown
    )
    assert whole == {"loss": [1.0, 3, 0], "n": [7.0, 3, 0], "bad": [None, 0, 3]}
    with pytest.raises(CollectorClosed, match="log before it"):
        collector.log({"loss": 1.0})


@pytest.mark.parametrize(
    ("given_metrics", "match"),
    [
        ([1.0], r"expected metrics by name, such as \{'loss': 0.5\}, got list"),
        ({1: 1.0}, "the name of a metric is 1"),
        (
            {"a": 1.0, "loss": np.zeros(3)},
            r"'loss' is of shape \[3\]: expected one number",
        ),
        ({"a": 1.0, "loss": "0.5"}, "'loss' is str"),
        ({"a": 1.0, "loss": None}, "'loss' is NoneType"),
    ],
)
def test_metrics_that_are_no_numbers_are_refused_and_nothing_is_logged(
    given_metrics, match
):
    logged = []
    with Collector(
        ENV, None, logger=lambda *of: logged.append(of), **OPTIONS
    ) as collector:
        with pytest.raises(BadOption, match=match):
            collector.log(given_metrics)
        with pytest.raises(BadOption, match=r"log\(step=-1\)"):
            collector.log({"a": 1.0}, step=-1)
    assert logged == []


def test_an_error_of_the_logger_is_raised_and_the_page_has_the_metrics(tmp_path):
    def refuse(metrics, step):
        raise ValueError("by me")

    collector = Collector(
        ENV, None, logger=refuse, watch=Watch(tmp_path, None), **OPTIONS
    )
    with collector, pytest.raises(HookError, match="at step 0: by me"):
        collector.log({"loss": 2.0})
    newest = RunHistory.read(tmp_path).snapshots[-1]
    assert (newest["metrics"], newest["metrics_at"]) == ({"loss": [2.0, 1, 0]}, 0)


def test_a_page_has_the_first_names_only(tmp_path):
    with Collector(ENV, None, watch=Watch(tmp_path, None), **OPTIONS) as collector:
        collector.log(
            {"a" * 300: 1.0} | {f"m{n}": float(n) for n in range(MOST_METRICS + 5)}
        )
        collector.log({"m68": 1.0, "m1": 3.0})
    newest = RunHistory.read(tmp_path).snapshots[-1]
    assert len(newest["metrics"]) == MOST_METRICS
    assert newest["metrics"]["a" * MOST_NAME] == [1.0, 1, 0]
    assert newest["metrics"]["m1"] == [2.0, 2, 0]
    assert newest["metrics_left_out"] == 6


VALUES = st.lists(
    st.sampled_from([math.nan, math.inf, -1e300]) | st.floats(-1e9, 1e9), max_size=6
)


@settings(max_examples=30)
@given(st.lists(VALUES, min_size=3, max_size=60))
def test_the_means_of_removed_snapshots_become_part_of_the_next(parts):
    means = MetricMeans()
    with tempfile.TemporaryDirectory() as folder:
        file = SnapshotFile(folder, {}, limit_bytes=12_000)
        for number, part in enumerate(parts):
            for value in part:
                means.add({"loss": value}, number)
            file.append(**line(number), **means.take())
        file.close()
        with_metrics = [s for s in RunHistory.read(folder).snapshots if "metrics" in s]
        kept = [s["metrics"]["loss"] for s in with_metrics]
        assert all(s["metrics_at"] <= s["frames"] for s in with_metrics)
    mean, count, bad = functools.reduce(joined, kept, [None, 0, 0])
    values = np.array([value for part in parts for value in part])
    good = values[np.abs(np.nan_to_num(values, nan=math.inf)) <= 1e9]
    assert (count, bad) == (len(good), len(values) - len(good))
    assert (mean is None) == (not len(good))
    if mean is not None:
        np.testing.assert_allclose(mean, good.mean(), atol=1e-3)


def test_the_first_line_has_options_and_versions_and_no_secret(tmp_path):
    watch = Watch(tmp_path, None)
    kwargs = {"create_env_kwargs": {"length": 3}}
    with Collector(CountingEnv, None, num_envs=2, watch=watch, **kwargs, **OPTIONS):
        pass
    about = RunHistory.read(tmp_path).about
    assert about["options"] == {
        "create_env_fn": "CountingEnv",
        "num_envs": "2",
        "frames_per_batch": "12",
        "total_frames": "36",
        "seed": "0",
        "watch": repr(watch),
        "create_env_kwargs": "dict of length",
    }
    assert about["versions"]["torch"] == torch.__version__
    assert about["versions"]["muster"] == muster.__version__
    for cls in (DistributedOptions, RPCOptions):
        given_options = cls(
            [CountingEnv], None, frames_per_batch=12, token=b"a secret" * 4
        )
        expected = {"frames_per_batch": "12", "create_env_fn": "CountingEnv"}
        assert options_of(given_options) == expected


# --- the server -----------------------------------------------------------------------------------


def fetched(port, path, **headers):
    """The answer; None if nothing listens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(
            "GET",
            path,
            headers={name.replace("_", "-"): value for name, value in headers.items()},
        )
        answer = connection.getresponse()
        if answer.getheader("Content-Type") != "text/event-stream; charset=utf-8":
            answer.text = answer.read().decode()
        return answer
    except (
        ConnectionError,
        http.client.HTTPException,
    ):  # the second one: it has exited in the middle of its answer
        return None


@pytest.fixture
def serve(tmp_path):
    """Start a server of a directory; returns its port and token."""
    ends = []

    def start(run, address="127.0.0.1:0"):
        page = PageAddress(address)
        server = PageServer(run, page.socket, page.token)
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        ends.append((server, thread))
        return page.socket.getsockname()[1], page.token

    yield start
    for server, thread in ends:
        server.shutdown()
        server.server_close()
        thread.join(60)
        assert not thread.is_alive()


def events(answer):
    """The events of a stream, one after another."""
    while True:
        event = answer.readline().decode().strip().removeprefix("event: ")
        content = answer.readline().decode().strip().removeprefix("data: ")
        answer.readline()
        yield event, json.loads(content)


def next_entries(stream, run=0):
    return next(
        content["entries"]
        for event, content in stream
        if event == "entries" and content["run"] == run
    )


def test_the_page_has_its_files_and_security_headers(tmp_path, serve):
    port, token = serve(written(tmp_path, RUN))
    assert token == ""
    for path in ("/", "/page.js", "/page.css", "/uPlot.js", "/uPlot.css", "/icon.svg"):
        answer = fetched(port, path)
        assert answer.status == 200
        assert answer.text
        assert answer.getheader("Content-Security-Policy").startswith(
            "default-src 'self';"
        )
        assert answer.getheader("X-Content-Type-Options") == "nosniff"
        assert "http://" not in answer.text.replace("http://www.w3.org/2000/svg", ""), (
            "nothing from elsewhere"
        )
        assert "https://" not in answer.text.replace(
            "https://github.com/leeoniya/uPlot", ""
        )
    for path in ("/../snapshots.py", "/watch.jsonl", "/page", "/etc/passwd"):
        assert fetched(port, path).status == 404


def test_a_page_elsewhere_cannot_read_a_loopback_address(tmp_path, serve):
    port, _ = serve(written(tmp_path, RUN))
    assert fetched(port, "/events", Host="evil.example:80").status == 403
    assert fetched(port, "/", Host="").status == 403
    assert fetched(port, "/", Host=f"localhost:{port}").status == 200
    assert fetched(port, "/", Host=f"[::1]:{port}").status == 200


def test_beyond_loopback_there_is_no_page_without_the_token(tmp_path, serve):
    port, token = serve(written(tmp_path, RUN), "0.0.0.0:0")
    assert len(token) >= 16
    for path in (
        "/",
        "/events",
        "/page.js",
        "/?token=",
        "/?token=wrong",
        "/?token=%C3%A9",
    ):
        assert fetched(port, path).status == 403
    assert fetched(port, "/", Cookie=f"muster_watch_{port}=wrong").status == 403
    assert fetched(port, "/", Cookie="\x01;;=").status == 403
    answer = fetched(port, f"/?token={token}")
    assert (answer.status, answer.getheader("Location")) == (303, "/")
    cookie = answer.getheader("Set-Cookie")
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert fetched(port, "/", Cookie=cookie.partition(";")[0]).status == 200


def slow_connections(port, count, said=b"GET / HTTP/1.0\r\nX-Slow: "):
    """Connections that have begun a request, and do not end it."""
    made = []
    for _ in range(count):
        made.append(socket.create_connection(("127.0.0.1", port), 60))
        made[-1].sendall(said)
    return made


@pytest.mark.parametrize("address", ["127.0.0.1:0", "0.0.0.0:0"])
@pytest.mark.parametrize(
    "said", [b"", b"GET / HTTP/1.0\r\nX-Slow: "], ids=["silent", "slow"]
)
def test_connections_that_ask_for_nothing_keep_no_viewer_out(
    tmp_path, serve, address, said
):
    port, token = serve(written(tmp_path, RUN), address)
    with contextlib.ExitStack() as made:
        for connection in slow_connections(port, 2 * MOST, said):
            made.enter_context(connection)
        assert fetched(port, "/", Cookie=f"muster_watch_{port}={token}").status == 200
        assert fetched(port, f"/?token={token}").status == (303 if token else 200)


def test_a_request_has_a_deadline_as_a_whole(tmp_path, serve, monkeypatch):
    monkeypatch.setattr(page_server, "_ADMISSION_S", 0.5)
    port, _ = serve(written(tmp_path, RUN))
    viewer = fetched(port, "/events")
    (slow,) = slow_connections(port, 1)
    begun = time.monotonic()
    with slow, contextlib.suppress(ConnectionError):
        while not select.select([slow], [], [], 0.02)[0]:
            assert time.monotonic() - begun < 60
            slow.sendall(b"x")  # never silent for as long as the time limit of a read
        assert slow.recv(1) == b""
    clocks = (content for event, content in events(viewer) if event == "clock")
    assert next(clocks) < next(clocks) < next(clocks), "one that was admitted goes on"
    viewer.close()


def test_viewers_have_places_and_one_too_many_is_told_so(tmp_path, serve, monkeypatch):
    monkeypatch.setattr(page_server, "_MOST_VIEWERS", 2)
    port, _ = serve(written(tmp_path, RUN))
    viewers = [fetched(port, "/events") for _ in range(2)]
    begun = ("restart", {"run": 0, "name": tmp_path.name})
    assert [next(events(viewer)) for viewer in viewers] == [begun] * 2
    for _ in range(2):
        answer = fetched(port, "/")
        assert (answer.status, answer.text) == (
            503,
            "2 viewers see this page already. Close one of them.\n",
        )
    viewers[0].close()
    wait_until(lambda: fetched(port, "/").status == 200)
    viewers[1].close()


def test_the_token_may_be_given_in_the_environment(monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "of sixteen chars")
    page = PageAddress("0.0.0.0:0")
    page.close()
    assert page.token == "of sixteen chars"
    monkeypatch.setenv(TOKEN_VARIABLE, "short")
    with pytest.raises(BadOption, match="less than 16 characters"):
        PageAddress("0.0.0.0:0")
    assert host_and_port("[::1]:80") == ("::1", 80)
    assert is_loopback("::1")
    assert not is_loopback("example.org")


def test_viewers_get_the_history_and_what_follows(tmp_path, serve):
    port, _ = serve(written(tmp_path, RUN, line(1)))
    viewers = [events(fetched(port, "/events")) for _ in range(2)]
    for stream in viewers:
        assert next(stream) == ("restart", {"run": 0, "name": tmp_path.name})
        assert [entry["kind"] for entry in next_entries(stream)] == ["run", "snapshot"]
    with open(tmp_path / NAME, "a") as file:
        file.write(json.dumps(line(2)) + "\nrubbish\n" + json.dumps(line(3))[:20])
    assert [
        [entry["frames"] for entry in next_entries(stream)] for stream in viewers
    ] == [[2], [2]]
    os.replace(written(tmp_path / "other", RUN, line(9)) / NAME, tmp_path / NAME)
    for stream in viewers:
        others = ("clock", "process")
        assert next(event for event, _ in stream if event not in others) == "restart"
        assert [entry.get("frames") for entry in next_entries(stream)] == [None, 9]


def to_the_end(answer, told=None):
    """The kinds of all entries until the server says goodbye, and what it says.

    ``told`` gets the states of the process.
    """
    kinds = []
    for event, content in events(answer):
        if event == "process" and told is not None:
            told.append(content)
        if event == "entries":
            kinds += [entry["kind"] for entry in content["entries"]]
        if event == "goodbye":
            assert answer.read() == b"", "nothing follows"
            return kinds, content
    raise AssertionError


def test_viewers_get_the_last_entries_and_a_goodbye_when_a_collection_ends(tmp_path):
    with Collector(ENV, None, watch=Watch(tmp_path), **OPTIONS) as collector:
        port = int(collector.watch_url.rpartition(":")[2].strip("/"))
        viewers = [wait_until(lambda: fetched(port, "/events")) for _ in range(3)]
        list(collector)
    for viewer in viewers:
        kinds, goodbye = to_the_end(viewer)
        assert (kinds[0], kinds[-1], kinds.count("end")) == ("run", "end", 1)
        assert goodbye == {"of": "run", "command": f"muster watch {tmp_path}"}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_viewers_are_told_that_the_process_of_a_run_has_exited(tmp_path, number):
    command = [sys.executable, "-c", PARENT, str(tmp_path / "run")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        port = int(parent.stdout.readline().rpartition(":")[2].strip("/\n"))
        viewer = wait_until(lambda: fetched(port, "/events"))
        parent.send_signal(number)
        os.waitid(
            os.P_PID, parent.pid, os.WEXITED | os.WNOWAIT
        )  # not reaped: all kernels tell how
        told = []
        kinds, goodbye = to_the_end(viewer, told)
    assert kinds[0] == "run"
    assert "end" not in kinds
    assert [state["state"] for state in told] == ["alive", "exited"]
    assert told[-1] == {
        "run": 0,
        "state": "exited",
        "signal": signal.Signals(number).name,
        "code": None,
    }
    assert goodbye == {"of": "run", "command": f"muster watch {tmp_path / 'run'}"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_viewers_whose_connection_is_being_accepted_at_the_end_get_a_goodbye(
    tmp_path, number
):
    page = PageAddress("127.0.0.1:0")
    port, answers = page.socket.getsockname()[1], []

    class EndsWhileItAccepts(PageServer):
        def process_request(self, *of):
            super().process_request(*of)
            wait_until(lambda: answers)  # the viewer has its headers
            os.kill(os.getpid(), number)

    viewer = threading.Thread(target=lambda: answers.append(fetched(port, "/events")))
    with EndsWhileItAccepts(written(tmp_path, RUN), page.socket) as server:
        viewer.start()
        assert server.serve_until(signal.SIGINT, signal.SIGTERM) == number
    viewer.join(60)
    kinds, goodbye = to_the_end(answers[0])
    assert kinds[0] == "run"
    assert goodbye["command"] == f"muster watch {tmp_path}"
    with pytest.raises(KeyboardInterrupt):  # handlers are as before
        os.kill(os.getpid(), signal.SIGINT)


def test_what_is_written_just_before_the_end_reaches_viewers(tmp_path, monkeypatch):
    page = PageAddress("127.0.0.1:0")
    server = PageServer(written(tmp_path, RUN), page.socket, page.token)

    class EndsAfterARead(SnapshotReader):
        def read(self):
            found = super().read()
            if not server.ending.is_set():
                with open(tmp_path / NAME, "a") as file:
                    file.write(
                        json.dumps({"kind": "end", "time": 1.0, "error": ""}) + "\n"
                    )
                server.ending.set()
            return found

    monkeypatch.setattr(page_server, "SnapshotReader", EndsAfterARead)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        kinds, _ = to_the_end(fetched(page.socket.getsockname()[1], "/events"))
    finally:
        server.shutdown()
        server.server_close()
        thread.join(60)
    assert kinds == ["run", "end"]


def test_a_server_that_closes_says_goodbye_and_waits_for_no_viewer_long(
    tmp_path, monkeypatch
):
    page = PageAddress("127.0.0.1:0")
    server = PageServer(written(tmp_path, RUN, line(1)), page.socket, page.token)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    viewer, stuck = (fetched(page.socket.getsockname()[1], "/events") for _ in range(2))
    server.shutdown()
    begun = time.monotonic()
    with server.place(socket.socket()):  # of a viewer that does not leave
        server.server_close()
    assert time.monotonic() - begun < 20
    kinds, goodbye = to_the_end(viewer)
    assert kinds == ["run", "snapshot"]
    assert goodbye == {"of": "watch", "command": f"muster watch {tmp_path}"}
    stuck.close()
    thread.join(60)
    server.server_close()


def connected_to(port):
    """A stream; None: there is no place."""
    answer = fetched(port, "/events")
    return answer if answer.status == 200 else None


def test_a_viewer_that_does_not_read_costs_the_others_nothing_and_is_dropped(
    tmp_path, serve, monkeypatch
):
    monkeypatch.setattr(page_server._Handler, "timeout", 1.0)
    monkeypatch.setattr(page_server, "_MOST_VIEWERS", 4)
    port, _ = serve(written(tmp_path, RUN, *(line(n, memory=n) for n in range(3000))))
    stuck = []
    for _ in range(3):
        connection = socket.create_connection(("127.0.0.1", port), 60)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(b"GET /events HTTP/1.0\r\nHost: localhost\r\n\r\n")
        stuck.append(connection)
    stream = events(connected_to(port))
    count = 0
    while count < 3000:
        count += sum(entry["kind"] == "snapshot" for entry in next_entries(stream))
    # others get the places of those that were dropped
    connected = [wait_until(partial(connected_to, port)) for _ in range(3)]
    assert [answer.status for answer in connected] == [200] * 3
    for connection in stuck:
        connection.close()


# --- several runs ---------------------------------------------------------------------------------


def test_several_runs_are_told_apart(tmp_path, serve):
    paths = [tmp_path / "x" / "run", tmp_path / "b", tmp_path / "y" / "run"]
    for number, path in enumerate(paths):
        path.parent.mkdir(exist_ok=True)
        written(path, RUN, line(10 * number))
    port, _ = serve(paths)
    stream = events(fetched(port, "/events"))
    names = [next(stream) for _ in paths]
    assert names == [
        ("restart", {"run": 0, "name": str(paths[0])}),
        ("restart", {"run": 1, "name": "b"}),
        ("restart", {"run": 2, "name": str(paths[2])}),
    ]
    for number in range(3):
        assert [entry.get("frames") for entry in next_entries(stream, number)] == [
            None,
            10 * number,
        ]
    with open(paths[1] / NAME, "a") as file:
        file.write(json.dumps(line(12)) + "\n")
    assert [entry["frames"] for entry in next_entries(stream, 1)] == [12]


def test_runs_are_refused_that_are_none_or_too_many(tmp_path, capsys):
    path = written(tmp_path, RUN)
    assert "Give the directory of a collection" in refused(capsys, "watch")
    assert "draws one run, and 2" in refused(
        capsys, "watch", path, path, "--png", tmp_path / "a.png"
    )
    assert "17 runs: expected at most 16" in refused(capsys, "watch", *[path] * 17)
    assert "has no snapshots" in refused(capsys, "watch", path, tmp_path / "b")


# --- pictures and the command line ----------------------------------------------------------------


def test_plot_shows_returns_and_where_time_goes():
    with Collector(ENV, None, num_envs=2, **OPTIONS) as collector:
        assert len(collector.plot().axes) == 3
        list(collector)
        figure = collector.plot()
    [curve] = figure.axes[0].lines
    assert curve.get_xydata().tolist() == [[12, 6], [24, 6], [36, 6]]
    names = [label.get_text() for label in figure.axes[1].get_yticklabels()]
    assert names == ["env", "policy", "copy", "rest"]
    assert sum(bar.get_width() for bar in figure.axes[1].patches) == pytest.approx(1.0)
    assert [bar.get_width() for bar in figure.axes[2].patches] == [3]


def test_a_picture_of_a_run_is_written(tmp_path, capsys):
    path = written(
        tmp_path / "run", RUN | {"env": "$<b>"}, *(line(n) for n in range(0, 50, 10))
    )
    code, out, err = run(capsys, "watch", path, "--png", tmp_path / "a.png")
    assert (code, out, err) == (0, f"wrote {tmp_path / 'a.png'}\n", "")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    figure = plot_run(RunHistory.read(path))
    assert figure.axes[0].lines[0].get_xydata().tolist() == [
        [n, 1.0] for n in range(10, 50, 10)
    ]
    assert figure.axes[1].lines[0].get_ydata().tolist() == [6.0] * 4
    assert len(plot_run(RunHistory()).axes) == 9
    assert "has no snapshots" in refused(
        capsys, "watch", tmp_path, "--png", tmp_path / "b.png"
    )
    assert "cannot be written" in refused(
        capsys, "watch", path, "--png", tmp_path / "a.rubbish"
    )


def test_the_command_collect_is_watched(tmp_path, capsys):
    where = (
        "--frames",
        "400",
        "--frames-per-batch",
        "200",
        "--out",
        tmp_path / "a",
        "--watch",
    )
    code, _, err = run(
        capsys, "collect", "CartPole-v1", *where, "--watch-address", "127.0.0.1:0"
    )
    assert code == 0
    assert "watch     http://127.0.0.1:" in err
    assert RunHistory.read(tmp_path / "a").snapshots[-1]["frames"] == 400
    assert len(load(tmp_path / "a")) == 400
    assert "--watch-address needs --watch" in refused(
        capsys,
        "collect",
        "CartPole-v1",
        "--frames",
        "400",
        "--watch-address",
        "127.0.0.1:0",
    )


def test_watch_serves_until_ctrl_c(tmp_path):
    command = [sys.executable, "-m", "muster", "watch", str(written(tmp_path, RUN))]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=env
    ) as process:
        port = int(process.stdout.readline().split("/  (")[0].rpartition(":")[2])
        assert fetched(port, "/").status == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


def test_watch_is_a_public_name():
    assert muster.Watch is Watch
    assert repr(Watch("a")) == "Watch(directory='a')"
