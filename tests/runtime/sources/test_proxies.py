"""Downloads by way of a proxy: a real one, which writes down what it is asked and leads everything
to one server.
"""

from __future__ import annotations

import base64
import select
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.certificates import make_certificate
from tsx_runtime.errors import DownloadFailed, ModelNotFound
from tsx_runtime.sources.addresses import proxy_for
from tsx_runtime.sources.http_download import download
from tsx_runtime.sources.urls import Rules, parse_url

HOST = "models.example"
PUBLIC = "93.184.215.14"


@dataclass
class Proxy:
    port: int
    behind: int = 0  # the port that every tunnel leads to
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)  # method, target, login
    refuses: bool = False


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Named by the environment."""

    class Handler(BaseHTTPRequestHandler):
        def _note(self) -> None:
            found.asked.append((self.command, self.path, self.headers["Proxy-Authorization"]))

        def do_GET(self) -> None:
            self._note()
            self.send_response(200)
            self.send_header("Content-Length", "9")
            self.end_headers()
            self.wfile.write(b"forwarded")

        def do_CONNECT(self) -> None:
            self._note()
            if found.refuses:
                self.send_error(403)
                return
            with closing(socket.create_connection(("127.0.0.1", found.behind))) as server:
                self.send_response(200)
                self.end_headers()
                pump(self.connection, server)

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    found = Proxy(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    for name in ("HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, f"http://someone:s%40crt@127.0.0.1:{found.port}")
    yield found
    server.shutdown()
    thread.join()
    server.server_close()


def pump(one: socket.socket, other: socket.socket) -> None:
    while True:
        for ready in select.select([one, other], [], [])[0]:
            data = ready.recv(65536)
            if not data:
                return
            (other if ready is one else one).sendall(data)


@pytest.fixture
def tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proxy: Proxy) -> Iterator[None]:
    """A server with a certificate for HOST, where the proxy's tunnels end."""
    pair = make_certificate(tmp_path, hosts=f"DNS:{HOST}")
    monkeypatch.setenv("SSL_CERT_FILE", str(pair.certificate))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = f"tls for {self.headers['Host']}".encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    proxy.behind = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield
    server.shutdown()
    thread.join()
    server.server_close()


def rules(*, private: bool) -> Rules:
    return Rules(lambda url: None, lambda url: private, 1 << 20, pause=0.0)


def looked_up(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setattr(
        "tsx_runtime.sources.http_download.addresses_of", lambda host, port: [address]
    )


@pytest.mark.usefixtures("processes")
def test_https_goes_by_the_proxy_to_the_address_that_was_looked_at(
    proxy: Proxy, tls: None, part: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up(monkeypatch, PUBLIC)
    download(parse_url(f"https://{HOST}/m.mar"), part, rules(private=False))
    assert part.read_bytes() == f"tls for {HOST}".encode()
    login = "Basic " + base64.b64encode(b"someone:s@crt").decode()
    assert proxy.asked == [("CONNECT", f"{PUBLIC}:443", login)]


def test_a_name_that_leads_to_this_machine_is_not_asked_of_the_proxy_either(
    proxy: Proxy, part: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up(monkeypatch, "127.0.0.1")
    for scheme in ("http", "https"):
        with pytest.raises(ModelNotFound, match="not a public one"):
            download(parse_url(f"{scheme}://{HOST}/m.mar"), part, rules(private=False))
    assert not proxy.asked


def test_http_is_not_asked_of_a_proxy_that_would_look_the_name_up_again(
    proxy: Proxy, part: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up(monkeypatch, PUBLIC)
    with pytest.raises(
        DownloadFailed,
        match="use https, name the host in allowed_urls, or set allow_private_urls=true",
    ):
        download(parse_url(f"http://{HOST}/m.mar"), part, rules(private=False))
    assert not proxy.asked


@pytest.mark.usefixtures("processes")
def test_where_any_address_will_do_the_proxy_gets_the_name(
    proxy: Proxy, tls: None, part: Path
) -> None:
    download(parse_url(f"http://{HOST}:8000/m.mar?x=1"), part, rules(private=True))
    assert part.read_bytes() == b"forwarded"
    download(parse_url(f"https://{HOST}/m.mar"), part, rules(private=True))
    assert part.read_bytes() == f"tls for {HOST}".encode()
    assert [(method, target) for method, target, _ in proxy.asked] == [
        ("GET", f"http://{HOST}:8000/m.mar?x=1"),
        ("CONNECT", f"{HOST}:443"),
    ]


def test_a_proxy_that_refuses_is_reported_without_its_password(proxy: Proxy, part: Path) -> None:
    proxy.refuses = True
    with pytest.raises(DownloadFailed, match="403 Forbidden") as caught:
        download(parse_url(f"https://{HOST}/m.mar"), part, rules(private=True))
    assert "crt" not in str(caught.value)


def test_a_proxy_of_another_kind_is_reported(part: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "socks5://127.0.0.1:1080")
    with pytest.raises(DownloadFailed, match="socks5"):
        download(parse_url(f"https://{HOST}/m.mar"), part, rules(private=True))


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
def test_the_environment_names_a_proxy(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], url: str, proxy: str | None
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert proxy_for(parse_url(url)) == proxy
