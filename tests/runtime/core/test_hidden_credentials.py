"""Server secrets and cloud credentials that the code of a model must not find."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.support.models import make_model
from tests.support.servers import FREE_PORTS, environment_of, serving
from tsx_runtime.api.headers import shown_headers
from tsx_runtime.core.hidden_credentials import (
    CREDENTIALS,
    SERVER_SECRETS,
    HiddenHeaders,
    hidden_from_children,
    hidden_variables,
    passed_variables,
)
from tsx_runtime.core.workers.launch import Launch
from tsx_runtime.core.workers.subprocesses import start_program
from tsx_runtime.metrics.host import System
from tsx_runtime.settings.schema import SECRETS, Settings
from tsx_runtime.wire import TENANT_HEADER

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

SECRET_VALUE = "known-to-nobody"
TOKENS = ("INFERENCE_TOKEN", "MANAGEMENT_TOKEN", "KEYSTORE_PASS")
CLOUD = """AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN AWS_CONTAINER_CREDENTIALS_FULL_URI
AWS_WEB_IDENTITY_TOKEN_FILE GOOGLE_APPLICATION_CREDENTIALS AZURE_CLIENT_SECRET HF_TOKEN
GITHUB_TOKEN TS_MANAGEMENT_TOKEN KUBECONFIG OTEL_EXPORTER_OTLP_HEADERS"""
SECRET_VARIABLES = {f"TSX_{name}": SECRET_VALUE + "-token" for name in TOKENS} | dict.fromkeys(
    CLOUD.split(), SECRET_VALUE
)
SPY = """
import json, os, subprocess

def handle(data, context):
    if data is None:
        return None
    child = subprocess.run(["env"], capture_output=True, text=True).stdout
    blocks = [open(f"/proc/{pid}/environ").read() for pid in ("self", os.getppid())]
    found = {"os": dict(os.environ), "child": child, "blocks": blocks}
    return [json.dumps(found) for _ in data]
"""


@pytest.mark.usefixtures("processes")
def test_a_handler_finds_none_of_the_servers_credentials(tmp_path: Path) -> None:
    for name in ("spy", "trusted"):
        make_model(tmp_path / f"{name}.mar", SPY)
    (tmp_path / "tsx.toml").write_text(
        'model_store = "."\n[models.trusted]\npass_env = ["HF_TOKEN"]\n'
    )
    environment = {**SECRET_VARIABLES, "TSX_CACHE_DIR": str(tmp_path / "cache"), "HARMLESS": "seen"}
    with serving(
        ["serve", "spy.mar", "trusted.mar", *FREE_PORTS], tmp_path, environment
    ) as server_process:
        answers = {
            name: predict(server_process.address("predictions"), name)
            for name in ("spy", "trusted")
        }
        assert SECRET_VALUE not in server_process.log
        assert "pass_env names them: AWS_" in server_process.log
    assert SECRET_VALUE not in answers["spy"]
    assert json.loads(answers["spy"])["os"]["HARMLESS"] == "seen"
    trusted_variables = json.loads(answers["trusted"])["os"]
    assert {name for name, value in trusted_variables.items() if SECRET_VALUE in value} == {
        "HF_TOKEN"
    }


def predict(address: str, model: str) -> str:
    request = urllib.request.Request(
        f"{address}/predictions/{model}",
        b"x",
        {"Authorization": f"Bearer {SECRET_VARIABLES['TSX_INFERENCE_TOKEN']}"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(answer.read(), "utf-8")


@pytest.mark.usefixtures("processes")
def test_a_worker_program_is_started_without_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the launcher of workers with their own environment or with torchrun."""
    set_secrets(monkeypatch)
    program, front_socket = start_program(Launch(), None, hidden_variables(Settings(), os.environ))
    with front_socket:
        block = environment_of(program.pid)
        program.kill()
    asyncio.run(program.ended())
    assert block["HARMLESS"] == "seen"
    assert not SECRET_VARIABLES.keys() & block.keys()


@pytest.mark.usefixtures("processes")
def test_a_spawned_worker_is_started_without_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    set_secrets(monkeypatch)
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    with hidden_from_children(hidden_variables(Settings(), os.environ), os.environ):
        process.start()
    assert process.pid is not None
    block = environment_of(process.pid)
    process.kill()
    process.join()
    assert process.exitcode == -9
    assert block["HARMLESS"] == "seen"
    assert not SECRET_VARIABLES.keys() & block.keys()


@pytest.mark.usefixtures("processes")
def test_the_system_metrics_program_is_started_without_credentials(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_secrets(monkeypatch)
    system = System(Settings(system_metrics_cmd=f"sh -c 'env > {tmp_path}/env'"))
    asyncio.run(system._run(system._command or ""))
    variables_seen = (tmp_path / "env").read_text()
    assert "HARMLESS=seen" in variables_seen
    assert SECRET_VALUE not in variables_seen


def set_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**SECRET_VARIABLES, "HARMLESS": "seen"}.items():
        monkeypatch.setenv(name, value)


def test_patterns_expose_credentials_but_never_the_servers_secrets() -> None:
    def hidden_names(*names: str, **settings: Any) -> list[str]:
        return hidden_variables(Settings(**settings), names)

    assert hidden_names(*SECRET_VARIABLES) == list(SECRET_VARIABLES)
    assert hidden_names(*SECRET_VARIABLES, pass_env=["*"]) == [
        name for name in SECRET_VARIABLES if name in SERVER_SECRETS
    ]
    # These are meant for the handler, or hold no secret.
    assert hidden_names("DB_PASSWORD", "OPENAI_API_KEY", "PATH", "MAX_NEW_TOKENS", "HF_HOME") == []
    assert hidden_names("HOME", "PATH", blacklist_env_vars="HOM.|ATH") == ["HOME"]
    assert hidden_names("HF_TOKEN", pass_env=["*"], blacklist_env_vars="HF_.*") == ["HF_TOKEN"]
    assert hidden_names("AWS_SESSION_TOKEN", "HF_TOKEN", pass_env=["AWS_*"]) == ["HF_TOKEN"]
    token = "TSX_INFERENCE_TOKEN"
    assert hidden_names(token, pass_env=[token]) == []


def test_a_variable_exposed_to_one_model_is_hidden_from_others() -> None:
    settings = Settings.model_validate(
        {"models": {"m": {"pass_env": ["AWS_*", "TSX_*"]}}, "blacklist_env_vars": "AWS_SESSION.*"}
    )
    assert passed_variables(settings, "m", SECRET_VARIABLES).keys() == {
        name for name in SECRET_VARIABLES if name.startswith("AWS_")
    } - {"AWS_SESSION_TOKEN"}
    assert passed_variables(settings, "other", SECRET_VARIABLES) == {}


def test_every_secret_setting_is_a_server_secret() -> None:
    assert {f"TSX_{name.upper()}" for name in SECRETS} < set(SERVER_SECRETS)


def test_the_documentation_lists_the_hidden_variables() -> None:
    page = (Path(__file__).parents[3] / "docs" / "guides" / "security.md").read_text()
    assert [pattern for pattern in CREDENTIALS if f"`{pattern}`" not in page] == []


def test_the_tenant_header_tells_credentials_apart_without_showing_them() -> None:
    hidden_headers = HiddenHeaders(Settings())
    hidden_headers.separate_tenants("writer")
    names = hidden_headers.for_model("writer")

    def tenant(*headers: tuple[bytes, bytes]) -> bytes:
        shown = shown_headers(headers, names)
        assert not {name for name, _ in shown} & {b"Authorization", b"cookie"}
        ((_, value),) = [pair for pair in shown if pair[0] == TENANT_HEADER]
        assert shown_headers(shown, names) == shown  # as for a stored request
        return value

    ann, bob = (b"Authorization", b"Bearer ann"), (b"authorization", b"Bearer bob")
    values = [tenant(), tenant(ann), tenant(bob), tenant(bob, (b"X-Api-Key", b"1"))]
    assert len(set(values)) == 4
    assert tenant((b"accept", b"*/*")) == values[0]
    assert tenant((b"accept", b"*/*"), (ann[0].lower(), ann[1])) == values[1]
    assert shown_headers([ann], hidden_headers.for_model("other")) == []
