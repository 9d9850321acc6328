"""The targets of the fuzzer: each accepts or refuses bytes, and raises an exception on a fault."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from uvicorn.config import Config
from uvicorn.server import ServerState

from tests.support.models import make_model
from tsx_archiver import ArchiveError, Limits, inspect_archive, open_archive
from tsx_runtime import wire
from tsx_runtime.api.urls import model_in_form
from tsx_runtime.core.models.plan import RegisterOrder
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.workers.threads import ThreadStarter
from tsx_runtime.errors import TsxError
from tsx_runtime.http.build import build_apps
from tsx_runtime.http.fast_lane.connection import FastLane
from tsx_runtime.settings.schema import Settings
from tsx_runtime.settings.traffic_policy import parse_traffic

ECHO = "def handle(data, context):\n    return data and [bytes(row.get('body') or row.get('data') or b'') for row in data]\n"
# iterations of the event loop for one input
TURNS = 400
MAX_IDLE_TURNS = 12  # iterations without a response after which none is expected
# the maximum of bytes written for each received byte
MAX_WRITTEN_PER_BYTE = 64
MAX_RESPONSE_BYTES = 1 << 20

Target = Callable[[bytes], None]


def frame(data: bytes) -> None:
    """Decode a frame between front end and worker, and the metadata of its items."""
    with contextlib.suppress(wire.FrameError):
        header = wire.decode_header(data)
        message = wire.decode(header, data[wire.HEADER.size :])
        encoded = b"".join(
            bytes(part)
            for part in wire.encode(message.kind, message.batch, message.items, message.extra)
        )
        assert (
            wire.decode(wire.decode_header(encoded), encoded[wire.HEADER.size :]).items
            == message.items
        )
        for _, meta, _ in message.items:
            with contextlib.suppress(wire.FrameError):
                _, _, block = wire.parse_request_meta(meta)
                list(wire.parse_header_block(block))


def form(data: bytes) -> None:
    """Search a form for the field `model_name`; the first byte chooses the form's type."""
    kinds = (
        b"application/x-www-form-urlencoded",
        b"multipart/form-data; boundary=b",
        b"multipart/form-data",
        b"multipart/form-data; " + data[1:40],
    )
    with contextlib.suppress(TsxError):
        model_in_form(
            [(b"content-type", kinds[data[0] % len(kinds)] if data else kinds[0])], data[1:]
        )


def traffic(data: bytes) -> None:
    """Parse a document of traffic settings."""
    # Both errors become status 400.
    with contextlib.suppress(ValueError, RecursionError):
        parse_traffic(json.loads(data))


class Archives:
    """A file that claims to be an archive, which is inspected and opened with small limits."""

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="fuzz-"))
        self._limits = Limits(members=100, total=1 << 20)

    def __call__(self, data: bytes) -> None:
        file = self._directory / "fuzzed.mar"
        file.write_bytes(data)
        with contextlib.suppress(ArchiveError):
            inspect_archive(file)
        with contextlib.suppress(ArchiveError):
            open_archive(file, cache=self._directory / "cache", limits=self._limits).close()
        outside_files = [
            path for path in self._directory.iterdir() if path.name not in ("fuzzed.mar", "cache")
        ]
        assert not outside_files, f"written outside of the cache: {outside_files}"


class Transport(asyncio.Transport):
    """A transport that records what is written."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 8080)})
        self.written: list[bytes] = []
        self.closing = False
        self.reading = True

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))

    def writelines(self, list_of_data: Any) -> None:
        self.written.extend(map(bytes, list_of_data))

    def close(self) -> None:
        self.closing = True

    abort = close

    def is_closing(self) -> bool:
        return self.closing

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass


class Lanes:
    """The bytes of a client on one connection of the fast lane, with uvicorn and FastAPI behind it.

    A byte of 0xff ends a read.
    """

    def __init__(self) -> None:
        directory = Path(tempfile.mkdtemp(prefix="fuzz-"))
        make_model(directory / "echo.mar", ECHO, name="echo")
        base_settings = {
            "model_store": directory,
            "cache_dir": directory / "cache",
            "state_dir": directory / "state",
            "max_request_size": 20_000,
        }
        # With this setting, only the server's own failures have status 500.
        settings = Settings.model_validate(base_settings | {"handler_error_status": 503})
        logging.disable(logging.CRITICAL)
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._note)
        self._raised: list[Any] = []
        self._loop.run_until_complete(self._start(settings))

    async def _start(self, settings: Settings) -> None:
        self._registry = Registry(settings, starter=ThreadStarter())
        await self._registry.register(RegisterOrder(url="echo.mar", initial_workers=1))
        (app,) = build_apps(self._registry, settings, [("inference", "management", "metrics")])
        self._config = Config(app, http=FastLane, lifespan="off", log_config=None, access_log=False)
        self._config.load()
        self._state = ServerState()

    def _note(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._raised.append(context.get("exception") or context["message"])

    def __call__(self, data: bytes) -> None:
        answer = self._loop.run_until_complete(self._talk(data))
        raised, self._raised = self._raised, []
        assert not raised, raised
        assert len(answer) <= MAX_RESPONSE_BYTES + MAX_WRITTEN_PER_BYTE * len(data), (
            f"{len(answer)} bytes written for {len(data)}"
        )
        for line in io.BytesIO(answer):
            if line.startswith(b"HTTP/1.1 "):
                assert not line.startswith(b"HTTP/1.1 500"), answer[:2000]

    async def _talk(self, data: bytes) -> bytes:
        transport = Transport()
        protocol = FastLane(self._config, self._state, {})
        protocol.connection_made(transport)
        pieces = [piece for piece in data.split(b"\xff") if piece]
        idle = write_count = 0
        for _ in range(TURNS):
            if pieces and transport.reading and not transport.closing:
                protocol.data_received(pieces.pop(0))
                idle = 0
            await asyncio.sleep(0 if idle < MAX_IDLE_TURNS // 2 else 0.0002)
            idle = 0 if len(transport.written) != write_count else idle + 1
            write_count = len(transport.written)
            if idle >= MAX_IDLE_TURNS and (transport.closing or not pieces):
                break
        protocol.on_tick()
        protocol.connection_lost(None)
        await asyncio.sleep(0)
        assert not self._state.connections, "a connection is kept after its end"
        return b"".join(transport.written)


TARGETS: dict[str, Callable[[], Target]] = {
    "archive": Archives,
    "form": lambda: form,
    "frame": lambda: frame,
    "lanes": Lanes,
    "traffic": lambda: traffic,
}
