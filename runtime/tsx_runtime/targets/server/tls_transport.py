"""TLS between a plain transport and a connection's protocol, in place of asyncio's `ssl=`.

asyncio has buffers of its own for each connection, some 256 KiB that large bodies pass one after
the other, and after each read it asks OpenSSL once more, which answers with an exception. Here all
connections of a listener share one buffer and one pair of BIOs, which are empty again whenever a
protocol runs: OpenSSL keeps the beginning of an incomplete record itself. What was decrypted is
passed on in the records that it came in. There is no renegotiation (`tls.py`), so writing never
waits for the client.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Iterable
from typing import Any, cast

from tsx_runtime.http.turns import Turns

RECORD = 16 << 10  # bytes that a TLS record holds at most
BUFFER = (
    256 << 10
    # bytes that are read at once at most, as uvloop does from a plain connection, or encrypted: a
    # BIO keeps all its memory
)
# seconds that a client may take to agree that the connection is closed; an idle one does not read,
# so never does
GOODBYE = 2.0
# Bytes that are decrypted at once: with more, a BIO would not stay in the processor's cache.
PIECE = 64 << 10

logger = logging.getLogger("tsx.server")


class TlsListener:
    """Makes the connections of a listening socket: a protocol factory for `create_server`."""

    def __init__(
        self,
        context: ssl.SSLContext,
        new_protocol: Callable[[], asyncio.BaseProtocol],
        handshake_timeout: float,
        goodbye: float = GOODBYE,
    ) -> None:
        self.context = context
        self.new_protocol = new_protocol
        self.handshake_timeout = handshake_timeout
        self.goodbye = goodbye
        self.loop = asyncio.get_running_loop()
        self.turns = Turns(self.loop)
        self.buffer = memoryview(bytearray(BUFFER))
        self.incoming = ssl.MemoryBIO()
        self.outgoing = ssl.MemoryBIO()

    def __call__(self) -> TlsConnection:
        return TlsConnection(self)


class TlsConnection(asyncio.BufferedProtocol, asyncio.Transport):
    """The protocol of the plain transport, and the transport of the connection's own, which is made
    once the handshake is done.
    """

    def __init__(self, listener: TlsListener) -> None:
        super().__init__()
        self._listener = listener
        self._buffer, self._incoming, self._outgoing = (
            listener.buffer,
            listener.incoming,
            listener.outgoing,
        )
        self._tls = listener.context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._decrypt, self._encrypt = self._tls.read, self._tls.write
        self._plain: asyncio.Transport
        self._timer: asyncio.TimerHandle
        self._protocol: Any = None
        self._is_closing = False
        self._is_paused = False
        self._yields = False  # the other connections have their turn

    # The protocol of the plain transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._plain = cast("asyncio.Transport", transport)
        self._timer = self._listener.loop.call_later(self._listener.handshake_timeout, self.abort)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if nbytes <= PIECE:
            self._take(self._buffer[:nbytes])
            return
        if nbytes == BUFFER:
            self._yield_turn()
        for start in range(0, nbytes, PIECE):
            if not self._plain.is_closing():
                self._take(self._buffer[start : min(start + PIECE, nbytes)])

    def eof_received(self) -> None:
        """Also for the client's close_notify."""
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

    def _take(self, data: memoryview) -> None:
        incoming = self._incoming
        incoming.write(data)
        if self._protocol is None:
            self._shake_hands()
            return
        records: list[bytes] = []
        try:
            while incoming.pending and (not records or records[-1]):
                records.append(self._decrypt(RECORD))
        except ssl.SSLWantReadError:  # the last one is incomplete
            pass
        except ssl.SSLError as error:
            self._fail(error)
            return
        if incoming.pending:  # behind the client's close_notify
            incoming.read()
        # what OpenSSL answers by itself, such as to a new key: the next connection must not find it
        self._send()
        for record in records:
            if not record:
                self.eof_received()
            elif not self._is_closing:
                self._protocol.data_received(record)

    def _shake_hands(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._send()
            return
        except ssl.SSLError as error:
            self._send()  # an alert, which tells the client why
            self._fail(error)
            return
        self._send()
        self._timer.cancel()
        request = self._incoming.read()  # that came with the end of the handshake
        self._protocol = self._listener.new_protocol()
        self._protocol.connection_made(self)
        if request and not self._is_closing:
            self._take(memoryview(request))

    def _yield_turn(self) -> None:
        """Read on in another turn: the event loop would read megabytes from one connection in this
        one.
        """
        if not self._yields:
            self._yields = True
            self._plain.pause_reading()
            self._listener.turns.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._yields = False
        if (self._is_closing or not self._is_paused) and not self._plain.is_closing():
            self._plain.resume_reading()

    def _fail(self, error: ssl.SSLError) -> None:
        """Nothing of this connection may be left to the others."""
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
            if len(data) <= BUFFER:
                self._encrypt(data)
            else:
                view = memoryview(data)
                for start in range(0, len(view), BUFFER):
                    self._send()
                    # The client is gone, or the protocol ended it as it paused.
                    if self._is_closing or self._plain.is_closing():
                        return
                    self._encrypt(view[start : start + BUFFER])
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
        """Once all is sent, and the client agrees: some lose the end of an answer where the
        connection ends behind it at once.
        """
        if self._is_closing:
            return
        self._is_closing = True
        try:
            self._tls.unwrap()
        except ssl.SSLWantReadError:
            self._send()
            self._timer = self._listener.loop.call_later(self._listener.goodbye, self._plain.close)
            if self._is_paused and not self._yields:
                self._plain.resume_reading()
            return
        except ssl.SSLError:  # within the handshake
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
            if not self._yields:
                self._plain.pause_reading()

    def resume_reading(self) -> None:
        if not self._is_closing:
            self._is_paused = False
            if not self._yields:
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
