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

# Options of `tsx serve`, by setting.
PORT_OPTIONS = {
    "inference_address": "--port",
    "management_address": "--management-port",
    "metrics_address": "--metrics-port",
    "grpc_inference_port": "--grpc-port",
    "grpc_management_port": "--grpc-management-port",
}
BACKLOG = 2048  # connections that may wait to be accepted


class PassedSocket(NamedTuple):
    """A listening socket from systemd, or from the server that this one replaces."""

    sock: socket.socket
    is_owned: bool  # whether this server removes the file of a unix socket


class Listener:
    """A bound socket that does not listen yet: no client waits in it while models load.

    A passed socket already listens.
    """

    def __init__(
        self, address: Address, roles: list[str], passed: PassedSocket | None = None
    ) -> None:
        """Bind the socket, or use the passed one.

        Raises:
            SettingError: The address cannot be bound; the message says what to change.
        """
        self.roles = roles
        self._passed = passed
        self._file: os.stat_result | None = None  # the file of a unix socket
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

        Raises:
            SettingError: Another server has taken the address in the meantime.
        """
        if self._file is not None and not self._has_its_file():
            raise SettingError(_taken_text(self.address.path, self._names))
        try:
            self.sock.listen(BACKLOG)
        except OSError as error:
            raise SettingError(_bind_error_text(self.address, self._names, error)) from error

    def leave(self) -> None:
        """Remove the file of a unix socket, unless another server has replaced it.

        While the socket is open, the inode is not reused.
        """
        if self._file is not None and self._has_its_file():
            with contextlib.suppress(OSError):
                Path(self.address.path).unlink()
        self._file = None

    def hand_over(self) -> None:
        """Leave the socket and its file to another server."""
        self._file = None
        self.is_handed_over = True

    def take_over(self) -> None:
        """Own the file of a passed socket, after the other server has released it.

        Raises:
            SettingError: The socket was removed and cannot be bound again.
        """
        if self._passed is None or not self._passed.is_owned:
            return
        path = Path(self.address.path)
        if not path.exists():  # The other server was stopped in the meantime.
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
    """Yield the bound listeners of all configured addresses.

    Args:
        settings: The settings of the server.
        passed: Sockets to use in place of new ones, by `bound_name`.
        grpc: Ports that must be free.

    Raises:
        SettingError: Addresses cannot be bound; the message has a line for each.
    """
    remaining, bound, errors = dict(passed or {}), [], []
    with contextlib.ExitStack() as stack:
        for address, roles in (*addresses(settings), *grpc):
            try:
                bound.append(Listener(address, roles, remaining.pop(bound_name(address), None)))
            except SettingError as error:
                errors.append(error.message)
                continue
            if set(roles).issubset(GRPC_ROLES):
                bound.pop().close()
            else:
                stack.callback(bound[-1].close)
        if errors:
            raise SettingError("\n".join(errors))
        for unused in remaining.values():
            unused.sock.close()  # Otherwise clients would wait in its backlog.
        yield bound


def bound_name(address: Address) -> str:
    """Return the name that a socket is bound to; it is the same for http and https."""
    return address.path or f"{address.host}:{address.port}"


def addresses(settings: Settings) -> list[tuple[Address, list[str]]]:
    """Return each address with the roles that share it; addresses with port 0 are never shared."""
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
        raise SettingError(_bind_error_text(address, names, error)) from error
    return sock


def bind_unix(path: str, names: str) -> socket.socket:
    """Bind a unix socket to which only this user can connect, from the first moment on."""
    if not hasattr(socket, "AF_UNIX"):
        raise SettingError(f"{names}: this system has no unix sockets. Use http://127.0.0.1:PORT.")
    _remove_stale_socket(path, names)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    umask = os.umask(0o177)  # Unlike a later chmod, it cannot be diverted to another file.
    try:
        sock.bind(path)
    except OSError as error:  # For a path that is too long there is no errno.
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise SettingError(_taken_text(path, names)) from error
        raise SettingError(
            f"{names}: cannot make the socket {path}: {error.strerror or error}. Choose another"
            " path."
        ) from error
    finally:
        os.umask(umask)
    return sock


def _remove_stale_socket(path: str, names: str) -> None:
    """Remove the file of a server that crashed, if no process listens there."""
    try:
        if not stat.S_ISSOCK(Path(path).stat().st_mode):
            raise SettingError(
                f"{names}: {path} exists and is not a socket. Choose another path, or remove it."
            )
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.connect(path)
    except ConnectionRefusedError:
        with contextlib.suppress(OSError):  # Binding will report the error.
            Path(path).unlink()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise SettingError(
            f"{names}: cannot use {path}: {error.strerror}. Choose another path."
        ) from error
    else:
        raise SettingError(_taken_text(path, names))


def _taken_text(path: str, names: str) -> str:
    return f"Another program listens at {path} ({names}). Stop it, or choose another path."


def _bind_error_text(address: Address, names: str, error: OSError) -> str:
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
