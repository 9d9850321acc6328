"""The routes of SageMaker: `/ping`, `/execution-parameters`, and bodies of many lines.

See https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-inference-code.html and
your-algorithms-batch-code.html
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from functools import cache, partial
from typing import Any
from urllib.parse import parse_qs, unquote
from weakref import WeakKeyDictionary

from fastapi import Request

from tsx_runtime import wire
from tsx_runtime.api import errors
from tsx_runtime.api.headers import (
    JSON,
    NO_CACHE,
    Pair,
    handler_headers,
    new_request_id,
    shown_headers,
)
from tsx_runtime.api.management.describe import is_given_up
from tsx_runtime.api.messages import (
    MAX_MANAGEMENT_BODY,
    ClientGone,
    Receive,
    Scope,
    Send,
    cased_headers,
    raw_path,
    read_body,
    send_whole,
    unread_body_of,
    while_client_waits,
)
from tsx_runtime.api.request_options import deadline, priority_and_timeout
from tsx_runtime.api.urls import Target, check_query, find_target, resolve
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.scheduling.job import Route, WaitingJob
from tsx_runtime.errors import (
    BadRequest,
    InvalidModel,
    MethodNotAllowed,
    ResourceNotFound,
    TsxError,
    error_body,
)
from tsx_runtime.http.app import ServerApp
from tsx_runtime.http.routes.responses import read_object
from tsx_runtime.server.startup import StartModel, load_all
from tsx_runtime.targets.sagemaker import rows
from tsx_runtime.targets.sagemaker.batch_transform import (
    ROWS,
    LineAnswer,
    LineFailed,
    LineFormat,
    answer_lines,
    as_line,
    as_row,
    check_answer,
    choose_format,
    find_format,
    join_lines,
    max_queued_lines,
    split_lines,
)
from tsx_runtime.targets.sagemaker.environment import PAYLOAD_MB, SageMakerSettings, Transform
from tsx_runtime.targets.sagemaker.multi_model import LoadedModel, Models, registry_name

PING = b"/ping"
PARAMETERS = b"/execution-parameters"
INVOCATIONS = b"/invocations"
MODELS = b"/models"
INVOKE = b"/invoke"
MAX_PAYLOAD_MB = 100  # limit for a job's concurrent requests together
NETWORK_ISOLATION_HINT = (
    "Under network isolation (EnableNetworkIsolation), and in a subnet without a route to the"
    " internet, nothing can be installed: put the packages into the image, or their wheels beside"
    " requirements.txt."
)
SendAnswer = Callable[..., Awaitable[None]]  # its arguments are status, headers, body, unread body

FORWARDED_HEADER_PREFIX = (
    b"x-amzn-sagemaker-"  # SageMaker forwards headers with this prefix to the client.
)


class SageMakerApp:
    """A `PlatformHook` for one model, which is loaded while health checks are answered."""

    def __init__(
        self,
        environment: SageMakerSettings,
        registry: Registry,
        app: ServerApp,
        takes_lines: Callable[[ModelVersion], bool],
    ) -> None:
        assert app.predictions is not None
        self.registry = registry
        self.environment = environment
        self.counts = app.counts
        self.predictions = app.predictions
        self._takes_lines = takes_lines
        self._line_semaphores: WeakKeyDictionary[ModelVersion, asyncio.Semaphore] = (
            WeakKeyDictionary()
        )
        self._is_loaded = False

    async def load(self, models: Sequence[StartModel]) -> None:
        try:
            await load_all(self.registry, models)
        except InvalidModel as error:
            raise InvalidModel(f"{error.message}\n{NETWORK_ISOLATION_HINT}") from error
        self._is_loaded = True

    def wants(self, path: bytes, headers: list[Pair]) -> bool:
        if path in (PING, PARAMETERS):
            return True
        return (
            path.startswith((INVOCATIONS, b"/models/"))
            and self._find_line_format(path, headers) is not None
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id, path = new_request_id(), raw_path(scope)
        answer = partial(self.answer, send, scope, request_id)
        try:
            if path == PING:
                status, reason = self.health()
                await answer(status, *(_json_response(status=reason) if reason else ((), b"")))
            elif path == PARAMETERS:
                await answer(200, *_json_response(**parameters(self._versions(), self.environment)))
            else:
                # The settings may require a token, or a plugin may check requests.
                if self.predictions.guard is not None:
                    self.predictions.guard.check(scope["headers"])
                await self.route(scope, receive, send, answer)
        except ClientGone:
            return
        except Exception as error:  # the boundary of a request
            refusal = errors.to_tsx_error(error, request_id)
            await answer(*errors.error_response(refusal), unread_body_of(refusal, receive))

    async def route(self, scope: Scope, receive: Receive, send: Send, answer: SendAnswer) -> None:
        """Answer a request whose path is neither `/ping` nor `/execution-parameters`."""
        await self.lines(scope, receive, answer)

    def health(self) -> tuple[int, str]:
        """Return the status for a ping, and a reason if the status is not 200."""
        if self.registry.stopping:
            return 503, "the server is stopping"
        versions = self._versions()
        if not self._is_loaded:
            return 503, "; ".join(map(_describe_loading, versions)) or "the model is being opened"
        failures = [_describe_failure(version) for version in versions if is_given_up(version)]
        return (503, "; ".join(failures)) if failures else (200, "")

    async def answer(
        self,
        send: Send,
        scope: Scope,
        request_id: bytes,
        status: int,
        pairs: Iterable[Pair],
        body: bytes,
        unread: Receive | None = None,
    ) -> None:
        self.counts.add(status)
        headers = tuple(pairs)
        names = {name for name, _ in headers}
        await send_whole(
            send,
            scope,
            status,
            (*headers, *(pair for pair in NO_CACHE if pair[0] not in names)),
            request_id,
            body,
            unread,
        )

    # Bodies of many lines

    async def lines(self, scope: Scope, receive: Receive, answer: SendAnswer) -> None:
        headers: list[Pair] = scope["headers"]
        line_format = self._find_line_format(raw_path(scope), headers)
        target = find_target(scope["path"], scope["query_string"])
        assert line_format is not None
        assert target is not None
        # This refuses an unknown model before the body is read.
        resolve(self.registry, target)
        body = await read_body(scope, receive, self.predictions.limit)
        if next(split_lines(body), None) is None:
            raise BadRequest("The body is empty: each of its lines must be one input of the model.")
        route = resolve(self.registry, target, headers)
        max_bytes = self.registry.settings.max_response_size
        answer_format = choose_format(
            _header(headers, b"accept") or self.environment.accept.encode("latin-1", "replace"),
            line_format,
        )
        answer_format = ROWS if line_format is ROWS else answer_format
        make_job = _job_factory(
            scope,
            target,
            line_format,
            route,
            self.registry.hidden_headers.for_model(route.name),
            partial(_convert_line, answer_format),
        )
        try:
            answers = await while_client_waits(
                answer_lines(
                    split_lines(body), route, self._line_semaphore(target), make_job, max_bytes
                ),
                receive,
            )
        except LineFailed as failure:
            text = f"{failure} No line was processed: correct that line or remove it."
            kind = BadRequest.type if failure.status < 500 else TsxError.type
            await answer(failure.status, (JSON,), error_body(failure.status, kind, text))
            return
        pairs = [
            pair
            for first in answers[:1]
            for pair in handler_headers(first.headers)
            if pair[0].startswith(FORWARDED_HEADER_PREFIX)
        ]
        pairs.append((b"content-type", answer_format.media_type))
        await answer(200, pairs, join_lines(line_answer.body for line_answer in answers))

    def _find_line_format(self, path: bytes, headers: list[Pair]) -> LineFormat | None:
        """Return the format of the lines, or None if the body is not split into lines."""
        line_format = find_format(_header(headers, b"content-type"))
        if line_format is None or self.environment.lines is False:
            return None
        version = self._version(path)
        return (
            line_format
            if version is not None and (self.environment.lines or self._takes_lines(version))
            else None
        )

    def _version(self, path: bytes) -> ModelVersion | None:
        try:
            target = find_target(unquote(path.decode("latin-1")))
            if target is None:
                return None
            name = resolve(self.registry, target).name
        except TsxError:
            return None  # The server's own route will report the error.
        model = self.registry.models[name]
        return model.versions[model.default]

    def _line_semaphore(self, target: Target) -> asyncio.Semaphore:
        model = self.registry.models[resolve(self.registry, target).name]
        version = model.versions[model.default]
        if version not in self._line_semaphores:
            self._line_semaphores[version] = asyncio.Semaphore(max_queued_lines(version))
        return self._line_semaphores[version]

    def _versions(self) -> list[ModelVersion]:
        return [model.versions[model.default] for model in self.registry.models.values()]


def parameters(versions: Sequence[ModelVersion], environment: SageMakerSettings) -> dict[str, Any]:
    """Return the parameters for a batch transform job that does not set them.

    Two concurrent requests with many lines are enough to keep a worker busy.
    """
    job: Transform = environment.transform
    payload = job.payload or PAYLOAD_MB
    workers = sum(version.min_workers for version in versions) or 1
    # If bodies are not split, a request is one input, so a full batch needs many requests.
    is_single = environment.lines is False
    requests = (
        sum(version.min_workers * version.batch_size for version in versions)
        if is_single
        else 2 * workers
    )
    return {
        "MaxConcurrentTransforms": (
            job.concurrent or max(1, min(requests, MAX_PAYLOAD_MB // max(1, payload)))
        ),
        "BatchStrategy": job.strategy or ("SINGLE_RECORD" if is_single else "MULTI_RECORD"),
        "MaxPayloadInMB": payload,
    }


def _describe_loading(version: ModelVersion) -> str:
    return f"{version.name} is loading" + (
        f"; its last error: {version.last_error}" if version.last_error else ""
    )


def _describe_failure(version: ModelVersion) -> str:
    return (
        f"the server stopped restarting the workers of {version.name}:"
        f" {version.last_error or 'they kept dying'}"
    )


def _job_factory(
    scope: Scope,
    target: Target,
    line_format: LineFormat,
    route: Route,
    hidden_names: Collection[bytes],
    convert_answer: Callable[[LineAnswer], bytes],
) -> Callable[[int, bytes], tuple[WaitingJob, Callable[[LineAnswer], bytes]]]:
    headers: list[Pair] = scope["headers"]
    priority, timeout_ms = priority_and_timeout(headers)
    forwarded_headers = shown_headers(
        cased_headers(scope),
        {*hidden_names, b"content-type", b"content-length", b"transfer-encoding"},
    )

    @cache
    def meta_tail(kind: bytes) -> bytes:
        block = wire.header_block([*forwarded_headers, (b"Content-Type", kind)])
        return b"\r\n%b\r\n%b" % (scope["query_string"] if target.query else b"", block)

    def make_job(number: int, line: bytes) -> tuple[WaitingJob, Callable[[LineAnswer], bytes]]:
        now, kind, convert = time.monotonic(), line_format.item, convert_answer
        if line_format is ROWS:
            try:
                line, fields = rows.from_line(line)
                kind = str(fields.pop("content_type")).encode("latin-1")
                convert = partial(as_row, sent_fields=fields)
            except (ValueError, KeyError) as error:
                raise LineFailed(number, BadRequest.status, str(error)) from error
        job = WaitingJob(
            new_request_id() + meta_tail(kind),
            line,
            now,
            deadline(now, route.client_timeout, timeout_ms),
            priority,
        )
        return job, convert

    return make_job


def _convert_line(line_format: LineFormat, answer: LineAnswer) -> bytes:
    check_answer(answer)
    try:
        return as_line(answer.body, line_format)
    except UnicodeDecodeError as error:
        raise LineFailed(
            answer.number, 500, "the model's answer is not text, so it cannot be a line."
        ) from error


def _header(headers: list[Pair], header: bytes) -> bytes:
    return next((value for name, value in headers if name == header), b"")


def _json_response(**fields: Any) -> tuple[tuple[Pair, ...], bytes]:
    """Return the headers and the body of a JSON response."""
    return (JSON,), json.dumps(fields, ensure_ascii=False).encode() + b"\n"


class MultiModel(SageMakerApp):
    """A `PlatformHook` for models that SageMaker loads and unloads.

    The container is healthy even without models.
    """

    def __init__(
        self,
        environment: SageMakerSettings,
        registry: Registry,
        app: ServerApp,
        takes_lines: Callable[[ModelVersion], bool],
        models: Models,
    ) -> None:
        super().__init__(environment, registry, app, takes_lines)
        self._models = models
        self._is_loaded = True

    async def load(self, models: Sequence[StartModel]) -> None:
        """Do nothing, because SageMaker itself loads the models."""

    def wants(self, path: bytes, headers: list[Pair]) -> bool:
        """Tell whether this app handles a request.

        If a model's name in the registry is SageMaker's name, the server's own lanes handle its
        invocations.
        """
        if path.startswith(MODELS + b"/") and path.endswith(INVOKE):
            name = path[len(MODELS) + 1 : -len(INVOKE)].decode("latin-1")
            return registry_name(name) != name or super().wants(path, headers)
        return path == MODELS or path.startswith(MODELS + b"/") or super().wants(path, headers)

    async def route(self, scope: Scope, receive: Receive, send: Send, answer: SendAnswer) -> None:
        """Answer `/models`, `/models/NAME`, `/models/NAME/invoke`.

        NAME may contain percent-encoded slashes.
        """
        path, method = raw_path(scope), scope["method"]
        _, _, subpath = path.partition(MODELS)
        parts = [unquote(part.decode("latin-1")) for part in subpath.split(b"/")[1:]]
        if len(parts) == 2 and parts[1] == "invoke":
            scope["path"] = f"/models/{self._models.find(parts[0]).registered_name}/invoke"
            scope["raw_path"] = scope["path"].encode()
            if self._find_line_format(scope["raw_path"], scope["headers"]) is not None:
                await self.lines(scope, receive, answer)
            else:
                await self.predictions(scope, receive, send)
            return
        if len(parts) > 1 or path.startswith(INVOCATIONS):
            raise ResourceNotFound(errors.NOT_FOUND)
        fields = await self._manage(
            method, parts[0] if parts and parts[0] else None, scope, receive
        )
        await answer(200, *_json_response(**fields))

    async def _manage(
        self, method: str, name: str | None, scope: Scope, receive: Receive
    ) -> dict[str, Any]:
        if method == "POST" and name is None:
            max_bytes = min(self.predictions.limit, MAX_MANAGEMENT_BODY)
            fields = await read_object(
                Request(scope, receive), max_bytes, '{"model_name": "NAME", "url": "DIRECTORY"}'
            )
            return _as_json(
                await self._models.load(
                    str(fields.get("model_name") or ""), str(fields.get("url") or "")
                )
            )
        if method == "GET" and name is None:
            check_query(scope["query_string"])
            token = parse_qs(scope["query_string"].decode("latin-1")).get(
                "next_page_token", [None]
            )[-1]
            page, next_token = self._models.page(token)
            return {
                "models": [_as_json(model) for model in page],
                **({"nextPageToken": next_token} if next_token else {}),
            }
        if method == "GET" and name is not None:
            return _as_json(self._models.find(name))
        if method == "DELETE" and name is not None:
            await self._models.unload(name)
            return {"status": f"Model {name} is unloaded"}
        raise MethodNotAllowed(allowed=("GET", "POST") if name is None else ("GET", "DELETE"))


def _as_json(model: LoadedModel) -> dict[str, str]:
    return {"modelName": model.name, "modelUrl": model.url}
