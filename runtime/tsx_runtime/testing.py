"""A server for tests of handlers, with its front end in a thread and workers as real processes.

Examples:
    >>> with serve("digits.mar") as server:
    ...     response = server.client.post("/predictions/digits", content=image)
    >>> response.status_code
    200
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
from tsx_archiver.storage.private_directory import temporary_directory
from tsx_runtime.server.server import RunningServer, ServeOptions, serve_async
from tsx_runtime.server.startup import start_model
from tsx_runtime.server.stopping import StopEvents
from tsx_runtime.settings.schema import Settings
from tsx_runtime.settings.sources import load_settings

if TYPE_CHECKING:
    import httpx

Servable: TypeAlias = "str | os.PathLike[str] | ArchiveSpec"
FREE_PORT = "http://127.0.0.1:0"


@dataclass(frozen=True)
class ServerUnderTest:
    """A running server.

    Attributes:
        settings: The settings of the server.
        addresses: The URLs by role: inference, management, metrics; with gRPC enabled, also its
            own.
    """

    settings: Settings
    addresses: dict[str, str]
    _clients: list[httpx.Client] = field(default_factory=list)

    @property
    def url(self) -> str:
        """The URL of the inference API."""
        return self.addresses["inference"]

    @property
    def headers(self) -> dict[str, str]:
        """The header with the inference token; empty without a token."""
        token = self.settings.inference_token
        return {} if token is None else {"Authorization": f"Bearer {token}"}

    @cached_property
    def client(self) -> httpx.Client:
        """An HTTP client for `url` with `headers` and no timeout; it is closed with the server."""
        import httpx  # only tests need it, not the server

        client = httpx.Client(
            base_url=self.url, headers=self.headers, timeout=None, trust_env=False
        )
        self._clients.append(client)
        return client


@contextmanager
def serve(*models: Servable, **settings: Any) -> Iterator[ServerUnderTest]:
    """Serve models during the `with` block.

    The server uses free ports and a temporary state directory. It ignores the environment and
    tsx.toml. gRPC is off unless `enable_grpc=True`. At the end of the block, requests that still
    run are refused.

    Args:
        *models: Archives, unpacked archives, or `ArchiveSpec`s, which are packed first.
        **settings: Settings of docs/reference/settings.md, such as `inference_token="secret"`.

    Raises:
        ArchiveError: A model is not a valid archive.
        LoadFailed: A worker cannot load its model.
        SettingError: A setting has a wrong name or value.
    """
    with TemporaryDirectory(prefix="tsx-testing-", dir=temporary_directory()) as directory:
        defaults: dict[str, object] = {
            f"{role}_address": FREE_PORT for role in ("inference", "management", "metrics")
        }
        defaults |= {
            "enable_grpc": False,
            "grpc_inference_port": 0,
            "grpc_management_port": 0,
            "state_dir": Path(directory, "state"),
        }
        server_settings, _ = load_settings(defaults | settings, {})
        start_models = [start_model(_archive(model, Path(directory, "models"))) for model in models]
        stop_events, ready = StopEvents(), Future[RunningServer]()
        with start_blocking_portal("asyncio", {"use_uvloop": sys.platform != "win32"}) as portal:
            server_task = portal.start_task_soon(
                serve_async,
                server_settings,
                start_models,
                ready.set_result,
                ServeOptions(stop_events=stop_events),
                (),
            )
            try:
                wait(cast("list[Future[Any]]", [ready, server_task]), return_when=FIRST_COMPLETED)
                if not ready.done():
                    server_task.result()
                server = ServerUnderTest(server_settings, ready.result().addresses)
                try:
                    yield server
                finally:
                    for client in server._clients:
                        client.close()
            finally:  # An interrupted start ends here too.
                for event in (stop_events.stop_now, stop_events.stop_requested):
                    portal.call(event.set)
                wait([server_task])
            server_task.result()  # raises the error of a server that failed after its start


def _archive(model: Servable, directory: Path) -> Path:
    return write_archive(model, directory) if isinstance(model, ArchiveSpec) else Path(model)
