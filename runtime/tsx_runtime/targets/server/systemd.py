"""Listening sockets that systemd passes to a server (socket activation).

https://www.freedesktop.org/software/systemd/man/latest/sd_listen_fds.html: descriptors from 3 on,
their number in LISTEN_FDS, their names in LISTEN_FDNAMES, for the process LISTEN_PID. A name
(`FileDescriptorName=`) is the role of the address that the socket is for.
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping

from tsx_runtime.errors import SettingError
from tsx_runtime.settings.addresses import Address, parse_address
from tsx_runtime.settings.schema import ROLES, Settings
from tsx_runtime.targets.server.listeners import PassedSocket, place

FIRST = 3  # descriptor
VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")


def passed_sockets(env: MutableMapping[str, str]) -> dict[str, socket.socket]:
    """By role. Removes the variables, which are not meant for the processes that the server starts.
    Raises SettingError.
    """
    pid, count, names = (env.get(name, "") for name in VARIABLES)
    if pid != str(os.getpid()):
        return {}
    for name in VARIABLES:
        env.pop(name, None)
    found: dict[str, socket.socket] = {}
    passed = int(count) if count.isdigit() else 0
    for descriptor, name in enumerate([*names.split(":"), *[""] * passed][:passed], FIRST):
        if name not in ROLES or name in found:
            what = (
                f"a second socket named '{name}'" if name in found else f"a socket named '{name}'"
            )
            raise SettingError(
                f"systemd passes {what}: give each socket unit its FileDescriptorName:"
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
        found[name] = sock
    return found


def use_sockets(
    settings: Settings, sockets: dict[str, socket.socket]
) -> tuple[Settings, dict[str, PassedSocket]]:
    """The settings with the addresses of these sockets, and the sockets by `place`.

    Roles with the same address stay together.
    """
    before = {role: getattr(settings, f"{role}_address") for role in ROLES}
    changed, passed = {}, {}
    for role, sock in sockets.items():
        address = _address(sock, parse_address(before[role]))
        passed[place(address)] = PassedSocket(sock, owned=False)
        for each, old in before.items():
            if each == role or (old == before[role] and each not in sockets):
                changed[f"{each}_address"] = str(address)
    return settings.model_copy(update=changed), passed


def _address(sock: socket.socket, configured: Address) -> Address:
    name = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        return Address("", 0, "unix", name)
    return Address(name[0], name[1], "https" if configured.scheme == "https" else "http")
