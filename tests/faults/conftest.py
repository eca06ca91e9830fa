from __future__ import annotations

import pytest

from tests.fakes.fault_runs import all_gone
from tests.fakes.programs import Program


@pytest.fixture
def start(tmp_path):
    started = []

    def start_one(name: str, *arguments: str) -> Program:
        started.append(Program(name, tmp_path, *arguments))
        return started[-1]

    yield start_one
    for program in started:
        program.process.kill()
        all_gone(program.family(), 0.0)
