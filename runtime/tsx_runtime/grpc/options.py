"""The channel arguments of a gRPC port, all in one place. docs/security.md says which attack each one is for."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from tsx_runtime.settings.schema import Settings

LEAST_PING = 10_000  # ms between the pings of a client that keeps its connection open
PING_STRIKES = 2  # pings that may come sooner, before the connection is closed with ENHANCE_YOUR_CALM
PENDING_CALLS = 200  # that the core holds before Python has seen them; twice as many at most, the others get RESOURCE_EXHAUSTED
IDENTITY_AND_GZIP = 0b101  # bits of GRPC_COMPRESS_NONE and GRPC_COMPRESS_GZIP
KEEPALIVE = 120_000  # ms after which a client that sends nothing is pinged
KEEPALIVE_TIMEOUT = 20_000  # ms for its answer


def options(settings: Settings, roles: Collection[str]) -> list[tuple[str, Any]]:
    """Where roles share a port, the first one's age holds."""
    role = next(iter(roles))
    age, grace = getattr(settings, f"{role}_max_connection_age_ms"), getattr(settings, f"{role}_max_connection_age_grace_ms")
    patience = settings.header_timeout * 1000
    chosen: list[tuple[str, Any]] = [
        ("grpc.max_receive_message_length", settings.max_request_size),
        ("grpc.max_send_message_length", -1),  # the worker sees to max_response_size
        ("grpc.per_message_decompression", 0),  # the core would unpack 1 MB to 1 GB: `messages.unpacked` stops at the limit
        ("grpc.compression_enabled_algorithms_bitset", IDENTITY_AND_GZIP),
        ("grpc.max_metadata_size", settings.max_header_size),
        ("grpc.absolute_max_metadata_size", settings.max_header_size),  # else a share of the calls between the two is refused
        ("grpc.max_concurrent_streams", settings.grpc_max_concurrent_streams),
        ("grpc.server.max_pending_requests", PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", 2 * PENDING_CALLS),
        ("grpc.max_allowed_incoming_connections", settings.grpc_max_connections),
        ("grpc.server_handshake_timeout_ms", patience),  # until the client's first SETTINGS
        ("grpc.http2.settings_timeout", patience),  # until the client has acknowledged the server's
        ("grpc.max_connection_idle_ms", settings.grpc_max_connection_idle_ms),
        ("grpc.http2.min_ping_interval_without_data_ms", LEAST_PING),
        ("grpc.http2.max_ping_strikes", PING_STRIKES),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", KEEPALIVE),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT),
        ("grpc.so_reuseport", 0),  # a second server on the port fails: it is in use
    ]
    if age is not None:
        chosen.append(("grpc.max_connection_age_ms", age))
    if grace is not None:
        chosen.append(("grpc.max_connection_age_grace_ms", grace))
    return chosen
