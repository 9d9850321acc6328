"""The commands' way to a running server, over HTTP."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlencode, urlsplit

from tsx_cli.common.failure import CliError, UsageError
from tsx_runtime.settings.addresses import parse_address
from tsx_runtime.version import __version__

CONNECT_TIMEOUT = 10
TRACEBACK = "\nTraceback (most recent call last):"  # a worker's own, behind the message of a load that failed
NOT_ALLOWED = "MethodNotAllowedException"
WRONG_PLACE = ("ResourceNotFoundException", NOT_ALLOWED)  # what a path of another address is answered with
WRONG_TOKEN = "InvalidKeyException"
UNKNOWN_MODEL = ("ModelNotFoundException", "ModelVersionNotFoundException")
ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # where a server on all interfaces is reached from here


class RequestFailed(CliError):
    """The server answered with an error; `status` is its code, and `type` its kind in TorchServe's words, if it has one."""

    def __init__(self, status: int, message: str, *, type: str = "", traceback: str | None = None) -> None:
        super().__init__(message, traceback=traceback)
        self.status = status
        self.type = type

    def hinted(self, hint: str) -> RequestFailed:
        """The same with a next step behind its message."""
        said = f"{self.message.rstrip('.; ')}; {hint}"
        return RequestFailed(self.status, said, type=self.type, traceback=self.traceback)


@dataclass(frozen=True)
class Response:
    """An answer below 400; `parts` yields the body as it arrives."""

    status: int
    content_type: str
    parts: Iterator[bytes]

    def body(self) -> bytes:
        return b"".join(self.parts)

    def json(self) -> Any:
        return json.loads(self.body())


class Server:
    """One address of a server. Errors are `CliError`s in the server's own words.

    `role` says which of a server's addresses this should be, for the case that it is another: `inference` or `management`.
    """

    def __init__(self, url: str, token: str | None = None, *, role: str = "inference", certificate: Path | None = None) -> None:
        self.role = role
        self.url = url
        self._certificate = certificate
        self._socket = ""  # where it is a unix socket, its path
        if url.startswith("unix:"):
            self._socket = _unix_path(url)
            url = "http://localhost"
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # of .port
            valid = False
        if not valid:
            raise UsageError(_no_address(url))
        self.prefix = parts.path.rstrip("/")
        self._headers = {"User-Agent": f"tsx/{__version__}", "Connection": "close"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._host = ANY_HOST.get(parts.hostname or "", parts.hostname or "")
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._secure = parts.scheme == "https"

    def call(self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None) -> Response:
        connection = self.connect()
        try:
            connection.request(method, self.prefix + path, body, {**self._headers, **(headers or {})})
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise CliError(f"{self.url} did not answer {method} {path}: {_reason(error)}; the server's own output says more") from error
        parts = _parts(connection, response)
        if response.status >= 400:
            raise self.refusal(response.status, b"".join(parts), path)
        return Response(response.status, response.headers.get("content-type", ""), parts)

    def refusal(self, status: int, body: bytes, path: str) -> RequestFailed:
        """What an answer of 400 or more says, with the next step, where that is known here rather than on the server."""
        error = _failure(status, body)
        if error.type in WRONG_PLACE and (odd := _odd_name(path)) is not None:
            return RequestFailed(error.status, f"there is no model, version or label '{odd}': names have no '/', nor are they empty")
        if error.type == NOT_ALLOWED and self.role == "management":
            text = (
                f"{self.url} does not let models be registered or removed; start the server with enable_model_api = true to have it do so"
            )
            return RequestFailed(error.status, text, type=error.type)
        if error.type in WRONG_PLACE:
            return RequestFailed(
                error.status,
                f"{self.url} answers, but it is not the {self.role} address of a server; "
                f"say where that is with --url, or with the setting {self.role}_address",
                type=error.type,
            )
        if error.type == WRONG_TOKEN:
            return error.hinted(f"commands send the setting {self.role}_token, as in TSX_{self.role.upper()}_TOKEN=TOKEN")
        if error.type in UNKNOWN_MODEL and path.count("/") > 1:  # for /models alone, it is an archive that is not known
            return error.hinted("`tsx models list` shows what is served")
        return error

    @property
    def authorization(self) -> dict[str, str]:
        """The headers of the token, if there is one."""
        return {name: value for name, value in self._headers.items() if name == "Authorization"}

    def connect(self) -> http.client.HTTPConnection:
        connection: http.client.HTTPConnection
        if self._socket:
            connection = _UnixConnection(self._socket)
        elif self._secure:
            context = _trusting(self._certificate)
            connection = http.client.HTTPSConnection(self._host, self._port, timeout=CONNECT_TIMEOUT, context=context)
        else:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=CONNECT_TIMEOUT)
        try:
            connection.connect()
        except ssl.SSLError as error:
            raise CliError(f"{self.url}: {distrust(error)}") from error
        except OSError as error:
            raise CliError(
                f"no server answers at {self.url} ({_reason(error)}); start one with `tsx serve MODEL`, or say where it is with --url"
            ) from error
        connection.sock.settimeout(None)  # how long a model may take is the server's to say
        return connection


class KeptConnection:
    """A connection to a server that stays open for the next request. For one thread."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._connection: http.client.HTTPConnection | None = None

    def open(self) -> None:
        """Raises CliError where no server answers."""
        self._connection = self._server.connect()

    def call(self, method: str, path: str, headers: Sequence[tuple[str, str]], body: bytes) -> tuple[int, bytes]:
        """Status and body. Raises CliError, OSError, HTTPException."""
        fresh = self._connection is None
        if self._connection is None:
            self._connection = self._server.connect()
        try:
            return self._call(self._connection, method, path, headers, body)
        except (http.client.RemoteDisconnected, ConnectionError, http.client.CannotSendRequest):
            self.close()
            if fresh:
                raise
        except BaseException:
            self.close()
            raise
        return self.call(method, path, headers, body)  # the server may have closed it meanwhile

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _call(
        self, connection: http.client.HTTPConnection, method: str, path: str, headers: Sequence[tuple[str, str]], body: bytes
    ) -> tuple[int, bytes]:
        connection.putrequest(method, self._server.prefix + path, skip_accept_encoding=True)
        for name, value in [*headers, *self._server.authorization.items(), ("Content-Length", str(len(body)))]:
            connection.putheader(name, value.encode("latin-1", "replace"))
        connection.endheaders(body)
        response = connection.getresponse()
        answer = response.read()
        if response.will_close:
            self.close()
        return response.status, answer


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=CONNECT_TIMEOUT)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _unix_path(url: str) -> str:
    try:
        return parse_address(url).path
    except ValueError:
        raise UsageError(_no_address(url)) from None


def _no_address(url: str) -> str:
    return f"'{url}' is not the address of a server; one looks like http://127.0.0.1:8080, or unix:/run/tsx.sock"


def _trusting(certificate: Path | None) -> ssl.SSLContext:
    """Trust what this machine trusts, and the certificate that the settings give the server."""
    context = ssl.create_default_context()
    if certificate is not None:
        try:
            context.load_verify_locations(certificate)
        except OSError as error:  # an ssl.SSLError is one as well
            raise CliError(f"certificate_file: cannot read a certificate from {certificate}: {_reason(error)}") from error
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the server's own certificate is enough
    return context


def distrust(
    error: ssl.SSLError,
    *,
    address: str = "--url",
    trust: str = "set certificate_file to it, or to that of the authority that signed it (TSX_CERTIFICATE_FILE=cert.pem)",
) -> str:
    """Why the two do not come to speak TLS, and what to do: by the option that has the address, and by what makes it trusted."""
    if not isinstance(error, ssl.SSLCertVerificationError):
        return f"no server speaks TLS there ({error.reason or error}); is its address one with http://?"
    if "ostname mismatch" in error.verify_message or "IP address mismatch" in error.verify_message:
        return f"{error.verify_message} Give {address} a name that the certificate has, or make one with this name (subjectAltName)."
    return f"the server's certificate is not trusted here ({error.verify_message}); {trust}"


def path(*segments: str, **query: object) -> str:
    """A path of the API; segments are quoted, and what is None is left out of the query."""
    given = {name: str(value).lower() if isinstance(value, bool) else value for name, value in query.items() if value is not None}
    return "".join(f"/{quote(segment, safe='')}" for segment in segments) + (f"?{urlencode(given)}" if given else "")


def _odd_name(path: str) -> str | None:
    """A name in a path of the API that no model, version or label can have, and by which the path leads elsewhere."""
    segments = path.partition("?")[0].split("/")[1:]
    return next((unquote(segment) for segment in segments if not segment or "%2F" in segment), None)


def _parts(connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> Iterator[bytes]:
    try:
        while part := response.read1():
            yield part
    except (OSError, http.client.HTTPException) as error:
        raise CliError(f"the answer broke off: {_reason(error)}; the server's own output says more") from error
    finally:
        connection.close()


def _failure(status: int, body: bytes) -> RequestFailed:
    """The error of TorchServe's form, or what a proxy or a handler sent in its place."""
    try:
        answer = json.loads(body)
        told = str(answer["message"]).rstrip()
    except (ValueError, TypeError, KeyError):
        text = body.decode("utf-8", "replace").strip()
        return RequestFailed(status, f"the server answered {status} {http.client.responses.get(status, '')}: {text[:2000]}".rstrip(": "))
    message, begin, traceback = told.partition(TRACEBACK)
    return RequestFailed(status, message, type=str(answer.get("type", "")), traceback=(begin + traceback).lstrip() or None)


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) and error.strerror else str(error)) or type(error).__name__
