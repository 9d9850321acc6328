"""The gRPC listeners: their ports and certificate, and a log line if packages are missing."""

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
    from tsx_runtime.features.grpc.server import GrpcServer

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
    """Return each address with its roles, or an empty list if gRPC is off or not installed."""
    if not settings.enable_grpc or not _is_installed(settings):
        return []
    scheme = "grpcs" if settings.enable_grpc_ssl else "grpc"
    addresses: GrpcAddresses = []
    for role in GRPC_ROLES:
        address = Address(
            getattr(settings, f"{role}_address"), getattr(settings, f"{role}_port"), scheme
        )
        shared_roles = next(
            (
                roles
                for other_address, roles in addresses
                if other_address == address and address.port
            ),
            None,
        )
        if shared_roles is None:
            addresses.append((address, [role]))
        else:
            shared_roles.append(role)
    return addresses


def check_ports_free(addresses: GrpcAddresses) -> None:
    """Check that the ports are free, before models are loaded.

    Raises:
        SettingError: A port is in use.
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
    """Create a server for each address; `counts` also has the HTTP responses.

    With `replaces`, another server may still use the ports.
    """
    if not addresses:
        return []
    if not replaces:
        # Binding does not fail if another server has the port, because gRPC's sockets share ports.
        check_ports_free(addresses)
    # The extra `grpc` is optional.
    from tsx_runtime.features.grpc.server import GrpcServer

    key_and_chain = read_pem(settings, "enable_grpc_ssl") if settings.enable_grpc_ssl else None
    ports = []
    for address, roles in addresses:
        host = f"[{address.host}]" if ":" in address.host else address.host
        server = GrpcServer(
            registry,
            settings,
            keys,
            roles,
            f"{host}:{address.port}",
            key_and_chain,
            counts,
            shares_port=True,
        )
        ports.append(Port(f"{host}:{server.port}", roles, server))
    return ports


def import_modules() -> None:
    """Import modules that take long; this runs in a thread while models load."""
    import tsx_runtime.features.grpc.server  # noqa: F401  # an extra


def _is_installed(settings: Settings) -> bool:
    """Tell whether the extra `grpc` is installed; if not, log how to install it."""
    missing_packages = [name for name in PACKAGES if not is_importable(name)]
    if missing_packages:
        is_requested = any(
            name.startswith(("grpc_", "enable_grpc")) for name in settings.model_fields_set
        )
        level = logging.WARNING if is_requested else logging.INFO
        logger.log(
            level,
            "gRPC is not served: %s is not installed. Install it: %s",
            missing_packages[0],
            INSTALL,
        )
    return not missing_packages


def is_importable(package: str) -> bool:
    """Tell whether a package can be imported.

    `find_spec` raises an error if the parent package, such as `google`, is missing.
    """
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False
