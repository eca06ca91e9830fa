"""The muster command: exact, polite to terminals and pipes, and unwilling to run what it was not
asked to.
"""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import logging
import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from muster import Collector
from muster.cli import doctor
from muster.cli.collect_command import Collect
from muster.cli.doctor import known_bad
from muster.cli.main import main
from muster.cli.options import frames_per_batch, parse_count
from muster.cli.report import StopSignals, summary
from muster.cli.request import prepared
from muster.episodes.curve import EpisodeTotals
from muster.episodes.record import Episodes
from muster.errors import EnvError
from muster.observing.progress import below, in_one_line, progress, worker_lines
from muster.recording import Recorder, load
from muster.recording.export import Export
from muster.utils.texts import clock, counted, short
from tests.command_line import refused, run
from tests.fakes.stats import stats, worker
from tests.tools import files_limited_to

# ------------------------------------------------------------------------------------------ collecting


def recorded(capsys: Any, path: Path, *argv: Any) -> tuple[str, Any]:
    """What ``muster collect`` has printed, and its recording."""
    code, out, err = run(capsys, "collect", *argv, "--out", path)
    assert (code, err) == (0, "")
    return out, load(path)


def test_collect_records_exactly_what_was_asked_for(tmp_path, capsys):
    out, recording = recorded(
        capsys, tmp_path / "a", "CartPole-v1", "--frames", "4k", "--seed", 3
    )
    assert len(recording) == 4000
    assert recording.lost is None
    assert recording.meta["env"] == "CartPole-v1"
    assert (recording.meta["seed"], recording.meta["envs"]) == (3, 8)
    ended = [e for e in recording.episodes if e.terminated or e.truncated]
    assert all(e.complete for e in ended)
    assert f"episodes  {len(ended):,}  " in out
    mean = sum(e.episode_return for e in ended) / len(ended)
    assert f"return {mean:,.1f} ±" in out
    assert "4,000 in" in out
    assert re.search(
        r"time +env \d+%.* policy \d+%.* copy \d+%.* rest \d+%.* record \d+%", out
    )
    command = re.search(r'read it +python -c "(.+)"', out)
    assert command is not None
    assert str(tmp_path / "a") in command.group(1)


def test_a_full_disk_ends_the_recording_and_says_so(tmp_path, capsys):
    with files_limited_to(5000):
        said = refused(
            capsys,
            "collect",
            "CartPole-v1",
            "--frames",
            "8000",
            "--quiet",
            "--out",
            tmp_path / "a",
        )
    assert f"Could not record into {tmp_path / 'a'}: File too large" in said
    assert "another --out" in said
    assert load(tmp_path / "a").lost is not None


@pytest.mark.parametrize(
    "env", ["CartPole-v1", "Pendulum-v1", "MountainCarContinuous-v0"]
)
def test_mlp_fits_discrete_and_continuous_actions(env, tmp_path, capsys):
    _, recording = recorded(
        capsys,
        tmp_path / "a",
        env,
        "--frames",
        "160",
        "--num-envs",
        "4",
        "--policy",
        "mlp",
    )
    batch = recording.batch(0)
    assert batch["action_log_prob"].isfinite().all()
    assert len(batch["action"].unique()) > 1


@pytest.mark.parametrize(
    ("policy", "obs_dtype", "stored"),
    [
        ("mlp", None, torch.float32),
        ("mlp", "env", torch.float64),
        ("random", None, torch.float64),
        ("random", "float16", torch.float16),
    ],
)
def test_mujoco_is_recorded_in_the_dtype_of_the_network(
    policy, obs_dtype, stored, tmp_path, capsys
):
    argv = ["HalfCheetah-v5", "--frames", "40", "--num-envs", "2", "--policy", policy]
    _, recording = recorded(
        capsys,
        tmp_path / "a",
        *argv,
        *([] if obs_dtype is None else ["--obs-dtype", obs_dtype]),
    )
    batch = recording.batch(0)
    assert (batch["observation"].dtype, batch["next", "observation"].dtype) == (
        stored,
        stored,
    )
    assert batch["action"].dtype == torch.float32


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
@pytest.mark.parametrize("dtype", ["float32", "uint8", "float64"])
def test_mlp_takes_boxes_of_any_shape(shape, dtype):
    import gymnasium
    import numpy as np

    from muster.cli import mlp

    space = gymnasium.spaces.Box(0, 100, shape, np.dtype(dtype))
    head, said = mlp.fresh(space, gymnasium.spaces.MultiDiscrete([2, 3]), 0)
    logits = head.net(torch.as_tensor(np.stack([space.sample() for _ in range(5)])))
    assert logits.shape == (5, 5)
    assert said == f"fresh MLP {int(np.prod(shape))}-64-64-5 tanh, seed 0"


# ------------------------------------------------------------------------------------------ workers


@pytest.mark.slow
def test_workers_record_the_data_of_as_many_groups(tmp_path, capsys):
    argv = [
        "CartPole-v1",
        "--frames",
        "1600",
        "--frames-per-batch",
        "800",
        "--seed",
        5,
        "--workers",
        2,
        "--num-envs",
        4,
    ]
    out, recording = recorded(capsys, tmp_path / "a", *argv)
    assert (recording.meta["workers"], recording.meta["envs"], len(recording)) == (
        2,
        4,
        1600,
    )
    options: dict[str, Any] = {
        "num_envs": 4,
        "frames_per_batch": 800,
        "total_frames": 1600,
        "seed": 5,
    }
    with Collector(["CartPole-v1"] * 2, None, **options) as collector:
        expected = list(collector)
    for number, batch in enumerate(expected):
        assert batch.shape == (2, 4, 100)
        assert (
            recording.batch(number)["next", "observation"]
            == batch["next", "observation"]
        ).all()
        assert (
            recording.batch(number)["collector", "traj_ids"]
            == batch["collector", "traj_ids"]
        ).all()
    assert "1,600 in 2 batches" in out
    assert re.search(r"^workers   2$", out, re.MULTILINE)
    assert re.search(
        r"^in them   env \d+%.* policy \d+%.* copy \d+%.* rest \d+%.* idle \d+%",
        out,
        re.MULTILINE,
    )
    assert re.search(
        r"^here      waiting \d+%.* record \d+%.* rest \d+%", out, re.MULTILINE
    )


@pytest.mark.parametrize("where", [[], ["--threads"]])
def test_batches_of_single_workers_come_as_they_are_ready(where, tmp_path, capsys):
    argv = [
        "CartPole-v1",
        "--frames",
        1200,
        "--frames-per-batch",
        200,
        "--num-envs",
        4,
        "--workers",
        2,
        "--async",
        *where,
    ]
    _, recording = recorded(capsys, tmp_path / "a", *argv)
    assert (recording.batches, len(recording)) == (6, 1200)
    assert recording.batch(0).batch_size == (4, 50)
    assert {
        int(recording.batch(n)["collector", "traj_ids"][0, 0]) // 4 % 2
        for n in range(6)
    } == {
        0,
        1,
    }


def test_a_server_acts_for_workers(tmp_path, capsys):
    argv = [
        "CartPole-v1",
        "--frames",
        800,
        "--frames-per-batch",
        400,
        "--num-envs",
        4,
        "--policy",
        "mlp",
    ]
    recordings = {}
    for name, where in {
        "workers": [],
        "again": ["--inference", "server"],
        "server": ["--inference", "server"],
        "alternating": ["--inference", "server", "--alternating"],
    }.items():
        out, recording = recorded(
            capsys, tmp_path / name, *argv, "--workers", 2, *where
        )
        assert ("(policy: server: " in out) == bool(where)
        recordings[name] = torch.cat(
            [recording.batch(number)["observation"] for number in range(2)], 2
        )
        assert recordings[name].shape == (2, 4, 100, 4)
    assert torch.equal(recordings["again"], recordings["server"])
    assert torch.equal(
        recordings["workers"], recordings["alternating"]
    )  # one worker in each half
    assert not torch.equal(
        recordings["workers"], recordings["server"]
    )  # one stream of random numbers for both


FAILING = """
import os, gymnasium
class Failing(gymnasium.Env):
    observation_space = gymnasium.spaces.Discrete(9)
    action_space = gymnasium.spaces.Discrete(2)
    def reset(self, seed=None, options=None):
        return 0, {}
    def step(self, action):
        try:
            open("done", "x").close()
        except FileExistsError:  # of two workers at once, one makes it
            return 1, 0.0, False, False, {}
        raise OSError("simulator gone\\n\\nwith a story")
gymnasium.register("Failing-v0", Failing)
"""


@pytest.fixture
def failing(tmp_path, monkeypatch):
    """A collection whose first step raises, in one worker only."""
    import gymnasium

    (tmp_path / "failing_env.py").write_text(FAILING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # of crash reports
    yield [
        *("collect", "failing_env:Failing-v0", "--allow-import", "--frames", 80),
        *("--num-envs", 1, "--workers", 2),
    ]
    sys.modules.pop("failing_env", None)
    gymnasium.registry.pop("Failing-v0", None)


def test_an_error_in_a_worker_is_one_short_message(failing, capsys):
    code, out, err = run(capsys, *failing)
    assert (code, out) == (2, "")
    told, _, message = err.rpartition("muster: ")
    short_ = r"Failing-v0.* raised OSError: simulator gone\nSee it happen again with: muster (replay \S+ --trust)\n"
    hint = re.fullmatch(short_, message)
    assert hint is not None, message
    assert "failing_env.py" in told  # in full, since it may be the user's own code
    assert told.count("Traceback in the worker") == 1
    Path("done").unlink()
    code, _, err = run(capsys, *hint.group(1).split(), "--no-pdb")
    assert code == 1
    assert "simulator gone" in err


@pytest.mark.filterwarnings("default")
def test_a_dropped_worker_is_told_at_once(failing, capsys):
    code, out, err = run(capsys, *failing, "--on-failure", "drop")
    assert code == 0
    assert re.search(r"^workers   2  dropped [01]$", out, re.MULTILINE), out
    assert err.startswith(
        "muster: a worker is dropped, and the others go on without it: "
    )
    assert "simulator gone" in err
    assert "Traceback" not in err


# ------------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7", 7),
        ("100k", 100_000),
        ("1.5M", 1_500_000),
        ("1e6", 10**6),
        ("51_200", 51_200),
        ("51,200", 51_200),
    ],
)
def test_counts(text, number):
    assert parse_count(text) == number


@pytest.mark.parametrize(
    "text",
    ["", "k", "-5", "0", "1.5", "1e-3", "nan", "inf", "1e999999999", "0x10", "1 000"],
)
def test_no_counts(text, capsys):
    with pytest.raises(ValueError, match="frames"):
        parse_count(text)
    with pytest.raises(SystemExit) as exit_:
        main(["collect", "CartPole-v1", f"--frames={text}"])
    assert exit_.value.code == 2


@pytest.mark.parametrize("frames", [8, 800, 100_000, 8 * 10_007, 8 * 1_000_003, 51_200])
@pytest.mark.parametrize("envs", [1, 2, 8])
def test_batches_come_out_even(frames, envs):
    size = frames_per_batch(frames, envs, None)
    assert size % envs == 0
    assert frames % size == 0
    assert size <= 65_536


# ------------------------------------------------------------------------------------------ refused imports


@pytest.fixture
def evil(tmp_path, monkeypatch):
    """A directory with a module and a policy that leave a mark when they are run."""
    mark = f"open({str(tmp_path / 'ran')!r}, 'w').close()\n"
    (tmp_path / "evil_module.py").write_text(mark)
    (tmp_path / "agent.py").write_text(
        mark + "def policy(obs):\n    return (obs[:, 2] > 0).long()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.delitem(sys.modules, "evil_module", raising=False)
    return tmp_path


def test_env_ids_that_import_are_refused(evil, capsys):
    err = refused(capsys, "collect", "evil_module:CartPole-v1", "--frames", "80")
    assert "--allow-import" in err
    assert "evil_module" in err
    assert not (evil / "ran").exists()


def test_env_ids_that_import_are_allowed_when_asked(evil, capsys):
    code, _, _ = run(
        capsys,
        "collect",
        "evil_module:CartPole-v1",
        "--frames",
        "80",
        "--allow-import",
        "--quiet",
    )
    assert code == 0
    assert (evil / "ran").exists()
    argv = ["collect", "no_such_module:CartPole-v1", "--frames", "80", "--allow-import"]
    code, _, err = run(capsys, *argv)
    assert code == 2
    assert "no module 'no_such_module'" in err


def test_python_policies_are_refused_unless_asked(evil, capsys):
    argv = ["collect", "CartPole-v1", "--frames", "80", "--policy", "agent.py:policy"]
    assert "--allow-import" in refused(capsys, *argv)
    assert not (evil / "ran").exists()
    assert run(capsys, *argv, "--allow-import", "--out", "rec", "--quiet")[0] == 0
    batch = load("rec").batch(0)
    assert torch.equal(batch["action"], (batch["observation"][..., 2] > 0).long())
    code, _, err = run(capsys, *argv[:-1], "agent.py:absent", "--allow-import")
    assert code == 2
    assert "defines no 'absent'" in err


@pytest.mark.parametrize("name", ["net.pt", "net.pth", "net.pkl", "net.PT", "net.ckpt"])
def test_pickles_are_refused_with_the_way_out(evil, name, capsys):
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(evil / "ran"),)

    torch.save({"x": Evil()}, evil / name)
    err = refused(
        capsys,
        "collect",
        "CartPole-v1",
        "--frames",
        "80",
        "--policy",
        name,
        "--allow-import",
    )
    assert "pickle" in err
    assert "save_file" in err
    assert not (evil / "ran").exists()


def test_an_error_in_allowed_code_shows_where(evil, capsys):
    (evil / "agent.py").write_text("def policy(obs):\n    return obs.no_such_thing\n")
    argv = [
        "collect",
        "CartPole-v1",
        "--frames",
        "80",
        "--policy",
        "agent.py:policy",
        "--allow-import",
    ]
    code, _, err = run(capsys, *argv)
    assert code == 2
    assert "agent.py" in err
    assert "no_such_thing" in err


# ------------------------------------------------------------------------------------------ refused requests


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["CartPole-v1", "--async"], "--async is about workers: add --workers N"),
        (["CartPole-v1", "--threads"], "--threads is about workers"),
        (["CartPole-v1", "--on-failure", "drop"], "--on-failure is about workers"),
        (
            ["CartPole-v1", "--inference", "server"],
            "--inference is about workers: add --workers N",
        ),
        (["CartPole-v1", "--alternating"], "--alternating is about workers"),
        (
            ["CartPole-v1", "--workers", "2", "--alternating"],
            "--alternating needs --inference server",
        ),
        (["CartPole-v1", "--workers", "0"], "--workers 0: expected at least 1"),
        (
            ["CartPole-v1", "--workers", "3"],
            "--workers 3 x --num-envs 8; the nearest are 792 or 816",
        ),
        (
            ["CartPole-v1", "--workers", "3", "--frames-per-batch", "80"],
            "3 x --num-envs 8; the nearest are 72 or 96",
        ),
        (
            ["CartPole-v1", "--workers", "3", "--async", "--frames-per-batch", "81"],
            "multiple of --num-envs 8; the nearest are 80 or 88",
        ),
        (["CartPole-v1", "--frames", "1001"], "nearest are 1,000 or 1,008"),
        (
            ["CartPole-v1", "--frames-per-batch", "96"],
            "multiple of --frames-per-batch 96; the nearest are 768 or 864",
        ),
        (["CartPole-v1", "--num-envs", "0"], "--num-envs 0: expected at least 1"),
        (["CartPole-v1", "--seed", "-1"], "--seed -1: expected at least 0"),
        (["FrozenLake-v1", "--policy", "mlp"], "Box observations"),
        (["FrozenLake-v1", "--policy", "mlp"], "--policy random"),
        (["CartPol-v1"], "Similar: CartPole-v1"),
        (["CartPole-v7"], "Similar: CartPole-v"),
        (["CartPole"], "Similar: CartPole-v"),
        (["Nowhere/Pong-v5"], "PACKAGE:Nowhere/Pong-v5 --allow-import"),
        (["../../etc/passwd"], "no environment"),
        ([""], "no environment"),
    ],
    ids=str,
)
def test_requests_that_make_no_sense(argv, said, capsys):
    assert said in refused(capsys, "collect", "--frames", "800", *argv)


def test_environments_that_cannot_be_made(capsys):
    import gymnasium

    class Broken(gymnasium.Env[Any, Any]):
        def __init__(self) -> None:
            raise RuntimeError("no display")

    gymnasium.register("MusterBroken-v0", Broken)
    try:
        for more in (
            ["--policy", "random"],
            ["--policy", "mlp"],
            ["--workers", "2", "--threads"],
        ):
            assert "no display" in refused(
                capsys, "collect", "MusterBroken-v0", "--frames", "80", *more
            )
    finally:
        del gymnasium.registry["MusterBroken-v0"]


def test_unexpected_errors_keep_their_traceback(evil):
    (evil / "agent.py").write_text("raise ZeroDivisionError('mine')\n")
    argv = [
        "collect",
        "CartPole-v1",
        "--frames",
        "80",
        "--policy",
        "agent.py:policy",
        "--allow-import",
    ]
    with pytest.raises(ZeroDivisionError, match="mine"):
        main(argv)


# ------------------------------------------------------------------------------------------ weights


def net(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def test_weights_from_a_file_act(tmp_path, capsys):
    module = net(4, 32, 16, 8, 2)
    with torch.no_grad():
        module[-1].weight.zero_()
        module[-1].bias.copy_(torch.tensor([-50.0, 50.0]))  # always action 1
    for name, state in (
        ("net", module.state_dict()),
        ("head", {f"net.{k}": v for k, v in module.state_dict().items()}),
    ):
        save_file(state, tmp_path / f"{name}.safetensors")
        argv = [
            "--policy",
            tmp_path / f"{name}.safetensors",
            "--out",
            tmp_path / name,
            "--quiet",
        ]
        assert run(capsys, "collect", "CartPole-v1", "--frames", "80", *argv) == (
            0,
            "",
            "",
        )
        recording = load(tmp_path / name)
        assert (recording.batch(0)["action"] == 1).all()
        assert "MLP 4-32-16-8-2 tanh" in recording.meta["policy"]


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (net(3, 16, 2).state_dict(), "from 4 inputs"),
        (net(4, 16, 3).state_dict(), "to 2 outputs"),
        ({"weight": torch.zeros(2, 4)}, "expected the state_dict"),
        ({"0.weight": torch.zeros(2, 4)}, "expected the state_dict"),
        ({"0.weight": torch.zeros(2, 4), "0.bias": torch.zeros(3)}, "layer 0"),
        ({**net(4, 16, 2).state_dict(), "2.weight": torch.zeros(2, 15)}, "layer 2"),
        (
            {**net(4, 16, 2).state_dict(), "0.bias": torch.full((16,), torch.nan)},
            "not finite",
        ),
        (
            {
                **net(4, 16, 2).state_dict(),
                "0.bias": torch.zeros(16, dtype=torch.int64),
            },
            "0.bias",
        ),
        ({**net(4, 16, 2).state_dict(), "log_std": torch.zeros(2)}, "log_std"),
        ({}, "expected the state_dict"),
    ],
)
def test_weights_that_do_not_fit(state, said, tmp_path, capsys):
    save_file(state, tmp_path / "net.safetensors")
    err = refused(
        capsys,
        "collect",
        "CartPole-v1",
        "--frames",
        "80",
        "--policy",
        tmp_path / "net.safetensors",
    )
    assert "net.safetensors" in err
    assert said in err


def test_damaged_and_missing_files_of_weights(tmp_path, capsys):
    path = tmp_path / "net.safetensors"
    argv = ["collect", "CartPole-v1", "--frames", "80", "--policy"]
    assert "no file" in refused(capsys, *argv, path)
    assert "none of: random, mlp" in refused(capsys, *argv, "rnadom")
    save_file(net(4, 8, 2).state_dict(), path)
    whole = path.read_bytes()
    for cut in (0, 7, 100, len(whole) - 1):
        path.write_bytes(whole[:cut])
        assert "not a readable safetensors file" in refused(capsys, *argv, path)


# ------------------------------------------------------------------------------------------ processes


@pytest.fixture
def not_under_nohup() -> Iterator[None]:
    """SIGHUP has its default effect, also if the tests ignore it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("number", "times", "code", "kept", "workers"),
    [
        (signal.SIGINT, 1, 130, 3, []),
        (signal.SIGTERM, 1, 143, 3, []),
        (signal.SIGHUP, 1, 129, 3, []),
        (signal.SIGINT, 2, 130, 2, []),
        (signal.SIGTERM, 1, 143, 3, ["--workers", "1"]),
        (signal.SIGINT, 2, 130, 2, ["--workers", "2", "--async"]),
    ],
)
def test_stopping_keeps_what_was_collected(
    tmp_path, monkeypatch, capfd, not_under_nohup, number, times, code, kept, workers
):
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.getsignal(n) for n in numbers]
    write, batches = Recorder.write, itertools.count(1)

    def signalled(
        self: Recorder, batch: Any
    ) -> None:  # at a known place: before the third batch is written
        if next(batches) == 3:
            for _ in range(times):
                os.kill(os.getpid(), number)
        write(self, batch)

    monkeypatch.setattr(Recorder, "write", signalled)
    argv = [
        "collect",
        "CartPole-v1",
        "--frames",
        "100k",
        "--out",
        str(tmp_path / "r"),
        *workers,
    ]
    assert main(argv) == code
    assert [signal.getsignal(n) for n in numbers] == handlers
    out, err = capfd.readouterr()
    assert "stopping after this batch" in err
    recording = load(tmp_path / "r")
    assert recording.lost is None
    assert recording.batches == kept
    assert recording.batch(0).batch_size[-2:] == (8, 250)
    if times == 1:
        assert "stopped after 6,000 of 100,000 frames" in out
        assert "wrote" in out
    else:
        assert "stopped at once" in err


@pytest.mark.slow
def test_a_real_ctrl_c_on_a_real_terminal(tmp_path):
    """The whole command under a pty: a bar appears, and the byte that Ctrl-C sends stops it."""
    argv = [
        *("-m", "muster.cli.main", "collect", "CartPole-v1", "--frames", "1B"),
        *("--out", tmp_path / "r", "--workers", "2"),
    ]
    pid, fd = pty.fork()
    if pid == 0:
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": "110", "LINES": "30"}
        os.execv(sys.executable, [sys.executable, *map(str, argv)])
    guard = threading.Timer(100, os.kill, (pid, signal.SIGKILL))
    guard.start()
    shown, processes = b"", set[int]()
    try:
        while True:
            try:
                data = os.read(fd, 65536)
            except OSError:  # how Linux says that the other side is gone
                break
            if not data:
                break
            shown += data
            if not processes and b"return " in shown and b"frames/s" in shown:
                processes = descendants(pid)
                os.write(fd, b"\x03")
        _, status = os.waitpid(pid, 0)
    finally:
        guard.cancel()
        os.close(fd)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())
    assert os.waitstatus_to_exitcode(status) == 130, text
    shown_text = r"collect .*━.* 0% [\d.]+[kM]?/1B frames  [\d.]+k? frames/s  episodes [\d,]+  return [\d.]+ eta"
    assert re.search(shown_text, text), text
    for number in range(2):
        assert re.search(
            rf"^  worker {number} +(idle|step|policy) +[\d.]+k? frames/s +\d+% of frames",
            text,
            re.MULTILINE,
        )
    assert len(processes) == 6  # with the fork server, and a keeper beside each worker
    assert not [process for process in processes if Path(f"/proc/{process}").exists()]
    assert "stopping after this batch" in text
    assert "stopped after" in text
    recording = load(tmp_path / "r")
    assert recording.lost is None
    assert f"stopped after {len(recording):,} of 1,000,000,000 frames" in text


def descendants(pid: int) -> set[int]:
    """A process, and all that it has started."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            parents[int(stat.parent.name)] = int(
                stat.read_text().rpartition(")")[2].split()[1]
            )
    found = {pid}
    while (
        more := {child for child, parent in parents.items() if parent in found} - found
    ):
        found |= more
    return found


def test_help_version_and_doctor_load_nothing_heavy():
    code = """
import sys
from muster.cli.main import main
codes = []
for argv in (["--help"], ["collect", "--help"], ["--version"], ["doctor"]):
    try:
        codes.append(main(argv))
    except SystemExit as exit:
        codes.append(exit.code)
heavy = {"torch", "tensordict", "gymnasium", "numpy", "safetensors"} & set(sys.modules)
print("\\nRESULT", codes, sorted(heavy))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    result = done.stdout.splitlines()[-1]
    assert re.fullmatch(r"RESULT \[0, 0, 0, [01]\] \[\]", result), result
    assert "muster collect CartPole-v1 --frames 100k --out runs/a" in done.stdout
    assert "/dev/shm" in done.stdout


def test_without_arguments_help_is_shown(capsys):
    with pytest.raises(SystemExit) as exit_:
        main([])
    assert exit_.value.code == 0
    assert "muster doctor" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------ what is shown


def test_lines_are_limited_by_time_not_by_batches(capsys):
    with (
        progress("collect", 1000, every_s=1e9) as never,
        progress("collect", 1000, every_s=0) as always,
    ):
        for _ in range(3):
            never(500, in_one_line(stats(), 1000))
        assert capsys.readouterr().out == ""
        always(500, in_one_line(stats(episodes=4321, return_mean=21.5), 1000))
        always(1000, "the summary follows anyway")
    out = capsys.readouterr().out
    assert re.fullmatch(
        r"collect  50%  500/1k frames  38.2k frames/s  episodes 4,321  return 21.5  eta 0:00\n",
        out,
    )


def test_the_summary_adds_up():
    values, columns = [1.0, 4.0, 4.0, 9.0], np.zeros((4, 4), np.int64)
    episodes = Episodes(
        columns[0],
        columns[1],
        np.array(values),
        np.arange(0, 8, 2),
        columns[2] > 0,
        columns[3] > 0,
    )
    totals = EpisodeTotals().plus(episodes)
    text = summary(stats(discarded={"worker died": 12}), totals, recording_s=10.0)
    assert "discarded 12 (worker died)" in text
    assert "episodes  4  return 4.5 ± 2.9  length 3.0" in text
    assert "env 30% ▇▇▇  policy 10% ▇  copy 5%  rest 5%  record 50% ▇▇▇▇▇" in text
    assert "none ended" in summary(stats(), EpisodeTotals(), None)
    assert "record" not in summary(stats(), EpisodeTotals(), None)


def test_the_summary_says_where_the_time_of_workers_went():
    workers = (worker(0), worker(1, restarts=2, state="dropped"))
    text = summary(
        stats(workers=workers, restarts=2, wait_s=6.0),
        EpisodeTotals(),
        recording_s=3.0,
        elapsed_s=12.0,
    )
    assert text.splitlines()[-3:] == [
        "workers   2  restarts 2 (worker 1: 2)  dropped 1",
        "in them   env 25% ▇▇  policy 8% ▇  copy 4%  rest 4%  idle 58% ▇▇▇▇▇▇",
        "here      waiting 50% ▇▇▇▇▇  record 25% ▇▇  rest 25% ▇▇",
    ]
    text = summary(
        stats(workers=workers, wait_s=6.0),
        EpisodeTotals(),
        recording_s=None,
        elapsed_s=4.0,
    )
    assert "idle 0%" in text  # what a lost worker had done counts, its time does not
    assert text.endswith("here      waiting 100% ▇▇▇▇▇▇▇▇▇▇  rest 0%")


def test_workers_have_a_line_each_as_far_as_they_fit():
    lines = worker_lines(
        [
            worker(0),
            worker(
                1, phase="dead", frames_per_s=0.0, share=0.25, restarts=3, policy_lag=12
            ),
        ]
    )
    assert lines == [
        "  worker 0   step         19k frames/s   50% of frames  restarts 0  lag 0",
        "  worker 1   dead           0 frames/s   25% of frames  restarts 3  lag 12",
    ]
    many = worker_lines([worker(n) for n in range(20)])
    assert len(many) == 17
    assert many[-1] == "  and 4 more"
    assert worker_lines([]) == []


def test_workers_of_nodes_say_where_they_are():
    nodes = [
        worker(0, node="0 (a)", share=0.25),
        worker(1, node="0 (a)", share=0.25),
        worker(2, node="1 (b)"),
    ]
    assert worker_lines(nodes)[2].endswith("restarts 0  lag 0  node 1 (b)")
    text = summary(
        stats(workers=tuple(nodes), unseen=2048), EpisodeTotals(), recording_s=None
    )
    assert (
        "\nworkers   3 on 2 nodes: 0 (a) 50%, 1 (b) 50%  unseen at most 2,048 frames\n"
        in text
    )
    assert "\nengine" not in text
    text = summary(
        stats(workers=tuple(nodes), engine="ray"), EpisodeTotals(), recording_s=None
    )
    assert "\nengine    ray\n" in text
    many = tuple(worker(n, node=f"{n} (a)", share=0.05) for n in range(20))
    text = summary(stats(workers=many), EpisodeTotals(), recording_s=None)
    assert "workers   20 on 20 nodes: 0 (a) 5%, " in text
    assert "15 (a) 5%, and 4 more\n" in text


def test_the_bar_looks_for_itself_while_no_batch_comes():
    from rich.console import Console

    now = stats(workers=(worker(0),))
    changes = False

    def look() -> list[str]:
        if changes:
            raise RuntimeError("dictionary changed size during iteration")
        return worker_lines(now.workers)

    render, console = below("bar", look), Console(file=io.StringIO(), width=100)

    def shown() -> str:
        with console.capture() as capture:
            console.print(render())
        return capture.get()

    assert "worker 0   step" in shown()
    now = stats(workers=(worker(0, phase="policy"),))
    assert "worker 0   policy" in shown()
    now, changes = stats(), True
    assert "worker 0   policy" in shown()


def test_numbers_are_short():
    assert [short(n) for n in (7, 999, 38_200, 1e6, 2.5e9)] == [
        "7",
        "999",
        "38.2k",
        "1M",
        "2.5B",
    ]
    assert [clock(s) for s in (0, 61, 3725)] == ["0:00", "1:01", "1:02:05"]


def test_a_terminal_that_knows_ascii_only(monkeypatch):
    shown = io.BytesIO()
    monkeypatch.setattr(
        sys, "stdout", io.TextIOWrapper(shown, encoding="ascii", write_through=True)
    )
    assert main(["collect", "CartPole-v1", "--frames", "800"]) == 0
    assert b" +- " in shown.getvalue()


# ------------------------------------------------------------------------------------------ doctor

GOOD = {
    "torch": "2.13.0+cpu",
    "tensordict": "0.14.3",
    "torchrl": "0.14.1",
    "gymnasium": "1.4.0",
    "mujoco": "3.17.0",
}


@pytest.mark.parametrize(
    ("versions", "fix"),
    [
        ({"dm-control": "1.0.50", "mujoco": "4.0.0"}, "mujoco<4"),
        ({"torchrl": "0.14.1", "tensordict": "0.15.0"}, "tensordict>=0.14.3,<0.15"),
        ({"gymnasium-robotics": "1.4.2", "mujoco": "3.17.0"}, "maze"),
        ({"mujoco-mjx": "3.17.0", "mujoco": "4.0.0"}, "mujoco==3.17.0"),
        ({"minari": "0.5.4"}, "pillow"),
        ({"gymnax": "1.0.1"}, "pip install six"),
        ({"gymnasium": "0.29.1"}, "gymnasium>=1.1"),
    ],
)
def test_known_bad_combinations_come_with_a_fix(versions, fix):
    [(what, found)] = known_bad(versions)
    assert fix in found
    assert all(version in what for version in versions.values() if len(versions) > 1)


@pytest.mark.parametrize(
    "versions",
    [
        {},
        GOOD,
        {**GOOD, "dm-control": "1.0.50"},
        {"mujoco": "4.0.0"},
        {"torchrl": "0.15.0", "tensordict": "0.15.1"},
        {"minari": "0.5.4", "pillow": "12.0"},
        {"gymnax": "1.0.1", "six": "1.17"},
        {"torch": "weird", "gymnasium": "1.4.0rc1"},
    ],
)
def test_good_combinations_are_left_alone(versions):
    assert known_bad(versions) == []


def test_doctor_says_what_it_found(capsys):
    code, out, err = run(capsys, "doctor")
    assert err == ""
    assert code == (1 if "BAD" in out else 0)
    assert "2." in re.search(r"torch +(\S+)", out).group(1)  # type: ignore[union-attr]
    assert re.search(
        r"\n  workers +from a fork server, in milliseconds; open files for [\d,]+\n",
        out,
    )
    assert re.search(r"\n  shared +anonymous memory \(memfd\)\n", out)


@pytest.mark.parametrize(
    ("platform", "files", "said"),
    [
        (
            "linux",
            100,
            {"workers": "from a fork server, in milliseconds; open files for 20"},
        ),
        (
            "linux",
            10,
            {"workers": "from a fork server, in milliseconds; open files for 0"},
        ),
        ("linux", None, {"shared": "anonymous memory (memfd)"}),
        (
            "darwin",
            256,
            {
                "workers": "spawned, in seconds; open files for 72",
                "shared": "unlinked temporary files",
            },
        ),
        ("win32", None, {"workers": "threads only (backend='threads')"}),
    ],
)
def test_doctor_knows_what_workers_need(platform, files, said, monkeypatch):
    monkeypatch.setattr(sys, "platform", platform)
    assert said.items() <= doctor.workers(files).items()


def test_doctor_counts_the_descriptors_of_a_worker_right():
    from muster import MultiSyncCollector

    def files_of(count: int) -> int:
        with MultiSyncCollector(
            ["CartPole-v1"] * count, None, frames_per_batch=count
        ) as collector:
            collector.next()
            return len(os.listdir("/proc/self/fd"))

    files_of(1)  # starts the fork server
    gc.collect()  # collectors of other tests give theirs back now, and not in between
    before = len(os.listdir("/proc/self/fd"))
    one, three = files_of(1), files_of(3)
    assert three - one == 2 * doctor.FILES_OF_A_WORKER
    assert one - before < doctor.FILES_OF_OTHERS + doctor.FILES_OF_A_WORKER


# ------------------------------------------------------------------------- what newcomers stumbled upon


def test_the_number_of_environments_has_one_name_in_all_commands(capsys, tmp_path):
    name = "--num-envs"
    for argv in (
        ("collect", "CartPole-v1", "--frames", "12", "--out", tmp_path / "a"),
        ("eval", "CartPole-v1", "--episodes", "3"),
        ("tune", "CartPole-v1"),
    ):
        assert "--num-envs 0: expected at least 1" in refused(capsys, *argv, name, "0")
    code, _, _ = run(
        capsys,
        "collect",
        "CartPole-v1",
        "--frames",
        "12",
        "--out",
        tmp_path / "a",
        name,
        "3",
    )
    assert code == 0
    assert load(tmp_path / "a").meta["envs"] == 3
    assert "--num-envs 5; the nearest are 10 or 15" in refused(
        capsys, "collect", "CartPole-v1", "--frames", "12", name, "5"
    )
    with pytest.raises(SystemExit):
        run(capsys, "collect", "CartPole-v1", "--frames", "12", "--envs", "5")
    assert "Unrecognized options: --envs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "frames"),
    [
        (("--num-envs", "5"), 15),
        (("--num-envs", "5", "--frames-per-batch", "10"), 20),
        (("--num-envs", "4"), 12),
    ],
)
def test_frames_are_rounded_up_on_request(options, frames, capsys, tmp_path):
    argv = (
        "collect",
        "CartPole-v1",
        "--frames",
        "12",
        "--round-up",
        "--out",
        tmp_path / "a",
    )
    code, _, _ = run(capsys, *argv, *options)
    assert code == 0
    assert len(load(tmp_path / "a")) == frames


@pytest.mark.parametrize("on_a_terminal", [False, True])
def test_the_remaining_time_is_that_of_the_rate_beside_it(on_a_terminal):
    """Also in the first batches, when the start of workers has taken most of the time."""

    class Terminal(io.StringIO):
        def isatty(self):
            return on_a_terminal

    stream = Terminal()
    now = stats(frames=1000, frames_per_s=100.0)
    with progress("collect", 361_000, every_s=0.0, stream=stream) as show:
        show(1000, in_one_line(now, 361_000), now.frames_per_s)
        show(361_000, in_one_line(now, 361_000), now.frames_per_s)
    text = stream.getvalue()
    if not on_a_terminal:
        assert "100 frames/s" in text
        assert text.endswith("eta 1:00:00\n")
    assert text.count("eta") <= 1, "there is no rest at the end"


def test_a_rate_of_nothing_promises_nothing(capsys):
    with progress("collect", 100, every_s=0.0) as show:
        show(10, "10", 0.0)
    assert capsys.readouterr().out == "collect  10%  10  \n"


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (1, "batch", "1 batch"),
        (0, "batch", "0 batches"),
        (2000, "batch", "2,000 batches"),
        (2, "frame", "2 frames"),
    ],
)
def test_one_is_singular(number, noun, text):
    assert counted(number, noun) == text


def test_a_recording_of_one_batch_and_one_episode_says_so(capsys, tmp_path):
    code, out, _ = run(
        capsys,
        *(
            "collect",
            "CartPole-v1",
            "--frames",
            "16",
            "--num-envs",
            "1",
            "--out",
            tmp_path / "a",
            "--seed",
            "2",
        ),
    )
    assert code == 0
    assert "frames    16 in 1 batch\n" in out
    assert "16 frames in 1 batch and 1 chunk," in repr(load(tmp_path / "a"))
    assert str(Export(Path("a"), 1, 1, {})) == "wrote     a  (1 episode, 1 frame)"


def test_quiet_prints_nothing_but_errors(capfd, tmp_path):
    argv = ("collect", "CartPole-v1", "--frames", "800", "--quiet")
    level = logging.getLogger("muster").level
    assert main([*argv, "--watch", "--out", str(tmp_path / "a")]) == 0
    assert capfd.readouterr() == ("", "")
    with prepared(Collect("CartPole-v1", 8, quiet=True), 0):
        warnings.warn("a worker was restarted", stacklevel=1)
        logging.getLogger("muster.workers.slow_construction").warning(
            "Waiting for workers 0, 1."
        )
        with StopSignals(quiet=True) as stop:
            os.kill(os.getpid(), signal.SIGTERM)
    assert stop.exit_code == 143
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("muster").level == level
    with prepared(Collect("CartPole-v1", 8), 0):
        warnings.warn("a worker was restarted", stacklevel=1)
        with StopSignals():
            os.kill(os.getpid(), signal.SIGTERM)
    assert (
        capfd.readouterr().err
        == "muster: a worker was restarted\n\nmuster: stopping after this batch; "
        + ("again to stop at once.\n")
    )


def test_the_end_of_the_terminal_is_ignored_under_nohup(monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals(quiet=True) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
        assert stop.exit_code == 0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    "name", ["bad-name", "a b-v0", "../a-v0", "a//b-v0", "a/b-v", "/a-v0", "a-v0\n", ""]
)
def test_a_dataset_id_that_is_none_shows_the_form(name, capsys, tmp_path):
    pytest.importorskip("minari")
    run(
        capsys,
        "collect",
        "CartPole-v1",
        "--frames",
        "800",
        "--out",
        tmp_path / "a",
        "--quiet",
    )
    said = refused(capsys, "export", tmp_path / "a", "--to", "minari", "--out", name)
    assert (
        f"{name!r} is not an id of a Minari dataset: expected NAME-vN or NAMESPACE/NAME-vN"
        in said
    )
    assert "such as cartpole/ppo-v0" in said


def test_the_command_that_replays_a_failure_is_that_of_the_error(capsys):
    """Once, with --trust exactly if the file needs it."""
    error = EnvError(
        "Failing[0].step raised.\n\nTo see it happen again under a debugger: muster replay /tmp/a --trust"
    )
    error.worker, error.replay_command = 0, "muster replay /tmp/a --trust"
    with (
        pytest.raises(
            EnvError,
            match=r"^Failing\[0\].step raised.\nSee it happen again with: (.*)$",
        ) as caught,
        prepared(Collect("CartPole-v1", 8), 0),
    ):
        raise error
    assert str(caught.value).count("muster replay") == 1
    assert str(caught.value).endswith("muster replay /tmp/a --trust")
