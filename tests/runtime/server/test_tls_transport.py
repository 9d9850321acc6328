"""TLS connections: every byte arrives once and on its own connection."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import shutil
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import cast

import pytest

from tests.support.certificates import Pair, make_certificate
from tsx_runtime.http.tls import tls_context
from tsx_runtime.server.tls_transport import BUFFER_BYTES, TlsListener
from tsx_runtime.settings.schema import Settings

SIZES = (1, 100, 16 << 10, (16 << 10) + 1, 100_000, 1 << 20)
TIMEOUT = 20.0


@pytest.fixture(scope="module")
def pair(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_certificate(tmp_path_factory.mktemp("tls"))


class Echo(asyncio.Protocol):
    """A protocol that sends back its data."""

    def __init__(self, protocols: list[Echo]) -> None:
        protocols.append(self)
        self.protocols = protocols
        self.received = 0
        self.events: list[str] = []
        self.paused = asyncio.Event()
        self.lost = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self.received += len(data)
        self.transport.write(data)

    def eof_received(self) -> None:
        self.events.append("eof")

    def pause_writing(self) -> None:
        self.paused.set()
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        self.events.append("resume")
        self.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set_result(exc)


class Sink(Echo):
    """A protocol that sends nothing back."""

    def data_received(self, data: bytes) -> None:
        self.received += len(data)


class Server:
    """An echo server over TLS, on a port of its own."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.protocols: list[Echo] = []
        self.port = 0

    @asynccontextmanager
    async def run(
        self, kind: type[Echo] = Echo, handshake_timeout: float = 60.0, goodbye: float = 2.0
    ) -> AsyncIterator[TlsListener]:
        context = tls_context(
            Settings(
                inference_address="https://127.0.0.1:1",
                certificate_file=self.pair.certificate,
                private_key_file=self.pair.key,
            )
        )
        assert context is not None
        listener = TlsListener(context, lambda: kind(self.protocols), handshake_timeout, goodbye)
        server = await asyncio.get_running_loop().create_server(listener, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield listener
            for echo in self.protocols:
                echo.transport.abort()
            assert listener.incoming.pending == listener.outgoing.pending == 0
        finally:
            server.close()

    def trust(self, version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.pair.certificate)
        context.minimum_version = context.maximum_version = version
        return context

    async def connect(
        self, version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, ssl=self.trust(version))


class RawClient:
    """A client that can send any part of its encrypted bytes at any time."""

    def __init__(self, server: Server) -> None:
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = server.trust().wrap_bio(
            self.incoming, self.outgoing, server_hostname="127.0.0.1"
        )
        self.server = server

    async def connect(self) -> RawClient:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        return self

    async def shake_hands(self, *, send_last: bool = True) -> None:
        while True:
            try:
                self.tls.do_handshake()
            except ssl.SSLWantReadError:
                self.writer.write(self.outgoing.read())
                self.incoming.write(await self.reader.read(65536))
            else:
                break
        if send_last:
            self.writer.write(self.outgoing.read())
            # Session tickets arrive once the server has also finished the handshake.
            self.incoming.write(await self.reader.read(65536))

    def encrypt(self, data: bytes) -> bytes:
        self.tls.write(data)
        return self.outgoing.read()

    async def read_exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            try:
                data += self.tls.read(65536)
            except ssl.SSLWantReadError:
                chunk = await self.reader.read(65536)
                assert chunk
                self.incoming.write(chunk)
        return data


def on_both_loops(test: Callable[[Server], Awaitable[None]]) -> Callable[[Pair, str], None]:
    @pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
    @functools.wraps(test)
    def run(pair: Pair, loop: str) -> None:
        async def run_with_timeout() -> None:
            await asyncio.wait_for(test(Server(pair)), TIMEOUT)

        if loop == "asyncio":
            asyncio.run(run_with_timeout())
        elif sys.platform == "win32":
            pytest.skip("uvloop does not exist for Windows")
        else:
            import uvloop

            uvloop.run(run_with_timeout())

    del run.__wrapped__  # type: ignore[attr-defined]  # pytest would take its arguments for fixtures
    return run


@on_both_loops
async def test_data_is_echoed_with_every_tls_version(server: Server) -> None:
    async with server.run():
        for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            reader, writer = await server.connect(version)
            for size in SIZES:
                data = random.Random(size).randbytes(size)
                writer.write(data)
                assert await reader.readexactly(size) == data
            writer.close()
            await server.protocols[-1].lost


@on_both_loops
async def test_concurrent_connections_get_their_own_bytes(server: Server) -> None:
    async def exchange_texts(number: int) -> None:
        reader, writer = await server.connect()
        chance = random.Random(number)
        for _ in range(10):
            data = chance.randbytes(chance.choice(SIZES) // 2 + 1)
            writer.write(data)
            assert await reader.readexactly(len(data)) == data
        writer.close()

    async with server.run():
        await asyncio.gather(*map(exchange_texts, range(10)))
        for echo in server.protocols:
            await echo.lost


@on_both_loops
async def test_fragmented_records_are_reassembled(server: Server) -> None:
    async with server.run():
        clients = [await RawClient(server).connect() for _ in range(3)]
        for client in clients:
            await client.shake_hands()
        texts = [bytes([65 + number]) * 50 for number in range(3)]
        bits = [client.encrypt(text) for client, text in zip(clients, texts, strict=True)]
        for position in range(max(map(len, bits))):
            for client, record in zip(clients, bits, strict=True):
                client.writer.write(record[position : position + 1])
            await asyncio.sleep(0)
        for client, text in zip(clients, texts, strict=True):
            assert await client.read_exactly(len(text)) == text
            client.writer.close()


@on_both_loops
async def test_a_request_sent_with_the_end_of_the_handshake_is_answered(server: Server) -> None:
    async with server.run():
        client = await RawClient(server).connect()
        await client.shake_hands(send_last=False)
        # The client's Finished message precedes them.
        client.writer.write(client.encrypt(b"first") + client.encrypt(b"second")[:7])
        assert await client.read_exactly(5) == b"first"
        client.writer.close()


@on_both_loops
async def test_garbage_ends_only_its_own_connection(server: Server) -> None:
    async with server.run():
        intact_client = await RawClient(server).connect()
        await intact_client.shake_hands()
        records = intact_client.encrypt(b"x" * 1000)
        intact_client.writer.write(records[:500])
        garbage_client = await RawClient(server).connect()
        await garbage_client.shake_hands()
        garbage_client.writer.write(
            b"\x17\x03\x03\x00\x20" + bytes(32) + b"and what follows" * 1000
        )
        await server.protocols[1].lost
        assert server.protocols[1].received == 0
        plain_reader, plain_writer = await asyncio.open_connection("127.0.0.1", server.port)
        plain_writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"HTTP" not in await plain_reader.read()
        intact_client.writer.write(records[500:])
        assert await intact_client.read_exactly(1000) == b"x" * 1000
        for writer in (intact_client.writer, garbage_client.writer, plain_writer):
            writer.close()


@on_both_loops
async def test_a_tls_alert_reaches_no_other_connection(server: Server) -> None:
    """Request a renegotiation, which OpenSSL answers with an alert."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the command openssl: Python's clients do not renegotiate")
    async with server.run():
        address = f"127.0.0.1:{server.port}"
        client = await asyncio.create_subprocess_exec(
            openssl,
            "s_client",
            "-connect",
            address,
            "-tls1_2",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert client.stdin is not None
        assert client.stdout is not None
        reader, writer = await server.connect()
        await client.stdout.readuntil(b"Verify return code")
        client.stdin.write(b"R\n")
        await client.wait()  # the alert ends the client
        writer.write(b"untouched")
        assert await reader.readexactly(9) == b"untouched"


class Recorder(asyncio.Transport):
    """An in-memory transport without TLS."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        pass


@on_both_loops
async def test_a_large_answer_passes_through_the_shared_buffers_in_pieces(server: Server) -> None:
    """Pass it in pieces, since a BIO never releases its memory."""
    async with server.run() as listener:
        client, recorder = RawClient(server), Recorder()
        connection = listener()
        connection.connection_made(recorder)
        while not server.protocols:
            with contextlib.suppress(ssl.SSLWantReadError):
                client.tls.do_handshake()
            encrypted = client.outgoing.read()
            connection.get_buffer(-1)[: len(encrypted)] = encrypted
            connection.buffer_updated(len(encrypted))
            client.incoming.write(b"".join(recorder.written))
            recorder.written.clear()
        data = random.Random(0).randbytes((8 << 20) + 1)
        for answer in (data, memoryview(data)[1:]):
            connection.write(answer)
            assert max(map(len, recorder.written)) <= BUFFER_BYTES + 1024
            client.incoming.write(b"".join(recorder.written))
            recorder.written.clear()
            assert await client.read_exactly(len(answer)) == bytes(answer)


@on_both_loops
async def test_close_sends_pending_data_and_close_notify(server: Server) -> None:
    async with server.run(goodbye=0.2):
        client = await RawClient(server).connect()
        await client.shake_hands()
        transport = server.protocols[0].transport
        transport.write(bytes(3 << 20))
        transport.close()
        assert transport.is_closing()
        transport.write(b"too late")
        assert await client.read_exactly(3 << 20) == bytes(3 << 20)
        # The client does not answer close_notify; therefore the connection ends after a while.
        while chunk := await client.reader.read(65536):
            client.incoming.write(chunk)
        assert client.tls.read(1) == b""  # an end without close_notify would raise
        assert await server.protocols[0].lost is None
        client.writer.close()


@on_both_loops
async def test_an_asyncio_client_gets_the_complete_last_answer(server: Server) -> None:
    """Check that the connection does not end early; the client would lose unread bytes."""
    async with server.run():
        reader, writer = await server.connect()
        writer.write(b"x")
        await reader.readexactly(1)
        server.protocols[0].transport.write(bytes(3 << 20))
        server.protocols[0].transport.close()
        assert await reader.read() == bytes(3 << 20)
        writer.close()
        await server.protocols[0].lost


@on_both_loops
async def test_bytes_after_close_are_dropped_until_the_client_closes(server: Server) -> None:
    async with server.run(goodbye=60):
        client = await RawClient(server).connect()
        await client.shake_hands()
        server.protocols[0].transport.pause_reading()
        server.protocols[0].transport.close()
        client.writer.writelines([client.encrypt(bytes(16 << 10)) for _ in range(100)])
        with contextlib.suppress(ssl.SSLError):
            client.tls.unwrap()
        client.writer.write(client.outgoing.read())
        assert await server.protocols[0].lost is None
        assert server.protocols[0].received == 0
        assert server.protocols[0].events == []
        client.writer.close()


@on_both_loops
async def test_the_end_of_a_client_is_reported_once(server: Server) -> None:
    async with server.run():
        client = await RawClient(server).connect()
        await client.shake_hands()
        with contextlib.suppress(ssl.SSLWantReadError):
            client.tls.unwrap()
        client.writer.write(client.outgoing.read() + b"anything")
        while await client.reader.read(65536):
            pass
        assert await server.protocols[0].lost is None
        assert server.protocols[0].events == ["eof"]
        client.writer.close()


@on_both_loops
async def test_a_client_without_a_handshake_is_disconnected(server: Server) -> None:
    async with server.run(handshake_timeout=0.05):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        assert not server.protocols
        writer.close()
        _, slow_writer = await server.connect()  # a client that has shaken hands stays
        await asyncio.sleep(0.1)
        assert not server.protocols[0].lost.done()
        slow_writer.close()


@on_both_loops
async def test_a_client_that_reads_nothing_pauses_the_protocol(server: Server) -> None:
    async with server.run():
        client = await RawClient(server).connect()
        await client.shake_hands()
        size = 12 << 20
        client.writer.writelines([client.encrypt(bytes(16 << 10)) for _ in range(size >> 14)])
        await server.protocols[0].paused.wait()
        received = server.protocols[0].received
        for _ in range(100):
            await asyncio.sleep(0)  # a turn
        assert (
            server.protocols[0].received - received <= BUFFER_BYTES
        )  # bytes that were read already
        assert received < size
        assert server.protocols[0].transport.get_write_buffer_size() < 2 * BUFFER_BYTES
        assert await client.read_exactly(size) == bytes(size)
        assert "resume" in server.protocols[0].events
        client.writer.close()


@on_both_loops
async def test_a_protocol_may_close_the_connection_in_pause_writing(server: Server) -> None:
    class Ends(Echo):
        def data_received(self, data: bytes) -> None:
            self.transport.write(bytes(16 << 20))

        def pause_writing(self) -> None:
            end = self.transport.close if len(self.protocols) == 1 else self.transport.abort
            end()

    async with server.run(Ends):
        for number in range(2):
            reader, writer = await server.connect()
            writer.write(b"x")
            assert len(await reader.read()) < 16 << 20
            assert await server.protocols[number].lost is None
            writer.close()
        server.protocols.clear()  # all have ended
        _, writer = await server.connect()
        writer.close()


@on_both_loops
async def test_a_large_upload_does_not_starve_other_connections(server: Server) -> None:
    async with server.run(Sink):
        client = await RawClient(server).connect()
        await client.shake_hands()
        size, max_step, last = 16 << 20, 0, 0
        client.writer.writelines([client.encrypt(bytes(16 << 10)) for _ in range(size >> 14)])
        while last < size:
            await asyncio.sleep(0)  # a turn
            max_step, last = (
                max(max_step, server.protocols[0].received - last),
                server.protocols[0].received,
            )
        assert max_step <= 2 * BUFFER_BYTES
        client.writer.close()
