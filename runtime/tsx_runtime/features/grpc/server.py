"""The gRPC server of a port, which runs on the event loop of the HTTP servers."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest, ServerReflectionResponse

from tsx_runtime.api.access.auth import Guard, Guards, build_guards, without_browser_checks
from tsx_runtime.api.access.client_limits import client_limits
from tsx_runtime.api.access.tokens import Keys
from tsx_runtime.api.access_log import access_log
from tsx_runtime.api.management.service import ManagementService
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.errors import SettingError
from tsx_runtime.features.grpc.admission import Admission, Admissions
from tsx_runtime.features.grpc.health import HealthService
from tsx_runtime.features.grpc.inference import Inference
from tsx_runtime.features.grpc.management import ManagementCalls
from tsx_runtime.features.grpc.messages import SMALL_MESSAGE_BYTES
from tsx_runtime.features.grpc.open_inference import MESSAGES_BY_SERVICE, OpenInference
from tsx_runtime.features.grpc.service import Ledger, Service
from tsx_runtime.features.grpc.settings import GrpcSettings
from tsx_runtime.grpc.pool import POOL
from tsx_runtime.metrics.response_counts import ResponseCounts
from tsx_runtime.settings.addresses import is_loopback_host
from tsx_runtime.settings.schema import Settings

MAX_CALLS_PER_CONNECTION = 100
CONNECTION_IDLE_MS = 300_000  # A connection without calls is closed after this time.
MIN_PING_INTERVAL_MS = 10_000  # clients may ping this often to keep a connection open
MAX_PING_STRIKES = 2  # too frequent pings that are tolerated before ENHANCE_YOUR_CALM
# Calls that gRPC's core queues before Python sees them. Between this limit and twice of it, the
# core refuses calls at random with RESOURCE_EXHAUSTED; over that, it refuses all.
MAX_PENDING_CALLS = 200
IDENTITY_AND_GZIP = 0b101  # bits of GRPC_COMPRESS_NONE and GRPC_COMPRESS_GZIP
KEEPALIVE_MS = 120_000  # A client that sends nothing for this time is pinged.
KEEPALIVE_TIMEOUT_MS = 20_000  # limit for the client's reply to the ping


class _DepartedClientFilter(logging.Filter):
    """A filter that drops the traceback that gRPC logs when a client leaves early."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("ExecuteBatchError raised in core")


DEPARTED_CLIENT_FILTER = (
    _DepartedClientFilter()
)  # A single instance, because a logger adds the same object only once.


class GrpcServer:
    """The server of one port; the constructor binds the port, and `start` begins to serve."""

    def __init__(
        self,
        registry: Registry,
        settings: Settings,
        keys: Keys,
        roles: Collection[str],
        target: str,
        certificate: tuple[bytes, bytes] | None,
        counts: ResponseCounts,
        *,
        shares_port: bool = False,
    ):
        """Bind the port.

        Args:
            registry: The models.
            settings: The settings of the server.
            keys: The tokens.
            roles: `grpc_inference`, `grpc_management` or both.
            target: HOST:PORT.
            certificate: The private key and the certificate chain as PEM.
            counts: The response counts, which HTTP also uses.
            shares_port: Whether other servers of this user may bind the port at the same time.

        Raises:
            SettingError: The port cannot be bound.
        """
        logging.getLogger("grpc._cython.cygrpc").addFilter(DEPARTED_CLIENT_FILTER)
        self.server = grpc.aio.server(
            options=[*build_channel_options(settings), ("grpc.so_reuseport", int(shares_port))]
        )
        self.log = access_log(settings)
        clients = client_limits(
            settings,
            is_local=all(is_loopback_host(getattr(settings, f"{role}_address")) for role in roles),
        )
        ledger = Ledger(counts, self.log, registry.tracer, clients)
        admissions = Admissions(
            Admission(settings, registry.bytes_in_flight),
            Admission(settings, registry.bytes_in_flight),
        )
        guards = build_guards(settings, keys, registry.plugins.authentication.values())
        services = _services(registry, settings, guards, roles, ledger, admissions)
        self.health = HealthService(registry, [service.name for service in services])
        services.append(self.health.service(Ledger(counts), admissions.probes))
        guard = without_browser_checks(
            guards.inference if "grpc_inference" in roles else guards.management
        )
        services.append(
            _reflection([service.name for service in services], guard, ledger, admissions)
        )
        self.server.add_generic_rpc_handlers(tuple(services))
        try:
            if certificate is None:
                self.port = self.server.add_insecure_port(target)
            else:
                self.port = self.server.add_secure_port(
                    target, grpc.ssl_server_credentials([certificate])
                )
        except RuntimeError as error:
            names = " and ".join(f"{role}_port" for role in roles)
            raise SettingError(
                f"{names}: cannot bind to {target}: {error}. Is the port in use? Choose another."
            ) from error

    async def start(self) -> None:
        await self.server.start()

    async def stop(self, grace: float) -> None:
        """Refuse new calls, and give running calls `grace` seconds to finish."""
        self.health.end()
        await self.server.stop(grace)
        if self.log is not None:
            self.log.flush()


def _services(
    registry: Registry,
    settings: Settings,
    guards: Guards,
    roles: Collection[str],
    ledger: Ledger,
    admissions: Admissions,
) -> list[Service]:
    inference = without_browser_checks(guards.inference)
    services: list[Service] = []
    if "grpc_inference" in roles:
        services.append(Inference(registry).service(inference, ledger, admissions))
        for name, messages in MESSAGES_BY_SERVICE.items():
            services.append(
                OpenInference(registry, messages).service(name, inference, ledger, admissions)
            )
    if "grpc_management" in roles:
        services.append(
            ManagementCalls(ManagementService(registry)).service(
                guards.management, ledger, admissions
            )
        )
    return services


def _reflection(
    names: list[str], guard: Guard | None, ledger: Ledger, admissions: Admissions
) -> Service:
    """Return the reflection service, which requires the port's token.

    The messages of health checking and reflection are in protobuf's default pool. They are copied
    to the server's pool, because the reflection service describes the messages of one pool only.
    """
    for file in (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):
        POOL.AddSerializedFile(file.serialized_pb)
    servicer = reflection.aio.ReflectionServicer([*names, reflection.SERVICE_NAME], pool=POOL)
    service = Service(reflection.SERVICE_NAME, guard, ledger, admissions, SMALL_MESSAGE_BYTES)
    service.stream(
        "ServerReflectionInfo",
        servicer.ServerReflectionInfo,
        ServerReflectionRequest,
        ServerReflectionResponse,
        is_bidirectional=True,
    )
    return service


def build_channel_options(settings: Settings) -> list[tuple[str, Any]]:
    """Return the channel arguments of a port; docs/guides/security.md explains the attacks."""
    timeout_ms = settings.header_timeout * 1000
    channel_options: list[tuple[str, Any]] = [
        ("grpc.max_receive_message_length", settings.max_request_size),
        ("grpc.max_send_message_length", -1),  # The worker enforces max_response_size.
        # gRPC's core could decompress 1 MB to 1 GB. `messages.decompress` stops at the limit.
        ("grpc.per_message_decompression", 0),
        ("grpc.compression_enabled_algorithms_bitset", IDENTITY_AND_GZIP),
        ("grpc.max_metadata_size", settings.max_header_size),
        # With a smaller soft limit, the core would refuse some calls between both limits at random.
        ("grpc.absolute_max_metadata_size", settings.max_header_size),
        ("grpc.max_concurrent_streams", MAX_CALLS_PER_CONNECTION),
        ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", 2 * MAX_PENDING_CALLS),
        ("grpc.max_allowed_incoming_connections", GrpcSettings.of(settings).grpc_max_connections),
        ("grpc.server_handshake_timeout_ms", timeout_ms),  # limit for the client's first SETTINGS
        ("grpc.http2.settings_timeout", timeout_ms),  # limit for the acknowledgement of SETTINGS
        ("grpc.max_connection_idle_ms", CONNECTION_IDLE_MS),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        ("grpc.http2.max_ping_strikes", MAX_PING_STRIKES),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ]
    return channel_options
