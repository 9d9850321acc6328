"""gRPC calls count against the limits per client, like HTTP requests."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from tsx_runtime.api.access.auth import Guard
from tsx_runtime.api.access.client_limits import ClientLimits
from tsx_runtime.api.access.tokens import BearerToken
from tsx_runtime.core.scheduling.byte_budget import ByteBudget
from tsx_runtime.features.grpc.admission import Admission, Admissions
from tsx_runtime.features.grpc.service import Ledger, Service
from tsx_runtime.metrics.response_counts import ResponseCounts
from tsx_runtime.settings.schema import Settings


async def end_calls(
    limits: ClientLimits, calls: list[tuple[tuple[str, str], ...]]
) -> list[tuple[grpc.StatusCode, str]]:
    """Make one call per metadata and return each call's code and retry-after."""

    async def check(message: Any, context: Any) -> Any:
        return health_pb2.HealthCheckResponse()

    admission = Admission(Settings(), ByteBudget(1 << 20))
    service = Service(
        "tsx.Test",
        Guard(BearerToken("secret")),
        Ledger(ResponseCounts(), clients=limits),
        Admissions(admission, admission),
    )
    service.unary("Check", check, health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        results = []
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            method = channel.unary_unary(
                "/tsx.Test/Check", health_pb2.HealthCheckRequest.SerializeToString
            )
            for metadata in calls:
                call = method(health_pb2.HealthCheckRequest(), metadata=metadata)
                results.append(
                    (await call.code(), dict(await call.trailing_metadata()).get("retry-after", ""))
                )
        return results
    finally:
        await server.stop(0)


def test_calls_beyond_the_limit_end_with_resource_exhausted() -> None:
    limits = ClientLimits(requests=2, proxies=["127.0.0.1"], clock=lambda: 1.0)
    right_token = ("authorization", "Bearer secret")
    results = asyncio.run(
        end_calls(
            limits, [(right_token,)] * 3 + [(right_token, ("x-forwarded-for", "203.0.113.9"))]
        )
    )
    assert results == [(grpc.StatusCode.OK, "")] * 2 + [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "1"),
        (grpc.StatusCode.OK, ""),
    ]


def test_wrong_tokens_are_limited_but_the_right_one_is_accepted() -> None:
    limits = ClientLimits(failures=1, clock=lambda: 1.0)
    calls = [
        (("authorization", f"Bearer {token}"),) for token in ("wrong", "wrong", "wrong", "secret")
    ]
    codes = [code for code, _ in asyncio.run(end_calls(limits, calls))]
    assert codes == [grpc.StatusCode.PERMISSION_DENIED] * 2 + [
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.OK,
    ]
