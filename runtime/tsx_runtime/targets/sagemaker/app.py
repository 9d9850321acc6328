"""The routes that SageMaker needs in addition to predictions and metrics: `/ping`,
`/execution-parameters`, bodies of many lines.

https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-inference-code.html and
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
    as_sent,
    raw_path,
    read_body,
    rest_of,
    send_whole,
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
from tsx_runtime.targets.sagemaker import rows
from tsx_runtime.targets.sagemaker.batch_transform import (
    ROWS,
    LineAnswer,
    LineFailed,
    LineFormat,
    accepted_form,
    answer_each,
    as_line,
    as_row,
    check,
    form_of,
    joined,
    lines_of,
    room,
)
from tsx_runtime.targets.sagemaker.environment import PAYLOAD, SageMakerSettings, Transform
from tsx_runtime.targets.sagemaker.multi_model import LoadedModel, Models, registry_name
from tsx_runtime.targets.server.startup import StartModel, load_all

PING, PARAMETERS, INVOCATIONS, MODELS = (
    b"/ping",
    b"/execution-parameters",
    b"/invocations",
    b"/models",
)
INVOKE = b"/invoke"
MOST_PAYLOAD = 100  # MB of all concurrent requests of a job together
ISOLATED = (
    "Under network isolation (EnableNetworkIsolation), and in a subnet without a route to the"
    " internet, nothing can be installed: put the packages into the image, or their wheels beside"
    " requirements.txt."
)
Answer = Callable[..., Awaitable[None]]  # status, headers, body, and what rest is to be read

TOLD = b"x-amzn-sagemaker-"  # prefix of the answer headers that SageMaker passes on


class SageMakerApp:
    """One model, which loads while SageMaker sends health checks. See `api.messages.Platform`."""

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
        self._gates: WeakKeyDictionary[ModelVersion, asyncio.Semaphore] = WeakKeyDictionary()
        self._loaded = False

    async def load(self, models: Sequence[StartModel]) -> None:
        try:
            await load_all(self.registry, models)
        except InvalidModel as error:
            raise InvalidModel(f"{error.message}\n{ISOLATED}") from error
        self._loaded = True

    def wants(self, path: bytes, headers: list[Pair]) -> bool:
        if path in (PING, PARAMETERS):
            return True
        return path.startswith((INVOCATIONS, b"/models/")) and self._form(path, headers) is not None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id, path = new_request_id(), raw_path(scope)
        answer = partial(self.answer, send, scope, request_id)
        try:
            if path == PING:
                status, reason = self.health()
                await answer(status, *(_facts(status=reason) if reason else ((), b"")))
            elif path == PARAMETERS:
                await answer(200, *_facts(**parameters(self._versions(), self.environment)))
            else:
                # Of a plugin, or where tokens are required nevertheless.
                if self.predictions.guard is not None:
                    self.predictions.guard.check(scope["headers"])
                await self.route(scope, receive, send, answer)
        except ClientGone:
            return
        except TsxError as error:
            await answer(*errors.fault(error), rest_of(error, receive))
        except Exception as error:  # the boundary of a request
            await answer(*errors.fault(errors.unexpected(error, request_id)))

    async def route(self, scope: Scope, receive: Receive, send: Send, answer: Answer) -> None:
        await self.lines(scope, receive, answer)

    def health(self) -> tuple[int, str]:
        """The status of a ping, and the reason where it is not 200."""
        if self.registry.stopping:
            return 503, "the server is stopping"
        versions = self._versions()
        if not self._loaded:
            return 503, "; ".join(map(_coming, versions)) or "the model is being opened"
        bad = [_given_up(version) for version in versions if is_given_up(version)]
        return (503, "; ".join(bad)) if bad else (200, "")

    async def answer(
        self,
        send: Send,
        scope: Scope,
        request_id: bytes,
        status: int,
        pairs: Iterable[Pair],
        body: bytes,
        rest: Receive | None = None,
    ) -> None:
        self.counts.add(status)
        headers = tuple(pairs)
        there = {name for name, _ in headers}
        await send_whole(
            send,
            scope,
            status,
            (*headers, *(pair for pair in NO_CACHE if pair[0] not in there)),
            request_id,
            body,
            rest,
        )

    # Bodies of many lines

    async def lines(self, scope: Scope, receive: Receive, answer: Answer) -> None:
        headers: list[Pair] = scope["headers"]
        form, target = (
            self._form(raw_path(scope), headers),
            find_target(scope["path"], scope["query_string"]),
        )
        assert form is not None
        assert target is not None
        resolve(self.registry, target)  # before the body, which would be sent for nothing
        body = await read_body(scope, receive, self.predictions.limit)
        if next(lines_of(body), None) is None:
            raise BadRequest("The body is empty: each of its lines must be one input of the model.")
        route = resolve(self.registry, target, headers)
        most = self.registry.settings.max_response_size
        given = accepted_form(
            _header(headers, b"accept") or self.environment.accept.encode("latin-1", "replace"),
            form,
        )
        given = ROWS if form is ROWS else given
        job_of = _job_maker(
            scope,
            target,
            form,
            route,
            self.registry.hidden_headers.of(route.name),
            partial(_line, given),
        )
        try:
            answers = await while_client_waits(
                answer_each(lines_of(body), route, self._gate(target), job_of, most), receive
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
            if pair[0].startswith(TOLD)
        ]
        pairs.append((b"content-type", given.media_type))
        await answer(200, pairs, joined(each.body for each in answers))

    def _form(self, path: bytes, headers: list[Pair]) -> LineFormat | None:
        """The format of a body that is split into lines; None where the model gets it whole."""
        form = form_of(_header(headers, b"content-type"))
        if form is None or self.environment.lines is False:
            return None
        version = self._version(path)
        return (
            form
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
            return None  # the server's own route reports what is wrong
        model = self.registry.models[name]
        return model.versions[model.default]

    def _gate(self, target: Target) -> asyncio.Semaphore:
        model = self.registry.models[resolve(self.registry, target).name]
        version = model.versions[model.default]
        if version not in self._gates:
            self._gates[version] = asyncio.Semaphore(room(version))
        return self._gates[version]

    def _versions(self) -> list[ModelVersion]:
        return [model.versions[model.default] for model in self.registry.models.values()]


def parameters(versions: Sequence[ModelVersion], environment: SageMakerSettings) -> dict[str, Any]:
    """The parameters of a batch transform job that does not set them.

    Two bodies of lines keep a worker busy.
    """
    job: Transform = environment.transform
    payload = job.payload or PAYLOAD
    workers = sum(version.min_workers for version in versions) or 1
    # Then a request is one input, and full batches need as many of them.
    alone = environment.lines is False
    wanted = (
        sum(version.min_workers * version.batch_size for version in versions)
        if alone
        else 2 * workers
    )
    return {
        "MaxConcurrentTransforms": (
            job.concurrent or max(1, min(wanted, MOST_PAYLOAD // max(1, payload)))
        ),
        "BatchStrategy": job.strategy or ("SINGLE_RECORD" if alone else "MULTI_RECORD"),
        "MaxPayloadInMB": payload,
    }


def _coming(version: ModelVersion) -> str:
    return f"{version.name} is loading" + (
        f"; its last error: {version.last_error}" if version.last_error else ""
    )


def _given_up(version: ModelVersion) -> str:
    return (
        f"the server stopped restarting the workers of {version.name}:"
        f" {version.last_error or 'they kept dying'}"
    )


def _job_maker(
    scope: Scope,
    target: Target,
    form: LineFormat,
    route: Route,
    hidden: Collection[bytes],
    line_of: Callable[[LineAnswer], bytes],
) -> Callable[[int, bytes], tuple[WaitingJob, Callable[[LineAnswer], bytes]]]:
    headers: list[Pair] = scope["headers"]
    priority, timeout_ms = priority_and_timeout(headers)
    kept = shown_headers(
        as_sent(scope), {*hidden, b"content-type", b"content-length", b"transfer-encoding"}
    )

    @cache
    def rest(kind: bytes) -> bytes:
        block = wire.header_block([*kept, (b"Content-Type", kind)])
        return b"\r\n%b\r\n%b" % (scope["query_string"] if target.query else b"", block)

    def job_of(number: int, line: bytes) -> tuple[WaitingJob, Callable[[LineAnswer], bytes]]:
        now, kind, convert = time.monotonic(), form.item, line_of
        if form is ROWS:
            try:
                line, fields = rows.from_line(line)
                kind, convert = (
                    str(fields.pop("content_type")).encode("latin-1"),
                    partial(as_row, sent=fields),
                )
            except (ValueError, KeyError) as error:
                raise LineFailed(number, BadRequest.status, str(error)) from error
        job = WaitingJob(
            new_request_id() + rest(kind),
            line,
            now,
            deadline(now, route.client_timeout, timeout_ms),
            priority,
        )
        return job, convert

    return job_of


def _line(form: LineFormat, answer: LineAnswer) -> bytes:
    check(answer)
    try:
        return as_line(answer.body, form)
    except UnicodeDecodeError as error:
        raise LineFailed(
            answer.number, 500, "the model's answer is not text, so it cannot be a line."
        ) from error


def _header(headers: list[Pair], wanted: bytes) -> bytes:
    return next((value for name, value in headers if name == wanted), b"")


def _facts(**what: Any) -> tuple[tuple[Pair, ...], bytes]:
    """The headers and the body of an answer in JSON."""
    return (JSON,), json.dumps(what, ensure_ascii=False).encode() + b"\n"


class MultiModel(SageMakerApp):
    """Models that SageMaker loads and unloads; the container is healthy without any."""

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
        self._loaded = True

    async def load(self, models: Sequence[StartModel]) -> None:
        """SageMaker loads the models."""

    def wants(self, path: bytes, headers: list[Pair]) -> bool:
        """Not a plain invocation of a model whose name is its own: that is for the server's own
        lanes.
        """
        if path.startswith(MODELS + b"/") and path.endswith(INVOKE):
            name = path[len(MODELS) + 1 : -len(INVOKE)].decode("latin-1")
            return registry_name(name) != name or super().wants(path, headers)
        return path == MODELS or path.startswith(MODELS + b"/") or super().wants(path, headers)

    async def route(self, scope: Scope, receive: Receive, send: Send, answer: Answer) -> None:
        """`/models`, `/models/NAME`, `/models/NAME/invoke`; a slash of a name is
        percent-encoded.
        """
        path, method = raw_path(scope), scope["method"]
        _, _, rest = path.partition(MODELS)
        parts = [unquote(part.decode("latin-1")) for part in rest.split(b"/")[1:]]
        if len(parts) == 2 and parts[1] == "invoke":
            scope["path"] = f"/models/{self._models.find(parts[0]).own}/invoke"
            scope["raw_path"] = scope["path"].encode()
            if self._form(scope["raw_path"], scope["headers"]) is not None:
                await self.lines(scope, receive, answer)
            else:
                await self.predictions(scope, receive, send)
            return
        if len(parts) > 1 or path.startswith(INVOCATIONS):
            raise ResourceNotFound(errors.NOT_FOUND)
        facts = await self._manage(method, parts[0] if parts and parts[0] else None, scope, receive)
        await answer(200, *_facts(**facts))

    async def _manage(
        self, method: str, name: str | None, scope: Scope, receive: Receive
    ) -> dict[str, Any]:
        if method == "POST" and name is None:
            most = min(self.predictions.limit, MAX_MANAGEMENT_BODY)
            given = await read_object(
                Request(scope, receive), most, '{"model_name": "NAME", "url": "DIRECTORY"}'
            )
            return _shown(
                await self._models.load(
                    str(given.get("model_name") or ""), str(given.get("url") or "")
                )
            )
        if method == "GET" and name is None:
            check_query(scope["query_string"])
            token = parse_qs(scope["query_string"].decode("latin-1")).get(
                "next_page_token", [None]
            )[-1]
            page, following = self._models.page(token)
            return {
                "models": [_shown(each) for each in page],
                **({"nextPageToken": following} if following else {}),
            }
        if method == "GET" and name is not None:
            return _shown(self._models.find(name))
        if method == "DELETE" and name is not None:
            await self._models.unload(name)
            return {"status": f"Model {name} is unloaded"}
        raise MethodNotAllowed(allowed=("GET", "POST") if name is None else ("GET", "DELETE"))


def _shown(loaded: LoadedModel) -> dict[str, str]:
    return {"modelName": loaded.name, "modelUrl": loaded.url}
