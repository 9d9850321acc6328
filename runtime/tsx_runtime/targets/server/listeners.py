"""The listening sockets of the configured addresses."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tsx_archiver.storage.private_directory import warn_if_replaceable
from tsx_runtime.errors import SettingError
from tsx_runtime.settings.addresses import Address, parse_address
from tsx_runtime.settings.schema import GRPC_ROLES, ROLES, Settings

PORT_OPTIONS = {  # of `tsx serve`
    "inference_address": "--port",
    "management_address": "--management-port",
    "metrics_address": "--metrics-port",
    "grpc_inference_port": "--grpc-port",
    "grpc_management_port": "--grpc-management-port",
}
BACKLOG = 2048  # connections that may wait to be accepted


class PassedSocket(NamedTuple):
    """A socket that listens already, made by systemd or by the server that this one replaces."""

    sock: socket.socket
    owned: bool  # whether the file of a unix socket is this server's to remove


class Listener:
    """A bound socket that does not listen yet: no client waits in its backlog while models load.
    (One that was passed listens.)

    Raises SettingError, which says what to change.
    """

    def __init__(
        self, address: Address, roles: list[str], passed: PassedSocket | None = None
    ) -> None:
        self.roles = roles
        self._passed = passed
        self._file: os.stat_result | None = None  # of a unix socket
        self.is_handed_over = False
        if passed is not None:
            self.address, self.sock = address, passed.sock
        elif address.scheme == "unix":
            self.address = address
            self.sock = bind_unix(address.path, self._names)
            warn_if_replaceable(self._names, Path(address.path))
            self._file = Path(address.path).stat()
        else:
            self.sock = _bind_tcp(address, self._names)
            self.address = address._replace(port=self.sock.getsockname()[1])
        self.sock.setblocking(False)

    def listen(self) -> None:
        """Begin to accept connections.

        Raises SettingError where another server has taken the address meanwhile.
        """
        if self._file is not None and not self._has_its_file():
            raise SettingError(_taken(self.address.path, self._names))
        try:
            self.sock.listen(BACKLOG)
        except OSError as error:
            raise SettingError(_cannot_bind(self.address, self._names, error)) from error

    def leave(self) -> None:
        """Remove a unix socket's file, unless another server has replaced it. (While the socket is
        open, its inode is not reused.)
        """
        if self._file is not None and self._has_its_file():
            with contextlib.suppress(OSError):
                Path(self.address.path).unlink()
        self._file = None

    def hand_over(self) -> None:
        """Another server has the socket from now on, and its file."""
        self._file = None
        self.is_handed_over = True

    def take_over(self) -> None:
        """The server that passed the socket has let go of it. Raises SettingError."""
        if self._passed is None or not self._passed.owned:
            return
        path = Path(self.address.path)
        if not path.exists():  # it was stopped meanwhile, and has removed it
            self.sock.close()
            self.sock = bind_unix(self.address.path, self._names)
            self.sock.setblocking(False)
            self.listen()
        with contextlib.suppress(OSError):
            self._file = path.stat()

    def close(self) -> None:
        self.leave()
        self.sock.close()

    @property
    def owns_file(self) -> bool:
        return self._file is not None

    @property
    def _names(self) -> str:
        return " and ".join(
            f"{role}_port" if role in GRPC_ROLES else f"{role}_address" for role in self.roles
        )

    def _has_its_file(self) -> bool:
        try:
            return self._file is not None and os.path.samestat(
                Path(self.address.path).stat(), self._file
            )
        except OSError:
            return False


@contextlib.contextmanager
def listeners(
    settings: Settings,
    passed: Mapping[str, PassedSocket] | None = None,
    grpc: Sequence[tuple[Address, list[str]]] = (),
) -> Iterator[list[Listener]]:
    """All that the settings ask for, bound.

    `passed`: sockets to use instead of new ones, by `place`. `grpc`: ports that must be free.

    Raises SettingError with a line for each address that cannot be bound.
    """
    left, made, errors = dict(passed or {}), [], []
    with contextlib.ExitStack() as stack:
        for address, roles in (*addresses(settings), *grpc):
            try:
                made.append(Listener(address, roles, left.pop(place(address), None)))
            except SettingError as error:
                errors.append(error.message)
                continue
            if set(roles).issubset(GRPC_ROLES):
                made.pop().close()
            else:
                stack.callback(made[-1].close)
        if errors:
            raise SettingError("\n".join(errors))
        for unused in left.values():
            unused.sock.close()  # or clients would wait in its backlog
        yield made


def place(address: Address) -> str:
    """What a socket is bound to; http and https do not differ in it."""
    return address.path or f"{address.host}:{address.port}"


def addresses(settings: Settings) -> list[tuple[Address, list[str]]]:
    """Each address once, with the roles that share it. Addresses with port 0 are never the same."""
    shared: dict[Address, list[str]] = {}
    free: list[tuple[Address, list[str]]] = []
    for role in ROLES:
        if role == "metrics" and not settings.enable_metrics_api:
            continue
        address = parse_address(getattr(settings, f"{role}_address"))
        if address.port or address.scheme == "unix":
            shared.setdefault(address, []).append(role)
        else:
            free.append((address, [role]))
    return [*shared.items(), *free]


def _bind_tcp(address: Address, names: str) -> socket.socket:
    try:
        family, _, _, _, target = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM
        )[0]
    except OSError as error:
        raise SettingError(
            f"The host of {names} cannot be found: {address.host} ({error.strerror})"
        ) from error
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(target)
    except OSError as error:
        sock.close()
        raise SettingError(_cannot_bind(address, names, error)) from error
    return sock


def bind_unix(path: str, names: str) -> socket.socket:
    """Only this user may connect: the file's mode is set before any client can."""
    if not hasattr(socket, "AF_UNIX"):
        raise SettingError(f"{names}: this system has no unix sockets. Use http://127.0.0.1:PORT.")
    _make_room(path, names)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    umask = os.umask(0o177)  # unlike a chmod afterwards, it cannot be led to another file
    try:
        sock.bind(path)
    except OSError as error:  # a path that is too long comes without an errno
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise SettingError(_taken(path, names)) from error
        raise SettingError(
            f"{names}: cannot make the socket {path}: {error.strerror or error}. Choose another"
            " path."
        ) from error
    finally:
        os.umask(umask)
    return sock


def _make_room(path: str, names: str) -> None:
    """Remove the file of a server that crashed; no process listens there."""
    try:
        if not stat.S_ISSOCK(Path(path).stat().st_mode):
            raise SettingError(
                f"{names}: {path} exists and is not a socket. Choose another path, or remove it."
            )
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.connect(path)
    except ConnectionRefusedError:
        with contextlib.suppress(OSError):  # then binding tells
            Path(path).unlink()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise SettingError(
            f"{names}: cannot use {path}: {error.strerror}. Choose another path."
        ) from error
    else:
        raise SettingError(_taken(path, names))


def _taken(path: str, names: str) -> str:
    return f"Another program listens at {path} ({names}). Stop it, or choose another path."


def _cannot_bind(address: Address, names: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        text = (
            f"Port {address.port} on {address.host} is in use ({names}). Stop the program that uses"
            " it, or choose another port"
        )
        return (
            f"{text}: {' and '.join(PORT_OPTIONS[name] for name in names.split(' and '))} of tsx"
            " serve."
        )
    if error.errno == errno.EACCES:
        return (
            f"Port {address.port} on {address.host} needs privileges that this process does not"
            f" have ({names}). Choose a port from 1024 on."
        )
    return f"{names}: cannot bind to {address.host}:{address.port}: {error.strerror}"
