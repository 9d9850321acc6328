"""Downloads from a real HTTP server: complete, resumed, redirected, too large, and refused."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.runtime.sources.conftest import CONTENT, Site, http_server, send
from tests.support.certificates import make_certificate
from tsx_runtime.errors import DownloadFailed, ModelNotFound
from tsx_runtime.sources.http_download import download
from tsx_runtime.sources.urls import AllowList, Rules, parse_url


def fetch(
    site: Site,
    part_file: Path,
    url: str = "",
    *,
    max_bytes: int = 1 << 30,
    private: bool = True,
    allowed: str = "",
    patience: float | None = None,
) -> bytes:
    """Download a URL of the site and return its content."""
    allow_list = AllowList([allowed or f"127.0.0.1:{site.port}"])
    rules = Rules(allow_list.check, lambda url: private, max_bytes, pause_s=0.0)
    rules = rules if patience is None else rules._replace(grace_s=patience)
    download(parse_url(url or site.url()), part_file, rules)
    return part_file.read_bytes()


def test_a_downloaded_file_is_private(site: Site, part_file: Path) -> None:
    assert fetch(site, part_file) == CONTENT
    assert part_file.stat().st_mode & 0o777 == 0o600
    assert [path for path, _ in site.requests] == ["/m.mar"]
    assert list(part_file.parent.iterdir()) == [part_file]


def test_a_broken_transfer_is_resumed(site: Site, part_file: Path) -> None:
    def break_off(request) -> bool:
        if len(site.requests) > 1:
            return False
        return send(request, 200, CONTENT[:300_000], ETag='"one"', Content_Length=len(CONTENT))

    site.answer = break_off
    assert fetch(site, part_file) == CONTENT
    headers = site.requests[1][1]
    assert (headers["Range"], headers["If-Range"]) == ("bytes=300000-", '"one"')


def test_a_transfer_of_an_earlier_process_is_resumed(site: Site, part_file: Path) -> None:
    part_file.write_bytes(CONTENT[:1000])
    part_file.with_name("m.part.validator").write_text('"one"')
    assert fetch(site, part_file) == CONTENT
    assert site.requests[0][1]["Range"] == "bytes=1000-"


def test_a_file_that_changed_is_downloaded_again(site: Site, part_file: Path) -> None:
    part_file.write_bytes(b"of an older file")
    part_file.with_name("m.part.validator").write_text('"zero"')
    # The If-Range condition fails, so the response is the whole file.
    site.answer = lambda request: send(request, 200, b"new", Content_Length=3)
    assert fetch(site, part_file) == b"new"


def test_a_busy_server_is_retried_without_logging_the_signature(
    site: Site, part_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site.answer = lambda request: len(site.requests) < 3 and request.send_error(503) is None
    assert fetch(site, part_file, site.url("/m.mar?signature=secret")) == CONTENT
    assert "/m.mar: the server answers 503; trying again" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize(("status", "attempts"), [(401, 1), (403, 1), (404, 1), (410, 1), (503, 5)])
def test_refusals_are_reported_at_once_and_busy_servers_after_retries(
    site: Site, part_file: Path, status: int, attempts: int
) -> None:
    site.answer = lambda request: request.send_error(status) is None
    with pytest.raises(DownloadFailed, match=f"the server answers {status}"):
        fetch(site, part_file)
    assert len(site.requests) == attempts


def test_a_refused_connection_is_reported(site: Site, part_file: Path, free_ports) -> None:
    (port,) = free_ports(1)
    with pytest.raises(DownloadFailed, match=r"^\[Errno \d+\] Connection refused$"):
        fetch(site, part_file, f"http://127.0.0.1:{port}/m.mar", allowed=f"127.0.0.1:{port}")


def test_a_repeatedly_broken_transfer_reports_the_missing_bytes(
    site: Site, part_file: Path
) -> None:
    site.answer = lambda request: send(request, 200, b"x" * 40, Content_Length=100)
    with pytest.raises(DownloadFailed, match=r"^the connection ended 60 bytes before"):
        fetch(site, part_file)


def test_a_file_announced_as_too_large_is_not_downloaded(site: Site, part_file: Path) -> None:
    reason = f"it has {len(CONTENT)} bytes, but max_archive_size is 1000"
    with pytest.raises(DownloadFailed, match=reason):
        fetch(site, part_file, max_bytes=1000)
    assert not part_file.exists()


def test_a_file_that_becomes_too_large_is_aborted(site: Site, part_file: Path) -> None:
    def endless(request) -> bool:
        send(request)
        try:
            while True:
                request.wfile.write(CONTENT)
        except OSError:
            return True

    site.answer = endless
    with pytest.raises(DownloadFailed, match="it has more than 5000000 bytes"):
        fetch(site, part_file, max_bytes=5_000_000)
    assert not list(part_file.parent.iterdir())


@pytest.mark.parametrize("tag", ['"one"', ""])
def test_an_abandoned_transfer_leaves_a_file_only_if_resumable(
    site: Site, part_file: Path, tag: str
) -> None:
    def break_off(request) -> bool:
        if "Range" in request.headers:
            return request.send_error(503) is None
        validator = {"ETag": tag} if tag else {}
        return send(request, 200, CONTENT[:1000], Content_Length=len(CONTENT), **validator)

    site.answer = break_off
    with pytest.raises(DownloadFailed):
        fetch(site, part_file)
    files = {path.name for path in part_file.parent.iterdir()}
    assert files == ({"m.part", "m.part.validator"} if tag else set())


def drip(first: bytes):
    """Return a responder that sends `first` at once and then single bytes forever."""

    def answer(request) -> bool:
        request.wfile.write(first)
        try:
            while not threading.Event().wait(0.01):
                request.wfile.write(b"x")
        except OSError:
            pass
        request.close_connection = True
        return True

    return answer


@pytest.mark.slow
@pytest.mark.parametrize(
    "head",
    [b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n"],
)
def test_a_dripping_server_is_abandoned(site: Site, part_file: Path, head: bytes) -> None:
    site.answer = drip(head)
    with pytest.raises(DownloadFailed, match=r"the download is too slow: .* bytes in"):
        fetch(site, part_file, patience=0.3)


def test_a_server_that_sends_a_byte_per_connection_is_abandoned(
    site: Site, part_file: Path
) -> None:
    def send_byte(request) -> bool:
        size = part_file.stat().st_size if part_file.exists() else 0
        headers = {"Content_Range": f"bytes {size}-100000/100001"} if size else {}
        status = 206 if size else 200
        return send(request, status, b"x", ETag='"one"', Content_Length=100_000, **headers)

    site.answer = send_byte
    with pytest.raises(DownloadFailed, match="the download is too slow:"):
        fetch(site, part_file, patience=0.3)


def test_a_server_with_a_dripping_head_is_abandoned(
    site: Site, part_file: Path, monkeypatch: pytest.MonkeyPatch, until
) -> None:
    monkeypatch.setattr("tsx_runtime.sources.http_download.HEAD_TIMEOUT_S", 0.1)
    site.answer = drip(b"HTTP/1.1 200 OK\r\nX-Long: ")
    with pytest.raises(DownloadFailed):
        fetch(site, part_file)
    # The server may read a request after its client has left.
    until(lambda: len(site.requests) == 5)


def test_resuming_with_a_different_file_restarts_the_download(site: Site, part_file: Path) -> None:
    """Use a server that ignores If-Range."""
    part_file.write_bytes(b"older file, ")
    part_file.with_name("m.part.validator").write_text('"zero"')
    assert fetch(site, part_file) == CONTENT
    assert ["Range" in headers for _, headers in site.requests] == [True, False]


def redirect(site: Site, target: str) -> None:
    def answer(request) -> bool:
        return request.path == "/m.mar" and send(request, 302, Location=target, Content_Length=0)

    site.answer = answer


def test_a_redirect_to_an_allowed_url_is_followed(site: Site, part_file: Path) -> None:
    redirect(site, "/elsewhere/m.mar")
    assert fetch(site, part_file) == CONTENT


@pytest.mark.parametrize(
    "target",
    [
        "http://localhost:{port}/x.mar",
        "http://evil.example/x.mar",
        "/a/%2e%2e/x.mar",
        "//evil.example/x.mar",
    ],
)
def test_a_redirect_to_a_disallowed_url_is_not_requested(
    site: Site, part_file: Path, target: str
) -> None:
    redirect(site, target.format(port=site.port))
    with pytest.raises(ModelNotFound):
        fetch(site, part_file)
    assert [path for path, _ in site.requests] == ["/m.mar"]


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("file:///etc/passwd.mar", "neither http nor https"),
        ("/m.mar", "redirects more than 5 times"),
    ],
)
def test_redirects_to_files_and_redirect_loops_are_refused(
    site: Site, part_file: Path, target: str, reason: str
) -> None:
    redirect(site, target)
    with pytest.raises(DownloadFailed, match=reason):
        fetch(site, part_file)


def test_an_allowed_name_that_resolves_to_loopback_is_refused(site: Site, part_file: Path) -> None:
    host = f"localhost:{site.port}"
    with pytest.raises(ModelNotFound, match="not a public one"):
        fetch(site, part_file, f"http://{host}/m.mar", private=False, allowed=host)
    assert not site.requests


def test_the_checked_address_is_the_connected_one(
    site: Site, part_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use a name server that gives another address the second time; it must not be asked again."""
    addresses = iter([["127.0.0.1"]])
    monkeypatch.setattr(
        "tsx_runtime.sources.http_download.resolve", lambda host, port: next(addresses)
    )
    host = f"rebinding.example:{site.port}"
    assert fetch(site, part_file, f"http://{host}/m.mar", allowed=host) == CONTENT
    assert site.requests[0][1]["Host"] == host


def test_an_unwritable_directory_is_reported(site: Site, tmp_path: Path) -> None:
    with pytest.raises(DownloadFailed, match="cannot be written"):
        fetch(site, tmp_path / "absent" / "m.part")


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("is_trusted", [True, False])
def test_the_tls_certificate_is_checked_against_the_name(
    tmp_path: Path, part_file: Path, monkeypatch: pytest.MonkeyPatch, is_trusted: bool
) -> None:
    certificate_pair = make_certificate(tmp_path)
    if is_trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate_pair.certificate))
    site = Site()
    with http_server(site.respond, certificate_pair) as site.port:
        url, allowed = site.url(host="localhost"), f"localhost:{site.port}"
        url = url.replace("http:", "https:")
        if is_trusted:
            assert fetch(site, part_file, url, allowed=allowed) == CONTENT
        else:
            with pytest.raises(DownloadFailed, match="CERTIFICATE_VERIFY_FAILED"):
                fetch(site, part_file, url, allowed=allowed)
