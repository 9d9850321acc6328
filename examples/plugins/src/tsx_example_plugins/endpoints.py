"""`/execution-parameters`, which SageMaker's batch transform asks for before it sends anything."""

from __future__ import annotations

from tsx_runtime.plugins import Endpoint, EndpointRequest, EndpointResponse, ServerView


def answer(request: EndpointRequest, server: ServerView) -> EndpointResponse:
    return EndpointResponse(
        {
            "MaxConcurrentTransforms": max(1, sum(model.workers for model in server.models())),
            "BatchStrategy": "MULTI_RECORD",
            "MaxPayloadInMB": server.setting("max_request_size") // (1 << 20),
        }
    )


execution_parameters = Endpoint("/execution-parameters", answer, role="inference")
