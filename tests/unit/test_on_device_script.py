"""``scripts/on_device.sh``: every part is run, whatever became of the others, and leaves a log."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "on_device.sh"
# an interpreter that sees a device and has all packages; parts say what they are
INTERPRETER = """#!/bin/sh
case "$*" in
    *find_spec*) exit 1 ;;  # nothing is missing
    "-c "*) echo "2.11 13.0 a card" ;;
    *"-m {failing}"*) echo "it fails"; exit 3 ;;
    "-m "*) echo "fine: $*" ;;
esac
"""
PARTS = {
    "recorded_rollouts": "pytest",
    "benchmark": "benchmarks.on_device",
    "ppo": "benchmarks.ppo_on_device",
    "other_tests": "pytest",
}


def run(tmp_path: Path, interpreter: str) -> subprocess.CompletedProcess[str]:
    fake = tmp_path / "python"
    fake.write_text(interpreter)
    fake.chmod(0o755)
    return subprocess.run(
        ["sh", str(SCRIPT), str(tmp_path / "results")],
        env={**os.environ, "PYTHON": str(fake)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize("failing", ["pytest", "benchmarks.on_device", "nothing"])
def test_a_part_that_fails_does_not_hide_the_others(tmp_path, failing):
    done = run(tmp_path, INTERPRETER.format(failing=failing))
    logs = tmp_path / "results" / "on_device"
    card, *lines = (logs / "summary.txt").read_text().splitlines()
    assert card == "2.11 13.0 a card"
    assert [line.partition(":")[0] for line in lines] == list(PARTS)
    for (part, module), line in zip(PARTS.items(), lines, strict=True):
        log = (logs / f"{part}.log").read_text()
        if module == failing:
            assert "FAILED with status 3" in line
            assert log == "it fails\n"
        else:
            assert "passed" in line
            assert log.startswith(f"fine: -m {module}")
    assert done.returncode == (failing != "nothing")


def test_without_a_device_nothing_is_installed(tmp_path):
    if Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists():
        pytest.skip("this machine has a device")
    done = run(tmp_path, "#!/bin/sh\nexit 1\n")
    assert done.returncode == 1
    assert "FAILED: this machine has no CUDA device" in done.stdout
    assert not (tmp_path / "results" / "on_device" / "install.log").read_text()


def test_limits_add_up_to_eight_minutes():
    limits = [
        int(line.split()[2])
        for line in SCRIPT.read_text().splitlines()
        if line.startswith(("tests ", "part "))
    ]
    assert len(limits) == len(PARTS)
    assert sum(limits) <= 480
