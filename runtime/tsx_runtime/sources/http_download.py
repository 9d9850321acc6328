"""Downloads of files over http and https.

A download checks each redirect, resumes an interrupted transfer, and limits the size.
"""

from __future__ import annotations

import email.utils
import logging
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urljoin

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import HTTPError, IncompleteRead, ProtocolError

from tsx_archiver.storage.private_directory import private_opener
from tsx_runtime.errors import DownloadFailed
from tsx_runtime.sources.addresses import check_public, proxy_for, resolve
from tsx_runtime.sources.urls import CHUNK_BYTES, ModelUrl, Rules, parse_url

MAX_REDIRECTS = 5
MAX_FAILURES = 5  # consecutive attempts without a transferred byte
TIMEOUT = urllib3.Timeout(connect=10, read=60)
HEAD_TIMEOUT_S = 30.0  # time limit for the complete head of a response
MIN_BYTES_PER_S = 10_000  # the average rate that is required after `Rules.grace_s`
REDIRECT_STATUSES = (301, 302, 303, 307, 308)
TRANSIENT_STATUSES = (408, 425, 429, 500, 502, 503, 504)

logger = logging.getLogger("tsx.sources")


class _Transient(Exception):
    """A failure after which a retry may succeed."""


def download(url: ModelUrl, part: Path, rules: Rules) -> None:
    """Write the file at `url` to `part`, or resume an earlier transfer of the same file.

    After a failure, `part` remains only if a later call can resume it.

    Raises:
        DownloadFailed: The transfer failed. `rules.check` may raise other errors.
    """
    try:
        _download(url, part, rules)
    except BaseException:
        if _read_validator(part) is None:
            part.unlink(missing_ok=True)
        raise


def post(url: ModelUrl, body: bytes, headers: Mapping[str, str], *, may_be_private: bool) -> int:
    """Post a body and return the status of the response, which may be a redirect.

    `may_be_private` tells whether the URL may lead to an address that is not public.

    Raises:
        DownloadFailed: The server cannot be reached.
        ModelNotFound: The address is not public, and `may_be_private` is false.
    """
    try:
        response = _request("POST", url, headers, body, may_be_private=may_be_private)
    except (_Transient, HTTPError, OSError) as error:
        raise DownloadFailed(_describe(error)) from error
    response.release_conn()
    response.close()
    return int(response.status)


def _download(url: ModelUrl, part: Path, rules: Rules) -> None:
    validator = _read_validator(part)
    failures = 0
    stall_guard = _StallGuard(rules.grace_s)
    while True:
        size = part.stat().st_size if part.exists() else 0
        try:
            validator = _transfer(url, part, validator, rules, stall_guard)
            _remove_validator(part)
            return
        except (_Transient, HTTPError, OSError) as error:
            if isinstance(error, OSError) and not isinstance(
                error, ssl.SSLError | ConnectionError | TimeoutError
            ):
                raise DownloadFailed(
                    f"it cannot be written to {part.parent} ({error.strerror or error})"
                ) from error
            validator = _read_validator(part)
            failures = 1 if part.exists() and part.stat().st_size > size else failures + 1
            if failures >= MAX_FAILURES or rules.stopped():
                raise DownloadFailed(_describe(error)) from error
            # The query may contain a signature, with which any reader of the log could download.
            shown_url = url.text.partition("?")[0]
            logger.warning("%s: %s; trying again", shown_url, _describe(error))
            # Sleeping is fine: this thread has no other work, and no event tells that a server
            # recovered.
            time.sleep(rules.pause_s * 2 ** (failures - 1))


class _StallGuard:
    """The minimum average rate of a download, over all of its connections."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._start = time.monotonic()
        self._bytes = 0

    def count(self, size: int) -> None:
        """Count received bytes.

        Raises:
            DownloadFailed: The average rate is too low.
        """
        self._bytes += size
        elapsed_s = time.monotonic() - self._start
        if elapsed_s > self._grace_s + self._bytes / MIN_BYTES_PER_S:
            raise DownloadFailed(
                f"the download is too slow: {self._bytes} bytes in {elapsed_s:.0f} s"
            )


class _TcpConnection(HTTPConnection):
    """A connection that is cut when the head of a response takes too long.

    The socket's timeout is not enough, because it restarts with each byte.
    """

    _is_timed_out = False

    def getresponse(self) -> Any:
        timer = threading.Timer(HEAD_TIMEOUT_S, self._shut_down)
        timer.daemon = True
        timer.start()
        try:
            response = super().getresponse()
        finally:
            timer.cancel()
        # http.client returned normally: it takes the end of the stream for the end of the head.
        if self._is_timed_out:
            raise ProtocolError(
                f"the headers of the answer did not arrive within {HEAD_TIMEOUT_S:g} s"
            )
        return response

    def _shut_down(self) -> None:
        self._is_timed_out = True
        with suppress(OSError):
            if self.sock is not None:
                self.sock.shutdown(socket.SHUT_RDWR)


class _TlsConnection(_TcpConnection, HTTPSConnection):
    """A TLS connection with this time limit."""


class _TcpPool(urllib3.HTTPConnectionPool):
    ConnectionCls = _TcpConnection


class _TlsPool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _TlsConnection


_POOLS = {"http": _TcpPool, "https": _TlsPool}


def _transfer(
    url: ModelUrl, part: Path, validator: str | None, rules: Rules, stall_guard: _StallGuard
) -> str | None:
    size = part.stat().st_size if validator and part.exists() else 0
    headers = {"Accept-Encoding": "identity", "User-Agent": "tsx", **rules.headers}
    if size and validator:
        headers |= {"Range": f"bytes={size}-", "If-Range": validator}
    for _ in range(MAX_REDIRECTS + 1):
        rules.check(url)
        response = _request("GET", url, headers, may_be_private=rules.may_be_private(url))
        try:
            if response.status not in REDIRECT_STATUSES:
                return _store(response, part, size, validator, rules, stall_guard)
            target = response.headers.get("Location", "")
        finally:
            response.release_conn()
            response.close()
        url = parse_url(urljoin(url.text, target.partition("#")[0]))
        if url.scheme not in ("http", "https"):
            raise DownloadFailed(f"it redirects to {url.text}, which is neither http nor https")
    raise DownloadFailed(f"it redirects more than {MAX_REDIRECTS} times")


def _request(
    method: str,
    url: ModelUrl,
    headers: Mapping[str, str],
    body: bytes | None = None,
    *,
    may_be_private: bool,
) -> Any:
    """Send a request to a checked address, directly or through a proxy.

    With `may_be_private` any address is accepted. A proxy then gets the host's name, because
    perhaps only the proxy can resolve it.
    """
    port = url.port or (443 if url.scheme == "https" else 80)
    proxy = proxy_for(url)
    addresses = [url.host] if proxy is not None and may_be_private else resolve(url.host, port)
    if not may_be_private:
        check_public(url.host, addresses)
        # The tunnel for https leads to the checked address, but a proxy for plain http resolves the
        # name again and could reach another address.
        if proxy is not None and url.scheme == "http":
            raise DownloadFailed(
                "the proxy resolves the host of an http URL again: use https, name the host in"
                " allowed_urls, or set allow_private_urls=true"
            )
    headers = {
        "Host": _url_host(url.host) if url.port is None else f"{_url_host(url.host)}:{url.port}",
        **headers,
    }
    last_error: Exception | None = None
    for address in addresses:
        try:
            return _send(method, url, address, port, proxy, headers, body)
        except (HTTPError, OSError) as error:
            last_error = error
    raise _Transient(_describe(last_error)) from last_error


def _send(
    method: str,
    url: ModelUrl,
    address: str,
    port: int,
    proxy: str | None,
    headers: Mapping[str, str],
    body: bytes | None,
) -> Any:
    """Send a request and return the response, whose body has not been read yet."""
    target = url.text.split("/", 3)
    path = "/" + (target[3] if len(target) > 3 else "")
    options: dict[str, Any] = {"timeout": TIMEOUT, "retries": False}
    if url.scheme == "https":
        options |= {
            "ssl_context": ssl.create_default_context(),
            "server_hostname": url.host,
            "assert_hostname": url.host,
        }
    if proxy is not None:
        user = urllib3.util.parse_url(proxy).auth
        login = urllib3.make_headers(proxy_basic_auth=unquote(user)) if user else None
        proxies = urllib3.ProxyManager(proxy, proxy_headers=login, **options)
        proxies.pool_classes_by_scheme = _POOLS
        address_url = f"{url.scheme}://{_url_host(address)}:{port}{path}"
        return proxies.request(
            method,
            address_url,
            body=body,
            headers=headers,
            redirect=False,
            preload_content=False,
            retries=False,
        )
    pool = _POOLS[url.scheme](address, port, **options)
    return pool.request(
        method, path, body=body, headers=headers, redirect=False, preload_content=False
    )


def _url_host(host: str) -> str:
    """Return the host as it appears in URLs and headers: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


def _store(
    response: Any,
    part: Path,
    size: int,
    old_validator: str | None,
    rules: Rules,
    stall_guard: _StallGuard,
) -> str | None:
    """Append a response's body to `part`; `old_validator` belongs to the bytes already there."""
    if response.status in TRANSIENT_STATUSES:
        raise _Transient(f"the server answers {response.status}")
    # 416: the file on the server is shorter than the bytes already there.
    if response.status == 416:
        part.unlink(missing_ok=True)
        raise _Transient("the file has changed since the download started")
    if response.status not in (200, 206):
        raise DownloadFailed(f"the server answers {response.status}")
    if response.status == 206 and not response.headers.get("Content-Range", "").startswith(
        f"bytes {size}-"
    ):
        part.unlink(missing_ok=True)
        raise _Transient("the server sent a different part than requested")
    # Check the validator too, since a server may ignore If-Range.
    if (
        response.status == 206
        and size
        and _validator(response.headers) not in (old_validator, None)
    ):
        part.unlink(missing_ok=True)
        raise _Transient("the file has changed since the download started")
    if response.status == 200:
        size = 0
    length = response.headers.get("Content-Length", "")
    full_size = size + int(length) if length.isdecimal() else None
    if full_size is not None and full_size > rules.max_bytes:
        _remove_validator(part)
        raise DownloadFailed(f"it has {full_size} bytes, but {rules.limit} is {rules.max_bytes}")
    validator = _validator(response.headers)
    _write_validator(part, validator)
    with open(part, "ab" if size else "wb", opener=private_opener) as file:
        # read1 returns the bytes that have arrived; waiting for a whole chunk may take long.
        while chunk := response.read1(CHUNK_BYTES, decode_content=False):
            size += len(chunk)
            stall_guard.count(len(chunk))
            if size > rules.max_bytes:
                _remove_validator(part)
                raise DownloadFailed(
                    f"it has more than {rules.max_bytes} bytes, which is {rules.limit}"
                )
            file.write(chunk)
            if rules.stopped():
                raise DownloadFailed("the server is stopping")
    if full_size is not None and size != full_size:
        raise _Transient(f"the connection ended after {size} of {full_size} bytes")
    return validator


def _validator(headers: Mapping[str, str]) -> str | None:
    """Return the validator for If-Range (RFC 9110, section 13.1.5).

    It lets a later request get the remainder of the same file, or all of a changed file.
    """
    tag = headers.get("ETag", "")
    if tag and not tag.startswith("W/"):
        return tag
    modified = headers.get("Last-Modified")
    return modified if modified and email.utils.parsedate(modified) else None


def _validator_file(part: Path) -> Path:
    return part.with_name(part.name + ".validator")


def _read_validator(part: Path) -> str | None:
    try:
        return _validator_file(part).read_text("latin-1") or None
    except OSError:
        return None


def _write_validator(part: Path, validator: str | None) -> None:
    if validator is None:
        _remove_validator(part)
    else:
        with open(_validator_file(part), "w", encoding="latin-1", opener=private_opener) as file:
            file.write(validator)


def _remove_validator(part: Path) -> None:
    """Remove the validator, so that no later download resumes this one."""
    _validator_file(part).unlink(missing_ok=True)


def _describe(error: BaseException | None) -> str:
    """Return the text of the innermost cause, since urllib3's errors contain names of objects."""
    if isinstance(error, IncompleteRead):
        return f"the connection ended {error.expected} bytes before the end of the file"
    causes = [getattr(error, name, None) for name in ("original_error", "reason", "__cause__")]
    cause = next(
        (
            candidate
            for candidate in (*causes, *getattr(error, "args", ()))
            if isinstance(candidate, BaseException)
        ),
        None,
    )
    return _describe(cause) if cause is not None else str(error) or type(error).__name__
