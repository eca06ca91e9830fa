"""``torch.profiler`` over a few rollouts."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from muster.errors import BadOption
from muster.observing.profiling import ProfileConfig, RolloutProfiler

NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


def profiled(profiler: RolloutProfiler, rollouts: int = 6) -> list[bool]:
    """Run rollouts, marked by their numbers; whether it was still running after each."""
    running = []
    for i in range(rollouts):
        with torch.profiler.record_function(f"rollout {i}"):
            torch.ones(3) + 1
        profiler.step()
        running.append(profiler.running)
    return running


def without_stacks(**options: Any) -> ProfileConfig:
    """torch can read stacks only if nothing that they name was freed."""
    return ProfileConfig(with_stack=False, **options)


def shown(path: Path) -> list[int]:
    names = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
    return [i for i in range(6) if f"rollout {i}" in names]


@pytest.mark.parametrize(
    ("rollouts", "warmup", "expected"),
    [(3, 1, [1, 2]), (3, 0, [0, 1, 2]), (1, 0, [0]), (4, 3, [3])],
)
@pytest.mark.filterwarnings("error", "ignore::ResourceWarning")
def test_the_trace_has_the_rollouts_after_the_warmup(
    tmp_path, rollouts, warmup, expected
):
    path = tmp_path / "traces" / "p.json"
    profiler = RolloutProfiler(
        without_stacks(num_rollouts=rollouts, warmup_rollouts=warmup, save_path=path)
    )
    profiler.start()
    profiler.start()
    assert profiled(profiler) == [i + 1 < rollouts for i in range(6)]
    assert shown(path) == expected
    written = path.stat().st_mtime_ns
    profiler.stop()
    profiler.start()
    assert not profiler.running, "it profiles once"
    assert path.stat().st_mtime_ns == written


def test_stacks_whose_code_was_freed_cost_the_trace_and_not_the_run(tmp_path, caplog):
    path = tmp_path / "p.json"
    profiler = RolloutProfiler(
        ProfileConfig(num_rollouts=1, warmup_rollouts=0, save_path=path)
    )
    profiler.start()
    for i in range(300):
        name = f"f{i}" + 50 * "q"
        code = f"def {name}(torch):\n    torch.ones(3).sum()\n"
        freed: dict[str, Any] = {}
        exec(compile(code, f"{100 * 'z'}{i}", "exec"), freed)
        freed[name](torch)
        del freed
    gc.collect()
    in_its_place = [b"\x94" * n for n in range(30, 200) for _ in range(30)]
    profiler.step()
    del in_its_place
    assert not profiler.running
    if path.exists():
        pytest.skip("torch could read the stacks all the same")
    assert "Set with_stack=False" in caplog.text


@pytest.mark.slow
def test_a_process_that_ends_while_profiling_writes_what_there_is(tmp_path):
    code = """if True:
        import torch
        from muster.observing.profiling import ProfileConfig, RolloutProfiler
        # torch reads stacks at exit only if it is lucky
        profiler = RolloutProfiler(ProfileConfig(save_path="p.json", with_stack=False))
        profiler.start()
        for i in range(2):
            with torch.profiler.record_function(f"rollout {i}"):
                torch.ones(3)
            profiler.step()
    """
    subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True
    )
    assert shown(tmp_path / "p.json") == [1]


def test_a_callback_replaces_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    got: list[Any] = []
    profiler = RolloutProfiler(
        without_stacks(num_rollouts=2, on_trace_ready=got.append)
    )
    profiler.start()
    profiled(profiler)
    assert [isinstance(p, torch.profiler.profile) for p in got] == [True]
    assert "rollout 1" in {event.key for event in got[0].key_averages()}
    assert list(tmp_path.iterdir()) == []


def test_paths_have_the_number_of_the_worker(tmp_path, monkeypatch):
    assert ProfileConfig().path(2) == Path("collector_profile_2.json")
    config = ProfileConfig(workers=[0, 3], save_path="x/{worker_idx}/{step}.json")
    assert config.path(3) == Path("x/3/{step}.json")
    assert [config.includes(i) for i in range(4)] == [True, False, False, True]
    assert [ProfileConfig().includes(i) for i in range(2)] == [True, False]
    monkeypatch.chdir(tmp_path)
    profiler = RolloutProfiler(
        without_stacks(num_rollouts=1, warmup_rollouts=0), worker_idx=4
    )
    profiler.start()
    profiled(profiler, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["collector_profile_4.json"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_rollouts": 1},
            "num_rollouts=1, warmup_rollouts=1: expected num_rollouts > warmup_rollouts >= 0",
        ),
        ({"warmup_rollouts": -1}, "warmup_rollouts=-1"),
        ({"activities": ["tpu"]}, r"activities=\['tpu'\]: expected some of"),
        ({"activities": []}, r"activities=\[\]"),
        ({"save_path": "a.json", "on_trace_ready": print}, "give one of the two"),
        (
            {"save_path": "a.json", "workers": [0, 1]},
            "'a.json' is one file for several workers",
        ),
    ],
)
def test_impossible_values_are_refused(options, message):
    with pytest.raises(BadOption, match=message):
        ProfileConfig(**options)


@NO_CUDA
def test_cuda_counts_only_where_there_is_some(tmp_path):
    config = ProfileConfig(
        num_rollouts=1,
        warmup_rollouts=0,
        activities=["cpu", "cuda"],
        save_path=tmp_path / "p.json",
    )
    profiler = RolloutProfiler(config)
    profiler.start()
    profiled(profiler, 1)
    assert shown(tmp_path / "p.json") == [0]
    with pytest.raises(BadOption, match="no CUDA device"):
        RolloutProfiler(ProfileConfig(activities=["cuda"]))
