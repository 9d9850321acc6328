"""Files of chats from URLs, which the setting `allowed_urls` must permit."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from tests.runtime.sources.conftest import http_server, send
from tests.support.multimodal_models import png
from tsx_runtime.features.generation.worker import media_files
from tsx_runtime.features.generation.worker.media_files import UrlSettings, fetch
from tsx_runtime.worker.exceptions import InvalidInput

IMAGE = png()


@pytest.fixture
def port(without_proxies: None) -> Iterator[int]:
    """Serve an image at any path, and a redirect at /away."""

    def respond(request: BaseHTTPRequestHandler) -> None:
        if request.path == "/away":
            send(request, 302, Location="http://localhost:1/other.png", Content_Length=0)
        else:
            send(request, 200, IMAGE, Content_Length=len(IMAGE))

    with http_server(respond) as port:
        yield port


def settings_for(port: int) -> UrlSettings:
    return UrlSettings([f"127.0.0.1:{port}"])


def test_a_file_at_an_allowed_url_is_read(port: int) -> None:
    assert fetch(f"http://127.0.0.1:{port}/a.png", settings_for(port)) == IMAGE


def test_other_urls_and_redirects_to_them_are_refused(port: int, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(IMAGE)
    patterns = UrlSettings(["http.*", "file.*"])
    for url, settings, reason in (
        (f"http://127.0.0.1:{port}/a.png", UrlSettings(), "allowed_urls does not have it"),
        (f"http://127.0.0.1:{port}/away", settings_for(port), "allowed_urls does not have it"),
        (f"http://127.0.0.1:{port}/a.png", patterns, "not a public one"),
        (f"file://{tmp_path}/a.png", patterns, "allowed_urls does not have it"),
        (f"http://u@127.0.0.1:{port}/a.png", settings_for(port), "user name"),
    ):
        with pytest.raises(InvalidInput, match=reason):
            fetch(url, settings)


def test_a_file_that_is_too_large_or_late_is_refused(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"http://127.0.0.1:{port}/a.png"
    monkeypatch.setattr(media_files, "MAX_FETCHED_BYTES", 100)
    with pytest.raises(InvalidInput, match="the limit for images and sounds is 100"):
        fetch(url, settings_for(port))
    monkeypatch.setattr(media_files, "MAX_FETCHED_BYTES", 1 << 20)
    monkeypatch.setattr(media_files, "MAX_FETCH_S", -1.0)
    with pytest.raises(InvalidInput, match="took more than"):
        fetch(url, settings_for(port))
