"""The address of a server, and the certificate to trust."""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from tsx_cli.common.failure import UsageError
from tsx_runtime.settings.addresses import parse_address

# Addresses at which a local server that listens on all interfaces can be reached.
ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1"}

LOADING = (
    "its port is in use, or was a minute ago: a server that runs answers once all its models "
    "are loaded, as its own output shows; if none runs, "
)


class ServerAddress(NamedTuple):
    """A parsed address.

    Attributes:
        host: The host.
        port: The port.
        prefix: The path before the paths of the API.
        secure: Whether the server speaks TLS.
        socket: The path of a Unix socket, instead of host and port.
    """

    host: str
    port: int
    prefix: str = ""
    secure: bool = False
    socket: str = ""

    @property
    def authority(self) -> str:
        if self.socket:
            return "localhost"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.secure else 80) else f"{host}:{self.port}"

    def loading_hint(self, error: OSError) -> str:
        """Return the advice to wait if the port is in use here, but the connection was refused."""
        if isinstance(error, ConnectionRefusedError) and not self.socket:
            with socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET) as probe:
                try:
                    probe.bind((self.host, self.port))
                except OSError as refusal:
                    return LOADING if refusal.errno == errno.EADDRINUSE else ""
        return ""


def read_url(url: str, schemes: Collection[str] = ("http", "https")) -> ServerAddress:
    """Parse the address of a server.

    Raises:
        UsageError: The address is invalid.
    """
    try:
        if url.startswith("unix:"):
            return ServerAddress("", 0, socket=parse_address(url).path)
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
        host = (parts.hostname or "").encode("idna").decode()  # UnicodeError is a ValueError.
        if (
            parts.scheme not in schemes
            or not host.isprintable()
            or not host
            or " " in host
            or port == 0
        ):
            raise ValueError
        if parts.query or parts.fragment or parts.username is not None:
            raise ValueError
    except ValueError:
        raise UsageError(
            f"'{url}' is not the address of a server; one looks like http://127.0.0.1:8080, or"
            " unix:/run/tsx.sock"
        ) from None
    secure = parts.scheme == "https"
    return ServerAddress(
        ANY_HOST.get(host, host), port or (443 if secure else 80), parts.path.rstrip("/"), secure
    )


def trusting(certificate: str | Path | None) -> ssl.SSLContext:
    """Return a TLS context that trusts this machine's certificates and the given one.

    Raises:
        OSError: The file contains no certificate.
    """
    context = ssl.create_default_context()
    if certificate is not None:
        context.load_verify_locations(certificate)
        # The server's own certificate is accepted without the certificate of an authority.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def distrust(
    error: ssl.SSLError,
    *,
    address: str = "--url",
    trust: str = "set certificate_file to it, or to that of the authority that signed it (TSX_CERTIFICATE_FILE=cert.pem)",
) -> str:
    """Explain why a TLS handshake failed, and what to do.

    Args:
        error: The error.
        address: The option with the URL.
        trust: Advice on how to trust a certificate.
    """
    if not isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"the server does not speak TLS ({error.reason or error}); does its address begin with"
            " http://?"
        )
    if "ostname mismatch" in error.verify_message or "IP address mismatch" in error.verify_message:
        return (
            f"{error.verify_message} Give {address} a name that the certificate has, or make one"
            " with this name (subjectAltName)."
        )
    return f"this machine does not trust the server's certificate ({error.verify_message}); {trust}"
