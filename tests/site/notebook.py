"""Muster in JupyterLab, in Chromium: ``make docs-test``."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import nbformat
import pytest
from myst_nb.core.read import read_myst_markdown_notebook
from playwright.sync_api import Browser, Locator, Page, expect

from tests.site.pages import browser  # noqa: F401 (a fixture)
from tests.waits import wait_until

TUTORIAL = (
    Path(__file__).resolve().parents[2] / "docs" / "tutorials" / "first_batches.md"
)
VIEWPORT = {"width": 1280, "height": 1000}
WITHIN_MS = 120_000
expect.set_options(timeout=WITHIN_MS)
KERNEL = {
    "name": "python3",
    "display_name": "Python 3 (ipykernel)",
    "language": "python",
}
SETTINGS = {
    # otherwise cells out of sight are not in the page
    "notebook-extension/tracker": {"windowingMode": "none"},
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}
CONNECTED = """async () => {
    const session = window.jupyterapp?.shell.currentWidget?.context?.sessionContext;
    if (!session) return false;
    await session.ready;
    await session.session?.kernel?.info;
    return session.session?.kernel?.status === "idle";
}"""
PROGRESS = """
from muster import Collector, MultiSyncCollector
with Collector("CartPole-v1", None, frames_per_batch=512, total_frames=4096, progress=True) as c:
    batches = [batch.numel() for batch in c]
print(sum(batches), "collected")
"""
PLOT = """
c.plot()
"""
ENDLESS = """
collector = MultiSyncCollector(["CartPole-v1"] * 2, None, num_workers=2, frames_per_batch=128)
print("begun", [worker.pid for worker in collector.stats().workers])
for batch in collector:
    pass
"""
GOES_ON = """
pids = [worker.pid for worker in collector.stats().workers]
more = collector.next()
stats = collector.stats()
assert stats.executed == stats.frames + sum(stats.discarded.values()) + stats.in_flight
collector.shutdown()
print("goes on", pids, more.numel(), stats.restarts)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tutorial, and a notebook with cells for progress, plots and an interrupt."""
    path = tmp_path_factory.mktemp("notebooks")
    made = [
        nbformat.v4.new_code_cell(text.strip())
        for text in (PROGRESS, PLOT, ENDLESS, GOES_ON)
    ]
    tutorial = read_myst_markdown_notebook(TUTORIAL.read_text("utf-8"))
    for name, cells in (("tutorial", tutorial.cells), ("cells", made)):
        notebook = nbformat.v4.new_notebook(
            cells=cells, metadata={"kernelspec": KERNEL}
        )
        nbformat.write(notebook, path / f"{name}.ipynb")
    for name, content in SETTINGS.items():
        file = path / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content))
    return path


@pytest.fixture(scope="module")
def lab(folder: Path) -> Iterator[str]:
    """Run JupyterLab; the address of its folder."""
    own = {
        name: str(folder / name.lower())
        for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")
    }
    own |= {
        "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
        "IPYTHONDIR": str(folder / "ipy"),
    }
    options = ["--no-browser", "--allow-root", "--port=0", "--IdentityProvider.token="]
    options.append("--LabApp.expose_app_in_browser=True")
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        *options,
        f"--ServerApp.root_dir={folder}",
    ]
    log = folder / "log.txt"
    with (
        open(log, "w") as said,
        subprocess.Popen(
            command, env=os.environ | own, cwd=folder, stderr=said
        ) as process,
    ):
        runtime = Path(own["JUPYTER_RUNTIME_DIR"])
        try:
            served = wait_until(lambda: process.poll() is not None or _address(runtime))
            assert isinstance(served, str), log.read_text()
            yield served
        finally:
            process.send_signal(signal.SIGTERM)  # also ends its kernels
            process.wait(60)


def _address(runtime: Path) -> str:
    """The address that the server has written; empty: not yet."""
    for path in runtime.glob("jpserver-*.json"):
        with suppress(ValueError):  # half of it is written
            return str(json.loads(path.read_text())["url"])
    return ""


@pytest.fixture
def notebook(browser: Browser, lab: str) -> Iterator[Any]:  # noqa: F811
    """Open a notebook, and wait for its kernel."""
    contexts = []

    def opened(name: str) -> Page:
        contexts.append(browser.new_context(viewport=VIEWPORT))
        page = contexts[-1].new_page()
        page.goto(f"{lab}lab/workspaces/{Path(name).stem}/tree/{name}")
        wait_until(lambda: page.evaluate(CONNECTED))  # cells that run before are lost
        return page

    yield opened
    for context in contexts:
        context.close()


def outputs(page: Page, cell: int) -> Locator:
    """The outputs of a code cell."""
    return (
        page.locator(".jp-Notebook .jp-CodeCell")
        .nth(cell)
        .locator(".jp-OutputArea-output")
    )


def pictures(where: Locator) -> list[int]:
    """Widths of the pictures that are shown."""
    return where.locator("img").evaluate_all(
        "images => images.map(image => image.naturalWidth)"
    )


def run(page: Page, cell: int) -> None:
    """Run a cell of a kernel that is idle: after an error it ignores what it gets before."""
    wait_until(lambda: page.evaluate(CONNECTED))
    page.locator(".jp-Notebook .jp-CodeCell .cm-content").nth(cell).click()
    page.keyboard.press("Shift+Enter")


def test_the_first_tutorial_runs_and_its_pictures_appear(
    notebook: Any, folder: Path
) -> None:
    page = notebook("tutorial.ipynb")
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_text("Run All Cells", exact=True).click()
    cells = page.locator(".jp-Notebook .jp-CodeCell")
    expect(outputs(page, cells.count() - 1)).to_contain_text(
        "frames/s while collecting"
    )
    expect(page.locator('.jp-Notebook [data-mime-type$="stderr"]')).to_have_count(0)
    expect(page.locator('.jp-Notebook [data-mime-type$="error"]')).to_have_count(0)
    drawn = pictures(page.locator(".jp-Notebook"))
    assert len(drawn) == 5
    assert min(drawn) > 300
    expect(page.locator(".jp-Notebook")).to_contain_text("TensorDict(")


def test_progress_plots_and_interrupts(notebook: Any) -> None:
    page = notebook("cells.ipynb")
    run(page, 0)
    expect(outputs(page, 0)).to_have_count(
        2
    )  # one bar that moves, not a line for each batch
    expect(outputs(page, 0).first).to_contain_text(
        re.compile("collect ━+ 100% 4.1k/4.1k frames")
    )
    expect(outputs(page, 0).last).to_have_text("4096 collected")
    run(page, 1)
    expect(outputs(page, 1).locator("img")).to_have_count(1)
    assert min(pictures(outputs(page, 1))) > 300
    run(page, 2)
    begun = outputs(page, 2).filter(has_text=re.compile(r"begun \["))
    expect(begun).to_have_count(1)
    pids = begun.inner_text().strip().removeprefix("begun ")
    page.locator(".jp-NotebookPanel-toolbar [data-jp-item-name=interrupt]").click()
    expect(outputs(page, 2).last).to_contain_text("KeyboardInterrupt")
    run(page, 3)
    expect(outputs(page, 3)).to_have_text(
        f"goes on {pids} 128 0"
    )  # in the same workers
