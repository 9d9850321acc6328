"""The servers of gRPC as wholes: tokens, TLS, ages of connections, ports, the end, and life without
the extra.
"""

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

from tests.runtime.grpc.conftest import TIMEOUT, Client, connected
from tests.support.certificates import Pair, make_certificate
from tests.support.servers import FREE_GRPC_PORTS, FREE_PORTS, Running, serving, started
from tsx_runtime.api.access.auth import required_tokens
from tsx_runtime.errors import SettingError
from tsx_runtime.grpc.server import options
from tsx_runtime.settings.schema import Settings
from tsx_runtime.settings.sources import load_settings
from tsx_runtime.targets.server.grpc_listeners import check_free, grpc_addresses
from tsx_runtime.targets.server.tls import read_pem

TOKENS = {"inference": "for-predictions", "management": "for-models"}


@pytest.fixture(scope="module")
def guarded(
    processes: None, store: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Running, Pair]]:
    """With TLS, tokens, and connections for managing that live for a second."""
    directory = tmp_path_factory.mktemp("guarded")
    pair = make_certificate(directory)
    environment = {
        "TSX_CACHE_DIR": str(directory / "cache"),
        "TSX_STATE_DIR": str(directory / "state"),
        "TSX_WORKER_PRELOAD": "false",
        "TSX_ENABLE_GRPC_SSL": "true",
        "TSX_CERTIFICATE_FILE": str(pair.certificate),
        "TSX_PRIVATE_KEY_FILE": str(pair.key),
        "TSX_INFERENCE_TOKEN": TOKENS["inference"],
        "TSX_MANAGEMENT_TOKEN": TOKENS["management"],
        "TSX_ACCESS_LOG": "true",
        "TSX_ENABLE_MODEL_API": "false",
        "TSX_GRPC_MANAGEMENT_MAX_CONNECTION_AGE_MS": "1000",
        "TSX_GRPC_MANAGEMENT_MAX_CONNECTION_AGE_GRACE_MS": "1000",
    }
    with serving(
        ["serve", store / "talker.mar", "--model-store", store, *FREE_PORTS, *FREE_GRPC_PORTS],
        directory,
        environment,
    ) as running:
        yield running, pair


@pytest.fixture(scope="module")
def client(guarded: tuple[Running, Pair], generated: dict[str, Any]) -> Iterator[Client]:
    running, pair = guarded
    credentials = grpc.ssl_channel_credentials(pair.certificate.read_bytes())
    made = connected(
        running,
        generated,
        lambda target: grpc.secure_channel(target.replace("127.0.0.1", "localhost"), credentials),
    )
    yield made
    made.inference_channel.close()
    made.management_channel.close()


def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    assert "for-" not in caught.value.details()
    return caught.value.code()


def test_models_are_neither_registered_nor_removed_where_rest_does_not(client: Client) -> None:
    metadata = (("authorization", "Bearer for-models"),)
    requests = (
        client.management.RegisterModelRequest(url="talker2.mar"),
        client.management.UnregisterModelRequest(model_name="talker"),
    )
    for call, request in zip(
        (client.models.RegisterModel, client.models.UnregisterModel), requests, strict=True
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call(request, metadata=metadata, timeout=TIMEOUT)
        assert (caught.value.code(), caught.value.details()) == (
            grpc.StatusCode.PERMISSION_DENIED,
            "Model API disabled\norg.pytorch.serve.archive.model.ModelException",
        )


def test_the_access_log_has_a_line_for_each_call_with_grpc_s_status(
    guarded: tuple[Running, Pair], client: Client, until: Any
) -> None:
    client.ask(metadata=(("authorization", "Bearer for-predictions"),))
    code_of(client.ask)

    def reported() -> set[tuple[int, str, bool]]:
        whole = [
            line
            for line in guarded[0].log.splitlines()
            if '"ACCESS_LOG"' in line and line.endswith("}")
        ]
        lines = [json.loads(line) for line in whole]
        call = "gRPC org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions HTTP/2.0"
        return {
            (line["status"], line.get("model"), "request_id" in line)
            for line in lines
            if line["message"] == call
        }

    ok, denied = (code.value[0] for code in (grpc.StatusCode.OK, grpc.StatusCode.PERMISSION_DENIED))
    until(
        lambda: reported() >= {(ok, "talker", True), (denied, None, False)}
    )  # refused before its message
    assert "for-predictions" not in guarded[0].log


def test_who_does_not_speak_tls_is_not_answered(
    guarded: tuple[Running, Pair], generated: dict[str, Any]
) -> None:
    with grpc.insecure_channel(guarded[0].address("gRPC predictions")) as channel:
        stub = generated["inference_pb2_grpc"].InferenceAPIsServiceStub(channel)
        request = generated["inference_pb2"].PredictionsRequest(model_name="talker")
        assert (
            code_of(lambda: stub.Predictions(request, timeout=TIMEOUT))
            is grpc.StatusCode.UNAVAILABLE
        )


def test_a_stop_answers_what_has_begun_and_tells_who_watches(
    store: Path, tmp_path: Path, generated: dict[str, Any], until: Any
) -> None:
    environment = {"TSX_CACHE_DIR": str(tmp_path / "cache"), "TSX_WORKER_PRELOAD": "false"}
    words = ["serve", store / "talker.mar", *FREE_PORTS, *FREE_GRPC_PORTS]
    with serving(words, tmp_path, environment) as running:
        client = connected(running, generated, grpc.insecure_channel)
        begun, file = tmp_path / "begun", tmp_path / "go"
        inputs = {"do": b"wait", "begun": str(begun).encode(), "file": str(file).encode()}
        answer = client.predictions.Predictions.future(
            client.messages.PredictionsRequest(model_name="talker", input=inputs), timeout=TIMEOUT
        )
        until(begun.exists)
        watched = HealthStub(client.inference_channel).Watch(HealthCheckRequest(), timeout=TIMEOUT)
        assert next(watched).status == HealthCheckResponse.SERVING
        running.process.send_signal(signal.SIGTERM)
        assert next(watched).status == HealthCheckResponse.NOT_SERVING
        file.touch()
        assert answer.result(TIMEOUT).prediction == b"waited"
        assert list(watched) == []
        assert running.process.wait(TIMEOUT) == 0


def test_one_port_for_both_has_both_services(
    store: Path, tmp_path: Path, generated: dict[str, Any], free_ports: Any
) -> None:
    (port,) = free_ports(1)
    environment = {"TSX_CACHE_DIR": str(tmp_path / "cache"), "TSX_WORKER_PRELOAD": "false"}
    ports = ["--set", "enable_grpc=true", "--grpc-port", port, "--grpc-management-port", port]
    with serving(
        ["serve", store / "talker.mar", *FREE_PORTS, *ports], tmp_path, environment
    ) as running:
        assert (
            running.address("gRPC predictions")
            == running.address("gRPC models")
            == f"127.0.0.1:{port}"
        )
        client = connected(running, generated, grpc.insecure_channel)
        assert client.ask()[0]
        assert (
            "talker"
            in client.models.ListModels(client.management.ListModelsRequest(), timeout=TIMEOUT).msg
        )
        with pytest.raises(
            SettingError,
            match=rf"Port {port} on 127.0.0.1 is in use \(grpc_inference_port and grpc_management_port\)",
        ):
            check_free(
                grpc_addresses(Settings(grpc_inference_port=port, grpc_management_port=port))
            )


@pytest.mark.usefixtures("processes")
def test_without_the_extra_rest_is_served_and_the_way_to_grpc_is_reported_once(
    store: Path, tmp_path: Path
) -> None:
    without = "import sys; sys.modules['grpc'] = None; from tsx_cli.main import main; sys.exit(main(sys.argv[1:]))"
    environment = {
        "TSX_CACHE_DIR": str(tmp_path / "cache"),
        "TSX_WORKER_PRELOAD": "false",
        "TSX_ENABLE_GRPC": "true",
    }
    command = [sys.executable, "-c", without, "serve", str(store / "talker.mar"), *FREE_PORTS]
    with started(command, tmp_path, environment) as running:
        assert not any("gRPC" in line for line in running.lines)
        assert (
            len(re.findall(r"gRPC is not served.*pip install 'tsx-serve\[grpc\]'", running.log))
            == 1
        )


def test_who_asks_for_grpc_and_lacks_it_is_warned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "grpc_health", None)
    with caplog.at_level(logging.INFO):
        assert grpc_addresses(Settings()) == []
        assert grpc_addresses(Settings(grpc_inference_port=7070)) == []
        assert grpc_addresses(Settings(enable_grpc=False)) == []
    assert [record.levelno for record in caplog.records] == [logging.INFO, logging.WARNING]


def test_an_open_address_needs_a_token() -> None:
    with pytest.raises(
        SettingError,
        match=r"grpc_management_address is 0\.0\.0\.0, .* management_token must be set",
    ):
        required_tokens(Settings(grpc_management_address="0.0.0.0"))
    required_tokens(Settings(grpc_management_address="0.0.0.0", management_token="x"))
    required_tokens(Settings(grpc_management_address="0.0.0.0", enable_grpc=False))
    required_tokens(Settings(grpc_inference_address="::1", grpc_management_address="localhost"))


@pytest.mark.parametrize("value", ["http://127.0.0.1", "127.0.0.1:7070", "a b", ""])
def test_an_address_of_grpc_is_a_host_alone(value: str) -> None:
    with pytest.raises(SettingError, match="it takes a host name or address, without a port"):
        load_settings({"grpc_inference_address": value}, {})


def test_an_address_in_brackets_is_the_same_without() -> None:
    settings, _ = load_settings({"grpc_inference_address": "[::1]"}, {})
    assert settings.grpc_inference_address == "::1"
    assert str(grpc_addresses(settings)[0][0].host) == "::1"


def test_torchserve_s_keys_are_read_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "config.properties"
    keys = {
        "grpc_inference_address": "0.0.0.0",
        "grpc_inference_port": "9070",
        "grpc_management_address": "127.0.0.2",
        "grpc_management_port": "9071",
        "enable_grpc_ssl": "true",
        "max_request_size": "1234",
    }
    file.write_text("".join(f"{key}={value}\n" for key, value in keys.items()))
    reported: list[str] = []
    settings, _ = load_settings({}, {}, file, reported.append)
    assert reported == []
    assert {key: str(getattr(settings, key)).lower() for key in keys} == keys
    assert [(str(address), roles) for address, roles in grpc_addresses(settings)] == [
        ("grpcs://0.0.0.0:9070", ["grpc_inference"]),
        ("grpcs://127.0.0.2:9071", ["grpc_management"]),
    ]
    assert dict(options(settings))["grpc.max_receive_message_length"] == 1234


def test_nothing_is_open_to_other_machines_unless_it_is_asked_for() -> None:
    assert [address.host for address, _ in grpc_addresses(Settings())] == ["127.0.0.1", "127.0.0.1"]
    assert [address.port for address, _ in grpc_addresses(Settings())] == [7070, 7071]


def test_tls_needs_a_certificate() -> None:
    with pytest.raises(
        SettingError,
        match="enable_grpc_ssl is True, so certificate_file and private_key_file must be set",
    ):
        read_pem(Settings(enable_grpc_ssl=True), "enable_grpc_ssl")


@pytest.mark.parametrize("absent", ["grpc", "google", "grpc_reflection"])
def test_where_a_package_of_the_extra_is_missing_grpc_is_not_served_and_the_log_says_how_to_get_it(
    absent: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, absent, None)
    for name in [name for name in sys.modules if name.startswith(f"{absent}.")]:
        monkeypatch.delitem(sys.modules, name)
    with caplog.at_level("INFO"):
        assert grpc_addresses(Settings()) == []
    missing = "google.protobuf" if absent == "google" else absent
    assert (
        f"gRPC is not served: {missing} is not installed. Install it: pip install 'tsx-serve[grpc]'"
        in caplog.text
    )
