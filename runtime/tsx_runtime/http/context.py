"""The parts of a server that the apps of its listeners share."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tsx_runtime.api.access.auth import build_guards
from tsx_runtime.api.access.tokens import Keys, build_keys
from tsx_runtime.api.messages import MAX_MANAGEMENT_BODY
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.http.connection_clock import Timeouts
from tsx_runtime.metrics.host import System
from tsx_runtime.metrics.response_counts import ResponseCounts
from tsx_runtime.settings.schema import Settings


class ServerContext:
    """The parts of a server that the apps of its listeners share."""

    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        keys: Keys | None = None,
        addresses: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Build the guards of the settings; see `build_apps`."""
        self.settings = settings
        self.registry = registry
        self.keys = keys or build_keys(settings)
        plugins = registry.plugins.authentication.values()
        self.guards = build_guards(settings, self.keys, plugins)
        self.addresses = addresses
        self.counts = ResponseCounts()
        self.system = System(settings)
        self.bytes_in_flight = registry.bytes_in_flight
        self.timeouts = Timeouts(
            keep_alive=settings.keep_alive_timeout,
            head=settings.header_timeout,
            body=settings.body_timeout,
            body_idle=settings.body_idle_timeout,
            write=settings.write_timeout,
        )

    @property
    def max_management_body(self) -> int:
        """The largest body of a management request in bytes."""
        return min(self.settings.max_request_size, MAX_MANAGEMENT_BODY)
