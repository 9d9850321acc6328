"""The settings of gRPC."""

from __future__ import annotations

import ipaddress
from typing import Annotated

from pydantic import AfterValidator, Field

from tsx_runtime.settings.addresses import Address, parse_address
from tsx_runtime.settings.fields import FeatureSettings
from tsx_runtime.settings.model_limits import Accepts, Seconds

# The gRPC APIs; the settings ROLE_address and ROLE_port have the host and port of one.
GRPC_ROLES = ("grpc_inference", "grpc_management")


def _check_host(value: str) -> str:
    """Check a host name or an address, and remove the brackets of an IPv6 address."""
    host = value[1:-1] if value.startswith("[") and value.endswith("]") else value
    if ":" in host:
        ipaddress.ip_address(host)
    else:
        parse_address(f"http://{host}:1")
    return host


Host = Annotated[
    str, AfterValidator(_check_host), Accepts("a host name or address, without a port")
]


class GrpcSettings(FeatureSettings):
    enable_grpc: bool = True
    """also serve gRPC, if the extra `grpc` is installed"""
    grpc_inference_address: Host = "127.0.0.1"
    """host of the gRPC inference API"""
    grpc_inference_port: int = Field(7070, ge=0, le=65535)
    """port of the gRPC inference API; 0 chooses a free one"""
    grpc_management_address: Host = "127.0.0.1"
    """host of the gRPC management API"""
    grpc_management_port: int = Field(7071, ge=0, le=65535)
    """port of the gRPC management API; 0 chooses a free one"""
    grpc_max_concurrent_calls: int = Field(1000, ge=1)
    """maximum number of concurrent calls on one port; further calls are refused"""
    grpc_max_connections: int = Field(1000, ge=1, le=(1 << 31) - 1)
    """maximum number of connections on one port"""
    grpc_message_timeout: Seconds = Field(60, ge=1)
    """maximum time to receive the message of a call, in seconds"""
    enable_grpc_ssl: bool = False
    """encrypt gRPC with certificate_file and private_key_file"""

    def addresses(self) -> dict[str, Address]:
        if not self.enable_grpc:
            return super().addresses()
        scheme = "grpcs" if self.enable_grpc_ssl else "grpc"
        return super().addresses() | {
            role: Address(getattr(self, f"{role}_address"), getattr(self, f"{role}_port"), scheme)
            for role in GRPC_ROLES
        }
