"""A real server for the HTTP tests: uvicorn on free ports, with a registry and workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from tests.support.clients.talker import a_registry
from tests.support.models import make_model
from tsx_runtime.core.models.plan import RegisterOrder
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.telemetry.tracing import Tracer
from tsx_runtime.features.jobs.feature import JobsFeature
from tsx_runtime.features.jobs.service import Jobs
from tsx_runtime.features.ui.feature import UiFeature
from tsx_runtime.features.ui.time_series import TimeSeries
from tsx_runtime.features.workflows.feature import WorkflowsFeature
from tsx_runtime.features.workflows.manager import Workflows
from tsx_runtime.http.build import SEPARATE_LISTENERS, build_apps
from tsx_runtime.http.fast_lane.uvicorn_compat import http_protocol
from tsx_runtime.settings.schema import Settings

GRACE = 5.0  # seconds for requests that run at the end
DEADLINE = 120.0  # seconds, for a busy machine

TALKER = """
import json, os, time
from pathlib import Path


def handle(data, context):
    if data is None:
        return None
    return [act(idx, row, context) for idx, row in enumerate(data)]


def act(idx, row, context):
    headers = context.get_all_request_header(idx)
    action = headers.get("x-do", "")
    if headers.get("describe") == "True":
        return json.dumps({"labels": 10})
    if action == "raise":
        raise RuntimeError("no such image")
    if action == "exit":
        os._exit(7)
    if action == "wait":
        wait_for(headers["x-file"])
        return "waited"
    if action == "stream":
        for part in ("a", "b", ""):
            send_piece(idx, context, part)
        return "c"
    if action == "stream-wait":
        send_piece(idx, context, "a")
        wait_for(headers["x-file"])
        return "b"
    if action == "break":
        send_piece(idx, context, "a")
        os._exit(7)
    if action == "metrics":
        context.metrics.add_counter("Seen", 2)
        context.metrics.add_time("Took", 3.5, unit="ms")
        from ts.metrics.metric_type_enum import MetricTypes

        context.metrics.add_metric("Size", 4, "count", metric_type=MetricTypes.HISTOGRAM)
        context.metrics.add_counter("Requests2XX", 1)
    if action == "bytes":
        return bytes(row["body"])
    if action == "status":
        context.set_response_status(int(headers["x-status"]), "Own words", idx)
        return "body of it"
    if action == "headers":
        context.set_response_content_type(idx, "text/csv")
        context.set_response_header(idx, "X-Own", "1")
        context.set_response_header(idx, "Cache-Control", "max-age=60")
        context.set_response_header(idx, "X-Request-Id", "mine")
        return "a,b"
    shown = {name: shown_value(value) for name, value in row.items()}
    version = context.manifest["model"]["modelVersion"]
    return json.dumps({"row": shown, "headers": dict(headers), "id": context.get_request_id(idx), "version": version})


def wait_for(file):
    deadline = time.monotonic() + 90  # a test that failed must not hold the worker
    while not Path(file).exists() and time.monotonic() < deadline:
        time.sleep(0.002)


def shown_value(value):
    return {"bytes": value.decode("latin-1")} if isinstance(value, (bytes, bytearray)) else value


def send_piece(idx, context, part):
    from ts.handler_utils.utils import send_intermediate_predict_response

    send_intermediate_predict_response([part], {idx: context.get_request_id(idx)}, "Intermediate", 200, context)
"""

BROKEN = """
def handle(data, context):
    import no_such_module_anywhere
"""


@dataclass
class RunningServer:
    """A server in its own thread, with a client for each of its listeners."""

    settings: Settings
    registry: Registry
    loop: asyncio.AbstractEventLoop
    addresses: dict[str, str]
    workflows: Workflows
    series: TimeSeries
    jobs: Jobs | None
    clients: dict[str, httpx.Client] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clients = {
            role: httpx.Client(base_url=address, timeout=DEADLINE)
            for role, address in self.addresses.items()
        }

    @property
    def inference(self) -> httpx.Client:
        return self.clients["inference"]

    @property
    def management(self) -> httpx.Client:
        return self.clients["management"]

    @property
    def metrics(self) -> httpx.Client:
        return self.clients["metrics"]

    def call(self, function: Callable[[], Any]) -> Any:
        """Run a function on the server's event loop, and await its result if it is awaitable."""

        async def call() -> Any:
            result = function()
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(DEADLINE)

    def ask(
        self,
        body: bytes = b"x",
        path: str = "/predictions/talker",
        *,
        lane: str = "fast",
        **headers: str,
    ) -> httpx.Response:
        """Send a request to the fast lane, or as chunks to the ASGI lane."""
        header_fields = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.inference.post(
            path, content=body if lane == "fast" else iter([body]), headers=header_fields
        )

    def write_mar(self, file: str, **content: str) -> Path:
        assert self.settings.model_store is not None
        return make_model(self.settings.model_store / file, **content)

    def register(self, file: str, **options: Any) -> None:
        self.call(lambda: self.registry.register(RegisterOrder(url=file, **options)))


@contextlib.contextmanager
def running_server(
    settings: Settings, listeners: Any = SEPARATE_LISTENERS, tracer: Tracer | None = None
) -> Iterator[RunningServer]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in listeners]
    addresses = {
        role: f"http://127.0.0.1:{sock.getsockname()[1]}"
        for sock, roles in zip(sockets, listeners, strict=True)
        for role in roles
    }
    ready = threading.Event()
    startup: list[Any] = []

    async def main() -> None:
        registry = Registry(settings)
        registry.tracer = tracer
        registry.warm_up()
        # The tasks of features do not run: tests take the samples themselves.
        registry.open()
        workflows = registry.feature(WorkflowsFeature).workflows
        series = registry.feature(UiFeature).series
        jobs = registry.feature(JobsFeature).jobs
        apps = build_apps(registry, settings, listeners)
        servers = [
            uvicorn.Server(
                uvicorn.Config(
                    app,
                    http=http_protocol(),
                    lifespan="off",
                    log_config=None,
                    access_log=False,
                    proxy_headers=False,
                )
            )
            for app in apps
        ]
        startup.extend([registry, asyncio.get_running_loop(), servers, workflows, series, jobs])
        ready.set()
        await asyncio.gather(
            *(server.serve([sock]) for server, sock in zip(servers, sockets, strict=True))
        )
        if jobs is not None:
            await jobs.close()
        await registry.close()

    def run() -> None:
        try:
            asyncio.run(main())
        finally:
            # After a failed start the caller continues; the thread's traceback shows the reason.
            ready.set()

    # A daemon thread that hangs does not keep the process alive.
    thread = threading.Thread(target=run, name="server", daemon=True)
    thread.start()
    assert ready.wait(DEADLINE)
    assert startup
    registry, loop, servers, workflows, series, jobs = startup
    server = RunningServer(settings, registry, loop, addresses, workflows, series, jobs)
    try:
        yield server
    finally:
        for client in server.clients.values():
            client.close()
        for uvicorn_server in servers:
            uvicorn_server.should_exit = True
        thread.join(GRACE)
        # A failed test may have left requests, for which the server waits.
        if thread.is_alive():
            asyncio.run_coroutine_threadsafe(registry.close(), loop)
        thread.join(DEADLINE)
        assert not thread.is_alive()


def make_settings(store: Path, **values: Any) -> Settings:
    """Return settings with their own state directory.

    The state of another server would influence the traffic split.
    """
    state = tempfile.mkdtemp(prefix="state-", dir=store.parent)
    defaults = {
        "model_store": store,
        "cache_dir": store / "cache",
        "state_dir": state,
        "worker_preload": False,
        "max_request_size": 100_000,
    }
    return Settings.model_validate(defaults | values)


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a store with two versions of `talker`, `other`, `broken`, and an invalid file."""
    directory = tmp_path_factory.mktemp("store")
    make_model(directory / "talker.mar", TALKER)
    make_model(directory / "talker2.mar", TALKER, name="talker", version="2.0")
    make_model(
        directory / "other.mar",
        TALKER,
        config="batchSize: 4\nmaxBatchDelay: 50\nresponseTimeout: 9\n",
    )
    make_model(directory / "broken.mar", BROKEN)
    (directory / "junk.mar").write_bytes(b"not an archive")
    return directory


@pytest.fixture(scope="session")
def server(processes: None, store: Path) -> Iterator[RunningServer]:
    """Run `talker` 1.0 (one worker) and 2.0 (none) for tests that do not change the server."""
    with running_server(make_settings(store)) as running:
        running.register("talker.mar", initial_workers=1)
        running.register("talker2.mar", initial_workers=0)
        yield running


@pytest.fixture
def empty(store: Path, own_server: RunningServer) -> Iterator[RunningServer]:
    """Yield a server without models, and remove the test's models afterwards."""
    yield own_server

    async def unregister_all() -> None:
        for model in list(own_server.registry.models.values()):
            for version in sorted(model.versions, key=lambda version: version == model.default):
                # Requests left by a test would wait for minutes; closing the version ends them.
                await model.versions[version].close()
                await own_server.registry.unregister(model.name, version)

    own_server.call(unregister_all)


@pytest.fixture(scope="session")
def own_server(processes: None, store: Path) -> Iterator[RunningServer]:
    with running_server(make_settings(store)) as running:
        yield running


@pytest.fixture(scope="session")
def start_server(
    processes: None, store: Path
) -> Callable[..., contextlib.AbstractContextManager[RunningServer]]:
    """Return a function that starts servers with settings, such as `inference_token="x"`."""

    def start(
        listeners: Any = SEPARATE_LISTENERS, **values: Any
    ) -> contextlib.AbstractContextManager[RunningServer]:
        return running_server(make_settings(store, **values), listeners)

    return start


@pytest.fixture(scope="session")
def error_of() -> Callable[[httpx.Response], tuple[str, str]]:
    """Return a function that reads type and message of an error response."""

    def parse(response: httpx.Response) -> tuple[str, str]:
        assert response.headers["content-type"] == "application/json"
        body = response.json()
        path = response.url.path
        v2 = (
            {"error": body["message"]}
            if path.startswith("/v2/")
            else {"error": body["error"]}
            if path.startswith("/v1/models/")
            else {}
        )
        assert list(body) == ["code", "type", "message", *v2]
        assert body == body | v2
        assert body["code"] == response.status_code
        assert response.text == json.dumps(body, indent=2, ensure_ascii=False) + "\n"
        assert response.headers["x-request-id"]
        assert response.headers["pragma"] == "no-cache"
        return body["type"], body["message"]

    return parse


@pytest.fixture
async def registry(processes: None) -> AsyncIterator[Registry]:
    """Provide a registry that runs in the test's own process."""
    async with a_registry() as registry:
        yield registry
