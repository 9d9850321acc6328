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
ERROR_SHOWN = 200  # bytes of an error that is not in the server's own form
# a worker's own, behind the message of a load that failed
TRACEBACK = "\nTraceback (most recent call last):"
NOT_ALLOWED = "MethodNotAllowedException"
WRONG_PLACE = (
    "ResourceNotFoundException",
    NOT_ALLOWED,
)  # what a path of another address is answered with
WRONG_TOKEN = "InvalidKeyException"
OTHER_FORM = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
UNKNOWN_MODEL = ("ModelNotFoundException", "ModelVersionNotFoundException")


class RequestFailed(CliError):
    """The server answered with an error; `status` is its code, and `type` its kind in TorchServe's
    words, if it has one.
    """

    def __init__(
        self, status: int, message: str, *, type: str = "", traceback: str | None = None
    ) -> None:
        super().__init__(message, traceback=traceback)
        self.status = status
        self.type = type

    def hinted(self, hint: str) -> RequestFailed:
        """The same with a next step behind its message."""
        text = f"{self.message.rstrip('.; ')}; {hint}".replace("?; ", "? ")
        return RequestFailed(self.status, text, type=self.type, traceback=self.traceback)


@dataclass(frozen=True)
class Response:
    """`parts` yields the body as it arrives."""

    status: int
    headers: Mapping[str, str]  # names in lower case
    parts: Iterator[bytes]

    @classmethod
    def whole(cls, body: bytes, content_type: str | None) -> Response:
        """An answer of 200 that has arrived."""
        return cls(200, {"content-type": content_type} if content_type else {}, iter([body]))

    @property
    def content_type(self) -> str:
        return self.headers.get("content-type", "")

    def body(self) -> bytes:
        return b"".join(self.parts)

    def json(self, kind: type = dict) -> Any:
        """Parse the body, whose JSON must be of this kind. Raises CliError."""
        with reading_answers():
            answer = json.loads(self.body())
            if not isinstance(answer, kind):
                raise TypeError(f"it is a {type(answer).__name__}, not a {kind.__name__}")
        return answer


@contextmanager
def reading_answers() -> Iterator[None]:
    """Turn the errors of code that reads an answer of another form into a CliError."""
    try:
        yield
    except OTHER_FORM as error:
        why = f"the server's answer cannot be read ({type(error).__name__}: {error})"
        url = f"check that --url is the address of a server of tsx {__version__}"
        raise CliError(f"{why}; {url}") from error


class AnswerCommand(TyperCommand):
    """A command that shows answers of a server, which may be of any form."""

    def invoke(self, ctx: Any) -> Any:
        with reading_answers():
            return super().invoke(ctx)


class Server:
    """One address of a server. Errors are `CliError`s in the server's own words.

    `role` says which of a server's addresses this should be, for the case that it is another:
    `inference` or `management`. `timeout` is in seconds, for each read; without it, the server
    alone limits how long a model may take. `absent` is the advice where no server answers.
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
        self.role = role
        self.url = url
        self.address = read_url(url)
        self._certificate, self._timeout, self._absent = certificate, timeout, absent
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
        """Send a request and return its answer of 2xx. Raises RequestFailed for another status."""
        response = self.send(method, path, body, headers)
        if 300 <= response.status < 400 and (location := response.headers.get("location")):
            why = f"{self.url} answers {path} with {response.status} and names {location}"
            raise RequestFailed(response.status, f"{why}; give that server's address with --url")
        if not 200 <= response.status < 300:
            raise self.refusal(response.status, response.body(), path)
        return response

    def call_json(self, method: str, path: str, value: object = None, kind: type = dict) -> Any:
        """The answer's JSON, to a request with `value` as its body, where there is one."""
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
        """Return an answer of any status. Raises CliError where none comes."""
        return self.exchange(method, path, {**self._headers, **(headers or {})}.items(), body)

    def exchange(
        self, method: str, path: str, headers: Iterable[tuple[str, str]], body: bytes | None
    ) -> Response:
        """Send a request with no other headers than these; without `Connection: close` its
        connection is kept for the next one.

        Raises:
            CliError: No answer came. Its cause is an OSError where there was no connection, else an
            error of httpx.
        """
        import httpx  # here, as it is slow to import, and help must be quick

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
                raise self._absence(reason) from reason
            raise CliError(
                f"{self.url} did not answer {method} {path}: {_reason(reason)}; the server's own"
                " output says more"
            ) from error
        return Response(response.status_code, dict(response.headers), _parts(response))

    def refusal(self, status: int, body: bytes, path: str) -> RequestFailed:
        """What an answer of 400 or more says, with the next step, where that is known here rather
        than on the server.
        """
        error = _failure(status, body)
        if error.type in WRONG_PLACE and (odd := _odd_name(path)) is not None:
            return RequestFailed(
                error.status,
                f"'{odd}' is not a valid name of a model, version or label: it is empty or has"
                " a '/'",
            )
        if error.type == NOT_ALLOWED and self.role == "management":
            text = (
                f"{self.url} does not allow models to be registered or removed; start the server"
                " with enable_model_api = true"
            )
            return RequestFailed(error.status, text, type=error.type)
        if error.type in WRONG_PLACE:
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
        if (
            error.type in UNKNOWN_MODEL and path.count("/") > 1
        ):  # for /models alone, it is an archive that is not known
            return error.hinted("`tsx models list` shows what is served")
        return error

    @property
    def authorization(self) -> dict[str, str]:
        """The headers of the token, if there is one."""
        return {name: value for name, value in self._headers.items() if name == "Authorization"}

    @cached_property
    def _transport(self) -> httpx.HTTPTransport:
        import httpx  # here, as it is slow to import, and help must be quick

        try:
            verify = trusting(self._certificate) if self.address.secure else False
        except OSError as error:  # an ssl.SSLError is one as well
            raise CliError(
                f"certificate_file: cannot read a certificate from {self._certificate}:"
                f" {_reason(error)}"
            ) from error
        return httpx.HTTPTransport(verify=verify, uds=self.address.socket or None)

    def _absence(self, error: OSError) -> CliError:
        if isinstance(error, ssl.SSLError):
            return CliError(f"{self.url}: {distrust(error)}")
        why = f"no server answers at {self.url} ({_reason(error)})"
        return CliError(f"{why}; {self.address.loading_hint(error)}{self._absent}")


def path(*segments: str, **query: object) -> str:
    """A path of the API; segments are quoted, and what is None is left out of the query."""
    given = {
        name: str(value).lower() if isinstance(value, bool) else value
        for name, value in query.items()
        if value is not None
    }
    return "".join(f"/{quote(segment, safe='')}" for segment in segments) + (
        f"?{urlencode(given)}" if given else ""
    )


def _odd_name(path: str) -> str | None:
    """A name in a path of the API that no model, version or label can have, and by which the path
    leads elsewhere.
    """
    segments = path.partition("?")[0].split("/")[1:]
    return next((unquote(segment) for segment in segments if not segment or "%2F" in segment), None)


def _parts(response: httpx.Response) -> Iterator[bytes]:
    import httpx  # here, as it is slow to import, and help must be quick

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
    """Return the system's error behind one of httpx, if there is one."""
    root: BaseException | None = error
    while root is not None and not isinstance(root, OSError):
        root = root.__context__
    return root or error


def error_text(body: bytes) -> str:
    """The message of an error answer; of anything but the server's own errors, the beginning."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        answer = None
    if isinstance(answer, dict) and isinstance(answer.get("message"), str):
        return str(answer["message"])
    return " ".join(body[:ERROR_SHOWN].decode("utf-8", "replace").split())


def _failure(status: int, body: bytes) -> RequestFailed:
    """The error of TorchServe's form, or what a proxy or a handler sent in its place."""
    try:
        answer = json.loads(body)
        text_of_error = str(answer["message"]).rstrip()
    except (ValueError, TypeError, KeyError, RecursionError):
        text = body.decode("utf-8", "replace").strip()
        return RequestFailed(
            status,
            f"the server answered {status} {http.client.responses.get(status, '')}: {text[:2000]}".rstrip(
                ": "
            ),
        )
    message, begin, traceback = text_of_error.partition(TRACEBACK)
    return RequestFailed(
        status,
        message,
        type=str(answer.get("type", "")),
        traceback=(begin + traceback).lstrip() or None,
    )


def _reason(error: BaseException) -> str:
    return (
        error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    ) or type(error).__name__
