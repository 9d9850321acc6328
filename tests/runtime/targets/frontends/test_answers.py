"""A server with relays answers https as one without: two servers over one registry, one of which has two relays."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psutil
import pytest

from tests.runtime.http.test_lanes import ECHO, HEADERS, MALFORMED, PATHS, closes
from tests.support.certificates import Pair, make_certificate
from tests.support.clients.rawhttp import TIMEOUT, Answer, RawConnection, chunked, request
from tests.support.models import make_model
from tsx_runtime.core.models.plan import RegisterOrder
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.scheduling.byte_budget import ByteBudget
from tsx_runtime.core.telemetry.tracing import Tracer
from tsx_runtime.errors import SettingError
from tsx_runtime.http.app import build_apps
from tsx_runtime.settings.addresses import parse_address
from tsx_runtime.settings.schema import ROLES, Settings
from tsx_runtime.targets.frontends import relays
from tsx_runtime.targets.server.listeners import Listener
from tsx_runtime.targets.server.tls import tls_context
from tsx_runtime.targets.server.uvicorn_servers import ServerGroup

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("processes")]

WITHOUT, WITH = 1, 2  # `frontends`
BACK = """
def handle(data, context):
    return None if data is None else [row["body"] for row in data]
"""
SIZE = 6 << 20  # bytes of a large body, more than the socket pair and the buffers around it hold


class TlsRawConnection(RawConnection):
    def __init__(self, address: tuple[str, int], context: ssl.SSLContext, source: str = "") -> None:
        super().__init__(address, source=source)
        self.sock = context.wrap_socket(self.sock, server_hostname="localhost")

    def send(self, *pieces: bytes) -> None:
        with suppress(OSError):  # as of `RawConnection`
            super().send(*pieces)


@dataclass
class Served:
    addresses: dict[int, tuple[str, int]]  # by `frontends`
    trust: ssl.SSLContext
    registry: Registry
    loop: asyncio.AbstractEventLoop
    stop: asyncio.Event

    def connect(self, frontends: int = WITH, source: str = "") -> RawConnection:
        return TlsRawConnection(self.addresses[frontends], self.trust, source)

    @property
    def budget(self) -> ByteBudget:
        return self.registry.bytes_in_flight


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    store = tmp_path_factory.mktemp("frontends")
    pair = make_certificate(store)
    make_model(store / "echo.mar", ECHO)
    make_model(store / "back.mar", BACK)
    common = Settings(
        model_store=store,
        cache_dir=store / "cache",
        worker_preload=False,
        inference_address="https://127.0.0.1:0",
        certificate_file=pair.certificate,
        private_key_file=pair.key,
        write_timeout=1,
        max_response_size=2 * SIZE,
        max_request_size=2 * SIZE,
    )
    with serving(common, pair, ["echo", "back"], (WITHOUT, WITH)) as found:
        yield found


@contextmanager
def serving(common: Settings, pair: Pair, models: list[str], kinds: tuple[int, ...], tracer: Tracer | None = None) -> Iterator[Served]:
    """Servers in this process over one registry, one with each number of `frontends`."""
    found: list[Served] = []
    ready = threading.Event()

    async def main() -> None:
        registry = Registry(common)
        registry.tracer = tracer
        for model in models:
            await registry.register(RegisterOrder(url=f"{model}.mar", initial_workers=1))
        groups, addresses = [], {}
        for frontends in kinds:
            own = common.model_copy(update={"frontends": frontends})
            listener = Listener(parse_address(own.inference_address), list(ROLES))
            listener.listen()
            groups.append(ServerGroup(own, build_apps(registry, own, [list(ROLES)]), [listener], [], tls_context(own)))
            addresses[frontends] = ("127.0.0.1", listener.address.port)
            await groups[-1].start()
        trust = ssl.create_default_context(cafile=pair.certificate)
        found.append(Served(addresses, trust, registry, asyncio.get_running_loop(), asyncio.Event()))
        ready.set()
        await found[0].stop.wait()
        for group in groups:
            await group.stop(registry, asyncio.Event(), 5)
            await group.close()
        await registry.close()

    import uvloop

    thread = threading.Thread(target=lambda: uvloop.run(main()), name="frontends", daemon=True)
    thread.start()
    assert ready.wait(TIMEOUT)
    try:
        yield found[0]
    finally:
        found[0].loop.call_soon_threadsafe(found[0].stop.set)
        thread.join(TIMEOUT)
        assert not thread.is_alive()
        assert not relays_of(os.getpid())


def relays_of(pid: int) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(pid).children():
        with suppress(psutil.NoSuchProcess):  # it has just ended
            if any("frontends.relay" in word for word in child.cmdline()):
                found.append(child)
    return found


def connected_to(relay: psutil.Process, server: int, connect: Callable[[], RawConnection], count: int) -> list[RawConnection]:
    """Connections that this relay accepts: the others stand still meanwhile."""
    others = [each for each in relays_of(server) if each != relay]
    for each in others:
        each.suspend()
    try:
        return [connect() for _ in range(count)]
    finally:
        for each in others:
            each.resume()


class Client:
    """A connection, opened again where the server closes it."""

    def __init__(self, served: Served, frontends: int) -> None:
        self._new: Callable[[], RawConnection] = lambda: served.connect(frontends)
        self._connection = self._new()

    def ask(self, raw: bytes, method: bytes = b"POST") -> list[Answer | None]:
        """The answer, and what follows where the connection ends."""
        self._connection.send(raw)
        answers = [self._connection.answer(method)]
        if answers[0] is None or closes(answers[0]):
            answers.append(self._connection.answer())
            self.close()
            self._connection = self._new()
        return answers

    def close(self) -> None:
        self._connection.sock.close()


@pytest.fixture(scope="module")
def alike(served: Served) -> Iterator[Callable[..., None]]:
    clients = [Client(served, frontends) for frontends in (WITHOUT, WITH)]

    def check(raw: bytes, method: bytes = b"POST") -> None:
        one, two = (client.ask(raw, method) for client in clients)
        assert one == two, raw

    yield check
    for client in clients:
        client.close()


def test_with_relays_every_path_header_and_method_is_answered_as_without(alike: Callable[..., None]) -> None:
    for path in PATHS:
        alike(request(target=path, body=b"{}"))
        alike(request(b"GET", path), b"GET")
    for header in HEADERS:
        alike(request(target=b"/predictions/echo", headers=[header], body=b"x"))
        alike(request(target=b"/predictions/echo", headers=[header, (b"Transfer-Encoding", b"chunked")]) + chunked([b"a", b"bc"]))
    for method in (b"PUT", b"DELETE", b"HEAD", b"OPTIONS", b"PROPFIND"):
        alike(request(method, b"/predictions/echo", body=b"x"), method)


def test_with_relays_what_is_wrong_is_answered_as_without(alike: Callable[..., None]) -> None:
    for raw in MALFORMED:
        alike(raw)
        alike(request(target=b"/predictions/echo", headers=[(b"Connection", b"close")], body=b"x") + raw)


def test_a_large_body_comes_back_whole_while_other_clients_are_answered(served: Served) -> None:
    body = hashlib.shake_128(b"large").digest(SIZE)
    with served.connect() as slow, served.connect() as other:
        sending = threading.Thread(target=lambda: slow.send(request(target=b"/predictions/back", body=body)))
        sending.start()
        sending.join(TIMEOUT)
        for _ in range(20):  # the first one reads nothing
            other.send(request(target=b"/predictions/back", body=b"x"))
            answer = other.answer()
            assert answer is not None
            assert answer.body == b"x"
        answer = slow.answer()
    assert answer is not None
    assert answer.status == 200
    assert answer.body == body


def test_requests_that_are_sent_ahead_are_answered_in_order(served: Served) -> None:
    """By asyncio, which reads while it sends: two threads may not use one of Python's TLS sockets."""
    bodies = [b"%d" % number * 3000 for number in range(100)]

    async def answers() -> list[bytes]:
        reader, writer = await asyncio.open_connection(*served.addresses[WITH], ssl=served.trust)
        writer.writelines(request(target=b"/predictions/back", body=body) for body in bodies)
        found = []
        for _ in bodies:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            found.append(await reader.readexactly(length))
        writer.close()
        return found

    assert asyncio.run(answers()) == bodies


def test_clients_that_do_not_read_are_counted_and_cut_off(served: Served, until: Callable[[Callable[[], object]], None]) -> None:
    """One whose connection stays, and one whose connection the server has closed behind the answer."""
    with served.connect() as one, served.connect() as other:
        for connection, headers in ((one, []), (other, [(b"Connection", b"close")])):
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
            connection.send(request(target=b"/predictions/back", headers=headers, body=b"x" * SIZE))
        until(lambda: served.budget.unread > SIZE)
        until(lambda: not served.budget.used)  # after write_timeout
        assert len(one.read_all()) < SIZE
        assert len(other.read_all()) < SIZE


def test_a_job_whose_client_leaves_is_taken_back(served: Served, until: Callable[[Callable[[], object]], None]) -> None:
    with served.connect() as connection:
        connection.send(request(target=b"/predictions/back", body=b"x" * SIZE)[: SIZE // 2])
        until(lambda: served.budget.used)
    until(lambda: not served.budget.used)


def test_a_relay_that_does_not_start_ends_the_start(served: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    pair = make_certificate(tmp_path)
    own = Settings(inference_address="https://127.0.0.1:0", certificate_file=pair.certificate, private_key_file=pair.key, frontends=2)
    monkeypatch.setattr(relays, "PROGRAM", "raise SystemExit(3)")
    before = len(relays_of(os.getpid()))

    async def start() -> None:
        listener = Listener(parse_address(own.inference_address), list(ROLES))
        listener.listen()
        group = relays.Relays(own, [listener])
        try:
            await group.start()
        finally:
            await group.close()
            listener.close()

    with pytest.raises(SettingError, match="frontends is 2, but a relay could not be started: it ended"):
        asyncio.run(start())
    assert len(relays_of(os.getpid())) == before


def test_a_relay_that_keeps_dying_is_followed_after_growing_pauses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    pair = make_certificate(tmp_path)
    own = Settings(inference_address="https://127.0.0.1:0", certificate_file=pair.certificate, private_key_file=pair.key, frontends=2)
    monkeypatch.setattr(relays, "PAUSES", (0.01, 0.02, 0.03))
    program, others = relays.PROGRAM, {each.pid for each in relays_of(os.getpid())}

    def ours() -> list[psutil.Process]:
        return [each for each in relays_of(os.getpid()) if each.pid not in others and each.status() != psutil.STATUS_ZOMBIE]

    def pauses() -> list[str]:
        return [record.getMessage().partition("starts in ")[2] for record in caplog.records if "a relay ended" in record.getMessage()]

    async def wait(condition: Callable[[], object]) -> None:
        async with asyncio.timeout(TIMEOUT):
            while not condition():  # noqa: ASYNC110  # processes give no event
                await asyncio.sleep(0.01)

    async def keep_dying() -> None:
        listener = Listener(parse_address(own.inference_address), list(ROLES))
        listener.listen()
        group = relays.Relays(own, [listener])
        group.serve(listener, asyncio.Protocol)
        try:
            await group.start()
            one, other = ours()
            monkeypatch.setattr(relays, "PROGRAM", "raise SystemExit(3)")
            one.kill()
            await wait(lambda: len(pauses()) == 5)
            assert pauses() == ["0.01 s", "0.02 s", "0.03 s", "0.03 s", "0.03 s"]
            assert "(exit code -9)" in caplog.text
            assert "(exit code 3)" in caplog.text
            assert ours() == [other]
            monkeypatch.setattr(relays, "PROGRAM", program)
            await wait(lambda: len(ours()) == 2)
            monkeypatch.setattr(relays, "STEADY", 0.0)  # as after a minute
            dead = len(pauses())
            next(each for each in ours() if each != other).kill()
            await wait(lambda: len(pauses()) > dead)
            assert pauses()[-1] == "0.01 s"
            await wait(lambda: len(ours()) == 2)
        finally:
            await group.close()
            listener.close()

    asyncio.run(keep_dying())
    assert not ours()
