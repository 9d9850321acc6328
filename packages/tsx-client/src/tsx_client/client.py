"""The blocking and the asynchronous client.

Both share one implementation as coroutines. `AsyncClient` awaits them. `Client` runs each coroutine
to its end in one step, because its httpx client and its clock block the thread.
"""

from __future__ import annotations

import json
import os
import secrets
import ssl
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar
from urllib.parse import quote

import anyio
import httpx

from tsx_client.bodies import Content, Signature, decode, encode
from tsx_client.errors import ClientError, StreamInterrupted, extra, reading
from tsx_client.exchange import Deadline, Retry, exchange
from tsx_client.streams import Piece, Pieces

Text: TypeAlias = "str | None"
Seconds: TypeAlias = "float | None"
Headers: TypeAlias = "Mapping[str, str] | None"
FeedbackItems: TypeAlias = "Mapping[str, Any] | Sequence[Mapping[str, Any]]"
ClientT = TypeVar("ClientT", bound="Core")
ResultT = TypeVar("ResultT")


class Model(Generic[ClientT]):
    """One model of a server.

    Attributes:
        client: The client that sends the requests.
        name: The name of the model.
    """

    def __init__(self, client: ClientT, name: str) -> None:
        """Name a model, without a request to the server."""
        self.client, self.name = client, name

    def predict(self, *payload: Any, **inputs: Any) -> Any:
        """Call `Client.predict` for this model."""
        return self.client.predict(self.name, *payload, **inputs)

    def stream(self, *payload: Any, **inputs: Any) -> Any:
        """Call `Client.stream` for this model."""
        return self.client.stream(self.name, *payload, **inputs)

    def feedback(self, items: FeedbackItems) -> Any:
        """Call `Client.feedback` for this model."""
        return self.client.feedback(self.name, items)


class Models(Generic[ClientT]):
    """The models of a server by name: `models.digits` or `models["a-name"]`."""

    def __init__(self, client: ClientT) -> None:
        self._client = client

    def __getitem__(self, name: str) -> Model[ClientT]:
        return Model(self._client, name)

    if not TYPE_CHECKING:  # Stubs declare the models for type checkers.

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return self[name]


class Core:
    """The settings and calls of both clients."""

    _is_async: bool
    _sleep: Callable[[float], Awaitable[None]]
    predict: Callable[..., Any]
    stream: Callable[..., Any]
    feedback: Callable[..., Any]

    def __init__(
        self,
        url: str = "http://127.0.0.1:8080",
        *,
        token: str | None = None,
        timeout: float | None = None,
        retry: Retry | None = None,
        trace: bool = False,
        verify: ssl.SSLContext | bool = True,
        grpc: str | None = None,
        transport: Any = None,
    ) -> None:
        """Create a client; the first call opens the connection.

        Args:
            url: The address of the server's inference API.
            token: The token of the server. None reads the variable TSX_INFERENCE_TOKEN.
            timeout: Seconds for a whole call with its retries. None waits without limit.
            retry: The rule for the repetition of calls.
            trace: Whether a call that is not part of a trace begins one.
            verify: An `ssl.SSLContext`, or False to accept any certificate.
            grpc: HOST:PORT of the server's gRPC API, for predictions without tensors. Needs
                `tsx-client[grpc]`.
            transport: A transport of httpx in place of the network, for tests.

        Raises:
            ClientError: `url` does not begin with http:// or https://.
        """
        if not url.startswith(("http://", "https://")):
            raise ClientError(f"The address {url!r} begins with neither http:// nor https://.")
        self.url = url.rstrip("/")
        self.token = os.environ.get("TSX_INFERENCE_TOKEN") if token is None else token
        self.timeout, self.retry, self.trace = timeout, retry or Retry(), trace
        self.models: Any = Models(self)
        self._signatures: dict[tuple[str, str | None], Signature] = {}
        kind: Any = httpx.AsyncClient if self._is_async else httpx.Client
        headers = {} if self.token is None else {"authorization": f"Bearer {self.token}"}
        http = kind(
            base_url=self.url, headers=headers, timeout=None, verify=verify, transport=transport
        )
        self._http: Any = http if self._is_async else _Blocking(http)
        if grpc is not None:
            self._http = extra("tsx_client.grpc", "tsx-client[grpc]").GrpcCalls(
                grpc, self._http, self.url, verify, is_async=self._is_async
            )

    def openai(self, **options: Any) -> Any:
        """Return the `openai` package's client for this server, for chat and embeddings.

        Args:
            **options: Arguments of `openai.OpenAI`.
        """
        openai = extra("openai", "openai")
        cls = openai.AsyncOpenAI if self._is_async else openai.OpenAI
        return cls(base_url=f"{self.url}/v1", api_key=self.token or "none", **options)

    async def _predict(self, *call: Any) -> Any:
        response, deadline = await self._call(*call)
        return decode(
            response.headers, b"".join([chunk async for chunk in _chunks(response, deadline)])
        )

    async def _stream(self, *call: Any) -> AsyncGenerator[Piece, None]:
        response, deadline = await self._call(*call)
        pieces = Pieces(response.headers.get("content-type", ""))
        async with aclosing(_chunks(response, deadline)) as chunks:
            async for chunk in chunks:
                for piece in pieces.feed(chunk):
                    yield piece
            for piece in pieces.feed(b"", last=True):
                yield piece

    async def _metadata(self, model: str, version: str | None) -> dict[str, Any]:
        path = _path("/v2/models", model, "/versions", version)
        return await self._json("GET", path, Deadline(self.timeout), dict.copy)

    async def _feedback(self, model: str, items: FeedbackItems) -> dict[str, Any]:
        # `json.dumps` knows no scalars of numpy; their `item` returns a Python value.
        content = json.dumps(items, default=lambda value: value.item()).encode()
        path = _path("/feedback", model, "", None)
        return await self._json("POST", path, Deadline(self.timeout), dict.copy, content)

    async def _model_names(self) -> list[str]:
        deadline = Deadline(self.timeout)
        names = await self._json(
            "GET", "/v1/models", deadline, lambda body: list.copy(body["models"])
        )
        return list(map(str, names))

    async def _call(
        self,
        model: str,
        payload: Any,
        version: Text,
        timeout: Seconds,
        headers: Headers,
        inputs: Mapping[str, Any],
    ) -> tuple[httpx.Response, Deadline]:
        deadline = Deadline(self.timeout if timeout is None else timeout)
        signature = Signature()
        if inputs or hasattr(payload, "__array__"):
            path = _path("/v2/models", model, "/versions", version)
            if (model, version) not in self._signatures:
                self._signatures[model, version] = await self._json(
                    "GET", path, deadline, Signature.of
                )
            signature = self._signatures[model, version]
        content = encode(signature, payload, inputs)
        return (
            await self._exchange(
                lambda: self._request(model, version, content, headers or {}), deadline
            ),
            deadline,
        )

    async def _json(
        self,
        method: str,
        path: str,
        deadline: Deadline,
        read: Callable[[Any], ResultT],
        content: bytes | None = None,
    ) -> ResultT:
        """Return the JSON of the server's response, converted by `read`.

        Raises:
            InvalidAnswer: The response has another form.
        """
        headers = {} if content is None else {"content-type": "application/json"}
        response = await self._exchange(
            lambda: self._http.build_request(method, path, content=content, headers=headers),
            deadline,
        )
        body = b"".join([chunk async for chunk in _chunks(response, deadline)])
        with reading(f"The answer to {method} {path}"):
            return read(json.loads(body))

    async def _exchange(
        self, new_request: Callable[[], httpx.Request], deadline: Deadline
    ) -> httpx.Response:
        return await exchange(
            new_request,
            self.retry,
            deadline,
            lambda request: self._http.send(request, stream=True),
            self._sleep,
        )

    def _request(
        self, model: str, version: str | None, content: Content, headers: Mapping[str, str]
    ) -> httpx.Request:
        path, fields = _path("/predictions", model, "", version), {"body": content.body}
        body: dict[str, Any] = {"content": content.body}
        if content.is_tensors:
            path = _path("/v2/models", model, "/versions", version) + "/infer"
        elif content.files is not None:
            body, fields = (
                {"files": content.files},
                {name: value for name, (_, value, _) in content.files.items()},
            )
        all_headers = {**content.headers, **self._trace_headers(), **headers}
        # GrpcCalls sends these fields in place of the HTTP request.
        extensions = {} if content.is_tensors else {"tsx": (model, version, fields)}
        request: httpx.Request = self._http.build_request(
            "POST", path, headers=all_headers, extensions=extensions, **body
        )
        return request

    def _trace_headers(self) -> dict[str, str]:
        """Return the headers of OpenTelemetry's current span, or of a new one with `trace`."""
        headers: dict[str, str] = {}
        try:
            from opentelemetry.propagate import inject  # The package is optional.
        except ImportError:
            pass
        else:
            inject(headers)
        if self.trace and "traceparent" not in headers:
            headers["traceparent"] = f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"
        return headers


class Client(Core):
    """A blocking client, which several threads may share."""

    _is_async = False

    def predict(
        self,
        model: str,
        payload: Any = None,
        /,
        *,
        version: Text = None,
        timeout: Seconds = None,
        headers: Headers = None,
        **inputs: Any,
    ) -> Any:
        """Send one request and return the model's response.

        Args:
            model: The name of the model.
            payload: The only input. A path, an open file or a PIL image is sent as a file; an
                array or tensor as a tensor of its shape and dtype; other values as JSON.
            version: A version of the model, or a label. None is the default version.
            timeout: Seconds for this call, in place of the client's timeout.
            headers: Additional headers of the request.
            **inputs: The inputs by name, in place of `payload`.

        Returns:
            The values of a JSON response, str for text, numpy arrays by name for tensors, or bytes.

        Raises:
            TypeError: The model does not take these inputs.
            RequestFailed: The server answers with an error; the subclass shows the kind of error.
            DeadlineExceeded: The timeout has passed.
            ConnectionFailed: No server answers, or it ended the connection.
            InvalidAnswer: The body of the response contradicts its headers.
        """
        return _run_blocking(self._predict(model, payload, version, timeout, headers, inputs))

    def stream(
        self,
        model: str,
        payload: Any = None,
        /,
        *,
        version: Text = None,
        timeout: Seconds = None,
        headers: Headers = None,
        **inputs: Any,
    ) -> Iterator[Piece]:
        """Send one request and yield the pieces of the response as they arrive.

        The arguments are the same as for `predict`. Closing the iterator cancels the request.

        Yields:
            `Event` for server-sent events, str for text, or bytes.

        Raises:
            StreamInterrupted: The response ended early, or an event reports an error. The earlier
                pieces are valid.
        """
        pieces = self._stream(model, payload, version, timeout, headers, inputs)
        try:
            while True:
                yield _run_blocking(anext(pieces))
        except StopAsyncIteration:
            pass
        finally:
            _run_blocking(pieces.aclose())

    def feedback(self, model: str, items: FeedbackItems) -> dict[str, Any]:
        """Report the truth of earlier answers to a server that monitors the model.

        The same item may be sent again: it is counted once.

        Args:
            model: The name of the model.
            items: One item or a list of at most 10,000: a `request_id` or a `key`, and the `truth`
                or a `contest`; docs/guides/monitoring.md lists all members.

        Returns:
            The numbers `accepted` and `duplicates`, and `errors`: a list with the `index`, `code`
            and `message` of each item that was not stored.
        """
        return _run_blocking(self._feedback(model, items))

    def metadata(self, model: str, *, version: str | None = None) -> dict[str, Any]:
        """Return a model's versions, inputs and outputs (Open Inference Protocol)."""
        return _run_blocking(self._metadata(model, version))

    def model_names(self) -> list[str]:
        """Return the names of the server's models."""
        return _run_blocking(self._model_names())

    def close(self) -> None:
        """Close all connections."""
        _run_blocking(self._http.aclose())

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251  # No event loop runs this coroutine.


class AsyncClient(Core):
    """A client for asyncio and trio, with the arguments of `Client`."""

    _is_async = True
    _sleep = staticmethod(anyio.sleep)

    async def predict(
        self,
        model: str,
        payload: Any = None,
        /,
        *,
        version: Text = None,
        timeout: Seconds = None,
        headers: Headers = None,
        **inputs: Any,
    ) -> Any:
        """Send one request and return the model's response, like `Client.predict`."""
        return await self._predict(model, payload, version, timeout, headers, inputs)

    def stream(
        self,
        model: str,
        payload: Any = None,
        /,
        *,
        version: Text = None,
        timeout: Seconds = None,
        headers: Headers = None,
        **inputs: Any,
    ) -> AsyncIterator[Piece]:
        """Send one request and yield the pieces of the response, like `Client.stream`."""
        return self._stream(model, payload, version, timeout, headers, inputs)

    async def feedback(self, model: str, items: FeedbackItems) -> dict[str, Any]:
        """Report the truth of earlier answers, like `Client.feedback`."""
        return await self._feedback(model, items)

    async def metadata(self, model: str, *, version: str | None = None) -> dict[str, Any]:
        """Return a model's versions, inputs and outputs (Open Inference Protocol)."""
        return await self._metadata(model, version)

    async def model_names(self) -> list[str]:
        """Return the names of the server's models."""
        return await self._model_names()

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()


class _Blocking:
    """An `httpx.Client` with the methods of `httpx.AsyncClient` that the clients call."""

    def __init__(self, http: httpx.Client) -> None:
        self._http, self.build_request = http, http.build_request

    async def send(self, request: httpx.Request, *, stream: bool) -> httpx.Response:
        response = self._http.send(request, stream=stream)
        response.stream = _BlockingStream(response.stream)
        return response

    async def aclose(self) -> None:
        self._http.close()


class _BlockingStream(httpx.AsyncByteStream):
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self._stream:
            yield chunk

    async def aclose(self) -> None:
        self._stream.close()


def _run_blocking(coroutine: Awaitable[ResultT]) -> ResultT:
    """Return the result of a coroutine that never waits for an event loop."""
    try:
        next(coroutine.__await__())
    except StopIteration as end:
        result: ResultT = end.value
        return result
    raise RuntimeError(
        "A blocking client cannot wait for an event loop; give it a transport that blocks."
    )


def _path(prefix: str, model: str, version_prefix: str, version: str | None) -> str:
    return f"{prefix}/{quote(model, safe='')}" + (
        "" if version is None else f"{version_prefix}/{quote(version, safe='')}"
    )


async def _chunks(response: httpx.Response, deadline: Deadline) -> AsyncGenerator[bytes, None]:
    try:
        async for chunk in response.aiter_bytes():
            deadline.remaining()
            yield chunk
    except httpx.TimeoutException as error:
        raise deadline.exceeded() from error
    except httpx.HTTPError as error:
        hint = f"the server's log has why, under request {response.headers.get('x-request-id')}"
        raise StreamInterrupted(f"The answer ended early; {hint}.") from error
    finally:
        await response.aclose()
