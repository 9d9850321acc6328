"""Downloads from a real HTTP server: whole, in pieces, led astray, too large, and not at all."""

from __future__ import annotations

import ssl
import threading
import time
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import pytest

from tests.runtime.sources.conftest import CONTENT, Site
from tests.support.certificates import make_certificate
from tsx_runtime.errors import DownloadFailed, ModelNotFound
from tsx_runtime.sources.http_download import download
from tsx_runtime.sources.urls import AllowList, Rules, parse_url


def rules(
    site: Site, *, most: int = 1 << 30, private: bool = True, allowed: str | None = None
) -> Rules:
    return Rules(
        AllowList([allowed or f"127.0.0.1:{site.port}"]).check, lambda url: private, most, pause=0.0
    )


def send(request, status: int = 200, body: bytes = b"", **headers: object) -> bool:
    """Answer with these headers and this much of a body."""
    request.send_response(status)
    for name, value in headers.items():
        request.send_header(name.replace("_", "-"), str(value))
    request.end_headers()
    request.wfile.write(body)
    return True


def test_a_file_comes_whole(site: Site, part: Path) -> None:
    download(parse_url(site.url()), part, rules(site))
    assert part.read_bytes() == CONTENT
    assert part.stat().st_mode & 0o777 == 0o600
    assert [path for path, _ in site.requests] == ["/m.mar"]
    assert list(part.parent.iterdir()) == [part]


def test_a_broken_transfer_goes_on_where_it_broke_off(site: Site, part: Path) -> None:
    def break_off(request) -> bool:
        if len(site.requests) > 1:
            return False
        return send(request, 200, CONTENT[:300_000], ETag='"one"', Content_Length=len(CONTENT))

    site.answer = break_off
    download(parse_url(site.url()), part, rules(site))
    assert part.read_bytes() == CONTENT
    again = site.requests[1][1]
    assert (again["Range"], again["If-Range"]) == ("bytes=300000-", '"one"')


def test_a_transfer_of_an_earlier_process_goes_on(site: Site, part: Path) -> None:
    part.write_bytes(CONTENT[:1000])
    part.with_name("m.part.validator").write_text('"one"')
    download(parse_url(site.url()), part, rules(site))
    assert part.read_bytes() == CONTENT
    assert site.requests[0][1]["Range"] == "bytes=1000-"


def test_a_file_that_has_changed_meanwhile_is_started_again(site: Site, part: Path) -> None:
    part.write_bytes(b"of an older file")
    part.with_name("m.part.validator").write_text('"zero"')

    # If-Range does not hold
    site.answer = lambda request: send(request, 200, b"new", Content_Length=3)
    download(parse_url(site.url()), part, rules(site))
    assert part.read_bytes() == b"new"


def test_a_server_that_is_busy_is_asked_again_and_no_signature_is_logged(
    site: Site, part: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def busy(request) -> bool:
        if len(site.requests) < 3:
            request.send_error(503)
            return True
        return False

    site.answer = busy
    download(parse_url(site.url("/m.mar?signature=secret")), part, rules(site))
    assert part.read_bytes() == CONTENT
    assert "/m.mar: the server answers 503; trying again" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize("status", [401, 403, 404, 410])
def test_a_refusal_is_reported_at_once(site: Site, part: Path, status: int) -> None:
    site.answer = lambda request: request.send_error(status) is None
    with pytest.raises(DownloadFailed, match=f"the server answers {status}"):
        download(parse_url(site.url()), part, rules(site))
    assert len(site.requests) == 1


def test_a_server_that_stays_busy_is_given_up(site: Site, part: Path) -> None:
    site.answer = lambda request: request.send_error(503) is None
    with pytest.raises(DownloadFailed, match="the server answers 503"):
        download(parse_url(site.url()), part, rules(site))
    assert len(site.requests) == 5


def test_nobody_listens(site: Site, part: Path, free_ports) -> None:
    (port,) = free_ports(1)
    with pytest.raises(DownloadFailed, match=r"^\[Errno \d+\] Connection refused$"):
        download(
            parse_url(f"http://127.0.0.1:{port}/m.mar"),
            part,
            rules(site, allowed=f"127.0.0.1:{port}"),
        )


def test_a_connection_that_always_breaks_is_reported_in_words(site: Site, part: Path) -> None:
    site.answer = lambda request: send(request, 200, b"x" * 40, Content_Length=100)
    with pytest.raises(
        DownloadFailed, match=r"^the connection ended 60 bytes before the end of the file$"
    ):
        download(parse_url(site.url()), part, rules(site))


def test_a_file_that_says_it_is_too_large_is_not_begun(site: Site, part: Path) -> None:
    with pytest.raises(
        DownloadFailed, match=f"it has {len(CONTENT)} bytes, but max_archive_size is 1000"
    ):
        download(parse_url(site.url()), part, rules(site, most=1000))
    assert not part.exists()


def test_a_file_that_grows_too_large_is_stopped(site: Site, part: Path) -> None:
    def endless(request) -> bool:
        request.send_response(200)
        request.end_headers()
        try:
            while True:
                request.wfile.write(CONTENT)
        except OSError:
            return True

    site.answer = endless
    with pytest.raises(DownloadFailed, match="it has more than 5000000 bytes"):
        download(parse_url(site.url()), part, rules(site, most=5_000_000))
    assert not list(part.parent.iterdir())


@pytest.mark.parametrize("tag", ['"one"', ""])
def test_of_a_transfer_that_is_given_up_only_what_can_be_gone_on_with_is_left(
    site: Site, part: Path, tag: str
) -> None:
    def break_off(request) -> bool:
        if "Range" in request.headers:
            return request.send_error(503) is None
        tagged = {"ETag": tag} if tag else {}
        return send(request, 200, CONTENT[:1000], Content_Length=len(CONTENT), **tagged)

    site.answer = break_off
    with pytest.raises(DownloadFailed):
        download(parse_url(site.url()), part, rules(site))
    assert {path.name for path in part.parent.iterdir()} == (
        {"m.part", "m.part.validator"} if tag else set()
    )


def drip(*first: bytes):
    """A server that sends these at once, then a byte now and then without end."""

    def answer(request) -> bool:
        request.wfile.write(b"".join(first))
        try:
            while not threading.Event().wait(0.01):
                request.wfile.write(b"x")
        except OSError:
            pass
        request.close_connection = True
        return True

    return answer


@pytest.mark.parametrize(
    "head",
    [b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n"],
)
def test_a_server_that_drips_is_not_waited_for(site: Site, part: Path, head: bytes) -> None:
    site.answer = drip(head)
    with pytest.raises(DownloadFailed, match=r"the download is too slow: .* bytes in"):
        download(parse_url(site.url()), part, rules(site)._replace(patience=0.3))


def test_a_server_that_brings_a_little_on_each_connection_is_not_waited_for(
    site: Site, part: Path
) -> None:
    def a_byte(request) -> bool:
        have = part.stat().st_size if part.exists() else 0
        more = {"Content_Range": f"bytes {have}-100000/100001"} if have else {}
        status = 206 if have else 200
        return send(request, status, b"x", ETag='"one"', Content_Length=100_000, **more)

    site.answer = a_byte
    with pytest.raises(DownloadFailed, match="the download is too slow:"):
        download(parse_url(site.url()), part, rules(site)._replace(patience=0.3))


def test_a_server_whose_head_drips_is_cut_off(
    site: Site, part: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tsx_runtime.sources.http_download.HEAD_TIMEOUT", 0.1)
    site.answer = drip(b"HTTP/1.1 200 OK\r\nX-Long: ")
    with pytest.raises(DownloadFailed):
        download(parse_url(site.url()), part, rules(site))
    end = time.monotonic() + 60
    while len(site.requests) < 5:  # it may come to a request after its client has gone
        assert time.monotonic() < end
        time.sleep(0.01)
    assert len(site.requests) == 5


def test_a_server_that_goes_on_with_another_file_is_asked_for_all_of_it(
    site: Site, part: Path
) -> None:
    """It is given If-Range, and does not heed it."""
    part.write_bytes(b"older file, ")
    part.with_name("m.part.validator").write_text('"zero"')
    download(parse_url(site.url()), part, rules(site))
    assert part.read_bytes() == CONTENT
    assert ["Range" in headers for _, headers in site.requests] == [True, False]


def redirect(site: Site, target: str):
    def answer(request) -> bool:
        return request.path == "/m.mar" and send(request, 302, Location=target, Content_Length=0)

    site.answer = answer


def test_a_redirect_to_an_allowed_url_is_followed(site: Site, part: Path) -> None:
    redirect(site, "/elsewhere/m.mar")
    download(parse_url(site.url()), part, rules(site))
    assert part.read_bytes() == CONTENT


@pytest.mark.parametrize(
    "target",
    [
        "http://localhost:{port}/x.mar",
        "http://evil.example/x.mar",
        "/a/%2e%2e/x.mar",
        "//evil.example/x.mar",
    ],
)
def test_a_redirect_to_one_that_is_not_is_refused_unasked(
    site: Site, part: Path, target: str
) -> None:
    redirect(site, target.format(port=site.port))
    with pytest.raises(ModelNotFound):
        download(parse_url(site.url()), part, rules(site))
    assert [path for path, _ in site.requests] == ["/m.mar"]


def test_a_redirect_to_a_file_is_refused(site: Site, part: Path) -> None:
    redirect(site, "file:///etc/passwd.mar")
    with pytest.raises(DownloadFailed, match="neither http nor https"):
        download(parse_url(site.url()), part, rules(site))


def test_redirects_in_a_circle_end(site: Site, part: Path) -> None:
    redirect(site, "/m.mar")
    with pytest.raises(DownloadFailed, match="redirects more than 5 times"):
        download(parse_url(site.url()), part, rules(site))


def test_an_allowed_name_that_leads_to_this_machine_is_not_connected_to(
    site: Site, part: Path
) -> None:
    with pytest.raises(ModelNotFound, match="not a public one"):
        download(
            parse_url(site.url(host="localhost")),
            part,
            rules(site, private=False, allowed=f"localhost:{site.port}"),
        )
    assert not site.requests


def test_the_address_that_was_looked_at_is_the_one_connected_to(
    site: Site, part: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name server that answers differently the second time must find nobody who asks."""
    answers = iter([["127.0.0.1"]])
    monkeypatch.setattr(
        "tsx_runtime.sources.http_download.addresses_of", lambda host, port: next(answers)
    )
    download(
        parse_url(site.url(host="rebinding.example")),
        part,
        rules(site, allowed=f"rebinding.example:{site.port}"),
    )
    assert part.read_bytes() == CONTENT
    assert site.requests[0][1]["Host"] == f"rebinding.example:{site.port}"


def test_a_directory_that_cannot_be_written_is_reported(site: Site, tmp_path: Path) -> None:
    with pytest.raises(DownloadFailed, match="cannot be written"):
        download(parse_url(site.url()), tmp_path / "absent" / "m.part", rules(site))


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("trusted", [True, False])
def test_tls_is_checked_against_the_name(
    tmp_path: Path, part: Path, monkeypatch: pytest.MonkeyPatch, trusted: bool
) -> None:
    pair = make_certificate(tmp_path)
    (tmp_path / "m.mar").write_bytes(b"over tls")
    server = HTTPServer(
        ("127.0.0.1", 0),
        lambda *arguments: SimpleHTTPRequestHandler(*arguments, directory=str(tmp_path)),
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(pair.certificate))
    port = server.server_address[1]
    held = Rules(AllowList([f"localhost:{port}"]).check, lambda url: True, 1 << 20, pause=0.0)
    try:
        if trusted:
            download(parse_url(f"https://localhost:{port}/m.mar"), part, held)
            assert part.read_bytes() == b"over tls"
        else:
            with pytest.raises(DownloadFailed, match="CERTIFICATE_VERIFY_FAILED"):
                download(parse_url(f"https://localhost:{port}/m.mar"), part, held)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
