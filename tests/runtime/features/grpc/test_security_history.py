"""The vulnerabilities of TorchServe's history, tested over gRPC.

The numbers are those of `tests/runtime/http/test_security_history.py`. Other files test the rest:
open addresses, the disabled management API, and the access log without tokens
(`test_server.py`), messages that are too large (`test_inference.py`), headers of handlers
(`test_statuses.py`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from tests.runtime.features.grpc.conftest import TIMEOUT, failure_of
from tests.support.clients.hostile_http2 import (
    END_HEADERS,
    HEADERS,
    HostileConnection,
    call_headers,
    frame,
)
from tests.support.models import make_model
from tsx_runtime.api.access.tokens import BearerToken, Keys
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.features.grpc.inference import SERVICE_NAME as INFERENCE
from tsx_runtime.features.grpc.management import SERVICE_NAME as MANAGEMENT
from tsx_runtime.features.grpc.server import GrpcServer
from tsx_runtime.grpc.protos import inference_pb2, management_pb2
from tsx_runtime.metrics.response_counts import ResponseCounts
from tsx_runtime.settings.schema import Settings

METADATA = "http://169.254.169.254/latest/meta-data/x.mar"
HANDLER = "def handle(data, context):\n    return ['x' for _ in data or ()]\n"
LIFETIME = 3600.0
OK, NOT_FOUND = grpc.StatusCode.OK, grpc.StatusCode.NOT_FOUND
INVALID, DENIED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.PERMISSION_DENIED


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Server(NamedTuple):
    port: int
    store: Path
    keys: Keys
    clock: Clock
    channel: grpc.Channel

    @property
    def tokens(self) -> list[str]:
        """Return the tokens for predictions and for management."""
        tokens = (self.keys.inference, self.keys.management)
        return [token.token for token in tokens if token is not None]

    def manage(
        self, method: str, *, token: str | None = None, **fields: Any
    ) -> tuple[grpc.StatusCode, str]:
        """Make a call of the management service, with its own token unless `token` is given."""
        header = f"Bearer {self.tokens[1]}" if token is None else token
        request = getattr(management_pb2, f"{method}Request")(**fields)
        metadata = (("authorization", header),) if header else ()
        return self._end(
            f"/{MANAGEMENT}/{method}", request, management_pb2.ManagementResponse, metadata
        )

    def register(self, url: str, **fields: Any) -> grpc.StatusCode:
        return self.manage("RegisterModel", url=url, **fields)[0]

    def predict(self, *metadata: tuple[str, str]) -> tuple[grpc.StatusCode, str]:
        request = inference_pb2.PredictionsRequest(model_name="nobody")
        return self._end(
            f"/{INFERENCE}/Predictions", request, inference_pb2.PredictionResponse, metadata
        )

    def _end(
        self, path: str, request: Any, response: Any, metadata: Any
    ) -> tuple[grpc.StatusCode, str]:
        call = self.channel.unary_unary(path, request.SerializeToString, response.FromString)
        try:
            return OK, str(call(request, metadata=metadata, timeout=TIMEOUT))
        except grpc.RpcError as error:
            return error.code(), error.details()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run both services on one port in this process.

    Every http URL is allowed, and tokens expire by a clock that the test controls.
    """
    store, clock = tmp_path_factory.mktemp("security"), Clock()
    settings = Settings(
        model_store=store, cache_dir=store / "cache", worker_preload=False, allowed_urls=["http.*"]
    )
    keys = Keys(BearerToken.generated(LIFETIME, clock), BearerToken.generated(LIFETIME, clock))
    is_ready = threading.Event()
    server_parts: list[Any] = []

    async def main() -> None:
        registry, stop = Registry(settings), asyncio.Event()
        grpc_server = GrpcServer(
            registry,
            settings,
            keys,
            ["grpc_inference", "grpc_management"],
            "127.0.0.1:0",
            None,
            ResponseCounts(),
        )
        await grpc_server.start()
        server_parts.extend([grpc_server.port, asyncio.get_running_loop(), stop])
        is_ready.set()
        await stop.wait()
        await grpc_server.stop(0)
        await registry.close()

    thread = threading.Thread(target=lambda: asyncio.run(main()), name="server")
    thread.start()
    assert is_ready.wait(TIMEOUT)
    port, loop, stop = server_parts
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Server(port, store, keys, clock, channel)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(TIMEOUT)
        assert not thread.is_alive()


def test_1_cloud_metadata_services_are_refused_even_if_every_url_is_allowed(server: Server) -> None:
    code, text = server.manage("RegisterModel", url=METADATA)
    assert code is NOT_FOUND
    assert "not a public one" in text


@pytest.mark.parametrize(
    "url",
    ["../x.mar", "%2e%2e/x.mar", "a\\..\\x.mar", "/etc/x.mar", "file:///etc/x.mar", "....//x.mar"],
)
def test_2_no_spelling_of_a_path_leaves_the_store(server: Server, url: str) -> None:
    assert server.register(url) is NOT_FOUND


def test_3_and_4_urls_that_resemble_allowed_ones_are_refused(server: Server) -> None:
    for url in (
        "gopher://good.com/x.mar",
        "https://good.com@evil.com/x.mar",
        "https://good.com/a/../x.mar",
    ):
        assert server.register(url) in (NOT_FOUND, INVALID)


def test_7_yaml_creates_no_objects(server: Server, tmp_path: Path) -> None:
    marker_file = tmp_path / "sprung"
    config = f"!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path ['{marker_file}']]\n"
    make_model(server.store / "trap.mar", HANDLER, config=config)
    assert server.register("trap.mar") in (OK, INVALID)
    assert not marker_file.exists()


def test_10_every_call_needs_a_bearer_token(server: Server) -> None:
    token = server.tokens[0]
    for header in (f"Bearer {token}", f"bearer {token}", f"Bearer  {token}"):
        code, text = server.predict(("authorization", header))
        assert code is grpc.StatusCode.INTERNAL
        assert text.startswith("Model not found: nobody\n")
    wrong_headers = (
        token,
        "Bearer",
        "Bearer ",
        f"Basic {token}",
        f"Bearer {token}x",
        f"Bearer {token[:-1]}",
    )
    for metadata in ((), *((("authorization", header),) for header in wrong_headers)):
        code, text = server.predict(*metadata)
        assert code is DENIED
        assert token not in text
    methods = "DescribeModel ListModels RegisterModel ScaleWorker SetDefault UnregisterModel"
    for method in methods.split():
        for header in (f"Bearer {token}", ""):
            assert server.manage(method, token=header)[0] is DENIED


def test_10_reflection_needs_a_token_but_health_does_not(server: Server) -> None:
    requests = [ServerReflectionRequest(list_services="")]
    method = ServerReflectionStub(server.channel).ServerReflectionInfo
    assert failure_of(lambda: list(method(iter(requests), timeout=TIMEOUT))).code() is DENIED
    metadata = (("authorization", f"Bearer {server.tokens[0]}"),)
    (answer,) = method(iter(requests), timeout=TIMEOUT, metadata=metadata)
    assert INFERENCE in [service.name for service in answer.list_services_response.service]
    assert HealthStub(server.channel).Check(HealthCheckRequest(), timeout=TIMEOUT).status


def test_10_a_client_without_a_token_is_refused_before_its_message(server: Server) -> None:
    with HostileConnection(f"127.0.0.1:{server.port}") as connection:
        path = f"/{INFERENCE}/Predictions".encode()
        connection.send(frame(HEADERS, END_HEADERS, 1, call_headers(path)))
        connection.wait_end(1)
        assert connection.status(1) == grpc.StatusCode.PERMISSION_DENIED.value[0]


def test_10_expired_and_replaced_tokens_are_refused(server: Server) -> None:
    old_header = f"Bearer {server.tokens[1]}"
    assert server.manage("ListModels", token=old_header)[0] is OK
    server.keys.renew("management")
    assert server.manage("ListModels", token=old_header)[0] is DENIED
    assert server.manage("ListModels")[0] is OK
    server.clock.now += LIFETIME
    assert server.manage("ListModels")[0] is DENIED
    for kind in ("management", "inference"):
        server.keys.renew(kind)
    assert server.manage("ListModels")[0] is OK


@pytest.mark.parametrize("name", ["../../x", "a/b", "a b", "$(id)", ";id", "-x", "a\nb", " ", "."])
@pytest.mark.parametrize("field", ["modelName", "modelVersion"])
def test_13_a_manifest_cannot_name_a_path_or_command(server: Server, field: str, name: str) -> None:
    names = {"name": name} if field == "modelName" else {"name": "named", "version": name}
    make_model(server.store / "named.mar", HANDLER, **names)
    assert server.register("named.mar") is INVALID


@pytest.mark.parametrize("name", ["../../x", "a/b", "$(id)", "a\nb"])
def test_13_a_call_cannot_name_a_path_or_command(server: Server, name: str) -> None:
    make_model(server.store / "called.mar", HANDLER)
    assert server.register("called.mar", model_name=name) is INVALID


def test_14_oversized_metadata_is_refused_and_others_are_served(server: Server) -> None:
    assert server.predict(("x-large", "a" * 300_000))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert server.manage("ListModels")[0] is OK


def test_19_unregistering_removes_only_downloaded_files(server: Server) -> None:
    make_model(server.store / "kept.mar", HANDLER)
    assert server.register("kept.mar") is OK
    assert server.manage("UnregisterModel", model_name="kept")[0] is OK
    assert (server.store / "kept.mar").exists()


@pytest.mark.parametrize("field", ["url", "model_name"])
def test_20_no_name_forges_a_log_line(
    server: Server, caplog: pytest.LogCaptureFixture, field: str
) -> None:
    make_model(server.store / "logged.mar", HANDLER)
    line = "\n2026-01-01 ERROR forged"
    with caplog.at_level(logging.INFO):
        code = server.register(**({"url": "logged.mar"} | {field: f"x{line}"}))
    assert code in (NOT_FOUND, INVALID)
    assert not [record for record in caplog.records if line in record.getMessage()]
