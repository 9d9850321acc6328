"""The clients: `Core` makes the steps of each call, and `Client` and `AsyncClient` carry them out."""

from __future__ import annotations

import os
import secrets
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar
from urllib.parse import quote

import anyio
import httpx

from tsx_client.bodies import Content, Signature, decode, encode
from tsx_client.errors import StreamInterrupted
from tsx_client.exchange import Deadline, Retry, Send, Steps, Wait, exchange
from tsx_client.streams import Event, Pieces

Text: TypeAlias = "str | None"
Seconds: TypeAlias = "float | None"
Headers: TypeAlias = "Mapping[str, str] | None"
ClientT = TypeVar("ClientT", bound="Core")
ResultT = TypeVar("ResultT")


class Model(Generic[ClientT]):
    """One model of a server. `predict` and `stream` are those of its client, without the name."""

    def __init__(self, client: ClientT, name: str) -> None:
        self.client, self.name = client, name

    def predict(self, *payload: Any, **inputs: Any) -> Any:
        return self.client.predict(self.name, *payload, **inputs)

    def stream(self, *payload: Any, **inputs: Any) -> Any:
        return self.client.stream(self.name, *payload, **inputs)


class Models(Generic[ClientT]):
    """`models.digits`, or `models["a-name"]`."""

    def __init__(self, client: ClientT) -> None:
        self._client = client

    def __getitem__(self, name: str) -> Model[ClientT]:
        return Model(self._client, name)

    if not TYPE_CHECKING:  # there, stubs say which there are

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return self[name]


class Core:
    """What both clients have: settings, and each call as steps."""

    _http: httpx.Client | httpx.AsyncClient
    _is_async: bool
    predict: Callable[..., Any]
    stream: Callable[..., Any]

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
        """`token`: None is that of the environment variable TSX_INFERENCE_TOKEN. `timeout`: seconds for a whole call; None: any time.
        `trace`: begin a trace with each call that is in none. `verify`: an `ssl.SSLContext` in place of what this machine trusts.
        `grpc`: HOST:PORT, for predictions that are no tensors (`tsx-client[grpc]`). `transport`: one of httpx, in place of a network.
        """
        self.url = url.rstrip("/")
        self.token = os.environ.get("TSX_INFERENCE_TOKEN") if token is None else token
        self.timeout, self.retry, self.trace = timeout, retry or Retry(), trace
        self.models: Any = Models(self)
        self._signatures: dict[tuple[str, str | None], Signature] = {}
        if grpc is not None:
            from tsx_client import grpc as grpc_transport  # here: an extra

            transport = grpc_transport.over(grpc, transport, self.url, verify, is_async=self._is_async)
        kind: Any = httpx.AsyncClient if self._is_async else httpx.Client
        headers = {} if self.token is None else {"authorization": f"Bearer {self.token}"}
        self._http = kind(base_url=self.url, headers=headers, timeout=None, verify=verify, transport=transport)

    def openai(self, **options: Any) -> Any:
        """The package `openai`'s client of the same kind, for chat and embeddings."""
        import openai  # here: most programs need none

        kind = openai.AsyncOpenAI if self._is_async else openai.OpenAI
        return kind(base_url=f"{self.url}/v1", api_key=self.token or "none", **options)

    def _call(
        self, model: str, payload: Any, inputs: Mapping[str, Any], version: Text, timeout: Seconds, headers: Headers
    ) -> Steps[tuple[httpx.Response, Deadline]]:
        deadline = Deadline(self.timeout if timeout is None else timeout)
        needs_signature = bool(inputs) or hasattr(payload, "__array__")
        signature = (yield from self._signature(model, version, deadline)) if needs_signature else Signature()
        content = encode(signature, payload, inputs)
        response = yield from exchange(lambda: self._request(model, version, content, headers or {}), self.retry, deadline, streams=True)
        return response, deadline

    def _signature(self, model: str, version: str | None, deadline: Deadline) -> Steps[Signature]:
        """Asked for once."""
        if (model, version) not in self._signatures:
            self._signatures[model, version] = Signature.of(
                (yield from self._get(_path("/v2/models", model, "/versions", version), deadline))
            )
        return self._signatures[model, version]

    def _get(self, path: str, deadline: Deadline) -> Steps[Any]:
        response = yield from exchange(lambda: self._http.build_request("GET", path), self.retry, deadline)
        return response.json()

    def _request(self, model: str, version: str | None, content: Content, headers: Mapping[str, str]) -> httpx.Request:
        own = {**content.headers, **({"content-type": content.type} if content.type else {}), **self._trace_headers(), **headers}
        path = _path("/v2/models", model, "/versions", version) + "/infer" if content.infers else _path("/predictions", model, "", version)
        if content.fields is None:
            return self._http.build_request("POST", path, content=content.body, headers=own)
        files = {name: (file or None, body, kind) for name, (file, body, kind) in content.fields.items()}
        fields = {name: body for name, (_, body, _) in content.fields.items()}
        return self._http.build_request("POST", path, files=files, headers=own, extensions={"tsx_fields": fields})

    def _trace_headers(self) -> dict[str, str]:
        """Of the span that OpenTelemetry is in; else, with `trace`, of a new one."""
        headers: dict[str, str] = {}
        try:
            from opentelemetry.propagate import inject  # here: it may not be installed
        except ImportError:
            pass
        else:
            inject(headers)
        if self.trace and "traceparent" not in headers:
            headers["traceparent"] = f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"
        return headers


class Client(Core):
    """A client for one thread or several."""

    _is_async = False
    _http: httpx.Client

    def predict(
        self, model: str, payload: Any = None, /, *, version: Text = None, timeout: Seconds = None, headers: Headers = None, **inputs: Any
    ) -> Any:
        """The answer: values of JSON, text, bytes, or tensors by their names. `version` may be a label."""
        response, deadline = self._run(self._call(model, payload, inputs, version, timeout, headers))
        return decode(response.headers, b"".join(self._parts(response, deadline)))

    def stream(
        self, model: str, payload: Any = None, /, *, version: Text = None, timeout: Seconds = None, headers: Headers = None, **inputs: Any
    ) -> Iterator[Event | str | bytes]:
        """The pieces of the answer as they come. Closing the iterator cancels the request."""
        response, deadline = self._run(self._call(model, payload, inputs, version, timeout, headers))
        pieces = Pieces(response.headers.get("content-type", ""))
        for part in self._parts(response, deadline):
            yield from pieces.feed(part)
        yield from pieces.feed(b"", last=True)

    def metadata(self, model: str, *, version: str | None = None) -> dict[str, Any]:
        """Its versions and inputs."""
        return dict(self._run(self._get(_path("/v2/models", model, "/versions", version), Deadline(self.timeout))))

    def model_names(self) -> list[str]:
        return list(self._run(self._get("/v1/models", Deadline(self.timeout)))["models"])

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _parts(self, response: httpx.Response, deadline: Deadline) -> Iterator[bytes]:
        try:
            for part in response.iter_bytes():
                deadline.left()
                yield part
        except httpx.HTTPError as error:
            raise _interrupted(error, response, deadline) from error
        finally:
            response.close()

    def _run(self, steps: Steps[ResultT]) -> ResultT:
        result: Any = None
        while True:
            try:
                step = steps.send(result)
            except StopIteration as end:
                found: ResultT = end.value
                return found
            if isinstance(step, Wait):
                time.sleep(step.seconds)
            result = None if isinstance(step, Wait) else self._send(step)

    def _send(self, step: Send) -> httpx.Response | Exception:
        try:
            response = self._http.send(step.request, stream=True)
            if not step.streams or not response.is_success:
                response.read()
        except httpx.HTTPError as error:
            return error
        return response


class AsyncClient(Core):
    """The same for asyncio and trio."""

    _is_async = True
    _http: httpx.AsyncClient

    async def predict(
        self, model: str, payload: Any = None, /, *, version: Text = None, timeout: Seconds = None, headers: Headers = None, **inputs: Any
    ) -> Any:
        """As `Client.predict`."""
        response, deadline = await self._run(self._call(model, payload, inputs, version, timeout, headers))
        return decode(response.headers, b"".join([part async for part in self._parts(response, deadline)]))

    async def stream(
        self, model: str, payload: Any = None, /, *, version: Text = None, timeout: Seconds = None, headers: Headers = None, **inputs: Any
    ) -> AsyncIterator[Event | str | bytes]:
        """As `Client.stream`."""
        response, deadline = await self._run(self._call(model, payload, inputs, version, timeout, headers))
        pieces = Pieces(response.headers.get("content-type", ""))
        async with aclosing(self._parts(response, deadline)) as parts:
            async for part in parts:
                for piece in pieces.feed(part):
                    yield piece
        for piece in pieces.feed(b"", last=True):
            yield piece

    async def metadata(self, model: str, *, version: str | None = None) -> dict[str, Any]:
        """Its versions and inputs."""
        return dict(await self._run(self._get(_path("/v2/models", model, "/versions", version), Deadline(self.timeout))))

    async def model_names(self) -> list[str]:
        return list((await self._run(self._get("/v1/models", Deadline(self.timeout))))["models"])

    async def aclose(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def _parts(self, response: httpx.Response, deadline: Deadline) -> AsyncGenerator[bytes, None]:
        try:
            async for part in response.aiter_bytes():
                deadline.left()
                yield part
        except httpx.HTTPError as error:
            raise _interrupted(error, response, deadline) from error
        finally:
            await response.aclose()

    async def _run(self, steps: Steps[ResultT]) -> ResultT:
        result: Any = None
        while True:
            try:
                step = steps.send(result)
            except StopIteration as end:
                found: ResultT = end.value
                return found
            if isinstance(step, Wait):
                await anyio.sleep(step.seconds)
            result = None if isinstance(step, Wait) else await self._send(step)

    async def _send(self, step: Send) -> httpx.Response | Exception:
        try:
            response = await self._http.send(step.request, stream=True)
            if not step.streams or not response.is_success:
                await response.aread()
        except httpx.HTTPError as error:
            return error
        return response


def _path(prefix: str, model: str, between: str, version: str | None) -> str:
    return f"{prefix}/{quote(model, safe='')}" + ("" if version is None else f"{between}/{quote(version, safe='')}")


def _interrupted(error: httpx.HTTPError, response: httpx.Response, deadline: Deadline) -> Exception:
    if isinstance(error, httpx.TimeoutException):
        return deadline.exceeded()
    return StreamInterrupted(f"The answer ended early; the server's log has why, under request {response.headers.get('x-request-id')}.")
