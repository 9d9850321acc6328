"""The gRPC servers: one a port, on the event loop of the HTTP servers, with the services of the roles that share it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import grpc
from grpc_reflection.v1alpha import reflection

from tsx_runtime.addresses import is_loopback_host
from tsx_runtime.core.registry import Registry
from tsx_runtime.errors import SettingError
from tsx_runtime.grpc.health import Health
from tsx_runtime.grpc.inference import Inference
from tsx_runtime.grpc.management import ManagementCalls
from tsx_runtime.grpc.open_inference import NAMES, OpenInference
from tsx_runtime.grpc.pool import POOL
from tsx_runtime.grpc.service import Ledger, Service
from tsx_runtime.http.access import access_log
from tsx_runtime.http.asgi import Counts
from tsx_runtime.http.auth import build_guards
from tsx_runtime.http.client_limits import client_limits
from tsx_runtime.http.management import Management
from tsx_runtime.http.tokens import Keys
from tsx_runtime.settings import Settings

LEAST_PING = 10_000  # ms between the pings of a client that keeps its connection open


class GrpcServer:
    """Bound when it is made; it answers from `start` on. Raises SettingError where it cannot be bound."""

    def __init__(
        self,
        registry: Registry,
        settings: Settings,
        keys: Keys,
        roles: Collection[str],
        target: str,
        certificate: tuple[bytes, bytes] | None,
        counts: Counts,
    ):
        """`target`: HOST:PORT. `certificate`: private key and chain, PEM. `counts`: those of the HTTP servers."""
        self.server = grpc.aio.server(options=options(settings, roles))
        self.log = access_log(settings)
        clients = client_limits(settings, is_local=all(is_loopback_host(getattr(settings, f"{role}_address")) for role in roles))
        services = _services(registry, settings, keys, roles, Ledger(counts, self.log, registry.tracer, clients))
        self.health = Health(registry, [service.name for service in services])
        services.append(self.health.service(Ledger(counts)))
        self.server.add_generic_rpc_handlers(tuple(service.handler for service in services))
        _add_reflection(self.server, [service.name for service in services])
        try:
            if certificate is None:
                self.port = self.server.add_insecure_port(target)
            else:
                self.port = self.server.add_secure_port(target, grpc.ssl_server_credentials([certificate]))
        except RuntimeError as error:
            names = " and ".join(f"{role}_port" for role in roles)
            raise SettingError(f"{names}: cannot bind to {target}: {error}. Is the port in use? Choose another.") from error

    async def start(self) -> None:
        await self.server.start()

    async def stop(self, grace: float) -> None:
        """No new calls; those that have begun may take `grace` seconds."""
        self.health.end()
        await self.server.stop(grace)
        if self.log is not None:
            self.log.flush()


def options(settings: Settings, roles: Collection[str]) -> list[tuple[str, Any]]:
    """What gRPC's core is told of a port; where roles share it, the first one's age holds."""
    role = next(iter(roles))
    age, grace = getattr(settings, f"{role}_max_connection_age_ms"), getattr(settings, f"{role}_max_connection_age_grace_ms")
    chosen: list[tuple[str, Any]] = [
        ("grpc.max_receive_message_length", settings.max_request_size),
        ("grpc.max_send_message_length", -1),  # the worker sees to max_response_size
        ("grpc.max_metadata_size", settings.max_header_size),
        ("grpc.so_reuseport", 0),  # a second server on the port is told that it is in use
        ("grpc.http2.min_ping_interval_without_data_ms", LEAST_PING),
        ("grpc.keepalive_permit_without_calls", 1),
    ]
    if age is not None:
        chosen.append(("grpc.max_connection_age_ms", age))
    if grace is not None:
        chosen.append(("grpc.max_connection_age_grace_ms", grace))
    return chosen


def _services(registry: Registry, settings: Settings, keys: Keys, roles: Collection[str], ledger: Ledger) -> list[Service]:
    guards = build_guards(settings, keys, registry.plugins.authentication.values())
    services: list[Service] = []
    if "grpc_inference" in roles:
        services.append(Inference(registry).service(guards.inference, ledger))
        services += [OpenInference(registry, messages).service(name, guards.inference, ledger) for name, messages in NAMES.items()]
    if "grpc_management" in roles:
        services.append(ManagementCalls(Management(registry, settings.max_request_size)).service(guards.management, ledger))
    return services


def _add_reflection(server: grpc.aio.Server, names: list[str]) -> None:
    """The messages of health checking and reflection are in protobuf's own pool; a client that asks gets all of them from one."""
    from grpc_health.v1 import health_pb2
    from grpc_reflection.v1alpha import reflection_pb2

    for file in (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):
        POOL.AddSerializedFile(file.serialized_pb)
    reflection.enable_server_reflection([*names, reflection.SERVICE_NAME], server, pool=POOL)
