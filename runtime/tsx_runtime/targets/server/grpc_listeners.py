"""The gRPC listeners: their ports, their certificate, and a message if packages are missing."""

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

    target: str  # HOST:PORT for clients
    roles: list[str]
    server: GrpcServer


def grpc_addresses(settings: Settings) -> GrpcAddresses:
    """Return each address with the roles that share it; none if gRPC is off or not installed."""
    if not settings.enable_grpc or not _is_installed(settings):
        return []
    scheme = "grpcs" if settings.enable_grpc_ssl else "grpc"
    addresses: GrpcAddresses = []
    for role in GRPC_ROLES:
        address = Address(
            getattr(settings, f"{role}_address"), getattr(settings, f"{role}_port"), scheme
        )
        shared = next(
            (roles for known, roles in addresses if known == address and address.port), None
        )
        if shared is None:
            addresses.append((address, [role]))
        else:
            shared.append(role)
    return addresses


def check_free(addresses: GrpcAddresses) -> None:
    """Check that ports are free, now and not after the models have loaded.

    Raises:
        SettingError: A port is taken.
    """
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
    """Return a server for each address, whose calls are counted with the HTTP requests.

    With `replaces`, another server may still have the port.
    """
    if not addresses:
        return []
    if not replaces:
        # gRPC's own sockets share their port, so binding would not find another server.
        check_free(addresses)
    from tsx_runtime.grpc.server import GrpcServer  # an optional dependency

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
    """Import the heavy modules; for a thread, while models load."""
    import tsx_runtime.grpc.server  # noqa: F401  # an extra


def _is_installed(settings: Settings) -> bool:
    """Tell whether the extra is installed; if not, log how to install it."""
    missing = [name for name in PACKAGES if not is_importable(name)]
    if missing:
        is_requested = any(
            name.startswith(("grpc_", "enable_grpc")) for name in settings.model_fields_set
        )
        level = logging.WARNING if is_requested else logging.INFO
        logger.log(
            level, "gRPC is not served: %s is not installed. Install it: %s", missing[0], INSTALL
        )
    return not missing


def is_importable(package: str) -> bool:
    """Tell whether a package can be imported.

    `find_spec` raises an error if the parent package, such as `google`, is missing.
    """
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False
