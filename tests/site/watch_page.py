"""The page of ``muster watch`` in Chromium: ``make docs-test``."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect

from muster import Collector, MultiSyncCollector, Watch
from muster.episodes.curve import EpisodeTotals, running_means
from muster.episodes.record import Episodes
from muster.observing.page_server import PageAddress, PageServer
from muster.observing.snapshots import NAME, RunHistory
from muster.restore.film import film_command
from muster.testing import CountingEnv
from tests.site.pages import DESKTOP, PHONE, browser  # noqa: F401 (a fixture)
from tests.waits import wait_until

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")
SCRIPT = "<script>document.title='run'</script><img src=x onerror=alert(1)>"
WITHIN_MS = 120_000
expect.set_options(timeout=WITHIN_MS)


PARENT = """
import sys
from muster import Collector, Watch
from muster.testing import CountingEnv

with Collector(CountingEnv, None, frames_per_batch=8, watch=Watch(sys.argv[1])) as collector:
    next(iter(collector))
    print(collector.watch_url, flush=True)
    sys.stdin.read()
"""


def counting_unless(held: Path) -> CountingEnv:
    """Make an environment as soon as there is no such file."""
    wait_until(lambda: not held.exists(), WITHIN_MS / 1000)
    return CountingEnv(3)


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While there is this file, no environment is made."""
    return tmp_path_factory.mktemp("gate") / "held"


@pytest.fixture(scope="module")
def collection(
    held: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Any, Path]]:
    """A collector with two processes and a page, which collects until the end of the module, and
    its directory.
    """
    path, stop = tmp_path_factory.mktemp("run"), threading.Event()
    options: dict[str, Any] = {
        "frames_per_batch": 64,
        "seed": 0,
        "on_failure": "restart",
        "watch": Watch(path),
    }
    with MultiSyncCollector(
        [partial(counting_unless, held)] * 2, None, num_workers=2, **options
    ) as collector:

        def collect() -> None:
            for _ in collector:
                if stop.wait(0.01):
                    break

        thread = threading.Thread(target=collect)
        thread.start()
        try:
            yield collector, path
        finally:
            stop.set()
            thread.join(60)


Open = Callable[..., Page]


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Serve a directory from this process; returns the URL."""
    servers = []

    def start(run: Path | list[Path], address: str = "127.0.0.1:0") -> str:
        page = PageAddress(address)
        server = PageServer(
            run, page.socket, page.token, film=film_command(trust=False)
        )
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        servers.append(server)
        return page.url

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def look(browser: Browser, serve: Callable[..., str]) -> Iterator[Open]:  # noqa: F811
    """Open an address in a context of its own. At the end there must have been no error of a page.

    Pages are closed before their servers: they notice when a server ends.
    """
    contexts, seen = [], []

    def opened(url: str, *, viewport: Any = DESKTOP, scheme: Any = "light") -> Page:
        contexts.append(browser.new_context(viewport=viewport, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.on(
            "console",
            lambda said: (
                seen.append(said.text) if said.type in ("error", "warning") else None
            ),
        )
        page.on("pageerror", lambda error: seen.append(str(error)))
        page.goto(url)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert seen == []


def number(page: Page, name: str = "frames") -> int:
    return int(page.locator(f"#number-{name}").inner_text().split()[0].replace(",", ""))


def grows(page: Page) -> None:
    """Wait until the number of frames has changed."""
    expect(page.locator("#number-frames")).to_contain_text(",")
    before = page.locator("#number-frames").inner_text()
    expect(page.locator("#number-frames")).not_to_have_text(before)


def test_numbers_move_for_two_viewers_and_a_reload_keeps_the_history(
    collection: tuple[Any, Path], look: Open
) -> None:
    collector, _ = collection
    pages = [look(collector.watch_url) for _ in range(2)]
    for page in pages:
        expect(page.locator("#state")).to_have_text("running")
        expect(page.locator("#title")).to_have_text("CountingEnv")
        grows(page)
        expect(page.locator("#rate canvas")).to_be_visible()
    frames, points = number(pages[0]), pages[0].evaluate("runs[0].snapshots.length")
    assert points > 2
    pages[0].reload()
    expect(pages[0].locator("#rate canvas")).to_be_visible()
    assert number(pages[0]) >= frames
    assert pages[0].evaluate("runs[0].snapshots.length") >= points
    assert pages[0].evaluate("runs[0].snapshots[0].frames") == 0
    page = pages[1]
    expect(page.locator("#return")).to_have_attribute("data-value", "6")
    executed, *terms = page.evaluate(
        "[newest => newest.executed, n => n.frames, n => n.in_flight, n => Object.values(n.discarded)"
        ".reduce((a, b) => a + b, 0)].map(f => f(newestOf(runs[0])))"
    )
    assert executed == sum(terms)
    page.keyboard.press("p")
    expect(page.get_by_role("button", name="Continue")).to_have_attribute(
        "aria-pressed", "true"
    )
    stopped = page.locator("#number-frames").inner_text()
    grows(pages[0])
    assert page.locator("#number-frames").inner_text() == stopped
    page.keyboard.press("p")
    grows(page)


def test_a_killed_worker_turns_red_then_green(
    collection: tuple[Any, Path], held: Path, look: Open
) -> None:
    collector, _ = collection
    page = look(collector.watch_url)
    state = page.locator("tr[data-worker='1'] td[data-state]")
    expect(state).to_have_text("working")
    green = state.evaluate("cell => getComputedStyle(cell).color")
    held.touch()
    os.kill(collector.stats().workers[1].pid, signal.SIGKILL)
    expect(state).to_have_attribute("data-state", "restarting")
    assert state.evaluate("cell => getComputedStyle(cell).color") != green
    expect(page.locator("#errors")).to_contain_text("SIGKILL")
    held.unlink()
    expect(state).to_have_text("working")
    assert state.evaluate("cell => getComputedStyle(cell).color") == green
    expect(page.locator("tr[data-worker='1'] td").nth(6)).to_have_text("1")


def lines(path: Path, *entries: dict[str, Any]) -> None:
    with open(path / NAME, "a") as file:
        file.write("".join(f"{json.dumps(entry)}\n" for entry in entries))


@pytest.fixture
def finished(collection: tuple[Any, Path], tmp_path: Path) -> Path:
    """A copy of the snapshots so far, without errors.

    A worker that was killed at work has a crash report, and one that waited has none: tests count
    errors and replay commands of their own only.
    """
    _, path = collection
    copied = (path / NAME).read_bytes().splitlines(keepends=True)
    whole = [line for line in copied if line.endswith(b"\n")]
    kept = [line for line in whole if json.loads(line)["kind"] != "error"]
    (tmp_path / NAME).write_bytes(b"".join(kept))
    return tmp_path


def test_text_of_a_run_stays_text_and_half_a_line_is_tolerated(
    finished: Path, look: Open, serve: Callable[..., str]
) -> None:
    newest = RunHistory.read(finished).snapshots[-1] | {
        "time": time.time(),
        "policy_path": SCRIPT,
        "frames": 123_456,
    }
    newest["workers"] = [
        worker | {"node": SCRIPT, "phase": SCRIPT} for worker in newest["workers"]
    ]
    newest["discarded"] = {SCRIPT: 3}
    newest["metrics"] = {SCRIPT: [1.0, 1, 0], "__proto__": [2.0, 1, 0]}
    newest["metrics_at"] = 3
    facts = {"options": {SCRIPT: SCRIPT}, "versions": SCRIPT}
    lines(
        finished,
        {"kind": "run", "time": 1.0, "env": SCRIPT, "collector": SCRIPT, "every_s": 1.0}
        | facts,
    )
    lines(
        finished,
        newest,
        {
            "kind": "error",
            "time": 1.0,
            "id": 99,
            "text": SCRIPT,
            "crash_report": SCRIPT,
        },
    )
    with open(finished / NAME, "a") as file:
        file.write(json.dumps(newest)[:100])
    page = look(serve(finished))
    page.locator("#facts-card summary").click()
    places = ("#title", "#about", "#facts", "#errors", "#workers", "#frames", "#own")
    for place in places:
        expect(page.locator(place)).to_contain_text(SCRIPT)
    assert page.evaluate("document.images.length + document.scripts.length") == 2
    assert number(page) == 123_456
    with open(finished / NAME, "a") as file:
        file.write(json.dumps(newest)[100:] + "\n")
    lines(finished, newest | {"frames": 200_000})
    expect(page.locator("#number-frames")).to_have_text("200,000")


def shows(page: Page, count: int) -> bool:
    return bool(page.evaluate("runs[0]?.snapshots.length") == count)


def test_the_page_computes_the_running_means_of_the_pictures(
    finished: Path, look: Open, serve: Callable[..., str]
) -> None:
    """Also when the file was replaced by one with fewer snapshots, as it is when it has become too
    large.
    """
    newest, rng, totals = (
        RunHistory.read(finished).snapshots[-1],
        np.random.default_rng(0),
        EpisodeTotals(),
    )
    entries = []
    for frames in range(1, 60):
        n = int(rng.integers(0, 12))
        numbers, flags, infos = (
            np.arange(n),
            np.zeros(n, bool),
            np.array([{"success": i % 3 == 0} for i in range(n)]),
        )
        lengths = rng.integers(1, 50, n)
        totals = totals.plus(
            Episodes(
                numbers, numbers, rng.normal(frames, 5, n), lengths, flags, flags, infos
            )
        )
        entries.append(
            newest
            | {
                "time": newest["time"] + frames,
                "frames": 1000 * frames,
                "totals": asdict(totals),
            }
        )
    page = None
    for part in (entries, entries[::3]):
        (finished / "new").mkdir(exist_ok=True)
        (finished / "new" / NAME).unlink(missing_ok=True)
        lines(finished / "new", *part)
        os.replace(finished / "new" / NAME, finished / NAME)
        page = page or look(serve(finished))
        wait_until(partial(shows, page, len(part)))
        points = RunHistory.read(finished).points()
        for what in ("return", "length", "success"):
            found = np.array(page.evaluate(f"runningMeans(runs[0], '{what}')"))
            rows = running_means(points, what)  # type: ignore[arg-type]
            assert len(rows) > 10
            np.testing.assert_allclose(found[:2], rows[:, :2].T)
            np.testing.assert_allclose(found[3] - found[1], rows[:, 2])
            np.testing.assert_allclose(found[1] - found[2], rows[:, 2])


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_a_finished_run_is_shown_and_fits(
    finished: Path,
    look: Open,
    serve: Callable[..., str],
    viewport: dict[str, int],
    scheme: str,
) -> None:
    lines(
        finished, {"kind": "end", "time": time.time(), "error": "ValueError: of mine"}
    )
    page = look(serve(finished), viewport=viewport, scheme=scheme)
    expect(page.locator("#state")).to_have_text("crashed: ValueError")
    expect(page.locator("#errors")).to_contain_text("ValueError: of mine")
    expect(page.locator("#memory canvas")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    red, green, blue = page.evaluate(
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3)"
    )
    assert (int(red) + int(green) + int(blue) < 300) is (scheme == "dark")


def error_entry(number: int, text: str, **others: Any) -> dict[str, Any]:
    later = time.time() + 1000 + number  # than the errors of the collection
    return {
        "kind": "error",
        "time": later,
        "id": 1000 + number,
        "worker": number % 3,
        "text": text,
        **others,
    }


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_equal_errors_are_one_line_and_leave_the_page_to_the_charts(
    finished: Path, look: Open, serve: Callable[..., str], viewport: dict[str, int]
) -> None:
    long = "\n".join(f"  File {n}" for n in range(60))
    for n in range(20):
        text = f"EnvError: step {n} raised ValueError: sheep. In worker {n % 3} (pid {n}).\n\n{long}"
        lines(
            finished,
            error_entry(
                n,
                text,
                crash_report=f"/tmp/{n}",
                replay=f"muster replay /tmp/{n} --trust",
            ),
        )
    for n in range(20, 26):
        lines(finished, error_entry(n, f"{'ABCDEF'[n - 20]}Error: another"))
    page = look(serve(finished), viewport=viewport)
    first = page.locator("#errors > li")
    expect(first).to_have_count(4)
    expect(first.nth(3)).to_contain_text(re.compile(r"^[4-9] more"))
    card = page.locator("#errors-card").bounding_box()
    assert card is not None
    assert card["height"] < 0.3 * viewport["height"]
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    page.locator("#errors > li:last-child > details > summary").click()
    sheep = page.locator("#errors details", has_text="sheep").last
    expect(sheep.locator("summary")).to_contain_text("20 times")
    expect(sheep.locator("summary")).to_contain_text("workers 0, 1, 2, last")
    expect(sheep.locator("pre")).not_to_be_visible()
    sheep.locator("summary").click()
    expect(sheep.locator("pre")).to_be_visible()
    assert (
        page.evaluate("document.body.textContent.split('muster replay').length - 1")
        == 1
    )
    expect(sheep.locator("code")).to_have_text("muster replay /tmp/19 --trust")
    lines(
        finished,
        error_entry(
            30,
            "EnvError: step 30 raised ValueError: sheep. In worker 7 (pid 3).\n\nnew text",
        ),
    )
    expect(page.locator("#errors > li").first.locator("summary")).to_contain_text(
        "21 times"
    )
    opened = page.locator("#errors > li").first.locator("pre")
    expect(opened).to_be_visible()
    expect(opened).to_contain_text("new text")


def test_the_error_that_ends_a_collection_is_first_and_open(
    finished: Path, look: Open, serve: Callable[..., str]
) -> None:
    text = "EnvError: step 3 raised. In worker 1."
    lines(
        finished,
        error_entry(1, text, crash_report="/tmp/1", replay="muster replay /tmp/1"),
    )
    lines(finished, error_entry(2, "OtherError: more"))
    lines(
        finished,
        {
            "kind": "end",
            "time": time.time(),
            "error": f"{text}\n\nTo see: muster replay /tmp/1",
        },
    )
    page = look(serve(finished))
    first = page.locator("#errors > li").first
    expect(first).to_contain_text("The collection ended with this error.")
    expect(first.locator("pre")).to_be_visible()
    expect(first.locator("code")).to_have_text("muster replay /tmp/1")
    assert (
        page.evaluate("document.body.textContent.split('muster replay').length - 1")
        == 1
    )


def test_a_run_with_restarts_is_not_green(
    finished: Path, look: Open, serve: Callable[..., str]
) -> None:
    newest = RunHistory.read(finished).snapshots[-1]
    newest |= {"time": time.time(), "restarts": 4}
    (finished / NAME).unlink()
    lines(finished, newest | {"time": newest["time"] - 1, "restarts": 1})
    page = look(serve(finished))
    state = page.locator("#state")
    expect(state).to_have_text("running")
    green = state.evaluate("cell => getComputedStyle(cell).color")
    lines(finished, newest)
    expect(state).to_have_text("running, 3 restarts in the last minute")
    assert state.evaluate("cell => getComputedStyle(cell).color") != green
    worker = newest["workers"][0]
    lines(
        finished,
        newest | {"restarts": 1, "workers": [worker | {"state": "dropped"}, worker]},
    )
    expect(state).to_have_text("running, 1 of 2 workers dropped")
    later = {"time": time.time() + 100, "batches": newest["batches"] + 1}
    lines(finished, newest | later | {"workers": [worker]})
    expect(state).to_have_text("running")


def test_the_headline_is_the_end_of_the_curve(
    finished: Path, look: Open, serve: Callable[..., str]
) -> None:
    newest = RunHistory.read(finished).snapshots[-1] | {
        "time": time.time(),
        "return_mean": 19.1,
        "length_mean": 19.1,
    }
    (finished / NAME).unlink()
    sums = {
        "episodes": 200,
        "judged": 0,
        "return_sum": 200 * 21.25,
        "length_sum": 200 * 8.5,
        "success_sum": 0,
    }
    squares = {
        "return_squares": 200 * 21.25**2,
        "length_squares": 200 * 8.5**2,
        "origin": 0.0,
    }
    lines(finished, newest | {"totals": newest["totals"] | sums | squares})
    page = look(serve(finished))
    expect(page.locator("#number-return")).to_have_text("21.3")
    expect(page.locator("#return")).to_have_attribute("data-value", "21.25")
    expect(page.locator("#number-length")).to_have_text("8.5")
    lines(finished, newest | {"totals": newest["totals"] | {"return_sum": None}})
    expect(page.locator("#number-return")).to_have_text("21.3")


def test_a_page_says_how_its_run_has_ended(tmp_path: Path, look: Open) -> None:
    with Collector(
        CountingEnv, None, frames_per_batch=12, total_frames=24, watch=Watch(tmp_path)
    ) as collector:
        page = look(str(collector.watch_url))
        expect(page.locator("#state")).to_have_text("running")
        list(collector)
    expect(page.locator("#state")).to_have_text("ended")
    expect(page.locator("#over")).to_contain_text(f"muster watch {tmp_path}")


def test_a_page_says_that_the_process_of_its_run_has_exited(
    tmp_path: Path, look: Open
) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        page = look(parent.stdout.readline().strip())
        expect(page.locator("#state")).to_have_text("running")
        parent.terminate()
        # not reaped yet: every kernel tells how
        expect(page.locator("#state")).to_have_text("ended by SIGTERM")
    expect(page.locator("#over")).to_be_visible()


@pytest.mark.parametrize(
    ("machine", "text"),
    [
        ({}, "its process does not answer for 1:"),
        ({"machine": "x"}, "lost: no news for 1:"),
    ],
    ids=["alive", "elsewhere"],
)
def test_a_run_without_news_does_not_answer_or_is_lost(
    finished: Path,
    look: Open,
    serve: Callable[..., str],
    machine: dict[str, str],
    text: str,
) -> None:
    history = RunHistory.read(finished)
    (finished / NAME).unlink()
    lines(
        finished,
        history.about | machine,
        history.snapshots[-1] | {"time": time.time() - 100},
    )
    page = look(serve(finished))
    expect(page.locator("#state")).to_contain_text(text)


@pytest.mark.parametrize(
    ("end", "text"),
    [
        ({"error": "KeyboardInterrupt"}, "ended by Ctrl-C"),
        ({"error": "", "signal": "SIGTERM"}, "ended by SIGTERM"),
        ({"error": "", "signal": "SIGSEGV"}, "crashed: killed by SIGSEGV"),
        ({"error": "", "code": 3}, "crashed: its process has exited with code 3"),
        ({"error": "EnvError: step 3\nmore"}, "crashed: EnvError"),
        ({"error": ""}, "ended"),
    ],
)
def test_the_state_says_how_a_run_has_ended(
    finished: Path,
    look: Open,
    serve: Callable[..., str],
    end: dict[str, Any],
    text: str,
) -> None:
    lines(finished, {"kind": "end", "time": time.time(), **end})
    page = look(serve(finished))
    expect(page.locator("#state")).to_have_text(text)
    assert page.title().startswith("\u26a0") is text.startswith("crashed")


def test_a_run_that_ended_before_its_total_says_so(
    newest: dict[str, Any], tmp_path: Path, look: Open, serve: Callable[..., str]
) -> None:
    append = simple_run(tmp_path / "run", newest, total_frames=3000)
    append(0, frames=1000)
    lines(tmp_path / "run", {"kind": "end", "time": time.time(), "error": ""})
    page = look(serve(tmp_path / "run"))
    expect(page.locator("#state")).to_have_text("ended after 1k of 3k frames")
    append(0, frames=3000)
    expect(page.locator("#state")).to_have_text("ended")


def simple_run(path: Path, newest: dict[str, Any], **about: Any) -> Callable[..., None]:
    """Begin the file of a run; the function appends a snapshot, so many seconds ago."""
    path.mkdir(parents=True, exist_ok=True)
    (path / NAME).unlink(missing_ok=True)
    lines(path, {"kind": "run", "time": 1.0, "env": path.name, "every_s": 1.0, **about})
    plain = {
        "workers": [],
        "restarts": 0,
        "batches": 0,
        "frames": 0,
        "policy_lag": {},
        "totals": asdict(EpisodeTotals()),
    }

    def append(ago: float, **changes: Any) -> None:
        lines(path, newest | plain | {"time": time.time() - ago} | changes)

    return append


@pytest.fixture
def newest(finished: Path) -> dict[str, Any]:
    return RunHistory.read(finished).snapshots[-1]


def test_a_run_that_restarts_often_or_stalls_says_so(
    newest: dict[str, Any], tmp_path: Path, look: Open, serve: Callable[..., str]
) -> None:
    append = simple_run(tmp_path / "run", newest)
    page = look(serve(tmp_path / "run"))
    state = page.locator("#state")
    append(100, batches=1)
    append(90, batches=2)
    append(0, batches=2)
    expect(state).to_have_text("stalled: no batch for 1:30")
    append(0, batches=3, restarts=4)
    expect(state).to_have_text("restarting often: 4 restarts in the last minute")
    expect(page.locator("#number-restarts")).to_have_attribute("data-alarm", "true")
    worker = {
        "index": 0,
        "pid": 1,
        "frames": 1,
        "share": 1.0,
        "frames_per_s": 1,
        "restarts": 0,
    }
    worker |= {
        "policy_lag": 0,
        "state": "working",
        "phase": "idle",
        "node": "",
        "lane": "",
    }
    append(-61, batches=3, restarts=4, workers=[worker])
    append(-400, batches=3, restarts=4, workers=[worker])
    expect(state).to_contain_text("(the workers are idle: the program asks for none)")
    page.locator("#settings summary").click()
    page.locator("#set-stall").fill("1000")
    page.locator("#set-stall").blur()
    expect(state).to_have_text("running")
    assert page.url.endswith("#stall=1000")
    page.reload()
    expect(state).to_have_text("running")


def totals_of(returns: float, episodes: int, spread: float = 1.0) -> dict[str, Any]:
    """Totals of as many episodes of about this return."""
    sums = {"episodes": episodes, "return_sum": returns * episodes}
    squares = {"return_squares": (returns**2 + spread) * episodes}
    return asdict(EpisodeTotals()) | sums | squares


def added(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {name: one[name] + other[name] for name in one}


def test_numbers_that_cross_a_limit_are_red(
    newest: dict[str, Any], tmp_path: Path, look: Open, serve: Callable[..., str]
) -> None:
    append = simple_run(tmp_path / "run", newest)
    good, bad = totals_of(200.0, 300), totals_of(150.0, 300)
    append(20, frames=1000, batches=1, totals=good, policy_lag={"0": 1})
    append(10, frames=2000, batches=2, totals=added(good, good), policy_lag={"0": 2})
    page = look(serve(tmp_path / "run"))
    red = '#numbers dd[data-alarm="true"]'
    expect(page.locator("#number-return")).to_have_text("200")
    expect(page.locator(red)).to_have_count(0)
    worse = added(added(good, good), bad)
    append(0, frames=3000, batches=3, totals=worse, policy_lag={"0": 2, "11": 1})
    expect(page.locator("#number-return")).to_have_text("150")
    expect(page.locator(red)).to_have_count(2)
    expect(page.locator("#numbers")).to_contain_text("fallen from 200")
    expect(page.locator("#number-policy-lag")).to_have_text("11")
    expect(page.locator("#numbers")).to_contain_text("above 10")
    page.locator("#settings summary").click()
    for name, value in (("lag", "20"), ("return", "160"), ("rate", "1000")):
        page.locator(f"#set-{name}").fill(value)
        page.locator(f"#set-{name}").blur()
    expect(page.locator("#numbers")).to_contain_text("below 160")
    expect(page.locator("#numbers")).to_contain_text("below 1k")
    expect(page.locator("#numbers")).not_to_contain_text("above")


def shows_frames(page: Page, frames: int) -> bool:
    known = "runs.length ? ownMetric(runs[0], 'loss/policy').columns[0] : []"
    return frames in page.evaluate(known)


def test_own_metrics_are_charts_and_can_be_smoothed(tmp_path: Path, look: Open) -> None:
    options: dict[str, Any] = {"frames_per_batch": 12, "total_frames": 36}
    with Collector(CountingEnv, None, watch=Watch(tmp_path), **options) as collector:
        page = look(str(collector.watch_url))
        for value in (4.0, 2.0, 1.0):
            collector.next()
            collector.log({"loss/policy": value, "entropy": float("nan")})
            frames = collector.stats().frames
            wait_until(partial(shows_frames, page, frames))
        expect(page.locator("#own section")).to_have_count(2)
        expect(page.locator("#own h2").first).to_contain_text("loss/policy")
        assert page.evaluate("ownMetric(runs[0], 'loss/policy').columns") == [
            [12, 24, 36],
            [4, 2, 1],
        ]
        expect(page.locator("#own-0")).to_have_attribute("data-value", "1")
        expect(page.locator("#own section").nth(1)).to_contain_text(
            "3 values not finite"
        )
        page.locator("#settings summary").click()
        page.locator("#set-smooth").select_option("0.6")
        average = (4 * 0.36 + 2 * 0.6 + 1) / 1.96
        shown = "Number(document.querySelector('#own-0').dataset.value)"
        wait_until(lambda: abs(page.evaluate(shown) - average) < 1e-9)
        expect(page.locator("#held")).to_have_text(
            "Batches you still hold: 1"
        )  # the newest
    expect(page.locator("#held")).to_have_text("Batches you still hold: 0")


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_several_runs_share_the_charts(
    newest: dict[str, Any],
    tmp_path: Path,
    look: Open,
    serve: Callable[..., str],
    viewport: dict[str, int],
) -> None:
    for name, level in (("a", 100.0), ("b", 50.0)):
        append = simple_run(tmp_path / name, newest, options={"seed": name})
        totals = totals_of(level, 200)
        append(9, frames=1000, batches=1)
        append(
            0,
            frames=2000,
            batches=2,
            totals=totals,
            metrics={"loss": [level, 1, 0]},
            metrics_at=2000,
        )
    lines(tmp_path / "b", error_entry(0, "EnvError: of b"))
    lines(
        tmp_path / "b",
        {"kind": "end", "time": time.time(), "error": "", "signal": "SIGTERM"},
    )
    page = look(serve([tmp_path / "a", tmp_path / "b"]), viewport=viewport)
    rows = page.locator("#runs tr")
    expect(rows).to_have_count(2)
    expect(rows.nth(0)).to_contain_text("running")
    expect(rows.nth(1)).to_contain_text("ended by SIGTERM")
    expect(page.locator("#return")).to_have_attribute("data-value", "100 50")
    expect(page.locator("#own-0")).to_have_attribute("data-value", "100 50")
    expect(page.locator("#title")).to_have_text("a")
    expect(page.locator("#errors-card")).to_be_hidden()
    page.get_by_role("button", name="b", exact=True).click()
    expect(page.locator("#title")).to_have_text("b")
    expect(page.locator("#state")).to_have_text("ended by SIGTERM")
    expect(page.locator("#errors-card")).to_contain_text("EnvError: of b")
    chart, errors = (
        page.locator(each).bounding_box() for each in ("#own-0", "#errors-card")
    )
    assert chart is not None
    assert errors is not None
    assert errors["y"] > chart["y"] + chart["height"], "errors are below the charts"
    page.locator("#facts-card summary").click()
    expect(page.locator("#facts")).to_contain_text("seed")
    page.locator("#settings summary").click()
    form = page.locator("#settings form").bounding_box()
    assert form is not None
    assert form["x"] >= 0
    assert form["x"] + form["width"] <= viewport["width"]
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]


def test_the_film_of_an_episode_is_made_when_a_viewer_asks_for_it(
    tmp_path: Path, look: Open, serve: Callable[..., str]
) -> None:
    with Collector(
        "CartPole-v1",
        None,
        frames_per_batch=64,
        total_frames=512,
        seed=0,
        watch=Watch(tmp_path, None, films=True),
    ) as c:
        best = max(
            (episode for _ in c for episode in c.episodes),
            key=lambda episode: episode.episode_return,
        )
    page = look(serve(tmp_path))
    expect(page.locator("#episodes li")).to_have_count(3)
    page.get_by_role("button", name="Film of the best episode").click()
    expect(page.locator("#film-note")).to_contain_text(
        f"{best.length} steps, environment 0; {best.length + 1} frames"
    )
    page.wait_for_function(
        "document.querySelector('#film').readyState >= 2", timeout=WITHIN_MS
    )
    assert page.evaluate(
        "document.querySelector('#film').duration * 50"
    ) == pytest.approx(best.length + 1, abs=0.6)
    assert page.evaluate(
        "[document.querySelector('#film').videoWidth, document.querySelector('#film').videoHeight]"
    ) == [
        600,
        400,
    ]
    (tmp_path / "episodes" / "worst.episode").unlink()
    page.get_by_role("button", name="Film of the worst episode").click()
    expect(page.locator("#film-note")).to_contain_text("No such file")


def test_without_the_token_there_is_no_page(
    finished: Path,
    browser: Browser,  # noqa: F811
    serve: Callable[..., str],
) -> None:
    url = serve(finished, "0.0.0.0:0")
    port, token = url.rpartition(":")[2].split("/?token=")
    with browser.new_context() as context:
        page = context.new_page()
        answer = page.goto(f"http://127.0.0.1:{port}/")
        assert answer is not None
        assert answer.status == 403
        assert "needs the token" in page.locator("body").inner_text()
        page.goto(f"http://127.0.0.1:{port}/?token={token}")
        expect(page.locator("#rate canvas")).to_be_visible()
        assert "token" not in page.url
