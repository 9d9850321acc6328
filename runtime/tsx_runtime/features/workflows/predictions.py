"""The ASGI app of `/wfpredict/{workflow}`, which runs a request through a whole workflow.

Bodies are not parsed here, as in `http/asgi_lane/predictions.py`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from tsx_runtime.api import errors
from tsx_runtime.api.access.auth import Guard
from tsx_runtime.api.headers import answer_headers, check_status, handler_headers, shown_headers
from tsx_runtime.api.messages import (
    ClientGone,
    Receive,
    Scope,
    Send,
    cased_headers,
    read_body,
    request_id_of,
    send_whole,
    unread_body_of,
    while_client_waits,
)
from tsx_runtime.api.request_options import deadline, priority_and_timeout
from tsx_runtime.errors import ResourceNotFound
from tsx_runtime.features.workflows.manager import Workflows
from tsx_runtime.features.workflows.node import WorkflowRequest
from tsx_runtime.features.workflows.schedule import Output
from tsx_runtime.http.routes import openapi
from tsx_runtime.metrics.response_counts import ResponseCounts
from tsx_runtime.wire import TENANT_HEADER

PREFIX = "/wfpredict/"


def is_workflow_request(scope: Scope) -> bool:
    return str(scope["path"]).startswith(PREFIX)


@dataclass(eq=False)
class WorkflowPredictions:
    """The workflow route of one listener.

    Like TorchServe, it accepts any method, and ignores path segments after the workflow's name.
    """

    workflows: Workflows
    limit: int  # largest body in bytes
    guard: Guard | None
    counts: ResponseCounts
    is_confined: bool = False  # See `answer_headers`.

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = request_id_of(scope)
        unread_body = None  # the `receive` of a refused request's remaining body
        try:
            if self.guard is not None:
                self.guard.check(scope["headers"])
            output = await self._answer(scope, receive, request_id)
            check_status(output.status)
            status, body = output.status, output.body
            headers = answer_headers(
                status, handler_headers(output.headers), is_confined=self.is_confined
            )
        except ClientGone:
            return
        except Exception as error:  # the boundary of a request
            refusal = errors.to_tsx_error(error, request_id)
            status, headers, body = errors.error_response(refusal)
            unread_body = unread_body_of(refusal, receive)
        self.counts.add(status)
        await send_whole(send, scope, status, headers, request_id, body, unread_body)

    async def _answer(self, scope: Scope, receive: Receive, request_id: bytes) -> Output:
        start_time = time.monotonic()
        priority, timeout_ms = priority_and_timeout(scope["headers"])
        name = scope["path"][len(PREFIX) :].partition("/")[0]
        if not name:
            raise ResourceNotFound(errors.NOT_FOUND)
        self.workflows.find(name)  # This refuses an unknown workflow before the body is read.
        body = await read_body(scope, receive, self.limit)
        hidden_names = self.workflows.registry.hidden_headers.for_model(name)
        headers = shown_headers(cased_headers(scope), hidden_names | {TENANT_HEADER})
        request = WorkflowRequest(
            request_id.decode(), headers, body, deadline(start_time, 0.0, timeout_ms), priority
        )
        return await while_client_waits(self.workflows.find(name).answer(request), receive)


def workflow_path() -> dict[str, Any]:
    """Return the path that runs a workflow; its requests are like those of predictions."""
    path = "/wfpredict/{workflow}"
    operation = openapi.prediction(
        path, [openapi.parameter("workflow", "a registered workflow", "dog_breed")]
    )["post"]
    operation |= {
        "summary": "Run a workflow",
        "description": (
            "The first nodes get the request unchanged, the others get the answers of the nodes"
            " before them. The answer is the only leaf's, or one JSON object with each leaf's by"
            " its name."
        ),
    }
    return {path: {"post": operation}}
