"""The listening sockets of the configured addresses."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tsx_archiver.storage.private_directory import warn_if_replaceable
from tsx_runtime.errors import SettingError
from tsx_runtime.settings.addresses import Address
from tsx_runtime.settings.schema import ROLES, Settings

# options of `tsx serve`, by setting
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
    is_owned: bool  # whether this server must remove the file of a unix socket


class Listener:
    """A bound socket, which listens only once models are loaded, so that no client waits.

    A passed socket already listens.
    """

    def __init__(
        self, address: Address, roles: list[str], passed: PassedSocket | None = None
    ) -> None:
        """Bind a socket, or use the passed one.

        Raises:
            SettingError: The address cannot be bound; the message suggests a change.
        """
        self.roles = roles
        self._passed_socket = passed
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
            SettingError: Another server has bound the address in the meantime.
        """
        if self._file is not None and not self._has_its_file():
            raise SettingError(_in_use_text(self.address.path, self._names))
        try:
            self.sock.listen(BACKLOG)
        except OSError as error:
            raise SettingError(_bind_error_text(self.address, self._names, error)) from error

    def remove_file(self) -> None:
        """Remove the file of a unix socket, unless another server has replaced the file.

        The inode identifies the file, because it is not reused while the socket is open.
        """
        if self._file is not None and self._has_its_file():
            with contextlib.suppress(OSError):
                Path(self.address.path).unlink()
        self._file = None

    def hand_over(self) -> None:
        """Let another server keep the socket and its file."""
        self._file = None
        self.is_handed_over = True

    def take_over(self) -> None:
        """Become the owner of a passed unix socket's file, after the other server has stopped.

        Raises:
            SettingError: The file was removed, and the socket cannot be bound again.
        """
        if self._passed_socket is None or not self._passed_socket.is_owned:
            return
        path = Path(self.address.path)
        if not path.exists():  # The other server has been stopped, and has removed the file.
            self.sock.close()
            self.sock = bind_unix(self.address.path, self._names)
            self.sock.setblocking(False)
            self.listen()
        with contextlib.suppress(OSError):
            self._file = path.stat()

    def close(self) -> None:
        self.remove_file()
        self.sock.close()

    @property
    def owns_file(self) -> bool:
        return self._file is not None

    @property
    def _names(self) -> str:
        return " and ".join(map(_setting_of, self.roles))

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
    others: Iterable[tuple[Address, list[str]]] = (),
) -> Iterator[list[Listener]]:
    """Yield the bound listeners of all configured addresses.

    Args:
        settings: The settings of the server.
        passed: Existing sockets to use, by `bound_name`.
        others: The addresses that features bind later; here they are only checked to be free.

    Raises:
        SettingError: Addresses cannot be bound; the message has one line for each.
    """
    unused_sockets, bound_listeners, errors = dict(passed or {}), [], []
    with contextlib.ExitStack() as stack:
        for address, roles in addresses(settings):
            try:
                bound_listeners.append(
                    Listener(address, roles, unused_sockets.pop(bound_name(address), None))
                )
                stack.callback(bound_listeners[-1].close)
            except SettingError as error:
                errors.append(error.message)
        for other in others:
            try:
                check_free([other])
            except SettingError as error:
                errors.append(error.message)
        if errors:
            raise SettingError("\n".join(errors))
        for unused_socket in unused_sockets.values():
            unused_socket.sock.close()  # Otherwise clients could connect, and would wait forever.
        yield bound_listeners


def check_free(addresses: Iterable[tuple[Address, list[str]]]) -> None:
    """Check that the ports of features are free.

    Raises:
        SettingError: A port is in use.
    """
    for address, roles in addresses:
        _bind_tcp(address, " and ".join(map(_setting_of, roles))).close()


def _setting_of(role: str) -> str:
    """Return the setting with the port of a role."""
    return f"{role}_address" if role in ROLES else f"{role}_port"


def bound_name(address: Address) -> str:
    """Return the path or HOST:PORT that a socket is bound to, without the scheme."""
    return address.path or f"{address.host}:{address.port}"


def addresses(settings: Settings) -> list[tuple[Address, list[str]]]:
    """Return each address with its roles; an address with port 0 has only one role."""
    roles_by_address: dict[Address, list[str]] = {}
    unshared: list[tuple[Address, list[str]]] = []
    for role, address in settings.addresses().items():
        if role not in ROLES:
            continue
        if address.port or address.scheme == "unix":
            roles_by_address.setdefault(address, []).append(role)
        else:
            unshared.append((address, [role]))
    return [*roles_by_address.items(), *unshared]


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
    """Bind a unix socket to which only this user can connect, even right after `bind`."""
    if not hasattr(socket, "AF_UNIX"):
        raise SettingError(f"{names}: this system has no unix sockets. Use http://127.0.0.1:PORT.")
    _remove_stale_socket(path, names)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    umask = os.umask(
        0o177
    )  # A later chmod could be redirected to another file, so the umask is used.
    try:
        sock.bind(path)
    except OSError as error:  # If the path is too long, `errno` is None.
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise SettingError(_in_use_text(path, names)) from error
        raise SettingError(
            f"{names}: cannot make the socket {path}: {error.strerror or error}. Choose another"
            " path."
        ) from error
    finally:
        os.umask(umask)
    return sock


def _remove_stale_socket(path: str, names: str) -> None:
    """Remove the socket file of a server that has crashed; keep it if a process listens."""
    try:
        if not stat.S_ISSOCK(Path(path).stat().st_mode):
            raise SettingError(
                f"{names}: {path} exists and is not a socket. Choose another path, or remove it."
            )
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.connect(path)
    except ConnectionRefusedError:
        with contextlib.suppress(OSError):  # If this fails, `bind` will report the error.
            Path(path).unlink()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise SettingError(
            f"{names}: cannot use {path}: {error.strerror}. Choose another path."
        ) from error
    else:
        raise SettingError(_in_use_text(path, names))


def _in_use_text(path: str, names: str) -> str:
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
