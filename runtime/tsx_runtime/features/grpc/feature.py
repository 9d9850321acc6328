"""The feature `grpc`, which listens on its own ports and logs if packages are missing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TypeAlias

from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.feature import Feature, Port, ServerContext
from tsx_runtime.features.grpc.settings import GRPC_ROLES, GrpcSettings
from tsx_runtime.settings.addresses import Address
from tsx_runtime.settings.schema import Settings

INSTALL = "pip install 'tsx-serve[grpc]'"
PACKAGES = ("grpc", "google.protobuf", "grpc_health", "grpc_reflection")

GrpcAddresses: TypeAlias = list[tuple[Address, list[str]]]

logger = logging.getLogger("tsx.server")


class GrpcFeature(Feature):
    def __init__(self, registry: Registry) -> None:
        super().__init__(registry)
        self._addresses: GrpcAddresses = []
        self._importing: asyncio.Future[None] | None = None

    def addresses(self) -> GrpcAddresses:
        self._addresses = grpc_addresses(self.registry.settings)
        return self._addresses

    @contextmanager
    def serving(self) -> Iterator[None]:
        if self._addresses:
            self._importing = asyncio.ensure_future(asyncio.to_thread(_import_modules))
        yield

    async def listen(self, context: ServerContext) -> list[Port]:
        if self._importing is None:
            return []
        await self._importing
        # The extra `grpc` is optional.
        from tsx_runtime.features.grpc.server import GrpcServer
        from tsx_runtime.http.tls import read_pem

        settings = context.settings
        key_and_chain = (
            read_pem(settings, "enable_grpc_ssl")
            if GrpcSettings.of(settings).enable_grpc_ssl
            else None
        )
        ports = []
        for address, roles in self._addresses:
            host = f"[{address.host}]" if ":" in address.host else address.host
            server = GrpcServer(
                self.registry,
                settings,
                context.keys,
                roles,
                f"{host}:{address.port}",
                key_and_chain,
                context.counts,
                shares_port=True,
            )
            ports.append(Port(f"{host}:{server.port}", roles, server.start, server.stop))
        return ports


def grpc_addresses(settings: Settings) -> GrpcAddresses:
    """Return each address with its roles, or an empty list if gRPC is off or not installed."""
    if not GrpcSettings.of(settings).enable_grpc or not _is_installed(settings):
        return []
    addresses: GrpcAddresses = []
    for role in GRPC_ROLES:
        address = settings.addresses()[role]
        for other_address, roles in addresses:
            if other_address == address and address.port:
                roles.append(role)
                break
        else:
            addresses.append((address, [role]))
    return addresses


def _import_modules() -> None:
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
