"""The gRPC listeners: their ports, their certificate, and a log line if the gRPC packages are
missing.
"""

from __future__ import annotations

import contextlib
import logging
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from tsx_runtime.api.access.tokens import Keys
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.metrics.response_counts import ResponseCounts
from tsx_runtime.settings.addresses import Address
from tsx_runtime.settings.schema import GRPC_ROLES, Settings
from tsx_runtime.targets.server.listeners import Listener
from tsx_runtime.targets.server.tls import read_pem

if TYPE_CHECKING:
    from tsx_runtime.grpc.server import GrpcServer

INSTALL = "pip install 'tsx-serve[grpc]'"
PACKAGES = ("grpc", "google.protobuf", "grpc_health", "grpc_reflection")

GrpcAddresses: TypeAlias = list[tuple[Address, list[str]]]

logger = logging.getLogger("tsx.server")


class Port(NamedTuple):
    """A port that serves gRPC."""

    target: str  # HOST:PORT, as clients call it
    roles: list[str]
    server: GrpcServer


def grpc_addresses(settings: Settings) -> GrpcAddresses:
    """Each address once, with the roles that share it; none where gRPC is off or not installed."""
    if not settings.enable_grpc or not _installed(settings):
        return []
    scheme = "grpcs" if settings.enable_grpc_ssl else "grpc"
    found: GrpcAddresses = []
    for role in GRPC_ROLES:
        address = Address(
            getattr(settings, f"{role}_address"), getattr(settings, f"{role}_port"), scheme
        )
        shared = next((roles for known, roles in found if known == address and address.port), None)
        if shared is None:
            found.append((address, [role]))
        else:
            shared.append(role)
    return found


def check_free(addresses: GrpcAddresses) -> None:
    """Raise SettingError where a port is taken, now and not after the models have loaded."""
    for address, roles in addresses:
        if address.port:
            with contextlib.closing(Listener(address, roles)):
                pass


def bind(
    registry: Registry,
    settings: Settings,
    keys: Keys,
    addresses: GrpcAddresses,
    counts: ResponseCounts,
    *,
    replaces: bool = False,
) -> list[Port]:
    """A server for each address, which counts its calls together with HTTP requests.

    `replaces`: another one may have the port still.
    """
    if not addresses:
        return []
    if not replaces:
        check_free(
            addresses
        )  # again: gRPC's own sockets share their port, so that another server can take it over
    from tsx_runtime.grpc.server import GrpcServer  # here, because it is an extra

    pair = read_pem(settings, "enable_grpc_ssl") if settings.enable_grpc_ssl else None
    ports = []
    for address, roles in addresses:
        host = f"[{address.host}]" if ":" in address.host else address.host
        server = GrpcServer(
            registry,
            settings,
            keys,
            roles,
            f"{host}:{address.port}",
            pair,
            counts,
            shares_port=True,
        )
        ports.append(Port(f"{host}:{server.port}", roles, server))
    return ports


def prepare() -> None:
    """Import the heavy modules, in a thread, while models load."""
    import tsx_runtime.grpc.server  # noqa: F401  # an extra


def _installed(settings: Settings) -> bool:
    """Whether the extra is installed; logs how to install it where it is not."""
    missing = [name for name in PACKAGES if not is_there(name)]
    if missing:
        asked = any(name.startswith(("grpc_", "enable_grpc")) for name in settings.model_fields_set)
        level = logging.WARNING if asked else logging.INFO
        logger.log(
            level, "gRPC is not served: %s is not installed. Install it: %s", missing[0], INSTALL
        )
    return not missing


def is_there(package: str) -> bool:
    """Whether it can be imported.

    `find_spec` raises where even the parent package, such as `google`, is missing.
    """
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False
