"""The HTTP client of the commands."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlencode

from typer.core import TyperCommand

from tsx_cli.common.failure import CliError
from tsx_cli.common.server_address import distrust, read_url, trusting
from tsx_runtime.version import __version__

if TYPE_CHECKING:
    import httpx

CONNECT_TIMEOUT = 10
MAX_FOREIGN_BYTES = 200  # shown bytes of an error in a format other than the server's
# A worker's traceback begins with this text, after the message of a failed load.
TRACEBACK = "\nTraceback (most recent call last):"
NOT_ALLOWED = "MethodNotAllowedException"
# Errors for a path that belongs to another address of the server.
WRONG_ADDRESS = ("ResourceNotFoundException", NOT_ALLOWED)
WRONG_TOKEN = "InvalidKeyException"
MALFORMED_RESPONSE_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
UNKNOWN_MODEL = ("ModelNotFoundException", "ModelVersionNotFoundException")


class RequestFailed(CliError):
    """The server answered with an error.

    Attributes:
        status: The HTTP status.
        type: TorchServe's name of the error, or an empty string.
    """

    def __init__(
        self, status: int, message: str, *, type: str = "", traceback: str | None = None
    ) -> None:
        super().__init__(message, traceback=traceback)
        self.status = status
        self.type = type

    def hinted(self, hint: str) -> RequestFailed:
        """Return this error with a next step appended to its message."""
        text = f"{self.message.rstrip('.; ')}; {hint}".replace("?; ", "? ")
        return RequestFailed(self.status, text, type=self.type, traceback=self.traceback)


@dataclass(frozen=True)
class Response:
    """A response; `parts` yields the body as it arrives."""

    status: int
    headers: Mapping[str, str]  # names in lower case
    parts: Iterator[bytes]

    @classmethod
    def complete(cls, body: bytes, content_type: str | None) -> Response:
        """Return a response with status 200 and a complete body."""
        return cls(200, {"content-type": content_type} if content_type else {}, iter([body]))

    @property
    def content_type(self) -> str:
        return self.headers.get("content-type", "")

    def body(self) -> bytes:
        return b"".join(self.parts)

    def json(self, kind: type = dict) -> Any:
        """Parse the body, which must be JSON of this type.

        Raises:
            CliError: The body is not JSON, or is JSON of another type.
        """
        with reading_answers():
            answer = json.loads(self.body())
            if not isinstance(answer, kind):
                raise TypeError(f"it is a {type(answer).__name__}, not a {kind.__name__}")
        return answer


@contextmanager
def reading_answers() -> Iterator[None]:
    """Raise CliError for any error that a malformed response causes."""
    try:
        yield
    except MALFORMED_RESPONSE_ERRORS as error:
        problem = f"the server's answer cannot be read ({type(error).__name__}: {error})"
        url = f"check that --url is the address of a server of tsx {__version__}"
        raise CliError(f"{problem}; {url}") from error


class AnswerCommand(TyperCommand):
    """A command that reads responses from a server."""

    def invoke(self, ctx: Any) -> Any:
        with reading_answers():
            return super().invoke(ctx)


class Server:
    """A client for one address of a server.

    Attributes:
        url: The address.
        role: `inference` or `management`; the error about a wrong address contains it.
        address: The parsed address.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        role: str = "inference",
        certificate: Path | None = None,
        timeout: float | None = None,
        absent: str = "start one with `tsx serve MODEL`, or give its address with --url",
    ) -> None:
        """Parse the address; no connection is opened.

        Args:
            url: The address.
            token: The token.
            role: The role that the address should have.
            certificate: A certificate to trust.
            timeout: Seconds for each read; if it is None, only the server limits a request.
            absent: Advice for the case that no server answers.

        Raises:
            UsageError: The address is invalid.
        """
        self.role = role
        self.url = url
        self.address = read_url(url)
        self._certificate, self._timeout, self._absent_advice = certificate, timeout, absent
        self._headers = {
            "User-Agent": f"tsx/{__version__}",
            "Accept-Encoding": "identity",
            "Connection": "close",
        }
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"

    def call(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """Send a request, and return the response if its status is from 200 to 299.

        Raises:
            RequestFailed: The response has another status.
            CliError: There was no response.
        """
        response = self.send(method, path, body, headers)
        if 300 <= response.status < 400 and (location := response.headers.get("location")):
            problem = f"{self.url} answers {path} with {response.status} and names {location}"
            raise RequestFailed(
                response.status, f"{problem}; give that server's address with --url"
            )
        if not 200 <= response.status < 300:
            raise self.refusal(response.status, response.body(), path)
        return response

    def call_json(self, method: str, path: str, value: object = None, kind: type = dict) -> Any:
        """Send a request with `value` as its JSON body, and return the JSON of the response."""
        if value is None:
            return self.call(method, path).json(kind)
        return self.call(
            method, path, json.dumps(value).encode(), {"Content-Type": "application/json"}
        ).json(kind)

    def send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """Send a request, and return the response of any status.

        Raises:
            CliError: There was no response.
        """
        return self.exchange(method, path, {**self._headers, **(headers or {})}.items(), body)

    def exchange(
        self, method: str, path: str, headers: Iterable[tuple[str, str]], body: bytes | None
    ) -> Response:
        """Send a request with exactly these headers.

        The connection is kept for the next request unless a header is `Connection: close`.

        Raises:
            CliError: There was no response. The cause is an OSError if there was no connection,
                otherwise an error of httpx.
        """
        import httpx  # a slow import

        encoded = [
            (name.encode("latin-1", "replace"), value.encode("latin-1", "replace"))
            for name, value in headers
        ]
        timeout = {"connect": CONNECT_TIMEOUT, "read": self._timeout, "write": self._timeout}
        extensions = {"target": (self.address.prefix + path).encode(), "timeout": timeout}
        url = f"http{'s' if self.address.secure else ''}://{self.address.authority}"
        try:
            request = httpx.Request(
                method, url, headers=encoded, content=body, extensions=extensions
            )
            response = self._transport.handle_request(request)
        except httpx.HTTPError as error:
            reason = _root(error)
            if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout) and isinstance(
                reason, OSError
            ):
                raise self._connection_error(reason) from reason
            raise CliError(
                f"{self.url} did not answer {method} {path}: {_reason(reason)}; the server's own"
                " output says more"
            ) from error
        return Response(response.status_code, dict(response.headers), _parts(response))

    def refusal(self, status: int, body: bytes, path: str) -> RequestFailed:
        """Return the error for a status of 400 or more, with a next step if one is known."""
        error = _failure(status, body)
        if error.type in WRONG_ADDRESS and (invalid_name := _invalid_name(path)) is not None:
            return RequestFailed(
                error.status,
                f"'{invalid_name}' is not a valid name of a model, version or label: it is empty or has"
                " a '/'",
            )
        if error.type == NOT_ALLOWED and self.role == "management":
            text = (
                f"{self.url} does not allow models to be registered or removed; start the server"
                " with enable_model_api = true"
            )
            return RequestFailed(error.status, text, type=error.type)
        if error.type in WRONG_ADDRESS:
            return RequestFailed(
                error.status,
                f"{self.url} answers, but it is not the {self.role} address of a server; "
                f"give that address with --url, or with the setting {self.role}_address",
                type=error.type,
            )
        if error.type == WRONG_TOKEN:
            return error.hinted(
                f"commands send the setting {self.role}_token, as in"
                f" TSX_{self.role.upper()}_TOKEN=TOKEN"
            )
        # An error for /models itself is about an archive and not about a registered model.
        if error.type in UNKNOWN_MODEL and path.count("/") > 1:
            return error.hinted("`tsx models list` shows what is served")
        return error

    @property
    def authorization(self) -> dict[str, str]:
        """The header with the token; empty if there is no token."""
        return {name: value for name, value in self._headers.items() if name == "Authorization"}

    @cached_property
    def _transport(self) -> httpx.HTTPTransport:
        import httpx  # a slow import

        try:
            verify = trusting(self._certificate) if self.address.secure else False
        except OSError as error:  # including ssl.SSLError
            raise CliError(
                f"certificate_file: cannot read a certificate from {self._certificate}:"
                f" {_reason(error)}"
            ) from error
        return httpx.HTTPTransport(verify=verify, uds=self.address.socket or None)

    def _connection_error(self, error: OSError) -> CliError:
        if isinstance(error, ssl.SSLError):
            return CliError(f"{self.url}: {distrust(error)}")
        problem = f"no server answers at {self.url} ({_reason(error)})"
        return CliError(f"{problem}; {self.address.loading_hint(error)}{self._absent_advice}")


def path(*segments: str, **query: object) -> str:
    """Build a path of the API from quoted segments; parameters that are None are left out."""
    values = {
        name: str(value).lower() if isinstance(value, bool) else value
        for name, value in query.items()
        if value is not None
    }
    return "".join(f"/{quote(segment, safe='')}" for segment in segments) + (
        f"?{urlencode(values)}" if values else ""
    )


def _invalid_name(path: str) -> str | None:
    """Return a segment that is not a valid name and would change the meaning of the path."""
    segments = path.partition("?")[0].split("/")[1:]
    return next((unquote(segment) for segment in segments if not segment or "%2F" in segment), None)


def _parts(response: httpx.Response) -> Iterator[bytes]:
    import httpx  # a slow import

    try:
        yield from response.iter_raw()
    except httpx.HTTPError as error:
        raise CliError(
            f"the answer was interrupted: {_reason(_root(error))}; the server's own output says"
            " more"
        ) from error
    finally:
        response.close()


def _root(error: BaseException) -> BaseException:
    """Return the system error that caused an error of httpx, if there is one."""
    root: BaseException | None = error
    while root is not None and not isinstance(root, OSError):
        root = root.__context__
    return root or error


def error_text(body: bytes) -> str:
    """Return the message of an error, or the beginning of any other body."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        answer = None
    if isinstance(answer, dict) and isinstance(answer.get("message"), str):
        return str(answer["message"])
    return " ".join(body[:MAX_FOREIGN_BYTES].decode("utf-8", "replace").split())


def _failure(status: int, body: bytes) -> RequestFailed:
    """Convert an error in the format of TorchServe or FastAPI, or of a proxy or a handler."""
    try:
        answer = json.loads(body)
        if isinstance(answer.get("detail"), list):
            return RequestFailed(status, "; ".join(map(_field_error, answer["detail"])))
        text_of_error = str(answer["message"]).rstrip()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        text = body.decode("utf-8", "replace").strip()
        return RequestFailed(
            status,
            f"the server answered {status} {http.client.responses.get(status, '')}: {text[:2000]}".rstrip(
                ": "
            ),
        )
    message, separator, traceback = text_of_error.partition(TRACEBACK)
    return RequestFailed(
        status,
        message,
        type=str(answer.get("type", "")),
        traceback=(separator + traceback).lstrip() or None,
    )


def _field_error(problem: dict[str, Any]) -> str:
    """Return an error of FastAPI as `field: message`."""
    field = f"{'.'.join(map(str, problem['loc']))}.".removeprefix("body.").rstrip(".")
    return f"{field}: {problem['msg']}" if field else str(problem["msg"])


def _reason(error: BaseException) -> str:
    return (
        error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    ) or type(error).__name__
