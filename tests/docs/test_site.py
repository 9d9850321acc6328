"""The documentation site (mkdocs.yml) builds without warnings and broken links."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlencode, urljoin, urlsplit

import pytest

from tests.support.browser import installed_browser
from tests.ui.conftest import ARGUMENTS

ROOT = Path(__file__).parents[2]
# The expected first result of each search.
GUIDES = {
    "authentication": "/start/faq/",
    "API key": "/start/faq/",
    "return an image": "/start/faq/",
    "image response": "/start/faq/",
    "memory limit": "/start/faq/",
    "limit memory": "/start/faq/",
    "out of memory": "/start/faq/",
    "text classification": "/start/text-classifier/",
    "vocabulary": "/start/text-classifier/",
    "nginx": "/start/faq/",
    "path prefix": "/start/faq/",
    "reverse proxy": "/start/faq/",
    "rollback": "/start/faq/",
    "canary": "/guides/routing/",
    "quantization": "/guides/optimize/",
    "streaming": "/guides/serving-modes/",
    "CORS": "/guides/http-api/",
    "upgrade": "/start/faq/",
    "https": "/reference/configuration/",
    "GPU": "/start/faq/",
    "batch size": "/start/faq/",
    "batching": "/start/faq/",
    "health check": "/start/faq/",
    "timeout": "/start/faq/",
}


class Html(HTMLParser):
    """The links, the loaded files and the anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.anchors.update(filter(None, (attributes.get("id"), attributes.get("name"))))
        if url := attributes.get("href") or attributes.get("src"):
            (self.links if tag == "a" else self.loads).append(url)


def is_internal(url: str) -> bool:
    return not urlsplit(url).scheme and not urlsplit(url).netloc


def leads_somewhere(url: str, page: Path, site: Path, pages: dict[Path, Html]) -> bool:
    parts = urlsplit(url)
    path = unquote(parts.path)
    target = (
        ((site / path[1:]) if path.startswith("/") else page.parent / path).resolve()
        if path
        else page
    )
    target = target / "index.html" if target.is_dir() else target
    return target.is_file() and (
        target not in pages or unquote(parts.fragment) in pages[target].anchors
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = tmp_path_factory.mktemp("documentation").resolve() / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", site]
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    return site


@pytest.mark.usefixtures("processes")
def test_the_site_builds_strictly_and_its_links_are_valid(site: Path) -> None:
    pages = {path: Html(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    checked_links = [
        (path, url)
        for path, page in pages.items()
        for url in {*page.links, *page.loads}
        if is_internal(url)
    ]
    assert len(checked_links) > 1000
    assert [
        (str(path), url)
        for path, url in checked_links
        if not leads_somewhere(url, path, site, pages)
    ] == []
    assert "url=../guides/archive/" in (site / "archive" / "index.html").read_text(), (
        "addresses of before docs/ had folders"
    )
    from_elsewhere = [url for page in pages.values() for url in page.loads if urlsplit(url).netloc]
    assert from_elsewhere == [], "readers' browsers would ask other hosts for parts of a page"


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Write no access log."""


@contextmanager
def served(site: Path) -> Iterator[str]:
    handler = functools.partial(QuietHandler, directory=site)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.slow
@pytest.mark.usefixtures("processes")
def test_a_search_finds_the_guide_first(site: Path) -> None:
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="needs playwright, which the extra `dev` installs"
    )
    program = installed_browser()
    if program is None:
        pytest.skip("needs a browser, which scripts/install-browser installs")
    with served(site) as address, sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=ARGUMENTS)
        try:
            page = browser.new_page()
            assert {query: first_result(page, address, query) for query in GUIDES} == GUIDES
        finally:
            browser.close()


def first_result(page: Any, address: str, query: str) -> str:
    page.goto(f"{address}?{urlencode({'q': query})}")
    page.locator(".md-search-result__meta", has_text="matching").wait_for(state="attached")
    link = page.locator("a.md-search-result__link").first.get_attribute("href")
    return urlsplit(urljoin(page.url, link)).path
