"""The built site in Chromium: ``make docs-test``.

It is no part of ``make test``, which finds ``test_*.py`` only.
"""

from __future__ import annotations

import functools
import inspect
import shutil
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

import muster

SITE = Path(__file__).resolve().parents[2] / "build" / "docs"
PAGES = sorted(
    path.relative_to(SITE).as_posix()
    for path in SITE.rglob("*.html")
    if "_static" not in path.parts
)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
PHONE = {"width": 360, "height": 740}
DESKTOP = {"width": 1280, "height": 900}


class Quiet(SimpleHTTPRequestHandler):
    """Serves the site without printing every request."""

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(SITE))
    )
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join(10)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = shutil.which("chromium")
    assert program, "no Chromium here. On Debian: apt install chromium"
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=program, args=FLAGS.split())
        yield found
        found.close()


@pytest.fixture(scope="module")
def seen() -> list[str]:
    """Errors of the page that is open, and addresses elsewhere that it asked for."""
    return []


@pytest.fixture(scope="module")
def page(browser: Browser, address: str, seen: list[str]) -> Iterator[Page]:
    def only_here(route: Route) -> None:
        if route.request.url.startswith(address):
            route.continue_()
        else:
            seen.append(f"asks for {route.request.url}")
            route.abort()

    context = browser.new_context(viewport=DESKTOP)
    opened = context.new_page()
    opened.route("**/*", only_here)
    opened.on(
        "console",
        lambda message: (
            seen.append(message.text) if message.type in ("error", "warning") else None
        ),
    )
    opened.on("pageerror", lambda error: seen.append(str(error)))
    yield opened
    context.close()


def test_there_is_a_site() -> None:
    assert "index.html" in PAGES


@pytest.mark.parametrize("name", PAGES)
def test_a_page_opens_without_errors_and_fits_a_phone(
    page: Page, address: str, seen: list[str], name: str
) -> None:
    seen.clear()
    page.set_viewport_size(DESKTOP)
    page.goto(f"{address}/{name}")
    assert page.title()
    page.set_viewport_size(PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert (
        page.evaluate(
            "[...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)"
        )
        == []
    )
    assert seen == []


@pytest.mark.parametrize(
    ("word", "expected"), [("truncation", "start.html"), ("on_failure", "workers.html")]
)
def test_search_finds_the_page(
    page: Page, address: str, seen: list[str], word: str, expected: str
) -> None:
    seen.clear()
    page.set_viewport_size(DESKTOP)
    page.goto(f"{address}/index.html")
    page.get_by_placeholder("Search").fill(word)
    page.keyboard.press("Enter")
    results = page.locator("#search-results ul.search li a")
    expect(page.locator("#search-results .search-summary")).to_contain_text("found")
    links = [urlsplit(link.get_attribute("href") or "").path for link in results.all()]
    assert expected in links
    results.nth(links.index(expected)).click()
    expect(page.locator("article")).to_contain_text(word)
    assert seen == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("gae", {"recipes/ppo.html"}),
        ("seed", {"recipes/seeds.html", "guide.html", "start.html"}),
        ("checkpoint", {"guide.html", "recipes/index.html", "save_and_continue.html"}),
        ("num_envs", {"guide.html", "start.html", "recipes/troubleshooting.html"}),
        ("clip", {"recipes/actions.html"}),
        ("frame stack", {"recipes/images.html"}),
        ("lstm", {"recipes/recurrent.html"}),
        ("hydra", {"recipes/hydra.html"}),
    ],
)
def test_search_leads_to_a_how_to_page_first(
    page: Page, address: str, words: str, expected: set[str]
) -> None:
    page.set_viewport_size(DESKTOP)
    page.goto(f"{address}/search.html?q={words}")
    expect(page.locator("#search-results .search-summary")).to_contain_text("found")
    links = page.locator("#search-results ul.search li a").all()
    found = [urlsplit(link.get_attribute("href") or "").path for link in links]
    assert found[0] in expected, found[:5]
    history = [
        n
        for n, path in enumerate(found)
        if path.startswith(("decisions/", "changelog"))
    ]
    others = [
        n
        for n, path in enumerate(found)
        if not path.startswith(("decisions/", "changelog"))
    ]
    assert not history or min(history) > 4 or min(history) > max(others)


def test_a_collectors_parameters_are_grouped_before_its_errors(
    page: Page, address: str
) -> None:
    page.goto(f"{address}/reference/MultiSyncCollector.html")
    groups = page.locator("article p.rubric")
    names = groups.all_text_contents()
    assert names[:6] == [
        "What to collect",
        "Environments",
        "Policy",
        "Devices",
        "Weights",
        "Episodes",
    ]
    assert names[-3:] == ["Workers and nodes", "Failures", "Looking at it"]
    errors = page.locator("article dt", has_text="Raises").first
    last, raised = groups.last.bounding_box(), errors.bounding_box()
    assert last is not None
    assert raised is not None
    assert raised["y"] > last["y"]
    assert "docs/" not in page.locator("article").inner_text()
    assert page.locator("article a[href='../watch.html']").count() > 0


def test_the_dark_theme_can_be_chosen(page: Page, address: str) -> None:
    page.set_viewport_size(DESKTOP)
    page.goto(f"{address}/index.html")
    background = "getComputedStyle(document.body).backgroundColor"
    colours = set()
    for _ in range(3):  # automatic, light, dark
        page.locator(".content-icon-container .theme-toggle").click()
        colours.add(page.evaluate(background))
    assert len(colours) == 2


class Links(HTMLParser):
    """Addresses that a page names, and its anchors."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors |= {
            given[name] or "" for name in ("id", "name") if given.get(name)
        }
        self.targets += [
            given[name] or "" for name in ("href", "src") if given.get(name)
        ]


def test_every_link_inside_the_site_leads_somewhere() -> None:
    found = {name: Links(SITE / name) for name in PAGES}
    dead = []
    for name, links in found.items():
        for target in links.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            path = (
                (SITE / name).parent / unquote(parts.path)
                if parts.path
                else SITE / name
            )
            path = path / "index.html" if path.is_dir() else path
            page = path.resolve().relative_to(SITE).as_posix()
            anchors = found[page].anchors if page in found else None
            if not path.exists() or (
                parts.fragment
                and anchors is not None
                and unquote(parts.fragment) not in anchors
            ):
                dead.append(f"{name}: {target}")
    assert dead == []


def test_every_public_name_has_a_page_with_all_its_parameters() -> None:
    missing = []
    for name in set(muster.__all__) - {"__version__"}:
        text = (SITE / "reference" / f"{name}.html").read_text("utf-8")
        if inspect.isclass(getattr(muster, name)):
            given = inspect.signature(getattr(muster, name)).parameters
            missing += [
                f"{name}({p})"
                for p in given
                if f"<strong>{p}</strong>" not in text and f">{p}<" not in text
            ]
    assert missing == []


def test_llms_txt_names_every_page_and_its_source() -> None:
    text = (SITE / "llms.txt").read_text("utf-8")
    sources = [
        line.split("](")[1].split(")")[0]
        for line in text.splitlines()
        if line.startswith("- [")
    ]
    assert [source for source in sources if not (SITE / source).is_file()] == []
    pages = {
        Path(source.removeprefix("_sources/"))
        .with_suffix("")
        .with_suffix("")
        .as_posix()
        for source in sources
    }
    assert {
        "start",
        "workers",
        "reference/Collector",
        "decisions/0001-time-major-slots-and-lending",
    } <= pages
