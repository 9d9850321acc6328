"""The documentation as a site (mkdocs.yml): it builds without a warning, and every link of it leads somewhere."""

from __future__ import annotations

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[2]


class Html(HTMLParser):
    """What a page links to, what it loads, and the anchors that it has."""

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
    target = ((site / path[1:]) if path.startswith("/") else page.parent / path).resolve() if path else page
    target = target / "index.html" if target.is_dir() else target
    return target.is_file() and (target not in pages or unquote(parts.fragment) in pages[target].anchors)


@pytest.mark.usefixtures("processes")
def test_site_builds_strictly_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    site = tmp_path.resolve() / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", site]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr

    pages = {path: Html(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    followed = [(path, url) for path, page in pages.items() for url in {*page.links, *page.loads} if is_internal(url)]
    assert len(followed) > 1000
    assert [(str(path), url) for path, url in followed if not leads_somewhere(url, path, site, pages)] == []
    from_elsewhere = [url for page in pages.values() for url in page.loads if urlsplit(url).netloc]
    assert from_elsewhere == [], "readers' browsers would ask other hosts for parts of a page"
