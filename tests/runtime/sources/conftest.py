"""A real HTTP server that serves archives and whatever else a test needs."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.certificates import Pair

CONTENT = bytes(range(256)) * 4096


@pytest.fixture(autouse=True)
def no_proxies(without_proxies: None) -> None:
    """Hide the proxy settings of this machine."""


@contextmanager
def http_server(
    respond: Callable[[BaseHTTPRequestHandler], object], certificate_pair: Pair | None = None
) -> Iterator[int]:
    """Serve GET and CONNECT, over TLS if there is a certificate, and yield the port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            respond(self)

        do_CONNECT = do_GET  # noqa: N815  # the name of the library

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if certificate_pair is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate_pair.certificate, certificate_pair.key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


def send(
    request: BaseHTTPRequestHandler, status: int = 200, body: bytes = b"", **headers: object
) -> bool:
    """Send a response with these headers and this much of a body."""
    request.send_response(status)
    for name, value in headers.items():
        request.send_header(name.replace("_", "-"), str(value))
    request.end_headers()
    request.wfile.write(body)
    return True


@dataclass
class Site:
    """A site that serves CONTENT at every path, unless `answer` responds and returns True."""

    port: int = 0
    # Paths and headers.
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    answer: Callable[[BaseHTTPRequestHandler], bool] = lambda request: False

    def url(self, path: str = "/m.mar", host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    def respond(self, request: BaseHTTPRequestHandler) -> None:
        self.requests.append((request.path, dict(request.headers)))
        if self.answer(request):
            return
        start = int(request.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
        headers = {"ETag": '"one"', "Content_Length": len(CONTENT) - start}
        if start:
            headers["Content_Range"] = f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}"
        send(request, 206 if start else 200, CONTENT[start:], **headers)


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    with http_server(site.respond) as site.port:
        yield site


@pytest.fixture
def part_file(tmp_path: Path) -> Path:
    return tmp_path / "m.part"
