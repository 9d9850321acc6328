"""What TorchServe's security history teaches, by gRPC: each row of
`tests/runtime/http/test_security_history.py` that a call can try.

Elsewhere: addresses that are nobody else's, the management API that is off, tokens of the wrong
kind, the access log without tokens (`test_server.py`), messages that are too large, packed or not
(`test_inference.py`), headers of handlers (`test_statuses.py`). What loads a model, its pickles
included, is the same for both; no path and no Referer of a call could be taken for `/token`.
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

from tests.runtime.grpc.conftest import TIMEOUT
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
from tsx_runtime.grpc.inference import NAME as INFERENCE
from tsx_runtime.grpc.management import NAME as MANAGEMENT
from tsx_runtime.grpc.protos import inference_pb2, management_pb2
from tsx_runtime.grpc.server import GrpcServer
from tsx_runtime.metrics.response_counts import ResponseCounts
from tsx_runtime.settings.schema import Settings

METADATA = "http://169.254.169.254/latest/meta-data/x.mar"
HANDLER = "def handle(data, context):\n    return ['x' for _ in data or ()]\n"
LIFETIME = 3600.0


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

    def manage(
        self, method: str, *, token: str | None = None, **fields: Any
    ) -> tuple[grpc.StatusCode, str]:
        """How a call of the management service ends; with its own token unless another is named."""
        assert self.keys.management is not None
        sent = f"Bearer {self.keys.management.token}" if token is None else token
        request = getattr(management_pb2, f"{method}Request")(**fields)
        return self._end(
            f"/{MANAGEMENT}/{method}",
            request,
            management_pb2.ManagementResponse,
            (("authorization", sent),) if sent else (),
        )

    def predict(self, *metadata: tuple[str, str]) -> tuple[grpc.StatusCode, str]:
        request = inference_pb2.PredictionsRequest(model_name="nobody")
        return self._end(
            f"/{INFERENCE}/Predictions", request, inference_pb2.PredictionResponse, metadata
        )

    def _end(
        self, path: str, request: Any, response: Any, metadata: Any
    ) -> tuple[grpc.StatusCode, str]:
        call = self.channel.unary_unary(
            path, request.SerializeToString, lambda data: response.FromString(data)
        )
        try:
            return grpc.StatusCode.OK, str(call(request, metadata=metadata, timeout=TIMEOUT))
        except grpc.RpcError as error:
            return error.code(), error.details()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Both services on one port, in this process: every http URL is allowed, tokens end by a clock
    that the test turns.
    """
    store, clock = tmp_path_factory.mktemp("security"), Clock()
    settings = Settings(
        model_store=store, cache_dir=store / "cache", worker_preload=False, allowed_urls=["http.*"]
    )
    keys = Keys(BearerToken.made_up(LIFETIME, clock), BearerToken.made_up(LIFETIME, clock))
    ready = threading.Event()
    made: list[Any] = []

    async def main() -> None:
        registry, stop = Registry(settings), asyncio.Event()
        served = GrpcServer(
            registry,
            settings,
            keys,
            ["grpc_inference", "grpc_management"],
            "127.0.0.1:0",
            None,
            ResponseCounts(),
        )
        await served.start()
        made.extend([served.port, asyncio.get_running_loop(), stop])
        ready.set()
        await stop.wait()
        await served.stop(0)
        await registry.close()

    thread = threading.Thread(target=lambda: asyncio.run(main()), name="server")
    thread.start()
    assert ready.wait(TIMEOUT)
    port, loop, stop = made
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Server(port, store, keys, clock, channel)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(TIMEOUT)
        assert not thread.is_alive()


def test_1_the_clouds_own_services_cannot_be_asked_even_where_every_url_is_allowed(
    server: Server,
) -> None:
    code, text = server.manage("RegisterModel", url=METADATA)
    assert code is grpc.StatusCode.NOT_FOUND
    assert "not a public one" in text


@pytest.mark.parametrize(
    "url",
    ["../x.mar", "%2e%2e/x.mar", "a\\..\\x.mar", "/etc/x.mar", "file:///etc/x.mar", "....//x.mar"],
)
def test_2_no_way_to_write_a_path_leaves_the_store(server: Server, url: str) -> None:
    assert server.manage("RegisterModel", url=url)[0] is grpc.StatusCode.NOT_FOUND


def test_3_and_4_a_url_that_only_looks_allowed_is_not(server: Server) -> None:
    for url in (
        "gopher://good.com/x.mar",
        "https://good.com@evil.com/x.mar",
        "https://good.com/a/../x.mar",
    ):
        assert server.manage("RegisterModel", url=url)[0] in (
            grpc.StatusCode.NOT_FOUND,
            grpc.StatusCode.INVALID_ARGUMENT,
        )


def test_7_yaml_makes_no_objects(server: Server, tmp_path: Path) -> None:
    trap = tmp_path / "sprung"
    config = f"!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path ['{trap}']]\n"
    make_model(server.store / "trap.mar", HANDLER, config=config)
    assert server.manage("RegisterModel", url="trap.mar")[0] in (
        grpc.StatusCode.OK,
        grpc.StatusCode.INVALID_ARGUMENT,
    )
    assert not trap.exists()


def test_10_a_token_is_asked_for_by_every_call_however_it_is_written(server: Server) -> None:
    assert server.keys.inference is not None
    right = server.keys.inference.token
    answered = grpc.StatusCode.INTERNAL, "Model not found: nobody"
    for sent in (f"Bearer {right}", f"bearer {right}", f"Bearer  {right}"):
        code, text = server.predict(("authorization", sent))
        assert (code, text.splitlines()[0]) == answered
    for sent in (
        "",
        right,
        "Bearer",
        "Bearer ",
        f"Basic {right}",
        f"Bearer {right}x",
        f"Bearer {right[:-1]}",
    ):
        code, text = server.predict(*((("authorization", sent),) if sent else ()))
        assert code is grpc.StatusCode.PERMISSION_DENIED
        assert right not in text
    for method in (
        "DescribeModel",
        "ListModels",
        "RegisterModel",
        "ScaleWorker",
        "SetDefault",
        "UnregisterModel",
    ):
        assert (
            server.manage(method, token=f"Bearer {right}")[0] is grpc.StatusCode.PERMISSION_DENIED
        )
        assert server.manage(method, token="")[0] is grpc.StatusCode.PERMISSION_DENIED


def test_10_reflection_asks_for_a_token_and_health_does_not(server: Server) -> None:
    assert server.keys.inference is not None
    asked = [ServerReflectionRequest(list_services="")]
    method = ServerReflectionStub(server.channel).ServerReflectionInfo
    with pytest.raises(grpc.RpcError) as caught:
        list(method(iter(asked), timeout=TIMEOUT))
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    (answer,) = method(
        iter(asked),
        timeout=TIMEOUT,
        metadata=(("authorization", f"Bearer {server.keys.inference.token}"),),
    )
    assert INFERENCE in [service.name for service in answer.list_services_response.service]
    assert HealthStub(server.channel).Check(HealthCheckRequest(), timeout=TIMEOUT).status


def test_10_who_has_no_token_is_refused_before_the_message(server: Server) -> None:
    with HostileConnection(f"127.0.0.1:{server.port}") as connection:
        path = f"/{INFERENCE}/Predictions".encode()
        connection.send(frame(HEADERS, END_HEADERS, 1, call_headers(path)))
        connection.wait_end(1)
        assert connection.status(1) == grpc.StatusCode.PERMISSION_DENIED.value[0]


def test_10_a_token_that_has_ended_or_was_replaced_is_wrong(server: Server) -> None:
    assert server.keys.management is not None
    old = f"Bearer {server.keys.management.token}"
    assert server.manage("ListModels", token=old)[0] is grpc.StatusCode.OK
    server.keys.renew("management")
    assert server.manage("ListModels", token=old)[0] is grpc.StatusCode.PERMISSION_DENIED
    assert server.manage("ListModels")[0] is grpc.StatusCode.OK
    server.clock.now += LIFETIME
    assert server.manage("ListModels")[0] is grpc.StatusCode.PERMISSION_DENIED
    for kind in ("management", "inference"):
        server.keys.renew(kind)
    assert server.manage("ListModels")[0] is grpc.StatusCode.OK


@pytest.mark.parametrize("name", ["../../x", "a/b", "a b", "$(id)", ";id", "-x", "a\nb", " ", "."])
@pytest.mark.parametrize("field", ["modelName", "modelVersion"])
def test_13_a_manifest_names_no_path_and_no_command(server: Server, field: str, name: str) -> None:
    what = {"name": name} if field == "modelName" else {"name": "named", "version": name}
    make_model(server.store / "named.mar", HANDLER, **what)
    assert server.manage("RegisterModel", url="named.mar")[0] is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("name", ["../../x", "a/b", "$(id)", "a\nb"])
def test_13_nor_does_a_call(server: Server, name: str) -> None:
    make_model(server.store / "called.mar", HANDLER)
    assert (
        server.manage("RegisterModel", url="called.mar", model_name=name)[0]
        is grpc.StatusCode.INVALID_ARGUMENT
    )


def test_14_metadata_over_the_limit_are_refused_and_others_are_served_on(server: Server) -> None:
    assert server.predict(("x-large", "a" * 300_000))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert server.manage("ListModels")[0] is grpc.StatusCode.OK


def test_19_unregistering_removes_no_file_that_was_not_downloaded(server: Server) -> None:
    make_model(server.store / "kept.mar", HANDLER)
    assert server.manage("RegisterModel", url="kept.mar")[0] is grpc.StatusCode.OK
    assert server.manage("UnregisterModel", model_name="kept")[0] is grpc.StatusCode.OK
    assert (server.store / "kept.mar").exists()


@pytest.mark.parametrize("field", ["url", "model_name"])
def test_20_no_name_makes_a_line_of_its_own_in_the_log(
    server: Server, caplog: pytest.LogCaptureFixture, field: str
) -> None:
    make_model(server.store / "logged.mar", HANDLER)
    with caplog.at_level(logging.INFO):
        code, _ = server.manage(
            "RegisterModel", **({"url": "logged.mar"} | {field: "x\n2026-01-01 ERROR forged"})
        )
    assert code in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT)
    assert not [
        record for record in caplog.records if "\n2026-01-01 ERROR forged" in record.getMessage()
    ]
