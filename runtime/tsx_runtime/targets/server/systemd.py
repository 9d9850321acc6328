"""Listening sockets that systemd passes to a server (socket activation).

https://www.freedesktop.org/software/systemd/man/latest/sd_listen_fds.html describes the variables:
descriptors begin at 3, LISTEN_FDS is their number, LISTEN_FDNAMES their names, and LISTEN_PID the
process. A name (`FileDescriptorName=`) is the role of the address that the socket is for.
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping

from tsx_runtime.errors import SettingError
from tsx_runtime.settings.addresses import Address, parse_address
from tsx_runtime.settings.schema import ROLES, Settings
from tsx_runtime.targets.server.listeners import PassedSocket, bound_name

FIRST_DESCRIPTOR = 3
VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")


def passed_sockets(env: MutableMapping[str, str]) -> dict[str, socket.socket]:
    """Return the sockets by role, and remove the variables from the environment.

    The processes that the server starts must not see the variables.

    Raises:
        SettingError: A socket has no role or does not listen.
    """
    pid, count, names = (env.get(name, "") for name in VARIABLES)
    if pid != str(os.getpid()):
        return {}
    for name in VARIABLES:
        env.pop(name, None)
    sockets: dict[str, socket.socket] = {}
    socket_count = int(count) if count.isdigit() else 0
    for descriptor, name in enumerate(
        [*names.split(":"), *[""] * socket_count][:socket_count], FIRST_DESCRIPTOR
    ):
        if name not in ROLES or name in sockets:
            description = (
                f"a second socket named '{name}'" if name in sockets else f"a socket named '{name}'"
            )
            raise SettingError(
                f"systemd passes {description}: give each socket unit its FileDescriptorName:"
                f" {', '.join(ROLES)}"
            )
        sock = socket.socket(fileno=descriptor)
        os.set_inheritable(descriptor, False)
        if sock.type != socket.SOCK_STREAM or not sock.getsockopt(
            socket.SOL_SOCKET, socket.SO_ACCEPTCONN
        ):
            raise SettingError(
                f"systemd passes a socket named '{name}' that does not listen: use ListenStream="
                " and Accept=no"
            )
        sockets[name] = sock
    return sockets


def use_sockets(
    settings: Settings, sockets: dict[str, socket.socket]
) -> tuple[Settings, dict[str, PassedSocket]]:
    """Return settings with the addresses of the sockets, and the sockets by `bound_name`.

    Roles with the same address stay together.
    """
    configured = {role: getattr(settings, f"{role}_address") for role in ROLES}
    changed, passed = {}, {}
    for role, sock in sockets.items():
        address = _address(sock, parse_address(configured[role]))
        passed[bound_name(address)] = PassedSocket(sock, is_owned=False)
        for other_role, old in configured.items():
            if other_role == role or (old == configured[role] and other_role not in sockets):
                changed[f"{other_role}_address"] = str(address)
    return settings.model_copy(update=changed), passed


def _address(sock: socket.socket, configured: Address) -> Address:
    name = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        return Address("", 0, "unix", name)
    return Address(name[0], name[1], "https" if configured.scheme == "https" else "http")
