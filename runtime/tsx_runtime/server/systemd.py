"""Listening sockets that systemd passes to a server (socket activation).

https://www.freedesktop.org/software/systemd/man/latest/sd_listen_fds.html describes the variables.
The first descriptor is 3. LISTEN_FDS is the number of descriptors, LISTEN_FDNAMES their names, and
LISTEN_PID the process. A name (`FileDescriptorName=`) must be the role of the socket's address.
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping

from tsx_runtime.errors import SettingError
from tsx_runtime.server.listeners import PassedSocket, bound_name
from tsx_runtime.settings.addresses import Address, parse_address
from tsx_runtime.settings.schema import ROLES, Settings

FIRST_DESCRIPTOR = 3
VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")


def passed_sockets(env: MutableMapping[str, str]) -> dict[str, socket.socket]:
    """Return the sockets by role, and remove the variables from the environment.

    They are removed, because processes that the server starts must not see them.

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

    Roles that had the same address still have the same address.
    """
    configured_addresses = {role: getattr(settings, f"{role}_address") for role in ROLES}
    changed_settings, sockets_by_name = {}, {}
    for role, sock in sockets.items():
        address = _address(sock, parse_address(configured_addresses[role]))
        sockets_by_name[bound_name(address)] = PassedSocket(sock, is_owned=False)
        for other_role, other_address in configured_addresses.items():
            if other_role == role or (
                other_address == configured_addresses[role] and other_role not in sockets
            ):
                changed_settings[f"{other_role}_address"] = str(address)
    return settings.model_copy(update=changed_settings), sockets_by_name


def _address(sock: socket.socket, configured_addresses: Address) -> Address:
    name = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        return Address("", 0, "unix", name)
    return Address(name[0], name[1], "https" if configured_addresses.scheme == "https" else "http")
