"""The ``muster`` command, called in this process."""

from __future__ import annotations

from typing import Any

import pytest

from muster.cli.main import main
from tests.waits import without_delays
from tests.warned import no_garbage


def run(capsys: pytest.CaptureFixture[str], *argv: Any) -> tuple[int, str, str]:
    """Exit code, standard output and error."""
    with no_garbage():
        code = main([str(arg) for arg in argv])
    out, err = capsys.readouterr()
    return code, out, without_delays(err)


def refused(capsys: pytest.CaptureFixture[str], *argv: Any) -> str:
    """One message, exit code 2, no traceback, nothing on stdout."""
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.startswith("muster: ")
    assert err.count("\n") == 1
    return err
