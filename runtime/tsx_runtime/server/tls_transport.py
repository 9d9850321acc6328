"""TLS between a plain transport and a connection's protocol, in place of asyncio's `ssl=`.

asyncio has separate buffers of some 256 KiB for each connection, which large bodies fill again and
again. It also calls OpenSSL once more after each read, which raises an exception. Here all
connections of a listener share one buffer and one pair of BIOs (OpenSSL's memory buffers). The BIOs
are empty whenever a protocol runs, because OpenSSL itself stores the beginning of an incomplete
record. Each decrypted record is passed on separately. There is no renegotiation (`http/tls.py`), so
writing never waits for the client.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Iterable
from typing import Any, cast

from tsx_runtime.http.turns import Turns

RECORD_BYTES = 16 << 10  # maximum size of a TLS record
# Limit of one read, as in uvloop for plain connections. It is also the limit of one encryption,
# because a BIO never shrinks.
BUFFER_BYTES = 256 << 10
# Timeout for a client to confirm the end of the connection. An idle client reads nothing, and
# therefore never confirms.
CLOSE_TIMEOUT_S = 2.0
# Limit of one decryption, so that the BIO stays in the processor's cache.
PIECE_BYTES = 64 << 10

logger = logging.getLogger("tsx.server")


class TlsListener:
    """The protocol factory of a listening socket, which `create_server` takes."""

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
    """A protocol for a plain transport, and a transport for the connection's own protocol.

    The connection's own protocol is created after the handshake.
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
        self._is_waiting_for_turn = False  # whether reading continues in a later turn

    # Methods of the protocol for the plain transport

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

    # Handshake and reading

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
        if incoming.pending:  # This is data after the client's close_notify, which is dropped.
            incoming.read()
        # OpenSSL itself may have written a reply, for example to a key update. It must not stay in
        # the BIO.
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
            self._send()  # OpenSSL has written an alert that tells the client the reason.
            self._fail(error)
            return
        self._send()
        self._timer.cancel()
        request = self._incoming.read()  # bytes that came with the last message of the handshake
        self._protocol = self._listener.new_protocol()
        self._protocol.connection_made(self)
        if request and not self._is_closing:
            self._receive(memoryview(request))

    def _yield_turn(self) -> None:
        """Pause reading until another turn, so that one connection cannot fill this turn."""
        if not self._is_waiting_for_turn:
            self._is_waiting_for_turn = True
            self._plain.pause_reading()
            self._listener.turns.call_soon(self._resume_turn)

    def _resume_turn(self) -> None:
        self._is_waiting_for_turn = False
        if (self._is_closing or not self._is_paused) and not self._plain.is_closing():
            self._plain.resume_reading()

    def _fail(self, error: ssl.SSLError) -> None:
        """Close the connection, and clear the shared BIOs for the other connections."""
        self._is_closing = True
        self._incoming.read()
        self._outgoing.read()
        logger.debug("a TLS connection is closed: %s", error)
        self._plain.close()

    # Methods of the transport for the connection's own protocol

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
                    # The client has left, or the protocol has closed in `pause_writing`.
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
        """Close after all data has been sent and the client has confirmed.

        If the connection ended at once, some clients would lose the end of an answer.
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
            if self._is_paused and not self._is_waiting_for_turn:
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
            if not self._is_waiting_for_turn:
                self._plain.pause_reading()

    def resume_reading(self) -> None:
        if not self._is_closing:
            self._is_paused = False
            if not self._is_waiting_for_turn:
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
