"""TLS between a plain transport and a connection's protocol, in place of asyncio's `ssl=`.

asyncio has its own buffers for each connection: large bodies pass some 256 KiB of them in turn. It
also asks OpenSSL once more after each read, which costs an exception. Here all connections of a
listener share one buffer and one pair of BIOs. These are empty whenever a protocol runs, because
OpenSSL itself stores the beginning of an incomplete record. Decrypted data is passed on in its
records. There is no renegotiation (`tls.py`), so writing never waits for the client.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Iterable
from typing import Any, cast

from tsx_runtime.http.turns import Turns

RECORD_BYTES = 16 << 10  # maximum size of a TLS record
# The limit of one read, as uvloop has it for plain connections, and of one encryption: a BIO never
# shrinks.
BUFFER_BYTES = 256 << 10
# The time for a client to confirm the end of the connection. An idle one reads nothing, and so
# never confirms.
CLOSE_TIMEOUT_S = 2.0
# The size of one decryption: with more, a BIO would not stay in the processor's cache.
PIECE_BYTES = 64 << 10

logger = logging.getLogger("tsx.server")


class TlsListener:
    """The protocol factory of a listening socket, for `create_server`."""

    def __init__(
        self,
        context: ssl.SSLContext,
        new_protocol: Callable[[], asyncio.BaseProtocol],
        handshake_timeout_s: float,
        close_timeout_s: float = CLOSE_TIMEOUT_S,
    ) -> None:
        self.context = context
        self.new_protocol = new_protocol
        self.handshake_timeout_s = handshake_timeout_s
        self.close_timeout_s = close_timeout_s
        self.loop = asyncio.get_running_loop()
        self.turns = Turns(self.loop)
        self.buffer = memoryview(bytearray(BUFFER_BYTES))
        self.incoming = ssl.MemoryBIO()
        self.outgoing = ssl.MemoryBIO()

    def __call__(self) -> TlsConnection:
        return TlsConnection(self)


class TlsConnection(asyncio.BufferedProtocol, asyncio.Transport):
    """The protocol of a plain transport, and the transport of a connection's own protocol.

    The latter is created after the handshake.
    """

    def __init__(self, listener: TlsListener) -> None:
        super().__init__()
        self._listener = listener
        self._buffer = listener.buffer
        self._incoming = listener.incoming
        self._outgoing = listener.outgoing
        self._tls = listener.context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._decrypt, self._encrypt = self._tls.read, self._tls.write
        self._plain: asyncio.Transport
        self._timer: asyncio.TimerHandle
        self._protocol: Any = None
        self._is_closing = False
        self._is_paused = False
        self._has_yielded = False  # whether other connections have their turn

    # The protocol of the plain transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._plain = cast("asyncio.Transport", transport)
        self._timer = self._listener.loop.call_later(self._listener.handshake_timeout_s, self.abort)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if nbytes <= PIECE_BYTES:
            self._receive(self._buffer[:nbytes])
            return
        if nbytes == BUFFER_BYTES:
            self._yield_turn()
        for start in range(0, nbytes, PIECE_BYTES):
            if not self._plain.is_closing():
                self._receive(self._buffer[start : min(start + PIECE_BYTES, nbytes)])

    def eof_received(self) -> None:
        """End the connection; this is also called for the client's close_notify."""
        if self._protocol is not None and not self._is_closing:
            self._protocol.eof_received()
        self.close()
        self._plain.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closing = True
        self._timer.cancel()
        protocol, self._protocol = self._protocol, None
        if protocol is not None:
            protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        if self._protocol is not None:
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        if self._protocol is not None:
            self._protocol.resume_writing()

    # Handshake, and reading

    def _receive(self, data: memoryview) -> None:
        incoming = self._incoming
        incoming.write(data)
        if self._protocol is None:
            self._do_handshake()
            return
        records: list[bytes] = []
        try:
            while incoming.pending and (not records or records[-1]):
                records.append(self._decrypt(RECORD_BYTES))
        except ssl.SSLWantReadError:  # The last record is incomplete.
            pass
        except ssl.SSLError as error:
            self._fail(error)
            return
        if incoming.pending:  # data after the client's close_notify
            incoming.read()
        # OpenSSL may have answered by itself, such as to a new key. This must not stay in the BIO.
        self._send()
        for record in records:
            if not record:
                self.eof_received()
            elif not self._is_closing:
                self._protocol.data_received(record)

    def _do_handshake(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._send()
            return
        except ssl.SSLError as error:
            self._send()  # An alert tells the client the reason.
            self._fail(error)
            return
        self._send()
        self._timer.cancel()
        request = self._incoming.read()  # data that came with the end of the handshake
        self._protocol = self._listener.new_protocol()
        self._protocol.connection_made(self)
        if request and not self._is_closing:
            self._receive(memoryview(request))

    def _yield_turn(self) -> None:
        """Read on in another turn, because this one would read megabytes of one connection."""
        if not self._has_yielded:
            self._has_yielded = True
            self._plain.pause_reading()
            self._listener.turns.call_soon(self._resume_turn)

    def _resume_turn(self) -> None:
        self._has_yielded = False
        if (self._is_closing or not self._is_paused) and not self._plain.is_closing():
            self._plain.resume_reading()

    def _fail(self, error: ssl.SSLError) -> None:
        """Close the connection, and leave no data of it to the others."""
        self._is_closing = True
        self._incoming.read()
        self._outgoing.read()
        logger.debug("a TLS connection is closed: %s", error)
        self._plain.close()

    # The transport of the protocol

    def write(self, data: Any) -> None:
        if not data or self._is_closing:
            return
        try:
            if len(data) <= BUFFER_BYTES:
                self._encrypt(data)
            else:
                view = memoryview(data)
                for start in range(0, len(view), BUFFER_BYTES):
                    self._send()
                    # The client is gone, or the protocol ended it as it paused.
                    if self._is_closing or self._plain.is_closing():
                        return
                    self._encrypt(view[start : start + BUFFER_BYTES])
        except ssl.SSLError as error:
            self._fail(error)
            return
        self._plain.write(self._outgoing.read())

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        self.write(b"".join(list_of_data))

    def _send(self) -> None:
        if self._outgoing.pending:
            self._plain.write(self._outgoing.read())

    def close(self) -> None:
        """Close after all data is sent and the client has confirmed.

        Some clients lose the end of an answer if the connection ends at once.
        """
        if self._is_closing:
            return
        self._is_closing = True
        try:
            self._tls.unwrap()
        except ssl.SSLWantReadError:
            self._send()
            self._timer = self._listener.loop.call_later(
                self._listener.close_timeout_s, self._plain.close
            )
            if self._is_paused and not self._has_yielded:
                self._plain.resume_reading()
            return
        except ssl.SSLError:  # The handshake is not complete.
            pass
        self._send()
        self._plain.close()

    def abort(self) -> None:
        self._is_closing = True
        self._plain.abort()

    def is_closing(self) -> bool:
        return self._is_closing

    def pause_reading(self) -> None:
        if not self._is_closing:
            self._is_paused = True
            if not self._has_yielded:
                self._plain.pause_reading()

    def resume_reading(self) -> None:
        if not self._is_closing:
            self._is_paused = False
            if not self._has_yielded:
                self._plain.resume_reading()

    def is_reading(self) -> bool:
        return not self._is_paused and not self._is_closing

    def get_write_buffer_size(self) -> int:
        return self._plain.get_write_buffer_size()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "sslcontext":
            return self._listener.context
        return self._tls if name == "ssl_object" else self._plain.get_extra_info(name, default)
