"""A real HTTP server that serves archives, and whatever else a test wants of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

CONTENT = bytes(range(256)) * 4096  # 1 MiB


@pytest.fixture(autouse=True)
def no_proxies(without_proxies: None) -> None:
    """But those that a test names."""


@dataclass
class Site:
    port: int
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)  # path, headers
    # True where it has answered itself.
    answer: Callable[[BaseHTTPRequestHandler], bool] = lambda request: False

    def url(self, path: str = "/m.mar", host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"


@pytest.fixture
def site() -> Iterator[Site]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found.requests.append((self.path, dict(self.headers)))
            if found.answer(self):
                return
            start = (
                int(self.headers["Range"].removeprefix("bytes=").rstrip("-"))
                if "Range" in self.headers
                else 0
            )
            self.send_response(206 if start else 200)
            self.send_header("ETag", '"one"')
            if start:
                self.send_header(
                    "Content-Range", f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}"
                )
            self.send_header("Content-Length", str(len(CONTENT) - start))
            self.end_headers()
            self.wfile.write(CONTENT[start:])

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    found = Site(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield found
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def part(tmp_path: Path) -> Path:
    return tmp_path / "m.part"
