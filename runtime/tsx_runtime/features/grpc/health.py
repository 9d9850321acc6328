"""gRPC health checking for the server (empty name), its services and its models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from tsx_runtime.api.management.describe import unready_versions
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.errors import ModelNotFound, ModelVersionNotFound
from tsx_runtime.features.grpc.admission import Admission, Admissions
from tsx_runtime.features.grpc.calls import Context
from tsx_runtime.features.grpc.messages import SMALL_MESSAGE_BYTES
from tsx_runtime.features.grpc.service import Ledger, Service
from tsx_runtime.features.grpc.statuses import CallRefused, Refusal, details_text

SERVICE_NAME = "grpc.health.v1.Health"


class HealthService:
    """The health service, which reports the server, its services, and models.

    The server and its services have the status of `/readyz`. A model is named `MODEL` or
    `MODEL/VERSION`.
    """

    def __init__(self, registry: Registry, services: Collection[str]) -> None:
        self.registry = registry
        self.services = {"", SERVICE_NAME, *services}
        self._is_stopped = False
        self._watchers: set[asyncio.Event] = set()
        registry.on_readiness.append(self._wake)

    def service(self, ledger: Ledger, probes: Admission) -> Service:
        service = Service(
            SERVICE_NAME, None, ledger, Admissions(probes, probes), SMALL_MESSAGE_BYTES
        )
        service.unary("Check", self.check, HealthCheckRequest, HealthCheckResponse)
        service.stream("Watch", self.watch, HealthCheckRequest, HealthCheckResponse)
        return service

    def end(self) -> None:
        """Send the last status to all watchers and end their calls, because the server stops."""
        self._is_stopped = True
        self._wake()
        self.registry.on_readiness.remove(self._wake)

    async def check(self, request: HealthCheckRequest, context: Context) -> HealthCheckResponse:
        status = self._status(request.service)
        if status == HealthCheckResponse.SERVICE_UNKNOWN:
            text = f"There is no service or model named {request.service!r} here."
            raise CallRefused(Refusal(grpc.StatusCode.NOT_FOUND, details_text(text), status=404))
        return HealthCheckResponse(status=status)

    async def watch(
        self, request: HealthCheckRequest, context: Context
    ) -> AsyncGenerator[HealthCheckResponse, None]:
        last_status, change_event = None, asyncio.Event()
        self._watchers.add(change_event)
        try:
            while True:
                change_event.clear()
                status = self._status(request.service)
                if status != last_status:
                    last_status = status
                    yield HealthCheckResponse(status=status)
                elif self._is_stopped:  # The last status was sent.
                    return
                else:
                    await change_event.wait()
        finally:
            self._watchers.discard(change_event)

    def _status(self, service: str) -> HealthCheckResponse.ServingStatus:
        if service in self.services:
            is_serving = not unready_versions(self.registry)
        else:
            name, _, number = service.partition("/")
            try:
                version = self.registry.find(name, number or None)
            except (ModelNotFound, ModelVersionNotFound):
                return HealthCheckResponse.SERVICE_UNKNOWN
            is_serving = version.ready
        is_serving = is_serving and not self._is_stopped and not self.registry.stopping
        return HealthCheckResponse.SERVING if is_serving else HealthCheckResponse.NOT_SERVING

    def _wake(self) -> None:
        for change_event in self._watchers:
            change_event.set()
