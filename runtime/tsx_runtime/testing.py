"""A server for tests of handlers: the front end in a thread of this process, the workers as real
processes.

from tsx_runtime.testing import serve

def test_it_finds_a_city():
    with serve("city.mar") as server:
        assert server.client.post("/predictions/city", content=b"Rome").json()["position"] == [41.9,
        12.5]
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from anyio.from_thread import start_blocking_portal

from tsx_archiver import ArchiveSpec, write_archive
from tsx_archiver.storage.private_directory import temporary_place
from tsx_runtime.settings.schema import Settings
from tsx_runtime.settings.sources import load_settings
from tsx_runtime.targets.server.server import RunningServer, ServeOptions, StopEvents, serve_async
from tsx_runtime.targets.server.startup import start_model

if TYPE_CHECKING:
    import httpx

Servable: TypeAlias = "str | os.PathLike[str] | ArchiveSpec"
FREE_PORT = "http://127.0.0.1:0"


@dataclass(frozen=True)
class ServerUnderTest:
    """A server that answers.

    `addresses` are by role: inference, management, metrics, and those of gRPC where it is enabled.
    """

    settings: Settings
    addresses: dict[str, str]
    _clients: list[httpx.Client] = field(default_factory=list)

    @property
    def url(self) -> str:
        """Of the inference API."""
        return self.addresses["inference"]

    @property
    def headers(self) -> dict[str, str]:
        """The inference token, where the settings have one."""
        token = self.settings.inference_token
        return {} if token is None else {"Authorization": f"Bearer {token}"}

    @cached_property
    def client(self) -> httpx.Client:
        """For `url`, with `headers` and without a timeout. Closed with the server."""
        import httpx  # here, because no server needs it

        client = httpx.Client(
            base_url=self.url, headers=self.headers, timeout=None, trust_env=False
        )
        self._clients.append(client)
        return client


@contextmanager
def serve(*models: Servable, **settings: Any) -> Iterator[ServerUnderTest]:
    """Serve archives, unpacked archives, or what `ArchiveSpec`s describe, while the context lasts.

    `settings` are those of docs/reference/settings.md, such as `inference_token="secret"`; the
    environment and tsx.toml are not read. Ports are free ones, the state is in a temporary
    directory, and gRPC is off unless `enable_grpc=True`. At the end, requests that still run are
    refused. Raises what `tsx serve` reports: ArchiveError, LoadFailed, SettingError; of a server
    that fails later, its error at the end.
    """
    with TemporaryDirectory(prefix="tsx-testing-", dir=temporary_place()) as own:
        usual: dict[str, object] = {
            f"{role}_address": FREE_PORT for role in ("inference", "management", "metrics")
        }
        usual |= {
            "enable_grpc": False,
            "grpc_inference_port": 0,
            "grpc_management_port": 0,
            "state_dir": Path(own, "state"),
        }
        loaded, _ = load_settings(usual | settings, {})
        starts = [start_model(_archive(model, Path(own, "models"))) for model in models]
        stopping, ready = StopEvents(), Future[RunningServer]()
        with start_blocking_portal("asyncio", {"use_uvloop": sys.platform != "win32"}) as portal:
            ended = portal.start_task_soon(
                serve_async, loaded, starts, ready.set_result, ServeOptions(stopping=stopping), ()
            )
            try:
                wait(cast("list[Future[Any]]", [ready, ended]), return_when=FIRST_COMPLETED)
                if not ready.done():
                    ended.result()
                server = ServerUnderTest(loaded, ready.result().addresses)
                try:
                    yield server
                finally:
                    for client in server._clients:
                        client.close()
            finally:  # of a start as well that is interrupted
                for event in (stopping.hurry, stopping.asked):
                    portal.call(event.set)
                wait([ended])
            ended.result()  # of a server that failed later


def _archive(model: Servable, directory: Path) -> Path:
    return write_archive(model, directory) if isinstance(model, ArchiveSpec) else Path(model)
