"""Addresses as settings write them, and the sockets that listen there."""

from __future__ import annotations

import errno
import socket
from typing import NamedTuple

from tsx_runtime.errors import SettingError
from tsx_runtime.settings import ROLES, Settings, parse_address

BACKLOG = 2048  # connections that may wait to be accepted


class Address(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


def addresses(settings: Settings) -> dict[Address, list[str]]:
    """Each address once, with the roles that share it. Addresses with port 0 are never the same."""
    shared: dict[Address, list[str]] = {}
    free: list[tuple[Address, list[str]]] = []
    for role in ROLES:
        address = Address(*parse_address(getattr(settings, f"{role}_address")))
        if address.port:
            shared.setdefault(address, []).append(role)
        else:
            free.append((address._replace(port=-len(free)), [role]))
    return shared | dict(free)


def bind(address: Address, roles: list[str]) -> socket.socket:
    """A bound socket that does not listen yet: nobody is kept waiting while models load. Raises SettingError, which says what to change."""
    settings = _names(roles)
    port = max(address.port, 0)
    try:
        family, _, _, _, target = socket.getaddrinfo(address.host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise SettingError(f"The host of {settings} cannot be found: {address.host} ({error.strerror})") from error
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(target)
    except OSError as error:
        sock.close()
        raise SettingError(_cannot_bind(address, settings, error)) from error
    sock.setblocking(False)
    return sock


def listen(sock: socket.socket, address: Address, roles: list[str]) -> None:
    """Take connections from now on. Raises SettingError where another server that was starting as well has come first."""
    try:
        sock.listen(BACKLOG)
    except OSError as error:
        raise SettingError(_cannot_bind(address, _names(roles), error)) from error


def bound_address(sock: socket.socket, address: Address) -> Address:
    return Address(address.host, sock.getsockname()[1])


def _names(roles: list[str]) -> str:
    return " and ".join(f"{role}_address" for role in roles)


def _cannot_bind(address: Address, settings: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"Port {address.port} on {address.host} is in use ({settings}). Stop the program that uses it, or choose another port."
    if error.errno == errno.EACCES:
        return f"Port {address.port} on {address.host} needs privileges that this process lacks ({settings}). Choose a port from 1024 on."
    return f"{settings}: cannot bind to {address.host}:{max(address.port, 0)}: {error.strerror}"
