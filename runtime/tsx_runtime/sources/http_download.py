"""Downloads a file over http or https: checks each redirect, resumes interrupted transfers, and
limits the bytes.
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
from tsx_runtime.sources.addresses import addresses_of, check_public, proxy_for
from tsx_runtime.sources.urls import CHUNK, ModelUrl, Rules, parse_url

MOST_REDIRECTS = 5
MOST_TRIES = 5  # in a row that bring nothing
TIMEOUT = urllib3.Timeout(connect=10, read=60)
HEAD_TIMEOUT = 30.0  # seconds for the head of an answer, however its bytes drip
SLOWEST = 10_000  # bytes a second, on average, once `Rules.patience` is over
REDIRECTS = (301, 302, 303, 307, 308)
PASSING = (408, 425, 429, 500, 502, 503, 504)  # the same request may do better a little later

logger = logging.getLogger("tsx.sources")


class _Transient(Exception):
    """A failure after which it is worth to try again."""


def download(url: ModelUrl, part: Path, rules: Rules) -> None:
    """Write the file at `url` to `part`; go on where an earlier transfer of the same file broke
    off.

    Raises DownloadFailed, and what `rules.check` raises. What there is of the file is left only
    where a later call can go on with it.
    """
    try:
        _download(url, part, rules)
    except BaseException:
        if _remembered(part) is None:
            part.unlink(missing_ok=True)
        raise


def post(url: ModelUrl, body: bytes, headers: Mapping[str, str], *, private: bool) -> int:
    """The status of the answer, which may be a redirect.

    `private`: whether the URL may lead to an address that is not public.

    Raises DownloadFailed, and ModelNotFound for an address that is not public.
    """
    try:
        answer = _request("POST", url, headers, body, private=private)
    except (_Transient, HTTPError, OSError) as error:
        raise DownloadFailed(_in_words(error)) from error
    answer.release_conn()
    answer.close()
    return int(answer.status)


def _download(url: ModelUrl, part: Path, rules: Rules) -> None:
    validator = _remembered(part)
    failures = 0
    hurry = _StallGuard(rules.patience)
    while True:
        size = part.stat().st_size if part.exists() else 0
        try:
            validator = _transfer(url, part, validator, rules, hurry)
            _forget(part)
            return
        except (_Transient, HTTPError, OSError) as error:
            if isinstance(error, OSError) and not isinstance(
                error, ssl.SSLError | ConnectionError | TimeoutError
            ):
                raise DownloadFailed(
                    f"it cannot be written to {part.parent} ({error.strerror or error})"
                ) from error
            validator = _remembered(part)
            failures = 1 if part.exists() and part.stat().st_size > size else failures + 1
            if failures >= MOST_TRIES or rules.stopped():
                raise DownloadFailed(_in_words(error)) from error
            shown = url.text.partition("?")[
                0
            ]  # what follows may be a signature, with which anybody could ask
            logger.warning("%s: %s; trying again", shown, _in_words(error))
            time.sleep(
                rules.pause * 2 ** (failures - 1)
            )  # a thread of its own; nothing signals when the other side is well again


class _StallGuard:
    """Over all of a download: a server that sends a byte now and then, or a little on each of many
    connections, is not waited for.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._began = time.monotonic()
        self._bytes = 0

    def got(self, size: int) -> None:
        """Raises DownloadFailed."""
        self._bytes += size
        took = time.monotonic() - self._began
        if took > self._patience + self._bytes / SLOWEST:
            raise DownloadFailed(f"the download is too slow: {self._bytes} bytes in {took:.0f} s")


class _TcpConnection(HTTPConnection):
    """Cut where the head of an answer takes too long: a socket's timeout restarts with each
    byte.
    """

    _late = False

    def getresponse(self) -> Any:
        timer = threading.Timer(HEAD_TIMEOUT, self._cut)
        timer.daemon = True
        timer.start()
        try:
            answer = super().getresponse()
        finally:
            timer.cancel()
        if self._late:  # for http.client the end of the stream ends a head as well
            raise ProtocolError(
                f"the headers of the answer did not arrive within {HEAD_TIMEOUT:g} s"
            )
        return answer

    def _cut(self) -> None:
        self._late = True
        with suppress(OSError):
            if self.sock is not None:
                self.sock.shutdown(socket.SHUT_RDWR)


class _TlsConnection(_TcpConnection, HTTPSConnection):
    """As above."""


class _TcpPool(urllib3.HTTPConnectionPool):
    ConnectionCls = _TcpConnection


class _TlsPool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _TlsConnection


_POOLS = {"http": _TcpPool, "https": _TlsPool}


def _transfer(
    url: ModelUrl, part: Path, validator: str | None, rules: Rules, hurry: _StallGuard
) -> str | None:
    have = part.stat().st_size if validator and part.exists() else 0
    headers = {"Accept-Encoding": "identity", "User-Agent": "tsx", **rules.headers}
    if have and validator:
        headers |= {"Range": f"bytes={have}-", "If-Range": validator}
    for _ in range(MOST_REDIRECTS + 1):
        rules.check(url)
        answer = _request("GET", url, headers, private=rules.private(url))
        try:
            if answer.status not in REDIRECTS:
                return _store(answer, part, have, validator, rules, hurry)
            target = answer.headers.get("Location", "")
        finally:
            answer.release_conn()
            answer.close()
        url = parse_url(urljoin(url.text, target.partition("#")[0]))
        if url.scheme not in ("http", "https"):
            raise DownloadFailed(f"it redirects to {url.text}, which is neither http nor https")
    raise DownloadFailed(f"it redirects more than {MOST_REDIRECTS} times")


def _request(
    method: str,
    url: ModelUrl,
    headers: Mapping[str, str],
    body: bytes | None = None,
    *,
    private: bool,
) -> Any:
    """Connect to an address that has been looked at, whatever the name means a moment later: by a
    proxy, too, to that address.

    `private`: any address will do. Then a proxy gets the name: it may know names that mean nothing
    here.
    """
    port = url.port or (443 if url.scheme == "https" else 80)
    proxy = proxy_for(url)
    addresses = [url.host] if proxy is not None and private else addresses_of(url.host, port)
    if not private:
        check_public(url.host, addresses)
        # Only a tunnel leads to an address under another name.
        if proxy is not None and url.scheme == "http":
            raise DownloadFailed(
                "the proxy resolves the host of an http URL again: use https, name the host in"
                " allowed_urls, or set allow_private_urls=true"
            )
    headers = {
        "Host": _bracketed(url.host) if url.port is None else f"{_bracketed(url.host)}:{url.port}",
        **headers,
    }
    last: Exception | None = None
    for address in addresses:
        try:
            return _ask(method, url, address, port, proxy, headers, body)
        except (HTTPError, OSError) as error:
            last = error
    raise _Transient(_in_words(last)) from last


def _ask(
    method: str,
    url: ModelUrl,
    address: str,
    port: int,
    proxy: str | None,
    headers: Mapping[str, str],
    body: bytes | None,
) -> Any:
    """The answer's head; its body is still to be read."""
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
        through = urllib3.ProxyManager(proxy, proxy_headers=login, **options)
        through.pool_classes_by_scheme = _POOLS
        place = f"{url.scheme}://{_bracketed(address)}:{port}{path}"
        return through.request(
            method,
            place,
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


def _bracketed(host: str) -> str:
    """As URLs and headers have it."""
    return f"[{host}]" if ":" in host else host


def _store(
    answer: Any, part: Path, have: int, before: str | None, rules: Rules, hurry: _StallGuard
) -> str | None:
    """`before`: the validator of the bytes that are there."""
    if answer.status in PASSING:
        raise _Transient(f"the server answers {answer.status}")
    if answer.status == 416:  # what is there is not a beginning of what is to be had
        part.unlink(missing_ok=True)
        raise _Transient("the file has changed since the download started")
    if answer.status not in (200, 206):
        raise DownloadFailed(f"the server answers {answer.status}")
    if answer.status == 206 and not answer.headers.get("Content-Range", "").startswith(
        f"bytes {have}-"
    ):
        part.unlink(missing_ok=True)
        raise _Transient("the server sent a different part than requested")
    # Whatever it makes of If-Range.
    if answer.status == 206 and have and _validator(answer.headers) not in (before, None):
        part.unlink(missing_ok=True)
        raise _Transient("the file has changed since the download started")
    if answer.status == 200:
        have = 0
    length = answer.headers.get("Content-Length", "")
    whole = have + int(length) if length.isdecimal() else None
    if whole is not None and whole > rules.most:
        _forget(part)
        raise DownloadFailed(f"it has {whole} bytes, but max_archive_size is {rules.most}")
    validator = _validator(answer.headers)
    _remember(part, validator)
    with open(part, "ab" if have else "wb", opener=private_opener) as file:
        while chunk := answer.read1(
            CHUNK, decode_content=False
        ):  # what is there: a whole chunk may be long in coming
            have += len(chunk)
            hurry.got(len(chunk))
            if have > rules.most:
                _forget(part)
                raise DownloadFailed(
                    f"it has more than {rules.most} bytes, which is max_archive_size"
                )
            file.write(chunk)
            if rules.stopped():
                raise DownloadFailed("the server is stopping")
    if whole is not None and have != whole:
        raise _Transient(f"the connection ended after {have} of {whole} bytes")
    return validator


def _validator(headers: Mapping[str, str]) -> str | None:
    """What a later request for the rest names, so that it gets the rest of this file or all of
    another: RFC 9110, section 13.1.5.
    """
    tag = headers.get("ETag", "")
    if tag and not tag.startswith("W/"):
        return tag
    changed = headers.get("Last-Modified")
    return changed if changed and email.utils.parsedate(changed) else None


def _note(part: Path) -> Path:
    return part.with_name(part.name + ".validator")


def _remembered(part: Path) -> str | None:
    try:
        return _note(part).read_text("latin-1") or None
    except OSError:
        return None


def _remember(part: Path, validator: str | None) -> None:
    if validator is None:
        _forget(part)
    else:
        with open(_note(part), "w", encoding="latin-1", opener=private_opener) as note:
            note.write(validator)


def _forget(part: Path) -> None:
    """A later download must not continue it."""
    _note(part).unlink(missing_ok=True)


def _in_words(error: BaseException | None) -> str:
    """Its innermost cause: the texts of urllib3's own errors hold the names of its objects."""
    if isinstance(error, IncompleteRead):
        return f"the connection ended {error.expected} bytes before the end of the file"
    places = [getattr(error, name, None) for name in ("original_error", "reason", "__cause__")]
    cause = next(
        (
            each
            for each in (*places, *getattr(error, "args", ()))
            if isinstance(each, BaseException)
        ),
        None,
    )
    return _in_words(cause) if cause is not None else str(error) or type(error).__name__
