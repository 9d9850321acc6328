"""Downloads through a real proxy, which records its requests and tunnels them to one server."""

from __future__ import annotations

import base64
import select
import socket
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from tests.runtime.sources.conftest import http_server, send
from tests.support.certificates import make_certificate
from tsx_runtime.errors import DownloadFailed, ModelNotFound
from tsx_runtime.sources.addresses import proxy_for
from tsx_runtime.sources.http_download import download
from tsx_runtime.sources.urls import Rules, parse_url

HOST = "models.example"
PUBLIC = "93.184.215.14"


@dataclass
class Proxy:
    """A proxy; all its tunnels lead to the port `target`."""

    port: int = 0
    target: int = 0
    # Method, target and login.
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    refuses: bool = False

    def respond(self, request: BaseHTTPRequestHandler) -> None:
        login = request.headers["Proxy-Authorization"]
        self.requests.append((request.command, request.path, login))
        if request.command == "GET":
            send(request, 200, b"forwarded", Content_Length=9)
        elif self.refuses:
            request.send_error(403)
        else:
            with closing(socket.create_connection(("127.0.0.1", self.target))) as server:
                send(request)
                pump(request.connection, server)


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Run a proxy that the environment variables name."""
    proxy = Proxy()
    with http_server(proxy.respond) as proxy.port:
        for name in ("HTTP_PROXY", "HTTPS_PROXY"):
            monkeypatch.setenv(name, f"http://someone:s%40crt@127.0.0.1:{proxy.port}")
        yield proxy


def pump(client: socket.socket, server: socket.socket) -> None:
    """Forward bytes in both directions until one end closes."""
    while True:
        for ready in select.select([client, server], [], [])[0]:
            data = ready.recv(65536)
            if not data:
                return
            (server if ready is client else client).sendall(data)


@pytest.fixture
def tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proxy: Proxy) -> Iterator[None]:
    """Run a server with a certificate for HOST, to which the proxy's tunnels lead."""
    certificate_pair = make_certificate(tmp_path, hosts=f"DNS:{HOST}")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate_pair.certificate))

    def respond(request: BaseHTTPRequestHandler) -> None:
        body = f"tls for {request.headers['Host']}".encode()
        send(request, 200, body, Content_Length=len(body))

    with http_server(respond, certificate_pair) as proxy.target:
        yield


def fetch(url: str, part_file: Path, *, private: bool = True) -> bytes:
    """Download a URL, by default from private addresses too, and return its content."""
    download(
        parse_url(url),
        part_file,
        Rules(lambda url: None, lambda url: private, 1 << 20, pause_s=0.0),
    )
    return part_file.read_bytes()


def resolve_to(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setattr("tsx_runtime.sources.http_download.resolve", lambda host, port: [address])


@pytest.mark.usefixtures("processes", "tls")
def test_https_uses_the_proxy_with_the_checked_address(
    proxy: Proxy, part_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve_to(monkeypatch, PUBLIC)
    assert fetch(f"https://{HOST}/m.mar", part_file, private=False) == f"tls for {HOST}".encode()
    login = "Basic " + base64.b64encode(b"someone:s@crt").decode()
    assert proxy.requests == [("CONNECT", f"{PUBLIC}:443", login)]


def test_a_name_that_resolves_to_loopback_is_not_sent_to_the_proxy(
    proxy: Proxy, part_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve_to(monkeypatch, "127.0.0.1")
    for scheme in ("http", "https"):
        with pytest.raises(ModelNotFound, match="not a public one"):
            fetch(f"{scheme}://{HOST}/m.mar", part_file, private=False)
    assert not proxy.requests


def test_http_is_refused_if_the_proxy_would_resolve_the_name_again(
    proxy: Proxy, part_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve_to(monkeypatch, PUBLIC)
    with pytest.raises(DownloadFailed, match="use https, name the host in allowed_urls, or"):
        fetch(f"http://{HOST}/m.mar", part_file, private=False)
    assert not proxy.requests


@pytest.mark.usefixtures("processes", "tls")
def test_the_proxy_gets_the_host_name_if_any_address_is_allowed(
    proxy: Proxy, part_file: Path
) -> None:
    assert fetch(f"http://{HOST}:8000/m.mar?x=1", part_file) == b"forwarded"
    assert fetch(f"https://{HOST}/m.mar", part_file) == f"tls for {HOST}".encode()
    assert [(method, target) for method, target, _ in proxy.requests] == [
        ("GET", f"http://{HOST}:8000/m.mar?x=1"),
        ("CONNECT", f"{HOST}:443"),
    ]


@pytest.mark.slow
def test_a_refusing_proxy_is_reported_without_its_password(proxy: Proxy, part_file: Path) -> None:
    proxy.refuses = True
    with pytest.raises(DownloadFailed, match="403 Forbidden") as exc_info:
        fetch(f"https://{HOST}/m.mar", part_file)
    assert "crt" not in str(exc_info.value)


@pytest.mark.slow
def test_an_unsupported_proxy_type_is_reported(
    part_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "socks5://127.0.0.1:1080")
    with pytest.raises(DownloadFailed, match="socks5"):
        fetch(f"https://{HOST}/m.mar", part_file)


@pytest.mark.parametrize(
    ("environment", "url", "proxy"),
    [
        ({}, "https://a/m.mar", None),
        ({"HTTPS_PROXY": "http://p:1"}, "https://a/m.mar", "http://p:1"),
        ({"https_proxy": "p:1"}, "https://a/m.mar", "http://p:1"),
        ({"HTTPS_PROXY": "http://p:1"}, "http://a/m.mar", None),
        ({"ALL_PROXY": "http://p:1"}, "http://a/m.mar", "http://p:1"),
        (
            {"HTTPS_PROXY": "http://p:1", "NO_PROXY": "example.com"},
            "https://models.example.com/m.mar",
            None,
        ),
        ({"HTTPS_PROXY": "http://p:1", "NO_PROXY": "a:8443"}, "https://a:8443/m.mar", None),
        ({"HTTPS_PROXY": "http://p:1", "NO_PROXY": "*"}, "https://a/m.mar", None),
        ({"HTTPS_PROXY": ""}, "https://a/m.mar", None),
    ],
)
def test_the_proxy_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], url: str, proxy: str | None
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert proxy_for(parse_url(url)) == proxy
