"""The handover of listening sockets to a server that replaces this one (`tsx serve --replace`).

The old server listens at a unix socket in the state directory, `ADDRESS.sock`. The new server sends
the secret in `ADDRESS.key`, to prove that it can read that directory. An isolated worker could
connect to the socket, but cannot read the secret.

    new    the secret; it loads its models after the reply
    old    {"format", "version", "sockets": [[name, is_owned] ...], "tokens"}, as JSON on one line,
           with the descriptors of the sockets
    new    "ready": it can answer now. If the connection ends before this message, the new server
           has not started, and the old one continues
    old    "yours": it accepts no more connections; new ones wait in the backlogs of the sockets
    old    the tokens again, as JSON on one line, because clients may have renewed them

If the old server is stopped while the new one loads, it sends "yours" after "ready", or ends before
that. In both cases it does not remove the file with the tokens.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
import re
import secrets
import socket
import struct
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from http.client import HTTPException
from pathlib import Path
from urllib.request import urlopen

from tsx_archiver.storage.atomic_file import write_atomically
from tsx_archiver.storage.private_directory import check_file, private_directory
from tsx_runtime.api.access.tokens import HandedTokens, Keys, generated_tokens, start_keys
from tsx_runtime.core.persistence import state_directory
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.errors import SettingError
from tsx_runtime.server.listeners import Listener, PassedSocket, bind_unix, bound_name
from tsx_runtime.settings.addresses import parse_address
from tsx_runtime.settings.schema import Settings
from tsx_runtime.version import __version__

MESSAGE_FORMAT = (
    1  # changes with the messages, because the two servers may be of different releases
)
RESPONSE_TIMEOUT_S = 30.0
SECRET_TIMEOUT_S = 5.0
MAX_LINE_BYTES = 64 << 10
MAX_SOCKETS = 16
READY, YOURS = b"ready\n", b"yours\n"

logger = logging.getLogger("tsx.server")


class Predecessor:
    """The running server that this one replaces."""

    def __init__(
        self,
        connection: socket.socket,
        sockets: dict[str, PassedSocket],
        tokens: HandedTokens,
        version: str,
    ) -> None:
        self.sockets = sockets  # keys are from `bound_name`
        self.tokens = tokens
        self.version = version
        self.is_replaced = False
        self._connection = connection

    @property
    def has_ended(self) -> bool:
        self._connection.setblocking(False)
        try:
            return not self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        finally:
            self._connection.settimeout(RESPONSE_TIMEOUT_S)

    async def take_over(self) -> None:
        """Tell the other server to stop accepting connections, and wait until it has."""
        await asyncio.to_thread(self._take_over)
        self.is_replaced = True

    def _take_over(self) -> None:
        with suppress(
            OSError
        ):  # The other server may have ended, but this one already has its sockets.
            self._connection.sendall(READY)
            with self._connection.makefile("rb") as stream:
                stream.readline()
                if (line := stream.readline()).endswith(
                    b"\n"
                ):  # Earlier releases do not send the tokens again.
                    self.tokens = json.loads(line)

    def close(self) -> None:
        """Close the connection; also close the sockets, unless this server has taken them over."""
        self._connection.close()
        if not self.is_replaced:
            for passed_sockets in self.sockets.values():
                passed_sockets.sock.close()


@contextmanager
def open_keys(
    settings: Settings, predecessor: Predecessor | None, is_replaced: asyncio.Event
) -> Iterator[Keys]:
    """Yield the keys, and remove their file at the end.

    A server that replaces another one has the same tokens, so the file then stays.
    """
    keys = start_keys(settings, None if predecessor is None else predecessor.tokens)
    if keys.file is not None:
        logger.info(
            "requests need tokens, which are in %s; send 'Authorization: Bearer TOKEN', or"
            " disable_token_authorization",
            keys.file,
        )
    try:
        yield keys
    finally:
        if not is_replaced.is_set() and (
            predecessor is None or predecessor.is_replaced or predecessor.has_ended
        ):
            keys.remove()


async def take_over(
    predecessor: Predecessor, registry: Registry, listeners: Sequence[Listener], keys: Keys
) -> None:
    """Become the owner of the sockets and tokens; the other server accepts no more connections."""
    await predecessor.take_over()
    try:
        keys.adopt_tokens(predecessor.tokens)
    except OSError as error:
        logger.error("the tokens cannot be written to %s: %s", keys.file, error.strerror)
    for listener in listeners:
        listener.take_over()
    for feature in registry.features:
        feature.follow(registry.settings.drain_timeout + RESPONSE_TIMEOUT_S)


@contextmanager
def find_predecessor(settings: Settings) -> Iterator[Predecessor | None]:
    """Yield the running server at the same address, or None if no server is running.

    Raises:
        SettingError: There is a server, but it cannot be replaced.
    """
    path = handover_path(settings)
    if path is None:
        text = (
            "--replace finds the running server by its inference_address and state directory: name"
            " a port, and state_dir"
        )
        raise SettingError(text)
    predecessor = _connect(path)
    if predecessor is None:
        logger.info(
            "there is no server to replace: none is running at %s; --set state_dir=DIRECTORY names"
            " the state directory of the running one",
            path,
        )
        with (
            suppress(OSError, HTTPException),
            urlopen(settings.inference_address, timeout=SECRET_TIMEOUT_S) as answer,
        ):
            if b"tsx inference" in answer.read(MAX_LINE_BYTES):
                raise SettingError(
                    f"--replace: none is running at {path}, but a tsx server answers at"
                    f" {settings.inference_address}: it has another state directory or address."
                    " Name its directory with --set state_dir=DIRECTORY (by default .tsx in its"
                    " model store, else ~/.local/state/tsx/ADDRESS)."
                )
    try:
        yield predecessor
    finally:
        if predecessor is not None:
            if not predecessor.is_replaced:
                text = (
                    "has ended meanwhile"
                    if predecessor.has_ended
                    else "was not replaced and goes on"
                )
                logger.error(
                    "this server has not started, so the running one (tsx %s) %s",
                    predecessor.version,
                    text,
                )
            predecessor.close()


def _connect(path: Path) -> Predecessor | None:
    with ExitStack() as stack:
        connection = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        connection.settimeout(RESPONSE_TIMEOUT_S)
        try:
            check_file(path.with_suffix(".key"))
            secret = path.with_suffix(".key").read_bytes()
            connection.connect(os.fspath(path))
            _check_peer(connection)
            connection.sendall(secret + b"\n")
            line, descriptors = _receive(connection)
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        except OSError as error:
            advice = (
                "Set state_dir to the running server's, which is of this user, or stop that server"
                " and start this one"
            )
            raise SettingError(
                f"--replace: the server at {path} cannot be replaced: {error.strerror or error}."
                f" {advice}."
            ) from error
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        sockets = [
            stack.enter_context(socket.socket(fileno=descriptor)) for descriptor in descriptors
        ]
        if not line.endswith(b"\n"):
            raise SettingError(
                "--replace: the running server is just being replaced, or is stopping; try again"
                " once it has ended"
            )
        try:
            message = json.loads(line)
            if message["format"] != MESSAGE_FORMAT:
                version = message["version"]
                raise SettingError(
                    f"--replace: tsx {version} is running, which this release cannot replace. Stop"
                    " it, then start this one."
                )
            passed_sockets = {
                name: PassedSocket(sock, is_owned)
                for (name, is_owned), sock in zip(message["sockets"], sockets, strict=True)
            }
            tokens = {
                kind: (str(token), remaining and float(remaining))
                for kind, (token, remaining) in message["tokens"].items()
            }
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise SettingError(
                f"--replace: what listens at {path} does not answer as tsx does ({error!r})."
                " Stop it."
            ) from error
        stack.pop_all()
        return Predecessor(connection, passed_sockets, tokens, message["version"])


def _check_peer(connection: socket.socket) -> None:
    """Check that the other server belongs to this user or to root.

    Raises:
        PermissionError: The server belongs to another user.
    """
    if sys.platform == "linux":
        _, uid, _ = struct.unpack(
            "3i",
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")),
        )
        if uid not in (os.geteuid(), 0):
            raise PermissionError(f"it belongs to another user (uid {uid})")


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    line, descriptors = b"", []
    while not line.endswith(b"\n"):
        data, new_descriptors, _, _ = socket.recv_fds(connection, MAX_LINE_BYTES, MAX_SOCKETS)
        descriptors += new_descriptors
        if not data:
            break
        line += data
    return line, descriptors


class SocketHandover:
    """The old server's side of the handover: it waits for a server that replaces it."""

    def __init__(
        self,
        listeners: Sequence[Listener],
        tokens: Callable[[], HandedTokens],
        on_ready: Callable[[], None],
    ) -> None:
        self.is_successor_ready = False
        self._listeners = listeners
        self._tokens = tokens
        self._on_ready = on_ready
        self._path: Path | None = None
        self._secret = secrets.token_hex().encode()
        self._server: asyncio.AbstractServer | None = None
        self._successor: asyncio.StreamWriter | None = None

    @property
    def is_successor_loading(self) -> bool:
        """Whether a server has connected that is not ready yet."""
        return self._successor is not None and not self.is_successor_ready

    async def open(self, path: Path) -> None:
        """Listen at `path`.

        Raises:
            OSError: The socket or the secret cannot be created.
            SettingError: Another server already listens at `path`.
        """
        private_directory(path.parent)
        sock = bind_unix(os.fspath(path), "state_dir")
        self._path = path
        with write_atomically(path.with_suffix(".key"), mode=0o600, durable=False) as file:
            file.write(self._secret)
        self._server = await asyncio.start_unix_server(self._serve, sock=sock)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            secret_line = await asyncio.wait_for(reader.readline(), SECRET_TIMEOUT_S)
            if (
                self._successor is not None
                or self.is_successor_ready
                or not hmac.compare_digest(secret_line.strip(), self._secret)
            ):
                return
            self._successor = writer
            sockets = [
                [bound_name(listener.address), listener.owns_file] for listener in self._listeners
            ]
            message = {
                "format": MESSAGE_FORMAT,
                "version": __version__,
                "sockets": sockets,
                "tokens": self._tokens(),
            }
            with socket.socket(
                fileno=os.dup(writer.get_extra_info("socket").fileno())
            ) as connection:
                line = json.dumps(message).encode() + b"\n"
                socket.send_fds(
                    connection, [line], [listener.sock.fileno() for listener in self._listeners]
                )
            if await reader.readline() == READY:
                self.is_successor_ready = True
                self._on_ready()
                if self._server is None:  # This server has been stopped in the meantime.
                    self.confirm()
            else:
                self._successor = None
                logger.warning(
                    "the server that was to replace this one did not start; this one goes on"
                )
        except (TimeoutError, asyncio.TimeoutError):  # The client has sent no secret.
            return
        except (OSError, ValueError) as error:
            logger.warning("this server could not be replaced: %s", error)
            if self._successor is writer:
                self._successor = None
        finally:
            if not self.is_successor_ready or self._successor is not writer:
                writer.close()

    def confirm(self) -> None:
        """Tell the other server that this one accepts no more connections."""
        self.close()
        if self._successor is not None:
            self._successor.write(YOURS + json.dumps(self._tokens()).encode() + b"\n")
            self._successor.close()

    def close(self) -> None:
        """Stop listening, and remove the files."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._path is not None:
            for file in (self._path, self._path.with_suffix(".key")):
                with suppress(OSError):
                    file.unlink()
            with suppress(OSError):  # This fails if the directory contains other files.
                self._path.parent.rmdir()
            self._path = None


@asynccontextmanager
async def replaceable(
    path: Path | None,
    settings: Settings,
    listeners: Sequence[Listener],
    keys: Keys,
    on_ready: Callable[[], None],
) -> AsyncIterator[SocketHandover]:
    """Allow another server to replace this one while the context is open.

    `on_ready` is called once the other server is ready.
    """
    # The tokens are read when they are needed, because clients may renew them.
    tokens = partial(generated_tokens, keys, settings)
    handover = SocketHandover(listeners, tokens, on_ready)
    try:
        if path is not None:
            try:
                await handover.open(path)
            except (OSError, SettingError) as error:
                logger.info(
                    "`tsx serve --replace` cannot replace this server: %s",
                    getattr(error, "message", error),
                )
        yield handover
    finally:
        handover.close()


def handover_path(settings: Settings) -> Path | None:
    """Return the path of the unix socket, or None if another server could not know it."""
    address = parse_address(settings.inference_address)
    directory = state_directory(settings)
    if directory is None or sys.platform == "win32" or not (address.port or address.path):
        return None
    return directory / (re.sub(r"[^A-Za-z0-9.]+", "_", bound_name(address)).strip("_") + ".sock")
