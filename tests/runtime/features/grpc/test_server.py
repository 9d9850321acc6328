"""The gRPC servers: tokens, TLS, connection ages, ports, shutdown, and a server without gRPC."""

from __future__ import annotations

import json
import logging
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from tests.runtime.features.grpc.conftest import TIMEOUT, Client, a_server, connected, failure_of
from tests.support.certificates import Pair, make_certificate
from tests.support.servers import FREE_PORTS, Running, started
from tsx_runtime.api.access.auth import check_required_tokens
from tsx_runtime.errors import SettingError
from tsx_runtime.features.grpc.feature import grpc_addresses
from tsx_runtime.features.grpc.server import build_channel_options
from tsx_runtime.http.tls import read_pem
from tsx_runtime.server.listeners import check_free
from tsx_runtime.settings.schema import Settings
from tsx_runtime.settings.sources import load_settings


@pytest.fixture(scope="module")
def guarded(
    processes: None, store: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Running, Pair]]:
    """Run a server with TLS and tokens; its management connections live for one second."""
    directory = tmp_path_factory.mktemp("guarded")
    pair = make_certificate(directory)
    with a_server(
        directory,
        store / "talker.mar",
        "--model-store",
        store,
        enable_grpc_ssl="true",
        certificate_file=pair.certificate,
        private_key_file=pair.key,
        inference_token="for-predictions",
        management_token="for-models",
        access_log="true",
        enable_model_api="false",
        grpc_management_max_connection_age_ms=1000,
        grpc_management_max_connection_age_grace_ms=1000,
    ) as server_process:
        yield server_process, pair


@pytest.fixture(scope="module")
def client(guarded: tuple[Running, Pair], generated: dict[str, Any]) -> Iterator[Client]:
    server_process, pair = guarded
    credentials = grpc.ssl_channel_credentials(pair.certificate.read_bytes())

    def make(target: str) -> grpc.Channel:
        return grpc.secure_channel(target.replace("127.0.0.1", "localhost"), credentials)

    with connected(server_process, generated, make) as client:
        yield client


def code_of(call: Any) -> grpc.StatusCode:
    """Make a call without a token, which must fail, and return its code."""
    error = failure_of(call)
    assert "for-" not in error.details()
    code: grpc.StatusCode = error.code()
    return code


def test_the_model_api_setting_also_applies_to_grpc(client: Client) -> None:
    metadata = (("authorization", "Bearer for-models"),)
    for method, fields in (
        ("RegisterModel", {"url": "talker2.mar"}),
        ("UnregisterModel", {"model_name": "talker"}),
    ):
        error = failure_of(lambda: client.manage(method, metadata, **fields))  # noqa: B023  # called at once
        assert (error.code(), error.details()) == (
            grpc.StatusCode.PERMISSION_DENIED,
            "Model API disabled\norg.pytorch.serve.archive.model.ModelException",
        )


def test_the_access_log_has_each_call_with_its_grpc_status(
    guarded: tuple[Running, Pair], client: Client, until: Any
) -> None:
    client.ask(metadata=(("authorization", "Bearer for-predictions"),))
    code_of(client.ask)

    def read_lines() -> set[tuple[int, str, bool]]:
        lines = [
            json.loads(line)
            for line in guarded[0].log.splitlines()
            if '"ACCESS_LOG"' in line and line.endswith("}")
        ]
        call = "gRPC org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions HTTP/2.0"
        return {
            (line["status"], line.get("model"), "request_id" in line)
            for line in lines
            if line["message"] == call
        }

    ok_code, denied_code = (
        code.value[0] for code in (grpc.StatusCode.OK, grpc.StatusCode.PERMISSION_DENIED)
    )
    # The second call is refused before its message is read; only the message names the model.
    until(lambda: read_lines() >= {(ok_code, "talker", True), (denied_code, None, False)})
    assert "for-predictions" not in guarded[0].log


def test_a_client_without_tls_is_not_answered(
    guarded: tuple[Running, Pair], generated: dict[str, Any]
) -> None:
    with grpc.insecure_channel(guarded[0].address("gRPC predictions")) as channel:
        stub = generated["inference_pb2_grpc"].InferenceAPIsServiceStub(channel)
        request = generated["inference_pb2"].PredictionsRequest(model_name="talker")
        assert (
            code_of(lambda: stub.Predictions(request, timeout=TIMEOUT))
            is grpc.StatusCode.UNAVAILABLE
        )


def test_a_stop_answers_running_calls_and_notifies_watchers(
    store: Path, tmp_path: Path, generated: dict[str, Any], free_ports: Any, until: Any
) -> None:
    (port,) = free_ports(1)
    ports = ("--set", "enable_grpc=true", "--grpc-port", port, "--grpc-management-port", port)
    with (
        a_server(tmp_path, store / "talker.mar", ports=ports) as server_process,
        connected(server_process, generated) as client,
    ):
        addresses = {server_process.address(f"gRPC {name}") for name in ("predictions", "models")}
        assert addresses == {f"127.0.0.1:{port}"}
        assert client.ask()[0]
        assert "talker" in client.manage("ListModels")
        with pytest.raises(SettingError, match=f"Port {port} on 127.0.0.1 is in use"):
            check_free(
                grpc_addresses(Settings(grpc_inference_port=port, grpc_management_port=port))
            )

        begun_file, file = tmp_path / "begun", tmp_path / "go"
        answer = client.start(do=b"wait", begun=str(begun_file).encode(), file=str(file).encode())
        until(begun_file.exists)
        watch = HealthStub(client.inference_channel).Watch(HealthCheckRequest(), timeout=TIMEOUT)
        assert next(watch).status == HealthCheckResponse.SERVING
        server_process.process.send_signal(signal.SIGTERM)
        assert next(watch).status == HealthCheckResponse.NOT_SERVING
        file.touch()
        assert answer.result(TIMEOUT).prediction == b"waited"
        assert list(watch) == []
        assert server_process.process.wait(TIMEOUT) == 0


@pytest.mark.usefixtures("processes")
def test_without_the_grpc_extra_rest_is_served_with_a_hint(store: Path, tmp_path: Path) -> None:
    without_grpc = "import sys; sys.modules['grpc'] = None; from tsx_cli.main import main; sys.exit(main(sys.argv[1:]))"
    environment = {"TSX_CACHE_DIR": str(tmp_path / "cache"), "TSX_ENABLE_GRPC": "true"}
    command = [sys.executable, "-c", without_grpc, "serve", str(store / "talker.mar"), *FREE_PORTS]
    with started(command, tmp_path, environment) as server_process:
        assert not any("gRPC" in line for line in server_process.lines)
        assert (
            len(
                re.findall(
                    r"gRPC is not served.*pip install 'tsx-serve\[grpc\]'", server_process.log
                )
            )
            == 1
        )


@pytest.mark.parametrize("absent_package", ["grpc_health", "grpc", "google", "grpc_reflection"])
def test_a_missing_grpc_package_is_a_warning_if_grpc_was_configured(
    absent_package: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, absent_package, None)
    for name in [name for name in sys.modules if name.startswith(f"{absent_package}.")]:
        monkeypatch.delitem(sys.modules, name)
    with caplog.at_level(logging.INFO):
        assert grpc_addresses(Settings()) == []
        assert grpc_addresses(Settings(grpc_inference_port=7070)) == []
        assert grpc_addresses(Settings(enable_grpc=False)) == []
    assert [record.levelno for record in caplog.records] == [logging.INFO, logging.WARNING]
    missing_module = "google.protobuf" if absent_package == "google" else absent_package
    assert (
        f"{missing_module} is not installed. Install it: pip install 'tsx-serve[grpc]'"
        in caplog.text
    )


def test_an_open_grpc_address_needs_a_token() -> None:
    with pytest.raises(SettingError, match=r"grpc_management_address is 0\.0\.0\.0, .*_token"):
        check_required_tokens(Settings(grpc_management_address="0.0.0.0"))
    check_required_tokens(Settings(grpc_management_address="0.0.0.0", management_token="x"))
    check_required_tokens(Settings(grpc_management_address="0.0.0.0", enable_grpc=False))
    check_required_tokens(
        Settings(grpc_inference_address="::1", grpc_management_address="localhost")
    )


@pytest.mark.parametrize("value", ["http://127.0.0.1", "127.0.0.1:7070", "a b", ""])
def test_a_grpc_address_is_only_a_host(value: str) -> None:
    with pytest.raises(SettingError, match="grpc_inference_address"):
        load_settings({"grpc_inference_address": value}, {})


def test_brackets_around_an_address_are_optional() -> None:
    settings, _ = load_settings({"grpc_inference_address": "[::1]"}, {})
    assert settings.grpc_inference_address == "::1"
    assert str(grpc_addresses(settings)[0][0].host) == "::1"


def test_grpc_listeners_and_limits_follow_the_settings() -> None:
    settings = Settings(
        grpc_inference_address="0.0.0.0",
        grpc_inference_port=9070,
        grpc_management_address="127.0.0.2",
        grpc_management_port=9071,
        enable_grpc_ssl=True,
        max_request_size=1234,
    )
    assert [(str(address), roles) for address, roles in grpc_addresses(settings)] == [
        ("grpcs://0.0.0.0:9070", ["grpc_inference"]),
        ("grpcs://127.0.0.2:9071", ["grpc_management"]),
    ]
    assert dict(build_channel_options(settings))["grpc.max_receive_message_length"] == 1234


def test_the_default_grpc_addresses_are_local() -> None:
    addresses = [str(address) for address, _ in grpc_addresses(Settings())]
    assert addresses == ["grpc://127.0.0.1:7070", "grpc://127.0.0.1:7071"]


def test_tls_needs_a_certificate() -> None:
    with pytest.raises(SettingError, match="enable_grpc_ssl is True, so certificate_file"):
        read_pem(Settings(enable_grpc_ssl=True), "enable_grpc_ssl")
